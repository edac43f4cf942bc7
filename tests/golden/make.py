"""Writes the golden journal of a version: `python tests/golden/make.py 0.1.0`.

It is run once, when a version is finished, and its files are committed. They are never written again: whatever
comes later must be able to read them.
"""

import asyncio
import base64
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from halter.core.clock import DAY, SECOND
from halter.core.events import FORMAT
from halter.core.ids import StreamId
from halter.drills.plan import plan
from halter.drills.workload import Told, Workload
from halter.journal.rebuild import rebuilt
from halter.journal.sqlite import SqliteEngine
from halter.journal.store import JournalStore
from halter.state.receipt import receipt
from halter.state.session import replay
from halter.testing.crash import Crash, Crashed, CrashingStore
from halter.testing.fakes import ManualClock, SeededIds, seeded_salts

START = 1_767_225_600 * SECOND
BLOB_BYTES = 500
DEATHS = {"finished": None, "in-doubt": 6, "delegating": 71}
"""At which commit the owner of each session dies: never, with two calls in flight, with a sub-session at work."""


async def fill(path: Path) -> JournalStore:
    """Run the sessions of the drills with fixed times, ids and salts; some of their owners die."""
    clock = ManualClock(START)
    engine = SqliteEngine(str(path), now=clock.now, new_id=SeededIds("golden", clock.now).new, lease=DAY)
    store = JournalStore(engine, inline=True, salt=seeded_salts("golden"))

    def tick(_: Sequence[Told]) -> None:
        clock.advance(SECOND)

    for session, commit in DEATHS.items():
        mortal = CrashingStore(store, Crash(commit, "after") if commit else None)
        try:
            await Workload(mortal, clock, f"worker of {session}", session, tick).run(plan(session, BLOB_BYTES))
        except Crashed:
            clock.advance(SECOND)
    return store


async def expected(store: JournalStore) -> dict[str, Any]:
    """Say what this version makes of the journal: states, receipts and rows."""
    made: dict[str, Any] = {"format": FORMAT, "states": {}, "receipts": {}, "rows": {}}
    for row in await store.study(lambda view: view.ask("all_sessions", {})):
        events = await store.read(StreamId(f"session:{row['session']}"))
        made["states"][row["session"]] = msgspec.to_builtins(replay(events))
        made["receipts"][row["session"]] = msgspec.to_builtins(receipt(events))
    for row in (await rebuilt(store)).values():
        made["rows"].setdefault(row.TABLE, []).append(msgspec.to_builtins(row))
    return made


def exported(path: Path) -> str:
    """Write every event as one line of JSON, with its columns as they are kept and bytes as base64."""
    with closing(sqlite3.connect(path)) as connection:
        cursor = connection.execute("SELECT * FROM events ORDER BY position")
        names = [column[0] for column in cursor.description]
        return "".join(f"{_line(dict(zip(names, row, strict=True)))}\n" for row in cursor)


def _line(columns: dict[str, Any]) -> str:
    plain = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in columns.items()
    }
    return msgspec.json.encode(plain).decode()


async def write(folder: Path) -> None:
    """Fill the store of a version, and say what that version makes of it."""
    store = await fill(folder / "store.db")
    told = msgspec.json.format(msgspec.json.encode(await expected(store)), indent=1)
    await store.close()
    (folder / "expected.json").write_bytes(told)
    (folder / "journal.jsonl").write_text(exported(folder / "store.db"), "utf-8")


def main(version: str) -> None:
    """Write the files of a version that has none yet."""
    folder = Path(__file__).parent / version
    if folder.exists():
        sys.exit(f"{folder} exists already. A golden journal is never written again: give the next version.")
    folder.mkdir()
    asyncio.run(write(folder))


if __name__ == "__main__":
    main(sys.argv[1])

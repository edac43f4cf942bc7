"""A real `halter up` is killed repeatedly while it reviews documents: each is reviewed exactly once."""

import asyncio
import json
import math
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from halter.core.clock import SystemClock
from halter.core.ids import session_stream
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.state.receipt import Receipt, make_receipt
from halter_drills.checker import check, read_store
from halter_drills.drill import engine
from halter_drills.faults import NO_LEASE
from tests.processes import Halter
from tests.story.tasks import PRICED, REVIEW, SCRIPT, paper, watch

OUR_CODE: Final = Path(__file__).parents[2] / "src"


def write_agent(home: Path, documents: int) -> None:
    """Write an agent's folder with documents in it; the first two say the same."""
    inbox = home / "clerk" / "inbox"
    inbox.mkdir(parents=True)
    (home / "clerk" / "agent.yaml").write_text(f"name: clerk\n{REVIEW}{watch('debounce: 0s')}")
    (home / "clerk" / "script.yaml").write_text(SCRIPT)
    (home / "halter.yaml").write_text(PRICED)
    for number in range(documents):
        (inbox / f"{number}.txt").write_text(paper(max(number, 1)))


@contextmanager
def run_program(home: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the program as a person would, and yield its log records; kill it at the end of the block."""
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(OUR_CODE),
        "HOME": str(home),
        "USER": "ada",
        "HALTER_FLEET": str(home / "halter.yaml"),
    }
    with Halter(("up", "clerk", "--json", "--store", str(home / "store.db")), cwd=home, env=environ) as process:
        assert process.stdout is not None
        try:
            yield (json.loads(line) for line in process.stdout)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def count_ended(home: Path) -> int:
    """Count the sessions that have ended."""
    with closing(sqlite3.connect(home / "store.db")) as file:
        return file.execute("SELECT COUNT(*) FROM sessions WHERE ended_at IS NOT NULL").fetchone()[0]


def expire_workers(home: Path) -> None:
    """Mark killed workers as dead, so that nobody waits until their leases expire."""
    with closing(sqlite3.connect(home / "store.db")) as file, file:
        file.execute("UPDATE workers SET alive_until = 0")


def review_with_kills(home: Path, documents: int, kills: list[int]) -> None:
    """Run one process after another, each killed after its number of lines, and the last one to the end."""
    write_agent(home, documents)
    for lines in (*kills, math.inf):
        with run_program(home) as fields:
            for number, line in enumerate(fields, 1):
                if number >= lines or (line["name"] == "session_ended" and count_ended(home) == documents - 1):
                    break
        expire_workers(home)
        if count_ended(home) == documents - 1:
            # A process does not wait for its reader: one that was due to be killed may have finished the rest.
            return


def find_wrong(home: Path, contents: int) -> list[str]:
    """Find what is wrong in the store after the last process."""
    url = f"sqlite://{home}/store.db"
    return [*asyncio.run(_find_wrong(url, contents)), *check(read_store(url))]


async def _find_wrong(url: str, contents: int) -> list[str]:
    store = JournalStore(engine(url, SystemClock(), NO_LEASE))
    try:
        rows = await store.ask(Query("all_sessions", SessionRow))
        texts = [str(finding) for finding in (await verify_store(store)).findings]
        if Counter(row.state for row in rows) != {"COMPLETED": contents}:
            texts.append(f"The sessions are {Counter(row.state for row in rows)}.")
        for row in rows:
            events = await store.read(session_stream(row.session), limit=100_000)
            kinds = Counter(event.kind for event in events)
            once = {kind: kinds[kind] for kind in ("finding_emitted", "finding_reviewed", "notification_queued")}
            if set(once.values()) != {1} or kinds["phase_entered"] != 5 or kinds["turn_started"] != 4:
                texts.append(f"{row.session} did {once}.")
            texts += _flaws(make_receipt(events))
        return texts
    finally:
        await store.close()


def _flaws(receipt: Receipt) -> Iterator[str]:
    if receipt.in_doubt or receipt.ended_at is None:
        yield f"{receipt.session} has {receipt.in_doubt} in doubt."
    if receipt.cost_usd != sum(line.cost_usd for line in receipt.requests):
        yield f"{receipt.session} cost {receipt.cost_usd}, and its requests something else."


KILLS: Final = [
    pytest.param(12, [9, 60, 30, 90], id="twelve"),
    # A session that was running when ten processes in a row died would be quarantined.
    pytest.param(50, random.Random(5).choices(range(5, 200), k=8), id="fifty", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("documents", "kills"), KILLS)
def test_documents_are_each_reviewed_once_however_often_the_process_is_killed(
    documents: int, kills: list[int], tmp_path: Path
) -> None:
    review_with_kills(tmp_path, documents, kills)
    assert find_wrong(tmp_path, documents - 1) == []

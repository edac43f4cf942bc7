"""A real process that runs an autonomous agent is killed at its events: the next one resumes and repeats nothing.

The agent reads how often it has sent, sends until that is enough, and shuts itself down. What it sent is counted in a
file outside of the store.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import pytest

from halter.config.trust import digest_folder
from halter.core.clock import SECOND, SystemClock
from halter.core.ids import SortableIds, session_stream
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.ledger import Ledger
from halter.journal.store import JournalStore
from halter.journal.verify import verify_store
from halter.runtime.assembly.folder_code import open_trust
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.supervisor import Supervisor
from halter.settings import Settings, read_settings
from halter.state.receipt import make_receipt
from halter.state.receipt_lines import ReceiptLine
from halter_drills.checker import check, read_store
from halter_drills.children import Child, Pipe, children
from halter_drills.drill import engine
from halter_drills.faults import NO_LEASE

AGENT: Final = """
name: watch
model: reflex
reflex: rules.yaml
policy: {provenance: off}
autonomy: {enabled: true, min_sleep: 0.05, idle_timeout: 0}
hot_state:
  fields:
    sent: {type: integer, refresh_tool: sent, auto_refresh: true, ttl: 0.01}
sensors:
  - name: ticker
    type: poll
    interval: 0.2
    source: {tool: sent}
    signals: [{name: enough, expression: value > 1, notify: true}]
"""
RULES: Final = """
- when: hot.sent >= 3
  yield: {mode: shutdown, reason: that is enough}
- call: {tool: send}
  yield: {mode: sleep, sleep: 0.1}
"""
TOOLS: Final = """
from pathlib import Path

from halter import tool

OUTSIDE = Path(__file__).parent.parent / "outside"

@tool(level="SAFE")
async def send() -> str:
    "Send something."
    with OUTSIDE.open("a") as file:
        file.write("sent\\n")
    return "sent"

@tool(level="SAFE", effect="read")
async def sent() -> str:
    "Count what was sent."
    return str(len(OUTSIDE.read_text().splitlines()))
"""
SESSION: Final = "watch-1"
ENOUGH: Final = 3
PATIENCE: Final = 20


def write_agent(home: Path) -> Path:
    """Write the agent's folder, and trust it."""
    folder = home / "watch"
    folder.mkdir()
    for name, text in (("agent.yaml", AGENT), ("rules.yaml", RULES), ("tools.py", TOOLS)):
        (folder / name).write_text(text)
    (home / "outside").touch()
    open_trust(make_settings(home)).trust(folder, digest_folder(folder), "ada", 0)
    return folder


def make_settings(home: Path) -> Settings:
    return read_settings({"HALTER_TRUST": str(home / "trust.json"), "USER": "ada"}, home, str(home / "store.db"))


def count_sent(home: Path) -> int:
    return len((home / "outside").read_text().splitlines())


class Executioner:
    """Sees every event that is durable, and kills its own process right after one of them."""

    interval_seconds = 3600.0

    def __init__(self, last: int | None) -> None:
        self.seen = 0
        self._last = last

    def on_commit(self, events: Sequence[Stored]) -> None:
        self.seen += len(events)
        if self._last is not None and self.seen >= self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def flush(self) -> None:
        """Nothing is put off."""


def run_agent(pipe: Pipe, home: Path, last: int | None) -> None:
    """Run the agent until its session ends, and send the number of events; or be killed at one of them."""
    pipe.send(asyncio.run(_run_agent(home, last)))


async def _run_agent(home: Path, last: int | None) -> int:
    clock, watching = SystemClock(), Executioner(last)
    store = JournalStore(engine(f"sqlite://{home}/store.db", clock, NO_LEASE), observers=[watching])
    places = make_settings(home)
    ids, ledger, policy = SortableIds(clock.now), Ledger(store, clock), use_local_policy(places)
    app = Runtime(places, clock, ids, store, cast("Any", None), ledger, {}, policy=policy)
    running = asyncio.create_task(Supervisor(app, lambda _, __: None).run([home / "watch"]))
    async with asyncio.timeout(PATIENCE):
        while not await has_ended(store):
            await answer_in_doubt(store, home)
            await clock.sleep(SECOND // 50)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await store.close()
    return watching.seen


async def has_ended(store: JournalStore) -> bool:
    rows = await store.ask(Query("session", SessionRow, {"session": SESSION}))
    return any(row.ended_at is not None for row in rows)


async def answer_in_doubt(store: JournalStore, home: Path) -> None:
    """Say truly whether a call in doubt was made: then one more was sent than is known of."""
    for waiting in await list_pending_decisions(store):
        receipt_lines = [line for line in await list_calls(store) if line.name == "send" and line.outcome == "ok"]
        verdict = "approve" if count_sent(home) > len(receipt_lines) else "deny"
        await store.commit(answer_decision(waiting, verdict, "ada", f"answer {waiting.decision}"))


async def list_calls(store: JournalStore) -> Sequence[ReceiptLine]:
    return make_receipt(await store.read(session_stream(SESSION), limit=100_000)).calls


def find_wrong(home: Path) -> list[str]:
    """Find what is wrong in the store after the last process."""
    url = f"sqlite://{home}/store.db"
    return [*asyncio.run(_find_wrong(url, home)), *check(read_store(url))]


async def _find_wrong(url: str, home: Path) -> list[str]:
    store = JournalStore(engine(url, SystemClock(), NO_LEASE))
    try:
        receipt = make_receipt(await store.read(session_stream(SESSION), limit=100_000))
        known_count = sum(line.name == "send" and line.outcome == "ok" for line in receipt.calls)
        texts = [str(finding) for finding in (await verify_store(store)).findings]
        if (receipt.state, receipt.in_doubt) != ("COMPLETED", ()):
            texts.append(f"It is {receipt.state}, with {receipt.in_doubt} in doubt.")
        if not known_count == count_sent(home) == ENOUGH:
            texts.append(f"It sent {count_sent(home)} times, and knows of {known_count}.")
        return texts
    finally:
        await store.close()


def run_lives(home: Path, *lasts: int | None) -> int:
    """Run one process after another, each to its own end; return the number of events that the last one wrote."""
    home.mkdir()
    write_agent(home)
    with children(__name__) as started:
        children_started: list[Child] = []
        for last in lasts:
            children_started.append(started.start(run_agent, home, last))
            if last is not None:
                children_started[-1].receive_all()
                children_started[-1].expect_killed()
        return children_started[-1].receive()


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_an_agent_that_is_killed_at_any_event_is_resumed_by_the_next_process(every: int, tmp_path: Path) -> None:
    events = run_lives(tmp_path / "whole", None)
    assert events > 30
    assert find_wrong(tmp_path / "whole") == []
    for last in range(1, events, every):
        run_lives(tmp_path / f"{last}", last, None)
        assert find_wrong(tmp_path / f"{last}") == [], last


def test_an_agent_that_is_killed_again_and_again_still_comes_to_its_end(tmp_path: Path) -> None:
    run_lives(tmp_path / "store", 5, 9, 9, 9, 9, None)
    assert find_wrong(tmp_path / "store") == []

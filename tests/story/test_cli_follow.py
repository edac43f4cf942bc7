"""Following a store while it is written: the audit to sinks that must miss nothing, and events to people who watch."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from halter.cli.commands import build_command_tree
from halter.cli.files import open_sink
from halter.cli.inspect.show import format_event_line
from halter.cli.trust.audit import read_settled_calls
from halter.cli.trust.audit_cursor import ReadPosition, read_cursor, write_cursor
from halter.core.clock import Clock
from halter.core.errors import ConfigError
from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallSettled,
    CallStarted,
    DecisionAsked,
    SessionEnded,
    SessionStarted,
)
from halter.core.ids import FLEET, SessionId, StreamId, WorkerId, session_stream
from halter.core.ports import ALL_STREAMS, Change, Draft, Lease, Query, Store, Write, matters_always
from halter.core.rows import AuditRow, DecisionRow
from halter.guard.approvals import PendingDecision
from halter.journal.open import open_engine
from halter.journal.store import JournalStore
from halter.runtime.feed import POLLING_INTERVAL, Follower, watch_growth
from halter.state import lifecycle
from halter.testing.fakes import ManualClock, SeededIds

KEYS = {
    *("tool", "input_summary", "output_summary", "capability_level", "risk_level", "decision", "decided_by"),
    *("outcome", "cost_usd", "duration_ms", "session", "call", "agent", "created_at"),
    *("started_by", "trigger", "trigger_type", "parent", "parent_agent", "error"),
}


class Desk:
    """A store in a file on which sessions make audited calls, and the commands that are typed at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "store.db"
        self.clock = ManualClock(1_767_225_600_000_000)
        numbers = itertools.count()
        self.make = lambda: f"id{next(numbers)}"
        engine = open_engine(str(self.file), clock=self.clock, ids=self)
        self.store = JournalStore(engine, inline=True)
        self.leases: dict[str, Lease] = {}

    async def start(self, *sessions: str) -> None:
        for session in sessions:
            event = SessionStarted(session=session, agent="clerk", kind="task", started_by="ada")
            await self.store.commit(lifecycle.start_session(event))
            (self.leases[session],) = await self.store.claim(WorkerId("w"), 1, SessionId(session))

    async def write(self, session: str, event: AnyEvent, body: bytes = b"", call: str = "") -> None:
        reads = [(AuditRow, call)] if call else []
        write = Write(session_stream(session), self.make(), lambda _: [Draft(event, body)], reads, self.leases[session])
        await self.store.commit(write)

    async def begin(self, session: str, call: str) -> None:
        event = CallStarted(call=call, tool="send", level="RESTRICTED", risk="LOW", audit="full", decided_by="ada")
        await self.write(session, event, b'{"to":"bob"}', call)

    async def settle(self, session: str, call: str, body: bytes = b"sent") -> None:
        await self.write(session, CallSettled(call=call, outcome="ok", audited=True, duration_ms=7), body, call)

    async def refuse(self, session: str, call: str) -> None:
        no = CallRefused(call=call, tool="send", outcome="rate_limited", sentence="Too often.", level="RESTRICTED")
        await self.write(session, no, b'{"to":"bob"}', call)

    def halter(self, *words: str) -> str:
        environ = {"XDG_STATE_HOME": str(self.folder / "state"), "XDG_CONFIG_HOME": str(self.folder / "config")}
        result = CliRunner().invoke(
            build_command_tree(), [*words, "--store", str(self.file)], env={**environ, "HALTER_PERSON": "ada"}
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    def export_new(self) -> list[tuple[str, str]]:
        """Export what is new for the sink, as a process of its own would."""
        rows = [json.loads(line) for line in self.halter("audit", "--export", "-", "--cursor", "sink").splitlines()]
        assert all(set(row) == KEYS for row in rows)
        return [(row["call"], row["outcome"]) for row in rows]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    asyncio.run(desk.store.close())


def do(*jobs: Any) -> None:
    async def main() -> None:
        for job in jobs:
            await job

    asyncio.run(main())


def test_an_export_continues_exactly_where_the_last_one_ended(desk: Desk) -> None:
    do(desk.start("a"), desk.begin("a", "a.1"), desk.settle("a", "a.1"))
    assert desk.export_new() == [("a.1", "ok")]
    assert desk.export_new() == []
    do(desk.begin("a", "a.2"), desk.settle("a", "a.2"), desk.refuse("a", "a.3"))
    assert desk.export_new() == [("a.2", "ok"), ("a.3", "rate_limited")]


def test_a_call_that_settles_late_is_not_passed_over(desk: Desk) -> None:
    do(desk.start("a", "b"), desk.begin("a", "early"), desk.begin("b", "late"), desk.settle("b", "late"))
    assert desk.export_new() == [("late", "ok")]
    do(desk.begin("b", "b.2"), desk.settle("b", "b.2"), desk.settle("a", "early"))
    assert sorted(desk.export_new()) == [("b.2", "ok"), ("early", "ok")]


def test_calls_of_the_same_moment_are_all_exported_once(desk: Desk) -> None:
    do(desk.start("a", "b"))
    for number in range(3):
        do(desk.begin("a", f"a.{number}"), desk.settle("a", f"a.{number}"))
        do(desk.begin("b", f"b.{number}"), desk.settle("b", f"b.{number}"))
        assert sorted(desk.export_new()) == [(f"a.{number}", "ok"), (f"b.{number}", "ok")]


def test_a_clock_that_is_set_back_hides_nothing_from_a_sink(desk: Desk) -> None:
    do(desk.start("a", "b"), desk.begin("a", "a.1"), desk.settle("a", "a.1"))
    assert desk.export_new() == [("a.1", "ok")]
    desk.clock.advance(-3_600_000_000)
    do(desk.begin("b", "b.1"), desk.settle("b", "b.1"))
    assert desk.export_new() == [("b.1", "ok")]


def test_a_refusal_is_exported_although_the_call_was_let_through_later(desk: Desk) -> None:
    do(desk.start("a"), desk.refuse("a", "a.1"), desk.begin("a", "a.1"))
    assert desk.export_new() == [("a.1", "rate_limited")]
    do(desk.settle("a", "a.1"))
    assert desk.export_new() == [("a.1", "ok")]


def test_after_a_crash_between_export_and_cursor_rows_come_twice_and_none_is_missing(desk: Desk) -> None:
    do(desk.start("a"), desk.begin("a", "a.1"), desk.settle("a", "a.1"))
    desk.export_new()
    body = (desk.folder / "state/halter/cursors/sink.json").read_bytes()
    do(desk.begin("a", "a.2"), desk.settle("a", "a.2"))
    first = desk.export_new()
    (desk.folder / "state/halter/cursors/sink.json").write_bytes(body)
    do(desk.begin("a", "a.3"), desk.settle("a", "a.3"))
    assert first == [("a.2", "ok")]
    assert desk.export_new() == [("a.2", "ok"), ("a.3", "ok")]


def test_an_export_to_a_file_continues_in_it_after_a_line_that_a_crash_cut_short(desk: Desk, tmp_path: Path) -> None:
    target = tmp_path / "audit.jsonl"
    do(desk.start("a"), desk.begin("a", "a.1"), desk.settle("a", "a.1"))
    assert "Exported 1 row" in desk.halter("audit", "--export", str(target), "--cursor", "sink")
    with target.open("a") as file:
        file.write('{"call": "hal')
    do(desk.begin("a", "a.2"), desk.settle("a", "a.2"))
    desk.halter("audit", "--export", str(target), "--cursor", "sink")
    whole, half, last = target.read_text().splitlines()
    assert (json.loads(whole)["call"], half, json.loads(last)["call"]) == ("a.1", '{"call": "hal', "a.2")
    assert target.stat().st_mode & 0o077 == 0


def test_a_row_has_the_beginning_of_what_was_said_also_where_that_was_large(desk: Desk) -> None:
    async def large() -> None:
        blob = await desk.store.put(b"x" * 50_000)
        event = CallSettled(call="a.1", outcome="ok", audited=True)
        reads = [(AuditRow, "a.1")]
        drafts = [Draft(event, None, blob)]
        await desk.store.commit(Write(session_stream("a"), "large", lambda _: drafts, reads, desk.leases["a"]))

    do(desk.start("a"), desk.begin("a", "a.1"), large())
    (row,) = [json.loads(line) for line in desk.halter("audit", "--export", "-", "--since", "36500d").splitlines()]
    assert row["output_summary"].startswith("xxxx")
    assert row["input_summary"] == '{"to":"bob"}'
    assert len(row["output_summary"]) == 200


def test_a_restored_store_is_read_again_rather_than_missed(desk: Desk) -> None:
    async def read() -> list[str]:
        follower = Follower(desk.store, {session_stream("a"): 99})
        return [row.call async for row in read_settled_calls(desk.store, follower, Change(ALL_STREAMS, 0))]

    do(desk.start("a"), desk.begin("a", "a.1"), desk.settle("a", "a.1"))
    assert asyncio.run(read()) == ["a.1"]


def test_the_cursor_of_another_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "sink.json"
    write_cursor(path, ReadPosition("one", {FLEET: 3}))
    assert read_cursor(path, "one").seen == {FLEET: 3}
    with pytest.raises(ConfigError, match="cursor of another store"):
        read_cursor(path, "two")
    path.write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        read_cursor(path, "one")
    assert [entry.name for entry in path.parent.iterdir()] == ["sink.json"]


@pytest.mark.parametrize("target", ["/", "nowhere/x", "/dev/full", "\0"])
def test_a_place_that_cannot_be_written_is_a_sentence(target: str, tmp_path: Path) -> None:
    def write() -> None:
        with open_sink(str(tmp_path / target), append=True) as write:
            write([{"call": "a.1"}])

    with pytest.raises(ConfigError, match="Cannot write"):
        write()


class Deaf(JournalStore):
    """A store whose hints are all lost."""

    async def changes(self, matters: Callable[[Change], bool] = matters_always) -> AsyncIterator[Change]:
        await asyncio.Event().wait()
        yield Change(FLEET, 0)


async def collect_changes(store: JournalStore, clock: Clock, number: int) -> list[Change]:
    async with aclosing(watch_growth(store, clock)) as changes:
        return [await anext(changes) for _ in range(number)]


async def test_where_hints_are_lost_everything_is_looked_at_from_time_to_time() -> None:
    class Quick(ManualClock):
        """A clock that advances as soon as anybody sleeps."""

        async def sleep(self, duration: int) -> None:
            self.advance(duration)
            await asyncio.sleep(0)

    clock = Quick()
    engine = open_engine("memory:", clock=clock, ids=SeededIds(0, clock.now))
    seen = await collect_changes(Deaf(engine, inline=True), clock, 3)
    assert [change.stream for change in seen] == [ALL_STREAMS] * 3
    assert clock.now() >= 2 * POLLING_INTERVAL


async def test_a_hint_is_followed_at_once_and_read_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    follower = Follower(desk.store, {})
    async with aclosing(watch_growth(desk.store, desk.clock)) as changes:
        assert (await anext(changes)).stream == ALL_STREAMS
        await desk.start("a")
        stream = StreamId("")
        while stream != session_stream("a"):
            change = await anext(changes)
            stream = change.stream
    assert [event.kind for event in await follower.read_new(change)] == ["session_started"]
    assert await follower.read_new(change) == []
    await desk.store.close()


class Counted:
    """A store that notes the names of its queries."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.query_names: list[str] = []

    async def ask(self, query: Query[Any]) -> Sequence[Any]:
        self.query_names.append(query.name)
        return await self._store.ask(query)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_while_nothing_is_new_a_poll_does_not_read_every_stream(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    store = Counted(desk.store)
    follower = Follower(cast("Any", store), {})
    await desk.start("a")
    assert [event.kind for event in await follower.read_new()] == ["session_started"]
    assert await follower.find_grown() == {}
    store.query_names.clear()
    assert await follower.find_grown() == {}
    assert store.query_names == ["extent"]
    await desk.begin("a", "a.1")
    assert list(await follower.find_grown()) == [session_stream("a")]
    assert list(await follower.find_grown()) == [session_stream("a")], "what was not read yet is still new"
    await desk.store.close()


def test_tail_shows_the_newest_events_of_a_session_and_ends_with_it(desk: Desk) -> None:
    do(desk.start("a"), *(desk.begin("a", f"a.{number}") for number in range(12)))
    do(desk.write("a", SessionEnded(state="CANCELLED", terminal_reason="cancelled")))
    lines = desk.halter("tail", "a").splitlines()
    assert len(lines) == 10
    assert "call_started" in lines[0]
    assert "send RESTRICTED LOW, approved by ada" in lines[0]
    assert "session_ended     ended: CANCELLED, cancelled" in lines[-1]


def test_tail_continues_after_an_event_without_a_gap(desk: Desk) -> None:
    do(desk.start("a"), desk.begin("a", "a.1"), desk.settle("a", "a.1"))
    do(desk.write("a", SessionEnded(state="COMPLETED", terminal_reason="completed")))
    events = [json.loads(line) for line in desk.halter("tail", "a", "--after", "2", "--json").splitlines()]
    assert [(event["seq"], event["kind"]) for event in events] == [(3, "call_settled"), (4, "session_ended")]


async def test_every_store_hands_on_the_same_rows(scribe: Any) -> None:
    await scribe.start("one")
    await scribe.guarded("one")
    follower = Follower(scribe.ground.store, {})
    rows = [row async for row in read_settled_calls(scribe.ground.store, follower, Change(ALL_STREAMS, 0))]
    assert [(row.call, row.outcome, row.input) for row in rows] == [
        ("one-guarded", "ok", b"what was said"),
        ("one-guarded-2", "tool_not_granted", b"what was said"),
    ]


async def test_a_question_of_a_session_that_has_ended_needs_nobody(scribe: Any) -> None:
    await scribe.start("one")
    ask = DecisionAsked(
        decision="d", about="approval", subject="c", name="send", digest="x", expires_at=9, reasons=("r",)
    )
    lease, reads = scribe.leases["one"], [(DecisionRow, "d")]
    await scribe.commit(Write(session_stream("one"), "asked", lambda _: [Draft(ask, b"send {}")], reads, lease))
    (result,) = await scribe.ground.store.ask(Query("open_decisions", PendingDecision, {"now": 0}))
    assert (result.display_text, result.reasons, result.session) == ("send {}", ("r",), "one")
    await scribe.end("one")
    assert await scribe.ground.store.ask(Query("open_decisions", PendingDecision, {"now": 0})) == []


async def test_every_event_is_shown_on_one_line(scribe: Any) -> None:
    await scribe.whole_session("one")
    await scribe.start("two")
    await scribe.guarded("two")
    await scribe.cap(900_000)
    await scribe.hold("two", "two-9", 60_000)
    events = await Follower(scribe.ground.store, {}).read_new()
    lines = [format_event_line(event) for event in events]
    assert len(lines) == len({(event.stream, event.seq) for event in events})
    assert not [text for text in lines if "\n" in text or len(text.split()) < 5]

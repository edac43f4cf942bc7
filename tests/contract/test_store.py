"""What every store promises of writes and of the rows and events they leave."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from halter.core.errors import LeaseLost, RowRefused, UndeclaredRow
from halter.core.events import CallSettled, CallStarted, OverrunIncurred, RequestSettled, RequestStarted, SessionStarted
from halter.core.ids import FLEET, SessionId, StreamId, WorkerId, inbox_stream, session_stream, trigger_stream
from halter.core.money import Account, BudgetRow, Charge, Leg
from halter.core.ports import ALL_STREAMS, Change, Draft, Lease, Query, Rows, Stored, Write
from halter.core.project.holds import budget_key, budget_row, rows_of_hold
from halter.core.rows import TABLES, HoldRow, SessionRow, SpendRow, StreamRow
from halter.core.usage import Usage
from halter.guard.ledger import change_cap
from halter.journal.apply import CHAIN_START, digest_body, hash_event
from halter.journal.engine import load_queries
from halter.journal.store import JournalStore
from halter.state import lifecycle

if TYPE_CHECKING:
    from conftest import Place

ONE = session_stream("one")
CAP = 1_000
FLEET_LEG = Leg("fleet", "", "usd", CAP, 1)


def incident(name: str) -> OverrunIncurred:
    """Name an event that changes no row but its stream's."""
    return OverrunIncurred(hold=name, scope="fleet", window="", unit="usd", amount=1)


def note(key: str, stream: StreamId = FLEET, body: bytes | None = None) -> Write:
    return Write(stream, key, lambda _: [Draft(incident(key), body)])


def make_hold(call: str, legs: Sequence[Leg] = (FLEET_LEG,)) -> Write:
    event = CallStarted(call=call, tool="search", legs=tuple(legs))
    return Write(ONE, f"{call}/held", lambda _: [Draft(event)], rows_of_hold(call, legs))


def make_settlement(call: str, usd: int, legs: Sequence[Leg] = (FLEET_LEG,)) -> Write:
    event = CallSettled(call=call, outcome="ok", charge=Charge(usd=usd))
    return Write(ONE, f"{call}/settled", lambda _: [Draft(event)], rows_of_hold(call, legs))


def make_start(session: str, agent: str = "watcher") -> SessionStarted:
    return SessionStarted(session=session, agent=agent, kind="task", started_by="a person", trigger="nightly")


async def budget(store: JournalStore, scope: str = "fleet") -> BudgetRow:
    return next(row for row in await store.ask(Query("budgets", BudgetRow)) if row.scope == scope)


async def one_change(store: JournalStore, wanted: Callable[[Change], bool], nudge: Callable[[int], Any]) -> Change:
    """Follow the changes while nudging until a wanted one is heard; what is told before anybody listens is lost."""
    future: asyncio.Future[Change] = asyncio.get_running_loop().create_future()

    async def follow() -> None:
        async for change in store.changes():
            if wanted(change) and not future.done():
                future.set_result(change)

    following = asyncio.create_task(follow())
    for number in range(1_000):
        await nudge(number)
        futures, _ = await asyncio.wait([future], timeout=0.01)
        if futures:
            break
    following.cancel()
    return future.result()


async def test_a_write_is_all_or_nothing(store: JournalStore) -> None:
    undeclared = Leg("agent:other", "", "usd", CAP, 1)
    drafts = [Draft(incident("first")), Draft(CallStarted(call="second", tool="search", legs=(undeclared,)))]
    with pytest.raises(UndeclaredRow):
        await store.commit(Write(FLEET, "key", lambda _: drafts))
    assert await store.read(FLEET) == []
    assert await store.ask(Query("heads", StreamRow)) == []
    assert not (await store.commit(note("key"))).is_repeated


async def test_what_a_write_answers_is_what_is_read(store: JournalStore) -> None:
    committed = await store.commit(Write(FLEET, "key", lambda _: [Draft(incident("a"), b"said"), Draft(incident("b"))]))
    assert list(committed.events) == await store.read(FLEET)
    assert [event.body for event in committed.events] == [b"said", None]
    assert committed.events[0].event == incident("a")


async def test_each_event_links_to_the_one_before(store: JournalStore) -> None:
    for number in range(3):
        await store.commit(note(f"key {number}", body=b"said"))
    previous = CHAIN_START
    for event in await store.read(FLEET):
        header = (event.stream, event.seq, event.kind, event.version, event.at, event.generation, event.key, event.blob)
        assert event.digest == digest_body(event.salt or b"", event.body or b"")
        assert event.hash == hash_event(previous, header, event.facts, event.digest)
        previous = event.hash
    assert (await store.ask(Query("heads", StreamRow)))[0].hash == previous


async def test_a_stream_that_begins_with_several_events_continues_after_the_last_one(store: JournalStore) -> None:
    await store.commit(Write(FLEET, "begin", lambda _: [Draft(incident("a")), Draft(incident("b"))]))
    (head,) = await store.ask(Query("heads", StreamRow))
    assert head.head == 2
    assert (await store.commit(note("next"))).events[0].seq == 3


async def test_sequence_numbers_have_no_gaps(store: JournalStore) -> None:
    async def attempt(number: int) -> None:
        key = f"key {number}"
        decide = (lambda _: [Draft(incident(key))]) if number % 7 else (lambda _: 1 // 0)
        await store.commit(Write(FLEET, key, decide))

    answers = await asyncio.gather(*map(attempt, range(100)), return_exceptions=True)
    assert sum(isinstance(answer, ZeroDivisionError) for answer in answers) == 15
    assert [event.seq for event in await store.read(FLEET)] == list(range(1, 86))


async def test_reading_continues_after_any_position(store: JournalStore) -> None:
    for number in range(5):
        await store.commit(note(f"key {number}"))
    assert [event.seq for event in await store.read(FLEET, after=1, limit=2)] == [2, 3]
    assert [event.seq for event in await store.read(FLEET, after=4)] == [5]
    assert await store.read(FLEET, after=5) == []
    assert await store.read(StreamId("nobody's")) == []


async def test_what_is_read_later_ends_where_it_was_asked_and_outlives_its_store(store: JournalStore) -> None:
    for number in range(3):
        await store.commit(note(f"key {number}", body=b"said"))
    events = await store.read(FLEET)
    asked, unasked = [await store.read_later(FLEET, 2) for _ in range(2)]
    await store.commit(note("later"))
    assert [*asked()] == [*events[:2]]
    await store.close()
    assert [*asked()] == [*unasked()] == [*events[:2]]


async def test_a_repeated_key_answers_as_the_first_did_and_appends_nothing(store: JournalStore) -> None:
    first = await store.commit(Write(FLEET, "key", lambda _: [Draft(incident("a"), b"said"), Draft(incident("b"))]))
    again = await store.commit(Write(FLEET, "key", lambda _: [Draft(incident("something else"))]))
    assert (first.is_repeated, again.is_repeated) == (False, True)
    assert again.events == first.events
    assert len(await store.read(FLEET)) == 2


async def test_a_key_repeated_within_one_batch_is_written_once(store: JournalStore) -> None:
    answers = await asyncio.gather(*(store.commit(note("key")) for _ in range(50)))
    assert sorted(answer.is_repeated for answer in answers) == [False] + [True] * 49
    assert {answer.events for answer in answers} == {answers[0].events}
    assert len(await store.read(FLEET)) == 1


async def test_the_same_key_in_another_stream_is_another_write(store: JournalStore) -> None:
    first, second = session_stream("one"), session_stream("two")
    assert not (await store.commit(note("delivery", first))).is_repeated
    answers = await asyncio.gather(*(store.commit(note("delivery", stream)) for stream in (first, second, second)))
    assert [answer.is_repeated for answer in answers] == [True, False, True]
    assert [len(await store.read(stream)) for stream in (first, second)] == [1, 1]
    assert [event.stream for event in answers[1].events] == [second]


async def test_a_key_repeated_by_another_process_at_the_same_time_is_written_once(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(3)]
    for number in range(20):
        stream = session_stream(f"fresh {number}")
        answers = await asyncio.gather(*(store.commit(note(f"key {number}", stream)) for store in stores))
        assert sorted(answer.is_repeated for answer in answers) == [False, True, True]
        assert len(await stores[0].read(stream)) == 1


async def test_deciding_sees_rows_locked_and_current(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(2)]

    def counting(number: int) -> Write:
        def decide(rows: Rows) -> Sequence[Draft]:
            seen = budget_row(rows, FLEET_LEG).held
            return [Draft(CallStarted(call=f"call {number}", tool=str(seen), legs=(FLEET_LEG,)))]

        stream = trigger_stream(str(number % 10))
        return Write(stream, f"key {number}", decide, rows_of_hold(f"call {number}", [FLEET_LEG]))

    async def count(store: JournalStore, numbers: Iterable[int]) -> list[int]:
        return [int((await store.commit(counting(number))).events[0].event.tool) for number in numbers]

    await stores[0].commit(counting(0))
    odd, even = await asyncio.gather(count(stores[0], range(1, 100, 2)), count(stores[1], range(2, 100, 2)))
    assert sorted(odd + even) == list(range(1, 100))
    assert (await budget(stores[0])).held == 100


async def test_a_hold_that_another_process_placed_is_seen_by_whoever_settles_it(shared_place: "Place") -> None:
    journal_store, other = shared_place.open(), shared_place.open()
    for number in range(20):
        call = f"call {number}"

        def settle(rows: Rows, call: str = call) -> Sequence[Draft]:
            held = rows.get(HoldRow, call) is not None
            return [Draft(CallSettled(call=call, outcome="ok", charge=Charge(usd=1)))] if held else []

        reads = rows_of_hold(call, [FLEET_LEG])
        _, settled = await asyncio.gather(
            journal_store.commit(make_hold(call)), other.commit(Write(ONE, f"{call}/settled", settle, reads))
        )
        if not settled.events:
            settled = await other.commit(Write(ONE, f"{call}/settled", settle, reads))
        assert settled.events
    assert await journal_store.ask(Query("holds", HoldRow)) == []
    assert ((await budget(journal_store)).spent, (await budget(journal_store)).held) == (20, 0)


@pytest.mark.parametrize(
    "decide",
    [
        lambda rows: rows.get(BudgetRow, "fleet", "", "usd"),
        lambda rows: rows.find([(BudgetRow, "fleet", "", "usd")]),
        lambda _: [Draft(incident("a"), stream=trigger_stream("elsewhere"))],
        lambda _: [Draft(CallStarted(call="call", tool="search", legs=(FLEET_LEG,)))],
    ],
    ids=["looked at", "looked for", "written to", "changed by an event"],
)
async def test_a_row_that_was_not_declared_is_refused(store: JournalStore, decide: Callable[[Rows], Any]) -> None:
    with pytest.raises(UndeclaredRow, match=r"without declaring it|did not declare"):
        await store.commit(Write(FLEET, "key", decide))
    assert await store.read(FLEET) == []


async def test_an_error_in_one_write_reaches_only_its_caller(store: JournalStore) -> None:
    stale = Lease(SessionId("nobody's"), WorkerId("a worker"), 1)
    culprits = {
        3: Write(FLEET, "raises", lambda _: 1 // 0),
        5: Write(FLEET, "undeclared", lambda rows: rows.get(HoldRow, "hold")),
        8: Write(session_stream("nobody's"), "stale", lambda _: [Draft(incident("a"))], lease=stale),
    }
    writes = [culprits.get(number) or note(f"key {number}") for number in range(20)]
    answers = await asyncio.gather(*map(store.commit, writes), return_exceptions=True)
    failed = {number: type(answer) for number, answer in enumerate(answers) if isinstance(answer, Exception)}
    assert failed == {3: ZeroDivisionError, 5: UndeclaredRow, 8: LeaseLost}
    assert [event.seq for event in await store.read(FLEET)] == list(range(1, 18))


async def test_one_write_can_append_to_several_streams(store: JournalStore) -> None:
    others = [trigger_stream("a"), trigger_stream("b")]
    drafts = [Draft(incident("here")), *(Draft(incident("there"), stream=stream) for stream in others)]
    committed = await store.commit(Write(FLEET, "key", lambda _: drafts, others=others))
    assert [(event.stream, event.seq) for event in committed.events] == [(FLEET, 1), (others[0], 1), (others[1], 1)]
    assert (await store.read(others[1]))[0].event == incident("there")
    assert (await store.commit(Write(FLEET, "key", lambda _: [], others=others))).events == committed.events


async def test_the_generation_of_a_lease_is_recorded_only_in_the_stream_of_its_session(store: JournalStore) -> None:
    await store.commit(lifecycle.start_session(make_start("one")))
    (lease,) = await store.claim(WorkerId("anna"), 1)
    streams = [ONE, inbox_stream("one"), session_stream("other"), FLEET]
    drafts = [Draft(incident("here"), stream=stream) for stream in streams]
    committed = await store.commit(Write(ONE, "key", lambda _: drafts, lease=lease, others=streams[1:]))
    assert [(event.stream, event.generation) for event in committed.events] == [
        (stream, 1 if stream == ONE else 0) for stream in streams
    ]


async def test_a_write_that_decides_nothing_leaves_nothing(store: JournalStore) -> None:
    assert (await store.commit(Write(FLEET, "key", lambda _: []))).events == ()
    assert not (await store.commit(note("key"))).is_repeated


async def test_a_clock_set_back_reorders_nothing(clocked_place: "Place") -> None:
    store = clocked_place.open()
    first = (await store.commit(note("first"))).events[0]
    clocked_place.clock.time -= 3_600_000_000
    second = (await store.commit(note("second"))).events[0]
    assert second.at >= first.at
    elsewhere = (await store.commit(note("third", trigger_stream("a")))).events[0]
    assert elsewhere.at < first.at


async def test_a_clock_set_back_puts_no_hold_before_the_cap_that_it_was_admitted_under(clocked_place: "Place") -> None:
    """The two stand in different streams, and whichever cap has the latest time counts when rows are made anew."""
    store = clocked_place.open()
    capped = (await store.commit(change_cap(Account("fleet", "", "usd"), 500, "a person", "cap"))).events[0]
    clocked_place.clock.time -= 3_600_000_000
    event = (await store.commit(make_hold("call"))).events[0]
    assert event.at >= capped.at


async def test_times_never_go_back_within_a_stream(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(2)]
    await asyncio.gather(*(stores[number % 2].commit(note(f"key {number}")) for number in range(60)))
    times = [event.at for event in await stores[0].read(FLEET)]
    assert times == sorted(times)


async def test_a_kind_that_is_not_known_is_read_as_unknown(shared_place: "Place") -> None:
    store = shared_place.open()
    await store.commit(note("key"))
    shared_place.sql("UPDATE events SET kind = 'planet_discovered', version = 7, facts = ?", b'{"name":"Vulcan"}')
    found: Stored = (await store.read(FLEET))[0]
    assert type(found.event).__name__ == "Unknown"
    assert (found.kind, found.version, found.facts) == ("planet_discovered", 7, b'{"name":"Vulcan"}')


async def test_who_follows_the_changes_hears_what_matters_and_nothing_else(store: JournalStore) -> None:
    stream_ids: set[StreamId] = set()

    async def follow() -> None:
        async for change in store.changes(lambda change: change.stream != FLEET):
            stream_ids.add(change.stream)

    following = asyncio.create_task(follow())
    for number in range(1_000):
        await store.commit(note(f"fleet {number}"))
        await store.commit(note(f"one {number}", ONE))
        if ONE in stream_ids:
            break
        await asyncio.sleep(0.01)
    following.cancel()
    assert stream_ids - {ALL_STREAMS} == {ONE}


async def test_growth_is_hinted_within_the_process(store: JournalStore) -> None:
    change = await one_change(store, lambda _: True, lambda number: store.commit(note(f"key {number}")))
    assert change.stream in (FLEET, "*")


async def test_a_stream_that_grew_by_several_events_is_hinted_once_by_the_first_of_them(store: JournalStore) -> None:
    counts: Counter[Change] = Counter()

    async def follow() -> None:
        async for change in store.changes(lambda change: change.stream != ALL_STREAMS):
            counts[change] += 1

    await store.commit(note("before"))
    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    drafts = [Draft(incident("a")), Draft(incident("b")), Draft(incident("c"), stream=ONE), Draft(incident("d"))]
    await store.commit(Write(FLEET, "many", lambda _: drafts, others=[ONE]))
    for _ in range(3):
        await asyncio.sleep(0)
    following.cancel()
    assert counts == {Change(FLEET, 2): 1, Change(ONE, 1): 1}


async def test_growth_is_hinted_by_other_processes(shared_place: "Place") -> None:
    journal_store, there = shared_place.open(), shared_place.open()
    change = await one_change(
        journal_store, lambda change: change.stream == FLEET, lambda number: there.commit(note(f"key {number}"))
    )
    assert change.head >= 1


async def test_columns_are_the_fields_of_the_rows(shared_place: "Place") -> None:
    shared_place.open()
    for table in TABLES:
        names = _columns_of(shared_place, table.TABLE)
        assert names == [field.name for field in msgspec.structs.fields(table)]
        assert names[: len(table.KEY)] == list(table.KEY)
    events = [field.name for field in msgspec.structs.fields(Stored) if field.name != "event"]
    assert _columns_of(shared_place, "events") == ["position", *events]


def _columns_of(place: "Place", table: str) -> list[str]:
    if place.kind == "sqlite":
        return [row[1] for row in place.sql(f"PRAGMA table_info({table})")]
    catalogue = "SELECT column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    return [row[0] for row in place.sql(f"{catalogue} AND table_name = ? ORDER BY ordinal_position", table)]


async def test_the_database_itself_refuses_to_hold_above_a_cap(shared_place: "Place") -> None:
    store = shared_place.open()
    legs = [Leg("fleet", "", "usd", CAP, CAP)]
    await store.commit(make_hold("first", legs))
    with pytest.raises(RowRefused, match="refused a row"):
        await store.commit(make_hold("second", [Leg("fleet", "", "usd", CAP, 1)]))
    innocent = [note(f"key {number}") for number in range(5)]
    answers = await asyncio.gather(
        *map(store.commit, [*innocent, make_hold("third", [FLEET_LEG])]), return_exceptions=True
    )
    assert [type(answer).__name__ for answer in answers] == ["Committed"] * 5 + ["RowRefused"]
    assert (await budget(store)).held == CAP


async def test_a_cap_can_be_lowered_below_what_is_held(store: JournalStore) -> None:
    await store.commit(make_hold("call", [Leg("fleet", "", "usd", CAP, CAP)]))
    await store.commit(change_cap(Account("fleet", "", "usd"), 10, "a person", "lowered"))
    row = await budget(store)
    assert (row.cap, row.held, row.overrun) == (10, CAP, CAP - 10)


async def test_a_settled_hold_vanishes_and_its_spend_appears(store: JournalStore) -> None:
    legs = [Leg(ONE, "", "usd", CAP, 100), Leg("fleet", "", "usd", CAP, 100)]
    await store.commit(lifecycle.start_session(make_start("one")))
    event = RequestStarted(request="request", model="acme:large", purpose="judge", legs=tuple(legs))
    reads = rows_of_hold("request", legs)
    await store.commit(Write(ONE, "asked", lambda _: [Draft(event)], reads))
    assert [hold.hold for hold in await store.ask(Query("holds_of", HoldRow, {"session": "one"}))] == ["request"]
    usage = Usage(input_tokens=900, output_tokens=40, cache_read_tokens=500, cache_write_tokens=300)
    answered = RequestSettled(request="request", outcome="ok", usage=usage, charge=Charge(usd=70))
    done = (await store.commit(Write(ONE, "answered", lambda _: [Draft(answered)], reads))).events[0]
    assert await store.ask(Query("holds", HoldRow)) == []
    assert await store.ask(Query("all_spends", SpendRow)) == [
        SpendRow(done.at, "request", "watcher", "one", "nightly", "acme:large", "judge", 70, 100, 900, 40, 500, 300)
    ]
    assert ((await budget(store)).spent, (await budget(store)).held) == (70, 0)


async def test_a_question_is_answered_with_typed_rows(store: JournalStore) -> None:
    await store.commit(lifecycle.start_session(make_start("one", agent="night-watch")))
    await store.commit(lifecycle.start_session(make_start("two", agent="desk")))
    (row,) = await store.ask(Query("session", SessionRow, {"session": "one"}))
    assert (row.agent, row.state, row.generation, row.ended_at) == ("night-watch", "RUNNING", 0, None)
    assert len(await store.ask(Query("sessions", SessionRow, {"since": 1, "limit": 1}))) == 1


async def test_every_question_is_answered_in_plain_values(store: JournalStore) -> None:
    await store.commit(lifecycle.start_session(make_start("one")))
    await store.commit(make_hold("settled"))
    await store.commit(make_settlement("settled", 1))
    await store.commit(make_hold("held"))
    given = {
        "session": "one", "limit": 10, "before": 1, "until": 1, "part": 1,
        "name": "search", "purpose": "turn", "since": 0,
        "stream": FLEET, "seq": 0, "position": 0, "hash": b"", "after": 0, "through": 1, "call": "",
        "decision": "", "scope": "fleet", "scopes": "[]", "same": "", "window": "", "unit": "usd",
        "now": 0, "agent": "night-watch", "kind": "task", "worker": "w",
        "trigger": "nightly", "state": "COMPLETED", "notification": "n", "key": "k",
        "beginning": "o", "from": "", "to": "z", "tool": "",
        "outcome": "", "hold": "", "hour": "hour/2026", "day": "day/2026", "month": "month/2026", "ended": 20,
    }  # fmt: skip
    for name, question in load_queries("queries.sql").items():
        asked = {parameter: value for parameter, value in given.items() if f":{parameter}" in question}
        for row in await store.ask(Query(name, dict[str, Any], asked)):
            assert {type(value) for value in row.values()} <= {int, str, bytes, type(None)}, name


async def test_closing_twice_is_fine(store: JournalStore) -> None:
    await store.commit(note("key"))
    await store.close()
    await store.close()


async def test_what_was_written_is_there_when_the_store_is_opened_again(shared_place: "Place") -> None:
    store = shared_place.open()
    await store.commit(lifecycle.start_session(make_start("one"), b"the task"))
    identity = await store.ask(Query("meta", dict[str, str]))
    await store.close()
    journal_store = shared_place.open()
    assert [event.body for event in await journal_store.read(ONE)] == [b"the task"]
    assert await journal_store.ask(Query("meta", dict[str, str])) == identity


async def test_processes_that_start_together_make_one_store(shared_place: "Place") -> None:
    results = await asyncio.gather(*(asyncio.to_thread(shared_place.open) for _ in range(4)))
    identities = [tuple(map(str, await store.ask(Query("meta", dict[str, str])))) for store in results]
    assert len(set(identities)) == 1


async def test_declared_rows_may_be_absent(store: JournalStore) -> None:
    values: list[object] = []

    def decide(rows: Rows) -> Sequence[Draft]:
        values[:] = [rows.get(HoldRow, "hold"), rows.get(BudgetRow, "fleet", "", "usd")]
        return []

    reads = [(HoldRow, "hold"), budget_key(Account("fleet", "", "usd"))]
    await store.commit(Write(FLEET, "key", decide, reads))
    assert values == [None, None]


def after(write: Write, first: Write) -> Write:
    return msgspec.structs.replace(write, first=first)


async def test_a_write_that_takes_another_along_is_done_after_it_in_one_transaction(store: JournalStore) -> None:
    await store.commit(make_hold("a"))
    committed = await store.commit(after(make_hold("b"), make_settlement("a", 1)))
    assert committed.first is not None
    assert [stored.event.KIND for stored in committed.list_events()] == ["call_settled", "call_started"]
    assert list(committed.list_events()) == (await store.read(ONE))[1:] == list(committed.fresh())
    row = await budget(store)
    assert (row.spent, row.held) == (1, 1)


async def test_a_write_takes_along_one_to_another_stream(store: JournalStore) -> None:
    stream_id = trigger_stream("a")
    committed = await store.commit(after(note("second"), note("first", stream_id)))
    assert [(event.stream, event.key) for event in committed.list_events()] == [(stream_id, "first"), (FLEET, "second")]


async def test_what_a_write_takes_along_is_undone_with_it(store: JournalStore) -> None:
    await store.commit(make_hold("a"))
    undeclared = Leg("agent:other", "", "usd", CAP, 1)
    wrong = Write(ONE, "wrong", lambda _: [Draft(CallStarted(call="b", tool="search", legs=(undeclared,)))])
    with pytest.raises(UndeclaredRow):
        await store.commit(after(wrong, make_settlement("a", 1)))
    assert len(await store.read(ONE)) == 1
    assert (await budget(store)).held == 1


async def test_what_was_taken_along_answers_as_the_first_time(store: JournalStore) -> None:
    await store.commit(make_hold("a"))
    once = await store.commit(after(make_hold("b"), make_settlement("a", 1)))
    again = await store.commit(after(make_hold("b"), make_settlement("a", 1)))
    assert (again.is_repeated, again.list_events(), again.fresh()) == (True, once.list_events(), ())
    assert (await store.commit(after(make_hold("c"), make_settlement("a", 1)))).fresh()[0].seq == len(
        once.list_events()
    ) + 2
    assert (await budget(store)).spent == 1


async def test_what_is_taken_along_by_somebody_without_the_lease_is_refused_with_it(store: JournalStore) -> None:
    await store.commit(lifecycle.start_session(make_start("one")))
    (lease,) = await store.claim(WorkerId("anna"), 1)
    lost = msgspec.structs.replace(lease, generation=lease.generation + 1)
    first, write = (msgspec.structs.replace(each, lease=lost) for each in (make_hold("a"), make_hold("b")))
    with pytest.raises(LeaseLost):
        await store.commit(after(write, first))
    assert len(await store.read(ONE)) == 1


async def test_writes_that_wait_together_take_their_own_along(store: JournalStore) -> None:
    pairs = [(f"{number}", after(note(f"{number} b"), note(f"{number} a"))) for number in range(20)]
    answers = await asyncio.gather(*(store.commit(write) for _, write in pairs))
    texts = [[event.key for event in answer.list_events()] for answer in answers]
    assert texts == [[f"{name} a", f"{name} b"] for name, _ in pairs]
    assert len(await store.read(FLEET)) == 40


async def test_writes_of_many_tasks_and_heartbeats_do_not_wait_for_each_other_for_ever(store: JournalStore) -> None:
    async def write(number: int) -> None:
        for turn in range(5):
            await store.commit(note(f"{number}-{turn}"))

    async def beat(number: int) -> None:
        for _ in range(5):
            await store.beat(WorkerId(f"worker-{number}"))

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(number) for number in range(20) for work in (write, beat)))
    assert len(await store.read(FLEET)) == 100

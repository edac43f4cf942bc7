"""What every store promises of who may work on a session, and when it is due."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from halter.core.clock import DAY, SECOND
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import (
    SESSION_FORMAT,
    RequestSettled,
    RequestStarted,
    SessionParked,
    SessionStarted,
    TurnStarted,
    WakePosted,
)
from halter.core.ids import SessionId, SortableIds, WorkerId, make_worker_id, session_stream
from halter.core.money import UNITS, Charge, Leg, Unit
from halter.core.ports import AgentConcurrency, Draft, Lease, Query, Ticket, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import SessionRow
from halter.journal.store import JournalStore
from halter.state import lifecycle
from halter.state.session import IllegalTransition

if TYPE_CHECKING:
    from conftest import Place

ANNA, BERT = WorkerId("anna"), WorkerId("bert")
ONE = SessionId("one")
AT_ONCE = 1
"""A lease of a microsecond: it is over at the next look at the clock."""


async def start(store: JournalStore, session: str, **facts: Any) -> None:
    event = SessionStarted(session=session, agent="watcher", kind="autonomous", started_by="a person", **facts)
    await store.commit(lifecycle.start_session(event))


async def start_owned(store: JournalStore, owner: WorkerId = ANNA) -> Lease:
    event = SessionStarted(session=ONE, agent="watcher", kind="autonomous", started_by="a person")
    lease = Lease(ONE, owner, 1)
    await store.commit(lifecycle.start_session(event, owner=lease))
    return lease


async def claim_one(store: JournalStore, worker: WorkerId = ANNA) -> Lease:
    (lease,) = await store.claim(worker, 10)
    return lease


def make_parked(seen: int = 0, **facts: Any) -> SessionParked:
    return SessionParked(state="SLEEPING", inbox_seen=seen, **facts)


def make_write(lease: Lease, key: str = "key") -> Write:
    return Write(session_stream(lease.session), key, lambda _: [Draft(make_parked(resident=True))], lease=lease)


async def session(store: JournalStore, name: str = ONE) -> SessionRow:
    (row,) = await store.ask(Query("session", SessionRow, {"session": name}))
    return row


def names(leases: Sequence[Lease]) -> list[str]:
    return sorted(lease.session for lease in leases)


async def test_a_turn_says_how_far_the_inbox_was_read(store: JournalStore) -> None:
    lease = await start_owned(store)
    stream = session_stream(ONE)
    for turn in (1, 2):
        await store.commit(lifecycle.post_message(ONE, f"message {turn}", b"one more thing", "a person"))
        event = TurnStarted(turn=turn, inbox_seen=turn)
        await store.commit(Write(stream, f"turn {turn}", lambda _, event=event: [Draft(event)], lease=lease))
        row = await session(store)
        assert (row.inbox_wake, row.inbox_seen, row.due_at) == (turn, turn, row.wake_at)


@pytest.mark.parametrize("unit", UNITS)
async def test_a_session_does_not_end_while_a_hold_is_in_doubt(store: JournalStore, unit: Unit) -> None:
    lease = await start_owned(store)
    legs = (Leg(lease.stream, "", unit, None, 5),)
    asked = RequestStarted(request="request", model="acme:large", purpose="turn", legs=legs)
    answered = RequestSettled(request="request", outcome="ok", charge=Charge(usd=1, tokens=1))
    for event, ends in ((asked, 0), (answered, 1)):
        reads = rows_of_hold("request", legs)
        await store.commit(Write(lease.stream, event.KIND, lambda _, event=event: [Draft(event)], reads, lease))
        committed = await store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))
        assert len(committed.events) == ends
    assert (await session(store)).state == "COMPLETED"


async def test_a_session_that_rests_is_woken_before_it_completes(store: JournalStore) -> None:
    lease = await start_owned(store)
    await store.commit(make_write(lease))
    with pytest.raises(IllegalTransition, match="is SLEEPING and cannot become COMPLETED"):
        await store.commit(lifecycle.end_session(lease, "COMPLETED", "completed"))
    assert (await session(store)).state == "SLEEPING"


async def test_a_claim_gives_the_session_and_its_next_generation(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    assert lease == Lease(ONE, ANNA, 1)
    assert ((await session(store)).owner, (await session(store)).generation) == (ANNA, 1)
    committed = await store.commit(make_write(lease))
    assert committed.events[0].generation == 1


async def test_what_is_claimed_is_given_to_nobody_else(store: JournalStore) -> None:
    await start(store, ONE)
    await claim_one(store)
    assert await store.claim(BERT, 10) == []
    assert await store.claim(ANNA, 10) == []


async def test_what_begins_with_its_owner_is_given_to_nobody_else(store: JournalStore) -> None:
    await store.beat(ANNA)
    lease = await start_owned(store)
    assert ((await session(store)).owner, (await session(store)).generation) == (ANNA, 1)
    assert [await store.claim(BERT, 10), await store.claim(BERT, 1, ONE), await store.claim(ANNA, 1, ONE)] == [[]] * 3
    assert (await store.commit(make_write(lease))).events[0].generation == 1


async def test_what_began_with_an_owner_that_died_is_taken_over_and_its_start_repeated_changes_nothing(
    place: "Place",
) -> None:
    store = place.open(lease=AT_ONCE)
    await store.beat(ANNA)
    own = await start_owned(store)
    assert await claim_one(store, BERT) == Lease(ONE, BERT, 2)
    await start_owned(store)
    assert ((await session(store)).owner, (await session(store)).generation) == (BERT, 2)
    with pytest.raises(LeaseLost):
        await store.commit(make_write(own))


async def test_what_an_owner_began_that_was_forgotten_before_is_taken_over_once_somebody_comes(
    shared_place: "Place",
) -> None:
    store = shared_place.open(lease=AT_ONCE)
    await start_owned(store)
    assert await store.claim(BERT, 10) == []
    await store.beat(BERT, {}, "bert says so")
    assert await claim_one(store, BERT) == Lease(ONE, BERT, 2)


async def test_the_longest_due_comes_first_and_no_more_than_asked_for(store: JournalStore) -> None:
    for number in range(5):
        await start(store, f"session {number}")
    texts = [names(await store.claim(ANNA, limit)) for limit in (1, 2, 0, 10)]
    assert texts == [["session 0"], ["session 1", "session 2"], [], ["session 3", "session 4"]]


async def test_what_sleeps_is_not_due(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    tomorrow = (await store.beat(ANNA)).now + DAY
    await store.commit(lifecycle.park_session(lease, "park", make_parked(wake_at=tomorrow)))
    assert (await session(store)).due_at == tomorrow
    assert await store.claim(BERT, 10) == []


async def test_a_timer_that_ran_out_makes_a_session_due(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    await store.commit(lifecycle.park_session(lease, "park", make_parked(wake_at=(await store.beat(ANNA)).now)))
    assert await claim_one(store, BERT) == Lease(ONE, BERT, 2)


async def test_a_message_makes_a_sleeping_session_due(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    await store.commit(lifecycle.park_session(lease, "park", make_parked()))
    assert await store.claim(BERT, 10) == []
    await store.commit(lifecycle.post_message(ONE, "message", b"wake up", "a person"))
    assert await claim_one(store, BERT) == Lease(ONE, BERT, 2)


async def test_what_does_not_wake_a_session_leaves_it_asleep(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    await store.commit(lifecycle.park_session(lease, "park", make_parked(wake_on=("alarm",))))
    signal = WakePosted(cause="signal", origin="sensor", sender="thermometer", name="drizzle")
    await store.commit(lifecycle.post_wake(ONE, "drizzle", signal))
    row = await session(store)
    assert (row.inbox_head, row.inbox_wake, row.due_at) == (1, 0, None)


async def test_parking_is_refused_when_something_unseen_arrived(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    await store.commit(lifecycle.post_message(ONE, "message", b"one more thing", "a person"))
    assert (await store.commit(lifecycle.park_session(lease, "park", make_parked(seen=0)))).events == ()
    assert (await store.commit(lifecycle.park_session(lease, "park", make_parked(seen=1)))).events
    assert await store.claim(BERT, 10) == []


async def test_parking_releases_a_session_unless_it_is_resident(store: JournalStore) -> None:
    await start(store, "free")
    await start(store, "resident")
    for lease in await store.claim(ANNA, 10):
        event = make_parked(wake_at=1, resident=lease.session == "resident")
        await store.commit(lifecycle.park_session(lease, f"{lease.session}/park", event))
    assert ((await session(store, "free")).owner, (await session(store, "resident")).owner) == ("", ANNA)
    assert names(await store.claim(BERT, 10)) == ["free"]


async def test_what_has_ended_is_never_due(store: JournalStore) -> None:
    await start(store, ONE)
    await store.commit(lifecycle.end_session(await claim_one(store), "COMPLETED", "done"))
    assert (await store.commit(lifecycle.post_message(ONE, "message", b"hello?", "a person"))).events == ()
    assert (await session(store)).due_at is None
    assert await store.claim(BERT, 10) == []


async def test_a_session_of_a_newer_format_is_never_taken(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, "newer", format=SESSION_FORMAT + 1)
    await start(store, ONE)
    assert names(await store.claim(ANNA, 10)) == [ONE]
    assert names(await store.claim(BERT, 10)) == [ONE]


async def test_a_session_whose_owner_is_gone_goes_to_the_next_who_asks(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    await claim_one(store, ANNA)
    assert await claim_one(store, BERT) == Lease(ONE, BERT, 2)


async def test_orphans_are_taken_before_those_that_are_due(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, "orphan")
    await claim_one(store, ANNA)
    await start(store, "due")
    assert names(await store.claim(BERT, 1)) == ["orphan"]


async def test_a_beat_keeps_leases_alive(clocked_place: "Place") -> None:
    store = clocked_place.open(lease=15 * SECOND)
    await start(store, ONE)
    await claim_one(store, ANNA)
    for _ in range(5):
        await clocked_place.clock.sleep(10 * SECOND)
        assert (await store.beat(ANNA)).remaining_leases is None
        assert await store.claim(BERT, 10) == []
    await clocked_place.clock.sleep(16 * SECOND)
    assert names(await store.claim(BERT, 10)) == [ONE]


async def test_an_owner_that_lost_its_lease_can_write_nothing(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    stale = await claim_one(store, ANNA)
    await claim_one(store, BERT)
    with pytest.raises(LeaseLost, match=r"anna .* has lost the lease .* belongs to bert \(generation 2\)"):
        await store.commit(make_write(stale))
    assert len(await store.read(session_stream(ONE))) == 1


async def test_a_lost_lease_writes_nothing_to_another_session_of_its_worker_either(store: JournalStore) -> None:
    await start(store, ONE)
    lost = await claim_one(store)
    await store.release(lost)
    await claim_one(store, BERT)
    await start(store, "two")
    await claim_one(store)
    stream = session_stream("two")
    with pytest.raises(LeaseLost):
        await store.commit(
            Write(stream, "key", lambda _: [Draft(make_parked())], lease=lost, others=[session_stream(ONE)])
        )
    assert len(await store.read(stream)) == 1


async def test_a_lease_ends_with_the_session_it_was_for(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    await store.commit(lifecycle.end_session(lease, "COMPLETED", "done"))
    with pytest.raises(LeaseLost, match="belongs to no worker"):
        await store.commit(make_write(lease))


async def test_a_repeat_after_the_lease_was_lost_still_answers_as_the_first_did(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    lease = await claim_one(store, ANNA)
    first = await store.commit(make_write(lease))
    await claim_one(store, BERT)
    again = await store.commit(make_write(lease))
    assert (again.is_repeated, again.events) == (True, first.events)


async def test_a_stale_owner_cannot_take_its_successors_write_for_its_own(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    stale = await claim_one(store, ANNA)
    fresh = await claim_one(store, BERT)
    await store.commit(make_write(fresh, "the same key"))
    with pytest.raises(LeaseLost):
        await store.commit(make_write(stale, "the same key"))


async def test_a_successor_may_repeat_what_its_predecessor_wrote(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    first = await store.commit(make_write(await claim_one(store, ANNA), "the same key"))
    again = await store.commit(make_write(await claim_one(store, BERT), "the same key"))
    assert (again.is_repeated, again.events) == (True, first.events)


async def test_a_beat_after_a_lapse_says_what_is_left(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, "kept")
    kept = await claim_one(store, ANNA)
    await store.commit(lifecycle.park_session(kept, "park", make_parked(resident=True)))
    assert (await store.beat(ANNA)).remaining_leases == {kept}
    await start(store, "lost")
    await store.claim(BERT, 10)
    assert (await store.beat(ANNA)).remaining_leases == frozenset()


async def test_a_lapse_is_reported_again_for_as_long_as_a_lease_lasts(clocked_place: "Place") -> None:
    """The answer that tells of it may be lost, and with it every other sign before the next write."""
    store = clocked_place.open(lease=15 * SECOND)
    await start(store, ONE)
    await claim_one(store, ANNA)
    await clocked_place.clock.sleep(16 * SECOND)
    await claim_one(store, BERT)
    leases: list[frozenset[Lease] | None] = []
    for _ in range(5):
        leases.append((await store.beat(ANNA)).remaining_leases)
        await clocked_place.clock.sleep(5 * SECOND)
    assert leases == [frozenset(), frozenset(), frozenset(), None, None]


async def test_a_lapse_is_reported_again_with_any_clock(shared_place: "Place") -> None:
    brief, usual = shared_place.open(lease=AT_ONCE), shared_place.open()
    await start(brief, ONE)
    kept = await claim_one(brief, ANNA)
    for _ in range(3):
        assert (await usual.beat(ANNA)).remaining_leases == {kept}


async def test_sessions_of_a_process_continue_when_it_is_restarted(place: "Place") -> None:
    """A service manager starts it under the same name, at once, and then it beats and claims as it always does."""
    ids = SortableIds(place.clock.now)
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    first = make_worker_id("host-1", ids)
    left = await claim_one(store, first)
    worker_id = make_worker_id("host-1", ids)
    await store.beat(worker_id)
    assert await claim_one(store, worker_id) == Lease(ONE, worker_id, 2)
    with pytest.raises(LeaseLost):
        await store.commit(make_write(left))


async def test_an_earlier_lease_of_the_same_worker_can_write_nothing(place: "Place") -> None:
    """The generation counts, not only the owner: a turn that was given up must not go on beside its successor."""
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    stale = await claim_one(store, ANNA)
    await claim_one(store, BERT)
    fresh = await claim_one(store, ANNA)
    assert (stale.worker, fresh.worker, fresh.generation) == (ANNA, ANNA, 3)
    with pytest.raises(
        LeaseLost, match=r"anna \(generation 1\) has lost the lease .* belongs to anna \(generation 3\)"
    ):
        await store.commit(make_write(stale))
    assert (await store.commit(make_write(fresh))).events[0].generation == 3


async def test_an_orphan_of_a_newer_format_is_never_taken(shared_place: "Place") -> None:
    store = shared_place.open(lease=AT_ONCE)
    await start(store, "newer")
    await start(store, ONE)
    assert len(await store.claim(ANNA, 10)) == 2
    shared_place.sql("UPDATE sessions SET format = ? WHERE session = 'newer'", SESSION_FORMAT + 1)
    assert names(await store.claim(BERT, 10)) == [ONE]


async def test_a_claim_does_not_hide_a_lapse_from_the_next_beat(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    await claim_one(store, ANNA)
    await claim_one(store, BERT)
    assert await store.claim(ANNA, 0) == []
    assert (await store.beat(ANNA)).remaining_leases == frozenset()


async def test_all_is_well_with_leases_that_never_lapsed(store: JournalStore) -> None:
    await start(store, ONE)
    await claim_one(store)
    assert (await store.beat(ANNA)).remaining_leases is None


async def test_two_claimers_never_get_the_same_session(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(3)]
    for number in range(60):
        await start(stores[0], f"session {number:02}")
    claims = [stores[number % 3].claim(WorkerId(f"worker {number % 3}"), 3) for number in range(30)]
    taken = [lease for leases in await asyncio.gather(*claims) for lease in leases]
    while rest := await stores[0].claim(WorkerId("worker 0"), 3):
        taken += rest
    assert names(taken) == [f"session {number:02}" for number in range(60)]
    assert {lease.generation for lease in taken} == {1}


async def test_only_the_owner_keeps_a_snapshot(shared_place: "Place") -> None:
    store = shared_place.open(lease=AT_ONCE)
    await start(store, ONE)
    await claim_one(store, ANNA)
    await store.beat(ANNA, {ONE: b"as anna saw it"})
    assert shared_place.sql("SELECT data FROM snapshots") == [(b"as anna saw it",)]
    await claim_one(store, BERT)
    await store.beat(BERT, {ONE: b"as bert sees it"})
    await store.beat(ANNA, {ONE: b"what anna still believes"})
    assert shared_place.sql("SELECT data FROM snapshots") == [(b"as bert sees it",)]


async def test_a_session_that_is_named_is_taken_before_it_is_due_and_no_other(store: JournalStore) -> None:
    for name in (ONE, "two"):
        await start(store, name)
    (lease,) = await store.claim(ANNA, 10, ONE)
    await store.commit(lifecycle.park_session(lease, "rest", make_parked()))
    (again,) = await store.claim(BERT, 10, ONE)
    assert again == Lease(ONE, BERT, 2)
    assert await store.claim(ANNA, 10, ONE) == []
    await store.commit(lifecycle.end_session(again, "CANCELLED", "cancelled"))
    assert await store.claim(ANNA, 10, ONE) == []
    assert await store.claim(ANNA, 10, SessionId("nobody's")) == []
    assert names(await store.claim(ANNA, 10)) == ["two"]


async def test_a_session_that_is_named_is_taken_from_an_owner_whose_lease_ran_out(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    await store.claim(ANNA, 10, ONE)
    assert await store.claim(BERT, 10, ONE) == [Lease(ONE, BERT, 2)]


async def test_a_worker_that_leaves_in_good_order_keeps_nobody_waiting(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store, ANNA)
    assert await store.claim(BERT, 10) == []
    await store.leave(ANNA)
    assert await store.claim(BERT, 10) == [Lease(ONE, BERT, 2)]
    with pytest.raises(LeaseLost):
        await store.commit(make_write(lease))
    await store.leave(WorkerId("nobody"))


async def test_a_session_that_is_given_back_goes_to_the_next_who_asks_and_no_other_is(store: JournalStore) -> None:
    await start(store, ONE)
    await start(store, "two")
    first = {lease.session: lease for lease in await store.claim(ANNA, 10)}
    await store.release(first[ONE])
    with pytest.raises(LeaseLost):
        await store.commit(make_write(first[ONE]))
    assert await store.claim(BERT, 10) == [Lease(ONE, BERT, 2)]
    await store.release(first[ONE])
    assert ((await session(store)).owner, (await session(store, "two")).owner) == (BERT, ANNA)


async def test_a_session_is_given_back_after_the_write_that_takes_it_though_nobody_waits_for_that(
    store: JournalStore,
) -> None:
    for passes in range(5):
        before = asyncio.create_task(start(store, f"before {passes}"))
        for _ in range(passes):
            await asyncio.sleep(0)
        lease = Lease(SessionId(f"begun {passes}"), ANNA, 1)
        event = SessionStarted(session=lease.session, agent="watcher", kind="autonomous", started_by="a person")
        beginning = asyncio.create_task(store.commit(lifecycle.start_session(event, owner=lease)))
        await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.wait([beginning])
        await store.release(lease)
        await before
        assert not (await session(store, lease.session)).owner


async def test_a_claim_for_some_agents_takes_only_their_unattended_sessions(store: JournalStore) -> None:
    for agent in ("watcher", "other"):
        for kind in ("autonomous", "chat", "task"):
            event = SessionStarted(session=f"{agent} {kind}", agent=agent, kind=kind, started_by="a person")
            await store.commit(lifecycle.start_session(event))
    fired = SessionStarted(session="fired", agent="watcher", kind="task", started_by="a trigger", trigger="nightly")
    await store.commit(lifecycle.start_session(fired))
    assert await store.claim(ANNA, 10, agents={}) == []
    assert names(await store.claim(ANNA, 10, agents={"watcher": None, "nobody": None})) == [
        "fired",
        "watcher autonomous",
    ]
    assert len(await store.claim(ANNA, 10)) == 5


async def test_orphans_of_other_agents_are_left_to_whoever_runs_them(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await start(store, ONE)
    await claim_one(store)
    assert await store.claim(BERT, 10, agents={"other": None}) == []
    assert names(await store.claim(BERT, 10, agents={"watcher": None})) == [ONE]


async def test_the_next_moment_that_somebody_is_due_is_known(store: JournalStore) -> None:
    await start(store, ONE)
    lease = await claim_one(store)
    now = (await store.beat(ANNA)).now
    await store.commit(lifecycle.park_session(lease, "park", make_parked(wake_at=now + DAY)))
    assert (await next_look(store, now))["due_at"] == now + DAY
    assert (await next_look(store, now + DAY))["due_at"] is None


async def next_look(store: JournalStore, now: int, worker: WorkerId = ANNA) -> dict[str, int | None]:
    (values,) = await store.ask(Query("next_look", dict[str, int | None], {"now": now, "worker": worker}))
    return values


async def test_the_hot_state_of_a_session_is_kept_for_its_successor(store: JournalStore) -> None:
    await start(store, ONE)
    assert await store.ask(Query("snapshot", dict[str, Any], {"session": ONE})) == []
    await claim_one(store)
    now = (await store.beat(ANNA, {ONE: b"hot", SessionId("another"): b"not mine"})).now
    assert await store.ask(Query("snapshot", dict[str, Any], {"session": ONE})) == [{"at": now, "data": b"hot"}]
    assert await store.ask(Query("snapshot", dict[str, Any], {"session": "another"})) == []


ANY: AgentConcurrency = {"watcher": None}


async def fire_trigger(store: JournalStore, session: str, agent: str = "watcher") -> SessionId:
    event = SessionStarted(session=session, agent=agent, kind="task", started_by="a trigger", trigger="nightly")
    await store.commit(lifecycle.start_session(event))
    return SessionId(session)


async def list_offered(store: JournalStore, agents: AgentConcurrency = ANY, limit: int = 100) -> list[Ticket]:
    """Offer what is due, and return what was handed out in the transaction itself."""
    heard: list[Ticket] = []
    offered = await store.offer(limit, agents, lambda _, tickets: heard.extend(tickets))
    assert list(offered.tickets) == heard
    return heard


async def test_what_is_due_is_offered_once(store: JournalStore) -> None:
    await fire_trigger(store, ONE)
    assert await list_offered(store) == [Ticket(ONE, "watcher", 0)]
    assert await list_offered(store) == []
    assert await list_offered(store, {"other": None}) == []


async def test_only_so_much_is_offered_as_is_asked_for_the_longest_due_first(store: JournalStore) -> None:
    for name in ("c", "a", "b"):
        await fire_trigger(store, name)
    assert [ticket.session for ticket in await list_offered(store, limit=2)] == ["c", "a"]
    assert await list_offered(store, limit=2) == []
    assert [ticket.session for ticket in await list_offered(store, limit=3)] == ["b"]


async def test_an_offer_returns_whether_there_may_be_more(store: JournalStore) -> None:
    for name in ("a", "b", "c"):
        await fire_trigger(store, name)

    async def more(limit: int) -> bool:
        return (await store.offer(limit, ANY, lambda _, __: None)).has_more

    assert [await more(2), await more(2), await more(3), await more(4)] == [True, True, True, False]


async def test_a_ticket_that_is_given_back_is_offered_again_at_once(store: JournalStore) -> None:
    await fire_trigger(store, ONE)
    (ticket,) = await list_offered(store)
    assert await store.claim(ANNA, 0, ticket) == []
    assert await list_offered(store) == [ticket]


async def test_a_ticket_is_a_lease_for_whoever_comes_first_with_it(store: JournalStore) -> None:
    await fire_trigger(store, ONE)
    (ticket,) = await list_offered(store)
    assert await store.claim(ANNA, 1, ticket) == [Lease(ONE, ANNA, 1)]
    assert await store.claim(BERT, 1, ticket) == []


async def test_a_ticket_is_void_when_anybody_has_had_the_session_since(store: JournalStore) -> None:
    await fire_trigger(store, ONE)
    (ticket,) = await list_offered(store)
    (lease,) = await store.claim(ANNA, 1, agents=ANY)
    await store.commit(lifecycle.park_session(lease, "rest", make_parked()))
    assert await store.claim(BERT, 1, ticket) == []


async def test_what_a_failing_hand_was_to_give_out_is_offered_again(store: JournalStore) -> None:
    await fire_trigger(store, ONE)

    def broken(_: object, __: object) -> None:
        raise StoreUnavailable("The queue is away.")

    with pytest.raises(StoreUnavailable):
        await store.offer(10, ANY, broken)
    assert len(await list_offered(store)) == 1


async def test_a_ticket_that_nobody_used_is_offered_again_after_a_lease(place: "Place") -> None:
    store = place.open(lease=AT_ONCE)
    await fire_trigger(store, ONE)
    assert len(await list_offered(store)) == 1
    assert len(await list_offered(store)) == 1


async def test_the_sessions_of_a_dead_worker_are_offered_and_those_of_a_live_one_are_not(store: JournalStore) -> None:
    await fire_trigger(store, ONE)
    (ticket,) = await list_offered(store)
    (lease,) = await store.claim(ANNA, 1, ticket)
    assert await list_offered(store) == []
    await store.leave(ANNA)
    (again,) = await list_offered(store)
    assert again == Ticket(ONE, "watcher", lease.generation)
    assert await store.claim(BERT, 1, again) == [Lease(ONE, BERT, 2)]


async def test_an_owner_that_came_back_keeps_what_was_offered_meanwhile(store: JournalStore) -> None:
    await fire_trigger(store, ONE)
    (ticket,) = await list_offered(store)
    await store.claim(ANNA, 1, ticket)
    await store.leave(ANNA)
    (again,) = await list_offered(store)
    await store.beat(ANNA)
    assert await store.claim(BERT, 1, again) == []


@pytest.mark.parametrize("by", ["claims", "tickets"])
async def test_no_more_tasks_of_an_agent_are_awake_than_it_allows(store: JournalStore, by: str) -> None:
    for number in range(5):
        await fire_trigger(store, f"task {number}")
    await start(store, "the agent's own")
    two: AgentConcurrency = {"watcher": 2}
    if by == "claims":
        leases = list(await store.claim(ANNA, 10, agents=two))
        assert await store.claim(BERT, 10, agents=two) == []
    else:
        tickets = await list_offered(store, two)
        assert await list_offered(store, two) == []
        leases = [lease for ticket in tickets for lease in await store.claim(ANNA, 1, ticket)]
        assert await list_offered(store, two) == []
    assert names(leases) == ["task 0", "task 1", "the agent's own"]
    ends = next(lease for lease in leases if lease.session == "task 0")
    await store.commit(lifecycle.end_session(ends, "CANCELLED", "cancelled"))
    assert [ticket.session for ticket in await list_offered(store, two)] == ["task 2"]
    assert await store.claim(BERT, 10, agents=two) == []


async def test_what_is_on_offer_takes_the_room_of_its_own_agent_and_of_no_other(store: JournalStore) -> None:
    one_each: AgentConcurrency = {"watcher": 1, "clerk": 1}
    await fire_trigger(store, "a")
    assert [ticket.session for ticket in await list_offered(store, one_each)] == ["a"]
    await fire_trigger(store, "b", "clerk")
    await fire_trigger(store, "c")
    assert [ticket.session for ticket in await list_offered(store, one_each)] == ["b"]


async def test_a_void_ticket_takes_no_room(store: JournalStore) -> None:
    values: AgentConcurrency = {"watcher": 1}
    await fire_trigger(store, "a")
    assert len(await list_offered(store, values)) == 1
    (lease,) = await store.claim(ANNA, 1, agents=ANY)
    await store.commit(lifecycle.park_session(lease, "rest", make_parked()))
    await fire_trigger(store, "b")
    assert [ticket.session for ticket in await list_offered(store, values)] == ["b"]


async def test_several_processes_together_wake_no_more_tasks_than_an_agent_allows(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(4)]
    for number in range(30):
        await fire_trigger(stores[0], f"task {number:02}")
    workers = [WorkerId(f"worker {number}") for number in range(4)]
    claims = [stores[number % 4].claim(workers[number % 4], 3, agents={"watcher": 5}) for number in range(16)]
    taken = [lease for leases in await asyncio.gather(*claims) for lease in leases]
    assert len({lease.session for lease in taken}) == len(taken) == 5


async def test_several_processes_offer_each_session_once(shared_place: "Place") -> None:
    stores = [shared_place.open() for _ in range(4)]
    for number in range(40):
        await fire_trigger(stores[0], f"task {number:02}")
    heard: list[Ticket] = []
    offers = [stores[number % 4].offer(3, ANY, lambda _, tickets: heard.extend(tickets)) for number in range(40)]
    await asyncio.gather(*offers)
    assert len({ticket.session for ticket in heard}) == len(heard)


async def test_what_a_worker_says_about_itself_is_known_to_all(store: JournalStore) -> None:
    now = (await store.beat(ANNA, {}, "anna says so")).now
    await store.beat(BERT)
    await store.beat(ANNA)
    rows = await store.ask(Query("all_workers", dict[str, Any]))
    assert [(row["worker"], row["about"]) for row in rows] == [(ANNA, "anna says so"), (BERT, "")]
    assert all(row["alive_until"] > now for row in rows)


async def test_the_next_moment_at_which_another_workers_leases_run_out_is_known(store: JournalStore) -> None:
    async def lapse(now: int) -> int | None:
        return (await next_look(store, now, BERT))["lapses_at"]

    now = (await store.beat(ANNA)).now
    assert await lapse(now) is None
    await start(store, ONE)
    await claim_one(store, ANNA)
    (row,) = await store.ask(Query("all_workers", dict[str, Any]))
    assert await lapse(now) == row["alive_until"]
    assert await lapse(row["alive_until"] + 1) is None
    await store.beat(BERT)
    await store.claim(BERT, 1, ONE)
    assert await lapse(now) == row["alive_until"]

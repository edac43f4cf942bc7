"""The writes that begin, wake, rest and end a session."""

import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.errors import LeaseLost
from halter.core.events import (
    CallStarted,
    CostCapReached,
    OverrunIncurred,
    RequestStarted,
    SessionEnded,
    SessionParked,
    SessionStarted,
    SessionWoken,
    WakePosted,
)
from halter.core.ids import WorkerId, inbox_stream, session_stream
from halter.core.money import Account, BudgetRow, Cap, Caps, Overrun, Spender, carve, make_legs
from halter.core.ports import Lease, Query
from halter.core.rows import NO_OWNER, HoldRow, SessionRow, SpendRow
from halter.core.vocabulary import WakeCause
from halter.guard.ledger import ActualResult, change_cap
from halter.state.lifecycle import end_session, park_session, post_message, post_wake, start_child, wake_session
from halter.testing.fakes import HoldRefused, HoldTaken, hold
from halter.testing.world import World

CAP = 100
CARVED = 30
CAPS = Caps(session=Cap(CAP), agent=(), fleet=(Cap(1000, "day"),))
CHILD_CAPS = Caps(session=Cap(CARVED), agent=(), fleet=CAPS.fleet)


async def row_of(world: World, session: str) -> SessionRow:
    (row,) = await world.store.ask(Query("session", SessionRow, {"session": session}))
    return row


async def budgets(world: World) -> dict[str, tuple[int, int, int]]:
    rows = await world.store.ask(Query("budgets", BudgetRow))
    return {row.scope: (row.spent, row.held, row.overrun) for row in rows if row.unit == "usd"}


async def claim_session(world: World, session: str) -> Lease:
    leases = await world.store.claim(WorkerId("w1"), 10)
    return next(lease for lease in leases if lease.session == session)


async def start_session(world: World, session: str = "s1") -> Lease:
    return await claim_session(world, await world.start(session))


def child(parent: str = "s1", cap: int = CARVED) -> SessionStarted:
    carved = carve(parent, cap, CAP)
    return SessionStarted(session="kid", agent="helper", kind="task", started_by=parent, parent=parent, carved=carved)


async def take_hold(world: World, lease: Lease, usd: int, caps: Caps = CAPS, call: str = "call") -> HoldTaken:
    amounts = make_legs(caps, Spender(lease.session, "agent"), world.now, usd=usd)
    answer = await hold(world.ledger, lease, CallStarted(call=call, tool="spend", legs=amounts))
    assert isinstance(answer, HoldTaken)
    return answer


async def test_a_session_is_due_at_once_and_beginning_it_again_changes_nothing(world: World) -> None:
    await world.start("s1", agent="night-watch", task="Watch.")
    first = await row_of(world, "s1")
    assert (first.agent, first.state, first.due_at, first.owner) == ("night-watch", "RUNNING", world.now, NO_OWNER)
    await world.advance(HOUR)
    await world.start("s1", agent="somebody else")
    assert await row_of(world, "s1") == first
    assert len(await world.events(session_stream("s1"))) == 1


async def test_a_sleeping_session_is_due_at_its_time_and_belongs_to_nobody(world: World) -> None:
    lease = await start_session(world)
    await world.store.commit(park_session(lease, "rest", SessionParked(state="SLEEPING", wake_at=world.now + HOUR)))
    row = await row_of(world, "s1")
    assert (row.state, row.due_at, row.owner) == ("SLEEPING", world.now + HOUR, NO_OWNER)
    assert await world.store.claim(WorkerId("w1"), 10) == []
    with pytest.raises(LeaseLost):
        await world.store.commit(wake_session(lease, "too late", "timer", 0))


async def test_a_session_that_waits_without_a_time_is_due_only_when_something_arrives(world: World) -> None:
    lease = await start_session(world)
    await world.store.commit(park_session(lease, "rest", SessionParked(state="WAITING_FOR_INPUT")))
    assert (await row_of(world, "s1")).due_at is None
    await world.advance(HOUR)
    await world.send_message("s1", "Hello.")
    assert (await row_of(world, "s1")).due_at == world.now


async def test_a_resident_session_keeps_its_owner_while_it_rests(world: World) -> None:
    lease = await start_session(world)
    await world.store.commit(park_session(lease, "rest", SessionParked(state="SLEEPING", resident=True)))
    assert (await row_of(world, "s1")).owner == "w1"
    await world.store.commit(wake_session(lease, "wake", "signal", 0))
    assert (await row_of(world, "s1")).state == "RUNNING"


async def test_a_session_claimed_without_a_cause_was_taken_over(world: World) -> None:
    lease = await start_session(world)
    await world.send_message("s1", "Hello.")
    await world.store.commit(wake_session(lease, "wake", None, 1))
    (woken,) = [stored.event for stored in world.history if isinstance(stored.event, SessionWoken)]
    assert (woken.cause, woken.inbox_seen) == ("takeover", 1)
    assert (await world.session("s1")).inbox_seen == 1


@pytest.mark.parametrize("cause", ["message", "decision", "trigger", "child", "webhook", "timer"])
async def test_people_decisions_and_whatever_else_is_no_signal_always_wake(world: World, cause: WakeCause) -> None:
    lease = await start_session(world)
    await world.store.commit(park_session(lease, "rest", SessionParked(state="SLEEPING", wake_at=world.now + HOUR)))
    await world.store.commit(
        post_wake("s1", "news", WakePosted(cause=cause, origin="person", sender="mara", wakes=False))
    )
    assert (await row_of(world, "s1")).due_at == world.now


@pytest.mark.parametrize(("name", "wakes"), [("smoke", True), ("water", True), ("smok", False), ("", False)])
async def test_a_signal_wakes_only_a_session_that_asked_for_it_by_name(world: World, name: str, *, wakes: bool) -> None:
    lease = await start_session(world)
    rest = SessionParked(state="SLEEPING", wake_at=world.now + HOUR, wake_on=("smoke", "water"))
    await world.store.commit(park_session(lease, "rest", rest))
    await world.store.commit(
        post_wake("s1", "news", WakePosted(cause="signal", origin="sensor", sender="s", name=name))
    )
    row = await row_of(world, "s1")
    assert row.due_at == (world.now if wakes else world.now + HOUR)
    assert row.inbox_head == 1


async def test_for_a_session_that_has_ended_or_never_existed_nothing_is_written(world: World) -> None:
    lease = await start_session(world)
    await world.store.commit(end_session(lease, "COMPLETED", "completed"))
    for session in ("s1", "nobody"):
        committed = await world.store.commit(post_message(session, f"to {session}", b"Hello?", "mara"))
        assert committed.events == ()
        assert await world.events(inbox_stream(session)) == []


async def test_parking_is_refused_while_something_that_wakes_is_unseen(world: World) -> None:
    lease = await start_session(world)
    await world.send_message("s1", "Wait!")
    refused = await world.store.commit(park_session(lease, "rest", SessionParked(state="SLEEPING", inbox_seen=0)))
    assert refused.events == ()
    assert (await row_of(world, "s1")).owner == "w1"
    parked = await world.store.commit(park_session(lease, "rest", SessionParked(state="SLEEPING", inbox_seen=1)))
    assert len(parked.events) == 1


async def test_parking_is_not_refused_for_a_signal_that_nobody_asked_for(world: World) -> None:
    lease = await start_session(world)
    await world.store.commit(
        post_wake("s1", "news", WakePosted(cause="signal", origin="sensor", sender="s", name="draught"))
    )
    parked = await world.store.commit(park_session(lease, "rest", SessionParked(state="SLEEPING", inbox_seen=0)))
    assert len(parked.events) == 1
    assert (await row_of(world, "s1")).due_at is None


async def test_an_ended_session_is_never_due_again(world: World) -> None:
    lease = await start_session(world)
    await world.store.commit(end_session(lease, "HALTED", "external_halt"))
    row = await row_of(world, "s1")
    assert (row.state, row.terminal_reason, row.ended_at, row.due_at, row.owner) == (
        "HALTED",
        "external_halt",
        world.now,
        None,
        NO_OWNER,
    )
    await world.advance(HOUR)
    assert await world.store.claim(WorkerId("w1"), 10) == []


async def test_a_session_cannot_end_while_it_holds_money(world: World) -> None:
    lease = await start_session(world)
    call = await take_hold(world, lease, 20)
    assert (await world.store.commit(end_session(lease, "COMPLETED", "completed"))).events == ()
    assert (await row_of(world, "s1")).ended_at is None
    await world.ledger.settle(lease, call.flight, ActualResult("ok", usd=5))
    assert len((await world.store.commit(end_session(lease, "COMPLETED", "completed"))).events) == 1


async def test_a_sub_sessions_cap_is_held_in_its_parents_session_and_nowhere_else(world: World) -> None:
    lease = await start_session(world)
    committed = await world.store.commit(start_child(child(), lease, b"Help."))
    assert [event.stream for event in committed.events] == [session_stream("kid")]
    assert await budgets(world) == {"session:s1": (0, CARVED, 0), "session:kid": (0, 0, 0)}
    assert (await row_of(world, "kid")).parent == "s1"
    assert (await world.store.commit(end_session(lease, "COMPLETED", "completed"))).events == ()


async def test_what_was_carved_is_the_sub_sessions_cap_whatever_its_own_configuration_says(world: World) -> None:
    await world.store.commit(start_child(child(), await start_session(world), b"Help."))
    kid = await claim_session(world, "kid")
    generous = Caps(session=Cap(CAP * 10), agent=(), fleet=())
    amounts = make_legs(generous, Spender("kid", "helper"), world.now, usd=CARVED + 1)
    answer = await hold(world.ledger, kid, CallStarted(call="dear", tool="spend", legs=amounts))
    assert isinstance(answer, HoldRefused)
    assert answer.event.cap == CARVED


@pytest.mark.parametrize("cap", [CARVED + 1, None])
async def test_a_sub_sessions_cap_is_never_raised_above_what_was_carved_for_it(world: World, cap: int | None) -> None:
    await world.store.commit(start_child(child(), await start_session(world), b"Help."))
    kid = Account("session:kid", "", "usd")
    assert (await world.store.commit(change_cap(kid, cap, "ada", "raise"))).events == ()
    assert len((await world.store.commit(change_cap(kid, CARVED - 1, "ada", "lower"))).events) == 1


async def test_a_session_that_still_holds_tokens_does_not_end(world: World) -> None:
    lease = await start_session(world)
    amounts = make_legs(Caps(token_budget=500), Spender("s1", "agent"), world.now, usd=0, tokens=100)
    answer = await hold(world.ledger, lease, RequestStarted(request="r", model="m", purpose="turn", legs=amounts))
    assert isinstance(answer, HoldTaken)
    assert (await world.store.commit(end_session(lease, "COMPLETED", "completed"))).events == ()
    await world.ledger.settle(lease, answer.flight, ActualResult("ok", tokens=40))
    assert len((await world.store.commit(end_session(lease, "COMPLETED", "completed"))).events) == 1


async def test_without_room_below_the_parents_cap_no_sub_session_begins(world: World) -> None:
    lease = await start_session(world)
    committed = await world.store.commit(start_child(child(cap=CAP + 1), lease))
    (refusal,) = [stored.event for stored in committed.events]
    assert isinstance(refusal, CostCapReached)
    assert (refusal.refused, refusal.scope, refusal.amount) == ("kid", "session:s1", CAP + 1)
    assert await world.events(session_stream("kid")) == []
    assert (await world.session("s1")).cost_cap_reached


async def test_a_sub_session_waits_for_its_parents_other_holds(world: World) -> None:
    lease = await start_session(world)
    call = await take_hold(world, lease, 80)
    assert (await world.store.commit(start_child(child(), lease))).events == ()
    await world.ledger.settle(lease, call.flight, ActualResult("ok", usd=5))
    assert len((await world.store.commit(start_child(child(), lease))).events) == 1


async def test_at_its_end_a_sub_session_settles_what_was_carved_out_with_what_it_really_spent(world: World) -> None:
    parent = await start_session(world)
    await world.store.commit(start_child(child(), parent))
    kid = await claim_session(world, "kid")
    call = await take_hold(world, kid, 20, CHILD_CAPS)
    assert (await budgets(world))["fleet"] == (0, 20, 0)
    await world.ledger.settle(kid, call.flight, ActualResult("ok", usd=12))
    await world.store.commit(end_session(kid, "COMPLETED", "completed", "s1"))
    assert await budgets(world) == {"session:s1": (12, 0, 0), "session:kid": (12, 0, 0), "fleet": (12, 0, 0)}
    assert await world.store.ask(Query("holds", HoldRow)) == []
    assert [spend.usd for spend in await world.store.ask(Query("all_spends", SpendRow))] == [12]
    assert len((await world.store.commit(end_session(parent, "COMPLETED", "completed"))).events) == 1


async def test_what_a_sub_session_spent_beyond_its_cap_is_charged_to_its_parent_too(world: World) -> None:
    parent = await start_session(world)
    await take_hold(world, parent, CAP - CARVED, call="parent's own")
    await world.store.commit(start_child(child(), parent))
    kid = await claim_session(world, "kid")
    call = await take_hold(world, kid, CARVED, CHILD_CAPS)
    await world.ledger.settle(kid, call.flight, ActualResult("ok", usd=CARVED + 7))
    committed = await world.store.commit(end_session(kid, "BUDGET_EXCEEDED", "cost_cap_reached", "s1"))
    incident, outcome, result = (stored.event for stored in committed.events)
    assert isinstance(result, WakePosted)
    assert incident == OverrunIncurred(hold="kid", scope="session:s1", window="", unit="usd", amount=7)
    assert isinstance(outcome, SessionEnded)
    assert outcome.charge is not None
    assert outcome.charge.overruns == (Overrun("session:s1", "", "usd", 7),)
    assert (await budgets(world))["session:s1"] == (CARVED + 7, CAP - CARVED, 7)


async def test_a_child_of_a_taken_over_parent_begins_with_a_generation_of_its_own(world: World) -> None:
    await start_session(world)
    await world.advance(MINUTE)
    (parent,) = await world.store.claim(WorkerId("w2"), 10)
    assert parent.generation == 2
    committed = await world.store.commit(start_child(child(), parent))
    assert [event.generation for event in committed.events] == [0]
    (kid,) = await world.store.claim(WorkerId("w2"), 10)
    assert kid.generation == 1

"""Which state may follow which, said a second time and in another way, and that every write keeps to it."""

from typing import get_args

import pytest

from halter.core.clock import HOUR
from halter.core.events import SessionParked
from halter.core.ids import WorkerId
from halter.core.ports import Lease
from halter.core.vocabulary import END_STATES, State, TerminalReason
from halter.state import lifecycle
from halter.state.session import TRANSITIONS, IllegalTransition, check_transition
from halter.testing.world import World

STATES: tuple[State, ...] = get_args(State)
WORKING: tuple[State, ...] = ("RUNNING", "WAITING_FOR_TOOL")
RESTING: tuple[State, ...] = ("WAITING_FOR_INPUT", "WAITING_FOR_APPROVAL", "WAITING_FOR_BUDGET", "SLEEPING", "PAUSED")
OVER: tuple[State, ...] = ("COMPLETED", "CANCELLED", "TIMED_OUT", "MAX_STEPS", "BUDGET_EXCEEDED", "HALTED", "ERROR")


def allowed(before: State, after: State) -> bool:
    """What works may become anything; what rests rests on, works again or is stopped; what is over may be let go on."""
    if before in WORKING:
        return True
    if before in RESTING:
        return after in RESTING or after in ("RUNNING", "CANCELLED", "HALTED")
    return after == "RUNNING" and before != "CANCELLED"


def test_every_state_is_of_one_kind_and_in_the_table() -> None:
    assert sorted((*WORKING, *RESTING, *OVER)) == sorted(STATES) == sorted(TRANSITIONS)
    assert set(OVER) == set(END_STATES)


@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("after", STATES)
def test_a_transition_is_let_be_exactly_where_it_makes_sense(before: State, after: State) -> None:
    if allowed(before, after):
        check_transition("s", before, after)
        return
    with pytest.raises(IllegalTransition, match=f"Session s is {before} and cannot become {after}"):
        check_transition("s", before, after)


def test_nobody_can_change_the_table() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS["CANCELLED"] = frozenset(("RUNNING",))  # type: ignore[index]


async def claimed(world: World) -> Lease:
    (lease,) = await world.store.claim(WorkerId("w"), 1)
    return lease


async def resting(world: World, state: State) -> Lease:
    """A session that rests, with its owner at hand."""
    await world.start("s")
    lease = await claimed(world)
    event = SessionParked(state=state, wake_at=world.now + HOUR, resident=True)
    await world.store.commit(lifecycle.park_session(lease, "rest", event))
    return lease


REASONS: dict[State, TerminalReason] = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "TIMED_OUT": "timed_out",
    "MAX_STEPS": "max_steps",
    "BUDGET_EXCEEDED": "cost_cap_reached",
    "HALTED": "external_halt",
    "ERROR": "error",
}


@pytest.mark.parametrize("state", RESTING)
@pytest.mark.parametrize("after", RESTING)
async def test_what_rests_may_rest_on_for_something_else(world: World, state: State, after: State) -> None:
    lease = await resting(world, state)
    await world.store.commit(lifecycle.park_session(lease, "then", SessionParked(state=after)))
    assert (await world.session("s")).state == after


@pytest.mark.parametrize("state", RESTING)
@pytest.mark.parametrize("after", OVER)
async def test_of_what_rests_only_a_halt_or_a_cancel_makes_an_end(world: World, state: State, after: State) -> None:
    lease = await resting(world, state)
    write = lifecycle.end_session(lease, after, REASONS[after])
    if after in ("HALTED", "CANCELLED"):
        await world.store.commit(write)
        assert (await world.session("s")).state == after
        return
    with pytest.raises(IllegalTransition):
        await world.store.commit(write)
    assert (await world.session("s")).state == state


@pytest.mark.parametrize("state", OVER)
async def test_what_is_over_may_be_let_go_on_unless_it_was_cancelled(world: World, state: State) -> None:
    await world.start("s")
    lease = await claimed(world)
    await world.store.commit(lifecycle.end_session(lease, state, REASONS[state]))
    reopened = await world.store.commit(lifecycle.reopen_session("s", "again", "ada"))
    assert bool(reopened.events) == (state != "CANCELLED")
    session = await world.session("s")
    assert (session.state, session.ended) == (("CANCELLED", True) if state == "CANCELLED" else ("RUNNING", False))


@pytest.mark.parametrize("by", ["", "agent:desk"])
async def test_nobody_but_a_person_lets_a_session_go_on(world: World, by: str) -> None:
    await world.start("s")
    await world.store.commit(lifecycle.end_session(await claimed(world), "COMPLETED", "completed"))
    assert not (await world.store.commit(lifecycle.reopen_session("s", "again", by))).events


async def test_a_session_that_runs_is_not_reopened(world: World) -> None:
    await world.start("s")
    assert not (await world.store.commit(lifecycle.reopen_session("s", "again", "ada"))).events

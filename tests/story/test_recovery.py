"""A crash between intent and outcome: no plain write runs twice, and every doubt comes before somebody."""

from typing import Any

import pytest

from halter.core.clock import MINUTE
from halter.core.events import CallStarted, SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.money import BudgetRow, Caps, Spender, make_legs
from halter.core.ports import Draft, Lease, Query, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rows import AuditRow, HoldRow
from halter.core.tools import EffectStatus, Invalid, Output, Permit, ToolSpec, Valid
from halter.guard.approvals import list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_preparer import ToolExecution
from halter.guard.call_request import CallRequest
from halter.guard.halts import halt
from halter.guard.recovery import CallInDoubt, Recovery
from halter.guard.tool_door import ToolDoor
from halter.state import lifecycle
from halter.state.session import replay
from halter.testing.world import World

ARGUMENTS = Valid({"order": 7}, b'{"order":7}')


class Deed:
    """A tool that remembers under which keys it acted."""

    def __init__(self, happened: EffectStatus = "unknown", **spec: Any) -> None:
        self.spec = ToolSpec(name="deed", description="Do it.", schema=b"{}", **spec)
        self.keys: list[str] = []
        self._happened: EffectStatus = happened

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return ARGUMENTS

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        permit.use()
        self.keys.append(permit.id)
        return Output("done", cost_micros=300)

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        return self._happened


async def crash_in_call(world: World, tool: Deed) -> tuple[Lease, CallInDoubt, Recovery]:
    """Start a call, crash, and take the session over in another process."""
    await world.store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
    )
    (first,) = await world.store.claim(WorkerId("first"), 1)
    held = make_legs(Caps(), Spender("s", "desk"), world.now, usd=500)
    intent = CallStarted(
        call="s.1", tool="deed", legs=held, effect=tool.spec.effect, idempotent=tool.spec.idempotent, audit="full"
    )
    rows = [*rows_of_hold("s.1", held), (AuditRow, "s.1")]
    await world.store.commit(Write(session_stream("s"), "begin", lambda _: [Draft(intent, b"{}")], rows, first))
    await world.advance(MINUTE)
    (lease,) = await world.store.claim(WorkerId("second"), 1)
    (flight,) = replay(await world.store.read(session_stream("s"))).in_flight.values()
    door = ToolDoor(world.store, world.clock, world.ledger, redact=str)
    doubt = CallInDoubt(flight, ToolExecution(tool, ARGUMENTS, {}, ("session:s",), tool.spec.timeout))
    return lease, doubt, Recovery(world.store, world.ledger, door)


@pytest.mark.parametrize("spec", [{"effect": "read"}, {"effect": "write", "idempotent": True}])
async def test_what_may_be_repeated_runs_again_under_the_same_key(world: World, spec: dict[str, Any]) -> None:
    tool = Deed(**spec)
    lease, doubt, recovery = await crash_in_call(world, tool)
    answer = await recovery.resolve(lease, doubt)
    assert isinstance(answer, Answer)
    assert (answer.outcome, answer.cost_micros, tool.keys) == ("ok", 300, ["s.1"])
    assert await world.store.ask(Query("holds", HoldRow)) == []


@pytest.mark.parametrize(
    ("spec", "outcome"), [({"effect": "read"}, "external_halt"), ({"effect": "write", "idempotent": True}, "unknown")]
)
async def test_under_a_halt_nothing_is_repeated_and_a_write_stays_unknown(
    world: World, spec: dict[str, Any], outcome: str
) -> None:
    tool = Deed(**spec)
    lease, doubt, recovery = await crash_in_call(world, tool)
    await world.store.commit(halt("session:s", "ada", "halt"))
    answer = await recovery.resolve(lease, doubt)
    assert isinstance(answer, Answer)
    assert (answer.outcome, tool.keys) == (outcome, [])


async def test_a_plain_write_never_runs_again_automatically_and_its_hold_stays(world: World) -> None:
    tool = Deed()
    lease, doubt, recovery = await crash_in_call(world, tool)
    assert await recovery.resolve(lease, doubt) == ApprovalRequired("s.1", "s.1/unknown")
    assert await recovery.resolve(lease, doubt) == ApprovalRequired("s.1", "s.1/unknown")
    assert tool.keys == []
    assert [pending_decision.about for pending_decision in await list_pending_decisions(world.store)] == [
        "unknown_call"
    ]
    assert [hold.hold for hold in await world.store.ask(Query("holds", HoldRow))] == ["s.1"]


@pytest.mark.parametrize(("happened", "outcome", "spent"), [(True, "ok", 500), (False, "error", 0)])
async def test_a_person_says_what_became_of_it(world: World, *, happened: bool, outcome: str, spent: int) -> None:
    tool = Deed()
    lease, doubt, recovery = await crash_in_call(world, tool)
    await recovery.resolve(lease, doubt)
    assert (await recovery.settle_by_person(lease, doubt.flight, happened=happened)).outcome == outcome
    (session,) = [row for row in await world.store.ask(Query("budgets", BudgetRow)) if row.scope == "session:s"]
    assert (session.spent, session.held) == (spent, 0)
    (row,) = await world.store.ask(Query("all_audit", AuditRow))
    assert row.outcome == outcome


@pytest.mark.parametrize(
    ("happened", "keys", "expected"),
    [("done", [], "ok"), ("not_done", ["s.1"], "ok"), ("unknown", [], None)],
)
async def test_a_tools_own_check_decides(
    world: World, happened: EffectStatus, keys: list[str], expected: str | None
) -> None:
    tool = Deed(happened, checked=True)
    lease, doubt, recovery = await crash_in_call(world, tool)
    answer = await recovery.resolve(lease, doubt)
    assert (answer.outcome if isinstance(answer, Answer) else None) == expected
    assert tool.keys == keys


async def test_a_successor_that_asks_for_the_same_call_does_not_act_on_its_predecessors_intent(world: World) -> None:
    tool = Deed()
    door = ToolDoor(world.store, world.clock, world.ledger, redact=str)
    await world.store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
    )
    call_request = CallRequest(call="s.1", tool="deed", arguments=b"{}", session="s", agent="desk", now=world.now)
    for worker in ("first", "second"):
        (lease,) = await world.store.claim(WorkerId(worker), 1)
        assert lease.session == SessionId("s")
        await door.admit_and_run(lease, call_request, ToolExecution(tool, ARGUMENTS, {}, (), tool.spec.timeout))
        await world.advance(MINUTE)
    assert tool.keys == ["s.1"]

"""The door to a tool: the brakes in their order, halts that are heard, approvals that are bound, rates that hold."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.events import RuleEnded, RuleMade, SessionParked, SessionStarted
from halter.core.ids import FLEET, WorkerId, session_stream
from halter.core.money import BudgetRow, Cap, Caps, Spender, list_accounts, make_legs, usd_to_micros
from halter.core.ports import Draft, Lease, Query, Store, Write
from halter.core.rows import AuditRow, HoldRow, RuleRow
from halter.core.tools import EffectStatus, Failed, Invalid, Output, Permit, ToolSpec, Unstoppable, Valid
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.call_preparer import ToolExecution
from halter.guard.call_request import CallRequest, RequiredApproval, list_call_rows
from halter.guard.halts import HALT_POLL_INTERVAL, HaltWatch, compute_ramp_delay, halt, list_halt_rows, resume
from halter.guard.judge import judge_call
from halter.guard.tool_door import ToolDoor
from halter.guard.tool_result import MAYBE_DONE
from halter.policy.levels import AttemptRate
from halter.state import lifecycle
from halter.testing.world import World

ARGUMENTS = Valid({"order": 7}, b'{"order":7}')
SCOPES = ("session:s", "agent:desk", "fleet")


def masked(text: str) -> str:
    return text.replace("hunter2", "[redacted]")


class Deed:
    """A tool whose act a test writes; it counts how often it really acted."""

    def __init__(
        self, act: Callable[[], Awaitable[str]] | None = None, reports: int | None = None, **spec: Any
    ) -> None:
        self.spec = ToolSpec(name="deed", description="Do it.", schema=b"{}", **spec)
        self.acts = 0
        self._act = act
        self._cost = reports

    def validate(self, arguments: bytes) -> Valid | Invalid:
        return ARGUMENTS

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        permit.use()
        self.acts += 1
        return Output(await self._act() if self._act else "done", self._cost)

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        return "unknown"


class Desk:
    """A session with its door."""

    def __init__(self, world: World, lease: Lease, caps: Caps) -> None:
        self.world = world
        self.lease = lease
        self.caps = caps
        self.door = ToolDoor(
            world.store, world.clock, world.ledger, redact=lambda text: text.replace("hunter2", "[redacted]")
        )
        self._calls = itertools.count()

    def asks(self, usd: int = 0, **more: Any) -> CallRequest:
        call = f"s.{next(self._calls)}"
        legs = make_legs(self.caps, Spender("s", "desk"), self.world.now, usd=usd)
        values = {"call": call, "tool": "deed", "arguments": ARGUMENTS.canonical, "session": "s", "agent": "desk"}
        return CallRequest(
            **{**values, "now": self.world.now, "halts": list_halt_rows(SCOPES), "legs": legs, "audit": "full", **more}
        )

    async def calls(self, tool: Deed, call_request: CallRequest, attempt: int = 0) -> Any:
        return await self.door.admit_and_run(
            self.lease, call_request, ToolExecution(tool, ARGUMENTS, {}, SCOPES, tool.spec.timeout), attempt
        )

    async def kinds(self) -> list[str]:
        return [event.kind for event in await self.world.store.read(session_stream("s"))][1:]


async def desk_in(world: World, caps: Caps | None = None) -> Desk:
    await world.store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
    )
    (lease,) = await world.store.claim(WorkerId("w"), 1)
    return Desk(world, lease, caps or Caps())


async def test_a_granted_call_acts_between_its_intent_and_its_outcome(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    answer = await desk.calls(tool, desk.asks(usd=500))
    assert answer == Answer("s.0", "ok", "done", 500, 0)
    assert await desk.kinds() == ["call_started", "call_settled"]
    (row,) = await world.store.ask(Query("all_audit", AuditRow))
    assert (row.tool, row.outcome, row.agent, row.cost_usd) == ("deed", "ok", "desk", 500)


async def test_who_asks_twice_for_one_call_is_told_twice_and_it_acts_once(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    call_request = desk.asks(usd=500)
    assert (
        await desk.calls(tool, call_request)
        == await desk.calls(tool, call_request)
        == Answer("s.0", "ok", "done", 500, 0)
    )
    assert tool.acts == 1


async def test_who_asks_for_a_call_that_is_under_way_waits_for_it_and_it_acts_once(world: World) -> None:
    going = asyncio.Event()

    async def slow() -> str:
        await going.wait()
        return "done"

    desk, tool = await desk_in(world), Deed(slow)
    call_request = desk.asks(usd=500)
    tasks = [asyncio.create_task(desk.calls(tool, call_request)) for _ in range(2)]
    await world.advance(SECOND)
    going.set()
    first, second = await asyncio.gather(*tasks)
    assert first.outcome == second.outcome == "ok"
    assert tool.acts == 1


async def test_a_free_tool_that_reports_a_cost_is_charged_for_it(world: World) -> None:
    desk = await desk_in(world, Caps(session=Cap(100)))
    tool = Deed(reports=130)
    answer = await desk.calls(tool, desk.asks(accounts=list_accounts(desk.caps, Spender("s", "desk"), world.now)))
    assert answer.cost_micros == 130
    assert await desk.kinds() == ["call_started", "call_settled", "overrun_incurred"]
    (budget,) = [row for row in await world.store.ask(Query("budgets", BudgetRow)) if row.scope == "session:s"]
    assert (budget.spent, budget.overrun) == (130, 30)


async def test_a_call_that_would_trip_all_brakes_reports_the_halt_then_the_grant_then_the_money(world: World) -> None:
    desk, tool = await desk_in(world, Caps(session=Cap(10))), Deed()
    flaw = ("tool_not_granted", "Not in this phase.")
    await world.store.commit(halt("fleet", "ada", "halt", "enough"))
    assert (await desk.calls(tool, desk.asks(usd=50, flaw=flaw))).outcome == "external_halt"
    await world.store.commit(resume("fleet", "ada", "resume"))
    assert (await desk.calls(tool, desk.asks(usd=50, flaw=flaw))).outcome == "tool_not_granted"
    assert (await desk.calls(tool, desk.asks(usd=50))).outcome == "cost_cap_reached"
    assert tool.acts == 0
    rows = await world.store.ask(Query("all_audit", AuditRow))
    assert [row.outcome for row in rows] == ["external_halt", "tool_not_granted", "cost_cap_reached"]


async def test_a_session_with_a_tenth_of_a_cent_stops_at_its_first_costed_call(world: World) -> None:
    desk, tool = await desk_in(world, Caps(session=Cap(usd_to_micros("0.001")))), Deed()
    answer = await desk.calls(tool, desk.asks(usd=usd_to_micros("0.005")))
    assert answer.outcome == "cost_cap_reached"
    assert "$0.001 is left of the cap of session:s" in answer.text
    assert await desk.kinds() == ["cost_cap_reached", "call_refused"]
    assert tool.acts == 0


STOPPED_CALLS = [("read", "external_halt", ""), ("write", "unknown", f" {MAYBE_DONE}")]
"""A read that is stopped has done nothing; of a write that began, nobody knows."""


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("effect", "outcome", "doubt"), STOPPED_CALLS)
async def test_a_halt_in_any_scope_stops_what_is_in_flight_within_a_second(
    world: World, scope: str, effect: str, outcome: str, doubt: str
) -> None:
    stopped: list[int] = []

    async def stuck() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(world.now)
        return "never"

    desk, tool = await desk_in(world), Deed(stuck, timeout=MINUTE, effect=effect)
    running = asyncio.create_task(desk.calls(tool, desk.asks(usd=500)))
    await world.advance(10 * SECOND)
    halted_at = world.now
    await world.store.commit(halt(scope, "ada", "halt"))
    answer = await running
    assert (answer.outcome, answer.text) == (outcome, f"{scope} was halted.{doubt}")
    assert stopped[0] - halted_at < SECOND
    assert await world.store.ask(Query("holds", HoldRow)) == []


async def test_after_a_fleet_halt_sessions_are_let_go_one_after_the_other(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    await world.store.commit(halt("fleet", "ada", "halt"))
    await world.store.commit(resume("fleet", "ada", "resume", ramp=MINUTE))
    wait = compute_ramp_delay("s", MINUTE)
    assert 0 < wait < MINUTE
    await world.advance(wait - 1)
    assert (await desk.calls(tool, desk.asks())).outcome == "external_halt"
    await world.advance(1)
    assert (await desk.calls(tool, desk.asks())).outcome == "ok"


def asks_for_approval(desk: Desk, digest: str = "d") -> CallRequest:
    return desk.asks(usd=500, approval=RequiredApproval("ask-1", digest, b"deed(order=7)"))


async def answer_only_decision(world: World, verdict: Any = "approve", digest: str | None = None) -> bool:
    (open_one,) = await list_pending_decisions(world.store)
    pending_decision = open_one if digest is None else msgspec.structs.replace(open_one, digest=digest)
    return bool((await world.store.commit(answer_decision(pending_decision, verdict, "ada", world.ids.make()))).events)


@pytest.mark.parametrize("over", ["ended", "expired", "never made"])
async def test_a_rule_that_is_over_when_the_call_is_judged_answers_nothing(world: World, over: str) -> None:
    """Whoever prepared the call may have seen the rule a moment before."""
    desk, tool = await desk_in(world), Deed()
    rule = {"rule": "r", "tool": "deed", "scope": "fleet", "owner": "", "matcher": "{}", "keys": ()}
    rule_made = RuleMade(**rule, by="ada", expires_at=world.now + HOUR)
    results = [rule_made, *([RuleEnded(rule="r", by="ada")] if over == "ended" else [])] if over != "never made" else []
    for event in results:
        await world.store.commit(Write(FLEET, event.KIND, lambda _, event=event: [Draft(event)], [(RuleRow, "r")]))
    if over == "expired":
        await world.advance(HOUR)
    need = RequiredApproval("ask-1", "d", b"deed(order=7)", rule="r")
    assert isinstance(await desk.calls(tool, desk.asks(approval=need)), ApprovalRequired)
    assert tool.acts == 0


async def test_a_call_asks_for_no_money_of_a_day_that_is_over(world: World) -> None:
    desk = await desk_in(world, Caps(agent=(Cap(100, "day"),)))
    call_request = desk.asks(usd=50)
    await world.advance(DAY)
    write = Write(
        session_stream("s"), "late", partial(judge_call, call_request), list_call_rows(call_request), desk.lease
    )
    assert (await world.store.commit(write)).events == ()


async def test_an_approved_call_runs_exactly_once(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    call_request = asks_for_approval(desk)
    assert await desk.calls(tool, call_request) == ApprovalRequired("s.0", "ask-1", tool="deed")
    assert tool.acts == 0
    assert await answer_only_decision(world)
    assert (await desk.calls(tool, call_request, attempt=1)).outcome == "ok"
    again = msgspec.structs.replace(call_request, call="s.9")
    assert (await desk.calls(tool, again, attempt=2)).outcome == "approval_denied"
    assert tool.acts == 1
    (row,) = [row for row in await world.store.ask(Query("all_audit", AuditRow)) if row.outcome == "ok"]
    assert (row.decision, row.decided_by) == ("ask-1", "ada")


async def test_an_approval_for_other_arguments_or_another_policy_approves_nothing(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    await desk.calls(tool, asks_for_approval(desk, "one"))
    assert await answer_only_decision(world)
    answer = await desk.calls(tool, asks_for_approval(desk, "two"))
    assert answer.outcome == "approval_denied"
    assert "no longer valid" in answer.text
    assert tool.acts == 0


async def test_nobody_can_approve_what_they_were_not_shown(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    await desk.calls(tool, asks_for_approval(desk))
    assert not await answer_only_decision(world, digest="something else")
    assert len(await list_pending_decisions(world.store)) == 1


@pytest.mark.parametrize("answered", [True, False])
async def test_an_expired_approval_is_told_as_an_expiry(world: World, *, answered: bool) -> None:
    desk, tool = await desk_in(world), Deed()
    call_request = asks_for_approval(desk)
    await desk.calls(tool, call_request)
    if answered:
        assert await answer_only_decision(world)
    await world.advance(24 * HOUR)
    assert not await answer_only_decision(world) if not answered else True
    assert (await desk.calls(tool, call_request, attempt=1)).outcome == "approval_expired"
    assert tool.acts == 0


async def test_a_no_is_a_no(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    call_request = asks_for_approval(desk)
    await desk.calls(tool, call_request)
    assert await answer_only_decision(world, "deny")
    answer = await desk.calls(tool, call_request, attempt=1)
    assert (answer.outcome, answer.text) == ("approval_denied", "ada denied this call.")


async def test_nobody_is_woken_for_what_the_budget_would_refuse(world: World) -> None:
    desk, tool = await desk_in(world, Caps(session=Cap(10))), Deed()
    assert (await desk.calls(tool, asks_for_approval(desk))).outcome == "cost_cap_reached"
    assert await list_pending_decisions(world.store) == []


async def test_a_decision_wakes_its_session(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    await desk.calls(tool, asks_for_approval(desk))
    event = SessionParked(state="WAITING_FOR_APPROVAL")
    assert (await world.store.commit(lifecycle.park_session(desk.lease, "park", event))).events
    assert await world.store.claim(WorkerId("w2"), 1) == []
    assert await answer_only_decision(world)
    assert len(await world.store.claim(WorkerId("w2"), 1)) == 1


async def test_of_sixty_parallel_calls_exactly_as_many_run_as_the_rate_allows(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    rate = AttemptRate(20, HOUR)
    answers = await asyncio.gather(*(desk.calls(tool, desk.asks(rate=rate)) for _ in range(60)))
    assert sorted(answer.outcome for answer in answers) == ["ok"] * 20 + ["rate_limited"] * 40
    await world.advance(HOUR - MINUTE)
    assert (await desk.calls(tool, desk.asks(rate=rate))).outcome == "rate_limited"
    await world.advance(3 * MINUTE)
    assert (await desk.calls(tool, desk.asks(rate=rate))).outcome == "ok"


async def test_failed_attempts_count_against_the_rate(world: World) -> None:
    async def fails() -> str:
        raise Failed("ValueError", "no such order")

    desk, tool = await desk_in(world), Deed(fails)
    answers = [await desk.calls(tool, desk.asks(rate=AttemptRate(20, HOUR))) for _ in range(50)]
    assert tool.acts == 20
    assert [answer.outcome for answer in answers].count("error") == 20
    assert answers[0].text == "ValueError: no such order"


async def test_a_tool_that_hangs_is_stopped_when_its_time_is_up(world: World) -> None:
    async def hangs() -> str:
        await asyncio.sleep(3600)
        return "late"

    desk, tool = await desk_in(world), Deed(hangs, timeout=5 * SECOND)
    before = world.now
    assert (await desk.calls(tool, desk.asks())).outcome == "timeout"
    assert world.now - before == 5 * SECOND


async def test_a_write_that_could_not_be_stopped_is_unknown(world: World) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise Unstoppable("deed did not stop") from None
        return "late"

    desk, tool = await desk_in(world), Deed(stubborn, timeout=5 * SECOND)
    assert (await desk.calls(tool, desk.asks(usd=500))).outcome == "unknown"


async def test_a_cancelled_call_gets_its_outcome_too(world: World) -> None:
    async def waits() -> str:
        await asyncio.sleep(3600)
        return "late"

    desk, tool = await desk_in(world), Deed(waits, timeout=HOUR)
    running = asyncio.create_task(desk.calls(tool, desk.asks(usd=500)))
    await world.advance(SECOND)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await desk.kinds() == ["call_started", "call_settled"]
    assert await world.store.ask(Query("holds", HoldRow)) == []


async def test_secrets_are_masked_before_the_journal_and_the_model(world: World) -> None:
    async def leaks() -> str:
        return "the password is hunter2"

    desk, tool = await desk_in(world), Deed(leaks)
    answer = await desk.calls(tool, desk.asks(arguments=b'{"password":"hunter2"}'))
    assert answer.text == "the password is [redacted]"
    for event in await world.store.read(session_stream("s")):
        assert b"hunter2" not in (event.body or b"") + event.facts


async def test_observing_lets_pass_and_records_what_would_have_been_refused(world: World) -> None:
    desk, tool = await desk_in(world, Caps(session=Cap(10))), Deed()
    flaw = ("tool_not_granted", "Not in this phase.")
    answer = await desk.calls(tool, desk.asks(usd=50, flaw=flaw, observe=True))
    assert answer.outcome == "ok"
    (started,) = [event for event in await world.store.read(session_stream("s")) if event.kind == "call_started"]
    assert b'"observed":["tool_not_granted","cost_cap_reached"]' in started.facts


async def test_a_halt_is_obeyed_also_by_those_that_are_only_observed(world: World) -> None:
    desk, tool = await desk_in(world), Deed()
    await world.store.commit(halt("agent:desk", "ada", "halt"))
    assert (await desk.calls(tool, desk.asks(observe=True))).outcome == "external_halt"


async def test_a_refusal_does_not_quote_a_secret_that_was_in_the_arguments(world: World) -> None:
    desk = await desk_in(world)
    flaw = ("invalid_arguments", "`order` is the text 'hunter2', but must be a number.")
    answer = await desk.calls(Deed(), desk.asks(flaw=flaw, tool="hunter2"))
    assert answer.text == "`order` is the text '[redacted]', but must be a number."
    assert all(b"hunter2" not in event.facts for event in await world.store.read(session_stream("s")))


class Counted:
    """A store that counts the questions it is asked."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.query_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def ask(self, query: Query[Any]) -> Any:
        self.query_count += 1
        return await self._store.ask(query)


async def test_a_watch_asks_nothing_any_more_once_nobody_waits(world: World) -> None:
    store: Any = Counted(world.store)
    pause = HaltWatch(store, world.clock).run(world.clock.sleep(2 * HALT_POLL_INTERVAL - 1), SCOPES, MINUTE)
    waiting = asyncio.create_task(pause)
    await world.advance(2 * HALT_POLL_INTERVAL - 1)
    await waiting
    await world.advance(SECOND)
    assert store.query_count == 1

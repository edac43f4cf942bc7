"""An approval by a person admits one call, as shown and in time. No misused approval runs.

Every attempt goes through the real guard on a real store. The tools record their effects in a file, and the drill
judges by that file alone.
"""

import asyncio
import os
import pty
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import msgspec

from halter.cli.terminal import Keyboard, TerminalDevice, ask_freshly
from halter.core.clock import MINUTE, SECOND, Clock, SystemClock
from halter.core.events import DecisionMade, HoldMade, RuleMade
from halter.core.ids import FLEET, WorkerId, inbox_stream
from halter.core.ports import Committed, Decide, Draft, Lease, Query, Rows, Store, Write
from halter.core.rows import DecisionRow, RuleRow
from halter.core.tools import Tool
from halter.core.vocabulary import Row, RuleScope, Verdict
from halter.guard.approval_check import digest_edit
from halter.guard.approvals import (
    AnyCondition,
    ArgvCondition,
    EachArgument,
    PendingDecision,
    RuleMatcher,
    RuleWording,
    SameArguments,
    answer_decision,
    approve_always,
    approve_edited,
    encode_matcher,
    end_rule,
    list_pending_decisions,
    make_equals_condition,
)
from halter.guard.call_request import CallRequest
from halter.guard.guard import GuardRuntime
from halter.guard.judge import judge_call
from halter.guard.prepare import Call
from halter.policy.evaluation import ResolvedPolicy
from halter.testing.fakes import StoreProxy
from halter.tools.function_tool import tool
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, connection, own_store, result, use_memory_file
from halter_drills.faults import AlteredRows, Hand
from halter_drills.workload import PERSON, begin_session, make_guard_runtime, make_session_context, policy_of

SHORT_EXPIRY: Final = SECOND // 2
AFTER_EXPIRY: Final = SHORT_EXPIRY + SECOND // 10
CONCURRENCY: Final = 8
CRITICAL_AMOUNT: Final = 20_000
AN_AGENT: Final = "agent:drill"
QUESTION: Final = "approve? [y/n] "

ORDER: Final = "order-1"
OTHER_ORDER: Final = "order-2"
EDITED_ORDER: Final = "order-9"


def make_tools(effects: Path) -> Mapping[str, Tool]:
    """Make tools that need approval; a file records their effects. `buy` pays, and costs more than half of the cap."""

    def count_effect(name: str, desk: str, order: str, amount: int) -> str:
        with effects.open("a") as file:
            file.write(f"{desk}\t{name}\t{order}\n")
        return f"{name}: {amount}"

    async def pay(desk: str, order: str, amount: int = 7) -> str:
        return count_effect("pay", desk, order, amount)

    async def refund(desk: str, order: str, amount: int = 7) -> str:
        return count_effect("refund", desk, order, amount)

    async def buy(desk: str, order: str, amount: int = 7) -> str:
        return count_effect("pay", desk, order, amount)

    tools = (tool(pay, level="RESTRICTED"), tool(refund, level="RESTRICTED"), tool(buy, level="RESTRICTED", cost="0.6"))
    return {each.spec.name: each for each in tools}


@dataclass(frozen=True)
class ApprovalBench:
    """One session whose calls all need approval. Its effects are recorded under its `name`."""

    name: str
    workspace: Workspace
    store: Store
    clock: Clock
    guard: GuardRuntime
    tools: Mapping[str, Tool]
    lease: Lease
    policy: ResolvedPolicy
    other_lease: Lease
    """Another session of the same agent."""
    keyboard: Callable[[int], Keyboard] = TerminalDevice

    def call(self, order: str = ORDER, *, amount: int = 7, using: str = "pay", number: int = 1) -> Call:
        arguments = {"desk": self.name, "order": order, "amount": amount}
        return Call(f"{self.lease.session}.{number}", using, msgspec.json.encode(arguments))

    async def try_call(
        self, call: Call, attempt: int = 1, *, policy: ResolvedPolicy | None = None, lease: Lease | None = None
    ) -> None:
        lease = lease or self.lease
        context = make_session_context(lease.session, policy or self.policy)
        await self.guard.call(lease, context, call, self.tools, attempt)

    async def request_approval(self, call: Call) -> PendingDecision:
        """Make a call for the first time, and return its pending decision."""
        await self.try_call(call, 0)
        return next(
            decision
            for decision in await list_pending_decisions(self.store)
            if decision.decision == f"{call.id}/approval"
        )

    async def answer(self, decision: PendingDecision, verdict: Verdict = "approve", by: str = PERSON) -> None:
        await self.store.commit(answer_decision(decision, verdict, by, f"{decision.decision}/{verdict}/{by}"))

    async def edits(self, decision: PendingDecision) -> None:
        await self.store.commit(
            approve_edited(decision, self.call(EDITED_ORDER).arguments, PERSON, f"{decision.decision}/edit")
        )

    async def rules(
        self, decision: PendingDecision, matcher: RuleMatcher, scope: RuleScope = "session", lasting: int = MINUTE
    ) -> str:
        rule = RuleWording(id=f"{self.name}/rule", matcher=matcher, keys=("order",), scope=scope, expires_in=lasting)
        await self.store.commit(approve_always(decision, rule, PERSON, f"{decision.decision}/always"))
        return rule.id

    async def forge_answer(self, decision: PendingDecision, by: str, digest: str) -> None:
        """Write an answer into the inbox, bypassing the checks."""
        event = DecisionMade(decision=decision.decision, verdict="approve", by=by, digest=digest)
        row = [(DecisionRow, decision.decision)]
        await self.store.commit(Write(decision.stream, f"{decision.decision}/forged", lambda _: [Draft(event)], row))


Act = Callable[[ApprovalBench], Awaitable[object]]


def approve_then(use: Callable[[ApprovalBench, Call], Awaitable[object]]) -> Act:
    """Make a case: a person approves a call, then `use` uses the approval."""

    async def run_case(bench: ApprovalBench) -> None:
        call = bench.call()
        await bench.answer(await bench.request_approval(call))
        await use(bench, call)

    return run_case


def answer_then(answer: Callable[[ApprovalBench, PendingDecision], Awaitable[object]]) -> Act:
    """Make a case: a call needs approval, `answer` answers, then the call is retried."""

    async def run_case(bench: ApprovalBench) -> None:
        call = bench.call()
        await answer(bench, await bench.request_approval(call))
        await bench.try_call(call)

    return run_case


def make_rule_then(use: Act, scope: RuleScope = "session", *, lasting: int = MINUTE, amount: int = 7) -> Act:
    """Make a case: a person approves a call with a rule, then `use` uses the rule."""

    async def run_case(bench: ApprovalBench) -> None:
        decision = await bench.request_approval(bench.call(amount=amount))
        await bench.rules(decision, SameArguments(decision.same), scope, lasting)
        await use(bench)

    return run_case


def expire_soon(act: Act) -> Act:
    """Run a case under a policy whose approvals expire soon."""
    return lambda bench: act(replace(bench, policy=policy_of(bench.policy.name, expiry=SHORT_EXPIRY)))


async def use_late(bench: ApprovalBench, call: Call) -> None:
    await bench.clock.sleep(AFTER_EXPIRY)
    await bench.try_call(call)


async def answer_late(bench: ApprovalBench, decision: PendingDecision) -> None:
    await bench.clock.sleep(AFTER_EXPIRY)
    await bench.answer(decision)


async def use_three_times(bench: ApprovalBench, call: Call) -> None:
    for attempt in (1, 2, 3):
        await bench.try_call(call, attempt)


async def type_early(bench: ApprovalBench, decision: PendingDecision) -> None:
    """Type yes at a terminal before the question is shown, and no after it."""
    person, program = pty.openpty()

    def deny() -> None:
        output = b""
        while QUESTION.encode() not in output:
            output += os.read(person, 1000)
        os.write(person, b"n\n")

    try:
        os.write(person, b"y\n")
        answering = asyncio.create_task(asyncio.to_thread(deny))
        line = await asyncio.to_thread(ask_freshly, bench.keyboard(program), QUESTION)
        await answering
    finally:
        os.close(person)
        os.close(program)
    await bench.answer(decision, "approve" if line == "y" else "deny")


async def tamper_with_edit(bench: ApprovalBench, decision: PendingDecision) -> None:
    await bench.edits(decision)
    with closing(connection(bench.workspace.url)) as database:
        change = "UPDATE events SET body = ? WHERE stream = ? AND kind = 'decision_made'"
        Hand(database, bench.workspace.kind).do(
            change, bench.call(OTHER_ORDER).arguments, inbox_stream(bench.lease.session)
        )


async def use_expired_rule(bench: ApprovalBench) -> None:
    await bench.clock.sleep(AFTER_EXPIRY)
    await bench.try_call(bench.call(number=2), 0)


async def use_ended_rule(bench: ApprovalBench) -> None:
    rule = f"{bench.name}/rule"
    await bench.store.commit(end_rule(rule, PERSON, f"{rule}/ended"))
    await bench.try_call(bench.call(number=2), 0)


async def extend_command(bench: ApprovalBench) -> None:
    decision = await bench.request_approval(bench.call("list orders"))
    rest = (make_equals_condition("desk", bench.name), make_equals_condition("amount", 7))
    await bench.rules(decision, EachArgument((ArgvCondition("order", ("list", "orders")), *rest)))
    await bench.try_call(bench.call("list orders -delete", number=2), 0)


async def forge_rule(bench: ApprovalBench) -> None:
    decision = await bench.request_approval(bench.call())
    rule = RuleMade(
        rule=f"{bench.name}/forged",
        tool="pay",
        scope="fleet",
        owner="",
        matcher=encode_matcher(SameArguments(decision.same)),
        keys=("order",),
        by=AN_AGENT,
        expires_at=decision.expires_at,
    )
    await bench.store.commit(Write(FLEET, rule.rule, lambda _: [Draft(rule)], [(RuleRow, rule.rule)]))
    await bench.try_call(bench.call(number=2), 0)


async def compete_for_money(bench: ApprovalBench) -> None:
    """Try two calls that the cap does not cover together, approve what is asked, and make the second one first."""
    call, other_call = bench.call(using="buy"), bench.call(OTHER_ORDER, using="buy", number=2)
    other_call = msgspec.structs.replace(other_call, must_return=lambda: True)
    await bench.answer(await bench.request_approval(call))
    await bench.try_call(other_call, 0)
    for decision in await list_pending_decisions(bench.store):
        if decision.session == bench.lease.session:
            await bench.answer(decision)
    await bench.try_call(other_call)
    await bench.try_call(call)


class ApprovalCase(NamedTuple):
    """One use or misuse of an approval, in its own session. `runs` is the order that must be paid exactly once."""

    words: str
    act: Act
    runs: str = ""


HONEST: Final = (
    ApprovalCase("An honest approval.", approve_then(lambda bench, call: bench.try_call(call)), ORDER),
    ApprovalCase(
        "An honest approval, used many times at once.",
        approve_then(
            lambda bench, call: asyncio.gather(*(bench.try_call(call, 1 + number) for number in range(CONCURRENCY)))
        ),
        ORDER,
    ),
    ApprovalCase("An honest edit.", answer_then(ApprovalBench.edits), EDITED_ORDER),
    ApprovalCase("A live rule.", make_rule_then(lambda bench: bench.try_call(bench.call(number=2), 0)), ORDER),
    ApprovalCase("The same approval, used a second and a third time.", approve_then(use_three_times), ORDER),
    ApprovalCase("An approval, while another call wants the same money.", compete_for_money, ORDER),
)
"""Cases that run exactly once, such as the first use of an approval that is then reused."""

FORGED: Final = (
    ApprovalCase(
        "One byte of the arguments changed after the approval.",
        approve_then(
            lambda bench, call: bench.try_call(
                msgspec.structs.replace(call, arguments=bench.call(OTHER_ORDER).arguments)
            )
        ),
    ),
    ApprovalCase(
        "The policy changed after the approval.",
        approve_then(
            lambda bench, call: bench.try_call(call, policy=msgspec.structs.replace(bench.policy, max_steps=51))
        ),
    ),
    ApprovalCase(
        "Another tool was called after the approval.",
        approve_then(lambda bench, call: bench.try_call(msgspec.structs.replace(call, tool="refund"))),
    ),
    ApprovalCase(
        "The approval was given to another session.",
        approve_then(lambda bench, call: bench.try_call(call, lease=bench.other_lease)),
    ),
    ApprovalCase("A person said no.", answer_then(lambda bench, decision: bench.answer(decision, "deny"))),
    ApprovalCase("A yes was typed before the question was shown, and a no after it.", answer_then(type_early)),
    ApprovalCase("The approval had expired when it was used.", expire_soon(approve_then(use_late))),
    ApprovalCase("The question had expired when a person answered it.", expire_soon(answer_then(answer_late))),
    ApprovalCase(
        "The agent answered its own question.", answer_then(lambda bench, decision: bench.answer(decision, by=AN_AGENT))
    ),
    ApprovalCase(
        "The agent wrote the answer into the inbox under its own name.",
        answer_then(lambda bench, decision: bench.forge_answer(decision, AN_AGENT, decision.digest)),
    ),
    ApprovalCase(
        "An answer without a name was written into the inbox.",
        answer_then(lambda bench, decision: bench.forge_answer(decision, "", decision.digest)),
    ),
    ApprovalCase(
        "A person's answer to another question was written into the inbox.",
        answer_then(lambda bench, decision: bench.forge_answer(decision, PERSON, "0" * 64)),
    ),
    ApprovalCase("One byte of a person's edit changed in the store.", answer_then(tamper_with_edit)),
    ApprovalCase("The rule had expired.", make_rule_then(use_expired_rule, lasting=SHORT_EXPIRY)),
    ApprovalCase("The rule had been revoked.", make_rule_then(use_ended_rule)),
    ApprovalCase(
        "The rule was for another session.",
        make_rule_then(lambda bench: bench.try_call(bench.call(number=2), 0, lease=bench.other_lease)),
    ),
    ApprovalCase(
        "The rule was for another agent.",
        make_rule_then(lambda bench: bench.try_call(bench.call(number=2), 0, policy=policy_of("another")), "agent"),
    ),
    ApprovalCase(
        "The rule was for another tool.",
        make_rule_then(lambda bench: bench.try_call(bench.call(using="refund", number=2), 0)),
    ),
    ApprovalCase(
        "The rule was for arguments that differ by one byte.",
        make_rule_then(lambda bench: bench.try_call(bench.call(OTHER_ORDER, number=2), 0)),
    ),
    ApprovalCase("The rule was for a shorter command.", extend_command),
    ApprovalCase(
        "The rule was for a call of critical risk, which always needs a person.",
        make_rule_then(
            lambda bench: bench.try_call(bench.call(amount=CRITICAL_AMOUNT, number=2), 0), amount=CRITICAL_AMOUNT
        ),
    ),
    ApprovalCase("The agent wrote a rule into the journal under its own name.", forge_rule),
)
"""Cases that must never run."""

CASES: Final = (*HONEST, *FORGED)
ROUNDS: Final = 3
WORKER: Final = WorkerId("drill")

T = TypeVar("T")


class Gullible(StoreProxy):
    """The teeth: a store in which every digest is valid, every rule matches, and no question holds money."""

    async def ask(self, query: Query[T]) -> Sequence[T]:
        rows = await self._store.ask(query)
        return [cast("T", _match_anything(row)) if isinstance(row, RuleRow) else row for row in rows]

    async def commit(self, write: Write) -> Committed:
        decide = write.decide
        if isinstance(decide, partial) and decide.func is judge_call and decide.args[0].approval is not None:
            write = msgspec.structs.replace(write, decide=_agree_with(decide.args[0]))
        return await self._store.commit(write)


class ExpiringPolicy(TerminalDevice):
    """The teeth: a terminal that takes input typed before a question as its answer."""

    def drop(self) -> None:
        """Keep what was typed."""


def _match_anything(row: RuleRow) -> RuleRow:
    anything = EachArgument(tuple(AnyCondition(key) for key in ("desk", "order", "amount")))
    return msgspec.structs.replace(row, matcher=encode_matcher(anything))


def _agree_with(request: CallRequest) -> Decide:
    """Judge a call as if every decision approved it."""
    approval = request.approval

    def agree(row: Row | None) -> Row | None:
        if approval is None or not isinstance(row, DecisionRow):
            return row
        is_edit = row.verdict == "edit" or approval.edited_digest
        digest = digest_edit(approval.digest, approval.edited_digest) if is_edit else approval.digest
        return msgspec.structs.replace(row, digest=approval.digest, decided_digest=digest)

    def decide(rows: Rows) -> Sequence[Draft]:
        drafts = judge_call(request, AlteredRows(rows, agree))
        return [draft for draft in drafts if not isinstance(draft.event, HoldMade)]

    return decide


def run(setting: Setting) -> DrillResult:
    rounds = setting.seeds or ROUNDS
    violations: list[str] = []
    kind = ""
    for number in range(rounds):
        setting.progress(number, rounds, f"using and misusing {len(CASES)} approvals")
        # One store per round: with teeth, the rules of one round would answer the decisions of the next.
        with own_store(use_memory_file(setting)) as workspace:
            effects, kind = workspace.folder / "effects", workspace.kind
            effects.touch()
            asyncio.run(_round(workspace, effects, number, teeth=setting.teeth))
            violations += find_violations(effects.read_text().splitlines(), number)
    setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "honest": len(HONEST), "forged": len(FORGED)}
    return result(DRILL.name, kind, rounds * len(CASES), violations, counts)


async def _round(workspace: Workspace, effects: Path, number: int, *, teeth: bool) -> None:
    async with workspace.open_store() as real:
        store: Store = Gullible(real) if teeth else real
        keyboard = ExpiringPolicy if teeth else TerminalDevice
        desks = [
            await _make_bench(workspace, store, effects, f"{number}-{index}", keyboard) for index in range(len(CASES))
        ]
        await asyncio.gather(*(case.act(bench) for case, bench in zip(CASES, desks, strict=True)))


async def _make_bench(
    workspace: Workspace, store: Store, effects: Path, session: str, keyboard: type[TerminalDevice]
) -> ApprovalBench:
    policy, clock = policy_of(), SystemClock()
    return ApprovalBench(
        name=session,
        workspace=workspace,
        store=store,
        clock=clock,
        guard=make_guard_runtime(store, clock),
        tools=make_tools(effects),
        lease=await begin_session(store, WORKER, session, policy),
        policy=policy,
        other_lease=await begin_session(store, WORKER, f"{session}-beside", policy),
        keyboard=keyboard,
    )


def find_violations(effects: Sequence[str], number: int = 0) -> list[str]:
    """Compare the effects of a round with the expected ones."""
    ran = Counter(effects)
    honest = {f"{number}-{index}\tpay\t{case.runs}": case for index, case in enumerate(CASES) if case.runs}
    wrong = [f"{case.words} It ran {ran[line]} times." for line, case in honest.items() if ran[line] != 1]
    for line in ran.keys() - honest.keys():
        desk, name, order = line.split("\t")
        wrong.append(f"{CASES[int(desk.partition('-')[2])].words} Even so, {name} ran for {order}.")
    return sorted(wrong)


DRILL: Final = Drill(
    "approval", "An approval by a person admits one call, as shown and before it expires; no other call runs.", run
)

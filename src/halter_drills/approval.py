"""An approval admits one call, as it was shown, given by a person, in time: no misuse of it runs.

Every attempt goes through the real doors on a real store. The tools count their effects in a file, and the drill judges
by that file alone.
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
from halter.core.events import DecisionMade, RuleMade
from halter.core.ids import FLEET, WorkerId, inbox_stream
from halter.core.ports import Committed, Decide, Draft, Lease, Query, Store, Write
from halter.core.rows import DecisionRow, RuleRow
from halter.core.spec import ResolvedPolicy
from halter.core.tools import Tool
from halter.core.vocabulary import Row, RuleScope, Verdict
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
from halter.guard.guard import GuardRuntime
from halter.guard.judge import CallRequest, digest_edit, judge_call
from halter.guard.prepare import Call
from halter.testing.fakes import Relay
from halter.tools.function_tool import tool
from halter_drills.drill import Drill, DrillResult, Ground, Setting, connection, in_memory, own_store, result
from halter_drills.faults import AlteredRows, Hand
from halter_drills.workload import PERSON, begun, doors, policy_of, standing_of

SOON: Final = SECOND // 2
TOO_LATE: Final = SOON + SECOND // 10
TOGETHER: Final = 8
CRITICAL: Final = 20_000
AN_AGENT: Final = "agent:drill"
QUESTION: Final = "approve? [y/n] "

WRITTEN: Final = "order-1"
OTHER: Final = "order-2"
EDITED: Final = "order-9"


def till(effects: Path) -> Mapping[str, Tool]:
    """Make two tools that need a person; a file counts their effects."""

    def count_effect(what: str, desk: str, order: str, amount: int) -> str:
        with effects.open("a") as file:
            file.write(f"{desk}\t{what}\t{order}\n")
        return f"{what}: {amount}"

    async def pay(desk: str, order: str, amount: int = 7) -> str:
        return count_effect("pay", desk, order, amount)

    async def refund(desk: str, order: str, amount: int = 7) -> str:
        return count_effect("refund", desk, order, amount)

    return {each.__name__: tool(each, level="RESTRICTED") for each in (pay, refund)}


@dataclass(frozen=True)
class ApprovalDesk:
    """One session whose calls all need a person. Its effects are counted under its `name`."""

    name: str
    ground: Ground
    store: Store
    clock: Clock
    guard: GuardRuntime
    tools: Mapping[str, Tool]
    lease: Lease
    policy: ResolvedPolicy
    beside: Lease
    """Another session of the same agent."""
    keyboard: Callable[[int], Keyboard] = TerminalDevice

    def call(self, order: str = WRITTEN, *, amount: int = 7, using: str = "pay", number: int = 1) -> Call:
        arguments = {"desk": self.name, "order": order, "amount": amount}
        return Call(f"{self.lease.session}.{number}", using, msgspec.json.encode(arguments))

    async def tries(
        self, call: Call, attempt: int = 1, *, policy: ResolvedPolicy | None = None, lease: Lease | None = None
    ) -> None:
        lease = lease or self.lease
        standing = standing_of(lease.session, policy or self.policy)
        await self.guard.call(lease, standing, call, self.tools, attempt)

    async def asks(self, call: Call) -> PendingDecision:
        """Take a call to the guard for the first time, and find its pending decision."""
        await self.tries(call, 0)
        return next(one for one in await list_pending_decisions(self.store) if one.decision == f"{call.id}/approval")

    async def says(self, asked: PendingDecision, verdict: Verdict = "approve", by: str = PERSON) -> None:
        await self.store.commit(answer_decision(asked, verdict, by, f"{asked.decision}/{verdict}/{by}"))

    async def edits(self, asked: PendingDecision) -> None:
        await self.store.commit(approve_edited(asked, self.call(EDITED).arguments, PERSON, f"{asked.decision}/edit"))

    async def rules(
        self, asked: PendingDecision, matcher: RuleMatcher, scope: RuleScope = "session", lasting: int = MINUTE
    ) -> str:
        rule = RuleWording(id=f"{self.name}/rule", matcher=matcher, keys=("order",), scope=scope, expires_in=lasting)
        await self.store.commit(approve_always(asked, rule, PERSON, f"{asked.decision}/always"))
        return rule.id

    async def forges(self, asked: PendingDecision, by: str, digest: str) -> None:
        """Write an answer into the inbox without the checks of an answer."""
        made = DecisionMade(decision=asked.decision, verdict="approve", by=by, digest=digest)
        row = [(DecisionRow, asked.decision)]
        await self.store.commit(Write(asked.stream, f"{asked.decision}/forged", lambda _: [Draft(made)], row))


Act = Callable[[ApprovalDesk], Awaitable[object]]


def approved(use: Callable[[ApprovalDesk, Call], Awaitable[object]]) -> Act:
    """A person approves a call; then `use` uses the approval."""

    async def act(desk: ApprovalDesk) -> None:
        call = desk.call()
        await desk.says(await desk.asks(call))
        await use(desk, call)

    return act


def answered(answer: Callable[[ApprovalDesk, PendingDecision], Awaitable[object]]) -> Act:
    """A call needs a person; `answer` answers; then the call is tried again."""

    async def act(desk: ApprovalDesk) -> None:
        call = desk.call()
        await answer(desk, await desk.asks(call))
        await desk.tries(call)

    return act


def ruled(use: Act, scope: RuleScope = "session", *, lasting: int = MINUTE, amount: int = 7) -> Act:
    """A person approves a call and makes a rule of it; then `use` uses the rule."""

    async def act(desk: ApprovalDesk) -> None:
        asked = await desk.asks(desk.call(amount=amount))
        await desk.rules(asked, SameArguments(asked.same), scope, lasting)
        await use(desk)

    return act


def hasty(act: Act) -> Act:
    """The same, under a policy whose approvals expire soon."""
    return lambda desk: act(replace(desk, policy=policy_of(desk.policy.name, expiry=SOON)))


async def use_late(desk: ApprovalDesk, call: Call) -> None:
    await desk.clock.sleep(TOO_LATE)
    await desk.tries(call)


async def answer_late(desk: ApprovalDesk, asked: PendingDecision) -> None:
    await desk.clock.sleep(TOO_LATE)
    await desk.says(asked)


async def use_three_times(desk: ApprovalDesk, call: Call) -> None:
    for attempt in (1, 2, 3):
        await desk.tries(call, attempt)


async def type_early(desk: ApprovalDesk, asked: PendingDecision) -> None:
    """Type yes at a terminal before the question is shown, and no after it."""
    person, program = pty.openpty()

    def say_no() -> None:
        seen = b""
        while QUESTION.encode() not in seen:
            seen += os.read(person, 1000)
        os.write(person, b"n\n")

    try:
        os.write(person, b"y\n")
        answering = asyncio.create_task(asyncio.to_thread(say_no))
        word = await asyncio.to_thread(ask_freshly, desk.keyboard(program), QUESTION)
        await answering
    finally:
        os.close(person)
        os.close(program)
    await desk.says(asked, "approve" if word == "y" else "deny")


async def tamper_with_edit(desk: ApprovalDesk, asked: PendingDecision) -> None:
    await desk.edits(asked)
    with closing(connection(desk.ground.url)) as database:
        change = "UPDATE events SET body = ? WHERE stream = ? AND kind = 'decision_made'"
        Hand(database, desk.ground.kind).do(change, desk.call(OTHER).arguments, inbox_stream(desk.lease.session))


async def use_expired_rule(desk: ApprovalDesk) -> None:
    await desk.clock.sleep(TOO_LATE)
    await desk.tries(desk.call(number=2), 0)


async def use_ended_rule(desk: ApprovalDesk) -> None:
    rule = f"{desk.name}/rule"
    await desk.store.commit(end_rule(rule, PERSON, f"{rule}/ended"))
    await desk.tries(desk.call(number=2), 0)


async def extend_command(desk: ApprovalDesk) -> None:
    asked = await desk.asks(desk.call("list orders"))
    rest = (make_equals_condition("desk", desk.name), make_equals_condition("amount", 7))
    await desk.rules(asked, EachArgument((ArgvCondition("order", ("list", "orders")), *rest)))
    await desk.tries(desk.call("list orders -delete", number=2), 0)


async def forge_rule(desk: ApprovalDesk) -> None:
    asked = await desk.asks(desk.call())
    rule = RuleMade(
        rule=f"{desk.name}/forged",
        tool="pay",
        scope="fleet",
        owner="",
        matcher=encode_matcher(SameArguments(asked.same)),
        keys=("order",),
        by=AN_AGENT,
        expires_at=asked.expires_at,
    )
    await desk.store.commit(Write(FLEET, rule.rule, lambda _: [Draft(rule)], [(RuleRow, rule.rule)]))
    await desk.tries(desk.call(number=2), 0)


class ApprovalCase(NamedTuple):
    """One use or misuse of an approval, in a session of its own. `runs` is the order that must be paid, once."""

    words: str
    act: Act
    runs: str = ""


HONEST: Final = (
    ApprovalCase("An honest approval.", approved(lambda desk, call: desk.tries(call)), WRITTEN),
    ApprovalCase(
        "An honest approval, used many times at once.",
        approved(lambda desk, call: asyncio.gather(*(desk.tries(call, 1 + number) for number in range(TOGETHER)))),
        WRITTEN,
    ),
    ApprovalCase("An honest edit.", answered(ApprovalDesk.edits), EDITED),
    ApprovalCase("A live rule.", ruled(lambda desk: desk.tries(desk.call(number=2), 0)), WRITTEN),
    ApprovalCase("The same approval, used a second and a third time.", approved(use_three_times), WRITTEN),
)
"""What runs exactly once; the first use of an approval that is used again is honest."""

FORGED: Final = (
    ApprovalCase(
        "One byte of the arguments changed after the approval.",
        approved(lambda desk, call: desk.tries(msgspec.structs.replace(call, arguments=desk.call(OTHER).arguments))),
    ),
    ApprovalCase(
        "The policy changed after the approval.",
        approved(lambda desk, call: desk.tries(call, policy=msgspec.structs.replace(desk.policy, max_steps=51))),
    ),
    ApprovalCase(
        "Another tool was called after the approval.",
        approved(lambda desk, call: desk.tries(msgspec.structs.replace(call, tool="refund"))),
    ),
    ApprovalCase(
        "The approval was given to another session.",
        approved(lambda desk, call: desk.tries(call, lease=desk.beside)),
    ),
    ApprovalCase("A person said no.", answered(lambda desk, asked: desk.says(asked, "deny"))),
    ApprovalCase("A yes was typed before the question was shown, and a no after it.", answered(type_early)),
    ApprovalCase("The approval had expired when it was used.", hasty(approved(use_late))),
    ApprovalCase("The question had expired when a person answered it.", hasty(answered(answer_late))),
    ApprovalCase("The agent answered its own question.", answered(lambda desk, asked: desk.says(asked, by=AN_AGENT))),
    ApprovalCase(
        "The agent wrote the answer into the inbox under its own name.",
        answered(lambda desk, asked: desk.forges(asked, AN_AGENT, asked.digest)),
    ),
    ApprovalCase(
        "An answer without a name was written into the inbox.",
        answered(lambda desk, asked: desk.forges(asked, "", asked.digest)),
    ),
    ApprovalCase(
        "A person's answer to another question was written into the inbox.",
        answered(lambda desk, asked: desk.forges(asked, PERSON, "0" * 64)),
    ),
    ApprovalCase("One byte of a person's edit changed in the store.", answered(tamper_with_edit)),
    ApprovalCase("The rule had expired.", ruled(use_expired_rule, lasting=SOON)),
    ApprovalCase("The rule had been revoked.", ruled(use_ended_rule)),
    ApprovalCase(
        "The rule was for another session.",
        ruled(lambda desk: desk.tries(desk.call(number=2), 0, lease=desk.beside)),
    ),
    ApprovalCase(
        "The rule was for another agent.",
        ruled(lambda desk: desk.tries(desk.call(number=2), 0, policy=policy_of("another")), "agent"),
    ),
    ApprovalCase(
        "The rule was for another tool.", ruled(lambda desk: desk.tries(desk.call(using="refund", number=2), 0))
    ),
    ApprovalCase(
        "The rule was for arguments that differ by one byte.",
        ruled(lambda desk: desk.tries(desk.call(OTHER, number=2), 0)),
    ),
    ApprovalCase("The rule was for a shorter command.", extend_command),
    ApprovalCase(
        "The rule was for a call of critical risk, which always needs a person.",
        ruled(lambda desk: desk.tries(desk.call(amount=CRITICAL, number=2), 0), amount=CRITICAL),
    ),
    ApprovalCase("The agent wrote a rule into the journal under its own name.", forge_rule),
)
"""What must never run."""

CASES: Final = (*HONEST, *FORGED)
ROUNDS: Final = 3
WORKER: Final = WorkerId("drill")

T = TypeVar("T")


class Gullible(Relay):
    """The teeth: a store behind which every digest is right and every rule matches."""

    async def ask(self, query: Query[T]) -> Sequence[T]:
        rows = await self._store.ask(query)
        return [cast("T", _match_anything(row)) if isinstance(row, RuleRow) else row for row in rows]

    async def commit(self, write: Write) -> Committed:
        decide = write.decide
        if isinstance(decide, partial) and decide.func is judge_call and decide.args[0].approval is not None:
            write = msgspec.structs.replace(write, decide=_agree_with(decide.args[0]))
        return await self._store.commit(write)


class Hasty(TerminalDevice):
    """The teeth: a terminal that takes what was typed before a question as its answer."""

    def drop(self) -> None:
        """Keep what was typed."""


def _match_anything(row: RuleRow) -> RuleRow:
    anything = EachArgument(tuple(AnyCondition(key) for key in ("desk", "order", "amount")))
    return msgspec.structs.replace(row, matcher=encode_matcher(anything))


def _agree_with(asked: CallRequest) -> Decide:
    """Judge a call with every decision changed into a yes to this very call."""
    need = asked.approval

    def agree(row: Row | None) -> Row | None:
        if need is None or not isinstance(row, DecisionRow):
            return row
        edited = row.verdict == "edit" or need.edited
        agreed = digest_edit(need.digest, need.edited) if edited else need.digest
        return msgspec.structs.replace(row, digest=need.digest, decided_digest=agreed)

    return lambda rows: judge_call(asked, AlteredRows(rows, agree))


def run(setting: Setting) -> DrillResult:
    rounds = setting.seeds or ROUNDS
    violations: list[str] = []
    kind = ""
    for number in range(rounds):
        setting.progress(number, rounds, f"{len(CASES)} approvals are used and misused")
        # A store for each round: with teeth, the rules of one round would answer the questions of the next.
        with own_store(in_memory(setting)) as ground:
            effects, kind = ground.folder / "effects", ground.kind
            effects.touch()
            asyncio.run(_round(ground, effects, number, teeth=setting.teeth))
            violations += amiss(effects.read_text().splitlines(), number)
    setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "honest": len(HONEST), "forged": len(FORGED)}
    return result(DRILL.name, kind, rounds * len(CASES), violations, counts)


async def _round(ground: Ground, effects: Path, number: int, *, teeth: bool) -> None:
    async with ground.opened() as real:
        store: Store = Gullible(real) if teeth else real
        keyboard = Hasty if teeth else TerminalDevice
        desks = [await _desk(ground, store, effects, f"{number}-{place}", keyboard) for place in range(len(CASES))]
        await asyncio.gather(*(case.act(desk) for case, desk in zip(CASES, desks, strict=True)))


async def _desk(
    ground: Ground, store: Store, effects: Path, session: str, keyboard: type[TerminalDevice]
) -> ApprovalDesk:
    policy, clock = policy_of(), SystemClock()
    return ApprovalDesk(
        name=session,
        ground=ground,
        store=store,
        clock=clock,
        guard=doors(store, clock),
        tools=till(effects),
        lease=await begun(store, WORKER, session, policy),
        policy=policy,
        beside=await begun(store, WORKER, f"{session}-beside", policy),
        keyboard=keyboard,
    )


def amiss(effects: Sequence[str], number: int = 0) -> list[str]:
    """Compare what ran in a round with what should have run, by the outside count alone."""
    ran = Counter(effects)
    honest = {f"{number}-{place}\tpay\t{case.runs}": case for place, case in enumerate(CASES) if case.runs}
    wrong = [f"{case.words} It ran {ran[line]} times." for line, case in honest.items() if ran[line] != 1]
    for line in ran.keys() - honest.keys():
        name, what, order = line.split("\t")
        wrong.append(f"{CASES[int(name.partition('-')[2])].words} Even so, {what} ran for {order}.")
    return sorted(wrong)


DRILL: Final = Drill(
    "approval", "An approval is good for one call as it was shown, by a person, in time; no other call runs by it.", run
)

"""An approval is good for one call, as it was shown, by a person, in time: whatever else is tried with it never runs.

Every attempt goes through the real doors on a real store. What ran is counted outside, in a file that the tools
themselves write; the journal is not asked.
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
from typing import Final, TypeVar, cast

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
from halter.guard.judge import CallRequest, RequiredApproval, digest_edit, judge_call
from halter.guard.prepare import Call
from halter.testing.fakes import Relay
from halter.tools.function_tool import tool
from halter_drills.drill import Drill, DrillResult, Ground, Setting, connection, in_memory, own_store, result
from halter_drills.faults import AlteredRows, Hand
from halter_drills.workload import PERSON, begun, doors, policy_of, standing_of

# What somebody might try with an approval, and what an honest person does with one: each with a session of its own.

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
    """Make two tools that need a person; whatever they do is counted outside, in a file."""

    def noted(what: str, desk: str, order: str, amount: int) -> str:
        with effects.open("a") as file:
            file.write(f"{desk}\t{what}\t{order}\n")
        return f"{what}: {amount}"

    async def pay(desk: str, order: str, amount: int = 7) -> str:
        return noted("pay", desk, order, amount)

    async def refund(desk: str, order: str, amount: int = 7) -> str:
        return noted("refund", desk, order, amount)

    return {each.__name__: tool(each, level="RESTRICTED") for each in (pay, refund)}


@dataclass(frozen=True)
class ApprovalDesk:
    """One session that needs a person for whatever it does. Its `name` is what its effects are counted under."""

    name: str
    ground: Ground
    store: Store
    clock: Clock
    gatehouse: GuardRuntime
    tools: Mapping[str, Tool]
    lease: Lease
    policy: ResolvedPolicy
    beside: Lease
    """Another session of the same agent."""
    keyboard: Callable[[int], Keyboard] = TerminalDevice
    """What reads a terminal."""

    def call(self, order: str = WRITTEN, *, amount: int = 7, using: str = "pay", number: int = 1) -> Call:
        arguments = {"desk": self.name, "order": order, "amount": amount}
        return Call(f"{self.lease.session}.{number}", using, msgspec.json.encode(arguments))

    async def tries(
        self, call: Call, attempt: int = 1, *, policy: ResolvedPolicy | None = None, lease: Lease | None = None
    ) -> None:
        lease = lease or self.lease
        standing = standing_of(lease.session, policy or self.policy)
        await self.gatehouse.call(lease, standing, call, self.tools, attempt)

    async def asks(self, call: Call) -> PendingDecision:
        """Take a call to the guard for the first time, and find the question that it puts before a person."""
        await self.tries(call, 0)
        return next(one for one in await list_pending_decisions(self.store) if one.decision == f"{call.id}/approval")

    async def says(self, asked: PendingDecision, verdict: Verdict = "approve", by: str = PERSON) -> None:
        await self.store.commit(answer_decision(asked, verdict, by, f"{asked.decision}/{verdict}/{by}"))

    async def approved(self) -> Call:
        call = self.call()
        await self.says(await self.asks(call))
        return call

    async def ruled(self, scope: RuleScope = "session", *, lasting: int = MINUTE, amount: int = 7) -> str:
        asked = await self.asks(self.call(amount=amount))
        rule = RuleWording(
            id=f"{self.name}/rule", matcher=SameArguments(asked.same), keys=("order",), scope=scope, expires_in=lasting
        )
        await self.store.commit(approve_always(asked, rule, PERSON, f"{asked.decision}/always"))
        return rule.id

    async def forge(self, asked: PendingDecision, by: str, digest: str) -> None:
        """Put an answer into the inbox past everything that looks at answers."""
        made = DecisionMade(decision=asked.decision, verdict="approve", by=by, digest=digest)
        write = Write(asked.stream, f"{asked.decision}/forged", lambda _: [Draft(made)], _row_of(asked))
        await self.store.commit(write)


def _row_of(asked: PendingDecision) -> list[tuple[type[DecisionRow], tuple[str]]]:
    return [(DecisionRow, (asked.decision,))]


Act = Callable[[ApprovalDesk], Awaitable[None]]


async def runs_once(desk: ApprovalDesk) -> None:
    """An honest approval."""
    await desk.tries(await desk.approved())


async def runs_once_of_many(desk: ApprovalDesk) -> None:
    """An honest approval that is used many times at once."""
    call = await desk.approved()
    await asyncio.gather(*(desk.tries(call, attempt) for attempt in range(1, TOGETHER + 1)))


async def runs_as_edited(desk: ApprovalDesk) -> None:
    """An honest edit."""
    call = desk.call()
    await _edited(desk, await desk.asks(call))
    await desk.tries(call)


async def runs_by_rule(desk: ApprovalDesk) -> None:
    """A live rule."""
    await desk.ruled()
    await desk.tries(desk.call(number=2), 0)


async def one_byte_changed(desk: ApprovalDesk) -> None:
    """One byte of the arguments changed after the approval."""
    call = await desk.approved()
    await desk.tries(msgspec.structs.replace(call, arguments=desk.call(OTHER).arguments))


async def policy_changed(desk: ApprovalDesk) -> None:
    """The policy changed after the approval."""
    await desk.tries(await desk.approved(), policy=msgspec.structs.replace(desk.policy, max_steps=51))


async def another_tool(desk: ApprovalDesk) -> None:
    """Another tool was called after the approval."""
    await desk.tries(msgspec.structs.replace(await desk.approved(), tool="refund"))


async def another_session(desk: ApprovalDesk) -> None:
    """The approval was given to another session."""
    await desk.tries(await desk.approved(), lease=desk.beside)


async def used_again(desk: ApprovalDesk) -> None:
    """The same approval was used a second and a third time."""
    call = await desk.approved()
    for attempt in (1, 2, 3):
        await desk.tries(call, attempt)


async def denied(desk: ApprovalDesk) -> None:
    """A person said no."""
    call = desk.call()
    await desk.says(await desk.asks(call), "deny")
    await desk.tries(call)


async def typed_before_the_question(desk: ApprovalDesk) -> None:
    """A yes was typed at a terminal before the question was shown, and a no after it."""
    call = desk.call()
    asked = await desk.asks(call)
    person, program = pty.openpty()
    try:
        os.write(person, b"y\n")
        answering = asyncio.create_task(asyncio.to_thread(_say_no, person))
        word = await asyncio.to_thread(ask_freshly, desk.keyboard(program), QUESTION)
        await answering
    finally:
        os.close(person)
        os.close(program)
    await desk.says(asked, "approve" if word == "y" else "deny")
    await desk.tries(call)


def _say_no(person: int) -> None:
    seen = b""
    while QUESTION.encode() not in seen:
        seen += os.read(person, 1000)
    os.write(person, b"n\n")


async def used_too_late(desk: ApprovalDesk) -> None:
    """The approval had expired when it was used."""
    hasty = replace(desk, policy=policy_of(desk.policy.name, expiry=SOON))
    call = await hasty.approved()
    await desk.clock.sleep(TOO_LATE)
    await hasty.tries(call)


async def given_too_late(desk: ApprovalDesk) -> None:
    """The question had expired when a person answered it."""
    hasty = replace(desk, policy=policy_of(desk.policy.name, expiry=SOON))
    call = desk.call()
    asked = await hasty.asks(call)
    await desk.clock.sleep(TOO_LATE)
    await hasty.says(asked)
    await hasty.tries(call)


async def said_by_the_agent(desk: ApprovalDesk) -> None:
    """The agent answered its own question."""
    call = desk.call()
    await desk.says(await desk.asks(call), by=AN_AGENT)
    await desk.tries(call)


async def forged_by_the_agent(desk: ApprovalDesk) -> None:
    """The agent wrote the answer into the inbox under its own name."""
    call = desk.call()
    asked = await desk.asks(call)
    await desk.forge(asked, AN_AGENT, asked.digest)
    await desk.tries(call)


async def forged_by_nobody(desk: ApprovalDesk) -> None:
    """An answer without a name was written into the inbox."""
    call = desk.call()
    asked = await desk.asks(call)
    await desk.forge(asked, "", asked.digest)
    await desk.tries(call)


async def forged_with_another_digest(desk: ApprovalDesk) -> None:
    """A person's answer to another question was written into the inbox."""
    call = desk.call()
    asked = await desk.asks(call)
    await desk.forge(asked, PERSON, "0" * 64)
    await desk.tries(call)


async def edit_tampered_with(desk: ApprovalDesk) -> None:
    """One byte of what a person wrote in place of the arguments changed in the store."""
    call = desk.call()
    await _edited(desk, await desk.asks(call))
    with closing(connection(desk.ground.url)) as database:
        change = "UPDATE events SET body = ? WHERE stream = ? AND kind = 'decision_made'"
        Hand(database, desk.ground.kind).do(change, desk.call(OTHER).arguments, inbox_stream(desk.lease.session))
    await desk.tries(call)


async def _edited(desk: ApprovalDesk, asked: PendingDecision) -> None:
    await desk.store.commit(approve_edited(asked, desk.call(EDITED).arguments, PERSON, f"{asked.decision}/edit"))


async def rule_expired(desk: ApprovalDesk) -> None:
    """The rule had expired."""
    await desk.ruled(lasting=SOON)
    await desk.clock.sleep(TOO_LATE)
    await desk.tries(desk.call(number=2), 0)


async def rule_ended(desk: ApprovalDesk) -> None:
    """The rule had been taken back."""
    rule = await desk.ruled()
    await desk.store.commit(end_rule(rule, PERSON, f"{rule}/ended"))
    await desk.tries(desk.call(number=2), 0)


async def rule_of_another_session(desk: ApprovalDesk) -> None:
    """The rule was for another session."""
    await desk.ruled("session")
    await desk.tries(desk.call(number=2), 0, lease=desk.beside)


async def rule_of_another_agent(desk: ApprovalDesk) -> None:
    """The rule was for another agent."""
    await desk.ruled("agent")
    await desk.tries(desk.call(number=2), 0, policy=policy_of("another"))


async def rule_for_another_tool(desk: ApprovalDesk) -> None:
    """The rule was for another tool."""
    await desk.ruled()
    await desk.tries(desk.call(using="refund", number=2), 0)


async def rule_for_other_arguments(desk: ApprovalDesk) -> None:
    """The rule was for arguments that differ by one byte."""
    await desk.ruled()
    await desk.tries(desk.call(OTHER, number=2), 0)


async def rule_for_a_shorter_command(desk: ApprovalDesk) -> None:
    """The rule was for a command, and this one goes on after it."""
    asked = await desk.asks(desk.call("list orders"))
    rest = (make_equals_condition("desk", desk.name), make_equals_condition("amount", 7))
    matcher = EachArgument((ArgvCondition("order", ("list", "orders")), *rest))
    rule = RuleWording(id=f"{desk.name}/rule", matcher=matcher, keys=("order",), scope="session", expires_in=MINUTE)
    await desk.store.commit(approve_always(asked, rule, PERSON, f"{asked.decision}/always"))
    await desk.tries(desk.call("list orders -delete", number=2), 0)


async def rule_for_a_critical_call(desk: ApprovalDesk) -> None:
    """The rule was for a call of critical risk, about which a person is always asked."""
    await desk.ruled(amount=CRITICAL)
    await desk.tries(desk.call(amount=CRITICAL, number=2), 0)


async def rule_forged_by_the_agent(desk: ApprovalDesk) -> None:
    """The agent wrote a rule into the journal under its own name."""
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
    reads = [(RuleRow, (rule.rule,))]
    await desk.store.commit(Write(FLEET, rule.rule, lambda _: [Draft(rule)], reads))
    await desk.tries(desk.call(number=2), 0)


HONEST: Final[Mapping[Act, str]] = {
    runs_once: WRITTEN,
    runs_once_of_many: WRITTEN,
    runs_as_edited: EDITED,
    runs_by_rule: WRITTEN,
    used_again: WRITTEN,
}
"""What runs exactly once, and with which order; the first use of an approval that is used again is honest."""

FORGED: Final[tuple[Act, ...]] = (
    *(one_byte_changed, policy_changed, another_tool, another_session, denied, typed_before_the_question),
    *(used_too_late, given_too_late, said_by_the_agent, forged_by_the_agent, forged_by_nobody),
    *(forged_with_another_digest, edit_tampered_with, rule_expired, rule_ended, rule_of_another_session),
    *(rule_of_another_agent, rule_for_another_tool, rule_for_other_arguments, rule_for_a_shorter_command),
    *(rule_for_a_critical_call, rule_forged_by_the_agent),
)
"""What must never run."""


T = TypeVar("T")

ROUNDS: Final = 3
EFFECTS: Final = "effects"
WORKER: Final = WorkerId("drill")
ACTS: Final[Sequence[Act]] = (*HONEST, *FORGED)


def _agreeing(row: DecisionRow, need: RequiredApproval) -> DecisionRow:
    """Make a decision one about whatever is asked, that says yes to it."""
    agreed = digest_edit(need.digest, need.edited) if row.verdict == "edit" or need.edited else need.digest
    return msgspec.structs.replace(row, digest=need.digest, decided_digest=agreed)


class Gullible(Relay):
    """A store behind which every digest is as it should be and every rule fits: as if nobody compared anything."""

    async def ask(self, query: Query[T]) -> Sequence[T]:
        rows = await self._store.ask(query)
        return [cast("T", _loosened(row)) if isinstance(row, RuleRow) else row for row in rows]

    async def commit(self, write: Write) -> Committed:
        asked = _judged(write)
        if asked is not None and (need := asked.approval) is not None:
            write = msgspec.structs.replace(write, decide=_gullibly(asked, need))
        return await self._store.commit(write)


class Hasty(TerminalDevice):
    """A terminal at which what was typed before a question counts as its answer."""

    def drop(self) -> None:
        """Keep what was typed."""


def _loosened(row: RuleRow) -> RuleRow:
    anything = EachArgument(tuple(AnyCondition(key) for key in ("desk", "order", "amount")))
    return msgspec.structs.replace(row, matcher=encode_matcher(anything))


def _gullibly(asked: CallRequest, need: RequiredApproval) -> Decide:
    def agree(row: Row | None) -> Row | None:
        return _agreeing(row, need) if isinstance(row, DecisionRow) else row

    return lambda rows: judge_call(asked, AlteredRows(rows, agree))


def _judged(write: Write) -> CallRequest | None:
    """Tell what the judge is asked in a write, if it is the judge who decides."""
    decide = write.decide
    return decide.args[0] if isinstance(decide, partial) and decide.func is judge_call else None


def run(setting: Setting) -> DrillResult:
    rounds = setting.seeds or ROUNDS
    violations: list[str] = []
    with own_store(in_memory(setting)) as ground:
        for number in range(rounds):
            setting.progress(number, rounds, f"{len(ACTS)} approvals are used and misused")
            effects = ground.folder / f"{EFFECTS}-{number}"
            effects.touch()
            asyncio.run(_round(ground, effects, number, teeth=setting.teeth))
            violations += amiss(effects.read_text().splitlines(), number)
        setting.progress(rounds, rounds, "checked")
    counts = {"rounds": rounds, "honest": len(HONEST), "forged": len(FORGED)}
    return result(DRILL.name, ground.kind, rounds * len(ACTS), violations, counts)


async def _round(ground: Ground, effects: Path, number: int, *, teeth: bool) -> None:
    real = ground.open()
    try:
        store: Store = Gullible(real) if teeth else real
        keyboard = Hasty if teeth else TerminalDevice
        desks = [await _desk(ground, store, effects, f"{number}-{act.__name__}", keyboard) for act in ACTS]
        async with asyncio.TaskGroup() as trying:
            for act, desk in zip(ACTS, desks, strict=True):
                trying.create_task(_tried(act, desk))
    finally:
        await real.close()


async def _tried(act: Act, desk: ApprovalDesk) -> None:
    await act(desk)


async def _desk(
    ground: Ground, store: Store, effects: Path, session: str, keyboard: type[TerminalDevice]
) -> ApprovalDesk:
    policy, clock = policy_of(), SystemClock()
    return ApprovalDesk(
        name=session,
        ground=ground,
        store=store,
        clock=clock,
        gatehouse=doors(store, clock),
        tools=till(effects),
        lease=await begun(store, WORKER, session, policy),
        policy=policy,
        beside=await begun(store, WORKER, f"{session}-beside", policy),
        keyboard=keyboard,
    )


def amiss(effects: Sequence[str], number: int = 0) -> list[str]:
    """Compare what ran in a round with what should have run, by the outside count alone."""
    ran = Counter(effects)
    honest = {f"{number}-{act.__name__}\tpay\t{order}": act for act, order in HONEST.items()}
    wrong = [f"{_told(act)} It ran {ran[line]} times." for line, act in honest.items() if ran[line] != 1]
    for line in ran.keys() - honest.keys():
        name, what, order = line.split("\t")
        act = next(act for act in ACTS if f"{number}-{act.__name__}" == name)
        wrong.append(f"{_told(act)} All the same, {what} ran for {order}.")
    return sorted(wrong)


def _told(act: Act) -> str:
    return act.__doc__ or act.__name__


DRILL: Final = Drill(
    "approval", "An approval is good for one call as it was shown, by a person, in time; no other call runs by it.", run
)

"""What somebody might try with an approval, and what an honest person does with one: each with a session of its own."""

import asyncio
import os
import pty
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from halter.cli.keyboard import Keyboard, TerminalDevice, ask_freshly
from halter.core.clock import MINUTE, SECOND, Clock
from halter.core.events import DecisionMade, RuleMade
from halter.core.ids import FLEET, inbox_stream
from halter.core.ports import Draft, Lease, Store, Write
from halter.core.rows import DecisionRow, RuleRow
from halter.core.spec import Resolved
from halter.core.tools import Tool
from halter.core.vocabulary import RuleScope, Verdict
from halter.guard.approvals import Open, Rule, always, decide, edit, end_rule, needs_you
from halter.guard.ask import Call
from halter.guard.conditions import Argv, exactly
from halter.guard.gatehouse import Gatehouse
from halter.guard.rules import Each, Same, written
from halter.tools.tool import tool
from halter_drills.agents import PERSON, policy_of, standing_of
from halter_drills.drill import Ground, connection
from halter_drills.hand import Hand

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
class Desk:
    """One session that needs a person for whatever it does. Its `name` is what its effects are counted under."""

    name: str
    ground: Ground
    store: Store
    clock: Clock
    gatehouse: Gatehouse
    tools: Mapping[str, Tool]
    lease: Lease
    policy: Resolved
    beside: Lease
    """Another session of the same agent."""
    keyboard: Callable[[int], Keyboard] = TerminalDevice
    """What reads a terminal."""

    def call(self, order: str = WRITTEN, *, amount: int = 7, using: str = "pay", number: int = 1) -> Call:
        """Word a call."""
        arguments = {"desk": self.name, "order": order, "amount": amount}
        return Call(f"{self.lease.session}.{number}", using, msgspec.json.encode(arguments))

    async def tries(
        self, call: Call, attempt: int = 1, *, policy: Resolved | None = None, lease: Lease | None = None
    ) -> None:
        """Take a call to the guard; whether it ran is counted elsewhere."""
        lease = lease or self.lease
        standing = standing_of(lease.session, policy or self.policy)
        await self.gatehouse.call(lease, standing, call, self.tools, attempt)

    async def asks(self, call: Call) -> Open:
        """Take a call to the guard for the first time, and find the question that it puts before a person."""
        await self.tries(call, 0)
        return next(one for one in await needs_you(self.store) if one.decision == f"{call.id}/approval")

    async def says(self, asked: Open, verdict: Verdict = "approve", by: str = PERSON) -> None:
        """Answer as a person does."""
        await self.store.commit(decide(asked, verdict, by, f"{asked.decision}/{verdict}/{by}"))

    async def approved(self) -> Call:
        """Let a person say yes to the usual call."""
        call = self.call()
        await self.says(await self.asks(call))
        return call

    async def ruled(self, scope: RuleScope = "session", *, lasting: int = MINUTE, amount: int = 7) -> str:
        """Let a person say "always" to the usual call."""
        asked = await self.asks(self.call(amount=amount))
        rule = Rule(id=f"{self.name}/rule", matcher=Same(asked.same), keys=("order",), scope=scope, expires_in=lasting)
        await self.store.commit(always(asked, rule, PERSON, f"{asked.decision}/always"))
        return rule.id

    async def forge(self, asked: Open, by: str, digest: str) -> None:
        """Put an answer into the inbox past everything that looks at answers."""
        made = DecisionMade(decision=asked.decision, verdict="approve", by=by, digest=digest)
        write = Write(asked.stream, f"{asked.decision}/forged", lambda _: [Draft(made)], _row_of(asked))
        await self.store.commit(write)


def _row_of(asked: Open) -> list[tuple[type[DecisionRow], tuple[str]]]:
    return [(DecisionRow, (asked.decision,))]


Act = Callable[[Desk], Awaitable[None]]


async def runs_once(desk: Desk) -> None:
    """An honest approval."""
    await desk.tries(await desk.approved())


async def runs_once_of_many(desk: Desk) -> None:
    """An honest approval that is used many times at once."""
    call = await desk.approved()
    await asyncio.gather(*(desk.tries(call, attempt) for attempt in range(1, TOGETHER + 1)))


async def runs_as_edited(desk: Desk) -> None:
    """An honest edit."""
    call = desk.call()
    await _edited(desk, await desk.asks(call))
    await desk.tries(call)


async def runs_by_rule(desk: Desk) -> None:
    """A live rule."""
    await desk.ruled()
    await desk.tries(desk.call(number=2), 0)


async def one_byte_changed(desk: Desk) -> None:
    """One byte of the arguments changed after the approval."""
    call = await desk.approved()
    await desk.tries(msgspec.structs.replace(call, arguments=desk.call(OTHER).arguments))


async def policy_changed(desk: Desk) -> None:
    """The policy changed after the approval."""
    await desk.tries(await desk.approved(), policy=msgspec.structs.replace(desk.policy, max_steps=51))


async def another_tool(desk: Desk) -> None:
    """Another tool was called after the approval."""
    await desk.tries(msgspec.structs.replace(await desk.approved(), tool="refund"))


async def another_session(desk: Desk) -> None:
    """The approval was given to another session."""
    await desk.tries(await desk.approved(), lease=desk.beside)


async def used_again(desk: Desk) -> None:
    """The same approval was used a second and a third time."""
    call = await desk.approved()
    for attempt in (1, 2, 3):
        await desk.tries(call, attempt)


async def denied(desk: Desk) -> None:
    """A person said no."""
    call = desk.call()
    await desk.says(await desk.asks(call), "deny")
    await desk.tries(call)


async def typed_before_the_question(desk: Desk) -> None:
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
    """Type a no at a terminal as soon as it shows the question."""
    seen = b""
    while QUESTION.encode() not in seen:
        seen += os.read(person, 1000)
    os.write(person, b"n\n")


async def used_too_late(desk: Desk) -> None:
    """The approval had expired when it was used."""
    hasty = replace(desk, policy=policy_of(desk.policy.name, expiry=SOON))
    call = await hasty.approved()
    await desk.clock.sleep(TOO_LATE)
    await hasty.tries(call)


async def given_too_late(desk: Desk) -> None:
    """The question had expired when a person answered it."""
    hasty = replace(desk, policy=policy_of(desk.policy.name, expiry=SOON))
    call = desk.call()
    asked = await hasty.asks(call)
    await desk.clock.sleep(TOO_LATE)
    await hasty.says(asked)
    await hasty.tries(call)


async def said_by_the_agent(desk: Desk) -> None:
    """The agent answered its own question."""
    call = desk.call()
    await desk.says(await desk.asks(call), by=AN_AGENT)
    await desk.tries(call)


async def forged_by_the_agent(desk: Desk) -> None:
    """The agent wrote the answer into the inbox under its own name."""
    call = desk.call()
    asked = await desk.asks(call)
    await desk.forge(asked, AN_AGENT, asked.digest)
    await desk.tries(call)


async def forged_by_nobody(desk: Desk) -> None:
    """An answer without a name was written into the inbox."""
    call = desk.call()
    asked = await desk.asks(call)
    await desk.forge(asked, "", asked.digest)
    await desk.tries(call)


async def forged_with_another_digest(desk: Desk) -> None:
    """A person's answer to another question was written into the inbox."""
    call = desk.call()
    asked = await desk.asks(call)
    await desk.forge(asked, PERSON, "0" * 64)
    await desk.tries(call)


async def edit_tampered_with(desk: Desk) -> None:
    """One byte of what a person wrote in place of the arguments changed in the store."""
    call = desk.call()
    await _edited(desk, await desk.asks(call))
    with closing(connection(desk.ground.url)) as database:
        change = "UPDATE events SET body = ? WHERE stream = ? AND kind = 'decision_made'"
        Hand(database, desk.ground.kind).do(change, desk.call(OTHER).arguments, inbox_stream(desk.lease.session))
    await desk.tries(call)


async def _edited(desk: Desk, asked: Open) -> None:
    await desk.store.commit(edit(asked, desk.call(EDITED).arguments, PERSON, f"{asked.decision}/edit"))


async def rule_expired(desk: Desk) -> None:
    """The rule had expired."""
    await desk.ruled(lasting=SOON)
    await desk.clock.sleep(TOO_LATE)
    await desk.tries(desk.call(number=2), 0)


async def rule_ended(desk: Desk) -> None:
    """The rule had been taken back."""
    rule = await desk.ruled()
    await desk.store.commit(end_rule(rule, PERSON, f"{rule}/ended"))
    await desk.tries(desk.call(number=2), 0)


async def rule_of_another_session(desk: Desk) -> None:
    """The rule was for another session."""
    await desk.ruled("session")
    await desk.tries(desk.call(number=2), 0, lease=desk.beside)


async def rule_of_another_agent(desk: Desk) -> None:
    """The rule was for another agent."""
    await desk.ruled("agent")
    await desk.tries(desk.call(number=2), 0, policy=policy_of("another"))


async def rule_for_another_tool(desk: Desk) -> None:
    """The rule was for another tool."""
    await desk.ruled()
    await desk.tries(desk.call(using="refund", number=2), 0)


async def rule_for_other_arguments(desk: Desk) -> None:
    """The rule was for arguments that differ by one byte."""
    await desk.ruled()
    await desk.tries(desk.call(OTHER, number=2), 0)


async def rule_for_a_shorter_command(desk: Desk) -> None:
    """The rule was for a command, and this one goes on after it."""
    asked = await desk.asks(desk.call("list orders"))
    rest = (exactly("desk", desk.name), exactly("amount", 7))
    matcher = Each((Argv("order", ("list", "orders")), *rest))
    rule = Rule(id=f"{desk.name}/rule", matcher=matcher, keys=("order",), scope="session", expires_in=MINUTE)
    await desk.store.commit(always(asked, rule, PERSON, f"{asked.decision}/always"))
    await desk.tries(desk.call("list orders -delete", number=2), 0)


async def rule_for_a_critical_call(desk: Desk) -> None:
    """The rule was for a call of critical risk, about which a person is always asked."""
    await desk.ruled(amount=CRITICAL)
    await desk.tries(desk.call(amount=CRITICAL, number=2), 0)


async def rule_forged_by_the_agent(desk: Desk) -> None:
    """The agent wrote a rule into the journal under its own name."""
    asked = await desk.asks(desk.call())
    rule = RuleMade(
        rule=f"{desk.name}/forged",
        tool="pay",
        scope="fleet",
        owner="",
        matcher=written(Same(asked.same)),
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
    one_byte_changed,
    policy_changed,
    another_tool,
    another_session,
    denied,
    typed_before_the_question,
    used_too_late,
    given_too_late,
    said_by_the_agent,
    forged_by_the_agent,
    forged_by_nobody,
    forged_with_another_digest,
    edit_tampered_with,
    rule_expired,
    rule_ended,
    rule_of_another_session,
    rule_of_another_agent,
    rule_for_another_tool,
    rule_for_other_arguments,
    rule_for_a_shorter_command,
    rule_for_a_critical_call,
    rule_forged_by_the_agent,
)
"""What must never run."""

"""Decisions: one durable queue of what a person must say yes or no to.

An answer is bound to the digest of what the person was shown, counts once, and only before it expires. What follows
from it (a rule, a raised cap, a tool that may be used as it is now) is written in the same transaction.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from halter.core.events import AnyEvent, CostCapReached, DecisionAsked, DecisionMade, RuleEnded, RuleMade, ToolPinned
from halter.core.ids import FLEET, StreamId, inbox_stream, may_decide, session_stream
from halter.core.money import Account, shown
from halter.core.ports import Draft, Lease, Query, Rows, Store, Write
from halter.core.row import RowKey
from halter.core.rows import DecisionRow, PinRow, RuleRow
from halter.core.text import to_body
from halter.core.vocabulary import DecisionKind, RuleScope, Verdict
from halter.guard.judge import edit_digest
from halter.guard.purse import change_cap
from halter.guard.rules import Matcher, written


class Open(msgspec.Struct, frozen=True):
    """A decision that waits for somebody, with what they are shown."""

    decision: str
    about: str
    session: str
    agent: str
    subject: str
    name: str
    digest: str
    level: str
    risk: str
    same: str
    keys: str
    asked_at: int
    expires_at: int
    body: bytes | None

    @property
    def stream(self) -> StreamId:
        """Where the answer goes: to the session that waits for it, or to the fleet where none does."""
        return inbox_stream(self.session) if self.session else FLEET


async def needs_you(store: Store) -> Sequence[Open]:
    """List what waits for a person, the longest waiting first."""
    return await store.ask(Query("open_decisions", Open))


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Something to put before a person besides a call: a cap, a call in doubt, a tool that has changed."""

    decision: str
    about: DecisionKind
    subject: str
    name: str
    digest: str
    expires_in: int
    shown: str
    agent: str = ""


def ask(question: Question, lease: Lease | None = None) -> Write:
    """Put a question before a person, once; for a session, or for the fleet where none asks."""

    def decide(rows: Rows) -> Sequence[Draft]:
        if rows.get(DecisionRow, question.decision) is not None:
            return []
        event = DecisionAsked(
            decision=question.decision,
            about=question.about,
            subject=question.subject,
            name=question.name,
            digest=question.digest,
            expires_at=rows.now + question.expires_in,
            agent=question.agent,
        )
        return [Draft(event, to_body(question.shown))]

    stream = FLEET if lease is None else session_stream(lease.session)
    return Write(stream, f"asked/{question.decision}", decide, [(DecisionRow, (question.decision,))], lease)


def cap_question(refused: str, name: str, cap: CostCapReached, expires_in: int) -> Question:
    """Word the question whether a cap may be raised."""
    return Question(
        decision=f"{refused}/cap/{cap.cap}",
        about="cap_raise",
        subject=cap.scope,
        name=name,
        digest=f"{cap.scope}={cap.cap}",
        expires_in=expires_in,
        shown=(
            f"{name} may cost {shown(cap.amount)}; {shown(cap.spent)} of {shown(cap.cap)} is spent in {cap.scope}. "
            "Raise the cap to let it go on."
        ),
    )


class Then(msgspec.Struct, frozen=True):
    """What an answer leads to besides itself, and the rows that this takes; all of it is said to the whole fleet."""

    events: Callable[[Rows], Sequence[AnyEvent]] = lambda _: ()
    reads: Sequence[RowKey] = ()


ALONE: Final = Then()


def decide(asked: Open, verdict: Verdict, by: str, key: str, reason: str = "") -> Write:
    """Say yes or no. The session wakes by it."""
    then = ALONE
    if verdict == "approve" and asked.about == "changed_tool":
        pinned = ToolPinned(agent=asked.agent, tool=asked.name, digest=asked.digest, by=by)
        then = Then(lambda _: [pinned], [(PinRow, (asked.agent, asked.name))])
    return _answer(asked, _made(asked, verdict, by, reason), key, then)


def edit(asked: Open, arguments: bytes, by: str, key: str, reason: str = "") -> Write:
    """Say yes to other arguments than those that were asked about."""
    digest = edit_digest(asked.digest, sha256(arguments).hexdigest())
    made = msgspec.structs.replace(_made(asked, "edit", by, reason), digest=digest)
    return _answer(asked, made, key, body=arguments)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """An "always" as a person words it."""

    id: str
    matcher: Matcher
    keys: tuple[str, ...]
    scope: RuleScope
    expires_in: int


def always(asked: Open, rule: Rule, by: str, key: str, reason: str = "") -> Write:
    """Say yes, and yes to all calls of the same kind for a while."""
    owner = {"session": asked.session, "agent": asked.agent, "fleet": ""}[rule.scope]

    def made(rows: Rows) -> Sequence[AnyEvent]:
        return [
            RuleMade(
                rule=rule.id,
                tool=asked.name,
                scope=rule.scope,
                owner=owner,
                matcher=written(rule.matcher),
                keys=rule.keys,
                by=by,
                expires_at=rows.now + rule.expires_in,
            )
        ]

    return _answer(asked, _made(asked, "approve", by, reason), key, Then(made, [(RuleRow, (rule.id,))]))


def end_rule(rule: str, by: str, key: str, reason: str = "") -> Write:
    """Take an "always" back; of one that is over, nothing is written."""

    def decided(rows: Rows) -> Sequence[Draft]:
        row = rows.get(RuleRow, rule)
        ends = row is not None and row.live(rows.now) and may_decide(by)
        return [Draft(RuleEnded(rule=rule, by=by, reason=reason))] if ends else []

    return Write(FLEET, key, decided, [(RuleRow, (rule,))])


def raise_cap(asked: Open, account: Account, cap: int | None, by: str, key: str, reason: str = "") -> Write:
    """Say yes to a session that has come to its cap: the cap is raised, and the session goes on in place."""
    change = change_cap(account, cap, by, key, reason)
    then = Then(lambda rows: [draft.event for draft in change.decide(rows)], change.reads)
    return _answer(asked, _made(asked, "approve", by, reason), key, then)


def _made(asked: Open, verdict: Verdict, by: str, reason: str) -> DecisionMade:
    return DecisionMade(decision=asked.decision, verdict=verdict, by=by, digest=asked.digest, reason=reason)


def _answer(asked: Open, made: DecisionMade, key: str, then: Then = ALONE, body: bytes | None = None) -> Write:
    """Answer once, before it expires, exactly what was asked; by an agent, or too late, nothing is written."""

    def judged(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, asked.decision)
        if row is None or row.verdict or rows.now >= row.expires_at or row.digest != asked.digest:
            return []
        if not may_decide(made.by):
            return []
        return [Draft(made, body), *(Draft(event, stream=FLEET) for event in then.events(rows))]

    return Write(asked.stream, key, judged, [(DecisionRow, (asked.decision,)), *then.reads], others=(FLEET,))

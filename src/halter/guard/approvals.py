"""Decisions: one durable queue of what a person must say yes or no to.

An answer is bound to the digest of what the person was shown, counts once, and only before it expires. What follows
from it (a rule, a raised cap, a tool that may be used as it is now) is written in the same transaction.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final

import msgspec
from msgspec.structs import replace

from halter.core.events import (
    CostCapReached,
    DecisionAsked,
    DecisionMade,
    DecisionWithdrawn,
    ProposalDecided,
    RuleEnded,
    RuleMade,
    ToolPinned,
    TriggerMade,
)
from halter.core.ids import FLEET, StreamId, inbox_stream, may_decide, session_stream, trigger_stream
from halter.core.left import Proposal
from halter.core.money import Account, shown
from halter.core.ports import Draft, Lease, Query, Rows, Store, Write
from halter.core.row import RowKey
from halter.core.rows import DecisionRow, PinRow, RuleRow
from halter.core.task_project import rows_of_event
from halter.core.task_rows import TriggerRow
from halter.core.text import from_body, to_body
from halter.core.triggered import TriggerKind
from halter.core.vocabulary import DecisionKind, RuleScope, Verdict
from halter.guard.judge import edit_digest
from halter.guard.purse import change_cap
from halter.guard.rules import Matcher, written


class Planned(msgspec.Struct, frozen=True):
    """A trigger that a person is asked about: what they are shown, and what comes to be if they say yes."""

    shown: str
    trigger: str
    type: TriggerKind
    digest: str
    made: msgspec.Raw


class Pin(msgspec.Struct, frozen=True):
    """A tool as it may be used."""

    tool: str
    digest: str


class ServerChange(msgspec.Struct, frozen=True):
    """What is new or has changed in a server: what a person is shown, and what is pinned if they say yes."""

    shown: str
    server: str
    pins: tuple[Pin, ...]


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
    proposed: bytes | None = None
    kind: str | None = None

    @property
    def stream(self) -> StreamId:
        """Where the answer goes: to the session that waits for it, or to the fleet where none does."""
        return inbox_stream(self.session) if self.session else FLEET

    @property
    def shown(self) -> str:
        """What was to be shown to the person who decides."""
        if self.about == "proposal" and self.body is None:
            return self._proposal()
        if self.about not in {"schedule", "changed_server"}:
            return from_body(self.body or b"")
        meant = self.planned() if self.about == "schedule" else self.server_change()
        return "(erased)" if meant is None else meant.shown

    def _proposal(self) -> str:
        """Put a proposal in words. They stand in the stream of its session alone, and are erased with it."""
        if self.proposed is None:
            return "(erased)"
        case = f"{self.kind}: " if self.kind else ""
        return f"{self.agent} proposes a {self.name}: {case}{from_body(self.proposed)}"

    def planned(self) -> Planned | None:
        """Read the trigger that is asked about; None if it is not, or no longer, the one that the digest names."""
        if self.about != "schedule" or sha256(self.body or b"").hexdigest() != self.digest:
            return None
        return msgspec.json.decode(self.body or b"", type=Planned)

    def server_change(self) -> ServerChange | None:
        """Read the change that is asked about; None if it is not, or no longer, the one that the digest names."""
        if self.about != "changed_server" or sha256(self.body or b"").hexdigest() != self.digest:
            return None
        return msgspec.json.decode(self.body or b"", type=ServerChange)


async def needs_you(store: Store, now: int = 0) -> Sequence[Open]:
    """List what waits for a person and has not expired by then, the longest waiting first."""
    return await store.ask(Query("open_decisions", Open, {"now": now}))


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


def about_trigger(agent: str, planned: Planned, expires_in: int) -> Question:
    """Ask whether a trigger may come to be: nothing of it exists before."""
    body = msgspec.json.encode(planned)
    return Question(
        decision=f"schedule/{planned.trigger}",
        about="schedule",
        subject=planned.trigger,
        name=planned.trigger.partition("/")[2],
        digest=sha256(body).hexdigest(),
        expires_in=expires_in,
        shown=from_body(body),
        agent=agent,
    )


def about_server(agent: str, change: ServerChange, expires_in: int) -> Question:
    """Ask whether the tools of a server may be used as they are now."""
    body = msgspec.json.encode(change)
    digest = sha256(body).hexdigest()
    return Question(
        decision=f"{agent}/{change.server}/{digest[:16]}",
        about="changed_server",
        subject=change.server,
        name=change.server,
        digest=digest,
        expires_in=expires_in,
        shown=from_body(body),
        agent=agent,
    )


def withdraw(decision: str, why: str) -> Write:
    """Take back a question that no session asked; one that was answered meanwhile stays answered."""

    def decided(rows: Rows) -> Sequence[Draft]:
        row = rows.get(DecisionRow, decision)
        waits = row is not None and not row.verdict and not row.session
        return [Draft(DecisionWithdrawn(decision=decision, why=why))] if waits else []

    return Write(FLEET, f"withdrawn/{decision}", decided, [(DecisionRow, (decision,))])


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
    """What an answer leads to besides itself, and the rows and streams that this takes.

    What names no stream is said to the whole fleet. None means that it cannot be done any more: then nothing is.
    """

    drafts: Callable[[Rows], Sequence[Draft] | None] = lambda _: ()
    reads: Sequence[RowKey] = ()
    others: Sequence[StreamId] = ()


ALONE: Final = Then()


def decide(asked: Open, verdict: Verdict, by: str, key: str, reason: str = "") -> Write:
    """Say yes or no. The session wakes by it."""
    return _answer(asked, _made(asked, verdict, by, reason), key, _following(asked, verdict, by, reason))


def _following(asked: Open, verdict: Verdict, by: str, reason: str) -> Then:
    """Tell what a plain yes or no leads to."""
    if asked.about == "proposal":
        return _kept(asked, verdict, by, reason)
    if verdict == "approve" and asked.about == "changed_tool":
        pinned = ToolPinned(agent=asked.agent, tool=asked.name, digest=asked.digest, by=by)
        return Then(lambda _: [Draft(pinned)], [(PinRow, (asked.agent, asked.name))])
    if verdict == "approve" and asked.about == "changed_server":
        return _server(asked, by)
    if verdict == "approve" and asked.about == "schedule":
        return _trigger(asked, by)
    return ALONE


def _server(asked: Open, by: str) -> Then:
    """Pin the tools that were shown, byte for byte, and no others."""
    change = asked.server_change()
    if change is None:
        return Then(lambda _: None)
    events = [ToolPinned(agent=asked.agent, tool=pin.tool, digest=pin.digest, by=by) for pin in change.pins]
    drafts = [Draft(event) for event in events]
    return Then(lambda _: drafts, [(PinRow, (asked.agent, pin.tool)) for pin in change.pins])


def _trigger(asked: Open, by: str) -> Then:
    """Let the trigger be that was shown, byte for byte; not where one of that name has come to be meanwhile."""
    planned = asked.planned()
    if planned is None:
        return Then(lambda _: None)
    event = TriggerMade(trigger=planned.trigger, agent=asked.agent, type=planned.type, by=by, digest=planned.digest)
    stream = trigger_stream(planned.trigger)

    def made(rows: Rows) -> Sequence[Draft] | None:
        row = rows.get(TriggerRow, planned.trigger)
        if row is not None and row.made_seq and row.ended_at is None:
            return None
        return [Draft(event, bytes(planned.made), stream=stream)]

    return Then(made, rows_of_event(event), (stream,))


def _kept(asked: Open, verdict: Verdict, by: str, reason: str) -> Then:
    about = msgspec.convert(asked.name, type=Proposal)
    status = "kept" if verdict == "approve" else "dismissed"
    event = ProposalDecided(proposal=asked.subject, about=about, status=status, by=by, reason=reason)
    return Then(lambda _: [Draft(event)], rows_of_event(event))


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

    def made(rows: Rows) -> Sequence[Draft]:
        event = RuleMade(
            rule=rule.id,
            tool=asked.name,
            scope=rule.scope,
            owner=owner,
            matcher=written(rule.matcher),
            keys=rule.keys,
            by=by,
            expires_at=rows.now + rule.expires_in,
        )
        return [Draft(event)]

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
    return _answer(asked, _made(asked, "approve", by, reason), key, Then(change.decide, change.reads))


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
        more = then.drafts(rows)
        if more is None:
            return []
        return [Draft(made, body), *(draft if draft.stream else replace(draft, stream=FLEET) for draft in more)]

    reads = [(DecisionRow, (asked.decision,)), *then.reads]
    return Write(asked.stream, key, judged, reads, others=(FLEET, *then.others))

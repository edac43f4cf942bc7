"""What a receipt says of a task: its phases, what it read and found, what it was given, and what it leaves behind."""

from collections.abc import Iterable

import msgspec

from halter.core.events import (
    CallSettled,
    CallStarted,
    ContextGiven,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    GuardrailTriggered,
    JudgesChosen,
    MemoryProposed,
    MessageRouted,
    NotificationQueued,
    PhaseEntered,
    PrecedentProposed,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionResumed,
)
from halter.core.left import Reviewed, Severity, Support
from halter.core.money import Usd, usd
from halter.core.ports import Stored
from halter.core.vocabulary import Guardrail


class PhaseLine(msgspec.Struct, frozen=True):
    """One phase, and how long the session was in it; the last one is left when the session is over."""

    phase: str
    number: int
    entered_at: int
    left_at: int | None = None


class DocumentLine(msgspec.Struct, frozen=True):
    """A document that was read: `document` is the digest of its content."""

    document: str
    name: str
    collection: str
    read_at: int
    times: int = 1


class FindingLine(msgspec.Struct, frozen=True):
    """What was found, whether its source bears it out, and what others than its author said of it, if they did."""

    finding: str
    severity: Severity
    support: Support
    emitted_at: int
    document: str = ""
    name: str = ""
    by: str = ""
    review: Reviewed | None = None
    judges: tuple[str, ...] = ()
    reviewed_at: int | None = None


class JudgesLine(msgspec.Struct, frozen=True):
    """How many judges looked at findings, and why not as many as were wanted."""

    wanted: int
    chosen: int
    items: int
    most_usd: Usd
    cap_usd: Usd | None
    sentence: str
    at: int


class ProposalLine(msgspec.Struct, frozen=True):
    """A memory or a precedent that the session proposed; a precedent has a kind."""

    proposal: str
    at: int
    kind: str = ""


class NotificationLine(msgspec.Struct, frozen=True):
    """Something that was to be told over a channel. Whether it was stands with the store, and not in the session."""

    notification: str
    channel: str
    about: str
    queued_at: int


class GuardrailLine(msgspec.Struct, frozen=True):
    """One time that a mechanical rule held the session back; or several, where it did nothing but wait for a rate."""

    guardrail: Guardrail
    at: int
    sentence: str
    turn: int = 0
    until: int | None = None
    times: int = 1


class RouteLine(msgspec.Struct, frozen=True):
    """Which way a message took."""

    route: str
    strategy: str
    why: str
    at: int


class Left(msgspec.Struct, frozen=True):
    """All of it together."""

    phases: tuple[PhaseLine, ...] = ()
    documents: tuple[DocumentLine, ...] = ()
    findings: tuple[FindingLine, ...] = ()
    judges: tuple[JudgesLine, ...] = ()
    memories_given: tuple[str, ...] = ()
    precedents_given: tuple[str, ...] = ()
    memories_proposed: tuple[ProposalLine, ...] = ()
    precedents_proposed: tuple[ProposalLine, ...] = ()
    notifications: tuple[NotificationLine, ...] = ()
    guardrails: tuple[GuardrailLine, ...] = ()
    routes: tuple[RouteLine, ...] = ()


class _Leavings:
    """Gathers it, event by event."""

    def __init__(self) -> None:
        self._phases: list[PhaseLine] = []
        self._documents: dict[tuple[str, str, str], DocumentLine] = {}
        self._findings: dict[str, FindingLine] = {}
        self._judges: list[JudgesLine] = []
        self._memories: dict[str, None] = {}
        self._precedents: dict[str, None] = {}
        self._proposed_memories: list[ProposalLine] = []
        self._proposed_precedents: list[ProposalLine] = []
        self._notifications: list[NotificationLine] = []
        self._guardrails: list[GuardrailLine] = []
        self._routes: list[RouteLine] = []

    def take(self, stored: Stored) -> None:
        """Take in an event, if it is about any of this."""
        at = stored.at
        match stored.event:
            case CallStarted() | CallSettled() | RequestStarted() | RequestSettled():
                # Most events are about none of it.
                pass
            case PhaseEntered() as entered:
                self._leave(at)
                self._phases.append(PhaseLine(entered.phase, entered.number, at))
            case SessionEnded():
                self._leave(at)
            case SessionResumed():
                self._leave(None)
            case DocumentRead() as read:
                self._read(read, at)
            case FindingEmitted() | FindingReviewed() | JudgesChosen() as event:
                self._found(event, at)
            case ContextGiven() as given:
                self._memories |= dict.fromkeys(given.memories)
                self._precedents |= dict.fromkeys(given.precedents)
            case MemoryProposed() as memory:
                self._proposed_memories.append(ProposalLine(memory.memory, at))
            case PrecedentProposed() as precedent:
                self._proposed_precedents.append(ProposalLine(precedent.precedent, at, precedent.kind))
            case NotificationQueued() as told:
                self._notifications.append(NotificationLine(told.notification, told.channel, told.about, at))
            case GuardrailTriggered() as held:
                self._hold_back(GuardrailLine(held.guardrail, at, held.sentence, held.turn, held.until))
            case MessageRouted() as routed:
                self._routes.append(RouteLine(routed.route, routed.strategy, routed.why, at))
            case _:
                pass

    def _leave(self, at: int | None) -> None:
        """Be done with the phase that is open; or go on in the last one."""
        if self._phases:
            self._phases[-1] = msgspec.structs.replace(self._phases[-1], left_at=at)

    def _hold_back(self, line: GuardrailLine) -> None:
        """Keep a line. Whoever waits for the rate of a model may do so every minute of a night: that is told once."""
        last = self._guardrails[-1] if self._guardrails else None
        if last is not None and line.guardrail == "model_rate" and _rate(last) == _rate(line):
            self._guardrails[-1] = msgspec.structs.replace(line, at=last.at, times=last.times + 1)
        else:
            self._guardrails.append(line)

    def _read(self, event: DocumentRead, at: int) -> None:
        key = (event.document, event.name, event.collection)
        known = self._documents.get(key)
        line = DocumentLine(*key, at) if known is None else msgspec.structs.replace(known, times=known.times + 1)
        self._documents[key] = line

    def _found(self, event: FindingEmitted | FindingReviewed | JudgesChosen, at: int) -> None:
        match event:
            case FindingEmitted():
                line = FindingLine(event.finding, event.severity, event.support, at)
                line = msgspec.structs.replace(line, document=event.document, name=event.name, by=event.by)
                self._findings[event.finding] = line
            case FindingReviewed():
                known = self._findings.get(event.finding)
                if known is not None:
                    self._findings[event.finding] = msgspec.structs.replace(
                        known, review=event.verdict, judges=event.judges, reviewed_at=at
                    )
            case JudgesChosen():
                most, cap = usd(event.usd), None if event.cap is None else usd(event.cap)
                facts = (event.wanted, event.chosen, event.items, most, cap, event.sentence)
                self._judges.append(JudgesLine(*facts, at))

    def left(self) -> Left:
        """Tell all of it."""
        return Left(
            phases=tuple(self._phases),
            documents=tuple(self._documents.values()),
            findings=tuple(self._findings.values()),
            judges=tuple(self._judges),
            memories_given=tuple(self._memories),
            precedents_given=tuple(self._precedents),
            memories_proposed=tuple(self._proposed_memories),
            precedents_proposed=tuple(self._proposed_precedents),
            notifications=tuple(self._notifications),
            guardrails=tuple(self._guardrails),
            routes=tuple(self._routes),
        )


def _rate(line: GuardrailLine) -> tuple[str, str]:
    """Tell which rate was waited for: its sentence names it before the time."""
    return line.guardrail, line.sentence.partition(" until ")[0]


def left(events: Iterable[Stored]) -> Left:
    """Tell what a session's own stream says of all this."""
    gathered = _Leavings()
    for stored in events:
        gathered.take(stored)
    return gathered.left()

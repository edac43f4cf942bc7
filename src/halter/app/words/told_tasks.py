"""What events of triggers and tasks say, in a few words for a person."""

import msgspec

from halter.app.words.moments import written
from halter.core.events import (
    ContextGiven,
    DocumentRead,
    FindingEmitted,
    FindingReviewed,
    ItemQuarantined,
    ItemReleased,
    ItemSeen,
    JudgesChosen,
    Leaving,
    MemoryProposed,
    MessageRouted,
    NotificationFailed,
    NotificationQueued,
    NotificationSent,
    OfTriggers,
    PhaseEntered,
    PrecedentProposed,
    ProposalDecided,
    RunQueued,
    RunsDelayed,
    RunSkipped,
    RunStarted,
    TriggerEnded,
    TriggerMade,
)


def of_a_task(event: PhaseEntered | ContextGiven | DocumentRead | JudgesChosen | MessageRouted) -> str:
    """Tell of a task's walk."""
    match event:
        case PhaseEntered():
            return event.phase
        case ContextGiven():
            return f"{len(event.memories)} memories and {len(event.precedents)} precedents"
        case DocumentRead():
            return f"{event.name} ({event.document[:16]})"
        case JudgesChosen():
            return f"{event.chosen} of {event.wanted} for {event.items} findings{_because(event.sentence)}"
        case MessageRouted():
            return f"{event.strategy or event.route}{_because(event.why)}"


def of_what_is_left(event: Leaving) -> str:
    """Tell of findings, proposals and notifications."""
    match event:
        case FindingEmitted():
            about = f" in {event.name}" if event.name else ""
            return f"{event.finding}: {event.severity}, {event.support}{about}"
        case FindingReviewed():
            return f"{event.finding}: {event.verdict}"
        case MemoryProposed():
            return event.memory
        case PrecedentProposed():
            return f"{event.precedent}, {event.kind}"
        case ProposalDecided():
            return f"{event.about} {event.proposal}: {event.status}, by {event.by}{_because(event.reason)}"
        case NotificationQueued():
            return f"{event.notification} over {event.channel}"
        case NotificationSent():
            return event.notification
        case NotificationFailed():
            again = f", again at {written(event.next_at)}" if event.next_at is not None else ", and not again"
            return f"{event.notification}, {event.attempts} times{again}: {event.error}"


def of_a_trigger(event: OfTriggers) -> str:
    """Tell of what starts sessions."""
    match event:
        case TriggerMade():
            return f"{event.trigger}, a {event.type}, by {event.by}"
        case TriggerEnded():
            return f"{event.trigger}, by {event.by}{_because(event.reason)}"
        case RunStarted():
            attempt = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return f"{event.session} by {event.cause}{attempt}"
        case RunSkipped():
            times = f"{event.count} times up to {written(event.due_at)}" if event.count > 1 else written(event.due_at)
            return f"{times}, {event.why}{_because(event.sentence)}"
        case RunQueued():
            return f"due {written(event.due_at)}"
        case RunsDelayed():
            until = f" until {written(event.until)}" if event.until is not None else ""
            return f"{event.waiting} wait{until}{_because(event.sentence)}"
        case ItemSeen():
            return f"{event.name} ({event.item[:16]}){', which does not count' if event.ignored else ''}"
        case ItemQuarantined():
            return f"{event.item[:16]} after {event.attempts} attempts{_because(event.sentence)}"
        case ItemReleased():
            return f"{event.item[:16]}, by {event.by}"


class _Words(msgspec.Struct, frozen=True):
    """What findings and notifications say, as far as a person is shown it."""

    title: str = ""
    subject: str = ""
    text: str = ""
    quote: str = ""


def title_of(body: bytes) -> str:
    """Find the title of a finding, or the subject of a notification; nothing where it cannot be read."""
    words = _words(body)
    return words.title or words.subject


def in_words(body: bytes) -> str:
    """Say all that a finding or a notification says, each part on lines of its own."""
    words = _words(body)
    parts = (words.title or words.subject, words.text, f'"{words.quote}"' if words.quote else "")
    return "\n".join(part for part in parts if part)


def _words(body: bytes) -> _Words:
    try:
        return msgspec.json.decode(body, type=_Words)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Words()


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""

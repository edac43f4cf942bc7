"""Triggers and tasks on the screen of `halter up`: what starts them, where they walk, and what they leave behind."""

from typing import Final

from halter.app.words.moments import moment
from halter.app.words.told_tasks import title_of
from halter.cli.styles import LOOK, NEEDED, PLAIN, Line
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
from halter.core.text import counted, from_body

URGENT: Final = frozenset(("high", "critical"))

Walking = PhaseEntered | ContextGiven | DocumentRead | JudgesChosen | MessageRouted


class Items:
    """Knows documents by the names under which they were found: later they are only told by their content."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def line(self, event: OfTriggers, now: int) -> Line | None:
        """Tell what a trigger did."""
        match event:
            case ItemSeen():
                self._names[event.item] = event.name
                return None if event.ignored else Line(f"finds {event.name}")
            case ItemQuarantined():
                tried = f" after {counted(event.attempts, 'attempt')}" if event.attempts else ""
                return Line(f"Needs you: {self._name(event.item)} is left to you{tried}: {event.sentence}", NEEDED)
            case ItemReleased():
                return Line(f"{self._name(event.item)} is tried anew, says {event.by}")
            case _:
                return _of_a_run(event, self._of(event), now)

    def _name(self, item: str) -> str:
        return self._names.get(item, f"document {item[:12]}")

    def _of(self, event: OfTriggers) -> str:
        return f" for {self._name(event.item)}" if isinstance(event, RunStarted) and event.item else ""


def _of_a_run(
    event: TriggerMade | TriggerEnded | RunStarted | RunSkipped | RunQueued | RunsDelayed, item: str, now: int
) -> Line:
    match event:
        case TriggerMade():
            return Line(f"is a {event.type} now, by {event.by}")
        case TriggerEnded():
            return Line(f"starts nothing any more, by {event.by}{_because(event.reason)}")
        case RunStarted():
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            by = event.by or event.cause
            return Line(f"starts {event.session}{item}, by {by}{again}")
        case RunSkipped():
            times = f" {counted(event.count, 'time')}" if event.count > 1 else ""
            return Line(f"does not run{times} ({event.why}){_because(event.sentence)}", LOOK)
        case RunQueued():
            return Line("waits for the run before it")
        case RunsDelayed():
            until = f" until {moment(event.until, now)}" if event.until is not None else ""
            return Line(f"keeps {event.waiting} waiting{until} ({event.why}){_because(event.sentence)}", LOOK)


def of_a_walk(event: Walking) -> Line:
    """Tell where a task is."""
    match event:
        case PhaseEntered():
            return Line(f"enters {event.phase}")
        case ContextGiven():
            memories = f"{len(event.memories)} {'memory' if len(event.memories) == 1 else 'memories'}"
            return Line(f"is given {memories} and {counted(len(event.precedents), 'precedent')}")
        case DocumentRead():
            return Line(f"reads {event.name}")
        case JudgesChosen():
            fewer = event.chosen < event.wanted
            judges = f"{event.chosen} of {counted(event.wanted, 'judge')}" if fewer else counted(event.chosen, "judge")
            text = f"{judges} for {counted(event.items, 'finding')}{_because(event.sentence)}"
            return Line(text, LOOK if fewer else PLAIN)
        case MessageRouted():
            return Line(f"takes it as {event.strategy or event.route}{_because(event.why)}")


def of_what_is_left(event: Leaving, body: bytes) -> Line:
    """Tell what a session leaves behind, and what becomes of it."""
    match event:
        case FindingEmitted():
            about = f" in {event.name}" if event.name else ""
            doubt = "" if event.support == "supported" else f", {event.support}"
            text = f"finds ({event.severity}{doubt}){about}: {title_of(body) or event.finding}"
            return Line(text, LOOK if event.severity in URGENT else PLAIN)
        case FindingReviewed():
            return _reviewed(event)
        case MemoryProposed():
            return Line(f"wants to remember: {from_body(body)}")
        case PrecedentProposed():
            return Line(f"met a case ({event.kind}): {from_body(body)}")
        case ProposalDecided():
            return Line(f"{event.by} {event.status} the {event.about} {event.proposal}{_because(event.reason)}")
        case NotificationQueued():
            return Line(f"has something to tell over {event.channel}: {title_of(body)}".removesuffix(": "))
        case NotificationSent():
            return Line(f"told {event.notification}")
        case NotificationFailed():
            again = "is tried again" if event.next_at is not None else "is given up"
            return Line(f"could not tell {event.notification}, which {again}: {event.error}", LOOK)


def _reviewed(event: FindingReviewed) -> Line:
    match event.verdict:
        case "released":
            return Line(f"{event.finding} is released by its review")
        case "withheld":
            return Line(f"{event.finding} is withheld by its review", LOOK)
        case "not_reviewed":
            return Line(f"{event.finding} was not reviewed", LOOK)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""

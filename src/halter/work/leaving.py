"""The verbs by which a session leaves something behind: findings, proposals and notifications.

They only record. What they record is committed with the outcome of the call, so a crash before it is harmless, and a
person decides what becomes of it. Where a notification goes was written by a person too.
"""

import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, Clock
from halter.core.events import (
    DecisionAsked,
    FindingEmitted,
    MemoryProposed,
    NotificationQueued,
    PrecedentProposed,
)
from halter.core.ids import FLEET
from halter.core.left import Severity, Support
from halter.core.rows import DecisionRow
from halter.core.task_rows import MemoryRow
from halter.core.telling import Telling
from halter.core.text import listed, shorten, to_body
from halter.core.tools import Failed, Happening, Output
from halter.work.verbs import Verb

EMIT_FINDING: Final = "emit_finding"
PROPOSE_MEMORY: Final = "propose_memory"
PROPOSE_PRECEDENT: Final = "propose_precedent"
NOTIFY: Final = "notify"

UNREVIEWED: Final = "(not reviewed)"

WAITS: Final = 365 * DAY
"""How long a proposal waits for somebody to look at it."""

Short = Annotated[str, Meta(min_length=1, max_length=200)]
Long = Annotated[str, Meta(min_length=1, max_length=8000)]

Check = Callable[[str, str], Awaitable[Support]]
"""Tells whether a quote stands in a document that the session may read. Raises Failed for one that it may not."""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found, and on what grounds."""

    title: Short
    severity: Severity
    text: Annotated[str, Meta(max_length=8000)] = ""
    document: Annotated[str, Meta(description="the document that it is about", max_length=1000)] = ""
    quote: Annotated[str, Meta(description="the words of the document that show it", max_length=8000)] = ""


class Checked(msgspec.Struct, frozen=True):
    """A finding's document, as it was when its quote was looked for there."""

    support: Support
    document: str = ""
    name: str = ""


def emit_finding(agent: str, check: Callable[[Finding], Awaitable[Checked]], by: str = "") -> Verb:
    """Make the verb that records a finding. Its quote is looked for in the document itself."""

    async def act(finding: Finding, call: str) -> Output:
        checked = await check(finding)
        event = FindingEmitted(
            finding=named("f", call),
            agent=agent,
            severity=finding.severity,
            support=checked.support,
            document=checked.document,
            name=checked.name,
            by=by,
        )
        return Output(_told(event), happened=(Happening(event, msgspec.json.encode(finding)),))

    about = (
        "Record something you found. Quote the words of the document that show it: they are looked for there, and a "
        "finding without such words is marked as unsupported."
    )
    return Verb(EMIT_FINDING, about, Finding, act)


def _told(event: FindingEmitted) -> str:
    match event.support:
        case "supported":
            return f"Recorded as {event.finding}; the quote stands in {event.name}."
        case "unsupported":
            return f"Recorded as {event.finding}, unsupported: those words do not stand in {event.name}."
        case "unquoted":
            return f"Recorded as {event.finding}, without a quote that could be looked for."


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: Long


def propose_memory(agent: str, clock: Clock) -> Verb:
    """Make the verb that proposes something to be remembered; a person keeps or dismisses it."""

    async def act(asked: _Memory, _: str) -> Output:
        memory = named("m", agent, normalised(asked.text))
        event = MemoryProposed(memory=memory, agent=agent)
        unless = (MemoryRow, (memory,))
        question = _question(agent, memory, "memory", asked.text, clock.now())
        happened = (
            Happening(event, to_body(asked.text), unless=unless),
            msgspec.structs.replace(question, unless=unless),
        )
        return Output(f"Proposed as {memory}. A person decides whether it is kept.", happened=happened)

    return Verb(PROPOSE_MEMORY, "Propose something to be remembered in later sessions. A person decides.", _Memory, act)


class _Precedent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Annotated[str, Meta(min_length=1, max_length=60, description="what kind of case it is, in a word or two")]
    summary: Annotated[str, Meta(min_length=1, max_length=2000, description="the case, in a sentence or two")]


def propose_precedent(agent: str, clock: Clock) -> Verb:
    """Make the verb that tells of a case which may be met again; one that is met again counts up."""

    async def act(asked: _Precedent, _: str) -> Output:
        kind = normalised(asked.kind)
        precedent = named("p", agent, kind, normalised(asked.summary))
        event = PrecedentProposed(precedent=precedent, agent=agent, kind=kind)
        question = _question(agent, precedent, "precedent", f"{kind}: {asked.summary}", clock.now())
        happened = (Happening(event, to_body(asked.summary)), question)
        return Output(f"Noted as {precedent}. A person decides whether it is kept.", happened=happened)

    about = "Tell of a case that may be met again, so that it is known in later sessions. A person decides."
    return Verb(PROPOSE_PRECEDENT, about, _Precedent, act)


def _question(agent: str, proposal: str, what: str, text: str, now: int) -> Happening:
    """Put a proposal before a person, once. Its words stand in the session's own stream, and are erased with them."""
    decision = f"proposal/{proposal}"
    event = DecisionAsked(
        decision=decision,
        about="proposal",
        subject=proposal,
        name=what,
        digest=sha256(to_body(text)).hexdigest(),
        expires_at=now + WAITS,
        agent=agent,
    )
    return Happening(event, stream=FLEET, unless=(DecisionRow, (decision,)))


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody is to be told."""

    text: Long
    subject: Annotated[str, Meta(max_length=200)] = ""
    findings: Annotated[tuple[str, ...], Meta(description="the findings that go with it", max_length=100)] = ()
    channel: Annotated[str, Meta(description="one channel; all, if empty")] = ""


Released = Callable[[], Awaitable[Mapping[str, tuple[str, str]]]]
"""Tells what the session found, by name: what a reviewer said of it, and it in words."""


def notify(agent: str, session: str, channels: Sequence[str], released: Released) -> Verb:
    """Make the verb that tells people something, over the channels that a person named."""

    async def act(notice: Notice, call: str) -> Output:
        found = await released()
        words = [_deliverable(finding, found) for finding in notice.findings]
        text = "\n\n".join((notice.text, *words))
        subject = notice.subject or shorten(notice.text.splitlines()[0], 120)
        body = Telling(subject=subject, text=text, session=session).body()
        wanted = [notice.channel] if notice.channel else list(channels)
        happened = tuple(
            Happening(_queued(named("n", call, channel), channel, agent, session), body) for channel in wanted
        )
        return Output(f"It will be told over {listed(wanted)}.", happened=happened)

    def flaw(notice: Notice) -> str:
        if not notice.channel or notice.channel in channels:
            return ""
        return f"There is no channel {shorten(notice.channel)!r}: there is {listed(channels)}."

    return Verb(NOTIFY, "Tell the people you work for something.", Notice, act, flaw, level="MONITORED")


def _queued(notification: str, channel: str, agent: str, session: str) -> NotificationQueued:
    return NotificationQueued(notification=notification, channel=channel, agent=agent, about=f"session:{session}")


def _deliverable(finding: str, found: Mapping[str, tuple[str, str]]) -> str:
    """Put a finding into words, and say if nobody could review it; not one that a reviewer withheld."""
    if finding not in found:
        raise Failed("NoSuchFinding", f"there is no finding {shorten(finding)!r}; there is {listed(found) or 'none'}")
    review, words = found[finding]
    if review == "withheld":
        raise Failed("Withheld", f"{finding} was withheld by its reviewer and is not delivered")
    return f"{words}\n{UNREVIEWED}" if review == "not_reviewed" else words


def named(kind: str, *parts: str) -> str:
    """Name something by what it is made of: the same again has the same name."""
    digest = sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{kind}-{digest[:16]}"


def normalised(text: str) -> str:
    """Write a text in the one way that equal ones have in common: case, blanks and punctuation at its ends aside."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"\s+", " ", plain).strip(" .,;:!?\"'")

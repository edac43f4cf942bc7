"""A report as a message: what needs somebody first, and never more than is read on the way."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from halter.app.report import AgentReport, Report
from halter.core.durations import shown_duration
from halter.core.events import NotificationQueued
from halter.core.ids import OUTBOX
from halter.core.money import shown_usd
from halter.core.ports import Draft, Write
from halter.core.task_project import rows_of_event
from halter.core.telling import Telling
from halter.core.text import clean, shorten
from halter.work.leaving import named

MOST: Final = 1500
"""So many characters a message has at most."""
LINE: Final = 200
"""So many characters a line has at most: one that is long must not crowd out the others."""
REST: Final = "…and more: halter report shows all of it."


class Message(NamedTuple):
    """What is sent."""

    subject: str
    text: str


def message_of(made: Report) -> Message:
    """Put a report into a few lines."""
    sessions = sum(agent.began for agent in made.agents)
    began = "1 session" if sessions == 1 else f"{sessions} sessions"
    needs = {0: "nothing needs you", 1: "1 thing needs you"}.get(
        len(made.needs_you), f"{len(made.needs_you)} things need you"
    )
    subject = f"Halter: {needs}; {began} and {shown_usd(made.spent_usd)} in {shown_duration(made.until - made.since)}"
    return Message(subject, _fitting(_line(line) for line in _lines(made)))


def send(agent: str, channel: str, message: Message, key: str) -> Write:
    """Let a report be told over a channel of an agent: it is sent after this is committed, by who runs that agent."""
    event = NotificationQueued(notification=named("n", key, channel), channel=channel, agent=agent, about="report")
    body = Telling(subject=message.subject, text=message.text).body()
    return Write(OUTBOX, f"report/{key}", lambda _: [Draft(event, body)], rows_of_event(event))


def _line(text: str) -> str:
    return shorten(" ".join(clean(text).split()), LINE)


def _fitting(lines: Iterable[str]) -> str:
    """Keep as many whole lines as fit, and say so where there are more."""
    kept: list[str] = []
    room = MOST - len(REST) - 1
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            return "\n".join((*kept, REST))
        kept.append(line)
    return "\n".join(kept)


def _lines(made: Report) -> Iterable[str]:
    yield "Needs you:" if made.needs_you else "Nothing needs you."
    yield from (f"- {sentence}" for sentence in made.needs_you)
    for sentence in made.ended_badly:
        yield f"Ended: {sentence}"
    for agent in made.agents:
        yield _of_an_agent(agent)
    by_purpose = {purpose: shown_usd(spent) for purpose, spent in made.spent_by_purpose_usd.items()}
    yield f"Spent: {shown_usd(made.spent_usd)}{_listed(by_purpose)}"
    for cap in made.caps:
        if cap.cap_usd is not None:
            yield f"Cap of {cap.scope} {cap.window}: {shown_usd(cap.spent_usd)} of {shown_usd(cap.cap_usd)}"
    if made.decided:
        yield f"Decided: {made.decided_count:,}"


def _of_an_agent(agent: AgentReport) -> str:
    found = {severity: sum(counts.values()) for severity, counts in agent.findings.items()}
    parts = [
        f"{agent.began} began{_listed(agent.ended)}",
        f"{agent.runs} runs" if agent.runs else "",
        f"skipped{_listed(agent.skipped)}" if agent.skipped else "",
        "; ".join(agent.delayed),
        f"{agent.quarantined} quarantined" if agent.quarantined else "",
        f"findings{_listed(found)}" if found else "",
        shown_usd(agent.spent_usd),
    ]
    return f"{agent.agent}: {', '.join(part for part in parts if part)}"


def _listed(counts: Mapping[str, object]) -> str:
    told = ", ".join(f"{name} {each}" for name, each in counts.items())
    return f" ({told})" if told else ""

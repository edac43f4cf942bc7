"""The report over all agents: a fold of rows, without a model; also as a short message."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from halter.core.clock import format_duration
from halter.core.codec import decode
from halter.core.events import ItemQuarantined, NotificationQueued, RunsDelayed, RunSkipped, RunStarted
from halter.core.ids import OUTBOX
from halter.core.money import ZERO_USD, Usd, format_share, format_usd, micros_to_usd
from halter.core.notifications import NotificationContent
from halter.core.ports import Draft, Query, Store, Write
from halter.core.project import rows_of_event
from halter.core.rows import DecisionRow, FindingRow, HaltRow, ItemRow, NotificationRow, SessionRow
from halter.core.text import clean, describe_need_count, shorten
from halter.present.events import describe_review
from halter.runtime.needs import CapLine, NeedRows, list_caps, list_needs, read_need_rows
from halter.tasks.task_tools import name_by_parts

MAX_REPORT_LINES: Final = 50
"""Further lines are counted, not listed."""


class TriggerEventRow(msgspec.Struct, frozen=True):
    stream: str
    at: int
    kind: str
    version: int
    facts: bytes


class ReportSpending(msgspec.Struct, frozen=True):
    """The spending of one agent on one model or tool for one purpose, in micro-dollars."""

    agent: str
    purpose: str
    name: str
    spends: int
    usd: int


class ReportDecision(msgspec.Struct, frozen=True):
    """An open decision."""

    decision: str
    about: str
    session: str
    agent: str
    name: str
    asked_at: int
    expires_at: int


class ReportRows(NeedRows, frozen=True, kw_only=True):
    since: int
    happened: Sequence[TriggerEventRow] = ()
    findings: Sequence[FindingRow] = ()
    spent: Sequence[ReportSpending] = ()
    decided: Sequence[DecisionRow] = ()


class EndsAlike(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of an agent that ended for the same reason: their count, and the last of them."""

    agent: str
    state: str
    terminal_reason: str
    count: int
    at: int
    session: str


class AnswersAlike(msgspec.Struct, frozen=True, kw_only=True):
    """Equal answers of a person to the same tool of an agent: their count, and the session of the last."""

    by: str
    agent: str
    name: str
    denied: int
    count: int
    at: int
    session: str | None = None


class NightSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of what happened since a moment. Its length depends on the kinds of events, not on their number."""

    since: int
    ends: Sequence[EndsAlike] = ()
    answers: Sequence[AnswersAlike] = ()
    halts: Sequence[HaltRow] = ()
    quarantined_items: Sequence[ItemRow] = ()
    undelivered: Sequence[NotificationRow] = ()


async def read_night(store: Store, since: int, limit: int) -> NightSummary:
    """Read what happened since a moment, at most `limit` newest kinds of each; the store does the counting."""
    params: Mapping[str, Any] = {"since": since, "limit": limit}
    return NightSummary(
        since=since,
        ends=await store.ask(Query("ends_since", EndsAlike, params)),
        answers=await store.ask(Query("answers_since", AnswersAlike, params)),
        halts=await store.ask(Query("halts_told", HaltRow, {"since": since})),
        quarantined_items=[
            row for row in await store.ask(Query("items_left", ItemRow)) if (row.quarantined_at or 0) >= since
        ],
        undelivered=await store.ask(Query("undelivered", NotificationRow, {"since": since})),
    )


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The activity of one agent. `ended` counts sessions by state and reason, `under_way` open ones by state.

    `skipped` counts skipped runs by reason, `delayed` lists delayed triggers with the reason. `findings` counts by
    severity and review.
    """

    agent: str
    began: int = 0
    ended: Mapping[str, int] = {}
    under_way: Mapping[str, int] = {}
    runs: int = 0
    skipped: Mapping[str, int] = {}
    delayed: tuple[str, ...] = ()
    quarantined: int = 0
    findings: Mapping[str, Mapping[str, int]] = {}
    spent_usd: Usd = ZERO_USD


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two moments, and what needs a person now. Amounts are in dollars.

    `decided` lists only the newest decisions; `decided_count` counts all.
    """

    since: int
    until: int
    agents: tuple[AgentReport, ...] = ()
    spent_usd: Usd = ZERO_USD
    spent_by_purpose_usd: Mapping[str, Usd] = {}
    caps: tuple[CapLine, ...] = ()
    decided: tuple[DecisionRow, ...] = ()
    decided_count: int = 0
    waiting: tuple[ReportDecision, ...] = ()
    halts: tuple[HaltRow, ...] = ()
    undelivered: tuple[NotificationRow, ...] = ()
    ended_badly: tuple[str, ...] = ()
    needs_you: tuple[str, ...] = ()


async def read_report_rows(store: Store, since: int, until: int) -> ReportRows:
    params: Mapping[str, Any] = {"since": since}
    return ReportRows(
        **msgspec.structs.asdict(await read_need_rows(store, until, since)),
        since=since,
        happened=await store.ask(Query("triggered_since", TriggerEventRow, params)),
        findings=await store.ask(Query("findings_since", FindingRow, params)),
        spent=await store.ask(Query("spent_by_purpose", ReportSpending, params)),
        decided=await store.ask(Query("decided_since", DecisionRow, params)),
    )


def build_report(rows: ReportRows) -> Report:
    """Fold the rows into a report. It depends on the rows alone."""
    micros_by_purpose: Counter[str] = Counter()
    for line in rows.spent:
        micros_by_purpose[line.purpose] += line.usd
    caps = tuple(list_caps(rows.budgets, rows.until))
    names = msgspec.structs.fields(ReportDecision)
    waiting = tuple(
        ReportDecision(**{field.name: getattr(decision, field.name) for field in names})
        for decision in rows.waiting
        if decision.expires_at > rows.until
    )
    return Report(
        since=rows.since,
        until=rows.until,
        agents=tuple(_agents(rows)),
        spent_usd=micros_to_usd(micros_by_purpose.total()),
        spent_by_purpose_usd={purpose: micros_to_usd(micros) for purpose, micros in micros_by_purpose.most_common()},
        caps=caps,
        decided=tuple(rows.decided[-MAX_REPORT_LINES:]),
        decided_count=len(rows.decided),
        waiting=waiting,
        halts=tuple(row for row in rows.halts if row.halted or row.at >= rows.since),
        undelivered=tuple(row for row in rows.undelivered if row.queued_at >= rows.since),
        ended_badly=tuple(_truncate_lines(list(_list_failures(rows)))),
        needs_you=tuple(_truncate_lines([need.line for need in list_needs(rows)])),
    )


def _truncate_lines(sentences: Sequence[str]) -> Iterable[str]:
    yield from sentences[:MAX_REPORT_LINES]
    if len(sentences) > MAX_REPORT_LINES:
        yield f"and {len(sentences) - MAX_REPORT_LINES:,} more."


def _agents(rows: ReportRows) -> Iterable[AgentReport]:
    sessions, runs = _group_by_agent(rows), _runs(rows.happened)
    findings: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows.findings:
        findings[row.agent][row.severity][describe_review(row.review)] += 1
    micros_by_agent: Counter[str] = Counter()
    for line in rows.spent:
        micros_by_agent[line.agent] += line.usd
    for name in sorted({*sessions, *runs, *findings, *micros_by_agent}):
        session_counts = _sessions(sessions.get(name, ()), rows.since)
        yield msgspec.structs.replace(
            runs.get(name, AgentReport(agent=name)),
            **session_counts,
            findings={severity: dict(counts) for severity, counts in findings.get(name, {}).items()},
            spent_usd=micros_to_usd(micros_by_agent[name]),
        )


def _group_by_agent(report_rows: ReportRows) -> Mapping[str, Sequence[SessionRow]]:
    """Group sessions by agent. An idle chat that was started before the period is left out."""
    rows_by_agent: dict[str, list[SessionRow]] = defaultdict(list)
    for row in report_rows.sessions:
        if row.unattended or row.ended_at is not None or row.started_at >= report_rows.since:
            rows_by_agent[row.agent].append(row)
    return rows_by_agent


def _sessions(rows: Sequence[SessionRow], since: int) -> dict[str, Any]:
    ended_counts = Counter(f"{row.state}, {row.terminal_reason}" for row in rows if row.ended_at is not None)
    open_counts = Counter[str](row.shown_state for row in rows if row.ended_at is None)
    return {
        "began": sum(row.started_at >= since for row in rows),
        "ended": dict(ended_counts.most_common()),
        "under_way": dict(open_counts.most_common()),
    }


def _runs(event_rows: Sequence[TriggerEventRow]) -> Mapping[str, AgentReport]:
    report_by_agent: dict[str, AgentReport] = {}
    for event_row in event_rows:
        agent = event_row.stream.removeprefix("trigger:").partition("/")[0]
        report_by_agent[agent] = _add_run(report_by_agent.get(agent, AgentReport(agent=agent)), event_row)
    return report_by_agent


def _add_run(so_far: AgentReport, event_row: TriggerEventRow) -> AgentReport:
    match decode(event_row.kind, event_row.version, event_row.facts):
        case RunStarted():
            return msgspec.structs.replace(so_far, runs=so_far.runs + 1)
        case RunSkipped() as event:
            skip_counts = {**so_far.skipped, event.why: so_far.skipped.get(event.why, 0) + event.count}
            return msgspec.structs.replace(so_far, skipped=skip_counts)
        case RunsDelayed() as event:
            delay = f"{event.trigger} ({event.why}): {event.sentence}"
            return msgspec.structs.replace(so_far, delayed=tuple(dict.fromkeys((*so_far.delayed, delay))))
        case ItemQuarantined():
            return msgspec.structs.replace(so_far, quarantined=so_far.quarantined + 1)
        case _:
            return so_far


def _list_failures(rows: ReportRows) -> Iterable[str]:
    for row in rows.sessions:
        if row.ended_at is not None and row.ended_at >= rows.since and row.state != "COMPLETED":
            yield f"{row.session}: {row.state}, {row.terminal_reason}{_find_successor(row, rows.sessions)}"


def _find_successor(row: SessionRow, sessions: Sequence[SessionRow]) -> str:
    """Describe the session that followed one which reached its cap."""
    if row.kind != "autonomous" or row.state != "BUDGET_EXCEEDED":
        return ""
    same_kind = [candidate for candidate in sessions if (candidate.agent, candidate.kind) == (row.agent, row.kind)]
    successors = [
        candidate
        for candidate in same_kind
        if candidate.started_at >= (row.ended_at or 0) and candidate.session != row.session
    ]
    return f"; {min(successors, key=lambda candidate: candidate.started_at).session} continued" if successors else ""


MAX_REPORT_MESSAGE: Final = 1500
MAX_REPORT_LINE: Final = 200
"""A long line must not crowd out the others."""
REPORT_TRUNCATED: Final = "…and more. Run halter report for the full report."


class ReportMessage(NamedTuple):
    subject: str
    text: str


def render_report_message(report: Report) -> ReportMessage:
    sessions = sum(agent.began for agent in report.agents)
    sessions_text = "1 session" if sessions == 1 else f"{sessions} sessions"
    needs_text = describe_need_count(len(report.needs_you), "thing")
    period = format_duration(report.until - report.since)
    subject = f"Halter: {needs_text}; {sessions_text} and {format_usd(report.spent_usd)} in {period}"
    return ReportMessage(subject, _fit_lines(_line(line) for line in _lines(report)))


def queue_report(agent: str, channel: str, message: ReportMessage, key: str) -> Write:
    """Queue a report for a channel of an agent. The process that runs the agent sends it."""
    event = NotificationQueued(
        notification=name_by_parts("n", key, channel), channel=channel, agent=agent, about="report"
    )
    body = NotificationContent(subject=message.subject, text=message.text).body()
    return Write(OUTBOX, f"report/{key}", lambda _: [Draft(event, body)], rows_of_event(event))


def _line(text: str) -> str:
    return shorten(" ".join(clean(text).split()), MAX_REPORT_LINE)


def _fit_lines(lines: Iterable[str]) -> str:
    fitting_lines: list[str] = []
    capacity = MAX_REPORT_MESSAGE - len(REPORT_TRUNCATED) - 1
    for line in lines:
        capacity -= len(line) + 1
        if capacity < 0:
            return "\n".join((*fitting_lines, REPORT_TRUNCATED))
        fitting_lines.append(line)
    return "\n".join(fitting_lines)


def _lines(report: Report) -> Iterable[str]:
    yield "Needs you:" if report.needs_you else "Nothing needs you."
    yield from (f"- {sentence}" for sentence in report.needs_you)
    for sentence in report.ended_badly:
        yield f"Ended: {sentence}"
    for agent in report.agents:
        yield _agent_line(agent)
    by_purpose = {purpose: format_usd(amount) for purpose, amount in report.spent_by_purpose_usd.items()}
    yield f"Spent: {format_usd(report.spent_usd)}{_list_lines(by_purpose)}"
    for cap in report.caps:
        if cap.cap_usd is not None:
            yield f"Cap of {cap.scope} {cap.window}: {format_share(cap.spent_usd, cap.cap_usd)}"
    if report.decided:
        yield f"Decided: {report.decided_count:,}"


def _agent_line(agent: AgentReport) -> str:
    finding_counts = {severity: sum(counts.values()) for severity, counts in agent.findings.items()}
    clauses = [
        f"{agent.began} began{_list_lines(agent.ended)}",
        f"{agent.runs} runs" if agent.runs else "",
        f"skipped{_list_lines(agent.skipped)}" if agent.skipped else "",
        "; ".join(agent.delayed),
        f"{agent.quarantined} quarantined" if agent.quarantined else "",
        f"findings{_list_lines(finding_counts)}" if finding_counts else "",
        format_usd(agent.spent_usd),
    ]
    return f"{agent.agent}: {', '.join(clause for clause in clauses if clause)}"


def _list_lines(counts: Mapping[str, object]) -> str:
    sentence = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f" ({sentence})" if sentence else ""

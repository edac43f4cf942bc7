"""What happened lately, in facts and tables."""

from collections.abc import Mapping
from decimal import Decimal

from halter.app.report import AgentReport, Report
from halter.app.words.moments import written
from halter.app.words.sheet import Facts, Listing, Sheet
from halter.core.money import shown_usd


def title(made: Report) -> str:
    """Name the time that a report is about."""
    return f"From {written(made.since)} to {written(made.until)}"


def sheet_of(made: Report) -> Sheet:
    """Put a report into facts and tables; what needs somebody comes first."""
    return [
        Listing("Needs you", ["what"], [[one] for one in made.needs_you], long="what", empty="Nothing needs you."),
        Facts(title(made), _summary(made)),
        agents_of(made),
        Listing("Did not end well", ["session"], [[one] for one in made.ended_badly], long="session"),
        _caps(made),
        _decided(made),
        _halts(made),
        _undelivered(made),
    ]


def _summary(made: Report) -> list[tuple[str, str]]:
    return [
        ("spent", f"{shown_usd(made.spent_usd)}{_by_purpose(made.spent_by_purpose_usd)}"),
        ("waiting", str(len(made.waiting)) if made.waiting else ""),
        ("decided", f"{made.decided_count:,}" if made.decided else ""),
    ]


def _by_purpose(spent: Mapping[str, Decimal]) -> str:
    return ": " + ", ".join(f"{purpose} {shown_usd(usd)}" for purpose, usd in spent.items()) if spent else ""


def agents_of(made: Report) -> Listing:
    """Tell what each agent did."""
    columns = ["agent", "began", "ended", "under way", "runs", "not run", "findings", "spent"]
    rows = [_agent(agent) for agent in made.agents]
    long = "agent ended findings"
    return Listing("Agents", columns, rows, right="began runs spent", long=long, empty="No agent did anything.")


def _agent(agent: AgentReport) -> list[str]:
    not_run = [_counts(agent.skipped), *agent.delayed]
    if agent.quarantined:
        not_run.append(f"quarantined {agent.quarantined}")
    findings = [f"{severity}: {_counts(reviews)}" for severity, reviews in agent.findings.items()]
    return [
        agent.agent,
        str(agent.began),
        _counts(agent.ended),
        _counts(agent.under_way),
        str(agent.runs),
        "; ".join(part for part in not_run if part),
        "; ".join(findings),
        shown_usd(agent.spent_usd),
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} × {number}" if number > 1 else name for name, number in counts.items())


def _caps(made: Report) -> Listing:
    rows = [
        [
            cap.scope,
            cap.window or "its life",
            "none" if cap.cap_usd is None else shown_usd(cap.cap_usd),
            shown_usd(cap.spent_usd),
            shown_usd(cap.held_usd),
            f"{cap.percent} %" if cap.cap_usd else "",
        ]
        for cap in made.caps
    ]
    columns = ["scope", "window", "cap", "spent", "held", "used"]
    return Listing("Against caps", columns, rows, right="cap spent held used", long="scope window")


def _decided(made: Report) -> Listing:
    rows = [
        [written(one.decided_at or 0), one.agent, f"{one.about} of {one.name}", one.verdict, one.by]
        for one in made.decided
    ]
    return Listing("Decided", ["when", "agent", "about", "answer", "by"], rows, long="about")


def _halts(made: Report) -> Listing:
    rows = [
        [one.scope, "halted" if one.halted else "lifted", written(one.at), one.by, one.reason] for one in made.halts
    ]
    return Listing("Halts", ["scope", "state", "when", "by", "reason"], rows, long="scope reason")


def _undelivered(made: Report) -> Listing:
    rows = [
        [
            one.notification,
            one.agent,
            one.channel,
            str(one.attempts),
            "given up" if one.gave_up else "tried again",
            one.error,
        ]
        for one in made.undelivered
    ]
    columns = ["notification", "agent", "channel", "attempts", "now", "error"]
    return Listing("Could not be told", columns, rows, right="attempts", long="notification error")

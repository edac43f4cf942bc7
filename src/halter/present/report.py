"""Sheets for a report and the status of the fleet, and descriptions of workers."""

from collections.abc import Mapping
from typing import Final

from halter.core.clock import SECOND, format_duration
from halter.core.money import format_share, format_usd
from halter.core.text import describe_need_count, format_count
from halter.operations.fleet import Health, WorkerView
from halter.operations.report import AgentReport, Report
from halter.operations.status import AgentPlace, AgentStatus, FleetStatus, describe_unhealthy
from halter.present.moments import format_moment
from halter.present.receipt import format_purposes
from halter.present.sheet import Facts, Listing, Sheet
from halter.present.tables import build_need_facts


def format_report_title(report: Report) -> str:
    return f"From {format_moment(report.since)} to {format_moment(report.until)}"


def build_report_sheet(report: Report) -> Sheet:
    """Build the sheet of a report; needs come first."""
    summary = [
        ("spent", f"{format_usd(report.spent_usd)}{format_purposes(report.spent_by_purpose_usd)}"),
        ("waiting", str(len(report.waiting)) if report.waiting else ""),
        ("decided", f"{report.decided_count:,}" if report.decided else ""),
    ]
    return [
        Listing("Needs you", ["what"], [[one] for one in report.needs_you], long="what", empty="Nothing needs you."),
        Facts(format_report_title(report), summary),
        build_agents_table(report),
        Listing("Did not end well", ["session"], [[one] for one in report.ended_badly], long="session"),
        *_details(report),
    ]


def build_agents_table(report: Report) -> Listing:
    columns = ["agent", "began", "ended", "active", "runs", "not run", "findings", "spent"]
    rows = [_agent(agent) for agent in report.agents]
    long = "agent ended findings"
    return Listing("Agents", columns, rows, right="began runs spent", long=long, empty="No agent was active.")


def _agent(agent: AgentReport) -> list[str]:
    not_run = [_format_counts(agent.skipped), *agent.delayed]
    if agent.quarantined:
        not_run.append(f"quarantined {agent.quarantined}")
    findings = [f"{severity}: {_format_counts(reviews)}" for severity, reviews in agent.findings.items()]
    return [
        agent.agent,
        str(agent.began),
        _format_counts({_describe_state(name): number for name, number in agent.ended.items()}),
        _format_counts({_describe_state(name): number for name, number in agent.under_way.items()}),
        str(agent.runs),
        "; ".join(part for part in not_run if part),
        "; ".join(findings),
        format_usd(agent.spent_usd),
    ]


def _describe_state(name: str) -> str:
    """Format a state for people, with its reason if that adds anything."""
    state, _, reason = name.lower().replace("_", " ").partition(", ")
    return state if reason in {"", state} else f"{state}, {reason}"


def _format_counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} × {number}" if number > 1 else name for name, number in counts.items())


def _details(report: Report) -> list[Listing]:
    caps = [
        [
            cap.scope,
            cap.window or "whole life",
            "none" if cap.cap_usd is None else format_usd(cap.cap_usd),
            format_usd(cap.spent_usd),
            format_usd(cap.held_usd),
            f"{cap.percent} %" if cap.cap_usd else "",
        ]
        for cap in report.caps
    ]
    decision_rows = [
        [
            format_moment(decision.decided_at or 0),
            decision.agent,
            f"{decision.about} of {decision.name}",
            decision.verdict,
            decision.by,
        ]
        for decision in report.decided
    ]
    halts = [
        [halt.scope, "halted" if halt.halted else "lifted", format_moment(halt.at), halt.by, halt.reason]
        for halt in report.halts
    ]
    undelivered_rows = [
        [
            notice.notification,
            notice.agent,
            notice.channel,
            str(notice.attempts),
            "given up" if notice.gave_up else "retrying",
            notice.error,
        ]
        for notice in report.undelivered
    ]
    cap_columns, undelivered_columns = (
        ["scope", "window", "cap", "spent", "held", "used"],
        ["notification", "agent", "channel", "attempts"],
    )
    return [
        Listing("Against caps", cap_columns, caps, right="cap spent held used", long="scope window"),
        Listing("Decided", ["when", "agent", "about", "answer", "by"], decision_rows, long="about"),
        Listing("Halts", ["scope", "state", "when", "by", "reason"], halts, long="scope reason"),
        Listing(
            "Not delivered",
            [*undelivered_columns, "now", "error"],
            undelivered_rows,
            right="attempts",
            long="notification error",
        ),
    ]


NO_WORKERS: Final = "No process runs agents. Start `halter up FOLDER`, or `halter worker` on a PostgreSQL store."
HEALTH_MOODS: Final[Mapping[Health, str]] = {
    "alive": "good",
    "waits": "look",
    "draining": "look",
    "lapsed": "bad",
    "left": "dim",
}


def name_worker(worker: WorkerView) -> str:
    return f"halter {worker.kind} {worker.pid} on {worker.host}"


def describe_last_heartbeat(worker: WorkerView, now: int) -> str:
    return "" if worker.heard_at is None else f"{format_duration(max(0, now - worker.heard_at))} ago"


def agents_of_worker(worker: WorkerView) -> str:
    return ", ".join(f"{name} {version}".strip() for name, version in worker.agents.items())


def describe_load(worker: WorkerView) -> str:
    if not worker.alive:
        return ""
    stay = f", {worker.residents} stay" if worker.residents else ""
    return f"{worker.awake} of {worker.concurrency}{stay}"


def describe_worker_condition(worker: WorkerView, now: int) -> str:
    """Describe the problem of a worker and the remedy; "" without a problem."""
    match worker.health:
        case "lapsed":
            return (
                f"Lost: last heartbeat {describe_last_heartbeat(worker, now)}. Its sessions move to another worker "
                "with these agents. Restart it if there is none."
            )
        case "left":
            return "Ended normally."
        case "draining" | "waits" | "alive":
            sentences = (worker.problem or (_DRAINING if worker.closing else ""), describe_outdated_agents(worker))
            return " ".join(sentence for sentence in sentences if sentence)


_DRAINING: Final = "Takes no new sessions, and ends when its running turns have finished."


def describe_outdated_agents(worker: WorkerView) -> str:
    if not worker.waiting or worker.closing:
        return ""
    return (
        f"Another worker has newer files of {', '.join(worker.waiting)} and runs their sessions. Update this folder "
        "to the same version and restart it."
    )


def build_status_sheet(status: FleetStatus, now: int) -> Sheet:
    """Build the status of the fleet: a summary line, the agents, then the needs."""
    columns = ["agent", "runs", "waits for", "spent today", "next wake"]
    rows = [_status_row(agent, now) for agent in status.agents]
    agents = Listing("Agents", columns, rows, empty="No agent has run here yet.")
    count = len(status.needs_you)
    heading = [f"{count} {'needs' if count == 1 else 'need'} you:"] if count else []
    needs = [Facts("", build_need_facts(need, status.option)) for need in status.needs_you]
    return [_summarize_status(status), agents, *heading, *needs]


def _summarize_status(status: FleetStatus) -> str:
    count, alive_count = len(status.needs_you), sum(one.alive for one in status.agents)
    needs = describe_need_count(count).capitalize()
    spent_text = f"{format_share(status.spent_today_usd, status.cap_today_usd)} spent today"
    running = f"{alive_count} of {format_count(len(status.agents), 'agent')} running"
    return " · ".join(part for part in (describe_unhealthy(status), needs, spent_text, running) if part)


def _status_row(agent: AgentStatus, now: int) -> list[str]:
    caps = [
        f"{cap.window.partition('/')[0] or 'life'}: {format_share(cap.spent_usd, cap.cap_usd)}" for cap in agent.caps
    ]
    places = [_describe_place(place, now) for place in agent.places]
    next_wake = (
        "" if agent.next_at is None else "now" if agent.next_at <= now else f"in {format_duration(agent.next_at - now)}"
    )
    return [
        agent.agent,
        "\n".join(places) or ("off" if agent.on is False else "no"),
        agent.waits,
        "\n".join((format_share(agent.spent_today_usd, agent.cap_today_usd), *caps)),
        next_wake,
    ]


def _describe_place(place: AgentPlace, now: int) -> str:
    age = format_duration(max(0, now - place.heard_at) // SECOND * SECOND) if place.heard_at else "never"
    return f"{place.kind} {place.pid} on {place.host}, last heartbeat {age} ago"

"""`halter report`: what happened since yesterday, and what needs you."""

from collections.abc import Mapping
from typing import Annotated

import typer

from halter.app import App
from halter.app.report import AgentReport, Report, gather
from halter.app.report import report as report_of
from halter.app.report_message import message_of, send
from halter.app.words.moments import written
from halter.app.words.sheet import Facts, Listing, Sheet
from halter.cli.answer import answer_json, say
from halter.cli.command import WRONG_USE, JsonOption, StoreOption, duration, fail, readable, saying_errors, with_app
from halter.cli.export import write_private
from halter.cli.page import page
from halter.cli.sheet import show
from halter.core.money import shown
from halter.core.ports import Query
from halter.core.rows import AgentRow


def report(
    *,
    since: Annotated[str, typer.Option("--since", metavar="AGE", help="How far back, as in 24h.")] = "24h",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write it as a page, into one file.")] = "",
    message: Annotated[bool, typer.Option("--message", help="As a message: a subject, and a few lines.")] = False,
    send_over: Annotated[
        str, typer.Option("--send", metavar="AGENT/CHANNEL", help="Send the message over a channel of an agent.")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened since yesterday: sessions, runs, findings, money, decisions, halts; and what needs you.

    It is worked out from the journal, and no model is asked.
    """
    back = duration(since)
    agent, channel = _addressee(send_over)

    async def job(app: App) -> Report:
        now = app.clock.now()
        made = report_of(await gather(app.store, now - back, now))
        if send_over:
            await _demand_known(app, agent)
            await app.store.commit(send(agent, channel, message_of(made), app.ids.new()))
        return made

    made = with_app(store, job)
    if html:
        saying_errors(lambda: write_private(html, page(_title(made), sheet_of(made))))
    if as_json:
        answer_json(made)
    elif html:
        say(f"Wrote the report to {html}.")
    elif message:
        said = message_of(made)
        say(f"{said.subject}\n\n{said.text}")
    elif send_over:
        say(f"The report will be told over {channel} by whoever runs {agent}.")
    else:
        show(sheet_of(made))


def _addressee(send_over: str) -> tuple[str, str]:
    agent, _, channel = readable(send_over, "an agent's channel").partition("/")
    if send_over and not (agent and channel):
        fail(f"{send_over!r} names no channel: write AGENT/CHANNEL.", WRONG_USE)
    return agent, channel


async def _demand_known(app: App, agent: str) -> None:
    known = {row.agent for row in await app.store.ask(Query("all_agents", AgentRow))}
    if agent not in known:
        fail(
            f"There is no agent {agent!r} that runs by itself; there is {', '.join(sorted(known)) or 'none'}.",
            WRONG_USE,
        )


def _title(made: Report) -> str:
    return f"From {written(made.since)} to {written(made.until)}"


def sheet_of(made: Report) -> Sheet:
    """Put a report into facts and tables; what needs somebody comes first."""
    return [
        Listing("Needs you", ["what"], [[one] for one in made.needs_you], long="what", empty="Nothing needs you."),
        Facts(_title(made), _summary(made)),
        _agents(made),
        Listing("Did not end well", ["session"], [[one] for one in made.ended_badly], long="session"),
        _caps(made),
        _decided(made),
        _halts(made),
        _undelivered(made),
    ]


def _summary(made: Report) -> list[tuple[str, str]]:
    return [
        ("spent", f"{shown(made.spent_usd)}{_by_purpose(made.spent)}"),
        ("waiting", str(len(made.waiting)) if made.waiting else ""),
        ("decided", str(len(made.decided)) if made.decided else ""),
    ]


def _by_purpose(spent: Mapping[str, int]) -> str:
    return ": " + ", ".join(f"{purpose} {shown(usd)}" for purpose, usd in spent.items()) if spent else ""


def _agents(made: Report) -> Listing:
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
        shown(agent.spent_usd),
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} × {number}" if number > 1 else name for name, number in counts.items())


def _caps(made: Report) -> Listing:
    rows = [
        [
            cap.scope,
            cap.window or "its life",
            "none" if cap.cap is None else shown(cap.cap),
            shown(cap.spent),
            shown(cap.held),
            f"{cap.percent} %" if cap.cap else "",
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

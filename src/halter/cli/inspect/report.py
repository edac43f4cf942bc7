"""`halter report`: what happened in a period."""

from typing import Annotated

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    parse_typed_duration,
    report_errors,
    require_readable_name,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.files import write_private
from halter.cli.output import answer_json, print_sentence
from halter.core.ports import Query
from halter.core.rows import AgentRow
from halter.operations.report import Report, build_report, queue_report, read_report_rows, render_report_message
from halter.present.report import build_report_sheet, format_report_title
from halter.present.sheet import render_html_page
from halter.runtime.runtime import Runtime


def report(
    *,
    since: Annotated[
        str, typer.Option("--since", metavar="AGE", help="Age of the oldest events, such as 24h.")
    ] = "24h",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write an HTML page to a file.")] = "",
    message: Annotated[
        bool, typer.Option("--message", help="Print a short message: a subject and a few lines.")
    ] = False,
    addressee: Annotated[
        str,
        typer.Option("--send", metavar="AGENT/CHANNEL", help="Send the message over an agent's channel."),
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report the last day: sessions, runs, findings, spending, decisions, halts, and what needs you.

    The report is computed from the journal, without a model.
    """
    age = parse_typed_duration(since)
    agent, channel = _parse_addressee(addressee)

    async def job(app: Runtime) -> Report:
        now = app.clock.now()
        fleet_report = build_report(await read_report_rows(app.store, now - age, now))
        if addressee:
            await _require_known_agent(app, agent)
            await app.store.commit(queue_report(agent, channel, render_report_message(fleet_report), app.ids.make()))
        return fleet_report

    fleet_report = run_with_app(store, job, despite_doubt=True, allow_missing=not addressee)
    if html:
        page = render_html_page(format_report_title(fleet_report), build_report_sheet(fleet_report))
        report_errors(lambda: write_private(html, page))
    if as_json:
        answer_json(fleet_report)
    elif html:
        print_sentence(f"Wrote the report to {html}.")
    elif message:
        report_message = render_report_message(fleet_report)
        print_sentence(f"{report_message.subject}\n\n{report_message.text}")
    elif addressee:
        print_sentence(f"The process that runs {agent} will send the report over {channel}.")
    else:
        show_sheet(build_report_sheet(fleet_report))


def _parse_addressee(text: str) -> tuple[str, str]:
    agent, _, channel = require_readable_name(text, "channel").partition("/")
    if text and not (agent and channel):
        fail(f"Invalid channel {text!r}. Use AGENT/CHANNEL.", EXIT_USAGE)
    return agent, channel


async def _require_known_agent(app: Runtime, agent: str) -> None:
    agent_names = sorted(row.agent for row in await app.store.ask(Query("all_agents", AgentRow)))
    if agent not in agent_names:
        names = ", ".join(agent_names) or "none"
        fail(f"There is no autonomous agent {agent!r}. Known agents: {names}.", EXIT_USAGE)

"""`halter report`: what happened since yesterday, and what needs you."""

from typing import Annotated

import typer

from halter.app import App
from halter.app.report import Report, gather
from halter.app.report import report as report_of
from halter.app.report_message import message_of, send
from halter.app.words.report import sheet_of, title
from halter.cli.answer import answer_json, say
from halter.cli.command import WRONG_USE, JsonOption, StoreOption, duration, fail, readable, saying_errors, with_app
from halter.cli.export import write_private
from halter.cli.page import page
from halter.cli.sheet import show
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

    made = with_app(store, job, despite_doubt=True)
    if html:
        saying_errors(lambda: write_private(html, page(title(made), sheet_of(made))))
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

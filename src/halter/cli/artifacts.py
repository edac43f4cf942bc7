"""`halter status`, `report`, `findings` and `proposals`: the state of agents, and the results of sessions."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.cli.audit import write_private
from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    YesOption,
    command,
    fail,
    group,
    make_desk,
    parse_typed_duration,
    report_errors,
    require_person,
    require_readable_name,
    run_with_app,
    show_sheet,
    to_json,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence
from halter.cli.terminal import confirm
from halter.core.errors import NotDone
from halter.core.ports import Query
from halter.core.rows import AgentRow
from halter.operations import artifacts
from halter.operations.report import Report, build_report, queue_report, read_report_rows, render_report_message
from halter.operations.status import read_status
from halter.present.report import build_report_sheet, build_status_sheet, format_report_title
from halter.present.sheet import render_html_page
from halter.present.tables import build_artifacts_sheet
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.top import FleetView
    from halter.top.source import OperationSource

_show_status = command(read_status, "", build_status_sheet, despite_doubt=True, allow_missing=True)

TOKEN_VARIABLE: Final = "HALTER_TOKEN"  # noqa: S105 - the name of a variable
SERVER_TIMEOUT_SECONDS: Final = 10
ServerOption = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", help=f"Watch a server instead of a store, with the token in ${TOKEN_VARIABLE}."
    ),
]
OnceOption = Annotated[bool, typer.Option("--once", help="Print the live view once and exit.")]


def status(
    *,
    live: Annotated[
        bool, typer.Option("--live", help="Watch and control the fleet in a live terminal until you quit.")
    ] = False,
    once: OnceOption = False,
    server: ServerOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of all agents: where each runs, what it waits for, its spending and caps, and its next wake.

    Below the agents is everything that needs you, with the commands that answer it, as in `halter inbox`.

    With --live, watch sessions and their spending, what needs you, caps and workers. Answer a decision with y, n or e;
    type a scope to halt it. With --live --once, print the view for a pipe or a script.
    """
    if live:
        top(once=once, server=server, store=store, as_json=as_json)
    elif once or server:
        fail("--once and --server require --live.", EXIT_USAGE)
    else:
        _show_status(store=store, as_json=as_json)


def top(
    *, once: OnceOption = False, server: ServerOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Watch and control the fleet in a live terminal: sessions and their spending, what needs you, caps, workers.

    Answer a decision with y, n or e; type a scope to halt it. With --once, print the view for a pipe or a script.
    """
    if as_json and not once:
        fail("--json requires --once.", EXIT_USAGE)
    if server and store is not None:
        fail("--server cannot be combined with --store.", EXIT_USAGE)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("Not a terminal. Pass --once to print the view.", EXIT_USAGE)
    if server:
        view = report_errors(lambda: asyncio.run(_watch_server(server, once=once)))
    else:
        view = run_with_app(
            store,
            lambda app: _watch_store(app, store, once=once),
            despite_doubt=True,
            allow_missing=True,
            until_interrupted=not once,
        )
    if view is not None and as_json:
        answer_json(view)
    elif view is not None:
        from halter.top.rows import build_top_sheet

        show_sheet(build_top_sheet(view))


async def _watch_store(app: Runtime, store: str | None, *, once: bool) -> "FleetView | None":
    from halter.top.source import StoreSource

    return await _watch(StoreSource(make_desk(app, store)), once=once)


async def _watch_server(url: str, *, once: bool) -> "FleetView | None":
    from halter.net.client import HttpClient
    from halter.net.httpx_transport import HttpxTerms, HttpxTransport
    from halter.top.source import ServerSource, check_server

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise NotDone(f"${TOKEN_VARIABLE} is not set. Set it to a token from `halter tokens add`.", "wrong")
    check_server(url, token)
    terms = HttpxTerms(SERVER_TIMEOUT_SECONDS, SERVER_TIMEOUT_SECONDS, uses_environment=True)
    async with HttpClient(HttpxTransport(terms)) as client:
        return await _watch(ServerSource(url, token, client), once=once)


async def _watch(source: "OperationSource", *, once: bool) -> "FleetView | None":
    """Return the view with `once`; otherwise run the live terminal and return None."""
    if once:
        return await source.call("top")
    from halter.top.app import TopApp

    await TopApp(source).run_async()
    return None


def promote(
    proposal: Annotated[str, typer.Argument(metavar="ID", help="Id or prefix of the proposal.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Agent folder.")],
    *,
    yes: YesOption = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a proposal to the agent's AGENTS.md, which all of its sessions read. Shows the file and asks first.

    The proposal is recorded as promoted, with your name and reason. The rest of the file is kept.
    """
    if as_json and not yes:
        fail("--json cannot ask for confirmation. Review the proposal, then pass --yes.", EXIT_USAGE)

    async def job(app: Runtime) -> artifacts.ArtifactSettled:
        from halter.operations.artifacts import promote_into

        require_person(app, "promote a proposal")
        artifact = await artifacts.resolve_artifact(make_desk(app), proposal, "proposals")
        text = artifacts.render_context_file(folder, artifact)
        if not yes:
            print_sentence(f"{folder / artifacts.CONTEXT_FILE} would contain:\n\n{text}", at_once=True)
            if not confirm("Write this file?"):
                fail("Nothing was written.", EXIT_FAILED)
        return await promote_into(make_desk(app), artifact, folder, reason)

    result = run_with_app(store, job)
    if as_json:
        answer_json(to_json(result))
    else:
        print_sentence(result.sentence)


proposals = group(
    "List proposals of agents; accept, dismiss or promote one.",
    {
        "list": command(
            artifacts.proposals,
            """List proposed memories and precedents, the newest first, with their status.

            Sessions see a proposal only after a person accepts it.
            """,
            lambda found, _: build_artifacts_sheet(found, "No agent has made a proposal yet."),
            despite_doubt=True,
            allow_missing=True,
        ),
        "accept": command(
            artifacts.settle_proposal,
            """Accept a proposal. Future sessions of its agent see it.

            Sessions see the newest accepted proposals, as far as they fit; `promote` makes one permanent.
            """,
            fixed_values={"status": "kept"},
        ),
        "dismiss": command(
            artifacts.settle_proposal,
            """Dismiss a proposal. No session sees it.

            It stays in the list as dismissed, with your name and reason.
            """,
            fixed_values={"status": "dismissed"},
        ),
        "promote": promote,
    },
    former_names={"keep": "accept"},
)

findings = group(
    "List findings of sessions; accept or dismiss one.",
    {
        "list": command(
            artifacts.findings,
            """List findings, the newest first, with the result of their checks.

            A quote is checked against its document. If the agent has judges, a judge other than the author reviews the
            finding.
            """,
            lambda found, _: build_artifacts_sheet(found, "No findings yet."),
            despite_doubt=True,
            allow_missing=True,
        ),
        "accept": command(
            artifacts.settle_finding,
            """Accept a finding.

            It stays in the list as accepted, with your name and reason.
            """,
            fixed_values={"status": "kept"},
        ),
        "dismiss": command(
            artifacts.settle_finding,
            """Dismiss a finding.

            It stays in the list as dismissed, with your name and reason; nothing is deleted.
            """,
            fixed_values={"status": "dismissed"},
        ),
    },
    former_names={"keep": "accept"},
)


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

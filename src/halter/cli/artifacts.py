"""`halter status`, `top`, `report`, `findings`, `proposals`: what stands, what happened, what sessions left behind."""

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
from halter.operations import status as statuses
from halter.operations.report import Report, build_report, queue_report, read_report_rows, render_report_message
from halter.present.report import build_report_sheet, build_status_sheet, format_report_title
from halter.present.sheet import render_html_page
from halter.present.tables import build_artifacts_sheet
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.top import FleetView
    from halter.top.source import OperationSource

status = command(
    statuses.status,
    """Show all agents at a glance: where each runs, what it waits for, what it spent of its caps, when it wakes next.

    Below them is everything that needs you, with the commands that answer it, as in `halter inbox`.
    """,
    build_status_sheet,
    look=True,
    fresh=True,
)


TOKEN_VARIABLE: Final = "HALTER_TOKEN"  # noqa: S105 - the name of a variable
SERVER_TIMEOUT_SECONDS: Final = 10
ServerOption = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", help=f"Look at a server instead of a store, with the token in ${TOKEN_VARIABLE}."
    ),
]
OnceOption = Annotated[bool, typer.Option("--once", help="Print it once, and end.")]


def top(
    *, once: OnceOption = False, server: ServerOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Watch and steer the fleet in a live terminal: sessions and their spending, what needs you, caps, workers.

    Answer what waits with y, n or e; halt by typing what to halt. With --once it is printed, for a pipe or a script.
    """
    if as_json and not once:
        fail("--json prints the view once: pass --once as well.", EXIT_USAGE)
    if server and store is not None:
        fail("--server and --store name two places to look at: pass one of them.", EXIT_USAGE)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("This is no terminal: pass --once to print the view.", EXIT_USAGE)
    if server:
        view = report_errors(lambda: asyncio.run(_watch_server(server, once=once)))
    else:
        view = run_with_app(
            store, lambda app: _watch_store(app, store, once=once), despite_doubt=True, fresh=True, following=not once
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
    import httpx2

    from halter.top.source import ServerSource, check_server

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise NotDone(f"${TOKEN_VARIABLE} is not set: put a token there, from `halter tokens add`.", "wrong")
    check_server(url, token)
    async with httpx2.AsyncClient(timeout=SERVER_TIMEOUT_SECONDS) as client:
        return await _watch(ServerSource(url, token, client), once=once)


async def _watch(source: "OperationSource", *, once: bool) -> "FleetView | None":
    """Give the view once, or none after a person has watched it."""
    if once:
        return await source.call("top")
    from halter.top.app import TopApp

    await TopApp(source).run_async()
    return None


def promote(
    proposal: Annotated[str, typer.Argument(metavar="ID", help="Its id, or the beginning.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder.")],
    *,
    yes: YesOption = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a proposal into the agent's AGENTS.md, which all of its sessions read. Shows the file and asks first.

    The proposal is recorded as promoted, with your name and reason. The rest of the file is kept.
    """
    if as_json and not yes:
        fail("--json asks no questions: review the proposal, then pass --yes.", EXIT_USAGE)

    async def job(app: Runtime) -> artifacts.ArtifactSettled:
        from halter.operations.agents import promote_into

        require_person(app, "promote anything")
        artifact = await artifacts.resolve_artifact(make_desk(app), proposal, "proposals")
        text = artifacts.render_context_file(folder, artifact)
        if not yes:
            print_sentence(f"{folder / artifacts.CONTEXT_FILE} would say:\n\n{text}", at_once=True)
            if not confirm("Write it so?"):
                fail("Nothing was written.", EXIT_FAILED)
        return await promote_into(make_desk(app), artifact, folder, reason)

    done = run_with_app(store, job)
    if as_json:
        answer_json(to_json(done))
    else:
        print_sentence(done.sentence)


proposals = group(
    "Show what agents want remembered; keep or dismiss it.",
    {
        "list": command(
            artifacts.proposals,
            """List proposed memories and precedents, the newest first, with their status.

            Sessions see a proposal only after a person keeps it.
            """,
            lambda found, _: build_artifacts_sheet(found, "No agent has proposed anything yet."),
            look=True,
            fresh=True,
        ),
        "keep": command(
            artifacts.settle_proposal,
            """Keep a proposal: later sessions of its agent see it.

            Sessions see the newest kept proposals, as far as they fit; `promote` makes one permanent.
            """,
            values={"status": "kept"},
        ),
        "dismiss": command(
            artifacts.settle_proposal,
            """Dismiss a proposal: no session sees it.

            It stays in the list as dismissed, with your name and reason.
            """,
            values={"status": "dismissed"},
        ),
        "promote": promote,
    },
)

findings = group(
    "Show what sessions found; keep or dismiss it.",
    {
        "list": command(
            artifacts.findings,
            """List findings, the newest first, with the result of their checks.

            A quote is looked up in its document. Where the agent has judges, a judge other than the author reviews the
            finding.
            """,
            lambda found, _: build_artifacts_sheet(found, "No findings yet."),
            look=True,
            fresh=True,
        ),
        "keep": command(
            artifacts.settle_finding,
            """Keep a finding.

            It stays in the list as kept, with your name and reason.
            """,
            values={"status": "kept"},
        ),
        "dismiss": command(
            artifacts.settle_finding,
            """Dismiss a finding.

            It stays in the list as dismissed, with your name and reason; nothing is deleted.
            """,
            values={"status": "dismissed"},
        ),
    },
)


def report(
    *,
    since: Annotated[str, typer.Option("--since", metavar="AGE", help="How far back, as in 24h.")] = "24h",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write an HTML page to a file.")] = "",
    message: Annotated[bool, typer.Option("--message", help="Print a message: a subject and a few lines.")] = False,
    send_over: Annotated[
        str,
        typer.Option("--send", metavar="AGENT/CHANNEL", help="Send the message over an agent's channel."),
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report what happened since yesterday: sessions, runs, findings, money, decisions, halts; and what needs you.

    The report is computed from the journal, without a model.
    """
    back = parse_typed_duration(since)
    agent, channel = _parse_addressee(send_over)

    async def job(app: Runtime) -> Report:
        now = app.clock.now()
        made = build_report(await read_report_rows(app.store, now - back, now))
        if send_over:
            await _require_known_agent(app, agent)
            await app.store.commit(queue_report(agent, channel, render_report_message(made), app.ids.make()))
        return made

    made = run_with_app(store, job, despite_doubt=True, fresh=not send_over)
    if html:
        page = render_html_page(format_report_title(made), build_report_sheet(made))
        report_errors(lambda: write_private(html, page))
    if as_json:
        answer_json(made)
    elif html:
        print_sentence(f"Wrote the report to {html}.")
    elif message:
        said = render_report_message(made)
        print_sentence(f"{said.subject}\n\n{said.text}")
    elif send_over:
        print_sentence(f"The process that runs {agent} will send the report over {channel}.")
    else:
        show_sheet(build_report_sheet(made))


def _parse_addressee(send_over: str) -> tuple[str, str]:
    agent, _, channel = require_readable_name(send_over, "an agent's channel").partition("/")
    if send_over and not (agent and channel):
        fail(f"{send_over!r} names no channel: write AGENT/CHANNEL.", EXIT_USAGE)
    return agent, channel


async def _require_known_agent(app: Runtime, agent: str) -> None:
    known = sorted(row.agent for row in await app.store.ask(Query("all_agents", AgentRow)))
    if agent not in known:
        names = ", ".join(known) or "none"
        fail(f"There is no autonomous agent {agent!r}. Known agents: {names}.", EXIT_USAGE)

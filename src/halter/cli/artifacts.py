"""`halter findings`: what sessions found, and what a person makes of it.

`halter proposals`: what agents want remembered, and what a person makes of it.

`halter report`: what happened since yesterday, and what needs you.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halter.cli.audit import write_private
from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    demand_person,
    demand_readable_name,
    fail,
    find_session_by_prefix,
    make_desk,
    parse_typed_duration,
    render_html_page,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.commands import ListingGroup, PlainCommand
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_block, answer_done, answer_json, say
from halter.cli.terminal import confirm
from halter.core.effect_events import ProposalVerdict
from halter.core.ports import Query
from halter.core.rows import AgentRow
from halter.operations.queries import MOST
from halter.operations.report import Report, queue_report, read_report_rows, render_report_message
from halter.operations.report import build_report as report_of
from halter.present.events import format_moment
from halter.present.report import build_report_sheet, format_report_title
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.artifacts import Among, Artifact, Settled

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Its id; the beginning will do.")]


def build_proposals() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(
        name="proposals", cls=ListingGroup, help="Show what agents want remembered; keep or dismiss it."
    )
    for name, command in (
        ("list", show_proposals),
        ("keep", keep_proposal),
        ("dismiss", dismiss_proposal),
        ("promote", promote),
    ):
        group.command(name, cls=PlainCommand)(command)
    return group


def show_proposals(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List memories and precedents that agents propose, the newest first, with what became of them.

    No session is told of one before somebody has kept it.
    """
    from halter.operations.artifacts import proposals

    found = run_with_app(store, lambda app: proposals(make_desk(app)), despite_doubt=True)
    show_artifacts(found, "No agent has proposed anything yet.", as_json=as_json)


def show_artifacts(found: "Sequence[Artifact]", empty: str, *, as_json: bool) -> None:
    """Show what sessions left behind."""
    if as_json:
        answer_json(found)
        return
    if not found:
        say(empty)
    for left in found:
        answer_block("", _facts(left))


def _facts(left: "Artifact") -> list[tuple[str, str]]:
    checked = ", ".join(part for part in (left.severity, left.support, left.review) if part)
    return [
        (left.about, left.id),
        ("says", left.text),
        ("from", f"{left.agent}, session {left.session}, {format_moment(left.at)}"),
        ("seen", f"{left.observed_count} times" if left.observed_count > 1 else ""),
        ("checked", checked),
        ("status", f"{left.status} by {left.by}" if left.status else "open"),
    ]


def keep_proposal(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep it: later sessions of its agent are told of it.

    They are told of what was kept last, as far as it fits; `promote` lets all of them read it always.
    """
    settle_artifact_and_report(id, "kept", "proposals", reason, store, as_json=as_json)


def dismiss_proposal(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dismiss it: no session is told of it.

    It stays on the list as dismissed, with your name and reason.
    """
    settle_artifact_and_report(id, "dismissed", "proposals", reason, store, as_json=as_json)


def settle_artifact_and_report(
    wanted: str, status: ProposalVerdict, among: "Among", reason: str, store: str | None, *, as_json: bool
) -> None:
    """Let a person say what becomes of something."""
    from halter.operations import artifacts

    done = run_with_app(store, lambda app: artifacts.settle(make_desk(app), wanted, status, among, reason))
    answer_done(done, as_json=as_json)


def promote(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write it into the agent's own AGENTS.md, which all of its sessions read. It is shown and asked about first.

    It is settled as promoted, with your name and reason. What stands in the file already is kept.
    """
    if as_json and not yes:
        fail("Nobody can be asked here: add --yes, if you have looked at it.", EXIT_USAGE)

    async def job(app: Runtime) -> "Settled":
        from halter.operations import artifacts
        from halter.operations.agents import promote_into
        from halter.operations.artifacts import left_meant

        demand_person(app, "promote anything")
        left = await left_meant(make_desk(app), id, "proposals")
        text = artifacts.render_context_file(folder, left)
        if not yes:
            say(f"{folder / artifacts.CONTEXT_FILE} would say:\n\n{text}", at_once=True)
            if not confirm("Write it so?"):
                fail("Nothing was written.", EXIT_FAILED)
        return await promote_into(make_desk(app), left, folder, reason)

    answer_done(run_with_app(store, job), as_json=as_json)


def build_findings() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="findings", cls=ListingGroup, help="Show what sessions found; keep or dismiss it.")
    for name, command in (("list", show_findings), ("keep", keep_finding), ("dismiss", dismiss_finding)):
        group.command(name, cls=PlainCommand)(command)
    return group


def show_findings(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Only those of this session.")] = "",
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MOST, help="How many of the newest.")] = 50,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what sessions found, the newest first, with what was checked of it.

    A quote was looked for in its document, and where the agent has judges, somebody else than its author looked at
    it.
    """

    async def job(app: Runtime) -> "Sequence[Artifact]":
        from halter.operations.artifacts import findings

        wanted = (await find_session_by_prefix(app, session)).session if session else ""
        return await findings(make_desk(app), wanted, limit)

    show_artifacts(run_with_app(store, job, despite_doubt=True), "Nothing was found yet.", as_json=as_json)


def keep_finding(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep it.

    It stays on the list as kept, with your name and reason.
    """
    settle_artifact_and_report(id, "kept", "findings", reason, store, as_json=as_json)


def dismiss_finding(
    id: IdArgument,  # noqa: A002 It is the word for it everywhere.
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Dismiss it.

    It stays on the list as dismissed, with your name and reason; nothing is deleted.
    """
    settle_artifact_and_report(id, "dismissed", "findings", reason, store, as_json=as_json)


def report(
    *,
    since: Annotated[str, typer.Option("--since", metavar="AGE", help="How far back, as in 24h.")] = "24h",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write it as a page, into one file.")] = "",
    message: Annotated[bool, typer.Option("--message", help="As a message: a subject, and a few lines.")] = False,
    send_over: Annotated[
        str,
        typer.Option("--send", metavar="AGENT/CHANNEL", help="Send the message over a channel of an agent."),
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened since yesterday: sessions, runs, findings, money, decisions, halts; and what needs you.

    It is worked out from the journal, and no model is asked.
    """
    back = parse_typed_duration(since)
    agent, channel = _parse_addressee(send_over)

    async def job(app: Runtime) -> Report:
        now = app.clock.now()
        made = report_of(await read_report_rows(app.store, now - back, now))
        if send_over:
            await _demand_known(app, agent)
            await app.store.commit(queue_report(agent, channel, render_report_message(made), app.ids.new()))
        return made

    made = run_with_app(store, job, despite_doubt=True)
    if html:
        report_errors(
            lambda: write_private(html, render_html_page(format_report_title(made), build_report_sheet(made)))
        )
    if as_json:
        answer_json(made)
    elif html:
        say(f"Wrote the report to {html}.")
    elif message:
        said = render_report_message(made)
        say(f"{said.subject}\n\n{said.text}")
    elif send_over:
        say(f"The report will be told over {channel} by whoever runs {agent}.")
    else:
        show_sheet(build_report_sheet(made))


def _parse_addressee(send_over: str) -> tuple[str, str]:
    agent, _, channel = demand_readable_name(send_over, "an agent's channel").partition("/")
    if send_over and not (agent and channel):
        fail(f"{send_over!r} names no channel: write AGENT/CHANNEL.", EXIT_USAGE)
    return agent, channel


async def _demand_known(app: Runtime, agent: str) -> None:
    known = {row.agent for row in await app.store.ask(Query("all_agents", AgentRow))}
    if agent not in known:
        fail(
            f"There is no agent {agent!r} that runs by itself; there is {', '.join(sorted(known)) or 'none'}.",
            EXIT_USAGE,
        )

"""`halter verify` and `halter erase`: looking for tampering, and letting go of what was said.

`halter store`: whether the store has all that its checkpoints know, and going on without what is missing.
"""

from typing import Annotated

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    demand_person,
    demand_readable_name,
    fail,
    make_desk,
    parse_typed_duration,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.commands import PlainCommand, PlainGroup
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, say, warn
from halter.cli.terminal import confirm, patience, share
from halter.core.text import format_count
from halter.journal.rebuild import IntegrityReport
from halter.journal.retention import Erasure
from halter.operations import journal as desk_journal
from halter.runtime.runtime import Runtime, find_continuity


def verify(
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
    repair: Annotated[
        bool, typer.Option("--rebuild", help="Afterwards make all tables anew from the events, if those are sound.")
    ] = False,
) -> None:
    """Look for any event that was edited, deleted, moved or repeated, and for tables that disagree with the events.

    Leaves with 1 if anything was found.
    """
    with patience("Verifying", quiet=as_json) as tell:

        def progress(done: int, total: int) -> None:
            tell(share(done, total, "streams"))

        report = run_with_app(
            store,
            lambda app: desk_journal.verify(make_desk(app), rebuild=repair, progress=progress),
            despite_doubt=True,
        )
    if as_json:
        answer_json(report)
    else:
        _print_report(report)
    if repair and not as_json:
        say(
            "All tables were made anew from the events." if report.rebuilt else "Nothing was rebuilt: see the findings."
        )
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


def _print_report(report: IntegrityReport) -> None:
    if report.findings:
        rows = [[found.kind, found.stream, str(found.seq or ""), found.sentence] for found in report.findings]
        answer_table("Not as it was written", ["finding", "stream", "event", "meaning"], rows, long="stream meaning")
    for note in report.notes:
        say(note)
    verdict = "Nothing was altered" if report.ok else format_count(len(report.findings), "finding")
    covered = "no checkpoints" if report.checkpoints is None else format_count(report.checkpoints, "checkpoint")
    say(
        f"{verdict}: {format_count(report.events, 'event')} in {format_count(report.streams, 'stream')}, "
        f"{report.erased:,} erased, "
        f"{report.uncovered_events:,} not covered by a checkpoint yet ({covered})."
    )


def erase(
    *,
    session: Annotated[
        list[str] | None, typer.Option("--session", metavar="ID", help="A session; may be given several times.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Sessions that ended so long ago, as in 90d.")
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="What was said outside of sessions, and questions that are answered.")
    ] = False,
    reason: ReasonOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase what was said in sessions that have ended, for good. What happened, and its chain, stay.

    It asks first, unless --yes is given. Leaves with 1 if a session could not be erased, such as one that still
    runs.
    """
    if (bool(session), bool(older_than), messages).count(True) != 1:
        fail("Name either sessions (--session ID), an age (--older-than 90d) or --messages.", EXIT_USAGE)
    age = parse_typed_duration(older_than) if older_than else 0
    for name in session or []:
        demand_readable_name(name, "a session's id")
    what = f"sessions that ended more than {older_than} ago" if older_than else ", ".join(session or ["all messages"])
    if not yes and not confirm(f"Erase the bodies of {what}? This cannot be undone."):
        fail("Nothing was erased.", EXIT_FAILED)

    async def job(app: Runtime) -> Erasure:
        back = age if older_than else None
        return await desk_journal.erase(
            make_desk(app), sessions=session or (), older_than=back, messages=messages, reason=reason
        )

    with patience("Erasing", quiet=as_json):
        erasure = run_with_app(store, job)
    if as_json:
        answer_json(erasure)
    else:
        outside = f" and of {format_count(erasure.messages, 'message')} outside of sessions" if erasure.messages else ""
        say(f"Erased the bodies of {format_count(len(erasure.erased), 'session')}{outside}.")
        for refused in erasure.refused:
            say(refused.sentence)
        if not erasure.scrubbed:
            say(
                "Copies may linger in the store's own log: with SQLite run this again when nobody reads it, "
                "with PostgreSQL they go when the server recycles its log."
            )
    if erasure.refused:
        raise typer.Exit(EXIT_FAILED)


class StoreCompleteness(msgspec.Struct, frozen=True):
    """Whether a store has all that its checkpoints know; if not, how many events are known to be missing."""

    store: str
    whole: bool
    missing: int = 0
    sentence: str = ""


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="store", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    group.command("accept", cls=PlainCommand)(accept)
    return group


def _default(context: typer.Context, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Tell whether the store has all that its checkpoints know, or go on without what is missing.

    Leaves with 1 if something is missing.
    """
    if context.invoked_subcommand is None:
        _show(store, as_json=as_json)
    elif store is not None or as_json:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", EXIT_USAGE)


def _show(store: str | None, *, as_json: bool) -> None:
    async def job(app: Runtime) -> StoreCompleteness:
        if app.doubt is None:
            return StoreCompleteness(app.checkpointer.store_id, whole=True)
        return StoreCompleteness(app.checkpointer.store_id, False, app.doubt.events, app.doubt.sentence())

    found = run_with_app(store, job, warned=False, despite_doubt=True)
    if as_json:
        answer_json(found)
    else:
        say(found.sentence or f"The store {found.store} has all that its newest checkpoints know.")
    if not found.whole:
        raise typer.Exit(EXIT_FAILED)


def accept(
    *,
    reason: ReasonOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a store that lacks what its checkpoints know, such as a backup, without what is missing.

    It says what is missing and asks first, unless --yes is given. The journal and the checkpoints keep who did it.
    What happened outside since then is not undone: look at `halter inbox` before you let agents run.
    """

    async def job(app: Runtime) -> int | None:
        from halter.operations import control

        demand_person(app, "go on with a store that lacks something")
        if app.doubt is None:
            return None
        if not yes:
            warn(app.doubt.lacks())
            if not confirm("Go on without it? This cannot be undone."):
                fail("Nothing was accepted.", EXIT_FAILED)
        done = await control.accept(make_desk(app), reason)
        if app.checkpointer.problem:
            warn(app.checkpointer.problem)
        return done.events

    settings = report_errors(lambda: read_cli_settings(store))
    continuity = report_errors(lambda: find_continuity(settings))
    gone = None if continuity is None else continuity.gone()
    missing = run_with_app(store, job, new=gone is not None, despite_doubt=True, warned=False, settings=settings)
    if as_json:
        answer_json({"subject": "store", "done": missing is not None, "missing": missing or 0})
    elif missing is None:
        say("The store has all that its newest checkpoints know: there is nothing to accept.")
    else:
        say("The store is accepted as it is. Agents run on it from their next start.")

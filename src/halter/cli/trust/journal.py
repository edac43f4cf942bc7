"""`halter verify`, `erase` and `store`: verify the journal, erase bodies, accept an older copy of a store."""

from typing import Annotated

import msgspec
import typer

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
    read_cli_settings,
    report_errors,
    require_person,
    require_readable_name,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence, warn
from halter.cli.terminal import confirm, format_progress, progress
from halter.core.clock import SECOND
from halter.core.text import format_count
from halter.journal.rebuild import IntegrityReport
from halter.journal.retention import Erasure
from halter.operations import journal
from halter.operations.actor import Actor
from halter.runtime.runtime import Runtime, find_continuity


def verify(
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
    repair: Annotated[
        bool, typer.Option("--rebuild", help="Then rebuild all tables from the events, if the events are sound.")
    ] = False,
) -> None:
    """Verify the journal's hash chain and the tables.

    Finds events that were edited, deleted, moved or repeated, and tables that disagree with the events. Exits 1 if
    anything is found.
    """
    with progress("Verifying", quiet=as_json) as on_progress:

        async def job(app: Runtime) -> journal.VerifyResult:
            return await journal.verify(
                make_desk(app),
                rebuild=repair,
                progress=lambda done, total: on_progress(format_progress(done, total, "streams")),
            )

        report = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(report)
    else:
        _print_report(report)
        if repair:
            print_sentence("All tables were rebuilt." if report.rebuilt else "Nothing was rebuilt. See the findings.")
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


def _print_report(report: IntegrityReport) -> None:
    if report.findings:
        rows = [[finding.kind, finding.stream, str(finding.seq or ""), finding.sentence] for finding in report.findings]
        answer_table("Findings", ["finding", "stream", "event", "meaning"], rows, long="stream meaning")
    for note in report.notes:
        print_sentence(note)
    verdict = "Nothing was altered" if report.ok else format_count(len(report.findings), "finding")
    checkpoint_count = (
        "no checkpoints" if report.checkpoints is None else format_count(report.checkpoints, "checkpoint")
    )
    print_sentence(
        f"{verdict}: {format_count(report.events, 'event')} in {format_count(report.streams, 'stream')}, "
        f"{report.erased:,} erased, "
        f"{report.uncovered_events:,} not covered by a checkpoint yet ({checkpoint_count})."
    )


def erase(
    *,
    session: Annotated[
        list[str] | None, typer.Option("--session", metavar="SESSION", help="A session. Repeatable.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Sessions that ended longer ago than this, such as 90d."),
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Messages outside of sessions, and answered questions.")
    ] = False,
    reason: ReasonOption = "",
    yes: YesOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase the bodies of ended sessions. The facts and their hash chain are kept. This cannot be undone.

    Asks first, unless --yes is given. Exits 1 if a session could not be erased, such as a running one.
    """
    if (bool(session), bool(older_than), messages).count(True) != 1:
        fail("Pass exactly one of --session ID, --older-than AGE and --messages.", EXIT_USAGE)
    age = parse_typed_duration(older_than) if older_than else 0
    for name in session or []:
        require_readable_name(name, "session id")
    targets = (
        f"sessions that ended more than {older_than} ago" if older_than else ", ".join(session or ["all messages"])
    )
    if not yes and not confirm(f"Erase the bodies of {targets}? This cannot be undone."):
        fail("Nothing was erased.", EXIT_FAILED)

    async def job(app: Runtime) -> Erasure:
        return await journal.erase(
            make_desk(app),
            confirmed=True,
            sessions=session or (),
            older_than_seconds=age // SECOND if older_than else None,
            messages=messages,
            reason=reason,
        )

    with progress("Erasing", quiet=as_json):
        erasure = run_with_app(store, job)
    if as_json:
        answer_json(erasure)
    else:
        outside = f" and of {format_count(erasure.messages, 'message')} outside of sessions" if erasure.messages else ""
        print_sentence(f"Erased the bodies of {format_count(len(erasure.erased), 'session')}{outside}.")
        for refusal in erasure.refused:
            print_sentence(refusal.sentence)
        if not erasure.scrubbed:
            print_sentence(
                "Copies may remain in the store's write-ahead log. SQLite: run this again while no other process "
                "reads the store. PostgreSQL: the server removes them when it recycles its log."
            )
    if erasure.refused:
        raise typer.Exit(EXIT_FAILED)


class StoreCompleteness(msgspec.Struct, frozen=True):
    """The completeness of a store: `whole`, or the number of `missing` events that its checkpoints know."""

    store: str
    whole: bool
    missing: int = 0
    sentence: str = ""


async def _check_store(actor: Actor) -> StoreCompleteness:
    app = actor.app
    if app.older_copy is None:
        return StoreCompleteness(app.checkpointer.store_id, whole=True)
    return StoreCompleteness(app.checkpointer.store_id, False, app.older_copy.events, app.older_copy.sentence())


def accept(
    *,
    reason: ReasonOption = "",
    yes: YesOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accept a store that lacks events its checkpoints know, such as a restored backup.

    Shows what is missing and asks first, unless --yes is given. The journal and the checkpoints record who accepted it.
    The effects of missing events are not undone: check `halter inbox` before you let agents run.
    """

    async def job(app: Runtime) -> int | None:

        require_person(app, "accept a store with missing events")
        if app.older_copy is None:
            return None
        if not yes:
            warn(app.older_copy.describe_missing())
            if not confirm("Continue without these events? This cannot be undone."):
                fail("Nothing was accepted.", EXIT_FAILED)
        older_copy = await journal.accept(make_desk(app), reason)
        if app.checkpointer.problem:
            warn(app.checkpointer.problem)
        return older_copy.events

    settings = report_errors(lambda: read_cli_settings(store))
    continuity = report_errors(lambda: find_continuity(settings))
    missing_store = None if continuity is None else continuity.find_missing_store()
    missing = run_with_app(
        store, job, new=missing_store is not None, despite_doubt=True, warn_uncovered=False, settings=settings
    )
    if as_json:
        answer_json({"subject": "store", "done": missing is not None, "missing": missing or 0})
    elif missing is None:
        print_sentence("The store has every event that its newest checkpoints know: there is nothing to accept.")
    else:
        print_sentence("Store accepted. Restart agents to use it.")


store = group(
    """Check whether the store has all events that its checkpoints know, or accept missing ones.

    Exits 1 if something is missing.
    """,
    {"accept": accept},
    command(
        _check_store,
        "Check whether the store has all events that its checkpoints know.",
        lambda found, _: [
            found.sentence or f"The store {found.store} has every event that its newest checkpoints know."
        ],
        despite_doubt=True,
        warn_uncovered=False,
        is_ok=lambda found: found.whole,
    ),
)

"""`halter verify` and `halter erase`: looking for tampering, and letting go of what was said."""

from typing import Annotated

import typer

from halter.app import App
from halter.app.desk import journal as desk_journal
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    desk_of,
    duration,
    fail,
    readable,
    with_app,
)
from halter.cli.keyboard import confirm
from halter.cli.patience import patience, share
from halter.core.text import counted
from halter.journal.report import Report
from halter.journal.retention import Erasure


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

        report = with_app(
            store, lambda app: desk_journal.verify(desk_of(app), rebuild=repair, progress=progress), despite_doubt=True
        )
    if as_json:
        answer_json(report)
    else:
        _say(report)
    if repair and not as_json:
        say(
            "All tables were made anew from the events." if report.rebuilt else "Nothing was rebuilt: see the findings."
        )
    if not report.ok:
        raise typer.Exit(NOT_FINE)


def _say(report: Report) -> None:
    if report.findings:
        rows = [[found.kind, found.stream, str(found.seq or ""), found.sentence] for found in report.findings]
        answer_table("Not as it was written", ["finding", "stream", "event", "meaning"], rows, long="stream meaning")
    for note in report.notes:
        say(note)
    verdict = "Nothing was altered" if report.ok else counted(len(report.findings), "finding")
    covered = "no checkpoints" if report.checkpoints is None else counted(report.checkpoints, "checkpoint")
    say(
        f"{verdict}: {counted(report.events, 'event')} in {counted(report.streams, 'stream')}, "
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
        fail("Name either sessions (--session ID), an age (--older-than 90d) or --messages.", WRONG_USE)
    age = duration(older_than) if older_than else 0
    for name in session or []:
        readable(name, "a session's id")
    what = f"sessions that ended more than {older_than} ago" if older_than else ", ".join(session or ["all messages"])
    if not yes and not confirm(f"Erase the bodies of {what}? This cannot be undone."):
        fail("Nothing was erased.", NOT_FINE)

    async def job(app: App) -> Erasure:
        back = age if older_than else None
        return await desk_journal.erase(
            desk_of(app), sessions=session or (), older_than=back, messages=messages, reason=reason
        )

    with patience("Erasing", quiet=as_json):
        erasure = with_app(store, job)
    if as_json:
        answer_json(erasure)
    else:
        outside = f" and of {counted(erasure.messages, 'message')} outside of sessions" if erasure.messages else ""
        say(f"Erased the bodies of {counted(len(erasure.erased), 'session')}{outside}.")
        for refused in erasure.refused:
            say(refused.sentence)
        if not erasure.scrubbed:
            say(
                "Copies may linger in the store's own log: with SQLite run this again when nobody reads it, "
                "with PostgreSQL they go when the server recycles its log."
            )
    if erasure.refused:
        raise typer.Exit(NOT_FINE)

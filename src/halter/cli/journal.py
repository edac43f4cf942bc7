"""`halter verify` and `halter erase`: looking for tampering, and letting go of what was said."""

from typing import Annotated

import typer

from halter.app import App
from halter.cli.answer import answer_json, answer_table, say
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    duration,
    fail,
    readable,
    with_app,
)
from halter.cli.keyboard import confirm
from halter.cli.patience import Tell, patience, share
from halter.core.errors import ConfigError
from halter.core.text import counted
from halter.journal.keys import public_key_path, public_keys
from halter.journal.rebuild import rebuild
from halter.journal.report import Report
from halter.journal.retention import Erasure, erase_messages, erase_older_than
from halter.journal.retention import erase as erase_sessions
from halter.journal.verify import verify as verify_store


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

    async def job(app: App, tell: Tell) -> tuple[Report, bool]:
        trusted = _trusted(app)

        async def verified() -> Report:
            def progress(done: int, total: int) -> None:
                tell(share(done, total, "streams"))

            return await verify_store(app.store, app.settings.checkpoints, trusted, progress)

        report = await verified()
        if repair and all(found.kind == "row" for found in report.findings):
            tell("making all tables anew")
            await rebuild(app.store)
            return await verified(), True
        return report, False

    with patience("Verifying", quiet=as_json) as tell:
        report, rebuilt = with_app(store, lambda app: job(app, tell), despite_doubt=True)
    if as_json:
        answer_json(report)
    else:
        _say(report)
    if repair and not as_json:
        say("All tables were made anew from the events." if rebuilt else "Nothing was rebuilt: see the findings.")
    if not report.ok:
        raise typer.Exit(NOT_FINE)


def _trusted(app: App) -> frozenset[str]:
    """Trust the key beside the signing key; before the first checkpoint there is none."""
    try:
        path = public_key_path(app.settings.signing_key)
        return public_keys(path) if path.exists() else frozenset()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The public key beside {app.settings.signing_key} cannot be read ({error}): put it back there, or name "
            "another signing key with HALTER_SIGNING_KEY."
        ) from error


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
        if older_than:
            return await erase_older_than(app.store, age, app.settings.person, reason or "retention")
        if messages:
            return await erase_messages(app.store, app.settings.person, reason)
        return await erase_sessions(app.store, session or [], app.settings.person, reason)

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

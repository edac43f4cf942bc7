"""`halter export`: a session's journal in a file that anyone can verify."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter import __version__
from halter.cli.command import (
    JsonOption,
    SessionArgument,
    StoreOption,
    make_desk,
    run_with_app,
)
from halter.cli.output import answer_json, print_sentence
from halter.cli.terminal import ProgressListener, format_progress, progress
from halter.core.text import format_count
from halter.journal.export import ExportLine, export_sessions
from halter.operations.journal import sessions_below
from halter.runtime.proof import encode_receipt
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.journal.engine import StoreView
from halter.cli.files import STDOUT_ARGUMENT, open_sink

EXPORT_BATCH: Final = 500


def export(
    session: SessionArgument,
    *,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Output file; - is stdout (default).")
    ] = STDOUT_ARGUMENT,
    children: Annotated[bool, typer.Option("--children", help="Include all sub-sessions.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export a session's journal, inbox and receipt as JSON lines that anyone can verify.

    `halter show --receipt --verify RECEIPT --journal FILE` verifies it without a store. Only you can read the file: it
    has all bodies that were not erased.
    """

    async def job(app: Runtime, on_progress: ProgressListener) -> tuple[Sequence[str], int]:
        actor = make_desk(app)
        root_id = (await actor.session(session)).session
        sessions = [root_id, *(await sessions_below(actor, root_id) if children else [])]
        return sessions, await app.store.study(
            lambda view: _write(view, sessions, output, app.clock.now(), on_progress)
        )

    with progress("Exporting", quiet=as_json) as on_progress:
        sessions, events = run_with_app(store, lambda app: job(app, on_progress), despite_doubt=True)
    if output == STDOUT_ARGUMENT:
        return
    if as_json:
        answer_json({"sessions": sessions, "events": events, "file": output})
        return
    print_sentence(f"Exported {format_count(events, 'event')} of {format_count(len(sessions), 'session')} to {output}.")
    print_sentence(f"Verify it with: halter show --receipt --verify {output} --journal {output}")


def _write(view: "StoreView", sessions: Sequence[str], output: str, now: int, on_progress: ProgressListener) -> int:
    events = 0
    with open_sink(output, append=False, private=True) as write:
        pending: list[ExportLine] = []
        for line, remaining in _report_progress(
            export_sessions(view, sessions, encode_receipt, version=__version__, now=now), on_progress
        ):
            events = max(events, remaining)
            pending.append(line)
            if len(pending) >= EXPORT_BATCH:
                write(pending)
                pending.clear()
        write(pending)
    return events


def _report_progress(
    lines: Iterator[tuple[ExportLine, int]], on_progress: ProgressListener
) -> Iterator[tuple[ExportLine, int]]:
    total, reported_tenths = 0, 0
    for line, remaining in lines:
        total = max(total, remaining)
        tenths = 10 * (total - remaining) // max(1, total)
        if tenths > reported_tenths:
            reported_tenths = tenths
            on_progress(format_progress(total - remaining, total))
        yield line, remaining

"""`halter export`: a session's journal as a file that can be checked with no store at hand."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter import __version__
from halter.app import App
from halter.app.desk.journal import sessions_below
from halter.app.proof import as_written
from halter.cli.answer import answer_json, say
from halter.cli.command import JsonOption, StoreOption, desk_of, with_app
from halter.cli.export import OUTPUT, Sink, sink
from halter.cli.named import SessionArgument
from halter.cli.patience import Tell, patience, share
from halter.core.text import counted

if TYPE_CHECKING:
    from halter.journal.engine import View
    from halter.journal.exported import Line

TOGETHER: Final = 500
"""So many lines are written at once."""


def export(
    session: SessionArgument,
    *,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Where to; - or nothing is the standard output.")
    ] = OUTPUT,
    children: Annotated[bool, typer.Option("--children", help="With its sub-sessions, and theirs.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a session's journal, with its inbox and its receipt, as JSON lines that anyone can check.

    `halter receipt --verify RECEIPT --journal FILE` does, with no store. Only you may read the file: it holds all that
    was said and not erased.
    """

    async def job(app: App, tell: Tell) -> tuple[Sequence[str], int]:
        desk = desk_of(app)
        whole = (await desk.session(session)).session
        sessions = [whole, *(await sessions_below(desk, whole) if children else [])]
        return sessions, await app.store.study(lambda view: _write(view, sessions, output, app.clock.now(), tell))

    with patience("Exporting", quiet=as_json) as tell:
        sessions, events = with_app(store, lambda app: job(app, tell), despite_doubt=True)
    if output == OUTPUT:
        return
    if as_json:
        answer_json({"sessions": sessions, "events": events, "file": output})
        return
    say(f"Exported {counted(events, 'event')} of {counted(len(sessions), 'session')} to {output}.")
    say(f"Anyone can check it with: halter receipt --verify {output} --journal {output}")


def _write(view: "View", sessions: Sequence[str], output: str, now: int, tell: Tell) -> int:
    """Write it all as one view shows it; tell how many events that were."""
    from halter.journal.exported import export as lines_of

    events = 0
    with sink(output, append=False, private=True) as file:
        pending: list[Line] = []
        for line, left in _told(lines_of(view, sessions, as_written, version=__version__, now=now), tell):
            events = max(events, left)
            pending.append(line)
            if len(pending) >= TOGETHER:
                _put(file, pending)
        _put(file, pending)
    return events


def _put(file: Sink, pending: "list[Line]") -> None:
    file.put(pending)
    pending.clear()


def _told(lines: "Iterator[tuple[Line, int]]", tell: Tell) -> "Iterator[tuple[Line, int]]":
    """Say from time to time how far it has come."""
    total, tenth = 0, 0
    for line, left in lines:
        total = max(total, left)
        done = 10 * (total - left) // max(1, total)
        if done > tenth:
            tenth = done
            tell(share(total - left, total))
        yield line, left

"""Finding what a person means: a session by the beginning of its id, and all that happened in it."""

from typing import Annotated, Final

import typer

from halter.app import App
from halter.cli.command import WRONG_USE, fail, readable
from halter.core.ids import StreamId
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.core.text import counted

PAGE: Final = 1000
MOST: Final = 1_000_000

SessionArgument = Annotated[str, typer.Argument(help="A session's id from halter sessions; its beginning will do.")]


async def session_meant(app: App, beginning: str) -> SessionRow:
    """Find the one session whose id begins as was typed; say so if there is none, or more than one."""
    readable(beginning, "a session's id")
    rows = await app.store.ask(Query("sessions", SessionRow, {"limit": MOST}))
    found = {row.session: row for row in rows if row.session.startswith(beginning)}
    if beginning in found:
        return found[beginning]
    if len(found) != 1:
        what = f"{counted(len(found), 'session')} begin" if found else "No session begins"
        fail(f"{what} with {beginning!r}: look at `halter sessions`.", WRONG_USE)
    return next(iter(found.values()))


async def all_events(app: App, stream: StreamId) -> list[Stored]:
    """Read a whole stream."""
    events: list[Stored] = []
    while page := await app.store.read(stream, after=len(events), limit=PAGE):
        events += page
    return events

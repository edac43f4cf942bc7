"""Finding what a person means: a session by the beginning of its id, and all that happened in it."""

from typing import Annotated

import typer

from halter.app import App
from halter.app.desk.looking import MOST, all_events
from halter.cli.command import desk_of
from halter.core.rows import SessionRow

__all__ = ["MOST", "SessionArgument", "all_events", "session_meant"]

SessionArgument = Annotated[str, typer.Argument(help="A session's id from halter sessions; its beginning will do.")]


async def session_meant(app: App, beginning: str) -> SessionRow:
    """Find the one session whose id begins as was typed."""
    return await desk_of(app).session(beginning)

"""`halter sessions`: the list of sessions."""

from typing import Annotated

import typer

from halter.cli.command import (
    Typed,
    command,
    parse_typed_duration,
)
from halter.core.clock import SystemClock
from halter.operations import queries
from halter.present.tables import build_sessions_sheet

sessions = command(
    queries.sessions,
    """List sessions, the newest first.

    Each has its state, the reason of its end, and the time of its next turn.
    """,
    build_sessions_sheet,
    despite_doubt=True,
    allow_missing=True,
    replacements={
        "since": Typed(
            ("since",),
            Annotated[
                str, typer.Option("--since", metavar="AGE", help="Only sessions started within this age, such as 24h.")
            ],
            lambda age: {"since": SystemClock().now() - parse_typed_duration(age) if age else 0},
            "",
        )
    },
)

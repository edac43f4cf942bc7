"""`halter tell`: messages to a session."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from halter.cli.command import (
    Typed,
    command,
    report_errors,
)
from halter.core.tools import File
from halter.models.input_files import open_files
from halter.operations import messages

tell = command(
    messages.send_message,
    """Send a message to a session, or answer its question. The session wakes and reads it in its next turn.

    Exits 1 if the session has ended.
    """,
    replacements={
        "file": Typed(
            ("files",),
            Annotated[
                list[Path] | None,
                typer.Option("--file", metavar="PATH", help="Picture, PDF, document, sound or text. Repeatable."),
            ],
            lambda paths: {"files": _open_files(paths or ())},
            None,
        )
    },
)


def _open_files(paths: Sequence[Path]) -> tuple[File, ...]:
    return report_errors(lambda: open_files(paths))

"""Arguments that a person puts in place of those that were asked about."""

import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.app import App
from halter.cli.command import NOT_FINE, UNUSABLE, WRONG_USE, fail
from halter.core.ports import BLOB_FROM
from halter.core.text import from_body
from halter.guard.redact import Redactor
from halter.guard.secrets import from_environment

INPUT: Final = "-"


def arguments_from(file: str) -> bytes:
    """Read arguments from a file or from the standard input: a JSON object."""
    try:
        data = sys.stdin.buffer.read(BLOB_FROM + 1) if file == INPUT else _content(Path(file))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        fail(f"{file!r} cannot be read: {why or error}.", UNUSABLE)
    if len(data) > BLOB_FROM:
        fail(f"The arguments in {file!r} are too long: {BLOB_FROM:,} bytes are the most.", WRONG_USE)
    try:
        msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fail(f'The arguments in {file!r} are no JSON object ({error}): write them like {{"to": "bob"}}.', WRONG_USE)
    return data


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BLOB_FROM + 1)


def refuse_secrets(app: App, arguments: bytes) -> None:
    """Refuse a secret in plain text: the journal would keep it."""
    secrets = from_environment(app.environ)
    known = {name: secrets.value(name) for name in secrets.names()}
    text = from_body(arguments)
    if Redactor(known, app.environ).redact(text) != text:
        fail("The arguments hold a secret in plain text: write ${secret:NAME} instead.", NOT_FINE)

"""How far a sink has read, kept in a small file: the next export under the same name goes on exactly there.

For each stream the number of the last event that was read. Streams are numbered without gaps and in the order of their
commits, so nothing that settles late can be passed over, as it could by any one number or time for all of them.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import StreamId

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was read of which store."""

    store: str
    seen: dict[StreamId, int] = {}


def is_name(name: str) -> bool:
    """Tell whether a cursor may have this name, which is also that of a file."""
    return _NAME.fullmatch(name) is not None


def cursor_path(environ: Mapping[str, str], name: str) -> Path:
    """Tell where a cursor is kept."""
    if environ.get("HALTER_CURSORS"):
        return Path(environ["HALTER_CURSORS"]) / f"{name}.json"
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "halter" / "cursors" / f"{name}.json"
    try:
        return Path.home() / ".local/state/halter/cursors" / f"{name}.json"
    except RuntimeError:
        raise ConfigError("You have no home folder, and HALTER_CURSORS is not set: set it, or HOME.") from None


def read_cursor(path: Path, store: str) -> Cursor:
    """Read a cursor; one that is not there yet has seen nothing."""
    try:
        cursor = msgspec.json.decode(path.read_bytes(), type=Cursor)
    except FileNotFoundError:
        return Cursor(store)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it, and everything is exported anew.") from None
    if cursor.store != store:
        raise ConfigError(f"{path} is the cursor of another store: give this one a cursor of its own, by another name.")
    return cursor


def write_cursor(path: Path, cursor: Cursor) -> None:
    """Replace a cursor as a whole: whatever happens, the old one or the new one is there."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".cursor-", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(msgspec.json.encode(cursor))
                file.flush()
                os.fsync(file.fileno())
                written.replace(path)
            except OSError:
                written.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error

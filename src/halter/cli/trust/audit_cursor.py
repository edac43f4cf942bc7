"""The cursor of `halter audit --export`: which rows were written before."""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import StreamId
from halter.settings import find_home

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ReadPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The read position in each stream of a store."""

    store: str
    seen: dict[StreamId, int] = {}


def is_cursor_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def cursor_path(environ: Mapping[str, str], name: str) -> Path:
    if environ.get("HALTER_CURSORS"):
        return Path(environ["HALTER_CURSORS"]) / f"{name}.json"
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "halter" / "cursors" / f"{name}.json"
    home = find_home(environ)
    if home is None:
        raise ConfigError("No home folder, and HALTER_CURSORS is not set. Set HALTER_CURSORS or HOME.")
    return home / ".local/state/halter/cursors" / f"{name}.json"


def read_cursor(path: Path, store: str) -> ReadPosition:
    """Read a cursor; a missing file is a cursor at the start."""
    try:
        cursor = msgspec.json.decode(path.read_bytes(), type=ReadPosition)
    except FileNotFoundError:
        return ReadPosition(store)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}). Remove it to export everything again.") from None
    if cursor.store != store:
        raise ConfigError(f"{path} is the cursor of another store. Choose another --cursor name for this store.")
    return cursor


def write_cursor(path: Path, cursor: ReadPosition) -> None:
    """Replace a cursor atomically."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".cursor-", delete=False) as file:
            temporary_path = Path(file.name)
            try:
                file.write(msgspec.json.encode(cursor))
                file.flush()
                os.fsync(file.fileno())
                temporary_path.replace(path)
            except OSError:
                temporary_path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}.") from error

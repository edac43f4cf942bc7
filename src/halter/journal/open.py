"""Which store a URL names."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from halter.core.clock import Clock
from halter.core.errors import StoreUnusable, needs
from halter.core.ids import Ids
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import LEASE, SqliteEngine
from halter.journal.store import JournalStore, Observer

if TYPE_CHECKING:
    from halter.journal.connection import Address

FORMS: Final = "a file (halter.db), sqlite:///folder/halter.db, postgresql://user@host/database, or memory:"

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):(.*)", re.IGNORECASE | re.DOTALL)


def open_store(
    url: str, *, clock: Clock, ids: Ids, observers: Sequence[Observer] = (), lease: int = LEASE, inline: bool = False
) -> JournalStore:
    """Open the store that a URL names, and make it if there is none."""
    return JournalStore(open_engine(url, clock=clock, ids=ids, lease=lease), inline=inline, observers=observers)


def open_engine(url: str, *, clock: Clock, ids: Ids, lease: int = LEASE) -> Engine:
    """Open the engine of a store alone, for whoever puts something of their own on it."""
    found = _SCHEME.fullmatch(url)
    scheme, rest = (found[1].lower(), found[2]) if found else ("", url)
    match scheme:
        case "memory" if not rest:
            return MemoryEngine(now=clock.now, new_id=ids.new, lease=lease)
        case "postgresql" | "postgres" if rest.startswith("//"):
            return _postgres(url, ids.new, lease)
        case "" | "sqlite" if rest and (not rest.startswith("//") or rest.startswith("///")):
            return SqliteEngine(_file(rest), now=clock.now, new_id=ids.new, lease=lease)
        case _:
            raise StoreUnusable(f"The store {masked(url)!r} has no form that Halter knows. Write {FORMS}.")


def masked(url: str) -> str:
    """Write a URL without its passwords, for people and for logs."""
    without = re.sub(
        r"^([a-z][a-z0-9+.-]*://)?([^:/?#]*):(?!//).*@", r"\1\2:***@", url, flags=re.IGNORECASE | re.DOTALL
    )
    return re.sub(r"(password=)[^&]*", r"\1***", without, flags=re.IGNORECASE)


def _postgres(url: str, new_id: Callable[[], str], lease: int) -> Engine:
    postgres_address(url)
    from halter.journal.postgres import PostgresEngine

    return PostgresEngine(url, new_id=new_id, lease=lease)


def postgres_address(url: str) -> "Address":
    """Read the URL of a PostgreSQL store. Raises StoreUnusable where it cannot be read, or has no driver here."""
    try:
        from halter.journal.connection import Address
    except ModuleNotFoundError as missing:
        raise StoreUnusable(needs("postgres", f"The store {masked(url)}")) from missing
    return Address(url)


def _file(rest: str) -> str:
    """Find the file that is meant, and make a folder for it that only its owner can look into."""
    path = _path(rest)
    if path.is_dir():
        raise StoreUnusable(f"The store {path} is a folder: name a file in it, such as {path / 'halter.db'}.")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(
            f"The folder {path.parent} of the store cannot be made ({error.strerror}): make it, or name another file."
        ) from error
    with suppress(OSError):
        path.touch(mode=0o600, exist_ok=True)
    return str(path)


def _path(rest: str) -> Path:
    """Read what follows the scheme; a NUL or an unknown user's home make no path."""
    if "\0" in rest:
        raise StoreUnusable("The name of the store holds a NUL character, which no file can have: name another file.")
    try:
        return Path(f"/{rest.lstrip('/')}" if rest.startswith("//") else rest).expanduser()
    except RuntimeError as error:
        raise StoreUnusable(f"The store {rest} names a home folder that is not known: write the whole path.") from error


def is_there(url: str) -> bool:
    """Tell whether a store that is a file exists; what is behind a server is asked by opening it."""
    path = file_of(url)
    return path is None or path.exists()


def file_of(url: str) -> Path | None:
    """Find the file that a URL names, if it names one."""
    found = _SCHEME.fullmatch(url)
    scheme, rest = (found[1].lower(), found[2]) if found else ("", url)
    return _path(rest) if scheme in {"", "sqlite"} else None

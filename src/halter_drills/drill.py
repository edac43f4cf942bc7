"""What all drills share: what they are told, what they answer, and a store of their own to work on.

A drill proves a promise on the user's own machine. It never touches the user's data: on SQLite it works on a
file in a folder of its own, on PostgreSQL in a schema of its own, and both are gone afterwards.
"""

import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from halter.core.clock import Clock, SystemClock
from halter.core.errors import ConfigError, HalterError, StoreUnavailable
from halter.core.ids import SortableIds
from halter.journal.apply import Applier, apply_write
from halter.journal.engine import Engine
from halter.journal.open import mask_url, open_engine, postgres_address
from halter.journal.sqlite import LEASE_DURATION
from halter.journal.store import JournalStore
from halter.journal.verify import verify

# What the world does to a drill (a full disk, a server that restarts, a process that is gone), put in words.

EARLY: Final = "The drill ended early, and so proves nothing."


class DrillBroken(HalterError):
    """The world failed while a drill ran; so it proves nothing."""


def faults() -> tuple[type[Exception], ...]:
    """List what disks, databases and processes do to a drill besides what Halter puts in words."""
    plain = (OSError, EOFError, sqlite3.Error)
    try:
        import psycopg
    except ImportError:
        return plain
    return (*plain, psycopg.Error)


def sentence(error: Exception) -> str:
    """Put an error of the world in words, also the first of several that happened at once."""
    if isinstance(error, ExceptionGroup):
        return sentence(cast("ExceptionGroup[Exception]", error).exceptions[0])
    if isinstance(error, HalterError):
        return str(error)
    if isinstance(error, EOFError):
        return "A process of the drill ended without saying why. Run it again."
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{said[:1].upper()}{said[1:].rstrip('.')}. See that disk and database are well, and run it again."


@contextmanager
def in_words() -> Generator[None]:
    """Let what the world does to a drill at work out as a sentence; what kept it from beginning says so itself."""
    try:
        yield
    except (DrillBroken, StoreUnavailable) as error:
        raise DrillBroken(f"{EARLY} {error}") from error
    except ExceptionGroup as group:
        known, unknown = group.split((HalterError, *faults()))
        if known is None or unknown is not None:
            raise
        raise DrillBroken(f"{EARLY} {sentence(known)}") from group
    except faults() as error:
        raise DrillBroken(f"{EARLY} {sentence(error)}") from error


StoreKind = Literal["sqlite", "postgresql"]

SENTENCES_KEPT: Final = 20
"""How many violations a result spells out; all of them are counted."""

CONNECT_SECONDS: Final = "5"
PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to remove a schema, long enough for a server to restart."""


Progress = Callable[[int, int, str], None]
"""Is told how many of all cases are done, and a note."""


def unseen(done: int, total: int, note: str) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drill is told: where to run, how many cases, and whether one part of it is broken on purpose.

    Without a store it makes a SQLite file in the system's temporary folder. Without a number of seeds it
    takes as many cases as it needs by itself.
    """

    store: str | None = None
    seeds: int | None = None
    teeth: bool = False
    progress: Progress = unseen


class DrillResult(msgspec.Struct, frozen=True):
    """What a drill found. `detail` says in sentences what was violated, and counts what was tried."""

    drill: str
    store: str
    cases: int
    violations: int
    detail: dict[str, Any]


def result(drill: str, store: str, cases: int, violations: Sequence[str], counts: Mapping[str, Any]) -> DrillResult:
    detail = {**counts, "violations": list(violations[:SENTENCES_KEPT])}
    return DrillResult(drill, store, cases, len(violations), detail)


def _lacking_nothing() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Drill:
    """A proof of one promise. With `Setting.teeth` it must find violations, or it proves nothing.

    `lacking` says what it needs beside Halter itself that is not installed.
    """

    name: str
    proves: str
    run: Callable[[Setting], DrillResult]
    stores: tuple[StoreKind, ...] = ("sqlite", "postgresql")
    lacking: Callable[[], str] = _lacking_nothing


@dataclass(frozen=True, slots=True)
class Ground:
    """A store that belongs to one drill, and a folder for its files."""

    kind: StoreKind
    url: str
    folder: Path

    def open(
        self,
        *,
        clock: Clock | None = None,
        lease: int = LEASE_DURATION,
        inline: bool = False,
        applier: Applier = apply_write,
    ) -> JournalStore:
        return JournalStore(engine(self.url, clock or SystemClock(), lease), inline=inline, applier=applier)

    def fresh(self) -> None:
        """Empty the store, so that one drill can use it for several cases. Nobody may have it open."""
        if self.kind == "sqlite":
            for file in self.folder.glob("drill.db*"):
                file.unlink()
            return
        _drop_schema(self.url)


def engine(url: str, clock: Clock, lease: int) -> Engine:
    return open_engine(url, clock=clock, ids=SortableIds(clock.now), lease=lease)


def kind_of(url: str | None) -> StoreKind:
    """Tell what kind of store a URL names; a drill needs one that outlives a process."""
    scheme = url.partition(":")[0].lower() if url and ":" in url else ""
    if scheme in ("postgresql", "postgres"):
        return "postgresql"
    if scheme in ("", "sqlite"):
        return "sqlite"
    raise ConfigError(
        f"A drill cannot run on the store {mask_url(url or '')}: name a SQLite file (sqlite:///folder/halter.db) or a "
        "PostgreSQL database (postgresql://user@host/database), or name none for a throwaway file."
    )


@contextmanager
def own_store(setting: Setting) -> Generator[Ground]:
    """Give a drill a store of its own beside the user's, and take it away whatever happens."""
    kind = kind_of(setting.store)
    beside = sqlite_file(setting.store).parent if setting.store and kind == "sqlite" else None
    folder = _own_folder(beside)
    try:
        if setting.store is None or kind == "sqlite":
            yield Ground("sqlite", f"sqlite://{folder / 'drill.db'}", folder)
        else:
            with _own_schema(setting.store) as url:
                yield Ground("postgresql", url, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_folder(beside: Path | None) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="halter-drill-", dir=beside)).absolute()
    except (OSError, ValueError) as error:
        where = beside or "the system's temporary folder"
        raise ConfigError(
            f"A drill needs a folder of its own in {where}, which cannot be made ({error}): "
            "see that this folder exists and may be written to."
        ) from error


def sqlite_file(url: str) -> Path:
    rest = url.removeprefix("sqlite:")
    try:
        return Path(f"/{rest.lstrip('/')}" if rest.startswith("//") else rest).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"The home folder in {rest} is not known: write the path out.") from error


@contextmanager
def _own_schema(url: str) -> Generator[str]:
    """Name a schema that nobody has; the store makes it when it is first opened."""
    postgres_address(url)
    own = _with_schema(url, f"halter_drill_{uuid.uuid4().hex}")
    connection(own).close()  # What cannot be reached says so now, before anything is set up.
    try:
        yield own
    finally:
        _drop_schema(own, PAUSES)


def _with_schema(url: str, schema: str) -> str:
    from halter.journal.connection import join_url

    parts = urlsplit(url)
    given = {"connect_timeout": CONNECT_SECONDS} | dict(parse_qsl(parts.query)) | {"schema": schema}
    return join_url(parts._replace(query=urlencode(given, quote_via=quote)))


def _drop_schema(url: str, pauses: Sequence[float] = ()) -> None:
    """Remove the drill's own schema; where that fails, try once more after each of the pauses."""
    drop = f'DROP SCHEMA IF EXISTS "{postgres_address(url).schema}" CASCADE'
    for pause in pauses:
        with suppress(HalterError, *faults()):
            return _execute(url, drop)
        time.sleep(pause)
    try:
        return _execute(url, drop)
    except (HalterError, *faults()) as error:
        raise StoreUnavailable(f"{sentence(error)} The drill's own schema is left there: {drop} removes it.") from error


def _execute(url: str, statement: str) -> None:
    with closing(connection(url)) as database:
        database.execute(statement)


class PlainConnection(Protocol):
    """A database connection that commits each statement by itself; parameters are `?` on SQLite, `%s` on PostgreSQL."""

    def execute(self, query: Any, params: Any = (), /) -> Any: ...
    def close(self) -> None: ...


def connection(url: str) -> PlainConnection:
    """Open a plain connection, past all of Halter's own code: for checkers, and for tampering."""
    if kind_of(url) == "sqlite":
        return sqlite3.connect(sqlite_file(url), isolation_level=None)
    address = postgres_address(url)
    import psycopg

    try:
        database = psycopg.connect(address.conninfo, autocommit=True)
    except psycopg.OperationalError as error:
        raise ConfigError(
            f"The PostgreSQL database at {address.server} cannot be reached "
            f"({' '.join(str(error).split())}): check that it runs and that the URL is right."
        ) from error
    database.execute(f'SET search_path TO "{address.schema}"'.encode())
    return database


# What the drills on the journal share: where they work if nobody says, and what Halter itself says of a store.

IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108  only folders with unguessable names are made in there


def in_memory(setting: Setting) -> Setting:
    """Choose a file in memory where no store is wished for: what a drill does to processes and rows needs no disk."""
    if setting.store is not None or not os.access(IN_MEMORY, os.W_OK):
        return setting
    return replace(setting, store=f"sqlite:///{IN_MEMORY}/halter.db")


async def examined(store: JournalStore) -> list[str]:
    """Verify the chains, the bodies and the rows of a store, and say what was found as sentences."""
    report = await verify(store)
    wrong = [found.sentence for found in report.findings]
    return wrong if report.compared or wrong else ["The rows could not be compared with the events."]

"""What all drills share: what they are told, what they answer, and a store of their own to work on.

A drill proves a promise on the user's own machine. It never touches the user's data: on SQLite it works on a
file in a folder of its own, on PostgreSQL in a schema of its own, and both are gone afterwards.
"""

import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import msgspec

from halter.core.clock import Clock, SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import SortableIds
from halter.journal.apply import Applier, apply
from halter.journal.engine import Engine
from halter.journal.open import masked, open_engine
from halter.journal.sqlite import LEASE
from halter.journal.store import JournalStore

StoreKind = Literal["sqlite", "postgresql"]

SENTENCES_KEPT: Final = 20
"""How many violations a result spells out; all of them are counted."""


class Progress(Protocol):
    """Whoever wants to see a drill at work."""

    def __call__(self, done: int, total: int, note: str) -> None:
        """Hear that so many of all cases are done."""
        ...


def unseen(done: int, total: int, note: str) -> None:
    """Show no progress to anybody."""


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


class Result(msgspec.Struct, frozen=True):
    """What a drill found. `detail` says in sentences what was violated, and counts what was tried."""

    drill: str
    store: str
    cases: int
    violations: int
    detail: dict[str, Any]


def result(drill: str, store: str, cases: int, violations: Sequence[str], counts: Mapping[str, Any]) -> Result:
    """Sum up a drill: every violation counts, the first ones are spelled out."""
    detail = {**counts, "violations": list(violations[:SENTENCES_KEPT])}
    return Result(drill, store, cases, len(violations), detail)


@dataclass(frozen=True, slots=True)
class Drill:
    """A proof of one promise. With `Setting.teeth` it must find violations, or it proves nothing."""

    name: str
    proves: str
    run: Callable[[Setting], Result]
    stores: tuple[StoreKind, ...] = ("sqlite", "postgresql")


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
        lease: int = LEASE,
        inline: bool = False,
        applier: Applier = apply,
    ) -> JournalStore:
        """Open the store, in this process or in a child; every opening is a worker process of its own."""
        return JournalStore(engine(self.url, clock or SystemClock(), lease), inline=inline, applier=applier)

    def fresh(self) -> None:
        """Empty the store, so that one drill can use it for several cases. Nobody may have it open."""
        if self.kind == "sqlite":
            for file in self.folder.glob("drill.db*"):
                file.unlink()
            return
        _drop_schema(self.url)


def engine(url: str, clock: Clock, lease: int) -> Engine:
    """Open the engine of a drill's own store."""
    return open_engine(url, clock=clock, ids=SortableIds(clock.now), lease=lease)


def kind_of(url: str | None) -> StoreKind:
    """Tell what kind of store a URL names; a drill needs one that outlives a process."""
    scheme = url.partition(":")[0].lower() if url and ":" in url else ""
    if scheme in ("postgresql", "postgres"):
        return "postgresql"
    if scheme in ("", "sqlite"):
        return "sqlite"
    raise ConfigError(
        f"A drill cannot run on the store {masked(url or '')}: name a SQLite file (sqlite:///folder/halter.db) or a "
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
    except OSError as error:
        where = beside or tempfile.gettempdir()
        raise ConfigError(
            f"A drill needs a folder of its own in {where}, which cannot be made ({error.strerror}): "
            "see that this folder exists and may be written to."
        ) from error


def sqlite_file(url: str) -> Path:
    """Tell which file a SQLite URL names."""
    rest = url.removeprefix("sqlite:")
    return Path(f"/{rest.lstrip('/')}" if rest.startswith("//") else rest).expanduser()


@contextmanager
def _own_schema(url: str) -> Generator[str]:
    """Name a schema that nobody has; the store makes it when it is first opened."""
    own = _with_schema(url, f"halter_drill_{uuid.uuid4().hex}")
    connection(own).close()  # What cannot be reached says so now, before anything is set up.
    try:
        yield own
    finally:
        _drop_schema(own)


def _with_schema(url: str, schema: str) -> str:
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query)) | {"schema": schema}
    return urlunsplit(parts._replace(query=urlencode(given, quote_via=quote)))


def _drop_schema(url: str) -> None:
    with closing(connection(url)) as database:
        database.execute(f'DROP SCHEMA IF EXISTS "{_schema_of(url)[1]}" CASCADE')


def _schema_of(url: str) -> tuple[str, str]:
    """Part a URL into what libpq reads, and the schema, which is Halter's own addition."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    schema = given.pop("schema", "halter")
    return urlunsplit(parts._replace(query=urlencode(given, quote_via=quote))), schema


class Connection(Protocol):
    """What a drill needs of a plain database connection: it commits each statement by itself."""

    def execute(self, query: Any, params: Any = (), /) -> Any:
        """Run SQL and return a cursor; parameters are `?` on SQLite and `%s` on PostgreSQL."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


def connection(url: str) -> Connection:
    """Open a plain connection, past all of Halter's own code: for checkers, and for tampering."""
    if kind_of(url) == "sqlite":
        return sqlite3.connect(sqlite_file(url), isolation_level=None)
    try:
        import psycopg
    except ImportError as missing:
        raise ConfigError(
            "A drill on PostgreSQL needs its driver: install it with pip install 'halter[postgres]'."
        ) from missing
    plain, schema = _schema_of(url)
    try:
        database = psycopg.connect(plain, autocommit=True)
    except psycopg.OperationalError as error:
        parts = urlsplit(url)
        raise ConfigError(
            f"The PostgreSQL database at {parts.hostname}:{parts.port or 5432} cannot be reached "
            f"({' '.join(str(error).split())}): check that it runs and that the URL is right."
        ) from error
    database.execute(f'SET search_path TO "{schema}"'.encode())
    return database

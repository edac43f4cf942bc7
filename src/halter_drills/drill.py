"""The frame of every drill: its settings, its result, and a throwaway store to attack.

A drill never touches the user's data: on SQLite it works on a file in a temporary folder, on PostgreSQL in a schema
of its own, and removes either afterwards.
"""

import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
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
from halter.journal.verify import verify_store

EARLY: Final = "The drill ended early and proves nothing."


class DrillBroken(HalterError):
    """Disk, database or a process failed during a drill, so its result proves nothing."""


def faults() -> tuple[type[Exception], ...]:
    """List the errors of disks, databases and processes that are not HalterErrors."""
    plain = (OSError, EOFError, sqlite3.Error)
    try:
        import psycopg
    except ImportError:
        return plain
    return (*plain, psycopg.Error)


def sentence(error: Exception) -> str:
    """Describe an error in one sentence; of a group, the first."""
    if isinstance(error, ExceptionGroup):
        return sentence(cast("ExceptionGroup[Exception]", error).exceptions[0])
    if isinstance(error, HalterError):
        return str(error)
    if isinstance(error, EOFError):
        return "A process of the drill ended without an error message. Run the drill again."
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[:1].upper()}{text[1:].rstrip('.')}. Check the disk and the database, and run the drill again."


@contextmanager
def translate_errors() -> Generator[None]:
    """Convert environment errors during a drill into `DrillBroken`."""
    try:
        yield
    except (DrillBroken, StoreUnavailable) as error:
        raise DrillBroken(f"{EARLY} {error}") from error
    except ExceptionGroup as group:
        expected, unexpected = group.split((HalterError, *faults()))
        if expected is None or unexpected is not None:
            raise
        raise DrillBroken(f"{EARLY} {sentence(expected)}") from group
    except faults() as error:
        raise DrillBroken(f"{EARLY} {sentence(error)}") from error


StoreKind = Literal["sqlite", "postgresql"]

MAX_SENTENCES: Final = 20
"""Number of violations that a result quotes; it counts all of them."""

CONNECT_SECONDS: Final = "5"
PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to drop a schema: long enough for a server to restart."""

Progress = Callable[[int, int, str], None]
"""Called with the number of finished cases, the total, and a note."""


def unseen(*_: object) -> None:
    """Do nothing: a listener that is not needed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a drill runs (default: a temporary SQLite file), its number of cases, and whether its teeth are in."""

    store: str | None = None
    seeds: int | None = None
    teeth: bool = False
    progress: Progress = unseen


class DrillResult(msgspec.Struct, frozen=True):
    """Result of a drill. `detail` has the violations as sentences, and counts of its cases."""

    drill: str
    store: str
    cases: int
    violations: int
    detail: dict[str, Any]


def result(drill: str, store: str, cases: int, violations: Sequence[str], counts: Mapping[str, Any]) -> DrillResult:
    detail = {**counts, "violations": list(violations[:MAX_SENTENCES])}
    return DrillResult(drill, store, cases, len(violations), detail)


@dataclass(frozen=True, slots=True)
class Drill:
    """A test of one promise. With `Setting.teeth` it must find violations.

    `lacking` returns a sentence about an optional dependency that is not installed, or "".
    """

    name: str
    proves: str
    run: Callable[[Setting], DrillResult]
    stores: tuple[StoreKind, ...] = ("sqlite", "postgresql")
    lacking: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Workspace:
    """The throwaway store of one drill, and a folder for its files."""

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

    @asynccontextmanager
    async def open_store(self, lease: int = LEASE_DURATION) -> AsyncGenerator[JournalStore]:
        store = self.open(lease=lease)
        try:
            yield store
        finally:
            await store.close()

    def fresh(self) -> None:
        """Empty the store. No connection to it may be open."""
        if self.kind == "postgresql":
            return _drop_schema(self.url)
        for file in self.folder.glob("drill.db*"):
            file.unlink()
        return None


def engine(url: str, clock: Clock, lease: int) -> Engine:
    return open_engine(url, clock=clock, ids=SortableIds(clock.now), lease=lease)


def kind_of(url: str | None) -> StoreKind:
    scheme = url.partition(":")[0].lower() if url and ":" in url else ""
    if scheme in ("postgresql", "postgres"):
        return "postgresql"
    if scheme in ("", "sqlite"):
        return "sqlite"
    raise ConfigError(
        f"Unsupported store {mask_url(url or '')}. Use a SQLite file (sqlite:///folder/halter.db) or a "
        "PostgreSQL database (postgresql://user@host/database), or omit --store for a throwaway file."
    )


@contextmanager
def own_store(setting: Setting) -> Generator[Workspace]:
    """Create a throwaway store next to the user's, and always remove it."""
    postgres = setting.store if kind_of(setting.store) == "postgresql" else None
    parent = sqlite_file(setting.store).parent if setting.store and not postgres else None
    try:
        folder = Path(tempfile.mkdtemp(prefix="halter-drill-", dir=parent)).absolute()
    except (OSError, ValueError) as error:
        where = parent or "the system's temporary folder"
        raise ConfigError(
            f"Cannot create the drill's folder in {where} ({error}). Check that {where} exists and is writable."
        ) from error
    try:
        if postgres is None:
            yield Workspace("sqlite", f"sqlite://{folder / 'drill.db'}", folder)
        else:
            with _own_schema(postgres) as url:
                yield Workspace("postgresql", url, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sqlite_file(url: str) -> Path:
    rest = url.removeprefix("sqlite:")
    try:
        return Path(f"/{rest.lstrip('/')}" if rest.startswith("//") else rest).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"Unknown home folder in {rest}. Use an absolute path.") from error


@contextmanager
def _own_schema(url: str) -> Generator[str]:
    """Yield the URL of a new schema, which the store creates on first use. Drop it afterwards."""
    from halter.journal.connection import join_url

    postgres_address(url)
    url_parts, schema = urlsplit(url), f"halter_drill_{uuid.uuid4().hex}"
    query = {"connect_timeout": CONNECT_SECONDS} | dict(parse_qsl(url_parts.query)) | {"schema": schema}
    schema_url = join_url(url_parts._replace(query=urlencode(query, quote_via=quote)))
    connection(schema_url).close()  # Fail early if the server cannot be reached.
    try:
        yield schema_url
    finally:
        _drop_schema(schema_url, PAUSES)


def _drop_schema(url: str, pauses: Sequence[float] = ()) -> None:
    """Drop the drill's schema; retry after each of the pauses."""
    statement = f'DROP SCHEMA IF EXISTS "{postgres_address(url).schema}" CASCADE'
    for pause in (*pauses, None):
        try:
            with closing(connection(url)) as database:
                database.execute(statement)
                return
        except (HalterError, *faults()) as error:
            if pause is None:
                raise StoreUnavailable(
                    f"{sentence(error)} The drill's schema remains. Drop it with: {statement}"
                ) from error
            time.sleep(pause)


class PlainConnection(Protocol):
    """A connection in autocommit mode; parameters are `?` on SQLite, `%s` on PostgreSQL."""

    def execute(self, query: Any, params: Any = (), /) -> Any: ...
    def close(self) -> None: ...


def connection(url: str) -> PlainConnection:
    """Connect without Halter's store code: for checkers and for tampering."""
    if kind_of(url) == "sqlite":
        return sqlite3.connect(sqlite_file(url), isolation_level=None)
    address = postgres_address(url)
    import psycopg

    try:
        database = psycopg.connect(address.conninfo, autocommit=True)
    except psycopg.OperationalError as error:
        raise ConfigError(
            f"Cannot reach the PostgreSQL database at {address.server} "
            f"({' '.join(str(error).split())}). Check that it runs and that the URL is correct."
        ) from error
    database.execute(f'SET search_path TO "{address.schema}"'.encode())
    return database


IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108  only folders with unguessable names are made in there


def use_memory_file(setting: Setting) -> Setting:
    """Use a file in /dev/shm if no store is named: attacks on processes and rows need no disk."""
    if setting.store is not None or not os.access(IN_MEMORY, os.W_OK):
        return setting
    return replace(setting, store=f"sqlite:///{IN_MEMORY}/halter.db")


async def examine(store: JournalStore) -> list[str]:
    """Verify the chains, bodies and rows of a store; return the findings as sentences."""
    report = await verify_store(store)
    wrong = [finding.sentence for finding in report.findings]
    return wrong if report.compared or wrong else ["The rows were not compared with the events."]

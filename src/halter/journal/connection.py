"""A reconnecting connection to PostgreSQL, statements that share a round trip, and errors as sentences."""

import re
import select
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit

import msgspec
import psycopg
from psycopg import abc, generators
from psycopg.abc import PQGen
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from halter.core.errors import RowRefused, StoreError, StoreUnavailable, StoreUnusable
from halter.journal.engine import Conflict, load_queries, to_psycopg_parameters
from halter.journal.sqlite import CONSTRAINT_ADVICE

PgConnection = psycopg.Connection[tuple[Any, ...]]

DEFAULT_SCHEMA: Final = "halter"
LAST_PORT: Final = 65_535

READ_ONLY_CODE: Final = "25006"
"""A demoted server returns this; the next connection may reach the new primary."""

# A server that is gone without a word is noticed within half a minute. The URL may say otherwise.
_CONNECT_OPTIONS: Final = {
    "application_name": "halter",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class PostgresAddress:
    """Where a store is: libpq's parameters, the schema, and a name for people."""

    def __init__(self, url: str) -> None:
        parts = _split_url(url)
        given = parse_qsl(parts.query, keep_blank_values=True)
        self.schema = dict(given).get("schema", DEFAULT_SCHEMA)
        rest = urlencode([(name, value) for name, value in given if name != "schema"], quote_via=quote)
        params = _parse_conninfo(join_url(parts._replace(query=rest)))
        self.conninfo = make_conninfo(**(_CONNECT_OPTIONS | params | {"client_encoding": "UTF8"}))
        self.server = ":".join(params[name] for name in ("host", "port") if name in params) or "this machine"
        self.place = f"{self.server}/{params.get('dbname', '')}"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", self.schema) or self.schema.startswith("pg_"):
            raise StoreUnusable(
                f"PostgreSQL at {self.place} can have no schema {self.schema!r} for Halter: "
                "use small letters, digits and underscores, as in ?schema=halter."
            )

    def whereabouts(self) -> str:
        """The database and the schema, also where the environment names the server."""
        given = conninfo_to_dict(self.conninfo)
        usual = {each.keyword.decode(): (each.val or b"").decode() for each in psycopg.pq.Conninfo.get_defaults()}
        words = [str(given.get(name) or usual.get(name) or "") for name in ("service", "host", "hostaddr", "port")]
        database = given.get("dbname") or usual.get("dbname") or ""
        return f"postgresql://{':'.join(filter(None, words))}/{database}?schema={self.schema}"


_URL_ADVICE: Final = (
    "write it as postgresql://user:password@host:5432/database, with special characters of the password written as "
    "%40 and the like."
)


def _split_url(url: str) -> SplitResult:
    """Split a URL; errors do not repeat it, since it may hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreUnusable(f"The PostgreSQL address cannot be read: {_URL_ADVICE}") from None
    if parts.netloc.count("@") > 1:
        raise StoreUnusable(
            "The PostgreSQL address holds more than one @: write one that is part of a password as %40."
        )
    return parts


def join_url(parts: SplitResult) -> str:
    """Join a URL. Without a host it keeps its slashes: libpq then uses its environment."""
    url = urlunsplit(parts)
    return url if parts.netloc else url.replace(":", "://", 1)


def _parse_conninfo(url: str) -> dict[str, str]:
    """Read a URL as libpq does, and reject what would fail only when connecting."""
    try:
        params = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError:
        unknown = [name for name, _ in parse_qsl(urlsplit(url).query) if name not in _list_libpq_keywords()]
        if unknown:
            raise StoreUnusable(
                f"The PostgreSQL address sets {unknown[0]!r}, which PostgreSQL does not know: leave it out."
            ) from None
        raise StoreUnusable(f"The PostgreSQL address cannot be read: {_URL_ADVICE}") from None
    if not params.keys() & {"host", "hostaddr", "dbname", "service"}:
        raise StoreUnusable(f"The PostgreSQL address names neither a server nor a database: {_URL_ADVICE}")
    for port in filter(None, params.get("port", "").split(",")):
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT):
            raise StoreUnusable(f"The PostgreSQL address has no port number from 1 to {LAST_PORT}: {_URL_ADVICE}")
    return params


def _list_libpq_keywords() -> set[str]:
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


TEXT_ARRAY: Final = 1009
BIGINT_ARRAY: Final = 1016


class Statement(msgspec.Struct, frozen=True, cache_hash=True):
    """SQL with `$1`, `$2` and so on, whose parameters have these types."""

    sql: bytes
    types: tuple[int, ...] = ()


@cache
def _list_formats(types: tuple[int, ...]) -> list[Format]:
    """Parameters are in PostgreSQL's binary form, except for arrays of texts and numbers."""
    return [Format.TEXT if kind in (TEXT_ARRAY, BIGINT_ARRAY) else Format.BINARY for kind in types]


Request = tuple[Statement, Sequence[bytes | None]]
"""A statement with its encoded parameters."""
Rows = Sequence[tuple[Any, ...]]


class ConnectionSlot:
    """One connection: opened at first use, and again after it was lost.

    One that was lost between two uses is replaced unnoticed: the server may long be back.
    """

    def __init__(
        self, address: PostgresAddress, greet: Callable[[PgConnection], None], *, listens: bool = False
    ) -> None:
        self._address = address
        self._greet = greet
        self._listens = listens
        self._connection: PgConnection | None = None
        self._prepared: dict[Statement, bytes] = {}
        self._numbers = count()
        self.columns: dict[Statement, Sequence[str]] = {}
        """The names of the columns of each statement that was run."""
        self.round_trips = 0
        """How often `run` has waited for the server."""

    def run(self, requests: Sequence[Request]) -> Sequence[Rows]:
        """Run statements in one round trip, each of them prepared once for the connection; return the rows of each.

        After the first error nothing more is done, and it is raised. This is libpq's own pipeline: psycopg's costs
        several times as much for each statement, and after it the server does not end a transaction that stands still.
        """
        with self.use() as connection:
            self.round_trips += 1
            unknown = dict.fromkeys(statement for statement, _ in requests if statement not in self._prepared)
            names = {statement: b"halter_%d" % next(self._numbers) for statement in unknown}
            try:
                found = connection.wait(_exchange(connection.pgconn, names, self._prepared | names, requests))
            except BaseException:
                # What it would answer next belongs to no question.
                self.drop()
                raise
            for (statement, name), result in zip(names.items(), found, strict=False):
                if result.status == ExecStatus.COMMAND_OK:
                    self._prepared[statement] = name
            for result in found:
                if result.status == ExecStatus.FATAL_ERROR:
                    raise psycopg.errors.error_from_result(result, "utf-8")
            answers, transformer = found[len(names) :], Transformer(connection)
            for (statement, _), result in zip(requests, answers, strict=True):
                if statement not in self.columns:
                    self.columns[statement] = [(result.fname(at) or b"").decode() for at in range(result.nfields)]
            return [_read_rows(transformer, result) for result in answers]

    @contextmanager
    def use(self) -> Generator[PgConnection]:
        with translate_errors(self._address):
            try:
                if self._connection is not None and not self._listens and _was_cut_while_idle(self._connection):
                    self.drop()
                if self._connection is None:
                    self._connection = open_greeted_connection(self._address, self._greet)
                yield self._connection
            except psycopg.Error as error:
                fatal = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
                if fatal or self._closed or error.sqlstate == READ_ONLY_CODE:
                    self.drop()
                raise

    def drop(self) -> None:
        connection, self._connection = self._connection, None
        self._prepared, self.columns = {}, {}
        if connection is not None:
            connection.close()

    @property
    def pid(self) -> int:
        """The server's process id, by which other writers recognise a notification's sender."""
        return 0 if self._connection is None else self._connection.info.backend_pid

    @property
    def in_transaction(self) -> bool:
        idle = (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return self._connection is not None and self._connection.info.transaction_status not in idle

    @property
    def _closed(self) -> bool:
        return self._connection is None or self._connection.closed


def _was_cut_while_idle(connection: PgConnection) -> bool:
    """Return whether something arrived that was not asked for: the server's farewell, or the end of the stream."""
    if connection.closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))


def _exchange(
    pgconn: PGconn, unknown: Mapping[Statement, bytes], names: Mapping[Statement, bytes], requests: Sequence[Request]
) -> PQGen[list[PGresult]]:
    """Send all, with a sync at the end, while the server may already answer; then read one result of each."""
    pgconn.enter_pipeline_mode()
    for statement, name in unknown.items():
        pgconn.send_prepare(name, statement.sql, statement.types)
    for statement, values in requests:
        pgconn.send_query_prepared(names[statement], values, _list_formats(statement.types), Format.BINARY)
    pgconn.pipeline_sync()
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    results: list[PGresult] = []
    for _ in range(len(unknown) + len(requests)):
        results += yield from generators.fetch_many(pgconn)
    yield from generators.fetch_many(pgconn)
    pgconn.exit_pipeline_mode()
    return results


def _read_rows(transformer: abc.Transformer, result: PGresult) -> Rows:
    if result.status != ExecStatus.TUPLES_OK or not result.ntuples:
        return ()
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)


def open_greeted_connection(address: PostgresAddress, greet: Callable[[PgConnection], None]) -> PgConnection:
    connection = psycopg.connect(address.conninfo, autocommit=True, prepare_threshold=0)
    try:
        greet(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def translate_errors(address: PostgresAddress) -> Generator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate_postgres_error(error, address) from error


class _ErrorCase(NamedTuple):
    """What a kind of error means; `signs` are PostgreSQL codes, or without one, words of libpq."""

    signs: tuple[str, ...]
    kind: type[StoreError | Conflict]
    sentence: str


_TOO_MANY_CONNECTIONS: Final = (
    "PostgreSQL at {server} has no connection to spare ({text}). It will be tried again; raise max_connections if it "
    "stays so."
)
_CASES_WITHOUT_CODE: Final = (
    _ErrorCase(
        ("connection is bad: invalid", "bad value for"),
        StoreUnusable,
        "The address of PostgreSQL at {server} asks for something that cannot be ({text}). Correct it.",
    ),
    _ErrorCase(("too many", "connection slots"), StoreUnavailable, _TOO_MANY_CONNECTIONS),
    _ErrorCase(
        ("starting up", "shutting down", "in recovery mode", "yet accepting connections"),
        StoreUnavailable,
        "PostgreSQL at {server} is just starting or stopping ({text}). It will be tried again.",
    ),
    _ErrorCase(
        ("password", "authenticat", "pg_hba", 'role "', "certificate", "does not support SSL"),
        StoreUnusable,
        "PostgreSQL at {server} does not let Halter in ({text}). Check the user, the password and the server's "
        "pg_hba.conf.",
    ),
    _ErrorCase(
        ('database "',),
        StoreUnusable,
        "PostgreSQL at {server} has no database of that name ({text}). Make it, for example with createdb.",
    ),
    _ErrorCase(
        ("",),
        StoreUnavailable,
        "PostgreSQL at {server} cannot be reached ({text}). What it did not confirm will be tried again, and is never "
        "done twice. Check that it runs and that the address is right.",
    ),
)
_CASES_WITH_CODE: Final = (
    _ErrorCase(("40", "23505"), Conflict, "Another process wrote the same rows to {place} first ({text})."),
    _ErrorCase(("22", "23", "54"), RowRefused, f"The database {{place}} refused a row ({{text}}). {CONSTRAINT_ADVICE}"),
    _ErrorCase(("53300",), StoreUnavailable, _TOO_MANY_CONNECTIONS),
    _ErrorCase(
        ("53100",),
        StoreUnavailable,
        "The disk of PostgreSQL at {place} is full. Nothing was written; free some space and it goes on.",
    ),
    _ErrorCase(
        ("55P03",),
        StoreUnavailable,
        "Rows of {place} have been locked by another process for too long. Nothing was written; it will be tried "
        "again. If it stays so, look into pg_stat_activity for a program that keeps a transaction open.",
    ),
    _ErrorCase(
        ("08", "25P03", "53", "57", "58"),
        StoreUnavailable,
        "PostgreSQL at {place} could not do its work ({text}). What it did not confirm will be tried again, and is "
        "never done twice.",
    ),
    _ErrorCase(
        (READ_ONLY_CODE,),
        StoreUnavailable,
        "PostgreSQL at {place} can only be read ({text}). Nothing was written; it will be tried again. If it stays so, "
        "name the primary server, or make the database writable.",
    ),
    _ErrorCase(
        ("28", "42501"),
        StoreUnusable,
        "PostgreSQL at {place} does not allow this ({text}). Give Halter's user the right to make a schema and to "
        "own what is in it.",
    ),
    _ErrorCase(
        ("XX",),
        StoreUnusable,
        "The database {place} is damaged ({text}). Restore it from a backup, or name another one.",
    ),
    _ErrorCase(
        ("",),
        StoreUnusable,
        "The database {place} rejected a query ({text}). If its tables were changed by hand, restore it from a backup.",
    ),
)


def translate_postgres_error(error: psycopg.Error, address: PostgresAddress) -> StoreError | Conflict:
    """Turn PostgreSQL's error into a sentence for the operator.

    libpq gives connection errors only in words; unknown ones are treated as temporary.
    """
    text = re.sub(r"\s+", " ", error.diag.message_primary or str(error)).strip()
    if not error.sqlstate and (isinstance(error, psycopg.OperationalError) or text.startswith("bad value for")):
        case = next(case for case in _CASES_WITHOUT_CODE if any(word in text for word in case.signs))
    else:
        code = error.sqlstate or ("22" if isinstance(error, psycopg.DataError) else "")
        case = next(case for case in _CASES_WITH_CODE if code.startswith(case.signs))
    return case.kind(case.sentence.format(server=address.server, place=address.place, text=text))


class QueueDepth(msgspec.Struct, frozen=True):
    """One queue: its length, and the age of its oldest entry in microseconds."""

    queue: str
    jobs: int
    age: int


class Pressure(msgspec.Struct, frozen=True):
    """Connections allowed and in use, and the queues that are not empty."""

    most: int
    used: int
    queued: Sequence[QueueDepth]


def measure_pressure(url: str) -> Pressure:
    """Ask PostgreSQL over a separate connection. Before the first worker there is no queue."""
    address = PostgresAddress(url)
    with translate_errors(address), open_greeted_connection(address, lambda _: None) as connection:
        connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", [address.schema])
        ((most, used),) = _run_pressure_query(connection, "connections")
        ((has_queue,),) = _run_pressure_query(connection, "has_queue")
        queued = _run_pressure_query(connection, "queued") if has_queue else ()
        return Pressure(most, used, [QueueDepth(*row) for row in queued])


def _run_pressure_query(connection: PgConnection, name: str) -> Sequence[tuple[Any, ...]]:
    return connection.execute(to_psycopg_parameters(load_queries("postgres/pressure.sql")[name]).encode()).fetchall()

"""A reconnecting connection to PostgreSQL, which runs several statements in one round trip and translates errors."""

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
from halter.journal.sqlite_connection import CONSTRAINT_ADVICE

PgConnection = psycopg.Connection[tuple[Any, ...]]

DEFAULT_SCHEMA: Final = "halter"
LAST_PORT: Final = 65_535

READ_ONLY_CODE: Final = "25006"
"""The error code of a demoted server. The next connection may reach the new primary."""

# An unreachable server is noticed within half a minute. The URL can override these.
_CONNECT_OPTIONS: Final = {
    "application_name": "halter",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class PostgresAddress:
    """The address of a store: libpq's parameters, the schema, and a location to show."""

    def __init__(self, url: str) -> None:
        url_parts = _split_url(url)
        query_parameters = parse_qsl(url_parts.query, keep_blank_values=True)
        self.schema = dict(query_parameters).get("schema", DEFAULT_SCHEMA)
        query = urlencode([(name, value) for name, value in query_parameters if name != "schema"], quote_via=quote)
        parameters = _parse_conninfo(join_url(url_parts._replace(query=query)))
        self.conninfo = make_conninfo(**(_CONNECT_OPTIONS | parameters | {"client_encoding": "UTF8"}))
        self.server = ":".join(parameters[name] for name in ("host", "port") if name in parameters) or "this machine"
        self.location = f"{self.server}/{parameters.get('dbname', '')}"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", self.schema) or self.schema.startswith("pg_"):
            raise StoreUnusable(
                f"Invalid schema {self.schema!r} for PostgreSQL at {self.location}. "
                "Use lowercase letters, digits and underscores, as in ?schema=halter."
            )

    def whereabouts(self) -> str:
        """Describe the database and the schema, including what libpq takes from the environment."""
        settings = conninfo_to_dict(self.conninfo)
        defaults = {each.keyword.decode(): (each.val or b"").decode() for each in psycopg.pq.Conninfo.get_defaults()}
        host_parts = [
            str(settings.get(name) or defaults.get(name) or "") for name in ("service", "host", "hostaddr", "port")
        ]
        database = settings.get("dbname") or defaults.get("dbname") or ""
        return f"postgresql://{':'.join(filter(None, host_parts))}/{database}?schema={self.schema}"


_URL_ADVICE: Final = (
    "Write it as postgresql://user:password@host:5432/database, and percent-encode special characters of the password."
)


def _split_url(url: str) -> SplitResult:
    """Split a URL. Errors do not quote it, since it may contain a password."""
    try:
        url_parts = urlsplit(url)
    except ValueError:
        raise StoreUnusable(f"Invalid PostgreSQL address. {_URL_ADVICE}") from None
    if url_parts.netloc.count("@") > 1:
        raise StoreUnusable("The PostgreSQL address contains more than one @. Write an @ of the password as %40.")
    return url_parts


def join_url(url_parts: SplitResult) -> str:
    """Join a URL. Without a host it keeps its slashes, so that libpq uses the environment."""
    url = urlunsplit(url_parts)
    return url if url_parts.netloc else url.replace(":", "://", 1)


def _parse_conninfo(url: str) -> dict[str, str]:
    """Parse a URL as libpq does. Also rejects addresses on which libpq fails only when it connects."""
    try:
        parameters = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError:
        unknown_keywords = [name for name, _ in parse_qsl(urlsplit(url).query) if name not in _list_libpq_keywords()]
        if unknown_keywords:
            raise StoreUnusable(
                f"The PostgreSQL address has the unknown parameter {unknown_keywords[0]!r}. Remove it."
            ) from None
        raise StoreUnusable(f"Invalid PostgreSQL address. {_URL_ADVICE}") from None
    if not parameters.keys() & {"host", "hostaddr", "dbname", "service"}:
        raise StoreUnusable(f"The PostgreSQL address has neither a server nor a database. {_URL_ADVICE}")
    for port in filter(None, parameters.get("port", "").split(",")):
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT):
            raise StoreUnusable(
                f"The port of the PostgreSQL address is not a number from 1 to {LAST_PORT}. {_URL_ADVICE}"
            )
    return parameters


def _list_libpq_keywords() -> set[str]:
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


TEXT_ARRAY: Final = 1009
BIGINT_ARRAY: Final = 1016


class Statement(msgspec.Struct, frozen=True, cache_hash=True):
    """SQL with parameters `$1`, `$2` and so on, and their type ids."""

    sql: bytes
    types: tuple[int, ...] = ()


@cache
def _list_formats(types: tuple[int, ...]) -> list[Format]:
    """List the formats of parameters: binary, except for arrays of texts and numbers."""
    return [Format.TEXT if type_id in (TEXT_ARRAY, BIGINT_ARRAY) else Format.BINARY for type_id in types]


Request = tuple[Statement, Sequence[bytes | None]]
"""A statement with its encoded parameters."""
Rows = Sequence[tuple[Any, ...]]


class ConnectionSlot:
    """A connection that is opened at first use, and reopened after it was lost.

    A connection that was lost between two uses is replaced without an error.
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
        """The column names of each statement that has run."""
        self.round_trips = 0
        """The number of times that `run` has waited for the server."""

    def run(self, requests: Sequence[Request]) -> Sequence[Rows]:
        """Run statements in one round trip, each prepared once per connection. Returns the rows of each.

        Stops at the first error and raises it. This uses libpq's pipeline directly: psycopg's costs several times as
        much for each statement, and after it the server does not end a transaction that is idle.
        """
        with self.use() as connection:
            self.round_trips += 1
            new_statements = dict.fromkeys(statement for statement, _ in requests if statement not in self._prepared)
            names = {statement: b"halter_%d" % next(self._numbers) for statement in new_statements}
            try:
                results = connection.wait(_exchange(connection.pgconn, names, self._prepared | names, requests))
            except BaseException:
                # Pending results would be taken for those of the next statements.
                self.drop()
                raise
            for (statement, name), result in zip(names.items(), results, strict=False):
                if result.status == ExecStatus.COMMAND_OK:
                    self._prepared[statement] = name
            for result in results:
                if result.status == ExecStatus.FATAL_ERROR:
                    raise psycopg.errors.error_from_result(result, "utf-8")
            row_results, transformer = results[len(names) :], Transformer(connection)
            for (statement, _), result in zip(requests, row_results, strict=True):
                if statement not in self.columns:
                    self.columns[statement] = [(result.fname(index) or b"").decode() for index in range(result.nfields)]
            return [_read_rows(transformer, result) for result in row_results]

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
                is_fatal = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
                if is_fatal or self._closed or error.sqlstate == READ_ONLY_CODE:
                    self.drop()
                raise

    def drop(self) -> None:
        connection, self._connection = self._connection, None
        self._prepared, self.columns = {}, {}
        if connection is not None:
            connection.close()

    @property
    def pid(self) -> int:
        """The id of the server process, which identifies the sender of a notification."""
        return 0 if self._connection is None else self._connection.info.backend_pid

    @property
    def in_transaction(self) -> bool:
        idle_states = (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return self._connection is not None and self._connection.info.transaction_status not in idle_states

    @property
    def _closed(self) -> bool:
        return self._connection is None or self._connection.closed


def _was_cut_while_idle(connection: PgConnection) -> bool:
    """Return True if the connection is closed, or has unrequested data: an error, or the end of the stream."""
    if connection.closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))


def _exchange(
    pgconn: PGconn,
    new_statements: Mapping[Statement, bytes],
    names: Mapping[Statement, bytes],
    requests: Sequence[Request],
) -> PQGen[list[PGresult]]:
    """Send all statements and a sync, receiving meanwhile so that neither side blocks; then read one result of each."""
    pgconn.enter_pipeline_mode()
    for statement, name in new_statements.items():
        pgconn.send_prepare(name, statement.sql, statement.types)
    for statement, values in requests:
        pgconn.send_query_prepared(names[statement], values, _list_formats(statement.types), Format.BINARY)
    pgconn.pipeline_sync()
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    results: list[PGresult] = []
    for _ in range(len(new_statements) + len(requests)):
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
    """The meaning of an error. `patterns` are prefixes of PostgreSQL's codes, or words of errors without a code."""

    patterns: tuple[str, ...]
    kind: type[StoreError | Conflict]
    sentence: str


_TOO_MANY_CONNECTIONS: Final = (
    "PostgreSQL at {server} has no free connection ({text}). If this persists, raise max_connections."
)
_CASES_WITHOUT_CODE: Final = (
    _ErrorCase(
        ("connection is bad: invalid", "bad value for"),
        StoreUnusable,
        "The address of PostgreSQL at {server} has an invalid parameter ({text}). Correct it.",
    ),
    _ErrorCase(("too many", "connection slots"), StoreUnavailable, _TOO_MANY_CONNECTIONS),
    _ErrorCase(
        ("starting up", "shutting down", "in recovery mode", "yet accepting connections"),
        StoreUnavailable,
        "PostgreSQL at {server} is starting or stopping ({text}).",
    ),
    _ErrorCase(
        ("password", "authenticat", "pg_hba", 'role "', "certificate", "does not support SSL"),
        StoreUnusable,
        "PostgreSQL at {server} rejected the login ({text}). Check the user, the password and the server's "
        "pg_hba.conf.",
    ),
    _ErrorCase(
        ('database "',),
        StoreUnusable,
        "PostgreSQL at {server} has no database of that name ({text}). Create it, for example with createdb.",
    ),
    _ErrorCase(
        ("",),
        StoreUnavailable,
        "Cannot reach PostgreSQL at {server} ({text}). An unconfirmed write is safe to repeat: Halter never applies "
        "one twice. Check that the server runs and that the address is correct.",
    ),
)
_CASES_WITH_CODE: Final = (
    _ErrorCase(("40", "23505"), Conflict, "Another process wrote the same rows to {place} first ({text})."),
    _ErrorCase(("22", "23", "54"), RowRefused, f"The database {{place}} refused a row ({{text}}). {CONSTRAINT_ADVICE}"),
    _ErrorCase(("53300",), StoreUnavailable, _TOO_MANY_CONNECTIONS),
    _ErrorCase(
        ("53100",),
        StoreUnavailable,
        "The disk of PostgreSQL at {place} is full. Nothing was written. Free some space.",
    ),
    _ErrorCase(
        ("55P03",),
        StoreUnavailable,
        "Another process has locked rows of {place} for too long. Nothing was written. "
        "If this persists, look in pg_stat_activity for a program that keeps a transaction open.",
    ),
    _ErrorCase(
        ("08", "25P03", "53", "57", "58"),
        StoreUnavailable,
        "PostgreSQL at {place} failed ({text}). An unconfirmed write is safe to repeat: Halter never applies "
        "one twice.",
    ),
    _ErrorCase(
        (READ_ONLY_CODE,),
        StoreUnavailable,
        "PostgreSQL at {place} is read-only ({text}). Nothing was written. If this "
        "persists, use the address of the primary server, or make the database writable.",
    ),
    _ErrorCase(
        ("28", "42501"),
        StoreUnusable,
        "PostgreSQL at {place} denied permission ({text}). Grant Halter's user the right to create a schema and to own "
        "its objects.",
    ),
    _ErrorCase(
        ("XX",),
        StoreUnusable,
        "The database {place} is damaged ({text}). Restore it from a backup, or use another one.",
    ),
    _ErrorCase(
        ("",),
        StoreUnusable,
        "The database {place} rejected a query ({text}). If its tables were changed by hand, restore it from a backup.",
    ),
)


def translate_postgres_error(error: psycopg.Error, address: PostgresAddress) -> StoreError | Conflict:
    """Translate an error of PostgreSQL for the operator.

    Connection errors of libpq have no code, only words. Unknown ones are treated as temporary.
    """
    text = re.sub(r"\s+", " ", error.diag.message_primary or str(error)).strip()
    if not error.sqlstate and (isinstance(error, psycopg.OperationalError) or text.startswith("bad value for")):
        case = next(case for case in _CASES_WITHOUT_CODE if any(sign in text for sign in case.patterns))
    else:
        code = error.sqlstate or ("22" if isinstance(error, psycopg.DataError) else "")
        case = next(case for case in _CASES_WITH_CODE if code.startswith(case.patterns))
    return case.kind(case.sentence.format(server=address.server, place=address.location, text=text))


class QueueDepth(msgspec.Struct, frozen=True):
    """The length of a queue, and the age of its oldest job in microseconds."""

    queue: str
    jobs: int
    age: int


class Pressure(msgspec.Struct, frozen=True):
    """The load of a server: connections allowed and in use, and the queues that are not empty."""

    max_connections: int
    used: int
    queued: Sequence[QueueDepth]


def measure_pressure(url: str) -> Pressure:
    """Measure the load over a separate connection. Before the first worker there is no queue."""
    address = PostgresAddress(url)
    with translate_errors(address), open_greeted_connection(address, lambda _: None) as connection:
        connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", [address.schema])
        ((max_connections, used_connections),) = _run_pressure_query(connection, "connections")
        ((has_queue,),) = _run_pressure_query(connection, "has_queue")
        queues = _run_pressure_query(connection, "queued") if has_queue else ()
        return Pressure(max_connections, used_connections, [QueueDepth(*row) for row in queues])


def _run_pressure_query(connection: PgConnection, name: str) -> Sequence[tuple[Any, ...]]:
    return connection.execute(to_psycopg_parameters(load_queries("postgres/pressure.sql")[name]).encode()).fetchall()

"""A connection to PostgreSQL that is made anew when it was lost, and its errors as sentences."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from halter.core.errors import RowRefused, StoreError, StoreUnavailable, StoreUnusable
from halter.journal.engine import Conflict
from halter.journal.sqlite_words import REFUSED

Connection = psycopg.Connection[tuple[Any, ...]]

SCHEMA: Final = "halter"
LAST_PORT: Final = 65_535

READ_ONLY: Final = "25006"
"""A server that was demoted says this; by the next connection another one may be the primary."""

# A server that is gone without a word is noticed within half a minute. The URL may say otherwise.
_PATIENCE: Final = {
    "application_name": "halter",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class Address:
    """Where a store is: what libpq has to know, the schema, and how to name the place to people."""

    def __init__(self, url: str) -> None:
        parts = _parts(url)
        given = parse_qsl(parts.query, keep_blank_values=True)
        self.schema = dict(given).get("schema", SCHEMA)
        rest = urlencode([(name, value) for name, value in given if name != "schema"], quote_via=quote)
        params = _understood(whole(parts._replace(query=rest)))
        self.conninfo = make_conninfo(**(_PATIENCE | params | {"client_encoding": "UTF8"}))
        self.server = ":".join(params[name] for name in ("host", "port") if name in params) or "this machine"
        self.place = f"{self.server}/{params.get('dbname', '')}"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", self.schema) or self.schema.startswith("pg_"):
            raise StoreUnusable(
                f"PostgreSQL at {self.place} can have no schema {self.schema!r} for Halter: "
                "use small letters, digits and underscores, as in ?schema=halter."
            )

    def whereabouts(self) -> str:
        """Name the database and the schema, also where the environment says which server is meant."""
        given = conninfo_to_dict(self.conninfo)
        usual = {each.keyword.decode(): (each.val or b"").decode() for each in psycopg.pq.Conninfo.get_defaults()}
        words = [str(given.get(name) or usual.get(name) or "") for name in ("service", "host", "hostaddr", "port")]
        database = given.get("dbname") or usual.get("dbname") or ""
        return f"postgresql://{':'.join(filter(None, words))}/{database}?schema={self.schema}"


_FORM: Final = (
    "write it as postgresql://user:password@host:5432/database, with special characters of the password written as "
    "%40 and the like."
)


def _parts(url: str) -> SplitResult:
    """Take a URL apart; what is wrong with it is said without repeating it, for it may hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreUnusable(f"The PostgreSQL address cannot be read: {_FORM}") from None
    if parts.netloc.count("@") > 1:
        raise StoreUnusable(
            "The PostgreSQL address holds more than one @: write one that is part of a password as %40."
        )
    return parts


def whole(parts: SplitResult) -> str:
    """Put a URL together again. Without a host it keeps its slashes: libpq then looks where its environment says."""
    url = urlunsplit(parts)
    return url if parts.netloc else url.replace(":", "://", 1)


def _understood(url: str) -> dict[str, str]:
    """Read a URL as libpq does, and refuse what it would only stumble over when it connects."""
    try:
        params = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError:
        unknown = [name for name, _ in parse_qsl(urlsplit(url).query) if name not in _keywords()]
        if unknown:
            raise StoreUnusable(
                f"The PostgreSQL address sets {unknown[0]!r}, which PostgreSQL does not know: leave it out."
            ) from None
        raise StoreUnusable(f"The PostgreSQL address cannot be read: {_FORM}") from None
    if not params.keys() & {"host", "hostaddr", "dbname", "service"}:
        raise StoreUnusable(f"The PostgreSQL address names neither a server nor a database: {_FORM}")
    for port in filter(None, params.get("port", "").split(",")):
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= LAST_PORT):
            raise StoreUnusable(f"The PostgreSQL address has no port number from 1 to {LAST_PORT}: {_FORM}")
    return params


def _keywords() -> set[str]:
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


class Line:
    """One connection: made at its first use, and again at the next use after it was lost."""

    def __init__(self, address: Address, greet: Callable[[Connection], None]) -> None:
        self._address = address
        self._greet = greet
        self._connection: Connection | None = None

    @contextmanager
    def use(self) -> Generator[Connection]:
        """Lend the connection; errors come out as sentences."""
        with translated(self._address):
            try:
                if self._connection is None:
                    self._connection = connected(self._address, self._greet)
                yield self._connection
            except psycopg.Error as error:
                fatal = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
                if fatal or self._closed or error.sqlstate == READ_ONLY:
                    self.drop()
                raise

    def drop(self) -> None:
        """Let go of the connection; an open transaction is undone by the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @property
    def pid(self) -> int:
        """The number of the server's process at the other end, by which others know who told them something."""
        return 0 if self._connection is None else self._connection.info.backend_pid

    @property
    def in_transaction(self) -> bool:
        """Whether something was begun that is neither committed nor undone."""
        status = psycopg.pq.TransactionStatus
        connection = self._connection
        return connection is not None and connection.info.transaction_status not in (status.IDLE, status.UNKNOWN)

    @property
    def _closed(self) -> bool:
        return self._connection is None or self._connection.closed


def connected(address: Address, greet: Callable[[Connection], None]) -> Connection:
    """Make a connection that has been greeted, or none."""
    connection = psycopg.connect(address.conninfo, autocommit=True, prepare_threshold=0)
    try:
        greet(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def translated(address: Address) -> Generator[None]:
    """Let errors out as sentences."""
    try:
        yield
    except psycopg.Error as error:
        raise in_words(error, address) from error


@contextmanager
def together(connection: Connection) -> Generator[None]:
    """Send statements without waiting for each other's answers; the first error is raised when all are sent.

    psycopg would log a second error, of the statements that were skipped because of the first.
    """
    failed: psycopg.Error | None = None
    try:
        with connection.pipeline():
            try:
                yield
            except psycopg.Error as error:
                failed = error
    except psycopg.errors.PipelineAborted as skipped:
        failed = failed or skipped
    if failed is not None:
        raise failed


class _Case(NamedTuple):
    """What a kind of error means; `signs` are codes of PostgreSQL, or without one, words of libpq."""

    signs: tuple[str, ...]
    kind: type[StoreError | Conflict]
    sentence: str


_FULL_HOUSE: Final = (
    "PostgreSQL at {server} has no connection to spare ({text}). It will be tried again; raise max_connections if it "
    "stays so."
)
_WITHOUT_CODE: Final = (
    _Case(
        ("connection is bad: invalid", "bad value for"),
        StoreUnusable,
        "The address of PostgreSQL at {server} asks for something that cannot be ({text}). Correct it.",
    ),
    _Case(("too many", "connection slots"), StoreUnavailable, _FULL_HOUSE),
    _Case(
        ("starting up", "shutting down", "in recovery mode", "yet accepting connections"),
        StoreUnavailable,
        "PostgreSQL at {server} is just starting or stopping ({text}). It will be tried again.",
    ),
    _Case(
        ("password", "authenticat", "pg_hba", 'role "', "certificate", "does not support SSL"),
        StoreUnusable,
        "PostgreSQL at {server} does not let Halter in ({text}). Check the user, the password and the server's "
        "pg_hba.conf.",
    ),
    _Case(
        ('database "',),
        StoreUnusable,
        "PostgreSQL at {server} has no database of that name ({text}). Make it, for example with createdb.",
    ),
    _Case(
        ("",),
        StoreUnavailable,
        "PostgreSQL at {server} cannot be reached ({text}). What it did not confirm will be tried again, and is never "
        "done twice. Check that it runs and that the address is right.",
    ),
)
_WITH_CODE: Final = (
    _Case(("40", "23505"), Conflict, "Another process wrote the same rows to {place} first ({text})."),
    _Case(
        ("22", "23", "54"),
        RowRefused,
        f"The database {{place}} refused a row ({{text}}). {REFUSED}",
    ),
    _Case(("53300",), StoreUnavailable, _FULL_HOUSE),
    _Case(
        ("53100",),
        StoreUnavailable,
        "The disk of PostgreSQL at {place} is full. Nothing was written; free some space and it goes on.",
    ),
    _Case(
        ("55P03",),
        StoreUnavailable,
        "Rows of {place} have been locked by another process for too long. Nothing was written; it will be tried "
        "again. If it stays so, look into pg_stat_activity for a program that keeps a transaction open.",
    ),
    _Case(
        ("08", "25P03", "53", "57", "58"),
        StoreUnavailable,
        "PostgreSQL at {place} could not do its work ({text}). What it did not confirm will be tried again, and is "
        "never done twice.",
    ),
    _Case(
        (READ_ONLY,),
        StoreUnavailable,
        "PostgreSQL at {place} can only be read ({text}). Nothing was written; it will be tried again. If it stays so, "
        "name the primary server, or make the database writable.",
    ),
    _Case(
        ("28", "42501"),
        StoreUnusable,
        "PostgreSQL at {place} does not allow this ({text}). Give Halter's user the right to make a schema and to "
        "own what is in it.",
    ),
    _Case(
        ("XX",),
        StoreUnusable,
        "The database {place} is damaged ({text}). Restore it from a backup, or name another one.",
    ),
    _Case(
        ("",),
        StoreUnusable,
        "The database {place} did not understand what was asked of it ({text}). If somebody changed its tables by "
        "hand, restore it from a backup.",
    ),
)


def in_words(error: psycopg.Error, address: Address) -> StoreError | Conflict:
    """Turn PostgreSQL's error into a sentence for the person who can act.

    Why a connection could not be made is told by libpq in words only; what is not among them may well pass.
    """
    text = re.sub(r"\s+", " ", error.diag.message_primary or str(error)).strip()
    if not error.sqlstate and (isinstance(error, psycopg.OperationalError) or text.startswith("bad value for")):
        case = next(case for case in _WITHOUT_CODE if any(word in text for word in case.signs))
    else:
        code = error.sqlstate or ("22" if isinstance(error, psycopg.DataError) else "")
        case = next(case for case in _WITH_CODE if code.startswith(case.signs))
    return case.kind(case.sentence.format(server=address.server, place=address.place, text=text))

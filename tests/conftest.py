"""What tests ask of the machine: a PostgreSQL server with a schema for each test, and a disk that can be full."""

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings
from psycopg import sql
from xdist.scheduler import LoadScopeScheduling

from halter.journal.postgres import PostgresEngine
from halter.testing.postgres import PostgresMissing, find_postgres_binaries, throwaway_cluster
from tests.memory import Memory

# No test asks how fast it is: the machine may be busy with something else.
settings.register_profile("few", deadline=None, max_examples=40)
settings.register_profile("many", deadline=None, max_examples=1000)
settings.load_profile("few")

DISPATCHER = "HALTER_TEST_DISPATCHER"

TOGETHER = (
    "tests/aimock/",
    "tests/architecture/",
    "tests/browser/",
    "tests/wheel/",
    "tests/golden/test_upgrade.py",
    "tests/story/test_cli_completion.py",
    "tests/story/test_cli_help.py",
    "tests/story/test_demo_night.py",
    "tests/story/test_drills_journal.py",
    "tests/unit/test_disk.py",
    "tests/unit/test_query_plans.py",
    "tests/wires/test_docs_programs.py",
)
"""Tests that share what takes long to make, such as a browser: one worker runs them all."""

QUICK = "tests/unit/"
"""Tests that take less time than handing them out one by one: a worker gets a file of them."""


class Scheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(QUICK):
            return nodeid.partition("::")[0]
        return next((text for text in TOGETHER if nodeid.startswith(text)), nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        # What is done is dropped, for every pending test is counted each time.
        nodeid = self.registered_collections[node][item_index]
        scope = self._split_scope(nodeid)
        unit = self.assigned_work[node][scope]
        unit[nodeid] = True
        if all(unit.values()):
            del self.assigned_work[node][scope]
        self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--dispatcher", choices=["embedded", "distributed"], default="embedded", help="what the stories run on"
    )


IN_MEMORY = Path("/dev/shm")  # noqa: S108  pytest makes a folder there that only its user may read
ENOUGH = 4 << 30


def use_memory_as_disk() -> None:
    """Put temporary files into memory where there is room: thousands of commits would each wait for the disk."""
    if "TMPDIR" in os.environ or not os.access(IN_MEMORY, os.W_OK):
        return
    place = os.statvfs(IN_MEMORY)
    if place.f_bavail * place.f_frsize >= ENOUGH and not place.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = str(IN_MEMORY)


def keep_home_apart(config: pytest.Config) -> None:
    """Give the tests a home of their own: what is kept there of stores must not meet the next run's."""
    if not hasattr(config, "workerinput"):
        os.environ["HOME"] = folder = tempfile.mkdtemp(prefix="halter-home-")
        for xdg in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            os.environ.pop(xdg, None)
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_configure(config: pytest.Config) -> None:
    use_memory_as_disk()
    keep_home_apart(config)
    # Those who help the stories along are plain functions, and processes that they start are told the same way.
    os.environ[DISPATCHER] = config.getoption("--dispatcher")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        # Where tests run, and not where they are handed out.
        config.pluginmanager.register(Memory())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in what a shell starts in the background; the programs that tests start would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker("both_dispatchers") is not None
    if marked and metafunc.config.getoption("--dispatcher") == "embedded":
        # Without another name, so that the seed of its world, which is made of it, stays the same.
        embedded = pytest.param("embedded", id=pytest.HIDDEN_PARAM)
        metafunc.fixturenames.insert(0, "chosen_dispatcher")
        metafunc.parametrize("chosen_dispatcher", [embedded, "distributed"], indirect=True)


@pytest.fixture
def chosen_dispatcher(request: pytest.FixtureRequest) -> Iterator[None]:
    before, os.environ[DISPATCHER] = os.environ[DISPATCHER], request.param
    yield
    os.environ[DISPATCHER] = before


@pytest.fixture(scope="session")
def postgres_binaries() -> None:
    """Skip loudly where there is no PostgreSQL; where everything is required, fail."""
    try:
        find_postgres_binaries()
    except PostgresMissing as missing:
        if os.environ.get("HALTER_REQUIRE_ALL") == "1":
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def postgres_url(postgres_binaries: None) -> Iterator[str]:
    # Tests of faults have servers of their own, which keep what they have acknowledged whatever happens.
    with throwaway_cluster({"fsync": "off", "full_page_writes": "off"}) as cluster:
        yield cluster.url


@pytest.fixture
def empty_schema_url(postgres_url: str) -> Iterator[str]:
    """A schema that does not exist yet, for a test that is about how it is made."""
    schema = f"test_{uuid.uuid4().hex}"
    yield f"{postgres_url}?schema={schema}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


@pytest.fixture(scope="session")
def shared_schema(postgres_url: str) -> Iterator["SharedSchema"]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield SharedSchema(postgres_url, connection)


@pytest.fixture
def postgres_schema_url(shared_schema: "SharedSchema") -> str:
    return shared_schema.prepare()


class SharedSchema:
    """One migrated schema that is emptied for each test: the migrations take longer than most tests."""

    SHAPE = """
        SELECT md5(string_agg(item, ',' ORDER BY item)) FROM (
            SELECT concat_ws(' ', relname, relkind, relnatts, reltablespace, relowner) FROM pg_class
            WHERE relnamespace = %(schema)s::regnamespace
            UNION ALL
            SELECT concat_ws(' ', tgname, tgenabled) FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
            WHERE relnamespace = %(schema)s::regnamespace AND NOT tgisinternal
            UNION ALL
            SELECT concat_ws(' ', proname, xmin) FROM pg_proc WHERE pronamespace = %(schema)s::regnamespace
        ) AS items (item)"""

    def __init__(self, server: str, connection: psycopg.Connection) -> None:
        self._server = server
        self._connection = connection
        self._schema = ""
        self._shape = ""
        self._tables: list[str] = []
        self._meta: dict[str, str] = {}

    def prepare(self) -> str:
        if not self._schema or self._read_shape(self._connection) != self._shape:
            self._create(self._connection)
        else:
            self._empty(self._connection)
        return self._url()

    def _url(self) -> str:
        return f"{self._server}?schema={self._schema}"

    def _create(self, connection: psycopg.Connection) -> None:
        self._schema = f"test_{uuid.uuid4().hex}"
        PostgresEngine(self._url(), new_id=lambda: uuid.uuid4().hex).close()
        self._shape = self._read_shape(connection)
        tuple_rows = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = %s", [self._schema]
        ).fetchall()
        self._tables = [name for (name,) in tuple_rows if name != "meta"]
        self._meta = dict(connection.execute(f"SELECT name, value FROM {self._schema}.meta").fetchall())

    def _read_shape(self, connection: psycopg.Connection) -> str:
        try:
            tuple_row = connection.execute(self.SHAPE, {"schema": self._schema}).fetchone()
        except psycopg.errors.InvalidSchemaName:
            return "dropped"
        return tuple_row[0] if tuple_row else "dropped"

    def _empty(self, connection: psycopg.Connection) -> None:
        """Close connections that a test left open, delete all rows, and give the store another id."""
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        tables = (sql.SQL("DELETE FROM {}").format(sql.Identifier(self._schema, table)) for table in self._tables)
        connection.execute(
            sql.SQL("; ").join(
                [
                    sql.SQL("SET search_path TO {}").format(sql.Identifier(self._schema)),
                    sql.SQL("SET session_replication_role TO replica"),
                    *tables,
                    sql.SQL("DELETE FROM meta"),
                ]
            )
        )
        for name, value in (self._meta | {"store": uuid.uuid4().hex}).items():
            connection.execute("INSERT INTO meta (name, value) VALUES (%s, %s)", [name, value])
        connection.execute("SELECT setval(seqrelid, seqstart, false) FROM pg_sequence")


class SmallDisk:
    """A file system in memory that can be full, be enlarged, and become read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, options: str) -> bool:
        command = ["/bin/mount", "-t", "tmpfs", "-o", options, "none", self.folder]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def change(self, options: str) -> None:
        subprocess.run(["/bin/mount", "-o", f"remount,{options}", self.folder], check=True)

    def unmount(self) -> None:
        subprocess.run(["/bin/umount", "--lazy", self.folder], check=True)


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    """Mount a disk of a megabyte, which only root may do."""
    disk = SmallDisk(Path(tempfile.mkdtemp(prefix="halter-small-disk-")))
    mounted = disk.mount("size=1m")
    try:
        if not mounted:
            pytest.skip("This user may not mount a small disk.")
        yield disk
    finally:
        if mounted:
            disk.unmount()
        disk.folder.rmdir()

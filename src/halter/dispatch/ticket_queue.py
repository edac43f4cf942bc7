"""The ticket queue that all workers share. Procrastinate keeps it in the store's own PostgreSQL.

It contains only due sessions: a sleeping session is a row of the store, not a job. Procrastinate does not retry the
jobs of a killed worker: their sessions are offered again when the ticket or the lease expires.
"""

import asyncio
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, Final

import psycopg
import psycopg_pool
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from procrastinate.exceptions import AppNotOpen, ConnectorException
from procrastinate.job_context import JobContext
from procrastinate.jobs import Job, Status
from procrastinate.manager import JobManager
from procrastinate.worker import Worker

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreError
from halter.core.events import SESSION_FORMAT
from halter.core.ids import SessionId
from halter.core.ports import Ticket
from halter.dispatch.dispatcher import ServeTicket
from halter.journal.connection import PostgresAddress, open_greeted_connection, translate_postgres_error
from halter.loop.concurrency import raise_if_cancelled

SERVE_TASK: Final = "halter.serve"
POLL_SECONDS: Final = 5.0
"""Polling interval; NOTIFY announces jobs."""
HEARTBEAT_SECONDS: Final = 5.0
STALLED_SECONDS: Final = 30.0
"""Time without a heartbeat after which the jobs of a worker are dropped."""
MIN_PAUSE: Final = SECOND // 10
MAX_PAUSE: Final = SECOND
CONNECTIONS: Final = 4

_CONNECTION_ERRORS: Final = (AppNotOpen, ConnectorException, psycopg.Error, psycopg_pool.PoolTimeout)


class ProcrastinateQueue:
    """Tickets as jobs. Each version of each agent has its own queue.

    `versions` are the agents of this worker, with their versions. While PostgreSQL is unavailable, no ticket is served,
    and sessions keep running.
    """

    def __init__(self, url: str, clock: Clock, versions: Mapping[str, str]) -> None:
        self._address = PostgresAddress(url)
        self._clock = clock
        self._versions = versions
        # Tickets are sent over the store's own connection, so this connector is never opened.
        self._putting = JobManager(SyncPsycopgConnector())

    def enqueue(self, connection: Any, tickets: Sequence[Ticket]) -> None:
        try:
            self._putting.batch_defer_jobs([self._job(ticket) for ticket in tickets], connection)
        except ConnectorException as error:
            # The owner of the transaction handles PostgreSQL errors.
            raise error.__cause__ or error from error

    def _job(self, ticket: Ticket) -> Job:
        arguments = {"session": ticket.session, "agent": ticket.agent, "generation": ticket.generation}
        queue = name_queue(ticket.agent, self._versions[ticket.agent])
        return Job(queue=queue, lock=None, queueing_lock=None, task_name=SERVE_TASK, task_kwargs=arguments)

    async def serve(self, serve: ServeTicket, concurrency: int) -> None:
        """Serve tickets until cancelled, and reconnect when the connection is lost."""
        with _silence_libraries():
            delay = MIN_PAUSE
            while True:
                with suppress(*_CONNECTION_ERRORS):
                    await _require_reachable(self._address)
                    async with _open_procrastinate(self._address) as app:
                        delay = MIN_PAUSE
                        await self._work(app, serve, concurrency)
                # The worker raises its last error even when it was cancelled.
                raise_if_cancelled()
                await self._clock.sleep(delay)
                delay = min(2 * delay, MAX_PAUSE)

    async def _work(self, app: App, serve: ServeTicket, concurrency: int) -> None:
        @app.task(name=SERVE_TASK)
        async def serve_job(session: str, agent: str, generation: int) -> None:
            await serve(Ticket(SessionId(session), agent, generation))

        await _drop_stalled(app)
        worker = _Worker(
            app,
            queues=[name_queue(agent, version) for agent, version in self._versions.items()],
            concurrency=concurrency,
            fetch_job_polling_interval=POLL_SECONDS,
            update_heartbeat_interval=HEARTBEAT_SECONDS,
            stalled_worker_timeout=STALLED_SECONDS,
            # Sessions continue without their job.
            shutdown_graceful_timeout=0,
            delete_jobs="always",
            install_signal_handlers=False,
        )
        await worker.run()


class _Worker(Worker):
    """Procrastinate's worker, which stops when its connection is lost, so that it is restarted.

    It stops when the first of its side tasks ends. Without periodic tasks, the deferrer would end immediately, so here
    it drops the jobs of dead workers in a loop.
    """

    async def _periodic_deferrer(self) -> None:
        while True:
            await asyncio.sleep(STALLED_SECONDS)
            await _drop_stalled(self.app)
            await self.app.job_manager.prune_stalled_workers(STALLED_SECONDS)

    async def _monitor_side_tasks(self, side_tasks: list[asyncio.Task[Any]]) -> None:
        await super()._monitor_side_tasks(side_tasks)
        # Closing wakes tasks that wait for the pool.
        await self.app.connector.close_async()

    async def _process_job(self, context: JobContext) -> None:
        try:
            await super()._process_job(context)
        except _CONNECTION_ERRORS:
            # The unfinished job is dropped once this worker has stopped.
            self.stop()


def name_queue(agent: str, version: str) -> str:
    """Return the name of the queue of an agent's version, short enough for a PostgreSQL channel.

    Programs with another session format have other queues: an older one could not claim the sessions of a newer one.
    """
    digest = sha256(f"{SESSION_FORMAT} {version} {agent}".encode()).hexdigest()
    return f"{re.sub(r'[^a-z0-9-]', '', agent.lower())[:20]}.{digest[:16]}"


_DROP_UNCLAIMED: Final = """
DELETE FROM procrastinate_jobs WHERE status = 'todo'
AND id IN (SELECT job_id FROM procrastinate_events WHERE type = 'deferred' AND at < now() - interval '1 hour')
"""


async def _drop_stalled(app: App) -> None:
    """Drop the jobs of dead workers and of versions that no worker has. Their sessions are offered again."""
    jobs = app.job_manager
    await app.connector.execute_query_async(_DROP_UNCLAIMED)
    for job in await jobs.get_stalled_jobs(seconds_since_heartbeat=STALLED_SECONDS):
        # Another worker may have dropped it at the same time.
        with suppress(ConnectorException):
            await jobs.finish_job(job, Status.FAILED, delete_job=True)


async def _require_reachable(address: PostgresAddress) -> None:
    """Raise an error if the server is unreachable. The library itself would wait for it, longer each time."""
    async with await psycopg.AsyncConnection.connect(address.conninfo):
        pass


def _open_procrastinate(address: PostgresAddress) -> Any:
    """Return an opener of Procrastinate in the schema of the store.

    Each statement is independent, and a lost connection is noticed on use, so connections are not checked first.
    """
    connector = PsycopgConnector(
        pool_factory=_make_unchecked_pool,
        conninfo=address.conninfo,
        kwargs={"options": f"-c search_path={address.schema}"},
        configure=_set_autocommit,
        min_size=1,
        max_size=CONNECTIONS,
        timeout=5,
        reconnect_timeout=5,
    )
    return App(connector=connector).open_async()


async def _set_autocommit(connection: psycopg.AsyncConnection[Any]) -> None:
    await connection.set_autocommit(True)


def _make_unchecked_pool(*, check: object, **options: Any) -> psycopg_pool.AsyncConnectionPool:
    del check
    return psycopg_pool.AsyncConnectionPool(**options)


def prepare_queue_tables(url: str) -> None:
    """Create Procrastinate's tables in the store's schema; of several processes that start together, one does it."""
    address = PostgresAddress(url)
    try:
        with open_greeted_connection(address, lambda _: None) as connection, connection.transaction():
            connection.execute("SELECT set_config('search_path', quote_ident(%s), true)", [address.schema])
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('halter ' || %s, 0))", [address.schema])
            exists = connection.execute("SELECT to_regclass('procrastinate_jobs') IS NOT NULL").fetchone()
            if exists != (True,):
                from procrastinate.schema import SchemaManager

                connection.execute(SchemaManager.get_schema(), prepare=False)
    except psycopg.Error as error:
        store_error = translate_postgres_error(error, address)
        raise store_error if isinstance(store_error, StoreError) else error from error


@contextmanager
def _silence_libraries() -> Generator[None]:
    """Keep the libraries from logging tracebacks to the terminal: the store reports problems in sentences."""
    loggers = [logging.getLogger(name) for name in ("procrastinate", "psycopg.pool")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

"""What the queue of tickets promises to all who work on one store: the one in memory, and the one in PostgreSQL."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import psycopg
import pytest
from psycopg import sql

from halter.core.clock import SystemClock
from halter.core.ids import SessionId, SortableIds
from halter.core.ports import Ticket
from halter.dispatch.dispatcher import ServeTicket, TicketQueue
from halter.dispatch.ticket_queue import ProcrastinateQueue, name_queue, prepare_queue_tables
from halter.journal.connection import PostgresAddress
from halter.journal.open import open_engine
from halter.testing.fakes import LocalTicketQueue, SharedTickets
from halter.testing.postgres import throwaway_cluster

CLOCK = SystemClock()
PATIENCE = 60.0
CLERK = {"clerk": "1"}


class Shared(Protocol):
    """What all workers share."""

    def hand(self, versions: Mapping[str, str]) -> TicketQueue:
        """Make one worker's hand on it."""
        ...

    def put(self, by: TicketQueue, *tickets: Ticket) -> None:
        """Put tickets in, and commit."""
        ...


class InMemory:
    def __init__(self) -> None:
        self._tickets = SharedTickets()

    def hand(self, versions: Mapping[str, str]) -> TicketQueue:
        return LocalTicketQueue(self._tickets, versions)

    def put(self, by: TicketQueue, *tickets: Ticket) -> None:
        by.enqueue(None, tickets)


class OnPostgres:
    def __init__(self, url: str) -> None:
        self.url = url
        # The store makes the schema.
        open_engine(url, clock=CLOCK, ids=SortableIds(CLOCK.now)).close()
        prepare_queue_tables(url)

    def hand(self, versions: Mapping[str, str]) -> TicketQueue:
        return ProcrastinateQueue(self.url, CLOCK, versions)

    def put(self, by: TicketQueue, *tickets: Ticket) -> None:
        with self.connected() as connection:
            by.enqueue(connection, tickets)

    def connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Open a transaction in the schema of the store."""
        address = PostgresAddress(self.url)
        connection = psycopg.connect(address.conninfo)
        connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(address.schema)))
        connection.commit()
        return connection

    def age(self) -> None:
        """Let everybody who was heard of have been silent for an hour."""
        with self.connected() as connection:
            connection.execute("UPDATE procrastinate_workers SET last_heartbeat = NOW() - INTERVAL '1 hour'")

    def count(self, table: str) -> int:
        with self.connected() as connection:
            results = connection.execute(sql.SQL("SELECT COUNT(*) FROM {}").format(sql.Identifier(table))).fetchone()
        assert results is not None
        return results[0]


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def shared(request: pytest.FixtureRequest) -> Shared:
    return InMemory() if request.param == "memory" else OnPostgres(request.getfixturevalue("postgres_schema_url"))


@pytest.fixture
def on_postgres(postgres_schema_url: str) -> OnPostgres:
    return OnPostgres(postgres_schema_url)


def ticket(number: int | str, agent: str = "clerk", generation: int = 0) -> Ticket:
    return Ticket(SessionId(f"{agent}-{number}"), agent, generation)


def tickets(count: int) -> Sequence[Ticket]:
    return [ticket(number) for number in range(count)]


class Served:
    """What came to whom; and somebody can wait until so much has."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self._news = asyncio.Event()

    async def serve(self, came: Ticket) -> None:
        self.saw(came)

    def saw(self, came: Ticket) -> None:
        self.tickets.append(came)
        self._news.set()

    async def until(self, holds: Callable[[Sequence[Ticket]], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds(self.tickets):
                self._news.clear()
                await self._news.wait()

    async def count(self, number: int) -> None:
        await self.until(lambda found: len(found) >= number)


@asynccontextmanager
async def serving(hand: TicketQueue, serve: ServeTicket, concurrency: int = 10) -> AsyncIterator[None]:
    """Hand tickets out while the block runs."""
    task = asyncio.create_task(hand.serve(serve, concurrency))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_ticket_comes_as_it_was_put_in(shared: Shared) -> None:
    served, hand = Served(), shared.hand(CLERK)
    shared.put(hand, ticket(1, generation=7))
    async with serving(hand, served.serve):
        await served.count(1)
        shared.put(hand, ticket(2, generation=2**40))
        await served.count(2)
    assert served.tickets == [ticket(1, generation=7), ticket(2, generation=2**40)]


async def test_each_ticket_is_handed_out_once_whoever_takes_it(shared: Shared) -> None:
    served, hands = Served(), [shared.hand(CLERK) for _ in range(3)]
    shared.put(hands[0], *tickets(20))
    async with serving(hands[0], served.serve), serving(hands[1], served.serve), serving(hands[2], served.serve):
        shared.put(hands[1], *(ticket(number) for number in range(20, 40)))
        await served.count(40)
        shared.put(hands[2], ticket("last"))
        await served.until(lambda found: ticket("last") in found)
    assert sorted(came.session for came in served.tickets) == sorted(
        [*(one.session for one in tickets(40)), ticket("last").session]
    )


async def test_what_was_put_in_while_nobody_worked_is_waited_for(shared: Shared) -> None:
    served, hand = Served(), shared.hand(CLERK)
    async with serving(hand, served.serve):
        shared.put(hand, ticket(1))
        await served.count(1)
    shared.put(hand, ticket(2))
    async with serving(shared.hand(CLERK), served.serve):
        await served.count(2)
    assert served.tickets == [ticket(1), ticket(2)]


async def test_only_who_has_the_version_of_the_agent_is_given_its_tickets(shared: Shared) -> None:
    older, newer = Served(), Served()
    old, new = shared.hand({"clerk": "1"}), shared.hand({"clerk": "2", "writer": "1"})
    shared.put(old, ticket("old"))
    shared.put(new, ticket("new"), ticket("new", "writer"))
    async with serving(new, newer.serve):
        await newer.count(2)
        async with serving(old, older.serve):
            await older.count(1)
    assert older.tickets == [ticket("old")]
    assert {*newer.tickets} == {ticket("new"), ticket("new", "writer")}


async def test_no_more_are_served_at_once_than_were_asked_for(shared: Shared) -> None:
    served, hand, go_on = Served(), shared.hand(CLERK), asyncio.Semaphore(0)
    running, most_at_once = 0, 0

    async def serve(came: Ticket) -> None:
        nonlocal running, most_at_once
        running += 1
        most_at_once = max(most_at_once, running)
        served.saw(came)
        await go_on.acquire()
        running -= 1

    shared.put(hand, *tickets(9))
    async with serving(hand, serve, concurrency=3):
        for number in range(3, 10):
            await served.count(number)
            assert running == 3
            go_on.release()
        go_on.release()
        go_on.release()
    assert most_at_once == 3
    assert len({*served.tickets}) == 9


class Broken(Exception):
    """Whoever served a ticket broke down."""


@pytest.mark.parametrize("breakdown", [Broken("oh dear"), asyncio.CancelledError()], ids=["fails", "is cancelled"])
async def test_serving_that_breaks_down_keeps_no_other_ticket_from_being_served(
    shared: Shared, breakdown: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    served, hand = Served(), shared.hand(CLERK)

    async def serve(came: Ticket) -> None:
        served.saw(came)
        if came.session.endswith(("1", "3")):
            raise breakdown

    shared.put(hand, *tickets(6))
    async with serving(hand, serve, concurrency=1):
        await served.count(6)
        shared.put(hand, ticket(6))
        await served.count(7)
    assert served.tickets == tickets(7)
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_who_is_cancelled_stops_what_is_served_and_hands_out_nothing_more(shared: Shared) -> None:
    served, hand, stopped = Served(), shared.hand(CLERK), Served()

    async def serve(came: Ticket) -> None:
        served.saw(came)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.saw(came)

    async with serving(hand, serve, concurrency=2):
        shared.put(hand, *tickets(3))
        await served.count(2)
    await stopped.count(2)
    assert len(served.tickets) == 2


ODD_NAMES = ["a" * 100, "a" * 99 + "b", "The night watch, No. 2", "Büro 雪☃", "☃", "a.b_c'd\"e%s{}", "CLERK", "clerk"]


async def test_agents_may_be_called_anything(shared: Shared) -> None:
    served, hand = Served(), shared.hand(dict.fromkeys(ODD_NAMES, "1"))
    async with serving(hand, served.serve):
        shared.put(hand, *(ticket(1, name) for name in ODD_NAMES))
        await served.count(len(ODD_NAMES))
    assert {*served.tickets} == {ticket(1, name) for name in ODD_NAMES}


def test_each_version_of_each_agent_has_a_name_of_its_own_that_a_channel_can_have() -> None:
    names = [name_queue(name, version) for name in ODD_NAMES for version in ("1", "2", "f" * 64)]
    assert len({*names}) == len(names)
    # PostgreSQL cuts longer names off, and Procrastinate puts words of its own before them.
    assert all(name.isascii() and len(name) <= 40 for name in names)


@pytest.mark.postgres
async def test_what_is_rolled_back_is_never_handed_out(on_postgres: OnPostgres) -> None:
    served, hand = Served(), on_postgres.hand(CLERK)
    async with serving(hand, served.serve):
        with on_postgres.connected() as connection:
            hand.enqueue(connection, tickets(3))
            connection.rollback()
        with on_postgres.connected() as connection:
            hand.enqueue(connection, [ticket(3)])
            on_postgres.put(hand, ticket(4))
            await served.count(1)
            assert served.tickets == [ticket(4)]
        await served.count(2)
    assert served.tickets == [ticket(4), ticket(3)]
    assert on_postgres.count("procrastinate_jobs") == 0


@pytest.mark.postgres
async def test_handing_out_continues_after_the_server_was_stopped_hard(
    postgres_binaries: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with throwaway_cluster() as cluster:
        shared, served = OnPostgres(cluster.url), Served()
        hand = shared.hand(CLERK)
        async with serving(hand, served.serve):
            for number in range(2):
                shared.put(hand, ticket(number))
                await served.until(lambda found, number=number: ticket(number) in found)
                await asyncio.to_thread(cluster.stop_hard)
                await asyncio.to_thread(cluster.start)
            shared.put(hand, ticket(2))
            await served.until(lambda found: ticket(2) in found)
        # What could not be ticked off is dropped when whoever had it has not been heard of for a while.
        shared.age()
        async with serving(hand, served.serve):
            shared.put(hand, ticket(3))
            await served.until(lambda found: ticket(3) in found)
        left = shared.count("procrastinate_jobs")
    gc.collect()
    # One that was just being ticked off when the server went may come again: who has it already is not had by it.
    assert {*served.tickets} == {*tickets(4)}
    assert capfd.readouterr() == ("", "")
    assert left == 0


VICTIM = """
import asyncio, sys
from halter.core.clock import SystemClock
from halter.dispatch.ticket_queue import ProcrastinateQueue

async def serve(ticket):
    print(ticket.session, flush=True)
    await asyncio.Event().wait()

asyncio.run(ProcrastinateQueue(sys.argv[1], SystemClock(), {"clerk": "1"}).serve(serve, 2))
"""


@pytest.mark.postgres
async def test_the_jobs_of_a_killed_worker_are_dropped_and_its_tables_do_not_grow(on_postgres: OnPostgres) -> None:
    served, hand = Served(), on_postgres.hand(CLERK)
    on_postgres.put(hand, *tickets(2))
    command = [sys.executable, "-c", VICTIM, on_postgres.url]
    victim = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert victim.stdout is not None
    for _ in range(2):
        await victim.stdout.readline()
    victim.kill()
    await victim.wait()
    assert on_postgres.count("procrastinate_jobs") == 2
    on_postgres.age()
    async with serving(hand, served.serve):
        on_postgres.put(hand, *(ticket(number) for number in range(2, 30)))
        await served.count(28)
    # What the dead one had is not handed out again: whoever finds its session due, or orphaned, offers it anew.
    assert sorted(served.tickets, key=lambda came: int(came.session[6:])) == [ticket(number) for number in range(2, 30)]
    numbers = [on_postgres.count(f"procrastinate_{table}") for table in ("jobs", "events", "workers")]
    assert numbers == [0, 0, 0]

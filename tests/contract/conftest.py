"""Every kind of store, opened by its URL as a user would."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
import pytest_asyncio

from halter.core.clock import SECOND
from halter.core.ids import SortableIds
from halter.journal.open import open_store
from halter.journal.sqlite import LEASE_DURATION
from halter.journal.store import JournalStore

KINDS = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


class TickingClock:
    """A clock that goes on a little whenever it is looked at: what is good for a microsecond is over by then."""

    def __init__(self) -> None:
        self.time = 1_767_225_600 * SECOND

    def now(self) -> int:
        self.time += 10
        return self.time

    async def sleep(self, duration: int) -> None:
        self.time += duration


class Place:
    """Where stores can be opened, several on the same database, and looked at with plain SQL."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.clock = TickingClock()
        self._ids = SortableIds(self.clock.now)
        self._opened: list[JournalStore] = []

    def open(self, lease: int = LEASE_DURATION) -> JournalStore:
        store = open_store(self.url, clock=self.clock, ids=self._ids, lease=lease)
        self._opened.append(store)
        return store

    def sql(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run a statement past all code of Halter; parameters are written as `?`."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url)) as file, file:
                return file.execute(statement, params).fetchall()
        schema = parse_qs(urlsplit(self.url).query)["schema"][0]
        with psycopg.connect(self.url.partition("?")[0], autocommit=True) as server:
            server.execute(f"SET search_path TO {schema}".encode())
            cursor = server.execute(statement.replace("?", "%s").encode(), params)
            return cursor.fetchall() if cursor.description else []

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


def _url(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    match kind:
        case "memory":
            return "memory:"
        case "sqlite":
            return str(folder / "store.db")
        case _:
            return request.getfixturevalue("postgres_schema_url")


@pytest_asyncio.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(request.param, _url(request.param, request, tmp_path))
    yield place
    await place.close()


@pytest_asyncio.fixture(params=KINDS[1:])
async def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place that several store objects, and so several processes, can share."""
    place = Place(request.param, _url(request.param, request, tmp_path))
    yield place
    await place.close()


@pytest_asyncio.fixture(params=KINDS[:2])
async def clocked_place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place whose time is the test's own; PostgreSQL has a clock of its own."""
    place = Place(request.param, _url(request.param, request, tmp_path))
    yield place
    await place.close()


@pytest.fixture
def store(place: Place) -> JournalStore:
    return place.open()

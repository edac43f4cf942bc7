"""A store that is away, or of another version: a sentence and a status, and the server lives."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from halter.core.errors import StoreUnavailable, StoreUnusable
from halter.runtime.feed import Bus
from halter.server.middleware import ServerLimits
from halter.server.responses import Feed
from tests.server.conftest import QUICK, GroundClock, House, make_office
from tests.server.fickle import Fickle


@pytest.mark.parametrize(
    ("trouble", "retry"),
    [(StoreUnavailable("The store cannot be reached."), True), (StoreUnusable("The schema is newer."), False)],
)
async def test_a_failure_of_the_store_is_reported_with_a_time_to_retry(
    tmp_path: Path, trouble: Exception, *, retry: bool
) -> None:
    office = await make_office(tmp_path)
    store = Fickle(office.app.store)
    office.app = replace(office.app, store=cast("Any", store))
    house = House(office, tmp_path, cast("ServerLimits", QUICK))
    try:
        async with house.client("admin") as client:
            assert (await client.get("/api/home")).status_code == 200
            store.trouble = trouble
            for ask in (client.get("/api/home"), client.post("/api/halts", json={"scope": "fleet"})):
                answer = await ask
                assert (answer.status_code, answer.json()) == (503, {"error": str(trouble)})
                assert ("retry-after" in answer.headers) is retry
            assert (await client.get("/healthz")).status_code == 200
            store.trouble = None
            assert (await client.get("/api/home")).status_code == 200
        # The metrics may have been read in the meantime.
        assert not [report for report in house.reports if not report.startswith("Metrics are late")]
    finally:
        await house.end()
        await office.ground.store.close()


async def test_a_feed_that_is_ended_at_any_moment_while_its_store_is_away_ends(tmp_path: Path) -> None:
    office = await make_office(tmp_path)
    store = Fickle(office.app.store)
    clock = GroundClock(office.ground)
    try:
        for moments in range(60):
            store.trouble = None
            feed = Feed(cast("Any", store), clock, office.app.ids, Bus(cast("Any", store), clock))
            reading = asyncio.create_task(feed.run())
            await feed.ready.wait()
            store.trouble = StoreUnavailable("The store cannot be reached.")
            for _ in range(moments):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading], timeout=10)
            assert reading.cancelled(), moments
    finally:
        await office.ground.store.close()

"""A store that is away, or of another version: a sentence and a status, and the server lives."""

from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from halter.core.errors import StoreUnavailable, StoreUnusable
from halter.server.middleware import ServerLimits
from tests.server.conftest import QUICK, House, furnished
from tests.server.fickle import Fickle


@pytest.mark.parametrize(
    ("trouble", "retry"),
    [(StoreUnavailable("The store cannot be reached."), True), (StoreUnusable("The schema is newer."), False)],
)
async def test_what_a_store_cannot_do_is_said_and_asked_again_later(
    tmp_path: Path, trouble: Exception, *, retry: bool
) -> None:
    office = await furnished(tmp_path)
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
        assert not house.told
    finally:
        await house.end()
        await office.ground.store.close()

"""Wrong tokens are limited wherever one can be shown, and nobody is locked out by a neighbour."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from halter.core.clock import MINUTE, SECOND
from halter.server.api import make_hooks_api
from halter.server.auth import make_secret
from halter.server.middleware import (
    MAX_BUCKETS,
    MAX_PROVEN_TOKENS,
    PROXY_FACTOR,
    Attempts,
    ClientOrigin,
    ServerLimits,
    locate_client,
)
from halter.testing.fakes import ManualClock
from halter.testing.world import World
from tests.server.conftest import House, make_office
from tests.story.test_webhooks import TOKEN, started

FEW = ServerLimits(failures=3)
PROXY = {"X-Forwarded-For": "198.51.100.7"}


@pytest.fixture
def clock() -> ManualClock:
    """Time stands still, so that nothing is allowed again before a test says so."""
    return ManualClock(1_800_000_000 * SECOND)


@pytest.fixture
async def house(tmp_path: Path, limits: ServerLimits, clock: ManualClock) -> AsyncIterator[House]:
    office = await make_office(tmp_path)
    made = House(office, tmp_path, limits, clock)
    yield made
    await made.end()
    await office.ground.store.close()


def wrong() -> dict[str, str]:
    return {"Authorization": f"Bearer {make_secret()}"}


async def statuses(client: httpx2.AsyncClient, count: int, path: str = "/api/whoami") -> list[int]:
    return [(await client.get(path, headers=wrong())).status_code for _ in range(count)]


@pytest.mark.parametrize("limits", [FEW])
@pytest.mark.parametrize("path", ["/api/whoami", "/api/stream", "/", "/nothing"])
async def test_wrong_bearer_tokens_are_limited_by_address_like_log_ins(
    house: House, clock: ManualClock, path: str
) -> None:
    async with house.client() as attacker, house.client("admin", place="127.0.0.2") as async_client:
        assert await statuses(attacker, 5, path) == [401, 401, 401, 429, 429]
        late = await attacker.get(path, headers=wrong())
        assert int(late.headers["retry-after"]) >= 1
        right = {"Authorization": f"Bearer {house.secrets['viewer']}"}
        assert (await attacker.get("/api/whoami", headers=right)).status_code == 429
        assert (await attacker.post("/login", data={"token": house.secrets["admin"]},
                                    headers={"Origin": house.base})).status_code == 429  # fmt: skip
        assert (await async_client.get("/api/whoami")).status_code == 200
        clock.advance(MINUTE)
        assert (await attacker.get("/api/whoami", headers=right)).status_code == 200


@pytest.mark.parametrize("limits", [FEW])
async def test_wrong_tokens_of_a_websocket_are_limited(house: House) -> None:
    numbers: list[int] = []
    for _ in range(5):
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{house.port}/api/ws", additional_headers=wrong(), proxy=None)
        numbers.append(refused.value.response.status_code)
    assert numbers == [401, 401, 401, 429, 429]


@pytest.mark.parametrize("limits", [FEW])
async def test_who_was_let_in_before_is_not_locked_out_by_somebody_at_the_same_address(house: House) -> None:
    async with house.client("viewer") as program, house.client(Origin=house.base) as person, house.client() as attacker:
        await person.post("/login", data={"token": house.secrets["operator"]})
        for each in (program, person):
            assert (await each.get("/api/whoami")).status_code == 200
        assert 429 in await statuses(attacker, 9)
        for each in (program, person):
            assert (await each.get("/api/whoami")).status_code == 200
        response = await person.post("/login", data={"token": house.secrets["operator"]})
        assert response.status_code == 303


@pytest.mark.parametrize("limits", [FEW])
async def test_a_token_that_was_right_and_was_removed_is_limited_like_any_other(house: House) -> None:
    async with house.client("viewer") as program:
        assert (await program.get("/api/whoami")).status_code == 200
        house.tokens.remove("viewer")
        assert [(await program.get("/api/whoami")).status_code for _ in range(5)] == [401, 401, 401, 429, 429]


@pytest.mark.parametrize("limits", [FEW])
async def test_who_comes_through_a_proxy_on_this_machine_is_known_by_the_address_that_the_proxy_adds(
    house: House,
) -> None:
    async with (
        house.client(**PROXY) as attacker,
        house.client("admin", **{"X-Forwarded-For": "203.0.113.9"}) as async_client,
    ):
        assert await statuses(attacker, 5) == [401, 401, 401, 429, 429]
        assert (await async_client.get("/api/whoami")).status_code == 200


@pytest.mark.parametrize("limits", [ServerLimits(failures=3, stale=4)])
async def test_cookies_that_have_ended_are_limited_apart_so_that_their_owner_may_log_in(house: House) -> None:
    async with house.client(Origin=house.base) as client:
        stale = {"Cookie": f"halter_{house.port}={'x' * 43}"}
        status_codes = [(await client.get("/api/whoami", headers=stale)).status_code for _ in range(6)]
        assert status_codes == [401, 401, 401, 401, 429, 429]
        assert (await client.post("/login", data={"token": house.secrets["admin"]}, headers=stale)).status_code == 303
        assert (await client.get("/api/whoami")).status_code == 200


async def test_wrong_tokens_of_a_webhook_are_limited_and_its_right_one_still_works_where_it_worked(
    world: World, tmp_path: Path
) -> None:
    _, hooks = await started(world, tmp_path)
    wire = httpx2.ASGITransport(make_hooks_api(hooks, ManualClock()), client=("192.0.2.1", 1))
    elsewhere = httpx2.ASGITransport(wire.app, client=("192.0.2.2", 1))

    async def sent(transport: httpx2.ASGITransport, token: str, delivery: str) -> int:
        headers = {"Authorization": f"Bearer {token}", "Halter-Delivery": delivery}
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.post("/hooks/desk/tickets", content=b"{}", headers=headers)).status_code

    assert await sent(wire, TOKEN, "one") == 202
    tried = [await sent(wire, f"wrong{n}", "x") for n in range(12)]
    assert tried == [401] * 10 + [429] * 2
    assert await sent(wire, TOKEN, "two") == 202
    tried = [await sent(elsewhere, f"wrong{n}", "x") for n in range(11)]
    assert tried == [401] * 10 + [429]
    assert await sent(elsewhere, TOKEN, "three") == 429


def test_a_place_is_an_address_and_of_version_6_a_whole_network() -> None:
    forwarded = [(b"X-Forwarded-For", b"6.6.6.6, 198.51.100.7")]
    assert locate_client("127.0.0.1", forwarded) == ClientOrigin("127.0.0.1", "198.51.100.7")
    assert locate_client("::1", [(b"x-forwarded-for", b"2001:db8:1:2:3::4")]) == ClientOrigin(
        "::1", "2001:db8:1:2::/64"
    )
    assert locate_client("::ffff:127.0.0.1", forwarded).origin == "198.51.100.7"
    assert locate_client("192.0.2.1", forwarded) == ClientOrigin("192.0.2.1", "192.0.2.1")
    assert locate_client("2001:db8::1").origin == locate_client("2001:db8::ffff:2").origin
    for nonsense in (b"", b"unknown", b"a" * 5000, b"1.2.3.4, x"):
        assert locate_client("127.0.0.1", [(b"x-forwarded-for", nonsense)]) == ClientOrigin("127.0.0.1", "127.0.0.1")
    assert locate_client("") == ClientOrigin("", "")


def test_who_makes_up_forwarded_addresses_is_limited_as_one_and_locks_out_nobody_who_is_in() -> None:
    attempts = Attempts(3)
    text, person = "127.0.0.1", ClientOrigin("127.0.0.1", "203.0.113.9")
    attempts.right(person, "theirs")
    for number in range(3 * PROXY_FACTOR):
        client_origin = ClientOrigin(text, f"10.0.{number // 250}.{number % 250}")
        assert not attempts.find_delay(client_origin, "x", 0)
        attempts.count_failure(client_origin, "x", 0)
    assert attempts.find_delay(ClientOrigin(text, "10.9.9.9"), "x", 0)
    assert not attempts.find_delay(person, "theirs", 0)
    assert not attempts.find_delay(ClientOrigin("192.0.2.1", "192.0.2.1"), "x", 0)
    assert not attempts.find_delay(ClientOrigin(text, "10.9.9.9"), "x", MINUTE)


def test_who_goes_through_the_networks_of_one_site_is_limited_as_one_and_locks_out_nobody_who_is_in() -> None:
    attempts = Attempts(3)
    person = locate_client("2001:db8:1:ffff::1")
    attempts.right(person, "theirs")
    for number in range(3 * PROXY_FACTOR):
        client_origin = locate_client(f"2001:db8:1:{number:x}::1")
        assert not attempts.find_delay(client_origin, "x", 0)
        attempts.count_failure(client_origin, "x", 0)
    assert attempts.find_delay(locate_client("2001:db8:1:9999::1"), "x", 0)
    assert not attempts.find_delay(person, "theirs", 0)
    assert not attempts.find_delay(locate_client("2001:db8:2::1"), "x", 0)
    assert not attempts.find_delay(locate_client("2001:db8:1:9999::1"), "x", MINUTE)


def test_what_is_remembered_of_attempts_is_bounded() -> None:
    attempts = Attempts(3)
    for number in range(3 * MAX_BUCKETS):
        client_origin = ClientOrigin(f"p{number}", f"p{number}")
        attempts.count_failure(client_origin, "x", 0)
        attempts.right(client_origin, "y")
    assert attempts.count_origins() <= MAX_BUCKETS + MAX_PROVEN_TOKENS

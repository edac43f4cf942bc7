"""What a report says of the price is charged in Halter's own requests as behind the proxy: one function for all."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from library_bench import Bench

from halter_drills.provider import ListedProvider

PRICE = {"price": {"input": 2, "output": 10}}
ADDRESS = {"openai": "/v1", "anthropic": ""}


@pytest.fixture
async def listed() -> AsyncIterator[ListedProvider]:
    async with ListedProvider().serve() as provider:
        yield provider


async def settle(folder: Path, wire: str, listed: ListedProvider) -> tuple[Mapping[str, Any], int]:
    """Run a task; return the settlement of its request, and what was held."""
    bench = Bench(folder)
    provider = {"wire": wire, "base_url": f"http://127.0.0.1:{listed.port}{ADDRESS[wire]}", "api_key": "${secret:KEY}"}
    agent = bench.agent(
        model="mine:big",
        providers={"mine": provider},
        secrets={"KEY": "sk-made-up"},
        fleet={"models": {"mine:big": PRICE, "mine:dear": {"price": {"input": 20, "output": 100}}}},
    )
    await agent.run("Say seven.", kind="task")
    (started,), (settled,) = bench.facts("request_started"), bench.facts("request_settled")
    return settled, max(amount for _, _, unit, _, amount in started["legs"] if unit == "usd")


@pytest.mark.parametrize("wire", ADDRESS)
async def test_what_a_report_says_of_the_price_is_charged(tmp_path: Path, listed: ListedProvider, wire: str) -> None:
    plain, _ = await settle(tmp_path / "plain", wire, listed)
    usage = plain["usage"]
    cost = 2 * usage["input_tokens"] + 10 * usage["output_tokens"]
    assert plain["charge"]["usd"] == cost

    listed.extra_usage = {"inference_geo": "us"}
    place, _ = await settle(tmp_path / "place", wire, listed)
    assert (place["charge"]["usd"], place["usage"]["surcharge_percent"]) == (-(-cost * 110 // 100), 10)

    listed.extra_usage = {"dear_tokens": 9}
    unknown, held = await settle(tmp_path / "unknown", wire, listed)
    assert (unknown["charge"]["usd"], unknown["usage"]["unpriced"]) == (held, "dear_tokens")

    listed.extra_usage, listed.reported_cost = {}, 0.03
    reported, _ = await settle(tmp_path / "reported", wire, listed)
    assert reported["charge"]["usd"] == 30_000

    listed.reported_cost, listed.answers_as = 0.0, "dear"
    substituted, _ = await settle(tmp_path / "substituted", wire, listed)
    assert (substituted["charge"]["usd"], substituted["usage"]["answered_by"]) == (10 * cost, "dear")

    listed.answers_as = "a-name-of-the-gateway"
    renamed, _ = await settle(tmp_path / "renamed", wire, listed)
    assert renamed["charge"]["usd"] == cost

"""The cache of an hour: asked for where a session waits longer than one of minutes lasts, and held at its price."""

from pathlib import Path
from typing import Any

import pytest
from library_bench import NOON, Bench, FastClock

from halter.core.clock import HOUR, MINUTE
from halter.core.money import micros_to_usd
from halter.loop.turn import Turn, needs_long_cache

NAME = "anthropic:claude-opus-4-8"
PRICE = {"input": 2, "cache_read": 0.5, "cache_write": 2.5, "cache_write_1h": 4, "output": 10}


class LaterClock(FastClock):
    """A clock on which only those hours pass that a test lets pass."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0

    def now(self) -> int:
        return NOON + self._passed

    def skip(self, duration: int) -> None:
        self._passed += duration


class Desk:
    """A session that is talked to, with pauses between."""

    def __init__(self, folder: Path, provider: Any, **price: float) -> None:
        self.bench = Bench(folder)
        self.bench.clock = self.clock = LaterClock()
        self.provider = provider
        self.price = price or PRICE
        self.session = ""
        provider.says("Yes.")

    async def say(self, text: str, model: str = NAME, **more: Any) -> Any:
        name = model.partition(":")[0]
        at = {"wire": "anthropic", "base_url": f"http://127.0.0.1:{self.provider.port}", "api_key": "${secret:KEY}"}
        agent = self.bench.agent(
            model=model,
            instructions="Be brief.",
            providers={name: {**at, **more.pop("endpoint", {})}},
            secrets={"KEY": self.provider.key},
            fleet={"models": {model: {"price": self.price}}},
            max_cost_usd=1,
            **more,
        )
        result = await agent.run(text, session=self.session, kind="chat")
        self.session = result.session
        return result

    @property
    def lifetimes(self) -> list[set[str]]:
        """The lifetimes of the marks in each request."""
        found = []
        for asked in self.provider.asked:
            blocks = [*asked.body["system"], *(block for turn in asked.body["messages"] for block in turn["content"])]
            found.append({block["cache_control"]["ttl"] for block in blocks if "cache_control" in block})
        return found

    @property
    def held(self) -> list[int]:
        return [max(leg[-1] for leg in fact["legs"]) for fact in self.bench.facts("request_started")]


@pytest.fixture
def desk(tmp_path: Path, provider: Any) -> Desk:
    return Desk(tmp_path, provider)


async def test_after_a_wait_of_more_than_five_minutes_the_beginning_is_kept_for_an_hour(desk: Desk) -> None:
    await desk.say("One.")
    await desk.say("Two.")
    desk.clock.skip(20 * MINUTE)
    await desk.say("Three.")
    desk.clock.skip(20 * MINUTE)
    await desk.say("Four.")
    assert desk.lifetimes == [{"5m"}, {"5m"}, {"1h"}, {"1h"}]


async def test_a_session_that_waits_no_more_is_kept_for_minutes_again(desk: Desk) -> None:
    await desk.say("One.")
    desk.clock.skip(20 * MINUTE)
    for text in ("Two.", "Three.", "Four."):
        await desk.say(text)
    assert desk.lifetimes == [{"5m"}, {"1h"}, {"1h"}, {"5m"}]


async def test_a_wait_that_no_cache_survives_is_no_reason_to_pay_for_one(desk: Desk) -> None:
    await desk.say("One.")
    desk.clock.skip(2 * HOUR)
    await desk.say("Two.")
    assert desk.lifetimes == [{"5m"}, {"5m"}]


async def test_what_was_written_for_an_hour_is_charged_at_its_price(desk: Desk) -> None:
    await desk.say("One.")
    desk.clock.skip(20 * MINUTE)
    writes = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 1000}
    usage = {"input_tokens": 1000, "output_tokens": 20, "cache_creation_input_tokens": 1000, "cache_creation": writes}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-opus-4-8", "stop_reason": "end_turn"}
    desk.provider.sends(200, {**message, "content": [{"type": "text", "text": "Yes."}], "usage": usage})
    result = await desk.say("Two.")
    first, second = (fact["charge"]["usd"] for fact in desk.bench.facts("request_settled"))
    assert second == 1000 * 2 + 1000 * 4 + 20 * 10
    assert result.cost_usd == micros_to_usd(first + second)


async def test_only_a_request_that_asks_for_the_hour_holds_its_price(tmp_path: Path, provider: Any) -> None:
    outputs = 4096 * 10 * 102 // 100
    held: list[int] = []
    for pause in (MINUTE, 20 * MINUTE):
        folder = tmp_path / str(pause)
        folder.mkdir()
        desk = Desk(folder, provider)
        await desk.say("One.")
        desk.clock.skip(pause)
        await desk.say("Two.")
        held.append(desk.held[1] - outputs)
    assert held[1] == pytest.approx(held[0] * 4 / 2.5, abs=10)


async def test_without_a_price_of_the_hour_it_is_kept_for_minutes(tmp_path: Path, provider: Any) -> None:
    desk = Desk(tmp_path, provider, input=2, output=10)
    await desk.say("One.")
    desk.clock.skip(20 * MINUTE)
    assert (await desk.say("Two.")).text == "Yes."
    assert desk.lifetimes == [{"5m"}, {"5m"}]


async def test_another_server_of_the_protocol_is_not_asked_for_it(desk: Desk) -> None:
    await desk.say("One.", "mine:claude-opus-4-8")
    desk.clock.skip(20 * MINUTE)
    await desk.say("Two.", "mine:claude-opus-4-8")
    assert desk.lifetimes == [{"5m"}, {"5m"}]


async def test_a_cache_that_is_switched_off_stays_off(desk: Desk) -> None:
    await desk.say("One.", endpoint={"prompt_cache": False})
    desk.clock.skip(20 * MINUTE)
    await desk.say("Two.", endpoint={"prompt_cache": False})
    assert desk.lifetimes == [set(), set()]


@pytest.mark.parametrize(
    ("turn", "min_sleep", "kept"),
    [
        (Turn(number=1), MINUTE, False),
        (Turn(number=1), 10 * MINUTE, True),
        (Turn(number=1), HOUR, True),
        (Turn(number=1), 2 * HOUR, False),
        (Turn(number=2, answered_at=HOUR), 10 * MINUTE, False),
        (Turn(number=2, answered_at=HOUR, previous_interval=6 * MINUTE), MINUTE, True),
        (Turn(number=2, answered_at=HOUR, longest_interval=6 * MINUTE), MINUTE, True),
        (Turn(number=2, answered_at=HOUR, previous_interval=5 * MINUTE), MINUTE, False),
        (Turn(number=2, answered_at=HOUR - 6 * MINUTE), MINUTE, True),
    ],
)
def test_it_follows_from_how_long_the_session_waited(turn: Turn, min_sleep: int, kept: bool) -> None:  # noqa: FBT001
    assert needs_long_cache(turn, HOUR + 1, min_sleep) is kept


def test_only_the_turn_before_counts() -> None:
    turn = Turn(number=1).with_reply("end", (), HOUR, spoke=True).with_reply("end", (), HOUR + 9 * MINUTE, spoke=True)
    following = turn.make_next(2, 0, HOUR + 10 * MINUTE)
    assert needs_long_cache(following, HOUR + 10 * MINUTE, MINUTE)
    later = following.with_reply("end", (), HOUR + 11 * MINUTE, spoke=True).make_next(3, 0, HOUR + 12 * MINUTE)
    assert not needs_long_cache(later, HOUR + 12 * MINUTE, MINUTE)

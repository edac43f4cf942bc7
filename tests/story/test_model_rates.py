"""The rate of a model: shared by all processes on one store, exact in every minute, waited for by whoever is late."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import GuardrailTriggered, RequestSettled, RequestStarted, SessionParked, SessionStarted
from halter.core.ids import SessionId, WorkerId, session_stream
from halter.core.messages import Prompt, make_user_message
from halter.core.money import MINUTE_WINDOW, BudgetRow, Cap
from halter.core.ports import Query, Stored, Write
from halter.core.rates import RateLimit
from halter.core.rows import HoldRow, SessionRow
from halter.core.usage import ModelName, Price, Usage
from halter.guard.guard import GuardRuntime
from halter.guard.halts import cancel, halt
from halter.guard.prepare import SessionContext
from halter.guard.request import AnsweredRequest, ModelRequest, RefusedRequest
from halter.loop.session_runtime import SessionRuntime
from halter.models.prices import Prices
from halter.models.scripted import Scripted, say
from halter.redaction.secrets import GivenSecrets
from halter.state import lifecycle
from halter.state.receipt import make_receipt
from halter.testing.world import VIRTUAL_START, Fleet, World
from tests.story.loops import policy
from tests.story.test_testing_fleet import desk

PAID = ModelName("test", "paid")
OTHER = ModelName("test", "other")
ONE = Price(Decimal(1), Decimal(1))
"""A token costs a micro-dollar, so that sums can be followed by eye."""
MOST = 1000
USED = Usage(input_tokens=100, output_tokens=20)


class Process:
    """A process on the store of a world, with doors of its own."""

    def __init__(self, world: World, rates: Mapping[str, RateLimit], text: str = "") -> None:
        self.world = world
        self.rates = rates
        self.policy = policy(text)
        prices = Prices({str(PAID): ONE, str(OTHER): ONE})
        self.doors = GuardRuntime(world.store, world.clock, redact=str, secrets=GivenSecrets({}), prices=prices)

    async def session(self, name: str) -> SessionRuntime:
        event = SessionStarted(session=name, agent="desk", kind="task", started_by="ada")
        await self.world.store.commit(lifecycle.start_session(event))
        (lease,) = await self.world.store.claim(WorkerId("w"), 1, SessionId(name))
        session_context = SessionContext(
            name, "desk", self.policy.phases[0], self.policy, str(self.policy.digest()), rate_limits=self.rates
        )
        return SessionRuntime(self.world.store, self.world.clock, self.doors, lease, session_context, {})

    def model(self, name: ModelName = PAID, usage: Usage = USED, takes: int = 0) -> Scripted:
        line = msgspec.structs.replace(say("Yes.", usage, takes=takes), repeat=True)
        return Scripted([line], self.world.clock, name)


def request(name: str, most: int = MOST, **more: Any) -> ModelRequest:
    return ModelRequest(id=name, prompt=Prompt(messages=(make_user_message("Is it?"),), max_output_tokens=most), **more)


async def asks(running: SessionRuntime, model: Scripted, times: int = 1, most: int = MOST) -> list[Any]:
    name = running.lease.session
    return [await running.request(request(f"{name}.{number}", most), model) for number in range(times)]


async def events(world: World) -> list[Stored]:
    rows = await world.journal.ask(Query("all_sessions", SessionRow))
    return [each for row in rows for each in await world.events(session_stream(row.session))]


async def count_requests_by_minute(world: World, model: ModelName | None = None) -> Counter[int]:
    """Count the requests that were begun in each minute since the world began, by the store's own times."""
    request_events = [each for each in await events(world) if isinstance(each.event, RequestStarted)]
    return Counter(
        (each.at - VIRTUAL_START) // MINUTE
        for each in request_events
        if isinstance(each.event, RequestStarted) and model in (None, ModelName.parse(each.event.model))
    )


async def read_rate_rows(world: World) -> list[BudgetRow]:
    return [row for row in await world.journal.ask(Query("budgets", BudgetRow)) if row.window == MINUTE_WINDOW]


Live = Callable[[Callable[[World], Awaitable[None]]], None]


def test_two_processes_make_exactly_as_many_requests_in_each_minute_as_they_may(live: Live) -> None:
    async def story(world: World) -> None:
        processes = [
            Process(world, {str(PAID): RateLimit(requests=5)}, "limits: {max_cost_usd: none}\n") for _ in range(2)
        ]
        sessions = [await processes[number % 2].session(f"s{number}") for number in range(6)]
        answers = await asyncio.gather(*(asks(each, processes[0].model(takes=SECOND), 4) for each in sessions))
        assert all(isinstance(answer, AnsweredRequest) for each in answers for answer in each)
        assert await count_requests_by_minute(world) == {0: 5, 1: 5, 2: 5, 3: 5, 4: 4}
        began = VIRTUAL_START + 4 * MINUTE
        assert await read_rate_rows(world) == [BudgetRow(f"model:{PAID}", MINUTE_WINDOW, "requests", 5, began, spent=4)]

    live(story)


def test_who_is_late_waits_asleep_until_the_minute_is_over_and_spends_nothing_by_it(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=1)})
        await world.advance(10 * SECOND)
        await asks(await process.session("first"), process.model())
        late = await process.session("late")
        asking = asyncio.create_task(asks(late, process.model()))
        await world.advance(20 * SECOND)
        (row,) = await world.journal.ask(Query("session", SessionRow, {"session": "late"}))
        assert (row.state, row.wake_at) == ("SLEEPING", VIRTUAL_START + MINUTE)
        assert await world.journal.ask(Query("holds", HoldRow)) == []
        (answer,) = await asking
        assert (answer.request, world.now) == ("late.0/0", VIRTUAL_START + MINUTE)
        own = await world.events(session_stream("late"))
        assert [each.kind for each in own][-5:] == [
            "guardrail_triggered",
            "session_parked",
            "session_woken",
            "request_started",
            "request_settled",
        ]
        (waits,) = [each.event for each in own if isinstance(each.event, GuardrailTriggered)]
        assert waits.sentence == "Waiting for the rate limit of test:paid until 00:01:00 UTC: 1 request a minute."
        assert (waits.guardrail, waits.until) == ("model_rate", VIRTUAL_START + MINUTE)

    live(story)


def test_the_rate_of_a_provider_holds_beside_that_of_its_model(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=2), "test:*": RateLimit(requests=3)})
        session_runtime, other = [await process.session(name) for name in ("paid", "other")]
        await asyncio.gather(asks(session_runtime, process.model(), 6), asks(other, process.model(OTHER), 6))
        together = await count_requests_by_minute(world)
        assert max((await count_requests_by_minute(world, PAID)).values()) <= 2
        assert [together[minute] for minute in range(4)] == [3, 3, 3, 3]

    live(story)


def test_another_model_is_asked_while_one_is_waited_for(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=1)})
        session_runtime, other = [await process.session(name) for name in ("paid", "other")]
        await asyncio.gather(asks(session_runtime, process.model(), 3), asks(other, process.model(OTHER), 9))
        assert await count_requests_by_minute(world, PAID) == {0: 1, 1: 1, 2: 1}
        assert await count_requests_by_minute(world, OTHER) == {0: 9}

    live(story)


def test_tokens_that_were_held_and_not_used_are_there_for_others_in_the_same_minute(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(tokens=3000)}, "limits: {max_cost_usd: none}\n")
        sessions = [await process.session(f"s{number}") for number in range(10)]
        await asyncio.gather(*(asks(each, process.model(takes=SECOND), 4) for each in sessions))
        counts = await count_requests_by_minute(world)
        # Two can be held at once; of each, 120 tokens are used, and what is left must still hold the bound of another.
        assert counts == {0: 17, 1: 17, 2: 6}

    live(story)


def test_a_minute_is_never_promised_more_tokens_than_it_has(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(tokens=3000)}, "limits: {max_cost_usd: none}\n")
        sessions = [await process.session(f"s{number}") for number in range(5)]
        used = Usage(input_tokens=5, output_tokens=MOST)
        await asyncio.gather(*(asks(each, process.model(usage=used, takes=SECOND), 2) for each in sessions))
        counts = Counter[str]()
        starts = {e.event.request: e.event for e in await events(world) if isinstance(e.event, RequestStarted)}
        for each in await events(world):
            if isinstance(each.event, RequestSettled) and each.event.charge is not None:
                window = starts[each.event.request].legs[-1].window
                counts[window] += each.event.charge.tokens
        assert len(counts) == 5
        assert max(counts.values()) <= 3000

    live(story)


def test_a_request_that_is_larger_than_a_minute_is_let_through_alone(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(tokens=500)}, "limits: {max_cost_usd: none}\n")
        small, large, last = [await process.session(name) for name in ("small", "large", "last")]
        await asks(small, process.model(usage=Usage(40, 10)), most=200)
        asking = asyncio.create_task(asks(large, process.model(usage=Usage(400, 800))))
        await world.advance(MINUTE)
        assert [answer.request for answer in await asking] == ["large.0/0"]
        assert world.now == VIRTUAL_START + MINUTE
        (row,) = await read_rate_rows(world)
        assert (row.spent, row.held, row.overrun) == (1200, 0, 700)
        assert not any(event.kind == "overrun_incurred" for event in await events(world))
        (answer,) = await asks(last, process.model(), most=200)
        assert (isinstance(answer, AnsweredRequest), world.now) == (True, VIRTUAL_START + 2 * MINUTE)

    live(story)


@pytest.mark.parametrize("word", [halt("session:s", "ada", "k"), cancel("s", "ada", "k")], ids=["halted", "cancelled"])
def test_a_halt_is_heard_while_a_rate_is_waited_for(live: Live, word: Write) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=1)})
        running = await process.session("s")
        asking = asyncio.create_task(asks(running, process.model(), 2))
        await world.advance(5 * SECOND)
        await world.store.commit(word)
        _, refused = await asking
        assert isinstance(refused, RefusedRequest)
        assert (refused.outcome, world.now) == ("external_halt", VIRTUAL_START + 5 * SECOND)

    live(story)


def test_a_word_that_reaches_a_session_does_not_make_it_ask_too_early(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=1)})
        running = await process.session("s")
        asking = asyncio.create_task(asks(running, process.model(), 2))
        await world.advance(5 * SECOND)
        await world.send_message("s", "Are you there?")
        await asking
        assert await count_requests_by_minute(world) == {0: 1, 1: 1}
        assert world.now == VIRTUAL_START + MINUTE

    live(story)


def test_money_is_counted_to_the_last_bit_where_a_rate_is_waited_for(live: Live) -> None:
    async def story(world: World) -> None:
        text = "limits: {max_cost_usd_per_day: 0.005, max_cost_usd: none, on_cap: stop}\n"
        process = Process(world, {str(PAID): RateLimit(requests=2)}, text)
        sessions = [await process.session(f"s{number}") for number in range(4)]
        assert process.policy.caps.agent == (Cap(5000, "day"),)
        used = Usage(input_tokens=5, output_tokens=700)
        asking = [asyncio.create_task(asks(each, process.model(usage=used, takes=SECOND), 3)) for each in sessions]
        await world.advance(10 * MINUTE)
        rows = await world.journal.ask(Query("budgets", BudgetRow))
        (agent,) = [row for row in rows if row.scope == "agent:desk"]
        request_events = [each.event for each in await events(world) if isinstance(each.event, RequestSettled)]
        assert (agent.spent, agent.held, agent.overrun) == (705 * len(request_events), 0, 0)
        # An eighth would not fit: whoever asks for it sleeps until the day is over.
        assert len(request_events) == 7
        assert max((await count_requests_by_minute(world)).values()) == 2
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    live(story)


def test_what_can_be_done_without_does_not_wait_for_a_rate(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=1)})
        running = await process.session("s")
        await asks(running, process.model())
        answer = await running.request(request("s.gate", optional=True), process.model())
        assert isinstance(answer, RefusedRequest)
        assert (answer.outcome, world.now) == ("rate_limited", VIRTUAL_START)

    live(story)


def test_a_long_day_leaves_one_row_for_each_rate(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(
            world, {str(PAID): RateLimit(1, 2000), "test:*": RateLimit(2)}, "limits: {max_cost_usd: none}\n"
        )
        await asks(await process.session("s"), process.model(), 30)
        assert world.now == VIRTUAL_START + 29 * MINUTE
        assert [(row.scope, row.unit) for row in await read_rate_rows(world)] == [
            ("model:test:*", "requests"),
            ("model:test:paid", "requests"),
            ("model:test:paid", "tokens"),
        ]

    live(story)


def test_a_receipt_tells_of_a_long_wait_in_one_line(live: Live) -> None:
    async def story(world: World) -> None:
        process = Process(world, {str(PAID): RateLimit(requests=1)}, "limits: {max_cost_usd: none}\n")
        greedy, patient = [await process.session(name) for name in ("greedy", "patient")]
        first = asyncio.create_task(asks(greedy, process.model(), 6))
        await asyncio.gather(first, asks(patient, process.model()))
        guardrail_lines = make_receipt(await world.events(session_stream("greedy"))).guardrails
        waits = [e for e in await world.events(session_stream("greedy")) if isinstance(e.event, SessionParked)]
        assert len(waits) >= 5
        (line,) = guardrail_lines
        assert line.sentence.startswith("Waiting for the rate limit of test:paid until 00:0")
        assert (line.guardrail, line.times) == ("model_rate", len(waits))
        assert (line.at, line.until) == (waits[0].at, waits[-1].at - waits[-1].at % MINUTE + MINUTE)

    live(story)


async def test_what_the_fleets_file_says_of_rates_reaches_its_agents(world: World, tmp_path: Path) -> None:
    (tmp_path / "halter.yaml").write_text("rates: {'reflex:*': {requests_per_minute: 1}}\n")
    fleet = Fleet(world, tmp_path)
    fleet.start(desk(tmp_path))
    await world.advance(10 * MINUTE)
    assert max((await count_requests_by_minute(world)).values()) == 1
    assert any(row.scope == "model:reflex:*" for row in await read_rate_rows(world))

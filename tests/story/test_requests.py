"""The model door: checks in their order, holds that are upper bounds, true costs, and halts that take effect."""

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import ModelError
from halter.core.events import BodiesErased, RequestSettled, RequestStarted, SessionStarted
from halter.core.ids import FLEET, WorkerId, session_stream
from halter.core.messages import Message, Prompt, Reply, Text, TextListener, ToolCall, ToolResult, make_user_message
from halter.core.money import Account, BudgetRow, usd_to_micros
from halter.core.ports import Committed, Draft, Lease, Query, Stored, Write, read_body
from halter.core.rows import HoldRow, SpendRow
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import ModelName, ModelPrices, Price, PriceTable, Unpriced, Usage
from halter.guard.halts import BudgetBusy, halt, resume
from halter.guard.ledger import Ledger, change_cap
from halter.guard.model_door import ModelDoor
from halter.guard.prepare import SessionContext
from halter.guard.recovery import CallInDoubt, Recovery
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest
from halter.guard.tool_door import ToolDoor
from halter.models.prices import Prices
from halter.models.scripted import Scripted, ScriptedFailure, ScriptLine, say
from halter.models.tariffs import Tariff, compile_stated_price
from halter.spec.agent import Phase
from halter.state import lifecycle
from halter.state.receipt import make_receipt
from halter.state.session import replay
from halter.testing.fakes import StoreProxy
from halter.testing.world import World

SCOPES = ("session:s", "agent:desk", "fleet")
PAID = ModelName("test", "paid")
FLEET_FILE = "models: {'test:paid': {price: {input: 1, output: 1}}}\n"
"""A token costs a micro-dollar, so that sums can be followed by eye."""


def make_context(limits: str = "{}", fleet: str = "", agent: str = "") -> SessionContext:
    ours = parse_fleet(load_bytes((FLEET_FILE + fleet).encode(), "halter.yaml"))
    theirs = parse_agent(load_bytes(f"name: desk\nlimits: {limits}\n{agent}".encode(), "agent.yaml"))
    resolved_policy = resolve_policy(ours, theirs)
    return SessionContext("s", "desk", Phase("work", None), resolved_policy, str(resolved_policy.digest()))


def prompt(text: str = "What is new?", most: int = 1000) -> Prompt:
    return Prompt(system="Be brief.", messages=(make_user_message(text),), max_output_tokens=most)


def make_model(*lines: ScriptLine | str, world: World, name: ModelName = PAID) -> Scripted:
    usage = Usage(input_tokens=100, output_tokens=20)
    return Scripted([say(line, usage) if isinstance(line, str) else line for line in lines], world.clock, name)


class Desk:
    """A session with its door to models."""

    def __init__(self, world: World, lease: Lease, session_context: SessionContext) -> None:
        self.world = world
        self.lease = lease
        self.standing = session_context
        self.door = ModelDoor(
            world.store,
            world.clock,
            world.ledger,
            Prices(session_context.policy.prices),
            redact=lambda text: text.replace("hunter2", "[redacted]"),
        )

    async def ask(self, model: Any, name: str = "s.1", attempt: int = 0, **more: Any) -> Any:
        request = ModelRequest(**{"id": name, "prompt": prompt(), **more})
        return await self.door.request(self.lease, self.standing, request, model, attempt)

    async def events(self) -> list[Stored]:
        return (await self.world.events(session_stream("s")))[1:]

    async def list_kinds(self) -> list[str]:
        return [event.kind for event in await self.events()]

    async def read_started(self) -> RequestStarted:
        (event,) = [each.event for each in await self.events() if isinstance(each.event, RequestStarted)]
        return event

    async def budget(self, scope: str = "session:s", unit: str = "usd") -> BudgetRow:
        rows = await self.world.store.ask(Query("budgets", BudgetRow))
        (row,) = [row for row in rows if (row.scope, row.unit) == (scope, unit)]
        return row

    async def list_holds(self) -> list[str]:
        return [row.hold for row in await self.world.store.ask(Query("holds", HoldRow))]


async def start_desk(world: World, standing: SessionContext | None = None) -> Desk:
    await world.store.commit(
        lifecycle.start_session(SessionStarted(session="s", agent="desk", kind="task", started_by="ada"))
    )
    (lease,) = await world.store.claim(WorkerId("w"), 1)
    return Desk(world, lease, standing or make_context())


Live = Callable[[Callable[[World], Awaitable[None]]], None]


def test_a_model_is_asked_between_its_intent_and_its_outcome_and_costs_what_it_used(live: Live) -> None:
    async def story(world: World) -> None:
        desk, model = await start_desk(world), make_model("Nothing.", world=world)
        answer = await desk.ask(model)
        reply = Reply((Text("Nothing.", "model", False),), "end", Usage(100, 20))
        assert answer == AnsweredRequest("s.1/0", reply, 120, 1000, tokens=120)
        assert await desk.list_kinds() == ["request_started", "request_settled"]
        for scope in ("session:s", "agent:desk", "fleet"):
            row = await desk.budget(scope)
            assert (row.spent, row.held) == (120, 0)
        (spend,) = await world.store.ask(Query("all_spends", SpendRow))
        assert (spend.hold, spend.name, spend.purpose, spend.usd) == ("s.1/0", "test:paid", "turn", 120)
        assert (spend.input_tokens, spend.output_tokens) == (100, 20)
        assert spend.held_usd > 1000

    live(story)


async def test_a_cost_for_which_nothing_was_held_counts_where_it_would_have_been_held(world: World) -> None:
    desk, model = await start_desk(world), make_model("Nothing.", "Nothing.", world=world)
    await desk.ask(model, prompt=prompt(most=0), input_tokens=0)
    assert (await desk.read_started()).legs == ()
    await desk.ask(model, attempt=1)
    for scope in SCOPES:
        row = await desk.budget(scope)
        assert (row.spent, row.held) == (240, 0)


async def test_what_was_sent_and_what_was_answered_can_be_read_in_the_journal(world: World) -> None:
    desk = await start_desk(world)
    long = "A long tale. " * 10_000
    await desk.ask(make_model(long, world=world), prompt=prompt(long, most=10))
    began, event = await desk.events()
    assert began.blob is not None
    assert event.blob is not None
    payload = msgspec.json.decode(await read_body(world.store, began), type=Prompt)
    assert payload == prompt(long, most=10)
    assert msgspec.json.decode(await read_body(world.store, event), type=Reply).text == long


async def test_a_request_made_twice_gets_its_answer_twice_and_the_model_is_called_once(world: World) -> None:
    desk, model = await start_desk(world), make_model("One.", "Two.", world=world)
    first = await desk.ask(model)
    assert await desk.ask(model) == msgspec.structs.replace(first, repeated=True)
    assert len(model.requests) == 1
    assert (await desk.ask(model, attempt=1)).reply.text == "Two."


@pytest.mark.parametrize("options", [{}, {"can_defer": True}])
async def test_a_request_made_again_while_it_runs_waits_for_its_answer(world: World, options: dict[str, bool]) -> None:
    slow_line = ScriptLine(reply=Reply((Text("One.", "model", False),)), takes=SECOND)
    desk, model = await start_desk(world), make_model(slow_line, slow_line, world=world)
    tasks = [asyncio.create_task(desk.ask(model, **options)) for _ in range(2)]
    await world.advance(2 * SECOND)
    first, second = sorted(await asyncio.gather(*tasks), key=lambda answer: answer.repeated)
    assert second == msgspec.structs.replace(first, repeated=True)
    assert len(model.requests) == 1


async def test_a_failure_is_returned_again_unchanged(world: World) -> None:
    fails = ScriptedFailure(kind="Busy", message="come back", billed=False, unavailable=True, retry_after=30 * SECOND)
    desk, model = await start_desk(world), make_model(ScriptLine(reply=Reply(()), fails=fails), world=world)
    first = await desk.ask(model)
    assert first == FailedRequest("s.1/0", "error", "Busy: come back", 0, True, 30 * SECOND)
    assert await desk.ask(model) == msgspec.structs.replace(first, repeated=True)
    assert len(model.requests) == 1


class Repeating(StoreProxy):
    """A store whose first answer is lost each time, so that the same write is sent again."""

    async def commit(self, write: Write) -> Committed:
        await self._store.commit(write)
        return await self._store.commit(write)


async def test_a_request_whose_admission_was_confirmed_late_is_asked_all_the_same_and_once(world: World) -> None:
    desk, model = await start_desk(world), make_model("Yes.", world=world)
    store = Repeating(world.store)
    desk.door = ModelDoor(
        store, world.clock, Ledger(store, world.clock), Prices(desk.standing.policy.prices), redact=str
    )
    assert (await desk.ask(model)).cost_usd == 120
    assert await desk.list_kinds() == ["request_started", "request_settled"]
    assert len(model.requests) == 1


async def test_an_answer_that_was_erased_is_gone_and_not_asked_for_again(world: World) -> None:
    desk, model = await start_desk(world), make_model("Secret.", "Again.", world=world)
    await desk.ask(model)
    stream = session_stream("s")
    erased = BodiesErased(stream=stream, through=9, by="ada")
    await world.store.commit(Write(FLEET, "erase", lambda _: [Draft(erased)], others=(stream,)))
    answer = await desk.ask(model)
    assert answer == FailedRequest(
        "s.1/0", "error", "Erased: the model's answer was erased", 120, tokens=120, repeated=True
    )
    assert len(model.requests) == 1


async def test_what_was_to_be_sent_goes_with_the_refusal_and_can_be_erased_with_it(world: World) -> None:
    desk = await start_desk(world, make_context("{max_cost_usd: 0.0001}"))
    await desk.ask(make_model(world=world), prompt=prompt("A long tale. " * 10_000))
    _, refused = await desk.events()
    assert refused.blob is not None
    erased = BodiesErased(stream=session_stream("s"), through=9, by="ada")
    await world.store.commit(Write(FLEET, "erase", lambda _: [Draft(erased)], others=(session_stream("s"),)))
    with pytest.raises(KeyError):
        await world.store.get(refused.blob)


async def test_a_request_that_fails_all_checks_reports_the_halt_then_the_model_then_the_money(
    world: World,
) -> None:
    session_context = make_context("{max_cost_usd: 0.0001}", agent="allowed_models: ['other:*']\n")
    desk, model = await start_desk(world, session_context), make_model("No.", world=world)
    await world.store.commit(halt("fleet", "ada", "halt", "enough"))
    assert await desk.ask(model) == RefusedRequest("s.1/0", "external_halt", "fleet was halted by ada: enough.")
    await world.store.commit(resume("fleet", "ada", "resume"))
    assert (await desk.ask(model)).outcome == "external_halt"
    second = await desk.ask(model, attempt=1)
    assert second.outcome == "disabled"
    assert second.sentence == "test:paid is not allowed for desk: `allowed_models` is other:*."
    desk.standing = make_context("{max_cost_usd: 0.0001}")
    assert (await desk.ask(model, attempt=2)).outcome == "cost_cap_reached"
    assert await desk.list_kinds() == ["request_refused", "request_refused", "cost_cap_reached", "request_refused"]
    assert model.requests == []
    brakes = make_receipt(await world.events(session_stream("s"))).brakes
    assert [(brake.code, brake.refused) for brake in brakes] == [
        ("external_halt", "s.1/0"),
        ("disabled", "s.1/1"),
        ("cost_cap_reached", "s.1/2"),
    ]
    assert brakes[-1].scope == "session:s"


async def test_a_model_without_a_price_is_refused_while_a_cap_binds_and_told_what_to_write(world: World) -> None:
    desk = await start_desk(world)
    model = make_model("No.", world=world, name=ModelName("nobody", "knows"))
    answer = await desk.ask(model)
    assert answer.outcome == "disabled"
    assert "The price of nobody:knows is not known" in answer.sentence
    assert "`price: free`" in answer.sentence
    assert model.requests == []


NO_CAPS = "{max_cost_usd: none, max_cost_usd_per_day: none}"
NO_FLEET_CAPS = (
    "agents: {limits: {max_cost_usd: none, max_cost_usd_per_day: none}}\nlimits: {max_cost_usd_per_day: none}\n"
)


async def test_a_model_without_a_price_may_be_asked_where_no_cap_binds_until_a_person_sets_one(world: World) -> None:
    desk = await start_desk(world, make_context(NO_CAPS, NO_FLEET_CAPS))
    model = make_model("Yes.", "No.", world=world, name=ModelName("nobody", "knows"))
    assert (await desk.ask(model)).cost_usd == 0
    await world.store.commit(change_cap(Account("session:s", "", "usd"), usd_to_micros(1), "ada", "cap"))
    assert (await desk.ask(model, "s.2")).outcome == "disabled"
    assert len(model.requests) == 1


def test_the_answer_is_kept_shorter_where_the_money_is_short(live: Live) -> None:
    async def story(world: World) -> None:
        desk, model = await start_desk(world, make_context("{max_cost_usd: 0.0006}")), make_model("Short.", world=world)
        answer = await desk.ask(model)
        event = await desk.read_started()
        (sent,) = model.requests
        assert 256 <= sent.max_output_tokens < 1000
        assert sent.max_output_tokens == event.max_output_tokens == answer.max_output_tokens
        assert {leg.amount for leg in event.legs if leg.unit == "usd"} == {600}

    live(story)


async def test_a_request_whose_shortest_useful_answer_does_not_fit_is_a_cap_reached(world: World) -> None:
    desk, model = await start_desk(world, make_context("{max_cost_usd: 0.0003}")), make_model("No.", world=world)
    answer = await desk.ask(model)
    assert answer.outcome == "cost_cap_reached"
    assert "$0.0003 is left of the cap of session:s" in answer.sentence
    assert (await desk.ask(model, "s.2", prompt=prompt(most=50))).reply.text == "No."


async def test_the_shortest_useful_answer_is_what_the_agent_says(world: World) -> None:
    limits = "{max_cost_usd: 0.0003, min_output_tokens: 20}"
    desk, model = await start_desk(world, make_context(limits)), make_model("Yes.", world=world)
    await desk.ask(model)
    assert 20 <= model.requests[0].max_output_tokens < 256


async def test_a_token_budget_shortens_the_answer_counts_uncached_tokens_and_then_refuses(world: World) -> None:
    desk = await start_desk(world, make_context("{token_budget: 700}"))
    cached = Usage(input_tokens=400, output_tokens=20, cache_read_tokens=380)
    model = make_model(say("One.", cached), say("Two.", Usage(500, 100)), world=world)
    await desk.ask(model)
    assert model.requests[0].max_output_tokens < 1000
    assert (await desk.budget(unit="tokens")).spent == 40
    await desk.ask(model, "s.2")
    answer = await desk.ask(model, "s.3")
    assert answer.outcome == "cost_cap_reached"
    assert "60 are left of the token budget of session:s." in answer.sentence


def sum_over_time(events: list[Stored]) -> list[int]:
    """Return what is spent and held for the fleet after each event."""
    held: dict[str, int] = {}
    sums: list[int] = []
    text = 0
    for stored in events:
        match stored.event:
            case RequestStarted(request=name, legs=legs):
                held[name] = max(leg.amount for leg in legs if leg.scope == "fleet")
            case RequestSettled(request=name, charge=charge) if charge is not None:
                text += charge.usd
                del held[name]
            case _:
                pass
        sums.append(text + sum(held.values()))
    return sums


CAP = usd_to_micros("0.005")


async def request_twenty_at_once(world: World, prices: PriceTable | None = None) -> tuple[Desk, Scripted, list[Any]]:
    desk = await start_desk(world, make_context(fleet="limits: {max_cost_usd_per_day: 0.005}\n"))
    if prices is not None:
        desk.door = ModelDoor(world.store, world.clock, world.ledger, prices, redact=str)
    model = make_model(*[say("Yes.", Usage(100, 500), takes=2 * SECOND)] * 20, world=world)
    return desk, model, await asyncio.gather(*(desk.ask(model, f"s.{number}") for number in range(20)))


def test_of_twenty_requests_at_once_under_one_cap_none_is_ever_admitted_above_it(live: Live) -> None:
    async def story(world: World) -> None:
        desk, model, outcomes = await request_twenty_at_once(world)
        answered_requests = [each for each in outcomes if isinstance(each, AnsweredRequest)]
        refused = [each for each in outcomes if isinstance(each, RefusedRequest)]
        assert len(answered_requests) + len(refused) == 20
        assert len(answered_requests) == len(model.requests) > 5
        assert max(sum_over_time(await desk.events())) <= CAP
        assert (await desk.budget("fleet")).spent == 600 * len(answered_requests)

    live(story)


class Flattering(Tariff, frozen=True):
    """A price whose bound is none: it says what people like to hear."""

    def bound(self, input_tokens: int, max_output_tokens: int, at: int) -> int:
        return 1


class Flatterer:
    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        honest = compile_stated_price(Price(Decimal(1), Decimal(1)))
        return Flattering(honest.periods, honest.loading)


async def test_with_a_bound_that_is_none_the_same_twenty_are_seen_to_pass_the_cap(world: World) -> None:
    desk, model, _ = await request_twenty_at_once(world, Flatterer())
    assert len(model.requests) == 20
    assert max(sum_over_time(await desk.events())) > CAP


async def test_a_request_that_waits_for_money_in_vain_reports_that_and_nothing_is_written(world: World) -> None:
    desk = await start_desk(world, make_context("{max_cost_usd: 0.0015}"))
    model = make_model(say("Slow.", takes=5 * MINUTE), "Quick.", world=world)
    first = asyncio.create_task(desk.ask(model))
    await world.advance(SECOND)
    before = world.now
    assert await desk.ask(model, "s.2") == BudgetBusy("s.2/0")
    assert world.now - before == MINUTE
    assert await desk.list_kinds() == ["request_started"]
    assert isinstance(await first, AnsweredRequest)


async def test_who_waited_past_midnight_spends_the_new_days_money(world: World) -> None:
    desk = await start_desk(world, make_context(fleet="limits: {max_cost_usd_per_day: 0.0015}\n"))
    await world.advance(DAY - world.now % DAY - SECOND)
    model = make_model(say("Slow.", takes=5 * SECOND), "Quick.", world=world)
    first = asyncio.create_task(desk.ask(model))
    await world.advance(SECOND // 2)
    second = await desk.ask(model, "s.2")
    assert isinstance(second, AnsweredRequest)
    assert not first.done()
    await first
    rows = [row for row in await world.store.ask(Query("budgets", BudgetRow)) if row.scope == "fleet"]
    assert len(rows) == 2


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_halt_in_any_scope_cancels_a_request_in_flight_within_a_second(world: World, scope: str) -> None:
    stopped: list[int] = []

    class Stuck(Scripted):
        async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
            permit.use()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append(world.now)
            raise AssertionError

    desk = await start_desk(world)
    running = asyncio.create_task(desk.ask(Stuck([], world.clock, PAID)))
    await world.advance(10 * SECOND)
    halted_at = world.now
    await world.store.commit(halt(scope, "ada", "halt"))
    answer = await running
    assert (answer.outcome, answer.error, answer.may_retry) == ("external_halt", f"{scope} was halted.", False)
    assert stopped[0] - halted_at < SECOND
    assert await desk.list_holds() == []
    held = max(leg.amount for leg in (await desk.read_started()).legs if leg.unit == "usd")
    assert answer.cost_usd == (await desk.budget()).spent == held


async def test_a_request_that_takes_too_long_is_stopped_and_settles_at_its_hold(world: World) -> None:
    desk, model = await start_desk(world), make_model(say("Late.", takes=HOUR), world=world)
    before = world.now
    answer = await desk.ask(model, timeout=5 * SECOND)
    assert (answer.outcome, answer.may_retry, world.now - before) == ("timeout", True, 5 * SECOND)
    assert answer.cost_usd > 1000
    assert await desk.list_holds() == []


class Interrupted(Scripted):
    """A wire that reports what was used until it was stopped."""

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        try:
            await self._clock.sleep(HOUR)
        except asyncio.CancelledError:
            raise ModelError("Cut: the stream was cut", usage=Usage(100, 7)) from None
        raise AssertionError


async def test_a_request_that_was_cut_settles_at_the_input_reported_and_the_longest_answer(world: World) -> None:
    desk = await start_desk(world)
    answer = await desk.ask(Interrupted([], world.clock, PAID), timeout=5 * SECOND)
    assert (answer.outcome, answer.cost_usd) == ("timeout", 1100)
    assert (await desk.budget()).spent == 1100
    assert (await desk.budget(unit="tokens")).spent == 1100


class Overlong(Interrupted):
    """A wire whose model wrote more than it was asked for, by its own report."""

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        raise ModelError("Cut: the stream was cut", usage=Usage(100, 5000))


async def test_a_report_of_more_than_the_longest_answer_is_believed(world: World) -> None:
    desk = await start_desk(world)
    assert (await desk.ask(Overlong([], world.clock, PAID))).cost_usd == 5100


class Unsent(Scripted):
    """A wire that does not get through, and says so when it is stopped."""

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        try:
            await self._clock.sleep(HOUR)
        finally:
            permit.unsent = True
        raise AssertionError


@pytest.mark.parametrize("how", ["timeout", "halt", "cancel"])
async def test_a_request_that_was_stopped_before_it_was_sent_costs_nothing(world: World, how: str) -> None:
    desk = await start_desk(world)
    running = asyncio.create_task(desk.ask(Unsent([], world.clock, PAID), timeout=30 * SECOND))
    await world.advance(10 * SECOND)
    if how == "halt":
        await world.store.commit(halt("session:s", "ada", "halt"))
    if how == "cancel":
        running.cancel()
    await asyncio.wait((running,))
    assert (await desk.budget()).spent == 0
    assert await desk.list_holds() == []


class Punctual(Scripted):
    """A wire that needs exactly the time that it has, and remembers whether it had answered."""

    finished = False

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        reply = await super().ask(prompt, permit)
        self.finished = True
        return reply


def test_an_answer_that_was_given_just_as_its_time_was_up_is_never_thrown_away() -> None:
    results: set[bool] = set()

    async def story(world: World) -> None:
        desk = await start_desk(world)
        model = Punctual([say("Just in time.", Usage(100, 20), takes=5 * SECOND)], world.clock, PAID)
        answer = await desk.ask(model, timeout=5 * SECOND)
        assert isinstance(answer, AnsweredRequest) == model.finished
        results.add(model.finished)

    for seed in range(20):
        with World(seed) as world:
            world.run(story(world))
    assert True in results


class Stubborn(Interrupted):
    """A wire that answers with what it has when it is stopped."""

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        try:
            return await super().ask(prompt, permit)
        except ModelError as cut:
            return Reply((), "end", cut.usage)


async def test_a_wire_that_answers_when_it_is_stopped_is_charged_what_it_reports(world: World) -> None:
    desk = await start_desk(world)
    answer = await desk.ask(Stubborn([], world.clock, PAID), timeout=5 * SECOND)
    assert (answer.outcome, answer.cost_usd) == ("timeout", 107)


async def test_a_cancelled_request_gets_its_outcome_too(world: World) -> None:
    desk, model = await start_desk(world), make_model(say("Late.", takes=HOUR), world=world)
    running = asyncio.create_task(desk.ask(model))
    await world.advance(SECOND)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await desk.list_kinds() == ["request_started", "request_settled"]
    assert await desk.list_holds() == []
    assert (await desk.ask(model)).outcome == "cancelled"


@pytest.mark.parametrize(
    ("fails", "usage", "cost", "may_retry"),
    [
        (ScriptedFailure(billed=False, unavailable=True), None, 0, True),
        (ScriptedFailure(billed=False), None, 0, False),
        (ScriptedFailure(billed=True), Usage(100, 3), 103, False),
        (ScriptedFailure(billed=True, unavailable=True), None, None, True),
        (ScriptedFailure(billed=True), Usage(10**30, 3), None, False),
    ],
)
async def test_a_failure_costs_nothing_only_where_that_is_sure(
    world: World, fails: ScriptedFailure, usage: Usage | None, cost: int | None, *, may_retry: bool
) -> None:
    desk, model = (
        await start_desk(world),
        make_model(ScriptLine(reply=Reply((), "end", usage), fails=fails), world=world),
    )
    answer = await desk.ask(model)
    held = max(leg.amount for leg in (await desk.read_started()).legs if leg.unit == "usd")
    assert (answer.outcome, answer.may_retry) == ("error", may_retry)
    assert answer.cost_usd == (await desk.budget()).spent == (held if cost is None else cost)
    assert await desk.list_holds() == []


async def test_an_answer_without_a_usage_or_with_an_absurd_one_settles_at_its_hold(world: World) -> None:
    desk, model = await start_desk(world), make_model(say("One."), say("Two.", Usage(10**30)), world=world)
    for name in ("s.1", "s.2"):
        answer = await desk.ask(model, name)
        assert answer.cost_usd > 1000
        assert answer.reply.usage is None


async def test_a_truth_beyond_the_cap_is_recorded_with_an_incident_and_the_answer_is_kept(world: World) -> None:
    desk = await start_desk(world, make_context("{max_cost_usd: 0.0015}"))
    answer = await desk.ask(make_model(say("Dear.", Usage(5000, 20)), world=world))
    assert (answer.reply.text, answer.cost_usd) == ("Dear.", 5020)
    assert await desk.list_kinds() == ["request_started", "request_settled", "overrun_incurred"]
    assert (await desk.budget()).overrun == 5020 - 1500


async def test_secrets_are_masked_before_the_journal_and_the_model_and_whoever_asked(world: World) -> None:
    desk = await start_desk(world)
    parts = (Text("It is hunter2."), ToolCall("1", "login", '{"password":"hunter2"}'))
    message = Message("user", (ToolResult("1", "login", "ok", "hunter2 is right"),))
    model = make_model(ScriptLine(reply=Reply(parts, "calls", Usage(100, 20))), world=world)
    tool = ToolSpec(name="login", description="Never say hunter2.", schema=b"{}")
    secret = Prompt(
        system="hunter2",
        messages=(make_user_message("hunter2\ud800"), Message("assistant", parts), message),
        tools=(tool,),
    )
    answer = await desk.ask(model, prompt=secret)
    assert answer.reply.parts == (
        Text("It is [redacted]."),
        ToolCall("1", "login", '{"password":"[redacted]"}'),
    )
    assert b"hunter2" not in msgspec.json.encode(model.requests)
    for event in await desk.events():
        assert b"hunter2" not in (event.body or b"") + event.facts
    assert await desk.ask(model, prompt=secret) == msgspec.structs.replace(answer, repeated=True)


async def test_a_failures_words_are_masked_too(world: World) -> None:
    desk = await start_desk(world)
    fails = ScriptedFailure(kind="Unauthorized", message="the key hunter2 is wrong", billed=False)
    answer = await desk.ask(make_model(ScriptLine(reply=Reply(()), fails=fails), world=world))
    assert answer.error == "Unauthorized: the key [redacted] is wrong"
    assert all(b"hunter2" not in event.facts for event in await desk.events())


async def test_observing_lets_pass_and_records_what_would_have_been_refused(world: World) -> None:
    session_context = make_context("{max_cost_usd: 0.0001}", "observe: true\n", "allowed_models: ['other:*']\n")
    desk, model = await start_desk(world, session_context), make_model("Yes.", world=world)
    answer = await desk.ask(model)
    assert (answer.reply.text, answer.max_output_tokens) == ("Yes.", 1000)
    assert (await desk.read_started()).observed == ("disabled", "cost_cap_reached")


async def test_a_halt_is_obeyed_also_by_those_that_are_only_observed(world: World) -> None:
    desk, model = await start_desk(world, make_context(fleet="observe: true\n")), make_model("No.", world=world)
    await world.store.commit(halt("agent:desk", "ada", "halt"))
    assert (await desk.ask(model)).outcome == "external_halt"


async def test_a_refusal_of_what_can_be_done_without_neither_waits_nor_marks_the_cap_as_reached(world: World) -> None:
    desk = await start_desk(world, make_context("{max_cost_usd: 0.0015}"))
    model = make_model(say("Slow.", Usage(1400), takes=MINUTE), world=world)
    first = asyncio.create_task(desk.ask(model))
    await world.advance(SECOND)
    before = world.now
    assert await desk.ask(model, "s.2", optional=True) == BudgetBusy("s.2/0")
    assert world.now == before
    await first
    assert (await desk.ask(model, "s.3", optional=True)).outcome == "cost_cap_reached"
    assert not (await world.session("s")).cost_cap_reached
    (brake,) = make_receipt(await world.events(session_stream("s"))).brakes
    assert (brake.code, brake.refused) == ("cost_cap_reached", "s.3/0")


def test_a_crash_between_intent_and_outcome_leaves_the_hold_and_recovery_settles_it_at_its_maximum(live: Live) -> None:
    async def story(world: World) -> None:
        desk, model = await start_desk(world), make_model(say("Never heard.", takes=MINUTE), "Heard.", world=world)

        async def ask_and_end() -> None:
            await desk.ask(model)

        world.spawn(ask_and_end())
        await world.advance(10 * SECOND)
        await world.restart()
        assert await Desk(world, desk.lease, desk.standing).list_holds() == ["s.1/0"]
        await world.advance(MINUTE)
        (lease,) = await world.store.claim(WorkerId("successor"), 1)
        heir = Desk(world, lease, desk.standing)
        result = await heir.ask(model)
        assert (result.outcome, result.may_retry) == ("unknown", True)
        assert len(model.requests) == 1
        (flight,) = replay(await world.events(session_stream("s"))).in_flight.values()
        door = ToolDoor(world.store, world.clock, world.ledger, redact=str)
        await Recovery(world.store, world.ledger, door).resolve(lease, CallInDoubt(flight, None))
        row = await heir.budget()
        assert (row.spent, row.held) == (flight.max_charge().usd, 0)
        outcome = await heir.ask(model)
        assert (outcome.outcome, outcome.may_retry, outcome.cost_usd) == ("unknown", True, flight.max_charge().usd)
        assert (await heir.ask(model, attempt=1)).reply.text == "Heard."

    live(story)


async def test_a_successor_is_given_the_answer_that_its_predecessor_paid_for(world: World) -> None:
    desk, model = await start_desk(world), make_model("Paid.", "Again.", world=world)
    first = await desk.ask(model)
    await world.advance(MINUTE)
    (lease,) = await world.store.claim(WorkerId("successor"), 1)
    result = await Desk(world, lease, desk.standing).ask(model)
    assert result == msgspec.structs.replace(first, repeated=True)
    assert len(model.requests) == 1

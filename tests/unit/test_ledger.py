"""The economic brake: held before anything acts, settled after it, and exact whatever happens in between."""

import asyncio
from functools import partial
from itertools import chain, repeat

import msgspec
import pytest

from halter.core.clock import DAY, HOUR, MINUTE, SECOND, window_at, window_end
from halter.core.errors import LeaseLost, StoreUnavailable
from halter.core.events import CallStarted, CostCapReached, OverrunIncurred, RequestStarted
from halter.core.forecast import COLD_START_COST, CostForecast
from halter.core.ids import WorkerId, session_stream
from halter.core.money import MAX_AMOUNT, Account, BudgetRow, Cap, Caps, Charge, Leg, Spender, list_accounts, make_legs
from halter.core.ports import BLOB_THRESHOLD, Lease, Query, Write
from halter.core.project.holds import rows_of_hold
from halter.core.rates import RateLimit, make_rate_legs
from halter.core.rows import HoldRow, SpendRow
from halter.core.usage import Usage
from halter.core.vocabulary import Purpose
from halter.guard.halts import BudgetBusy
from halter.guard.ledger import BUDGET_WAIT, ActualResult, Ledger, change_cap, settle_flight
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore
from halter.state.lifecycle import end_session
from halter.testing.fakes import Crash, HoldRefused, HoldTaken, Intent, decide_hold, hold
from halter.testing.world import VIRTUAL_START, World

SESSION = Account("session:s1", "", "usd")
CAPS = Caps(session=Cap(100), agent=(), fleet=())
DAILY = Caps(session=Cap(None), agent=(Cap(100, "day"),), fleet=(Cap(None, "month"),))


ON_EITHER_STORE = pytest.mark.parametrize("path", [None, ":memory:"], ids=["memory", "sqlite"])
"""For what must also pass the rule on caps that SQLite keeps by itself."""


async def start_session(world: World, agent: str = "a1") -> Lease:
    await world.start("s1", agent=agent)
    (lease,) = await world.store.claim(WorkerId("w1"), 10)
    return lease


def call(world: World, usd: int, name: str = "c1", caps: Caps = CAPS) -> CallStarted:
    return CallStarted(call=name, tool="spend", legs=make_legs(caps, Spender("s1", "a1"), world.now, usd=usd))


async def take_hold(world: World, lease: Lease, intent: Intent) -> HoldTaken:
    answer = await hold(world.ledger, lease, intent)
    assert isinstance(answer, HoldTaken)
    return answer


async def spend_amount(world: World, lease: Lease, usd: int, name: str, caps: Caps = CAPS) -> None:
    event = await take_hold(world, lease, call(world, usd, name, caps))
    await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=usd))


async def budget(world: World, account: Account = SESSION) -> BudgetRow:
    rows = await world.journal.ask(Query("budgets", BudgetRow))
    budget_rows = [
        row for row in rows if (row.scope, row.window, row.unit) == (account.scope, account.window, account.unit)
    ]
    return budget_rows[0] if budget_rows else BudgetRow(account.scope, account.window, account.unit)


async def sums(world: World, account: Account = SESSION) -> tuple[int, int, int]:
    row = await budget(world, account)
    return row.spent, row.held, row.overrun


async def test_the_hold_stands_before_anything_acts_and_the_rest_is_freed_after_it(world: World) -> None:
    lease = await start_session(world)
    event = await take_hold(world, lease, call(world, 60))
    assert await sums(world) == (0, 60, 0)
    assert (await world.session("s1")).in_flight == {"c1": event.flight}
    await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=25))
    assert await sums(world) == (25, 0, 0)
    assert (await world.session("s1")).in_flight == {}


async def test_the_charge_is_the_reported_truth_and_the_hold_only_where_nothing_truer_is_known(world: World) -> None:
    lease = await start_session(world)
    for name, usd in (("known", 3), ("free", 0), ("unknown", None)):
        event = await take_hold(world, lease, call(world, 20, name))
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=usd))
    spends = await world.store.ask(Query("all_spends", SpendRow))
    assert {row.hold: (row.usd, row.held_usd) for row in spends} == {
        "known": (3, 20),
        "free": (0, 20),
        "unknown": (20, 20),
    }


async def test_what_exceeds_the_unspent_is_refused_before_it_acts_and_the_refusal_is_recorded(world: World) -> None:
    lease = await start_session(world)
    await spend_amount(world, lease, 90, "first")
    answer = await hold(world.ledger, lease, call(world, 11))
    assert isinstance(answer, HoldRefused)
    assert answer.event == CostCapReached(
        refused="c1", name="spend", scope="session:s1", window="", unit="usd", cap=100, spent=90, amount=11
    )
    assert (await world.session("s1")).cost_cap_reached
    assert await sums(world) == (90, 0, 0)


async def test_a_budget_full_of_holds_makes_wait_and_the_wait_ends_when_a_hold_is_settled(world: World) -> None:
    lease = await start_session(world)
    first = await take_hold(world, lease, call(world, 80, "first"))
    waiting = asyncio.create_task(hold(world.ledger, lease, call(world, 60)))
    await world.advance(10 * SECOND)
    assert not waiting.done()
    settled_at = world.now
    await world.ledger.settle(lease, first.flight, ActualResult("ok", usd=30))
    answer = await waiting
    assert isinstance(answer, HoldTaken)
    assert answer.flight.since == settled_at
    assert not (await world.session("s1")).cost_cap_reached


async def test_a_wait_is_a_refusal_once_the_holds_before_it_were_really_spent(world: World) -> None:
    lease = await start_session(world)
    first = await take_hold(world, lease, call(world, 80, "first"))
    waiting = asyncio.create_task(hold(world.ledger, lease, call(world, 60)))
    await world.advance(SECOND)
    await world.ledger.settle(lease, first.flight, ActualResult("ok", usd=80))
    assert isinstance(await waiting, HoldRefused)


async def test_a_wait_is_bounded_and_leaves_nothing_behind(world: World) -> None:
    lease = await start_session(world)
    await take_hold(world, lease, call(world, 80, "first"))
    before, events = world.now, len(world.history)
    answer = await hold(world.ledger, lease, call(world, 60))
    assert answer == BudgetBusy("c1")
    assert world.now - before == BUDGET_WAIT
    assert len(world.history) == events
    assert await sums(world) == (0, 80, 0)


async def test_a_hold_that_another_process_settles_is_noticed_within_half_a_second(world: World) -> None:
    lease = await start_session(world)
    first = await take_hold(world, lease, call(world, 80, "first"))
    waiting = asyncio.create_task(hold(world.ledger, lease, call(world, 60)))
    await world.advance(30 * SECOND)
    await Ledger(world.store, world.clock).settle(lease, first.flight, ActualResult("ok", usd=0))
    await world.advance(SECOND // 2)
    assert waiting.done()


async def test_all_who_wait_get_their_turn_as_holds_are_settled(world: World) -> None:
    lease = await start_session(world)

    async def spend(number: int) -> None:
        event = await take_hold(world, lease, call(world, 40, f"c{number}"))
        await world.clock.sleep(SECOND)
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=1))

    before = world.now
    await asyncio.gather(*(spend(number) for number in range(20)))
    assert await sums(world) == (20, 0, 0)
    assert world.now - before == 10 * SECOND


async def test_whoever_gives_up_waiting_does_not_take_the_word_from_others(world: World) -> None:
    lease = await start_session(world)
    first = await take_hold(world, lease, call(world, 100, "first"))
    waiting = [asyncio.create_task(hold(world.ledger, lease, call(world, 50, f"c{number}"))) for number in range(2)]
    await world.advance(SECOND)
    waiting[0].cancel()
    before = world.now
    await world.ledger.settle(lease, first.flight, ActualResult("ok", usd=0))
    assert isinstance(await waiting[1], HoldTaken)
    assert world.now == before


@ON_EITHER_STORE
def test_dearer_than_held_but_within_the_cap_just_settles(path: str | None) -> None:
    async def scene() -> None:
        lease = await start_session(world)
        event = await take_hold(world, lease, call(world, 10))
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=90))
        assert await sums(world) == (90, 0, 0)
        assert not (await world.session("s1")).overrun

    with World(path=path) as world:
        world.run(scene())


@ON_EITHER_STORE
def test_a_truth_beyond_the_cap_is_recorded_in_full_as_an_overrun_with_an_incident(path: str | None) -> None:
    async def scene() -> None:
        lease = await start_session(world)
        taken = await take_hold(world, lease, call(world, 10))
        committed = (await world.ledger.settle(lease, taken.flight, ActualResult("ok", usd=130))).committed
        assert committed.events[1].event == OverrunIncurred(
            hold="c1", scope="session:s1", window="", unit="usd", amount=30
        )
        assert await sums(world) == (130, 0, 30)
        assert (await world.session("s1")).overrun
        assert isinstance(await hold(world.ledger, lease, call(world, 1, "c2")), HoldRefused)

    with World(path=path) as world:
        world.run(scene())


@ON_EITHER_STORE
def test_an_overrun_into_what_others_hold_breaks_no_promise_made_to_them(path: str | None) -> None:
    async def scene() -> None:
        lease = await start_session(world)
        first = await take_hold(world, lease, call(world, 50, "first"))
        second = await take_hold(world, lease, call(world, 50, "second"))
        await world.ledger.settle(lease, first.flight, ActualResult("ok", usd=70))
        assert await sums(world) == (70, 50, 20)
        await world.ledger.settle(lease, second.flight, ActualResult("ok", usd=50))
        assert await sums(world) == (120, 0, 20)

    with World(path=path) as world:
        world.run(scene())


@ON_EITHER_STORE
def test_a_cap_can_be_lowered_below_what_is_spent_and_held_and_then_nothing_more_fits(path: str | None) -> None:
    async def scene() -> None:
        lease = await start_session(world)
        await spend_amount(world, lease, 40, "first")
        event = await take_hold(world, lease, call(world, 30, "second"))
        await world.store.commit(change_cap(SESSION, 50, "mara", "lower"))
        assert await sums(world) == (40, 30, 20)
        assert (await budget(world)).cap == 50
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=30))
        assert await sums(world) == (70, 0, 20)
        assert isinstance(await hold(world.ledger, lease, call(world, 1, "third")), HoldRefused)

    with World(path=path) as world:
        world.run(scene())


async def test_what_is_held_already_is_not_held_a_second_time_by_a_later_attempt(world: World) -> None:
    lease = await start_session(world)
    assert isinstance(await hold(world.ledger, lease, call(world, 1)), HoldTaken)
    with pytest.raises(ValueError, match="already has a hold"):
        await hold(world.ledger, lease, call(world, 1), attempt=1)


async def test_after_a_person_raised_the_cap_the_next_attempt_continues_in_place(world: World) -> None:
    lease = await start_session(world)
    await spend_amount(world, lease, 100, "first")
    intent = call(world, 50)
    assert isinstance(await hold(world.ledger, lease, intent), HoldRefused)
    await world.store.commit(change_cap(SESSION, 200, "mara", "raise", "It is nearly done."))
    assert isinstance(await hold(world.ledger, lease, intent), HoldRefused)
    assert isinstance(await hold(world.ledger, lease, intent, attempt=1), HoldTaken)
    assert await sums(world) == (100, 50, 0)


async def test_a_window_that_is_full_refuses_today_and_takes_the_same_tomorrow(world: World) -> None:
    lease = await start_session(world)
    await spend_amount(world, lease, 100, "today", DAILY)
    answer = await hold(world.ledger, lease, call(world, 1, caps=DAILY))
    assert isinstance(answer, HoldRefused)
    rolls = window_end(answer.event.window)
    assert rolls == VIRTUAL_START + DAY
    await world.advance(rolls - world.now)
    assert isinstance(await hold(world.ledger, lease, call(world, 1, caps=DAILY), attempt=1), HoldTaken)


async def test_a_hold_is_settled_into_the_window_that_it_was_taken_from(world: World) -> None:
    lease = await start_session(world)
    await world.advance(DAY - SECOND)
    event = await take_hold(world, lease, call(world, 60, caps=DAILY))
    await world.advance(HOUR)
    await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=45))
    assert await sums(world, Account("agent:a1", "day/2026-01-01", "usd")) == (45, 0, 0)
    assert await sums(world, Account("agent:a1", "day/2026-01-02", "usd")) == (0, 0, 0)


def test_a_hold_whose_answer_was_lost_at_midnight_is_still_the_hold_of_yesterday() -> None:
    async def scene() -> None:
        lease = await start_session(world)
        await world.advance(DAY - SECOND)
        with pytest.raises(StoreUnavailable):
            await hold(world.ledger, lease, call(world, 60, caps=DAILY))
        await world.advance(MINUTE)
        event = await take_hold(world, lease, call(world, 60, caps=DAILY))
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=45))
        assert await sums(world, Account("agent:a1", "day/2026-01-01", "usd")) == (45, 0, 0)
        assert await sums(world, Account("agent:a1", "day/2026-01-02", "usd")) == (0, 0, 0)

    with World(crash=Crash(2, "answer_lost")) as world:
        world.run(scene())


async def test_what_is_settled_twice_is_charged_once(world: World) -> None:
    lease = await start_session(world)
    event = await take_hold(world, lease, call(world, 60))
    first = (await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=25))).committed
    second = (await world.ledger.settle(lease, event.flight, ActualResult("error", usd=99))).committed
    assert second.is_repeated
    assert second.events == first.events
    assert await sums(world) == (25, 0, 0)


async def test_what_is_spent_and_held_survives_a_restart(world: World) -> None:
    lease = await start_session(world)
    await spend_amount(world, lease, 70, "first")
    await take_hold(world, lease, call(world, 20, "second"))
    world.crash()
    await world.restart()
    assert await sums(world) == (70, 20, 0)
    (again,) = await take_over(world)
    assert isinstance(await hold(world.ledger, again, call(world, 40, "third")), HoldRefused)


async def take_over(world: World) -> list[Lease]:
    await world.advance(MINUTE)
    return list(await world.store.claim(WorkerId("w2"), 10))


async def test_a_hold_in_doubt_is_freed_by_no_timer_and_settled_at_its_most(world: World) -> None:
    lease = await start_session(world)
    await take_hold(world, lease, call(world, 60))
    world.crash()
    await world.advance(365 * DAY)
    await world.restart()
    assert await sums(world) == (0, 60, 0)
    (again,) = await take_over(world)
    assert (await world.store.commit(end_session(again, "ERROR", "crashed"))).events == ()
    await world.ledger.settle_in_doubt(again, list((await world.session("s1")).in_flight.values()))
    assert await sums(world) == (60, 0, 0)
    assert await world.store.ask(Query("holds", HoldRow)) == []


async def test_an_owner_that_lost_its_lease_can_neither_hold_nor_settle(world: World) -> None:
    lease = await start_session(world)
    event = await take_hold(world, lease, call(world, 60))
    await take_over(world)
    with pytest.raises(LeaseLost):
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=1))
    with pytest.raises(LeaseLost):
        await hold(world.ledger, lease, call(world, 1, "c2"))
    assert await sums(world) == (0, 60, 0)


async def test_tokens_are_held_and_settled_like_money(world: World) -> None:
    lease = await start_session(world)
    caps = Caps(session=Cap(None), agent=(), fleet=(), token_budget=1000)

    def request(name: str, tokens: int) -> RequestStarted:
        amounts = make_legs(caps, Spender("s1", "a1"), world.now, usd=5, tokens=tokens)
        return RequestStarted(request=name, model="scripted:m", purpose="turn", legs=amounts)

    account = Account("session:s1", "", "tokens")
    taken = await take_hold(world, lease, request("r1", 800))
    assert await sums(world, account) == (0, 800, 0)
    await world.ledger.settle(lease, taken.flight, ActualResult("ok", usd=2, tokens=300))
    assert await sums(world, account) == (300, 0, 0)
    answer = await hold(world.ledger, lease, request("r2", 701))
    assert isinstance(answer, HoldRefused)
    assert answer.event.unit == "tokens"


async def test_every_spend_is_logged_with_who_spent_it_on_what_and_why(world: World) -> None:
    lease = await start_session(world, agent="night-watch")
    amounts = make_legs(CAPS, Spender("s1", "night-watch"), world.now, usd=50)
    event = await take_hold(
        world, lease, RequestStarted(request="r1", model="scripted:m", purpose="gate", legs=amounts)
    )
    await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=7, usage=Usage(100, 20, 30, 4)))
    (spend,) = await world.store.ask(Query("all_spends", SpendRow))
    assert (spend.at, spend.hold, spend.session) == (world.now, "r1", "s1")
    assert (spend.agent, spend.trigger) == ("night-watch", "")
    assert (spend.name, spend.purpose) == ("scripted:m", "gate")
    assert (spend.usd, spend.held_usd) == (7, 50)
    assert (spend.input_tokens, spend.output_tokens) == (100, 20)
    assert (spend.cache_read_tokens, spend.cache_write_tokens) == (30, 4)


async def test_a_call_that_costs_nothing_is_settled_without_touching_any_budget(world: World) -> None:
    lease = await start_session(world)
    event = await take_hold(world, lease, call(world, 0))
    committed = (await world.ledger.settle(lease, event.flight, ActualResult("ok"))).committed
    assert [stored.kind for stored in committed.events] == ["call_settled"]
    assert await world.store.ask(Query("budgets", BudgetRow)) == []


@pytest.mark.parametrize(
    ("tool", "purpose", "expected"),
    [
        ("spend", "turn", CostForecast(10, 10, 5)),
        ("spend", "sensor", CostForecast(COLD_START_COST, COLD_START_COST, 0)),
        ("other", "turn", CostForecast(COLD_START_COST, COLD_START_COST, 0)),
    ],
)
async def test_the_forecast_learns_from_the_settled_costs_of_one_tool_and_purpose(
    world: World, tool: str, purpose: Purpose, expected: CostForecast
) -> None:
    lease = await start_session(world)
    for number in range(5):
        await spend_amount(world, lease, 10, f"c{number}")
    assert await world.ledger.forecast(tool, purpose) == expected


async def test_the_forecast_forgets_what_is_older_than_thirty_days(world: World) -> None:
    lease = await start_session(world)
    for number in range(5):
        await spend_amount(world, lease, 10, f"c{number}")
    await world.advance(30 * DAY)
    assert (await world.ledger.forecast("spend")).samples == 5
    await world.advance(1)
    assert (await world.ledger.forecast("spend", cold_start=77)) == CostForecast(77, 77, 0)


async def test_a_body_too_large_for_the_events_table_is_kept_as_a_blob(world: World) -> None:
    lease = await start_session(world)
    large = bytes(BLOB_THRESHOLD + 1)
    event = await take_hold(world, lease, call(world, 1))
    settlement = await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=1, body=large))
    (settled,) = settlement.committed.events
    assert settled.body is None
    assert settled.blob is not None
    assert await world.store.get(settled.blob) == large


async def test_a_cap_that_is_lowered_while_the_clock_is_set_back_is_still_lowered() -> None:
    times = chain([1_000], repeat(500))
    store = JournalStore(MemoryEngine(now=lambda: next(times), new_id=lambda: "id"), inline=True)
    account = Account("fleet", "", "usd")
    await store.commit(change_cap(account, 100, "mara", "first"))
    await store.commit(change_cap(account, 50, "mara", "second"))
    (row,) = await store.ask(Query("budgets", BudgetRow))
    await store.close()
    assert row.cap == 50


async def test_a_cost_without_a_hold_still_counts(world: World) -> None:
    lease = await start_session(world)
    free = await take_hold(world, lease, CallStarted(call="c1", tool="look"))
    flight = msgspec.structs.replace(free.flight, accounts=list_accounts(CAPS, Spender("s1", "a1"), world.now))
    await world.ledger.settle(lease, flight, ActualResult("ok", usd=130))
    assert await sums(world) == (130, 0, 30)
    (spend,) = await world.store.ask(Query("all_spends", SpendRow))
    assert (spend.name, spend.usd, spend.held_usd) == ("look", 130, 0)
    assert (await world.session("s1")).overrun


async def test_only_what_cost_no_more_than_its_hold_is_settled_with_what_follows(world: World) -> None:
    lease = await start_session(world)
    free = await take_hold(world, lease, CallStarted(call="c1", tool="look"))
    event = await take_hold(world, lease, call(world, 60, "c2"))
    assert world.ledger.defer_settlement(lease, free.flight, ActualResult("ok", usd=1)) is None
    assert world.ledger.defer_settlement(lease, event.flight, ActualResult("ok", usd=61)) is None
    assert world.ledger.defer_settlement(lease, event.flight, ActualResult("error", usd=60)) is None
    assert not world.ledger.has_deferred(lease)
    settlement = world.ledger.defer_settlement(lease, event.flight, ActualResult("ok", usd=60))
    assert settlement is not None
    assert (settlement.usd, settlement.overrun) == (60, False)
    await world.ledger.flush_deferred(lease)
    assert await sums(world) == (60, 0, 0)


async def test_what_keeps_within_a_rate_is_settled_with_what_follows(world: World) -> None:
    lease = await start_session(world)
    rates = make_rate_legs((("mine:big", RateLimit(requests=5, tokens=1_000)),), world.now, 300)
    event = await take_hold(
        world, lease, msgspec.structs.replace(call(world, 60), legs=(*call(world, 60).legs, *rates))
    )
    assert world.ledger.defer_settlement(lease, event.flight, ActualResult("ok", usd=60, tokens=301)) is None
    assert world.ledger.defer_settlement(lease, event.flight, ActualResult("ok", usd=60, tokens=300)) is not None
    await world.ledger.flush_deferred(lease)
    rows = [row for row in await world.store.ask(Query("budgets", BudgetRow)) if row.scope == "model:mine:big"]
    assert {row.unit: (row.spent, row.held) for row in rows} == {"requests": (1, 0), "tokens": (300, 0)}


@pytest.mark.parametrize("reported", [-50, 2**63, -(2**70)])
@ON_EITHER_STORE
def test_a_cost_that_cannot_be_is_taken_for_none_that_was_reported(reported: int, path: str | None) -> None:
    async def scene() -> None:
        lease = await start_session(world)
        event = await take_hold(world, lease, call(world, 60))
        await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=reported, tokens=reported))
        assert await sums(world) == (60, 0, 0)

    with World(path=path) as world:
        world.run(scene())


@pytest.mark.parametrize("amount", [-1, MAX_AMOUNT + 1])
def test_no_amount_that_frees_money_or_cannot_be_counted_is_held(amount: int) -> None:
    with pytest.raises(ValueError, match="cannot be held"):
        Leg("session:s1", "", "usd", 100, amount)


@pytest.mark.parametrize("usd", [-1, 2**63])
def test_no_amount_that_gives_money_back_or_cannot_be_counted_is_charged(usd: int) -> None:
    with pytest.raises(ValueError, match="cannot be charged"):
        Charge(usd=usd)


async def test_who_waits_past_midnight_spends_the_money_of_the_new_day(world: World) -> None:
    lease = await start_session(world)
    midnight = window_end(window_at("day", world.now)) or 0
    await world.advance(midnight - world.now - 10 * SECOND)
    yesterday, today = (window_at("day", moment) for moment in (world.now, midnight))
    first = await take_hold(world, lease, call(world, 80, "first", DAILY))
    waiting = asyncio.create_task(hold(world.ledger, lease, call(world, 60, "second", DAILY)))
    await world.advance(20 * SECOND)
    answer = await waiting
    assert isinstance(answer, HoldTaken)
    assert await sums(world, Account("agent:a1", today, "usd")) == (0, 60, 0)
    await world.ledger.settle(lease, first.flight, ActualResult("ok", usd=80))
    assert await sums(world, Account("agent:a1", yesterday, "usd")) == (80, 0, 0)


async def test_money_of_a_past_day_is_not_held(world: World) -> None:
    lease = await start_session(world)
    late = call(world, 60, caps=DAILY)
    write = Write(session_stream("s1"), "late", partial(decide_hold, late), rows_of_hold("c1", late.legs), lease)
    await world.advance(DAY)
    assert (await world.store.commit(write)).events == ()


async def test_what_was_settled_and_is_held_again_is_settled_again(world: World) -> None:
    lease = await start_session(world)
    await spend_amount(world, lease, 10, "c1")
    outcome = await hold(world.ledger, lease, call(world, 20), attempt=1)
    assert isinstance(outcome, HoldTaken)
    await world.ledger.settle(lease, outcome.flight, ActualResult("ok", usd=15))
    assert await sums(world) == (25, 0, 0)


async def test_a_settlement_without_its_hold_charges_nothing(world: World) -> None:
    lease = await start_session(world)
    event = await take_hold(world, lease, call(world, 60))
    await world.ledger.settle(lease, event.flight, ActualResult("ok", usd=25))
    twice = Write(
        session_stream("s1"),
        "another key",
        lambda rows: settle_flight(event.flight, ActualResult("ok", usd=25), 25, 0, None, rows),
        rows_of_hold("c1", event.flight.legs),
        lease,
    )
    assert (await world.store.commit(twice)).events == ()
    assert await sums(world) == (25, 0, 0)

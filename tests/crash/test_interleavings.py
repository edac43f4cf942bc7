"""Parallel spenders never pass a cap, in whatever order they run; with one that checks and then spends, they do."""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import pytest

from halter.core.clock import MINUTE, SECOND
from halter.core.events import CallSettled, CallStarted
from halter.core.money import DOLLAR, Account, BudgetRow, Cap, Caps, Spender, make_legs
from halter.core.ports import Lease, Query, Stored
from halter.guard.halts import BudgetBusy
from halter.guard.ledger import ActualResult, Ledger
from halter.state.lifecycle import end_session
from halter.testing.fakes import HoldRefused, HoldTaken, hold
from halter.testing.world import World

SPENDERS = 20
CAP = 1 * DOLLAR
AMOUNT = 40 * DOLLAR // 100
CAPS = Caps(session=Cap(CAP), agent=(Cap(CAP, "day"),), fleet=(Cap(None, "day"),))
SEEDS = range(15)


Taken = HoldTaken | HoldRefused | BudgetBusy
Take = Callable[[World, Ledger, Lease, CallStarted], Awaitable[Taken]]


async def hold_correctly(_: World, ledger: Ledger, lease: Lease, intent: CallStarted) -> Taken:
    return await hold(ledger, lease, intent)


async def check_then_spend(world: World, ledger: Ledger, lease: Lease, intent: CallStarted) -> Taken:
    """Read what is spent, compare it with the cap, and only then hold; the store is given no cap to enforce."""
    values = {(row.scope, row.window): row.spent for row in await world.store.ask(Query("budgets", BudgetRow))}
    for leg in intent.legs:
        if leg.cap is not None and values.get((leg.scope, leg.window), 0) + leg.amount > leg.cap:
            return BudgetBusy(intent.call)
    uncapped = tuple(msgspec.structs.replace(leg, cap=None) for leg in intent.legs)
    return await hold(ledger, lease, msgspec.structs.replace(intent, legs=uncapped))


async def spend(world: World, ledger: Ledger, take: Take, lease: Lease) -> None:
    """Hold, take a while, settle at the full amount, and end."""
    amounts = make_legs(CAPS, Spender(lease.session, "crowd"), world.now, usd=AMOUNT)
    outcome = await take(world, ledger, lease, CallStarted(call=f"{lease.session}/call", tool="spend", legs=amounts))
    if isinstance(outcome, HoldTaken):
        await world.clock.sleep(world.random.randrange(SECOND))
        await ledger.settle(lease, outcome.flight, ActualResult("ok"))
    await world.store.commit(end_session(lease, "COMPLETED", "completed"))


def find_peak(history: list[Stored], account: Account) -> int:
    """Return the maximum that was spent and held at any moment, from the events alone."""
    text = total = 0
    values: dict[str, int] = {}
    for stored in history:
        match stored.event:
            case CallStarted(call=call, legs=outcome):
                values[call] = sum(
                    leg.amount for leg in outcome if (leg.scope, leg.window) == (account.scope, account.window)
                )
                total += values[call]
            case CallSettled(call=call, charge=charge):
                total += (charge.usd if charge else 0) - values[call]
            case _:
                pass
        text = max(text, total)
    return text


def run_crowd(seed: int, take: Take, path: str | None = None) -> tuple[int, Counter[str]]:
    """Let all spend concurrently; return the maximum charged to the cap, and the outcomes of the calls."""
    with World(seed, path=path) as world:

        async def main() -> None:
            for number in range(SPENDERS):
                await world.start(f"spender-{number}", agent="crowd")
            world.work(partial(spend, world, Ledger(world.store, world.clock), take))
            await world.advance(5 * MINUTE)

        world.run(main())
        kinds = Counter(event.kind for event in world.history)
        return find_peak(world.history, Account("agent:crowd", "day/2026-01-01", "usd")), kinds


@pytest.mark.parametrize("path", [None, ":memory:"], ids=["memory", "sqlite"])
def test_in_no_order_do_twenty_parallel_spenders_pass_a_cap_and_in_every_order_they_use_it(path: str | None) -> None:
    for seed in SEEDS if path is None else SEEDS[:3]:
        most, kinds = run_crowd(seed, hold_correctly, path)
        assert most == 2 * AMOUNT <= CAP
        assert (kinds["call_settled"], kinds["cost_cap_reached"], kinds["session_ended"]) == (2, 18, SPENDERS)


def test_checking_first_and_spending_later_is_caught_by_some_seed_and_then_always_by_that_seed() -> None:
    caught = [seed for seed in SEEDS[:3] if run_crowd(seed, check_then_spend)[0] > CAP]
    assert caught
    assert run_crowd(caught[0], check_then_spend) == run_crowd(caught[0], check_then_spend)

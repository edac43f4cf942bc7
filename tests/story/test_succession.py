"""A session cap ends a session, not its agent: the next one starts automatically within the other caps."""

from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.events import SessionStarted, TurnStarted
from halter.core.messages import Message, Text
from halter.core.money import format_usd, micros_to_usd
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow, SpendRow
from halter.guard.halts import halt, resume
from halter.operations import money, queries
from halter.operations.actor import Actor, Principal
from halter.runtime.switches import turn_off, turn_on
from halter.state.receipt import make_receipt
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet

PRICES = "models: {scripted:script: {price: {input: 1, output: 200}}}\n"
NAP = """\
- text: I looked.
  calls: [{tool: yield, arguments: {mode: sleep, sleep: 10m}}]
  usage: {input_tokens: 400, output_tokens: 240}
"""
LAST = """\
- when: The budget is used up
  text: The cellar is still to be looked at.
  usage: {input_tokens: 400, output_tokens: 100}
"""
WATCH = (
    "model: scripted\nscript: script.yaml\nautonomy: {{enabled: true, prompt: Look around.}}\nlimits: {{{limits}}}\n"
)
README = "max_cost_usd: 0.50, max_cost_usd_per_day: 3, max_output_tokens: 256"
"""The caps of the README's example."""


def agent(fleet: Fleet, limits: str = README, script: str = "", output: str = "") -> Path:
    text = WATCH.format(limits=limits)
    return fleet.agent("watch", text + output, script_yaml=script or LAST * 60 + NAP * 400)


async def list_spends(fleet: Fleet) -> list[SpendRow]:
    return list(await fleet.world.journal.ask(Query("all_spends", SpendRow)))


async def list_sessions(fleet: Fleet) -> list[SessionRow]:
    return sorted(await fleet.sessions("watch"), key=lambda row: row.started_at)


def read_first_message(events: list[Stored]) -> Message:
    turn_started = next(stored for stored in events if isinstance(stored.event, TurnStarted))
    return msgspec.json.decode(turn_started.body or b"", type=Message)


@CALM
async def test_an_agent_whose_session_cap_is_used_up_continues_within_its_other_caps(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    fleet.start(agent(fleet))
    await world.advance(36 * HOUR)
    session_rows = await list_sessions(fleet)
    *over, last = session_rows
    assert len(over) >= 6
    assert {(row.state, row.terminal_reason) for row in over} == {("BUDGET_EXCEEDED", "cost_cap_reached")}
    assert last.ended_at is None
    # One at a time: each starts when the previous one has ended.
    for before, after in pairwise(session_rows):
        assert before.ended_at is not None
        assert before.ended_at <= after.started_at
    for row in session_rows:
        assert make_receipt(await fleet.events(row.session)).cost_usd <= micros_to_usd(500_000)
    by_day: dict[int, int] = {}
    for each in await list_spends(fleet):
        by_day[each.at // DAY] = by_day.get(each.at // DAY, 0) + each.usd
    assert all(2_000_000 < amount <= 3_000_000 for amount in list(by_day.values())[:2])


@CALM
async def test_the_next_session_says_whom_it_follows_and_why_and_knows_its_last_words(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES)
    fleet.start(agent(fleet))
    await world.advance(3 * HOUR)
    events = await fleet.events("watch-2")
    (session_started,) = [stored.event for stored in events if isinstance(stored.event, SessionStarted)]
    assert (session_started.follows, session_started.because) == ("watch-1", "watch-1 has used up its cap of $0.50.")
    handover, prompt = [part for part in read_first_message(events).parts if isinstance(part, Text)]
    assert "The cellar is still to be looked at." in handover.text
    assert "You continue where session watch-1 stopped." in handover.text
    assert (handover.origin, handover.trusted) == ("model", False)
    assert prompt.text == "Look around."
    receipt = make_receipt(events)
    assert (receipt.follows, receipt.because) == ("watch-1", "watch-1 has used up its cap of $0.50.")
    report = await queries.report(Actor(fleet.app, Principal("ada", "admin", ())), 0)
    assert any(
        line.startswith("watch-1: BUDGET_EXCEEDED") and "; watch-2 continued" in line for line in report.ended_badly
    )
    assert ("watch", "watch-2 starts: watch-1 has used up its cap of $0.50.") in fleet.told


NONE = "max_cost_usd: 0.50, max_cost_usd_per_day: none, max_output_tokens: 256"


@CALM
async def test_without_a_cap_of_a_window_the_session_cap_is_the_only_one_and_a_person_is_waited_for(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, f"{PRICES}limits: {{max_cost_usd_per_day: none}}\n")
    fleet.start(agent(fleet, NONE))
    await world.advance(DAY)
    (row,) = await list_sessions(fleet)
    assert (row.state, row.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached")
    assert any("no hourly, daily or monthly cap bounds" in sentence for _, sentence in fleet.told)
    await turn_on(fleet.app, "watch")
    await world.advance(MINUTE)
    assert len(await list_sessions(fleet)) == 2


@pytest.mark.parametrize("on_cap", ["stop", "wrap_up"])
@CALM
async def test_a_cap_too_small_for_a_turn_does_not_start_session_after_session(
    world: World, tmp_path: Path, on_cap: str
) -> None:
    fleet = Fleet(world, tmp_path, PRICES)
    folder = agent(fleet, f"max_cost_usd: 0.01, on_cap: {on_cap}")
    for _ in range(2):
        fleet.start(folder)
        await world.advance(HOUR)
        await world.restart()
    (row,) = await list_sessions(fleet)
    assert row.state == "BUDGET_EXCEEDED"
    assert any("its cap of $0.01 before it finished a turn" in text and "Raise `max_cost_usd`" in text
               for _, text in fleet.told)  # fmt: skip


@CALM
async def test_a_session_that_asks_at_its_cap_has_no_successor_when_nobody_agrees(world: World, tmp_path: Path) -> None:
    fleet = Fleet(world, tmp_path, PRICES)
    fleet.start(agent(fleet, f"{README}, on_cap: ask"))
    await world.advance(3 * HOUR)
    (row,) = await list_sessions(fleet)
    assert row.state == "WAITING_FOR_BUDGET"
    await world.advance(DAY)
    (row,) = await list_sessions(fleet)
    assert row.state == "BUDGET_EXCEEDED"
    assert any("no person approved more" in sentence for _, sentence in fleet.told)


@CALM
@pytest.mark.parametrize("stops", ["off", "halt"])
async def test_an_agent_that_is_off_or_halted_gets_no_next_session(world: World, tmp_path: Path, stops: str) -> None:
    fleet = Fleet(world, tmp_path, PRICES)
    folder = agent(fleet)
    fleet.start(folder)
    while not (await list_sessions(fleet))[-1:] or (await list_sessions(fleet))[-1].ended_at is None:
        await world.advance(MINUTE)
        if len(await list_sessions(fleet)) > 1:
            break
    count = len(await list_sessions(fleet))
    if stops == "off":
        await turn_off(fleet.app, "watch")
    else:
        await world.store.commit(halt("agent:watch", "ada", "stop"))
    await world.advance(6 * HOUR)
    assert len(await list_sessions(fleet)) == count
    if stops == "halt":
        await world.store.commit(resume("agent:watch", "ada", "go", 0))
        await world.advance(6 * HOUR)
        assert len(await list_sessions(fleet)) > count


@CALM
async def test_where_the_day_is_used_up_too_the_next_session_sleeps_until_the_day_ends(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES, sturdy=True)
    fleet.start(agent(fleet, "max_cost_usd: 0.50, max_cost_usd_per_day: 0.60, max_output_tokens: 256"))
    await world.advance(DAY - HOUR)
    asleep = (await list_sessions(fleet))[-1]
    assert (asleep.state, asleep.ended_at) == ("SLEEPING", None)
    assert asleep.session == "watch-2"
    before = sum(each.usd for each in await list_spends(fleet))
    assert before <= 600_000
    await world.advance(2 * HOUR)
    assert before < sum(each.usd for each in await list_spends(fleet)) <= 1_200_000


@CALM
async def test_a_session_cap_is_shown_as_it_was_written_with_what_is_kept_for_its_last_words(
    world: World, tmp_path: Path
) -> None:
    fleet = Fleet(world, tmp_path, PRICES)
    fleet.start(agent(fleet))
    await world.advance(30 * MINUTE)
    desk = Actor(fleet.app, Principal("ada", "admin", ()))

    async def read_budget(session: str) -> money.Budget:
        budgets = (await money.budgets(desk)).budgets
        return next(row for row in budgets if (row.scope, row.unit) == (f"session:{session}", "usd"))

    first = await read_budget("watch-1")
    assert (first.cap, first.kept) == (Decimal("0.5"), Decimal("0.05"))
    assert first.remaining == Decimal("0.45") - first.spent
    assert first.describe() == f"{format_usd(first.spent)} spent of $0.50 ($0.05 reserved for the wrap-up)"
    await money.set_cap(desk, "raise", "session:watch-1", "0.8")
    raised = await read_budget("watch-1")
    assert (raised.cap, raised.kept, raised.cap_by) == (Decimal("0.8"), Decimal("0.05"), "ada")
    await world.advance(5 * HOUR)
    budget = await read_budget("watch-1")
    assert (budget.cap, budget.kept) == (Decimal("0.8"), 0)
    assert (await read_budget("watch-2")).cap == Decimal("0.5")

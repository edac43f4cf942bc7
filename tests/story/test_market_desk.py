"""A day of the market desk in virtual time: from noon to noon in New York, over a night that is an hour short."""

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events import CallSettled, HotStateSeen, RequestSettled, RequestStarted, WakePosted
from halter.core.money import micros_to_usd
from halter.core.ports import Query, Stored
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.state.receipt import make_receipt
from halter.testing.world import World
from tests.story.autonomous import Fleet, moment, rhythm

TOOLS = (Path(__file__).parents[2] / "examples" / "market-desk" / "tools.py").read_text("utf-8")
NOON = round(datetime(2026, 3, 7, 12, tzinfo=ZoneInfo("America/New_York")).timestamp()) * SECOND
"""In the night that follows, two o'clock is three."""

FLEET = """
models:
  scripted:script: {price: {input: 3, output: 15}}
  scripted:small: {price: {input: 0.1, output: 0.4}}
  scripted:scorer: {price: {input: 0.2, output: 1}}
"""
DESK = """
model: scripted
script: script.yaml
fallback_models: [reflex]
reflex:
  - say: The model is away, so I only watch.
    yield: {mode: sleep, sleep: 50m, wake_early_if: [anomaly], reason: the model is away}
limits: {max_retries: 1}
autonomy:
  enabled: true
  active_hours: {start: "08:00", end: "20:00", timezone: America/New_York}
  gate: {on: change, expression: skips >= 1, model: "scripted:small", prompt: Must the desk look at this?}
hot_state:
  fields:
    last_prices: {type: object, ttl: 60}
    indicators: {type: object, ttl: 60}
    positions: {type: object, ttl: 30, refresh_tool: get_positions, auto_refresh: true}
    cash: {type: number, ttl: 30, refresh_tool: get_account_balance, auto_refresh: true}
    signals_log: {type: array, max_items: 3}
sensors:
  - name: price_feed
    type: poll
    interval: 30
    jitter: 0
    source: {tool: get_market_data, arguments: {symbols: [ACME, GLOBEX, INITECH], shock_every: 7200}}
    updates:
      - {field: last_prices, path: last_prices}
      - {field: indicators, path: indicators}
    signals:
      - {name: anomaly, expression: value.indicators.move > 5.0, notify: true, cooldown: 30}
  - name: tape
    type: poll
    interval: 7h
    jitter: 0
    source: {tool: get_market_data, arguments: {symbols: [ACME], shock_every: 1000000}}
    updates: [{field: signals_log, path: indicators.volume, append: true}]
    signals:
      - {name: odd, model: "scripted:scorer", prompt: How odd is this?, threshold: 0.8, notify: true}
"""


def line(calls: str, used: tuple[int, int], when: str = "") -> str:
    usage = f"{{input_tokens: {used[0]}, output_tokens: {used[1]}}}"
    return f"- {{calls: [{calls}], usage: {usage}, when: '{when}'}}\n"


SLEEPS = line("{tool: yield, arguments: {mode: sleep, sleep: 50m, wake_early_if: [anomaly]}}", (1000, 50))
BUYS = line("{tool: place_order, arguments: {symbol: GLOBEX, side: buy, quantity: 5}}", (1000, 100))
LEAVES = line("{tool: yield, arguments: {mode: shutdown, reason: the day is over}}", (1000, 50))
AWAY = "- fails: {kind: Overloaded, message: come back later, unavailable: true, billed: false}\n"
NO = line("{tool: answer, arguments: {open: false, reason: calm}}", (300, 20), 'The data: {"changed"')
YES = line("{tool: answer, arguments: {open: true, reason: look}}", (300, 20), 'The data: {"changed"')
CALM = line("{tool: answer, arguments: {score: 0.1}}", (200, 10), 'The data: {"last_prices"')

SCRIPT = "".join(
    (
        *(NO, YES, NO, NO, NO),
        *(CALM,) * 4,
        *(SLEEPS, SLEEPS, SLEEPS, BUYS, SLEEPS, AWAY, AWAY, SLEEPS, SLEEPS, SLEEPS, LEAVES),
    )
)


A_DAY = """
00:00:00 turn 1
00:00:00 yielded sleep
00:00:00 SLEEPING until 00:50:00
00:50:00 woken by timer
00:50:00 skipped by expression
00:50:00 SLEEPING until 01:40:00
01:40:00 woken by timer
01:40:00 skipped by model
01:40:00 SLEEPING until 02:30:00
02:00:00 woken by signal
02:00:00 turn 2
02:00:00 yielded sleep
02:00:00 SLEEPING until 02:50:00
02:50:00 woken by timer
02:50:00 skipped by expression
02:50:00 SLEEPING until 03:40:00
03:40:00 woken by timer
03:40:00 turn 3
03:40:00 yielded sleep
03:40:00 SLEEPING until 04:30:00
04:00:00 woken by signal
04:00:00 turn 4
04:00:00 WAITING_FOR_APPROVAL until 28:00:00
04:30:00 woken by decision
04:30:00 yielded sleep
04:30:00 SLEEPING until 05:20:00
05:20:00 woken by timer
05:20:00 skipped by expression
05:20:00 SLEEPING until 06:10:00
06:00:00 woken by signal
06:00:00 turn 5
06:00:00 yielded sleep
06:00:00 SLEEPING until 06:50:00
06:50:00 woken by timer
06:50:00 skipped by expression
06:50:00 SLEEPING until 07:40:00
07:40:00 woken by timer
07:40:00 skipped by model
07:40:00 SLEEPING until 08:30:00
08:00:00 woken by signal
08:00:00 held back by active_hours
08:00:00 SLEEPING until 19:00:00
19:00:00 woken by timer
19:00:00 turn 6
19:00:00 yielded sleep
19:00:00 SLEEPING until 19:50:00
19:50:00 woken by timer
19:50:00 skipped by expression
19:50:00 SLEEPING until 20:40:00
20:00:00 woken by signal
20:00:00 turn 7
20:00:00 yielded sleep
20:00:00 SLEEPING until 20:50:00
20:50:00 woken by timer
20:50:00 skipped by expression
20:50:00 SLEEPING until 21:40:00
21:40:00 woken by timer
21:40:00 skipped by model
21:40:00 SLEEPING until 22:30:00
22:00:00 woken by signal
22:00:00 turn 8
22:00:00 yielded sleep
22:00:00 SLEEPING until 22:50:00
22:50:00 woken by timer
22:50:00 skipped by expression
22:50:00 SLEEPING until 23:40:00
23:40:00 woken by timer
23:40:00 skipped by model
23:40:00 SLEEPING until 24:30:00
24:00:00 woken by signal
24:00:00 turn 9
24:00:00 yielded shutdown
24:00:00 COMPLETED, completed
"""
"""At 08:00 since noon the day is over, at 14:00 the clock is put forward, and eleven hours make the night."""

A_TURN, AN_ORDER, A_GATE, A_SCORE = 3750, 4500, 38, 50
"""Micro-dollars: 1,000 tokens in and 50 out, 1,000 and 100, 300 and 20, 200 and 10."""
SPENT = {"turn": 8 * A_TURN + AN_ORDER, "gate": 5 * A_GATE, "signal": 4 * A_SCORE}


class Spent(msgspec.Struct, frozen=True):
    """What one purpose cost."""

    purpose: str
    name: str
    spends: int
    usd: int


def test_a_day_of_the_desk_goes_exactly_so_and_costs_exactly_that(tmp_path: Path) -> None:
    with World(7, start=NOON, orderly=True, lease=30 * MINUTE) as world:
        world.run(a_day(world, tmp_path))


async def a_day(world: World, home: Path) -> None:
    fleet = Fleet(world, home, FLEET, sturdy=True)
    fleet.start(fleet.agent("desk", DESK, TOOLS, script_yaml=SCRIPT))
    await world.advance(4 * HOUR + MINUTE)
    assert (await fleet.row("desk-1")).state == "WAITING_FOR_APPROVAL"
    before = len(fleet.pulses)
    await world.advance(29 * MINUTE)
    # While a person is waited for, the sensors read on.
    assert {pulse[1] for pulse in fleet.pulses[before:]} == {"autonomy:sensor_updated"}
    assert len(fleet.pulses) - before == 29 * 2
    (pending_decision,) = await list_pending_decisions(world.journal)
    assert (pending_decision.name, pending_decision.level, moment(pending_decision.asked_at, NOON)) == (
        "place_order",
        "RESTRICTED",
        "04:00:00",
    )
    await world.journal.commit(answer_decision(pending_decision, "approve", "ada", "yes"))
    await world.advance(19 * HOUR + 30 * MINUTE)
    events = await fleet.events("desk-1")
    assert rhythm(events, NOON) == A_DAY.split("\n")[1:-1]
    assert_alerts(await fleet.inbox("desk-1"))
    assert_outage(events)
    assert_order(events)
    await assert_costs(world, events)


def assert_alerts(inbox: list[Stored]) -> None:
    """Each shock is an alert; at night it wakes nobody, since nobody waits for it."""
    wake_events = [(stored.at, stored.event) for stored in inbox if isinstance(stored.event, WakePosted)]
    alerts = [(moment(at, NOON)[:2], event.wakes) for at, event in wake_events if event.notifies]
    assert alerts == [(f"{hour:02}", not 8 < hour < 20) for hour in range(2, 26, 2)]


def assert_outage(events: list[Stored]) -> None:
    """When the provider is away, rules take over, and the model is back for the next turn."""
    models = {event.request: event.model for stored in events if isinstance(event := stored.event, RequestStarted)}
    outcomes = [
        (models[event.request], event.outcome)
        for stored in events
        if isinstance(event := stored.event, RequestSettled) and event.request.startswith("desk-1.t5_")
    ]
    assert outcomes == [("scripted:script", "error")] * 2 + [("reflex:rules", "ok")]


def assert_order(events: list[Stored]) -> None:
    """What a person agreed to is done once, and stands in what the next turn sees."""
    settlements = [(stored.at, stored.event) for stored in events if isinstance(stored.event, CallSettled)]
    orders = [(moment(at, NOON), event.outcome) for at, event in settlements if event.call == "desk-1.c4_0_0"]
    assert orders == [("04:30:00", "ok")]
    readings = [
        (stored.event.turn, msgspec.json.decode(stored.body or b""))
        for stored in events
        if isinstance(stored.event, HotStateSeen)
    ]
    holdings = {turn: (values["positions"]["GLOBEX"], values["cash"]) for turn, values in readings}
    result = round(10_000 - holdings[5][1], 2)
    assert 5 * 47 < result < 5 * 49
    assert holdings == {turn: (0, 10_000) if turn < 5 else (5, 10_000 - result) for turn in range(1, 10)}


async def assert_costs(world: World, events: list[Stored]) -> None:
    """Every micro-dollar has a purpose, in the receipt and in the log of what was spent."""
    receipt = make_receipt(events)
    assert receipt.spent_by_purpose_usd == {purpose: micros_to_usd(micros) for purpose, micros in SPENT.items()}
    assert (receipt.cost_usd, receipt.overruns, receipt.in_doubt) == (micros_to_usd(sum(SPENT.values())), (), ())
    # Two of the turn's spends are the attempts that no provider answered.
    assert set(await world.journal.ask(Query("spent_by_purpose", Spent, {"since": 0}))) == {
        Spent("turn", "scripted:script", 11, SPENT["turn"]),
        Spent("turn", "reflex:rules", 1, 0),
        Spent("gate", "scripted:small", 5, SPENT["gate"]),
        Spent("signal", "scripted:scorer", 4, SPENT["signal"]),
    }

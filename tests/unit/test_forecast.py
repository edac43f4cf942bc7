"""A forecast is what the clock alone can cause, bounded by every cap that applies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.autonomy.triggers import (
    Balances,
    Clockwork,
    Forecast,
    OpenRuns,
    ScheduledRuns,
    bound_by_windows,
    forecast_bounds,
)
from halter.core.clock import DAY, HOUR, MINUTE, SECOND, WindowLength, window_at
from halter.core.money import DOLLAR, BudgetRow, Cap, Caps
from halter.core.schedules import Timing
from halter.testing.world import VIRTUAL_START

MONTH = 30 * DAY
NO_CAPS = Caps(session=Cap(None), agent=(Cap(None),), fleet=(Cap(None),))
HOURLY = Timing(every=HOUR, anchor=VIRTUAL_START)
EACH_SECOND = Timing(every=SECOND, anchor=VIRTUAL_START)


def desk(caps: Caps, *, renews: bool = False, **schedules: Timing) -> Clockwork:
    runs = [ScheduledRuns(trigger=f"desk/{name}", timing=timing, caps=caps) for name, timing in schedules.items()]
    own = (caps.session.max_cost_usd,) if renews else ()
    return Clockwork(agent="desk", caps=caps, session_bounds=own, renews=renews, schedules=tuple(runs))


def balance(scope: str, spent: int, cap: int | None = None, by: str = "") -> Balances:
    window = window_at("day", VIRTUAL_START)
    return {(scope, window): BudgetRow(scope, window, "usd", cap, 0, by, spent, held=DOLLAR // 2)}


def test_an_unattended_agent_without_a_gate_is_forecast_at_what_its_caps_leave() -> None:
    assert forecast_bounds(desk(Caps(), renews=True), {}, VIRTUAL_START, VIRTUAL_START + 12 * HOUR) == Forecast(
        5 * DOLLAR, 5 * DOLLAR
    )
    assert forecast_bounds(desk(Caps(), renews=True), {}, VIRTUAL_START, VIRTUAL_START + MONTH) == Forecast(
        150 * DOLLAR, 150 * DOLLAR
    )


def test_hourly_runs_under_a_day_cap_of_five_cents_cost_that_cap_each_day() -> None:
    caps = Caps(session=Cap(DOLLAR // 2), agent=(Cap(DOLLAR // 20, "day"),))
    assert (
        forecast_bounds(desk(caps, hourly=HOURLY), {}, VIRTUAL_START, VIRTUAL_START + MONTH).clock == 30 * DOLLAR // 20
    )


def test_a_span_that_passes_midnight_has_the_rest_of_today_and_all_of_tomorrow() -> None:
    balances = balance("agent:desk", 4 * DOLLAR)
    work, since = desk(Caps(), renews=True), VIRTUAL_START + 20 * HOUR
    assert forecast_bounds(work, balances, since, since + 12 * HOUR).clock == 6 * DOLLAR
    lowered = balance("agent:desk", DOLLAR, 2 * DOLLAR, "ada")
    assert forecast_bounds(work, lowered, since, since + 12 * HOUR).clock == 6 * DOLLAR


def test_in_each_window_the_tightest_cap_counts() -> None:
    caps = Caps(agent=(Cap(DOLLAR, "hour"), Cap(5 * DOLLAR, "day")), fleet=(Cap(20 * DOLLAR, "day"),))
    since = VIRTUAL_START + 21 * HOUR
    # Three hours of today, and all that tomorrow allows.
    assert forecast_bounds(desk(caps, renews=True), {}, since, since + 12 * HOUR).clock == 8 * DOLLAR
    used_up = balance("fleet", 20 * DOLLAR)
    assert forecast_bounds(desk(caps, renews=True), used_up, since, since + 12 * HOUR).clock == 5 * DOLLAR


def test_without_any_cap_it_is_any_amount_and_without_anything_to_do_it_is_nothing() -> None:
    assert forecast_bounds(desk(NO_CAPS, renews=True), {}, VIRTUAL_START, VIRTUAL_START + DAY) == Forecast(None, None)
    assert forecast_bounds(desk(NO_CAPS, hourly=HOURLY), {}, VIRTUAL_START, VIRTUAL_START + DAY) == Forecast(None, None)
    assert forecast_bounds(desk(NO_CAPS), {}, VIRTUAL_START, VIRTUAL_START + DAY) == Forecast(0, None)
    assert forecast_bounds(desk(Caps()), {}, VIRTUAL_START, VIRTUAL_START + DAY) == Forecast(0, 5 * DOLLAR)


def test_an_unattended_agent_spends_at_most_one_session_that_nothing_renews() -> None:
    work = Clockwork(agent="desk", caps=Caps(), session_bounds=(DOLLAR // 3, DOLLAR // 3))
    assert forecast_bounds(work, {}, VIRTUAL_START, VIRTUAL_START + DAY) == Forecast(2 * (DOLLAR // 3), 5 * DOLLAR)


def test_what_has_no_price_costs_nothing() -> None:
    work = Clockwork(agent="desk", caps=NO_CAPS, session_bounds=(None,), renews=True, is_free=True)
    assert forecast_bounds(work, {}, VIRTUAL_START, VIRTUAL_START + MONTH) == Forecast(0, 0)


WIDE = Caps(agent=(Cap(None),), fleet=(Cap(None),))


@pytest.mark.parametrize(
    ("run", "amount"),
    [
        (ScheduledRuns(trigger="t", timing=HOURLY, caps=WIDE), 12 * DOLLAR),
        (ScheduledRuns(trigger="t", timing=HOURLY, caps=WIDE, pending=1), 13 * DOLLAR),
        (ScheduledRuns(trigger="t", timing=HOURLY, caps=WIDE, min_interval=4 * HOUR), 4 * DOLLAR),
        (ScheduledRuns(trigger="t", timing=EACH_SECOND, caps=WIDE), 43_200 * DOLLAR),
        (ScheduledRuns(trigger="t", timing=EACH_SECOND, caps=WIDE, min_interval=MINUTE), 786 * DOLLAR),
        (ScheduledRuns(trigger="t", timing=Timing(cron="*/30 * * * *"), caps=WIDE), 24 * DOLLAR),
        (ScheduledRuns(trigger="t", timing=Timing(at=VIRTUAL_START + DAY), caps=WIDE), 0),
        (ScheduledRuns(trigger="t", timing=Timing(at=VIRTUAL_START - DAY), caps=WIDE), 0),
        (ScheduledRuns(trigger="t", timing=Timing(every=HOUR, anchor=VIRTUAL_START + DAY), caps=WIDE), 0),
        (ScheduledRuns(trigger="t", timing=Timing(every=HOUR, anchor=VIRTUAL_START + 12 * HOUR), caps=WIDE), DOLLAR),
    ],
)
def test_runs_are_counted_by_their_times(run: ScheduledRuns, amount: int) -> None:
    work = Clockwork(agent="desk", caps=WIDE, schedules=(run,))
    assert forecast_bounds(work, {}, VIRTUAL_START, VIRTUAL_START + 12 * HOUR).clock == amount


def test_a_schedule_is_bounded_by_its_own_caps_in_the_windows_that_it_touches() -> None:
    caps = Caps(trigger=(Cap(3 * DOLLAR, "day"),), agent=(Cap(None),), fleet=(Cap(None),))
    work = desk(caps, hourly=HOURLY)
    assert forecast_bounds(work, {}, VIRTUAL_START, VIRTUAL_START + 12 * HOUR).clock == 3 * DOLLAR
    balances = balance("trigger:desk/hourly", 2 * DOLLAR)
    assert forecast_bounds(work, balances, VIRTUAL_START, VIRTUAL_START + DAY).clock == DOLLAR


AMOUNT = st.none() | st.integers(0, 40)
PERS: tuple[WindowLength, ...] = ("hour", "day", "month")


@st.composite
def limits(draw: st.DrawFn) -> list[tuple[str, Cap]]:
    return [(scope, Cap(draw(AMOUNT), per)) for scope in ("agent:desk", "fleet") for per in PERS if draw(st.booleans())]


@given(
    caps=limits(),
    since=st.integers(0, 40 * 24).map(lambda hours: VIRTUAL_START + hours * HOUR),
    hours=st.integers(1, 60),
    spent=st.integers(0, 50),
)
def test_the_bound_of_caps_is_exactly_what_a_spender_reaches_who_takes_all_it_can(
    caps: list[tuple[str, Cap]], since: int, hours: int, spent: int
) -> None:
    balances: dict[tuple[str, str], BudgetRow] = {}
    for scope, cap in caps:
        window = window_at(cap.per, since)
        balances[scope, window] = BudgetRow(scope, window, "usd", spent=spent)
    before = {key: row.spent for key, row in balances.items()}
    reached: int | None = 0
    for at in range(since, since + hours * HOUR, HOUR):
        accounts = [(scope, window_at(cap.per, at), cap.max_cost_usd) for scope, cap in caps]
        numbers = [max(0, cap - before.get((scope, window), 0)) for scope, window, cap in accounts if cap is not None]
        if not numbers:
            reached = None
            break
        for account in {(scope, window) for scope, window, _ in accounts}:
            before[account] = before.get(account, 0) + min(numbers)
        reached += min(numbers)
    assert bound_by_windows(caps, "UTC", balances, since, since + hours * HOUR) == reached


def test_what_is_open_spends_no_more_than_its_trigger_may_and_shares_that_with_the_runs_to_come() -> None:
    caps = Caps(session=Cap(DOLLAR), trigger=(Cap(15 * DOLLAR // 100, "day"),))
    open_runs = OpenRuns(trigger="desk/hourly", caps=caps, bounds=(DOLLAR, DOLLAR, DOLLAR))
    work = Clockwork(agent="desk", caps=Caps(), open_runs=(open_runs,))
    until = VIRTUAL_START + 12 * HOUR
    assert forecast_bounds(work, {}, VIRTUAL_START, until).clock == 15 * DOLLAR // 100
    runs = ScheduledRuns(trigger="desk/hourly", timing=HOURLY, caps=caps)
    both = Clockwork(agent="desk", caps=Caps(), open_runs=(open_runs,), schedules=(runs,))
    assert forecast_bounds(both, {}, VIRTUAL_START, until).clock == 15 * DOLLAR // 100
    spent = balance("trigger:desk/hourly", DOLLAR // 10)
    assert forecast_bounds(both, spent, VIRTUAL_START, until).clock == 5 * DOLLAR // 100
    raised = balance("trigger:desk/hourly", 0, 2 * DOLLAR, "ada")
    assert forecast_bounds(work, raised, VIRTUAL_START, until).clock == 2 * DOLLAR


def test_what_is_open_under_a_trigger_without_a_cap_of_its_own_spends_what_its_sessions_may() -> None:
    open_runs = OpenRuns(trigger="desk/w", caps=Caps(), bounds=(DOLLAR, DOLLAR // 2))
    work = Clockwork(agent="desk", caps=Caps(), open_runs=(open_runs,))
    assert forecast_bounds(work, {}, VIRTUAL_START, VIRTUAL_START + DAY).clock == 3 * DOLLAR // 2
    unbounded = OpenRuns(trigger="desk/w", caps=NO_CAPS, bounds=(DOLLAR, None))
    work = Clockwork(agent="desk", caps=NO_CAPS, open_runs=(unbounded,))
    assert forecast_bounds(work, {}, VIRTUAL_START, VIRTUAL_START + DAY) == Forecast(None, None)

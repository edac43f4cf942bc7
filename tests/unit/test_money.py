"""The rules of money: reserve an upper bound, act, settle with the truth."""

import itertools
import math
import re
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.forecast import COLD_START_COST, CostForecast, forecast_cost
from halter.core.money import (
    DOLLAR,
    Account,
    BudgetRow,
    Cap,
    CapMargin,
    CapReached,
    Caps,
    Charge,
    Contended,
    Leg,
    Overrun,
    Reserved,
    Spender,
    Unit,
    compute_cap_overrun,
    format_bound_micros,
    format_compared_micros,
    format_exact_micros,
    format_micros,
    format_share,
    format_usd,
    list_accounts,
    micros_to_usd,
    reserve,
    settle,
    usd_to_micros,
)

AMOUNTS = st.integers(0, 1000)
CAPS = st.none() | AMOUNTS


def leg(amount: int, cap: int | None, scope: str = "fleet") -> Leg:
    return Leg(scope, "", "usd", cap, amount)


def budget(spent: int = 0, held: int = 0, cap: int | None = None, by: str = "", overrun: int = 0) -> BudgetRow:
    return BudgetRow("fleet", "", "usd", cap, 0, by, spent, held, overrun)


@pytest.mark.parametrize(
    ("written", "micros"),
    [
        ("1", 1_000_000),
        ("0.000001", 1),
        ("0.0000001", 1),
        ("0.1", 100_000),
        (0.1, 100_000),
        (20, 20_000_000),
        (Decimal("3.14"), 3_140_000),
        ("0", 0),
        ("1e-6", 1),
    ],
)
def test_dollars_become_whole_micro_dollars_and_never_fewer(written: str | float | Decimal, micros: int) -> None:
    assert usd_to_micros(written) == micros


@given(st.decimals(0, 10**9, allow_nan=False, places=9))
def test_rounding_up_adds_less_than_one_micro_dollar(amount: Decimal) -> None:
    assert amount * DOLLAR <= usd_to_micros(amount) < amount * DOLLAR + 1


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (0, "$0.00"),
        (1_000_000, "$1.00"),
        (12_340_000, "$12.34"),
        (1_234_567_890_000, "$1,234,567.89"),
        (12_300_000, "$12.30"),
        (10_000, "$0.01"),
        (14_999, "$0.01"),
        (15_000, "$0.02"),
        (1_000_001, "$1.00"),
        (999_999, "$1.00"),
        (100_000_500_000, "$100,000.50"),
        (9_999, "$0.01"),
        (9_949, "$0.0099"),
        (4_234, "$0.0042"),
        (5_000, "$0.005"),
        (123, "$0.00012"),
        (21, "$0.000021"),
        (1, "$0.000001"),
        (-2_504_000, "-$2.50"),
        (-1_234, "-$0.0012"),
    ],
)
def test_people_see_two_decimals_or_two_significant_digits_below_a_cent(micros: int, text: str) -> None:
    assert format_micros(micros) == text
    assert format_usd(micros_to_usd(micros)) == text


@given(st.integers(-(10**12), 10**12))
def test_a_shown_amount_is_short_near_the_exact_one_and_never_zero_for_something(micros: int) -> None:
    text = format_micros(micros)
    shown = int(Decimal(text.replace("$", "").replace(",", "")) * DOLLAR)
    assert re.fullmatch(r"-?\$[\d,]+\.(\d\d|00\d{1,4})", text)
    assert abs(shown - micros) <= (5_000 if abs(micros) >= 10_000 else abs(micros) // 20)
    assert (shown == 0) == (micros == 0)


@given(st.integers(0, 10**12))
def test_a_shown_bound_is_short_and_never_below_the_exact_one(micros: int) -> None:
    text = format_bound_micros(micros)
    shown = int(Decimal(text.replace("$", "").replace(",", "")) * DOLLAR)
    assert re.fullmatch(r"\$[\d,]+\.(\d\d|00\d{1,4})", text)
    assert micros <= shown <= micros + max(9_999, micros // 10)


@given(st.integers(0, 10**12))
def test_an_exact_amount_is_shown_to_the_last_digit(micros: int) -> None:
    assert usd_to_micros(format_exact_micros(micros).removeprefix("$").replace(",", "")) == micros


@pytest.mark.parametrize(
    ("amounts", "texts"),
    [
        ((810_000, 2_000_000), ["$0.81", "$2.00"]),
        ((1_234, 2_345_678), ["$0.0012", "$2.35"]),
        ((500_000, 500_000), ["$0.50", "$0.50"]),
        ((51_200, 50_800), ["$0.0512", "$0.0508"]),
        ((1_999_999, 2_000_000, 5_000_000), ["$1.999999", "$2.00", "$5.00"]),
    ],
)
def test_amounts_that_a_sentence_compares_are_exact_where_rounding_would_make_them_equal(
    amounts: tuple[int, ...], texts: list[str]
) -> None:
    assert format_compared_micros(*amounts) == texts


@given(st.lists(st.integers(0, 10**8), min_size=2, max_size=4))
def test_compared_amounts_look_equal_only_if_they_are(amounts: list[int]) -> None:
    assert len({*format_compared_micros(*amounts)}) == len({*amounts})


def test_spending_is_shown_beside_its_cap() -> None:
    assert format_share(Decimal("0.81"), Decimal(2)) == "$0.81 of $2.00"
    assert format_share(Decimal("0.001234"), Decimal(2)) == "$0.0012 of $2.00"
    assert format_share(Decimal("1.9999"), Decimal(2)) == "$1.9999 of $2.00"
    assert format_share(Decimal("0.81"), None) == "$0.81"


@pytest.mark.parametrize(
    ("amount", "cap", "spent", "held", "verdict"),
    [
        (10, None, 10**9, 10**9, Reserved),
        (10, 10, 0, 0, Reserved),
        (11, 10, 0, 0, CapReached),
        (1, 10, 10, 0, CapReached),
        (0, 10, 10, 0, Reserved),
        (5, 10, 0, 5, Reserved),
        (6, 10, 0, 5, Contended),
        (1, 10, 0, 10, Contended),
        (10, 10, 0, 10, Contended),
        (3, 10, 8, 1, CapReached),
        (2, 10, 8, 1, Contended),
        (1, 10, 8, 1, Reserved),
        (1, 0, 0, 0, CapReached),
        (1, 10, 25, 0, CapReached),
    ],
)
def test_an_amount_fits_or_waits_for_holds_or_reaches_the_cap(
    amount: int, cap: int | None, spent: int, held: int, verdict: type
) -> None:
    answer = reserve([(leg(amount, cap), budget(spent, held))])
    assert type(answer) is verdict


def test_holds_are_not_spend_so_a_budget_full_of_holds_makes_wait_and_does_not_end_anything() -> None:
    answer = reserve([(leg(1 * DOLLAR, 25 * DOLLAR), budget(spent=0, held=25 * DOLLAR))])
    assert isinstance(answer, Contended)


def test_a_cap_that_is_reached_anywhere_outranks_a_wait_elsewhere() -> None:
    rows = {"session": budget(held=10), "fleet": budget(spent=10)}
    for order in itertools.permutations(rows):
        answer = reserve([(leg(5, 10, scope), rows[scope]) for scope in order])
        assert isinstance(answer, CapReached)
        assert answer.leg.scope == "fleet"


def test_the_word_of_a_person_binds_whatever_the_configuration_says() -> None:
    lowered, lifted = budget(spent=3, cap=5, by="mara"), budget(spent=3, cap=None, by="mara")
    assert isinstance(reserve([(leg(3, 100), lowered)]), CapReached)
    assert isinstance(reserve([(leg(3, 1), lifted)]), Reserved)


@pytest.mark.parametrize(
    ("unit", "cap", "remaining", "near"),
    [
        ("usd", 100, 11, False),
        ("usd", 100, 10, True),
        ("usd", 100, -5, True),
        ("usd", 0, 0, True),
        ("tokens", 100, 8, False),
        ("tokens", 100, 7, True),
        ("tokens", 5, 5, True),
    ],
)
def test_a_budget_is_near_its_cap_when_only_its_reserve_remains(
    unit: Unit, cap: int, remaining: int, *, near: bool
) -> None:
    assert CapMargin(0.1, 7).contains(unit, cap, remaining) is near


def test_without_a_reserve_a_budget_is_near_its_cap_when_nothing_remains() -> None:
    margin = CapMargin(0, 0)
    assert not margin.contains("usd", 100, 1)
    assert margin.contains("usd", 100, 0)


def test_the_configuration_of_whoever_asks_binds_where_no_person_spoke() -> None:
    assert isinstance(reserve([(leg(3, 100), budget(spent=3, cap=5))]), Reserved)
    assert isinstance(reserve([(leg(3, 5), budget(spent=3, cap=100))]), CapReached)


@given(AMOUNTS, AMOUNTS, AMOUNTS, CAPS)
def test_nothing_is_admitted_above_a_cap_and_nothing_that_fits_is_refused(
    amount: int, spent: int, held: int, cap: int | None
) -> None:
    match reserve([(leg(amount, cap), budget(spent, held))]):
        case Reserved():
            assert cap is None or spent + held + amount <= cap
        case Contended():
            assert cap is not None
            assert spent + amount <= cap < spent + held + amount
        case CapReached():
            assert cap is not None
            assert spent + amount > cap


@pytest.mark.parametrize(
    ("held_for", "truth", "cap", "spent", "held", "excess"),
    [
        pytest.param(10, 4, 10, 0, 10, 0, id="cheaper than held"),
        pytest.param(10, 10, 10, 0, 10, 0, id="as held"),
        pytest.param(10, 15, 20, 0, 10, 0, id="dearer than held, within the cap"),
        pytest.param(10, 25, 20, 0, 10, 5, id="beyond the cap"),
        pytest.param(10, 15, 20, 0, 20, 5, id="into what others hold"),
        pytest.param(10, 12, None, 0, 10, 0, id="no cap to pass"),
        pytest.param(0, 7, 5, 0, 0, 2, id="nothing was held"),
    ],
)
def test_the_truth_is_charged_and_only_what_passes_the_cap_is_an_overrun(
    held_for: int, truth: int, cap: int | None, spent: int, held: int, excess: int
) -> None:
    charge = settle([leg(held_for, cap)], truth, 0, lambda _: budget(spent, held, cap))
    assert charge.usd == truth
    assert charge.overruns == ((Overrun("fleet", "", "usd", excess),) if excess else ())


def test_each_of_several_overruns_counts_only_what_it_added_itself() -> None:
    before = budget(held=20, cap=20)
    first = settle([leg(10, 20)], 17, 0, lambda _: before)
    between = before.with_amounts(spent=17, held=-10, overrun=7)
    second = settle([leg(10, 20)], 13, 0, lambda _: between)
    assert [over.amount for over in first.overruns + second.overruns] == [7, 3]


def test_an_overrun_of_yesterday_does_not_hide_that_a_raised_cap_is_passed_as_well() -> None:
    raised = budget(spent=130, held=70, cap=200, by="mara", overrun=30)
    charge = settle([leg(70, 100)], 95, 0, lambda _: raised)
    assert [over.amount for over in charge.overruns] == [25]


def test_an_overrun_is_named_for_each_scope_whose_cap_is_passed() -> None:
    legs = [leg(10, 12, "session"), leg(10, 100, "agent"), leg(10, 11, "fleet")]
    rows = {taken.scope: BudgetRow(taken.scope, "", "usd", taken.cap, held=10) for taken in legs}
    charge = settle(legs, 15, 0, lambda found: rows[found.scope])
    assert [(overrun.scope, overrun.amount) for overrun in charge.overruns] == [("session", 3), ("fleet", 4)]


def test_tokens_are_settled_beside_the_money_and_each_against_its_own_leg() -> None:
    legs = [leg(10, 10), Leg("session:s", "", "tokens", 100, 50)]
    rows = {"usd": budget(held=10, cap=10), "tokens": BudgetRow("session:s", "", "tokens", 100, held=50)}
    charge = settle(legs, 8, 130, lambda found: rows[found.unit])
    assert charge == Charge(usd=8, tokens=130, overruns=(Overrun("session:s", "", "tokens", 30),))
    assert (charge.of("usd"), charge.of("tokens")) == (8, 130)


@given(AMOUNTS, st.integers(0, 3000), AMOUNTS, AMOUNTS, CAPS, AMOUNTS)
def test_the_truth_can_always_be_recorded(
    amount: int, truth: int, spent: int, others: int, cap: int | None, earlier: int
) -> None:
    """The rule that the database keeps, `spent + held <= cap + overrun`, never stands in its way."""
    budget_row = budget(spent, others + amount, overrun=earlier)
    before = budget_row.with_cap(cap, 1).with_amounts(overrun=compute_cap_overrun(budget_row, cap))
    charge = settle([leg(amount, cap)], truth, 0, lambda _: before)
    after = before.with_amounts(spent=charge.usd, held=-amount, overrun=sum(over.amount for over in charge.overruns))
    assert (after.spent, after.held) == (spent + truth, others)
    assert cap is None or after.spent + after.held <= cap + after.overrun
    passed = cap is not None and truth > amount and spent + others + truth > cap
    assert bool(charge.overruns) == passed


@pytest.mark.parametrize(
    ("spent", "held", "overrun", "cap", "excess"),
    [(5, 0, 0, 10, 0), (5, 5, 0, 10, 0), (5, 6, 0, 10, 1), (20, 0, 0, 10, 10), (20, 0, 4, 10, 6), (20, 0, 0, None, 0)],
)
def test_a_cap_may_be_lowered_below_what_is_spent_and_the_excess_is_known(
    spent: int, held: int, overrun: int, cap: int | None, excess: int
) -> None:
    assert compute_cap_overrun(budget(spent, held, overrun=overrun), cap) == excess


@given(AMOUNTS, AMOUNTS, CAPS)
def test_a_lowered_cap_can_always_be_recorded(spent: int, held: int, cap: int | None) -> None:
    before = budget(spent, held)
    after = before.with_cap(cap, 1, "mara").with_amounts(overrun=compute_cap_overrun(before, cap))
    assert after.cap == cap
    assert cap is None or after.spent + after.held <= cap + after.overrun


CONFIGURED = st.lists(st.tuples(CAPS, st.integers(0, 5)), max_size=4)
SAID = st.lists(st.tuples(CAPS, st.integers(0, 5), st.sampled_from(["mara", "noor"])), max_size=2)


@given(CONFIGURED, SAID)
def test_the_same_words_on_a_cap_end_in_the_same_cap_in_any_order_of_the_streams(
    configured: list[tuple[int | None, int]], said: list[tuple[int | None, int, str]]
) -> None:
    ends = set[tuple[int | None, int, str]]()
    for order in itertools.permutations([*configured, *[None] * len(said)]):
        row, people = budget(), iter(said)
        for word in order:
            row = row.with_cap(*(word or next(people)))
        ends.add((row.cap, row.cap_at, row.cap_by))
    assert len(ends) == 1


def test_a_person_outranks_the_configuration_and_then_the_later_word_counts() -> None:
    row = budget().with_cap(10, 1).with_cap(20, 2)
    assert (row.cap, row.cap_by) == (20, "")
    row = row.with_cap(5, 0, "mara")
    assert (row.cap, row.cap_by) == (5, "mara")
    assert row.with_cap(50, 9).cap == 5
    assert row.with_cap(7, 1, "noor").with_cap(6, 1, "mara").cap == 6


def test_of_two_words_at_the_same_moment_the_wider_one_counts_so_that_no_hold_is_left_above_its_cap() -> None:
    assert budget().with_cap(10, 1).with_cap(20, 1).cap == budget().with_cap(20, 1).with_cap(10, 1).cap == 20
    assert budget().with_cap(None, 1).with_cap(20, 1).cap is None


def test_accounts_legs_and_charges_are_the_same_after_being_written_and_read() -> None:
    taken = leg(5, None)
    assert msgspec.json.decode(msgspec.json.encode(taken), type=Leg) == taken
    charge = Charge(usd=1, overruns=(Overrun("fleet", "day/2026-01-01", "usd", 3),))
    assert msgspec.json.decode(msgspec.json.encode(charge), type=Charge) == charge
    assert Account("fleet", "", "usd") != Account("fleet", "", "tokens")


@pytest.mark.parametrize("count", range(5))
def test_before_five_samples_the_forecast_is_the_default(count: int) -> None:
    assert forecast_cost([1] * count) == CostForecast(COLD_START_COST, COLD_START_COST, count)
    assert forecast_cost([1] * count, 77) == CostForecast(77, 77, count)


def test_a_steady_cost_is_forecast_exactly() -> None:
    assert forecast_cost([500] * 5) == CostForecast(500, 500, 5)


def test_the_bound_is_the_mean_and_three_deviations_rounded_up() -> None:
    assert forecast_cost([100, 100, 100, 100, 200]) == CostForecast(120, 120 + 3 * 40, 5)
    assert forecast_cost([1, 1, 1, 1, 2]).mean == 2


def test_only_the_newest_hundred_samples_count() -> None:
    assert forecast_cost([10] * 100 + [10**9] * 50) == CostForecast(10, 10, 100)


@given(st.lists(st.integers(0, 10**9), min_size=5, max_size=120))
def test_a_forecast_lies_between_the_least_and_the_most_and_its_bound_is_not_below_it(costs: list[int]) -> None:
    cost_forecast = forecast_cost(costs)
    newest = costs[:100]
    assert min(newest) <= cost_forecast.mean <= max(newest)
    assert cost_forecast.bound >= cost_forecast.mean >= math.floor(sum(newest) / len(newest))


def test_an_amount_counts_for_the_session_its_trigger_its_agent_and_the_fleet() -> None:
    caps = Caps(
        session=Cap(1), trigger=(Cap(2, "day"),), agent=(Cap(3, "day"), Cap(4, "month")), fleet=(Cap(5, "day"),)
    )
    scopes = ["session:s1", "trigger:t", "agent:a", "agent:a", "fleet"]
    accounts = list_accounts(caps, Spender("s1", "a", "t"), 0)
    assert [(leg.scope, leg.cap) for leg in accounts] == list(zip(scopes, range(1, 6), strict=True))
    legs = list_accounts(caps, Spender("s2", "a", "t"), 0)
    assert [leg.scope for leg in legs] == ["session:s2", *scopes[1:]]
    without = list_accounts(caps, Spender("s1", "a"), 0)
    assert [leg.scope for leg in without] == ["session:s1", *scopes[2:]]
    assert [leg.scope for leg in list_accounts(caps, Spender("s1", "b", "u"), 0)][1:3] == ["trigger:u", "agent:b"]

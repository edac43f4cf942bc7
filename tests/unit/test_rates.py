"""The rate of a model as pure rules: what fits a minute, what waits, and one row for all minutes in any order."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import MINUTE, SECOND
from halter.core.events import AnyEvent, GuardrailTriggered, RequestRefused, RequestSettled, RequestStarted
from halter.core.ids import StreamId, session_stream
from halter.core.money import MINUTE_WINDOW, BudgetRow, Cap, Caps, Charge, Contended, Leg, Reserved, Spender, settle
from halter.core.project import project_event
from halter.core.project.holds import budget_row
from halter.core.project.projection import EraseBodies
from halter.core.rates import RateLimit, RateReached, check_rate_legs, find_rate_limits, make_rate_legs
from halter.core.usage import FREE_PRICE
from halter.core.vocabulary import Row, RowKey
from halter.guard.halts import list_halt_rows
from halter.guard.judge_request import ModelAttempt, judge_attempt, list_request_rows
from halter.models.tariffs import compile_stated_price
from halter.operations.money import is_current

NOON = 1_767_268_800 * SECOND
MODEL = "anthropic:claude"
RATES = {MODEL: RateLimit(50, 40_000), "anthropic:*": RateLimit(80), "openai:gpt": RateLimit(1)}
UNCAPPED = Caps(Cap(None), (), (Cap(None, "day"),), (Cap(None, "day"),))


class Rows:
    """Rows as they stand, which a test may change by events."""

    def __init__(self, *rows: Row, now: int = NOON) -> None:
        self.now = now
        self.kept = {row.key(): row for row in rows}

    def get(self, kind: type[Any], *key: Any) -> Any:
        return self.kept.get((kind, *key))

    def find(self, keys: Any) -> Any:
        return [self.get(*key) for key in keys]

    def apply(self, event: AnyEvent, stream: StreamId, seq: int) -> None:
        project_event(event, Standing(stream, seq, self.now), self)

    def save(self, row: Row) -> None:
        self.kept[row.key()] = row

    def drop(self, key: RowKey) -> None:
        del self.kept[key]

    def erase(self, bodies: EraseBodies) -> None: ...


class Standing(msgspec.Struct):
    stream: StreamId
    seq: int
    at: int


def make_budget_row(
    unit: Any = "requests", *, at: int = NOON, spent: int = 0, held: int = 0, cap: int = 50
) -> BudgetRow:
    return BudgetRow(f"model:{MODEL}", MINUTE_WINDOW, unit, cap, at, "", spent, held)


def fits(*rows: BudgetRow, rate: RateLimit = RATES[MODEL], tokens: int = 1000) -> Reserved | Contended | RateReached:
    known = Rows(*rows)
    return check_rate_legs(make_rate_legs(((MODEL, rate),), NOON, tokens), lambda leg: budget_row(known, leg))


def test_a_model_is_asked_under_its_own_rate_and_that_of_its_provider() -> None:
    assert find_rate_limits(RATES, MODEL) == ((MODEL, RateLimit(50, 40_000)), ("anthropic:*", RateLimit(80)))
    assert find_rate_limits(RATES, "anthropic:haiku") == (("anthropic:*", RateLimit(80)),)
    assert find_rate_limits(RATES, "openai:gpt-5") == ()


def test_the_legs_of_a_rate_stand_in_the_minute_of_now() -> None:
    window = "minute/2026-01-01T12:00"
    assert make_rate_legs(find_rate_limits(RATES, MODEL), NOON + 59 * SECOND, 700) == (
        Leg(f"model:{MODEL}", window, "requests", 50, 1),
        Leg(f"model:{MODEL}", window, "tokens", 40_000, 700),
        Leg("model:anthropic:*", window, "requests", 80, 1),
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((), Reserved),
        ((make_budget_row(spent=30, held=19),), Reserved),
        ((make_budget_row(spent=50),), RateReached),
        ((make_budget_row(spent=30, held=20),), RateReached),
        ((make_budget_row(at=NOON - MINUTE, spent=50),), Reserved),
        ((make_budget_row(at=NOON + MINUTE),), Contended),
        ((make_budget_row("tokens", spent=39_000, cap=40_000),), Reserved),
        ((make_budget_row("tokens", spent=39_001, cap=40_000),), RateReached),
        ((make_budget_row("tokens", spent=30_000, held=9_001, cap=40_000),), Contended),
        ((make_budget_row("tokens", held=39_500, cap=40_000), make_budget_row(spent=50)), RateReached),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_fits_a_minute_is_let_through_and_all_else_waits(rows: tuple[BudgetRow, ...], expected: type) -> None:
    assert isinstance(fits(*rows), expected)


def test_a_request_that_is_larger_than_a_minute_holds_all_of_one() -> None:
    (leg,) = make_rate_legs(((MODEL, RateLimit(tokens=500)),), NOON, 700)
    assert leg.amount == 500
    assert isinstance(fits(rate=RateLimit(tokens=500), tokens=700), Reserved)
    assert isinstance(
        fits(make_budget_row("tokens", spent=1, cap=500), rate=RateLimit(tokens=500), tokens=700), RateReached
    )


def test_what_is_waited_for_is_said_in_a_sentence() -> None:
    reached = fits(make_budget_row("tokens", spent=40_000, cap=40_000))
    assert isinstance(reached, RateReached)
    assert reached.until == NOON + MINUTE
    assert reached.sentence == f"Waiting for the rate limit of {MODEL} until 12:01:00 UTC: 40,000 tokens a minute."


def test_to_pass_a_rate_is_no_overrun_of_money() -> None:
    legs = (*make_rate_legs(((MODEL, RateLimit(tokens=500)),), NOON, 700), Leg("session:s", "", "tokens", 1000, 700))
    charge = settle(legs, 0, 900, lambda leg: BudgetRow(leg.scope, leg.window, leg.unit, leg.cap, held=leg.amount))
    assert charge == Charge(tokens=900)


def make_attempt(**more: Any) -> ModelAttempt:
    fields: dict[str, Any] = {
        "request": "r/0",
        "model": MODEL,
        "purpose": "turn",
        "spender": Spender("s", "desk"),
        "caps": UNCAPPED,
        "now": NOON,
        "rates": compile_stated_price(FREE_PRICE),
        "input_tokens": 100,
        "max_output_tokens": 900,
        "min_output_tokens": 1,
        "halts": list_halt_rows(("fleet",)),
        "paces": ((MODEL, RateLimit(50, 40_000)),),
    }
    return ModelAttempt(**{**fields, **more})


def judge_events(model_attempt: ModelAttempt, *rows: Row, now: int = NOON) -> Sequence[AnyEvent]:
    return [draft.event for draft in judge_attempt(model_attempt, Rows(*rows, now=now))]


def test_a_rate_is_held_beside_the_money_in_the_minute_of_the_stores_clock() -> None:
    (event,) = judge_events(make_attempt(now=NOON - SECOND), now=NOON)
    assert isinstance(event, RequestStarted)
    assert event.legs[-2:] == make_rate_legs(((MODEL, RateLimit(50, 40_000)),), NOON, 1000)
    assert (BudgetRow, f"model:{MODEL}", MINUTE_WINDOW, "requests") in list_request_rows(make_attempt())


def test_a_late_request_gets_the_time_to_wait_for_and_nothing_is_refused_or_held() -> None:
    (waits,) = judge_events(make_attempt(), make_budget_row(spent=50))
    assert isinstance(waits, GuardrailTriggered)
    assert (waits.guardrail, waits.until) == ("model_rate", NOON + MINUTE)


def test_what_can_be_done_without_is_refused_in_a_minute_that_is_used_up() -> None:
    (refused,) = judge_events(make_attempt(optional=True), make_budget_row(spent=50))
    assert isinstance(refused, RequestRefused)
    assert refused.outcome == "rate_limited"


def test_an_agent_in_observe_mode_still_keeps_to_rates() -> None:
    (waits,) = judge_events(make_attempt(observe=True), make_budget_row(spent=50))
    assert isinstance(waits, GuardrailTriggered)


@pytest.mark.parametrize(
    ("row", "current"),
    [
        (make_budget_row(at=NOON - SECOND, spent=3), True),
        (make_budget_row(at=NOON - MINUTE, held=3), False),
        (BudgetRow("fleet", "day/2020-01-01", "usd", held=1), True),
        (BudgetRow("fleet", "day/2020-01-01", "usd"), False),
    ],
)
def test_a_past_minute_is_not_shown(row: BudgetRow, *, current: bool) -> None:
    assert is_current(row, NOON) == current


class Life(msgspec.Struct):
    """A request of some session: in which minute it began, under which rate, and what it used, if that is known yet."""

    session: int
    minute: int
    rate: int
    bound: int
    used: int | None


LIVES = st.lists(
    st.builds(
        Life,
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(0, 4),
        st.none() | st.integers(0, 9),
    ),
    max_size=12,
)


def streams_of(lives: Sequence[Life]) -> Mapping[StreamId, Sequence[AnyEvent]]:
    """Write down what happened: in each session one thing after the other, minutes never going back."""
    values: dict[StreamId, list[AnyEvent]] = {}
    ordered = sorted(lives, key=lambda life: life.minute)
    for number, life in enumerate(ordered):
        legs = make_rate_legs((("m:x", RateLimit(life.rate, life.rate)),), NOON + life.minute * MINUTE, life.bound)
        events = values.setdefault(session_stream(f"s{life.session}"), [])
        events.append(RequestStarted(request=f"r{number}", model="m:x", purpose="turn", legs=legs))
        if life.used is not None:
            events.append(RequestSettled(request=f"r{number}", outcome="ok", charge=Charge(tokens=life.used)))
    return values


@given(LIVES, st.randoms(use_true_random=False))
def test_any_order_of_the_streams_ends_in_the_same_rows(lives: list[Life], chance: Any) -> None:
    streams, ends = streams_of(lives), list[Mapping[Any, Row]]()
    for _ in range(3):
        rows, left = Rows(), {stream: list(events) for stream, events in streams.items()}
        while pending := [stream for stream, events in left.items() if events]:
            stream = chance.choice(pending)
            rows.apply(left[stream].pop(0), stream, 1)
        ends.append({key: row for key, row in rows.kept.items() if isinstance(row, BudgetRow)})
    assert all(one == other for one, other in pairwise(ends))
    newest = max((life.minute for life in lives), default=0)
    for row in ends[0].values():
        assert isinstance(row, BudgetRow)
        assert row.cap_at == NOON + newest * MINUTE
        assert row.cap is not None
        assert row.overrun == max(0, row.spent + row.held - row.cap)

"""The one decision about a request, against rows that a test lays out."""

from decimal import Decimal
from typing import Any

import pytest

from halter.core.clock import DAY
from halter.core.events import AnyEvent, RequestRefused, RequestStarted
from halter.core.money import BudgetRow, Cap, Caps, Spender
from halter.core.rows import HaltRow, HoldRow
from halter.core.usage import FREE_PRICE, ModelName, Price, Unpriced
from halter.core.vocabulary import Row
from halter.guard.halts import list_halt_rows
from halter.guard.judge_request import ModelAttempt, judge_attempt, list_request_rows
from halter.models.tariffs import compile_stated_price

UNCAPPED = Caps(Cap(None), (), (Cap(None, "day"),), (Cap(None, "day"),))
ONE = compile_stated_price(Price(Decimal(1), Decimal(1)), margin=Decimal(0))
"""A token costs a micro-dollar, and nothing is added to a bound."""

SCOPES = ("session:s", "agent:desk", "fleet")


class Laid:
    """Rows as a test lays them out."""

    def __init__(self, *rows: Row, now: int = 0) -> None:
        self.now = now
        self._rows = {row.key(): row for row in rows}

    def get(self, kind: type[Any], *key: Any) -> Any:
        return self._rows.get((kind, *key))

    def find(self, keys: Any) -> Any:
        return [self.get(*key) for key in keys]


def asking(caps: Caps = UNCAPPED, **more: Any) -> ModelAttempt:
    fields: dict[str, Any] = {
        "request": "r/0",
        "model": "test:paid",
        "purpose": "turn",
        "spender": Spender("s", "desk"),
        "caps": caps,
        "now": 0,
        "rates": ONE,
        "input_tokens": 100,
        "max_output_tokens": 1000,
        "min_output_tokens": 256,
        "halts": list_halt_rows(SCOPES),
    }
    return ModelAttempt(**{**fields, **more})


def session(caps: int | None) -> Caps:
    return Caps(Cap(caps), (), (Cap(None, "day"),), (Cap(None, "day"),))


def make_budget_row(amount: int, held: int = 0, **more: Any) -> BudgetRow:
    return BudgetRow("session:s", "", "usd", spent=amount, held=held, **more)


def judge_events(model_attempt: ModelAttempt, *rows: Row, now: int = 0) -> list[AnyEvent]:
    return [draft.event for draft in judge_attempt(model_attempt, Laid(*rows, now=now))]


def judge_admitted(model_attempt: ModelAttempt, *rows: Row) -> RequestStarted:
    (event,) = judge_events(model_attempt, *rows)
    assert isinstance(event, RequestStarted)
    return event


def judge_refusal(model_attempt: ModelAttempt, *rows: Row) -> RequestRefused:
    event = judge_events(model_attempt, *rows)[-1]
    assert isinstance(event, RequestRefused)
    return event


@pytest.mark.parametrize(
    ("cap", "already", "most"),
    [(None, 0, 1000), (1100, 0, 1000), (1099, 0, 999), (1100, 1, 999), (2000, 1500, 400), (2000, 1644, 256)],
)
def test_the_most_a_model_may_write_is_what_no_cap_stands_against(cap: int | None, already: int, most: int) -> None:
    event = judge_admitted(asking(session(cap)), make_budget_row(already))
    assert event.max_output_tokens == most
    assert {leg.amount for leg in event.legs} == {100 + most}


def test_the_tightest_of_all_caps_counts() -> None:
    caps = Caps(Cap(900), (), (Cap(700, "day"),), (Cap(800, "day"),))
    assert judge_admitted(asking(caps)).max_output_tokens == 600


def test_below_the_shortest_useful_answer_the_cap_is_reached_and_named() -> None:
    cap, event = judge_events(asking(session(2000)), make_budget_row(1645))
    assert (cap.KIND, event.KIND) == ("cost_cap_reached", "request_refused")
    assert (
        "$0.000355 is left of the cap of session:s"
        in judge_refusal(asking(session(2000)), make_budget_row(1645)).sentence
    )


def test_a_short_answer_that_was_asked_for_needs_no_more_than_that() -> None:
    assert judge_admitted(asking(session(110), max_output_tokens=10)).max_output_tokens == 10


def test_what_others_hold_is_waited_for_and_not_taken_for_spent() -> None:
    assert judge_events(asking(session(1100)), make_budget_row(0, held=1)) == []


def test_money_of_a_window_that_is_over_is_not_held() -> None:
    caps = Caps(Cap(None), (), (Cap(5000, "day"),), ())
    assert judge_events(asking(caps), now=DAY) == []
    assert len(judge_events(asking(caps).at(DAY), now=DAY)) == 1


def test_a_free_model_holds_its_tokens_alone() -> None:
    event = judge_admitted(asking(session(1), rates=compile_stated_price(FREE_PRICE)))
    assert [(leg.unit, leg.amount) for leg in event.legs] == [("tokens", 1100)]


def test_a_persons_cap_counts_where_the_configuration_has_none_and_lifts_the_one_it_has() -> None:
    assert judge_admitted(asking(), make_budget_row(0, cap=500, cap_by="ada")).max_output_tokens == 400
    assert judge_admitted(asking(session(500)), make_budget_row(0, cap=None, cap_by="ada")).max_output_tokens == 1000


def test_a_price_must_be_known_only_where_a_cap_binds() -> None:
    unpriced = Unpriced(ModelName("nobody", "knows"), "it is new")
    assert judge_refusal(asking(session(5000), rates=unpriced)).outcome == "disabled"
    assert judge_refusal(asking(rates=unpriced), make_budget_row(0, cap=5000, cap_by="ada")).outcome == "disabled"
    assert [leg.unit for leg in judge_admitted(asking(rates=unpriced)).legs] == ["tokens"]
    event = judge_admitted(asking(session(5000), rates=unpriced, observe=True))
    assert event.observed == ("disabled",)


def test_observing_waits_for_nobody_and_shortens_nothing() -> None:
    event = judge_admitted(asking(session(600), observe=True), make_budget_row(0, held=600))
    assert (event.max_output_tokens, event.observed) == (1000, ())
    assert {leg.cap for leg in event.legs} == {None}


def test_a_persons_cap_holds_for_those_that_are_only_observed_too() -> None:
    assert judge_refusal(asking(observe=True), make_budget_row(0, cap=500, cap_by="ada")).outcome == "cost_cap_reached"


def test_a_halt_comes_before_everything_and_is_never_waived() -> None:
    halted = HaltRow("fleet", 1, 0, "ada", "enough", 0)
    flawed = asking(session(1), flaw=("disabled", "No."), observe=True)
    assert judge_events(flawed, halted) == [judge_refusal(flawed, halted)]
    assert judge_refusal(flawed, halted).outcome == "external_halt"


def test_every_row_that_is_looked_at_is_declared() -> None:
    caps = Caps(Cap(1), (Cap(2), Cap(3, "hour")), (Cap(4, "day"),), (Cap(5, "month"),), token_budget=9)
    model_attempt = asking(caps, spender=Spender("s", "desk", "nightly"))
    keys = list_request_rows(model_attempt)
    assert (HoldRow, "r/0") in keys
    assert {key[1] for key in keys if key[0] is HaltRow} == set(SCOPES)
    scopes = [(key[1], key[3]) for key in keys if key[0] is BudgetRow]
    assert sorted(scopes) == sorted(
        [
            ("session:s", "usd"),
            ("trigger:nightly", "usd"),
            ("trigger:nightly", "usd"),
            ("agent:desk", "usd"),
            ("fleet", "usd"),
            ("session:s", "tokens"),
        ]
    )

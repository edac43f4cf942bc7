from decimal import Decimal

import pytest

from halter.core.usage import ModelName, ModelPrices, Price, Unpriced
from halter.guard.judge_request import Estimate, estimate_request
from halter.models.prices import Prices

AT = 1_790_000_000_000_000
DOLLARS = {"in": Decimal(3), "out": Decimal(15)}


@pytest.fixture
def rates() -> ModelPrices:
    outcome = Prices({"acme:one": Price(DOLLARS["in"], DOLLARS["out"])}).find(ModelName("acme", "one"))
    assert not isinstance(outcome, Unpriced)
    return outcome


def test_a_request_that_fits_is_held_at_its_whole_bound(rates: ModelPrices) -> None:
    whole = rates.bound(1000, 4000, AT)
    assert estimate_request(rates, 1000, 4000, AT, usd=whole) == Estimate(4000, whole, 5000)


def test_without_a_cap_nothing_is_lowered(rates: ModelPrices) -> None:
    assert estimate_request(rates, 1000, 4000, AT, usd=None) == Estimate(4000, rates.bound(1000, 4000, AT), 5000)


def test_max_output_is_lowered_to_what_fits(rates: ModelPrices) -> None:
    left = rates.bound(1000, 700, AT)
    lowered = estimate_request(rates, 1000, 4000, AT, usd=left)
    assert lowered.usd <= left
    assert lowered.max_output_tokens >= 700
    assert rates.bound(1000, lowered.max_output_tokens + 1, AT) > left


def test_max_output_is_never_lowered_below_the_least_that_is_useful(rates: ModelPrices) -> None:
    left = rates.bound(1000, 255, AT)
    assert estimate_request(rates, 1000, 4000, AT, usd=left) == Estimate(256, rates.bound(1000, 256, AT), 1256)


def test_somebody_who_wants_only_a_few_tokens_may_have_them(rates: ModelPrices) -> None:
    left = rates.bound(1000, 10, AT)
    assert estimate_request(rates, 1000, 10, AT, usd=left) == Estimate(10, left, 1010)

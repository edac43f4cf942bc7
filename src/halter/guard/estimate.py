"""The bound that is held for a request to a model, computed once: what is checked is what is held."""

from typing import Final

import msgspec

from halter.core.usage import Rates

MIN_OUTPUT_TOKENS: Final = 256


class Estimate(msgspec.Struct, frozen=True):
    """A request that can be paid: how much it may write, and what is held for it."""

    max_output_tokens: int
    usd: int
    tokens: int


class TooDear(msgspec.Struct, frozen=True):
    """Even a short answer would exceed what is left."""

    usd: int


def estimate(
    rates: Rates,
    input_tokens: int,
    max_output_tokens: int,
    at: int,
    *,
    left: int | None,
    min_output_tokens: int = MIN_OUTPUT_TOKENS,
) -> Estimate | TooDear:
    """Bound a request; where the whole answer does not fit what is left, lower the most it may write.

    `left` is the least that any cap leaves unspent, or None where no cap binds.
    """
    usd = rates.bound(input_tokens, max_output_tokens, at)
    if left is None or usd <= left:
        return Estimate(max_output_tokens, usd, input_tokens + max_output_tokens)
    floor = min(min_output_tokens, max_output_tokens)
    fitting = rates.max_output_that_fits(input_tokens, left, at, max_output_tokens)
    if fitting < floor:
        return TooDear(rates.bound(input_tokens, floor, at))
    return Estimate(fitting, rates.bound(input_tokens, fitting, at), input_tokens + fitting)

"""The tokens of a prompt, bounded from above by bytes and learned from usage reports.

Holds use `bound_tokens`, which is never too low if the provider reports truthfully. To fit the window,
`estimate_tokens` is used, which is closer but may be wrong.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

SAFETY_MARGIN: Final = 1.15
"""Factor by which the next text may have more tokens per byte than any text so far."""
MIN_TOKEN_RATIO: Final = 1 / 16
"""Minimum number of tokens per byte. A report below this is ignored."""


class PromptSize(msgspec.Struct, frozen=True, gc=False):
    """The size of a prompt in bytes, which bound its tokens.

    The next prompt has the `stable` part too; the `volatile` part is only at the end of this one. `prefix` identifies
    the beginning of the stable part: system text, tools and cut. Of two prompts with the same prefix, the larger one
    extends the smaller one.
    """

    prefix: str
    stable: int
    volatile: int = 0

    @property
    def total(self) -> int:
        return self.stable + self.volatile


class ObservedUsage(msgspec.Struct, frozen=True, gc=False):
    """The usage reports of one model: the last one, and the highest number of tokens per byte."""

    last: PromptSize
    tokens: int
    ratio: float


class TokenMeter(msgspec.Struct, frozen=True, gc=False):
    """The reported token usage of each model. Without a report, a model counts as using one token per byte."""

    usage_by_model: Mapping[str, ObservedUsage] = {}

    def with_usage(self, model: str, size: PromptSize, reported_tokens: int) -> "TokenMeter":
        """Add a report of input tokens, unless it is implausible."""
        total = size.stable + size.volatile
        if not total * MIN_TOKEN_RATIO <= reported_tokens <= total or not total:
            return self
        ratio = reported_tokens / total
        usage = self.usage_by_model.get(model)
        highest = ratio if usage is None else max(usage.ratio, ratio)
        return TokenMeter({**self.usage_by_model, model: ObservedUsage(size, reported_tokens, highest)})

    def bound_tokens(self, model: str, size: PromptSize) -> int:
        """Bound a prompt's tokens: those of the last prompt, if this one extends it, plus one per new byte."""
        usage, total = self.usage_by_model.get(model), size.stable + size.volatile
        if usage is None or usage.last.prefix != size.prefix or usage.last.stable > size.stable:
            return total
        return min(total, usage.tokens + total - usage.last.stable)

    def estimate_tokens(self, model: str, size: int) -> int:
        """Estimate tokens from bytes, assuming text no denser than before."""
        usage = self.usage_by_model.get(model)
        ratio = 1.0 if usage is None else min(1.0, usage.ratio * SAFETY_MARGIN)
        return math.ceil(size * ratio)

"""How many tokens there are, without the provider's tokenizer: bounded from above by bytes, and learned from reports.

Money is held by `bound`, which is never below the truth as long as the provider reports it. Whether a history fits its
window is decided by `estimate`, which may be wrong a little, and is far closer.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from halter.core.counting import message_tokens
from halter.core.messages import Message

MARGIN: Final = 1.15
"""How much denser than all that was seen before the next text may be."""
LOWEST: Final = 1 / 16
"""A token of more than so many bytes is not believed in."""


class Size(msgspec.Struct, frozen=True):
    """How large a prompt is, in bytes that stand for tokens.

    `stable` is what the next prompt begins with as well, `volatile` what stands at its end this time only. `prefix`
    names what everything stable began with: system text, tools, and where the history is cut. Of two prompts with the
    same prefix the larger one goes on where the smaller one ended.
    """

    prefix: str
    stable: int
    volatile: int = 0

    @property
    def total(self) -> int:
        """Bound the whole prompt."""
        return self.stable + self.volatile


class Seen(msgspec.Struct, frozen=True):
    """What one model's reports have shown: the last one, and how many tokens a byte was at most."""

    last: Size
    tokens: int
    ratio: float


class Meter(msgspec.Struct, frozen=True):
    """What is known of each model's tokens. A model that nobody has asked yet is given a token for every byte."""

    seen: Mapping[str, Seen] = {}

    def learned(self, model: str, sent: Size, reported: int) -> "Meter":
        """Take in the input tokens that a request is said to have had, unless they cannot be true."""
        if not sent.total * LOWEST <= reported <= sent.total or not sent.total:
            return self
        ratio = reported / sent.total
        known = self.seen.get(model)
        highest = ratio if known is None else max(known.ratio, ratio)
        return Meter({**self.seen, model: Seen(sent, reported, highest)})

    def bound(self, model: str, size: Size) -> int:
        """Bound the tokens of a prompt: those of the last one that it goes on from, and a token for every new byte."""
        known = self.seen.get(model)
        if known is None or known.last.prefix != size.prefix or known.last.stable > size.stable:
            return size.total
        return min(size.total, known.tokens + size.stable - known.last.stable + size.volatile)

    def estimate(self, model: str, size: int) -> int:
        """Tell how many tokens something of so many bytes has, if it is no denser than what was sent before."""
        known = self.seen.get(model)
        ratio = 1.0 if known is None else min(1.0, known.ratio * MARGIN)
        return math.ceil(size * ratio)


def size(message: Message) -> int:
    """Bound the tokens of a message, which is counted only once."""
    cache = vars(message)
    if "size" not in cache:
        cache["size"] = message_tokens(message)
    return cache["size"]

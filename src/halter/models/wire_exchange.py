"""One request to a provider and its answer, and what holds for all requests to it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import msgspec

from halter.core.usage import Usage
from halter.models.wire_usage import Meter

if TYPE_CHECKING:
    import httpx2

LARGEST: Final = 32 * 1024 * 1024
"""How many bytes of one answer are read: far more than the longest has, each of its tokens in an event of its own."""

CONNECTING: Final = 30.0
"""For so many seconds a connection may take to come about, its encryption included."""


class Terms(msgspec.Struct, frozen=True):
    """What holds for every request to a provider.

    If it `bills_errors`, an answer with an error status counts as paid. No answer of more than `largest` bytes is read,
    and no connection is waited for longer than `connecting` seconds.
    """

    bills_errors: bool = False
    largest: int = LARGEST
    connecting: float = CONNECTING


USUAL_TERMS: Final = Terms()


class Exchange:
    """One request and its answer, as far as they have come over the wire."""

    def __init__(self) -> None:
        self.sent = False
        self._opened: list[httpx2.Response] = []
        self._meter: Meter | None = None

    @property
    def usage(self) -> Usage | None:
        """What was reported so far."""
        return None if self._meter is None else self._meter.usage

    @property
    def final(self) -> bool:
        """Whether what was reported is the final report."""
        return self._meter is not None and self._meter.final

    @property
    def led_elsewhere(self) -> bool:
        """Whether the answer is a redirection, which is not followed: nobody answered the request itself."""
        return bool(self._opened) and self._opened[-1].is_redirect

    def answered(self, response: "httpx2.Response", meter: Meter) -> None:
        """Note that an answer begins."""
        self._opened.append(response)
        self._meter = meter

    async def aclose(self) -> None:
        """Let go of what was answered."""
        for response in self._opened:
            await response.aclose()


current_exchange: ContextVar[Exchange] = ContextVar("current_exchange")


@asynccontextmanager
async def exchange() -> AsyncGenerator[Exchange]:
    """See to it that nothing which is answered inside stays open: some SDKs leave a cancelled stream to chance."""
    made = Exchange()
    mark = current_exchange.set(made)
    try:
        yield made
    finally:
        current_exchange.reset(mark)
        await made.aclose()

"""The progress of one request to a provider and of its answer: what was sent, and what it has cost so far."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

import msgspec

from halter.core.usage import Usage
from halter.models.cloud_credentials import CloudCredentials
from halter.models.usage_reader import MAX_ANSWER_BYTES, UsageReader
from halter.net.client import ignore_sending
from halter.net.sdk_pool import AnswerReader, SdkRequest, SdkResponse, UnreadableAnswer
from halter.spec.models import WireFormat

CONNECT_TIMEOUT_SECONDS: Final = 30.0


class ExchangeTerms(msgspec.Struct, frozen=True):
    """The terms of every request to a provider.

    With `bills_errors`, an answer with an error status counts as billed. `credentials` replace a key. With
    `prompt_cache`, cacheable parts are marked and the cache has a key, if the protocol has them. Without `vision`,
    pictures are only named. At most `max_bytes` bytes of an answer are read. A connection must be established within
    `connect_timeout` seconds.
    """

    bills_errors: bool = False
    prompt_cache: bool = True
    vision: bool = True
    credentials: CloudCredentials | None = None
    max_bytes: int = MAX_ANSWER_BYTES
    connect_timeout: float = CONNECT_TIMEOUT_SECONDS


DEFAULT_TERMS: Final = ExchangeTerms()

MAX_EXCERPT_BYTES: Final = 4096
"""Most that is quoted of an answer that cannot be read."""


class Exchange:
    """The progress of one request and its answer."""

    def __init__(self) -> None:
        self.sent = False
        self.excerpt = b""
        """The beginning of the answer's body."""
        self._opened: list[SdkResponse] = []
        self._meter: UsageReader | None = None

    @property
    def usage(self) -> Usage | None:
        return None if self._meter is None else self._meter.usage

    @property
    def final(self) -> bool:
        return self._meter is not None and self._meter.final

    @property
    def finished(self) -> bool:
        """True if the answer is marked as complete, also without a usage."""
        return self._meter is not None and self._meter.finished

    @property
    def led_elsewhere(self) -> bool:
        """True if the answer is a redirect, which is not followed."""
        return bool(self._opened) and self._opened[-1].is_redirect

    def mark_sent(self) -> None:
        self.sent = True

    def add_response(self, response: SdkResponse, reader: UsageReader) -> None:
        self._opened.append(response)
        self._meter = reader
        self.excerpt = b""

    def add_chunk(self, chunk: bytes) -> None:
        if len(self.excerpt) < MAX_EXCERPT_BYTES:
            self.excerpt += chunk[: MAX_EXCERPT_BYTES - len(self.excerpt)]

    async def aclose(self) -> None:
        for response in self._opened:
            await response.aclose()


current_exchange: ContextVar[Exchange] = ContextVar("current_exchange")


@asynccontextmanager
async def open_exchange() -> AsyncGenerator[Exchange]:
    """Open an exchange, and close its responses at the end: some SDKs leave a cancelled stream open."""
    exchange = Exchange()
    token = current_exchange.set(exchange)
    try:
        yield exchange
    finally:
        current_exchange.reset(token)
        await exchange.aclose()


class ExchangeObserver:
    """Signs the requests of one model, and reads the usage of their answers."""

    def __init__(self, wire: WireFormat, model: str, credentials: CloudCredentials | None) -> None:
        self._wire: WireFormat = wire
        self._model = model
        self._credentials = credentials

    def on_request(self, request: SdkRequest) -> Callable[[], None]:
        if self._credentials is not None:
            self._credentials.sign(request)
        exchange = current_exchange.get(None)
        return ignore_sending if exchange is None else exchange.mark_sent

    def on_response(self, response: SdkResponse) -> AnswerReader:
        meter = UsageReader(self._wire, self._model)
        exchange = current_exchange.get(None)
        if exchange is not None:
            exchange.add_response(response, meter)
        return _MeteredAnswer(meter, exchange)


class _MeteredAnswer:
    def __init__(self, meter: UsageReader, exchange: Exchange | None) -> None:
        self._meter = meter
        self._exchange = exchange

    def read(self, piece: bytes) -> None:
        if self._exchange is not None:
            self._exchange.add_chunk(piece)
        self._meter.feed(piece)
        self._check_depth()

    def end(self) -> None:
        self._meter.close()
        self._check_depth()

    def _check_depth(self) -> None:
        if self._meter.too_deep:
            raise UnreadableAnswer("The answer is nested too deeply.")

"""The relay of one request: its bytes to the provider, and the answer's bytes to the client.

The answer is forwarded as it arrives, event by event; a reader extracts its usage and does not change it. If the client
hangs up, the answer is still read to its end and settled at its cost, because the provider bills its output. The model
door runs the relay like any model: with a permit, a hold, a deadline and a watch for halts.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from halter.core.errors import ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.ids import Digest
from halter.core.messages import Prompt, Reply, Text, TextListener
from halter.core.ports import Store
from halter.core.text import clean, shorten
from halter.core.tools import Permit, PermitGate
from halter.core.usage import ModelName, Usage
from halter.external.dialect import CHAT, DialectName, ModelCall, WireDialect
from halter.external.refusals import Headers, Refusal, asks_by_litellm, render_in_stream, render_refusal
from halter.models.exchange import CONNECT_TIMEOUT_SECONDS
from halter.models.usage_reader import MAX_ANSWER_BYTES, UsageReader
from halter.net.aiohttp_transport import AiohttpTransport
from halter.net.client import HttpRequest, HttpResponse, HttpTransport
from halter.net.failures import HttpFailure

AsgiMessage = MutableMapping[str, Any]
Send = Callable[[AsgiMessage], Awaitable[None]]

_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"content-encoding",
        b"content-length",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_SENT_HEADERS: Final = frozenset(
    (
        b"accept",
        b"anthropic-version",
        b"content-type",
        b"openai-beta",
        b"originator",
        b"session-id",
        b"thread-id",
        b"traceparent",
        b"user-agent",
        b"x-app",
    )
)
_SENT_PREFIXES: Final = (b"x-stainless-", b"x-claude-code-", b"x-codex-")
"""The client's headers that a provider gets. Any other may name an account, or another machine."""
_BETAS: Final = b"anthropic-beta"
_UNPRICED_BETAS: Final = (b"fast-mode-", b"mcp-client-", b"server-side-fallback")
"""Betas that cost what no price covers."""
_UNRETURNED_HEADERS: Final = _HOP_BY_HOP | {b"set-cookie", b"date", b"server"}
MAX_PARSED_BYTES: Final = 2 * 1024 * 1024
"""The largest event or whole answer that is parsed. It may repeat what a client sent, and parsing holds the loop."""
_TEMPORARY_STATUSES: Final = frozenset((408, 409, 425, 429))
_PERSON_STATUSES: Final = frozenset((401, 402, 403, 404))
_UNBILLED_STATUSES: Final = frozenset((429, 529))
_FIRST_ERROR: Final = 400
_SERVER_ERROR: Final = 500
_EVENT_SEPARATORS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Upstream(msgspec.Struct, frozen=True):
    """A provider and its address. `base_url` is set if `url` is not its default address."""

    provider: str
    url: str
    key: str
    base_url: str | None = None
    bills_errors: bool = False
    anthropic: bool = False

    def address(self, path: str, query: bytes) -> str:
        root = self.url.rstrip("/")
        if self.anthropic:
            root = f"{root.removesuffix('/v1')}/v1"
        return f"{root}{path}{'?' + query.decode('latin-1') if query else ''}"

    def headers(self, client_headers: Headers) -> Headers:
        """Return the client's headers that are on the list, with the provider's key."""
        sent_headers = [
            (name, value) for name, value in client_headers if name in _SENT_HEADERS or name.startswith(_SENT_PREFIXES)
        ]
        betas = [beta for name, value in client_headers if name == _BETAS for beta in list_priced_betas(value)]
        if betas:
            sent_headers.append((_BETAS, b",".join(betas)))
        sent_headers.append((b"accept-encoding", b"identity"))
        if self.key:
            credentials = (
                (b"x-api-key", self.key.encode())
                if self.anthropic
                else (b"authorization", b"Bearer " + self.key.encode())
            )
            sent_headers.append(credentials)
        return sent_headers


def list_priced_betas(header: bytes) -> list[bytes]:
    betas = (beta.strip() for beta in header.split(b","))
    return [beta for beta in betas if beta and not beta.lower().startswith(_UNPRICED_BETAS)]


def open_pool(upstream: Upstream) -> HttpTransport:
    """Open the connections to a provider: no retries, no deadline, and no headers except the client's."""
    return AiohttpTransport(upstream.url, CONNECT_TIMEOUT_SECONDS)


class ClientConnection:
    """The connection to a client: the started answer, its number of events, and whether the client hung up."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send = send
        self._by_litellm = asks_by_litellm(headers)
        self.has_started = False
        self.streams = False
        self.is_gone = False
        self.events = 0

    async def start(self, status: int, headers: Headers, *, streams: bool = False) -> None:
        self.has_started, self.streams = True, streams
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, headers: Headers, data: bytes) -> None:
        await self.start(status, headers)
        await self.write(data, more=False)

    async def refuse(self, dialect: DialectName, refusal: Refusal) -> None:
        """Send a refusal instead of an answer, or at the end of a started stream."""
        if not self.has_started:
            await self.answer(*render_refusal(dialect, refusal, by_litellm=self._by_litellm))
        elif self.streams:
            body = render_in_stream(dialect, refusal, self.events, by_litellm=self._by_litellm)
            await self.write(body, more=False)


MAX_REMEMBERED: Final = 10_000
_EVENT_DATA: Final = b"data:"


class StoredAnswers:
    """Which key got which answer that a provider stores: only that key reads it or continues from it.

    Ids are unguessable, but clients log them, and all keys share the provider's account. That a key got an answer is a
    blob in the store, so that every process of the proxy knows it; the store keeps such blobs for at least a day.
    After that the answer counts as another's.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._remembered: OrderedDict[bytes, None] = OrderedDict()

    def remember(self, key_digest: str, answer_id: str) -> None:
        """Remember an answer in this process: a client may use its id before the answer has ended."""
        self._remembered[_make_mark(key_digest, answer_id)] = None
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    async def save(self, key_digest: str, answer_id: str) -> None:
        await self._store.put(_make_mark(key_digest, answer_id))

    async def has(self, key_digest: str, answer_id: str) -> bool:
        mark = _make_mark(key_digest, answer_id)
        if mark in self._remembered:
            return True
        try:
            await self._store.get(Digest(sha256(mark).hexdigest()))
        except KeyError:
            return False
        return True


def _make_mark(key_digest: str, answer_id: str) -> bytes:
    return f"halter stored answer\n{key_digest}\n{answer_id}".encode("utf-8", "replace")


class _Answer(msgspec.Struct):
    id: str = ""


class _AnswerEvent(_Answer):
    """A whole answer, or an event of its stream."""

    response: _Answer | None = None


_DECODE_ANSWER: Final = msgspec.json.Decoder(_AnswerEvent).decode


def find_answer_id(data: bytes, *, streams: bool) -> str:
    """Find the id of an answer in its body or in events of its stream; empty if there is none."""
    for text in data.splitlines() if streams else (data,):
        if streams and not text.startswith(_EVENT_DATA):
            continue
        try:
            answer = _DECODE_ANSWER(text.removeprefix(_EVENT_DATA) if streams else text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        if answer_id := answer.response.id if answer.response else "" if streams else answer.id:
            return answer_id
    return ""


class RelayedModel:
    """One request as a model for the guard, which may use it once, with its permit."""

    def __init__(
        self,
        name: ModelName,
        call: ModelCall,
        window: int,
        exchange: "RelayExchange",
    ) -> None:
        self.name = name
        self.base_url = exchange.upstream.base_url
        self._call = call
        self._window = window
        self._exchange = exchange

    def count(self, prompt: Prompt) -> int:
        return self._call.bound_input(self._window)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        exchange = self._exchange
        pass_on = _pass_on.open(permit)
        if exchange.client.is_gone:
            permit.unsent = True
            raise ModelUnavailable("HungUp: the client hung up before the request was sent", billed=False)
        body = self._call.with_limit(prompt.max_output_tokens, self._window, new_name=exchange.uses_new_limit)
        try:
            return await pass_on(exchange, self._call, body)
        except asyncio.CancelledError:
            permit.unsent = not exchange.sent
            raise


class RelayExchange:
    """One request and its answer, on both sides."""

    def __init__(
        self,
        pool: HttpTransport,
        upstream: Upstream,
        client: ClientConnection,
        address: str,
        headers: Headers,
        *,
        uses_new_limit: bool = True,
        on_answer_id: Callable[[str], None] | None = None,
    ) -> None:
        self._pool = pool
        self.upstream = upstream
        self.client = client
        self._address = address
        self._headers = headers
        self.uses_new_limit = uses_new_limit
        self.sent = False
        self.answer_id = ""
        self.reader: UsageReader | None = None
        """The reader of the answer, once there is one."""
        self._on_answer_id = on_answer_id

    def read_answer_id(self, data: bytes, *, streams: bool) -> None:
        """Read the id under which the provider stores its answer, unless it is known."""
        if self._on_answer_id is not None and not self.answer_id and len(data) <= MAX_PARSED_BYTES:
            self.answer_id = find_answer_id(data, streams=streams)
            if self.answer_id:
                self._on_answer_id(self.answer_id)

    async def open(self, method: str, body: bytes) -> HttpResponse:
        """Send the request; return when the answer's headers have arrived. Raises ModelError."""
        request = HttpRequest(method, self._address, self._headers, body, on_sent=self._mark_sent)
        try:
            return await self._pool.send(request)
        except HttpFailure as failure:
            raise self.make_failure(failure) from None

    def _mark_sent(self) -> None:
        self.sent = True

    def make_failure(self, failure: HttpFailure, reader: UsageReader | None = None) -> ModelUnavailable:
        """Make the error of a lost connection. Nothing is billed if nothing was sent."""
        text = shorten(clean(failure.reason), 200)
        if not self.sent:
            return ModelUnavailable(f"ConnectionFailed: cannot reach {self.upstream.provider}: {text}", billed=False)
        usage, final = (None, False) if reader is None else (reader.usage, reader.final)
        sentence = f"ConnectionLost: the connection to {self.upstream.provider} was lost during its answer: {text}"
        return ModelUnavailable(sentence, billed=True, usage=usage, final=final)


@PermitGate
async def _pass_on(exchange: RelayExchange, call: ModelCall, body: bytes) -> Reply:
    """Forward one request and its answer, and return a reply with its usage."""
    response = await exchange.open("POST", body)
    try:
        reader = exchange.reader = UsageReader(call.dialect.usage, call.model, MAX_PARSED_BYTES)
        if response.status >= _FIRST_ERROR or not _is_stream(response):
            await _pass_whole(exchange, response, reader)
        else:
            await _pass_stream(exchange, call, response, reader)
        reply = conclude_answer(exchange.upstream, call.dialect, response.status, reader)
        return msgspec.structs.replace(reply, id=exchange.answer_id)
    finally:
        await response.aclose()


def _is_stream(response: HttpResponse) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def list_answer_headers(response: HttpResponse) -> Headers:
    headers = ((name.lower(), value) for name, value in response.raw_headers)
    return [(name, value) for name, value in headers if name not in _UNRETURNED_HEADERS]


async def _pass_whole(exchange: RelayExchange, response: HttpResponse, reader: UsageReader) -> None:
    data = await read_whole(exchange, response, reader)
    exchange.read_answer_id(data, streams=False)
    headers = [*list_answer_headers(response), (b"content-length", b"%d" % len(data))]
    await exchange.client.answer(response.status, headers, data)


async def _read_pieces(
    exchange: RelayExchange, response: HttpResponse, reader: UsageReader | None
) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer as they arrive. Raises ModelError."""
    remaining = MAX_ANSWER_BYTES
    try:
        while chunk := await response.read_piece():
            remaining -= len(chunk)
            if remaining < 0:
                raise ModelUnavailable(f"BadAnswer: the answer of {exchange.upstream.provider} is too large")
            if reader is not None:
                reader.feed(chunk)
            yield chunk
    except HttpFailure as failure:
        raise exchange.make_failure(failure, reader) from None
    if reader is not None:
        reader.close()


async def read_whole(exchange: RelayExchange, response: HttpResponse, reader: UsageReader | None = None) -> bytes:
    """Read a whole answer. Raises ModelError if the connection is lost or the answer is too large."""
    return b"".join([chunk async for chunk in _read_pieces(exchange, response, reader)])


async def _pass_stream(exchange: RelayExchange, call: ModelCall, response: HttpResponse, reader: UsageReader) -> None:
    """Forward a stream in whole events, so that an error can follow any of them."""
    client, drops_usage = exchange.client, call.dialect is CHAT and not call.asks_usage
    await client.start(response.status, list_answer_headers(response), streams=True)
    buffer = bytearray()
    async for chunk in _read_pieces(exchange, response, reader):
        if events := drain_events(buffer, chunk):
            exchange.read_answer_id(events, streams=True)
            client.events += 1
            await client.write(drop_usage_chunk(events) if drops_usage else events, more=True)
    if buffer:
        await client.write(bytes(buffer), more=True)


def drain_events(buffer: bytearray, chunk: bytes) -> bytes:
    """Add a chunk to a buffer, and take the whole events out of it. Only what is new is searched for their ends."""
    start = max(0, len(buffer) - max(map(len, _EVENT_SEPARATORS)) + 1)
    buffer += chunk
    ends = (at + len(separator) for separator in _EVENT_SEPARATORS if (at := buffer.rfind(separator, start)) >= 0)
    end = max(ends, default=0)
    events = bytes(memoryview(buffer)[:end])
    del buffer[:end]
    return events


def drop_usage_chunk(events: bytes) -> bytes:
    """Drop the chunk that has only the usage, which the client did not request."""
    if b'"usage"' not in events:
        return events
    separator = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    return b"".join(event + separator for event in events.split(separator)[:-1] if not _is_usage_chunk(event))


class _Chunk(msgspec.Struct):
    choices: list[Any] | None = None
    usage: dict[str, Any] | None = None


def _is_usage_chunk(event: bytes) -> bool:
    data = event.strip().removeprefix(b"data:")
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except (msgspec.DecodeError, UnicodeError):
        return False
    return chunk.choices == [] and chunk.usage is not None


def conclude_answer(upstream: Upstream, dialect: WireDialect, status: int, reader: UsageReader) -> Reply:
    """Make the reply for the ledger from an answer. Raises ModelError unless the answer is complete."""
    provider, usage, final = upstream.provider, reader.usage, reader.final
    if status >= _FIRST_ERROR:
        is_billed = usage is not None or (upstream.bills_errors and status not in _UNBILLED_STATUSES)
        raise _classify_status(status, provider, usage, billed=is_billed)
    if not reader.finished:
        final = final and usage is not None and usage.output_tokens > 0
        sentence = f"CutStream: the answer of {provider} is incomplete"
        raise ModelUnavailable(sentence, usage=usage, final=final)
    text = Text(f"(answered to the client over {dialect.name})", "model", trusted=False)
    return Reply((text,), usage=usage if final else None, model=reader.model)


def _classify_status(status: int, provider: str, usage: Usage | None, *, billed: bool) -> ModelError:
    sentence = f"{provider} answered {status}; the client got this answer"
    if status in _PERSON_STATUSES:
        return ModelUnusable(f"Unusable: {sentence}", billed=billed, usage=usage, final=usage is not None)
    if status in _TEMPORARY_STATUSES or status >= _SERVER_ERROR:
        return ModelUnavailable(f"Unavailable: {sentence}", billed=billed, usage=usage, final=usage is not None)
    return ModelRejected(f"Rejected: {sentence}", billed=billed, usage=usage, final=usage is not None)

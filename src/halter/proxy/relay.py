"""The relay of one request: its bytes to the provider, and the answer's bytes to the client.

The answer passes as it comes, event by event; a reader beside it takes its usage and changes nothing. A client that
hangs up changes nothing either: the provider bills what it wrote, so the answer is read to its end and settled at what
it cost. The model door runs the relay as it runs any model: with a permit, a hold, a deadline and an ear for halts.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from halter.core.errors import ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.messages import Prompt, Reply, Text, TextListener
from halter.core.text import clean, shorten
from halter.core.tools import Permit, PermitGate
from halter.core.usage import ModelName, Usage, is_local_address
from halter.models.wire import CONNECT_TIMEOUT_SECONDS, MAX_ANSWER_BYTES
from halter.models.wire_format import UsageReader
from halter.proxy.dialect import CHAT, DialectName, ModelCall, WireDialect
from halter.proxy.errors import Headers, Refusal, asks_by_litellm, render_in_stream, render_refusal

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

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
_KEPT_FROM_PROVIDER: Final = _HOP_BY_HOP | {
    b"authorization",
    b"x-api-key",
    b"cookie",
    b"accept-encoding",
    b"expect",
    b"openai-organization",
    b"openai-project",
    b"forwarded",
    b"x-forwarded-for",
    b"x-halter-session",
}
"""What belongs to this connection or to the client's own account."""
_KEPT_FROM_CLIENT: Final = _HOP_BY_HOP | {b"set-cookie", b"date", b"server"}
_ADDED_BY_LIBRARY: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
LONGEST_HEADER: Final = 64 * 1024
_LARGE_BODY: Final = 1024 * 1024
"""The library sends a larger body only from a file."""
_MAY_PASS: Final = frozenset((408, 409, 425, 429))
_NEEDS_PERSON: Final = frozenset((401, 402, 403, 404))
_NOT_BEGUN: Final = frozenset((429, 529))
_FIRST_ERROR: Final = 400
_SERVER_ERROR: Final = 500
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Upstream(msgspec.Struct, frozen=True):
    """A provider as the proxy reaches it. `base_url` is set where `url` is not its usual address."""

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

    def headers(self, asked: Headers) -> Headers:
        """The client's headers without its own credentials, and with the provider's key."""
        kept = [(name, value) for name, value in asked if name not in _KEPT_FROM_PROVIDER]
        kept.append((b"accept-encoding", b"identity"))
        if self.key:
            own = (
                (b"x-api-key", self.key.encode())
                if self.anthropic
                else (b"authorization", b"Bearer " + self.key.encode())
            )
            kept.append(own)
        return kept


def open_pool(upstream: Upstream) -> "ClientSession":
    """Prepare the connections to a provider: no retries, no deadline, and nothing is sent but what the client sent."""
    import aiohttp

    async def note_sending(_session: object, context: Any, _params: object) -> None:
        context.trace_request_ctx.sent = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(note_sending)
    trace.on_connection_reuseconn.append(note_sending)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
        skip_auto_headers=_ADDED_BY_LIBRARY,
        cookie_jar=aiohttp.DummyCookieJar(),
        proxy=find_proxy(upstream.url),
        trace_configs=[trace],
        max_line_size=LONGEST_HEADER,
        max_field_size=LONGEST_HEADER,
    )


def find_proxy(url: str) -> str | None:
    """The HTTP proxy that the environment names for an address outside of this machine."""
    host = urlsplit(url).hostname or ""
    if is_local_address(url) or proxy_bypass(host):
        return None
    found = getproxies()
    return found.get(urlsplit(url).scheme) or found.get("all")


class ClientConnection:
    """The client's side: what it was sent, and whether it hung up. To one that did, nothing is sent any more."""

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
        """Say why there is no answer, or no more of it."""
        if not self.has_started:
            await self.answer(*render_refusal(dialect, refusal, by_litellm=self._by_litellm))
        elif self.streams:
            body = render_in_stream(dialect, refusal, self.events, by_litellm=self._by_litellm)
            await self.write(body, more=False)


class RelayedModel:
    """One request as a model that the guard may ask: once, with its permit."""

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
            raise ModelUnavailable("HungUp: the client hung up before its turn came", billed=False)
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
        pool: "ClientSession",
        upstream: Upstream,
        client: ClientConnection,
        address: str,
        headers: Headers,
        *,
        uses_new_limit: bool = True,
    ) -> None:
        self._pool = pool
        self.upstream = upstream
        self.client = client
        self._address = address
        self._headers = headers
        self.uses_new_limit = uses_new_limit
        self.sent = False

    async def open(self, method: str, body: bytes) -> "ClientResponse":
        """Send the request; return when the answer's headers are there. Raises ModelError."""
        from aiohttp import ClientError
        from yarl import URL

        try:
            return await self._pool.request(
                method,
                URL(self._address, encoded=True),
                headers=[(name.decode("ascii"), _decode_value(value)) for name, value in self._headers],
                data=body if len(body) <= _LARGE_BODY else io.BytesIO(body),
                allow_redirects=False,
                trace_request_ctx=self,
            )
        except (ClientError, OSError, ValueError) as error:
            raise self.make_failure(error) from None

    def make_failure(self, error: Exception, reader: UsageReader | None = None) -> ModelUnavailable:
        """What a lost connection means: nothing is billed where nothing was sent."""
        text = shorten(clean(str(error)) or type(error).__name__, 200)
        if not self.sent:
            return ModelUnavailable(f"ConnectionFailed: cannot reach {self.upstream.provider}: {text}", billed=False)
        usage, final = (None, False) if reader is None else (reader.usage, reader.final)
        sentence = f"ConnectionLost: the answer of {self.upstream.provider} broke off: {text}"
        return ModelUnavailable(sentence, billed=True, usage=usage, final=final)


def _decode_value(value: bytes) -> str:
    """The value of a header as text that is sent as the same bytes, unless it is older than UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@PermitGate
async def _pass_on(exchange: RelayExchange, call: ModelCall, body: bytes) -> Reply:
    """Pass one request and its answer on, and return what it used."""
    response = await exchange.open("POST", body)
    try:
        reader = UsageReader(call.dialect.usage)
        if response.status >= _FIRST_ERROR or not _is_stream(response):
            await _pass_whole(exchange, response, reader)
        else:
            await _pass_stream(exchange, call, response, reader)
        return conclude_answer(exchange.upstream, call.dialect, response.status, reader)
    finally:
        response.close()


def _is_stream(response: "ClientResponse") -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def list_answer_headers(response: "ClientResponse") -> Headers:
    named = ((name.lower(), value) for name, value in response.raw_headers)
    return [(name, value) for name, value in named if name not in _KEPT_FROM_CLIENT]


async def _pass_whole(exchange: RelayExchange, response: "ClientResponse", reader: UsageReader) -> None:
    data = await read_whole(exchange, response, reader)
    headers = [*list_answer_headers(response), (b"content-length", b"%d" % len(data))]
    await exchange.client.answer(response.status, headers, data)


async def _read_pieces(
    exchange: RelayExchange, response: "ClientResponse", reader: UsageReader | None
) -> AsyncIterator[bytes]:
    """Read an answer as it comes: all that is there at once is one piece. Raises ModelError."""
    from aiohttp import ClientError

    remaining = MAX_ANSWER_BYTES
    try:
        while piece := await response.content.readany():
            remaining -= len(piece)
            if remaining < 0:
                raise ModelUnavailable(f"BadAnswer: the answer of {exchange.upstream.provider} is too long")
            if reader is not None:
                reader.feed(piece)
            yield piece
    except (ClientError, OSError) as error:
        raise exchange.make_failure(error, reader) from None
    if reader is not None:
        reader.close()


async def read_whole(exchange: RelayExchange, response: "ClientResponse", reader: UsageReader | None = None) -> bytes:
    """Read an answer in one piece. Raises ModelError where it breaks off or is too long."""
    return b"".join([piece async for piece in _read_pieces(exchange, response, reader)])


async def _pass_stream(
    exchange: RelayExchange, call: ModelCall, response: "ClientResponse", reader: UsageReader
) -> None:
    """Pass a stream on in whole events, so that an error can follow any of them."""
    client, drops = exchange.client, call.dialect is CHAT and not call.asks_usage
    await client.start(response.status, list_answer_headers(response), streams=True)
    rest = b""
    async for piece in _read_pieces(exchange, response, reader):
        whole, rest = split_events(rest + piece if rest else piece)
        if whole:
            client.events += 1
            await client.write(drop_usage_chunk(whole) if drops else whole, more=True)
    if rest:
        await client.write(rest, more=True)


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """Split what came into whole events and the beginning of the next one."""
    end = max(at + len(mark) if (at := data.rfind(mark)) >= 0 else 0 for mark in _ENDS)
    return data[:end], data[end:]


def drop_usage_chunk(events: bytes) -> bytes:
    """Drop the chunk with the usage alone, which the client did not ask for."""
    if b'"usage"' not in events:
        return events
    mark = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    return b"".join(event + mark for event in events.split(mark)[:-1] if not _is_usage_chunk(event))


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
    """What the answer means for the ledger. Raises ModelError unless it is whole."""
    provider, usage, final = upstream.provider, reader.usage, reader.final
    if status >= _FIRST_ERROR:
        billed = usage is not None or (upstream.bills_errors and status not in _NOT_BEGUN)
        raise _classify_status(status, provider, usage, billed=billed)
    if not reader.finished:
        final = final and usage is not None and usage.output_tokens > 0
        sentence = f"CutStream: the answer of {provider} ended before it was finished"
        raise ModelUnavailable(sentence, usage=usage, final=final)
    text = Text(f"(answered to the client over {dialect.name})", "model", trusted=False)
    return Reply((text,), usage=usage if final else None)


def _classify_status(status: int, provider: str, usage: Usage | None, *, billed: bool) -> ModelError:
    sentence = f"{provider} answered {status}; the client was told what it said"
    if status in _NEEDS_PERSON:
        return ModelUnusable(f"Unusable: {sentence}", billed=billed, usage=usage, final=usage is not None)
    if status in _MAY_PASS or status >= _SERVER_ERROR:
        return ModelUnavailable(f"Unavailable: {sentence}", billed=billed, usage=usage, final=usage is not None)
    return ModelRejected(f"Rejected: {sentence}", billed=billed, usage=usage, final=usage is not None)

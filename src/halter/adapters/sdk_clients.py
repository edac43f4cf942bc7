"""Guard a client of the openai or anthropic SDK.

```python
async with Guard("runs.db", agent="desk", max_cost_usd=1.00) as halter, halter.session("Answer the mail.") as session:
    client = session.model(AsyncAnthropic())
    answer = await client.messages.create(model="claude-sonnet-4-5", max_tokens=500, messages=[...])
```

It is the same client with another transport. Each attempt of each request, streamed or not, is held before it is sent,
with its limit lowered to what fits, and settled by the usage in its bytes. A refusal is an answer of the provider's own
form, which the SDK raises at once and does not try again. A halt ends an answer that is under way.

`guard.model(client)` is the same with a session for each request. Requests that cost money and have no price (batches,
embeddings, images, audio) are refused. A client that was not given to `model`, and what the provider runs for itself
during a request, are outside.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar, cast

import httpx2

from halter.core.errors import ConfigError, ModelUnavailable
from halter.core.messages import Prompt, Reply, TextListener, make_user_message
from halter.core.tools import Permit, PermitGate
from halter.core.usage import ModelName
from halter.guard.model_door import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest, RequestOutcome
from halter.loop.session_runtime import cancel_and_wait
from halter.models.providers import find_listed_window
from halter.models.wire_format import UsageReader
from halter.proxy.dialect import DIALECTS, LARGEST_WINDOW, ModelCall, Unreadable, WireDialect, find_rates, read_call
from halter.proxy.errors import Refusal, explain_outcome, render_in_stream, render_refusal
from halter.proxy.relay import Upstream, conclude_answer, drop_usage_chunk, split_events
from halter.runtime.guard_api import GuardedSession
from halter.runtime.guard_thread import LoopThread

C = TypeVar("C")

OpenSession = Callable[[], AbstractAsyncContextManager[GuardedSession]]
Send = Callable[[bytes], Awaitable[httpx2.Response]]
Held = asyncio.Future[AnsweredRequest | RefusedRequest | FailedRequest]

_USUAL_HOSTS: Final = {"api.anthropic.com": "anthropic", "api.openai.com": "openai"}
_FREE: Final = ("/messages/count_tokens", "/responses/input_tokens")
_UNSENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


def guard_client(client: C, open_session: OpenSession, thread: LoopThread | None, provider: str) -> C:
    """Return a copy of an SDK client whose requests pass the guard, each in the session that is opened for it.

    The requests of a client that is not async are sent by an async one with the same timeouts, in the guard's thread.
    Raises ConfigError for a client that cannot be guarded.
    """
    known: Any = client
    inner = getattr(known, "_client", None)  # The SDKs tell it nowhere else.
    if isinstance(inner, httpx2.AsyncClient) and thread is None:
        http: Any = httpx2.AsyncClient(transport=GuardedTransport(inner, open_session, provider), timeout=inner.timeout)
    elif isinstance(inner, httpx2.Client) and thread is not None:
        sender = httpx2.AsyncClient(timeout=inner.timeout, follow_redirects=True)
        transport = BlockingTransport(GuardedTransport(sender, open_session, provider), thread)
        http = httpx2.Client(transport=transport, timeout=inner.timeout)
    else:
        raise ConfigError(
            f"{type(client).__name__} cannot be guarded here: give AsyncOpenAI or AsyncAnthropic to a Guard or its "
            "session, and OpenAI or Anthropic to `Guard.blocking` or its session, in a version that uses httpx2."
        )
    return cast("C", known.with_options(http_client=http))


class BlockingTransport(httpx2.BaseTransport):
    """Sends the requests of a client that is not async from the guard's thread."""

    def __init__(self, guarded: "GuardedTransport", thread: LoopThread) -> None:
        self._transport = guarded
        self._thread = thread

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        asked = httpx2.Request(
            request.method, request.url, headers=request.headers, content=request.read(), extensions=request.extensions
        )
        response = self._thread.run(self._transport.handle_async_request(asked))
        stream = _BlockingStream(response, self._thread)
        return httpx2.Response(response.status_code, headers=response.headers, stream=stream, request=request)

    def close(self) -> None:
        self._thread.run(self._transport.aclose())


class _BlockingStream(httpx2.SyncByteStream):
    def __init__(self, response: httpx2.Response, thread: LoopThread) -> None:
        self._response = response
        self._thread = thread

    def __iter__(self) -> Iterator[bytes]:
        pieces = aiter(self._response.aiter_raw())
        while piece := self._thread.run(_read_next(pieces)):
            yield piece

    def close(self) -> None:
        self._thread.run(self._response.aclose())


async def _read_next(pieces: AsyncIterator[bytes]) -> bytes:
    return await anext(pieces, b"")


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of one client through the guard."""

    def __init__(self, inner: httpx2.AsyncClient, open_session: OpenSession, provider: str) -> None:
        self._inner = inner
        self._open_session = open_session
        self._provider = provider

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        dialect = _find_dialect(request)
        if dialect is None:
            return await self._pass_free(request)
        try:
            call = read_call(dialect, await request.aread())
        except Unreadable as error:
            return _render(dialect, Refusal("unreadable", f"Halter: {error}"), request)
        return await self._ask(request, call)

    async def _pass_free(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" or request.url.path.endswith(_FREE):
            return await self._inner.send(request, stream=True)
        sentence = (
            f"Halter: {request.method} {request.url.path} has no price here, so no cap could be kept: it is refused."
        )
        return _render(DIALECTS[-1], Refusal("refused", sentence), request)

    async def _ask(self, request: httpx2.Request, call: ModelCall) -> httpx2.Response:
        upstream = self._describe(request, call.dialect)
        model = _SdkModel(call, upstream, PermitGate(self._sender(request)))
        held = asyncio.ensure_future(self._hold(call, model))
        held.add_done_callback(lambda _: model.pieces.put_nowait(b""))
        try:
            await asyncio.wait([held, model.response], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancel_and_wait(held)
            raise
        if model.response.done():
            return _answer(model, held, request)
        outcome = held.result()
        if model.error is not None:
            raise model.error
        return _render(call.dialect, _explain(outcome), request)

    async def _hold(self, call: ModelCall, model: "_SdkModel") -> AnsweredRequest | RefusedRequest | FailedRequest:
        async with self._open_session() as session:
            words = make_user_message(call.body.decode(errors="replace"))
            asked = ModelRequest(
                id=session.next_request(),
                prompt=Prompt(messages=(words,), max_output_tokens=call.max_output(model.window)),
                rates=find_rates(call, model.name, model.base_url, session.prices),
                min_output_tokens=call.min_output(),
            )
            try:
                return await session.request(asked, model)
            except asyncio.CancelledError as error:
                # The request is settled; a session of its own has to end with it.
                cancelled = error
        raise cancelled

    def _describe(self, request: httpx2.Request, dialect: WireDialect) -> Upstream:
        usual = _USUAL_HOSTS.get(request.url.host)
        provider = self._provider or usual or ("anthropic" if dialect.anthropic else "openai")
        root = str(request.url).partition(dialect.path)[0]
        return Upstream(provider, root, "", None if usual or self._provider else root)

    def _sender(self, request: httpx2.Request) -> Send:
        async def send(body: bytes) -> httpx2.Response:
            headers = httpx2.Headers(request.headers)
            headers["accept-encoding"] = "identity"
            headers["content-length"] = str(len(body))
            made = httpx2.Request(
                request.method, request.url, headers=headers, content=body, extensions=request.extensions
            )
            return await self._inner.send(made, stream=True)

        return send

    async def aclose(self) -> None:
        await self._inner.aclose()


class _SdkModel:
    """One request as a model that the guard may ask: once, with its permit."""

    def __init__(self, call: ModelCall, upstream: Upstream, send: PermitGate[Send]) -> None:
        self.name = ModelName(upstream.provider, call.model)
        self.base_url = upstream.base_url
        self.window = find_listed_window(self.name, self.base_url) or LARGEST_WINDOW
        self.call = call
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.response: asyncio.Future[httpx2.Response] = asyncio.get_running_loop().create_future()
        self.error: httpx2.HTTPError | None = None
        self._upstream = upstream
        self._send = send
        self._buffer = b""

    def count(self, prompt: Prompt) -> int:
        return self.call.bound_input(self.window)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        send, reader = self._send.open(permit), UsageReader(self.call.dialect.usage)
        try:
            response = await send(self.call.with_limit(prompt.max_output_tokens, self.window))
            self.response.set_result(response)
            try:
                async for piece in response.aiter_raw():
                    reader.feed(piece)
                    self._pass_on(piece)
                self._pass_on(b"", last=True)
            finally:
                await response.aclose()
        except httpx2.HTTPError as error:
            self.error = error
            sentence = f"ConnectionLost: the request to {self._upstream.provider} broke off: {error}"
            billed = not isinstance(error, _UNSENT)
            raise ModelUnavailable(sentence, billed=billed, usage=reader.usage, final=reader.final) from error
        reader.close()
        return conclude_answer(self._upstream, self.call.dialect, response.status_code, reader)

    def _pass_on(self, piece: bytes, *, last: bool = False) -> None:
        """Pass on what came; of a usage that only the guard asked for, the client never hears."""
        if not self.call.asks_usage:
            whole, self._buffer = split_events(self._buffer + piece)
            piece = drop_usage_chunk(whole) + (self._buffer if last else b"")
        if piece:
            self.pieces.put_nowait(piece)


class _AnswerStream(httpx2.AsyncByteStream):
    """An answer as it comes; it ends with an error of the provider's own form if the guard ends it."""

    def __init__(self, model: _SdkModel, held: Held, *, streams: bool) -> None:
        self._model = model
        self._buffer = held
        self._streams = streams

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        events = 0
        while piece := await self._model.pieces.get():
            events += 1
            yield piece
        if self._model.error is not None:
            raise self._model.error
        refusal = explain_outcome(self._buffer.result(), 0)
        if refusal is not None and refusal.reason != "provider_failed":
            if not self._streams:
                raise httpx2.ReadError(refusal.sentence)
            yield render_in_stream(self._model.call.dialect.name, refusal, events)

    async def aclose(self) -> None:
        # An answer that is not read to its end is settled at its hold.
        await cancel_and_wait(self._buffer)


def _answer(model: _SdkModel, held: Held, request: httpx2.Request) -> httpx2.Response:
    response = model.response.result()
    streams = response.headers.get("content-type", "").startswith("text/event-stream")
    return httpx2.Response(
        response.status_code,
        headers=response.headers,
        stream=_AnswerStream(model, held, streams=streams),
        request=request,
    )


def _explain(outcome: RequestOutcome) -> Refusal:
    return explain_outcome(outcome, 0) or Refusal("provider_failed", "Halter: the request was not answered.")


def _render(dialect: WireDialect, refusal: Refusal, request: httpx2.Request) -> httpx2.Response:
    status, headers, body = render_refusal(dialect.name, refusal)
    return httpx2.Response(status, headers=headers, content=body, request=request)


def _find_dialect(request: httpx2.Request) -> WireDialect | None:
    if request.method != "POST":
        return None
    return next((each for each in DIALECTS if request.url.path.endswith(each.path)), None)

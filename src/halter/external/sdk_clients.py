"""Guard a client of the openai or anthropic SDK.

```python
async with Guard("runs.db", agent="desk", max_cost_usd=1.00) as halter, halter.session("Answer the mail.") as session:
    client = session.model(AsyncAnthropic())
    answer = await client.messages.create(model="claude-sonnet-5-5", max_tokens=500, messages=[...])
```

The result is the same client with another transport. Each attempt of each request, streamed or not, is held before it
is sent, with its limit lowered to what fits, and settled by the usage in its bytes. A refusal has the form of a
provider's error, which the SDK raises without a retry. A halt ends an answer in progress.

`guard.model(client)` does the same with a session for each request. Requests that cost money and have no price
(batches, embeddings, images, audio) are refused. The guard does not see a client that was not passed to `model`, or
tools that the provider runs during a request.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeVar, cast

import httpx2

from halter.core.errors import ConfigError, ModelUnavailable
from halter.core.messages import Model, Prompt, Reply, TextListener, make_user_message
from halter.core.tools import Permit, PermitGate
from halter.core.usage import ModelName, ModelPrices, Unpriced
from halter.external.dialect import (
    DEFAULT_CONTEXT_WINDOW,
    DIALECTS,
    ModelCall,
    Unreadable,
    WireDialect,
    find_rates,
    read_call,
)
from halter.external.effects import EffectRefused
from halter.external.loop_thread import LoopThread
from halter.external.refusals import Refusal, explain_outcome, render_in_stream, render_refusal
from halter.external.relay import Upstream, conclude_answer, drain_events, drop_usage_chunk
from halter.guard.request import AnsweredRequest, FailedRequest, ModelRequest, RefusedRequest, RequestOutcome
from halter.loop.concurrency import cancel_and_wait
from halter.models.prices import Prices
from halter.models.sellers import find_listed_window
from halter.models.usage_reader import UsageReader
from halter.net.failures import convert_error
from halter.net.sdk_pool import open_plain_client, wrap_blocking_transport, wrap_transport

C = TypeVar("C")


class RequestGuard(Protocol):
    """The session whose guard a client's requests pass."""

    @property
    def prices(self) -> Prices: ...

    def next_request(self) -> str: ...

    async def request(
        self, request: ModelRequest, model: Model
    ) -> AnsweredRequest | RefusedRequest | FailedRequest: ...

    async def wait_until_halted(self) -> EffectRefused: ...


OpenSession = Callable[[], AbstractAsyncContextManager[RequestGuard]]
Send = Callable[[bytes], Awaitable[httpx2.Response]]
RequestTask = asyncio.Future[AnsweredRequest | RefusedRequest | FailedRequest]

_PROVIDER_BY_HOST: Final = {"api.anthropic.com": "anthropic", "api.openai.com": "openai"}
_FREE_PATHS: Final = ("/messages/count_tokens", "/responses/input_tokens")


def guard_client(client: C, open_session: OpenSession, thread: LoopThread | None, provider: str) -> C:
    """Return a copy of an SDK client whose requests pass the guard, each in the session that `open_session` opens.

    For a client that is not async, an async client with the same timeouts sends the requests in the guard's thread.
    Raises ConfigError for a client that cannot be guarded.
    """
    sdk_client: Any = client
    inner = getattr(sdk_client, "_client", None)  # The SDKs have no public name for it.
    if isinstance(inner, httpx2.AsyncClient) and thread is None:
        http: Any = wrap_transport(GuardedTransport(inner, open_session, provider), inner.timeout)
    elif isinstance(inner, httpx2.Client) and thread is not None:
        async_client = open_plain_client(inner.timeout)
        transport = BlockingTransport(GuardedTransport(async_client, open_session, provider), thread)
        http = wrap_blocking_transport(transport, inner.timeout)
    else:
        raise ConfigError(
            f"Cannot guard {type(client).__name__}. Pass AsyncOpenAI or AsyncAnthropic to a Guard or its session, and "
            "OpenAI or Anthropic to `Guard.blocking` or its session, in a version that uses httpx2."
        )
    return cast("C", sdk_client.with_options(http_client=http))


class BlockingTransport(httpx2.BaseTransport):
    """A transport that sends the requests of a client that is not async from the guard's thread."""

    def __init__(self, transport: "GuardedTransport", thread: LoopThread) -> None:
        self._transport = transport
        self._thread = thread

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        async_request = httpx2.Request(
            request.method, request.url, headers=request.headers, content=request.read(), extensions=request.extensions
        )
        response = self._thread.run(self._transport.handle_async_request(async_request))
        stream = _BlockingStream(response, self._thread)
        return httpx2.Response(response.status_code, headers=response.headers, stream=stream, request=request)

    def close(self) -> None:
        self._thread.run(self._transport.aclose())


class _BlockingStream(httpx2.SyncByteStream):
    def __init__(self, response: httpx2.Response, thread: LoopThread) -> None:
        self._response = response
        self._thread = thread

    def __iter__(self) -> Iterator[bytes]:
        chunks = aiter(self._response.aiter_raw())
        while chunk := self._thread.run(_read_next(chunks)):
            yield chunk

    def close(self) -> None:
        self._thread.run(self._response.aclose())


async def _read_next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


class GuardedTransport(httpx2.AsyncBaseTransport):
    """A transport that sends the requests of one client through the guard."""

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
        if request.method == "GET" or request.url.path.endswith(_FREE_PATHS):
            return await self._inner.send(request, stream=True)
        sentence = (
            f"Halter: use a client without the guard for this: {request.method} {request.url.path} has no known price, "
            "so no cap can cover it. It was refused."
        )
        return _render(DIALECTS[-1], Refusal("unpriced", sentence), request)

    async def _ask(self, request: httpx2.Request, call: ModelCall) -> httpx2.Response:
        upstream = self._make_upstream(request, call.dialect)
        model = _SdkModel(call, upstream, PermitGate(self._sender(request)))
        request_task = asyncio.ensure_future(self._hold(call, model))
        request_task.add_done_callback(lambda _: model.pieces.put_nowait(b""))
        try:
            await asyncio.wait([request_task, model.response], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancel_and_wait(request_task)
            raise
        if model.response.done():
            return _answer(model, request_task, request)
        outcome = request_task.result()
        if model.error is not None:
            raise model.error
        return _render(call.dialect, _explain(outcome, model.rates), request)

    async def _hold(self, call: ModelCall, model: "_SdkModel") -> AnsweredRequest | RefusedRequest | FailedRequest:
        async with self._open_session() as session:
            message = make_user_message(call.body.decode(errors="replace"))
            prices = session.prices
            special_rates = find_rates(call, model.name, model.base_url, prices)
            model.rates = special_rates or prices.find(model.name, model.base_url)
            request_to_model = ModelRequest(
                id=session.next_request(),
                prompt=Prompt(messages=(message,), max_output_tokens=call.max_output(model.window)),
                prices=special_rates,
                min_output_tokens=call.min_output(),
                written_by_client=True,
            )
            try:
                return await session.request(request_to_model, model)
            except asyncio.CancelledError as error:
                # The request is settled; its session has to end with it.
                cancellation = error
        raise cancellation

    def _make_upstream(self, request: httpx2.Request, dialect: WireDialect) -> Upstream:
        known_provider = _PROVIDER_BY_HOST.get(request.url.host)
        provider = self._provider or known_provider or ("anthropic" if dialect.anthropic else "openai")
        root = str(request.url).partition(dialect.path)[0]
        return Upstream(provider, root, "", None if known_provider or self._provider else root)

    def _sender(self, request: httpx2.Request) -> Send:
        async def send(body: bytes) -> httpx2.Response:
            headers = httpx2.Headers(request.headers)
            headers["accept-encoding"] = "identity"
            headers["content-length"] = str(len(body))
            outgoing = httpx2.Request(
                request.method, request.url, headers=headers, content=body, extensions=request.extensions
            )
            return await self._inner.send(outgoing, stream=True)

        return send

    async def aclose(self) -> None:
        await self._inner.aclose()


class _SdkModel:
    """One request as a model for the guard, which may use it once, with its permit."""

    def __init__(self, call: ModelCall, upstream: Upstream, send: PermitGate[Send]) -> None:
        self.name = ModelName(upstream.provider, call.model)
        self.base_url = upstream.base_url
        self.window = find_listed_window(self.name, self.base_url) or DEFAULT_CONTEXT_WINDOW
        self.call = call
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.response: asyncio.Future[httpx2.Response] = asyncio.get_running_loop().create_future()
        self.error: httpx2.HTTPError | None = None
        self.rates: ModelPrices | Unpriced | None = None
        self._upstream = upstream
        self._send = send
        self._buffer = bytearray()

    def count(self, prompt: Prompt) -> int:
        return self.call.bound_input(self.window)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        send, reader = self._send.open(permit), UsageReader(self.call.dialect.usage, self.call.model)
        try:
            response = await send(self.call.with_limit(prompt.max_output_tokens, self.window))
            self.response.set_result(response)
            try:
                async for chunk in response.aiter_raw():
                    reader.feed(chunk)
                    self._pass_on(chunk)
                self._pass_on(b"", last=True)
            finally:
                await response.aclose()
        except httpx2.HTTPError as error:
            self.error = error
            sentence = f"ConnectionLost: the connection to {self._upstream.provider} was lost: {error}"
            is_billed = convert_error(error).is_sent
            raise ModelUnavailable(sentence, billed=is_billed, usage=reader.usage, final=reader.final) from error
        reader.close()
        return conclude_answer(self._upstream, self.call.dialect, response.status_code, reader)

    def _pass_on(self, chunk: bytes, *, last: bool = False) -> None:
        """Forward a chunk to the client, without a usage that only the guard asked for."""
        if not self.call.asks_usage:
            events = drain_events(self._buffer, chunk)
            chunk = drop_usage_chunk(events) + (bytes(self._buffer) if last else b"")
        if chunk:
            self.pieces.put_nowait(chunk)


class _AnswerStream(httpx2.AsyncByteStream):
    """An answer as it arrives. If the guard ends it, it ends with an error in the provider's form."""

    def __init__(self, model: _SdkModel, request_task: RequestTask, *, streams: bool) -> None:
        self._model = model
        self._request_task = request_task
        self._streams = streams

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        event_count = 0
        while chunk := await self._model.pieces.get():
            event_count += 1
            yield chunk
        if self._model.error is not None:
            raise self._model.error
        refusal = explain_outcome(self._request_task.result(), 0)
        if refusal is not None and refusal.reason != "provider_failed":
            if not self._streams:
                raise httpx2.ReadError(refusal.sentence)
            yield render_in_stream(self._model.call.dialect.name, refusal, event_count)

    async def aclose(self) -> None:
        # An answer that the client does not read to its end is settled at its hold.
        await cancel_and_wait(self._request_task)


def _answer(model: _SdkModel, request_task: RequestTask, request: httpx2.Request) -> httpx2.Response:
    response = model.response.result()
    streams = response.headers.get("content-type", "").startswith("text/event-stream")
    return httpx2.Response(
        response.status_code,
        headers=response.headers,
        stream=_AnswerStream(model, request_task, streams=streams),
        request=request,
    )


def _explain(outcome: RequestOutcome, rates: ModelPrices | Unpriced | None) -> Refusal:
    return explain_outcome(outcome, 0, rates) or Refusal("provider_failed", "Halter: the request was not answered.")


def _render(dialect: WireDialect, refusal: Refusal, request: httpx2.Request) -> httpx2.Response:
    status, headers, body = render_refusal(dialect.name, refusal)
    return httpx2.Response(status, headers=headers, content=body, request=request)


def _find_dialect(request: httpx2.Request) -> WireDialect | None:
    if request.method != "POST":
        return None
    return next((each for each in DIALECTS if request.url.path.endswith(each.path)), None)

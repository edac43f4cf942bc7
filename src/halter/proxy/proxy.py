"""The proxy: one ASGI application that speaks Messages, Chat Completions and Responses.

    request         its route, its key, its body
    model door      halt, model, price, hold and output limit; it waits for budget and rates before it refuses
    relay           the bytes of the answer, from which the usage is read
    answer          the provider's answer unchanged, or a refusal that the client obeys

Routes that cost money and have no price are refused, because they would bypass the caps.
"""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import msgspec

from halter.core.clock import HOUR, SECOND, read_monotonic
from halter.core.errors import ConfigError, LeaseLost, ModelError, StoreUnavailable
from halter.core.ids import key_scope, make_worker_id
from halter.core.messages import Prompt
from halter.core.text import shorten, to_one_line
from halter.core.usage import ModelName, runs_locally
from halter.dispatch.heartbeat import renew_leases
from halter.external.dialect import (
    CHAT,
    DEFAULT_CONTEXT_WINDOW,
    DIALECTS,
    MESSAGES,
    RESPONSES,
    ModelCall,
    Unreadable,
    WireDialect,
    find_rates,
)
from halter.external.host import SessionHost
from halter.external.refusals import Headers, Refusal, explain_outcome
from halter.external.relay import (
    AsgiMessage,
    ClientConnection,
    RelayedModel,
    RelayExchange,
    Send,
    StoredAnswers,
    Upstream,
    list_answer_headers,
    open_pool,
    read_whole,
)
from halter.guard.guard import GuardRuntime
from halter.guard.halts import RateLimited, halt
from halter.guard.ledger import Ledger
from halter.guard.request import FailedRequest, ModelRequest, RefusedRequest, RequestOutcome, RequestRecord
from halter.loop.concurrency import cancel_and_wait
from halter.models.price_tables import make_prices
from halter.models.prices import Prices
from halter.models.providers import find_endpoint
from halter.models.sellers import find_listed_window, list_model_names
from halter.models.wires.openai_client import uses_new_limit
from halter.net.client import HttpTransport
from halter.policy.evaluation import ResolvedPolicy
from halter.proxy.body_reader import BodyRead, BodyReader, BodyTooLarge, ReadRequest
from halter.proxy.key_terms import KeyTerms, resolve_key
from halter.proxy.keys import DEFAULT_MAX_BODY_MB, KeyRing, VirtualKey, find_client_key
from halter.proxy.sessions import ProxiedSession, ProxiedSessions
from halter.redaction.redact import Redact, Redactor
from halter.redaction.secrets import GivenSecrets
from halter.runtime.runtime import DEFAULT_LEASE_DURATION, Runtime, follow_prices
from halter.runtime.telemetry.tracer import trace_process
from halter.server.listener import serve_asgi
from halter.state.trace_context import find_traceparent, serve_caller

_LOG = logging.getLogger("halter")

Receive = Callable[[], Awaitable[AsgiMessage]]

MAX_CLIENT_WAIT: Final = 30 * SECOND
"""Maximum wait of a request for budget or a rate. After it, the client has to retry."""
MAX_HOLD_WAIT: Final = 25 * SECOND
REQUEST_TIMEOUT: Final = HOUR
IDLE_CONNECTION: Final = 120 * SECOND
MEGABYTE: Final = 1024 * 1024
UNKNOWN_KEY: Final = "Halter: unknown key. Create one with `halter keys new --agent NAME`, and set it in the client."
_FREE_ROUTE: Final = re.compile(
    r"(?:POST /messages/count_tokens|POST /responses/input_tokens|(?:GET|DELETE) /responses/([A-Za-z0-9_-]+)"
    r"|GET /responses/([A-Za-z0-9_-]+)/input_items|POST /responses/([A-Za-z0-9_-]+)/cancel)"
)
_SESSION_HEADERS: Final = (b"x-halter-session", b"x-claude-code-session-id", b"session-id", b"x-session-id")
_LABEL: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NO_PRICE: Final = (
    "Halter: use a provider's key for this instead: {what} has no known price, so no cap can cover it. It was refused."
)


class ProxyRoute(msgspec.Struct, frozen=True):
    """The route of a request: to a dialect that costs money, or to a free path, perhaps of a stored answer."""

    dialect: WireDialect
    path: str
    free: bool = False
    answer_id: str = ""


def find_route(method: str, path: str) -> ProxyRoute | None:
    """Find the route of a request. The base URL of some clients ends with /v1, and that of others does not."""
    route_path = path.removeprefix("/v1") if path.startswith("/v1/") else path
    if method == "POST":
        for dialect in DIALECTS:
            if route_path == dialect.path:
                return ProxyRoute(dialect, route_path)
    if match := _FREE_ROUTE.fullmatch(f"{method} {route_path}"):
        dialect = MESSAGES if route_path.startswith("/messages") else RESPONSES
        answer_id = next((each for each in match.groups() if each), "")
        return ProxyRoute(dialect, route_path, free=True, answer_id=answer_id)
    return None


class IncomingCall(msgspec.Struct, frozen=True):
    """A request with a valid key."""

    terms: KeyTerms
    route: ProxyRoute
    method: str
    query: bytes
    headers: Headers
    body_read: BodyRead
    came_at: int

    def first(self, name: bytes) -> str:
        return next((value.decode("latin-1").strip() for key, value in self.headers if key == name), "")

    def label(self) -> str:
        """Return the client's own name of its session. It is not an identity."""
        labels = (self.first(name) for name in _SESSION_HEADERS)
        return next((each for each in labels if _LABEL.fullmatch(each)), "")

    def describe(self) -> str:
        agent = shorten(to_one_line(self.first(b"user-agent")) or "a client", 80)
        label = self.label()
        return f"{agent} with the key {self.terms.key.name}" + (f", session {label}" if label else "")


class Proxy:
    """One process of the proxy, made in its event loop. `upstreams` are the providers by protocol."""

    def __init__(
        self,
        app: Runtime,
        keys: KeyRing,
        guard: GuardRuntime,
        sessions: ProxiedSessions,
        upstreams: Mapping[str, Upstream],
        redact: Redact,
        reader: type[BodyReader] = BodyReader,
    ) -> None:
        self._app = app
        self._keys = keys
        self._guard = guard
        self._sessions = sessions
        self._upstreams = upstreams
        self._pools: Mapping[str, HttpTransport] = {each.provider: open_pool(each) for each in upstreams.values()}
        self._terms: dict[VirtualKey, KeyTerms] = {}
        self._prices: Prices | None = None
        self._stored_answers = StoredAnswers(app.patient())
        self._reader = reader(redact, app.environ)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(name.lower(), value) for name, value in scope["headers"]]
            with serve_caller([value.decode("latin-1") for name, value in headers if name == b"traceparent"]):
                await self._serve(scope, receive, headers, ClientConnection(send, headers))
        elif scope["type"] == "websocket":
            await _reject_upgrade(scope, send)

    async def aclose(self) -> None:
        await self._reader.aclose()
        for pool in self._pools.values():
            await pool.aclose()

    async def _serve(
        self, scope: Mapping[str, Any], receive: Receive, headers: Headers, client: ClientConnection
    ) -> None:
        method, path = scope["method"], scope["path"]
        route = find_route(method, path)
        dialect = _find_dialect(path, route)
        key = self._keys.find(find_client_key(headers))
        terms = self._find_terms(key)
        if isinstance(terms, Refusal):
            await client.refuse(dialect.name, terms)
        elif method == "GET" and path.rstrip("/") in {"/v1/models", "/models"}:
            await client.answer(200, *self._list_models(terms))
        elif route is None:
            await client.refuse(dialect.name, _explain_no_route(method, path))
        elif _name_protocol(dialect) not in self._upstreams:
            sentence = "Halter: no provider of this protocol has a key. Set one, and restart `halter proxy`."
            await client.refuse(dialect.name, Refusal("refused", sentence))
        else:
            body_read = await self._read_body(receive, headers, terms.key, dialect)
            if isinstance(body_read, Refusal):
                await client.refuse(dialect.name, body_read)
                return
            now = self._app.clock.now()
            incoming = IncomingCall(terms, route, method, scope.get("query_string", b""), headers, body_read, now)
            hang_up_task = asyncio.ensure_future(_notice_hang_up(receive, client))
            try:
                await (self._relay_free(incoming, client) if route.free else self._relay(incoming, client))
            finally:
                hang_up_task.cancel()

    async def _read_body(
        self, receive: Receive, headers: Headers, key: VirtualKey, dialect: WireDialect
    ) -> BodyRead | Refusal:
        limits = key.limits
        max_mb = limits.max_body_mb or DEFAULT_MAX_BODY_MB
        encoding = next((value.decode("latin-1") for name, value in headers if name == b"content-encoding"), "identity")
        try:
            data = await _receive_body(receive, max_mb * MEGABYTE)
            request = ReadRequest(dialect.name, data, encoding, max_mb * MEGABYTE, limits.mask_secrets)
            return await self._reader.read(key.digest, request)
        except BodyTooLarge:
            sentence = f"Halter: the request is larger than {max_mb} MB, the limit of the key {key.name}."
            return Refusal("too_large", sentence)
        except Unreadable as error:
            return Refusal("unreadable", f"Halter: {error}")

    def _find_terms(self, key: VirtualKey | None) -> KeyTerms | Refusal:
        if key is None:
            return Refusal("unknown_key", f"Halter: {self._keys.problem}" if self._keys.problem else UNKNOWN_KEY)
        if key.revoked_at is not None:
            return Refusal("refused", f"Halter: the key {key.name} was revoked.")
        terms = self._terms.get(key)
        if terms is None:
            try:
                terms = self._terms[key] = resolve_key(self._app.fleet, key)
            except ConfigError as error:
                return Refusal("refused", f"Halter: the key {key.name} cannot be used: {error}")
        return terms

    def _list_models(self, terms: KeyTerms) -> tuple[Headers, bytes]:
        """List the models that a key may use, in a form for clients of both protocols."""
        names = [
            (upstream.provider, model)
            for upstream in {each.provider: each for each in self._upstreams.values()}.values()
            for model in list_model_names(upstream.provider, terms.policy.prices)
            if terms.policy.allows_model(f"{upstream.provider}:{model}")
        ]
        data = [
            {
                "id": model,
                "type": "model",
                "object": "model",
                "display_name": model,
                "created_at": "1970-01-01T00:00:00Z",
                "created": 0,
                "owned_by": provider,
            }
            for provider, model in names
        ]
        page_bounds = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        body = msgspec.json.encode({"object": "list", "data": data, "has_more": False, **page_bounds})
        return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body

    def _exchange(self, incoming: IncomingCall, client: ClientConnection, model: str = "") -> RelayExchange:
        upstream = self._upstreams[_name_protocol(incoming.route.dialect)]
        pool = self._pools[upstream.provider]
        has_new_limit = (
            incoming.route.dialect is not CHAT or not model or uses_new_limit(ModelName(upstream.provider, model))
        )
        address = upstream.address(incoming.route.path, incoming.query)
        digest, is_stored = incoming.terms.key.digest, incoming.route.dialect is RESPONSES and not incoming.route.free
        return RelayExchange(
            pool,
            upstream,
            client,
            address,
            upstream.headers(incoming.headers),
            uses_new_limit=has_new_limit,
            on_answer_id=partial(self._stored_answers.remember, digest) if is_stored else None,
        )

    async def _relay_free(self, incoming: IncomingCall, client: ClientConnection) -> None:
        """Relay a free request. Halts apply to it too."""
        dialect = incoming.route.dialect.name
        agent, key = incoming.terms.policy.name, incoming.terms.key.name
        halt = await self._guard.find_halt_in((key_scope(agent, key), f"agent:{agent}", "fleet"))
        if halt is not None:
            await client.refuse(dialect, Refusal("halted", f"Halter: {halt.scope} is halted."))
            return
        call = incoming.body_read.call
        stored_ids = [incoming.route.answer_id] if incoming.route.answer_id else call.stored_ids if call else ()
        refusal = await self._refuse_foreign(incoming.terms.key, stored_ids)
        if refusal is not None:
            await client.refuse(dialect, refusal)
            return
        exchange = self._exchange(incoming, client)
        try:
            response = await exchange.open(incoming.method, incoming.body_read.body)
            try:
                data = await read_whole(exchange, response)
            finally:
                await response.aclose()
        except ModelError as error:
            await client.refuse(dialect, Refusal("provider_failed", f"Halter: {error}"))
            return
        headers = [*list_answer_headers(response), (b"content-length", b"%d" % len(data))]
        await client.answer(response.status, headers, data)

    async def _refuse_foreign(self, key: VirtualKey, stored_ids: Sequence[str]) -> Refusal | None:
        """Refuse stored answers and conversations that another key got, or that were made outside the proxy."""
        for stored_id in stored_ids:
            if not await self._stored_answers.has(key.digest, stored_id):
                name = shorten(to_one_line(stored_id), 80)
                return Refusal("not_found", f"Halter: the key {key.name} has no stored answer {name}.")
        return None

    async def _relay(self, incoming: IncomingCall, client: ClientConnection) -> None:
        """Relay a request that costs money, through the model door."""
        dialect = incoming.route.dialect.name
        try:
            call = incoming.body_read.require_call()
            refusal = await self._refuse_foreign(incoming.terms.key, call.stored_ids)
            if refusal is None:
                session = await self._sessions.get_session(incoming.terms, incoming.label(), incoming.describe())
                refusal = await self._ask(incoming, call, session, client)
        except Unreadable as error:
            refusal = Refusal("unreadable", f"Halter: {error}")
        except LeaseLost:
            refusal = Refusal("store_away", "Halter: this process has lost its lease of the session. Try again.")
        except StoreUnavailable as error:
            refusal = Refusal("store_away", f"Halter: {error}")
        if refusal is not None:
            await client.refuse(dialect, refusal)
        elif client.streams:
            await client.write(b"", more=False)

    async def _ask(
        self, incoming: IncomingCall, call: ModelCall, session: ProxiedSession, client: ClientConnection
    ) -> Refusal | None:
        if session.end_reason:
            return Refusal("halted", f"Halter: {session.end_reason}")
        exchange = self._exchange(incoming, client, call.model)
        name = ModelName(exchange.upstream.provider, call.model)
        window = find_listed_window(name, exchange.upstream.base_url) or DEFAULT_CONTEXT_WINDOW
        table, allowed_members = self._price_table(incoming.terms), incoming.terms.key.limits.allowed_members
        model = RelayedModel(name, call, window, exchange)
        request = ModelRequest(
            id=session.next_request(),
            prompt=Prompt(messages=(), max_output_tokens=call.max_output(window)),
            timeout=REQUEST_TIMEOUT,
            record=RequestRecord(f"POST {incoming.route.path}: {call.model}, {len(call.body):,} bytes"),
            prices=find_rates(call, name, exchange.upstream.base_url, table, allowed_members),
            min_output_tokens=call.min_output(),
            written_by_client=True,
            traceparent=find_traceparent(),
        )
        session.under_way += 1
        try:
            outcome = await self._ask_in_time(incoming, session, request, model)
        except LeaseLost:
            self._sessions.drop(session)
            raise
        finally:
            session.under_way -= 1
            session.used_at = read_monotonic(self._app.clock)
        if exchange.answer_id:
            await self._stored_answers.save(incoming.terms.key.digest, exchange.answer_id)
        other_model = "" if exchange.reader is None else exchange.reader.answered_by
        if other_model and not runs_locally(name, exchange.upstream.base_url):
            await self._halt_key(incoming.terms, request.id, ModelName(name.provider, other_model), call.model)
        if isinstance(outcome, RefusedRequest | FailedRequest) and outcome.outcome == "external_halt":
            await session.end_if_cancelled()
        rates = request.prices or table.find(name, exchange.upstream.base_url)
        return explain_outcome(outcome, self._app.clock.now(), rates)

    async def _ask_in_time(
        self, incoming: IncomingCall, session: ProxiedSession, request: ModelRequest, model: RelayedModel
    ) -> RequestOutcome:
        """Make the request through the door, and repeat it after a rate limit, for as long as a client waits."""
        wait_count = 0
        while True:
            # A context caches values of its model: each request has its own.
            context = msgspec.structs.replace(session.context)
            outcome = await session.runtime.request_once(request, model, waited=wait_count, context=context)
            now = self._app.clock.now()
            if not isinstance(outcome, RateLimited) or outcome.retry_at > incoming.came_at + MAX_CLIENT_WAIT:
                return outcome
            wait_count = outcome.wait_count + 1
            await self._app.clock.sleep(max(0, outcome.retry_at - now))

    async def _halt_key(self, terms: KeyTerms, request: str, answered: ModelName, asked: str) -> None:
        """Halt a key for which a model answered that was not asked for, unless the key names that model in full."""
        if str(answered) in terms.key.limits.models:
            return
        asked_name, answered_name = (shorten(to_one_line(name), 100) for name in (asked, str(answered)))
        reason = f"{asked_name} was asked for, and {answered_name} answered"
        scope = key_scope(terms.policy.name, terms.key.name)
        await self._app.patient().commit(halt(scope, "halter", f"{request}/other-model", reason))

    def _price_table(self, terms: KeyTerms) -> Prices:
        if self._prices is None:
            self._prices = make_proxy_prices(self._app, terms.policy)
        return self._prices


def make_proxy_prices(app: Runtime, policy: ResolvedPolicy) -> Prices:
    """Make the prices for virtual keys: their clients choose models by themselves, new ones on their first day too."""
    return make_prices(policy, app.prices.tables, default="dearest")


def _name_protocol(dialect: WireDialect) -> str:
    return "anthropic" if dialect.anthropic else "openai"


def _find_dialect(path: str, route: ProxyRoute | None) -> WireDialect:
    if route is not None:
        return route.dialect
    return MESSAGES if "/messages" in path else CHAT


def _explain_no_route(method: str, path: str) -> Refusal:
    route_path = path.removeprefix("/v1") if path.startswith("/v1/") else path
    if method == "POST" and path.startswith("/v1/"):
        return Refusal("unpriced", _NO_PRICE.format(what=f"{method} {shorten(route_path, 80)}"))
    return Refusal("not_found", f"Halter: no route for {method} {shorten(path, 80)}.")


async def _receive_body(receive: Receive, max_size: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_size:
            raise BodyTooLarge
        if not message.get("more_body"):
            break
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _notice_hang_up(receive: Receive, client: ClientConnection) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
    client.is_gone = True


async def _reject_upgrade(scope: Mapping[str, Any], send: Send) -> None:
    """Reject a WebSocket with the status after which clients fall back to HTTP immediately."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain"), (b"upgrade", b"HTTP/1.1")]
    await send({"type": "websocket.http.response.start", "status": 426, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": b"Halter: WebSockets are not supported. Use POST.\n"})


def find_upstreams(app: Runtime, anthropic: str, openai: str) -> Mapping[str, Upstream]:
    """Find the providers of both protocols, with their keys. A default provider without a key is skipped.

    Raises ConfigError if none remains, if one speaks another protocol, and if a configured one has no key.
    """
    providers = resolve_key(app.fleet, _PROBE_KEY).providers
    upstreams: dict[str, Upstream] = {}
    for wire, provider in (("anthropic", anthropic), ("openai", openai)):
        try:
            endpoint, key = find_endpoint(ModelName(provider, "any"), providers, app.environ.get)
        except ConfigError:
            if provider in providers:
                raise
            continue
        if endpoint.wire != wire and (wire, endpoint.wire) != ("openai", "responses"):
            raise ConfigError(
                f"{provider} uses the protocol of {endpoint.wire}. Choose a provider with the protocol of {wire}."
            )
        provider_settings = providers.get(provider)
        if provider_settings is not None and provider_settings.credentials is not None:
            raise ConfigError(f"{provider} has cloud credentials, which the proxy does not support. Give it a key.")
        bills_errors = provider_settings is not None and provider_settings.bills_errors
        upstreams[wire] = Upstream(
            provider, endpoint.url, key, None if endpoint.usual else endpoint.url, bills_errors, wire == "anthropic"
        )
    if not upstreams:
        raise ConfigError(
            f"The proxy has no provider: neither {anthropic} nor {openai} has a key. Set ANTHROPIC_API_KEY or "
            "OPENAI_API_KEY, or add a provider under `providers` in halter.yaml and pass it to `halter proxy` with "
            "--anthropic or --openai."
        )
    return upstreams


def require_other_address(upstreams: Mapping[str, Upstream], url: str) -> None:
    """Reject an upstream with the proxy's own address, which a shell with a client's settings has."""
    for upstream in upstreams.values():
        if upstream.url.startswith(url):
            raise ConfigError(
                f"{upstream.provider} is set to the proxy's own address {url}. Start the proxy in a shell without the "
                "variables of `halter proxy env`."
            )


_PROBE_KEY: Final = VirtualKey("probe", "probe", "", 0)


async def serve_proxy(
    app: Runtime, listening: socket.socket, keys: KeyRing, upstreams: Mapping[str, Upstream], *, lease: int
) -> None:
    """Serve until cancelled, on a bound port."""
    async with open_proxy(app, keys, upstreams, lease=lease) as proxy:
        await serve_asgi(proxy, listening, head=IDLE_CONNECTION)


@asynccontextmanager
async def open_proxy(
    app: Runtime,
    keys: KeyRing,
    upstreams: Mapping[str, Upstream],
    *,
    lease: int = DEFAULT_LEASE_DURATION,
    max_wait: int = MAX_HOLD_WAIT,
    ledger: type[Ledger] = Ledger,
    reader: type[BodyReader] = BodyReader,
) -> AsyncGenerator[Proxy]:
    """Open a proxy on a store. Its leases are renewed in the block, and its sessions end when the block ends."""
    store = app.patient()
    redact = Redactor({}, app.environ).redact
    worker = make_worker_id("proxy", app.ids)
    terms = resolve_key(app.fleet, _PROBE_KEY)
    guard = GuardRuntime(
        store,
        app.clock,
        redact=redact,
        secrets=GivenSecrets({}),
        prices=make_proxy_prices(app, terms.policy),
        ledger=ledger(store, app.clock, max_wait),
    )
    sessions = ProxiedSessions(SessionHost(app, worker), guard, terms)
    proxy = Proxy(app, keys, guard, sessions, upstreams, redact, reader)
    async with (
        trace_process(app, _LOG.warning, ("proxied",)),
        renew_leases(store, app.clock, worker, max(lease // 3, 1), liveness=app.liveness),
        follow_prices(app),
    ):
        upkeep_task = asyncio.ensure_future(sessions.run())
        try:
            yield proxy
        finally:
            await cancel_and_wait(upkeep_task)
            await sessions.close()
            await proxy.aclose()

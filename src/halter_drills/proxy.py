"""The recorded cost of requests through the proxy is never less than the provider's bill, and stays below the caps.

Real proxies in their own processes relay real requests to a provider that keeps a bill. Clients read to the end or hang
up, the provider breaks off, proxies are killed in the middle of streams. Then the drill compares the bill with the
store, by plain SQL.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.errors import ConfigError, explain_extra
from halter.core.ids import key_scope
from halter.core.money import DOLLAR, format_exact_micros
from halter.core.ports import Lease
from halter.external.dialect import DialectName
from halter.guard.ledger import ActualResult, Ledger, Settlement
from halter.models.providers import is_installed
from halter.proxy.body_reader import BodyRead, BodyReader, ReadRequest, read_request
from halter.proxy.keys import KeyFile, KeyLimits, KeyRing, make_key_secret, make_virtual_key
from halter.settings import Settings
from halter.state.session import InFlight
from halter_drills.checker import StoreContents, check, read_store
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, use_memory_file
from halter_drills.provider import ListedProvider

if TYPE_CHECKING:
    import httpx2

IMPORTED: Final = ("halter.proxy.proxy", "halter.server.server", "uvicorn")
"""Modules that every new proxy would import again after a kill."""
ProxyAct = Literal[
    "whole",
    "streamed",
    "hangs up",
    "breaks off",
    "killed",
    "substituted",
    "unlisted",
    "reported",
    "surcharged",
    "unknown",
]
"""An answer in one piece or streamed; a client that hangs up; a provider that breaks off; a proxy that is killed; a
provider that runs a dearer model than is asked for, or one without a price; that reports its cost, a place that costs
more, or a member that nobody knows."""

SHORT_LEASE: Final = 3 * SECOND // 2
LEASE_EXPIRY_SECONDS: Final = 2.5
DRILL_CAP: Final = Decimal("0.05")
CONCURRENCY: Final = 20
RECOVERY_TIMEOUT_SECONDS: Final = 60
_PATHS: Final[Mapping[DialectName, str]] = {
    "messages": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
}
_MODELS: Final[Mapping[DialectName, str]] = {"messages": "claude-opus-5-5", "chat": "gpt-5", "responses": "gpt-5"}
_CHEAP_MODELS: Final[Mapping[DialectName, str]] = {
    "messages": "claude-haiku-5-5",
    "chat": "gpt-4o-mini",
    "responses": "gpt-4o-mini",
}
"""The models that are asked for where the provider runs those above."""
_EXACT: Final[frozenset[ProxyAct]] = frozenset(
    ("whole", "streamed", "hangs up", "substituted", "reported", "surcharged")
)
_HALTING: Final[frozenset[ProxyAct]] = frozenset(("substituted", "unlisted"))
"""What halts the key by which it came in."""
_REPORTED_COST_USD: Final = 0.03
_DEAR_MODEL: Final = "dear-one"


class ForgetfulLedger(Ledger):
    """The teeth: a ledger that charges half of the cost, and nothing for requests in doubt."""

    async def settle(self, lease: Lease, flight: InFlight, result: ActualResult) -> Settlement:
        usd = None if result.usd is None else result.usd // 2
        return await super().settle(lease, flight, msgspec.structs.replace(result, usd=usd))

    async def settle_in_doubt(self, lease: Lease, flights: Sequence[InFlight]) -> None:
        for flight in flights:
            await super().settle(lease, flight, ActualResult("unknown", usd=0, tokens=0))


class LoopReader(BodyReader):
    """The teeth: reads every body on the event loop, on which halts arrive."""

    async def read(self, key_digest: str, request: ReadRequest) -> BodyRead:
        return read_request(request, str)


class ProxyCase(msgspec.Struct, frozen=True):
    """One request and its fate. Each case has its own agent, and so its own account."""

    agent: str
    dialect: DialectName
    act: ProxyAct
    secret: str

    def __str__(self) -> str:
        return f"{self.dialect}, {self.act}"

    def body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "How warm is it?"}]
        content = {"input": messages} if self.dialect == "responses" else {"messages": messages}
        limit = "max_output_tokens" if self.dialect == "responses" else "max_tokens"
        models = _CHEAP_MODELS if self.act in _HALTING else _MODELS
        return {"model": models[self.dialect], limit: 900, "stream": self.act != "whole", **content}


async def run_proxy(pipe: Pipe, url: str, folder: str, port: int, *, teeth: bool) -> None:
    """Serve a proxy on the drill's store until the drill ends it."""
    from halter.proxy.proxy import find_upstreams, open_proxy
    from halter.runtime.runtime import open_runtime
    from halter.server.listener import bind, format_address, serve_asgi

    root = Path(folder)
    settings = Settings(store=url, checkpoints=root / "checkpoints", signing_key=root / "signing.key", person="drill")
    environ = {
        "ANTHROPIC_API_KEY": "made-up",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "OPENAI_API_KEY": "made-up",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
    }
    async with open_runtime(settings, environ=environ, lease=SHORT_LEASE) as app:
        upstreams = find_upstreams(app, "anthropic", "openai")
        ring = KeyRing(KeyFile(root / "keys.json"))
        ledger = ForgetfulLedger if teeth else Ledger
        reader = LoopReader if teeth else BodyReader
        async with open_proxy(app, ring, upstreams, lease=SHORT_LEASE, ledger=ledger, reader=reader) as proxy:
            listener = bind(port=0)
            server_task = asyncio.ensure_future(serve_asgi(proxy, listener))
            pipe.send(format_address(listener))
            await asyncio.to_thread(pipe.recv)
            server_task.cancel()
            await asyncio.gather(server_task, return_exceptions=True)
    pipe.send("ended")


def run(setting: Setting) -> DrillResult:
    if missing := find_missing():
        raise ConfigError(missing)
    with own_store(use_memory_file(setting)) as workspace, children(__name__, *IMPORTED) as processes:
        return asyncio.run(_run_cases(setting, workspace, processes))


def find_missing() -> str:
    return "" if is_installed("uvicorn") and is_installed("fastapi") else explain_extra("server", "The drill proxy")


async def _run_cases(setting: Setting, workspace: Workspace, children: Children) -> DrillResult:
    rounds = setting.seeds or 1
    keys = KeyFile(workspace.folder / "keys.json")
    cases = [
        ProxyCase(agent, dialect, act, _make_key(keys, agent))
        for number in range(rounds)
        for dialect in get_args(DialectName)
        for act in get_args(ProxyAct)
        for agent in [f"a{number}-{dialect}-{act.replace(' ', '-')}"]
    ]
    shared_secret = _make_key(keys, "shared")
    billed_by_agent: dict[str, int] = {}

    async def start() -> tuple[Child, str]:
        child = children.start(serve_drill_proxy, workspace.url, str(workspace.folder), provider.port, setting.teeth)
        return child, await asyncio.to_thread(child.receive)

    import httpx2

    async with ListedProvider(output=800).serve() as provider, httpx2.AsyncClient(timeout=60) as http:
        child, url = await start()
        for number, case in enumerate(cases):
            setting.progress(number, len(cases) + 1, str(case))
            before = provider.billed
            if case.act == "killed":
                child, url = await _kill(http, provider, case, child, url, start)
            else:
                await _ask(http, provider, case, url)
            billed_by_agent[case.agent] = provider.billed - before
        before = provider.billed
        await _ask_together(http, url, shared_secret)
        billed_by_agent["shared"] = provider.billed - before
        await _end_cleanly(workspace, start, child)
    setting.progress(len(cases) + 1, len(cases) + 1, "checked")
    contents = read_store(workspace.url)
    violations = [*check(contents), *_compare(cases, billed_by_agent, contents)]
    counts = {"requests": len(cases) + CONCURRENCY, "billed_usd_micros": sum(billed_by_agent.values())}
    return result(DRILL.name, workspace.kind, len(cases) + 1, violations, counts)


def serve_drill_proxy(pipe: Pipe, url: str, folder: str, port: int, teeth: bool) -> None:  # noqa: FBT001 It is passed to a process.
    asyncio.run(run_proxy(pipe, url, folder, port, teeth=teeth))


def _make_key(keys: KeyFile, agent: str) -> str:
    secret = make_key_secret()
    keys.add(
        make_virtual_key(secret, agent, agent, SystemClock().now(), "drill", KeyLimits(max_cost_usd_per_day=DRILL_CAP))
    )
    return secret


async def _ask(http: "httpx2.AsyncClient", provider: ListedProvider, case: ProxyCase, url: str) -> None:
    """Make a request, with the fate of its case."""
    provider.cut_after = 3 if case.act == "breaks off" else None
    provider.answers_as = {"substituted": _MODELS[case.dialect], "unlisted": _DEAR_MODEL}.get(case.act, "")
    provider.bills_as = _CHEAP_MODELS[case.dialect] if case.act == "unlisted" else ""
    provider.reported_cost = _REPORTED_COST_USD if case.act == "reported" else 0.0
    provider.extra_usage = {"surcharged": {"inference_geo": "us"}, "unknown": {"dear_tokens": 9}}.get(case.act, {})
    headers = {"authorization": f"Bearer {case.secret}"}
    async with http.stream("POST", f"{url}{_PATHS[case.dialect]}", json=case.body(), headers=headers) as answer:
        async for _ in answer.aiter_bytes():
            if case.act == "hangs up":
                break
    provider.cut_after, provider.answers_as, provider.bills_as = None, "", ""
    provider.reported_cost, provider.extra_usage = 0.0, {}


async def _kill(
    http: "httpx2.AsyncClient",
    provider: ListedProvider,
    case: ProxyCase,
    child: Child,
    url: str,
    start: Callable[[], Any],
) -> tuple[Child, str]:
    """Kill the proxy in the middle of a stream, and start another."""
    import httpx2

    provider.gate = asyncio.Event()
    provider.reached_gate.clear()
    request_task = asyncio.ensure_future(_ask(http, provider, case, url))
    await asyncio.wait_for(provider.reached_gate.wait(), RECOVERY_TIMEOUT_SECONDS)
    await asyncio.to_thread(child.kill)
    provider.gate.set()
    provider.gate = None
    results = await asyncio.gather(request_task, return_exceptions=True)
    if isinstance(results[0], BaseException) and not isinstance(results[0], httpx2.HTTPError):
        raise results[0]
    return await start()


async def _ask_together(http: "httpx2.AsyncClient", url: str, secret: str) -> None:
    """Send concurrent requests that together exceed one cap."""
    case = ProxyCase("shared", "messages", "streamed", secret)
    headers = {"authorization": f"Bearer {secret}"}
    requests = [http.post(f"{url}{_PATHS['messages']}", json=case.body(), headers=headers) for _ in range(CONCURRENCY)]
    await asyncio.gather(*requests)


async def _end_cleanly(workspace: Workspace, start: Callable[[], Any], child: Child) -> None:
    """Shut the last proxy down cleanly, and let another one settle the holds of the killed ones."""
    child.send("end")
    await asyncio.to_thread(child.receive)
    await asyncio.sleep(LEASE_EXPIRY_SECONDS)
    last, _ = await start()
    async with asyncio.timeout(RECOVERY_TIMEOUT_SECONDS):
        while (await asyncio.to_thread(read_store, workspace.url)).holds:  # noqa: ASYNC110 Another process settles them.
            await asyncio.sleep(0.1)
    last.send("end")
    await asyncio.to_thread(last.receive)


def _compare(cases: Sequence[ProxyCase], billed_by_agent: Mapping[str, int], contents: StoreContents) -> Iterator[str]:
    spent_by_agent: dict[str, int] = {}
    for (scope, window, unit), sums in contents.budgets.items():
        if scope.startswith("agent:") and unit == "usd" and window.startswith("day"):
            spent_by_agent[scope.removeprefix("agent:")] = sums.spent
    cap = int(DRILL_CAP * DOLLAR)
    names = {case.agent: str(case) for case in cases} | {"shared": f"{CONCURRENCY} concurrent requests"}
    exact = {case.agent for case in cases if case.act in _EXACT}
    halted = {event.facts["scope"] for event in contents.events if event.kind == "halt_requested"}
    expected = {key_scope(case.agent, case.agent) for case in cases if case.act in _HALTING}
    yield from (
        f"{scope}: a model answered that was not asked for, and no halt followed."
        for scope in sorted(expected - halted)
    )
    yield from (f"{scope}: it was halted, and nothing had happened there." for scope in sorted(halted - expected))
    for agent, name in names.items():
        recorded_micros = spent_by_agent.get(agent, 0)
        billed, recorded = map(format_exact_micros, (billed_by_agent[agent], recorded_micros))
        if recorded_micros < billed_by_agent[agent]:
            yield f"{name}: billed {billed}, recorded {recorded}."
        if recorded_micros > cap:
            yield f"{name}: recorded {recorded}, above the cap of {format_exact_micros(cap)}."
        if agent in exact and recorded_micros > billed_by_agent[agent]:
            yield f"{name}: recorded {recorded}, billed only {billed}."
        if not billed_by_agent[agent]:
            yield f"{name}: nothing was billed, so the case proves nothing."


DRILL: Final = Drill(
    "proxy",
    "The recorded cost of requests through the proxy is never less than the bill, and stays below the caps.",
    run,
    lacking=find_missing,
)

"""What other programs' agents spend through the proxy is never less than what their provider bills, and below its caps.

Real proxies in processes of their own relay real requests to a provider that keeps a bill. Clients read to the end or
hang up, the provider breaks off, proxies are killed in the middle of streams. Then the bill is compared with what plain
SQL finds in the store.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.errors import ConfigError, explain_extra
from halter.core.money import DOLLAR, format_micros
from halter.core.ports import Lease
from halter.guard.ledger import ActualResult, Ledger, Settlement
from halter.models.providers import is_installed
from halter.proxy.dialect import DialectName
from halter.proxy.keys import KeyFile, KeyLimits, KeyRing, describe_key, make_key_secret
from halter.settings import Settings
from halter.state.session import InFlight
from halter_drills.checker import StoreContents, check, read_store
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, use_memory_file
from halter_drills.provider import ListedProvider

if TYPE_CHECKING:
    import httpx2

IMPORTED: Final = ("halter.proxy.proxy", "halter.server.server", "uvicorn")
"""What every proxy would import anew after each kill."""
ProxyAct = Literal["whole", "streamed", "hangs up", "breaks off", "killed"]
"""An answer in one piece or in many; a client that leaves; a provider that does; a proxy that is killed."""

SHORT_LEASE: Final = 3 * SECOND // 2
LEASE_OVER_SECONDS: Final = 2.5
DRILL_CAP: Final = Decimal("0.05")
TOGETHER: Final = 20
LONGEST_RECOVERY_SECONDS: Final = 60
_PATHS: Final[Mapping[DialectName, str]] = {
    "messages": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
}
_MODELS: Final[Mapping[DialectName, str]] = {"messages": "claude-opus-5-5", "chat": "gpt-5", "responses": "gpt-5"}
_EXACT: Final[frozenset[ProxyAct]] = frozenset(("whole", "streamed", "hangs up"))


class ForgetfulLedger(Ledger):
    """Charges half of what was used, and nothing for what is in doubt: with teeth, the drill must find it."""

    async def settle(self, lease: Lease, flight: InFlight, result: ActualResult) -> Settlement:
        usd = None if result.usd is None else result.usd // 2
        return await super().settle(lease, flight, msgspec.structs.replace(result, usd=usd))

    async def settle_in_doubt(self, lease: Lease, flights: Sequence[InFlight]) -> None:
        for flight in flights:
            await super().settle(lease, flight, ActualResult("unknown", usd=0, tokens=0))


class ProxyCase(msgspec.Struct, frozen=True):
    """One request, and what happens to it; its agent has an account of its own."""

    agent: str
    dialect: DialectName
    act: ProxyAct
    secret: str

    def __str__(self) -> str:
        return f"{self.dialect}, {self.act}"

    def body(self) -> dict[str, Any]:
        said = [{"role": "user", "content": "How warm is it?"}]
        words = {"input": said} if self.dialect == "responses" else {"messages": said}
        limit = "max_output_tokens" if self.dialect == "responses" else "max_tokens"
        return {"model": _MODELS[self.dialect], limit: 900, "stream": self.act != "whole", **words}


async def run_proxy(pipe: Pipe, url: str, folder: str, port: int, *, teeth: bool) -> None:
    """Serve a proxy on the drill's store until the drill says otherwise."""
    from halter.proxy.proxy import find_upstreams, open_proxy
    from halter.runtime.runtime import open_runtime
    from halter.server.server import bind, format_address, serve_asgi

    place = Path(folder)
    settings = Settings(store=url, checkpoints=place / "checkpoints", signing_key=place / "signing.key", person="drill")
    environ = {
        "ANTHROPIC_API_KEY": "made-up",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "OPENAI_API_KEY": "made-up",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
    }
    async with open_runtime(settings, environ=environ, lease=SHORT_LEASE) as app:
        upstreams = find_upstreams(app, "anthropic", "openai")
        ring = KeyRing(KeyFile(place / "keys.json"))
        ledger = ForgetfulLedger if teeth else Ledger
        async with open_proxy(app, ring, upstreams, lease=SHORT_LEASE, ledger=ledger) as proxy:
            listening = bind(port=0)
            serving = asyncio.ensure_future(serve_asgi(proxy, listening))
            pipe.send(format_address(listening))
            await asyncio.to_thread(pipe.recv)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    pipe.send("ended")


def run(setting: Setting) -> DrillResult:
    if missing := find_missing():
        raise ConfigError(missing)
    with own_store(use_memory_file(setting)) as workspace, children(__name__, *IMPORTED) as started:
        return asyncio.run(_run_cases(setting, workspace, started))


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
    shared = _make_key(keys, "shared")
    billed: dict[str, int] = {}

    async def start() -> tuple[Child, str]:
        child = children.start(_serve, workspace.url, str(workspace.folder), provider.port, setting.teeth)
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
            billed[case.agent] = provider.billed - before
        before = provider.billed
        await _ask_together(http, url, shared)
        billed["shared"] = provider.billed - before
        await _end_cleanly(workspace, start, child)
    setting.progress(len(cases) + 1, len(cases) + 1, "checked")
    contents = read_store(workspace.url)
    violations = [*check(contents), *_compare(cases, billed, contents)]
    counts = {"requests": len(cases) + TOGETHER, "billed_usd_micros": sum(billed.values())}
    return result(DRILL.name, workspace.kind, len(cases) + 1, violations, counts)


def _serve(pipe: Pipe, url: str, folder: str, port: int, teeth: bool) -> None:  # noqa: FBT001 It is passed to a process.
    asyncio.run(run_proxy(pipe, url, folder, port, teeth=teeth))


def _make_key(keys: KeyFile, agent: str) -> str:
    secret = make_key_secret()
    keys.add(
        describe_key(secret, agent, agent, SystemClock().now(), "drill", KeyLimits(max_cost_usd_per_day=DRILL_CAP))
    )
    return secret


async def _ask(http: "httpx2.AsyncClient", provider: ListedProvider, case: ProxyCase, url: str) -> None:
    """Make a request, and let happen what its case says."""
    provider.cut_after = 3 if case.act == "breaks off" else None
    headers = {"authorization": f"Bearer {case.secret}"}
    async with http.stream("POST", f"{url}{_PATHS[case.dialect]}", json=case.body(), headers=headers) as answer:
        async for _ in answer.aiter_bytes():
            if case.act == "hangs up":
                break
    provider.cut_after = None


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
    asking = asyncio.ensure_future(_ask(http, provider, case, url))
    await asyncio.wait_for(provider.reached_gate.wait(), LONGEST_RECOVERY_SECONDS)
    await asyncio.to_thread(child.kill)
    provider.gate.set()
    provider.gate = None
    found = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(found[0], BaseException) and not isinstance(found[0], httpx2.HTTPError):
        raise found[0]
    return await start()


async def _ask_together(http: "httpx2.AsyncClient", url: str, secret: str) -> None:
    """Ask many times at once for more than one cap allows."""
    case = ProxyCase("shared", "messages", "streamed", secret)
    headers = {"authorization": f"Bearer {secret}"}
    asked = [http.post(f"{url}{_PATHS['messages']}", json=case.body(), headers=headers) for _ in range(TOGETHER)]
    await asyncio.gather(*asked)


async def _end_cleanly(workspace: Workspace, start: Callable[[], Any], child: Child) -> None:
    """End the last proxy in good order, and let another one settle what the killed ones held."""
    child.send("end")
    await asyncio.to_thread(child.receive)
    await asyncio.sleep(LEASE_OVER_SECONDS)
    last, _ = await start()
    async with asyncio.timeout(LONGEST_RECOVERY_SECONDS):
        while (await asyncio.to_thread(read_store, workspace.url)).holds:  # noqa: ASYNC110 Another process settles them.
            await asyncio.sleep(0.1)
    last.tell("end")
    await asyncio.to_thread(last.hear)


def _compare(cases: Sequence[ProxyCase], billed: Mapping[str, int], contents: StoreContents) -> Iterator[str]:
    spent: dict[str, int] = {}
    for (scope, window, unit), sums in contents.budgets.items():
        if scope.startswith("agent:") and unit == "usd" and window.startswith("day"):
            spent[scope.removeprefix("agent:")] = sums.spent
    cap = int(DRILL_CAP * DOLLAR)
    names = {case.agent: str(case) for case in cases} | {"shared": f"{TOGETHER} requests at once"}
    exact = {case.agent for case in cases if case.act in _EXACT}
    for agent, name in names.items():
        recorded = spent.get(agent, 0)
        if recorded < billed[agent]:
            yield f"{name}: {format_micros(billed[agent])} was billed, and {format_micros(recorded)} is recorded."
        if recorded > cap:
            yield f"{name}: {format_micros(recorded)} is recorded, and the cap is {format_micros(cap)}."
        if agent in exact and recorded > billed[agent]:
            yield f"{name}: {format_micros(recorded)} is recorded, though {format_micros(billed[agent])} was billed."
        if not billed[agent]:
            yield f"{name}: nothing was billed, so nothing is proved."


DRILL: Final = Drill(
    "proxy",
    "What passes through the proxy stays below its caps, and is recorded at no less than what is billed.",
    run,
    lacking=find_missing,
)

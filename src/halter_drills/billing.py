"""What is recorded is never less than what a provider bills, and nothing where it bills nothing.

A provider in a process of its own answers over real sockets, in full or cut off at every point, and keeps a ledger. The
real doors ask it over the real wires. Then the ledger is compared with what plain SQL finds in the store.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, get_args

import msgspec

from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, ModelError, needs
from halter.core.here import on_this_machine
from halter.core.ids import WorkerId
from halter.core.messages import Prompt, Reply, StreamChunk, user
from halter.core.mind import WireFormat
from halter.core.money import DOLLAR, shown
from halter.core.ports import Lease
from halter.core.usage import FREE, ModelName, Price, Rates, Unpriced
from halter.guard.ask import Standing
from halter.guard.gatehouse import Gatehouse
from halter.guard.request import TIMEOUT, Request
from halter.models.prices import Prices, stated
from halter.models.providers import is_installed
from halter.models.wire import Wire
from halter.models.wire_exchange import Exchange
from halter_drills.agents import NO_SECRETS, begun, policy_of, standing_of
from halter_drills.biller import PRICE, Act, Case, Reports, biller, events
from halter_drills.checker import Found, check, found_at
from halter_drills.children import children
from halter_drills.drill import Drill, Ground, Result, Setting, own_store, result
from halter_drills.examine import in_memory

WIRES: Final[tuple[WireFormat, ...]] = get_args(WireFormat)
STATUSES: Final = (307, 400, 401, 429, 500, 503, 529)
LISTED: Final[Mapping[str, tuple[WireFormat, tuple[str, str]]]] = {
    "openai:gpt-4.1": ("openai", ("gpt-4.1", "openai")),
    "gateway:openai/gpt-4.1": ("openai", ("gpt-4.1", "openai")),
    "gateway:gpt-4.1-2025-04-14": ("openai", ("gpt-4.1", "openai")),
    "gateway:anthropic/claude-opus-4-8": ("openai", ("claude-opus-4-8", "anthropic")),
    "ollama:gpt-4.1": ("openai", ("gpt-4.1", "openai")),
    "anthropic:claude-opus-4-8": ("anthropic", ("claude-opus-4-8", "anthropic")),
    "google:gemini-2.5-pro": ("google", ("gemini-2.5-pro", "google")),
}
"""Models that are asked at an address of this machine with no price declared: by which wire, and whose price counts."""
UNKNOWN: Final = ("gateway:nobody-knows", "openai:nobody-knows", "ollama:nobody-knows:cloud")
MOST: Final = 1000
PATIENCE: Final = 300_000
"""For so many microseconds a provider that hangs is waited for."""
TOGETHER: Final = 8
SYSTEM: Final = "Be brief. " * 500
"""Long enough to have as many tokens as the provider reports."""

_PATHS: Final[Mapping[WireFormat, str]] = {"openai": "/v1", "anthropic": "", "google": ""}


class ByAddress(Prices):
    """A price table that takes whatever is reached on this machine for free."""

    def find(self, model: ModelName, base_url: str | None = None) -> Rates | Unpriced:
        """Look at the address first, unless the price is declared."""
        declared = model.provider == "paid"
        return stated(FREE) if on_this_machine(base_url) and not declared else super().find(model, base_url)


class Trusting(Wire):
    """A wire that takes any report for the final one."""

    def _failed(self, seen: Exchange, error: Exception, *, begun: bool) -> ModelError:
        made = super()._failed(seen, error, begun=begun)
        made.final = True
        return made

    def _finished(self, response: Any, seen: Exchange, *, streamed: bool) -> Reply:
        try:
            return super()._finished(response, seen, streamed=streamed)
        except ModelError as error:
            error.final = True
            raise


def planned(rounds: int = 1) -> list[Case]:
    """Plan every way in which a provider answers, as many times as is wanted."""
    numbers = count()
    return [
        msgspec.structs.replace(case, number=next(numbers), model=case.model or f"paid:{case.wire}")
        for _ in range(rounds)
        for case in _cases()
    ]


def _cases() -> Iterator[Case]:
    for wire in WIRES:
        yield from _streams(wire)
        yield from _wholes(wire)
        yield from _refusals(wire)
    for model, (wire, sold) in LISTED.items():
        for streamed in (False, True):
            yield Case(number=0, wire=wire, act="answers", model=model, streamed=streamed, listed=sold)
    for model in UNKNOWN:
        yield Case(number=0, wire="openai", act="answers", model=model)


def _streams(wire: WireFormat) -> Iterator[Case]:
    styles: Sequence[Reports] = get_args(Reports) if wire == "openai" else ("last",)
    cutting: Sequence[Act] = ("cuts", "closes")
    for reports in styles:
        yield Case(number=0, wire=wire, act="answers", streamed=True, reports=reports)
        for after in range(len(events(wire, reports))):
            for act in cutting:
                yield Case(number=0, wire=wire, act=act, streamed=True, reports=reports, after=after)
        yield Case(number=0, wire=wire, act="hangs", streamed=True, reports=reports, after=2)


def _wholes(wire: WireFormat) -> Iterator[Case]:
    yield Case(number=0, wire=wire, act="answers")
    yield from (Case(number=0, wire=wire, act="shortens", after=tenths) for tenths in (0, 1, 5, 9))
    yield Case(number=0, wire=wire, act="hangs")


def _refusals(wire: WireFormat) -> Iterator[Case]:
    for streamed in (False, True):
        yield Case(number=0, wire=wire, act="resets", streamed=streamed)
        for status in STATUSES:
            yield Case(number=0, wire=wire, act="refuses", status=status, streamed=streamed)
        yield Case(number=0, wire=wire, act="refuses", status=400, reported=True, streamed=streamed)
        yield Case(number=0, wire=wire, act="unreached", streamed=streamed)


def run(setting: Setting) -> Result:
    """Ask for everything, as many rounds as are wanted."""
    if lacking():
        raise ConfigError(lacking())
    return run_cases(setting, planned(setting.seeds or 1))


def run_cases(setting: Setting, cases: Sequence[Case]) -> Result:
    """Ask for each case, and compare the two books."""
    with own_store(in_memory(setting)) as ground, children(__name__) as started:
        setting.progress(0, len(cases), "a provider begins to serve")
        providing = started.start(biller, cases)
        port: int = providing.hear()
        asyncio.run(_ask(ground, cases, port, teeth=setting.teeth))
        providing.tell("the ledger")
        ledger: dict[int, int] = providing.hear()
        found = found_at(ground.url)
        setting.progress(len(cases), len(cases), "checked")
    violations = [*check(found), *compared(cases, ledger, found)]
    counts = {"requests": len(cases), "billed_usd_micros": sum(ledger.values()), "asked": len(ledger)}
    return result(DRILL.name, ground.kind, len(cases), violations, counts)


async def _ask(ground: Ground, cases: Sequence[Case], port: int, *, teeth: bool) -> None:
    """Ask for each case through the real doors."""
    store, clock = ground.open(), SystemClock()
    plain, cached, written = PRICE
    own = {"paid": Price(plain, written, cache_read=cached)}
    prices = ByAddress(own) if teeth else Prices(own)
    doors = Gatehouse(store, clock, redact=str, secrets=NO_SECRETS, prices=prices)
    policy = policy_of(cap=1000 * DOLLAR)
    try:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            desk = _Desk(doors, port, nobody.getsockname()[1], teeth=teeth)
            lease, standing = await begun(store, WorkerId("billing"), "s", policy), standing_of("s", policy)
            try:
                await desk.ask_all(lease, standing, cases)
            finally:
                await desk.close()
    finally:
        await store.close()


class _Desk:
    """The doors, and a model for each name: all of one name share their connections."""

    def __init__(self, doors: Gatehouse, port: int, nobody: int, *, teeth: bool) -> None:
        self._doors = doors
        self._ports = {"unreached": nobody}
        self._port = port
        self._sort = Trusting if teeth else Wire
        self._made: dict[tuple[str, int], Wire] = {}

    def model(self, case: Case) -> Wire:
        """Reach a model at an address of this machine."""
        port = self._ports.get(case.act, self._port)
        known = self._made.get((case.model, port))
        if known is None:
            url = f"http://127.0.0.1:{port}{_PATHS[case.wire]}"
            known = self._sort(ModelName.parse(case.model), case.wire, url, "made-up", base_url=url)
            self._made[case.model, port] = known
        return known

    async def ask_all(self, lease: Lease, standing: Standing, cases: Sequence[Case]) -> None:
        """Ask for each case, some of them side by side."""
        limit = asyncio.Semaphore(TOGETHER)

        async def ask(case: Case) -> None:
            async with limit:
                await self._doors.request(lease, standing, _request(case), self.model(case))

        async with asyncio.TaskGroup() as asking:
            for case in cases:
                asking.create_task(ask(case))

    async def close(self) -> None:
        """Let go of all connections."""
        for model in self._made.values():
            await model.aclose()


def _request(case: Case) -> Request:
    prompt = Prompt(system=SYSTEM, messages=(user(f"Case {case.number}."),), max_output_tokens=MOST)
    timeout = PATIENCE if case.act == "hangs" else TIMEOUT
    return Request(id=_id(case), prompt=prompt, timeout=timeout, listen=_unheard if case.streamed else None)


def _unheard(_: StreamChunk) -> None:
    """Listen to what is streamed, for nobody."""


def _id(case: Case) -> str:
    return f"s.{case.number}"


def compared(cases: Sequence[Case], ledger: Mapping[int, int], found: Found) -> list[str]:
    """Compare the provider's ledger with the store, case by case."""
    settled = {event.facts["request"] for event in found.events if event.kind == "request_settled"}
    wrong: list[str] = []
    for case in cases:
        billed, request = ledger.get(case.number, 0), f"{_id(case)}/0"
        recorded = found.spends.get(request, 0)
        if case.model in UNKNOWN:
            wrong += [f"{case}: it was asked, though nobody knows its price."] if case.number in ledger else []
        elif request not in settled:
            wrong.append(f"{case}: it has no outcome.")
        elif recorded < billed:
            wrong.append(f"{case}: {shown(billed)} was billed, and {shown(recorded)} is recorded.")
        elif recorded > billed and (case.act == "answers" or not billed):
            wrong.append(f"{case}: only {shown(billed)} was billed, and {shown(recorded)} is recorded.")
    return wrong


def lacking() -> str:
    """Say what this drill needs that is not installed."""
    return "" if is_installed("pydantic_ai") and is_installed("openai") else needs("models", "The drill billing")


DRILL: Final = Drill(
    "billing",
    "What is recorded is never less than what a provider bills, wherever an answer is cut and whatever passes it on.",
    run,
    stores=("sqlite",),
    lacking=lacking,
)

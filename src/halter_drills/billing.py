"""The recorded cost is never less than what a provider bills, and nothing where it bills nothing.

A provider in another process answers over real sockets, in full or cut off at every point, and keeps a ledger. The real
model door asks it over the real wires. Then the ledger is compared with what plain SQL finds in the store.
"""

import asyncio
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import count
from typing import Any, Final, Literal, get_args

import msgspec

from halter.core.agent_spec import WireFormat
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, ModelError, explain_extra
from halter.core.ids import WorkerId
from halter.core.messages import Prompt, Reply, make_user_message
from halter.core.money import DOLLAR, format_micros
from halter.core.usage import FREE_PRICE, ModelName, ModelPrices, Price, Unpriced, is_local_address
from halter.guard.guard import GuardRuntime
from halter.guard.model_door import MODEL_REQUEST_TIMEOUT, ModelRequest
from halter.models.providers import Prices, compile_stated_price, is_installed
from halter.models.wire import Exchange, WireModel
from halter_drills.checker import StoreContents, check, read_store
from halter_drills.children import Pipe, children
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, unseen, use_memory_file
from halter_drills.workload import NO_SECRETS, begin_session, policy_of, standing_of

Act = Literal["answers", "cuts", "closes", "shortens", "resets", "hangs", "refuses", "unreached"]
"""Answer in full; break off a stream, end it early, or truncate a whole answer; reset the connection; stall; answer
with an error status; or do not listen."""
Reports = Literal["last", "early", "each"]
"""Where in a stream usage is reported: at the end, also at the beginning, or in every event."""

INPUT: Final = 1000
CACHED: Final = 400
OUTPUT: Final = 900
REFUSED_OUTPUT: Final = 50
SAID: Final = ("It ", "is ", "seven.")

PRICE: Final = (Decimal(2), Decimal("0.5"), Decimal(10))
"""The price of input, cached input and output, in dollars per million tokens."""

_CASE: Final = re.compile(rb"Case (\d+)\.")
_STREAM: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class BillingCase(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and how the provider treats it. `listed` names a model and its seller whose list price applies."""

    number: int
    wire: WireFormat
    act: Act
    model: str = ""
    streamed: bool = False
    reports: Reports = "last"
    after: int = 0
    status: int = 0
    reported: bool = False
    listed: tuple[str, str] | None = None

    def __str__(self) -> str:
        how = "streamed" if self.streamed else "whole"
        what = f"{self.act} after {self.after}" if self.act in ("cuts", "closes", "shortens", "hangs") else self.act
        which = f" {self.status}" if self.status else ""
        return f"{self.model} over {self.wire}, {how}, reports {self.reports}: the provider {what}{which}"


def bill(case: BillingCase) -> int:
    """Compute the bill of a request, in micro-dollars, rounded up."""
    if case.act == "refuses" and not case.reported:
        return 0
    output = REFUSED_OUTPUT if case.act == "refuses" else OUTPUT
    if case.listed is None:
        plain, cached, written = PRICE
        return int(-(-((INPUT - CACHED) * plain + CACHED * cached + output * written) // 1))
    from genai_prices import Usage, calc_price

    model, seller = case.listed
    used = Usage(input_tokens=INPUT, cache_read_tokens=CACHED, output_tokens=output)
    return int(-(-calc_price(used, model, provider_id=seller).total_price * 1_000_000 // 1))


async def biller(pipe: Pipe, cases: Sequence[BillingCase]) -> None:
    """Serve until the drill asks for the ledger."""
    provider = BillingProvider({case.number: case for case in cases})
    async with await asyncio.start_server(provider.serve, "127.0.0.1", 0) as server:
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)
        pipe.send(provider.ledger)


class BillingProvider:
    """Answers each request as its case says, and records its bill before it sends a byte."""

    def __init__(self, cases: Mapping[int, BillingCase]) -> None:
        self.ledger: dict[int, int] = {}
        self._cases = cases

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        found = _CASE.search(body)
        if found is None:
            return False
        case = self._cases[int(found[1])]
        self.ledger[case.number] = self.ledger.get(case.number, 0) + bill(case)
        return await _answer(case, reader, writer)


async def _answer(case: BillingCase, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Do as the case says; return whether the connection can be used again."""
    if case.act == "resets":
        return False
    writer.write(_render_answer(case))
    await writer.drain()
    if case.act == "hangs":
        await reader.read()
    elif case.act in ("cuts", "shortens"):
        writer.close()
        await writer.wait_closed()
    return case.act not in ("hangs", "cuts", "shortens")


def _render_answer(case: BillingCase) -> bytes:
    """What the provider sends before it stops."""
    if case.act == "refuses":
        return _render_response(case.status, _refusal(case))
    if case.streamed:
        sent = events(case.wire, case.reports)[: None if case.act == "answers" else case.after]
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in sent]
        return b"".join([_STREAM, *chunks, b"" if case.act in ("hangs", "cuts") else b"0\r\n\r\n"])
    whole = _render_response(200, _WHOLE[case.wire]())
    sent_bytes = {"hangs": 0, "shortens": len(whole) * case.after // 10}.get(case.act, len(whole))
    return whole[:sent_bytes]


def _render_response(status: int, body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(text)) + text


def _refusal(case: BillingCase) -> dict[str, Any]:
    body = {"type": "error", "error": {"message": "No luck.", "type": "some_error", "code": case.status}}
    return {**body, **_REPORT[case.wire](REFUSED_OUTPUT)} if case.reported else body


def events(wire: WireFormat, reports: Reports) -> list[bytes]:
    return [_sse(event) for event in _EVENTS[wire](reports)]


def _sse(event: Mapping[str, Any] | str) -> bytes:
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


def _chat_report(output: int) -> dict[str, Any]:
    details = {
        "prompt_tokens_details": {"cached_tokens": CACHED},
        "completion_tokens_details": {"reasoning_tokens": max(output - len(SAID), 0)},
    }
    counted = {"prompt_tokens": INPUT, "completion_tokens": output, "total_tokens": INPUT + output}
    return {"usage": {**counted, **details}}


def _chat(**more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **more}


def _chat_events(reports: Reports) -> Iterator[Mapping[str, Any] | str]:
    for number, word in enumerate(("", *SAID)):
        early = reports == "each" or (reports == "early" and not number)
        delta = {"role": "assistant", "content": word}
        yield _chat(choices=[{"index": 0, "delta": delta}], **(_chat_report(number) if early else {}))
    yield _chat(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    yield _chat(choices=[], **_chat_report(OUTPUT))
    yield "[DONE]"


def _chat_whole() -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(SAID)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**_chat(choices=[choice], **_chat_report(OUTPUT)), "object": "chat.completion"}


def _message_report(output: int) -> dict[str, Any]:
    counted = {"input_tokens": INPUT - CACHED, "output_tokens": output}
    return {"usage": {**counted, "cache_read_input_tokens": CACHED, "cache_creation_input_tokens": 0}}


def _message_whole() -> dict[str, Any]:
    content = [{"type": "text", "text": "".join(SAID)}]
    head = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return {**head, "content": content, "stop_reason": "end_turn", **_message_report(OUTPUT)}


def _message_events(_: Reports) -> Iterator[Mapping[str, Any]]:
    opening: dict[str, Any] = {**_message_whole(), "content": [], "stop_reason": None, **_message_report(1)}
    yield {"type": "message_start", "message": opening}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for word in SAID:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
    yield {"type": "content_block_stop", "index": 0}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": OUTPUT}}
    yield {"type": "message_stop"}


def _make_generated_report(output: int) -> dict[str, Any]:
    said = min(output, len(SAID))
    counted = {"promptTokenCount": INPUT, "cachedContentTokenCount": CACHED, "totalTokenCount": INPUT + output}
    return {"usageMetadata": {**counted, "candidatesTokenCount": said, "thoughtsTokenCount": output - said}}


def _make_generated(word: str, output: int, finish: str | None = None) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": [{"text": word}]}, "index": 0}
    ended = {**candidate, "finishReason": finish} if finish else candidate
    return {"candidates": [ended], "modelVersion": "m", "responseId": "r", **_make_generated_report(output)}


def _make_generated_events(_: Reports) -> Iterator[Mapping[str, Any]]:
    for number, word in enumerate(SAID, start=1):
        yield _make_generated(word, number)
    yield _make_generated("", OUTPUT, "STOP")


_EVENTS: Final = {"openai": _chat_events, "anthropic": _message_events, "google": _make_generated_events}
_WHOLE: Final = {
    "openai": _chat_whole,
    "anthropic": _message_whole,
    "google": lambda: _make_generated("".join(SAID), OUTPUT, "STOP"),
}
_REPORT: Final = {"openai": _chat_report, "anthropic": _message_report, "google": _make_generated_report}


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
"""Models asked at an address of this machine with no price declared: their wire, and whose list price applies."""
UNKNOWN: Final = ("gateway:not-listed", "openai:not-listed", "ollama:not-listed:cloud")
MOST: Final = 1000
PATIENCE: Final = 300_000
"""Microseconds after which a stalled provider is given up."""
TOGETHER: Final = 8
SYSTEM: Final = "Be brief. " * 500
"""Long enough for as many tokens as the provider reports."""

_PATHS: Final[Mapping[WireFormat, str]] = {"openai": "/v1", "anthropic": "", "google": ""}


class ByAddress(Prices):
    """The teeth: a price table that takes every model on this machine for free."""

    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        if is_local_address(base_url) and model.provider != "paid":
            return compile_stated_price(FREE_PRICE)
        return super().find(model, base_url)


class TrustingWire(WireModel):
    """The teeth: a wire that takes any usage report for the final one."""

    def _make_error(self, seen: Exchange, error: Exception, *, begun: bool) -> ModelError:
        made = super()._make_error(seen, error, begun=begun)
        made.final = True
        return made

    def _finish(self, response: Any, seen: Exchange, prompt: Prompt, *, streamed: bool) -> Reply:
        try:
            return super()._finish(response, seen, prompt, streamed=streamed)
        except ModelError as error:
            error.final = True
            raise


def plan_cases(rounds: int = 1) -> list[BillingCase]:
    """Plan every way in which a provider answers, `rounds` times."""
    numbers = count()
    return [
        msgspec.structs.replace(case, number=next(numbers), model=case.model or f"paid:{case.wire}")
        for _ in range(rounds)
        for case in _cases()
    ]


def _cases() -> Iterator[BillingCase]:
    for wire in WIRES:
        yield from _streams(wire)
        yield from _wholes(wire)
        yield from _refusals(wire)
    for model, (wire, sold) in LISTED.items():
        for streamed in (False, True):
            yield BillingCase(number=0, wire=wire, act="answers", model=model, streamed=streamed, listed=sold)
    for model in UNKNOWN:
        yield BillingCase(number=0, wire="openai", act="answers", model=model)


def _streams(wire: WireFormat) -> Iterator[BillingCase]:
    styles: Sequence[Reports] = get_args(Reports) if wire == "openai" else ("last",)
    cutting: Sequence[Act] = ("cuts", "closes")
    for reports in styles:
        yield BillingCase(number=0, wire=wire, act="answers", streamed=True, reports=reports)
        for after in range(len(events(wire, reports))):
            for act in cutting:
                yield BillingCase(number=0, wire=wire, act=act, streamed=True, reports=reports, after=after)
        yield BillingCase(number=0, wire=wire, act="hangs", streamed=True, reports=reports, after=2)


def _wholes(wire: WireFormat) -> Iterator[BillingCase]:
    yield BillingCase(number=0, wire=wire, act="answers")
    yield from (BillingCase(number=0, wire=wire, act="shortens", after=tenths) for tenths in (0, 1, 5, 9))
    yield BillingCase(number=0, wire=wire, act="hangs")


def _refusals(wire: WireFormat) -> Iterator[BillingCase]:
    for streamed in (False, True):
        yield BillingCase(number=0, wire=wire, act="resets", streamed=streamed)
        for status in STATUSES:
            yield BillingCase(number=0, wire=wire, act="refuses", status=status, streamed=streamed)
        yield BillingCase(number=0, wire=wire, act="refuses", status=400, reported=True, streamed=streamed)
        yield BillingCase(number=0, wire=wire, act="unreached", streamed=streamed)


def run(setting: Setting) -> DrillResult:
    if lacking():
        raise ConfigError(lacking())
    return run_cases(setting, plan_cases(setting.seeds or 1))


def run_cases(setting: Setting, cases: Sequence[BillingCase]) -> DrillResult:
    with own_store(use_memory_file(setting)) as workspace, children(__name__) as started:
        setting.progress(0, len(cases), "a provider begins to serve")
        providing = started.start(biller, cases)
        port: int = providing.receive()
        asyncio.run(_ask(workspace, cases, port, teeth=setting.teeth))
        providing.send("the ledger")
        ledger: dict[int, int] = providing.receive()
        contents = read_store(workspace.url)
        setting.progress(len(cases), len(cases), "checked")
    violations = [*check(contents), *compare(cases, ledger, contents)]
    counts = {"requests": len(cases), "billed_usd_micros": sum(ledger.values()), "asked": len(ledger)}
    return result(DRILL.name, workspace.kind, len(cases), violations, counts)


async def _ask(workspace: Workspace, cases: Sequence[BillingCase], port: int, *, teeth: bool) -> None:
    plain, cached, written = PRICE
    own = {"paid": Price(plain, written, cache_read=cached)}
    prices = ByAddress(own) if teeth else Prices(own)
    policy = policy_of(cap=1000 * DOLLAR)
    wire = TrustingWire if teeth else WireModel
    made: dict[tuple[str, int], WireModel] = {}
    limit = asyncio.Semaphore(TOGETHER)

    async def ask(case: BillingCase, at: int) -> None:
        """Ask by the one model of this name and port, so that its connections are shared."""
        if (case.model, at) not in made:
            url = f"http://127.0.0.1:{at}{_PATHS[case.wire]}"
            made[case.model, at] = wire(ModelName.parse(case.model), case.wire, url, "made-up", base_url=url)
        async with limit:
            await doors.request(lease, context, _request(case), made[case.model, at])

    async with workspace.open_store() as store:
        doors = GuardRuntime(store, SystemClock(), redact=str, secrets=NO_SECRETS, prices=prices)
        lease, context = await begin_session(store, WorkerId("billing"), "s", policy), standing_of("s", policy)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            try:
                async with asyncio.TaskGroup() as asking:
                    for case in cases:
                        asking.create_task(ask(case, unused.getsockname()[1] if case.act == "unreached" else port))
            finally:
                for model in made.values():
                    await model.aclose()


def _request(case: BillingCase) -> ModelRequest:
    prompt = Prompt(system=SYSTEM, messages=(make_user_message(f"Case {case.number}."),), max_output_tokens=MOST)
    timeout = PATIENCE if case.act == "hangs" else MODEL_REQUEST_TIMEOUT
    listen = unseen if case.streamed else None
    return ModelRequest(id=f"s.{case.number}", prompt=prompt, timeout=timeout, listen=listen)


def compare(cases: Sequence[BillingCase], ledger: Mapping[int, int], contents: StoreContents) -> list[str]:
    settled = {event.facts["request"] for event in contents.events if event.kind == "request_settled"}
    wrong: list[str] = []
    for case in cases:
        billed, request = ledger.get(case.number, 0), f"s.{case.number}/0"
        recorded = contents.spends.get(request, 0)
        # Given up before a busy provider had read it, which no client can know.
        unread = case.act == "hangs" and case.number not in ledger
        if case.model in UNKNOWN:
            wrong += [f"{case}: it was asked, though its price is unknown."] if case.number in ledger else []
        elif request not in settled:
            wrong.append(f"{case}: it has no outcome.")
        elif recorded < billed:
            wrong.append(f"{case}: {format_micros(billed)} was billed, and {format_micros(recorded)} is recorded.")
        elif recorded > billed and not unread and (case.act == "answers" or not billed):
            wrong.append(f"{case}: only {format_micros(billed)} was billed, and {format_micros(recorded)} is recorded.")
    return wrong


def lacking() -> str:
    return (
        "" if is_installed("pydantic_ai") and is_installed("openai") else explain_extra("models", "The drill billing")
    )


DRILL: Final = Drill(
    "billing",
    "The recorded cost is never less than what a provider bills, wherever an answer is cut off.",
    run,
    stores=("sqlite",),
    lacking=lacking,
)

"""The recorded cost is never less than the provider's bill, and zero where the provider bills nothing.

A provider in another process answers over real sockets, in full or cut off at every point, and keeps a ledger. The real
model door sends requests to it over the real wires. Then the drill compares the ledger with the store, by plain SQL.
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

from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, ModelError, explain_extra
from halter.core.ids import WorkerId
from halter.core.messages import Prompt, Reply, make_user_message
from halter.core.money import DOLLAR, format_exact_micros
from halter.core.usage import FREE_PRICE, ModelName, ModelPrices, Price, Unpriced, is_local_address
from halter.guard.guard import GuardRuntime
from halter.guard.request import MODEL_REQUEST_TIMEOUT, ModelRequest
from halter.models.exchange import Exchange
from halter.models.prices import Prices
from halter.models.providers import is_installed
from halter.models.tariffs import compile_stated_price
from halter.models.wire import WireModel
from halter.spec.models import WireFormat
from halter_drills.checker import StoreContents, check, read_store
from halter_drills.children import Pipe, children
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, unseen, use_memory_file
from halter_drills.workload import NO_SECRETS, begin_session, make_session_context, policy_of

Act = Literal["answers", "cuts", "closes", "shortens", "resets", "hangs", "refuses", "unreached"]
"""Answer in full; break off a stream, end it early, or truncate a whole answer; reset the connection; stall; answer
with an error status; or do not listen."""
Reports = Literal["last", "early", "each"]
"""Where a stream reports usage: at the end, also at the beginning, or in every event."""

INPUT: Final = 1000
CACHED: Final = 400
OUTPUT: Final = 900
REFUSED_OUTPUT: Final = 50
ANSWER_PARTS: Final = ("It ", "is ", "seven.")

PRICE: Final = (Decimal(2), Decimal("0.5"), Decimal(10))
"""The price of input, cached input and output, in dollars per million tokens."""

_CASE: Final = re.compile(rb"Case (\d+)\.")
_STREAM: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class BillingCase(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and the provider's reaction. `listed` names the model and seller whose list price applies."""

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
        mode = "streamed" if self.streamed else "whole"
        act = f"{self.act} after {self.after}" if self.act in ("cuts", "closes", "shortens", "hangs") else self.act
        status = f" {self.status}" if self.status else ""
        return f"{self.model} over {self.wire}, {mode}, reports {self.reports}: the provider {act}{status}"


def bill(case: BillingCase) -> int:
    """Compute the bill of a request, in micro-dollars, rounded up."""
    if case.act == "refuses" and not case.reported:
        return 0
    output = REFUSED_OUTPUT if case.act == "refuses" else OUTPUT
    if case.listed is None:
        input_price, cached_price, output_price = PRICE
        return int(-(-((INPUT - CACHED) * input_price + CACHED * cached_price + output * output_price) // 1))
    from genai_prices import Usage, calc_price

    model, seller = case.listed
    usage = Usage(input_tokens=INPUT, cache_read_tokens=CACHED, output_tokens=output)
    return int(-(-calc_price(usage, model, provider_id=seller).total_price * 1_000_000 // 1))


async def biller(pipe: Pipe, cases: Sequence[BillingCase]) -> None:
    """Run the provider until the drill fetches the ledger."""
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
        match = _CASE.search(body)
        if match is None:
            return False
        case = self._cases[int(match[1])]
        self.ledger[case.number] = self.ledger.get(case.number, 0) + bill(case)
        return await _answer(case, reader, writer)


async def _answer(case: BillingCase, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer as the case requires; return True if the connection can be reused."""
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
    """Render the bytes that the provider sends before it stops."""
    if case.act == "refuses":
        return _render_response(case.status, _refusal(case))
    if case.streamed:
        sent_events = events(case.wire, case.reports)[: None if case.act == "answers" else case.after]
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in sent_events]
        return b"".join([_STREAM, *chunks, b"" if case.act in ("hangs", "cuts") else b"0\r\n\r\n"])
    whole = _render_response(200, _WHOLE[case.wire]())
    length = {"hangs": 0, "shortens": len(whole) * case.after // 10}.get(case.act, len(whole))
    return whole[:length]


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
        "completion_tokens_details": {"reasoning_tokens": max(output - len(ANSWER_PARTS), 0)},
    }
    counts = {"prompt_tokens": INPUT, "completion_tokens": output, "total_tokens": INPUT + output}
    return {"usage": {**counts, **details}}


def _chat(**more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **more}


def _chat_events(reports: Reports) -> Iterator[Mapping[str, Any] | str]:
    for number, word in enumerate(("", *ANSWER_PARTS)):
        early = reports == "each" or (reports == "early" and not number)
        delta = {"role": "assistant", "content": word}
        yield _chat(choices=[{"index": 0, "delta": delta}], **(_chat_report(number) if early else {}))
    yield _chat(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    yield _chat(choices=[], **_chat_report(OUTPUT))
    yield "[DONE]"


def _chat_whole() -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(ANSWER_PARTS)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {**_chat(choices=[choice], **_chat_report(OUTPUT)), "object": "chat.completion"}


def _message_report(output: int) -> dict[str, Any]:
    counts = {"input_tokens": INPUT - CACHED, "output_tokens": output}
    return {"usage": {**counts, "cache_read_input_tokens": CACHED, "cache_creation_input_tokens": 0}}


def _message_whole() -> dict[str, Any]:
    content = [{"type": "text", "text": "".join(ANSWER_PARTS)}]
    head = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return {**head, "content": content, "stop_reason": "end_turn", **_message_report(OUTPUT)}


def _message_events(_: Reports) -> Iterator[Mapping[str, Any]]:
    opening: dict[str, Any] = {**_message_whole(), "content": [], "stop_reason": None, **_message_report(1)}
    yield {"type": "message_start", "message": opening}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for word in ANSWER_PARTS:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
    yield {"type": "content_block_stop", "index": 0}
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": OUTPUT}}
    yield {"type": "message_stop"}


def _response_report(output: int) -> dict[str, Any]:
    details = {
        "input_tokens_details": {"cached_tokens": CACHED},
        "output_tokens_details": {"reasoning_tokens": max(output - len(ANSWER_PARTS), 0)},
    }
    counts = {"input_tokens": INPUT, "output_tokens": output, "total_tokens": INPUT + output}
    return {"usage": {**counts, **details}}


def _response_whole(status: str = "completed") -> dict[str, Any]:
    content: list[Any] = [{"type": "output_text", "text": "".join(ANSWER_PARTS), "annotations": list[Any]()}]
    message = {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content}
    head: dict[str, Any] = {
        "id": "resp",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": status,
        "output": [message],
    }
    return {**head, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, **_response_report(OUTPUT)}


def _response_events(_: Reports) -> Iterator[Mapping[str, Any]]:
    opening: dict[str, Any] = {**_response_whole("in_progress"), "output": [], "usage": None}
    item, place = _response_whole()["output"][0], {"item_id": "msg", "output_index": 0, "content_index": 0}
    yield {"type": "response.created", "sequence_number": 0, "response": opening}
    yield {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": item}
    for number, word in enumerate(ANSWER_PARTS, start=2):
        yield {"type": "response.output_text.delta", "sequence_number": number, **place, "delta": word}
    yield {"type": "response.output_item.done", "sequence_number": 5, "output_index": 0, "item": item}
    yield {"type": "response.completed", "sequence_number": 6, "response": _response_whole()}


def _make_generated_report(output: int) -> dict[str, Any]:
    text_tokens = min(output, len(ANSWER_PARTS))
    counts = {"promptTokenCount": INPUT, "cachedContentTokenCount": CACHED, "totalTokenCount": INPUT + output}
    return {
        "usageMetadata": {**counts, "candidatesTokenCount": text_tokens, "thoughtsTokenCount": output - text_tokens}
    }


def _make_generated(word: str, output: int, finish: str | None = None) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": [{"text": word}]}, "index": 0}
    entry = {**candidate, "finishReason": finish} if finish else candidate
    return {"candidates": [entry], "modelVersion": "m", "responseId": "r", **_make_generated_report(output)}


def _make_generated_events(_: Reports) -> Iterator[Mapping[str, Any]]:
    for number, word in enumerate(ANSWER_PARTS, start=1):
        yield _make_generated(word, number)
    yield _make_generated("", OUTPUT, "STOP")


_EVENTS: Final = {
    "openai": _chat_events,
    "responses": _response_events,
    "anthropic": _message_events,
    "google": _make_generated_events,
}
_WHOLE: Final = {
    "openai": _chat_whole,
    "responses": _response_whole,
    "anthropic": _message_whole,
    "google": lambda: _make_generated("".join(ANSWER_PARTS), OUTPUT, "STOP"),
}
_REPORT: Final = {
    "openai": _chat_report,
    "responses": _response_report,
    "anthropic": _message_report,
    "google": _make_generated_report,
}


WIRES: Final[tuple[WireFormat, ...]] = get_args(WireFormat)
STATUSES: Final = (307, 400, 401, 429, 500, 503, 529)
LISTED: Final[Mapping[str, tuple[WireFormat, tuple[str, str]]]] = {
    "openai:gpt-4.1": ("openai", ("gpt-4.1", "openai")),
    "openai:gpt-4.1-mini": ("responses", ("gpt-4.1-mini", "openai")),
    "gateway:openai/gpt-4.1": ("openai", ("gpt-4.1", "openai")),
    "gateway:gpt-4.1-2025-04-14": ("openai", ("gpt-4.1", "openai")),
    "gateway:anthropic/claude-opus-4-8": ("openai", ("claude-opus-4-8", "anthropic")),
    "ollama:gpt-4.1": ("openai", ("gpt-4.1", "openai")),
    "anthropic:claude-opus-4-8": ("anthropic", ("claude-opus-4-8", "anthropic")),
    "google:gemini-2.5-pro": ("google", ("gemini-2.5-pro", "google")),
}
"""Models at a local address without a stated price: their wire, and the list price that applies."""
UNKNOWN: Final = ("gateway:not-listed", "openai:not-listed", "ollama:not-listed:cloud")
MAX_OUTPUT_TOKENS: Final = 1000
STALL_TIMEOUT: Final = 300_000
"""Microseconds after which a request to a stalled provider times out."""
CONCURRENCY: Final = 8
SYSTEM: Final = "Be brief. " * 500
"""Long enough for the number of tokens that the provider reports."""

_PATHS: Final[Mapping[WireFormat, str]] = {"openai": "/v1", "responses": "/v1", "anthropic": "", "google": ""}


class ByAddress(Prices):
    """The teeth: a price table in which every local model is free."""

    def find(self, model: ModelName, base_url: str | None = None) -> ModelPrices | Unpriced:
        if is_local_address(base_url) and model.provider != "paid":
            return compile_stated_price(FREE_PRICE)
        return super().find(model, base_url)


class TrustingWire(WireModel):
    """The teeth: a wire that treats any usage report as final."""

    def _make_error(self, exchange: Exchange, error: Exception, *, is_started: bool) -> ModelError:
        model_error = super()._make_error(exchange, error, is_started=is_started)
        model_error.final = True
        return model_error

    def _finish(self, response: Any, exchange: Exchange, prompt: Prompt, *, streamed: bool) -> Reply:
        try:
            return super()._finish(response, exchange, prompt, streamed=streamed)
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
    for model, (wire, list_price) in LISTED.items():
        for streamed in (False, True):
            yield BillingCase(number=0, wire=wire, act="answers", model=model, streamed=streamed, listed=list_price)
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
    with own_store(use_memory_file(setting)) as workspace, children(__name__) as processes:
        setting.progress(0, len(cases), "starting a provider")
        provider = processes.start(biller, cases)
        port: int = provider.receive()
        asyncio.run(_ask(workspace, cases, port, teeth=setting.teeth))
        provider.send("the ledger")
        ledger: dict[int, int] = provider.receive()
        contents = read_store(workspace.url)
        setting.progress(len(cases), len(cases), "checked")
    violations = [*check(contents), *compare(cases, ledger, contents)]
    counts = {"requests": len(cases), "billed_usd_micros": sum(ledger.values()), "asked": len(ledger)}
    return result(DRILL.name, workspace.kind, len(cases), violations, counts)


async def _ask(workspace: Workspace, cases: Sequence[BillingCase], port: int, *, teeth: bool) -> None:
    input_price, cached_price, output_price = PRICE
    stated_prices = {"paid": Price(input_price, output_price, cache_read=cached_price)}
    prices = ByAddress(stated_prices) if teeth else Prices(stated_prices)
    policy = policy_of(cap=1000 * DOLLAR)
    wire = TrustingWire if teeth else WireModel
    models: dict[tuple[str, int], WireModel] = {}
    limit = asyncio.Semaphore(CONCURRENCY)

    async def ask(case: BillingCase, target_port: int) -> None:
        """Send a request by the one model of this name and port, so that connections are shared."""
        if (case.model, target_port) not in models:
            url = f"http://127.0.0.1:{target_port}{_PATHS[case.wire]}"
            models[case.model, target_port] = wire(ModelName.parse(case.model), case.wire, url, "made-up", base_url=url)
        async with limit:
            await doors.request(lease, context, _request(case), models[case.model, target_port])

    async with workspace.open_store() as store:
        doors = GuardRuntime(store, SystemClock(), redact=str, secrets=NO_SECRETS, prices=prices)
        lease, context = await begin_session(store, WorkerId("billing"), "s", policy), make_session_context("s", policy)
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            try:
                async with asyncio.TaskGroup() as group:
                    for case in cases:
                        group.create_task(ask(case, free_socket.getsockname()[1] if case.act == "unreached" else port))
            finally:
                for model in models.values():
                    await model.aclose()


def _request(case: BillingCase) -> ModelRequest:
    prompt = Prompt(
        system=SYSTEM, messages=(make_user_message(f"Case {case.number}."),), max_output_tokens=MAX_OUTPUT_TOKENS
    )
    timeout = STALL_TIMEOUT if case.act == "hangs" else MODEL_REQUEST_TIMEOUT
    listen = unseen if case.streamed else None
    return ModelRequest(id=f"s.{case.number}", prompt=prompt, timeout=timeout, on_chunk=listen)


def compare(cases: Sequence[BillingCase], ledger: Mapping[int, int], contents: StoreContents) -> list[str]:
    settled_requests = {event.facts["request"] for event in contents.events if event.kind == "request_settled"}
    wrong: list[str] = []
    for case in cases:
        billed_micros, request = ledger.get(case.number, 0), f"s.{case.number}/0"
        recorded_micros = contents.spends.get(request, 0)
        billed, recorded = map(format_exact_micros, (billed_micros, recorded_micros))
        # Timed out before a busy provider had read it; no client can know this.
        is_unread = case.act == "hangs" and case.number not in ledger
        if case.model in UNKNOWN:
            wrong += [f"{case}: a request was sent although the price is unknown."] if case.number in ledger else []
        elif request not in settled_requests:
            wrong.append(f"{case}: no settlement.")
        elif recorded_micros < billed_micros:
            wrong.append(f"{case}: billed {billed}, recorded {recorded}.")
        elif recorded_micros > billed_micros and not is_unread and (case.act == "answers" or not billed_micros):
            wrong.append(f"{case}: billed only {billed}, recorded {recorded}.")
    return wrong


def lacking() -> str:
    return (
        "" if is_installed("pydantic_ai") and is_installed("openai") else explain_extra("models", "The drill billing")
    )


DRILL: Final = Drill(
    "billing",
    "The recorded cost is never less than the provider's bill, wherever an answer is cut off.",
    run,
    stores=("sqlite",),
    lacking=lacking,
)

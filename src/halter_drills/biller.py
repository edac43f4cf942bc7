"""A provider in a process of its own: it speaks the three wires, fails in every way, and keeps a ledger of its bills.

It bills as providers do: for an answer that it has begun to make, all of it, whoever is still there to hear it; for a
request that it refuses, nothing. Most of what it bills is reasoning, of which it sends nothing.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from halter.core.mind import WireFormat
from halter_drills.children import Pipe

Act = Literal["answers", "cuts", "closes", "shortens", "resets", "hangs", "refuses", "unreached"]
"""It answers in full; tears a stream, ends it politely, or tears a whole answer after some of it; tears the connection
without a word; says some of it and no more; answers with an error status; or is not where it is looked for."""
Reports = Literal["last", "early", "each"]
"""Where in a stream it reports what was used: at the end, at the beginning too, or with everything that it sends."""

INPUT: Final = 1000
CACHED: Final = 400
OUTPUT: Final = 900
REFUSED_OUTPUT: Final = 50
SAID: Final = ("It ", "is ", "seven.")

PRICE: Final = (Decimal(2), Decimal("0.5"), Decimal(10))
"""What it takes for input, cached input and output, in dollars per million tokens."""

_CASE: Final = re.compile(rb"Case (\d+)\.")
_STREAM: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and what becomes of it. `listed` names a model and its seller, if their list price counts."""

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


def bill(case: Case) -> int:
    """Work out what is billed for a request, in micro-dollars, rounded up."""
    if case.act == "refuses" and not case.reported:
        return 0
    output = REFUSED_OUTPUT if case.act == "refuses" else OUTPUT
    if case.listed is not None:
        return _by_the_list(*case.listed, output)
    plain, cached, written = PRICE
    return int(-(-((INPUT - CACHED) * plain + CACHED * cached + output * written) // 1))


def _by_the_list(model: str, seller: str, output: int) -> int:
    from genai_prices import Usage, calc_price

    used = Usage(input_tokens=INPUT, cache_read_tokens=CACHED, output_tokens=output)
    return int(-(-calc_price(used, model, provider_id=seller).total_price * 1_000_000 // 1))


def biller(pipe: Pipe, cases: Sequence[Case]) -> None:
    """Serve until the drill has asked for the ledger."""
    asyncio.run(_serve(pipe, cases))


async def _serve(pipe: Pipe, cases: Sequence[Case]) -> None:
    provider = Provider({case.number: case for case in cases})
    async with await asyncio.start_server(provider.serve, "127.0.0.1", 0) as server:
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)
        pipe.send(provider.ledger)


class Provider:
    """Answers each request as its case says, and writes down what it bills before it sends a byte."""

    def __init__(self, cases: Mapping[int, Case]) -> None:
        self.ledger: dict[int, int] = {}
        self._cases = cases

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, one request after the other."""
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        found = _CASE.search(body)
        if found is None:
            return False
        case = self._cases[int(found[1])]
        self.ledger[case.number] = self.ledger.get(case.number, 0) + bill(case)
        return await _answer(case, reader, writer)


async def _answer(case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Do as the case says; tell whether the connection can be used again."""
    if case.act == "refuses":
        writer.write(_plain(case.status, _refusal(case)))
    elif case.act == "resets":
        return False
    elif not case.streamed:
        return await _whole(case, reader, writer)
    else:
        return await _streamed(case, reader, writer)
    await writer.drain()
    return True


async def _whole(case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    written = _plain(200, _WHOLE[case.wire]())
    if case.act == "hangs":
        await reader.read()
        return False
    if case.act == "shortens":
        writer.write(written[: len(written) * case.after // 10])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        return False
    writer.write(written)
    await writer.drain()
    return True


async def _streamed(case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(_STREAM)
    for number, event in enumerate(events(case.wire, case.reports)):
        if case.act != "answers" and number == case.after:
            break
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
    await writer.drain()
    match case.act:
        case "hangs":
            await reader.read()
            return False
        case "cuts":
            writer.close()
            await writer.wait_closed()
            return False
        case _:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True


def _plain(status: int, body: Mapping[str, Any]) -> bytes:
    said = json.dumps(body).encode()
    return b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(said),
        said,
    )


def _refusal(case: Case) -> dict[str, Any]:
    said = {"type": "error", "error": {"message": "No luck.", "type": "some_error", "code": case.status}}
    return {**said, **_REPORT[case.wire](REFUSED_OUTPUT)} if case.reported else said


def events(wire: WireFormat, reports: Reports) -> list[bytes]:
    """List the events of a whole stream."""
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


def _generated_report(output: int) -> dict[str, Any]:
    said = min(output, len(SAID))
    counted = {"promptTokenCount": INPUT, "cachedContentTokenCount": CACHED, "totalTokenCount": INPUT + output}
    return {"usageMetadata": {**counted, "candidatesTokenCount": said, "thoughtsTokenCount": output - said}}


def _generated(word: str, output: int, finish: str | None = None) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": [{"text": word}]}, "index": 0}
    ended = {**candidate, "finishReason": finish} if finish else candidate
    return {"candidates": [ended], "modelVersion": "m", "responseId": "r", **_generated_report(output)}


def _generated_events(_: Reports) -> Iterator[Mapping[str, Any]]:
    for number, word in enumerate(SAID, start=1):
        yield _generated(word, number)
    yield _generated("", OUTPUT, "STOP")


_EVENTS: Final = {"openai": _chat_events, "anthropic": _message_events, "google": _generated_events}
_WHOLE: Final = {
    "openai": _chat_whole,
    "anthropic": _message_whole,
    "google": lambda: _generated("".join(SAID), OUTPUT, "STOP"),
}
_REPORT: Final = {"openai": _chat_report, "anthropic": _message_report, "google": _generated_report}

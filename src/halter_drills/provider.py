"""A provider on this machine that speaks Messages, Chat Completions and Responses, and keeps a bill.

It bills a request before it sends a byte of the answer, at the list price of the model, as if the client read the whole
answer. So its bill is never less than that of a real provider.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from halter.core.money import DOLLAR
from halter.core.usage import ModelName, Unpriced, Usage
from halter.models.prices import Prices

TOOL_ARGUMENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Bash": {"command": "echo seen-by-a-tool", "description": "Says something"},
    "bash": {"command": "echo seen-by-a-tool", "description": "Says something"},
    "exec_command": {"cmd": "echo seen-by-a-tool"},
    "shell": {"command": ["echo", "seen-by-a-tool"]},
    "terminal": {"command": "echo seen-by-a-tool"},
    "lookup": {"city": "Oslo"},
}
"""Tools that the provider calls once if a request offers them."""

_OK: Final = b"HTTP/1.1 200 OK\r\n"
_STREAM: Final = _OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class ListedProvider:
    """Answers every request with the same words, of `output` tokens at most.

    It pauses for `pace` seconds before each event. While `gate` is set and closed, it stops after `before_gate` events.
    With `cut_after` it drops the connection after that number of events. If a request offers one of its tools, it calls
    that tool. `answers_as` is the model that it runs whatever is asked for, and `bills_as` the one that it bills, if
    that has another name. `extra_usage` is added to its reports, and `reported_cost` is the dollars that it says to
    have charged.
    """

    def __init__(self, words: Sequence[str] = ("It ", "is ", "seven."), output: int = 40) -> None:
        self.texts = tuple(words)
        self.output = output
        self.pace = 0.0
        self.gate: asyncio.Event | None = None
        self.before_gate = 2
        self.cut_after: int | None = None
        self.status = 200
        self.extra_usage: Mapping[str, Any] = {}
        self.answers_as = ""
        self.bills_as = ""
        self.reported_cost = 0.0
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.billed = 0
        self.finished = 0
        self.reached_gate = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.port = 0
        self._prices = Prices()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncGenerator["ListedProvider"]:
        server = await asyncio.start_server(self._serve_connection, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._serve_one(reader, writer):
                pass
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split(" ")[1]
        request = json.loads(body or b"{}")
        self.paths.append(path)
        self.headers.append(headers)
        self.bodies.append(body)
        self.requests.append(request)
        if self.status != 200:  # noqa: PLR2004 HTTP OK.
            error = {"type": "error", "error": {"type": "overloaded_error", "message": "Not now.", "code": "busy"}}
            return await self._send_whole(writer, error, self.status)
        if path.partition("?")[0].endswith("count_tokens"):
            return await self._send_whole(writer, {"input_tokens": len(body) // 4})
        events, whole = self._answer(path, request, body)
        if not request.get("stream"):
            if self.gate is not None and not self.gate.is_set():
                self.reached_gate.set()
                await self.gate.wait()
            sent = await self._send_whole(writer, whole)
            self.finished += 1
            return sent
        return await self._send_stream(writer, events)

    async def _send_whole(self, writer: asyncio.StreamWriter, value: object, status: int = 200) -> bool:
        data = json.dumps(value).encode()
        start = b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(start % (status, len(data)) + data)
        await writer.drain()
        return True

    async def _send_stream(self, writer: asyncio.StreamWriter, events: Sequence[bytes]) -> bool:
        writer.write(_STREAM)
        for number, event in enumerate(events):
            if self.cut_after is not None and number >= self.cut_after:
                return False
            if self.gate is not None and number >= self.before_gate and not self.gate.is_set():
                self.reached_gate.set()
                await self.gate.wait()
            if self.pace:
                await asyncio.sleep(self.pace)
            if writer.is_closing():
                self.hung_up.set()
                return False
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.finished += 1
        return True

    def _answer(self, path: str, request: Mapping[str, Any], body: bytes) -> tuple[Sequence[bytes], object]:
        tool = _pick_tool(request, body)
        input_tokens = max(1, len(body) // 4)
        limits = (request.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
        output_tokens = min([self.output, *(limit for limit in limits if limit is not None)])
        seller = "anthropic" if "/messages" in path else "openai"
        model = self.answers_as or str(request.get("model"))
        self._bill(ModelName(seller, self.bills_as or model), input_tokens, output_tokens)
        extra = {**self.extra_usage, **({"cost": self.reported_cost} if self.reported_cost else {})}
        if "/messages" in path:
            return _messages(self.texts, tool, extra, input_tokens, output_tokens, model=model)
        if "/chat/" in path:
            reports = bool(_part(request, "stream_options").get("include_usage"))
            return _chat(self.texts, tool, input_tokens, output_tokens, extra, reports=reports, model=model)
        return _responses(self.texts, tool, input_tokens, output_tokens, extra, model=model)

    def _bill(self, model: ModelName, input_tokens: int, output_tokens: int) -> None:
        rates = self._prices.find(model)
        longer: int = _part(self.extra_usage, "cache_creation").get("ephemeral_1h_input_tokens", 0)
        surcharge = 10 if self.extra_usage.get("inference_geo") == "us" else 0
        usage = Usage(input_tokens + longer, output_tokens, 0, longer, longer, surcharge_percent=surcharge)
        listed_cost = 0 if isinstance(rates, Unpriced) else rates.cost(usage, 0)
        self.billed += max(listed_cost, round(self.reported_cost * DOLLAR))


def _pick_tool(request: Mapping[str, Any], body: bytes) -> tuple[str, Mapping[str, Any]] | None:
    """Choose an offered tool to call, unless the request has a tool result already."""
    if any(marker in body for marker in (b'"tool_result"', b'"role":"tool"', b'"role": "tool"', b'call_output"')):
        return None
    offered_names = [*_names_of(request.get("tools") or ()), *_names_of(request.get("input") or ())]
    tool_name = next((name for name in TOOL_ARGUMENTS if name in offered_names), None)
    return None if tool_name is None else (tool_name, TOOL_ARGUMENTS[tool_name])


def _names_of(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list):
        return
    for tool in cast("list[Any]", tools):
        if isinstance(tool, dict):
            entry = cast("dict[str, Any]", tool)
            yield from _names_of(entry.get("tools"))
            name = entry.get("name") or _part(entry, "function").get("name")
            if name:
                yield str(name)


def _part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an object inside another one; an empty object if there is none."""
    part = value.get(name)
    return cast("Mapping[str, Any]", part) if isinstance(part, dict) else {}


def _sse(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(value)}\n\n".encode()


def _messages(
    words: Sequence[str],
    tool: tuple[str, Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
    input_tokens: int,
    output_tokens: int,
    *,
    model: str,
) -> tuple[Sequence[bytes], object]:
    longer: int = _part(extra, "cache_creation").get("ephemeral_1h_input_tokens", 0)
    usage: dict[str, Any] = {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": longer,
        "cache_read_input_tokens": 0,
        "service_tier": "standard",
        **extra,
    }
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}
    stop = "tool_use" if tool else "end_turn"

    def event(name: str, **fields: Any) -> bytes:
        return _sse({"type": name, **fields}, name)

    start: dict[str, Any] = {**head, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events = [event("message_start", message=start)]
    if tool:
        block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": tool[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(tool[1])}
        content = [{**block, "input": dict(tool[1])}]
        deltas: list[Any] = [delta]
    else:
        block = {"type": "text", "text": ""}
        content = [{"type": "text", "text": "".join(words)}]
        deltas = [{"type": "text_delta", "text": word} for word in words]
    events.append(event("content_block_start", index=0, content_block=block))
    events += [event("content_block_delta", index=0, delta=delta) for delta in deltas]
    events.append(event("content_block_stop", index=0))
    end_delta = {"stop_reason": stop, "stop_sequence": None}
    events.append(event("message_delta", delta=end_delta, usage={"output_tokens": output_tokens}))
    events.append(event("message_stop"))
    whole: dict[str, Any] = {
        **head,
        "content": content,
        "stop_reason": stop,
        "usage": {**usage, "output_tokens": output_tokens},
    }
    return events, whole


def _chat(
    words: Sequence[str],
    tool: tuple[str, Mapping[str, Any]] | None,
    input_tokens: int,
    output_tokens: int,
    extra: Mapping[str, Any],
    *,
    reports: bool,
    model: str,
) -> tuple[Sequence[bytes], object]:
    usage = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        **extra,
    }
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
    finish = "tool_calls" if tool else "stop"
    tool_calls = []
    if tool:
        function = {"name": tool[0], "arguments": json.dumps(tool[1])}
        tool_calls = [{"id": "call_1", "type": "function", "function": function}]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"tool_calls": [{"index": 0, **tool_calls[0]}]}] if tool_calls else [{"content": word} for word in words]
    chunks = [_sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) for delta in deltas]
    chunks.append(_sse({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}))
    if reports:
        chunks.append(_sse({**head, "choices": [], "usage": usage}))
    chunks.append(b"data: [DONE]\n\n")
    message = {
        "role": "assistant",
        "content": None if tool else "".join(words),
        **({"tool_calls": tool_calls} if tool_calls else {}),
    }
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return chunks, {**head, "object": "chat.completion", "choices": [choice], "usage": usage}


def _responses(
    words: Sequence[str],
    tool: tuple[str, Mapping[str, Any]] | None,
    input_tokens: int,
    output_tokens: int,
    extra: Mapping[str, Any],
    *,
    model: str,
) -> tuple[Sequence[bytes], object]:
    usage = {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
        **extra,
    }
    head: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": model,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
    }
    text = "".join(words)
    if tool:
        item: dict[str, Any] = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": tool[0],
            "arguments": json.dumps(tool[1]),
            "status": "completed",
        }
    else:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": "item_1", "role": "assistant", "status": "completed", "content": [part]}
    whole = {**head, "status": "completed", "output": [item], "usage": usage}
    opening: dict[str, Any] = {**head, "status": "in_progress", "output": [], "usage": None}
    bare: dict[str, Any] = {**item, "status": "in_progress", **({"arguments": ""} if tool else {"content": []})}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": opening}),
        ("response.output_item.added", {"output_index": 0, "item": bare}),
    ]
    if tool:
        location = {"item_id": "fc_1", "output_index": 0}
        events.append(("response.function_call_arguments.delta", {**location, "delta": item["arguments"]}))
        events.append(("response.function_call_arguments.done", {**location, "arguments": item["arguments"]}))
    else:
        location = {"item_id": "item_1", "output_index": 0, "content_index": 0}
        empty: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        events.append(("response.content_part.added", {**location, "part": empty}))
        events += [("response.output_text.delta", {**location, "delta": word, "logprobs": []}) for word in words]
        events.append(("response.output_text.done", {**location, "text": text, "logprobs": []}))
    events.append(("response.output_item.done", {"output_index": 0, "item": item}))
    events.append(("response.completed", {"response": whole}))
    return [
        _sse({"type": name, **fields, "sequence_number": at}, name) for at, (name, fields) in enumerate(events)
    ], whole

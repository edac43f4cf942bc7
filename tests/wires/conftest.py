"""A provider of one's own: a real server on this machine that speaks all wires, and every way of failing."""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pytest

from halter.core.messages import Message, Prompt, Reply, make_user_message
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import ModelName
from halter.models.wire import WireModel
from halter.spec.models import WireFormat
from tests.wires.openai_rules import find_code, object_to

Finish = Literal["stop", "calls", "length", "filter"]
Event = tuple[str, bytes]
"""A piece of a stream, and what it brings: start, text, args, finish, usage or done."""

KEY = "sk-made-up-1234567890"

OPENAI_FINISH = {"stop": "stop", "calls": "tool_calls", "length": "length", "filter": "content_filter"}
ANTHROPIC_FINISH = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens", "filter": "refusal"}
RESPONSES_FINISH = {
    "stop": ("completed", None),
    "calls": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "filter": ("incomplete", "content_filter"),
}
GOOGLE_FINISH = {"stop": "STOP", "calls": "STOP", "length": "MAX_TOKENS", "filter": "SAFETY"}


@dataclass
class Call:
    """A call, its arguments in the pieces in which they are streamed."""

    id: str
    tool: str
    arguments: tuple[str, ...]

    @property
    def value(self) -> Any:
        return json.loads("".join(self.arguments) or "{}")


@dataclass
class Answer:
    """What the provider says, in whatever protocol it is asked.

    `until` cuts a stream after the first piece that brings it; `abort` then tears the connection, or else the stream
    ends as politely as if it were over. `reports` says where in a stream of OpenAI's protocol a usage stands.

    `sealed` is encrypted reasoning, each before one of the text and the calls; `phase` belongs to the text. Only the
    wire `responses` has them, and `refusal`, which is said in place of a text.
    """

    text: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    finish: Finish | None = "stop"
    usage: tuple[int, int, int] | None = (100, 20, 40)
    thoughts: str = ""
    until: str = ""
    abort: bool = False
    hang: bool = False
    reports: Literal["last", "early", "each"] = "last"
    sealed: tuple[str, ...] = ()
    phase: str = ""
    refusal: tuple[str, ...] = ()
    written: int = 0


@dataclass
class Raw:
    """An answer byte for byte."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = "application/json"


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes = b""


class Provider:
    """Gives the same answer until it is told another one, and keeps what it was asked.

    What was put in line with `then` is said first, each once.
    """

    def __init__(self) -> None:
        self.answer: Answer | Raw = Answer()
        self.asked: list[Asked] = []
        self.line: list[Answer | Raw] = []
        self.hanging = asyncio.Event()
        self.gone = asyncio.Event()
        self.port = 0
        self.connections = 0
        self.key = KEY
        self.strict = False
        """Answer 400 where OpenAI's own API does."""
        self.sealed: dict[str, str] = {}
        """The encrypted reasoning that was given, and the model that can read it."""
        self._open: set[asyncio.StreamWriter] = set()

    def says(self, *text: str, calls: tuple[tuple[str, str, tuple[str, ...]], ...] = (), **fields: Any) -> None:
        """Answer with words and calls; see `Answer` for the rest."""
        made = tuple(Call(*call) for call in calls)
        self.answer = Answer(text, made, fields.pop("finish", "calls" if calls else "stop"), **fields)

    def sends(self, status: int = 200, body: Any = b"", kind: str = "application/json", **headers: str) -> None:
        """Answer byte for byte; see `Raw`."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        values = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answer = Raw(status, content, values, kind)

    def then(self) -> None:
        """Put the answer in line: it is given once, and another one after it."""
        self.line.append(self.answer)

    def written(self, wire: str) -> bytes:
        """Write down what would be streamed, byte for byte."""
        paths = {
            "openai": "/v1/chat/completions",
            "responses": "/v1/responses",
            "anthropic": "/v1/messages",
            "google": "/",
        }
        assert isinstance(self.answer, Answer)
        return b"".join(content for _, content in events(Asked(paths[wire], {}, {}), self.answer))

    def refuses(self, status: int, message: str = "No luck.", code: str = "", **headers: str) -> None:
        """Answer with an error in a body that each of the wires can read."""
        error = {"message": message, "type": code or "some_error", "code": code or status, "status": code}
        self.sends(status, {"type": "error", "error": error}, **headers)

    @property
    def last(self) -> dict[str, Any]:
        return self.asked[-1].body

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            self._open.discard(writer)
            writer.close()

    def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        asked = await self._read(reader)
        if asked is None:
            return False
        self.asked.append(asked)
        if self.strict and (objection := object_to(asked.path, asked.body, self.sealed)):
            error = {
                "message": objection,
                "type": "invalid_request_error",
                "param": "input",
                "code": find_code(objection),
            }
            writer.write(plain(Raw(400, json.dumps({"error": error}).encode())))
            await writer.drain()
            return True
        answer = self.line.pop(0) if self.line else self.answer
        if isinstance(answer, Answer):
            self.sealed |= dict.fromkeys(answer.sealed, asked.body.get("model", ""))
        if isinstance(answer, Raw):
            writer.write(plain(answer))
        elif streams(asked):
            return await self._stream(asked, answer, reader, writer)
        elif answer.hang:
            return await self._hang(reader)
        else:
            writer.write(plain(Raw(body=json.dumps(whole(asked, answer)).encode())))
        await writer.drain()
        return True

    async def _read(self, reader: asyncio.StreamReader) -> Asked | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:
            return None
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        exact = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        values = {name.lower(): value for name, value in exact.items()}
        return Asked(head[0].split(" ")[1], values, json.loads(body), body)

    async def _stream(
        self, asked: Asked, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for brings, content in events(asked, answer):
            writer.write(b"%x\r\n%s\r\n" % (len(content), content))
            await writer.drain()
            if brings == answer.until:
                break
        if answer.hang:
            return await self._hang(reader)
        if answer.abort:
            writer.close()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _hang(self, reader: asyncio.StreamReader) -> bool:
        self.hanging.set()
        assert await reader.read() == b""
        self.gone.set()
        return False


def plain(raw: Raw) -> bytes:
    headers = {"content-type": raw.kind, "content-length": str(len(raw.body)), **raw.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {raw.status} Said\r\n{lines}\r\n".encode() + raw.body


def wire_of(asked: Asked) -> str:
    if "/v1/chat/completions" in asked.path:
        return "openai"
    if "/v1/responses" in asked.path:
        return "responses"
    return "anthropic" if asked.path.startswith("/v1/messages") else "google"


def streams(asked: Asked) -> bool:
    return bool(asked.body.get("stream")) or "streamGenerateContent" in asked.path


def whole(asked: Asked, answer: Answer) -> dict[str, Any]:
    wholes = {
        "openai": openai_whole,
        "responses": responses_whole,
        "anthropic": anthropic_whole,
        "google": google_whole,
    }
    return wholes[wire_of(asked)](answer)


def events(asked: Asked, answer: Answer) -> Iterator[Event]:
    streams_of = {
        "openai": openai_events,
        "responses": responses_events,
        "anthropic": anthropic_events,
        "google": google_events,
    }
    return streams_of[wire_of(asked)](answer)


def sse(value: Any, name: str = "") -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return (f"event: {name}\r\n" if name else "").encode() + f"data: {data}\r\n\r\n".encode()


def openai_usage(answer: Answer, so_far: int | None = None) -> dict[str, Any]:
    if answer.usage is None:
        return {}
    read, written, cached = answer.usage
    written = written if so_far is None else so_far
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, **details}}


def openai_whole(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.text) or None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.tool, "arguments": "".join(call.arguments)}}
            for call in answer.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish and OPENAI_FINISH[answer.finish]}
    head = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], **openai_usage(answer)}


def openai_events(answer: Answer) -> Iterator[Event]:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    sent = itertools.count()

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        number = next(sent)
        early = answer.reports == "each" or (answer.reports == "early" and not number)
        usage = openai_usage(answer, number) if early else {}
        return sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **usage})

    yield "start", chunk({"role": "assistant", "content": ""})
    if answer.thoughts:
        yield "thoughts", chunk({"reasoning_content": answer.thoughts})
    for text in answer.text:
        yield "text", chunk({"content": text})
    for index, call in enumerate(answer.calls):
        values = {"index": index, "id": call.id, "type": "function", "function": {"name": call.tool, "arguments": ""}}
        yield "call", chunk({"tool_calls": [values]})
        for argument in call.arguments:
            yield "args", chunk({"tool_calls": [{"index": index, "function": {"arguments": argument}}]})
    if answer.finish:
        yield "finish", chunk({}, OPENAI_FINISH[answer.finish])
    if answer.usage:
        yield "usage", sse({**head, "choices": [], **openai_usage(answer)})
    if answer.finish:
        yield "done", sse("[DONE]")


def responses_usage(answer: Answer) -> dict[str, Any] | None:
    if answer.usage is None:
        return None
    read, written, cached = answer.usage
    details = {"cached_tokens": cached, "cache_write_tokens": answer.written}
    counts = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    return {**counts, "input_tokens_details": details, "output_tokens_details": {"reasoning_tokens": written // 2}}


def responses_items(answer: Answer) -> list[dict[str, Any]]:
    """The output of an answer: its text and calls, each after the reasoning that belongs to it."""
    said: list[dict[str, Any]] = []
    if answer.text:
        content = {"type": "output_text", "text": "".join(answer.text), "annotations": []}
        said.append(
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [content]}
        )
        if answer.phase:
            said[0]["phase"] = answer.phase
    if answer.refusal:
        content = {"type": "refusal", "refusal": "".join(answer.refusal)}
        said.append(
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [content]}
        )
    said += [
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": call.id,
            "name": call.tool,
            "arguments": "".join(call.arguments),
            "status": "completed",
        }
        for number, call in enumerate(answer.calls)
    ]
    items: list[dict[str, Any]] = []
    for number, seal in enumerate(answer.sealed or (("",) if answer.thoughts else ())):
        summary = [{"type": "summary_text", "text": answer.thoughts}] if answer.thoughts and not number else []
        reasoning = {"type": "reasoning", "id": f"rs_{number}", "summary": summary, "encrypted_content": seal or None}
        items += [reasoning, *said[number : number + 1]]
    return [*items, *said[max(len(answer.sealed), bool(answer.thoughts)) :]]


def responses_whole(answer: Answer) -> dict[str, Any]:
    status, reason = RESPONSES_FINISH[answer.finish] if answer.finish else ("in_progress", None)
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": status, "error": None}
    details = {"incomplete_details": {"reason": reason} if reason else None, "usage": responses_usage(answer)}
    fixed = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    return {**head, **fixed, **details, "output": responses_items(answer)}


def responses_events(answer: Answer) -> Iterator[Event]:
    numbers = itertools.count()

    def event(name: str, **fields: Any) -> bytes:
        return sse({"type": f"response.{name}", "sequence_number": next(numbers), **fields}, f"response.{name}")

    opening = {**responses_whole(Answer(finish=None, usage=None)), "output": []}
    yield "start", event("created", response=opening)
    yield "start", event("in_progress", response=opening)
    calls = iter(answer.calls)
    for at, item in enumerate(responses_items(answer)):
        where = {"item_id": item["id"], "output_index": at}
        match item["type"]:
            case "reasoning":
                yield "thoughts", event("output_item.added", output_index=at, item={**item, "summary": []})
                for part in item["summary"]:
                    empty = {**part, "text": ""}
                    yield "thoughts", event("reasoning_summary_part.added", **where, summary_index=0, part=empty)
                    delta = {"summary_index": 0, "delta": part["text"]}
                    yield "thoughts", event("reasoning_summary_text.delta", **where, **delta)
                    yield "thoughts", event("reasoning_summary_part.done", **where, summary_index=0, part=part)
            case "message":
                content = item["content"][0]
                refuses = content["type"] == "refusal"
                empty = {**content, "refusal" if refuses else "text": ""}
                yield "open", event("output_item.added", output_index=at, item={**item, "content": []})
                yield "open", event("content_part.added", **where, content_index=0, part=empty)
                for text in answer.refusal if refuses else answer.text:
                    kind = "refusal.delta" if refuses else "output_text.delta"
                    yield "text", event(kind, **where, content_index=0, delta=text)
                kind, key = ("refusal.done", "refusal") if refuses else ("output_text.done", "text")
                yield "stop", event(kind, **where, content_index=0, **{key: content[key]})
                yield "stop", event("content_part.done", **where, content_index=0, part=content)
            case _:
                yield "call", event("output_item.added", output_index=at, item={**item, "arguments": ""})
                for argument in next(calls).arguments:
                    yield "args", event("function_call_arguments.delta", **where, delta=argument)
                yield "stop", event("function_call_arguments.done", **where, arguments=item["arguments"])
        yield "stop", event("output_item.done", output_index=at, item=item)
    if answer.finish:
        response = responses_whole(answer)
        yield "finish", event(response["status"], response=response)


def anthropic_usage(answer: Answer, number: int | None = None) -> dict[str, Any]:
    read, all_written, cached = answer.usage or (0, 0, 0)
    values = {"input_tokens": read - cached, "output_tokens": all_written if number is None else number}
    return {**values, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def anthropic_whole(answer: Answer) -> dict[str, Any]:
    thoughts = [{"type": "thinking", "thinking": answer.thoughts, "signature": "s"}] if answer.thoughts else []
    texts = [{"type": "text", "text": "".join(answer.text)}] if answer.text else []
    calls = [{"type": "tool_use", "id": call.id, "name": call.tool, "input": call.value} for call in answer.calls]
    head = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    stop = answer.finish and ANTHROPIC_FINISH[answer.finish]
    return {**head, "content": [*thoughts, *texts, *calls], "stop_reason": stop, "usage": anthropic_usage(answer)}


def anthropic_events(answer: Answer) -> Iterator[Event]:
    def event(name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields}, name)

    message = {**anthropic_whole(Answer(finish=None)), "usage": anthropic_usage(answer, 1)}
    yield "start", event("message_start", message=message)
    index = itertools.count()
    if answer.thoughts:
        at = next(index)
        block = {"type": "thinking", "thinking": "", "signature": ""}
        yield "thoughts", event("content_block_start", index=at, content_block=block)
        delta = {"type": "thinking_delta", "thinking": answer.thoughts}
        yield "thoughts", event("content_block_delta", index=at, delta=delta)
        yield "stop", event("content_block_stop", index=at)
    if answer.text:
        at = next(index)
        yield "open", event("content_block_start", index=at, content_block={"type": "text", "text": ""})
        for text in answer.text:
            yield "text", event("content_block_delta", index=at, delta={"type": "text_delta", "text": text})
        yield "stop", event("content_block_stop", index=at)
    for call in answer.calls:
        at = next(index)
        block = {"type": "tool_use", "id": call.id, "name": call.tool, "input": {}}
        yield "call", event("content_block_start", index=at, content_block=block)
        for argument in call.arguments:
            delta = {"type": "input_json_delta", "partial_json": argument}
            yield "args", event("content_block_delta", index=at, delta=delta)
        yield "stop", event("content_block_stop", index=at)
    if answer.finish:
        delta = {"stop_reason": ANTHROPIC_FINISH[answer.finish], "stop_sequence": None}
        usage = {"output_tokens": (answer.usage or (0, 0, 0))[1]}
        yield "finish", event("message_delta", delta=delta, usage=usage)
        yield "done", event("message_stop")


def google_chunk(answer: Answer, fields: list[dict[str, Any]], finish: Finish | None, written: int) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": fields}, "index": 0}
    if finish:
        candidate["finishReason"] = GOOGLE_FINISH[finish]
    payload: dict[str, Any] = {"candidates": [candidate], "modelVersion": "m", "responseId": "r1"}
    if answer.usage:
        read, _, cached = answer.usage
        values = {"promptTokenCount": read, "candidatesTokenCount": written, "cachedContentTokenCount": cached}
        payload["usageMetadata"] = {**values, "totalTokenCount": read + written}
    return payload


def google_parts(answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    if answer.thoughts:
        yield "thoughts", {"text": answer.thoughts, "thought": True}
    for text in answer.text:
        yield "text", {"text": text}
    for call in answer.calls:
        yield "args", {"functionCall": {"id": call.id, "name": call.tool, "args": call.value}}


def google_whole(answer: Answer) -> dict[str, Any]:
    fields = [payload for _, payload in google_parts(answer)]
    return google_chunk(answer, fields, answer.finish, (answer.usage or (0, 0, 0))[1])


def google_events(answer: Answer) -> Iterator[Event]:
    for brings, fields in google_parts(answer):
        yield brings, sse(google_chunk(answer, [fields], None, 1))
    if answer.finish:
        yield "finish", sse(google_chunk(answer, [], answer.finish, (answer.usage or (0, 0, 0))[1]))


MODELS = {
    "openai": ModelName("openai", "gpt-4.1"),
    "responses": ModelName("openai", "gpt-5.6"),
    "anthropic": ModelName("anthropic", "claude-opus-4-8"),
    "google": ModelName("google", "gemini-2.5-pro"),
}
PATHS = {"openai": "/v1", "responses": "/v1", "anthropic": "", "google": ""}
SCHEMA = b'{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}'
TOOL = ToolSpec(name="read_file", description="Reads a file.", schema=SCHEMA)


class Desk:
    """One wire to the provider, asked whole or as a stream."""

    def __init__(self, provider: Provider, wire: Any, *, streaming: bool) -> None:
        self.provider = provider
        self.wire = wire
        self.streaming = streaming
        self.heard: list[str] = []
        self.requests = itertools.count()
        self.model = self.reach(MODELS[wire])

    def reach(self, name: ModelName, port: int | None = None, **options: Any) -> WireModel:
        url = f"http://127.0.0.1:{port or self.provider.port}{PATHS[self.wire]}"
        return WireModel(name, self.wire, url, KEY, base_url=url, **options)

    async def ask(self, prompt: Prompt | None = None, model: WireModel | None = None) -> Reply:
        self.heard.clear()
        permit = Permit(f"r{next(self.requests)}", 0, {})
        hear = self.heard.append if self.streaming else None
        return await (model or self.model).ask(prompt or self.prompt(), permit, hear)

    @staticmethod
    def prompt(*messages: Message, system: str = "Be brief.", tools: tuple[ToolSpec, ...] = (TOOL,)) -> Prompt:
        said = messages or (make_user_message("What is in app.log?"),)
        return Prompt(system=system, messages=said, tools=tools, max_output_tokens=777)


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made
        server.close()
        made.close()


@pytest.fixture(params=get_args(WireFormat))
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streaming(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
async def desk(provider: Provider, wire: Any, streaming: bool) -> AsyncIterator[Desk]:  # noqa: FBT001 - a fixture
    made = Desk(provider, wire, streaming=streaming)
    yield made
    await made.model.aclose()


@pytest.fixture
async def streamed(provider: Provider, wire: Any) -> AsyncIterator[Desk]:
    made = Desk(provider, wire, streaming=True)
    yield made
    await made.model.aclose()


@pytest.fixture
def desk_in_a_loop() -> Callable[[], Coroutine[Any, Any, str]]:
    """One model for several event loops, each with a provider of its own at the same address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = WireModel(MODELS["openai"], "openai", f"http://127.0.0.1:{port}/v1", KEY)

    async def ask() -> str:
        made = Provider()
        made.says("Yes.")
        async with await asyncio.start_server(made.serve, "127.0.0.1", port) as server:
            reply = await model.ask(Desk.prompt(), Permit("r", 0, {}))
            await model.aclose()
            server.close()
            made.close()
        return reply.text

    return ask

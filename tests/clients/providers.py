"""Providers on 127.0.0.1 that say what a test wants: Anthropic Messages and OpenAI Responses, streamed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

Step = Mapping[str, Any]
"""A text, or calls with an id, a name and arguments."""


def text(output: str) -> Step:
    return {"text": output}


def calls(*made: tuple[str, str, Mapping[str, Any]]) -> Step:
    return {"calls": [{"id": key, "name": name, "input": dict(fields)} for key, name, fields in made]}


class Provider:
    """A provider that gives its replies one after the other, and keeps what it was sent."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.requests: list[dict[str, Any]] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 Its name in the library.

            def do_HEAD(self) -> None:
                self._send(b"", "text/plain")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if "count_tokens" in self.path:
                    self._send(b'{"input_tokens": 10}', "application/json")
                    return
                provider.requests.append(body)
                events = _responses if self.path.endswith("/responses") else _messages
                output = "".join(
                    f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events(provider.next(body))
                )
                self._send(output.encode(), "text/event-stream")

            def _send(self, data: bytes, kind: str) -> None:
                with suppress(ConnectionError):  # A client that was halted has hung up.
                    self.send_response(200)
                    self.send_header("content-type", kind)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def next(self, body: Mapping[str, Any]) -> Step:
        """The next reply; a request without tools asks for a title or the like."""
        if not body.get("tools"):
            return text("A title")
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _messages(step: Step) -> Iterator[tuple[str, dict[str, Any]]]:
    def event(kind: str, **more: Any) -> tuple[str, dict[str, Any]]:
        return kind, {"type": kind, **more}

    message: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "x",
        "content": [],
        "stop_reason": None,
    }
    yield event("message_start", message={**message, "usage": {"input_tokens": 1, "output_tokens": 1}})
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if "text" in step:
        blocks.append(({"type": "text", "text": ""}, {"type": "text_delta", "text": step["text"]}))
    for call in step.get("calls", ()):
        block: dict[str, Any] = {"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}}
        blocks.append((block, {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}))
    for index, (block, delta) in enumerate(blocks):
        yield event("content_block_start", index=index, content_block=block)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    why = "tool_use" if step.get("calls") else "end_turn"
    yield event("message_delta", delta={"stop_reason": why, "stop_sequence": None}, usage={"output_tokens": 5})
    yield event("message_stop")


def _name_function(name: str) -> dict[str, str]:
    """Codex has the tools of each MCP server in a namespace; before a slash, a name says which."""
    namespace, slash, output = name.rpartition("/")
    return {"name": output, "namespace": namespace} if slash else {"name": output}


def _responses(step: Step) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.created", {"type": "response.created", "response": {"id": "r"}}
    items: list[dict[str, Any]] = [
        {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], **_name_function(call["name"])}
        | {"arguments": json.dumps(call["input"])}
        for call in step.get("calls", ())
    ]
    if "text" in step:
        content = [{"type": "output_text", "text": step["text"]}]
        items.append({"type": "message", "id": "m", "role": "assistant", "content": content})
    for index, item in enumerate(items):
        kind = "response.output_item.done"
        yield kind, {"type": kind, "output_index": index, "item": item}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    yield "response.completed", {"type": "response.completed", "response": {"id": "r", "usage": usage}}

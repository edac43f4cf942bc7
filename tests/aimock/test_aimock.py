"""The wires against a server that nobody here wrote: streams, tools, and its own ways of failing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from halter.core.errors import ModelError, ModelRejected, ModelUnavailable
from halter.core.messages import Message, Prompt, Reply, ToolResult, make_user_message
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import Usage
from halter.models.providers import make_model
from halter.spec.models import Provider

SCHEMA = b'{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}'
TOOL = ToolSpec(name="read_file", description="Reads a file.", schema=SCHEMA)
PATHS = {"openai": "/v1", "anthropic": ""}


class Line:
    """One way to ask the server: a wire, whole or as a stream."""

    def __init__(self, address: str, wire: Any, *, streaming: bool) -> None:
        provider = Provider(wire=wire, base_url=f"{address}{PATHS[wire]}", api_key="${secret:MADE_UP}")
        self.model = make_model("mine:some-model", {"mine": provider}, {"MADE_UP": "made-up"}.get)
        self.streaming = streaming
        self.heard: list[str] = []

    async def ask(self, *messages: Message) -> Reply:
        hear = self.heard.append if self.streaming else None
        prompt = Prompt(system="Be brief.", messages=messages, tools=(TOOL,), max_output_tokens=500)
        return await self.model.ask(prompt, Permit("r", 0, {}), hear)


@pytest.fixture(params=["openai", "anthropic"])
def wire(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
async def line(request: pytest.FixtureRequest, aimock: str, wire: str) -> AsyncIterator[Line]:
    made = Line(aimock, wire, streaming=request.param)
    yield made
    await made.model.aclose()


async def test_it_says_hello_and_what_that_used(line: Line) -> None:
    reply = await line.ask(make_user_message("say hello"))
    assert (reply.text, reply.stop) == ("Hello, and a good morning to everybody who listens.", "end")
    assert reply.usage == Usage(31, 11)
    assert "".join(line.heard) == (reply.text if line.streaming else "")
    assert len(line.heard) > 3 or not line.streaming


async def test_it_requests_calls_and_continues_with_their_results(line: Line) -> None:
    first = await line.ask(make_user_message("read both logs"))
    assert (first.text, first.stop) == ("I will look.", "calls")
    assert [(call.tool, call.arguments) for call in first.calls] == [
        ("read_file", '{"path":"a.log"}'),
        ("read_file", '{"path":"b.log"}'),
    ]
    results = tuple(ToolResult(call.id, call.tool, "ok", "") for call in first.calls)
    reply = await line.ask(
        make_user_message("read both logs"), Message("assistant", first.parts), Message("user", results)
    )
    assert (reply.text, reply.stop) == ("Both are empty.", "end")


async def test_it_runs_out_of_tokens(line: Line) -> None:
    reply = await line.ask(make_user_message("run out of words"))
    assert (reply.text, reply.stop) == ("And then it", "max_tokens")


FAILURES = [
    ("drop it", ModelUnavailable, "ServerError", False),
    ("garble it", ModelUnavailable, "BadAnswer", True),
    ("hang up", ModelUnavailable, "ConnectionLost", True),
    ("slow down", ModelUnavailable, "RateLimited", False),
    ("be overloaded", ModelUnavailable, "Overloaded", False),
    ("refuse it", ModelRejected, "Rejected", False),
]


@pytest.mark.parametrize(("text", "sort", "kind", "billed"), FAILURES)
async def test_its_failures_mean_what_they_should(
    line: Line,
    text: str,
    sort: type[ModelError],
    kind: str,
    billed: bool,  # noqa: FBT001
) -> None:
    with pytest.raises(ModelError) as caught:
        await line.ask(make_user_message(text))
    assert type(caught.value) is sort
    assert str(caught.value).split(":")[0] == kind
    assert caught.value.billed is billed
    assert line.heard == []


async def test_it_says_how_long_to_wait(line: Line) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        await line.ask(make_user_message("slow down"))
    assert caught.value.retry_after is not None
    assert caught.value.retry_after > 0


async def test_a_stream_that_it_cuts_off_is_no_answer(aimock: str, wire: str) -> None:
    line = Line(aimock, wire, streaming=True)
    with pytest.raises(ModelUnavailable) as caught:
        await line.ask(make_user_message("cut it off"))
    await line.model.aclose()
    assert str(caught.value).startswith("CutStream: ")
    assert caught.value.billed

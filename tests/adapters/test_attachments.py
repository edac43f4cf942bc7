"""What frameworks show a model beside text is held for, and a picture's data is not paid for as if it were text."""

import asyncio
import base64
from typing import Any

import msgspec
import pytest
from agent_framework import Content, Message
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, messages_to_dict
from pydantic_ai.messages import BinaryContent, DocumentUrl, ImageUrl, ToolReturnPart, UserPromptPart

from halter.adapters.agent_framework import _to_attributes  # pyright: ignore[reportPrivateUsage]  What it renders is meant.
from halter.adapters.attachments import split_attachments
from halter.external.effects import EffectRefused
from tests.adapters import test_agent_framework, test_langchain, test_openai_agents, test_pydantic_ai
from tests.adapters.conftest import Desk

SIGHT = bytes(range(256)) * 400
DATA = base64.b64encode(SIGHT).decode()
ADDRESS = f"data:image/png;base64,{DATA}"
FAR = "https://a.example/b"


def chain(*messages: BaseMessage) -> Any:
    return messages_to_dict(messages)


def user(*parts: Any) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


@pytest.mark.parametrize(
    ("request_", "kinds"),
    [
        (UserPromptPart(["hi", BinaryContent(SIGHT, media_type="image/png")]), ["picture"]),
        (UserPromptPart([BinaryContent(SIGHT, media_type="image/png"), ImageUrl(FAR)]), ["picture", "picture"]),
        (chain(HumanMessage([{"type": "image", "base64": DATA, "mime_type": "image/png"}])), ["picture"]),
        (chain(HumanMessage([{"type": "image_url", "image_url": {"url": ADDRESS}}])), ["picture"]),
        (user({"type": "input_image", "image_url": ADDRESS}), ["picture"]),
        (user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}), ["picture"]),
        ([{"role": "user", "parts": [{"inline_data": {"data": DATA, "mime_type": "image/png"}}]}], ["picture"]),
        ([Message("user", [Content.from_data(data=SIGHT, media_type="image/png")])], ["picture"]),
    ],
)
def test_a_picture_of_the_program_s_own_is_no_text(request_: Any, kinds: list[str]) -> None:
    text, attachment_kinds = split_attachments(msgspec.json.encode(request_, enc_hook=_to_attributes).decode())
    assert attachment_kinds == kinds
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("request_", "kinds"),
    [
        (UserPromptPart([ImageUrl(FAR), DocumentUrl(FAR)]), ["picture", "file"]),
        (ToolReturnPart("look", [BinaryContent(SIGHT, media_type="image/png")], "c1"), ["picture"]),
        (chain(HumanMessage([{"type": "image", "url": FAR}, {"type": "audio", "url": FAR}])), ["picture", "sound"]),
        (chain(HumanMessage([{"type": "file", "base64": DATA, "mime_type": "application/pdf"}])), ["file"]),
        (chain(ToolMessage([{"type": "image_url", "image_url": {"url": ADDRESS}}], tool_call_id="c")), ["picture"]),
        (user({"type": "input_image", "file_id": "f"}, {"type": "input_file", "file_id": "f"}), ["picture", "file"]),
        (user({"type": "tool_result", "content": [{"type": "image", "source": {"data": DATA}}]}), ["picture"]),
        ([{"type": "function_call_output", "output": [{"type": "input_image", "image_url": ADDRESS}]}], ["picture"]),
        ([{"role": "user", "parts": [{"file_data": {"file_uri": FAR, "mime_type": "video/mp4"}}]}], ["file"]),
        ([Message("user", [Content.from_uri(uri=FAR, media_type="audio/wav")])], ["sound"]),
    ],
)
def test_what_lies_elsewhere_or_came_from_a_tool_is_held_for_beside_its_text(request_: Any, kinds: list[str]) -> None:
    payload = msgspec.json.encode(request_, enc_hook=_to_attributes).decode()
    assert split_attachments(payload) == (payload, kinds)


@pytest.mark.parametrize(
    "request_",
    [
        ToolReturnPart("list_files", [{"type": "file", "name": "a", "mime_type": "application/pdf"}], "c1"),
        chain(AIMessage("", tool_calls=[{"name": "see", "args": {"type": "image", "base64": DATA}, "id": "c"}])),
        user({"type": "tool_use", "input": {"content": [{"type": "image", "source": {"data": DATA}}]}}),
        user({"type": "text", "text": f'{{"type": "image", "data": "{DATA}"}}'}),
        [{"name": "see", "parameters": {"properties": {"file": {"type": "string"}}}}],
    ],
)
def test_what_a_call_was_given_and_a_tool_listed_is_text(request_: Any) -> None:
    payload = msgspec.json.encode(request_, enc_hook=_to_attributes).decode()
    assert split_attachments(payload) == (payload, [])


Picture = dict[str, Any]
CHAT: Picture = {"type": "image_url", "image_url": {"url": ADDRESS}}


async def run_pydantic_ai(desk: Any, cap: float, *, near: bool) -> Any:
    outcome = BinaryContent(SIGHT, media_type="image/png") if near else ImageUrl(FAR)
    return (await desk.agent(cap=cap).run(["Pay the bill.", outcome])).output


async def run_langchain(desk: Desk, cap: float, *, near: bool) -> Any:
    shown = CHAT if near else {"type": "image", "url": FAR}
    values = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Pay the bill."}, shown]}]}
    return (await test_langchain.make_agent(desk, cap=cap).ainvoke(values))["messages"][-1].content


async def run_openai_agents(desk: Desk, cap: float, *, near: bool) -> Any:
    values = {"type": "input_image", "detail": "auto", "image_url": ADDRESS if near else FAR}
    runner = test_openai_agents.make_runner(desk, cap=cap)
    return (await runner.run([{"role": "user", "content": [values]}])).final_output


async def run_agent_framework(desk: Desk, cap: float, *, near: bool) -> Any:
    far = Content.from_uri(uri=FAR, media_type="image/png")
    content = Content.from_data(data=SIGHT, media_type="image/png") if near else far
    agent = test_agent_framework.make_agent(desk, cap=cap)
    return (await agent.run(Message("user", [Content.from_text("Pay the bill."), content]))).text


@pytest.mark.parametrize("run", [run_pydantic_ai, run_langchain, run_openai_agents, run_agent_framework])
@pytest.mark.parametrize("near", [True, False])
def test_a_picture_is_held_at_its_most_in_every_framework(desk: Desk, run: Any, *, near: bool) -> None:
    """A picture of 100 kB takes 16,000 tokens at most, at a dollar for a million."""
    if run is run_pydantic_ai:
        desk = test_pydantic_ai.World(desk.file.parent)
    with pytest.raises(EffectRefused) as refused:
        asyncio.run(run(desk, 0.015, near=near))
    assert (refused.value.outcome, desk.paid) == ("cost_cap_reached", [])
    assert "Done: " in asyncio.run(run(desk, 0.09, near=near))


async def test_sound_without_a_known_price_is_refused_before_the_model_is_asked(desk: Desk) -> None:
    model = test_langchain.FunctionChatModel(requests=[])
    result: Any = {"messages": [{"role": "user", "content": [{"type": "audio", "url": FAR}]}]}
    with pytest.raises(EffectRefused, match="audio"):
        await test_langchain.make_agent(desk, cap=100, model=model).ainvoke(result)
    assert model.requests == []

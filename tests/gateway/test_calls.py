"""Calls of clients of both protocols to servers of both: each passes the guard, and arrives whole."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError
from mcp_types import (
    ElicitResult,
    EmptyResult,
    ResourceUpdatedNotification,
    SetLevelRequest,
    SetLevelRequestParams,
    SubscribeRequest,
    SubscribeRequestParams,
    UnsubscribeRequest,
    UnsubscribeRequestParams,
)

from halter.core.clock import SECOND
from halter.guard.halts import halt
from halter.testing.fakes import ManualClock
from tests.gateway.desks import ERAS, PERSON, helpful, modern, open_desk, text_of, until

FREE = "mode: FULL\n"
SECRET = "sk-ant-api03-" + "a1b2c3d4e5" * 9 + "abc-AA"


@pytest.mark.parametrize("era", ERAS)
async def test_tools_are_listed_under_their_servers_with_the_same_schemas(tmp_path: Path, era: str) -> None:
    async with open_desk(tmp_path, FREE) as desk, desk.client(era) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"helpful__act", "helpful__look", "halter__decisions", "halter__wait"} <= listed.keys()
        assert not [name for name in listed if "approve" in name]
        (session,) = desk.gateway.sessions.values()
        for name, tool in session.upstreams.tools.items():
            if name in listed:
                entry: Any = tool
                text = json.dumps(entry.entry["inputSchema"])
                assert json.dumps(listed[name].input_schema) == text


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_is_in_the_journal_before_and_after(tmp_path: Path, era: str) -> None:
    async with open_desk(tmp_path, FREE) as desk, desk.client(era) as client:
        result = await client.call_tool("helpful__act", {"what": "x"})
        assert (text_of(result), result.is_error) == ("did x", False)
        tool = await client.call_tool("helpful__look", {"what": "y"})
        assert tool.structured_content == {"seen": "y"}
        assert desk.noted() == ["act x", "look y"]
        assert await desk.kinds() == ["session_started", *(["call_started", "call_settled"] * 2)]
        (row,) = await desk.sessions()
        assert (row.kind, row.agent, row.state) == ("gated", "desk", "RUNNING")


async def test_a_session_ends_with_its_gateway(tmp_path: Path) -> None:
    async with open_desk(tmp_path, FREE) as desk:
        async with desk.client() as client:
            await client.call_tool("helpful__look", {"what": "y"})
        await desk.gateway.close()
        (row,) = await desk.sessions()
        assert (row.state, row.terminal_reason) == ("COMPLETED", "completed")


@pytest.mark.parametrize("era", ERAS)
async def test_progress_reaches_the_client(tmp_path: Path, era: str) -> None:
    heard: list[tuple[float, float | None, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    async with open_desk(tmp_path, FREE) as desk, desk.client(era) as client:
        result = await client.call_tool("helpful__steps", {"count": 3}, progress_callback=hear)
        assert text_of(result) == "arrived"
    assert heard == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("server", ["helpful", "modern"])
async def test_a_question_of_a_server_reaches_the_client_and_its_answer_the_server(
    tmp_path: Path, era: str, server: str
) -> None:
    texts: list[str] = []

    async def answer(_: Any, params: Any) -> ElicitResult:
        texts.append(params.message)
        return ElicitResult(action="accept", content={"colour": "red"})

    servers = {"helpful": helpful(tmp_path / "notes"), "modern": modern(tmp_path / "notes")}
    async with open_desk(tmp_path, FREE, servers) as desk, desk.client(era, elicitation_callback=answer) as client:
        result = await client.call_tool(f"{server}__ask", {"question": "Which?"})
        assert text_of(result) == "they like red"
        assert texts == [f"The server {server} asks: Which?"]
        assert len(desk.noted()) == 1


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_shows_no_questions_has_nobody_there(tmp_path: Path, era: str) -> None:
    servers = {"helpful": helpful(tmp_path / "notes"), "modern": modern(tmp_path / "notes")}
    async with open_desk(tmp_path, FREE, servers) as desk, desk.client(era) as client:
        for server in servers:
            result = await client.call_tool(f"{server}__ask", {"question": "Which?"})
            assert text_of(result) == "they said cancel"


@pytest.mark.parametrize("era", ERAS)
async def test_a_cancelled_call_is_cancelled_at_its_server_and_settled(tmp_path: Path, era: str) -> None:
    async with open_desk(tmp_path, FREE) as desk, desk.client(era) as client:
        call = asyncio.create_task(client.call_tool("helpful__slow", {"what": "x"}))
        await until(lambda: "began x" in desk.noted())
        call.cancel()
        await until(lambda: "stopped x" in desk.noted())
        # It may have done something before it heard of it.
        assert (await desk.until_settled()).outcome == "unknown"


async def test_a_halt_stops_a_running_call_and_refuses_the_next(tmp_path: Path) -> None:
    clock = ManualClock(1_790_000_000_000_000)
    async with open_desk(tmp_path, FREE, clock=clock) as desk, desk.client() as client:
        call = asyncio.create_task(client.call_tool("helpful__slow", {"what": "x"}))
        await until(lambda: "began x" in desk.noted())
        await desk.app.store.commit(halt("agent:desk", PERSON, desk.app.ids.make(), "enough"))
        while not call.done():
            clock.advance(SECOND // 4)
            await asyncio.sleep(0.01)
        assert call.result().is_error
        refused = await client.call_tool("helpful__act", {"what": "y"})
        assert refused.is_error
        assert "was halted by ada: enough" in text_of(refused)
        assert "act y" not in desk.noted()


async def test_what_is_not_granted_is_neither_listed_nor_made(tmp_path: Path) -> None:
    policy = FREE + "policy: {disabled: [helpful__act]}\nphases: {only: [helpful__look, helpful__act]}\n"
    async with open_desk(tmp_path, policy) as desk, desk.client() as client:
        names = [tool.name for tool in (await client.list_tools()).tools if tool.name.startswith("helpful")]
        assert names == ["helpful__look"]
        for name in ("helpful__act", "helpful__slow", "helpful__nothing", "desk"):
            assert (await client.call_tool(name, {"what": "x"})).is_error
        assert desk.noted() == []


async def test_wrong_arguments_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with open_desk(tmp_path, FREE) as desk, desk.client() as client:
        result = await client.call_tool("helpful__act", {"where": 1})
        assert result.is_error
        assert desk.noted() == []


@pytest.mark.parametrize("era", ERAS)
async def test_a_resource_is_a_guarded_read_with_its_secrets_masked(tmp_path: Path, era: str) -> None:
    async with open_desk(tmp_path, FREE) as desk, desk.client(era) as client:
        (resource,) = (await client.list_resources()).resources
        read: Any = await client.read_resource(resource.uri)
        assert "the key is [redacted:" in read.contents[0].text
        assert SECRET not in str(await desk.events())
        assert "call_settled" in await desk.kinds()
        await desk.app.store.commit(halt("fleet", PERSON, desk.app.ids.make()))
        with pytest.raises(MCPError, match="was halted by ada"):
            await client.read_resource(resource.uri)
        assert desk.noted() == ["read"]


@pytest.mark.parametrize("era", ERAS)
async def test_prompts_have_their_servers_in_their_names(tmp_path: Path, era: str) -> None:
    async with open_desk(tmp_path, FREE) as desk, desk.client(era) as client:
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.name == "helpful__greet"
        result: Any = await client.get_prompt("helpful__greet", {"name": "Ada"})
        assert result.messages[0].content.text == "Say hello to Ada."


SERVED = (("helpful", "notes://all"), ("modern", "modern://all"))


@pytest.mark.parametrize(("server", "uri"), SERVED)
async def test_an_elder_client_hears_the_logs_and_the_resources_that_it_follows(
    tmp_path: Path, server: str, uri: str
) -> None:
    logged: asyncio.Queue[Any] = asyncio.Queue()
    queue: asyncio.Queue[str] = asyncio.Queue()

    async def log(params: Any) -> None:
        logged.put_nowait(params)

    async def hear(message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            queue.put_nowait(str(message.params.uri))

    servers = {"helpful": helpful(tmp_path / "notes"), "modern": modern(tmp_path / "notes")}
    async with (
        open_desk(tmp_path, FREE, servers) as desk,
        desk.client(logging_callback=log, message_handler=hear) as client,
    ):
        session: Any = client.session
        await session.send_request(SetLevelRequest(params=SetLevelRequestParams(level="info")), EmptyResult)
        await session.send_request(SubscribeRequest(params=SubscribeRequestParams(uri=uri)), EmptyResult)
        await client.call_tool(f"{server}__murmur", {"words": f"the key is {SECRET}"})
        line = await logged.get()
        assert (line.level, line.logger) == ("warning", f"{server}/inner")
        assert "[redacted:" in line.data["words"]
        assert await queue.get() == uri
        await session.send_request(UnsubscribeRequest(params=UnsubscribeRequestParams(uri=uri)), EmptyResult)
        await client.call_tool(f"{server}__murmur", {"words": "again"})
        assert (await logged.get()).data == {"words": "again"}
        assert queue.empty()
        if server == "helpful":
            assert desk.noted() == [f"follow {uri}", f"unfollow {uri}"]


@pytest.mark.parametrize(("server", "uri"), SERVED)
async def test_a_newer_client_hears_logs_with_its_call_and_resources_on_its_stream(
    tmp_path: Path, server: str, uri: str
) -> None:
    logged: asyncio.Queue[Any] = asyncio.Queue()

    async def log(params: Any) -> None:
        logged.put_nowait(params)

    servers = {"helpful": helpful(tmp_path / "notes"), "modern": modern(tmp_path / "notes")}
    async with (
        open_desk(tmp_path, FREE, servers) as desk,
        desk.client("2026-07-28", logging_callback=log, log_level="info") as client,
    ):
        await client.list_tools()
        async with client.listen(resource_subscriptions=[uri]) as subscription:
            await client.call_tool(f"{server}__murmur", {"words": "low"})
            assert (await logged.get()).data == {"words": "low"}
            assert (await anext(subscription)).uri == uri  # type: ignore[union-attr]
        if server == "helpful":
            await until(lambda: f"unfollow {uri}" in desk.noted())


async def test_a_resource_that_may_not_be_read_is_not_followed(tmp_path: Path) -> None:
    policy = FREE + "policy: {disabled: [helpful__resources_read]}\n"
    async with open_desk(tmp_path, policy) as desk, desk.client() as client:
        session: Any = client.session
        request = SubscribeRequest(params=SubscribeRequestParams(uri="notes://all"))
        with pytest.raises(MCPError, match="this client has no resource"):
            await session.send_request(request, EmptyResult)
        assert desk.noted() == []

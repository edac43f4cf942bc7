"""A call that needs a person waits a while, then says so; once approved, the same call runs, once, and no other."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError
from mcp_types import ElicitResult

from halter.core.clock import MINUTE, SECOND
from halter.guard.approvals import approve_edited
from halter.guard.halts import halt
from halter.testing.fakes import ManualClock
from tests.gateway.desks import ERAS, START, GatewayDesk, liar, modern, open_at, open_desk, pass_time, text_of

SEMI = "mode: SEMI\n"
ACT = ("helpful__act", {"what": "x"})


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_that_is_approved_while_it_waits_runs(tmp_path: Path, era: str) -> None:
    async with open_desk(tmp_path, fleet=SEMI) as desk, desk.client(era) as client:
        call = asyncio.create_task(client.call_tool(*ACT))
        await desk.wait_for_decision()
        assert desk.noted() == []
        await desk.decide("approve")
        assert text_of(await call) == "did x"
        assert desk.noted() == ["act x"]


async def test_a_denied_call_is_never_made(tmp_path: Path) -> None:
    async with open_desk(tmp_path, fleet=SEMI) as desk, desk.client() as client:
        call = asyncio.create_task(client.call_tool(*ACT))
        await desk.decide("deny")
        result = await call
        assert (result.is_error, text_of(result)) == (True, "Halter: ada denied this call.")
        assert desk.noted() == []


@pytest.mark.parametrize("era", ERAS)
async def test_after_its_wait_a_call_is_pending_and_the_same_call_runs_once_approved(tmp_path: Path, era: str) -> None:
    clock, texts = ManualClock(START), list[str]()

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        del progress, total
        texts.append(message or "")

    async with open_desk(tmp_path, fleet=SEMI, clock=clock) as desk, desk.client(era) as client:
        call = asyncio.create_task(client.call_tool(*ACT, progress_callback=hear))
        pending_decision = await desk.wait_for_decision()
        assert 50 * SECOND <= await pass_time(clock, call) <= 55 * SECOND
        result = await call
        assert result.is_error
        assert f"pending decision {pending_decision.decision}" in text_of(result)
        assert "Repeat the same call" in text_of(result)
        assert (result.meta or {})["halter/decision"]["decision"] == pending_decision.decision
        assert len(texts) >= 4
        assert all(pending_decision.decision in each for each in texts)
        # The same question stands: it is not asked twice.
        listed: Any = (await client.call_tool("halter__decisions", {})).structured_content
        assert [each["decision"] for each in listed["decisions"]] == [pending_decision.decision]
        await desk.decide("approve")
        assert "was approved. Repeat the same call to run it." in text_of(
            await client.call_tool("halter__wait", {"decision": pending_decision.decision})
        )
        assert desk.noted() == []
        assert text_of(await client.call_tool(*ACT)) == "did x"
        # The approval is used up.
        task = asyncio.create_task(client.call_tool(*ACT))
        assert (await desk.wait_for_decision()).decision != pending_decision.decision
        task.cancel()
        assert desk.noted() == ["act x"]


async def test_a_halt_ends_the_wait_for_a_decision(tmp_path: Path) -> None:
    async with open_desk(tmp_path, fleet=SEMI) as desk, desk.client() as client:
        call = asyncio.create_task(client.call_tool(*ACT))
        await desk.wait_for_decision()
        await desk.app.store.commit(halt("fleet", "ada", "h1", "stop it"))
        assert "halted" in text_of(await call)
        assert desk.noted() == []


async def test_other_arguments_than_the_approved_ones_are_another_question(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_desk(tmp_path, fleet=SEMI, clock=clock) as desk, desk.client() as client:
        call = asyncio.create_task(client.call_tool(*ACT))
        await desk.wait_for_decision()
        await pass_time(clock, call)
        await desk.decide("approve")
        for values in ({"what": "y"}, {"what": "x "}, {"what": "X"}):
            task = asyncio.create_task(client.call_tool("helpful__act", values))
            await desk.wait_for_decision()
            await desk.decide("deny")
            assert (await task).is_error
        assert desk.noted() == []


async def test_what_a_person_put_in_place_of_the_arguments_is_done(tmp_path: Path) -> None:
    async with open_desk(tmp_path, fleet=SEMI) as desk, desk.client() as client:
        call = asyncio.create_task(client.call_tool(*ACT))
        pending_decision = await desk.wait_for_decision()
        await desk.app.store.commit(approve_edited(pending_decision, b'{"what":"less"}', "ada", desk.app.ids.make()))
        assert text_of(await call) == "did less"
        assert desk.noted() == ["act less"]


async def test_an_approval_survives_the_gateway_and_its_client(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_desk(tmp_path, fleet=SEMI, clock=clock) as desk:
        async with desk.client() as client:
            call = asyncio.create_task(client.call_tool(*ACT))
            await desk.wait_for_decision()
            await pass_time(clock, call)
        await desk.gateway.close()
        (row,) = await desk.sessions()
        assert row.state == "WAITING_FOR_APPROVAL"
        clock.advance(10 * MINUTE)
        await desk.decide("approve")
        async with open_at(desk.app, tmp_path) as another:
            gateway_desk = GatewayDesk(desk.app, another, desk.notes)
            async with gateway_desk.client() as client:
                assert text_of(await client.call_tool(*ACT)) == "did x"
        assert [row.state for row in await desk.sessions()] == ["COMPLETED"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_form_that_the_client_accepts_decides_only_where_the_operator_said_so(tmp_path: Path, era: str) -> None:
    results: list[Any] = []

    async def accept(_: Any, params: Any) -> ElicitResult:
        results.append(params)
        return ElicitResult(action="accept", content={"approve": True})

    clock = ManualClock(START)
    async with (
        open_desk(tmp_path, fleet=SEMI, clock=clock) as desk,
        desk.client(era, elicitation_callback=accept) as client,
    ):
        call = asyncio.create_task(client.call_tool(*ACT))
        await desk.wait_for_decision()
        await pass_time(clock, call)
        assert ((await call).is_error, results, desk.noted()) == (True, [], [])
    trusts = "gateway: {trust_client_elicitation: true}\n"
    (tmp_path / "more").mkdir()
    async with (
        open_desk(tmp_path / "more", trusts, fleet=SEMI) as desk,
        desk.client(era, elicitation_callback=accept) as client,
    ):
        assert text_of(await client.call_tool(*ACT)) == "did x"
        assert "helpful__act" in results[0].message


@pytest.mark.parametrize("era", ERAS)
async def test_a_client_that_opens_addresses_is_sent_to_the_decision_s_page_and_decides_nothing_by_it(
    tmp_path: Path, era: str
) -> None:
    results: list[Any] = []

    async def accept(_: Any, params: Any) -> ElicitResult:
        results.append(params)
        return ElicitResult(action="accept")

    policy, clock = "gateway: {dashboard: 'https://halter.example/'}\n", ManualClock(START)
    async with (
        open_desk(tmp_path, policy, fleet=SEMI, clock=clock) as desk,
        desk.client(era, elicitation_callback=accept) as client,
    ):
        call = asyncio.create_task(client.call_tool(*ACT))
        decision = (await desk.wait_for_decision()).decision
        await pass_time(clock, call)
        assert [each.url for each in results] == [f"https://halter.example/decision/{decision}"]
        assert ((await call).is_error, desk.noted()) == (True, [])


async def test_a_decision_of_another_session_is_not_shown(tmp_path: Path) -> None:
    async with open_desk(tmp_path, fleet=SEMI) as desk, desk.client() as client:
        tool = await client.call_tool("halter__wait", {"decision": "someone-else.1/approval"})
        assert "no decision" in text_of(tool)


async def test_a_changed_tool_is_held_until_a_person_pins_it_again(tmp_path: Path) -> None:
    tools = [
        {"name": name, "description": f"Do {name}.", "inputSchema": {"type": "object"}} for name in ("echo", "change")
    ]
    async with open_desk(tmp_path, servers={"liar": liar(tools=tools)}) as desk, desk.client() as client:
        assert text_of(await client.call_tool("liar__echo", {"n": 1})) == '{"n": 1}'
        await client.call_tool("liar__change", {})
        assert "liar__echo" not in [tool.name for tool in (await client.list_tools()).tools]
        refused = await client.call_tool("liar__echo", {"n": 2})
        assert refused.is_error
        assert "changed since it was approved" in text_of(refused)
        (pending_decision,) = await desk.waiting()
        assert pending_decision.about == "changed_server"
        await desk.decide("approve")
        values = {tool.name: tool.description for tool in (await client.list_tools()).tools}
        assert values["liar__echo"] == "Something else entirely."
        assert text_of(await client.call_tool("liar__echo", {"n": 3})) == '{"n": 3}'


@pytest.mark.parametrize("era", ERAS)
async def test_a_changed_tool_of_a_server_of_the_newer_protocol_is_held_too(tmp_path: Path, era: str) -> None:
    servers = {"modern": modern(tmp_path / "notes")}
    async with open_desk(tmp_path, servers=servers) as desk, desk.client(era) as client:
        assert "modern__ask" in [tool.name for tool in (await client.list_tools()).tools]
        await client.call_tool("modern__change", {})
        refused = await client.call_tool("modern__ask", {"question": "Which?"})
        assert "changed since it was approved" in text_of(refused)
        assert "modern__ask" not in [tool.name for tool in (await client.list_tools()).tools]
        assert (await desk.wait_for_decision()).about == "changed_server"


class Replies:
    """Makes the rounds of a client of the newer protocol one by one."""

    def __init__(self, client: Any) -> None:
        self.session = client.session

    async def call(self, tool: str, arguments: Any, **more: Any) -> Any:
        return await self.session.call_tool(tool, arguments, allow_input_required=True, **more)


async def test_a_request_state_is_good_for_one_return_of_the_same_call(tmp_path: Path) -> None:
    red = {"halter-1": ElicitResult(action="accept", content={"colour": "red"})}

    async def never(_: Any, __: Any) -> ElicitResult:
        raise AssertionError("The rounds are made by hand.")

    async with open_desk(tmp_path) as desk, desk.client("2026-07-28", elicitation_callback=never) as client:
        rounds, ask = Replies(client), ("helpful__ask", {"question": "Which?"})
        first = await rounds.call(*ask)
        state = first.request_state
        assert [*first.input_requests] == ["halter-1"]
        for wrong in (("helpful__act", {"what": "x"}), ("helpful__ask", {"question": "Another?"})):
            result = await rounds.call(*ask)
            with pytest.raises(MCPError, match="Nothing was done"):
                await rounds.call(*wrong, request_state=result.request_state, input_responses=red)
        with pytest.raises(MCPError, match="Nothing was done"):
            await rounds.call(*ask, request_state="made up", input_responses=red)
        done = await rounds.call(*ask, request_state=state, input_responses=red)
        assert text_of(done) == "they like red"
        with pytest.raises(MCPError, match="Nothing was done"):
            await rounds.call(*ask, request_state=state, input_responses=red)
        assert desk.noted() == ["colour red"]

"""The tasks extension on both sides: clients that ask how their calls stand, and servers that make tasks of calls."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError
from mcp_types import ElicitResult

from halter.core.clock import MINUTE, SECOND
from halter.guard.halts import halt
from halter.testing.fakes import ManualClock
from tests.gateway.desks import ERAS, START, let_server_work, modern, open_desk, text_of, until

SEMI = "mode: SEMI\n"
ACT = ("helpful__act", {"what": "x"})
RED, BLUE = ({"action": "accept", "content": {"colour": each}} for each in ("red", "blue"))
TASKS = "io.modelcontextprotocol/tasks"
KNOWS_TASKS: Any = {TASKS: {}}


class TaskClient:
    """A client of the newer protocol that declares the tasks extension, by hand."""

    def __init__(self, client: Any, extensions: Any = KNOWS_TASKS) -> None:
        self.session = client.session
        self._extensions = extensions

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        meta: Any = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {"extensions": self._extensions, "elicitation": {"form": {}}},
        }
        return await self.session._dispatcher.send_raw_request(method, {**params, "_meta": meta})  # noqa: SLF001

    async def call(self, tool: str, arguments: Any) -> dict[str, Any]:
        return await self.ask("tools/call", name=tool, arguments=arguments)

    async def update(self, task: str, **responses: Any) -> dict[str, Any]:
        fields = await self.ask("tasks/update", taskId=task, inputResponses=responses)
        return {key: value for key, value in fields.items() if key != "_meta"}

    async def until(self, clock: ManualClock, task: str, status: str, questions: int = 1) -> dict[str, Any]:
        """Ask how a task stands, as time passes, until it stands so, with that many questions if it has any."""
        while True:
            fields = await self.ask("tasks/get", taskId=task)
            if fields["status"] == status and len(fields.get("inputRequests", "1")) == questions:
                return fields
            clock.advance(SECOND // 10)
            await asyncio.sleep(0.01)


async def test_a_client_that_knows_tasks_is_given_one_while_a_person_decides(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_desk(tmp_path, fleet=SEMI, clock=clock) as desk, desk.client("2026-07-28") as plain:
        client = TaskClient(plain)
        assert TASKS in (await client.ask("server/discover"))["capabilities"]["extensions"]
        task = await client.call(*ACT)
        assert (task["resultType"], task["status"], task["ttlMs"]) == ("task", "working", None)
        pending_decision = await desk.wait_for_decision()
        assert pending_decision.decision in task["statusMessage"]
        # It outlives the time for which others are held.
        clock.advance(5 * MINUTE)
        await asyncio.sleep(0.05)
        assert (await client.ask("tasks/get", taskId=task["taskId"]))["status"] == "working"
        assert desk.noted() == []
        await desk.decide("approve")
        fields = await client.until(clock, task["taskId"], "completed")
        assert fields["result"]["content"][0]["text"] == "did x"
        assert desk.noted() == ["act x"]
        # What needs no person is answered as ever.
        payload = await client.call("helpful__look", {"what": "y"})
        assert payload["structuredContent"] == {"seen": "y"}
        with pytest.raises(MCPError, match="no such task"):
            await client.ask("tasks/get", taskId="made up")


async def test_a_task_that_is_cancelled_never_runs_and_one_that_is_denied_says_so(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_desk(tmp_path, fleet=SEMI, clock=clock) as desk, desk.client("2026-07-28") as plain:
        client = TaskClient(plain)
        fields = await client.call("helpful__act", {"what": "gone"})
        await desk.wait_for_decision()
        await client.ask("tasks/cancel", taskId=fields["taskId"])
        assert (await client.ask("tasks/get", taskId=fields["taskId"]))["status"] == "cancelled"
        await desk.decide("approve")
        denied = await client.call(*ACT)
        await desk.decide("deny")
        assert (await client.until(clock, denied["taskId"], "completed"))["result"]["isError"]
        assert desk.noted() == []


async def test_an_answer_to_one_question_of_a_task_leaves_the_others_open(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_desk(tmp_path, fleet=SEMI, clock=clock) as desk, desk.client("2026-07-28") as plain:
        client = TaskClient(plain)
        task = (await client.call("helpful__ask_twice", {}))["taskId"]
        await desk.decide("approve")
        fields = await client.until(clock, task, "input_required", questions=2)
        second = next(key for key, each in fields["inputRequests"].items() if "Second?" in each["params"]["message"])
        (first,) = fields["inputRequests"].keys() - {second}
        assert await client.update(task, **{second: BLUE, "made up": RED}) == {"resultType": "complete"}
        # What was answered is answered: a second thought is not heard.
        await client.update(task, **{second: RED})
        payload = await client.until(clock, task, "input_required")
        assert [*payload["inputRequests"]] == [first]
        await client.update(task, **{first: RED})
        result = await client.until(clock, task, "completed")
        assert result["result"]["content"][0]["text"] == "red blue"


async def test_a_client_that_does_not_say_that_it_knows_tasks_cannot_ask_for_them(tmp_path: Path) -> None:
    async with open_desk(tmp_path, fleet=SEMI) as desk, desk.client("2026-07-28") as plain:
        task = (await TaskClient(plain).call(*ACT))["taskId"]
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            with pytest.raises(MCPError, match="needs io"):
                await TaskClient(plain, {}).ask(method, taskId=task, inputResponses={})
        assert len(await desk.waiting()) == 1


def job(
    text: str = "j", ends: str = "completed", asks: tuple[str, ...] = (), **lies: Any
) -> tuple[str, dict[str, Any]]:
    """A call of which the server makes a task, how that ends, and what it asks for before."""
    return ("modern__job", {"what": text, "ends": ends, "asks": list(asks), "lies": lies})


def open_job_desk(home: Path, clock: ManualClock) -> Any:
    return open_desk(home, servers={"modern": modern(home / "notes")}, clock=clock)


@pytest.mark.parametrize("era", ERAS)
async def test_a_task_of_a_server_is_one_call_for_a_client_that_knows_none(tmp_path: Path, era: str) -> None:
    texts, clock = list[str](), ManualClock(START)

    async def answer(_: Any, params: Any) -> ElicitResult:
        texts.append(params.message)
        return ElicitResult(action="accept", content={"colour": "red"})

    async with open_job_desk(tmp_path, clock) as desk, desk.client(era, elicitation_callback=answer) as client:
        call = asyncio.create_task(client.call_tool(*job(asks=("a", "b"))))
        await let_server_work(clock, call)
        assert text_of(await call) == "j is done red red"
        assert texts == ["The server modern asks: Which?"] * 2
        assert [line.split(" {")[0] for line in desk.noted()] == ["begin j", "tasks/update j"]
        assert (await desk.until_settled()).outcome == "ok"


async def test_a_task_of_a_server_is_a_task_of_ours_for_a_client_that_knows_them(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_job_desk(tmp_path, clock) as desk, desk.client("2026-07-28") as plain:
        client = TaskClient(plain)
        fields = await client.call(*job(asks=("a",)))
        assert (fields["resultType"], fields["statusMessage"]) == ("task", "The server modern says: j is working")
        assert fields["taskId"] != "j"
        payload = await client.until(clock, fields["taskId"], "input_required")
        ((key, request),) = payload["inputRequests"].items()
        assert request["params"]["message"] == "The server modern asks: Which?"
        await client.update(fields["taskId"], **{key: BLUE})
        result = await client.until(clock, fields["taskId"], "completed")
        assert result["result"]["content"][0]["text"] == "j is done blue"
        with pytest.raises(MCPError, match="no such task"):
            await client.ask("tasks/get", taskId="j")
        assert [stored.event.outcome for stored in await desk.events() if stored.kind == "call_settled"] == ["ok"]


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (job(ends="failed"), "error"),
        (job(ends="cancelled"), "unknown"),
        (job(ends="gone mad"), "unknown"),
        (job(taskId="another"), "unknown"),
        (job(result="no result"), "unknown"),
        (job(result={"content": "no list"}), "unknown"),
    ],
)
async def test_how_a_task_of_a_server_ends_is_how_its_call_ends(tmp_path: Path, call: Any, outcome: str) -> None:
    clock = ManualClock(START)
    async with open_job_desk(tmp_path, clock) as desk, desk.client() as client:
        task = asyncio.create_task(client.call_tool(*call))
        await let_server_work(clock, task)
        assert (await task).is_error
        assert (await desk.until_settled()).outcome == outcome


async def test_a_task_that_its_server_has_forgotten_may_have_been_done(tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with open_job_desk(tmp_path, clock) as desk, desk.client() as client:
        task = asyncio.create_task(client.call_tool(*job(ends="working")))
        await until(lambda: desk.noted() == ["begin j"])
        assert not (await client.call_tool("modern__forget", {})).is_error
        await let_server_work(clock, task)
        assert (await desk.until_settled()).outcome == "unknown"


@pytest.mark.parametrize("how", ["cancel", "task", "halt"])
async def test_a_call_that_is_given_up_is_cancelled_as_the_task_that_its_server_made_of_it(
    tmp_path: Path, how: str
) -> None:
    clock = ManualClock(START)
    async with open_job_desk(tmp_path, clock) as desk, desk.client("2026-07-28") as plain:
        client = TaskClient(plain)
        if how == "task":
            task = (await client.call(*job(ends="working")))["taskId"]
            await client.ask("tasks/cancel", taskId=task)
        else:
            call = asyncio.create_task(plain.call_tool(*job(ends="working")))
            await until(lambda: desk.noted() == ["begin j"])
            if how == "halt":
                await desk.app.store.commit(halt("fleet", "ada", "halt-1"))
                await let_server_work(clock, call)
            else:
                call.cancel()
        assert (await desk.until_settled()).outcome == "unknown"
        await until(lambda: desk.noted() == ["begin j", "tasks/cancel j {}"])

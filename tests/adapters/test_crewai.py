"""A crew of CrewAI under the guard: its own agents and loop, with a model that is a function."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("crewai") is None:
    pytest.skip("crewai is not installed: run make frameworks", allow_module_level=True)
# It reads them when it is imported.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
pytest.importorskip("crewai")  # It warns while it is imported.

from crewai import Agent, BaseLLM, Crew, Task
from crewai.events.types.llm_events import LLMCallType
from crewai.hooks import (
    register_before_llm_call_hook,
    register_before_tool_call_hook,
    unregister_before_llm_call_hook,
    unregister_before_tool_call_hook,
)
from crewai.llm_overlay import llm_overlay
from crewai.tools import BaseTool, tool
from pydantic import Field

from halter.adapters.crewai import GuardedCrew, guard
from halter.core.errors import ConfigError
from halter.external.effects import EffectRefused
from halter.guard.halts import halt
from tests.adapters.conftest import Desk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))
    monkeypatch.setenv("HOME", str(tmp_path))


class FunctionModel(BaseLLM):
    """Answers as a provider does: it calls the tool once, and is never longer than it may be."""

    max_tokens: int | None = None
    output: int = 10
    amount: int = 7
    native: bool = False
    gate: Any = None
    requests: list[Any] = Field(default_factory=list)

    def __init__(self, **options: Any) -> None:
        super().__init__(model="function:desk", **options)

    def supports_function_calling(self) -> bool:
        return self.native

    def call(self, messages: Any, tools: Any = None, *_: Any, **__: Any) -> Any:
        if self.gate is not None:
            self.gate.wait(60)
        return self._answer(messages)

    async def acall(self, messages: Any, tools: Any = None, *_: Any, **__: Any) -> Any:
        if self.gate is not None:
            self.gate.reached.set()
            await asyncio.Event().wait()
        return self._answer(messages)

    def _answer(self, messages: Any) -> Any:
        assert self.n is None
        self.requests.append(self.max_tokens)
        written = min(self.output, self.max_tokens or 0)
        self._track_token_usage_internal(
            {"prompt_tokens": 100, "completion_tokens": written, "total_tokens": 100 + written}
        )
        answer = self._say(json.dumps(messages, default=str))
        if self.stream and isinstance(answer, str):
            for word in answer.split(" "):
                self._emit_stream_chunk_event(word + " ", call_type=LLMCallType.LLM_CALL)
        return answer

    def _say(self, text: str) -> Any:
        payload = json.dumps({"amount": self.amount})
        if self.native:
            if '"role": "tool"' in text:
                return "Done: " + text.rpartition('"role": "tool"')[2]
            return [SimpleNamespace(id="c1", function=SimpleNamespace(name="pay", arguments=payload))]
        if '"role": "assistant"' in text:
            return f"Thought: I know.\nFinal Answer: Done: {text.rpartition('Observation:')[2][:300]}"
        return f"Thought: I pay.\nAction: pay\nAction Input: {payload}"


class Pay(BaseTool):
    name: str = "pay"
    description: str = "Pay an amount."
    paid: Any = None

    def _run(self, amount: int) -> str:
        if amount < 0:
            raise ValueError("less than nothing")
        self.paid.append(amount)
        return f"paid {amount}"


def make_crew(desk: Desk, model: Any = None, tools: Any = None, agent: Any = None, **options: Any) -> Crew:
    clerk = Agent(
        role="clerk",
        goal="Pay bills",
        backstory="A clerk",
        llm=model or FunctionModel(),
        tools=[Pay(paid=desk.paid)] if tools is None else tools,
        **(agent or {}),
    )
    task = Task(description="Pay the bill.", expected_output="A receipt", agent=clerk)
    return Crew(agents=[clerk], tasks=[task], **options)


def make_guarded(desk: Desk, level: Any = "CONTROLLED", cap: float = 1.0, **options: Any) -> GuardedCrew:
    terms = {key: options.pop(key) for key in ("max_output_tokens", "allow_native") if key in options}
    return guard(make_crew(desk, **options), guard=desk.guard(cap), tools={"pay": {"level": level}}, **terms)


WAYS = ("kickoff", "kickoff_async", "akickoff")


async def kickoff(crew: GuardedCrew, way: str = "kickoff", **options: Any) -> str:
    if way == "kickoff":
        return (await asyncio.to_thread(crew.kickoff, **options)).raw
    return (await getattr(crew, way)(**options)).raw


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("native", [False, True])
async def test_a_kickoff_is_a_session_with_its_calls_its_requests_and_what_they_cost(
    desk: Desk, way: str, *, native: bool
) -> None:
    text = await kickoff(make_guarded(desk, model=FunctionModel(native=native)), way)
    assert "Done: " in text
    assert "paid 7" in text
    assert desk.paid == [7]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


def read_stream(crew: GuardedCrew) -> tuple[str, Any]:
    stream = crew.kickoff()
    return "".join(chunk.content for chunk in stream), stream.result


async def read_stream_async(crew: GuardedCrew, way: str) -> tuple[str, Any]:
    stream = await getattr(crew, way)()
    text = "".join([chunk.content async for chunk in stream])
    return text, stream.result


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_of_a_crew_is_a_session_too(desk: Desk, way: str) -> None:
    crew = make_guarded(desk, stream=True)
    asynchronous = way != "kickoff"
    text, result = await (read_stream_async(crew, way) if asynchronous else asyncio.to_thread(read_stream, crew))
    assert "Action: pay" in text
    assert "Final Answer: Done: " in text
    assert "paid 7" in result.raw
    assert desk.paid == [7]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_raises_the_refusal_that_ended_it(desk: Desk, way: str) -> None:
    crew = make_guarded(desk, stream=True, cap=0.0001)
    with pytest.raises(EffectRefused) as refused:
        await (read_stream_async(crew, way) if way != "kickoff" else asyncio.to_thread(read_stream, crew))
    assert refused.value.outcome == "cost_cap_reached"
    assert desk.paid == []


async def test_a_cancelled_akickoff_settles_its_request_at_its_hold_and_starts_no_other(desk: Desk) -> None:
    gate, model = Gate(), FunctionModel()
    model.gate = gate
    running = asyncio.ensure_future(kickoff(make_guarded(desk, model=model), "akickoff"))
    await asyncio.to_thread(gate.reached.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (desk.paid, model.requests) == ([], [])
    assert await desk.read_spending() > Decimal("0.04")


async def test_an_async_tool_is_awaited_in_an_akickoff(desk: Desk) -> None:
    @tool("pay")
    async def pay(amount: int) -> str:
        """Pay an amount."""
        await asyncio.sleep(0)
        desk.paid.append(amount)
        return f"paid {amount}"

    assert "paid 7" in await kickoff(make_guarded(desk, tools=[pay]), "akickoff")
    assert desk.paid == [7]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


def test_a_program_without_a_loop_kicks_it_off_and_a_function_is_a_tool(desk: Desk) -> None:
    @tool("pay")
    def pay(amount: int) -> str:
        """Pay an amount."""
        desk.paid.append(amount)
        return f"paid {amount}"

    crew = make_guarded(desk, tools=[pay])
    assert "paid 7" in crew.kickoff().raw
    assert "paid 7" in crew.kickoff(inputs={"bill": "second"}).raw
    assert desk.paid == [7, 7]


@pytest.mark.parametrize("native", [False, True])
async def test_a_refused_call_is_reported_to_the_model_and_does_not_run(desk: Desk, *, native: bool) -> None:
    desk.policy = {"policy": {"disabled": ["pay"]}}
    assert "disabled" in await kickoff(make_guarded(desk, model=FunctionModel(native=native)))
    assert desk.paid == []


async def test_an_answer_is_never_longer_than_what_fits_the_cap(desk: Desk) -> None:
    model = FunctionModel(n=4)
    await kickoff(make_guarded(desk, cap=0.03, model=model, max_output_tokens=40_000))
    assert 0 < model.requests[0] < 40_000


class Gate:
    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def wait(self, seconds: int) -> None:
        self.reached.set()
        self.over.wait(seconds)

    def __deepcopy__(self, _: Any) -> "Gate":
        return self


@pytest.mark.parametrize("way", WAYS)
async def test_a_halt_ends_a_kickoff_within_its_request(desk: Desk, way: str) -> None:
    gate = Gate()
    model = FunctionModel(gate=gate)
    running = asyncio.ensure_future(kickoff(make_guarded(desk, model=model), way))
    await asyncio.to_thread(gate.reached.wait, 60)
    store = desk.store()
    await store.commit(halt("fleet", "ada", "halt-1"))
    with pytest.raises(EffectRefused) as refused:
        await running
    assert refused.value.outcome == "external_halt"
    await store.close()
    gate.over.set()
    for thread in [each for each in threading.enumerate() if each.name == "halter-crew"]:
        await asyncio.to_thread(thread.join, 60)
    # The thread that waited for its provider does nothing after that, and a task does not wait for it.
    assert (desk.paid, len(model.requests)) == ([], way != "akickoff")


async def wait_for_question(desk: Desk) -> None:
    async with desk.guard() as guarded:
        while not (await guarded.report()).needs_you:  # noqa: ASYNC110 Another process could ask as well.
            await asyncio.sleep(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("verdict", "paid"), [("approve", [7]), ("deny", [])])
async def test_a_question_waits_and_only_a_yes_makes_the_call(
    desk: Desk, verdict: str, paid: list[int], way: str
) -> None:
    running = asyncio.ensure_future(kickoff(make_guarded(desk, "PRIVILEGED"), way))
    await wait_for_question(desk)
    assert desk.paid == []
    await desk.decide(verdict)
    assert "Done: " in await running
    assert desk.paid == paid


async def test_an_error_of_the_tool_is_reported_to_the_model(desk: Desk) -> None:
    text = await kickoff(make_guarded(desk, model=FunctionModel(amount=-7, native=True)))
    assert "less than nothing" in text


@pytest.mark.parametrize("native", [False, True])
async def test_an_error_of_the_guard_ends_the_run_and_is_not_reported_to_the_model(desk: Desk, *, native: bool) -> None:
    """CrewAI goes on where a tool or a hook raises: a guard that cannot decide must not."""
    own, model = desk.guard(), FunctionModel(native=native)

    @own.tool
    async def pay(amount: int) -> str:
        """The guard's own tool of the same name."""
        raise NotImplementedError(amount)

    with pytest.raises(ConfigError, match="pay is already a tool of this guard"):
        await kickoff(guard(make_crew(desk, model), guard=own))
    for thread in [each for each in threading.enumerate() if each.name == "halter-crew"]:
        await asyncio.to_thread(thread.join, 60)
    assert (desk.paid, len(model.requests)) == ([], 1)


@pytest.fixture
def hook() -> Iterator[Callable[[Any], None]]:
    added: list[Any] = []

    def add(function: Any) -> None:
        register_before_tool_call_hook(function)
        added.append(function)

    yield add
    for each in added:
        unregister_before_tool_call_hook(each)


async def test_a_hook_that_changes_the_arguments_is_seen(desk: Desk, hook: Callable[[Any], None]) -> None:
    hook(lambda context: context.tool_input.update(amount=8))
    await kickoff(make_guarded(desk, model=FunctionModel(native=True)))
    assert desk.paid == [8]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)


class Stranger(Agent):
    """May do anything in its own loop."""


def test_what_goes_round_the_guard_is_refused(desk: Desk) -> None:
    for options, name in (
        ({"memory": True}, "memory"),
        ({"planning": True}, "planning"),
        ({"agent": {"mcps": ["https://example.com/mcp"]}}, "mcps"),
        ({"model": FunctionModel(additional_params={"tools": [{"type": "web_search"}]})}, "additional_params"),
    ):
        with pytest.raises(ConfigError, match=name):
            make_guarded(desk, **options)
    stranger = Stranger(role="s", goal="g", backstory="b", llm=FunctionModel())
    with pytest.raises(ConfigError, match="Stranger"):
        guard(
            Crew(agents=[stranger], tasks=[Task(description="d", expected_output="e", agent=stranger)]),
            guard=desk.guard(),
        )
    with llm_overlay({"clerk": "openai/gpt-4o"}), pytest.raises(ConfigError, match="llm_overlay"):
        make_guarded(desk).kickoff()
    make_guarded(desk, planning=True, allow_native=["planning"])


@pytest.mark.parametrize("native", [False, True])
async def test_a_tool_that_comes_in_past_the_guard_is_refused_by_name(desk: Desk, *, native: bool) -> None:
    """As those of MCP servers and apps do, which CrewAI adds while it runs; here a hook of the program's does."""

    class Looking(FunctionModel):
        def _say(self, text: str) -> Any:
            return super()._say(text) if "Pay the bill." in text else "Thought: I know.\nFinal Answer: Looked."

    def plant(context: Any) -> None:
        context.crew.tasks[1].tools = [Pay(paid=desk.paid)]

    clerk = Agent(role="clerk", goal="Pay bills", backstory="A clerk", llm=Looking(native=native))
    tasks = [Task(description=each, expected_output="A receipt", agent=clerk) for each in ("Look.", "Pay the bill.")]
    register_before_llm_call_hook(plant)
    try:
        with pytest.raises(ConfigError, match="pay"):
            await kickoff(guard(Crew(agents=[clerk], tasks=tasks), guard=desk.guard()))
    finally:
        unregister_before_llm_call_hook(plant)
    assert desk.paid == []


class AwayOnce(FunctionModel):
    """A provider that is away once, after the call."""

    was_away: bool = False

    def _say(self, text: str) -> Any:
        if "Observation: paid" in text and not self.was_away:
            self.was_away = True
            raise ConnectionError("the provider is away")
        return super()._say(text)


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_is_not_made_again_when_the_kickoff_is_repeated_after_an_error(desk: Desk, way: str) -> None:
    model = AwayOnce(max_tokens=4096)
    with pytest.raises(ConnectionError, match="away"):
        await kickoff(make_guarded(desk, model=model, agent={"max_retry_limit": 0}), way, conversation="one")
    result = await kickoff(make_guarded(desk, model=AwayOnce(max_tokens=4096, was_away=True)), way, conversation="one")
    assert ("paid 7" in str(result), desk.paid) == (True, [7])
    await kickoff(make_guarded(desk), way, conversation="one")
    assert desk.paid == [7, 7]

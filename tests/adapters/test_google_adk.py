"""An agent of Google's ADK under the guard: its own runner and loop, with a model that is a function."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("google.adk")

from google.adk.agents import Agent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.apps import App, ResumabilityConfig
from google.adk.code_executors import BuiltInCodeExecutor
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.tools import google_search
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types
from pydantic import Field

from halter.adapters.google_adk import GuardedAdkRunner, guard
from halter.core.errors import ConfigError
from halter.external.effects import EffectRefused
from tests.adapters.conftest import Desk


class FunctionLlm(BaseLlm):
    """Answers as a provider does: it calls the tool once, and is never longer than it may be."""

    model: str = "function:desk"
    output: int = 10
    amount: int = 7
    gate: Any = None
    requests: list[Any] = Field(default_factory=list)

    async def generate_content_async(
        self,
        llm_request: LlmRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 It is ADK's.
    ) -> AsyncGenerator[LlmResponse, None]:
        self.requests.append(llm_request.config)
        if self.gate is not None:
            self.gate.set()
            await asyncio.Event().wait()
        written = min(self.output, llm_request.config.max_output_tokens)
        usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=100, candidates_token_count=written)
        part = self._say(llm_request)
        if stream and part.text:
            yield LlmResponse(content=types.Content(role="model", parts=[part]), partial=True)
        yield LlmResponse(content=types.Content(role="model", parts=[part]), usage_metadata=usage)

    def _say(self, request: LlmRequest) -> types.Part:
        returned = [
            part.function_response
            for content in request.contents
            for part in content.parts or ()
            if part.function_response and part.function_response.name == "pay"
        ]
        if returned:
            return types.Part(text=f"Done: {returned[-1].response}")
        return types.Part(function_call=types.FunctionCall(name="pay", args={"amount": self.amount}))


def make_runner(
    desk: Desk,
    level: Any = "CONTROLLED",
    cap: float = 1.0,
    model: Any = None,
    sessions: BaseSessionService | None = None,
    tools: Any = (),
    plugins: Any = (),
    **options: Any,
) -> GuardedAdkRunner:
    def pay(amount: int) -> str:
        """Pay an amount."""
        if amount < 0:
            raise ValueError("less than nothing")
        desk.paid.append(amount)
        return f"paid {amount}"

    agent = Agent(
        name="desk", model=model or FunctionLlm(), tools=options.pop("only", [pay, *tools]), **options.pop("agent", {})
    )
    runner = Runner(
        app=App(name="desk", root_agent=agent, plugins=list(plugins), **options.pop("app", {})),
        session_service=sessions or InMemorySessionService(),
        auto_create_session=True,
    )
    return guard(runner, guard=desk.guard(cap), tools={"pay": {"level": level}}, **options)


def say(text: str = "Pay the bill.") -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


async def run(runner: GuardedAdkRunner, message: Any = None, session: str = "s1", **options: Any) -> list[Any]:
    events = runner.run_async(user_id="ada", session_id=session, new_message=message or say(), **options)
    return [event async for event in events]


def text_of(events: list[Any]) -> str:
    return "".join(
        result.text or "" for event in events if event.content and not event.partial for result in event.content.parts
    )


def find_question(events: list[Any]) -> Any:
    (call,) = [c for e in events for c in e.get_function_calls() if c.name == "adk_request_confirmation"]
    return call


def answer(question: Any, *, confirmed: bool = True) -> types.Content:
    """The framework's own yes or no to what a run asked."""
    response_part = types.FunctionResponse(id=question.id, name=question.name, response={"confirmed": confirmed})
    return types.Content(role="user", parts=[types.Part(function_response=response_part)])


def run_sync(runner: GuardedAdkRunner, message: Any = None, session: str = "s1", **options: Any) -> list[Any]:
    return list(runner.run(user_id="ada", session_id=session, new_message=message or say(), **options))


@pytest.mark.parametrize("mode", [StreamingMode.NONE, StreamingMode.SSE])
def test_a_program_without_a_loop_runs_it(desk: Desk, mode: StreamingMode) -> None:
    events = run_sync(make_runner(desk), run_config=RunConfig(streaming_mode=mode))
    assert any(event.partial for event in events) == (mode is StreamingMode.SSE)
    assert (text_of(events), desk.paid) == ("Done: {'result': 'paid 7'}", [7])
    asyncio.run(desk.expect_receipt("COMPLETED", ["pay"], requests=2))


@pytest.mark.filterwarnings("ignore::halter.adapters.attachments.AnswerCut")
def test_runs_of_several_threads_never_pass_one_cap(desk: Desk) -> None:
    desk.policy = {"limits": {"max_cost_usd_per_day": 1}}
    runner = make_runner(desk, model=FunctionLlm(output=39_000), max_output_tokens=40_000)

    def spend(number: int) -> Any:
        try:
            return run_sync(runner, session=f"s{number}")
        except EffectRefused as refused:
            return refused.outcome

    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(spend, range(20)))
    assert results.count("cost_cap_reached") >= 18
    assert Decimal("0.5") < asyncio.run(desk.read_spending()) <= 1


def test_a_question_ends_a_run_without_a_loop_and_another_one_continues_it(desk: Desk) -> None:
    sessions = InMemorySessionService()
    question = find_question(run_sync(make_runner(desk, "PRIVILEGED", sessions=sessions)))
    asyncio.run(desk.decide("approve"))
    last = run_sync(make_runner(desk, "PRIVILEGED", sessions=sessions), answer(question))
    assert (text_of(last), desk.paid) == ("Done: {'result': 'paid 7'}", [7])


def test_a_run_without_a_loop_that_is_left_ends_its_request(desk: Desk) -> None:
    runner = make_runner(desk)
    events = runner.run(user_id="ada", session_id="s1", new_message=say())
    next(events)
    events.close()
    assert asyncio.run(desk.read_spending()) > 0
    assert [each.name for each in threading.enumerate() if each.name == "halter guard"] == []


async def test_a_tool_of_a_toolset_is_admitted_as_well(desk: Desk) -> None:
    async def pay(amount: int) -> str:
        """Pay an amount."""
        desk.paid.append(amount)
        return f"paid {amount}"

    class Till(BaseToolset):
        async def get_tools(self, readonly_context: Any = None) -> list[Any]:
            return [FunctionTool(pay)]

    desk.policy = {"policy": {"disabled": ["pay"]}}
    assert "disabled" in text_of(await run(make_runner(desk, only=[Till()])))
    assert desk.paid == []


async def test_an_answer_is_never_longer_than_what_fits_the_cap(desk: Desk) -> None:
    model = FunctionLlm()
    config = types.GenerateContentConfig(candidate_count=4)
    await run(
        make_runner(desk, cap=0.03, model=model, max_output_tokens=40_000, agent={"generate_content_config": config})
    )
    assert 0 < model.requests[0].max_output_tokens < 40_000
    assert model.requests[0].candidate_count is None


async def test_a_call_that_is_rejected_in_the_framework_does_not_run_either(desk: Desk) -> None:
    runner = make_runner(desk, "PRIVILEGED")
    question = find_question(await run(runner))
    await desk.decide("approve")
    assert "rejected" in text_of(await run(runner, answer(question, confirmed=False)))
    assert desk.paid == []


async def test_a_tool_that_asks_for_a_confirmation_itself_is_made_again_after_it(desk: Desk) -> None:
    def pay(amount: int, tool_context: ToolContext) -> str:
        """Pay an amount, after a yes."""
        if tool_context.tool_confirmation is None:
            tool_context.request_confirmation(hint="Pay?")
            return "asked"
        desk.paid.append(amount)
        return "paid"

    runner = make_runner(desk, only=[pay])
    question = find_question(await run(runner))
    assert desk.paid == []
    await run(runner, answer(question))
    assert desk.paid == [7]


async def test_an_error_of_the_tool_is_the_frameworks(desk: Desk) -> None:
    with pytest.raises(ValueError, match="less than nothing"):
        await run(make_runner(desk, model=FunctionLlm(amount=-7)))


class Soothing(BasePlugin):
    """Turns every error of a tool and of a model into an answer."""

    async def on_tool_error_callback(self, **_: Any) -> dict[str, Any]:
        return {"result": "never mind"}

    async def on_model_error_callback(self, **_: Any) -> LlmResponse:
        return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="never mind")]))


@pytest.mark.parametrize("plugins", [(), (Soothing("soothing"),)])
async def test_an_error_of_the_guard_ends_the_run_and_is_not_reported_to_the_model(desk: Desk, plugins: Any) -> None:
    own, model = desk.guard(), FunctionLlm()

    @own.tool
    async def pay(amount: int) -> str:
        """The guard's own tool of the same name."""
        raise NotImplementedError(amount)

    desk.guard = lambda _: own  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="pay is already a tool of this guard"):
        await run(make_runner(desk, model=model, plugins=plugins))
    assert (desk.paid, len(model.requests)) == ([], 1)


async def test_a_plugin_cannot_turn_a_cap_into_an_answer(desk: Desk) -> None:
    desk.policy = {"limits": {"max_cost_usd_per_day": 0.001}}
    with pytest.raises(EffectRefused):
        await run(make_runner(desk, plugins=[Soothing("soothing")]))


def test_what_goes_round_the_guard_is_refused(desk: Desk) -> None:
    clerk = Agent(name="clerk", model=FunctionLlm())
    for name, planted in (("google_search", google_search), ("clerk", AgentTool(clerk))):
        with pytest.raises(ConfigError, match=name):
            make_runner(desk, tools=[planted])
    with pytest.raises(ConfigError, match="BuiltInCodeExecutor"):
        make_runner(desk, agent={"code_executor": BuiltInCodeExecutor()})

    class Stranger(Agent):
        """May do anything in its own loop."""

    with pytest.raises(ConfigError, match="stranger"):
        make_runner(desk, agent={"sub_agents": [Stranger(name="stranger")]})
    make_runner(desk, tools=[google_search], allow_native=["google_search"])


class Planting(BasePlugin):
    """Brings a tool that runs at the provider, or past the guard, with each request."""

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> None:
        if self.name == "web":
            llm_request.config.tools.append(types.Tool(google_search=types.GoogleSearch()))
        else:
            llm_request.tools_dict["pay"] = FunctionTool(lambda amount: amount)


@pytest.mark.parametrize(("planted", "named"), [("web", "google_search"), ("tool", "pay")])
async def test_what_a_plugin_plants_is_refused_before_the_model_is_asked(desk: Desk, planted: str, named: str) -> None:
    model = FunctionLlm()
    with pytest.raises(ConfigError, match=named):
        await run(make_runner(desk, model=model, plugins=[Planting(planted)]))
    assert model.requests == []


async def test_a_runner_without_the_guard_is_refused_at_its_first_request(desk: Desk) -> None:
    model = FunctionLlm()
    bare = Runner(
        app=App(name="desk", root_agent=make_runner(desk, model=model).agent),
        session_service=InMemorySessionService(),
        auto_create_session=True,
    )
    with pytest.raises(ConfigError, match="outside a session"):
        [event async for event in bare.run_async(user_id="ada", session_id="s1", new_message=say())]
    assert (model.requests, desk.paid) == ([], [])


class ForgettingSessions(InMemorySessionService):
    """A session service whose database is away once, when the result of a call is to be stored."""

    has_failed = False

    async def append_event(self, session: Any, event: Any) -> Any:
        if event.get_function_responses() and not self.has_failed:
            self.has_failed = True
            raise OSError("the database of sessions is away")
        return await super().append_event(session, event)


@pytest.mark.filterwarnings("ignore:.*EXPERIMENTAL:UserWarning")
async def test_a_call_whose_result_was_not_stored_is_not_made_again_when_its_invocation_is_resumed(desk: Desk) -> None:
    sessions = ForgettingSessions()
    runner = make_runner(desk, sessions=sessions, app={"resumability_config": ResumabilityConfig(is_resumable=True)})
    with pytest.raises(OSError, match="away"):
        await run(runner)
    session = await sessions.get_session(app_name="desk", user_id="ada", session_id="s1")
    assert session is not None
    events = runner.run_async(user_id="ada", session_id="s1", invocation_id=session.events[0].invocation_id)
    assert "paid 7" in text_of([event async for event in events])
    assert desk.paid == [7]
    await desk.expect_receipt("COMPLETED", ["pay"], requests=2)

"""An agent as an object, for programs.

```python
agent = Agent("desk", model="anthropic:claude-sonnet-4-5", store="runs.db", instructions="You keep the desk.")

@agent.tool(level="SAFE", effect="read")
async def weather(city: str) -> str: ...

result = agent.run_sync("Is it going to rain in Oslo?")
print(result.text, result.cost_usd)
```

It runs as an agent of a folder does: guarded, capped, journaled, and gone on with after any crash. Used as an async
context manager it keeps its store open from run to run.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import msgspec

from halter.app.agent import Assembled, assembled, unique
from halter.app.agent_context import AgentContext, Models, models_of
from halter.app.opened import App
from halter.app.pacing import against_pacing
from halter.app.policy import written_fleet
from halter.app.program import Program, ProgramOptions, agent_said, secrets_of
from halter.app.protected import hold, protected_for
from halter.app.result import Result, final_answer, result_of
from halter.app.talking import begin, claim_session, reopen, say
from halter.brain.loop import NOBODY, Watching
from halter.brain.session_runtime import Waits
from halter.brain.turn import FINAL_ANSWER
from halter.config.fleet import Fleet
from halter.config.resolve import against_tools, resolve_agent
from halter.core.errors import ConfigError
from halter.core.ids import session_stream
from halter.core.messages import Model, StreamChunk
from halter.core.options import demand_known
from halter.core.ports import whole
from halter.core.tools import Tool
from halter.core.vocabulary import SessionKind
from halter.state.receipt import receipt
from halter.tools.tool import FunctionTool
from halter.tools.tool import tool as made_tool
from halter.work.verbs import verb_specs

T = TypeVar("T")


def _nobody(*_: object) -> None:
    """Nobody is told that a person has to decide."""


class AgentOptions(ProgramOptions, total=False):
    """What may be said of an agent, all of it optional: the keys of its file, under the same names.

    `model` and `fallback_models` are names, or models of the program's own. `waits` hears when a person has to decide.
    """

    model: str | Model
    fallback_models: Sequence[str | Model]
    model_for: Mapping[str, str]
    providers: Mapping[str, Any]
    instructions: str
    tool_calls: str
    temperature: float
    reflex: Sequence[Any]
    limits: Mapping[str, Any]
    waits: Waits


KEYS = ("model_for", "providers", "instructions", "tool_calls", "temperature", "reflex")


class Agent(Program):
    """One agent over one store."""

    NOUN = "agent"

    def __init__(self, name: str = "agent", *, store: str | Path, **options: Unpack[AgentOptions]) -> None:
        demand_known(options, AgentOptions.__optional_keys__, "an agent")
        super().__init__(name, store, options)
        self._said_of = options
        self._folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path, *, store: str | Path, **options: Unpack[AgentOptions]) -> Self:
        """Take the agent of a folder. Its code runs only if a person trusted it."""
        agent = cls(Path(folder).name, store=store, **options)
        agent._folder = Path(folder)
        return agent

    @overload
    async def run(
        self,
        message: str,
        *,
        output_type: type[T],
        session: str = ...,
        id: str = ...,
        deps: Any = ...,
        kind: SessionKind = ...,
    ) -> Result[T]: ...
    @overload
    async def run(
        self, message: str, *, session: str = ..., id: str = ..., deps: Any = ..., kind: SessionKind = ...
    ) -> Result[str]: ...
    async def run(
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "task",
        output_type: type[Any] | None = None,
    ) -> Result[Any]:
        """Give the agent something to do, and wait until it is done, or waits for somebody.

        With an earlier `session` it goes on with that one. A new one may be given an `id`: a program that crashed says
        the same once more, and the session goes on where it was. An `output_type` is what the answer must fit.
        """
        async with self._for_once() as speaking:
            session = await _spoken_to(speaking, message, session, id, kind)
            return await self._attended(speaking, session, deps, output_type)

    async def resume(
        self, session: str, message: str = "", *, deps: Any = None, output_type: type[Any] | None = None
    ) -> Result[Any]:
        """Go on with a session, whatever it stopped at: a crash, a rest, or an end that was not by a cancel."""
        async with self._for_once() as speaking:
            await reopen(speaking, session)
            if message:
                await say(speaking, session, message)
            return await self._attended(speaking, session, deps, output_type)

    async def stream(
        self,
        message: str,
        *,
        session: str = "",
        id: str = "",  # noqa: A002 It is the word for it everywhere.
        deps: Any = None,
        kind: SessionKind = "chat",
    ) -> AsyncGenerator[StreamChunk | Result[str]]:
        """Run, and yield the answer as it comes; the last thing is the result.

        A chunk that says `discard` takes back what the attempt before it said.
        """
        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        async with self._for_once() as speaking:
            session = await _spoken_to(speaking, message, session, id, kind)
            watching = Watching(chunks.put_nowait)
            running = asyncio.create_task(self._attended(speaking, session, deps, None, watching))
            running.add_done_callback(lambda _: chunks.put_nowait(None))
            try:
                while (chunk := await chunks.get()) is not None:
                    yield chunk
                yield await running
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

    def run_sync(self, message: str, **options: Any) -> Result[Any]:
        """Do the same as `run`, in a program that is not async."""
        return asyncio.run(self.run(message, **options))

    async def _attended(
        self,
        speaking: AgentContext,
        session: str,
        deps: Any,
        output_type: type[Any] | None,
        watching: Watching = NOBODY,
    ) -> Result[Any]:
        agent = _heard(speaking.agent) if watching.listen is not None else speaking.agent
        speaking = msgspec.structs.replace(speaking, agent=_given(agent, deps))
        answer = None if output_type is None else answer_tool(output_type)
        waits = self._said_of.get("waits", _nobody)
        claimed = await claim_session(speaking, session, watching=watching, waits=waits, answer=answer)
        came, loop = await claimed.conversation.attend(), claimed.loop
        made = receipt(await whole(speaking.store, session_stream(session)))
        result = result_of(came, loop, made)
        if output_type is None:
            return result
        arguments = final_answer(loop.messages) if loop.turn.answered else None
        output = None if arguments is None else _output(output_type, arguments)
        return msgspec.structs.replace(result, output=output)

    @asynccontextmanager
    async def _for_once(self) -> AsyncGenerator[AgentContext]:
        """Use what is open, or open it for this once."""
        if self._open is not None:
            yield self._open
            return
        async with self._opening() as speaking:
            yield speaking

    async def _assembled(self, app: App, stack: AsyncExitStack) -> tuple[Assembled, Models]:
        given: Mapping[str, Model] = {}
        if self._folder is None:
            agent, given = self._said(app.fleet)
        else:
            agent = await stack.enter_async_context(assembled(app, self._folder))
        return agent, await stack.enter_async_context(models_of(app, agent, given))

    def _written(self) -> Fleet | None:
        """Read the fleet's file of an agent in a folder, unless the program says something of the fleet itself."""
        said = super()._written()
        return written_fleet(self._settings) if said is None and self._folder is not None else said

    def _said(self, fleet: Fleet) -> tuple[Assembled, Mapping[str, Model]]:
        """Read what was said in Python as if it stood in the files, so that the same is checked in the same words."""
        options = self._said_of
        fallbacks = options.get("fallback_models", ())
        if isinstance(fallbacks, str):
            raise ConfigError(f"`fallback_models` is the text {fallbacks!r}, but must be a list of models.")
        named = [*([options["model"]] if "model" in options else []), *fallbacks]
        given = {str(each.name): each for each in named if not isinstance(each, str)}
        more: dict[str, Any] = {key: value for key, value in options.items() if key in KEYS}
        if not given and named:
            more |= {"model": named[0]} | ({"fallback_models": named[1:]} if named[1:] else {})
        agent = agent_said(self._name, options, "the agent", options.get("limits", {}), more)
        resolved = resolve_agent(fleet, agent, None)
        if given:
            names = [each if isinstance(each, str) else str(each.name) for each in named]
            mind = msgspec.structs.replace(resolved.mind, model=names[0], fallback_models=tuple(names[1:]))
            resolved = replace(resolved, mind=mind)
        against_tools(resolved.policy, agent, (*(tool.spec for tool in self._tools), *verb_specs()))
        against_pacing(resolved.policy, resolved.pacing, agent, self._tools)
        hold(self._tools, protected_for(self._settings, None, None))
        secrets = secrets_of(options, self._environ)
        return Assembled(**resolved.parts(), tools=unique(self._tools), secrets=secrets), given


async def _spoken_to(speaking: AgentContext, message: str, session: str, new: str, kind: SessionKind) -> str:
    """Say something to a session that there is, or begin one with it; what was begun before is not begun again."""
    if not session:
        return await begin(speaking, message, kind, new)
    await reopen(speaking, session)
    await say(speaking, session, message)
    return session


def _heard(agent: Assembled) -> Assembled:
    """Let answers come word by word for whoever listens, unless somebody wrote that they do not."""
    mind = agent.mind
    streams = True if mind.streaming is None else mind.streaming
    return replace(agent, mind=msgspec.structs.replace(mind, streaming=streams))


def _given(agent: Assembled, deps: Any) -> Assembled:
    """Give its tools what the program has for them."""
    if deps is None:
        return agent
    tools = {name: each.given(deps) if isinstance(each, FunctionTool) else each for name, each in agent.tools.items()}
    return replace(agent, tools=tools)


def answer_tool(output_type: type[Any]) -> Tool:
    """Make the tool by which a model gives its answer in a form: what does not fit is told, and asked for again."""

    async def answer(value: Any) -> str:  # noqa: ARG001 It stands in the journal as the call's arguments.
        return "Your answer was taken."

    answer.__annotations__["value"] = output_type
    answer.__doc__ = "Give your final answer. Your turn ends with it."
    return made_tool(answer, name=FINAL_ANSWER, level="SAFE", effect="read", idempotent=True)


def _output(output_type: type[T], arguments: str) -> T:
    from pydantic import TypeAdapter

    return TypeAdapter(output_type).validate_python(msgspec.json.decode(arguments)["value"])

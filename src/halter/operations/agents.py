"""Agents whose folders the server was started with: messages, triggers, routes and promotions.

Work started here runs in the background, under the name of the person who asked; after a crash it resumes like any
other session.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from halter.core.errors import NotDone
from halter.core.events import TurnEnded
from halter.core.ids import SessionId, make_worker_id, session_stream
from halter.operations import artifacts
from halter.operations.artifacts import LeftName, Settled, left_meant
from halter.operations.control import Text
from halter.operations.desk import Agent, Desk, Done, Name, Reason, Words, refused, wrong
from halter.operations.fleet import TriggerName
from halter.operations.journal import Confirmed
from halter.operations.queries import all_events
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.front_door.route import RoutingDecision
    from halter.runtime.agent_context import AgentContext

T = TypeVar("T")
Message = Annotated[Words, Meta(min_length=1, description="The message.")]
GoOn = Annotated[Name, Meta(description="A session to continue; without one, another begins.")]
Kind = Annotated[Literal["task", "chat"], Meta(description="A task ends when it is done; a chat waits for more.")]
FrontDoor = Annotated[
    bool, Meta(description="Answer without a model what needs none; false sends everything to the model.")
]


@dataclass(slots=True)
class AgentFolders:
    """The folders of agents by name, and the background work started with them."""

    folders: Mapping[str, Path] = field(default_factory=dict[str, Path])
    tell: Callable[[str], None] = lambda _: None
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the background work; its sessions stay where they are."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def start(self, job: Coroutine[Any, Any, None], begun: asyncio.Future[T]) -> T:
        """Run a job in the background and wait until it has begun. Later failures go to `tell`."""
        task = asyncio.create_task(job)
        self._running.add(task)
        task.add_done_callback(lambda task: self._ended(task, told=begun.done()))
        await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            task.result()
        return begun.result()

    def _ended(self, task: asyncio.Task[None], *, told: bool) -> None:
        self._running.discard(task)
        if told and not task.cancelled() and (error := task.exception()) is not None:
            self.tell(str(error))


class Route(msgspec.Struct, frozen=True):
    """Which route a message takes, and why."""

    route: str
    strategy: str | None
    why: str


class Heard(Done, frozen=True):
    """What became of a message: answered at the front door, or passed on to a session, whose id is the subject."""

    answered: bool
    ok: bool = True
    text: str = ""
    route: Route | None = None


@asynccontextmanager
async def speaking_with(app: Runtime, folder: Path, tell: Callable[[str], None]) -> "AsyncGenerator[AgentContext]":
    """Assemble an agent for a conversation; `tell` receives what it waits for, and what was left out of it."""
    from halter.dispatch.heartbeat import keep_leases
    from halter.runtime.agent_context import AgentContext, models_of
    from halter.runtime.assemble import assemble_agent

    worker = make_worker_id("talk", app.ids)
    async with (
        assemble_agent(app, folder, tell=tell) as agent,
        models_of(app, agent) as models,
        keep_leases(app.store, app.clock, worker, pulse=app.pulse),
    ):
        for sentence in agent.left_out:
            tell(sentence)
        speaking = AgentContext(app, agent, models, worker)
        speaking.demand_model()
        yield speaking


def folder_of(desk: Desk, agent: str) -> Path:
    desk.demand_agent(agent)
    folder = None if desk.agents is None else desk.agents.folders.get(agent)
    if folder is None:
        raise NotDone(f"This server has no folder of {agent!r}: start it with `halter serve FOLDER`.", "missing")
    return folder


async def _started(
    desk: Desk,
    agent: str,
    begin: "Callable[[AgentContext, Path], Awaitable[tuple[Heard, Callable[[], Awaitable[Any]]]]]",
) -> Heard:
    """Begin something with an agent, and answer as soon as it has begun."""
    folder, agents = folder_of(desk, agent), desk.agents
    if agents is None or desk.app.policy is None or desk.app.doubt is not None:
        refused("Nothing may run here: this store was opened only to look at it, or lacks something.")
    app = replace(desk.app, settings=replace(desk.app.settings, person=desk.who.name))
    begun: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()

    async def job() -> None:
        async with speaking_with(app, folder, agents.tell) as speaking:
            heard, rest = await begin(speaking, folder)
            begun.set_result(heard)
            await rest()

    return await agents.start(job(), begun)


async def say(
    desk: Desk, agent: Agent, text: Text, *, session: GoOn = "", kind: Kind = "task", front_door: FrontDoor = True
) -> Heard:
    """Give an agent something to do: begin a session, or say the next thing to one.

    A caller who sees only some agents bypasses the front door, whose answers cover every agent.
    """
    desk.demand("operator", "give an agent something to do")
    known = (await desk.session(session)).session if session else ""
    if not text.strip():
        wrong("There is no task: send a message to the agent.")
    at_door = front_door and not desk.who.agents

    async def begin(speaking: "AgentContext", _: Path) -> tuple[Heard, Callable[[], Awaitable[Any]]]:
        from halter.runtime.front_door import ForwardedMessage, handle_message, send_message
        from halter.runtime.sessions import attend_session, reopen_agent_session

        if known:
            await reopen_agent_session(speaking, known)
        name, route = SessionId(known or desk.app.ids.new()), None
        told = False
        if at_door:
            answering = bool(known) and await asks(desk.app, name)
            done = await handle_message(speaking, name, text, kind=kind, answering=answering)
            route = _route(done.routed)
            if not isinstance(done, ForwardedMessage):
                answer = Heard(done.session, done.answer, answered=True, ok=done.ok, text=done.answer, route=route)
                return answer, _nothing
            told = done.told
        if not told:
            await send_message(speaking, name, text, kind)
        passed_on = Heard(name, f"{agent} works on it in session {name}.", answered=False, route=route)
        return passed_on, lambda: attend_session(speaking, name)

    return await _started(desk, agent, begin)


async def asks(app: Runtime, session: SessionId) -> bool:
    """Return whether a session waits for an answer to its agent's question."""
    events = await all_events(app, session_stream(session))
    last = next((stored.event for stored in reversed(events) if isinstance(stored.event, TurnEnded)), None)
    return isinstance(last, TurnEnded) and last.why == "asked"


async def _nothing() -> None:
    pass


async def run_trigger(desk: Desk, agent: Agent, name: TriggerName) -> Heard:
    """Run a trigger now, on the same path as its schedule or a delivery."""
    desk.demand("operator", "run a trigger by hand")

    async def begin(speaking: "AgentContext", folder: Path) -> tuple[Heard, Callable[[], Awaitable[Any]]]:
        from halter.runtime.triggers import attend_run_here, run_now

        session = await run_now(speaking, folder, name, None)
        heard = Heard(session, f"{agent}/{name} runs in session {session}.", answered=False)
        return heard, lambda: attend_run_here(speaking, folder, session)

    return await _started(desk, agent, begin)


async def route_message(desk: Desk, agent: Agent, text: Message) -> Route:
    """Show which route a message to an agent would take, and why. Nothing is done."""
    from halter.config.agent_files import read_agent
    from halter.config.resolve import resolve_agent
    from halter.front_door.route import route_message
    from halter.runtime.front_door import build_surroundings, declares_tools
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    app, folder = desk.app, folder_of(desk, agent)
    fleet = (await resolve_effective_policy(app.store, read_local_fleet(app.settings))).fleet
    known = resolve_agent(fleet, read_agent(folder), folder)
    has_tools = declares_tools(known, folder)
    return _route(route_message(text, await build_surroundings(known, app.store, app.clock.now(), has_tools=has_tools)))


def _route(routed: "RoutingDecision") -> Route:
    return Route(routed.route, routed.strategy, routed.why)


async def promote(desk: Desk, proposal: LeftName, *, confirmed: Confirmed, reason: Reason = "") -> Settled:
    """Write a proposal into the agent's AGENTS.md, which all of its sessions read."""
    desk.demand("admin", "promote anything")
    found = await left_meant(desk, proposal, "proposals")
    folder = folder_of(desk, found.agent)
    if not confirmed:
        wrong(f"All sessions of {found.agent} would read it: confirm it with `confirmed: true`.")
    return await promote_into(desk, found, folder, reason)


async def promote_into(desk: Desk, found: artifacts.Artifact, folder: Path, reason: str) -> Settled:
    """Write a proposal into a folder's AGENTS.md, and settle it."""
    artifacts.write_context(folder, artifacts.render_context_file(folder, found))
    await artifacts.settle_artifact(desk.app, found, "promoted", reason, by=desk.who.name)
    sentence = f"{found.id} stands in {folder}/AGENTS.md now: every session of the agent reads it."
    return Settled(found.id, sentence, "promoted")

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
from halter.operations.artifacts import ArtifactSettled, LeftName, resolve_artifact
from halter.operations.control import Text
from halter.operations.desk import Actor, Agent, Done, Name, Reason, Words, fail_conflict, fail_invalid
from halter.operations.fleet import TriggerName
from halter.operations.journal import Confirmed
from halter.operations.queries import read_all_events
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
        task.add_done_callback(lambda task: self._on_end(task, told=begun.done()))
        await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            task.result()
        return begun.result()

    def _on_end(self, task: asyncio.Task[None], *, told: bool) -> None:
        self._running.discard(task)
        if told and not task.cancelled() and (error := task.exception()) is not None:
            self.tell(str(error))


class Route(msgspec.Struct, frozen=True):
    """Which route a message takes, and why."""

    route: str
    strategy: str | None
    why: str


class MessageSent(Done, frozen=True):
    """What became of a message: answered at the front door, or passed on to a session, whose id is the subject."""

    answered: bool
    ok: bool = True
    text: str = ""
    route: Route | None = None


@asynccontextmanager
async def speaking_with(app: Runtime, folder: Path, report: Callable[[str], None]) -> "AsyncGenerator[AgentContext]":
    """Assemble an agent for a conversation; `tell` receives what it waits for, and what was left out of it."""
    from halter.dispatch.heartbeat import keep_leases
    from halter.runtime.agent_context import AgentContext, models_of
    from halter.runtime.assemble import assemble_agent

    worker = make_worker_id("talk", app.ids)
    async with (
        assemble_agent(app, folder, report=report) as agent,
        models_of(app, agent) as models,
        keep_leases(app.store, app.clock, worker, liveness=app.liveness),
    ):
        for sentence in agent.left_out:
            report(sentence)
        speaking = AgentContext(app, agent, models, worker)
        speaking.require_model()
        yield speaking


def folder_of(actor: Actor, agent: str) -> Path:
    actor.require_agent(agent)
    folder = None if actor.agents is None else actor.agents.folders.get(agent)
    if folder is None:
        raise NotDone(f"This server has no folder of {agent!r}: start it with `halter serve FOLDER`.", "missing")
    return folder


async def _start(
    actor: Actor,
    agent: str,
    begin: "Callable[[AgentContext, Path], Awaitable[tuple[MessageSent, Callable[[], Awaitable[Any]]]]]",
) -> MessageSent:
    """Begin something with an agent, and answer as soon as it has begun."""
    folder, agents = folder_of(actor, agent), actor.agents
    if agents is None or actor.app.policy is None or actor.app.doubt is not None:
        fail_conflict("Nothing may run here: this store was opened only to look at it, or lacks something.")
    app = replace(actor.app, settings=replace(actor.app.settings, person=actor.principal.name))
    begun: asyncio.Future[MessageSent] = asyncio.get_running_loop().create_future()

    async def job() -> None:
        async with speaking_with(app, folder, agents.tell) as speaking:
            heard, rest = await begin(speaking, folder)
            begun.set_result(heard)
            await rest()

    return await agents.start(job(), begun)


async def give_message(
    actor: Actor, agent: Agent, text: Text, *, session: GoOn = "", kind: Kind = "task", front_door: FrontDoor = True
) -> MessageSent:
    """Give an agent something to do: begin a session, or say the next thing to one.

    A caller who sees only some agents bypasses the front door, whose answers cover every agent.
    """
    actor.demand("operator", "give an agent something to do")
    known = (await actor.session(session)).session if session else ""
    if not text.strip():
        fail_invalid("There is no task: send a message to the agent.")
    at_door = front_door and not actor.principal.agents

    async def begin(speaking: "AgentContext", _: Path) -> tuple[MessageSent, Callable[[], Awaitable[Any]]]:
        from halter.runtime.front_door import ForwardedMessage, handle_message, send_message
        from halter.runtime.sessions import attend_session, reopen_agent_session

        if known:
            await reopen_agent_session(speaking, known)
        name, route = SessionId(known or actor.app.ids.make()), None
        told = False
        if at_door:
            answering = bool(known) and await is_waiting_for_answer(actor.app, name)
            done = await handle_message(speaking, name, text, kind=kind, answering=answering)
            route = _route(done.routed)
            if not isinstance(done, ForwardedMessage):
                answer = MessageSent(
                    done.session, done.answer, answered=True, ok=done.ok, text=done.answer, route=route
                )
                return answer, _noop
            told = done.told
        if not told:
            await send_message(speaking, name, text, kind)
        passed_on = MessageSent(name, f"{agent} works on it in session {name}.", answered=False, route=route)
        return passed_on, lambda: attend_session(speaking, name)

    return await _start(actor, agent, begin)


async def is_waiting_for_answer(app: Runtime, session: SessionId) -> bool:
    """Return whether a session waits for an answer to its agent's question."""
    events = await read_all_events(app, session_stream(session))
    last = next((stored.event for stored in reversed(events) if isinstance(stored.event, TurnEnded)), None)
    return isinstance(last, TurnEnded) and last.why == "asked"


async def _noop() -> None:
    pass


async def run_trigger(actor: Actor, agent: Agent, name: TriggerName) -> MessageSent:
    """Run a trigger now, on the same path as its schedule or a delivery."""
    actor.demand("operator", "run a trigger by hand")

    async def begin(speaking: "AgentContext", folder: Path) -> tuple[MessageSent, Callable[[], Awaitable[Any]]]:
        from halter.runtime.triggers import attend_run_here, run_now

        session = await run_now(speaking, folder, name, None)
        heard = MessageSent(session, f"{agent}/{name} runs in session {session}.", answered=False)
        return heard, lambda: attend_run_here(speaking, folder, session)

    return await _start(actor, agent, begin)


async def route_message(actor: Actor, agent: Agent, text: Message) -> Route:
    """Show which route a message to an agent would take, and why. Nothing is done."""
    from halter.config.agent_files import read_agent
    from halter.config.resolve import resolve_agent
    from halter.front_door.route import route_message
    from halter.runtime.front_door import build_surroundings, declares_tools
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    app, folder = actor.app, folder_of(actor, agent)
    fleet = (await resolve_effective_policy(app.store, read_local_fleet(app.settings))).fleet
    known = resolve_agent(fleet, read_agent(folder), folder)
    has_tools = declares_tools(known, folder)
    return _route(route_message(text, await build_surroundings(known, app.store, app.clock.now(), has_tools=has_tools)))


def _route(route: "RoutingDecision") -> Route:
    return Route(route.route, route.strategy, route.why)


async def promote(actor: Actor, proposal: LeftName, *, confirmed: Confirmed, reason: Reason = "") -> ArtifactSettled:
    """Write a proposal into the agent's AGENTS.md, which all of its sessions read."""
    actor.demand("admin", "promote anything")
    found = await resolve_artifact(actor, proposal, "proposals")
    folder = folder_of(actor, found.agent)
    if not confirmed:
        fail_invalid(f"All sessions of {found.agent} would read it: confirm it with `confirmed: true`.")
    return await promote_into(actor, found, folder, reason)


async def promote_into(actor: Actor, found: artifacts.Artifact, folder: Path, reason: str) -> ArtifactSettled:
    """Write a proposal into a folder's AGENTS.md, and settle it."""
    artifacts.write_context(folder, artifacts.render_context_file(folder, found))
    await artifacts.settle_artifact(actor.app, found, "promoted", reason, by=actor.principal.name)
    sentence = f"{found.id} stands in {folder}/AGENTS.md now: every session of the agent reads it."
    return ArtifactSettled(found.id, sentence, "promoted")

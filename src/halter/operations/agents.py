"""Agents whose folders the server was started with: messages, triggers, routes and promotions.

Work started here runs in the background, under the name of the principal; after a crash it resumes like any other
session.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from halter.config.agent_files import read_agent
from halter.config.resolve import resolve_agent
from halter.core.errors import NotDone
from halter.core.events import TurnEnded
from halter.core.ids import SessionId, make_worker_id, session_stream
from halter.dispatch.heartbeat import renew_leases
from halter.front_door import route
from halter.front_door.route import RoutingDecision
from halter.operations.actor import (
    Actor,
    Agent,
    Confirmed,
    Done,
    Name,
    Reason,
    Text,
    TriggerName,
    Words,
    fail_conflict,
    fail_invalid,
)
from halter.operations.artifacts import ArtifactName, ArtifactSettled, promote_into, resolve_artifact
from halter.operations.queries import read_all_events
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.message_router import (
    ForwardedMessage,
    build_surroundings,
    declares_tools,
    handle_message,
    send_message,
)
from halter.runtime.runtime import Runtime, read_local_fleet, resolve_effective_policy
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import reopen_agent_session
from halter.runtime.trigger_runner import attend_run_here, run_now

T = TypeVar("T")
Message = Annotated[Words, Meta(min_length=1, description="The message.")]
ExistingSession = Annotated[Name, Meta(description="The session to continue (default: a new one).")]
Kind = Annotated[
    Literal["task", "chat"], Meta(description="A task ends when it is done; a chat waits for more messages.")
]
FrontDoor = Annotated[
    bool, Meta(description="Answer without a model where possible; false sends every message to the model.")
]


class Route(msgspec.Struct, frozen=True):
    """The route of a message, and the reason for it."""

    route: str
    strategy: str | None
    why: str


class MessageSent(Done, frozen=True):
    """The result of a message: answered at the front door, or passed to a session, whose id is the subject."""

    answered: bool
    ok: bool = True
    text: str = ""
    route: Route | None = None


@asynccontextmanager
async def speaking_with(app: Runtime, folder: Path, report: Callable[[str], None]) -> AsyncGenerator[AgentRuntime]:
    """Assemble an agent for a conversation. `report` receives what it waits for, and which parts were left out."""
    worker = make_worker_id("talk", app.ids)
    async with (
        open_folder_agent(app, folder, worker, report=report) as agent,
        renew_leases(app.store, app.clock, worker, liveness=app.liveness),
    ):
        for sentence in agent.unavailable_tools:
            report(sentence)
        agent.require_model()
        yield agent


def folder_of(actor: Actor, agent: str) -> Path:
    actor.require_agent(agent)
    folder = None if actor.agents is None else actor.agents.folders.get(agent)
    if folder is None:
        raise NotDone(f"This server has no folder of {agent!r}. Start it with `halter serve FOLDER`.", "missing")
    return folder


async def _start(
    actor: Actor,
    agent: str,
    begin: Callable[[AgentRuntime, Path], Awaitable[tuple[MessageSent, Callable[[], Awaitable[Any]]]]],
) -> MessageSent:
    """Start background work with an agent; return as soon as it has started."""
    folder, agents = folder_of(actor, agent), actor.agents
    if agents is None or actor.app.policy is None or actor.app.older_copy is not None:
        fail_conflict("No agent can run here: the store was opened read-only, or events are missing from it.")
    app = replace(actor.app, settings=replace(actor.app.settings, person=actor.principal.name))
    result_future: asyncio.Future[MessageSent] = asyncio.get_running_loop().create_future()

    async def job() -> None:
        async with speaking_with(app, folder, agents.report) as context:
            message_result, finish = await begin(context, folder)
            result_future.set_result(message_result)
            await finish()

    return await agents.start(job(), result_future)


async def give_message(
    actor: Actor,
    agent: Agent,
    text: Text,
    *,
    session: ExistingSession = "",
    kind: Kind = "task",
    front_door: FrontDoor = True,
) -> MessageSent:
    """Send a message to an agent: start a session, or continue one.

    A principal that sees only some agents bypasses the front door, whose answers cover every agent.
    """
    actor.require_person("operator", "send a message to an agent")
    existing_session = (await actor.session(session)).session if session else ""
    if not text.strip():
        fail_invalid("The message is empty. Send the agent a task.")
    uses_front_door = front_door and not actor.principal.agents

    async def begin(context: AgentRuntime, _: Path) -> tuple[MessageSent, Callable[[], Awaitable[Any]]]:
        if existing_session:
            await reopen_agent_session(context, existing_session)
        name, route = SessionId(existing_session or actor.app.ids.make()), None
        is_posted = False
        if uses_front_door:
            answering = bool(existing_session) and await is_waiting_for_answer(actor.app, name)
            outcome = await handle_message(context, name, text, kind=kind, is_answer=answering)
            route = _route(outcome.routed)
            if not isinstance(outcome, ForwardedMessage):
                answer = MessageSent(
                    outcome.session, outcome.answer, answered=True, ok=outcome.ok, text=outcome.answer, route=route
                )
                return answer, _noop
            is_posted = outcome.is_posted
        if not is_posted:
            await send_message(context, name, text, kind)
        message_result = MessageSent(name, f"{agent} is working on it in session {name}.", answered=False, route=route)
        return message_result, lambda: attend_session(context, name)

    return await _start(actor, agent, begin)


async def is_waiting_for_answer(app: Runtime, session: SessionId) -> bool:
    """Return whether a session waits for an answer to a question of its agent."""
    events = await read_all_events(app, session_stream(session))
    last_turn = next((stored.event for stored in reversed(events) if isinstance(stored.event, TurnEnded)), None)
    return isinstance(last_turn, TurnEnded) and last_turn.why == "asked"


async def _noop() -> None:
    pass


async def run_trigger(actor: Actor, agent: Agent, name: TriggerName) -> MessageSent:
    """Run a trigger now, exactly as if it had fired."""
    actor.require_person("operator", "run a trigger manually")

    async def begin(context: AgentRuntime, folder: Path) -> tuple[MessageSent, Callable[[], Awaitable[Any]]]:
        session = await run_now(context, folder, name, None)
        message_result = MessageSent(session, f"{agent}/{name} runs in session {session}.", answered=False)
        return message_result, lambda: attend_run_here(context, folder, session)

    return await _start(actor, agent, begin)


async def route_message(actor: Actor, agent: Agent, text: Message) -> Route:
    """Show which route a message to an agent would take, and why. Nothing is executed."""
    app, folder = actor.app, folder_of(actor, agent)
    fleet = (await resolve_effective_policy(app.store, read_local_fleet(app.settings))).fleet
    resolved_agent = resolve_agent(fleet, read_agent(folder), folder)
    has_tools = declares_tools(resolved_agent, folder)
    return _route(
        route.route_message(
            text, await build_surroundings(resolved_agent, app.store, app.clock.now(), has_tools=has_tools)
        )
    )


def _route(route: RoutingDecision) -> Route:
    return Route(route.route, route.strategy, route.why)


async def promote(
    actor: Actor, proposal: ArtifactName, *, confirmed: Confirmed, reason: Reason = ""
) -> ArtifactSettled:
    """Add a proposal to the agent's AGENTS.md, which all of its sessions read."""
    actor.require_person("admin", "promote a proposal")
    artifact = await resolve_artifact(actor, proposal, "proposals")
    folder = folder_of(actor, artifact.agent)
    if not confirmed:
        fail_invalid(f"All sessions of {artifact.agent} would read it. Confirm with `confirmed: true`.")
    return await promote_into(actor, artifact, folder, reason)

"""The front door: a message is routed before any model sees it, and what needs none is answered here.

Which way a message took, and why, is an event. It stands in the session's inbox and wakes nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET

from halter.app import planning, quick
from halter.app.agent import OWN_TOOLS
from halter.app.agent_context import AgentContext
from halter.app.delegating import delegate, names_of, neighbours, spoken_for
from halter.app.scripts import play
from halter.app.talking import begin, say
from halter.brain.fastpaths import Plain, Surroundings
from halter.brain.loop import NOBODY, Watching
from halter.brain.recurrence import Unclear
from halter.brain.route import Delegated, Routed, Scheduled, Script, route
from halter.brain.session_runtime import Waits
from halter.config.mcp import MCP_FILE
from halter.config.resolve import ResolvedAgent
from halter.core.errors import ConfigError
from halter.core.events import MessageRouted
from halter.core.ids import FLEET, inbox_stream
from halter.core.ports import Draft, Query, Store, Write, kept
from halter.core.rows import SessionRow
from halter.core.task_rows import TriggerRow
from halter.core.vocabulary import SessionKind
from halter.guard.approvals import needs_you
from halter.work.playbooks import Tell

ANSWER: Final = Routed("strategy", "GOAL", "It answers what the agent asked.", Plain())


class Handled(msgspec.Struct, frozen=True):
    """A message that is done with: what it was answered, and by which other session, if by one."""

    routed: Routed
    answer: str
    ok: bool = True
    session: str = ""


class ToModel(msgspec.Struct, frozen=True):
    """A message that the session's own model has to answer; unless it was `told`, it has yet to be said to it."""

    routed: Routed
    told: bool = False


@dataclass(frozen=True, slots=True)
class Showing:
    """Whoever watches while another session does what a message asks for; `began` hears that its own has begun."""

    watching: Watching = NOBODY
    waits: Waits = lambda _, __: None
    stepped: Tell = lambda _, __: None
    began: Callable[[], None] = lambda: None


UNSEEN: Final = Showing()


async def surroundings(speaking: AgentContext) -> Surroundings:
    """Tell the names that mean something in a message to this agent."""
    now = speaking.app.clock.now()
    return await surroundings_of(speaking.agent, speaking.store, now, has_tools=bool(names_of(speaking)))


async def surroundings_of(agent: ResolvedAgent, store: Store | None, now: int, *, has_tools: bool) -> Surroundings:
    """Tell the names that mean something to an agent: those in its files and, where there is one, in its store."""
    name, rows, waiting = agent.policy.name, (), ()
    if store is not None:
        rows = await store.ask(Query("triggers_of", TriggerRow, {"agent": name}))
        waiting = await needs_you(store, now)
    planned = [row.trigger.partition("/")[2] for row in rows]
    return Surroundings(
        agent=name,
        now=now,
        timezone=agent.policy.caps.zone,
        has_tools=has_tools,
        agents=tuple(neighbours(agent.place)),
        playbooks=tuple(agent.playbooks),
        schedules=tuple(dict.fromkeys([*planned, *(each.name for each in agent.tasks.triggers())])),
        fields=tuple(agent.pacing.fields),
        decisions=tuple(one.decision for one in waiting if one.agent == name),
    )


def declares_tools(agent: ResolvedAgent, folder: Path) -> bool:
    """Tell whether an agent will have tools; which ones its code and its servers bring shows when they run."""
    wanted = agent.policy.tools
    built_in = any(each is not UNSET for each in (wanted.files, wanted.http, wanted.shell))
    own = (folder / OWN_TOOLS).exists() or (folder / MCP_FILE).exists()
    return built_in or own or bool(agent.tasks.verbs)


async def heard(
    speaking: AgentContext,
    session: str,
    text: str,
    *,
    kind: SessionKind = "chat",
    answering: bool = False,
    showing: Showing = UNSEEN,
    ahead: bool = False,
) -> Handled | ToModel:
    """Route what a person says to a session, and do what needs no model of its own.

    A session need not have begun: it begins only for what is a part of it. Who is `answering` a question of the agent's
    is heard by its model, unless they say halt. What was typed `ahead` of what is on the screen agrees to nothing.
    """
    routed = route(text, await surroundings(speaking))
    if answering and routed.route != "halt":
        routed = ANSWER
    if routed.route != "strategy":
        return await _answered(speaking, session, text, routed, ahead=ahead)
    return await _done(speaking, session, text, routed, kind, showing)


async def _answered(speaking: AgentContext, session: str, text: str, routed: Routed, *, ahead: bool) -> Handled:
    answer = await quick.answered(speaking, routed, session, ahead=ahead)
    await _written(speaking, session, routed, text, answer)
    return Handled(routed, answer)


async def _done(
    speaking: AgentContext, session: str, text: str, routed: Routed, kind: SessionKind, showing: Showing
) -> Handled | ToModel:
    match routed.details:
        case Scheduled() as said:
            answer = (await planning.propose(speaking, said)).sentence
        case Unclear(sentence=answer):
            pass
        case Delegated() as said:
            return await _delegated(speaking, session, text, routed, said, kind, showing)
        case Script() as said:
            await _written(speaking, session, routed, text)
            return await _played(speaking, routed, said, showing)
        case _:
            await _written(speaking, session, routed, text, begins=True)
            return ToModel(routed)
    await _written(speaking, session, routed, text, answer)
    return Handled(routed, answer)


async def _delegated(
    speaking: AgentContext,
    session: str,
    text: str,
    routed: Routed,
    said: Delegated,
    kind: SessionKind,
    showing: Showing,
) -> Handled | ToModel:
    """Let another agent do it. Its last words answer in a chat; whoever was given a task answers with them itself."""
    try:
        async with spoken_for(speaking, said.agent) as other:
            await tell(speaking, session, text, kind)
            showing.began()
            await _written(speaking, session, routed, text)
            came = await delegate(speaking, session, other, said.task, showing.watching, showing.waits)
    except ConfigError as error:
        return Handled(routed, str(error), ok=False)
    if kind == "task" and came.over:
        return ToModel(routed, told=True)
    return Handled(routed, came.words, came.ok, came.session)


async def _played(speaking: AgentContext, routed: Routed, said: Script, showing: Showing) -> Handled:
    try:
        played = await play(speaking, said, showing.stepped, showing.waits)
    except ConfigError as error:
        return Handled(routed, str(error), ok=False)
    return Handled(routed, played.sentence, played.ok, played.session)


async def tell(speaking: AgentContext, session: str, text: str, kind: SessionKind) -> None:
    """Say something to a session, or begin it with that."""
    if await _has_begun(speaking, session):
        await say(speaking, session, text)
    else:
        await begin(speaking, text, kind, session)


async def _has_begun(speaking: AgentContext, session: str) -> bool:
    rows = await speaking.store.ask(Query("session", SessionRow, {"session": session}))
    return bool(rows) and rows[0].started_at > 0


async def _written(
    speaking: AgentContext, session: str, routed: Routed, text: str, answer: str = "", *, begins: bool = False
) -> None:
    """Write down which way a message took.

    It stands in the inbox of its session, also of one that `begins` with it, so that it is erased with the session; a
    message that needs no session stands in the fleet's stream.
    """
    redact = speaking.gatehouse().redacted
    said = {"text": redact(text), **({"answer": redact(answer)} if answer else {})}
    body, blob = await kept(speaking.store, msgspec.json.encode(said))
    event = MessageRouted(route=routed.route, strategy=routed.strategy or "", why=redact(routed.why))
    stream = inbox_stream(session) if begins or await _has_begun(speaking, session) else FLEET
    await speaking.store.commit(Write(stream, speaking.app.ids.new(), lambda _: [Draft(event, body, blob)]))

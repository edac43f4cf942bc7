"""Sessions of an agent that thinks: begun, spoken to, gone on with, in this process or in another one."""

from collections.abc import Sequence
from typing import Final

import msgspec

from halter.app.agent_context import AgentContext
from halter.app.attending import Attending, attending, autonomous_of
from halter.app.tasking import given
from halter.brain.loop import NOBODY, Loop, Watching
from halter.brain.session_runtime import Waits
from halter.core.errors import ConfigError
from halter.core.events import ContextGiven, PhaseEntered, SessionStarted
from halter.core.ids import SessionId
from halter.core.newer import left_to_newer
from halter.core.ports import Draft, Lease, Query, kept
from halter.core.rows import SessionRow
from halter.core.text import to_body
from halter.core.tools import Tool
from halter.core.vocabulary import SessionKind
from halter.dispatch.tending import taken
from halter.state import life
from halter.work.conversation import Came

NOTHING_SAID: Final = "There is nothing to do: say something to the agent."


class Before(msgspec.Struct, frozen=True):
    """The session that one follows by itself, and why."""

    session: str
    because: str


async def begin(
    speaking: AgentContext, text: str, kind: SessionKind, session: str = "", before: Before | None = None
) -> SessionId:
    """Start a session; what it is given opens its first turn. One that was started before stays as it is.

    What is handed over from the one `before` it is a model's word: it is not trusted.
    """
    if kind == "task" and not text.strip():
        raise ConfigError(NOTHING_SAID)
    app = speaking.app
    event, more = await beginning(speaking, kind, session or app.ids.new())
    if before is not None:
        event = msgspec.structs.replace(
            event, follows=before.session, because=before.because, origin="model", trusted=False
        )
    body = to_body(speaking.gatehouse().redacted(text))
    committed = await speaking.store.commit(life.start(event, *await kept(speaking.store, body), more))
    if kind == "chat" and not committed.repeated:
        await _pass_on(speaking, event.session, text)
    return SessionId(event.session)


async def beginning(speaking: AgentContext, kind: SessionKind, session: str) -> tuple[SessionStarted, Sequence[Draft]]:
    """Put together how a session begins: what defines it, what people kept of earlier ones, and its first phase."""
    speaking.demand_model()
    agent, store = speaking.agent, speaking.store
    event = SessionStarted(
        session=session,
        agent=agent.policy.name,
        kind=kind,
        started_by=speaking.app.settings.person,
        definition=await speaking.definition(),
        folder=agent.folder,
    )
    more: list[Draft] = []
    memories, precedents, words = await given(store, agent.policy.name)
    if words:
        context = ContextGiven(memories=memories, precedents=precedents)
        more.append(Draft(context, *await kept(store, to_body(words))))
    if kind == "task" and len(agent.policy.phases) > 1:
        more.append(Draft(PhaseEntered(phase=agent.policy.phases[0].name, number=0)))
    return event, more


async def say(speaking: AgentContext, session: str, text: str) -> None:
    """Say something to a session; one that is over is let go on for it."""
    if not text.strip():
        raise ConfigError(NOTHING_SAID)
    app, store = speaking.app, speaking.store
    body, blob = await kept(store, to_body(speaking.gatehouse().redacted(text)))
    event = life.said_by(app.settings.person)
    await store.commit(life.post(session, app.ids.new(), event, body, blob))
    if (await row_of(speaking, session)).kind == "chat":
        await _pass_on(speaking, session, text)


async def _pass_on(speaking: AgentContext, chat: str, text: str) -> None:
    """Let the agent that runs by itself beside a chat know what a person says there: it wakes, and sees it once."""
    beside = await autonomous_of(speaking)
    if beside is None or beside.ended_at is not None or not text.strip():
        return
    app, store = speaking.app, speaking.store
    event = msgspec.structs.replace(life.said_by(app.settings.person), notifies=True, name="message")
    told = speaking.gatehouse().redacted(f"{app.settings.person} says in the chat {chat}: {text}")
    body, blob = await kept(store, to_body(told))
    await store.commit(life.post(beside.session, app.ids.new(), event, body, blob))


async def reopen(speaking: AgentContext, session: str) -> None:
    """Let a session go on that is over. One that was cancelled is over for good."""
    row = await row_of(speaking, session)
    if newer := left_to_newer(row):
        raise ConfigError(newer)
    if row.ended_at is None:
        return
    app = speaking.app
    committed = await speaking.store.commit(life.reopen(session, app.ids.new(), app.settings.person))
    if not committed.events:
        raise ConfigError(f"Session {session} is over ({row.state}, {row.terminal_reason}) and cannot go on.")


async def row_of(speaking: AgentContext, session: str) -> SessionRow:
    """Find a session of this agent."""
    rows = await speaking.store.ask(Query("session", SessionRow, {"session": session}))
    if not rows or not rows[0].started_at:
        raise ConfigError(f"There is no session {session}: look at halter sessions.")
    if rows[0].agent != speaking.agent.policy.name:
        raise ConfigError(f"Session {session} is one of {rows[0].agent}, and this is {speaking.agent.policy.name}.")
    return rows[0]


async def attend(
    speaking: AgentContext,
    session: str,
    *,
    watching: Watching = NOBODY,
    waits: Waits = lambda _, __: None,
    answer: Tool | None = None,
) -> tuple[Came, Loop]:
    """Take a session from where it stands to its next rest or its end."""
    made = await claim_session(speaking, session, watching=watching, waits=waits, answer=answer)
    return await made.conversation.attend(), made.loop


async def claim_session(
    speaking: AgentContext,
    session: str,
    *,
    watching: Watching = NOBODY,
    waits: Waits = lambda _, __: None,
    answer: Tool | None = None,
) -> Attending:
    """Take the lease of a session, and put together what gives it its turns.

    With an `answer`, a tool, the session ends when the model has called it.
    """
    row = await row_of(speaking, session)
    if row.ended_at is not None:
        raise ConfigError(
            f"Session {session} is over ({row.state}, {row.terminal_reason}): resume it, if it may go on."
        )
    lease = await _lease(speaking, session)
    return await attending(speaking, row, lease, watching=watching, waits=waits, answer=answer)


async def _lease(speaking: AgentContext, session: str) -> Lease:
    app = speaking.app
    if newer := left_to_newer(await row_of(speaking, session)):
        raise ConfigError(newer)
    lease = await taken(speaking.store, app.clock, speaking.worker, SessionId(session), speaking.patience)
    if lease is None:
        raise ConfigError(f"Session {session} is over, or another process works on it: look at halter sessions.")
    return lease

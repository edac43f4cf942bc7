"""A session while this process runs it, and the sub-sessions that its calls wait for."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import ConfigError, LeaseLost
from halter.core.events import SessionStarted
from halter.core.ids import AGENT_PREFIX, SessionId, WorkerId, make_sub_session_id, session_stream
from halter.core.messages import Message
from halter.core.ports import ALL_STREAMS, Lease, Query, Stored, Write, read_stream
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.tools import Failed, Tool
from halter.dispatch.heartbeat import acquire_lease, end_unowned_session
from halter.guard.halts import cancel, run_shielded
from halter.loop.concurrency import wait_for_change, watch_changes
from halter.loop.final_text import find_final_text
from halter.loop.loop import TurnLoop
from halter.loop.observer import NO_OBSERVER, LoopObserver
from halter.loop.session_waits import WaitListener
from halter.loop.transcript_reader import read_past
from halter.loop.turn import FINAL_ANSWER
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.session_builder import LiveSession, build_live_session
from halter.runtime.session_origin import read_last_words, read_session_row
from halter.runtime.sub_sessions import (
    MAX_DEPTH,
    AskedByModel,
    begin_sub_session,
    explain_insufficient_cap,
    open_delegate,
)
from halter.tasks.agent_tool import AgentTool
from halter.tasks.conversation import Conclusion
from halter.tasks.result import EndedBefore, find_accepted_call


class NewSession(msgspec.Struct, frozen=True):
    """A session to run. If this process has just started it, it comes with all of its events and maybe its lease.

    `start_write` is the write that starts it, if that is to be committed with the session's first step.
    """

    session: SessionId
    events: tuple[Stored, ...] = ()
    lease: Lease | None = None
    start_write: Write | None = None

    def row(self) -> SessionRow | None:
        """Return the row of a new session as the store has it; None if this process did not start it."""
        event = self.events[0].event if self.events else None
        return make_new_session_row(event, self.events[0].at) if isinstance(event, SessionStarted) else None

    def claim(
        self, agent: AgentRuntime, observer: LoopObserver | None, on_wait: WaitListener, answer_tool: Tool | None
    ) -> Coroutine[Any, Any, LiveSession]:
        """Claim the session, as `claim_session` does, for a caller that does not import this module."""
        return claim_session(agent, self, observer=observer or NO_OBSERVER, on_wait=on_wait, answer_tool=answer_tool)


def make_new_session_row(event: SessionStarted, at: int) -> SessionRow:
    return SessionRow(
        event.session,
        event.agent,
        event.kind,
        definition=event.definition,
        format=event.format,
        started_at=at,
        wake_at=at,
        due_at=at,
    )


async def attend_session(
    agent: AgentRuntime,
    session: str,
    *,
    observer: LoopObserver = NO_OBSERVER,
    waits: WaitListener = lambda _, __: None,
    answer_tool: Tool | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Conclusion, TurnLoop]:
    """Run a session until it parks or ends.

    If `is_interrupted` returns true for a cancellation, a person interrupted the turn: only the turn ends, and the
    session parks.
    """
    live = await claim_session(
        agent, NewSession(SessionId(session)), observer=observer, on_wait=waits, answer_tool=answer_tool
    )
    try:
        return await live.conversation.run_until_parked(), live.loop
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not interrupted():
            raise
        task.uncancel()
        conclusion = await live.conversation.interrupt()
        if conclusion is None:
            raise
        return conclusion, live.loop


async def claim_session(
    agent: AgentRuntime,
    new_session: NewSession,
    *,
    observer: LoopObserver = NO_OBSERVER,
    on_wait: WaitListener = lambda _, __: None,
    answer_tool: Tool | None = None,
) -> LiveSession:
    """Claim a session and build it. With `answer_tool`, it ends when the model has called that tool.

    The events of a new session are complete as long as no other worker has had its lease.
    """
    session = new_session.session
    row = new_session.row() or await _read_open_row(agent, session)
    lease = new_session.lease
    if lease is None:
        lease = await acquire_lease(agent.store, agent.app.clock, agent.worker, session, agent.hold_timeout)
    if lease is None:
        raise ConfigError(f"Session {session} has ended, or another process runs it. See: halter sessions")
    events = new_session.events if lease.generation == 1 else ()
    try:
        return await build_live_session(
            agent,
            row,
            lease,
            observer=observer,
            call_agent=run_agent_tool,
            on_wait=on_wait,
            answer_tool=answer_tool,
            begun=events,
            start_write=new_session.start_write,
        )
    except asyncio.CancelledError:
        await run_shielded(agent.store.release(lease))
        raise


async def _read_open_row(agent: AgentRuntime, session: str) -> SessionRow:
    row = await read_session_row(agent, session)
    if row.ended_at is not None:
        raise EndedBefore(row)
    if newer := explain_newer_format(row):
        raise ConfigError(newer)
    return row


async def run_agent_tool(
    agent: AgentRuntime, session: str, tool: AgentTool, on_wait: WaitListener, task: str, call: str
) -> str:
    """Have another agent do a task, and return its answer. After a crash, the same call continues the sub-session."""
    store, child = agent.store, make_sub_session_id(call)
    parent = await read_session_row(agent, session)
    await _require_depth(agent, parent)
    async with _open_called_agent(agent, tool) as delegate:
        row = next(iter(await store.ask(Query("session", SessionRow, {"session": child}))), None)
        if row is None or not row.started_at:
            request = AskedByModel(child, tool.max_cost, tool.hands_off)
            if not await begin_sub_session(agent, parent, delegate, task, request):
                raise Failed("TooLittleMoney", await explain_insufficient_cap(agent, parent))
        return await _wait_for_end(delegate, parent, child, on_wait)


@contextmanager
def mark_nested(delegate: AgentRuntime, child: str) -> Generator[None]:
    """Mark a sub-session as run by a call of this process, so that the process's dispatcher does not run it too."""
    delegate.nested_sessions.add(SessionId(child))
    try:
        yield
    finally:
        delegate.nested_sessions.discard(SessionId(child))


CHILD_POLLING_INTERVAL: Final = 5 * SECOND
"""Polling interval of a sub-session that another owner runs: its lease may have expired."""


async def _wait_for_end(delegate: AgentRuntime, parent: SessionRow, child: str, on_wait: WaitListener) -> str:
    """Run a sub-session to its end and return its answer, or wait while a dispatcher runs it.

    It has one owner at a time, and after a crash that may be a dispatcher: the answer is the same.
    """
    store, streams = delegate.store, (session_stream(child), ALL_STREAMS)
    async with watch_changes(store, lambda change: change.stream in streams) as change_event:
        while True:
            row = await read_session_row(delegate, child)
            if row.ended_at is not None:
                text = _conclude(row.state, row.terminal_reason, await read_last_words(store, child))
                events = await read_stream(store, session_stream(child))
                return await _find_answer(delegate, (await read_past(child, events, store)).messages, text)
            if newer := explain_newer_format(row):
                raise Failed("Unavailable", newer)
            with mark_nested(delegate, child):
                lease = await acquire_lease(store, delegate.app.clock, delegate.worker, SessionId(child), 0)
                if lease is not None:
                    with suppress(LeaseLost), delegate.app.departures.follow(lease, _lease_of(parent)):
                        return await _run_to_end(delegate, lease, on_wait)
            try:
                await wait_for_change(change_event, CHILD_POLLING_INTERVAL)
            except asyncio.CancelledError:
                await run_shielded(_cancel_elsewhere(delegate, parent, child))
                raise


def _lease_of(row: SessionRow) -> Lease:
    return Lease(SessionId(row.session), WorkerId(row.owner), row.generation)


async def _cancel_elsewhere(delegate: AgentRuntime, parent: SessionRow, child: str) -> None:
    """Cancel a sub-session that another owner runs, unless its parent will continue to wait in another process."""
    if not delegate.app.departures.includes(_lease_of(parent)):
        by = f"{AGENT_PREFIX}{parent.agent}"
        await delegate.store.commit(cancel(child, by, f"{child}/stopped", f"{parent.session} no longer waits for it"))


async def _run_to_end(delegate: AgentRuntime, lease: Lease, on_wait: WaitListener) -> str:
    """Run a sub-session to its end. If it parks, cancel it: its parent waits for it and holds its budget.

    If its parent is left to a later owner, so is the sub-session.
    """
    new_session = NewSession(lease.session, lease=lease)
    answer_tool = delegate.answer_form and delegate.answer_form.tool
    try:
        live = await claim_session(delegate, new_session, on_wait=on_wait, answer_tool=answer_tool)
    except ConfigError:
        await delegate.store.release(lease)
        raise
    try:
        conclusion = await live.conversation.run_until_parked()
    except asyncio.CancelledError:
        # With a process that stops, the parent leaves its call in flight, and the same call continues this session.
        if not delegate.app.departures.includes(lease):
            await run_shielded(live.runtime.end("CANCELLED", "cancelled"))
        raise
    text = find_final_text(live.loop.messages)
    if not conclusion.has_ended:
        await _cancel_resting(delegate, lease.session)
        raise Failed("Unfinished", "it needs an answer that only a person can give. " + text, text)
    text = _conclude(conclusion.state, f"{conclusion.terminal_reason}. {conclusion.sentence}", text)
    return await _find_answer(delegate, live.loop.messages, text)


async def _find_answer(delegate: AgentRuntime, messages: Sequence[Message], text: str) -> str:
    """Return an agent's answer: its final text, or the value that its own validators accepted."""
    if delegate.answer_form is None:
        return text
    arguments = find_accepted_call(messages[-2:], FINAL_ANSWER)
    if arguments is None:
        raise Failed("NoAnswer", "none of its answers passed its own validators", text)
    return str(await delegate.answer_form.read(arguments))


async def _cancel_resting(delegate: AgentRuntime, child: str) -> None:
    """End a parked sub-session, which returns its unspent budget to its parent."""
    store, clock = delegate.store, delegate.app.clock
    lease = await acquire_lease(store, clock, delegate.worker, SessionId(child), delegate.hold_timeout)
    if lease is not None:
        await end_unowned_session(store, delegate.app.ledger, clock, lease, wakes_parent=False)


def _conclude(state: str, reason: str, text: str) -> str:
    if state != "COMPLETED":
        raise Failed(state.title().replace("_", ""), reason.strip(), text)
    return text


async def _require_depth(agent: AgentRuntime, row: SessionRow) -> None:
    depth, parent = 1, row.parent
    while parent:
        rows = await agent.store.ask(Query("session", SessionRow, {"session": parent}))
        depth, parent = depth + 1, rows[0].parent if rows else ""
    if depth >= MAX_DEPTH:
        raise Failed("TooDeep", f"agents can call agents at most {MAX_DEPTH - 1} levels deep; do the task yourself")


@asynccontextmanager
async def _open_called_agent(agent: AgentRuntime, tool: AgentTool) -> AsyncGenerator[AgentRuntime]:
    """Open the agent that a tool calls: one of the program, or one in a neighbouring folder."""
    try:
        async with tool.open(agent) if tool.open is not None else open_delegate(agent, tool.agent) as delegate:
            yield delegate
    except ConfigError as error:
        raise Failed("Unavailable", str(error)) from error

"""Sub-sessions: tasks for another agent, paid from the parent session's cap.

A person starts one through the front door, and a model with a tool (`AgentTool`). Its cap is carved out of its parent's
cap, so all sub-sessions together never spend more than the parent could.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final

import msgspec

from halter.config.agent_files import AGENT_FILE, find_neighbour_agents
from halter.core.clock import SECOND
from halter.core.errors import ConfigError, LeaseLost
from halter.core.events import HistoryGiven
from halter.core.ids import AGENT_PREFIX, SessionId, WorkerId, make_sub_session_id, session_stream
from halter.core.messages import Message
from halter.core.money import Leg, carve, format_exact_micros
from halter.core.ports import ALL_STREAMS, Draft, Lease, Query, offload_body, read_stream
from halter.core.rows import SessionRow, explain_newer_format
from halter.core.text import encode_body
from halter.core.tools import Failed, Tool
from halter.dispatch.heartbeat import acquire_lease, end_unowned_session
from halter.guard.halts import cancel, run_shielded
from halter.guard.ledger import read_budget
from halter.loop.decide import FINAL_ANSWER
from halter.loop.loop import NO_OBSERVER, LoopObserver
from halter.loop.session_runtime import WaitListener, find_final_text, wait_for_change, watch_changes
from halter.loop.transcript_reader import number_calls, read_past
from halter.runtime.agent_context import AgentContext, models_of
from halter.runtime.assemble import assemble_agent
from halter.runtime.session_builder import list_action_limits
from halter.runtime.session_origin import SessionOrigin, find_session_origin
from halter.runtime.session_start import (
    NewSession,
    attend_session,
    build_session_beginning,
    claim_session,
    read_last_words,
    read_session_row,
)
from halter.state import lifecycle
from halter.tasks.agent_tool import AgentTool
from halter.tasks.result import find_accepted_call

SUB_SESSION_DIVISOR: Final = 2
"""A sub-session gets at most half of the parent's remaining cap."""
MIN_SUB_SESSION_CAP: Final = 10_000
"""A sub-session needs at least one cent."""


class SubSessionOutcome(msgspec.Struct, frozen=True):
    """The result of a sub-session: its final text and why it stopped. `session` is "" if none was started."""

    session: str
    text: str
    ok: bool = False
    has_ended: bool = False


@asynccontextmanager
async def open_delegate(context: AgentContext, name: str) -> AsyncGenerator[AgentContext]:
    """Open the agent that is to do a task; without a name, this agent itself."""
    if not name or name == context.agent.policy.name:
        yield context
        return
    folder = find_neighbour_agents(context.agent.source_folder).get(name)
    if folder is None:
        raise ConfigError(f"There is no agent {name} in the neighbouring folders.")
    async with assemble_agent(context.app, folder) as agent, models_of(context.app, agent) as models:
        if agent.policy.name != name:
            raise ConfigError(f"{folder}/{AGENT_FILE} defines {agent.policy.name}, not {name}.")
        yield msgspec.structs.replace(context, agent=agent, models=models, bound=None, answer_form=None)


async def delegate_task(
    context: AgentContext,
    parent: str,
    delegate: AgentContext,
    task: str,
    observer: LoopObserver = NO_OBSERVER,
    on_wait: WaitListener = lambda _, __: None,
) -> SubSessionOutcome:
    """Run a task as a sub-session of another agent and wait for it. Its end wakes the parent."""
    row = await read_session_row(context, parent)
    if row.ended_at is not None:
        return SubSessionOutcome("", f"Session {parent} has ended and cannot start sub-sessions. Start a new one.")
    child = await begin_sub_session(context, row, delegate, task)
    if not child:
        return SubSessionOutcome("", await explain_insufficient_cap(context, row))
    return await attend_sub_session(delegate, child, observer, on_wait)


async def resume_delegation(
    context: AgentContext, parent: str, observer: LoopObserver, on_wait: WaitListener
) -> AsyncGenerator[SubSessionOutcome]:
    """Resume the open sub-sessions that an earlier process left, one after the other."""
    for row in await context.store.ask(Query("open_children", SessionRow, {"session": parent})):
        try:
            async with open_delegate(context, row.agent) as delegate:
                yield await attend_sub_session(delegate, row.session, observer, on_wait)
        except ConfigError as error:
            yield SubSessionOutcome(row.session, str(error))


async def attend_sub_session(
    delegate: AgentContext, child: str, observer: LoopObserver, on_wait: WaitListener
) -> SubSessionOutcome:
    """Run a sub-session until it parks or ends."""
    with mark_nested(delegate, child):
        conclusion, loop = await attend_session(delegate, child, observer=observer, waits=on_wait)
    text, ok = find_final_text(loop.messages), conclusion.state == "COMPLETED"
    if not conclusion.has_ended:
        hint = f"Parked ({conclusion.state}). Resume it with: halter run FOLDER --resume {child}"
    else:
        hint = "" if ok else f"{conclusion.state}: {conclusion.terminal_reason}. {conclusion.sentence}"
    return SubSessionOutcome(child, f"{text}\n{hint}".strip(), ok, conclusion.has_ended)


class AskedByModel(msgspec.Struct, frozen=True):
    """A model's request for a sub-session. Its id derives from the call, so it is started only once."""

    session: str
    max_cost: int | None = None
    hands_off: bool = False


async def begin_sub_session(
    context: AgentContext, parent: SessionRow, delegate: AgentContext, task: str, request: AskedByModel | None = None
) -> str:
    """Start a sub-session with a cap carved out of its parent's cap; return "" if too little is left.

    A task from a model is not trusted, and neither is the history that it hands over.
    """
    legs = await _carve_cap(context, parent, delegate, None if request is None else request.max_cost)
    if legs is None:
        return ""
    session = context.app.ids.make() if request is None else request.session
    event, drafts = await build_session_beginning(delegate, "task", session)
    origin = await find_session_origin(context, parent)
    grants = _find_shared_grants(context, origin, delegate, by_model=request is not None)
    event = msgspec.structs.replace(
        event,
        parent=parent.session,
        carved=legs,
        grants=grants,
        action_limits=list_action_limits(context, parent, origin),
    )
    if request is not None:
        event = msgspec.structs.replace(event, origin="agent", trusted=False)
        drafts = [*await _draft_history(context, parent, request), *drafts]
    body, blob = await offload_body(context.store, encode_body(context.guard().redact(task)))
    committed = await context.store.commit(lifecycle.start_child(event, None, body, drafts, blob))
    return session if committed.events else ""


async def _carve_cap(
    context: AgentContext, parent: SessionRow, delegate: AgentContext, requested_cap: int | None
) -> tuple[Leg, ...] | None:
    """Compute the cap of a sub-session: empty if neither agent has a cap, None if too little is left."""
    cap, remaining = await _remaining_cap(context, parent)
    limit = delegate.agent.policy.caps.session.max_cost_usd
    bounds = (requested_cap, limit, None if remaining is None else remaining // SUB_SESSION_DIVISOR)
    amounts = [amount for amount in bounds if amount is not None]
    if not amounts:
        return ()
    return carve(parent.session, min(amounts), cap) if min(amounts) >= MIN_SUB_SESSION_CAP else None


async def _remaining_cap(context: AgentContext, parent: SessionRow) -> tuple[int | None, int | None]:
    """Return the configured cap of a session, and the amount that the cap in force leaves."""
    configured_cap = context.agent.policy.caps.session.max_cost_usd
    row = await read_budget(context.store, session_stream(parent.session))
    cap = row.binding(configured_cap)
    return configured_cap, None if cap is None else max(0, cap - row.spent - row.held)


async def explain_insufficient_cap(context: AgentContext, parent: SessionRow) -> str:
    _, remaining = await _remaining_cap(context, parent)
    return (
        f"Too little budget for a sub-session: {format_exact_micros(remaining or 0)} is left in {parent.session}. "
        f"A sub-session gets at most half of that and needs at least {format_exact_micros(MIN_SUB_SESSION_CAP)}. "
        f"Raise the cap with: halter budget raise session:{parent.session} AMOUNT"
    )


def _find_shared_grants(
    context: AgentContext, origin: SessionOrigin, delegate: AgentContext, *, by_model: bool
) -> tuple[str, ...]:
    """Return the tools that both agents have and that the parent may use now.

    With `by_model`, the parent's file or program names the other agent, and these are all of the other agent's tools.
    A tool that is disabled for the parent stays disabled, and limited grants of the parent limit its sub-sessions too.
    """
    agent, policy = context.agent, context.agent.policy
    parent_grants = origin.grants
    parent_tools = list_tool_names(context)
    return tuple(
        name
        for name in list_tool_names(delegate)
        if (by_model or (name in parent_tools and policy.phases[0].grants_tool(name)))
        and name not in policy.disabled
        and name not in agent.quarantined
        and (parent_grants is None or name in parent_grants)
    )


def list_tool_names(context: AgentContext) -> tuple[str, ...]:
    """Return the names of all tools of an agent's tasks, verbs included."""
    return (*context.agent.tools, *context.agent.tasks.verbs)


MAX_DEPTH: Final = 4
"""Maximum depth of nested sub-sessions. Caps bound it too, unless the models are free."""


def bind_agent_tools(
    context: AgentContext, session: str, tools: Mapping[str, Tool], on_wait: WaitListener
) -> Mapping[str, Tool]:
    """Bind the tools that call other agents to this session, whose sub-sessions they start."""

    def bind(tool: Tool) -> Tool:
        if not isinstance(tool, AgentTool):
            return tool
        return tool.bind(partial(run_agent_tool, context, session, tool, on_wait))

    return {name: bind(tool) for name, tool in tools.items()}


async def run_agent_tool(
    context: AgentContext, session: str, tool: AgentTool, on_wait: WaitListener, task: str, call: str
) -> str:
    """Have another agent do a task, and return its answer. After a crash, the same call continues the sub-session."""
    store, child = context.store, make_sub_session_id(call)
    parent = await read_session_row(context, session)
    await _require_depth(context, parent)
    async with _open_called_agent(context, tool) as delegate:
        row = next(iter(await store.ask(Query("session", SessionRow, {"session": child}))), None)
        if row is None or not row.started_at:
            request = AskedByModel(child, tool.max_cost, tool.hands_off)
            if not await begin_sub_session(context, parent, delegate, task, request):
                raise Failed("TooLittleMoney", await explain_insufficient_cap(context, parent))
        return await _wait_for_end(delegate, parent, child, on_wait)


@contextmanager
def mark_nested(delegate: AgentContext, child: str) -> Generator[None]:
    """Mark a sub-session as run by a call of this process, so that the process's dispatcher does not run it too."""
    delegate.nested_sessions.add(SessionId(child))
    try:
        yield
    finally:
        delegate.nested_sessions.discard(SessionId(child))


CHILD_POLLING_INTERVAL: Final = 5 * SECOND
"""Polling interval of a sub-session that another owner runs: its lease may have expired."""


async def _wait_for_end(delegate: AgentContext, parent: SessionRow, child: str, on_wait: WaitListener) -> str:
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


async def _cancel_elsewhere(delegate: AgentContext, parent: SessionRow, child: str) -> None:
    """Cancel a sub-session that another owner runs, unless its parent will continue to wait in another process."""
    if not delegate.app.departures.includes(_lease_of(parent)):
        by = f"{AGENT_PREFIX}{parent.agent}"
        await delegate.store.commit(cancel(child, by, f"{child}/stopped", f"{parent.session} no longer waits for it"))


async def _run_to_end(delegate: AgentContext, lease: Lease, on_wait: WaitListener) -> str:
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


async def _find_answer(delegate: AgentContext, messages: Sequence[Message], text: str) -> str:
    """Return an agent's answer: its final text, or the value that its own validators accepted."""
    if delegate.answer_form is None:
        return text
    arguments = find_accepted_call(messages[-2:], FINAL_ANSWER)
    if arguments is None:
        raise Failed("NoAnswer", "none of its answers passed its own validators", text)
    return str(await delegate.answer_form.read(arguments))


async def _cancel_resting(delegate: AgentContext, child: str) -> None:
    """End a parked sub-session, which returns its unspent budget to its parent."""
    store, clock = delegate.store, delegate.app.clock
    lease = await acquire_lease(store, clock, delegate.worker, SessionId(child), delegate.hold_timeout)
    if lease is not None:
        await end_unowned_session(store, delegate.app.ledger, clock, lease, wakes_parent=False)


def _conclude(state: str, reason: str, text: str) -> str:
    if state != "COMPLETED":
        raise Failed(state.title().replace("_", ""), reason.strip(), text)
    return text


async def _require_depth(context: AgentContext, row: SessionRow) -> None:
    depth, parent = 1, row.parent
    while parent:
        rows = await context.store.ask(Query("session", SessionRow, {"session": parent}))
        depth, parent = depth + 1, rows[0].parent if rows else ""
    if depth >= MAX_DEPTH:
        raise Failed("TooDeep", f"agents can call agents at most {MAX_DEPTH - 1} levels deep; do the task yourself")


@asynccontextmanager
async def _open_called_agent(context: AgentContext, tool: AgentTool) -> AsyncGenerator[AgentContext]:
    """Open the agent that a tool calls: one of the program, or one in a neighbouring folder."""
    try:
        async with tool.open(context) if tool.open is not None else open_delegate(context, tool.agent) as delegate:
            yield delegate
    except ConfigError as error:
        raise Failed("Unavailable", str(error)) from error


async def _draft_history(context: AgentContext, parent: SessionRow, request: AskedByModel) -> Sequence[Draft]:
    """Return the parent's messages for a hand-over, with their trust marks; empty without a hand-over."""
    if not request.hands_off:
        return ()
    events = await read_stream(context.store, session_stream(parent.session))
    past = await read_past(parent.session, events, context.store)
    if past.has_erased_text or not past.messages:
        return ()
    messages = number_calls(past.messages)
    event = HistoryGiven(messages=len(messages), session=parent.session, through=events[-1].seq, denied=past.has_denial)
    return [Draft(event, *await offload_body(context.store, msgspec.json.encode(messages)))]

"""Sub-sessions: a task for another agent, with a part of the money of the session that it is for.

A person begins one by the front door, and a model by a tool (`AgentTool`). Its cap is carved out of its parent's, so
all sub-sessions together never spend more than their parent could.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import msgspec

from halter.config.agent_files import AGENT_FILE, find_neighbour_agents
from halter.core.errors import ConfigError
from halter.core.events import HistoryGiven
from halter.core.ids import SessionId, session_stream
from halter.core.messages import Message
from halter.core.money import Leg, carve, format_micros
from halter.core.ports import Draft, Query, offload_body, read_stream
from halter.core.rows import SessionRow
from halter.core.text import to_body
from halter.core.tools import Failed, Tool
from halter.dispatch.heartbeat import acquire_lease
from halter.guard.halts import run_shielded
from halter.guard.ledger import read_budget
from halter.loop.decide import FINAL_ANSWER
from halter.loop.loop import NO_OBSERVER, LoopObserver
from halter.loop.past import read_past
from halter.loop.session_runtime import WaitListener, find_final_text
from halter.runtime.agent_context import AgentContext, models_of
from halter.runtime.assemble import assemble_agent
from halter.runtime.session_builder import find_session_origin
from halter.runtime.sessions import (
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
"""A sub-session gets at most half of what its parent has left."""
MIN_SUB_SESSION_CAP: Final = 10_000
"""A sub-session needs at least one cent."""


class SubSessionOutcome(msgspec.Struct, frozen=True):
    """The result of a sub-session: its last words and what stopped it. Without a session it was not started."""

    session: str
    text: str
    ok: bool = False
    has_ended: bool = False


@asynccontextmanager
async def open_delegate(context: AgentContext, name: str) -> AsyncGenerator[AgentContext]:
    """Opens the agent that a task is for; without a name, one like this agent."""
    if not name or name == context.agent.policy.name:
        yield context
        return
    folder = find_neighbour_agents(context.agent.source_folder).get(name)
    if folder is None:
        raise ConfigError(f"There is no agent {name} in the folders beside this one's.")
    async with assemble_agent(context.app, folder) as agent, models_of(context.app, agent) as models:
        if agent.policy.name != name:
            raise ConfigError(f"{folder}/{AGENT_FILE} is not that of {name}, but of {agent.policy.name}.")
        yield msgspec.structs.replace(context, agent=agent, models=models, bound=None, form=None)


async def delegate_task(
    context: AgentContext,
    parent: str,
    other: AgentContext,
    task: str,
    observer: LoopObserver = NO_OBSERVER,
    waits: WaitListener = lambda _, __: None,
) -> SubSessionOutcome:
    """Runs a task as a sub-session of another agent and waits for it. Its end wakes the parent."""
    row = await read_session_row(context, parent)
    if row.ended_at is not None:
        return SubSessionOutcome("", f"Session {parent} is over, so nothing can be a part of it: begin a new one.")
    child = await begin_sub_session(context, row, other, task)
    if not child:
        return SubSessionOutcome("", await explain_insufficient_cap(context, row))
    return await attend_sub_session(other, child, observer, waits)


async def resume_delegation(
    context: AgentContext, parent: str, observer: LoopObserver, waits: WaitListener
) -> AsyncGenerator[SubSessionOutcome]:
    """Resumes the sub-sessions that an earlier process left, one after the other."""
    for row in await context.store.ask(Query("open_children", SessionRow, {"session": parent})):
        try:
            async with open_delegate(context, row.agent) as other:
                yield await attend_sub_session(other, row.session, observer, waits)
        except ConfigError as error:
            yield SubSessionOutcome(row.session, str(error))


async def attend_sub_session(
    other: AgentContext, child: str, observer: LoopObserver, waits: WaitListener
) -> SubSessionOutcome:
    """Runs a sub-session until it rests or ends."""
    came, loop = await attend_session(other, child, observer=observer, waits=waits)
    words, ok = find_final_text(loop.messages), came.state == "COMPLETED"
    if not came.has_ended:
        why = f"It rests, {came.state}. It goes on with: halter run FOLDER --resume {child}"
    else:
        why = "" if ok else f"{came.state}: {came.terminal_reason}. {came.sentence}"
    return SubSessionOutcome(child, f"{words}\n{why}".strip(), ok, came.has_ended)


class AskedByModel(msgspec.Struct, frozen=True):
    """A sub-session that a call of a model begins; the `session` is named by the call, so it begins once."""

    session: str
    max_cost: int | None = None
    hands_off: bool = False


async def begin_sub_session(
    context: AgentContext, parent: SessionRow, other: AgentContext, task: str, asked: AskedByModel | None = None
) -> str:
    """Starts a sub-session with a cap carved out of its parent's; returns "" if too little is left.

    What a model asks for is no person's word: it is not trusted, and neither is what it hands over.
    """
    carved = await _carve_cap(context, parent, other, None if asked is None else asked.max_cost)
    if carved is None:
        return ""
    session = context.app.ids.make() if asked is None else asked.session
    event, more = await build_session_beginning(other, "task", session)
    grants = await _find_shared_grants(context, parent, other, own=asked is not None)
    event = msgspec.structs.replace(event, parent=parent.session, carved=carved, grants=grants)
    if asked is not None:
        event = msgspec.structs.replace(event, origin="agent", trusted=False)
        more = [*await _draft_history(context, parent, asked), *more]
    body, blob = await offload_body(context.store, to_body(context.guard().redact(task)))
    committed = await context.store.commit(lifecycle.start_child(event, None, body, more, blob))
    return session if committed.events else ""


async def _carve_cap(
    context: AgentContext, parent: SessionRow, other: AgentContext, asked: int | None
) -> tuple[Leg, ...] | None:
    """Computes the cap of a sub-session; nothing is carved where neither agent has a cap."""
    cap, remaining = await _remaining_cap(context, parent)
    limit = other.agent.policy.caps.session.max_cost_usd
    bounds = (asked, limit, None if remaining is None else remaining // SUB_SESSION_DIVISOR)
    amounts = [amount for amount in bounds if amount is not None]
    if not amounts:
        return ()
    return carve(parent.session, min(amounts), cap) if min(amounts) >= MIN_SUB_SESSION_CAP else None


async def _remaining_cap(context: AgentContext, parent: SessionRow) -> tuple[int | None, int | None]:
    """Returns the configured cap of a session, and what is neither spent nor held of the one in force."""
    configured = context.agent.policy.caps.session.max_cost_usd
    row = await read_budget(context.store, session_stream(parent.session))
    cap = row.binding(configured)
    return configured, None if cap is None else max(0, cap - row.spent - row.held)


async def explain_insufficient_cap(context: AgentContext, parent: SessionRow) -> str:
    _, remaining = await _remaining_cap(context, parent)
    return (
        f"There is too little money for another session: {format_micros(remaining or 0)} is left in {parent.session}, "
        f"a part of it gets at most half of that, and at least {format_micros(MIN_SUB_SESSION_CAP)}. To raise the cap: "
        f"halter budget raise session:{parent.session} AMOUNT"
    )


async def _find_shared_grants(
    context: AgentContext, parent: SessionRow, other: AgentContext, *, own: bool
) -> tuple[str, ...]:
    """Returns the tools that both agents have and that the parent may use now.

    Where the parent's file or program names the other agent, these are that one's `own` tools. What is disabled for the
    parent stays disabled, and a parent that is itself limited limits its sub-sessions as far.
    """
    agent, policy = context.agent, context.agent.policy
    most = (await find_session_origin(context, parent)).grants
    shared = list_tool_names(context)
    return tuple(
        name
        for name in list_tool_names(other)
        if (own or (name in shared and policy.phases[0].grants_tool(name)))
        and name not in policy.disabled
        and name not in agent.quarantined
        and (most is None or name in most)
    )


def list_tool_names(context: AgentContext) -> tuple[str, ...]:
    """Returns the names of all tools of an agent's tasks, verbs included."""
    return (*context.agent.tools, *context.agent.tasks.verbs)


MAX_DEPTH: Final = 4
"""How deep agents may ask agents: money bounds it too, where anything costs money."""


def bind_agent_tools(
    context: AgentContext, session: str, tools: Mapping[str, Tool], waits: WaitListener
) -> Mapping[str, Tool]:
    """Has the tools that ask other agents begin sub-sessions of this session."""

    def bind(tool: Tool) -> Tool:
        if not isinstance(tool, AgentTool):
            return tool
        return tool.bind(partial(run_agent_tool, context, session, tool, waits))

    return {name: bind(tool) for name, tool in tools.items()}


async def run_agent_tool(
    context: AgentContext, session: str, tool: AgentTool, waits: WaitListener, task: str, call: str
) -> str:
    """Has another agent do a task, and returns what it said last. After a crash the same call goes on with it."""
    store, child = context.store, f"{call}.agent"
    parent = await read_session_row(context, session)
    await _require_depth(context, parent)
    async with _open_asked(context, tool) as other:
        row = next(iter(await store.ask(Query("session", SessionRow, {"session": child}))), None)
        if row is None or not row.started_at:
            asked = AskedByModel(child, tool.max_cost, tool.hands_off)
            if not await begin_sub_session(context, parent, other, task, asked):
                raise Failed("TooLittleMoney", await explain_insufficient_cap(context, parent))
        elif row.ended_at is not None:
            words = _conclude(row.state, row.terminal_reason, await read_last_words(store, child))
            events = await read_stream(store, session_stream(child))
            return await _find_answer(other, (await read_past(child, events, store)).messages, words)
        return await _attend_asked(other, child, waits)


async def _attend_asked(other: AgentContext, child: str, waits: WaitListener) -> str:
    """Runs a sub-session to its end. One that would rest is over: its parent waits for it, and holds its money."""
    try:
        new_session = NewSession(SessionId(child))
        live = await claim_session(other, new_session, waits=waits, answer=other.form and other.form.tool)
    except ConfigError as error:
        raise Failed("Unavailable", str(error)) from error
    try:
        came = await live.conversation.run_until_parked()
    except asyncio.CancelledError:
        await run_shielded(live.runtime.end("CANCELLED", "cancelled"))
        raise
    words = find_final_text(live.loop.messages)
    if not came.has_ended:
        await _cancel_resting(other, child)
        raise Failed("Unfinished", "it asks for something that only a person can say. " + words, words)
    words = _conclude(came.state, f"{came.terminal_reason}. {came.sentence}", words)
    return await _find_answer(other, live.loop.messages, words)


async def _find_answer(other: AgentContext, messages: Sequence[Message], words: str) -> str:
    """Returns an agent's answer: its last words, or what its own checks accepted."""
    if other.form is None:
        return words
    accepted = find_accepted_call(messages[-2:], FINAL_ANSWER)
    if accepted is None:
        raise Failed("NoAnswer", "no answer of it passed its own checks", words)
    return str(await other.form.read(accepted))


async def _cancel_resting(other: AgentContext, child: str) -> None:
    """Ends a sub-session that rests, which gives its parent back what it has not spent."""
    store, clock = other.store, other.app.clock
    lease = await acquire_lease(store, clock, other.worker, SessionId(child), other.hold_timeout)
    if lease is not None:
        row = await read_session_row(other, child)
        asked = await lifecycle.read_questions(store, child, clock.now())
        await store.commit(
            lifecycle.end_session(lease, "CANCELLED", "cancelled", row.parent, asked=asked, wakes_parent=False)
        )


def _conclude(state: str, why: str, words: str) -> str:
    if state != "COMPLETED":
        raise Failed(state.title().replace("_", ""), why.strip(), words)
    return words


async def _require_depth(context: AgentContext, row: SessionRow) -> None:
    depth, parent = 1, row.parent
    while parent:
        found = await context.store.ask(Query("session", SessionRow, {"session": parent}))
        depth, parent = depth + 1, found[0].parent if found else ""
    if depth >= MAX_DEPTH:
        raise Failed("TooDeep", f"agents may ask agents {MAX_DEPTH - 1} times in a row; do it yourself")


@asynccontextmanager
async def _open_asked(context: AgentContext, tool: AgentTool) -> AsyncGenerator[AgentContext]:
    """Opens the agent that a tool asks: one of the program, or one in a folder beside."""
    try:
        async with tool.open(context) if tool.open is not None else open_delegate(context, tool.agent) as other:
            yield other
    except ConfigError as error:
        raise Failed("Unavailable", str(error)) from error


async def _draft_history(context: AgentContext, parent: SessionRow, asked: AskedByModel) -> Sequence[Draft]:
    """Returns what an agent is handed over: all that was said to the one before, marked as it was there."""
    if not asked.hands_off:
        return ()
    events = await read_stream(context.store, session_stream(parent.session))
    past = await read_past(parent.session, events, context.store)
    if past.erased or not past.messages:
        return ()
    messages: Sequence[Message] = past.messages
    given = HistoryGiven(messages=len(messages), session=parent.session, through=events[-1].seq, denied=past.denied)
    return [Draft(given, *await offload_body(context.store, msgspec.json.encode(messages)))]

"""Sub-sessions: tasks for another agent, paid from the parent session's cap.

A person starts one through the front door, and a model with a tool (`AgentTool`). Its cap is carved out of its parent's
cap, so all sub-sessions together never spend more than the parent could.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from halter.config.agent_files import AGENT_FILE, find_neighbour_agents
from halter.core.errors import ConfigError
from halter.core.events import HistoryGiven
from halter.core.ids import session_stream
from halter.core.money import Leg, carve, format_exact_micros
from halter.core.ports import Draft, offload_body, read_stream
from halter.core.rows import SessionRow
from halter.core.text import encode_body
from halter.guard.ledger import read_budget
from halter.loop.transcript_reader import number_calls, read_past
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.session_builder import list_action_limits
from halter.runtime.session_origin import SessionOrigin, build_session_beginning, find_session_origin
from halter.state import lifecycle

SUB_SESSION_DIVISOR: Final = 2
"""A sub-session gets at most half of the parent's remaining cap."""
MIN_SUB_SESSION_CAP: Final = 10_000
"""A sub-session needs at least one cent."""


@asynccontextmanager
async def open_delegate(caller: AgentRuntime, name: str) -> AsyncGenerator[AgentRuntime]:
    """Open the agent that is to do a task; without a name, the caller itself."""
    if not name or name == caller.name:
        yield caller
        return
    folder = find_neighbour_agents(caller.definition.source_folder).get(name)
    if folder is None:
        raise ConfigError(f"There is no agent {name} in the neighbouring folders.")
    async with open_folder_agent(caller.app, folder) as agent:
        if agent.name != name:
            raise ConfigError(f"{folder}/{AGENT_FILE} defines {agent.name}, not {name}.")
        yield agent.run_beside(caller)


class AskedByModel(msgspec.Struct, frozen=True):
    """A model's request for a sub-session. Its id derives from the call, so it is started only once."""

    session: str
    max_cost: int | None = None
    hands_off: bool = False


async def begin_sub_session(
    agent: AgentRuntime, parent: SessionRow, delegate: AgentRuntime, task: str, request: AskedByModel | None = None
) -> str:
    """Start a sub-session with a cap carved out of its parent's cap; return "" if too little is left.

    A task from a model is not trusted, and neither is the history that it hands over.
    """
    legs = await _carve_cap(agent, parent, delegate, None if request is None else request.max_cost)
    if legs is None:
        return ""
    session = agent.app.ids.make() if request is None else request.session
    event, drafts = await build_session_beginning(delegate, "task", session)
    origin = await find_session_origin(agent, parent)
    grants = _find_shared_grants(agent, origin, delegate, by_model=request is not None)
    event = msgspec.structs.replace(
        event,
        parent=parent.session,
        carved=legs,
        grants=grants,
        action_limits=list_action_limits(agent, parent, origin),
    )
    if request is not None:
        event = msgspec.structs.replace(event, origin="agent", trusted=False)
        drafts = [*await _draft_history(agent, parent, request), *drafts]
    body, blob = await offload_body(agent.store, encode_body(agent.guard().redact(task)))
    committed = await agent.store.commit(lifecycle.start_child(event, None, body, drafts, blob))
    return session if committed.events else ""


async def _carve_cap(
    agent: AgentRuntime, parent: SessionRow, delegate: AgentRuntime, requested_cap: int | None
) -> tuple[Leg, ...] | None:
    """Compute the cap of a sub-session: empty if neither agent has a cap, None if too little is left."""
    cap, remaining = await _remaining_cap(agent, parent)
    limit = delegate.policy.caps.session.max_cost_usd
    bounds = (requested_cap, limit, None if remaining is None else remaining // SUB_SESSION_DIVISOR)
    amounts = [amount for amount in bounds if amount is not None]
    if not amounts:
        return ()
    return carve(parent.session, min(amounts), cap) if min(amounts) >= MIN_SUB_SESSION_CAP else None


async def _remaining_cap(agent: AgentRuntime, parent: SessionRow) -> tuple[int | None, int | None]:
    """Return the configured cap of a session, and the amount that the cap in force leaves."""
    configured_cap = agent.policy.caps.session.max_cost_usd
    row = await read_budget(agent.store, session_stream(parent.session))
    cap = row.binding(configured_cap)
    return configured_cap, None if cap is None else max(0, cap - row.spent - row.held)


async def explain_insufficient_cap(agent: AgentRuntime, parent: SessionRow) -> str:
    _, remaining = await _remaining_cap(agent, parent)
    return (
        f"Too little budget for a sub-session: {format_exact_micros(remaining or 0)} is left in {parent.session}. "
        f"A sub-session gets at most half of that and needs at least {format_exact_micros(MIN_SUB_SESSION_CAP)}. "
        f"Raise the cap with: halter budget raise session:{parent.session} AMOUNT"
    )


def _find_shared_grants(
    agent: AgentRuntime, origin: SessionOrigin, delegate: AgentRuntime, *, by_model: bool
) -> tuple[str, ...]:
    """Return the tools that both agents have and that the parent may use now.

    With `by_model`, the parent's file or program names the other agent, and these are all of the other agent's tools.
    A tool that is disabled for the parent stays disabled, and limited grants of the parent limit its sub-sessions too.
    """
    policy = agent.policy
    parent_grants = origin.grants
    parent_tools = list_tool_names(agent)
    return tuple(
        name
        for name in list_tool_names(delegate)
        if (by_model or (name in parent_tools and policy.phases[0].grants_tool(name)))
        and name not in policy.disabled
        and name not in agent.quarantined
        and (parent_grants is None or name in parent_grants)
    )


def list_tool_names(agent: AgentRuntime) -> tuple[str, ...]:
    """Return the names of all tools of an agent's tasks, verbs included."""
    return (*agent.tools, *agent.definition.tasks.verbs)


MAX_DEPTH: Final = 4
"""Maximum depth of nested sub-sessions. Caps bound it too, unless the models are free."""


async def _draft_history(agent: AgentRuntime, parent: SessionRow, request: AskedByModel) -> Sequence[Draft]:
    """Return the parent's messages for a hand-over, with their trust marks; empty without a hand-over."""
    if not request.hands_off:
        return ()
    events = await read_stream(agent.store, session_stream(parent.session))
    past = await read_past(parent.session, events, agent.store)
    if past.has_erased_text or not past.messages:
        return ()
    messages = number_calls(past.messages)
    event = HistoryGiven(messages=len(messages), session=parent.session, through=events[-1].seq, denied=past.has_denial)
    return [Draft(event, *await offload_body(agent.store, msgspec.json.encode(messages)))]

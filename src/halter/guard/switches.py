"""Agents that may run by themselves: switched on and off by people, for good or until the next word."""

from collections.abc import Sequence

from halter.core.events import AgentSwitched, HaltRequested
from halter.core.ids import FLEET, may_decide
from halter.core.ports import Draft, Rows, Write
from halter.core.rows import AgentRow, HaltRow


def switch_on(agent: str, by: str, key: str, reason: str = "") -> Write:
    """Let an agent run by itself. Only a person may say so."""
    event = AgentSwitched(agent=agent, on=True, by=by, reason=reason)

    def decide(_: Rows) -> Sequence[Draft]:
        return [Draft(event)] if may_decide(by) else []

    return Write(FLEET, key, decide, [(AgentRow, (agent,))])


def switch_off(agent: str, sessions: Sequence[str], by: str, key: str, reason: str = "") -> Write:
    """Let an agent run by itself no longer, and stop those of its sessions that do."""
    event = AgentSwitched(agent=agent, on=False, by=by, reason=reason)
    why = reason or f"{agent} was switched off"
    halts = [HaltRequested(scope=f"session:{session}", by=by, reason=why) for session in sessions]
    rows = [(AgentRow, (agent,)), *((HaltRow, (halt.scope,)) for halt in halts)]
    return Write(FLEET, key, lambda _: [Draft(event), *map(Draft, halts)], rows)

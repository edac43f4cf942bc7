"""A task for another agent: a sub-session with a lease of its own, whose grants and cap are parts of its parent's."""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from halter.app.agent import assembled
from halter.app.agent_context import AgentContext, models_of
from halter.app.talking import attend, beginning, row_of
from halter.app.triggered import beginnings_of
from halter.brain.lastwords import last_words
from halter.brain.loop import NOBODY, Watching
from halter.brain.session_runtime import Waits
from halter.config.agent import AGENT_FILE
from halter.core.errors import ConfigError
from halter.core.ids import session_stream
from halter.core.limits import carve
from halter.core.money import BudgetRow, Leg, shown
from halter.core.ports import Query, kept
from halter.core.rows import SessionRow
from halter.core.text import to_body
from halter.state import life

SHARE: Final = 2
"""A sub-session gets at most this part of what its parent has left: one half."""
LEAST: Final = 10_000
"""With less than a cent nothing is begun."""

_NAME: Final = re.compile(r"^name:[ \t]*(?P<q>['\"]?)(?P<name>[A-Za-z0-9_.-]{1,64})(?P=q)[ \t]*(?:#.*)?$", re.MULTILINE)
_HEAD: Final = 20_000


class Came(msgspec.Struct, frozen=True):
    """What became of a sub-session: its last words, and what stopped it; without a name, why it was not begun."""

    session: str
    words: str
    ok: bool = False
    over: bool = False


def neighbours(place: Path | None) -> Mapping[str, Path]:
    """Find the agents in the folders beside an agent's own, by the names in their files. Nothing of them is run."""
    if place is None:
        return {}
    own, found = place.resolve(), dict[str, Path]()
    for file in sorted(own.parent.glob(f"*/{AGENT_FILE}")):
        try:
            with file.open(encoding="utf-8", errors="replace") as text:
                head = text.read(_HEAD)
        except OSError:
            continue
        named = _NAME.search(head)
        if named is not None and file.parent != own:
            found.setdefault(named["name"], file.parent)
    return found


@asynccontextmanager
async def spoken_for(speaking: AgentContext, name: str) -> AsyncGenerator[AgentContext]:
    """Have the agent at hand that a task is for; without a name it is one like this agent."""
    if not name or name == speaking.agent.policy.name:
        yield speaking
        return
    folder = neighbours(speaking.agent.place).get(name)
    if folder is None:
        raise ConfigError(f"There is no agent {name} in the folders beside this one's.")
    async with assembled(speaking.app, folder) as agent, models_of(speaking.app, agent) as models:
        if agent.policy.name != name:
            raise ConfigError(f"{folder}/{AGENT_FILE} is not that of {name}, but of {agent.policy.name}.")
        yield msgspec.structs.replace(speaking, agent=agent, models=models)


async def delegate(
    speaking: AgentContext,
    parent: str,
    other: AgentContext,
    task: str,
    watching: Watching = NOBODY,
    waits: Waits = lambda _, __: None,
) -> Came:
    """Let another agent do a task as a part of a session, and wait for it. Its end wakes the parent."""
    row = await row_of(speaking, parent)
    if row.ended_at is not None:
        return Came("", f"Session {parent} is over, so nothing can be a part of it: begin a new one.")
    child = await begun(speaking, row, other, task)
    if not child:
        return Came("", await poor(speaking, row))
    return await attended(other, child, watching, waits)


async def go_on(speaking: AgentContext, parent: str, watching: Watching, waits: Waits) -> AsyncGenerator[Came]:
    """Take up the sub-sessions that an earlier process left behind, one after the other."""
    for row in await speaking.store.ask(Query("open_children", SessionRow, {"session": parent})):
        try:
            async with spoken_for(speaking, row.agent) as other:
                yield await attended(other, row.session, watching, waits)
        except ConfigError as error:
            yield Came(row.session, str(error))


async def attended(other: AgentContext, child: str, watching: Watching, waits: Waits) -> Came:
    """Take a sub-session from where it stands to its next rest or its end."""
    came, loop = await attend(other, child, watching=watching, waits=waits)
    words, ok = last_words(loop.messages), came.state == "COMPLETED"
    if not came.over:
        why = f"It rests, {came.state}. It goes on with: halter run FOLDER --resume {child}"
    else:
        why = "" if ok else f"{came.state}: {came.terminal_reason}. {came.sentence}"
    return Came(child, f"{words}\n{why}".strip(), ok, came.over)


async def begun(speaking: AgentContext, parent: SessionRow, other: AgentContext, task: str) -> str:
    """Begin a sub-session with what can be carved out for it; an empty name if that is too little."""
    carved = await _carved(speaking, parent, other)
    if carved is None:
        return ""
    session = speaking.app.ids.new()
    event, more = await beginning(other, "task", session)
    event = msgspec.structs.replace(
        event, parent=parent.session, carved=carved, grants=await _grants(speaking, parent, other)
    )
    body, blob = await kept(speaking.store, to_body(speaking.gatehouse().redacted(task)))
    committed = await speaking.store.commit(life.start_child(event, None, body, more, blob))
    return session if committed.events else ""


async def _carved(speaking: AgentContext, parent: SessionRow, other: AgentContext) -> tuple[Leg, ...] | None:
    """Work out a sub-session's part; nothing is carved out where neither of the two has a cap."""
    cap, left = await _left(speaking, parent)
    most = other.agent.policy.caps.session.max_cost_usd
    amounts = [amount for amount in (most, None if left is None else left // SHARE) if amount is not None]
    if not amounts:
        return ()
    return carve(parent.session, min(amounts), cap) if min(amounts) >= LEAST else None


async def _left(speaking: AgentContext, parent: SessionRow) -> tuple[int | None, int | None]:
    """Tell a session's configured cap, and what of the one that holds is neither spent nor held."""
    policy = speaking.agent.policy
    configured = policy.caps.session.max_cost_usd
    params = {"scope": session_stream(parent.session), "window": "", "unit": "usd"}
    found = next(iter(await speaking.store.ask(Query("budget", BudgetRow, params))), None)
    row = found or BudgetRow(session_stream(parent.session), "", "usd")
    cap = row.binding(configured)
    return configured, None if cap is None else max(0, cap - row.spent - row.held)


async def poor(speaking: AgentContext, parent: SessionRow) -> str:
    """Say that there is too little money for a sub-session."""
    _, left = await _left(speaking, parent)
    return (
        f"There is too little money for another session: {shown(left or 0)} is left in {parent.session}, a part of it "
        f"gets at most half of that, and at least {shown(LEAST)}. To raise the cap: "
        f"halter budget raise session:{parent.session} AMOUNT"
    )


async def _grants(speaking: AgentContext, parent: SessionRow, other: AgentContext) -> tuple[str, ...]:
    """Name the tools that both have and that the parent may use now: a sub-session never gets more than it."""
    own, policy = speaking.agent, speaking.agent.policy
    most = (await beginnings_of(speaking, parent)).grants
    return tuple(
        name
        for name in names_of(other)
        if name in names_of(speaking)
        and name not in policy.disabled
        and name not in own.quarantined
        and policy.phases[0].grants_tool(name)
        and (most is None or name in most)
    )


def names_of(speaking: AgentContext) -> tuple[str, ...]:
    """Name all tools that an agent's tasks have, its verbs among them."""
    return (*speaking.agent.tools, *speaking.agent.tasks.verbs)

"""Which tools of an agent's servers may be used, and what a person is asked about them: one question for each server.

A server is a stranger that may offer other tools at every start, and thousands of them. So what is new or changed in it
is one question, bounded in what it shows and pins. The question is withdrawn when what it is about is gone.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from halter.app.opened import App
from halter.core.clock import DAY
from halter.core.events import ToolPinned
from halter.core.ids import FLEET
from halter.core.ports import Draft, Query, Rows, Write
from halter.core.rows import DecisionRow, PinRow
from halter.core.servers import BETWEEN, Pinned, quarantined
from halter.core.text import counted, one_line, shorten
from halter.core.tools import ToolSpec
from halter.guard.approvals import Pin, Question, ServerChange, about_server, ask, withdraw

MOST_ASKED: Final = 100
"""So many tools of a server are put into one question; the rest waits for the next one."""
_DETAILED: Final = 8
"""Of so many tools at most, the whole description and the schema are shown."""
_LONGEST: Final = 1000
_SHORT: Final = 40
_NAMED: Final = 12
"""So many characters of a digest are shown."""
_GONE: Final = 20
LASTS: Final = 7 * DAY
"""So long a question waits. It is put again when the agent is loaded after that."""

TOGETHER: Final = "The tools of a server are asked about together now."


class Plan(msgspec.Struct, frozen=True):
    """What is to be done about the servers of an agent."""

    first: tuple[ToolSpec, ...] = ()
    """Tools of servers that are seen for the first time: they are pinned as they are."""
    waiting: frozenset[str] = frozenset()
    """Tools that may not be used before a person agrees."""
    questions: tuple[Question, ...] = ()
    withdrawn: tuple[tuple[str, str], ...] = ()
    """Open questions whose cause is gone, each with the reason."""


def plan_pins(
    agent: str, servers: Sequence[str], specs: Sequence[ToolSpec], pins: Pinned, asked: Sequence[DecisionRow], now: int
) -> Plan:
    """Compare what servers offer with what was agreed to and what was asked before.

    `servers` are those that the agent's file names, `asked` all questions about servers of this agent.
    """
    found = quarantined(specs, pins)
    changes = {change.server: change for change in _changes(found.changed, found.new, specs, pins)}
    questions = {server: about_server(agent, change, LASTS) for server, change in changes.items()}
    still_open = [row for row in asked if not row.verdict and row.expires_at > now]
    withdrawn = [
        (row.decision, _why(row, servers, specs, questions)) for row in still_open if not _stands(row, questions)
    ]
    standing = {row.subject for row in still_open if _stands(row, questions)}
    wanted = [_numbered(each, asked) for server, each in questions.items() if server not in standing]
    return Plan(
        first=tuple(spec for spec in found.usable if spec.server and spec.name not in pins),
        waiting=frozenset(spec.name for spec in (*found.changed, *found.new)),
        questions=tuple(each for each in wanted if each is not None),
        withdrawn=tuple(withdrawn),
    )


def _stands(row: DecisionRow, questions: Mapping[str, Question]) -> bool:
    question = questions.get(row.subject)
    return row.about == "changed_server" and question is not None and question.digest == row.digest


def _why(row: DecisionRow, servers: Sequence[str], specs: Sequence[ToolSpec], questions: Mapping[str, Question]) -> str:
    server = row.subject if row.about == "changed_server" else row.subject.partition(BETWEEN)[0]
    if server not in servers:
        return f"{server} is not in .mcp.json any more."
    if row.about != "changed_server" and server in questions:
        return TOGETHER
    if server in questions:
        return f"{server} offers other tools by now: it is asked about anew."
    if not any(spec.server == server for spec in specs):
        return f"{server} offers no tools now, or cannot be reached: it is asked about when it does."
    return f"{server} offers again what was agreed to."


def _numbered(question: Question, asked: Sequence[DecisionRow]) -> Question | None:
    """Give a question that was put before another name; one that a person said no to is not put again."""
    before = [row for row in asked if row.subject == question.subject and row.digest == question.digest]
    if any(row.verdict == "deny" for row in before):
        return None
    return msgspec.structs.replace(question, decision=f"{question.decision}/{len(before)}") if before else question


def _changes(
    changed: Sequence[ToolSpec], new: Sequence[ToolSpec], specs: Sequence[ToolSpec], pins: Pinned
) -> Iterator[ServerChange]:
    for server in sorted({spec.server for spec in (*changed, *new)}):
        mine = sorted((spec for spec in (*changed, *new) if spec.server == server), key=lambda spec: spec.name)
        offered = {spec.name for spec in specs if spec.server == server}
        gone = sorted(name for name in pins if name.partition(BETWEEN)[0] == server and name not in offered)
        shown = mine[:MOST_ASKED]
        text = "\n".join(_lines(server, shown, len(mine), gone, pins))
        yield ServerChange(text, server, tuple(Pin(spec.name, spec.digest) for spec in shown))


def _lines(server: str, shown: Sequence[ToolSpec], together: int, gone: Sequence[str], pins: Pinned) -> Iterator[str]:
    changed = sum(spec.name in pins for spec in shown)
    yield (
        f"{one_line(server)}: of its tools {len(shown) - changed} shown here are new, {changed} changed, "
        f"{len(gone)} gone. A yes lets exactly these be used, as they are now."
    )
    detailed = len(shown) <= _DETAILED
    for spec in shown:
        was = f" (was {pins[spec.name][:_NAMED]})" if spec.name in pins else ""
        about = "" if detailed else f"  {shorten(one_line(spec.description), _SHORT)}"
        yield f"{'changed' if was else 'new    '}  {spec.name}  {spec.digest[:_NAMED]}{was}{about}"
        if detailed:
            yield f"    {shorten(one_line(spec.description), _LONGEST)}"
            yield f"    {shorten(one_line(spec.schema.decode()), _LONGEST)}"
    if together > len(shown):
        yield f"{counted(together - len(shown), 'more tool')} stay out of use: you are asked about them after this."
    for name in gone[:_GONE]:
        yield f"gone     {one_line(name)}"
    if len(gone) > _GONE:
        yield f"and {len(gone) - _GONE} more are gone."


async def settle_pins(app: App, agent: str, servers: Sequence[str], specs: Sequence[ToolSpec]) -> frozenset[str]:
    """Pin, ask and withdraw what there is to; name the tools that wait for a person."""
    store = app.store
    # Without a tool there is nothing to ask, and only what waits matters.
    name = "asked_about_servers" if specs else "waiting_about_servers"
    asked = await store.ask(Query(name, DecisionRow, {"agent": agent}))
    if not specs and not asked:
        return frozenset()
    pins = {row.tool: row.digest for row in await store.ask(Query("all_pins", PinRow)) if row.agent == agent}
    plan = plan_pins(agent, servers, specs, pins, asked, app.clock.now())
    if plan.first:
        await store.commit(_pin_first(agent, plan.first))
    for decision, why in plan.withdrawn:
        await store.commit(withdraw(decision, why))
    for question in plan.questions:
        await store.commit(ask(question))
    return plan.waiting


def _pin_first(agent: str, specs: Sequence[ToolSpec]) -> Write:
    """Pin tools that are seen for the first time, all at once; what was pinned meanwhile stays as it is."""

    def pin(rows: Rows) -> Sequence[Draft]:
        wanted = [spec for spec in specs if rows.get(PinRow, agent, spec.name) is None]
        events = [ToolPinned(agent=agent, tool=spec.name, digest=spec.digest, by="first use") for spec in wanted]
        return [Draft(event) for event in events]

    named = sha256("\n".join(f"{spec.name} {spec.digest}" for spec in specs).encode()).hexdigest()
    return Write(FLEET, f"pin/{agent}/{named[:32]}/first", pin, [(PinRow, (agent, spec.name)) for spec in specs])


async def withdraw_questions(app: App, agent: str, why: str) -> None:
    """Take back what is asked about the servers of an agent that is not loaded any more."""
    for row in await app.store.ask(Query("waiting_about_servers", DecisionRow, {"agent": agent})):
        await app.store.commit(withdraw(row.decision, why))

"""The pins of MCP servers: tools first seen are pinned, new and changed ones wait for a person.

An MCP server may offer other tools at every start, and thousands of them. All new and changed tools of a server are one
question to a person. A question is bounded in what it shows and pins, and is withdrawn when its cause is gone.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final

import msgspec

from halter.core.clock import DAY
from halter.core.events import ToolPinned
from halter.core.ids import FLEET
from halter.core.ports import Draft, Query, Rows, Write
from halter.core.rows import DecisionRow, PinRow
from halter.core.text import format_count, shorten, to_one_line
from halter.core.tools import SERVER_SEPARATOR, PinnedDigests, ToolSpec, check_pins
from halter.guard.approvals import Pin, Question, ServerChange, ask_question, make_server_question, withdraw_question
from halter.policy.evaluation import ResolvedPolicy
from halter.runtime.runtime import Runtime

MAX_TOOLS_PER_QUESTION: Final = 100
"""Maximum number of tools in one question; the rest wait for the next one."""


_MAX_DETAILED_TOOLS: Final = 8
"""Maximum number of tools for which a question shows full descriptions and schemas."""


_MAX_TEXT: Final = 1000


_MAX_SUMMARY: Final = 40


_DIGEST_LENGTH: Final = 12
"""Characters shown of a digest."""


_MAX_REMOVED: Final = 20


PIN_QUESTION_LIFETIME: Final = 7 * DAY
"""Lifetime of a question. It is asked again when the agent is next loaded after that."""


MERGED_QUESTION_REASON: Final = "All changes of one server are now one question."


class PinPlan(msgspec.Struct, frozen=True):
    """The changes to make to the pins and questions of an agent's servers."""

    first: tuple[ToolSpec, ...] = ()
    """Tools of servers seen for the first time; they are pinned without a question."""
    waiting: frozenset[str] = frozenset()
    """Tools that wait for a person's approval."""
    questions: tuple[Question, ...] = ()
    withdrawn: tuple[tuple[str, str], ...] = ()
    """Open questions whose cause is gone, with the reason."""


def plan_pins(
    agent: str,
    servers: Sequence[str],
    specs: Sequence[ToolSpec],
    pins: PinnedDigests,
    decisions: Sequence[DecisionRow],
    now: int,
) -> PinPlan:
    """Compare the tools of servers with the approved pins and with earlier questions.

    `servers` are the names in the agent's file. `decisions` are all questions about the agent's servers.
    """
    pin_check = check_pins(specs, pins)
    changes = {change.server: change for change in _changes(pin_check.changed, pin_check.new, specs, pins)}
    questions = {
        server: make_server_question(agent, change, PIN_QUESTION_LIFETIME) for server, change in changes.items()
    }
    still_open = [row for row in decisions if not row.verdict and row.expires_at > now]
    withdrawn = [
        (row.decision, _explain_withdrawal(row, servers, specs, questions))
        for row in still_open
        if not _is_current(row, questions)
    ]
    current_servers = {row.subject for row in still_open if _is_current(row, questions)}
    new_questions = [
        _renumber_question(each, decisions) for server, each in questions.items() if server not in current_servers
    ]
    return PinPlan(
        first=tuple(spec for spec in pin_check.usable if spec.server and spec.name not in pins),
        waiting=frozenset(spec.name for spec in (*pin_check.changed, *pin_check.new)),
        questions=tuple(each for each in new_questions if each is not None),
        withdrawn=tuple(withdrawn),
    )


def _is_current(row: DecisionRow, questions: Mapping[str, Question]) -> bool:
    question = questions.get(row.subject)
    return row.about == "changed_server" and question is not None and question.digest == row.digest


def _explain_withdrawal(
    row: DecisionRow, servers: Sequence[str], specs: Sequence[ToolSpec], questions: Mapping[str, Question]
) -> str:
    server = row.subject if row.about == "changed_server" else row.subject.partition(SERVER_SEPARATOR)[0]
    if server not in servers:
        return f"{server} was removed from .mcp.json."
    if row.about != "changed_server" and server in questions:
        return MERGED_QUESTION_REASON
    if server in questions:
        return f"The tools of {server} have changed again; there is a new question about them."
    if not any(spec.server == server for spec in specs):
        return f"{server} offers no tools or cannot be reached. You are asked again when it offers tools."
    return f"{server} offers the approved tools again."


def _renumber_question(question: Question, decisions: Sequence[DecisionRow]) -> Question | None:
    """Return a question with a new id if it was asked before; None if a person denied it."""
    earlier = [row for row in decisions if row.subject == question.subject and row.digest == question.digest]
    if any(row.verdict == "deny" for row in earlier):
        return None
    return msgspec.structs.replace(question, decision=f"{question.decision}/{len(earlier)}") if earlier else question


def _changes(
    changed_specs: Sequence[ToolSpec], new_specs: Sequence[ToolSpec], specs: Sequence[ToolSpec], pins: PinnedDigests
) -> Iterator[ServerChange]:
    for server in sorted({spec.server for spec in (*changed_specs, *new_specs)}):
        server_specs = sorted(
            (spec for spec in (*changed_specs, *new_specs) if spec.server == server), key=lambda spec: spec.name
        )
        offered_names = {spec.name for spec in specs if spec.server == server}
        removed_names = sorted(
            name for name in pins if name.partition(SERVER_SEPARATOR)[0] == server and name not in offered_names
        )
        listed_specs = server_specs[:MAX_TOOLS_PER_QUESTION]
        text = "\n".join(_lines(server, listed_specs, len(server_specs), removed_names, pins))
        yield ServerChange(text, server, tuple(Pin(spec.name, spec.digest) for spec in listed_specs))


def _lines(
    server: str, listed_specs: Sequence[ToolSpec], total: int, removed_names: Sequence[str], pins: PinnedDigests
) -> Iterator[str]:
    """Render the changes of a server. The text is part of the question's digest: a new wording asks again."""
    changed_count = sum(spec.name in pins for spec in listed_specs)
    yield (
        f"{to_one_line(server)}: of its tools {len(listed_specs) - changed_count} shown here are new, "
        f"{changed_count} changed, {len(removed_names)} gone. A yes lets exactly these be used, as they are now."
    )
    is_detailed = len(listed_specs) <= _MAX_DETAILED_TOOLS
    for spec in listed_specs:
        previous = f" (was {pins[spec.name][:_DIGEST_LENGTH]})" if spec.name in pins else ""
        summary = "" if is_detailed else f"  {shorten(to_one_line(spec.description), _MAX_SUMMARY)}"
        yield f"{'changed' if previous else 'new    '}  {spec.name}  {spec.digest[:_DIGEST_LENGTH]}{previous}{summary}"
        if is_detailed:
            yield f"    {shorten(to_one_line(spec.description), _MAX_TEXT)}"
            yield f"    {shorten(to_one_line(spec.schema.decode()), _MAX_TEXT)}"
    if total > len(listed_specs):
        unlisted = format_count(total - len(listed_specs), "more tool")
        yield f"{unlisted} stay out of use: you are asked about them after this."
    for name in removed_names[:_MAX_REMOVED]:
        yield f"gone     {to_one_line(name)}"
    if len(removed_names) > _MAX_REMOVED:
        yield f"and {len(removed_names) - _MAX_REMOVED} more are gone."


async def settle_pins(
    app: Runtime, policy: ResolvedPolicy, servers: Sequence[str], specs: Sequence[ToolSpec]
) -> frozenset[str]:
    """Pin first-seen tools, withdraw and ask questions, and return the tools that wait for a person."""
    store, agent = app.store, policy.name
    # Without tools there is nothing new to ask, so only open questions matter.
    name = "asked_about_servers" if specs else "waiting_about_servers"
    decisions = await store.ask(Query(name, DecisionRow, {"agent": agent}))
    if not specs and not decisions:
        return frozenset()
    pins = {row.tool: row.digest for row in await store.ask(Query("all_pins", PinRow)) if row.agent == agent}
    plan = plan_pins(agent, servers, specs, pins, decisions, app.clock.now())
    if plan.first:
        await store.commit(_pin_first(agent, plan.first))
    for decision, reason in plan.withdrawn:
        await store.commit(withdraw_question(decision, reason))
    for question in plan.questions:
        await store.commit(ask_question(msgspec.structs.replace(question, terms=policy.question_terms)))
    return plan.waiting


def _pin_first(agent: str, specs: Sequence[ToolSpec]) -> Write:
    """Pin tools seen for the first time in one commit; pins that another process made first are kept."""

    def pin(rows: Rows) -> Sequence[Draft]:
        new_specs = [spec for spec in specs if rows.get(PinRow, agent, spec.name) is None]
        events = [ToolPinned(agent=agent, tool=spec.name, digest=spec.digest, by="first use") for spec in new_specs]
        return [Draft(event) for event in events]

    digest = sha256("\n".join(f"{spec.name} {spec.digest}" for spec in specs).encode()).hexdigest()
    return Write(FLEET, f"pin/{agent}/{digest[:32]}/first", pin, [(PinRow, agent, spec.name) for spec in specs])

"""What waits for a person, in words: one sentence says what is wanted, for every face and every notice."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, cast

import msgspec

from halter.core.clock import DAY, format_duration
from halter.core.codec import decode
from halter.core.effect_events import CallStarted
from halter.core.messages import Reply
from halter.core.money import NEAR_CAP_PERCENT, BudgetRow, Usd, format_micros, micros_to_usd, usd_to_micros
from halter.core.ports import Query, Store
from halter.core.rows import AgentRow, HaltRow, ItemRow, NotificationRow, OutageRow, SessionRow, WorkerRow
from halter.core.text import escape_hidden, from_body, shorten, to_one_line
from halter.core.tools import SERVER_SEPARATOR
from halter.core.vocabulary import DecisionKind
from halter.guard.approvals import PendingDecision
from halter.loop.decide import ASK_USER
from halter.runtime.budgets import read_current_budgets

NeedKind = (
    DecisionKind
    | Literal["question", "paused", "model", "stopped", "document", "halt", "host", "undelivered", "budget", "kept"]
)
"""A decision, or something else that only a person can settle."""

MAX_VALUE: Final = 60
MAX_REASON: Final = 300
_OBJECTS: Final = ("command", "path", "file", "filename", "folder", "url", "query", "question", "name", "id")
"""Arguments that are what a verb acts on, and need no name beside them."""
_KINDS: Final = frozenset(("file", "folder", "path", "url", "command", "query"))
"""Nouns in a tool's name that its object replaces: `delete_file` of a path deletes that path."""
_PREPOSITIONS: Final = frozenset(("to", "from", "at", "in", "on", "for", "by", "with", "into"))
_PLAIN: Final = re.compile(r"[\w.@%+:,/~-]+")


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that waits for a person: what is wanted, why, and the commands that answer it.

    `why` is the model's own reason, or what led to it; `shown` are the arguments. An open decision is named, and so is
    the scope that is halted or near its cap, and the document that was left.
    """

    kind: NeedKind
    agent: str
    sentence: str
    why: str = ""
    shown: str = ""
    commands: tuple[str, ...] = ()
    decision: str = ""
    session: str = ""
    scope: str = ""
    item: str = ""

    @property
    def line(self) -> str:
        """The whole on one line: the sentence, its reason, and the first command."""
        return " ".join(part for part in (self.sentence, self.why, *self.commands[:1]) if part)


def describe_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """Put a call into words: `refund` of `{"amount_usd": 19.9, "order": 42}` is "refund $19.90 for order 42"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_.\-]+", " ", tool.rpartition(SERVER_SEPARATOR)[2]).lower().split()
    money = [key for key in arguments if _is_money(key, arguments[key])]
    objects = [key for key in _OBJECTS if key in arguments and _format_short(arguments[key])][:1]
    if objects and len(words) > 1 and words[-1] in _KINDS:
        words.pop()
    if objects == ["command"] and words == ["shell"]:
        words = ["run"]
    parts = [*words, *(_format_short(arguments[key]) for key in objects), *(_dollars(arguments[key]) for key in money)]
    rest = [key for key in arguments if key not in (*money, *objects)]
    sentences = [*_describe_other_arguments(rest, arguments, first="for " if money else "")]
    return " ".join([" ".join(parts) or "call a tool", ", ".join(sentences)]).strip()


def _describe_other_arguments(keys: list[str], arguments: Mapping[str, Any], first: str) -> Iterator[str]:
    """Tell the other arguments: those that are prepositions first. Long and nested ones are only shown."""
    ordered = sorted(keys, key=lambda key: key not in _PREPOSITIONS)
    for key in ordered:
        if (word := _format_short(arguments[key])) == "":
            continue
        name = to_one_line(key.replace("_", " "))
        yield f"{name} {word}" if key in _PREPOSITIONS else f"{first}{name} {word}"
        first = ""


def _is_money(key: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (key == "usd" or key.endswith("_usd"))


def _dollars(value: float) -> str:
    try:
        return format_micros(usd_to_micros(value))
    except ArithmeticError:
        return str(value)


def _format_short(value: Any) -> str:
    """Write a short value as it is, quoted where it is more than a word; nothing for one that is long or nested."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return ""
    text = str(value)
    if not text or len(text) > MAX_VALUE or "\n" in text:
        return ""
    return text if _PLAIN.fullmatch(text) else f"“{to_one_line(text)}”"


def describe_decision(decision: PendingDecision) -> str:
    """Say what an open decision is about."""
    match decision.about:
        case "approval":
            return _end_sentence(f"{decision.agent} wants to {_describe_shown(decision)}") + _describe_people(decision)
        case "unknown_call":
            return f"{decision.agent} began to {_describe_shown(decision)}, and it is unknown whether that was done."
        case "cap_raise":
            return f"{decision.agent} needs more money for {decision.name} than the cap of {decision.subject} leaves."
        case "changed_tool":
            return f"{decision.agent} may not use {decision.name}: it is new, or has changed since it was approved."
        case "changed_server":
            return f"{decision.agent} may not use some tools of the server {decision.name}: they were not approved yet."
        case "schedule":
            return f"{decision.agent} wants to do this by itself: {_describe_plan(decision)}."
        case "proposal":
            return f"{decision.agent} wants a {decision.name} to be kept: {_describe_proposal(decision)}"
        case _:
            return f"{decision.agent} asks about {decision.name}."


def _describe_people(decision: PendingDecision) -> str:
    """Say that a second person is needed, and who has agreed already."""
    if decision.approvers <= 1:
        return ""
    return f" {decision.first_by} has agreed; another person must." if decision.first_by else " Two people must agree."


def _end_sentence(text: str) -> str:
    """Add a full stop, unless a quoted value ends with one."""
    return text if text.endswith((".”", "!”", "?”")) else f"{text}."


def _describe_shown(decision: PendingDecision) -> str:
    return describe_call(decision.name, parse_arguments(decision.name, decision.display_text))


def parse_arguments(name: str, shown: str) -> Mapping[str, Any]:
    """Read the arguments of a call as it is shown to a person; a prediction may follow them."""
    try:
        found: object = json.JSONDecoder().raw_decode(shown.removeprefix(f"{name} "))[0]
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _describe_plan(decision: PendingDecision) -> str:
    """The task of a schedule, as its question's first line has it."""
    first = decision.display_text.partition("\n")[0]
    return shorten(to_one_line(first.partition(": ")[2] or decision.name), MAX_REASON).rstrip(".")


def _describe_proposal(decision: PendingDecision) -> str:
    return shorten(
        to_one_line(decision.display_text.removeprefix(f"{decision.agent} proposes a {decision.name}: ")), MAX_REASON
    )


def read_reason(decision: PendingDecision) -> str:
    """What the model said when it made the call that waits; nothing where it said nothing, or it was erased."""
    if not decision.said or decision.about not in ("approval", "cap_raise"):
        return ""
    try:
        reply = msgspec.json.decode(decision.said, type=Reply)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return shorten(to_one_line(reply.text), MAX_REASON)


class OpenQuestion(msgspec.Struct, frozen=True):
    """A session that waits for an answer, and the last call that it made."""

    session: str
    agent: str
    version: int | None = None
    facts: bytes | None = None
    body: bytes | None = None

    @property
    def call(self) -> str:
        """The call by which the model asked its person; nothing where it did not."""
        event = None if self.version is None else decode(CallStarted.KIND, self.version, self.facts or b"")
        return event.call if isinstance(event, CallStarted) and event.tool == ASK_USER else ""

    @property
    def question_text(self) -> str:
        """What the model asked, whole; nothing where that was erased, or nothing was asked."""
        return str(parse_arguments("", from_body(self.body or b"")).get("question", "")) if self.call else ""

    @property
    def question(self) -> str:
        return shorten(to_one_line(self.question_text), MAX_REASON)


async def read_open_questions(store: Store) -> Mapping[str, OpenQuestion]:
    """Find what sessions ask that are no chats, by session."""
    return {one.session: one for one in await store.ask(Query("open_questions", OpenQuestion))}


def make_decision_need(decision: PendingDecision) -> Need:
    """Put a decision into words that hide no character of what it is about."""
    more = " --cap AMOUNT" if decision.about == "cap_raise" else ""
    shown = (
        decision.display_text.removeprefix(f"{decision.name} ")
        if decision.about in ("approval", "unknown_call")
        else decision.display_text
    )
    return Need(
        kind=cast("NeedKind", decision.about),
        agent=decision.agent,
        sentence=escape_hidden(describe_decision(decision)),
        why=escape_hidden(read_reason(decision)),
        shown=escape_hidden(shown),
        commands=(f"halter approve {decision.decision}{more}", f"halter deny {decision.decision}"),
        decision=decision.decision,
        session=decision.session,
    )


def make_question_need(session: str, agent: str, asked: OpenQuestion | None, *, attended: bool = False) -> Need:
    """A session that no process keeps goes on where it is run again, or where a worker has its agent."""
    question = asked.question if asked else ""
    sentence = f"{agent} asks: {question}" if question else f"{agent} waits for an answer in session {session}."
    again = (f"halter run FOLDER --resume {session} ANSWER",) if attended else ()
    commands = (*again, f"halter tell {session} ANSWER")
    return Need(kind="question", agent=agent, sentence=sentence, commands=commands, session=session)


def make_paused_need(session: str, agent: str) -> Need:
    sentence, commands = f"{agent} is paused in session {session}.", (f"halter resume {agent}",)
    return Need(kind="paused", agent=agent, sentence=sentence, commands=commands, session=session)


def make_document_need(trigger: str, item: str, name: str, why: str) -> Need:
    sentence = f"{trigger} leaves a document to you: {name}."
    commands = (f"halter schedules retry {trigger} {item[:SHORT_DIGEST]}",)
    return Need(
        kind="document",
        agent=trigger.partition("/")[0],
        sentence=sentence,
        why=why,
        commands=commands,
        scope=f"trigger:{trigger}",
        item=item,
    )


SHORT_DIGEST: Final = 16
"""How much of a document's digest names it."""

UNUSABLE_REMEDY: Final = (
    "Mend the provider's key, the model's name or the account; it then goes on by itself, at once when `halter up` is "
    "started anew or `halter on` is said."
)


class ProposalCounts(msgspec.Struct, frozen=True):
    findings: int = 0
    memories: int = 0
    precedents: int = 0


class CapLine(msgspec.Struct, frozen=True):
    """A current cap and what stands against it."""

    scope: str
    window: str
    cap_usd: Usd | None
    spent_usd: Usd
    held_usd: Usd

    @property
    def percent(self) -> int:
        return 0 if not self.cap_usd else int(100 * (self.spent_usd + self.held_usd) // self.cap_usd)


class NeedRows(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue is made of, as it stands at `until`. `sessions` are those that are not over, and may be more."""

    until: int
    sessions: Sequence[SessionRow] = ()
    left: Sequence[ItemRow] = ()
    proposals: ProposalCounts = ProposalCounts()
    budgets: Sequence[BudgetRow] = ()
    waiting: Sequence[PendingDecision] = ()
    halts: Sequence[HaltRow] = ()
    undelivered: Sequence[NotificationRow] = ()
    outages: Sequence[OutageRow] = ()
    stopped: Sequence[SessionRow] = ()
    questions: Mapping[str, OpenQuestion] = {}
    workers: Sequence[WorkerRow] = ()
    switched_on: frozenset[str] = frozenset()


async def read_need_rows(store: Store, until: int, since: int | None = None) -> NeedRows:
    """Read what waits for a person; with `since`, also the sessions that ended and the failed notices from then on."""
    since = until if since is None else since
    (proposals,) = await store.ask(Query("proposals_open", ProposalCounts))
    return NeedRows(
        until=until,
        sessions=await store.ask(Query("sessions_since", SessionRow, {"since": since})),
        left=await store.ask(Query("items_left", ItemRow)),
        proposals=proposals,
        budgets=await read_current_budgets(store, until),
        waiting=await store.ask(Query("open_decisions", PendingDecision, {"now": until})),
        halts=sorted(await store.ask(Query("halts_since", HaltRow, {"since": since})), key=lambda row: row.scope),
        undelivered=await store.ask(Query("undelivered", NotificationRow, {"since": min(since, until - DAY)})),
        outages=await store.ask(Query("open_outages", OutageRow)),
        stopped=await store.ask(Query("stopped_agents", SessionRow)),
        questions=await read_open_questions(store),
        workers=await store.ask(Query("all_workers", WorkerRow)),
        switched_on=frozenset(row.agent for row in await store.ask(Query("all_agents", AgentRow)) if row.switched_on),
    )


def list_caps(budgets: Sequence[BudgetRow], now: int) -> Iterable[CapLine]:
    """List current caps, except those of single sessions."""
    for row in budgets:
        end = row.ends_at
        if row.unit == "usd" and not row.scope.startswith("session:") and (end is None or end > now):
            cap = None if row.cap is None else micros_to_usd(row.cap)
            yield CapLine(row.scope, row.window, cap, micros_to_usd(row.spent), micros_to_usd(row.held))


def list_needs(found: NeedRows) -> Iterator[Need]:
    """List everything that waits for a person: the one queue of inbox, report, Home and API."""
    for decision in found.waiting:
        if decision.expires_at > found.until:
            yield make_decision_need(decision)
    yield from _list_standing_agents(found)
    for item in found.left:
        yield make_document_need(item.trigger, item.item, item.name, item.sentence)
    yield from _list_lost_hosts(found)
    running = {f"session:{row.session}" for row in found.sessions if row.ended_at is None}
    for halt in found.halts:
        if halt.halted and not halt.cancels and (halt.scope in running or not halt.scope.startswith("session:")):
            sentence = f"{halt.scope} was halted by {halt.by}: nothing acts there."
            commands = (f"halter resume {halt.scope}",)
            yield Need(kind="halt", agent="", sentence=sentence, commands=commands, scope=halt.scope)
    for told in found.undelivered:
        if told.gave_up:
            sentence = f"{told.agent}: could not send over {told.channel}: {told.error}"
            yield Need(kind="undelivered", agent=told.agent, sentence=sentence)
    for cap in list_caps(found.budgets, found.until):
        if cap.percent >= NEAR_CAP_PERCENT:
            sentence = f"{cap.percent} % of the cap of {cap.scope} ({cap.window or 'its life'}) are spent or held."
            commands = (f"halter budget raise {cap.scope} AMOUNT",)
            yield Need(kind="budget", agent="", sentence=sentence, commands=commands, scope=cap.scope)
    yield from _list_undecided(found)


def _list_undecided(found: NeedRows) -> Iterator[Need]:
    """Count what waits to be kept or dismissed and is not asked about as a decision."""
    asked = Counter(decision.name for decision in found.waiting if decision.about == "proposal")
    left = (
        ("findings", "finding", "findings", found.proposals.findings),
        ("proposals", "memory", "memories", found.proposals.memories - asked["memory"]),
        ("proposals", "precedent", "precedents", found.proposals.precedents - asked["precedent"]),
    )
    for command, one, many, count in left:
        if count > 0:
            what = f"1 {one} waits" if count == 1 else f"{count:,} {many} wait"
            sentence = f"{what} to be kept or dismissed."
            yield Need(kind="kept", agent="", sentence=sentence, commands=(f"halter {command}",))


def _list_standing_agents(found: NeedRows) -> Iterator[Need]:
    """List the agents that do not go on without a person, and why."""
    for row in found.sessions:
        if row.ended_at is not None or not (row.unattended or row.kind == "task"):
            continue
        if row.state == "WAITING_FOR_INPUT":
            asked = found.questions.get(row.session)
            yield make_question_need(row.session, row.agent, asked, attended=not row.unattended)
        elif row.state == "PAUSED":
            yield make_paused_need(row.session, row.agent)
    for outage in found.outages:
        if outage.trouble == "needs_person":
            sentence = f"{outage.session} cannot think, and waits for you: {outage.sentence}"
            yield Need(kind="model", agent=outage.agent, sentence=sentence, why=UNUSABLE_REMEDY, session=outage.session)
    for row in found.stopped:
        why = row.terminal_reason.replace("_", " ")
        sentence = f"{row.agent} has stopped: {row.session} ended {row.state} ({why})."
        commands = (f"halter resume {row.agent}", f"halter receipt {row.session}")
        yield Need(kind="stopped", agent=row.agent, sentence=sentence, commands=commands, session=row.session)


def _list_lost_hosts(found: NeedRows) -> Iterator[Need]:
    """List processes that went away without a word, as long as no other on their host runs their agents."""
    told = [(row, row.told()) for row in found.workers]
    alive = [about for row, about in told if row.alive(found.until) and about.kind]
    for row, about in told:
        lost_at = row.alive_until
        if row.alive(found.until) or not lost_at or not about.kind or lost_at < found.until - DAY:
            continue
        away = sorted(agent for agent in about.agents if agent in found.switched_on)
        if not away or any(one.host == about.host and set(away) <= one.agents.keys() for one in alive):
            continue
        ago = format_duration(max(0, found.until - lost_at))
        elsewhere = all(any(agent in one.agents for one in alive) for agent in away)
        goes_on = "other processes run them meanwhile." if elsewhere else "nothing runs them now."
        sentence = (
            f"halter {about.kind} {about.pid} on {about.host} went away without a word {ago} ago, with "
            f"{', '.join(away)}: {goes_on}"
        )
        yield Need(kind="host", agent=away[0], sentence=sentence, why="Start it again there.")

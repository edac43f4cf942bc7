"""Describes everything that waits for a person. All interfaces and notices use the same sentences."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, cast

import msgspec

from halter.autonomy.pace import read_progress
from halter.autonomy.upkeep import (
    MAX_SESSIONS_COMPARED,
    Progress,
    Unhealthy,
    build_progress,
    judge_ended_agent,
    judge_open_agent,
    judge_trigger,
)
from halter.core.clock import DAY, format_duration
from halter.core.codec import decode
from halter.core.events import TurnEnded
from halter.core.events.effects import CallStarted
from halter.core.messages import Reply
from halter.core.money import BudgetRow, Usd, format_exact_micros, micros_to_usd, usd_to_micros
from halter.core.ports import Query, Store
from halter.core.rows import AgentRow, HaltRow, ItemRow, NotificationRow, OutageRow, SessionRow, TriggerRow
from halter.core.text import decode_body, escape_hidden, shorten, to_one_line
from halter.core.tools import SERVER_SEPARATOR
from halter.core.vocabulary import DecisionKind
from halter.dispatch.workers import WorkerInfo, WorkerRow
from halter.guard.approvals import PendingDecision, list_pending_decisions
from halter.loop.turn import ASK_USER
from halter.runtime.budgets import read_current_budgets

_OtherKind = Literal[
    "question",
    "paused",
    "model",
    "stopped",
    "unhealthy",
    "unclaimed",
    "document",
    "halt",
    "host",
    "undelivered",
    "budget",
    "kept",
]
NeedKind = DecisionKind | _OtherKind
"""A decision, or something else that only a person can resolve."""

NEAR_CAP_PERCENT: Final = 80
"""Percentage of a cap that is spent or held when a person is told; it serves all agents of the scope."""
MAX_VALUE: Final = 60
MAX_REASON: Final = 300
_OBJECTS: Final = ("command", "path", "file", "filename", "folder", "url", "query", "question", "name", "id")
"""Arguments that are the object of a call and are shown without their names."""
_KINDS: Final = frozenset(("file", "folder", "path", "url", "command", "query"))
"""Nouns in a tool's name that its object replaces: `delete_file` of `a.txt` is shown as "delete a.txt"."""
_PREPOSITIONS: Final = frozenset(("to", "from", "at", "in", "on", "for", "by", "with", "into"))
_PLAIN: Final = re.compile(r"[\w.@%+:,/~-]+")


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that waits for a person: a sentence, the reason, and the commands that resolve it.

    `why` is the model's own reason, or what happened. `cause` says which level, mode, risk, rule or provenance made the
    guard ask. `shown` are the arguments. `decision` is the id of a pending
    decision, whose `digest` binds an answer to what is shown, and which expires at `expires_at`. `scope` is halted or
    near its cap; `item` is the quarantined document.
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
    digest: str = ""
    expires_at: int | None = None
    cause: str = ""

    @property
    def is_about_health(self) -> bool:
        """True for an unhealthy agent, which every face shows first."""
        return self.kind in ("stopped", "unhealthy")

    @property
    def line(self) -> str:
        """The sentence, its reason and the first command, on one line."""
        return " ".join(part for part in (self.sentence, self.why, *self.commands[:1]) if part)


def describe_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """Describe a call: `refund` of `{"amount_usd": 19.9, "order": 42}` is "refund $19.90 for order 42"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_.\-]+", " ", tool.rpartition(SERVER_SEPARATOR)[2]).lower().split()
    money = [key for key in arguments if _is_money(key, arguments[key])]
    objects = [key for key in _OBJECTS if key in arguments and _format_short(arguments[key])][:1]
    if objects and len(words) > 1 and words[-1] in _KINDS:
        words.pop()
    if objects == ["command"] and words == ["shell"]:
        words = ["run"]
    parts = [*words, *(_format_short(arguments[key]) for key in objects), *(_dollars(arguments[key]) for key in money)]
    remaining = [key for key in arguments if key not in (*money, *objects)]
    phrases = [*_describe_other_arguments(remaining, arguments, first="for " if money else "")]
    return " ".join([" ".join(parts) or "call a tool", ", ".join(phrases)]).strip()


def _describe_other_arguments(keys: list[str], arguments: Mapping[str, Any], first: str) -> Iterator[str]:
    """Describe the other arguments, prepositions first. Long and nested ones are left out; `shown` has them."""
    ordered_keys = sorted(keys, key=lambda key: key not in _PREPOSITIONS)
    for key in ordered_keys:
        if (text := _format_short(arguments[key])) == "":
            continue
        name = to_one_line(key.replace("_", " "))
        yield f"{name} {text}" if key in _PREPOSITIONS else f"{first}{name} {text}"
        first = ""


def _is_money(key: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (key == "usd" or key.endswith("_usd"))


def _dollars(value: float) -> str:
    try:
        return format_exact_micros(usd_to_micros(value))
    except ArithmeticError:
        return str(value)


def _format_short(value: Any) -> str:
    """Format a short value, quoted if it is more than a word; "" for a long or nested one."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return ""
    text = str(value)
    if not text or len(text) > MAX_VALUE or "\n" in text:
        return ""
    return text if _PLAIN.fullmatch(text) else f"“{to_one_line(text)}”"


def describe_decision(decision: PendingDecision) -> str:
    """Describe what a pending decision is about."""
    match decision.about:
        case "approval":
            return _end_sentence(f"{decision.agent} wants to {_describe_decision_call(decision)}") + _describe_people(
                decision
            )
        case "unknown_call":
            return f"{decision.agent} started to {_describe_decision_call(decision)}, and the outcome is unknown."
        case "cap_raise":
            return f"{decision.agent} needs more money for {decision.name} than the cap of {decision.subject} leaves."
        case "changed_tool":
            return f"{decision.agent} cannot use {decision.name} until you approve it: it is new or has changed."
        case "changed_server":
            return f"{decision.agent} cannot use some tools of the server {decision.name} until you approve them."
        case "schedule":
            return f"{decision.agent} wants to schedule a task: {_describe_plan(decision)}."
        case "proposal":
            return f"{decision.agent} proposes a {decision.name}: {_describe_proposal(decision)}"
        case _:
            return f"{decision.agent} asks about {decision.name}."


def _describe_people(decision: PendingDecision) -> str:
    """Describe that a second approver is needed, and who has already approved; "" if one is enough."""
    if decision.approvers <= 1:
        return ""
    if decision.first_by:
        return f" {decision.first_by} approved it; one more approver is needed."
    return " Two approvers are needed."


def _end_sentence(text: str) -> str:
    """Add a full stop unless a quoted value ends the sentence."""
    return text if text.endswith((".”", "!”", "?”")) else f"{text}."


def _describe_decision_call(decision: PendingDecision) -> str:
    return describe_call(decision.name, parse_arguments(decision.name, decision.display_text))


def parse_arguments(name: str, text: str) -> Mapping[str, Any]:
    """Parse the arguments of a call from its displayed text, which may continue with a prediction."""
    try:
        arguments: object = json.JSONDecoder().raw_decode(text.removeprefix(f"{name} "))[0]
    except (ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", arguments) if isinstance(arguments, dict) else {}


def _describe_plan(decision: PendingDecision) -> str:
    """Return the task of a schedule from the first line of its question."""
    line = decision.display_text.partition("\n")[0]
    return shorten(to_one_line(line.partition(": ")[2] or decision.name), MAX_REASON).rstrip(".")


def _describe_proposal(decision: PendingDecision) -> str:
    return shorten(
        to_one_line(decision.display_text.removeprefix(f"{decision.agent} proposes a {decision.name}: ")), MAX_REASON
    )


def read_reason(decision: PendingDecision) -> str:
    """Return the model's text in the reply with the waiting call; "" if there was none or it was erased."""
    if not decision.said or decision.about not in ("approval", "cap_raise"):
        return ""
    try:
        reply = msgspec.json.decode(decision.said, type=Reply)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return shorten(to_one_line(reply.text), MAX_REASON)


class OpenQuestion(msgspec.Struct, frozen=True):
    """A session that waits for an answer, and its last call."""

    session: str
    agent: str
    version: int | None = None
    facts: bytes | None = None
    body: bytes | None = None

    @property
    def call(self) -> str:
        """The id of the call with which the model asked a person; "" if it did not ask."""
        event = None if self.version is None else decode(CallStarted.KIND, self.version, self.facts or b"")
        return event.call if isinstance(event, CallStarted) and event.tool == ASK_USER else ""

    @property
    def question_text(self) -> str:
        """The model's full question; "" if there was none or it was erased."""
        return str(parse_arguments("", decode_body(self.body or b"")).get("question", "")) if self.call else ""

    @property
    def question(self) -> str:
        return shorten(to_one_line(self.question_text), MAX_REASON)


async def read_open_questions(store: Store) -> Mapping[str, OpenQuestion]:
    """Read the open questions of sessions other than chats, by session."""
    return {question.session: question for question in await store.ask(Query("open_questions", OpenQuestion))}


def make_decision_need(decision: PendingDecision) -> Need:
    """Describe a decision, with hidden characters made visible."""
    option = " --cap AMOUNT" if decision.about == "cap_raise" else ""
    detail = (
        decision.display_text.removeprefix(f"{decision.name} ")
        if decision.about in ("approval", "unknown_call")
        else decision.display_text
    )
    return Need(
        kind=cast("NeedKind", decision.about),
        agent=decision.agent,
        sentence=escape_hidden(describe_decision(decision)),
        why=escape_hidden(read_reason(decision)),
        cause=escape_hidden(decision.cause),
        shown=escape_hidden(detail),
        commands=(f"halter approve {decision.decision}{option}", f"halter deny {decision.decision}"),
        decision=decision.decision,
        session=decision.session,
        digest=decision.digest,
        expires_at=decision.expires_at,
    )


def make_question_need(session: str, agent: str, open_question: OpenQuestion | None, *, attended: bool = False) -> Need:
    """Describe a question to a person. An attended session resumes when it is run again, others in a worker."""
    question = open_question.question if open_question else ""
    sentence = f"{agent} asks: {question}" if question else f"{agent} waits for an answer in session {session}."
    resume_commands = (f"halter run FOLDER --resume {session} ANSWER",) if attended else ()
    commands = (*resume_commands, f"halter tell {session} ANSWER")
    return Need(kind="question", agent=agent, sentence=sentence, commands=commands, session=session)


def find_runner(row: SessionRow, workers: Iterable[WorkerRow], now: int) -> WorkerInfo | None:
    """Find the live process that continues a session once it is due: its owner, or one that runs its agent."""
    for worker in workers:
        if row.owner == worker.worker and worker.alive(now):
            return worker.parse_info()
    for worker in workers if row.unattended else ():
        info = worker.parse_info()
        runs_agent = row.agent in info.agents and row.agent not in info.waiting and not info.closing
        if info.kind and runs_agent and worker.alive(now):
            return info
    return None


def describe_runner(info: WorkerInfo) -> str:
    name = f"halter {info.kind} {info.pid}" if info.kind else f"its process {info.pid}" if info.pid else "its process"
    return f"{name} on {info.host}" if info.host else name


def list_resume_commands(row: SessionRow, parents: Mapping[str, SessionRow]) -> tuple[str, ...]:
    """List the commands that continue a session which no process runs; a sub-session continues with its parent.

    None continues an external session: its program has to make the same call again.
    """
    while not row.trigger and row.parent in parents:
        row = parents[row.parent]
    if row.kind in ("hooked", "proxied", "gated"):
        return ()
    if row.unattended:
        return ("halter up FOLDER",)
    if row.kind == "chat":
        return (f"halter chat FOLDER --resume {row.session}",)
    return f"halter run FOLDER --resume {row.session}", f"halter play PLAYBOOK --resume {row.session}"


async def describe_continuation(store: Store, session: str, now: int) -> str:
    """Describe which process continues a session once it is answered, or how to continue it if none does."""
    rows = await store.ask(Query("session", SessionRow, {"session": session})) if session else ()
    if not rows or rows[0].ended_at is not None:
        return ""
    runner = find_runner(rows[0], await store.ask(Query("all_workers", WorkerRow)), now)
    if runner is not None:
        sentence = f"{describe_runner(runner)} continues it."
        return f"{sentence[0].upper()}{sentence[1:]}" if not runner.kind else sentence
    parents, parent = dict[str, SessionRow](), rows[0].parent
    while parent and parent not in parents:
        for row in await store.ask(Query("session", SessionRow, {"session": parent})):
            parents[parent], parent = row, row.parent
    return describe_resumption(list_resume_commands(rows[0], parents))


def describe_resumption(commands: Sequence[str]) -> str:
    if not commands:
        return "It takes effect when the program makes the same call again."
    return f"No process runs the session. To continue it: {' or '.join(commands)}"


def make_paused_need(session: str, agent: str) -> Need:
    sentence, commands = f"{agent} is paused in session {session}.", (f"halter on {agent}",)
    return Need(kind="paused", agent=agent, sentence=sentence, commands=commands, session=session)


def make_unhealthy_need(unhealthy: Unhealthy) -> Need:
    """Describe an unhealthy agent. It is `stopped` if only a person starts it again."""
    return Need(
        kind="stopped" if unhealthy.until is None else "unhealthy",
        agent=unhealthy.agent,
        sentence=unhealthy.sentence,
        why=unhealthy.remedy,
        commands=(f"halter on {unhealthy.agent}", f"halter show {unhealthy.session} --receipt"),
        session=unhealthy.session,
    )


def make_document_need(trigger: str, item: str, name: str, reason: str) -> Need:
    sentence = f"{trigger} quarantined a document: {name}."
    commands = (f"halter triggers retry {trigger} {item[:SHORT_DIGEST]}",)
    return Need(
        kind="document",
        agent=trigger.partition("/")[0],
        sentence=sentence,
        why=reason,
        commands=commands,
        scope=f"trigger:{trigger}",
        item=item,
    )


SHORT_DIGEST: Final = 16
"""Number of characters of a document's digest that name it."""

UNUSABLE_REMEDY: Final = (
    "Fix the API key, model name or account. The agent resumes automatically; run `halter on AGENT` to resume now."
)


class AgentHealth(msgspec.Struct, frozen=True):
    """The health of an agent: a word, empty for one that is well, with its cause and what mends it."""

    word: Literal["", "unhealthy"] = ""
    sentence: str = ""


class ProposalCounts(msgspec.Struct, frozen=True):
    findings: int = 0
    memories: int = 0
    precedents: int = 0


class CapLine(msgspec.Struct, frozen=True):
    """A current cap, with what is spent and held against it."""

    scope: str
    window: str
    cap_usd: Usd | None
    spent_usd: Usd
    held_usd: Usd

    @property
    def percent(self) -> int:
        return 0 if not self.cap_usd else int(100 * (self.spent_usd + self.held_usd) // self.cap_usd)


class NeedRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of the queue at the time `until`. `sessions` contains all open sessions and may contain ended ones."""

    until: int
    sessions: Sequence[SessionRow] = ()
    quarantined_items: Sequence[ItemRow] = ()
    proposals: ProposalCounts = ProposalCounts()
    budgets: Sequence[BudgetRow] = ()
    waiting: Sequence[PendingDecision] = ()
    halts: Sequence[HaltRow] = ()
    undelivered: Sequence[NotificationRow] = ()
    outages: Sequence[OutageRow] = ()
    unhealthy: Sequence[Unhealthy] = ()
    questions: Mapping[str, OpenQuestion] = {}
    workers: Sequence[WorkerRow] = ()
    switched_on: frozenset[str] = frozenset()


async def read_need_rows(store: Store, until: int, since: int | None = None) -> NeedRows:
    """Read the rows of the queue; with `since`, also the sessions that ended and the notices that failed since then."""
    since = until if since is None else since
    (proposals,) = await store.ask(Query("proposals_open", ProposalCounts))
    return NeedRows(
        until=until,
        sessions=await store.ask(Query("sessions_since", SessionRow, {"since": since})),
        quarantined_items=await store.ask(Query("items_left", ItemRow)),
        proposals=proposals,
        budgets=await read_current_budgets(store, until),
        waiting=await list_pending_decisions(store, until),
        halts=sorted(await store.ask(Query("halts_since", HaltRow, {"since": since})), key=lambda row: row.scope),
        undelivered=await store.ask(Query("undelivered", NotificationRow, {"since": min(since, until - DAY)})),
        outages=await store.ask(Query("open_outages", OutageRow)),
        unhealthy=await list_unhealthy(store, until),
        questions=await read_open_questions(store),
        workers=await store.ask(Query("all_workers", WorkerRow)),
        switched_on=frozenset(row.agent for row in await store.ask(Query("all_agents", AgentRow)) if row.switched_on),
    )


class _EndedRun(SessionRow, frozen=True):
    """An ended session of a trigger. `item` is the document of a watch whose newest session it is."""

    item: str = ""


_MAX_RUNS_SEARCHED: Final = 20
"""Number of a watch's newest sessions among which the newest of each document are searched."""


async def _read_attempts(store: Store, rows: Sequence[SessionRow]) -> Sequence[Progress]:
    """Read what ended sessions have done, the newest first. Where the newest completed, nothing has to be read."""
    if not rows or rows[0].state == "COMPLETED":
        return [build_progress(row, ()) for row in rows[:1]]
    return [build_progress(row, await read_progress(store, row.session)) for row in rows[:MAX_SESSIONS_COMPARED]]


async def read_trigger_health(store: Store, trigger: TriggerRow, since: int) -> Unhealthy | None:
    """Judge a trigger by its sessions since a person switched its agent on, and since it was defined.

    The sessions of a watch count once for each document: one bad document does not stop the others.
    """
    params = {"trigger": trigger.trigger, "limit": _MAX_RUNS_SEARCHED}
    rows = await store.ask(Query("attempts_of", _EndedRun, params))
    if trigger.type == "watch":
        rows = [row for row in rows if row.item]
    attempts = await _read_attempts(store, rows)
    return judge_trigger(trigger.agent, trigger.trigger, attempts, max(since, trigger.made_at))


async def read_agent_health(store: Store, agent: str, since: int, *, has_window_cap: bool) -> Unhealthy | None:
    """Judge an autonomous agent: by the turns of its open session, or else by its ended ones."""
    params = {"agent": agent, "kind": "autonomous", "limit": MAX_SESSIONS_COMPARED}
    rows = await store.ask(Query("sessions_of", SessionRow, params))
    if rows and rows[0].ended_at is None:
        events = await read_progress(store, rows[0].session)
        if any(isinstance(event, TurnEnded) for event, _ in events):
            return judge_open_agent(agent, rows[0], events)
    if not rows or rows[0].state in ("HALTED", "CANCELLED"):
        return None
    ended = [row for row in rows if row.ended_at is not None and row.state not in ("HALTED", "CANCELLED")]
    return judge_ended_agent(agent, await _read_attempts(store, ended), since, has_window_cap=has_window_cap)


async def list_unhealthy(store: Store, now: int) -> Sequence[Unhealthy]:
    """List the agents that are on and unhealthy. Every face asks here, so all of them say the same."""
    switches = {row.agent: row for row in await store.ask(Query("all_agents", AgentRow))}
    found: list[Unhealthy | None] = []
    for row in await store.ask(Query("newest_attempts", SessionRow)):
        since = switches[row.agent].at
        if row.trigger:
            (trigger,) = await store.ask(Query("trigger", TriggerRow, {"trigger": row.trigger}))
            found.append(await read_trigger_health(store, trigger, since))
        else:
            has_window_cap = row.ended_at is not None and await _has_window_cap(store, row.agent, now)
            found.append(await read_agent_health(store, row.agent, since, has_window_cap=has_window_cap))
    return sorted((each for each in found if each is not None), key=lambda each: (each.agent, each.trigger))


async def _has_window_cap(store: Store, agent: str, now: int) -> bool:
    """Return whether an hourly, daily or monthly cap bounds the next sessions of an agent."""
    rows = await read_current_budgets(store, now)
    return any(row.window and row.cap is not None for row in rows if row.scope in ("fleet", f"agent:{agent}"))


def find_health(agent: str, unhealthy: Sequence[Unhealthy]) -> AgentHealth:
    """Return the health of an agent in one word and one sentence, for every face."""
    own = [each.line for each in unhealthy if each.agent == agent]
    return AgentHealth("unhealthy", " ".join(own)) if own else AgentHealth()


def list_caps(budgets: Sequence[BudgetRow], now: int) -> Iterable[CapLine]:
    """List current caps, except those of single sessions."""
    for row in budgets:
        end = row.ends_at
        if row.unit == "usd" and not row.scope.startswith("session:") and (end is None or end > now):
            cap = None if row.cap is None else micros_to_usd(row.cap)
            yield CapLine(row.scope, row.window, cap, micros_to_usd(row.spent), micros_to_usd(row.held))


def list_needs(rows: NeedRows) -> Iterator[Need]:
    """List everything that waits for a person, unhealthy agents first. Every face shows this queue."""
    yield from map(make_unhealthy_need, rows.unhealthy)
    for decision in rows.waiting:
        if decision.expires_at > rows.until:
            yield make_decision_need(decision)
    yield from _list_blocked_agents(rows)
    for item in rows.quarantined_items:
        yield make_document_need(item.trigger, item.item, item.name, item.sentence)
    yield from _list_lost_hosts(rows)
    running = {f"session:{row.session}" for row in rows.sessions if row.ended_at is None}
    for halt in rows.halts:
        if halt.halted and not halt.cancels and (halt.scope in running or not halt.scope.startswith("session:")):
            sentence = f"{halt.scope} was halted by {halt.by}; nothing runs there."
            commands = (f"halter resume {halt.scope}",)
            yield Need(kind="halt", agent="", sentence=sentence, why=halt.reason, commands=commands, scope=halt.scope)
    for notification in rows.undelivered:
        if notification.gave_up:
            channel, error = notification.channel, notification.error
            sentence = f"{notification.agent} could not send a notification over {channel}: {error}"
            yield Need(kind="undelivered", agent=notification.agent, sentence=sentence)
    for cap in list_caps(rows.budgets, rows.until):
        if cap.percent >= NEAR_CAP_PERCENT:
            sentence = f"{cap.percent} % of the cap of {cap.scope} ({cap.window or 'whole life'}) is spent or held."
            commands = (f"halter budget raise {cap.scope} AMOUNT",)
            yield Need(kind="budget", agent="", sentence=sentence, commands=commands, scope=cap.scope)
    yield from _list_undecided(rows)


def _list_undecided(rows: NeedRows) -> Iterator[Need]:
    """Count the findings and proposals that wait for a person and are not decisions."""
    pending_counts = Counter(decision.name for decision in rows.waiting if decision.about == "proposal")
    kinds = (
        ("findings", "finding", "findings", rows.proposals.findings),
        ("proposals", "memory", "memories", rows.proposals.memories - pending_counts["memory"]),
        ("proposals", "precedent", "precedents", rows.proposals.precedents - pending_counts["precedent"]),
    )
    for command, singular, plural, count in kinds:
        if count > 0:
            count_text = f"1 {singular} waits" if count == 1 else f"{count:,} {plural} wait"
            sentence = f"{count_text} to be accepted or dismissed."
            yield Need(kind="kept", agent="", sentence=sentence, commands=(f"halter {command}",))


def _list_unclaimed(rows: NeedRows) -> Iterator[Need]:
    """List the sessions that were answered, and that no process runs."""
    parents = {row.session: row for row in rows.sessions}
    for row in rows.sessions:
        is_answered = row.ended_at is None and row.inbox_wake > row.inbox_seen
        commands = list_resume_commands(row, parents) if is_answered else ()
        if commands and find_runner(row, rows.workers, rows.until) is None:
            sentence = f"{row.agent} was answered in session {row.session}, and no process runs it."
            yield Need(kind="unclaimed", agent=row.agent, sentence=sentence, commands=commands, session=row.session)


def _list_blocked_agents(need_rows: NeedRows) -> Iterator[Need]:
    """List the sessions and agents that cannot continue without a person."""
    unclaimed_needs = list(_list_unclaimed(need_rows))
    yield from unclaimed_needs
    unclaimed_sessions = {need.session for need in unclaimed_needs}
    for row in need_rows.sessions:
        if row.ended_at is not None or row.session in unclaimed_sessions or not (row.unattended or row.kind == "task"):
            continue
        if row.state == "WAITING_FOR_INPUT":
            question = need_rows.questions.get(row.session)
            yield make_question_need(row.session, row.agent, question, attended=not row.unattended)
        elif row.state == "PAUSED":
            yield make_paused_need(row.session, row.agent)
    for outage in need_rows.outages:
        if outage.trouble == "needs_person":
            sentence = f"{outage.session} cannot use its model: {outage.sentence}"
            yield Need(kind="model", agent=outage.agent, sentence=sentence, why=UNUSABLE_REMEDY, session=outage.session)


def _list_lost_hosts(rows: NeedRows) -> Iterator[Need]:
    """List processes that stopped sending heartbeats, unless another process on their host runs their agents."""
    workers = [(row, row.parse_info()) for row in rows.workers]
    alive = [info for row, info in workers if row.alive(rows.until) and info.kind]
    for row, info in workers:
        lost_at = row.alive_until
        if row.alive(rows.until) or not lost_at or not info.kind or lost_at < rows.until - DAY:
            continue
        lost_agents = sorted(agent for agent in info.agents if agent in rows.switched_on)
        if not lost_agents or any(peer.host == info.host and set(lost_agents) <= peer.agents.keys() for peer in alive):
            continue
        ago = f"stopped sending heartbeats {format_duration(rows.until - lost_at)} ago"
        end = "was killed" if lost_at >= rows.until else ago
        runs_elsewhere = all(any(agent in peer.agents for peer in alive) for agent in lost_agents)
        now_runs = "other processes run them now." if runs_elsewhere else "no process runs them now."
        sentence = f"halter {info.kind} {info.pid} on {info.host} {end}. It ran {', '.join(lost_agents)}; {now_runs}"
        yield Need(kind="host", agent=lost_agents[0], sentence=sentence, why="Start it again on that host.")

"""What can be seen: sessions and their events, the fleet, spending, the audit."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta

from halter.core.clock import DAY, HOUR, window_at
from halter.core.codec import decode
from halter.core.events import AnyEvent, CallSettled, CallStarted, SensorChanged, Unknown
from halter.core.ids import StreamId, inbox_stream, session_stream
from halter.core.money import ZERO_USD, BudgetRow, Usd, micros_to_usd
from halter.core.ports import Query, Store, Stored, parse_notification, read_body
from halter.core.rows import AgentRow, HaltRow, ItemRow, OutageRow, SavedHotState, SessionRow
from halter.core.text import LAST_CHARACTER, from_body, shorten, to_one_line
from halter.core.vocabulary import END_STATES, State
from halter.operations.desk import (
    LATEST,
    Actor,
    Agent,
    Count,
    Limit,
    Moment,
    Name,
    Session,
    Words,
    fail_invalid,
    readable,
)
from halter.operations.report import NightSummary, Report, ReportRows, read_night, read_report_rows
from halter.operations.report import build_report as report_of
from halter.runtime.budgets import Budget, read_configured_caps, read_current_budgets, render_budgets
from halter.runtime.feed import serialize_event
from halter.runtime.needs import Need, list_needs
from halter.runtime.runtime import Runtime
from halter.state.audit import AuditEntry, AuditRecord, load_audit_bodies, make_audit_entry, summarize_body
from halter.state.receipt import Receipt, TurnLine
from halter.state.receipt import make_receipt as receipt_of

PAGE: Final = 1000
MOST: Final = 1_000_000
MOST_PARTS: Final = 1000
MOST_NEWS: Final = 20
CHANGES: Final = 200
"""How many sensor changes are searched for the latest of each sensor."""

Parts = Annotated[int, Meta(ge=1, le=MOST_PARTS, description="How many parts.")]
After = Annotated[int, Meta(ge=0, le=LATEST, description="Only events after this sequence number.")]
Inbox = Annotated[bool, Meta(description="Read its inbox instead.")]
InState = Annotated[
    str, Meta(max_length=300, description="Only in this state, as in sleeping.", extra={"metavar": "STATE"})
]


class AgentNews(msgspec.Struct, frozen=True):
    """A notice that an agent, or the runtime about it, sent to the app."""

    agent: str
    queued_at: int
    body: bytes | None
    about: str = ""

    @property
    def subject(self) -> str:
        telling = parse_notification(self.body or b"{}")
        return to_one_line(telling.subject or shorten(telling.text, 120)) or "(erased)"


class AgentLine(msgspec.Struct, frozen=True, kw_only=True):
    """An agent now. Without a session nothing of it is under way; `burn_usd` is the cost of its last hour.

    `trouble` says why it is held up; one that is `stopped` does not go on without a person.
    """

    agent: str
    on: bool | None = None
    switched_by: str = ""
    halted: str = ""
    session: str = ""
    state: str = ""
    due_at: int | None = None
    wake_on: str = ""
    under_way: int = 0
    spent_today_usd: Usd = ZERO_USD
    cap_today_usd: Usd | None = None
    burn_usd: Usd = ZERO_USD
    sensors: Mapping[str, str] = {}
    trouble: str = ""
    stopped: bool = False


class FactView(msgspec.Struct, frozen=True):
    """A value of hot state as last saved, when it was written, and by whom."""

    value: Any
    at: int
    by: str = ""


class HotStateView(msgspec.Struct, frozen=True):
    """A session's hot state as last saved; `at` is None if it never was."""

    at: int | None = None
    facts: Mapping[str, FactView] = {}


class HotStateShown(msgspec.Struct, frozen=True):
    """The hot state that a turn saw."""

    at: int
    values: Mapping[str, Any]


class SpendingPart(msgspec.Struct, frozen=True):
    """What an agent spent in one part of a period."""

    part: int
    agent: str
    spent_usd: Usd


class _Sum(msgspec.Struct, frozen=True):
    part: int
    agent: str
    usd: int


class _Kind(msgspec.Struct, frozen=True):
    seq: int
    at: int
    version: int
    facts: bytes
    body: bytes | None


async def session(actor: Actor, session: Session) -> SessionRow:
    """Show a session."""
    return await actor.session(session)


async def sessions(
    actor: Actor, agent: Agent = "", state: InState = "", since: Moment = 0, limit: Limit = 50
) -> Sequence[SessionRow]:
    """List sessions, the newest first: all, or those of an agent, in a state, or begun since a moment."""
    if agent:
        actor.require_agent(readable(agent, "an agent"))
    within = _read_state(state)
    seen = (agent,) if agent or not actor.principal.agents else actor.principal.agents
    rows = [row for name in seen for row in await _sessions(actor, name, within, max(1, since), limit)]
    return sorted(rows, key=lambda row: (row.started_at, row.session), reverse=True)[:limit]


async def _sessions(actor: Actor, agent: str, state: State | None, since: int, limit: int) -> Sequence[SessionRow]:
    """Ask by the index that fits: every answer costs what it shows, however long the past is."""
    if state is None:
        name = "sessions_of_agent_since" if agent else "sessions"
    elif state in END_STATES:
        name = "sessions_of_agent_ended" if agent else "sessions_ended"
    else:
        name = "sessions_in_state"
    params = {"agent": agent, "state": state, "since": since, "limit": limit}
    return await actor.app.store.ask(Query(name, SessionRow, params))


def _read_state(typed: str) -> State | None:
    """Read a state however its letters are written; none for an empty word."""
    word = typed.strip().upper().replace(" ", "_").replace("-", "_")
    found = next((state for state in get_args(State) if state == word), None)
    if word and found is None:
        fail_invalid(f"{typed!r} is no state of a session: write one of {', '.join(map(str.lower, get_args(State)))}.")
    return found


async def session_budget(actor: Actor, session: str) -> Budget | None:
    """Show what a session spends of its cap; None before it spends anything."""
    params = {"scope": f"session:{session}", "window": "", "unit": "usd"}
    rows = await actor.app.store.ask(Query("budget", BudgetRow, params))
    return next(iter(await render_budgets(actor.app.store, rows)), None)


async def session_spent(actor: Actor, session: str) -> Usd:
    params = {"scope": f"session:{session}", "window": "", "unit": "usd"}
    rows = await actor.app.store.ask(Query("budget", BudgetRow, params))
    return micros_to_usd(rows[0].spent) if rows else ZERO_USD


class WorkDone(msgspec.Struct, frozen=True):
    """How much a session did in its whole life, up to an event."""

    turns: int = 0
    calls: int = 0
    refused: int = 0
    seq: int = 0


class _WorkKind(msgspec.Struct, frozen=True):
    kind: str
    count: int
    seq: int


async def count_work(actor: Actor, session: str, so_far: WorkDone) -> WorkDone:
    """Count a session's turns, calls and refusals: all of them at first, and later only those that are new."""
    params = {"stream": session_stream(session), "after": so_far.seq}
    rows = await actor.app.store.ask(Query("work_done", _WorkKind, params))
    new = {row.kind: row.count for row in rows}
    return WorkDone(
        so_far.turns + new.get("turn_started", 0),
        so_far.calls + new.get("call_started", 0),
        so_far.refused + new.get("call_refused", 0) + new.get("request_refused", 0),
        max((row.seq for row in rows), default=so_far.seq),
    )


async def session_tokens(actor: Actor, session: str) -> int:
    """Show how many tokens a session used in its whole life, without those that a provider had cached."""
    params = {"scope": f"session:{session}", "window": "", "unit": "tokens"}
    rows = await actor.app.store.ask(Query("budget", BudgetRow, params))
    return rows[0].spent if rows else 0


async def session_title(actor: Actor, row: SessionRow) -> str:
    """Name a session by its document and the first line of its task, or by what started it.

    The runs of a watch all have the same task: their documents tell them apart.
    """
    of = await actor.app.store.ask(Query("items_of_session", ItemRow, {"session": row.session})) if row.trigger else ()
    document = f"{to_one_line(of[0].name)}: " if of else ""
    for stored in await actor.app.store.read(session_stream(row.session), 0, 1):
        words = from_body(await read_body(actor.app.store, stored)).strip()
        if words:
            return shorten(f"{document}{to_one_line(words.splitlines()[0])}", TITLE)
    if row.kind == "autonomous":
        return f"{row.agent} runs by itself"
    return f"{row.agent}: {row.trigger.partition('/')[2] or row.kind}"


TITLE: Final = 90


async def sessions_under_way(actor: Actor) -> Sequence[SessionRow]:
    rows = await actor.app.store.ask(Query("sessions_under_way", SessionRow))
    return [row for row in rows if actor.principal.can_see(row.agent)]


async def agents_seen(store: Store) -> frozenset[str]:
    return frozenset(row.agent for row in await store.ask(Query("agents_seen", _Agent)))


class _Agent(msgspec.Struct, frozen=True):
    agent: str


async def event_objects(
    actor: Actor, session: Session, *, after: After = 0, limit: Count = PAGE, inbox: Inbox = False
) -> Sequence[dict[str, Any]]:
    """Read the events of a session, or of its inbox, in order; page on by the last `seq`."""
    return [serialize_event(stored) for stored in await events(actor, session, after, limit, inbox=inbox)]


async def events(
    actor: Actor, session: str, after: int = 0, limit: int = PAGE, *, inbox: bool = False
) -> Sequence[Stored]:
    row = await actor.session(session)
    stream = inbox_stream(row.session) if inbox else session_stream(row.session)
    return await actor.app.store.read(stream, after, limit)


async def newest_events(actor: Actor, session: str, count: int = PAGE) -> Sequence[Stored]:
    row = await actor.session(session)
    stream = session_stream(row.session)
    head = next(iter(await actor.app.store.ask(Query("head", _Head, {"stream": stream}))), _Head(0)).head
    events: list[Stored] = []
    after = max(0, head - count)
    while page := await actor.app.store.read(stream, after, PAGE):
        events += page
        after = page[-1].seq
    return events


class TimedEvent(msgspec.Struct, frozen=True):
    """An event without its body, and when it was."""

    at: int
    event: AnyEvent | Unknown


class _Work(msgspec.Struct, frozen=True):
    kind: str
    at: int
    version: int
    facts: bytes


MOST_SEARCHED: Final = 20_000
"""How many of a session's newest events are searched for its work: one that mostly skips its turns has many."""


async def work_events(actor: Actor, session: str, limit: int) -> Sequence[TimedEvent]:
    """Read the newest turns, requests, calls and brakes of a session, the oldest first."""
    stream = session_stream((await actor.session(session)).session)
    head = next(iter(await actor.app.store.ask(Query("head", _Head, {"stream": stream}))), _Head(0)).head
    params = {"stream": stream, "after": max(0, head - MOST_SEARCHED), "limit": limit}
    found = await actor.app.store.ask(Query("work_events", _Work, params))
    return [TimedEvent(each.at, decode(each.kind, each.version, each.facts)) for each in reversed(found)]


class _Head(msgspec.Struct, frozen=True):
    head: int


async def read_all_events(app: Runtime, stream: StreamId) -> list[Stored]:
    events: list[Stored] = []
    while page := await app.store.read(stream, after=len(events), limit=PAGE):
        events += page
    return events


async def receipt(actor: Actor, session: Session) -> Receipt:
    """Make the receipt of a session."""
    name = (await actor.session(session)).session
    inbox = await read_all_events(actor.app, inbox_stream(name))
    return receipt_of(await read_all_events(actor.app, session_stream(name)), inbox)


async def turns(actor: Actor, session: Session) -> Sequence[TurnLine]:
    """List the turns of a session."""
    return (await receipt(actor, session)).turns


async def report(actor: Actor, since: Moment = 0) -> Report:
    """Report what happened since a moment (default: in the last day), and what needs a person."""
    return report_of(await report_rows(actor, since or max(0, actor.app.clock.now() - DAY)))


async def report_rows(actor: Actor, since: int) -> ReportRows:
    """Read what a report is made of, as far as they may see it."""
    found = await read_report_rows(actor.app.store, since, actor.app.clock.now())
    return found if not actor.principal.agents else _theirs(actor, found)


async def summarise_night(actor: Actor, since: int, limit: int) -> NightSummary:
    """Read what happened since a moment, summed up, as far as they may see it."""
    found, sees = await read_night(actor.app.store, since, limit), actor.principal.can_see
    return msgspec.structs.replace(
        found,
        ends=[row for row in found.ends if sees(row.agent)],
        answers=[row for row in found.answers if sees(row.agent)],
        halts=[row for row in found.halts if row.scope == "fleet" or sees(_find_agent(row.scope.partition(":")[2]))],
        left=[row for row in found.left if sees(_find_agent(row.trigger))],
        undelivered=[row for row in found.undelivered if sees(row.agent)],
    )


async def read_needs(actor: Actor) -> Sequence[Need]:
    """List everything that waits for a person. What is over is not read."""
    return [*list_needs(await report_rows(actor, actor.app.clock.now()))]


def _theirs(actor: Actor, found: ReportRows) -> ReportRows:
    """Leave out agents that they do not see."""
    sees = actor.principal.can_see
    return msgspec.structs.replace(
        found,
        sessions=[row for row in found.sessions if sees(row.agent)],
        happened=[each for each in found.happened if sees(_find_agent(each.stream.removeprefix("trigger:")))],
        left=[item for item in found.left if sees(_find_agent(item.trigger))],
        findings=[row for row in found.findings if sees(row.agent)],
        proposals=type(found.proposals)(),
        spent=[line for line in found.spent if sees(line.agent)],
        budgets=[
            row for row in found.budgets if row.scope != "fleet" and sees(_find_agent(row.scope.partition(":")[2]))
        ],
        waiting=[decision for decision in found.waiting if sees(decision.agent)],
        decided=[row for row in found.decided if sees(row.agent)],
        halts=[row for row in found.halts if row.scope == "fleet" or sees(_find_agent(row.scope.partition(":")[2]))],
        undelivered=[row for row in found.undelivered if sees(row.agent)],
        outages=[row for row in found.outages if sees(row.agent)],
        stopped=[row for row in found.stopped if sees(row.agent)],
        workers=[row for row in found.workers if any(map(sees, row.told().agents))],
        switched_on=frozenset(filter(sees, found.switched_on)),
    )


def _find_agent(trigger: str) -> str:
    return trigger.partition("/")[0]


class _SeverityCount(msgspec.Struct, frozen=True):
    agent: str
    severity: str
    count: int


async def count_urgent_findings(actor: Actor) -> int:
    """Count the findings of high or critical severity that wait for a verdict."""
    rows = await actor.app.store.ask(Query("findings_undecided", _SeverityCount))
    return sum(row.count for row in rows if row.severity in ("high", "critical") and actor.principal.can_see(row.agent))


async def read_news(actor: Actor, since: int, limit: int = MOST_NEWS) -> Sequence[AgentNews]:
    found = await actor.app.store.ask(Query("told_in_app", AgentNews, {"since": since, "limit": limit}))
    return [each for each in found if actor.principal.can_see(each.agent)]


async def hot_state(actor: Actor, session: Session) -> HotStateView:
    """Show a session's hot state as last saved: at most a few seconds ago while its worker lives."""
    row = await actor.session(session)
    for kept in await actor.app.store.ask(Query("snapshot", SavedHotState, {"session": row.session})):
        try:
            return HotStateView(kept.at, msgspec.json.decode(kept.data, type=dict[str, FactView]))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
    return HotStateView()


async def hot_state_history(actor: Actor, session: str, limit: int = CHANGES) -> Sequence[HotStateShown]:
    """List the hot state that the newest turns saw, where it changed; the oldest first."""
    found = await _read_kind(actor, (await actor.session(session)).session, "hot_state_seen", limit)
    seen: list[HotStateShown] = []
    for each in reversed(found):
        try:
            seen.append(HotStateShown(each.at, msgspec.json.decode(each.body or b"{}", type=dict[str, Any])))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return seen


async def sensors(actor: Actor, session: str) -> Mapping[str, SensorChanged]:
    found: dict[str, SensorChanged] = {}
    for each in await _read_kind(actor, (await actor.session(session)).session, SensorChanged.KIND, CHANGES):
        event = decode(SensorChanged.KIND, each.version, each.facts)
        if isinstance(event, SensorChanged):
            found.setdefault(event.sensor, event)
    return found


async def _read_kind(actor: Actor, session: str, kind: str, limit: int) -> Sequence[_Kind]:
    params = {"stream": session_stream(session), "kind": kind, "limit": limit}
    return await actor.app.store.ask(Query("events_of_kind", _Kind, params))


async def spending(actor: Actor, since: Moment, until: Moment, parts: Parts = 48) -> Sequence[SpendingPart]:
    """Show what each agent spent between two moments, in equal parts; empty parts are left out."""
    if not 0 < parts <= MOST_PARTS or until <= since:
        fail_invalid(f"A period has 1 to {MOST_PARTS} parts, and ends after it begins.")
    params = {"since": since, "until": until, "part": max(1, -(-(until - since) // parts))}
    found = await actor.app.store.ask(Query("spent_in_parts", _Sum, params))
    return [
        SpendingPart(each.part, each.agent, micros_to_usd(each.usd))
        for each in found
        if actor.principal.can_see(each.agent)
    ]


async def fleet(actor: Actor) -> Sequence[AgentLine]:
    """Show every agent that was ever switched on or had a session."""
    now = actor.app.clock.now()
    switches = {row.agent: row for row in await actor.app.store.ask(Query("all_agents", AgentRow))}
    under_way: dict[str, list[SessionRow]] = {}
    for row in await sessions_under_way(actor):
        under_way.setdefault(row.agent, []).append(row)
    today = {row.scope: row for row in await read_current_budgets(actor.app.store, now) if _is_today(row, now)}
    burn = {each.agent: each.spent_usd for each in await spending(actor, now - HOUR, now + 1, 1)}
    halts = await actor.app.store.ask(Query("halts_standing", HaltRow))
    halted = {row.scope: f"{row.scope} was halted by {row.by}" for row in halts}
    troubles = await _read_troubles(actor)
    names = sorted(name for name in {*switches, *await agents_seen(actor.app.store)} if actor.principal.can_see(name))
    lines = [
        await _line(actor, name, switches.get(name), under_way.get(name, []), today.get(f"agent:{name}"), burn, halted)
        for name in names
    ]
    return [msgspec.structs.replace(line, **troubles.get(line.agent, {})) for line in lines]


async def _read_troubles(actor: Actor) -> Mapping[str, Mapping[str, Any]]:
    """Say of each agent that is held up why, and whether it needs a person."""
    found: dict[str, Mapping[str, Any]] = {}
    for outage in await actor.app.store.ask(Query("open_outages", OutageRow)):
        found[outage.agent] = {"trouble": outage.sentence, "stopped": outage.trouble == "needs_person"}
    for row in await actor.app.store.ask(Query("stopped_agents", SessionRow)):
        why = row.terminal_reason.replace("_", " ")
        found[row.agent] = {"trouble": f"{row.session} ended by itself: {why}", "stopped": True}
    return found


def _is_today(row: BudgetRow, now: int) -> bool:
    return row.unit == "usd" and row.window == window_at("day", now)


async def _line(
    actor: Actor,
    name: str,
    switch: AgentRow | None,
    under_way: Sequence[SessionRow],
    budget: BudgetRow | None,
    burn: Mapping[str, Decimal],
    halted: Mapping[str, str],
) -> AgentLine:
    own = next((row for row in under_way if row.kind == "autonomous"), next(iter(under_way), None))
    cap = await _find_configured_cap(actor, name, own) if budget is None else budget.cap
    health: Mapping[str, SensorChanged] = {} if own is None else await sensors(actor, own.session)
    scopes = ("fleet", f"agent:{name}", f"session:{own.session}" if own else "")
    return AgentLine(
        agent=name,
        on=None if switch is None else bool(switch.switched_on),
        switched_by="" if switch is None else switch.by,
        halted=next((halted[scope] for scope in scopes if scope in halted), ""),
        session="" if own is None else own.session,
        state="" if own is None else own.state,
        due_at=None if own is None else own.due_at,
        wake_on="" if own is None else own.wake_on,
        under_way=len(under_way),
        spent_today_usd=ZERO_USD if budget is None else micros_to_usd(budget.spent),
        cap_today_usd=None if cap is None else micros_to_usd(cap),
        burn_usd=burn.get(name, ZERO_USD),
        sensors={sensor: event.health for sensor, event in health.items()},
    )


async def _find_configured_cap(actor: Actor, agent: str, own: SessionRow | None) -> int | None:
    """Find an agent's cap of a day before it spends anything: its newest session was defined with it."""
    params = {"agent": agent, "limit": 1}
    rows = [own] if own else await actor.app.store.ask(Query("sessions_of_agent", SessionRow, params))
    caps = await read_configured_caps(actor.app.store, rows[0].definition) if rows else None
    return None if caps is None else next((cap.max_cost_usd for cap in caps.agent if cap.per == "day"), None)


AUDIT_PAGE: Final = 100
"""Rows per read. Between pages other work runs, so that a long search delays no halt."""


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows of the audit are wanted."""

    since: Moment = 0
    until: Moment | None = None
    agent: Agent = ""
    tool: Annotated[Name, Meta(description="Only this tool.")] = ""
    outcome: Annotated[Name, Meta(description="Only this outcome.")] = ""
    session: Session = ""
    text: Annotated[Words, Meta(description="Words in arguments or results; case does not matter.")] = ""

    def matches_record(self, row: AuditRecord) -> bool:
        return all(query in ("", getattr(row, name)) for name, query in self.to_columns().items())

    def to_columns(self) -> dict[str, str]:
        """The columns that the store filters by."""
        return {"agent": self.agent, "tool": self.tool, "outcome": self.outcome, "session": self.session}

    def query(self, way: str) -> str:
        """Name the query whose index leads to the fewest rows; almost all calls are ok."""
        if self.outcome not in ("", "ok"):
            return f"audit_of_outcome_{way}"
        return f"audit_of_agent_{way}" if self.agent else f"audit_{way}"

    def matches_entry(self, row: AuditEntry) -> bool:
        text = f"{row.tool} {row.input_summary} {row.output_summary} {row.decided_by}".casefold()
        return self.text.casefold() in text


class AuditPage(AuditFilter, frozen=True, kw_only=True):
    """Which rows of the audit are wanted, and how many."""

    limit: Limit = 100


async def audit_page(actor: Actor, limit: int = 100, **wanted: Any) -> Sequence[AuditEntry]:
    """Search the audit, the newest first; page on with `until`."""
    found: list[AuditEntry] = []
    async with aclosing(newest(actor, AuditFilter(**wanted))) as rows:
        async for row in rows:
            found.append(make_audit_entry(row))
            if len(found) == limit:
                break
    return found


async def audit_lines(actor: Actor, **wanted: Any) -> AsyncGenerator[AuditEntry]:
    """Export the audit, the oldest first, as JSON lines."""
    async with aclosing(audit(actor, AuditFilter(**wanted))) as rows:
        async for row in rows:
            yield make_audit_entry(row)


async def audit(actor: Actor, filters: AuditFilter) -> AsyncGenerator[AuditRecord]:
    """Read the audit from a moment on, the oldest first; calls under way are included."""
    cursor: dict[str, Any] = {**filters.to_columns(), "since": filters.since, "call": "", "limit": AUDIT_PAGE}
    while page := await actor.app.store.ask(Query(filters.query("since"), AuditRecord, cursor)):
        for row in page:
            if filters.until is not None and row.created_at > filters.until:
                return
            if (found := await _find_matching(actor, filters, row)) is not None:
                yield found
        cursor = {**cursor, "since": page[-1].created_at, "call": page[-1].call}


async def newest(actor: Actor, filters: AuditFilter) -> AsyncGenerator[AuditRecord]:
    until = actor.app.clock.now() if filters.until is None else filters.until
    cursor: dict[str, Any] = {**filters.to_columns(), "until": until, "call": LAST_CHARACTER, "limit": AUDIT_PAGE}
    while page := await actor.app.store.ask(Query(filters.query("until"), AuditRecord, cursor)):
        for row in page:
            if row.created_at < filters.since:
                return
            if (found := await _find_matching(actor, filters, row)) is not None:
                yield found
        cursor = {**cursor, "until": page[-1].created_at, "call": page[-1].call}


async def _find_matching(actor: Actor, filters: AuditFilter, row: AuditRecord) -> AuditRecord | None:
    if not actor.principal.can_see(row.agent):
        return None
    said = await load_audit_bodies(actor.app.store, row)
    return said if filters.matches_entry(make_audit_entry(said)) else None


MOST_SAFE_SESSIONS: Final = 50
"""How many of the newest sessions are searched for SAFE calls, which no table lists."""


async def read_safe_calls(actor: Actor, filters: AuditFilter, limit: int) -> Sequence[AuditEntry]:
    """Read the newest calls of SAFE tools, which the audit leaves out, from the events of the newest sessions."""
    named = [await actor.session(filters.session)] if filters.session else None
    rows = named or await sessions(actor, filters.agent, limit=MOST_SAFE_SESSIONS)
    found: list[AuditEntry] = []
    for row in rows:
        settled = {
            event.call: (event, each.body)
            for each in await _read_kind(actor, row.session, CallSettled.KIND, limit)
            if isinstance(event := decode(CallSettled.KIND, each.version, each.facts), CallSettled)
        }
        for each in await _read_kind(actor, row.session, CallStarted.KIND, limit):
            event = decode(CallStarted.KIND, each.version, each.facts)
            if isinstance(event, CallStarted) and event.level == "SAFE" and not event.audit:
                found.append(_make_safe_entry(row, each, event, *settled.get(event.call, (None, None))))
    until = actor.app.clock.now() if filters.until is None else filters.until
    fits = [one for one in found if filters.since <= one.created_at <= until and _fits_entry(filters, one)]
    return sorted(fits, key=lambda one: (one.created_at, one.call), reverse=True)[:limit]


def _make_safe_entry(
    row: SessionRow, started: _Kind, event: CallStarted, settled: CallSettled | None, answer: bytes | None
) -> AuditEntry:
    charge = settled.charge if settled is not None else None
    return AuditEntry(
        tool=event.tool,
        input_summary=summarize_body(started.body),
        output_summary=summarize_body(answer),
        capability_level=event.level,
        risk_level=event.risk or "",
        decision=event.decision,
        decided_by=event.decided_by,
        outcome="" if settled is None else settled.outcome,
        cost_usd=micros_to_usd(charge.usd) if charge is not None else ZERO_USD,
        duration_ms=0 if settled is None else settled.duration_ms,
        session=row.session,
        call=event.call,
        agent=row.agent,
        created_at=started.at,
    )


def _fits_entry(filters: AuditFilter, one: AuditEntry) -> bool:
    return all(
        value in ("", getattr(one, name)) for name, value in filters.to_columns().items()
    ) and filters.matches_entry(one)

"""Read operations: sessions and their events, the fleet, spending, the audit."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from halter.autonomy.hot_state import LOOK_PREFIX
from halter.core.clock import DAY, HOUR, window_at
from halter.core.codec import decode
from halter.core.events import AnyEvent, CallSettled, CallStarted, SensorChanged, SessionStarted, Unknown
from halter.core.ids import Digest, StreamId, inbox_stream, parse_session_id, session_stream
from halter.core.money import ZERO_USD, BudgetRow, Usd, micros_to_usd
from halter.core.notifications import parse_notification
from halter.core.ports import Query, Store, Stored, read_body, read_content
from halter.core.rows import AgentRow, HaltRow, ItemRow, OutageRow, SavedHotState, SessionRow
from halter.core.text import LAST_CHARACTER, decode_body, shorten, to_one_line
from halter.core.vocabulary import END_STATES, ShownState
from halter.operations.actor import (
    MAX_SAFE_INTEGER,
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
from halter.operations.report import NightSummary, Report, ReportRows, build_report, read_night, read_report_rows
from halter.runtime.budgets import Budget, read_configured_caps, read_current_budgets, render_budgets
from halter.runtime.feed import serialize_event
from halter.runtime.needs import Need, find_health, list_needs, list_unhealthy
from halter.runtime.runtime import Runtime
from halter.state.audit import AuditEntry, AuditReader, AuditRecord, Starter, make_audit_entry, summarize_body
from halter.state.receipt import Receipt, make_receipt
from halter.state.receipt_lines import TurnLine
from halter.tasks.playbooks import decode_task

PAGE: Final = 1000
MAX_PARTS: Final = 1000
MAX_NOTICES: Final = 20
MAX_RUNNING: Final = 10_000
MAX_CHANGES_SEARCHED: Final = 200
"""How many sensor changes are searched for the latest of each sensor."""

Parts = Annotated[int, Meta(ge=1, le=MAX_PARTS, description="Number of parts.")]
After = Annotated[int, Meta(ge=0, le=MAX_SAFE_INTEGER, description="Only events after this sequence number.")]
Inbox = Annotated[bool, Meta(description="Read the inbox of the session instead.")]
StateFilter = Annotated[
    str, Meta(max_length=300, description="Only sessions in this state, such as sleeping.", extra={"metavar": "STATE"})
]


class AgentNews(msgspec.Struct, frozen=True, kw_only=True):
    """A notice to the app, from an agent or from the runtime about it. An erased one has no text.

    `sentence` is its subject, `about` what it is about, and `session` the session that sent it, if one did.
    """

    kind: Literal["notice"] = "notice"
    agent: str
    queued_at: int
    sentence: str
    text: str = ""
    session: str = ""
    about: str = ""

    @property
    def title(self) -> str:
        """The sentence, with the agent unless the sentence begins with it."""
        return self.sentence if self.sentence.startswith(self.agent) else f"{self.agent}: {self.sentence}"

    def summarize_text(self, limit: int) -> str:
        """Return the start of the text on one line; "" if the sentence says all of it."""
        text = to_one_line(self.text)
        return "" if text == self.sentence else shorten(text, limit)


class AgentLine(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of an agent. Without a session it is idle; `burn_usd` is the cost of its last hour.

    `health` is `unhealthy` if it makes no progress or has stopped. `trouble` says why it cannot work; an agent that is
    `stopped` needs a person to start it again.
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
    health: str = ""
    trouble: str = ""
    stopped: bool = False


class FactView(msgspec.Struct, frozen=True):
    """A value of the hot state as last saved, with the time and the author of its last write."""

    value: Any
    at: int
    by: str = ""


class HotStateView(msgspec.Struct, frozen=True):
    """A session's hot state as last saved; `at` is None if it was never saved."""

    at: int | None = None
    facts: Mapping[str, FactView] = {}


class HotStateShown(msgspec.Struct, frozen=True):
    """The hot state that a turn saw."""

    at: int
    values: Mapping[str, Any]


class SpendingPart(msgspec.Struct, frozen=True):
    """An agent's spending in one part of a period."""

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
    return (await actor.session(session)).to_shown()


async def sessions(
    actor: Actor, agent: Agent = "", state: StateFilter = "", since: Moment = 0, limit: Limit = 50
) -> Sequence[SessionRow]:
    """List sessions, the newest first: all, or only those of an agent, in a state, or started since a moment."""
    if agent:
        actor.require_agent(readable(agent, "agent name"))
    state_filter = _read_state(state)
    agents = (agent,) if agent or not actor.principal.agents else actor.principal.agents
    rows = [row for name in agents for row in await _sessions(actor, name, state_filter, max(1, since), limit)]
    return sorted(rows, key=lambda row: (row.started_at, row.session), reverse=True)[:limit]


async def _sessions(actor: Actor, agent: str, state: ShownState | None, since: int, limit: int) -> Sequence[SessionRow]:
    """Query by the index that fits, so that the cost depends on the result and not on the size of the store."""
    if state is None:
        name = "sessions_of_agent_since" if agent else "sessions"
    elif state in END_STATES:
        name = "sessions_of_agent_ended" if agent else "sessions_ended"
    else:
        name = "sessions_in_state"
    # One stored state is shown as two, so those that are shown as the other one do not count.
    is_divided = state in ("RUNNING", "NOT_RUNNING")
    stored_state, stored_limit = ("RUNNING", MAX_RUNNING) if is_divided else (state, limit)
    params = {"agent": agent, "state": stored_state, "since": since, "limit": stored_limit}
    rows = [row.to_shown() for row in await actor.app.store.ask(Query(name, SessionRow, params))]
    return [row for row in rows if state in (None, row.state)]


def _read_state(text: str) -> ShownState | None:
    """Parse a state in any case, with spaces or dashes; None for an empty text."""
    name = text.strip().upper().replace(" ", "_").replace("-", "_")
    matching_state = next((state for state in get_args(ShownState) if state == name), None)
    if name and matching_state is None:
        fail_invalid(f"Unknown session state {text!r}. Use one of {', '.join(map(str.lower, get_args(ShownState)))}.")
    return matching_state


async def session_budget(actor: Actor, session: str) -> Budget | None:
    """Read the budget of a session; None before it spends anything."""
    params = {"scope": f"session:{session}", "window": "", "unit": "usd"}
    rows = await actor.app.store.ask(Query("budget", BudgetRow, params))
    return next(iter(await render_budgets(actor.app.store, rows)), None)


async def session_spent(actor: Actor, session: str) -> Usd:
    params = {"scope": f"session:{session}", "window": "", "unit": "usd"}
    rows = await actor.app.store.ask(Query("budget", BudgetRow, params))
    return micros_to_usd(rows[0].spent) if rows else ZERO_USD


class WorkDone(msgspec.Struct, frozen=True):
    """Counts of a session's turns, calls and refusals, from its start to the event `seq`."""

    turns: int = 0
    calls: int = 0
    refused: int = 0
    seq: int = 0


class _WorkKind(msgspec.Struct, frozen=True):
    kind: str
    count: int
    seq: int


async def count_work(actor: Actor, session: str, so_far: WorkDone) -> WorkDone:
    """Count a session's turns, calls and refusals: add the events after `so_far` to its counts."""
    params = {"stream": session_stream(session), "after": so_far.seq}
    rows = await actor.app.store.ask(Query("work_done", _WorkKind, params))
    count_by_kind = {row.kind: row.count for row in rows}
    return WorkDone(
        so_far.turns + count_by_kind.get("turn_started", 0),
        so_far.calls + count_by_kind.get("call_started", 0),
        so_far.refused + count_by_kind.get("call_refused", 0) + count_by_kind.get("request_refused", 0),
        max((row.seq for row in rows), default=so_far.seq),
    )


async def session_tokens(actor: Actor, session: str) -> int:
    """Read the number of tokens that a session used, without those that a provider had cached."""
    params = {"scope": f"session:{session}", "window": "", "unit": "tokens"}
    rows = await actor.app.store.ask(Query("budget", BudgetRow, params))
    return rows[0].spent if rows else 0


async def session_title(actor: Actor, row: SessionRow) -> str:
    """Make the title of a session from its document and the first line of its task, or from its trigger.

    All runs of a watch have the same task: the document distinguishes them.
    """
    items = (
        await actor.app.store.ask(Query("items_of_session", ItemRow, {"session": row.session})) if row.trigger else ()
    )
    document = to_one_line(items[0].name) if items else ""
    for stored in await actor.app.store.read(session_stream(row.session), 0, 1):
        body, event = await read_body(actor.app.store, stored), stored.event
        if isinstance(event, SessionStarted) and event.follows:
            return shorten(f"{row.agent} continues {event.follows}: {to_one_line(event.because)}", MAX_TITLE)
        text = _describe_playbook(body) or decode_body(body).strip()
        if text:
            title = to_one_line(text.splitlines()[0])
            return shorten(f"{document}: {title}" if document else title, MAX_TITLE)
    if row.kind == "autonomous":
        return f"{row.agent} runs unattended"
    return shorten(f"{row.agent}: {document or row.trigger.partition('/')[2] or row.kind}", MAX_TITLE)


def _describe_playbook(body: bytes) -> str:
    """Describe the task of a playbook's session; "" for any other task."""
    try:
        task = decode_task(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    inputs = ", ".join(f"{name} {to_one_line(str(value))}" for name, value in task.inputs.items())
    return f"{task.playbook.file}: {inputs}" if inputs else task.playbook.file


MAX_TITLE: Final = 90


async def sessions_under_way(actor: Actor) -> Sequence[SessionRow]:
    rows = await actor.app.store.ask(Query("sessions_under_way", SessionRow))
    return [row for row in rows if actor.principal.can_see(row.agent)]


async def list_recorded_agents(store: Store) -> frozenset[str]:
    return frozenset(row.agent for row in await store.ask(Query("agents_seen", _Agent)))


class _Agent(msgspec.Struct, frozen=True):
    agent: str


async def event_objects(
    actor: Actor, session: Session, *, after: After = 0, limit: Count = PAGE, inbox: Inbox = False
) -> Sequence[dict[str, Any]]:
    """Read the events of a session or of its inbox, in order; the last `seq` is the cursor of the next page."""
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
    """An event without its body, and its time."""

    at: int
    event: AnyEvent | Unknown


class _Work(msgspec.Struct, frozen=True):
    kind: str
    at: int
    version: int
    facts: bytes


MAX_EVENTS_SEARCHED: Final = 20_000
"""How many of a session's newest events are searched for its work. A session that skips most turns has many others."""


async def work_events(actor: Actor, session: str, limit: int) -> Sequence[TimedEvent]:
    """Read the newest turns, requests, calls and refusals of a session, the oldest first."""
    stream = session_stream((await actor.session(session)).session)
    head = next(iter(await actor.app.store.ask(Query("head", _Head, {"stream": stream}))), _Head(0)).head
    params = {"stream": stream, "after": max(0, head - MAX_EVENTS_SEARCHED), "limit": limit}
    rows = await actor.app.store.ask(Query("work_events", _Work, params))
    return [TimedEvent(row.at, decode(row.kind, row.version, row.facts)) for row in reversed(rows)]


class _Head(msgspec.Struct, frozen=True):
    head: int


async def read_all_events(app: Runtime, stream: StreamId) -> list[Stored]:
    events: list[Stored] = []
    while page := await app.store.read(stream, after=len(events), limit=PAGE):
        events += page
    return events


async def receipt(actor: Actor, session: Session) -> Receipt:
    """Show the receipt of a session."""
    name = (await actor.session(session)).session
    inbox = await read_all_events(actor.app, inbox_stream(name))
    return make_receipt(await read_all_events(actor.app, session_stream(name)), inbox)


async def turns(actor: Actor, session: Session) -> Sequence[TurnLine]:
    """List the turns of a session."""
    return (await receipt(actor, session)).turns


async def report(actor: Actor, since: Moment = 0) -> Report:
    """Report what happened since a moment (default: the last day), and what needs a person."""
    return build_report(await report_rows(actor, since or max(0, actor.app.clock.now() - DAY)))


async def report_rows(actor: Actor, since: int) -> ReportRows:
    """Read the rows of a report that the principal can see."""
    rows = await read_report_rows(actor.app.store, since, actor.app.clock.now())
    return rows if not actor.principal.agents else _filter_visible(actor, rows)


async def summarise_night(actor: Actor, since: int, limit: int) -> NightSummary:
    """Read a summary of what happened since a moment, as far as the principal can see it."""
    summary, sees = await read_night(actor.app.store, since, limit), actor.principal.can_see
    return msgspec.structs.replace(
        summary,
        ends=[row for row in summary.ends if sees(row.agent)],
        answers=[row for row in summary.answers if sees(row.agent)],
        halts=[row for row in summary.halts if row.scope == "fleet" or sees(_find_agent(row.scope.partition(":")[2]))],
        quarantined_items=[row for row in summary.quarantined_items if sees(_find_agent(row.trigger))],
        undelivered=[row for row in summary.undelivered if sees(row.agent)],
    )


async def read_needs(actor: Actor) -> Sequence[Need]:
    """List everything that waits for a person. Ended sessions are not read."""
    return [*list_needs(await report_rows(actor, actor.app.clock.now()))]


def _filter_visible(actor: Actor, rows: ReportRows) -> ReportRows:
    """Leave out the rows of agents that the principal cannot see."""
    sees = actor.principal.can_see
    sessions = [row for row in rows.sessions if sees(row.agent)]
    owners = {row.owner for row in sessions}
    return msgspec.structs.replace(
        rows,
        sessions=sessions,
        happened=[event for event in rows.happened if sees(_find_agent(event.stream.removeprefix("trigger:")))],
        quarantined_items=[item for item in rows.quarantined_items if sees(_find_agent(item.trigger))],
        findings=[row for row in rows.findings if sees(row.agent)],
        proposals=type(rows.proposals)(),
        spent=[line for line in rows.spent if sees(line.agent)],
        budgets=[
            row for row in rows.budgets if row.scope != "fleet" and sees(_find_agent(row.scope.partition(":")[2]))
        ],
        waiting=[decision for decision in rows.waiting if sees(decision.agent)],
        decided=[row for row in rows.decided if sees(row.agent)],
        halts=[row for row in rows.halts if row.scope == "fleet" or sees(_find_agent(row.scope.partition(":")[2]))],
        undelivered=[row for row in rows.undelivered if sees(row.agent)],
        outages=[row for row in rows.outages if sees(row.agent)],
        unhealthy=[each for each in rows.unhealthy if sees(each.agent)],
        workers=[row for row in rows.workers if row.worker in owners or any(map(sees, row.parse_info().agents))],
        switched_on=frozenset(filter(sees, rows.switched_on)),
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


class _Notice(msgspec.Struct, frozen=True):
    """A notice with the stream that queued it, and its body."""

    agent: str
    queued_at: int
    about: str
    stream: str
    body: bytes | None
    blob: Digest | None


async def read_notices(actor: Actor, since: Moment = 0, limit: Limit = MAX_NOTICES) -> Sequence[AgentNews]:
    """List the notices to the app with their texts, the newest first."""
    notices = await actor.app.store.ask(Query("told_in_app", _Notice, {"since": since, "limit": limit}))
    return [await _read_news(actor, notice) for notice in notices if actor.principal.can_see(notice.agent)]


async def _read_news(actor: Actor, notice: _Notice) -> AgentNews:
    content = parse_notification(await read_content(actor.app.store, notice.body, notice.blob) or b"{}")
    return AgentNews(
        agent=notice.agent,
        queued_at=notice.queued_at,
        sentence=to_one_line(content.subject or shorten(content.text, 120)) or "(erased)",
        text=content.text,
        session=content.session or parse_session_id(StreamId(notice.stream)) or "",
        about=notice.about,
    )


async def hot_state(actor: Actor, session: Session) -> HotStateView:
    """Show a session's hot state as last saved. While its worker runs, that is at most a few seconds ago."""
    row = await actor.session(session)
    for snapshot in await actor.app.store.ask(Query("snapshot", SavedHotState, {"session": row.session})):
        try:
            entries = msgspec.json.decode(snapshot.data, type=dict[str, msgspec.Raw])
            facts = {
                name: msgspec.json.decode(entry, type=FactView)
                for name, entry in entries.items()
                if not name.startswith(LOOK_PREFIX)
            }
            return HotStateView(snapshot.at, facts)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            break
    return HotStateView()


async def hot_state_history(actor: Actor, session: str, limit: int = MAX_CHANGES_SEARCHED) -> Sequence[HotStateShown]:
    """List the hot state of the newest turns that saw a change, the oldest first."""
    rows = await _read_kind(actor, (await actor.session(session)).session, "hot_state_seen", limit)
    history: list[HotStateShown] = []
    for row in reversed(rows):
        try:
            history.append(HotStateShown(row.at, msgspec.json.decode(row.body or b"{}", type=dict[str, Any])))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return history


async def sensors(actor: Actor, session: str) -> Mapping[str, SensorChanged]:
    change_by_sensor: dict[str, SensorChanged] = {}
    for row in await _read_kind(
        actor, (await actor.session(session)).session, SensorChanged.KIND, MAX_CHANGES_SEARCHED
    ):
        event = decode(SensorChanged.KIND, row.version, row.facts)
        if isinstance(event, SensorChanged):
            change_by_sensor.setdefault(event.sensor, event)
    return change_by_sensor


async def _read_kind(actor: Actor, session: str, kind: str, limit: int) -> Sequence[_Kind]:
    params = {"stream": session_stream(session), "kind": kind, "limit": limit}
    return await actor.app.store.ask(Query("events_of_kind", _Kind, params))


async def spending(actor: Actor, since: Moment, until: Moment, parts: Parts = 48) -> Sequence[SpendingPart]:
    """Show the spending of each agent between two moments, in equal parts; empty parts are left out."""
    if not 0 < parts <= MAX_PARTS or until <= since:
        fail_invalid(f"Invalid period: use 1 to {MAX_PARTS} parts, and an end after the start.")
    params = {"since": since, "until": until, "part": max(1, -(-(until - since) // parts))}
    rows = await actor.app.store.ask(Query("spent_in_parts", _Sum, params))
    return [
        SpendingPart(row.part, row.agent, micros_to_usd(row.usd)) for row in rows if actor.principal.can_see(row.agent)
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
    halt_by_scope = {row.scope: f"{row.scope} was halted by {row.by}" for row in halts}
    troubles = await _read_troubles(actor)
    names = sorted(
        name for name in {*switches, *await list_recorded_agents(actor.app.store)} if actor.principal.can_see(name)
    )
    lines = [
        await _line(
            actor, name, switches.get(name), under_way.get(name, []), today.get(f"agent:{name}"), burn, halt_by_scope
        )
        for name in names
    ]
    return [msgspec.structs.replace(line, **troubles.get(line.agent, {})) for line in lines]


async def _read_troubles(actor: Actor) -> Mapping[str, Mapping[str, Any]]:
    """Read, for each agent that cannot work, the cause and whether it needs a person."""
    trouble_by_agent: dict[str, Mapping[str, Any]] = {}
    for outage in await actor.app.store.ask(Query("open_outages", OutageRow)):
        trouble_by_agent[outage.agent] = {"trouble": outage.sentence, "stopped": outage.trouble == "needs_person"}
    unhealthy = await list_unhealthy(actor.app.store, actor.app.clock.now())
    for each in unhealthy:
        health = find_health(each.agent, unhealthy)
        trouble_by_agent[each.agent] = {
            "health": health.word,
            "trouble": health.sentence,
            "stopped": each.until is None,
        }
    return trouble_by_agent


def _is_today(row: BudgetRow, now: int) -> bool:
    return row.unit == "usd" and row.window == window_at("day", now)


async def _line(
    actor: Actor,
    name: str,
    switch: AgentRow | None,
    under_way: Sequence[SessionRow],
    budget: BudgetRow | None,
    burn: Mapping[str, Decimal],
    halt_by_scope: Mapping[str, str],
) -> AgentLine:
    main_session = next((row for row in under_way if row.kind == "autonomous"), next(iter(under_way), None))
    cap = await _find_configured_cap(actor, name, main_session) if budget is None else budget.cap
    change_by_sensor: Mapping[str, SensorChanged] = (
        {} if main_session is None else await sensors(actor, main_session.session)
    )
    scopes = ("fleet", f"agent:{name}", f"session:{main_session.session}" if main_session else "")
    return AgentLine(
        agent=name,
        on=None if switch is None else bool(switch.switched_on),
        switched_by="" if switch is None else switch.by,
        halted=next((halt_by_scope[scope] for scope in scopes if scope in halt_by_scope), ""),
        session="" if main_session is None else main_session.session,
        state="" if main_session is None else main_session.state,
        due_at=None if main_session is None else main_session.due_at,
        wake_on="" if main_session is None else main_session.wake_on,
        under_way=len(under_way),
        spent_today_usd=ZERO_USD if budget is None else micros_to_usd(budget.spent),
        cap_today_usd=None if cap is None else micros_to_usd(cap),
        burn_usd=burn.get(name, ZERO_USD),
        sensors={sensor: event.health for sensor, event in change_by_sensor.items()},
    )


async def _find_configured_cap(actor: Actor, agent: str, main_session: SessionRow | None) -> int | None:
    """Find the daily cap of an agent that has spent nothing today, in the definition of its newest session."""
    params = {"agent": agent, "limit": 1}
    rows = [main_session] if main_session else await actor.app.store.ask(Query("sessions_of_agent", SessionRow, params))
    caps = await read_configured_caps(actor.app.store, rows[0].definition) if rows else None
    return None if caps is None else next((cap.max_cost_usd for cap in caps.agent if cap.per == "day"), None)


AUDIT_PAGE: Final = 100
"""Rows per read. Between pages other work runs, so that a long search delays no halt."""


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A filter for rows of the audit."""

    since: Moment = 0
    until: Moment | None = None
    agent: Agent = ""
    tool: Annotated[Name, Meta(description="Only this tool.")] = ""
    outcome: Annotated[Name, Meta(description="Only this outcome.")] = ""
    session: Session = ""
    text: Annotated[Words, Meta(description="Text in arguments, results, errors or names; case-insensitive.")] = ""

    def matches_record(self, row: AuditRecord) -> bool:
        return all(query in ("", getattr(row, name)) for name, query in self.to_columns().items())

    def to_columns(self) -> dict[str, str]:
        """Map the columns that the store filters by to their values."""
        return {"agent": self.agent, "tool": self.tool, "outcome": self.outcome, "session": self.session}

    def query(self, bound: str) -> str:
        """Choose the query whose index leads to the fewest rows: almost all calls are ok."""
        if self.outcome not in ("", "ok"):
            return f"audit_of_outcome_{bound}"
        return f"audit_of_agent_{bound}" if self.agent else f"audit_{bound}"

    def matches_entry(self, row: AuditEntry) -> bool:
        texts = (row.tool, row.input_summary, row.output_summary, row.decided_by, row.started_by, row.error)
        return self.text.casefold() in " ".join(texts).casefold()


class AuditPage(AuditFilter, frozen=True, kw_only=True):
    """A filter for rows of the audit, with a limit."""

    limit: Limit = 100


async def audit_page(actor: Actor, limit: int = 100, **criteria: Any) -> Sequence[AuditEntry]:
    """Search the audit, the newest first; `until` is the cursor of the next page."""
    entries: list[AuditEntry] = []
    async with aclosing(newest(actor, AuditFilter(**criteria))) as rows:
        async for row in rows:
            entries.append(make_audit_entry(row))
            if len(entries) == limit:
                break
    return entries


async def audit_lines(actor: Actor, **criteria: Any) -> AsyncGenerator[AuditEntry]:
    """Export the audit, the oldest first, as JSON lines."""
    async with aclosing(audit(actor, AuditFilter(**criteria))) as rows:
        async for row in rows:
            yield make_audit_entry(row)


async def audit(actor: Actor, filters: AuditFilter) -> AsyncGenerator[AuditRecord]:
    """Read the audit since a moment, the oldest first, including running calls."""
    cursor: dict[str, Any] = {**filters.to_columns(), "since": filters.since, "call": "", "limit": AUDIT_PAGE}
    reader = AuditReader(actor.app.store)
    while page := await actor.app.store.ask(Query(filters.query("since"), AuditRecord, cursor)):
        for row in page:
            if filters.until is not None and row.created_at > filters.until:
                return
            if (record := await _find_matching(actor, filters, reader, row)) is not None:
                yield record
        cursor = {**cursor, "since": page[-1].created_at, "call": page[-1].call}


async def newest(actor: Actor, filters: AuditFilter) -> AsyncGenerator[AuditRecord]:
    end_at = actor.app.clock.now() if filters.until is None else filters.until
    cursor: dict[str, Any] = {**filters.to_columns(), "until": end_at, "call": LAST_CHARACTER, "limit": AUDIT_PAGE}
    reader = AuditReader(actor.app.store)
    while page := await actor.app.store.ask(Query(filters.query("until"), AuditRecord, cursor)):
        for row in page:
            if row.created_at < filters.since:
                return
            if (record := await _find_matching(actor, filters, reader, row)) is not None:
                yield record
        cursor = {**cursor, "until": page[-1].created_at, "call": page[-1].call}


async def _find_matching(
    actor: Actor, filters: AuditFilter, reader: AuditReader, row: AuditRecord
) -> AuditRecord | None:
    if not actor.principal.can_see(row.agent):
        return None
    record = await reader.load(row)
    return record if filters.matches_entry(make_audit_entry(record)) else None


MAX_SAFE_SESSIONS: Final = 50
"""How many of the newest sessions are searched for SAFE calls, which are in no table."""


async def read_safe_calls(actor: Actor, filters: AuditFilter, limit: int) -> Sequence[AuditEntry]:
    """Read the newest calls of SAFE tools, which the audit omits, from the events of the newest sessions."""
    named_session = [await actor.session(filters.session)] if filters.session else None
    rows = named_session or await sessions(actor, filters.agent, limit=MAX_SAFE_SESSIONS)
    entries: list[AuditEntry] = []
    reader = AuditReader(actor.app.store)
    for row in rows:
        starter = await reader.find_starter(row.session)
        settlement_by_call = {
            event.call: (event, event_row.body)
            for event_row in await _read_kind(actor, row.session, CallSettled.KIND, limit)
            if isinstance(event := decode(CallSettled.KIND, event_row.version, event_row.facts), CallSettled)
        }
        for event_row in await _read_kind(actor, row.session, CallStarted.KIND, limit):
            event = decode(CallStarted.KIND, event_row.version, event_row.facts)
            if isinstance(event, CallStarted) and event.level == "SAFE" and not event.audit:
                entries.append(
                    _make_safe_entry(row, starter, event_row, event, *settlement_by_call.get(event.call, (None, None)))
                )
    end_at = actor.app.clock.now() if filters.until is None else filters.until
    matching_entries = [
        entry for entry in entries if filters.since <= entry.created_at <= end_at and _fits_entry(filters, entry)
    ]
    return sorted(matching_entries, key=lambda entry: (entry.created_at, entry.call), reverse=True)[:limit]


def _make_safe_entry(
    row: SessionRow,
    starter: Starter,
    started_row: _Kind,
    event: CallStarted,
    settlement: CallSettled | None,
    answer: bytes | None,
) -> AuditEntry:
    charge = settlement.charge if settlement is not None else None
    return AuditEntry(
        tool=event.tool,
        input_summary=summarize_body(started_row.body),
        output_summary=summarize_body(answer),
        capability_level=event.level,
        risk_level=event.risk or "",
        decision=event.decision,
        decided_by=event.decided_by,
        outcome="" if settlement is None else settlement.outcome,
        cost_usd=micros_to_usd(charge.usd) if charge is not None else ZERO_USD,
        duration_ms=0 if settlement is None else settlement.duration_ms,
        session=row.session,
        call=event.call,
        agent=row.agent,
        created_at=started_row.at,
        error="" if settlement is None else settlement.error,
        **msgspec.structs.asdict(starter),
    )


def _fits_entry(filters: AuditFilter, entry: AuditEntry) -> bool:
    return all(
        value in ("", getattr(entry, name)) for name, value in filters.to_columns().items()
    ) and filters.matches_entry(entry)

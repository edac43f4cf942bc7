"""The front door: a message is routed before any model sees it, and what needs no model is answered here.

The route and the reason are an event in the session's inbox; it wakes no session. A task for later is proposed to a
person, and exists only after they agree.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import time, timedelta
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET

from halter.autonomy.hot_state import HotState
from halter.autonomy.triggers import Clockwork, find_tightest, forecast_bounds
from halter.config.agent_files import find_neighbour_agents
from halter.config.mcp_file import MCP_FILE
from halter.config.resolve import ResolvedAgent
from halter.core.agent_spec import Schedule, trigger_id
from halter.core.clock import MINUTE, format_duration
from halter.core.errors import ConfigError
from halter.core.events import ApprovalGiven, MessageRouted
from halter.core.ids import FLEET, inbox_stream, may_decide, session_stream
from halter.core.money import BudgetRow, Leg, Spender, format_micros, format_usd, list_accounts
from halter.core.ports import Draft, Query, Store, Write, offload_body, read_stream
from halter.core.ports import read_body as said_in
from halter.core.rows import AgentRow, DecisionRow, SavedHotState, SessionRow, StreamRow, TriggerRow
from halter.core.schedules import Timing, explain_timing, find_first_moment, find_zone, next_tick_after, to_local_time
from halter.core.text import escape_hidden, format_count, from_body, join_names, shorten
from halter.core.vocabulary import SessionKind
from halter.front_door.fast_paths import (
    HELP_ANSWER,
    ClockQuestion,
    Decided,
    HotStateQuestion,
    Period,
    Plain,
    RoutingContext,
    ScheduleName,
    Scope,
    SpendingQuestion,
    SumResult,
    describe_time,
    is_same_name,
)
from halter.front_door.route import Delegated, RoutingDecision, Scheduled, Script, route_message
from halter.front_door.schedule_text import Unclear
from halter.guard import approvals, halts
from halter.guard.approvals import PlannedTrigger, ask_question, list_pending_decisions, make_trigger_question
from halter.guard.halts import read_halts
from halter.guard.ledger import read_budget
from halter.loop.loop import NO_OBSERVER, LoopObserver
from halter.loop.session_runtime import WaitListener
from halter.runtime import sessions, triggers
from halter.runtime.agent_context import AgentContext
from halter.runtime.assemble import OWN_TOOLS
from halter.runtime.budgets import render_budgets
from halter.runtime.forecast import (
    MONTH,
    TriggerPlan,
    apply_policy_caps,
    build_scheduled_runs,
    compute_mean_cost,
    format_bound,
    plan_triggers,
    read_balances,
)
from halter.runtime.needs import describe_decision, list_needs, read_need_rows
from halter.runtime.session_builder import encode_trigger_record, find_autonomous_session
from halter.runtime.sessions import begin_session, post_message
from halter.runtime.sub_sessions import delegate_task, list_tool_names, open_delegate
from halter.runtime.triggers import digest_trigger
from halter.state.receipt import make_receipt
from halter.tasks.playbooks import StepListener

MAX_NEXT_TIMES: Final = 3
"""How many of its next times a plan shows."""
MAX_TASK_LENGTH: Final = 8_000
"""Longer tasks are not scheduled."""
MAX_NAME_WORDS: Final = 4
"""How many words of the task make its name."""


class PlanOutcome(msgspec.Struct, frozen=True):
    """The decision that waits now, or "", and the sentence for the person."""

    decision: str
    sentence: str


async def propose_schedule(context: AgentContext, said: Scheduled) -> PlanOutcome:
    """Asks a person whether a task may run at certain times."""
    against = _find_objection(context, said)
    if against:
        return PlanOutcome("", against)
    agent, now = context.agent.policy.name, context.app.clock.now()
    name = await _free_name(context, said.prompt)
    schedule = Schedule(name=name, prompt=said.prompt, timezone=said.timing.timezone)
    planned = PlannedTrigger(
        shown=describe_schedule_plan(agent, said, await _cost(context, schedule, said, now), now),
        trigger=trigger_id(agent, name),
        type="schedule",
        digest=digest_trigger(schedule),
        made=msgspec.Raw(encode_trigger_record(schedule, said.timing)),
    )
    # After the planned moment an approval would come too late.
    lifetime = context.agent.policy.approval_expiry
    lifetime = lifetime if said.timing.at is None else min(lifetime, said.timing.at - now)
    question = make_trigger_question(agent, planned, lifetime)
    await context.store.commit(ask_question(question))
    how = f"Nothing is planned yet. Say approve, or: halter approve {question.decision}"
    return PlanOutcome(question.decision, f"{planned.shown}\n{how}")


def _find_objection(context: AgentContext, schedule: Scheduled) -> str:
    """Says why it cannot be planned; "" if it can."""
    if len(schedule.prompt) > MAX_TASK_LENGTH:
        return f"That is too long for a schedule: say it in at most {MAX_TASK_LENGTH:,} characters."
    if context.guard().redact(schedule.prompt) != schedule.prompt:
        return "That holds a secret in plain text, so it was not planned: write ${secret:NAME} instead."
    if next_tick_after(schedule.timing, context.app.clock.now()) is None:
        return f"That is over: {explain_timing(schedule.timing)} does not come again."
    return ""


async def _free_name(context: AgentContext, prompt: str) -> str:
    """Names a schedule after its task, with a name that no trigger of the agent has or had."""
    found = re.findall(r"[a-z0-9]+", prompt.lower())[:MAX_NAME_WORDS]
    name = "-".join(found)[:40].strip("-") or "task"
    number = 1
    while await _is_name_taken(context, name if number == 1 else f"{name}-{number}"):
        number += 1
    return name if number == 1 else f"{name}-{number}"


async def _is_name_taken(context: AgentContext, name: str) -> bool:
    identity = trigger_id(context.agent.policy.name, name)
    if context.agent.tasks.trigger(name) is not None:
        return True
    if await context.store.ask(Query("trigger", TriggerRow, {"trigger": identity})):
        return True
    return bool(await context.store.ask(Query("decision", DecisionRow, {"decision": f"schedule/{identity}"})))


async def _cost(context: AgentContext, schedule: Schedule, said: Scheduled, now: int) -> str:
    """Say what it costs at most, and what earlier tasks cost."""
    store = context.store
    policy = await apply_policy_caps(store, context.agent.policy)
    work = Clockwork(
        agent=policy.name, caps=policy.caps, schedules=(build_scheduled_runs(policy, schedule, said.timing),)
    )
    found = forecast_bounds(work, await read_balances(store, work, now), now, now + MONTH)
    run = find_tightest([policy.caps.session.max_cost_usd, found.most])
    monthly = f" and {format_bound(found.clock)} in thirty days" if said.recurring else ""
    mean = await compute_mean_cost(store, policy.name, now)
    earlier = "" if mean is None else f"; its last {mean.samples} tasks cost {format_micros(mean.usd)} on average"
    return f"{format_bound(run)} a run{monthly}, bounded by every cap{earlier}"


def describe_schedule_plan(agent: str, schedule: Scheduled, cost: str, now: int) -> str:
    """Shows what was understood, when it runs next, and what it costs."""
    zone = find_zone(schedule.timing.timezone) or ZoneInfo("UTC")
    times = ", ".join(f"{to_local_time(at, zone):%a %Y-%m-%d %H:%M}" for at in _next(schedule.timing, now))
    lines = [
        f"{agent} would do this by itself: {schedule.prompt}",
        f"When: {explain_timing(schedule.timing)}",
        f"Next: {times}{'' if schedule.recurring else ', and not again'}",
        f"Cost: {cost}",
    ]
    return "\n".join(lines)


def _next(timing: Timing, now: int) -> Sequence[int]:
    found: list[int] = []
    after: int | None = now
    while len(found) < MAX_NEXT_TIMES and (after := next_tick_after(timing, after)) is not None:
        found.append(after)
    return found


_GIVEN: Final = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_-]*)(?:=|:\s?)"
    r"(?:\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<bare>[^\s,;]+))"
)


def parse_playbook_inputs(rest: str, names: tuple[str, ...]) -> dict[str, str]:
    """Parses the inputs in a message, as `name=value`; a value with spaces is quoted."""
    found: dict[str, str] = {}
    for given in _GIVEN.finditer(rest):
        if given["name"] in names:
            values = (given["double"], given["single"], given["bare"])
            found[given["name"]] = next(value for value in values if value is not None)
    return found


async def _play_script(
    context: AgentContext, route: RoutingDecision, said: Script, showing: "SubSessionObserver"
) -> "HandledMessage":
    playbook = context.agent.playbooks[said.playbook]
    inputs = parse_playbook_inputs(said.rest, playbook.inputs)
    missing = [name for name in playbook.inputs if name not in inputs]
    if missing:
        how = f"say it as in: run {said.playbook} with {missing[0]}=VALUE"
        return HandledMessage(route, f"{said.playbook} needs {join_names(missing)}: {how}", ok=False)
    try:
        session = await sessions.begin_playbook(context.app, context.agent, playbook, inputs)
        ended = await sessions.resume_playbook(context.app, context.agent, session, showing.on_step, showing.on_wait)
    except ConfigError as error:
        return HandledMessage(route, str(error), ok=False)
    sentence = f"{said.playbook} (session {session}): {ended.state}, {ended.terminal_reason}. {ended.sentence}".strip()
    return HandledMessage(route, sentence, ended.state == "COMPLETED", session)


MAX_LISTED_ROWS = 10
"""Most sessions or decisions that are listed; the rest is counted."""
PAGE = 1000
SHOWN_DECISION_TTL = 15 * MINUTE
"""How long a decision counts as shown."""
MAX_EVENTS_SEARCHED = 100
ONLY_A_PERSON = "Only a person may do that, and this was said by an agent."


async def answer_fast_path(context: AgentContext, route: RoutingDecision, session: str, *, ahead: bool = False) -> str:
    """Answers a message without a model; `session` is the one in which it was sent."""
    match route.details:
        case Plain() if route.route == "status":
            return await describe_status(context, session)
        case Plain() if route.route == "needs_me":
            return await describe_needs(context.store, context.app.clock.now())
        case Plain() if route.route == "schedules":
            return await describe_schedules(context)
        case Plain() if route.route == "last_receipt":
            return await describe_last_receipt(context)
        case ClockQuestion(zone=zone):
            return describe_time(context.app.clock.now(), zone)
        case SumResult(text):
            return text
        case SpendingQuestion(period):
            return await describe_spending(context, period)
        case Scope(scope):
            return await (_halt if route.route == "halt" else _resume)(context, scope)
        case Decided() as said:
            return await _decide(context, said, session, ahead=ahead)
        case ScheduleName() as named:
            return await _cancel(context, named)
        case HotStateQuestion(name):
            return await describe_hot_state(context, name)
        case Plain() | Scheduled() | Unclear() | Delegated() | Script():
            return HELP_ANSWER


async def describe_status(context: AgentContext, session: str) -> str:
    """Says whether the agent is on or halted, and what its sessions do."""
    store, name, now = context.store, context.agent.policy.name, context.app.clock.now()
    rows = await store.ask(Query("open_of", SessionRow, {"agent": name, "limit": 1000}))
    switch = next((row for row in await store.ask(Query("all_agents", AgentRow)) if row.agent == name), None)
    scopes = {f"agent:{name}", "fleet", *(f"session:{row.session}" for row in rows)}
    halted = [row for row in (await read_halts(store, scopes)).values() if row.halted]
    on = "was never switched on" if switch is None else "is on" if switch.switched_on else "is off"
    lines = [f"{name} {on}. {format_count(len(rows), 'session')} of it {'is' if len(rows) == 1 else 'are'} open."]
    lines += [f"{halt.scope} is halted, by {halt.by}." for halt in halted]
    lines += [f"{_session(row, now, session)}{await _money(store, row)}" for row in rows[:MAX_LISTED_ROWS]]
    return "\n".join([*lines, *_describe_more(len(rows))])


def _session(row: SessionRow, now: int, here: str) -> str:
    began = f"began {format_duration(max(0, now - row.started_at))} ago"
    due = f", next turn in {format_duration(row.due_at - now)}" if row.due_at is not None and row.due_at > now else ""
    by = f", started by {row.trigger}" if row.trigger else f", a part of {row.parent}" if row.parent else ""
    this = ", this one" if row.session == here else ""
    return f"- {row.session} ({row.kind}{by}{this}): {row.state}{due}, {began}"


async def _money(store: Store, row: SessionRow) -> str:
    params = {"scope": session_stream(row.session), "window": "", "unit": "usd"}
    found = await store.ask(Query("budget", BudgetRow, params))
    return f", {(await render_budgets(store, found))[0].describe()}" if found else ""


class _Sum(msgspec.Struct, frozen=True):
    agent: str
    purpose: str
    usd: int


async def describe_spending(context: AgentContext, period: Period) -> str:
    """Says what the agent spent, on what, and how much of its caps is left."""
    policy, now, store = context.agent.policy, context.app.clock.now(), context.store
    since = _find_period_start(period, now, policy.caps.zone)
    rows = await store.ask(Query("spent_by_purpose", _Sum, {"since": since}))
    sums: dict[str, int] = {}
    for row in rows:
        if row.agent == policy.name and row.usd:
            sums[row.purpose] = sums.get(row.purpose, 0) + row.usd
    parts = ", ".join(f"{format_micros(usd)} for {purpose}" for purpose, usd in sums.items())
    text = {"today": "today", "week": "this week", "month": "this month"}[period]
    lines = [f"{policy.name} has spent {format_micros(sum(sums.values()))} {text}{f': {parts}' if parts else ''}."]
    legs = [leg for leg in list_accounts(policy.caps, Spender("", policy.name), now) if leg.scope != "session:"]
    return "\n".join([*lines, *[await _compare_with_cap(context, leg) for leg in legs]])


async def _compare_with_cap(context: AgentContext, leg: Leg) -> str:
    row = await read_budget(context.store, leg.scope, leg.window)
    cap = row.binding(leg.cap)
    held = f", and {format_micros(row.held)} is held" if row.held else ""
    limit = "no cap" if cap is None else f"a cap of {format_micros(cap)}"
    return f"- {leg.scope} {leg.window}: {format_micros(row.spent)} against {limit}{held}".replace(" :", ":")


def _find_period_start(period: Period, now: int, zone: str) -> int:
    """Returns when a day, a week or a month began in local time; weeks begin on Monday."""
    here = find_zone(zone) or ZoneInfo("UTC")
    day = to_local_time(now, here).date()
    if period == "week":
        day -= timedelta(days=day.weekday())
    elif period == "month":
        day = day.replace(day=1)
    return find_first_moment(day, time(), here)


async def _halt(context: AgentContext, scope: str) -> str:
    app = context.app
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    meant = await _resolve_scope(context, scope)
    if meant is None:
        return f"There is no session {scope.partition(':')[2]}: nothing was halted. Look at halter sessions."
    await context.store.commit(halts.halt(meant, app.settings.person, app.ids.make(), "said in a message"))
    return f"{meant} is halted. Nothing acts there until you say resume, or: halter resume {meant}"


async def _resume(context: AgentContext, scope: str) -> str:
    app = context.app
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    meant = await _resolve_scope(context, scope)
    ramp = await halts.compute_ramp(context.store, meant or scope)
    write = halts.resume(meant or scope, app.settings.person, app.ids.make(), ramp, "said in a message")
    if not (await context.store.commit(write)).events:
        return f"{meant or scope} is not halted."
    return halts.describe_resume(meant or scope, ramp)


async def _resolve_scope(context: AgentContext, scope: str) -> str | None:
    """Completes the session id in a scope; other scopes stay as they are."""
    kind, _, name = scope.partition(":")
    if kind != "session":
        return scope
    rows = await context.store.ask(Query("sessions_called", SessionRow, {"beginning": name}))
    found = [row.session for row in rows]
    exact = [session for session in found if session.lower() == name]
    return f"session:{(exact or found)[0]}" if len(exact or found) == 1 else None


async def describe_needs(store: Store, now: int) -> str:
    """Say in a chat what waits for a person: the queue of every face, decisions first."""
    rows = await read_need_rows(store, now)
    found, needs = rows.waiting, [need for need in list_needs(rows) if not need.decision]
    if not found and not needs:
        return "Nothing needs you."
    lines: list[str] = []
    if found:
        many = format_count(len(found), "decision")
        lines.append(f"{many} for you. Say approve or deny, with the id if there are several.")
    for decision in found[:MAX_LISTED_ROWS]:
        ago = format_duration(max(0, now - decision.asked_at))
        text = _indent(escape_hidden(decision.display_text))
        lines.append(f"- {decision.decision}: {describe_decision(decision)} ({ago} ago)\n{text}".rstrip())
    lines += [*_describe_more(len(found)), *([f"{'This' if not found else 'Also this'} needs you:"] if needs else [])]
    lines += [f"- {need.line}" for need in needs[:MAX_LISTED_ROWS]]
    return "\n".join([*lines, *_describe_more(len(needs))])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in shorten(text, 1000).splitlines())


async def _decide(context: AgentContext, said: Decided, session: str, *, ahead: bool) -> str:
    app = context.app
    found = await approvals.list_pending_decisions(context.store, app.clock.now())
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    meant = (
        [decision for decision in found if decision.decision.lower() == said.decision.lower()] if said.decision else []
    )
    meant = meant or [
        decision for decision in found if said.decision and decision.decision.lower().startswith(said.decision.lower())
    ]
    if said.ambiguous or len(meant) > 1:
        own = [decision.decision for decision in found if decision.agent == context.agent.policy.name]
        return f"Several decisions wait: say which one, as in: {said.verdict} {(own or [''])[0]}\n" + "\n".join(
            f"- {each}" for each in own
        )
    if not meant:
        return f"No open decision is called {said.decision}." if said.decision else "Nothing of this agent needs you."
    (decision,) = meant
    if decision.about == "cap_raise" and said.verdict == "approve":
        return f"A higher cap needs an amount: halter approve {decision.decision} --cap AMOUNT"
    unseen = ahead or not await _was_shown(context, session, decision.decision)
    if said.implied and said.verdict == "approve" and unseen:
        # This decision may have replaced the one that they saw or were typing about.
        text = _indent(escape_hidden(decision.display_text))
        shown = f"- {decision.decision}: {describe_decision(decision)}\n{text}".rstrip()
        return f"This is what waits:\n{shown}\nSay approve again to agree to it, or deny."
    write = approvals.answer_decision(decision, said.verdict, app.settings.person, app.ids.make())
    events = (await context.store.commit(write)).events
    if events and isinstance(events[0].event, ApprovalGiven):
        return f"You agree to {decision.decision}. Another person must agree, too."
    if not events:
        return f"{decision.decision} was already decided, has expired, or cannot be done any more."
    verdict = "Approved" if said.verdict == "approve" else "Denied"
    return f"{verdict}: {decision.decision} ({describe_decision(decision).rstrip('.')})"


async def _was_shown(context: AgentContext, session: str, decision: str) -> bool:
    """Whether a decision was shown lately, in this session or before it began."""
    store, since = context.store, context.app.clock.now() - SHOWN_DECISION_TTL
    for stream in (inbox_stream(session), FLEET):
        heads = await store.ask(Query("head", StreamRow, {"stream": stream}))
        for stored in (
            await store.read(stream, max(0, heads[0].head - MAX_EVENTS_SEARCHED), MAX_EVENTS_SEARCHED) if heads else ()
        ):
            routed = isinstance(stored.event, MessageRouted) and stored.at >= since
            if routed and decision in from_body(await said_in(store, stored)):
                return True
    return False


async def describe_schedules(context: AgentContext) -> str:
    name, now = context.agent.policy.name, context.app.clock.now()
    found = await plan_triggers(context.store, now, name)
    known = {plan.name for plan in found}
    unborn = [each.name for each in context.agent.tasks.triggers() if each.name not in known]
    if not found and not unborn:
        return f"Nothing is planned for {name}."
    lines = [_plan(plan, now) for plan in found]
    return "\n".join([*lines, *(f"- {each}: stands in agent.yaml, and begins with halter up" for each in unborn)])


def _plan(plan: TriggerPlan, now: int) -> str:
    due = "" if plan.next_at is None else f", next in {format_duration(max(0, plan.next_at - now))}"
    last = "" if plan.last_at is None else f", last {format_duration(max(0, now - plan.last_at))} ago ({plan.session})"
    held = f", {len(plan.quarantined)} left to you" if plan.quarantined else ""
    waits = f", {plan.waiting} waiting" if plan.waiting else ""
    why = f". {plan.delayed}" if plan.delayed else ""
    return f"- {plan.name}: {plan.when}{due}{last}{waits}{held}{why}"


async def _cancel(context: AgentContext, named: ScheduleName) -> str:
    store, app = context.store, context.app
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    if not named.known:
        which = f"There is no schedule {named.name}." if named.name else "Say which one: cancel schedule NAME."
        return f"{which}\n{await describe_schedules(context)}"
    if any(is_same_name(each.name, named.name) for each in context.agent.tasks.triggers()):
        return f"{named.name} stands in agent.yaml, and would come back: it was not ended. Remove it there."
    identity = trigger_id(context.agent.policy.name, named.name)
    row = next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": identity}))), None)
    if row is None or row.ended_at is not None:
        return f"{named.name} is over already."
    await store.commit(triggers.end_trigger_row(row, app.settings.person, "said in a message"))
    return f"{named.name} is cancelled: it starts nothing any more."


async def describe_hot_state(context: AgentContext, field: str) -> str:
    """Shows the agent's hot state as it was saved last, with ages."""
    fields = context.agent.pacing.fields
    if not fields:
        return f"{context.agent.policy.name} has no hot state: its file names no fields and no sensors."
    beside = await find_autonomous_session(context)
    params = {"session": "" if beside is None else beside.session}
    kept = next(iter(await context.store.ask(Query("snapshot", SavedHotState, params))), None)
    hot = HotState({name: each for name, each in fields.items() if field in ("", name)})
    hot.restore(b"" if kept is None else kept.data)
    return hot.render(context.app.clock.now())


async def describe_last_receipt(context: AgentContext) -> str:
    """Summarizes the agent's newest session that has ended."""
    name = context.agent.policy.name
    params = {"agent": name, "limit": 1}
    row = next(iter(await context.store.ask(Query("ended_of", SessionRow, params))), None)
    if row is None or row.ended_at is None:
        return f"No session of {name} is over yet."
    receipt = make_receipt(await read_stream(context.store, session_stream(row.session)))
    now, took = context.app.clock.now(), format_duration(max(0, row.ended_at - row.started_at))
    refused = f", {format_count(len(receipt.brakes), 'refusal')}" if receipt.brakes else ""
    ago = format_duration(max(0, now - row.ended_at))
    question, called = format_count(len(receipt.requests), "request"), format_count(len(receipt.calls), "call")
    lines = (
        f"{row.session} ({row.kind}) ended {ago} ago: {row.state}, {row.terminal_reason}.",
        f"It took {took} and cost {format_usd(receipt.cost_usd)}.",
        f"It made {question} and {called}{refused}.",
        f"All of it: halter receipt {row.session}",
    )
    return "\n".join(lines)


def _describe_more(number: int) -> Sequence[str]:
    return [f"… and {number - MAX_LISTED_ROWS} more."] if number > MAX_LISTED_ROWS else []


ANSWER_ROUTE: Final = RoutingDecision("strategy", "GOAL", "It answers what the agent asked.", Plain())


class HandledMessage(msgspec.Struct, frozen=True):
    """A message that is answered, and the other session that answered it, if one did."""

    routed: RoutingDecision
    answer: str
    ok: bool = True
    session: str = ""


class ForwardedMessage(msgspec.Struct, frozen=True):
    """A message for the session's own model; unless `told`, it has yet to be posted."""

    routed: RoutingDecision
    told: bool = False


@dataclass(frozen=True, slots=True)
class SubSessionObserver:
    """Observes another session that does what a message asks for; `began` is called when its parent has started."""

    observer: LoopObserver = NO_OBSERVER
    on_wait: WaitListener = lambda _, __: None
    on_step: StepListener = lambda _, __: None
    began: Callable[[], None] = lambda: None


NO_SUB_SESSION_OBSERVER: Final = SubSessionObserver()


async def build_surroundings(agent: ResolvedAgent, store: Store | None, now: int, *, has_tools: bool) -> RoutingContext:
    """Returns the names that a message to an agent may use: from its files and, if given, its store."""
    name, rows, waiting = agent.policy.name, (), ()
    if store is not None:
        rows = await store.ask(Query("triggers_of", TriggerRow, {"agent": name}))
        waiting = await list_pending_decisions(store, now)
    planned = [row.trigger.partition("/")[2] for row in rows]
    return RoutingContext(
        agent=name,
        now=now,
        timezone=agent.policy.caps.zone,
        has_tools=has_tools,
        agents=tuple(find_neighbour_agents(agent.source_folder)),
        playbooks=tuple(agent.playbooks),
        schedules=tuple(dict.fromkeys([*planned, *(each.name for each in agent.tasks.triggers())])),
        fields=tuple(agent.pacing.fields),
        decisions=tuple(decision.decision for decision in waiting if decision.agent == name),
    )


def declares_tools(agent: ResolvedAgent, folder: Path) -> bool:
    """Whether an agent will have tools; those of its code and its servers are known only when they run."""
    wanted = agent.policy.tools
    built_in = any(each is not UNSET for each in (wanted.files, wanted.http, wanted.shell))
    own = (folder / OWN_TOOLS).exists() or (folder / MCP_FILE).exists()
    return built_in or own or bool(agent.tasks.verbs)


async def handle_message(
    context: AgentContext,
    session: str,
    text: str,
    *,
    kind: SessionKind = "chat",
    answering: bool = False,
    showing: SubSessionObserver = NO_SUB_SESSION_OBSERVER,
    ahead: bool = False,
) -> HandledMessage | ForwardedMessage:
    """Routes a person's message to a session, and does what needs no model.

    The session need not exist: it starts only for a message that belongs to it. With `answering` the message answers
    the agent's question and goes to its model, unless it says halt. A message typed `ahead` of what is on screen
    approves nothing.
    """
    now, has_tools = context.app.clock.now(), bool(list_tool_names(context))
    route = route_message(text, await build_surroundings(context.agent, context.store, now, has_tools=has_tools))
    if answering and route.route != "halt":
        route = ANSWER_ROUTE
    if route.route != "strategy":
        answer = await answer_fast_path(context, route, session, ahead=ahead)
        await _record_route(context, session, route, text, answer)
        return HandledMessage(route, answer)
    return await _dispatch_route(context, session, text, route, kind, showing)


async def _dispatch_route(
    context: AgentContext,
    session: str,
    text: str,
    route: RoutingDecision,
    kind: SessionKind,
    showing: SubSessionObserver,
) -> HandledMessage | ForwardedMessage:
    match route.details:
        case Scheduled() as said:
            answer = (await propose_schedule(context, said)).sentence
        case Unclear(sentence=answer):
            pass
        case Delegated() as said:
            return await _delegate_message(context, session, text, route, said, kind, showing)
        case Script() as said:
            await _record_route(context, session, route, text)
            return await _play_script(context, route, said, showing)
        case _:
            await _record_route(context, session, route, text, begins=True)
            return ForwardedMessage(route)
    await _record_route(context, session, route, text, answer)
    return HandledMessage(route, answer)


async def _delegate_message(
    context: AgentContext,
    session: str,
    text: str,
    route: RoutingDecision,
    said: Delegated,
    kind: SessionKind,
    showing: SubSessionObserver,
) -> HandledMessage | ForwardedMessage:
    """Delegates a message. In a chat the last words of the other agent answer; a task answers itself, knowing them."""
    try:
        async with open_delegate(context, said.agent) as other:
            await send_message(context, session, text, kind)
            showing.began()
            await _record_route(context, session, route, text)
            came = await delegate_task(context, session, other, said.task, showing.observer, showing.on_wait)
    except ConfigError as error:
        return HandledMessage(route, str(error), ok=False)
    if kind == "task" and came.has_ended:
        return ForwardedMessage(route, told=True)
    return HandledMessage(route, came.text, came.ok, came.session)


async def send_message(context: AgentContext, session: str, text: str, kind: SessionKind) -> None:
    """Posts a message to a session, or starts the session with it."""
    if await _has_begun(context, session):
        await post_message(context, session, text)
    else:
        await begin_session(context, text, kind, session)


async def _has_begun(context: AgentContext, session: str) -> bool:
    rows = await context.store.ask(Query("session", SessionRow, {"session": session}))
    return bool(rows) and rows[0].started_at > 0


async def _record_route(
    context: AgentContext, session: str, route: RoutingDecision, text: str, answer: str = "", *, begins: bool = False
) -> None:
    """Records the route of a message.

    It stands in the inbox of its session, also of one that `begins` with it, so that it is erased with the session; a
    message without a session stands in the fleet's stream.
    """
    redact = context.guard().redact
    raw = {"text": redact(text), **({"answer": redact(answer)} if answer else {})}
    body, blob = await offload_body(context.store, msgspec.json.encode(raw))
    event = MessageRouted(route=route.route, strategy=route.strategy or "", why=redact(route.why))
    stream = inbox_stream(session) if begins or await _has_begun(context, session) else FLEET
    await context.store.commit(Write(stream, context.app.ids.make(), lambda _: [Draft(event, body, blob)]))

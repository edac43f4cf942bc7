"""The front door: routes a message before any model sees it, and answers messages that need no model.

The route and its reason are recorded as an event in the session's inbox, which wakes no session. A task for later is
proposed to a person, and exists only after the person approves it.
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
from halter.config.definition import AgentDefinition
from halter.config.mcp_file import MCP_FILE
from halter.core.clock import MINUTE, find_first_moment, find_zone, format_duration, to_local_time
from halter.core.errors import ConfigError
from halter.core.events import ApprovalGiven, MessageRouted
from halter.core.ids import FLEET, can_decide, inbox_stream, session_stream
from halter.core.money import BudgetRow, Leg, Spender, format_compared_micros, format_micros, format_usd, list_accounts
from halter.core.ports import Draft, Query, Store, Write, offload_body, read_body, read_stream
from halter.core.rows import AgentRow, DecisionRow, SavedHotState, SessionRow, StreamRow, TriggerRow
from halter.core.schedules import Timing, explain_timing, next_tick_after
from halter.core.text import decode_body, describe_need_count, escape_hidden, format_count, join_names, shorten
from halter.core.vocabulary import SessionKind
from halter.front_door.fast_paths import (
    HELP_ANSWER,
    ClockQuestion,
    Decided,
    HotStateQuestion,
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
from halter.front_door.schedule_parser import Unclear
from halter.front_door.sentences import Period
from halter.guard import approvals, halts
from halter.guard.approvals import PlannedTrigger, ask_question, list_pending_decisions, make_trigger_question
from halter.guard.halts import read_halts
from halter.guard.ledger import read_budget
from halter.loop.observer import NO_OBSERVER, LoopObserver
from halter.loop.session_waits import WaitListener
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_code import OWN_TOOLS
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
from halter.runtime.needs import describe_continuation, describe_decision, list_needs, read_need_rows
from halter.runtime.session_builder import find_autonomous_session
from halter.runtime.session_start import begin_playbook, begin_session, delegate_task, post_message, resume_playbook
from halter.runtime.sub_sessions import list_tool_names, open_delegate
from halter.runtime.trigger_runner import digest_trigger, end_trigger_row
from halter.spec.triggers import Schedule, inherit_trigger_caps, trigger_id
from halter.state.receipt import make_receipt
from halter.state.trigger_records import encode_trigger_record
from halter.tasks.playbooks import StepListener

MAX_NEXT_TIMES: Final = 3
"""Number of coming run times that a plan shows."""
MAX_TASK_LENGTH: Final = 8_000
"""Maximum length of a scheduled task in characters."""
MAX_NAME_WORDS: Final = 4
"""Maximum number of words of the task in its name."""


class PlanOutcome(msgspec.Struct, frozen=True):
    """The id of the pending decision, or "", and the sentence for the person."""

    decision: str
    sentence: str


async def propose_schedule(agent: AgentRuntime, task: Scheduled) -> PlanOutcome:
    """Ask a person to approve a scheduled task."""
    objection = _find_objection(agent, task)
    if objection:
        return PlanOutcome("", objection)
    now = agent.app.clock.now()
    name = await _free_name(agent, task.prompt)
    schedule = Schedule(name=name, prompt=task.prompt, timezone=task.timing.timezone)
    planned_trigger = PlannedTrigger(
        shown=describe_schedule_plan(agent.name, task, await _cost(agent, schedule, task, now), now),
        trigger=trigger_id(agent.name, name),
        type="schedule",
        digest=digest_trigger(schedule),
        made=msgspec.Raw(encode_trigger_record(schedule, task.timing)),
    )
    # An approval after the planned moment would be too late.
    lifetime = agent.policy.approval_expiry
    lifetime = lifetime if task.timing.at is None else min(lifetime, task.timing.at - now)
    question = make_trigger_question(agent.name, planned_trigger, lifetime)
    await agent.store.commit(ask_question(question))
    hint = f"Nothing is scheduled yet. Say approve, or run: halter approve {question.decision}"
    return PlanOutcome(question.decision, f"{planned_trigger.shown}\n{hint}")


def _find_objection(agent: AgentRuntime, task: Scheduled) -> str:
    """Describe why a task cannot be scheduled; "" if it can."""
    if len(task.prompt) > MAX_TASK_LENGTH:
        return f"The task is too long for a schedule: use at most {MAX_TASK_LENGTH:,} characters."
    if agent.guard().redact(task.prompt) != task.prompt:
        return "Not scheduled: the task contains a secret in plain text. Use ${secret:NAME} instead."
    if next_tick_after(task.timing, agent.app.clock.now()) is None:
        return f"Not scheduled: that time has passed ({explain_timing(task.timing)})."
    return ""


async def _free_name(agent: AgentRuntime, prompt: str) -> str:
    """Make a name from the task that no trigger of the agent has ever had."""
    words = re.findall(r"[a-z0-9]+", prompt.lower())[:MAX_NAME_WORDS]
    name = "-".join(words)[:40].strip("-") or "task"
    number = 1
    while await _is_name_taken(agent, name if number == 1 else f"{name}-{number}"):
        number += 1
    return name if number == 1 else f"{name}-{number}"


async def _is_name_taken(agent: AgentRuntime, name: str) -> bool:
    identity = trigger_id(agent.policy.name, name)
    if agent.definition.tasks.trigger(name) is not None:
        return True
    if await agent.store.ask(Query("trigger", TriggerRow, {"trigger": identity})):
        return True
    return bool(await agent.store.ask(Query("decision", DecisionRow, {"decision": f"schedule/{identity}"})))


async def _cost(agent: AgentRuntime, schedule: Schedule, task: Scheduled, now: int) -> str:
    """Describe the most that a schedule can cost, and the mean cost of earlier tasks."""
    store = agent.store
    policy = await apply_policy_caps(store, agent.policy)
    work = Clockwork(
        agent=policy.name, caps=policy.caps, schedules=(build_scheduled_runs(policy, schedule, task.timing),)
    )
    forecast = forecast_bounds(work, await read_balances(store, work, now), now, now + MONTH)
    run_cap = inherit_trigger_caps(policy.caps, schedule).session.max_cost_usd
    run = find_tightest([run_cap, forecast.total])
    monthly = f" and {format_bound(forecast.clock)} in thirty days" if task.recurring else ""
    mean = await compute_mean_cost(store, policy.name, now)
    earlier = "" if mean is None else f"; its last {mean.samples} tasks cost {format_micros(mean.usd)} on average"
    return f"{format_bound(run)} a run{monthly}, bounded by every cap{earlier}"


def describe_schedule_plan(agent: str, task: Scheduled, cost: str, now: int) -> str:
    """Describe the task as understood, when it runs next and what it costs."""
    zone = find_zone(task.timing.timezone) or ZoneInfo("UTC")
    times = ", ".join(f"{to_local_time(at, zone):%a %Y-%m-%d %H:%M}" for at in _next(task.timing, now))
    lines = [
        f"{agent} would run this task: {task.prompt}",
        f"When: {explain_timing(task.timing)}",
        f"Next: {times}{'' if task.recurring else ', and not again'}",
        f"Cost: {cost}",
    ]
    return "\n".join(lines)


def _next(timing: Timing, now: int) -> Sequence[int]:
    times: list[int] = []
    moment: int | None = now
    while len(times) < MAX_NEXT_TIMES and (moment := next_tick_after(timing, moment)) is not None:
        times.append(moment)
    return times


_INPUT: Final = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_-]*)(?:=|:\s?)"
    r"(?:\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)'|(?P<bare>[^\s,;]+))"
)


def parse_playbook_inputs(text: str, names: tuple[str, ...]) -> dict[str, str]:
    """Parse `name=value` inputs in a message; a value with spaces is quoted."""
    inputs: dict[str, str] = {}
    for match in _INPUT.finditer(text):
        if match["name"] in names:
            values = (match["double"], match["single"], match["bare"])
            inputs[match["name"]] = next(value for value in values if value is not None)
    return inputs


async def _play_script(
    agent: AgentRuntime, route: RoutingDecision, script: Script, observer: "SubSessionObserver"
) -> "HandledMessage":
    playbook = agent.definition.playbooks[script.playbook]
    inputs = parse_playbook_inputs(script.rest, playbook.inputs)
    missing = [name for name in playbook.inputs if name not in inputs]
    if missing:
        hint = f"say run {script.playbook} with {missing[0]}=VALUE"
        return HandledMessage(route, f"{script.playbook} needs {join_names(missing)}: {hint}", ok=False)
    try:
        session = await begin_playbook(agent, playbook, inputs)
        outcome = await resume_playbook(agent, session, observer.on_step, observer.on_wait)
    except ConfigError as error:
        return HandledMessage(route, str(error), ok=False)
    sentence = (
        f"{script.playbook} (session {session}): {outcome.state}, {outcome.terminal_reason}. {outcome.sentence}".strip()
    )
    return HandledMessage(route, sentence, outcome.state == "COMPLETED", session)


MAX_LISTED_ROWS = 10
"""Maximum number of sessions or decisions that are listed; the rest are counted."""
PAGE = 1000
SHOWN_DECISION_TTL = 15 * MINUTE
"""Time for which a decision counts as shown."""
MAX_EVENTS_SEARCHED = 100
ONLY_A_PERSON = "Only a person can do that, and an agent sent this message."


async def answer_fast_path(
    agent: AgentRuntime, route: RoutingDecision, session: str, *, typed_ahead: bool = False
) -> str:
    """Answer a message without a model. `session` is the session to which it was sent."""
    match route.details:
        case Plain() if route.route == "status":
            return await describe_status(agent, session)
        case Plain() if route.route == "needs_me":
            return await describe_needs(agent.store, agent.app.clock.now())
        case Plain() if route.route == "schedules":
            return await describe_schedules(agent)
        case Plain() if route.route == "last_receipt":
            return await describe_last_receipt(agent)
        case ClockQuestion(zone=zone):
            return describe_time(agent.app.clock.now(), zone)
        case SumResult(text):
            return text
        case SpendingQuestion(period):
            return await describe_spending(agent, period)
        case Scope(scope):
            return await (_halt if route.route == "halt" else _resume)(agent, scope)
        case Decided() as decided:
            return await _decide(agent, decided, session, typed_ahead=typed_ahead)
        case ScheduleName() as schedule_name:
            return await _cancel(agent, schedule_name)
        case HotStateQuestion(name):
            return await describe_hot_state(agent, name)
        case Plain() | Scheduled() | Unclear() | Delegated() | Script():
            return HELP_ANSWER


async def describe_status(agent: AgentRuntime, session: str) -> str:
    """Describe whether the agent is on or halted, and the state of its sessions."""
    store, name, now = agent.store, agent.policy.name, agent.app.clock.now()
    rows = await store.ask(Query("open_of", SessionRow, {"agent": name, "limit": 1000}))
    switch = next((row for row in await store.ask(Query("all_agents", AgentRow)) if row.agent == name), None)
    scopes = {f"agent:{name}", "fleet", *(f"session:{row.session}" for row in rows)}
    active_halts = [row for row in (await read_halts(store, scopes)).values() if row.halted]
    switch_text = "was never switched on" if switch is None else "is on" if switch.switched_on else "is off"
    lines = [f"{name} {switch_text}. {format_count(len(rows), 'session')} {'is' if len(rows) == 1 else 'are'} open."]
    lines += [f"{halt.scope} was halted by {halt.by}." for halt in active_halts]
    lines += [f"{_session(row, now, session)}{await _money(store, row)}" for row in rows[:MAX_LISTED_ROWS]]
    return "\n".join([*lines, *_describe_more(len(rows))])


def _session(row: SessionRow, now: int, current_session: str) -> str:
    age = f"started {format_duration(max(0, now - row.started_at))} ago"
    next_turn = (
        f", next turn in {format_duration(row.due_at - now)}" if row.due_at is not None and row.due_at > now else ""
    )
    origin = f", started by {row.trigger}" if row.trigger else f", a sub-session of {row.parent}" if row.parent else ""
    marker = ", this one" if row.session == current_session else ""
    return f"- {row.session} ({row.kind}{origin}{marker}): {row.state}{next_turn}, {age}"


async def _money(store: Store, row: SessionRow) -> str:
    params = {"scope": session_stream(row.session), "window": "", "unit": "usd"}
    rows = await store.ask(Query("budget", BudgetRow, params))
    return f", {(await render_budgets(store, rows))[0].describe()}" if rows else ""


class _Sum(msgspec.Struct, frozen=True):
    agent: str
    purpose: str
    usd: int


async def describe_spending(agent: AgentRuntime, period: Period) -> str:
    """Describe what the agent spent, for which purposes, and the state of its caps."""
    policy, now, store = agent.policy, agent.app.clock.now(), agent.store
    since = _find_period_start(period, now, policy.caps.zone)
    rows = await store.ask(Query("spent_by_purpose", _Sum, {"since": since}))
    sums: dict[str, int] = {}
    for row in rows:
        if row.agent == policy.name and row.usd:
            sums[row.purpose] = sums.get(row.purpose, 0) + row.usd
    breakdown = ", ".join(f"{format_micros(usd)} for {purpose}" for purpose, usd in sums.items())
    text = {"today": "today", "week": "this week", "month": "this month"}[period]
    lines = [
        f"{policy.name} has spent {format_micros(sum(sums.values()))} {text}{f': {breakdown}' if breakdown else ''}."
    ]
    legs = [leg for leg in list_accounts(policy.caps, Spender("", policy.name), now) if leg.scope != "session:"]
    return "\n".join([*lines, *[await _compare_with_cap(agent, leg) for leg in legs]])


async def _compare_with_cap(agent: AgentRuntime, leg: Leg) -> str:
    row = await read_budget(agent.store, leg.scope, leg.window)
    cap = row.binding(leg.cap)
    spent, held, limit = format_compared_micros(row.spent, row.held, row.spent if cap is None else cap)
    held_text = f", and {held} is held" if row.held else ""
    limit_text = "no cap" if cap is None else f"a cap of {limit}"
    return f"- {leg.scope} {leg.window}: {spent} against {limit_text}{held_text}".replace(" :", ":")


def _find_period_start(period: Period, now: int, zone: str) -> int:
    """Return when the current day, week or month began in local time. Weeks begin on Monday."""
    zone_info = find_zone(zone) or ZoneInfo("UTC")
    day = to_local_time(now, zone_info).date()
    if period == "week":
        day -= timedelta(days=day.weekday())
    elif period == "month":
        day = day.replace(day=1)
    return find_first_moment(day, time(), zone_info)


async def _halt(agent: AgentRuntime, scope: str) -> str:
    app = agent.app
    if not can_decide(app.settings.person):
        return ONLY_A_PERSON
    resolved_scope = await _resolve_scope(agent, scope)
    if resolved_scope is None:
        return f"There is no session {scope.partition(':')[2]}; nothing was halted. List sessions with: halter sessions"
    await agent.store.commit(halts.halt(resolved_scope, app.settings.person, app.ids.make(), "requested in a message"))
    return (
        f"{resolved_scope} is halted. Nothing runs there until you say resume, or run: halter resume {resolved_scope}"
    )


async def _resume(agent: AgentRuntime, scope: str) -> str:
    app = agent.app
    if not can_decide(app.settings.person):
        return ONLY_A_PERSON
    resolved_scope = await _resolve_scope(agent, scope)
    ramp = await halts.compute_ramp(agent.store, resolved_scope or scope)
    write = halts.resume(resolved_scope or scope, app.settings.person, app.ids.make(), ramp, "requested in a message")
    if not (await agent.store.commit(write)).events:
        return f"{resolved_scope or scope} is not halted."
    return halts.describe_resume(resolved_scope or scope, ramp)


async def _resolve_scope(agent: AgentRuntime, scope: str) -> str | None:
    """Complete an abbreviated session id in a scope; None if it is not unique. Other scopes are unchanged."""
    kind, _, name = scope.partition(":")
    if kind != "session":
        return scope
    rows = await agent.store.ask(Query("sessions_called", SessionRow, {"beginning": name}))
    matches = [row.session for row in rows]
    exact = [session for session in matches if session.lower() == name]
    return f"session:{(exact or matches)[0]}" if len(exact or matches) == 1 else None


async def describe_needs(store: Store, now: int) -> str:
    """Describe everything that waits for a person, decisions first. All interfaces show this queue."""
    rows = await read_need_rows(store, now)
    decisions, needs = rows.waiting, [need for need in list_needs(rows) if not need.decision]
    if not decisions and not needs:
        return "Nothing needs you."
    lines = [f"- {need.line}" for need in needs if need.is_about_health]
    needs = [need for need in needs if not need.is_about_health]
    if decisions:
        needs_text = describe_need_count(len(decisions), "decision")
        lines.append(f"{needs_text}. Say approve or deny, with the id if there are several.")
    for decision in decisions[:MAX_LISTED_ROWS]:
        age = format_duration(max(0, now - decision.asked_at))
        text = _indent(escape_hidden(decision.display_text))
        lines.append(f"- {decision.decision}: {describe_decision(decision)} ({age} ago)\n{text}".rstrip())
    lines += [
        *_describe_more(len(decisions)),
        *([f"{'This' if not decisions else 'Also this'} needs you:"] if needs else []),
    ]
    lines += [f"- {need.line}" for need in needs[:MAX_LISTED_ROWS]]
    return "\n".join([*lines, *_describe_more(len(needs))])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in shorten(text, 1000).splitlines())


async def _decide(agent: AgentRuntime, answer: Decided, session: str, *, typed_ahead: bool) -> str:
    app = agent.app
    decisions = await approvals.list_pending_decisions(agent.store, app.clock.now())
    if not can_decide(app.settings.person):
        return ONLY_A_PERSON
    matches = (
        [decision for decision in decisions if decision.decision.lower() == answer.decision.lower()]
        if answer.decision
        else []
    )
    matches = matches or [
        decision
        for decision in decisions
        if answer.decision and decision.decision.lower().startswith(answer.decision.lower())
    ]
    if answer.ambiguous or len(matches) > 1:
        own_decisions = [decision.decision for decision in decisions if decision.agent == agent.policy.name]
        return (
            f"Several decisions are pending. Name one, as in: {answer.verdict} {(own_decisions or [''])[0]}\n"
            + "\n".join(f"- {name}" for name in own_decisions)
        )
    if not matches:
        return (
            f"There is no pending decision {answer.decision}."
            if answer.decision
            else "This agent has no pending decision."
        )
    (decision,) = matches
    if decision.about == "cap_raise" and answer.verdict == "approve":
        return f"A higher cap needs an amount. Run: halter approve {decision.decision} --cap AMOUNT"
    is_unseen = typed_ahead or not await _is_recently_shown(agent, session, decision.decision)
    if answer.implied and answer.verdict == "approve" and is_unseen:
        # This decision may have replaced the one that the person saw when typing.
        text = _indent(escape_hidden(decision.display_text))
        line = f"- {decision.decision}: {describe_decision(decision)}\n{text}".rstrip()
        return f"This decision is pending:\n{line}\nSay approve again to approve it, or deny."
    continuation = await describe_continuation(agent.store, decision.session, app.clock.now())
    write = approvals.answer_decision(decision, answer.verdict, app.settings.person, app.ids.make())
    events = (await agent.store.commit(write)).events
    if events and isinstance(events[0].event, ApprovalGiven):
        return f"You approved {decision.decision}. A second person must approve it too."
    if not events:
        return f"{decision.decision} was already answered or withdrawn, or has expired."
    verdict = "Approved" if answer.verdict == "approve" else "Denied"
    return f"{verdict}: {decision.decision} ({describe_decision(decision).rstrip('.')}). {continuation}".strip()


async def _is_recently_shown(agent: AgentRuntime, session: str, decision: str) -> bool:
    """Return true if a decision was shown recently, in this session or before it started."""
    store, since = agent.store, agent.app.clock.now() - SHOWN_DECISION_TTL
    for stream in (inbox_stream(session), FLEET):
        heads = await store.ask(Query("head", StreamRow, {"stream": stream}))
        for stored in (
            await store.read(stream, max(0, heads[0].head - MAX_EVENTS_SEARCHED), MAX_EVENTS_SEARCHED) if heads else ()
        ):
            is_recent_route = isinstance(stored.event, MessageRouted) and stored.at >= since
            if is_recent_route and decision in decode_body(await read_body(store, stored)):
                return True
    return False


async def describe_schedules(agent: AgentRuntime) -> str:
    name, now = agent.policy.name, agent.app.clock.now()
    plans = await plan_triggers(agent.store, now, name)
    planned_names = {plan.name for plan in plans}
    pending_names = [
        trigger_name.name
        for trigger_name in agent.definition.tasks.triggers()
        if trigger_name.name not in planned_names
    ]
    if not plans and not pending_names:
        return f"{name} has no triggers."
    lines = [_plan(plan, now) for plan in plans]
    return "\n".join(
        [
            *lines,
            *(f"- {trigger_name}: in agent.yaml, starts with halter up" for trigger_name in pending_names),
        ]
    )


def _plan(plan: TriggerPlan, now: int) -> str:
    next_run = "" if plan.next_at is None else f", next in {format_duration(max(0, plan.next_at - now))}"
    last_run = (
        "" if plan.last_at is None else f", last {format_duration(max(0, now - plan.last_at))} ago ({plan.session})"
    )
    quarantined_text = f", {len(plan.quarantined)} quarantined" if plan.quarantined else ""
    waiting_text = f", {plan.waiting} waiting" if plan.waiting else ""
    delay_text = f". {plan.delayed}" if plan.delayed else ""
    return f"- {plan.name}: {plan.when}{next_run}{last_run}{waiting_text}{quarantined_text}{delay_text}"


async def _cancel(agent: AgentRuntime, schedule_name: ScheduleName) -> str:
    store, app = agent.store, agent.app
    if not can_decide(app.settings.person):
        return ONLY_A_PERSON
    if not schedule_name.is_known:
        hint = (
            f"There is no schedule {schedule_name.name}."
            if schedule_name.name
            else "Name the schedule: cancel schedule NAME."
        )
        return f"{hint}\n{await describe_schedules(agent)}"
    if any(is_same_name(each.name, schedule_name.name) for each in agent.definition.tasks.triggers()):
        return f"{schedule_name.name} was not ended: it is defined in agent.yaml. Remove it there."
    identity = trigger_id(agent.policy.name, schedule_name.name)
    row = next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": identity}))), None)
    if row is None or row.ended_at is not None:
        return f"{schedule_name.name} has already ended."
    await store.commit(end_trigger_row(row, app.settings.person, "requested in a message"))
    return f"Ended {schedule_name.name}."


async def describe_hot_state(agent: AgentRuntime, field: str) -> str:
    """Render the agent's last saved hot state, with ages."""
    fields = agent.definition.pacing.fields
    if not fields:
        return f"{agent.policy.name} has no hot state: its agent.yaml defines no fields and no sensors."
    session = await find_autonomous_session(agent)
    params = {"session": "" if session is None else session.session}
    snapshot = next(iter(await agent.store.ask(Query("snapshot", SavedHotState, params))), None)
    hot = HotState({name: each for name, each in fields.items() if field in ("", name)})
    hot.restore(b"" if snapshot is None else snapshot.data)
    return hot.render(agent.app.clock.now())


async def describe_last_receipt(agent: AgentRuntime) -> str:
    """Summarize the agent's newest session that has ended."""
    name = agent.policy.name
    params = {"agent": name, "limit": 1}
    row = next(iter(await agent.store.ask(Query("ended_of", SessionRow, params))), None)
    if row is None or row.ended_at is None:
        return f"No session of {name} has ended yet."
    receipt = make_receipt(await read_stream(agent.store, session_stream(row.session)))
    now, duration = agent.app.clock.now(), format_duration(max(0, row.ended_at - row.started_at))
    refusals_text = f", {format_count(len(receipt.brakes), 'refusal')}" if receipt.brakes else ""
    ended_ago = format_duration(max(0, now - row.ended_at))
    requests_text, calls_text = format_count(len(receipt.requests), "request"), format_count(len(receipt.calls), "call")
    lines = (
        f"{row.session} ({row.kind}) ended {ended_ago} ago: {row.state}, {row.terminal_reason}.",
        f"It took {duration} and cost {format_usd(receipt.cost_usd)}.",
        f"It made {requests_text} and {calls_text}{refusals_text}.",
        f"Full receipt: halter show {row.session} --receipt",
    )
    return "\n".join(lines)


def _describe_more(number: int) -> Sequence[str]:
    return [f"… and {number - MAX_LISTED_ROWS} more."] if number > MAX_LISTED_ROWS else []


ANSWER_ROUTE: Final = RoutingDecision("strategy", "GOAL", "Answers the agent's question.", Plain())


class HandledMessage(msgspec.Struct, frozen=True):
    """A message that is answered, with the session that answered it, if one did."""

    routed: RoutingDecision
    answer: str
    ok: bool = True
    session: str = ""


class ForwardedMessage(msgspec.Struct, frozen=True):
    """A message for the session's own model. Unless `is_posted`, the caller has to post it."""

    routed: RoutingDecision
    is_posted: bool = False


@dataclass(frozen=True, slots=True)
class SubSessionObserver:
    """Callbacks for a session that handles a message. `on_start` is called when its parent session exists."""

    observer: LoopObserver = NO_OBSERVER
    on_wait: WaitListener = lambda _, __: None
    on_step: StepListener = lambda _, __: None
    on_start: Callable[[], None] = lambda: None


NO_SUB_SESSION_OBSERVER: Final = SubSessionObserver()


async def build_surroundings(
    agent: AgentDefinition, store: Store | None, now: int, *, has_tools: bool
) -> RoutingContext:
    """Return the names that a message to an agent may use, from its files and, if given, its store."""
    name, rows, waiting = agent.policy.name, (), ()
    if store is not None:
        rows = await store.ask(Query("triggers_of", TriggerRow, {"agent": name}))
        waiting = await list_pending_decisions(store, now)
    confirmed_names = [row.trigger.partition("/")[2] for row in rows]
    return RoutingContext(
        agent=name,
        now=now,
        timezone=agent.policy.caps.zone,
        has_tools=has_tools,
        agents=tuple(find_neighbour_agents(agent.source_folder)),
        playbooks=tuple(agent.playbooks),
        schedules=tuple(dict.fromkeys([*confirmed_names, *(each.name for each in agent.tasks.triggers())])),
        fields=tuple(agent.pacing.fields),
        decisions=tuple(decision.decision for decision in waiting if decision.agent == name),
    )


def declares_tools(agent: AgentDefinition, folder: Path) -> bool:
    """Return true if an agent will have tools. The tools of its code and servers are known only once they run."""
    tools = agent.policy.tools
    has_built_in = any(each is not UNSET for each in (tools.files, tools.http, tools.shell))
    has_own_code = (folder / OWN_TOOLS).exists() or (folder / MCP_FILE).exists()
    return has_built_in or has_own_code or bool(agent.tasks.verbs)


async def handle_message(
    agent: AgentRuntime,
    session: str,
    text: str,
    *,
    kind: SessionKind = "chat",
    is_answer: bool = False,
    showing: SubSessionObserver = NO_SUB_SESSION_OBSERVER,
    typed_ahead: bool = False,
) -> HandledMessage | ForwardedMessage:
    """Route a person's message to a session, and handle it if it needs no model.

    The session need not exist: it starts only for a message that belongs to it. With `is_answer`, the message answers
    the agent's question and goes to its model, unless it says halt. With `typed_ahead`, the message was typed before
    the current screen was shown, so it approves nothing.
    """
    now, has_tools = agent.app.clock.now(), bool(list_tool_names(agent))
    route = route_message(text, await build_surroundings(agent.definition, agent.store, now, has_tools=has_tools))
    if is_answer and route.route != "halt":
        route = ANSWER_ROUTE
    if route.route != "strategy":
        answer = await answer_fast_path(agent, route, session, typed_ahead=typed_ahead)
        await _record_route(agent, session, route, text, answer)
        return HandledMessage(route, answer)
    return await _dispatch_route(agent, session, text, route, kind, showing)


async def _dispatch_route(
    agent: AgentRuntime,
    session: str,
    text: str,
    route: RoutingDecision,
    kind: SessionKind,
    observer: SubSessionObserver,
) -> HandledMessage | ForwardedMessage:
    match route.details:
        case Scheduled() as details:
            answer = (await propose_schedule(agent, details)).sentence
        case Unclear(sentence=answer):
            pass
        case Delegated() as details:
            return await _delegate_message(agent, session, text, route, details, kind, observer)
        case Script() as details:
            await _record_route(agent, session, route, text)
            return await _play_script(agent, route, details, observer)
        case _:
            await _record_route(agent, session, route, text, begins_session=True)
            return ForwardedMessage(route)
    await _record_route(agent, session, route, text, answer)
    return HandledMessage(route, answer)


async def _delegate_message(
    agent: AgentRuntime,
    session: str,
    text: str,
    route: RoutingDecision,
    delegation: Delegated,
    kind: SessionKind,
    observer: SubSessionObserver,
) -> HandledMessage | ForwardedMessage:
    """Delegate a message to another agent.

    In a chat, the other agent's final text is the answer. A task gets that text and answers itself.
    """
    try:
        async with open_delegate(agent, delegation.agent) as delegate:
            await send_message(agent, session, text, kind)
            observer.on_start()
            await _record_route(agent, session, route, text)
            outcome = await delegate_task(
                agent, session, delegate, delegation.task, observer.observer, observer.on_wait
            )
    except ConfigError as error:
        return HandledMessage(route, str(error), ok=False)
    if kind == "task" and outcome.has_ended:
        return ForwardedMessage(route, is_posted=True)
    return HandledMessage(route, outcome.text, outcome.ok, outcome.session)


async def send_message(agent: AgentRuntime, session: str, text: str, kind: SessionKind) -> None:
    """Post a message to a session, or start the session with it."""
    if await _has_started(agent, session):
        await post_message(agent, session, text)
    else:
        await begin_session(agent, text, kind, session)


async def _has_started(agent: AgentRuntime, session: str) -> bool:
    rows = await agent.store.ask(Query("session", SessionRow, {"session": session}))
    return bool(rows) and rows[0].started_at > 0


async def _record_route(
    agent: AgentRuntime,
    session: str,
    route: RoutingDecision,
    text: str,
    answer: str = "",
    *,
    begins_session: bool = False,
) -> None:
    """Record the route of a message.

    It is recorded in the inbox of its session, also with `begins_session`, so that it is erased with the session. The
    route of a message without a session is recorded in the fleet's stream.
    """
    redact = agent.guard().redact
    raw = {"text": redact(text), **({"answer": redact(answer)} if answer else {})}
    body, blob = await offload_body(agent.store, msgspec.json.encode(raw))
    event = MessageRouted(route=route.route, strategy=route.strategy or "", why=redact(route.why))
    stream = inbox_stream(session) if begins_session or await _has_started(agent, session) else FLEET
    await agent.store.commit(Write(stream, agent.app.ids.make(), lambda _: [Draft(event, body, blob)]))

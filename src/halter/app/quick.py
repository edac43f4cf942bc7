"""What is answered without a model and without cost, from the store alone."""

from collections.abc import Sequence
from datetime import time, timedelta
from zoneinfo import ZoneInfo

import msgspec

from halter.app import runs
from halter.app.agent_context import AgentContext
from halter.app.attending import autonomous_of
from halter.app.desk.money import shown_budgets
from halter.app.planned import Plan, plans
from halter.autonomy.hotstate import HotState
from halter.brain.fastpaths import (
    HELP,
    Asked,
    Decided,
    Field,
    Named,
    Period,
    Plain,
    Result,
    Scope,
    Spent,
    same_name,
    told_time,
)
from halter.brain.recurrence import Unclear
from halter.brain.route import Delegated, Routed, Scheduled, Script
from halter.core.clock import MINUTE
from halter.core.durations import shown_duration
from halter.core.events import MessageRouted
from halter.core.ids import FLEET, inbox_stream, may_decide, session_stream
from halter.core.limits import Spender, accounts
from halter.core.money import BudgetRow, Leg, shown, shown_usd
from halter.core.ports import Query, Store, Stored
from halter.core.ports import said as said_in
from halter.core.rows import AgentRow, HaltRow, SessionRow, Snapshot, StreamRow
from halter.core.task_rows import TriggerRow
from halter.core.tasks import trigger_id
from halter.core.text import from_body, shorten
from halter.core.wall import first_shown, shown_at, zone_of
from halter.guard import approvals, halts
from halter.state.receipt import receipt

SHOWN = 10
"""So many sessions or decisions are listed, and then how many more there are."""
PAGE = 1000
SEEN = 15 * MINUTE
"""For so long a person remembers what they were shown."""
LOOKED_BACK = 100
ONLY_A_PERSON = "Only a person may do that, and this was said by an agent."


async def answered(speaking: AgentContext, routed: Routed, session: str, *, ahead: bool = False) -> str:
    """Answer a message that is one of the fast paths; `session` is the one in which it was said."""
    match routed.details:
        case Plain():
            return await _plainly(speaking, routed.route, session)
        case Asked(zone=zone):
            return told_time(speaking.app.clock.now(), zone)
        case Result(text):
            return text
        case Spent(period):
            return await spending(speaking, period)
        case Scope(scope):
            return await (_halt if routed.route == "halt" else _resume)(speaking, scope)
        case Decided() as said:
            return await _decide(speaking, said, session, ahead=ahead)
        case Named() as named:
            return await _cancel(speaking, named)
        case Field(name):
            return await hot_state(speaking, name)
        case Scheduled() | Unclear() | Delegated() | Script():
            return HELP


async def _plainly(speaking: AgentContext, route: str, session: str) -> str:
    match route:
        case "status":
            return await status(speaking, session)
        case "needs_me":
            return await needs_me(speaking)
        case "schedules":
            return await schedules(speaking)
        case "last_receipt":
            return await last_receipt(speaking)
        case _:
            return HELP


async def status(speaking: AgentContext, session: str) -> str:
    """Tell whether the agent is on, halted, and what its sessions do."""
    store, name, now = speaking.store, speaking.agent.policy.name, speaking.app.clock.now()
    rows = await store.ask(Query("open_of", SessionRow, {"agent": name, "limit": 1000}))
    switch = next((row for row in await store.ask(Query("all_agents", AgentRow)) if row.agent == name), None)
    scopes = {f"agent:{name}", "fleet", *(f"session:{row.session}" for row in rows)}
    halted = [row for row in await store.ask(Query("all_halts", HaltRow)) if row.halted and row.scope in scopes]
    on = "was never switched on" if switch is None else "is on" if switch.switched_on else "is off"
    lines = [f"{name} {on}. {_counted(len(rows), 'session')} of it {'is' if len(rows) == 1 else 'are'} open."]
    lines += [f"{halt.scope} is halted, by {halt.by}." for halt in halted]
    lines += [f"{_session(row, now, session)}{await _money(store, row)}" for row in rows[:SHOWN]]
    return "\n".join([*lines, *_more(len(rows))])


def _session(row: SessionRow, now: int, here: str) -> str:
    began = f"began {shown_duration(max(0, now - row.started_at))} ago"
    due = f", next turn in {shown_duration(row.due_at - now)}" if row.due_at is not None and row.due_at > now else ""
    by = f", started by {row.trigger}" if row.trigger else f", a part of {row.parent}" if row.parent else ""
    this = ", this one" if row.session == here else ""
    return f"- {row.session} ({row.kind}{by}{this}): {row.state}{due}, {began}"


async def _money(store: Store, row: SessionRow) -> str:
    """Say what of its cap a session has spent."""
    params = {"scope": session_stream(row.session), "window": "", "unit": "usd"}
    found = await store.ask(Query("budget", BudgetRow, params))
    return f", {(await shown_budgets(store, found))[0].told()}" if found else ""


class _Sum(msgspec.Struct, frozen=True):
    agent: str
    purpose: str
    usd: int


async def spending(speaking: AgentContext, period: Period) -> str:
    """Tell what the agent spent, on what, and how much of its caps is left."""
    policy, now, store = speaking.agent.policy, speaking.app.clock.now(), speaking.store
    since = _since(period, now, policy.caps.zone)
    rows = await store.ask(Query("spent_by_purpose", _Sum, {"since": since}))
    sums: dict[str, int] = {}
    for row in rows:
        if row.agent == policy.name and row.usd:
            sums[row.purpose] = sums.get(row.purpose, 0) + row.usd
    parts = ", ".join(f"{shown(usd)} for {purpose}" for purpose, usd in sums.items())
    said = {"today": "today", "week": "this week", "month": "this month"}[period]
    lines = [f"{policy.name} has spent {shown(sum(sums.values()))} {said}{f': {parts}' if parts else ''}."]
    legs = [leg for leg in accounts(policy.caps, Spender("", policy.name), now) if leg.scope != "session:"]
    return "\n".join([*lines, *[await _against(speaking, leg) for leg in legs]])


async def _against(speaking: AgentContext, leg: Leg) -> str:
    params = {"scope": leg.scope, "window": leg.window, "unit": "usd"}
    found = next(iter(await speaking.store.ask(Query("budget", BudgetRow, params))), None)
    row = found or BudgetRow(leg.scope, leg.window, "usd")
    cap = row.binding(leg.cap)
    held = f", and {shown(row.held)} is held" if row.held else ""
    limit = "no cap" if cap is None else f"a cap of {shown(cap)}"
    return f"- {leg.scope} {leg.window}: {shown(row.spent)} against {limit}{held}".replace(" :", ":")


def _since(period: Period, now: int, zone: str) -> int:
    """Tell when a day, a week or a month began, by the clock on the wall; a week begins on Monday."""
    here = zone_of(zone) or ZoneInfo("UTC")
    day = shown_at(now, here).date()
    if period == "week":
        day -= timedelta(days=day.weekday())
    elif period == "month":
        day = day.replace(day=1)
    return first_shown(day, time(), here)


async def _halt(speaking: AgentContext, scope: str) -> str:
    app = speaking.app
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    meant = await _meant(speaking, scope)
    if meant is None:
        return f"There is no session {scope.partition(':')[2]}: nothing was halted. Look at halter sessions."
    await speaking.store.commit(halts.halt(meant, app.settings.person, app.ids.new(), "said in a message"))
    return f"{meant} is halted. Nothing acts there until you say resume, or: halter resume {meant}"


async def _resume(speaking: AgentContext, scope: str) -> str:
    app = speaking.app
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    meant = await _meant(speaking, scope)
    ramp = await halts.usual_ramp(speaking.store, meant or scope)
    write = halts.resume(meant or scope, app.settings.person, app.ids.new(), ramp, "said in a message")
    if not (await speaking.store.commit(write)).events:
        return f"{meant or scope} is not halted."
    return halts.let_go(meant or scope, ramp)


async def _meant(speaking: AgentContext, scope: str) -> str | None:
    """Find the session that a scope names by its beginning; what is no session's scope stays as it is."""
    kind, _, name = scope.partition(":")
    if kind != "session":
        return scope
    rows = await speaking.store.ask(Query("sessions_called", SessionRow, {"beginning": name}))
    found = [row.session for row in rows]
    exact = [session for session in found if session.lower() == name]
    return f"session:{(exact or found)[0]}" if len(exact or found) == 1 else None


async def waiting(speaking: AgentContext) -> Sequence[approvals.Open]:
    """List what a person can still decide."""
    now = speaking.app.clock.now()
    return await approvals.needs_you(speaking.store, now)


async def needs_me(speaking: AgentContext) -> str:
    """List what waits for a person."""
    found = await waiting(speaking)
    if not found:
        return "Nothing needs you."
    now = speaking.app.clock.now()
    lines = [f"{_counted(len(found), 'decision')} for you. Say approve or deny, with the id if there are several."]
    for one in found[:SHOWN]:
        ago = shown_duration(max(0, now - one.asked_at))
        lines.append(f"- {one.decision}: {_about(one)} (of {one.agent}, for {ago})\n{_indented(one.shown)}".rstrip())
    return "\n".join([*lines, *_more(len(found))])


def _about(one: approvals.Open) -> str:
    match one.about:
        case "unknown_call":
            return f"was {one.name} done before the process died?"
        case "cap_raise":
            return f"a higher cap for {one.subject}"
        case "changed_tool":
            return f"{one.name} is new or has changed"
        case "changed_server":
            return f"the server {one.name} offers tools that nobody has agreed to"
        case "proposal":
            return f"a {one.name} to be kept"
        case "schedule":
            return f"a schedule, {one.name}"
        case _:
            return f"may {one.name} be called?"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in shorten(text, 1000).splitlines())


async def _decide(speaking: AgentContext, said: Decided, session: str, *, ahead: bool) -> str:
    app, found = speaking.app, await waiting(speaking)
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    meant = [one for one in found if one.decision.lower() == said.decision.lower()] if said.decision else []
    meant = meant or [one for one in found if said.decision and one.decision.lower().startswith(said.decision.lower())]
    if said.ambiguous or len(meant) > 1:
        own = [one.decision for one in found if one.agent == speaking.agent.policy.name]
        return f"Several decisions wait: say which one, as in: {said.verdict} {(own or [''])[0]}\n" + "\n".join(
            f"- {each}" for each in own
        )
    if not meant:
        return f"No open decision is called {said.decision}." if said.decision else "Nothing of this agent needs you."
    (one,) = meant
    if one.about == "cap_raise" and said.verdict == "approve":
        return f"A higher cap needs an amount: halter approve {one.decision} --cap AMOUNT"
    unseen = ahead or not await _was_shown(speaking, session, one.decision)
    if said.implied and said.verdict == "approve" and unseen:
        # Something else may have been decided, and this have come, since they last looked or began to type.
        shown = f"- {one.decision}: {_about(one)} (of {one.agent})\n{_indented(one.shown)}".rstrip()
        return f"This is what waits:\n{shown}\nSay approve again to agree to it, or deny."
    write = approvals.decide(one, said.verdict, app.settings.person, app.ids.new())
    if not (await speaking.store.commit(write)).events:
        return f"{one.decision} was decided by somebody else, has expired, or cannot be done any more."
    return f"{'Approved' if said.verdict == 'approve' else 'Denied'}: {one.decision} ({_about(one)})"


async def _was_shown(speaking: AgentContext, session: str, decision: str) -> bool:
    """Tell whether a decision was shown here lately, in this talk or before it had begun."""
    store, since = speaking.store, speaking.app.clock.now() - SEEN
    for stream in (inbox_stream(session), FLEET):
        heads = await store.ask(Query("head", StreamRow, {"stream": stream}))
        for stored in await store.read(stream, max(0, heads[0].head - LOOKED_BACK), LOOKED_BACK) if heads else ():
            routed = isinstance(stored.event, MessageRouted) and stored.at >= since
            if routed and decision in from_body(await said_in(store, stored)):
                return True
    return False


async def schedules(speaking: AgentContext) -> str:
    """List what is planned for the agent."""
    name, now = speaking.agent.policy.name, speaking.app.clock.now()
    found = await plans(speaking.store, now, name)
    known = {plan.name for plan in found}
    unborn = [each.name for each in speaking.agent.tasks.triggers() if each.name not in known]
    if not found and not unborn:
        return f"Nothing is planned for {name}."
    lines = [_plan(plan, now) for plan in found]
    return "\n".join([*lines, *(f"- {each}: stands in agent.yaml, and begins with halter up" for each in unborn)])


def _plan(plan: Plan, now: int) -> str:
    due = "" if plan.next_at is None else f", next in {shown_duration(max(0, plan.next_at - now))}"
    last = "" if plan.last_at is None else f", last {shown_duration(max(0, now - plan.last_at))} ago ({plan.session})"
    held = f", {len(plan.quarantined)} left to you" if plan.quarantined else ""
    waits = f", {plan.waiting} waiting" if plan.waiting else ""
    why = f". {plan.delayed}" if plan.delayed else ""
    return f"- {plan.name}: {plan.when}{due}{last}{waits}{held}{why}"


async def _cancel(speaking: AgentContext, named: Named) -> str:
    store, app = speaking.store, speaking.app
    if not may_decide(app.settings.person):
        return ONLY_A_PERSON
    if not named.known:
        which = f"There is no schedule {named.name}." if named.name else "Say which one: cancel schedule NAME."
        return f"{which}\n{await schedules(speaking)}"
    if any(same_name(each.name, named.name) for each in speaking.agent.tasks.triggers()):
        return in_the_file(named.name)
    identity = trigger_id(speaking.agent.policy.name, named.name)
    row = next(iter(await store.ask(Query("trigger", TriggerRow, {"trigger": identity}))), None)
    if row is None or row.ended_at is not None:
        return f"{named.name} is over already."
    await store.commit(runs.end(row, app.settings.person, "said in a message"))
    return f"{named.name} is cancelled: it starts nothing any more."


def in_the_file(name: str) -> str:
    """Say why a trigger cannot be ended by a word."""
    return f"{name} stands in agent.yaml, and would come back: it was not ended. Remove it there."


async def hot_state(speaking: AgentContext, field: str) -> str:
    """Show what the agent knows, as it was kept last, with ages."""
    fields = speaking.agent.pacing.fields
    if not fields:
        return f"{speaking.agent.policy.name} has no hot state: its file names no fields and no sensors."
    beside = await autonomous_of(speaking)
    params = {"session": "" if beside is None else beside.session}
    kept = next(iter(await speaking.store.ask(Query("snapshot", Snapshot, params))), None)
    hot = HotState({name: each for name, each in fields.items() if field in ("", name)})
    hot.restore(b"" if kept is None else kept.data)
    return hot.rendered(speaking.app.clock.now())


async def last_receipt(speaking: AgentContext) -> str:
    """Tell in a few lines what the agent's newest session did that is over."""
    name = speaking.agent.policy.name
    params = {"agent": name, "limit": 1}
    row = next(iter(await speaking.store.ask(Query("ended_of", SessionRow, params))), None)
    if row is None or row.ended_at is None:
        return f"No session of {name} is over yet."
    made = receipt(await _events(speaking, row.session))
    now, took = speaking.app.clock.now(), shown_duration(max(0, row.ended_at - row.started_at))
    refused = f", {_counted(len(made.brakes), 'refusal')}" if made.brakes else ""
    ago = shown_duration(max(0, now - row.ended_at))
    lines = (
        f"{row.session} ({row.kind}) ended {ago} ago: {row.state}, {row.terminal_reason}.",
        f"It took {took} and cost {shown_usd(made.cost_usd)}.",
        f"It made {_counted(len(made.requests), 'request')} and {_counted(len(made.calls), 'call')}{refused}.",
        f"All of it: halter receipt {row.session}",
    )
    return "\n".join(lines)


async def _events(speaking: AgentContext, session: str) -> list[Stored]:
    found: list[Stored] = []
    while page := await speaking.store.read(session_stream(session), len(found), PAGE):
        found += page
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _more(number: int) -> Sequence[str]:
    return [f"… and {number - SHOWN} more."] if number > SHOWN else []

"""Forecasts: what an agent can spend in the next hours and days, and when each of its triggers runs next."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Final

import msgspec

from halter.autonomy.triggers import (
    Balances,
    Clockwork,
    Forecast,
    OpenRuns,
    ScheduledRuns,
    WatchedDocument,
    find_next_schedule_check,
    forecast_bounds,
)
from halter.config.definition import AgentDefinition
from halter.config.mcp_file import MCP_FILE
from halter.core.clock import DAY, HOUR
from halter.core.errors import ConfigError
from halter.core.forecast import MAX_SAMPLES, MIN_SAMPLES, forecast_cost
from halter.core.ids import session_stream
from halter.core.money import (
    BudgetRow,
    Leg,
    Spender,
    format_bound_micros,
    format_exact_micros,
    list_accounts,
    micros_to_usd,
)
from halter.core.ports import Query, Store
from halter.core.rows import SessionRow, TriggerRow
from halter.core.schedules import Timing, count_ticks, explain_timing
from halter.core.usage import ModelName, Unpriced, runs_locally
from halter.guard.ledger import read_budget
from halter.models.price_tables import make_prices
from halter.models.providers import make_model
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.store_policy import lower_caps_to_policy
from halter.runtime.assembly.folder_code import OWN_TOOLS
from halter.runtime.budgets import read_current_budgets
from halter.runtime.runtime import Runtime, read_stored_policy
from halter.runtime.session_start import has_window_cap
from halter.runtime.trigger_runner import FILE_ACTOR, digest_trigger, resolve_timing
from halter.spec.models import REFLEX, SCRIPTED
from halter.spec.tasks import Tasks
from halter.spec.triggers import Schedule, Watch, Webhook, inherit_trigger_caps, trigger_id
from halter.state.trigger_records import find_trigger_row, read_trigger_record

NIGHT_DURATION: Final = 12 * HOUR
MONTH: Final = 30 * DAY
MEAN_COST_PERIOD: Final = 30 * DAY
"""Period over which the costs of tasks are averaged."""
FREE_TOKEN_PROBE: Final = 1_000_000
"""A model that costs nothing for this many tokens is free."""


class SpendingForecast(msgspec.Struct, frozen=True):
    """The most that an agent can spend in a night and in thirty days. `causes` names what makes it run unattended."""

    night: Forecast
    month: Forecast
    causes: tuple[str, ...] = ()
    free: bool = False

    def describe(self) -> Sequence[str]:
        """Describe both amounts and what they assume."""
        if self.free:
            return ["It spends nothing: its models have no price."]
        unattended_text = "Unattended, it spends nothing: it takes no autonomous turns and has no schedules."
        if self.causes:
            unattended_text = (
                f"Unattended, it spends {format_bound(self.night.clock)} in the next 12 hours and "
                f"{format_bound(self.month.clock)} in thirty days: {' and '.join(self.causes)}, bounded by every cap."
            )
        return [unattended_text, f"Messages, webhooks and watched folders {self._describe_assumptions()}"]

    def _describe_assumptions(self) -> str:
        bounds = (self.night.total, self.month.total)
        if None in bounds:
            return "can add any amount, because no cap bounds it."
        if (self.night.clock, self.month.clock) == bounds:
            return "cannot raise that: it is all that its caps leave."
        return f"can raise that to {' and '.join(map(format_bound, bounds))}, what its caps leave."

    def amounts(self) -> Mapping[str, Decimal | None]:
        """Return the four amounts by name; None is unbounded."""
        micros_by_name = {
            "idle_night_usd": self.night.clock,
            "worst_night_usd": self.night.total,
            "idle_month_usd": self.month.clock,
            "worst_month_usd": self.month.total,
        }
        return {name: None if micros is None else micros_to_usd(micros) for name, micros in micros_by_name.items()}


async def forecast_spending(
    store: Store, agent: AgentDefinition, folder: Path, environ: Mapping[str, str], now: int
) -> SpendingForecast:
    """Compute what an agent can spend, from its file and from the triggers that people confirmed."""
    work = await find_clockwork(store, agent, folder, environ, now)
    balances = await read_balances(store, work, now)
    night, month = (forecast_bounds(work, balances, now, now + span) for span in (NIGHT_DURATION, MONTH))
    runs_alone = agent.pacing.autonomy.enabled
    causes = {
        "its own turns": runs_alone,
        "the runs of its schedules": bool(work.schedules),
        "its running sessions": bool(work.session_bounds or work.open_runs) and not runs_alone,
    }
    return SpendingForecast(night, month, tuple(name for name, applies in causes.items() if applies), work.is_free)


async def find_clockwork(
    store: Store, agent: AgentDefinition, folder: Path, environ: Mapping[str, str], now: int
) -> Clockwork:
    runs_alone, open_sessions = agent.pacing.autonomy.enabled, await _list_unattended_sessions(store, agent.policy)
    starts_session = runs_alone and not any(row.kind == "autonomous" for row in open_sessions)
    policy = await apply_policy_caps(store, agent.policy)
    cap = policy.caps.session.max_cost_usd
    return Clockwork(
        agent=policy.name,
        caps=policy.caps,
        session_bounds=(
            *([cap] if starts_session else []),
            *[await _remaining_of_session(store, row, cap) for row in open_sessions if not row.trigger],
        ),
        renews=runs_alone and policy.on_cap != "ask" and await has_window_cap(store, policy, now),
        schedules=await _schedules(store, policy, agent.tasks, now),
        open_runs=await _list_open_runs(store, policy, [row for row in open_sessions if row.trigger]),
        is_free=is_free(agent, folder, environ),
    )


async def apply_policy_caps(store: Store, policy: ResolvedPolicy) -> ResolvedPolicy:
    """Lower the fleet's caps to those of the store's policy, against which every hold is checked."""
    return msgspec.structs.replace(policy, caps=lower_caps_to_policy(policy.caps, await read_stored_policy(store)))


async def read_balances(store: Store, work: Clockwork, now: int) -> Balances:
    """Return the current budgets of an agent and its schedules, by scope and window."""
    spenders = [(work.caps, ""), *((each.caps, each.trigger) for each in (*work.schedules, *work.open_runs))]
    legs = {
        (leg.scope, leg.window): leg
        for caps, trigger in spenders
        for leg in list_accounts(caps, Spender("", work.agent, trigger), now)
        if leg.scope != session_stream("")
    }
    balances: dict[tuple[str, str], BudgetRow] = {}
    for scope, window in legs:
        params = {"scope": scope, "window": window, "unit": "usd"}
        balances |= {(row.scope, row.window): row for row in await store.ask(Query("budget", BudgetRow, params))}
    return balances


async def _list_unattended_sessions(store: Store, policy: ResolvedPolicy) -> Sequence[SessionRow]:
    """List the open sessions that run unattended: triggered ones and the autonomous one."""
    params = {"agent": policy.name, "kind": "autonomous", "limit": 1}
    autonomous_rows = [row for row in await store.ask(Query("sessions_of", SessionRow, params)) if row.ended_at is None]
    return [*autonomous_rows, *await store.ask(Query("open_tasks", SessionRow, {"agent": policy.name}))]


async def _list_open_runs(store: Store, policy: ResolvedPolicy, rows: Sequence[SessionRow]) -> tuple[OpenRuns, ...]:
    """List the open sessions by trigger, with the caps of each trigger as it was when it was made."""
    rows_by_trigger: dict[str, list[SessionRow]] = {}
    for row in rows:
        rows_by_trigger.setdefault(row.trigger, []).append(row)
    open_runs: list[OpenRuns] = []
    for trigger, sessions in rows_by_trigger.items():
        trigger_row = await find_trigger_row(store, trigger)
        record = None if trigger_row is None else await read_trigger_record(store, trigger_row)
        caps = policy.caps if record is None else inherit_trigger_caps(policy.caps, record.trigger())
        bounds = [await _remaining_of_session(store, row, caps.session.max_cost_usd) for row in sessions]
        open_runs.append(OpenRuns(trigger=trigger, caps=caps, bounds=tuple(bounds)))
    return tuple(open_runs)


async def _remaining_of_session(store: Store, row: SessionRow, cap: int | None) -> int | None:
    budget = await read_budget(store, session_stream(row.session))
    binding = budget.binding(cap)
    return None if binding is None else max(0, binding - budget.spent)


async def _schedules(store: Store, policy: ResolvedPolicy, tasks: Tasks, now: int) -> tuple[ScheduledRuns, ...]:
    """List the schedules in the file and those that people confirmed."""
    rows = {row.trigger: row for row in await store.ask(Query("triggers_of", TriggerRow, {"agent": policy.name}))}
    runs: list[ScheduledRuns] = []
    for schedule in tasks.schedules:
        row = rows.get(trigger_id(policy.name, schedule.name))
        same = row if row is not None and row.digest == digest_trigger(schedule) else None
        record = None if same is None else await read_trigger_record(store, same)
        timing = record.timing if record is not None and record.timing is not None else resolve_timing(schedule, now)
        runs.append(build_scheduled_runs(policy, schedule, timing, same, now))
    for row in rows.values():
        record = await read_trigger_record(store, row) if row.made_by != FILE_ACTOR and row.type == "schedule" else None
        trigger = None if record is None else record.trigger()
        if record is not None and record.timing is not None and isinstance(trigger, Schedule):
            runs.append(build_scheduled_runs(policy, trigger, record.timing, row, now))
    return tuple(runs)


def build_scheduled_runs(
    policy: ResolvedPolicy, schedule: Schedule, timing: Timing, row: TriggerRow | None = None, now: int = 0
) -> ScheduledRuns:
    """Return the bounds on the runs of a schedule. Its `row` says which runs are already due."""
    is_queued = row is not None and row.queued_at is not None
    is_missed = row is not None and count_ticks(timing, row.ticked_at, now, 1).count > 0
    return ScheduledRuns(
        trigger=trigger_id(policy.name, schedule.name),
        timing=timing,
        caps=inherit_trigger_caps(policy.caps, schedule),
        min_interval=schedule.min_interval,
        pending=is_queued + is_missed,
    )


def is_free(agent: AgentDefinition, folder: Path, environ: Mapping[str, str]) -> bool:
    """Return true if none of the agent's models has a price. With own code or servers, the cost is unknown: false."""
    if (folder / OWN_TOOLS).exists() or (folder / MCP_FILE).exists():
        return False
    return all(_costs_nothing(name, agent, environ) for name in agent.models())


def _costs_nothing(name: str, agent: AgentDefinition, environ: Mapping[str, str]) -> bool:
    model = ModelName.parse(name)
    provider_spec = agent.model_settings.providers.get(model.provider)
    url = None if provider_spec is None else provider_spec.base_url
    if not runs_locally(model, url):
        return False
    # Slow to import, and needed only for local models.
    if model.provider not in {SCRIPTED, REFLEX}:
        try:
            url = make_model(name, agent.model_settings.providers, environ.get).base_url
        except ConfigError:
            return False
    rates = make_prices(agent.policy).find(model, url)
    return not isinstance(rates, Unpriced) and rates.bound(FREE_TOKEN_PROBE, FREE_TOKEN_PROBE, 0) == 0


class MeanCost(msgspec.Struct, frozen=True):
    """The mean cost of an agent's newest tasks."""

    usd: int
    samples: int


class _Cost(msgspec.Struct, frozen=True):
    usd: int


async def compute_mean_cost(store: Store, agent: str, now: int) -> MeanCost | None:
    """Return the mean cost of an agent's tasks; None if there are too few."""
    params = {"agent": agent, "since": now - MEAN_COST_PERIOD, "limit": MAX_SAMPLES}
    costs = [row.usd for row in await store.ask(Query("task_costs", _Cost, params))]
    return None if len(costs) < MIN_SAMPLES else MeanCost(forecast_cost(costs).mean, len(costs))


def format_bound(micros: int | None) -> str:
    return "any amount" if micros is None else f"at most {format_bound_micros(micros)}"


async def describe_spending_limits(app: Runtime, policy: ResolvedPolicy) -> str:
    """Describe the caps of one session, the agent and the fleet. A person's cap overrides the configured one."""
    rows = await read_current_budgets(app.store, app.clock.now(), ended=0)
    personal_caps = {(row.scope, row.window): row for row in rows if row.unit == "usd" and row.cap_by}
    legs = list_accounts(policy.caps, Spender("", policy.name), app.clock.now())

    def describe(scope: str) -> str:
        caps = (_describe_cap(leg, personal_caps.get((leg.scope, leg.window))) for leg in legs if leg.scope == scope)
        return " and ".join(caps) or "any amount"

    session_text, agent_text, fleet_text = (describe(scope) for scope in ("session:", f"agent:{policy.name}", "fleet"))
    return f"It may spend at most {session_text} a session and {agent_text}, and all agents together {fleet_text}."


def _describe_cap(leg: Leg, row: BudgetRow | None) -> str:
    cap = leg.cap if row is None else row.cap
    per = leg.window.partition("/")[0]
    return f"{'any amount' if cap is None else format_exact_micros(cap)}{f' a {per}' if per else ''}"


class TriggerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger and when it runs next. `waiting` counts unfinished documents; those in `quarantined` need a person."""

    trigger: str
    agent: str
    type: str
    when: str
    prompt: str
    made_by: str
    next_at: int | None = None
    last_at: int | None = None
    session: str = ""
    runs: int = 0
    delayed: str = ""
    waiting: int = 0
    quarantined: tuple[WatchedDocument, ...] = ()

    @property
    def name(self) -> str:
        return self.trigger.partition("/")[2]

    @property
    def is_from_file(self) -> bool:
        """True if the trigger is defined in its agent's file, which would create it again if it were ended here."""
        return self.made_by == FILE_ACTOR


async def plan_triggers(store: Store, now: int, agent: str = "") -> Sequence[TriggerPlan]:
    """List the open triggers of an agent or of all agents."""
    query = Query("triggers_of", TriggerRow, {"agent": agent}) if agent else Query("all_triggers", TriggerRow)
    return [await _plan(store, row, now) for row in await store.ask(query) if row.ended_at is None and row.made_seq]


async def _plan(store: Store, row: TriggerRow, now: int) -> TriggerPlan:
    record = await read_trigger_record(store, row)
    trigger = None if record is None else record.trigger()
    next_at, when = None, "(erased)"
    match trigger:
        case Schedule() if record is not None and record.timing is not None:
            next_at, when = find_next_schedule_check(trigger, record.timing, row, now), explain_timing(record.timing)
        case Watch():
            source = trigger.collection if isinstance(trigger.collection, str) else trigger.path
            when = f"for each new or changed document of {source if isinstance(source, str) else 'its folder'}"
        case Webhook():
            when = "for each delivery"
        case _:
            pass
    items = await store.ask(Query("items_open", WatchedDocument, {"trigger": row.trigger}))
    return TriggerPlan(
        trigger=row.trigger,
        agent=row.agent,
        type=row.type,
        when=when,
        prompt="" if trigger is None else trigger.prompt,
        made_by=row.made_by,
        next_at=next_at,
        last_at=row.ran_at or None,
        session=row.session,
        runs=row.runs,
        delayed=row.delayed,
        waiting=sum(not item.is_done for item in items),
        quarantined=tuple(item for item in items if item.quarantined_at is not None),
    )

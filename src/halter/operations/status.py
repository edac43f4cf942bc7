"""The state of the fleet: which agents run and where, what each waits for, what it spent, what needs a person."""

from collections.abc import Mapping, Sequence

import msgspec

from halter.core.money import ZERO_USD, Usd
from halter.core.rows import OutageRow, SessionRow
from halter.core.text import join_names
from halter.dispatch.workers import WorkerRow
from halter.operations.actor import Actor
from halter.operations.fleet import WorkerView, plans, workers
from halter.operations.money import read_fleet_day
from halter.operations.queries import AgentLine, fleet, report_rows
from halter.runtime.forecast import TriggerPlan
from halter.runtime.needs import AgentHealth, CapLine, Need, find_health, find_runner, list_caps, list_needs


class AgentPlace(msgspec.Struct, frozen=True):
    """A live process that runs an agent, with the time of its last heartbeat."""

    kind: str
    host: str
    pid: int
    since: int
    heard_at: int


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of an agent. It is `alive` if a process runs it; `waits` says what it does or waits for.

    `health` is `unhealthy` if it makes no progress or has stopped; `health_sentence` says why. `next_at` is its next
    wake or the next run of a schedule. `caps` are its caps for windows other than a day.
    """

    agent: str
    on: bool | None
    alive: bool
    places: Sequence[AgentPlace] = ()
    session: str = ""
    state: str = ""
    health: str = ""
    health_sentence: str = ""
    waits: str = ""
    next_at: int | None = None
    spent_today_usd: Usd = ZERO_USD
    cap_today_usd: Usd | None = None
    caps: Sequence[CapLine] = ()
    needs: int = 0


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at a moment. `option` is appended to suggested commands: the `--store` option that the person typed."""

    at: int
    agents: Sequence[AgentStatus] = ()
    spent_today_usd: Usd = ZERO_USD
    cap_today_usd: Usd | None = None
    needs_you: Sequence[Need] = ()
    option: str = ""

    @property
    def unhealthy(self) -> Sequence[AgentStatus]:
        return [agent for agent in self.agents if agent.health == "unhealthy"]


def describe_unhealthy(status: FleetStatus) -> str:
    """Name the unhealthy agents, for the first words of a face; "" if all are well."""
    return f"UNHEALTHY: {join_names([agent.agent for agent in status.unhealthy])}" if status.unhealthy else ""


async def read_status(actor: Actor) -> FleetStatus:
    """Show every agent, unhealthy ones first: where it runs, what it waits for, what it spent, and what needs you."""
    now = actor.app.clock.now()
    rows = await report_rows(actor, now)
    needs, caps = [*list_needs(rows)], [*list_caps(rows.budgets, now)]
    processes = [worker for worker in await workers(actor) if worker.alive]
    trigger_plans = await plans(actor)
    session_rows = {row.session: row for row in rows.sessions}
    outages = {
        outage.agent: _describe_outage(outage, session_rows.get(outage.session), rows.workers, now)
        for outage in rows.outages
    }
    line_by_agent = {line.agent: line for line in await fleet(actor)}
    names = {
        *line_by_agent,
        *(plan.agent for plan in trigger_plans),
        *(name for worker in processes for name in worker.agents),
    }
    spent_today, cap = (ZERO_USD, None) if actor.principal.agents else await read_fleet_day(actor)
    agents = [
        _agent(
            line_by_agent.get(name) or AgentLine(agent=name),
            [worker for worker in processes if name in worker.agents],
            [need for need in needs if need.agent == name],
            [plan for plan in trigger_plans if plan.agent == name],
            [
                cap_line
                for cap_line in caps
                if cap_line.scope == f"agent:{name}" and not cap_line.window.startswith("day/")
            ],
            outages,
            find_health(name, rows.unhealthy),
        )
        for name in sorted(names)
    ]
    return FleetStatus(
        at=now,
        agents=sorted(agents, key=lambda agent: agent.health != "unhealthy"),
        spent_today_usd=spent_today,
        cap_today_usd=cap,
        needs_you=needs,
        option=actor.option,
    )


def _agent(
    line: AgentLine,
    processes: Sequence[WorkerView],
    needs: Sequence[Need],
    trigger_plans: Sequence[TriggerPlan],
    caps: Sequence[CapLine],
    outages: Mapping[str, str],
    health: AgentHealth,
) -> AgentStatus:
    moments = [at for at in (line.due_at, *(plan.next_at for plan in trigger_plans)) if at is not None]
    return AgentStatus(
        agent=line.agent,
        on=line.on,
        alive=bool(processes),
        places=[
            AgentPlace(worker.kind, worker.host, worker.pid, worker.since, worker.heard_at or 0) for worker in processes
        ],
        session=line.session,
        state=line.state,
        health=health.word,
        health_sentence=health.sentence,
        waits=_describe_wait(line, needs, trigger_plans, outages.get(line.agent, ""), alive=bool(processes)),
        next_at=min(moments, default=None) if line.on is not False else None,
        spent_today_usd=line.spent_today_usd,
        cap_today_usd=line.cap_today_usd,
        caps=[cap_line for cap_line in caps if cap_line.cap_usd is not None],
        needs=len(needs),
    )


def _describe_wait(
    line: AgentLine,
    needs: Sequence[Need],
    trigger_plans: Sequence[TriggerPlan],
    outage: str,
    *,
    alive: bool,
) -> str:
    """Describe what an agent does or waits for. Causes that only a person can remove come first."""
    if line.halted:
        return f"{line.halted}."
    if line.on is False:
        return f"Switched off by {line.switched_by}."
    if needs:
        return needs[0].sentence
    if outage:
        return outage
    is_unattended = line.on or trigger_plans
    if is_unattended and not alive:
        return "No process runs it. Start `halter up FOLDER`, `halter serve FOLDER` or a worker."
    return _describe_state(line, trigger_plans)


def _describe_outage(outage: OutageRow, row: SessionRow | None, workers: Sequence[WorkerRow], now: int) -> str:
    """Describe an outage, and whether a process is left that retries."""
    is_retried = row is not None and find_runner(row, workers, now) is not None
    next_step = "retrying automatically" if is_retried else "no process runs the session to retry"
    return f"Model unavailable ({outage.sentence.rstrip('.')}); {next_step}."


def _describe_state(line: AgentLine, trigger_plans: Sequence[TriggerPlan]) -> str:
    match line.state:
        case "":
            return "Waiting for its next run." if trigger_plans else "Idle."
        case "SLEEPING":
            wake_causes = ", ".join(line.wake_on.split())
            return f"{line.session} sleeps{f' until its next wake or {wake_causes}' if wake_causes else ''}."
        case "WAITING_FOR_BUDGET":
            return f"{line.session} waits for a budget: a cap is reached."
        case "WAITING_FOR_INPUT":
            return f"{line.session} waits for a message."
        case "WAITING_FOR_APPROVAL":
            return f"{line.session} waits for an answer."
        case "PAUSED":
            return f"{line.session} is paused."
        case _:
            others = f", and {line.under_way - 1} more" if line.under_way > 1 else ""
            return f"{line.session} is running{others}."

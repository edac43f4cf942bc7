"""The fleet at a glance: which agents run and where, what each waits for, what it spent, and what needs a person."""

from collections.abc import Mapping, Sequence

import msgspec

from halter.core.money import ZERO_USD, Usd
from halter.core.rows import OutageRow
from halter.operations.desk import Actor
from halter.operations.fleet import WorkerView, plans, workers
from halter.operations.money import read_fleet_day
from halter.operations.queries import AgentLine, fleet, report_rows
from halter.runtime.forecast import TriggerPlan
from halter.runtime.needs import CapLine, Need, list_caps, list_needs


class AgentPlace(msgspec.Struct, frozen=True):
    """A live process that runs an agent, and when its heartbeat was heard last."""

    kind: str
    host: str
    pid: int
    since: int
    heard_at: int


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An agent now. It is alive where a process runs it; `waits` says what it does or waits for.

    `next_at` is its next wake, or the next run of a schedule. `caps` are those that are not of a day.
    """

    agent: str
    on: bool | None
    alive: bool
    places: Sequence[AgentPlace] = ()
    session: str = ""
    state: str = ""
    waits: str = ""
    next_at: int | None = None
    spent_today_usd: Usd = ZERO_USD
    cap_today_usd: Usd | None = None
    caps: Sequence[CapLine] = ()
    needs: int = 0


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at a moment. `option` completes the commands that are shown, where the person named a store."""

    at: int
    agents: Sequence[AgentStatus] = ()
    spent_today_usd: Usd = ZERO_USD
    cap_today_usd: Usd | None = None
    needs_you: Sequence[Need] = ()
    option: str = ""


async def status(actor: Actor) -> FleetStatus:
    """Show every agent: whether it runs and where, what it waits for, what it spent, and what needs you."""
    now = actor.app.clock.now()
    found = await report_rows(actor, now)
    needs, caps = [*list_needs(found)], [*list_caps(found.budgets, now)]
    processes = [worker for worker in await workers(actor) if worker.alive]
    planned = await plans(actor)
    outages = {row.agent: row for row in found.outages}
    lines = {line.agent: line for line in await fleet(actor)}
    names = {*lines, *(plan.agent for plan in planned), *(name for worker in processes for name in worker.agents)}
    spent, cap = (ZERO_USD, None) if actor.principal.agents else await read_fleet_day(actor)
    return FleetStatus(
        at=now,
        agents=[
            _agent(
                lines.get(name) or AgentLine(agent=name),
                [worker for worker in processes if name in worker.agents],
                [need for need in needs if need.agent == name],
                [plan for plan in planned if plan.agent == name],
                [one for one in caps if one.scope == f"agent:{name}" and not one.window.startswith("day/")],
                outages,
            )
            for name in sorted(names)
        ],
        spent_today_usd=spent,
        cap_today_usd=cap,
        needs_you=needs,
        option=actor.option,
    )


def _agent(
    line: AgentLine,
    processes: Sequence[WorkerView],
    needs: Sequence[Need],
    planned: Sequence[TriggerPlan],
    caps: Sequence[CapLine],
    outages: Mapping[str, OutageRow],
) -> AgentStatus:
    moments = [at for at in (line.due_at, *(plan.next_at for plan in planned)) if at is not None]
    return AgentStatus(
        agent=line.agent,
        on=line.on,
        alive=bool(processes),
        places=[
            AgentPlace(worker.kind, worker.host, worker.pid, worker.since, worker.heard_at or 0) for worker in processes
        ],
        session=line.session,
        state=line.state,
        waits=_describe_wait(line, needs, planned, outages.get(line.agent), alive=bool(processes)),
        next_at=min(moments, default=None) if line.on is not False else None,
        spent_today_usd=line.spent_today_usd,
        cap_today_usd=line.cap_today_usd,
        caps=[one for one in caps if one.cap_usd is not None],
        needs=len(needs),
    )


def _describe_wait(
    line: AgentLine, needs: Sequence[Need], planned: Sequence[TriggerPlan], outage: OutageRow | None, *, alive: bool
) -> str:
    """Say in a sentence what an agent does, or what it waits for; what only a person can change comes first."""
    if line.halted:
        return f"{line.halted}: nothing of it acts."
    if line.on is False:
        return f"It is switched off by {line.switched_by}."
    if needs:
        return needs[0].sentence
    if outage is not None:
        return f"It waits for its model, and tries again by itself: {outage.sentence}"
    runs_by_itself = line.on or planned
    if runs_by_itself and not alive:
        return "No process runs it: start `halter up FOLDER`, `halter serve FOLDER` or a worker."
    return _describe_state(line, planned)


def _describe_state(line: AgentLine, planned: Sequence[TriggerPlan]) -> str:
    match line.state:
        case "":
            return "It waits for its next run." if planned else "Nothing of it is under way."
        case "SLEEPING":
            early = ", ".join(line.wake_on.split())
            return f"{line.session} sleeps{f', until its time or {early}' if early else ''}."
        case "WAITING_FOR_BUDGET":
            return f"{line.session} waits for more money: a cap is used up."
        case "WAITING_FOR_INPUT":
            return f"{line.session} waits for a message."
        case "WAITING_FOR_APPROVAL":
            return f"{line.session} waits for an answer."
        case "PAUSED":
            return f"{line.session} is paused."
        case _:
            others = f", and {line.under_way - 1} more" if line.under_way > 1 else ""
            return f"{line.session} is at work{others}."

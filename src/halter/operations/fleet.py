"""Triggers, which start sessions, and workers, the processes that run them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from halter.core.clock import HOUR
from halter.core.errors import NotDone
from halter.core.events import ItemReleased
from halter.core.ports import Query
from halter.core.rows import ItemRow, TriggerRow
from halter.dispatch.workers import WorkerInfo, WorkerRow
from halter.operations.actor import Actor, Agent, Done, Name, Reason, TriggerName, fail_conflict, fail_invalid
from halter.runtime.forecast import TriggerPlan, plan_triggers
from halter.runtime.runtime import DEFAULT_LEASE_DURATION
from halter.runtime.trigger_runner import FILE_ACTOR, end_trigger_row, record_trigger_events

SHORT_DIGEST_LENGTH: Final = 16
"""How many characters of a document's digest are shown; they are enough to name it."""

AgentFilter = Annotated[
    Name, Meta(description="Only those of this agent.", extra={"metavar": "AGENT", "argument": True})
]
ItemName = Annotated[Name, Meta(min_length=1, description="Name of a document, or a prefix of its digest.")]


async def plans(actor: Actor, agent: AgentFilter = "") -> Sequence[TriggerPlan]:
    """List schedules, watches and webhooks with their next and last run, and what waits."""
    trigger_plans = await plan_triggers(actor.app.store, actor.app.clock.now(), agent)
    return [plan for plan in trigger_plans if actor.principal.can_see(plan.agent)]


async def end_trigger(actor: Actor, agent: Agent, name: TriggerName, reason: Reason = "") -> Done:
    """End a trigger. It starts no more sessions."""
    actor.require_person("operator", "end a trigger")
    trigger = f"{agent}/{name}"
    row = await _trigger(actor, trigger)
    if row.made_by == FILE_ACTOR:
        fail_conflict(f"{trigger} is defined in agent.yaml; remove it there.")
    commit_result = await actor.app.store.commit(end_trigger_row(row, actor.principal.name, reason))
    if row.ended_at is not None or not commit_result.events:
        fail_conflict(f"{trigger} has already ended.")
    return Done(trigger, f"Ended {trigger}. It starts no more sessions.")


async def retry_item(actor: Actor, agent: Agent, name: TriggerName, item: ItemName) -> Done:
    """Retry a quarantined document."""
    actor.require_person("operator", "retry a document")
    trigger = f"{agent}/{name}"
    row = await _item(actor, trigger, item)
    event = ItemReleased(trigger=trigger, item=row.item, by=actor.principal.name)
    await actor.app.store.commit(record_trigger_events(trigger, f"released/{actor.app.ids.make()}", event))
    return Done(trigger, f"{trigger} retries {row.name}.")


async def _trigger(actor: Actor, trigger: str) -> TriggerRow:
    rows = await actor.app.store.ask(Query("all_triggers", TriggerRow))
    visible = [row for row in rows if row.made_seq and actor.principal.can_see(row.agent)]
    for row in visible:
        if row.trigger == trigger:
            return row
    names = ", ".join(row.trigger for row in visible if row.ended_at is None) or "none"
    raise NotDone(f"There is no trigger {trigger!r}. Triggers: {names}.", "missing")


async def _item(actor: Actor, trigger: str, item: str) -> ItemRow:
    await _trigger(actor, trigger)
    rows = await actor.app.store.ask(Query("items_open", ItemRow, {"trigger": trigger}))
    quarantined_items = [row for row in rows if row.quarantined_at is not None]
    matches = [row for row in quarantined_items if row.name == item or row.item.startswith(item)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(f"{row.name} ({row.item[:SHORT_DIGEST_LENGTH]})" for row in quarantined_items) or "nothing"
    if not matches:
        raise NotDone(f"There is no quarantined document {item!r}. Quarantined by {trigger}: {names}.", "missing")
    return fail_invalid(f"{item!r} is ambiguous. Quarantined by {trigger}: {names}.")


DEAD_WORKER_TTL: Final = HOUR
"""How long a dead worker is listed."""
SHORT_VERSION: Final = 12

Everything = Annotated[bool, Meta(description="Include workers lost more than an hour ago.")]

Health = Literal["alive", "waits", "draining", "lapsed", "left"]
"""Working; waiting, since other workers have newer files of all its agents; draining; lost without notice; ended."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A process that runs agents, or did. `agents` maps each agent to the short version of its files.

    `waiting` lists agents of which another worker has a newer version; `residents` counts sessions that stay in this
    process while they sleep. A worker that ended in order has no `heard_at`.
    """

    worker: str
    kind: str
    host: str
    pid: int
    version: str
    since: int
    health: Health
    alive: bool
    heard_at: int | None
    agents: Mapping[str, str]
    waiting: Sequence[str]
    concurrency: int
    awake: int
    residents: int
    closing: bool
    problem: str


async def workers(actor: Actor, *, everything: Everything = False) -> Sequence[WorkerView]:
    """List the processes that run agents: live ones first, then those lost within the hour, or all."""
    now = actor.app.clock.now()
    rows = await actor.app.store.ask(Query("all_workers", WorkerRow))
    views = [_worker(actor, row, now) for row in rows if _is_visible(actor, row.parse_info())]
    listed_views = [worker for worker in views if everything or worker.alive or _lately(worker, now)]
    return sorted(
        listed_views, key=lambda worker: (not worker.alive, worker.host, worker.kind, worker.since, worker.worker)
    )


def _is_visible(actor: Actor, info: WorkerInfo) -> bool:
    """Return whether the principal can see a worker. A process that only runs a conversation has no kind."""
    return info.kind != "" and (
        not actor.principal.agents or any(actor.principal.can_see(agent) for agent in info.agents)
    )


def _lately(worker: WorkerView, now: int) -> bool:
    return worker.heard_at is not None and worker.heard_at >= now - DEAD_WORKER_TTL


def _worker(actor: Actor, row: WorkerRow, now: int) -> WorkerView:
    info, is_alive = row.parse_info(), row.alive(now)
    return WorkerView(
        worker=row.worker,
        kind=info.kind,
        host=info.host,
        pid=info.pid,
        version=info.version,
        since=info.started_at,
        health=health_of(row, now),
        alive=is_alive,
        heard_at=min(now, row.alive_until - DEFAULT_LEASE_DURATION) if row.alive_until else None,
        agents={
            name: version[:SHORT_VERSION]
            for name, version in sorted(info.agents.items())
            if actor.principal.can_see(name)
        },
        waiting=[name for name in info.waiting if actor.principal.can_see(name)],
        concurrency=info.concurrency,
        awake=info.awake if is_alive else 0,
        residents=info.residents if is_alive else 0,
        closing=info.closing,
        problem=info.problem,
    )


def health_of(row: WorkerRow, now: int) -> Health:
    info = row.parse_info()
    if not row.alive(now):
        return "lapsed" if row.alive_until else "left"
    if info.closing or info.problem:
        return "draining"
    return "waits" if info.agents and info.agents.keys() <= set(info.waiting) else "alive"

"""Triggers and workers: what starts sessions, and the processes that run them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from halter.core.clock import HOUR
from halter.core.errors import NotDone
from halter.core.events import ItemReleased
from halter.core.ports import Query
from halter.core.rows import ItemRow, TriggerRow, WorkerInfo, WorkerRow
from halter.operations.desk import Actor, Agent, Done, Name, Reason, fail_conflict, fail_invalid
from halter.runtime import triggers
from halter.runtime.forecast import TriggerPlan, plan_triggers
from halter.runtime.runtime import DEFAULT_LEASE_DURATION

SHORT: Final = 16
"""How much of a document's digest is shown; it is enough to name it."""

OfAgent = Annotated[Name, Meta(description="Only those of this agent.", extra={"metavar": "AGENT", "argument": True})]
TriggerName = Annotated[Name, Meta(description="A trigger's name within its agent.")]
ItemName = Annotated[Name, Meta(min_length=1, description="A document's name, or the beginning of its digest.")]


async def plans(actor: Actor, agent: OfAgent = "") -> Sequence[TriggerPlan]:
    """List schedules, watches and webhooks: their next and last run, and what waits."""
    found = await plan_triggers(actor.app.store, actor.app.clock.now(), agent)
    return [plan for plan in found if actor.principal.can_see(plan.agent)]


async def end_trigger(actor: Actor, agent: Agent, name: TriggerName, reason: Reason = "") -> Done:
    """End a trigger: it starts nothing more."""
    actor.demand("operator", "end a trigger")
    trigger = f"{agent}/{name}"
    row = await _trigger(actor, trigger)
    if row.made_by == triggers.FILE_ACTOR:
        fail_conflict(f"{trigger} is in agent.yaml, and would come back: remove it there.")
    committed = await actor.app.store.commit(triggers.end_trigger_row(row, actor.principal.name, reason))
    if row.ended_at is not None or not committed.events:
        fail_conflict(f"{trigger} is over already.")
    return Done(trigger, f"{trigger} is cancelled: it starts nothing any more.")


async def retry_item(actor: Actor, agent: Agent, name: TriggerName, item: ItemName) -> Done:
    """Try a quarantined document again."""
    actor.demand("operator", "try a document again")
    trigger = f"{agent}/{name}"
    row = await _item(actor, trigger, item)
    event = ItemReleased(trigger=trigger, item=row.item, by=actor.principal.name)
    await actor.app.store.commit(triggers.record_trigger_events(trigger, f"released/{actor.app.ids.make()}", event))
    return Done(trigger, f"{trigger} tries {row.name} again.")


async def _trigger(actor: Actor, trigger: str) -> TriggerRow:
    rows = await actor.app.store.ask(Query("all_triggers", TriggerRow))
    known = [row for row in rows if row.made_seq and actor.principal.can_see(row.agent)]
    for row in known:
        if row.trigger == trigger:
            return row
    names = ", ".join(row.trigger for row in known if row.ended_at is None) or "none"
    raise NotDone(f"There is no trigger {trigger!r}; there are: {names}.", "missing")


async def _item(actor: Actor, trigger: str, item: str) -> ItemRow:
    await _trigger(actor, trigger)
    rows = await actor.app.store.ask(Query("items_open", ItemRow, {"trigger": trigger}))
    held = [row for row in rows if row.quarantined_at is not None]
    found = [row for row in held if row.name == item or row.item.startswith(item)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{row.name} ({row.item[:SHORT]})" for row in held) or "nothing"
    if not found:
        raise NotDone(f"No quarantined document is called {item!r}. Quarantined by {trigger}: {names}.", "missing")
    return fail_invalid(f"Several quarantined documents are called {item!r}. Quarantined by {trigger}: {names}.")


SHOWN: Final = HOUR
"""How long a dead worker is listed."""
SHORT_VERSION: Final = 12

Everything = Annotated[bool, Meta(description="Include those that died more than an hour ago.")]

Health = Literal["alive", "waits", "draining", "lapsed", "left"]
"""Working; others have newer files of all its agents; about to end; lost without notice; ended."""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A process that runs agents, or did. `agents` has the short version of each agent's files.

    `waiting` are agents of which another worker has a newer version; `residents` are sessions that stay here while they
    sleep. A worker that ended in good order has no `heard_at`.
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
    """List the processes that run agents: live ones first, then those that died within the hour, or all."""
    now = actor.app.clock.now()
    rows = await actor.app.store.ask(Query("all_workers", WorkerRow))
    found = [_worker(actor, row, now) for row in rows if _theirs(actor, row.told())]
    shown = [worker for worker in found if everything or worker.alive or _lately(worker, now)]
    return sorted(shown, key=lambda worker: (not worker.alive, worker.host, worker.kind, worker.since, worker.worker))


def _theirs(actor: Actor, about: WorkerInfo) -> bool:
    """Return whether they may see a worker. A process that only holds a conversation has no kind, and is not listed."""
    return about.kind != "" and (
        not actor.principal.agents or any(actor.principal.can_see(agent) for agent in about.agents)
    )


def _lately(worker: WorkerView, now: int) -> bool:
    return worker.heard_at is not None and worker.heard_at >= now - SHOWN


def _worker(actor: Actor, row: WorkerRow, now: int) -> WorkerView:
    about, alive = row.told(), row.alive(now)
    return WorkerView(
        worker=row.worker,
        kind=about.kind,
        host=about.host,
        pid=about.pid,
        version=about.version,
        since=about.started_at,
        health=health_of(row, now),
        alive=alive,
        heard_at=min(now, row.alive_until - DEFAULT_LEASE_DURATION) if row.alive_until else None,
        agents={
            name: version[:SHORT_VERSION]
            for name, version in sorted(about.agents.items())
            if actor.principal.can_see(name)
        },
        waiting=[name for name in about.waiting if actor.principal.can_see(name)],
        concurrency=about.concurrency,
        awake=about.awake if alive else 0,
        residents=about.residents if alive else 0,
        closing=about.closing,
        problem=about.problem,
    )


def health_of(row: WorkerRow, now: int) -> Health:
    about = row.told()
    if not row.alive(now):
        return "lapsed" if row.alive_until else "left"
    if about.closing or about.problem:
        return "draining"
    return "waits" if about.agents and about.agents.keys() <= set(about.waiting) else "alive"

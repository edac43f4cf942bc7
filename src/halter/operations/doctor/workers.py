"""The checks of `halter doctor` of the processes that run agents, and of what waits for them."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Final

import msgspec

from halter.core.clock import MINUTE, format_duration
from halter.core.ports import Query
from halter.core.rows import AgentRow
from halter.core.text import format_count
from halter.dispatch.workers import WorkerRow
from halter.operations.actor import Actor, Principal
from halter.operations.doctor.check import Check, fail_check, pass_check, warn_check
from halter.operations.fleet import WorkerView, workers
from halter.present.report import describe_last_heartbeat, describe_outdated_agents, name_worker
from halter.runtime.forecast import plan_triggers
from halter.runtime.runtime import Runtime

STORE_CONNECTIONS: Final = 3
"""One writes, one reads, one listens."""
MAX_ORPHANED_TICKETS: Final = 1000
"""More tickets without a worker cause a warning."""
WORKER_KIND: Final = "worker"


class UnclaimedSessions(msgspec.Struct, frozen=True):
    """Due sessions of an agent that no worker has claimed, and since when."""

    agent: str
    sessions: int
    since: int | None


async def check_workers(app: Runtime) -> AsyncGenerator[Check]:
    now = app.clock.now()
    views = await workers(Actor(app, Principal(app.settings.person)))
    unclaimed = await app.store.ask(Query("late", UnclaimedSessions, {"before": now - MINUTE}))
    switches = await app.store.ask(Query("all_agents", AgentRow))
    agents_off = {row.agent for row in switches if not row.switched_on}
    planned_triggers = [plan.trigger for plan in await plan_triggers(app.store, now)]
    agents_on = [row.agent for row in switches if row.switched_on]
    idle = [name for name in (*agents_on, *planned_triggers) if name.partition("/")[0] not in agents_off]
    yield check_presence(views, now, idle)
    for check in (check_versions(views), check_agent_files(views)):
        if check is not None:
            yield check
    yield check_due_sessions([each for each in unclaimed if each.agent not in agents_off], views, now)
    if app.settings.store.lower().startswith(("postgresql:", "postgres:")):
        async for check in _pressure(app, views, now):
            yield check


def check_presence(views: Sequence[WorkerView], now: int, idle: Sequence[str] = ()) -> Check:
    """Count the live workers by host; report those with a problem, and those lost within the hour.

    `idle` lists agents and triggers that need a process to run.
    """
    alive = [worker for worker in views if worker.alive]
    problems = [f"{name_worker(worker)}: {worker.problem}" for worker in alive if worker.problem]
    if problems:
        return fail_check("workers", " ".join(problems))
    hosts = ", ".join(f"{count} on {host}" for host, count in sorted(Counter(worker.host for worker in alive).items()))
    sentence = f"{_processes(len(alive))} here: {hosts}." if alive else "No process runs agents here."
    lost_workers = [
        f"{name_worker(worker)} ({describe_last_heartbeat(worker, now)})" for worker in views if not worker.alive
    ]
    if lost_workers:
        return warn_check(
            "workers",
            f"{sentence} Lost within the hour: {', '.join(lost_workers)}. Their sessions move to workers with the same "
            "agents. Check their machines, and restart them.",
        )
    if idle and not alive:
        names = ", ".join(idle[:MAX_IDLE_NAMES]) + (", …" if len(idle) > MAX_IDLE_NAMES else "")
        return warn_check(
            "workers",
            f"{sentence} Waiting for one: {names}. Start `halter up FOLDER`, `halter serve FOLDER` or a worker; "
            "no session starts until then.",
        )
    return pass_check("workers", sentence)


MAX_IDLE_NAMES: Final = 5


def _processes(count: int) -> str:
    return "1 process runs agents" if count == 1 else f"{count:,} processes run agents"


def check_versions(views: Sequence[WorkerView]) -> Check | None:
    hosts_by_version: dict[str, set[str]] = {}
    for worker in views:
        if worker.alive:
            hosts_by_version.setdefault(worker.version, set()).add(worker.host)
    if len(hosts_by_version) < 2:  # noqa: PLR2004  two versions differ
        return None
    versions = "; ".join(
        f"{version or 'unknown'} on {', '.join(sorted(hosts_by_version[version]))}"
        for version in sorted(hosts_by_version)
    )
    return warn_check(
        "versions",
        f"Workers run several versions of Halter ({versions}). This is expected during a rolling upgrade. Afterwards, "
        "install the newer version where it is missing, and restart that worker.",
    )


def check_agent_files(views: Sequence[WorkerView]) -> Check | None:
    sentences = [
        f"{name_worker(worker)}: {describe_outdated_agents(worker)}"
        for worker in views
        if worker.alive and describe_outdated_agents(worker)
    ]
    return warn_check("files", " ".join(sentences)) if sentences else None


def check_due_sessions(unclaimed: Sequence[UnclaimedSessions], views: Sequence[WorkerView], now: int) -> Check:
    """Check for sessions that have been due for more than a minute without a worker, and report why."""
    alive = [worker for worker in views if worker.alive]
    checks = [check for each in unclaimed if (check := _check_unclaimed(each, alive, now)) is not None]
    if not checks:
        return pass_check("due", "No due session waits for a worker.")
    sentence = " ".join(check.finding for check in checks)
    return (
        fail_check("due", sentence)
        if any(check.verdict == "problem" for check in checks)
        else warn_check("due", sentence)
    )


def _check_unclaimed(unclaimed: UnclaimedSessions, alive: Collection[WorkerView], now: int) -> Check | None:
    wait_text = "" if unclaimed.since is None else f" for {format_duration(now - unclaimed.since)}"
    verb = "has" if unclaimed.sessions == 1 else "have"
    summary = (
        f"{unclaimed.agent} has {format_count(unclaimed.sessions, 'session')} that {verb} been due{wait_text}, and"
    )
    workers_with_folder = [worker for worker in alive if unclaimed.agent in worker.agents]
    available_workers = [
        worker for worker in workers_with_folder if worker.health == "alive" and unclaimed.agent not in worker.waiting
    ]
    if not workers_with_folder:
        sentence = (
            f"{summary} no live process has its folder. Pass it to `halter up` or `halter worker`, or run "
            f"halter off {unclaimed.agent}."
        )
        # Before the first process starts, this is expected.
        return fail_check("due", sentence) if alive else warn_check("due", sentence)
    if not available_workers:
        sentence = (
            f"{summary} the workers with its folder wait for newer files or are draining "
            f"({', '.join(map(name_worker, workers_with_folder))}). Update its folder there, and restart them."
        )
        return fail_check("due", sentence)
    if all(worker.awake >= worker.concurrency for worker in available_workers):
        sentence = f"{summary} all workers with its folder are busy. Start another worker, or raise --concurrency."
        return warn_check("due", sentence)
    return None


async def _pressure(app: Runtime, views: Sequence[WorkerView], now: int) -> AsyncGenerator[Check]:
    from halter.dispatch.ticket_queue import CONNECTIONS, name_queue
    from halter.journal.connection import measure_pressure

    rows = await app.store.ask(Query("all_workers", WorkerRow))
    served_queues = {name_queue(*each) for row in rows if row.alive(now) for each in row.parse_info().agents.items()}
    pressure = await asyncio.to_thread(measure_pressure, app.settings.store)
    kinds = [worker.kind for worker in views if worker.alive]
    # A worker uses one more connection than it pools, to listen for new tickets.
    yield check_connections(pressure.max_connections, pressure.used, kinds, STORE_CONNECTIONS + CONNECTIONS + 1)
    waiting_batches = [each for each in pressure.queued if each.queue in served_queues]
    orphaned_count = sum(each.jobs for each in pressure.queued if each.queue not in served_queues)
    yield check_queue(
        sum(each.jobs for each in waiting_batches),
        max((each.age for each in waiting_batches), default=0),
        orphaned_count,
    )


def check_connections(limit: int, used: int, kinds: Sequence[str], per_worker: int) -> Check:
    needed_count = sum(per_worker if kind == WORKER_KIND else STORE_CONNECTIONS for kind in kinds)
    sentence = (
        f"PostgreSQL has {limit:,} connections for programs, of which {used:,} are in use; the processes that run "
        f"agents need up to {needed_count:,}, and each worker up to {per_worker}"
    )
    if needed_count > limit or limit - used < per_worker:
        return warn_check("connections", f"{sentence}. Raise max_connections before you start another worker.")
    return pass_check("connections", f"{sentence}.")


def check_queue(waiting: int, age: int, orphaned: int) -> Check:
    """Check for old tickets in the queue, and for tickets without a worker."""
    if age > MINUTE:
        return warn_check(
            "queue",
            f"{format_count(waiting, 'ticket')} wait in the queue, the oldest for {format_duration(age)}: the workers "
            "are busy, or cannot reach PostgreSQL. Check their logs; start another worker, or raise --concurrency.",
        )
    if orphaned > MAX_ORPHANED_TICKETS:
        return warn_check(
            "queue",
            f"{format_count(orphaned, 'ticket')} belong to versions that no worker runs. They are harmless: their "
            "sessions were offered again. You can remove them from procrastinate_jobs.",
        )
    return pass_check("queue", f"{format_count(waiting, 'ticket')} in the queue, none of them old.")

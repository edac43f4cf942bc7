"""Whether those who run agents are there, have the same files, and leave nothing lying that is due."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Final

import msgspec

from halter.app.desk import Desk, Who
from halter.app.desk.workers import Worker, workers
from halter.app.health.check import Check, fine, look, problem
from halter.app.opened import App
from halter.app.words.workers import heard, named, older
from halter.core.clock import MINUTE
from halter.core.durations import shown_duration
from halter.core.ports import Query
from halter.core.rows import AgentRow
from halter.core.text import counted
from halter.core.workers import WorkerRow

STORE_CONNECTIONS: Final = 3
"""One writes, one reads, one listens."""
LEFT_OVER: Final = 1000
"""So many tickets that nobody takes any more are worth a look."""
DISTRIBUTED: Final = "worker"


class Late(msgspec.Struct, frozen=True):
    """Sessions of an agent that nobody has although they are due, or that a dead worker left; and since when."""

    agent: str
    sessions: int
    since: int | None


async def worker_checks(app: App) -> AsyncGenerator[Check]:
    """Look at those who run agents on a store, and at what they leave lying."""
    now = app.clock.now()
    found = await workers(Desk(app, Who(app.settings.person)))
    late = await app.store.ask(Query("late", Late, {"before": now - MINUTE}))
    switches = await app.store.ask(Query("all_agents", AgentRow))
    off = {row.agent for row in switches if not row.switched_on}
    yield present(found, now)
    for check in (versions(found), files(found)):
        if check is not None:
            yield check
    yield due([each for each in late if each.agent not in off], found, now)
    if app.settings.store.lower().startswith(("postgresql:", "postgres:")):
        async for check in _pressure(app, found, now):
            yield check


def present(found: Sequence[Worker], now: int) -> Check:
    """Tell how many run agents and where, and who of them is not well or was lost within the hour."""
    alive = [one for one in found if one.alive]
    ill = [f"{named(one)}: {one.problem}" for one in alive if one.problem]
    if ill:
        return problem("workers", " ".join(ill))
    hosts = ", ".join(f"{count} on {host}" for host, count in sorted(Counter(one.host for one in alive).items()))
    told = f"{_processes(len(alive))} here: {hosts}." if alive else "No process runs agents here now."
    gone = [f"{named(one)} ({heard(one, now)})" for one in found if not one.alive]
    if gone:
        return look(
            "workers",
            f"{told} Gone without a word within the hour: {', '.join(gone)}. What they had goes on wherever a worker "
            "has their agents. Look at their machines, and start them again where nobody else did.",
        )
    return fine("workers", told)


def _processes(count: int) -> str:
    return "1 process runs agents" if count == 1 else f"{count:,} processes run agents"


def versions(found: Sequence[Worker]) -> Check | None:
    """Tell if workers of several versions of this program work side by side."""
    known: dict[str, set[str]] = {}
    for one in found:
        if one.alive:
            known.setdefault(one.version, set()).add(one.host)
    if len(known) < 2:  # noqa: PLR2004  two are side by side
        return None
    told = "; ".join(f"{version or 'unknown'} on {', '.join(sorted(known[version]))}" for version in sorted(known))
    return look(
        "versions",
        f"Workers run several versions of Halter ({told}). That is fine while you bring one machine after the other to "
        "the newer one. If you are done, one was forgotten: install the newer one there, and start it again.",
    )


def files(found: Sequence[Worker]) -> Check | None:
    """Tell which workers wait because others have newer files of their agents."""
    waiting = [f"{named(one)}: {older(one)}" for one in found if one.alive and older(one)]
    return look("files", " ".join(waiting)) if waiting else None


def due(late: Sequence[Late], found: Sequence[Worker], now: int) -> Check:
    """Tell what has been due for more than a minute and is taken by nobody, and why that is."""
    alive = [one for one in found if one.alive]
    checks = [check for each in late if (check := _left_lying(each, alive, now)) is not None]
    if not checks:
        return fine("due", "Nothing that is due is left lying.")
    told = " ".join(check.finding for check in checks)
    return problem("due", told) if any(check.verdict == "problem" for check in checks) else look("due", told)


def _left_lying(late: Late, alive: Collection[Worker], now: int) -> Check | None:
    since = "" if late.since is None else f" for {shown_duration(now - late.since)}"
    what = f"{late.agent} has {counted(late.sessions, 'session')} that {_has(late.sessions)} been due{since}, and"
    having = [one for one in alive if late.agent in one.agents]
    taking = [one for one in having if one.health == "alive" and late.agent not in one.waiting]
    if not having:
        told = (
            f"{what} no process that is alive has its folder: give it to `halter up` or `halter worker`, or if nobody "
            f"needs it any more, run halter off {late.agent}."
        )
        # Before a start nothing runs, and that is nothing wrong.
        return problem("due", told) if alive else look("due", told)
    if not taking:
        told = (
            f"{what} those who have its folder wait for newer files, or are about to end "
            f"({', '.join(map(named, having))}): bring its folder to the newest version there, and start them again."
        )
        return problem("due", told)
    if all(one.awake >= one.concurrency for one in taking):
        told = f"{what} all who have its folder have their hands full: start another worker, or raise --concurrency."
        return look("due", told)
    return None


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


async def _pressure(app: App, found: Sequence[Worker], now: int) -> AsyncGenerator[Check]:
    """Look at what workers ask of PostgreSQL."""
    from halter.dispatch.procrastinate import CONNECTIONS, queue_of
    from halter.journal.pressure import pressure

    rows = await app.store.ask(Query("all_workers", WorkerRow))
    served = {queue_of(*each) for row in rows if row.alive(now) for each in row.told().agents.items()}
    pressed = await asyncio.to_thread(pressure, app.settings.store)
    kinds = [one.kind for one in found if one.alive]
    # One more connection than it pools hears of new tickets.
    yield connections(pressed.most, pressed.used, kinds, STORE_CONNECTIONS + CONNECTIONS + 1)
    waiting = [each for each in pressed.queued if each.queue in served]
    nobodys = sum(each.jobs for each in pressed.queued if each.queue not in served)
    yield queue(sum(each.jobs for each in waiting), max((each.age for each in waiting), default=0), nobodys)


def connections(most: int, used: int, kinds: Sequence[str], each: int) -> Check:
    """Tell whether PostgreSQL has connections for all who run agents, and for one more."""
    needed = sum(each if kind == DISTRIBUTED else STORE_CONNECTIONS for kind in kinds)
    told = (
        f"PostgreSQL has {most:,} connections for programs, of which {used:,} are in use; those who run agents here "
        f"need up to {needed:,}, and each worker up to {each}"
    )
    if needed > most or most - used < each:
        return look("connections", f"{told}: raise max_connections before you start another.")
    return fine("connections", f"{told}.")


def queue(waiting: int, age: int, nobodys: int) -> Check:
    """Tell whether tickets pile up: with those who should take them, or where nobody takes them any more."""
    if age > MINUTE:
        return look(
            "queue",
            f"{counted(waiting, 'ticket')} wait in the queue, the oldest for {shown_duration(age)}: the workers have "
            "their hands full, or do not reach PostgreSQL. Look at their logs; start another, or raise --concurrency.",
        )
    if nobodys > LEFT_OVER:
        return look(
            "queue",
            f"{counted(nobodys, 'ticket')} are left over from versions that nobody runs any more. They do no harm, for "
            "their sessions were offered anew; remove them from procrastinate_jobs when it suits you.",
        )
    return fine("queue", f"{counted(waiting, 'ticket')} in the queue, none of them old.")

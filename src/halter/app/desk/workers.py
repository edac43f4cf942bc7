"""The processes that run agents, as each of them last said it of itself."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from halter.app.desk.desk import Desk
from halter.app.opened import LEASE
from halter.core.clock import HOUR
from halter.core.ports import Query
from halter.core.workers import About, WorkerRow

SHOWN: Final = HOUR
"""For so long one that is gone is shown: what died at night is still seen, and what died last week is not."""
SHORT: Final = 12
"""So much of a version is shown."""

Everything = Annotated[bool, Meta(description="Also those that died longer than an hour ago.")]

Health = Literal["alive", "waits", "draining", "lapsed", "left"]
"""It works; others have newer files of all its agents; it is about to end; it is gone without a word; it ended."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that runs agents, or did. `agents` has the short version of each agent's files.

    `waiting` are agents of which another worker has a newer version; `residents` are sessions that stay here while they
    sleep. One that ended in good order does not say when it was last heard.
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


async def workers(desk: Desk, *, everything: Everything = False) -> Sequence[Worker]:
    """List the processes that run agents: those that are alive first, then those that died within the hour, or all."""
    now = desk.app.clock.now()
    rows = await desk.app.store.ask(Query("all_workers", WorkerRow))
    found = [_worker(desk, row, now) for row in rows if _theirs(desk, row.told())]
    shown = [one for one in found if everything or one.alive or _lately(one, now)]
    return sorted(shown, key=lambda one: (not one.alive, one.host, one.kind, one.since, one.worker))


def _theirs(desk: Desk, about: About) -> bool:
    """Tell whether somebody may know of a worker. A process that only has a conversation says nothing of itself."""
    return about.kind != "" and (not desk.who.agents or any(desk.who.sees(agent) for agent in about.agents))


def _lately(one: Worker, now: int) -> bool:
    return one.heard_at is not None and one.heard_at >= now - SHOWN


def _worker(desk: Desk, row: WorkerRow, now: int) -> Worker:
    about, alive = row.told(), row.alive(now)
    return Worker(
        worker=row.worker,
        kind=about.kind,
        host=about.host,
        pid=about.pid,
        version=about.version,
        since=about.started_at,
        health=health_of(row, now),
        alive=alive,
        heard_at=min(now, row.alive_until - LEASE) if row.alive_until else None,
        agents={name: version[:SHORT] for name, version in sorted(about.agents.items()) if desk.who.sees(name)},
        waiting=[name for name in about.waiting if desk.who.sees(name)],
        concurrency=about.concurrency,
        awake=about.awake if alive else 0,
        residents=about.residents if alive else 0,
        closing=about.closing,
        problem=about.problem,
    )


def health_of(row: WorkerRow, now: int) -> Health:
    """Tell how a worker is, in a word."""
    about = row.told()
    if not row.alive(now):
        return "lapsed" if row.alive_until else "left"
    if about.closing or about.problem:
        return "draining"
    return "waits" if about.agents and about.agents.keys() <= set(about.waiting) else "alive"

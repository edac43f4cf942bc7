"""Which version of an agent is in force where workers have several: the newest that some worker brought.

While a fleet is brought from one version to the next, both are there for a while. A session goes on under one of them,
not under whichever comes first: those who have the older one wait. If all who have the newer one are gone, it moves
back.
"""

from collections.abc import Iterable

from halter.core.workers import WorkerRow


def in_force(workers: Iterable[WorkerRow], agent: str, now: int) -> str:
    """Name the version of an agent that was brought last, by workers that are alive; nothing where nobody has it.

    A version is as old as the oldest worker that has it: one that is only started again brings nothing new.
    """
    brought: dict[str, int] = {}
    for row in workers:
        about = row.told()
        version = about.agents.get(agent)
        if version is not None and row.alive(now) and not about.closing:
            brought[version] = min(about.started_at, brought.get(version, about.started_at))
    return max(brought, key=lambda version: (brought[version], version), default="")

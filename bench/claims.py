"""One of several processes that take what is due among very many sleepers, as fast as they can."""

import asyncio
import json
import os
import sys
import time
from typing import Any

from bench.fleet import CLOCK, opened
from halter.core.ids import WorkerId
from halter.dispatch.ticket_queue import ProcrastinateQueue, prepare_queue_tables

BATCH = 100
"""How many are taken at once: as many as a worker has room for."""
PAUSE = 0.002


async def taken(verb: str, url: str, agent: str) -> dict[str, Any]:
    """Take what is due until nothing is left, in a process of its own: claim it, or offer it and claim by tickets."""
    store, worker, agents = opened(url), WorkerId(f"claimer-{os.getpid()}"), {agent: None}
    prepare_queue_tables(url)
    queue = ProcrastinateQueue(url, CLOCK, {agent: "1"})
    await store.claim(worker, 0, agents=agents)
    print("ready", flush=True)
    sys.stdin.readline()
    taken, more, offering, began = 0, True, 0.0, time.time()
    while more:
        if verb == "claim":
            found = len(await store.claim(worker, BATCH, agents=agents))
            taken, more = taken + found, found > 0
        else:
            before = time.perf_counter()
            offered = await store.offer(BATCH, agents, queue.enqueue)
            offering += time.perf_counter() - before if offered.tickets else 0
            leases = await asyncio.gather(*(store.claim(worker, 1, ticket) for ticket in offered.tickets))
            taken, more = taken + sum(map(len, leases)), bool(offered.tickets or offered.more)
            await asyncio.sleep(0 if offered.tickets else PAUSE)
    ended = time.time()
    await store.close()
    return {"taken": taken, "began": began, "ended": ended, "offering": offering}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(taken(*sys.argv[1:4]))), flush=True)

"""One of several processes that claim due sessions among many sleeping ones, as fast as possible."""

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
"""Number of sessions per claim: the capacity of a worker."""
PAUSE = 0.002


async def taken(mode: str, url: str, agent: str) -> dict[str, Any]:
    """Claim due sessions until none remain, directly or by offering them and claiming their tickets."""
    store, worker, agents = opened(url), WorkerId(f"claimer-{os.getpid()}"), {agent: None}
    prepare_queue_tables(url)
    queue = ProcrastinateQueue(url, CLOCK, {agent: "1"})
    await store.claim(worker, 0, agents=agents)
    print("ready", flush=True)
    sys.stdin.readline()
    taken_count, has_more, offering, started_at = 0, True, 0.0, time.time()
    while has_more:
        if mode == "claim":
            claimed_count = len(await store.claim(worker, BATCH, agents=agents))
            taken_count, has_more = taken_count + claimed_count, claimed_count > 0
        else:
            before = time.perf_counter()
            offer = await store.offer(BATCH, agents, queue.enqueue)
            offering += time.perf_counter() - before if offer.tickets else 0
            leases = await asyncio.gather(*(store.claim(worker, 1, ticket) for ticket in offer.tickets))
            taken_count, has_more = taken_count + sum(map(len, leases)), bool(offer.tickets or offer.has_more)
            await asyncio.sleep(0 if offer.tickets else PAUSE)
    ended_at = time.time()
    await store.close()
    return {"taken": taken_count, "began": started_at, "ended": ended_at, "offering": offering}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(taken(*sys.argv[1:4]))), flush=True)

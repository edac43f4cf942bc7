"""The workloads of all frameworks, and their measurement. Needs only the standard library.

A framework takes part with a function that opens an agent around a `Script`, which has the answers of the fake model:
one call of `add` per step, and `DONE` after the last one. It runs in its own process, `python -m bench.peers.NAME
WORKLOAD`, and prints one line of JSON.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

DONE = "done"
STEPS = 10
LONG = 212
EARLY = range(2, 7)
LATE = range(190, 211)
CROWD = 1000
CROWD_STEPS = 5
LATENCY = 0.05


class Script:
    """Answers of the fake model: a call per step, immediately, after a latency, or once its gate is open.

    It counts requests and tool calls, and signals when a whole crowd has sent its requests.
    """

    def __init__(self, steps: int = STEPS, latency: float = 0.0, gate: asyncio.Event | None = None) -> None:
        self.steps = steps
        self.asked = 0
        self.added = 0
        self.times: list[float] = []
        self.crowd = 0
        self.all_asked = asyncio.Event()
        self._latency = latency
        self._gate = gate

    async def answer(self, done: int) -> dict[str, int] | None:
        """Return the arguments of the next call, or None after the last step."""
        self.asked += 1
        if self.asked == self.crowd:
            self.all_asked.set()
        self.times.append(time.process_time())
        if self._latency:
            await asyncio.sleep(self._latency)
        if self._gate is not None:
            await self._gate.wait()
        return {"a": done, "b": 1} if done < self.steps else None

    def tool(self) -> Callable[[int, int], Awaitable[int]]:
        """Make the tool."""

        async def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.added += 1
            return a + b

        return add


def folder_of_its_own() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder. Its removal ignores files that a framework still writes."""
    return tempfile.TemporaryDirectory(prefix="halter-bench-", dir=Path.cwd(), ignore_cleanup_errors=True)


Run = Callable[[str], Coroutine[Any, Any, str]]
"""Runs the agent once, under a unique name, and returns its final text."""
Open = Callable[[Script, Path | None], AbstractAsyncContextManager[Run]]
"""Opens an agent that works in memory or, with a folder, stores what it can there."""


async def many(run: Run, script: Script, runs: int, name: str) -> list[tuple[float, float]]:
    """Run the agent repeatedly; return wall and CPU time of each run, and check that all work was done."""
    times: list[tuple[float, float]] = []
    script.added = 0
    for number in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        text = await run(f"{name}-{number}")
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
        if text != DONE:
            raise RuntimeError(f"The run ended with {text!r}.")
    if script.added != runs * script.steps:
        raise RuntimeError(f"{script.added} calls were made, not {runs * script.steps}.")
    return times


async def cpu(open_agent: Open, *, quick: bool) -> dict[str, float]:
    """Measure short runs in memory: the cost of a step."""
    script = Script()
    async with open_agent(script, None) as run:
        await many(run, script, 5, "warm")
        gc.collect()
        times_of_runs = await many(run, script, 10 if quick else 150, "run")
    wall, cpu = (statistics.median(times) / STEPS * 1000 for times in zip(*times_of_runs, strict=True))
    return {"ms_per_step": cpu, "wall_ms_per_step": wall}


async def growth(open_agent: Open, *, quick: bool) -> dict[str, float]:
    """Measure long runs in memory: the cost of late steps against early ones."""
    script = Script(LONG)
    early: list[float] = []
    late: list[float] = []
    async with open_agent(script, None) as run:
        await many(run, script, 1, "warm")
        for number in range(1 if quick else 4):
            script.times.clear()
            gc.collect()
            await many(run, script, 1, f"run-{number}")
            took = [after - before for before, after in zip(script.times, script.times[1:], strict=False)]
            early.append(statistics.mean(took[step - 1] for step in EARLY))
            late.append(statistics.mean(took[step - 1] for step in LATE))
    first, last = statistics.median(early) * 1000, statistics.median(late) * 1000
    return {"ratio": last / first, "ms_early": first, "ms_late": last}


async def durable(open_agent: Open, *, quick: bool) -> dict[str, float]:
    """Measure short runs, one at a time, with the framework's storage on disk."""
    script = Script()
    with folder_of_its_own() as folder:
        async with open_agent(script, Path(folder)) as run:
            await many(run, script, 2, "warm")
            times_of_runs = await many(run, script, 3 if quick else 30, "run")
    return {
        "runs_per_second": len(times_of_runs) / sum(wall for wall, _ in times_of_runs),
        "wall_ms_per_run": statistics.median(wall for wall, _ in times_of_runs) * 1000,
        "cpu_ms_per_run": statistics.median(cpu for _, cpu in times_of_runs) * 1000,
    }


async def crowd(open_agent: Open, *, quick: bool) -> dict[str, float]:
    """Measure a thousand concurrent runs with a slow model."""
    cpu, wall = await at_once(open_agent, Script(CROWD_STEPS, LATENCY), None, 50 if quick else CROWD)
    return {"cpu_seconds": cpu, "wall_seconds": wall}


async def durable_crowd(open_agent: Open, *, quick: bool) -> dict[str, float]:
    """Measure a thousand concurrent runs with storage on disk and a model without latency."""
    runs = 50 if quick else CROWD
    with folder_of_its_own() as folder:
        cpu, wall = await at_once(open_agent, Script(CROWD_STEPS), Path(folder), runs)
    steps = runs * CROWD_STEPS
    return {"steps_per_cpu_second": steps / cpu, "steps_per_second": steps / wall}


async def at_once(open_agent: Open, script: Script, folder: Path | None, runs: int) -> tuple[float, float]:
    """Make `runs` concurrent runs; return CPU and wall time, and check that all work was done."""
    async with open_agent(script, folder) as run:
        await many(run, script, 1, "warm")
        gc.collect()
        script.added = 0
        wall, cpu = time.perf_counter(), time.process_time()
        texts = await asyncio.gather(*(run(f"run-{number}") for number in range(runs)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if set(texts) != {DONE} or script.added != runs * script.steps:
        raise RuntimeError(f"{script.added} calls were made, not {runs * script.steps}.")
    return cpu, wall


async def memory(open_agent: Open, *, quick: bool) -> dict[str, float]:
    """Measure the memory of a thousand runs that wait for their model."""
    runs = 50 if quick else CROWD
    gate = asyncio.Event()
    script = Script(1, gate=gate)
    async with open_agent(script, None) as run:
        gate.set()
        await many(run, script, 5, "warm")
        gate.clear()
        gc.collect()
        script.asked, script.crowd = 0, runs
        before = resident()
        waiting = [asyncio.create_task(run(f"run-{number}")) for number in range(runs)]
        await script.all_asked.wait()
        gc.collect()
        growth_bytes = resident() - before
        gate.set()
        await asyncio.gather(*waiting)
    return {"kB_per_run": growth_bytes / runs / 1000}


def resident() -> int:
    """Read the resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("This system does not report the memory of a process.")


WORKLOADS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, float]]]] = {
    "cpu": cpu,
    "growth": growth,
    "durable": durable,
    "crowd": crowd,
    "durable_crowd": durable_crowd,
    "memory": memory,
}


def main(open_agent: Open, kept: str) -> None:
    """Run the workload that the command line names. `kept` describes the framework's storage on disk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    values = asyncio.run(WORKLOADS[options.workload](open_agent, quick=options.quick))
    output: dict[str, Any] = {"workload": options.workload, "values": values}
    print(json.dumps(output | ({"note": kept} if options.workload == "durable" else {})))

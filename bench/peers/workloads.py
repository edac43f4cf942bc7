"""The work that every framework is given, and how it is measured. Needs nothing but the standard library.

A framework takes part by opening itself around a `Script`, which says what its fake model answers: one call of `add`
for each step, and `DONE` after the last one. It runs in a process of its own, `python -m bench.peers.NAME WORKLOAD`,
and prints one line of JSON.
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
    """What the fake model answers: a call for each step, at once or after a while, or not before its gate is open.

    It counts what it was asked and how often its tool was called, and tells when a whole crowd has asked.
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
        """Give the arguments of the next call, or nothing when that many steps are all. Costs next to nothing."""
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
        """Make the one tool there is."""

        async def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.added += 1
            return a + b

        return add


def folder_of_its_own() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed afterwards, as far as what a framework still writes there lets it."""
    return tempfile.TemporaryDirectory(prefix="halter-bench-", dir=Path.cwd(), ignore_cleanup_errors=True)


Run = Callable[[str], Coroutine[Any, Any, str]]
"""Runs the agent once, under a name that no other run has, and returns its last words."""
Open = Callable[[Script, Path | None], AbstractAsyncContextManager[Run]]
"""Opens an agent that keeps everything in memory or, given a folder, whatever it can keep there."""


async def many(run: Run, script: Script, runs: int, name: str) -> list[tuple[float, float]]:
    """Run one after the other; return the wall and the CPU time of each, and make sure that all the work was done."""
    taken: list[tuple[float, float]] = []
    script.added = 0
    for number in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        said = await run(f"{name}-{number}")
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
        if said != DONE:
            raise RuntimeError(f"The run ended with {said!r}.")
    if script.added != runs * script.steps:
        raise RuntimeError(f"{script.added} calls were made, not {runs * script.steps}.")
    return taken


async def cpu(opened: Open, *, quick: bool) -> dict[str, float]:
    """Take short runs in memory: what a step takes."""
    script = Script()
    async with opened(script, None) as run:
        await many(run, script, 5, "warm")
        gc.collect()
        taken = await many(run, script, 10 if quick else 150, "run")
    wall, cpu = (statistics.median(times) / STEPS * 1000 for times in zip(*taken, strict=True))
    return {"ms_per_step": cpu, "wall_ms_per_step": wall}


async def growth(opened: Open, *, quick: bool) -> dict[str, float]:
    """Take long runs in memory: what a step costs late in its run against early in it."""
    script = Script(LONG)
    early: list[float] = []
    late: list[float] = []
    async with opened(script, None) as run:
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


async def durable(opened: Open, *, quick: bool) -> dict[str, float]:
    """Take short runs, one at a time, with whatever the framework keeps on disk."""
    script = Script()
    with folder_of_its_own() as folder:
        async with opened(script, Path(folder)) as run:
            await many(run, script, 2, "warm")
            taken = await many(run, script, 3 if quick else 30, "run")
    return {
        "runs_per_second": len(taken) / sum(wall for wall, _ in taken),
        "wall_ms_per_run": statistics.median(wall for wall, _ in taken) * 1000,
        "cpu_ms_per_run": statistics.median(cpu for _, cpu in taken) * 1000,
    }


async def crowd(opened: Open, *, quick: bool) -> dict[str, float]:
    """Run a thousand at once, whose model takes its time."""
    cpu, wall = await at_once(opened, Script(CROWD_STEPS, LATENCY), None, 50 if quick else CROWD)
    return {"cpu_seconds": cpu, "wall_seconds": wall}


async def durable_crowd(opened: Open, *, quick: bool) -> dict[str, float]:
    """Run a thousand at once, with whatever the framework keeps on disk, whose model answers at once."""
    runs = 50 if quick else CROWD
    with folder_of_its_own() as folder:
        cpu, wall = await at_once(opened, Script(CROWD_STEPS), Path(folder), runs)
    steps = runs * CROWD_STEPS
    return {"steps_per_cpu_second": steps / cpu, "steps_per_second": steps / wall}


async def at_once(opened: Open, script: Script, folder: Path | None, runs: int) -> tuple[float, float]:
    """Run so many at the same time; return the CPU and the wall time, and make sure that all the work was done."""
    async with opened(script, folder) as run:
        await many(run, script, 1, "warm")
        gc.collect()
        script.added = 0
        wall, cpu = time.perf_counter(), time.process_time()
        said = await asyncio.gather(*(run(f"run-{number}") for number in range(runs)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if set(said) != {DONE} or script.added != runs * script.steps:
        raise RuntimeError(f"{script.added} calls were made, not {runs * script.steps}.")
    return cpu, wall


async def memory(opened: Open, *, quick: bool) -> dict[str, float]:
    """Let a thousand runs wait for their model, and see how much the process has grown."""
    runs = 50 if quick else CROWD
    gate = asyncio.Event()
    script = Script(1, gate=gate)
    async with opened(script, None) as run:
        gate.set()
        await many(run, script, 5, "warm")
        gate.clear()
        gc.collect()
        script.asked, script.crowd = 0, runs
        before = resident()
        waiting = [asyncio.create_task(run(f"run-{number}")) for number in range(runs)]
        await script.all_asked.wait()
        gc.collect()
        grown = resident() - before
        gate.set()
        await asyncio.gather(*waiting)
    return {"kB_per_run": grown / runs / 1000}


def resident() -> int:
    """Tell how many bytes of memory this process takes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("This system does not say how much memory a process takes.")


WORKLOADS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, float]]]] = {
    "cpu": cpu,
    "growth": growth,
    "durable": durable,
    "crowd": crowd,
    "durable_crowd": durable_crowd,
    "memory": memory,
}


def main(opened: Open, kept: str) -> None:
    """Do the workload that the command line names. `kept` says what the framework has on disk, and when."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    values = asyncio.run(WORKLOADS[options.workload](opened, quick=options.quick))
    told: dict[str, Any] = {"workload": options.workload, "values": values}
    print(json.dumps(told | ({"note": kept} if options.workload == "durable" else {})))

"""Growth: the cost of a step and of a wait with little and with much load.

Each pair is the same agent twice, measured in turn: with a small number of something, and with a large one.
"""

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench import past
from bench.loop_halter import Fake
from bench.measure import Contender, Measured, Sample, compare
from bench.peers.workloads import DONE, Script
from halter import Agent, tool
from halter.core.clock import DAY, SystemClock
from halter.core.events import RuleMade
from halter.core.ids import FLEET, SortableIds
from halter.core.ports import Draft, Write
from halter.core.rows import RuleRow
from halter.guard.approvals import AnyCondition, EachArgument, RuleMatcher, SameArguments, encode_matcher
from halter.journal.open import open_store
from halter.tools.function_tool import FunctionTool

STEPS = 40
FIRST = 5
"""First steps of a run, which are not counted because the agent's policy is resolved then."""
RUNS = 5
WAIT_SECONDS = 3
EVENTS_OF_A_SESSION = 8
"""How many events a session of `past.fill` has; one in ten of them was cancelled."""


@dataclass(frozen=True)
class Growth:
    """One kind of load: a small and a large amount, and the measurement with a given amount."""

    name: str
    few: int
    many: int
    unit: str
    run: Callable[[int], Sample]


def run(rounds: int, report: Callable[[str], None], *, quick: bool = False) -> Measured:
    """Measure every pair, the small and the large one in turn."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {count: Path(folder) / str(count) for count in (10_000, 50_000 if quick else 1_000_000)}
        for count, home in homes.items():
            report(f"a store of {count:,} events")
            past.fill(home, count // EVENTS_OF_A_SESSION)
        few_events, many_events = homes
        pairs = (
            Growth(
                "events in the store, on SQLite", few_events, many_events, "step", lambda count: _durable(homes[count])
            ),
            Growth(
                "the same, of sessions that are over",
                few_events,
                many_events,
                "run",
                lambda count: _short(homes[count]),
            ),
            Growth(
                "the same, waiting for a model", few_events, many_events, "second", lambda count: _waits(homes[count])
            ),
            Growth("sessions at work in the process", 1, 1_000, "step", _beside_sessions),
            Growth("tools offered", 5, 200, "step", _beside_tools),
            Growth("standing rules, half of them of the tool", 2, 1_000, "step", _beside_rules),
            Growth("characters of a result", 1_000, 1_000_000, "step", _of_length),
        )
        contenders = [
            Contender(f"{pair.name}: {count:,}", pair.name, pair.unit, partial(pair.run, count))
            for pair in pairs
            for count in (pair.few, pair.many)
        ]
        return compare(contenders, rounds, report), {}


def make_tools(script: Script, count: int) -> Sequence[FunctionTool]:
    """Make the tool that the script calls, and other tools."""
    return [tool(script.tool(), level="SAFE", effect="read"), *map(_make_other, range(count - 1))]


def _make_other(number: int) -> FunctionTool:
    async def other(a: int, b: int) -> int:
        """Do something else."""
        return a * b

    other.__name__ = other.__qualname__ = f"other_{number}"
    return tool(other, level="SAFE", effect="read")


@asynccontextmanager
async def opened(script: Script, tools: Sequence[FunctionTool], home: Path | None = None) -> AsyncGenerator[Agent]:
    """Open an agent on a store in memory, or in a folder."""
    store = "memory:" if home is None else str(home / "halter.db")
    environ = os.environ if home is None else past.environ_of(home)
    limits = {"max_steps": STEPS + 1, "context_window": 4_000_000}
    async with Agent("shop", model=Fake(script), tools=tools, store=store, limits=limits, environ=environ) as agent:
        yield agent


async def take_steps(agent: Agent, script: Script) -> Sample:
    """Take some long runs; the cost of a step is the median over all counted steps."""
    took: list[float] = []
    wall = time.perf_counter()
    for number in range(RUNS + 1):
        script.times.clear()
        gc.collect()
        if (text := (await agent.run("go")).text) != DONE:
            raise RuntimeError(f"The run ended with {text!r}.")
        if number:
            times = script.times[FIRST:]
            took += [after - before for before, after in pairwise(times)]
    return Sample(1, time.perf_counter() - wall, median(took))


def _durable(home: Path) -> Sample:
    async def measure() -> Sample:
        script = Script(STEPS)
        async with opened(script, make_tools(script, 1), home) as agent:
            return await take_steps(agent, script)

    return asyncio.run(measure())


def _short(home: Path) -> Sample:
    """Measure runs of one step, whose cost is mostly their start and end."""

    async def measure() -> Sample:
        script = Script(1)
        async with opened(script, make_tools(script, 1), home) as agent:
            await agent.run("go")
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                await agent.run("go")
            return Sample(STEPS, time.perf_counter() - wall, time.process_time() - cpu)

    return asyncio.run(measure())


def _waits(home: Path) -> Sample:
    """Measure waiting for a slow model, while the process polls for halts."""

    async def measure() -> Sample:
        script = Script(0, latency=WAIT_SECONDS)
        async with opened(script, make_tools(script, 1), home) as agent:
            wall, cpu = time.perf_counter(), time.process_time()
            await agent.run("go")
            return Sample(WAIT_SECONDS, time.perf_counter() - wall, time.process_time() - cpu)

    return asyncio.run(measure())


def _beside_sessions(count: int) -> Sample:
    """Measure one session's steps while the others wait for their models."""

    async def measure() -> Sample:
        gate = asyncio.Event()
        waiting, script = Script(0, gate=gate), Script(STEPS)
        waiting.crowd = count
        async with opened(waiting, make_tools(waiting, 1)) as others, opened(script, make_tools(script, 1)) as agent:
            crowd = [asyncio.create_task(others.run("wait")) for _ in range(count)]
            await waiting.all_asked.wait()
            sample = await take_steps(agent, script)
            gate.set()
            await asyncio.gather(*crowd)
            return sample

    return asyncio.run(measure())


def _beside_tools(count: int) -> Sample:
    async def measure() -> Sample:
        script = Script(STEPS)
        async with opened(script, make_tools(script, count)) as agent:
            return await take_steps(agent, script)

    return asyncio.run(measure())


def _beside_rules(count: int) -> Sample:
    """Measure calls that need approval and match one of many rules."""

    async def measure(home: Path) -> Sample:
        await _agree(home, count)
        script = Script(STEPS)
        add = tool(script.tool(), level="RESTRICTED", effect="write")
        async with opened(script, [add], home) as agent:
            return await take_steps(agent, script)

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(Path(folder)))


async def _agree(home: Path, count: int) -> None:
    clock = SystemClock()
    store = open_store(str(home / "halter.db"), clock=clock, ids=SortableIds(clock.now))
    expires_at = clock.now() + DAY
    rules = [_make_rule("add", "add", EachArgument((AnyCondition("a"), AnyCondition("b"))), expires_at)]
    for number in range(count - 1):
        name = "add" if number % 2 else f"other_{number}"
        rules.append(_make_rule(f"r{number}", name, SameArguments(f"{number:064}"), expires_at))
    drafts = [Draft(rule) for rule in rules]
    await store.commit(Write(FLEET, "rules", lambda _: drafts, [(RuleRow, rule.rule) for rule in rules]))
    await store.close()


def _make_rule(rule: str, name: str, matcher: RuleMatcher, expires_at: int) -> RuleMade:
    return RuleMade(
        rule=rule,
        tool=name,
        scope="agent",
        owner="shop",
        matcher=encode_matcher(matcher),
        keys=("a", "b"),
        by="ada",
        expires_at=expires_at,
    )


def _of_length(count: int) -> Sample:
    async def measure() -> Sample:
        script = Script(STEPS)
        line = "a line of a page that somebody has written\n"

        async def add(a: int, b: int) -> str:
            """Read a page."""
            script.added += 1
            return f"{a + b} {line * (count // len(line))}"

        async with opened(script, [tool(add, level="SAFE", effect="read")]) as agent:
            return await take_steps(agent, script)

    return asyncio.run(measure())

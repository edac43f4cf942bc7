"""The sizing page: arithmetic on the measured figures."""

from dataclasses import dataclass
from typing import Any

from bench.scaled import MANNERS, Own, figures_of

LOADED = 0.6
"""Planned load of a core; the rest is a reserve for peaks."""
HOUR, DAY = 3_600, 86_400
SERVER_CORES = 16
"""A common size of one server, for its limits."""


@dataclass(frozen=True)
class Costs:
    """Measured cost of one wake and one step."""

    worker_wake: float
    worker_step: float
    server_wake: float
    server_step: float
    history: float
    log: float
    kept: float
    sleeper: float
    rows: float
    memory: float
    connection: float
    connections: float
    offers: float

    def worker_cpu(self, wakes: float, steps: float) -> float:
        """Compute the CPU seconds of workers for wakes and steps."""
        return (wakes * self.worker_wake + steps * self.worker_step) / 1000

    def server_cpu(self, wakes: float, steps: float) -> float:
        """Compute the CPU seconds of PostgreSQL for wakes and steps."""
        return (wakes * self.server_wake + steps * self.server_step) / 1000


def costs_of(figures: Own) -> Costs:
    """Split the cost of a turn into its wake and its steps, from turns of one step and of five."""
    (worker_wake, worker_step), (server_wake, server_step) = (
        parted(figures[f"{MANNERS[3]}: {side}"], figures[f"{MANNERS[1]}: {side}"])
        for side in ("CPU of the workers", "CPU of PostgreSQL")
    )
    long, short = "a wake of one step with a long history", "a wake of one step without a history"
    more_events = figures["events in the long history"] - figures["events in the short history"]
    return Costs(
        worker_wake=worker_wake,
        worker_step=worker_step,
        server_wake=server_wake,
        server_step=server_step,
        history=max(0.0, figures[f"{long}: CPU, both sides"] - figures[f"{short}: CPU, both sides"])
        / more_events
        * 1000,
        log=figures[f"{MANNERS[1]}: log written"],
        kept=figures[f"{MANNERS[1]}: kept"],
        sleeper=figures["a sleeper: kept"],
        rows=figures["a sleeper: rows"],
        memory=figures["a worker's memory, at work"],
        connection=figures["a connection's memory"],
        connections=max(figures[f"{manner}: connections a worker"] for manner in MANNERS),
        offers=figures["sessions offered, which one process does at a time"],
    )


def parted(one_step_turn: float, each_of_five: float) -> tuple[float, float]:
    """Split the costs of a turn of one step, and of each step of a turn of five, into a wake and a step."""
    step = (5 * each_of_five - one_step_turn) / 4
    return (one_step_turn - step, step) if 0 < step < one_step_turn else (0.0, each_of_five)


@dataclass(frozen=True)
class Fleet:
    """A number of agents, the seconds between their wakes, and their steps per wake."""

    agents: int
    every: int
    steps: int

    def __str__(self) -> str:
        often = {600: "every 10 min", HOUR: "hourly", DAY: "daily"}[self.every]
        return f"{self.agents:,} {often}"


FLEETS = (
    Fleet(10_000, HOUR, 5),
    Fleet(10_000, 600, 5),
    Fleet(1_000_000, DAY, 5),
    Fleet(1_000_000, HOUR, 5),
    Fleet(1_000_000, 600, 5),
)


def needs(fleet: Fleet, costs: Costs) -> list[str]:
    """Compute the needs of a fleet, row by row."""
    wakes = fleet.agents / fleet.every
    steps = wakes * fleet.steps
    mine, servers = costs.worker_cpu(wakes, steps), costs.server_cpu(wakes, steps)
    workers = max(2, -int(-mine // LOADED))
    return [
        f"{wakes:,.1f}",
        f"{steps:,.0f}",
        f"{fleet.agents * round(costs.rows):,}",
        _size(fleet.agents * costs.sleeper),
        f"{mine:,.1f}",
        f"{workers:,}",
        _size(workers * costs.memory * 1e6),
        f"{servers:,.1f}",
        f"{max(1, -int(-servers // LOADED)):,}",
        f"{workers * costs.connections:,.0f}",
        _size(workers * costs.connections * costs.connection * 1e6),
        f"{_size(steps * costs.log)}/s",
        _size(steps * costs.kept * DAY),
        f"{100 * wakes / costs.offers:,.1f} %",
    ]


ROWS = (
    "wakes a second",
    "steps a second",
    "rows of sleepers",
    "sleepers on disk",
    "CPU of workers, cores busy",
    "workers, each with a core",
    "memory of workers",
    "CPU of PostgreSQL, cores busy",
    "cores of PostgreSQL",
    "connections",
    "memory of connections",
    "write-ahead log",
    "kept on disk a day",
    "of what can be offered",
)


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


SIZING = """# Sizing: what 10,000 and 1,000,000 agents need

This page is arithmetic on the figures of [Measurements](bench.md#many-machines), and `make bench` rewrites it
with them. They come from a small shared machine ({cores} cores, {machine}, PostgreSQL {postgresql}); measure on
yours before you buy one.

## The figures

| what | costs |
|---|---:|
| a wake, CPU of its worker | {worker_wake:.1f} ms |
| a step, CPU of its worker | {worker_step:.1f} ms |
| a wake, CPU of PostgreSQL | {server_wake:.1f} ms |
| a step, CPU of PostgreSQL | {server_step:.1f} ms |
| reading 1,000 events of a session's history, CPU of both | {history:.0f} ms |
| a step, written to the log | {log:,.0f} bytes |
| a step, kept in tables and indexes | {kept:,.0f} bytes |
| a sleeper | {rows:.0f} rows, {sleeper:,.0f} bytes |
| a worker | {memory:,.0f} MB, up to {connections:.0f} connections |
| a connection, its memory in PostgreSQL | {connection:.1f} MB |
| sessions that can be offered to workers | {offers:,.0f} a second |

Turns of one step and turns of five separate the cost of a wake from that of a step: `wake + 1 × step` and
`wake + 5 × step`. An agent that only sleeps costs its rows, and nothing else: no memory, and no CPU.

## The arithmetic

- wakes a second = agents / seconds between two wakes; steps a second = wakes a second × steps of a wake
- cores busy = wakes a second × CPU of a wake + steps a second × CPU of a step, separately for workers and PostgreSQL
- workers = cores busy / {loaded:.0%}, at least two, since one may die; each has a core to itself (a worker is one
  process, and Python runs on one core)
- disk a day = steps a second × bytes kept × 86,400; the log is written and then reused, or archived

The time that a model takes to answer costs no CPU: a worker waits for two hundred answers at once (`--concurrency`).

## Worked out

Five steps in each wake:

"""
ENDS = """
## Where one PostgreSQL ends

- **CPU.** A server of {cores} cores, {loaded:.0%} busy, carries {steps:,.0f} steps a second: {hourly:,.0f} agents
  that wake hourly and take five steps, or {often:,.0f} that wake every ten minutes. Beyond that, split the fleet
  over several stores: agents of different stores know nothing of each other, and each store has its own caps and
  its own halt.
- **Shared money.** Every step that costs money updates the rows of its agent's and of the fleet's budget, so that
  no number of workers can overdraw a cap. Writes that wait for such a row share one commit, so the row
  takes many steps in each sync of the disk, but it is one row: the steps a second above were measured with it.
- **Offers.** One worker at a time offers due sessions, up to {offers:,.0f} a second. The last row of the
  table says how much of that a fleet uses.
- **Connections.** {connections:.0f} for each worker at most. Set `max_connections` to that, times the workers, plus
  20 for people, the server and backups. From some 500 connections on, use fewer and larger machines for the workers,
  not a pooler: workers listen (`LISTEN`), which a pooler in transaction mode does not support.
- **A history that grows.** A worker that has not just had a session reads its events when it wakes: {history:.0f}
  ms of CPU for 1,000 events. For a session with {lived:,.0f} events, each wake costs as much again as a
  turn of five steps. Let a session end now and then (`yield` with `shutdown`; the next one begins fresh), or keep
  its wakes few.
- **Disk.** The journal keeps everything. `halter erase --older-than` erases the bodies, not the facts; the facts of a
  step are most of the bytes above. At a terabyte a day, give each part of the fleet
  its own store.
- **Sleepers.** An index finds due sessions, however many sleep. Only their rows, and the time of `halter verify`,
  which reads everything, grow with their number.
"""


def page(result: dict[str, Any]) -> str:
    """Render the sizing page; empty without a measurement."""
    figures = figures_of(result)
    if not figures:
        return ""
    costs, machine = costs_of(figures), result["machine"]
    values = {name: getattr(costs, name) for name in Costs.__dataclass_fields__}
    text = SIZING.format(
        cores=machine["cores"],
        machine=machine["machine"],
        postgresql=result["notes"]["postgresql"],
        loaded=LOADED,
        **values,
    )
    return text + "\n".join(_worked_out(costs)) + "\n" + ENDS.format(**values | _ends(costs))


def _worked_out(costs: Costs) -> list[str]:
    columns = [needs(fleet, costs) for fleet in FLEETS]
    heads = "".join(f" {fleet} |" for fleet in FLEETS)
    lines = [f"| agents, and how often they wake |{heads}", "|---|" + "---:|" * len(FLEETS)]
    return lines + [
        f"| {name} |" + "".join(f" {cell} |" for cell in cells) for name, *cells in zip(ROWS, *columns, strict=True)
    ]


def _ends(costs: Costs) -> dict[str, float]:
    """Compute the limits of one server."""
    of_five = costs.server_cpu(1, 5)
    wakes = SERVER_CORES * LOADED / of_five
    turn = 1000 * (of_five + costs.worker_cpu(1, 5))
    return {
        "cores": SERVER_CORES,
        "loaded": LOADED,
        "steps": 5 * wakes,
        "hourly": wakes * HOUR,
        "often": wakes * 600,
        "lived": 1000 * turn / costs.history if costs.history else float("inf"),
    }

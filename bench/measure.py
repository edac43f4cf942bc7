"""How a measurement is taken: interleaved rounds, medians, wall and CPU time, as JSON and as a table."""

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"


@dataclass
class Figure:
    """One figure: what it is, and what it comes to."""

    name: str
    value: float
    unit: str


@dataclass
class Sample:
    """One round of one row: how much was done, and what it took."""

    done: int
    wall: float
    cpu: float
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """One line of a table: who did what, and how fast, as the median of all rounds."""

    name: str
    group: str
    unit: str
    per_second: float
    cpu_us: float
    wall_spread: float
    extra: dict[str, float]


@dataclass
class Contender:
    """Something to be measured, again and again."""

    name: str
    group: str
    unit: str
    run: Callable[[], Sample]


def timed(job: Callable[[], int]) -> Sample:
    """Do a job once and take its time."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    done = job()
    return Sample(done, time.perf_counter() - wall, time.process_time() - cpu)


def compare(contenders: Sequence[Contender], rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Measure all contenders in turn, round after round, so that the machine's moods hit all alike."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(1, rounds + 1):
        for contender in contenders:
            say(f"round {number} of {rounds}: {contender.name}")
            samples[contender.name].append(contender.run())
    return [_row(contender, samples[contender.name]) for contender in contenders]


def _row(contender: Contender, samples: list[Sample]) -> Row:
    rates = [sample.done / sample.wall for sample in samples]
    names = samples[0].extra
    return Row(
        name=contender.name,
        group=contender.group,
        unit=contender.unit,
        per_second=statistics.median(rates),
        cpu_us=statistics.median(sample.cpu / sample.done * 1e6 for sample in samples),
        wall_spread=max(rates) / min(rates),
        extra={name: statistics.median(sample.extra[name] for sample in samples) for name in names},
    )


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


Measured = tuple[Sequence[Any], dict[str, Any]]
"""What a group brings home: its rows, and what else there is to tell."""


def result(name: str, rows: Sequence[Any], notes: dict[str, Any]) -> dict[str, Any]:
    """Put a group's results together, with what they were measured on."""
    return {"bench": name, "machine": machine(), "notes": notes, "rows": [asdict(row) for row in rows]}


ON_EACH_MACHINE = ("loop",)
"""Groups that are kept for each kind of machine, since who is ahead depends on it."""


def keep(name: str, rows: Sequence[Any], notes: dict[str, Any]) -> None:
    """Write the rows as JSON."""
    RESULTS.mkdir(exist_ok=True)
    file = f"{name}-{platform.machine()}" if name in ON_EACH_MACHINE else name
    (RESULTS / f"{file}.json").write_text(json.dumps(result(name, rows, notes), indent=2) + "\n")

"""Measurements: interleaved rounds, medians, wall and CPU time, as JSON and as a table."""

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
    """One figure: name, value and unit."""

    name: str
    value: float
    unit: str


@dataclass
class Sample:
    """One round of one row: amount of work, wall time and CPU time."""

    done: int
    wall: float
    cpu: float
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """One row of a table: medians of all rounds."""

    name: str
    group: str
    unit: str
    per_second: float
    cpu_us: float
    wall_spread: float
    extra: dict[str, float]


@dataclass
class Contender:
    """A function that is measured in every round."""

    name: str
    group: str
    unit: str
    run: Callable[[], Sample]


def timed(job: Callable[[], int]) -> Sample:
    """Run a job once and measure it."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    done_count = job()
    return Sample(done_count, time.perf_counter() - wall, time.process_time() - cpu)


def compare(contenders: Sequence[Contender], rounds: int, report: Callable[[str], None]) -> list[Row]:
    """Measure all contenders in turn, round after round, so that changes in the machine's load affect all equally."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(1, rounds + 1):
        for contender in contenders:
            report(f"round {number} of {rounds}: {contender.name}")
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
    """Describe the machine of the measurement."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
    }


Measured = tuple[Sequence[Any], dict[str, Any]]
"""Result of a group: its rows and its notes."""


def result(name: str, rows: Sequence[Any], notes: dict[str, Any]) -> dict[str, Any]:
    """Combine a group's results with a description of the machine."""
    return {"bench": name, "machine": machine(), "notes": notes, "rows": [asdict(row) for row in rows]}


ON_EACH_MACHINE = ("loop",)
"""Groups whose results are saved per machine type, because the ranking depends on it."""


def keep(name: str, rows: Sequence[Any], notes: dict[str, Any]) -> None:
    """Write the rows as JSON."""
    RESULTS.mkdir(exist_ok=True)
    file = f"{name}-{platform.machine()}" if name in ON_EACH_MACHINE else name
    (RESULTS / f"{file}.json").write_text(json.dumps(result(name, rows, notes), indent=2) + "\n")

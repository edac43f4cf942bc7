"""The section about scale of the benchmark page."""

from collections.abc import Mapping
from typing import Any

SCALE = """Measured on {measured} on PostgreSQL {postgresql} with its defaults, every commit synced to its disk; the
load of the machine was {loads} before and after. Workers are processes of `halter worker`; they, the
server and the measuring process share the same cores, so more workers than cores cannot be faster. Each wake is
a turn of {steps_per_wake} steps: a scripted model that answers at once and has a price, a tool that
does nothing, and a sleep. All sessions are of one agent, so each step holds money in three scopes, two
of which all sessions share: the worst case for their rows.

A step is one request to the model with its call. CPU is read from /proc, for the workers and, separately, for all
processes of the server. The bytes kept are tables and indexes, the bytes written are the server's
write-ahead log.
"""
WAITING = """Of {sleepers:,} sleepers {wakes_per_second} are woken in a second, by their clock or by a message, with
two workers; a wake is late by the time from its moment, or from the commit of the message, to the
commit of its wake. {claimers} processes at once claim or offer sessions from the sleepers,
at most {batch} at a time.
"""
BUSY = """Other processes used the machine, more than its cores could serve: lateness and rates are worse than they
would be on a quiet machine, and CPU times somewhat. Sizes are valid.
"""
COLUMNS = (
    ("steps/s", "steps", ",.0f"),
    ("wakes/s", "wakes", ",.0f"),
    ("CPU ms a step, workers", "CPU of the workers", ".2f"),
    ("CPU ms a step, PostgreSQL", "CPU of PostgreSQL", ".2f"),
    ("cores used", "cores used", ".2f"),
    ("transactions/s", "transactions", ",.0f"),
    ("syncs/s", "syncs", ",.0f"),
    ("log bytes a step", "log written", ",.0f"),
    ("bytes kept a step", "kept", ",.0f"),
    ("connections a worker", "connections a worker", ".0f"),
)
MANNERS = (
    "1 workers, 5 steps a wake",
    "2 workers, 5 steps a wake",
    "4 workers, 5 steps a wake",
    "2 workers, 1 steps a wake",
)
Own = Mapping[str, float]


def told(result: dict[str, Any]) -> list[str]:
    """Render the tables about scale."""
    notes, figures = result["notes"], figures_of(result)
    if not figures:
        return ["Not measured: there was no PostgreSQL."]
    loads = " and ".join(f"{load:.1f}" for load in notes["load"])
    lines = [SCALE.format(loads=loads, **{key: notes[key] for key in notes if key != "load"})]
    lines += [BUSY] if max(notes["load"]) > result["machine"]["cores"] else []
    lines += ["| workers |" + "".join(f" {head} |" for head, *_ in COLUMNS), "|---|" + "---:|" * len(COLUMNS)]
    for manner in MANNERS:
        cells = "".join(f" {format(figures[f'{manner}: {key}'], shape)} |" for _, key, shape in COLUMNS)
        lines.append(f"| {manner.replace('1 workers', '1 worker').replace('1 steps', '1 step')} |{cells}")
    lines += ["", WAITING.format(**notes), "| what | here |", "|---|---:|"]
    rest = [row for row in result["rows"] if " workers, " not in row["name"]]
    return [*lines, *(f"| {row['name']} | {_plain(row['value'])} {row['unit']} |" for row in rest)]


def figures_of(result: dict[str, Any]) -> Own:
    return {row["name"]: row["value"] for row in result["rows"]}


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"

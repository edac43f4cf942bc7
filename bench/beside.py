"""The section about the loop: the figures of all frameworks, and the rows in which others are ahead.

It names frameworks that failed or could not be installed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

OWN = "halter"
LOOP = """Measured on {measured} in {rounds} rounds, each figure in a fresh process, in a new order each round. Every
framework runs the same agent in a virtual environment of its own: a fake model behind the framework's own interface
that answers at once and asks for one call of `add(a: int, b: int)` in each step; an asynchronous tool whose arguments
the framework checks; no network. One agent is used for all runs; only openai-agents gets a clone for each
run, since many runs of one agent slow each other down there. Tracing, telemetry and instrumentation are off wherever
that is a setting, and limits on steps are lifted. langgraph is the agent that langchain's `create_agent` makes.

- A step: the time of an answer, its call and the result, in runs of 10 steps; CPU of the process, and wall.
- Step 3 and step 200: the mean CPU time of steps 2 to 6 and of steps 190 to 210, in one long run.
- A crowd: 1,000 runs of 5 steps at once, whose model takes 50 ms; none can be done before 0.3 s have passed.
- 1,000 at once, stored on disk: runs of 5 steps whose model answers at once; others are measured in one round alone.
- A waiting run: how much memory the process takes for each of 1,000 runs that wait for their first answer.
- The import: importing what an agent is made of, in a fresh process.
"""
AGAIN = """Measured in the same way on {measured}, in {rounds} rounds.
"""
BESIDES = """A step of Halter also does the following: the intent and the outcome of each request and of each call are
events of a hash chain, money is held in three scopes before each request, and every text is
searched for secrets.

Where its time goes, in µs of CPU a step, in runs of 10: shares by samplings of the stack, of 1,010 µs in 0.7.0, of
some 640 before commits and the guard's doors were shortened, and of 364 now, on the machine of the first column.
Counts are steadier than a clock: a step runs 9,400 bytecodes of Python where it ran 12,700, and makes 230 calls of
Python functions where it made 425, while 0.7.0 made 1,400.

| | 0.7.0 | before | now | what remains |
|---|---:|---:|---:|---|
| events: write, link, project | 110 | 93 | 84 | four events, each with its JSON, two SHA-256 and its head |
| decide under the lock | 50 | 42 | 14 | halts, grants, caps and rates of a request and a call |
| rows: load, save, commit | 160 | 82 | 46 | two transactions of twelve rows |
| the guard's doors, secrets | 230 | 170 | 104 | arguments, permits, holds; each new text is searched once |
| the provenance check | 0 | 43 | 20 | what the model read and wrote, as far as it may decide a call |
| the model, the tool; beginning and ending a run | 255 | 106 | 32 | of a run two commits |
| the loop: decisions, transcript, prompt | 195 | 104 | 64 | two steps of a turn, and what is new of the prompt |

No function stands out: the longest has 10 % of the bytecodes. A faster step has fewer layers, not faster ones. By
samples of the processor, 85 % of a step is inside the interpreter, a third of that in its evaluation of bytecodes
and the rest in objects, calls and attributes; hashing takes 2 %, JSON and structs 5 %, collecting garbage 5 %.
Compiling the unchanged hot modules with Cython makes a step 10 to 40 % slower: it loses what the interpreter
learns about each attribute. To start and to end a run costs 1.6 steps more: because of that, and not of
its steps, agent-framework is ahead by 1 or 2 %, less than two rounds of one program differ.

In a file, a durable step takes nearly three times as much: SQLite's statements, its log and the log's sync."""

Found = dict[tuple[str, str], dict[str, float]]
"""The values by who was measured, and at what."""
Column = tuple[str, str, str, str]
"""What stands at its top, the workload, the value, and how it is written."""

COLUMNS: tuple[Column, ...] = (
    ("CPU ms a step", "cpu", "ms_per_step", ".2f"),
    ("wall ms a step", "cpu", "wall_ms_per_step", ".2f"),
    ("CPU ms of step 3", "growth", "ms_early", ".2f"),
    ("of step 200", "growth", "ms_late", ".2f"),
    ("step 200 against step 3", "growth", "ratio", ".2f"),
    ("crowd, CPU s", "crowd", "cpu_seconds", ".1f"),
    ("crowd, wall s", "crowd", "wall_seconds", ".1f"),
    ("kB a waiting run", "memory", "kB_per_run", ".1f"),
    ("import, CPU ms", "import", "cpu_ms", ",.0f"),
    ("import, wall ms", "import", "wall_ms", ",.0f"),
)
DURABLE: tuple[Column, ...] = (
    ("runs a second", "durable", "runs_per_second", ".1f"),
    ("wall ms a run", "durable", "wall_ms_per_run", ".1f"),
    ("CPU ms a run", "durable", "cpu_ms_per_run", ".1f"),
    ("1,000 at once: steps a CPU second", "durable_crowd", "steps_per_cpu_second", ",.0f"),
    ("1,000 at once: steps a second", "durable_crowd", "steps_per_second", ",.0f"),
)
MORE_IS_BETTER = {"runs_per_second", "steps_per_cpu_second", "steps_per_second"}
SYNCED = ("pydantic-ai", "agno", "openai-agents", "langgraph")
"""Peers that let each step reach the disk before the next one."""
AIMS: tuple[tuple[str, str, str, float, str], ...] = (
    ("a step, CPU ms", "cpu", "ms_per_step", 0.20, ".2f"),
    ("step 200 against step 3", "growth", "ratio", 1.05, ".2f"),
    ("a crowd, CPU s", "crowd", "cpu_seconds", 1.8, ".1f"),
    ("a waiting run, kB", "memory", "kB_per_run", 12, ".1f"),
    ("importing an agent, CPU ms", "import", "cpu_ms", 200, ".0f"),
    ("10 durable steps, CPU ms", "durable", "cpu_ms_per_run", 10, ".1f"),
    ("1,000 durable runs at once, steps a CPU second", "durable_crowd", "steps_per_cpu_second", 2_500, ",.0f"),
)
BEST_SYNCED = 5
"""Our goal: durable runs as a multiple of the best peer that syncs."""


def told(result: dict[str, Any], *, again: bool = False) -> list[str]:
    """Render the tables of the loop, the rows in which others are ahead, and our goals.

    With `again`, leave out the explanations.
    """
    notes, rows = result["notes"], result["rows"]
    figures: Found = {(row["name"], row["workload"]): row["values"] for row in rows if row["values"]}
    kept_notes = {row["name"]: row["note"] for row in rows if row["workload"] == "durable"}
    names = sorted({row["name"] for row in rows}, key=list(notes["versions"]).index)
    lines = [
        (AGAIN if again else LOOP).format(**notes),
        f"| in memory |{_heads(COLUMNS)}",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    lines += [f"| {_titled(name, notes)} |{_cells(figures, name, COLUMNS)}" for name in names]
    kept_there = "stored on disk: runs of 10 steps one at a time, and 1,000 of 5 steps at once"
    lines += ["", f"| {kept_there} |{_heads(DURABLE)} what is stored, and when |"]
    lines += ["|---|" + "---:|" * len(DURABLE) + "---|"]
    lines += [
        f"| {_titled(name, notes)} |{_cells(figures, name, DURABLE)} {kept_notes.get(name, '')} |" for name in names
    ]
    ahead = _ahead(figures, names)
    explanation = ["", BESIDES] if ahead and not again else []
    return [*lines, *_unmeasured(notes["missing"], rows), *ahead, *explanation, *_aims(figures)]


def _titled(name: str, notes: dict[str, Any]) -> str:
    return f"{name} {notes['versions'].get(name, '')}".strip()


def _heads(columns: Sequence[Column]) -> str:
    return "".join(f" {head} |" for head, *_ in columns)


def _cells(figures: Found, name: str, columns: Sequence[Column]) -> str:
    return "".join(f" {_cell(figures, name, column)} |" for column in columns)


def _cell(figures: Found, name: str, column: Column) -> str:
    """Render one value; empty if it failed or was not measured."""
    _, workload, key, shape = column
    value = figures.get((name, workload), {}).get(key)
    return "" if value is None else format(value, shape)


def _unmeasured(missing: dict[str, str], rows: list[dict[str, Any]]) -> list[str]:
    """List the frameworks without figures, and the reasons."""
    lines = [f"- {name}: {why}" for name, why in missing.items()]
    lines += [f"- {row['name']}, {row['workload']}: failed: {row['failed']}" for row in rows if row["failed"]]
    return ["", "Not measured:", "", *lines] if lines else []


def _ahead(figures: Found, names: Sequence[str]) -> list[str]:
    """List the rows in which others are ahead, with both figures."""
    if not any(name == OWN for name, _ in figures) or len(names) == 1:
        return []
    lines = [line for column in (*COLUMNS, *DURABLE) if (line := _behind(figures, names, column))]
    return ["", "### Where others are ahead", "", *(lines or ["Nowhere in these tables."])]


def _behind(figures: Found, names: Sequence[str], column: Column) -> str:
    head, workload, key, shape = column
    own_value = figures.get((OWN, workload), {}).get(key)
    if own_value is None:
        return ""
    is_better = _more if key in MORE_IS_BETTER else _less
    values = {name: figures[name, workload][key] for name in names if key in figures.get((name, workload), {})}
    ahead = [name for name, value in values.items() if is_better(value, own_value)]
    ahead.sort(key=lambda name: values[name], reverse=key in MORE_IS_BETTER)
    others = ", ".join(f"{name} {format(values[name], shape)}{_unsynced(name, workload)}" for name in ahead)
    return f"- {head}: {others}; Halter {format(own_value, shape)}." if ahead else ""


def _more(value: float, base: float) -> bool:
    return value > base


def _less(value: float, base: float) -> bool:
    return value < base


def _unsynced(name: str, workload: str) -> str:
    return " (which never syncs)" if workload.startswith("durable") and name not in SYNCED else ""


def _aims(figures: Found) -> list[str]:
    """Compare our own figures with our goals, as far as they exist."""
    rows = [*_reached(figures)]
    table = ["| what | aim | here | reached |", "|---|---:|---:|---|"]
    return ["", "### What we aim at", "", *table, *rows] if rows else []


def _reached(figures: Found) -> Iterator[str]:
    for title, workload, key, aim, shape in AIMS:
        value = figures.get((OWN, workload), {}).get(key)
        if value is not None:
            is_reached = value >= aim if key in MORE_IS_BETTER else value <= aim
            yield f"| {title} | {aim:g} | {format(value, shape)} | {'yes' if is_reached else 'no'} |"
    own_figures = figures.get((OWN, "durable"))
    synced_rates = [figures[name, "durable"]["runs_per_second"] for name in SYNCED if (name, "durable") in figures]
    if own_figures is not None and synced_rates:
        times = own_figures["runs_per_second"] / max(synced_rates)
        yield (
            f"| durable runs, against the best that syncs | {BEST_SYNCED}× | {times:.1f}× "
            f"| {'yes' if times >= BEST_SYNCED else 'no'} |"
        )

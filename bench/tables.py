"""The results as a page of the docs."""

import json
from typing import Any

from bench.measure import DOCS, RESULTS

INTRODUCTION = """# Measurements

Made by `make bench`, which measures all rows of a group in one run, in turn, round after round; the figures are
medians. They are ratios to look at, not promises: the machine was small and shared.
"""
TITLES = {
    "autonomy": "Autonomy",
    "guard": "Guard",
    "journal": "Journal",
    "loop": "The loop, beside others",
    "start": "Starting",
    "stream": "Streams",
}
LOOP = """Measured on {measured} in {rounds} rounds, each figure in a fresh process, in a new order each round. Every
framework runs the same agent in a virtual environment of its own: a fake model behind the framework's own interface,
which answers at once and asks for one call of `add(a: int, b: int)` in each step; an asynchronous tool whose arguments
the framework checks; no network. An agent is made once and used for all runs; only openai-agents gets a clone for each
run, since many runs of one agent slow each other down there. Tracing, telemetry and instrumentation are off wherever
that is a setting, and limits on steps are lifted. langgraph is the agent that `create_agent` of langchain makes of it.

- A step: CPU time of the process for an answer, its call and the result, in runs of 10 steps.
- Step 200 against step 3: the mean CPU time of steps 190 to 210 over that of steps 2 to 6, in one run.
- A crowd: 1,000 runs of 5 steps at once, whose model takes 50 ms; none can be done before 0.3 s have passed.
- A waiting run: how much memory the process takes for each of 1,000 runs that wait for their first answer.
- The import: CPU time of importing what an agent is made of, in a fresh process.
"""
AUTONOMY = """Measured on {measured}, with {sleepers:,} autonomous sessions asleep in one SQLite file, and one process
that runs them; the load of the machine was {loads} before and after. A sleeper without sensors is a row and nothing
else: its memory is how much larger the process is than one on an empty store. Of a crowd each is woken, and sleeps
again with two commits; at most 200 are awake at once. A resident agent is one with sensors, and lives in virtual time
and in memory.
"""
BUSY = """Others were at work on the machine, on more than its cores: lateness and rates are worse than they would be
on a quiet one. CPU times and memory stand.
"""
SYNCED = ("pydantic-ai", "agno", "openai-agents", "langgraph")
"""Peers that let each step reach the disk before the next one."""
AHEAD = """Where others are ahead: agent-framework and agno need less CPU for a step, for a crowd and for a waiting run,
and agent-framework, which never syncs, keeps more runs a second. What a step of Halter does besides: four commits with
a hash chain and holds in three scopes, and every text looked through for secrets. The profile is flat, some 2,500
function calls a step, a third of it in the commits; settling one effect and admitting the next in one commit would
halve those. No aim of this group is reached yet:
"""
COLUMNS = (
    ("CPU ms a step", "cpu", "ms_per_step", ".2f"),
    ("step 200 against step 3", "growth", "ratio", ".2f"),
    ("crowd, CPU s", "crowd", "cpu_seconds", ".1f"),
    ("crowd, wall s", "crowd", "wall_seconds", ".1f"),
    ("kB a waiting run", "memory", "kB_per_run", ".1f"),
    ("import, CPU ms", "import", "cpu_ms", ",.0f"),
)
DURABLE = (
    ("runs a second", "durable", "runs_per_second", ".1f"),
    ("CPU ms a run", "durable", "cpu_ms_per_run", ".1f"),
)


def write() -> str:
    """Write the page anew from all results, and return it."""
    sections = [section(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    page = "\n".join([INTRODUCTION, *sections])
    (DOCS / "bench.md").write_text(page)
    return page


def section(result: dict[str, Any]) -> str:
    """Write one group's part of the page."""
    machine = result["machine"]
    lines = [
        f"## {TITLES[result['bench']]}",
        "",
        f"Python {machine['python']} on {machine['machine']}, {machine['cores']} cores, {machine['system']}.",
        "",
    ]
    body = {
        "autonomy": _autonomy,
        "journal": _journal,
        "guard": _guard,
        "loop": _loop,
        "start": _start,
        "stream": _stream,
    }[result["bench"]]
    return "\n".join([*lines, *body(result), ""])


START = """Each figure is that of a fresh process, from its start to its end. The aim is one of CPU time: a busy machine
takes longer.
"""
STARTS = {"import halter": 200, "halter --help": 500}
"""What we aim at, in milliseconds."""


def _start(result: dict[str, Any]) -> list[str]:
    """Tell how long it takes to begin, and hold it against the bare interpreter and what we aim at."""
    bare = next(row["cpu_us"] for row in result["rows"] if row["name"] == "python")
    lines = [START, "| what | CPU ms | against python alone | aim, CPU ms |", "|---|---:|---:|---:|"]
    for row in result["rows"]:
        aim = STARTS.get(row["name"], "")
        lines.append(f"| `{row['name']}` | {row['cpu_us'] / 1000:,.0f} | {row['cpu_us'] / bare:.1f}× | {aim} |")
    return lines


STREAM = """An agent takes a turn five times a second on SQLite, in the process that serves {listeners} WebSockets; its
events have a text of two thousand characters. Who listens sits in another process on the same cores. Lateness is the
time from the journal's moment of an event until a listener has it, over all events and all who read.
"""


def _stream(result: dict[str, Any]) -> list[str]:
    """Tell how late the news are, and what one who stalls changes for everybody else."""
    rows = {row["name"]: row["extra"] for row in result["rows"]}
    lines = [
        STREAM.format(**result["notes"]),
        "| who listens | lateness p50, ms | p99, ms | a turn p50, ms | p99, ms | CPU s of the server |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, extra in rows.items():
        late = [f"{extra[key]:.0f}" if key in extra else "" for key in ("p50_ms", "p99_ms")]
        turns = [f"{extra[key]:.0f}" for key in ("turn_p50_ms", "turn_p99_ms")]
        lines.append(f"| {name} | {' | '.join((*late, *turns))} | {extra['server_cpu_s']:.2f} |")
    all_read, stalls = rows["100 listen"], rows["100 listen, and one stalls"]
    change, turn = (100 * (stalls[key] / all_read[key] - 1) for key in ("p99_ms", "turn_p50_ms"))
    return [*lines, "", f"One who stalls changes the others' p99 by {change:+.0f} % and a turn's p50 by {turn:+.0f} %."]


def _autonomy(result: dict[str, Any]) -> list[str]:
    """Tell the figures of sleepers, and hold them against what we aim at."""
    notes = result["notes"]
    own = {row["name"]: row["value"] for row in result["rows"]}
    memory = own["memory of a sleeping agent"]
    loads = " and ".join(f"{load:.1f}" for load in notes["load"])
    return [
        AUTONOMY.format(sleepers=notes["sleepers"], measured=notes["measured"], loads=loads),
        *([BUSY] if max(notes["load"]) > result["machine"]["cores"] else []),
        "| what | here |",
        "|---|---:|",
        *(f"| {row['name']} | {_plain(row['value'])} {row['unit']} |" for row in result["rows"]),
        "",
        "| what | aim | here |",
        "|---|---:|---:|",
        f"| a sleeping agent in memory | below 1,024 bytes | {memory:,.0f} bytes |",
        f"| sleeping agents in one process | 100,000 | {notes['sleepers']:,} |",
    ]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _journal(result: dict[str, Any]) -> list[str]:
    lines = [
        "| what | per second | CPU µs each | against raw | commits per event |",
        "|---|---:|---:|---:|---:|",
    ]
    base = {row["group"]: row["per_second"] for row in reversed(result["rows"]) if row["name"].startswith("raw")}
    for row in result["rows"]:
        commits = row["extra"].get("commits_per_event")
        shown = "1" if commits is None else f"{commits:.3f}"
        ratio = row["per_second"] / base[row["group"]]
        rate = f"{row['per_second']:,.0f} {row['unit']}s"
        lines.append(f"| {row['name']} | {rate} | {row['cpu_us']:,.0f} | {ratio:.2f}× | {shown} |")
    lines += ["", "| disk | bytes written per event | syncs per event | bytes kept per event |", "|---|---:|---:|---:|"]
    for name, disk in result["notes"].items():
        kept = f"{disk['bytes_kept_per_event']:,.0f}" if "bytes_kept_per_event" in disk else ""
        lines.append(
            f"| {name.removeprefix('disk of ')} | {disk['bytes_written_per_event']:,.0f} "
            f"| {disk['syncs_per_event']:.3f} | {kept} |"
        )
    return lines


def _guard(result: dict[str, Any]) -> list[str]:
    rows = {group: [row for row in result["rows"] if row["group"] == group] for group in ("calls", "usual", "hostile")}
    lines = ["| through the door | per second | CPU µs each |", "|---|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['per_second']:,.0f} {row['unit']}s | {row['cpu_us']:,.1f} |" for row in rows["calls"]
    ]
    lines += ["", "| taking secrets out of a text | MB per second of CPU |", "|---|---:|"]
    lines += [f"| {row['name']} | {1e6 / row['cpu_us']:,.0f} |" for row in rows["usual"]]
    lines += ["", "| taking secrets out of a hostile megabyte | CPU ms |", "|---|---:|"]
    lines += [f"| {row['name']} | {row['cpu_us'] / 1000:,.0f} |" for row in rows["hostile"]]
    return lines


Found = dict[tuple[str, str], dict[str, Any]]
Column = tuple[str, str, str, str]


def _loop(result: dict[str, Any]) -> list[str]:
    notes = result["notes"]
    found: Found = {(row["name"], row["workload"]): row for row in result["rows"]}
    names = sorted({row["name"] for row in result["rows"]}, key=list(notes["versions"]).index)
    lines = [LOOP.format(**notes), f"| in memory |{_heads(COLUMNS)}", "|---|" + "---:|" * len(COLUMNS)]
    lines += [f"| {_titled(name, notes)} |{_cells(found, name, COLUMNS)}" for name in names]
    lines += ["", f"| 10 steps kept on disk, one run at a time |{_heads(DURABLE)} what is kept, and when |"]
    lines += ["|---|" + "---:|" * len(DURABLE) + "---|"]
    lines += [
        f"| {_titled(name, notes)} |{_cells(found, name, DURABLE)} {found[name, 'durable']['note']} |" for name in names
    ]
    lines += _told(notes["missing"], result["rows"])
    return lines + (_aims(found) if ("halter", "cpu") in found else [])


def _aims(found: Found) -> list[str]:
    """Hold our own figures against what we aim at, and say plainly where others are ahead."""
    own = {workload: row["values"] for (name, workload), row in found.items() if name == "halter"}
    durable = [found[name, "durable"]["values"] for name in SYNCED if (name, "durable") in found]
    synced = max(values["runs_per_second"] for values in durable if values)
    rows = (
        ("a step, CPU ms", "0.07", f"{own['cpu']['ms_per_step']:.2f}"),
        ("step 200 against step 3", "1.05", f"{own['growth']['ratio']:.2f}"),
        ("a crowd, CPU s", "0.5", f"{own['crowd']['cpu_seconds']:.1f}"),
        ("importing an agent, CPU ms", "200", f"{own['import']['cpu_ms']:.0f}"),
        ("durable runs, against the best that syncs", "10×", f"{own['durable']['runs_per_second'] / synced:.1f}×"),
    )
    return [
        "",
        AHEAD,
        "| what | aim | here |",
        "|---|---:|---:|",
        *(f"| {what} | {aim} | {is_} |" for what, aim, is_ in rows),
    ]


def _titled(name: str, notes: dict[str, Any]) -> str:
    return f"{name} {notes['versions'].get(name, '')}".strip()


def _heads(columns: tuple[Column, ...]) -> str:
    return "".join(f" {head} |" for head, *_ in columns)


def _cells(found: Found, name: str, columns: tuple[Column, ...]) -> str:
    return "".join(
        f" {format(found[name, workload]['values'][key], shape)} |" if found[name, workload]["values"] else " failed |"
        for _, workload, key, shape in columns
    )


def _told(missing: dict[str, str], rows: list[dict[str, Any]]) -> list[str]:
    """Name everybody whose figures are not there, and why."""
    told = [f"- {name}: {why}" for name, why in missing.items()]
    told += [f"- {row['name']}, {row['workload']}: failed: {row['failed']}" for row in rows if row["failed"]]
    return ["", "Not measured:", "", *told] if told else []

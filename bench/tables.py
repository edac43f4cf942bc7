"""The results as a page of the docs."""

import json
from functools import partial
from typing import Any

from bench import beside, scaled, sizing
from bench.measure import DOCS, RESULTS

INTRODUCTION = """# Measurements

`make bench` makes this page. It measures all rows of a group in one run, in turn, round after round; the figures are
medians. They are ratios to look at, not promises: the machine was small and shared.
"""
TITLES = {
    "adapters": "Agents of other frameworks",
    "autonomy": "Autonomy",
    "growth": "Growth",
    "guard": "Guard",
    "hook": "Hooks",
    "inject": "Prompt injection",
    "journal": "Journal",
    "loop": "The loop, beside others",
    "past": "A long past",
    "proxy": "The proxy",
    "scale": "Many machines",
    "start": "Starting",
    "stream": "Streams",
}
AUTONOMY = """Measured on {measured}, with {sleepers:,} autonomous sessions asleep in one SQLite file, and one process
that runs them; the load of the machine was {loads} before and after. A sleeper without sensors is a row and nothing
else: its memory is how much larger the process is than one on an empty store. Each session of a crowd wakes, and sleeps
again with two commits; at most 200 are awake at once. A resident agent is one with sensors, and runs in virtual time
and in memory.
"""
BUSY = """Other processes used the machine, more than its cores could serve: lateness and rates are worse than they
would be on a quiet machine. CPU times and memory are valid.
"""


def write() -> str:
    """Write the pages from all results, and return the page of the measurements."""
    for name, page in pages().items():
        (DOCS / name).write_text(page)
    return pages()["bench.md"]


def pages() -> dict[str, str]:
    """Render the pages from all results, by file name."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    sizes = [sizing.page(result) for result in results if result["bench"] == "scale"]
    sections = [INTRODUCTION]
    for index, result in enumerate(results):
        is_repeated = index > 0 and result["bench"] == results[index - 1]["bench"]
        sections.append(section(result, again=is_repeated))
    page = "\n".join(sections)
    return {"bench.md": page} | ({"sizing.md": sizes[0]} if any(sizes) else {})


def section(result: dict[str, Any], *, again: bool = False) -> str:
    """Render one group's section; with `again`, on another machine and without explanations."""
    machine, title = result["machine"], TITLES[result["bench"]]
    lines = [
        f"## {title}, on {machine['machine']}" if again else f"## {title}",
        "",
        f"Python {machine['python']} on {machine['machine']}, {machine['cores']} cores, {machine['system']}.",
        "",
    ]
    body = {
        "adapters": _adapters,
        "autonomy": _autonomy,
        "growth": _growth,
        "hook": _hook,
        "inject": _inject,
        "journal": _journal,
        "guard": _guard,
        "loop": partial(beside.told, again=again),
        "past": _past,
        "proxy": _proxy,
        "scale": scaled.told,
        "start": _start,
        "stream": _stream,
    }[result["bench"]]
    return "\n".join([*lines, *body(result), ""])


INJECT = """[AgentDojo](https://agentdojo.spylab.ai) 0.1.35, version 1.2.2 of its suites. The model is the worst case:
it does what the task needs, and obeys every injection that it reads. The person approves what the task needs and no
attack. An attack is *static* if it makes AgentDojo's own calls. The *adaptive* attacker knows the provenance check's
code and state: it may use every tool with every trusted value, and sends its own values through every read first. It
wins with any call that passes and carries its values or the secret in a spelling that can be undone, or that is final
and not what the task needs. Questions are counted per task: staged, where all calls that can wait are one question, and
call by call. A missing row was not measured with this code.
"""
ALL_SUITES = 4
BRAKES = {
    "none": "none",
    "every-write": "ask before every write and fetch",
    "guard": "the whole guard, `provenance: ask`",
    "guessed": "the whole guard, tools without declarations",
    "prose": "the provenance check alone, plain prose into the person's own things",
}


def _inject(result: dict[str, Any]) -> list[str]:
    """Render attacks, questions and the cost of decisions."""
    lines = [
        INJECT,
        "| check | suite | tasks done | attacks, static | adaptive | questions, staged | call by call |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for brake, title in BRAKES.items():
        rows = [row["extra"] for row in result["rows"] if row["group"] == brake]
        for row in [*rows, _all_suites(rows)] if rows else []:
            adaptive = row.get("adaptive", "")
            lines.append(
                f"| {title} | {row['suite']} | {row['done']} of {row['tasks']} | {row['static']} of {row['pairs']} "
                f"| {adaptive} | {row['staged']:.2f} | {row['by_call']:.2f} |"
            )
    asked_rows = [row["extra"] for row in result["rows"] if "wrong" in row["extra"]]
    if asked_rows:
        pairs, wrong, locked = (sum(row[key] for row in asked_rows) for key in ("pairs", "wrong", "wrong_locked"))
        let_count, kept_count = (sum(row[key] for row in asked_rows) for key in ("wrong_let", "wrong_locked_let"))
        sentence = (
            f"A person who wrongly approves one attack question in ten lets {wrong} of {pairs} attacks through; "
            f"{locked} if a denied question locks the session. Under attack the task's own calls all run in "
            f"{let_count} of {pairs} without the lock, and in {kept_count} with it."
        )
        lines += ["", sentence]
    for row in result["rows"]:
        for win in row["extra"].get("wins", ()) if row["group"] == "guard" else ():
            lines += ["", f"- {row['name']}, {win['task']} ({win['pairs']} pairs): `{win['call']}`: {win['why']}."]
    lines += [
        "",
        "| messages of history | call passes, CPU µs | needs approval, CPU µs | an empty loop of 1,000 |",
        "|---:|---:|---:|---:|",
    ]
    for cost in result["notes"]["costs"]:
        lines.append(
            f"| {cost['messages']:,} | {cost['passes_us']:.0f} | {cost['asked_us']:.0f} | {cost['loop_us']:.0f} |"
        )
    return lines


def _all_suites(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tasks = sum(row["tasks"] for row in rows)
    totals: dict[str, Any] = {"suite": "all" if len(rows) == ALL_SUITES else "together", "tasks": tasks}
    for key in ("done", "static", "pairs", "adaptive"):
        if all(key in row for row in rows):
            totals[key] = sum(row[key] for row in rows)
    for key in ("staged", "by_call"):
        totals[key] = sum(row[key] * row["tasks"] for row in rows) / tasks
    return totals


PAST = """The same commands, routes and pages over a store of {few:,} ended sessions and over one of {many:,}: CPU time
of a command's process, and of the server for an answer. The cost of a page must not grow with the store's whole
history. The report and the audit cover the last day, in which the larger store had a hundred times as many sessions.
"""


def _past(result: dict[str, Any]) -> list[str]:
    """Render the cost of reads over few and over many sessions."""
    lines = [
        PAST.format(**result["notes"]),
        "| what | | few, ms | many, ms | few, kB | many, kB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        sizes = f"{row['few_bytes'] / 1000:.1f} | {row['many_bytes'] / 1000:.1f}"
        lines.append(f"| `{row['name']}` | {row['kind']} | {row['few_ms']:.0f} | {row['many_ms']:.0f} | {sizes} |")
    return lines


GROWTH = """The same agent with little and with much, in turn: CPU time of a step in the middle of a run, of a run
of one step, or of a second in which it waits for its model. Of the sessions in the store one in ten was cancelled,
which leaves a halt; all rules but one approve one call each. A result is masked, judged, hashed and written as it
arrives, and the model sees 16,000 characters of it.
"""


def _growth(result: dict[str, Any]) -> list[str]:
    """Render the cost of a step with much load against little."""
    lines = [
        GROWTH,
        "| what | little | much | CPU µs with little | with much | |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for few, many in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        counts = " | ".join(row["name"].rpartition(": ")[2] for row in (few, many))
        costs = f"{few['cpu_us']:,.0f} | {many['cpu_us']:,.0f} | {many['cpu_us'] / few['cpu_us']:.2f}×"
        lines.append(f"| {few['group']}, a {few['unit']} | {counts} | {costs} |")
    return lines


START = """Each figure is that of a fresh process, from its start to its end. The aim is one of CPU time: a busy machine
takes longer.
"""
STARTS = {"import halter": 200, "halter --help": 500}
"""Goals in milliseconds."""


def _start(result: dict[str, Any]) -> list[str]:
    """Render start-up times, against the bare interpreter and our goals."""
    bare = next(row["cpu_us"] for row in result["rows"] if row["name"] == "python")
    lines = [START, "| what | CPU ms | against python alone | aim, CPU ms |", "|---|---:|---:|---:|"]
    for row in result["rows"]:
        aim = STARTS.get(row["name"], "")
        lines.append(f"| `{row['name']}` | {row['cpu_us'] / 1000:,.0f} | {row['cpu_us'] / bare:.1f}× | {aim} |")
    return lines


ADAPTERS = """The same agent bare and under the guard, with a model that is a function: {steps} times a request and a
call of a tool that adds two numbers, and an answer. The guard writes to SQLite: each request and each call is
durable before it is made, and its outcome before the next one is: two commits a step, three if the tool changes
something. The figures are from before, with four commits a step. The frameworks store nothing. The Claude Agent
SDK's step is that of the Python process alone: Claude Code is another process, and makes the model requests itself.
"""


def _adapters(result: dict[str, Any]) -> list[str]:
    """Render the guard's overhead per step of another framework."""
    cpu = {row["name"]: row["cpu_us"] for row in result["rows"]}
    lines = [
        ADAPTERS.format(**result["notes"]),
        "| framework | CPU of a bare step, µs | guarded, µs | added, µs |",
        "|---|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["group"] for row in result["rows"]):
        bare, guarded = cpu[f"{name}, bare"], cpu[f"{name}, guarded"]
        lines.append(f"| {name} | {bare:,.0f} | {guarded:,.0f} | {guarded - bare:,.0f} |")
    return lines


HOOK = """A tool call of another program, from the start of its hook to the answer, with `halter hook serve` on an
SQLite file: the shell, the interpreter, the socket, the decision and its commit; {calls} in a row. The aim is 60 ms
at p50.
"""


def _hook(result: dict[str, Any]) -> list[str]:
    """Render the time of a hook's decision, against a bare interpreter."""
    lines = [
        HOOK.format(**result["notes"]),
        "| what | p50, ms | p95, ms | CPU of the hook, ms |",
        "|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        late = row["extra"]
        lines.append(f"| `{row['name']}` | {late['p50_ms']:.0f} | {late['p95_ms']:.0f} | {row['cpu_us'] / 1000:.0f} |")
    return lines


PROXY = """A provider on this machine streams an answer of {chunks} chunks to a client, without the proxy and with it,
on a SQLite store: {requests} requests one by one for the delays, then {together} at once for the rate. Each is held and
settled in the journal. CPU time is that of the proxy's process; for each MB it is that of streams of {long_chunks:,}
chunks, each of one word, at a load average of {long_load}. The machine's load average was {load}: if it is above the
number of cores, delays are those of a busy machine, and only CPU times compare with other runs.
"""


def _proxy(result: dict[str, Any]) -> list[str]:
    """Render the proxy's overhead per request."""
    lines = [
        PROXY.format(**result["notes"]),
        "| what | first byte p50, ms | p95, ms | each chunk p50, µs | requests/s | CPU ms a request | CPU ms a MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        late = row["extra"]
        delays = f"{late['first_byte_p50_ms']:.1f} | {late['first_byte_p95_ms']:.1f} | {late['chunk_p50_us']:.0f}"
        cpu = f"{row['cpu_us'] / 1000:.1f} | {late['cpu_ms_per_mb']:.0f}" if row["cpu_us"] else " | "
        lines.append(f"| {row['name']} | {delays} | {row['per_second']:.0f} | {cpu} |")
    return lines


STREAM = """An agent takes a turn five times a second on SQLite, in the process that serves {listeners} WebSockets; its
events have a text of two thousand characters. The listeners run in another process on the same cores. Lateness is the
time from the journal's timestamp of an event until a listener has it, over all events and all who read.
"""


def _stream(result: dict[str, Any]) -> list[str]:
    """Render the lateness of events, and the effect of a stalled listener."""
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
    return [*lines, "", f"A stalled listener changes others' p99 by {change:+.0f} % and a turn's p50 by {turn:+.0f} %."]


def _autonomy(result: dict[str, Any]) -> list[str]:
    """Render the figures of sleepers, against our goals."""
    notes = result["notes"]
    values = {row["name"]: row["value"] for row in result["rows"]}
    memory = values["memory of a sleeping agent"]
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
        commits_text = "1" if commits is None else f"{commits:.3f}"
        ratio = row["per_second"] / base[row["group"]]
        rate = f"{row['per_second']:,.0f} {row['unit']}s"
        lines.append(f"| {row['name']} | {rate} | {row['cpu_us']:,.0f} | {ratio:.2f}× | {commits_text} |")
    lines += ["", "| disk | bytes written per event | syncs per event | bytes kept per event |", "|---|---:|---:|---:|"]
    for name, disk in result["notes"].items():
        bytes_kept = f"{disk['bytes_kept_per_event']:,.0f}" if "bytes_kept_per_event" in disk else ""
        lines.append(
            f"| {name.removeprefix('disk of ')} | {disk['bytes_written_per_event']:,.0f} "
            f"| {disk['syncs_per_event']:.3f} | {bytes_kept} |"
        )
    return lines


def _guard(result: dict[str, Any]) -> list[str]:
    groups = ("calls", "usual", "hostile", "anonymizing")
    rows = {group: [row for row in result["rows"] if row["group"] == group] for group in groups}
    lines = ["| through the guard | per second | CPU µs each |", "|---|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['per_second']:,.0f} {row['unit']}s | {row['cpu_us']:,.1f} |" for row in rows["calls"]
    ]
    lines += ["", "| taking secrets out of a text | MB per second of CPU |", "|---|---:|"]
    lines += [f"| {row['name']} | {1e6 / row['cpu_us']:,.0f} |" for row in rows["usual"]]
    lines += ["", "| taking secrets out of a hostile megabyte | CPU ms |", "|---|---:|"]
    lines += [f"| {row['name']} | {row['cpu_us'] / 1000:,.0f} |" for row in rows["hostile"]]
    if rows["anonymizing"]:
        lines += ["", "| a prompt for an agent with 1,000 names; hostile ones have 600 kB | CPU ms |", "|---|---:|"]
        lines += [f"| {row['name']} | {row['cpu_us'] / 1000:,.0f} |" for row in rows["anonymizing"]]
    return lines

"""`halter drill`: proofs of the promises on this machine."""

import asyncio
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from halter.cli.command import JsonOption, fail, read_cli_settings, report_errors
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table
from halter.cli.output import make_console as screen
from halter.cli.talk import resolve_agent_folder
from halter.core.errors import explain_extra
from halter.core.text import format_count, join_names
from halter_drills import DRILLS, find

if TYPE_CHECKING:
    from halter_drills.drill import Drill, DrillResult, Progress, Setting
    from halter_drills.inject.survey import Survey

ALL: Final = "all"
MOST: Final = 1_000_000
DRILL_INTERRUPTED: Final = "Interrupted. The drill has removed its own store, and touched no other."
NO_TOOLS: Final = "It has no tools, so an injected text reaches nothing."
PROGRESS_LINES: Final = 4
"""Lines of progress that a drill writes to a file or a pipe."""


@dataclass(frozen=True, slots=True)
class DrillRun:
    drill: "Drill"
    result: "DrillResult"
    seconds: float

    def line(self) -> str:
        found = format_count(self.result.violations, "violation") if self.result.violations else "no violation"
        where = f"{self.drill.name} on {self.result.store}"
        return (
            f"{where}: {format_count(self.result.cases, 'case')}, {found} ({self.seconds:.0f} s). {self.drill.proves}"
        )


def drill(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(DRILLS)}; or {ALL}.")],
    *,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="STORE",
            help="Run beside this store, without touching it (default: a throwaway SQLite file).",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            metavar="N",
            min=1,
            max=MOST,
            help="How many cases to run (default: enough to cover everything once).",
        ),
    ] = None,
    agent: Annotated[
        Path | None,
        typer.Option(
            "--agent",
            metavar="FOLDER",
            help="With inject: show which tools of this agent an injected text could reach. None of them is executed.",
        ),
    ] = None,
    as_json: JsonOption = False,
    teeth: Annotated[
        bool, typer.Option("--teeth", help="Break one part on purpose: every drill must then find violations.")
    ] = False,
) -> None:
    """Prove a promise on this machine. Exits 1 on any violation.

    A drill works on a file or schema of its own, and removes it afterwards.
    """
    from halter_drills.drill import Setting

    if store == "":
        fail("--store is empty: name a store, or leave it out for a throwaway SQLite file.", EXIT_USAGE)
    if name not in (*DRILLS, ALL):
        fail(f"There is no drill {name}: name one of {', '.join(DRILLS)}, or {ALL}.", EXIT_USAGE)
    console = screen(stderr=as_json)
    console.soft_wrap = not console.is_terminal
    setting = Setting(store, seeds, teeth)
    if agent is not None:
        _survey(name, agent, setting, console, as_json=as_json)
        return
    done = report_errors(lambda: list(_run_each_store(name, setting, console)), interrupted=DRILL_INTERRUPTED)
    results = [one.result for one in done]
    if as_json:
        answer_json(results if name == ALL else results[0])
    else:
        _show(done)
    _judge(results, console, teeth=teeth)


def _survey(name: str, folder: Path, setting: "Setting", console: Console, *, as_json: bool) -> None:
    """Show what an injected text could do with the tools of a person's own agent."""
    from halter_drills.drill import translate_errors
    from halter_drills.inject.survey import list_survey_rows, survey_agent

    if name != "inject" or setting.teeth or setting.seeds:
        fail("--agent goes with halter drill inject, without --seeds and --teeth.", EXIT_USAGE)
    path = resolve_agent_folder(folder)

    def job() -> "Survey":
        with _progress(f"inject on {path.name}", console) as progress, translate_errors():
            made = survey_agent(path, read_cli_settings(None), replace(setting, progress=progress))
            return asyncio.run(made)

    found = report_errors(job, interrupted=DRILL_INTERRUPTED)
    if as_json:
        answer_json(found)
        return
    columns = ["tool", "reach", "now", "ask", "asked", "declare"]
    title = f"Arguments by which an injected text reaches a tool of {found.agent}: now ({found.mode}), and with ask"
    answer_table(title, columns, list_survey_rows(found), long="now ask asked declare", empty=NO_TOOLS)
    sources = join_names(found.sources) or "no tool"
    console.print(f"What others wrote comes from {sources}.", markup=False)
    console.print(
        f"Of {format_count(found.tools, 'tool')} an injected text reaches {join_names(found.reached) or 'none'} now, "
        f"and {join_names(found.reached_in_ask) or 'none'} with `provenance: ask`.",
        markup=False,
    )


def _run_each_store(name: str, setting: "Setting", console: Console) -> Generator[DrillRun]:
    """Run one drill, or all: on SQLite, and then on a throwaway PostgreSQL if no store is named."""
    from halter_drills.drill import kind_of

    kind = kind_of(setting.store)
    wanted = [find(each) for each in (DRILLS if name == ALL else (name,))]
    if name == ALL:
        wanted = list(_filter_runnable(wanted, console))
    # One that runs on PostgreSQL only brings a server of its own, if no store is named.
    bringing = [each for each in wanted if setting.store is None and kind not in each.stores]
    fitting = [each for each in wanted if kind in each.stores]
    if not fitting and not bringing:
        fail(f"The drill {name} runs on {' and '.join(wanted[0].stores)} only: name another --store.", EXIT_USAGE)
    also = [each for each in fitting if "postgresql" in each.stores and name == ALL and setting.store is None]
    lacking = _find_missing() if also else ""
    if lacking:
        console.print(f"PostgreSQL is left out. {lacking}", markup=False)
        also = bringing = []
    total = len(fitting) + len(also) + len(bringing)
    places = (f"drill {number} of {total}: " if total > 1 else "" for number in count(1))
    yield from _run_drills(fitting, setting, console, places)
    if also:
        with _server() as url:
            yield from _run_drills(also, replace(setting, store=url), console, places)
    if bringing:
        with _set_up():
            yield from _run_drills(bringing, setting, console, places)


def _filter_runnable(wanted: Sequence["Drill"], console: Console) -> Iterator["Drill"]:
    for each in wanted:
        if lacking := each.lacking():
            console.print(f"{each.name} is left out. {lacking}", markup=False)
        else:
            yield each


@contextmanager
def _server() -> Generator[str]:
    from halter.testing.postgres import throwaway_cluster

    with _set_up(), throwaway_cluster() as cluster:
        yield cluster.url


@contextmanager
def _set_up() -> Generator[None]:
    from halter.testing.postgres import PostgresMissing

    try:
        yield
    except CalledProcessError as error:
        text = " ".join(error.stderr.decode("utf-8", "replace").split())
        raise PostgresMissing(
            f"A throwaway PostgreSQL could not be set up ({text}): name a server of yours with --store."
        ) from error


def _find_missing() -> str:
    from importlib.util import find_spec

    from halter.testing.postgres import PostgresMissing, find_postgres_binaries

    try:
        find_postgres_binaries()
    except PostgresMissing as missing:
        return str(missing)
    return "" if find_spec("psycopg") else explain_extra("postgres")


def _run_drills(
    drills: Iterable["Drill"], setting: "Setting", console: Console, places: Iterator[str]
) -> Generator[DrillRun]:
    from halter_drills.drill import kind_of, translate_errors

    for each in drills:
        began = time.monotonic()
        kind = kind_of(setting.store)
        name = f"{next(places)}{each.name} on {kind if kind in each.stores else each.stores[0]}"
        with _progress(name, console) as progress, translate_errors():
            result = each.run(replace(setting, progress=progress))
        done = DrillRun(each, result, time.monotonic() - began)
        if console.is_terminal:
            console.print(done.line(), markup=False)
        yield done


@contextmanager
def _progress(name: str, console: Console) -> Generator["Progress"]:
    if not console.is_terminal:
        yield _lines(name, console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}", style="dim")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), note, console=console, transient=True) as live:
        task = live.add_task(name, total=None, note="")
        yield lambda done, total, note: live.update(task, completed=done, total=total, note=note)


def _lines(name: str, console: Console) -> "Progress":
    told = 0

    def progress(done: int, total: int, note: str) -> None:
        nonlocal told
        share = PROGRESS_LINES * done // max(total, 1)
        if share > told:
            told = share
            console.print(f"{name}: {done} of {total} ({note})", markup=False)

    return progress


def _show(done: Sequence[DrillRun]) -> None:
    columns = ["drill", "what it proves", "store", "cases", "violations", "seconds"]
    rows = [
        [
            one.drill.name,
            one.drill.proves,
            one.result.store,
            f"{one.result.cases:,}",
            f"{one.result.violations:,}",
            f"{one.seconds:.1f}",
        ]
        for one in done
    ]
    answer_table("Drills", columns, rows, right="cases violations seconds")


def _judge(results: Sequence["DrillResult"], console: Console, *, teeth: bool) -> None:
    found = [result for result in results if result.violations]
    if teeth:
        blind = [f"{result.drill} on {result.store}" for result in results if not result.violations]
        if blind:
            fail(f"One part was broken on purpose, and nothing was found by {', '.join(blind)}.", EXIT_FAILED)
        console.print("One part was broken on purpose, and every drill found it: so they can be believed.")
        return
    for result in found:
        for sentence in result.detail["violations"]:
            console.print(f"{result.drill} on {result.store}: {sentence}", markup=False)
    if found:
        fail(f"{format_count(sum(result.violations for result in found), 'violation')} in all.", EXIT_FAILED)
    console.print(f"{format_count(sum(result.cases for result in results), 'case')}, no violation.")

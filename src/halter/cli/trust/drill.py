"""`halter drill`: tests of Halter's promises on this machine."""

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

from halter.cli.command import JsonOption, fail, read_cli_settings, report_errors, resolve_agent_folder
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, make_console
from halter.core.errors import explain_extra
from halter.core.text import format_count, join_names
from halter.testing.postgres import PostgresMissing, find_postgres_binaries, throwaway_cluster
from halter_drills import DRILLS, find
from halter_drills.drill import Drill, DrillResult, Progress, Setting, kind_of, translate_errors

if TYPE_CHECKING:
    from halter_drills.inject.survey import Survey


ALL_DRILLS: Final = "all"
MAX_SEEDS: Final = 1_000_000
DRILL_INTERRUPTED: Final = "Interrupted. The drill has removed its own store and changed no other."
NO_TOOLS: Final = "The agent has no tools, so an injected text reaches nothing."
PROGRESS_LINES: Final = 4
"""Lines of progress that a drill writes to a file or a pipe."""


@dataclass(frozen=True, slots=True)
class DrillRun:
    drill: Drill
    result: DrillResult
    seconds: float

    def line(self) -> str:
        violations = format_count(self.result.violations, "violation") if self.result.violations else "no violation"
        title = f"{self.drill.name} on {self.result.store}"
        cases = format_count(self.result.cases, "case")
        return f"{title}: {cases}, {violations} ({self.seconds:.0f} s). {self.drill.proves}"


def drill(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(DRILLS)}; or {ALL_DRILLS}.")],
    *,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="STORE",
            help="Run next to this store, without changing it (default: a throwaway SQLite file).",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            metavar="N",
            min=1,
            max=MAX_SEEDS,
            help="Number of cases to run (default: enough to cover everything once).",
        ),
    ] = None,
    agent: Annotated[
        Path | None,
        typer.Option(
            "--agent",
            metavar="FOLDER",
            help="With inject: show which tools of this agent an injected text can reach. No tool is executed.",
        ),
    ] = None,
    as_json: JsonOption = False,
    teeth: Annotated[
        bool, typer.Option("--teeth", help="Break one part deliberately: every drill must then find violations.")
    ] = False,
) -> None:
    """Test one of Halter's promises on this machine. Exits 1 on any violation.

    A drill works on its own file or schema, and removes it afterwards.
    """
    if store == "":
        fail("--store is empty. Pass a store, or omit the option to use a throwaway SQLite file.", EXIT_USAGE)
    if name not in (*DRILLS, ALL_DRILLS):
        fail(f"Unknown drill {name}. Use one of {', '.join(DRILLS)}, or {ALL_DRILLS}.", EXIT_USAGE)
    console = make_console(stderr=as_json)
    console.soft_wrap = not console.is_terminal
    setting = Setting(store, seeds, teeth)
    if agent is not None:
        _survey(name, agent, setting, console, as_json=as_json)
        return
    runs = report_errors(lambda: list(_run_each_store(name, setting, console)), interrupted=DRILL_INTERRUPTED)
    results = [run.result for run in runs]
    if as_json:
        answer_json(results if name == ALL_DRILLS else results[0])
    else:
        _show(runs)
    _judge(results, console, teeth=teeth)


def _survey(name: str, folder: Path, setting: Setting, console: Console, *, as_json: bool) -> None:
    """Show which tools of an agent an injected text can reach."""
    from halter_drills.inject.survey import list_survey_rows, survey_agent

    if name != "inject" or setting.teeth or setting.seeds:
        fail("--agent requires the drill inject, and cannot be combined with --seeds or --teeth.", EXIT_USAGE)
    path = resolve_agent_folder(folder)

    def job() -> "Survey":
        with _progress(f"inject on {path.name}", console) as progress, translate_errors():
            survey_job = survey_agent(path, read_cli_settings(None), replace(setting, progress=progress))
            return asyncio.run(survey_job)

    survey = report_errors(job, interrupted=DRILL_INTERRUPTED)
    if as_json:
        answer_json(survey)
        return
    columns = ["tool", "reach", "now", "ask", "asked", "declare"]
    title = (
        f"Arguments through which an injected text reaches a tool of {survey.agent}: now ({survey.mode}), and with ask"
    )
    answer_table(title, columns, list_survey_rows(survey), long="now ask asked declare", empty=NO_TOOLS)
    sources = join_names(survey.sources) or "no tool"
    console.print(f"Untrusted content comes from {sources}.", markup=False)
    console.print(
        f"Of {format_count(survey.tools, 'tool')}, an injected text reaches {join_names(survey.reached) or 'none'} "
        f"now, and {join_names(survey.reached_in_ask) or 'none'} with `provenance: ask`.",
        markup=False,
    )


def _run_each_store(name: str, setting: Setting, console: Console) -> Generator[DrillRun]:
    """Run one drill, or all: on SQLite, and then on a throwaway PostgreSQL if no store is given."""
    kind = kind_of(setting.store)
    drills = [find(each) for each in (DRILLS if name == ALL_DRILLS else (name,))]
    if name == ALL_DRILLS:
        drills = list(_filter_runnable(drills, console))
    # A drill that runs only on PostgreSQL starts its own server if no store is given.
    self_hosting_drills = [each for each in drills if setting.store is None and kind not in each.stores]
    fitting_drills = [each for each in drills if kind in each.stores]
    if not fitting_drills and not self_hosting_drills:
        fail(f"The drill {name} runs on {' and '.join(drills[0].stores)} only. Choose another --store.", EXIT_USAGE)
    postgres_drills = [
        each for each in fitting_drills if "postgresql" in each.stores and name == ALL_DRILLS and setting.store is None
    ]
    missing = _find_missing() if postgres_drills else ""
    if missing:
        console.print(f"Skipped PostgreSQL. {missing}", markup=False)
        postgres_drills = self_hosting_drills = []
    total = len(fitting_drills) + len(postgres_drills) + len(self_hosting_drills)
    prefixes = (f"drill {number} of {total}: " if total > 1 else "" for number in count(1))
    yield from _run_drills(fitting_drills, setting, console, prefixes)
    if postgres_drills:
        with _server() as url:
            yield from _run_drills(postgres_drills, replace(setting, store=url), console, prefixes)
    if self_hosting_drills:
        with _set_up():
            yield from _run_drills(self_hosting_drills, setting, console, prefixes)


def _filter_runnable(drills: Sequence[Drill], console: Console) -> Iterator[Drill]:
    for candidate in drills:
        if missing := candidate.lacking():
            console.print(f"Skipped {candidate.name}. {missing}", markup=False)
        else:
            yield candidate


@contextmanager
def _server() -> Generator[str]:
    with _set_up(), throwaway_cluster() as cluster:
        yield cluster.url


@contextmanager
def _set_up() -> Generator[None]:
    try:
        yield
    except CalledProcessError as error:
        text = " ".join(error.stderr.decode("utf-8", "replace").split())
        raise PostgresMissing(f"Cannot start a throwaway PostgreSQL ({text}). Pass a server with --store.") from error


def _find_missing() -> str:
    from importlib.util import find_spec

    try:
        find_postgres_binaries()
    except PostgresMissing as missing:
        return str(missing)
    return "" if find_spec("psycopg") else explain_extra("postgres")


def _run_drills(
    drills: Iterable[Drill], setting: Setting, console: Console, prefixes: Iterator[str]
) -> Generator[DrillRun]:
    for candidate in drills:
        started_at = time.monotonic()
        kind = kind_of(setting.store)
        name = f"{next(prefixes)}{candidate.name} on {kind if kind in candidate.stores else candidate.stores[0]}"
        with _progress(name, console) as progress, translate_errors():
            result = candidate.run(replace(setting, progress=progress))
        run = DrillRun(candidate, result, time.monotonic() - started_at)
        if console.is_terminal:
            console.print(run.line(), markup=False)
        yield run


@contextmanager
def _progress(name: str, console: Console) -> Generator[Progress]:
    if not console.is_terminal:
        yield _lines(name, console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}", style="dim")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), note, console=console, transient=True) as live:
        task = live.add_task(name, total=None, note="")
        yield lambda done, total, note: live.update(task, completed=done, total=total, note=note)


def _lines(name: str, console: Console) -> Progress:
    reported_share = 0

    def progress(done: int, total: int, note: str) -> None:
        nonlocal reported_share
        share = PROGRESS_LINES * done // max(total, 1)
        if share > reported_share:
            reported_share = share
            console.print(f"{name}: {done} of {total} ({note})", markup=False)

    return progress


def _show(runs: Sequence[DrillRun]) -> None:
    columns = ["drill", "what it proves", "store", "cases", "violations", "seconds"]
    rows = [
        [
            run.drill.name,
            run.drill.proves,
            run.result.store,
            f"{run.result.cases:,}",
            f"{run.result.violations:,}",
            f"{run.seconds:.1f}",
        ]
        for run in runs
    ]
    answer_table("Drills", columns, rows, right="cases violations seconds")


def _judge(results: Sequence[DrillResult], console: Console, *, teeth: bool) -> None:
    violating = [result for result in results if result.violations]
    if teeth:
        blind_drills = [f"{result.drill} on {result.store}" for result in results if not result.violations]
        if blind_drills:
            fail(
                f"One part was broken deliberately, but these drills found no violation: {', '.join(blind_drills)}.",
                EXIT_FAILED,
            )
        console.print("One part was broken deliberately, and every drill found it.")
        return
    for result in violating:
        for sentence in result.detail["violations"]:
            console.print(f"{result.drill} on {result.store}: {sentence}", markup=False)
    if violating:
        fail(f"{format_count(sum(result.violations for result in violating), 'violation')} in total.", EXIT_FAILED)
    console.print(f"{format_count(sum(result.cases for result in results), 'case')}, no violation.")

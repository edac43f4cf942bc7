"""`halter drill`: proofs of the promises, on this machine, before anyone goes to sleep."""

import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from halter.cli.command import NOT_FINE, WRONG_USE, JsonOption, answer_json, answer_table, fail, saying_errors
from halter.drills import DRILLS, find

if TYPE_CHECKING:
    from halter.drills.drill import Drill, Progress, Result, Setting

ALL: Final = "all"
INTERRUPTED: Final = 130
SHARES: Final = 4
"""How many lines of progress a drill writes where nobody watches it live."""


@dataclass(frozen=True, slots=True)
class Done:
    """A drill that was run, and how long it took."""

    drill: "Drill"
    result: "Result"
    seconds: float

    def line(self) -> str:
        """Say how it went, for somebody who watches."""
        found = f"{self.result.violations:,} violations" if self.result.violations else "no violation"
        where = f"{self.drill.name} on {self.result.store}"
        return f"{where}: {self.result.cases:,} cases, {found} ({self.seconds:.0f} s). {self.drill.proves}"


def drill(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(DRILLS)}; or {ALL}.")],
    *,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", help="Run beside this store, without touching it (without it, on a throwaway SQLite file)."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="How many cases to run.")] = None,
    as_json: JsonOption = False,
    teeth: Annotated[
        bool, typer.Option("--teeth", help="Break one part on purpose: every drill must then find violations.")
    ] = False,
) -> None:
    """Prove a promise on this machine. Leaves with 1 on any violation.

    A drill works on a file or a schema of its own and removes it afterwards.
    """
    from halter.drills.drill import Setting

    if name not in (*DRILLS, ALL):
        fail(f"There is no drill {name}: name one of {', '.join(DRILLS)}, or {ALL}.", WRONG_USE)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    setting = Setting(store, seeds, teeth)
    done = saying_errors(lambda: _uninterrupted(lambda: list(_run(name, setting, console))))
    results = [one.result for one in done]
    if as_json:
        answer_json(results if name == ALL else results[0])
    else:
        _show(done)
    _judge(results, console, teeth=teeth)


def _uninterrupted(job: Callable[[], list[Done]]) -> list[Done]:
    """Let a drill clean up behind itself also when it is told to end."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return job()
    except KeyboardInterrupt:
        fail("Interrupted. The drill has removed its own store, and touched no other.", INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(name: str, setting: "Setting", console: Console) -> Generator[Done]:
    """Run one drill, or all: on SQLite, and then on a throwaway PostgreSQL if no store is named."""
    from halter.drills.drill import kind_of

    kind = kind_of(setting.store)
    wanted = [find(each) for each in (DRILLS if name == ALL else (name,))]
    fitting = [each for each in wanted if kind in each.stores]
    if not fitting:
        fail(f"The drill {name} runs on {' and '.join(wanted[0].stores)} only: name another --store.", WRONG_USE)
    yield from _on(fitting, setting, console)
    if name == ALL and setting.store is None:
        yield from _on_postgresql([each for each in wanted if "postgresql" in each.stores], setting, console)


def _on(drills: Iterable["Drill"], setting: "Setting", console: Console) -> Generator[Done]:
    from halter.drills.drill import kind_of

    for each in drills:
        began = time.monotonic()
        with _progress(f"{each.name} on {kind_of(setting.store)}", console) as progress:
            result = each.run(replace(setting, progress=progress))
        done = Done(each, result, time.monotonic() - began)
        if console.is_terminal:
            console.print(done.line(), markup=False)
        yield done


def _on_postgresql(drills: Sequence["Drill"], setting: "Setting", console: Console) -> Generator[Done]:
    from importlib.util import find_spec

    from halter.testing.postgres import PostgresMissing, binaries, throwaway_cluster

    try:
        binaries()
    except PostgresMissing as missing:
        console.print(f"PostgreSQL is left out. {missing}", markup=False)
        return
    if find_spec("psycopg") is None:
        console.print("PostgreSQL is left out: install its driver with pip install 'halter[postgres]'.", markup=False)
        return
    with throwaway_cluster() as cluster:
        yield from _on(drills, replace(setting, store=cluster.url), console)


@contextmanager
def _progress(name: str, console: Console) -> Generator["Progress"]:
    """Show a drill at work: live to a person, in a few plain lines to a file or a pipe."""
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
        share = SHARES * done // max(total, 1)
        if share > told:
            told = share
            console.print(f"{name}: {done} of {total} ({note})", markup=False)

    return progress


def _show(done: Sequence[Done]) -> None:
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


def _judge(results: Sequence["Result"], console: Console, *, teeth: bool) -> None:
    """Say what it comes to, and leave with 1 if that is not what it should be."""
    found = [result for result in results if result.violations]
    if teeth:
        blind = [f"{result.drill} on {result.store}" for result in results if not result.violations]
        if blind:
            fail(f"One part was broken on purpose, and nothing was found by {', '.join(blind)}.", NOT_FINE)
        console.print("One part was broken on purpose, and every drill found it: so they can be believed.")
        return
    for result in found:
        for sentence in result.detail["violations"]:
            console.print(f"{result.drill} on {result.store}: {sentence}", markup=False)
    if found:
        fail(f"{sum(result.violations for result in found):,} violations were found.", NOT_FINE)
    console.print(f"{sum(result.cases for result in results):,} cases, no violation.")

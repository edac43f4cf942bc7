"""What every command shares: opening the store, saying what went wrong, and two ways of answering."""

import asyncio
import os
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halter.app import App, open_app
from halter.core.errors import HalterError, StoreUnusable
from halter.settings import Settings, read_settings

T = TypeVar("T")

NOT_FINE: Final = 1
WRONG_USE: Final = 2
UNUSABLE: Final = 3
OURS: Final = 70

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", help="The store: a file, or postgresql://… (without it $HALTER_STORE, else one in your home folder)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]


def settings_for(store: str | None) -> Settings:
    """Read the environment, here and nowhere further in."""
    return read_settings(os.environ, Path.home(), store)


def with_app(store: str | None, job: Callable[[App], Awaitable[T]]) -> T:
    """Do a job on a store that is there, with everything opened and closed around it.

    A store that is not there is never made by looking at it: a slip in its name must not look like good news.
    """

    async def main() -> T:
        settings = settings_for(store)
        refuse_missing(settings.store)
        async with open_app(settings) as app:
            return await job(app)

    return saying_errors(lambda: asyncio.run(main()))


def refuse_missing(url: str) -> None:
    """Say that there is no such store, rather than make an empty one."""
    from halter.journal.open import is_there, masked

    if not is_there(url):
        raise StoreUnusable(f"There is no store {masked(url)}: check the name, or start something that makes it.")


def saying_errors(job: Callable[[], T]) -> T:
    """Turn an error of the world into its sentence and an exit code; nobody is shown a traceback."""
    try:
        return job()
    except HalterError as error:
        fail(str(error), UNUSABLE)
    except KeyboardInterrupt:
        fail("Interrupted; what was committed stands.", 130)


def fail(sentence: str, code: int) -> NoReturn:
    """Say a sentence to the person and leave with a code for scripts."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, style="red", markup=False)
    raise typer.Exit(code)


def confess(mistake: Exception) -> NoReturn:
    """Say that Halter itself is wrong, and keep what is needed to mend it."""
    with tempfile.NamedTemporaryFile("w", prefix="halter-mistake-", suffix=".txt", delete=False) as kept:
        kept.write("".join(traceback.format_exception(mistake)))
    sentence = f"Halter made a mistake ({type(mistake).__name__}: {mistake}). Please report it with {kept.name}."
    Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, style="red", markup=False)
    raise SystemExit(OURS)


def answer_json(value: object) -> None:
    """Print a value as JSON; amounts stay integers of micro-dollars, times integers of microseconds."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n")


def answer_table(title: str, columns: list[str], rows: list[list[str]], *, right: str = "", empty: str = "") -> None:
    """Print a table for people; `right` names the columns of numbers, `empty` what to say where there is nothing."""
    if not rows and empty:
        typer.echo(empty)
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        number = column in right.split()
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)

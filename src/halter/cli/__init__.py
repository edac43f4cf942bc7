"""The command line: each group of commands has a module of its own, and `build` brings them together."""

from typing import Annotated

import typer

from halter import __version__


def build() -> typer.Typer:
    app = typer.Typer(name="halter", no_args_is_help=True)
    app.callback()(_root)
    return app


def main() -> None:
    build()()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halter {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Let agents work while you sleep: they cannot overspend, overstep or lose what they did."""

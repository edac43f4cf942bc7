"""The command line: each group of commands has a module of its own, and `build` brings them together."""

from typing import Annotated

import typer

from halter import __version__
from halter.cli import budget, command, doctor, drill, journal, look, steer


def build() -> typer.Typer:
    app = typer.Typer(name="halter", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for command_of_look in (look.sessions, look.show, look.receipt):
        app.command(rich_help_panel="Look")(command_of_look)
    for command_of_steer in (steer.inbox, steer.approve, steer.deny, steer.halt, steer.resume):
        app.command(rich_help_panel="Steer")(command_of_steer)
    app.add_typer(budget.build(), rich_help_panel="Steer")
    app.command(rich_help_panel="Trust")(look.audit)
    app.command("verify", rich_help_panel="Trust")(journal.verify)
    app.command("erase", rich_help_panel="Trust")(journal.erase)
    app.command("drill", rich_help_panel="Trust")(drill.drill)
    app.command("doctor", rich_help_panel="Trust")(doctor.doctor)
    return app


def main() -> None:
    """Run the command. A mistake of ours is said as one; its traceback goes to a file, not to the person."""
    try:
        command.saying_errors(build())
    except Exception as mistake:  # noqa: BLE001  the outermost door: nothing further out could answer
        command.confess(mistake)


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

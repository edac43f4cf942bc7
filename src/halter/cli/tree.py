"""All commands: each group of them has a module of its own, and here they come together."""

from typing import Annotated

import typer

from halter import __version__
from halter.cli import (
    audit,
    budget,
    decide,
    doctor,
    drill,
    exporting,
    findings,
    init,
    journal,
    look,
    play,
    proposals,
    receipt,
    report,
    route,
    rules,
    schedules,
    schema,
    serve,
    steer,
    tail,
    talk,
    tokens,
    up,
)
from halter.cli.plain import PlainCommand, PlainGroup


def tree() -> typer.Typer:
    """Make the commands, grouped as the help shows them."""
    app = typer.Typer(name="halter", cls=PlainGroup, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for panel, commands in _PANELS.items():
        for command in commands:
            app.command(rich_help_panel=panel, cls=PlainCommand)(command)
    for panel, groups in _GROUPS.items():
        for group in groups:
            app.add_typer(group.build(), rich_help_panel=panel)
    return app


_PANELS = {
    "Run": (init.init, talk.run, talk.chat, play.play, route.route),
    "Run by themselves": (up.up, serve.serve, up.on, up.off),
    "Look": (look.sessions, look.show, tail.tail, receipt.receipt, report.report, exporting.export),
    "Steer": (decide.inbox, decide.approve, decide.deny, steer.halt, steer.resume, steer.cancel),
    "Trust": (play.trust, audit.audit, journal.verify, journal.erase, drill.drill, doctor.doctor, schema.schema),
}


_GROUPS = {
    "Run by themselves": (schedules,),
    "Look": (findings, proposals),
    "Steer": (rules, budget),
    "Trust": (tokens,),
}


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

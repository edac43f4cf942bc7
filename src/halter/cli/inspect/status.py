"""`halter status`: the state of all agents, once or live."""

import sys
from typing import Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    command,
    fail,
)
from halter.cli.exit_codes import EXIT_USAGE
from halter.operations.status import read_status
from halter.present.report import build_status_sheet

_show_status = command(read_status, "", build_status_sheet, despite_doubt=True, allow_missing=True)

TOKEN_VARIABLE: Final = "HALTER_TOKEN"  # noqa: S105 - the name of a variable
ServerOption = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", help=f"Watch a server instead of a store, with the token in ${TOKEN_VARIABLE}."
    ),
]
OnceOption = Annotated[bool, typer.Option("--once", help="Print the live view once and exit.")]


def status(
    *,
    live: Annotated[
        bool, typer.Option("--live", help="Watch and control the fleet in a live terminal until you quit.")
    ] = False,
    once: OnceOption = False,
    server: ServerOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of all agents: where each runs, what it waits for, its spending and caps, and its next wake.

    Below the agents is everything that needs you, with the commands that answer it, as in `halter inbox`.

    With --live, watch sessions and their spending, what needs you, caps and workers. Answer a decision with y, n or e;
    type a scope to halt it. With --live --once, print the view for a pipe or a script.
    """
    if live:
        top(once=once, server=server, store=store, as_json=as_json)
    elif once or server:
        fail("--once and --server require --live.", EXIT_USAGE)
    else:
        _show_status(store=store, as_json=as_json)


def top(
    *, once: OnceOption = False, server: ServerOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Watch and control the fleet in a live terminal: sessions and their spending, what needs you, caps, workers.

    Answer a decision with y, n or e; type a scope to halt it. With --once, print the view for a pipe or a script.
    """
    if as_json and not once:
        fail("--json requires --once.", EXIT_USAGE)
    if server and store is not None:
        fail("--server cannot be combined with --store.", EXIT_USAGE)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("Not a terminal. Pass --once to print the view.", EXIT_USAGE)
    from halter.cli.inspect.live import show_fleet

    show_fleet(once=once, server=server, token_variable=TOKEN_VARIABLE, store=store, as_json=as_json)

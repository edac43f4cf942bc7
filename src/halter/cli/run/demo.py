"""`halter demo`: the worst night, with and without Halter; then a live agent that watches this machine."""

from typing import Annotated, Final

import typer

from halter.cli.command import JsonOption, fail, report_errors
from halter.cli.exit_codes import EXIT_USAGE

NIGHT_INTERRUPTED: Final = "Interrupted. The simulated night leaves nothing behind."


def demo(
    *,
    night_only: Annotated[bool, typer.Option("--night-only", help="Show only the worst night.")] = False,
    skip_night: Annotated[bool, typer.Option("--skip-night", help="Start with the live agent.")] = False,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the dashboard's address, and open no browser.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the worst night without and with Halter, then run a live agent on this machine.

    Nothing is sent over the network, unless a model provider's key is in the environment. The agent has its own folder,
    next to your stores. Ctrl-C stops it, and the next start continues. --json prints only the figures of the night.
    """
    if skip_night and (night_only or as_json):
        fail("--skip-night cannot be combined with --night-only or --json.", EXIT_USAGE)
    live = not night_only and not as_json
    if not skip_night:
        from halter.cli.run.demo_night import show_night

        report_errors(lambda: show_night(as_json=as_json, is_recorded=live), interrupted=NIGHT_INTERRUPTED)
    if live:
        from halter.cli.run.demo_agent import run_live_demo

        run_live_demo(browser=not no_browser)

"""`halter demo`: the worst night, and then an agent that watches this machine."""

from typing import Annotated

import typer

from halter.cli.answer import answer_json
from halter.cli.command import WRONG_USE, JsonOption, fail, saying_errors

INTERRUPTED_NIGHT = "Interrupted. The night was made up, and left nothing behind."


def demo(
    *,
    night_only: Annotated[bool, typer.Option("--night-only", help="Show the worst night, and leave.")] = False,
    skip_night: Annotated[bool, typer.Option("--skip-night", help="Begin with the live agent.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the dashboard's address.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show in a minute what Halter is for: the worst night without and with it, then a live agent on this machine.

    Nothing is sent anywhere, unless the key of a provider of models is in the environment. The agent keeps to a folder
    of its own, beside your stores. In JSON, only the figures of the night are given.
    """
    if skip_night and (night_only or as_json):
        fail("--skip-night leaves nothing to show beside --night-only or --json: leave one of them out.", WRONG_USE)
    if not skip_night:
        _night(as_json=as_json)
    if night_only or as_json:
        return


def _night(*, as_json: bool) -> None:
    from halter.cli.night import conclude, introduce, whole_night

    if not as_json:
        introduce()
    night = saying_errors(lambda: whole_night(quiet=as_json), interrupted=INTERRUPTED_NIGHT)
    if as_json:
        answer_json(night)
    else:
        conclude(night)

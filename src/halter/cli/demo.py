"""`halter demo`: the worst night, and then an agent that watches this machine."""

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from halter.app import App
from halter.app.bus import Bus
from halter.cli.answer import answer_json, painted, say, warn
from halter.cli.command import INTERRUPTED, WRONG_USE, JsonOption, fail, saying_errors, with_app
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.settings import person_of

if TYPE_CHECKING:
    from halter.app.hooks import Hooks
    from halter.cli.printer import Printer
    from halter.demo.place import Furnished, Place

    Act = Callable[[], Coroutine[Any, Any, None]]

MADE_UP: Final = "Interrupted. The night was made up, and leaves nothing behind."
PLAN: Final = (
    "Within a minute the service that it watches goes down, and it asks you whether it may delete an old file."
)
STOPPED: Final = "night-watch is stopped. `halter demo --skip-night` goes on where it stands."


def demo(
    *,
    night_only: Annotated[bool, typer.Option("--night-only", help="Show the worst night, and leave.")] = False,
    skip_night: Annotated[bool, typer.Option("--skip-night", help="Begin with the live agent.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the dashboard's address.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what Halter is for: the worst night without it and with it, then a live agent on this machine.

    Nothing is sent anywhere, unless the key of a provider of models is in the environment. The agent keeps to a folder
    of its own, beside your stores. Ctrl-C ends it, and the next start goes on. In JSON there are only the figures of
    the night.
    """
    if skip_night and (night_only or as_json):
        fail("--skip-night leaves nothing for --night-only or --json to show: leave one of them out.", WRONG_USE)
    if not skip_night:
        _night(as_json=as_json)
    if not night_only and not as_json:
        _live(browser=not no_browser)


def _night(*, as_json: bool) -> None:
    saying_errors(lambda: _lived(as_json=as_json), interrupted=MADE_UP)


def _lived(*, as_json: bool) -> None:
    from halter.cli.night import conclude, introduce, whole_night

    if as_json:
        answer_json(whole_night(quiet=True))
    else:
        introduce()
        conclude(whole_night(quiet=False))


def _live(*, browser: bool) -> None:
    """Run the agent until somebody interrupts it, which is how it is meant to end."""
    from halter.cli.up import AGAIN
    from halter.demo.place import brain, furnish, place_of

    person = person_of(os.environ)
    place = saying_errors(lambda: place_of(os.environ, _home()))
    model = brain(os.environ)
    furnished = saying_errors(lambda: furnish(place, model, person, SystemClock().now()))
    words = words_for(place, model, furnished, _hidden())
    try:
        with_app(
            None,
            lambda app: _watched(app, place, words, browser=browser),
            new=True,
            acts=True,
            following=True,
            settings=place.settings(person),
            runs=AGAIN,
        )
    except typer.Exit as left:
        if left.exit_code != INTERRUPTED:
            raise
        # A terminal has just shown the keys that were pressed.
        say(f"\n{STOPPED}" if sys.stdout.isatty() else STOPPED)


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None


def _hidden() -> Path | None:
    """Find the folder of this program, if typing `halter` would not find it, as after `make run`."""
    import shutil

    program = Path(sys.argv[0]).absolute()
    return program.parent if program.name == "halter" and shutil.which("halter") is None else None


def words_for(place: "Place", model: str, furnished: "Furnished", hidden: Path | None = None) -> Sequence[str]:
    """Say what will be seen, what thinks and what it may cost, before anything starts."""
    from halter.demo.place import RULES

    with_what = "rules, without a network" if model == RULES else f"{model}, whose key is in your environment"
    return (
        "",
        f"Now a live one: night-watch looks after this machine. {PLAN}",
        *(() if "agent.yaml" in furnished.changed else (f"It thinks with {with_what}.",)),
        *furnished.told,
        f"All of it lies in {place.root}. You can also speak with it in another terminal:",
        *(() if hidden is None else (f"  export PATH={shlex.quote(str(hidden))}:$PATH",)),
        f"  export HALTER_STORE={shlex.quote(str(place.root / 'halter.db'))}",
        "  halter inbox",
    )


async def _watched(app: App, place: "Place", words: Sequence[str], *, browser: bool) -> None:
    """Run the agent with its dashboard, and show a line for whatever it does."""
    from halter.brain.together import together
    from halter.cli.printer import Printer
    from halter.cli.up import HOW_TO_STOP, bus_of, run_and_show, shows_of
    from halter.demo.scenery import Scenery

    bus = bus_of(app)
    async with Printer() as printer:
        shows = shows_of(printer, app.clock, as_json=False)
        for sentence in words:
            printer.put(painted(sentence))
        serving = _dashboard(app, bus, printer, browser=browser)
        printer.put(painted(f"{HOW_TO_STOP}\n"))
        around = Scenery(place.agent, app.clock).around
        running = [lambda: around(lambda: run_and_show(app, [place.agent], bus, shows, _no_deliveries, "demo"))]
        await together([*running, *serving])


async def _no_deliveries(_: "Hooks") -> None:
    """The agent has no webhooks."""


def _dashboard(app: App, bus: Bus, printer: "Printer", *, browser: bool) -> Sequence["Act"]:
    """Say where the dashboard is, and how it is served; without its libraries, say what is missing."""
    from halter.demo.dashboard import dashboard, has_display

    try:
        found = dashboard(app, bus, lambda sentence: warn(sentence, "red"))
    except ConfigError as error:
        printer.put(painted(str(error)))
        return ()
    # An address is one word: broken into lines it could not be followed.
    printer.put(f"{painted(found.told)}{found.url}\n")
    opens = [lambda: _opened(found.url)] if browser and has_display(os.environ) else []
    return (found.serve, *opens)


async def _opened(url: str) -> None:
    """Open a browser. Where that fails, the address stands on the screen."""
    import webbrowser

    with suppress(webbrowser.Error, OSError):
        await asyncio.to_thread(webbrowser.open, url)

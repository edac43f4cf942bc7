"""`halter demo`: the worst night, and then an agent that watches this machine."""

import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.app import App
from halter.cli.answer import answer_json, painted, say
from halter.cli.command import INTERRUPTED, WRONG_USE, JsonOption, fail, saying_errors, with_app
from halter.core.clock import SystemClock
from halter.core.ids import session_of
from halter.settings import person_of

if TYPE_CHECKING:
    from halter.demo.place import Furnished, Place

MADE_UP: Final = "Interrupted. The night was made up, and leaves nothing behind."
PLAN: Final = (
    "Within a minute the service that it watches goes down, and it asks you whether it may delete an old file."
)
STOPPED: Final = "night-watch is stopped. `halter demo --skip-night` goes on where it stands."


def demo(
    *,
    night_only: Annotated[bool, typer.Option("--night-only", help="Show the worst night, and leave.")] = False,
    skip_night: Annotated[bool, typer.Option("--skip-night", help="Begin with the live agent.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the dashboard's address.")] = False,  # noqa: ARG001
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
        _live()


def _night(*, as_json: bool) -> None:
    saying_errors(lambda: _lived(as_json=as_json), interrupted=MADE_UP)


def _lived(*, as_json: bool) -> None:
    from halter.cli.night import conclude, introduce, whole_night

    if as_json:
        answer_json(whole_night(quiet=True))
    else:
        introduce()
        conclude(whole_night(quiet=False))


def _live() -> None:
    """Run the agent until somebody interrupts it, which is how it is meant to end."""
    from halter.demo.place import brain, furnish, place_of

    person = person_of(os.environ)
    place = saying_errors(lambda: place_of(os.environ, _home()))
    model = brain(os.environ)
    furnished = saying_errors(lambda: furnish(place, model, person, SystemClock().now()))
    words = words_for(place, model, furnished)
    try:
        with_app(
            None, lambda app: _watched(app, place, words), new=True, following=True, settings=place.settings(person)
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


def words_for(place: "Place", model: str, furnished: "Furnished") -> Sequence[str]:
    """Say what will be seen, what thinks and what it may cost, before anything starts."""
    from halter.demo.place import RULES

    with_what = "rules, without a network" if model == RULES else f"{model}, whose key is in your environment"
    return (
        "",
        f"Now a live one: night-watch looks after this machine. {PLAN}",
        *(() if "agent.yaml" in furnished.changed else (f"It thinks with {with_what}.",)),
        *furnished.told,
        f"All of it lies in {place.root}. In another terminal:",
        f"  export HALTER_STORE={place.root / 'halter.db'}",
        "  halter inbox",
        "Ctrl-C stops this; the next start goes on where it stands.",
        "",
    )


async def _watched(app: App, place: "Place", words: Sequence[str]) -> None:
    """Run the agent, and show a line for whatever it does."""
    from halter.app.bus import Bus
    from halter.app.follow import heads
    from halter.app.up import Up
    from halter.brain.together import together
    from halter.cli.printer import Printer
    from halter.cli.up import Lines
    from halter.demo.scenery import Scenery
    from halter.journal.patient import PatientStore

    store = PatientStore(app.store, app.clock)
    bus, seen = Bus(store, app.clock), dict(await heads(store))
    async with Printer() as printer:
        lines = Lines(printer, app.clock)
        for sentence in words:
            printer.put(painted(sentence))
        up = Up(app, lines.told, bus.pulse)

        async def show() -> None:
            async with aclosing(bus.listen(seen, lambda stream: bool(session_of(stream)))) as items:
                async for item in items:
                    lines.show(item)
                    await printer.written()

        around = Scenery(place.agent, app.clock).around
        await together([lambda: around(lambda: up.run([place.agent])), show])

"""The worst night on the screen: two bills that grow beside each other, and at the end a table."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from halter.cli.answer import answer_table, say
from halter.core.clock import SECOND
from halter.core.text import counted

if TYPE_CHECKING:
    from halter.demo.figures import Night
    from halter.demo.night import Bill, Frame
    from halter.demo.scenes import Scene

PROMISE: Final = (
    "Let agents work while you sleep. They cannot spend more than you said, do what you did not allow, or lose what "
    "they did."
)
LEAST: Final = 4.0
"""In no fewer seconds an incident passes before somebody who watches."""
WIDE: Final = 80
"""Columns from which on an incident has a line to itself."""
LOSS: Final = "bold red"
GAIN: Final = "bold green"

Pause = Callable[[float], None]
Show = Callable[["Scene", "Frame"], None]


def whole_night(*, quiet: bool, pause: Pause = time.sleep) -> "Night":
    """Live through all incidents, shown as they go by, unless a program only wants the figures."""
    from halter.demo.figures import night, told
    from halter.demo.night import lived
    from halter.demo.scenes import SCENES

    with _shown(quiet=quiet, pause=pause) as show:
        incidents = [told(lived(scene, lambda frame, scene=scene: show(scene, frame))) for scene in SCENES]
    return night(incidents)


def introduce() -> None:
    """Say what is about to be seen, and why."""
    from halter.demo.provider import MODEL

    say(f"{PROMISE}\n")
    say(
        "The worst night comes first: three things that happen to agents nobody watches. Each is lived through twice, "
        f"in virtual time, with one scripted model at the price of {MODEL.model}: in a plain loop with retries and a "
        "budget check, and in Halter. It takes less than a minute, and Ctrl-C ends it.\n",
        at_once=True,
    )


@contextmanager
def _shown(*, quiet: bool, pause: Pause) -> Generator[Show]:
    """Show the night live at a terminal; elsewhere there is nobody to watch it."""
    console = Console(highlight=False)
    if quiet or not console.is_terminal:
        yield lambda _, __: None
        return
    from rich.live import Live

    frames: dict[str, Frame] = {}
    with Live(console=console, transient=True, auto_refresh=False) as live:
        began = time.monotonic()

        def show(scene: "Scene", frame: "Frame") -> None:
            nonlocal began
            frames[scene.title] = frame
            live.update(screen(frames, console.width), refresh=True)
            pause(max(0.0, began + LEAST * scene.frame / scene.span - time.monotonic()))
            began = time.monotonic()

        yield show


def screen(frames: "dict[str, Frame]", width: int) -> RenderableType:
    """Draw all that has happened so far: a line for each incident, or three where lines are short."""
    if width < WIDE:
        return Text("\n").join(_block(title, frame) for title, frame in frames.items())
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", width=18)
    for name in ("time", "a plain loop", "", "Halter", ""):
        table.add_column(name, justify="right")
    for title, frame in frames.items():
        table.add_row(title, _hour(frame.at), *_pair(frame.without, LOSS), *_pair(frame.within, GAIN))
    return table


def _pair(bill: "Bill", style: str) -> tuple[Text, Text]:
    from halter.demo.figures import cents

    return Text(counted(bill.requests, "request")), Text(cents(bill.cost_usd), style)


def _block(title: str, frame: "Frame") -> Text:
    without, within = _pair(frame.without, LOSS), _pair(frame.within, GAIN)
    return Text.assemble(
        f"{title}, {_hour(frame.at)}\n  a plain loop ",
        without[1],
        f" ({without[0]})\n  Halter ",
        within[1],
        f" ({within[0]})",
    )


def _hour(at: int) -> str:
    """Write the time of that night, which has no place on earth."""
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%H:%M")


def conclude(night: "Night") -> None:
    """Show the figures, and what they come to."""
    from halter.demo.figures import cents

    columns = ["what happens", "a plain loop", "Halter", "what stopped it"]
    rows = [
        [f"{each.title}. {each.happens}", _bill(each.without), _bill(each.within), each.stopped_by]
        for each in night.incidents
    ]
    answer_table("The worst night", columns, rows)
    passed = counted(night.overruns, "time") if night.overruns else "never"
    say(
        f"A plain loop paid {cents(night.without.cost_usd)} for {counted(night.without.requests, 'request')}. "
        f"Halter paid {cents(night.within.cost_usd)} for {night.within.requests:,}; a cap was {passed} passed.",
        at_once=True,
    )


def _bill(bill: "Bill") -> str:
    from halter.demo.figures import cents

    return f"{cents(bill.cost_usd)}\n{counted(bill.requests, 'request')}"

"""The worst night of `halter demo`, in the terminal."""

import os
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from halter.cli.output import answer_json, answer_table, print_sentence
from halter.core.clock import SECOND, SystemClock
from halter.core.text import format_count
from halter.demo.incidents import (
    MODEL,
    SCENES,
    Bill,
    Frame,
    Night,
    NightRecord,
    Scene,
    format_cents,
    play_incident,
    sum_night,
    summarize_incident,
)
from halter.settings import find_home, name_person

if TYPE_CHECKING:
    Act = Callable[[], Coroutine[Any, Any, None]]


PROMISE: Final = (
    "Let agents work while you sleep. They cannot spend more than you said, do what you did not allow, or lose what "
    "they did."
)
MIN_INCIDENT_SECONDS: Final = 4.0
"""The minimum time for which an incident is shown."""
MIN_WIDE_COLUMNS: Final = 80
"""With fewer columns, an incident takes three lines."""
LOSS: Final = "bold red"
GAIN: Final = "bold green"

Pause = Callable[[float], None]
Show = Callable[["Scene", "Frame"], None]


def run_whole_night(*, quiet: bool, pause: Pause = time.sleep, record: NightRecord | None = None) -> Night:
    with _show_live(quiet=quiet, pause=pause) as show:
        incidents = [
            summarize_incident(play_incident(scene, lambda frame, scene=scene: show(scene, frame), record))
            for scene in SCENES
        ]
    return sum_night(incidents)


def print_introduction() -> None:
    print_sentence(f"{PROMISE}\n")
    print_sentence(
        "The worst night comes first: three incidents of unattended agents. Each is played twice, "
        f"in virtual time, with one scripted model at the price of {MODEL.model}: in a plain loop with retries and a "
        "budget check, and in Halter. It takes less than a minute. Ctrl-C stops it.\n",
        at_once=True,
    )


@contextmanager
def _show_live(*, quiet: bool, pause: Pause) -> Generator[Show]:
    console = Console(highlight=False)
    if quiet or not console.is_terminal:
        yield lambda _, __: None
        return
    from rich.live import Live

    frames: dict[str, Frame] = {}
    with Live(console=console, transient=True, auto_refresh=False) as live:
        last_frame_at = time.monotonic()

        def show(scene: Scene, frame: Frame) -> None:
            nonlocal last_frame_at
            frames[scene.title] = frame
            live.update(render_night(frames, console.width), refresh=True)
            pause(
                max(
                    0.0, last_frame_at + MIN_INCIDENT_SECONDS * scene.frame_interval / scene.duration - time.monotonic()
                )
            )
            last_frame_at = time.monotonic()

        yield show


def render_night(frames: dict[str, Frame], width: int) -> RenderableType:
    if width < MIN_WIDE_COLUMNS:
        return Text("\n").join(_block(title, frame) for title, frame in frames.items())
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", width=18)
    for name in ("time", "a plain loop", "", "Halter", ""):
        table.add_column(name, justify="right")
    for title, frame in frames.items():
        table.add_row(title, _hour(frame.at), *_pair(frame.without, LOSS), *_pair(frame.within, GAIN))
    return table


def _pair(bill: Bill, style: str) -> tuple[Text, Text]:
    return Text(format_count(bill.requests, "request")), Text(format_cents(bill.cost_usd), style)


def _block(title: str, frame: Frame) -> Text:
    loop_texts, halter_texts = _pair(frame.without, LOSS), _pair(frame.within, GAIN)
    return Text.assemble(
        f"{title}, {_hour(frame.at)}\n  a plain loop ",
        loop_texts[1],
        f" ({loop_texts[0]})\n  Halter ",
        halter_texts[1],
        f" ({halter_texts[0]})",
    )


def _hour(at: int) -> str:
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%H:%M")


def print_conclusion(night: Night) -> None:
    columns = ["what happens", "a plain loop", "Halter", "what stopped it"]
    rows = [
        [f"{incident.title}. {incident.happens}", _bill(incident.without), _bill(incident.within), incident.stopped_by]
        for incident in night.incidents
    ]
    answer_table("The worst night", columns, rows)
    overruns = f"a cap was exceeded {format_count(night.overruns, 'time')}" if night.overruns else "no cap was exceeded"
    print_sentence(
        f"A plain loop paid {format_cents(night.without.cost_usd)} for "
        f"{format_count(night.without.requests, 'request')}. "
        f"Halter paid {format_cents(night.within.cost_usd)} for {night.within.requests:,}; {overruns}.",
        at_once=True,
    )


def _bill(bill: Bill) -> str:
    return f"{format_cents(bill.cost_usd)}\n{format_count(bill.requests, 'request')}"


def show_night(*, as_json: bool, is_recorded: bool) -> None:
    if as_json:
        answer_json(run_whole_night(quiet=True))
        return
    print_introduction()
    if is_recorded:
        # It needs the extra of the server; the night alone does not.
        from halter.demo.folder import find_demo_folder, record_night

        with record_night(
            find_demo_folder(os.environ, find_home(os.environ)), name_person(os.environ), SystemClock().now()
        ) as record:
            print_conclusion(run_whole_night(quiet=False, record=record))
    else:
        print_conclusion(run_whole_night(quiet=False))

"""`halter demo`: the worst night, with and without Halter; then a live agent that watches this machine."""

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from halter.cli.command import JsonOption, fail, report_errors, run_with_app
from halter.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence, render_sentence, warn
from halter.core.clock import SECOND, SystemClock
from halter.core.errors import ConfigError
from halter.core.text import format_count
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.settings import find_home, name_person

if TYPE_CHECKING:
    from halter.cli.terminal import Printer
    from halter.demo.night import Bill, Frame, Night, NightRecord, Scene
    from halter.demo.place import DemoFolder, LayoutResult
    from halter.runtime.triggers import WebhookReceiver

    Act = Callable[[], Coroutine[Any, Any, None]]

NIGHT_INTERRUPTED: Final = "Interrupted. The night was made up, and leaves nothing behind."
DEMO_PLAN: Final = (
    "Within a minute the service that it watches goes down, and it asks you whether it may delete an old file."
)
NIGHT_KEPT: Final = (
    "The first night stays there too: its sessions, spending and brakes are on the dashboard, as those of bookkeeper, "
    "watchman and analyst."
)
DEMO_STOPPED: Final = "night-watch is stopped. `halter demo --skip-night` goes on where it stands."


def demo(
    *,
    night_only: Annotated[bool, typer.Option("--night-only", help="Show the worst night, and leave.")] = False,
    skip_night: Annotated[bool, typer.Option("--skip-night", help="Begin with the live agent.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the dashboard's address.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what Halter is for: the worst night without it and with it, then a live agent on this machine.

    Nothing is sent anywhere, unless a model provider's key is in the environment. The agent keeps to a folder of its
    own, beside your stores. Ctrl-C ends it, and the next start continues. --json prints only the figures of the night.
    """
    if skip_night and (night_only or as_json):
        fail("--skip-night leaves nothing for --night-only or --json to show: leave one of them out.", EXIT_USAGE)
    live = not night_only and not as_json
    if not skip_night:
        report_errors(lambda: _run_night(as_json=as_json, kept=live), interrupted=NIGHT_INTERRUPTED)
    if live:
        _live(browser=not no_browser)


def _run_night(*, as_json: bool, kept: bool) -> None:
    if as_json:
        answer_json(run_whole_night(quiet=True))
        return
    print_introduction()
    if kept:
        from halter.demo.place import find_demo_folder, record_night

        with record_night(
            find_demo_folder(os.environ, find_home(os.environ)), name_person(os.environ), SystemClock().now()
        ) as record:
            print_conclusion(run_whole_night(quiet=False, record=record))
    else:
        print_conclusion(run_whole_night(quiet=False))


def _live(*, browser: bool) -> None:
    """Run the agent until it is interrupted, which is its normal end."""
    from halter.cli.up import RESTART_HINT
    from halter.demo.place import choose_demo_model, find_demo_folder, lay_out_files

    person = name_person(os.environ)
    place = report_errors(lambda: find_demo_folder(os.environ, find_home(os.environ)))
    model = choose_demo_model(os.environ)
    furnished = report_errors(lambda: lay_out_files(place, model, person, SystemClock().now()))
    words = describe_demo(place, model, furnished, _find_hidden_program())
    try:
        run_with_app(
            None,
            lambda app: _run_demo_agent(app, place, words, browser=browser),
            new=True,
            acts=True,
            following=True,
            settings=place.settings(person),
            runs=RESTART_HINT,
        )
    except typer.Exit as left:
        if left.exit_code != EXIT_INTERRUPTED:
            raise
        # A terminal has just shown the keys that were pressed.
        print_sentence(f"\n{DEMO_STOPPED}" if sys.stdout.isatty() else DEMO_STOPPED)


def _find_hidden_program() -> Path | None:
    """Find the folder of this program, if it is not on PATH, as after `make run`."""
    import shutil

    program = Path(sys.argv[0]).absolute()
    return program.parent if program.name == "halter" and shutil.which("halter") is None else None


def describe_demo(
    place: "DemoFolder", model: str, furnished: "LayoutResult", hidden: Path | None = None
) -> Sequence[str]:
    from halter.demo.place import RULES_MODEL

    with_what = "rules, without a network" if model == RULES_MODEL else f"{model}, whose key is in your environment"
    return (
        "",
        f"Now a live one: night-watch looks after this machine. {DEMO_PLAN}",
        *(() if "agent.yaml" in furnished.changed else (f"It thinks with {with_what}.",)),
        *furnished.told,
        f"All of it lies in {place.root}. {NIGHT_KEPT} You can also use another terminal:",
        *(() if hidden is None else (f"  export PATH={shlex.quote(str(hidden))}:$PATH",)),
        f"  export HALTER_STORE={shlex.quote(str(place.store))}",
        "  halter inbox",
        "  halter serve                 # the dashboard, also after the demo has ended",
    )


async def _run_demo_agent(app: Runtime, place: "DemoFolder", words: Sequence[str], *, browser: bool) -> None:
    from halter.cli.terminal import Printer
    from halter.cli.up import HOW_TO_STOP, FeedPrinter, make_bus, run_and_show
    from halter.demo.place import Scenery
    from halter.loop.session_runtime import run_together

    bus = make_bus(app)
    async with Printer() as printer:
        shows = FeedPrinter(printer, app.clock, as_json=False)
        for sentence in words:
            printer.write(render_sentence(sentence))
        serving = _dashboard(app, bus, printer, browser=browser)
        printer.write(render_sentence(f"{HOW_TO_STOP}\n"))
        around = Scenery(place.agent, app.clock).around
        running = [lambda: around(lambda: run_and_show(app, [place.agent], bus, shows, _ignore_deliveries, "demo"))]
        await run_together([*running, *serving])


async def _ignore_deliveries(_: "WebhookReceiver") -> None:
    """The agent has no webhooks."""


def _dashboard(app: Runtime, bus: Bus, printer: "Printer", *, browser: bool) -> Sequence["Act"]:
    from halter.demo.place import has_display, open_demo_dashboard

    try:
        found = open_demo_dashboard(app, bus, lambda sentence: warn(sentence, "red"))
    except ConfigError as error:
        printer.write(render_sentence(str(error)))
        return ()
    # An address is one word: broken into lines it could not be followed.
    printer.write(f"{render_sentence(found.told)}{found.url}\n")
    opens = [lambda: _open_browser(found.url)] if browser and has_display(os.environ) else []
    return (found.serve, *opens)


async def _open_browser(url: str) -> None:
    import webbrowser

    with suppress(webbrowser.Error, OSError):
        await asyncio.to_thread(webbrowser.open, url)


PROMISE: Final = (
    "Let agents work while you sleep. They cannot spend more than you said, do what you did not allow, or lose what "
    "they did."
)
MIN_INCIDENT_SECONDS: Final = 4.0
"""The shortest time in which an incident is shown."""
MIN_WIDE_COLUMNS: Final = 80
"""In fewer columns an incident takes three lines."""
LOSS: Final = "bold red"
GAIN: Final = "bold green"

Pause = Callable[[float], None]
Show = Callable[["Scene", "Frame"], None]


def run_whole_night(*, quiet: bool, pause: Pause = time.sleep, record: "NightRecord | None" = None) -> "Night":
    from halter.demo.night import SCENES, play_incident, sum_night, summarize_incident

    with _show_live(quiet=quiet, pause=pause) as show:
        incidents = [
            summarize_incident(play_incident(scene, lambda frame, scene=scene: show(scene, frame), record))
            for scene in SCENES
        ]
    return sum_night(incidents)


def print_introduction() -> None:
    from halter.demo.night import MODEL

    print_sentence(f"{PROMISE}\n")
    print_sentence(
        "The worst night comes first: three incidents of unattended agents. Each is played twice, "
        f"in virtual time, with one scripted model at the price of {MODEL.model}: in a plain loop with retries and a "
        "budget check, and in Halter. It takes less than a minute, and Ctrl-C ends it.\n",
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
        began = time.monotonic()

        def show(scene: "Scene", frame: "Frame") -> None:
            nonlocal began
            frames[scene.title] = frame
            live.update(render_night(frames, console.width), refresh=True)
            pause(max(0.0, began + MIN_INCIDENT_SECONDS * scene.frame / scene.span - time.monotonic()))
            began = time.monotonic()

        yield show


def render_night(frames: "dict[str, Frame]", width: int) -> RenderableType:
    if width < MIN_WIDE_COLUMNS:
        return Text("\n").join(_block(title, frame) for title, frame in frames.items())
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", width=18)
    for name in ("time", "a plain loop", "", "Halter", ""):
        table.add_column(name, justify="right")
    for title, frame in frames.items():
        table.add_row(title, _hour(frame.at), *_pair(frame.without, LOSS), *_pair(frame.within, GAIN))
    return table


def _pair(bill: "Bill", style: str) -> tuple[Text, Text]:
    from halter.demo.night import format_cents

    return Text(format_count(bill.requests, "request")), Text(format_cents(bill.cost_usd), style)


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
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%H:%M")


def print_conclusion(night: "Night") -> None:
    from halter.demo.night import format_cents

    columns = ["what happens", "a plain loop", "Halter", "what stopped it"]
    rows = [
        [f"{each.title}. {each.happens}", _bill(each.without), _bill(each.within), each.stopped_by]
        for each in night.incidents
    ]
    answer_table("The worst night", columns, rows)
    passed = format_count(night.overruns, "time") if night.overruns else "never"
    print_sentence(
        f"A plain loop paid {format_cents(night.without.cost_usd)} for "
        f"{format_count(night.without.requests, 'request')}. "
        f"Halter paid {format_cents(night.within.cost_usd)} for {night.within.requests:,}; a cap was {passed} passed.",
        at_once=True,
    )


def _bill(bill: "Bill") -> str:
    from halter.demo.night import format_cents

    return f"{format_cents(bill.cost_usd)}\n{format_count(bill.requests, 'request')}"

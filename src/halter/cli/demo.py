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
    from halter.demo.folder import DemoFolder, LayoutResult
    from halter.demo.incidents import Bill, Frame, Night, NightRecord, Scene
    from halter.runtime.webhooks import WebhookReceiver

    Act = Callable[[], Coroutine[Any, Any, None]]

NIGHT_INTERRUPTED: Final = "Interrupted. The simulated night leaves nothing behind."
DEMO_PLAN: Final = (
    "Within a minute, the service that it watches goes down, and it asks you for approval to delete an old file."
)
FIRST_NIGHT_HINT: Final = (
    "It also has the first night: its sessions, spending and refusals are on the dashboard, under the agents "
    "bookkeeper, watchman and analyst."
)
DEMO_STOPPED: Final = "night-watch is stopped. Continue with `halter demo --skip-night`."


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
        report_errors(lambda: _run_night(as_json=as_json, is_recorded=live), interrupted=NIGHT_INTERRUPTED)
    if live:
        _live(browser=not no_browser)


def _run_night(*, as_json: bool, is_recorded: bool) -> None:
    if as_json:
        answer_json(run_whole_night(quiet=True))
        return
    print_introduction()
    if is_recorded:
        from halter.demo.folder import find_demo_folder, record_night

        with record_night(
            find_demo_folder(os.environ, find_home(os.environ)), name_person(os.environ), SystemClock().now()
        ) as record:
            print_conclusion(run_whole_night(quiet=False, record=record))
    else:
        print_conclusion(run_whole_night(quiet=False))


def _live(*, browser: bool) -> None:
    """Run the agent until it is interrupted, which is its normal end."""
    from halter.cli.up import RESTART_HINT
    from halter.demo.folder import choose_demo_model, find_demo_folder, lay_out_files

    person = name_person(os.environ)
    demo_folder = report_errors(lambda: find_demo_folder(os.environ, find_home(os.environ)))
    model = choose_demo_model(os.environ)
    layout = report_errors(lambda: lay_out_files(demo_folder, model, person, SystemClock().now()))
    lines = describe_demo(demo_folder, model, layout, _find_hidden_program())
    try:
        run_with_app(
            None,
            lambda app: _run_demo_agent(app, demo_folder, lines, browser=browser),
            new=True,
            runs_agents=True,
            until_interrupted=True,
            settings=demo_folder.settings(person),
            runs=RESTART_HINT,
        )
    except typer.Exit as error:
        if error.exit_code != EXIT_INTERRUPTED:
            raise
        # A terminal shows ^C on the current line: start a new one.
        print_sentence(f"\n{DEMO_STOPPED}" if sys.stdout.isatty() else DEMO_STOPPED)


def _find_hidden_program() -> Path | None:
    """Find the folder of this program, if it is not on PATH, as after `make run`."""
    import shutil

    program = Path(sys.argv[0]).absolute()
    return program.parent if program.name == "halter" and shutil.which("halter") is None else None


def describe_demo(
    demo_folder: "DemoFolder", model: str, layout: "LayoutResult", program_folder: Path | None = None
) -> Sequence[str]:
    from halter.demo.folder import RULES_MODEL

    engine = "rules, without a network" if model == RULES_MODEL else f"{model}, whose key is in your environment"
    return (
        "",
        f"Next, a live agent: night-watch watches this machine. {DEMO_PLAN}",
        *(() if "agent.yaml" in layout.changed else (f"It decides with {engine}.",)),
        *layout.notes,
        f"Its files are in {demo_folder.root}. {FIRST_NIGHT_HINT} You can also use another terminal:",
        *(() if program_folder is None else (f"  export PATH={shlex.quote(str(program_folder))}:$PATH",)),
        f"  export HALTER_STORE={shlex.quote(str(demo_folder.store))}",
        "  halter inbox",
        "  halter serve                 # the dashboard, also after the demo has ended",
    )


async def _run_demo_agent(app: Runtime, demo_folder: "DemoFolder", lines: Sequence[str], *, browser: bool) -> None:
    from halter.cli.terminal import Printer
    from halter.cli.up import HOW_TO_STOP, FeedPrinter, make_bus, run_and_show
    from halter.demo.folder import Scenery
    from halter.loop.concurrency import run_together

    bus = make_bus(app)
    async with Printer() as printer:
        feed_printer = FeedPrinter(printer, app.clock, as_json=False)
        for sentence in lines:
            printer.write(render_sentence(sentence))
        dashboard_jobs = _dashboard(app, bus, printer, browser=browser)
        printer.write(render_sentence(f"{HOW_TO_STOP}\n"))
        with_scenery = Scenery(demo_folder.agent, app.clock).run_with
        agent_jobs = [
            lambda: with_scenery(
                lambda: run_and_show(app, [demo_folder.agent], bus, feed_printer, _ignore_deliveries, "demo")
            )
        ]
        await run_together([*agent_jobs, *dashboard_jobs])


async def _ignore_deliveries(_: "WebhookReceiver") -> None:
    """The agent has no webhooks."""


def _dashboard(app: Runtime, bus: Bus, printer: "Printer", *, browser: bool) -> Sequence["Act"]:
    from halter.demo.folder import has_display, open_demo_dashboard

    try:
        dashboard = open_demo_dashboard(app, bus, lambda sentence: warn(sentence, "red"))
    except ConfigError as error:
        printer.write(render_sentence(str(error)))
        return ()
    # An address must stay on one line, so that a terminal can open it.
    printer.write(f"{render_sentence(dashboard.note)}{dashboard.url}\n")
    browser_jobs = [lambda: _open_browser(dashboard.url)] if browser and has_display(os.environ) else []
    return (dashboard.serve, *browser_jobs)


async def _open_browser(url: str) -> None:
    import webbrowser

    with suppress(webbrowser.Error, OSError):
        await asyncio.to_thread(webbrowser.open, url)


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


def run_whole_night(*, quiet: bool, pause: Pause = time.sleep, record: "NightRecord | None" = None) -> "Night":
    from halter.demo.incidents import SCENES, play_incident, sum_night, summarize_incident

    with _show_live(quiet=quiet, pause=pause) as show:
        incidents = [
            summarize_incident(play_incident(scene, lambda frame, scene=scene: show(scene, frame), record))
            for scene in SCENES
        ]
    return sum_night(incidents)


def print_introduction() -> None:
    from halter.demo.incidents import MODEL

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

        def show(scene: "Scene", frame: "Frame") -> None:
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
    from halter.demo.incidents import format_cents

    return Text(format_count(bill.requests, "request")), Text(format_cents(bill.cost_usd), style)


def _block(title: str, frame: "Frame") -> Text:
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


def print_conclusion(night: "Night") -> None:
    from halter.demo.incidents import format_cents

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


def _bill(bill: "Bill") -> str:
    from halter.demo.incidents import format_cents

    return f"{format_cents(bill.cost_usd)}\n{format_count(bill.requests, 'request')}"

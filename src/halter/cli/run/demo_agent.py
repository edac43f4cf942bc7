"""The live agent of `halter demo`."""

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from halter.cli.command import report_errors, run_with_app
from halter.cli.exit_codes import EXIT_INTERRUPTED
from halter.cli.output import print_sentence, render_sentence, warn
from halter.cli.terminal import Printer
from halter.cli.unattended.feed import HOW_TO_STOP, RESTART_HINT, FeedPrinter, make_bus
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.demo.folder import (
    RULES_MODEL,
    DemoFolder,
    LayoutResult,
    Scenery,
    choose_demo_model,
    find_demo_folder,
    has_display,
    lay_out_files,
    open_demo_dashboard,
)
from halter.loop.concurrency import run_together
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.settings import find_home, name_person

if TYPE_CHECKING:
    from halter.runtime.webhooks import WebhookReceiver

    Act = Callable[[], Coroutine[Any, Any, None]]


DEMO_PLAN: Final = (
    "Within a minute, the service that it watches goes down, and it asks you for approval to delete an old file."
)
FIRST_NIGHT_HINT: Final = (
    "It also has the first night: its sessions, spending and refusals are on the dashboard, under the agents "
    "bookkeeper, watchman and analyst."
)
DEMO_STOPPED: Final = "night-watch is stopped. Continue with `halter demo --skip-night`."


def run_live_demo(*, browser: bool) -> None:
    """Run the agent until it is interrupted, which is its normal end."""
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
    demo_folder: DemoFolder, model: str, layout: LayoutResult, program_folder: Path | None = None
) -> Sequence[str]:
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


async def _run_demo_agent(app: Runtime, demo_folder: DemoFolder, lines: Sequence[str], *, browser: bool) -> None:
    from halter.cli.unattended.fleet import run_and_show

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


def _dashboard(app: Runtime, bus: Bus, printer: Printer, *, browser: bool) -> Sequence["Act"]:
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

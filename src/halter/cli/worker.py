"""`halter worker`: one of many processes that share the sessions of a PostgreSQL store."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.app import App
from halter.app.bus import Bus, Item
from halter.app.committed import Committed
from halter.cli.answer import painted
from halter.cli.codes import UNUSABLE, WRONG_USE
from halter.cli.command import JsonOption, StoreOption, duration, fail, saying_errors, settings_for, with_app
from halter.cli.printer import Printer
from halter.cli.up import AGENT_FILE, address, bus_of, folders_of, shows_of, watch
from halter.core.text import counted

if TYPE_CHECKING:
    from halter.app.tracing import Job
    from halter.app.up import Runner
    from halter.app.working import Manner

HOW_TO_STOP: Final = "Ctrl-C or SIGTERM lets what runs come to its rest and ends this; a second one ends it at once."
ELSEWHERE: Final = "Start it again. Its sessions go on with other workers when its lease is over; what was halted ends."
AGENTS: Final = "agents"


def worker(
    agents: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AGENT…", help="The folders of the agents (without any: those here and in ./agents)."),
    ] = None,
    *,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="How many sessions are awake here at once.")
    ] = 100,
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="How long what runs may take to come to its rest at the end.")
    ] = "30s",
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Take webhooks here as well.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run agents as one of many workers on a PostgreSQL store, on as many machines as you like.

    Sessions go to whoever has room. If a worker dies, its sessions go on elsewhere when its lease has run out.
    """
    folders = folders_of(agents or _found())
    where, grace = None if listen is None else address(listen), duration(drain)

    places = saying_errors(lambda: settings_for(store))
    _demand_postgres(places.store)

    async def job(app: App) -> None:
        from halter.app.working import distributed

        manner = distributed(app.settings.store, app.clock, concurrency, grace)
        await _work(app, folders, manner, where, as_json=as_json)

    with_app(store, job, new=True, acts=True, following=True, patient=True, settings=places, runs=ELSEWHERE)


def _found() -> list[Path]:
    """Find the agents of this folder."""
    here = Path()
    places = [here, *sorted(here.iterdir()), *(sorted((here / AGENTS).iterdir()) if (here / AGENTS).is_dir() else ())]
    found = [place for place in places if (place / AGENT_FILE).is_file()]
    if not found:
        fail(
            f"There is no {AGENT_FILE} here, nor in a folder here or in ./{AGENTS}: name the agents' folders.",
            WRONG_USE,
        )
    return found


def _demand_postgres(url: str) -> None:
    """Refuse what can have no workers, before any file is made: tickets come from Procrastinate, in the same store."""
    from halter.journal.open import masked

    if not url.lower().startswith(("postgresql:", "postgres:")):
        fail(
            f"Workers share a PostgreSQL store, and {masked(url)} is none: set HALTER_STORE=postgresql://…, or run the "
            "agents of this machine with `halter up`.",
            UNUSABLE,
        )


async def _work(
    app: App, folders: list[Path], manner: "Manner", where: tuple[str, int] | None, *, as_json: bool
) -> None:
    from halter.app.hooks import Hooks
    from halter.app.tracing import traced_here
    from halter.app.up import Runner, Up
    from halter.brain.together import until_first

    async def serve(hooks: Hooks) -> None:
        if where is not None:
            from halter.server.hooks import serve

            await serve(hooks, *where)

    async with Printer() as printer:
        shows, bus = shows_of(printer, app.clock, as_json=as_json), bus_of(app)
        if not as_json:
            printer.put(painted(f"{counted(len(folders), 'agent')} here. {HOW_TO_STOP}"))
        runs = Runner(app, lambda app: Up(app, shows.told, bus.pulse, serve=serve, manner=manner))
        _drained_by_signals(runs)
        committed = Committed(asyncio.get_running_loop(), lambda stream: stream.startswith(("session:", "trigger:")))
        app.store.observe(committed)
        patient = app.store.patient(app.clock)
        with traced_here(app, patient, lambda told: shows.told("traces", told)) as tracing:
            await until_first([runs.run(folders), watch(_news(committed, bus), shows), *map(_beside, tracing)])


async def _news(committed: Committed, bus: Bus) -> AsyncGenerator[Item]:
    """Tell of what this process commits. What others do is theirs to show: each worker's log is its own."""
    async with aclosing(committed.each()) as events:
        async for stored in events:
            yield await bus.named(stored)


async def _beside(job: "Job") -> None:
    """Do something for as long as the worker is there; if it comes to its end, the worker goes on."""
    await job()
    await asyncio.Event().wait()


def _drained_by_signals(runs: "Runner") -> None:
    """Let the first signal drain a worker and the second end it."""
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    asked: list[int] = []

    def heard() -> None:
        asked.append(1)
        if len(asked) == 1:
            runs.drain()
        elif running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard)

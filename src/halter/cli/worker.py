"""`halter worker`: one of many processes that share the sessions of a PostgreSQL store."""

import asyncio
import signal
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.app import App
from halter.app.bus import MOST, Bus, Item
from halter.cli.answer import painted
from halter.cli.codes import UNUSABLE, WRONG_USE
from halter.cli.command import JsonOption, StoreOption, duration, fail, with_app
from halter.cli.printer import Printer
from halter.cli.up import AGENT_FILE, address, bus_of, folders_of, shows_of, watch
from halter.core.ports import Stored
from halter.core.text import counted

if TYPE_CHECKING:
    from halter.app.up import Up
    from halter.app.working import Manner

HOW_TO_STOP: Final = "Ctrl-C or SIGTERM lets what runs come to its rest and ends this; a second one ends it at once."
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

    async def job(app: App) -> None:
        await _work(app, folders, _manner(app, concurrency, grace), where, as_json=as_json)

    with_app(store, job, new=True, following=True)


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


def _manner(app: App, concurrency: int, drain: int) -> "Manner":
    """Let tickets come from Procrastinate; what keeps no such queue can have no workers."""
    from halter.app.working import distributed
    from halter.journal.open import masked

    url = app.settings.store
    if not url.lower().startswith(("postgresql:", "postgres:")):
        fail(
            f"Workers share a PostgreSQL store, and {masked(url)} is none: set HALTER_STORE=postgresql://…, or run the "
            "agents of this machine with `halter up`.",
            UNUSABLE,
        )
    return distributed(url, app.clock, concurrency, drain)


async def _work(
    app: App, folders: list[Path], manner: "Manner", where: tuple[str, int] | None, *, as_json: bool
) -> None:
    from halter.app.hooks import Hooks
    from halter.app.up import Up
    from halter.brain.together import until_first

    async def serve(hooks: Hooks) -> None:
        if where is not None:
            from halter.server.hooks import serve

            await serve(hooks, *where)

    async with Printer() as printer:
        shows, bus = shows_of(printer, app.clock, as_json=as_json), bus_of(app)
        if not as_json:
            printer.put(painted(f"{counted(len(folders), 'agent')} here. {HOW_TO_STOP}"))
        runs = Up(app, shows.told, bus.pulse, serve=serve, manner=manner)
        _drained_by_signals(runs)
        seen = Seen(asyncio.get_running_loop())
        app.store.observe(seen)
        await until_first([runs.run(folders), watch(seen.news(bus), shows)])


class Seen:
    """What this process commits, to be shown. What others do is theirs to show: each worker's log is its own."""

    every_seconds = 3600.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Stored] = deque(maxlen=MOST)
        self._came = asyncio.Event()

    def saw(self, events: Sequence[Stored]) -> None:
        """Take note, in whatever thread; where nobody keeps up, the oldest are not shown."""
        self._waiting.extend(stored for stored in events if stored.stream.startswith(("session:", "trigger:")))
        with suppress(RuntimeError):
            # The loop may be gone by now.
            self._loop.call_soon_threadsafe(self._came.set)

    def flush(self) -> None:
        """Put nothing off."""

    async def news(self, bus: Bus) -> AsyncGenerator[Item]:
        """Tell of one after the other, as they come."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                yield await bus.named(self._waiting.popleft())


def _drained_by_signals(up: "Up") -> None:
    """Let the first signal drain a worker and the second end it."""
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    asked: list[int] = []

    def heard() -> None:
        asked.append(1)
        if len(asked) == 1:
            up.drain()
        elif running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard)

"""`halter up`, `on` and `off`: agents that run by themselves."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer

from halter.app import App
from halter.app.bus import Bus, Gap, Item, News, Pulse
from halter.app.follow import heads
from halter.app.objects import item_object
from halter.cli.answer import answer_json, json_line, painted, say, warn
from halter.cli.command import (
    UNUSABLE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    desk_of,
    fail,
    only_a_person,
    readable,
    with_app,
)
from halter.cli.printer import Printer
from halter.cli.styles import LOOK, Line
from halter.cli.view import View
from halter.core.clock import Clock
from halter.core.errors import ConfigError
from halter.core.ids import StreamId, session_of
from halter.core.text import counted, listed

if TYPE_CHECKING:
    from halter.app.desk.steering import Switched
    from halter.app.up import Serve

AGENT_FILE: Final = "agent.yaml"
HOW_TO_STOP: Final = "Ctrl-C stops this; the next start goes on where it stands."
AGAIN: Final = "Start it again: what it ran goes on where it stands, and what was halted ends."

AgentsArgument = Annotated[list[Path], typer.Argument(metavar="AGENT…", help="The folders of the agents.")]
NamedArgument = Annotated[str, typer.Argument(metavar="AGENT", help="An agent's name, or its folder.")]


def up(
    agents: AgentsArgument,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where webhooks are taken, if an agent has any.")
    ] = "127.0.0.1:8765",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run agents by themselves, in this terminal, until you interrupt it. The next start goes on where it stands.

    A line tells of each turn, sleep, wake and alert, and of whatever needs you. In JSON each line is one of them.
    """
    host, port = address(listen)
    folders = folders_of(agents)
    with_app(
        store,
        lambda app: _up(app, folders, host, port, as_json=as_json),
        new=True,
        acts=True,
        following=True,
        runs=AGAIN,
    )


def folders_of(agents: Sequence[Path]) -> list[Path]:
    """Name the folders of agents; an agent's file stands for its folder."""
    return [agent.parent if agent.is_file() else agent for agent in agents]


def address(listen: str, least: int = 1) -> tuple[str, int]:
    """Read an address to listen on."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not least <= int(port) < 1 << 16:
        fail(f"{listen!r} is no address to listen on: write it like 127.0.0.1:8765.", WRONG_USE)
    return host.strip("[]"), int(port)


async def _up(app: App, folders: list[Path], host: str, port: int, *, as_json: bool) -> None:
    from halter.server.hooks import serve

    async with Printer() as printer:
        shows = shows_of(printer, app.clock, as_json=as_json)
        if not as_json:
            printer.put(painted(HOW_TO_STOP))
        await run_and_show(app, folders, bus_of(app), shows, lambda hooks: serve(hooks, host, port))


def bus_of(app: App) -> Bus:
    """Make a bus that waits where the store is away."""
    return Bus(app.patient(), app.clock)


async def run_and_show(
    app: App, folders: list[Path], bus: Bus, shows: "Shows", serve: "Serve", kind: str = "up"
) -> None:
    """Run agents until cancelled, and show what they do. `kind` is what this process is called where it is listed."""
    from halter.app.tracing import traced
    from halter.app.up import Runner, Up
    from halter.app.working import embedded
    from halter.brain.together import together

    store = app.patient()
    seen = dict(await heads(store))
    runs = Runner(app, lambda app: Up(app, shows.told, bus.pulse, serve=serve, manner=embedded(kind)))

    def wanted(stream: StreamId) -> bool:
        name, _, number = (session_of(stream) or "").rpartition("-")
        agent = stream.removeprefix("trigger:").partition("/")[0] if stream.startswith("trigger:") else ""
        ours = number.isdecimal() and (runs.has(name) or runs.has(name.partition(".")[0]))
        return ours or runs.has(agent)

    acts = [lambda: runs.run(folders), lambda: watch(bus.listen(seen, wanted), shows)]
    with traced(app, store, lambda told: shows.told("traces", told), runs.has, seen) as tracing:
        await together([*acts, *tracing])


class Shows(Protocol):
    """Shows what happens."""

    def told(self, agent: str, sentence: str) -> None:
        """Show a sentence about an agent, or about all of them."""
        ...

    def show(self, item: Item) -> None:
        """Show a piece of news."""
        ...

    async def shown(self) -> None:
        """Wait until all of it is shown."""
        ...


def shows_of(printer: Printer, clock: Clock, *, as_json: bool) -> Shows:
    """Show things to a program, or to a person."""
    return Objects(printer, clock) if as_json else Lines(printer, clock)


async def watch(items: AsyncGenerator[Item], shows: Shows) -> None:
    """Show one thing after the other, each when the one before it is written."""
    async with aclosing(items):
        async for item in items:
            shows.show(item)
            await shows.shown()


class Objects:
    """Shows it to programs."""

    def __init__(self, printer: Printer, clock: Clock) -> None:
        self._printer = printer
        self._clock = clock

    def told(self, agent: str, sentence: str) -> None:
        """Show a sentence about an agent, or about all of them."""
        self._put({"name": "told", "at": self._clock.now(), "agent": agent, "sentence": sentence})

    async def shown(self) -> None:
        """Wait until all of it is shown."""
        await self._printer.written()

    def show(self, item: Item) -> None:
        """Show a piece of news."""
        self._put(item_object(item))

    def _put(self, value: Mapping[str, Any]) -> None:
        self._printer.put(json_line(value).decode())


class Lines:
    """Shows it to people."""

    def __init__(self, printer: Printer, clock: Clock) -> None:
        self._printer = printer
        self._clock = clock
        self._view = View()

    def told(self, agent: str, sentence: str) -> None:
        """Show a sentence about an agent; one without an agent is about a folder or a store that cannot be used."""
        if agent:
            self._put(Line(self._view.placed(self._clock.now(), agent, sentence)))
        else:
            warn(sentence, "red")

    async def shown(self) -> None:
        """Wait until all of it is shown."""
        await self._printer.written()

    def show(self, item: Item) -> None:
        """Show a piece of news. Words and readings as they come would be too many."""
        match item:
            case News():
                self._put(self._view.line(item.stored))
            case Gap() if item.events:
                sessions = sorted({session_of(stream) or stream for stream in item.lost})
                told = f"{counted(item.events, 'event')} of {listed(sessions)} passed unseen: look at halter show."
                self._put(Line(told, LOOK))
            case Gap() | Pulse():
                pass

    def _put(self, line: Line | None) -> None:
        if line is not None:
            self._printer.put(painted(line.text, line.style))


def on(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent on: where `halter up` runs it, its next session begins at once.

    Of a folder it is said before what the agent spends at most in the next 12 hours and in thirty days: by the clock
    alone, and with messages, webhooks and watched folders.
    """

    async def job(app: App) -> "tuple[Switched, Mapping[str, Decimal | None]]":
        from halter.app.desk.steering import switch

        only_a_person(app, "switch an agent on")
        name = await _meant(app, agent)
        costs = await _costs(app, Path(agent), name, as_json=as_json)
        return await switch(desk_of(app), name, on=True, reason=reason), costs

    done, costs = with_app(store, job)
    if as_json:
        answer_json({"agent": done.subject, "on": True, "known": done.known, **costs})
        return
    _tell_switched(done)


async def _costs(app: App, folder: Path, name: str, *, as_json: bool) -> Mapping[str, Decimal | None]:
    """Say what an agent may cost before it is switched on, if its folder is named and can be read."""
    if not (folder / AGENT_FILE).is_file():
        return {}
    from halter.app.forecasts import foresee
    from halter.app.most import at_most
    from halter.app.policy import policy_in_force, written_fleet
    from halter.config.agent import read_agent
    from halter.config.resolve import resolve_agent

    policy = await policy_in_force(app.store, written_fleet(app.settings))
    agent = resolve_agent(policy.fleet, read_agent(folder), folder)
    if agent.policy.name != name:
        return {}
    found = await foresee(app.store, agent, folder, app.environ, app.clock.now())
    for sentence in () if as_json else (await at_most(app, agent.policy), *found.told()):
        say(sentence, at_once=True)
    return found.amounts()


def off(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent off: its session is stopped within a second, and none begins until it is switched on.

    It works from anywhere that reaches the store, whichever process runs the agent, and also if its file is broken.
    """

    async def job(app: App) -> "Switched":
        from halter.app.desk.steering import switch

        return await switch(desk_of(app), await _meant(app, agent), on=False, reason=reason)

    done = with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json({"agent": done.subject, "on": False, "known": done.known, "stopped": done.stopped})
        return
    _tell_switched(done)


def _tell_switched(done: "Switched") -> None:
    say(done.sentence)
    if not done.known:
        say(f"Nothing has run here as {done.subject} so far: check the name, if that surprises you.")


async def _meant(app: App, agent: str) -> str:
    """Find out which agent is meant.

    A name that is known here is taken for that, whatever lies in a folder of the same name: an agent can be switched
    off though its file is broken.
    """
    readable(agent, "an agent")
    from halter.app.desk.steering import known_agents

    return agent if agent in await known_agents(desk_of(app)) else _name(agent)


def _name(agent: str) -> str:
    """Read the name in an agent's folder; without one, take what was typed for a name."""
    from halter.config.agent import read_agent

    folder = Path(agent)
    if folder.is_file() or (folder / AGENT_FILE).is_file():
        try:
            return read_agent(folder).spec.name
        except ConfigError as error:
            fail(str(error), UNUSABLE)
    if not agent or "/" in agent:
        fail(f"There is no {AGENT_FILE} in {agent!r}: name an agent, or its folder.", WRONG_USE)
    return agent

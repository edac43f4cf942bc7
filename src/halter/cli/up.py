"""`halter up`, `on` and `off`: run autonomous agents, and switch them on or off."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    fail,
    make_desk,
    require_person,
    require_readable_name,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence, render_sentence, warn
from halter.cli.terminal import Printer
from halter.core.clock import Clock
from halter.core.errors import ConfigError
from halter.core.ids import StreamId, parse_session_id
from halter.core.public_json import encode_public_lines
from halter.core.text import format_count, join_names
from halter.present.event_lines import EventLines
from halter.present.events import WARNING_STYLE, StyledLine
from halter.runtime.feed import Bus, FeedEvent, FeedGap, FeedItem, LiveUpdate, read_stream_heads, serialize_feed_item
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.control import SwitchResult
    from halter.runtime.supervisor import Serve

AGENT_FILE: Final = "agent.yaml"
HOW_TO_STOP: Final = "Stop with Ctrl-C; the next start continues."
RESTART_HINT: Final = "Start it again. Its sessions continue; halted ones end."

AgentsArgument = Annotated[list[Path], typer.Argument(metavar="AGENT", help="Agent folders.")]
NamedArgument = Annotated[str, typer.Argument(metavar="AGENT", help="Agent name or folder.")]


def up(
    agents: AgentsArgument,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address for webhooks.")
    ] = "127.0.0.1:8765",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run autonomous agents in this terminal until interrupted. The next start continues.

    A line reports each turn, sleep, wake and alert, and what needs you. With --json, each line is a JSON object.
    """
    host, port = parse_listen_address(listen)
    folders = resolve_agent_folders(agents)
    run_with_app(
        store,
        lambda app: _up(app, folders, host, port, as_json=as_json),
        new=True,
        runs_agents=True,
        until_interrupted=True,
        runs=RESTART_HINT,
    )


def resolve_agent_folders(agents: Sequence[Path]) -> list[Path]:
    return [agent.parent if agent.is_file() else agent for agent in agents]


def parse_listen_address(listen: str, min_port: int = 1) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not min_port <= int(port) < 1 << 16:
        fail(f"Invalid listen address {listen!r}. Use a form such as 127.0.0.1:8765.", EXIT_USAGE)
    return host.strip("[]"), int(port)


async def _up(app: Runtime, folders: list[Path], host: str, port: int, *, as_json: bool) -> None:
    from halter.channels.serve import serve_channels
    from halter.loop.concurrency import run_together
    from halter.server.api import serve_hooks

    async with Printer() as printer:
        feed_printer = FeedPrinter(printer, app.clock, as_json=as_json)
        if not as_json:
            printer.write(render_sentence(HOW_TO_STOP))
        agent_job = run_and_show(
            app, folders, make_bus(app), feed_printer, lambda hooks: serve_hooks(hooks, host, port)
        )
        await run_together([lambda: agent_job, lambda: serve_channels(app, partial(feed_printer.report, "channels"))])


def make_bus(app: Runtime) -> Bus:
    return Bus(app.patient(), app.clock)


async def run_and_show(
    app: Runtime, folders: list[Path], bus: Bus, feed_printer: "FeedPrinter", serve: "Serve", kind: str = "up"
) -> None:
    """Run agents until cancelled, and show what they do. `kind` names this process in the list of workers."""
    from halter.loop.concurrency import run_together
    from halter.runtime.supervisor import FleetRunner, Supervisor
    from halter.runtime.telemetry.tracer import trace_agents
    from halter.runtime.worker import make_embedded_mode

    store = app.patient()
    stream_heads = dict(await read_stream_heads(store))
    fleet_runner = FleetRunner(
        app,
        lambda app: Supervisor(app, feed_printer.report, bus.publish_live, serve=serve, mode=make_embedded_mode(kind)),
    )

    def is_own_stream(stream: StreamId) -> bool:
        name, _, number = (parse_session_id(stream) or "").rpartition("-")
        agent = stream.removeprefix("trigger:").partition("/")[0] if stream.startswith("trigger:") else ""
        is_ours = number.isdecimal() and (fleet_runner.runs(name) or fleet_runner.runs(name.partition(".")[0]))
        return is_ours or fleet_runner.runs(agent)

    jobs = [
        lambda: fleet_runner.run(folders),
        lambda: feed_printer.follow(_as_singletons(bus.listen(stream_heads, is_own_stream))),
    ]
    with trace_agents(
        app, store, lambda sentence: feed_printer.report("traces", sentence), fleet_runner.runs, stream_heads
    ) as tracing:
        await run_together([*jobs, *tracing])


async def _as_singletons(items: AsyncGenerator[FeedItem]) -> AsyncGenerator[Sequence[FeedItem]]:
    async with aclosing(items):
        async for item in items:
            yield (item,)


class FeedPrinter:
    """Prints what happens: lines for people, JSON lines for programs."""

    def __init__(self, printer: Printer, clock: Clock, *, as_json: bool) -> None:
        self._printer = printer
        self._clock = clock
        self._as_json = as_json
        self._view = EventLines()

    def report(self, agent: str, sentence: str) -> None:
        """Print a sentence about an agent; without an agent, about an unusable folder or store."""
        now = self._clock.now()
        if self._as_json:
            self._print_json([{"name": "told", "at": now, "agent": agent, "sentence": sentence}])
        elif agent:
            self._print_line(StyledLine(self._view.format_line(now, agent, sentence)))
        else:
            warn(sentence, "red")

    async def follow(self, batches: AsyncGenerator[Sequence[FeedItem]]) -> None:
        """Print batches of items in order, no faster than they can be written."""
        async with aclosing(batches):
            async for items in batches:
                if self._as_json:
                    self._print_json(map(serialize_feed_item, items))
                else:
                    for item in items:
                        self._show(item)
                if self._printer.is_full:
                    await self._printer.wait_for_space()

    def _show(self, item: FeedItem) -> None:
        """Print an event; live text and readings are left out, as too many."""
        match item:
            case FeedEvent():
                self._print_line(self._view.line(item.stored))
            case FeedGap() if item.events:
                sessions = sorted({parse_session_id(stream) or stream for stream in item.lost})
                count = format_count(item.events, "event")
                self._print_line(
                    StyledLine(f"{count} of {join_names(sessions)} missed. See halter show.", WARNING_STYLE)
                )
            case FeedGap() | LiveUpdate():
                pass

    def _print_json(self, values: Iterable[Mapping[str, Any]]) -> None:
        self._printer.write(encode_public_lines(values).decode())

    def _print_line(self, line: StyledLine | None) -> None:
        if line is not None:
            self._printer.write(render_sentence(line.text, line.style))


def on(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent on. If `halter up` runs it, its next session starts immediately.

    Given a folder, first prints the maximum that the agent can spend in the next 12 hours and in thirty days: by
    schedules alone, and with messages, webhooks and watched folders.
    """

    async def job(app: Runtime) -> "tuple[SwitchResult, Mapping[str, Decimal | None]]":
        from halter.operations.control import switch

        require_person(app, "switch an agent on")
        name = await _resolve_agent_name(app, agent)
        costs = await _print_costs(app, Path(agent), name, as_json=as_json)
        return await switch(make_desk(app), name, on=True, reason=reason), costs

    result, costs = run_with_app(store, job)
    _show_switched(result, costs if as_json else None)


async def _print_costs(app: Runtime, folder: Path, name: str, *, as_json: bool) -> Mapping[str, Decimal | None]:
    if not (folder / AGENT_FILE).is_file():
        return {}
    from halter.config.agent_files import read_agent
    from halter.config.resolve import resolve_agent
    from halter.runtime.forecast import describe_spending_limits, forecast_spending
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    policy = await resolve_effective_policy(app.store, read_local_fleet(app.settings))
    agent = resolve_agent(policy.fleet, read_agent(folder), folder)
    if agent.policy.name != name:
        return {}
    forecast = await forecast_spending(app.store, agent, folder, app.environ, app.clock.now())
    for sentence in () if as_json else (await describe_spending_limits(app, agent.policy), *forecast.describe()):
        print_sentence(sentence, at_once=True)
    return forecast.amounts()


def off(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent off. Its session stops within a second, and none starts until it is switched on.

    Works from any machine that reaches the store, whichever process runs the agent, and also if its file is broken.
    """

    async def job(app: Runtime) -> "SwitchResult":
        from halter.operations.control import switch

        return await switch(make_desk(app), await _resolve_agent_name(app, agent), on=False, reason=reason)

    result = run_with_app(store, job, despite_doubt=True)
    _show_switched(result, {"stopped": result.stopped} if as_json else None)


def _show_switched(result: "SwitchResult", details: Mapping[str, Any] | None) -> None:
    if details is not None:
        answer_json({"agent": result.subject, "on": result.on, "known": result.known, **details})
        return
    print_sentence(result.sentence)


async def _resolve_agent_name(app: Runtime, agent: str) -> str:
    """Resolve an agent name or folder to an agent name.

    A known name takes precedence over a folder of that name: an agent with a broken file can be switched off.
    """
    require_readable_name(agent, "agent name")
    from halter.operations.control import list_known_agents, reject_unknown_agent

    agent_names = await list_known_agents(make_desk(app))
    return agent if agent in agent_names else _name(agent) or reject_unknown_agent(agent, agent_names)


def _name(agent: str) -> str:
    """Read the name of an agent from its folder; "" if the folder has no agent."""
    from halter.config.agent_files import read_agent

    folder = Path(agent)
    if folder.is_file() or (folder / AGENT_FILE).is_file():
        try:
            return read_agent(folder).spec.name
        except ConfigError as error:
            fail(str(error), EXIT_UNUSABLE)
    if not agent or "/" in agent:
        fail(f"No {AGENT_FILE} found in {agent!r}. Pass an agent name or folder.", EXIT_USAGE)
    return ""

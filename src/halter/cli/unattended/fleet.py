"""The agents that a command runs, and what it shows of them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from halter.channels.serve import serve_channels
from halter.cli.output import render_sentence
from halter.cli.terminal import Printer
from halter.cli.unattended.feed import HOW_TO_STOP, FeedPrinter, make_bus
from halter.core.ids import StreamId, parse_session_id
from halter.loop.concurrency import run_together
from halter.runtime.feed import Bus, FeedItem, read_stream_heads
from halter.runtime.runtime import Runtime
from halter.runtime.supervisor import FleetRunner, Serve, Supervisor
from halter.runtime.telemetry.tracer import trace_agents
from halter.runtime.worker import make_embedded_mode
from halter.server.api import serve_hooks


async def run_agents(app: Runtime, folders: list[Path], host: str, port: int, *, as_json: bool) -> None:
    async with Printer() as printer:
        feed_printer = FeedPrinter(printer, app.clock, as_json=as_json)
        if not as_json:
            printer.write(render_sentence(HOW_TO_STOP))
        agent_job = run_and_show(
            app, folders, make_bus(app), feed_printer, lambda hooks: serve_hooks(hooks, host, port)
        )
        await run_together([lambda: agent_job, lambda: serve_channels(app, partial(feed_printer.report, "channels"))])


async def run_and_show(
    app: Runtime, folders: list[Path], bus: Bus, feed_printer: FeedPrinter, serve: Serve, kind: str = "up"
) -> None:
    """Run agents until cancelled, and show what they do. `kind` names this process in the list of workers."""
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

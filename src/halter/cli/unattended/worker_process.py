"""What `halter worker` runs."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final

from halter.channels.serve import serve_channels
from halter.cli.output import render_sentence
from halter.cli.terminal import Printer
from halter.cli.unattended.feed import FeedPrinter, make_bus
from halter.core.text import format_count
from halter.loop.concurrency import run_until_first
from halter.runtime.feed import Bus, CommitObserver, FeedItem
from halter.runtime.runtime import Runtime
from halter.runtime.supervisor import FleetRunner, Supervisor
from halter.runtime.telemetry.tracer import Job, trace_worker
from halter.runtime.webhooks import WebhookReceiver
from halter.runtime.worker import make_distributed_mode

HOW_TO_STOP_WORKER: Final = "Ctrl-C or SIGTERM drains this worker and ends it; a second one ends it immediately."


async def run_worker(
    app: Runtime,
    folders: list[Path],
    concurrency: int,
    grace: int,
    webhook_address: tuple[str, int] | None,
    *,
    as_json: bool,
) -> None:
    mode = make_distributed_mode(app.settings.store, app.clock, concurrency, grace)

    async def serve(hooks: WebhookReceiver) -> None:
        if webhook_address is not None:
            from halter.server.api import serve_hooks

            await serve_hooks(hooks, *webhook_address)

    async with Printer() as printer:
        feed_printer, bus = FeedPrinter(printer, app.clock, as_json=as_json), make_bus(app)
        if not as_json:
            printer.write(render_sentence(f"{format_count(len(folders), 'agent')} here. {HOW_TO_STOP_WORKER}"))

        def make(app: Runtime) -> Supervisor:
            supervisor = Supervisor(app, feed_printer.report, bus.publish_live, serve=serve, mode=mode)
            supervisor.attends = bus.remember_session
            return supervisor

        runs = FleetRunner(app, make)
        _drain_on_signals(runs)
        commits = CommitObserver(asyncio.get_running_loop(), lambda stream: stream.startswith(("session:", "trigger:")))
        app.store.observe(commits)
        patient = app.store.patient(app.clock)
        with trace_worker(app, patient, lambda sentence: feed_printer.report("traces", sentence)) as tracing:
            side_jobs = [*tracing, lambda: serve_channels(app, partial(feed_printer.report, "channels"))]
            await run_until_first(
                [runs.run(folders), feed_printer.follow(_follow_commits(commits, bus)), *map(_run_side_job, side_jobs)]
            )


async def _follow_commits(commits: CommitObserver, bus: Bus) -> AsyncGenerator[Sequence[FeedItem]]:
    """Yield the events that this process commits: each worker prints only its own."""
    async with aclosing(commits.batches()) as batches:
        async for events in batches:
            yield await bus.name_all(events)


async def _run_side_job(job: Job) -> None:
    """Run a job in the worker's process. The end of the job does not end the worker."""
    await job()
    await asyncio.Event().wait()


def _drain_on_signals(runs: FleetRunner) -> None:
    """Drain the worker on the first signal, and end it on the second."""
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    signals: list[int] = []

    def on_signal() -> None:
        signals.append(1)
        if len(signals) == 1:
            runs.drain()
        elif running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

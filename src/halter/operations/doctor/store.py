"""The checks of `halter doctor` of the store, and of whether this process can do its work now."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from halter.core.clock import HOUR, MINUTE, format_duration
from halter.core.errors import ConfigError, StoreError
from halter.core.ports import Query
from halter.core.rows import AgentRow, HoldRow, SessionRow
from halter.core.text import format_count
from halter.dispatch.store_clock import StoreClock
from halter.dispatch.workers import WorkerRow
from halter.journal.engine import list_migrations
from halter.journal.open import find_store_file
from halter.journal.sqlite_connection import is_read_only, open_read_only
from halter.present.moments import format_moment
from halter.runtime.runtime import Runtime, read_local_fleet, resolve_effective_policy, sync_store_clock

if TYPE_CHECKING:
    from halter.config.merge import FleetConfig
from halter.operations.doctor.check import Check, fail_check, pass_check, warn_check
from halter.operations.doctor.workers import check_workers

MAX_HOLD_AGE: Final = HOUR
WARN_DISK_BYTES: Final = 1 << 30
MIN_DISK_BYTES: Final = 100 << 20


class StoreCounts(msgspec.Struct, frozen=True):
    events: int
    streams: int
    sessions: int
    holds: int
    blobs: int


READINESS_TIMEOUT_SECONDS: Final = 2
"""Time in which a store must answer."""


class StoreMeta(msgspec.Struct, frozen=True):
    name: str
    value: str


async def check_store(app: Runtime) -> AsyncGenerator[Check]:
    yield await _check_counts(app)
    path = find_store_file(app.settings.store)
    if path is not None:
        yield _file(path)
        yield check_disk(path.parent)
    yield await _clock(app)
    yield _checkpoints(app)
    yield await _policy(app)
    yield await _check_holds(app)
    yield await _switches(app)
    async for check in check_workers(app):
        yield check


async def check_readiness(app: Runtime) -> Sequence[str]:
    """List why this process cannot do its work now; empty if it is ready. It names nothing of the store's contents."""
    try:
        async with asyncio.timeout(READINESS_TIMEOUT_SECONDS):
            meta = {row.name: row.value for row in await app.store.ask(Query("meta", StoreMeta))}
            workers = await app.store.ask(Query("all_workers", WorkerRow)) if app.liveness.workers else ()
    except (StoreError, TimeoutError):
        return ["The store does not answer."]
    problems: list[str] = []
    if meta.get("schema") != str(list_migrations("sqlite")[-1][0]):
        problems.append("The store has the schema of another version of Halter.")
    if app.older_copy is not None:
        problems.append("The store lacks events that it had before.")
    now = app.clock.now()
    alive = {row.worker for row in workers if row.alive(now)}
    if any(worker not in alive for worker in app.liveness.workers):
        problems.append("The leases of this process have expired.")
    return problems


async def _check_counts(app: Runtime) -> Check:
    (counts,) = await app.store.ask(Query("counts", StoreCounts))
    meta = {row.name: row.value for row in await app.store.ask(Query("meta", StoreMeta))}
    totals = f"{counts.events:,} events in {counts.streams:,} streams, {format_count(counts.sessions, 'session')}"
    return pass_check("store", f"Schema {meta['schema']}, {totals}. Id {meta['store']}.")


def _file(path: Path) -> Check:
    """Check that the store file is writable and intact."""
    if is_read_only(str(path)):
        return fail_check("file", f"{path} is read-only. Make it and its folder writable.")
    try:
        with closing(open_read_only(str(path))) as connection:
            (text,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        text = str(error)
    if text != "ok":
        return fail_check("file", f"{path} is damaged ({text}). Stop all agents, copy the file, and restore a backup.")
    return pass_check("file", f"{path} is writable and intact.")


def check_disk(folder: Path) -> Check:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return warn_check("disk", f"Cannot read the disk of {folder} ({error.strerror}).")
    amount = f"{free_bytes / (1 << 30):,.1f} GiB"
    if free_bytes < MIN_DISK_BYTES:
        return fail_check(
            "disk",
            f"Disk of {folder} almost full ({amount} left). Agents stop when the store cannot be written. "
            "Free some space.",
        )
    if free_bytes < WARN_DISK_BYTES:
        return warn_check("disk", f"Disk of {folder} is low ({amount} left). Free some space.")
    return pass_check("disk", f"{amount} free for {folder}.")


MAX_CLOCK_LAG: Final = MINUTE
"""The newest event of a store may be this much later than the present."""


class StoreExtent(msgspec.Struct, frozen=True):
    at: int


async def _clock(app: Runtime) -> Check:
    """Compare this machine's clock with the server's and with the store's newest event."""
    if isinstance(app.clock, StoreClock):
        await sync_store_clock(app.store, app.clock)
        if refusal := app.clock.refusal():
            return fail_check("clock", refusal)
    now, (extent,) = app.clock.now(), await app.store.ask(Query("extent", StoreExtent))
    if extent.at > now + MAX_CLOCK_LAG:
        return fail_check(
            "clock",
            f"This machine's clock shows {format_moment(now)}, but the newest event of this store is of "
            f"{format_moment(extent.at)}. Caps, schedules and timeouts are wrong until the clock is correct. Set it, "
            "for example with `timedatectl set-ntp true`, and restart.",
        )
    return pass_check("clock", "This machine and the store agree on the time.")


def _checkpoints(app: Runtime) -> Check:
    if app.older_copy is not None:
        return fail_check("checkpoints", app.older_copy.sentence())
    app.checkpointer.rehearse()
    if app.checkpointer.problem:
        return fail_check("checkpoints", app.checkpointer.problem)
    return pass_check("checkpoints", f"Signed heads go to {app.settings.checkpoints}.")


async def read_local_policy(app: Runtime) -> "FleetConfig | None":
    """Read the effective policy of this process; None if it cannot be read."""
    try:
        return (await resolve_effective_policy(app.store, read_local_fleet(app.settings))).fleet
    except ConfigError:
        return None


async def _policy(app: Runtime) -> Check:
    """Compare the store's policy with the local file."""
    try:
        effective = await resolve_effective_policy(app.store, read_local_fleet(app.settings))
    except ConfigError as error:
        return fail_check("policy", str(error))
    if effective.row is None:
        return pass_check("policy", "This store has no policy yet. The halter.yaml of its first session becomes it.")
    if sentence := effective.describe_difference():
        return warn_check("policy", sentence)
    return pass_check(
        "policy", f"This store's policy was adopted by {effective.row.by} on {format_moment(effective.row.at)}."
    )


async def _check_holds(app: Runtime) -> Check:
    holds = await app.store.ask(Query("holds", HoldRow))
    old_holds = [hold for hold in holds if hold.at < app.clock.now() - MAX_HOLD_AGE]
    if old_holds:
        oldest = format_duration(app.clock.now() - old_holds[0].at)
        count = "1 hold" if len(old_holds) == 1 else f"{len(old_holds):,} holds"
        finding = (
            f"{count} older than an hour (the oldest {oldest}, session {old_holds[0].session}). The session waits for "
            "a worker, or for a person: to decide about a call, or to settle one in doubt. Only the hold of a question "
            "ends with time, when the question expires."
        )
        return warn_check("holds", finding)
    return pass_check("holds", f"{len(holds)} open, none of them old.")


async def _switches(app: Runtime) -> Check:
    rows = await app.store.ask(Query("all_agents", AgentRow))
    sentences = [f"{row.agent} is {'on' if row.switched_on else 'off'}, by {row.by}" for row in rows]
    sessions = await app.store.ask(Query("sessions_under_way", SessionRow))
    paused_sessions = [row for row in sessions if row.kind == "autonomous" and row.state == "PAUSED"]
    if paused_sessions:
        hints = (
            f"{row.session} is paused. Run halter show {row.session}, then halter on {row.agent}."
            for row in paused_sessions
        )
        return fail_check("autonomy", " ".join(hints))
    return pass_check(
        "autonomy", f"{'; '.join(sentences)}." if sentences else "No agent has run unattended with this store."
    )

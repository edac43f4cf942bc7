"""Whether the store is sound, can grow, and what waits in it."""

import shutil
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from halter.app.health.check import Check, fine, look, problem
from halter.app.health.workers import worker_checks
from halter.app.opened import App, told_time
from halter.app.words.moments import written
from halter.core.clock import HOUR
from halter.core.durations import shown_duration
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import AgentRow, HoldRow, SessionRow
from halter.core.text import counted
from halter.dispatch.clocks import StoreTime

if TYPE_CHECKING:
    from halter.config.fleet import Fleet

OLD_HOLD: Final = HOUR
LITTLE: Final = 1 << 30
"""With less room than this on the disk somebody should look."""
TOO_LITTLE: Final = 100 << 20


class Counts(msgspec.Struct, frozen=True):
    """How much a store holds."""

    events: int
    streams: int
    sessions: int
    holds: int
    blobs: int


class Meta(msgspec.Struct, frozen=True):
    """What a store says of itself."""

    name: str
    value: str


async def store_checks(app: App) -> AsyncGenerator[Check]:
    """Look at an opened store."""
    from halter.journal.open import file_of

    yield await _counts(app)
    path = file_of(app.settings.store)
    if path is not None:
        yield _file(path)
        yield disk(path.parent)
    yield await _clock(app)
    yield _checkpoints(app)
    yield await _policy(app)
    yield await _holds(app)
    yield await _switches(app)
    async for check in worker_checks(app):
        yield check


async def _counts(app: App) -> Check:
    (counts,) = await app.store.ask(Query("counts", Counts))
    meta = {row.name: row.value for row in await app.store.ask(Query("meta", Meta))}
    held = f"{counts.events:,} events in {counts.streams:,} streams, {counted(counts.sessions, 'session')}"
    return fine("store", f"Schema {meta['schema']}, {held}. Id {meta['store']}.")


def _file(path: Path) -> Check:
    """Look at the file itself: whether it can be written, and whether SQLite finds its pages in order."""
    from halter.journal.sqlite_file import may_only_be_read, open_to_read

    if may_only_be_read(str(path)):
        return problem("file", f"{path} may only be read: give yourself the right to write it and its folder.")
    try:
        with closing(open_to_read(str(path))) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        said = str(error)
    if said != "ok":
        return problem("file", f"{path} is damaged ({said}): stop all agents, copy it, and restore a backup.")
    return fine("file", f"{path} can be written, and its pages are in order.")


def disk(folder: Path) -> Check:
    """Tell how much room is left where the journal grows."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return look("disk", f"The disk of {folder} cannot be looked at ({error.strerror}).")
    told = f"{free / (1 << 30):,.1f} GiB are free for {folder}"
    if free < TOO_LITTLE:
        return problem("disk", f"Only {told}: make room, or nothing can be written down, and nothing will be done.")
    if free < LITTLE:
        return look("disk", f"Only {told}: make room before a long night.")
    return fine("disk", f"{told}.")


async def _clock(app: App) -> Check:
    """Compare this machine's clock with a server's. A store that is a file has this machine's own."""
    if isinstance(app.clock, StoreTime):
        await told_time(app.store, app.clock)
        if refusal := app.clock.refusal():
            return problem("clock", refusal)
    return fine("clock", "This machine and the store agree on the time.")


def _checkpoints(app: App) -> Check:
    if app.doubt is not None:
        return problem("checkpoints", app.doubt.sentence())
    app.checkpointer.rehearse()
    if app.checkpointer.problem:
        return problem("checkpoints", app.checkpointer.problem)
    return fine("checkpoints", f"Signed heads go to {app.settings.checkpoints}.")


async def policy_here(app: App) -> "Fleet | None":
    """Tell what holds for agents here; None where the store's policy, or the file here, cannot be read."""
    from halter.app.policy import policy_in_force, written_fleet

    try:
        return (await policy_in_force(app.store, written_fleet(app.settings))).fleet
    except ConfigError:
        return None


async def _policy(app: App) -> Check:
    """Compare the store's policy with what is written here."""
    from halter.app.policy import policy_in_force, written_fleet

    try:
        found = await policy_in_force(app.store, written_fleet(app.settings))
    except ConfigError as error:
        return problem("policy", str(error))
    if found.row is None:
        return fine("policy", "This store has no policy yet: the first halter.yaml that is used on it becomes its own.")
    if told := found.told():
        return look("policy", told)
    return fine("policy", f"This store's policy was adopted by {found.row.by} on {written(found.row.at)}.")


async def _holds(app: App) -> Check:
    holds = await app.store.ask(Query("holds", HoldRow))
    old = [hold for hold in holds if hold.at < app.clock.now() - OLD_HOLD]
    if old:
        oldest = shown_duration(app.clock.now() - old[0].at)
        count = "1 hold" if len(old) == 1 else f"{len(old):,} holds"
        finding = (
            f"{count} older than an hour (the oldest {oldest}, session {old[0].session}): such a session waits for a "
            "worker, or for somebody to say what became of it. No timer ever frees a hold."
        )
        return look("holds", finding)
    return fine("holds", f"{len(holds)} open, none of them old.")


async def _switches(app: App) -> Check:
    """Tell which agents may run by themselves, and which of them wait for a person."""
    rows = await app.store.ask(Query("all_agents", AgentRow))
    told = [f"{row.agent} is {'on' if row.switched_on else 'off'}, by {row.by}" for row in rows]
    sessions = await app.store.ask(Query("sessions_under_way", SessionRow))
    left = [row for row in sessions if row.kind == "autonomous" and row.state == "PAUSED"]
    if left:
        words = (f"{row.session} waits for you: halter show {row.session}, then halter on {row.agent}." for row in left)
        return problem("autonomy", " ".join(words))
    return fine("autonomy", f"{'; '.join(told)}." if told else "No agent has run by itself here.")

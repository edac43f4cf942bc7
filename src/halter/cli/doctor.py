"""`halter doctor`: whether everything is there that a night without anybody watching needs."""

import platform
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from halter.app import App
from halter.cli.answer import answer_json, answer_table
from halter.cli.command import NOT_FINE, JsonOption, StoreOption, settings_for, with_app
from halter.core.clock import HOUR, SECOND
from halter.core.durations import shown_duration
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import AgentRow, HoldRow, SessionRow
from halter.core.text import counted
from halter.journal.open import masked

CLOCKS_APART = 2 * SECOND
OLD_HOLD = HOUR

Verdict = Literal["ok", "warning", "problem"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    finding: str


class Counts(msgspec.Struct, frozen=True):
    """How much a store holds."""

    events: int
    streams: int
    sessions: int
    holds: int
    blobs: int


def doctor(
    agents: Annotated[
        list[Path] | None, typer.Argument(metavar="[AGENT…]", help="Folders of agents to look at, too.")
    ] = None,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the store, its checkpoints, the clock, prices, old holds and agents, and say what to do about each.

    Leaves with 1 if something is a problem.
    """

    async def job(app: App) -> list[Check]:
        return [
            _program(),
            await _store(app),
            await _clock(app),
            _checkpoints(app),
            await _holds(app),
            await _switches(app),
            *[_agent(app, folder) for folder in agents or []],
            _prices(),
            _postgresql(),
        ]

    checks = with_app(store, job, warned=False)
    if as_json:
        answer_json(checks)
    else:
        marks: dict[Verdict, str] = {"ok": "ok", "warning": "look", "problem": "PROBLEM"}
        title = f"Halter on {masked(settings_for(store).store)}"
        answer_table(
            title, ["what", "is", "finding"], [[c.name, marks[c.verdict], c.finding] for c in checks], long="finding"
        )
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(NOT_FINE)


def _program() -> Check:
    return Check("program", "ok", f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}.")


async def _store(app: App) -> Check:
    (counts,) = await app.store.ask(Query("counts", Counts))
    meta = {row.name: row.value for row in await app.store.ask(Query("meta", Meta))}
    finding = (
        f"Schema {meta['schema']}, {counted(counts.events, 'event')} in {counted(counts.streams, 'stream')}, "
        f"{counted(counts.sessions, 'session')}. Id {meta['store']}."
    )
    return Check("store", "ok", finding)


class Meta(msgspec.Struct, frozen=True):
    """What a store says of itself."""

    name: str
    value: str


async def _clock(app: App) -> Check:
    apart = abs(await app.store.now() - app.clock.now())
    if apart > CLOCKS_APART:
        finding = (
            f"This machine's clock and the store's are {shown_duration(apart)} apart: timers follow the store's. "
            "Set this clock right (NTP) before running a worker here."
        )
        return Check("clock", "problem", finding)
    return Check("clock", "ok", "This machine and the store agree on the time.")


def _checkpoints(app: App) -> Check:
    app.checkpointer.rehearse()
    if app.checkpointer.problem:
        return Check("checkpoints", "problem", app.checkpointer.problem)
    return Check("checkpoints", "ok", f"Signed heads go to {app.settings.checkpoints}.")


async def _holds(app: App) -> Check:
    holds = await app.store.ask(Query("holds", HoldRow))
    old = _older(holds, app.clock.now() - OLD_HOLD)
    if old:
        oldest = shown_duration(app.clock.now() - old[0].at)
        finding = (
            f"{counted(len(old), 'hold')} older than an hour (the oldest {oldest}, session {old[0].session}): such a "
            "session waits for a worker, or for somebody to say what became of it. No timer ever frees a hold."
        )
        return Check("holds", "warning", finding)
    return Check("holds", "ok", f"{len(holds)} open, none of them old.")


async def _switches(app: App) -> Check:
    """Tell which agents may run by themselves, and which of them wait for a person."""
    rows = await app.store.ask(Query("all_agents", AgentRow))
    told = [f"{row.agent} is {'on' if row.switched_on else 'off'}, by {row.by}" for row in rows]
    sessions = await app.store.ask(Query("all_sessions", SessionRow))
    left = [row for row in sessions if row.kind == "autonomous" and row.state == "PAUSED"]
    if left:
        words = (f"{row.session} waits for you: halter show {row.session}, then halter on {row.agent}." for row in left)
        return Check("autonomy", "problem", " ".join(words))
    return Check("autonomy", "ok", f"{'; '.join(told)}." if told else "No agent has run by itself here.")


def _agent(app: App, folder: Path) -> Check:
    """Read an agent's files as a start would, without running anything of it."""
    from halter.config.agent import read_agent
    from halter.config.fleet import Fleet, read_fleet
    from halter.config.mind import read_mind
    from halter.config.pacing import unwritten
    from halter.config.resolve import resolve

    try:
        fleet = Fleet() if app.settings.fleet is None else read_fleet(app.settings.fleet)
        agent = read_agent(folder)
        resolve(fleet, agent)
        pacing = read_mind(fleet, agent, folder).pacing
    except ConfigError as error:
        return Check(str(folder), "problem", str(error))
    forgotten = unwritten(pacing)
    if forgotten:
        return Check(agent.spec.name, "warning", " ".join(forgotten))
    runs = "runs by itself" if pacing.autonomy.enabled else "does not run by itself"
    return Check(agent.spec.name, "ok", f"It {runs}, with {counted(len(pacing.sensors), 'sensor')}.")


def _older(holds: Sequence[HoldRow], than: int) -> list[HoldRow]:
    return [hold for hold in holds if hold.at < than]


def _prices() -> Check:
    from importlib.metadata import version

    return Check("prices", "ok", f"Bundled table of genai-prices {version('genai-prices')}; your configuration wins.")


def _postgresql() -> Check:
    from importlib.util import find_spec

    if find_spec("psycopg") is None:
        return Check("postgresql", "ok", "No driver here; install halter[postgres] for more than one machine.")
    return Check("postgresql", "ok", "The driver is here.")

"""`halter doctor`: whether everything is there that a night without anybody watching needs."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec.structs import replace

from halter.app import open_app
from halter.app.health.check import Check, Verdict, problem
from halter.cli.answer import answer_json, answer_table, warn
from halter.cli.command import (
    NOT_FINE,
    UNUSABLE,
    JsonOption,
    StoreOption,
    hurried,
    refuse_missing,
    saying_errors,
    settings_for,
)
from halter.core.clock import SystemClock
from halter.core.errors import HalterError
from halter.journal.open import masked
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.config.fleet import Fleet

MARKS: Final[dict[Verdict, str]] = {"ok": "ok", "warning": "look", "problem": "PROBLEM"}
STORE: Final = "store"


def doctor(
    agents: Annotated[
        list[Path] | None, typer.Argument(metavar="[AGENT…]", help="Folders of agents to look at, too.")
    ] = None,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check store, clock, disk, workers, prices, sandbox, port and agents, and say what to do about each.

    Of an agent's folder its files, models, keys, secrets and sensors are looked at, but nothing of it is run: no model
    is asked, and no value of a secret is shown. Leaves with 1 if something is a problem, with 3 if the store is one.
    """
    settings = saying_errors(lambda: settings_for(store))
    checks = saying_errors(lambda: asyncio.run(_all(settings, agents or [])))
    if as_json:
        answer_json(checks)
    else:
        rows = [[check.name, MARKS[check.verdict], check.finding] for check in checks]
        answer_table(f"Halter on {masked(settings.store)}", ["what", "is", "finding"], rows, long="what finding")
    unusable = next((check for check in checks if check.name == STORE and check.verdict == "problem"), None)
    if unusable is not None:
        warn(unusable.finding, "red")
        raise typer.Exit(UNUSABLE)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(NOT_FINE)


async def _all(settings: Settings, agents: Sequence[Path]) -> list[Check]:
    return [check async for check in _looked_at(settings, agents)]


async def _looked_at(settings: Settings, agents: Sequence[Path]) -> AsyncGenerator[Check]:
    """Look at one thing after the other; whatever is wrong with one, the others are looked at."""
    from halter.app.health import machine
    from halter.app.health.agents import agent_checks

    yield machine.program()
    checks, fleet = await _store(settings)
    for check in checks:
        yield check
    yield machine.fleet_file(settings)
    for folder in agents:
        async for check in agent_checks(folder, settings, os.environ, fleet):
            yield check
    yield machine.prices(SystemClock().now())
    yield await machine.sandbox()
    yield await machine.port()
    if (tokens := machine.tokens(settings)) is not None:
        yield tokens
    yield machine.postgresql()


async def _store(settings: Settings) -> "tuple[list[Check], Fleet | None]":
    """Look at the store, if it can be opened, and at what holds for its agents; it is never made by that."""
    from halter.app.health.store import policy_here, store_checks

    try:
        refuse_missing(settings.store)
        places = replace(settings, store=hurried(settings.store))
        async with open_app(places, environ=os.environ, acts=False, despite_doubt=True) as app:
            return [check async for check in store_checks(app)], await policy_here(app)
    except HalterError as error:
        return [problem(STORE, str(error))], None

"""`halter doctor`: check everything that unattended agents need."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec.structs import replace

from halter.channels.serve import check_channels
from halter.cli.command import (
    JsonOption,
    StoreOption,
    add_connect_timeout,
    describe_never_used,
    is_never_used,
    read_cli_settings,
    report_errors,
    require_store,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_UNUSABLE
from halter.cli.output import answer_json, answer_table, warn
from halter.core.clock import SystemClock
from halter.core.errors import HalterError
from halter.journal.open import mask_url
from halter.net.httpx_transport import connect_directly
from halter.operations.doctor import machine
from halter.operations.doctor.agent_folder import check_agent
from halter.operations.doctor.check import Check, CheckStatus, fail_check
from halter.operations.doctor.store import check_store, read_local_policy
from halter.runtime.runtime import PriceSource, open_runtime
from halter.server.oidc import check_sign_on
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.config.merge import FleetConfig


MARKS: Final[dict[CheckStatus, str]] = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}
STORE: Final = "store"


def doctor(
    agents: Annotated[list[Path] | None, typer.Argument(metavar="AGENT", help="Agent folders to check, too.")] = None,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check store, disk, workers, channels, sign-on, prices, sandbox, port and agents, with a remedy for each problem.

    For an agent folder, check files, models, keys, secrets and sensors. No agent runs, no model is called, no secret is
    shown. Exits 1 if there is a problem, 3 if the store cannot be used.
    """
    settings = report_errors(lambda: read_cli_settings(store))
    checks = report_errors(lambda: asyncio.run(_collect_checks(settings, agents or [], is_never_used(settings, store))))
    if as_json:
        answer_json(checks)
    else:
        rows = [[check.name, MARKS[check.verdict], check.finding] for check in checks]
        answer_table(
            f"Halter on {mask_url(settings.store)}", ["check", "result", "finding"], rows, long="check finding"
        )
    store_problem = next((check for check in checks if check.name == STORE and check.verdict == "problem"), None)
    if store_problem is not None:
        warn(store_problem.finding, "red")
        raise typer.Exit(EXIT_UNUSABLE)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(EXIT_FAILED)


async def _collect_checks(settings: Settings, agents: Sequence[Path], is_unused: bool) -> list[Check]:
    return [check async for check in _run_checks(settings, agents, is_unused)]


async def _run_checks(settings: Settings, agents: Sequence[Path], is_unused: bool) -> AsyncGenerator[Check]:
    yield machine.check_program()
    prices = PriceSource()
    checks, fleet = (
        ([Check(STORE, "ok", describe_never_used(settings.store))], None)
        if is_unused
        else await _store(settings, prices)
    )
    for check in checks:
        yield check
    yield machine.check_fleet_file(settings)
    for folder in agents:
        async for check in check_agent(folder, settings, os.environ, fleet, prices.tables):
            yield check
    yield machine.check_prices(SystemClock().now(), prices.read())
    yield await machine.check_sandbox()
    yield await machine.check_port()
    if (tokens := machine.check_tokens(settings)) is not None:
        yield tokens
    yield machine.check_postgresql()


async def _store(settings: Settings, prices: PriceSource) -> "tuple[list[Check], FleetConfig | None]":
    """Check the store, if it can be opened, and read its policy and prices; a missing one is not created."""
    try:
        require_store(settings.store)
        settings_with_timeout = replace(settings, store=add_connect_timeout(settings.store))
        async with open_runtime(settings_with_timeout, environ=os.environ, acts=False, allow_older_copy=True) as app:
            checks = [check async for check in check_store(app)]
            checks += [check async for check in check_channels(app)]
            checks += [check] if (check := await check_sign_on(app, connect_directly)) else []
            await prices.refresh(app.store)
            return checks, await read_local_policy(app)
    except HalterError as error:
        return [fail_check(STORE, str(error))], None

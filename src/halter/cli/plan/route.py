"""`halter route`: how a message to an agent would be routed."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.output import answer_json, print_sentence
from halter.config.agent_files import read_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_agent
from halter.core.clock import SystemClock
from halter.front_door.route import RoutingDecision, route_message
from halter.journal.open import store_file_exists
from halter.runtime.message_router import build_surroundings, declares_tools
from halter.runtime.runtime import Runtime, read_local_fleet, resolve_effective_policy

if TYPE_CHECKING:
    from halter.core.ports import Store
    from halter.front_door.fast_paths import RoutingContext
from halter.cli.command import AgentArgument, resolve_agent_folder


def route(
    agent: AgentArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The message.")],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a message to an agent would be routed, and why. Nothing is executed or recorded.

    Sums, dates, commands and other messages that need no model are answered without one; this shows which rule applies.
    """
    folder = resolve_agent_folder(agent)
    name, decision = report_errors(lambda: _route_text(folder, text, store))
    if as_json:
        answer_json({"route": decision.route, "strategy": decision.strategy, "why": decision.why})
    else:
        print_sentence(f"{name}: {decision.strategy or decision.route}. {decision.why}")


def _route_text(folder: Path, text: str, store: str | None) -> tuple[str, RoutingDecision]:
    settings = read_cli_settings(store)
    file = read_local_fleet(settings)

    async def names(fleet: FleetConfig, store: "Store | None", now: int) -> "RoutingContext":
        agent = resolve_agent(fleet, read_agent(folder), folder)
        return await build_surroundings(agent, store, now, has_tools=declares_tools(agent, folder))

    async def job(app: Runtime) -> "RoutingContext":
        return await names((await resolve_effective_policy(app.store, file)).fleet, app.store, app.clock.now())

    if store_file_exists(settings.store):
        surroundings = run_with_app(store, job, despite_doubt=True)
    else:
        surroundings = asyncio.run(names(file or FleetConfig(), None, SystemClock().now()))
    return surroundings.agent, route_message(text, surroundings)

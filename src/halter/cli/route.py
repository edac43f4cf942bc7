"""`halter route`: which way a message would take."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halter.app import App
from halter.cli.answer import answer_json, say
from halter.cli.command import JsonOption, StoreOption, saying_errors, settings_for, with_app
from halter.cli.talk import AgentArgument, folder_of
from halter.core.clock import SystemClock

if TYPE_CHECKING:
    from halter.brain.fastpaths import Surroundings
    from halter.brain.route import Routed
    from halter.core.ports import Store


def route(
    agent: AgentArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What would be said to it.")],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which way a message to an agent would take, and why. Nothing is done, and nothing is written down.

    What needs no model, such as sums, dates and commands, is answered without one: this tells which rule decides
    it.
    """
    folder = folder_of(agent)
    name, found = saying_errors(lambda: _routed(folder, text, store))
    if as_json:
        answer_json({"route": found.route, "strategy": found.strategy, "why": found.why})
    else:
        say(f"{name}: {found.strategy or found.route}. {found.why}")


def _routed(folder: Path, text: str, store: str | None) -> "tuple[str, Routed]":
    from halter.app.asking import declares_tools, surroundings_of
    from halter.app.policy import policy_in_force, written_fleet
    from halter.brain.route import route as routed
    from halter.config.agent import read_agent
    from halter.config.fleet import Fleet
    from halter.config.resolve import resolve_agent
    from halter.journal.open import is_there

    settings = settings_for(store)
    file = written_fleet(settings)

    async def names(fleet: Fleet, store: "Store | None", now: int) -> "Surroundings":
        agent = resolve_agent(fleet, read_agent(folder), folder)
        return await surroundings_of(agent, store, now, has_tools=declares_tools(agent, folder))

    async def job(app: App) -> "Surroundings":
        return await names((await policy_in_force(app.store, file)).fleet, app.store, app.clock.now())

    if is_there(settings.store):
        known = with_app(store, job, despite_doubt=True)
    else:
        known = asyncio.run(names(file or Fleet(), None, SystemClock().now()))
    return known.agent, routed(text, known)

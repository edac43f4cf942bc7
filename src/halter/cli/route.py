"""`halter route`: which way a message would take."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halter.app import App
from halter.cli.answer import answer_json, say
from halter.cli.command import JsonOption, StoreOption, saying_errors, settings_for, with_app
from halter.cli.talk import AgentArgument, folder_of
from halter.core.clock import SystemClock
from halter.core.ports import Query
from halter.core.task_rows import TriggerRow
from halter.guard.approvals import needs_you

if TYPE_CHECKING:
    from halter.app.unrun import Written
    from halter.brain.route import Routed

Known = tuple[tuple[str, ...], tuple[str, ...]]


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
    from halter.app.policy import policy_in_force, written_fleet
    from halter.app.unrun import read_folder, surroundings_of
    from halter.brain.route import route as routed
    from halter.config.fleet import Fleet
    from halter.journal.open import is_there

    settings = settings_for(store)
    file = written_fleet(settings)

    async def job(app: App) -> "tuple[Written, Known]":
        written = read_folder(folder, (await policy_in_force(app.store, file)).fleet)
        name = written.policy.name
        rows = await app.store.ask(Query("triggers_of", TriggerRow, {"agent": name}))
        now = app.clock.now()
        waiting = [one.decision for one in await needs_you(app.store) if one.agent == name and one.expires_at > now]
        return written, (tuple(row.trigger.partition("/")[2] for row in rows), tuple(waiting))

    there = is_there(settings.store)
    written, known = (
        with_app(store, job, despite_doubt=True) if there else (read_folder(folder, file or Fleet()), ((), ()))
    )
    return written.policy.name, routed(text, surroundings_of(written, SystemClock().now(), *known))

"""`halter on` and `off`: switch an agent on or off."""

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    fail,
    make_desk,
    require_person,
    require_readable_name,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence
from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.resolve import resolve_agent
from halter.core.errors import ConfigError
from halter.operations.control import SwitchResult, list_known_agents, reject_unknown_agent, switch
from halter.runtime.forecast import describe_spending_limits, forecast_spending
from halter.runtime.runtime import Runtime, read_local_fleet, resolve_effective_policy

NamedArgument = Annotated[str, typer.Argument(metavar="AGENT", help="Agent name or folder.")]


def on(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent on. If `halter up` runs it, its next session starts immediately.

    Given a folder, first prints the maximum that the agent can spend in the next 12 hours and in thirty days: by
    schedules alone, and with messages, webhooks and watched folders.
    """

    async def job(app: Runtime) -> tuple[SwitchResult, Mapping[str, Decimal | None]]:
        require_person(app, "switch an agent on")
        name = await _resolve_agent_name(app, agent)
        costs = await _print_costs(app, Path(agent), name, as_json=as_json)
        return await switch(make_desk(app), name, on=True, reason=reason), costs

    result, costs = run_with_app(store, job)
    _show_switched(result, costs if as_json else None)


async def _print_costs(app: Runtime, folder: Path, name: str, *, as_json: bool) -> Mapping[str, Decimal | None]:
    if not (folder / AGENT_FILE).is_file():
        return {}

    policy = await resolve_effective_policy(app.store, read_local_fleet(app.settings))
    agent = resolve_agent(policy.fleet, read_agent(folder), folder)
    if agent.policy.name != name:
        return {}
    forecast = await forecast_spending(app.store, agent, folder, app.environ, app.clock.now())
    for sentence in () if as_json else (await describe_spending_limits(app, agent.policy), *forecast.describe()):
        print_sentence(sentence, at_once=True)
    return forecast.amounts()


def off(
    agent: NamedArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Switch an agent off. Its session stops within a second, and none starts until it is switched on.

    Works from any machine that reaches the store, whichever process runs the agent, and also if its file is broken.
    """

    async def job(app: Runtime) -> SwitchResult:
        return await switch(make_desk(app), await _resolve_agent_name(app, agent), on=False, reason=reason)

    result = run_with_app(store, job, despite_doubt=True)
    _show_switched(result, {"stopped": result.stopped} if as_json else None)


def _show_switched(result: SwitchResult, details: Mapping[str, Any] | None) -> None:
    if details is not None:
        answer_json({"agent": result.subject, "on": result.on, "known": result.known, **details})
        return
    print_sentence(result.sentence)


async def _resolve_agent_name(app: Runtime, agent: str) -> str:
    """Resolve an agent name or folder to an agent name.

    A known name takes precedence over a folder of that name: an agent with a broken file can be switched off.
    """
    require_readable_name(agent, "agent name")

    agent_names = await list_known_agents(make_desk(app))
    return agent if agent in agent_names else _name(agent) or reject_unknown_agent(agent, agent_names)


def _name(agent: str) -> str:
    """Read the name of an agent from its folder; "" if the folder has no agent."""
    folder = Path(agent)
    if folder.is_file() or (folder / AGENT_FILE).is_file():
        try:
            return read_agent(folder).spec.name
        except ConfigError as error:
            fail(str(error), EXIT_UNUSABLE)
    if not agent or "/" in agent:
        fail(f"No {AGENT_FILE} found in {agent!r}. Pass an agent name or folder.", EXIT_USAGE)
    return ""

"""`halter up`: run autonomous agents in this terminal."""

from pathlib import Path
from typing import Annotated

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    parse_listen_address,
    resolve_agent_folders,
    run_with_app,
)
from halter.cli.unattended.feed import RESTART_HINT
from halter.runtime.runtime import Runtime

AgentsArgument = Annotated[list[Path], typer.Argument(metavar="AGENT", help="Agent folders.")]


def up(
    agents: AgentsArgument,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address for webhooks.")
    ] = "127.0.0.1:8765",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run autonomous agents in this terminal until interrupted. The next start continues.

    A line reports each turn, sleep, wake and alert, and what needs you. With --json, each line is a JSON object.
    """
    host, port = parse_listen_address(listen)
    folders = resolve_agent_folders(agents)

    async def job(app: Runtime) -> None:
        from halter.cli.unattended.fleet import run_agents

        await run_agents(app, folders, host, port, as_json=as_json)

    run_with_app(
        store,
        job,
        new=True,
        runs_agents=True,
        until_interrupted=True,
        runs=RESTART_HINT,
    )

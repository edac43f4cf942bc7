"""`halter worker`: one of several processes that run agents on PostgreSQL."""

from pathlib import Path
from typing import Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    parse_listen_address,
    parse_typed_duration,
    read_cli_settings,
    report_errors,
    resolve_agent_folders,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.config.agent_files import AGENT_FILE
from halter.journal.open import mask_url
from halter.runtime.runtime import Runtime

WORKER_RESTART_HINT: Final = (
    "Start it again. Its sessions move to other workers when its lease expires; halted ones end."
)
AGENTS_FOLDER: Final = "agents"


def worker(
    agents: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AGENT", help="Agent folders (default: those here and in ./agents)."),
    ] = None,
    *,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="Maximum number of concurrent sessions.")
    ] = 200,
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="Time for running turns to finish on shutdown.")
    ] = "30s",
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Also receive webhooks at this address.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run agents as one of several workers on a PostgreSQL store, on any number of machines.

    Sessions go to workers with capacity. If a worker dies, its sessions move to others when its lease expires.
    """
    folders = resolve_agent_folders(agents or _find_agent_folders())
    webhook_address, grace = None if listen is None else parse_listen_address(listen), parse_typed_duration(drain)

    settings = report_errors(lambda: read_cli_settings(store))
    _require_postgres(settings.store)

    async def job(app: Runtime) -> None:
        from halter.cli.unattended.worker_process import run_worker

        await run_worker(app, folders, concurrency, grace, webhook_address, as_json=as_json)

    run_with_app(
        store,
        job,
        new=True,
        runs_agents=True,
        until_interrupted=True,
        wait_for_store=True,
        settings=settings,
        runs=WORKER_RESTART_HINT,
    )


def _find_agent_folders() -> list[Path]:
    current_folder = Path()
    candidates = [
        current_folder,
        *sorted(current_folder.iterdir()),
        *(sorted((current_folder / AGENTS_FOLDER).iterdir()) if (current_folder / AGENTS_FOLDER).is_dir() else ()),
    ]
    paths = [path for path in candidates if (path / AGENT_FILE).is_file()]
    if not paths:
        fail(
            f"No {AGENT_FILE} found here, in a folder here or in ./{AGENTS_FOLDER}. Pass the agent folders.",
            EXIT_USAGE,
        )
    return paths


def _require_postgres(url: str) -> None:
    """Require a PostgreSQL store, which holds the queue of tickets, before any file is made."""
    if not url.lower().startswith(("postgresql:", "postgres:")):
        fail(
            f"Workers need a PostgreSQL store; {mask_url(url)} is not one. Set HALTER_STORE=postgresql://…, or run "
            "the agents of this machine with `halter up`.",
            EXIT_UNUSABLE,
        )

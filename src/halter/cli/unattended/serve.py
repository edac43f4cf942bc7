"""`halter serve`: the dashboard and the API, and agents beside them."""

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    is_never_used,
    parse_listen_address,
    read_cli_settings,
    report_errors,
    require_person,
    resolve_agent_folders,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.unattended.feed import RESTART_HINT
from halter.cli.unattended.proxy import PROXY_RESTART_HINT
from halter.hooks.registry import has_hooks
from halter.runtime.runtime import Runtime
from halter.server.listener import bind, require_server

_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def serve(
    agents: Annotated[list[Path] | None, typer.Argument(metavar="AGENT", help="Folders of agents to run here.")] = None,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on; port 0 picks a free port.")
    ] = "127.0.0.1:8765",
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Another host name of the server. Repeatable."),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="HOST:PORT", help="Also serve the proxy at this address."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the dashboard and the HTTP API until interrupted. Agents given here run as with `halter up`.

    The first start makes a token and shows it once. Make others with `halter tokens add`.
    """
    address = parse_listen_address(listen, min_port=0)
    proxy_address = None if proxy is None else parse_listen_address(proxy, min_port=0)
    names = [_name(each) for each in host or ()]
    folders = resolve_agent_folders(agents or ())

    async def job(app: Runtime) -> None:
        require_person(app, "start the server")
        require_server()
        from halter.cli.unattended.web import open_proxy, serve_dashboard

        listener = open_proxy(app, proxy_address, beyond=beyond)
        await serve_dashboard(app, folders, bind(*address, beyond=beyond), names, listener, as_json=as_json)

    settings = report_errors(lambda: read_cli_settings(store))
    runs = RESTART_HINT if folders else PROXY_RESTART_HINT if proxy else ""
    create_store = bool(runs) or is_never_used(settings, store)
    acts = bool(runs) or report_errors(lambda: has_hooks(settings))
    run_with_app(store, job, new=create_store, runs_agents=acts, until_interrupted=True, runs=runs)


def _name(host: str) -> str:
    if not _HOST.fullmatch(host):
        fail(f"Invalid host name {host!r}. Use a form such as halter.example or halter.example:8443.", EXIT_USAGE)
    return host

"""`halter gateway`: guard the calls of other programs to MCP servers."""

from pathlib import Path
from typing import Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    parse_listen_address,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.output import encode_json_line, print_sentence, warn
from halter.cli.trust.keys import find_key_file
from halter.cli.unattended.proxy import LOCAL_HOST
from halter.core.errors import require_module
from halter.proxy.keys import KeyRing
from halter.runtime.runtime import (
    Runtime,
)
from halter.server.listener import bind, format_address, require_server

GATEWAY_RESTART_HINT: Final = "Start it again. `halter inbox` asks you about calls that were interrupted."


def gateway(
    *,
    agent: Annotated[
        str, typer.Option("--agent", metavar="NAME", help="Agent that makes the calls: a folder or a name.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="MCP servers behind the gateway (default: .mcp.json of the folder)."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Serve over HTTP at /mcp, to clients with a virtual key; :PORT listens on this machine.",
        ),
    ] = None,
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the tools of MCP servers to another program; each of its calls passes the guard.

    The program starts this command in place of its servers and uses stdin and stdout, or connects over HTTP with a
    virtual key of `halter keys new`. Messages for you are on stderr.
    """
    if as_json and http is None:
        fail("--json requires --http: without it, stdout carries the protocol.", EXIT_USAGE)

    async def job(app: Runtime) -> None:
        _require_mcp()
        from halter.gateway.serve import make_mcp_terms, read_gateway_agent, serve_http, serve_stdio

        owner = read_gateway_agent(app, agent, config)
        terms = make_mcp_terms(app, owner, config)
        if http is None:
            await serve_stdio(app, owner, terms, warn)
            return

        require_server()
        address = f"{LOCAL_HOST}{http}" if http.startswith(":") else http
        listening = bind(*parse_listen_address(address, min_port=0), beyond=beyond)
        name, url = owner.agent.policy.name, f"{format_address(listening)}/mcp"
        if as_json:
            line = {"name": "serving", "at": app.clock.now(), "url": url, "agent": name}
            print_sentence(encode_json_line(line).decode().rstrip("\n"), at_once=True)
        else:
            print_sentence(f"The gateway of {name} is at {url}. Ctrl-C stops it.", at_once=True)
        await serve_http(app, owner, terms, warn, listening, KeyRing(find_key_file(app.settings)))

    run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=GATEWAY_RESTART_HINT)


def _require_mcp() -> None:
    require_module("mcp", "mcp", "The gateway")

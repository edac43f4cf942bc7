"""`halter serve`: the API and the dashboard, and agents that run by themselves beside them."""

import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from halter.app import App
from halter.cli.answer import json_line, painted
from halter.cli.command import WRONG_USE, JsonOption, StoreOption, fail, only_a_person, with_app
from halter.cli.printer import Printer
from halter.cli.tokens import file_of, made
from halter.cli.up import AGAIN, HOW_TO_STOP, address, bus_of, folders_of, run_and_show, shows_of
from halter.core.errors import ConfigError

_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def serve(
    agents: Annotated[
        list[Path] | None, typer.Argument(metavar="AGENT…", help="The folders of agents that run here as well.")
    ] = None,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 is any that is free.")
    ] = "127.0.0.1:8765",
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Be reached from other machines, without encryption.")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Another name that the server is asked by; may be repeated."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the dashboard and the HTTP API, until you interrupt it. Agents that are named run as with `halter up`.

    The first start makes a token and shows it once. Others are made with `halter tokens add`.
    """
    where = address(listen, least=0)
    names = [_name(each) for each in host or ()]
    folders = folders_of(agents or ())

    async def job(app: App) -> None:
        from halter.server.web import bind, demand_server

        only_a_person(app, "open the server")
        demand_server()
        await _serve(app, folders, bind(*where, beyond=beyond), names, as_json=as_json)

    with_app(store, job, new=bool(folders), acts=bool(folders), following=True, runs=AGAIN if folders else "")


def _name(host: str) -> str:
    if not _HOST.fullmatch(host):
        fail(f"{host!r} is no name of a server: write it like halter.example or halter.example:8443.", WRONG_USE)
    return host


async def _serve(app: App, folders: list[Path], listening: socket.socket, names: list[str], *, as_json: bool) -> None:
    from halter.brain.together import together
    from halter.server.tokens import Keyring
    from halter.server.web import Deliveries, Extras, serve_web

    file, bus, deliveries = file_of(app.settings), bus_of(app), Deliveries()
    async with Printer() as printer:
        shows = shows_of(printer, app.clock, as_json=as_json)
        printer.put(_welcome(app, listening, as_json=as_json))
        extras: Extras = Extras(
            names=names,
            deliveries=deliveries,
            tell=lambda sentence: shows.told("", sentence),
            folders=_by_name(folders),
        )
        serving = [lambda: serve_web(app, listening, Keyring(file), bus, extras)]
        running = [lambda: run_and_show(app, folders, bus, shows, deliveries.serve, "serve")] if folders else []
        await together([*serving, *running])


def _by_name(folders: list[Path]) -> dict[str, Path]:
    """Read the names of agents; a folder that cannot be read is told of when its agent is to run."""
    from halter.config.agent import read_agent

    found: dict[str, Path] = {}
    for folder in folders:
        with suppress(ConfigError):
            found[read_agent(folder).spec.name] = folder
    return found


def _welcome(app: App, listening: socket.socket, *, as_json: bool) -> str:
    """Say where the server is; where nobody has a token yet, make one and show it this once."""
    from halter.server.login import login_url
    from halter.server.tokens import LOST, name_for
    from halter.server.web import address as address_of

    url, first = address_of(listening), ""
    if not file_of(app.settings).tokens():
        secret, _ = made(app.settings, name_for(app.settings.person), "admin")
        first = login_url(url, secret)
    if as_json:
        more = {"login_url": first} if first else {}
        return json_line({"name": "serving", "at": app.clock.now(), "url": url, **more}).decode()
    way = (
        f"Open it with your first token, which is shown this once: {first}" if first else f"Log in with a token. {LOST}"
    )
    return "".join(painted(line) for line in (f"The dashboard and the API are at {url}", way, HOW_TO_STOP))

"""The live view of `halter status --live`, of a store or of a server."""

import asyncio
import os
from typing import Final

from halter.cli.command import (
    make_desk,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.output import answer_json
from halter.core.errors import NotDone
from halter.net.client import HttpClient
from halter.net.httpx_transport import HttpxTerms, HttpxTransport
from halter.operations.top import FleetView
from halter.top.rows import build_top_sheet
from halter.top.source import OperationSource, ServerSource, StoreSource, check_server

SERVER_TIMEOUT_SECONDS: Final = 10


def show_fleet(*, once: bool, server: str, token_variable: str, store: str | None, as_json: bool) -> None:
    """Run the live terminal of a store or of a server; with `once`, print its view instead."""
    if server:
        token = os.environ.get(token_variable, "")
        view = report_errors(lambda: asyncio.run(_watch_server(server, token, token_variable, once=once)))
    else:
        view = run_with_app(
            store,
            lambda app: _watch(StoreSource(make_desk(app, store)), once=once),
            despite_doubt=True,
            allow_missing=True,
            until_interrupted=not once,
        )
    if view is None:
        return
    if as_json:
        answer_json(view)
    else:
        show_sheet(build_top_sheet(view))


async def _watch_server(url: str, token: str, token_variable: str, *, once: bool) -> FleetView | None:
    if not token:
        raise NotDone(f"${token_variable} is not set. Set it to a token from `halter tokens add`.", "wrong")
    check_server(url, token)
    terms = HttpxTerms(SERVER_TIMEOUT_SECONDS, SERVER_TIMEOUT_SECONDS, uses_environment=True)
    async with HttpClient(HttpxTransport(terms)) as client:
        return await _watch(ServerSource(url, token, client), once=once)


async def _watch(source: OperationSource, *, once: bool) -> FleetView | None:
    """Return the view with `once`; otherwise run the live terminal and return None."""
    if once:
        return await source.call("top")
    from halter.top.app import TopApp

    await TopApp(source).run_async()
    return None

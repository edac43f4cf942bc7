"""What `halter serve` runs: the server, hooks, channels, the proxy and agents."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from halter.channels.serve import serve_channels
from halter.cli.output import encode_json_line, render_sentence
from halter.cli.terminal import Printer
from halter.cli.trust.tokens import create_token, find_token_file
from halter.cli.unattended.feed import HOW_TO_STOP, FeedPrinter, make_bus
from halter.cli.unattended.fleet import run_and_show
from halter.cli.unattended.proxy_listener import OpenedProxy, listen_for_clients
from halter.config.agent_files import read_agent
from halter.core.errors import ConfigError
from halter.hooks.registry import has_hooks
from halter.hooks.server import serve_hooks
from halter.loop.concurrency import run_together
from halter.net.httpx_transport import connect_directly
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.runtime import Runtime, read_local_fleet
from halter.server.auth import LOST_TOKEN_ADVICE, Keyring, suggest_token_name
from halter.server.listener import format_address
from halter.server.login import make_login_url
from halter.server.oidc import make_oidc_sign_on
from halter.server.server import ServerExtras, WebhookEndpoint, serve_web
from halter.server.sign_on import make_proxy_sign_on


async def serve_dashboard(
    app: Runtime,
    folders: list[Path],
    listening: socket.socket,
    names: list[str],
    proxy: OpenedProxy | None,
    *,
    as_json: bool,
) -> None:
    token_file, bus, deliveries = find_token_file(app.settings), make_bus(app), WebhookEndpoint()
    async with Printer() as printer:
        feed_printer = FeedPrinter(printer, app.clock, as_json=as_json)
        printer.write(_welcome(app, listening, proxy, as_json=as_json))
        extras: ServerExtras = ServerExtras(
            names=names,
            deliveries=deliveries,
            report=lambda sentence: feed_printer.report("", sentence),
            folders=_index_by_name(folders),
        )
        extras = _add_sign_on(app, extras)
        web_jobs = [lambda: serve_web(app, listening, Keyring(token_file), bus, extras)]
        agent_jobs = (
            [lambda: run_and_show(app, folders, bus, feed_printer, deliveries.serve, "serve")] if folders else []
        )
        hook_jobs = (
            [lambda: _serve_hooks(app, partial(feed_printer.report, "hooks"))] if has_hooks(app.settings) else []
        )
        proxy_jobs = [] if proxy is None else [lambda: proxy.serve(app)]
        channel_jobs = [lambda: serve_channels(app, partial(feed_printer.report, "channels"))]
        await run_together([*web_jobs, *agent_jobs, *hook_jobs, *proxy_jobs, *channel_jobs])


def _add_sign_on(app: Runtime, extras: ServerExtras) -> ServerExtras:
    """Add the sign-on proxies and the provider of halter.yaml, which identify the caller."""
    from msgspec import UNSET

    fleet = read_local_fleet(app.settings)
    if fleet is None or fleet.spec.sign_on is UNSET:
        return extras
    spec, reveal = fleet.spec.sign_on, read_environment_secrets(app.environ).value
    if spec.proxies:
        extras = replace(extras, by_proxy=make_proxy_sign_on(spec, reveal).identify)
    return replace(extras, oidc=make_oidc_sign_on(spec, reveal, connect_directly))


async def _serve_hooks(app: Runtime, report: Callable[[str], None]) -> None:
    """Answer hooks next to the server, which continues if that fails."""
    try:
        await serve_hooks(app, report, lambda path: report(f"Answering hooks at {path}."))
    except ConfigError as error:
        report(f"Cannot answer hooks here: {error}")
    await asyncio.Event().wait()


def _index_by_name(folders: list[Path]) -> dict[str, Path]:
    """Map agents to folders. An unreadable folder is reported when its agent starts."""
    folder_by_name: dict[str, Path] = {}
    for folder in folders:
        with suppress(ConfigError):
            folder_by_name[read_agent(folder).spec.name] = folder
    return folder_by_name


def _welcome(app: Runtime, listening: socket.socket, proxy: OpenedProxy | None, *, as_json: bool) -> str:
    url, first_login_url = format_address(listening), ""
    if not find_token_file(app.settings).tokens():
        secret, _ = create_token(app.settings, suggest_token_name(app.settings.person), "admin")
        first_login_url = make_login_url(url, secret)
    if as_json:
        optional_urls = {
            **({"login_url": first_login_url} if first_login_url else {}),
            **({"proxy_url": proxy.url} if proxy else {}),
        }
        return encode_json_line({"name": "serving", "at": app.clock.now(), "url": url, **optional_urls}).decode()
    login_hint = (
        f"Open it with your first token, which is shown only once: {first_login_url}"
        if first_login_url
        else f"Log in with a token. {LOST_TOKEN_ADVICE}"
    )
    proxy_lines = (proxy.welcome(),) if proxy else ()
    lines = (f"The dashboard and the API are at {url}", login_hint, *proxy_lines, HOW_TO_STOP)
    return "".join(map(render_sentence, lines))


def open_proxy(app: Runtime, address: tuple[str, int] | None, *, beyond: bool) -> OpenedProxy | None:
    """Open the proxy at an address, if there is one."""
    return None if address is None else listen_for_clients(app, address, beyond=beyond)

"""The proxy, with a port bound for its clients."""

import socket
from collections.abc import Callable, Mapping

import msgspec

from halter.cli.trust.keys import find_key_file
from halter.loop.concurrency import run_together
from halter.proxy.keys import KeyRing
from halter.proxy.proxy import Upstream, find_upstreams, require_other_address, serve_proxy
from halter.runtime.runtime import (
    DEFAULT_LEASE_DURATION,
    Runtime,
)
from halter.runtime.worker import list_price_jobs
from halter.server.listener import bind, format_address, require_server


class OpenedProxy(msgspec.Struct, frozen=True):
    """A proxy with a bound port, not served yet."""

    listening: socket.socket
    url: str
    upstreams: Mapping[str, Upstream]

    def welcome(self) -> str:
        names = " and ".join(each.provider for each in self.upstreams.values())
        return f"The proxy to {names} is at {self.url}; OpenAI clients use {self.url}/v1."

    async def serve(self, app: Runtime) -> None:
        """Serve until cancelled."""
        ring = KeyRing(find_key_file(app.settings))
        await serve_proxy(app, self.listening, ring, self.upstreams, lease=DEFAULT_LEASE_DURATION)


def listen_for_clients(
    app: Runtime,
    address: tuple[str, int],
    anthropic: str = "anthropic",
    openai: str = "openai",
    *,
    beyond: bool = False,
) -> OpenedProxy:
    """Find the providers and bind the port."""
    require_server()
    upstreams = find_upstreams(app, anthropic, openai)
    listening = bind(*address, beyond=beyond)
    url = format_address(listening)
    require_other_address(upstreams, url)
    return OpenedProxy(listening, url, upstreams)


async def serve_with_prices(app: Runtime, listener: OpenedProxy, report: Callable[[str], None]) -> None:
    """Serve the proxy until cancelled, and keep the price table fresh."""
    await run_together([lambda: listener.serve(app), *list_price_jobs(app, report)])

"""Entry points of the gateway: on pipes for the program that started it, or over HTTP for clients with a key."""

import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings

from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.mcp_file import MCP_FILE, read_servers
from halter.config.resolve import resolve_agent
from halter.core.clock import WindowLength
from halter.core.errors import ConfigError
from halter.core.money import DOLLAR, Cap
from halter.core.tools import Failed
from halter.gateway.calls import Context
from halter.gateway.server import OWN, ClientIdentity, Gateway, ReportListener, open_gateway
from halter.gateway.upstreams import GatewayAgent
from halter.loop.concurrency import raise_if_cancelled
from halter.proxy.keys import KeyRing, VirtualKey, find_client_key
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.agent import parse_agent_options
from halter.runtime.agent_runtime import make_agent_runtime
from halter.runtime.assembly.folder_code import find_agent_code, read_trusted_servers, require_loadable, require_trusted
from halter.runtime.runtime import Runtime
from halter.server.listener import serve_asgi
from halter.tools.mcp import McpTerms
from halter.tools.mcp_transport import open_own_pipes

PATH: Final = "/mcp"
_SESSION_HEADER: Final = "mcp-session-id"
_KEY_IN_SCOPE: Final = "halter.key"
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


def read_gateway_agent(app: Runtime, agent: str, config: Path | None) -> GatewayAgent:
    """Read the agent of the gateway and its servers. Raises ConfigError.

    An agent with a folder has its own file and servers, which a person must have trusted. An agent without a folder has
    the fleet's policy. A `config` from the command line is trusted, because a person typed it.
    """
    folder = Path(agent) if (Path(agent) / AGENT_FILE).is_file() else None
    file = parse_agent_options(agent, {}, f"the agent {agent}", {}, {}) if folder is None else read_agent(folder)
    resolved_agent = resolve_agent(app.fleet, file, folder)
    path = config or (folder or Path()) / MCP_FILE
    if config is None and folder is not None:
        servers = read_trusted_servers(folder, require_trusted(app.settings, folder), app.environ)
    else:
        servers = read_servers(path, app.environ)
    if not servers:
        problem = "names no MCP server" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {problem}. Add servers under `mcpServers`, or pass another file with --config.")
    if any(each.name == OWN for each in servers):
        raise ConfigError(f"{path} has a server named {OWN}, which is the gateway's own name. Rename the server.")
    if config is None and folder is not None:
        require_loadable(servers, folder, app)
    if file.spec.gateway.sampling and not resolved_agent.model_settings.model:
        raise ConfigError(
            f"`gateway.sampling` of {agent} needs a model. Add `model: provider:model` to its agent.yaml."
        )
    secrets = read_environment_secrets(app.environ)
    return GatewayAgent(make_agent_runtime(app, resolved_agent, {}, secrets), file, file.spec.gateway, servers)


def make_mcp_terms(app: Runtime, owner: GatewayAgent, config: Path | None) -> McpTerms:
    folder = owner.agent.definition.source_folder if config is None else None

    def reject_untrusted() -> None:
        if folder is None:
            return
        try:
            require_trusted(app.settings, folder, find_agent_code(app.settings, folder))
            require_loadable(owner.servers, folder, app)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    def reveal(name: str) -> str:
        if name not in owner.agent.policy.secrets:
            raise KeyError(name)
        return owner.agent.secrets.value(name)

    return McpTerms(app.clock, app.environ, reveal=reveal, before_start=reject_untrusted, timeout=owner.spec.timeout)


async def serve_stdio(app: Runtime, owner: GatewayAgent, terms: McpTerms, report: ReportListener) -> None:
    """Serve the program at the other end of the pipes until it closes them."""
    pipes = open_own_pipes(sys.stdin.fileno(), sys.stdout.fileno(), terms.max_message)
    async with open_gateway(app, owner, terms, report=report) as gateway, pipes as (read, write):
        try:
            await gateway.server.run(read, write, gateway.server.create_initialization_options())
        except* (anyio.BrokenResourceError, anyio.ClosedResourceError):
            """The program ended while a message was in transit."""
        raise_if_cancelled()


async def serve_http(
    app: Runtime, owner: GatewayAgent, terms: McpTerms, report: ReportListener, listening: socket.socket, keys: KeyRing
) -> None:
    """Serve over HTTP until cancelled, on a bound port."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(open_gateway(app, owner, terms, identify_by_key, report))
        await serve_asgi(make_http_app(gateway, keys, owner.agent.policy.name), listening)


def make_http_app(gateway: Gateway, keys: KeyRing, agent: str) -> "KeyEntrance":
    # Every request needs a key, so a page in the owner's browser cannot use the gateway.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    inner = gateway.server.streamable_http_app(streamable_http_path=PATH, transport_security=security)
    return KeyEntrance(inner, keys, agent)


class KeyEntrance:
    """Middleware that accepts requests with a key of the gateway's agent. A session stays bound to its key."""

    def __init__(self, inner: Any, keys: KeyRing, agent: str) -> None:
        self._inner = inner
        self._keys = keys
        self._agent = agent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        key = self._keys.find(find_client_key(scope["headers"]))
        if sentence := self._refuse(key):
            await _refuse(send, sentence)
            return
        if key is None:
            raise AssertionError("A request without a key was let in.")
        token = AccessToken(token=key.digest, client_id=key.name, scopes=[])
        await self._inner({**scope, _KEY_IN_SCOPE: key, "user": AuthenticatedUser(token)}, receive, send)

    def _refuse(self, key: VirtualKey | None) -> str:
        if key is None:
            problem = f" {self._keys.problem}" if self._keys.problem else ""
            return f"Unknown key. Create one with `halter keys new --agent {self._agent}`.{problem}"
        if key.revoked_at is not None:
            return f"The key {key.name} was revoked."
        if key.agent != self._agent:
            return f"The key {key.name} belongs to the agent {key.agent}, but this gateway serves {self._agent}."
        return ""


async def _refuse(send: Send, sentence: str) -> None:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": -41401, "message": f"Halter: {sentence}"}}
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(error)})


def identify_by_key(context: Context) -> ClientIdentity:
    """Identify a client by its key. The transport's session only distinguishes the clients of one key."""
    request = context.request
    if request is None:
        raise AssertionError("A request over HTTP has no key.")
    key: VirtualKey = request.scope[_KEY_IN_SCOPE]
    return ClientIdentity(key.digest, request.headers.get(_SESSION_HEADER, ""), f"key:{key.name}", list_key_caps(key))


def list_key_caps(key: VirtualKey) -> tuple[Cap, ...]:
    """Return a key's own caps: for one session, and for its agent's hours and days, which all its keys share."""
    limits = key.limits
    amounts: tuple[tuple[Decimal | None, WindowLength], ...] = (
        (limits.max_cost_usd, ""),
        (limits.max_cost_usd_per_hour, "hour"),
        (limits.max_cost_usd_per_day, "day"),
    )
    return tuple(Cap(int(amount * DOLLAR), per) for amount, per in amounts if amount is not None)

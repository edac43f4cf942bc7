"""`halter proxy`, `keys` and `gateway`: guard the requests and calls of other programs' agents."""

import asyncio
import os
import socket
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    group,
    read_cli_settings,
    report_errors,
    require_person,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, encode_json_line, print_sentence, warn
from halter.cli.up import parse_listen_address
from halter.config.merge import FleetConfig
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, require_module
from halter.core.ids import can_decide
from halter.core.money import format_usd
from halter.present.moments import format_moment
from halter.runtime.runtime import (
    DEFAULT_FLEET,
    DEFAULT_LEASE_DURATION,
    Runtime,
    read_local_fleet,
    resolve_effective_policy,
)
from halter.settings import Settings, find_keys_file

if TYPE_CHECKING:
    from halter.net.client import HttpAnswer, HttpRequest
    from halter.proxy.keys import KeyFile
    from halter.proxy.proxy import Upstream

LOCAL_HOST: Final = "127.0.0.1"
DEFAULT_LISTEN: Final = "127.0.0.1:8766"
KEY_VARIABLE: Final = "HALTER_KEY"
CHECK_SECONDS: Final = 60
MAX_CHECK_BYTES: Final = 1024 * 1024
PROXY_RESTART_HINT: Final = "Start it again. The holds of interrupted requests are settled at their maximum."
GATEWAY_RESTART_HINT: Final = "Start it again. `halter inbox` asks you about calls that were interrupted."

ClientArgument = Annotated[
    str, typer.Argument(metavar="CLIENT", help="claude, codex, aider, opencode, openhands, llm or langchain.")
]
UrlOption = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the proxy.")]
KeyOption = Annotated[str | None, typer.Option("--key", metavar="KEY", help=f"Virtual key (default: ${KEY_VARIABLE}).")]
ModelOption = Annotated[str, typer.Option("--model", metavar="MODEL", help="Model, as its provider names it.")]


def serve_here(
    *,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help=f"Address to listen on (default: {DEFAULT_LISTEN})."),
    ] = None,
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    anthropic: Annotated[
        str | None,
        typer.Option("--anthropic", metavar="PROVIDER", help="Provider for Messages (default: anthropic)."),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(
            "--openai", metavar="PROVIDER", help="Provider for Chat Completions and Responses (default: openai)."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the proxy until interrupted. Clients use a virtual key of `halter keys new`, never a provider's key.

    Messages, Chat Completions and Responses pass byte for byte. Each request is held against every cap before it is
    sent, and settled at its true cost. `halter proxy env CLIENT` prints how to configure a client.
    """
    address = parse_listen_address(listen or DEFAULT_LISTEN, min_port=0)

    async def job(app: Runtime) -> None:
        from halter.loop.concurrency import run_together
        from halter.runtime.worker import list_price_jobs

        require_person(app, "start the proxy")
        listener = listen_for_clients(app, address, anthropic or "anthropic", openai or "openai", beyond=beyond)
        if as_json:
            line = {
                "name": "serving",
                "at": app.clock.now(),
                "url": listener.url,
                "providers": sorted(listener.upstreams),
            }
            print_sentence(encode_json_line(line).decode().rstrip("\n"), at_once=True)
        else:
            print_sentence(listener.welcome(), at_once=True)
            print_sentence(
                "Make a virtual key with `halter keys new --agent NAME`. Ctrl-C stops the proxy.", at_once=True
            )
        await run_together([lambda: listener.serve(app), *list_price_jobs(app, warn)])

    run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=PROXY_RESTART_HINT)


class OpenedProxy(msgspec.Struct, frozen=True):
    """A proxy with a bound port, not served yet."""

    listening: socket.socket
    url: str
    upstreams: "Mapping[str, Upstream]"

    def welcome(self) -> str:
        names = " and ".join(each.provider for each in self.upstreams.values())
        return f"The proxy to {names} is at {self.url}; OpenAI clients use {self.url}/v1."

    async def serve(self, app: Runtime) -> None:
        """Serve until cancelled."""
        from halter.proxy.keys import KeyRing
        from halter.proxy.proxy import serve_proxy

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
    from halter.proxy.proxy import find_upstreams, require_other_address
    from halter.server.listener import bind, format_address, require_server

    require_server()
    upstreams = find_upstreams(app, anthropic, openai)
    listening = bind(*address, beyond=beyond)
    url = format_address(listening)
    require_other_address(upstreams, url)
    return OpenedProxy(listening, url, upstreams)


def show_env(
    client: ClientArgument,
    *,
    url: UrlOption = f"http://{DEFAULT_LISTEN}",
    key: KeyOption = None,
    model: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Print the configuration of a client for the proxy: lines for a shell, or the file that it reads.

    `eval "$(halter proxy env claude)"` configures Claude Code for the proxy in this shell.
    """
    from halter.proxy.clients import find_client, render_setup

    setup = report_errors(lambda: find_client(client), EXIT_USAGE)
    lines, file = render_setup(setup, url.rstrip("/"), key or os.environ.get(KEY_VARIABLE) or "KEY", model)
    if as_json:
        answer_json({"client": client, "file": file, "lines": lines})
        return
    if file:
        print_sentence(f"# {file}" if "toml" in file else f"// {file}")
    print_sentence(lines.rstrip("\n"))


def check_client(
    client: ClientArgument,
    *,
    url: UrlOption = f"http://{DEFAULT_LISTEN}",
    key: KeyOption = None,
    model: ModelOption = "",
    as_json: JsonOption = False,
) -> None:
    """Send one small request through the proxy, as a client does. It has a small cost, and is in the journal.

    Exits 1 if the proxy or its provider refuses it.
    """
    from halter.net.client import HttpRequest
    from halter.net.failures import HttpFailure
    from halter.proxy.clients import find_client, make_check_body

    setup = report_errors(lambda: find_client(client), EXIT_USAGE)
    secret = key or os.environ.get(KEY_VARIABLE, "")
    if not secret:
        fail(f"No virtual key. Pass --key KEY, or set {KEY_VARIABLE}.", EXIT_USAGE)
    address = f"{url.rstrip('/')}/v1{setup.dialect.path}"
    headers = {
        "authorization": f"Bearer {secret}",
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
    }
    try:
        body = make_check_body(setup, model)
        answer = asyncio.run(_fetch_once(HttpRequest("POST", address, headers, body)))
    except HttpFailure as failure:
        fail(f"Cannot reach the proxy at {url}: {failure.reason}. Start it with `halter proxy`.", EXIT_FAILED)
    if as_json:
        answer_json({"client": client, "status": answer.status, "model": model or setup.model})
    elif answer.is_success:
        print_sentence(f"{client} works: {model or setup.model} answered through {url}.")
    if not answer.is_success:
        fail(f"The proxy answered {answer.status}: {_find_message(answer.body)}", EXIT_FAILED)


async def _fetch_once(request: "HttpRequest") -> "HttpAnswer":
    from halter.net.client import HttpClient
    from halter.net.httpx_transport import HttpxTerms, HttpxTransport

    async with HttpClient(HttpxTransport(HttpxTerms(uses_environment=True))) as client:
        return await client.fetch(request, max_bytes=MAX_CHECK_BYTES, max_wait=CHECK_SECONDS)


def _find_message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body.decode(errors="replace")[:300]


proxy = group(
    "Serve the proxy, which gives other programs' agents budgets, halts and a journal.",
    {"env": show_env, "check": check_client},
    serve_here,
)


def list_keys(*, as_json: JsonOption = False) -> None:
    """List the virtual keys of the proxy. Only digests are stored: revoke a lost key, and make another.

    Each has an agent whose account it spends from, a daily cap, and the models that it may use.
    """
    from halter.proxy.keys import render_key

    keys = report_errors(lambda: find_key_file(read_cli_settings(None)).read_keys())
    if as_json:
        answer_json([render_key(key) for key in keys])
        return
    if not keys:
        print_sentence("There are no virtual keys. Make one with `halter keys new --agent NAME`.")
        return
    rows = [
        [
            key.name,
            key.agent,
            _dollars(key.limits.max_cost_usd_per_day),
            ", ".join(key.limits.models) or "all",
            format_moment(key.made_at),
            "revoked" if key.revoked_at is not None else "",
        ]
        for key in keys
    ]
    answer_table("Keys", ["name", "agent", "per day", "models", "created", "status"], rows)


def _dollars(amount: Decimal | None) -> str:
    return "" if amount is None else format_usd(amount)


def new_key(
    *,
    agent: Annotated[str, typer.Option("--agent", metavar="AGENT", help="Agent whose account it spends from.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the key (default: the agent's).")] = "",
    per_day: Annotated[
        str, typer.Option("--max-cost-usd-per-day", metavar="USD", help="Daily cap of the agent (default: 5).")
    ] = "",
    per_hour: Annotated[
        str, typer.Option("--max-cost-usd-per-hour", metavar="USD", help="Hourly cap of the agent.")
    ] = "",
    per_session: Annotated[
        str, typer.Option("--max-cost-usd", metavar="USD", help="Cap of one session of its client.")
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option("--tokens-per-hour", metavar="N", min=1, help="Token limit of the agent per hour."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Allowed model pattern, such as anthropic:claude-*. Repeatable."),
    ] = None,
    mask_secrets: Annotated[
        bool, typer.Option("--mask-secrets", help="Mask secrets in requests of its clients to the provider.")
    ] = False,
    max_body: Annotated[
        int | None,
        typer.Option("--max-body-mb", metavar="N", min=1, max=64, help="Largest request, in megabytes (default: 8)."),
    ] = None,
    allow_member: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-member",
            metavar="NAME",
            help="Member or tool of requests to pass on, whatever it costs. Repeatable.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Set the agent's caps of this key for all other keys of the agent, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a virtual key for a client of the proxy. It is shown once, and works immediately on a running proxy, too.

    Keys of one agent spend from one account and share its caps: a key without caps keeps those of the agent's other
    keys. The fleet's caps apply to all keys together.
    """
    from halter.proxy.key_terms import describe_lower_cap, resolve_key
    from halter.proxy.keys import KeyLimits, make_key_secret, make_virtual_key, render_key

    settings = _require_person_settings()
    secret = make_key_secret()
    fleet = _read_fleet(settings)

    def create_key() -> Any:
        amounts = _read_usd(per_session), _read_usd(per_hour), _read_usd(per_day)
        limits = KeyLimits(*amounts, tokens, tuple(model or ()), mask_secrets, max_body, tuple(allow_member or ()))
        key = make_virtual_key(secret, name or agent, agent, SystemClock().now(), settings.person, limits)
        resolve_key(fleet, key)
        return find_key_file(settings).add(key, replaces_limits=replace)

    key = report_errors(create_key, EXIT_USAGE)
    if notice := describe_lower_cap(resolve_key(fleet, key)):
        warn(notice)
    if as_json:
        answer_json({**render_key(key), "key": secret})
        return
    print_sentence(secret)
    print_sentence(
        f"Virtual key {key.name}, which spends as {agent}. It is shown only once; only its digest is stored."
    )
    if not per_day and key.limits.max_cost_usd_per_day is not None:
        print_sentence(f"It shares the cap of {agent}'s other keys: {_dollars(key.limits.max_cost_usd_per_day)} a day.")


def _read_fleet(settings: Settings) -> FleetConfig:
    """Read the policy that binds the proxy: the store's, if there is a store, and the local file where it is stricter.

    Nothing is adopted.
    """
    from halter.journal.open import store_file_exists

    local_fleet = report_errors(lambda: read_local_fleet(settings))
    if not store_file_exists(settings.store):
        return local_fleet or DEFAULT_FLEET

    async def job(app: Runtime) -> FleetConfig:
        return (await resolve_effective_policy(app.store, local_fleet)).fleet

    return run_with_app(None, job, warn_uncovered=False, despite_doubt=True)


def _read_usd(text: str) -> Decimal | None:
    try:
        return Decimal(text.removeprefix("$")) if text else None
    except InvalidOperation:
        raise ConfigError(f"Invalid amount {text!r}. Use dollars, such as 2.00.") from None


def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.")], *, as_json: JsonOption = False
) -> None:
    """Revoke a virtual key. The next request of its clients is refused; running requests continue.

    `halter halt agent:NAME` stops running requests, too. Exits 2 if there is no key of that name.
    """
    was_revoked = report_errors(lambda: find_key_file(_require_person_settings()).revoke(name, SystemClock().now()))
    if not was_revoked:
        fail(f"There is no virtual key {name!r}. See `halter keys`.", EXIT_USAGE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        print_sentence(f"Revoked virtual key {name}.")


def _require_person_settings() -> Settings:
    settings = read_cli_settings(None)
    if not can_decide(settings.person):
        fail(f"Only a person can change keys; this command runs inside an agent ({settings.person}).", EXIT_FAILED)
    return settings


def find_key_file(settings: Settings) -> "KeyFile":
    from halter.proxy.keys import KeyFile

    if settings.tokens is None:
        raise ConfigError("No home folder, and HALTER_TOKENS is not set. Set HALTER_TOKENS or HOME.")
    return KeyFile(Path(find_keys_file(settings.tokens)))


keys = group(
    "List virtual keys for the proxy; make or revoke one.", {"list": list_keys, "new": new_key, "revoke": revoke_key}
)


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
        from halter.proxy.keys import KeyRing
        from halter.server.listener import bind, format_address, require_server

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

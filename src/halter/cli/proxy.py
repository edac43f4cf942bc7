"""`halter proxy`, `keys` and `gateway`: other programs' agents, whose requests and calls pass through the guard."""

import os
import socket
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from importlib import import_module
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
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, explain_extra
from halter.core.ids import may_decide
from halter.present.events import format_moment
from halter.runtime.runtime import DEFAULT_LEASE_DURATION, Runtime
from halter.settings import Settings, find_keys_file

if TYPE_CHECKING:
    from halter.proxy.keys import KeyFile
    from halter.proxy.proxy import Upstream

LOCAL_HOST: Final = "127.0.0.1"
DEFAULT_LISTEN: Final = "127.0.0.1:8766"
KEY_VARIABLE: Final = "HALTER_KEY"
CHECK_SECONDS: Final = 60
PROXY_RESTART_HINT: Final = "Start it again. What it held for requests under way is settled at its maximum."
GATEWAY_RESTART_HINT: Final = "Start it again. About calls that were under way you are asked in `halter inbox`."

ClientArgument = Annotated[
    str, typer.Argument(metavar="CLIENT", help="claude, codex, aider, opencode, openhands, llm or langchain.")
]
UrlOption = Annotated[str, typer.Option("--url", metavar="URL", help="The address of the proxy.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="KEY", help=f"The virtual key (default: ${KEY_VARIABLE}).")
]
ModelOption = Annotated[str, typer.Option("--model", metavar="MODEL", help="The model, as its provider names it.")]


def serve_here(
    *,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help=f"Where to listen (default: {DEFAULT_LISTEN})."),
    ] = None,
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    anthropic: Annotated[
        str | None,
        typer.Option("--anthropic", metavar="PROVIDER", help="The provider of Messages (default: anthropic)."),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(
            "--openai", metavar="PROVIDER", help="The provider of Chat Completions and Responses (default: openai)."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the proxy until you interrupt it. Clients show a key of `halter keys new`, and never see a provider's.

    Messages, Chat Completions and Responses pass byte for byte; each request is held against every cap before it is
    sent, and settled at what it cost. `halter proxy env CLIENT` says how to point a client here.
    """
    where = parse_listen_address(listen or DEFAULT_LISTEN, least=0)

    async def job(app: Runtime) -> None:
        require_person(app, "open the proxy")
        opened = listen_for_clients(app, where, anthropic or "anthropic", openai or "openai", beyond=beyond)
        if as_json:
            line = {"name": "serving", "at": app.clock.now(), "url": opened.url, "providers": sorted(opened.upstreams)}
            print_sentence(encode_json_line(line).decode().rstrip("\n"), at_once=True)
        else:
            print_sentence(opened.welcome(), at_once=True)
            print_sentence("Make a key with `halter keys new --agent NAME`. Ctrl-C stops this.", at_once=True)
        await opened.serve(app)

    run_with_app(store, job, new=True, acts=True, following=True, runs=PROXY_RESTART_HINT)


class OpenedProxy(msgspec.Struct, frozen=True):
    """A proxy that has its port, and is not served yet."""

    listening: socket.socket
    url: str
    upstreams: "Mapping[str, Upstream]"

    def welcome(self) -> str:
        names = " and ".join(each.provider for each in self.upstreams.values())
        return f"The proxy to {names} is at {self.url}; OpenAI's clients take {self.url}/v1."

    async def serve(self, app: Runtime) -> None:
        """Serve until cancelled."""
        from halter.proxy.keys import KeyRing
        from halter.proxy.proxy import serve_proxy

        ring = KeyRing(find_key_file(app.settings))
        await serve_proxy(app, self.listening, ring, self.upstreams, lease=DEFAULT_LEASE_DURATION)


def listen_for_clients(
    app: Runtime, where: tuple[str, int], anthropic: str = "anthropic", openai: str = "openai", *, beyond: bool = False
) -> OpenedProxy:
    """Find the providers and bind the port."""
    from halter.proxy.proxy import find_upstreams, require_other_address
    from halter.server.server import bind, format_address, require_server

    require_server()
    upstreams = find_upstreams(app, anthropic, openai)
    listening = bind(*where, beyond=beyond)
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
    """Print what a client needs to use the proxy: lines for a shell, or the file that it reads.

    `eval "$(halter proxy env claude)"` points Claude Code at the proxy in this shell.
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
    """Make one small request through the proxy, as a client would. It costs a little, and is in the journal.

    Exits 1 where the proxy or its provider refuses it.
    """
    import httpx2

    from halter.proxy.clients import find_client, make_check_body

    setup = report_errors(lambda: find_client(client), EXIT_USAGE)
    shown = key or os.environ.get(KEY_VARIABLE, "")
    if not shown:
        fail(f"There is no key to show: give it as --key KEY, or set {KEY_VARIABLE}.", EXIT_USAGE)
    address = f"{url.rstrip('/')}/v1{setup.dialect.path}"
    headers = {
        "authorization": f"Bearer {shown}",
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
    }
    try:
        body = make_check_body(setup, model)
        response = httpx2.post(address, content=body, headers=headers, timeout=CHECK_SECONDS)
    except httpx2.HTTPError as error:
        fail(f"Cannot reach the proxy at {url}: {error}. Start it with `halter proxy`.", EXIT_FAILED)
    if as_json:
        answer_json({"client": client, "status": response.status_code, "model": model or setup.model})
    elif response.is_success:
        print_sentence(f"{client} is served: {model or setup.model} answered through {url}.")
    if not response.is_success:
        fail(f"The answer was {response.status_code}: {_find_message(response.text)}", EXIT_FAILED)


def _find_message(text: str) -> str:
    import msgspec

    try:
        return str(msgspec.json.decode(text)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return text[:300]


proxy = group(
    "Serve the proxy, under which other programs' agents have budgets, halts and a journal.",
    {"env": show_env, "check": check_client},
    serve_here,
)


def list_keys(*, as_json: JsonOption = False) -> None:
    """List the proxy's keys. Only digests are kept: revoke a lost key, and make another.

    Each has an agent whose account it spends from, a cap for a day, and the models that it may ask.
    """
    from halter.proxy.keys import render_key

    keys = report_errors(lambda: find_key_file(read_cli_settings(None)).read_keys())
    if as_json:
        answer_json([render_key(key) for key in keys])
        return
    if not keys:
        print_sentence("There are no keys: `halter keys new --agent NAME` makes one.")
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
    answer_table("Keys", ["name", "agent", "a day", "models", "made", ""], rows)


def _dollars(amount: Decimal | None) -> str:
    return "" if amount is None else f"${amount}"


def new_key(
    *,
    agent: Annotated[str, typer.Option("--agent", metavar="AGENT", help="The agent whose account it spends from.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Its name (default: the agent's).")] = "",
    per_day: Annotated[
        str, typer.Option("--max-cost-usd-per-day", metavar="USD", help="The agent's cap for a day (default: 5).")
    ] = "",
    per_hour: Annotated[
        str, typer.Option("--max-cost-usd-per-hour", metavar="USD", help="The agent's cap for an hour.")
    ] = "",
    per_session: Annotated[
        str, typer.Option("--max-cost-usd", metavar="USD", help="The cap of one session of its client.")
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option("--tokens-per-hour", metavar="N", min=1, help="The agent's tokens for an hour."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="MODEL", help="It may ask only this, as in anthropic:claude-*; may be repeated."
        ),
    ] = None,
    mask_secrets: Annotated[
        bool, typer.Option("--mask-secrets", help="Mask secrets in what its clients send to the provider.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key for a client of the proxy. It is shown once, and works at once, also on a running proxy.

    Keys of one agent spend from one account. The fleet's caps hold for all of them together.
    """
    from halter.proxy.keys import KeyLimits, describe_key, make_key_secret, render_key

    settings = _require_person_settings()
    secret = make_key_secret()

    def create_key() -> Any:
        amounts = _read_usd(per_session), _read_usd(per_hour), _read_usd(per_day)
        limits = KeyLimits(*amounts, tokens, tuple(model or ()), mask_secrets)
        key = describe_key(secret, name or agent, agent, SystemClock().now(), settings.person, limits)
        find_key_file(settings).add(key)
        return key

    key = report_errors(create_key, EXIT_USAGE)
    if as_json:
        answer_json({**render_key(key), "key": secret})
        return
    print_sentence(secret)
    print_sentence(
        f"This is the key {key.name}, which spends as {agent}. It is shown this once; only its digest is kept."
    )


def _read_usd(text: str) -> Decimal | None:
    try:
        return Decimal(text.removeprefix("$")) if text else None
    except InvalidOperation:
        raise ConfigError(f"{text!r} is no amount: write dollars, as in 2.00.") from None


def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A key's name.")], *, as_json: JsonOption = False
) -> None:
    """Revoke a key: its clients are told to stop at their next request. What is under way goes on.

    `halter halt agent:NAME` stops that as well. Exits 2 if there is no key of that name.
    """
    was_there = report_errors(lambda: find_key_file(_require_person_settings()).revoke(name, SystemClock().now()))
    if not was_there:
        fail(f"There is no key called {name!r}: look at `halter keys`.", EXIT_USAGE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        print_sentence(f"The key {name} is revoked.")


def _require_person_settings() -> Settings:
    settings = read_cli_settings(None)
    if not may_decide(settings.person):
        fail(f"Only a person may change keys, and this was started by an agent ({settings.person}).", EXIT_FAILED)
    return settings


def find_key_file(settings: Settings) -> "KeyFile":
    from halter.proxy.keys import KeyFile

    if settings.tokens is None:
        raise ConfigError("You have no home folder, and HALTER_TOKENS is not set: set it, or HOME.")
    return KeyFile(Path(find_keys_file(settings.tokens)))


keys = group("Show the proxy's keys; make or revoke one.", {"list": list_keys, "new": new_key, "revoke": revoke_key})


def gateway(
    *,
    agent: Annotated[
        str, typer.Option("--agent", metavar="NAME", help="Whose calls these are: an agent's folder, or a name.")
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The servers behind it (default: .mcp.json of the folder)."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Serve over HTTP, at /mcp, to clients with a key; :PORT is on this machine.",
        ),
    ] = None,
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the tools of MCP servers to another program; each of its calls passes the guard.

    The program starts this command in place of its servers and talks to it over stdin and stdout, or asks it over HTTP
    with a key of `halter keys new`. Everything that is said to you is on stderr.
    """
    if as_json and http is None:
        fail("On stdout the program is spoken to: --json says where the gateway is, and needs --http.", EXIT_USAGE)

    async def job(app: Runtime) -> None:
        _require_mcp()
        from halter.gateway.serve import make_mcp_terms, read_gateway_agent, serve_http, serve_stdio

        owner = read_gateway_agent(app, agent, config)
        terms = make_mcp_terms(app, owner, config)
        if http is None:
            await serve_stdio(app, owner, terms, warn)
            return
        from halter.proxy.keys import KeyRing
        from halter.server.server import bind, format_address, require_server

        require_server()
        where = f"{LOCAL_HOST}{http}" if http.startswith(":") else http
        listening = bind(*parse_listen_address(where, least=0), beyond=beyond)
        name, url = owner.agent.policy.name, f"{format_address(listening)}/mcp"
        if as_json:
            line = {"name": "serving", "at": app.clock.now(), "url": url, "agent": name}
            print_sentence(encode_json_line(line).decode().rstrip("\n"), at_once=True)
        else:
            print_sentence(f"The gateway of {name} is at {url}. Ctrl-C stops it.", at_once=True)
        await serve_http(app, owner, terms, warn, listening, KeyRing(find_key_file(app.settings)))

    run_with_app(store, job, new=True, acts=True, following=True, runs=GATEWAY_RESTART_HINT)


def _require_mcp() -> None:
    try:
        import_module("mcp")
    except ImportError:
        raise ConfigError(explain_extra("mcp", "The gateway")) from None

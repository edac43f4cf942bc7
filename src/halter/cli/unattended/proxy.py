"""`halter proxy`: guard the model requests of other programs' agents."""

import asyncio
import os
from typing import Annotated, Final

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    group,
    parse_listen_address,
    report_errors,
    require_person,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, encode_json_line, print_sentence, warn
from halter.net.client import HttpAnswer, HttpClient, HttpRequest
from halter.net.failures import HttpFailure
from halter.proxy.clients import find_client, make_check_body, render_setup
from halter.runtime.runtime import (
    Runtime,
)

LOCAL_HOST: Final = "127.0.0.1"
DEFAULT_LISTEN: Final = "127.0.0.1:8766"
KEY_VARIABLE: Final = "HALTER_KEY"
CHECK_SECONDS: Final = 60
MAX_CHECK_BYTES: Final = 1024 * 1024
PROXY_RESTART_HINT: Final = "Start it again. The holds of interrupted requests are settled at their maximum."

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
        from halter.cli.unattended.proxy_listener import listen_for_clients, serve_with_prices

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
        await serve_with_prices(app, listener, warn)

    run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=PROXY_RESTART_HINT)


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


async def _fetch_once(request: HttpRequest) -> HttpAnswer:
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

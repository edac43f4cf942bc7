"""`halter serve`, `tokens` and `worker`: the API and dashboard, who may use them, and workers on PostgreSQL."""

import asyncio
import re
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    group,
    is_never_used,
    parse_typed_duration,
    read_cli_settings,
    report_errors,
    require_person,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, encode_json_line, print_sentence, render_sentence
from halter.cli.proxy import PROXY_RESTART_HINT, OpenedProxy, listen_for_clients
from halter.cli.terminal import Printer
from halter.cli.up import (
    AGENT_FILE,
    RESTART_HINT,
    FeedPrinter,
    make_bus,
    parse_listen_address,
    resolve_agent_folders,
    run_and_show,
)
from halter.cli.up import (
    HOW_TO_STOP as HOW_TO_STOP_HERE,
)
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import may_decide
from halter.core.text import format_count
from halter.hooks.registry import has_hooks
from halter.present.events import format_moment
from halter.runtime.feed import Bus, CommitObserver, FeedItem
from halter.runtime.runtime import Runtime
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.runtime.supervisor import FleetRunner
    from halter.runtime.telemetry import Job
    from halter.runtime.worker import DispatchMode
    from halter.server.auth import Token, TokenFile
    from halter.server.server import ServerExtras

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A token's name; it is in every event.")]


def show(*, as_json: JsonOption = False) -> None:
    """List tokens. Only digests are kept: remove a lost token, and make another.

    Each has a role and the agents that it sees: a viewer looks, an approver decides and stops, an operator steers and
    spends, an admin does all of it.
    """
    from halter.server.auth import render_token

    tokens = report_errors(lambda: find_token_file(read_cli_settings(None)).tokens())
    if as_json:
        answer_json([render_token(token) for token in tokens])
        return
    if not tokens:
        print_sentence(
            "There are no tokens: `halter serve` makes the first, `halter tokens add NAME --role ROLE` any other."
        )
        return
    rows = [
        [token.name, token.role, ", ".join(token.agents) or "all", format_moment(token.made_at)] for token in tokens
    ]
    answer_table("Tokens", ["name", "role", "agents", "made"], rows)


def add(
    name: NameArgument,
    *,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")],
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="It sees only this agent; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token. It is shown once, and works at once, also on a running server.

    Its name is in every event that it causes. With --agent it sees no other agents.
    """
    from halter.server.auth import render_token

    secret, token = report_errors(lambda: create_token(_require_person_settings(), name, role, agent or ()), EXIT_USAGE)
    if as_json:
        answer_json({**render_token(token), "token": secret})
        return
    print_sentence(secret)
    sees = f"sees only {', '.join(token.agents)}" if token.agents else "sees every agent"
    print_sentence(
        f"This is the token {name}: {role}, {sees}. It is shown this once and kept nowhere; only its digest is."
    )


def create_token(settings: Settings, name: str, role: str, agents: Sequence[str] = ()) -> "tuple[str, Token]":
    """Make a token and keep its digest; return the secret, which is shown once."""
    from halter.server.auth import describe_token, make_secret

    secret = make_secret()
    token = describe_token(secret, name, role, SystemClock().now(), agents)
    find_token_file(settings).add(token)
    return secret, token


def remove(name: NameArgument, *, as_json: JsonOption = False) -> None:
    """Remove a token: it stops working at once, and its open connections are closed within seconds.

    Do this with a lost token. Exits 2 if there is none of that name.
    """
    was_there = report_errors(lambda: find_token_file(_require_person_settings()).remove(name))
    if not was_there:
        fail(f"There is no token called {name!r}: look at `halter tokens`.", EXIT_USAGE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        print_sentence(f"The token {name} is removed.")


def _require_person_settings() -> Settings:
    settings = read_cli_settings(None)
    if not may_decide(settings.person):
        fail(f"Only a person may change tokens, and this was started by an agent ({settings.person}).", EXIT_FAILED)
    return settings


def find_token_file(settings: Settings) -> "TokenFile":
    from halter.server.auth import TokenFile

    if settings.tokens is None:
        raise ConfigError("You have no home folder, and HALTER_TOKENS is not set: set it, or HOME.")
    return TokenFile(settings.tokens)


tokens = group("Show the tokens for the server; make or remove one.", {"list": show, "add": add, "remove": remove})

_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def serve(
    agents: Annotated[
        list[Path] | None, typer.Argument(metavar="AGENT", help="The folders of agents to run here.")
    ] = None,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 picks a free port.")
    ] = "127.0.0.1:8765",
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Another host name of the server; may be repeated."),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="HOST:PORT", help="Also serve the proxy, at this address."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the dashboard and the HTTP API, until you interrupt it. Named agents run as with `halter up`.

    The first start makes a token and shows it once. Make others with `halter tokens add`.
    """
    where = parse_listen_address(listen, least=0)
    clients = None if proxy is None else parse_listen_address(proxy, least=0)
    names = [_name(each) for each in host or ()]
    folders = resolve_agent_folders(agents or ())

    async def job(app: Runtime) -> None:
        from halter.server.server import bind, require_server

        require_person(app, "open the server")
        require_server()
        opened = None if clients is None else listen_for_clients(app, clients, beyond=beyond)
        await _serve(app, folders, bind(*where, beyond=beyond), names, opened, as_json=as_json)

    settings = report_errors(lambda: read_cli_settings(store))
    runs = RESTART_HINT if folders else PROXY_RESTART_HINT if proxy else ""
    new = bool(runs) or is_never_used(settings, store)
    acts = bool(runs) or report_errors(lambda: has_hooks(settings))
    run_with_app(store, job, new=new, acts=acts, following=True, runs=runs)


def _name(host: str) -> str:
    if not _HOST.fullmatch(host):
        fail(f"{host!r} is no name of a server: write it like halter.example or halter.example:8443.", EXIT_USAGE)
    return host


async def _serve(
    app: Runtime,
    folders: list[Path],
    listening: socket.socket,
    names: list[str],
    proxy: OpenedProxy | None,
    *,
    as_json: bool,
) -> None:
    from halter.channels.serve import serve_channels
    from halter.loop.session_runtime import run_together
    from halter.server.auth import Keyring
    from halter.server.server import ServerExtras, WebhookEndpoint, serve_web

    file, bus, deliveries = find_token_file(app.settings), make_bus(app), WebhookEndpoint()
    async with Printer() as printer:
        shows = FeedPrinter(printer, app.clock, as_json=as_json)
        printer.write(_welcome(app, listening, proxy, as_json=as_json))
        extras: ServerExtras = ServerExtras(
            names=names,
            deliveries=deliveries,
            tell=lambda sentence: shows.report("", sentence),
            folders=_index_by_name(folders),
        )
        extras = _add_sign_on(app, extras)
        serving = [lambda: serve_web(app, listening, Keyring(file), bus, extras)]
        running = [lambda: run_and_show(app, folders, bus, shows, deliveries.serve, "serve")] if folders else []
        hooks = [lambda: _serve_hooks(app, lambda told: shows.report("hooks", told))] if has_hooks(app.settings) else []
        proxies = [] if proxy is None else [lambda: proxy.serve(app)]
        channels = [lambda: serve_channels(app, partial(shows.report, "channels"))]
        await run_together([*serving, *running, *hooks, *proxies, *channels])


def _add_sign_on(app: Runtime, extras: "ServerExtras") -> "ServerExtras":
    """Let the proxies and the provider that the fleet's file lists say who asks."""
    from msgspec import UNSET

    from halter.channels.serve import connect_directly
    from halter.redaction.secrets import read_environment_secrets
    from halter.runtime.runtime import read_local_fleet
    from halter.server.oidc import make_oidc_sign_on
    from halter.server.sign_on import make_proxy_sign_on

    written = read_local_fleet(app.settings)
    if written is None or written.spec.sign_on is UNSET:
        return extras
    spec, reveal = written.spec.sign_on, read_environment_secrets(app.environ).value
    if spec.proxies:
        extras = replace(extras, by_proxy=make_proxy_sign_on(spec, reveal).identify)
    return replace(extras, oidc=make_oidc_sign_on(spec, reveal, connect_directly))


async def _serve_hooks(app: Runtime, report: Callable[[str], None]) -> None:
    """Answer hooks beside the server, which goes on where that fails."""
    from halter.hooks.server import serve_hooks

    try:
        await serve_hooks(app, report, lambda path: report(f"Hooks are answered at {path}."))
    except ConfigError as error:
        report(f"Hooks are not answered here: {error}")
    await asyncio.Event().wait()


def _index_by_name(folders: list[Path]) -> dict[str, Path]:
    """Read the names of agents; an unreadable folder is reported when its agent is to run."""
    from halter.config.agent_files import read_agent

    found: dict[str, Path] = {}
    for folder in folders:
        with suppress(ConfigError):
            found[read_agent(folder).spec.name] = folder
    return found


def _welcome(app: Runtime, listening: socket.socket, proxy: OpenedProxy | None, *, as_json: bool) -> str:
    from halter.server.auth import LOST_TOKEN_ADVICE, suggest_token_name
    from halter.server.server import format_address as address_of
    from halter.server.server import make_login_url

    url, first = address_of(listening), ""
    if not find_token_file(app.settings).tokens():
        secret, _ = create_token(app.settings, suggest_token_name(app.settings.person), "admin")
        first = make_login_url(url, secret)
    if as_json:
        more = {**({"login_url": first} if first else {}), **({"proxy_url": proxy.url} if proxy else {})}
        return encode_json_line({"name": "serving", "at": app.clock.now(), "url": url, **more}).decode()
    way = (
        f"Open it with your first token, which is shown this once: {first}"
        if first
        else f"Log in with a token. {LOST_TOKEN_ADVICE}"
    )
    proxied = (proxy.welcome(),) if proxy else ()
    lines = (f"The dashboard and the API are at {url}", way, *proxied, HOW_TO_STOP_HERE)
    return "".join(map(render_sentence, lines))


HOW_TO_STOP_WORKER: Final = "Ctrl-C or SIGTERM drains this worker and ends it; a second one ends it at once."
WORKER_RESTART_HINT: Final = (
    "Start it again. Its sessions move to other workers when its lease expires; halted ones end."
)
AGENTS_FOLDER: Final = "agents"


def worker(
    agents: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AGENT", help="The folders of the agents (default: those here and in ./agents)."),
    ] = None,
    *,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="How many sessions run here at once.")
    ] = 200,
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="How long running turns may take to finish at the end.")
    ] = "30s",
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Also receive webhooks at this address.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run agents as one of many workers on a PostgreSQL store, on as many machines as you like.

    Sessions go to workers with room. If a worker dies, its sessions move to others when its lease expires.
    """
    folders = resolve_agent_folders(agents or _find_agent_folders())
    where, grace = None if listen is None else parse_listen_address(listen), parse_typed_duration(drain)

    settings = report_errors(lambda: read_cli_settings(store))
    _require_postgres(settings.store)

    async def job(app: Runtime) -> None:
        from halter.runtime.worker import make_distributed_mode

        mode = make_distributed_mode(app.settings.store, app.clock, concurrency, grace)
        await _work(app, folders, mode, where, as_json=as_json)

    run_with_app(
        store, job, new=True, acts=True, following=True, patient=True, settings=settings, runs=WORKER_RESTART_HINT
    )


def _find_agent_folders() -> list[Path]:
    here = Path()
    places = [
        here,
        *sorted(here.iterdir()),
        *(sorted((here / AGENTS_FOLDER).iterdir()) if (here / AGENTS_FOLDER).is_dir() else ()),
    ]
    paths = [path for path in places if (path / AGENT_FILE).is_file()]
    if not paths:
        fail(
            f"There is no {AGENT_FILE} here, nor in a folder here or in ./{AGENTS_FOLDER}: name the agents' folders.",
            EXIT_USAGE,
        )
    return paths


def _require_postgres(url: str) -> None:
    """Refuse other stores before any file is made: tickets are queued in PostgreSQL."""
    from halter.journal.open import mask_url

    if not url.lower().startswith(("postgresql:", "postgres:")):
        fail(
            f"Workers share a PostgreSQL store, and {mask_url(url)} is none: set "
            "HALTER_STORE=postgresql://…, or run the "
            "agents of this machine with `halter up`.",
            EXIT_UNUSABLE,
        )


async def _work(
    app: Runtime, folders: list[Path], mode: "DispatchMode", where: tuple[str, int] | None, *, as_json: bool
) -> None:
    from halter.channels.serve import serve_channels
    from halter.loop.session_runtime import run_until_first
    from halter.runtime.supervisor import FleetRunner, Supervisor
    from halter.runtime.telemetry import trace_worker
    from halter.runtime.triggers import WebhookReceiver

    async def serve(hooks: WebhookReceiver) -> None:
        if where is not None:
            from halter.server.api import serve_hooks

            await serve_hooks(hooks, *where)

    async with Printer() as printer:
        shows, bus = FeedPrinter(printer, app.clock, as_json=as_json), make_bus(app)
        if not as_json:
            printer.write(render_sentence(f"{format_count(len(folders), 'agent')} here. {HOW_TO_STOP_WORKER}"))

        def make(app: Runtime) -> Supervisor:
            supervisor = Supervisor(app, shows.report, bus.publish_live, serve=serve, mode=mode)
            supervisor.attends = bus.remember_session
            return supervisor

        runs = FleetRunner(app, make)
        _drain_on_signals(runs)
        committed = CommitObserver(
            asyncio.get_running_loop(), lambda stream: stream.startswith(("session:", "trigger:"))
        )
        app.store.observe(committed)
        patient = app.store.patient(app.clock)
        with trace_worker(app, patient, lambda sentence: shows.report("traces", sentence)) as tracing:
            beside = [*tracing, lambda: serve_channels(app, partial(shows.report, "channels"))]
            await run_until_first([runs.run(folders), shows.follow(_news(committed, bus)), *map(_run_beside, beside)])


async def _news(committed: CommitObserver, bus: Bus) -> AsyncGenerator[Sequence[FeedItem]]:
    """Yield what this process commits: each worker's log is its own."""
    async with aclosing(committed.batches()) as batches:
        async for events in batches:
            yield await bus.name_all(events)


async def _run_beside(job: "Job") -> None:
    """Run a job beside the worker; its end does not end the worker."""
    await job()
    await asyncio.Event().wait()


def _drain_on_signals(runs: "FleetRunner") -> None:
    """The first signal drains the worker, the second ends it."""
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    asked: list[int] = []

    def on_signal() -> None:
        asked.append(1)
        if len(asked) == 1:
            runs.drain()
        elif running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

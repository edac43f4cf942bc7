"""`halter serve`, `tokens` and `worker`: the API and dashboard, their tokens, and workers on PostgreSQL."""

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
    HOW_TO_STOP,
    RESTART_HINT,
    FeedPrinter,
    make_bus,
    parse_listen_address,
    resolve_agent_folders,
    run_and_show,
)
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import can_decide
from halter.core.text import format_count
from halter.hooks.registry import has_hooks
from halter.present.moments import format_moment
from halter.runtime.feed import Bus, CommitObserver, FeedItem
from halter.runtime.runtime import Runtime
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.runtime.supervisor import FleetRunner
    from halter.runtime.telemetry.tracer import Job
    from halter.runtime.worker import DispatchMode
    from halter.server.auth import Token, TokenFile
    from halter.server.server import ServerExtras

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token, recorded in every event.")]


def show(*, as_json: JsonOption = False) -> None:
    """List tokens. Only digests are stored: remove a lost token, and make another.

    Each has a role and the agents that it sees: a viewer reads, an approver decides and stops, an operator steers and
    spends, an admin does everything.
    """
    from halter.server.auth import render_token

    tokens = report_errors(lambda: find_token_file(read_cli_settings(None)).tokens())
    if as_json:
        answer_json([render_token(token) for token in tokens])
        return
    if not tokens:
        print_sentence(
            "There are no tokens. `halter serve` makes the first one; make others with `halter tokens add NAME --role "
            "ROLE`."
        )
        return
    rows = [
        [token.name, token.role, ", ".join(token.agents) or "all", format_moment(token.made_at)] for token in tokens
    ]
    answer_table("Tokens", ["name", "role", "agents", "created"], rows)


def add(
    name: NameArgument,
    *,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")],
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="The token sees only this agent. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token. It is shown once, and works immediately on a running server, too.

    Its name is in every event that it causes. With --agent, it sees no other agents.
    """
    from halter.server.auth import render_token

    secret, token = report_errors(lambda: create_token(_require_person_settings(), name, role, agent or ()), EXIT_USAGE)
    if as_json:
        answer_json({**render_token(token), "token": secret})
        return
    print_sentence(secret)
    sees = f"sees only {', '.join(token.agents)}" if token.agents else "sees every agent"
    print_sentence(f"Token {name}: {role}, {sees}. It is shown only once; only its digest is stored.")


def create_token(settings: Settings, name: str, role: str, agents: Sequence[str] = ()) -> "tuple[str, Token]":
    """Make a token and store its digest; return the secret, which is shown once."""
    from halter.server.auth import make_secret, make_token

    secret = make_secret()
    token = make_token(secret, name, role, SystemClock().now(), agents)
    find_token_file(settings).add(token)
    return secret, token


def remove(name: NameArgument, *, as_json: JsonOption = False) -> None:
    """Remove a token. It stops working immediately, and its open connections are closed within seconds.

    Use this after a token was lost. Exits 2 if there is no token of that name.
    """
    was_removed = report_errors(lambda: find_token_file(_require_person_settings()).remove(name))
    if not was_removed:
        fail(f"There is no token {name!r}. See `halter tokens`.", EXIT_USAGE)
    if as_json:
        answer_json({"subject": name, "done": True})
    else:
        print_sentence(f"Removed token {name}.")


def _require_person_settings() -> Settings:
    settings = read_cli_settings(None)
    if not can_decide(settings.person):
        fail(f"Only a person can change tokens; this command runs inside an agent ({settings.person}).", EXIT_FAILED)
    return settings


def find_token_file(settings: Settings) -> "TokenFile":
    from halter.server.auth import TokenFile

    if settings.tokens is None:
        raise ConfigError("No home folder, and HALTER_TOKENS is not set. Set HALTER_TOKENS or HOME.")
    return TokenFile(settings.tokens)


tokens = group("List tokens for the server; make or remove one.", {"list": show, "add": add, "remove": remove})

_HOST: Final = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def serve(
    agents: Annotated[list[Path] | None, typer.Argument(metavar="AGENT", help="Folders of agents to run here.")] = None,
    *,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address to listen on; port 0 picks a free port.")
    ] = "127.0.0.1:8765",
    beyond: Annotated[
        bool, typer.Option("--beyond-this-machine", help="Listen beyond this machine, without encryption.")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Another host name of the server. Repeatable."),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="HOST:PORT", help="Also serve the proxy at this address."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the dashboard and the HTTP API until interrupted. Agents given here run as with `halter up`.

    The first start makes a token and shows it once. Make others with `halter tokens add`.
    """
    address = parse_listen_address(listen, min_port=0)
    proxy_address = None if proxy is None else parse_listen_address(proxy, min_port=0)
    names = [_name(each) for each in host or ()]
    folders = resolve_agent_folders(agents or ())

    async def job(app: Runtime) -> None:
        from halter.server.listener import bind, require_server

        require_person(app, "start the server")
        require_server()
        listener = None if proxy_address is None else listen_for_clients(app, proxy_address, beyond=beyond)
        await _serve(app, folders, bind(*address, beyond=beyond), names, listener, as_json=as_json)

    settings = report_errors(lambda: read_cli_settings(store))
    runs = RESTART_HINT if folders else PROXY_RESTART_HINT if proxy else ""
    create_store = bool(runs) or is_never_used(settings, store)
    acts = bool(runs) or report_errors(lambda: has_hooks(settings))
    run_with_app(store, job, new=create_store, runs_agents=acts, until_interrupted=True, runs=runs)


def _name(host: str) -> str:
    if not _HOST.fullmatch(host):
        fail(f"Invalid host name {host!r}. Use a form such as halter.example or halter.example:8443.", EXIT_USAGE)
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
    from halter.loop.concurrency import run_together
    from halter.server.auth import Keyring
    from halter.server.server import ServerExtras, WebhookEndpoint, serve_web

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


def _add_sign_on(app: Runtime, extras: "ServerExtras") -> "ServerExtras":
    """Add the sign-on proxies and the provider of halter.yaml, which identify the caller."""
    from msgspec import UNSET

    from halter.net.httpx_transport import connect_directly
    from halter.redaction.secrets import read_environment_secrets
    from halter.runtime.runtime import read_local_fleet
    from halter.server.oidc import make_oidc_sign_on
    from halter.server.sign_on import make_proxy_sign_on

    fleet = read_local_fleet(app.settings)
    if fleet is None or fleet.spec.sign_on is UNSET:
        return extras
    spec, reveal = fleet.spec.sign_on, read_environment_secrets(app.environ).value
    if spec.proxies:
        extras = replace(extras, by_proxy=make_proxy_sign_on(spec, reveal).identify)
    return replace(extras, oidc=make_oidc_sign_on(spec, reveal, connect_directly))


async def _serve_hooks(app: Runtime, report: Callable[[str], None]) -> None:
    """Answer hooks next to the server, which continues if that fails."""
    from halter.hooks.server import serve_hooks

    try:
        await serve_hooks(app, report, lambda path: report(f"Answering hooks at {path}."))
    except ConfigError as error:
        report(f"Cannot answer hooks here: {error}")
    await asyncio.Event().wait()


def _index_by_name(folders: list[Path]) -> dict[str, Path]:
    """Map agents to folders. An unreadable folder is reported when its agent starts."""
    from halter.config.agent_files import read_agent

    folder_by_name: dict[str, Path] = {}
    for folder in folders:
        with suppress(ConfigError):
            folder_by_name[read_agent(folder).spec.name] = folder
    return folder_by_name


def _welcome(app: Runtime, listening: socket.socket, proxy: OpenedProxy | None, *, as_json: bool) -> str:
    from halter.server.auth import LOST_TOKEN_ADVICE, suggest_token_name
    from halter.server.listener import format_address
    from halter.server.login import make_login_url

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


HOW_TO_STOP_WORKER: Final = "Ctrl-C or SIGTERM drains this worker and ends it; a second one ends it immediately."
WORKER_RESTART_HINT: Final = (
    "Start it again. Its sessions move to other workers when its lease expires; halted ones end."
)
AGENTS_FOLDER: Final = "agents"


def worker(
    agents: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AGENT", help="Agent folders (default: those here and in ./agents)."),
    ] = None,
    *,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, help="Maximum number of concurrent sessions.")
    ] = 200,
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="Time for running turns to finish on shutdown.")
    ] = "30s",
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Also receive webhooks at this address.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run agents as one of several workers on a PostgreSQL store, on any number of machines.

    Sessions go to workers with capacity. If a worker dies, its sessions move to others when its lease expires.
    """
    folders = resolve_agent_folders(agents or _find_agent_folders())
    webhook_address, grace = None if listen is None else parse_listen_address(listen), parse_typed_duration(drain)

    settings = report_errors(lambda: read_cli_settings(store))
    _require_postgres(settings.store)

    async def job(app: Runtime) -> None:
        from halter.runtime.worker import make_distributed_mode

        mode = make_distributed_mode(app.settings.store, app.clock, concurrency, grace)
        await _work(app, folders, mode, webhook_address, as_json=as_json)

    run_with_app(
        store,
        job,
        new=True,
        runs_agents=True,
        until_interrupted=True,
        wait_for_store=True,
        settings=settings,
        runs=WORKER_RESTART_HINT,
    )


def _find_agent_folders() -> list[Path]:
    current_folder = Path()
    candidates = [
        current_folder,
        *sorted(current_folder.iterdir()),
        *(sorted((current_folder / AGENTS_FOLDER).iterdir()) if (current_folder / AGENTS_FOLDER).is_dir() else ()),
    ]
    paths = [path for path in candidates if (path / AGENT_FILE).is_file()]
    if not paths:
        fail(
            f"No {AGENT_FILE} found here, in a folder here or in ./{AGENTS_FOLDER}. Pass the agent folders.",
            EXIT_USAGE,
        )
    return paths


def _require_postgres(url: str) -> None:
    """Require a PostgreSQL store, which holds the queue of tickets, before any file is made."""
    from halter.journal.open import mask_url

    if not url.lower().startswith(("postgresql:", "postgres:")):
        fail(
            f"Workers need a PostgreSQL store; {mask_url(url)} is not one. Set HALTER_STORE=postgresql://…, or run "
            "the agents of this machine with `halter up`.",
            EXIT_UNUSABLE,
        )


async def _work(
    app: Runtime, folders: list[Path], mode: "DispatchMode", webhook_address: tuple[str, int] | None, *, as_json: bool
) -> None:
    from halter.channels.serve import serve_channels
    from halter.loop.concurrency import run_until_first
    from halter.runtime.supervisor import FleetRunner, Supervisor
    from halter.runtime.telemetry.tracer import trace_worker
    from halter.runtime.webhooks import WebhookReceiver

    async def serve(hooks: WebhookReceiver) -> None:
        if webhook_address is not None:
            from halter.server.api import serve_hooks

            await serve_hooks(hooks, *webhook_address)

    async with Printer() as printer:
        feed_printer, bus = FeedPrinter(printer, app.clock, as_json=as_json), make_bus(app)
        if not as_json:
            printer.write(render_sentence(f"{format_count(len(folders), 'agent')} here. {HOW_TO_STOP_WORKER}"))

        def make(app: Runtime) -> Supervisor:
            supervisor = Supervisor(app, feed_printer.report, bus.publish_live, serve=serve, mode=mode)
            supervisor.attends = bus.remember_session
            return supervisor

        runs = FleetRunner(app, make)
        _drain_on_signals(runs)
        commits = CommitObserver(asyncio.get_running_loop(), lambda stream: stream.startswith(("session:", "trigger:")))
        app.store.observe(commits)
        patient = app.store.patient(app.clock)
        with trace_worker(app, patient, lambda sentence: feed_printer.report("traces", sentence)) as tracing:
            side_jobs = [*tracing, lambda: serve_channels(app, partial(feed_printer.report, "channels"))]
            await run_until_first(
                [runs.run(folders), feed_printer.follow(_follow_commits(commits, bus)), *map(_run_side_job, side_jobs)]
            )


async def _follow_commits(commits: CommitObserver, bus: Bus) -> AsyncGenerator[Sequence[FeedItem]]:
    """Yield the events that this process commits: each worker prints only its own."""
    async with aclosing(commits.batches()) as batches:
        async for events in batches:
            yield await bus.name_all(events)


async def _run_side_job(job: "Job") -> None:
    """Run a job in the worker's process. The end of the job does not end the worker."""
    await job()
    await asyncio.Event().wait()


def _drain_on_signals(runs: "FleetRunner") -> None:
    """Drain the worker on the first signal, and end it on the second."""
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    signals: list[int] = []

    def on_signal() -> None:
        signals.append(1)
        if len(signals) == 1:
            runs.drain()
        elif running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

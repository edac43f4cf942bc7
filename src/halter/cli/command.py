"""The shared parts of all commands: open the store, parse arguments, print results.

A command for one operation is declared: `make_command(control.halt, "Halt everything in a scope. …")`. Its arguments
and options come from the operation's signature, its text from a renderer in `present`, and its JSON from the same
result.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Annotated, Any, Final, NoReturn, TypeVar, get_args, get_type_hints

import typer
from msgspec import Meta
from msgspec.structs import asdict, replace

from halter.cli.commands import ListingGroup, PlainCommand, PlainGroup
from halter.cli.exit_codes import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNUSABLE,
    EXIT_USAGE,
    TERMINATION_SIGNALS,
)
from halter.cli.output import answer_block, answer_json, answer_table, print_sentence, warn
from halter.config.agent_files import AGENT_FILE
from halter.core.clock import parse_duration
from halter.core.errors import HalterError, NotDone, StoreUnavailable, StoreUnusable
from halter.core.ids import can_decide
from halter.core.rows import SessionRow
from halter.journal.open import mask_url, store_file_exists
from halter.operations.actor import Actor, Done, Principal, meta_of, readable
from halter.present.sheet import Facts, Listing, Sheet
from halter.runtime.runtime import Runtime, find_continuity, open_runtime
from halter.settings import Settings, find_home, read_settings
from halter.system.liveness import LivenessWriter
from halter.system.processes import note_end

T = TypeVar("T")

OpenApp = Callable[[], AbstractAsyncContextManager[Runtime]]

STORE_BACK_NOTICE: Final = "Store available again; resuming."

INTERRUPTED_NOTICE: Final = "Interrupted. Committed changes are kept."

STORE_POLL_SECONDS: Final = 1
"""Polling interval for an unavailable store."""

MAX_STORE_WAIT_SECONDS: Final = 60
"""Time that a command which runs sessions waits for an unavailable store. A worker waits without a limit."""

CONNECT_SECONDS: Final = 5
"""Connect timeout for commands. A worker retries for longer."""

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="File or postgresql://… URL (default: $HALTER_STORE, else a file in your home folder).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, recorded in the journal.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
SessionArgument = Annotated[str, typer.Argument(help="Session id or prefix, from halter sessions.")]


def read_cli_settings(store: str | None) -> Settings:
    """Read the settings from the environment. Only the CLI reads it."""
    if store == "":
        fail("--store is empty. Pass a store, or omit the option to use the default.", EXIT_USAGE)
    return read_settings(os.environ, find_home(os.environ), store)


def run_with_app(
    store: str | None,
    job: Callable[[Runtime], Awaitable[T]],
    *,
    warn_uncovered: bool = True,
    new: bool = False,
    runs_agents: bool = False,
    until_interrupted: bool = False,
    wait_for_store: bool = False,
    settings: Settings | None = None,
    runs: str = "",
    despite_doubt: bool = False,
    allow_missing: bool = False,
) -> T:
    """Run a job on an open store, and close everything afterwards.

    - `create_store`: create a missing store; otherwise it is an error, so that a mistyped name shows no empty store.
    - `warn_uncovered`: warn about commits that no checkpoint covers.
    - `runs_agents`: the job runs agents, so the store's policy binds it, and a signal cancels it in order. Any other
      job is interrupted at once: it may wait for a typed answer, and each of its commits is complete.
    - `until_interrupted`: an interrupt is the normal end.
    - `wait_for_store`: wait without a limit while the store is unavailable when it is opened.
    - `runs`: the job runs sessions, and waits a minute for the store; the text is shown if a sentinel ends the process.
    - `despite_doubt`: continue, with a warning, on a store that lacks events which its checkpoints know.
    - `allow_missing`: the job only reads; if nothing ever ran, it reads an empty store.
    """

    async def main() -> tuple[T, str]:
        chosen_settings = settings or read_cli_settings(store)
        if allow_missing and is_never_used(chosen_settings, store):
            warn(describe_never_used(chosen_settings.store))
            chosen_settings = replace(chosen_settings, store="memory:")
        elif not new:
            require_store(chosen_settings.store)
        settings_with_timeout = replace(chosen_settings, store=add_connect_timeout(chosen_settings.store))
        async with AsyncExitStack() as stack:
            liveness = await stack.enter_async_context(_start_sentinel(settings_with_timeout.store, runs))
            open_app = partial(
                open_runtime,
                settings_with_timeout,
                environ=os.environ,
                liveness=liveness,
                acts=runs_agents,
                allow_older_copy=despite_doubt,
            )
            max_wait = None if wait_for_store else MAX_STORE_WAIT_SECONDS if runs else 0
            app = await open_when_available(open_app, stack, max_wait)
            if app.older_copy is not None and warn_uncovered:
                warn(app.older_copy.sentence())
            if app.policy is not None and (
                notice := app.policy.describe_adoption() or app.policy.describe_difference()
            ):
                warn(notice)
            app.store_problem.report = _report_store_trouble
            if runs:
                stack.enter_context(_tune_interpreter())
            result = await job(app)
        return result, app.checkpointer.problem

    run = run_cancelled_by_signals if until_interrupted or runs_agents else asyncio.run
    result, problem = report_errors(lambda: run(main()), interrupted="" if until_interrupted else INTERRUPTED_NOTICE)
    if problem and warn_uncovered:
        warn(problem)
    return result


COLLECTOR_THRESHOLDS: Final = (10_000, 20, 20)
SWITCH_INTERVAL: Final = 0.02
"""Seconds for which another ready thread, such as the store's, does not interrupt the event loop."""


@contextmanager
def _tune_interpreter() -> Generator[None]:
    """Run the garbage collector rarely, exclude loaded objects from it, and switch threads less often.

    For a process that runs only Halter's sessions: they are freed without the collector when they end.
    """
    thresholds, switch_interval = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_interval)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@asynccontextmanager
async def _start_sentinel(store: str, restart_hint: str) -> AsyncGenerator[LivenessWriter]:
    """Start a sentinel for a process that runs sessions; other processes need none."""
    if not restart_hint:
        yield LivenessWriter()
        return
    from halter.dispatch.sentinel import run_sentinel

    async with run_sentinel(store, restart_hint) as liveness:
        yield liveness


async def open_when_available(open_app: OpenApp, stack: AsyncExitStack, max_wait: float | None) -> Runtime:
    """Open a store as soon as it is available; print each reason for waiting once."""
    last_reason, read_seconds = "", asyncio.get_running_loop().time
    started_at = read_seconds()
    while True:
        try:
            app = await stack.enter_async_context(open_app())
        except StoreUnavailable as error:
            if max_wait is not None and read_seconds() - started_at >= max_wait:
                raise
            if str(error) != last_reason:
                last_reason = str(error)
                limit = "" if max_wait is None else f" for up to {max_wait:g} s"
                warn(f"{last_reason} Retrying{limit}.")
            await asyncio.sleep(STORE_POLL_SECONDS)
        else:
            if last_reason:
                warn(STORE_BACK_NOTICE)
            return app


def _report_store_trouble(problem: str) -> None:
    warn(problem or STORE_BACK_NOTICE)


def run_cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    """Let the first termination signal cancel the job, so that it cleans up in order."""
    handler_by_signal = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    active_handlers = {
        number: handler for number, handler in handler_by_signal.items() if handler not in {None, signal.SIG_IGN}
    }

    async def cancellable() -> T:
        running, loop = asyncio.ensure_future(main), asyncio.get_running_loop()

        def on_signal() -> None:
            note_end()
            if not running.cancelling():
                running.cancel()

        for number in active_handlers:
            loop.add_signal_handler(number, on_signal)
        return await running

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in active_handlers.items():
            signal.signal(number, handler)


def require_store(url: str) -> None:
    """Require that a store exists, rather than create an empty one."""
    if not store_file_exists(url):
        raise StoreUnusable(
            f"There is no store {mask_url(url)}. Check the name, or run a command that creates it, such as `halter up`."
        )


def is_never_used(settings: Settings, store_option: str | None) -> bool:
    """Return whether nothing ever ran here: no store is named, and the default store never existed."""
    if store_option is not None or os.environ.get("HALTER_STORE") or store_file_exists(settings.store):
        return False
    continuity = find_continuity(settings)
    return continuity is None or continuity.find_missing_store() is None


def describe_never_used(store: str) -> str:
    return f"Nothing has run here yet: there is no store {store}. Start with: halter init FOLDER"


def add_connect_timeout(url: str) -> str:
    """Add a connect timeout to a PostgreSQL URL that has none."""
    if not url.lower().startswith(("postgresql://", "postgres://")) or "connect_timeout=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}connect_timeout={CONNECT_SECONDS}"


def report_errors(job: Callable[[], T], code: int = EXIT_UNUSABLE, interrupted: str = INTERRUPTED_NOTICE) -> T:
    """Run a job; print an expected error as a sentence, without a traceback, and exit."""
    try:
        return job()
    except NotDone as error:
        fail(str(error), EXIT_CODES[error.why])
    except HalterError as error:
        fail(str(error), code)
    except KeyboardInterrupt:
        if interrupted:
            warn(interrupted, "red")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def fail(sentence: str, code: int) -> NoReturn:
    warn(sentence, "red")
    raise typer.Exit(code)


def make_desk(app: Runtime, store: str | None = None) -> Actor:
    """Make the actor of the person who typed. Access to the store grants every right on it."""
    return Actor(app, Principal(app.settings.person), short_ids=True, option=format_store_option(store))


def format_store_option(store: str | None) -> str:
    """Return the option as it must be typed again in a command that the program suggests."""
    return "" if store is None else f" --store {quote(store)}"


def require_person(app: Runtime, action: str) -> None:
    """Require a person: reject an agent, and a program that an agent started."""
    if not can_decide(app.settings.person):
        fail(f"Only a person can {action}; this command runs inside an agent ({app.settings.person}).", EXIT_FAILED)


def parse_typed_duration(text: str) -> int:
    return report_errors(lambda: parse_duration(text), EXIT_USAGE)


def require_readable_name(text: str, noun: str) -> str:
    return report_errors(lambda: readable(text, noun))


async def find_session_by_prefix(app: Runtime, prefix: str) -> SessionRow:
    return await make_desk(app).session(prefix)


def show_sheet(sheet: Sheet) -> None:
    for item in sheet:
        match item:
            case str():
                print_sentence(item)
            case Facts():
                answer_block(item.title, item.facts)
            case Listing() if item.rows or item.empty:
                answer_table(item.title, item.columns, item.rows, right=item.right, long=item.long, empty=item.empty)
            case Listing():
                pass


MAX_TYPED_NUMBER: Final = 1_000_000
"""A person can request longer lists than a client of the HTTP API."""


@dataclass(frozen=True)
class Typed:
    """The CLI form of parameters that the HTTP API takes in another form."""

    replaces: tuple[str, ...]
    annotation: Any
    convert: Callable[[Any], Mapping[str, Any]]
    default: Any = Parameter.empty


def to_json(result: Any) -> Any:
    """Convert a result to JSON; of an action's result, the facts without the sentence."""
    if not isinstance(result, Done):
        return result
    return {"subject": result.subject, "done": True, **{k: v for k, v in asdict(result).items() if k != "sentence"}}


def command(
    run: Callable[..., Awaitable[Any]],
    text: str,
    show: Callable[[Any, int], Sheet] = lambda result, _: [result.sentence],
    *,
    despite_doubt: bool = False,
    warn_uncovered: bool = True,
    allow_missing: bool = False,
    fixed_values: Mapping[str, Any] | None = None,
    replacements: Mapping[str, Typed] | None = None,
    json: Callable[[Any], Any] = to_json,
    is_ok: Callable[[Any], bool] = lambda _: True,
) -> Callable[..., None]:
    """Make a command from an operation.

    `text` is its help; `show` renders the result as of a moment. With `despite_doubt` it also works on a store in
    doubt, with `allow_missing` also if nothing ever ran. `fixed_values` sets parameters, `replacements` replaces some
    by others. The command exits 1 unless `is_ok(result)`.
    """
    fixed_parameters, replacement_by_parameter = fixed_values or {}, replacements or {}

    def callback(**arguments: Any) -> None:
        store, as_json = arguments.pop("store"), arguments.pop("as_json")
        for name, replacement in replacement_by_parameter.items():
            arguments.update(replacement.convert(arguments.pop(name)))

        async def job(app: Runtime) -> tuple[Any, int]:
            return await run(make_desk(app, store), **fixed_parameters, **arguments), app.clock.now()

        result, now = run_with_app(
            store, job, despite_doubt=despite_doubt, warn_uncovered=warn_uncovered, allow_missing=allow_missing
        )
        if as_json:
            answer_json(json(result))
        else:
            show_sheet(show(result, now))
        if not is_ok(result):
            raise typer.Exit(EXIT_FAILED)

    callback.__doc__ = text
    return _sign(
        callback,
        {
            **_parameters(run, fixed_parameters, replacement_by_parameter),
            "store": (StoreOption, None),
            "as_json": (JsonOption, False),
        },
    )


def _parameters(
    run: Callable[..., Any], fixed_parameters: Mapping[str, Any], replacement_by_parameter: Mapping[str, Typed]
) -> dict[str, tuple[Any, Any]]:
    """Annotate the parameters of an operation for Typer. One without a description is for Python callers only."""
    hints, annotation_by_name = get_type_hints(run, include_extras=True), dict[str, tuple[Any, Any]]()
    replacement_by_name = {
        name: (typed_name, replacement)
        for typed_name, replacement in replacement_by_parameter.items()
        for name in replacement.replaces
    }
    for name, parameter in list(signature(run).parameters.items())[1:]:
        if name in replacement_by_name:
            typed_name, replacement = replacement_by_name[name]
            annotation_by_name[typed_name] = (replacement.annotation, replacement.default)
        elif name not in fixed_parameters and (meta := meta_of(hints[name])):
            annotation_by_name[name] = (
                _annotate(name, get_args(hints[name])[0], meta, parameter.default),
                parameter.default,
            )
    return annotation_by_name


def _annotate(name: str, kind: Any, meta: Meta, default: Any) -> Any:
    extra = meta.extra or {}
    text, metavar = extra.get("typed") or meta.description, extra.get("metavar")
    if default is Parameter.empty or extra.get("argument"):
        return Annotated[kind, typer.Argument(metavar=metavar, help=text)]
    flag = f"--{name.replace('_', '-')}"
    if kind is int:
        return Annotated[kind, typer.Option(flag, metavar=metavar, min=meta.ge, max=MAX_TYPED_NUMBER, help=text)]
    return Annotated[kind, typer.Option(flag, metavar=metavar, help=text)]


def _sign(callback: Callable[..., None], parameters: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    """Set the signature of a function, which Typer reads."""
    typed_signature = Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in parameters.items()
        ]
    )
    callback.__dict__["__signature__"] = typed_signature
    callback.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    return callback


def group(
    text: str,
    commands: Mapping[str, Callable[..., None]],
    default: Callable[..., None] | None = None,
    former_names: Mapping[str, str] = MappingProxyType({}),
) -> typer.Typer:
    """Make a group of commands. Without a subcommand it runs `default`, or else the command `list`.

    `former_names` maps names of earlier versions to commands; they work for ever, and no help shows them.
    """
    if default is None:
        typer_group = typer.Typer(cls=ListingGroup, help=text)
    else:
        typer_group = typer.Typer(cls=PlainGroup, invoke_without_command=True)
        typer_group.callback()(_default(text, default))
    for name, callback in commands.items():
        typer_group.command(name, cls=PlainCommand)(callback)
    for former_name, name in former_names.items():
        typer_group.command(former_name, cls=PlainCommand, hidden=True)(commands[name])
    return typer_group


def _default(text: str, default: Callable[..., None]) -> Callable[..., None]:
    def callback(context: typer.Context, **options: Any) -> None:
        if context.invoked_subcommand is None:
            default(**options)
        elif any(options.values()):
            fail(f"Pass options after {context.invoked_subcommand}, not before it.", EXIT_USAGE)

    callback.__doc__ = text
    parameters = {name: (each.annotation, each.default) for name, each in signature(default).parameters.items()}
    return _sign(callback, {"context": (typer.Context, Parameter.empty), **parameters})


def resolve_agent_folders(agents: Sequence[Path]) -> list[Path]:
    return [agent.parent if agent.is_file() else agent for agent in agents]


def parse_listen_address(listen: str, min_port: int = 1) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not min_port <= int(port) < 1 << 16:
        fail(f"Invalid listen address {listen!r}. Use a form such as 127.0.0.1:8765.", EXIT_USAGE)
    return host.strip("[]"), int(port)


AgentArgument = Annotated[Path, typer.Argument(metavar="AGENT", help="Agent folder.")]


def resolve_agent_folder(agent: Path) -> Path:
    if not (agent / AGENT_FILE).is_file() and not agent.is_file():
        fail(f"No {AGENT_FILE} found in {agent}. Pass an agent folder, or make one with halter init.", EXIT_USAGE)
    return agent.parent if agent.is_file() else agent

"""What every command shares: opening the store, reading arguments, and printing answers.

A command whose work is one operation is declared: `command(control.halt, "Stop everything in a scope. …")`. Its
arguments and options come from the operation's signature, its text from a renderer in `present`, and its JSON from the
same result.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from shlex import quote
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
from halter.core.clock import DAY, parse_duration
from halter.core.errors import HalterError, NotDone, StoreUnavailable, StoreUnusable
from halter.core.ids import may_decide
from halter.core.processes import LivenessWriter
from halter.core.rows import SessionRow
from halter.operations import desk as desks
from halter.operations.desk import Actor, Done, Principal
from halter.present.sheet import Facts, Listing, Sheet
from halter.runtime.runtime import Runtime, find_continuity, open_runtime
from halter.settings import Settings, find_home, read_settings

T = TypeVar("T")

OpenApp = Callable[[], AbstractAsyncContextManager[Runtime]]

STORE_BACK_NOTICE: Final = "The store is back, and everything goes on."

INTERRUPTED_NOTICE: Final = "Interrupted; what was committed stands."

MAX_TYPED_DURATION: Final = 36_500 * DAY
"""A hundred years: longer durations are typing errors."""

STORE_POLL_SECONDS: Final = 1
"""Polling interval for an unavailable store."""

CONNECT_SECONDS: Final = 5
"""Connect timeout for commands. A worker retries for longer."""

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="A file, or postgresql://… (default: $HALTER_STORE, else a file in your home folder).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in the journal.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
SessionArgument = Annotated[str, typer.Argument(help="A session's id, or its beginning, from halter sessions.")]


def read_cli_settings(store: str | None) -> Settings:
    """Read the environment, here and nowhere further in."""
    if store == "":
        fail("--store is empty: name a store, or omit the option for the default one.", EXIT_USAGE)
    return read_settings(os.environ, find_home(os.environ), store)


def run_with_app(
    store: str | None,
    job: Callable[[Runtime], Awaitable[T]],
    *,
    warned: bool = True,
    new: bool = False,
    acts: bool = False,
    following: bool = False,
    patient: bool = False,
    settings: Settings | None = None,
    runs: str = "",
    despite_doubt: bool = False,
    fresh: bool = False,
) -> T:
    """Run a job on an open store, and close everything afterwards.

    `new`: create a missing store. Other commands refuse one, so that a typo in its name does not look like good news.
    `warned`: warn about commits that no checkpoint covers. `acts`: the job runs agents, so the store's policy binds it.
    `following`: an interrupt is the normal end. `patient`: wait for a store that is unavailable. `runs`: the job runs
    sessions; the text says how to continue after a sentinel ended the process. `despite_doubt`: go on, with a warning,
    where the store lacks what its checkpoints know. `fresh`: the job only looks; where nothing ever ran, it looks at an
    empty store.
    """

    async def main() -> tuple[T, str]:
        places = settings or read_cli_settings(store)
        if fresh and is_never_used(places, store):
            warn(describe_never_used(places.store))
            places = replace(places, store="memory:")
        elif not new:
            require_store(places.store)
        hurries = replace(places, store=add_connect_timeout(places.store))
        async with AsyncExitStack() as stack:
            liveness = await stack.enter_async_context(_start_sentinel(hurries.store, runs))
            opening = partial(
                open_runtime, hurries, environ=os.environ, liveness=liveness, acts=acts, despite_doubt=despite_doubt
            )
            app = await (_wait_for_store(opening, stack) if patient else stack.enter_async_context(opening()))
            if app.doubt is not None and warned:
                warn(app.doubt.sentence())
            if app.policy is not None and (
                notice := app.policy.describe_adoption() or app.policy.describe_difference()
            ):
                warn(notice)
            app.trouble.tell = _report_store_trouble
            if runs:
                stack.enter_context(_tune_interpreter())
            answer = await job(app)
        return answer, app.checkpointer.problem

    run = _run_cancelled_by_signals if following else asyncio.run
    answer, problem = report_errors(lambda: run(main()), interrupted="" if following else INTERRUPTED_NOTICE)
    if problem and warned:
        warn(problem)
    return answer


COLLECTOR_THRESHOLDS: Final = (10_000, 20, 20)
SWITCH_INTERVAL: Final = 0.02
"""For how many seconds the event loop is not interrupted by another thread that is ready, such as the store's."""


@contextmanager
def _tune_interpreter() -> Generator[None]:
    """Let the garbage collector run rarely, skip what is loaded by now, and let threads take turns less often.

    For a process of Halter's own that runs sessions: they are freed without it when they end.
    """
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*before)
        gc.unfreeze()


@asynccontextmanager
async def _start_sentinel(store: str, runs: str) -> AsyncGenerator[LivenessWriter]:
    """Start a sentinel beside a process that runs sessions; others need none."""
    if not runs:
        yield LivenessWriter()
        return
    from halter.dispatch.sentinel import run_sentinel

    async with run_sentinel(store, runs) as liveness:
        yield liveness


async def _wait_for_store(opening: OpenApp, stack: AsyncExitStack) -> Runtime:
    """Open a store as soon as it is available; print each reason for waiting once."""
    last = ""
    while True:
        try:
            app = await stack.enter_async_context(opening())
        except StoreUnavailable as away:
            if str(away) != last:
                last = str(away)
                warn(last)
            await asyncio.sleep(STORE_POLL_SECONDS)
        else:
            if last:
                warn(STORE_BACK_NOTICE)
            return app


def _report_store_trouble(problem: str) -> None:
    warn(problem or STORE_BACK_NOTICE)


def _run_cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    """Let the first termination signal cancel the job, so that it cleans up in order."""
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    heeded = {number: handler for number, handler in before.items() if handler not in {None, signal.SIG_IGN}}

    async def cancellable() -> T:
        running, loop = asyncio.ensure_future(main), asyncio.get_running_loop()
        for number in heeded:
            loop.add_signal_handler(number, lambda: None if running.cancelling() else running.cancel())
        return await running

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


def require_store(url: str) -> None:
    """Refuse a store that does not exist, rather than create an empty one."""
    from halter.journal.open import mask_url, store_file_exists

    if not store_file_exists(url):
        raise StoreUnusable(f"There is no store {mask_url(url)}: check the name, or start something that makes it.")


def is_never_used(settings: Settings, typed: str | None) -> bool:
    """Whether nothing ever ran here: no store is named, and the usual one neither exists nor is known of."""
    from halter.journal.open import store_file_exists

    if typed is not None or os.environ.get("HALTER_STORE") or store_file_exists(settings.store):
        return False
    known = find_continuity(settings)
    return known is None or known.find_missing_store() is None


def describe_never_used(store: str) -> str:
    return f"Nothing has run here yet, so there is no store {store}. Begin with: halter init FOLDER"


def add_connect_timeout(url: str) -> str:
    """Bound the wait for a PostgreSQL server, unless the URL itself does."""
    if not url.lower().startswith(("postgresql://", "postgres://")) or "connect_timeout=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}connect_timeout={CONNECT_SECONDS}"


def report_errors(job: Callable[[], T], code: int = EXIT_UNUSABLE, interrupted: str = INTERRUPTED_NOTICE) -> T:
    """Turn an expected error into its sentence and an exit code, without a traceback."""
    try:
        return job()
    except NotDone as no:
        fail(str(no), EXIT_CODES[no.why])
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
    """Make the desk of the person who typed: access to the store is every right on it."""
    option = "" if store is None else f" --store {quote(store)}"
    return Actor(app, Principal(app.settings.person), short_ids=True, option=option)


def require_person(app: Runtime, what: str) -> None:
    """Refuse what an agent, or a program that it started, may not do."""
    if not may_decide(app.settings.person):
        fail(f"Only a person may {what}, and this was started by an agent ({app.settings.person}).", EXIT_FAILED)


def parse_typed_duration(text: str) -> int:
    try:
        length = report_errors(lambda: parse_duration(text), EXIT_USAGE)
    except OverflowError:
        length = MAX_TYPED_DURATION + 1
    if length > MAX_TYPED_DURATION:
        fail(f"{text!r} is too long: write at most 36500d, which is a hundred years.", EXIT_USAGE)
    return length


def require_readable_name(text: str, what: str) -> str:
    return report_errors(lambda: desks.readable(text, what))


async def find_session_by_prefix(app: Runtime, beginning: str) -> SessionRow:
    return await make_desk(app).session(beginning)


def show_sheet(sheet: Sheet) -> None:
    for part in sheet:
        match part:
            case str():
                print_sentence(part)
            case Facts():
                answer_block(part.title, part.facts)
            case Listing() if part.rows or part.empty:
                answer_table(part.title, part.columns, part.rows, right=part.right, long=part.long, empty=part.empty)
            case Listing():
                pass


MAX_TYPED_NUMBER: Final = 1_000_000
"""A person may ask for longer lists than a client of the HTTP API."""


@dataclass(frozen=True)
class Typed:
    """How a person types some parameters of an operation that the HTTP API takes in another form."""

    replaces: tuple[str, ...]
    annotation: Any
    convert: Callable[[Any], Mapping[str, Any]]
    default: Any = Parameter.empty


def to_json(result: Any) -> Any:
    """Write a result for programs; of what was done, its facts without the sentence."""
    if not isinstance(result, Done):
        return result
    return {"subject": result.subject, "done": True, **{k: v for k, v in asdict(result).items() if k != "sentence"}}


def command(
    run: Callable[..., Awaitable[Any]],
    text: str,
    show: Callable[[Any, int], Sheet] = lambda result, _: [result.sentence],
    *,
    look: bool = False,
    warned: bool = True,
    fresh: bool = False,
    values: Mapping[str, Any] | None = None,
    typed: Mapping[str, Typed] | None = None,
    json: Callable[[Any], Any] = to_json,
    ok: Callable[[Any], bool] = lambda _: True,
) -> Callable[..., None]:
    """Make a command of an operation.

    `text` is its help; `show` renders the result as of a moment. With `look` it also works on a store in doubt, with
    `fresh` also where nothing ever ran. `given` fixes parameters, `typed` replaces some. It exits 1 where the result is
    not `ok`.
    """
    fixed, replaced = values or {}, typed or {}

    def callback(**words: Any) -> None:
        store, as_json = words.pop("store"), words.pop("as_json")
        for name, how in replaced.items():
            words.update(how.convert(words.pop(name)))

        async def job(app: Runtime) -> tuple[Any, int]:
            return await run(make_desk(app, store), **fixed, **words), app.clock.now()

        result, now = run_with_app(store, job, despite_doubt=look, warned=warned, fresh=fresh)
        if as_json:
            answer_json(json(result))
        else:
            show_sheet(show(result, now))
        if not ok(result):
            raise typer.Exit(EXIT_FAILED)

    callback.__doc__ = text
    return _sign(
        callback, {**_parameters(run, fixed, replaced), "store": (StoreOption, None), "as_json": (JsonOption, False)}
    )


def _parameters(
    run: Callable[..., Any], fixed: Mapping[str, Any], replaced: Mapping[str, Typed]
) -> dict[str, tuple[Any, Any]]:
    """Annotate the parameters of an operation for Typer; one that has no description is for Python alone."""
    hints, found = get_type_hints(run, include_extras=True), dict[str, tuple[Any, Any]]()
    stands_for = {name: (word, how) for word, how in replaced.items() for name in how.replaces}
    for name, parameter in list(signature(run).parameters.items())[1:]:
        if name in stands_for:
            word, how = stands_for[name]
            found[word] = (how.annotation, how.default)
        elif name not in fixed and (marks := desks.meta_of(hints[name])):
            found[name] = (_annotate(name, get_args(hints[name])[0], marks, parameter.default), parameter.default)
    return found


def _annotate(name: str, kind: Any, marks: Meta, default: Any) -> Any:
    extra = marks.extra or {}
    text, metavar = extra.get("typed") or marks.description, extra.get("metavar")
    if default is Parameter.empty or extra.get("argument"):
        return Annotated[kind, typer.Argument(metavar=metavar, help=text)]
    flag = f"--{name.replace('_', '-')}"
    if kind is int:
        return Annotated[kind, typer.Option(flag, metavar=metavar, min=marks.ge, max=MAX_TYPED_NUMBER, help=text)]
    return Annotated[kind, typer.Option(flag, metavar=metavar, help=text)]


def _sign(callback: Callable[..., None], parameters: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    """Give a function the signature that Typer reads."""
    made = Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in parameters.items()
        ]
    )
    callback.__dict__["__signature__"] = made
    callback.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    return callback


def group(
    text: str, commands: Mapping[str, Callable[..., None]], default: Callable[..., None] | None = None
) -> typer.Typer:
    """Make a group of commands. Without a word it runs its `default`, or the command `list`."""
    if default is None:
        made = typer.Typer(cls=ListingGroup, help=text)
    else:
        made = typer.Typer(cls=PlainGroup, invoke_without_command=True)
        made.callback()(_default(text, default))
    for name, each in commands.items():
        made.command(name, cls=PlainCommand)(each)
    return made


def _default(text: str, default: Callable[..., None]) -> Callable[..., None]:
    def callback(context: typer.Context, **words: Any) -> None:
        if context.invoked_subcommand is None:
            default(**words)
        elif any(words.values()):
            fail(f"Write options after the word {context.invoked_subcommand}, not before it.", EXIT_USAGE)

    callback.__doc__ = text
    own = {name: (each.annotation, each.default) for name, each in signature(default).parameters.items()}
    return _sign(callback, {"context": (typer.Context, Parameter.empty), **own})

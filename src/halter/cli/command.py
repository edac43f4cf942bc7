"""What every command shares: opening the store, reading what was typed, and saying what went wrong."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from msgspec.structs import replace

from halter.app import App, open_app
from halter.app.desk import Desk, Who
from halter.app.desk import desk as desks
from halter.cli.answer import warn
from halter.cli.codes import ENDINGS, INTERRUPTED, NOT_FINE, UNUSABLE, WRONG_USE
from halter.core.clock import DAY
from halter.core.durations import parse_duration
from halter.core.errors import HalterError, NotDone, NotDoneWhy, StoreUnavailable, StoreUnusable
from halter.core.ids import may_decide
from halter.core.pulse import Pulse
from halter.settings import Settings, read_settings

T = TypeVar("T")

CODES: Final[Mapping[NotDoneWhy, int]] = {
    "wrong": WRONG_USE,
    "missing": WRONG_USE,
    "refused": NOT_FINE,
    "forbidden": NOT_FINE,
}

Opening = Callable[[], AbstractAsyncContextManager[App]]
"""Tries to open a store."""

BACK: Final = "The store is back, and everything goes on."

STANDS: Final = "Interrupted; what was committed stands."

LONGEST: Final = 36_500 * DAY
"""No duration that anybody means is longer: a hundred years."""

LOOK_SECONDS: Final = 1
"""How often a store that is away is looked for."""

CONNECT_SECONDS: Final = 5
"""How long a person waits for a server that does not answer. A worker has more patience."""

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="A file, or postgresql://… (without it $HALTER_STORE, else a file in your home folder).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it stands in the journal.")]
ScopeArgument = Annotated[str, typer.Argument(help="fleet, agent:NAME, trigger:NAME or session:ID")]


def settings_for(store: str | None) -> Settings:
    """Read the environment, here and nowhere further in."""
    if store == "":
        fail("--store is empty: name a store, or leave it out for the usual one.", WRONG_USE)
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    return read_settings(os.environ, home, store)


def with_app(
    store: str | None,
    job: Callable[[App], Awaitable[T]],
    *,
    warned: bool = True,
    new: bool = False,
    acts: bool = False,
    following: bool = False,
    patient: bool = False,
    settings: Settings | None = None,
    runs: str = "",
    despite_doubt: bool = False,
) -> T:
    """Do a job on a store that is there, with everything opened and closed around it.

    A store that is not there is never made by looking at it: a slip in its name must not look like good news. Only a
    command that begins something makes a `new` one.
    Whatever was committed without a checkpoint is warned of, unless the command tells of that itself.
    What `acts`, because it runs agents, is bound by the store's policy, and says where that differs from what is
    written here.
    Where something is followed, an interrupt is how it ends, and nothing is to be said of it.
    Whoever is `patient` waits for a store that is away, as it will later when the store goes away.
    What has places of its own brings its `settings` along.
    A command that `runs` sessions says how they go on after a sentinel had to end it.
    A store that lacks what its checkpoints know is refused. What only looks, or stops something, goes on
    `despite_doubt`, and says so.
    """

    async def main() -> tuple[T, str]:
        places = settings or settings_for(store)
        if not new:
            refuse_missing(places.store)
        hurries = replace(places, store=hurried(places.store))
        async with AsyncExitStack() as stack:
            pulse = await stack.enter_async_context(_watched(hurries.store, runs))
            opening = partial(
                open_app, hurries, environ=os.environ, pulse=pulse, acts=acts, despite_doubt=despite_doubt
            )
            app = await (_waited_for(opening, stack) if patient else stack.enter_async_context(opening()))
            if app.doubt is not None and warned:
                warn(app.doubt.sentence())
            if app.policy is not None and (told := app.policy.announced() or app.policy.told()):
                warn(told)
            app.trouble.tell = _tell_of_store
            answer = await job(app)
        return answer, app.checkpointer.problem

    interrupted = "" if following else STANDS
    run = _run_cancelled_by_signals if following else asyncio.run
    answer, problem = saying_errors(lambda: run(main()), interrupted=interrupted)
    if problem and warned:
        warn(problem)
    return answer


@asynccontextmanager
async def _watched(store: str, runs: str) -> AsyncGenerator[Pulse]:
    """Have a sentinel outside of a process that runs sessions; nobody else needs one."""
    if not runs:
        yield Pulse()
        return
    from halter.dispatch.sentinel import sentinel

    async with sentinel(store, runs) as pulse:
        yield pulse


async def _waited_for(opening: Opening, stack: AsyncExitStack) -> App:
    """Open a store as soon as it is there, and tell once what is waited for."""
    told = ""
    while True:
        try:
            app = await stack.enter_async_context(opening())
        except StoreUnavailable as away:
            if str(away) != told:
                told = str(away)
                warn(told)
            await asyncio.sleep(LOOK_SECONDS)
        else:
            if told:
                warn(BACK)
            return app


def _tell_of_store(problem: str) -> None:
    """Say why it takes so long, to whoever waits for a store that is away."""
    warn(problem or BACK)


def _run_cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    """Let the first signal to end cancel what runs, so that it is cleaned up in order whatever it was just doing."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
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


def refuse_missing(url: str) -> None:
    """Say that there is no such store, rather than make an empty one."""
    from halter.journal.open import is_there, masked

    if not is_there(url):
        raise StoreUnusable(f"There is no store {masked(url)}: check the name, or start something that makes it.")


def hurried(url: str) -> str:
    """Bound the wait for a PostgreSQL server that does not answer, unless the URL itself does."""
    if not url.lower().startswith(("postgresql://", "postgres://")) or "connect_timeout=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}connect_timeout={CONNECT_SECONDS}"


def saying_errors(job: Callable[[], T], code: int = UNUSABLE, interrupted: str = STANDS) -> T:
    """Turn an error of the world into its sentence and an exit code; nobody is shown a traceback."""
    try:
        return job()
    except NotDone as no:
        fail(str(no), CODES[no.why])
    except HalterError as error:
        fail(str(error), code)
    except KeyboardInterrupt:
        if interrupted:
            warn(interrupted, "red")
        raise typer.Exit(INTERRUPTED) from None


def fail(sentence: str, code: int) -> NoReturn:
    """Say a sentence to the person and leave with a code for scripts."""
    warn(sentence, "red")
    raise typer.Exit(code)


def desk_of(app: App) -> Desk:
    """Make the desk of the person who typed: who has the store itself has every right there."""
    return Desk(app, Who(app.settings.person), short_ids=True)


def only_a_person(app: App, what: str) -> None:
    """Refuse what an agent may not do: neither itself, nor a program that it started."""
    if not may_decide(app.settings.person):
        fail(f"Only a person may {what}, and this was started by an agent ({app.settings.person}).", NOT_FINE)


def duration(text: str) -> int:
    """Read a duration that was typed."""
    try:
        length = saying_errors(lambda: parse_duration(text), WRONG_USE)
    except OverflowError:
        length = LONGEST + 1
    if length > LONGEST:
        fail(f"{text!r} is too long: write at most 36500d, which is a hundred years.", WRONG_USE)
    return length


def readable(text: str, what: str) -> str:
    """Refuse a name that nothing in a store can have."""
    return saying_errors(lambda: desks.readable(text, what))

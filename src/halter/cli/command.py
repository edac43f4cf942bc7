"""What every command shares: opening the store, reading arguments, printing answers."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from msgspec.structs import replace

from halter.cli.exit_codes import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_UNUSABLE,
    EXIT_USAGE,
    TERMINATION_SIGNALS,
)
from halter.cli.output import answer_block, answer_table, warn
from halter.core.clock import DAY, parse_duration
from halter.core.errors import HalterError, NotDone, StoreUnavailable, StoreUnusable
from halter.core.ids import may_decide
from halter.core.processes import LivenessWriter
from halter.core.rows import SessionRow
from halter.core.text import clean
from halter.operations import desk as desks
from halter.operations.desk import Desk, Who
from halter.present.receipt import Facts, Listing, Sheet
from halter.runtime.runtime import Runtime, open_runtime
from halter.settings import Settings, read_settings

T = TypeVar("T")


OpenApp = Callable[[], AbstractAsyncContextManager[Runtime]]
"""Tries to open a store."""

STORE_BACK_NOTICE: Final = "The store is back, and everything goes on."

INTERRUPTED_NOTICE: Final = "Interrupted; what was committed stands."

MAX_TYPED_DURATION: Final = 36_500 * DAY
"""No duration that anybody means is longer: a hundred years."""

STORE_POLL_SECONDS: Final = 1
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


def read_cli_settings(store: str | None) -> Settings:
    """Read the environment, here and nowhere further in."""
    if store == "":
        fail("--store is empty: name a store, or leave it out for the usual one.", EXIT_USAGE)
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    return read_settings(os.environ, home, store)


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
        places = settings or read_cli_settings(store)
        if not new:
            refuse_missing(places.store)
        hurries = replace(places, store=add_connect_timeout(places.store))
        async with AsyncExitStack() as stack:
            pulse = await stack.enter_async_context(_start_sentinel(hurries.store, runs))
            opening = partial(
                open_runtime, hurries, environ=os.environ, pulse=pulse, acts=acts, despite_doubt=despite_doubt
            )
            app = await (_wait_for_store(opening, stack) if patient else stack.enter_async_context(opening()))
            if app.doubt is not None and warned:
                warn(app.doubt.sentence())
            if app.policy is not None and (told := app.policy.announced() or app.policy.told()):
                warn(told)
            app.trouble.tell = _tell_of_store
            answer = await job(app)
        return answer, app.checkpointer.problem

    interrupted = "" if following else INTERRUPTED_NOTICE
    run = _run_cancelled_by_signals if following else asyncio.run
    answer, problem = report_errors(lambda: run(main()), interrupted=interrupted)
    if problem and warned:
        warn(problem)
    return answer


@asynccontextmanager
async def _start_sentinel(store: str, runs: str) -> AsyncGenerator[LivenessWriter]:
    """Have a sentinel outside of a process that runs sessions; nobody else needs one."""
    if not runs:
        yield LivenessWriter()
        return
    from halter.dispatch.sentinel import run_sentinel

    async with run_sentinel(store, runs) as pulse:
        yield pulse


async def _wait_for_store(opening: OpenApp, stack: AsyncExitStack) -> Runtime:
    """Open a store as soon as it is there, and tell once what is waited for."""
    told = ""
    while True:
        try:
            app = await stack.enter_async_context(opening())
        except StoreUnavailable as away:
            if str(away) != told:
                told = str(away)
                warn(told)
            await asyncio.sleep(STORE_POLL_SECONDS)
        else:
            if told:
                warn(STORE_BACK_NOTICE)
            return app


def _tell_of_store(problem: str) -> None:
    """Say why it takes so long, to whoever waits for a store that is away."""
    warn(problem or STORE_BACK_NOTICE)


def _run_cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    """Let the first signal to end cancel what runs, so that it is cleaned up in order whatever it was just doing."""
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


def refuse_missing(url: str) -> None:
    """Say that there is no such store, rather than make an empty one."""
    from halter.journal.open import mask_url, store_file_exists

    if not store_file_exists(url):
        raise StoreUnusable(f"There is no store {mask_url(url)}: check the name, or start something that makes it.")


def add_connect_timeout(url: str) -> str:
    """Bound the wait for a PostgreSQL server that does not answer, unless the URL itself does."""
    if not url.lower().startswith(("postgresql://", "postgres://")) or "connect_timeout=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}connect_timeout={CONNECT_SECONDS}"


def report_errors(job: Callable[[], T], code: int = EXIT_UNUSABLE, interrupted: str = INTERRUPTED_NOTICE) -> T:
    """Turn an error of the world into its sentence and an exit code; nobody is shown a traceback."""
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
    """Say a sentence to the person and leave with a code for scripts."""
    warn(sentence, "red")
    raise typer.Exit(code)


def make_desk(app: Runtime) -> Desk:
    """Make the desk of the person who typed: who has the store itself has every right there."""
    return Desk(app, Who(app.settings.person), short_ids=True)


def demand_person(app: Runtime, what: str) -> None:
    """Refuse what an agent may not do: neither itself, nor a program that it started."""
    if not may_decide(app.settings.person):
        fail(f"Only a person may {what}, and this was started by an agent ({app.settings.person}).", EXIT_FAILED)


def parse_typed_duration(text: str) -> int:
    """Read a duration that was typed."""
    try:
        length = report_errors(lambda: parse_duration(text), EXIT_USAGE)
    except OverflowError:
        length = MAX_TYPED_DURATION + 1
    if length > MAX_TYPED_DURATION:
        fail(f"{text!r} is too long: write at most 36500d, which is a hundred years.", EXIT_USAGE)
    return length


def demand_readable_name(text: str, what: str) -> str:
    """Refuse a name that nothing in a store can have."""
    return report_errors(lambda: desks.readable(text, what))


SessionArgument = Annotated[str, typer.Argument(help="A session's id from halter sessions; its beginning will do.")]


async def find_session_by_prefix(app: Runtime, beginning: str) -> SessionRow:
    """Find the one session whose id begins as was typed."""
    return await make_desk(app).session(beginning)


def show_sheet(sheet: Sheet) -> None:
    """Show all of it on a terminal."""
    for part in sheet:
        match part:
            case Facts():
                answer_block(part.title, part.facts)
            case Listing() if part.rows or part.empty:
                answer_table(part.title, part.columns, part.rows, right=part.right, long=part.long, empty=part.empty)
            case Listing():
                pass


_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
td { overflow-wrap: anywhere; white-space: pre-wrap; } td.number, th.number { text-align: right; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
""".strip()

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""Whatever slipped through all the same, no browser would run it or fetch anything for it."""


def render_html_page(title: str, sheet: Sheet) -> str:
    """Write the whole page. Everything that is shown passes `_safe`."""
    parts = "\n".join(_part(part) for part in sheet)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n"
        f"<body>\n<h1>{_escape(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def _escape(text: str) -> str:
    return escape(clean(text), quote=True)


def _part(part: Facts | Listing) -> str:
    match part:
        case Facts():
            rows = "\n".join(
                f"<dt>{_escape(name)}</dt><dd>{_escape(value)}</dd>" for name, value in part.facts if value
            )
            return f"{_heading(part.title)}<dl>\n{rows}\n</dl>"
        case Listing() if part.rows:
            return f"{_heading(part.title)}{_page_table(part)}"
        case Listing():
            return f"<p>{_escape(part.empty)}</p>" if part.empty else ""


def _heading(title: str) -> str:
    return f"<h2>{_escape(title)}</h2>\n" if title else ""


def _page_table(part: Listing) -> str:
    numbers = part.right.split()
    right = [name in numbers for name in part.columns]
    head = _row("th", part.columns, right)
    body = "\n".join(_row("td", row, right) for row in part.rows)
    return f"<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    marks = (' class="number"' if number else "" for number in right)
    return (
        f"<tr>{''.join(f'<{tag}{mark}>{_escape(cell)}</{tag}>' for cell, mark in zip(cells, marks, strict=True))}</tr>"
    )

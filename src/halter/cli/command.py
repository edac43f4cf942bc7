"""What every command shares: opening the store, reading arguments, printing answers, and exit codes.

| code | meaning |
|---|---|
| 0 | all is well |
| 1 | it was understood, and the answer is not the good one: something was found, refused, or came too late |
| 2 | the command line is wrong: a word that cannot be read, or a name that nothing here has |
| 3 | a store, a setting, or the place where the answer goes cannot be used |
| 70 | a mistake of Halter's own |
| 130 | interrupted |
| 141 | the reader of the output is gone, as with `head` |
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

import msgspec
import typer
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from halter.core.clock import DAY, parse_duration
from halter.core.codec import encode_public_json
from halter.core.errors import HalterError, NotDone, NotDoneWhy, StoreUnavailable, StoreUnusable
from halter.core.ids import may_decide
from halter.core.processes import LivenessWriter
from halter.core.rows import SessionRow
from halter.core.text import clean
from halter.operations import desk as desks
from halter.operations.desk import Desk, Who
from halter.present.receipt import Facts, Listing, Sheet
from halter.runtime.runtime import App, open_app
from halter.settings import Settings, read_settings

if TYPE_CHECKING:
    from halter.operations.desk import Done

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNUSABLE: Final = 3
EXIT_INTERNAL: Final = 70
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

EXIT_MEANINGS: Final[Mapping[int, str]] = {
    0: "all is well",
    EXIT_FAILED: "understood, but something was found, refused or too late",
    EXIT_USAGE: "the command line is wrong, or names what is not there",
    EXIT_UNUSABLE: "a store, a setting or the output cannot be used",
    EXIT_INTERNAL: "a mistake of Halter's own",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "whoever read the answer has gone",
}

TERMINATION_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What tells a program to end."""


MIN_TABLE_WIDTH: Final = 60
"""Columns of a screen below which a table is never readable."""

MIN_FOLDED_WIDTH: Final = 13
"""The least that a column of ids or of long text is given: half an id."""

FRAME: Final = 3
"""What a column needs besides its text: a line, and a space on both sides."""

_CONTROL_CHARACTERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What steers a terminal, and what turns the order of letters around: people decide about what they read."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table: the least width at which none of its words is broken, and the one at which no line is."""

    name: str
    number: bool
    least: int
    most: int


def make_console(*, stderr: bool = False, highlight: bool = False) -> Console:
    """Make what writes to a terminal, or to whatever stands in its place.

    Of a terminal that can do little it is thought that it has 80 columns, whatever it says itself: so it is asked here.
    """
    made = Console(stderr=stderr, highlight=highlight)
    if made.is_dumb_terminal:
        made.size = ConsoleDimensions(*shutil.get_terminal_size((80, 25)))
    return made


def say(sentence: str, *, at_once: bool = False) -> None:
    """Answer with a sentence; `at_once` where more may be long in coming."""
    _print(make_console(), sentence)
    if at_once:
        sys.stdout.flush()


def warn(sentence: str, style: str = "yellow") -> None:
    """Say a sentence beside the answer. Where nobody can hear it, the exit code must do."""
    with suppress(OSError):
        _print(make_console(stderr=True), sentence, style)


def render_sentence(sentence: str, style: str = "") -> str:
    """Make a sentence ready to be written to the standard output, by somebody else."""
    screen = make_console()
    with screen.capture() as captured:
        _print(screen, sentence, style)
    return captured.get()


def _print(screen: Console, sentence: str, style: str = "") -> None:
    """Break lines between words on a screen; a file or a program gets the sentence as one line."""
    screen.print(escape_text(sentence), style=style, soft_wrap=not screen.is_terminal)


def escape_text(text: str) -> Text:
    """Show what an agent or a tool wrote without letting it speak to the terminal, and what is no text at all."""
    return Text(_CONTROL_CHARACTERS.sub("�", text))


def answer_json(value: object) -> None:
    """Print a value as JSON; amounts are dollars, times integers of microseconds."""
    sys.stdout.write(msgspec.json.format(encode_public_json(value), indent=2).decode() + "\n")


def answer_done(done: "Done", *, as_json: bool) -> None:
    """Say what was done; for programs, name it."""
    if as_json:
        facts = {name: value for name, value in msgspec.structs.asdict(done).items() if name != "sentence"}
        answer_json({"subject": done.subject, "done": True, **facts})
    else:
        say(done.sentence)


def answer_line(value: object) -> None:
    """Print a value as JSON on a line of its own, at once: a program reads it while more is to come."""
    sys.stdout.write(encode_json_line(value).decode())
    sys.stdout.flush()


def encode_json_line(value: object) -> bytes:
    """Write a value as one line of JSON."""
    return encode_public_json(value) + b"\n"


def answer_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str = "",
    long: str = "",
    empty: str = "",
) -> None:
    """Print a table for people, or where it does not fit the screen, each row as a block of lines.

    `right` names the columns of numbers, `long` those whose words may be broken, `empty` what to say where there
    is nothing.
    """
    if not rows and empty:
        say(empty)
        return
    screen = make_console(highlight=True)
    laid_out = [
        _column(name, [row[place] for row in rows], right.split(), long.split()) for place, name in enumerate(columns)
    ]
    room = screen.width - 1 - FRAME * len(columns)
    if screen.width >= MIN_TABLE_WIDTH and room >= sum(column.least for column in laid_out):
        screen.print(_table(title, laid_out, rows, room))
        return
    for row in rows:
        answer_block(title, list(zip(columns, row, strict=True)))
        title = ""


def answer_block(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print facts below each other, each with its name."""
    block = Table.grid(padding=(0, 1))
    block.add_column(no_wrap=True, style="bold")
    block.add_column(overflow="fold")
    for name, value in facts:
        if value:
            block.add_row(name, escape_text(value))
    screen = make_console(highlight=True)
    if title:
        screen.print(escape_text(title), style="italic")
    screen.print(block)
    screen.print()


def _column(name: str, cells: Sequence[str], right: Sequence[str], long: Sequence[str]) -> TableColumn:
    texts = [name, *cells]
    words = texts if name in right else [word for text in texts for word in text.split()]
    widest = max(map(cell_len, words), default=0)
    lines = max(cell_len(line) for text in texts for line in text.splitlines() or [""])
    return TableColumn(name, name in right, min(widest, MIN_FOLDED_WIDTH) if name in long else widest, lines)


def _table(title: str, columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], room: int) -> Table:
    table = Table(title=escape_text(title), title_justify="left", header_style="bold")
    for column, width in zip(columns, _widths(columns, room), strict=True):
        justify = "right" if column.number else "left"
        table.add_column(column.name, justify=justify, overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(escape_text, row))
    return table


def _widths(columns: Sequence[TableColumn], room: int) -> list[int]:
    """Share the room that is left: whoever lacks little gets all of it, the others equal parts of the rest."""
    widths = [column.least for column in columns]
    left = room - sum(widths)
    lacking = sorted(range(len(columns)), key=lambda place: columns[place].most - columns[place].least)
    for served, place in enumerate(lacking):
        given = min(columns[place].most - widths[place], left // (len(lacking) - served))
        widths[place] += given
        left -= given
    return widths


T = TypeVar("T")

EXIT_CODES: Final[Mapping[NotDoneWhy, int]] = {
    "wrong": EXIT_USAGE,
    "missing": EXIT_USAGE,
    "refused": EXIT_FAILED,
    "forbidden": EXIT_FAILED,
}

OpenApp = Callable[[], AbstractAsyncContextManager[App]]
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
        places = settings or read_cli_settings(store)
        if not new:
            refuse_missing(places.store)
        hurries = replace(places, store=add_connect_timeout(places.store))
        async with AsyncExitStack() as stack:
            pulse = await stack.enter_async_context(_start_sentinel(hurries.store, runs))
            opening = partial(
                open_app, hurries, environ=os.environ, pulse=pulse, acts=acts, despite_doubt=despite_doubt
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


async def _wait_for_store(opening: OpenApp, stack: AsyncExitStack) -> App:
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


def make_desk(app: App) -> Desk:
    """Make the desk of the person who typed: who has the store itself has every right there."""
    return Desk(app, Who(app.settings.person), short_ids=True)


def demand_person(app: App, what: str) -> None:
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


async def find_session_by_prefix(app: App, beginning: str) -> SessionRow:
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


PLAIN: Final = ""
WARNING_STYLE: Final = "yellow"
URGENT_STYLE: Final = "bold yellow"


class StyledLine(msgspec.Struct, frozen=True):
    """What is shown, and how much it stands out."""

    text: str
    style: str = PLAIN


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

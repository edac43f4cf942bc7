"""`halter sessions`, `show`, `tail` and `receipt`: what happened, and what happens."""

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from halter.cli.audit import write_private
from halter.cli.command import (
    JsonOption,
    SessionArgument,
    StoreOption,
    Typed,
    command,
    fail,
    find_session_by_prefix,
    make_desk,
    parse_typed_duration,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, answer_line, answer_table, print_sentence
from halter.cli.terminal import progress
from halter.core.clock import SECOND, SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import FLEET, StreamId, inbox_stream, is_inbox, session_of, session_stream
from halter.core.money import format_micros
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.operations import queries
from halter.operations.queries import read_all_events
from halter.present.events import build_conversation, describe_stored_event, format_moment, summarize_event
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Facts, render_html_page
from halter.present.tables import build_sessions_sheet
from halter.runtime.feed import Follower, read_stream_heads, serialize_event, watch_growth
from halter.runtime.runtime import Runtime
from halter.state.receipt import Receipt
from halter.state.session import replay

if TYPE_CHECKING:
    from halter.journal.export import CheckedExport
    from halter.runtime.proof import Proof


sessions = command(
    queries.sessions,
    """List sessions, the newest first.

    Each with its state, why it ended, and when its next turn is due.
    """,
    build_sessions_sheet,
    look=True,
    fresh=True,
    typed={
        "since": Typed(
            ("since",),
            Annotated[str, typer.Option("--since", metavar="AGE", help="Only those begun since, as in 24h.")],
            lambda age: {"since": SystemClock().now() - parse_typed_duration(age) if age else 0},
            "",
        )
    },
)


def show(
    session: SessionArgument,
    *,
    whole: Annotated[bool, typer.Option("--events", help="Show every event, in order.")] = False,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", min=1, max=2**62, help="Show it as it was at this event.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a session as a conversation: what was said, each call with its outcome, who decided, and how it ended.

    With --events or --json it is the whole record, event by event. Erased bodies are marked.
    """
    events = run_with_app(store, lambda app: _events(app, session), despite_doubt=True)
    name = events[0].stream.partition(":")[2]
    if at is not None:
        if at > len(events):
            fail(f"Session {name} has {format_count(len(events), 'event')}, and no event {at}.", EXIT_USAGE)
        events = events[:at]
    if as_json:
        answer_json([serialize_event(stored) for stored in events])
        return
    if not whole:
        count = f"{len(events)}; all of them: halter show {name} --events"
        more = [("events", count)] if at is None else _describe_point(events)
        show_sheet([Facts(f"Session {name}", [*build_conversation(events), *more])])
        return
    rows = [
        [str(e.seq), format_moment(e.at), e.kind, summarize_event(e).text, describe_stored_event(e)] for e in events
    ]
    answer_table(f"Session {name}", ["#", "when", "what", "about", "said"], rows, right="#", long="about said")


def _describe_point(events: Sequence[Stored]) -> list[tuple[str, str]]:
    """Describe a session as it stood after an event."""
    state = replay(events)
    waits = ", ".join(flight.name for flight in state.in_flight.values())
    return [
        ("state", f"{state.stands} at {format_moment(events[-1].at)}, after event {events[-1].seq}"),
        ("spent", format_micros(state.spent.usd)),
        *([("under way", waits)] if waits else []),
        ("fork it", f"halter fork {state.session} --at {events[-1].seq}"),
    ]


async def _events(app: Runtime, session: str) -> list[Stored]:
    return await read_all_events(app, session_stream((await find_session_by_prefix(app, session)).session))


DEFAULT_TAIL_LENGTH: Final = 10
"""How many past events are shown first."""

_SHORT: Final = 13
"""Characters of an id that are shown; every command accepts them."""


def tail(
    stream: Annotated[
        str,
        typer.Argument(metavar="SESSION", help="A session, its inbox as SESSION/in, or fleet (default: everything)."),
    ] = "",
    *,
    after: Annotated[
        int | None,
        typer.Option("--after", metavar="SEQ", min=0, max=2**62, help="Begin after this event of the stream."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show events as they are committed, the newest last, until you interrupt it or the session is over.

    A session begins with its newest ten events, or with those after SEQ; everything begins with what comes from now on.
    With --json each line is an event.
    """
    if after is not None and not stream:
        fail("--after counts the events of one stream: name a session, SESSION/in or fleet.", EXIT_USAGE)

    async def job(app: Runtime) -> None:
        follower, session = await _find_followed(app, stream, after)
        async with aclosing(watch_growth(app.store, app.clock)) as changes:
            async for change in changes:
                over = session != "" and await _is_over(app, session)
                _show(await (follower.read_new() if over else follower.read_new(change)), as_json=as_json)
                if over:
                    return

    run_with_app(store, job, following=True, despite_doubt=True)


async def _find_followed(app: Runtime, stream: str, after: int | None) -> tuple[Follower, str]:
    """Find what to follow and from where; and the session whose end ends it, if it is about one."""
    if not stream:
        return Follower(app.store, dict(await read_stream_heads(app.store))), ""
    streams, session = await _streams(app, stream)
    if after is not None:
        only = streams[:1]
        return Follower(app.store, {only[0]: after}, only), session
    lengths = dict(await read_stream_heads(app.store))
    return Follower(
        app.store, {one: max(0, lengths.get(one, 0) - DEFAULT_TAIL_LENGTH) for one in streams}, streams
    ), session


async def _streams(app: Runtime, stream: str) -> tuple[list[StreamId], str]:
    if stream == FLEET:
        return [FLEET], ""
    beginning = stream.removesuffix("/in").removeprefix("session:")
    session = (await find_session_by_prefix(app, beginning)).session
    inbox = inbox_stream(session)
    return ([inbox], "") if stream.endswith("/in") else ([session_stream(session), inbox], session)


async def _is_over(app: Runtime, session: str) -> bool:
    (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
    return row.ended_at is not None


def _show(events: Sequence[Stored], *, as_json: bool) -> None:
    for stored in events:
        if as_json:
            answer_line(serialize_event(stored))
        else:
            print_sentence(format_event_line(stored), at_once=True)


def format_event_line(stored: Stored) -> str:
    at = datetime.fromtimestamp(stored.at / SECOND, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    session = session_of(stored.stream)
    where = (session or stored.stream.removeprefix("trigger:"))[:_SHORT] + ("/in" if is_inbox(stored.stream) else "")
    return f"{at} {where:<{_SHORT + 3}} {stored.seq:>4} {stored.kind:<17} {summarize_event(stored).text}".rstrip()


HtmlOption = Annotated[str, typer.Option("--html", metavar="FILE", help="Write an HTML page to a file.")]


def receipt(
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="A session's id, or its beginning, from halter sessions.")
    ] = "",
    *,
    html: HtmlOption = "",
    verify: Annotated[
        str, typer.Option("--verify", metavar="FILE", help="Check a receipt in JSON, or an export's own.")
    ] = "",
    journal: Annotated[
        str,
        typer.Option(
            "--journal", metavar="FILE", help="The file of halter export to check against; no store is needed."
        ),
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the receipt of a session: what it did and spent, what stopped it, who decided, and why it ended.

    --verify checks a receipt offline, against an exported journal: every hash is recomputed, and the receipt is rebuilt
    from the events. An export carries its own receipt. Exits 1 if anything does not match.
    """
    if verify or journal:
        if session or html or not verify:
            fail("A receipt is checked with --verify RECEIPT --journal EXPORT, and nothing else.", EXIT_USAGE)
        _verify(verify, journal or verify, as_json=as_json)
        return
    if not session:
        fail("Name a session: look at `halter sessions`.", EXIT_USAGE)

    async def job(app: Runtime) -> Receipt:
        return await queries.receipt(make_desk(app), (await find_session_by_prefix(app, session)).session)

    with progress("Working the receipt out", quiet=as_json):
        made = run_with_app(store, job, despite_doubt=True)
    if html:
        report_errors(
            lambda: write_private(html, render_html_page(f"Receipt of {made.session}", build_receipt_sheet(made)))
        )
    if as_json:
        answer_json(made)
    elif html:
        print_sentence(f"Wrote the receipt of {made.session} to {html}.")
    else:
        show_sheet(build_receipt_sheet(made))


def _verify(receipt_file: str, journal_file: str, *, as_json: bool) -> None:
    with progress("Checking", quiet=as_json):
        proof = report_errors(lambda: _proof(receipt_file, journal_file))
    if as_json:
        answer_json(proof)
    else:
        for finding in proof.findings:
            print_sentence(finding)
        for note in proof.notes:
            print_sentence(note)
        verdict = (
            "fits its journal"
            if proof.ok
            else f"does not fit its journal: {format_count(len(proof.findings), 'finding')}"
        )
        print_sentence(f"The receipt of {proof.session} {verdict}. {format_count(proof.events, 'event')} checked.")
    if not proof.ok:
        raise typer.Exit(EXIT_FAILED)


def _proof(receipt_file: str, journal_file: str) -> "Proof":
    from halter.journal.export import check_export
    from halter.runtime.proof import prove_receipt

    checked = check_export(_lines(journal_file))
    return prove_receipt(_receipt_text(receipt_file, journal_file, checked), checked)


def _receipt_text(receipt_file: str, journal_file: str, checked: "CheckedExport") -> dict[str, Any]:
    """Read the receipt; if both files are the same, use the one inside the export."""
    from halter.runtime.proof import parse_receipt

    if Path(receipt_file) == Path(journal_file):
        own = checked.receipts.get(next(iter(checked.sessions), ""))
        if own is None:
            raise ConfigError(
                f"{journal_file} is no export that brings its receipt along: name a journal too, with --journal EXPORT."
            )
    else:
        own = b"".join(_lines(receipt_file))
    try:
        return parse_receipt(own)
    except ValueError as error:
        raise ConfigError(f"{receipt_file} is not what `halter receipt SESSION --json` wrote: {error}.") from error


def _lines(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            yield from file
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {why}.") from error

"""`halter show`: a session, its events and its receipt."""

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    find_session_by_prefix,
    make_desk,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.files import write_private
from halter.cli.output import answer_json, answer_line, answer_table, print_sentence
from halter.cli.terminal import progress
from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.ids import FLEET, StreamId, inbox_stream, is_inbox, parse_session_id, session_stream
from halter.core.money import format_micros
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.journal.export import CheckedExport, check_export
from halter.operations import queries
from halter.operations.queries import read_all_events
from halter.present.bodies import build_conversation, describe_stored_event
from halter.present.events import summarize_event
from halter.present.moments import format_moment
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Facts, render_html_page
from halter.runtime.feed import Follower, read_stream_heads, serialize_event, watch_growth
from halter.runtime.proof import Proof, parse_receipt, prove_receipt
from halter.runtime.runtime import Runtime
from halter.state.receipt import Receipt
from halter.state.session import replay

AfterOption = Annotated[
    int | None,
    typer.Option("--after", metavar="SEQ", min=0, max=2**62, help="Start after this event of the stream."),
]
HtmlOption = Annotated[str, typer.Option("--html", metavar="FILE", help="Write the receipt as an HTML page to a file.")]
VerifyOption = Annotated[
    str, typer.Option("--verify", metavar="FILE", help="Verify a receipt in JSON, or the receipt in an export.")
]
JournalOption = Annotated[
    str, typer.Option("--journal", metavar="FILE", help="File of halter export to verify against. No store is needed.")
]


def show(
    session: Annotated[
        str,
        typer.Argument(help="Session id or prefix, from halter sessions. With --follow also SESSION/in or fleet."),
    ] = "",
    *,
    whole: Annotated[bool, typer.Option("--events", help="Show every event in order.")] = False,
    at: Annotated[
        int | None, typer.Option("--at", metavar="SEQ", min=1, max=2**62, help="Show the session as of this event.")
    ] = None,
    with_receipt: Annotated[
        bool, typer.Option("--receipt", help="Show what the session did, spent and saw, and why it ended.")
    ] = False,
    html: HtmlOption = "",
    verify: VerifyOption = "",
    journal: JournalOption = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Show events as they are committed; without SESSION, of everything.")
    ] = False,
    after: AfterOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a session as a conversation: messages, each call with its outcome and approver, and how it ended.

    With --events or --json, show the whole journal of the session, event by event. Erased bodies are marked.

    With --receipt, show the receipt: what the session did and spent, what stopped it, who decided, and why it ended.
    --receipt --verify verifies a receipt offline against an exported journal: it recomputes every hash, and rebuilds
    the receipt from the events. An export includes its own receipt. Exits 1 if anything does not match.

    With --follow, show events as they are committed, the newest last, until interrupted or until the session ends,
    starting with the newest ten of a session. With --json, each line is an event.
    """
    if with_receipt + follow + whole > 1:
        fail("--receipt, --follow and --events cannot be combined. Pass one of them.", EXIT_USAGE)
    if (html or verify or journal) and not with_receipt:
        fail("--html, --verify and --journal require --receipt.", EXIT_USAGE)
    if after is not None and not follow:
        fail("--after requires --follow.", EXIT_USAGE)
    if at is not None and (with_receipt or follow):
        fail("--at cannot be combined with --receipt or --follow.", EXIT_USAGE)
    if with_receipt:
        receipt(session, html=html, verify=verify, journal=journal, store=store, as_json=as_json)
    elif follow:
        tail(session, after=after, store=store, as_json=as_json)
    elif not session:
        fail(NO_SESSION, EXIT_USAGE)
    else:
        _show_conversation(session, whole=whole, at=at, store=store, as_json=as_json)


NO_SESSION: Final = "Pass a session. See `halter sessions`."


def _show_conversation(session: str, *, whole: bool, at: int | None, store: str | None, as_json: bool) -> None:
    events = run_with_app(store, lambda app: _events(app, session), despite_doubt=True)
    name = events[0].stream.partition(":")[2]
    if at is not None:
        if at > len(events):
            fail(f"Session {name} has only {format_count(len(events), 'event')}; there is no event {at}.", EXIT_USAGE)
        events = events[:at]
    if as_json:
        answer_json([serialize_event(stored) for stored in events])
        return
    if not whole:
        count = f"{len(events)}; show all with: halter show {name} --events"
        closing_facts = [("events", count)] if at is None else _list_state_rows(events)
        show_sheet([Facts(f"Session {name}", [*build_conversation(events), *closing_facts])])
        return
    rows = [
        [str(event.seq), format_moment(event.at), event.kind, summarize_event(event).text, describe_stored_event(event)]
        for event in events
    ]
    answer_table(f"Session {name}", ["#", "when", "event", "summary", "text"], rows, right="#", long="summary text")


def _list_state_rows(events: Sequence[Stored]) -> list[tuple[str, str]]:
    """Describe the state of a session after an event."""
    state = replay(events)
    running_calls = ", ".join(flight.name for flight in state.in_flight.values())
    return [
        ("state", f"{state.stands} at {format_moment(events[-1].at)}, after event {events[-1].seq}"),
        ("spent", format_micros(state.spent.usd)),
        *([("running", running_calls)] if running_calls else []),
        ("fork it", f"halter fork {state.session} --at {events[-1].seq}"),
    ]


async def _events(app: Runtime, session: str) -> list[Stored]:
    return await read_all_events(app, session_stream((await find_session_by_prefix(app, session)).session))


DEFAULT_TAIL_LENGTH: Final = 10
"""The number of past events that are shown first."""

_SHORT: Final = 13
"""The number of characters of an id that are shown; every command accepts them as a prefix."""


def tail(
    stream: Annotated[
        str,
        typer.Argument(metavar="SESSION", help="Session, its inbox as SESSION/in, or fleet (default: everything)."),
    ] = "",
    *,
    after: AfterOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show events as they are committed, the newest last, until interrupted or until the session ends.

    The output of a session starts with its newest ten events, or with those after SEQ; the output of everything starts
    with new events. With --json, each line is an event.
    """
    if after is not None and not stream:
        fail("--after requires a stream. Pass a session, SESSION/in or fleet.", EXIT_USAGE)

    async def job(app: Runtime) -> None:
        follower, session = await _find_followed(app, stream, after)
        async with aclosing(watch_growth(app.store, app.clock)) as changes:
            async for change in changes:
                has_ended = session != "" and await _has_ended(app, session)
                _show(await (follower.read_new() if has_ended else follower.read_new(change)), as_json=as_json)
                if has_ended:
                    return

    run_with_app(store, job, until_interrupted=True, despite_doubt=True)


async def _find_followed(app: Runtime, stream: str, after: int | None) -> tuple[Follower, str]:
    """Find the streams to follow and their start; and the session whose end ends the command, or an empty text."""
    if not stream:
        return Follower(app.store, dict(await read_stream_heads(app.store))), ""
    streams, session = await _streams(app, stream)
    if after is not None:
        followed_streams = streams[:1]
        return Follower(app.store, {followed_streams[0]: after}, followed_streams), session
    lengths = dict(await read_stream_heads(app.store))
    return Follower(
        app.store, {name: max(0, lengths.get(name, 0) - DEFAULT_TAIL_LENGTH) for name in streams}, streams
    ), session


async def _streams(app: Runtime, stream: str) -> tuple[list[StreamId], str]:
    if stream == FLEET:
        return [FLEET], ""
    prefix = stream.removesuffix("/in").removeprefix("session:")
    session = (await find_session_by_prefix(app, prefix)).session
    inbox = inbox_stream(session)
    return ([inbox], "") if stream.endswith("/in") else ([session_stream(session), inbox], session)


async def _has_ended(app: Runtime, session: str) -> bool:
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
    session = parse_session_id(stored.stream)
    where = (session or stored.stream.removeprefix("trigger:"))[:_SHORT] + ("/in" if is_inbox(stored.stream) else "")
    return f"{at} {where:<{_SHORT + 3}} {stored.seq:>4} {stored.kind:<17} {summarize_event(stored).text}".rstrip()


def receipt(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Session id or prefix, from halter sessions.")] = "",
    *,
    html: HtmlOption = "",
    verify: VerifyOption = "",
    journal: JournalOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the receipt of a session: what it did and spent, what stopped it, who decided, and why it ended.

    --verify verifies a receipt offline against an exported journal: it recomputes every hash, and rebuilds the receipt
    from the events. An export includes its own receipt. Exits 1 if anything does not match.
    """
    if verify or journal:
        if session or html or not verify:
            fail("To verify a receipt, pass only --verify RECEIPT --journal EXPORT.", EXIT_USAGE)
        _verify(verify, journal or verify, as_json=as_json)
        return
    if not session:
        fail(NO_SESSION, EXIT_USAGE)

    async def job(app: Runtime) -> Receipt:
        return await queries.receipt(make_desk(app), (await find_session_by_prefix(app, session)).session)

    with progress("Computing the receipt", quiet=as_json):
        session_receipt = run_with_app(store, job, despite_doubt=True)
    if html:
        report_errors(
            lambda: write_private(
                html, render_html_page(f"Receipt of {session_receipt.session}", build_receipt_sheet(session_receipt))
            )
        )
    if as_json:
        answer_json(session_receipt)
    elif html:
        print_sentence(f"Wrote the receipt of {session_receipt.session} to {html}.")
    else:
        show_sheet(build_receipt_sheet(session_receipt))


def _verify(receipt_file: str, journal_file: str, *, as_json: bool) -> None:
    with progress("Verifying", quiet=as_json):
        proof = report_errors(lambda: _proof(receipt_file, journal_file))
    if as_json:
        answer_json(proof)
    else:
        for finding in proof.findings:
            print_sentence(finding)
        for note in proof.notes:
            print_sentence(note)
        verdict = (
            "matches its journal"
            if proof.ok
            else f"does not match its journal: {format_count(len(proof.findings), 'finding')}"
        )
        print_sentence(f"The receipt of {proof.session} {verdict}. {format_count(proof.events, 'event')} checked.")
    if not proof.ok:
        raise typer.Exit(EXIT_FAILED)


def _proof(receipt_file: str, journal_file: str) -> Proof:
    checked_export = check_export(_lines(journal_file))
    return prove_receipt(_receipt_text(receipt_file, journal_file, checked_export), checked_export)


def _receipt_text(receipt_file: str, journal_file: str, checked_export: CheckedExport) -> dict[str, Any]:
    """Read the receipt; if both files are the same, use the receipt in the export."""
    if Path(receipt_file) == Path(journal_file):
        receipt_json = checked_export.receipts.get(next(iter(checked_export.sessions), ""))
        if receipt_json is None:
            raise ConfigError(
                f"{journal_file} is not an export with a receipt. Pass the journal with --journal EXPORT."
            )
    else:
        receipt_json = b"".join(_lines(receipt_file))
    try:
        return parse_receipt(receipt_json)
    except ValueError as error:
        raise ConfigError(
            f"{receipt_file} is not the output of `halter show SESSION --receipt --json`: {error}."
        ) from error


def _lines(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as file:
            yield from file
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"Cannot read {path}: {reason}.") from error

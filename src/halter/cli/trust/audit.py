"""`halter audit`: tool calls with caller, outcome and approver."""

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import Annotated, Final

import msgspec
import typer

from halter.cli.command import (
    MAX_TYPED_NUMBER,
    JsonOption,
    StoreOption,
    fail,
    make_desk,
    parse_typed_duration,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.files import STDOUT_ARGUMENT, open_sink
from halter.cli.output import answer_json, answer_line, print_sentence
from halter.cli.trust.audit_cursor import ReadPosition, cursor_path, is_cursor_name, read_cursor, write_cursor
from halter.core.ids import FLEET, StreamId, is_inbox, parse_session_id
from halter.core.ports import ALL_STREAMS, Change, Query, Store, Stored
from halter.core.text import format_count
from halter.operations import queries
from halter.operations.queries import AuditFilter
from halter.present.tables import build_audit_sheet, describe_audit_entry
from halter.runtime.feed import EVERYTHING, Follower, read_stream_heads, watch_growth
from halter.runtime.runtime import Runtime
from halter.state.audit import (
    AuditEntry,
    AuditReader,
    AuditRecord,
    find_concluded_call,
    make_audit_entry,
    restore_audit_record,
)

PAGE: Final = 1000
DEFAULT_AUDIT_AGE: Final = "1d"

WriteEntries = Callable[[Sequence[AuditEntry]], None]


def audit(
    *,
    since: Annotated[
        str, typer.Option("--since", metavar="AGE", help="Age of the oldest calls, such as 24h (default: a day).")
    ] = "",
    agent: Annotated[str, typer.Option("--agent", metavar="AGENT", help="Only this agent.")] = "",
    tool: Annotated[str, typer.Option("--tool", metavar="TOOL", help="Only this tool.")] = "",
    outcome: Annotated[
        str, typer.Option("--outcome", "--state", metavar="OUTCOME", help="Only this outcome, such as approval_denied.")
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, max=MAX_TYPED_NUMBER, help="Maximum number, newest first."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow new calls until interrupted.")] = False,
    export: Annotated[
        str, typer.Option("--export", metavar="FILE", help="Write JSON lines to a file; - is stdout.")
    ] = "",
    cursor: Annotated[
        str,
        typer.Option("--cursor", metavar="NAME", help="Export only rows that no export with this cursor has written."),
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tool calls with caller, outcome and approver.

    Only calls with an outcome are followed or exported. With a cursor, no row is lost; after a crash, some may be
    repeated, so deduplicate by call, outcome and created_at.
    """
    age = parse_typed_duration(since or DEFAULT_AUDIT_AGE)
    filters = AuditFilter(agent=agent, tool=tool, outcome=outcome)
    if cursor:
        _reject_with_cursor(cursor, export, [since, agent, tool, outcome])
    if limit is not None and (follow or export):
        fail("--limit cannot be combined with --follow or --export.", EXIT_USAGE)
    if export:
        _export(export, cursor, age, filters, store, follow=follow)
    elif follow:
        run_with_app(
            store,
            lambda app: _follow_audit(app, age, filters, _print_json if as_json else _print),
            until_interrupted=True,
            despite_doubt=True,
        )
    else:
        _show(age, filters, store, limit, as_json=as_json)


def _reject_with_cursor(cursor: str, export: str, narrowing: Iterable[str]) -> None:
    if not is_cursor_name(cursor):
        fail(f"Invalid cursor name {cursor!r}. Use letters, digits, -, . and _.", EXIT_USAGE)
    if not export:
        fail("--cursor requires --export FILE (--export - prints to stdout).", EXIT_USAGE)
    if any(narrowing):
        fail(
            "--cursor cannot be combined with --since, --agent, --tool or --outcome.",
            EXIT_USAGE,
        )


def _show(age: int, filters: AuditFilter, store: str | None, limit: int | None, *, as_json: bool) -> None:
    async def job(app: Runtime) -> list[AuditEntry]:
        actor, bounded_filters = make_desk(app), _set_start(app, age, filters)
        if limit is not None:
            return [*reversed(await queries.audit_page(actor, limit, **msgspec.structs.asdict(bounded_filters)))]
        return [make_audit_entry(row) async for row in queries.audit(actor, bounded_filters)]

    entries = run_with_app(store, job, despite_doubt=True, allow_missing=True)
    if as_json:
        answer_json(entries)
        return
    show_sheet(build_audit_sheet(entries))


def _set_start(app: Runtime, age: int, filters: AuditFilter) -> AuditFilter:
    return msgspec.structs.replace(filters, since=app.clock.now() - age)


def _print(entries: Sequence[AuditEntry]) -> None:
    for entry in entries:
        print_sentence(describe_audit_entry(entry), at_once=True)


def _print_json(entries: Sequence[AuditEntry]) -> None:
    for entry in entries:
        answer_line(entry)


async def _follow_audit(app: Runtime, age: int, filters: AuditFilter, write_entries: WriteEntries) -> None:
    """Write past rows, then new ones. A call that settles in between is written once."""
    follower = Follower(app.store, dict(await read_stream_heads(app.store)), includes_stream=_has_calls)
    written_keys = await _write_history(app, _set_start(app, age, filters), write_entries)
    async with aclosing(watch_growth(app.store, app.clock)) as changes:
        async for change in changes:
            rows = [row async for row in read_settled_calls(app.store, follower, change)]
            write_entries(
                [
                    make_audit_entry(row)
                    for row in rows
                    if filters.matches_record(row) and (row.call, row.settled_seq) not in written_keys
                ]
            )


def _has_calls(stream: StreamId) -> bool:
    """Return whether a stream holds rows of the audit; sign-ons are in the fleet's stream."""
    return stream == FLEET or (parse_session_id(stream) is not None and not is_inbox(stream))


async def _write_history(
    app: Runtime, filters: AuditFilter, write_entries: WriteEntries
) -> Collection[tuple[str, int]]:
    rows = [row async for row in queries.audit(make_desk(app), filters) if row.outcome]
    write_entries([make_audit_entry(row) for row in rows])
    return {(row.call, row.settled_seq) for row in rows}


async def read_settled_calls(store: Store, follower: Follower, change: Change) -> AsyncGenerator[AuditRecord]:
    """Read new events, and yield the audited calls that have an outcome, in the order of each session."""
    reader = AuditReader(store)
    async with aclosing(follower.follow_change(change)) as pages:
        async for page in pages:
            for stored in page:
                row = await _row(store, reader, stored)
                if row is not None:
                    yield row


async def _row(store: Store, reader: AuditReader, stored: Stored) -> AuditRecord | None:
    call = find_concluded_call(stored)
    if call is None:
        return None
    rows = await store.ask(Query("audit_of", AuditRecord, {"call": call}))
    return await reader.load(restore_audit_record(rows[0], stored)) if rows else None


def _export(target: str, cursor: str, age: int, filters: AuditFilter, store: str | None, *, follow: bool) -> None:
    count = 0

    async def job(app: Runtime) -> None:
        with open_sink(target, append=cursor != "") as write:

            def write_entries(entries: Sequence[AuditEntry]) -> None:
                nonlocal count
                if entries:
                    write(entries)
                    count += len(entries)

            if cursor:
                await _export_from_cursor(app, cursor, write_entries, follow=follow)
            elif follow:
                await _follow_audit(app, age, filters, write_entries)
            else:
                await _write_history(app, _set_start(app, age, filters), write_entries)

    run_with_app(store, job, until_interrupted=follow, despite_doubt=True)
    if target != STDOUT_ARGUMENT:
        print_sentence(f"Exported {format_count(count, 'row')} to {target}.")


class _Word(msgspec.Struct, frozen=True):
    name: str
    value: str


async def _export_from_cursor(app: Runtime, name: str, write_entries: WriteEntries, *, follow: bool) -> None:
    """Export from the end of the last export. The cursor moves only after the rows are written."""
    meta = {row.name: row.value for row in await app.store.ask(Query("meta", _Word))}
    path = cursor_path(app.environ, name)
    cursor = read_cursor(path, meta["store"])
    follower = Follower(app.store, cursor.seen, includes_stream=_has_calls)
    if not follow:
        await _export_new(app.store, follower, write_entries)
        write_cursor(path, ReadPosition(cursor.store, follower.positions))
        return
    async with aclosing(watch_growth(app.store, app.clock)) as changes:
        async for change in changes:
            if await _export_new(app.store, follower, write_entries, change) or change.stream == ALL_STREAMS:
                write_cursor(path, ReadPosition(cursor.store, follower.positions))


async def _export_new(
    store: Store, follower: Follower, write_entries: WriteEntries, change: Change = EVERYTHING
) -> bool:
    """Write new rows page by page; return whether there were any."""
    rows: list[AuditEntry] = []
    has_rows = False
    async with aclosing(read_settled_calls(store, follower, change)) as records:
        async for row in records:
            has_rows = True
            rows.append(make_audit_entry(row))
            if len(rows) >= PAGE:
                write_entries(rows)
                rows = []
    write_entries(rows)
    return has_rows

"""`halter audit` and `halter export`: calls with their outcomes, and journals as files.

A cursor is a small file with the number of the last exported event of each stream. Streams are numbered without gaps in
commit order, so no call that settles late is skipped; one number or time for all streams could skip it.
"""

import os
import re
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from halter import __version__
from halter.cli.command import (
    MAX_TYPED_NUMBER,
    JsonOption,
    SessionArgument,
    StoreOption,
    fail,
    make_desk,
    parse_typed_duration,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.output import answer_json, answer_line, encode_json_line, print_sentence
from halter.cli.terminal import ProgressListener, format_progress, progress
from halter.core.errors import ConfigError
from halter.core.ids import FLEET, StreamId, is_inbox, parse_session_id
from halter.core.ports import ALL_STREAMS, Change, Query, Store, Stored
from halter.core.text import format_count
from halter.operations import queries
from halter.operations.journal import sessions_below
from halter.operations.queries import AuditFilter
from halter.present.tables import build_audit_sheet, describe_audit_entry
from halter.runtime.feed import EVERYTHING, Follower, read_stream_heads, watch_growth
from halter.runtime.proof import encode_receipt
from halter.runtime.runtime import Runtime
from halter.settings import find_home
from halter.state.audit import (
    AuditEntry,
    AuditReader,
    AuditRecord,
    find_concluded_call,
    make_audit_entry,
    restore_audit_record,
)

if TYPE_CHECKING:
    from halter.journal.engine import StoreView
    from halter.journal.export import ExportLine

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ReadPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The read position in each stream of a store."""

    store: str
    seen: dict[StreamId, int] = {}


def is_cursor_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def cursor_path(environ: Mapping[str, str], name: str) -> Path:
    if environ.get("HALTER_CURSORS"):
        return Path(environ["HALTER_CURSORS"]) / f"{name}.json"
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "halter" / "cursors" / f"{name}.json"
    home = find_home(environ)
    if home is None:
        raise ConfigError("No home folder, and HALTER_CURSORS is not set. Set HALTER_CURSORS or HOME.")
    return home / ".local/state/halter/cursors" / f"{name}.json"


def read_cursor(path: Path, store: str) -> ReadPosition:
    """Read a cursor; a missing file is a cursor at the start."""
    try:
        cursor = msgspec.json.decode(path.read_bytes(), type=ReadPosition)
    except FileNotFoundError:
        return ReadPosition(store)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}). Remove it to export everything again.") from None
    if cursor.store != store:
        raise ConfigError(f"{path} is the cursor of another store. Choose another --cursor name for this store.")
    return cursor


def write_cursor(path: Path, cursor: ReadPosition) -> None:
    """Replace a cursor atomically."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".cursor-", delete=False) as file:
            temporary_path = Path(file.name)
            try:
                file.write(msgspec.json.encode(cursor))
                file.flush()
                os.fsync(file.fileno())
                temporary_path.replace(path)
            except OSError:
                temporary_path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}.") from error


STDOUT_ARGUMENT: Final = "-"


WriteRows = Callable[[Iterable[object]], None]
"""Writes rows as JSON lines. The rows are durable when it returns."""


def _print_rows(rows: Iterable[object]) -> None:
    for row in rows:
        sys.stdout.write(encode_json_line(row).decode())
    sys.stdout.flush()


def _write_rows(file: FileIO, path: str, rows: Iterable[object]) -> None:
    """Write rows and sync them to disk, unless the file is a pipe or a device."""
    try:
        _write_all(file, b"".join(map(encode_json_line, rows)))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable_error(path, error) from error


@contextmanager
def open_sink(target: str, *, append: bool, private: bool = False) -> Generator[WriteRows]:
    """Open a file or stdout; a file is truncated unless `append` is set.

    A new file is readable by its owner only; with `private`, an existing file becomes so, too.
    """
    if target == STDOUT_ARGUMENT:
        yield _print_rows
        return
    try:
        cut_short = append and _is_cut_short(Path(target))
        mode_flag = os.O_APPEND if append else os.O_TRUNC
        file = FileIO(os.open(target, os.O_WRONLY | os.O_CREAT | mode_flag, 0o600), "wb")
    except (OSError, ValueError) as error:
        raise _unwritable_error(target, error) from error
    with file:
        if private and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
        if cut_short:
            _write_all(file, b"\n")
        yield partial(_write_rows, file, target)


def write_private(path: str, text: str) -> None:
    """Write a file that only its owner can read."""
    try:
        with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
            _write_all(file, text.encode())
    except (OSError, ValueError) as error:
        raise _unwritable_error(path, error) from error


def _write_all(file: FileIO, data: bytes) -> None:
    """Write without a buffer, so that closing the file does not repeat a failed write."""
    while data:
        data = data[file.write(data) :]


def _is_cut_short(path: Path) -> bool:
    """Return whether a crash left an unterminated last line, which must be terminated before the next one."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _unwritable_error(path: str, error: OSError | ValueError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"Cannot write {path!r}: {reason or error}.")


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


EXPORT_BATCH: Final = 500


def export(
    session: SessionArgument,
    *,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Output file; - is stdout (default).")
    ] = STDOUT_ARGUMENT,
    children: Annotated[bool, typer.Option("--children", help="Include all sub-sessions.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export a session's journal, inbox and receipt as JSON lines that anyone can verify.

    `halter show --receipt --verify RECEIPT --journal FILE` verifies it without a store. Only you can read the file: it
    has all bodies that were not erased.
    """

    async def job(app: Runtime, on_progress: ProgressListener) -> tuple[Sequence[str], int]:
        actor = make_desk(app)
        root_id = (await actor.session(session)).session
        sessions = [root_id, *(await sessions_below(actor, root_id) if children else [])]
        return sessions, await app.store.study(
            lambda view: _write(view, sessions, output, app.clock.now(), on_progress)
        )

    with progress("Exporting", quiet=as_json) as on_progress:
        sessions, events = run_with_app(store, lambda app: job(app, on_progress), despite_doubt=True)
    if output == STDOUT_ARGUMENT:
        return
    if as_json:
        answer_json({"sessions": sessions, "events": events, "file": output})
        return
    print_sentence(f"Exported {format_count(events, 'event')} of {format_count(len(sessions), 'session')} to {output}.")
    print_sentence(f"Verify it with: halter show --receipt --verify {output} --journal {output}")


def _write(view: "StoreView", sessions: Sequence[str], output: str, now: int, on_progress: ProgressListener) -> int:
    from halter.journal.export import export_sessions

    events = 0
    with open_sink(output, append=False, private=True) as write:
        pending: list[ExportLine] = []
        for line, remaining in _report_progress(
            export_sessions(view, sessions, encode_receipt, version=__version__, now=now), on_progress
        ):
            events = max(events, remaining)
            pending.append(line)
            if len(pending) >= EXPORT_BATCH:
                write(pending)
                pending.clear()
        write(pending)
    return events


def _report_progress(
    lines: "Iterator[tuple[ExportLine, int]]", on_progress: ProgressListener
) -> "Iterator[tuple[ExportLine, int]]":
    total, reported_tenths = 0, 0
    for line, remaining in lines:
        total = max(total, remaining)
        tenths = 10 * (total - remaining) // max(1, total)
        if tenths > reported_tenths:
            reported_tenths = tenths
            on_progress(format_progress(total - remaining, total))
        yield line, remaining

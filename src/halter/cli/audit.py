"""`halter audit` and `halter export`: calls with their outcomes, and journals as files.

A cursor is a small file with the number of the last exported event of each stream. Streams are numbered without gaps in
commit order, so nothing that settles late is skipped, as it could be with one number or time for all streams.
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
from halter.core.ids import FLEET, StreamId, is_inbox, session_of
from halter.core.ports import EVERY_STREAM, Change, Query, Store, Stored
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
    AuditRecord,
    find_concluded_call,
    load_audit_bodies,
    make_audit_entry,
    restore_audit_record,
)

if TYPE_CHECKING:
    from halter.journal.engine import StoreView
    from halter.journal.export import ExportLine

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ReadPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far each stream of a store was read."""

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
        raise ConfigError("You have no home folder, and HALTER_CURSORS is not set: set it, or HOME.")
    return home / ".local/state/halter/cursors" / f"{name}.json"


def read_cursor(path: Path, store: str) -> ReadPosition:
    """Read a cursor; a missing one has read nothing."""
    try:
        cursor = msgspec.json.decode(path.read_bytes(), type=ReadPosition)
    except FileNotFoundError:
        return ReadPosition(store)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it, and everything is exported anew.") from None
    if cursor.store != store:
        raise ConfigError(f"{path} is the cursor of another store: give this one a cursor of its own, by another name.")
    return cursor


def write_cursor(path: Path, cursor: ReadPosition) -> None:
    """Replace a cursor atomically."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".cursor-", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(msgspec.json.encode(cursor))
                file.flush()
                os.fsync(file.fileno())
                written.replace(path)
            except OSError:
                written.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


STDOUT_ARGUMENT: Final = "-"


WriteRows = Callable[[Iterable[object]], None]
"""Writes rows as JSON lines; they are durable when it returns."""


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

    A new file is readable by its owner alone; with `private` an existing one becomes so.
    """
    if target == STDOUT_ARGUMENT:
        yield _print_rows
        return
    try:
        cut_short = append and _is_cut_short(Path(target))
        how = os.O_APPEND if append else os.O_TRUNC
        file = FileIO(os.open(target, os.O_WRONLY | os.O_CREAT | how, 0o600), "wb")
    except (OSError, ValueError) as error:
        raise _unwritable_error(target, error) from error
    with file:
        if private and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
        if cut_short:
            _write_all(file, b"\n")
        yield partial(_write_rows, file, target)


def write_private(path: str, text: str) -> None:
    """Write a file that only its owner may read."""
    try:
        with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
            _write_all(file, text.encode())
    except (OSError, ValueError) as error:
        raise _unwritable_error(path, error) from error


def _write_all(file: FileIO, data: bytes) -> None:
    """Write without a buffer: a failed write must not be repeated when the file is closed."""
    while data:
        data = data[file.write(data) :]


def _is_cut_short(path: Path) -> bool:
    """Return whether a crash left an unterminated last line: it must be ended before the next one."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _unwritable_error(path: str, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else None
    return ConfigError(f"{path!r} cannot be written: {why or error}.")


PAGE: Final = 1000
DEFAULT_AUDIT_AGE: Final = "1d"

WriteEntries = Callable[[Sequence[AuditEntry]], None]


def audit(
    *,
    since: Annotated[
        str, typer.Option("--since", metavar="AGE", help="How far back, as in 24h (default: a day).")
    ] = "",
    agent: Annotated[str, typer.Option("--agent", metavar="AGENT", help="Only this agent.")] = "",
    tool: Annotated[str, typer.Option("--tool", metavar="TOOL", help="Only this tool.")] = "",
    outcome: Annotated[
        str, typer.Option("--outcome", "--state", metavar="OUTCOME", help="Only this outcome, as in approval_denied.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, max=MAX_TYPED_NUMBER, help="How many of the newest.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow new calls, until interrupted.")] = False,
    export: Annotated[
        str, typer.Option("--export", metavar="FILE", help="Write JSON lines to a file; - is stdout.")
    ] = "",
    cursor: Annotated[
        str, typer.Option("--cursor", metavar="NAME", help="Export only rows that no export of this name has written.")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who called which tool, with what outcome, and who agreed to it.

    Only calls with an outcome are followed or exported. With a cursor no row is left out; after a crash some may be
    repeated, so deduplicate by call, outcome and created_at.
    """
    back = parse_typed_duration(since or DEFAULT_AUDIT_AGE)
    filters = AuditFilter(agent=agent, tool=tool, outcome=outcome)
    if cursor:
        _reject_with_cursor(cursor, export, [since, agent, tool, outcome])
    if limit is not None and (follow or export):
        fail("--limit is for a list: leave it out beside --follow and --export.", EXIT_USAGE)
    if export:
        _export(export, cursor, back, filters, store, follow=follow)
    elif follow:
        run_with_app(
            store,
            lambda app: _follow_audit(app, back, filters, _print_json if as_json else _print),
            following=True,
            despite_doubt=True,
        )
    else:
        _show(back, filters, store, limit, as_json=as_json)


def _reject_with_cursor(cursor: str, export: str, narrowing: Iterable[str]) -> None:
    if not is_cursor_name(cursor):
        fail(f"{cursor!r} cannot name a cursor: write letters, digits, - and _.", EXIT_USAGE)
    if not export:
        fail("--cursor remembers how far an export has come: add --export FILE, or --export - to print it.", EXIT_USAGE)
    if any(narrowing):
        fail(
            "--cursor is for everything: leave out --since, --agent, --tool and --outcome, or leave out --cursor.",
            EXIT_USAGE,
        )


def _show(back: int, filters: AuditFilter, store: str | None, limit: int | None, *, as_json: bool) -> None:
    async def job(app: Runtime) -> list[AuditEntry]:
        actor, found = make_desk(app), _set_start(app, back, filters)
        if limit is not None:
            return [*reversed(await queries.audit_page(actor, limit, **msgspec.structs.asdict(found)))]
        return [make_audit_entry(row) async for row in queries.audit(actor, found)]

    entries = run_with_app(store, job, despite_doubt=True, fresh=True)
    if as_json:
        answer_json(entries)
        return
    show_sheet(build_audit_sheet(entries))


def _set_start(app: Runtime, back: int, filters: AuditFilter) -> AuditFilter:
    return msgspec.structs.replace(filters, since=app.clock.now() - back)


def _print(entries: Sequence[AuditEntry]) -> None:
    for entry in entries:
        print_sentence(describe_audit_entry(entry), at_once=True)


def _print_json(entries: Sequence[AuditEntry]) -> None:
    for entry in entries:
        answer_line(entry)


async def _follow_audit(app: Runtime, back: int, filters: AuditFilter, write_entries: WriteEntries) -> None:
    """Pass on past rows, then new ones. What settles in between may be in both, and is passed on once."""
    follower = Follower(app.store, dict(await read_stream_heads(app.store)), wanted=_has_calls)
    told = await _write_history(app, _set_start(app, back, filters), write_entries)
    async with aclosing(watch_growth(app.store, app.clock)) as changes:
        async for change in changes:
            rows = [row async for row in read_settled_calls(app.store, follower, change)]
            write_entries(
                [
                    make_audit_entry(row)
                    for row in rows
                    if filters.matches_record(row) and (row.call, row.settled_seq) not in told
                ]
            )


def _has_calls(stream: StreamId) -> bool:
    """Whether a stream has what the audit lists; sign-ons are in the fleet's."""
    return stream == FLEET or (session_of(stream) is not None and not is_inbox(stream))


async def _write_history(
    app: Runtime, filters: AuditFilter, write_entries: WriteEntries
) -> Collection[tuple[str, int]]:
    rows = [row async for row in queries.audit(make_desk(app), filters) if row.outcome]
    write_entries([make_audit_entry(row) for row in rows])
    return {(row.call, row.settled_seq) for row in rows}


async def read_settled_calls(store: Store, follower: Follower, change: Change) -> AsyncGenerator[AuditRecord]:
    """Read on, and yield the audited calls that have an outcome, in the order of each session."""
    async with aclosing(follower.follow_change(change)) as pages:
        async for page in pages:
            for stored in page:
                row = await _row(store, stored)
                if row is not None:
                    yield row


async def _row(store: Store, stored: Stored) -> AuditRecord | None:
    call = find_concluded_call(stored)
    if call is None:
        return None
    found = await store.ask(Query("audit_of", AuditRecord, {"call": call}))
    return await load_audit_bodies(store, restore_audit_record(found[0], stored)) if found else None


def _export(target: str, cursor: str, back: int, filters: AuditFilter, store: str | None, *, follow: bool) -> None:
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
                await _follow_audit(app, back, filters, write_entries)
            else:
                await _write_history(app, _set_start(app, back, filters), write_entries)

    run_with_app(store, job, following=follow, despite_doubt=True)
    if target != STDOUT_ARGUMENT:
        print_sentence(f"Exported {format_count(count, 'row')} to {target}.")


class _Word(msgspec.Struct, frozen=True):
    name: str
    value: str


async def _export_from_cursor(app: Runtime, name: str, write_entries: WriteEntries, *, follow: bool) -> None:
    """Export from where the last export ended. The cursor moves only after the rows have arrived."""
    meta = {word.name: word.value for word in await app.store.ask(Query("meta", _Word))}
    path = cursor_path(app.environ, name)
    cursor = read_cursor(path, meta["store"])
    follower = Follower(app.store, cursor.seen, wanted=_has_calls)
    if not follow:
        await _export_new(app.store, follower, write_entries)
        write_cursor(path, ReadPosition(cursor.store, follower.positions))
        return
    async with aclosing(watch_growth(app.store, app.clock)) as changes:
        async for change in changes:
            if await _export_new(app.store, follower, write_entries, change) or change.stream == EVERY_STREAM:
                write_cursor(path, ReadPosition(cursor.store, follower.positions))


async def _export_new(
    store: Store, follower: Follower, write_entries: WriteEntries, change: Change = EVERYTHING
) -> bool:
    """Pass on new rows page by page; return whether there were any."""
    rows: list[AuditEntry] = []
    found = False
    async with aclosing(read_settled_calls(store, follower, change)) as new:
        async for row in new:
            found = True
            rows.append(make_audit_entry(row))
            if len(rows) >= PAGE:
                write_entries(rows)
                rows = []
    write_entries(rows)
    return found


EXPORT_BATCH: Final = 500


def export(
    session: SessionArgument,
    *,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="The file; - is stdout (default).")
    ] = STDOUT_ARGUMENT,
    children: Annotated[bool, typer.Option("--children", help="Include all sub-sessions.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a session's journal, with its inbox and receipt, as JSON lines that anyone can check.

    `halter receipt --verify RECEIPT --journal FILE` checks it without a store. Only you may read the file: it holds all
    bodies that were not erased.
    """

    async def job(app: Runtime, tell: ProgressListener) -> tuple[Sequence[str], int]:
        actor = make_desk(app)
        whole = (await actor.session(session)).session
        sessions = [whole, *(await sessions_below(actor, whole) if children else [])]
        return sessions, await app.store.study(lambda view: _write(view, sessions, output, app.clock.now(), tell))

    with progress("Exporting", quiet=as_json) as tell:
        sessions, events = run_with_app(store, lambda app: job(app, tell), despite_doubt=True)
    if output == STDOUT_ARGUMENT:
        return
    if as_json:
        answer_json({"sessions": sessions, "events": events, "file": output})
        return
    print_sentence(f"Exported {format_count(events, 'event')} of {format_count(len(sessions), 'session')} to {output}.")
    print_sentence(f"Anyone can check it with: halter receipt --verify {output} --journal {output}")


def _write(view: "StoreView", sessions: Sequence[str], output: str, now: int, tell: ProgressListener) -> int:
    from halter.journal.export import export_sessions as lines_of

    events = 0
    with open_sink(output, append=False, private=True) as write:
        pending: list[ExportLine] = []
        for line, remaining in _report_progress(
            lines_of(view, sessions, encode_receipt, version=__version__, now=now), tell
        ):
            events = max(events, remaining)
            pending.append(line)
            if len(pending) >= EXPORT_BATCH:
                write(pending)
                pending.clear()
        write(pending)
    return events


def _report_progress(
    lines: "Iterator[tuple[ExportLine, int]]", tell: ProgressListener
) -> "Iterator[tuple[ExportLine, int]]":
    total, tenth = 0, 0
    for line, remaining in lines:
        total = max(total, remaining)
        done = 10 * (total - remaining) // max(1, total)
        if done > tenth:
            tenth = done
            tell(format_progress(total - remaining, total))
        yield line, remaining

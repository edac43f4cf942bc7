"""`halter audit`: who called which tool, with what outcome, and who agreed to it; for people, programs and sinks."""

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import Annotated, Final

import msgspec
import typer

from halter.app import App
from halter.app.desk import auditing
from halter.app.desk.auditing import Wanted
from halter.app.follow import EVERYTHING, Follower, growing, heads
from halter.app.words.moments import written
from halter.cli.answer import answer_json, answer_line, answer_table, say
from halter.cli.command import WRONG_USE, JsonOption, StoreOption, desk_of, duration, fail, with_app
from halter.cli.cursor import Cursor, cursor_path, is_name, read_cursor, write_cursor
from halter.cli.export import OUTPUT, sink
from halter.core.ids import StreamId, is_inbox, session_of
from halter.core.money import shown_usd
from halter.core.ports import EVERY_STREAM, Change, Query, Store, Stored
from halter.core.text import counted
from halter.state.audit import AuditEntry, AuditFound, as_it_was, concluded, entry, with_words

PAGE: Final = 1000
USUAL: Final = "1d"

Put = Callable[[Sequence[AuditEntry]], None]
"""Something that takes rows, and has them when it returns."""


def audit(
    *,
    since: Annotated[str, typer.Option("--since", metavar="AGE", help="How far back, as in 24h; else a day.")] = "",
    tool: Annotated[str, typer.Option("--tool", metavar="NAME", help="Only this tool.")] = "",
    outcome: Annotated[str, typer.Option("--outcome", metavar="OUTCOME", help="Only this outcome.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until interrupted.")] = False,
    export: Annotated[
        str, typer.Option("--export", metavar="FILE", help="Write JSON lines to a file; - is the standard output.")
    ] = "",
    cursor: Annotated[
        str, typer.Option("--cursor", metavar="NAME", help="Export what no export of this name has written yet.")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who called which tool, with what outcome, and who agreed to it.

    What is followed or exported are calls that have come to an outcome. With a cursor nothing is ever left out; after a
    crash some rows may come twice, so tell them apart by call, outcome and created_at.
    """
    back, wanted = duration(since or USUAL), Wanted(tool=tool, outcome=outcome)
    if cursor:
        _refuse_beside_cursor(cursor, export, [since, tool, outcome])
    if export:
        _export(export, cursor, back, wanted, store, follow=follow)
    elif follow:
        with_app(
            store,
            lambda app: _followed(app, back, wanted, _print_json if as_json else _print),
            following=True,
            despite_doubt=True,
        )
    else:
        _show(back, wanted, store, as_json=as_json)


def _refuse_beside_cursor(cursor: str, export: str, narrowing: Iterable[str]) -> None:
    if not is_name(cursor):
        fail(f"{cursor!r} cannot name a cursor: write letters, digits, - and _.", WRONG_USE)
    if not export:
        fail("--cursor remembers how far an export has come: add --export FILE, or --export - to print it.", WRONG_USE)
    if any(narrowing):
        fail("--cursor is for everything: leave out --since, --tool and --outcome, or leave out --cursor.", WRONG_USE)


def _show(back: int, wanted: Wanted, store: str | None, *, as_json: bool) -> None:
    async def job(app: App) -> list[AuditEntry]:
        return [entry(row) async for row in auditing.audit(desk_of(app), _from(app, back, wanted))]

    entries = with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(entries)
        return
    columns = ["when", "agent", "tool", "level", "risk", "outcome", "decided by", "cost", "arguments", "result"]
    rows = [
        [
            written(e.created_at),
            e.agent,
            e.tool,
            e.capability_level,
            e.risk_level,
            e.outcome or "under way",
            e.decided_by,
            shown_usd(e.cost_usd),
            e.input_summary,
            e.output_summary,
        ]
        for e in entries
    ]
    answer_table("Audit", columns, rows, right="cost", long="arguments result", empty="No audited calls in that time.")


def _from(app: App, back: int, wanted: Wanted) -> Wanted:
    return msgspec.structs.replace(wanted, since=app.clock.now() - back)


def _print(entries: Sequence[AuditEntry]) -> None:
    for e in entries:
        by = f", agreed to by {e.decided_by}" if e.decided_by else ""
        cost = f" {shown_usd(e.cost_usd)}" if e.cost_usd else ""
        level = f"{e.capability_level} {e.risk_level}".strip()
        say(
            f"{written(e.created_at)} {e.agent} {e.tool} ({level}) {e.outcome}{cost}{by}  {e.input_summary}",
            at_once=True,
        )


def _print_json(entries: Sequence[AuditEntry]) -> None:
    for e in entries:
        answer_line(e)


async def _followed(app: App, back: int, wanted: Wanted, put: Put) -> None:
    """Hand on what was, then what comes. What settles in between may be in both, and is told once."""
    follower = Follower(app.store, dict(await heads(app.store)), wanted=_has_calls)
    told = await _put_past(app, _from(app, back, wanted), put)
    async with aclosing(growing(app.store, app.clock)) as changes:
        async for change in changes:
            rows = [row async for row in settled(app.store, follower, change)]
            put([entry(row) for row in rows if wanted.fits(row) and (row.call, row.settled_seq) not in told])


def _has_calls(stream: StreamId) -> bool:
    return session_of(stream) is not None and not is_inbox(stream)


async def _put_past(app: App, wanted: Wanted, put: Put) -> Collection[tuple[str, int]]:
    rows = [row async for row in auditing.audit(desk_of(app), wanted) if row.outcome]
    put([entry(row) for row in rows])
    return {(row.call, row.settled_seq) for row in rows}


async def settled(store: Store, follower: Follower, change: Change) -> AsyncGenerator[AuditFound]:
    """Read on, and tell the audited calls that have come to an outcome, in the order in which they did in a session."""
    async with aclosing(follower.new(change)) as pages:
        async for page in pages:
            for stored in page:
                row = await _row(store, stored)
                if row is not None:
                    yield row


async def _row(store: Store, stored: Stored) -> AuditFound | None:
    call = concluded(stored)
    if call is None:
        return None
    found = await store.ask(Query("audit_of", AuditFound, {"call": call}))
    return await with_words(store, as_it_was(found[0], stored)) if found else None


def _export(target: str, cursor: str, back: int, wanted: Wanted, store: str | None, *, follow: bool) -> None:
    count = 0

    async def job(app: App) -> None:
        with sink(target, append=cursor != "") as file:

            def put(entries: Sequence[AuditEntry]) -> None:
                nonlocal count
                if entries:
                    file.put(entries)
                    count += len(entries)

            if cursor:
                await _from_cursor(app, cursor, put, follow=follow)
            elif follow:
                await _followed(app, back, wanted, put)
            else:
                await _put_past(app, _from(app, back, wanted), put)

    with_app(store, job, following=follow, despite_doubt=True)
    if target != OUTPUT:
        say(f"Exported {counted(count, 'row')} to {target}.")


class _Word(msgspec.Struct, frozen=True):
    name: str
    value: str


async def _from_cursor(app: App, name: str, put: Put, *, follow: bool) -> None:
    """Export from where the last export ended. The cursor moves when rows have arrived: never before."""
    meta = {word.name: word.value for word in await app.store.ask(Query("meta", _Word))}
    path = cursor_path(app.environ, name)
    cursor = read_cursor(path, meta["store"])
    follower = Follower(app.store, cursor.seen, wanted=_has_calls)
    if not follow:
        await _export_new(app.store, follower, put)
        write_cursor(path, Cursor(cursor.store, follower.seen))
        return
    async with aclosing(growing(app.store, app.clock)) as changes:
        async for change in changes:
            if await _export_new(app.store, follower, put, change) or change.stream == EVERY_STREAM:
                write_cursor(path, Cursor(cursor.store, follower.seen))


async def _export_new(store: Store, follower: Follower, put: Put, change: Change = EVERYTHING) -> bool:
    """Hand on what is new, a page at a time; tell whether there was anything."""
    rows: list[AuditEntry] = []
    found = False
    async with aclosing(settled(store, follower, change)) as new:
        async for row in new:
            found = True
            rows.append(entry(row))
            if len(rows) >= PAGE:
                put(rows)
                rows = []
    put(rows)
    return found

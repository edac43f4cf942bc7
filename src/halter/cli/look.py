"""`halter sessions`, `show`, `receipt`, `audit`: what happened, for people and for programs."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
import typer

from halter.app import App
from halter.cli.answer import answer_block, answer_json, answer_table, counted
from halter.cli.command import WRONG_USE, JsonOption, StoreOption, duration, fail, readable, with_app
from halter.core.clock import SECOND
from halter.core.durations import shown_duration
from halter.core.ids import StreamId, session_stream
from halter.core.money import shown
from halter.core.ports import Query, Stored
from halter.core.rows import SessionRow
from halter.core.text import clean, from_body
from halter.state.audit import AuditEntry, AuditFound, entry
from halter.state.receipt import Receipt
from halter.state.receipt import receipt as receipt_of

PAGE: Final = 1000
MOST: Final = 1_000_000

SessionArgument = Annotated[str, typer.Argument(help="A session's id from halter sessions; its beginning will do.")]


def sessions(
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MOST, help="How many of the newest.")] = 50,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List sessions, the newest first."""

    async def job(app: App) -> tuple[Sequence[SessionRow], int]:
        return await app.store.ask(Query("sessions", SessionRow, {"limit": limit})), app.clock.now()

    rows, now = with_app(store, job)
    if as_json:
        answer_json(rows)
        return
    answer_table(
        "Sessions",
        ["session", "agent", "kind", "state", "why it ended", "began", "next due"],
        [_session_line(row, now) for row in rows],
        long="session",
        empty="There are no sessions yet.",
    )


def _session_line(row: SessionRow, now: int) -> list[str]:
    due = "" if row.due_at is None else ("now" if row.due_at <= now else f"in {shown_duration(row.due_at - now)}")
    began = f"{shown_duration(max(0, now - row.started_at))} ago"
    return [row.session, row.agent, row.kind, row.state, row.terminal_reason, began, due]


def show(session: SessionArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show every event of a session, in order."""
    events = with_app(store, lambda app: _events(app, session))
    if as_json:
        answer_json([_event(stored) for stored in events])
        return
    rows = [[str(e.seq), written(e.at), e.kind, from_body(e.facts), _said(e)] for e in events]
    answer_table(
        f"Session {events[0].stream}", ["#", "when", "what", "facts", "said"], rows, right="#", long="facts said"
    )


def receipt(session: SessionArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the receipt of a session: what it did and spent, and why it ended."""
    made = receipt_of(with_app(store, lambda app: _events(app, session)))
    if as_json:
        answer_json(made)
        return
    answer_block(f"Receipt of {made.session}", _receipt_lines(made))
    lines = [
        [line.name, line.purpose, line.outcome or "in doubt", shown(line.held_usd), shown(line.cost_usd)]
        for line in (*made.requests, *made.calls)
    ]
    answer_table(
        "Calls and requests",
        ["what", "for", "outcome", "held", "cost"],
        lines,
        right="held cost",
        empty="It made no call and no request.",
    )


def _receipt_lines(made: Receipt) -> list[tuple[str, str]]:
    ended = written(made.ended_at) if made.ended_at else "not yet"
    lines = [
        ("agent", f"{made.agent} ({made.kind}), started by {made.started_by}"),
        ("state", f"{made.state} {made.terminal_reason}".strip()),
        ("began, ended", f"{written(made.started_at)}, {ended}"),
        ("cost", f"{shown(made.cost_usd)} of {shown(made.held_usd)} held"),
        ("events", f"{made.events}, the last with hash {made.hash[:16]}…"),
    ]
    lines += [("brake", f"{brake.code}: {brake.name} in {brake.scope} {brake.window}".strip()) for brake in made.brakes]
    lines += [("overrun", f"{shown(over.amount)} in {over.scope} {over.window}".strip()) for over in made.overruns]
    lines += [("in doubt", call) for call in made.in_doubt]
    return lines


def audit(
    *,
    since: Annotated[str, typer.Option("--since", metavar="AGE", help="How far back, as in 24h.")] = "1d",
    tool: Annotated[str, typer.Option("--tool", metavar="NAME", help="Only this tool.")] = "",
    outcome: Annotated[str, typer.Option("--outcome", metavar="OUTCOME", help="Only this outcome.")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who called which tool, with what outcome, and who agreed to it."""
    back = duration(since)

    async def job(app: App) -> list[AuditEntry]:
        found: list[AuditFound] = []
        cursor = {"since": app.clock.now() - back, "call": "", "limit": PAGE}
        while page := await app.store.ask(Query("audit_since", AuditFound, cursor)):
            found += page
            cursor = {"since": page[-1].created_at, "call": page[-1].call, "limit": PAGE}
        return [entry(row) for row in found if tool in {"", row.tool} and outcome in {"", row.outcome}]

    entries = with_app(store, job)
    if as_json:
        answer_json(entries)
        return
    rows = [
        [
            written(e.created_at),
            e.agent,
            e.tool,
            e.capability_level,
            e.risk_level,
            e.outcome or "under way",
            e.decided_by,
            shown(e.cost_usd),
            e.input_summary,
            e.output_summary,
        ]
        for e in entries
    ]
    columns = ["when", "agent", "tool", "level", "risk", "outcome", "decided by", "cost", "arguments", "result"]
    answer_table("Audit", columns, rows, right="cost", long="arguments result", empty="No audited calls in that time.")


async def _events(app: App, session: str) -> list[Stored]:
    stream = session_stream(await _whole(app, session))
    events: list[Stored] = []
    while page := await app.store.read(StreamId(stream), after=len(events), limit=PAGE):
        events += page
    return events


async def _whole(app: App, beginning: str) -> str:
    readable(beginning, "a session's id")
    rows = await app.store.ask(Query("sessions", SessionRow, {"limit": MOST}))
    found = [row.session for row in rows if row.session.startswith(beginning)]
    if len(found) != 1 and beginning not in found:
        what = f"{counted(len(found), 'session')} begin" if found else "No session begins"
        fail(f"{what} with {beginning!r}: look at `halter sessions`.", WRONG_USE)
    return beginning if beginning in found else found[0]


def _event(stored: Stored) -> dict[str, object]:
    return {
        "stream": stored.stream,
        "seq": stored.seq,
        "kind": stored.kind,
        "version": stored.version,
        "at": stored.at,
        "generation": stored.generation,
        "facts": msgspec.Raw(stored.facts),
        "body": None if stored.body is None else clean(from_body(stored.body)),
        "blob": stored.blob,
        "erased": stored.erased,
        "hash": stored.hash.hex(),
    }


def _said(stored: Stored) -> str:
    if stored.erased:
        return "(erased)"
    return f"(blob {stored.blob[:12]}…)" if stored.blob else from_body(stored.body or b"")


def written(at: int) -> str:
    """Write a moment for people, in their own time zone."""
    return datetime.fromtimestamp(at / SECOND, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")

"""`halter sessions` and `show`: what happened, for people and for programs."""

from collections.abc import Sequence
from typing import Annotated

import typer

from halter.app import App
from halter.app.desk import looking
from halter.app.objects import as_object
from halter.app.words.moments import moment, written
from halter.app.words.told import in_words, told
from halter.cli.answer import answer_json, answer_table
from halter.cli.command import JsonOption, StoreOption, desk_of, with_app
from halter.cli.named import MOST, SessionArgument, all_events, session_meant
from halter.core.durations import shown_duration
from halter.core.ids import session_stream
from halter.core.ports import Stored
from halter.core.rows import SessionRow


def sessions(
    *,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MOST, help="How many of the newest.")] = 50,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List sessions, the newest first.

    Each with its state, why it ended, and when it has its next turn. Its id, or the beginning of it, names it
    elsewhere.
    """

    async def job(app: App) -> tuple[Sequence[SessionRow], int]:
        return await looking.sessions(desk_of(app), limit=limit), app.clock.now()

    rows, now = with_app(store, job, despite_doubt=True)
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
    began = f"{shown_duration(max(0, now - row.started_at))} ago"
    return [row.session, row.agent, row.kind, row.state, row.terminal_reason, began, next_due(row, now)]


def next_due(row: SessionRow, now: int) -> str:
    """Say when a session has its next turn, and by what it is woken before."""
    early = ", ".join(row.wake_on.split()) if row.ended_at is None else ""
    if row.due_at is None:
        return f"by {early}" if early else ""
    if row.due_at <= now:
        return "now"
    due = f"in {shown_duration(row.due_at - now)} ({moment(row.due_at, now)})"
    return f"{due}, or by {early}" if early else due


def show(session: SessionArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show every event of a session, in order.

    That is all that is known of it: nothing happened that does not stand here. What was erased is marked as such.
    """
    events = with_app(store, lambda app: _events(app, session), despite_doubt=True)
    if as_json:
        answer_json([as_object(stored) for stored in events])
        return
    rows = [[str(e.seq), written(e.at), e.kind, told(e.event), _said(e)] for e in events]
    name = events[0].stream.partition(":")[2]
    answer_table(f"Session {name}", ["#", "when", "what", "about", "said"], rows, right="#", long="about said")


async def _events(app: App, session: str) -> list[Stored]:
    return await all_events(app, session_stream((await session_meant(app, session)).session))


def _said(stored: Stored) -> str:
    if stored.erased:
        return "(erased)"
    if stored.blob:
        return f"(blob {stored.blob[:12]}…)"
    return in_words(stored.event, stored.body or b"")

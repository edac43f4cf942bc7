"""Erasure of bodies. Facts and hash chains stay, so that what happened remains provable.

An erasure is an event of the fleet, committed in the transaction that deletes the bodies. Only ended sessions are
erased: a running one would continue with gaps in its transcript.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from halter.core.events import BodiesErased, DecisionAsked, NotificationQueued
from halter.core.ids import FLEET, OUTBOX, StreamId, inbox_stream, session_stream, trigger_stream
from halter.core.ports import Draft, Query, Rows, Stored, Write
from halter.core.rows import DecisionRow, NotificationRow, SessionRow, StreamRow, TriggerRow
from halter.journal.engine import StoreView
from halter.journal.rebuild import read_erasures
from halter.journal.store import JournalStore

_PAGE: Final = 500


class NotErased(msgspec.Struct, frozen=True):
    session: str
    sentence: str


class Erasure(msgspec.Struct, frozen=True):
    """The sessions that were erased and those that were not, and the number of erased messages outside sessions.

    If `scrubbed` is False, a reader kept copies outside the tables from being overwritten. Another erasure, even of
    nothing, removes them.
    """

    erased: tuple[str, ...]
    refused: tuple[NotErased, ...]
    scrubbed: bool
    messages: int = 0


async def erase_session_bodies(store: JournalStore, sessions: Iterable[str], by: str, reason: str = "") -> Erasure:
    erased: list[str] = []
    refused: list[NotErased] = []
    for session in sessions:
        refusal = await _erase_session(store, session, by, reason)
        if refusal is None:
            erased.append(session)
        else:
            refused.append(refusal)
    return Erasure(tuple(erased), tuple(refused), await store.scrub())


async def erase_older_than(store: JournalStore, age: int, by: str, reason: str = "retention") -> Erasure:
    """Erase the sessions that ended more than `age` microseconds ago, and messages of that age outside sessions."""
    cutoff = await store.now() - age
    sessions = await store.study(lambda view: _list_streams_with_bodies(view, cutoff))
    messages = await _erase_outside(store, cutoff, by, reason)
    return msgspec.structs.replace(await erase_session_bodies(store, sessions, by, reason), messages=messages)


async def erase_messages(store: JournalStore, by: str, reason: str = "") -> Erasure:
    """Erase the bodies outside sessions.

    These are messages that needed no session, settled decisions, sent notifications, and the tasks of ended triggers.
    """
    messages = await _erase_outside(store, await store.now() + 1, by, reason)
    return Erasure((), (), await store.scrub(), messages)


async def _erase_outside(store: JournalStore, cutoff: int, by: str, reason: str) -> int:
    """Erase the bodies of all streams outside sessions. Returns their number."""
    triggers = await store.ask(Query("all_triggers", TriggerRow))
    ended_streams = [
        trigger_stream(row.trigger) for row in triggers if row.ended_at is not None and row.ended_at < cutoff
    ]
    return sum([await _erase_stream(store, stream, cutoff, by, reason) for stream in (FLEET, OUTBOX, *ended_streams)])


async def _erase_stream(store: JournalStore, stream: StreamId, cutoff: int, by: str, reason: str) -> int:
    """Erase the bodies of a stream that are older than `cutoff`, up to the first that is still needed."""
    erased_through = (await store.study(read_erasures)).get(stream, 0)
    last_seq, body_count = erased_through, 0
    while page := await store.read(stream, last_seq, _PAGE):
        for stored_event in page:
            if stored_event.at >= cutoff or await _is_pending(store, stored_event):
                page = ()
                break
            last_seq = stored_event.seq
            body_count += stored_event.body is not None or stored_event.blob is not None
        if not page:
            break
    if not body_count:
        return 0
    event = BodiesErased(stream=stream, through=last_seq, by=by, reason=reason)
    await store.commit(Write(FLEET, await _erasure_key(store, stream), lambda _: [Draft(event)]))
    return body_count


async def _is_pending(store: JournalStore, stored_event: Stored) -> bool:
    """Return True for a decision that can still be answered, or a notification that is not sent yet."""
    match stored_event.event:
        case DecisionAsked(decision=decision):
            decisions = await store.ask(Query("decision", DecisionRow, {"decision": decision}))
            return bool(decisions) and not decisions[0].verdict and decisions[0].expires_at > await store.now()
        case NotificationQueued(notification=notification):
            rows = await store.ask(Query("all_notifications", NotificationRow))
            notifications = [row for row in rows if row.notification == notification]
            return bool(notifications) and notifications[0].sent_at is None and not notifications[0].gave_up
        case _:
            return False


async def _erase_session(store: JournalStore, session: str, by: str, reason: str) -> NotErased | None:
    streams = (session_stream(session), inbox_stream(session))

    def decide(rows: Rows) -> list[Draft]:
        row = rows.get(SessionRow, session)
        if row is not None and row.ended_at is None and row.started_at:
            return []
        heads = [head for stream in streams if (head := rows.get(StreamRow, stream)) is not None]
        return [Draft(BodiesErased(stream=head.stream, through=head.head, by=by, reason=reason)) for head in heads]

    session_rows = await store.ask(Query("session", SessionRow, {"session": session}))
    committed = await store.commit(Write(FLEET, await _erasure_key(store, session), decide, others=streams))
    if committed.events:
        return None
    if not session_rows:
        return NotErased(session, f"Unknown session {session}. List the sessions with `halter sessions`.")
    state = session_rows[0].state
    return NotErased(session, f"Session {session} has not ended ({state}). Only ended sessions can be erased.")


async def _erasure_key(store: JournalStore, target: str) -> str:
    """Make a key from the fleet's last event: new for each erasure, the same for a retry."""
    fleet = await store.ask(Query("head", StreamRow, {"stream": FLEET}))
    return f"erase:{target}:{fleet[0].head if fleet else 0}"


def _list_streams_with_bodies(view: StoreView, cutoff: int) -> list[str]:
    heads = {row["stream"]: row["head"] for row in view.ask("heads", {})}
    erased_through = read_erasures(view)

    def has_bodies(stream: StreamId) -> bool:
        return heads.get(stream, 0) > erased_through.get(stream, 0)

    ended_sessions = [row["session"] for row in view.ask("ended_before", {"before": cutoff})]
    return [
        session
        for session in ended_sessions
        if has_bodies(session_stream(session)) or has_bodies(inbox_stream(session))
    ]

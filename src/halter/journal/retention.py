"""Erases what was said, while what happened stays provable: bodies go, facts and chains stay.

An erasure is an event of the fleet, and the bodies go in the same transaction. Only ended sessions are erased: a
running one would continue with holes in its transcript.
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
    """Which sessions were erased and which were not, and how many messages outside of sessions.

    Without `scrubbed`, copies may linger outside the tables because of a reader: another erasure, even of nothing,
    clears them.
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
    """Erase the sessions that ended more than `age` microseconds ago, and what is as old outside of sessions."""
    before = await store.now() - age
    sessions = await store.study(lambda view: _list_streams_with_bodies(view, before))
    messages = await _erase_outside(store, before, by, reason)
    return msgspec.structs.replace(await erase_session_bodies(store, sessions, by, reason), messages=messages)


async def erase_messages(store: JournalStore, by: str, reason: str = "") -> Erasure:
    """Erase what was said outside of sessions.

    That is messages that needed no session, settled questions to people, sent notifications, and the tasks of ended
    triggers.
    """
    messages = await _erase_outside(store, await store.now() + 1, by, reason)
    return Erasure((), (), await store.scrub(), messages)


async def _erase_outside(store: JournalStore, before: int, by: str, reason: str) -> int:
    """Erase the bodies of all streams outside of sessions, and count them."""
    triggers = await store.ask(Query("all_triggers", TriggerRow))
    ended = [trigger_stream(row.trigger) for row in triggers if row.ended_at is not None and row.ended_at < before]
    return sum([await _erase_stream(store, stream, before, by, reason) for stream in (FLEET, OUTBOX, *ended)])


async def _erase_stream(store: JournalStore, stream: StreamId, before: int, by: str, reason: str) -> int:
    """Erase the bodies of a stream up to a moment, or to the first that is still needed."""
    after = (await store.study(read_erasures)).get(stream, 0)
    through, bodies = after, 0
    while page := await store.read(stream, through, _PAGE):
        for stored in page:
            if stored.at >= before or await _is_pending(store, stored):
                page = ()
                break
            through = stored.seq
            bodies += stored.body is not None or stored.blob is not None
        if not page:
            break
    if not bodies:
        return 0
    event = BodiesErased(stream=stream, through=through, by=by, reason=reason)
    await store.commit(Write(FLEET, await _erasure_key(store, stream), lambda _: [Draft(event)]))
    return bodies


async def _is_pending(store: JournalStore, stored: Stored) -> bool:
    """Whether an event is a question that can still be answered, or a notification not sent yet."""
    match stored.event:
        case DecisionAsked(decision=decision):
            asked = await store.ask(Query("decision", DecisionRow, {"decision": decision}))
            return bool(asked) and not asked[0].verdict and asked[0].expires_at > await store.now()
        case NotificationQueued(notification=notification):
            rows = await store.ask(Query("all_notifications", NotificationRow))
            queued = [row for row in rows if row.notification == notification]
            return bool(queued) and queued[0].sent_at is None and not queued[0].gave_up
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

    found = await store.ask(Query("session", SessionRow, {"session": session}))
    done = await store.commit(Write(FLEET, await _erasure_key(store, session), decide, others=streams))
    if done.events:
        return None
    if not found:
        return NotErased(session, f"There is no session {session}; look for its id with `halter sessions`.")
    state = found[0].state
    return NotErased(session, f"Session {session} is {state} and has not ended: it can be erased when it has.")


async def _erasure_key(store: JournalStore, session: str) -> str:
    """A key from the fleet's last event: new for each erasure, and the same for a repeat."""
    fleet = await store.ask(Query("head", StreamRow, {"stream": FLEET}))
    return f"erase:{session}:{fleet[0].head if fleet else 0}"


def _list_streams_with_bodies(view: StoreView, before: int) -> list[str]:
    heads = {row["stream"]: row["head"] for row in view.ask("heads", {})}
    through = read_erasures(view)

    def has_bodies(stream: StreamId) -> bool:
        return heads.get(stream, 0) > through.get(stream, 0)

    ended = [row["session"] for row in view.ask("ended_before", {"before": before})]
    return [name for name in ended if has_bodies(session_stream(name)) or has_bodies(inbox_stream(name))]

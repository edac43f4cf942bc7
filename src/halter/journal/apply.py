"""What a write does, the same for every store: fence, decide, append, project.

Each stream is a hash chain: an edited, deleted, moved or repeated event is detected. A hash covers a format tag, the
previous hash, the header with the facts, and a salted digest of the body. Erasing a body with its salt keeps the
digest, so the chain still holds and the body cannot be guessed.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

from halter.core.codec import encode
from halter.core.errors import LeaseLost, UndeclaredRow
from halter.core.ids import StreamId, is_inbox, session_of, session_stream
from halter.core.money import BudgetRow
from halter.core.ports import Committed, Draft, Lease, Stored, Write
from halter.core.project import EraseBodies, project_event
from halter.core.rows import SessionRow, StreamRow, explain_newer_format
from halter.core.vocabulary import R, Row, RowKey

FORMAT_TAG: Final = b"halter.event.1\n"
CHAIN_START: Final = bytes(32)

SALT_BYTES: Final = 16

_ENCODE: Final = msgspec.json.Encoder().encode


def digest_body(salt: bytes, body: bytes) -> bytes:
    """Digest a body so that it cannot be guessed once its salt is gone."""
    return sha256(salt + body).digest()


EventHeader = tuple[str, int, str, int, int, int, str, str | None]
"""Stream, sequence number, kind, version, time, generation, key of the write, digest of the blob."""


def hash_event(previous: bytes, header: EventHeader, facts: bytes, digest: bytes) -> bytes:
    head = _ENCODE(header)
    sizes = b"%d %d %d\n" % (len(head), len(facts), len(digest))
    return sha256(b"".join((FORMAT_TAG, previous, sizes, head, facts, digest))).digest()


NO_BODY: Final = b""


class WorkingSet:
    """The locked rows of one transaction, as its writes change them one after the other."""

    __slots__ = ("_changed", "_loaded", "_rows", "erasures", "events", "now")

    def __init__(self, loaded: Mapping[RowKey, Row | None], now: int) -> None:
        self._rows: dict[RowKey, Any] = dict(loaded)
        self._loaded = loaded
        # The time of a new event is never before its predecessors, so a clock set back reorders nothing.
        for row in loaded.values():
            if isinstance(row, BudgetRow):
                now = max(now, row.cap_at)
            elif isinstance(row, StreamRow):
                now = max(now, row.at)
        self.now = now
        self.events: list[Stored] = []
        self.erasures: list[EraseBodies] = []
        self._changed: dict[RowKey, Row | None] = {}

    def get(self, kind: type[R], *key: Any) -> R | None:
        try:
            return self._rows[kind, key]
        except KeyError:
            message = f"A write looked at {kind.TABLE} {key}, which it did not declare; add it to `reads` or `others`."
            raise UndeclaredRow(message) from None

    def put(self, row: Row) -> None:
        """Change or add a row; one of an append-only table need not be declared."""
        key = row.key()
        if key not in self._rows and not row.APPEND_ONLY:
            message = f"An event changes {row.TABLE} {key[1]}, which its write did not declare; add it to `reads`."
            raise UndeclaredRow(message)
        self._rows[key] = self._changed[key] = row

    def drop(self, key: RowKey) -> None:
        self._rows[key] = self._changed[key] = None

    def erase(self, bodies: EraseBodies) -> None:
        self.erasures.append(bodies)

    def changes(self) -> "Changes":
        changes, loaded = Changes({}, {}, [], self.events, self.erasures), self._loaded
        for key, row in self._changed.items():
            if row is None:
                if loaded.get(key) is not None:
                    changes.deletes.append(key)
            elif loaded.get(key) is None:
                changes.inserts[key] = row
            else:
                changes.updates[key] = row
        return changes


class Changes(msgspec.Struct, frozen=True):
    inserts: dict[RowKey, Row]
    updates: dict[RowKey, Row]
    deletes: list[RowKey]
    events: list[Stored]
    erasures: list[EraseBodies]


class Applier(Protocol):
    """Applies one write to a working set; drills inject a broken one."""

    def __call__(self, write: Write, rows: WorkingSet, salt: Callable[[int], bytes]) -> Committed: ...


def list_declared_rows(writes: Sequence[Write]) -> list[RowKey]:
    keys: dict[RowKey, None] = {}
    for write in writes:
        for stream in (write.stream, *write.others) if write.others else (write.stream,):
            keys[StreamRow, (stream,)] = None
            session = session_of(stream)
            if session is not None:
                keys[SessionRow, (session,)] = None
        keys.update(dict.fromkeys(write.reads))
    return list(keys)


def apply_write(write: Write, rows: WorkingSet, salt: Callable[[int], bytes]) -> Committed:
    if write.lease is not None:
        fence(write.lease, rows)
    drafts = write.decide(rows)
    if write.lease is None:
        for draft in drafts:
            _refuse_newer_session(draft.stream or write.stream, rows)
    if len(drafts) == 1:
        return Committed((append_event(drafts[0], write, rows, salt),))
    return Committed(tuple([append_event(draft, write, rows, salt) for draft in drafts]))


def fence(lease: Lease, rows: WorkingSet) -> None:
    row = rows.get(SessionRow, lease.session)
    if row is None or row.owner != lease.worker or row.generation != lease.generation:
        owner = f"{row.owner or 'no worker'} (generation {row.generation})" if row else "no worker: it does not exist"
        message = (
            f"Session {lease.session} is no longer held by {lease.worker} (generation {lease.generation}); "
            f"it belongs to {owner}. Nothing was written."
        )
        raise LeaseLost(message)


def _refuse_newer_session(stream: StreamId, rows: WorkingSet) -> None:
    """Refuse to write to a session that a newer program has taken. Its inbox stays open."""
    session = session_of(stream)
    row = None if session is None or is_inbox(stream) else rows.get(SessionRow, session)
    if row is not None and (why := explain_newer_format(row)):
        raise LeaseLost(f"{why} Nothing was written.")


def append_event(draft: Draft, write: Write, rows: WorkingSet, salt: Callable[[int], bytes]) -> Stored:
    """Link an event to its stream, and change the rows as it says."""
    event, facts = encode(draft.event)
    stream, body, now, lease = draft.stream or write.stream, draft.body, rows.now, write.lease
    head = rows.get(StreamRow, stream)
    seq, previous = (head.head + 1, head.hash) if head else (1, CHAIN_START)
    # A session's generation says nothing of other streams: of a sub-session's, or of an inbox that others write to.
    generation = lease.generation if lease and stream == session_stream(lease.session) else 0
    body_salt, digest = None, NO_BODY
    if body is not None:
        body_salt = salt(SALT_BYTES)
        digest = digest_body(body_salt, body)
    header = (stream, seq, event.KIND, event.VERSION, now, generation, write.key, draft.blob)
    chained = hash_event(previous, header, facts, digest)
    stored = Stored(*header, facts, body, body_salt, digest, chained, event)
    rows.events.append(stored)
    rows.put(StreamRow(stream, seq, chained, now))
    project_event(event, stored, rows)
    return stored

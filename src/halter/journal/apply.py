"""What a write does, the same for every store: fence, decide, append, project.

The stores differ only in how they load, lock and save rows.

The hash chain of a stream: what makes an edited, deleted, moved or repeated event visible.

Each hash covers a format tag, the hash before it, the header with the facts, and a salted digest of the body.
Erasing a body (and its salt) leaves the digest, so the chain still holds and nothing can be guessed from it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

from halter.core.codec import encode
from halter.core.errors import LeaseLost, UndeclaredRow
from halter.core.events import AnyEvent
from halter.core.ids import StreamId, is_inbox, session_of, session_stream
from halter.core.money import BudgetRow
from halter.core.ports import Committed, Draft, Lease, Stored, Write
from halter.core.project import EraseBodies, RowDeleted, project_event
from halter.core.rows import SessionRow, StreamRow, explain_newer_format
from halter.core.vocabulary import R, Row, RowKey

FORMAT_TAG: Final = b"halter.event.1\n"
CHAIN_START: Final = bytes(32)
"""What the first event of a stream links to."""

SALT_BYTES: Final = 16

_ENCODE: Final = msgspec.json.Encoder().encode


def digest_body(salt: bytes, body: bytes) -> bytes:
    """Digest a body so that it cannot be guessed once its salt is gone."""
    return sha256(salt + body).digest()


EventHeader = tuple[str, int, str, int, int, int, str, str | None]
"""Stream, sequence number, kind, version, time, generation, key of the write, digest of the blob."""


def hash_event(previous: bytes, header: EventHeader, facts: bytes, digest: bytes) -> bytes:
    """Work out the hash of an event from the one before it."""
    head = _ENCODE(header)
    sizes = b"%d %d %d\n" % (len(head), len(facts), len(digest))
    return sha256(b"".join((FORMAT_TAG, previous, sizes, head, facts, digest))).digest()


NO_BODY: Final = b""


class WorkingSet:
    """The locked rows of one transaction, as its writes change them one after the other."""

    def __init__(self, loaded: Mapping[RowKey, Row | None], now: int) -> None:
        self._rows: dict[RowKey, Any] = dict(loaded)
        self._loaded = loaded
        self.now = _clamp_time(loaded.values(), now)
        self.events: list[Stored] = []
        self.erasures: list[EraseBodies] = []
        self._touched: dict[RowKey, None] = {}
        self._appended: list[Row] = []

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a declared row."""
        try:
            return self._rows[kind, key]
        except KeyError:
            message = f"A write looked at {kind.TABLE} {key}, which it did not declare; add it to `reads` or `others`."
            raise UndeclaredRow(message) from None

    def put(self, row: Row) -> None:
        """Change or add a row; one of an append-only table needs no declaring."""
        if row.APPEND_ONLY:
            self._appended.append(row)
            return
        key = row.key()
        if key not in self._rows:
            message = f"An event changes {row.TABLE} {key[1]}, which its write did not declare; add it to `reads`."
            raise UndeclaredRow(message)
        self._rows[key] = row
        self._touched[key] = None

    def drop(self, key: RowKey) -> None:
        """Remove a declared row."""
        self._rows[key] = None
        self._touched[key] = None

    def changes(self) -> "Changes":
        """Tell apart what the store has to insert, update and delete."""
        changes = Changes([*self._appended], [], [], self.events, self.erasures)
        for key in self._touched:
            before, after = self._loaded[key], self._rows[key]
            if after is None:
                if before is not None:
                    changes.deletes.append(key)
            elif before is None:
                changes.inserts.append(after)
            else:
                changes.updates.append(after)
        return changes


def _clamp_time(rows: Iterable[Row | None], now: int) -> int:
    """Tell the time of a new event: none that it must not precede, so that a clock set back cannot reorder anything."""
    for row in rows:
        if row is None:
            continue
        if isinstance(row, StreamRow):
            now = max(now, row.at)
        elif isinstance(row, BudgetRow):
            now = max(now, row.cap_at)
    return now


class Changes(msgspec.Struct, frozen=True):
    """All that one transaction has to save."""

    inserts: list[Row]
    updates: list[Row]
    deletes: list[RowKey]
    events: list[Stored]
    erasures: list[EraseBodies]


class Applier(Protocol):
    """What applies one write to a working set; drills put a broken one in its place."""

    def __call__(self, write: Write, rows: WorkingSet, salt: Callable[[int], bytes]) -> Committed:
        """Append what the write decides."""
        ...


def list_declared_rows(writes: Sequence[Write]) -> list[RowKey]:
    """List every row that the writes may touch, each once."""
    keys: dict[RowKey, None] = {}
    for write in writes:
        for stream in (write.stream, *write.others):
            keys[StreamRow, (stream,)] = None
            session = session_of(stream)
            if session is not None:
                keys[SessionRow, (session,)] = None
        keys.update(dict.fromkeys(write.reads))
    return list(keys)


def apply_write(write: Write, rows: WorkingSet, salt: Callable[[int], bytes]) -> Committed:
    """Fence, decide, append, project."""
    if write.lease is not None:
        fence(write.lease, rows)
    drafts = write.decide(rows)
    if write.lease is None:
        for draft in drafts:
            _refuse_newer_session(draft.stream or write.stream, rows)
    return Committed(tuple([append_event(draft, write, rows, salt) for draft in drafts]))


def fence(lease: Lease, rows: WorkingSet) -> None:
    """Refuse an owner whose session was given to somebody else."""
    row = rows.get(SessionRow, lease.session)
    if row is None or (row.owner, row.generation) != (lease.worker, lease.generation):
        owner = f"{row.owner or 'nobody'} (generation {row.generation})" if row else "nobody: it does not exist"
        message = (
            f"Session {lease.session} is no longer held by {lease.worker} (generation {lease.generation}); "
            f"it belongs to {owner}. Nothing was written."
        )
        raise LeaseLost(message)


def _refuse_newer_session(stream: StreamId, rows: WorkingSet) -> None:
    """Refuse to write to a session that a newer program has taken up. Its inbox is open to everybody."""
    session = session_of(stream)
    row = None if session is None or is_inbox(stream) else rows.get(SessionRow, session)
    if row is not None and (why := explain_newer_format(row)):
        raise LeaseLost(f"{why} Nothing was written.")


def append_event(draft: Draft, write: Write, rows: WorkingSet, salt: Callable[[int], bytes]) -> Stored:
    """Give an event its place in its stream, link it into the chain, and let it change the rows."""
    event, facts = encode(draft.event)
    stored = _make_stored_event(event, facts, draft, write, rows, salt)
    rows.events.append(stored)
    rows.put(StreamRow(stored.stream, stored.seq, stored.hash, stored.at))
    for effect in project_event(event, stored, rows):
        match effect:
            case Row():
                rows.put(effect)
            case RowDeleted():
                rows.drop(effect.key)
            case EraseBodies():
                rows.erasures.append(effect)
    return stored


def _make_stored_event(
    event: AnyEvent, facts: bytes, draft: Draft, write: Write, rows: WorkingSet, salt: Callable[[int], bytes]
) -> Stored:
    stream = draft.stream or write.stream
    head = rows.get(StreamRow, stream)
    seq, previous = (head.head + 1, head.hash) if head else (1, CHAIN_START)
    # A session's generation says nothing of other streams: of a sub-session's, or of an inbox that others write to.
    generation = write.lease.generation if write.lease and stream == session_stream(write.lease.session) else 0
    body_salt = None if draft.body is None else salt(SALT_BYTES)
    digest = NO_BODY if body_salt is None or draft.body is None else digest_body(body_salt, draft.body)
    header = (stream, seq, event.KIND, event.VERSION, rows.now, generation, write.key, draft.blob)
    chained = hash_event(previous, header, facts, digest)
    return Stored(*header, facts, draft.body, body_salt, digest, chained, event)

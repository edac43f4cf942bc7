"""The steps of a write, the same for every store: fence, decide, append, project.

Each stream is a hash chain: an edited, deleted, moved or repeated event is detected. A hash covers a format tag, the
previous hash, the header with the facts, and a salted digest of the body. Erasing a body with its salt keeps the
digest, so the chain still holds and the body cannot be guessed.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec

from halter.core.codec import encode
from halter.core.errors import LeaseLost, UndeclaredRow
from halter.core.ids import Digest, StreamId, is_inbox, parse_session_id
from halter.core.money import BudgetRow
from halter.core.ports import Committed, Lease, Stored, Write
from halter.core.project import PROJECTIONS, project_event
from halter.core.project.projection import EraseBodies
from halter.core.rows import SessionRow, StreamRow, explain_newer_format, rows_of_stream
from halter.core.vocabulary import R, Row, RowKey

FORMAT_TAG: Final = b"halter.event.1\n"
CHAIN_START: Final = bytes(32)

SALT_BYTES: Final = 16

_ENCODE: Final = msgspec.json.Encoder().encode
_JOIN: Final = b"".join


def digest_body(salt: bytes, body: bytes) -> bytes:
    """Digest a body with its salt, so that it cannot be guessed after the salt is erased."""
    return sha256(salt + body).digest()


EventHeader = tuple[str, int, str, int, int, int, str, str | None]
"""Stream, sequence number, kind, version, time, generation, key of the write, digest of the blob."""


def hash_event(previous: bytes, header: EventHeader, facts: bytes, digest: bytes) -> bytes:
    head = _ENCODE(header)
    lengths = _write_lengths(len(head), len(facts), len(digest))
    return sha256(_JOIN((FORMAT_TAG, previous, lengths, head, facts, digest))).digest()


@lru_cache(maxsize=1024)
def _write_lengths(head: int, facts: int, digest: int) -> bytes:
    return b"%d %d %d\n" % (head, facts, digest)


NO_BODY: Final = b""


class Changes(msgspec.Struct):
    """The changes of a transaction: inserted, updated and deleted rows, events, their blobs, and bodies to erase."""

    inserts: dict[RowKey, Row] = {}
    updates: dict[RowKey, Row] = {}
    deletes: dict[RowKey, None] = {}
    events: list[Stored] = []
    blobs: list[Digest] = []
    erasures: list[EraseBodies] = []


class WorkingSet(Changes, kw_only=True):
    """The locked rows of one transaction, changed by its writes in order.

    The set owns `loaded`. Inserts, updates and deletes are recorded when they happen, so nothing is compared at the
    end. All events have the time `now`. `earlier_by_key` has the events of writes that were committed before. A row in
    `unread` is read on demand; if it is saved without being read, it must be new, which the store checks.
    """

    loaded: dict[RowKey, Any]
    now: int
    earlier_by_key: dict[str, tuple[Stored, ...]] = {}
    unread: Container[RowKey] = ()
    read_row: Callable[[RowKey], Any] | None = None

    def get(self, *key: Any) -> Any:
        try:
            return self.loaded[key]
        except KeyError:
            if self.read_row is not None and key in self.unread:
                row = self.loaded[key] = self.read_row(key)
                return row
            row_name = f"{key[0].TABLE} {key[1:]}"
            message = f"A write read {row_name} without declaring it. Add it to `reads` or `others`."
            raise UndeclaredRow(message) from None

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        try:
            return [*map(self.loaded.__getitem__, keys)]
        except KeyError:
            return [self.get(*key) for key in keys]

    def save(self, row: Row) -> None:
        """Insert or update a row. A row of an append-only table need not be declared."""
        key, rows, inserts = row.key(), self.loaded, self.inserts
        if rows.get(key) is not None:
            (inserts if inserts and key in inserts else self.updates)[key] = row
        elif self.deletes and key in self.deletes:
            del self.deletes[key]
            self.updates[key] = row
        elif key in rows or row.APPEND_ONLY or key in self.unread:
            inserts[key] = row
        else:
            message = f"An event changes {row.TABLE} {key[1:]}, which its write did not declare. Add it to `reads`."
            raise UndeclaredRow(message)
        rows[key] = row

    def drop(self, key: RowKey) -> None:
        row = self.get(*key) if key in self.unread else self.loaded.get(key)
        if self.inserts.pop(key, None) is None and row is not None:
            self.updates.pop(key, None)
            self.deletes[key] = None
        self.loaded[key] = None

    def erase(self, bodies: EraseBodies) -> None:
        self.erasures.append(bodies)


def find_latest_time(loaded: dict[RowKey, Any], now: int) -> int:
    """Find the time of new events: `now` or the latest loaded time, so that a clock set back reorders nothing."""
    return max([now, *(TIMES[type(row)](row) for row in loaded.values() if type(row) in TIMES)])


TIMES: Final[dict[type[Row], Callable[[Any], int]]] = {StreamRow: attrgetter("at"), BudgetRow: attrgetter("cap_at")}
"""How to read the time of the last write from a row."""


WriteAnswer = Committed | LeaseLost


class Applier(Protocol):
    """Applies a write and its chain of `first` writes to a working set. Drills inject a broken one."""

    def __call__(self, write: Write, rows: WorkingSet, salts: Iterator[bytes]) -> WriteAnswer: ...


def list_needs(writes: Sequence[Write]) -> tuple[list[str], list[RowKey]]:
    """List the keys of the writes and of their `first` writes, and the rows that they declare, possibly repeated."""
    keys: list[str] = []
    rows: list[RowKey] = []
    for write in writes:
        current: Write | None = write
        while current is not None:
            keys.append(current.key)
            rows += current.reads
            for stream in current.others:
                rows += rows_of_stream(stream)
            stream, current = current.stream, current.first
            if current is None or current.stream != stream:
                rows += rows_of_stream(stream)
    return keys, rows


_KINDS: Final = {event: (event.KIND, event.VERSION, project) for event, project in PROJECTIONS.items()}


def apply_write(write: Write, rows: WorkingSet, salts: Iterator[bytes], *, fenced: bool = True) -> WriteAnswer:
    """Apply a write after its `first`. If that is refused, so is this one. A repeated write returns its earlier events.

    A lost lease is returned, not raised, so that only this write of a transaction fails.
    """
    first = None
    if write.first is not None:
        first = apply_write(write.first, rows, salts, fenced=fenced)
        if isinstance(first, LeaseLost):
            return first
    key, lease, home, at, loaded, events = write.key, write.lease, write.stream, rows.now, rows.loaded, rows.events
    home_keys = rows_of_stream(home)
    earlier, start = rows.earlier_by_key.get(key), len(events)
    try:
        if earlier is not None and (repeated_events := _find_repeated(write, earlier, rows)):
            return Committed(repeated_events, is_repeated=True, first=first)
        if lease is None:
            leased_stream, generation, drafts = None, 0, write.decide(rows)
            for draft in drafts:
                _reject_newer_session(draft.stream or home, rows)
        else:
            leased_stream, generation = lease.stream, lease.generation
            row = loaded.get((home_keys if leased_stream == home else rows_of_stream(leased_stream))[1])
            if (row is None or row.generation != generation or row.owner != lease.worker) and fenced:
                fence(lease, rows)
            drafts = write.decide(rows)
    except LeaseLost as lost:
        return lost
    for draft in drafts:
        event, facts = encode(draft.event)
        stream, body, blob = draft.stream or home, draft.body, draft.blob
        head_key = (home_keys if stream is home else rows_of_stream(stream))[0]
        head = loaded.get(head_key)
        if head is None:
            rows.get(StreamRow, stream)
            seq, previous, changed_rows = 1, CHAIN_START, rows.inserts
        else:
            seq, previous, changed_rows = head.head + 1, head.hash, rows.updates
            if rows.inserts and head_key in rows.inserts:
                changed_rows = rows.inserts
        if blob is not None:
            rows.blobs.append(blob)
        if body is None:
            salt, digest = None, NO_BODY
        else:
            salt = next(salts)
            digest = sha256(salt + body).digest()
        # A session's generation does not apply to other streams, such as a sub-session or an inbox with many writers.
        kind, version, project = _KINDS.get(type(event)) or (event.KIND, event.VERSION, project_event)
        event_generation = generation if stream == leased_stream else 0
        chained_hash = hash_event(
            previous, (stream, seq, kind, version, at, event_generation, key, blob), facts, digest
        )
        stored_event = Stored(
            stream, seq, kind, version, at, event_generation, key, blob, facts, body, salt, digest, chained_hash, event
        )
        events.append(stored_event)
        loaded[head_key] = changed_rows[head_key] = StreamRow(stream, seq, chained_hash, at)
        project(event, stored_event, rows)
    new_events = tuple(events[start:])
    if new_events:
        if (taken_lease := write.new_lease) is not None and (
            row := rows.get(SessionRow, taken_lease.session)
        ) is not None:
            rows.save(msgspec.structs.replace(row, owner=taken_lease.worker, generation=taken_lease.generation))
        rows.earlier_by_key[key] = new_events if earlier is None else (*earlier, *new_events)
    return Committed(new_events, False, first)  # noqa: FBT003


def _find_repeated(write: Write, earlier: Sequence[Stored], rows: WorkingSet) -> tuple[Stored, ...]:
    """Return the events of an earlier commit of this write. In another stream, the same key is another write."""
    repeated_events = tuple([each for each in earlier if each.stream in {write.stream, *write.others}])
    if repeated_events and write.lease is not None and write.lease.generation != repeated_events[0].generation:
        # An owner that lost its lease must not take its successor's write for its own.
        fence(write.lease, rows)
    return repeated_events


def fence(lease: Lease, rows: WorkingSet) -> None:
    row = rows.get(SessionRow, lease.session)
    if row is None or row.owner != lease.worker or row.generation != lease.generation:
        owner = f"{row.owner or 'no worker'} (generation {row.generation})" if row else "no worker: it does not exist"
        message = (
            f"{lease.worker} (generation {lease.generation}) has lost the lease of session {lease.session}, "
            f"which belongs to {owner}. Nothing was written."
        )
        raise LeaseLost(message)


def _reject_newer_session(stream: StreamId, rows: WorkingSet) -> None:
    """Reject a write to a session that a newer version of Halter has claimed. Its inbox stays open."""
    session = parse_session_id(stream)
    row = None if session is None or is_inbox(stream) else rows.get(SessionRow, session)
    if row is not None and (reason := explain_newer_format(row)):
        raise LeaseLost(f"{reason} Nothing was written.")

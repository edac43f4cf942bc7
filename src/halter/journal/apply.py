"""What a write does, the same for every store: fence, decide, append, project.

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
from halter.core.ids import Digest, StreamId, is_inbox, session_of
from halter.core.money import BudgetRow
from halter.core.ports import Committed, Lease, Stored, Write
from halter.core.project import PROJECTIONS, EraseBodies, project_event
from halter.core.rows import SessionRow, StreamRow, explain_newer_format, rows_of_stream
from halter.core.vocabulary import R, Row, RowKey

FORMAT_TAG: Final = b"halter.event.1\n"
CHAIN_START: Final = bytes(32)

SALT_BYTES: Final = 16

_ENCODE: Final = msgspec.json.Encoder().encode
_JOIN: Final = b"".join


def digest_body(salt: bytes, body: bytes) -> bytes:
    """Digest a body so that it cannot be guessed once its salt is gone."""
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
    """What a transaction writes: rows that are new, changed or gone, events, the blobs they name, bodies to erase."""

    inserts: dict[RowKey, Row] = {}
    updates: dict[RowKey, Row] = {}
    deletes: dict[RowKey, None] = {}
    events: list[Stored] = []
    blobs: list[Digest] = []
    erasures: list[EraseBodies] = []


class WorkingSet(Changes, kw_only=True):
    """The locked rows of one transaction, as its writes change them one after the other.

    What is loaded becomes its own. What is new, changed or gone is known as it happens: nothing is compared at the end.
    `now` is the time of all its events, and `earlier` are the events of each of its writes that is done already. A row
    that is `postponed` is looked up when it is read; one that is put unread must be new, as the store finds out.
    """

    loaded: dict[RowKey, Any]
    now: int
    earlier: dict[str, tuple[Stored, ...]] = {}
    postponed: Container[RowKey] = ()
    look: Callable[[RowKey], Any] | None = None

    def get(self, *key: Any) -> Any:
        try:
            return self.loaded[key]
        except KeyError:
            if self.look is not None and key in self.postponed:
                row = self.loaded[key] = self.look(key)
                return row
            place = f"{key[0].TABLE} {key[1:]}"
            message = f"A write looked at {place}, which it did not declare; add it to `reads` or `others`."
            raise UndeclaredRow(message) from None

    def find(self, keys: Sequence[tuple[type[R], *tuple[Any, ...]]]) -> Sequence[R | None]:
        try:
            return [*map(self.loaded.__getitem__, keys)]
        except KeyError:
            return [self.get(*key) for key in keys]

    def save(self, row: Row) -> None:
        """Change or add a row; one of an append-only table need not be declared."""
        key, rows, inserts = row.key(), self.loaded, self.inserts
        if rows.get(key) is not None:
            (inserts if inserts and key in inserts else self.updates)[key] = row
        elif self.deletes and key in self.deletes:
            del self.deletes[key]
            self.updates[key] = row
        elif key in rows or row.APPEND_ONLY or key in self.postponed:
            inserts[key] = row
        else:
            message = f"An event changes {row.TABLE} {key[1:]}, which its write did not declare; add it to `reads`."
            raise UndeclaredRow(message)
        rows[key] = row

    def drop(self, key: RowKey) -> None:
        row = self.get(*key) if key in self.postponed else self.loaded.get(key)
        if self.inserts.pop(key, None) is None and row is not None:
            self.updates.pop(key, None)
            self.deletes[key] = None
        self.loaded[key] = None

    def erase(self, bodies: EraseBodies) -> None:
        self.erasures.append(bodies)


def find_latest_time(loaded: dict[RowKey, Any], now: int) -> int:
    """The time of a new event is never before its predecessors, so a clock set back reorders nothing."""
    return max([now, *(TIMES[type(row)](row) for row in loaded.values() if type(row) in TIMES)])


TIMES: Final[dict[type[Row], Callable[[Any], int]]] = {StreamRow: attrgetter("at"), BudgetRow: attrgetter("cap_at")}
"""The rows that tell when something was written last."""


WriteAnswer = Committed | LeaseLost


class Applier(Protocol):
    """Does one write and those before it in a working set; drills inject a broken one."""

    def __call__(self, write: Write, rows: WorkingSet, salts: Iterator[bytes]) -> WriteAnswer: ...


def list_needs(writes: Sequence[Write]) -> tuple[list[str], list[RowKey]]:
    """The keys of the writes and of those before them, and every row that they declare; some of these are repeated."""
    keys: list[str] = []
    rows: list[RowKey] = []
    for write in writes:
        each: Write | None = write
        while each is not None:
            keys.append(each.key)
            rows += each.reads
            for stream in each.others:
                rows += rows_of_stream(stream)
            stream, each = each.stream, each.first
            if each is None or each.stream != stream:
                rows += rows_of_stream(stream)
    return keys, rows


_KINDS: Final = {event: (event.KIND, event.VERSION, project) for event, project in PROJECTIONS.items()}


def apply_write(write: Write, rows: WorkingSet, salts: Iterator[bytes], *, fenced: bool = True) -> WriteAnswer:
    """Do one write after its `first`; if that is refused, so is this one. A repeated one answers as the first time."""
    first = None
    if write.first is not None:
        first = apply_write(write.first, rows, salts, fenced=fenced)
        if isinstance(first, LeaseLost):
            return first
    key, lease, home, at, loaded, events = write.key, write.lease, write.stream, rows.now, rows.loaded, rows.events
    places = rows_of_stream(home)
    found, before = rows.earlier.get(key), len(events)
    try:
        if found is not None and (known := _find_repeated(write, found, rows)):
            return Committed(known, repeated=True, first=first)
        if lease is None:
            own, generation, drafts = None, 0, write.decide(rows)
            for draft in drafts:
                _reject_newer_session(draft.stream or home, rows)
        else:
            own, generation = lease.stream, lease.generation
            row = loaded.get((places if own == home else rows_of_stream(own))[1])
            if (row is None or row.generation != generation or row.owner != lease.worker) and fenced:
                fence(lease, rows)
            drafts = write.decide(rows)
    except LeaseLost as lost:
        return lost
    for draft in drafts:
        event, facts = encode(draft.event)
        stream, body, blob = draft.stream or home, draft.body, draft.blob
        place = (places if stream is home else rows_of_stream(stream))[0]
        head = loaded.get(place)
        if head is None:
            rows.get(StreamRow, stream)
            seq, previous, changed = 1, CHAIN_START, rows.inserts
        else:
            seq, previous, changed = head.head + 1, head.hash, rows.updates
            if rows.inserts and place in rows.inserts:
                changed = rows.inserts
        if blob is not None:
            rows.blobs.append(blob)
        if body is None:
            salt, digest = None, NO_BODY
        else:
            salt = next(salts)
            digest = sha256(salt + body).digest()
        # A session's generation says nothing of other streams: of a sub-session's, or of an inbox that others write to.
        kind, version, project = _KINDS.get(type(event)) or (event.KIND, event.VERSION, project_event)
        term = generation if stream == own else 0
        chained = hash_event(previous, (stream, seq, kind, version, at, term, key, blob), facts, digest)
        stored = Stored(stream, seq, kind, version, at, term, key, blob, facts, body, salt, digest, chained, event)
        events.append(stored)
        loaded[place] = changed[place] = StreamRow(stream, seq, chained, at)
        project(event, stored, rows)
    made = tuple(events[before:])
    if made:
        if (taken := write.takes) is not None and (row := rows.get(SessionRow, taken.session)) is not None:
            rows.save(msgspec.structs.replace(row, owner=taken.worker, generation=taken.generation))
        rows.earlier[key] = made if found is None else (*found, *made)
    return Committed(made, False, first)  # noqa: FBT003


def _find_repeated(write: Write, found: Sequence[Stored], rows: WorkingSet) -> tuple[Stored, ...]:
    """The events of a write that was done already. In another stream the same key is another write."""
    known = tuple([each for each in found if each.stream in {write.stream, *write.others}])
    if known and write.lease is not None and write.lease.generation != known[0].generation:
        # An owner that lost its lease must not take its successor's write for its own.
        fence(write.lease, rows)
    return known


def fence(lease: Lease, rows: WorkingSet) -> None:
    row = rows.get(SessionRow, lease.session)
    if row is None or row.owner != lease.worker or row.generation != lease.generation:
        owner = f"{row.owner or 'no worker'} (generation {row.generation})" if row else "no worker: it does not exist"
        message = (
            f"Session {lease.session} is no longer held by {lease.worker} (generation {lease.generation}); "
            f"it belongs to {owner}. Nothing was written."
        )
        raise LeaseLost(message)


def _reject_newer_session(stream: StreamId, rows: WorkingSet) -> None:
    """Refuse to write to a session that a newer program has taken. Its inbox stays open."""
    session = session_of(stream)
    row = None if session is None or is_inbox(stream) else rows.get(SessionRow, session)
    if row is not None and (why := explain_newer_format(row)):
        raise LeaseLost(f"{why} Nothing was written.")

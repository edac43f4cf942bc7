"""All projections folded again from the events: to compare them with the live rows, or to replace those.

Events go through the same `project` as when they were committed. Streams are read in any order within their class: the
rows come out the same.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Literal

import msgspec

from halter.core.codec import decode
from halter.core.errors import StoreUnusable
from halter.core.events import AnyEvent, BodiesErased, Unknown
from halter.core.ids import FLEET, StreamId, is_inbox, session_of, session_stream
from halter.core.ports import Stored
from halter.core.project import EraseBodies, project_event
from halter.core.rows import NO_OWNER, SessionRow
from halter.core.vocabulary import R, Row, RowKey
from halter.journal.engine import PROJECTIONS, StoreView
from halter.journal.store import JournalStore

FindingKind = Literal[
    "damaged",
    "edited",
    "deleted",
    "inserted",
    "duplicated",
    "reordered",
    "moved",
    "unreadable",
    "head",
    "body_missing",
    "not_erased",
    "blob_missing",
    "blob_altered",
    "row",
    "rewritten",
    "cut",
    "dropped",
    "checkpoint_altered",
    "checkpoint_key",
    "checkpoint_missing",
]


_DAMAGED: Final = (
    "Keep a copy, and restore it from a backup; where only an index is named, `sqlite3 FILE REINDEX` makes it anew."
)
_WRITER: Final = "Compare the store with a backup, and find out who can write to it besides Halter."
_BACKUP: Final = "Restore it from a backup."
_COPIED: Final = (
    f"{_WRITER} If the store is a copy of another, or another is a copy of it, both have the same id, and what one "
    "signs contradicts the other: give each its own folder of checkpoints with HALTER_CHECKPOINTS."
)
_CHECKPOINT: Final = "Compare the checkpoints with a copy, and find out who can write to their folder."

FINDING_ADVICE: Final[Mapping[FindingKind, str]] = {
    "damaged": _DAMAGED,
    "edited": _WRITER,
    "deleted": _WRITER,
    "inserted": _WRITER,
    "duplicated": _WRITER,
    "reordered": _WRITER,
    "moved": _WRITER,
    "unreadable": "Use the newer Halter that wrote it; if this is the newest, the event was damaged.",
    "head": _WRITER,
    "body_missing": f"{_BACKUP} What must go is erased with `halter erase`.",
    "not_erased": "Erase the session again with `halter erase`.",
    "blob_missing": _BACKUP,
    "blob_altered": _BACKUP,
    "row": "Find out who can write to the store besides Halter, and rebuild the rows from the events.",
    "rewritten": _COPIED,
    "cut": _COPIED,
    "dropped": _COPIED,
    "checkpoint_altered": _CHECKPOINT,
    "checkpoint_key": _CHECKPOINT,
    "checkpoint_missing": "Check the folder; if it is the right one, they were removed, or the store's id was changed.",
}
"""What to do about each kind of finding."""


class IntegrityFinding(msgspec.Struct, frozen=True):
    """One deviation; for a checkpoint, `seq` is its number and no stream is named."""

    kind: FindingKind
    stream: str
    seq: int
    sentence: str


def make_finding(kind: FindingKind, stream: str, seq: int, what: str) -> IntegrityFinding:
    return IntegrityFinding(kind, stream, seq, f"{what} {FINDING_ADVICE[kind]}")


class IntegrityReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, and how much was examined.

    `uncovered` counts, by stream, the events that no checkpoint vouches for yet: a tail that could be cut off unseen.
    `erased` counts the events whose bodies were erased on purpose. `compared`: the rows were compared with what the
    events make of them; if not, a note says why.
    """

    ok: bool
    findings: tuple[IntegrityFinding, ...]
    streams: int
    events: int
    erased: int
    uncovered: dict[str, int]
    checkpoints: int | None = None
    torn: bool = False
    compared: bool = True
    notes: tuple[str, ...] = ()

    @property
    def uncovered_events(self) -> int:
        return sum(self.uncovered.values())


REBUILD_PAGE: Final = 500
"""Events per page: enough to be quick, few enough for bodies of 32 KiB each."""


async def compute_projections(store: JournalStore) -> dict[RowKey, Row]:
    """Make all projections from the events alone. Raises StoreUnusable for an unreadable event."""
    return await store.study(rows_from_events)


async def rebuild(store: JournalStore) -> None:
    """Replace the live projections by what the events make of them, in one transaction."""
    await store.replace(lambda view: rows_from_events(view).values())


def rows_from_events(view: StoreView) -> dict[RowKey, Row]:
    """Fold every stream, keeping the live leases."""
    fold = RowFold()
    for stream in sort_streams(list_streams(view)):
        for event in read_raw_events(view, stream):
            fold.apply(event)
    return fold.rows_beside(read_live_rows(view))


def list_streams(view: StoreView) -> list[StreamId]:
    return [StreamId(row["stream"]) for row in view.ask("streams", {})]


def sort_streams(streams: Iterable[StreamId]) -> list[StreamId]:
    """Sessions first, then inboxes, triggers, and the fleet last; stable within a class."""
    return sorted(streams, key=_stream_class)


def _stream_class(stream: StreamId) -> int:
    if session_of(stream) is None:
        return 3 if stream == FLEET else 2
    return 1 if is_inbox(stream) else 0


def read_raw_events(view: StoreView, stream: StreamId) -> Iterator[Stored]:
    """Read a stream in pages, without trusting its sequence numbers."""
    seq, position = -(2**63), 0
    while True:
        params = {"stream": stream, "seq": seq, "position": position, "limit": REBUILD_PAGE}
        rows = view.rows("events_of", params)
        for row in rows:
            yield read_damaged_event(row)
        if len(rows) < REBUILD_PAGE:
            return
        seq, position = rows[-1][1], rows[-1][-1]


def read_damaged_event(row: Sequence[Any]) -> Stored:
    """Read an event from possibly damaged columns; invalid values become empty ones of the type."""
    if tuple(map(type, row)) not in _SOUND_TYPES:
        row = [value if type(value) in kinds else kinds[0]() for value, kinds in zip(row, _TYPES, strict=True)]
    stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, link, _ = row
    event = decode_damaged_facts(kind, version, facts)
    return Stored(stream, seq, kind, version, at, generation, key, blob, facts, body, salt, digest, link, event)


_NONE: Final = type(None)
_HEADER: Final = ((str,), (int,), (str,), (int,), (int,), (int,), (str,), (str, _NONE))
_CONTENT: Final = ((bytes,), (bytes, _NONE), (bytes, _NONE), (bytes,), (bytes,))
_TYPES: Final[tuple[tuple[type, ...], ...]] = (*_HEADER, *_CONTENT, (int,))
_SOUND_TYPES: Final = frozenset(itertools.product(*_TYPES))
"""Sound types of an event's columns in query order; all combinations, for a quick check."""


def to_sequence_number(value: object) -> int:
    """Read a possibly damaged number; an invalid one sorts before all others."""
    return value if isinstance(value, int) else -1


def decode_damaged_facts(kind: str, version: int, facts: bytes) -> AnyEvent | Unknown:
    if version < 1:
        return Unknown(kind, version, facts)
    try:
        return decode(kind, version, facts)
    except RecursionError:
        return Unknown(kind, version, facts)


def read_erasures(view: StoreView) -> dict[str, int]:
    """How far each stream's bodies were erased on purpose."""
    through: dict[str, int] = {}
    for row in view.ask("erasures", {}):
        event = decode_damaged_facts(BodiesErased.KIND, row["version"], row["facts"])
        if isinstance(event, BodiesErased):
            through[event.stream] = max(event.through, through.get(event.stream, 0))
    return through


def read_live_rows(view: StoreView) -> dict[RowKey, Row]:
    rows: dict[RowKey, Row] = {}
    for table in PROJECTIONS:
        columns = itemgetter(*(field.name for field in msgspec.structs.fields(table)))
        for found in view.ask(f"all_{table.TABLE}", {}):
            row = table(*columns(found))
            rows[row.key()] = row
    return rows


class RowFold:
    """The rows as events make them; `unreadable` is the first event that could not be folded."""

    def __init__(self) -> None:
        self._rows: dict[RowKey, Any] = {}
        self._generations: dict[str, int] = {}
        self.unreadable: IntegrityFinding | None = None

    def get(self, kind: type[R], *key: Any) -> R | None:
        return self._rows.get((kind, *key))

    def save(self, row: Row) -> None:
        self._rows[row.key()] = row

    def drop(self, key: RowKey) -> None:
        self._rows.pop(key, None)

    def erase(self, bodies: EraseBodies) -> None:
        """Bodies are no rows."""

    def apply(self, stored: Stored) -> None:
        if isinstance(stored.event, Unknown):
            self._mark_damaged(stored)
            return
        if stored.generation > self._generations.get(stored.stream, 0):
            self._generations[stored.stream] = stored.generation
        project_event(stored.event, stored, self)

    def _mark_damaged(self, stored: Stored) -> None:
        what = (
            f"Event {stored.seq} of {stored.stream} ({stored.kind!r}, version {stored.version}) means nothing to "
            "this program, so rows cannot be made from the events."
        )
        self.unreadable = self.unreadable or make_finding("unreadable", stored.stream, stored.seq, what)

    def rows_beside(self, live: Mapping[RowKey, Row]) -> dict[RowKey, Row]:
        if self.unreadable is not None:
            raise StoreUnusable(self.unreadable.sentence)
        rows = dict(self._rows)
        for key, row in self._rows.items():
            if isinstance(row, SessionRow):
                rows[key] = _merge_lease(row, live.get(key), self._generations.get(session_stream(row.session), 0))
        return rows


def _merge_lease(row: SessionRow, live: Row | None, written_by: int) -> SessionRow:
    """Take the lease from the live row, unless a later generation than it knows has already written.

    Such a row was set back by hand: an owner that had lost the session could write again.
    """
    owner, generation = NO_OWNER, written_by
    if isinstance(live, SessionRow) and to_sequence_number(live.generation) >= written_by:
        owner, generation = live.owner, live.generation
    return msgspec.structs.replace(row, owner=owner, generation=generation)


class RowDifference(msgspec.Struct, frozen=True):
    key: RowKey
    live: Row | None
    rebuilt: Row | None

    @property
    def sentence(self) -> str:
        name = f"The row {', '.join(map(str, self.key[1:]))} of {self.key[0].TABLE}"
        if self.live is None:
            return f"{name} is missing, and the events make one."
        if self.rebuilt is None:
            return f"{name} stands there, and no event makes it."
        live, rebuilt = msgspec.structs.asdict(self.live), msgspec.structs.asdict(self.rebuilt)
        columns = [f"{column} is {live[column]!r}, not {value!r}" for column, value in rebuilt.items()]
        differing = [text for text, column in zip(columns, rebuilt, strict=True) if live[column] != rebuilt[column]]
        return f"{name} is not what the events make of it: {'; '.join(differing)}."


def compare_rows(live: Mapping[RowKey, Row], rebuilt: Mapping[RowKey, Row]) -> list[RowDifference]:
    return [
        RowDifference(key, live.get(key), rebuilt.get(key))
        for key in {**live, **rebuilt}
        if live.get(key) != rebuilt.get(key)
    ]

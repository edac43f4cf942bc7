"""Projections folded again from the events, to compare them with the live rows or to replace those.

Events pass through the same `project` as when they were committed. Within a class, the order of streams does not
matter.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Literal

import msgspec

from halter.core.codec import decode
from halter.core.errors import StoreUnusable
from halter.core.events import AnyEvent, BodiesErased, Unknown
from halter.core.ids import FLEET, StreamId, is_inbox, parse_session_id, session_stream
from halter.core.ports import Stored
from halter.core.project import project_event
from halter.core.project.projection import EraseBodies
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
    "Keep a copy, and restore the store from a backup. If only an index is named, `sqlite3 FILE REINDEX` rebuilds it."
)
_WRITER: Final = "Compare the store with a backup, and find out what else can write to it."
_BACKUP: Final = "Restore it from a backup."
_COPIED: Final = (
    f"{_WRITER} If the store is a copy of another one, both have the same id and their checkpoints contradict each "
    "other: give each a separate folder of checkpoints with HALTER_CHECKPOINTS."
)
_CHECKPOINT: Final = "Compare the checkpoints with a copy, and find out what else can write to their folder."

FINDING_ADVICE: Final[Mapping[FindingKind, str]] = {
    "damaged": _DAMAGED,
    "edited": _WRITER,
    "deleted": _WRITER,
    "inserted": _WRITER,
    "duplicated": _WRITER,
    "reordered": _WRITER,
    "moved": _WRITER,
    "unreadable": "Use the newer Halter that wrote it. If this is the newest one, the event was damaged.",
    "head": _WRITER,
    "body_missing": f"{_BACKUP} To remove bodies, use `halter erase`.",
    "not_erased": "Erase the session again with `halter erase`.",
    "blob_missing": _BACKUP,
    "blob_altered": _BACKUP,
    "row": "Find out what else can write to the store, and rebuild the rows from the events.",
    "rewritten": _COPIED,
    "cut": _COPIED,
    "dropped": _COPIED,
    "checkpoint_altered": _CHECKPOINT,
    "checkpoint_key": _CHECKPOINT,
    "checkpoint_missing": "Check the folder. If it is correct, they were removed, or the store's id was changed.",
}
"""The advice for each kind of finding."""


class IntegrityFinding(msgspec.Struct, frozen=True):
    """One deviation. For a checkpoint, `seq` is its number and `stream` is empty."""

    kind: FindingKind
    stream: str
    seq: int
    sentence: str


def make_finding(kind: FindingKind, stream: str, seq: int, description: str) -> IntegrityFinding:
    return IntegrityFinding(kind, stream, seq, f"{description} {FINDING_ADVICE[kind]}")


class IntegrityReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, and how much was verified.

    `uncovered` counts, by stream, the events that no checkpoint covers yet: a tail that could be truncated undetected.
    `erased` counts the events whose bodies were erased on purpose. `compared` is False if the rows could not be
    compared with the events; a note then says why.
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
"""Events per page: enough to be fast, few enough to hold bodies of 32 KiB each."""


async def compute_projections(store: JournalStore) -> dict[RowKey, Row]:
    """Compute all projections from the events alone. Raises StoreUnusable for an unreadable event."""
    return await store.study(rows_from_events)


async def rebuild_tables(store: JournalStore) -> None:
    """Replace the live projections with those computed from the events, in one transaction."""
    await store.replace(lambda view: rows_from_events(view).values())


def rows_from_events(view: StoreView) -> dict[RowKey, Row]:
    """Build the rows by folding every stream, with the live leases."""
    fold = RowFold()
    for stream in sort_streams(list_streams(view)):
        for event in read_raw_events(view, stream):
            fold.apply(event)
    return fold.merge_live_leases(read_live_rows(view))


def list_streams(view: StoreView) -> list[StreamId]:
    return [StreamId(row["stream"]) for row in view.ask("streams", {})]


def sort_streams(streams: Iterable[StreamId]) -> list[StreamId]:
    """Sort streams: sessions, inboxes, triggers, and the fleet last. The sort is stable."""
    return sorted(streams, key=_stream_class)


def _stream_class(stream: StreamId) -> int:
    if parse_session_id(stream) is None:
        return 3 if stream == FLEET else 2
    return 1 if is_inbox(stream) else 0


def read_raw_events(view: StoreView, stream: StreamId) -> Iterator[Stored]:
    """Read a stream in pages. Does not rely on its sequence numbers, which may be damaged."""
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
    """Read an event from possibly damaged columns. Values of a wrong type become empty ones of the right type."""
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
"""Valid types of an event's columns in query order: all combinations, for a quick check."""


def to_sequence_number(value: object) -> int:
    """Read a possibly damaged number. An invalid one becomes -1, which sorts before all others."""
    return value if isinstance(value, int) else -1


def decode_damaged_facts(kind: str, version: int, facts: bytes) -> AnyEvent | Unknown:
    if version < 1:
        return Unknown(kind, version, facts)
    try:
        return decode(kind, version, facts)
    except RecursionError:
        return Unknown(kind, version, facts)


def read_erasures(view: StoreView) -> dict[str, int]:
    """Read up to which event the bodies of each stream were erased on purpose."""
    erased_through: dict[str, int] = {}
    for row in view.ask("erasures", {}):
        event = decode_damaged_facts(BodiesErased.KIND, row["version"], row["facts"])
        if isinstance(event, BodiesErased):
            erased_through[event.stream] = max(event.through, erased_through.get(event.stream, 0))
    return erased_through


def read_live_rows(view: StoreView) -> dict[RowKey, Row]:
    rows: dict[RowKey, Row] = {}
    for table in PROJECTIONS:
        columns = itemgetter(*(field.name for field in msgspec.structs.fields(table)))
        for values in view.ask(f"all_{table.TABLE}", {}):
            row = table(*columns(values))
            rows[row.key()] = row
    return rows


class RowFold:
    """Rows folded from events. `unreadable` is the finding about the first event that could not be folded."""

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

    def apply(self, stored_event: Stored) -> None:
        if isinstance(stored_event.event, Unknown):
            self._mark_damaged(stored_event)
            return
        if stored_event.generation > self._generations.get(stored_event.stream, 0):
            self._generations[stored_event.stream] = stored_event.generation
        project_event(stored_event.event, stored_event, self)

    def _mark_damaged(self, stored_event: Stored) -> None:
        description = (
            f"Event {stored_event.seq} of {stored_event.stream} ({stored_event.kind!r}, version "
            f"{stored_event.version}) is unknown to this version of Halter, so rows cannot be computed from the events."
        )
        self.unreadable = self.unreadable or make_finding(
            "unreadable", stored_event.stream, stored_event.seq, description
        )

    def merge_live_leases(self, live_rows: Mapping[RowKey, Row]) -> dict[RowKey, Row]:
        if self.unreadable is not None:
            raise StoreUnusable(self.unreadable.sentence)
        rows = dict(self._rows)
        for key, row in self._rows.items():
            if isinstance(row, SessionRow):
                rows[key] = _merge_lease(row, live_rows.get(key), self._generations.get(session_stream(row.session), 0))
        return rows


def _merge_lease(row: SessionRow, live_row: Row | None, written_generation: int) -> SessionRow:
    """Take the lease from the live row, unless a later generation has already written to the session.

    Such a row was set back by hand: an owner that had lost the lease could write again.
    """
    owner, generation = NO_OWNER, written_generation
    if isinstance(live_row, SessionRow) and to_sequence_number(live_row.generation) >= written_generation:
        owner, generation = live_row.owner, live_row.generation
    return msgspec.structs.replace(row, owner=owner, generation=generation)


class RowDifference(msgspec.Struct, frozen=True):
    key: RowKey
    live: Row | None
    rebuilt: Row | None

    @property
    def sentence(self) -> str:
        name = f"The row {', '.join(map(str, self.key[1:]))} of {self.key[0].TABLE}"
        if self.live is None:
            return f"{name} is missing, but the events define it."
        if self.rebuilt is None:
            return f"{name} exists, but no event defines it."
        live, rebuilt = msgspec.structs.asdict(self.live), msgspec.structs.asdict(self.rebuilt)
        columns = [f"{column} is {live[column]!r}, not {value!r}" for column, value in rebuilt.items()]
        differences = [text for text, column in zip(columns, rebuilt, strict=True) if live[column] != rebuilt[column]]
        return f"{name} differs from the events: {'; '.join(differences)}."


def compare_rows(live: Mapping[RowKey, Row], rebuilt: Mapping[RowKey, Row]) -> list[RowDifference]:
    return [
        RowDifference(key, live.get(key), rebuilt.get(key))
        for key in {**live, **rebuilt}
        if live.get(key) != rebuilt.get(key)
    ]

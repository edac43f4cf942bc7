"""What an edit, a move, a copy or a deletion of events left behind in a stream."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from halter.core.ports import Stored
from halter.core.text import format_count
from halter.journal.apply import CHAIN_START, digest_body, hash_event
from halter.journal.rebuild import FindingKind, IntegrityFinding, make_finding

MAX_SEARCH_POSITIONS: Final = 48
MAX_SEARCH_HASHES: Final = 96
MAX_SEARCH_TRIES: Final = 300_000
MAX_SEARCH_LOOKUPS: Final = 50
"""Bounds of the search, which must end soon, however much was changed."""

USUAL_SHIFTS: Final = tuple(shift for size in range(1, 9) for shift in (size, -size))
"""Shifts of sequence numbers to try first: those that result when a few events are removed or added."""

StreamPosition = tuple[str, int]

FindCopies = Callable[[bytes], Sequence[StreamPosition]]
"""Finds some positions of events with a hash."""


class ChainBreak(msgspec.Struct, frozen=True):
    """An event whose hash does not match the event before it, which has the hash `previous`.

    `vouched_seq` is the sequence number that a checkpoint has for this hash in its stream, or 0.
    """

    event: Stored
    previous: bytes
    after_gap: bool = False
    vouched_seq: int = 0

    @property
    def position(self) -> StreamPosition:
        return (self.event.stream, self.event.seq)


class StreamGap(msgspec.Struct, frozen=True):
    """A range of missing sequence numbers in a stream."""

    stream: str
    first: int
    last: int


class TamperedEvent(msgspec.Struct):
    """How an event was changed, and how many of the following events were changed alike."""

    kind: FindingKind
    position: StreamPosition
    origin: StreamPosition | None = None
    more: int = 0


def is_successor(event: Stored, previous: bytes, position: StreamPosition) -> bool:
    """Return True if an event was written for a position, after the event with the hash `previous`."""
    header = (*position, event.kind, event.version, event.at, event.generation, event.key, event.blob)
    return hash_event(previous, header, event.facts, event.digest) == event.hash


def find_body_flaw(event: Stored, *, erased: bool) -> tuple[FindingKind, str] | None:
    """Find the flaw of a body: changed, missing without an erasure, or present despite one."""
    if event.body is None:
        is_missing = event.digest != b"" and not erased
        return ("body_missing", "is missing, but was not erased.") if is_missing else None
    if event.salt is None or digest_body(event.salt, event.body) != event.digest:
        return "edited", "does not match its digest: it was changed."
    return ("not_erased", "was erased, but is present again.") if erased else None


def diagnose(
    breaks: Sequence[ChainBreak], gaps: Sequence[StreamGap], find_copies: FindCopies
) -> Iterator[IntegrityFinding]:
    """Diagnose breaks and gaps, with one finding for each run of events."""
    search = _Search(breaks, gaps, find_copies)
    tampered_events = search.names()
    origins = {tampered_event.origin for tampered_event in tampered_events}
    for gap in gaps:
        if not (gap.first == gap.last and (gap.stream, gap.first) in origins):
            yield make_gap_finding(gap)
    for tampered_event in tampered_events:
        yield make_finding(tampered_event.kind, *tampered_event.position, _describe_tampering(tampered_event))


def make_gap_finding(gap: StreamGap) -> IntegrityFinding:
    plural_text = f"Events {gap.first} to {gap.last} of {gap.stream} are missing: they were deleted."
    singular_text = f"Event {gap.first} of {gap.stream} is missing: it was deleted."
    return make_finding("deleted", gap.stream, gap.first, singular_text if gap.first == gap.last else plural_text)


class _Search:
    def __init__(self, breaks: Sequence[ChainBreak], gaps: Sequence[StreamGap], find_copies: FindCopies) -> None:
        self._breaks = breaks
        self._gaps = gaps
        self._copies = find_copies
        gap_edges = [position for gap in gaps for position in ((gap.stream, gap.first), (gap.stream, gap.last))]
        positions = [chain_break.position for chain_break in breaks]
        hashes = [
            CHAIN_START,
            *(digest for chain_break in breaks for digest in (chain_break.previous, chain_break.event.hash)),
        ]
        self._positions = list(
            dict.fromkeys((*_find_run_starts(breaks)[: MAX_SEARCH_POSITIONS // 2], *gap_edges, *positions))
        )[:MAX_SEARCH_POSITIONS]
        self._hashes = list(dict.fromkeys(hashes))[:MAX_SEARCH_HASHES]
        self._tries = MAX_SEARCH_TRIES
        self._lookups = MAX_SEARCH_LOOKUPS

    def names(self) -> list[TamperedEvent]:
        """Find the cause of each break, unless it continues the run before it or follows from another break."""
        tampered_events: list[TamperedEvent] = []
        run: tuple[StreamPosition, StreamPosition] | None = None
        for chain_break in self._breaks:
            next_origin = _continue_run(run, chain_break)
            if next_origin is not None:
                run = (chain_break.position, next_origin)
                tampered_events[-1].more += 1
                continue
            tampered_event = self._name(chain_break, tampered_events[-1] if tampered_events else None)
            run = None
            if tampered_event is not None:
                run = (chain_break.position, tampered_event.origin) if tampered_event.origin else None
                if not (tampered_events and tampered_event is tampered_events[-1]):
                    tampered_events.append(tampered_event)
        for tampered_event in tampered_events:
            self._search_before(tampered_event, tampered_events)
        return tampered_events

    def _search_before(self, tampered_event: TamperedEvent, tampered_events: Sequence[TamperedEvent]) -> None:
        """Correct a reordered event that neither replaced another one nor left a gap: it was only renumbered."""
        if tampered_event.kind != "reordered" or tampered_event.origin is None:
            return
        stream, origin_seq = tampered_event.origin
        is_origin_empty = any(gap.stream == stream and gap.first <= origin_seq <= gap.last for gap in self._gaps)
        if not is_origin_empty and all(
            tampered_event.position != each.origin and tampered_event.origin != each.position
            for each in tampered_events
        ):
            tampered_event.kind = "deleted" if origin_seq > tampered_event.position[1] else "inserted"
            # The same origin as when the event after it reveals the shift.
            tampered_event.origin = (stream, origin_seq + 1)

    def _name(self, chain_break: ChainBreak, previous_tampered: TamperedEvent | None) -> TamperedEvent | None:
        origin = self._origin(chain_break)
        if origin == chain_break.position:
            return None
        original = self._find_original(chain_break)
        if original is not None:
            return TamperedEvent("duplicated", chain_break.position, original)
        if origin is None:
            return None if chain_break.after_gap else TamperedEvent("edited", chain_break.position)
        if origin[0] != chain_break.position[0]:
            return TamperedEvent("moved", chain_break.position, origin)
        if (
            previous_tampered is not None
            and previous_tampered.kind == "edited"
            and previous_tampered.position == (origin[0], chain_break.position[1] - 1)
        ):
            previous_tampered.kind = "deleted" if origin[1] > chain_break.position[1] else "inserted"
            previous_tampered.origin = origin
            return previous_tampered
        return TamperedEvent("reordered", chain_break.position, origin)

    def _origin(self, chain_break: ChainBreak) -> StreamPosition | None:
        """Find the position that the event was written for."""
        stream, seq = chain_break.position
        if chain_break.vouched_seq not in {0, seq}:
            return (stream, chain_break.vouched_seq)
        nearby_candidates = [((stream, seq + shift), chain_break.previous) for shift in USUAL_SHIFTS]
        own_candidates = [(chain_break.position, previous) for previous in self._hashes]
        for position, previous in (
            *own_candidates,
            *nearby_candidates,
            *((at, after) for at in self._positions for after in self._hashes),
        ):
            self._tries -= 1
            if self._tries < 0:
                return None
            if is_successor(chain_break.event, previous, position):
                return position
        return None

    def _find_original(self, chain_break: ChainBreak) -> StreamPosition | None:
        """Find another event with the same hash: one of the two is a copy."""
        self._lookups -= 1
        if self._lookups < 0:
            return None
        others = [position for position in self._copies(chain_break.event.hash) if position != chain_break.position]
        return others[0] if others else None


def _find_run_starts(breaks: Sequence[ChainBreak]) -> list[StreamPosition]:
    """Find where runs of broken events begin: the origin of the first explains the whole run."""
    positions = [chain_break.position for chain_break in breaks]
    return [
        position
        for position, (stream, seq) in zip(positions, [("", 0), *positions], strict=False)
        if position != (stream, seq + 1)
    ]


def _continue_run(run: tuple[StreamPosition, StreamPosition] | None, chain_break: ChainBreak) -> StreamPosition | None:
    """Return the position that the event was written for, if it continues the run."""
    if run is None:
        return None
    (stream, seq), (origin, origin_seq) = run
    follower = (origin, origin_seq + 1)
    is_continued = chain_break.position == (stream, seq + 1) and is_successor(
        chain_break.event, chain_break.previous, follower
    )
    return follower if is_continued else None


def _describe_tampering(tampered_event: TamperedEvent) -> str:
    (stream, seq), origin = tampered_event.position, tampered_event.origin
    subject = f"Event {seq} of {stream}"
    suffix = f", and so were {format_count(tampered_event.more, 'event')} after it" if tampered_event.more else ""
    match tampered_event.kind, origin:
        case "deleted", (_, origin_seq):
            count_text = format_count(origin_seq - seq - 1, "event")
            return f"Deleted: {count_text} before event {seq} of {stream}; the rest was renumbered."
        case "inserted", (_, origin_seq):
            count_text = format_count(seq + 1 - origin_seq, "event")
            return f"Inserted: {count_text} before event {seq} of {stream}; the rest was renumbered."
        case "duplicated", (origin_stream, origin_seq):
            return f"{subject} was copied from event {origin_seq} of {origin_stream}{suffix}."
        case "moved", (origin_stream, origin_seq):
            return f"{subject} was written as event {origin_seq} of {origin_stream} and then moved{suffix}."
        case "reordered", (_, origin_seq):
            return f"{subject} was written as event {origin_seq}, so the order was changed{suffix}."
        case _:
            return (
                f"{subject} does not match the hash of the event before it: one of the two was changed after it was "
                "written."
            )

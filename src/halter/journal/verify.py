"""Verification of a store's hash chains, bodies, blobs, rows and checkpoints, to detect tampering.

A hash mismatch says only that something is wrong. But the hash of an event depends on the position it was written for:
if it matches another position, the event was moved, copied or renumbered; if none, it was edited.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import StoreUnusable
from halter.core.events import SessionStarted
from halter.core.ids import Digest, StreamId
from halter.core.ports import Stored
from halter.core.text import format_count
from halter.journal.apply import CHAIN_START, digest_body, hash_event
from halter.journal.checkpoints import (
    NO_PREVIOUS_LINE,
    Checkpoint,
    checkpoint_file,
    digest_line,
    is_signed,
    parse_checkpoint,
)
from halter.journal.engine import StoreView, read_meta_values, read_store_id
from halter.journal.rebuild import (
    FindingKind,
    IntegrityFinding,
    IntegrityReport,
    RowFold,
    compare_rows,
    list_streams,
    make_finding,
    read_erasures,
    read_live_rows,
    read_raw_events,
    sort_streams,
    to_sequence_number,
)
from halter.journal.store import JournalStore

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


class CheckpointLog:
    """The verified checkpoints of a store.

    `claims` has, for each stream, the hashes of its events when they were checkpointed, in hexadecimal. Only correctly
    signed lines count. `last_number` is the number of the last readable line, and `begins_at` the time of the first.
    `is_absent` is True if there is no readable file.
    """

    def __init__(self) -> None:
        self.claims: dict[str, dict[int, str]] = {}
        self.findings: list[IntegrityFinding] = []
        self.notes: list[str] = []
        self.is_absent = False
        self.count = 0
        self.last_number = 0
        self.torn = False
        self.begins_at: int | None = None

    def find_covered(self, stream: str) -> int:
        """Return the last event of a stream that a checkpoint covers; 0 if there is none."""
        return max(self.claims.get(stream, ()), default=0)


def load_checkpoint_log(view: StoreView, folder: Path, trusted_keys: Collection[str] = ()) -> CheckpointLog:
    """Load the checkpoints of a store that other processes may be writing to.

    Take the snapshot to verify afterwards: checkpoints newer than it would report a truncated tail. Missing checkpoints
    are reported only if the store had events before.
    """
    has_events = bool(view.ask("any_event", {}))
    try:
        store_id = read_store_id(read_meta_values(view.ask("meta", {})), "that is examined")
        log = read_checkpoint_log(folder, store_id, trusted_keys)
    except (OSError, ValueError, StoreUnusable) as error:
        return _make_missing_log(folder, error, begun=has_events)
    if not trusted_keys:
        log.notes.append("The checkpoints were verified only with the keys that they contain.")
    if log.torn:
        log.notes.append("The last checkpoint is incomplete, as after a crash.")
    return log


def _make_missing_log(folder: Path, error: Exception, *, begun: bool) -> CheckpointLog:
    log = CheckpointLog()
    log.is_absent = True
    if begun:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        description = f"Cannot read checkpoints of the store in {folder} ({reason})."
        log.findings.append(make_finding("checkpoint_missing", "", 0, description))
    return log


def read_checkpoint_log(folder: Path, store_id: str, trusted_keys: Collection[str] = ()) -> CheckpointLog:
    """Read and verify all checkpoints of a store. Raises OSError.

    Without trusted keys, each line is verified with the key that it contains.
    """
    log = CheckpointLog()
    previous = NO_PREVIOUS_LINE
    with checkpoint_file(folder, store_id).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                log.torn = True
                break
            log.count += 1
            log.last_number += 1
            _examine_line(line[:-1], previous, store_id, trusted_keys, log)
            previous = digest_line(line[:-1])
    return log


def _examine_line(line: bytes, previous: str, store_id: str, trusted_keys: Collection[str], log: CheckpointLog) -> None:
    checkpoint = parse_checkpoint(line)
    if checkpoint is None:
        description = "is not a valid checkpoint: it was damaged."
        _add_finding(log, store_id, "checkpoint_altered", description)
        return
    if checkpoint.previous != previous or checkpoint.number != log.last_number:
        description = (
            f"does not continue from the line before it and has number {checkpoint.number}: "
            "a line was changed, removed or added."
        )
        _add_finding(log, store_id, "checkpoint_altered", description)
    log.last_number = checkpoint.number
    flaw = _find_checkpoint_flaw(checkpoint, store_id, trusted_keys)
    if flaw is None:
        _record_checkpoint(checkpoint, store_id, log)
    else:
        _add_finding(log, store_id, *flaw)


def _find_checkpoint_flaw(
    checkpoint: Checkpoint, store_id: str, trusted_keys: Collection[str]
) -> tuple[FindingKind, str] | None:
    if not is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key):
        return "checkpoint_altered", "does not match its signature: it was changed after it was signed."
    if trusted_keys and checkpoint.key not in trusted_keys:
        return "checkpoint_key", f"is signed with the key {checkpoint.key}, which is not among the trusted keys."
    if checkpoint.store != store_id:
        return "checkpoint_altered", f"belongs to the store {checkpoint.store}: it was copied here."
    return None


def _record_checkpoint(checkpoint: Checkpoint, store_id: str, log: CheckpointLog) -> None:
    if log.begins_at is None:
        log.begins_at = checkpoint.at
    if checkpoint.accepted is not msgspec.UNSET:
        _forget_accepted(checkpoint.accepted, log)
    for stream, (seq, digest) in checkpoint.heads.items():
        if log.claims.setdefault(stream, {}).setdefault(seq, digest) != digest:
            description = f"has another hash for event {seq} of {stream} than an earlier one: history was rewritten."
            _add_finding(log, store_id, "rewritten", description, stream, seq)


def _forget_accepted(accepted: Mapping[str, int], log: CheckpointLog) -> None:
    """Drop the claims that a person gave up by accepting an older store."""
    event_count = 0
    for stream, accepted_seq in accepted.items():
        claims = log.claims.get(stream, {})
        event_count += max(0, max(claims, default=0) - accepted_seq)
        log.claims[stream] = {seq: digest for seq, digest in claims.items() if seq <= accepted_seq}
        if not log.claims[stream]:
            del log.claims[stream]
    log.notes.append(
        f"Line {log.count} of the checkpoints records that a person accepted the store without "
        f"{format_count(event_count, 'event')} that earlier lines cover."
    )


def _add_finding(
    log: CheckpointLog, store_id: str, kind: FindingKind, description: str, stream: str = "", seq: int | None = None
) -> None:
    number = log.count
    description = f"Line {number} of the checkpoints of store {store_id} {description}"
    log.findings.append(make_finding(kind, stream, number if seq is None else seq, description))


MAX_FINDINGS: Final = 1000
"""Maximum number of findings listed, so that a report fits into memory; more are counted."""

DAMAGE_KINDS: Final[frozenset[FindingKind]] = frozenset(
    ("edited", "deleted", "inserted", "duplicated", "reordered", "moved", "unreadable", "rewritten", "cut", "dropped")
)
"""Findings after which rows cannot be rebuilt from the events and compared."""

CLOCK_TOLERANCE: Final = 5 * SECOND
"""Allowed difference between the clocks of a store and of the signer of its checkpoints."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")


Progress = Callable[[int, int], None]
"""Receives the number of verified streams, and of all."""


def _ignore_progress(_: int, __: int) -> None: ...


async def verify_store(
    store: JournalStore,
    checkpoints_folder: Path | None = None,
    public_keys: Collection[str] = (),
    progress: Progress = _ignore_progress,
) -> IntegrityReport:
    """Verify the current state of the store, and compare it with its checkpoints if their folder is passed.

    Without trusted public keys, a checkpoint is verified only with the key that it contains. The checkpoints are read
    first: everything that they cover was committed before, and is in the snapshot.
    """
    if checkpoints_folder is None:
        return await store.study(lambda view: _examine_view(view, None, progress))
    log = await store.study(lambda view: load_checkpoint_log(view, checkpoints_folder, public_keys))
    return await store.study(lambda view: _examine_view(view, log, progress))


def examine(
    view: StoreView, checkpoints_folder: Path | None = None, public_keys: Collection[str] = ()
) -> IntegrityReport:
    """Verify one view of a store. If it is compared with its checkpoints, there must be no writer."""
    if checkpoints_folder is None:
        return _examine_view(view, None)
    return _examine_view(view, load_checkpoint_log(view, checkpoints_folder, public_keys))


def _examine_view(view: StoreView, log: CheckpointLog | None, progress: Progress = _ignore_progress) -> IntegrityReport:
    examination = _Examination(view, log)
    streams = sort_streams(list_streams(view))
    for number, stream in enumerate(streams):
        progress(number, len(streams))
        examination.walk(stream)
    return examination.report(streams)


class _Examination:
    def __init__(self, view: StoreView, log: CheckpointLog | None) -> None:
        self._view = view
        self._chronicle = log or CheckpointLog()
        self._checked = None if log is None or log.is_absent else log.count
        self._findings: list[IntegrityFinding] = []
        self._unkept = 0
        self._breaks: list[ChainBreak] = []
        self._gaps: list[StreamGap] = []
        self._fold = RowFold()
        self._heads = {row["stream"]: row for row in view.ask("heads", {})}
        self._erased_through = read_erasures(view)
        self._blobs: dict[str, FindingKind | None] = {}
        self._notes = [*self._chronicle.notes]
        self._events = 0
        self._erased = 0
        self._uncovered: dict[str, int] = {}
        for flaw in view.flaws():
            self._add_finding("damaged", "", 0, f"SQLite reports damage: {flaw}.")
        for flaw in self._chronicle.findings:
            self._record_finding(flaw)

    def walk(self, stream: StreamId) -> None:
        claims = self._chronicle.claims.get(stream, {})
        erased_through = self._erased_through.get(stream, 0)
        covered_seq = self._chronicle.find_covered(stream)
        seq_by_digest = {digest: number for number, digest in claims.items()}
        previous, last_seq, at = CHAIN_START, 0, 0
        for event in read_raw_events(self._view, stream):
            self._events += 1
            seq = event.seq
            if seq == covered_seq + 1:
                self._find_uncovered(event)
            if seq <= last_seq:
                description = f"{stream} has a second event {seq} ({event.kind!r})."
                self._add_finding("duplicated" if seq > 0 else "inserted", stream, seq, description)
                continue
            follows_gap = seq != last_seq + 1
            if follows_gap:
                self._gaps.append(StreamGap(stream, last_seq + 1, seq - 1))
            if not is_successor(event, previous, (stream, seq)):
                vouched_seq = seq_by_digest.get(event.hash.hex(), 0)
                self._record_break(
                    ChainBreak(msgspec.structs.replace(event, body=None), previous, follows_gap, vouched_seq)
                )
            self._body(event, erased=seq <= erased_through)
            checkpoint_hash = claims.get(seq)
            if checkpoint_hash is not None and checkpoint_hash != event.hash.hex():
                description = f"The hash of event {seq} of {stream} differs from its checkpoint: "
                self._add_finding("rewritten", stream, seq, f"{description}it or an event before it was rewritten.")
                claims = {}
            self._fold.apply(event)
            previous, last_seq, at = event.hash, seq, event.at
        self._end(stream, last_seq, previous, at)

    def _find_uncovered(self, event: Stored) -> None:
        """Check for events older than the first checkpoint: the first commit of a store is always checkpointed."""
        begins_at = self._chronicle.begins_at
        if begins_at is not None and event.at < begins_at - CLOCK_TOLERANCE:
            description = (
                f"Event {event.seq} of {event.stream} is older than the first checkpoint and covered by none: "
                "earlier checkpoints are missing."
            )
            self._add_finding("checkpoint_missing", event.stream, event.seq, description)

    def _record_break(self, chain_break: ChainBreak) -> None:
        if len(self._breaks) < MAX_FINDINGS:
            self._breaks.append(chain_break)
        else:
            self._unkept += 1

    def _body(self, event: Stored, *, erased: bool) -> None:
        flaw = find_body_flaw(event, erased=erased)
        if flaw is not None:
            description = f"The body of event {event.seq} of {event.stream} {flaw[1]}"
            self._add_finding(flaw[0], event.stream, event.seq, description)
        elif event.erased:
            self._erased += 1
        if event.blob is not None:
            self._blob(event, event.blob, erased=erased)
        if isinstance(event.event, SessionStarted) and _DIGEST.fullmatch(event.event.definition):
            self._blob(event, event.event.definition, erased=False)

    def _blob(self, event: Stored, digest: str, *, erased: bool) -> None:
        if digest not in self._blobs:
            self._blobs[digest] = _find_blob_flaw(self._view, digest)
        flaw = self._blobs[digest]
        if flaw == "blob_missing" and erased:
            self._erased += 1
        elif flaw is not None:
            state = "is missing" if flaw == "blob_missing" else "was changed: it does not match its digest"
            description = f"Blob {digest} of event {event.seq} of {event.stream} {state}."
            self._add_finding(flaw, event.stream, event.seq, description)

    def _end(self, stream: StreamId, last_seq: int, digest: bytes, at: int) -> None:
        covered_seq = self._chronicle.find_covered(stream)
        if last_seq > covered_seq:
            self._uncovered[stream] = last_seq - covered_seq
        elif last_seq < covered_seq:
            description = f"{stream} had {covered_seq} events when it was checkpointed, but ends with event {last_seq}."
            self._add_finding("cut" if last_seq else "dropped", stream, last_seq + 1, description)
        head = self._heads.get(stream)
        if head is None:
            self._add_finding("head", stream, last_seq, f"{stream} has {last_seq} events, but no head.")
        elif to_sequence_number(head["head"]) > last_seq:
            self._gaps.append(StreamGap(stream, last_seq + 1, head["head"]))
        elif (head["head"], head["hash"], head["at"]) != (last_seq, digest, at):
            description = (
                f"The head of {stream} is event {head['head']}, which does not match its last event, {last_seq}."
            )
            self._add_finding("head", stream, last_seq, description)

    def report(self, streams: Collection[StreamId]) -> IntegrityReport:
        for stream in self._chronicle.claims.keys() - set(streams):
            description = (
                f"{stream} had {self._chronicle.find_covered(stream)} events when it was checkpointed, but is missing."
            )
            self._add_finding("dropped", stream, 1, description)
        for finding in diagnose(self._breaks, self._gaps, self._copies):
            self._record_finding(finding)
        is_compared = self._compare()
        if self._unkept:
            self._notes.append(f"{self._unkept} more findings are not listed.")
        return IntegrityReport(
            ok=not self._findings,
            findings=tuple(self._findings),
            streams=len(streams),
            events=self._events,
            erased=self._erased,
            uncovered=self._uncovered,
            checkpoints=self._checked,
            torn=self._chronicle.torn,
            compared=is_compared,
            notes=tuple(self._notes),
        )

    def _copies(self, digest: bytes) -> list[StreamPosition]:
        return [(row["stream"], row["seq"]) for row in self._view.ask("same_hash", {"hash": digest, "limit": 2})]

    def _compare(self) -> bool:
        """Compare the rows with the events, if these are intact."""
        is_damaged = any(finding.kind in DAMAGE_KINDS for finding in self._findings)
        if self._fold.unreadable is not None and not is_damaged:
            self._record_finding(self._fold.unreadable)
        if self._fold.unreadable is not None or is_damaged:
            self._notes.append("The rows were not compared with the events, because some events are damaged.")
            return False
        live_rows = read_live_rows(self._view)
        for difference in compare_rows(live_rows, self._fold.merge_live_leases(live_rows)):
            self._add_finding("row", difference.key[0].TABLE, 0, difference.sentence)
        return True

    def _add_finding(self, kind: FindingKind, stream: str, seq: int, description: str) -> None:
        self._record_finding(make_finding(kind, stream, seq, description))

    def _record_finding(self, finding: IntegrityFinding) -> None:
        if len(self._findings) < MAX_FINDINGS:
            self._findings.append(finding)
        else:
            self._unkept += 1


def _find_blob_flaw(view: StoreView, digest: str) -> FindingKind | None:
    data = view.get(Digest(digest))
    if data is None:
        return "blob_missing"
    return None if sha256(data).hexdigest() == digest else "blob_altered"

"""Looks for any sign that a store was tampered with: its chains, bodies, blobs, rows and checkpoints.

A hash mismatch says only that something is wrong. But an event still carries the hash of the place it was written for:
if it matches another place, it was moved, repeated or renumbered; if none, it was edited.
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

MOST_SEARCH_PLACES: Final = 48
MOST_SEARCH_HASHES: Final = 96
MOST_SEARCH_TRIES: Final = 300_000
MOST_SEARCH_LOOKUPS: Final = 50
"""Bounds of the search: it must end soon, however much was tampered with."""

USUAL_SHIFTS: Final = tuple(shift for size in range(1, 9) for shift in (size, -size))
"""By how many places events are usually renumbered when some before them are removed or added."""

StreamPosition = tuple[str, int]

FindCopies = Callable[[bytes], Sequence[StreamPosition]]
"""Finds some of the places of events with a hash."""


class ChainBreak(msgspec.Struct, frozen=True):
    """An event that does not follow from the one before it, whose hash is `previous`.

    `vouched` is the number by which a checkpoint knows this hash in its stream, or 0.
    """

    event: Stored
    previous: bytes
    after_gap: bool = False
    vouched: int = 0

    @property
    def place(self) -> StreamPosition:
        return (self.event.stream, self.event.seq)


class StreamGap(msgspec.Struct, frozen=True):
    """Places of a stream without an event."""

    stream: str
    first: int
    last: int


class TamperedEvent(msgspec.Struct):
    """What was done to an event, and to how many that follow it."""

    kind: FindingKind
    place: StreamPosition
    origin: StreamPosition | None = None
    more: int = 0


def is_successor(event: Stored, previous: bytes, place: StreamPosition) -> bool:
    """Whether an event was written for a place, after the event with that hash."""
    header = (*place, event.kind, event.version, event.at, event.generation, event.key, event.blob)
    return hash_event(previous, header, event.facts, event.digest) == event.hash


def find_body_flaw(event: Stored, *, erased: bool) -> tuple[FindingKind, str] | None:
    """What is wrong with a body: changed, missing without an erasure, or present in spite of one."""
    if event.body is None:
        gone = event.digest != b"" and not erased
        return ("body_missing", "is gone, and nothing says that it was erased.") if gone else None
    if event.salt is None or digest_body(event.salt, event.body) != event.digest:
        return "edited", "does not fit its digest: it was changed."
    return ("not_erased", "was erased, but stands there again.") if erased else None


def diagnose(breaks: Sequence[ChainBreak], gaps: Sequence[StreamGap], copies: FindCopies) -> Iterator[IntegrityFinding]:
    """Describe what was done, once for each run of events."""
    search = _Search(breaks, gaps, copies)
    named = search.names()
    origins = {found.origin for found in named}
    for gap in gaps:
        if not (gap.first == gap.last and (gap.stream, gap.first) in origins):
            yield describe_stream_gap(gap)
    for found in named:
        yield make_finding(found.kind, *found.place, _describe_tampering(found))


def describe_stream_gap(gap: StreamGap) -> IntegrityFinding:
    several = f"Events {gap.first} to {gap.last} of {gap.stream} are missing: they were deleted."
    single = f"Event {gap.first} of {gap.stream} is missing: it was deleted."
    return make_finding("deleted", gap.stream, gap.first, single if gap.first == gap.last else several)


class _Search:
    def __init__(self, breaks: Sequence[ChainBreak], gaps: Sequence[StreamGap], copies: FindCopies) -> None:
        self._breaks = breaks
        self._gaps = gaps
        self._copies = copies
        edges = [place for gap in gaps for place in ((gap.stream, gap.first), (gap.stream, gap.last))]
        places = [broken.place for broken in breaks]
        hashes = [CHAIN_START, *(seen for broken in breaks for seen in (broken.previous, broken.event.hash))]
        self._places = list(dict.fromkeys((*_find_run_starts(breaks)[: MOST_SEARCH_PLACES // 2], *edges, *places)))[
            :MOST_SEARCH_PLACES
        ]
        self._hashes = list(dict.fromkeys(hashes))[:MOST_SEARCH_HASHES]
        self._tries = MOST_SEARCH_TRIES
        self._lookups = MOST_SEARCH_LOOKUPS

    def names(self) -> list[TamperedEvent]:
        """Describe each break, unless it continues the one before it or follows from another."""
        named: list[TamperedEvent] = []
        run: tuple[StreamPosition, StreamPosition] | None = None
        for broken in self._breaks:
            onward = _continue_run(run, broken)
            if onward is not None:
                run = (broken.place, onward)
                named[-1].more += 1
                continue
            found = self._name(broken, named[-1] if named else None)
            run = None
            if found is not None:
                run = (broken.place, found.origin) if found.origin else None
                if not (named and found is named[-1]):
                    named.append(found)
        for found in named:
            self._search_before(found, named)
        return named

    def _search_before(self, found: TamperedEvent, named: Sequence[TamperedEvent]) -> None:
        """An event that neither took the place of another one nor left its own empty was only renumbered."""
        if found.kind != "reordered" or found.origin is None:
            return
        stream, number = found.origin
        empty = any(gap.stream == stream and gap.first <= number <= gap.last for gap in self._gaps)
        if not empty and all(found.place != each.origin and found.origin != each.place for each in named):
            found.kind = "deleted" if number > found.place[1] else "inserted"
            # As where the event after it tells.
            found.origin = (stream, number + 1)

    def _name(self, broken: ChainBreak, before: TamperedEvent | None) -> TamperedEvent | None:
        origin = self._origin(broken)
        if origin == broken.place:
            return None
        copied = self._find_original(broken)
        if copied is not None:
            return TamperedEvent("duplicated", broken.place, copied)
        if origin is None:
            return None if broken.after_gap else TamperedEvent("edited", broken.place)
        if origin[0] != broken.place[0]:
            return TamperedEvent("moved", broken.place, origin)
        if before is not None and before.kind == "edited" and before.place == (origin[0], broken.place[1] - 1):
            before.kind = "deleted" if origin[1] > broken.place[1] else "inserted"
            before.origin = origin
            return before
        return TamperedEvent("reordered", broken.place, origin)

    def _origin(self, broken: ChainBreak) -> StreamPosition | None:
        """The place that the event was written for."""
        stream, seq = broken.place
        if broken.vouched not in {0, seq}:
            return (stream, broken.vouched)
        nearby = [((stream, seq + shift), broken.previous) for shift in USUAL_SHIFTS]
        own = [(broken.place, previous) for previous in self._hashes]
        for place, previous in (*own, *nearby, *((at, after) for at in self._places for after in self._hashes)):
            self._tries -= 1
            if self._tries < 0:
                return None
            if is_successor(broken.event, previous, place):
                return place
        return None

    def _find_original(self, broken: ChainBreak) -> StreamPosition | None:
        """Another event with the same hash: one of the two is a copy."""
        self._lookups -= 1
        if self._lookups < 0:
            return None
        others = [place for place in self._copies(broken.event.hash) if place != broken.place]
        return others[0] if others else None


def _find_run_starts(breaks: Sequence[ChainBreak]) -> list[StreamPosition]:
    """Where runs of broken events begin: the origin of the first explains the whole run."""
    places = [broken.place for broken in breaks]
    return [
        place for place, (stream, seq) in zip(places, [("", 0), *places], strict=False) if place != (stream, seq + 1)
    ]


def _continue_run(run: tuple[StreamPosition, StreamPosition] | None, broken: ChainBreak) -> StreamPosition | None:
    """The place that the event was written for, if it continues the run."""
    if run is None:
        return None
    (stream, seq), (origin, number) = run
    follower = (origin, number + 1)
    continues = broken.place == (stream, seq + 1) and is_successor(broken.event, broken.previous, follower)
    return follower if continues else None


def _describe_tampering(found: TamperedEvent) -> str:
    (stream, seq), origin = found.place, found.origin
    what = f"Event {seq} of {stream}"
    more = f", and so were {format_count(found.more, 'event')} after it" if found.more else ""
    match found.kind, origin:
        case "deleted", (_, number):
            gone = format_count(number - seq - 1, "event")
            return f"Deleted: {gone} before event {seq} of {stream}; the rest was renumbered."
        case "inserted", (_, number):
            added = format_count(seq + 1 - number, "event")
            return f"Inserted: {added} before event {seq} of {stream}; the rest was renumbered."
        case "duplicated", (of, number):
            return f"{what} was copied from event {number} of {of}{more}."
        case "moved", (of, number):
            return f"{what} was written as event {number} of {of} and then moved{more}."
        case "reordered", (_, number):
            return f"{what} was written as event {number}, so the order was changed{more}."
        case _:
            return (
                f"{what} does not follow from what stands before it: one of the two was changed after it was written."
            )


class CheckpointLog:
    """What the checkpoints of a store say.

    `claims` has, for each stream, the hashes that its events had when they were checkpointed, as hexadecimal digits.
    Only properly signed lines count. `number` is that of the last line, as far as known, and `begins_at` the time of
    the first. `absent`: no readable file.
    """

    def __init__(self) -> None:
        self.claims: dict[str, dict[int, str]] = {}
        self.findings: list[IntegrityFinding] = []
        self.notes: list[str] = []
        self.absent = False
        self.count = 0
        self.number = 0
        self.torn = False
        self.begins_at: int | None = None

    def find_covered(self, stream: str) -> int:
        """Up to which event a stream is vouched for."""
        return max(self.claims.get(stream, ()), default=0)


def load_checkpoint_log(view: StoreView, folder: Path, trusted: Collection[str] = ()) -> CheckpointLog:
    """Read the checkpoints of a store that may be written to meanwhile.

    Look at the store afterwards: checkpoints newer than the snapshot would report a truncated tail. And only events
    that were there before can be missing their checkpoints.
    """
    begun = bool(view.ask("any_event", {}))
    try:
        name = read_store_id(read_meta_values(view.ask("meta", {})), "that is examined")
        chronicle = read_checkpoint_log(folder, name, trusted)
    except (OSError, ValueError, StoreUnusable) as error:
        return _make_missing_log(folder, error, begun=begun)
    if not trusted:
        chronicle.notes.append("The checkpoints were checked against the keys that they name themselves.")
    if chronicle.torn:
        chronicle.notes.append("The last checkpoint was cut off in the middle of being written, as a crash does it.")
    return chronicle


def _make_missing_log(folder: Path, error: Exception, *, begun: bool) -> CheckpointLog:
    chronicle = CheckpointLog()
    chronicle.absent = True
    if begun:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        what = f"No checkpoints of the store can be read in {folder} ({reason})."
        chronicle.findings.append(make_finding("checkpoint_missing", "", 0, what))
    return chronicle


def read_checkpoint_log(folder: Path, store_id: str, trusted: Collection[str] = ()) -> CheckpointLog:
    """Read and check all checkpoints of a store. Raises OSError.

    Without trusted keys, each line is checked against the key that it names itself.
    """
    chronicle = CheckpointLog()
    previous = NO_PREVIOUS_LINE
    with checkpoint_file(folder, store_id).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                chronicle.torn = True
                break
            chronicle.count += 1
            chronicle.number += 1
            _examine_line(line[:-1], previous, store_id, trusted, chronicle)
            previous = digest_line(line[:-1])
    return chronicle


def _examine_line(
    line: bytes, previous: str, store_id: str, trusted: Collection[str], chronicle: CheckpointLog
) -> None:
    checkpoint = parse_checkpoint(line)
    if checkpoint is None:
        what = "cannot be read: it was damaged."
        _add_finding(chronicle, store_id, "checkpoint_altered", what)
        return
    if checkpoint.previous != previous or checkpoint.number != chronicle.number:
        what = (
            f"does not follow the one before it, and says that it is number {checkpoint.number}: "
            "a line was changed, removed or added there."
        )
        _add_finding(chronicle, store_id, "checkpoint_altered", what)
    chronicle.number = checkpoint.number
    doubt = _find_checkpoint_flaw(checkpoint, store_id, trusted)
    if doubt is None:
        _record_checkpoint(checkpoint, store_id, chronicle)
    else:
        _add_finding(chronicle, store_id, *doubt)


def _find_checkpoint_flaw(
    checkpoint: Checkpoint, store_id: str, trusted: Collection[str]
) -> tuple[FindingKind, str] | None:
    if not is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key):
        return "checkpoint_altered", "does not fit its signature: it was changed after it was signed."
    if trusted and checkpoint.key not in trusted:
        return "checkpoint_key", f"is signed with the key {checkpoint.key}, which is not one that you trust."
    if checkpoint.store != store_id:
        return "checkpoint_altered", f"belongs to the store {checkpoint.store}: it was copied here."
    return None


def _record_checkpoint(checkpoint: Checkpoint, store_id: str, chronicle: CheckpointLog) -> None:
    if chronicle.begins_at is None:
        chronicle.begins_at = checkpoint.at
    if checkpoint.accepted is not msgspec.UNSET:
        _forget_accepted(checkpoint.accepted, chronicle)
    for stream, (seq, digest) in checkpoint.heads.items():
        if chronicle.claims.setdefault(stream, {}).setdefault(seq, digest) != digest:
            what = f"gives event {seq} of {stream} another hash than an earlier one: history was rewritten."
            _add_finding(chronicle, store_id, "rewritten", what, stream, seq)


def _forget_accepted(accepted: Mapping[str, int], chronicle: CheckpointLog) -> None:
    """Forget what a person gave up by continuing with an older store."""
    events = 0
    for stream, fits in accepted.items():
        claims = chronicle.claims.get(stream, {})
        events += max(0, max(claims, default=0) - fits)
        chronicle.claims[stream] = {seq: digest for seq, digest in claims.items() if seq <= fits}
        if not chronicle.claims[stream]:
            del chronicle.claims[stream]
    chronicle.notes.append(
        f"Line {chronicle.count} of the checkpoints says that a person went on with the store as it was then, without "
        f"{format_count(events, 'event')} that earlier lines knew."
    )


def _add_finding(
    chronicle: CheckpointLog, store_id: str, kind: FindingKind, what: str, stream: str = "", seq: int | None = None
) -> None:
    number = chronicle.count
    what = f"Line {number} of the checkpoints of store {store_id} {what}"
    chronicle.findings.append(make_finding(kind, stream, number if seq is None else seq, what))


MOST_FINDINGS: Final = 1000
"""More are only counted: a report must fit into memory."""

DAMAGE_KINDS: Final[frozenset[FindingKind]] = frozenset(
    ("edited", "deleted", "inserted", "duplicated", "reordered", "moved", "unreadable", "rewritten", "cut", "dropped")
)
"""Findings after which rows cannot be rebuilt from the events and compared."""

CLOCK_TOLERANCE: Final = 5 * SECOND
"""Allowed difference between the clocks of a store and of the signer of its checkpoints."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")


Progress = Callable[[int, int], None]
"""Receives the number of streams examined, and of all."""


def _ignore_progress(_: int, __: int) -> None: ...


async def verify(
    store: JournalStore,
    checkpoints_folder: Path | None = None,
    public_keys: Collection[str] = (),
    progress: Progress = _ignore_progress,
) -> IntegrityReport:
    """Examine the store as it is now, against its checkpoints if their folder is given.

    Without trusted public keys, a checkpoint is only checked against the key that it names itself. The checkpoints are
    read first: all that they vouch for was committed by then, and is in the snapshot.
    """
    if checkpoints_folder is None:
        return await store.study(lambda view: _examine_view(view, None, progress))
    chronicle = await store.study(lambda view: load_checkpoint_log(view, checkpoints_folder, public_keys))
    return await store.study(lambda view: _examine_view(view, chronicle, progress))


def examine(
    view: StoreView, checkpoints_folder: Path | None = None, public_keys: Collection[str] = ()
) -> IntegrityReport:
    """Examine one view of a store; there must be no writer if its checkpoints are compared."""
    if checkpoints_folder is None:
        return _examine_view(view, None)
    return _examine_view(view, load_checkpoint_log(view, checkpoints_folder, public_keys))


def _examine_view(
    view: StoreView, chronicle: CheckpointLog | None, progress: Progress = _ignore_progress
) -> IntegrityReport:
    examination = _Examination(view, chronicle)
    streams = sort_streams(list_streams(view))
    for number, stream in enumerate(streams):
        progress(number, len(streams))
        examination.walk(stream)
    return examination.report(streams)


class _Examination:
    def __init__(self, view: StoreView, chronicle: CheckpointLog | None) -> None:
        self._view = view
        self._chronicle = chronicle or CheckpointLog()
        self._checked = None if chronicle is None or chronicle.absent else chronicle.count
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
            self._add_finding("damaged", "", 0, f"SQLite finds the store damaged: {flaw}.")
        for flaw in self._chronicle.findings:
            self._keep_finding(flaw)

    def walk(self, stream: StreamId) -> None:
        claims = self._chronicle.claims.get(stream, {})
        erased_through = self._erased_through.get(stream, 0)
        covered = self._chronicle.find_covered(stream)
        numbers = {digest: number for number, digest in claims.items()}
        previous, last, at = CHAIN_START, 0, 0
        for event in read_raw_events(self._view, stream):
            self._events += 1
            seq = event.seq
            if seq == covered + 1:
                self._find_uncovered(event)
            if seq <= last:
                what = f"Another event ({event.kind!r}) stands at number {seq} of {stream}."
                self._add_finding("duplicated" if seq > 0 else "inserted", stream, seq, what)
                continue
            gap = seq != last + 1
            if gap:
                self._gaps.append(StreamGap(stream, last + 1, seq - 1))
            if not is_successor(event, previous, (stream, seq)):
                vouched = numbers.get(event.hash.hex(), 0)
                self._broken(ChainBreak(msgspec.structs.replace(event, body=None), previous, gap, vouched))
            self._body(event, erased=seq <= erased_through)
            claimed = claims.get(seq)
            if claimed is not None and claimed != event.hash.hex():
                what = f"Event {seq} of {stream} has another hash than when it was checkpointed: "
                self._add_finding("rewritten", stream, seq, f"{what}it, or something before it, was rewritten.")
                claims = {}
            self._fold.apply(event)
            previous, last, at = event.hash, seq, event.at
        self._end(stream, last, previous, at)

    def _find_uncovered(self, event: Stored) -> None:
        """Find events from before the first checkpoint: the first commit of a store is checkpointed at once."""
        begins_at = self._chronicle.begins_at
        if begins_at is not None and event.at < begins_at - CLOCK_TOLERANCE:
            what = (
                f"Event {event.seq} of {event.stream} is older than the first checkpoint and covered by none: "
                "there were checkpoints before it, and they are gone."
            )
            self._add_finding("checkpoint_missing", event.stream, event.seq, what)

    def _broken(self, broken: ChainBreak) -> None:
        if len(self._breaks) < MOST_FINDINGS:
            self._breaks.append(broken)
        else:
            self._unkept += 1

    def _body(self, event: Stored, *, erased: bool) -> None:
        flaw = find_body_flaw(event, erased=erased)
        if flaw is not None:
            what = f"The body of event {event.seq} of {event.stream} {flaw[1]}"
            self._add_finding(flaw[0], event.stream, event.seq, what)
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
            state = "is missing" if flaw == "blob_missing" else "was changed: it does not fit its digest"
            what = f"The blob {digest}, which event {event.seq} of {event.stream} names, {state}."
            self._add_finding(flaw, event.stream, event.seq, what)

    def _end(self, stream: StreamId, last: int, digest: bytes, at: int) -> None:
        covered = self._chronicle.find_covered(stream)
        if last > covered:
            self._uncovered[stream] = last - covered
        elif last < covered:
            what = f"{stream} had {covered} events when it was checkpointed, and now ends with event {last}."
            self._add_finding("cut" if last else "dropped", stream, last + 1, what)
        head = self._heads.get(stream)
        if head is None:
            self._add_finding("head", stream, last, f"{stream} has {last} events that can be found by it, and no head.")
        elif to_sequence_number(head["head"]) > last:
            self._gaps.append(StreamGap(stream, last + 1, head["head"]))
        elif (head["head"], head["hash"], head["at"]) != (last, digest, at):
            what = f"The head of {stream} says event {head['head']} and does not fit its last one, which is {last}."
            self._add_finding("head", stream, last, what)

    def report(self, streams: Collection[StreamId]) -> IntegrityReport:
        for stream in self._chronicle.claims.keys() - set(streams):
            what = (
                f"{stream} had {self._chronicle.find_covered(stream)} events when it was checkpointed, and now is gone."
            )
            self._add_finding("dropped", stream, 1, what)
        for named in diagnose(self._breaks, self._gaps, self._copies):
            self._keep_finding(named)
        compared = self._compare()
        if self._unkept:
            self._notes.append(f"There are {self._unkept} more findings like these.")
        return IntegrityReport(
            ok=not self._findings,
            findings=tuple(self._findings),
            streams=len(streams),
            events=self._events,
            erased=self._erased,
            uncovered=self._uncovered,
            checkpoints=self._checked,
            torn=self._chronicle.torn,
            compared=compared,
            notes=tuple(self._notes),
        )

    def _copies(self, digest: bytes) -> list[StreamPosition]:
        return [(row["stream"], row["seq"]) for row in self._view.ask("same_hash", {"hash": digest, "limit": 2})]

    def _compare(self) -> bool:
        """Compare the rows with what the events make of them, if the events can be trusted."""
        damaged = any(finding.kind in DAMAGE_KINDS for finding in self._findings)
        if self._fold.unreadable is not None and not damaged:
            self._keep_finding(self._fold.unreadable)
        if self._fold.unreadable is not None or damaged:
            self._notes.append("The rows were not compared with the events, because not all events are sound.")
            return False
        live = read_live_rows(self._view)
        for difference in compare_rows(live, self._fold.rows_beside(live)):
            self._add_finding("row", difference.key[0].TABLE, 0, difference.sentence)
        return True

    def _add_finding(self, kind: FindingKind, stream: str, seq: int, what: str) -> None:
        self._keep_finding(make_finding(kind, stream, seq, what))

    def _keep_finding(self, finding: IntegrityFinding) -> None:
        if len(self._findings) < MOST_FINDINGS:
            self._findings.append(finding)
        else:
            self._unkept += 1


def _find_blob_flaw(view: StoreView, digest: str) -> FindingKind | None:
    data = view.get(Digest(digest))
    if data is None:
        return "blob_missing"
    return None if sha256(data).hexdigest() == digest else "blob_altered"

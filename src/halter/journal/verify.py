"""Verification of a store's hash chains, bodies, blobs, rows and checkpoints, to detect tampering.

A hash mismatch says only that something is wrong. But the hash of an event depends on the position it was written for:
if it matches another position, the event was moved, copied or renumbered; if none, it was edited.
"""

import re
from collections.abc import Callable, Collection
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from halter.core.clock import SECOND
from halter.core.events import SessionStarted
from halter.core.ids import Digest, StreamId
from halter.core.ports import Stored
from halter.journal.apply import CHAIN_START
from halter.journal.checkpoint_log import CheckpointLog, load_checkpoint_log
from halter.journal.engine import StoreView
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
from halter.journal.tampered_events import ChainBreak, StreamGap, StreamPosition, diagnose, find_body_flaw, is_successor

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

"""Looking for any sign that a store was tampered with: its chains, bodies, blobs, rows and checkpoints."""

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
from halter.journal.chain import START
from halter.journal.chronicle import Chronicle, chronicle_of
from halter.journal.diagnose import Break, Gap, Place, diagnose, flaw_of_body, follows
from halter.journal.engine import View
from halter.journal.rebuild import (
    Fold,
    all_streams,
    differences,
    erasures,
    events_of,
    in_order,
    live_rows,
    whole,
)
from halter.journal.report import Finding, Kind, Report, finding
from halter.journal.store import JournalStore

FINDINGS_KEPT: Final = 1000
"""More are only counted: nobody reads them, and a report must fit into memory."""

DAMAGE: Final[frozenset[Kind]] = frozenset(
    ("edited", "deleted", "inserted", "duplicated", "reordered", "moved", "unreadable", "rewritten", "cut", "dropped")
)
"""Findings after which rows cannot be made from the events and compared."""

CLOCKS_APART: Final = 5 * SECOND
"""By how much the clocks of a store and of whoever signs its checkpoints may differ."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")


Progress = Callable[[int, int], None]
"""Somebody who is told how many streams of all were examined."""


def _unheard(_: int, __: int) -> None:
    """Tell nobody."""


async def verify(
    store: JournalStore,
    checkpoints_folder: Path | None = None,
    public_keys: Collection[str] = (),
    progress: Progress = _unheard,
) -> Report:
    """Examine the store as it is at this moment, against its checkpoints if their folder is given.

    Without public keys to trust, a checkpoint is only checked against the key that it names itself. The checkpoints
    are read first: all that they vouch for was committed by then, and is seen when the store is looked at.
    """
    if checkpoints_folder is None:
        return await store.study(lambda view: _examined(view, None, progress))
    chronicle = await store.study(lambda view: chronicle_of(view, checkpoints_folder, public_keys))
    return await store.study(lambda view: _examined(view, chronicle, progress))


def examine(view: View, checkpoints_folder: Path | None = None, public_keys: Collection[str] = ()) -> Report:
    """Examine one view of a store, to which nobody writes if its checkpoints are to be compared."""
    if checkpoints_folder is None:
        return _examined(view, None)
    return _examined(view, chronicle_of(view, checkpoints_folder, public_keys))


def _examined(view: View, chronicle: Chronicle | None, progress: Progress = _unheard) -> Report:
    examination = _Examination(view, chronicle)
    streams = in_order(all_streams(view))
    for number, stream in enumerate(streams):
        progress(number, len(streams))
        examination.walk(stream)
    return examination.report(streams)


class _Examination:
    def __init__(self, view: View, chronicle: Chronicle | None) -> None:
        self._view = view
        self._chronicle = chronicle or Chronicle()
        self._checked = None if chronicle is None or chronicle.absent else chronicle.count
        self._findings: list[Finding] = []
        self._unkept = 0
        self._breaks: list[Break] = []
        self._gaps: list[Gap] = []
        self._fold = Fold()
        self._heads = {row["stream"]: row for row in view.ask("heads", {})}
        self._erased_through = erasures(view)
        self._blobs: dict[str, Kind | None] = {}
        self._notes = [*self._chronicle.notes]
        self._events = 0
        self._erased = 0
        self._uncovered: dict[str, int] = {}
        for flaw in view.flaws():
            self._found("damaged", "", 0, f"SQLite finds the store damaged: {flaw}.")
        for flaw in self._chronicle.findings:
            self._keep(flaw)

    def walk(self, stream: StreamId) -> None:
        """Follow one stream from its first event to its head."""
        claims = self._chronicle.claims.get(stream, {})
        erased_through = self._erased_through.get(stream, 0)
        covered = self._chronicle.covered(stream)
        previous, last, at = START, 0, 0
        for event in events_of(self._view, stream):
            self._events += 1
            seq = event.seq
            if seq == covered + 1:
                self._never_covered(event)
            if seq <= last:
                self._misnumbered(event)
                continue
            gap = seq != last + 1
            if gap:
                self._gaps.append(Gap(stream, last + 1, seq - 1))
            if not follows(event, previous, (stream, seq)):
                self._broken(Break(msgspec.structs.replace(event, body=None), previous, gap))
            self._body(event, erased=seq <= erased_through)
            claimed = claims.get(seq)
            if claimed is not None and claimed != event.hash.hex():
                self._rewritten(event)
                claims = {}
            self._fold.take(event)
            previous, last, at = event.hash, seq, event.at
        self._end(stream, last, previous, at)

    def _never_covered(self, event: Stored) -> None:
        """Find events from before the first checkpoint: the first commit of a store is checkpointed at once."""
        begins_at = self._chronicle.begins_at
        if begins_at is not None and event.at < begins_at - CLOCKS_APART:
            what = (
                f"Event {event.seq} of {event.stream} is older than the first checkpoint and covered by none: "
                "there were checkpoints before it, and they are gone."
            )
            self._found("checkpoint_missing", event.stream, event.seq, what)

    def _misnumbered(self, event: Stored) -> None:
        kind: Kind = "duplicated" if event.seq > 0 else "inserted"
        what = f"Another event ({event.kind!r}) stands at number {event.seq} of {event.stream}."
        self._found(kind, event.stream, event.seq, what)

    def _broken(self, broken: Break) -> None:
        if len(self._breaks) < FINDINGS_KEPT:
            self._breaks.append(broken)
        else:
            self._unkept += 1

    def _body(self, event: Stored, *, erased: bool) -> None:
        flaw = flaw_of_body(event, erased=erased)
        if flaw is not None:
            what = f"The body of event {event.seq} of {event.stream} {flaw[1]}"
            self._found(flaw[0], event.stream, event.seq, what)
        elif event.erased:
            self._erased += 1
        if event.blob is not None:
            self._blob(event, event.blob, erased=erased)
        if isinstance(event.event, SessionStarted) and _is_digest(event.event.definition):
            self._blob(event, event.event.definition, erased=False)

    def _blob(self, event: Stored, digest: str, *, erased: bool) -> None:
        if digest not in self._blobs:
            self._blobs[digest] = _flaw_of_blob(self._view, digest)
        flaw = self._blobs[digest]
        if flaw == "blob_missing" and erased:
            self._erased += 1
        elif flaw is not None:
            state = "is missing" if flaw == "blob_missing" else "was changed: it does not fit its digest"
            what = f"The blob {digest}, which event {event.seq} of {event.stream} names, {state}."
            self._found(flaw, event.stream, event.seq, what)

    def _rewritten(self, event: Stored) -> None:
        what = (
            f"Event {event.seq} of {event.stream} has another hash than when it was checkpointed: "
            "it, or something before it, was rewritten."
        )
        self._found("rewritten", event.stream, event.seq, what)

    def _end(self, stream: StreamId, last: int, digest: bytes, at: int) -> None:
        covered = self._chronicle.covered(stream)
        if last > covered:
            self._uncovered[stream] = last - covered
        elif last < covered:
            what = f"{stream} had {covered} events when it was checkpointed, and now ends with event {last}."
            self._found("cut" if last else "dropped", stream, last + 1, what)
        head = self._heads.get(stream)
        if head is None:
            self._found("head", stream, last, f"{stream} has {last} events that can be found by it, and no head.")
        elif whole(head["head"]) > last:
            self._gaps.append(Gap(stream, last + 1, head["head"]))
        elif (head["head"], head["hash"], head["at"]) != (last, digest, at):
            what = f"The head of {stream} says event {head['head']} and does not fit its last one, which is {last}."
            self._found("head", stream, last, what)

    def report(self, streams: Collection[StreamId]) -> Report:
        """Name what was found, compare the rows, and sum up."""
        for stream in self._chronicle.claims.keys() - set(streams):
            what = f"{stream} had {self._chronicle.covered(stream)} events when it was checkpointed, and now is gone."
            self._found("dropped", stream, 1, what)
        for named in diagnose(self._breaks, self._gaps, self._copies):
            self._keep(named)
        compared = self._compare()
        if self._unkept:
            self._notes.append(f"There are {self._unkept} more findings like these.")
        return Report(
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

    def _copies(self, digest: bytes) -> list[Place]:
        return [(row["stream"], row["seq"]) for row in self._view.ask("same_hash", {"hash": digest, "limit": 2})]

    def _compare(self) -> bool:
        """Compare the rows with what the events make of them, if the events can be trusted so far."""
        damaged = any(found.kind in DAMAGE for found in self._findings)
        if self._fold.unreadable is not None and not damaged:
            self._keep(self._fold.unreadable)
        if self._fold.unreadable is not None or damaged:
            self._notes.append("The rows were not compared with the events, because not all events are sound.")
            return False
        live = live_rows(self._view)
        for difference in differences(live, self._fold.rows_beside(live)):
            self._found("row", difference.key[0].TABLE, 0, difference.sentence)
        return True

    def _found(self, kind: Kind, stream: str, seq: int, what: str) -> None:
        self._keep(finding(kind, stream, seq, what))

    def _keep(self, found: Finding) -> None:
        if len(self._findings) < FINDINGS_KEPT:
            self._findings.append(found)
        else:
            self._unkept += 1


def _flaw_of_blob(view: View, digest: str) -> Kind | None:
    data = view.get(Digest(digest))
    if data is None:
        return "blob_missing"
    return None if sha256(data).hexdigest() == digest else "blob_altered"


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None

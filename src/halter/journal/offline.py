"""Checking an export with no store at hand: every hash is worked out anew, link by link from the beginning."""

from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import msgspec

from halter.core.ports import Stored
from halter.journal.chain import START
from halter.journal.diagnose import Break, Gap, Place, diagnose, flaw_of_body, follows
from halter.journal.exported import FORMAT, Blob, Event, Header, Line, Receipted, blobs_of

FINDINGS_KEPT: Final = 100
"""More are only counted: nobody reads them."""

_DECODER: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)


class Checked(msgspec.Struct, frozen=True):
    """An export as it was read. `erased` counts bodies that are gone; that they are is no sign of tampering."""

    sessions: tuple[str, ...]
    streams: dict[str, list[Stored]]
    receipts: dict[str, bytes]
    findings: tuple[str, ...]
    events: int
    erased: int


class _Reading:
    def __init__(self) -> None:
        self.header: Header | None = None
        self.receipts: dict[str, bytes] = {}
        self.events: dict[str, list[Stored]] = defaultdict(list)
        self.blobs: dict[str, bytes] = {}
        self.findings: list[str] = []
        self.erased = 0

    def take(self, number: int, text: bytes) -> None:
        """Take in a line."""
        try:
            self._take(number, _DECODER.decode(text))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.findings.append(f"Line {number} is no line of an export: {error}.")

    def _take(self, number: int, line: Line) -> None:
        match line:
            case Header() if number == 1:
                self.header = line
            case Header():
                self.findings.append(f"Line {number} begins another export: keep each in a file of its own.")
            case Receipted():
                self.receipts[line.session] = bytes(line.receipt)
            case Blob():
                self.blobs[line.digest] = line.data
            case Event():
                self._order(line.stored())

    def _order(self, event: Stored) -> None:
        before = self.events[event.stream]
        if before and event.seq < before[-1].seq:
            self.findings.append(
                f"Event {event.seq} of {event.stream} stands after event {before[-1].seq}: "
                "lines were put into another order."
            )
        before.append(event)

    def look(self) -> None:
        """Look at all that was taken in."""
        breaks: list[Break] = []
        gaps: list[Gap] = []
        for stream in list(self.events):
            self.events[stream].sort(key=lambda event: event.seq)
            self._walk(stream, breaks, gaps)
        self._whole(gaps)
        places: dict[bytes, list[Place]] = defaultdict(list)
        for event in self._all():
            places[event.hash].append((event.stream, event.seq))
        found = diagnose(breaks, gaps, lambda digest: places.get(digest, []))
        self.findings += [each.sentence for each in found]
        if breaks and not self.findings:
            # Whatever it was that nobody can name, a link that does not hold is never passed over.
            event = breaks[0].event
            self.findings.append(f"Event {event.seq} of {event.stream} does not follow from what stands before it.")
        self._look_at_blobs()

    def _all(self) -> Iterable[Stored]:
        return (event for events in self.events.values() for event in events)

    def _walk(self, stream: str, breaks: list[Break], gaps: list[Gap]) -> None:
        previous, last = START, 0
        for event in self.events[stream]:
            if event.seq <= last:
                self.findings.append(f"Another event ({event.kind!r}) stands at number {event.seq} of {stream}.")
                continue
            if event.seq != last + 1:
                gaps.append(Gap(stream, last + 1, event.seq - 1))
            if not follows(event, previous, (stream, event.seq)):
                breaks.append(Break(msgspec.structs.replace(event, body=None), previous, event.seq != last + 1))
            flaw = flaw_of_body(event, erased=event.body is None)
            if flaw is not None:
                self.findings.append(f"The body of event {event.seq} of {stream} {flaw[1]}")
            self.erased += event.erased
            previous, last = event.hash, event.seq

    def _whole(self, gaps: list[Gap]) -> None:
        """Compare with what the first line says of the streams."""
        if self.header is None:
            self.findings.append("The first line, which says what the export holds, is missing.")
            return
        if self.header.format != FORMAT:
            self.findings.append(f"The export has the form {self.header.format}: use the Halter that wrote it.")
        for stream in self.events.keys() - self.header.streams.keys():
            self.findings.append(f"There are events of {stream}, which the first line does not name.")
        for stream, head in self.header.streams.items():
            events = self.events.get(stream, [])
            last = events[-1].seq if events else 0
            if last < head:
                gaps.append(Gap(stream, last + 1, head))
            elif last > head:
                self.findings.append(
                    f"{stream} goes on to event {last}, after its last, which is {head}: it was added."
                )

    def _look_at_blobs(self) -> None:
        named = {digest for event in self._all() for digest in blobs_of(event)}
        for digest, data in self.blobs.items():
            if sha256(data).hexdigest() != digest:
                self.findings.append(f"The blob {digest} was changed: it does not fit its digest.")
            elif digest not in named:
                self.findings.append(f"No event names the blob {digest}: it was added.")
        self.erased += sum(event.blob is not None and event.blob not in self.blobs for event in self._all())


def check(lines: Iterable[bytes]) -> Checked:
    """Read an export and look for any sign that it was changed after it was written."""
    reading = _Reading()
    for number, line in enumerate(lines, 1):
        reading.take(number, line)
    reading.look()
    findings = reading.findings
    kept = findings[:FINDINGS_KEPT]
    if len(findings) > len(kept):
        kept.append(f"There are {len(findings) - len(kept)} more findings like these.")
    return Checked(
        sessions=() if reading.header is None else reading.header.sessions,
        streams=dict(reading.events),
        receipts=reading.receipts,
        findings=tuple(kept),
        events=sum(map(len, reading.events.values())),
        erased=reading.erased,
    )

"""A session's journal as lines of JSON, whose chains can be checked without the store.

    export    what the file holds: its sessions, and how many events each of their streams has
    receipt   the receipt made with it
    blob      a body that is too large for its event, or what defines a session
    event     header, facts, digest and hash; and unless they were erased, body and salt

Facts are the exact text that was hashed. Bodies and salts are base64, hashes hexadecimal digits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import msgspec

from halter.core.events import SessionStarted
from halter.core.ids import Digest, inbox_stream, session_stream
from halter.core.ports import Stored
from halter.journal.apply import CHAIN_START
from halter.journal.engine import StoreView, read_meta_values, read_store_id
from halter.journal.rebuild import decode_damaged_facts, read_raw_events
from halter.journal.verify import ChainBreak, StreamGap, StreamPosition, diagnose, find_body_flaw, is_successor

EXPORT_FORMAT: Final = 1


class ExportHeader(msgspec.Struct, frozen=True, tag_field="line", tag="export"):
    """The first line: the first session is the requested one, the others are its sub-sessions."""

    format: int
    halter: str
    store: str
    exported_at: int
    sessions: tuple[str, ...]
    streams: Mapping[str, int]


class ExportedReceipt(msgspec.Struct, frozen=True, tag_field="line", tag="receipt"):
    session: str
    receipt: msgspec.Raw


class ExportedBlob(msgspec.Struct, frozen=True, tag_field="line", tag="blob"):
    digest: str
    data: bytes


class ExportedEvent(msgspec.Struct, frozen=True, tag_field="line", tag="event", omit_defaults=True):
    stream: str
    seq: int
    kind: str
    version: int
    at: int
    generation: int
    key: str
    facts: str
    digest: str
    hash: str
    blob: str | None = None
    body: bytes | None = None
    salt: bytes | None = None

    def to_stored(self) -> Stored:
        """Decode the event. Raises ValueError for malformed digests."""
        facts = self.facts.encode()
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        fields |= {"facts": facts, "digest": bytes.fromhex(self.digest), "hash": bytes.fromhex(self.hash)}
        return Stored(**fields, event=decode_damaged_facts(self.kind, self.version, facts))


ExportLine = ExportHeader | ExportedReceipt | ExportedBlob | ExportedEvent

MakeReceipt = Callable[[Sequence[Stored], Sequence[Stored]], bytes]
"""Makes a session's receipt, as JSON, from its events and its inbox."""


def export_sessions(
    view: StoreView, sessions: Sequence[str], make: MakeReceipt, *, version: str, now: int
) -> Iterator[tuple[ExportLine, int]]:
    """Export sessions from one view of a store; yields each line with the number of events still to come."""
    streams = [stream for session in sessions for stream in (session_stream(session), inbox_stream(session))]
    heads = {row["stream"]: int(row["head"]) for stream in streams for row in view.ask("head", {"stream": stream})}
    name = read_store_id(read_meta_values(view.ask("meta", {})), "that is exported")
    remaining = sum(heads.values())
    yield ExportHeader(EXPORT_FORMAT, version, name, now, tuple(sessions), heads), remaining
    named: set[str] = set()
    for session in sessions:
        events = list(read_raw_events(view, session_stream(session)))
        inbox = list(read_raw_events(view, inbox_stream(session)))
        yield ExportedReceipt(session, msgspec.Raw(make(events, inbox))), remaining
        for stored in (*events, *inbox):
            for digest in list_blobs_of_event(stored):
                data = None if digest in named else view.get(Digest(digest))
                named.add(digest)
                if data is not None:
                    yield ExportedBlob(digest, data), remaining
            remaining -= 1
            yield to_exported_event(stored), remaining


def to_exported_event(stored: Stored) -> ExportedEvent:
    """Encode an event; facts that are not text were damaged, which their hash reveals."""
    fields: dict[str, Any] = {name: getattr(stored, name) for name in ExportedEvent.__struct_fields__}
    fields["facts"] = stored.facts.decode("utf-8", "replace")
    fields |= {"digest": stored.digest.hex(), "hash": stored.hash.hex()}
    return ExportedEvent(**fields)


def list_blobs_of_event(stored: Stored) -> Iterator[str]:
    """The blobs an event needs: a large body, and the definition of a session."""
    if stored.blob is not None:
        yield stored.blob
    if isinstance(stored.event, SessionStarted) and stored.event.definition:
        yield stored.event.definition


MOST_EXPORT_FINDINGS: Final = 100

_DECODER: Final[msgspec.json.Decoder[ExportLine]] = msgspec.json.Decoder(ExportLine)


class CheckedExport(msgspec.Struct, frozen=True):
    """An export as read. `erased` counts erased bodies, which are no sign of tampering."""

    sessions: tuple[str, ...]
    streams: dict[str, list[Stored]]
    receipts: dict[str, bytes]
    findings: tuple[str, ...]
    events: int
    erased: int


class _ExportReader:
    def __init__(self) -> None:
        self.header: ExportHeader | None = None
        self.receipts: dict[str, bytes] = {}
        self.events: dict[str, list[Stored]] = defaultdict(list)
        self.blobs: dict[str, bytes] = {}
        self.findings: list[str] = []
        self.erased = 0

    def read_line(self, number: int, text: bytes) -> None:
        try:
            self._read_record(number, _DECODER.decode(text))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.findings.append(f"Line {number} is no line of an export: {error}.")

    def _read_record(self, number: int, line: ExportLine) -> None:
        match line:
            case ExportHeader() if number == 1:
                self.header = line
            case ExportHeader():
                self.findings.append(f"Line {number} begins another export: keep each in a file of its own.")
            case ExportedReceipt():
                self.receipts[line.session] = bytes(line.receipt)
            case ExportedBlob():
                self.blobs[line.digest] = line.data
            case ExportedEvent():
                self._order(line.to_stored())

    def _order(self, event: Stored) -> None:
        before = self.events[event.stream]
        if before and event.seq < before[-1].seq:
            self.findings.append(
                f"Event {event.seq} of {event.stream} stands after event {before[-1].seq}: "
                "lines were put into another order."
            )
        before.append(event)

    def check(self) -> None:
        breaks: list[ChainBreak] = []
        gaps: list[StreamGap] = []
        for stream in list(self.events):
            self.events[stream].sort(key=lambda event: event.seq)
            self._walk(stream, breaks, gaps)
        self._check_lengths(gaps)
        places: dict[bytes, list[StreamPosition]] = defaultdict(list)
        for event in self._read_events():
            places[event.hash].append((event.stream, event.seq))
        found = diagnose(breaks, gaps, lambda digest: places.get(digest, []))
        self.findings += [each.sentence for each in found]
        if breaks and not self.findings:
            # A broken link is reported even if its cause is unknown.
            event = breaks[0].event
            self.findings.append(f"Event {event.seq} of {event.stream} does not follow from what stands before it.")
        self._check_blobs()

    def _read_events(self) -> Iterable[Stored]:
        return (event for events in self.events.values() for event in events)

    def _walk(self, stream: str, breaks: list[ChainBreak], gaps: list[StreamGap]) -> None:
        previous, last = CHAIN_START, 0
        for event in self.events[stream]:
            if event.seq <= last:
                self.findings.append(f"Another event ({event.kind!r}) stands at number {event.seq} of {stream}.")
                continue
            if event.seq != last + 1:
                gaps.append(StreamGap(stream, last + 1, event.seq - 1))
            if not is_successor(event, previous, (stream, event.seq)):
                breaks.append(ChainBreak(msgspec.structs.replace(event, body=None), previous, event.seq != last + 1))
            flaw = find_body_flaw(event, erased=event.body is None)
            if flaw is not None:
                self.findings.append(f"The body of event {event.seq} of {stream} {flaw[1]}")
            self.erased += event.erased
            previous, last = event.hash, event.seq

    def _check_lengths(self, gaps: list[StreamGap]) -> None:
        """Compare with what the first line says of the streams."""
        if self.header is None:
            self.findings.append("The first line, which says what the export holds, is missing.")
            return
        if self.header.format != EXPORT_FORMAT:
            self.findings.append(f"The export has the form {self.header.format}: use the Halter that wrote it.")
        for stream in self.events.keys() - self.header.streams.keys():
            self.findings.append(f"There are events of {stream}, which the first line does not name.")
        for stream, head in self.header.streams.items():
            events = self.events.get(stream, [])
            last = events[-1].seq if events else 0
            if last < head:
                gaps.append(StreamGap(stream, last + 1, head))
            elif last > head:
                self.findings.append(
                    f"{stream} goes on to event {last}, after its last, which is {head}: it was added."
                )

    def _check_blobs(self) -> None:
        named = {digest for event in self._read_events() for digest in list_blobs_of_event(event)}
        for digest, data in self.blobs.items():
            if sha256(data).hexdigest() != digest:
                self.findings.append(f"The blob {digest} was changed: it does not fit its digest.")
            elif digest not in named:
                self.findings.append(f"No event names the blob {digest}: it was added.")
        self.erased += sum(event.blob is not None and event.blob not in self.blobs for event in self._read_events())


def check_export(lines: Iterable[bytes]) -> CheckedExport:
    """Read an export and look for any sign that it was changed after it was written."""
    reading = _ExportReader()
    for number, line in enumerate(lines, 1):
        reading.read_line(number, line)
    reading.check()
    findings = reading.findings
    kept = findings[:MOST_EXPORT_FINDINGS]
    if len(findings) > len(kept):
        kept.append(f"There are {len(findings) - len(kept)} more findings like these.")
    return CheckedExport(
        sessions=() if reading.header is None else reading.header.sessions,
        streams=dict(reading.events),
        receipts=reading.receipts,
        findings=tuple(kept),
        events=sum(map(len, reading.events.values())),
        erased=reading.erased,
    )

"""A session's journal as lines of JSON, whose hash chains can be verified without the store.

    export    the header: the sessions, and the number of events of each of their streams
    receipt   the receipt of a session at the time of the export
    blob      a body that is too large for its event, or the definition of a session
    event     header, facts, digest and hash; unless erased, also body and salt

Facts are the exact text that was hashed. Bodies and salts are base64, hashes are hexadecimal.
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
from halter.journal.tampered_events import ChainBreak, StreamGap, StreamPosition, diagnose, find_body_flaw, is_successor

EXPORT_FORMAT: Final = 1


class ExportHeader(msgspec.Struct, frozen=True, tag_field="line", tag="export"):
    """The first line. The first session is the requested one; the others are its sub-sessions."""

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
"""Makes the receipt of a session, as JSON, from its events and its inbox."""


def export_sessions(
    view: StoreView, sessions: Sequence[str], make_receipt: MakeReceipt, *, version: str, now: int
) -> Iterator[tuple[ExportLine, int]]:
    """Export sessions from one view of a store. Yields each line with the number of remaining events."""
    streams = [stream for session in sessions for stream in (session_stream(session), inbox_stream(session))]
    heads = {row["stream"]: int(row["head"]) for stream in streams for row in view.ask("head", {"stream": stream})}
    store_id = read_store_id(read_meta_values(view.ask("meta", {})), "that is exported")
    remaining = sum(heads.values())
    yield ExportHeader(EXPORT_FORMAT, version, store_id, now, tuple(sessions), heads), remaining
    exported_blobs: set[str] = set()
    for session in sessions:
        events = list(read_raw_events(view, session_stream(session)))
        inbox = list(read_raw_events(view, inbox_stream(session)))
        yield ExportedReceipt(session, msgspec.Raw(make_receipt(events, inbox))), remaining
        for stored_event in (*events, *inbox):
            for digest in list_blobs_of_event(stored_event):
                data = None if digest in exported_blobs else view.get(Digest(digest))
                exported_blobs.add(digest)
                if data is not None:
                    yield ExportedBlob(digest, data), remaining
            remaining -= 1
            yield to_exported_event(stored_event), remaining


def to_exported_event(stored_event: Stored) -> ExportedEvent:
    """Encode an event. Facts that are not valid UTF-8 were damaged; their hash reveals it."""
    fields: dict[str, Any] = {name: getattr(stored_event, name) for name in ExportedEvent.__struct_fields__}
    fields["facts"] = stored_event.facts.decode("utf-8", "replace")
    fields |= {"digest": stored_event.digest.hex(), "hash": stored_event.hash.hex()}
    return ExportedEvent(**fields)


def list_blobs_of_event(stored_event: Stored) -> Iterator[str]:
    """List the blobs that an event refers to: a large body, or the definition of a session."""
    if stored_event.blob is not None:
        yield stored_event.blob
    if isinstance(stored_event.event, SessionStarted) and stored_event.event.definition:
        yield stored_event.event.definition


MAX_EXPORT_FINDINGS: Final = 100

_DECODER: Final[msgspec.json.Decoder[ExportLine]] = msgspec.json.Decoder(ExportLine)


class CheckedExport(msgspec.Struct, frozen=True):
    """A verified export. `erased_count` counts erased bodies, which are no sign of tampering."""

    sessions: tuple[str, ...]
    streams: dict[str, list[Stored]]
    receipts: dict[str, bytes]
    findings: tuple[str, ...]
    events: int
    erased_count: int


class _ExportReader:
    def __init__(self) -> None:
        self.header: ExportHeader | None = None
        self.receipts: dict[str, bytes] = {}
        self.events: dict[str, list[Stored]] = defaultdict(list)
        self.blobs: dict[str, bytes] = {}
        self.findings: list[str] = []
        self.erased = 0

    def read_line(self, number: int, line: bytes) -> None:
        try:
            self._read_record(number, _DECODER.decode(line))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.findings.append(f"Line {number} is not a valid line of an export: {error}.")

    def _read_record(self, number: int, line: ExportLine) -> None:
        match line:
            case ExportHeader() if number == 1:
                self.header = line
            case ExportHeader():
                self.findings.append(f"Line {number} starts another export. Keep each export in a separate file.")
            case ExportedReceipt():
                self.receipts[line.session] = bytes(line.receipt)
            case ExportedBlob():
                self.blobs[line.digest] = line.data
            case ExportedEvent():
                self._order(line.to_stored())

    def _order(self, event: Stored) -> None:
        stream_events = self.events[event.stream]
        if stream_events and event.seq < stream_events[-1].seq:
            self.findings.append(
                f"Event {event.seq} of {event.stream} comes after event {stream_events[-1].seq}: "
                "the lines were reordered."
            )
        stream_events.append(event)

    def check(self) -> None:
        breaks: list[ChainBreak] = []
        gaps: list[StreamGap] = []
        for stream in list(self.events):
            self.events[stream].sort(key=lambda event: event.seq)
            self._walk(stream, breaks, gaps)
        self._check_lengths(gaps)
        positions_by_hash: dict[bytes, list[StreamPosition]] = defaultdict(list)
        for event in self._read_events():
            positions_by_hash[event.hash].append((event.stream, event.seq))
        findings = diagnose(breaks, gaps, lambda digest: positions_by_hash.get(digest, []))
        self.findings += [each.sentence for each in findings]
        if breaks and not self.findings:
            # Report a broken link even if its cause is unknown.
            event = breaks[0].event
            self.findings.append(f"Event {event.seq} of {event.stream} does not match the hash of the event before it.")
        self._check_blobs()

    def _read_events(self) -> Iterable[Stored]:
        return (event for events in self.events.values() for event in events)

    def _walk(self, stream: str, breaks: list[ChainBreak], gaps: list[StreamGap]) -> None:
        previous, last_seq = CHAIN_START, 0
        for event in self.events[stream]:
            if event.seq <= last_seq:
                self.findings.append(f"{stream} has a second event {event.seq} ({event.kind!r}).")
                continue
            if event.seq != last_seq + 1:
                gaps.append(StreamGap(stream, last_seq + 1, event.seq - 1))
            if not is_successor(event, previous, (stream, event.seq)):
                breaks.append(
                    ChainBreak(msgspec.structs.replace(event, body=None), previous, event.seq != last_seq + 1)
                )
            flaw = find_body_flaw(event, erased=event.body is None)
            if flaw is not None:
                self.findings.append(f"The body of event {event.seq} of {stream} {flaw[1]}")
            self.erased += event.erased
            previous, last_seq = event.hash, event.seq

    def _check_lengths(self, gaps: list[StreamGap]) -> None:
        """Compare the streams with their lengths in the first line."""
        if self.header is None:
            self.findings.append("The first line, which describes the export, is missing.")
            return
        if self.header.format != EXPORT_FORMAT:
            self.findings.append(
                f"The export has format {self.header.format}. Use the version of Halter that wrote it."
            )
        for stream in self.events.keys() - self.header.streams.keys():
            self.findings.append(f"The export has events of {stream}, which the first line does not list.")
        for stream, head in self.header.streams.items():
            events = self.events.get(stream, [])
            last_seq = events[-1].seq if events else 0
            if last_seq < head:
                gaps.append(StreamGap(stream, last_seq + 1, head))
            elif last_seq > head:
                self.findings.append(
                    f"{stream} has events up to {last_seq}, but the first line says {head}: events were added."
                )

    def _check_blobs(self) -> None:
        referenced_blobs = {digest for event in self._read_events() for digest in list_blobs_of_event(event)}
        for digest, data in self.blobs.items():
            if sha256(data).hexdigest() != digest:
                self.findings.append(f"Blob {digest} was changed: it does not match its digest.")
            elif digest not in referenced_blobs:
                self.findings.append(f"No event refers to blob {digest}: it was added.")
        self.erased += sum(event.blob is not None and event.blob not in self.blobs for event in self._read_events())


def check_export(lines: Iterable[bytes]) -> CheckedExport:
    """Verify an export: report every sign that it was changed after it was written."""
    reader = _ExportReader()
    for number, line in enumerate(lines, 1):
        reader.read_line(number, line)
    reader.check()
    findings = reader.findings
    listed_findings = findings[:MAX_EXPORT_FINDINGS]
    if len(findings) > len(listed_findings):
        listed_findings.append(f"{len(findings) - len(listed_findings)} more findings are not listed.")
    return CheckedExport(
        sessions=() if reader.header is None else reader.header.sessions,
        streams=dict(reader.events),
        receipts=reader.receipts,
        findings=tuple(listed_findings),
        events=sum(map(len, reader.events.values())),
        erased_count=reader.erased,
    )

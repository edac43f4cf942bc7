"""A session's journal as lines of JSON: all that it takes to check its chains, with no store at hand.

    export    what the file holds: its sessions, and how many events each of their streams has
    receipt   the receipt that was made with it
    blob      a body that is too large for its event, or what defines a session
    event     header, facts, digest and hash; and unless they were erased, body and salt

Facts are the very text that was hashed. Bodies and salts are written as base64, hashes as hexadecimal digits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from halter.core.events import SessionStarted
from halter.core.ids import Digest, StreamId, inbox_stream, session_stream
from halter.core.ports import Stored
from halter.journal.engine import View
from halter.journal.meta import store_id, words
from halter.journal.rebuild import events_of, readable

FORMAT: Final = 1


class Header(msgspec.Struct, frozen=True, tag_field="line", tag="export"):
    """What the file is: the first session is the one that was asked for, the others are its sub-sessions."""

    format: int
    halter: str
    store: str
    exported_at: int
    sessions: tuple[str, ...]
    streams: Mapping[str, int]


class Receipted(msgspec.Struct, frozen=True, tag_field="line", tag="receipt"):
    """The receipt of one of the sessions."""

    session: str
    receipt: msgspec.Raw


class Blob(msgspec.Struct, frozen=True, tag_field="line", tag="blob"):
    """Something that an event names by its digest."""

    digest: str
    data: bytes


class Event(msgspec.Struct, frozen=True, tag_field="line", tag="event", omit_defaults=True):
    """One event as it is kept."""

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

    def stored(self) -> Stored:
        """Read the event back. Raises ValueError where its digests are none."""
        facts = self.facts.encode()
        return Stored(
            stream=StreamId(self.stream),
            seq=self.seq,
            kind=self.kind,
            version=self.version,
            at=self.at,
            generation=self.generation,
            key=self.key,
            blob=None if self.blob is None else Digest(self.blob),
            facts=facts,
            body=self.body,
            salt=self.salt,
            digest=bytes.fromhex(self.digest),
            hash=bytes.fromhex(self.hash),
            event=readable(self.kind, self.version, facts),
        )


Line = Header | Receipted | Blob | Event

MakeReceipt = Callable[[Sequence[Stored], Sequence[Stored]], bytes]
"""Makes a session's receipt, as JSON, of its own events and of its inbox."""


def export(
    view: View, sessions: Sequence[str], make: MakeReceipt, *, version: str, now: int
) -> Iterator[tuple[Line, int]]:
    """Write down sessions as one view of a store shows them; with each line, how many events are still to come."""
    streams = [stream for session in sessions for stream in (session_stream(session), inbox_stream(session))]
    heads = {row["stream"]: int(row["head"]) for stream in streams for row in view.ask("head", {"stream": stream})}
    name = store_id(words(view.ask("meta", {})), "that is exported")
    left = sum(heads.values())
    yield Header(FORMAT, version, name, now, tuple(sessions), heads), left
    named: set[str] = set()
    for session in sessions:
        events = list(events_of(view, session_stream(session)))
        inbox = list(events_of(view, inbox_stream(session)))
        yield Receipted(session, msgspec.Raw(make(events, inbox))), left
        for stored in (*events, *inbox):
            for digest in blobs_of(stored):
                data = None if digest in named else view.get(Digest(digest))
                named.add(digest)
                if data is not None:
                    yield Blob(digest, data), left
            left -= 1
            yield written(stored), left


def written(stored: Stored) -> Event:
    """Write an event down; facts that are no text were damaged, which their hash then tells."""
    return Event(
        stream=stored.stream,
        seq=stored.seq,
        kind=stored.kind,
        version=stored.version,
        at=stored.at,
        generation=stored.generation,
        key=stored.key,
        facts=stored.facts.decode("utf-8", "replace"),
        digest=stored.digest.hex(),
        hash=stored.hash.hex(),
        blob=stored.blob,
        body=stored.body,
        salt=stored.salt,
    )


def blobs_of(stored: Stored) -> Iterator[str]:
    """Name what an event needs beside itself: its body, if that is large, and what defines a session."""
    if stored.blob is not None:
        yield stored.blob
    if isinstance(stored.event, SessionStarted) and stored.event.definition:
        yield stored.event.definition

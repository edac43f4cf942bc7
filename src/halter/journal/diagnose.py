"""What was done to events that do not follow from the ones before them.

A hash that does not fit says only that something is wrong. But an event still carries the hash of the place it was
written for: so if it fits another place, it was moved, repeated or renumbered; and if it fits none, it was edited.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from halter.core.ports import Stored
from halter.journal.chain import START, body_digest, link
from halter.journal.report import Finding, Kind, finding

PLACES: Final = 48
HASHES: Final = 96
TRIES: Final = 300_000
LOOKUPS: Final = 50
"""Bounds of the search: it must end soon, however much was tampered with."""

SHIFTS: Final = tuple(shift for size in range(1, 9) for shift in (size, -size))
"""By how many places events are usually renumbered when some before them are removed or added."""

Place = tuple[str, int]

Copies = Callable[[bytes], Sequence[Place]]
"""Finds where events with a hash stand: a few of the places will do."""


class Break(msgspec.Struct, frozen=True):
    """An event that does not follow from the one that stands before it, whose hash is `previous`."""

    event: Stored
    previous: bytes
    after_gap: bool = False

    @property
    def place(self) -> Place:
        """Tell where the event stands now."""
        return (self.event.stream, self.event.seq)


class Gap(msgspec.Struct, frozen=True):
    """Places of a stream at which no event stands."""

    stream: str
    first: int
    last: int


class Named(msgspec.Struct):
    """What was done to an event, and to how many that follow it."""

    kind: Kind
    place: Place
    origin: Place | None = None
    more: int = 0


def follows(event: Stored, previous: bytes, place: Place) -> bool:
    """Tell whether an event was written for a place, after the event with that hash."""
    header = (*place, event.kind, event.version, event.at, event.generation, event.key, event.blob)
    return link(previous, header, event.facts, event.digest) == event.hash


def flaw_of_body(event: Stored, *, erased: bool) -> tuple[Kind, str] | None:
    """Tell what is wrong with a body: it was changed, is gone although nobody erased it, or is there although."""
    if event.body is None:
        gone = event.digest != b"" and not erased
        return ("body_missing", "is gone, and nothing says that it was erased.") if gone else None
    if event.salt is None or body_digest(event.salt, event.body) != event.digest:
        return "edited", "does not fit its digest: it was changed."
    return ("not_erased", "was erased, but stands there again.") if erased else None


def diagnose(breaks: Sequence[Break], gaps: Sequence[Gap], copies: Copies) -> Iterator[Finding]:
    """Name what was done, once for each run of events that it was done to."""
    search = _Search(breaks, gaps, copies)
    named = search.names()
    origins = {found.origin for found in named}
    for gap in gaps:
        if not (gap.first == gap.last and (gap.stream, gap.first) in origins):
            yield missing(gap)
    for found in named:
        yield finding(found.kind, *found.place, _in_words(found))


def missing(gap: Gap) -> Finding:
    """Say which events are not there."""
    several = f"Events {gap.first} to {gap.last} of {gap.stream} are missing: they were deleted."
    single = f"Event {gap.first} of {gap.stream} is missing: it was deleted."
    return finding("deleted", gap.stream, gap.first, single if gap.first == gap.last else several)


class _Search:
    def __init__(self, breaks: Sequence[Break], gaps: Sequence[Gap], copies: Copies) -> None:
        self._breaks = breaks
        self._copies = copies
        edges = [place for gap in gaps for place in ((gap.stream, gap.first), (gap.stream, gap.last))]
        places = [broken.place for broken in breaks]
        hashes = [START, *(seen for broken in breaks for seen in (broken.previous, broken.event.hash))]
        self._places = list(dict.fromkeys((*_begins(breaks)[: PLACES // 2], *edges, *places)))[:PLACES]
        self._hashes = list(dict.fromkeys(hashes))[:HASHES]
        self._tries = TRIES
        self._lookups = LOOKUPS

    def names(self) -> list[Named]:
        """Name each break, unless it continues the one before it or is only a consequence of another."""
        named: list[Named] = []
        run: tuple[Place, Place] | None = None
        for broken in self._breaks:
            onward = _onward(run, broken)
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
        return named

    def _name(self, broken: Break, before: Named | None) -> Named | None:
        origin = self._origin(broken)
        if origin == broken.place:
            return None
        copied = self._copied_from(broken)
        if copied is not None:
            return Named("duplicated", broken.place, copied)
        if origin is None:
            return None if broken.after_gap else Named("edited", broken.place)
        if origin[0] != broken.place[0]:
            return Named("moved", broken.place, origin)
        if before is not None and before.kind == "edited" and before.place == (origin[0], broken.place[1] - 1):
            before.kind = "deleted" if origin[1] > broken.place[1] else "inserted"
            before.origin = origin
            return before
        return Named("reordered", broken.place, origin)

    def _origin(self, broken: Break) -> Place | None:
        """Find the place that the event was written for."""
        stream, seq = broken.place
        nearby = [((stream, seq + shift), broken.previous) for shift in SHIFTS]
        own = [(broken.place, previous) for previous in self._hashes]
        for place, previous in (*own, *nearby, *((at, after) for at in self._places for after in self._hashes)):
            self._tries -= 1
            if self._tries < 0:
                return None
            if follows(broken.event, previous, place):
                return place
        return None

    def _copied_from(self, broken: Break) -> Place | None:
        """Find another event with the same hash: one of the two is a copy."""
        self._lookups -= 1
        if self._lookups < 0:
            return None
        others = [place for place in self._copies(broken.event.hash) if place != broken.place]
        return others[0] if others else None


def _begins(breaks: Sequence[Break]) -> list[Place]:
    """List where runs of broken events begin: whoever finds where the first of a run came from has found them all."""
    places = [broken.place for broken in breaks]
    return [
        place for place, (stream, seq) in zip(places, [("", 0), *places], strict=False) if place != (stream, seq + 1)
    ]


def _onward(run: tuple[Place, Place] | None, broken: Break) -> Place | None:
    """Tell the place that the event was written for, if it continues what was done to the one before it."""
    if run is None:
        return None
    (stream, seq), (origin, number) = run
    follower = (origin, number + 1)
    continues = broken.place == (stream, seq + 1) and follows(broken.event, broken.previous, follower)
    return follower if continues else None


def _in_words(found: Named) -> str:
    (stream, seq), origin = found.place, found.origin
    what = f"Event {seq} of {stream}"
    more = f", and so were {_events(found.more)} after it" if found.more else ""
    match found.kind, origin:
        case "deleted", (_, number):
            return (
                f"Somebody deleted {_events(number - seq - 1)} before event {seq} of {stream} and renumbered the rest."
            )
        case "inserted", (_, number):
            return (
                f"Somebody inserted {_events(seq + 1 - number)} before event {seq} of {stream} and renumbered the rest."
            )
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


def _events(count: int) -> str:
    return "1 event" if count == 1 else f"{count} events"

"""Whether a store goes on from where its newest checkpoints left it.

A copy that was put back is whole in itself: its chains hold, and its caps, halts and denials are those of an earlier
day. Only what is kept outside of the store shows that there was more. The events that the newest checkpoints name are
looked up when a store is opened: a few indexed reads, however large the store is.

Every event is checkpointed after its commit is durable. So a store may be ahead of its checkpoints, never behind.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from halter.core.clock import SECOND
from halter.core.events import StoreAccepted
from halter.core.ids import FLEET
from halter.core.money import shown
from halter.core.text import counted
from halter.journal.checkpoints import DENIALS, HALTS, USD, Checkpoint, checkpoint_file, newest_first, parsed
from halter.journal.keys import is_signed
from halter.journal.open import file_of, postgres_address

Ask = Callable[[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""Runs a named query of a store."""

LOOKED_BACK: Final = 64
"""So many checkpoints in a row that a store fits mean that it fits all before them.

Each process writes down all that it committed. After a checkpoint of an event that is missing, another process can
therefore add only one line that knows nothing later. So this must exceed the number of processes that share a file.
"""

NAMED: Final = 3
"""How many streams a sentence names; the others are counted."""

PLACES: Final = "places"


class Gap(msgspec.Struct, frozen=True):
    """A stream of which checkpoints know more than the store has: it fits them up to `fits`, they know `known`."""

    stream: str
    known: int
    fits: int


class Doubt(msgspec.Struct, frozen=True):
    """Why nothing may run on a store: what its checkpoints knew at `at`, and it does not. It `ends` at its last event.

    `lost` counts what those checkpoints vouch for: micro-dollars, halts, denials.
    """

    kind: Literal["older", "forked", "replaced", "gone"]
    place: str
    store: str
    at: int
    ends: int = 0
    gaps: tuple[Gap, ...] = ()
    lost: Mapping[str, int] = {}

    @property
    def events(self) -> int:
        """How many events are known to be missing."""
        return sum(gap.known - gap.fits for gap in self.gaps)

    @property
    def given_up(self) -> Mapping[str, int]:
        """What a person gives up by going on: of each stream, all that checkpoints know after a number."""
        return {gap.stream: gap.fits for gap in self.gaps}

    def sentence(self) -> str:
        """Say what is missing, and what to do."""
        put_back = "Put it back, or begin" if self.kind == "gone" else "Put the newer one back, or go on with this one,"
        without = " a new one:" if self.kind == "gone" else " without what is missing:"
        return f"{self.lacks()} Nothing runs on it until a person decides. {put_back}{without} halter store accept"

    def lacks(self) -> str:
        """Say what is missing."""
        when = _utc(self.at)
        match self.kind:
            case "gone":
                return (
                    f"The store {self.place} is gone. It was last checkpointed at {when} (id {self.store}), and a new "
                    "one would know nothing of what was spent, halted and denied in it."
                )
            case "replaced":
                return (
                    f"The store {self.place} is not the one that was used here before. That one was last checkpointed "
                    f"at {when} (id {self.store}), and what was spent, halted and denied in it is not in this one."
                )
            case "forked":
                return (
                    f"The store {self.place} has another history than its checkpoints: {self._missing(when)}, and "
                    f"others stand in their place.{self._lost()}"
                )
            case "older":
                ends = f"ends at {_utc(self.ends)}" if self.ends else "is empty"
                return (
                    f"The store {self.place} is older than its checkpoints: it {ends}, and {self._missing(when)}."
                    f"{self._lost()}"
                )

    def _missing(self, when: str) -> str:
        streams = sorted(self.gaps, key=lambda gap: (gap.stream != FLEET, gap.stream))
        named = [f"{gap.known - gap.fits} of {gap.stream}" for gap in streams[:NAMED]]
        if len(streams) > NAMED:
            named.append(f"others of {counted(len(streams) - NAMED, 'more stream')}")
        verb = "is" if self.events == 1 else "are"
        return f"{counted(self.events, 'event')} until {when} {verb} missing ({', '.join(named)})"

    def _lost(self) -> str:
        found = [
            *([f"{shown(self.lost[USD])} of spending"] if self.lost.get(USD) else []),
            *([counted(self.lost[HALTS], "halt")] if self.lost.get(HALTS) else []),
            *([counted(self.lost[DENIALS], "denial")] if self.lost.get(DENIALS) else []),
        ]
        return f" Missing with them: up to {', '.join(found)}." if found else ""


class Accepted(msgspec.Struct, frozen=True):
    """A person goes on with a store as it is, and the checkpoints here do not say so yet: what is to be given up."""

    given_up: Mapping[str, int]


class Continuity:
    """What a folder of checkpoints knows of the store that is used at one place."""

    def __init__(self, folder: Path, place: str, trusted: Collection[str] = ()) -> None:
        self._folder = folder
        self._place = place
        self._trusted = trusted
        self._pointer = folder / PLACES / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"

    def gone(self) -> Doubt | None:
        """Tell which store was used at this place, where now there is none."""
        known = self._known()
        return self._other("gone", known) if known else None

    def look(self, ask: Ask, store: str) -> Doubt | Accepted | None:
        """Compare a store with its newest checkpoints; None if it goes on from there, or there are none."""
        known = self._known()
        doubt = self._other("replaced", known) if known not in {"", store} else self._behind(ask, store)
        if doubt is None:
            return None
        said = ask("events_of_kind", {"stream": FLEET, "kind": StoreAccepted.KIND, "limit": 1})
        if said and said[0]["at"] > doubt.at:
            return Accepted(doubt.given_up)
        return doubt

    def remember(self, store: str) -> None:
        """Note which store is used at this place. Where that cannot be written, a missing store is not missed."""
        if self._known() == store:
            return
        with suppress(OSError):
            self._pointer.parent.mkdir(mode=0o700, exist_ok=True)
            draft = self._pointer.with_suffix(f".{os.getpid()}")
            draft.write_bytes(msgspec.json.encode({"place": self._place, "store": store}))
            draft.replace(self._pointer)

    def _known(self) -> str:
        try:
            return str(msgspec.json.decode(self._pointer.read_bytes())["store"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _other(self, kind: Literal["replaced", "gone"], known: str) -> Doubt | None:
        """Miss a store that was used here, unless nothing of it was ever checkpointed."""
        newest = next(filter(self._vouches, self._checkpoints(known)), None)
        return None if newest is None else Doubt(kind, self._place, known, newest.at)

    def _behind(self, ask: Ask, store: str) -> Doubt | None:
        misfits = list(unknown_to(ask, self._checkpoints(store), self._vouches))
        if not misfits:
            return None
        gaps, forked = gaps_of(ask, misfits)
        lost: Counter[str] = Counter()
        for checkpoint in misfits:
            lost.update({} if checkpoint.tally is msgspec.UNSET else checkpoint.tally)
        ends = max((row["at"] for row in ask("heads", {})), default=0)
        at = max(checkpoint.at for checkpoint in misfits)
        return Doubt("forked" if forked else "older", self._place, store, at, ends, gaps, dict(lost))

    def _checkpoints(self, store: str) -> Iterator[Checkpoint]:
        for line in newest_first(checkpoint_file(self._folder, store)):
            checkpoint = parsed(line)
            if checkpoint is not None and checkpoint.store == store:
                yield checkpoint

    def _vouches(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint counts. It is asked of few: a line that a store fits changes nothing."""
        if self._trusted and checkpoint.key not in self._trusted:
            return False
        return is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key)


def unknown_to(ask: Ask, newest: Iterable[Checkpoint], vouches: Callable[[Checkpoint], bool]) -> Iterator[Checkpoint]:
    """Go back over checkpoints, and give those that name what a store does not have. What was accepted ends it."""
    fitting = 0
    for checkpoint in newest:
        if _fits(ask, checkpoint):
            fitting += 1
        elif vouches(checkpoint):
            fitting = 0
            yield checkpoint
        if fitting == LOOKED_BACK or (checkpoint.accepted is not msgspec.UNSET and vouches(checkpoint)):
            return


def _fits(ask: Ask, checkpoint: Checkpoint) -> bool:
    """Tell whether a store has what a checkpoint names. Who has the event that was committed last has all of them."""
    heads, last = checkpoint.heads, checkpoint.last
    streams = [last] if last is not msgspec.UNSET and last in heads else [*heads]
    return all(_has(ask, stream, *heads[stream]) for stream in streams)


def _has(ask: Ask, stream: str, seq: int, digest: str) -> bool:
    return any(bytes(row["hash"]).hex() == digest for row in ask("hash_of", {"stream": stream, "seq": seq}))


def gaps_of(ask: Ask, misfits: Iterable[Checkpoint]) -> tuple[tuple[Gap, ...], bool]:
    """Tell of each stream how far it fits, and whether other events stand where checkpoints know some."""
    wrong: defaultdict[str, list[int]] = defaultdict(list)
    for checkpoint in misfits:
        for stream, (seq, digest) in checkpoint.heads.items():
            if not _has(ask, stream, seq, digest):
                wrong[stream].append(seq)
    gaps: list[Gap] = []
    forked = False
    for stream, seqs in sorted(wrong.items()):
        here = next((row["head"] for row in ask("head", {"stream": stream})), 0)
        forked = forked or here >= min(seqs)
        gaps.append(Gap(stream, max(seqs), min(here, min(seqs) - 1)))
    return tuple(gaps), forked


def place_of(url: str) -> str:
    """Name the place of a store, the same for all ways to write it and without a password; none is in memory only."""
    path = file_of(url)
    if path is not None:
        return os.path.realpath(path)
    if not url.lower().startswith(("postgresql:", "postgres:")):
        return ""
    return postgres_address(url).whereabouts()


def _utc(at: int) -> str:
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

"""What a disk may hold if the power goes while SQLite works on a database.

From the log of what SQLite asked of the disk follow the images: for each point in it, contents that the disk
may be left with. What was synced is certain; what came after may be there, be missing, be cut off, or have
overtaken what came before. Nothing here touches a disk, but for `write_out`.
"""

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, TypeGuard

from halter_drills.wal import ends_commit, pages

File = Literal["db", "wal", "journal"]
Kind = Literal["all", "none", "torn", "subset", "prefix"]

SUFFIXES: Mapping[File, str] = {"db": "", "wal": "-wal", "journal": "-journal"}
ACKNOWLEDGED = "acknowledged"
SECTOR = 512
"""The bytes that a disk writes wholly or not at all."""


@dataclass(frozen=True, slots=True)
class Wrote:
    file: File
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncated:
    file: File
    size: int


@dataclass(frozen=True, slots=True)
class Deleted:
    file: File


@dataclass(frozen=True, slots=True)
class Synced:
    """Of a file, all of it is certain from here on; of the folder, all deletions are."""

    file: File | Literal["folder"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A note of the drill itself; one that begins with "acknowledged" vouches for all commits before it."""

    label: str


Change = Wrote | Truncated | Deleted
Operation = Change | Synced | Marked
Drawn = tuple[Kind, dict[int, Change]]
Seen = set[tuple[bool, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Log:
    base: Mapping[File, bytes]
    """The files when the recorder was put in front of them; they count as synced."""
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    point: int
    """The number of operations after which the commit was written, though perhaps not synced."""
    digest: bytes
    label: str = ""
    """The acknowledgment that came right after it, if any did before the next commit."""


@dataclass(frozen=True, slots=True)
class Image:
    point: int
    """The number of operations that had happened when the power went."""
    moment: str
    kind: Kind
    """Which of the changes that were not synced have reached the disk."""
    files: Mapping[File, bytes]
    """All three; a file that does not exist is empty, which is the same to SQLite."""
    acknowledged: int
    """The commits that somebody has been promised: the image must hold at least these."""
    written: int
    """The commits that SQLite had written, synced or not: the image cannot hold more."""

    @property
    def blank(self) -> bool:
        """Nothing had been committed yet, so that the image proves nothing."""
        return self.written == 0


def write_out(files: Mapping[File, bytes], path: Path) -> None:
    """Leaves the files of an image, and no others, at a path where SQLite can open them."""
    Path(f"{path}-shm").unlink(missing_ok=True)
    for file, suffix in SUFFIXES.items():
        place = Path(f"{path}{suffix}")
        place.unlink(missing_ok=True)
        if files[file]:
            place.write_bytes(files[file])


def commits(log: Log) -> tuple[Commit, ...]:
    """The states of the database in their order: the one it started with, and then one for each commit."""
    held: dict[File, bytearray] = {file: bytearray(log.base[file]) for file in SUFFIXES}
    states = [Commit(0, _digest(held))]
    for point, operation in enumerate(log.operations, 1):
        if isinstance(operation, Change):
            _apply(held[operation.file], operation)
            if _may_commit(operation, held["wal"]) and (digest := _digest(held)) != states[-1].digest:
                states.append(Commit(point, digest))
        elif _acknowledges(operation) and not states[-1].label:
            states[-1] = replace(states[-1], label=operation.label)
    return tuple(states)


def images(log: Log, seed: int, per_point: int = 4) -> Iterator[Image]:
    """At every point of the log, up to so many contents of the disk, and the same ones for the same seed.

    The points lie before and after each operation, and so within every commit and every checkpoint. What has
    been told already, with as many acknowledgments and since the same sync, is not told again.
    """
    chance, disk = random.Random(seed), _Disk(log.base)
    points = [commit.point for commit in commits(log)[1:]]
    acknowledged, seen = 0, Seen()
    for point, (before, after) in enumerate(pairwise((None, *log.operations, None))):
        moment = _moment(before, after, len(disk.certain["wal"]))
        written = bisect_right(points, point)
        if before is not None:
            disk.take(point, before)
            acknowledged = written if _acknowledges(before) else acknowledged
            seen = Seen() if isinstance(before, Synced) or _acknowledges(before) else seen
        drawn = _unseen(_survivors(disk.unsynced(), chance, per_point), seen)
        for kind, kept in islice(drawn, per_point):
            yield Image(point, moment, kind, disk.files(kept), acknowledged, written)


class _Disk:
    """The files on the way through a log: what is certain of each, and the numbered changes since then."""

    def __init__(self, base: Mapping[File, bytes]) -> None:
        self.certain = dict(base)
        self._pending: dict[File, dict[int, Change]] = {file: {} for file in SUFFIXES}

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Marked():
                pass
            case Synced(place):
                if place == "folder":
                    for file in SUFFIXES:
                        self._settle(file, self._last_deletion(file))
                else:
                    self._settle(place, number)
            case Wrote() | Truncated() | Deleted():
                self._pending[operation.file][number] = operation

    def unsynced(self) -> dict[int, Change]:
        return dict(sorted(item for pending in self._pending.values() for item in pending.items()))

    def files(self, kept: Mapping[int, Change]) -> dict[File, bytes]:
        return {file: _applied(self.certain[file], _reached(pending, kept)) for file, pending in self._pending.items()}

    def _last_deletion(self, file: File) -> int:
        deletions = (number for number, change in self._pending[file].items() if isinstance(change, Deleted))
        return max(deletions, default=0)

    def _settle(self, file: File, until: int) -> None:
        pending = self._pending[file]
        settled = [change for number, change in pending.items() if number <= until]
        self.certain[file] = _applied(self.certain[file], settled)
        self._pending[file] = {number: change for number, change in pending.items() if number > until}


def _survivors(unsynced: Mapping[int, Change], chance: random.Random, draws: int) -> Iterator[Drawn]:
    """Ways in which changes reach the disk or not, the telling ones first."""
    yield "all", dict(unsynced)
    if not unsynced:
        return
    yield "none", {}
    last = max(unsynced)
    if torn := _torn(unsynced[last], chance):
        yield "torn", {**unsynced, last: torn}
    for _ in range(draws):
        yield "subset", {number: change for number, change in unsynced.items() if chance.random() < 1 / 2}
        yield "prefix", dict(islice(unsynced.items(), chance.randrange(len(unsynced))))


def _torn(change: Change, chance: random.Random) -> Wrote | None:
    """The write cut off where a sector of the disk ends, if one ends within it."""
    if not isinstance(change, Wrote):
        return None
    cuts = range(SECTOR - change.offset % SECTOR, len(change.data), SECTOR)
    return replace(change, data=change.data[: chance.choice(cuts)]) if cuts else None


def _reached(pending: Mapping[int, Change], kept: Mapping[int, Change]) -> Iterator[Change]:
    """The changes that one file shows. Where a deletion is missing, the folder still has the old file."""
    for number, change in pending.items():
        if number in kept:
            yield kept[number]
        elif isinstance(change, Deleted):
            return


def _unseen(drawn: Iterable[Drawn], seen: Seen) -> Iterator[Drawn]:
    for kind, kept in drawn:
        key = (kind == "torn", tuple(kept))
        if key not in seen:
            seen.add(key)
            yield kind, kept


def _applied(content: bytes, changes: Iterable[Change]) -> bytes:
    held: bytearray | None = None
    for change in changes:
        held = bytearray(content) if held is None else held
        _apply(held, change)
    return content if held is None else bytes(held)


def _apply(held: bytearray, change: Change) -> None:
    match change:
        case Wrote(_, offset, data):
            held.extend(bytes(max(0, offset - len(held))))
            held[offset : offset + len(data)] = data
        case Truncated(_, size):
            held[size:] = bytes(max(0, size - len(held)))
        case Deleted():
            held.clear()


def _digest(held: Mapping[File, bytearray]) -> bytes:
    return pages(bytes(held["db"]), bytes(held["wal"]), bytes(held["journal"])).digest


def _may_commit(change: Change, wal: bytearray) -> bool:
    """Whether the change may have made a commit whole; told roughly, since looking closely is slow."""
    match change:
        case Wrote("wal", offset, data):
            return ends_commit(wal, offset + len(data) - 1)
        case Wrote("journal", 0, data):
            return data.startswith(b"\0")
        case Wrote():
            return False
        case Truncated() | Deleted():
            return change.file == "journal"


def _acknowledges(operation: Operation) -> TypeGuard[Marked]:
    return isinstance(operation, Marked) and operation.label.startswith(ACKNOWLEDGED)


def _moment(before: Operation | None, after: Operation | None, old_wal: int) -> str:
    match before, after:
        case Marked(), _:
            return "at a mark"
        case _, Synced(file):
            return f"before the {file} sync"
        case Synced(file), _:
            return f"after the {file} sync"
        case Wrote("wal", offset), _ if offset < old_wal:
            return "overwriting the wal"
        case ((Wrote(file) | Truncated(file)), _):
            return f"writing the {file}"
        case Deleted(file), _:
            return f"after the {file} deletion"
        case None, _:
            return "at the start"

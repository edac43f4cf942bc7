"""What a correct recovery must find in the files of a SQLite database, worked out without SQLite.

The file formats promise it exactly: a hot rollback journal is played back first, and then the frames of the
WAL count up to the last commit of its valid beginning. So a drill knows which commits an image of a disk
holds before SQLite opens it, and SQLite does not get to judge itself.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
WAL_MAGIC = 0x377F0682
WAL_VERSION = 3007000
WAL_HEADER = struct.Struct(">8I")
FRAME_HEADER = struct.Struct(">6I")
JOURNAL_HEADER = struct.Struct(">8s5I")
UNCOUNTED = 0xFFFFFFFF
"""Stands for as many records as a journal holds, where it was written without syncs."""
PAGE_SIZES = tuple(512 << shift for shift in range(8))

Sums = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Frame:
    page: int
    size: int
    """The pages of the database after the commit that this frame ends, or 0 when it ends none."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Wal:
    page_size: int
    frames: tuple[Frame, ...]
    """The valid ones: from the first frame on, while salts and cumulative checksums agree."""

    @property
    def commits(self) -> int:
        return sum(frame.size > 0 for frame in self.frames)

    @property
    def committed(self) -> tuple[Frame, ...]:
        ends = (number for number, frame in enumerate(self.frames, 1) if frame.size)
        return self.frames[: max(ends, default=0)]


@dataclass(frozen=True, slots=True)
class Content:
    """What a reader of the database sees: its size in pages, and each page by its number."""

    size: int
    pages: Mapping[int, bytes]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(self.pages[number] for number in range(1, self.size + 1))).digest()


def committed(found: Content, states: Sequence[bytes]) -> int | None:
    """The number of the one state that was found, from the digests of all states in their order.

    None means that the content is no state or could be several, and either is a violation.
    """
    digest = found.digest
    return states.index(digest) if states.count(digest) == 1 else None


def pages(db: bytes, wal: bytes = b"", journal: bytes = b"") -> Content:
    db = rolled_back(db, journal)
    if not db:  # SQLite throws away the WAL of an empty database.
        return Content(0, {})
    log = parse(wal)
    frames = log.committed
    step = log.page_size if frames else _page_size(db)
    size = frames[-1].size if frames else _size(db, step)
    read = {number: db[(number - 1) * step : number * step].ljust(step, b"\0") for number in range(1, size + 1)}
    return Content(size, read | {frame.page: frame.data for frame in frames if frame.page <= size})


def parse(wal: bytes) -> Wal:
    if len(wal) < WAL_HEADER.size:
        return Wal(0, ())
    magic, version, page_size, _, salt, pepper, first, second = WAL_HEADER.unpack_from(wal)
    big_endian = magic == WAL_MAGIC | 1
    sums = _checksum((0, 0), wal[:24], big_endian=big_endian)
    known = magic | 1 == WAL_MAGIC | 1 and version == WAL_VERSION and page_size in PAGE_SIZES
    if not known or sums != (first, second):
        return Wal(0, ())
    return Wal(page_size, tuple(_frames(wal, page_size, (salt, pepper), sums, big_endian=big_endian)))


def ends_commit(wal: bytes | bytearray, offset: int) -> bool:
    """Whether the frame around an offset says that it ends a commit; its checksum is not looked at."""
    if offset < WAL_HEADER.size or len(wal) < WAL_HEADER.size:
        return False
    step = FRAME_HEADER.size + WAL_HEADER.unpack_from(wal)[2]
    start = offset - (offset - WAL_HEADER.size) % step
    return len(wal) >= start + step and FRAME_HEADER.unpack_from(wal, start)[1] > 0


def rolled_back(db: bytes, journal: bytes) -> bytes:
    """The database file after the playback of its rollback journal, if that is hot."""
    if not db or len(journal) < JOURNAL_HEADER.size or not journal.startswith(JOURNAL_MAGIC):
        return db
    _, _, _, size, sector, step = JOURNAL_HEADER.unpack_from(journal)
    if step not in PAGE_SIZES or not JOURNAL_HEADER.size <= sector <= len(journal):
        return db
    restored = bytearray(db[: size * step].ljust(size * step, b"\0"))
    for page, data in _originals(journal, sector, step):
        if page <= size:
            restored[(page - 1) * step : page * step] = data
    return bytes(restored)


def _frames(wal: bytes, page_size: int, salts: Sums, sums: Sums, *, big_endian: bool) -> Iterator[Frame]:
    step = FRAME_HEADER.size + page_size
    for start in range(WAL_HEADER.size, len(wal) - step + 1, step):
        page, size, salt, pepper, first, second = FRAME_HEADER.unpack_from(wal, start)
        data = wal[start + FRAME_HEADER.size : start + step]
        if (salt, pepper) != salts or not page:
            return
        sums = _checksum(sums, wal[start : start + 8] + data, big_endian=big_endian)
        if sums != (first, second):
            return
        yield Frame(page, size, data)


# Thousands of images of one disk share almost all their frames, and plain Python takes a tenth of a
# millisecond for each. 4096 frames are more than a WAL grows to with default checkpoints, and take 16 MiB.
@lru_cache(maxsize=4096)
def _checksum(sums: Sums, data: bytes, *, big_endian: bool) -> Sums:
    first, second = sums
    words = struct.unpack(f"{'>' if big_endian else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _originals(journal: bytes, sector: int, step: int) -> Iterator[tuple[int, bytes]]:
    """The pages as they were, from each header on, until a record is cut off or its checksum is wrong."""
    start = 0
    while start + sector <= len(journal) and journal.startswith(JOURNAL_MAGIC, start):
        _, count, nonce, *_ = JOURNAL_HEADER.unpack_from(journal, start)
        start += sector
        if count == UNCOUNTED:
            count = (len(journal) - start) // (step + 8)
        for _ in range(count):
            page, data = int.from_bytes(journal[start : start + 4]), journal[start + 4 : start + 4 + step]
            check = (nonce + sum(data[step - 200 : 0 : -200])) & 0xFFFFFFFF
            if not page or journal[start + 4 + step : start + 8 + step] != check.to_bytes(4):
                return
            yield page, data
            start += step + 8
        start = -(-start // sector) * sector


def _page_size(db: bytes) -> int:
    """As the header of the file says. A header that is no header becomes a content that equals no state."""
    (size,) = struct.unpack_from(">H", db.ljust(18, b"\0"), 16)
    return {1: 65536}.get(size, size if size in PAGE_SIZES else 4096)


def _size(db: bytes, step: int) -> int:
    """The pages that the header counts, if it vouches for a possible number, else those that the file has."""
    header = db[:100].ljust(100, b"\0")
    held, counted = -(-len(db) // step), int.from_bytes(header[28:32])
    return counted if 0 < counted <= held and header[24:28] == header[92:96] else held

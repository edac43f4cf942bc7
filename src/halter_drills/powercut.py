"""After a power cut at any moment, the store has every acknowledged commit and no partial one.

The workload runs once on a store whose every write and sync is recorded. The drill computes the possible contents of
the disk, and opens each with SQLite. An oracle that knows the file formats computes which commits each must have.
"""

import asyncio
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Final

import msgspec

from halter.core.clock import SystemClock
from halter.core.ids import SortableIds
from halter.journal.sqlite import SqliteEngine
from halter.journal.sqlite_connection import ForkSafeConnection, open_connection
from halter.journal.store import JournalStore
from halter_drills.disk import (
    ACKNOWLEDGED,
    Commit,
    Image,
    Log,
    Recorder,
    commits,
    find_committed,
    images,
    pages,
    write_out,
)
from halter_drills.drill import IN_MEMORY, Drill, DrillResult, Setting, examine, own_store, result, sqlite_file
from halter_drills.faults import TABLES
from halter_drills.workload import AckedEvent, Step, Workload, plan

SESSION: Final = "drill"
STEPS_WITH_TEETH: Final = 20
MAX_IMAGES_PER_POINT: Final = 4
MIN_IMAGES_PER_POINT: Final = 3
CHECKPOINT_PAGES: Final = 40
"""A low number, so that the WAL is checkpointed and restarted many times in one session."""

MAX_BLANK_SHARE: Final = 0.02
"""Largest share of images before the first commit, which prove nothing."""

PROGRESS_INTERVAL: Final = 100

EVENTS: Final = "SELECT stream, seq, hash FROM events"
EVERYTHING: Final = tuple(f"SELECT * FROM {table}" for table in (*TABLES, "meta", "sqlite_master"))  # noqa: S608  names are constants

Event = tuple[str, int, bytes]
"""Stream, sequence number and hash."""


class Promise(msgspec.Struct, frozen=True):
    """The content of the store when a commit was acknowledged: all events, and a digest of all rows."""

    events: frozenset[Event]
    content: bytes


@dataclass(slots=True)
class Notes:
    """Records every acknowledgment while the session runs."""

    recorder: Recorder
    reader: sqlite3.Connection
    promises: dict[str, Promise] = field(default_factory=dict[str, Promise])

    def record(self, acked_events: Sequence[AckedEvent]) -> None:
        label = f"{ACKNOWLEDGED} {len(self.promises)}"
        self.recorder.mark(label)
        current = promise(self.reader)
        missing = {(stored.stream, stored.seq, stored.hash) for stored, _ in acked_events} - current.events
        self.promises[label] = Promise(current.events | missing, current.content)


def promise(connection: sqlite3.Connection) -> Promise:
    content = sha256()
    for statement in EVERYTHING:
        content.update(msgspec.msgpack.encode(connection.execute(statement).fetchall()))
    return Promise(frozenset(connection.execute(EVENTS)), content.digest())


class Recording(msgspec.Struct, frozen=True):
    """One session on a recorded disk: its operations, states and promises."""

    log: Log
    states: tuple[Commit, ...]
    promises: dict[str, Promise]


def record(path: Path, *, teeth: bool = False) -> Recording:
    """Run the session on an existing store, so that only its own commits are recorded.

    With teeth, SQLite never syncs: nothing is certain after the first write, and part of the session suffices.
    """
    steps = plan(SESSION)[:STEPS_WITH_TEETH] if teeth else plan(SESSION)
    clock = SystemClock()
    engine = partial(SqliteEngine, str(path), now=clock.now, new_id=SortableIds(clock.now).make)
    engine().close()
    with Recorder(path) as recorder:

        def connect(_: str) -> ForkSafeConnection:
            connection = open_connection(recorder.uri, uri=True)
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            if teeth:
                connection.execute("PRAGMA synchronous = OFF")
            return connection

        with closing(sqlite3.connect(recorder.uri, uri=True)) as reader:
            notes = Notes(recorder, reader, {"": promise(reader)})
            asyncio.run(_session(JournalStore(engine(connect=connect), inline=True), notes, steps))
        log = recorder.log()
    return Recording(log, commits(log), notes.promises)


async def _session(store: JournalStore, notes: Notes, steps: Sequence[Step]) -> None:
    await Workload(store, SystemClock(), "worker", SESSION, notes.record).run(steps)
    await store.close()


def draw_images(log: Log, image_count: int | None) -> Iterator[Image]:
    """Draw images at every point of the log, or `image_count` images spread over the log."""
    if image_count is None:
        yield from images(log, seed=1, per_point=MAX_IMAGES_PER_POINT)
        return
    # An odd stride: the kinds of images come in the same order at each point.
    stride = len(log.operations) * MIN_IMAGES_PER_POINT // image_count | 1
    passes = (islice(images(log, seed, MAX_IMAGES_PER_POINT), stride // 2, None, stride) for seed in count(1))
    yield from islice((image for each in passes for image in each), image_count)


class ImageExaminer:
    """Opens images with SQLite, and compares their content with the promises."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self._states = recording.states
        self._digests = [state.digest for state in recording.states]
        self._promises = recording.promises
        self._path = folder / "image.db"
        self.recovered: set[int] = set()
        """Commits to which images were recovered. The first image of each is verified."""

    def examine(self, image: Image) -> list[str]:
        where = f"The image {image.moment} ({image.kind}, after {image.point} operations)"
        number = find_committed(pages(**image.files), self._digests)
        if number is None:
            return [f"{where} has a state that was never committed."]
        wrong = list(self._open_image(image, number))
        if number < image.acknowledged:
            wrong.append(f"has lost {image.acknowledged - number} acknowledged commits.")
        if number > image.written:
            wrong.append("has commits that were not written yet.")
        return [f"{where} {text}" for text in wrong]

    def _open_image(self, image: Image, number: int) -> Iterator[str]:
        write_out(image.files, self._path)
        try:
            recovered_promise, integrity = _recover(self._path)
        except sqlite3.DatabaseError as error:
            yield f"cannot be opened ({error})."
            return
        if integrity != "ok":
            yield f"is damaged ({integrity})."
        lost = self._find_promise(image.acknowledged).events - recovered_promise.events
        if lost:
            yield f"has lost {len(lost)} acknowledged events, such as event {min(lost)[1]} of {min(lost)[0]}."
        if recovered_promise.content != self._find_promise(number).content:
            yield f"differs from the store after commit {number}."
        elif number not in self.recovered:
            self.recovered.add(number)
            yield from asyncio.run(_verify(self._path))

    def _find_promise(self, number: int) -> Promise:
        return self._promises[self._states[number].label]


def _recover(path: Path) -> tuple[Promise, str]:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        [(integrity,)] = connection.execute("PRAGMA integrity_check(1)").fetchall()
        return promise(connection), integrity


async def _verify(path: Path) -> list[str]:
    clock = SystemClock()
    store = JournalStore(SqliteEngine(str(path), now=clock.now, new_id=SortableIds(clock.now).make), inline=True)
    try:
        return await examine(store)
    finally:
        await store.close()


@dataclass(slots=True)
class Tally:
    """Counts images by the moment of the power cut, and by the changes that reached the disk."""

    moments: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[str] = field(default_factory=Counter[str])
    blank: int = 0

    def count(self, image: Image) -> None:
        self.moments[image.moment] += 1
        self.kinds[image.kind] += 1
        self.blank += image.blank


def run(setting: Setting) -> DrillResult:
    memory_folder = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None  # Thousands of images need no disk.
    with own_store(setting) as workspace, tempfile.TemporaryDirectory(dir=memory_folder or workspace.folder) as folder:
        recording = record(sqlite_file(workspace.url), teeth=setting.teeth)
        examiner = ImageExaminer(recording, Path(folder))
        expected_images = setting.seeds or len(recording.log.operations) * MIN_IMAGES_PER_POINT
        wrong: list[str] = []
        tally = Tally()
        for number, image in enumerate(draw_images(recording.log, setting.seeds), 1):
            wrong += examiner.examine(image)
            tally.count(image)
            if number % PROGRESS_INTERVAL == 0:
                setting.progress(number, max(number, expected_images), image.moment)
    images = tally.moments.total()
    setting.progress(images, images, "all opened")
    if tally.blank > MAX_BLANK_SHARE * images:
        wrong.append(f"{tally.blank} of {images} images are from before the first commit and prove nothing.")
    counts = {
        "images": images,
        "images_that_prove_nothing": tally.blank,
        "commits": len(recording.states) - 1,
        "commits_recovered_to": len(examiner.recovered - {0}),
        "operations": len(recording.log.operations),
        "moments": dict(tally.moments.most_common()),
        "kinds": dict(tally.kinds.most_common()),
    }
    return result("powercut", workspace.kind, images, wrong, counts)


DRILL: Final = Drill(
    "powercut", "After a power cut at any moment, the store has exactly the committed data.", run, stores=("sqlite",)
)

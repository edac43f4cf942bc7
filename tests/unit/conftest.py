"""A desk for those who write and read checkpoints."""

import os
from pathlib import Path

import msgspec
import pytest

from halter.core.clock import SECOND
from halter.core.events import CapChanged
from halter.core.ids import StreamId
from halter.core.ports import Stored
from halter.journal.checkpoint_log import CheckpointLog, read_checkpoint_log
from halter.journal.checkpoints import (
    Checkpoint,
    Checkpointer,
    CheckpointIo,
    checkpoint_file,
    public_key_path,
    read_public_keys,
)

STORE = "store"


class Desk:
    """A folder, a key and a clock for checkpointers of one store."""

    store_id = STORE

    def __init__(self, root: Path) -> None:
        self.folder = root / "outside"
        self.folder.mkdir()
        self.key_path = root / "key"
        self.path = checkpoint_file(self.folder, STORE)
        self.now = SECOND
        self.pauses = 0
        self.synced: list[tuple[str, int]] = []

    def checkpointer(self, events_per_checkpoint: int = 1000, interval_seconds: float = 60.0) -> Checkpointer:
        return Checkpointer(
            self.folder,
            self.key_path,
            STORE,
            lambda: self.now,
            events_per_checkpoint=events_per_checkpoint,
            interval_seconds=interval_seconds,
            machine=CheckpointIo(self._pause, self._sync),
        )

    def _pause(self, _: float) -> None:
        self.pauses += 1

    def _sync(self, file: int) -> None:
        """Sync for real, and note what was synced and how long it was by then; a folder has no length."""
        os.fsync(file)
        path = Path(f"/proc/self/fd/{file}").readlink()
        self.synced.append((path.name, 0 if path.is_dir() else os.fstat(file).st_size))

    @staticmethod
    def event(stream: str, seq: int, kind: str = "call_settled") -> Stored:
        return event(stream, seq, kind)

    def lines(self) -> list[Checkpoint]:
        if not self.path.exists():
            return []
        return [msgspec.json.decode(line, type=Checkpoint) for line in self.path.read_bytes().splitlines()]

    def heads(self) -> list[dict[str, int]]:
        return [{stream: seq for stream, (seq, _) in line.heads.items()} for line in self.lines()]

    def read(self) -> CheckpointLog:
        return read_checkpoint_log(self.folder, STORE, read_public_keys(public_key_path(self.key_path)))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def event(stream: str, seq: int, kind: str = "call_settled") -> Stored:
    return Stored(
        stream=StreamId(stream),
        seq=seq,
        kind=kind,
        version=1,
        at=seq,
        generation=1,
        key=f"{stream}/{seq}",
        blob=None,
        facts=b"{}",
        body=None,
        salt=None,
        digest=b"",
        hash=bytes([seq % 256]) * 32,
        event=CapChanged(scope="", window="", unit="usd", cap=None, by="ann"),
    )

"""What an examination of a store found, in words for the person who can act on it."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

Kind = Literal[
    "damaged",
    "edited",
    "deleted",
    "inserted",
    "duplicated",
    "reordered",
    "moved",
    "unreadable",
    "head",
    "body_missing",
    "not_erased",
    "blob_missing",
    "blob_altered",
    "row",
    "rewritten",
    "cut",
    "dropped",
    "checkpoint_altered",
    "checkpoint_key",
    "checkpoint_missing",
]


_DAMAGED: Final = (
    "Keep a copy, and restore it from a backup; where only an index is named, `sqlite3 FILE REINDEX` makes it anew."
)
_WRITER: Final = "Compare the store with a backup, and find out who can write to it besides Halter."
_BACKUP: Final = "Restore it from a backup."
_COPIED: Final = (
    f"{_WRITER} If the store is a copy of another, or another is a copy of it, both have the same id, and what one "
    "signs contradicts the other: give each its own folder of checkpoints with HALTER_CHECKPOINTS."
)
_CHECKPOINT: Final = "Compare the checkpoints with a copy, and find out who can write to their folder."

ADVICE: Final[Mapping[Kind, str]] = {
    "damaged": _DAMAGED,
    "edited": _WRITER,
    "deleted": _WRITER,
    "inserted": _WRITER,
    "duplicated": _WRITER,
    "reordered": _WRITER,
    "moved": _WRITER,
    "unreadable": "Use the newer Halter that wrote it; if this is the newest, the event was damaged.",
    "head": _WRITER,
    "body_missing": f"{_BACKUP} What must go is erased with `halter erase`.",
    "not_erased": "Erase the session again with `halter erase`.",
    "blob_missing": _BACKUP,
    "blob_altered": _BACKUP,
    "row": "Find out who can write to the store besides Halter, and rebuild the rows from the events.",
    "rewritten": _COPIED,
    "cut": _COPIED,
    "dropped": _COPIED,
    "checkpoint_altered": _CHECKPOINT,
    "checkpoint_key": _CHECKPOINT,
    "checkpoint_missing": "Check the folder; if it is the right one, they were removed, or the store's id was changed.",
}
"""What to do about each kind of finding."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it was written; for a checkpoint, `seq` is its number and no stream is named."""

    kind: Kind
    stream: str
    seq: int
    sentence: str


def finding(kind: Kind, stream: str, seq: int, what: str) -> Finding:
    """Say what was found, and what to do about it."""
    return Finding(kind, stream, seq, f"{what} {ADVICE[kind]}")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, and how much was looked at.

    `uncovered` counts, by stream, the events that no checkpoint vouches for yet: a tail that could still be cut
    off unseen. `erased` counts the events whose bodies were erased on purpose. `compared` tells whether the rows
    were compared with what the events make of them; if not, a note says why.
    """

    ok: bool
    findings: tuple[Finding, ...]
    streams: int
    events: int
    erased: int
    uncovered: dict[str, int]
    checkpoints: int | None = None
    torn: bool = False
    compared: bool = True
    notes: tuple[str, ...] = ()

    @property
    def uncovered_events(self) -> int:
        """Tell how many events no checkpoint vouches for."""
        return sum(self.uncovered.values())

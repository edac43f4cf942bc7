"""Blobs and the events that name them: an event never names a blob that is not there."""

from collections.abc import Iterable
from typing import Final

from halter.core.clock import DAY
from halter.core.ids import Digest
from halter.core.ports import Stored

UNNAMED_FOR: Final = DAY
"""How long a blob that nothing names is kept: whoever put it is long dead by then, or has put it in vain."""


def named_blobs(events: Iterable[Stored]) -> list[Digest]:
    """List the blobs that events name, each once."""
    return list(dict.fromkeys(event.blob for event in events if event.blob is not None))


def without_blob(digest: str, where: str) -> str:
    """Say that an event was refused because its blob has gone, or never came."""
    return (
        f"The store {where} does not hold the blob {digest}, which an event would name. It was never put, or was "
        "erased with the last session that named it. Nothing of the write was kept: put it again and repeat the write."
    )

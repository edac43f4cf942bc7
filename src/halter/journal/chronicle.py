"""Reading the checkpoints of a store, and what is wrong with the checkpoints themselves."""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from halter.core.errors import StoreUnusable
from halter.core.text import counted
from halter.journal.checkpoints import FIRST, Checkpoint, checkpoint_file, line_digest, parsed
from halter.journal.engine import View
from halter.journal.keys import is_signed
from halter.journal.meta import store_id, words
from halter.journal.report import Finding, Kind, finding


class Chronicle:
    """What the checkpoints of a store say.

    `claims` has, for each stream, the hashes that its events had when they were checkpointed, as hexadecimal
    digits. Only what is properly signed counts. `number` is that of the last line, as far as it can be told, and
    `begins_at` the time of the first one. `absent` tells whether there was nothing that could be read.
    """

    def __init__(self) -> None:
        self.claims: dict[str, dict[int, str]] = {}
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.absent = False
        self.count = 0
        self.number = 0
        self.torn = False
        self.begins_at: int | None = None

    def covered(self, stream: str) -> int:
        """Tell up to which event a stream is vouched for."""
        return max(self.claims.get(stream, ()), default=0)


def chronicle_of(view: View, folder: Path, trusted: Collection[str] = ()) -> Chronicle:
    """Read the checkpoints of a store that may be written to meanwhile.

    Whoever compares the store with them must look at it afterwards: checkpoints that are newer than what is looked
    at would say that its end was cut off. And only events that were there before can be missing their checkpoints.
    """
    begun = bool(view.ask("any_event", {}))
    try:
        name = store_id(words(view.ask("meta", {})), "that is examined")
        chronicle = read_chronicle(folder, name, trusted)
    except (OSError, ValueError, StoreUnusable) as error:
        return _absent(folder, error, begun=begun)
    if not trusted:
        chronicle.notes.append("The checkpoints were checked against the keys that they name themselves.")
    if chronicle.torn:
        chronicle.notes.append("The last checkpoint was cut off in the middle of being written, as a crash does it.")
    return chronicle


def _absent(folder: Path, error: Exception, *, begun: bool) -> Chronicle:
    chronicle = Chronicle()
    chronicle.absent = True
    if begun:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        what = f"No checkpoints of the store can be read in {folder} ({reason})."
        chronicle.findings.append(finding("checkpoint_missing", "", 0, what))
    return chronicle


def read_chronicle(folder: Path, store_id: str, trusted: Collection[str] = ()) -> Chronicle:
    """Read and examine all checkpoints of a store. Raises OSError.

    Without trusted keys, each line is checked against the key that it names itself.
    """
    chronicle = Chronicle()
    previous = FIRST
    with checkpoint_file(folder, store_id).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                chronicle.torn = True
                break
            chronicle.count += 1
            chronicle.number += 1
            _examine(line[:-1], previous, store_id, trusted, chronicle)
            previous = line_digest(line[:-1])
    return chronicle


def _examine(line: bytes, previous: str, store_id: str, trusted: Collection[str], chronicle: Chronicle) -> None:
    checkpoint = parsed(line)
    if checkpoint is None:
        what = "cannot be read: it was damaged."
        _find(chronicle, store_id, "checkpoint_altered", what)
        return
    if checkpoint.previous != previous or checkpoint.number != chronicle.number:
        what = (
            f"does not follow the one before it, and says that it is number {checkpoint.number}: "
            "a line was changed, removed or added there."
        )
        _find(chronicle, store_id, "checkpoint_altered", what)
    chronicle.number = checkpoint.number
    doubt = _doubt(checkpoint, store_id, trusted)
    if doubt is None:
        _take(checkpoint, store_id, chronicle)
    else:
        _find(chronicle, store_id, *doubt)


def _doubt(checkpoint: Checkpoint, store_id: str, trusted: Collection[str]) -> tuple[Kind, str] | None:
    """Tell why a checkpoint vouches for nothing, if so."""
    if not is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key):
        return "checkpoint_altered", "does not fit its signature: it was changed after it was signed."
    if trusted and checkpoint.key not in trusted:
        return "checkpoint_key", f"is signed with the key {checkpoint.key}, which is not one that you trust."
    if checkpoint.store != store_id:
        return "checkpoint_altered", f"belongs to the store {checkpoint.store}: it was copied here."
    return None


def _take(checkpoint: Checkpoint, store_id: str, chronicle: Chronicle) -> None:
    if chronicle.begins_at is None:
        chronicle.begins_at = checkpoint.at
    if checkpoint.accepted is not msgspec.UNSET:
        _give_up(checkpoint.accepted, chronicle)
    for stream, (seq, digest) in checkpoint.heads.items():
        if chronicle.claims.setdefault(stream, {}).setdefault(seq, digest) != digest:
            what = f"gives event {seq} of {stream} another hash than an earlier one: history was rewritten."
            _find(chronicle, store_id, "rewritten", what, stream, seq)


def _give_up(accepted: Mapping[str, int], chronicle: Chronicle) -> None:
    """Forget what a person gave up by going on with an older store."""
    events = 0
    for stream, fits in accepted.items():
        claims = chronicle.claims.get(stream, {})
        events += max(0, max(claims, default=0) - fits)
        chronicle.claims[stream] = {seq: digest for seq, digest in claims.items() if seq <= fits}
        if not chronicle.claims[stream]:
            del chronicle.claims[stream]
    chronicle.notes.append(
        f"Line {chronicle.count} of the checkpoints says that a person went on with the store as it was then, without "
        f"{counted(events, 'event')} that earlier lines knew."
    )


def _find(chronicle: Chronicle, store_id: str, kind: Kind, what: str, stream: str = "", seq: int | None = None) -> None:
    number = chronicle.count
    what = f"Line {number} of the checkpoints of store {store_id} {what}"
    chronicle.findings.append(finding(kind, stream, number if seq is None else seq, what))

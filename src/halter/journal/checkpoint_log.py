"""The checkpoints of a store as they are read for a verification."""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from halter.core.errors import StoreUnusable
from halter.core.text import format_count
from halter.journal.checkpoints import (
    NO_PREVIOUS_LINE,
    Checkpoint,
    checkpoint_file,
    digest_line,
    is_signed,
    parse_checkpoint,
)
from halter.journal.engine import StoreView, read_meta_values, read_store_id
from halter.journal.rebuild import FindingKind, IntegrityFinding, make_finding


class CheckpointLog:
    """The verified checkpoints of a store.

    `claims` has, for each stream, the hashes of its events when they were checkpointed, in hexadecimal. Only correctly
    signed lines count. `last_number` is the number of the last readable line, and `begins_at` the time of the first.
    `is_absent` is True if there is no readable file.
    """

    def __init__(self) -> None:
        self.claims: dict[str, dict[int, str]] = {}
        self.findings: list[IntegrityFinding] = []
        self.notes: list[str] = []
        self.is_absent = False
        self.count = 0
        self.last_number = 0
        self.torn = False
        self.begins_at: int | None = None

    def find_covered(self, stream: str) -> int:
        """Return the last event of a stream that a checkpoint covers; 0 if there is none."""
        return max(self.claims.get(stream, ()), default=0)


def load_checkpoint_log(view: StoreView, folder: Path, trusted_keys: Collection[str] = ()) -> CheckpointLog:
    """Load the checkpoints of a store that other processes may be writing to.

    Take the snapshot to verify afterwards: checkpoints newer than it would report a truncated tail. Missing checkpoints
    are reported only if the store had events before.
    """
    has_events = bool(view.ask("any_event", {}))
    try:
        store_id = read_store_id(read_meta_values(view.ask("meta", {})), "that is examined")
        log = read_checkpoint_log(folder, store_id, trusted_keys)
    except (OSError, ValueError, StoreUnusable) as error:
        return _make_missing_log(folder, error, begun=has_events)
    if not trusted_keys:
        log.notes.append("The checkpoints were verified only with the keys that they contain.")
    if log.torn:
        log.notes.append("The last checkpoint is incomplete, as after a crash.")
    return log


def _make_missing_log(folder: Path, error: Exception, *, begun: bool) -> CheckpointLog:
    log = CheckpointLog()
    log.is_absent = True
    if begun:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        description = f"Cannot read checkpoints of the store in {folder} ({reason})."
        log.findings.append(make_finding("checkpoint_missing", "", 0, description))
    return log


def read_checkpoint_log(folder: Path, store_id: str, trusted_keys: Collection[str] = ()) -> CheckpointLog:
    """Read and verify all checkpoints of a store. Raises OSError.

    Without trusted keys, each line is verified with the key that it contains.
    """
    log = CheckpointLog()
    previous = NO_PREVIOUS_LINE
    with checkpoint_file(folder, store_id).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                log.torn = True
                break
            log.count += 1
            log.last_number += 1
            _examine_line(line[:-1], previous, store_id, trusted_keys, log)
            previous = digest_line(line[:-1])
    return log


def _examine_line(line: bytes, previous: str, store_id: str, trusted_keys: Collection[str], log: CheckpointLog) -> None:
    checkpoint = parse_checkpoint(line)
    if checkpoint is None:
        description = "is not a valid checkpoint: it was damaged."
        _add_finding(log, store_id, "checkpoint_altered", description)
        return
    if checkpoint.previous != previous or checkpoint.number != log.last_number:
        description = (
            f"does not continue from the line before it and has number {checkpoint.number}: "
            "a line was changed, removed or added."
        )
        _add_finding(log, store_id, "checkpoint_altered", description)
    log.last_number = checkpoint.number
    flaw = _find_checkpoint_flaw(checkpoint, store_id, trusted_keys)
    if flaw is None:
        _record_checkpoint(checkpoint, store_id, log)
    else:
        _add_finding(log, store_id, *flaw)


def _find_checkpoint_flaw(
    checkpoint: Checkpoint, store_id: str, trusted_keys: Collection[str]
) -> tuple[FindingKind, str] | None:
    if not is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key):
        return "checkpoint_altered", "does not match its signature: it was changed after it was signed."
    if trusted_keys and checkpoint.key not in trusted_keys:
        return "checkpoint_key", f"is signed with the key {checkpoint.key}, which is not among the trusted keys."
    if checkpoint.store != store_id:
        return "checkpoint_altered", f"belongs to the store {checkpoint.store}: it was copied here."
    return None


def _record_checkpoint(checkpoint: Checkpoint, store_id: str, log: CheckpointLog) -> None:
    if log.begins_at is None:
        log.begins_at = checkpoint.at
    if checkpoint.accepted is not msgspec.UNSET:
        _forget_accepted(checkpoint.accepted, log)
    for stream, (seq, digest) in checkpoint.heads.items():
        if log.claims.setdefault(stream, {}).setdefault(seq, digest) != digest:
            description = f"has another hash for event {seq} of {stream} than an earlier one: history was rewritten."
            _add_finding(log, store_id, "rewritten", description, stream, seq)


def _forget_accepted(accepted: Mapping[str, int], log: CheckpointLog) -> None:
    """Drop the claims that a person gave up by accepting an older store."""
    event_count = 0
    for stream, accepted_seq in accepted.items():
        claims = log.claims.get(stream, {})
        event_count += max(0, max(claims, default=0) - accepted_seq)
        log.claims[stream] = {seq: digest for seq, digest in claims.items() if seq <= accepted_seq}
        if not log.claims[stream]:
            del log.claims[stream]
    log.notes.append(
        f"Line {log.count} of the checkpoints records that a person accepted the store without "
        f"{format_count(event_count, 'event')} that earlier lines cover."
    )


def _add_finding(
    log: CheckpointLog, store_id: str, kind: FindingKind, description: str, stream: str = "", seq: int | None = None
) -> None:
    number = log.count
    description = f"Line {number} of the checkpoints of store {store_id} {description}"
    log.findings.append(make_finding(kind, stream, number if seq is None else seq, description))

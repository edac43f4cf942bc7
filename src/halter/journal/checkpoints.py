"""Signed checkpoints outside the store, which reveal a truncated tail, a dropped stream or a rewritten history.

A hash chain alone does not, since anyone who can write to the store can recompute it. Each checkpoint is one line of
JSON. It has the heads that changed and the digest of the line before it, and is signed with Ed25519. Any number of
processes append to one file.
"""

import base64
import binascii
import errno
import fcntl
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from halter.core.clock import SECOND
from halter.core.events import (
    EVENTS_BY_KIND,
    CallSettled,
    DecisionMade,
    HaltRequested,
    RequestSettled,
)
from halter.core.ports import Stored

if TYPE_CHECKING:
    from nacl import signing

PRIVATE_KEY_MODE = 0o600
PUBLIC_KEY_MODE = 0o644


_PEM: Final = re.compile(rb"-----BEGIN PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END PRIVATE KEY-----\s*")
# An Ed25519 key in PKCS #8 (RFC 8410): the version is 1 if the public key follows the private one.
_ED25519_KEY: Final = re.compile(rb"0.\x02\x01[\x00\x01]\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20(.{32})", re.DOTALL)
_HEAD_OF_NEW_KEY: Final = bytes.fromhex("302e020100300506032b657004220420")


class SigningKey:
    def __init__(self, private: "signing.SigningKey") -> None:
        self._private = private
        self.public = private.verify_key.encode().hex()

    def sign(self, data: bytes) -> str:
        return self._private.sign(data).signature.hex()


def load_signing_key(path: Path) -> SigningKey:
    """Load the private key, or create it. Raises OSError or ValueError."""
    from nacl import signing

    _create_file_once(path, PRIVATE_KEY_MODE, _make_private_key)
    key = SigningKey(signing.SigningKey(_read_private_key(path)))
    _create_file_once(public_key_path(path), PUBLIC_KEY_MODE, f"{key.public}\n".encode)
    return key


def _read_private_key(path: Path) -> bytes:
    pem = _PEM.fullmatch(path.read_bytes().lstrip())
    try:
        der = base64.b64decode(b"".join(pem[1].split()), validate=True) if pem else b""
    except binascii.Error:
        der = b""
    if not der:
        raise ValueError(f"{path} contains no readable private key")
    key = _ED25519_KEY.match(der)
    if key is None:
        raise ValueError(f"{path} contains a key that is not an Ed25519 key")
    return key[1]


def public_key_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def read_public_keys(path: Path) -> frozenset[str]:
    """Read the trusted keys, one per line. Raises OSError."""
    return frozenset(path.read_text("ascii", "replace").split())


def is_signed(data: bytes, signature: str, public_key: str) -> bool:
    from nacl.exceptions import CryptoError
    from nacl.signing import VerifyKey

    try:
        VerifyKey(bytes.fromhex(public_key)).verify(data, bytes.fromhex(signature))
    except (CryptoError, ValueError):
        return False
    return True


def _make_private_key() -> bytes:
    from nacl import signing

    key = base64.encodebytes(_HEAD_OF_NEW_KEY + signing.SigningKey.generate().encode())
    return b"-----BEGIN PRIVATE KEY-----\n" + key + b"-----END PRIVATE KEY-----\n"


def _create_file_once(path: Path, mode: int, make_content: Callable[[], bytes]) -> None:
    """Create a file atomically. If several processes do so, the first wins."""
    if path.exists():
        return
    file, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.write(file, make_content())
        os.fchmod(file, mode)
        os.fsync(file)
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.close(file)
        Path(draft).unlink()


FORMAT_TAG: Final = b"halter.checkpoint.1\n"
NO_PREVIOUS_LINE: Final = ""
"""The digest of the previous line in the first checkpoint."""

RETRY_INTERVAL: Final = 5 * SECOND
PAUSE_SECONDS: Final = 0.01
LOCK_PAUSES: Final = 10
LOCK_PAUSES_AT_REST: Final = 50
"""Pauses to wait for another process's append: while a commit waits for this one, and otherwise."""

IMMEDIATE_KINDS: Final = frozenset(kind for kind, event in EVENTS_BY_KIND.items() if event.IMMEDIATE)
"""Events checkpointed with their own commit."""

USD: Final = "usd"
HALTS: Final = "halts"
DENIALS: Final = "denials"

_BLOCK: Final = 64 * 1024
_LINE_ENDS: Final = 2
"""Newlines to read back to: the end of the last line and the end of the line before it."""


class Checkpoint(msgspec.Struct, frozen=True):
    """One line: the heads of the changed streams at a time, as [sequence number, hash].

    `last` is the stream of the last commit: a store that has its head has all others of the line. `tally` counts what
    the line covers: micro-dollars, halts, denials. `accepted` is a person's decision to give up events that earlier
    lines cover: for each stream, those after the sequence number.
    """

    number: int
    at: int
    store: str
    heads: dict[str, tuple[int, str]]
    previous: str
    key: str
    signature: str = ""
    last: str | msgspec.UnsetType = msgspec.UNSET
    tally: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    accepted: dict[str, int] | msgspec.UnsetType = msgspec.UNSET

    def signed_bytes(self) -> bytes:
        return FORMAT_TAG + msgspec.structs.replace(self, signature="").line()

    def line(self) -> bytes:
        return _ENCODE(self)


_ENCODE: Final = msgspec.json.Encoder().encode
_DECODER: Final = msgspec.json.Decoder(Checkpoint)


def parse_checkpoint(line: bytes) -> Checkpoint | None:
    """Parse a line without its newline. Returns None if Halter did not write it in this form."""
    try:
        checkpoint = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return checkpoint if checkpoint.line() == line else None


def digest_line(line: bytes) -> str:
    return sha256(line).hexdigest()


def read_lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from its end. An unfinished last line is skipped."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        start, partial_line = file.seek(0, os.SEEK_END), b""
        is_torn = True
        while start > 0:
            size = min(_BLOCK, start)
            start -= size
            file.seek(start)
            partial_line, *lines = (file.read(size) + partial_line).split(b"\n")
            for line in reversed(lines):
                if not is_torn:
                    yield line
                is_torn = False
        if not is_torn:
            yield partial_line


class CheckpointLockTimeout(Exception):
    pass


def checkpoint_file(folder: Path, store_id: str) -> Path:
    return folder / f"{store_id}.jsonl"


class CheckpointIo(msgspec.Struct, frozen=True):
    pause: Callable[[float], None] = time.sleep
    sync: Callable[[int], None] = os.fsync


SYSTEM_IO: Final = CheckpointIo()


class Checkpointer:
    """Writes checkpoints of what a store commits: periodically, and with each event of IMMEDIATE_KINDS.

    An unwritable file never stops a commit. `problem` then describes the error, and a later checkpoint covers the
    missing heads.
    """

    def __init__(
        self,
        folder: Path,
        key_path: Path,
        store_id: str,
        now: Callable[[], int],
        *,
        events_per_checkpoint: int = 1000,
        interval_seconds: float = 60.0,
        machine: CheckpointIo = SYSTEM_IO,
    ) -> None:
        self._path = checkpoint_file(folder, store_id)
        self._key_path = key_path
        self.store_id = store_id
        self._now = now
        self._events_per_checkpoint = events_per_checkpoint
        self._machine = machine
        self.interval_seconds = interval_seconds
        self.problem = ""
        self._guard = threading.Lock()
        self._key: SigningKey | None = None
        self._heads: dict[str, tuple[int, bytes]] = {}
        self._last = ""
        self._tally: Counter[str] = Counter()
        self._accepted: Mapping[str, int] | None = None
        self._events = 0
        self._due_at = 0
        self._written_at = 0
        self._last_write: tuple[_FileState, _LastLine] | None = None
        """The state and the last line of the file after this process last wrote to it."""

    def accept(self, accepted_seq_by_stream: Mapping[str, int]) -> None:
        """Write a checkpoint of a person's decision to give up, for each stream, the events after a sequence number."""
        if not accepted_seq_by_stream:
            return
        with self._guard:
            self._accepted = accepted_seq_by_stream
            self._write(LOCK_PAUSES_AT_REST)

    def on_commit(self, events: Sequence[Stored]) -> None:
        with self._guard:
            heads = self._heads
            for event in events:
                stream, seq = event.stream, event.seq
                head = heads.get(stream)
                if head is None or seq > head[0]:
                    heads[stream] = (seq, event.hash)
                    self._last = stream
                if event.kind in _SETTLED_KINDS:
                    settlement = event.event
                    if isinstance(settlement, _SETTLED) and (charge := settlement.charge) and charge.usd:
                        self._tally[USD] += charge.usd
                elif event.kind in IMMEDIATE_KINDS:
                    self._note(event)
            self._events += len(events)
            now = self._now()
            # A clock that was set back does not put the next checkpoint off.
            is_due = now >= self._due_at or now < self._written_at
            if is_due or (self._events >= self._events_per_checkpoint and not self.problem):
                self._write(LOCK_PAUSES)

    def _note(self, stored_event: Stored) -> None:
        if not self.problem:
            self._due_at = 0
        match stored_event.event:
            case HaltRequested():
                self._tally[HALTS] += 1
            case DecisionMade(verdict="deny"):
                self._tally[DENIALS] += 1
            case _:
                pass

    def flush(self) -> None:
        with self._guard:
            if self._heads or self._accepted is not None:
                self._write(LOCK_PAUSES_AT_REST)

    def rehearse(self) -> None:
        """Check that a checkpoint could be written, without writing one. Sets `problem` if not."""
        with self._guard:
            try:
                self._key = self._key or load_signing_key(self._key_path)
                self._path.parent.stat()
                if not os.access(self._path.parent, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._path.parent))
            except (OSError, ValueError) as error:
                self.problem = self._describe_error(error)

    def _write(self, pauses: int) -> None:
        now = self._written_at = self._now()
        try:
            self._key = self._key or load_signing_key(self._key_path)
            self._append(self._key, now, pauses)
        except (OSError, ValueError, CheckpointLockTimeout) as error:
            self.problem = self._describe_error(error)
            self._due_at = now + RETRY_INTERVAL
            return
        self._heads = {}
        self._last = ""
        self._tally.clear()
        self._accepted = None
        self._events = 0
        self.problem = ""
        self._due_at = now + round(self.interval_seconds * SECOND)

    def _append(self, key: SigningKey, now: int, pauses: int) -> None:
        with self._lock_file(pauses) as file:
            last_write = self._last_write
            last_line = (
                last_write[1]
                if last_write is not None and last_write[0] == _read_file_state(file)
                else _read_last_line(file)
            )
            checkpoint = Checkpoint(
                number=last_line.number + 1,
                at=now,
                store=self.store_id,
                heads={stream: (seq, digest.hex()) for stream, (seq, digest) in sorted(self._heads.items())},
                previous=last_line.digest,
                key=key.public,
                last=self._last or msgspec.UNSET,
                tally=dict(sorted(self._tally.items())) or msgspec.UNSET,
                accepted=msgspec.UNSET if self._accepted is None else dict(sorted(self._accepted.items())),
            )
            signature = key.sign(checkpoint.signed_bytes())
            line = msgspec.structs.replace(checkpoint, signature=signature).line()
            _write_whole(file, line + b"\n", self._machine.sync)
            self._last_write = (_read_file_state(file), _LastLine(checkpoint.number, digest_line(line)))
        if last_line.digest == NO_PREVIOUS_LINE:
            _sync_folder(self._path.parent, self._machine.sync)

    @contextmanager
    def _lock_file(self, pauses: int) -> Generator[int]:
        """Open the file exclusively. Closing it, or a crash, releases the lock."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for _ in range(pauses):
                if _is_ours(file):
                    break
                self._machine.pause(PAUSE_SECONDS)
            else:
                raise CheckpointLockTimeout("another process keeps it locked")
            yield file
        finally:
            os.close(file)

    def _describe_error(self, error: Exception) -> str:
        reason = error.strerror if isinstance(error, OSError) else error
        location = error.filename if isinstance(error, OSError) and error.filename else self._path
        return (
            f"Cannot write checkpoints to {self._path} ({location}: {reason}). Sessions continue, but events committed "
            "meanwhile could be truncated undetected. Make the folder writable, and the key file "
            f"{self._key_path} readable; a running process retries automatically."
        )


_SETTLED: Final = (CallSettled, RequestSettled)
_SETTLED_KINDS: Final = frozenset(kind.KIND for kind in _SETTLED)


def _is_ours(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _LastLine(NamedTuple):
    number: int
    digest: str


_FileState = tuple[int, int, int, int]
"""Identifies a file and its content: device, inode, size and time of the last change."""


def _read_file_state(file: int) -> _FileState:
    state = os.fstat(file)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _read_last_line(file: int) -> _LastLine:
    line = _find_last_line(file)
    return _LastLine(0, NO_PREVIOUS_LINE) if line is None else _LastLine(_read_number(file, line), digest_line(line))


def _find_last_line(file: int) -> bytes | None:
    """Find the last complete line, and truncate the unfinished one that a crash left after it."""
    end = os.fstat(file).st_size
    start, tail = end, b""
    while start > 0 and tail.count(b"\n") < _LINE_ENDS:
        size = min(_BLOCK, start)
        start -= size
        tail = os.pread(file, size, start) + tail
    complete, newline, partial_line = tail.rpartition(b"\n")
    if partial_line:
        os.ftruncate(file, end - len(partial_line))
    return complete.rpartition(b"\n")[2] if newline else None


def _read_number(file: int, line: bytes) -> int:
    """Read the number of the last checkpoint; if that is damaged, count the lines."""
    checkpoint = parse_checkpoint(line)
    return checkpoint.number if checkpoint else os.pread(file, os.fstat(file).st_size, 0).count(b"\n")


def _write_whole(file: int, line: bytes, sync: Callable[[int], None]) -> None:
    """Write a line and sync it. On failure, truncate what was written."""
    size_before = os.fstat(file).st_size
    try:
        remaining = memoryview(line)
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
        sync(file)
    except OSError:
        os.ftruncate(file, size_before)
        raise


def _sync_folder(folder: Path, sync: Callable[[int], None]) -> None:
    """Make the name of a new file durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(file)
    finally:
        os.close(file)

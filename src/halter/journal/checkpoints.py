"""Signed checkpoints outside the store: they show a truncated tail, a dropped stream, a rewritten history.

A hash chain alone cannot, since a writer of the store can recompute it. Each checkpoint is one line of JSON: it names
the heads that changed and the digest of the line before it, and is signed with Ed25519. Any number of processes append
to one file.
"""

import errno
import fcntl
import os
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

from halter.core import events as ev
from halter.core.clock import SECOND
from halter.core.ports import Stored

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PRIVATE_KEY_MODE = 0o600
PUBLIC_KEY_MODE = 0o644


class SigningKey:
    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> str:
        return self._private.sign(data).hex()


def load_signing_key(path: Path) -> SigningKey:
    """Load the private key, or create it. Raises OSError or ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    _create_file_once(path, PRIVATE_KEY_MODE, _make_private_key)
    try:
        loaded = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} holds no key that can be read") from error
    match loaded:
        case Ed25519PrivateKey():
            key = SigningKey(loaded)
        case _:
            raise ValueError(f"{path} holds a key of another kind than Ed25519")
    _create_file_once(public_key_path(path), PUBLIC_KEY_MODE, f"{key.public}\n".encode)
    return key


def public_key_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def read_public_keys(path: Path) -> frozenset[str]:
    """Read the trusted keys, one per line. Raises OSError."""
    return frozenset(path.read_text("ascii", "replace").split())


def is_signed(data: bytes, signature: str, public: str) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _make_private_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _create_file_once(path: Path, mode: int, content: Callable[[], bytes]) -> None:
    """Create a file whole or not at all; of several processes, the first wins."""
    if path.exists():
        return
    file, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.write(file, content())
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
"""What the first checkpoint names as the digest of the line before it."""

RETRY_INTERVAL: Final = 5 * SECOND
PAUSE_SECONDS: Final = 0.01
LOCK_PAUSES: Final = 10
LOCK_PAUSES_AT_REST: Final = 50
"""How long to wait for another process's append, with and without a commit waiting for this one."""

IMMEDIATE_KINDS: Final = frozenset(
    kind.KIND
    for kind in (
        *(ev.SessionEnded, ev.HaltRequested, ev.HaltLifted, ev.DecisionMade, ev.RuleMade, ev.RuleEnded),
        *(ev.CapChanged, ev.AgentSwitched, ev.FleetPolicyAdopted, ev.StoreAccepted, ev.ApproverRemoved),
        ev.ApprovalGiven,
    )
)
"""Checkpointed with their own commit: a person's decision must not be undone by an older copy of the store."""

USD: Final = "usd"
HALTS: Final = "halts"
DENIALS: Final = "denials"

_BLOCK: Final = 64 * 1024
_LINE_ENDS: Final = 2
"""The last line is found between its own end and that of the line before it."""


class Checkpoint(msgspec.Struct, frozen=True):
    """One line: where the changed streams stood at a time, as [sequence number, hash].

    `last` is the stream committed to last: a store that has that event has all others of the line. `tally` counts what
    the line vouches for: micro-dollars, halts, denials. By `accepted` a person gave up what earlier lines knew: of each
    stream named, all after that sequence number.
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
    """Read a line without its end; None if this program cannot have written it."""
    try:
        checkpoint = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return checkpoint if checkpoint.line() == line else None


def digest_line(line: bytes) -> str:
    return sha256(line).hexdigest()


def read_lines_backwards(path: Path) -> Iterator[bytes]:
    """Read whole lines from the end of a file; an unfinished one is skipped."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        start, rest = file.seek(0, os.SEEK_END), b""
        torn = True
        while start > 0:
            size = min(_BLOCK, start)
            start -= size
            file.seek(start)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            for line in reversed(lines):
                if not torn:
                    yield line
                torn = False
        if not torn:
            yield rest


class CheckpointLockTimeout(Exception):
    pass


def checkpoint_file(folder: Path, store_id: str) -> Path:
    return folder / f"{store_id}.jsonl"


class CheckpointIo(msgspec.Struct, frozen=True):
    pause: Callable[[float], None] = time.sleep
    sync: Callable[[int], None] = os.fsync


SYSTEM_IO: Final = CheckpointIo()


class Checkpointer:
    """Records what a store commits, and writes checkpoints at once, periodically, and at each session's end.

    An unwritable file never stops a commit: `problem` says what is wrong, and what is missing is written later.
    """

    def __init__(
        self,
        folder: Path,
        key_path: Path,
        store_id: str,
        now: Callable[[], int],
        *,
        every_events: int = 1000,
        every_seconds: float = 60.0,
        machine: CheckpointIo = SYSTEM_IO,
    ) -> None:
        self._path = checkpoint_file(folder, store_id)
        self._key_path = key_path
        self.store_id = store_id
        self._now = now
        self._every_events = every_events
        self._machine = machine
        self.every_seconds = every_seconds
        self.problem = ""
        self._guard = threading.Lock()
        self._key: SigningKey | None = None
        self._heads: dict[str, tuple[int, bytes]] = {}
        self._last = ""
        self._tally: Counter[str] = Counter()
        self._accepted: Mapping[str, int] | None = None
        self._events = 0
        self._due_at = 0
        self._left: tuple[_FileState, _LastLine] | None = None
        """How the file was when this process had written to it."""

    def accept(self, given_up: Mapping[str, int]) -> None:
        """Record at once that a person gave up what earlier checkpoints knew: of each stream, all after a number."""
        if not given_up:
            return
        with self._guard:
            self._accepted = given_up
            self._write(LOCK_PAUSES_AT_REST)

    def on_commit(self, events: Sequence[Stored]) -> None:
        with self._guard:
            heads = self._heads
            for event in events:
                stream, seq = event.stream, event.seq
                known = heads.get(stream)
                if known is None or seq > known[0]:
                    heads[stream] = (seq, event.hash)
                    self._last = stream
                if event.kind in _SETTLED_KINDS:
                    settled = event.event
                    if isinstance(settled, _SETTLED) and (charge := settled.charge) and charge.usd:
                        self._tally[USD] += charge.usd
                elif event.kind in IMMEDIATE_KINDS:
                    self._note(event)
            self._events += len(events)
            if self._now() >= self._due_at or (self._events >= self._every_events and not self.problem):
                self._write(LOCK_PAUSES)

    def _note(self, stored: Stored) -> None:
        if not self.problem:
            self._due_at = 0
        match stored.event:
            case ev.HaltRequested():
                self._tally[HALTS] += 1
            case ev.DecisionMade(verdict="deny"):
                self._tally[DENIALS] += 1
            case _:
                pass

    def flush(self) -> None:
        with self._guard:
            if self._heads or self._accepted is not None:
                self._write(LOCK_PAUSES_AT_REST)

    def rehearse(self) -> None:
        """Check whether a checkpoint could be written, without writing one; sets `problem`."""
        with self._guard:
            try:
                self._key = self._key or load_signing_key(self._key_path)
                self._path.parent.stat()
                if not os.access(self._path.parent, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._path.parent))
            except (OSError, ValueError) as error:
                self.problem = self._describe_error(error)

    def _write(self, pauses: int) -> None:
        now = self._now()
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
        self._due_at = now + round(self.every_seconds * SECOND)

    def _append(self, key: SigningKey, now: int, pauses: int) -> None:
        with self._lock_file(pauses) as file:
            left = self._left
            last = left[1] if left is not None and left[0] == _read_file_state(file) else _read_last_line(file)
            checkpoint = Checkpoint(
                number=last.number + 1,
                at=now,
                store=self.store_id,
                heads={stream: (seq, digest.hex()) for stream, (seq, digest) in sorted(self._heads.items())},
                previous=last.digest,
                key=key.public,
                last=self._last or msgspec.UNSET,
                tally=dict(sorted(self._tally.items())) or msgspec.UNSET,
                accepted=msgspec.UNSET if self._accepted is None else dict(sorted(self._accepted.items())),
            )
            signature = key.sign(checkpoint.signed_bytes())
            line = msgspec.structs.replace(checkpoint, signature=signature).line()
            _write_whole(file, line + b"\n", self._machine.sync)
            self._left = (_read_file_state(file), _LastLine(checkpoint.number, digest_line(line)))
        if last.digest == NO_PREVIOUS_LINE:
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
                raise CheckpointLockTimeout("another process has kept it locked")
            yield file
        finally:
            os.close(file)

    def _describe_error(self, error: Exception) -> str:
        reason = error.strerror if isinstance(error, OSError) else error
        where = error.filename if isinstance(error, OSError) and error.filename else self._path
        return (
            f"Checkpoints cannot be written to {self._path} ({where}: {reason}). The work goes on, but what is "
            "committed meanwhile could be cut off unseen. Make the folder and the key file "
            f"{self._key_path} exist and be writable; it is tried again by itself."
        )


_SETTLED: Final = (ev.CallSettled, ev.RequestSettled)
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
"""Which file it is, and whether it was written to since: its device, its number, its size, and when it was changed."""


def _read_file_state(file: int) -> _FileState:
    state = os.fstat(file)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _read_last_line(file: int) -> _LastLine:
    last = _find_last_line(file)
    return _LastLine(0, NO_PREVIOUS_LINE) if last is None else _LastLine(_read_number(file, last), digest_line(last))


def _find_last_line(file: int) -> bytes | None:
    """Return the last whole line; cut off what a crash left behind it."""
    end = os.fstat(file).st_size
    start, tail = end, b""
    while start > 0 and tail.count(b"\n") < _LINE_ENDS:
        size = min(_BLOCK, start)
        start -= size
        tail = os.pread(file, size, start) + tail
    whole, newline, torn = tail.rpartition(b"\n")
    if torn:
        os.ftruncate(file, end - len(torn))
    return whole.rpartition(b"\n")[2] if newline else None


def _read_number(file: int, last: bytes) -> int:
    """The number of the last checkpoint, by counting if it is damaged."""
    checkpoint = parse_checkpoint(last)
    return checkpoint.number if checkpoint else os.pread(file, os.fstat(file).st_size, 0).count(b"\n")


def _write_whole(file: int, line: bytes, sync: Callable[[int], None]) -> None:
    """Write a line and sync it; on failure, take back what was written."""
    before = os.fstat(file).st_size
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(file, rest) :]
        sync(file)
    except OSError:
        os.ftruncate(file, before)
        raise


def _sync_folder(folder: Path, sync: Callable[[int], None]) -> None:
    """Make a new file's name durable too."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(file)
    finally:
        os.close(file)

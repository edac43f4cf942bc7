"""Opening a store by its URL, and checking that it continues from its newest checkpoints.

A restored copy is consistent: its chains are valid, but its caps, halts and denials are out of date. Only checkpoints
outside the store reveal that. When a store is opened, the events of the newest checkpoints are looked up: a few indexed
reads, however large the store is. An event is checkpointed after its commit is durable, so a store can be ahead of its
checkpoints, but never behind.
"""

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from halter.core.clock import SECOND, Clock
from halter.core.errors import StoreUnusable, explain_extra
from halter.core.events import StoreAccepted
from halter.core.ids import FLEET, Ids
from halter.core.money import format_micros
from halter.core.text import format_count
from halter.journal.checkpoints import (
    DENIALS,
    HALTS,
    USD,
    Checkpoint,
    checkpoint_file,
    is_signed,
    parse_checkpoint,
    read_lines_backwards,
)
from halter.journal.engine import Engine, load_queries
from halter.journal.memory import MemoryEngine
from halter.journal.sqlite import LEASE_DURATION, SqliteEngine
from halter.journal.sqlite_connection import open_read_only
from halter.journal.store import JournalStore
from halter.journal.writer import Observer

if TYPE_CHECKING:
    from halter.journal.connection import PostgresAddress

URL_FORMS: Final = "a file (halter.db), sqlite:///folder/halter.db, postgresql://user@host/database, or memory:"

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):(.*)", re.IGNORECASE | re.DOTALL)


def open_store(
    url: str,
    *,
    clock: Clock,
    ids: Ids,
    observers: Sequence[Observer] = (),
    lease: int = LEASE_DURATION,
    inline: bool = False,
) -> JournalStore:
    """Open the store at a URL. Creates it if it does not exist."""
    return JournalStore(open_engine(url, clock=clock, ids=ids, lease=lease), inline=inline, observers=observers)


def open_engine(url: str, *, clock: Clock, ids: Ids, lease: int = LEASE_DURATION) -> Engine:
    match = _SCHEME.fullmatch(url)
    scheme, location = (match[1].lower(), match[2]) if match else ("", url)
    match scheme:
        case "memory" if not location:
            return MemoryEngine(now=clock.now, new_id=ids.make, lease=lease)
        case "postgresql" | "postgres" if location.startswith("//"):
            return _open_postgres(url, ids.make, lease)
        case "" | "sqlite" if location and (not location.startswith("//") or location.startswith("///")):
            return SqliteEngine(_prepare_file(location), now=clock.now, new_id=ids.make, lease=lease)
        case _:
            raise StoreUnusable(f"Unknown form of store {mask_url(url)!r}. Use {URL_FORMS}.")


def mask_url(url: str) -> str:
    """Mask the passwords in a URL, for output and logs."""
    masked_url = re.sub(
        r"^([a-z][a-z0-9+.-]*://)?([^:/?#]*):(?!//).*@", r"\1\2:***@", url, flags=re.IGNORECASE | re.DOTALL
    )
    return re.sub(r"(password=)[^&]*", r"\1***", masked_url, flags=re.IGNORECASE)


def _open_postgres(url: str, new_id: Callable[[], str], lease_duration: int) -> Engine:
    postgres_address(url)
    from halter.journal.postgres import PostgresEngine

    return PostgresEngine(url, new_id=new_id, lease=lease_duration)


def postgres_address(url: str) -> "PostgresAddress":
    """Parse the URL of a PostgreSQL store. Raises StoreUnusable if it is invalid or the driver is missing."""
    try:
        from halter.journal.connection import PostgresAddress
    except ModuleNotFoundError as missing:
        raise StoreUnusable(explain_extra("postgres", f"The store {mask_url(url)}")) from missing
    return PostgresAddress(url)


def _prepare_file(location: str) -> str:
    """Create the file of a store, readable for its owner only, and the folder if it is missing."""
    path = _parse_path(location)
    if path.is_dir():
        raise StoreUnusable(f"The store {path} is a folder. Use a file in it, such as {path / 'halter.db'}.")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(
            f"Cannot create the folder {path.parent} of the store ({error.strerror}). Create it, or use another file."
        ) from error
    with suppress(OSError):
        path.touch(mode=0o600, exist_ok=True)
    return str(path)


def _parse_path(location: str) -> Path:
    """Parse the part after the scheme. Raises StoreUnusable for a NUL character or an unknown home folder."""
    if "\0" in location:
        raise StoreUnusable("The file name of the store contains a NUL character. Use another file.")
    try:
        return Path(f"/{location.lstrip('/')}" if location.startswith("//") else location).expanduser()
    except RuntimeError as error:
        raise StoreUnusable(
            f"The home folder in the store's path {location} is unknown. Write the full path."
        ) from error


def store_file_exists(url: str) -> bool:
    """Return False if the file of a store does not exist. For a server, True: only opening it can tell."""
    path = find_store_file(url)
    return path is None or path.exists()


def find_store_file(url: str) -> Path | None:
    match = _SCHEME.fullmatch(url)
    scheme, location = (match[1].lower(), match[2]) if match else ("", url)
    return _parse_path(location) if scheme in {"", "sqlite"} else None


CompletionKind = Literal["sessions", "agents", "decisions", "triggers", "rules", "findings", "proposals"]

MAX_COMPLETIONS: Final = 200
"""Maximum number of completions offered to a shell."""

SHORT_BUSY_TIMEOUT: Final = "PRAGMA busy_timeout = 50"


def complete_names(url: str, names: CompletionKind, beginning: str) -> list[tuple[str, str]]:
    """List names with a prefix, each with a description, for shell completion. None for a server, which may be slow."""
    path = find_store_file(url)
    if path is None or not path.is_file():
        return []
    with closing(open_read_only(str(path))) as connection:
        connection.execute(SHORT_BUSY_TIMEOUT)
        params = {"like": f"{_escape_pattern(beginning)}*", "limit": MAX_COMPLETIONS}
        rows = connection.execute(load_queries("sqlite/offered.sql")[names], params)
        return [(str(name), str(description)) for name, description in rows]


def _escape_pattern(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


RunQuery = Callable[[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]

FITTING_CHECKPOINTS: Final = 64
"""After this many matching checkpoints in a row, all earlier ones match.

Each process checkpoints everything that it committed. After a checkpoint of a missing event, another process can add
only one line without later events. So this must exceed the number of processes that share a file.
"""

MAX_STREAMS_NAMED: Final = 3
"""Maximum number of streams named in a sentence; the others are counted."""

PLACES_FOLDER: Final = "places"


class MissingTail(msgspec.Struct, frozen=True):
    """A stream that is shorter than its checkpoints say: it matches up to `matching_seq`, they cover `known_seq`."""

    stream: str
    known_seq: int
    matching_seq: int


class OlderCopy(msgspec.Struct, frozen=True):
    """A store that lacks what its checkpoints covered at `at`, so that nothing may run on it.

    `ends_at` is the time of its last event. `lost_counts` has what they covered: micro-dollars, halts, denials.
    """

    kind: Literal["older", "forked", "replaced", "gone"]
    location: str
    store: str
    at: int
    ends_at: int = 0
    gaps: tuple[MissingTail, ...] = ()
    lost_counts: Mapping[str, int] = {}
    only_programs: bool = False
    """True if the store is missing, and nothing but programs ran agents on it: a program can begin it anew."""

    @property
    def events(self) -> int:
        return sum(gap.known_seq - gap.matching_seq for gap in self.gaps)

    @property
    def matching_seq_by_stream(self) -> Mapping[str, int]:
        """The events that a person gives up by continuing: for each stream, those after the sequence number."""
        return {gap.stream: gap.matching_seq for gap in self.gaps}

    def sentence(self) -> str:
        remedy = "Restore it, or start" if self.kind == "gone" else "Restore the newer store, or continue with this one"
        condition = " a new one:" if self.kind == "gone" else " without the missing events:"
        missing = self.describe_missing()
        sentence = f"{missing} Nothing runs on it until a person decides. {remedy}{condition} halter store accept"
        return f"{sentence} (or, in the program that made it: store=..., new=True)" if self.only_programs else sentence

    def describe_missing(self) -> str:
        when = _format_utc(self.at)
        match self.kind:
            case "gone":
                return (
                    f"The store {self.location} is missing. It was last checkpointed at {when} (id {self.store}). "
                    "A new store would not have its spending, halts and denials."
                )
            case "replaced":
                return (
                    f"The store {self.location} is not the one that was used here before. "
                    f"That one was last checkpointed at {when} (id {self.store}); "
                    "this one does not have its spending, halts and denials."
                )
            case "forked":
                return (
                    f"The history of {self.location} differs from its checkpoints: {self._missing(when)}, "
                    f"and other events are in their place.{self._describe_lost()}"
                )
            case "older":
                ends = f"ends at {_format_utc(self.ends_at)}" if self.ends_at else "is empty"
                return (
                    f"The store {self.location} is older than its checkpoints: it {ends}, and {self._missing(when)}."
                    f"{self._describe_lost()}"
                )

    def _missing(self, when: str) -> str:
        streams = sorted(self.gaps, key=lambda gap: (gap.stream != FLEET, gap.stream))
        items = [f"{gap.known_seq - gap.matching_seq} of {gap.stream}" for gap in streams[:MAX_STREAMS_NAMED]]
        if len(streams) > MAX_STREAMS_NAMED:
            items.append(f"others of {format_count(len(streams) - MAX_STREAMS_NAMED, 'more stream')}")
        verb = "is" if self.events == 1 else "are"
        return f"{format_count(self.events, 'event')} until {when} {verb} missing ({', '.join(items)})"

    def _describe_lost(self) -> str:
        losses = [
            *([f"{format_micros(self.lost_counts[USD])} of spending"] if self.lost_counts.get(USD) else []),
            *([format_count(self.lost_counts[HALTS], "halt")] if self.lost_counts.get(HALTS) else []),
            *([format_count(self.lost_counts[DENIALS], "denial")] if self.lost_counts.get(DENIALS) else []),
        ]
        return f" They include up to {', '.join(losses)}." if losses else ""


class StorePointer(msgspec.Struct, frozen=True):
    """The store that was used at a location (`place`), and whether only programs have run agents on it."""

    place: str
    store: str
    only_programs: bool = False


class AcceptancePending(msgspec.Struct, frozen=True):
    """A person's acceptance of the store that its checkpoints do not record yet."""

    accepted_seq_by_stream: Mapping[str, int]


class Continuity:
    """Compares the store at one location with a folder of checkpoints."""

    def __init__(self, folder: Path, location: str, trusted: Collection[str] = ()) -> None:
        self._folder = folder
        self._location = location
        self._trusted = trusted
        self._pointer = folder / PLACES_FOLDER / f"{hashlib.sha256(location.encode()).hexdigest()[:32]}.json"

    def find_missing_store(self) -> OlderCopy | None:
        """Find the store that was used at this location and is missing."""
        previous_id = self._read_previous_id()
        return self._find_other("gone", previous_id) if previous_id else None

    def check(self, run_query: RunQuery, store: str) -> OlderCopy | AcceptancePending | None:
        """Compare a store with its newest checkpoints. None if it continues from them, or there are none."""
        previous_id = self._read_previous_id()
        older_copy = (
            self._find_other("replaced", previous_id)
            if previous_id not in {"", store}
            else self._behind(run_query, store)
        )
        if older_copy is None:
            return None
        acceptances = run_query("events_of_kind", {"stream": FLEET, "kind": StoreAccepted.KIND, "limit": 1})
        if acceptances and acceptances[0]["at"] > older_copy.at:
            return AcceptancePending(older_copy.matching_seq_by_stream)
        return older_copy

    def remember(self, store: str, *, by_program: bool = False) -> None:
        """Save the id of the store at this location, and whether only programs have used it.

        If that fails, a missing store is not noticed later.
        """
        previous = self._read_pointer()
        known = previous.store == store
        pointer = StorePointer(self._location, store, by_program and (previous.only_programs or not known))
        if pointer == previous:
            return
        with suppress(OSError):
            self._pointer.parent.mkdir(mode=0o700, exist_ok=True)
            draft = self._pointer.with_suffix(f".{os.getpid()}")
            draft.write_bytes(msgspec.json.encode(pointer))
            draft.replace(self._pointer)

    def _read_previous_id(self) -> str:
        return self._read_pointer().store

    def _read_pointer(self) -> StorePointer:
        try:
            return msgspec.json.decode(self._pointer.read_bytes(), type=StorePointer)
        except (OSError, ValueError):
            return StorePointer(self._location, "")

    def _find_other(self, kind: Literal["replaced", "gone"], previous_id: str) -> OlderCopy | None:
        """Report a missing store, unless it was never checkpointed."""
        newest = next(filter(self._vouches, self._checkpoints(previous_id)), None)
        if newest is None:
            return None
        only_programs = kind == "gone" and self._read_pointer().only_programs
        return OlderCopy(kind, self._location, previous_id, newest.at, only_programs=only_programs)

    def _behind(self, run_query: RunQuery, store: str) -> OlderCopy | None:
        mismatches = list(find_unknown_checkpoints(run_query, self._checkpoints(store), self._vouches))
        if not mismatches:
            return None
        gaps, is_forked = find_missing_tails(run_query, mismatches)
        lost_counts: Counter[str] = Counter()
        for checkpoint in mismatches:
            lost_counts.update({} if checkpoint.tally is msgspec.UNSET else checkpoint.tally)
        ends_at = max((row["at"] for row in run_query("heads", {})), default=0)
        at = max(checkpoint.at for checkpoint in mismatches)
        return OlderCopy(
            "forked" if is_forked else "older", self._location, store, at, ends_at, gaps, dict(lost_counts)
        )

    def _checkpoints(self, store: str) -> Iterator[Checkpoint]:
        for line in read_lines_backwards(checkpoint_file(self._folder, store)):
            checkpoint = parse_checkpoint(line)
            if checkpoint is not None and checkpoint.store == store:
                yield checkpoint

    def _vouches(self, checkpoint: Checkpoint) -> bool:
        """Return True if a checkpoint has a valid signature of a trusted key. Checked only where the store differs."""
        if self._trusted and checkpoint.key not in self._trusted:
            return False
        return is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key)


def find_unknown_checkpoints(
    run_query: RunQuery, newest: Iterable[Checkpoint], vouches: Callable[[Checkpoint], bool]
) -> Iterator[Checkpoint]:
    """Find the newest checkpoints of events that are missing in the store. An acceptance ends the search."""
    matching_count = 0
    for checkpoint in newest:
        if _matches_store(run_query, checkpoint):
            matching_count += 1
        elif vouches(checkpoint):
            matching_count = 0
            yield checkpoint
        if matching_count == FITTING_CHECKPOINTS or (checkpoint.accepted is not msgspec.UNSET and vouches(checkpoint)):
            return


def _matches_store(run_query: RunQuery, checkpoint: Checkpoint) -> bool:
    """Return True if a store has the heads of a checkpoint. The event committed last implies all others."""
    heads, last_stream = checkpoint.heads, checkpoint.last
    streams = [last_stream] if last_stream is not msgspec.UNSET and last_stream in heads else [*heads]
    return all(_has_event(run_query, stream, *heads[stream]) for stream in streams)


def _has_event(run_query: RunQuery, stream: str, seq: int, digest: str) -> bool:
    return any(bytes(row["hash"]).hex() == digest for row in run_query("hash_of", {"stream": stream, "seq": seq}))


def find_missing_tails(run_query: RunQuery, mismatches: Iterable[Checkpoint]) -> tuple[tuple[MissingTail, ...], bool]:
    """Find how far each stream matches, and whether the store has other events in place of checkpointed ones."""
    missing_seqs: defaultdict[str, list[int]] = defaultdict(list)
    for checkpoint in mismatches:
        for stream, (seq, digest) in checkpoint.heads.items():
            if not _has_event(run_query, stream, seq, digest):
                missing_seqs[stream].append(seq)
    gaps: list[MissingTail] = []
    is_forked = False
    for stream, seqs in sorted(missing_seqs.items()):
        head = next((row["head"] for row in run_query("head", {"stream": stream})), 0)
        is_forked = is_forked or head >= min(seqs)
        gaps.append(MissingTail(stream, max(seqs), min(head, min(seqs) - 1)))
    return tuple(gaps), is_forked


def format_store_location(url: str) -> str:
    """Format the canonical location of a store, without a password. Empty for the in-memory store."""
    path = find_store_file(url)
    if path is not None:
        return os.path.realpath(path)
    if not url.lower().startswith(("postgresql:", "postgres:")):
        return ""
    return postgres_address(url).whereabouts()


def _format_utc(at: int) -> str:
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

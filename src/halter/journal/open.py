"""Opens the store that a URL names, and checks that it continues from its newest checkpoints.

A restored copy is consistent in itself: its chains hold, and its caps, halts and denials are those of an earlier day.
Only what is kept outside the store shows that there was more. The events that the newest checkpoints name are looked up
when a store is opened: a few indexed reads, however large the store is. Every event is checkpointed after its commit is
durable, so a store may be ahead of its checkpoints, never behind.
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
from halter.journal.sqlite import LEASE_DURATION, SqliteEngine, open_read_only
from halter.journal.store import JournalStore, Observer

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
    """Open the store that a URL names, and create it if it does not exist."""
    return JournalStore(open_engine(url, clock=clock, ids=ids, lease=lease), inline=inline, observers=observers)


def open_engine(url: str, *, clock: Clock, ids: Ids, lease: int = LEASE_DURATION) -> Engine:
    match = _SCHEME.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("", url)
    match scheme:
        case "memory" if not rest:
            return MemoryEngine(now=clock.now, new_id=ids.make, lease=lease)
        case "postgresql" | "postgres" if rest.startswith("//"):
            return _open_postgres(url, ids.make, lease)
        case "" | "sqlite" if rest and (not rest.startswith("//") or rest.startswith("///")):
            return SqliteEngine(_prepare_file(rest), now=clock.now, new_id=ids.make, lease=lease)
        case _:
            raise StoreUnusable(f"The store {mask_url(url)!r} has no form that Halter knows. Write {URL_FORMS}.")


def mask_url(url: str) -> str:
    """A URL without its passwords, for people and for logs."""
    without = re.sub(
        r"^([a-z][a-z0-9+.-]*://)?([^:/?#]*):(?!//).*@", r"\1\2:***@", url, flags=re.IGNORECASE | re.DOTALL
    )
    return re.sub(r"(password=)[^&]*", r"\1***", without, flags=re.IGNORECASE)


def _open_postgres(url: str, new_id: Callable[[], str], lease: int) -> Engine:
    postgres_address(url)
    from halter.journal.postgres import PostgresEngine

    return PostgresEngine(url, new_id=new_id, lease=lease)


def postgres_address(url: str) -> "PostgresAddress":
    """Read the URL of a PostgreSQL store. Raises StoreUnusable if it is invalid, or the driver is missing."""
    try:
        from halter.journal.connection import PostgresAddress
    except ModuleNotFoundError as missing:
        raise StoreUnusable(explain_extra("postgres", f"The store {mask_url(url)}")) from missing
    return PostgresAddress(url)


def _prepare_file(rest: str) -> str:
    """The file of a URL, in a folder that only its owner can read."""
    path = _parse_path(rest)
    if path.is_dir():
        raise StoreUnusable(f"The store {path} is a folder: name a file in it, such as {path / 'halter.db'}.")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(
            f"The folder {path.parent} of the store cannot be made ({error.strerror}): make it, or name another file."
        ) from error
    with suppress(OSError):
        path.touch(mode=0o600, exist_ok=True)
    return str(path)


def _parse_path(rest: str) -> Path:
    """Parse what follows the scheme; a NUL or an unknown user's home is refused."""
    if "\0" in rest:
        raise StoreUnusable("The name of the store holds a NUL character, which no file can have: name another file.")
    try:
        return Path(f"/{rest.lstrip('/')}" if rest.startswith("//") else rest).expanduser()
    except RuntimeError as error:
        raise StoreUnusable(f"The store {rest} names a home folder that is not known: write the whole path.") from error


def store_file_exists(url: str) -> bool:
    """Whether a store file exists; a server is asked by opening it."""
    path = find_store_file(url)
    return path is None or path.exists()


def find_store_file(url: str) -> Path | None:
    match = _SCHEME.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("", url)
    return _parse_path(rest) if scheme in {"", "sqlite"} else None


CompletionKind = Literal["sessions", "agents", "decisions", "triggers", "rules", "findings", "proposals"]

MOST_COMPLETIONS: Final = 200
"""More completions than this are useless in a shell."""

SHORT_BUSY_TIMEOUT: Final = "PRAGMA busy_timeout = 50"


def complete_names(url: str, names: CompletionKind, beginning: str) -> list[tuple[str, str]]:
    """Names with this prefix and a description, for shell completion. A server is not asked: that may take long."""
    path = find_store_file(url)
    if path is None or not path.is_file():
        return []
    with closing(open_read_only(str(path))) as connection:
        connection.execute(SHORT_BUSY_TIMEOUT)
        params = {"like": f"{_escape_pattern(beginning)}*", "limit": MOST_COMPLETIONS}
        rows = connection.execute(load_queries("sqlite/offered.sql")[names], params)
        return [(str(name), str(told)) for name, told in rows]


def _escape_pattern(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


RunQuery = Callable[[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]

FITTING_CHECKPOINTS: Final = 64
"""After this many matching checkpoints in a row, all earlier ones match.

Each process writes down all that it committed. After a checkpoint of a missing event, another process can add only one
line that knows nothing later. So this must exceed the number of processes that share a file.
"""

MOST_STREAMS_NAMED: Final = 3
"""How many streams a sentence names; the others are counted."""

PLACES_FOLDER: Final = "places"


class MissingTail(msgspec.Struct, frozen=True):
    """A stream of which checkpoints know more than the store: it matches up to `fits`, they know `known`."""

    stream: str
    known: int
    fits: int


class OlderCopy(msgspec.Struct, frozen=True):
    """Why nothing may run on a store: what its checkpoints knew at `at` is missing. It `ends` at its last event.

    `lost` counts what those checkpoints vouch for: micro-dollars, halts, denials.
    """

    kind: Literal["older", "forked", "replaced", "gone"]
    place: str
    store: str
    at: int
    ends: int = 0
    gaps: tuple[MissingTail, ...] = ()
    lost: Mapping[str, int] = {}

    @property
    def events(self) -> int:
        return sum(gap.known - gap.fits for gap in self.gaps)

    @property
    def count_given_up(self) -> Mapping[str, int]:
        """What a person gives up by continuing: of each stream, all that checkpoints know after a number."""
        return {gap.stream: gap.fits for gap in self.gaps}

    def sentence(self) -> str:
        put_back = "Put it back, or begin" if self.kind == "gone" else "Put the newer one back, or go on with this one,"
        without = " a new one:" if self.kind == "gone" else " without what is missing:"
        missing = self.describe_missing()
        return f"{missing} Nothing runs on it until a person decides. {put_back}{without} halter store accept"

    def describe_missing(self) -> str:
        when = _format_utc(self.at)
        match self.kind:
            case "gone":
                return (
                    f"The store {self.place} is gone. It was last checkpointed at {when} (id {self.store}), and a new "
                    "one would know nothing of what was spent, halted and denied in it."
                )
            case "replaced":
                return (
                    f"The store {self.place} is not the one that was used here before. That one was last checkpointed "
                    f"at {when} (id {self.store}), and what was spent, halted and denied in it is not in this one."
                )
            case "forked":
                return (
                    f"The store {self.place} has another history than its checkpoints: {self._missing(when)}, and "
                    f"others stand in their place.{self._describe_lost()}"
                )
            case "older":
                ends = f"ends at {_format_utc(self.ends)}" if self.ends else "is empty"
                return (
                    f"The store {self.place} is older than its checkpoints: it {ends}, and {self._missing(when)}."
                    f"{self._describe_lost()}"
                )

    def _missing(self, when: str) -> str:
        streams = sorted(self.gaps, key=lambda gap: (gap.stream != FLEET, gap.stream))
        named = [f"{gap.known - gap.fits} of {gap.stream}" for gap in streams[:MOST_STREAMS_NAMED]]
        if len(streams) > MOST_STREAMS_NAMED:
            named.append(f"others of {format_count(len(streams) - MOST_STREAMS_NAMED, 'more stream')}")
        verb = "is" if self.events == 1 else "are"
        return f"{format_count(self.events, 'event')} until {when} {verb} missing ({', '.join(named)})"

    def _describe_lost(self) -> str:
        found = [
            *([f"{format_micros(self.lost[USD])} of spending"] if self.lost.get(USD) else []),
            *([format_count(self.lost[HALTS], "halt")] if self.lost.get(HALTS) else []),
            *([format_count(self.lost[DENIALS], "denial")] if self.lost.get(DENIALS) else []),
        ]
        return f" Missing with them: up to {', '.join(found)}." if found else ""


class AcceptancePending(msgspec.Struct, frozen=True):
    """A person accepted the store as it is, and these checkpoints do not record it yet."""

    given_up: Mapping[str, int]


class Continuity:
    """What a folder of checkpoints knows of the store at one place."""

    def __init__(self, folder: Path, place: str, trusted: Collection[str] = ()) -> None:
        self._folder = folder
        self._place = place
        self._trusted = trusted
        self._pointer = folder / PLACES_FOLDER / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"

    def find_missing_store(self) -> OlderCopy | None:
        """The store that was used at this place and is gone."""
        known = self._describe_known()
        return self._find_other("gone", known) if known else None

    def check(self, ask: RunQuery, store: str) -> OlderCopy | AcceptancePending | None:
        """Compare a store with its newest checkpoints; None if it continues them, or there are none."""
        known = self._describe_known()
        doubt = self._find_other("replaced", known) if known not in {"", store} else self._behind(ask, store)
        if doubt is None:
            return None
        said = ask("events_of_kind", {"stream": FLEET, "kind": StoreAccepted.KIND, "limit": 1})
        if said and said[0]["at"] > doubt.at:
            return AcceptancePending(doubt.count_given_up)
        return doubt

    def remember(self, store: str) -> None:
        """Record which store is used at this place. If that fails, a missing store is not noticed later."""
        if self._describe_known() == store:
            return
        with suppress(OSError):
            self._pointer.parent.mkdir(mode=0o700, exist_ok=True)
            draft = self._pointer.with_suffix(f".{os.getpid()}")
            draft.write_bytes(msgspec.json.encode({"place": self._place, "store": store}))
            draft.replace(self._pointer)

    def _describe_known(self) -> str:
        try:
            return str(msgspec.json.decode(self._pointer.read_bytes())["store"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _find_other(self, kind: Literal["replaced", "gone"], known: str) -> OlderCopy | None:
        """Report a missing store, unless nothing of it was ever checkpointed."""
        newest = next(filter(self._vouches, self._checkpoints(known)), None)
        return None if newest is None else OlderCopy(kind, self._place, known, newest.at)

    def _behind(self, ask: RunQuery, store: str) -> OlderCopy | None:
        misfits = list(find_unknown_checkpoints(ask, self._checkpoints(store), self._vouches))
        if not misfits:
            return None
        gaps, forked = find_missing_tails(ask, misfits)
        lost: Counter[str] = Counter()
        for checkpoint in misfits:
            lost.update({} if checkpoint.tally is msgspec.UNSET else checkpoint.tally)
        ends = max((row["at"] for row in ask("heads", {})), default=0)
        at = max(checkpoint.at for checkpoint in misfits)
        return OlderCopy("forked" if forked else "older", self._place, store, at, ends, gaps, dict(lost))

    def _checkpoints(self, store: str) -> Iterator[Checkpoint]:
        for line in read_lines_backwards(checkpoint_file(self._folder, store)):
            checkpoint = parse_checkpoint(line)
            if checkpoint is not None and checkpoint.store == store:
                yield checkpoint

    def _vouches(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is signed as expected; asked only of those that the store does not match."""
        if self._trusted and checkpoint.key not in self._trusted:
            return False
        return is_signed(checkpoint.signed_bytes(), checkpoint.signature, checkpoint.key)


def find_unknown_checkpoints(
    ask: RunQuery, newest: Iterable[Checkpoint], vouches: Callable[[Checkpoint], bool]
) -> Iterator[Checkpoint]:
    """The newest checkpoints that name events missing in the store. An acceptance ends the search."""
    fitting = 0
    for checkpoint in newest:
        if _matches_store(ask, checkpoint):
            fitting += 1
        elif vouches(checkpoint):
            fitting = 0
            yield checkpoint
        if fitting == FITTING_CHECKPOINTS or (checkpoint.accepted is not msgspec.UNSET and vouches(checkpoint)):
            return


def _matches_store(ask: RunQuery, checkpoint: Checkpoint) -> bool:
    """Whether a store has what a checkpoint names. The event committed last implies all others."""
    heads, last = checkpoint.heads, checkpoint.last
    streams = [last] if last is not msgspec.UNSET and last in heads else [*heads]
    return all(_has_event(ask, stream, *heads[stream]) for stream in streams)


def _has_event(ask: RunQuery, stream: str, seq: int, digest: str) -> bool:
    return any(bytes(row["hash"]).hex() == digest for row in ask("hash_of", {"stream": stream, "seq": seq}))


def find_missing_tails(ask: RunQuery, misfits: Iterable[Checkpoint]) -> tuple[tuple[MissingTail, ...], bool]:
    """For each stream, how far it matches, and whether other events stand where checkpoints know some."""
    wrong: defaultdict[str, list[int]] = defaultdict(list)
    for checkpoint in misfits:
        for stream, (seq, digest) in checkpoint.heads.items():
            if not _has_event(ask, stream, seq, digest):
                wrong[stream].append(seq)
    gaps: list[MissingTail] = []
    forked = False
    for stream, seqs in sorted(wrong.items()):
        here = next((row["head"] for row in ask("head", {"stream": stream})), 0)
        forked = forked or here >= min(seqs)
        gaps.append(MissingTail(stream, max(seqs), min(here, min(seqs) - 1)))
    return tuple(gaps), forked


def name_store_place(url: str) -> str:
    """A canonical name of a store's place, without a password; none for memory."""
    path = find_store_file(url)
    if path is not None:
        return os.path.realpath(path)
    if not url.lower().startswith(("postgresql:", "postgres:")):
        return ""
    return postgres_address(url).whereabouts()


def _format_utc(at: int) -> str:
    return datetime.fromtimestamp(at / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

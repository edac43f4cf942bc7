"""A store with all that is kept beside it, opened and closed together.

What this process commits, for somebody beside it who looks at one event after the other.

How events and news are written for programs, whichever face gives them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.config.merge import FleetConfig
from halter.core.clock import SECOND, Clock, SystemClock
from halter.core.errors import StoreUnusable
from halter.core.folders import WritableFolders
from halter.core.ids import Ids, SortableIds, StreamId
from halter.core.ports import Stored
from halter.core.processes import LivenessWriter, install_print_masks
from halter.core.text import clean, from_body
from halter.dispatch.heartbeat import StoreClock, read_steady_clock
from halter.guard.ledger import Ledger
from halter.journal.store import StoreProblem
from halter.runtime.feed import MAX_PENDING_ITEMS, FeedEvent, FeedGap, FeedItem, LiveUpdate
from halter.runtime.policy import EffectivePolicy, bind_policy, read_local_fleet
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.journal.checkpoints import Checkpointer
    from halter.journal.engine import Engine
    from halter.journal.open import Continuity, OlderCopy
    from halter.journal.store import JournalStore

EMPTY_ENVIRON: Final = MappingProxyType[str, str]({})
DEFAULT_LEASE_DURATION: Final = 15 * SECOND


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything that a face needs, ready to use. `writable` are the roots of the agents that are loaded now.

    `doubt` says what the store lacks of what its checkpoints know. Then no checkpoint is written, and nothing may run.
    """

    settings: Settings
    clock: Clock
    ids: Ids
    store: "JournalStore"
    checkpointer: "Checkpointer"
    purse: Ledger
    environ: Mapping[str, str]
    trouble: StoreProblem = field(default_factory=StoreProblem)
    writable: list[WritableFolders] = field(default_factory=list[WritableFolders])
    pulse: LivenessWriter = field(default_factory=LivenessWriter)
    doubt: "OlderCopy | None" = None
    policy: EffectivePolicy | None = None
    """What binds the agents of this process; None where it was opened only to look, and runs none."""

    @property
    def fleet(self) -> FleetConfig:
        """What holds for all agents here: the store's policy, and what is written here where that is stricter."""
        if self.policy is None:
            raise RuntimeError("This store was opened only to look at it: no agent may be put together on it.")
        return self.policy.fleet

    def patient(self) -> "JournalStore":
        """Return a handle on the store that waits while it is unavailable; all of them share `trouble`."""
        return self.store.patient(self.clock, self.trouble)


@asynccontextmanager
async def open_runtime(  # noqa: PLR0913 Each says one thing of who opens it, and all of them have their usual value.
    settings: Settings,
    clock: Clock | None = None,
    environ: Mapping[str, str] = EMPTY_ENVIRON,
    *,
    lease: int = DEFAULT_LEASE_DURATION,
    pulse: LivenessWriter | None = None,
    acts: bool = True,
    written: Callable[[Settings], FleetConfig | None] = read_local_fleet,
    despite_doubt: bool = False,
) -> AsyncGenerator[Runtime]:
    """Open the store with its checkpoints beside it, and let go of both at the end.

    Secrets are looked for in `environ`; `lease` is how long a process that says nothing keeps its sessions. By its
    `pulse` a sentinel outside sees that the process is alive, if there is one. A process that `acts` is bound by the
    store's policy, and adopts what is `written` here if the store has none. One that only looks, or says a person's
    word, needs no policy and reads no file of it. A store that lacks what its checkpoints know is refused, except to
    those who open it `despite_doubt`: they run nothing.
    """
    from halter.journal.checkpoints import Checkpointer
    from halter.journal.memory import MemoryEngine
    from halter.journal.open import open_engine
    from halter.journal.store import JournalStore

    _prepare(settings)
    clock = clock or (
        StoreClock() if settings.store.lower().startswith(("postgresql:", "postgres:")) else SystemClock()
    )
    ids = SortableIds(clock.now)
    continuity = find_continuity(settings)
    gone = _detect_missing_store(settings, continuity, despite_doubt=despite_doubt)
    engine = open_engine(settings.store, clock=clock, ids=ids, lease=lease)
    try:
        store_id = {row["name"]: row["value"] for row in engine.ask("meta", {})}["store"]
        checkpointer = Checkpointer(settings.checkpoints, settings.signing_key, store_id, clock.now)
        doubt = gone or _compare_with_checkpoints(
            engine, store_id, continuity, checkpointer, despite_doubt=despite_doubt
        )
    except BaseException:
        engine.close()
        raise
    # What is kept in memory only is gone with the process: nobody can cut it off, and it waits for no disk. And a
    # checkpoint of a store in doubt would be one that it fits.
    in_memory = isinstance(engine, MemoryEngine)
    store = JournalStore(engine, inline=in_memory, observers=() if in_memory or doubt else (checkpointer,))
    try:
        if isinstance(clock, StoreClock):
            await sync_store_clock(store, clock)
        purse = Ledger(store, clock)
        policy = await bind_policy(store, written(settings), settings.person) if acts else None
        alive = pulse or LivenessWriter()
        with install_print_masks():
            yield Runtime(
                settings, clock, ids, store, checkpointer, purse, environ, pulse=alive, doubt=doubt, policy=policy
            )
    finally:
        await store.close()


def find_continuity(settings: Settings) -> "Continuity | None":
    """Find what the checkpoints know of the store that is used at this place; nothing, of one in memory."""
    from halter.journal.checkpoints import public_key_path, read_public_keys
    from halter.journal.open import Continuity, name_store_place

    place = name_store_place(settings.store)
    if not place:
        return None
    trusted = frozenset[str]()
    with suppress(OSError, ValueError):
        trusted = read_public_keys(public_key_path(settings.signing_key))
    return Continuity(settings.checkpoints, place, trusted)


def _detect_missing_store(
    settings: Settings, continuity: "Continuity | None", *, despite_doubt: bool
) -> "OlderCopy | None":
    """Find that the store is gone that was used at this place, before a new one is made there."""
    from halter.journal.open import store_file_exists

    gone = None
    # A path that cannot even be looked at is refused in a sentence when it is opened.
    with suppress(OSError):
        gone = None if continuity is None or store_file_exists(settings.store) else continuity.gone()
    if gone is not None and not despite_doubt:
        raise StoreUnusable(gone.sentence())
    return gone


def _compare_with_checkpoints(
    engine: "Engine",
    store_id: str,
    continuity: "Continuity | None",
    checkpointer: "Checkpointer",
    *,
    despite_doubt: bool,
) -> "OlderCopy | None":
    """Compare a store with its checkpoints. What a person accepted on another machine is written down here, too."""
    from halter.journal.open import AcceptancePending, OlderCopy

    if continuity is None:
        return None
    found = continuity.look(engine.ask, store_id)
    if isinstance(found, OlderCopy):
        if not despite_doubt:
            raise StoreUnusable(found.sentence())
        return found
    if not despite_doubt:
        if isinstance(found, AcceptancePending):
            checkpointer.accept(found.given_up)
        continuity.remember(store_id)
    return None


async def sync_store_clock(store: "JournalStore", clock: StoreClock) -> None:
    """Let a clock know the store's time."""
    before = read_steady_clock()
    at = await store.now()
    clock.heard(before, at, read_steady_clock())


def _prepare(settings: Settings) -> None:
    """Make the folders for checkpoints and their key; where that fails, the checkpointer says so and work goes on."""
    for folder in (settings.checkpoints.parent, settings.checkpoints, settings.signing_key.parent):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class CommitObserver:
    """Observes a store. What others commit is theirs to look at: so of many workers, each shows and traces its own."""

    every_seconds = 3600.0

    def __init__(self, loop: asyncio.AbstractEventLoop, wanted: Callable[[StreamId], bool]) -> None:
        self._loop = loop
        self._wanted = wanted
        self._waiting: deque[Stored] = deque(maxlen=MAX_PENDING_ITEMS)
        self._came = asyncio.Event()

    def saw(self, events: Sequence[Stored]) -> None:
        """Take note, in whatever thread; where nobody keeps up, the oldest are not looked at."""
        self._waiting.extend(stored for stored in events if self._wanted(stored.stream))
        with suppress(RuntimeError):
            # The loop may be gone by now.
            self._loop.call_soon_threadsafe(self._came.set)

    def flush(self) -> None:
        """Put nothing off."""

    async def each(self) -> AsyncGenerator[Stored]:
        """Give one after the other, as they come."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                yield self._waiting.popleft()


def serialize_event(stored: Stored) -> dict[str, Any]:
    """Write an event for programs."""
    return {
        "stream": stored.stream,
        "seq": stored.seq,
        "kind": stored.kind,
        "version": stored.version,
        "at": stored.at,
        "generation": stored.generation,
        "facts": msgspec.Raw(stored.facts),
        "body": None if stored.body is None else clean(from_body(stored.body)),
        "blob": stored.blob,
        "erased": stored.erased,
        "hash": stored.hash.hex(),
    }


def serialize_feed_item(item: FeedItem) -> Mapping[str, Any]:
    """Write a piece of news for programs."""
    match item:
        case FeedEvent():
            return {"name": item.name, **serialize_event(item.stored)}
        case LiveUpdate():
            return msgspec.structs.asdict(item)
        case FeedGap():
            return {"name": "gap", **msgspec.structs.asdict(item)}

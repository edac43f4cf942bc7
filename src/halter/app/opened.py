"""A store with all that is kept beside it, opened and closed together."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from halter.app.policy import InForce, bind_policy, written_fleet
from halter.config.fleet import Fleet
from halter.core.clock import SECOND, Clock, SystemClock
from halter.core.errors import StoreUnusable
from halter.core.ids import Ids, SortableIds
from halter.core.prints import prints_watched
from halter.core.protected import Writable
from halter.core.pulse import Pulse
from halter.dispatch.clocks import StoreTime, steady
from halter.guard.purse import Purse
from halter.journal.retry import Trouble
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.journal.checkpoints import Checkpointer
    from halter.journal.continuity import Continuity, Doubt
    from halter.journal.engine import Engine
    from halter.journal.store import JournalStore


NOTHING: Final = MappingProxyType[str, str]({})
LEASE: Final = 15 * SECOND


@dataclass(frozen=True, slots=True)
class App:
    """Everything that a face needs, ready to use. `writable` are the roots of the agents that are loaded now.

    `doubt` says what the store lacks of what its checkpoints know. Then no checkpoint is written, and nothing may run.
    """

    settings: Settings
    clock: Clock
    ids: Ids
    store: "JournalStore"
    checkpointer: "Checkpointer"
    purse: Purse
    environ: Mapping[str, str]
    trouble: Trouble = field(default_factory=Trouble)
    writable: list[Writable] = field(default_factory=list[Writable])
    pulse: Pulse = field(default_factory=Pulse)
    doubt: "Doubt | None" = None
    policy: InForce | None = None
    """What binds the agents of this process; None where it was opened only to look, and runs none."""

    @property
    def fleet(self) -> Fleet:
        """What holds for all agents here: the store's policy, and what is written here where that is stricter."""
        if self.policy is None:
            raise RuntimeError("This store was opened only to look at it: no agent may be put together on it.")
        return self.policy.fleet

    def patient(self) -> "JournalStore":
        """Return a handle on the store that waits while it is unavailable; all of them share `trouble`."""
        return self.store.patient(self.clock, self.trouble)


@asynccontextmanager
async def open_app(  # noqa: PLR0913 Each says one thing of who opens it, and all of them have their usual value.
    settings: Settings,
    clock: Clock | None = None,
    environ: Mapping[str, str] = NOTHING,
    *,
    lease: int = LEASE,
    pulse: Pulse | None = None,
    acts: bool = True,
    written: Callable[[Settings], Fleet | None] = written_fleet,
    despite_doubt: bool = False,
) -> AsyncGenerator[App]:
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
    clock = clock or (StoreTime() if settings.store.lower().startswith(("postgresql:", "postgres:")) else SystemClock())
    ids = SortableIds(clock.now)
    continuity = continuity_of(settings)
    gone = _missed(settings, continuity, despite_doubt=despite_doubt)
    engine = open_engine(settings.store, clock=clock, ids=ids, lease=lease)
    try:
        store_id = {row["name"]: row["value"] for row in engine.ask("meta", {})}["store"]
        checkpointer = Checkpointer(settings.checkpoints, settings.signing_key, store_id, clock.now)
        doubt = gone or _compared(engine, store_id, continuity, checkpointer, despite_doubt=despite_doubt)
    except BaseException:
        engine.close()
        raise
    # What is kept in memory only is gone with the process: nobody can cut it off, and it waits for no disk. And a
    # checkpoint of a store in doubt would be one that it fits.
    in_memory = isinstance(engine, MemoryEngine)
    store = JournalStore(engine, inline=in_memory, observers=() if in_memory or doubt else (checkpointer,))
    try:
        if isinstance(clock, StoreTime):
            await told_time(store, clock)
        purse = Purse(store, clock)
        policy = await bind_policy(store, written(settings), settings.person) if acts else None
        alive = pulse or Pulse()
        with prints_watched():
            yield App(
                settings, clock, ids, store, checkpointer, purse, environ, pulse=alive, doubt=doubt, policy=policy
            )
    finally:
        await store.close()


def continuity_of(settings: Settings) -> "Continuity | None":
    """Find what the checkpoints know of the store that is used at this place; nothing, of one in memory."""
    from halter.journal.continuity import Continuity, place_of
    from halter.journal.keys import public_key_path, public_keys

    place = place_of(settings.store)
    if not place:
        return None
    trusted = frozenset[str]()
    with suppress(OSError, ValueError):
        trusted = public_keys(public_key_path(settings.signing_key))
    return Continuity(settings.checkpoints, place, trusted)


def _missed(settings: Settings, continuity: "Continuity | None", *, despite_doubt: bool) -> "Doubt | None":
    """Find that the store is gone that was used at this place, before a new one is made there."""
    from halter.journal.open import is_there

    gone = None
    # A path that cannot even be looked at is refused in a sentence when it is opened.
    with suppress(OSError):
        gone = None if continuity is None or is_there(settings.store) else continuity.gone()
    if gone is not None and not despite_doubt:
        raise StoreUnusable(gone.sentence())
    return gone


def _compared(
    engine: "Engine",
    store_id: str,
    continuity: "Continuity | None",
    checkpointer: "Checkpointer",
    *,
    despite_doubt: bool,
) -> "Doubt | None":
    """Compare a store with its checkpoints. What a person accepted on another machine is written down here, too."""
    from halter.journal.continuity import Accepted, Doubt

    if continuity is None:
        return None
    found = continuity.look(engine.ask, store_id)
    if isinstance(found, Doubt):
        if not despite_doubt:
            raise StoreUnusable(found.sentence())
        return found
    if not despite_doubt:
        if isinstance(found, Accepted):
            checkpointer.accept(found.given_up)
        continuity.remember(store_id)
    return None


async def told_time(store: "JournalStore", clock: StoreTime) -> None:
    """Let a clock know the store's time."""
    before = steady()
    at = await store.now()
    clock.heard(before, at, steady())


def _prepare(settings: Settings) -> None:
    """Make the folders for checkpoints and their key; where that fails, the checkpointer says so and work goes on."""
    for folder in (settings.checkpoints.parent, settings.checkpoints, settings.signing_key.parent):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

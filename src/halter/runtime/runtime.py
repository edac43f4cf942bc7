"""The opened store with its checkpoints and its policy.

The store's policy binds every process; a stricter file counts here.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from halter.config.decode import value_or_default
from halter.config.merge import FleetConfig, read_fleet
from halter.config.policy import (
    PolicyDifference,
    canonicalize_policy,
    digest_policy,
    merge_with_policy,
    parse_stored_fleet,
)
from halter.config.resolve import FLEET_DAY_CAP
from halter.core.clock import SECOND, Clock, SystemClock
from halter.core.errors import StoreUnusable
from halter.core.events import FleetPolicyAdopted
from halter.core.folders import WritableFolders
from halter.core.ids import Ids, SortableIds
from halter.core.ports import Query, Store
from halter.core.processes import LivenessWriter, install_print_masks
from halter.core.rows import FleetPolicyRow
from halter.dispatch.heartbeat import StoreClock, read_steady_clock
from halter.guard.judge import adopt_first_policy
from halter.guard.ledger import Ledger
from halter.journal.store import StoreProblem
from halter.redaction.redact import Redactor
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.journal.checkpoints import Checkpointer
    from halter.journal.engine import Engine
    from halter.journal.open import Continuity, OlderCopy
    from halter.journal.store import JournalStore

DEFAULT_FLEET: Final = FleetConfig()
MAX_NAMED_DIFFERENCES: Final = 4
"""How many differences a line names; the rest is counted."""


class EffectivePolicy(msgspec.Struct, frozen=True):
    """The policy of this process. `row` is the store's policy, `written` the local file.

    `adopted` says that this process made the local file the policy of a store that had none.
    """

    fleet: FleetConfig = DEFAULT_FLEET
    row: FleetPolicyRow | None = None
    local_file: FleetConfig | None = None
    differences: tuple[PolicyDifference, ...] = ()
    adopted: bool = False

    def describe_difference(self) -> str:
        """Says in one line where the store's policy and the local file differ; "" if they do not."""
        if self.row is None:
            return ""
        if self.local_file is None:
            return _describe_store_only(self.differences)
        file = self.local_file.source_map.file
        bound = [each for each in self.differences if each.how in ("looser", "fixed")]
        stricter = [each for each in self.differences if each.how == "stricter"]
        texts: list[str] = []
        if bound:
            texts.append(f"This store's policy counts, and not {file}, in {_describe_pairs(bound)}.")
        if stricter:
            texts.append(
                f"{file} is stricter than this store's policy, and counts here only, in {_describe_pairs(stricter)}."
            )
        if texts:
            texts.append(f"To make {file} the store's policy: halter policy apply {file}")
        return " ".join(texts)

    def describe_adoption(self) -> str:
        """Says in one line that the local file became the store's policy; "" if it did not."""
        if not self.adopted or self.local_file is None:
            return ""
        file = self.local_file.source_map.file
        return f"{file} is this store's policy from now on: it binds every process on it. See it: halter policy"


def _describe_store_only(differences: Sequence[PolicyDifference]) -> str:
    told = [each for each in differences if each.how != "free"]
    if not told:
        return ""
    words = [f"{each.key} is {each.stored}" for each in told[:MAX_NAMED_DIFFERENCES]]
    what = f"{', '.join(words)}{_count_more(told)}"
    return f"There is no halter.yaml here, so this store's policy alone counts: {what}. See it: halter policy"


def _describe_pairs(differences: Sequence[PolicyDifference]) -> str:
    """Names each key with the value that counts, and the one that does not."""
    words = [
        f"{each.key} ({each.written}, not {each.stored})"
        if each.how == "stricter"
        else f"{each.key} ({each.stored}, not {each.written})"
        for each in differences[:MAX_NAMED_DIFFERENCES]
    ]
    return f"{', '.join(words)}{_count_more(differences)}"


def _count_more(differences: Sequence[PolicyDifference]) -> str:
    return f" and {len(differences) - MAX_NAMED_DIFFERENCES} more" if len(differences) > MAX_NAMED_DIFFERENCES else ""


def read_local_fleet(settings: Settings) -> FleetConfig | None:
    """Read the fleet's file of this process, if it has one."""
    return None if settings.fleet is None else read_fleet(settings.fleet)


def use_local_policy(settings: Settings) -> EffectivePolicy:
    """Takes the local file as it is, for a store that no other process uses."""
    written = read_local_fleet(settings)
    return EffectivePolicy(written or DEFAULT_FLEET, None, written)


async def resolve_effective_policy(store: Store, written: FleetConfig | None) -> EffectivePolicy:
    """Returns the policy of a process with this file; changes nothing."""
    row = await read_stored_policy(store)
    if row is None:
        return EffectivePolicy(written or DEFAULT_FLEET, None, written)
    return _make_effective_policy(row, written)


async def is_superseded(store: Store, policy: EffectivePolicy) -> bool:
    """Whether the store's policy has changed since a process was bound by it."""
    row = await read_stored_policy(store)
    digest = "" if policy.row is None else policy.row.digest
    if row is None or row.digest == digest:
        return False
    now, before = _make_effective_policy(row, policy.local_file).fleet, policy.fleet
    return (now.spec, now.extra_policies, now.silent) != (before.spec, before.extra_policies, before.silent)


async def read_stored_policy(store: Store) -> FleetPolicyRow | None:
    return next(iter(await store.ask(Query("all_fleet_policy", FleetPolicyRow))), None)


def _make_effective_policy(row: FleetPolicyRow, written: FleetConfig | None) -> EffectivePolicy:
    stored = parse_stored_fleet(row.policy)
    bound = merge_with_policy(stored, written)
    differences = bound.differences if written is not None else merge_with_policy(stored, DEFAULT_FLEET).differences
    return EffectivePolicy(bound.fleet, row, written, differences)


async def bind_policy(store: Store, written: FleetConfig | None, by: str) -> EffectivePolicy:
    """Binds a process that is about to act. The first file that a person uses on a store becomes its policy.

    A process that an agent started adopts nothing: it is bound by the defaults as if they were the store's policy.
    """
    found = await resolve_effective_policy(store, written)
    if found.row is not None or written is None:
        return found
    adopted = bool((await store.commit(adopt_first_policy(make_adoption_event(written, by)))).fresh())
    found = await resolve_effective_policy(store, written)
    if found.row is None:
        return msgspec.structs.replace(found, fleet=merge_with_policy(DEFAULT_FLEET, written).fleet)
    return msgspec.structs.replace(found, adopted=adopted)


def _drop_secret_providers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drops providers whose address holds a key: what is stored here is never erased."""
    redact = Redactor({}, {}).redact
    providers: Mapping[str, Any] = raw.get("providers") or {}
    kept = {name: each for name, each in providers.items() if redact(text := canonicalize_policy({name: each})) == text}
    return raw if len(kept) == len(providers) else {**raw, "providers": kept}


def make_adoption_event(
    written: FleetConfig, by: str, *, replaces: str = "", loosens: tuple[str, ...] = (), reason: str = ""
) -> FleetPolicyAdopted:
    """Make the event by which a file becomes the store's policy."""
    policy, limits = canonicalize_policy(_drop_secret_providers(written.raw)), written.spec.limits
    return FleetPolicyAdopted(
        policy=policy,
        digest=digest_policy(policy),
        by=by,
        day_cap=value_or_default(limits.max_cost_usd_per_day, FLEET_DAY_CAP),
        month_cap=value_or_default(limits.max_cost_usd_per_month, None),
        replaces=replaces,
        loosens=loosens,
        reason=reason,
    )


EMPTY_ENVIRON: Final = MappingProxyType[str, str]({})
DEFAULT_LEASE_DURATION: Final = 15 * SECOND


class Runtime(msgspec.Struct, frozen=True):
    """An opened store with all that is kept beside it. `writable` are the roots of the agents that are loaded.

    `doubt` says what the store lacks that its checkpoints have: then no checkpoint is written and nothing may run.
    """

    settings: Settings
    clock: Clock
    ids: Ids
    store: "JournalStore"
    checkpointer: "Checkpointer"
    ledger: Ledger
    environ: Mapping[str, str]
    trouble: StoreProblem = msgspec.field(default_factory=StoreProblem)
    writable: list[WritableFolders] = msgspec.field(default_factory=list[WritableFolders])
    liveness: LivenessWriter = msgspec.field(default_factory=LivenessWriter)
    doubt: "OlderCopy | None" = None
    policy: EffectivePolicy | None = None
    """None where the store was opened read-only: then no agent runs."""

    @property
    def fleet(self) -> FleetConfig:
        """The fleet's configuration in force: the store's policy, and the local file where it is stricter."""
        if self.policy is None:
            raise RuntimeError("This store was opened only to look at it: no agent may be put together on it.")
        return self.policy.fleet

    def patient(self) -> "JournalStore":
        """Returns a handle on the store that retries while it is unavailable; all handles share `trouble`."""
        return self.store.patient(self.clock, self.trouble)


@asynccontextmanager
async def open_runtime(  # noqa: PLR0913 Each is one independent option with a default.
    settings: Settings,
    clock: Clock | None = None,
    environ: Mapping[str, str] = EMPTY_ENVIRON,
    *,
    lease: int = DEFAULT_LEASE_DURATION,
    liveness: LivenessWriter | None = None,
    acts: bool = True,
    written: Callable[[Settings], FleetConfig | None] = read_local_fleet,
    despite_doubt: bool = False,
) -> AsyncGenerator[Runtime]:
    """Opens the store with its checkpoints, and closes both at the end.

    Secrets come from `environ`; `lease` is how long a silent process keeps its sessions. `pulse` shows a sentinel that
    the process is alive. With `acts` the process is bound by the store's policy, and adopts what `written` returns if
    the store has none; without it no policy is read. A store that lacks what its checkpoints know is refused, unless
    opened `despite_doubt` to run nothing.
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
    # A store in memory is gone with the process and waits for no disk. A store in doubt writes no checkpoint: it would
    # match one.
    in_memory = isinstance(engine, MemoryEngine)
    store = JournalStore(engine, inline=in_memory, observers=() if in_memory or doubt else (checkpointer,))
    try:
        if isinstance(clock, StoreClock):
            await sync_store_clock(store, clock)
        ledger = Ledger(store, clock)
        policy = await bind_policy(store, written(settings), settings.person) if acts else None
        alive = liveness or LivenessWriter()
        with install_print_masks():
            yield Runtime(
                settings, clock, ids, store, checkpointer, ledger, environ, liveness=alive, doubt=doubt, policy=policy
            )
    finally:
        await store.close()


def find_continuity(settings: Settings) -> "Continuity | None":
    """Returns what the checkpoints know of the store at this place; None for one in memory."""
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
    """Detects that the store used at this place is gone, before a new one is created there."""
    from halter.journal.open import store_file_exists

    gone = None
    # A path that cannot even be looked at is refused in a sentence when it is opened.
    with suppress(OSError):
        gone = None if continuity is None or store_file_exists(settings.store) else continuity.find_missing_store()
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
    """Compares a store with its checkpoints. Records here what a person accepted on another machine."""
    from halter.journal.open import AcceptancePending, OlderCopy

    if continuity is None:
        return None
    found = continuity.check(engine.ask, store_id)
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
    before = read_steady_clock()
    at = await store.now()
    clock.set_time(before, at, read_steady_clock())


def _prepare(settings: Settings) -> None:
    """Makes the folders for checkpoints and their key; on failure the checkpointer reports it and work goes on."""
    for folder in (settings.checkpoints.parent, settings.checkpoints, settings.signing_key.parent):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

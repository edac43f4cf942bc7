"""The opened store with its checkpoints and its policy.

The store's policy binds every process. A stricter local file applies to this process.
"""

import asyncio
import hashlib
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
from halter.core.clock import MINUTE, SECOND, Clock, SystemClock
from halter.core.errors import ConfigError, StoreError, StoreUnusable
from halter.core.events import FleetPolicyAdopted, PricesChanged, StoreAccepted
from halter.core.ids import FLEET, Digest, Ids, SortableIds, can_decide
from halter.core.ports import Draft, Query, Rows, Store, Write
from halter.core.project.fleet import PRICES_PIN
from halter.core.rows import FleetPolicyRow, PinRow
from halter.core.text import clean, format_count
from halter.dispatch.store_clock import StoreClock, read_steady_clock
from halter.guard.halts import Departures
from halter.guard.ledger import Ledger
from halter.guard.model_door import PromptLog
from halter.journal.checkpoints import Checkpointer, public_key_path, read_public_keys
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.open import (
    AcceptancePending,
    Continuity,
    OlderCopy,
    format_store_location,
    open_engine,
    store_file_exists,
)
from halter.journal.store import JournalStore
from halter.journal.store_retry import StoreProblem
from halter.policy.defaults import FLEET_DAY_CAP
from halter.policy.store_policy import adopt_first_policy
from halter.redaction.redact import Redactor
from halter.settings import Settings
from halter.spec.fleet import PricesSpec
from halter.system.liveness import LivenessWriter
from halter.system.prints import install_print_masks
from halter.system.protected_paths import WritableFolders

if TYPE_CHECKING:
    from halter.models.price_tables import FetchedPrices, PriceTables

DEFAULT_FLEET: Final = FleetConfig()
MAX_NAMED_DIFFERENCES: Final = 4
"""Maximum number of differences that a line names; the rest are counted."""


class EffectivePolicy(msgspec.Struct, frozen=True):
    """The policy of this process. `row` is the store's policy, and `local_file` the local file.

    `proposals` has the event that makes the local file the policy of a store that has none. It is committed when a
    person's first session starts here, and empty otherwise: a command that is refused adopts nothing.
    """

    fleet: FleetConfig = DEFAULT_FLEET
    row: FleetPolicyRow | None = None
    local_file: FleetConfig | None = None
    differences: tuple[PolicyDifference, ...] = ()
    proposals: list[FleetPolicyAdopted] = msgspec.field(default_factory=list[FleetPolicyAdopted])

    def describe_difference(self) -> str:
        """Describe in one line where the store's policy and the local file differ; "" if they do not."""
        if self.row is None:
            return ""
        if self.local_file is None:
            return _describe_store_only(self.differences)
        file = self.local_file.source_map.file
        overruled_differences = [each for each in self.differences if each.how in ("looser", "fixed")]
        stricter_differences = [each for each in self.differences if each.how == "stricter"]
        texts: list[str] = []
        if overruled_differences:
            texts.append(f"This store's policy applies instead of {file} to {_describe_pairs(overruled_differences)}.")
        if stricter_differences:
            texts.append(
                f"{file} is stricter than this store's policy, and applies to this process, "
                f"in {_describe_pairs(stricter_differences)}."
            )
        if texts and self.local_file.source_map.lines:
            texts.append(f"To make {file} the store's policy, run: halter policy apply {file}")
        elif texts:
            # A program's keys are in no file.
            texts.append(
                f"To change the store's policy, write the keys of {file} into a halter.yaml, and run: "
                "halter policy apply halter.yaml"
            )
        return " ".join(texts)

    def describe_adoption(self) -> str:
        """Describe in one line that the local file is about to become the store's policy; "" if it is not."""
        if not self.proposals or self.local_file is None:
            return ""
        file = self.local_file.source_map.file
        return (
            f"{file} becomes this store's policy when the first session starts, and binds every process that uses it. "
            "Show it with: halter policy"
        )


def _describe_store_only(differences: Sequence[PolicyDifference]) -> str:
    binding = [each for each in differences if each.how != "free"]
    if not binding:
        return ""
    values = [f"{each.key} is {each.stored}" for each in binding[:MAX_NAMED_DIFFERENCES]]
    summary = f"{', '.join(values)}{_count_more(binding)}"
    return f"No halter.yaml found, so only this store's policy applies: {summary}. Show it with: halter policy"


def _describe_pairs(differences: Sequence[PolicyDifference]) -> str:
    """Format each key with the value that applies and the one that does not."""
    pairs = [
        f"{difference.key} ({difference.written}, not {difference.stored})"
        if difference.how == "stricter"
        else f"{difference.key} ({difference.stored}, not {difference.written})"
        for difference in differences[:MAX_NAMED_DIFFERENCES]
    ]
    return f"{', '.join(pairs)}{_count_more(differences)}"


def _count_more(differences: Sequence[PolicyDifference]) -> str:
    return f" and {len(differences) - MAX_NAMED_DIFFERENCES} more" if len(differences) > MAX_NAMED_DIFFERENCES else ""


def read_local_fleet(settings: Settings) -> FleetConfig | None:
    """Read the local fleet file of this process, if it has one."""
    return None if settings.fleet is None else read_fleet(settings.fleet)


def use_local_policy(settings: Settings) -> EffectivePolicy:
    """Return the local file as the policy, for a store that no other process uses."""
    local_fleet = read_local_fleet(settings)
    return EffectivePolicy(local_fleet or DEFAULT_FLEET, None, local_fleet)


async def resolve_effective_policy(store: Store, local_fleet: FleetConfig | None) -> EffectivePolicy:
    """Return the policy of a process with this local file, without a write."""
    row = await read_stored_policy(store)
    if row is None:
        return EffectivePolicy(local_fleet or DEFAULT_FLEET, None, local_fleet)
    return _make_effective_policy(row, local_fleet)


async def is_superseded(store: Store, policy: EffectivePolicy) -> bool:
    """Return true if the store's policy has changed since a process was bound by it."""
    row = await read_stored_policy(store)
    digest = "" if policy.row is None else policy.row.digest
    if row is None or row.digest == digest:
        return False
    current, bound = _make_effective_policy(row, policy.local_file).fleet, policy.fleet
    return (current.spec, current.extra_policies, current.default_limits) != (
        bound.spec,
        bound.extra_policies,
        bound.default_limits,
    )


async def read_stored_policy(store: Store) -> FleetPolicyRow | None:
    return next(iter(await store.ask(Query("all_fleet_policy", FleetPolicyRow))), None)


def _make_effective_policy(row: FleetPolicyRow, local_fleet: FleetConfig | None) -> EffectivePolicy:
    stored_fleet = parse_stored_fleet(row.policy)
    merged_policy = merge_with_policy(stored_fleet, local_fleet)
    differences = (
        merged_policy.differences
        if local_fleet is not None
        else merge_with_policy(stored_fleet, DEFAULT_FLEET).differences
    )
    return EffectivePolicy(merged_policy.fleet, row, local_fleet, differences)


async def bind_policy(store: Store, local_fleet: FleetConfig | None, by: str) -> EffectivePolicy:
    """Bind a process to the store's policy, without a write.

    If the store has none, the process is bound by its local file as if that were the store's policy, and
    `Runtime.adopt_policy` makes it so. A process that an agent started adopts nothing: it is bound by the defaults as
    if they were the store's policy.
    """
    effective = await resolve_effective_policy(store, local_fleet)
    if effective.row is not None or local_fleet is None:
        return effective
    if not can_decide(by):
        return msgspec.structs.replace(effective, fleet=merge_with_policy(DEFAULT_FLEET, local_fleet).fleet)
    proposal = make_adoption_event(local_fleet, by)
    fleet = merge_with_policy(parse_stored_fleet(proposal.policy), local_fleet).fleet
    return msgspec.structs.replace(effective, fleet=fleet, proposals=[proposal])


def _drop_secret_providers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop providers whose address contains a key, because a stored policy is never erased."""
    redact = Redactor({}, {}).redact
    providers: Mapping[str, Any] = raw.get("providers") or {}
    safe = {name: each for name, each in providers.items() if redact(text := canonicalize_policy({name: each})) == text}
    return raw if len(safe) == len(providers) else {**raw, "providers": safe}


def make_adoption_event(
    fleet: FleetConfig, by: str, *, replaces: str = "", loosens: tuple[str, ...] = (), reason: str = ""
) -> FleetPolicyAdopted:
    """Make the event by which a file becomes the store's policy."""
    policy, limits = canonicalize_policy(_drop_secret_providers(fleet.raw)), fleet.spec.limits
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


class PriceSource:
    """The prices that the store has fetched, as this process knows them. Their tables are read on first use."""

    def __init__(self) -> None:
        self.pinned: str = ""
        self._encoded = b""
        self._tables: PriceTables | None = None

    @property
    def tables(self) -> "PriceTables":
        from halter.models.price_tables import PriceTables

        if self._tables is None:
            self._tables = PriceTables(self.read())
        return self._tables

    def read(self) -> "FetchedPrices | None":
        from halter.models.price_tables import FetchedPrices

        return msgspec.json.decode(self._encoded, type=FetchedPrices) if self._encoded else None

    async def refresh(self, store: Store) -> None:
        """Use what the store has now, from the next request on."""
        pins = await store.ask(Query("all_pins", PinRow))
        pinned = next((pin.digest for pin in pins if not pin.agent and pin.tool == PRICES_PIN), "")
        if pinned != self.pinned:
            try:
                self._encoded = await store.get(Digest(pinned))
            except KeyError:
                from halter.models.price_tables import MISSING_PRICES

                self._encoded = msgspec.json.encode(MISSING_PRICES)
            self.pinned = pinned
            if self._tables is not None:
                self._tables.use(self.read())


EMPTY_ENVIRON: Final = MappingProxyType[str, str]({})
DEFAULT_LEASE_DURATION: Final = 15 * SECOND


class Runtime(msgspec.Struct, frozen=True):
    """An opened store with its checkpoints, ledger and policy. `writable` are the folders that loaded agents can write.

    `older_copy` says what the store lacks that its checkpoints have. Then no checkpoint is written, and nothing may
    run.
    """

    settings: Settings
    clock: Clock
    ids: Ids
    store: "JournalStore"
    checkpointer: "Checkpointer"
    ledger: Ledger
    environ: Mapping[str, str]
    store_problem: StoreProblem = msgspec.field(default_factory=StoreProblem)
    writable: list[WritableFolders] = msgspec.field(default_factory=list[WritableFolders])
    liveness: LivenessWriter = msgspec.field(default_factory=LivenessWriter)
    departures: Departures = msgspec.field(default_factory=Departures)
    prompts: PromptLog = msgspec.field(default_factory=PromptLog)
    older_copy: "OlderCopy | None" = None
    policy: EffectivePolicy | None = None
    """None if the store was opened read-only: then no agent runs."""
    prices: PriceSource = msgspec.field(default_factory=PriceSource)

    @property
    def fleet(self) -> FleetConfig:
        """The fleet configuration in force: the store's policy, or the local file where it is stricter."""
        if self.policy is None:
            raise RuntimeError(
                "This store was opened without a policy (acts=False), so no agent can be assembled on it."
            )
        return self.policy.fleet

    async def adopt_policy(self) -> None:
        """Make the local file the policy of a store that has none, since a session is about to start under it.

        If another process was first, its policy is the store's, and its caps bind each hold of this one.
        """
        proposals = [] if self.policy is None else self.policy.proposals
        if proposals:
            await self.patient().commit(adopt_first_policy(proposals[0]))
            proposals.clear()

    def patient(self) -> "JournalStore":
        """Return a handle on the store that retries while it is unavailable. All handles share `store_problem`."""
        return self.store.patient(self.clock, self.store_problem)


@asynccontextmanager
async def open_runtime(  # noqa: PLR0913 Each is one independent option with a default.
    settings: Settings,
    clock: Clock | None = None,
    environ: Mapping[str, str] = EMPTY_ENVIRON,
    *,
    lease: int = DEFAULT_LEASE_DURATION,
    liveness: LivenessWriter | None = None,
    acts: bool = True,
    load_fleet: Callable[[Settings], FleetConfig | None] = read_local_fleet,
    allow_older_copy: bool = False,
    by_program: bool = False,
    begins_anew: bool = False,
) -> AsyncGenerator[Runtime]:
    """Open the store with its checkpoints, and close both after the block.

    Secrets come from `environ`. `lease` is the time for which a silent process keeps its sessions. `liveness` shows a
    sentinel that the process is alive. With `acts`, the store's policy binds the process; if the store has none, what
    `load_fleet` returns binds it and becomes the store's policy with the first session. Without `acts`, no policy is
    read. A store that lacks events of its checkpoints is rejected, unless it is opened with `allow_older_copy` to run
    nothing. `by_program`: a program opens its own store. If its file is gone and nothing but programs used it, the
    store begins anew with `begins_anew`; the new one records what is missing.
    """
    _prepare(settings)
    clock = clock or (
        StoreClock() if settings.store.lower().startswith(("postgresql:", "postgres:")) else SystemClock()
    )
    ids = SortableIds(clock.now)
    continuity = find_continuity(settings)
    missing = _find_missing_store(settings, continuity)
    if missing is not None and not allow_older_copy and not (begins_anew and missing.only_programs):
        raise StoreUnusable(missing.sentence())
    engine = open_engine(settings.store, clock=clock, ids=ids, lease=lease)
    try:
        store_id = {row["name"]: row["value"] for row in engine.ask("meta", {})}["store"]
        checkpointer = Checkpointer(settings.checkpoints, settings.signing_key, store_id, clock.now)
        doubt = missing or _compare_with_checkpoints(
            engine,
            store_id,
            continuity,
            checkpointer,
            despite_doubt=allow_older_copy,
            by_program=by_program or not acts,
        )
    except BaseException:
        engine.close()
        raise
    # A store in memory ends with the process and never waits for a disk. An older copy writes no checkpoint, because
    # it would then match one.
    in_memory = isinstance(engine, MemoryEngine)
    is_unconfirmed = doubt is not None and not begins_anew
    store = JournalStore(engine, inline=in_memory, observers=() if in_memory or is_unconfirmed else (checkpointer,))
    try:
        if isinstance(clock, StoreClock):
            await sync_store_clock(store, clock)
        if continuity is not None and doubt is not None and begins_anew:
            await store.commit(accept_missing_events(doubt, ids.make(), settings.person, "A program begins it anew."))
            continuity.remember(store_id, by_program=True)
            doubt = None
        ledger = Ledger(store, clock)
        policy = await bind_policy(store, load_fleet(settings), settings.person) if acts else None
        alive = liveness or LivenessWriter()
        with install_print_masks():
            app = Runtime(
                settings,
                clock,
                ids,
                store,
                checkpointer,
                ledger,
                environ,
                liveness=alive,
                older_copy=doubt,
                policy=policy,
            )
            if acts:
                await app.prices.refresh(store)
            yield app
    finally:
        await store.close()


PRICES_ACTOR: Final = "halter.yaml"
"""The actor of updates that a policy asks for."""
PRICES_POLLING_INTERVAL: Final = MINUTE


@asynccontextmanager
async def follow_prices(app: Runtime) -> AsyncGenerator[None]:
    """Use in the block what other processes and people change of the fetched prices, within a minute."""
    follow_task = asyncio.ensure_future(_follow_prices(app))
    try:
        yield
    finally:
        follow_task.cancel()
        with suppress(asyncio.CancelledError):
            await follow_task


async def _follow_prices(app: Runtime) -> None:
    while True:
        await app.clock.sleep(PRICES_POLLING_INTERVAL)
        with suppress(StoreError):
            await app.prices.refresh(app.store)


def _read_prices_spec(app: Runtime) -> PricesSpec:
    """Read how this machine updates prices: the store's policy does not say so."""
    fleet = read_local_fleet(app.settings) if app.policy is None else app.fleet
    return (fleet or DEFAULT_FLEET).spec.prices


async def update_prices(app: Runtime, by: str) -> PricesChanged | None:
    """Fetch the price table and keep it. Returns None if it is the newest already; raises ConfigError with a sentence.

    What is new or higher counts from the next request on, in every process on the store.
    """
    from halter.models.price_tables import MISSING_PRICES, add_file, fetch_file, find_default_url

    address = value_or_default(_read_prices_spec(app).url, "") or find_default_url()
    try:
        data = await fetch_file(address)
        await app.prices.refresh(app.store)
        pinned, current = app.prices.pinned, app.prices.read()
        if current == MISSING_PRICES:
            current = None
        if current is not None and current.digest == hashlib.sha256(data).hexdigest():
            return None
        fetched = await asyncio.to_thread(add_file, current, data, address, app.clock.now())
    except ConfigError as error:
        raise ConfigError(f"The price table was not updated, and the prices in force stay. {error}") from None
    return await _commit_prices(app, fetched, pinned, by)


def describe_price_update(event: PricesChanged) -> str:
    counts = f"{format_count(event.added_count, 'new model')}, {format_count(event.raised_count, 'higher price')}"
    sentence = f"Fetched the price table {event.digest[:12]} from {event.source}: {counts}, in force from now on."
    if not event.waiting_count:
        return sentence
    waiting, verb = format_count(event.waiting_count, "model"), "waits" if event.waiting_count == 1 else "wait"
    return f"{sentence} {waiting} with a lower price, or free, {verb} for your yes: see `halter prices`."


async def accept_prices(app: Runtime, by: str, reason: str) -> PricesChanged | None:
    """Let the newest fetched table count as it is; None if another process changed it in between."""
    from halter.models.price_tables import accept_file

    pinned, current = app.prices.pinned, app.prices.read()
    if current is None:
        return None
    return await _commit_prices(app, accept_file(current, app.clock.now()), pinned, by, accepted=True, reason=reason)


async def _commit_prices(
    app: Runtime, fetched: "FetchedPrices", replaces: str, by: str, *, accepted: bool = False, reason: str = ""
) -> PricesChanged | None:
    store = app.patient()
    blob = await store.put(msgspec.json.encode(fetched))
    event = PricesChanged(
        digest=fetched.digest,
        prices=blob,
        by=by,
        source=fetched.source,
        accepted=accepted,
        added=fetched.added[:MAX_NAMED_PRICES],
        added_count=len(fetched.added),
        raised=fetched.raised[:MAX_NAMED_PRICES],
        raised_count=len(fetched.raised),
        waiting=fetched.waiting[:MAX_NAMED_PRICES],
        waiting_count=len(fetched.waiting),
        reason=clean(reason),
    )

    def decide(rows: Rows) -> Sequence[Draft]:
        pin = rows.get(PinRow, "", PRICES_PIN)
        is_current = replaces == ("" if pin is None else pin.digest)
        return [Draft(event, blob=blob)] if is_current else []

    committed = await store.commit(Write(FLEET, app.ids.make(), decide, [(PinRow, "", PRICES_PIN)]))
    await app.prices.refresh(app.store)
    return event if committed.events else None


MAX_NAMED_PRICES: Final = 100
"""Maximum number of models of each kind that an event names; the blob has all of them."""


def find_continuity(settings: Settings) -> "Continuity | None":
    """Return what the checkpoints know about the store at this location; None for a store in memory."""
    location = format_store_location(settings.store)
    if not location:
        return None
    trusted_keys = frozenset[str]()
    with suppress(OSError, ValueError):
        trusted_keys = read_public_keys(public_key_path(settings.signing_key))
    return Continuity(settings.checkpoints, location, trusted_keys)


def _find_missing_store(settings: Settings, continuity: "Continuity | None") -> "OlderCopy | None":
    """Find that the store of this location is missing, before a new one is created there."""
    # A path that cannot be read raises an error with an explanation when it is opened.
    with suppress(OSError):
        if continuity is not None and not store_file_exists(settings.store):
            return continuity.find_missing_store()
    return None


def accept_missing_events(missing: "OlderCopy", key: str, by: str, reason: str) -> Write:
    """Record that a person accepts a store without the events that its checkpoints know."""
    event = StoreAccepted(
        by=by, lacks=missing.describe_missing(), events=missing.events, known_at=missing.at, reason=clean(reason)
    )
    return Write(FLEET, key, lambda _: [Draft(event)])


def _compare_with_checkpoints(
    engine: "Engine",
    store_id: str,
    continuity: "Continuity | None",
    checkpointer: "Checkpointer",
    *,
    despite_doubt: bool,
    by_program: bool,
) -> "OlderCopy | None":
    """Compare a store with its checkpoints. Records on this machine what a person accepted on another one."""
    if continuity is None:
        return None
    comparison = continuity.check(engine.ask, store_id)
    if isinstance(comparison, OlderCopy):
        if not despite_doubt:
            raise StoreUnusable(comparison.sentence())
        return comparison
    if not despite_doubt:
        if isinstance(comparison, AcceptancePending):
            checkpointer.accept(comparison.accepted_seq_by_stream)
        continuity.remember(store_id, by_program=by_program)
    return None


async def sync_store_clock(store: "JournalStore", clock: StoreClock) -> None:
    sent_at = read_steady_clock()
    store_time = await store.now()
    clock.set_time(sent_at, store_time, read_steady_clock())


def _prepare(settings: Settings) -> None:
    """Make the folders for checkpoints and their key. The checkpointer reports a failure, and agents still run."""
    for folder in (settings.checkpoints.parent, settings.checkpoints, settings.signing_key.parent):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

"""A store's policy and a fleet's file, held together: the stricter word of both counts, and differences are named.

What is stored is the file word by word, so that it is read as the file is, also by a later version. Only `notify` stays
with the file: its addresses can be keys, and what is stored here is never erased.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from halter.config.both import MOST, UNLIMITED, hourly, shown_cap, usual_rule
from halter.config.fleet import Fleet, fleet_of
from halter.config.load import Document, KeyPath, Places
from halter.config.resolve import AGENT_DAY_CAP, FLEET_DAY_CAP, MAX_STEPS, SESSION_CAP, TIMEOUT
from halter.config.shape import dotted, either
from halter.core.bounds import FleetLimits, Limits, ModelRate
from halter.core.durations import shown_duration
from halter.core.errors import ConfigError
from halter.core.mind import Mind
from halter.core.spec import (
    APPROVAL_EXPIRY,
    MODES,
    SIMULATES,
    FleetSpec,
    LevelRule,
    ModelSpec,
    Policy,
    ShellBounds,
    ToolRule,
    covered,
)
from halter.core.text import listed
from halter.core.tools import LEVELS
from halter.core.usage import FREE, Price

STORED: Final = "this store's policy"
KEPT_BY_FILES: Final = frozenset(("notify",))

Difference = Literal["looser", "stricter", "fixed", "free"]
"""How a file differs from a store's policy in a key: it allows more, or less; only the store's word counts there; or
the key limits nothing, and the file's word is taken."""

USUAL: Final[Mapping[str, Any]] = {
    "max_cost_usd": SESSION_CAP,
    "max_cost_usd_per_day": AGENT_DAY_CAP,
    "max_steps": MAX_STEPS,
    "timeout": TIMEOUT,
    "max_output_tokens": Mind().max_output_tokens,
    "max_retries": Mind().max_retries,
}
"""What an agent has that sets no limit of its own, where nobody else does."""

APPROVALS: Final[tuple[str | UnsetType, ...]] = ("never", UNSET, "always")
"""The laxest first. Without a word the mode decides."""

Show = Callable[[Any], str]


class Differs(msgspec.Struct, frozen=True):
    """One key in which a file and a store's policy differ, with both values as people read them."""

    key: str
    how: Difference
    stored: str
    written: str


class Bound(msgspec.Struct, frozen=True):
    """What holds of both, and where they differ."""

    fleet: Fleet
    differences: tuple[Differs, ...] = ()

    def those(self, *hows: Difference) -> tuple[Differs, ...]:
        """List the differences of some kinds."""
        return tuple(each for each in self.differences if each.how in hows)


def canonical(said: Mapping[str, Any]) -> str:
    """Write down what a file says, in the one way that equal files have in common."""
    kept = {key: value for key, value in said.items() if key not in KEPT_BY_FILES}
    return msgspec.json.Encoder(order="sorted", decimal_format="number").encode(kept).decode()


def policy_digest(policy: str) -> str:
    """Name a policy that is written down."""
    return hashlib.sha256(policy.encode()).hexdigest()


def stored_fleet(policy: str) -> Fleet:
    """Read a policy that a store holds."""
    said: dict[str, Any] = msgspec.json.decode(policy)
    try:
        fleet = fleet_of(Document(said, Places(STORED)))
    except ConfigError as error:
        raise ConfigError(
            f"{error} A newer Halter has adopted it: use that one, or adopt another policy with halter policy apply."
        ) from error
    return msgspec.structs.replace(fleet, places=StorePlaces(STORED, dict.fromkeys(_paths(said), 0)))


def _paths(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    """List the way to every value."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  JSON has any values.
            yield from _paths(item, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]  As above.


class StorePlaces(Places, frozen=True):
    """Where values stand: in a store's policy, which has no lines, or in the file beside it where that is stricter."""

    file_beside: Places | None = None
    stricter: frozenset[str] = frozenset()

    def at(self, path: KeyPath = ()) -> str:
        """Name where a value comes from."""
        if self.file_beside is not None and dotted(path) in self.stricter:
            return self.file_beside.at(path)
        return self.file


def bind(stored: Fleet, written: Fleet | None) -> Bound:
    """Hold a file to a store's policy. Without a file, the store's policy alone counts."""
    if written is None:
        return Bound(stored)
    pair = _Pair()
    spec = pair.specs(stored.spec, written.spec)
    stricter = frozenset(each.key for each in pair.differences if each.how == "stricter")
    places = StorePlaces(STORED, {**stored.places.lines, **written.places.lines}, written.places, stricter)
    beside = () if stored.spec.policy == written.spec.policy else (written.spec.policy,)
    fleet = Fleet(spec, places, written.said, beside, Limits(**pair.silent))
    return Bound(fleet, tuple(pair.differences))


class _Pair:
    """Compares key by key, and remembers the differences."""

    def __init__(self) -> None:
        self.differences: list[Differs] = []
        self.silent: dict[str, Any] = {}

    def note(self, path: KeyPath, how: Difference, stored: str, written: str) -> None:
        """Remember a difference."""
        self.differences.append(Differs(dotted(path), how, stored, written))

    def specs(self, stored: FleetSpec, written: FleetSpec) -> FleetSpec:
        """Take of each key what holds."""
        return FleetSpec(
            zone=self.fixed(("zone",), stored.zone, written.zone),
            mode=self.lesser(("mode",), stored.mode, written.mode, MODES),
            observe=self.lesser(("observe",), stored.observe, written.observe, (False, True)),
            limits=self.fleet_limits(stored.limits, written.limits),
            agents=msgspec.structs.replace(
                stored.agents, limits=self.agent_limits(stored.agents.limits, written.agents.limits)
            ),
            policy=self.policy(stored.policy, written.policy),
            allowed_models=self.within("allowed_models", stored.allowed_models, written.allowed_models),
            allowed_hosts=self.within("allowed_hosts", stored.allowed_hosts, written.allowed_hosts),
            allowed_secrets=self.within("allowed_secrets", stored.allowed_secrets, written.allowed_secrets),
            models=self.prices(stored.models, written.models),
            providers=self.providers(stored.providers, written.providers),
            rates=self.rates(stored.rates, written.rates),
            shell=self.shell(stored.shell, written.shell),
            retention=self.fixed(
                ("retention",), either(stored.retention, None), either(written.retention, None), _lasting
            ),
            notify=written.notify,
        )

    def fixed(self, path: KeyPath, stored: Any, written: Any, show: Show = str) -> Any:
        """Take the store's word, whatever the file says."""
        if stored != written:
            self.note(path, "fixed", show(stored), show(written))
        return stored

    def lesser(self, path: KeyPath, stored: Any, written: Any, order: Sequence[Any]) -> Any:
        """Take the word that stands first in an order from the strictest to the laxest."""
        if stored == written:
            return stored
        looser = order.index(written) > order.index(stored)
        self.note(path, "looser" if looser else "stricter", _word(stored), _word(written))
        return stored if looser else written

    def fleet_limits(self, stored: FleetLimits, written: FleetLimits) -> FleetLimits:
        """Take the lower of each cap of the fleet. A file that names none has the default."""
        usual: Mapping[str, int | None] = {"max_cost_usd_per_day": FLEET_DAY_CAP, "max_cost_usd_per_month": None}
        return FleetLimits(
            **{
                key: self.lower(("limits", key), getattr(stored, key), getattr(written, key), default)
                for key, default in usual.items()
            }
        )

    def lower(self, path: KeyPath, stored: Any, written: Any, default: Any, show: Show = shown_cap) -> Any:
        """Take the lower of two limits, of which None is no limit."""
        ours, theirs = _rank(either(stored, default)), _rank(either(written, default))
        if ours == theirs:
            return stored
        said = [_or_default(show, limit, default) for limit in (stored, written)]
        self.note(path, "looser" if theirs > ours else "stricter", *said)
        return stored if ours < theirs else written

    def agent_limits(self, stored: Limits, written: Limits) -> Limits:
        """Take the lower of each limit of all agents; of a choice, which limits nothing, the file's word."""
        found: dict[str, Any] = {}
        for key in Limits.__struct_fields__:
            ours, theirs = getattr(stored, key), getattr(written, key)
            path = ("agents", "limits", key)
            if key in MOST:
                found[key] = self.agent_limit(key, ours, theirs, *MOST[key])
            else:
                found[key] = either(theirs, ours)
                if ours != theirs:
                    self.note(path, "free", _word(ours), _word(theirs))
        return Limits(**found)

    def agent_limit(self, key: str, stored: Any, written: Any, show: Show, endless: Any) -> Any:
        """Take the lower limit. Where the store's policy has none, agents that set none keep the default."""
        if stored == written:
            return stored
        default = USUAL.get(key, endless)
        ours, theirs, usual = (_rank(limit, endless) for limit in (stored, written, default))
        said = (_or_default(show, stored, default), _or_default(show, written, default))
        looser = theirs > (usual if stored is UNSET else ours)
        self.note(("agents", "limits", key), "looser" if looser else "stricter", *said)
        if not looser:
            return written
        if stored is UNSET and theirs < math.inf:
            self.silent[key] = default
            return written
        return stored

    def policy(self, stored: Policy, written: Policy) -> Policy:
        """Hold the rules together. What each says of levels and tools stays in a policy of its own."""
        for level in _both(stored.levels, written.levels):
            ours, theirs = (each.levels.get(level, LevelRule()) for each in (stored, written))
            self.rules(("policy", "levels", level), ours, theirs, usual_rule(level))
        for tool in _both(stored.tools, written.tools):
            ours, theirs = (each.tools.get(tool, ToolRule()) for each in (stored, written))
            self.rules(("policy", "tools", tool), ours, theirs, UNLIMITED)
            self.level(("policy", "tools", tool, "level"), ours, theirs)
        disabled = tuple(dict.fromkeys((*stored.disabled, *written.disabled)))
        if missing := [name for name in stored.disabled if name not in written.disabled]:
            self.note(("policy", "disabled"), "looser", listed(stored.disabled), f"without {listed(missing)}")
        elif disabled != stored.disabled:
            self.note(("policy", "disabled"), "stricter", listed(stored.disabled) or "none", listed(written.disabled))
        expiry = self.lower(
            ("policy", "approval_expiry"),
            stored.approval_expiry,
            written.approval_expiry,
            APPROVAL_EXPIRY,
            shown_duration,
        )
        return msgspec.structs.replace(stored, disabled=disabled, approval_expiry=expiry)

    def rules(self, path: KeyPath, stored: LevelRule, written: LevelRule, usual: LevelRule) -> None:
        """Compare two rules; whoever judges a call takes the strictest word of both."""
        self.lesser((*path, "approval"), stored.approval, written.approval, APPROVALS[::-1])
        ours, theirs = (either(rule.rate, either(usual.rate, None)) for rule in (stored, written))
        self.lower((*path, "rate"), ours, theirs, None, hourly)
        before, after = (either(rule.simulate, either(usual.simulate, "never")) for rule in (stored, written))
        self.lesser((*path, "simulate"), before, after, SIMULATES[::-1])

    def level(self, path: KeyPath, stored: ToolRule, written: ToolRule) -> None:
        """Compare how dangerous a tool is taken to be. What it says of itself is not known here."""
        if stored.level == written.level:
            return
        ranks = [-1 if rule.level is UNSET else LEVELS.index(rule.level) for rule in (stored, written)]
        known = stored.level is not UNSET or written.level == LEVELS[-1]
        how: Difference = "stricter" if known and ranks[1] > ranks[0] else "looser"
        self.note(path, how, _word(stored.level), _word(written.level))

    def within(
        self, key: str, stored: tuple[str, ...] | UnsetType, written: tuple[str, ...] | UnsetType
    ) -> tuple[str, ...] | UnsetType:
        """Take what both lists allow; no list allows all."""
        if stored == written:
            return stored
        said = ("all" if names is UNSET else listed(names) or "nothing" for names in (stored, written))
        if stored is UNSET or written is UNSET:
            self.note((key,), "looser" if written is UNSET else "stricter", *said)
            return either(stored, written)
        both = [name for name in written if covered(name, stored)]
        if len(both) < len(written):
            self.note((key,), "looser", *said)
        elif not all(covered(name, written) for name in stored):
            self.note((key,), "stricter", *said)
        return tuple(dict.fromkeys((*both, *(name for name in stored if covered(name, written)))))

    def prices(self, stored: Mapping[str, ModelSpec], written: Mapping[str, ModelSpec]) -> Mapping[str, ModelSpec]:
        """Take the higher price. One that only the file has is not taken: it could be lower than the known price."""
        found: dict[str, ModelSpec] = dict(stored)
        for model in _both(stored, written):
            path, ours, theirs = ("models", model, "price"), _price(stored, model), _price(written, model)
            if theirs is None or ours is None:
                if theirs is not None:
                    self.note(path, "looser", "not set", _dollars(theirs))
                continue
            higher = _higher(ours, theirs)
            if higher != _higher(ours, ours):
                found[model] = ModelSpec(price=higher)
            if _higher(ours, ours) != _higher(theirs, theirs):
                looser = higher != _higher(theirs, theirs)
                self.note(path, "looser" if looser else "stricter", _dollars(ours), _dollars(theirs))
        return found

    def providers(self, stored: Mapping[str, Any], written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Lead no provider elsewhere that the store's policy knows; a file may add others."""
        for name in _both(stored, written):
            how: Difference = "fixed" if name in stored and name in written else "free"
            if stored.get(name) != written.get(name):
                said = ("as it is" if name in each else "not set" for each in (stored, written))
                self.note(("providers", name), how, *said)
        return {**written, **stored}

    def rates(self, stored: Mapping[str, ModelRate], written: Mapping[str, ModelRate]) -> Mapping[str, ModelRate]:
        """Take the lower of each rate of a model."""
        return {
            model: ModelRate(
                **{
                    key: self.model_rate(("rates", model, key), _said(stored, model, key), _said(written, model, key))
                    for key in ModelRate.__struct_fields__
                }
            )
            for model in _both(stored, written)
        }

    def model_rate(self, path: KeyPath, stored: Any, written: Any) -> Any:
        """Take the lower of two rates, of which one may not be set."""
        lower = self.lower(path, either(stored, None), either(written, None), None, _word)
        return UNSET if lower is None else lower

    def shell(self, stored: ShellBounds, written: ShellBounds) -> ShellBounds:
        """Take the tighter walls."""
        return ShellBounds(
            sandbox=self.lesser(("shell", "sandbox"), stored.sandbox, written.sandbox, (True, False)),
            network=self.lesser(("shell", "network"), stored.network, written.network, (False, True)),
        )


def _both(stored: Mapping[Any, Any], written: Mapping[Any, Any]) -> Sequence[Any]:
    return list(dict.fromkeys((*stored, *written)))


def _said(rates: Mapping[str, ModelRate], model: str, key: str) -> Any:
    return getattr(rates.get(model, ModelRate()), key)


def _rank(limit: Any, endless: Any = None) -> float:
    return math.inf if limit is UNSET or limit == endless else limit


def _word(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None | msgspec.UnsetType():
            return "not set"
        case _:
            return str(value)


def _lasting(micros: int | None) -> str:
    return "none" if micros is None else shown_duration(micros)


def _or_default(show: Show, value: Any, default: Any) -> str:
    if value is not UNSET:
        return show(value)
    return "not set" if default is None or default == 0 else f"{show(default)} by default"


def _price(models: Mapping[str, ModelSpec], model: str) -> Price | None:
    spec = models.get(model)
    if spec is None:
        return None
    return FREE if isinstance(spec.price, str) else spec.price


def _higher(one: Price, other: Price) -> Price:
    """Take the higher of each figure; cached tokens without one cost what plain input costs."""

    def cached(key: str) -> Decimal:
        return max(one.input if getattr(one, key) is None else getattr(one, key), _cached(other, key))

    return Price(
        max(one.input, other.input), max(one.output, other.output), cached("cache_read"), cached("cache_write")
    )


def _cached(price: Price, key: str) -> Decimal:
    figure: Decimal | None = getattr(price, key)
    return price.input if figure is None else figure


def _dollars(price: Price) -> str:
    return "free" if price == FREE else f"${price.input} in, ${price.output} out"

"""A store's policy merged with a fleet's file: the stricter value applies, and every difference is named.

The store keeps the file as written, so that a later version reads it as a file. Only `notify`, `channels` and
`sign_on` stay in the file: they are of one machine, and addresses can be keys, which the store would never erase.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from halter.config.decode import format_key_path, value_or_default
from halter.config.merge import (
    LIMIT_FORMATS,
    UNLIMITED_RULE,
    FleetConfig,
    default_level_rule,
    format_cap,
    format_hourly_rate,
    parse_fleet,
)
from halter.config.resolve import AGENT_DAY_CAP, FLEET_DAY_CAP, MAX_STEPS, SESSION_CAP, TIMEOUT
from halter.config.yaml_reader import Document, KeyPath, SourceMap
from halter.core.agent_spec import BrainSpec
from halter.core.clock import format_duration
from halter.core.errors import ConfigError
from halter.core.spec import (
    APPROVAL_EXPIRY,
    MODES,
    SIMULATE_MODES,
    FleetLimits,
    FleetSpec,
    LevelRule,
    Limits,
    ModelRate,
    ModelSpec,
    Policy,
    ShellBounds,
    ToolRule,
    is_covered,
)
from halter.core.text import join_names
from halter.core.tools import LEVELS
from halter.core.usage import FREE_PRICE, Price

STORED_POLICY_NAME: Final = "this store's policy"
FILE_ONLY_KEYS: Final = frozenset(("notify", "channels", "sign_on"))

DifferenceKind = Literal["looser", "stricter", "fixed", "free"]
"""The file allows more, or less; only the store's value counts; or the key limits nothing and the file's value counts.
"""

DEFAULT_LIMITS: Final[Mapping[str, Any]] = {
    "max_cost_usd": SESSION_CAP,
    "max_cost_usd_per_day": AGENT_DAY_CAP,
    "max_steps": MAX_STEPS,
    "timeout": TIMEOUT,
    "max_output_tokens": BrainSpec().max_output_tokens,
    "max_retries": BrainSpec().max_retries,
}
"""The limits of an agent where no file sets any."""

APPROVALS_LAXEST_FIRST: Final[tuple[str | UnsetType, ...]] = ("never", UNSET, "always")
"""Unset means that the mode decides."""

PROVENANCES_STRICTEST_FIRST: Final[tuple[str | UnsetType, ...]] = ("strict", "ask", UNSET, "observe", "off")
"""Unset means that the kind of session decides."""

FormatPolicyValue = Callable[[Any], str]


class PolicyDifference(msgspec.Struct, frozen=True):
    key: str
    how: DifferenceKind
    stored: str
    written: str


class BoundPolicy(msgspec.Struct, frozen=True):
    fleet: FleetConfig
    differences: tuple[PolicyDifference, ...] = ()

    def those(self, *hows: DifferenceKind) -> tuple[PolicyDifference, ...]:
        return tuple(each for each in self.differences if each.how in hows)


def canonicalize_policy(raw: Mapping[str, Any]) -> str:
    """Encode what a file says so that equal files have equal bytes."""
    kept = {key: value for key, value in raw.items() if key not in FILE_ONLY_KEYS}
    return msgspec.json.Encoder(order="sorted", decimal_format="number").encode(kept).decode()


def digest_policy(policy: str) -> str:
    return hashlib.sha256(policy.encode()).hexdigest()


def parse_stored_fleet(policy: str) -> FleetConfig:
    raw: dict[str, Any] = msgspec.json.decode(policy)
    try:
        fleet = parse_fleet(Document(raw, SourceMap(STORED_POLICY_NAME)))
    except ConfigError as error:
        raise ConfigError(
            f"{error} A newer Halter has adopted it: use that one, or adopt another policy with halter policy apply."
        ) from error
    return msgspec.structs.replace(fleet, source_map=StoreSourceMap(STORED_POLICY_NAME, dict.fromkeys(_paths(raw), 0)))


def _paths(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  JSON has any values.
            yield from _paths(item, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]  As above.


class StoreSourceMap(SourceMap, frozen=True):
    """Locations in a store's policy, which has no lines, or in the file where that is stricter."""

    file_beside: SourceMap | None = None
    stricter: frozenset[str] = frozenset()

    def at(self, path: KeyPath = ()) -> str:
        if self.file_beside is not None and format_key_path(path) in self.stricter:
            return self.file_beside.at(path)
        return self.file


def merge_with_policy(stored: FleetConfig, written: FleetConfig | None) -> BoundPolicy:
    if written is None:
        return BoundPolicy(stored)
    pair = _Pair()
    spec = pair.specs(stored.spec, written.spec)
    stricter = frozenset(each.key for each in pair.differences if each.how == "stricter")
    places = StoreSourceMap(
        STORED_POLICY_NAME, {**stored.source_map.lines, **written.source_map.lines}, written.source_map, stricter
    )
    beside = () if stored.spec.policy == written.spec.policy else (written.spec.policy,)
    fleet = FleetConfig(spec, places, written.raw, beside, Limits(**pair.silent))
    return BoundPolicy(fleet, tuple(pair.differences))


class _Pair:
    def __init__(self) -> None:
        self.differences: list[PolicyDifference] = []
        self.silent: dict[str, Any] = {}

    def note(self, path: KeyPath, how: DifferenceKind, stored: str, written: str) -> None:
        self.differences.append(PolicyDifference(format_key_path(path), how, stored, written))

    def specs(self, stored: FleetSpec, written: FleetSpec) -> FleetSpec:
        return FleetSpec(
            zone=self.require_same(("zone",), stored.zone, written.zone),
            mode=self.lesser(("mode",), stored.mode, written.mode, MODES),
            observe=self.lesser(("observe",), stored.observe, written.observe, (False, True)),
            limits=self.fleet_limits(stored.limits, written.limits),
            agents=msgspec.structs.replace(
                stored.agents, limits=self.agent_limits(stored.agents.limits, written.agents.limits)
            ),
            policy=self.policy(stored.policy, written.policy),
            allowed_models=self.narrow_list("allowed_models", stored.allowed_models, written.allowed_models),
            allowed_hosts=self.narrow_list("allowed_hosts", stored.allowed_hosts, written.allowed_hosts),
            allowed_secrets=self.narrow_list("allowed_secrets", stored.allowed_secrets, written.allowed_secrets),
            models=self.prices(stored.models, written.models),
            providers=self.providers(stored.providers, written.providers),
            rates=self.rates(stored.rates, written.rates),
            shell=self.shell(stored.shell, written.shell),
            retention=self.require_same(
                ("retention",),
                value_or_default(stored.retention, None),
                value_or_default(written.retention, None),
                _format_duration,
            ),
            notify=written.notify,
            channels=written.channels,
            sign_on=written.sign_on,
        )

    def require_same(self, path: KeyPath, stored: Any, written: Any, show: FormatPolicyValue = str) -> Any:
        if stored != written:
            self.note(path, "fixed", show(stored), show(written))
        return stored

    def lesser(self, path: KeyPath, stored: Any, written: Any, order: Sequence[Any]) -> Any:
        """The stricter of two values of an order from strictest to laxest."""
        if stored == written:
            return stored
        looser = order.index(written) > order.index(stored)
        self.note(path, "looser" if looser else "stricter", _format_word(stored), _format_word(written))
        return stored if looser else written

    def fleet_limits(self, stored: FleetLimits, written: FleetLimits) -> FleetLimits:
        """The lower of each fleet cap. A file that sets none has the default."""
        usual: Mapping[str, int | None] = {"max_cost_usd_per_day": FLEET_DAY_CAP, "max_cost_usd_per_month": None}
        return FleetLimits(
            **{
                key: self.lower(("limits", key), getattr(stored, key), getattr(written, key), default)
                for key, default in usual.items()
            }
        )

    def lower(
        self, path: KeyPath, stored: Any, written: Any, default: Any, show: FormatPolicyValue = format_cap
    ) -> Any:
        """The lower of two limits; None is unlimited."""
        ours, theirs = _rank(value_or_default(stored, default)), _rank(value_or_default(written, default))
        if ours == theirs:
            return stored
        texts = [_format_or_default(show, limit, default) for limit in (stored, written)]
        self.note(path, "looser" if theirs > ours else "stricter", *texts)
        return stored if ours < theirs else written

    def agent_limits(self, stored: Limits, written: Limits) -> Limits:
        """The lower of each limit of all agents; of a choice, which limits nothing, the file's."""
        found: dict[str, Any] = {}
        for key in Limits.__struct_fields__:
            ours, theirs = getattr(stored, key), getattr(written, key)
            path = ("agents", "limits", key)
            if key in LIMIT_FORMATS:
                found[key] = self.agent_limit(key, ours, theirs, *LIMIT_FORMATS[key])
            else:
                found[key] = value_or_default(theirs, ours)
                if ours != theirs:
                    self.note(path, "free", _format_word(ours), _format_word(theirs))
        return Limits(**found)

    def agent_limit(self, key: str, stored: Any, written: Any, show: FormatPolicyValue, endless: Any) -> Any:
        """The lower limit. Without one in the store's policy, agents that set none keep the default."""
        if stored == written:
            return stored
        default = DEFAULT_LIMITS.get(key, endless)
        ours, theirs, usual = (_rank(limit, endless) for limit in (stored, written, default))
        said = (_format_or_default(show, stored, default), _format_or_default(show, written, default))
        looser = theirs > (usual if stored is UNSET else ours)
        self.note(("agents", "limits", key), "looser" if looser else "stricter", *said)
        if not looser:
            return written
        if stored is UNSET and theirs < math.inf:
            self.silent[key] = default
            return written
        return stored

    def policy(self, stored: Policy, written: Policy) -> Policy:
        """Compare the rules. Those of the file stay in a policy of their own."""
        ours, theirs = (LevelRule(simulate=each.simulate) for each in (stored, written))
        self.rules(("policy",), ours, theirs, UNLIMITED_RULE)
        for key, order in (("provenance", PROVENANCES_STRICTEST_FIRST), ("lock_after_denial", (True, UNSET, False))):
            self.lesser(("policy", key), getattr(stored, key), getattr(written, key), order)
        for level in _union_keys(stored.levels, written.levels):
            ours, theirs = (each.levels.get(level, LevelRule()) for each in (stored, written))
            self.rules(("policy", "levels", level), ours, theirs, default_level_rule(level, stored))
        for tool in _union_keys(stored.tools, written.tools):
            ours, theirs = (each.tools.get(tool, ToolRule()) for each in (stored, written))
            self.rules(("policy", "tools", tool), ours, theirs, UNLIMITED_RULE)
            self.level(("policy", "tools", tool, "level"), ours, theirs)
        disabled = tuple(dict.fromkeys((*stored.disabled, *written.disabled)))
        if missing := [name for name in stored.disabled if name not in written.disabled]:
            self.note(("policy", "disabled"), "looser", join_names(stored.disabled), f"without {join_names(missing)}")
        elif disabled != stored.disabled:
            self.note(
                ("policy", "disabled"), "stricter", join_names(stored.disabled) or "none", join_names(written.disabled)
            )
        expiry = self.lower(
            ("policy", "approval_expiry"),
            stored.approval_expiry,
            written.approval_expiry,
            APPROVAL_EXPIRY,
            format_duration,
        )
        return msgspec.structs.replace(stored, disabled=disabled, approval_expiry=expiry)

    def rules(self, path: KeyPath, stored: LevelRule, written: LevelRule, usual: LevelRule) -> None:
        """Compare two rules; the judge applies the stricter of both."""
        self.lesser((*path, "approval"), stored.approval, written.approval, APPROVALS_LAXEST_FIRST[::-1])
        ours, theirs = (value_or_default(rule.rate, value_or_default(usual.rate, None)) for rule in (stored, written))
        self.lower((*path, "rate"), ours, theirs, None, format_hourly_rate)
        before, after = (
            value_or_default(rule.simulate, value_or_default(usual.simulate, "never")) for rule in (stored, written)
        )
        self.lesser((*path, "simulate"), before, after, SIMULATE_MODES[::-1])
        ours, theirs = (value_or_default(rule.approvers, 1) for rule in (stored, written))
        self.lesser((*path, "approvers"), ours, theirs, (2, 1))

    def level(self, path: KeyPath, stored: ToolRule, written: ToolRule) -> None:
        """Compare the levels of a tool. Its own level is not known here."""
        if stored.level == written.level:
            return
        ranks = [-1 if rule.level is UNSET else LEVELS.index(rule.level) for rule in (stored, written)]
        known = stored.level is not UNSET or written.level == LEVELS[-1]
        how: DifferenceKind = "stricter" if known and ranks[1] > ranks[0] else "looser"
        self.note(path, how, _format_word(stored.level), _format_word(written.level))

    def narrow_list(
        self, key: str, stored: tuple[str, ...] | UnsetType, written: tuple[str, ...] | UnsetType
    ) -> tuple[str, ...] | UnsetType:
        if stored == written:
            return stored
        said = ("all" if names is UNSET else join_names(names) or "nothing" for names in (stored, written))
        if stored is UNSET or written is UNSET:
            self.note((key,), "looser" if written is UNSET else "stricter", *said)
            return value_or_default(stored, written)
        both = [name for name in written if is_covered(name, stored)]
        if len(both) < len(written):
            self.note((key,), "looser", *said)
        elif not all(is_covered(name, written) for name in stored):
            self.note((key,), "stricter", *said)
        return tuple(dict.fromkeys((*both, *(name for name in stored if is_covered(name, written)))))

    def prices(self, stored: Mapping[str, ModelSpec], written: Mapping[str, ModelSpec]) -> Mapping[str, ModelSpec]:
        """The higher price. A price that only the file has is ignored: it could be lower than the known one."""
        found: dict[str, ModelSpec] = dict(stored)
        for model in _union_keys(stored, written):
            path, ours, theirs = ("models", model, "price"), _price(stored, model), _price(written, model)
            if theirs is None or ours is None:
                if theirs is not None:
                    self.note(path, "looser", "not set", _dollars(theirs))
                continue
            higher = _higher_price(ours, theirs)
            if higher != _higher_price(ours, ours):
                found[model] = ModelSpec(price=higher)
            if _higher_price(ours, ours) != _higher_price(theirs, theirs):
                looser = higher != _higher_price(theirs, theirs)
                self.note(path, "looser" if looser else "stricter", _dollars(ours), _dollars(theirs))
        return found

    def providers(self, stored: Mapping[str, Any], written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the store's providers where they are; a file may add others."""
        for name in _union_keys(stored, written):
            how: DifferenceKind = "fixed" if name in stored and name in written else "free"
            if stored.get(name) != written.get(name):
                said = ("as it is" if name in each else "not set" for each in (stored, written))
                self.note(("providers", name), how, *said)
        return {**written, **stored}

    def rates(self, stored: Mapping[str, ModelRate], written: Mapping[str, ModelRate]) -> Mapping[str, ModelRate]:
        return {
            model: ModelRate(
                **{
                    key: self.model_rate(
                        ("rates", model, key), _read_rate(stored, model, key), _read_rate(written, model, key)
                    )
                    for key in ModelRate.__struct_fields__
                }
            )
            for model in _union_keys(stored, written)
        }

    def model_rate(self, path: KeyPath, stored: Any, written: Any) -> Any:
        lower = self.lower(path, value_or_default(stored, None), value_or_default(written, None), None, _format_word)
        return UNSET if lower is None else lower

    def shell(self, stored: ShellBounds, written: ShellBounds) -> ShellBounds:
        return ShellBounds(
            sandbox=self.lesser(("shell", "sandbox"), stored.sandbox, written.sandbox, (True, False)),
            network=self.lesser(("shell", "network"), stored.network, written.network, (False, True)),
        )


def _union_keys(stored: Mapping[Any, Any], written: Mapping[Any, Any]) -> Sequence[Any]:
    return list(dict.fromkeys((*stored, *written)))


def _read_rate(rates: Mapping[str, ModelRate], model: str, key: str) -> Any:
    return getattr(rates.get(model, ModelRate()), key)


def _rank(limit: Any, endless: Any = None) -> float:
    return math.inf if limit is UNSET or limit == endless else limit


def _format_word(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None | msgspec.UnsetType():
            return "not set"
        case _:
            return str(value)


def _format_duration(micros: int | None) -> str:
    return "none" if micros is None else format_duration(micros)


def _format_or_default(show: FormatPolicyValue, value: Any, default: Any) -> str:
    if value is not UNSET:
        return show(value)
    return "not set" if default is None or default == 0 else f"{show(default)} by default"


def _price(models: Mapping[str, ModelSpec], model: str) -> Price | None:
    spec = models.get(model)
    if spec is None:
        return None
    return FREE_PRICE if isinstance(spec.price, str) else spec.price


def _higher_price(one: Price, other: Price) -> Price:
    """The higher of each rate; without a cache rate, cached tokens cost as much as input.

    What has no price with one of them has none: then it is refused.
    """

    def find_cached_price(key: str) -> Decimal:
        return max(one.input if getattr(one, key) is None else getattr(one, key), _find_cached_price(other, key))

    def find_stated_price(key: str) -> Decimal | None:
        mine, theirs = getattr(one, key), getattr(other, key)
        return None if mine is None or theirs is None else max(mine, theirs)

    return Price(
        max(one.input, other.input),
        max(one.output, other.output),
        find_cached_price("cache_read"),
        find_cached_price("cache_write"),
        find_stated_price("cache_write_1h"),
        find_stated_price("web_searches"),
        find_stated_price("audio"),
        find_stated_price("code_executions"),
    )


def _find_cached_price(price: Price, key: str) -> Decimal:
    figure: Decimal | None = getattr(price, key)
    return price.input if figure is None else figure


def _dollars(price: Price) -> str:
    if price == FREE_PRICE:
        return "free"
    figures = {"in": price.input, "out": price.output, **_list_extra_figures(price)}
    return ", ".join(f"${figure} {name}" for name, figure in figures.items())


def _list_extra_figures(price: Price) -> Mapping[str, Decimal]:
    names = ("cache_read", "cache_write", "cache_write_1h", "web_searches", "audio", "code_executions")
    return {name: figure for name in names if (figure := getattr(price, name)) is not None}

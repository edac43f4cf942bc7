"""A store's policy merged with a fleet's file: the stricter value applies, and each difference is listed.

The store keeps the file as written, so that a later version can read it as a file. `notify`, `channels`, `sign_on` and
`prices` stay in the file only: they belong to one machine, and addresses can be keys, which the store never erases.
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
FILE_ONLY_KEYS: Final = frozenset(("notify", "channels", "sign_on", "prices"))

DifferenceKind = Literal["looser", "stricter", "fixed", "free"]
"""Kinds of difference: the file allows more, or less; only the store's value applies; or the key is not a limit and the
file's value applies."""

DEFAULT_LIMITS: Final[Mapping[str, Any]] = {
    "max_cost_usd": SESSION_CAP,
    "max_cost_usd_per_day": AGENT_DAY_CAP,
    "max_steps": MAX_STEPS,
    "timeout": TIMEOUT,
    "max_output_tokens": BrainSpec().max_output_tokens,
    "max_retries": BrainSpec().max_retries,
}
"""The limits of an agent if no file sets any."""

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

    def list_differences(self, *kinds: DifferenceKind) -> tuple[PolicyDifference, ...]:
        return tuple(difference for difference in self.differences if difference.how in kinds)


def canonicalize_policy(raw: Mapping[str, Any]) -> str:
    """Encode the content of a file, so that equal files have equal bytes."""
    stored_keys = {key: value for key, value in raw.items() if key not in FILE_ONLY_KEYS}
    return msgspec.json.Encoder(order="sorted", decimal_format="number").encode(stored_keys).decode()


def digest_policy(policy: str) -> str:
    return hashlib.sha256(policy.encode()).hexdigest()


def parse_stored_fleet(policy: str) -> FleetConfig:
    raw: dict[str, Any] = msgspec.json.decode(policy)
    try:
        fleet = parse_fleet(Document(raw, SourceMap(STORED_POLICY_NAME)))
    except ConfigError as error:
        raise ConfigError(
            f"{error} A newer version of Halter applied it. "
            "Use that version, or apply another policy with `halter policy apply`."
        ) from error
    return msgspec.structs.replace(fleet, source_map=StoreSourceMap(STORED_POLICY_NAME, dict.fromkeys(_paths(raw), 0)))


def _paths(value: Any, path: KeyPath = ()) -> Iterable[KeyPath]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]  JSON has any values.
            yield from _paths(item, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]  As above.


class StoreSourceMap(SourceMap, frozen=True):
    """Locations in a store's policy, which has no lines, or in the file for values that are stricter there."""

    local_source_map: SourceMap | None = None
    stricter: frozenset[str] = frozenset()

    def at(self, path: KeyPath = ()) -> str:
        if self.local_source_map is not None and format_key_path(path) in self.stricter:
            return self.local_source_map.at(path)
        return self.file


def merge_with_policy(stored: FleetConfig, file: FleetConfig | None) -> BoundPolicy:
    if file is None:
        return BoundPolicy(stored)
    pair = _Pair()
    spec = pair.specs(stored.spec, file.spec)
    stricter = frozenset(difference.key for difference in pair.differences if difference.how == "stricter")
    lines = {**stored.source_map.lines, **file.source_map.lines}
    source_map = StoreSourceMap(STORED_POLICY_NAME, lines, local_source_map=file.source_map, stricter=stricter)
    extra_policies = () if stored.spec.policy == file.spec.policy else (file.spec.policy,)
    fleet = FleetConfig(spec, source_map, file.raw, extra_policies, Limits(**pair.silent))
    return BoundPolicy(fleet, tuple(pair.differences))


class _Pair:
    def __init__(self) -> None:
        self.differences: list[PolicyDifference] = []
        self.silent: dict[str, Any] = {}

    def note(self, path: KeyPath, kind: DifferenceKind, stored: str, file: str) -> None:
        self.differences.append(PolicyDifference(format_key_path(path), kind, stored, file))

    def specs(self, stored: FleetSpec, file: FleetSpec) -> FleetSpec:
        return FleetSpec(
            zone=self.require_same(("zone",), stored.zone, file.zone),
            mode=self.lesser(("mode",), stored.mode, file.mode, MODES),
            observe=self.lesser(("observe",), stored.observe, file.observe, (False, True)),
            limits=self.fleet_limits(stored.limits, file.limits),
            agents=msgspec.structs.replace(
                stored.agents, limits=self.agent_limits(stored.agents.limits, file.agents.limits)
            ),
            policy=self.policy(stored.policy, file.policy),
            allowed_models=self.narrow_list("allowed_models", stored.allowed_models, file.allowed_models),
            allowed_hosts=self.narrow_list("allowed_hosts", stored.allowed_hosts, file.allowed_hosts),
            allowed_secrets=self.narrow_list("allowed_secrets", stored.allowed_secrets, file.allowed_secrets),
            models=self.prices(stored.models, file.models),
            providers=self.providers(stored.providers, file.providers),
            rates=self.rates(stored.rates, file.rates),
            shell=self.shell(stored.shell, file.shell),
            retention=self.require_same(
                ("retention",),
                value_or_default(stored.retention, None),
                value_or_default(file.retention, None),
                _format_duration,
            ),
            notify=file.notify,
            channels=file.channels,
            sign_on=file.sign_on,
            prices=file.prices,
        )

    def require_same(self, path: KeyPath, stored: Any, file: Any, format_value: FormatPolicyValue = str) -> Any:
        if stored != file:
            self.note(path, "fixed", format_value(stored), format_value(file))
        return stored

    def lesser(self, path: KeyPath, stored: Any, file: Any, order: Sequence[Any]) -> Any:
        """Return the stricter of two values; `order` is from strictest to laxest."""
        if stored == file:
            return stored
        is_looser = order.index(file) > order.index(stored)
        self.note(path, "looser" if is_looser else "stricter", _format_word(stored), _format_word(file))
        return stored if is_looser else file

    def fleet_limits(self, stored: FleetLimits, file: FleetLimits) -> FleetLimits:
        """Return the lower of each fleet cap. A file that sets none has the default."""
        defaults: Mapping[str, int | None] = {"max_cost_usd_per_day": FLEET_DAY_CAP, "max_cost_usd_per_month": None}
        return FleetLimits(
            **{
                key: self.lower(("limits", key), getattr(stored, key), getattr(file, key), default)
                for key, default in defaults.items()
            }
        )

    def lower(
        self, path: KeyPath, stored: Any, file: Any, default: Any, format_value: FormatPolicyValue = format_cap
    ) -> Any:
        """Return the lower of two limits; None is unlimited."""
        stored_rank, file_rank = _rank(value_or_default(stored, default)), _rank(value_or_default(file, default))
        if stored_rank == file_rank:
            return stored
        texts = [_format_or_default(format_value, limit, default) for limit in (stored, file)]
        self.note(path, "looser" if file_rank > stored_rank else "stricter", *texts)
        return stored if stored_rank < file_rank else file

    def agent_limits(self, stored: Limits, file: Limits) -> Limits:
        """Return the lower of each limit of all agents; for a choice, which limits nothing, the file's."""
        limits: dict[str, Any] = {}
        for key in Limits.__struct_fields__:
            stored_limit, file_limit = getattr(stored, key), getattr(file, key)
            path = ("agents", "limits", key)
            if key in LIMIT_FORMATS:
                limits[key] = self.agent_limit(key, stored_limit, file_limit, *LIMIT_FORMATS[key])
            else:
                limits[key] = value_or_default(file_limit, stored_limit)
                if stored_limit != file_limit:
                    self.note(path, "free", _format_word(stored_limit), _format_word(file_limit))
        return Limits(**limits)

    def agent_limit(self, key: str, stored: Any, file: Any, format_value: FormatPolicyValue, unlimited: Any) -> Any:
        """Return the lower limit. Without one in the store's policy, agents that set none keep the default."""
        if stored == file:
            return stored
        default = DEFAULT_LIMITS.get(key, unlimited)
        stored_rank, file_rank, default_rank = (_rank(limit, unlimited) for limit in (stored, file, default))
        texts = (_format_or_default(format_value, stored, default), _format_or_default(format_value, file, default))
        is_looser = file_rank > (default_rank if stored is UNSET else stored_rank)
        self.note(("agents", "limits", key), "looser" if is_looser else "stricter", *texts)
        if not is_looser:
            return file
        if stored is UNSET and file_rank < math.inf:
            self.silent[key] = default
            return file
        return stored

    def policy(self, stored: Policy, file: Policy) -> Policy:
        """Compare the rules, and return the store's policy; the rules of the file stay in a separate policy."""
        stored_rule, file_rule = (LevelRule(simulate=each.simulate) for each in (stored, file))
        self.rules(("policy",), stored_rule, file_rule, UNLIMITED_RULE)
        for key, order in (
            ("provenance", PROVENANCES_STRICTEST_FIRST),
            ("lock_after_denial", (True, UNSET, False)),
            ("unknown_price", ("refuse", UNSET, "dearest")),
        ):
            self.lesser(("policy", key), getattr(stored, key), getattr(file, key), order)
        for level in _union_keys(stored.levels, file.levels):
            stored_rule, file_rule = (each.levels.get(level, LevelRule()) for each in (stored, file))
            self.rules(("policy", "levels", level), stored_rule, file_rule, default_level_rule(level, stored))
        for tool in _union_keys(stored.tools, file.tools):
            stored_rule, file_rule = (each.tools.get(tool, ToolRule()) for each in (stored, file))
            self.rules(("policy", "tools", tool), stored_rule, file_rule, UNLIMITED_RULE)
            self.level(("policy", "tools", tool, "level"), stored_rule, file_rule)
        disabled = tuple(dict.fromkeys((*stored.disabled, *file.disabled)))
        if missing := [name for name in stored.disabled if name not in file.disabled]:
            self.note(("policy", "disabled"), "looser", join_names(stored.disabled), f"without {join_names(missing)}")
        elif disabled != stored.disabled:
            self.note(
                ("policy", "disabled"), "stricter", join_names(stored.disabled) or "none", join_names(file.disabled)
            )
        expiry = self.lower(
            ("policy", "approval_expiry"),
            stored.approval_expiry,
            file.approval_expiry,
            APPROVAL_EXPIRY,
            format_duration,
        )
        return msgspec.structs.replace(stored, disabled=disabled, approval_expiry=expiry)

    def rules(self, path: KeyPath, stored: LevelRule, file: LevelRule, default: LevelRule) -> None:
        """Compare two rules; the guard applies the stricter one."""
        self.lesser((*path, "approval"), stored.approval, file.approval, APPROVALS_LAXEST_FIRST[::-1])
        stored_value, file_value = (
            value_or_default(rule.rate, value_or_default(default.rate, None)) for rule in (stored, file)
        )
        self.lower((*path, "rate"), stored_value, file_value, None, format_hourly_rate)
        stored_simulate, file_simulate = (
            value_or_default(rule.simulate, value_or_default(default.simulate, "never")) for rule in (stored, file)
        )
        self.lesser((*path, "simulate"), stored_simulate, file_simulate, SIMULATE_MODES[::-1])
        stored_value, file_value = (value_or_default(rule.approvers, 1) for rule in (stored, file))
        self.lesser((*path, "approvers"), stored_value, file_value, (2, 1))

    def level(self, path: KeyPath, stored: ToolRule, file: ToolRule) -> None:
        """Compare the levels that are set for a tool. The level that it declares is not known here."""
        if stored.level == file.level:
            return
        ranks = [-1 if rule.level is UNSET else LEVELS.index(rule.level) for rule in (stored, file)]
        is_comparable = stored.level is not UNSET or file.level == LEVELS[-1]
        kind: DifferenceKind = "stricter" if is_comparable and ranks[1] > ranks[0] else "looser"
        self.note(path, kind, _format_word(stored.level), _format_word(file.level))

    def narrow_list(
        self, key: str, stored: tuple[str, ...] | UnsetType, file: tuple[str, ...] | UnsetType
    ) -> tuple[str, ...] | UnsetType:
        if stored == file:
            return stored
        texts = ("all" if names is UNSET else join_names(names) or "nothing" for names in (stored, file))
        if stored is UNSET or file is UNSET:
            self.note((key,), "looser" if file is UNSET else "stricter", *texts)
            return value_or_default(stored, file)
        common = [name for name in file if is_covered(name, stored)]
        if len(common) < len(file):
            self.note((key,), "looser", *texts)
        elif not all(is_covered(name, file) for name in stored):
            self.note((key,), "stricter", *texts)
        return tuple(dict.fromkeys((*common, *(name for name in stored if is_covered(name, file)))))

    def prices(self, stored: Mapping[str, ModelSpec], file: Mapping[str, ModelSpec]) -> Mapping[str, ModelSpec]:
        """Return the higher price of each model. A price only in the file is ignored: it could be too low."""
        models: dict[str, ModelSpec] = dict(stored)
        for model in _union_keys(stored, file):
            path, stored_price, file_price = ("models", model, "price"), _price(stored, model), _price(file, model)
            if file_price is None or stored_price is None:
                if file_price is not None:
                    self.note(path, "looser", "not set", _dollars(file_price))
                continue
            higher = _higher_price(stored_price, file_price)
            if higher != _higher_price(stored_price, stored_price):
                models[model] = ModelSpec(price=higher)
            if _higher_price(stored_price, stored_price) != _higher_price(file_price, file_price):
                is_looser = higher != _higher_price(file_price, file_price)
                self.note(path, "looser" if is_looser else "stricter", _dollars(stored_price), _dollars(file_price))
        return models

    def providers(self, stored: Mapping[str, Any], file: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the store's providers unchanged; a file may add others."""
        for name in _union_keys(stored, file):
            kind: DifferenceKind = "fixed" if name in stored and name in file else "free"
            if stored.get(name) != file.get(name):
                texts = ("set" if name in each else "not set" for each in (stored, file))
                self.note(("providers", name), kind, *texts)
        return {**file, **stored}

    def rates(self, stored: Mapping[str, ModelRate], file: Mapping[str, ModelRate]) -> Mapping[str, ModelRate]:
        return {
            model: ModelRate(
                **{
                    key: self.model_rate(
                        ("rates", model, key), _read_rate(stored, model, key), _read_rate(file, model, key)
                    )
                    for key in ModelRate.__struct_fields__
                }
            )
            for model in _union_keys(stored, file)
        }

    def model_rate(self, path: KeyPath, stored: Any, file: Any) -> Any:
        lower_rate = self.lower(path, value_or_default(stored, None), value_or_default(file, None), None, _format_word)
        return UNSET if lower_rate is None else lower_rate

    def shell(self, stored: ShellBounds, file: ShellBounds) -> ShellBounds:
        return ShellBounds(
            sandbox=self.lesser(("shell", "sandbox"), stored.sandbox, file.sandbox, (True, False)),
            network=self.lesser(("shell", "network"), stored.network, file.network, (False, True)),
        )


def _union_keys(stored: Mapping[Any, Any], file: Mapping[Any, Any]) -> Sequence[Any]:
    return list(dict.fromkeys((*stored, *file)))


def _read_rate(rates: Mapping[str, ModelRate], model: str, key: str) -> Any:
    return getattr(rates.get(model, ModelRate()), key)


def _rank(limit: Any, unlimited: Any = None) -> float:
    return math.inf if limit is UNSET or limit == unlimited else limit


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


def _format_or_default(format_value: FormatPolicyValue, value: Any, default: Any) -> str:
    if value is not UNSET:
        return format_value(value)
    return "not set" if default is None or default == 0 else f"{format_value(default)} by default"


def _price(models: Mapping[str, ModelSpec], model: str) -> Price | None:
    spec = models.get(model)
    if spec is None:
        return None
    return FREE_PRICE if isinstance(spec.price, str) else spec.price


def _higher_price(first: Price, second: Price) -> Price:
    """Return the higher of each rate; without a cache rate, cached tokens cost as much as input.

    An item that has no price in one of them has none in the result, and its use is refused.
    """

    def find_cached_price(key: str) -> Decimal:
        return max(first.input if getattr(first, key) is None else getattr(first, key), _find_cached_price(second, key))

    def find_stated_price(key: str) -> Decimal | None:
        first_price, second_price = getattr(first, key), getattr(second, key)
        return None if first_price is None or second_price is None else max(first_price, second_price)

    return Price(
        max(first.input, second.input),
        max(first.output, second.output),
        find_cached_price("cache_read"),
        find_cached_price("cache_write"),
        find_stated_price("cache_write_1h"),
        find_stated_price("web_searches"),
        find_stated_price("audio"),
        find_stated_price("code_executions"),
    )


def _find_cached_price(price: Price, key: str) -> Decimal:
    cached_price: Decimal | None = getattr(price, key)
    return price.input if cached_price is None else cached_price


def _dollars(price: Price) -> str:
    if price == FREE_PRICE:
        return "free"
    price_by_name = {"in": price.input, "out": price.output, **_list_extra_figures(price)}
    return ", ".join(f"${figure} {name}" for name, figure in price_by_name.items())


def _list_extra_figures(price: Price) -> Mapping[str, Decimal]:
    names = ("cache_read", "cache_write", "cache_write_1h", "web_searches", "audio", "code_executions")
    return {name: extra_price for name in names if (extra_price := getattr(price, name)) is not None}

"""What the policies of a fleet and of an agent mean together for a tool, a model and a session."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from halter.core.ids import Digest
from halter.core.money import CapMargin, Caps
from halter.core.provenance import Declaration
from halter.core.tools import Level, ToolSpec, find_declaration, refine_declaration
from halter.core.usage import Price, UnknownPrice
from halter.policy.defaults import APPROVAL_EXPIRY, default_level_rule
from halter.policy.hours import Hours, list_stretches, parse_active_hours
from halter.policy.order import find_strictest, is_covered, list_orders
from halter.spec.agent import Phase, ToolsSpec
from halter.spec.limits import OnCap
from halter.spec.policy import Approval, LevelRule, Mode, Policy, ProvenanceMode, QuietHours, Simulate, ToolRule


class ToolPolicy(msgspec.Struct, frozen=True):
    """The resolved rules of one tool. With no `approval`, the mode and the level decide."""

    level: Level
    approval: Approval | None
    rate: int | None
    simulate: Simulate
    approvers: int = 1

    def as_rule(self) -> ToolRule:
        """Return these rules as a file writes them."""
        rule = ToolRule(level=self.level, rate=self.rate, simulate=self.simulate, approvers=self.approvers)
        return rule if self.approval is None else replace(rule, approval=self.approval)


class ResolvedPolicy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The complete policy by which the guard judges an agent.

    No field has a default, so the digest covers all of them. `policies` are those of the fleet (two if both the store's
    policy and a file apply), then the agent's. They are merged per tool, because a rule for a tool in one must not hide
    a stricter rule for its level in another. Merged rules are cached in the `__dict__`, which is not part of the
    policy.
    """

    name: str
    mode: Mode
    observe: bool
    caps: Caps
    on_cap: OnCap
    max_steps: int
    timeout: int
    min_output_tokens: int
    reserve_tokens: int
    reserve_cost_fraction: float
    policies: tuple[Policy, ...]
    disabled: tuple[str, ...]
    approval_expiry: int
    tools: ToolsSpec
    phases: tuple[Phase, ...]
    allowed_models: tuple[str, ...] | None
    allowed_hosts: tuple[str, ...] | None
    secrets: tuple[str, ...]
    prices: Mapping[str, Price]

    def canonical(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> Digest:
        """Return the digest of this policy: a decision made under another policy does not count."""
        return self._digest

    @cached_property
    def _digest(self) -> Digest:
        return Digest(hashlib.sha256(self.canonical()).hexdigest())

    @cached_property
    def reserve_usd(self) -> int:
        """The part of the session's cap that is reserved for the wrap-up."""
        cap = self.caps.session.max_cost_usd or 0
        return round(cap * self.reserve_cost_fraction) if self.on_cap == "wrap_up" else 0

    @cached_property
    def cap_margin(self) -> CapMargin:
        """The remainder at which a budget of the agent is near its cap."""
        return CapMargin(self.reserve_cost_fraction, self.reserve_tokens)

    def rule(self, tool: str, declared: Level) -> ToolPolicy:
        """Merge the rules of all policies for a tool with its declared level.

        The fleet's rules for the declared level count as well: an agent must not get laxer rules by raising a tool's
        level.
        """
        policies_by_tool: dict[tuple[str, Level], ToolPolicy] = vars(self).setdefault("rules", {})
        policy = policies_by_tool.get((tool, declared))
        if policy is None:
            policy = policies_by_tool[tool, declared] = self._rule(tool, declared)
        return policy

    def _rule(self, tool: str, declared: Level) -> ToolPolicy:
        *fleets, agent = self.policies
        rules = [_resolve_rule(fleet, agent, tool, declared) for fleet in fleets]
        strictest = {key: find_strictest(ToolRule, key, [rule[key] for rule in rules]) for key in rules[0]}
        rule: dict[str, Any] = {key: None if value is UNSET else value for key, value in strictest.items()}
        return ToolPolicy(**rule)

    @property
    def provenance(self) -> ProvenanceMode | None:
        """The strictest mode set by a policy; None if no policy sets one, and the kind of session decides."""
        return self._find_strictest("provenance", None)

    @property
    def unknown_price(self) -> UnknownPrice | None:
        """The strictest treatment of an unknown price; None if no policy sets one, and the kind of session decides."""
        return self._find_strictest("unknown_price", None)

    @property
    def locks(self) -> bool:
        return self._find_strictest("lock_after_denial", default=True)

    @cached_property
    def question_terms(self) -> "QuestionTerms":
        """The terms of questions to people. It is quiet while any policy says so; the usual zone is the caps'."""
        written = [each.quiet_hours for each in self.policies if each.quiet_hours is not UNSET]
        quiet_hours = [replace(each, timezone=each.timezone or self.caps.zone) for each in written]
        return QuestionTerms(self.approval_expiry, tuple(quiet_hours))

    def _find_strictest(self, key: str, default: Any) -> Any:
        """Return the strictest of the values that are set."""
        values = [value for policy in self.policies if (value := getattr(policy, key)) is not UNSET]
        return find_strictest(Policy, key, values) if values else default

    def declaration(self, spec: ToolSpec) -> Declaration:
        """Return the declaration of a tool, refined by the agent's policy and then by the fleet's."""
        *fleets, agent = self.policies
        result = find_declaration(spec)
        for policy in (agent, *reversed(fleets)):
            rule = policy.tools.get(spec.name)
            result = result if rule is None else refine_declaration(result, rule.declared)
        return result

    def allows_model(self, model: str) -> bool:
        return self.allowed_models is None or is_covered(model, self.allowed_models)


class QuestionTimes(TypedDict):
    """The times of a question, as `DecisionAsked` has them."""

    expires_at: int
    shown_at: int


class QuestionTerms(msgspec.Struct, frozen=True, gc=False):
    """When a question to a person is shown, and until when it can be answered."""

    expires_in: int = APPROVAL_EXPIRY
    quiet_hours: tuple[QuietHours, ...] = ()

    def times_at(self, now: int, expires_in: int | None = None) -> QuestionTimes:
        """Return the times of a question that is asked now."""
        expires_at = now + (self.expires_in if expires_in is None else expires_in)
        shown_at = _find_quiet_end([parse_active_hours(each) for each in self.quiet_hours], now, expires_at)
        return {"expires_at": expires_at, "shown_at": shown_at if now < shown_at < expires_at else 0}


def _find_quiet_end(quiet_hours: Sequence[Hours], now: int, expires_at: int) -> int:
    """Return when it is no longer quiet, also where some hours begin before others end; not far after the expiry."""
    end = now
    while end < expires_at:
        stretches = [stretch for hours in quiet_hours for stretch in list_stretches(hours, end)]
        later = max((stretch_end for begin, stretch_end in stretches if begin <= end < stretch_end), default=end)
        if later == end:
            break
        end = later
    return end


def _resolve_rule(fleet: Policy, agent: Policy, tool: str, declared: Level) -> Mapping[str, Any]:
    """Resolve the rules of a fleet for a tool at its level and at the one to which the agent raises it."""
    base = _find_level(fleet, tool, declared)
    level: Level = find_strictest(ToolRule, "level", (base, _find_level(agent, tool, base)))
    resolved: dict[str, Any] = {"level": level}
    for key, order in list_orders(LevelRule).items():
        values = list[Any]()
        for rule_level in (base, level):
            fleet_rules = (*_list_rules(fleet, tool, rule_level), default_level_rule(rule_level, fleet))
            fleet_values = [*_list_values(fleet_rules, key)] or [UNSET]
            values += fleet_values[:1] if order.outranks else fleet_values
        agent_values = [*_list_values(_list_rules(agent, tool, level), key)]
        agent_values = agent_values or [
            *_list_values([LevelRule(simulate=default_level_rule(level, agent).simulate)], key)
        ]
        values += agent_values[:1] if order.outranks == "both" else agent_values
        resolved[key] = find_strictest(LevelRule, key, values)
    return resolved


def _find_level(policy: Policy, tool: str, default: Level) -> Level:
    rule = policy.tools.get(tool)
    return default if rule is None or rule.level is UNSET else rule.level


def _list_rules(policy: Policy, tool: str, level: Level) -> Sequence[LevelRule]:
    """List the rules of a policy for a tool, the nearest first."""
    return [rule for rule in (policy.tools.get(tool), policy.levels.get(level)) if rule is not None]


def _list_values(rules: Sequence[LevelRule], key: str) -> Iterator[Any]:
    return (value for rule in rules if (value := getattr(rule, key)) is not UNSET)

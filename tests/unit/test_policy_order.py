"""Of two policies, the stricter value of every key counts, whichever comes first and however they are combined."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Meta, Struct, UnsetType

from halter.config.agent_files import AgentFile
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import SourceMap
from halter.core.clock import DAY, HOUR
from halter.core.tools import LEVELS, Level
from halter.core.usage import FREE_PRICE, Price
from halter.policy.evaluation import ResolvedPolicy, ToolPolicy
from halter.policy.meet import meet, meet_policies, tighten
from halter.policy.order import Lower, Mapped, Nested, Unordered, list_orders
from halter.spec.agent import AgentSpec
from halter.spec.fleet import FleetSpec, ModelSpec, ShellBounds
from halter.spec.limits import AgentBounds, FleetLimits, Limits, ModelRate
from halter.spec.policy import MODES, SIMULATE_MODES, Approval, LevelRule, Policy, ProvenanceMode, QuietHours, ToolRule

UNKNOWN: Any = UNSET
NIGHTS = tuple(
    QuietHours(start=start, end=end) for start, end in (("22:00", "06:00"), ("05:00", "08:00"), ("23:00", "01:00"))
)
APPROVALS: tuple[Approval | None, ...] = ("always", None, "never")
RULES: dict[str, Any] = {
    "approval": st.sampled_from(("always", "never", UNSET)),
    "rate": st.none() | st.integers(0, 40) | st.just(UNKNOWN),
    "simulate": st.sampled_from((*SIMULATE_MODES, UNSET)),
    "approvers": st.sampled_from((1, 2, UNSET)),
}
level_rules = st.builds(LevelRule, **RULES)
tool_rules = st.builds(ToolRule, **RULES, level=st.sampled_from((*LEVELS, UNSET)))
policies = st.builds(
    Policy,
    levels=st.dictionaries(st.sampled_from(LEVELS), level_rules, max_size=3),
    tools=st.dictionaries(st.sampled_from(("deploy", "read")), tool_rules),
    simulate=st.sampled_from((*SIMULATE_MODES, UNSET)),
    provenance=st.sampled_from((*get_args(ProvenanceMode), UNSET)),
    lock_after_denial=st.sampled_from((True, False, UNSET)),
    unknown_price=st.sampled_from(("refuse", "dearest", UNSET)),
    disabled=st.lists(st.sampled_from(("deploy", "read", "pay")), unique=True).map(tuple),
    approval_expiry=st.sampled_from((HOUR, 2 * HOUR, UNKNOWN)),
    quiet_hours=st.sampled_from((*NIGHTS, UNSET)),
)
calls = st.tuples(st.sampled_from(("deploy", "read", "pay")), st.sampled_from(LEVELS))


class Evaluation(NamedTuple):
    """What a fleet's policies mean for one call, and for a session."""

    rule: ToolPolicy
    provenance: str | None
    locks: bool
    unknown_price: str | None
    disabled: frozenset[str]
    expiry: int
    quiet: frozenset[int]


def resolve(fleets: Sequence[Policy]) -> ResolvedPolicy:
    first, *others = fleets
    fleet = FleetConfig(FleetSpec(policy=first), extra_policies=tuple(others))
    return resolve_policy(fleet, AgentFile(AgentSpec(name="a"), SourceMap("agent.yaml")))


def evaluate(fleets: Sequence[Policy], call: tuple[str, Level]) -> Evaluation:
    policy = resolve(fleets)
    return Evaluation(
        policy.rule(*call),
        policy.provenance,
        policy.locks,
        policy.unknown_price,
        frozenset(policy.disabled),
        policy.approval_expiry,
        frozenset(hour for hour in range(24) if policy.question_terms.times_at(hour * HOUR, DAY)["shown_at"]),
    )


def choose_strictest(one: Evaluation, other: Evaluation) -> Evaluation:
    """The strictest of two evaluations, in the plainest way."""
    rules = (one.rule, other.rule)
    rates = [rule.rate for rule in rules if rule.rate is not None]
    rule = ToolPolicy(
        level=LEVELS[max(LEVELS.index(rule.level) for rule in rules)],
        approval=APPROVALS[min(APPROVALS.index(rule.approval) for rule in rules)],
        rate=min(rates, default=None),
        simulate=SIMULATE_MODES[max(SIMULATE_MODES.index(rule.simulate) for rule in rules)],
        approvers=max(rule.approvers for rule in rules),
    )
    provenances = ("strict", "ask", None, "observe", "off")
    prices = ("refuse", None, "dearest")
    return Evaluation(
        rule,
        min(one.provenance, other.provenance, key=provenances.index),
        one.locks or other.locks,
        min(one.unknown_price, other.unknown_price, key=prices.index),
        one.disabled | other.disabled,
        min(one.expiry, other.expiry),
        one.quiet | other.quiet,
    )


@given(policies, policies, calls)
def test_what_two_policies_mean_together_is_the_strictest_of_what_each_means(
    one: Policy, other: Policy, call: tuple[str, Level]
) -> None:
    both = evaluate(meet_policies((one, other)), call)
    assert both == choose_strictest(evaluate((one,), call), evaluate((other,), call))


@given(policies, policies, policies, calls)
def test_the_order_and_the_grouping_of_policies_do_not_matter(
    one: Policy, other: Policy, third: Policy, call: tuple[str, Level]
) -> None:
    assert evaluate(meet_policies((one, other)), call) == evaluate(meet_policies((other, one)), call)
    assert evaluate(meet_policies((one, one)), call) == evaluate((one,), call)
    left = meet_policies((*meet_policies((one, other)), third))
    right = meet_policies((one, *meet_policies((other, third))))
    assert evaluate(left, call) == evaluate(right, call)


names = st.lists(st.sampled_from(("a:x", "a:y", "a:*", "b:x", "*")), unique=True, max_size=3).map(tuple)
amounts = st.none() | st.integers(0, 9) | st.just(UNKNOWN)
counts = st.integers(0, 9) | st.just(UNKNOWN)
figures = st.integers(0, 3).map(Decimal)
prices = st.builds(ModelSpec, price=st.just(FREE_PRICE) | st.builds(Price, figures, figures))
LIMITS: dict[str, Any] = {
    key: amounts if key.startswith("max_cost") else counts
    for key, each in list_orders(Limits).items()
    if isinstance(each, Lower)
}
LIMITS["timeout"] = st.sampled_from((0, HOUR, 2 * HOUR, UNKNOWN))
fleets = st.builds(
    FleetSpec,
    mode=st.sampled_from(MODES),
    observe=st.booleans(),
    limits=st.builds(FleetLimits, max_cost_usd_per_day=amounts, max_cost_usd_per_month=amounts),
    agents=st.builds(AgentBounds, limits=st.builds(Limits, **LIMITS)),
    policy=policies,
    allowed_models=names | st.just(UNKNOWN),
    allowed_hosts=names | st.just(UNKNOWN),
    allowed_secrets=names | st.just(UNKNOWN),
    models=st.fixed_dictionaries({"a:x": prices, "a:y": prices}),
    rates=st.dictionaries(
        st.sampled_from(("a:*", "b:x")), st.builds(ModelRate, requests_per_minute=counts, tokens_per_minute=counts)
    ),
    shell=st.builds(ShellBounds, sandbox=st.booleans(), network=st.booleans()),
)


def list_looser(kind: type[Struct], value: Any, bound: Any) -> Iterator[str]:
    """The keys in which a value is looser than a bound. What applies beside is not merged, so not held to it."""
    for key, order in list_orders(kind).items():
        ours: Any = getattr(value, key, UNSET)
        theirs: Any = getattr(bound, key, UNSET)
        match order:
            case Mapped():
                for name in [] if order.beside else {*ours, *theirs}:
                    yield from list_looser(order.kind, ours.get(name), theirs.get(name))
            case Nested():
                yield from list_looser(order.kind, ours, theirs)
            case Unordered():
                pass
            case _ if not order.beside and not order.is_within(ours, theirs):
                yield key
            case _:
                pass


def is_equivalent(one: FleetSpec, other: FleetSpec) -> bool:
    return not [*list_looser(FleetSpec, one, other), *list_looser(FleetSpec, other, one)]


@given(fleets, fleets)
def test_what_holds_of_two_fleets_is_looser_than_neither_and_names_what_it_leaves_out(
    one: FleetSpec, other: FleetSpec
) -> None:
    met = meet(one, other)
    assert [*list_looser(FleetSpec, met.value, one)] == [*list_looser(FleetSpec, met.value, other)] == []
    looser = {each.path[-1] for each in met.differences if each.how == "looser"}
    assert looser >= {*list_looser(FleetSpec, other, one)}
    assert all(each.first_text != each.second_text for each in met.differences)


@given(fleets, fleets, fleets)
def test_two_fleets_are_met_in_any_order_and_grouping(one: FleetSpec, other: FleetSpec, third: FleetSpec) -> None:
    assert is_equivalent(meet(one, other).value, meet(other, one).value)
    assert meet(one, one) == (one, [])
    assert is_equivalent(meet(meet(one, other).value, third).value, meet(one, meet(other, third).value).value)


@given(fleets, fleets)
def test_what_only_tightens_is_what_differs_in_no_looser_key(bound: FleetSpec, value: FleetSpec) -> None:
    """What an agent or a run does not set, its bound sets; what the bound leaves open, it may set."""
    ours, theirs = bound.agents.limits, value.agents.limits
    met = tighten(ours, theirs)
    assert [key for key in list_looser(Limits, met.value, ours) if getattr(ours, key) is not UNSET] == []
    set_in_both = [key for key in LIMITS if UNSET not in (getattr(ours, key), getattr(theirs, key))]
    looser = [
        key for key in set_in_both if not list_orders(Limits)[key].is_within(getattr(theirs, key), getattr(ours, key))
    ]
    assert [each.path[-1] for each in met.differences if each.how == "looser"] == looser


def test_a_key_without_an_order_is_found_when_it_is_first_read() -> None:
    class Cell(Struct, frozen=True):
        color: Annotated[str, Meta(description="A color.")] | UnsetType = UNSET

    class Cells(Struct, frozen=True):
        cell: Cell = Cell()
        zone: Annotated[str, Meta(extra={"order": "fixed"})] = "UTC"

    with pytest.raises(TypeError, match=r"The policy key Cell\.color does not say which of two values is the stricter"):
        list_orders(Cells)


def test_every_key_of_a_fleet_has_an_order() -> None:
    assert {*list_orders(FleetSpec)} == {*FleetSpec.__struct_fields__}
    assert {*list_orders(AgentBounds)} == {"limits"}

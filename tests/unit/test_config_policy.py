"""A store's policy and a file hold together: the stricter word of both counts, in every key that limits something."""

import itertools
import math

import pytest

from halter.config.agent_files import AgentFile, parse_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.policy import (
    canonicalize_policy,
    digest_policy,
    merge_with_policy,
    parse_stored_fleet,
)
from halter.config.resolve import read_model_rates, resolve_policy
from halter.config.yaml_reader import Document, SourceMap, load_bytes
from halter.core.errors import ConfigError
from halter.core.tools import LEVELS, Level
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.order import DifferenceKind
from halter.spec.fleet import FleetSpec
from halter.spec.policy import MODES, SIMULATE_MODES

TOOLS: list[tuple[str, Level]] = [("look", "SAFE"), ("wipe", "RESTRICTED"), ("shell", "PRIVILEGED")]


def fleet(text: str) -> FleetConfig:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml")) if text else FleetConfig()


def store_and_parse(text: str) -> FleetConfig:
    return parse_stored_fleet(canonicalize_policy(fleet(text).raw))


def agent(text: str = "") -> AgentFile:
    return parse_agent(load_bytes(f"name: desk\n{text}".encode(), "agent.yaml"))


@pytest.mark.parametrize(
    ("in_store", "in_file", "key", "how"),
    [
        ("limits: {max_cost_usd_per_day: 0.05}", "limits: {max_cost_usd_per_day: 5}", "limits", "looser"),
        ("limits: {max_cost_usd_per_day: 0.05}", "mode: SEMI", "limits", "looser"),
        ("limits: {max_cost_usd_per_day: 50}", "mode: SEMI", "limits", "stricter"),
        ("mode: SEMI", "limits: {max_cost_usd_per_day: none}", "limits", "looser"),
        ("mode: SEMI", "limits: {max_cost_usd_per_day: 3}", "limits", "stricter"),
        ("limits: {max_cost_usd_per_month: 9}", "mode: SEMI", "limits", "looser"),
        ("mode: SEMI", "limits: {max_cost_usd_per_month: 9}", "limits", "stricter"),
        ("mode: ASSIST", "mode: FULL", "mode", "looser"),
        ("mode: FULL", "mode: ASSIST", "mode", "stricter"),
        ("observe: false", "observe: true", "observe", "looser"),
        ("observe: true", "observe: false", "observe", "stricter"),
        ("zone: Europe/Berlin", "zone: Asia/Tokyo", "zone", "fixed"),
        ("retention: 90d", "retention: 1d", "retention", "fixed"),
        ("mode: SEMI", "retention: 1d", "retention", "fixed"),
        ("agents: {limits: {max_cost_usd: 2}}", "agents: {limits: {max_cost_usd: 3}}", "agents", "looser"),
        ("agents: {limits: {max_cost_usd: 2}}", "mode: SEMI", "agents", "looser"),
        ("mode: SEMI", "agents: {limits: {max_cost_usd: 3}}", "agents", "looser"),
        ("mode: SEMI", "agents: {limits: {max_cost_usd: 0.5}}", "agents", "stricter"),
        ("mode: SEMI", "agents: {limits: {max_cost_usd_per_hour: 3}}", "agents", "stricter"),
        ("agents: {limits: {max_steps: 9}}", "agents: {limits: {max_steps: 10}}", "agents", "looser"),
        ("agents: {limits: {timeout: 9s}}", "agents: {limits: {timeout: 0}}", "agents", "looser"),
        ("agents: {limits: {token_budget: 9}}", "agents: {limits: {token_budget: 8}}", "agents", "stricter"),
        ("mode: SEMI", "agents: {limits: {on_cap: stop}}", "agents", "free"),
        ("policy: {levels: {SAFE: {approval: always}}}", "mode: SEMI", "policy", "looser"),
        ("mode: SEMI", "policy: {levels: {RESTRICTED: {approval: never}}}", "policy", "looser"),
        ("mode: SEMI", "policy: {levels: {PRIVILEGED: {rate: 30/hour}}}", "policy", "looser"),
        ("mode: SEMI", "policy: {levels: {PRIVILEGED: {rate: 3/hour}}}", "policy", "stricter"),
        ("policy: {levels: {PRIVILEGED: {simulate: asked}}}", "mode: SEMI", "policy", "looser"),
        ("policy: {simulate: asked}", "mode: SEMI", "policy", "looser"),
        ("policy: {tools: {pay: {approvers: 2}}}", "mode: SEMI", "policy", "looser"),
        ("mode: SEMI", "policy: {tools: {pay: {approvers: 2}}}", "policy", "stricter"),
        ("mode: SEMI", "policy: {simulate: asked}", "policy", "stricter"),
        ("policy: {tools: {wipe: {level: PRIVILEGED}}}", "mode: SEMI", "policy", "looser"),
        ("mode: SEMI", "policy: {tools: {wipe: {level: SAFE}}}", "policy", "looser"),
        ("mode: SEMI", "policy: {tools: {wipe: {level: PRIVILEGED}}}", "policy", "stricter"),
        ("policy: {disabled: [wipe]}", "mode: SEMI", "policy", "looser"),
        ("mode: SEMI", "policy: {disabled: [wipe]}", "policy", "stricter"),
        ("policy: {approval_expiry: 1h}", "mode: SEMI", "policy", "looser"),
        ("mode: SEMI", "policy: {approval_expiry: 1h}", "policy", "stricter"),
        ("allowed_models: ['openai:*']", "mode: SEMI", "allowed_models", "looser"),
        ("allowed_models: ['openai:*']", "allowed_models: ['openai:gpt-5']", "allowed_models", "stricter"),
        ("allowed_hosts: [a.example]", "allowed_hosts: [a.example, b.example]", "allowed_hosts", "looser"),
        ("allowed_secrets: [ONE]", "allowed_secrets: [TWO]", "allowed_secrets", "looser"),
        ("mode: SEMI", "models: {'openai:gpt-5': {price: free}}", "models", "looser"),
        (
            "models: {'a:b': {price: {input: 2, output: 8}}}",
            "models: {'a:b': {price: {input: 2, output: 7}}}",
            "models",
            "looser",
        ),
        ("models: {'a:b': {price: free}}", "models: {'a:b': {price: {input: 2, output: 7}}}", "models", "stricter"),
        ("rates: {'a:*': {requests_per_minute: 5}}", "mode: SEMI", "rates", "looser"),
        (
            "rates: {'a:*': {requests_per_minute: 5}}",
            "rates: {'a:*': {requests_per_minute: 4}}",
            "rates",
            "stricter",
        ),
        (
            "providers: {near: {base_url: 'http://one.example/v1'}}",
            "providers: {near: {base_url: 'http://two.example/v1'}}",
            "providers",
            "fixed",
        ),
        ("mode: SEMI", "providers: {near: {base_url: 'http://two.example/v1'}}", "providers", "free"),
        ("shell: {sandbox: true}", "shell: {sandbox: false}", "shell", "looser"),
        ("shell: {network: true}", "shell: {network: false}", "shell", "stricter"),
    ],
)
def test_a_key_in_which_they_differ_is_named_with_what_that_means(
    in_store: str, in_file: str, key: str, how: DifferenceKind
) -> None:
    policy_differences = [
        each
        for each in merge_with_policy(store_and_parse(in_store), fleet(in_file)).differences
        if each.key.startswith(key)
    ]
    assert [each.how for each in policy_differences] == [how]
    assert policy_differences[0].stored != policy_differences[0].written or key == "providers"


FILES = [
    "",
    "mode: ASSIST",
    "mode: FULL\nobserve: true\nlimits: {max_cost_usd_per_day: none}",
    "limits: {max_cost_usd_per_day: 0.05, max_cost_usd_per_month: 1}\nzone: Europe/Berlin",
    "agents: {limits: {max_cost_usd: 3, max_cost_usd_per_day: 0.5, max_cost_usd_per_hour: 2, max_steps: 7}}",
    "agents: {limits: {timeout: 0, max_retries: 9}}",
    "agents: {limits: {max_cost_usd: none, max_cost_usd_per_day: 50, token_budget: 9, timeout: 5s}}",
    "policy: {levels: {SAFE: {approval: always}, PRIVILEGED: {rate: 3/hour}}, disabled: [wipe]}",
    "policy: {tools: {shell: {rate: 9/hour, approval: never}, wipe: {level: PRIVILEGED}}, approval_expiry: 1h}",
    "policy: {levels: {RESTRICTED: {approval: never, simulate: never}}, tools: {look: {level: RESTRICTED}}}",
    "policy: {simulate: asked, levels: {PRIVILEGED: {simulate: always}}}",
    "allowed_models: ['openai:*', 'anthropic:claude']\nallowed_hosts: ['*.example']\nallowed_secrets: [ONE, TWO]",
    "allowed_models: ['openai:gpt-5', 'google:*']\nallowed_hosts: [a.example, b.test]\nallowed_secrets: [TWO]",
    "models: {'openai:gpt-5': {price: free}, 'a:b': {price: {input: 1, output: 9}}}\nshell: {network: true}",
    "models: {'openai:gpt-5': {price: {input: 3, output: 1}}, 'a:b': {price: {input: 2, output: 8}}}",
    "rates: {'openai:*': {requests_per_minute: 5}}\nshell: {sandbox: false}",
    "rates: {'openai:*': {requests_per_minute: 9, tokens_per_minute: 100}}",
]


def rank(limit: int | None) -> float:
    return math.inf if limit is None else limit


def is_within(resolved_policy: ResolvedPolicy, other: ResolvedPolicy) -> bool:
    """Tell whether a policy allows nothing that another one forbids."""
    caps = [
        rank(ours.max_cost_usd) <= rank(theirs.max_cost_usd)
        for ours, theirs in [(resolved_policy.caps.session, other.caps.session)]
        + [
            (ours, theirs)
            for ours, theirs in itertools.product(
                resolved_policy.caps.agent + resolved_policy.caps.fleet, other.caps.agent + other.caps.fleet
            )
            if ours.per == theirs.per and (ours in resolved_policy.caps.agent) == (theirs in other.caps.agent)
        ]
    ]
    windows = {cap.per for cap in resolved_policy.caps.fleet} >= {cap.per for cap in other.caps.fleet}
    rules = [
        LEVELS.index(resolved_policy.rule(*tool).level) >= LEVELS.index(other.rule(*tool).level)
        and rank(resolved_policy.rule(*tool).rate) <= rank(other.rule(*tool).rate)
        and resolved_policy.rule(*tool).approvers >= other.rule(*tool).approvers
        and SIMULATE_MODES.index(resolved_policy.rule(*tool).simulate)
        >= SIMULATE_MODES.index(other.rule(*tool).simulate)
        and ("never", None, "always").index(resolved_policy.rule(*tool).approval)
        >= ("never", None, "always").index(other.rule(*tool).approval)
        for tool in TOOLS
    ]
    return (
        all(caps)
        and windows
        and all(rules)
        and MODES.index(resolved_policy.mode) <= MODES.index(other.mode)
        and resolved_policy.observe <= other.observe
        and resolved_policy.max_steps <= other.max_steps
        and rank(resolved_policy.timeout or None) <= rank(other.timeout or None)
        and rank(resolved_policy.caps.token_budget) <= rank(other.caps.token_budget)
        and resolved_policy.approval_expiry <= other.approval_expiry
        and {*resolved_policy.disabled} >= {*other.disabled}
        and all(
            price.output >= other.prices[model].output
            for model, price in resolved_policy.prices.items()
            if model in other.prices
        )
        and {*other.prices} <= {*resolved_policy.prices}
    )


READ = [fleet(text) for text in FILES]
STORED = [store_and_parse(text) for text in FILES]


@pytest.mark.parametrize("alone", STORED, ids=FILES)
def test_what_holds_is_never_looser_than_the_stores_policy(alone: FleetConfig) -> None:
    for fleet_config in READ:
        both = merge_with_policy(alone, fleet_config).fleet
        assert is_within(resolve_policy(both, agent()), resolve_policy(alone, agent()))
        for model in ("openai:gpt-5", "google:gemini", "anthropic:claude"):
            allowed = [resolve_policy(each, agent()).allows_model(model) for each in (both, alone, fleet_config)]
            assert allowed[0] == (allowed[1] and allowed[2])
        rates = [read_model_rates(each).get("openai:*") for each in (both, alone, fleet_config)]
        asked = [math.inf if rate is None or rate.requests is None else rate.requests for rate in rates]
        assert asked[0] == min(asked[1:])
        assert both.spec.shell.sandbox >= alone.spec.shell.sandbox
        assert both.spec.shell.network <= alone.spec.shell.network


@pytest.mark.parametrize("text", FILES)
def test_the_same_file_changes_nothing_and_says_nothing(text: str) -> None:
    bound = merge_with_policy(store_and_parse(text), fleet(text))
    assert bound.differences == ()
    assert resolve_policy(bound.fleet, agent()).digest() == resolve_policy(fleet(text), agent()).digest()
    assert (
        resolve_policy(merge_with_policy(store_and_parse(text), None).fleet, agent()).digest()
        == resolve_policy(fleet(text), agent()).digest()
    )


def test_a_cap_for_agents_in_a_file_does_not_raise_the_default_of_those_that_set_none() -> None:
    fleet_config = merge_with_policy(store_and_parse("mode: SEMI"), fleet("agents: {limits: {max_cost_usd: 3}}")).fleet
    assert resolve_policy(fleet_config, agent()).caps.session.max_cost_usd == 1_000_000
    assert resolve_policy(fleet_config, agent("limits: {max_cost_usd: 2}")).caps.session.max_cost_usd == 2_000_000
    with pytest.raises(ConfigError, match=r"\$4\.00, but .+ allows only \$3\.00"):
        resolve_policy(fleet_config, agent("limits: {max_cost_usd: 4}"))


def test_a_rule_for_a_tool_in_a_file_does_not_hide_a_stricter_one_for_its_level_in_the_store() -> None:
    in_store = store_and_parse("policy: {levels: {PRIVILEGED: {rate: 2/hour, approval: always}}}")
    fleet_config = merge_with_policy(
        in_store, fleet("policy: {tools: {shell: {rate: 15/hour, approval: never}}}")
    ).fleet
    rule = resolve_policy(fleet_config, agent()).rule("shell", "PRIVILEGED")
    assert (rule.rate, rule.approval) == (2, "always")


def test_an_agent_beyond_the_stores_policy_is_a_sentence_that_names_the_policy() -> None:
    fleet_config = merge_with_policy(store_and_parse("agents: {limits: {max_cost_usd: 2}}"), None).fleet
    with pytest.raises(ConfigError, match=r"\$3\.00, but this store's policy allows only \$2\.00") as error:
        resolve_policy(fleet_config, agent("limits: {max_cost_usd: 3}"))
    assert "default" not in str(error.value)


def test_a_stricter_file_is_named_with_its_line() -> None:
    fleet_config = merge_with_policy(
        store_and_parse("mode: SEMI"), fleet("mode: SEMI\nagents:\n  limits:\n    max_cost_usd: 0.5")
    ).fleet
    with pytest.raises(ConfigError, match=r"but halter\.yaml line 4 allows only \$0\.50"):
        resolve_policy(fleet_config, agent("limits: {max_cost_usd: 3}"))


def test_what_is_stored_is_read_as_it_was_written_and_keeps_nothing_that_could_be_a_key() -> None:
    text = (
        "limits: {max_cost_usd_per_day: 0.05}\nretention: 90d\nmodels: {'a:b': {price: {input: 0.1, output: 2}}}\n"
        "notify: {channels: [{name: ops, type: webhook, url: 'https://hooks.example/T0/B0/made-up'}]}"
    )
    policy = canonicalize_policy(fleet(text).raw)
    assert "hooks.example" not in policy
    assert digest_policy(policy) == digest_policy(canonicalize_policy(dict(reversed([*fleet(text).raw.items()]))))
    fleet_spec = parse_stored_fleet(policy).spec
    assert (fleet_spec.limits, fleet_spec.retention, fleet_spec.models) == (
        fleet(text).spec.limits,
        fleet(text).spec.retention,
        fleet(text).spec.models,
    )


def test_every_key_of_a_fleets_file_is_compared() -> None:
    """A key that is added to the file must be held to the store's policy, or be named here."""
    texts = {
        each.key.partition(".")[0].partition("[")[0]
        for fleet_config, other in itertools.product(STORED, READ)
        for each in merge_with_policy(fleet_config, other).differences
    }
    elsewhere = {"retention", "providers", "notify", "channels", "sign_on", "prices"}
    assert {*FleetSpec.__struct_fields__} == texts | elsewhere


def test_a_policy_of_a_newer_halter_is_not_taken_for_a_looser_one() -> None:
    with pytest.raises(
        ConfigError, match=r"`moon` is not a key of this store's policy; .+ A newer version of Halter applied it"
    ):
        parse_stored_fleet('{"moon":true}')


def test_a_program_s_figures_are_stored_as_numbers() -> None:
    from decimal import Decimal

    values = {"limits": {"max_cost_usd_per_day": Decimal("0.05")}}
    assert canonicalize_policy(values) == '{"limits":{"max_cost_usd_per_day":0.05}}'
    assert parse_fleet(Document({"limits": {"max_cost_usd_per_day": 0.05}}, SourceMap("x"))).spec.limits == (
        parse_stored_fleet(canonicalize_policy(values)).spec.limits
    )


@pytest.mark.parametrize("key", ["provenance: 'off'", "lock_after_denial: false", "unknown_price: dearest"])
def test_a_file_loosens_nothing_that_the_stores_policy_leaves_to_the_kind_of_session(key: str) -> None:
    both = merge_with_policy(store_and_parse("mode: SEMI"), fleet(f"policy: {{{key}}}"))
    assert [each.how for each in both.differences] == ["looser"]
    resolved_policy = resolve_policy(both.fleet, agent())
    assert (resolved_policy.provenance, resolved_policy.locks, resolved_policy.unknown_price) == (None, True, None)


def test_what_a_file_declares_of_a_tool_is_named_and_not_called_looser() -> None:
    in_store, in_file = "policy: {tools: {a: {reads: own}}}", "policy: {tools: {a: {reads: anyone, reach: others}}}"
    differences = merge_with_policy(store_and_parse(in_store), fleet(in_file)).differences
    assert [(each.key, each.how, each.stored, each.written) for each in differences] == [
        ("policy.tools.a.reads", "fixed", "own", "anyone"),
        ("policy.tools.a.reach", "free", "not set", "others"),
    ]

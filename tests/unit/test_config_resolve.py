"""An agent can only tighten the fleet."""

import itertools
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from halter.config.agent_files import AgentFile, parse_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import resolve_policy
from halter.config.tool_names import check_named_tools, list_unknown_tool_rules
from halter.config.yaml_reader import SourceMap, load_bytes
from halter.core.errors import ConfigError
from halter.core.tools import LEVELS, Level, ToolSpec
from halter.policy.evaluation import ResolvedPolicy
from halter.policy.order import is_covered
from halter.spec.agent import AgentSpec
from halter.spec.fleet import FleetSpec
from halter.spec.policy import SIMULATE_MODES, LevelRule, Policy, ToolRule

RULES = ("always", None, "never")


def fleet(text: str = "") -> FleetConfig:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml")) if text else FleetConfig()


def agent(text: str = "") -> AgentFile:
    return parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml"))


@pytest.mark.parametrize(
    ("fleet_says", "agent_says", "sentence"),
    [
        (
            "agents:\n  limits: {max_cost_usd: 2}\n",
            "limits:\n  max_cost_usd: 3\n",
            "agent.yaml line 3: `limits.max_cost_usd` is $3.00, but halter.yaml line 2 allows only $2.00 (`agents.",
        ),
        (
            "agents: {limits: {max_cost_usd: 2}}\n",
            "limits: {cost_limit: none}\n",
            "agent.yaml line 2: `limits.cost_limit` is none, but halter.yaml line 1 allows only $2.00",
        ),
        (
            "agents: {limits: {max_cost_usd_per_hour: 2}}\n",
            "limits: {max_cost_usd_per_hour: 3}\n",
            "agent.yaml line 2:",
        ),
        ("agents: {limits: {max_cost_usd_per_day: 2}}\n", "limits: {max_cost_usd_per_day: 3}\n", "agent.yaml line 2:"),
        ("agents: {limits: {token_budget: 9}}\n", "limits: {token_budget: 0}\n", "agent.yaml line 2:"),
        ("agents: {limits: {max_steps: 9}}\n", "limits: {max_steps: 10}\n", "agent.yaml line 2:"),
        ("agents: {limits: {timeout: 1h}}\n", "limits: {timeout: 0}\n", "agent.yaml line 2:"),
        (
            "",
            "mode: FULL\n",
            "agent.yaml line 2: `mode` is FULL, but halter.yaml allows only SEMI (`mode`, the default). An agent can",
        ),
        (
            "mode: ASSIST\n",
            "mode: SEMI\n",
            "agent.yaml line 2: `mode` is SEMI, but halter.yaml line 1 allows only ASSIST",
        ),
        ("", "observe: true\n", "agent.yaml line 2: `observe` is true, but halter.yaml allows only false"),
        (
            "policy: {levels: {RESTRICTED: {approval: always}}}\n",
            "policy: {levels: {RESTRICTED: {approval: never}}}\n",
            "agent.yaml line 2: `policy.levels.RESTRICTED.approval` is never, but halter.yaml line 1 allows only alw",
        ),
        (
            "",
            "policy: {tools: {shell: {approval: never}}}\n",
            "agent.yaml line 2: `policy.tools.shell.approval` is never, but halter.yaml allows only the mode's",
        ),
        (
            "",
            "policy: {levels: {PRIVILEGED: {rate: 21/hour}}}\n",
            "agent.yaml line 2: `policy.levels.PRIVILEGED.rate` is 21/hour, but halter.yaml allows only 20/hour",
        ),
        ("", "policy: {levels: {PRIVILEGED: {rate: none}}}\n", "agent.yaml line 2:"),
        (
            "policy: {tools: {a: {rate: 5/hour}}}\n",
            "policy: {tools: {a: {rate: 6/hour}}}\n",
            "agent.yaml line 2: `policy.tools.a.rate` is 6/hour, but halter.yaml line 1 allows only 5/hour",
        ),
        (
            "policy: {tools: {a: {simulate: always}}}\n",
            "policy: {tools: {a: {simulate: never}}}\n",
            "agent.yaml line 2: `policy.tools.a.simulate` is never",
        ),
        (
            "policy: {tools: {a: {level: RESTRICTED}}}\n",
            "policy: {tools: {a: {level: SAFE}}}\n",
            "agent.yaml line 2: `policy.tools.a.level` is SAFE, but halter.yaml line 1 allows only RESTRICTED or a",
        ),
        (
            "policy: {simulate: asked}\n",
            "policy: {levels: {RESTRICTED: {simulate: never}}}\n",
            "agent.yaml line 2: `policy.levels.RESTRICTED.simul",
        ),
        (
            "policy: {simulate: always}\n",
            "policy: {simulate: asked}\n",
            "agent.yaml line 2: `policy.simulate` is asked, but halter.yaml line 1 allows only always",
        ),
        ("policy: {approval_expiry: 1h}\n", "policy: {approval_expiry: 2h}\n", "agent.yaml line 2:"),
        (
            "allowed_models: ['anthropic:*']\n",
            "allowed_models: ['openai:gpt']\n",
            "agent.yaml line 2: `allowed_models[1]` is `openai:gpt`, but halter.yaml line 1 allows only `anthropic:*`",
        ),
        ("allowed_models: []\n", "allowed_models: ['a:b']\n", "agent.yaml line 2: `allowed_models[1]` is `a:b`, but"),
        (
            "allowed_hosts: [a.example]\n",
            "tools: {http: {hosts: [a.example, b.example]}}\n",
            "agent.yaml line 2: `tools.http.hosts[2]` is `b.example`, but halter.yaml line 1 allows only `a.example`",
        ),
        (
            "",
            "tools: {shell: {root: ., sandbox: false}}\n",
            "agent.yaml line 2: `tools.shell.sandbox` is false, but halter",
        ),
        (
            "",
            "tools: {shell: {root: ., network: true}}\n",
            "agent.yaml line 2: `tools.shell.network` is true, but halter",
        ),
    ],
)
def test_a_loosening_is_a_sentence_that_names_both_files(fleet_says: str, agent_says: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_policy(fleet(fleet_says), agent(agent_says))
    assert str(refused.value).startswith(sentence)
    assert "halter.yaml" in str(refused.value)


def test_of_two_caps_the_lower_counts() -> None:
    resolved_policy = resolve_policy(
        fleet("agents: {limits: {max_cost_usd: 2, max_steps: 9}}\n"), agent("limits: {max_cost_usd: 1.5}\n")
    )
    assert (resolved_policy.caps.session.max_cost_usd, resolved_policy.max_steps) == (1_500_000, 9)


def test_the_fleets_cap_counts_where_the_agent_says_nothing() -> None:
    assert (
        resolve_policy(fleet("agents: {limits: {max_cost_usd: 7}}\n"), agent()).caps.session.max_cost_usd == 7_000_000
    )


def test_an_agent_may_set_a_cap_where_the_fleet_says_nothing() -> None:
    assert resolve_policy(fleet(), agent("limits: {max_cost_usd: 7}\n")).caps.session.max_cost_usd == 7_000_000


def test_a_month_of_the_fleet_does_not_replace_its_day() -> None:
    caps = resolve_policy(fleet("limits: {max_cost_usd_per_month: 100}\n"), agent()).caps.fleet
    assert [(cap.per, cap.max_cost_usd) for cap in caps] == [("day", 20_000_000), ("month", 100_000_000)]


def test_a_rule_for_a_tool_does_not_hide_the_other_files_rule_for_its_level() -> None:
    resolved_policy = resolve_policy(
        fleet("policy: {tools: {deploy: {approval: never, rate: none}}}\n"),
        agent("policy: {levels: {RESTRICTED: {approval: always, rate: 3/hour}}}\n"),
    )
    assert resolved_policy.rule("deploy", "RESTRICTED").approval == "always"
    assert resolved_policy.rule("deploy", "RESTRICTED").rate == 3
    assert resolved_policy.rule("deploy", "CONTROLLED").approval == "never"


def test_raising_a_level_never_leads_to_laxer_rules() -> None:
    resolved_policy = resolve_policy(
        fleet("policy: {levels: {PRIVILEGED: {approval: never, rate: none}, RESTRICTED: {rate: 4/hour}}}\n"),
        agent("policy: {tools: {deploy: {level: PRIVILEGED}}}\n"),
    )
    rule = resolved_policy.rule("deploy", "RESTRICTED")
    assert (rule.level, rule.approval, rule.rate) == ("PRIVILEGED", None, 4)


level_rules = st.builds(
    LevelRule,
    approval=st.sampled_from(("always", "never", UNSET)),
    rate=st.none() | st.integers(0, 40) | st.just(UNSET),
    simulate=st.sampled_from((*SIMULATE_MODES, UNSET)),
)
tool_rules = st.builds(
    ToolRule,
    approval=st.sampled_from(("always", "never", UNSET)),
    rate=st.none() | st.integers(0, 40) | st.just(UNSET),
    simulate=st.sampled_from((*SIMULATE_MODES, UNSET)),
    level=st.sampled_from((*LEVELS, UNSET)),
)
policies = st.builds(
    Policy,
    levels=st.dictionaries(st.sampled_from(LEVELS), level_rules),
    tools=st.dictionaries(st.just("deploy"), tool_rules),
    simulate=st.sampled_from((*SIMULATE_MODES, UNSET)),
)


def resolve_or_none(ours: Policy, theirs: Policy) -> ResolvedPolicy | None:
    try:
        return resolve_policy(
            FleetConfig(FleetSpec(policy=ours)), AgentFile(AgentSpec(name="a", policy=theirs), SourceMap("agent.yaml"))
        )
    except ConfigError:
        return None


@given(policies, policies, st.sampled_from(LEVELS))
def test_no_agent_that_is_accepted_has_laxer_rules_than_the_fleet_alone(
    ours: Policy, theirs: Policy, declared: Level
) -> None:
    with_agent, alone = resolve_or_none(ours, theirs), resolve_or_none(ours, Policy())
    assert alone is not None
    if with_agent is None:
        return
    rule, bound = with_agent.rule("deploy", declared), alone.rule("deploy", declared)
    assert LEVELS.index(rule.level) >= LEVELS.index(bound.level)
    assert RULES.index(rule.approval) <= RULES.index(bound.approval)
    assert bound.rate is None or (rule.rate is not None and rule.rate <= bound.rate)
    assert SIMULATE_MODES.index(rule.simulate) >= SIMULATE_MODES.index(bound.simulate)


@pytest.mark.parametrize("hosts", ["{}", "{hosts: []}"])
def test_the_web_without_hosts_is_a_sentence(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.yaml line 2: `tools\.http` has no hosts; list the allowed hosts"):
        resolve_policy(fleet(), agent(f"tools: {{http: {hosts}}}\n"))


def test_the_web_without_hosts_of_its_own_has_those_of_the_fleet() -> None:
    assert resolve_policy(fleet("allowed_hosts: ['*.a.example']\n"), agent("tools: {http: {}}\n")).allowed_hosts == (
        "*.a.example",
    )


def test_disabled_tools_of_both_files_add_up() -> None:
    resolved_policy = resolve_policy(fleet("policy: {disabled: [b]}\n"), agent("policy: {disabled: [a, b]}\n"))
    assert resolved_policy.disabled == ("a", "b")


@pytest.mark.parametrize(
    ("name", "patterns", "inside"),
    [
        ("api.example.com", ("api.example.com",), True),
        ("api.example.com", ("*.example.com",), True),
        ("example.com", ("*.example.com",), False),
        ("evil-example.com", ("*.example.com",), False),
        (".example.com", ("*.example.com",), False),
        ("*.example.com", ("*.example.com",), True),
        ("*.example.com", ("*.com",), True),
        ("*.com", ("*.example.com",), False),
        ("anthropic:claude", ("anthropic:*",), True),
        ("anthropic2:claude", ("anthropic:*",), False),
        ("anthropic:*", ("anthropic:claude*",), False),
        ("openai:gpt", ("*",), True),
        ("openai:gpt", (), False),
        ("*", ("*",), True),
        ("*", ("*.example.com",), False),
    ],
)
def test_patterns_cover_what_they_stand_for(name: str, patterns: tuple[str, ...], *, inside: bool) -> None:
    assert is_covered(name, patterns) is inside


def test_equal_files_have_equal_digests_however_they_are_written() -> None:
    resolved_policy = resolve_policy(fleet("mode: SEMI\nzone: UTC\n"), agent("limits: {timeout: 1h, max_steps: 5}\n"))
    two = resolve_policy(fleet("zone: UTC\n"), agent("limits:\n  max_steps: 5\n  timeout: 60m\n"))
    assert resolved_policy.canonical() == two.canonical()
    assert re.fullmatch("[0-9a-f]{64}", resolved_policy.digest())


@pytest.mark.parametrize(
    "change",
    [
        "mode: ASSIST\n",
        "limits: {max_cost_usd: 0.5}\n",
        "limits: {on_cap: ask}\n",
        "policy: {tools: {a: {approval: always}}}\n",
        "policy: {disabled: [a]}\n",
        "phases: {work: [a]}\n",
        "secrets: [A]\n",
        "tools: {files: {root: .}}\n",
    ],
)
def test_whatever_changes_the_policy_changes_its_digest(change: str) -> None:
    assert resolve_policy(fleet(), agent(change)).digest() != resolve_policy(fleet(), agent()).digest()


def test_what_is_resolved_can_be_kept_and_read_again() -> None:
    resolved_policy = resolve_policy(
        fleet("models: {a/b: {price: {input: 3, output: 15}}}\nlimits: {max_cost_usd_per_day: none}\n"),
        agent("policy: {levels: {SAFE: {rate: 5/hour}}}\ntools: {files: {root: .}}\nphases: {look: [a], act: all}\n"),
    )
    payload = msgspec.json.decode(resolved_policy.canonical(), type=ResolvedPolicy)
    assert payload == resolved_policy
    assert payload.digest() == resolved_policy.digest()


def tools(**levels: Level) -> list[ToolSpec]:
    return [ToolSpec(name=name, description="", schema=b"{}", level=level) for name, level in levels.items()]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "policy: {tools: {deplay: {rate: 1/hour}}}\n",
            "agent.yaml line 2: there is no tool `deplay`; did you mean `deploy`?",
        ),
        ("policy: {disabled: [nothing]}\n", "agent.yaml line 2: there is no tool `nothing`; the tools are `deploy`"),
        ("phases:\n  work:\n  - read\n  - write\n", "agent.yaml line 5: there is no tool `write`;"),
        (
            "policy: {tools: {deploy: {level: SAFE}}}\n",
            "agent.yaml line 2: `policy.tools.deploy.level` is SAFE, but PRIVILEGED applies to this tool; an agent",
        ),
        (
            "policy: {tools: {deploy: {rate: 50/hour}}}\n",
            "agent.yaml line 2: `policy.tools.deploy.rate` is 50/hour, but 20/hour applies to this tool; an agent",
        ),
        (
            "policy: {tools: {deploy: {rate: none}}}\n",
            "agent.yaml line 2: `policy.tools.deploy.rate` is none, but 20/h",
        ),
    ],
)
def test_what_is_said_of_tools_is_checked_against_the_tools(text: str, sentence: str) -> None:
    agent_file = agent(text)
    with pytest.raises(ConfigError) as refused:
        check_named_tools(resolve_policy(fleet(), agent_file), agent_file, tools(deploy="PRIVILEGED", read="SAFE"))
    assert str(refused.value).startswith(sentence)


def test_a_tool_that_needs_one_person_is_held_to_its_level_s_two() -> None:
    agent_file = agent("policy: {tools: {deploy: {approvers: 1}}}\n")
    resolved_policy = resolve_policy(fleet("policy: {levels: {PRIVILEGED: {approvers: 2}}}\n"), agent_file)
    with pytest.raises(ConfigError, match=r"`policy\.tools\.deploy\.approvers` is 1, but 2 applies to this tool"):
        check_named_tools(resolved_policy, agent_file, tools(deploy="PRIVILEGED"))


def test_rules_that_tighten_a_tool_pass() -> None:
    agent_file = agent(
        "policy: {tools: {read: {level: RESTRICTED, rate: 5/hour, simulate: asked, approval: always}}}\n"
    )
    check_named_tools(resolve_policy(fleet(), agent_file), agent_file, tools(read="SAFE"))


def test_a_rule_of_the_fleet_that_fits_no_tool_is_pointed_out() -> None:
    fleet_config = fleet(
        "policy:\n  tools:\n    shel: {approval: always}\n    read: {rate: 1/hour}\n  disabled: [rm]\n"
    )
    assert list_unknown_tool_rules(fleet_config, lambda: ["read", "shell"]) == (
        "halter.yaml line 3: no agent here has a tool `shel`; did you mean `shell`?",
        "halter.yaml line 5: no agent here has a tool `rm`; the tools are `read`, `shell`.",
    )


def test_a_phase_grants_its_tools_and_no_other() -> None:
    look, act = resolve_policy(fleet(), agent("phases: {look: [read], act: all}\n")).phases
    granted = [phase.grants_tool(tool) for phase, tool in itertools.product((look, act), ("read", "deploy"))]
    assert granted == [True, False, True, True]

"""Every key of both files is read, and ends where somebody looks at it."""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from halter.config.agent_files import AgentFile, parse_agent, read_agent
from halter.config.decode import agent_schema, fleet_schema
from halter.config.merge import FleetConfig, parse_fleet, read_fleet
from halter.config.playbook_files import parse_playbook
from halter.config.resolve import REVIEW_PHASES, resolve_agent, resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.errors import ConfigError
from halter.core.money import Cap
from halter.core.provenance import ArgumentUse, Declaration
from halter.core.rates import RateLimit
from halter.core.tools import ProviderTool, ToolSpec
from halter.core.usage import FREE_PRICE, Price
from halter.policy.evaluation import ResolvedPolicy
from halter.runtime.assembly.agent_tools import make_agent_tools
from halter.spec.agent import FilesSpec, GatewaySpec, Phase, ShellSpec
from halter.spec.fleet import ChannelsSpec, NtfySpec, OidcSpec, PricesSpec, SignOnSpec, SlackSpec, TelegramSpec
from halter.spec.models import BrainSpec, Provider
from halter.spec.policy import QuietHours


def fleet(text: str) -> FleetConfig:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml")) if text else FleetConfig()


def agent(text: str = "") -> AgentFile:
    return parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml"))


def write_nested_key(path: str, value: str) -> str:
    """Write a dotted key as YAML."""
    keys = path.split("/")
    return "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(keys))[:-1] + f" {value}\n"


def caps(resolved_policy: ResolvedPolicy, scope: str, per: str) -> int | None:
    values: Mapping[str, tuple[Cap, ...]] = {"agent": resolved_policy.caps.agent, "fleet": resolved_policy.caps.fleet}
    return next(cap.max_cost_usd for cap in values[scope] if cap.per == per)


def read_declaration(resolved_policy: ResolvedPolicy) -> Declaration:
    return resolved_policy.declaration(ToolSpec(name="deploy", description="", schema=b"{}"))


LIMITS: list[tuple[str, str, Any, Any]] = [
    ("max_cost_usd", "0.001", lambda r: r.caps.session.max_cost_usd, 1000),
    ("max_cost_usd", "none", lambda r: r.caps.session.max_cost_usd, None),
    ("cost_limit", "0.25", lambda r: r.caps.session.max_cost_usd, 250_000),
    ("max_cost_usd_per_hour", "0.5", lambda r: caps(r, "agent", "hour"), 500_000),
    ("max_cost_usd_per_day", "2", lambda r: caps(r, "agent", "day"), 2_000_000),
    ("on_cap", "ask", lambda r: r.on_cap, "ask"),
    ("token_budget", "1000", lambda r: r.caps.token_budget, 1000),
    ("token_budget", "0", lambda r: r.caps.token_budget, None),
    ("max_steps", "7", lambda r: r.max_steps, 7),
    ("timeout", "30m", lambda r: r.timeout, 30 * MINUTE),
    ("timeout", "90", lambda r: r.timeout, 90_000_000),
    ("timeout", "0", lambda r: r.timeout, 0),
    ("min_output_tokens", "64", lambda r: r.min_output_tokens, 64),
    ("reserve_tokens", "100", lambda r: r.reserve_tokens, 100),
    ("reserve_cost_fraction", "0.2", lambda r: r.reserve_cost_fraction, 0.2),
]
MIND_LIMITS: list[tuple[str, str, Any, Any]] = [
    ("max_output_tokens", "2000", lambda m: m.max_output_tokens, 2000),
    ("max_retries", "0", lambda m: m.max_retries, 0),
    ("outage_backoff", "5m", lambda m: m.outage_backoff, 5 * MINUTE),
    ("context_window", "60000", lambda m: m.context_window, 60_000),
    ("context_strategy", "summarize", lambda m: m.context_strategy, "summarize"),
    ("streaming", "false", lambda m: m.streaming, False),
    ("max_tokens_recoveries", "5", lambda m: m.max_tokens_recoveries, 5),
    ("max_repeated_tool_steps", "7", lambda m: m.max_repeated_tool_steps, 7),
]
PROVIDER: list[tuple[str, str, Any, Any]] = [
    (
        "providers/*/base_url",
        "https://llm.example/v1/",
        lambda m: m.providers["deploy"].base_url,
        "https://llm.example/v1",
    ),
    ("providers/*/base_url", "http://[::1]:8000", lambda m: m.providers["deploy"].wire, "openai"),
    ("providers/gemini/api_key", "${secret:G}", lambda m: m.providers["gemini"].wire, "google"),
    ("providers/ollama/api_key", "${secret:K}", lambda m: m.providers["ollama"].api_key, "${secret:K}"),
    (
        "providers/mistral/api_key",
        "${secret:M}",
        lambda m: m.providers["mistral"].base_url,
        "https://api.mistral.ai/v1",
    ),
    ("providers/openai/wire", "anthropic", lambda m: m.providers["openai"].wire, "anthropic"),
    ("providers/google/credentials", "google", lambda m: m.providers["google"].credentials, "google"),
    ("providers/openai/prompt_cache", "false", lambda m: m.providers["openai"].prompt_cache, False),
    ("providers/openai/prompt_cache", "true", lambda m: m.providers["openai"].prompt_cache, True),
    ("providers/openai/vision", "false", lambda m: m.providers["openai"].vision, False),
    ("providers/openai/vision", "true", lambda m: m.providers["openai"].vision, True),
    ("providers/openai/bills_errors", "true", lambda m: m.providers["openai"].bills_errors, True),
    ("providers/openai/bills_errors", "false", lambda m: m.providers["openai"].bills_errors, False),
]
MIND: list[tuple[str, str, Any, Any]] = [
    *((f"limits/{key}", *rest) for key, *rest in MIND_LIMITS),
    *PROVIDER,
    ("model", "openai/gpt-5", lambda m: m.model, "openai:gpt-5"),
    ("temperature", "0.5", lambda m: m.temperature, 0.5),
    ("thinking", "high", lambda m: m.thinking, "high"),
    ("provider_tools/web_search/max_uses", "3", lambda m: m.provider_tools, (ProviderTool("web_search", 3),)),
    ("tool_calls", "text", lambda m: m.tool_calls, "text"),
    ("instructions", "Be kind.", lambda m: m.instructions, "Be kind."),
    ("model_for", "{summary: ollama/small}", lambda m: m.model_for, {"summary": "ollama:small"}),
    ("reflex", "[{when: 'true'}]", lambda m: m.reflex, ({"when": "true"},)),
    ("script", "replies.yaml", lambda m: m.script, ({"text": "Hello."},)),
    ("reflex", "rules.yaml", lambda m: m.reflex, ({"when": "a"}, {"when": "b"})),
    ("guardrails/max_tokens_recoveries", "5", lambda m: m.max_tokens_recoveries, 5),
    ("guardrails/max_repeated_tool_steps", "7", lambda m: m.max_repeated_tool_steps, 7),
]
POLICY: list[tuple[str, str, Any, Any]] = [
    ("policy/unknown_price", "refuse", lambda r: r.unknown_price, "refuse"),
    ("policy/levels/SAFE/approval", "always", lambda r: r.rule("any", "SAFE").approval, "always"),
    ("policy/levels/SAFE/rate", "5/hour", lambda r: r.rule("any", "SAFE").rate, 5),
    ("policy/levels/SAFE/simulate", "always", lambda r: r.rule("any", "SAFE").simulate, "always"),
    ("policy/tools/*/approval", "always", lambda r: r.rule("deploy", "SAFE").approval, "always"),
    ("policy/tools/*/rate", "3/hour", lambda r: r.rule("deploy", "SAFE").rate, 3),
    ("policy/levels/SAFE/approvers", "2", lambda r: r.rule("any", "SAFE").approvers, 2),
    ("policy/tools/*/approvers", "2", lambda r: r.rule("deploy", "SAFE").approvers, 2),
    ("policy/tools/*/simulate", "asked", lambda r: r.rule("deploy", "SAFE").simulate, "asked"),
    ("policy/tools/*/level", "PRIVILEGED", lambda r: r.rule("deploy", "SAFE").level, "PRIVILEGED"),
    ("policy/tools/*/reads", "own", lambda r: read_declaration(r).reads, "own"),
    ("policy/tools/*/reach", "final", lambda r: read_declaration(r).reach, "final"),
    (
        "policy/tools/*/arguments",
        "{to: 'destination:host'}",
        lambda r: read_declaration(r).arguments["to"],
        ArgumentUse("destination", "host"),
    ),
    ("policy/tools/*/mints", "{mail: address}", lambda r: read_declaration(r).mints, {"mail": "address"}),
    ("policy/tools/*/lists", "{name: user}", lambda r: read_declaration(r).lists, {"name": "user"}),
    ("policy/tools/*/asks", "[roll out]", lambda r: read_declaration(r).asks, ("roll out",)),
    ("policy/provenance", "strict", lambda r: r.provenance, "strict"),
    ("policy/lock_after_denial", "false", lambda r: r.locks, False),
    ("policy/simulate", "asked", lambda r: r.rule("any", "RESTRICTED").simulate, "asked"),
    ("policy/disabled", "[deploy, shell]", lambda r: r.disabled, ("deploy", "shell")),
    ("policy/approval_expiry", "2h", lambda r: r.approval_expiry, 2 * HOUR),
]
GUARDRAILS: list[tuple[str, str, Any, Any]] = [
    ("guardrails/reserve_tokens", "100", lambda r: r.reserve_tokens, 100),
    ("guardrails/reserve_cost_fraction", "0.2", lambda r: r.reserve_cost_fraction, 0.2),
]
AGENT: list[tuple[str, str, Any, Any]] = [
    *((f"limits/{key}", *rest) for key, *rest in LIMITS),
    *POLICY,
    *GUARDRAILS,
    ("mode", "ASSIST", lambda r: r.mode, "ASSIST"),
    ("observe", "false", lambda r: r.observe, False),
    ("tools/files/root", "data", lambda r: r.tools.files, FilesSpec(root="data")),
    ("tools/http/hosts", "[API.example.com]", lambda r: r.allowed_hosts, ("api.example.com",)),
    ("tools/shell", "{root: .}", lambda r: r.tools.shell, ShellSpec(root=".", sandbox=True, network=False)),
    ("tools/shell/root", "work", lambda r: r.tools.shell.root, "work"),
    ("tools/own", "[look_up]", lambda r: r.tools.own, ("look_up",)),
    ("phases", "{look: [read], act: all}", lambda r: r.phases, (Phase("look", ("read",)), Phase("act", None))),
    ("phases", "work", lambda r: r.phases, (Phase("work", None),)),
    ("phases", "review", lambda r: r.phases, REVIEW_PHASES),
    ("phases/work", "[read, write]", lambda r: r.phases, (Phase("work", ("read", "write")),)),
    ("allowed_models", "[anthropic/claude]", lambda r: r.allowed_models, ("anthropic:claude",)),
    ("secrets", "[API_KEY]", lambda r: r.secrets, ("API_KEY",)),
]
FLEET: list[tuple[str, str, Any, Any]] = [
    *((f"agents/limits/{key}", *rest) for key, *rest in LIMITS),
    *POLICY,
    ("zone", "Europe/Berlin", lambda r: r.caps.zone, "Europe/Berlin"),
    ("mode", "FULL", lambda r: r.mode, "FULL"),
    ("observe", "true", lambda r: r.observe, True),
    ("limits/max_cost_usd_per_day", "50", lambda r: caps(r, "fleet", "day"), 50_000_000),
    ("limits/max_cost_usd_per_month", "300", lambda r: caps(r, "fleet", "month"), 300_000_000),
    ("allowed_models", "['anthropic:*']", lambda r: r.allows_model("openai:gpt"), False),
    ("allowed_hosts", "['*.example.com']", lambda r: r.allowed_hosts, ("*.example.com",)),
    ("models/*/price", "free", lambda r: r.prices, {"mine:deploy": FREE_PRICE}),
    ("models/*/price/input", "3", None, None),
    ("models/*/price/output", "15", None, None),
    ("models/*/price/cache_read", "0.3", None, None),
    ("models/*/price/cache_write", "3.75", None, None),
    ("models/*/price/cache_write_1h", "6", None, None),
    ("models/*/price/web_searches", "10", None, None),
    ("models/*/price/audio", "4", None, None),
    ("models/*/price/code_executions", "5", None, None),
]

FLEET_MIND: list[tuple[str, str, Any, Any]] = [
    *((f"agents/limits/{key}", *rest) for key, *rest in MIND_LIMITS),
    *PROVIDER,
    ("rates/*/requests_per_minute", "50", lambda m: m.rates, {"mine:deploy": RateLimit(requests=50)}),
    ("rates/*/tokens_per_minute", "40000", lambda m: m.rates, {"mine:deploy": RateLimit(tokens=40_000)}),
]


def fill_in_stars(path: str) -> str:
    return re.sub(r"^(models|rates)/\*", r"\1/mine:deploy", path).replace("/*", "/deploy")


@pytest.mark.parametrize(("path", "written", "look", "expected"), AGENT)
def test_each_key_of_an_agent_ends_in_what_is_resolved(path: str, written: str, look: Any, expected: Any) -> None:
    assert look(resolve_policy(FleetConfig(), agent(write_nested_key(fill_in_stars(path), written)))) == expected


@pytest.mark.parametrize(("path", "written", "look", "expected"), [case for case in FLEET if case[2]])
def test_each_key_of_the_fleet_ends_in_what_is_resolved(path: str, written: str, look: Any, expected: Any) -> None:
    assert look(resolve_policy(fleet(write_nested_key(fill_in_stars(path), written)), agent())) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "replies.yaml").write_text("- text: Hello.\n")
    (tmp_path / "rules.yaml").write_text("- when: a\n- when: b\n")
    return tmp_path


@pytest.mark.parametrize(("path", "written", "look", "expected"), MIND)
def test_each_model_setting_of_an_agent_ends_in_what_is_resolved(
    path: str, written: str, look: Any, expected: Any, folder: Path
) -> None:
    mind = resolve_agent(FleetConfig(), agent(write_nested_key(fill_in_stars(path), written)), folder).model_settings
    assert look(mind) == expected
    assert mind != BrainSpec()


@pytest.mark.parametrize(("path", "written", "look", "expected"), FLEET_MIND)
def test_each_model_setting_of_the_fleet_ends_in_what_is_resolved(
    path: str, written: str, look: Any, expected: Any, folder: Path
) -> None:
    mind = resolve_agent(fleet(write_nested_key(fill_in_stars(path), written)), agent(), folder).model_settings
    assert look(mind) == expected
    assert mind != BrainSpec()


@pytest.mark.parametrize(("path", "written"), [case[:2] for case in MIND])
def test_no_model_setting_changes_the_policy(path: str, written: str) -> None:
    thinking = resolve_policy(FleetConfig(), agent(write_nested_key(fill_in_stars(path), written)))
    assert thinking.digest() == resolve_policy(FleetConfig(), agent()).digest()


def test_fallback_models_are_read(folder: Path) -> None:
    mind = resolve_agent(
        FleetConfig(), agent("model: openai:a\nfallback_models: [anthropic/b, ollama:c:7b]\n"), folder
    ).model_settings
    assert mind.fallback_models == ("anthropic:b", "ollama:c:7b")


def test_a_provider_of_the_fleet_and_of_the_agent_are_put_together(folder: Path) -> None:
    ours = "providers:\n  house: {base_url: 'https://llm.example/v1', wire: anthropic}\n"
    theirs = "model: house:big\nproviders:\n  house:\n    api_key: ${secret:HOUSE}\n"
    mind = resolve_agent(fleet(ours), agent(theirs), folder).model_settings
    house = Provider(wire="anthropic", base_url="https://llm.example/v1", api_key="${secret:HOUSE}")
    assert mind.providers == {"house": house}


def test_model_settings_that_are_not_written_have_their_defaults(folder: Path) -> None:
    mind = resolve_agent(FleetConfig(), agent(), folder).model_settings
    assert mind == BrainSpec()
    assert (mind.max_retries, mind.max_output_tokens, mind.context_window, mind.streaming) == (3, 4096, 0, None)
    assert (mind.max_tokens_recoveries, mind.max_repeated_tool_steps, mind.context_strategy) == (2, 3, "compact")


def test_the_price_of_a_model_is_read() -> None:
    cached = "cache_read: 0.3, cache_write: 3.75, cache_write_1h: 6, web_searches: 10, audio: 4, code_executions: 5"
    text = f"models: {{mine/big: {{price: {{input: 3, output: 15, {cached}}}}}}}\n"
    figures = (3, 15, "0.3", "3.75", 6, 10, 4, 5)
    price = Price(*map(Decimal, figures))
    assert resolve_policy(fleet(text), agent()).prices == {"mine:big": price}


def test_the_rates_of_a_model_and_of_a_whole_provider_are_read_together(folder: Path) -> None:
    text = "rates:\n  anthropic/claude: {requests_per_minute: 50, tokens_per_minute: 40000}\n"
    mind = resolve_agent(fleet(text + "  anthropic:*: {requests_per_minute: 80}\n"), agent(), folder).model_settings
    assert mind.rates == {"anthropic:claude": RateLimit(50, 40_000), "anthropic:*": RateLimit(80)}


def test_another_rate_of_a_model_voids_no_approval() -> None:
    rated = resolve_policy(fleet("rates: {'a:b': {requests_per_minute: 1}}\n"), agent())
    assert rated.digest() == resolve_policy(FleetConfig(), agent()).digest()


def test_retention_is_read() -> None:
    assert fleet("retention: 90d\n").spec.retention == 90 * DAY
    assert fleet("retention: none\n").spec.retention is None


def test_what_the_fleet_allows_a_shell_to_do_is_read() -> None:
    text = "tools: {shell: {root: ., sandbox: false, network: true}}\n"
    resolved_policy = resolve_policy(fleet("shell: {sandbox: false, network: true}\n"), agent(text))
    assert resolved_policy.tools.shell == ShellSpec(root=".", sandbox=False, network=True)


def test_the_secrets_that_the_fleet_allows_are_read() -> None:
    with pytest.raises(ConfigError, match=r"allows only `B` \(`allowed_secrets`\)"):
        resolve_policy(fleet("allowed_secrets: [B]\n"), agent("secrets: [A]\n"))


def test_the_name_is_read() -> None:
    assert resolve_policy(FleetConfig(), agent()).name == "night-watch"


ELSEWHERE = {
    "name",
    "tools/shell/sandbox",
    "tools/shell/network",
    "shell/sandbox",
    "shell/network",
    "allowed_secrets",
    "retention",
    "fallback_models",
    "agents",
    "prices/update",
    "prices/url",
    "policy/quiet_hours/start",
    "policy/quiet_hours/end",
    "policy/quiet_hours/timezone",
}
"""Keys with a test of their own above."""


def test_how_calls_pass_the_gateway_is_read() -> None:
    assert agent().spec.gateway == GatewaySpec(wait=50_000_000, timeout=10 * MINUTE)
    gateway_spec = agent(
        "gateway:\n  wait: 2m\n  timeout: 1h\n  dashboard: https://halter.example\n"
        "  trust_client_elicitation: true\n  sampling: true\n  prices: {mail__send: 0.02}\n"
    ).spec.gateway
    assert (gateway_spec.wait, gateway_spec.timeout, gateway_spec.dashboard) == (
        2 * MINUTE,
        HOUR,
        "https://halter.example",
    )
    assert (gateway_spec.trust_client_elicitation, gateway_spec.sampling, gateway_spec.prices) == (
        True,
        True,
        {"mail__send": 20_000},
    )


def test_how_prices_are_updated_is_read() -> None:
    assert fleet("").spec.prices == PricesSpec()
    text = "prices: {update: daily, url: https://prices.example/table.json}\n"
    assert fleet(text).spec.prices == PricesSpec("daily", "https://prices.example/table.json")


def test_how_decisions_reach_a_phone_is_read() -> None:
    assert fleet("").spec.channels == ChannelsSpec()
    channels_spec = fleet(
        "channels:\n  dashboard: https://halter.example\n"
        "  telegram: {token: '${secret:T}', url: 'http://127.0.0.1:8081'}\n"
    ).spec.channels
    assert channels_spec.dashboard == "https://halter.example"
    hours = fleet("channels: {quiet_hours: {start: '22:00', end: '06:00', timezone: Europe/Berlin}}\n").spec.channels
    assert hours.quiet_hours == QuietHours(start="22:00", end="06:00", timezone="Europe/Berlin")
    assert channels_spec.telegram == TelegramSpec(token="${secret:T}", url="http://127.0.0.1:8081")
    assert fleet("channels: {ntfy: {}}\n").spec.channels.ntfy == NtfySpec(url="https://ntfy.sh")
    channels_spec = fleet("channels: {ntfy: {url: 'http://127.0.0.1:8082', token: '${secret:N}'}}\n").spec.channels
    assert channels_spec.ntfy == NtfySpec(url="http://127.0.0.1:8082", token="${secret:N}")
    channels_spec = fleet(
        "channels: {slack: {token: '${secret:B}', app_token: '${secret:A}', url: 'http://127.0.0.1:1'}}\n"
    )
    expected = SlackSpec(token="${secret:B}", app_token="${secret:A}", url="http://127.0.0.1:1")
    assert channels_spec.spec.channels.slack == expected
    with pytest.raises(ConfigError, match=r"must be a reference"):
        fleet("channels: {telegram: {token: '123456:in-plain-text'}}\n")


def test_whom_an_agent_can_ask_is_read() -> None:
    agent_file = agent(
        "agents:\n- {name: scout, description: Reads., max_cost_usd: 0.1, hand_off: true}\n- {name: clerk}\n"
    )
    agent_tool, hands_over = make_agent_tools(agent_file.spec.agents)[::-1]
    assert (agent_tool.agent, agent_tool.max_cost, agent_tool.hands_off, agent_tool.spec.name) == (
        "clerk",
        None,
        False,
        "ask_clerk",
    )
    assert (hands_over.max_cost, hands_over.hands_off) == (100_000, True)
    assert hands_over.spec.description == (
        "Hand the conversation over to the agent scout. Reads. Its answer ends your turn."
    )


def test_who_signs_on_by_a_proxy_is_read() -> None:
    text = (
        "sign_on:\n  secret: ${secret:P}\n  proxies: [10.0.0.7, 10.1.0.0/16]\n  roles: {ops: operator}\n"
        "  people: {'ada@example.com': ada}\n"
        "  user_header: X-User\n  groups_header: X-Groups\n  lifetime: 2h\n"
    )
    outcome = fleet(text).spec.sign_on
    assert outcome == SignOnSpec(
        proxies=("10.0.0.7", "10.1.0.0/16"),
        secret="${secret:P}",
        roles={"ops": "operator"},
        people={"ada@example.com": "ada"},
        user_header="X-User",
        groups_header="X-Groups",
        lifetime=2 * HOUR,
    )
    with pytest.raises(
        ConfigError, match=r"is not an address or a network; write one, as in 10\.0\.0\.7 or 10\.0\.0\.0/8"
    ):
        fleet("sign_on: {secret: '${secret:P}', proxies: [proxy.example], roles: {ops: operator}}\n")
    with pytest.raises(ConfigError, match="so no one could sign on; add an entry"):
        fleet("sign_on: {secret: '${secret:P}', proxies: [], roles: {ops: operator}}\n")


def test_who_signs_on_by_a_provider_is_read() -> None:
    text = (
        "sign_on:\n  roles: {ops: operator}\n  agents: {ops: [desk]}\n  lifetime: 30m\n"
        "  people: {'https://id.example#7': ada}\n"
        "  oidc:\n    issuer: https://id.example\n    client_id: halter\n    client_secret: ${secret:P}\n"
        "    url: https://halter.example\n    scopes: [groups]\n    groups_claim: roles\n"
    )
    assert fleet(text).spec.sign_on == SignOnSpec(
        roles={"ops": "operator"},
        agents={"ops": ("desk",)},
        people={"https://id.example#7": "ada"},
        lifetime=30 * MINUTE,
        oidc=OidcSpec(
            issuer="https://id.example",
            client_id="halter",
            url="https://halter.example",
            client_secret="${secret:P}",
            scopes=("groups",),
            groups_claim="roles",
        ),
    )
    for wrong, sentence in (
        (text.replace("issuer: https:", "issuer: http:"), r"`sign_on\.oidc\.issuer` is not encrypted"),
        (text.replace("url: https:", "url: http:"), r"`sign_on\.oidc\.url` is not encrypted"),
        (text.replace("agents: {ops", "agents: {leads"), "the group must have a role in `roles`"),
        (text.replace("[desk]", "[]"), "must name at least one agent"),
        ("sign_on: {roles: {ops: operator}}\n", "so no one could sign on; add an entry"),
        (
            "sign_on: {roles: {ops: operator}, proxies: [10.0.0.7]}\n",
            r"`sign_on\.proxies` requires `sign_on\.secret` to",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            fleet(wrong)
    fleet(text.replace("https://id.example\n", "http://127.0.0.1:9000\n"))


GATED = ("gateway", "channels", "sign_on")
"""Keys with the tests above."""
PACED = ("autonomy", "hot_state", "sensors")
"""Keys with tests in `test_config_pacing`, where every key below them has one."""
TASKS = (
    "heartbeat",
    "schedules",
    "watches",
    "webhooks",
    "collections",
    "verbs",
    "review",
    "notify",
    "anonymize",
    "idle_halt_minutes",
    "concurrency",
)
"""Keys with tests in `test_config_tasks`, where every key below them has one."""


def keys(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """List every key that a schema knows; free keys are written as a star."""
    below = dict(schema.get("properties", {}))
    if isinstance(free := schema.get("additionalProperties"), dict) and "properties" in free:
        below["*"] = free
    for member in schema.get("anyOf", ()):
        yield from keys(member, path)
    for key, result in below.items():
        deeper = list(keys(result, (*path, key)))
        yield from deeper or ["/".join((*path, key))]
        if result.get("anyOf") and deeper:
            yield "/".join((*path, key))


def generic(path: str) -> str:
    free = path.replace("levels/SAFE", "levels/*").replace("provider_tools/web_search", "provider_tools/*")
    return re.sub("^providers/[a-z]+/", "providers/*/", free)


@pytest.mark.parametrize(
    ("schema", "cases"),
    [(agent_schema(), AGENT + MIND), (fleet_schema(), FLEET + FLEET_MIND)],
    ids=["agent.yaml", "halter.yaml"],
)
def test_no_key_is_without_a_test_that_shows_its_reader(schema: dict[str, Any], cases: list[Any]) -> None:
    tested = {generic(path) for path, *_ in cases} | ELSEWHERE
    texts = {key for key in keys(schema) if key.split("/")[0] not in PACED + TASKS + GATED}
    assert "policy/tools/*/rate" in texts
    assert texts - tested == set()


def test_the_quiet_hours_of_fleet_and_agent_are_read_with_the_zone_of_the_fleet() -> None:
    written = "policy: {quiet_hours: {start: '22:00', end: '06:30'%s}}\n"
    fleet_config = fleet("zone: Europe/Berlin\n" + written % "")
    hours = resolve_policy(fleet_config, agent(written % ", timezone: Asia/Tokyo")).question_terms.quiet_hours
    assert [(each.start, each.end, each.timezone) for each in hours] == [
        ("22:00", "06:30", "Europe/Berlin"),
        ("22:00", "06:30", "Asia/Tokyo"),
    ]


def test_the_defaults_are_those_that_are_documented() -> None:
    resolved_policy = resolve_policy(FleetConfig(), agent())
    assert resolved_policy.caps.session == Cap(1_000_000)
    assert resolved_policy.caps.agent == (Cap(5_000_000, "day"),)
    assert resolved_policy.caps.fleet == (Cap(20_000_000, "day"),)
    assert (resolved_policy.caps.token_budget, resolved_policy.caps.zone) == (None, "UTC")
    assert (resolved_policy.mode, resolved_policy.observe, resolved_policy.on_cap) == ("SEMI", False, "wrap_up")
    assert (resolved_policy.max_steps, resolved_policy.timeout, resolved_policy.approval_expiry) == (
        50,
        HOUR,
        24 * HOUR,
    )
    assert (
        resolved_policy.min_output_tokens,
        resolved_policy.reserve_tokens,
        resolved_policy.reserve_cost_fraction,
    ) == (256, 512, 0.1)
    assert resolved_policy.phases == (Phase("work", None),)
    assert (resolved_policy.allowed_models, resolved_policy.allowed_hosts, resolved_policy.secrets) == (None, None, ())
    assert resolved_policy.rule("any", "PRIVILEGED").rate == 20
    assert resolved_policy.rule("any", "RESTRICTED").rate is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "limits:\n  max_cost_us: 1\n",
            "agent.yaml line 3: `max_cost_us` is not a key of `limits`; did you mean `max_cost_usd`?",
        ),
        ("limit: {}\n", "agent.yaml line 2: `limit` is not a key of agent.yaml; did you mean `limits`?"),
        ("zzz: 1\n", "agent.yaml line 2: `zzz` is not a key of agent.yaml; its keys are `name`, `mode`,"),
        ("limits:\n  max_steps: ten\n", "agent.yaml line 3: `limits.max_steps` is the text 'ten', but must be a whole"),
        (
            "limits:\n  max_steps: 0\n",
            "agent.yaml line 3: `limits.max_steps` is the number 0, but must be a whole numb",
        ),
        ("limits:\n  max_steps: true\n", "agent.yaml line 3: `limits.max_steps` is true, but must be a whole number"),
        (
            "limits:\n  max_cost_usd:\n",
            "agent.yaml line 3: `limits.max_cost_usd` is empty, but must be a number of dol",
        ),
        ("limits:\n  max_cost_usd: -1\n", "agent.yaml line 3: `limits.max_cost_usd` is the number -1, but must be a"),
        ("limits:\n  max_cost_usd: 1e300\n", "agent.yaml line 3: `limits.max_cost_usd` is the number 1e+300, but must"),
        ("limits:\n  max_cost_usd: $1\n", "agent.yaml line 3: `limits.max_cost_usd` is the text '$1', but must be a n"),
        ("limits:\n  max_cost_usd: 1\n  cost_limit: 1\n", "agent.yaml line 4: `cost_limit` and `max_cost_usd` are two"),
        (
            "limits:\n  timeout: soon\n",
            "agent.yaml line 3: `limits.timeout` is the text 'soon', but must be a duration",
        ),
        ("limits:\n  timeout: -5\n", "agent.yaml line 3: `limits.timeout` is the number -5, but must be a duration"),
        (
            "limits:\n  on_cap: halt\n",
            "agent.yaml line 3: `limits.on_cap` is the text 'halt', which is not one of its values; they are `ask`,",
        ),
        ("limits: [1]\n", "agent.yaml line 2: `limits` is a list, but must be a mapping"),
        ("limits:\n", "agent.yaml line 2: `limits` is empty, but must be a mapping"),
        (
            "mode: FULLL\n",
            "agent.yaml line 2: `mode` is the text 'FULLL', which is not one of its values; did you mean `FULL`?",
        ),
        ("observe: yes\n", "agent.yaml line 2: `observe` is the text 'yes', but must be true or false."),
        (
            "policy:\n  levels:\n    SAVE: {}\n",
            "agent.yaml line 4: `SAVE` is not a key of `policy.levels`; did you mean",
        ),
        (
            "policy:\n  levels:\n    SAFE: {level: SAFE}\n",
            "agent.yaml line 4: `level` is not a key of `policy.levels.S",
        ),
        (
            "policy:\n  tools:\n    a: {rate: 1/hour}\n    b:\n      rate: 20/day\n",
            "agent.yaml line 6: `policy.tools.b.rate` is the text '20/day', but must be a rate, as in 20/hour, or",
        ),
        (
            "policy:\n  disabled: shell\n",
            "agent.yaml line 3: `policy.disabled` is the text 'shell', but must be a list",
        ),
        (
            "policy:\n  disabled:\n  - a\n  - 3\n",
            "agent.yaml line 5: `policy.disabled[2]` is the number 3, but must be",
        ),
        ("tools:\n  files: {}\n", "agent.yaml line 3: `root` is missing from `tools.files`; write it."),
        ("tools:\n  http:\n    hosts: ['a/b']\n", "agent.yaml line 4: `tools.http.hosts[1]` is the text 'a/b', but mu"),
        (
            "tools:\n  http:\n    hosts: ['a*']\n",
            "agent.yaml line 4: `tools.http.hosts[1]` is the text 'a*', but must be",
        ),
        ("phases: {}\n", "agent.yaml line 2: `phases` is empty, but must be a mapping with at least one key."),
        (
            "phases: revew\n",
            "agent.yaml line 2: `phases` is the text 'revew', which is not one of its values; did you mean `review`?",
        ),
        ("phases: 5\n", "agent.yaml line 2: `phases` is the number 5, but must be a mapping"),
        (
            "phases: {work: some}\n",
            "agent.yaml line 2: `phases.work` is the text 'some', which is not one of its values; they are `all`.",
        ),
        ("allowed_models: [claude]\n", "agent.yaml line 2: `allowed_models[1]` is the text 'claude', but must be a mo"),
        ("allowed_models: ['a*b:c']\n", "agent.yaml line 2: `allowed_models[1]` is the text 'a*b:c', but must be"),
        ("secrets: ['${secret:A}']\n", "agent.yaml line 2: `secrets[1]` is the text '${secret:A}', but must be the na"),
    ],
)
def test_a_wrong_key_or_type_is_a_sentence_with_file_line_key_and_fix(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        agent(text)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("zone: Mars/Base\n", "halter.yaml line 1: `zone` is the text 'Mars/Base', but must be a time zone"),
        ("zone: [UTC]\n", "halter.yaml line 1: `zone` is a list, but must be a time zone"),
        ("models:\n  a:*: {price: free}\n", "halter.yaml line 2: `a:*` is a pattern; name each model with its price."),
        (
            "rates:\n  a:b: {}\n",
            "halter.yaml line 2: `rates.a:b` limits nothing; write `requests_per_minute`, `tokens_per_minute` or both.",
        ),
        (
            "rates:\n  a:b*: {requests_per_minute: 1}\n",
            (
                "halter.yaml line 2: `rates.a:b*` is not a model; name one model, or all models of a provider, "
                "as in anthropic:*."
            ),
        ),
        (
            "rates:\n  '*': {requests_per_minute: 1}\n",
            "halter.yaml line 2: `rates.*` is not a model; name one model, or all models of a provider, as in",
        ),
        (
            "rates:\n  claude: {requests_per_minute: 1}\n",
            "halter.yaml line 2: `rates.claude` is the text 'claude', but must be a model, as in",
        ),
        (
            "rates:\n  a:b:\n    requests_per_minute: 0\n",
            "halter.yaml line 3: `rates.a:b.requests_per_minute` is the number 0, but must be a whole number from 1",
        ),
        (
            "rates:\n  a:b: {tokens_per_minute: 40k}\n",
            "halter.yaml line 2: `rates.a:b.tokens_per_minute` is the text '40k', but must be a whole number from 1",
        ),
        (
            "rates:\n  a:b: {requests_per_minute: 1.5}\n",
            "halter.yaml line 2: `rates.a:b.requests_per_minute` is the number 1.5, but must be a whole number from 1",
        ),
        (
            "rates:\n  a:b: {requests_per_second: 1}\n",
            "halter.yaml line 2: `requests_per_second` is not a key of `rates.a:b`; did you mean `requests_per_minute`",
        ),
        ("rates:\n  a:b: 50\n", "halter.yaml line 2: `rates.a:b` is the number 50, but must be a mapping"),
        (
            "models:\n  a:b: {price: cheap}\n",
            "halter.yaml line 2: `models.a:b.price` is the text 'cheap', which is not one of its values; they are",
        ),
        ("models:\n  a:b:\n    price: {input: 1}\n", "halter.yaml line 3: `output` is missing from `models.a:b.price`"),
        (
            "models:\n  a:b:\n    price: {input: -1, output: 1}\n",
            "halter.yaml line 3: A price must be a number of dollars",
        ),
        ("models:\n  a:b: {}\n", "halter.yaml line 2: `price` is missing from `models.a:b`; write it."),
        ("hello\n", "halter.yaml line 1: the file is the text 'hello', but must be a mapping"),
        ("- a\n", "halter.yaml line 1: the file is a list, but must be a mapping"),
    ],
)
def test_a_wrong_fleet_is_a_sentence_too(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fleet(text)
    assert str(refused.value).startswith(sentence)


def test_an_agent_without_a_name_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"agent\.yaml line 1: `name` is missing from agent\.yaml; write it\."):
        parse_agent(load_bytes(b"mode: SEMI\n", "agent.yaml"))


def test_a_sentence_cannot_steer_the_terminal_that_shows_it() -> None:
    with pytest.raises(ConfigError) as refused:
        agent('"\\e[31m' + "k" * 1000 + '": 1\n')
    assert str(refused.value).startswith("agent.yaml line 2: `\\x1b[31mkkk")
    assert len(str(refused.value)) < 1100


def test_an_agent_is_read_from_its_folder_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("name: night-watch\n")
    assert read_agent(tmp_path, "agent.yaml") == read_agent(tmp_path / "agent.yaml", "agent.yaml") == agent()


def test_a_fleet_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "halter.yaml").write_text("mode: ASSIST\n")
    assert read_fleet(tmp_path / "halter.yaml", "halter.yaml") == fleet("mode: ASSIST\n")


def test_files_are_named_as_they_were_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_agent(tmp_path)
    assert str(refused.value) == f"{tmp_path}/agent.yaml does not exist. Create it, or name another file."


def sensor(kind: str, source: str) -> str:
    """Write a sensor whose type is in line 4 of its file, and whose source begins in line 6."""
    return f"sensors:\n- name: feed\n  type: {kind}\n  source:\n    {source}\n"


def cash_field(keys: str) -> str:
    """Write a field of the hot state whose keys begin in line 5 of their file."""
    return f"hot_state:\n  fields:\n    cash:\n      {keys}\n"


@pytest.mark.parametrize(
    ("former_text", "present_text", "sentence"),
    [
        (
            sensor("poll", "tool: look\n    params: {of: [AAPL]}"),
            sensor("poll", "tool: look\n    arguments: {of: [AAPL]}"),
            "agent.yaml line 7: `params` is now called `arguments`.",
        ),
        (
            cash_field("refresh_tool: look\n      refresh_params: {of: [1]}"),
            cash_field("refresh_tool: look\n      refresh_arguments: {of: [1]}"),
            "agent.yaml line 6: `refresh_params` is now called `refresh_arguments`.",
        ),
        (
            sensor("watch", "path: inbox"),
            sensor("files", "path: inbox"),
            "agent.yaml line 4: `type: watch` is now written `type: files`.",
        ),
        (
            "limits: {max_steps: 5}\nguardrails:\n  reserve_tokens: 100\n  max_repeated_tool_steps: 7\n",
            "limits: {max_steps: 5, reserve_tokens: 100, max_repeated_tool_steps: 7}\n",
            "agent.yaml line 3: `guardrails` is now called `limits`.",
        ),
    ],
)
def test_a_former_name_means_the_present_one_and_is_listed(
    former_text: str, present_text: str, sentence: str, folder: Path
) -> None:
    former, present = agent(former_text), agent(present_text)
    former_agent, present_agent, plain_agent = (
        resolve_agent(FleetConfig(), file, folder) for file in (former, present, agent())
    )
    assert former_agent.policy.digest() == present_agent.policy.digest()
    assert former_agent.model_settings == present_agent.model_settings
    assert former_agent.pacing == present_agent.pacing
    assert (former_agent.policy, former_agent.pacing) != (plain_agent.policy, plain_agent.pacing)
    assert former.source_map.former_names == [sentence]
    assert present.source_map.former_names == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            sensor("poll", "tool: look\n    params:\n      of: 1\n      key: ${secret:A}"),
            "agent.yaml line 9: `sensors[1].source.arguments.key` names the secret `A`, which is not in the agent's",
        ),
        (
            sensor("poll", "tool: look\n    params: 5"),
            "agent.yaml line 7: `sensors[1].source.params` is the number 5, but",
        ),
        (
            cash_field("type: any\n      refresh_params: {of: [1]}"),
            "agent.yaml line 6: `hot_state.fields.cash.refresh_arguments` needs a `refresh_tool`, which is missing;",
        ),
        (
            sensor("watch", "path: inbox\n    tool: look"),
            "agent.yaml line 7: `sensors[1].source.tool` does not apply to a sensor of type files, which needs a",
        ),
        (
            "limits: {max_steps: 5}\nguardrails:\n  max_tokens_recoveries: two\n",
            "agent.yaml line 4: `guardrails.max_tokens_recoveries` is the text 'two', but must be a whole number",
        ),
        (
            sensor("poll", "tool: look\n    arguments: {}\n    params: {}"),
            "agent.yaml line 8: `params` and `arguments` are two names of one key; keep one of them.",
        ),
        (
            cash_field("refresh_tool: look\n      refresh_params: {}\n      refresh_arguments: {}"),
            "agent.yaml line 7: `refresh_arguments` and `refresh_params` are two names of one key; keep one of them.",
        ),
        (
            "limits: {reserve_tokens: 100}\nguardrails:\n  reserve_tokens: 100\n",
            (
                "agent.yaml line 4: `guardrails.reserve_tokens` is already set in agent.yaml line 2 as "
                "`limits.reserve_tokens`; keep one of them."
            ),
        ),
    ],
)
def test_a_mistake_below_a_former_name_is_found_in_its_line(text: str, sentence: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_agent(FleetConfig(), agent(text), folder)
    assert str(refused.value).startswith(sentence)


def test_the_lines_of_a_former_name_are_found_under_the_present_one() -> None:
    source_map = agent("limits: {max_steps: 5}\nguardrails:\n  reserve_tokens: 100\n").source_map
    assert source_map.at(("limits", "reserve_tokens")) == "agent.yaml line 4"
    assert source_map.at(("limits", "max_steps")) == source_map.at(("limits",)) == "agent.yaml line 2"


def test_the_former_name_of_a_steps_arguments_means_the_present_one_and_is_listed() -> None:
    former = load_bytes(b"- call: get\n  with: {url: a}\n- call: put\n  with: {url: b}\n", "play.yaml")
    present = load_bytes(b"- call: get\n  arguments: {url: a}\n- call: put\n  arguments: {url: b}\n", "play.yaml")
    assert parse_playbook(former) == parse_playbook(present)
    assert former.source_map.former_names == [
        "play.yaml line 2: `with` is now called `arguments`.",
        "play.yaml line 4: `with` is now called `arguments`.",
    ]
    assert present.source_map.former_names == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "- call: get\n  with:\n    url: a\n    key: ${steps.b.text}\n",
            "play.yaml line 4: `${steps.b.text}` does not refer to an earlier step;",
        ),
        (
            "- call: get\n  with: 5\n",
            "play.yaml line 2: `arguments` is the number 5, but must be a mapping of arguments.",
        ),
        (
            "- call: get\n  arguments: {}\n  with: {}\n",
            "play.yaml line 3: `with` and `arguments` are two names of one key; keep one of them.",
        ),
    ],
)
def test_a_mistake_below_the_former_name_of_a_steps_arguments_is_found_in_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_playbook(load_bytes(text.encode(), "play.yaml"))
    assert str(refused.value).startswith(sentence)

"""How an agent paces itself: every key of `autonomy`, `hot_state` and `sensors` ends where somebody looks at it."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec import UNSET

from halter.config.agent_files import AgentFile, parse_agent
from halter.config.decode import agent_schema
from halter.config.definition import redact_definition
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import resolve_agent, resolve_policy
from halter.config.sections import compile_gate, compile_signals, list_unwritten_fields
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import ConfigError
from halter.spec.autonomy import Autonomy, Gate, HotField, Pacing
from halter.spec.sensors import Detector, FilesSensor, PollSensor, ToolSource, Update

TRADER = """\
name: trader
model: ollama:qwen3:30b
autonomy:
  enabled: true
  max_consecutive_turns: 50
  token_budget_per_hour: 100000
  max_actions_per_minute: 10
  idle_timeout: 600
  active_hours:
    start: "08:00"
    end: "23:00"
hot_state:
  fields:
    positions:
      type: object
      ttl: 30
      refresh_tool: get_positions
    cash:
      type: number
      ttl: 30
      refresh_tool: get_account_balance
    signals_log:
      type: array
      max_items: 20
sensors:
  - name: price_feed
    type: poll
    interval: 5
    source:
      tool: get_market_data
      arguments: {symbols: [AAPL, TSLA, SPY]}
    updates:
      - field: last_prices
      - field: indicators
    signals:
      - name: anomaly
        model: MODEL
        prompt: "How unusual are these prices, from 0 to 1?"
        threshold: 0.8
        notify: true
"""


def fleet(text: str = "") -> FleetConfig:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml")) if text else FleetConfig()


def agent(text: str = "") -> AgentFile:
    output = text if text.startswith("name:") else f"name: night-watch\n{text}"
    return parse_agent(load_bytes(output.encode(), "agent.yaml"))


def pacing(text: str = "", bound: str = "") -> Pacing:
    return resolve_agent(fleet(bound), agent(text), None).pacing


def read_refusal(text: str, bound: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        pacing(text, bound)
    return str(error.value)


def sensor(source: str = "{tool: look}", more: str = "", kind: str = "poll") -> str:
    """Write a sensor whose first line is the third of its file; what is more begins in the sixth."""
    return f"sensors:\n- name: feed\n  type: {kind}\n  source: {source}\n{more}"


def signal(text: str) -> str:
    return sensor(more=f"  signals:\n  - {{name: odd, {text}}}\n")


def field(text: str) -> str:
    return f"hot_state:\n  fields:\n    cash: {{{text}}}\n"


def first(found: Pacing) -> Any:
    return found.sensors[0].signals[0]


HOURS = "autonomy: {active_hours: {start: '22:00', end: '06:00'%s}}\n"
URL = "https://api.example.com/prices?day=today"
KEYS: list[tuple[str, str, Any, Any]] = [
    ("autonomy/enabled", "autonomy: {enabled: true}\n", lambda p: p.autonomy.enabled, True),
    ("autonomy/prompt", "autonomy: {prompt: Look around.}\n", lambda p: p.autonomy.prompt, "Look around."),
    ("autonomy/min_sleep", "autonomy: {min_sleep: 500ms}\n", lambda p: p.autonomy.min_sleep, SECOND // 2),
    ("autonomy/min_sleep", "autonomy: {min_sleep: 5}\n", lambda p: p.autonomy.min_sleep, 5 * SECOND),
    ("autonomy/max_sleep", "autonomy: {max_sleep: 2h}\n", lambda p: p.autonomy.max_sleep, 2 * HOUR),
    (
        "autonomy/max_consecutive_turns",
        "autonomy: {max_consecutive_turns: 3}\n",
        lambda p: p.autonomy.max_consecutive_turns,
        3,
    ),
    (
        "autonomy/token_budget_per_hour",
        "autonomy: {token_budget_per_hour: 0}\n",
        lambda p: p.autonomy.token_budget_per_hour,
        0,
    ),
    (
        "autonomy/max_actions_per_minute",
        "autonomy: {max_actions_per_minute: 4}\n",
        lambda p: p.autonomy.max_actions_per_minute,
        4,
    ),
    ("autonomy/idle_timeout", "autonomy: {idle_timeout: 20m}\n", lambda p: p.autonomy.idle_timeout, 20 * MINUTE),
    ("autonomy/idle_timeout", "autonomy: {idle_timeout: 600.5}\n", lambda p: p.autonomy.idle_timeout, 600_500_000),
    ("autonomy/idle_timeout", "autonomy: {idle_timeout: 0}\n", lambda p: p.autonomy.idle_timeout, 0),
    ("autonomy/active_hours/start", HOURS % "", lambda p: p.autonomy.active_hours.start, "22:00"),
    ("autonomy/active_hours/end", HOURS % "", lambda p: p.autonomy.active_hours.end, "06:00"),
    ("autonomy/active_hours/timezone", HOURS % "", lambda p: p.autonomy.active_hours.timezone, "UTC"),
    (
        "autonomy/active_hours/timezone",
        HOURS % ", timezone: Asia/Tokyo",
        lambda p: p.autonomy.active_hours.timezone,
        "Asia/Tokyo",
    ),
    ("autonomy/gate/on", "autonomy: {gate: {on: always}}\n", lambda p: p.autonomy.gate.on, "always"),
    (
        "autonomy/gate/expression",
        "autonomy: {gate: {expression: skips > 2}}\n",
        lambda p: p.autonomy.gate.expression,
        "skips > 2",
    ),
    (
        "autonomy/gate/model",
        "autonomy: {gate: {model: ollama/small}}\n",
        lambda p: p.autonomy.gate.model,
        "ollama:small",
    ),
    (
        "autonomy/gate/prompt",
        "autonomy: {gate: {model: 'a:b', prompt: Look.}}\nproviders: {a: {base_url: 'http://a'}}\n",
        lambda p: p.autonomy.gate.prompt,
        "Look.",
    ),
    ("autonomy/gate/max_skips", "autonomy: {gate: {max_skips: 12}}\n", lambda p: p.autonomy.gate.max_skips, 12),
    (
        "autonomy/precheck_model",
        "autonomy: {precheck_model: 'ollama:small'}\n",
        lambda p: p.autonomy.gate,
        Gate(model="ollama:small"),
    ),
    ("hot_state/fields/*/type", field("type: number"), lambda p: p.fields["cash"].type, "number"),
    ("hot_state/fields/*/ttl", field("ttl: 30"), lambda p: p.fields["cash"].ttl, 30 * SECOND),
    ("hot_state/fields/*/path", field("refresh_tool: look, path: a.b"), lambda p: p.fields["cash"].path, "a.b"),
    ("hot_state/fields/*/refresh_tool", field("refresh_tool: look"), lambda p: p.fields["cash"].refresh_tool, "look"),
    (
        "hot_state/fields/*/refresh_arguments",
        field("refresh_tool: look, refresh_arguments: {of: [1, {a: null}]}"),
        lambda p: p.fields["cash"].refresh_arguments,
        {"of": [1, {"a": None}]},
    ),
    (
        "hot_state/fields/*/refresh_params",
        field("refresh_tool: look, refresh_params: {of: [1, {a: null}]}"),
        lambda p: p.fields["cash"].refresh_arguments,
        {"of": [1, {"a": None}]},
    ),
    (
        "hot_state/fields/*/auto_refresh",
        field("refresh_tool: look, auto_refresh: true"),
        lambda p: p.fields["cash"].auto_refresh,
        True,
    ),
    ("hot_state/fields/*/max_items", field("type: array, max_items: 20"), lambda p: p.fields["cash"].max_items, 20),
    (
        "hot_state/fields/*/description",
        field("description: In dollars."),
        lambda p: p.fields["cash"].description,
        "In dollars.",
    ),
    ("sensors/name", sensor(), lambda p: p.sensors[0].name, "feed"),
    ("sensors/type", sensor("{path: inbox}", kind="files"), lambda p: type(p.sensors[0]), FilesSensor),
    ("sensors/source/tool", sensor(), lambda p: p.sensors[0].source, ToolSource(tool="look")),
    (
        "sensors/source/arguments",
        sensor("{tool: look, arguments: {of: [AAPL]}}"),
        lambda p: p.sensors[0].source.arguments,
        {"of": ["AAPL"]},
    ),
    (
        "sensors/source/params",
        sensor("{tool: look, params: {of: [AAPL]}}"),
        lambda p: p.sensors[0].source.arguments,
        {"of": ["AAPL"]},
    ),
    ("sensors/source/url", sensor(f"{{url: '{URL}'}}"), lambda p: p.sensors[0].source.url, URL),
    (
        "sensors/source/headers",
        sensor(f"{{url: '{URL}', headers: {{Accept: a/b}}}}"),
        lambda p: p.sensors[0].source.headers,
        {"Accept": "a/b"},
    ),
    (
        "sensors/source/format",
        sensor("{url: 'wss://a.example', format: websocket}", kind="stream"),
        lambda p: p.sensors[0].source.format,
        "websocket",
    ),
    ("sensors/source/path", sensor("{path: /var/log}", kind="files"), lambda p: p.sensors[0].source.path, "/var/log"),
    (
        "sensors/source/pattern",
        sensor("{path: logs, pattern: '*.log'}", kind="files"),
        lambda p: p.sensors[0].source.pattern,
        "*.log",
    ),
    ("sensors/interval", sensor(more="  interval: 5\n"), lambda p: p.sensors[0].interval, 5 * SECOND),
    ("sensors/jitter", sensor(more="  jitter: 0\n"), lambda p: p.sensors[0].jitter, 0),
    ("sensors/timeout", sensor(more="  timeout: 2s\n"), lambda p: p.sensors[0].timeout, 2 * SECOND),
    (
        "sensors/updates/field",
        sensor(more="  updates: [{field: cash}]\n"),
        lambda p: p.sensors[0].list_updates(),
        (Update(field="cash"),),
    ),
    (
        "sensors/updates/path",
        sensor(more="  updates: [{field: cash, path: 'a[0].b-c'}]\n"),
        lambda p: p.sensors[0].updates[0].path,
        "a[0].b-c",
    ),
    (
        "sensors/updates/append",
        field("type: array") + sensor(more="  updates: [{field: cash, append: true}]\n"),
        lambda p: p.sensors[0].updates[0].append,
        True,
    ),
    ("sensors/signals/name", signal("expression: value > 3"), lambda p: first(p).name, "odd"),
    ("sensors/signals/expression", signal("expression: value > 3"), lambda p: first(p).expression, "value > 3"),
    ("sensors/signals/model", signal("model: 'ollama:s', prompt: Odd?"), lambda p: first(p).model, "ollama:s"),
    ("sensors/signals/prompt", signal("model: 'ollama:s', prompt: Odd?"), lambda p: first(p).prompt, "Odd?"),
    (
        "sensors/signals/detector/path",
        signal("detector: {path: a.b}"),
        lambda p: first(p).detector,
        Detector(path="a.b"),
    ),
    (
        "sensors/signals/detector/half_life",
        signal("detector: {half_life: 7.5}"),
        lambda p: first(p).detector.half_life,
        7.5,
    ),
    ("sensors/signals/detector/warmup", signal("detector: {warmup: 9}"), lambda p: first(p).detector.warmup, 9),
    ("sensors/signals/threshold", signal("detector: {}, threshold: 6"), lambda p: first(p).threshold, 6.0),
    ("sensors/signals/cooldown", signal("detector: {}, cooldown: 0"), lambda p: first(p).cooldown, 0),
    ("sensors/signals/notify", signal("detector: {}, notify: true"), lambda p: first(p).notify, True),
    ("sensors/signals/filter", signal("detector: {}, filter: true"), lambda p: first(p).filter, True),
]


@pytest.mark.parametrize(("key", "text", "look", "expected"), KEYS, ids=[case[0] for case in KEYS])
def test_each_key_ends_in_how_the_agent_paces_itself(key: str, text: str, look: Any, expected: Any) -> None:
    found = pacing(text)
    assert look(found) == expected
    assert found != pacing(), key


@pytest.mark.parametrize(("key", "text"), [case[:2] for case in KEYS], ids=[case[0] for case in KEYS])
def test_no_key_touches_the_policy(key: str, text: str) -> None:
    assert resolve_policy(FleetConfig(), agent(text)).digest() == resolve_policy(FleetConfig(), agent()).digest(), key


@pytest.mark.parametrize(("key", "text"), [case[:2] for case in KEYS], ids=[case[0] for case in KEYS])
def test_what_is_read_is_right_for_the_schema_too(key: str, text: str) -> None:
    value = load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml").value
    assert list(Draft202012Validator(agent_schema()).iter_errors(value)) == [], key


def keys(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """List every key below one, items of lists and kinds included; free keys are written as a star."""
    kinds, items, free = schema.get("anyOf", ()), schema.get("items", {}), schema.get("additionalProperties")
    parts = (schema, *kinds, items, *items.get("anyOf", ()))
    below = [each for part in parts for each in part.get("properties", {}).items()]
    if isinstance(free, dict) and "properties" in free:
        below.append(("*", free))
    if len({"properties" in kind for kind in kinds}) > 1:
        yield path
    yield from dict.fromkeys(key for name, part in below for key in keys(part, f"{path}/{name}")) or [path]


def test_no_key_is_without_a_test_that_shows_its_reader() -> None:
    schema = agent_schema()["properties"]
    texts = [key for top in ("autonomy", "hot_state", "sensors") for key in keys(schema[top], top)]
    assert sorted(texts) == sorted({key for key, *_ in KEYS})


def test_an_agent_without_these_keys_is_not_autonomous() -> None:
    found = pacing()
    assert found == Pacing()
    assert list(found.names()) == ["message", "decision"]
    assert not found.autonomy.enabled
    assert found.autonomy.gate is UNSET


def test_the_defaults_are_those_that_are_documented() -> None:
    usual = Autonomy()
    assert (usual.min_sleep, usual.max_sleep, usual.idle_timeout) == (SECOND, DAY, 10 * MINUTE)
    assert (usual.max_consecutive_turns, usual.token_budget_per_hour, usual.max_actions_per_minute) == (50, 100_000, 10)
    sensor_spec = PollSensor(name="a", source=ToolSource(tool="look"))
    assert (sensor_spec.interval, sensor_spec.jitter, sensor_spec.timeout) == (MINUTE, 0.1, 30 * SECOND)
    assert Gate() == Gate(on="change", max_skips=0)


def test_the_hours_are_those_of_the_fleet_where_the_agent_names_no_zone() -> None:
    hours = pacing(HOURS % "", "zone: Europe/Berlin\n").autonomy.active_hours
    assert hours is not UNSET
    assert hours.timezone == "Europe/Berlin"


def test_the_other_name_of_the_gates_model_joins_the_gate_that_there_is() -> None:
    text = "autonomy:\n  precheck_model: ollama:small\n  gate: {on: always, prompt: Look.}\n"
    autonomy = pacing(text).autonomy
    assert autonomy.gate == Gate(on="always", prompt="Look.", model="ollama:small")
    assert autonomy.precheck_model is UNSET


def test_both_names_may_say_the_same() -> None:
    text = "autonomy: {precheck_model: 'ollama:small', gate: {model: 'ollama/small'}}\n"
    assert pacing(text).autonomy.gate == Gate(model="ollama:small")


def test_a_field_that_only_a_sensor_names_is_there_after_the_declared_ones() -> None:
    found = pacing(field("type: number") + sensor(more="  updates: [{field: last}, {field: cash, path: a}]\n"))
    assert found.fields == {"cash": HotField(type="number"), "last": HotField()}
    assert list(found.fields) == ["cash", "last"]


def test_a_sensor_without_updates_writes_the_field_of_its_own_name() -> None:
    assert pacing(sensor()).fields == {"feed": HotField()}
    declared = "hot_state: {fields: {feed: {type: object, ttl: 1m}}}\n"
    assert pacing(declared + sensor()).fields == {"feed": HotField(type="object", ttl=MINUTE)}


@pytest.mark.parametrize(
    ("updates", "paths"),
    [
        ("[{field: last_prices}, {field: indicators}]", ["last_prices", "indicators"]),
        ("[{field: 1st-price}, {field: b, path: deep.b}, {field: c}]", ["1st-price", "deep.b", "c"]),
        ("[{field: whole}]", [""]),
        ("[{field: whole}, {field: a, path: a}]", ["", "a"]),
        ("[{field: newest}, {field: log, append: true}]", ["", ""]),
        ("[{field: a}, {field: b}, {field: log, append: true}]", ["a", "b", ""]),
    ],
)
def test_several_updates_without_a_path_get_the_members_of_their_names(updates: str, paths: list[str]) -> None:
    fields = "hot_state: {fields: {log: {type: array}}}\n"
    (found,) = pacing(fields + sensor(more=f"  updates: {updates}\n")).sensors
    assert [update.path for update in found.list_updates()] == paths


def test_two_sensors_may_write_one_field() -> None:
    text = field("type: array") + "sensors:\n"
    for name in ("a", "b"):
        text += f"- {{name: {name}, type: poll, source: {{tool: t}}, updates: [{{field: cash, append: true}}]}}\n"
    assert list(pacing(text).fields) == ["cash"]


def test_the_file_of_a_trader_can_be_read() -> None:
    found = pacing(TRADER.replace("MODEL", "ollama:qwen3:1.7b"))
    assert found.autonomy.enabled
    assert found.autonomy.idle_timeout == 600 * SECOND
    assert list(found.fields) == ["positions", "cash", "signals_log", "last_prices", "indicators"]
    assert found.sensors[0].interval == 5 * SECOND
    assert list(found.models()) == ["ollama:qwen3:1.7b"]
    assert list(found.names())[5:] == ["price_feed", "anomaly", "message", "decision"]


def test_a_model_without_its_provider_is_a_sentence_with_examples() -> None:
    sentence = read_refusal(TRADER.replace("MODEL", "qwen3-1.7b"))
    assert sentence.startswith(
        "agent.yaml line 37: `sensors[1].signals[1].model` is the text 'qwen3-1.7b', but must be"
    )
    assert sentence.endswith("add the provider, as in openai:qwen3-1.7b or ollama:qwen3-1.7b.")


def test_a_field_that_nothing_writes_is_reported_and_no_mistake() -> None:
    (sentence,) = list_unwritten_fields(pacing(TRADER.replace("MODEL", "ollama:s")))
    assert sentence.startswith(
        "Nothing writes the field `signals_log`, so it is always shown as not yet loaded. Give it a"
    )
    assert list_unwritten_fields(pacing(sensor())) == ()


def test_expressions_are_compiled_for_those_who_run_them() -> None:
    found = pacing(
        "autonomy: {gate: {expression: \"'cash' in changed && hot.cash > before.cash\"}}\n"
        + signal("expression: value.price > 3")
    )
    gate = compile_gate(found)
    assert gate is not None
    context = {"hot": {"cash": 2}, "before": {"cash": 1}, "changed": ["cash"], "skips": 0}
    assert gate.holds(context)
    assert not gate.holds({**context, "changed": []})
    signals = compile_signals(found.sensors[0])
    assert list(signals) == ["odd"]
    assert signals["odd"].holds({"value": {"price": 4}, "hot": {}})
    assert compile_gate(pacing()) is None
    assert compile_signals(pacing(signal("detector: {}")).sensors[0]) == {}


@pytest.mark.parametrize(
    "text",
    [
        "value.contains('ERROR')",
        "size(value) > 3",
        "value.exists(each, each > 3)",
        "value > 100",
        "value - hot.last > 0.5",
        "value.items.exists(item, item.price > hot.limit)",
        "value ? 1 : 0",
        "value.text.startsWith('E')",
        "value == hot.last",
        "has(value.error)",
        "timestamp(value) > timestamp('2026-01-01T00:00:00Z')",
        "duration(value) > duration('5m')",
        "int(value) > 3",
    ],
)
def test_whatever_a_reading_may_be_an_expression_may_ask_for_it(text: str) -> None:
    assert first(pacing(signal(f'expression: "{text}"'))).expression == text


def test_a_reading_from_this_machine_needs_no_word_of_the_fleet() -> None:
    assert pacing(sensor("{url: 'http://127.0.0.1:8080/a'}")).sensors[0].source.url == "http://127.0.0.1:8080/a"


def test_the_hosts_of_the_fleet_bound_what_a_sensor_reads() -> None:
    bound = "allowed_hosts: ['*.example.com', '[::1]']\n"
    for url in ("https://api.example.com/a", "wss://feed.example.com", "http://[::1]:99/a"):
        kind = "stream" if url.startswith("ws") else "poll"
        assert pacing(sensor(f"{{url: '{url}'}}", kind=kind), bound).sensors[0].source.url == url
    sentence = read_refusal(sensor("{url: 'https://evil.example/a'}"), bound)
    assert sentence.startswith(
        "agent.yaml line 5: `sensors[1].source.url` is at `evil.example`, but halter.yaml line 1"
    )


def test_the_models_of_the_fleet_bound_those_of_the_gate_and_of_signals() -> None:
    bound = "allowed_models: ['anthropic:*']\n"
    for text, key in (
        ("autonomy: {gate: {model: 'ollama:s'}}\n", "autonomy.gate.model"),
        ("autonomy: {precheck_model: 'ollama:s'}\n", "autonomy.precheck_model"),
        (signal("model: 'ollama:s', prompt: Odd?"), "sensors[1].signals[1].model"),
    ):
        assert f"`{key}` is `ollama:s`, but halter.yaml line 1 allows only `anthropic:*`" in read_refusal(text, bound)


def test_a_secret_that_is_listed_may_stand_in_a_header() -> None:
    source = f"{{url: '{URL}', headers: {{Authorization: 'Bearer ${{secret:API}}'}}}}"
    assert (
        pacing("secrets: [API]\n" + sensor(source)).sensors[0].source.headers["Authorization"] == "Bearer ${secret:API}"
    )


def read_redacted_pacing(text: str) -> Mapping[str, Any]:
    return redact_definition(resolve_agent(FleetConfig(), agent(text), None))["pacing"]


def test_what_may_be_a_key_is_not_written_down() -> None:
    headers = "{Authorization: 'Bearer ${secret:API}', X-Key: made-up-key}"
    text = "secrets: [API]\n" + sensor(f"{{url: '{URL}', headers: {headers}}}")
    (sensor_spec,) = read_redacted_pacing(text)["sensors"]
    assert sensor_spec["source"]["headers"] == {"Authorization": "${secret:API}", "X-Key": "…"}
    assert sensor_spec["source"]["url"] == "https://api.example.com/prices?…"

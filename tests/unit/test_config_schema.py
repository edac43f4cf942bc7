"""The schemas that editors use say what the reader says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from halter.config.agent_files import parse_agent
from halter.config.decode import DIALECT, agent_schema, fleet_schema
from halter.config.merge import parse_fleet
from halter.config.yaml_reader import load_bytes, load_file
from halter.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for part in schema.values():
            yield from parts(part)
    if isinstance(schema, list):
        for part in schema:
            yield from parts(part)


@pytest.mark.parametrize("schema", [agent_schema(), fleet_schema()], ids=["agent.yaml", "halter.yaml"])
def test_no_mapping_takes_unknown_keys(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == DIALECT
    assert json.loads(json.dumps(schema)) == schema
    for fields in parts(schema):
        if isinstance(fields.get("properties"), dict) and fields.get("type") == "object":
            assert fields["additionalProperties"] is False


@pytest.mark.parametrize("schema", [agent_schema(), fleet_schema()], ids=["agent.yaml", "halter.yaml"])
def test_every_key_at_the_top_is_described(schema: dict[str, Any]) -> None:
    assert [key for key, result in schema["properties"].items() if not result.get("description")] == []


def test_a_cap_is_a_number_of_dollars_or_none() -> None:
    limits = agent_schema()["properties"]["limits"]["properties"]
    assert limits["max_cost_usd"]["anyOf"] == [{"type": "number", "minimum": 0}, {"const": "none"}]
    assert limits["cost_limit"] == {**limits["max_cost_usd"], "deprecated": True}


def test_what_is_required_and_what_is_bounded_is_said() -> None:
    schema = agent_schema()
    assert schema["required"] == ["name"]
    assert schema["properties"]["tools"]["properties"]["files"]["required"] == ["root"]
    assert schema["properties"]["limits"]["properties"]["max_steps"]["minimum"] == 1
    assert schema["properties"]["phases"]["anyOf"][0]["minProperties"] == 1
    assert min(schema["properties"]["policy"]["properties"]["levels"]["propertyNames"]["enum"]) == "CONTROLLED"


def test_a_price_is_free_or_figures() -> None:
    price = fleet_schema()["properties"]["models"]["additionalProperties"]["properties"]["price"]
    assert {"enum": ["free"]} in price["anyOf"]
    assert {"input", "output"} == set(next(result for result in price["anyOf"] if "required" in result)["required"])


def test_a_model_and_a_key_have_their_forms() -> None:
    keys = agent_schema()["properties"]
    assert keys["model_for"]["propertyNames"]["enum"]
    assert "pattern" in keys["model"]
    assert "pattern" in keys["providers"]["additionalProperties"]["properties"]["api_key"]
    assert keys["guardrails"]["properties"]["reserve_tokens"] == keys["limits"]["properties"]["reserve_tokens"]


@pytest.mark.parametrize("schema", [agent_schema(), fleet_schema()], ids=["agent.yaml", "halter.yaml"])
def test_the_schema_is_a_schema(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("agent.yaml")), ids=lambda file: file.parent.name)
def test_every_example_is_accepted_by_the_schema(file: Path) -> None:
    assert list(Draft202012Validator(agent_schema()).iter_errors(load_file(file).value)) == []


RIGHT = (
    "model: scripted",
    "model: reflex",
    "model: openai/gpt-5",
    "model: ollama:qwen3:8b",
    "fallback_models: [a:b, reflex]",
    "model_for: {summary: a:b}",
    "reflex: rules.yaml",
    "reflex: [{when: a, anything: [1, {b: c}]}]",
    "providers: {house: {base_url: 'https://llm.example/v1', api_key: '${secret:A.b-c}', wire: google}}",
    "temperature: 0",
    "temperature: 1.5",
    "limits: {context_window: 0}",
    "limits: {context_window: 1000, streaming: true, max_retries: 0}",
    "limits: {cost_limit: none}",
    "guardrails: {max_tokens_recoveries: 0}",
    "allowed_models: [reflex, 'openai:*', '*']",
)
WRONG = (
    "modell: a:b",
    "model: gpt",
    "model: 'a:*'",
    "model: [a:b]",
    "model: ''",
    "model: 5",
    "fallback_models: a:b",
    "fallback_models: [b]",
    "model_for: {summaries: a:b}",
    "model_for: {summary: b}",
    "providers: {house: {url: 'https://a'}}",
    "providers: {house: {base_url: a.example}}",
    "providers: {house: {base_url: 'https://a:b@c'}}",
    "providers: {house: {base_url: 'https://a?key=b'}}",
    "providers: {house: {base_url: 'https://a b'}}",
    "providers: {house: {api_key: sk-made-up}}",
    "providers: {house: {api_key: 'x${secret:A}'}}",
    "providers: {house: {wire: grpc}}",
    "providers: {'a b': {wire: openai}}",
    "providers: [a]",
    "instructions: 5",
    "tool_calls: none",
    "temperature: 2.1",
    "temperature: -1",
    "temperature: warm",
    "script: ''",
    "script: [a]",
    "reflex: 5",
    "reflex: [a]",
    "limits: {max_retries: -1}",
    "limits: {max_retries: 101}",
    "limits: {max_retries: 1.5}",
    "limits: {context_window: 999}",
    "limits: {context_window: 1e9}",
    "limits: {context_strategy: forget}",
    "limits: {streaming: 1}",
    "limits: {max_output_tokens: 0}",
    "limits: {max_repeated_tool_steps: 0}",
    "limits: {reserve_cost_fraction: 2}",
    "guardrails: {max_steps: 5}",
    "guardrails: {max_tokens_recoveries: two}",
    "mode: full",
    "phases: {}",
    "secrets: ['a b']",
    "name: a b",
    "autonomy: {enabled: yes}",
    "autonomy: {max_consecutive_turns: 0}",
    "autonomy: {active_hours: {start: '8:00', end: '23:00'}}",
    "autonomy: {active_hours: {start: '08:00'}}",
    "autonomy: {gate: {on: changes}}",
    "autonomy: {precheck_model: small}",
    "hot_state: {fields: {a: {type: list}}}",
    "hot_state: {fields: {'a b': {}}}",
    "hot_state: {fields: {a: {max_items: 0}}}",
    "sensors: {a: {}}",
    "sensors: [{name: a, type: poll}]",
    "sensors: [{name: a, type: pull, source: {tool: b}}]",
    "sensors: [{name: a, type: poll, source: {url: b.example}}]",
    "sensors: [{name: a, type: poll, source: {url: 'https://b:c@d'}}]",
    "sensors: [{name: a, type: poll, source: {tool: ''}}]",
    "sensors: [{name: a, type: poll, source: {tool: b, arguments: [c]}}]",
    "sensors: [{name: a, type: poll, source: {url: 'https://b', headers: {'c d': e}}}]",
    "sensors: [{name: a, type: poll, source: {tool: b}, jitter: 2}]",
    "sensors: [{name: a, type: poll, source: {tool: b}, updates: [{path: c}]}]",
    "sensors: [{name: a, type: poll, source: {tool: b}, updates: [{field: c, path: 'd['}]}]",
    "sensors: [{name: a, type: poll, source: {tool: b}, signals: [{name: c, detector: {warmup: 1}}]}]",
)


def document(text: str) -> Any:
    output = text if text.startswith("name:") else f"name: x\n{text}"
    return load_bytes(output.encode(), "agent.yaml")


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_right_is_right_for_the_schema_and_for_the_reader(text: str) -> None:
    assert Draft202012Validator(agent_schema()).is_valid(document(text).value)
    parse_agent(document(text))


@pytest.mark.parametrize("text", WRONG)
def test_what_the_schema_refuses_the_reader_refuses_too(text: str) -> None:
    assert not Draft202012Validator(agent_schema()).is_valid(document(text).value)
    with pytest.raises(ConfigError, match=r"^agent\.yaml line [12]: "):
        parse_agent(document(text))


@pytest.mark.parametrize(
    "text",
    [
        "providers: {house: {api_key: sk-made-up}}",
        "agents: {limits: {max_retries: -1}}",
        "agents: {limits: {context_window: 5}}",
        "models: {a: {price: cheap}}",
        "model: a:b",
    ],
)
def test_what_the_schema_of_the_fleet_refuses_its_reader_refuses_too(text: str) -> None:
    read = load_bytes(text.encode(), "halter.yaml")
    assert not Draft202012Validator(fleet_schema()).is_valid(read.value)
    with pytest.raises(ConfigError, match=r"^halter\.yaml line 1: "):
        parse_fleet(read)

"""The schemas that editors use say what the reader says."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from halter.config.schema import DIALECT, agent_schema, fleet_schema


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
    for part in parts(schema):
        if isinstance(part.get("properties"), dict) and part.get("type") == "object":
            assert part["additionalProperties"] is False


@pytest.mark.parametrize("schema", [agent_schema(), fleet_schema()], ids=["agent.yaml", "halter.yaml"])
def test_every_key_at_the_top_is_described(schema: dict[str, Any]) -> None:
    assert [key for key, part in schema["properties"].items() if not part.get("description")] == []


def test_a_cap_is_a_number_of_dollars_or_none() -> None:
    limits = agent_schema()["properties"]["limits"]["properties"]
    assert limits["max_cost_usd"]["anyOf"] == [{"type": "number", "minimum": 0}, {"const": "none"}]
    assert limits["cost_limit"] == limits["max_cost_usd"]


def test_what_is_required_and_what_is_bounded_is_said() -> None:
    schema = agent_schema()
    assert schema["required"] == ["name"]
    assert schema["properties"]["tools"]["properties"]["files"]["required"] == ["root"]
    assert schema["properties"]["limits"]["properties"]["max_steps"]["minimum"] == 1
    assert schema["properties"]["phases"]["minProperties"] == 1
    assert min(schema["properties"]["policy"]["properties"]["levels"]["propertyNames"]["enum"]) == "CONTROLLED"


def test_a_price_is_free_or_figures() -> None:
    price = fleet_schema()["properties"]["models"]["additionalProperties"]["properties"]["price"]
    assert {"enum": ["free"]} in price["anyOf"]
    assert {"input", "output"} == set(next(part for part in price["anyOf"] if "required" in part)["required"])

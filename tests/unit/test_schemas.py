"""Schemas that a stranger wrote are checked themselves, and never cost more than was agreed."""

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.tools import Invalid, Valid
from halter.tools.function_tool import SchemaChecker, UnusableSchema, compile_schema


def checker(properties: dict[str, Any], **more: Any) -> SchemaChecker:
    outcome = compile_schema({"type": "object", "properties": properties, **more})
    assert isinstance(outcome, SchemaChecker), outcome
    return outcome


def verdict(schema_checker: SchemaChecker, value: Any) -> str:
    match schema_checker.validate("tool", json.dumps(value).encode()):
        case Valid():
            return ""
        case Invalid(sentence):
            return sentence


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """Twice as much work with every level, in a schema that is short."""
    twice = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)}
    return {**twice, f"a{levels}": {"type": "integer"}}


def test_mistakes_are_described_with_their_path_and_without_the_values() -> None:
    schema_checker = checker({"n": {"type": "integer"}, "deep": {"items": {"enum": [1, 2]}}}, required=["n"])
    assert verdict(schema_checker, {"n": 1}) == ""
    text = verdict(schema_checker, {"n": "a private text", "deep": [1, 3]})
    assert text == 'Invalid arguments for tool. n: type is "integer"; deep.1: enum is [1, 2].'
    assert verdict(schema_checker, {}) == 'Invalid arguments for tool. required is ["n"].'


def test_unknown_arguments_are_named_and_many_mistakes_are_counted() -> None:
    schema_checker = checker({"a": {}}, additionalProperties=False)
    assert verdict(schema_checker, {"a": 1, "b": 2}).endswith("additionalProperties is false, but there is b.")
    many = checker({f"p{n}": {"type": "null"} for n in range(20)})
    assert verdict(many, {f"p{n}": n for n in range(20)}).endswith("; and 15 more.")


@pytest.mark.parametrize(
    "written", [b"{", b"[]", b"7", b'"x"', b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\\ud800"}', b"[" * 100_000, b"\xff"]
)
def test_what_is_no_object_of_json_does_not_fit(written: bytes) -> None:
    assert isinstance(checker({}).validate("tool", written), Invalid)


def test_no_arguments_are_an_empty_object_and_keys_have_one_order() -> None:
    assert checker({}).validate("tool", b" ") == Valid({}, b"{}")
    assert checker({}).validate("tool", b'{"b": 1, "a": "\xc3\xa9"}') == Valid(
        {"b": 1, "a": "é"}, '{"a":"é","b":1}'.encode()
    )


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ([], "does not describe an object"),
        (True, "does not describe an object"),
        ({}, "does not describe an object"),
        ({"type": "object", "required": "a"}, "its schema is invalid"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "its schema is invalid"),
        ({"type": "object", "$schema": []}, "cannot be read"),
        ({"type": "object", "properties": {"a": {"default": float("nan")}}}, "cannot be read"),
        (
            {"type": "object", "properties": {"a": {"const": "x" * 100_001}}},
            "has 100,050 bytes; the maximum is 100,000",
        ),
        (nested(60), "is nested more than 50 levels deep"),
        (nested(50_000), "cannot be read"),
        ({"type": "object", "$ref": "#"}, "is endlessly recursive"),
        ({"type": "object", "allOf": [{"anyOf": [{"$ref": "#"}]}]}, "is endlessly recursive"),
        ({"type": "object", "allOf": [{"$ref": "file:///etc/passwd"}]}, "ever fetched"),
        ({"type": "object", "$dynamicRef": "https://example.com/x"}, "ever fetched"),
    ],
)
def test_a_schema_that_cannot_be_used_says_why(schema: Any, why: str) -> None:
    outcome = compile_schema(schema)
    assert isinstance(outcome, UnusableSchema)
    assert why in outcome.why


def test_nothing_that_a_schema_refers_to_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        base = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        assert isinstance(compile_schema({"type": "object", "allOf": [{"$ref": base}]}), UnusableSchema)
        schema_checker = checker(
            {"a": {"$ref": "#/$defs/x"}}, **{"$id": base, "$schema": base, "$defs": {"x": {"$id": "x"}}}
        )
        verdict(schema_checker, {"a": 1})
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize(
    ("properties", "more", "value"),
    [
        ({"x": {"$ref": "#/$defs/a0"}}, {"$defs": doubling(60)}, {"x": "s"}),
        ({"x": {"$ref": "#/$defs/nowhere"}}, {}, {"x": 1}),
        ({"x": {"type": "weird"}}, {"$schema": "http://json-schema.org/draft-03/schema#"}, {"x": 1}),
        ({"x": {"multipleOf": 0.1}}, {}, {"x": 10**400}),
        ({"x": {"pattern": "^(a+)+$"}}, {}, {"x": "a" * 5000 + "!"}),
    ],
)
def test_a_hostile_schema_refuses_arguments_instead_of_hanging(properties: Any, more: Any, value: Any) -> None:
    assert verdict(checker(properties, **more), value).startswith("Invalid arguments for tool. ")


def test_what_cannot_be_checked_cheaply_is_left_to_the_server() -> None:
    assert verdict(checker({"x": {"pattern": "^(?=a)b"}}), {"x": "c"}) == ""
    assert verdict(checker({"x": {"uniqueItems": True}}), {"x": [{}, {}]}) == ""
    schema_checker = checker({}, patternProperties={"^(a+)+$": {}}, additionalProperties=False)
    assert verdict(schema_checker, {"a" * 5000 + "!": 1}) == ""


def test_a_schema_may_lead_back_to_itself_one_level_down() -> None:
    schema_checker = checker({"child": {"$ref": "#"}, "name": {"type": "string"}})
    assert verdict(schema_checker, {"child": {"child": {"name": "x"}}}) == ""
    assert 'child.child.name: type is "string"' in verdict(schema_checker, {"child": {"child": {"name": 1}}})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "items", "$ref", "anyOf", "x"]), inner),
    max_leaves=10,
)


@given(ANYTHING, st.binary() | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_server_and_a_model_write_nothing_is_raised(schema: Any, arguments: bytes) -> None:
    outcome = compile_schema({"type": "object", "properties": {"x": schema}})
    if isinstance(outcome, SchemaChecker):
        assert isinstance(outcome.validate("tool", arguments), Valid | Invalid)

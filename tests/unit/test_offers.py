"""What a server says of its tools is looked at before anybody is offered them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.tools.mcp import MAX_SENTENCES, parse_server_tools


def entry(name: Any = "echo", schema: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Do {name}.", "inputSchema": schema or {"type": "object"}, **more}


def digest(fields: dict[str, Any]) -> str:
    return parse_server_tools("liar", [fields]).tools[0].spec.digest


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (entry("bad", {"type": "objekt"}), "does not describe an object"),
        (entry("bad", {"type": "object", "properties": 3}), "its schema is invalid: "),
        (entry("bad", {"type": "object", "$ref": "#"}), "its schema is endlessly recursive"),
        (entry("bad", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}), "ever fetched"),
        (entry("bad", {"type": "object", "properties": {"a": {"enum": ["x" * 200_000]}}}), "200,"),
        (entry("bad") | {"inputSchema": []}, "does not describe an object"),
        ({"name": "bad"}, "it has no name or no schema"),
        (entry(7), "it has no name or no schema"),
        ("a tool", "it has no name or no schema"),
        (entry("bad name"), "its name contains characters other than "),
        (entry("x" * 60), "has more than 64 characters"),
        (entry("bad", description="x" * 20_001), "its description is not text, or has more than 20,000 characters"),
        (entry("bad", description=["x"]), "its description is not text, or has more than 20,000 characters"),
        (entry("bad", annotations=7), "its annotations are not an object"),
        (entry("bad", annotations={"title": "\ud800"}), "its annotations are not valid JSON"),
    ],
)
def test_a_tool_with_a_lie_is_omitted_with_a_sentence(lie: Any, why: str) -> None:
    server_tools = parse_server_tools("liar", [lie, entry("good")])
    assert [tool.spec.name for tool in server_tools.tools] == ["liar__good"]
    assert why in server_tools.omissions[0]
    assert server_tools.omissions[0].endswith(".")


def test_of_two_tools_with_one_name_neither_is_offered() -> None:
    server_tools = parse_server_tools("liar", [entry("a.b"), entry("a_b"), entry("good")])
    assert [tool.name for tool in server_tools.tools] == ["good"]
    assert "another of its tools is also called liar__a_b." in server_tools.omissions[0]
    assert len(server_tools.omissions) == 2


def test_names_that_no_model_can_write_are_written_otherwise_and_called_as_they_are() -> None:
    tool = parse_server_tools("liar", [entry("files/read.all")]).tools[0]
    assert (tool.name, tool.spec.name) == ("files/read.all", "liar__files_read_all")


def test_hints_count_only_if_they_are_plainly_true() -> None:
    spec = parse_server_tools("liar", [entry(annotations={"readOnlyHint": "yes", "idempotentHint": 1})]).tools[0].spec
    assert (spec.level, spec.effect, spec.idempotent) == ("RESTRICTED", "write", False)
    spec = parse_server_tools("liar", [entry(annotations={"readOnlyHint": True})]).tools[0].spec
    assert (spec.level, spec.effect, spec.server) == ("CONTROLLED", "read", "liar")


def test_a_digest_covers_description_schema_and_all_annotations() -> None:
    variants = [
        entry(),
        entry(description="Else."),
        entry(schema={"type": "object", "properties": {"a": {}}}),
        entry(annotations={"readOnlyHint": True}),
        entry(annotations={"destructiveHint": False}),
        entry(annotations={"title": "Echo"}),
    ]
    assert len({digest(each) for each in variants}) == 6


def test_a_digest_does_not_depend_on_the_order_in_which_a_server_writes() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}, "b": {}}}
    turned = {"properties": {"b": {}, "a": {"minLength": 1, "type": "string"}}, "type": "object"}
    assert digest(entry(schema=schema)) == digest(dict(reversed(entry(schema=turned).items())))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["name", "inputSchema", "description", "annotations"]), inner)
    ),
    max_leaves=10,
)


@given(st.lists(ANYTHING, max_size=MAX_SENTENCES))
def test_whatever_a_server_lists_every_entry_is_a_tool_or_a_sentence(entries: list[Any]) -> None:
    server_tools = parse_server_tools("liar", entries)
    assert len(server_tools.tools) + len(server_tools.omissions) == len(entries)

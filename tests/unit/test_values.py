"""Paths into JSON values, and what differs between two of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from halter.autonomy.pace import FieldDifference, diff_json
from halter.loop.text_calls import MissingPath, PathValue, find_path_value

READING = {"quotes": {"AAPL": 5, "a b": 6, "é": 7, "0": 8}, "items": [{"x": 1}, {"x": [2, 3]}], "none": None}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", READING),
        ("quotes.AAPL", 5),
        ("quotes.a b", 6),
        ("quotes.é", 7),
        ("quotes.0", 8),
        ("items[0].x", 1),
        ("items[1].x[1]", 3),
        ("none", None),
    ],
)
def test_a_path_leads_to_a_part_of_a_reading(path: str, value: Any) -> None:
    assert find_path_value(READING, path) == PathValue(value)


def test_a_path_may_begin_with_a_place() -> None:
    assert find_path_value([[1], [2]], "[1][0]") == PathValue(2)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("prices", "There is no `prices` at `prices`."),
        ("quotes.AAPL.x", "There is no `x` at `quotes.AAPL.x`."),
        ("items[2]", "There is no `[2]` at `items[2]`."),
        ("quotes[0]", "There is no `[0]` at `quotes[0]`."),
        ("items.0", "There is no `0` at `items.0`."),
        ("none.x", "There is no `x` at `none.x`."),
        ("a..b", "`a..b` is not a path. Write it like quotes.AAPL or items[0].price."),
        (".a", "`.a` is not a path. Write it like quotes.AAPL or items[0].price."),
        ("a.", "`a.` is not a path. Write it like quotes.AAPL or items[0].price."),
        ("a[-1]", "`a[-1]` is not a path. Write it like quotes.AAPL or items[0].price."),
        ("a[x]", "`a[x]` is not a path. Write it like quotes.AAPL or items[0].price."),
        ("a[0]b", "`a[0]b` is not a path. Write it like quotes.AAPL or items[0].price."),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, sentence: str) -> None:
    assert find_path_value(READING, path) == MissingPath(sentence)


@given(st.text() | st.text("a.[]09"), st.sampled_from([READING, [], 5, None, "text", {"a": [[0]]}]))
def test_no_path_raises(path: str, value: Any) -> None:
    assert isinstance(find_path_value(value, path), PathValue | MissingPath)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (1, 1.0, []),
        (1, True, [("x", 1, True)]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, [("x.b", 2, 3)]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, [("x.a.b.c", 1, 2)]),
        ({"a": 1}, {"b": 1}, [("x.a", 1, UNSET), ("x.b", UNSET, 1)]),
        ([1, 2], [1, 2, 3], [("x[2]", UNSET, 3)]),
        ([1, 2, 3], [2, 3, 4], [("x[2]", UNSET, 4)]),
        ([1, 2, 3], [1, 5, 3], [("x[1]", 2, 5)]),
        ([1, 2, 3], [1, 2], [("x[2]", 3, UNSET)]),
        ([1, 2, 3], [2, 3], [("x[0]", 1, 2), ("x[1]", 2, 3), ("x[2]", 3, UNSET)]),
        ([], [1], [("x[0]", UNSET, 1)]),
        ([{"a": 1}], [{"a": 2}], [("x[0].a", 1, 2)]),
        (UNSET, 5, [("x", UNSET, 5)]),
        (5, UNSET, [("x", 5, UNSET)]),
        ({"a": 1}, [1], [("x", {"a": 1}, [1])]),
        (None, None, []),
    ],
)
def test_only_what_differs_is_named(before: Any, after: Any, found: list[tuple[str, Any, Any]]) -> None:
    assert list(diff_json("x", before, after)) == [FieldDifference(*each) for each in found]

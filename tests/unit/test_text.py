"""Any text is storable."""

import json
import sqlite3

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.text import clean, decode_body, encode_body, escape_hidden

ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs"]) | st.just("\x00"))


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("", ""),
        ("plain", "plain"),
        ("tab\tnew\nline", "tab\tnew\nline"),
        ("Grüße, 世界 🌍", "Grüße, 世界 🌍"),
        ("a\x00b", "a␀b"),
        ("\ud800", "�"),
        ("x\udfffy\x00", "x�y␀"),
    ],
)
def test_only_what_no_text_column_can_hold_is_replaced_and_visibly(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@given(ANY_TEXT)
def test_clean_text_can_be_written_as_json_and_into_a_text_column(text: str) -> None:
    cleaned = clean(text)
    assert msgspec.json.decode(msgspec.json.encode(cleaned)) == cleaned
    with sqlite3.connect(":memory:") as database:
        assert database.execute("SELECT ?", (cleaned,)).fetchone() == (cleaned,)
    database.close()
    assert "\x00" not in cleaned
    assert len(cleaned) == len(text)


@given(ANY_TEXT)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@given(ANY_TEXT)
def test_a_body_gives_back_exactly_the_text_that_was_put_into_it(text: str) -> None:
    assert decode_body(encode_body(text)) == text


@given(st.binary())
def test_bytes_that_never_were_text_can_still_be_shown(data: bytes) -> None:
    assert isinstance(decode_body(data), str)


def test_a_body_of_ten_thousand_nested_lists_is_text_like_any_other() -> None:
    deep = "[" * 10_000 + "]" * 10_000
    assert decode_body(encode_body(deep)) == deep


@pytest.mark.parametrize(
    "hidden", [*"\x00\x1b\x7f\x9b\u200b\u202e\u2066\u3164\u115f\u2800\ufe0f\ud800", "\U000e0041", "\U000e0100"]
)
def test_nothing_that_a_person_decides_on_is_hidden(hidden: str) -> None:
    text = escape_hidden(f"a{hidden}1")
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(f'"{text}"') == f"a{hidden}1"


def test_letters_of_all_languages_are_shown_as_they_are() -> None:
    assert escape_hidden("ü 語\nx") == "ü 語\nx"

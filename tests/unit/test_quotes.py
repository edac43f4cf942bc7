"""A quote counts only if it stands in its source; how the source was set does not matter."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.tasks.review import is_quote_supported

SOURCE = """The tenant shall pay the rent of \u20ac500 on the \ufb01rst day of each month \u2013 \u201cwithout
delay\u201d. This docu-
ment is well-
known. The co\u00adoperation ends with no\u00ad
tice; a loss of -5 million was booked\u2026\n本合同自签字之日起生效。"""

STANDS = {
    "as it is": "The tenant shall pay the rent",
    "over lines": "without delay\u201d. This",
    "with other gaps": "The  tenant\n\tshall   pay",
    "with plain quotes": '"without delay"',
    "with another dash": "of each month - ",
    "without ligatures": "on the first day",
    "a word that a line parts": "This document is",
    "a word whose hyphen is its own": "is well-known. The",
    "soft hyphens": "The cooperation ends with notice;",
    "a part of a script without spaces": "合同自签字之日起",
    "three dots": "was booked...",
    "as the lines part it": "This docu-\nment is well-\nknown.",
}


@pytest.mark.parametrize("case", STANDS)
def test_a_quote_stands_however_it_is_set(case: str) -> None:
    assert is_quote_supported(STANDS[case], SOURCE)


STANDS_NOT = {
    "other words": "The landlord shall pay the rent",
    "a word left out": "The tenant pay the rent",
    "another number": "the rent of \u20ac600 on",
    "a sign left out": "a loss of 5 million",
    "other capitals": "the tenant shall pay",
    "words run together": "Thetenant shall",
    "a number cut short": "pay the rent of \u20ac50",
    "a number without its sign": "5 million was booked",
    "a word cut short": "The tenant shall pay the re",
    "a word without its beginning": "enant shall pay the rent",
    "too little": "The ten",
    "nothing": "",
    "only blanks": " \n " * 10,
    "only soft hyphens": "\u00ad" * 20,
    "a word and more": "was booked... and more",
}


@pytest.mark.parametrize("case", STANDS_NOT)
def test_what_the_source_does_not_say_is_not_supported(case: str) -> None:
    assert not is_quote_supported(STANDS_NOT[case], SOURCE)


WORDS = st.lists(st.text("abC.,", min_size=1, max_size=6), min_size=8, max_size=30)


@given(WORDS, st.randoms(use_true_random=False))
def test_any_run_of_words_is_found_in_its_text_whatever_separates_them(words: list[str], chance: random.Random) -> None:
    text = "".join(word + chance.choice([" ", "\n", "  ", "\u00a0"]) for word in words)
    start = chance.randrange(0, len(words) - 4)
    assert is_quote_supported(" ".join(words[start : start + 5]), text) or len(" ".join(words[start : start + 5])) < 8


@pytest.mark.parametrize("unit", ["a", "-\n", " \n", "- ", "a-\n", "\u00ad\n"])
@pytest.mark.parametrize("times", [50_000, pytest.param(200_000, marks=pytest.mark.soak)])
def test_no_text_takes_long(unit: str, times: int) -> None:
    assert not is_quote_supported(unit * times + "the end is not here", unit * 2 * times)

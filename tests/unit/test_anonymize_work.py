"""Hiding who somebody is takes work in proportion to the text, however many names there are and however hostile."""

import sys
from collections.abc import Callable

import pytest

from bench import anonymous
from halter.core.messages import Prompt, make_user_message
from halter.redaction.anonymize import anonymize_prompt
from halter.redaction.personal_data import compile_names

SMALL = 6_000


def calls_of(job: Callable[[], object]) -> int:
    """Count the functions that are called, those of libraries included: it is the same on every machine."""
    count_of_calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal count_of_calls
        count_of_calls += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        job()
    finally:
        sys.setprofile(before)
    return count_of_calls


def hide(text: str, names: tuple[str, ...] = anonymous.NAMES) -> object:
    return anonymize_prompt(Prompt(messages=(make_user_message(text),)), "salt", names)


def test_a_thousand_names_are_compiled_once_for_all_requests() -> None:
    compile_names.cache_clear()
    for number in range(5):
        hide(f"{number} {anonymous.letter(2_000)}")
    assert compile_names.cache_info().misses == 1


def test_a_thousand_names_are_all_found() -> None:
    anonymized_prompt = anonymize_prompt(
        Prompt(messages=(make_user_message(", ".join(anonymous.NAMES)),)), "salt", anonymous.NAMES
    )
    assert set(anonymized_prompt.values.values()) == set(anonymous.NAMES)


def test_ten_times_as_many_names_take_no_more_work_in_the_same_text() -> None:
    few, texts, text = anonymous.NAMES[:100], anonymous.NAMES, "the order was shipped " * 1_000
    for names in (few, texts):
        hide("warm", names)
    assert calls_of(lambda: hide(text, texts)) <= 1.1 * calls_of(lambda: hide(text, few))


@pytest.mark.parametrize("what", [*anonymous.HOSTILE, "a letter"])
def test_twice_the_text_takes_at_most_about_twice_the_work(what: str) -> None:
    text = anonymous.HOSTILE.get(what) or anonymous.letter(SMALL) * 2
    hide("warm")
    once = calls_of(lambda: hide(text[:SMALL]))
    twice = calls_of(lambda: hide(text[: 2 * SMALL]))
    assert twice <= 2.2 * once + 200


def test_a_name_that_begins_another_one_is_found_where_the_other_one_does_not_end() -> None:
    anonymized_prompt = anonymize_prompt(
        Prompt(messages=(make_user_message("Ann Arbor, Ann Ar, Ann, Anna, Annas"),)), "s", ("Ann", "Ann Ar", "Anna")
    )
    assert sorted(anonymized_prompt.values.values()) == ["Ann", "Ann Ar", "Anna"]

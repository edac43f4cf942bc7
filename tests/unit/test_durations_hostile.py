"""Durations that no store could keep."""

import pytest

from halter.core.clock import DAY, parse_duration
from halter.core.errors import ConfigError


@pytest.mark.parametrize("text", ["9" * 400 + "d", "99999999999999999999d", "36501d", "36500d1s"])
def test_a_duration_that_no_store_could_keep_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="too long for a duration: 36,500 days"):
        parse_duration(text)


def test_a_hundred_years_are_a_duration() -> None:
    assert parse_duration("36500d") == 36_500 * DAY

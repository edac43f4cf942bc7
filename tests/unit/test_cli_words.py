"""What a command shows is what was written: nothing in it steers a terminal or deceives whoever reads it."""

import pytest

from halter.cli.output import escape_text


@pytest.mark.parametrize("sign", ["\x1b", "\x9b", "\r", "\u202e", "\u202a", "\u2066", "\u2069", "\ud800"])
def test_no_sign_that_steers_or_deceives_is_shown(sign: str) -> None:
    assert escape_text(f"delete {sign}everything").plain == "delete \ufffdeverything"

"""The desk against what is stale, too large, or not meant."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halter.app.desk import Desk, decisions, left, rules
from halter.app.desk.decisions import Answer
from halter.core.errors import NotDone
from tests.story.test_desk import Office, office

__all__ = ["office"]

NAMED: dict[str, Callable[[Desk], Awaitable[Any]]] = {
    "approve": lambda desk: decisions.approve(desk, "mine-a", Answer()),
    "deny": lambda desk: decisions.deny(desk, "mine-a"),
    "settle": lambda desk: left.settle(desk, "mine-f", "kept", "findings"),
    "end a rule": lambda desk: rules.end(desk, "mine-r"),
}


@pytest.mark.parametrize("deed", NAMED)
async def test_a_word_about_what_is_gone_is_never_taken_for_one_about_what_begins_like_it(
    office: Office, deed: str
) -> None:
    before = await office.heads()
    with pytest.raises(NotDone) as no:
        await NAMED[deed](office.desk())
    assert no.value.why == "missing"
    assert await office.heads() == before

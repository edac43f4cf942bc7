"""Names of things: streams and identifiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.ids import (
    FLEET,
    SortableIds,
    StreamId,
    inbox_stream,
    is_inbox,
    parse_session_id,
    session_stream,
    trigger_stream,
)
from halter.testing.world import VIRTUAL_START


@pytest.mark.parametrize(
    ("stream", "session", "inbox"),
    [
        (session_stream("s1"), "s1", False),
        (inbox_stream("s1"), "s1", True),
        (FLEET, None, False),
        (trigger_stream("nightly"), None, False),
        (trigger_stream("watch/in"), None, False),
        (StreamId("elsewhere"), None, False),
    ],
)
def test_a_stream_tells_whose_it_is(stream: StreamId, session: str | None, *, inbox: bool) -> None:
    assert parse_session_id(stream) == session
    assert is_inbox(stream) == inbox


def test_the_first_part_of_an_id_is_its_millisecond() -> None:
    def zero(_: int) -> int:
        return 0

    assert SortableIds(lambda: 0, zero).make() == "0" * 25 + "1"
    early, late = (SortableIds(lambda at=at: at, zero).make() for at in (VIRTUAL_START, VIRTUAL_START + 1000))
    assert early[:10] < late[:10]
    assert early[10:] == late[10:] == "0" * 16


@given(st.lists(st.integers(0, 2**80 - 1), min_size=1, max_size=20))
def test_whatever_chance_gives_ids_count_up(drawn: list[int]) -> None:
    numbers = iter(drawn)
    ids = SortableIds(lambda: VIRTUAL_START, lambda _: next(numbers))
    texts = [ids.make() for _ in drawn]
    assert texts == sorted(set(texts))


def test_even_the_largest_draw_is_followed_by_a_larger_id() -> None:
    ids = SortableIds(lambda: VIRTUAL_START, lambda bits: 2**bits - 1)
    texts = [ids.make() for _ in range(3)]
    assert texts == sorted(set(texts))
    assert {len(text) for text in texts} == {26}

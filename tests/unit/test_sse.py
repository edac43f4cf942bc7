"""Server-sent events, to the letter, however the bytes are cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.tools import MAX_READING_BYTES, SensorFailed
from halter.sensors.stream import ServerSentEvent, SseParser

STREAMS: dict[str, tuple[bytes, list[ServerSentEvent]]] = {
    "a line of data is a message": (b"data: hello\n\n", [ServerSentEvent("hello")]),
    "lines of data are joined": (b"data: YHOO\ndata: +2\ndata: 10\n\n", [ServerSentEvent("YHOO\n+2\n10")]),
    "comments are ignored": (b": a comment\n\ndata: x\n: another\n\n:\n\n", [ServerSentEvent("x")]),
    "only one space is taken off": (b"data:  x\n\ndata:y\n\n", [ServerSentEvent(" x"), ServerSentEvent("y")]),
    "a field without a colon is empty": (b"data\n\ndata\ndata\n\n", [ServerSentEvent(""), ServerSentEvent("\n")]),
    "an empty line of data is an event": (b"data:\n\n", [ServerSentEvent("")]),
    "a colon in the data stays": (b"data: a: b\n\n", [ServerSentEvent("a: b")]),
    "an event has a name": (b"event: add\ndata: 1\n\ndata: 2\n\n", [ServerSentEvent("1", "add"), ServerSentEvent("2")]),
    "a name without data is no event": (b"event: add\n\ndata: 1\n\n", [ServerSentEvent("1")]),
    "an id stays until there is another": (
        b"id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\n",
        [ServerSentEvent("a", id="1"), ServerSentEvent("b", id="1"), ServerSentEvent("c")],
    ),
    "an id with NUL is none": (
        b"id: 1\ndata: a\n\nid: 2\0\ndata: b\n\n",
        [ServerSentEvent("a", id="1"), ServerSentEvent("b", id="1")],
    ),
    "an id without data counts": (b"id: 7\n\ndata: a\n\n", [ServerSentEvent("a", id="7")]),
    "unknown fields are ignored": (b"colour: red\nData: x\n data: y\ndata: z\n\n", [ServerSentEvent("z")]),
    "an unfinished event is discarded": (b"data: a\n\ndata: b\n", [ServerSentEvent("a")]),
    "a line that does not end is discarded": (b"data: a\n\ndata: b", [ServerSentEvent("a")]),
    "an event after a lone CR is unfinished": (b"data: a\r", []),
    "lines end with CR": (b"data: a\rdata: b\r\r", [ServerSentEvent("a\nb")]),
    "lines end with CRLF": (b"data: a\r\ndata: b\r\n\r\n", [ServerSentEvent("a\nb")]),
    "line ends may be mixed": (b"data: a\r\ndata: b\rdata: c\n\r\n", [ServerSentEvent("a\nb\nc")]),
    "an LF after CRLF is a line of its own": (
        b"data: a\r\n\ndata: b\n\n",
        [ServerSentEvent("a"), ServerSentEvent("b")],
    ),
    "a mark of byte order is taken off": (b"\xef\xbb\xbfdata: a\n\n", [ServerSentEvent("a")]),
    "one mark and no more": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [ServerSentEvent("b")]),
    "a mark elsewhere is none": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [ServerSentEvent("a")]),
    "what is no UTF-8 has a stand-in": (b"data: a\xffb\n\n", [ServerSentEvent("a\ufffdb")]),
    "letters of many bytes are whole": ("data: Grüße 🐎\n\n".encode(), [ServerSentEvent("Grüße 🐎")]),
    "other separators end no line": ("data: a\u2028b\x0bc\x85\n\n".encode(), [ServerSentEvent("a\u2028b\x0bc\x85")]),
    "nothing is nothing": (b"", []),
    "garbage is nothing": (b"\x00\x01\x02\n\n<html>\n\n", []),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_is_read_to_the_letter(case: str) -> None:
    data, events = STREAMS[case]
    assert SseParser().feed(data) == events


@pytest.mark.parametrize("case", STREAMS)
def test_how_the_bytes_are_cut_changes_nothing(case: str) -> None:
    data, events = STREAMS[case]
    parser = SseParser()
    assert [event for byte in data for event in parser.feed(bytes([byte]))] == events


@given(st.lists(st.sampled_from([b"data: x", b"id: 1", b"\r", b"\n", b"\r\n", b":", b"\xef\xbb\xbf", b"event", b""])))
def test_any_cut_gives_the_same_as_none(pieces: list[bytes]) -> None:
    cut, whole = SseParser(), SseParser()
    events = [event for body in pieces for event in cut.feed(body)]
    assert events == whole.feed(b"".join(pieces))
    assert cut.last_id == whole.last_id


@pytest.mark.parametrize(
    ("line", "retry"),
    [
        (b"retry: 1500", 1500),
        (b"retry:0", 0),
        (b"retry: 007", 7),
        (b"retry: +5", None),
        (b"retry: 1.5", None),
        (b"retry: 5s", None),
        (b"retry:  5", None),
        (b"retry", None),
        ("retry: ٣".encode(), None),
        (b"retry: " + b"9" * 100_000, None),
    ],
)
def test_only_digits_say_when_to_come_back(line: bytes, retry: int | None) -> None:
    parser = SseParser()
    assert parser.feed(line + b"\n") == []
    assert parser.retry == retry


def test_an_id_counts_only_when_its_event_has_ended() -> None:
    parser = SseParser("1")
    parser.feed(b"id: 2\ndata: a\n")
    assert parser.last_id == "1"
    parser.feed(b"\n")
    assert parser.last_id == "2"


def test_a_later_stream_continues_with_the_id_of_the_one_before() -> None:
    assert SseParser("41").feed(b"data: a\n\n") == [ServerSentEvent("a", id="41")]


@pytest.mark.parametrize(
    ("event", "value"),
    [
        (ServerSentEvent('{"a": [1, null]}'), {"a": [1, None]}),
        (ServerSentEvent("3"), 3),
        (ServerSentEvent("hello", id="7"), {"event": "message", "data": "hello", "id": "7"}),
        (ServerSentEvent('{"a": 1}', "add", "7"), {"event": "add", "data": {"a": 1}, "id": "7"}),
        (ServerSentEvent("[" * 100_000), {"event": "message", "data": "[" * 100_000, "id": ""}),
        (ServerSentEvent("NaN"), {"event": "message", "data": "NaN", "id": ""}),
    ],
)
def test_a_plain_message_of_json_is_that_json(event: ServerSentEvent, value: Any) -> None:
    assert event.value == value


def feed(begin: bytes, pieces: list[bytes]) -> None:
    parser = SseParser()
    for body in (begin, *pieces):
        parser.feed(body)


@pytest.mark.parametrize("begin", [b"", b"data: ", b": ", b"id: "])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(begin: bytes) -> None:
    with pytest.raises(SensorFailed, match="larger than 1,000,000 bytes"):
        feed(begin, [b"x" * 10_000] * (MAX_READING_BYTES // 10_000 + 1))


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(SensorFailed, match="larger than 1,000,000 bytes"):
        feed(b"data: " + b"x" * (MAX_READING_BYTES - 1_000) + b"\n", [b"data\n"] * 1_000)


def test_a_stream_of_comments_goes_on_for_ever() -> None:
    parser = SseParser()
    for _ in range(30):
        assert parser.feed(b":" + b"x" * 100_000 + b"\n\n") == []

"""Charts and words of the dashboard: pure, whatever they are given."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import SECOND
from halter.core.events import (
    AnyEvent,
    CallRefused,
    CallSettled,
    CallStarted,
    GuardrailTriggered,
    RequestSettled,
    RequestStarted,
    SensorChanged,
    SessionEnded,
    SessionParked,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
)
from halter.core.ids import StreamId
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.core.usage import Usage
from halter.dashboard.history import LANES, find_health_spans, find_skips, find_spans, list_happenings
from halter.dashboard.session import find_number_series
from halter.dashboard.widgets import (
    BAD,
    MAX_POINTS,
    ChartOptions,
    ChartSpan,
    chart_spending,
    chart_timeline,
    make_file_name,
    make_legible,
    make_single_line,
    thin_points,
)
from halter.operations.queries import HotStateShown

ANY = st.text(st.characters(codec=None, categories=None), max_size=40)


def store_events(*events: AnyEvent) -> Sequence[Stored]:
    """Events a second apart."""
    return [
        Stored(StreamId("session:s"), seq, event.KIND, 1, seq * SECOND, 1, "", None, b"", None, None, b"", b"", event)
        for seq, event in enumerate(events, 1)
    ]


def keys_of(value: Any) -> Iterator[str]:
    match value:
        case Mapping():
            for key, inner in cast("Mapping[str, Any]", value).items():
                yield key
                yield from keys_of(inner)
        case list() | tuple():
            for inner in cast("Sequence[Any]", value):
                yield from keys_of(inner)
        case _:
            pass


def harmless(options: ChartOptions) -> None:
    """No key comes from outside, tooltips are no HTML, and any browser is sent what it can read."""
    assert not any(key.startswith(":") or not key.isidentifier() for key in keys_of(options))
    assert options["tooltip"]["renderMode"] == "richText"
    json.dumps(options).encode()


def test_spending_adds_up_against_its_cap() -> None:
    chart_options = chart_spending([(1 * SECOND, 0.5), (2 * SECOND, 0.25)], 2.0, 9 * SECOND)
    (line,) = chart_options["series"]
    assert line["data"] == [[1000, 0.5], [2000, 0.75], [9000, 0.75]]
    assert line["markLine"]["data"][0]["yAxis"] == 2.0
    assert chart_options["yAxis"]["max"] > 2.0


def test_without_a_cap_no_line_is_drawn_for_it_and_without_spending_nothing_breaks() -> None:
    (line,) = chart_spending([], None, SECOND)["series"]
    assert line["data"] == []
    assert "markLine" not in line


def test_many_points_are_thinned_and_the_last_one_stays() -> None:
    points = thin_points(list(range(12_345)))
    assert len(points) <= MAX_POINTS + 1
    assert points[-1] == 12_344


def test_a_timeline_tells_turns_requests_calls_and_brakes_apart() -> None:
    events = store_events(
        TurnStarted(turn=1),
        RequestStarted(request="r", model="m", purpose="turn", legs=()),
        RequestSettled(request="r", outcome="ok"),
        CallStarted(call="c", tool="pay", purpose="turn", legs=(), level="SAFE", effect="write"),
        CallSettled(call="c", outcome="failed", duration_ms=1),
        CallRefused(call="d", tool="pay", outcome="tool_not_granted", sentence="no", level="SAFE"),
        GuardrailTriggered(guardrail="idle", sentence="so"),
    )
    spans = find_spans(events, 20 * SECOND)
    told = {(span.lane, span.name, span.start // SECOND, span.end and span.end // SECOND) for span in spans}
    assert told == {
        ("turns", "turn 1, running", 1, 20),
        ("requests", "m, done", 2, 3),
        ("calls", "pay, failed", 4, 5),
        ("refusals", "pay: not granted", 6, None),
        ("refusals", "limit idle", 7, None),
    }
    assert {span.lane for span in spans if span.mood == BAD} == {"calls", "refusals"}
    harmless(chart_timeline(spans, LANES))


def test_a_turn_that_ended_well_and_one_that_was_stopped_look_different() -> None:
    well, stopped = (
        find_spans(store_events(TurnStarted(turn=1), TurnEnded(turn=1, why="ended", sentence=sentence)), 0)[0].mood
        for sentence in ("", "It was stopped.")
    )
    assert well != stopped == BAD


def test_turns_skipped_in_a_row_are_one_span_and_one_line() -> None:
    skips = [
        event
        for number in (1, 2, 3)
        for event in (
            SessionWoken(cause="timer"),
            TurnSkipped(stage="rules", skips=number),
            SessionParked(state="SLEEPING", wake_at=99 * SECOND),
        )
    ]
    events = store_events(
        TurnStarted(turn=1),
        TurnEnded(turn=1, why="ended"),
        *skips,
        SessionEnded(state="HALTED", terminal_reason="external_halt"),
    )
    assert [(span.name, span.start // SECOND, span.end) for span in find_skips(events)] == [
        ("3 turns skipped", 4, 10 * SECOND)
    ]
    happenings = list_happenings(events)
    assert [(happening.kind, happening.count) for happening in happenings] == [
        ("turn started", 1),
        ("turn ended", 1),
        ("turn skipped", 3),
        ("session ended", 1),
    ]
    assert happenings[-1].text == "Halted"


def test_what_a_model_and_a_tool_did_is_shown_by_their_names() -> None:
    events = store_events(
        RequestStarted(request="r1", model="acme:small", purpose="turn", legs=()),
        RequestSettled(
            request="r1", outcome="ok", usage=Usage(input_tokens=1200, output_tokens=30), charge=Charge(usd=12_400)
        ),
        CallStarted(call="c1", tool="pay", purpose="turn", legs=(), level="SAFE", effect="write"),
        CallSettled(call="c1", outcome="ok", duration_ms=20),
    )
    assert [happening.text for happening in list_happenings(events)][1::2] == [
        "acme:small · 1,200 in, 30 out · $0.01",
        "pay · done · 20 ms",
    ]


def test_the_health_of_a_sensor_lasts_until_it_changes() -> None:
    events = store_events(SensorChanged(sensor="a", health="ok"), SensorChanged(sensor="a", health="failing"))
    assert [(span.start, span.end, span.mood == BAD) for span in find_health_spans(events, 9 * SECOND)] == [
        (SECOND, 2 * SECOND, False),
        (2 * SECOND, 9 * SECOND, True),
    ]


def test_only_facts_that_are_numbers_and_seen_more_than_once_are_drawn() -> None:
    hot_state_showns = [
        HotStateShown(1, {"a": 1, "b": "x", "c": True, "d": 1e300}),
        HotStateShown(2, {"a": 2.5, "b": 7, "e": None}),
    ]
    assert find_number_series(hot_state_showns) == {"a": [(1, 1.0), (2, 2.5)]}


@given(ANY, ANY)
def test_no_words_become_a_key_of_a_chart_or_its_html(name: str, lane: str) -> None:
    harmless(chart_timeline([ChartSpan(lane, name, 0, 1), ChartSpan(lane, name, 5)], [lane]))


@given(ANY)
def test_any_text_can_be_sent_to_a_browser_and_hides_nothing(text: str) -> None:
    legible = make_legible(text)
    legible.encode()
    assert not set(legible) & set("\u202e\u202d\u2066\u2067\u2068\u200b\u200f\x00\x1b\x07")
    assert "\n" not in make_single_line(text)


def test_what_turns_letters_around_is_made_visible() -> None:
    assert make_legible("invoice\u202efdp.exe") == "invoice⟨U+202E⟩fdp.exe"


def test_long_words_are_cut_and_it_is_said_how_much_is_missing() -> None:
    assert make_legible("x" * 30_000).endswith("… (10,000 characters more)")


@given(ANY)
def test_the_name_of_a_download_is_a_plain_one(text: str) -> None:
    name = make_file_name(text)
    assert name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not name.startswith(".")

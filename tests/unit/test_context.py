"""What is left out of a history that outgrows its window, and what never is."""

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halter.core.messages import Message, Part, Text, ToolCall, ToolResult, bound_message_tokens, make_user_message
from halter.loop.history_cut import (
    MARKER_TOKENS,
    TARGET_FILL,
    Cut,
    Fits,
    HistoryShape,
    TooLarge,
    are_all_trusted,
    build_history_view,
    can_start,
    find_unanswered,
    fit_history,
    list_dropped_messages,
    make_marker,
    marker_text,
    shorten_results,
)
from halter.loop.prompt import build_prompt, build_stable_prefix
from halter.loop.text_calls import to_text_message
from halter.loop.transcript import MAX_RESULT_LENGTH, Transcript, measure_message
from halter.spec.models import BrainSpec, ContextStrategy, ToolCalls

STRATEGIES: tuple[ContextStrategy, ...] = get_args(ContextStrategy)


def make_model_message(text: str = "Well.", *calls: str) -> Message:
    return Message("assistant", (Text(text, "model", trusted=False), *(ToolCall(each, "read", "{}") for each in calls)))


def results(*calls: str, note: str = "") -> Message:
    words = (Text(note, "config", reason="hint"),) if note else ()
    return Message("user", (*(ToolResult(each, "read", "ok", f"of {each}") for each in calls), *words))


def flat(messages: Sequence[Message]) -> list[tuple[str, Part]]:
    return [(message.role, part) for message in messages for part in message.parts]


def uniform(starts: str, *, turn: int = 0, newest: int | None = None) -> HistoryShape:
    """Make a history of messages of ten tokens: `s` where a cut may fall, `-` where it may not."""
    last = starts.rindex("s") if newest is None else newest
    sizes = [10] * len(starts)
    return HistoryShape(
        sizes=sizes, can_start=[sign == "s" for sign in starts], task_index=0, turn_index=turn, newest_index=last
    )


@pytest.mark.parametrize(
    ("history", "window", "expected"),
    [
        (uniform("ssssssssss"), 100, Fits()),
        (uniform("ssssssssss"), 99, Cut(6, (0,))),  # 10 for the task and 40 from the cut on: at most 59
        (uniform("sss-s-s-s-"), 99, Cut(6, (0,))),
        (uniform("ss-s-s-s-s"), 99, Cut(7, (0,))),
        (uniform("ssssssssss", turn=4), 99, Cut(7, (0, 4))),
        (uniform("ssssssssss", turn=8), 99, Cut(6, (0,))),
        (uniform("ssssssssss", newest=5), 99, Cut(4, (0,))),  # 60 must stay, which is more than the target
        (uniform("ssssssssss", newest=3), 99, Cut(3, (0,))),  # so half of the room beside it is used
        (uniform("ssssssssss", newest=3), 80, Cut(3, (0,))),
        (uniform("ssssssssss", newest=3), 79, TooLarge(80, 79)),
        (uniform("s---------"), 99, TooLarge(100, 99)),
        (uniform("ssssssssss"), 20, Cut(9, (0,))),
        (uniform("ssssssssss"), 19, TooLarge(20, 19)),
        (uniform("ssssssssss", turn=5), 29, TooLarge(30, 29)),
    ],
)
def test_a_cut_falls_where_it_may_and_as_far_back_as_it_can(
    history: HistoryShape, window: int, expected: Cut | Fits | TooLarge
) -> None:
    assert fit_history(history, window) == expected


def test_a_cut_stays_until_the_window_is_full_again() -> None:
    cut = Cut(6, (0,))
    assert fit_history(uniform("s" * 14), 99, cut) == Fits()
    assert fit_history(uniform("s" * 15), 99, cut) == Cut(11, (0,))
    assert fit_history(uniform("s" * 15, turn=8), 99, cut) == Cut(12, (0, 8))
    assert fit_history(uniform("s" * 15, turn=14), 99, Cut(6, (0, 3))) == Cut(11, (0,))


def test_what_is_said_in_place_of_the_rest_counts_as_well() -> None:
    assert fit_history(uniform("s" * 10), 99, marker=10) == Cut(7, (0,))
    assert fit_history(uniform("s" * 10), 20, marker=1) == TooLarge(21, 20)
    assert fit_history(uniform("s" * 14), 99, Cut(6, (0,)), marker=10) == Cut(11, (0,))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (make_user_message("Hi."), True),
        (make_model_message(), True),
        (make_model_message("", "a"), True),
        (results("a"), False),
        (results("a", note="x"), False),
    ],
)
def test_nothing_begins_with_a_result(message: Message, expected: bool) -> None:  # noqa: FBT001
    assert can_start(message) is expected


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], 0),
        ([make_user_message("a")], 0),
        ([make_user_message("a"), make_model_message(), make_user_message("b")], 2),
        ([make_user_message("a"), make_model_message(), make_user_message("b"), make_user_message("c")], 2),
        ([make_user_message("a"), make_model_message("", "x"), results("x")], 1),
        ([make_user_message("a"), make_model_message("", "x"), results("x"), make_user_message("b")], 1),
        ([make_user_message("a"), make_model_message("", "x"), make_user_message("b"), results("x")], 1),
        ([make_user_message("a"), make_model_message()], 1),
    ],
)
def test_what_is_not_answered_yet_is_known(history: list[Message], expected: int) -> None:
    assert find_unanswered(history) == expected


HISTORY = [
    make_user_message("Task."),
    make_model_message("", "a"),
    results("a"),
    make_user_message("Turn."),
    make_model_message("", "b"),
    results("b"),
    make_model_message(),
    make_user_message("Now."),
]


def test_a_view_has_the_task_the_marker_what_opened_the_turn_and_the_rest() -> None:
    marker = make_marker(Cut(6, (0, 3)), "compact")
    opening, answer, last = build_history_view(HISTORY, Cut(6, (0, 3)), marker)
    assert opening == Message(
        "user", (Text("Task."), Text(marker_text(4), "config", reason="compacted"), Text("Turn."))
    )
    assert (answer, last) == (HISTORY[6], HISTORY[7])


def test_messages_to_a_model_that_follow_each_other_become_one() -> None:
    assert build_history_view(
        [make_user_message("a"), results("x"), make_model_message(), make_model_message(), make_user_message("b")]
    ) == (
        Message("user", (Text("a"), *results("x").parts)),
        make_model_message(),
        make_model_message(),
        make_user_message("b"),
    )
    assert build_history_view(HISTORY)[0] is HISTORY[0]
    assert build_history_view(HISTORY, Cut(7, (0,))) == (Message("user", (Text("Task."), Text("Now."))),)


def test_results_in_what_opened_the_turn_go_with_their_calls() -> None:
    history = [
        make_user_message("Task."),
        make_model_message("", "a"),
        results("a", note="Turn."),
        make_model_message(),
        make_user_message("Now."),
    ]
    opening, _, _ = build_history_view(history, Cut(3, (0, 2)))
    assert opening == Message("user", (Text("Task."), Text("Turn.", "config", reason="hint")))


def test_a_marker_says_how_much_is_left_out_or_what_it_was_about() -> None:
    cut = Cut(6, (0, 3))
    assert cut.dropped == 4
    assert marker_text(1) == "[1 earlier message is left out here.]"
    assert make_marker(cut, "sliding_window") is None
    assert make_marker(cut, "compact") == make_marker(cut, "summarize")
    marker = make_marker(cut, "summarize", "They met.", trusted=True)
    assert marker == Text(f"{marker_text(4)} A summary of them:\nThey met.", "model", True, "summarized")
    assert measure_message(Message("user", (Text(marker_text(10**12)),))) <= MARKER_TOKENS


def test_what_a_second_cut_leaves_out_is_told_apart_from_the_first() -> None:
    assert list_dropped_messages(HISTORY, Cut(4, (0, 3))) == (HISTORY[1], HISTORY[2])
    assert list_dropped_messages(HISTORY, Cut(6, (0, 3)), Cut(4, (0, 3))) == (HISTORY[4], HISTORY[5])
    assert list_dropped_messages(HISTORY, Cut(6, (0,)), Cut(4, (0, 3))) == (HISTORY[3], HISTORY[4], HISTORY[5])


def test_a_summary_of_anything_untrusted_is_not_trusted() -> None:
    assert are_all_trusted([make_user_message("a"), make_user_message("b", "config")])
    assert not are_all_trusted([make_user_message("a"), results("x")])
    assert not are_all_trusted([make_user_message("a"), make_user_message("b", "document", trusted=False)])
    assert not are_all_trusted([Message("assistant", (ToolCall("c", "read", "{}"),))])


def long_result(length: int) -> Message:
    text = "".join(chr(0x1F600 + place % 50) for place in range(length))
    return Message("user", (ToolResult("c1", "read", "ok", text), Text("x" * length)))


def test_a_long_result_shows_its_beginning_its_end_and_how_to_read_the_rest() -> None:
    message = long_result(10_000)
    short = shorten_results(message, 1000)
    result, words = short.parts
    assert isinstance(result, ToolResult)
    assert words == message.parts[1]
    head, gap, tail = result.text.split("\n")
    whole = message.parts[0].text  # pyright: ignore[reportAttributeAccessIssue]
    assert whole.startswith(head)
    assert whole.endswith(tail)
    left = len(whole) - len(head) - len(tail)
    shows = f'read_output(call="c1", offset={len(head)}) shows them'
    assert gap == f"[{left} characters are left out here; {shows}.]"
    assert 900 < len(result.text) <= 1000
    assert (result.origin, result.trusted, result.outcome) == ("tool", False, "ok")


def test_a_message_is_shortened_once_for_each_limit_and_one_that_fits_is_left_alone() -> None:
    message = long_result(5000)
    assert shorten_results(message, 5000) is message
    assert shorten_results(message, 1000) is shorten_results(message, 1000)
    assert shorten_results(message, 500) != shorten_results(message, 1000)
    assert message == long_result(5000)


@settings(deadline=None)
@given(st.text(max_size=400), st.integers(0, 400))
def test_a_result_never_grows_by_being_shortened(text: str, limit: int) -> None:
    [part] = shorten_results(Message("user", (ToolResult("c", "read", "ok", text),)), limit).parts
    assert isinstance(part, ToolResult)
    assert len(part.text) <= len(text)
    assert part.text == text or len(part.text) <= max(limit, 100)
    assert len(text) > limit or part.text == text


class Session(msgspec.Struct):
    """A session as the loop keeps it: a history that only grows, and the cut that holds."""

    history: list[Message]
    turn: int = 0
    cut: Cut | None = None
    before: list[tuple[str, Part]] = []
    calls: int = 0


def grow(session: Session, kind: str, length: int, calls: int) -> None:
    """Let somebody say something that may come next."""
    text = f"{len(session.history)} " + "x" * length
    match kind:
        case "answer":
            names = [f"c{session.calls + each}" for each in range(calls)]
            session.calls += calls
            session.history.append(make_model_message(text, *names))
            if names:
                session.history.append(results(*names, note=text if length % 2 else ""))
                session.turn = len(session.history) - 1 if length % 10 == 1 else session.turn
        case "turn":
            session.turn = len(session.history)
            session.history.append(make_user_message(text))
        case _:
            session.history.append(make_user_message(text, "config", reason="max_tokens_recovery"))


def ask(session: Session, window: int, strategy: ContextStrategy) -> None:
    """Make the request that a loop would make, and see that all promises hold."""
    history, sizes = session.history, [measure_message(message) for message in session.history]
    starts = [can_start(message) for message in history]
    now = HistoryShape(
        sizes=sizes, can_start=starts, task_index=0, turn_index=session.turn, newest_index=find_unanswered(history)
    )
    match fit_history(now, window, session.cut, marker=MARKER_TOKENS):
        case TooLarge(least):
            must = {0, session.turn, *range(now.newest_index, len(history))}
            assert least > window
            assert sum(sizes[place] for place in must) + MARKER_TOKENS > window
            return
        case Cut() as cut:
            assert cut != session.cut
            assert session.cut is None or cut.tail_start >= session.cut.tail_start
            session.cut, session.before = cut, []
        case Fits():
            pass
    marker = make_marker(session.cut, strategy, "S") if session.cut else None
    history_view = build_history_view(history, session.cut, marker)
    require_promises(session, history_view, window)


def require_promises(session: Session, messages: tuple[Message, ...], window: int) -> None:
    parts = flat(messages)
    assert sum(map(measure_message, messages)) <= window
    assert parts[: len(session.before)] == session.before
    session.before = parts
    for opening in (session.history[0], session.history[session.turn]):
        assert all(("user", part) in parts for part in opening.parts if isinstance(part, Text))
    answers = [place for place, message in enumerate(session.history) if message.role == "assistant"]
    unseen = flat(session.history[max(answers, default=-1) + 1 :])
    assert parts[-len(unseen) :] == unseen
    assert [part.id for _, part in parts if isinstance(part, ToolCall)] == [
        part.id for _, part in parts if isinstance(part, ToolResult)
    ]
    assert messages[0].role == "user"
    assert all(one.role == "assistant" or other.role == "assistant" for one, other in pairwise(messages))


growth = st.tuples(st.sampled_from(["answer"] * 4 + ["turn", "internal"]), st.integers(0, 300), st.integers(0, 3))


@given(st.lists(growth, min_size=5, max_size=60), st.integers(300, 3000), st.sampled_from(STRATEGIES))
def test_a_session_that_grows_and_is_cut_keeps_all_promises(
    grown: list[tuple[str, int, int]], window: int, strategy: ContextStrategy
) -> None:
    session = Session([make_user_message("The task.")])
    for kind, length, calls in grown:
        grow(session, kind, length, calls)
        if session.history[-1].role == "user":
            ask(session, window, strategy)


def test_cuts_are_rare() -> None:
    session, cuts = Session([make_user_message("The task.")]), set[Cut | None]()
    for step in range(400):
        grow(session, "answer", 100 + step % 7, 1)
        ask(session, 20_000, "compact")
        cuts.add(session.cut)
    written = sum(map(measure_message, session.history))
    assert 2 < len(cuts) <= 2 + written / (20_000 * (1 - TARGET_FILL))


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
@pytest.mark.parametrize("longer", [0, 1, MAX_RESULT_LENGTH])
def test_a_result_is_shown_at_its_longest_and_counted_as_it_is_shown(longer: int, letter: str) -> None:
    transcript, text = Transcript(), letter * (MAX_RESULT_LENGTH + longer)
    transcript.add(Message("user", (ToolResult("c", "read", "ok", text), Text("Well."))))
    (message,) = transcript.sent
    shown, _ = message.parts
    assert isinstance(shown, ToolResult)
    assert len(shown.text) <= MAX_RESULT_LENGTH
    assert (shown.text == text) == (not longer)
    assert transcript.size == bound_message_tokens(message)


def build(transcript: Transcript, ending: str, tool_calls: ToolCalls) -> tuple[Message, ...]:
    mind = BrainSpec(tool_calls=tool_calls)
    return build_prompt(build_stable_prefix(mind, ()), transcript, mind, ending, "").prompt.messages


@pytest.mark.parametrize("tool_calls", get_args(ToolCalls))
@given(added=st.lists(st.sampled_from(HISTORY), min_size=1, max_size=12), cut=st.integers(0, 12))
def test_each_request_of_a_growing_history_is_built_as_if_it_were_the_first(
    added: list[Message], cut: int, tool_calls: ToolCalls
) -> None:
    transcript = Transcript()
    for place, message in enumerate(added):
        transcript.add(message)
        if place == cut:
            transcript.cut_at(Cut(place, (0,)), None)
        messages = transcript.sent if tool_calls == "native" else list(map(to_text_message, transcript.sent))
        for now in ("noon", "one"):
            *before, last = build(transcript, now, tool_calls)
            kept = messages[:-1] if messages[-1].role == "user" else messages
            assert before == kept
            assert last == Message(
                "user", (*(each for said in messages[len(kept) :] for each in said.parts), volatile(now))
            )
        assert build(transcript, "", tool_calls) == tuple(messages)


def volatile(text: str) -> Text:
    return Text(text, "config", reason="volatile")

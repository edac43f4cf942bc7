"""What a turn does next and what a session does after it: the two decisions, as tables."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from halter.core.clock import HOUR, MINUTE, SECOND
from halter.core.events.sessions import YieldRequest
from halter.core.messages import ToolCall, ToolResult
from halter.core.vocabulary import SessionKind, TurnEnd
from halter.loop.decide import (
    MAX_BACKOFF,
    MAX_CALLS,
    MAX_OUTPUT_REMINDERS,
    MAX_OVERFLOWS,
    MAX_RETRY_AFTER,
    Act,
    AddMessage,
    End,
    Finish,
    NextTurn,
    Park,
    Refuse,
    Shrink,
    Think,
    TurnLimits,
    compute_backoff,
    decide_after_turn,
    decide_next_step,
)
from halter.loop.repetition import MAX_PERIOD, find_repetition, fingerprint_step
from halter.loop.runtime_messages import CUT_CALL, REPEATED_EMPTY_ANSWER
from halter.loop.turn import FailedAttempt, Turn

RULES = TurnLimits(kind="task")
CALL = ToolCall("c1_0_0", "send", "{}")
TROUBLES: tuple[TurnEnd, ...] = ("max_steps", "timed_out", "repetition", "model_error")
KINDS: tuple[SessionKind, ...] = ("chat", "task", "autonomous")
LONG_AGO = -RULES.timeout


def turn(**given: Any) -> Turn:
    return Turn(number=1, is_over=False, **{"clock_started_at": 0, **given})


def rules(**given: Any) -> TurnLimits:
    return msgspec.structs.replace(RULES, **given)


def step(given: Turn, of: TurnLimits = RULES, **more: Any) -> Any:
    now = more.pop("now", 0)
    return decide_next_step(given, of, now, given.time_worked(now), **more)


def why(result: Any) -> str:
    assert isinstance(result, Finish), result
    return result.why


def reason(result: Any) -> str:
    assert isinstance(result, AddMessage), result
    return result.reason


def test_a_turn_begins_with_a_thought() -> None:
    assert step(turn()) == Think(0, 0)


def test_calls_are_made_before_anything_else_is_looked_at() -> None:
    assert step(turn(calls=(CALL,), stop="calls", steps=99)) == Act((CALL,))


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ({"stop": "max_tokens"}, "invalid_arguments"),
        ({"wrapping": True}, "cost_cap_reached"),
        ({"clock_started_at": LONG_AGO}, "cancelled"),
        ({"calls": (CALL,) * (MAX_CALLS + 1)}, "rate_limited"),
    ],
)
def test_calls_that_are_not_made_are_answered(given: dict[str, Any], outcome: str) -> None:
    result = step(turn(**{"calls": (CALL,), **given}))
    assert isinstance(result, Refuse)
    assert result.outcome == outcome
    assert result.calls == given.get("calls", (CALL,))


def test_as_many_calls_as_may_be_are_made() -> None:
    assert isinstance(step(turn(calls=(CALL,) * MAX_CALLS)), Act)


def test_before_each_step_a_halt_goes_first_then_the_time_then_the_steps() -> None:
    everything: dict[str, Any] = {
        "halted": True,
        "clock_started_at": LONG_AGO,
        "steps": 50,
        "failures": (FailedAttempt("no"),),
    }
    assert why(step(turn(**everything))) == "external_halt"
    everything["halted"] = False
    assert why(step(turn(**everything))) == "timed_out"
    everything["clock_started_at"] = 0
    assert why(step(turn(**everything))) == "max_steps"
    everything["steps"] = 49
    assert why(step(turn(**everything))) == "model_error"


def test_the_time_is_what_was_worked_and_zero_is_no_limit() -> None:
    assert why(step(turn(work_time=RULES.timeout - 1, clock_started_at=0), now=1)) == "timed_out"
    assert step(turn(work_time=RULES.timeout - 1, clock_started_at=0), now=0) == Think()
    assert step(turn(work_time=RULES.timeout - 1, clock_started_at=None), now=10**15) == Think()
    assert step(turn(), rules(timeout=0), now=10**15) == Think()


def test_a_cap_ends_the_turn_with_last_words_or_without() -> None:
    capped = turn(capped=True, refusal="no money")
    assert reason(step(capped)) == "wrap_up"
    assert step(capped, rules(on_cap="stop")) == Finish("cost_cap_reached", "no money")
    assert step(capped, rules(on_cap="ask")) == Finish("cost_cap_reached", "no money")
    wrapping = capped.with_message("wrap_up", 0)
    assert step(wrapping) == Think()
    assert why(step(wrapping.with_reply("end", (), 0, spoke=False))) == "cost_cap_reached"
    assert why(step(wrapping.with_failure(0, FailedAttempt("no", may_retry=True), 0))) == "cost_cap_reached"
    assert why(step(wrapping.with_refusal(0, "cost_cap_reached", "none left", 0))) == "cost_cap_reached"


@pytest.mark.parametrize("on_cap", ["wrap_up", "stop", "ask"])
def test_a_cap_that_charged_failures_used_up_ends_the_turn_with_the_failure(on_cap: Any) -> None:
    charged = FailedAttempt("BadAnswer: no JSON", may_retry=True, is_charged=True)
    capped = turn(failures=(charged,), capped=True, refusal="no money")
    result = step(capped, rules(on_cap=on_cap))
    assert why(result) == "model_error"
    assert result.sentence == (
        "BadAnswer: no JSON. 1 request without a usable answer was charged, so no further one fits: no money"
    )
    free = msgspec.structs.replace(charged, is_charged=False)
    unpaid = turn(failures=(free,), capped=True, refusal="no money")
    assert why(step(unpaid, rules(on_cap="stop"))) == "cost_cap_reached"


def test_an_overrun_ends_the_turn_at_once() -> None:
    assert why(step(turn(overrun=True, capped=True))) == "overrun"


def test_a_cap_that_a_call_met_counts_once_all_calls_have_results() -> None:
    results = [ToolResult(CALL.id, "send", "cost_cap_reached", "too dear")]
    assert reason(step(turn(calls=(CALL,), stop="calls").with_results([CALL], results, 0))) == "wrap_up"


def test_a_halt_that_a_call_met_ends_the_turn_and_stays() -> None:
    halted = turn(calls=(CALL,), stop="calls").with_results(
        [CALL], [ToolResult(CALL.id, "send", "external_halt", "Stop.")], 0
    )
    assert why(step(halted)) == "external_halt"
    assert halted.with_results([CALL], [ToolResult(CALL.id, "send", "ok", "Sent.")], 0).halted


@pytest.mark.parametrize(("outcome", "expected"), [("ok", 0), ("invalid_arguments", 1), ("external_halt", 1)])
def test_an_answer_that_did_not_fit_its_form_counts_as_a_reminder(outcome: Any, expected: int) -> None:
    call = ToolCall("c1_0_0", "final_answer", "{}")
    acted = turn(calls=(call,), stop="calls").with_results([call], [ToolResult(call.id, call.tool, outcome, "")], 0)
    assert (acted.expected, acted.has_answered) == (expected, not expected)


def make_spoken_turn(text: str, stop: Any = "end") -> Turn:
    return turn().with_reply(stop, (), 0, spoke=bool(text.strip()))


@pytest.mark.parametrize("kind", KINDS)
def test_words_end_the_turn(kind: SessionKind) -> None:
    assert step(make_spoken_turn("Hello."), rules(kind=kind)) == Finish("ended")


def test_words_end_the_turn_also_when_time_or_steps_are_just_used_up() -> None:
    assert why(step(make_spoken_turn("Hello."), rules(max_steps=1), now=RULES.timeout)) == "ended"


def test_an_empty_answer_is_asked_about_once() -> None:
    empty = make_spoken_turn(" \n")
    assert reason(step(empty)) == "empty_answer"
    again = empty.with_message("empty_answer", 0).with_reply("end", (), 0, spoke=False)
    assert step(again) == Finish("model_error", REPEATED_EMPTY_ANSWER)


def test_an_autonomous_turn_that_has_acted_may_end_in_silence() -> None:
    silent = msgspec.structs.replace(make_spoken_turn(""), fingerprints=("a",))
    assert step(silent, rules(kind="autonomous")) == Finish("ended")
    assert reason(step(silent, rules(kind="chat"))) == "empty_answer"


def test_a_refusal_of_the_model_is_an_error() -> None:
    assert why(step(make_spoken_turn("No.", "refused"))) == "model_error"


@pytest.mark.parametrize(("used", "most", "ends"), [(0, 0, True), (0, 1, False), (1, 2, False), (2, 2, True)])
def test_a_cut_answer_is_continued_so_often(used: int, most: int, *, ends: bool) -> None:
    given = msgspec.structs.replace(make_spoken_turn("Hel", "max_tokens"), recoveries=used)
    result = step(given, rules(max_tokens_recoveries=most))
    assert (why(result) == "ended") if ends else (reason(result) == "max_tokens_recovery")
    if not ends:
        assert given.with_message("max_tokens_recovery", 0).recoveries == used + 1


def test_a_cut_call_is_asked_for_again() -> None:
    refused = [ToolResult(CALL.id, "send", "invalid_arguments", CUT_CALL)]
    given = turn(calls=(CALL,), stop="max_tokens").with_results([CALL], refused, 0)
    assert reason(step(given)) == "cut_call"
    assert given.with_message("cut_call", 0).recoveries == 1


def test_an_expected_output_is_asked_for_until_patience_ends() -> None:
    given, expecting = make_spoken_turn("Seven."), rules(expects_output=True)
    for _ in range(MAX_OUTPUT_REMINDERS):
        assert reason(step(given, expecting)) == "output_expected"
        told = given.with_message("output_expected", 0)
        given = told.with_reply("end", (), 0, spoke=True)
    assert why(step(given, expecting)) == "model_error"
    assert step(turn(has_answered=True), expecting) == Finish("ended")


@pytest.mark.parametrize(("tool", "end"), [("yield", "yielded"), ("ask_user", "asked"), ("final_answer", "ended")])
def test_a_verb_ends_the_turn_only_where_it_came_out_well(tool: str, end: str) -> None:
    call = ToolCall("c1_0_0", tool, "{}")
    good = turn(calls=(call,)).with_results([call], [ToolResult(call.id, tool, "ok", "")], 0)
    bad = turn(calls=(call,)).with_results([call], [ToolResult(call.id, tool, "invalid_arguments", "")], 0)
    assert why(step(good)) == end
    assert step(bad) == Think()


def repeat_call(before: Turn, results: str) -> Turn:
    """Make the same call once for each letter, which is its result."""
    for letter in results:
        before = before.with_results((CALL,), (ToolResult(CALL.id, CALL.tool, "ok", letter),), 0)
    return before


def test_repetition_is_reported_once_and_then_ends_the_turn() -> None:
    circling = repeat_call(turn(), "aaa")
    assert step(repeat_call(turn(), "aa")) == Think()
    assert reason(step(circling)) == "repetition"
    hinted = circling.with_message("repetition", 0)
    assert step(hinted) == Think()
    assert why(step(repeat_call(hinted, "baaa"))) == "repetition"
    assert step(repeat_call(hinted, "b")) == Think()
    assert step(circling, rules(max_repeated_tool_steps=0)) == Think()


def request_call(before: Turn, *calls: ToolCall) -> Turn:
    """Let the model ask for calls."""
    return before.with_reply("calls", calls, 0, spoke=False)


@pytest.mark.parametrize(("most", "results"), [(1, "a"), (2, "aa"), (3, "aaa"), (4, "aaaa")])
def test_the_call_that_would_repeat_once_more_is_not_made_and_ends_the_turn(most: int, results: str) -> None:
    limits = rules(max_repeated_tool_steps=most)
    circling = repeat_call(turn(), results).with_message("repetition", 0)
    refused = step(request_call(circling, CALL), limits)
    assert isinstance(refused, Refuse)
    assert (refused.calls, refused.outcome) == ((CALL,), "rate_limited")
    result = ToolResult(CALL.id, CALL.tool, "rate_limited", refused.sentence)
    stuck = request_call(circling, CALL).with_results((CALL,), (result,), 0)
    assert why(step(stuck, limits)) == "repetition"


def test_one_repeated_step_that_is_allowed_gets_no_hint_before() -> None:
    assert step(repeat_call(turn(), "a"), rules(max_repeated_tool_steps=1)) == Think()


def test_another_call_after_a_repetition_is_made() -> None:
    circling = repeat_call(turn(), "aaa").with_message("repetition", 0)
    other = msgspec.structs.replace(CALL, arguments='{"to":"mara"}')
    assert step(request_call(circling, other)) == Act((other,))
    assert isinstance(step(request_call(circling, CALL, msgspec.structs.replace(CALL, id="c2"))), Act)
    assert isinstance(step(request_call(circling, CALL), rules(max_repeated_tool_steps=0)), Act)


def test_repetition_late_in_a_turn_is_reported_and_ends_it_too() -> None:
    circling = repeat_call(turn(), "abcdefghijklmnopqrstuvwxyz" + "z" * 2)
    assert reason(step(circling)) == "repetition"
    assert step(circling.with_message("repetition", 0)) == Think()
    assert step(repeat_call(circling.with_message("repetition", 0), "yx")) == Think()
    assert why(step(repeat_call(circling.with_message("repetition", 0), "yxyx"))) == "repetition"


circles = st.tuples(st.text("abcdefg", min_size=1, max_size=6), st.integers(1, 8)).map(
    lambda drawn: drawn[0] * drawn[1]
)


@drawn(st.lists(circles, max_size=4).map("".join), st.integers(1, 8))
def test_a_turn_remembers_as_many_steps_as_its_circles_take(results: str, most: int) -> None:
    fingerprints = [fingerprint_step([CALL], [ToolResult(CALL.id, CALL.tool, "ok", each)]) for each in results]
    acted = repeat_call(turn(), results)
    assert find_repetition(acted.fingerprints, most) == find_repetition(fingerprints, most)
    assert acted.fingerprint_count == len(results)


def test_a_long_turn_remembers_only_its_newest_steps() -> None:
    assert len(repeat_call(turn(), "abcdefghijklmnopqrstuvwxyz").fingerprints) == MAX_PERIOD + 1


def test_a_warning_is_given_once() -> None:
    assert reason(step(turn(), near_budget=True)) == "near_budget"
    assert step(turn().with_message("near_budget", 0), near_budget=True) == Think()
    assert turn().with_message("near_budget", 0).make_next(2, 0, 0).warned


RETRY, FINAL = FailedAttempt("busy", may_retry=True), FailedAttempt("bad")
OVERFLOW = FailedAttempt("ContextOverflow: too long")


@pytest.mark.parametrize(
    ("failures", "models", "found"),
    [
        ((RETRY,), 1, Think(0, SECOND)),
        ((RETRY,) * 2, 1, Think(0, 2 * SECOND)),
        ((RETRY,) * 3, 1, Think(0, 4 * SECOND)),
        ((RETRY,) * 4, 1, Finish("model_error", "busy")),
        ((RETRY,) * 4, 2, Think(1, 0)),
        ((RETRY,) * 5, 2, Think(1, SECOND)),
        ((RETRY,) * 8, 2, Finish("model_error", "busy")),
        ((FINAL,), 1, Finish("model_error", "bad")),
        ((FINAL,), 2, Think(1, 0)),
        ((RETRY, FINAL), 2, Think(1, 0)),
        ((FINAL, FINAL), 2, Finish("model_error", "bad")),
        ((OVERFLOW,), 1, Shrink()),
    ],
)
def test_a_failure_is_retried_then_tried_on_another_model_then_reported(failures: Any, models: int, found: Any) -> None:
    assert step(turn(failures=failures), rules(model_count=models)) == found


def test_a_history_is_not_shrunk_for_ever() -> None:
    assert why(step(turn(failures=(OVERFLOW,), overflows=MAX_OVERFLOWS))) == "model_error"
    assert why(step(turn(failures=(OVERFLOW,)).with_final_overflow())) == "model_error"


def test_pauses_grow_and_spread_and_have_an_end() -> None:
    assert [compute_backoff(RETRY, tries, 1.0) // SECOND for tries in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert compute_backoff(RETRY, 3, 0.0) == 2 * SECOND
    assert compute_backoff(RETRY, 900, 1.0) == MAX_BACKOFF
    failed_attempt = msgspec.structs.replace(RETRY, retry_after=20 * SECOND)
    assert compute_backoff(failed_attempt, 1, 1.0) == 20 * SECOND
    assert compute_backoff(failed_attempt, 6, 1.0) == 30 * SECOND
    assert compute_backoff(msgspec.structs.replace(RETRY, retry_after=10**12), 1, 1.0) == MAX_RETRY_AFTER


def end_turn(end: TurnEnd, chosen: YieldRequest | None = None, **given: Any) -> Turn:
    return turn(**given).with_end(end, "", chosen, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("end", "state", "terminal"),
    [
        ("external_halt", "HALTED", "external_halt"),
        ("cancelled", "CANCELLED", "cancelled"),
        ("cost_cap_reached", "BUDGET_EXCEEDED", "cost_cap_reached"),
        ("overrun", "BUDGET_EXCEEDED", "overrun"),
    ],
)
def test_a_halt_a_cancel_and_a_cap_end_any_session(kind: Any, end: Any, state: Any, terminal: Any) -> None:
    assert decide_after_turn(end_turn(end), rules(kind=kind)) == End(state, terminal)


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_waits_for_its_answer_in_any_session(kind: SessionKind) -> None:
    assert decide_after_turn(end_turn("asked"), rules(kind=kind)) == Park("WAITING_FOR_INPUT")


@pytest.mark.parametrize("end", ["ended", *TROUBLES])
def test_a_chat_waits_for_its_person_whatever_ended_its_turn(end: Any) -> None:
    assert decide_after_turn(end_turn(end, trouble_count=9), rules(kind="chat")) == Park("WAITING_FOR_INPUT")


@pytest.mark.parametrize(
    ("end", "state", "terminal"),
    [
        ("ended", "COMPLETED", "completed"),
        ("max_steps", "MAX_STEPS", "max_steps"),
        ("timed_out", "TIMED_OUT", "timed_out"),
        ("repetition", "ERROR", "repetition"),
        ("model_error", "ERROR", "model_error"),
    ],
)
def test_a_task_ends_as_its_turn_does(end: Any, state: Any, terminal: Any) -> None:
    assert decide_after_turn(end_turn(end), rules(kind="task")) == End(state, terminal)


ALONE = rules(kind="autonomous", min_sleep=2 * SECOND, max_sleep=100 * SECOND)


@pytest.mark.parametrize(
    ("chosen", "after"),
    [
        (YieldRequest("shutdown"), End("COMPLETED", "completed")),
        (YieldRequest("continue"), NextTurn()),
        (YieldRequest("sleep", 50 * SECOND), Park("SLEEPING", 50 * SECOND)),
        (YieldRequest("sleep", 0), Park("SLEEPING", 2 * SECOND)),
        (YieldRequest("sleep", 10**12), Park("SLEEPING", 100 * SECOND)),
    ],
)
def test_an_autonomous_session_continues_as_it_yielded(chosen: YieldRequest, after: Any) -> None:
    assert decide_after_turn(end_turn("yielded", chosen), ALONE) == after


def test_without_a_yield_its_pauses_double_up_to_the_longest() -> None:
    def slept(before: int) -> int | None:
        after_turn = decide_after_turn(end_turn("ended", pause_count=before), ALONE)
        assert isinstance(after_turn, Park)
        assert after_turn.state == "SLEEPING"
        return after_turn.sleep

    assert [slept(before) for before in range(7)] == [each * SECOND for each in (2, 4, 8, 16, 32, 64, 100)]
    assert slept(10_000) == 100 * SECOND
    assert end_turn("yielded", YieldRequest("continue"), pause_count=5).pause_count == 0


@pytest.mark.parametrize("end", TROUBLES)
def test_bad_turns_in_a_row_back_off_minutes_then_an_hour_and_three_are_too_many(end: Any) -> None:
    assert decide_after_turn(end_turn(end), ALONE) == Park("SLEEPING", 5 * MINUTE)
    assert decide_after_turn(end_turn(end, trouble_count=1), ALONE) == Park("SLEEPING", HOUR)
    assert decide_after_turn(end_turn(end, trouble_count=2), ALONE) == End("ERROR", end)
    assert (
        end_turn("ended", trouble_count=2).trouble_count
        == end_turn("yielded", YieldRequest("continue"), trouble_count=2).trouble_count
        == 0
    )

"""Tokens are bounded from above, and reports bring the bound down without ever bringing it below the truth."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halter.core.messages import (
    Message,
    Prompt,
    Text,
    ToolCall,
    ToolResult,
    bound_message_tokens,
    bound_prompt_tokens,
    make_user_message,
)
from halter.loop.token_meter import PromptSize, TokenMeter
from halter.loop.transcript import measure_message

MODEL = "made:up"


def test_the_sizes_of_messages_add_up_to_the_size_of_a_prompt() -> None:
    messages = (
        make_user_message("Hällo 😀"),
        Message("assistant", (Text("ok"), ToolCall("c", "read", "{}"))),
        Message("user", (ToolResult("c", "read", "ok", "\ud800"),)),
    )
    assert bound_prompt_tokens(Prompt(messages=messages)) == bound_prompt_tokens(Prompt(messages=())) + sum(
        map(measure_message, messages)
    )


def test_all_that_is_said_of_a_call_and_its_result_is_counted_in_bytes() -> None:
    size = bound_message_tokens(Message("assistant", (ToolCall("", "", ""),)))
    assert bound_message_tokens(Message("assistant", (ToolCall("c1", "réad", "{}"),))) == size + 2 + 5 + 2
    assert bound_message_tokens(Message("user", (ToolResult("c1", "read", "ok", "\ud800"),))) == size + 2 + 4 + 3


def test_a_message_is_counted_once() -> None:
    message = make_user_message("Hello.")
    assert measure_message(message) == bound_message_tokens(message)
    vars(message)["size"] = 7
    assert measure_message(message) == 7
    assert message == make_user_message("Hello.")


def test_a_model_that_was_never_asked_gets_a_token_for_every_byte() -> None:
    assert TokenMeter().bound_tokens(MODEL, PromptSize("p", 900, 100)) == 1000
    assert TokenMeter().estimate_tokens(MODEL, 1000) == 1000


def test_a_prompt_that_continues_is_what_was_reported_and_the_new_bytes() -> None:
    meter = TokenMeter().with_usage(MODEL, PromptSize("p", 900, 100), 250)
    assert meter.bound_tokens(MODEL, PromptSize("p", 940, 60)) == 250 + 40 + 60
    assert meter.estimate_tokens(MODEL, 1000) == math.ceil(1000 * 0.25 * 1.15)
    assert meter.bound_tokens("other:one", PromptSize("p", 940, 60)) == 1000
    assert meter.estimate_tokens("other:one", 1000) == 1000


@pytest.mark.parametrize("other", [PromptSize("q", 940, 60), PromptSize("p", 899, 60)])
def test_a_prompt_that_begins_otherwise_is_counted_anew(other: PromptSize) -> None:
    meter = TokenMeter().with_usage(MODEL, PromptSize("p", 900, 100), 250)
    assert meter.bound_tokens(MODEL, other) == other.total


@pytest.mark.parametrize("reported", [-1, 0, 61, 1001, 10**9])
def test_a_report_that_cannot_be_true_is_not_believed(reported: int) -> None:
    assert TokenMeter().with_usage(MODEL, PromptSize("p", 900, 100), reported) == TokenMeter()
    assert TokenMeter().with_usage(MODEL, PromptSize("p", 0), reported) == TokenMeter()


def test_the_densest_text_that_was_seen_counts_and_never_more_than_its_bytes() -> None:
    meter = TokenMeter().with_usage(MODEL, PromptSize("p", 1000), 500).with_usage(MODEL, PromptSize("p", 2000), 600)
    assert meter.estimate_tokens(MODEL, 1000) == 575
    assert meter.with_usage(MODEL, PromptSize("p", 1000), 1000).estimate_tokens(MODEL, 1000) == 1000


requests = st.lists(
    st.tuples(
        st.integers(0, 500),  # new bytes
        st.integers(0, 200),  # bytes at the end, this time only
        st.sampled_from([1.0, 0.7, 0.3, 0.07]),  # how dense the new text is
        st.sampled_from([1.0, 0.3]),
        st.booleans(),  # whether the history is cut before this request
        st.booleans(),  # whether the provider reports
    ),
    max_size=20,
)


@settings(deadline=None)
@given(requests)
def test_the_bound_is_never_below_the_truth(drawn: list[tuple[int, int, float, float, bool, bool]]) -> None:
    meter, stable, text, cuts = TokenMeter(), 100, 100, 0
    for new, volatile, dense, end_dense, cut, reports in drawn:
        if cut:
            stable, text, cuts = stable // 2, min(text, stable // 2), cuts + 1
        stable, text = stable + new, text + math.ceil(new * dense)
        prompt_size, true = PromptSize(str(cuts), stable, volatile), text + math.ceil(volatile * end_dense)
        assert true <= meter.bound_tokens(MODEL, prompt_size) <= prompt_size.total
        assert 0 <= meter.estimate_tokens(MODEL, prompt_size.total) <= prompt_size.total
        if reports:
            meter = meter.with_usage(MODEL, prompt_size, true)

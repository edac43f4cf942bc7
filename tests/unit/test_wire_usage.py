"""What providers report is read off their bytes: reasoning once, cumulative counts once, and which report is final."""

import json
from typing import Any

import pytest

from halter.core.usage import Usage
from halter.models.wire_format import UsageReader


def whole(wire: Any, body: Any) -> UsageReader:
    meter = UsageReader(wire)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    meter.feed(content[:7])
    meter.feed(content[7:])
    meter.close()
    return meter


def streamed(wire: Any, *events: Any, end: bytes = b"\n\n") -> UsageReader:
    meter = UsageReader(wire)
    for event in events:
        body = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + end
        for byte in range(0, len(body), 11):
            meter.feed(body[byte : byte + 11])
    return meter


def chat(usage: Any, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {}, "finish_reason": finish}], "usage": usage}


THOUGHT = {"reasoning_tokens": 480}
OPENAI = [
    ({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}, Usage(100, 20)),
    # Reasoning within the completion, as OpenAI has it.
    (
        {"prompt_tokens": 9, "completion_tokens": 500, "completion_tokens_details": {"reasoning_tokens": 480}},
        Usage(9, 500),
    ),
    # Reasoning beside the completion: in the total, or larger than the completion.
    ({"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 509}, Usage(9, 500)),
    (
        {"prompt_tokens": 9, "completion_tokens": 20, "completion_tokens_details": {"reasoning_tokens": 480}},
        Usage(9, 500),
    ),
    (
        {
            "prompt_tokens": 9,
            "completion_tokens": 20,
            "total_tokens": 509,
            "completion_tokens_details": THOUGHT,
        },
        Usage(9, 500),
    ),
    ({"prompt_tokens": 9, "completion_tokens": 20, "reasoning_tokens": 480, "citation_tokens": 3}, Usage(9, 503)),
    # Within, as the total says, though it stands at the top.
    ({"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29, "reasoning_tokens": 12}, Usage(9, 20)),
    ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 2, 4)),
    (
        {"prompt_tokens": 9, "completion_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3},
        Usage(9, 2, 4, 3),
    ),
    ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}, Usage(9, 2, 4)),
    (
        {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"audio_tokens": 5}},
        Usage(9, 2, audio_tokens=5),
    ),
]


@pytest.mark.parametrize(("usage_report", "usage"), OPENAI)
def test_output_of_openais_protocol_counts_all_that_is_billed_once(usage_report: Any, usage: Usage) -> None:
    for meter in (whole("openai", chat(usage_report, "stop")), streamed("openai", chat(usage_report, "stop"))):
        assert (meter.usage, meter.final) == (usage, True)


def test_thoughts_of_google_are_output_beside_the_candidates() -> None:
    values = {"promptTokenCount": 100, "candidatesTokenCount": 20, "thoughtsTokenCount": 480, "totalTokenCount": 600}
    assert whole("google", {"usageMetadata": values}).usage == Usage(100, 500)
    hidden = {"promptTokenCount": 100, "candidatesTokenCount": 20, "totalTokenCount": 600}
    assert whole("google", {"usageMetadata": hidden}).usage == Usage(100, 500)
    tools = {"promptTokenCount": 90, "toolUsePromptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 105}
    assert whole("google", {"usageMetadata": {**tools, "cachedContentTokenCount": 40}}).usage == Usage(100, 5, 40)


def test_sound_that_google_read_from_a_cache_is_counted_apart() -> None:
    values = {"promptTokenCount": 100, "candidatesTokenCount": 5, "cachedContentTokenCount": 40}
    details = [{"modality": "TEXT", "tokenCount": 30}, {"modality": "AUDIO", "tokenCount": 70}]
    cached = [{"modality": "AUDIO", "tokenCount": 40}]
    whole_said = {**values, "promptTokensDetails": details, "cacheTokensDetails": cached}
    usage = Usage(100, 5, 40, audio_tokens=30, audio_cached_tokens=40)
    assert whole("google", {"usageMetadata": whole_said}).usage == usage


def test_more_sound_than_input_is_no_report() -> None:
    values = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"audio_tokens": 10}}
    assert whole("openai", chat(values, "stop")).usage is None


def test_cached_input_of_anthropic_is_input_beside_the_rest() -> None:
    values = {"input_tokens": 50, "output_tokens": 7, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 10}
    assert whole("anthropic", {"type": "message", "usage": values}).usage == Usage(100, 7, 40, 10)


START = {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 1}}}
DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Yes."}}


def stop(**usage: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}


@pytest.mark.parametrize(
    ("events", "usage", "final"),
    [
        ((START,), Usage(100, 1), False),
        ((START, DELTA), Usage(100, 1), False),
        ((START, DELTA, {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}}), Usage(100, 9), False),
        ((START, DELTA, stop(output_tokens=500)), Usage(100, 500), True),
        ((START, DELTA, stop(output_tokens=500, input_tokens=0)), Usage(100, 500), True),
        # Some servers tell the input only at the end, or leave the output out.
        (({"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 1}}},), None, False),
        ((START, DELTA, stop(input_tokens=120)), Usage(120, 1), False),
    ],
)
def test_the_report_of_anthropic_is_final_with_the_reason_to_stop(
    events: Any, usage: Usage | None, *, final: bool
) -> None:
    meter = streamed("anthropic", *events)
    assert (meter.usage, meter.final) == (usage, final)


def counted(output: int) -> dict[str, int]:
    return {"prompt_tokens": 100, "completion_tokens": output, "total_tokens": 100 + output}


LAST: dict[str, Any] = {"choices": [], "usage": counted(500)}


@pytest.mark.parametrize(
    ("events", "usage", "final"),
    [
        ((chat(counted(0)), chat(None)), Usage(100, 0), False),
        ((chat(counted(1)), chat(counted(2)), chat(counted(3))), Usage(100, 3), False),
        ((chat(counted(0)), chat(None, "stop")), Usage(100, 0), False),
        ((chat(counted(0)), chat(None, "stop"), LAST), Usage(100, 500), True),
        ((chat(counted(1)), chat(counted(500), "length")), Usage(100, 500), True),
        ((chat(None, "stop"), b"data: [DONE]\n\n"), None, False),
    ],
)
def test_the_report_of_openai_is_final_with_or_after_the_reason_to_stop(
    events: Any, usage: Usage | None, *, final: bool
) -> None:
    meter = streamed("openai", *events)
    assert (meter.usage, meter.final) == (usage, final)


BLOCKED = {
    "promptFeedback": {"blockReason": "SAFETY"},
    "usageMetadata": {"promptTokenCount": 100, "totalTokenCount": 100},
}


def chunk(output: int, finish: str | None = None) -> dict[str, Any]:
    values = {"promptTokenCount": 100, "candidatesTokenCount": output}
    return {"candidates": [{"finishReason": finish}] if finish else [{}], "usageMetadata": values}


@pytest.mark.parametrize(
    ("events", "usage", "final"),
    [
        ((chunk(1), chunk(5)), Usage(100, 5), False),
        ((chunk(1), chunk(500, "STOP")), Usage(100, 500), True),
        ((chunk(1), {"candidates": [{"finishReason": "STOP"}]}), Usage(100, 1), False),
        ((BLOCKED,), Usage(100, 0), True),
    ],
)
def test_the_report_of_google_is_final_with_or_after_the_reason_to_finish(
    events: Any, usage: Usage | None, *, final: bool
) -> None:
    meter = streamed("google", *events)
    assert (meter.usage, meter.final) == (usage, final)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_lines_end_as_they_like(end: bytes) -> None:
    assert streamed("openai", chat(counted(1)), chat(counted(5), "stop"), end=end).usage == Usage(100, 5)


def test_the_last_line_of_a_stream_may_have_no_end() -> None:
    meter = streamed("openai", chat(None, "stop"), b"data: " + json.dumps({"usage": counted(5)}).encode())
    assert not meter.final
    meter.close()
    assert (meter.usage, meter.final) == (Usage(100, 5), True)


def test_an_answer_that_was_cut_in_its_body_has_no_report() -> None:
    body = json.dumps(chat(counted(20), "stop")).encode()
    for length in range(len(body)):
        meter = UsageReader("openai")
        meter.feed(body[:length])
        assert (meter.usage, meter.final) == (None, False)
        meter.close()
        assert (meter.usage, meter.final) == (None, False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"[]",
        b"7",
        b"<html>",
        b"data: {broken\n\n",
        b"\xff\xfe",
        b'{"usage": "much"}',
        b'{"usage": {"prompt_tokens": -5, "completion_tokens": 3}}',
        b'{"usage": {"prompt_tokens": 5, "completion_tokens": -3}}',
        b'{"usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}}',
        b'{"usage": {"prompt_tokens": 0, "completion_tokens": 0}}',
        b'{"usage": {"prompt_tokens": 1e400}}',
        b"[" * 100_000,
    ],
)
def test_what_cannot_be_read_or_believed_is_no_report(body: bytes) -> None:
    assert whole("openai", body).usage is None


FINAL = chat({"prompt_tokens": 100, "completion_tokens": 1}, "stop")
SPOILING = [
    {"prompt_tokens": 100, "completion_tokens": "900"},
    {"prompt_tokens": 100, "completion_tokens": 900.5},
    {"prompt_tokens": 100, "completion_tokens": [900]},
    {"prompt_tokens": 100, "completion_tokens": -900},
    {"prompt_tokens": 100, "completion_tokens": 0},
    {"prompt_tokens": -1, "completion_tokens": 900},
    "much",
]


@pytest.mark.parametrize("usage", SPOILING, ids=str)
def test_after_a_report_that_cannot_be_believed_none_is(usage: Any) -> None:
    for events in ((FINAL, chat(usage)), (chat(FINAL["usage"]), chat(usage, "stop"), FINAL)):
        meter = streamed("openai", *events)
        assert (meter.usage, meter.final) == (None, False)


def test_a_report_that_is_no_json_spoils_the_one_before() -> None:
    meter = streamed("openai", FINAL, b'data: {"choices": [], "usage": {"prompt_tokens": 100, },}\n\n')
    assert (meter.usage, meter.final) == (None, False)
    assert streamed("openai", FINAL, b"data: [DONE]\n\n", b"data: {broken\n\n").final


def test_input_is_cached_only_if_the_last_report_says_so() -> None:
    def cached(count: int | None, output: int) -> dict[str, Any]:
        details = {} if count is None else {"prompt_tokens_details": {"cached_tokens": count}}
        return {"prompt_tokens": 100, "completion_tokens": output, **details}

    assert streamed("openai", chat(cached(90, 1)), chat(cached(0, 5), "stop")).usage == Usage(100, 5)
    assert streamed("openai", chat(cached(0, 1)), chat(cached(90, 5), "stop")).usage == Usage(100, 5, 90)
    assert streamed("openai", chat(cached(90, 1)), chat(cached(None, 5), "stop")).usage == Usage(100, 5, 90)
    values = {"message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 1}}}
    ended = {"input_tokens": 100, "cache_read_input_tokens": 0, "output_tokens": 5}
    assert streamed("anthropic", values, {"delta": {"stop_reason": "x"}, "usage": ended}).usage == Usage(100, 5)
    short = {"delta": {"stop_reason": "x"}, "usage": {"output_tokens": 5}}
    assert streamed("anthropic", values, short).usage == Usage(100, 5, 90)

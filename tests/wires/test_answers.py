"""What a model says over a wire is what Halter hears: words, calls, the reason to stop, and what was used."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from halter.core.messages import Text, ToolCall
from halter.core.tools import Permit
from halter.core.usage import Usage


def counts(usage: Usage | None) -> Usage:
    """The usage without the name of the model that answered."""
    assert usage is not None
    return replace(usage, answered_by="")


async def test_words_come_whole_and_in_order(desk: Any) -> None:
    desk.provider.says("It says ", "hello.")
    reply = await desk.ask()
    assert (reply.text, reply.stop) == ("It says hello.", "end")
    assert {(type(result), result.origin, result.trusted) for result in reply.parts} == {(Text, "model", False)}
    assert "".join(desk.heard) == ("It says hello." if desk.streaming else "")


async def test_what_was_used_is_told_with_cached_tokens_among_the_input(desk: Any) -> None:
    desk.provider.says("Yes.", usage=(100, 20, 40))
    assert counts((await desk.ask()).usage) == Usage(100, 20, 40)


async def test_words_are_heard_as_they_come(streamed: Any) -> None:
    streamed.provider.says("One, ", "two, ", "three.")
    await streamed.ask()
    assert streamed.heard == ["One, ", "two, ", "three."]


async def test_calls_come_after_words_each_with_its_id_and_arguments(desk: Any) -> None:
    calls = (("id-1", "read_file", ('{"path":', '"a.log"}')), ("id-2", "read_file", ('{"path":"b.log"}',)))
    desk.provider.says("I will look.", calls=calls)
    reply = await desk.ask()
    assert reply.text == "I will look."
    assert reply.calls == (
        ToolCall("id-1", "read_file", '{"path":"a.log"}'),
        ToolCall("id-2", "read_file", '{"path":"b.log"}'),
    )
    assert reply.stop == "calls"
    assert "".join(desk.heard) == ("I will look." if desk.streaming else "")


async def test_calls_that_share_an_id_are_all_passed_on(desk: Any) -> None:
    desk.provider.says(calls=(("same", "read_file", ('{"path":"a"}',)), ("same", "read_file", ('{"path":"b"}',))))
    reply = await desk.ask()
    assert [(call.id, call.arguments) for call in reply.calls] == [("same", '{"path":"a"}'), ("same", '{"path":"b"}')]


async def test_a_call_without_arguments_has_an_empty_object(desk: Any) -> None:
    desk.provider.says(calls=(("id-1", "list", ()),))
    assert (await desk.ask()).calls == (ToolCall("id-1", "list", "{}"),)


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_arguments_that_are_no_json_are_passed_on_as_they_were_written(desk: Any) -> None:
    desk.provider.says(calls=(("id-1", "read_file", ('{"path": "a.lo', "g'}")),))
    assert (await desk.ask()).calls[0].arguments == '{"path": "a.log\'}'


@pytest.mark.parametrize("wire", ["anthropic"], indirect=True)
async def test_streamed_arguments_that_are_no_json_are_passed_on_as_they_were_written(streamed: Any) -> None:
    streamed.provider.says(calls=(("id-1", "read_file", ('{"path": "a.lo', "g'}")),))
    assert (await streamed.ask()).calls[0].arguments == '{"path": "a.log\'}'


@pytest.mark.parametrize(
    ("finish", "stop"), [("stop", "end"), ("calls", "end"), ("length", "max_tokens"), ("filter", "refused")]
)
async def test_the_reason_to_stop_is_told(desk: Any, finish: str, stop: str) -> None:
    desk.provider.says("Well", finish=finish)
    reply = await desk.ask()
    assert reply.stop == stop
    assert counts(reply.usage) == Usage(100, 20, 40)


async def test_calls_are_seen_where_a_server_only_says_that_it_stopped(desk: Any) -> None:
    desk.provider.says(calls=(("id-1", "read_file", ('{"path":"a"}',)),), finish="stop")
    assert (await desk.ask()).stop == "calls"


async def test_an_answer_that_ran_out_of_tokens_inside_a_call_says_so(desk: Any) -> None:
    desk.provider.says(calls=(("id-1", "read_file", ('{"path":"a"}',)),), finish="length")
    assert (await desk.ask()).stop == "max_tokens"


async def test_an_empty_answer_is_an_answer(desk: Any) -> None:
    desk.provider.says()
    reply = await desk.ask()
    assert (reply.parts, reply.stop) == ((), "end")


async def test_an_answer_of_spaces_is_an_answer(desk: Any) -> None:
    desk.provider.says(" \n ")
    reply = await desk.ask()
    assert (reply.text.strip(), reply.stop) == ("", "end")


async def test_what_a_model_thought_is_not_what_it_said(desk: Any) -> None:
    desk.provider.says("Seven.", thoughts="The user wants a number.")
    reply = await desk.ask()
    assert reply.text == "Seven."
    assert "".join(desk.heard) == ("Seven." if desk.streaming else "")


@pytest.mark.parametrize("wire", ["openai", "google"], indirect=True)
async def test_without_a_report_nothing_is_said_to_have_been_used(desk: Any) -> None:
    desk.provider.says("Yes.", usage=None)
    assert (await desk.ask()).usage is None


@pytest.mark.filterwarnings("ignore:Failed to extract usage")
@pytest.mark.parametrize("usage", [(100, 20, 400), (-5, 20, 0)])
async def test_a_report_that_contradicts_itself_is_no_report(desk: Any, usage: tuple[int, int, int]) -> None:
    desk.provider.says("Yes.", usage=usage)
    reply = await desk.ask()
    assert reply.text == "Yes."
    assert reply.usage is None


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_a_character_that_was_sent_in_halves_is_put_together(desk: Any) -> None:
    desk.provider.says("so ", "\ud83d", "\ude00", "!", "\ud83d")
    reply = await desk.ask()
    assert reply.text == "so 😀!�"
    assert "".join(desk.heard) == ("so 😀!" if desk.streaming else "")


@pytest.mark.parametrize(("wire", "streaming"), [("openai", False)], indirect=True)
async def test_a_refusal_is_told_in_the_words_of_the_model(desk: Any) -> None:
    message = {"role": "assistant", "content": None, "refusal": "I will not."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    desk.provider.sends(body={"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
    reply = await desk.ask()
    assert (reply.text, reply.stop) == ("I will not.", "refused")


@pytest.mark.parametrize(("wire", "streaming"), [("openai", False)], indirect=True)
async def test_a_whole_answer_needs_no_word_that_it_is_finished(desk: Any) -> None:
    desk.provider.says("Yes.", finish=None)
    reply = await desk.ask()
    assert (reply.text, reply.stop) == ("Yes.", "end")


async def test_a_permit_is_good_for_one_request(desk: Any) -> None:
    desk.provider.says("Yes.")
    permit = Permit("r", 0, {})
    await desk.model.ask(desk.prompt(), permit)
    with pytest.raises(RuntimeError):
        await desk.model.ask(desk.prompt(), permit)
    assert len(desk.provider.asked) == 1


async def test_one_connection_carries_one_request_after_the_other(desk: Any) -> None:
    desk.provider.says("Yes.")
    for _ in range(3):
        assert (await desk.ask()).text == "Yes."
    assert desk.provider.connections == 1


@pytest.mark.parametrize(("wire", "streaming"), [("google", False)], indirect=True)
async def test_what_a_model_thought_is_paid_for_as_output(desk: Any) -> None:
    values = {"promptTokenCount": 100, "candidatesTokenCount": 20, "thoughtsTokenCount": 30, "totalTokenCount": 150}
    candidate = {"content": {"role": "model", "parts": [{"text": "Yes."}]}, "finishReason": "STOP"}
    desk.provider.sends(body={"candidates": [candidate], "usageMetadata": values, "modelVersion": "m"})
    assert counts((await desk.ask()).usage) == Usage(100, 50)


@pytest.mark.parametrize(("wire", "streaming"), [("anthropic", False)], indirect=True)
async def test_what_was_written_to_a_cache_is_part_of_the_input(desk: Any) -> None:
    used = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 70}
    text = {"type": "text", "text": "Yes."}
    head = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    desk.provider.sends(body={**head, "content": [text], "stop_reason": "end_turn", "usage": used})
    assert counts((await desk.ask()).usage) == Usage(100, 5, 20, 70)


async def test_one_wire_carries_many_requests_at_once(desk: Any) -> None:
    desk.provider.says("Yes.")
    replies = await asyncio.gather(*(desk.ask() for _ in range(20)))
    assert [reply.text for reply in replies] == ["Yes."] * 20


def test_a_model_can_be_asked_in_one_event_loop_after_the_other(desk_in_a_loop: Any) -> None:
    assert [asyncio.run(desk_in_a_loop()) for _ in range(2)] == ["Yes.", "Yes."]

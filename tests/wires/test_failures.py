"""Every way in which a provider fails has one meaning: try again or never, paid or not, and what was used."""

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from msgspec.structs import replace

from halter.core.clock import SECOND
from halter.core.errors import ContextOverflow, ModelError, ModelRejected, ModelUnavailable, ModelUnusable
from halter.core.tools import Permit
from halter.core.usage import Usage
from halter.models.exchange import ExchangeTerms
from halter.models.wire import WireModel


def counts(usage: Usage | None) -> Usage:
    """The usage without the name of the model that answered."""
    assert usage is not None
    return replace(usage, answered_by="")


async def failed(desk: Any, model: Any = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await desk.ask(model=model)
    return caught.value


RETRYABLE = [
    (408, "Conflict"),
    (409, "Conflict"),
    (429, "RateLimited"),
    (500, "ServerError"),
    (502, "ServerError"),
    (503, "Overloaded"),
    (504, "ServerError"),
    (529, "Overloaded"),
]
NEVER_AGAIN = [
    (400, "Rejected"),
    (401, "Unauthorized"),
    (402, "QuotaExceeded"),
    (403, "Forbidden"),
    (404, "NotFound"),
    (413, "ContextOverflow"),
    (422, "Rejected"),
]


@pytest.mark.parametrize(("status", "kind"), RETRYABLE)
async def test_what_may_pass_is_worth_another_try_and_costs_nothing(desk: Any, status: int, kind: str) -> None:
    desk.provider.refuses(status)
    error = await failed(desk)
    assert type(error) is ModelUnavailable
    assert str(error) == f"{kind}: {desk.model.name} answered {status}: No luck."
    assert (error.billed, error.usage, error.retry_after) == (False, None, None)
    assert len(desk.provider.asked) == 1


@pytest.mark.parametrize(
    ("status", "billed"), [(400, True), (408, True), (413, True), (429, False), (500, True), (503, True), (529, False)]
)
async def test_a_provider_that_bills_errors_is_taken_at_its_word(desk: Any, status: int, billed: bool) -> None:  # noqa: FBT001
    desk.provider.refuses(status)
    model = desk.reach(desk.model.name, terms=ExchangeTerms(bills_errors=True))
    error = await failed(desk, model)
    await model.aclose()
    assert (error.billed, error.usage) == (billed, None)


REPORTED = {
    "openai": {"usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}},
    "anthropic": {"usage": {"input_tokens": 100, "output_tokens": 20}},
    "responses": {"usage": {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}, "status": "failed"},
    "google": {"usageMetadata": {"promptTokenCount": 100, "candidatesTokenCount": 20, "totalTokenCount": 120}},
}


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_an_error_that_reports_a_usage_costs_that_usage(desk: Any, status: int) -> None:
    error = {"type": "error", "error": {"message": "No luck.", "type": "some_error"}}
    desk.provider.sends(status, {**error, **REPORTED[desk.wire]})
    model_error = await failed(desk)
    assert (model_error.billed, model_error.usage, model_error.final) == (True, Usage(100, 20), True)


@pytest.mark.parametrize(("status", "kind"), NEVER_AGAIN)
async def test_what_was_refused_is_never_asked_again_and_costs_nothing(desk: Any, status: int, kind: str) -> None:
    desk.provider.refuses(status)
    error = await failed(desk)
    assert isinstance(error, ModelRejected)
    assert isinstance(error, ModelUnusable) == (status in {401, 402, 403, 404}), "only these need a person"
    assert str(error) == f"{kind}: {desk.model.name} answered {status}: No luck."
    assert not error.billed
    assert len(desk.provider.asked) == 1


async def test_a_provider_says_how_long_to_wait_in_seconds(desk: Any) -> None:
    desk.provider.refuses(429, retry_after="7")
    assert (await failed(desk)).retry_after == 7 * SECOND


async def test_a_provider_says_how_long_to_wait_as_a_date(desk: Any) -> None:
    desk.provider.refuses(429, retry_after=format_datetime(datetime.now(UTC) + timedelta(minutes=10), usegmt=True))
    wait = (await failed(desk)).retry_after
    assert wait is not None
    assert 8 * 60 * SECOND < wait <= 10 * 60 * SECOND


@pytest.mark.parametrize("nonsense", ["soon", "-5", "nan", "1e400"])
async def test_a_wait_that_makes_no_sense_is_no_wait(desk: Any, nonsense: str) -> None:
    desk.provider.refuses(429, retry_after=nonsense)
    wait = (await failed(desk)).retry_after
    assert wait is None or 0 <= wait <= 24 * 3600 * SECOND


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirection_is_not_followed_and_costs_nothing(desk: Any, status: int) -> None:
    elsewhere = f"http://localhost:{desk.provider.port}/elsewhere"
    desk.provider.sends(status, b"", location=elsewhere)
    error = await failed(desk)
    assert (type(error), error.billed) == (ModelUnusable, False)
    assert "Redirected" in str(error)
    assert len(desk.provider.asked) == 1


@pytest.mark.parametrize("streaming", [False], indirect=True)
async def test_a_proxy_that_lets_nothing_through_costs_nothing(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        model = WireModel(desk.model.name, desk.wire, "https://provider.invalid/v1", "k")
        error = await failed(desk, model)
        await model.aclose()
    assert (type(error), error.billed) == (ModelUnavailable, False)


OVERFLOWS = {
    "responses": (400, "Your input exceeds the context window of this model.", "context_length_exceeded"),
    "openai": (400, "This model's maximum context length is 8 tokens.", "context_length_exceeded"),
    "anthropic": (400, "prompt is too long: 9 tokens > 8 maximum", "invalid_request_error"),
    "google": (400, "The input token count (9) exceeds the maximum number of tokens allowed (8).", "INVALID_ARGUMENT"),
}


async def test_a_prompt_that_is_too_long_is_told_apart(desk: Any) -> None:
    desk.provider.refuses(*OVERFLOWS[desk.wire])
    error = await failed(desk)
    assert isinstance(error, ContextOverflow)
    assert str(error).startswith("ContextOverflow: ")
    assert not error.billed


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_waiting_brings_no_credit_back(desk: Any) -> None:
    desk.provider.refuses(429, "You exceeded your current quota.", "insufficient_quota")
    error = await failed(desk)
    assert isinstance(error, ModelUnusable)
    assert str(error).startswith("QuotaExceeded: ")


async def test_where_nobody_listens_nothing_was_paid(desk: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        error = await failed(desk, desk.reach(desk.model.name, taken.getsockname()[1]))
    assert type(error) is ModelUnavailable
    assert str(error).startswith("ConnectionFailed: ")
    assert not error.billed


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_a_host_that_nobody_knows_costs_nothing(desk: Any) -> None:
    model = WireModel(desk.model.name, "openai", "http://nobody.invalid/v1", "k")
    error = await failed(desk, model)
    await model.aclose()
    assert type(error) is ModelUnavailable
    assert str(error).startswith("ConnectionFailed: ")
    assert not error.billed


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_a_connection_that_cannot_be_encrypted_costs_nothing(desk: Any) -> None:
    model = WireModel(
        desk.model.name,
        "openai",
        f"https://127.0.0.1:{desk.provider.port}/v1",
        "k",
        terms=ExchangeTerms(connect_timeout=1),
    )
    error = await failed(desk, model)
    await model.aclose()
    assert str(error).startswith("ConnectionFailed: ")
    assert not error.billed
    assert desk.provider.asked == []


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which connections are not refused, and do not come about: nobody takes them."""
    with socket.socket() as listening, ExitStack() as waiting:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


async def test_a_connection_that_does_not_come_about_in_time_costs_nothing(desk: Any, silent: int) -> None:
    model = desk.reach(desk.model.name, silent, terms=ExchangeTerms(connect_timeout=0.05))
    error = await failed(desk, model)
    await model.aclose()
    assert type(error) is ModelUnavailable
    assert str(error).startswith("ConnectionFailed: ")
    assert not error.billed


async def test_what_is_stopped_before_it_was_sent_says_so_and_what_was_sent_does_not(desk: Any, silent: int) -> None:
    model, permit = desk.reach(desk.model.name, silent), Permit("r", 0, {})
    hear = desk.heard.append if desk.streaming else None
    asking = asyncio.create_task(model.ask(desk.prompt(), permit, hear))
    for _ in range(50):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await model.aclose()
    assert permit.unsent
    desk.provider.says("I will ", "look.", until="text", hang=True)
    sent = Permit("r2", 0, {})
    asking = asyncio.create_task(desk.model.ask(desk.prompt(), sent, hear))
    await asyncio.wait_for(desk.provider.hanging.wait(), 10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not sent.unsent


async def test_a_connection_that_closes_before_any_answer_may_have_been_paid(desk: Any) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        error = await failed(desk, desk.reach(desk.model.name, server.sockets[0].getsockname()[1]))
    assert type(error) is ModelUnavailable
    assert str(error).startswith("ConnectionLost: ")
    assert error.billed


CALL = (("id-1", "read_file", ('{"path":', '"a.log"}')),)


@pytest.mark.parametrize("abort", [True, False], ids=["torn", "closed politely"])
@pytest.mark.parametrize("until", ["text", "args"])
async def test_a_cut_stream_is_never_taken_for_a_whole_answer(streamed: Any, until: str, abort: bool) -> None:  # noqa: FBT001
    streamed.provider.says("I will ", "look.", calls=CALL, until=until, abort=abort)
    error = await failed(streamed)
    assert type(error) is ModelUnavailable
    assert str(error) == f"CutStream: the answer of {streamed.model.name} ended before it was complete"
    assert error.billed
    assert len(streamed.provider.asked) == 1


async def test_wherever_a_stream_is_cut_it_ends_once_in_a_whole_answer_or_in_an_error(streamed: Any) -> None:
    streamed.provider.says("I will ", "look.", calls=CALL)
    result = streamed.provider.written(streamed.wire)
    whole = await streamed.ask()
    ends = {"whole": 0, "cut": 0}
    for length in range(0, len(result), 17):
        streamed.provider.sends(200, result[:length], "text/event-stream")
        try:
            reply = await streamed.ask()
        except ModelUnavailable:
            ends["cut"] += 1
        else:
            ends["whole"] += 1
            assert (reply.parts, reply.stop) == (whole.parts, whole.stop)
    assert ends["cut"] > ends["whole"]


async def test_a_stream_that_ends_without_a_finish_is_cut(streamed: Any) -> None:
    streamed.provider.says("It is seven.", finish=None)
    assert str(await failed(streamed)).startswith("CutStream: ")
    assert streamed.heard == ["It is seven."]


@pytest.mark.parametrize("abort", [True, False], ids=["torn", "closed politely"])
async def test_a_stream_without_a_word_is_no_empty_answer(streamed: Any, abort: bool) -> None:  # noqa: FBT001
    streamed.provider.says(until="start", finish=None, usage=None, abort=abort)
    error = await failed(streamed)
    assert type(error) is ModelUnavailable
    assert str(error).split(":")[0] in {"CutStream", "ConnectionLost", "BadAnswer"}
    assert error.billed


@pytest.mark.parametrize("wire", ["anthropic", "google"], indirect=True)
@pytest.mark.parametrize("abort", [True, False], ids=["torn", "closed politely"])
async def test_what_a_cut_stream_reported_is_not_final(streamed: Any, abort: bool) -> None:  # noqa: FBT001
    streamed.provider.says("twelve bytes", " and more", until="text", abort=abort)
    error = await failed(streamed)
    assert (counts(error.usage), error.final) == (Usage(100, 1, 40), False)


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_a_stream_that_reports_but_never_finishes_has_no_final_report(streamed: Any) -> None:
    streamed.provider.says("It is seven.", finish=None, usage=(100, 20, 40))
    error = await failed(streamed)
    assert (counts(error.usage), error.final) == (Usage(100, 20, 40), False)


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_a_finished_answer_whose_only_report_came_early_tells_of_no_usage(streamed: Any) -> None:
    streamed.provider.says("It is ", "seven.", reports="early", until="finish")
    reply = await streamed.ask()
    assert (reply.text, reply.usage) == ("It is seven.", None)


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
@pytest.mark.parametrize("reports", ["early", "each"])
async def test_reports_that_repeat_what_was_used_so_far_are_not_added_up(streamed: Any, reports: str) -> None:
    streamed.provider.says("It is ", "seven.", reports=reports)
    assert counts((await streamed.ask()).usage) == Usage(100, 20, 40)


@pytest.mark.parametrize("wire", ["openai", "anthropic"], indirect=True)
async def test_a_report_that_was_final_is_final_although_the_connection_breaks_after_it(streamed: Any) -> None:
    streamed.provider.says("It is seven.", until="usage" if streamed.wire == "openai" else "finish", abort=True)
    error = await failed(streamed)
    assert (counts(error.usage), error.final) == (Usage(100, 20, 40), True)


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
async def test_a_stream_that_was_cut_before_its_report_tells_of_no_usage(streamed: Any) -> None:
    streamed.provider.says("It is ", "seven.", until="text")
    assert (await failed(streamed)).usage is None


@pytest.mark.parametrize("wire", ["openai", "anthropic"], indirect=True)
async def test_a_finished_answer_is_kept_although_the_connection_breaks_after_it(streamed: Any) -> None:
    streamed.provider.says("It is seven.", until="finish")
    assert (await streamed.ask()).text == "It is seven."


@pytest.mark.parametrize(
    "body", [b"", b"   \n", b'{"id": "c1", "choi', b"<html>Bad gateway</html>", b"[]", b"null", b"7"]
)
async def test_an_answer_that_nobody_can_read_is_worth_another_try(desk: Any, body: bytes) -> None:
    desk.provider.sends(200, body, "text/html" if body.startswith(b"<") else "application/json")
    error = await failed(desk)
    assert type(error) is ModelUnavailable
    assert error.billed
    assert error.usage is None


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<html>Sign in to the guest network</html>", "<html>Sign in to the guest network</html>"),
        (b'{"id": "c1", "choi', '{"id": "c1", "choi'),
        (b"\n", "it was empty"),
    ],
)
@pytest.mark.parametrize("streaming", [False], indirect=True)
@pytest.mark.parametrize("wire", ["openai", "anthropic"], indirect=True)
async def test_an_answer_that_cannot_be_read_is_quoted(desk: Any, body: bytes, shown: str) -> None:
    desk.provider.sends(200, body, "text/html" if body.startswith(b"<") else "application/json")
    text = str(await failed(desk))
    assert text.startswith(f"BadAnswer: {desk.model.name} sent an answer that cannot be read")
    assert shown in text


SHAPES: list[dict[str, Any]] = [
    {},
    {"choices": [], "content": [], "candidates": []},
    {"choices": None, "content": None, "candidates": None},
    {"choices": [{}], "content": [{}], "candidates": [{}]},
    {"choices": [{"message": None}], "content": [{"type": "text"}], "candidates": [{"content": {"parts": [{}]}}]},
    {"choices": "x", "content": "x", "candidates": "x"},
    {"error": {"message": "upstream broke"}},
]


@pytest.mark.parametrize("shape", SHAPES, ids=json.dumps)
@pytest.mark.parametrize("streaming", [False], indirect=True)
async def test_an_answer_of_another_shape_is_worth_another_try(desk: Any, shape: dict[str, Any]) -> None:
    desk.provider.sends(200, shape)
    assert type(await failed(desk)) is ModelUnavailable


@pytest.mark.parametrize("streaming", [False], indirect=True)
async def test_an_answer_that_is_nested_too_deeply_to_be_read_is_worth_another_try(desk: Any) -> None:
    desk.provider.sends(200, b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    error = await failed(desk)
    assert (type(error), error.billed) == (ModelUnavailable, True)
    assert "nested too deeply" in str(error)


async def test_an_answer_that_is_nested_too_deeply_is_refused_before_a_library_reads_it(desk: Any) -> None:
    """A collection near the limit of recursion fails every finalizer that it calls."""
    nested = b"[" * 900 + b"]" * 900
    for body in (b'{"x": ' + nested + b"}", b'{"usage": ' + nested + b"}"):
        desk.provider.sends(200, body)
        assert "nested too deeply" in str(await failed(desk))


async def test_a_stream_that_is_nested_too_deeply_is_refused_before_a_library_reads_it(streamed: Any) -> None:
    streamed.provider.sends(200, b'data: {"x": ' + b"[" * 900 + b"]" * 900 + b"}\n\n", "text/event-stream")
    assert "nested too deeply" in str(await failed(streamed))


async def test_an_answer_with_many_brackets_in_its_text_is_read(desk: Any) -> None:
    desk.provider.says("[{" * 2_000)
    assert (await desk.ask()).text == "[{" * 2_000


GARBAGE = [
    b"data: {broken\n\n",
    b'data: {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n",
    b"data: 7\n\n",
    b"data: null\n\n",
    b"data: [1]\n\n",
    b": only a comment\n\n",
    b"data: \n\n",
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_stream_that_nobody_can_read_is_worth_another_try(streamed: Any, garbage: bytes) -> None:
    streamed.provider.sends(200, garbage, "text/event-stream")
    error = await failed(streamed)
    assert type(error) is ModelUnavailable
    assert error.billed


IN_STREAM = {
    "responses": b'data: {"type":"error","code":"server_error","message":"Too many.","sequence_number":0}\n\n',
    "openai": b'data: {"error":{"message":"Too many.","type":"server_error","code":"server_error"}}\n\n',
    "anthropic": b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Too many."}}\n\n',
    "google": b'data: {"error":{"code":503,"message":"Too many.","status":"UNAVAILABLE"}}\n\n',
}


async def test_an_error_inside_a_stream_is_worth_another_try(streamed: Any) -> None:
    streamed.provider.sends(200, IN_STREAM[streamed.wire], "text/event-stream")
    error = await failed(streamed)
    assert type(error) is ModelUnavailable
    assert "Too many." in str(error)


async def test_a_request_that_is_cancelled_lets_go_of_its_connection(desk: Any) -> None:
    desk.provider.says("I will ", "look.", until="text", hang=True)
    asking = asyncio.create_task(desk.ask())
    await asyncio.wait_for(desk.provider.hanging.wait(), 10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(desk.provider.gone.wait(), 10)


async def test_a_provider_that_hangs_is_left_at_the_deadline(desk: Any) -> None:
    desk.provider.says("I will ", "look.", until="text", hang=True)
    asking = asyncio.create_task(desk.ask())
    await asyncio.wait_for(desk.provider.hanging.wait(), 10)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asking
    await asyncio.wait_for(desk.provider.gone.wait(), 10)


async def test_after_a_cut_stream_the_next_request_is_answered(streamed: Any) -> None:
    streamed.provider.says("I will ", "look.", until="text", abort=True)
    await failed(streamed)
    streamed.provider.says("It is seven.")
    assert (await streamed.ask()).text == "It is seven."


async def test_no_error_tells_the_key(desk: Any) -> None:
    key = desk.provider.key
    for status in (400, 401, 429, 500):
        desk.provider.refuses(status, f"Incorrect API key provided: {key}. " + "Long. " * 200)
        error = await failed(desk)
        assert key not in str(error)
        assert "***" in str(error)
        assert len(str(error)) < 500


MEGABYTE = 1 << 20


async def test_an_answer_without_end_is_not_read_to_its_end(desk: Any) -> None:
    desk.provider.says("x" * 2 * MEGABYTE)
    bounded = desk.reach(desk.model.name, terms=ExchangeTerms(max_bytes=MEGABYTE))
    error = await failed(desk, bounded)
    await bounded.aclose()
    assert type(error) is ModelUnavailable
    assert error.billed
    assert "too long" in str(error)
    assert len((await desk.ask()).text) == 2 * MEGABYTE


async def test_little_that_unpacks_to_much_is_not_unpacked_to_its_end(streamed: Any) -> None:
    streamed.provider.says("x" * 2 * MEGABYTE)
    packed = gzip.compress(streamed.provider.written(streamed.wire))
    streamed.provider.sends(200, packed, "text/event-stream", content_encoding="gzip")
    bounded = streamed.reach(streamed.model.name, terms=ExchangeTerms(max_bytes=MEGABYTE))
    error = await failed(streamed, bounded)
    await bounded.aclose()
    assert type(error) is ModelUnavailable
    assert error.billed
    assert len((await streamed.ask()).text) == 2 * MEGABYTE

"""The real SDKs through the proxy: they get their answers, and the journal gets what they cost."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from halter.core.events import RequestSettled, RequestStarted, SessionStarted
from halter.net.proxies import find_proxy

CLAUDE, GPT = "claude-haiku-5-5", "gpt-4o-mini"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def claude(result: Any, key: str, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key=key, base_url=result.root, **options)


def gpt(result: Any, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=result.base, **options)


async def test_messages_with_a_tool_call_streamed_and_whole(place: Any) -> None:
    client = claude(place, place.key())
    tools: Any = [{"name": "lookup", "description": "Looks a city up.", "input_schema": SCHEMA}]
    messages: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]
    async with client.messages.stream(model=CLAUDE, max_tokens=500, tools=tools, messages=messages) as stream:
        first = await stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call: Any = first.content[0]
    assert call.input == {"city": "Oslo"}
    messages += [
        {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "seven"}]},
    ]
    whole: Any = await client.messages.create(model=CLAUDE, max_tokens=500, tools=tools, messages=messages)
    assert whole.content[0].text == "It is seven."
    await place.settled()
    assert await place.spent() == place.provider.billed > 0
    await client.close()


async def test_chat_completions_with_a_tool_call_streamed_and_whole(place: Any) -> None:
    client = gpt(place, place.key())
    tools: Any = [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(model=GPT, tools=tools, messages=messages, stream=True)
    ]
    assert all(chunk.choices for chunk in chunks), "the report that only the proxy asked for reached the client"
    deltas: Any = [chunk.choices[0].delta for chunk in chunks]
    call = next(delta.tool_calls[0] for delta in deltas if delta.tool_calls)
    assert call.function.arguments == '{"city": "Oslo"}'
    function = {"name": "lookup", "arguments": call.function.arguments}
    messages += [
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "seven"},
    ]
    whole = await client.chat.completions.create(model=GPT, tools=tools, messages=messages)
    assert whole.choices[0].message.content == "It is seven."
    await place.settled()
    assert await place.spent() == place.provider.billed > 0
    await client.close()


async def test_a_client_that_asks_for_its_usage_gets_it(place: Any) -> None:
    client = gpt(place, place.key())
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(
        model=GPT, messages=[{"role": "user", "content": "hi"}], stream=True, stream_options=options
    )
    assert [chunk.usage.completion_tokens async for chunk in stream if chunk.usage] == [40]
    await client.close()


async def test_responses_with_a_tool_call_streamed_and_whole(place: Any) -> None:
    client = gpt(place, place.key())
    tools: Any = [{"type": "function", "name": "lookup", "parameters": SCHEMA, "strict": True}]
    result: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]
    async with client.responses.stream(model=GPT, tools=tools, input=result) as stream:
        first = await stream.get_final_response()
    call: Any = first.output[0]
    assert call.arguments == '{"city": "Oslo"}'
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "seven"}
    call_item = call.model_dump(include={"type", "call_id", "name", "arguments"})
    whole = await client.responses.create(model=GPT, tools=tools, input=[*result, call_item, output])
    assert whole.output_text == "It is seven."
    await place.settled()
    assert await place.spent() == place.provider.billed > 0
    await client.close()


async def test_both_clients_list_the_models_that_a_key_may_ask(place: Any) -> None:
    key = place.key(models=("anthropic:claude-haiku-5-5", "openai:gpt-4o-mini"))
    async_anthropic, async_open_ai = claude(place, key), gpt(place, key)
    assert [model.id async for model in async_anthropic.models.list(limit=1000)] == [CLAUDE, GPT]
    assert [model.id async for model in async_open_ai.models.list()] == [CLAUDE, GPT]
    await async_anthropic.close()
    await async_open_ai.close()


async def test_counting_tokens_is_relayed_and_costs_nothing(place: Any) -> None:
    client = claude(place, place.key())
    tokens = await client.messages.count_tokens(model=CLAUDE, messages=[{"role": "user", "content": "hi"}])
    assert tokens.input_tokens > 0
    assert await place.spent() == 0
    assert not await place.events()
    await client.close()


async def test_the_body_the_query_and_the_betas_pass_untouched_and_the_key_does_not(place: Any) -> None:
    import httpx2

    key = place.key()
    body = (
        b'{ "model":"claude-haiku-5-5",\t"max_tokens" : 64, "metadata":{"b":1,"a":[1.50,"\\u00e9"]},'
        b'"messages":[{"role":"user","content":[{"type":"thinking","thinking":"x","signature":"c2ln"}]}]}'
    )
    headers = {"x-api-key": key, "anthropic-beta": "one,two", "anthropic-version": "2023-06-01", "x-app": "cli"}
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{place.root}/v1/messages?beta=true", content=body, headers=headers)
    assert answer.status_code == 200
    assert place.provider.bodies == [body]
    assert place.provider.paths == ["/v1/messages?beta=true"]
    (result,) = place.provider.headers
    assert (result["anthropic-beta"], result["anthropic-version"], result["x-app"]) == ("one,two", "2023-06-01", "cli")
    assert result["x-api-key"] == "sk-upstream-a"
    assert key not in str(result)


async def test_a_long_request_and_words_of_any_language_pass_untouched(place: Any) -> None:
    body = json.dumps({"model": CLAUDE, "max_tokens": 50, "messages": [{"role": "user", "content": "x" * 3_000_000}]})
    who = "Zoë, 東京".encode()
    async with httpx2.AsyncClient(timeout=60) as http:
        headers = {b"x-api-key": place.key(max_cost_usd_per_day=50).encode(), b"x-codex-who": who, b"accept": b"a/b"}
        response = await http.post(f"{place.root}/v1/messages", content=body.encode(), headers=headers)
    assert response.status_code == 200, response.text
    assert place.provider.bodies[-1] == body.encode()
    result = place.provider.headers[-1]
    assert result["x-codex-who"].encode("latin-1") == who
    assert (result["accept"], result["accept-encoding"]) == ("a/b", "identity")
    assert "content-type" not in result


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://api.openai.com/v1", "http://way:1"),
        ("http://127.0.0.1:9/v1", None),
        ("https://inside.example/v1", None),
    ],
)
def test_only_a_provider_outside_is_reached_over_the_proxy_of_the_environment(
    url: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("https_proxy", "http://way:1"),
        ("http_proxy", "http://way:2"),
        ("no_proxy", "inside.example"),
    ):
        monkeypatch.setenv(name, value)
    assert find_proxy(url) == found


async def test_secrets_are_masked_on_the_way_out_and_what_is_signed_stays(place: Any) -> None:
    import httpx2

    token, name = "ghp_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5", "claude-haiku-5-5"
    body = (
        b'{ "model":"%s",\t"max_tokens" : 64, "system":"the key is sk-upstream-o \\u00e9", "messages":['
        b'{"role":"assistant","content":[{"type":"thinking","thinking":"%s","signature":"c2ln"}]},'
        b'{"role":"user","content":"use %s\\nor \\"%s\\""}]}'
    ) % (name.encode(), *(token.encode(),) * 3)
    async with httpx2.AsyncClient(timeout=60) as http:
        for key in (place.key(mask_secrets=True), place.key("other")):
            for _ in range(2):
                assert (await http.post(f"{place.base}/messages", content=body, headers={"x-api-key": key})).is_success
    masked, result, *plain = place.provider.bodies
    assert plain == [body, body]
    assert masked == result
    assert b"sk-upstream-o" not in masked
    # The signed block has it still; the rest differs in nothing else.
    assert masked.count(token.encode()) == 1
    assert masked.startswith(b'{ "model":"claude-haiku-5-5",\t"max_tokens" : 64, "system":"the key is [redacted:')
    assert b'"thinking":"%s","signature":"c2ln"}]}' % token.encode() in masked
    assert json.loads(masked)["messages"][1]["content"] == 'use [redacted:github]\nor "[redacted:github]"'


async def test_the_stream_reaches_the_client_byte_for_byte(place: Any) -> None:
    import httpx2

    body = {"model": CLAUDE, "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with httpx2.AsyncClient() as http:
        past = await http.post(f"http://127.0.0.1:{place.provider.port}/v1/messages", json=body)
        through = await http.post(f"{place.root}/v1/messages", json=body, headers={"x-api-key": place.key()})
    assert through.content == past.content


async def test_a_clients_sessions_are_sessions_of_the_keys_agent(place: Any) -> None:
    key = place.key("night")
    message: Any = [{"role": "user", "content": "hi"}]
    for label in ("one", "two", "one"):
        client = claude(place, key, default_headers={"X-Claude-Code-Session-Id": label})
        await client.messages.create(model=CLAUDE, max_tokens=50, messages=message)
        await client.close()
    rows = await place.sessions()
    assert [(row.agent, row.kind) for row in rows] == [("night", "proxied")] * 2
    result = await place.events(SessionStarted)
    assert all(event.started_by.startswith("key:night") for event in result)
    assert len(await place.events(RequestStarted)) == len(await place.events(RequestSettled)) == 3
    await place.stack.aclose()
    assert key.encode() not in await asyncio.to_thread(Path(place.settings.store).read_bytes)


async def test_sessions_end_with_their_proxy(place: Any) -> None:
    client = claude(place, place.key())
    await client.messages.create(model=CLAUDE, max_tokens=50, messages=[{"role": "user", "content": "hi"}])
    await client.close()
    await place.proxy._sessions.close()  # noqa: SLF001
    assert [(row.state, row.terminal_reason) for row in await place.sessions()] == [("COMPLETED", "completed")]


async def test_a_websocket_is_answered_so_that_codex_falls_back_immediately(place: Any) -> None:
    import websockets

    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(f"{place.base.replace('http', 'ws')}/responses"):
            pass
    assert refused.value.response.status_code == 426

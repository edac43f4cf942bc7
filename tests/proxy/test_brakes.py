"""What stops a client: a halt, a revoked key, a wait that is too long, each in words that its client obeys."""

import asyncio
import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.events import RequestSettled
from halter.guard.halts import cancel, halt, resume
from halter.proxy.proxy import find_upstreams
from halter.runtime.runtime import open_runtime

CLAUDE, GPT, OPUS = "claude-haiku-5-5", "gpt-4o-mini", "claude-opus-5-5"
HI: Any = [{"role": "user", "content": "hi"}]


async def stop(result: Any, scope: str) -> None:
    await result.app.store.commit(halt(scope, "ada", f"halt-{scope}", "it looks odd"))


async def begun(result: Any, streaming: Any) -> None:
    """Wait until a stream is under way, then halt the fleet."""
    await asyncio.wait_for(result.provider.reached_gate.wait(), 20)
    await stop(result, "fleet")


async def test_a_halt_ends_a_stream_of_messages_with_its_reason(place: Any) -> None:
    place.provider.gate = asyncio.Event()
    client = anthropic.AsyncAnthropic(api_key=place.key(), base_url=place.root)

    async def ask() -> None:
        async with client.messages.stream(model=OPUS, max_tokens=500, messages=HI) as stream:
            await stream.get_final_message()

    asking = asyncio.ensure_future(ask())
    await begun(place, asking)
    with pytest.raises(anthropic.APIStatusError, match="fleet was halted"):
        await asyncio.wait_for(asking, 10)
    (result,) = await place.events(RequestSettled)
    assert result.outcome == "external_halt"
    assert result.charge.usd >= place.provider.billed
    assert len(place.provider.requests) == 1
    await client.close()


async def test_a_halt_ends_a_stream_of_chat_completions_with_its_reason(place: Any) -> None:
    place.provider.gate = asyncio.Event()
    client = openai.AsyncOpenAI(api_key=place.key(), base_url=place.base)

    async def ask() -> None:
        async for _ in await client.chat.completions.create(model=GPT, messages=HI, stream=True):
            pass

    asking = asyncio.ensure_future(ask())
    await begun(place, asking)
    with pytest.raises(openai.APIError, match="fleet was halted") as error:
        await asyncio.wait_for(asking, 10)
    # By this word in the sentence alone, LiteLLM knows that it must not try again.
    assert "invalid_request_error" in error.value.message
    await client.close()


async def test_litellm_receives_a_stop_in_its_own_format(place: Any) -> None:
    """It tries again after the statuses at which other clients of Messages stop; aider and OpenHands ask with it."""
    place.provider.gate = asyncio.Event()
    headers = {"x-api-key": place.key(), "user-agent": "litellm/1.81.10"}
    ask: dict[str, Any] = {"model": CLAUDE, "max_tokens": 50, "messages": HI}
    async with httpx2.AsyncClient(base_url=place.root, headers=headers) as client:
        streaming = asyncio.ensure_future(client.post("/v1/messages", json={**ask, "stream": True}))
        await begun(place, streaming)
        response = await asyncio.wait_for(streaming, 10)
        refused = await client.post("/v1/messages", json=ask)
    assert "fleet was halted" in response.text
    assert "Client error '400 Bad Request'" in response.text
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "fleet" in refused.json()["error"]["message"]


async def test_a_halt_ends_a_stream_of_responses_as_failed(place: Any) -> None:
    place.provider.gate = asyncio.Event()
    client = openai.AsyncOpenAI(api_key=place.key(), base_url=place.base)

    async def ask() -> Any:
        return [event async for event in await client.responses.create(model=GPT, input="hi", stream=True)][-1]

    asking = asyncio.ensure_future(ask())
    await begun(place, asking)
    last = await asyncio.wait_for(asking, 10)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, "fleet was halted" in last.response.error.message) == ("invalid_prompt", True)
    await client.close()


async def test_what_is_halted_is_refused_once(place: Any) -> None:
    await stop(place, "agent:desk")
    key = place.key()
    async_anthropic = anthropic.AsyncAnthropic(api_key=key, base_url=place.root)
    with pytest.raises(anthropic.RateLimitError, match="agent:desk") as refused:
        await async_anthropic.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    assert refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(anthropic.RateLimitError, match="agent:desk"):
        await async_anthropic.messages.count_tokens(model=CLAUDE, messages=HI)
    async_open_ai = openai.AsyncOpenAI(api_key=key, base_url=place.base)
    with pytest.raises(openai.BadRequestError, match="agent:desk") as bad:
        await async_open_ai.chat.completions.create(model=GPT, messages=HI)
    assert bad.value.code == "halter_halted"
    assert not place.provider.requests
    await async_anthropic.close()
    await async_open_ai.close()


async def test_a_halted_session_continues_for_its_client_when_the_halt_is_lifted(place: Any) -> None:
    client = anthropic.AsyncAnthropic(api_key=place.key(), base_url=place.root)
    await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    (row,) = await place.sessions()
    await stop(place, f"session:{row.session}")
    with pytest.raises(anthropic.RateLimitError):
        await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    await place.app.store.commit(resume(f"session:{row.session}", "ada", "go on"))
    await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    (row,) = await place.sessions()
    assert row.ended_at is None
    await client.close()


async def test_a_cancelled_session_stays_ended_for_its_client(place: Any) -> None:
    client = anthropic.AsyncAnthropic(api_key=place.key(), base_url=place.root)
    await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    (row,) = await place.sessions()
    await place.app.store.commit(cancel(row.session, "ada", "c1"))
    for _ in range(2):
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    (row,) = await place.sessions()
    assert row.state == "CANCELLED"
    await client.close()


async def test_a_revoked_key_gets_a_stop_and_an_unknown_one_a_login_error(place: Any) -> None:
    secret = place.key()
    client = anthropic.AsyncAnthropic(api_key=secret, base_url=place.root)
    await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    (key,) = place.keys.read_keys()
    assert place.keys.revoke(key.name, 1)
    with pytest.raises(anthropic.RateLimitError, match="was revoked"):
        await client.messages.create(model=CLAUDE, max_tokens=50, messages=HI)
    async_open_ai = openai.AsyncOpenAI(api_key="sk-wrong", base_url=place.base)
    with pytest.raises(openai.AuthenticationError, match="unknown key"):
        await async_open_ai.models.list()
    assert len(place.provider.requests) == 1
    await client.close()
    await async_open_ai.close()


async def test_a_key_asks_only_its_own_models(place: Any) -> None:
    client = openai.AsyncOpenAI(api_key=place.key(models=("openai:gpt-4o-mini",)), base_url=place.base)
    await client.chat.completions.create(model=GPT, messages=HI)
    with pytest.raises(openai.BadRequestError, match="is not allowed for desk") as refused:
        await client.chat.completions.create(model="gpt-5", messages=HI)
    assert refused.value.code == "halter_refused"
    await client.close()


async def test_a_request_waits_for_money_that_others_hold_and_then_gets_a_time_to_retry(place: Any) -> None:
    place.provider.gate = asyncio.Event()
    place.proxy._guard._models._max_wait = SECOND // 5  # noqa: SLF001
    key = place.key(max_cost_usd_per_day="0.02")
    headers, body = {"x-api-key": key}, {"model": OPUS, "max_tokens": 100_000, "messages": HI}
    async with httpx2.AsyncClient(timeout=30) as http:
        first = asyncio.ensure_future(http.post(f"{place.base}/messages", json=body, headers=headers))
        await asyncio.wait_for(place.provider.reached_gate.wait(), 20)
        waits = await http.post(f"{place.base}/messages", json=body, headers=headers)
        assert (waits.status_code, waits.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(waits.headers["retry-after"]) <= 30
        assert "x-should-retry" not in waits.headers
        place.provider.gate.set()
        assert (await first).status_code == 200
        response = await http.post(f"{place.base}/messages", json=body, headers=headers)
    assert response.status_code == 200
    assert place.provider.billed <= await place.spent() <= 20_000


async def test_what_cannot_be_read_is_refused_before_anything_is_held(place: Any) -> None:
    key = place.key()
    async with httpx2.AsyncClient() as http:
        headers = {"authorization": f"Bearer {key}"}
        for body in (b"{", b"[]", b'{"max_tokens":5}', b'{"model":"gpt-5","max_tokens":"many"}'):
            answer = await http.post(f"{place.base}/chat/completions", content=body, headers=headers)
            assert answer.status_code == 400, body
        twice = b'{"model":"gpt-5","max_tokens":5,"max_tokens":50000,"messages":[]}'
        answer = await http.post(f"{place.base}/chat/completions", content=twice, headers=headers)
    assert "more than once" in answer.json()["error"]["message"]
    assert not place.provider.requests


async def test_a_compressed_body_is_read(place: Any) -> None:
    import gzip

    data = gzip.compress(json.dumps({"model": GPT, "messages": HI}).encode())
    headers = {"authorization": f"Bearer {place.key()}", "content-encoding": "gzip"}
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{place.base}/chat/completions", content=data, headers=headers)
    assert answer.status_code == 200
    assert place.provider.requests == [{"model": GPT, "messages": HI}]


async def test_a_proxy_without_a_provider_says_how_to_give_it_one(unopened: Any) -> None:
    async with open_runtime(unopened.settings, environ={}) as app:
        with pytest.raises(ConfigError, match="Set ANTHROPIC_API_KEY or OPENAI_API_KEY, or add a provider"):
            find_upstreams(app, "anthropic", "openai")

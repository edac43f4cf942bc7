"""What passes the proxy besides the body: the headers on a list, and stored answers only to the key that got them."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

GPT, CLAUDE = "gpt-4o-mini", "claude-haiku-5-5"
HI: Any = [{"role": "user", "content": "hi"}]
FOREIGN = {
    "api-key": "sk-mine",
    "x-goog-api-key": "sk-mine",
    "x-forwarded-for": "10.0.0.1",
    "x-forwarded-host": "other.example",
    "x-real-ip": "10.0.0.1",
    "anthropic-organization": "org-mine",
    "openai-organization": "org-mine",
    "cf-aig-authorization": "Bearer mine",
    "helicone-auth": "Bearer mine",
    "x-never-seen": "1",
}
KNOWN = {
    "anthropic-version": "2023-06-01",
    "x-stainless-lang": "python",
    "x-claude-code-session-id": "s1",
    "x-codex-turn-metadata": "{}",
    "session-id": "s1",
    "originator": "codex",
    "traceparent": "00-1-2-03",
    "user-agent": "claude-cli/2.1",
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses/input_tokens"])
async def test_only_headers_on_the_list_reach_a_provider(place: Any, path: str) -> None:
    body = {"model": CLAUDE if "messages" in path else GPT, "max_tokens": 50, "messages": HI}
    headers = {"authorization": f"Bearer {place.key()}", **FOREIGN, **KNOWN}
    async with httpx2.AsyncClient() as http:
        await http.post(f"{place.root}{path}", json=body, headers=headers)
    (sent,) = place.provider.headers
    assert not {*FOREIGN} & {*sent}
    assert {**sent, **KNOWN} == sent


async def test_betas_that_cost_without_a_price_do_not_pass(place: Any) -> None:
    betas = "one,fast-mode-2026-02-01, mcp-client-2025-11-20,server-side-fallback-2026-06-01,two"
    body = {"model": CLAUDE, "max_tokens": 50, "messages": HI}
    async with httpx2.AsyncClient() as http:
        headers = {"x-api-key": place.key(), "anthropic-beta": betas}
        await http.post(f"{place.base}/messages", json=body, headers=headers)
        await http.post(f"{place.base}/messages", json=body, headers={**headers, "anthropic-beta": "fast-mode-9"})
    assert [sent.get("anthropic-beta") for sent in place.provider.headers] == ["one,two", None]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stored_answer_is_read_only_with_the_key_that_got_it(place: Any, *, streams: bool) -> None:
    client = openai.AsyncOpenAI(api_key=place.key(), base_url=place.base)
    answer: Any = await client.responses.create(model=GPT, input="hi", stream=streams)
    if streams:
        async for _ in answer:
            pass
    stranger = place.key("other")
    routes = [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]
    async with httpx2.AsyncClient(base_url=place.base) as http:
        sent_count = len(place.provider.paths)
        for method, suffix in routes:
            foreign = await http.request(
                method, f"/responses/resp_1{suffix}", headers={"authorization": f"Bearer {stranger}"}
            )
            assert (foreign.status_code, "has no stored answer resp_1" in foreign.text) == (404, True), foreign.text
        assert len(place.provider.paths) == sent_count
        own = await http.get("/responses/resp_1", headers={"authorization": f"Bearer {client.api_key}"})
    assert own.status_code == 200
    assert place.provider.paths[-1] == "/v1/responses/resp_1"
    await client.close()


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"previous_response_id": "resp_of_nobody"},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
    ],
)
async def test_no_request_continues_the_stored_answer_of_another_key(place: Any, more: Any) -> None:
    client = openai.AsyncOpenAI(api_key=place.key(), base_url=place.base)
    await client.responses.create(model=GPT, input="hi")
    stranger = openai.AsyncOpenAI(api_key=place.key("other"), base_url=place.base)
    with pytest.raises(openai.NotFoundError, match="has no stored"):
        await stranger.responses.create(model=GPT, input="what was said?", **more)
    if more == {"previous_response_id": "resp_1"}:
        await client.responses.create(model=GPT, input="what was said?", **more)
    assert len(place.provider.requests) == (2 if more == {"previous_response_id": "resp_1"} else 1)
    await client.close()
    await stranger.close()


async def test_another_proxy_on_the_store_knows_whose_an_answer_is(place: Any) -> None:
    key = place.key()
    client = openai.AsyncOpenAI(api_key=key, base_url=place.base)
    await client.responses.create(model=GPT, input="hi")
    await client.close()
    await place.open()
    async with httpx2.AsyncClient(base_url=place.base) as http:
        own = await http.get("/responses/resp_1", headers={"authorization": f"Bearer {key}"})
        foreign = await http.get("/responses/resp_1", headers={"authorization": f"Bearer {place.key('other')}"})
    assert (own.status_code, foreign.status_code) == (200, 404)


async def test_an_answer_is_refused_when_it_is_no_longer_known_whose_it_is(place: Any) -> None:
    key = place.key()
    client = openai.AsyncOpenAI(api_key=key, base_url=place.base)
    await client.responses.create(model=GPT, input="hi")
    await client.close()
    await place.open()  # Another process, which remembers nothing itself.
    with closing(sqlite3.connect(place.settings.store)) as database:
        database.execute("UPDATE blobs SET put_at = 0")
        database.commit()
    await place.app.store.scrub()
    async with httpx2.AsyncClient(base_url=place.base) as http:
        own = await http.get("/responses/resp_1", headers={"authorization": f"Bearer {key}"})
    assert (own.status_code, "has no stored answer resp_1" in own.text) == (404, True)
    assert "/v1/responses/resp_1" not in place.provider.paths


async def test_each_request_is_in_the_trace_of_its_own_client(unopened: Any, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    await unopened.open(environ={"HALTER_TRACES": f"file:{file}"})
    callers = [f"00-{number:032x}-{number:016x}-01" for number in (1, 2)]
    secret = unopened.key()
    async with httpx2.AsyncClient() as http:
        for caller in callers:
            headers = {"authorization": f"Bearer {secret}", "session-id": "s1", "traceparent": caller}
            answer = await http.post(
                f"{unopened.base}/chat/completions", json={"model": GPT, "messages": HI}, headers=headers
            )
            assert answer.status_code == 200
    await unopened.stack.aclose()
    first, second, session = (json.loads(line) for line in file.read_text().splitlines())
    assert [span["name"] for span in (first, second, session)] == [f"chat {GPT}"] * 2 + ["invoke_agent desk"]
    assert [(int(span["context"]["trace_id"], 16), int(span["parent_id"], 16)) for span in (first, second)] == [
        (1, 1),
        (2, 2),
    ]
    # The session began with the first request, and both are linked to it.
    assert (int(session["context"]["trace_id"], 16), int(session["parent_id"], 16)) == (1, 1)
    ids = {link["context"]["span_id"] for span in (first, second) for link in span["links"]}
    assert ids == {session["context"]["span_id"]}
    assert first["attributes"]["gen_ai.response.model"].startswith(GPT)

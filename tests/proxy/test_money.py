"""No cap is passed through the proxy, and what is settled is never less than what the provider bills."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import msgspec
import openai
import pytest

from halter.core.events import RequestRefused, RequestSettled, RequestStarted
from halter.core.usage import ModelName
from halter.external.dialect import ENVELOPE_TOKENS, IMAGE_TOKENS, MESSAGES, RESPONSES, read_call
from halter.models.price_tables import PriceTables, add_file
from halter.models.tariffs import MARGIN

CLAUDE, GPT, OPUS = "claude-haiku-5-5", "gpt-4o-mini", "claude-opus-5-5"
HI: Any = [{"role": "user", "content": "hi"}]


async def post(result: Any, path: str, key: str, body: Any, **options: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as http:
        return await http.post(f"{result.root}{path}", json=body, headers={"authorization": f"Bearer {key}"}, **options)


async def test_twenty_parallel_requests_on_one_key_stay_below_its_cap(place: Any) -> None:
    place.provider.output = 300
    key = place.key(max_cost_usd_per_day="0.05")
    ask = {"model": OPUS, "max_tokens": 400, "messages": HI}
    answers = await asyncio.gather(*(post(place, "/v1/messages", key, ask) for _ in range(20)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 402}, statuses
    await place.settled()
    assert place.provider.billed <= await place.spent() <= 50_000
    assert statuses.count(200) == len(place.provider.requests)
    assert len(await place.events(RequestRefused)) == statuses.count(402)


async def test_a_loser_asks_exactly_once_with_the_real_clients(place: Any) -> None:
    key = place.key(max_cost_usd_per_day="0.0001")
    async_anthropic = anthropic.AsyncAnthropic(api_key=key, base_url=place.root)
    with pytest.raises(anthropic.APIStatusError, match="cap of agent:desk") as refused:
        await async_anthropic.messages.create(model=OPUS, max_tokens=400, messages=HI)
    result: Any = refused.value.body
    assert (refused.value.status_code, result["error"]["type"]) == (402, "billing_error")
    async_open_ai = openai.AsyncOpenAI(api_key=key, base_url=place.base)
    with pytest.raises(openai.BadRequestError, match="cap of agent:desk") as bad:
        await async_open_ai.chat.completions.create(model="gpt-5", messages=HI)
    assert bad.value.code == "halter_cap_reached"
    with pytest.raises(openai.BadRequestError):
        await async_open_ai.responses.create(model="gpt-5", input="hi")
    assert len(await place.events(RequestRefused)) == 3
    assert not place.provider.requests
    await async_anthropic.close()
    await async_open_ai.close()


async def test_the_output_is_lowered_to_what_fits_and_nothing_else_changes(place: Any) -> None:
    key = place.key(max_cost_usd_per_day="0.10")
    ask = {"model": OPUS, "max_tokens": 128_000, "metadata": {"max_tokens": 128_000}, "messages": HI}
    answer = await post(place, "/v1/messages", key, ask)
    assert answer.status_code == 200, answer.text
    (result,) = place.provider.requests
    assert 256 < result["max_tokens"] < 5000
    assert {**result, "max_tokens": 128_000} == ask
    assert len(place.provider.bodies[0]) < len(json.dumps(ask))


async def test_a_thinking_budget_stays_below_the_lowered_output(place: Any) -> None:
    key = place.key(max_cost_usd_per_day="0.10")
    thinking = {"type": "enabled", "budget_tokens": 60_000}
    ask = {"model": OPUS, "max_tokens": 128_000, "thinking": thinking, "messages": HI}
    answer = await post(place, "/v1/messages", key, ask)
    assert answer.status_code == 200, answer.text
    (result,) = place.provider.requests
    assert 1024 <= result["thinking"]["budget_tokens"] < result["max_tokens"] < 5000


@pytest.mark.parametrize(
    ("path", "name", "ask"),
    [
        ("/v1/chat/completions", "max_completion_tokens", {"messages": HI}),
        ("/v1/responses", "max_output_tokens", {"input": "hi"}),
    ],
)
async def test_where_a_client_sets_no_limit_one_is_written_that_fits(
    place: Any, path: str, name: str, ask: Any
) -> None:
    key = place.key(max_cost_usd_per_day="0.05")
    assert (await post(place, path, key, {"model": "gpt-5", **ask})).status_code == 200
    (result,) = place.provider.requests
    assert 256 < result.pop(name) < 10_000
    assert result == {"model": "gpt-5", **ask}


@pytest.mark.parametrize(
    ("member", "names"),
    [
        ('"tools":[{"name":"t","input_schema":{"properties":{"prompt":{"type":"string"},"conversation":{}}}}]', False),
        ('"prompt":null', False),
        ('"prompt":{"id":"p"}', True),
        ('"conversation":"c"', True),
        ('"previous_response_id":"r"', True),
        ('"input":[{"type":"input_file","file_id":"f"}]', True),
        ('"messages":[{"content":[{"type":"tool_use","input":{"url":"https://example.com"}}]}]', False),
        ('"messages":[{"content":"It is served as application/pdf."}]', False),
        ('"messages":[{"content":[{"source":{"type":"url","url":"https://a.example/b.png"}}]}]', True),
        ('"messages":[{"content":[{"source":{"media_type":"application/pdf","data":"aa"}}]}]', True),
        ('"messages":[{"content":[{"image_url":{"detail":"low","url":"https://a.example/b.png"}}]}]', True),
        ('"input":[{"content":[{"image_url":"https://a.example/b.png"}]}]', True),
        ('"input":[{"content":[{"image_url":" HTTPS://a.example/b.png"}]}]', True),
        ('"input":[{"content":[{"file":{"file_data":"data:application/pdf;base64,aa"}}]}]', True),
        (r'"messages":[{"content":[{"source":{"type":"\u0075rl","\u0075rl":"https:\/\/a.example"}}]}]', True),
        (r'"messages":[{"content":[{"source":{"media_type":"application\/pdf","data":"aa"}}]}]', True),
        (r'"messages":[{"content":"\u0022type\u0022:\u0022url\u0022"}]', False),
    ],
)
def test_only_what_a_provider_keeps_is_bounded_by_the_whole_window(member: str, *, names: bool) -> None:
    body = f'{{"model":"gpt-5",{member}}}'
    call = read_call(RESPONSES, body.encode())
    assert call.bound_input(1_000_000) == (1_000_000 if names else len(body) + ENVELOPE_TOKENS)


SIGHT = "Ab1/" * 10_000


@pytest.mark.parametrize(
    ("shown", "images"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SIGHT}}, 1),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SIGHT}"}}, 1),
        ({"type": "input_image", "image_url": f"data:image/png;base64,{SIGHT}"}, 1),
        ({"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": SIGHT}}]}, 1),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "Ab1/"}}, 1),
        ({"type": "tool_use", "input": {"type": "image", "source": {"type": "base64", "data": SIGHT}}}, 0),
        ({"type": "tool_use", "input": {"content": [{"type": "image", "source": {"data": SIGHT}}]}}, 0),
        ({"type": "text", "text": f'"data": "{SIGHT}" is base64'}, 0),
        ({"type": "text", "text": f"data:image/png;base64,{SIGHT}"}, 0),
    ],
)
def test_only_an_image_that_is_shown_counts_as_one(shown: dict[str, Any], images: int) -> None:
    body = json.dumps({"model": "gpt-5", "messages": [{"role": "user", "content": [shown]}]}).encode()
    bound = read_call(RESPONSES, body).bound_input(1_000_000)
    assert bound >= IMAGE_TOKENS if images else bound == len(body) + ENVELOPE_TOKENS
    assert bound < IMAGE_TOKENS + 1000 + ENVELOPE_TOKENS or not images


@pytest.mark.parametrize(
    "member",
    [
        r'"tools":[{"type":"web_f\u0065tch_20250910"}]',
        r'"tools":[{"t\u0079pe":"web_search_20250305"}]',
        r'"max_output_tokens":5,"max\u005Foutput_tokens":90000',
        r'"input":[{"type":"input_\u0061udio"}]',
        r'"tools":[{"type":"web_search_20250305","max_uses":90,"max\u005fuses":1}]',
    ],
)
def test_a_letter_that_is_written_as_its_number_hides_nothing(member: str) -> None:
    assert read_call(RESPONSES, f'{{"model":"gpt-5",{member}}}'.encode()).unpriced_part


@pytest.mark.parametrize(
    "member",
    [
        '"service_tier":"priority","service_tier":"default"',
        '"background":true,"background":false',
        '"max_tool_calls":90,"max_tool_calls":1',
        '"speed":"fast","speed":null',
    ],
)
def test_what_decides_about_money_is_written_once(member: str) -> None:
    """The attack: a provider that reads the first of two members does what the last one hides."""
    assert "more than once" in read_call(RESPONSES, f'{{"model":"gpt-5",{member}}}'.encode()).unpriced_part


def test_source_code_with_escapes_beside_a_tool_that_names_a_model_is_read() -> None:
    tool = {"name": "delegate", "input_schema": {"properties": {"model": {"type": "string"}}}}
    body = {"model": "gpt-5", "tools": [tool], "messages": [{"role": "user", "content": r"print('\u0041')"}]}
    assert read_call(MESSAGES, json.dumps(body).encode()).unpriced_part == ""


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def test_a_tool_of_the_caller_that_speaks_of_uses_takes_no_limit_from_a_search() -> None:
    coupon = {"name": "coupon", "input_schema": {"type": "object", "properties": {"max_uses": {"type": "integer"}}}}
    used = {"type": "tool_use", "id": "t", "name": "coupon", "input": {"max_uses": 2}}
    body = {"model": "gpt-5", "tools": [coupon, SEARCH], "messages": [{"role": "assistant", "content": [used]}]}
    call = read_call(MESSAGES, json.dumps(body).encode())
    assert (call.unpriced_part, call.searches) == ("", 3)


@pytest.mark.parametrize(
    "tools",
    [
        '"tools":[{"type":"web_search_20250305","max_uses":90,"max_uses":1}]',
        '"tools":[{"type":"web_search_20250305","max_uses":90}],"tools":[{"type":"web_search_20250305","max_uses":1}]',
        '"tools":[{"type":"web_search_20250305","max_uses":1,"type":"custom"}]',
        '"tools":[{"type":"web_search_20250305"},{"type":"web_search_20250305","max_uses":1}]',
        '"tools":[{"type":"web_search_1","max_uses":90,"type":"custom"},{"type":"web_search_1","max_uses":1}]',
    ],
)
def test_a_search_whose_limit_could_be_read_otherwise_has_none(tools: str) -> None:
    assert "search" in read_call(MESSAGES, f'{{"model":"gpt-5",{tools}}}'.encode()).unpriced_part


async def test_several_answers_share_what_is_held(place: Any) -> None:
    key = place.key(max_cost_usd_per_day="0.05")
    ask = {"model": "gpt-5", "n": 4, "max_completion_tokens": 100_000, "messages": HI}
    assert (await post(place, "/v1/chat/completions", key, ask)).status_code == 200
    assert place.provider.requests[0]["max_completion_tokens"] * 4 * 10 <= 50_000


@pytest.mark.parametrize("path", ["embeddings", "images/generations", "audio/speech", "messages/batches", "batches"])
async def test_routes_without_a_price_are_refused(place: Any, path: str) -> None:
    answer = await post(place, f"/v1/{path}", place.key(), {"model": "m"})
    assert answer.status_code == 400
    assert f"POST /{path} has no known price" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert not place.provider.requests


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"service_tier": "priority"}),
        ("/v1/messages", {"speed": "fast"}),
        ("/v1/messages", {"inference_geo": "us"}),
        ("/v1/messages", {"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]}),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("/v1/responses", {"background": True}),
        ("/v1/responses", {"tools": [{"type": "image_generation"}]}),
        ("/v1/chat/completions", {"modalities": ["text", "audio"]}),
    ],
)
async def test_what_has_no_price_is_refused(place: Any, path: str, more: Any) -> None:
    model = CLAUDE if "messages" in path else GPT
    body = {"model": model, "max_tokens": 100, "messages": HI, **more}
    answer = await post(place, path, place.key(), body)
    assert answer.status_code == 400
    assert "cannot serve this request" in answer.json()["error"]["message"]
    assert not place.provider.requests


UNHEARD_OF = {"messages": "claude-unheard-of-9", "chat/completions": "gpt-9", "responses": "made-up-1"}


def make_request(path: str) -> dict[str, Any]:
    content = {"input": "hi"} if path == "responses" else {"messages": HI, "max_tokens": 100}
    return {"model": UNHEARD_OF[path], **content}


@pytest.mark.parametrize("path", UNHEARD_OF)
async def test_a_model_without_a_price_is_refused_in_words_that_begin_with_what_to_do(
    unopened: Any, tmp_path: Path, path: str
) -> None:
    fleet = tmp_path / "halter.yaml"
    fleet.write_text("policy: {unknown_price: refuse}\n")
    unopened.settings = msgspec.structs.replace(unopened.settings, fleet=fleet)
    await unopened.open()
    answer = await post(unopened, f"/v1/{path}", unopened.key(), make_request(path))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert answer.headers["x-should-retry"] == "false"
    assert error["message"].startswith("Halter: Run `halter prices update`, or set the price in halter.yaml")
    assert f"{UNHEARD_OF[path]} is not known" in error["message"]
    assert "unknown_price: dearest" in error["message"]
    assert not unopened.provider.requests


@pytest.mark.parametrize("path", UNHEARD_OF)
async def test_a_model_without_a_price_is_held_and_charged_at_a_guess_that_is_said(place: Any, path: str) -> None:
    answer = await post(place, f"/v1/{path}", place.key(), make_request(path))
    assert answer.status_code == 200
    await place.settled()
    (started,) = await place.events(RequestStarted)
    assert started.guess.startswith("priced at a guess until the price table knows it: $")
    assert started.guess in await place.sentences()
    (settled,) = await place.events(RequestSettled)
    name = ModelName("anthropic" if path == "messages" else "openai", UNHEARD_OF[path])
    guess = PriceTables().guess(name, None, MARGIN)
    assert guess is not None
    assert settled.charge.usd == guess.tariff.cost(settled.usage, 0)
    assert await place.spent() == settled.charge.usd > 0


async def test_a_guess_that_was_charged_stays_charged_when_the_table_knows_the_model(place: Any) -> None:
    key, request = place.key(), make_request("messages")
    assert (await post(place, "/v1/messages", key, request)).status_code == 200
    await place.settled()
    guessed = await place.spent()
    table = [
        {
            "id": "anthropic",
            "name": "Anthropic",
            "api_pattern": "",
            "models": [
                {
                    "id": request["model"],
                    "match": {"equals": request["model"]},
                    "prices": {"input_mtok": 1, "output_mtok": 2},
                }
            ],
        }
    ]
    place.app.prices.tables.use(add_file(None, json.dumps(table).encode(), "test", 0))
    assert (await post(place, "/v1/messages", key, request)).status_code == 200
    await place.settled()
    last, first = [event.charge.usd for event in (await place.events(RequestSettled))[::-1]]
    assert guessed == first > last
    assert await place.spent() == first + last


async def test_cache_writes_for_an_hour_cost_what_they_cost(place: Any) -> None:
    place.provider.extra_usage = {"cache_creation": {"ephemeral_1h_input_tokens": 10_000}}
    key = place.key()
    block = {"type": "text", "text": "x" * 12_000, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ask = {"model": OPUS, "max_tokens": 100, "messages": [{"role": "user", "content": [block]}]}
    answer = await post(place, "/v1/messages", key, ask)
    assert answer.status_code == 200, answer.text
    (result,), (settled,) = await place.events(RequestStarted), await place.events(RequestSettled)
    assert settled.usage.cache_write_1h_tokens == 10_000
    assert settled.charge.usd == place.provider.billed >= 80_000
    assert max(leg.amount for leg in result.legs if leg.unit == "usd") >= settled.charge.usd


async def test_a_client_that_hangs_up_is_settled_at_what_the_provider_billed(place: Any) -> None:
    place.provider.gate = asyncio.Event()
    body = {"model": OPUS, "max_tokens": 5000, "stream": True, "messages": HI}
    headers = {"x-api-key": place.key()}
    async with (
        httpx2.AsyncClient() as http,
        http.stream("POST", f"{place.base}/messages", json=body, headers=headers) as answer,
    ):
        async for _ in answer.aiter_bytes():
            break
    await asyncio.wait_for(place.provider.reached_gate.wait(), 10)
    assert await place.holds()
    place.provider.gate.set()
    await place.settled()
    assert place.provider.finished == 1
    (result,) = await place.events(RequestSettled)
    assert result.outcome == "ok"
    assert result.charge.usd == place.provider.billed


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_an_answer_that_breaks_off_settles_at_its_longest_and_says_so(place: Any, path: str) -> None:
    place.provider.cut_after = 3
    content = {"input": HI, "max_output_tokens": 500} if "responses" in path else {"messages": HI, "max_tokens": 500}
    ask = {"model": OPUS if "messages" in path else "gpt-5", **content}
    answer = await post(place, path, place.key(), {**ask, "stream": True})
    assert answer.status_code == 200
    assert "was lost" in answer.text or "before it was complete" in answer.text
    await place.settled()
    (result,) = await place.events(RequestSettled)
    assert result.outcome == "error"
    assert result.charge.usd >= place.provider.billed


async def test_an_error_of_the_provider_passes_as_it_is_and_costs_nothing(place: Any) -> None:
    place.provider.status = 529
    answer = await post(place, "/v1/messages", place.key(), {"model": CLAUDE, "max_tokens": 100, "messages": HI})
    assert (answer.status_code, answer.json()["error"]["message"]) == (529, "Not now.")
    await place.settled()
    assert await place.spent() == 0

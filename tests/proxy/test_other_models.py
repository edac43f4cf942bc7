"""A provider that would run another model, or bill what nobody held: refused by name, or settled at what it costs."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from halter.core.events import RequestRefused, RequestSettled, RequestStarted
from halter.core.ports import Query
from halter.core.rows import HaltRow
from halter.core.usage import ModelName
from halter.external.dialect import CHAT, MESSAGES, RESPONSES, find_rates, read_call
from halter.guard.halts import read_halts
from halter.models.prices import Prices
from halter.models.usage_reader import UsageReader
from halter.operations import control
from halter.operations.actor import Actor, Principal
from halter.operations.queries import read_needs

CLAUDE, GPT = "claude-haiku-5-5", "gpt-4o-mini"
HI: Any = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/messages": CLAUDE, "/v1/chat/completions": GPT, "/v1/responses": GPT}


async def post(place: Any, path: str, key: str, more: Any) -> httpx2.Response:
    content = {"input": HI} if "responses" in path else {"messages": HI}
    limit = {"max_output_tokens" if "responses" in path else "max_tokens": 100}
    async with httpx2.AsyncClient(timeout=60) as http:
        body = {"model": PATHS[path], **limit, **content, **more}
        return await http.post(f"{place.root}{path}", json=body, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("models", ["gpt-5-pro"]),
        ("route", "fallback"),
        ("plugins", [{"id": "web"}]),
        ("provider", {"order": ["dear"]}),
        ("preset", "dear"),
        ("google_search", {}),
        ("search_parameters", {"mode": "on"}),
        ("enable_search", True),
        ("fallbacks", [{"model": "claude-opus-5-5"}]),
        ("mcp_servers", []),
        ("extra_body", {"models": ["gpt-5-pro"]}),
        ("prediction", {"type": "content", "content": "x"}),
        ("never_seen", None),
    ],
)
async def test_a_member_that_is_not_known_is_refused_by_its_name(place: Any, path: str, name: str, value: Any) -> None:
    answer = await post(place, path, place.key(), {name: value})
    assert answer.status_code == 400, answer.text
    assert f"`{name}`" in answer.text
    assert "--allow-member" in answer.text
    assert not place.provider.requests
    assert len(await place.events(RequestRefused)) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "tool",
    [
        {"type": "openrouter:web_search"},
        {"google_search": {}},
        {"googleSearch": {}},
        {"type": "advisor_20260301", "name": "advisor"},
        {"type": "never_seen_1"},
        {"type": "namespace", "name": "n", "tools": [{"type": "openrouter:web_search"}]},
    ],
)
async def test_a_tool_that_is_not_known_is_refused_by_its_name(place: Any, path: str, tool: Any) -> None:
    answer = await post(place, path, place.key(), {"tools": [tool]})
    assert answer.status_code == 400, answer.text
    name = (tool.get("tools") or [tool])[0].get("type") or next(iter(tool))
    assert name in answer.text
    assert not place.provider.requests


def test_a_tool_that_is_named_twice_or_stands_in_the_input_is_found() -> None:
    twice = '{"model":"m","tools":[{"type":"openrouter:web_search","type":"function"}]}'
    assert "more than once" in read_call(CHAT, twice.encode()).unpriced_part
    added = '{"model":"m","input":[{"type":"additional_tools","tools":[{"type":"openrouter:web_search"}]}]}'
    assert read_call(RESPONSES, added.encode()).unknown_tools == ("openrouter:web_search",)
    said = '{"type":"custom_tool_call_output","output":"x"},{"type":"local_shell_call"},{"role":"user","content":"hi"}'
    beside = f'{{"model":"m","input":[{{"type":"additional_tools","tools":[{{"type":"custom"}}]}},{said}]}}'
    assert read_call(RESPONSES, beside.encode()).unknown_tools == ()
    known = '{"model":"m","tools":[{"name":"t","input_schema":{}},{"type":"bash_20250124","name":"bash"}]}'
    assert read_call(MESSAGES, known.encode()).unknown_tools == ()


async def test_a_key_allows_a_member_that_a_person_named(place: Any) -> None:
    answer = await post(place, "/v1/chat/completions", place.key(allowed_members=("models",)), {"models": [GPT]})
    assert answer.status_code == 200, answer.text
    assert place.provider.requests[0]["models"] == [GPT]


def test_what_openrouter_documents_is_known_there_and_what_searches_is_not() -> None:
    url, prices, model = "https://openrouter.ai/api/v1", Prices(), ModelName("openrouter", "openai/gpt-4o-mini")
    known = read_call(CHAT, b'{"model":"openai/gpt-4o-mini","usage":{"include":true},"reasoning":{},"transforms":[]}')
    assert find_rates(known, model, url, prices) is None
    assert "`usage`" in str(find_rates(known, ModelName("openai", "gpt-4o-mini"), None, prices))
    online = read_call(CHAT, b'{"model":"openai/gpt-4o-mini:online"}')
    assert "online" in str(find_rates(online, ModelName("openrouter", online.model), url, prices))


def test_a_model_on_this_machine_takes_any_member() -> None:
    call = read_call(CHAT, b'{"model":"llama","chat_template_kwargs":{},"min_p":0.1}')
    assert find_rates(call, ModelName("vllm", "llama"), "http://127.0.0.1:8000/v1", Prices()) is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_another_model_is_settled_at_its_price_and_halts_the_key_alone(
    place: Any, path: str, *, streams: bool
) -> None:
    dear = "claude-opus-5-5" if "messages" in path else "gpt-5"
    key, other_key = place.key(), place.key()
    (scope, _) = (f"key:desk/{each.name}" for each in place.keys.read_keys())
    place.provider.answers_as = dear
    answer = await post(place, path, key, {"stream": streams})
    assert answer.status_code == 200, answer.text
    await place.settled()
    assert place.provider.billed > 0
    assert await place.spent() == place.provider.billed
    async with asyncio.timeout(10):
        while not (halts := await read_halts(place.app.store, [scope])):  # noqa: ASYNC110 The proxy halts it.
            await asyncio.sleep(0.01)
    (halted,) = halts.values()
    assert halted.halted
    assert dear in halted.reason
    place.provider.answers_as = ""
    assert "halted" in (await post(place, path, key, {})).text
    assert (await post(place, path, other_key, {})).status_code == 200
    actor = Actor(place.app, Principal("ada"))
    (need,) = [each for each in await read_needs(actor) if each.kind == "halt"]
    assert (need.commands, need.why) == ((f"halter resume {scope}",), halted.reason)
    await control.resume(actor, scope)
    assert (await post(place, path, key, {})).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_model_without_a_price_settles_at_the_hold_and_halts_the_key(
    unopened: Any, tmp_path: Path, path: str, *, streams: bool
) -> None:
    fleet = tmp_path / "halter.yaml"
    fleet.write_text("policy: {unknown_price: refuse}\n")
    unopened.settings = msgspec.structs.replace(unopened.settings, fleet=fleet)
    await unopened.open()
    started, settled = await answer_as_another(unopened, path, streams=streams)
    assert await unopened.spent() == max(leg.amount for leg in started.legs if leg.unit == "usd") > 0
    assert settled.usage.unpriced == "model: dear-one"
    assert "model: dear-one" in await unopened.sentences()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_model_without_a_price_settles_at_a_guess_and_halts_the_key(
    place: Any, path: str, *, streams: bool
) -> None:
    """Where unknown prices are guessed, which is the default of the proxy."""
    started, settled = await answer_as_another(place, path, streams=streams)
    assert settled.usage.answered_by == "dear-one"
    assert await place.spent() >= max(leg.amount for leg in started.legs if leg.unit == "usd") > 0


async def answer_as_another(place: Any, path: str, *, streams: bool) -> tuple[Any, Any]:
    """Let a model that no table knows answer. The key is halted; return how the request began and was settled."""
    place.provider.answers_as = "dear-one"
    assert (await post(place, path, place.key(max_cost_usd_per_day=5), {"stream": streams})).status_code == 200
    await place.settled()
    (started,), (settled,) = await place.events(RequestStarted), await place.events(RequestSettled)
    assert await place.app.store.ask(Query("halts_standing", HaltRow))
    return started, settled


async def test_a_key_that_names_the_model_that_answers_is_not_halted(place: Any) -> None:
    place.provider.answers_as = "gpt-5"
    key = place.key(models=(f"openai:{GPT}", "openai:gpt-5"))
    for _ in range(2):
        assert (await post(place, "/v1/chat/completions", key, {})).status_code == 200
    assert await place.spent() == place.provider.billed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_place_that_costs_more_is_charged(place: Any, path: str, *, streams: bool) -> None:
    place.provider.extra_usage = {"inference_geo": "us"}
    assert (await post(place, path, place.key(), {"stream": streams})).status_code == 200
    await place.settled()
    assert await place.spent() == place.provider.billed > 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("report", "name"),
    [
        ({"dear_tokens": 9}, "dear_tokens"),
        ({"details": {"dear": {"tokens": 9}}}, "details.dear.tokens"),
        ({"service_tier": "priority"}, "service_tier: priority"),
        ({"inference_geo": "moon"}, "inference_geo: moon"),
    ],
)
async def test_a_reported_member_that_is_not_known_settles_at_the_hold(
    place: Any, path: str, report: Any, name: str, *, streams: bool
) -> None:
    place.provider.extra_usage = report
    assert (await post(place, path, place.key(max_cost_usd_per_day=5), {"stream": streams})).status_code == 200
    await place.settled()
    (started,), (settled,) = await place.events(RequestStarted), await place.events(RequestSettled)
    assert await place.spent() == max(leg.amount for leg in started.legs if leg.unit == "usd") > place.provider.billed
    assert settled.usage.unpriced == name
    assert f"`{name}`" in await place.sentences()


@pytest.mark.parametrize(("path", "version"), [("/v1/messages", "20261001"), ("/v1/chat/completions", "2024-07-18")])
async def test_a_dated_name_of_the_same_model_halts_nothing(place: Any, path: str, version: str) -> None:
    place.provider.answers_as = f"{PATHS[path]}-{version}"
    key = place.key()
    for _ in range(2):
        assert (await post(place, path, key, {})).status_code == 200


@pytest.mark.parametrize(
    ("usage", "micros"),
    [
        ('"cost":0.0123', 12_300),
        ('"cost":{"total_cost":0.5}', 500_000),
        ('"cost":0.01,"is_byok":true,"cost_details":{"upstream_inference_cost":0.02}', 30_000),
        ('"cost":0.01,"is_byok":false,"cost_details":{"upstream_inference_cost":0.02}', 10_000),
        ('"cost":-1', 0),
        ('"estimated_cost":0.0123', 12_300),
        ('"cost_in_usd_ticks":123000000', 12_300),
    ],
)
def test_a_reported_cost_is_read_in_the_forms_of_gateways(usage: str, micros: int) -> None:
    reader = UsageReader("openai")
    reader.feed(f'{{"model":"m","usage":{{"prompt_tokens":5,"completion_tokens":5,{usage}}}}}'.encode())
    reader.close()
    assert reader.usage is not None
    assert (reader.usage.reported_cost, reader.usage.unpriced, reader.final) == (micros, "", True)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_cost_that_the_provider_reports_is_charged_if_it_is_higher(place: Any, *, streams: bool) -> None:
    place.provider.reported_cost = 0.0123
    key = place.key()
    assert (await post(place, "/v1/chat/completions", key, {"stream": streams})).status_code == 200
    await place.settled()
    assert await place.spent() == 12_300
    place.provider.reported_cost = 0.0
    assert (await post(place, "/v1/chat/completions", key, {})).status_code == 200
    assert await place.spent() > 12_300

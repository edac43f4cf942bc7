"""Whole runs over a real socket: whatever a provider does, the answer is right, and every attempt is paid for once."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from library_bench import Bench, finished, shown

from halter import Agent, Result, StreamChunk
from halter.core.clock import SystemClock
from halter.core.money import micros_to_usd

ADDRESS = {"openai": "/v1", "anthropic": ""}
PRICE = {"price": {"input": 2, "cache_read": 0.5, "output": 10}}


class Desk:
    """An agent whose models are reached over one wire, and whoever listens to it."""

    def __init__(self, folder: Path, wire: str, provider: Any) -> None:
        self.bench = Bench(folder)
        self.provider = provider
        self.wire = wire
        self.chunks: list[StreamChunk] = []
        self.read: list[str] = []

    def agent(self, **more: Any) -> Agent:
        values = {"wire": self.wire, "base_url": f"http://127.0.0.1:{self.provider.port}{ADDRESS[self.wire]}"}
        provider = {**values, "api_key": "${secret:MADE_UP}"}
        agent = self.bench.agent(
            model="mine:big",
            providers={"mine": provider},
            secrets={"MADE_UP": self.provider.key},
            fleet={"models": {"mine:big": PRICE, "mine:small": PRICE}},
            **more,
        )

        @agent.tool(level="SAFE", effect="read")
        async def read_file(path: str) -> str:
            """Read a file."""
            self.read.append(path)
            return f"{path} is empty"

        return agent

    async def run(self, **more: Any) -> Result[str]:
        """Run a task as a stream; whatever happens, its money adds up and each attempt ends once."""
        result = None
        async for item in self.agent(**more).stream("What is in app.log?", kind="task"):
            if isinstance(item, StreamChunk):
                self.chunks.append(item)
            else:
                result = item
        assert result is not None
        finished(self.chunks)
        self.bench.balanced(result)
        return result

    @property
    def attempts(self) -> list[tuple[str, str, str]]:
        settled = {fact["request"]: fact for fact in self.bench.facts("request_settled")}
        started = self.bench.facts("request_started")
        return [
            (
                fact["model"],
                settled[fact["request"]]["outcome"],
                settled[fact["request"]].get("error", "").split(":")[0],
            )
            for fact in started
        ]


@pytest.fixture(params=["openai", "anthropic"])
def wire(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(tmp_path: Path, wire: str, provider: Any) -> Desk:
    return Desk(tmp_path, wire, provider)


async def test_answers_that_cannot_be_read_until_the_money_is_used_up_are_quoted_without_secrets(run: Desk) -> None:
    token = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2
    body = f"<html>Sign in as {token} or {run.provider.key}. {'x' * 5000}</html>".encode()
    for _ in range(4):
        run.provider.sends(200, body, "text/html")
    result = await run.run(max_cost_usd=0.1)
    assert (result.state, result.terminal_reason) == ("ERROR", "model_error")
    assert "sent an answer that cannot be read" in result.sentence
    assert "<html>Sign in as" in result.sentence
    assert "without a usable answer were charged, so no further one fits" in result.sentence
    assert token[:12] not in result.sentence + str(run.bench.facts("request_settled"))
    assert run.provider.key not in result.sentence + str(run.bench.facts("request_settled"))


@pytest.mark.parametrize("name", ["azure", "bedrock", "openrouter", "groq", "mistral", "deepseek", "together"])
async def test_a_provider_of_openais_protocol_is_asked_by_its_own_name(
    tmp_path: Path, provider: Any, name: str
) -> None:
    provider.says("Yes.")
    values = {"base_url": f"http://127.0.0.1:{provider.port}/v1", "api_key": "${secret:MADE_UP}"}
    bench = Bench(tmp_path)
    agent = bench.agent(
        model=f"{name}:some/model-1:0",
        providers={name: values},
        secrets={"MADE_UP": provider.key},
        fleet={"models": {f"{name}:some/model-1:0": PRICE}},
    )
    result = await agent.run("Are you there?")
    assert (result.text, provider.last["model"]) == ("Yes.", "some/model-1:0")
    assert provider.asked[-1].headers["authorization"] == f"Bearer {provider.key}"
    bench.balanced(result)
    assert result.cost_usd > 0


async def test_a_tool_is_called_and_the_answer_streams(run: Desk) -> None:
    run.provider.says("I look.", calls=(("a", "read_file", ('{"path":', '"app.log"}')),))
    run.provider.then()
    run.provider.says("Nothing ", "is in it.")
    result = await run.run()
    assert (result.state, result.text, run.read) == ("COMPLETED", "Nothing is in it.", ["app.log"])
    assert shown(run.chunks) == "I look.Nothing is in it."
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.cache_read_tokens) == (200, 40, 80)
    assert result.receipt.cost_usd == micros_to_usd(2 * (60 * 2 + 40 // 2 + 20 * 10))
    assert run.provider.asked[0].body["stream"] is True


async def test_the_same_without_a_stream(run: Desk) -> None:
    run.provider.says("", calls=(("a", "read_file", ('{"path":"app.log"}',)),))
    run.provider.then()
    run.provider.says("Nothing is in it.")
    result = await run.agent().run("What is in app.log?")
    run.bench.balanced(result)
    assert (result.state, result.text, run.read) == ("COMPLETED", "Nothing is in it.", ["app.log"])
    assert not run.provider.asked[0].body.get("stream")


async def test_too_many_requests_are_waited_for_and_cost_nothing(run: Desk) -> None:
    run.provider.refuses(429, retry_after="1")
    run.provider.then()
    run.provider.says("Here.")
    result = await run.run()
    assert (result.text, [kind for _, _, kind in run.attempts]) == ("Here.", ["RateLimited", ""])
    assert result.receipt.requests[0].cost_usd == 0


async def test_after_its_retries_a_fallback_is_asked(run: Desk) -> None:
    run.provider.refuses(500)
    run.provider.then()
    run.provider.then()
    run.provider.says("Here I am.")
    result = await run.run(fallback_models=["mine:small"], limits={"max_retries": 1})
    assert result.text == "Here I am."
    assert [(model, outcome) for model, outcome, _ in run.attempts] == [
        ("mine:big", "error"),
        ("mine:big", "error"),
        ("mine:small", "ok"),
    ]
    assert [asked.body["model"] for asked in run.provider.asked] == ["big", "big", "small"]


async def test_when_nobody_answers_the_run_ends_with_the_last_error(run: Desk) -> None:
    run.provider.refuses(500, "The machine is on fire.")
    result = await run.run(limits={"max_retries": 2})
    assert (result.ok, result.state, result.terminal_reason) == (False, "ERROR", "model_error")
    assert "The machine is on fire." in result.sentence
    assert len(run.attempts) == 3


async def test_a_cut_stream_is_taken_back_and_asked_for_again(run: Desk) -> None:
    run.provider.says("Once upon a ti" * 40, until="text", abort=True)
    run.provider.then()
    run.provider.says("Once upon a time.")
    result = await run.run()
    assert (result.text, shown(run.chunks)) == ("Once upon a time.", "Once upon a time.")
    assert any(chunk.discard for chunk in run.chunks)
    assert result.receipt.requests[0].cost_usd > 0
    assert len({chunk.request for chunk in run.chunks}) == 2


async def test_a_stream_that_ends_politely_in_the_middle_is_no_answer(run: Desk) -> None:
    run.provider.says("It is perfectly saf", until="text")
    run.provider.then()
    run.provider.says("It is perfectly safe to say no.")
    result = await run.run()
    assert result.text == shown(run.chunks) == "It is perfectly safe to say no."


async def test_a_wrong_key_is_said_at_once_and_not_tried_again(run: Desk) -> None:
    run.provider.refuses(401, "Your key is not known here.", "authentication_error")
    result = await run.run()
    assert (result.state, result.terminal_reason, len(run.attempts)) == ("ERROR", "model_error", 1)
    assert "Your key is not known here." in result.sentence
    assert run.provider.key not in result.sentence
    assert result.cost_usd == 0


async def test_a_provider_that_hangs_ends_with_the_turn(run: Desk) -> None:
    run.provider.says("Wait for", until="text", hang=True)
    result = await run.run(limits={"timeout": "4s"}, clock=SystemClock(), lease=15)
    assert (result.state, result.terminal_reason) == ("TIMED_OUT", "timed_out")
    assert result.sentence == "The turn exceeded its limit of 4 seconds."
    assert [outcome for _, outcome, _ in run.attempts] == ["timeout"]
    assert result.receipt.cost_usd == result.receipt.held_usd > 0


async def test_an_answer_that_cannot_be_read_is_asked_for_again(run: Desk) -> None:
    run.provider.sends(200, b'{"choices": [{"mess', "text/event-stream")
    run.provider.then()
    run.provider.says("Here.")
    result = await run.run()
    assert (result.text, len(run.attempts)) == ("Here.", 2)


async def test_two_calls_of_one_id_have_two_results(run: Desk) -> None:
    twice = (("same", "read_file", ('{"path":"a"}',)), ("same", "read_file", ('{"path":"b"}',)))
    run.provider.says("", calls=twice)
    run.provider.then()
    run.provider.says("Both are empty.")
    result = await run.run()
    assert (sorted(run.read), result.text) == (["a", "b"], "Both are empty.")
    assert sorted(line.name for line in result.receipt.calls) == ["read_file", "read_file"]
    output = str(run.provider.last["messages"])
    assert ("a is empty" in output, "b is empty" in output) == (True, True)


async def test_arguments_that_are_no_json_are_told_to_the_model(run: Desk) -> None:
    run.provider.says("", calls=(("a", "read_file", ('{"path": ',)),))
    run.provider.then()
    run.provider.says("I give up.")
    result = await run.run()
    assert (result.text, run.read) == ("I give up.", [])
    assert result.receipt.calls == ()


async def test_an_answer_at_its_longest_is_gone_on_with(run: Desk) -> None:
    run.provider.says("To be, ", finish="length")
    run.provider.then()
    run.provider.says("or not to be.")
    result = await run.run()
    assert (result.text, shown(run.chunks)) == ("To be, or not to be.", "To be, or not to be.")
    assert len(run.attempts) == 2


@pytest.mark.parametrize("wire", ["anthropic"], indirect=True)
async def test_each_request_reads_from_the_cache_what_the_one_before_wrote(run: Desk) -> None:
    """Up to its last mark, a request is the beginning of the next one, whatever the model is told of the moment."""
    for number in range(3):
        run.provider.says("I look.", calls=((f"c{number}", "read_file", (f'{{"path": "{number}.log"}}',)),))
        run.provider.then()
    run.provider.says("Empty.")
    assert (await run.run(instructions="Be brief.")).text == "Empty."
    bodies = [result.body for result in run.provider.asked]
    assert len(bodies) == 4
    for before, after in pairwise(bodies):
        marked = [at for at, block in enumerate(blocks(before)) if "cache_control" in block]
        assert plain(blocks(after))[: marked[-1] + 1] == plain(blocks(before))[: marked[-1] + 1]
        assert {"cache_control"} <= before["tools"][-1].keys()


def blocks(body: Any) -> list[Any]:
    return [*body["tools"], *body["system"], *(block for turn in body["messages"] for block in turn["content"])]


def plain(results: list[Any]) -> list[Any]:
    return [{key: value for key, value in block.items() if key != "cache_control"} for block in results]


async def test_an_answer_that_the_provider_holds_to_its_form_is_the_output(tmp_path: Path, provider: Any) -> None:
    desk = Desk(tmp_path, "openai", provider)
    provider.says('{"value": 3}')
    agent = desk.agent(native_output=True)

    @agent.output_validator
    def doubled(value: int) -> int:
        return value * 2

    result = await agent.run("How many?", output_type=int)
    assert (result.output, result.state) == (6, "COMPLETED")
    assert provider.last["response_format"]["type"] == "json_schema"
    desk.bench.balanced(result)

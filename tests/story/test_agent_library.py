"""An agent as a Python object: run, streamed, gone on with, with typed answers and what its tools depend on."""

import asyncio
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from library_bench import PRICED, Bench, finished, shown
from loops import calls, fails, says, used
from pydantic import BaseModel

from halter import (
    Agent,
    CompletedResult,
    Deps,
    Guard,
    NearBudget,
    PausedAtCap,
    Result,
    RunFailed,
    StoppedResult,
    StreamChunk,
    tool,
)
from halter.core.clock import SECOND, SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import SortableIds
from halter.core.messages import ToolResult
from halter.core.money import Account
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.guard.halts import cancel, halt, resume
from halter.guard.ledger import change_cap
from halter.journal.open import open_store
from halter.journal.retention import erase_session_bodies
from halter.loop.loop import TurnLoop
from halter.loop.session_runtime import SessionRuntime
from tests.processes import live_at

CLAUDE = "anthropic:claude-sonnet-4-5"
CLERK = Path(__file__).parent / "programs" / "clerk.py"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def run_streaming(agent: Agent, message: str, **more: Any) -> tuple[list[StreamChunk], Result[str]]:
    items = [item async for item in agent.stream(message, **more)]
    *chunks, last = items
    assert isinstance(last, Result)
    assert all(isinstance(chunk, StreamChunk) for chunk in chunks)
    return [chunk for chunk in chunks if isinstance(chunk, StreamChunk)], last


async def test_a_run_calls_tools_answers_and_tells_what_it_cost(bench: Bench) -> None:
    agent = bench.agent(
        calls(("weather", {"city": "Oslo"}), usage=used(1000, 100)),
        says("It rains.", usage=used(2000, 10)),
        fleet=PRICED,
    )

    @agent.tool(level="SAFE", effect="read")
    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    result = await agent.run("Is it going to rain in Oslo?")
    assert (result.ok, result.state, result.terminal_reason) == (True, "COMPLETED", "completed")
    assert (result.text, result.output, result.question, result.sentence) == ("It rains.", "It rains.", "", "")
    assert (result.usage.input_tokens, result.usage.output_tokens) == (3000, 110)
    assert result.cost_usd == Decimal("0.0041")
    assert [line.name for line in result.receipt.calls] == ["weather"]
    assert result.raise_for_state() is result
    bench.balanced(result)


async def test_a_receipt_ends_with_its_run_whenever_it_is_asked_for(bench: Bench) -> None:
    lines = [says(words, usage=used(1000, 0)) for words in ("One.", "Two.", "Three.")]
    agent = bench.agent(*lines, fleet=PRICED)
    async with agent:
        first = await agent.run("go", kind="chat")
        second = await agent.run("go on", session=first.session)
        third = await agent.run("go on", session=first.session)
        numbers = [len(first.receipt.requests), len(second.receipt.requests)]
    assert [*numbers, len(third.receipt.requests)] == [1, 2, 3]
    assert first.cost_usd * 3 == third.cost_usd > 0
    copied = pickle.loads(pickle.dumps(third))  # noqa: S301 It was made here.
    assert copied.receipt == third.receipt
    bench.balanced(third)


async def test_a_session_that_is_resumed_adds_nothing_to_the_receipt_of_its_end(bench: Bench) -> None:
    agent = bench.agent(says("Done.", usage=used(1000, 0)), says("Again.", usage=used(1000, 0)), fleet=PRICED)
    async with agent:
        result = await agent.run("go")
        again = await agent.resume(result.session, "once more")
        assert (result.receipt.state, len(result.receipt.requests)) == ("COMPLETED", 1)
        assert len(again.receipt.requests) == 2
        assert result.receipt.hash != again.receipt.hash


async def test_what_is_erased_before_a_receipt_is_asked_for_counts_as_erased(bench: Bench) -> None:
    agent = bench.agent(says("A word.", usage=used(1000, 0)), fleet=PRICED)
    async with agent:
        result = await agent.run("go")
        store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
        await erase_session_bodies(store, [result.session], "ada")
        await store.close()
    assert result.receipt.erased > 0
    assert result.text == "A word."
    bench.balanced(result)


async def test_a_result_tells_that_a_cap_is_near_also_one_of_the_agent(bench: Bench) -> None:
    dear = [calls("look", usage=used(0, 40_000)), says("Done.", usage=used(0, 40_000))]
    values = {"fleet": PRICED, "limits": {"max_cost_usd_per_day": 1.75}, "max_cost_usd": 1.2}
    agent = bench.agent(*dear, *dear, **values)

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        return "nothing"

    async with agent:
        first = await agent.run("look")
        assert (first.cost_usd, first.near_budget, await agent.is_near_budget()) == (Decimal("0.8"), False, False)
        second = await agent.run("look again")
        assert (second.cost_usd, second.near_budget, await agent.is_near_budget()) == (Decimal("0.8"), True, True)


@pytest.mark.parametrize("window", ["hour", "day", "month"])
@pytest.mark.parametrize("on_cap", ["wrap_up", "stop", "ask"])
async def test_a_run_whose_window_is_used_up_returns_at_once_and_tells_when_it_opens(
    bench: Bench, on_cap: str, window: str
) -> None:
    cap, scope = {f"max_cost_usd_per_{window}": 0.4}, "fleet" if window == "month" else "agent:desk"
    fleet = {**PRICED, "limits": cap} if scope == "fleet" else PRICED
    limits = {"on_cap": on_cap, **({} if scope == "fleet" else cap)}
    dear = says("Done.", usage=used(0, 40_000))
    agent = bench.agent(dear, says("Never asked."), fleet=fleet, limits=limits, max_cost_usd=1)
    async with agent:
        assert (await agent.run("first")).ok
        async with asyncio.timeout(30):
            result = await agent.run("second")
    assert (result.ok, result.state, result.terminal_reason) == (False, "BUDGET_EXCEEDED", "cost_cap_reached")
    assert result.cost_usd == 0
    reached = result.reached_cap
    assert reached is not None
    assert (reached.scope, reached.unit, reached.cap) == (scope, "usd", Decimal("0.4"))
    assert reached.window.startswith(window)
    assert reached.opens_at > bench.clock.now()
    assert f"The cap of {scope} ($0.40, {reached.window.replace('/', ' ')}) is used up until" in result.sentence
    with pytest.raises(RunFailed, match=r"is used up until \d{4}-\d\d-\d\d \d\d:\d\d UTC"):
        result.raise_for_state()


async def test_a_run_that_waits_for_its_window_sleeps_until_a_person_raises_the_cap(bench: Bench) -> None:
    dear, limits = says("Done.", usage=used(0, 40_000)), {"max_cost_usd_per_day": 0.4, "on_cap": "wait"}
    agent = bench.agent(dear, says("At last."), fleet=PRICED, limits=limits, max_cost_usd=1)
    async with agent:
        await agent.run("first")
        seen: list[Any] = []
        async for item in agent.stream_events("second"):
            seen.append(item)
            if isinstance(item, PausedAtCap):
                account = Account(item.scope, item.window, "usd")
                await bench.person(change_cap(account, 10_000_000, "ada", "raise"))
    assert any(isinstance(item, PausedAtCap) for item in seen)
    assert (seen[-1].text, seen[-1].reached_cap) == ("At last.", None)


async def test_with_wait_the_cap_of_a_session_ends_it(bench: Bench) -> None:
    lines = [calls("look", usage=used(0, 40_000)), says("Never asked.")]
    agent = bench.agent(*lines, fleet=PRICED, limits={"on_cap": "wait"}, max_cost_usd=0.41)

    @agent.tool(level="SAFE", effect="read", cost=0.02)
    async def look() -> str:
        """Look."""
        return "nothing"

    result = await agent.run("look")
    assert (result.state, result.terminal_reason, result.reached_cap) == ("BUDGET_EXCEEDED", "cost_cap_reached", None)


@pytest.mark.parametrize(
    ("limits", "near"),
    [
        ({"token_budget": 10_000, "reserve_tokens": 4000, "on_cap": "stop"}, True),
        ({"token_budget": 10_000, "reserve_tokens": 3999, "on_cap": "stop"}, False),
        ({"token_budget": 10_000, "reserve_tokens": 2000}, True),
        ({"token_budget": 10_000, "reserve_tokens": 1999}, False),
        ({"reserve_cost_fraction": 0.4, "on_cap": "stop"}, True),
        ({"reserve_cost_fraction": 0.39, "on_cap": "stop"}, False),
        ({"reserve_cost_fraction": 0.2}, True),
        ({"reserve_cost_fraction": 0.19}, False),
    ],
)
async def test_the_model_is_warned_exactly_when_a_program_reads_that_the_budget_is_near(
    bench: Bench, limits: dict[str, Any], *, near: bool
) -> None:
    prices = {"models": {"scripted:first": {"price": {"input": 100, "output": 100}}}}
    agent = bench.agent(
        calls("look", usage=used(5000, 1000)),
        says("Done.", usage=used(0, 0)),
        fleet=prices,
        max_cost_usd=1,
        limits={"min_output_tokens": 1, "max_output_tokens": 1000, **limits},
    )

    @agent.tool(level="SAFE", effect="read")
    async def look(near_budget: NearBudget) -> str:
        """Look."""
        return str(await near_budget())

    async with agent:
        result = await agent.run("look")
        told = [fact["reason"] for fact in bench.facts("message_added")]
        (look_result,) = [part.text for each in result.messages for part in each.parts if isinstance(part, ToolResult)]
        answers = (result.near_budget, await agent.is_near_budget(result.session), look_result == "True")
    assert (told, answers) == (["near_budget"] if near else [], (near, near, near))


async def test_a_secret_that_comes_into_the_environment_between_two_runs_is_hidden(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(bench.folder))
    agent = bench.agent(calls("look"), says("Done."), calls("look"), says("Done."), environ=os.environ)

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look."""
        return "plainvalue-" + "of-tomorrow"

    async with agent:
        before = await agent.run("look")
        monkeypatch.setenv("BANK_API_TOKEN", "plainvalue-of-tomorrow")
        after = await agent.run("look again")
    assert "plainvalue-of-tomorrow" in str(before.messages)
    assert "plainvalue-of-tomorrow" not in str(after.messages)


def test_a_program_that_is_not_async_runs_it_too(bench: Bench) -> None:
    assert bench.agent(says("Done.")).run_sync("do it").text == "Done."


async def test_an_open_agent_keeps_its_store_from_run_to_run(bench: Bench) -> None:
    async with bench.agent(says("One."), says("Two.")) as agent:
        first = await agent.run("count", kind="chat")
        second = await agent.run("go on", session=first.session)
        assert (first.text, second.text, first.session) == ("One.", "Two.", second.session)
        assert (second.state, second.has_ended, second.ok) == ("WAITING_FOR_INPUT", False, True)
        with pytest.raises(ConfigError, match="already open"):
            agent.tool(lambda: "late")


async def test_a_finished_run_leaves_nothing_for_the_garbage_collector(bench: Bench) -> None:
    agent = bench.agent(calls(("weather", {"city": "Oslo"})), says("It rains."), says("Again."))

    @agent.tool(level="SAFE", effect="read")
    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    def alive() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (TurnLoop, SessionRuntime)]

    async with agent:
        gc.collect()
        others = {id(each) for each in alive()}
        gc.disable()
        try:
            results = [await agent.run("Is it going to rain?"), await agent.run("And now?")]
            values = [each for each in alive() if id(each) not in others]
        finally:
            gc.enable()
    assert ([result.text for result in results], values) == (["It rains.", "Again."], [])


async def test_an_answer_streams_and_its_last_item_is_the_result(bench: Bench) -> None:
    agent = bench.agent(says("Hello, "), says("and again."))
    chunks, result = await run_streaming(agent, "hello")
    finished(chunks)
    assert shown(chunks) == result.text == "Hello, "


async def test_a_cut_answer_that_is_gone_on_with_is_one_text(bench: Bench) -> None:
    agent = bench.agent(says("To be, ", stop="max_tokens"), says("or not ", stop="max_tokens"), says("to be."))
    chunks, result = await run_streaming(agent, "quote", kind="task")
    finished(chunks)
    assert (shown(chunks), result.text) == ("To be, or not to be.", "To be, or not to be.")
    assert len({chunk.request for chunk in chunks}) == 3


async def test_a_retried_stream_tells_its_reader_to_discard(bench: Bench) -> None:
    agent = bench.agent(
        says("Hello wor", fails=fails("CutStream").fails, usage=used()),
        says("Hello world.", usage=used()),
        fleet=PRICED,
    )
    chunks, result = await run_streaming(agent, "hello")
    finished(chunks)
    assert [chunk.discard for chunk in chunks if chunk.discard] == [True]
    assert (shown(chunks), result.text) == ("Hello world.", "Hello world.")
    bench.balanced(result)


async def test_whoever_stops_listening_leaves_a_session_that_can_go_on(bench: Bench) -> None:
    agent = bench.agent(says("word " * 200, takes=SECOND), says("never", takes=3600 * SECOND))
    session = ""
    async with agent:
        stream = agent.stream("tell me", id="mine")
        async for item in stream:
            assert isinstance(item, StreamChunk)
            break
        await stream.aclose()
        session = "mine"
    result = await bench.agent(says("Again, from the beginning.")).resume(session)
    assert (result.ok, result.session) == (True, "mine")
    bench.balanced(result)


async def test_a_session_that_ended_at_its_cap_resumes_after_it_was_raised(bench: Bench) -> None:
    dear = [says("x", usage=used(10_000, 0), stop="max_tokens") for _ in range(2)]
    options: dict[str, Any] = {
        "fleet": PRICED,
        "max_cost_usd": 0.02,
        "limits": {"on_cap": "stop", "max_output_tokens": 256},
    }
    stopped = await bench.agent(*dear, says("never", usage=used(1, 1)), **options).run("write " + "long " * 1500)
    assert (stopped.ok, stopped.state, stopped.terminal_reason) == (False, "BUDGET_EXCEEDED", "cost_cap_reached")
    with pytest.raises(RunFailed, match=r"BUDGET_EXCEEDED \(cost_cap_reached\)") as failed:
        stopped.raise_for_state()
    assert failed.value.result is stopped
    again = await bench.agent(says("never"), **options).resume(stopped.session)
    assert again.state == "BUDGET_EXCEEDED"
    await bench.person(change_cap(Account(f"session:{stopped.session}", "", "usd"), 1_000_000, "ada", "more", "let it"))
    result = await bench.agent(says("Done.", usage=used(1000, 10)), **options).resume(stopped.session)
    assert (result.ok, result.state, result.text) == (True, "COMPLETED", "Done.")
    bench.balanced(result)


async def test_a_session_that_took_all_its_steps_resumes_with_new_ones(bench: Bench) -> None:
    def looking(*lines: Any) -> Agent:
        agent = bench.agent(*lines, limits={"max_steps": 1})
        agent.tool(look, level="SAFE", effect="read")
        return agent

    def look() -> str:
        """Look."""
        return "nothing"

    stopped = await looking(calls("look"), says("never")).run("look")
    assert (stopped.state, stopped.terminal_reason, stopped.ok) == ("MAX_STEPS", "max_steps", False)
    assert stopped.sentence == "The turn reached its limit of 1 step."
    result = await looking(says("Nothing there.")).resume(stopped.session)
    assert (result.state, result.text) == ("COMPLETED", "Nothing there.")


async def test_a_halted_session_resumes_after_the_halt_is_lifted(bench: Bench) -> None:
    await bench.agent(says("One.")).run("first")
    await bench.person(halt("agent:desk", "ada", "h1"))
    halted = await bench.agent(says("never")).run("second")
    assert (halted.ok, halted.state, halted.terminal_reason) == (False, "HALTED", "external_halt")
    await bench.person(resume("agent:desk", "ada", "h2"))
    result = await bench.agent(says("Now.")).resume(halted.session)
    assert (result.ok, result.text) == (True, "Now.")


async def test_a_cancelled_session_never_resumes(bench: Bench) -> None:
    await bench.person(cancel("mine", "ada", "h1"))
    result = await bench.agent(says("never")).run("second", id="mine")
    assert (result.state, result.terminal_reason) == ("CANCELLED", "cancelled")
    with pytest.raises(ConfigError, match=r"has ended \(CANCELLED: cancelled\) and cannot be reopened"):
        await bench.agent(says("never")).resume(result.session)


async def test_a_run_whose_task_was_cancelled_is_resumed_in_the_same_program(bench: Bench) -> None:
    event = asyncio.Event()
    agent = bench.agent(calls("wait"), says("Done."))

    @agent.tool(level="SAFE", effect="read")
    async def wait() -> str:
        """Wait, the first time for ever."""
        if not event.is_set():
            event.set()
            await asyncio.Event().wait()
        return "waited"

    async with agent:
        run = asyncio.create_task(agent.run("wait for it", id="mine"))
        await event.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        result = await agent.resume("mine")
    assert (result.state, result.text) == ("COMPLETED", "Done.")
    bench.balanced(result)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_a_run_that_was_cancelled_at_any_moment_is_resumed_in_the_same_program(
    bench: Bench, kind: str, request: pytest.FixtureRequest
) -> None:
    clock = SystemClock()
    url = str(bench.file) if kind == "sqlite" else request.getfixturevalue("postgres_schema_url")
    store = open_store(url, clock=clock, ids=SortableIds(clock.now))
    agent = bench.agent(*[calls("look"), says("Done.")] * 100, store=url, clock=clock, lease=5)
    looking, resumed = asyncio.Event(), 0

    @agent.tool(level="SAFE", effect="read")
    async def look() -> str:
        """Look for some passes of the event loop."""
        looking.set()
        for _ in range(20):
            await asyncio.sleep(0)
        return "nothing"

    async with agent:
        for passes in range(30):
            looking.clear()
            run = asyncio.create_task(agent.run("go", id=f"run-{passes}" if passes % 2 else ""))
            if not passes:
                await looking.wait()
            for _ in range(passes if kind == "sqlite" else passes**2):
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.wait([run])
            for row in await store.ask(Query("all_sessions", SessionRow)):
                if row.ended_at is None:
                    assert (await agent.resume(row.session)).state == "COMPLETED"
                    resumed += 1
    await store.close()
    assert resumed


async def test_a_question_is_answered_by_going_on(bench: Bench) -> None:
    agent = bench.agent(calls(("ask_user", {"question": "Which desk?"})), says("The left one it is."))
    asked = await agent.run("tidy up")
    assert (asked.ok, asked.state, asked.question, asked.has_ended) == (True, "WAITING_FOR_INPUT", "Which desk?", False)
    result = await agent.resume(asked.session, "the left one")
    assert (result.state, result.text, result.question) == ("COMPLETED", "The left one it is.", "")


class Weather(BaseModel):
    city: str
    rain_mm: float


async def test_an_answer_has_the_form_that_was_asked_for(bench: Bench) -> None:
    lines = [
        says("It rains a lot."),
        calls(("final_answer", {"value": {"city": "Oslo", "rain_mm": "much"}})),
        calls(("final_answer", {"value": {"city": "Oslo", "rain_mm": 12}})),
    ]
    result = await bench.agent(*lines).run("weather", output_type=Weather)
    assert result.output == Weather(city="Oslo", rain_mm=12)
    assert (result.state, result.ok) == ("COMPLETED", True)
    numbers = await bench.agent(calls(("final_answer", {"value": [1, 2, 3]}))).run("count", output_type=list[int])
    assert numbers.output == [1, 2, 3]
    nothing = await bench.agent(calls(("final_answer", {"value": None}))).run("count", output_type=type(None))
    assert (nothing.output, nothing.ok) == (None, True)


@pytest.mark.parametrize(
    "line",
    [
        lambda number: says(f"no form {number}"),
        lambda number: calls(("final_answer", {"value": f"no number {number}"})),
    ],
    ids=["words", "unfit"],
)
async def test_a_model_without_a_valid_answer_is_asked_three_times_more_and_no_longer(bench: Bench, line: Any) -> None:
    result = await bench.agent(*(line(number) for number in range(9))).run("count", output_type=list[int])
    assert (result.ok, result.state, result.terminal_reason, result.output) == (False, "ERROR", "model_error", None)
    assert "no valid output" in result.sentence
    assert len(bench.models[0].requests) == 4


async def test_an_old_answer_is_never_taken_for_a_new_one(bench: Bench) -> None:
    agent = bench.agent(calls(("final_answer", {"value": 1})), *(says("hm") for _ in range(4)))
    first = await agent.run("one", output_type=int, kind="task")
    second = await agent.run("two", output_type=int, session=first.session)
    assert (first.output, second.output, second.ok) == (1, None, False)


class Shelf:
    def __init__(self, *books: str) -> None:
        self.books = books


async def test_tools_get_what_the_program_has_for_them_and_the_model_never_sees_it(bench: Bench) -> None:
    agent = bench.agent(calls(("find", {"letter": "m"})), says("Momo."))

    @agent.tool(level="SAFE", effect="read")
    async def find(letter: str, shelf: Deps[Shelf]) -> str:
        """Find a book."""
        return ", ".join(book for book in shelf.books if book.startswith(letter))

    result = await agent.run("a book with m", deps=Shelf("momo", "emil"))
    (results,) = [part for message in result.messages for part in message.parts if type(part).__name__ == "ToolResult"]
    assert results.text == "momo"
    (offered,) = [tool for tool in bench.models[0].requests[0].tools if tool.name == "find"]
    assert b"shelf" not in offered.schema


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"model": "scripted", "limits": {"max_stepps": 1}},
            "`max_stepps` is not a key of `limits`; did you",
        ),
        (
            {"model": CLAUDE, "limits": {"max_steps": "many"}},
            "`limits.max_steps` is the text 'many', but must be",
        ),
        ({"model": "nonsense"}, "`model` is the text 'nonsense', but must be one model"),
        ({"model": "nobody:model"}, "`model` has the unknown provider `nobody`; define it under `providers`"),
        ({"model": CLAUDE}, "ANTHROPIC_API_KEY is not set, and"),
        ({}, "has no model"),
        ({"model": CLAUDE, "fleet": {"allowed_models": ["openai:*"]}}, "openai:"),
        (
            {"model": CLAUDE, "temperatur": 1},
            "`temperatur` is not an option of an agent; did you mean `temperature`?",
        ),
        (
            {"model": CLAUDE, "fallback_models": "openai:gpt-5-mini"},
            "`fallback_models` is the text",
        ),
    ],
)
async def test_what_is_wrong_is_said_in_a_sentence_before_anything_runs(
    bench: Bench, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as wrong:
        await bench.agent(**options).run("hello")
    assert sentence in str(wrong.value)
    assert not bench.file.exists() or bench.facts("session_started") == []


async def test_a_model_without_a_price_is_refused_while_a_cap_applies(bench: Bench) -> None:
    values = {"house": {"wire": "openai", "base_url": "https://models.example.com/v1"}}
    result = await bench.agent(model="house:big", providers=values).run("hello")
    assert (result.ok, result.state, result.terminal_reason) == (False, "ERROR", "model_error")
    assert "price" in result.sentence
    bench.balanced(result)


async def test_no_session_starts_without_a_message(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"The message is empty\. Write what the agent should do\."):
        await bench.agent(says("never")).run("  ")
    with pytest.raises(ConfigError, match="There is no session nosuch"):
        await bench.agent(says("never")).resume("nosuch")


async def test_the_session_of_another_agent_is_left_alone(bench: Bench) -> None:
    result = await bench.agent(says("Mine.")).run("hello")
    other = Agent(
        "other", store=bench.file, model=bench.models[0], clock=bench.clock, environ={"HOME": str(bench.folder)}
    )
    with pytest.raises(ConfigError, match="belongs to desk, not to other"):
        await other.resume(result.session)


@pytest.mark.timeout(60)
def test_a_killed_program_that_is_started_again_continues_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, str(CLERK), str(tmp_path / "runs.db")]
    environ = live_at(tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"sent\n"
        assert program.stdout.readline() == b"looking\n"
        program.send_signal(signal.SIGKILL)
        program.communicate(timeout=30)
    process = subprocess.run([*command, "again"], capture_output=True, text=True, env=environ, timeout=30, check=False)
    assert process.stdout == "looking\nCOMPLETED: I sent it, and all is well. asked 1 times, sent once: True\n", (
        process.stderr
    )


async def test_what_is_started_twice_under_one_id_is_one_session_and_gets_its_task_once(bench: Bench) -> None:
    agent = bench.agent(calls(("ask_user", {"question": "Which?"})), says("Done."))
    first = await agent.run("tidy up", id="mine")
    result = await agent.run("tidy up", id="mine")
    assert (first.session, result.session, result.state) == ("mine", "mine", "WAITING_FOR_INPUT")
    assert len(bench.models[0].requests) == 1
    done = await agent.run("the left one", session="mine")
    again = await agent.run("tidy up", id="mine")
    assert (again.session, again.state, again.text) == ("mine", "COMPLETED", done.text)
    assert len(bench.models[0].requests) == 2


class Report(BaseModel):
    title: str


def answers_with(value: Any) -> Any:
    return calls(("final_answer", {"value": value}), usage=used(1000, 100))


async def test_a_batch_that_is_started_again_costs_nothing_for_what_is_done(bench: Bench) -> None:
    async def run_batch(agent: Agent) -> list[Result[Report]]:
        async with agent:
            return [await agent.run(f"Review {n}.", id=f"review-{n}", output_type=Report) for n in range(3)]

    first = await run_batch(bench.agent(*(answers_with({"title": f"Paper {n}"}) for n in range(3)), fleet=PRICED))
    second = await run_batch(bench.agent(says("never"), fleet=PRICED))
    assert [result.output.title for result in second] == ["Paper 0", "Paper 1", "Paper 2"]
    assert [result.cost_usd for result in second] == [result.cost_usd for result in first]
    assert [result.messages for result in second] == [result.messages for result in first]
    assert [result.receipt for result in second] == [result.receipt for result in first]
    assert bench.models[1].requests == []


async def test_a_stream_under_the_id_of_a_session_that_has_ended_ends_with_its_result(bench: Bench) -> None:
    agent = bench.agent(says("Done."), says("never"))
    first = await agent.run("tidy up", id="mine")
    for stream in (agent.stream("tidy up", id="mine"), agent.stream_events("tidy up", id="mine")):
        items = [item async for item in stream]
        (last,) = (item for item in items if isinstance(item, Result))
        assert items == [last]
        assert (last.text, last.state, last.ok, last.sentence) == (first.text, first.state, first.ok, first.sentence)
    forked = await agent.fork("mine", "And again.", id="fork")
    assert (await agent.fork("mine", "And again.", id="fork")).text == forked.text
    assert len(bench.models[0].requests) == 2


async def test_the_result_of_a_run_that_was_stopped_is_the_same_once_more(bench: Bench) -> None:
    limits = {"limits": {"max_cost_usd_per_day": 0.4}, "max_cost_usd": 1}
    async with bench.agent(says("Done.", usage=used(0, 40_000)), says("never"), fleet=PRICED, **limits) as agent:
        await agent.run("first")
        first = await agent.run("go", id="mine")
    again = await bench.agent(says("never"), fleet=PRICED, **limits).run("go", id="mine")
    assert first.reached_cap is not None
    stopped = (first.state, first.terminal_reason, first.ok, first.text, first.sentence, first.reached_cap)
    assert (again.state, again.terminal_reason, again.ok, again.text, again.sentence, again.reached_cap) == stopped


async def test_an_erased_result_is_not_returned_as_an_empty_one(bench: Bench) -> None:
    agent = bench.agent(says("Done."))
    await agent.run("tidy up", id="mine")
    store = open_store(str(bench.file), clock=bench.clock, ids=SortableIds(bench.clock.now))
    await erase_session_bodies(store, ["mine"], "ada")
    await store.close()
    with pytest.raises(ConfigError, match="its messages were erased"):
        await agent.run("tidy up", id="mine")


async def test_two_tasks_of_one_program_do_not_see_each_other(bench: Bench) -> None:
    async with bench.agent(*(says(f"answer {number}") for number in range(5))) as agent:
        results = await asyncio.gather(*(agent.run(f"task {number}") for number in range(5)))
    assert len({result.session for result in results}) == 5
    assert sorted(result.text for result in results) == [f"answer {number}" for number in range(5)]


@pytest.mark.parametrize("name", ["mine/in", "/in", "mine\x00", "\ud800"])
async def test_an_id_that_would_touch_another_session_or_fits_no_store_is_refused(bench: Bench, name: str) -> None:
    agent = bench.agent(says("Hello."), says("Never said."))
    async with agent:
        await agent.run("Hello?", id="mine")
        before = (bench.facts("session_started"), await agent.history("mine"))
        with pytest.raises(ConfigError, match="Invalid session id"):
            await agent.run("Hello?", id=name)
        assert (bench.facts("session_started"), await agent.history("mine")) == before


async def test_a_blocking_run_inside_an_event_loop_says_what_to_write(bench: Bench) -> None:
    agent = bench.agent(says("Hello."))
    with pytest.raises(ConfigError, match=r"Write: await agent\.run\(\.\.\.\)"):
        agent.run_sync("Hello?")
    assert bench.models[0].requests == []


def test_help_shows_every_option_of_an_agent_a_guard_and_a_tool() -> None:
    for function, names in (
        (Agent, {"name", "store", "output_type", "deps_type", "model", "max_cost_usd", "limits", "clock"}),
        (Agent.load, {"folder", "store", "model", "person"}),
        (Guard, {"store", "agent", "max_cost_usd", "policy", "simulates"}),
        (tool, {"function", "level", "effect", "timeout"}),
        (Agent.run_sync, {"message", "output_type", "session", "id", "deps", "kind", "history", "files"}),
    ):
        parameters = inspect.signature(function).parameters
        assert names <= set(parameters)
        assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]


async def test_a_result_without_an_answer_has_no_output(bench: Bench) -> None:
    agent = bench.agent(calls(("ask_user", {"question": "Which?"})), answers_with({"title": "Left"}))
    asked = await agent.run("tidy up", output_type=Report)
    assert isinstance(asked, StoppedResult)
    assert (asked.ok, asked.output, asked.question) == (True, None, "Which?")
    with pytest.raises(RunFailed):
        asked.require_output()
    done = await agent.run("the left one", session=asked.session, output_type=Report)
    assert isinstance(done, CompletedResult)
    assert isinstance(done, Result)
    assert done.require_output() == done.output == Report(title="Left")


async def test_the_form_of_the_answers_belongs_to_the_agent(bench: Bench) -> None:
    agent = bench.agent(answers_with({"title": "One"}), answers_with({"title": "Two"}), output_type=Report)
    assert (await agent.run("Review.", kind="chat")).output == Report(title="One")
    *_, last = [item async for item in agent.stream("Review again.")]
    assert isinstance(last, CompletedResult)
    assert last.output == Report(title="Two")

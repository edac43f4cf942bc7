"""A crash at any commit of a session's turns: it reaches the same end, repeats nothing, and its costs add up.

Before each answer the model itself looks at the journal: what it is sent must be what another process would send.
"""

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from halter.core.clock import SECOND
from halter.core.errors import ModelUnavailable
from halter.core.ids import session_stream
from halter.core.messages import Message, Prompt, Reply, Text, TextListener, ToolCall, ToolResult
from halter.core.money import micros_to_usd
from halter.core.ports import read_body
from halter.core.text import encode_body
from halter.core.tools import Permit
from halter.core.usage import ModelName, Price, Usage
from halter.guard.approvals import answer_decision, list_pending_decisions
from halter.loop.history import SessionHistory
from halter.loop.turn import Turn
from halter.models.scripted import Scripted
from halter.spec.models import BrainSpec
from halter.state import lifecycle
from halter.state.receipt import Receipt
from halter.testing.fakes import Crash
from halter.testing.world import World, crash_everywhere
from tests.story.loops import Story, calls, says

TEN = Price(Decimal(10), Decimal(10))


class Sensible(Scripted):
    """A model that answers by its prompt, so that a repeated request gets the same answer."""

    def __init__(self, world: World, answer: Callable[[Prompt, int], Reply]) -> None:
        super().__init__((), world.clock, ModelName("scripted", "script"))
        self._world = world
        self._answer = answer

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.requests.append(prompt)
        session_history = await recalled(self._world)
        if prompt.tools:
            assert without_ending(prompt) == tuple(session_history.transcript.sent)
        return self._answer(prompt, len(self.requests))


async def recalled(world: World) -> SessionHistory:
    """Load the history of the session as another process would."""
    session_history = SessionHistory("s")
    await session_history.apply(
        await world.events(session_stream("s")), lambda stored: read_body(world.journal, stored)
    )
    return session_history


def without_ending(prompt: Prompt) -> tuple[Message, ...]:
    *before, last = prompt.messages
    parts = tuple(part for part in last.parts if not isinstance(part, Text) or part.reason != "volatile")
    return (*before, Message(last.role, parts))


def last(prompt: Prompt) -> str:
    """Describe the last message: texts, reasons, and the tools whose results the model is shown."""
    parts = without_ending(prompt)[-1].parts
    return " ".join(
        f"result:{part.tool}" if isinstance(part, ToolResult) else f"{part.reason} {part.text}"
        for part in parts
        if not isinstance(part, ToolCall)
    )


def reply(line: Any, outputs: int = 20) -> Reply:
    return msgspec.structs.replace(line.reply, usage=Usage(900, outputs))


def timeless(turn: Turn) -> Turn:
    """Return a turn without its times, and without `is_settled`, which a crash prevents."""
    return msgspec.structs.replace(
        turn, work_time=0, idle_time=0, clock_started_at=None, last_event_at=0, is_settled=True
    )


async def answer_truly(world: World, story: Story) -> None:
    """Say truly, as a person who looks would, whether a call in doubt was made."""
    while True:
        for waiting in await list_pending_decisions(world.journal):
            assert waiting.about == "unknown_call"
            done = await was_done(world, story, waiting.subject)
            verdict = "approve" if done else "deny"
            store = world.store.patient(world.clock)
            await store.commit(answer_decision(waiting, verdict, "ada", world.ids.make()))
        await world.clock.sleep(SECOND)


async def was_done(world: World, story: Story, call: str) -> bool:
    results = [s.event for s in await world.events(session_stream("s")) if s.kind == "call_settled"]
    if call.startswith("s.c1_0_"):
        return story.desk.done[f"send {call[-1]}"] > 0
    counted = sum(event.outcome == "ok" for event in results if event.call in list_payments(story))
    return story.desk.done["pay"] > counted


def list_payments(story: Story) -> set[str]:
    parts = (
        (part for message in story.model.requests[-1].messages for part in message.parts)
        if story.model.requests
        else ()
    )
    texts = {f"s.{part.id}" for part in parts if isinstance(part, ToolCall) and part.tool == "pay"}
    return texts | {f"s.c1_{step}_0" for step in range(2, 12)}


async def check_outcome(world: World, story: Story) -> Receipt:
    """Check what holds after every crash: each call has one result, and costs and history agree with the journal."""
    receipt = await story.receipt()
    events = [stored.event for stored in await story.events()]
    charges = [event.charge for event in events if getattr(event, "charge", None) is not None]
    assert receipt.cost_usd == micros_to_usd(sum(charge.usd for charge in charges))
    assert receipt.in_doubt == ()
    session_history = await recalled(world)
    assert story.loop is not None
    assert timeless(session_history.turn) == timeless(story.loop.turn), world
    assert session_history.transcript.messages == story.messages, world
    parts = [part for message in story.messages for part in message.parts]
    ids = [part.id for part in parts if isinstance(part, ToolCall)]
    assert ids == [part.id for part in parts if isinstance(part, ToolResult)]
    return receipt


def check_sent_once(story: Story, *texts: str) -> None:
    """Check that nothing was sent twice, and that the model was shown what was sent and what was not."""
    results = [result for result in story.results() if result.tool == "send"]
    for text, result in zip(texts, results, strict=True):
        assert story.desk.done[f"send {text}"] == (result.outcome == "ok")


EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
"""Each commit has one kind of crash; with patience, each has all of them."""


def everywhere(
    make: Callable[[World], Story], program: Callable[[World, Story], Any], every: int
) -> Iterator[tuple[World, Story]]:
    """Run a story repeatedly, each time with another crash, to its end."""
    stories: list[Story] = []

    async def whole(world: World) -> None:
        answering = world.spawn(answer_truly(world, stories[-1]))
        await program(world, stories[-1])
        answering.cancel()

    def new_world(crash: Crash | None) -> World:
        world = World(crash=crash)
        stories.append(make(world))
        return world

    for world in crash_everywhere(whole, new_world, every=every):
        yield world, stories[-1]


def clerk(prompt: Prompt, _: int) -> Reply:
    output = last(prompt)
    if "first" in output:
        return reply(calls(("look", {"at": "a"}), ("send", {"text": "1"}), ("send", {"text": "2"}), text="At once."))
    return reply(says("Done." if "result:send" in output else "Hello."))


@EVERY
def test_a_chat_resumes_after_a_crash_at_any_commit(every: int) -> None:
    def make(world: World) -> Story:
        story = Story(world)
        story.models, story.price = [Sensible(world, clerk)], TEN
        return story

    async def program(world: World, story: Story) -> None:
        await story.begin()
        for key in ("first", "second"):
            write = lifecycle.post_message("s", key, encode_body(f"the {key} message"), "ada")
            await world.store.patient(world.clock).commit(write)
            await story.attend()

    for world, story in everywhere(make, program, every):
        receipt = world.run(check_outcome(world, story))
        assert (receipt.state, receipt.terminal_reason) == ("WAITING_FOR_INPUT", ""), world
        check_sent_once(story, "1", "2")
        assert {line.parallel_group for line in receipt.calls} == {"s.t1_1_0"}, world
        texts = [part.text for message in story.messages for part in message.parts if isinstance(part, Text)]
        assert texts == ["the first message", "At once.", "Done.", "the second message", "Hello."], world


def payer(prompt: Prompt, number: int) -> Reply:
    text = last(prompt)
    if number == 2:
        raise ModelUnavailable("Overloaded: come back later", billed=False)
    if "wrap_up" in text:
        return reply(says("All is spent."))
    if "result:" in text:
        return reply(calls("pay"))
    if "max_tokens_recovery" in text:
        return reply(calls(("look", {"at": "a"})))
    return msgspec.structs.replace(reply(says("I am go")), stop="max_tokens")


@EVERY
def test_a_task_with_retries_a_recovery_and_a_final_text_resumes_after_a_crash_at_any_commit(every: int) -> None:
    def make(world: World) -> Story:
        # The payments are identical, and the cap shall end them.
        brain = BrainSpec(model="scripted:script", instructions="You are a clerk.", max_repeated_tool_steps=100)
        story = Story(world, kind="task", policy_yaml="limits: {max_cost_usd: 1.2}", mind=brain)
        story.models, story.price = [Sensible(world, payer)], TEN
        return story

    async def program(world: World, story: Story) -> None:
        await story.begin("Pay.")
        if not (await world.session("s")).ended:
            await story.attend()

    for world, story in everywhere(make, program, every):
        receipt = world.run(check_outcome(world, story))
        assert (receipt.state, receipt.terminal_reason) == ("BUDGET_EXCEEDED", "cost_cap_reached"), world
        receipt_lines = [line for line in receipt.calls if line.name == "pay" and line.cost_usd]
        assert story.desk.done["pay"] == len(receipt_lines) >= 3, world
        assert receipt.cost_usd <= micros_to_usd(1_200_000)
        assert story.messages[-1].parts == (Text("All is spent.", "model", trusted=False),), world
        assert story.told().count("max_tokens_recovery") == story.told().count("wrap_up") == 1


def watcher(prompt: Prompt, _: int) -> Reply:
    parts = [part for message in prompt.messages for part in message.parts]
    rounds = sum(isinstance(part, ToolResult) and part.tool == "yield" for part in parts)
    rounds += sum(isinstance(part, Text) and part.text == "Hm." for part in parts)
    lines = [
        calls(("look", {"at": "a"}), ("send", {"text": "1"}), ("yield", {"mode": "sleep", "sleep": 60})),
        calls(("yield", {"mode": "continue"})),
        says("Hm."),
        calls(("yield", {"mode": "shutdown"})),
    ]
    return reply(lines[min(rounds, 3)])


@EVERY
def test_an_autonomous_session_resumes_after_a_crash_at_any_commit(every: int) -> None:
    def make(world: World) -> Story:
        story = Story(world, kind="autonomous")
        story.models, story.price = [Sensible(world, watcher)], TEN
        return story

    async def program(world: World, story: Story) -> None:
        await story.begin("Watch.")
        while not (session := await world.session("s")).ended:
            if session.state == "SLEEPING" and session.wake_at is not None:
                await world.clock.sleep(max(0, session.wake_at - world.now))
            await story.attend()

    for world, story in everywhere(make, program, every):
        receipt = world.run(check_outcome(world, story))
        assert (receipt.state, receipt.terminal_reason) == ("COMPLETED", "completed"), world
        check_sent_once(story, "1")
        assert story.told() == ["observe"] * 3, world


def writer(prompt: Prompt, _: int) -> Reply:
    if prompt.system.startswith("You are shown the older part"):
        return says("Much was looked at.").reply
    parts = [part for message in prompt.messages for part in message.parts]
    newest = [part.text for part in parts if isinstance(part, ToolResult)][-1:]
    number = int(newest[0].split()[3]) + 1 if newest else 0
    return (calls(("look", {"at": f"{number} {'word ' * 100}"})) if number < 12 else says("Done.")).reply


@EVERY
def test_a_history_that_is_cut_and_summarized_is_the_same_after_a_crash_at_any_commit(every: int) -> None:
    def make(world: World) -> Story:
        mind = BrainSpec(model="scripted:script", context_strategy="summarize", max_output_tokens=300)
        story = Story(world, kind="task", mind=mind)
        story.models, story.window = [Sensible(world, writer)], 13_000
        return story

    async def program(world: World, story: Story) -> None:
        await story.begin("Look twelve times.")
        if not (await world.session("s")).ended:
            await story.attend()

    for world, story in everywhere(make, program, every):
        receipt = world.run(check_outcome(world, story))
        assert (receipt.state, receipt.terminal_reason) == ("COMPLETED", "completed"), world
        assert any(line.purpose == "summary" for line in receipt.requests), world
        assert story.model.requests[-1].messages[0].parts[0] == Text("Look twelve times."), world

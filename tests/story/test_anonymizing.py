"""A session whose model is elsewhere: the wire sees placeholders, everybody at home the real values."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from loops import Story, used

from halter.core.events import RequestStarted
from halter.core.ids import WorkerId, session_stream
from halter.core.messages import (
    AnonymizationPolicy,
    Prompt,
    Reply,
    Text,
    TextListener,
    ToolCall,
    bound_prompt_tokens,
    make_user_message,
)
from halter.core.ports import read_body
from halter.core.tools import Permit
from halter.core.usage import FREE_PRICE, ModelName, Price, Usage
from halter.guard.model_door import ModelDoor
from halter.guard.prepare import SessionContext
from halter.guard.request import AnsweredRequest, ModelRequest
from halter.models.prices import Prices
from halter.present.receipt import _summary
from halter.spec.models import BrainSpec
from halter.testing.world import World
from halter_drills.workload import begin_session, make_session_context, policy_of

NAME = 'Ada "the\\new\' Countess" König'
MAIL = "ada.koenig@example.com"
SECRET = "hunter2-hunter2"
TASK = f"Write to {NAME}, {MAIL}. Do not say {SECRET}."
REAL = (NAME, MAIL, "König", SECRET)

Answer = Callable[[Prompt], Reply]


class Elsewhere:
    """A model of a provider: it says what its answers make of the prompt that it was sent."""

    base_url: str | None = None

    def __init__(self, *answers: Answer) -> None:
        self.name = ModelName("openai", "x")
        self.requests: list[Prompt] = []
        self.answers = list(answers)

    def count(self, prompt: Prompt) -> int:
        return bound_prompt_tokens(prompt)

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        self.requests.append(prompt)
        reply = self.answers.pop(0)(prompt)
        for letter in reply.text if on_text else "":
            on_text(letter)
        return reply


class Private(Story):
    """A session that tells its models no names."""

    names: tuple[str, ...] = (NAME,)

    def standing(self) -> SessionContext:
        return msgspec.structs.replace(super().standing(), anonymize=AnonymizationPolicy(self.names))


def wire(model: Elsewhere) -> str:
    """All that a model was ever sent."""
    return "\n".join(_texts(prompt) for prompt in model.requests)


def _texts(prompt: Prompt) -> str:
    texts = [prompt.system, *(f"{tool.description} {tool.schema!r}" for tool in prompt.tools), str(prompt.facts)]
    parts = (part for message in prompt.messages for part in message.parts)
    return "\n".join([*texts, *(part.arguments if isinstance(part, ToolCall) else part.text for part in parts)])


def shown(prompt: Prompt, kind: str) -> str:
    """The first placeholder of a kind that the model was sent."""
    match = re.search(rf"\[{kind}_[0-9a-f]+\]", _texts(prompt))
    assert match is not None
    return match[0]


def tells(words: Callable[[Prompt], str], usage: Usage | None = None) -> Answer:
    return lambda prompt: Reply((Text(words(prompt), "model", trusted=False),), "end", usage)


def sends(arguments: Callable[[Prompt], Any]) -> Answer:
    def answer(prompt: Prompt) -> Reply:
        return Reply((ToolCall("m0", "send", json.dumps(arguments(prompt))),), "calls", used())

    return answer


def private(world: World, *answers: Answer, **more: Any) -> tuple[Private, Elsewhere]:
    story, model = Private(world, **more), Elsewhere(*answers)
    story.models = [model]  # pyright: ignore[reportAttributeAccessIssue]
    return story, model


def greeting(prompt: Prompt) -> dict[str, str]:
    return {"text": f"Dear {shown(prompt, 'NAME')} <{shown(prompt, 'EMAIL')}>"}


DEAR = f"Dear {NAME} <{MAIL}>"


async def test_the_wire_sees_placeholders_and_the_tool_gets_the_real_value(world: World) -> None:
    story, model = private(world, sends(greeting), tells(lambda prompt: f"{shown(prompt, 'NAME')} has mail."))
    await story.run(TASK)
    assert story.desk.done == {f"send {DEAR}": 1}
    assert not [value for value in REAL if value in wire(model)]
    assert story.messages[-1].parts[0] == Text(f"{NAME} has mail.", "model", trusted=False)
    again = model.requests[1].messages[1].parts[0]
    assert isinstance(again, ToolCall)
    assert json.loads(again.arguments) == greeting(model.requests[0])


async def test_the_journal_keeps_what_was_really_said(world: World) -> None:
    story, _ = private(world, sends(greeting), tells(lambda prompt: f"{shown(prompt, 'NAME')} has mail."))
    await story.run(TASK)
    events = await story.events()
    payload = b"\n".join([await read_body(world.store, event) for event in events]).decode()
    assert MAIL in payload
    assert f"{json.dumps(NAME, ensure_ascii=False)[1:-1]} has mail." in payload
    assert not re.search(r"\[(?:NAME|EMAIL)_", payload)


async def test_after_a_restart_an_answer_means_the_same(world: World) -> None:
    story, model = private(world, tells(lambda _: "Yes?"))
    await story.run(TASK)
    before = (shown(model.requests[0], "NAME"), shown(model.requests[0], "EMAIL"))
    await world.restart()
    model.answers = [sends(greeting), tells(lambda _: "Done.")]
    await story.says("Go on.")
    assert story.desk.done == {f"send {DEAR}": 1}
    assert (shown(model.requests[-1], "NAME"), shown(model.requests[-1], "EMAIL")) == before
    assert not [value for value in REAL if value in wire(model)]


async def test_a_stream_says_real_values_and_no_secrets(world: World) -> None:
    story, _ = private(world, tells(lambda prompt: f"{shown(prompt, 'NAME')} knows hunter2-hunter2 [EMAIL_000000] ["))
    await story.run(TASK)
    words = "".join(chunk.text for chunk in story.chunks)
    assert words == f"{NAME} knows [redacted] [EMAIL_000000] ["


async def test_a_secret_that_comes_together_only_at_home_is_taken_out(world: World) -> None:
    story, _ = private(world, tells(lambda prompt: f"It is {shown(prompt, 'NAME')}-hunter2."))
    story.names = ("hunter2",)
    await story.run("Say hunter2.")
    assert story.messages[-1].parts[0] == Text("It is [redacted].", "model", trusted=False)
    assert "".join(chunk.text for chunk in story.chunks) == "It is [redacted]."


def text_call(prompt: Prompt) -> str:
    key = re.findall(r"<skill (\w+)> and ends", _texts(prompt))[-1]
    return f"I write to {shown(prompt, 'NAME')}. <skill {key}>send(text='{greeting(prompt)['text']}')</skill>"


@pytest.mark.parametrize("crash", [False, True])
async def test_calls_that_are_written_as_text_get_the_real_value(world: World, *, crash: bool) -> None:
    mind = BrainSpec(model="openai:x", instructions="You are a clerk.", tool_calls="text")
    story, model = private(world, tells(text_call, used()), tells(lambda _: "Done."), mind=mind)
    await story.run(TASK)
    if crash:
        await world.restart()
        model.answers = [tells(lambda _: "Still done.")]
        await story.says("Well?")
    assert story.desk.done == {f"send {DEAR}": 1}
    assert not [value for value in REAL if value in wire(model)]


async def test_a_call_with_a_placeholder_that_nobody_knows_is_refused(world: World) -> None:
    story, _ = private(world, sends(lambda _: {"text": "Dear [NAME_000000]"}), tells(lambda _: "Oh."))
    await story.run(TASK)
    assert not story.desk.done
    (result,) = story.results()
    assert result.outcome == "invalid_arguments"
    assert "The value of [NAME_000000] is unknown: request it again." in result.text


async def test_without_anonymizing_the_same_call_is_made(world: World) -> None:
    story, model = Story(world), Elsewhere(sends(lambda _: {"text": "Dear [NAME_000000]"}), tells(lambda _: "Oh."))
    story.models = [model]  # pyright: ignore[reportAttributeAccessIssue]
    await story.run(TASK)
    assert story.desk.done == {"send Dear [NAME_000000]": 1}
    assert MAIL in wire(model)


async def test_a_model_on_this_machine_is_told_everything(world: World) -> None:
    story, model = private(world, tells(lambda _: "Yes?"))
    model.name, model.base_url = ModelName("ollama", "x"), "http://127.0.0.1:11434/v1"
    await story.run(TASK)
    assert MAIL in wire(model)
    assert (await story.receipt()).anonymized == {}


@pytest.mark.parametrize("name", [ModelName("openai", "gpt-5"), ModelName("ollama", "gpt-oss:120b-cloud")])
async def test_a_model_behind_a_gateway_on_this_machine_is_not(world: World, name: ModelName) -> None:
    story, model = private(world, tells(lambda _: "Yes?"))
    model.name, model.base_url = name, "http://127.0.0.1:4000/v1"
    story.price = Price(Decimal(1), Decimal(1))
    await story.run(TASK)
    assert MAIL not in wire(model)
    assert (await story.receipt()).anonymized == {"email": 1, "name": 1}


async def test_the_receipt_says_what_was_anonymized(world: World) -> None:
    story, _ = private(world, sends(greeting), tells(lambda _: "Done."))
    await story.run(TASK)
    made = await story.receipt()
    assert [line.anonymized for line in made.requests] == [{"email": 1, "name": 1}] * 2
    assert made.anonymized == {"email": 2, "name": 2}
    assert ("anonymized", "email 2 times, name 2 times") in _summary(made)


async def test_what_is_held_covers_what_is_sent(world: World) -> None:
    def report(prompt: Prompt) -> Reply:
        return Reply((Text("Yes?"),), "end", used(bound_prompt_tokens(prompt) - 500))

    names = [f"N{number}" for number in range(200)]
    story, model = private(world, report, report)
    story.names = tuple(names)
    story.price = Price(Decimal(1), Decimal(0))
    await story.run("Say hello to " + ", ".join(names[:100]))
    await story.says("And to " + ", ".join(names[100:]))
    started = [stored.event for stored in await story.events() if isinstance(stored.event, RequestStarted)]
    bounds = [max(leg.amount for leg in event.legs if leg.unit == "usd") for event in started]
    assert bounds[0] >= bound_prompt_tokens(model.requests[0])
    assert bounds[1] >= bound_prompt_tokens(model.requests[1]) - 500


async def test_the_record_of_a_request_holds_what_it_really_said(world: World) -> None:
    policy = policy_of()
    lease = await begin_session(world.store, WorkerId("w"), "s", policy)
    session_context = msgspec.structs.replace(make_session_context("s", policy), anonymize=AnonymizationPolicy())
    model = Elsewhere(tells(lambda prompt: f"It is {shown(prompt, 'EMAIL')}."))
    prices = Prices({"openai:x": FREE_PRICE})
    door = ModelDoor(world.store, world.clock, world.ledger, prices, redact=lambda text: text)
    answer = await door.request(
        lease, session_context, ModelRequest(id="s.1", prompt=Prompt(messages=(make_user_message(MAIL),))), model
    )
    assert isinstance(answer, AnsweredRequest)
    assert answer.reply.text == f"It is {MAIL}."
    assert MAIL not in wire(model)
    bodies = [await read_body(world.store, event) for event in await world.events(session_stream("s"))]
    assert [MAIL.encode() in body for body in bodies if body] == [True, True]

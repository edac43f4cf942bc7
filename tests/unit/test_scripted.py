"""A model that says what its script tells it to say."""

from typing import Any

import pytest

from halter.config.yaml_reader import load_bytes
from halter.core.clock import SECOND
from halter.core.errors import ConfigError, ModelRejected, ModelUnavailable
from halter.core.messages import (
    Message,
    Prompt,
    Reply,
    Text,
    ToolCall,
    ToolResult,
    bound_prompt_tokens,
    make_user_message,
)
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import Usage
from halter.models.scripted import Scripted, ScriptLine, make_scripted_model, say
from halter.testing.fakes import ManualClock
from halter.testing.world import World


def script(text: str, clock: Any = None) -> Scripted:
    document = load_bytes(text.encode(), "script.yaml")
    return make_scripted_model(document.value, document.source_map.at, clock or ManualClock())


def permit() -> Permit:
    return Permit("r/0", 0, {})


async def ask_model(model: Scripted, text: str = "Hello.") -> Reply:
    return await model.ask(Prompt(messages=(make_user_message(text),)), permit())


async def test_replies_are_given_in_order() -> None:
    model = script("- text: One.\n- text: Two.\n")
    assert [(await ask_model(model)).text, (await ask_model(model)).text] == ["One.", "Two."]
    assert len(model.requests) == 2


async def test_a_reply_carries_calls_a_stop_and_a_usage() -> None:
    model = script("""
- text: Looking.
  calls:
    - {tool: read_file, arguments: {path: app.log}}
    - {tool: shell, arguments: "{not json"}
  usage: {input_tokens: 900, output_tokens: 40, cache_read_tokens: 800}
- text: Cut
  stop: max_tokens
""")
    reply = await ask_model(model)
    words, *calls = reply.parts
    assert words == Text("Looking.", "model", trusted=False)
    assert calls == [ToolCall("0.0", "read_file", '{"path":"app.log"}'), ToolCall("0.1", "shell", "{not json")]
    assert (reply.stop, reply.usage) == ("calls", Usage(900, 40, 800))
    assert await ask_model(model) == Reply((Text("Cut", "model", trusted=False),), "max_tokens")


async def test_a_reply_with_a_when_waits_for_its_message() -> None:
    model = script("- {when: how much, text: Seven.}\n- text: Anything.\n")
    assert (await ask_model(model)).text == "Anything."
    assert (await ask_model(model, "And how much is it?")).text == "Seven."


async def test_a_reply_with_an_unless_is_left_out_once_its_words_were_said_anywhere() -> None:
    lines = [
        '- {when: here, unless: "seen.", text: Look., repeat: true}',
        '- {unless: "done.", text: Do., repeat: true}',
    ]
    model = script("\n".join([*lines, "- {text: Rest., repeat: true}"]))

    async def after(*texts: str) -> str:
        return (await model.ask(Prompt(messages=tuple(map(make_user_message, texts))), permit())).text

    assert await after("I am here.") == "Look."
    assert await after("It was seen.", "I am here.") == "Do."
    assert await after("It was seen.", "And done.", "I am here.") == "Rest."


async def test_what_a_tool_said_counts_as_the_last_message_of_the_user() -> None:
    model = Scripted([say("Fine.", when="42 lines")], ManualClock())
    message = Message("user", (ToolResult("1", "look", "ok", "42 lines"),))
    assert (await model.ask(Prompt(messages=(message,)), permit())).text == "Fine."


async def test_a_script_that_has_run_out_says_so() -> None:
    model = script("- {when: never said, text: No.}\n")
    with pytest.raises(ModelRejected, match=r"none of the 1 remaining replies fits 'Hello\.'") as lost:
        await ask_model(model)
    assert not lost.value.billed
    await ask_model(model, "never said")
    with pytest.raises(ModelRejected, match="all 1 replies of the script are used"):
        await ask_model(model)


async def test_failures_are_those_of_a_provider() -> None:
    model = script("""
- fails: {kind: RateLimited, message: slow down, billed: false, retry_after: 30s, unavailable: true}
- fails: {kind: BadRequest, message: no}
  usage: {input_tokens: 5}
""")
    with pytest.raises(ModelUnavailable, match="RateLimited: slow down") as busy:
        await ask_model(model)
    assert (busy.value.billed, busy.value.retry_after) == (False, 30 * SECOND)
    with pytest.raises(ModelRejected, match="BadRequest: no") as never:
        await ask_model(model)
    assert (never.value.billed, never.value.usage) == (True, Usage(5))


async def test_a_slow_reply_takes_virtual_time(world: World) -> None:
    model = script("- {text: Slow., takes: 2s}\n- {text: Slower., takes: 2.5}\n", world.clock)
    before = world.now
    await ask_model(model)
    assert world.now - before == 2 * SECOND
    await ask_model(model)
    assert world.now - before == 4.5 * SECOND


async def test_nothing_is_said_without_a_fresh_permit() -> None:
    model, used = script("- text: One.\n"), permit()
    used.use()
    with pytest.raises(RuntimeError, match="was used before"):
        await model.ask(Prompt(messages=()), used)
    assert model.requests == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("text: One.\n", "script.yaml line 1: a script must be a list of replies"),
        ("- text: One.\n- txt: Two.\n", "script.yaml line 2: Object contains unknown field `txt`"),
        ("- text: One.\n- text: Two.\n  stop: soon\n", "script.yaml line 3: Invalid enum value 'soon'"),
        ("- calls:\n  - tool: a\n  - arguments: {}\n", "script.yaml line 3: Object missing required field `tool`"),
        ("- usage:\n    input_tokens: 1\n    cache_read_tokens: 2\n", "script.yaml line 1: Cached tokens exceed"),
        ("- text: One.\n  takes: soon\n", "script.yaml line 2: 'soon' is not a duration"),
        ("- text: One.\n  takes: -1\n", "script.yaml line 2: -1.0 is not a duration"),
        ("- fails:\n    kind: Busy\n    retry_after: later\n", "script.yaml line 3: 'later' is not a duration"),
        ("- fails:\n    kind: Busy\n    sort: x\n", "script.yaml line 3: Object contains unknown field `sort`"),
    ],
)
def test_a_mistake_in_a_script_is_a_sentence_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        script(text)
    assert str(wrong.value).startswith(sentence)


def test_every_byte_that_is_sent_counts_as_a_token() -> None:
    tool = ToolSpec(name="look", description="Löök.", schema=b'{"type":"object"}')
    bare = Prompt(messages=())
    message = Message("assistant", (ToolCall("1", "look", "{}"),))
    heard = Message("user", (ToolResult("1", "look", "ok", "ü" * 500),))
    for prompt, least in (
        (Prompt(system="ä" * 100, messages=()), 200),
        (Prompt(messages=(make_user_message("\ud800" * 10),)), 30),
        (Prompt(messages=(message, heard)), 1000 + len("1look{}1look")),
        (Prompt(messages=(), tools=(tool,)), len(b'lookLXXXXk.{"type":"object"}')),
    ):
        assert bound_prompt_tokens(prompt) >= bound_prompt_tokens(bare) + least
        assert Scripted([], ManualClock()).count(prompt) == bound_prompt_tokens(prompt)


async def test_a_line_made_by_hand_needs_no_file() -> None:
    model = Scripted([ScriptLine(reply=Reply(()), when="x"), say("Hi.", Usage(1, 2))], ManualClock())
    assert await ask_model(model) == Reply((Text("Hi.", "model", trusted=False),), "end", Usage(1, 2))

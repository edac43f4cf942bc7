"""What a model is told over a wire: all that Halter says, in a form that its provider takes, and nothing else."""

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from halter import File
from halter.core.errors import ModelRejected
from halter.core.messages import VOLATILE, Message, Prompt, Reply, Text, ToolCall, ToolResult, make_user_message
from halter.core.tools import ToolSpec
from halter.core.usage import ModelName
from halter.models.exchange import ExchangeTerms
from halter.models.input_files import make_files_message
from halter.models.providers import make_model
from halter.models.pydantic_messages import shape_history
from halter.models.wire import ModelHabits
from halter.spec.models import Provider

CALLED = Message("assistant", (Text("Let me look.", "model"), ToolCall("id-1", "read_file", '{"path": "a.log"}')))
RESULT = Message("user", (ToolResult("id-1", "read_file", "ok", "line one"),))
LONG = (
    make_user_message("What is in a.log?"),
    CALLED,
    RESULT,
    Message("assistant", (Text("One line.", "model"),)),
    make_user_message("Sure?"),
)


@pytest.fixture(params=[False], ids=["whole"])
def streaming(request: pytest.FixtureRequest) -> bool:
    return request.param


def texts(value: Any) -> Iterator[str]:
    """Find every text in a request, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def turns(body: dict[str, Any]) -> list[Any]:
    return next(body[key] for key in ("contents", "messages", "input") if key in body)


def role(turn: dict[str, Any]) -> str:
    """Tell who speaks: the model, or whoever it answers. Calls and results of the wire `responses` are no messages."""
    by_model = turn.get("role") in {"assistant", "model"} or turn.get("type") in {"function_call", "reasoning"}
    return "assistant" if by_model else "user"


def without_marks(value: Any) -> Any:
    """Leave out where a provider is told to cache: the marks move, and are no part of what is cached.

    Over the wire `responses` a text with a mark is a list of one part, and the same text without one is a string.
    """
    if isinstance(value, dict):
        marks = ("cache_control", "prompt_cache_breakpoint")
        kept = {key: without_marks(each) for key, each in value.items() if key not in marks}
        return kept["text"] if kept.keys() == {"type", "text"} and kept["type"] == "input_text" else kept
    if isinstance(value, list) and len(value) == 1 and isinstance(text := without_marks(value[0]), str):
        return text
    return [without_marks(each) for each in value] if isinstance(value, list) else value


async def test_system_history_and_tools_arrive(desk: Any) -> None:
    desk.provider.says("Yes.")
    await desk.ask(desk.prompt(*LONG, system="Be brief."))
    sent_texts = list(texts(desk.provider.last))
    assert {"Be brief.", "What is in a.log?", "Let me look.", "line one", "One line.", "Sure?", "Reads a file."} <= set(
        sent_texts
    )
    arguments = json.dumps(desk.provider.last).replace(" ", "").replace("\\", "")
    assert '"path":"a.log"' in arguments
    assert '"required":["path"]' in arguments


LIMITS = {
    "openai": ["max_completion_tokens"],
    "responses": ["max_output_tokens"],
    "anthropic": ["max_tokens"],
    "google": ["generationConfig", "maxOutputTokens"],
}


async def test_the_most_that_may_be_written_is_always_said(desk: Any) -> None:
    desk.provider.says("Yes.")
    await desk.ask()
    value = desk.provider.last
    for key in LIMITS[desk.wire]:
        value = value[key]
    assert value == 777


@pytest.mark.parametrize("wire", ["openai"], indirect=True)
@pytest.mark.parametrize(
    ("model", "known_as"), [("qwen3", "max_tokens"), ("gpt-oss:20b", "max_tokens"), ("gpt-5", "max_completion_tokens")]
)
async def test_a_server_is_told_the_limit_by_the_name_that_it_knows(desk: Any, model: str, known_as: str) -> None:
    desk.provider.says("Yes.")
    result = desk.reach(ModelName("local", model))
    await desk.ask(model=result)
    await result.aclose()
    assert {key for key in desk.provider.last if key.startswith("max_")} == {known_as}


async def test_a_temperature_is_sent_only_if_somebody_chose_one(desk: Any) -> None:
    desk.provider.says("Yes.")
    await desk.ask()
    assert "temperature" not in json.dumps(desk.provider.last)
    chosen = desk.reach(ModelName("mine", "some-model"), habits=ModelHabits(temperature=0.25))
    await desk.ask(model=chosen)
    await chosen.aclose()
    assert '"temperature": 0.25' in json.dumps(desk.provider.last)


MADE_BY = {"openai": "gpt-5-mini", "responses": "gpt-5.6", "anthropic": "claude-opus-4-8", "google": "gemini-2.5-flash"}
TOOL = ToolSpec(name="read_file", description="Reads a file.", schema=b'{"type":"object","properties":{}}')
FORM = ToolSpec(
    name="final_answer",
    description="Give your final answer.",
    schema=b'{"type":"object","properties":{"value":{"type":"integer","description":"how many"}},"required":["value"]}',
)


async def ask_in_form(desk: Any, wire: str, text: str, *tools: ToolSpec) -> Reply:
    desk.provider.says(text)
    model = desk.reach(ModelName(wire, MADE_BY[wire]), habits=ModelHabits(native_output="final_answer"))
    try:
        return await desk.ask(desk.prompt(tools=tools), model=model)
    finally:
        await model.aclose()


async def test_an_answer_is_held_to_its_form_by_a_provider_that_can(desk: Any, wire: str) -> None:
    tools = (FORM,) if wire == "google" else (FORM, TOOL)
    reply = await ask_in_form(desk, wire, '{"value": 3}', *tools)
    assert [(call.tool, call.arguments) for call in reply.calls] == [("final_answer", '{"value": 3}')]
    assert (reply.stop, reply.text, desk.heard) == ("calls", "", [])
    output = json.dumps(desk.provider.last)
    assert "how many" in output
    offered = json.dumps(desk.provider.last.get("tools", []))
    assert "final_answer" not in offered
    assert ("read_file" in offered) == (len(tools) > 1)


async def test_an_answer_that_is_no_form_stays_a_text_and_is_asked_for_again_by_the_loop(desk: Any, wire: str) -> None:
    reply = await ask_in_form(desk, wire, "three", FORM)
    assert (reply.calls, reply.text) == ((), "three")


async def test_without_a_word_for_it_the_form_is_a_tool(desk: Any) -> None:
    desk.provider.says('{"value": 3}')
    reply = await desk.ask(desk.prompt(tools=(FORM,)))
    assert (reply.calls, reply.text) == ((), '{"value": 3}')
    assert "final_answer" in json.dumps(desk.provider.last["tools"])


async def test_sound_arrives_where_the_protocol_has_it(desk: Any, wire: str) -> None:
    desk.provider.says("A song.")
    sound = make_files_message([File(b"\xff\xfb\x90\x00" + bytes(413), "audio/mpeg", "song.mp3")])
    if wire in ("anthropic", "responses"):
        with pytest.raises(ModelRejected, match="Unsendable"):
            await desk.ask(desk.prompt(sound))
        assert desk.provider.asked == []
        return
    await desk.ask(desk.prompt(sound))
    result = turns(desk.provider.last)[-1]["parts" if wire == "google" else "content"]
    (sent,) = [part[key] for part in result for key in ("inlineData", "input_audio") if key in part]
    data = sent.pop("data").replace("-", "+").replace("_", "/")
    assert base64.b64decode(data + "=" * (-len(data) % 4)) == b"\xff\xfb\x90\x00" + bytes(413)
    assert sent == ({"mime_type": "audio/mpeg"} if wire == "google" else {"format": "mp3"})


async def test_each_request_begins_with_all_of_the_one_before(desk: Any) -> None:
    desk.provider.says("Yes.")
    for length in (1, 3, 5):
        await desk.ask(desk.prompt(*LONG[:length]))
    bodies = [without_marks(result.body) for result in desk.provider.asked]
    for before, after in itertools.pairwise(bodies):
        assert turns(after)[: len(turns(before))] == turns(before)
        assert {key: value for key, value in before.items() if value is not turns(before)} == {
            key: value for key, value in after.items() if value is not turns(after)
        }


def test_a_message_is_converted_once() -> None:
    messages = [make_user_message(f"Message {number}.") if number % 2 == 0 else CALLED for number in range(6)]
    first = [part for turn in shape_history(messages) for part in turn.parts]
    again = [part for turn in shape_history([*messages, RESULT]) for part in turn.parts]
    assert all(one is other for one, other in zip(first, again, strict=False))


@pytest.mark.parametrize("wire", ["anthropic"], indirect=True)
async def test_the_stable_beginning_is_marked_for_the_cache_for_minutes(desk: Any) -> None:
    desk.provider.says("Yes.")
    await desk.ask(desk.prompt(*LONG))
    body = desk.provider.last
    values = {"type": "ephemeral", "ttl": "5m"}
    assert body["tools"][-1]["cache_control"] == values
    assert body["system"][-1]["cache_control"] == values
    assert marks(body) == [None, None, None, values, None, values]


def marks(body: Any) -> list[Any]:
    return [block.get("cache_control") for turn in body["messages"] for block in turn["content"]]


NOW = Text("It is 3 o'clock.", "config", reason=VOLATILE)


@pytest.mark.parametrize("wire", ["anthropic"], indirect=True)
async def test_the_cache_ends_before_what_is_true_only_now(desk: Any) -> None:
    desk.provider.says("Yes.")
    values = {"type": "ephemeral", "ttl": "5m"}
    user_message = make_user_message("What is in a.log?")
    await desk.ask(desk.prompt(Message("user", (*user_message.parts, NOW))))
    await desk.ask(desk.prompt(user_message, CALLED, Message("user", (*RESULT.parts, NOW))))
    await desk.ask(desk.prompt(user_message, CALLED, RESULT, LONG[3], Message("user", (NOW,))))
    first, second, alone = (marks(each.body) for each in desk.provider.asked)
    assert first == [values, None]
    # What the first request left in the cache is a beginning of the second, up to a mark.
    assert second == [values, None, None, values, None]
    assert alone == [None, None, None, values, None, None]


@pytest.mark.parametrize("wire", ["anthropic"], indirect=True)
async def test_nothing_is_marked_for_a_cache_that_is_switched_off(desk: Any) -> None:
    desk.provider.says("Yes.")
    model = desk.reach(desk.model.name, terms=ExchangeTerms(prompt_cache=False))
    await desk.ask(desk.prompt(*LONG), model=model)
    await model.aclose()
    assert "cache_control" not in json.dumps(desk.provider.last)


@pytest.mark.parametrize(
    "arguments",
    ["", "   ", "{", '{"path": "a', "[1]", "7", "null", '"text"', "\x00", "\ud800", "{" * 5000, '{"a": NaN}'],
)
async def test_arguments_that_a_model_got_wrong_can_be_shown_to_it_again(desk: Any, arguments: str) -> None:
    desk.provider.says("Yes.")
    called = Message("assistant", (ToolCall("id-1", "read_file", arguments),))
    message = Message("user", (ToolResult("id-1", "read_file", "error", "These are no arguments."),))
    assert (await desk.ask(desk.prompt(make_user_message("Go."), called, message))).text == "Yes."
    outcome = {
        "openai": lambda body: json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"]),
        "responses": lambda body: json.loads(body["input"][2]["arguments"]),
        "anthropic": lambda body: body["messages"][1]["content"][0]["input"],
        "google": lambda body: body["contents"][1]["parts"][0]["functionCall"].get("args", {}),
    }[desk.wire](desk.provider.last)
    assert isinstance(outcome, dict)
    assert list(outcome) in ([], ["_invalid"])


@pytest.mark.parametrize("wire", ["anthropic"], indirect=True)
async def test_a_call_that_failed_is_told_as_one(desk: Any) -> None:
    desk.provider.says("Yes.")
    failed = Message("user", (ToolResult("id-1", "read_file", "denied", "You may not."),))
    await desk.ask(desk.prompt(make_user_message("Go."), CALLED, failed))
    block = desk.provider.last["messages"][2]["content"][0]
    assert (block["type"], block["is_error"]) == ("tool_result", True)


async def test_turns_alternate_and_results_stand_before_words(desk: Any) -> None:
    desk.provider.says("Yes.")
    history = (
        make_user_message("One."),
        make_user_message("Two."),
        Message("assistant", (ToolCall("a", "read_file", "{}"), ToolCall("b", "read_file", "{}"))),
        Message("user", (Text("By the way."), ToolResult("a", "read_file", "ok", "first"))),
        Message("user", (ToolResult("b", "read_file", "ok", "second"), Text("Go on."))),
        Message("assistant", (Text("  \n", "model"),)),
        make_user_message(""),
    )
    await desk.ask(desk.prompt(*history, system=""))
    results = turns(desk.provider.last)
    order = [
        text
        for text in texts(results)
        if text in {"One.", "Two.", "first", "second", "By the way.", "Go on.", "(empty)"}
    ]
    assert order == ["One.", "Two.", "first", "second", "By the way.", "Go on.", "(empty)"]
    assert [who for who, _ in itertools.groupby(map(role, results))] == ["user", "assistant", "user"]
    assert desk.wire != "anthropic" or len(results) == 3


async def test_ids_and_names_that_no_provider_takes_are_mended_alike_in_call_and_result(desk: Any) -> None:
    desk.provider.says("Yes.")
    called = Message("assistant", (ToolCall("0.0/ü" * 20, "no such: tool!", "{}"),))
    message = Message("user", (ToolResult("0.0/ü" * 20, "no such: tool!", "error", "There is no such tool."),))
    await desk.ask(desk.prompt(make_user_message("Go."), called, message))
    ids = [text for text in texts(turns(desk.provider.last)) if text.startswith("call_")]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert "no_such__tool_" in list(texts(turns(desk.provider.last)))


@pytest.mark.parametrize("text", ["\x00", "a\ud800b", "\udfff", "😀", "﷽" * 100])
async def test_any_text_can_be_said(desk: Any, text: str) -> None:
    desk.provider.says("Yes.")
    conversation = (make_user_message(text), CALLED, Message("user", (ToolResult("id-1", "read_file", "ok", text),)))
    assert (await desk.ask(desk.prompt(*conversation, system=text))).text == "Yes."


async def test_a_tool_with_a_schema_of_any_depth_arrives(desk: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"filter": {"$ref": "#/$defs/filter"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "$defs": {"filter": {"type": "object", "properties": {"name": {"type": "string"}}}},
        "additionalProperties": False,
    }
    desk.provider.says("Yes.")
    tool = ToolSpec(name="search", description="Searches.", schema=json.dumps(schema).encode())
    bare = ToolSpec(name="now", description="", schema=b'{"type":"object","properties":{}}')
    await desk.ask(desk.prompt(tools=(tool, bare)))
    assert {"search", "now"} <= set(texts(desk.provider.last))


@pytest.mark.parametrize("wire", ["google"], indirect=True)
async def test_an_answer_is_never_continued_by_a_request_that_nobody_held_money_for(desk: Any) -> None:
    values = {"content": {"role": "model", "parts": [{"text": "And so"}]}, "finishReason": "CONTINUATION"}
    desk.provider.sends(200, {"candidates": [{**values, "continuationToken": "bW9yZQ=="}], "modelVersion": "m"})
    assert (await desk.ask()).stop == "max_tokens"
    assert len(desk.provider.asked) == 1


AMBIENT = {
    "OPENAI_API_KEY": "sk-ambient",
    "OPENAI_ADMIN_KEY": "sk-ambient-admin",
    "OPENAI_ORG_ID": "org-ambient",
    "OPENAI_PROJECT_ID": "project-ambient",
    "OPENAI_CUSTOM_HEADERS": "X-Secret: header-ambient",
    "ANTHROPIC_API_KEY": "sk-ant-ambient",
    "ANTHROPIC_AUTH_TOKEN": "token-ambient",
    "ANTHROPIC_CUSTOM_HEADERS": "X-Secret: header-ambient",
    "GEMINI_API_KEY": "gemini-ambient",
    "GOOGLE_API_KEY": "google-ambient",
}


@pytest.mark.parametrize("api_key", ["", "${secret:MINE}"])
async def test_nothing_in_the_environment_goes_to_an_address_that_an_agents_file_chose(
    desk: Any, monkeypatch: pytest.MonkeyPatch, api_key: str
) -> None:
    for name, value in AMBIENT.items():
        monkeypatch.setenv(name, value)
    desk.provider.says("Yes.")
    chosen = Provider(wire=desk.wire, base_url=desk.model.base_url, api_key=api_key)
    for name in ("openai:m", "anthropic:m", "google:m", "mine:m"):
        model = make_model(name, {name.split(":")[0]: chosen}, {**AMBIENT, "MINE": "own-key"}.get)
        await desk.ask(model=model)
        await model.aclose()
    for result in desk.provider.asked:
        assert "ambient" not in f"{result.path} {result.headers} {result.body}"
        assert ("own-key" in str(result.headers)) is bool(api_key)


async def test_a_proxy_does_not_stand_between_this_machine_and_itself(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    desk.provider.says("Yes.")
    assert (await desk.ask()).text == "Yes."


@pytest.mark.parametrize("wire", ["openai", "anthropic"], indirect=True)
async def test_a_key_of_the_environment_goes_where_the_environment_points(desk: Any) -> None:
    desk.provider.says("Yes.")
    prefix = desk.wire.upper()
    values = {f"{prefix}_BASE_URL": desk.model.base_url, f"{prefix}_API_KEY": "given-key"}
    model = make_model(f"{desk.wire}:m", {}, values.get)
    await desk.ask(model=model)
    await model.aclose()
    assert "given-key" in str(desk.provider.asked[-1].headers)


def test_a_key_is_not_shown_by_the_model_that_has_it() -> None:
    model = make_model("openai:gpt-5", {}, {"OPENAI_API_KEY": "sk-made-up"}.get)
    assert "sk-made-up" not in repr(model)


def test_a_prompt_is_counted_without_asking_anybody() -> None:
    model = make_model("openai:gpt-5", {}, {"OPENAI_API_KEY": "sk-made-up"}.get)
    assert model.count(Prompt(messages=(make_user_message("four"),))) >= 4


PNG = b"\x89PNG\r\n\x1a\n" + bytes(99)
PAPER = b"%PDF-1.4\n<< /Type /Page >>\n<< /Type /Pages /Count 1 >>"


def with_file_of_a_tool(file: File) -> tuple[Message, ...]:
    """A question, a call, its result, and the file of the result, as a session's history has them."""
    (part,) = (replace(part, origin="tool") for part in make_files_message([file]).parts if isinstance(part, Text))
    result = ToolResult("id-1", "read_file", "ok", f"Drawn.\n{part.text}")
    return (make_user_message("What is in it?"), CALLED, Message("user", (result, part)))


def decode(text: str) -> bytes:
    text = text.rpartition("base64,")[2].replace("-", "+").replace("_", "/")
    return base64.b64decode(text + "=" * (-len(text) % 4))


@pytest.mark.parametrize("file", [File(PNG, "image/png", "a.png"), File(PAPER, "application/pdf", "a.pdf")])
async def test_a_file_of_a_tool_is_sent_as_a_file_with_its_result(desk: Any, wire: str, file: File) -> None:
    desk.provider.says("A cat.")
    model = desk.reach(ModelName("openai", "gpt-4o-mini")) if wire == "openai" else desk.model
    await desk.ask(desk.prompt(*with_file_of_a_tool(file)), model)
    await model.aclose()
    body = json.dumps(turns(desk.provider.last))
    long = [text for text in texts(turns(desk.provider.last)) if len(text) > 60 and " " not in text]
    encoded = [text for text in long if decode(text) == file.data]
    assert len(encoded) == 1, "once, as it is"
    assert (body.count("Drawn."), body.count(f"[{file.name}, ")) == (1, 1)
    match wire:
        case "anthropic":
            (result,) = turns(desk.provider.last)[-1]["content"]
            kinds = [part["type"] for part in result["content"]]
            assert kinds == ["text", "image" if file.name == "a.png" else "document"]
        case "openai":
            # Results of calls take no pictures there: they follow as a message.
            assert [turn["role"] for turn in turns(desk.provider.last)[-2:]] == ["tool", "user"]
        case "responses":
            result = turns(desk.provider.last)[-1]
            kind = "input_image" if file.name == "a.png" else "input_file"
            assert (result["type"], [part["type"] for part in result["output"]]) == (
                "function_call_output",
                ["input_text", kind],
            )
        case _:
            assert turns(desk.provider.last)[-1]["role"] == "user"


async def test_a_model_that_sees_nothing_gets_a_sentence_for_each_picture(desk: Any) -> None:
    desk.provider.says("I cannot see it.")
    model = desk.reach(desk.model.name, terms=ExchangeTerms(vision=False))
    first = make_files_message([File(PNG, "image/png", "b.png")])
    messages = (
        first,
        Message("assistant", (Text("Yes?", "model"),)),
        *with_file_of_a_tool(File(PNG, "image/png", "a.png")),
    )
    await desk.ask(desk.prompt(*messages), model)
    await model.aclose()
    sent = [text for text in texts(turns(desk.provider.last)) if "takes no pictures" in text]
    sentence = f"{desk.model.name} takes no pictures, so it is not shown."
    assert sent == [f"[{name}, image/png, 107 bytes] {sentence}" for name in ("b.png", "a.png")]
    assert not [text for text in texts(turns(desk.provider.last)) if len(text) > 120 and " " not in text]

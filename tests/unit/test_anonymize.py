"""What tells who somebody is does not leave this machine, and comes back exactly as it was written."""

import json
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.messages import Message, Prompt, Reply, Text, ToolCall, ToolResult, make_user_message
from halter.core.tools import ToolSpec
from halter.core.usage import ModelName, runs_locally
from halter.loop.text_calls import read_calls
from halter.redaction.anonymize import (
    AnonymizedPrompt,
    StreamRehydrator,
    anonymize_prompt,
    find_placeholders,
    rehydrate_arguments,
    rehydrate_reply,
    rehydrate_text,
)

NAMES = ('O"Neil', "Zoë", "Zoë Müller", "王小明", "back\\slash", "brace{d}", "two\nlines", "Ελένης", "d'Arc")
VALUES = {
    "bob.x+y@müller.de": "email",
    "o'neil@example.co.uk": "email",
    "bob%40example.com": "email",
    "+49 (0) 30 123 456-78": "phone",
    "+1-212-555-0199": "phone",
    "(030) 1234567": "phone",
    "0171/2345678": "phone",
    "555-123-4567": "phone",
    "01 42 68 53 00": "phone",
    "00 49 30 1234567": "phone",
    "4111 1111 1111 1111": "card",
    "4111-1111-1111-1111": "card",
    "378282246310005": "card",
    "3782 822463 10005": "card",
    "DE89 3704 0044 0532 0130 00": "iban",
    "GB82WEST12345698765432": "iban",
    "10.20.30.40": "ip",
    "2001:db8::8a2e:370:7334": "ip",
    "::ffff:10.20.30.40": "ip",
    "123-45-6789": "id",
    "AB 12 34 56 C": "id",
    "1 84 12 76 451 089 46": "id",
    "86 095 742 719": "id",
    "65 180539 W 001": "id",
    "12345678Z": "id",
    "X1234567L": "id",
    "RSSMRA85T10A562S": "id",
    "zoë müller": "name",
    "ZOË": "name",
    "王小明": "name",
    "ΕΛΈΝΗΣ": "name",
}
HARMLESS = (
    "On 01.02.2024 10:30, that is 2024-01-15T12:00:00, it was 3.14159265358979.",
    "v1.2.3 of 1.2.3.4.5, 999.1.1.1 and 10:30:45",
    "4111 1111 1111 1112 and 1700000000000 and 1234567890",
    "DE89370400440532013001",
    "666-45-6789, 000-12-3456, GB 12 34 56 C, 12345678A",
    "std::vector a::b x[::1] f(a+1234567)",
    "12345678-1234-1234-1234-123456789012",
    "annex zoës mailto: me at example dot com @home",
)
JUNK = st.text(st.characters(exclude_characters="[", exclude_categories=("Cs",)), max_size=12)


def hide(text: str, names: tuple[str, ...] = NAMES) -> tuple[str, AnonymizedPrompt]:
    anonymized_prompt = anonymize_prompt(Prompt(messages=(make_user_message(f"Note: {text}"),)), "salt", names)
    (part,) = anonymized_prompt.prompt.messages[0].parts
    assert isinstance(part, Text)
    return part.text.removeprefix("Note: "), anonymized_prompt


KNOWN = {value: shown for value in (*VALUES, *NAMES) for shown, made in (hide(value),) if made.values == {shown: value}}
PLACEHOLDERS = {shown: value for value, shown in KNOWN.items()}
ONEIL, LINES = KNOWN['O"Neil'], KNOWN["two\nlines"]


@pytest.mark.parametrize(("value", "kind"), VALUES.items())
@pytest.mark.parametrize("around", ["{}", "call {}, please", "“{}”", "({})", "x= {}\n", "请{}。", '{{"a": "{}"}}'])
def test_what_tells_who_somebody_is_becomes_one_placeholder(value: str, kind: str, around: str) -> None:
    text, anonymized_prompt = hide(around.format(value))
    (placeholder,) = anonymized_prompt.values
    assert anonymized_prompt.values == {placeholder: value}
    assert anonymized_prompt.counts == {kind: 1}
    assert placeholder.startswith(f"[{kind.upper()}_")
    assert text == around.format(placeholder)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_is_left_alone(text: str) -> None:
    output, anonymized_prompt = hide(text)
    assert output == text
    assert not anonymized_prompt.values


@given(st.sampled_from(["4111111111111111", "DE89370400440532013000", "GB82WEST12345698765432"]), st.data())
def test_one_wrong_digit_and_it_is_no_number_of_anybody(number: str, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from([at for at, sign in enumerate(number) if sign.isdigit() and at >= 4]))
    text = data.draw(st.sampled_from([sign for sign in "0123456789" if sign != number[place]]))
    wrong = number[:place] + text + number[place + 1 :]
    assert hide(f"It is {wrong}.")[0] == f"It is {wrong}."


TEXTS = st.lists(
    st.one_of(
        JUNK,
        st.sampled_from(sorted(VALUES)),
        st.sampled_from(NAMES),
        st.sampled_from(["[EMAIL_3f9a2c]", "[NAME_", "[", "]", "[TEXT_0123456789abcdef]", " ", "3f9a2c]"]),
    ),
    max_size=12,
).map("".join)


@given(TEXTS)
def test_what_was_hidden_comes_back_exactly_whatever_stands_around_it(text: str) -> None:
    output, anonymized_prompt = hide(text)
    assert rehydrate_text(output, anonymized_prompt.values) == text


@given(TEXTS)
def test_hiding_leaves_no_placeholder_that_is_not_its_own(text: str) -> None:
    output, anonymized_prompt = hide(text)
    assert set(find_placeholders(output)) == set(anonymized_prompt.values)


ANSWERS = st.lists(st.one_of(JUNK, st.sampled_from(sorted(PLACEHOLDERS))), max_size=8)


@given(ANSWERS)
def test_a_model_may_use_placeholders_anywhere_and_nothing_else_is_touched(answer: list[str]) -> None:
    text = "".join(PLACEHOLDERS.get(output, output) for output in answer)
    assert rehydrate_text("".join(answer), PLACEHOLDERS) == text


@pytest.mark.parametrize(
    "text", ["[EMAIL_ 3f9a2c]", "EMAIL_3f9a2c", "[Email_3f9a2c]", "[EMAIL_3F9A2C]", "[EMAIL_3f9a2]", "[EMAIL_000000]"]
)
def test_a_placeholder_that_is_paraphrased_split_or_unknown_is_not_guessed(text: str) -> None:
    assert rehydrate_text(text, {"[EMAIL_3f9a2c]": "bob@example.com"}) == text


@given(ANSWERS.map("".join), st.data())
def test_a_stream_says_the_same_however_it_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    stream = StreamRehydrator(PLACEHOLDERS)
    texts = [stream.feed(text[start:end]) for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join([*texts, stream.finish()]) == rehydrate_text(text, PLACEHOLDERS)


@pytest.mark.parametrize("shown", [ONEIL, LINES])
def test_a_stream_of_single_letters_says_the_same(shown: str) -> None:
    stream = StreamRehydrator(PLACEHOLDERS)
    text = f"[E[[EMAIL_ {shown}[{shown}"
    assert "".join([*map(stream.feed, text), stream.finish()]) == rehydrate_text(text, PLACEHOLDERS)


def test_a_stream_holds_back_only_what_may_be_the_beginning_of_a_placeholder() -> None:
    stream = StreamRehydrator({})
    assert stream.feed("It is [EMA") == "It is "
    assert stream.feed("IL] and [x") == "[EMAIL] and [x"
    assert stream.feed("[EMAIL_3f9a2c") == ""
    assert stream.feed("g") == "[EMAIL_3f9a2cg"
    assert stream.feed("[EMAIL_3f9a2c") == ""
    assert stream.finish() == "[EMAIL_3f9a2c"


LEAVES = st.one_of(ANSWERS.map("".join), st.none(), st.booleans(), st.integers())
JSONS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANSWERS.map("".join), inner, max_size=3)
)


def everywhere(value: Any) -> Any:
    match value:
        case str():
            return rehydrate_text(value, PLACEHOLDERS)
        case list():
            return [everywhere(each) for each in cast("list[Any]", value)]
        case dict():
            return {everywhere(key): everywhere(each) for key, each in cast("dict[Any, Any]", value).items()}
        case _:
            return value


@given(JSONS)
def test_arguments_stay_json_whatever_is_put_into_them(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert json.loads(rehydrate_arguments(text, PLACEHOLDERS)) == everywhere(value)


def test_arguments_are_otherwise_left_as_they_were_written() -> None:
    text = ' {"a":1.0,"a" : 1e400, "b":"\\u00e9\\/", "c": 12345678901234567890123 } '
    assert rehydrate_arguments(text, PLACEHOLDERS) == text


def test_arguments_that_are_cut_off_wrong_or_endlessly_deep_are_taken_as_they_are() -> None:
    text = ONEIL
    assert rehydrate_arguments(f'{{"to": "{text} and', PLACEHOLDERS) == '{"to": "O\\"Neil and'
    assert rehydrate_arguments(f'{{"to": {text}}}', PLACEHOLDERS) == f'{{"to": {text}}}'
    assert rehydrate_arguments(f'{{"to": "\\u00{text}"}}', PLACEHOLDERS) == f'{{"to": "\\u00{text}"}}'
    deep = "[" * 10_000 + f'"{text}"' + "]" * 10_000
    assert rehydrate_arguments(deep, PLACEHOLDERS) == deep.replace(text, 'O\\"Neil')


@given(st.lists(st.tuples(st.sampled_from(['"', "'", '"""', "'''"]), ANSWERS), max_size=3))
def test_a_call_that_is_written_as_text_stays_the_same_call(arguments: list[tuple[str, list[str]]]) -> None:
    inside = ", ".join(f"a{at}={quote}{quoted(text)}{quote}, n{at}=[1]" for at, (quote, text) in enumerate(arguments))
    text = f"I write to {ONEIL}: <skill k7>send({inside})</skill> {LINES}"
    before = read_calls(text, "k7").calls
    after = rehydrate_reply(Reply((Text(text),)), PLACEHOLDERS, "k7")
    assert after.text.startswith('I write to O"Neil: <skill k7>')
    assert after.text.endswith("</skill> two\nlines")
    (call,), (tool_call,) = read_calls(after.text, "k7").calls, before
    assert json.loads(call.arguments) == everywhere(json.loads(tool_call.arguments))


def quoted(pieces: list[str]) -> str:
    """Write a text as a model would: its own words escaped, placeholders as they are."""
    return "".join(text if text in PLACEHOLDERS else plain(text) for text in pieces)


def plain(text: str) -> str:
    return "".join(letter if letter.isalnum() else f"\\U{ord(letter):08x}" for letter in text)


@pytest.mark.parametrize("before", ["\\n", "\\\\1", "\\123", "\\1", "\\x4", "\\u004", "\\", "\\\\", "\\N", "\\12"])
def test_an_escape_before_a_placeholder_takes_no_letter_of_the_value(before: str) -> None:
    values = {"[NAME_aaaaaa]": "23 and 1F", "[NAME_bbbbbb]": "nick"}
    for output in values:
        text = f'<skill k7>send(text="{before}{output}")</skill>'
        (tool_call,) = read_calls(text, "k7").calls
        (call,) = read_calls(rehydrate_reply(Reply((Text(text),)), values, "k7").text, "k7").calls
        if tool_call.arguments.startswith("<skill>"):
            assert call.arguments.startswith("<skill>")
        else:
            payload = json.loads(call.arguments)["text"]
            assert payload == rehydrate_text(json.loads(tool_call.arguments)["text"], values) or find_placeholders(
                payload
            )


def test_a_value_outside_of_quotes_becomes_no_argument_of_a_call() -> None:
    values = {"[NAME_aaaaaa]": "1, force=True"}
    text = "<skill k7>wipe(n=[NAME_aaaaaa])</skill>"
    assert rehydrate_reply(Reply((Text(text),)), values, "k7").text == text


def test_a_quote_that_is_never_closed_is_not_closed_by_a_value() -> None:
    values = {"[NAME_aaaaaa]": '", force=True'}
    for text in ('<skill k7>wipe(n="[NAME_aaaaaa])</skill>', '<skill k7>wipe(n="x)</skill> [NAME_aaaaaa])</skill>'):
        assert rehydrate_reply(Reply((Text(text),)), values, "k7").text == text


def test_a_call_over_several_parts_of_an_answer_is_one_call() -> None:
    parts = (Text('<skill k7>send(text="'), ToolCall("1", "look", "{}"), Text(f'{ONEIL}")</skill>'))
    reply = rehydrate_reply(Reply(parts), PLACEHOLDERS, "k7")
    assert reply.text == '<skill k7>send(text="O\\"Neil")</skill>'
    assert [call.tool for call in reply.calls] == ["look"]


def test_an_answer_that_is_nothing_but_json_stays_json() -> None:
    text = json.dumps({"who": ONEIL})
    reply = rehydrate_reply(Reply((Text(text),)), PLACEHOLDERS)
    assert json.loads(reply.text) == {"who": 'O"Neil'}


CALL = '{"to": "Zo\\u00eb", "card": 378282246310005}'


def test_everything_that_is_sent_is_looked_at() -> None:
    schema = {
        "properties": {"Zoë": {"description": "for Zoë", "enum": ["Zoë"], "default": "bob@example.com"}},
        "required": ["Zoë"],
    }
    tool = ToolSpec(name="send", description="Writes to bob@example.com.", schema=msgspec.json.encode(schema))
    prompt = Prompt(
        system="You work for Zoë.",
        messages=(
            make_user_message("Call +49 30 1234567."),
            Message(
                "assistant",
                (Text("I call Zoë."), ToolCall("c", "send", '{"to": "Zo\\u00eb", "card": 378282246310005}')),
            ),
            Message("user", (ToolResult("c", "send", "ok", '{"by": "Zo\\u00eb", "at": "10.20.30.40"}'),)),
        ),
        tools=(tool,),
        facts={"boss": ["Zoë", {"mail": "bob@example.com"}], "age": 7},
    )
    anonymized_prompt = anonymize_prompt(prompt, "salt", NAMES)
    payload = msgspec.json.encode(anonymized_prompt.prompt).decode()
    assert set(anonymized_prompt.values.values()) == {
        "Zoë",
        "bob@example.com",
        "+49 30 1234567",
        "378282246310005",
        "10.20.30.40",
    }
    assert anonymized_prompt.counts == {"name": 1, "email": 1, "phone": 1, "card": 1, "ip": 1}
    assert not [value for value in anonymized_prompt.values.values() if value in payload]
    (spec,) = anonymized_prompt.prompt.tools
    text = next(each for each, value in anonymized_prompt.values.items() if value == "Zoë")
    assert list(json.loads(spec.schema)["properties"]) == json.loads(spec.schema)["required"] == ["Zoë"]
    assert json.loads(spec.schema)["properties"]["Zoë"]["enum"] == [text]
    call = anonymized_prompt.prompt.messages[1].parts[1]
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments)["to"] == text


def test_a_name_that_json_spells_otherwise_is_the_same_name() -> None:
    text, anonymized_prompt = hide('I called send with {"to": "ZO\\u00cb M\\u00DCLLER", "or": "O\\"Neil"}.')
    assert set(anonymized_prompt.values.values()) == {"ZOË MÜLLER", 'O"Neil'}
    assert "\\" not in text


def test_the_end_of_a_line_inside_of_json_hides_nobody() -> None:
    text, anonymized_prompt = hide(
        'Result: {"text": "Hello\\nZoë\\n4111111111111111\\nbob@example.com\\n+49 30 1234567"}'
    )
    assert set(anonymized_prompt.values.values()) == {"Zoë", "4111111111111111", "bob@example.com", "+49 30 1234567"}
    assert text.count("\\n[") == 4


def test_a_name_in_an_earlier_call_that_was_written_as_text_is_hidden_again() -> None:
    for name in NAMES:
        text = rehydrate_reply(Reply((Text(f'<skill k7>send(text="{KNOWN[name]}")</skill>'),)), PLACEHOLDERS, "k7").text
        output, anonymized_prompt = hide(text)
        assert set(anonymized_prompt.values.values()) == {name}
        assert output == f'<skill k7>send(text="{KNOWN[name]}")</skill>'


def test_two_spellings_of_a_name_come_back_as_they_were_written() -> None:
    text = "Zoë and ZOË and zoë\nMÜLLER"
    output, anonymized_prompt = hide(text)
    assert set(anonymized_prompt.values.values()) == {"Zoë", "ZOË", "zoë\nMÜLLER"}
    assert rehydrate_text(output, anonymized_prompt.values) == text


def test_placeholders_are_the_same_in_every_request_of_a_session_and_in_no_other() -> None:
    mail = Prompt(messages=(make_user_message("to bob@example.com"),))
    prompt = Prompt(messages=(make_user_message("to zoe@example.com and bob@example.com"),))
    first, second = anonymize_prompt(mail, "s1", ()), anonymize_prompt(prompt, "s1", ())
    assert set(first.values) < set(second.values)
    assert set(first.values).isdisjoint(anonymize_prompt(mail, "s2", ()).values)


def test_two_values_never_share_a_placeholder() -> None:
    seen: dict[str, str] = {}
    for number in range(100_000):
        value = f"{number}@example.com"
        (placeholder,) = anonymize_prompt(Prompt(messages=(make_user_message(value),)), "s", ()).values
        if placeholder in seen:
            break
        seen[placeholder] = value
    else:
        pytest.fail("no two values collide")
    text = f"{seen[placeholder]} and {value}"
    anonymized_prompt = anonymize_prompt(
        Prompt(messages=(make_user_message(seen[placeholder]), make_user_message(value))), "s", ()
    )
    assert sorted(anonymized_prompt.values.values()) == sorted((seen[placeholder], value))
    assert all(len(each) > len(placeholder) for each in anonymized_prompt.values)
    (shown, other) = (message.parts[0] for message in anonymized_prompt.prompt.messages)
    assert isinstance(shown, Text)
    assert isinstance(other, Text)
    assert rehydrate_text(f"{shown.text} and {other.text}", anonymized_prompt.values) == text


def test_a_history_is_looked_at_once() -> None:
    message = make_user_message("to bob@example.com")
    first = anonymize_prompt(Prompt(messages=(message,)), "s", ("Zoë",))
    second = anonymize_prompt(Prompt(messages=(message, make_user_message("and Zoë"))), "s", ("Zoë",))
    assert second.prompt.messages[0] is first.prompt.messages[0]
    anonymized_prompt = anonymize_prompt(Prompt(messages=(message,)), "s", ("Bob",))
    assert anonymized_prompt.prompt.messages == first.prompt.messages


@given(TEXTS, TEXTS)
def test_what_is_sent_grows_by_no_more_than_is_said(one: str, two: str) -> None:
    prompt = Prompt(system=one, messages=(make_user_message(two), make_user_message(one + two)))
    anonymized_prompt = anonymize_prompt(prompt, "salt", NAMES)
    assert size(anonymized_prompt.prompt) <= size(prompt) + anonymized_prompt.growth


def size(prompt: Prompt) -> int:
    texts = [part.text for message in prompt.messages for part in message.parts if isinstance(part, Text)]
    return sum(len(text.encode()) for text in (prompt.system, *texts))


@pytest.mark.parametrize(
    "text", ["1", "a@", "1 ", ":", "1:", "+1", "(0", "[EMAIL_", "DE89 ", "a@b.cc.1.", "Zoë ", "4111 ", "1.", '"\\"']
)
def test_hostile_text_is_only_text(text: str) -> None:
    long = text * (200_000 // len(text))
    output, anonymized_prompt = hide(long)
    assert rehydrate_text(output, anonymized_prompt.values) == long


@pytest.mark.parametrize(
    ("name", "base_url", "here"),
    [
        ("openai:x", None, False),
        ("openai:x", "https://example.com/v1", False),
        ("openai:x", "http://127.0.0.1:8080/v1", False),
        ("mine:x", "http://localhost:4000/v1", False),
        ("llamafarm:x", "http://localhost:4000/v1", False),
        ("ollama:x", None, True),
        ("ollama:x", "http://127.0.0.1:11434/v1", True),
        ("ollama:gpt-oss:20b", None, True),
        ("ollama:gpt-oss:120b-cloud", None, False),
        ("vllm:us.anthropic.claude-sonnet-4-5-20250929-v1:0", None, False),
        ("ollama:bedrock/anthropic.claude-3-5-sonnet-20240620-v1:0", None, False),
        ("vllm:amazon.nova-pro-v1:0", None, False),
        ("vllm:openai.gpt-4.1", None, False),
        ("vllm:gpt4o", None, False),
        ("vllm:grok-code-fast-1", None, False),
        ("vllm:codex-mini-latest", None, False),
        ("vllm:sonar-pro", None, False),
        ("vllm:qwen-max", None, False),
        ("vllm:Qwen/Qwen2.5-7B-Instruct", None, True),
        ("vllm:nomic-ai/gpt4all-j", None, True),
        ("vllm:mistralai/Mistral-7B-Instruct-v0.3", None, True),
        ("lmstudio:nova-7b", None, True),
        ("ollama:kimi-k2:cloud", "http://127.0.0.1:11434/v1", False),
        ("vllm:gpt-5", "http://127.0.0.1:8000/v1", False),
        ("vllm:meta-llama/Llama-3", "http://127.0.0.1:8000/v1", True),
        ("lmstudio:x", None, True),
        ("llamacpp:x", "unix:///run/llama.sock", True),
        ("ollama:x", "http://10.0.0.1:11434", False),
        ("scripted:script", None, True),
        ("reflex:rules", None, True),
    ],
)
def test_only_what_leads_nowhere_else_is_on_this_machine(name: str, base_url: str | None, *, here: bool) -> None:
    assert runs_locally(ModelName.parse(name), base_url) is here

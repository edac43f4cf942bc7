"""A model that works by rules: the first that holds, nothing twice in a turn, and no surprises."""

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halter.config.yaml_reader import load_bytes
from halter.core.errors import ConfigError
from halter.core.messages import (
    Message,
    Model,
    Prompt,
    Reply,
    Text,
    ToolCall,
    ToolResult,
    bound_prompt_tokens,
    make_user_message,
)
from halter.core.tools import Permit, ToolSpec
from halter.core.usage import ModelName, Usage
from halter.models.prices import Prices
from halter.models.reflex import NO_RULE, Reflex, make_reflex_model

OFFERED = ToolSpec(name="clean", description="", schema=b"{}")


def rules(text: str) -> Reflex:
    document = load_bytes(text.encode(), "rules.yaml")
    return make_reflex_model(document.value, document.source_map.at)


async def ask_model(model: Model, *messages: Message, **facts: Any) -> Reply:
    return await model.ask(
        Prompt(messages=messages or (make_user_message("Hello."),), tools=(OFFERED,), facts=facts),
        Permit("r/0", 0, {}),
    )


def answered(reply: Reply, outcome: str = "ok", text: str = "done") -> tuple[Message, Message]:
    """Make the calls of an answer as the loop does, with ids of its own."""
    calls = [msgspec.structs.replace(call, id=f"call-{place}") for place, call in enumerate(reply.calls)]
    results = tuple(ToolResult(call.id, call.tool, outcome, text) for call in calls)  # pyright: ignore[reportArgumentType]
    words = tuple(result for result in reply.parts if isinstance(result, Text))
    return Message("assistant", (*words, *calls)), Message("user", results)


DISK = """
- when: hot.disk > 90
  say: Making room.
  call: {tool: clean_up, arguments: {folder: cache}}
  yield: {mode: sleep, sleep: 5m, wake_early_if: [disk], reason: waiting for room}
- when: results.exists(r, r.outcome != "ok")
  say: That did not work.
- when: message.contains("how")
  say: Well.
- say: Nothing to do.
"""


async def test_the_first_rule_that_holds_wins() -> None:
    model = rules(DISK)
    assert (await ask_model(model, disk=95)).parts == (
        Text("Making room.", "model", trusted=False),
        ToolCall("0.0", "clean_up", '{"folder":"cache"}', 0),
        ToolCall(
            "0.1",
            "yield",
            '{"mode":"sleep","sleep":"5m","wake_early_if":["disk"],"reason":"waiting for room"}',
            1,
        ),
    )
    assert (await ask_model(model, disk=50)).text == "Nothing to do."
    assert (await ask_model(model, make_user_message("And how is it?"), disk=50)).text == "Well."


async def test_an_answer_is_free_and_says_why_it_stopped() -> None:
    model = rules(DISK)
    assert Prices().find(model.name, model.base_url).bound(500, 500, 0) == 0  # pyright: ignore[reportAttributeAccessIssue]
    assert model.name == ModelName("reflex", "rules")
    acting, saying = await ask_model(model, disk=95), await ask_model(model)
    assert (acting.stop, acting.usage) == ("calls", Usage(0, 0))
    assert (saying.stop, saying.usage) == ("end", Usage(0, 0))
    assert model.count(Prompt(messages=(make_user_message("Hi."),))) == bound_prompt_tokens(
        Prompt(messages=(make_user_message("Hi."),))
    )


async def test_a_reply_reaches_the_text_listener_and_each_request_uses_a_permit() -> None:
    texts: list[str] = []
    permit = Permit("r/0", 0, {})
    model, prompt = rules(DISK), Prompt(messages=(make_user_message("Hello."),))
    await model.ask(prompt, permit, texts.append)
    assert texts == ["Nothing to do."]
    with pytest.raises(RuntimeError, match="was used before"):
        await model.ask(prompt, permit)


async def test_where_no_rule_holds_the_turn_ends_with_a_sentence() -> None:
    assert (await ask_model(rules("- {when: step > 5, say: Much.}\n"))).text == NO_RULE
    assert (await ask_model(rules("[]"))).text == NO_RULE


async def test_where_no_tool_is_offered_no_rule_calls_one() -> None:
    model, messages = rules("- call: {tool: clean}\n- say: All is well.\n"), (make_user_message("Go."),)
    assert (await model.ask(Prompt(messages=messages), Permit("r/0", 0, {}))).text == "All is well."


async def test_a_rule_does_not_make_its_calls_twice_in_a_turn() -> None:
    model = rules("- {call: {tool: look}}\n- {calls: [{tool: look}, {tool: touch}]}\n- say: Done.\n")
    history = [make_user_message("Go.")]
    for expected in (["look"], ["look", "touch"], []):
        reply = await ask_model(model, *history)
        assert [call.tool for call in reply.calls] == expected
        history += answered(reply) if reply.calls else [Message("assistant", reply.parts)]
    assert [call.tool for call in (await ask_model(model, *history, make_user_message("Again."))).calls] == ["look"]


async def test_a_rule_may_be_allowed_to_repeat_itself() -> None:
    model = rules("- {when: step < 3, call: {tool: look}, once: false}\n- say: Enough.\n")
    history, made = [make_user_message("Go.")], 0
    while (reply := await ask_model(model, *history)).calls:
        history += answered(reply)
        made += 1
    assert (made, reply.text) == (3, "Enough.")


WAKE = make_user_message("It is nine.", "config", reason="wake")


async def test_a_turn_that_no_person_opened_is_a_new_one_as_well() -> None:
    model = rules("- {call: {tool: look}, yield: {mode: sleep, sleep: 60}}\n")
    first = await ask_model(model, WAKE)
    assert [call.tool for call in first.calls] == ["look", "yield"]
    assert (await ask_model(model, WAKE, *answered(first), WAKE)).calls == first.calls
    plain = rules("- {call: {tool: look}}\n- say: Done.\n")
    turn = (WAKE, *answered(await ask_model(plain, WAKE)))
    end = await ask_model(plain, *turn)
    assert end.text == "Done."
    assert [call.tool for call in (await ask_model(plain, *turn, Message("assistant", end.parts), WAKE)).calls] == [
        "look"
    ]


async def test_a_yield_that_was_refused_is_not_tried_again() -> None:
    model = rules("- {yield: {mode: sleep, wake_early_if: [nonsense]}}\n- say: Then not.\n")
    first = await ask_model(model, WAKE)
    assert (await ask_model(model, WAKE, *answered(first, "error"))).text == "Then not."


async def test_a_rule_sees_the_last_results_of_its_turn() -> None:
    model = rules("""
- when: results[0].tool == "look" && results[0].outcome == "ok" && results[0].text == "7 lines" && step == 1
  say: Seven.
- when: size(results) > 0
  say: Something else.
- call: {tool: look}
""")
    first = await ask_model(model)
    messages_so_far = (make_user_message("Go."), *answered(first, text="7 lines"))
    assert (await ask_model(model, *messages_so_far)).text == "Seven."
    assert (
        await ask_model(model, *messages_so_far, make_user_message("A hint.", "config", reason="hint"))
    ).text == "Seven."
    assert (
        await ask_model(model, make_user_message("Go."), *answered(first, text="8 lines"))
    ).text == "Something else."
    assert (await ask_model(model, *messages_so_far, make_user_message("And now?"))).calls == first.calls


async def test_only_a_persons_words_are_the_message() -> None:
    model = rules('- {when: message == "Stop.", say: Stopping.}\n- say: Going on.\n')
    stop = make_user_message("Stop.")
    assert (
        await ask_model(model, stop, make_user_message("Stop it all!", "document", trusted=False))
    ).text == "Stopping."
    assert (
        await ask_model(model, make_user_message("Go."), make_user_message("Stop.", "document", trusted=False))
    ).text == "Going on."
    assert (await ask_model(model, WAKE)).text == "Going on."


@pytest.mark.parametrize(
    "condition",
    [
        "hot.missing > 1",
        "hot.text > 1",
        "hot.number",
        "hot.text",
        "results[0].tool == 'look'",
        "1 / hot.zero > 0",
        "9223372036854775807 + hot.number > 0",
        "hot.text.matches(hot.pattern)",
    ],
)
async def test_a_condition_that_cannot_be_evaluated_does_not_hold(condition: str) -> None:
    model = rules(f'- when: "{condition}"\n  say: Yes.\n- say: No.\n')
    assert (await ask_model(model, number=4, text="x", zero=0, pattern="(")).text == "No."


@pytest.mark.parametrize(
    ("condition", "facts"),
    [
        ("hot.price == '1.50'", {"price": Decimal("1.50")}),
        ("hot.odd.size() > 0", {"odd": object()}),
        ("hot.half == '�'", {"half": "\ud800"}),
        ("hot.deep[0].a == 1", {"deep": ({"a": 1},)}),
        ("hot.none == null && type(hot.n) == int", {"none": None, "n": 3}),
        ("hot.xs.all(x, x > 1)", {"xs": [2, 3]}),
        ("message == 'Hello.' && step == 0", {"other": b"\xff"}),
    ],
)
async def test_facts_may_be_anything(condition: str, facts: dict[str, Any]) -> None:
    assert (await ask_model(rules(f'- when: "{condition}"\n  say: Yes.\n'), **facts)).text == "Yes."


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), values, max_size=3), st.text())
async def test_whatever_is_known_and_said_an_answer_comes(facts: dict[str, Any], text: str) -> None:
    model = rules("- {when: hot.x > 3 && message.size() > 2, say: Yes.}\n- say: No.\n")
    prompt = Prompt(messages=(make_user_message(text),), facts=facts)
    assert (await model.ask(prompt, Permit("r/0", 0, {}))).text in {"Yes.", "No."}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("say: One.\n", "rules.yaml line 1: the rules must be a list"),
        ("- say: One.\n- sya: Two.\n", "rules.yaml line 2: Object contains unknown field `sya`"),
        ("- call:\n    arguments: {}\n", "rules.yaml line 1: Object missing required field `tool`"),
        ("- call: {tool: a, arguments: text}\n", "rules.yaml line 1: Expected `object`, got `str`"),
        ("- say: One.\n- when: step > 1\n", "rules.yaml line 2: this rule does nothing"),
        ("- call: {tool: a}\n  calls: [{tool: b}]\n", "rules.yaml line 1: a rule has `call` for one call or `calls`"),
        ("- say: One.\n  when: hot.x >\n", "rules.yaml line 2: the condition `hot.x >` is not a CEL expression: "),
        ("- say: One.\n  when: ''\n", "rules.yaml line 2: the condition `` is not a CEL expression"),
        (
            "- say: One.\n  when: hott.x > 1\n",
            "rules.yaml line 2: the condition `hott.x > 1` uses `hott`, but a rule",
        ),
        ("- say: One.\n  when: foo(step)\n", "rules.yaml line 2: the condition `foo(step)` cannot be evaluated: "),
        ("- say: One.\n  when: 3\n", "rules.yaml line 2: Expected `str | null`, got `int`"),
        ("- yield: {sleep: 5m}\n", "rules.yaml line 1: Object missing required field `mode`"),
        ("- yield:\n    mode: rest\n", "rules.yaml line 2: Invalid enum value 'rest'"),
        ("- yield:\n    mode: sleep\n    sleep: soon\n", "rules.yaml line 3: 'soon' is not a duration"),
        ("- yield:\n    mode: sleep\n    sleep: -1\n", "rules.yaml line 3: -1.0 is not a duration"),
        ("- yield:\n    mode: sleep\n    sleep: .nan\n", "rules.yaml line 3: '.nan' is not a duration"),
    ],
)
def test_a_mistake_in_a_rule_is_a_sentence_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        rules(text)
    assert str(wrong.value).startswith(sentence)
    assert str(wrong.value).endswith(".")
    assert "\n" not in str(wrong.value)

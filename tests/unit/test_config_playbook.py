"""Playbooks are read into steps, and references lead to earlier results or to a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from halter.config.playbook_files import MAX_STEPS, parse_playbook, read_playbook
from halter.config.yaml_reader import load_bytes
from halter.core.errors import ConfigError
from halter.spec.playbook import MissingReference, Playbook, Results, bind_arguments

PAGE = json.dumps({"offers": [{"price": 12.5, "tags": ["a", "b"]}], "title": "Tea", "none": None})


def playbook(text: str) -> Playbook:
    return parse_playbook(load_bytes(text.encode(), "play.yaml"))


def bind_argument(argument: Any, texts: dict[str, str] | None = None, **inputs: Any) -> Any:
    """Bind one argument of a step that follows one called `page`."""
    text = f"- {{call: get, as: page}}\n- call: put\n  as: last\n  arguments: {{x: {json.dumps(argument)}}}\n"
    made = bind_arguments(playbook(text).steps[1], Results(inputs, {"page": PAGE} if texts is None else texts))
    return made.sentence if isinstance(made, MissingReference) else json.loads(made)["x"]


def test_steps_are_read_in_their_order() -> None:
    book = playbook(
        "- call: get\n  arguments: {url: 'https://${inputs.host}/'}\n  as: page\n- call: put\n- call: get\n"
    )
    assert [(step.call, step.name, step.line) for step in book.steps] == [
        ("get", "page", 1),
        ("put", "", 4),
        ("get", "", 5),
    ]
    assert book.tools == ("get", "put")
    assert book.inputs == ("host",)
    assert bind_arguments(book.steps[1], Results()) == b"{}"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("plain", "plain"),
        (3, 3),
        (None, None),
        ("${steps.page.text}", PAGE),
        ("${steps.page.json}", json.loads(PAGE)),
        ("${steps.page.json.offers.0.price}", 12.5),
        ("${steps.page.json.offers.0}", {"price": 12.5, "tags": ["a", "b"]}),
        ("${steps.page.json.none}", None),
        ("costs ${steps.page.json.offers.0.price} for ${steps.page.json.title}", "costs 12.5 for Tea"),
        ("tags: ${steps.page.json.offers.0.tags}", 'tags: ["a", "b"]'),
        ("${inputs.count}", 7),
        ("${inputs.count}!", "7!"),
        (["${inputs.count}", {"deep": "${steps.page.json.title}"}], [7, {"deep": "Tea"}]),
        ("${secret:API_KEY}", "${secret:API_KEY}"),
        ("Bearer ${secret:API_KEY} ${inputs.count}", "Bearer ${secret:API_KEY} 7"),
        ("$5 {not} ${", "$5 {not} ${"),
    ],
)
def test_references_are_replaced_and_whole_ones_keep_their_type(argument: Any, value: Any) -> None:
    assert bind_argument(argument, count=7) == value


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("${inputs.nobody}", "`${inputs.nobody}` does not exist; the inputs are `count`."),
        (
            "${steps.page.json.offer}",
            "`${steps.page.json.offer}` does not exist: no key `offer`, only `offers`, `title`,",
        ),
        ("${steps.page.json.offers.1}", "`1` is not an index of a list of 1 (counted from 0)."),
        ("${steps.page.json.offers.x}", "`x` is not an index of a list of 1"),
        ("${steps.page.json.offers.99999999999}", "is not an index of a list of 1"),
        ("${steps.page.json.title.x}", "no key can be read from the text 'Tea'."),
    ],
)
def test_a_reference_that_leads_nowhere_is_a_value_with_a_sentence(argument: str, sentence: str) -> None:
    result = bind_argument(argument, count=7)
    assert result.startswith("Step `last` (line 2): ")
    assert sentence in result


@pytest.mark.parametrize("text", ["", "<html>", "NaN", "[1,", "[" * 100_000, "9" * 10_000])
def test_text_that_is_not_json_is_said_to_be_none(text: str) -> None:
    assert "needs JSON, but the output of step `page` is not JSON." in bind_argument(
        "${steps.page.json.x}", {"page": text}
    )


def test_a_step_that_gave_nothing_is_missing() -> None:
    assert "the steps that gave a result are none." in bind_argument("${steps.page.text}", {})


def test_results_are_never_searched_for_references() -> None:
    assert bind_argument("${steps.page.text}", {"page": "${inputs.count}"}, count=7) == "${inputs.count}"
    assert bind_argument("see ${steps.page.text}", {"page": "${steps.page.text}"}) == "see ${steps.page.text}"


@pytest.mark.parametrize(
    ("argument", "page"),
    [
        ("${steps.page.text}", "send me ${secret:API_KEY}"),
        ("see ${steps.page.text}", "${secret:API_KEY}"),
        ("$${steps.page.text}", "{secret:API_KEY}"),
        ("${steps.page.json.x}", '{"x": {"y": ["${secret:API_KEY}"]}}'),
        ("${steps.page.json.x}", '{"x": {"\\u0024{secret:API_KEY}": 1}}'),
        ("${steps.page.json.a}${steps.page.json.b}", '{"a": "${sec", "b": "ret:API_KEY}"}'),
        ("${secret:OTHER} ${steps.page.text}", "${secret:API_KEY}"),
    ],
)
def test_no_result_can_bring_in_the_name_of_a_secret(argument: str, page: str) -> None:
    assert "would insert the name of a secret" in bind_argument(argument, {"page": page})


def test_any_text_of_a_result_can_be_passed_on() -> None:
    text = "\x00 \ud800 \u2028 é"
    assert bind_argument("${steps.page.text}", {"page": text}) == text


def test_results_grow_by_named_steps_only() -> None:
    results = Results({"a": 1}).with_step("page", "one").with_step("", "two")
    assert results == Results({"a": 1}, {"page": "one"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("call: get\n", "play.yaml line 1: a playbook is a list of steps, each with a `call`, but this is a mapping."),
        ("[]\n", "play.yaml line 1: a playbook is a list of steps"),
        ("- get\n", "play.yaml line 1: a step is a mapping with a `call`, but this is the text 'get'."),
        ("- call: a\n- skill: summarise\n", "play.yaml line 2: steps with a `skill` are not supported by this version"),
        (
            "- call: a\n- argumets: {}\n",
            "play.yaml line 2: `argumets` is not a key of a step; did you mean `arguments`?",
        ),
        ("- arguments: {}\n", "play.yaml line 1: a step needs a `call` that names a tool."),
        ("- call: 3\n", "play.yaml line 1: a step needs a `call` that names a tool."),
        ("- call: a\n  as: b c\n", "play.yaml line 2: `as` is the text 'b c', but must be a name"),
        ("- call: a\n  as:\n", "play.yaml line 2: `as` is empty, but must be a name"),
        (
            "- call: a\n  as: b\n- call: a\n  as: b\n",
            "play.yaml line 4: an earlier step is already called `b`; choose another name.",
        ),
        (
            "- call: a\n  arguments: [1]\n",
            "play.yaml line 2: `arguments` is a list, but must be a mapping of arguments.",
        ),
        (
            "- call: a\n  arguments:\n    x:\n    - ${steps.b.text}\n",
            "play.yaml line 4: `${steps.b.text}` does not refer to an earlier step; the steps named before it are",
        ),
        (
            "- call: a\n  as: b\n  arguments: {x: '${steps.b.text}'}\n",
            "play.yaml line 3: `${steps.b.text}` does not refer to an earlier step; the steps named before it are",
        ),
        (
            "- call: a\n  arguments: {x: '${step.b.text}'}\n",
            "play.yaml line 2: `${step.b.text}` is not a reference; write $",
        ),
        (
            "- call: a\n  arguments: {x: '${HOME}'}\n",
            "play.yaml line 2: `${HOME}` is not a reference; write ${inputs.NAME}",
        ),
        (
            "- call: a\n  as: b\n- call: c\n  arguments: {x: '${steps.b}'}\n",
            "play.yaml line 4: `${steps.b}` is not a refer",
        ),
        (
            "- {call: a}\n" * (MAX_STEPS + 1),
            f"play.yaml line {MAX_STEPS + 1}: a playbook has at most {MAX_STEPS} steps",
        ),
    ],
)
def test_a_wrong_playbook_is_a_sentence_with_a_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        playbook(text)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("depth", range(50, 3000, 50))
def test_a_deep_result_is_passed_on_or_refused_with_a_sentence(depth: int) -> None:
    steps = playbook("- {call: get, as: page}\n- {call: put, arguments: {x: '${steps.page.json}'}}\n").steps
    made = bind_arguments(steps[1], Results({}, {"page": "[" * depth + "]" * depth}))
    assert isinstance(made, bytes) or made.sentence.startswith("Step `put` (line 2): ")


def test_a_playbook_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "play.yaml").write_text("- call: get\n")
    assert read_playbook(tmp_path / "play.yaml", "play.yaml") == playbook("- call: get\n")

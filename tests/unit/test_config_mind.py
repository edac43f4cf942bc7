"""How an agent thinks is read from its folder and nowhere else, within what the fleet allows."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.config.agent_files import AgentFile, parse_agent
from halter.config.merge import FleetConfig, parse_fleet
from halter.config.resolve import resolve_agent, resolve_policy
from halter.config.yaml_reader import MAX_BYTES, load_bytes
from halter.core.errors import ConfigError
from halter.policy.order import is_covered
from halter.spec.models import BrainSpec

KEY = "sk-proj-mAdeUpKeyThatOpensNothing1234567890"


def fleet(text: str = "") -> FleetConfig:
    return parse_fleet(load_bytes(text.encode(), "halter.yaml")) if text else FleetConfig()


def agent(text: str = "") -> AgentFile:
    return parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml"))


def read_refusal(folder: Path, text: str, bound: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        resolve_agent(fleet(bound), agent(text), folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("modell: openai:gpt\n", "agent.yaml line 2: `modell` is not a key of agent.yaml; did you mean `model`?"),
        ("model: gpt-5\n", "agent.yaml line 2: `model` is the text 'gpt-5', but must be one model, as in anthropic:"),
        ("model: 'openai:*'\n", "agent.yaml line 2: `model` is the text 'openai:*', but must be one model"),
        ("model: 5\n", "agent.yaml line 2: `model` is the number 5, but must be one model"),
        ("model:\n", "agent.yaml line 2: `model` is empty, but must be one model"),
        ("model: 'openai:'\n", "agent.yaml line 2: `model` is the text 'openai:', but must be one model"),
        (
            "model: opnai:gpt\n",
            "agent.yaml line 2: `model` has the unknown provider `opnai`; define it under `providers`; did you mean",
        ),
        ("model: a:b\nfallback_models: c:d\n", "agent.yaml line 3: `fallback_models` is the text 'c:d', but must be a"),
        ("fallback_models:\n- openai:a\n", "agent.yaml line 2: `fallback_models` requires a `model`; write it."),
        (
            "model_for:\n  sumary: a:b\n",
            "agent.yaml line 3: `sumary` is not a key of `model_for`; did you mean `summary`?",
        ),
        ("model_for:\n  summary: b\n", "agent.yaml line 3: `model_for.summary` is the text 'b', but must be one model"),
        (
            "model_for:\n  summary: mine:b\n",
            "agent.yaml line 3: `model_for.summary` has the unknown provider `mine`; define it under `providers`;",
        ),
        (
            "providers: {a: {}}\n",
            "agent.yaml line 2: `base_url` is missing from `providers.a`, which is not a known provider; write it,",
        ),
        (
            "providers:\n  reflex:\n    base_url: http://a\n",
            "agent.yaml line 3: `reflex` is built in and has no endpoint; remove it.",
        ),
        (
            "providers:\n  a b:\n    base_url: http://a\n",
            "agent.yaml line 3: `providers.a b` is the text 'a b', but must be a name",
        ),
        (
            "providers:\n  a:\n    wire: grpc\n",
            "agent.yaml line 4: `providers.a.wire` is the text 'grpc', which is not one of its values; they are",
        ),
        (
            "providers:\n  a:\n    base_url: a.example\n",
            "agent.yaml line 4: `providers.a.base_url` must be a URL, as in https://api.example.com/v1, without a",
        ),
        (
            "providers:\n  a:\n    base_url: ftp://a\n",
            "agent.yaml line 4: `providers.a.base_url` must be a URL, as in https://api.example.com/v1, without a",
        ),
        (
            "providers:\n  a:\n    base_url: 'http://a:x'\n",
            "agent.yaml line 4: `providers.a.base_url` must be a URL, as in https://api.example.com/v1, without a",
        ),
        (
            "providers:\n  a:\n    base_url: 'https://:80'\n",
            "agent.yaml line 4: `providers.a.base_url` must be a URL, as in https://api.example.com/v1, without a",
        ),
        ("providers:\n  a:\n    key: x\n", "agent.yaml line 4: `key` is not a key of `providers.a`;"),
        ("temperature: 3\n", "agent.yaml line 2: `temperature` is the number 3, but must be a number from 0 to 2."),
        ("temperature: hot\n", "agent.yaml line 2: `temperature` is the text 'hot', but must be a number from 0 to 2."),
        (
            "tool_calls: json\n",
            "agent.yaml line 2: `tool_calls` is the text 'json', which is not one of its values; they are `native`,",
        ),
        ("instructions: [a]\n", "agent.yaml line 2: `instructions` is a list, but must be text"),
        (
            "model: scripted\n",
            "agent.yaml line 2: `model` is `scripted`, but there is no `script`; write `script:` wit",
        ),
        ("model: reflex\n", "agent.yaml line 2: `model` is `reflex`, but there is no `reflex`; write `reflex:` with"),
        (
            "model: openai:a\nfallback_models: [openai:b, reflex]\n",
            "agent.yaml line 3: `fallback_models[2]` is `reflex`, but there is no `reflex`; write",
        ),
        ("reflex: []\n", "agent.yaml line 2: `reflex` has no rules; write at least one."),
        ("reflex: 5\n", "agent.yaml line 2: `reflex` is the number 5, but must be a list"),
        ("reflex:\n- sleep\n", "agent.yaml line 3: `reflex[1]` is the text 'sleep', but must be a mapping"),
        (
            "limits:\n  max_retries: -1\n",
            "agent.yaml line 3: `limits.max_retries` is the number -1, but must be a whol",
        ),
        ("limits:\n  max_retries: 1000\n", "agent.yaml line 3: `limits.max_retries` is the number 1000, but must be a"),
        (
            "limits:\n  context_window: 999\n",
            "agent.yaml line 3: `limits.context_window` is the number 999, but must be 0 for the model's own window,",
        ),
        ("limits:\n  context_window: true\n", "agent.yaml line 3: `limits.context_window` is true, but must be 0 for"),
        ("limits:\n  context_strategy: forget\n", "agent.yaml line 3: `limits.context_strategy` is the text 'forget'"),
        ("limits:\n  streaming: yes\n", "agent.yaml line 3: `limits.streaming` is the text 'yes', but must be true or"),
        ("limits:\n  max_output_tokens: 0\n", "agent.yaml line 3: `limits.max_output_tokens` is the number 0, but mu"),
        (
            "limits:\n  max_output_tokens: 100\n",
            "agent.yaml line 3: `max_output_tokens` (100) is less than `min_output_tokens` (256); change one of",
        ),
        (
            "limits:\n  min_output_tokens: 9999\n",
            "agent.yaml line 2: `max_output_tokens` (4096) is less than `min_output_tokens` (9999); change one of",
        ),
        (
            "limits:\n  context_window: 4096\n",
            "agent.yaml line 3: context window of 4096 tokens is too small for max_output_tokens 4096; raise it, or",
        ),
        ("limits:\n  max_repeated_tool_steps: 0\n", "agent.yaml line 3: `limits.max_repeated_tool_steps` is the numb"),
        ("guardrails:\n  max_steps: 3\n", "agent.yaml line 3: `max_steps` is not a key of `guardrails`; its keys are"),
        (
            "limits:\n  reserve_tokens: 1\nguardrails:\n  reserve_tokens: 1\n",
            "agent.yaml line 5: `guardrails.reserve_tokens` is already set in agent.yaml line 3 as",
        ),
    ],
)
def test_a_wrong_model_setting_is_a_sentence_with_file_line_key_and_fix(
    text: str, sentence: str, tmp_path: Path
) -> None:
    assert read_refusal(tmp_path, text).startswith(sentence)


@pytest.mark.parametrize(
    "written",
    [
        f"api_key: {KEY}",
        f"api_key: 'Bearer {KEY}'",
        f"api_key: ['{KEY}']",
        f"api_key: '${{secret:{KEY} }}'",
        f"api_key: ${{{KEY}}}",
        f"base_url: https://user:{KEY}@llm.example/v1",
        f"base_url: https://llm.example/v1?key={KEY}",
        f"base_url: {KEY}",
    ],
)
@pytest.mark.parametrize("file", ["agent.yaml", "halter.yaml"])
def test_a_key_in_plain_text_is_refused_and_not_printed(written: str, file: str, tmp_path: Path) -> None:
    text = f"providers:\n  mine:\n    {written}\n"
    output, bound = (text, "") if file == "agent.yaml" else ("", text)
    sentence = read_refusal(tmp_path, output, bound)
    line = 4 if file == "agent.yaml" else 3
    assert sentence.startswith(f"{file} line {line}: `providers.mine.{written.partition(':')[0]}` must be ")
    assert KEY not in sentence


def test_a_key_in_place_of_a_provider_is_not_printed(tmp_path: Path) -> None:
    sentence = read_refusal(tmp_path, f"providers:\n  openai: {KEY}\n")
    assert sentence.startswith("agent.yaml line 3: `providers.openai` must be a mapping, with a `key: value` on each")
    assert KEY[:6] not in sentence


@pytest.mark.parametrize(
    ("bound", "text", "sentence"),
    [
        (
            "allowed_models: ['anthropic:*']\n",
            "model: openai:gpt\n",
            "agent.yaml line 2: `model` is `openai:gpt`, but halter.yaml line 1 allows only `anthropic:*` (`allowed_m",
        ),
        (
            "",
            "model: anthropic:a\nfallback_models:\n- openai:b\nallowed_models: ['anthropic:*']\n",
            "agent.yaml line 4: `fallback_models[1]` is `openai:b`, which is not in the `allowed_models` of",
        ),
        (
            "allowed_models: ['anthropic:*']\n",
            "model: anthropic:a\nmodel_for:\n  simulation: openai:b\n",
            "agent.yaml line 4: `model_for.simulation` is `openai:b`, but halter.yaml line 1 allows only",
        ),
        (
            "allowed_models: []\n",
            "model: reflex\nreflex: [{when: a}]\n",
            "agent.yaml line 2: `model` is `reflex:rules`, but halter.yaml line 1 allows only nothing",
        ),
        (
            "providers:\n  house: {base_url: 'https://llm.example'}\n",
            "providers:\n  house:\n    base_url: https://evil.example\n",
            "agent.yaml line 4: `providers.house.base_url` is `https://evil.example`, but halter.yaml line 2 allows",
        ),
        (
            "providers:\n  openai:\n    api_key: ${secret:HOUSE}\n",
            "providers:\n  openai:\n    base_url: https://evil.example\n",
            "agent.yaml line 4: `providers.openai.base_url` is `https://evil.example`, but halter.yaml line 2 allows",
        ),
        (
            "providers:\n  openai:\n    bills_errors: true\n",
            "providers:\n  openai:\n    bills_errors: false\n",
            "agent.yaml line 4: `providers.openai.bills_errors` is false, but halter.yaml line 3 allows only true",
        ),
        (
            "allowed_hosts: ['*.example.com']\n",
            "providers:\n  mine:\n    base_url: https://example.com.evil.example/v1\n",
            "agent.yaml line 4: `providers.mine.base_url` is at `example.com.evil.example`, but halter.yaml line 1",
        ),
        (
            "allowed_secrets: [A]\n",
            "providers:\n  openai:\n    api_key: ${secret:B}\n",
            "agent.yaml line 4: `providers.openai.api_key` is `B`, but halter.yaml line 1 allows only `A` (`allowed_se",
        ),
        (
            "agents: {limits: {max_output_tokens: 2000}}\n",
            "limits:\n  max_output_tokens: 2001\n",
            "agent.yaml line 3: `limits.max_output_tokens` is 2001, but halter.yaml line 1 allows only 2000 (`agents",
        ),
        (
            "agents: {limits: {max_retries: 1}}\n",
            "limits:\n  max_retries: 2\n",
            "agent.yaml line 3: `limits.max_retries` is 2, but halter.yaml line 1 allows only 1",
        ),
        (
            "agents:\n  limits:\n    max_output_tokens: 100\n",
            "",
            "halter.yaml line 3: `max_output_tokens` (100) is less than `min_output_tokens` (256); change one of",
        ),
    ],
)
def test_model_settings_beyond_what_is_allowed_are_rejected(
    bound: str, text: str, sentence: str, tmp_path: Path
) -> None:
    assert read_refusal(tmp_path, text, bound).startswith(sentence)


def test_model_settings_that_the_fleet_allows_are_accepted(tmp_path: Path) -> None:
    bound = "allowed_models: [reflex, 'house:*']\nallowed_hosts: ['*.example.com', '[::1]']\nallowed_secrets: [A]\n"
    text = (
        "model: house:big\nfallback_models: [reflex]\nreflex: [{when: a}]\nlimits: {max_retries: 1}\n"
        "providers:\n  house:\n    base_url: https://LLM.example.com/v1\n    api_key: ${secret:A}\n"
        "  near: {base_url: 'http://[::1]:8000'}\n"
    )
    mind = resolve_agent(fleet(bound), agent(text), tmp_path).model_settings
    assert (mind.model, mind.fallback_models, mind.max_retries) == ("house:big", ("reflex:rules",), 1)


@given(
    bound=st.lists(st.sampled_from(["*", "openai:*", "openai:a", "anthropic:*", "ollama:c"]), max_size=3),
    own=st.none() | st.lists(st.sampled_from(["openai:*", "openai:a", "anthropic:b", "ollama:c"]), max_size=3),
    named=st.lists(
        st.sampled_from(["openai:a", "openai:b", "anthropic:b", "ollama:c", "google:d"]), min_size=1, max_size=3
    ),
)
def test_no_model_gets_past_what_either_file_allows(bound: list[str], own: list[str] | None, named: list[str]) -> None:
    agent_file = agent(
        f"model: {named[0]}\nfallback_models: {named[1:]}\n" + ("" if own is None else f"allowed_models: {own}\n")
    )
    try:
        mind = resolve_agent(fleet(f"allowed_models: {bound}\n"), agent_file, Path("/nonexistent")).model_settings
    except ConfigError:
        return
    for model in (mind.model, *mind.fallback_models):
        assert is_covered(model, bound)
        assert own is None or is_covered(model, own)
        assert resolve_policy(fleet(f"allowed_models: {bound}\n"), agent_file).allows_model(model)


def test_the_words_of_the_file_come_before_those_of_agents_md(tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_bytes("\ufeff# Night\n\nWatch.\n".encode())
    assert resolve_agent(FleetConfig(), agent(), tmp_path).model_settings.instructions == "# Night\n\nWatch."
    brain_spec = resolve_agent(FleetConfig(), agent("instructions: |\n  First this.\n"), tmp_path).model_settings
    assert brain_spec.instructions == "First this.\n\n# Night\n\nWatch."


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"a\nb\xff\n", "is not UTF-8 text in line 2; save it as UTF-8."),
        (b"a\nb\x00\n", "contains a NUL character in line 2; remove it."),
        (b"a" * (MAX_BYTES + 1), "is larger than 1,000,000 bytes."),
    ],
)
def test_instructions_that_are_no_text_are_a_sentence(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_bytes(data)
    assert read_refusal(tmp_path, "") == f"{tmp_path / 'AGENTS.md'} {why}"


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    inside = tmp_path / "agent"
    inside.mkdir()
    outside = tmp_path / "replies.yaml"
    outside.write_text("- text: outside\n")
    (inside / "link.yaml").symlink_to(outside)
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop.yaml").symlink_to(inside / "loop.yaml")
    for name in ("../replies.yaml", str(outside), "link.yaml", "up/replies.yaml", "x/../../replies.yaml"):
        sentence = read_refusal(inside, f"script: {name}\n")
        assert sentence.startswith(f"agent.yaml line 2: `script` names `{name[:40]}")
        assert "which leads out of the agent's folder; name a file in the agent's folder." in sentence
    assert "loop.yaml`, which is not a valid file name;" in read_refusal(inside, "reflex: loop.yaml\n")
    (inside / "AGENTS.md").symlink_to(outside)
    assert read_refusal(inside, "") == f"{inside / 'AGENTS.md'} leads out of the agent's folder."


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("Be brief.")
    (tmp_path / "AGENTS.md").symlink_to("notes.md")
    assert resolve_agent(FleetConfig(), agent(), tmp_path).model_settings.instructions == "Be brief."


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder").mkdir()
    for name, why in (
        ("pipe.yaml", "is not a file"),
        ("folder", "cannot be read: Is a directory"),
        ("nowhere.yaml", "is missing"),
        ("agent.yaml/x", "is missing"),
        ('"a\\0b"', "is not a valid file name"),
    ):
        sentence = read_refusal(tmp_path, f"model: scripted\nscript: {name}\n")
        assert sentence.startswith("agent.yaml line 3: `script` names `")
        assert f"which {why}; name a file in the agent's folder." in sentence


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "line 1: the file is empty"),
        (b"[]\n", "line 1: this must be a list of replies, but it is empty."),
        (b"text: Hello.\n", "line 1: this must be a list of replies, but it is a mapping."),
        (b"- &a [x, x]\n- [*a, *a]\n", "line 1: anchors (`&name`) are not supported; write each value out."),
        (b"- text: a\n- *b\n", "line 2: aliases (`*name`) are not supported; write the value out."),
        (b"- text: [\n", "line 2: this is not valid YAML: did not find expected node content."),
    ],
)
def test_a_script_that_cannot_be_read_is_a_sentence_with_its_own_line(
    data: bytes, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "replies.yaml").write_bytes(data)
    assert read_refusal(tmp_path, "script: replies.yaml\n").startswith(f"{tmp_path / 'replies.yaml'} {sentence}")


def test_a_giant_script_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "replies.yaml").open("wb") as file:
        file.truncate(1 << 40)
    assert "which is larger than 1,000,000 bytes" in read_refusal(tmp_path, "script: replies.yaml\n")


def test_replies_and_rules_are_known_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "replies.yaml").write_text("- text: a\n- text: b\n  takes: 2s\n")
    read = resolve_agent(FleetConfig(), agent("script: replies.yaml\nreflex:\n- when: a\n- when: b\n"), tmp_path)
    assert read.locate_script((1, "takes")) == f"{tmp_path / 'replies.yaml'} line 3"
    assert read.locate_reflex((1, "when")) == "agent.yaml line 5"


def test_equal_model_settings_have_one_canonical_form(tmp_path: Path) -> None:
    texts = ("model: openai:a\ntool_calls: native\n", "model: openai/a\n")
    first, second = (resolve_agent(FleetConfig(), agent(text), tmp_path).model_settings for text in texts)
    assert first.canonical() == second.canonical() != BrainSpec().canonical()

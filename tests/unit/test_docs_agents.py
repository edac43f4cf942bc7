"""The page about an agent's file knows every key, tells the truth about defaults, and shows files that can be read."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from halter.config.agent import agent_of
from halter.config.fleet import Fleet, fleet_of
from halter.config.load import load_bytes
from halter.config.mind import read_mind
from halter.config.resolve import resolve
from halter.config.schema import agent_schema
from halter.config.usual import USUAL
from halter.core.clock import SystemClock
from halter.core.durations import shown_duration
from halter.models.scripted import scripted_from

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "agents.md").read_text("utf-8")
ROW = re.compile(r"^\| `([^`]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
ROWS = {key: (default, meaning) for key, default, meaning in ROW.findall(PAGE.partition("## Every key")[2])}
FREE = {"levels": "LEVEL", "tools": "TOOL", "providers": "NAME", "fields": "FIELD", "collections": "NAME"}
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
AGENTS = [block for block in BLOCKS if block.startswith("name:")]


def described(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """List the keys of a schema as the page writes them, with what it says of each."""
    for key, part in schema.get("properties", {}).items():
        free = part.get("additionalProperties")
        below = [*described(part, f"{path}{key}.")]
        if isinstance(free, dict):
            below += described(free, f"{path}{key}.{FREE.get(key, '')}.")
        below += described(part.get("items", {}), f"{path}{key}[].")
        yield from below or [(f"{path}{key}", part.get("description", ""))]


def test_every_key_is_on_the_page_and_nothing_else() -> None:
    assert list(ROWS) == [key for key, _ in described(agent_schema())]


def test_the_page_says_of_each_key_what_the_schema_says() -> None:
    assert [key for key, words in described(agent_schema()) if not ROWS[key][1].startswith(words)] == []


def test_the_words_that_a_key_may_have_are_on_the_page() -> None:
    for group, keys in (("", agent_schema()), ("limits.", agent_schema()["properties"]["limits"])):
        for key, part in keys["properties"].items():
            for word in part.get("enum", ()):
                assert f"`{word}`" in ROWS[group + key][1]


def test_every_provider_that_is_known_is_on_the_page_with_its_key() -> None:
    rows = {name: rest for name, rest, *_ in re.findall(r"^\| `([a-z]+)` \| (.+) \|$", PAGE, re.MULTILINE)}
    assert {name for name, usual in USUAL.items() if (usual.key or usual.base_url) not in rows.get(name, "?")} == set()


def test_the_defaults_on_the_page_are_those_that_hold(tmp_path: Path) -> None:
    agent = agent_of(load_bytes(b"name: x\n", "agent.yaml"))
    policy, mind = resolve(Fleet(), agent), read_mind(Fleet(), agent, tmp_path).mind
    for key, value in (
        ("limits.max_cost_usd", f"{(policy.caps.session.max_cost_usd or 0) / 1_000_000:.2f}"),
        ("limits.max_cost_usd_per_day", f"{(policy.caps.agent[0].max_cost_usd or 0) / 1_000_000:.2f}"),
        ("limits.on_cap", f"`{policy.on_cap}`"),
        ("limits.max_steps", policy.max_steps),
        ("limits.timeout", shown_duration(policy.timeout)),
        ("limits.min_output_tokens", policy.min_output_tokens),
        ("limits.max_output_tokens", mind.max_output_tokens),
        ("limits.max_retries", mind.max_retries),
        ("limits.context_window", mind.context_window),
        ("limits.context_strategy", f"`{mind.context_strategy}`"),
        ("limits.max_tokens_recoveries", mind.max_tokens_recoveries),
        ("limits.max_repeated_tool_steps", mind.max_repeated_tool_steps),
        ("limits.reserve_tokens", policy.reserve_tokens),
        ("limits.reserve_cost_fraction", policy.reserve_cost_fraction),
        ("tool_calls", f"`{mind.tool_calls}`"),
    ):
        assert ROWS[key][0] == str(value), key


@pytest.mark.parametrize("text", AGENTS)
def test_the_agents_on_the_page_can_be_read(text: str, tmp_path: Path) -> None:
    replies = next(block for block in BLOCKS if block.startswith("# replies.yaml"))
    (tmp_path / "replies.yaml").write_text(replies)
    agent = agent_of(load_bytes(text.encode(), "agent.yaml"))
    resolve(Fleet(), agent)
    read = read_mind(Fleet(), agent, tmp_path)
    if read.mind.script:
        scripted_from(list(read.mind.script), read.script, SystemClock())


def test_the_price_on_the_page_can_be_read() -> None:
    text = next(block for block in BLOCKS if block.startswith("models:"))
    assert list(fleet_of(load_bytes(text.encode(), "halter.yaml")).spec.models) == ["house:qwen3-30b"]
    assert len(AGENTS) + 2 == len(BLOCKS)

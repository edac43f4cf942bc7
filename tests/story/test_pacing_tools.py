"""What fields are refreshed with and sensors poll is checked against the agent's tools before anything runs."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from library_bench import Bench
from loops import says

from halter.config.agent_files import AgentFile, parse_agent
from halter.config.merge import parse_fleet
from halter.config.resolve import resolve_agent, resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.errors import ConfigError
from halter.core.ids import Digest, WorkerId
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.assembly.unattended_tools import check_pacing_tools
from halter.runtime.runtime import open_runtime
from halter.runtime.session_start import begin_session
from halter.settings import read_settings
from halter.spec.autonomy import Pacing
from halter.tools.function_tool import tool

KEY = "made-up-key-that-opens-nothing"


@tool(level="SAFE", effect="read")
def get_prices(symbols: list[str], venue: str = "") -> str:
    """Tell prices."""
    return f"{symbols} {venue}"


@tool(level="CONTROLLED", effect="read")
def get_cash() -> str:
    """Tell the balance."""
    return "5"


@tool(level="PRIVILEGED", effect="read")
def get_keys() -> str:
    """Tell the keys."""
    return "none"


@tool(level="SAFE")
def place_order(symbol: str) -> str:
    """Buy."""
    return symbol


TOOLS = (get_prices, get_cash, get_keys, place_order)


def agent(text: str) -> AgentFile:
    return parse_agent(load_bytes(f"name: night-watch\n{text}".encode(), "agent.yaml"))


def check(text: str, bound: str = "zone: UTC\n") -> None:
    fleet, agent_file = parse_fleet(load_bytes(bound.encode(), "halter.yaml")), agent(text)
    check_pacing_tools(
        resolve_policy(fleet, agent_file), resolve_agent(fleet, agent_file, None).pacing, agent_file, TOOLS
    )


def field(text: str) -> str:
    return f"hot_state:\n  fields:\n    cash: {{{text}}}\n"


def sensor(source: str) -> str:
    return f"sensors:\n- name: feed\n  type: poll\n  source: {{{source}}}\n"


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        (field("refresh_tool: get_cash"), "mode: SEMI\n"),
        (field("refresh_tool: get_cash"), "mode: ASSIST\npolicy: {tools: {get_cash: {approval: never}}}\n"),
        (field("refresh_tool: get_prices, refresh_arguments: {symbols: [A]}"), "mode: ASSIST\n"),
        (sensor("tool: get_prices, arguments: {symbols: [AAPL, TSLA], venue: x}"), "mode: SEMI\n"),
        (sensor("tool: get_keys"), "policy: {levels: {PRIVILEGED: {approval: never}}}\n"),
        (sensor("url: 'https://a.example'"), "mode: SEMI\n"),
        ("autonomy: {enabled: true}\n", "mode: SEMI\n"),
    ],
)
def test_a_tool_that_only_looks_and_asks_nobody_may_be_used_while_nobody_watches(text: str, bound: str) -> None:
    check(text, bound)


@pytest.mark.parametrize(
    ("text", "bound", "sentence"),
    [
        (
            field("refresh_tool: get_cahs"),
            "mode: SEMI\n",
            "agent.yaml line 4: `hot_state.fields.cash.refresh_tool` is `get_cahs`, but there is no such tool; did",
        ),
        (
            sensor("tool: weather"),
            "mode: SEMI\n",
            "agent.yaml line 5: `sensors[1].source.tool` is `weather`, but there is no such tool; the tools are",
        ),
        (
            sensor("tool: place_order, arguments: {symbol: A}"),
            "mode: FULL\n",
            "agent.yaml line 5: `sensors[1].source.tool` is `place_order`, which may change something; use a tool",
        ),
        (
            field("refresh_tool: place_order"),
            "observe: true\n",
            "agent.yaml line 4: `hot_state.fields.cash.refresh_tool` is `place_order`, which may change something",
        ),
        (
            field("refresh_tool: get_cash"),
            "mode: ASSIST\n",
            "agent.yaml line 4: `hot_state.fields.cash.refresh_tool` is `get_cash`, which needs an approval",
        ),
        (
            sensor("tool: get_keys"),
            "mode: FULL\n",
            "agent.yaml line 5: `sensors[1].source.tool` is `get_keys`, which needs an approval for each call",
        ),
        (
            sensor("tool: get_cash"),
            "policy: {tools: {get_cash: {approval: always}}}\n",
            "agent.yaml line 5: `sensors[1].source.tool` is `get_cash`, which needs an approval for each call",
        ),
        (
            "policy: {levels: {CONTROLLED: {approval: always}}}\n" + sensor("tool: get_cash"),
            "mode: FULL\n",
            "agent.yaml line 6: `sensors[1].source.tool` is `get_cash`, which needs an approval for each call",
        ),
        (
            "policy: {disabled: [get_cash]}\n" + sensor("tool: get_cash"),
            "mode: FULL\n",
            "agent.yaml line 6: `sensors[1].source.tool` is `get_cash`, which is disabled; use another tool, or remove",
        ),
        (
            sensor("tool: get_prices"),
            "mode: SEMI\n",
            "agent.yaml line 5: `sensors[1].source.arguments` does not fit `get_prices`: ",
        ),
        (
            field("refresh_tool: get_prices, refresh_arguments: {symbols: 5}"),
            "mode: SEMI\n",
            "agent.yaml line 4: `hot_state.fields.cash.refresh_arguments` does not fit `get_prices`: ",
        ),
    ],
)
def test_any_other_tool_is_refused_with_a_sentence(text: str, bound: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(text, bound)
    assert str(refused.value).startswith(sentence)


def test_the_sentences_name_what_there_is_and_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `get_cash`\?"):
        check(field("refresh_tool: get_cahs"))
    with pytest.raises(ConfigError, match=r"\(CONTROLLED in mode ASSIST\); use another tool, or set"):
        check(field("refresh_tool: get_cash"), "mode: ASSIST\n")


@asynccontextmanager
async def context(home: Path, text: str) -> AsyncGenerator[AgentRuntime]:
    """Put an agent of a folder together."""
    folder = home / "desk"
    folder.mkdir()
    (folder / "files").mkdir()
    (folder / "agent.yaml").write_text(f"name: desk\nmodel: reflex\nreflex: [{{say: hi}}]\n{text}")
    environ = {"HALTER_PERSON": "ada"}
    async with (
        open_runtime(read_settings(environ, home), environ=environ) as app,
        open_folder_agent(app, folder, WorkerId("w")) as ready,
    ):
        yield ready


async def definition(spoken: AgentRuntime) -> Mapping[str, Any]:
    session = await begin_session(spoken, "hello", "chat")
    (row,) = await spoken.app.store.ask(Query("session", SessionRow, {"session": session}))
    return msgspec.json.decode(await spoken.app.store.get(Digest(row.definition)))


async def test_an_agent_of_a_folder_is_put_together_with_how_it_paces_itself(tmp_path: Path) -> None:
    text = "tools: {files: {root: files}}\nautonomy: {enabled: true}\n"
    text += field("refresh_tool: list_folder") + sensor(
        f"url: 'https://a.example/?key={KEY}', headers: {{X-Key: {KEY}}}"
    )
    async with context(tmp_path, text) as spoken:
        definition_of_agent = spoken.definition
        assert definition_of_agent.pacing.autonomy.enabled
        assert list(definition_of_agent.pacing.fields) == ["cash", "feed"]
        payload = await definition(spoken)
    assert payload["pacing"]["fields"]["cash"]["refresh_tool"] == "list_folder"
    assert payload["pacing"]["sensors"][0]["source"]["headers"] == {"X-Key": "…"}
    assert KEY not in str(payload)


async def test_an_agent_of_a_folder_whose_sensor_names_no_tool_of_its_own_is_not_put_together(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"agent\.yaml line 7: `sensors\[1\]\.source\.tool` is `look`, but there is no"
    ):
        async with context(tmp_path, sensor("tool: look")):
            pass


async def test_an_agent_without_a_word_of_it_paces_itself_as_before(tmp_path: Path) -> None:
    async with context(tmp_path, "") as spoken:
        assert spoken.definition.pacing == Pacing()


async def test_an_agent_of_a_program_is_checked_in_the_same_words(tmp_path: Path) -> None:
    policy = {"hot_state": {"fields": {"cash": {"refresh_tool": "place_order"}}}}
    agent = Bench(tmp_path).agent(says("Hello."), tools=[place_order], policy=policy)
    with pytest.raises(
        ConfigError, match=r"the agent: `hot_state\.fields\.cash\.refresh_tool` is `place_order`, which"
    ):
        await agent.run("hello")
    odd = {"hot_state": {"fields": {"cash": {"refresh_tool": "get_prices", "refresh_arguments": {"symbols": {1}}}}}}
    agent = Bench(tmp_path).agent(says("Hello."), tools=[get_prices], policy=odd)
    with pytest.raises(ConfigError, match=r"does not fit `get_prices`: it contains a value that JSON cannot represent"):
        await agent.run("hello")

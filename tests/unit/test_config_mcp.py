"""Whatever stands in `.mcp.json`, the answer is servers or a sentence with a line."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.config.mcp_file import load_json, parse_server_file, parse_servers, read_servers
from halter.config.yaml_reader import MAX_BYTES, Document
from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.tools import ToolServer

FOLDER = Path("/agents/night")


def read(text: str | bytes, **environment: str) -> tuple[ToolServer, ...]:
    data = text.encode() if isinstance(text, str) else text
    return parse_servers(load_json(data, ".mcp.json"), FOLDER, environment)


def read_one(entry: dict[str, Any], name: str = "x", **environment: str) -> ToolServer:
    return read(json.dumps({"mcpServers": {name: entry}}), **environment)[0]


def read_refusal(text: str | bytes, **environment: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, **environment)
    return str(error.value)


def entry(text: str) -> str:
    return f'{{\n  "mcpServers": {{\n    "files": {{\n      {text}\n    }}\n  }}\n}}\n'


def test_programs_and_addresses_are_read() -> None:
    servers = read(
        """{"mcpServers": {
            "files": {"command": "npx", "args": ["-y", "files"], "env": {"ROOT": "/data"}, "cwd": "sub"},
            "web": {"url": "https://example.com/mcp", "headers": {"X-Key": "1"}},
            "old": {"type": "sse", "url": "http://localhost:1/sse"},
            "new": {"type": "streamable-http", "url": "http://localhost:1/mcp"}
        }}"""
    )
    assert servers == (
        ToolServer("files", command="npx", args=("-y", "files"), env={"ROOT": "/data"}, cwd="/agents/night/sub"),
        ToolServer("web", "http", url="https://example.com/mcp", headers={"X-Key": "1"}),
        ToolServer("old", "sse", url="http://localhost:1/sse"),
        ToolServer("new", "http", url="http://localhost:1/mcp"),
    )
    assert read_one({"type": "stdio", "command": "x"}).cwd == "/agents/night"
    assert read_one({"command": "x", "cwd": "/srv"}).cwd == "/srv"


def test_a_folder_without_the_file_has_no_servers(tmp_path: Path) -> None:
    assert read_servers(tmp_path, {}) == ()
    (tmp_path / ".mcp.json").write_text('\ufeff{"mcpServers": {"a": {"command": "x"}}}', "utf-8")
    assert read_servers(tmp_path, {}) == (ToolServer("a", command="x", cwd=str(tmp_path)),)
    assert read_servers(tmp_path / ".mcp.json", {})[0].name == "a"
    assert read('{"mcpServers": {}}') == ()


def test_variables_come_from_the_given_environment() -> None:
    server = read_one(
        {"command": "${BIN}/run", "args": ["${A}-${B:-two}", "${C:-}"], "env": {"K": "${secret:KEY} ${A}"}},
        BIN="/bin",
        A="one",
        B="",
    )
    assert (server.command, server.args, server.env) == ("/bin/run", ("one-two", ""), {"K": "${secret:KEY} one"})
    remote = read_one({"url": "https://${HOST:-example.com}/", "headers": {"a": "Bearer ${T}"}}, T="${A}")
    assert (remote.url, remote.headers) == ("https://example.com/", {"a": "Bearer ${A}"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ".mcp.json line 1: this is not valid JSON: Expecting value."),
        ('{\n"a": }', ".mcp.json line 2: this is not valid JSON: Expecting value."),
        ("[]", ".mcp.json line 1: the file is a list, but must be a mapping"),
        ("{}", ".mcp.json line 1: `mcpServers` is missing"),
        ('{"mcpServers": NaN}', ".mcp.json cannot be read: NaN is not JSON"),
        ("[" * 100_000, ".mcp.json cannot be read"),
        ("[" * 40 + "]" * 40, "line 1: values are nested more than 32 levels deep; reduce the nesting."),
        (b'{"a":\n"\xff"}', ".mcp.json line 2: this is not UTF-8 text"),
        (b" " * (MAX_BYTES + 1), "is larger than"),
        ('{"mcpServers": {}, "x": 1}', "line 1: `x` is not a key of .mcp.json"),
        ('{"mcpServers": {"a": {},\n"a": {}}}', "line 2: `mcpServers.a` is already set in line 1; keep one of them."),
        (entry('"comand": "x"'), "line 4: `comand` is not a key of `mcpServers.files`; did you mean `command`?"),
        (entry('"command": "x",\n"env": {"A": 1}'), "line 5: `mcpServers.files.env.A` is the number 1, but must be"),
        (entry('"command": "x",\n"args": ["a",\n7]'), "line 6: `mcpServers.files.args[2]` is the number 7"),
        (entry('"type": "ws"'), "line 4: `mcpServers.files.type` is the text 'ws', which is not one of its values"),
        (entry('"args": []'), "line 3: `mcpServers.files` has no `command`"),
        (entry('"type": "http"'), "line 3: `mcpServers.files` has no `url`"),
        (
            entry('"command": "x",\n"url": "y"'),
            "line 5: `mcpServers.files.url` is not a key of a server of type stdio;",
        ),
        (
            entry('"type": "sse", "url": "http://a",\n"env": {}'),
            "line 5: `mcpServers.files.env` is not a key of a server of type sse;",
        ),
        (entry('"command": " "'), "line 4: `mcpServers.files.command` is empty"),
        (entry('"command": "${NOPE}"'), "refers to ${NOPE}, which is not set; set NOPE in the environment"),
        (
            entry('"command": "x",\n"args": ["${1}"]'),
            "line 5: `mcpServers.files.args[1]` contains a `${` that is not a reference;",
        ),
        (entry('"command": "x", "args": ["${secret:A}"]'), "or ${secret:NAME} in `env` and `headers`."),
        (
            entry('"command": "x", "env": {"A": "${secret:}"}'),
            "`mcpServers.files.env.A` contains a `${` that is not a reference;",
        ),
        (
            entry('"command": "x", "env": {"A=B": "1"}'),
            "`mcpServers.files.env` has the invalid name 'A=B'; rename or remove it.",
        ),
        (entry('"command": "x\\u0000"'), "contains a character that cannot be sent; remove it."),
        (
            entry('"url": "http://a", "headers": {"a b": "1"}'),
            "`mcpServers.files.headers` has the invalid name 'a b'; rename or remove it.",
        ),
        (
            entry('"url": "http://a", "headers": {"a": "1\\r\\nb: 2"}'),
            "contains a character that cannot be sent; remove it.",
        ),
        (
            entry('"url": "ftp://a"'),
            "line 4: `mcpServers.files.url` is not a valid URL; write one that begins with https:// or http://",
        ),
        (entry('"url": "https://me:secret@a/"'), "is not a valid URL; write one that begins with https:// or http://"),
        (entry('"url": "http://[1"'), "is not a valid URL; write one that begins with https:// or http://"),
        (entry('"url": "http://a b"'), "is not a valid URL; write one that begins with https:// or http://"),
    ],
)
def test_mistakes_name_file_line_key_and_fix(text: str | bytes, sentence: str) -> None:
    assert sentence in read_refusal(text)


def test_a_password_in_a_url_is_not_repeated() -> None:
    assert "hush" not in read_refusal(entry('"url": "https://me:hush@example.com/"'))
    assert "hush" not in read_refusal(entry('"url": "${U}"'), U="hush")


@pytest.mark.parametrize("name", ["a", "A-1", "my_files", "x" * 32])
def test_names_that_tools_can_be_called_by_are_accepted(name: str) -> None:
    assert read_one({"command": "x"}, name).name == name


@pytest.mark.parametrize("name", ["", "1a", "-a", "_a", "a_", "a__b", "a.b", "a b", "ä", "x" * 33])
def test_names_that_no_tool_can_be_called_by_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid server name"):
        read_one({"command": "x"}, name)


def test_the_documented_example_is_read() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text("utf-8")
    example = re.search(r"```json\n(.*?)```", guide, re.DOTALL)
    assert example is not None
    files, search = read(example[1])
    assert (files.args[-1], search.transport) == ("data", "http")


def paths(value: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path}.union(*(paths(each, (*path, key)) for key, each in inside))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_every_value_of_a_file_has_its_line(value: Any, indent: int | str | None, ascii_only: bool) -> None:  # noqa: FBT001 Hypothesis decides.
    document = load_json(json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(), "f")
    assert isinstance(document, Document)
    assert document.value == value
    assert set(document.source_map.lines) == paths(value)


@given(st.binary() | JSON.map(lambda value: json.dumps({"mcpServers": {"a": value}}).encode()))
def test_whatever_is_written_nothing_else_is_raised(data: bytes) -> None:
    with suppress(ConfigError):
        parse_servers(load_json(data, "f"), FOLDER, {})


def test_a_server_may_be_given_longer_to_start() -> None:
    assert read_one({"command": "npx"}).start_timeout == 60 * SECOND
    assert read_one({"command": "npx", "startup_timeout_sec": 300}).start_timeout == 300 * SECOND
    assert read_one({"url": "https://example.com/mcp", "startup_timeout_sec": 0.5}).start_timeout == SECOND // 2
    text = read_refusal(entry('"command": "npx",\n      "startup_timeout_sec": 0'))
    assert (
        text
        == ".mcp.json line 5: `mcpServers.files.startup_timeout_sec` is 0; write a number of seconds from 0.1 to 3600."
    )


def read_file(entries: Any, **environment: str) -> tuple[ToolServer, ...]:
    text = json.dumps({"mcpServers": entries}, indent=1)
    return parse_server_file(load_json(text.encode(), ".mcp.json"), FOLDER, environment)


@pytest.mark.parametrize(
    ("flawed", "why"),
    [
        (
            {"url": "https://a/", "oauth": {"clientId": "x", "callbackPort": 8080}},
            "`mcpServers.b.oauth` is not supported",
        ),
        (
            {"url": "https://a/", "headersHelper": "/bin/token"},
            "`mcpServers.b.headersHelper` is not supported; put a token",
        ),
        ({"type": "ws", "url": "wss://a/"}, "`mcpServers.b.type` is the text 'ws', which is not one of its values"),
        ({"command": "x", "envFile": ".env"}, "`mcpServers.b.envFile` is not supported; name the variables in `env`."),
        ({"command": "x", "disabledTools": ["rm"]}, "`mcpServers.b.disabledTools` is not supported; name the tools"),
        ({"command": "x", "tools": ["get"]}, "`mcpServers.b.tools` is not supported; name the tools"),
        ({"command": "x", "sandbox": True}, "`sandbox` is not a key of `mcpServers.b`"),
        ({"command": "x", "env": {"A": "${NOPE}"}}, "refers to ${NOPE}, which is not set"),
        ({"command": "x", "env": {"A": "${input:key}"}}, "contains a `${` that is not a reference"),
        ({"command": "x", "timeout": -1}, "write a number of milliseconds"),
        ({"command": "x", "disabled": True}, "`disabled` says so in .mcp.json line"),
        ({"command": "x", "enabled": False}, "`enabled` says so in .mcp.json line"),
        ({}, "`mcpServers.b` has no `command`"),
        (7, "`mcpServers.b` is the number 7"),
    ],
    ids=lambda each: next(reversed(each), "empty") if isinstance(each, dict) else None,
)
def test_a_server_that_cannot_be_used_as_written_is_left_out_and_the_others_are_used(flawed: Any, why: str) -> None:
    first, second, third = read_file({"a": {"command": "x"}, "b": flawed, "c": {"url": "https://c/"}})
    assert (first.omission, third.omission, third.transport) == ("", "", "http")
    assert (second.name, second.command, second.url) == ("b", "", "")
    assert why in second.omission


def test_what_only_describes_a_server_is_skipped_and_what_would_allow_its_tools_as_well_with_a_sentence() -> None:
    described = {"name": "Files", "description": "All files.", "icon": "x", "alwaysLoad": True, "disabled": False}
    (server,) = read_file({"a": {"command": "x", **described, "tools": ["*"], "alwaysAllow": ["rm"], "trust": True}})
    assert (server.omission, server.command) == ("", "x")
    assert server.notes == tuple(
        f"`mcpServers.a.{key}` has no effect: policies decide which tools are asked about."
        for key in ("alwaysAllow", "trust")
    )


def test_keys_beside_the_servers_that_other_programs_write_are_skipped() -> None:
    text = b'{"$schema": "x", "inputs": [], "mcpServers": {"a": {"command": "x"}}}'
    assert parse_server_file(load_json(text, ".mcp.json"), FOLDER, {})[0].command == "x"
    with pytest.raises(ConfigError, match=r"`x` is not a key of \.mcp\.json"):
        parse_server_file(load_json(b'{"mcpServers": {}, "x": 1}', ".mcp.json"), FOLDER, {})


@pytest.mark.parametrize("key", ["url", "httpUrl", "serverUrl"])
@pytest.mark.parametrize("kind", ["http", "streamable-http", "sse", None])
def test_a_remote_server_is_read_as_other_programs_write_it(key: str, kind: str | None) -> None:
    entry = {key: "https://${HOST:-example.com}/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}
    (server,) = read_file({"a": {**entry, **({"type": kind} if kind else {})}}, TOKEN="t")
    assert (server.transport, server.url) == ("sse" if kind == "sse" else "http", "https://example.com/mcp")
    assert server.headers == {"Authorization": "Bearer t"}


def test_the_time_of_a_call_is_in_milliseconds_and_what_was_meant_in_seconds_is_said() -> None:
    assert read_one({"command": "x", "timeout": 600000}).call_timeout == 600 * SECOND
    server = read_one({"command": "x", "timeout": 60})
    assert server.call_timeout is None
    assert server.notes == ("`mcpServers.x.timeout` is 60 milliseconds and has no effect; write at least 1000.",)


def test_a_variable_that_is_empty_is_set() -> None:
    server = read_one({"command": "x", "env": {"A": "${A}", "B": "${A:-b}"}}, A="")
    assert server.env == {"A": "", "B": "b"}

"""`.mcp.json`: the MCP servers of an agent, in the format that other programs use.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "some-server"], "env": {"TOKEN": "${FILES_TOKEN}"}},
                    "search": {"type": "http", "url": "https://example.com/mcp"}}}

`${VAR}` and `${VAR:-default}` are expanded from the environment. `${secret:NAME}` in `env` and `headers` is expanded
when the server is started or called. `startup_timeout_sec` is the time that a server has to start and list its tools,
`timeout` the milliseconds of a call.

Other programs write more keys. One that only describes a server is skipped. One that would allow tools without asking
is skipped with a sentence, since only policies allow. A server with any other key, or with a mistake, is left out with
a sentence: Halter does not guess what it would be without that key. The agent starts without it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import msgspec

from halter.config.decode import decode_document, format_key_path
from halter.config.yaml_reader import MAX_BYTES, MAX_DEPTH, Document, KeyPath, SourceMap
from halter.core.clock import SECOND
from halter.core.errors import ConfigError
from halter.core.tools import DEFAULT_SERVER_START, SERVER_SEPARATOR, ToolServer, Transport

MCP_FILE: Final = ".mcp.json"

MAX_START_TIMEOUT: Final = 3600.0

_NAME_PATTERN: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_-]{0,30}[A-Za-z0-9-])?")
_REFERENCE: Final = re.compile(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|(secret:[A-Za-z_][A-Za-z0-9_.-]*\})?)")
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\n')
_VARIABLE_NAME: Final = re.compile(r"[^=\0]+")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_KEYS_OF_OTHERS: Final = frozenset(("$schema", "inputs"))
"""Keys of the file beside `mcpServers` that other programs write."""
_DESCRIPTIVE_KEYS: Final = frozenset(
    ("$schema", "alwaysLoad", "description", "displayName", "gallery", "icon", "icons", "name", "title", "version")
)
_ALLOWING_KEYS: Final = frozenset(("alwaysAllow", "autoApprove", "trust"))
"""Keys with which other programs allow the tools of a server without asking."""
_KEY_ALIASES: Final = MappingProxyType({"httpUrl": "url", "serverUrl": "url", "transport": "type"})
_SIGN_ON: Final = 'put a token into `headers`, as in {"Authorization": "Bearer ${secret:TOKEN}"}.'
_FILTER: Final = "name the tools under `policy.tools` of agent.yaml, and remove it."
_UNSUPPORTED_KEYS: Final = MappingProxyType(
    {
        **dict.fromkeys(("oauth", "auth", "authProviderType", "headersHelper"), _SIGN_ON),
        **dict.fromkeys(("envFile", "env_file"), "name the variables in `env`."),
        **dict.fromkeys(("tools", "includeTools", "excludeTools", "enabledTools", "disabledTools"), _FILTER),
    }
)
"""Keys of other programs that Halter does not support, with what to write instead."""
_MIN_TIMEOUT_MS: Final = 1000
"""A shorter `timeout` is skipped, as Claude Code does: it was probably meant in seconds."""
_STDIO_KEYS: Final = ("command", "args", "env", "cwd")
_REMOTE_KEYS: Final = ("url", "headers")


class McpServerEntry(msgspec.Struct, frozen=True):
    type: Literal["stdio", "http", "streamable-http", "sse"] | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    startup_timeout_sec: float = DEFAULT_SERVER_START / SECOND
    timeout: float | None = None


class _RawFile(msgspec.Struct, frozen=True, rename={"servers": "mcpServers"}):
    servers: dict[str, Any]


class McpFile(msgspec.Struct, frozen=True, rename={"servers": "mcpServers"}):
    servers: dict[str, McpServerEntry]


def read_servers(path: Path, environment: Mapping[str, str], display_name: str | None = None) -> tuple[ToolServer, ...]:
    file = path / MCP_FILE if path.is_dir() else path
    name = display_name or str(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}.") from error
    return parse_server_file(load_json(data, name), file.parent, environment)


def parse_server_file(document: Document, folder: Path, environment: Mapping[str, str]) -> tuple[ToolServer, ...]:
    """Parse a file that other programs may read too. A server with a mistake is left out, with a sentence."""
    content: Any = document.value
    if isinstance(content, dict):
        members = cast("dict[str, Any]", content)
        content = {key: value for key, value in members.items() if key not in _KEYS_OF_OTHERS}
    entries = decode_document(Document(content, document.source_map), _RawFile).servers
    readers = (_Reader(document.source_map, name, environment) for name in entries)
    return tuple(reader.read_or_omit(entry, folder) for reader, entry in zip(readers, entries.values(), strict=True))


def parse_servers(document: Document, folder: Path, environment: Mapping[str, str]) -> tuple[ToolServer, ...]:
    """Parse the servers of a program. Raises ConfigError for a mistake in any of them."""
    entries = decode_document(document, _RawFile).servers
    return tuple(_Reader(document.source_map, name, environment).read(entry, folder) for name, entry in entries.items())


class _Reader:
    def __init__(self, source_map: SourceMap, name: str, environment: Mapping[str, str]) -> None:
        self._source_map = source_map
        self._path: KeyPath = ("mcpServers", name)
        self._name = name
        self._environment = environment

    def read_or_omit(self, entry: Any, folder: Path) -> ToolServer:
        try:
            return self.read(entry, folder)
        except ConfigError as error:
            return ToolServer(self._name, omission=str(error))

    def read(self, entry: Any, folder: Path) -> ToolServer:
        """Read a server. One that is disabled is left out."""
        notes: list[str] = []
        if isinstance(entry, dict):
            members = cast("dict[str, Any]", entry)
            if members.get("disabled") is True or members.get("enabled") is False:
                key = "disabled" if members.get("disabled") is True else "enabled"
                return ToolServer(self._name, omission=f"`{key}` says so in {self._source_map.at((*self._path, key))}.")
            entry = dict(self._translate(members, notes))
        path = ("mcpServers", self._name)
        document = Document({"mcpServers": {self._name: entry}}, self._source_map)
        server = self.server(decode_document(document, McpFile).servers[path[1]], folder)
        return replace(server, notes=(*notes, *server.notes))

    def _translate(self, members: Mapping[str, Any], notes: list[str]) -> Iterator[tuple[str, Any]]:
        """Yield the keys of an entry under Halter's names, without those of other programs that change nothing here."""
        for key, value in members.items():
            name = f"`{format_key_path((*self._path, key))}`"
            if key in _UNSUPPORTED_KEYS and not (key == "tools" and value == ["*"]):
                raise self._make_error(f"{name} is not supported; {_UNSUPPORTED_KEYS[key]}", key)
            if key in _ALLOWING_KEYS:
                if value:
                    notes.append(f"{name} has no effect: policies decide which tools are asked about.")
            elif key not in _DESCRIPTIVE_KEYS and key not in ("disabled", "enabled", "tools"):
                yield _KEY_ALIASES.get(key, key), value

    def server(self, entry: McpServerEntry, folder: Path) -> ToolServer:
        if _NAME_PATTERN.fullmatch(self._name) is None or SERVER_SEPARATOR in self._name:
            raise self._make_error(
                f"{self._name!r} is not a valid server name. Tools are called SERVER__TOOL, so use up to 32 letters, "
                "digits, - and _, starting with a letter, without __ and without _ at the end."
            )
        transport = self._transport(entry)
        limit = self._start_timeout(entry)
        call_timeout, notes = self._call_timeout(entry)
        if transport == "stdio":
            return ToolServer(
                self._name,
                command=self._program(entry),
                args=tuple(self._expand(argument, "args", index) for index, argument in enumerate(entry.args)),
                env=self._expand_all(entry.env, "env", _VARIABLE_NAME),
                cwd=str(folder / self._expand(entry.cwd or ".", "cwd")),
                start_timeout=limit,
                call_timeout=call_timeout,
                notes=notes,
            )
        headers = self._expand_all(entry.headers, "headers", _HEADER_NAME)
        return ToolServer(
            self._name,
            transport,
            url=self._address(entry),
            headers=headers,
            start_timeout=limit,
            call_timeout=call_timeout,
            notes=notes,
        )

    def _make_error(self, sentence: str, *keys: str | int) -> ConfigError:
        return self._source_map.error_at((*self._path, *keys), sentence)

    def _transport(self, entry: McpServerEntry) -> Transport:
        transport = _transport_of(entry)
        foreign_keys = _REMOTE_KEYS if transport == "stdio" else _STDIO_KEYS
        required_key = "command" if transport == "stdio" else "url"
        for key in foreign_keys:
            if (*self._path, key) in self._source_map.lines:
                raise self._make_error(
                    f"`{format_key_path((*self._path, key))}` is not a key of a server of type {transport}; "
                    "write either `command` with `args`, `env` and `cwd`, or `url` with `headers`.",
                    key,
                )
        if getattr(entry, required_key) is None:
            raise self._make_error(
                f"`{format_key_path(self._path)}` has no `{required_key}`; write `command` for a program to start, "
                "or `url` for a remote server."
            )
        return transport

    def _start_timeout(self, entry: McpServerEntry) -> int:
        seconds = entry.startup_timeout_sec
        if not 0 < seconds <= MAX_START_TIMEOUT:
            key = format_key_path((*self._path, "startup_timeout_sec"))
            raise self._make_error(
                f"`{key}` is {seconds:g}; write a number of seconds from 0.1 to 3600.", "startup_timeout_sec"
            )
        return round(seconds * SECOND)

    def _call_timeout(self, entry: McpServerEntry) -> tuple[int | None, tuple[str, ...]]:
        """Read the time of a call, in milliseconds as in Claude Code, and a note if it is not used."""
        milliseconds, key = entry.timeout, f"`{format_key_path((*self._path, 'timeout'))}`"
        if milliseconds is None:
            return None, ()
        if not 0 <= milliseconds <= MAX_START_TIMEOUT * 1000:
            raise self._make_error(
                f"{key} is {milliseconds:g}; write a number of milliseconds from 1,000 to 3,600,000.", "timeout"
            )
        if milliseconds < _MIN_TIMEOUT_MS:
            return None, (f"{key} is {milliseconds:g} milliseconds and has no effect; write at least 1000.",)
        return round(milliseconds * SECOND / 1000), ()

    def _program(self, entry: McpServerEntry) -> str:
        command = self._expand(entry.command or "", "command")
        if not command.strip():
            raise self._make_error(
                f"`{format_key_path((*self._path, 'command'))}` is empty; name the program to start.", "command"
            )
        return command

    def _address(self, entry: McpServerEntry) -> str:
        """Read and check the URL. A password is rejected: it would be visible wherever the URL is shown."""
        url = self._expand(entry.url or "", "url")
        try:
            url_parts = urlsplit(url)
            is_valid = (
                url_parts.scheme in {"http", "https"} and bool(url_parts.hostname) and "@" not in url_parts.netloc
            )
        except ValueError:
            is_valid = False
        if not is_valid or any(letter <= " " for letter in url):
            raise self._make_error(
                f"`{format_key_path((*self._path, 'url'))}` is not a valid URL; write one that begins with https:// "
                "or http://, and put names and passwords into `headers`.",
                "url",
            )
        return url

    def _expand_all(self, values: Mapping[str, str], key: str, name_pattern: re.Pattern[str]) -> dict[str, str]:
        for name in values:
            if name_pattern.fullmatch(name) is None:
                raise self._make_error(
                    f"`{format_key_path((*self._path, key))}` has the invalid name {name!r}; rename or remove it.", key
                )
        return {name: self._expand(value, key, name) for name, value in values.items()}

    def _expand(self, text: str, *keys: str | int) -> str:
        """Expand variables once: the value of a variable is not expanded again."""
        key_path = format_key_path((*self._path, *keys))

        def fill(match: re.Match[str]) -> str:
            name, default, secret = match.groups()
            if secret and keys[0] in {"env", "headers"}:
                return match[0]
            if name is None:
                raise self._make_error(
                    f"`{key_path}` contains a `${{` that is not a reference; {_REFERENCE_FORMS}", *keys
                )
            value = self._environment.get(name)
            value = value if value or default is None else default
            if value is None:
                raise self._make_error(
                    f"`{key_path}` refers to ${{{name}}}, which is not set; set {name} in the environment, or write "
                    f"${{{name}:-default}}.",
                    *keys,
                )
            return value

        expanded_text = _REFERENCE.sub(fill, text)
        if "\0" in expanded_text or (keys[0] == "headers" and re.search(r"[\r\n]", expanded_text)):
            raise self._make_error(f"`{key_path}` contains a character that cannot be sent; remove it.", *keys)
        return expanded_text


_REFERENCE_FORMS: Final = "write ${VAR} or ${VAR:-default}, or ${secret:NAME} in `env` and `headers`."


def _transport_of(entry: McpServerEntry) -> Transport:
    match entry.type:
        case None:
            return "http" if entry.url is not None and entry.command is None else "stdio"
        case "streamable-http":
            return "http"
        case "stdio" | "http" | "sse":
            return entry.type


def load_json(data: bytes, file: str) -> Document:
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES:,} bytes. Keep data out of configuration files.")
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} line {error.lineno}: this is not valid JSON: {error.msg}.") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file} line {line}: this is not UTF-8 text; save the file as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from None
    lines: dict[KeyPath, int] = {}
    source_map = SourceMap(file, lines)
    for path, line in _lines(text):
        if len(path) > MAX_DEPTH:
            raise source_map.error_at(path, f"values are nested more than {MAX_DEPTH} levels deep; reduce the nesting.")
        if path in lines:
            sentence = f"`{format_key_path(path)}` is already set in line {lines[path]}; keep one of them."
            raise ConfigError(f"{file} line {line}: {sentence}")
        lines[path] = line
    return Document(value, source_map)


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the line of each key and element of valid JSON."""
    line = 1
    path: list[str | int | None] = []
    yield (), 1
    for symbol in _TOKEN.findall(text):
        match symbol:
            case "\n":
                line += 1
            case "}" | "]":
                path.pop()
            case ",":
                path[-1] = path[-1] + 1 if isinstance(path[-1], int) else _AWAITS_KEY
            case ":":
                pass
            case _ if path and path[-1] is _AWAITS_KEY:
                path[-1] = cast("str", json.loads(symbol))
                yield cast("KeyPath", tuple(path)), line
            case _:
                if path and isinstance(path[-1], int):
                    yield cast("KeyPath", tuple(path)), line
                if symbol in "{[":
                    path.append(_AWAITS_KEY if symbol == "{" else 0)


_AWAITS_KEY: Final = None

"""What an MCP server says of its tools, looked at before anybody is offered them."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from msgspec.structs import replace

from halter.core.servers import BETWEEN
from halter.core.text import clean
from halter.core.tools import ToolSpec
from halter.tools.arguments import canonical_json
from halter.tools.schemas import Checker, Unusable, compiled
from halter.tools.tool import spec_from_hints

MAX_TOOLS: Final = 500
MAX_SENTENCES: Final = 20
"""Of so many tools it is told why they are left out; the others are counted."""
MAX_DESCRIPTION: Final = 20_000

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]+")
_LONGEST: Final = 64
"""Providers accept no longer names of tools."""


class Raw:
    """Carries requests to a server, and keeps its list of tools as it came.

    A library that reads a list as a whole refuses all of it for one bad entry, and takes a hint that says "yes" for one
    that says true. So it is shown only the parts that it needs, and only of entries that it can read.
    """

    def __init__(self) -> None:
        self.inner: Any = None
        self.tools: list[Any] = []

    async def run(self, *arguments: Any, **more: Any) -> None:
        """Receive messages until there are no more."""
        await self.inner.run(*arguments, **more)

    async def notify(self, *arguments: Any, **more: Any) -> None:
        """Send a message that has no answer."""
        await self.inner.notify(*arguments, **more)

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> dict[str, Any]:
        """Send a request and return what was answered."""
        answer: dict[str, Any] = await self.inner.send_raw_request(method, params, opts)
        tools = answer.get("tools")
        if method != "tools/list" or not isinstance(tools, list):
            return answer
        entries = cast("list[Any]", tools)
        self.tools += entries
        return {**answer, "tools": [part for entry in entries if (part := _readable(entry))]}


def _readable(entry: Any) -> dict[str, Any] | None:
    match entry:
        case {"name": str(name), "inputSchema": {"type": "object"} as schema}:
            properties = cast("dict[str, Any]", schema).get("properties")
            kept = cast("dict[str, Any]", properties if isinstance(properties, dict) else {})
            readable: dict[str, Any] = {key: value for key, value in kept.items() if isinstance(value, dict)}
            return {"name": name, "inputSchema": {"type": "object", "properties": readable}}
        case _:
            return None


@dataclass(frozen=True)
class Described:
    """A tool that can be used: the name that its server knows, what is known of it, and what checks its arguments."""

    name: str
    spec: ToolSpec
    checker: Checker


@dataclass(frozen=True)
class Known:
    """All tools of a server that can be used, and a sentence for each that cannot."""

    tools: tuple[Described, ...]
    left_out: tuple[str, ...]


def described(server: str, entries: Sequence[Any]) -> Known:
    """Look at everything that a server offers."""
    looked = [(entry, _described(server, entry)) for entry in entries[:MAX_TOOLS]]
    names = Counter(tool.spec.name for _, tool in looked if isinstance(tool, Described))
    tools: list[Described] = []
    left_out: list[str] = []
    for entry, tool in looked:
        if isinstance(tool, str):
            left_out.append(_sentence(server, entry, tool))
        elif names[tool.spec.name] > 1:
            left_out.append(_sentence(server, entry, f"another of its tools is called {tool.spec.name}, too"))
        else:
            tools.append(tool)
    if len(left_out) > MAX_SENTENCES:
        rest = len(left_out) - MAX_SENTENCES
        left_out[MAX_SENTENCES:] = [f"And {rest} more tools of the server {server} are left out for such reasons."]
    if len(entries) > MAX_TOOLS:
        left_out.append(f"The server {server} offers more than {MAX_TOOLS} tools; the rest is left out.")
    return Known(tuple(tools), tuple(left_out))


def _described(server: str, entry: Any) -> Described | str:
    """Describe one tool, or say why it cannot be used."""
    match entry:
        case {"name": str(name), "inputSchema": schema}:
            pass
        case _:
            return "it has no name or no schema"
    said = cast("dict[str, Any]", entry)
    full = f"{server}{BETWEEN}{re.sub('[./]', '_', name)}"
    description: Any = said.get("description") or ""
    hints: Any = said.get("annotations") or {}
    if _NAME.fullmatch(name) is None:
        return "its name has characters that no model can write; letters, digits, _, -, . and / are understood"
    if len(full) > _LONGEST:
        return f"its full name {full} is longer than {_LONGEST} characters; give the server a shorter name"
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        return f"its description is no text of at most {MAX_DESCRIPTION:,} characters"
    if not isinstance(hints, dict):
        return "its annotations are no object"
    checker = compiled(schema)
    if isinstance(checker, Unusable):
        return checker.why
    text = clean(description) or name
    spec = spec_from_hints(full, text, checker.text, cast("dict[str, Any]", hints), server=server)
    try:
        return Described(name, _sealed(spec, cast("dict[str, Any]", hints)), checker)
    except (ValueError, RecursionError):
        return "its annotations cannot be read"


def _sealed(spec: ToolSpec, hints: Mapping[str, Any]) -> ToolSpec:
    """Let the digest cover all hints: also those that change nothing here may change what a person thinks of a tool."""
    digest = hashlib.sha256(spec.digest.encode() + canonical_json(hints)).hexdigest()
    return replace(spec, digest=digest)


def _sentence(server: str, entry: Any, why: str) -> str:
    name = cast("dict[str, Any]", entry).get("name") if isinstance(entry, dict) else None
    told = f"The tool {name[:80]!r}" if isinstance(name, str) else "A tool"
    return f"{told} of the server {server} is left out: {why}."

"""Servers whose tools an agent may use: how each one is reached, and which of its tools a person agreed to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from halter.core.tools import ToolSpec

BETWEEN: Final = "__"
"""Stands between the name of a server and that of its tool; the first one in a name counts."""

Transport = Literal["stdio", "http", "sse"]

Pinned = Mapping[str, str]
"""The digest of each tool of a server as a person agreed to it, by the tool's full name."""


@dataclass(frozen=True)
class Server:
    """One server of tools: a program to start, or an address to ask.

    `cwd` is where the program runs. Texts of `env` and `headers` may refer to secrets as `${secret:NAME}`. What may
    hold a key is left out when a server is printed.
    """

    name: str
    transport: Transport = "stdio"
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    cwd: str = ""
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


class Sorted(NamedTuple):
    """Tools that may be used, tools that are not what was agreed to, and tools that nobody has agreed to yet."""

    usable: tuple[ToolSpec, ...]
    changed: tuple[ToolSpec, ...]
    new: tuple[ToolSpec, ...]


def quarantined(specs: Iterable[ToolSpec], pins: Pinned) -> Sorted:
    """Sort tools by what a person agreed to; those that are changed or new wait for a decision.

    All tools of a server that is seen for the first time are usable: whoever trusted it trusted them. The caller pins
    what is usable. A tool that belongs to no server is none of this function's business.
    """
    known = {name.partition(BETWEEN)[0] for name in pins}
    usable: list[ToolSpec] = []
    changed: list[ToolSpec] = []
    new: list[ToolSpec] = []
    for spec in specs:
        if not spec.server or spec.server not in known or pins.get(spec.name) == spec.digest:
            usable.append(spec)
        elif spec.name in pins:
            changed.append(spec)
        else:
            new.append(spec)
    return Sorted(tuple(usable), tuple(changed), tuple(new))

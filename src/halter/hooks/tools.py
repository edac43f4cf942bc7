"""The tools of other programs for the guard: their effect, the risk of a call, and the paths that it must not reach.

The name of a tool decides its family: shell, reader, writer, web, planner, sender, a tool of an MCP server, or other.
The level of a call follows from its risk, so that harmless commands pass and dangerous ones need a person. It is higher
for a command that may change something, and for a call whose work leaves the session.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from halter.core.tools import (
    TOOLS_BY_FAMILY,
    Effect,
    EffectStatus,
    Failed,
    Invalid,
    Level,
    Output,
    Permit,
    ToolFamily,
    ToolSpec,
    Valid,
)
from halter.core.vocabulary import RiskLevel
from halter.policy.order import find_strictest, is_covered
from halter.risk.read_only import only_reads
from halter.risk.risk import assess_risk
from halter.spec.policy import ToolRule
from halter.system.protected_paths import ProtectedEntry, ProtectedPaths
from halter.tools.function_tool import canonical_json

CWD: Final = "cwd"
"""The argument for the folder in which a call runs: an approval in one folder does not apply to another."""

_MCP_TOOL: Final = re.compile(r"mcp__(?P<server>[A-Za-z0-9_.-]+?)__.+|(?P<cursor>MCP):.+")
_PATCHED_FILE: Final = re.compile(r"^\*\*\* (?:(?:Add|Update|Delete) File|Move to): (.+)$", re.MULTILINE)
_URL: Final = re.compile(r"https?://[^\s\"'<>)\]]+")
_PATH_KEYS: Final = ("file_path", "absolute_path", "notebook_path", "path", "target_file", "dir_path")
_COMMENT_KEYS: Final = frozenset({"description", "explanation"})
"""The model's comments on its own shell call. They do not affect the call, so its digest does not include them."""

_FAMILY_TERMS: Final[Mapping[ToolFamily, tuple[Level, Effect]]] = {
    "shell": ("MONITORED", "write"),
    "reader": ("SAFE", "read"),
    "writer": ("CONTROLLED", "write"),
    "web": ("MONITORED", "read"),
    "planner": ("SAFE", "read"),
    "sender": ("RESTRICTED", "write"),
    "mcp": ("CONTROLLED", "write"),
    "other": ("CONTROLLED", "write"),
}
_RISK_LEVELS: Final[Mapping[RiskLevel, Level]] = {
    "LOW": "SAFE",
    "MEDIUM": "CONTROLLED",
    "HIGH": "RESTRICTED",
    "CRITICAL": "RESTRICTED",
}
_LEAVING_ARGUMENTS: Final[Mapping[str, frozenset[str]]] = {
    "durable": frozenset({"true"}),
    "remote": frozenset({"true"}),
    "isolation": frozenset({"remote", "cloud"}),
    "environment": frozenset({"remote", "cloud"}),
    "location": frozenset({"remote", "cloud"}),
}
"""Arguments with which a planner or a schedule works elsewhere, or after the session has ended."""
_FILE_KEYS: Final = ("files", "attachments")
"""Arguments with the files that a message takes along."""
_ANY_ARGUMENTS: Final = b'{"type":"object"}'


def find_family(tool: str) -> ToolFamily:
    for family, names in TOOLS_BY_FAMILY.items():
        if tool in names:
            return family
    return "mcp" if _MCP_TOOL.fullmatch(tool) else "other"


def bind_arguments(tool: str, values: Mapping[str, Any], cwd: str) -> bytes:
    """Return the arguments that a decision is bound to, as canonical JSON; those of a shell include its folder."""
    if find_family(tool) != "shell":
        return canonical_json(values)
    bound_values = {key: value for key, value in values.items() if key not in _COMMENT_KEYS}
    return canonical_json({**bound_values, CWD: cwd})


def unbind_arguments(tool: str, edited_json: bytes, original: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a person edited, in the form of the program."""
    values: Mapping[str, Any] = msgspec.json.decode(edited_json)
    if find_family(tool) != "shell":
        return values
    comments = {key: value for key, value in original.items() if key in _COMMENT_KEYS}
    return {**comments, **{key: value for key, value in values.items() if key != CWD}}


class HookedTool:
    """One tool of another program, for one call: the guard checks the call, and the program runs it."""

    def __init__(
        self, name: str, cwd: str, protected_paths: ProtectedPaths, hosts: tuple[str, ...] | None, *, cost: int = 0
    ) -> None:
        self._name = name
        self._cwd = Path(cwd or "/")
        self._family: ToolFamily = find_family(name)
        self._protected = protected_paths
        self._hosts = hosts
        self._cost = cost
        self._spec: ToolSpec | None = None

    @property
    def spec(self) -> ToolSpec:
        return self._spec or self._make_spec("LOW")

    def with_risk_level(self, arguments: bytes) -> "HookedTool":
        """Set the tool's level by the risk of this call; return the tool itself."""
        valid, base = self.validate(arguments), self._make_spec("LOW")
        if isinstance(valid, Valid):
            self._spec = self._make_spec(assess_risk(base, valid).level, self._find_min_level(valid.values))
        else:
            self._spec = base
        return self

    def _find_min_level(self, values: Mapping[str, Any]) -> Level:
        """Find the level that a call has at least: CONTROLLED if it changes something, RESTRICTED if it leaves."""
        if self._family == "shell":
            return "SAFE" if _only_reads(values.get("command")) else "CONTROLLED"
        is_leaving = any(
            str(values.get(name)).strip().casefold() in choices for name, choices in _LEAVING_ARGUMENTS.items()
        )
        sends_files = any(values.get(name) for name in _FILE_KEYS)
        return "RESTRICTED" if self._family in {"planner", "other"} and (is_leaving or sends_files) else "SAFE"

    def _make_spec(self, risk: RiskLevel, min_level: Level = "SAFE") -> ToolSpec:
        level, effect = _FAMILY_TERMS[self._family]
        match = _MCP_TOOL.fullmatch(self._name)
        return ToolSpec(
            name=self._name,
            description="A tool of another program.",
            schema=_ANY_ARGUMENTS,
            level=find_strictest(ToolRule, "level", (level, _RISK_LEVELS[risk], min_level)),
            effect=effect,
            egress=self._family in {"web", "mcp"},
            cost=self._cost,
            server=(match["server"] or match["cursor"]) if match else "",
        )

    def validate(self, arguments: bytes) -> Valid | Invalid:
        try:
            value: Any = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            return Invalid(f"The arguments of {self._name} are not valid JSON: {error}.")
        if not isinstance(value, dict):
            return Invalid(f"The arguments of {self._name} are not a JSON object.")
        values = cast("dict[str, Any]", value)
        problem = self._reject_paths(values) or self._reject_hosts(values)
        return Invalid(problem) if problem else Valid(self._relative(values), arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Raise Failed: only the other program runs its tools."""
        del arguments, permit
        raise Failed("NotHere", f"{self._name} runs only in its own program")

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        del arguments, permit
        return "unknown"

    def _reject_paths(self, values: Mapping[str, Any]) -> str:
        if self._family not in {"reader", "writer", "sender", "other"}:
            return ""
        reads = self._family != "writer"
        for path in self._paths(values):
            if entry := find_protected(path, self._protected, reads=reads):
                return f"{path} is {entry.description}: no tool may {'read' if reads else 'write'} it."
        return ""

    def _reject_hosts(self, values: Mapping[str, Any]) -> str:
        if self._family != "web" or self._hosts is None:
            return ""
        texts = [value for value in values.values() if isinstance(value, str)]
        for url in (str(url) for text in texts for url in _URL.findall(text)):
            try:
                host = urlsplit(url).hostname or ""
            except ValueError:
                return f"{url[:200]} is not a valid URL."
            if not is_covered(host, self._hosts):
                return f"{host} is not an allowed host. Allowed: {', '.join(self._hosts) or 'none'}."
        return ""

    def _paths(self, values: Mapping[str, Any]) -> Iterator[Path]:
        for key in _PATH_KEYS:
            if isinstance(values.get(key), str) and values[key]:
                yield self._cwd / Path(values[key]).expanduser()
        if self._family in {"sender", "other"}:
            for key in _FILE_KEYS:
                yield from (self._cwd / Path(text).expanduser() for text in _list_texts(values.get(key)))
        for text in (each for each in values.values() if isinstance(each, str) and "*** " in each):
            yield from (self._cwd / Path(path.strip()).expanduser() for path in _PATCHED_FILE.findall(text))

    def _relative(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the paths below the program's folder relative to it, because only a path outside adds to the risk."""
        if self._family not in {"reader", "writer"}:
            return values
        relative_values = dict(values)
        for key in _PATH_KEYS:
            if isinstance(values.get(key), str):
                full_path = Path(os.path.normpath(self._cwd / Path(values[key]).expanduser()))
                is_inside = full_path.is_relative_to(self._cwd)
                relative_values[key] = str(full_path.relative_to(self._cwd)) if is_inside else str(full_path)
        return relative_values


def _only_reads(command: object) -> bool:
    """Return whether a command, as a line or as words, certainly changes nothing."""
    if isinstance(command, list):
        words = cast("list[object]", command)
        return all(isinstance(word, str) for word in words) and only_reads(cast("list[str]", words))
    return isinstance(command, str) and only_reads(command)


def _list_texts(value: object) -> Iterator[str]:
    """Yield the texts of a list, and of the objects in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            yield from _list_texts(each)
    elif isinstance(value, dict):
        for each in cast("dict[str, object]", value).values():
            yield from _list_texts(each)


def find_protected(path: Path, protected_paths: ProtectedPaths, *, reads: bool) -> ProtectedEntry | None:
    """Find the protected entry that a path reaches, also through a link or another name; reads only match secrets."""
    real_path = Path(os.path.realpath(path))
    for entry in protected_paths.entries:
        if reads and not entry.is_secret:
            continue
        protected_path = Path(os.path.realpath(entry.path))
        if real_path == protected_path or (entry.is_folder and real_path.is_relative_to(protected_path)):
            return entry
    try:
        status = real_path.stat()
    except (OSError, ValueError):
        return None
    match = protected_paths.take_snapshot(read_only=reads).judge_file((status.st_dev, status.st_ino))
    return None if match is None else match.entry

"""The tools of other programs, as the guard sees them: what they do, how dangerous a call is, what it must not reach.

A program's own names decide what a tool is: a shell, a reader, a writer, a fetcher, a tool of an MCP server, or other.
The level of a call follows from its risk, so that harmless commands pass where dangerous ones need a person.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import msgspec

from halter.core.folders import ProtectedEntry, ProtectedPaths
from halter.core.spec import is_covered
from halter.core.text import word_set
from halter.core.tools import (
    LEVELS,
    Effect,
    EffectStatus,
    Failed,
    Invalid,
    Level,
    Output,
    Permit,
    ToolSpec,
    Valid,
)
from halter.core.vocabulary import RiskLevel
from halter.risk.risk import assess_risk
from halter.tools.function_tool import canonical_json

ToolFamily = Literal["shell", "reader", "writer", "web", "planner", "mcp", "other"]

CWD: Final = "cwd"
"""The argument that says where a call runs: what a person approves in one folder is not approved in another."""

_FAMILIES: Final[Mapping[ToolFamily, frozenset[str]]] = {
    "shell": word_set("Bash Shell run_shell_command"),
    "reader": word_set(
        "Read Glob Grep LS NotebookRead BashOutput TaskOutput Search SemanticSearch ReadLints read_file "
        "read_many_files list_directory glob search_file_content grep_search view_image ListMcpResourcesTool "
        "ReadMcpResourceTool"
    ),
    "writer": word_set(
        "Write Edit MultiEdit NotebookEdit StrReplace Delete TabWrite write_file replace apply_patch EditNotebook"
    ),
    "web": word_set("WebFetch WebSearch web_fetch google_web_search web_search"),
    "planner": word_set(
        "TodoWrite TodoRead TaskCreate TaskUpdate TaskGet TaskList ExitPlanMode EnterPlanMode AskUserQuestion "
        "AskQuestion ToolSearch Skill Task Agent SlashCommand update_plan write_todos KillShell TaskStop"
    ),
}
_MCP: Final = re.compile(r"mcp__(?P<server>[A-Za-z0-9_.-]+?)__.+|(?P<cursor>MCP):.+")
_PATCHED: Final = re.compile(r"^\*\*\* (?:(?:Add|Update|Delete) File|Move to): (.+)$", re.MULTILINE)
_URL: Final = re.compile(r"https?://[^\s\"'<>)\]]+")
_PATH_KEYS: Final = ("file_path", "absolute_path", "notebook_path", "path", "target_file", "dir_path")
_DROPPED: Final = frozenset({"description", "explanation"})
"""What a model says about its own shell call: it decides nothing, and would make the same call another one."""

_FAMILY_TERMS: Final[Mapping[ToolFamily, tuple[Level, Effect]]] = {
    "shell": ("MONITORED", "write"),
    "reader": ("SAFE", "read"),
    "writer": ("CONTROLLED", "write"),
    "web": ("MONITORED", "read"),
    "planner": ("SAFE", "read"),
    "mcp": ("CONTROLLED", "write"),
    "other": ("CONTROLLED", "write"),
}
_RISK_LEVELS: Final[Mapping[RiskLevel, Level]] = {
    "LOW": "SAFE",
    "MEDIUM": "CONTROLLED",
    "HIGH": "RESTRICTED",
    "CRITICAL": "RESTRICTED",
}
_ANY_ARGUMENTS: Final = b'{"type":"object"}'


def find_family(tool: str) -> ToolFamily:
    for family, names in _FAMILIES.items():
        if tool in names:
            return family
    return "mcp" if _MCP.fullmatch(tool) else "other"


def bind_arguments(tool: str, values: Mapping[str, Any], cwd: str) -> bytes:
    """The arguments that a decision is bound to, as canonical JSON: those of the call, and where a shell runs."""
    if find_family(tool) != "shell":
        return canonical_json(values)
    kept = {key: value for key, value in values.items() if key not in _DROPPED}
    return canonical_json({**kept, CWD: cwd})


def unbind_arguments(tool: str, edited: bytes, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a person put in place of the arguments, as the program takes it."""
    values: Mapping[str, Any] = msgspec.json.decode(edited)
    if find_family(tool) != "shell":
        return values
    raw = {key: value for key, value in given.items() if key in _DROPPED}
    return {**raw, **{key: value for key, value in values.items() if key != CWD}}


class HookedTool:
    """One tool of another program, for one call: it is judged here, and runs there."""

    def __init__(
        self, name: str, cwd: str, protected: ProtectedPaths, hosts: tuple[str, ...] | None, *, cost: int = 0
    ) -> None:
        self._name = name
        self._cwd = Path(cwd or "/")
        self._family: ToolFamily = find_family(name)
        self._protected = protected
        self._hosts = hosts
        self._cost = cost
        self._spec: ToolSpec | None = None

    @property
    def spec(self) -> ToolSpec:
        return self._spec or self._make_spec("LOW")

    def with_risk_level(self, arguments: bytes) -> "HookedTool":
        """The tool with the level that the risk of this call asks for."""
        valid, base = self.validate(arguments), self._make_spec("LOW")
        risk: RiskLevel = assess_risk(base, valid).level if isinstance(valid, Valid) else "LOW"
        self._spec = self._make_spec(risk)
        return self

    def _make_spec(self, risk: RiskLevel) -> ToolSpec:
        level, effect = _FAMILY_TERMS[self._family]
        named = _MCP.fullmatch(self._name)
        return ToolSpec(
            name=self._name,
            description="A tool of another program.",
            schema=_ANY_ARGUMENTS,
            level=LEVELS[max(LEVELS.index(level), LEVELS.index(_RISK_LEVELS[risk]))],
            effect=effect,
            egress=self._family in {"web", "mcp"},
            cost=self._cost,
            server=(named["server"] or named["cursor"]) if named else "",
        )

    def validate(self, arguments: bytes) -> Valid | Invalid:
        try:
            given: Any = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            return Invalid(f"The arguments of {self._name} are no JSON: {error}.")
        if not isinstance(given, dict):
            return Invalid(f"The arguments of {self._name} are no object.")
        values = cast("dict[str, Any]", given)
        refusal = self._reject_paths(values) or self._reject_hosts(values)
        return Invalid(refusal) if refusal else Valid(self._relative(values), arguments)

    async def run(self, arguments: Valid, permit: Permit) -> Output:
        """Never: the other program runs it."""
        del arguments, permit
        raise Failed("NotHere", f"{self._name} runs in the program that it belongs to")

    async def check(self, arguments: Valid, permit: Permit) -> EffectStatus:
        del arguments, permit
        return "unknown"

    def _reject_paths(self, values: Mapping[str, Any]) -> str:
        if self._family not in {"reader", "writer"}:
            return ""
        for path in self._paths(values):
            if thing := find_protected(path, self._protected, reads=self._family == "reader"):
                return f"{path} is {thing.what}: no tool may {'read' if self._family == 'reader' else 'write'} it."
        return ""

    def _reject_hosts(self, values: Mapping[str, Any]) -> str:
        if self._family != "web" or self._hosts is None:
            return ""
        texts = [value for value in values.values() if isinstance(value, str)]
        for url in (str(url) for text in texts for url in _URL.findall(text)):
            try:
                host = urlsplit(url).hostname or ""
            except ValueError:
                return f"{url[:200]} cannot be read as a URL."
            if not is_covered(host, self._hosts):
                return f"{host} is not among the allowed hosts: {', '.join(self._hosts) or 'none'}."
        return ""

    def _paths(self, values: Mapping[str, Any]) -> Iterator[Path]:
        for key in _PATH_KEYS:
            if isinstance(values.get(key), str) and values[key]:
                yield self._cwd / Path(values[key]).expanduser()
        for text in (each for each in values.values() if isinstance(each, str) and "*** " in each):
            yield from (self._cwd / Path(path.strip()).expanduser() for path in _PATCHED.findall(text))

    def _relative(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Paths below the program's folder as seen from there: only what lies outside is a risk by its place."""
        if self._family not in {"reader", "writer"}:
            return values
        made = dict(values)
        for key in _PATH_KEYS:
            if isinstance(values.get(key), str):
                whole = Path(os.path.normpath(self._cwd / Path(values[key]).expanduser()))
                inside = whole.is_relative_to(self._cwd)
                made[key] = str(whole.relative_to(self._cwd)) if inside else str(whole)
        return made


def find_protected(path: Path, protected: ProtectedPaths, *, reads: bool) -> ProtectedEntry | None:
    """What a path reaches that no tool may write, or read where it is secret; links and other names count."""
    real = Path(os.path.realpath(path))
    for thing in protected.things:
        if reads and not thing.secret:
            continue
        place = Path(os.path.realpath(thing.path))
        if real == place or (thing.folder and real.is_relative_to(place)):
            return thing
    try:
        about = real.stat()
    except (OSError, ValueError):
        return None
    found = protected.sight(reads=reads).judge_file((about.st_dev, about.st_ino))
    return None if found is None else found.thing

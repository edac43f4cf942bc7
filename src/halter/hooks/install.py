"""Installation of the hooks in the settings of a program, their removal, and their status.

Other hooks and settings are not changed. On removal, a file that is unchanged since the installation is restored byte
for byte; from a changed file only Halter's own hooks are removed.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from halter.core.errors import ConfigError, NotDone
from halter.core.text import join_names
from halter.hooks import client
from halter.hooks.protocol import DIALECTS
from halter.hooks.registry import HookedProgram, HookFolder, Installation

AGENT_FILE: Final = "agent.yaml"
MARGIN_SECONDS: Final = 60
"""Added to the wait for a person to get the hook's timeout; added twice to get the program's."""
PROGRAM_TIMEOUT_SECONDS: Final = 20
PING: Final = b'{"hook_event_name":"HalterPing","session_id":"status"}'

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_POLICY_TEMPLATE: Final = """\
# What {title} may do: Halter judges each of its tool calls by this file before it runs.
# A call is rated by what it does: commands by a shell parser, files by their place, URLs by their host.
# In the fleet's mode SEMI a person is asked before calls of high risk and before tools of MCP servers,
# in ASSIST before everything that changes something, in FULL only before calls of critical risk.
name: {agent}

limits:
  max_cost_usd: 5 # of tools that have a price; what its models cost is seen by `halter proxy` alone

# policy:
#   disabled: [WebSearch]
#   tools:
#     Bash: {{rate: 200/hour}}
#     Write: {{approval: always}}
"""


_UNTESTED_NOTE: Final = "These hooks follow the documentation of {0} and are not tested with {0} itself."
_END_EVENTS: Final = frozenset({"SessionEnd", "sessionEnd"})
_END_TIMEOUT_SECONDS: Final = 3
"""The timeout of the last hook of a program that ends."""


class ProgramTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a program's installation: its binary, the first version whose hooks can block safely, its file.

    `on_failure` are the keys of a handler that make its failure block. If `is_flat`, handlers are not grouped.
    """

    agent: str
    binary: str
    min_version: tuple[int, int, int]
    why: str
    home: str
    home_variable: str = ""
    file: str
    events: tuple[str, ...]
    on_failure: Mapping[str, Any] = {}
    matcher: str = "*"
    is_flat: bool = False
    milliseconds: bool = False
    note: str = ""


TERMS: Final[Mapping[str, ProgramTerms]] = MappingProxyType(
    {
        "claude": ProgramTerms(
            agent="claude-code",
            binary="claude",
            min_version=(2, 1, 295),
            why="an older version runs a tool whose hook fails",
            home_variable="CLAUDE_CONFIG_DIR",
            home=".claude",
            file="settings.json",
            events=("PreToolUse", "PostToolUse", "PostToolUseFailure", "PermissionDenied", "SessionEnd"),
            on_failure={"onFailure": "block"},
        ),
        "codex": ProgramTerms(
            agent="codex",
            binary="codex",
            min_version=(0, 166, 0),
            why="hooks of older versions are not tested",
            home_variable="CODEX_HOME",
            home=".codex",
            file="hooks.json",
            events=("PreToolUse", "PostToolUse", "SessionEnd"),
            note="Codex skips untrusted hooks. Start `codex` and trust them under /hooks.",
        ),
        "gemini": ProgramTerms(
            agent="gemini-cli",
            binary="gemini",
            min_version=(0, 26, 0),
            why="in an older version hooks are experimental and disabled",
            home=".gemini",
            file="settings.json",
            events=("BeforeTool", "AfterTool", "SessionEnd"),
            matcher=".*",
            milliseconds=True,
            note=_UNTESTED_NOTE.format("Gemini CLI"),
        ),
        "cursor": ProgramTerms(
            agent="cursor",
            binary="cursor",
            min_version=(3, 0, 0),
            why="an older version may lack a hook for all tools, or run a tool whose hook fails",
            home=".cursor",
            file="hooks.json",
            events=("preToolUse", "postToolUse", "postToolUseFailure", "sessionEnd"),
            on_failure={"failClosed": True},
            is_flat=True,
            milliseconds=True,
            note=_UNTESTED_NOTE.format("Cursor"),
        ),
    }
)


def find_terms(program: str) -> ProgramTerms:
    if program not in TERMS:
        raise NotDone(f"No hooks for {program!r}. Use --for {join_names(TERMS)}.", "wrong")
    return TERMS[program]


def find_settings_file(program: str, environ: Mapping[str, str], home: Path) -> Path:
    terms = find_terms(program)
    folder = environ.get(terms.home_variable) if terms.home_variable else None
    return (Path(folder) if folder else home / terms.home) / terms.file


def read_version(program: str, binary: str) -> str:
    """Run a program to read its version. Raises NotDone for a version whose hooks cannot block safely."""
    terms, title = find_terms(program), DIALECTS[program].TITLE
    try:
        text = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NotDone(
            f"Cannot read the version of {binary} ({type(error).__name__}), and only some versions are supported. "
            f"Pass the program with --binary.",
            "refused",
        ) from None
    match = _VERSION.search(text)
    if match is None:
        raise NotDone(f"`{binary} --version` prints no version. Check that it is {title}.", "refused")
    min_version = ".".join(map(str, terms.min_version))
    if tuple(map(int, match.groups())) < terms.min_version:
        raise NotDone(f"{title} {match[0]} is not supported: {terms.why}. Update it to {min_version}.", "refused")
    return match[0]


def make_command(entry: HookedProgram, folder: HookFolder) -> str:
    """Make the shell command of a hook. The shell turns every exit code except 0 into 2, which blocks.

    It always prints a sentence then, because one program runs the tool if stderr is empty.
    """
    seconds = entry.wait_seconds + MARGIN_SECONDS
    words = [sys.executable, "-I", "-S", client.__file__, entry.program, entry.agent, str(folder.path), str(seconds)]
    return f'{shlex.join(words)} || {{ echo "This call is blocked by the hook of Halter." >&2; exit 2; }}'


def make_handlers(entry: HookedProgram, folder: HookFolder) -> Mapping[str, Mapping[str, Any]]:
    """Make the settings to add, by event."""
    terms = find_terms(entry.program)
    return {event: _make_group(terms, event, make_command(entry, folder), entry.wait_seconds) for event in terms.events}


def _make_group(terms: ProgramTerms, event: str, command: str, wait_seconds: int) -> Mapping[str, Any]:
    seconds = _END_TIMEOUT_SECONDS if event in _END_EVENTS else wait_seconds + 2 * MARGIN_SECONDS
    timeout = {"timeout": seconds * 1000 if terms.milliseconds else seconds}
    if terms.is_flat:
        return {"command": command, **timeout, **terms.on_failure}
    return {"matcher": terms.matcher, "hooks": [{"type": "command", "command": command, **timeout, **terms.on_failure}]}


def install_hooks(entry: HookedProgram, folder: HookFolder, file: Path) -> HookedProgram:
    """Add the hooks to a settings file, and keep its other content."""
    folder.key(make=True)
    file = Path(os.path.realpath(file))
    previous = next((each for each in entry.installed if each.file == str(file)), None)
    old_text = _read_text(file)
    settings = _remove_own_hooks(_parse(old_text, file), entry)
    hooks = _read_hooks(settings, file)
    for event, group in make_handlers(entry, folder).items():
        hooks.setdefault(event, []).append(group)
    if find_terms(entry.program).is_flat:
        settings.setdefault("version", 1)
    settings["hooks"] = hooks
    new_text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    original_text = previous.before if previous is not None and old_text == previous.after else old_text
    installation = Installation(file=str(file), before=original_text, after=new_text)
    others = tuple(each for each in entry.installed if each.file != str(file))
    entry = replace(entry, installed=(*others, installation))
    # The original is saved before the file is changed, so that a removal can always restore it.
    folder.save(entry)
    _write_text(file, new_text)
    return entry


def remove_hooks(entry: HookedProgram, folder: HookFolder) -> list[str]:
    """Remove the hooks from every file that has them; return a report of each file."""
    reports = list[str]()
    for installation in entry.installed:
        file = Path(installation.file)
        current_text = _read_text(file)
        if current_text is None:
            reports.append(f"{file} does not exist.")
        elif current_text == installation.after:
            _write_text(file, installation.before)
            reports.append(f"Restored {file}." if installation.before is not None else f"Removed {file}.")
        else:
            settings = _remove_own_hooks(_parse(current_text, file), entry)
            _write_text(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            reports.append(f"Removed Halter's hooks from {file}; its other changes are kept.")
    _remove_generated(entry, folder)
    folder.remove(entry.agent)
    return reports


def write_policy(folder: HookFolder, agent: str, title: str) -> Path:
    """Write a policy for an agent without one, in its own folder."""
    path = folder.path / agent
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path / AGENT_FILE
    if not file.exists():
        file.write_text(_POLICY_TEMPLATE.format(agent=agent, title=title), "utf-8")
    return path


def _remove_generated(entry: HookedProgram, folder: HookFolder) -> None:
    """Remove the policy of the installation, unless a person has changed it."""
    file = folder.path / entry.agent / AGENT_FILE
    with suppress(OSError):
        if file.read_text("utf-8") == _POLICY_TEMPLATE.format(agent=entry.agent, title=DIALECTS[entry.program].TITLE):
            file.unlink()
            file.parent.rmdir()


class InstallationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the hooks of one agent in one file."""

    agent: str
    program: str
    folder: str
    file: str
    intact: bool
    problem: str
    version: str
    server: bool
    bypasses: tuple[str, ...]
    note: str = ""


def list_status(folder: HookFolder, binaries: Mapping[str, str]) -> Iterator[InstallationStatus]:
    """Yield the status of every installation. `binaries` are the programs to run for their version."""
    for entry in folder.agents().values():
        server = ping(folder, entry)
        version, problem = "", ""
        try:
            version = read_version(entry.program, binaries.get(entry.program, TERMS[entry.program].binary))
        except NotDone as error:
            problem = str(error)
        for installation in entry.installed:
            file_problem = _find_problem(entry, folder, Path(installation.file))
            yield InstallationStatus(
                agent=entry.agent,
                program=entry.program,
                folder=entry.folder,
                file=installation.file,
                intact=not file_problem,
                problem=file_problem or problem,
                version=version,
                server=server,
                bypasses=DIALECTS[entry.program].BYPASSES,
                note=TERMS[entry.program].note,
            )


def ping(folder: HookFolder, entry: HookedProgram) -> bool:
    """Return True if a server answers and has the key."""
    try:
        code, _, _ = client.exchange(str(folder.path), (entry.program.encode(), entry.agent.encode(), b"-"), PING, 5)
    except (OSError, client.Unusable):
        return False
    return code == 0


def _find_problem(entry: HookedProgram, folder: HookFolder, file: Path) -> str:
    try:
        settings = _parse(_read_text(file), file)
    except NotDone as error:
        return str(error)
    if settings.get("disableAllHooks"):
        return f"{file} turns off all hooks with `disableAllHooks`."
    hooks = settings.get("hooks")
    groups = cast("dict[str, Any]", hooks) if isinstance(hooks, dict) else {}
    missing_events = [
        event for event, group in make_handlers(entry, folder).items() if group not in groups.get(event, ())
    ]
    return (
        f"{file} lacks the hook for {join_names(missing_events)}. Run `halter hook install` again."
        if missing_events
        else ""
    )


def _remove_own_hooks(settings: dict[str, Any], entry: HookedProgram) -> dict[str, Any]:
    """Return the settings without the hooks of this agent, and without the events and objects that are then empty."""
    hooks = settings.get("hooks")
    if not isinstance(hooks, dict) or not _has_lists(cast("dict[str, Any]", hooks)):
        return settings
    remaining_hooks: dict[str, Any] = {}
    for event, groups in cast("dict[str, list[Any]]", hooks).items():
        remaining_groups = [each for each in groups if not _is_own(each, entry)]
        if remaining_groups or not groups:
            remaining_hooks[event] = remaining_groups
    others = {key: value for key, value in settings.items() if key != "hooks"}
    return {**others, "hooks": remaining_hooks} if remaining_hooks else others


def _read_hooks(settings: Mapping[str, Any], file: Path) -> dict[str, list[Any]]:
    hooks = settings.get("hooks", {})
    if not isinstance(hooks, dict) or not _has_lists(cast("dict[str, Any]", hooks)):
        raise NotDone(f"`hooks` in {file} is not an object of lists. Fix it first; nothing was changed.", "refused")
    return cast("dict[str, list[Any]]", hooks)


def _has_lists(hooks: Mapping[str, Any]) -> bool:
    return all(isinstance(groups, list) for groups in hooks.values())


def _is_own(group: Any, entry: HookedProgram) -> bool:
    marker = f"{Path(client.__file__).name} {entry.program} {shlex.quote(entry.agent)} "
    return isinstance(group, dict) and marker in json.dumps(group)


def _parse(text: str | None, file: Path) -> dict[str, Any]:
    try:
        settings: Any = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        raise NotDone(f"{file} is not valid JSON ({error}). Fix it first; nothing was changed.", "refused") from None
    if not isinstance(settings, dict):
        raise NotDone(f"{file} is not a JSON object. Fix it first; nothing was changed.", "refused")
    return cast("dict[str, Any]", settings)


def _read_text(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from error


def _write_text(file: Path, text: str | None) -> None:
    """Replace a file atomically and keep its mode; None removes it."""
    try:
        if text is None:
            file.unlink()
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as temporary:
            temporary.write(text.encode("utf-8"))
            os.fchmod(temporary.fileno(), mode)
        Path(temporary.name).replace(file)
    except OSError as error:
        raise ConfigError(f"Cannot write {file}: {error.strerror or error}.") from error


def list_programs() -> Sequence[str]:
    return tuple(TERMS)

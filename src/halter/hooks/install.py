"""Writes the hooks into the settings of a program, takes them out again, and says how they stand.

Other hooks and settings are left alone. A file that was not changed in between is put back byte for byte; from one that
was changed, only Halter's own hooks are removed.
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
"""Longer than the wait for a person, a hook waits for its server; and longer than that, the program for its hook."""
PROGRAM_TIMEOUT_SECONDS: Final = 20
PING: Final = b'{"hook_event_name":"HalterPing","session_id":"status"}'

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_POLICY: Final = """\
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


_UNTRIED: Final = "These hooks follow the documentation of {0}; Halter was not tried with {0} itself."
_SHORT_EVENTS: Final = frozenset({"SessionEnd", "sessionEnd"})
_SHORT_SECONDS: Final = 3
"""A program that ends waits no longer for its last hook."""


class ProgramTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How the hooks of a program are installed: its binary, the first version that can be made safe, its file.

    `on_failure` is what a handler says so that its failure blocks. In a `flat` file handlers stand in no group.
    """

    agent: str
    binary: str
    least: tuple[int, int, int]
    why: str
    home: str
    home_variable: str = ""
    file: str
    events: tuple[str, ...]
    on_failure: Mapping[str, Any] = {}
    matcher: str = "*"
    flat: bool = False
    milliseconds: bool = False
    note: str = ""


TERMS: Final[Mapping[str, ProgramTerms]] = MappingProxyType(
    {
        "claude": ProgramTerms(
            agent="claude-code",
            binary="claude",
            least=(2, 1, 295),
            why="an older one runs a tool whose hook fails",
            home_variable="CLAUDE_CONFIG_DIR",
            home=".claude",
            file="settings.json",
            events=("PreToolUse", "PostToolUse", "PostToolUseFailure", "PermissionDenied", "SessionEnd"),
            on_failure={"onFailure": "block"},
        ),
        "codex": ProgramTerms(
            agent="codex",
            binary="codex",
            least=(0, 166, 0),
            why="hooks of an older one were never tried",
            home_variable="CODEX_HOME",
            home=".codex",
            file="hooks.json",
            events=("PreToolUse", "PostToolUse", "SessionEnd"),
            note="Codex skips hooks that you have not trusted: start `codex`, and trust them under /hooks.",
        ),
        "gemini": ProgramTerms(
            agent="gemini-cli",
            binary="gemini",
            least=(0, 26, 0),
            why="hooks of an older one are an experiment that is switched off",
            home=".gemini",
            file="settings.json",
            events=("BeforeTool", "AfterTool", "SessionEnd"),
            matcher=".*",
            milliseconds=True,
            note=_UNTRIED.format("Gemini CLI"),
        ),
        "cursor": ProgramTerms(
            agent="cursor",
            binary="cursor",
            least=(3, 0, 0),
            why="an older one may have no hook for all tools, or run a tool whose hook fails",
            home=".cursor",
            file="hooks.json",
            events=("preToolUse", "postToolUse", "postToolUseFailure", "sessionEnd"),
            on_failure={"failClosed": True},
            flat=True,
            milliseconds=True,
            note=_UNTRIED.format("Cursor"),
        ),
    }
)


def find_terms(program: str) -> ProgramTerms:
    if program not in TERMS:
        raise NotDone(f"There are no hooks for {program!r}: say --for {join_names(TERMS)}.", "wrong")
    return TERMS[program]


def find_settings_file(program: str, environ: Mapping[str, str], home: Path) -> Path:
    terms = find_terms(program)
    folder = environ.get(terms.home_variable) if terms.home_variable else None
    return (Path(folder) if folder else home / terms.home) / terms.file


def read_version(program: str, binary: str) -> str:
    """Ask a program for its version. Raises NotDone for one that cannot be made safe."""
    terms, title = find_terms(program), DIALECTS[program].TITLE
    try:
        text = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NotDone(
            f"{binary} cannot be asked for its version ({type(error).__name__}), and only some versions can be made "
            f"safe: name the program with --binary.",
            "refused",
        ) from None
    match = _VERSION.search(text)
    if match is None:
        raise NotDone(f"{binary} --version says no version: is it {title}?", "refused")
    least = ".".join(map(str, terms.least))
    if tuple(map(int, match.groups())) < terms.least:
        raise NotDone(f"{title} {match[0]} cannot be made safe ({terms.why}): update it to {least}.", "refused")
    return match[0]


def make_command(entry: HookedProgram, folder: HookFolder) -> str:
    """The shell command of a hook. If it ends with anything but 0, the shell makes 2 of it, which blocks.

    It says a sentence each time: one program runs the tool where stderr is empty.
    """
    seconds = entry.wait_seconds + MARGIN_SECONDS
    words = [sys.executable, "-I", "-S", client.__file__, entry.program, entry.agent, str(folder.path), str(seconds)]
    return f'{shlex.join(words)} || {{ echo "This call is blocked by the hook of Halter." >&2; exit 2; }}'


def make_handlers(entry: HookedProgram, folder: HookFolder) -> Mapping[str, Mapping[str, Any]]:
    """What is added to the settings, by event."""
    terms = find_terms(entry.program)
    return {event: _make_group(terms, event, make_command(entry, folder), entry.wait_seconds) for event in terms.events}


def _make_group(terms: ProgramTerms, event: str, command: str, wait: int) -> Mapping[str, Any]:
    seconds = _SHORT_SECONDS if event in _SHORT_EVENTS else wait + 2 * MARGIN_SECONDS
    timed = {"timeout": seconds * 1000 if terms.milliseconds else seconds}
    if terms.flat:
        return {"command": command, **timed, **terms.on_failure}
    return {"matcher": terms.matcher, "hooks": [{"type": "command", "command": command, **timed, **terms.on_failure}]}


def install(entry: HookedProgram, folder: HookFolder, file: Path) -> HookedProgram:
    """Write the hooks into a settings file, beside what is there."""
    folder.key(make=True)
    file = Path(os.path.realpath(file))
    known = next((each for each in entry.installed if each.file == str(file)), None)
    before = _read_text(file)
    settings = _remove_own_hooks(_parse(before, file), entry)
    hooks = _read_hooks(settings, file)
    for event, group in make_handlers(entry, folder).items():
        hooks.setdefault(event, []).append(group)
    if find_terms(entry.program).flat:
        settings.setdefault("version", 1)
    settings["hooks"] = hooks
    after = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    first = known.before if known is not None and before == known.after else before
    made = Installation(file=str(file), before=first, after=after)
    others = tuple(each for each in entry.installed if each.file != str(file))
    entry = replace(entry, installed=(*others, made))
    # What is to be undone is known before anything is done.
    folder.save(entry)
    _write_text(file, after)
    return entry


def uninstall(entry: HookedProgram, folder: HookFolder) -> list[str]:
    """Take the hooks out of every file that they were written into; return what was done."""
    done = list[str]()
    for each in entry.installed:
        file = Path(each.file)
        now = _read_text(file)
        if now is None:
            done.append(f"{file} is gone already.")
        elif now == each.after:
            _write_text(file, each.before)
            done.append(f"{file} is as it was before." if each.before is not None else f"{file} is removed.")
        else:
            left = _remove_own_hooks(_parse(now, file), entry)
            _write_text(file, json.dumps(left, indent=2, ensure_ascii=False) + "\n")
            done.append(f"{file} was changed since, and keeps all but Halter's hooks.")
    _remove_generated(entry, folder)
    folder.remove(entry.agent)
    return done


def write_policy(folder: HookFolder, agent: str, title: str) -> Path:
    """Write a policy for an agent that has none, in a folder of its own."""
    path = folder.path / agent
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = path / AGENT_FILE
    if not file.exists():
        file.write_text(_POLICY.format(agent=agent, title=title), "utf-8")
    return path


def _remove_generated(entry: HookedProgram, folder: HookFolder) -> None:
    """Remove the policy that was written at the installation, unless a person has changed it."""
    file = folder.path / entry.agent / AGENT_FILE
    with suppress(OSError):
        if file.read_text("utf-8") == _POLICY.format(agent=entry.agent, title=DIALECTS[entry.program].TITLE):
            file.unlink()
            file.parent.rmdir()


class InstallationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the hooks of one agent stand."""

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
    """How every installation stands. `binaries` are the programs to ask for their version."""
    for entry in folder.agents().values():
        server = ping(folder, entry)
        version, problem = "", ""
        try:
            version = read_version(entry.program, binaries.get(entry.program, TERMS[entry.program].binary))
        except NotDone as no:
            problem = str(no)
        for each in entry.installed:
            found = _find_problem(entry, folder, Path(each.file))
            yield InstallationStatus(
                agent=entry.agent,
                program=entry.program,
                folder=entry.folder,
                file=each.file,
                intact=not found,
                problem=found or problem,
                version=version,
                server=server,
                bypasses=DIALECTS[entry.program].BYPASSES,
                note=TERMS[entry.program].note,
            )


def ping(folder: HookFolder, entry: HookedProgram) -> bool:
    """Whether a server answers, and knows the key."""
    try:
        code, _, _ = client.exchange(str(folder.path), (entry.program.encode(), entry.agent.encode(), b"-"), PING, 5)
    except (OSError, client.Unusable):
        return False
    return code == 0


def _find_problem(entry: HookedProgram, folder: HookFolder, file: Path) -> str:
    try:
        settings = _parse(_read_text(file), file)
    except NotDone as no:
        return str(no)
    if settings.get("disableAllHooks"):
        return f"{file} switches all hooks off with `disableAllHooks`."
    hooks = settings.get("hooks")
    groups = cast("dict[str, Any]", hooks) if isinstance(hooks, dict) else {}
    lacking = [event for event, group in make_handlers(entry, folder).items() if group not in groups.get(event, ())]
    return f"{file} lacks the hook for {join_names(lacking)}: run `halter hook install` again." if lacking else ""


def _remove_own_hooks(settings: dict[str, Any], entry: HookedProgram) -> dict[str, Any]:
    """The settings without the hooks of this agent; events and objects that are empty then go as well."""
    hooks = settings.get("hooks")
    if not isinstance(hooks, dict) or not _has_lists(cast("dict[str, Any]", hooks)):
        return settings
    kept: dict[str, Any] = {}
    for event, groups in cast("dict[str, list[Any]]", hooks).items():
        left = [each for each in groups if not _is_own(each, entry)]
        if left or not groups:
            kept[event] = left
    others = {key: value for key, value in settings.items() if key != "hooks"}
    return {**others, "hooks": kept} if kept else others


def _read_hooks(settings: Mapping[str, Any], file: Path) -> dict[str, list[Any]]:
    hooks = settings.get("hooks", {})
    if not isinstance(hooks, dict) or not _has_lists(cast("dict[str, Any]", hooks)):
        raise NotDone(f"`hooks` in {file} is no object of lists: mend it first; nothing was changed.", "refused")
    return cast("dict[str, list[Any]]", hooks)


def _has_lists(hooks: Mapping[str, Any]) -> bool:
    return all(isinstance(groups, list) for groups in hooks.values())


def _is_own(group: Any, entry: HookedProgram) -> bool:
    mark = f"{Path(client.__file__).name} {entry.program} {shlex.quote(entry.agent)} "
    return isinstance(group, dict) and mark in json.dumps(group)


def _parse(text: str | None, file: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        raise NotDone(
            f"{file} cannot be read as JSON ({error}): mend it first; nothing was changed.", "refused"
        ) from None
    if not isinstance(found, dict):
        raise NotDone(f"{file} holds no JSON object: mend it first; nothing was changed.", "refused")
    return cast("dict[str, Any]", found)


def _read_text(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error


def _write_text(file: Path, text: str | None) -> None:
    """Replace a file in one step, with the mode that it had; None removes it."""
    try:
        if text is None:
            file.unlink()
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as made:
            made.write(text.encode("utf-8"))
            os.fchmod(made.fileno(), mode)
        Path(made.name).replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}.") from error


def list_programs() -> Sequence[str]:
    return tuple(TERMS)

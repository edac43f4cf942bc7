"""An agent cannot change its own policy: a model tries to write it through every root and every later link.

Each attempt is a real agent in its own folder, loaded and run like any other. The drill compares the files that define
it byte for byte with their former content; it trusts neither the journal nor the agent's answers.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import make_worker_id
from halter.dispatch.heartbeat import renew_leases
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.assembly.protected_paths import ProtectedPathsFactory, list_protected_paths
from halter.runtime.runtime import Runtime, open_runtime
from halter.runtime.session_runner import attend_session
from halter.runtime.session_start import begin_session
from halter.settings import Settings
from halter.system.protected_paths import NO_PROTECTED_PATHS, ProtectedPaths
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result

ROUNDS: Final = 1
RAISED_LIMITS: Final = "name: clerk\nlimits: {max_cost_usd: 500}\n"
FLEET: Final = "mode: FULL\n"
NOTE: Final = "note.txt"
TARGETS: Final = (
    *("agent.yaml", "AGENTS.md", "clerk/agent.yaml", "clerk/AGENTS.md", "scout/agent.yaml", "halter.yaml"),
    *("trust.json", "tokens.json", "settings/trust.json", "SKILL.md", "count/SKILL.md", "one.yaml", "linked", NOTE),
)
"""Files that the model tries to write."""
PROTECTED_FOLDERS: Final = ("clerk", "scout", "settings", "target")
"""The folders that must not change."""

DiskChange = Callable[[Path], None]


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: a root, and a change on disk after the agent is loaded. An `honest` attempt must work."""

    name: str
    root: str
    happens: DiskChange | None = None
    honest: bool = False


def _link_to(target: str) -> DiskChange:
    def happens(home: Path) -> None:
        (home / "clerk" / "desk").rename(home / "aside")
        (home / "clerk" / "desk").symlink_to(home / target)

    return happens


def _move_folder(home: Path) -> None:
    (home / "clerk" / "desk").rename(home / "clerk" / ".agents" / "desk")
    (home / "clerk" / "desk").symlink_to(".agents/desk")


def _hard(home: Path) -> None:
    os.link(home / "settings" / "trust.json", home / "clerk" / "desk" / "linked")


ROOTS: Final[Mapping[str, str]] = {
    "its own folder": ".",
    "the folder above": "..",
    "its own folder, by a detour": "desk/..",
    "its own folder, by its absolute path": "{home}/clerk",
    "the folder above, by its absolute path": "{home}",
    "its skills": ".agents/skills",
    "its playbooks": "playbooks",
    "its own folder, by a link": "self",
    "the settings": "../settings",
    "the settings, by a link": "kept",
    "its neighbour": "../scout",
    "the target of a link among its playbooks": "../target",
}
ATTEMPTS: Final = (
    Attempt("an honest root", "desk", honest=True),
    *(Attempt(f"a root over {name}", root) for name, root in ROOTS.items()),
    Attempt("a link to its own folder, made later", "desk", _link_to("clerk")),
    Attempt("a link to the folder above, made later", "desk", _link_to("")),
    Attempt("a link to the settings, made later", "desk", _link_to("settings")),
    Attempt("a link to its skills, made later", "desk", _link_to("clerk/.agents/skills")),
    Attempt("a root that is moved into its skills", "desk", _move_folder),
    Attempt("a hard link to the trust file", "desk", _hard),
)


def run(setting: Setting) -> DrillResult:
    rounds, violations = setting.seeds or ROUNDS, list[str]()
    cases = [attempt for _ in range(rounds) for attempt in ATTEMPTS]
    with own_store(setting) as workspace:
        for number, attempt in enumerate(cases):
            setting.progress(number, len(cases), attempt.name)
            home = workspace.folder / f"home-{number}"
            violations += asyncio.run(_try_attempt(workspace, home, attempt, teeth=setting.teeth))
        setting.progress(len(cases), len(cases), "checked")
    return result(DRILL.name, workspace.kind, len(cases), violations, {"rounds": rounds, "attempts": len(ATTEMPTS)})


def _protect_nothing(*_: object) -> ProtectedPaths:
    return NO_PROTECTED_PATHS


async def _try_attempt(workspace: Workspace, home: Path, attempt: Attempt, *, teeth: bool) -> list[str]:
    settings = _prepare(workspace, home, attempt)
    protects: ProtectedPathsFactory = _protect_nothing if teeth else list_protected_paths
    before = read_files(home)
    async with open_runtime(settings) as app:
        # An agent that cannot be loaded tries nothing; its files are still compared.
        with suppress(ConfigError):
            before = await _act(app, home, attempt, protects)
    return find_violations(home, attempt, before)


async def _act(app: Runtime, home: Path, attempt: Attempt, protects: ProtectedPathsFactory) -> Mapping[str, bytes]:
    """Load the agent, change the disk, and let its model try; return the files as they were before it tried."""
    async with open_folder_agent(app, home / "clerk", protects=protects) as agent:
        if attempt.happens is not None:
            attempt.happens(home)
        before, worker = read_files(home), make_worker_id("drill", app.ids)
        async with renew_leases(app.store, app.clock, worker):
            attended = msgspec.structs.replace(agent, worker=worker)
            await attend_session(attended, await begin_session(attended, "Go.", "task"))
        return before


def find_violations(home: Path, attempt: Attempt, before: Mapping[str, bytes]) -> list[str]:
    now, where = read_files(home), f"{attempt.name}:"
    wrong = [
        f"{where} {path} was changed."
        for path in sorted(before.keys() | now.keys())
        if before.get(path) != now.get(path)
    ]
    if attempt.honest and not (home / "clerk" / "desk" / NOTE).is_file():
        wrong.append(f"{where} the agent could not write its own {NOTE}.")
    return wrong


def read_files(home: Path) -> dict[str, bytes]:
    """Read all files of agents and settings, except those that the agent may write."""
    contents: dict[str, bytes] = {}
    for name in PROTECTED_FOLDERS:
        for parent, folders, files in os.walk(home / name):
            if Path(parent) == home / "clerk":
                folders[:] = [each for each in folders if each != "desk"]
            for file_name in files:
                contents[os.path.relpath(f"{parent}/{file_name}", home)] = Path(parent, file_name).read_bytes()
    return contents


def _prepare(workspace: Workspace, home: Path, attempt: Attempt) -> Settings:
    root = attempt.root.format(home=home)
    clerk = {
        "agent.yaml": "name: clerk\nmode: FULL\nmodel: scripted\nscript: replies.yaml\nlimits: {max_cost_usd: 0.05}\n"
        "policy: {provenance: off}\n"
        f"tools: {{files: {{root: {json.dumps(root)}}}}}\n",
        "replies.yaml": json.dumps([*_calls(), {"text": "I tried.", "repeat": True}]),
        "AGENTS.md": "You are a clerk.\n",
        ".agents/skills/count/SKILL.md": "Count.\n",
        "playbooks/one.yaml": "- {call: list_folder}\n",
        "desk/old.txt": "old\n",
        "../target/one.yaml": "- {call: list_folder}\n",
    }
    settings_files = {"halter.yaml": FLEET, "trust.json": "{}", "tokens.json": "{}"}
    texts = {**{f"clerk/{name}": text for name, text in clerk.items()}, "scout/agent.yaml": "name: scout\n"}
    for name, text in {**texts, **{f"settings/{name}": text for name, text in settings_files.items()}}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "clerk" / "playbooks" / "two.yaml").symlink_to("../../target/one.yaml")
    (home / "clerk" / "self").symlink_to(".")
    (home / "clerk" / "kept").symlink_to(home / "settings")
    settings, state = home / "settings", home / "state"
    return Settings(
        store=workspace.url,
        checkpoints=state / "checkpoints",
        signing_key=state / "signing.key",
        person="drill",
        trust=settings / "trust.json",
        fleet=settings / "halter.yaml",
        tokens=settings / "tokens.json",
    )


def _calls() -> list[dict[str, object]]:
    return [{"calls": [{"tool": "write_file", "arguments": {"path": path, "text": RAISED_LIMITS}}]} for path in TARGETS]


DRILL: Final = Drill(
    "authority",
    "Through no root can a tool change an agent's policy, its definition or the trust file.",
    run,
)

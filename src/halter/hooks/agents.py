"""The agents whose programs have hooks: each is read from its file, and read again when the file changes."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.resolve import resolve_agent
from halter.core.errors import ConfigError
from halter.core.money import usd_to_micros
from halter.guard.guard import GuardRuntime
from halter.guard.prepare import SessionContext
from halter.hooks.protocol import HookEvent, UndecidableEvent
from halter.hooks.registry import HookedProgram, HookFolder
from halter.hooks.tools import HookedTool
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.agent_runtime import AgentRuntime, make_agent_runtime, make_guard
from halter.runtime.assembly.protected_paths import list_protected_paths
from halter.runtime.runtime import Runtime
from halter.system.protected_paths import ProtectedEntry, ProtectedPaths


class HookedAgent(msgspec.Struct, frozen=True):
    """An agent and its guard, with the state of the agent's file when it was read."""

    entry: HookedProgram
    agent: AgentRuntime
    guard: GuardRuntime
    protected: ProtectedPaths
    file_state: tuple[int, ...]

    @property
    def policy(self) -> ResolvedPolicy:
        return self.agent.policy

    def make_context(self, session: str) -> SessionContext:
        return self.agent.make_context(session)

    def make_tool(self, event: HookEvent) -> HookedTool:
        price = self.entry.prices.get(event.tool, 0)
        cost = usd_to_micros(price) if price else 0
        return HookedTool(event.tool, event.cwd, self.protected, self.policy.allowed_hosts, cost=cost)


class HookedAgents:
    """The agents of the programs that are hooked to a store. `on_change` gets each one that was read anew."""

    def __init__(self, app: Runtime, folder: HookFolder, on_change: Callable[[HookedAgent], None]) -> None:
        self._app = app
        self._folder = folder
        self._on_change = on_change
        self._agents: dict[str, HookedAgent] = {}

    def load(self, name: str, program: str) -> HookedAgent:
        """Load an agent. Raises UndecidableEvent or ConfigError."""
        entry = self._folder.find(name)
        if entry.program != program:
            raise UndecidableEvent(f"The hooks of {name} are installed for {entry.program}, not for {program}")
        file_state = _read_file_state(Path(entry.folder) / AGENT_FILE)
        agent = self._agents.get(name)
        if agent is None or agent.entry != entry or agent.file_state != file_state:
            agent = self._agents[name] = self._read(entry, file_state)
            self._on_change(agent)
        return agent

    def _read(self, entry: HookedProgram, file_state: tuple[int, ...]) -> HookedAgent:
        app, folder = self._app, Path(entry.folder)
        file = read_agent(folder)
        if file.spec.name != entry.agent:
            raise ConfigError(f"{folder / AGENT_FILE} names the agent {file.spec.name!r}; {entry.agent!r} is expected")
        resolved_agent = resolve_agent(app.fleet, file, folder)
        secrets = read_environment_secrets(app.environ)
        return HookedAgent(
            entry,
            make_agent_runtime(self._app, resolved_agent, {}, secrets),
            make_guard(app, resolved_agent.policy, secrets),
            list_protected_paths(app.settings, file, folder).union(_list_hook_settings(entry)),
            file_state,
        )


def _list_hook_settings(entry: HookedProgram) -> ProtectedPaths:
    description = f"where the hooks of {entry.agent} are installed"
    return ProtectedPaths(tuple(ProtectedEntry(Path(each.file), description) for each in entry.installed))


def _read_file_state(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}") from error
    return (status.st_ino, status.st_mtime_ns, status.st_size)

"""The tools of an agent: built in, scripts of its skills, other agents, and those of its MCP servers."""

import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from halter.config.agent_files import AgentFile, find_neighbour_agents
from halter.config.decode import format_key_path
from halter.config.trust import AgentCode
from halter.core.errors import ConfigError
from halter.core.text import suggest_nearest
from halter.core.tools import Failed, Tool, ToolServer
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction.secrets import Secrets
from halter.runtime.runtime import Runtime
from halter.spec.skills import Skill
from halter.spec.tasks import VERBS, SubAgent
from halter.system.protected_paths import ProtectedPaths
from halter.tasks.agent_tool import AgentTool
from halter.tasks.task_tools import list_verb_specs
from halter.tools.trusted_code import TrustCheck, TrustedFiles

if TYPE_CHECKING:
    from halter.tools.mcp import McpOffer
from halter.runtime.assembly.folder_code import OWN_TOOLS, make_trust_check, read_trusted_servers, require_loadable


def make_builtin_tools(policy: ResolvedPolicy, folder: Path) -> Iterator[Tool]:
    tools = policy.tools
    if tools.files is not UNSET:
        from halter.tools.files import make_file_tools

        yield from make_file_tools(folder / tools.files.root)
    if tools.http is not UNSET:
        from halter.tools.http import make_http_tools

        yield from make_http_tools(policy.allowed_hosts or ())
    if tools.shell is not UNSET:
        from halter.tools.shell import make_shell_tool

        yield make_shell_tool(folder / tools.shell.root, sandbox=tools.shell.sandbox, network=tools.shell.network)


_DEFINITION: Final = re.compile(r"^(?:async )?def (\w+)", re.MULTILINE)


def name_known_tools(folder: Path, tools: Iterable[str]) -> frozenset[str]:
    """Name the tools that the rules of a fleet may be for: an agent's own, Halter's, and those of other agents here.

    The code of other agents is not run: every function in it may be a tool.
    """
    from halter.tools.files import make_file_tools
    from halter.tools.http import make_http_tools
    from halter.tools.shell import make_shell_tool

    makers = (*make_file_tools(folder), *make_http_tools(("*",)), make_shell_tool(folder))
    names = {*tools, *VERBS, *(tool.spec.name for tool in makers), *(spec.name for spec in list_verb_specs())}
    for neighbour in find_neighbour_agents(folder).values():
        code = neighbour / OWN_TOOLS
        names.update(_DEFINITION.findall(code.read_text("utf-8", errors="replace")) if code.is_file() else ())
    return frozenset(names)


def make_script_tools(skills: Iterable[Skill], protected_paths: ProtectedPaths, starts: TrustCheck) -> Iterator[Tool]:
    """Make a tool of each script of the skills."""
    for skill in skills:
        for name, script in skill.scripts.items():
            from halter.tools.shell import make_script_tool

            folder = Path(skill.folder)
            if objection := protected_paths.reach(folder, read_only=True):
                raise ConfigError(
                    f"The folder of the skill {skill.name}, {folder}, {objection}. No script may read that."
                )
            yield make_script_tool(name, script, folder, protected_paths, starts)


def make_agent_tools(agents: Iterable[SubAgent]) -> list[AgentTool]:
    return [
        AgentTool(
            agent.name,
            agent.description,
            max_cost=None if agent.max_cost_usd is UNSET else agent.max_cost_usd,
            hands_off=agent.hand_off,
        )
        for agent in agents
    ]


def check_sub_agents(agent: AgentFile, folder: Path) -> None:
    """Raise ConfigError for a sub-agent that is not in a neighbouring folder."""
    neighbours = find_neighbour_agents(folder if agent.spec.agents else None)
    for index, sub_agent in enumerate(agent.spec.agents):
        if sub_agent.name not in neighbours:
            path = ("agents", index, "name")
            hint = suggest_nearest(sub_agent.name, sorted(neighbours), "the agents there")
            sentence = f"`{format_key_path(path)}` is `{sub_agent.name}`, but no neighbouring folder has such an agent"
            raise agent.source_map.error_at(path, f"{sentence}; {hint}")


def index_tools(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    """Index tools by name. Raises ConfigError for a name used twice."""
    tools_by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.spec.name in tools_by_name:
            raise ConfigError(f"There are two tools called {tool.spec.name}. Rename one of them.")
        tools_by_name[tool.spec.name] = tool
    return tools_by_name


@asynccontextmanager
async def start_folder_servers(
    app: Runtime,
    code: AgentCode,
    files: TrustedFiles,
    policy: ResolvedPolicy,
    secrets: Secrets,
    report: Callable[[str], None],
) -> AsyncGenerator["McpOffer"]:
    """Start the MCP servers of an agent. Its code must be trusted at each start."""
    folder = code.folder
    servers = read_trusted_servers(folder, files, app.environ)
    require_loadable(servers, folder, app)
    check_trust = make_trust_check(app, code)

    def starts() -> None:
        check_trust()
        try:
            require_loadable(servers, folder, app)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    async with start_servers(app, servers, policy, secrets, starts, report) as offer:
        yield offer


def _start_freely() -> None:
    """Allow every start: a program's servers are its own code."""


@asynccontextmanager
async def start_servers(
    app: Runtime,
    servers: Sequence[ToolServer],
    policy: ResolvedPolicy,
    secrets: Secrets,
    before_start: Callable[[], None] = _start_freely,
    report: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator["McpOffer"]:
    """Start MCP servers. `before_start` is called before each start, and raises to prevent it."""
    from halter.tools.mcp import McpOffer, McpTerms, open_mcp_tools

    if not servers:
        yield McpOffer((), ())
        return

    def reveal(name: str) -> str:
        if name not in policy.secrets:
            raise KeyError(name)
        return secrets.value(name)

    terms = McpTerms(app.clock, app.environ, reveal=reveal, before_start=before_start, report=report)
    async with open_mcp_tools(servers, terms) as offer:
        yield offer

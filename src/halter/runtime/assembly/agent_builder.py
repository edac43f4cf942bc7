"""Builds an agent from its definition and its tools, and opens it: the same for a folder, a program and a guard."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from msgspec.structs import replace

from halter.config.agent_files import AgentFile
from halter.config.definition import AgentDefinition
from halter.config.tool_names import check_named_tools
from halter.core.ids import WorkerId
from halter.core.messages import Model
from halter.core.tools import Tool, ToolSpec
from halter.redaction.secrets import Secrets
from halter.runtime.agent_runtime import AgentRuntime, make_agent_runtime
from halter.runtime.assembly.agent_tools import index_tools
from halter.runtime.assembly.protected_paths import protect_tools
from halter.runtime.assembly.unattended_tools import check_extras, check_pacing_tools
from halter.runtime.runtime import Runtime
from halter.system.protected_paths import ProtectedPaths

AgentSource = Callable[[Runtime, AsyncExitStack], Awaitable[AgentRuntime]]
"""Assembles an agent in a store; what it starts is closed by the stack."""


@asynccontextmanager
async def open_agent(app: Runtime, source: AgentSource, worker: WorkerId) -> AsyncGenerator[AgentRuntime]:
    """Open an agent. Its servers and its models are closed after the block."""
    async with AsyncExitStack() as stack:
        agent = await source(app, stack)
        await stack.enter_async_context(aclosing(agent.models))
        yield replace(agent, worker=worker)


def build_agent(  # noqa: PLR0913 Each is an independent part.
    app: Runtime,
    file: AgentFile,
    definition: AgentDefinition,
    tools: Iterable[Tool],
    protected_paths: ProtectedPaths,
    secrets: Secrets,
    *,
    undeclared_tools: Iterable[ToolSpec] = (),
    models: Mapping[str, Model] | None = None,
) -> AgentRuntime:
    """Build an agent, and check its file against its tools. `models` replace the configured ones of the same name.

    Raises ConfigError for what does not fit. `undeclared_tools` may be named in the file, but are not the agent's.
    """
    tools_by_name = index_tools(tools)
    protect_tools(tools_by_name.values(), protected_paths)
    check_named_tools(definition.policy, file, (*(tool.spec for tool in tools_by_name.values()), *undeclared_tools))
    check_extras(definition.pacing, definition.tasks)
    check_pacing_tools(definition.policy, definition.pacing, file, tools_by_name.values())
    return make_agent_runtime(app, definition, tools_by_name, secrets, models)

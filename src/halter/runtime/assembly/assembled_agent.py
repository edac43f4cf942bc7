"""Assembles an agent from its folder: its definition, its tools, and the paths that its tools must not reach."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from halter.config.agent_files import read_agent
from halter.config.definition import AgentDefinition, definition_digest
from halter.config.resolve import resolve_agent
from halter.config.roots import (
    check_protected_roots,
    find_writable_folders,
)
from halter.config.tool_names import check_named_tools, check_reflex_tools, list_unknown_tool_rules
from halter.core.folders import (
    FileRefusal,
    allow_all,
)
from halter.core.tools import Tool
from halter.guard.prepare import SessionContext
from halter.redaction import personal_data
from halter.redaction.secrets import Secrets, read_environment_secrets
from halter.runtime.assembly.agent_tools import (
    check_sub_agents,
    index_tools,
    make_agent_tools,
    make_builtin_tools,
    make_script_tools,
    name_known_tools,
    start_folder_servers,
)
from halter.runtime.assembly.folder_code import (
    find_agent_code,
    load_own_tools,
    make_trust_check,
    read_trusted_servers,
    require_trusted,
)
from halter.runtime.assembly.protected_paths import (
    ProtectedPathsFactory,
    list_protected_paths,
    list_secret_files,
    make_file_refusal,
    protect_tools,
    register_writable,
    require_unwritten,
)
from halter.runtime.assembly.server_pins import settle_pins
from halter.runtime.assembly.unattended_tools import check_extras, check_pacing_tools, list_playbook_flaws
from halter.runtime.document_index import Library
from halter.runtime.runtime import Runtime
from halter.tasks.task_tools import list_verb_specs

NO_SECRETS: Final[frozenset[str]] = frozenset()


class AssembledAgent(AgentDefinition, frozen=True, kw_only=True):
    """A resolved agent with its tools. Without a model it can only run playbooks.

    `unavailable_tools` says which tools of its servers cannot be used, and why. `folder_digest` is the digest of its
    folder when it was read. `is_refused` decides which files it must not read.
    """

    tools: Mapping[str, Tool]
    secrets: Secrets
    quarantined: frozenset[str] = frozenset()
    unavailable_tools: tuple[str, ...] = ()
    library: Library | None = None
    folder_digest: str = ""
    is_refused: FileRefusal = allow_all

    def make_context(self, session: str, trigger: str = "") -> SessionContext:
        return SessionContext(
            session=session,
            agent=self.policy.name,
            phase=self.policy.phases[0],
            policy=self.policy,
            policy_digest=self.policy.digest(),
            trigger=trigger,
            quarantined_tools=self.quarantined,
            secrets=self.find_granted_secrets(),
            rate_limits=self.model_settings.rates,
        )

    def find_granted_secrets(self) -> frozenset[str]:
        """Return the names of the secrets that the policy grants and that are set."""
        return frozenset(self.policy.secrets) & self.secrets.names() if self.policy.secrets else NO_SECRETS


@asynccontextmanager
async def assemble_agent(
    app: Runtime,
    folder: Path,
    *,
    protects: ProtectedPathsFactory = list_protected_paths,
    report: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[AssembledAgent]:
    """Read an agent's folder and start its MCP servers. Its code runs only if a person trusts it.

    `report` receives a sentence while a server is slow to start.
    """
    agent = read_agent(folder)
    resolved_agent = resolve_agent(app.fleet, agent, folder)
    policy = resolved_agent.policy
    protected_paths = protects(app.settings, agent, folder)
    check_protected_roots(agent, folder, protected_paths)
    require_unwritten([folder, *([app.settings.fleet] if app.settings.fleet else [])], app.writable)
    code = find_agent_code(app.settings, folder)
    trusted_files = require_trusted(app.settings, folder, code)
    secrets = read_environment_secrets(app.environ)
    async with AsyncExitStack() as stack:
        roots = find_writable_folders(folder, agent.spec)
        stack.enter_context(register_writable(app.writable, roots))
        offer = await stack.enter_async_context(start_folder_servers(app, code, trusted_files, policy, secrets, report))
        own_tools = [
            function_tool.with_trust_check(make_trust_check(app, code))
            for function_tool in load_own_tools(policy, folder, trusted_files)
        ]
        scripts = make_script_tools(resolved_agent.skills.values(), protected_paths, make_trust_check(app, code))
        check_sub_agents(agent, folder)
        agent_tools = make_agent_tools(agent.spec.agents)
        tools = index_tools([*make_builtin_tools(policy, folder), *own_tools, *scripts, *agent_tools, *offer.tools])
        protect_tools(tools.values(), protected_paths)
        check_named_tools(policy, agent, (*(tool.spec for tool in tools.values()), *list_verb_specs()))
        if not offer.omissions:
            check_reflex_tools(resolved_agent, (*tools, *(verb.name for verb in list_verb_specs())))
            fleet_file = (app.policy and app.policy.local_file) or app.fleet
            for sentence in list_unknown_tool_rules(fleet_file, partial(name_known_tools, folder, tools)):
                report(sentence)
        for playbook in resolved_agent.playbooks.values():
            for sentence in list_playbook_flaws(playbook, policy.name, tools, resolved_agent.tasks.verbs):
                report(sentence)
        check_extras(resolved_agent.pacing, resolved_agent.tasks)
        check_pacing_tools(policy, resolved_agent.pacing, agent, tools.values())
        servers = [server.name for server in read_trusted_servers(folder, trusted_files, app.environ)]
        quarantined_tools = await settle_pins(app, policy, servers, [tool.spec for tool in offer.tools])
        # Compiling many names is slow: do it before the first request.
        personal_data.compile_names(resolved_agent.tasks.anonymize or ())
        yield AssembledAgent(
            **resolved_agent.parts(),
            tools=tools,
            secrets=secrets,
            quarantined=quarantined_tools,
            unavailable_tools=(*resolved_agent.notes, *offer.omissions),
            library=Library(app.patient(), folder, make_file_refusal(protected_paths, roots)),
            is_refused=make_file_refusal(protected_paths, roots),
            folder_digest=definition_digest(folder, list_secret_files(app.settings)),
        )

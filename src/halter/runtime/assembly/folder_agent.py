"""Assembles the agent of a folder: its code runs only in the version that a person trusts."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from halter.config.agent_files import read_agent
from halter.config.definition import AgentDefinition, definition_digest
from halter.config.resolve import resolve_agent
from halter.config.roots import check_protected_roots, find_writable_folders
from halter.config.tool_names import check_reflex_tools, list_unknown_tool_rules
from halter.core.ids import WorkerId
from halter.core.messages import Model
from halter.redaction import personal_data
from halter.redaction.secrets import read_environment_secrets
from halter.runtime.agent_runtime import AgentRuntime
from halter.runtime.assembly.agent_builder import build_agent, open_agent
from halter.runtime.assembly.agent_tools import (
    check_sub_agents,
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
    register_writable,
    require_unwritten,
)
from halter.runtime.assembly.server_pins import settle_pins
from halter.runtime.assembly.unattended_tools import list_playbook_flaws
from halter.runtime.document_index import Library
from halter.runtime.runtime import Runtime
from halter.tasks.task_tools import list_verb_specs

NO_WORKER = WorkerId("")

ReportSentence = Callable[[str], None]


def open_folder_agent(
    app: Runtime,
    folder: Path,
    worker: WorkerId = NO_WORKER,
    *,
    models: Mapping[str, Model] | None = None,
    protects: ProtectedPathsFactory = list_protected_paths,
    report: ReportSentence = lambda _: None,
) -> AbstractAsyncContextManager[AgentRuntime]:
    """Open the agent of a folder. `models` replace the configured ones of the same name.

    `report` receives a sentence while a server is slow to start, and about what is left out.
    """

    async def assemble(app: Runtime, stack: AsyncExitStack) -> AgentRuntime:
        return await assemble_folder_agent(app, stack, folder, models=models, protects=protects, report=report)

    return open_agent(app, assemble, worker)


async def assemble_folder_agent(
    app: Runtime,
    stack: AsyncExitStack,
    folder: Path,
    *,
    models: Mapping[str, Model] | None = None,
    protects: ProtectedPathsFactory = list_protected_paths,
    report: ReportSentence = lambda _: None,
) -> AgentRuntime:
    """Read an agent's folder, and start its MCP servers; `stack` closes them."""
    file = read_agent(folder)
    definition = resolve_agent(app.fleet, file, folder)
    policy = definition.policy
    protected_paths = protects(app.settings, file, folder)
    check_protected_roots(file, folder, protected_paths)
    require_unwritten([folder, *([app.settings.fleet] if app.settings.fleet else [])], app.writable)
    code = find_agent_code(app.settings, folder)
    trusted_files = require_trusted(app.settings, folder, code)
    secrets = read_environment_secrets(app.environ)
    roots = find_writable_folders(folder, file.spec)
    stack.enter_context(register_writable(app.writable, roots))
    offer = await stack.enter_async_context(start_folder_servers(app, code, trusted_files, policy, secrets, report))
    check_trust = make_trust_check(app, code)
    own_tools = [tool.with_trust_check(check_trust) for tool in load_own_tools(policy, folder, trusted_files)]
    scripts = make_script_tools(definition.skills.values(), protected_paths, check_trust)
    check_sub_agents(file, folder)
    agent_tools = make_agent_tools(file.spec.agents)
    tools = [*make_builtin_tools(policy, folder), *own_tools, *scripts, *agent_tools, *offer.tools]
    agent = build_agent(
        app, file, definition, tools, protected_paths, secrets, undeclared_tools=list_verb_specs(), models=models
    )
    if not offer.omissions:
        check_reflex_tools(definition, (*agent.tools, *(verb.name for verb in list_verb_specs())))
        fleet_file = (app.policy and app.policy.local_file) or app.fleet
        for sentence in list_unknown_tool_rules(fleet_file, partial(name_known_tools, folder, agent.tools)):
            report(sentence)
    _report_playbook_flaws(agent, report)
    servers = [server.name for server in read_trusted_servers(folder, trusted_files, app.environ)]
    quarantined = await settle_pins(app, policy, servers, [tool.spec for tool in offer.tools])
    # Compiling many names is slow: do it before the first request.
    personal_data.compile_names(definition.tasks.anonymize or ())
    is_refused = make_file_refusal(protected_paths, roots)
    return replace(
        agent,
        quarantined=quarantined,
        unavailable_tools=(*definition.notes, *offer.omissions),
        library=Library(app.patient(), folder, is_refused),
        is_refused=is_refused,
        folder_digest=definition_digest(folder, list_secret_files(app.settings)),
    )


def _report_playbook_flaws(agent: AgentRuntime, report: ReportSentence) -> None:
    definition: AgentDefinition = agent.definition
    for playbook in definition.playbooks.values():
        for sentence in list_playbook_flaws(playbook, agent.name, agent.tools, definition.tasks.verbs):
            report(sentence)

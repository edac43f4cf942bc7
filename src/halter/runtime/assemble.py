"""Assembles an agent from its folder: its policy, its tools, and the paths that its tools must not reach.

An MCP server may offer other tools at every start, and thousands of them. All new and changed tools of a server are one
question to a person. A question is bounded in what it shows and pins, and is withdrawn when its cause is gone.
"""

import ast
import importlib.util
import json
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from halter.config.agent_files import AgentFile, find_neighbour_agents, read_agent
from halter.config.decode import format_key_path
from halter.config.definition_record import definition_digest
from halter.config.mcp_file import MCP_FILE, load_json, parse_server_file
from halter.config.merge import FLEET_FILE
from halter.config.resolve import ResolvedAgent, resolve_agent
from halter.config.roots import (
    check_protected_roots,
    definition_of,
    find_writable_folders,
    list_agents_above,
    list_other_definitions,
)
from halter.config.skill_files import read_skills
from halter.config.tool_names import check_named_tools, check_reflex_tools, list_unknown_tool_rules
from halter.config.trust import AgentCode, TrustFile, digest_contents, find_data_load, list_data_places, resolve_digests
from halter.config.yaml_reader import KeyPath
from halter.core.clock import DAY
from halter.core.errors import ConfigError, require_module
from halter.core.events import ToolPinned
from halter.core.folders import (
    FileRefusal,
    ProtectedEntry,
    ProtectedPaths,
    WritableFolders,
    allow_all,
    identity_of,
    is_path_within,
)
from halter.core.ids import FLEET
from halter.core.ports import Draft, Query, Rows, Write
from halter.core.rows import DecisionRow, PinRow
from halter.core.text import format_count, join_names, shorten, suggest_nearest, to_one_line
from halter.core.tools import SERVER_SEPARATOR, Failed, Invalid, PinnedDigests, Tool, ToolServer, ToolSpec, check_pins
from halter.guard.approvals import Pin, Question, ServerChange, ask_question, make_server_question, withdraw_question
from halter.guard.judge import find_tool_policy, needs_approval
from halter.guard.prepare import SessionContext
from halter.notify import require_libraries
from halter.policy.evaluation import ResolvedPolicy
from halter.redaction import personal_data
from halter.redaction.secrets import Secrets, read_environment_secrets
from halter.runtime.document_index import Library
from halter.runtime.runtime import Runtime
from halter.sensors.stream import find_stream_format
from halter.settings import Settings, find_logins_file
from halter.spec.autonomy import Pacing
from halter.spec.playbook import Playbook, Step
from halter.spec.skills import Skill
from halter.spec.tasks import VERBS, SubAgent, Tasks
from halter.tasks.agent_tool import AgentTool
from halter.tasks.task_tools import list_verb_specs
from halter.tools.function_tool import FunctionTool
from halter.tools.process import PROGRAM_FOLDERS
from halter.tools.trusted_code import TrustCheck, TrustedFiles, TrustedLoader, guard_imports

if TYPE_CHECKING:
    from halter.tools.mcp import McpOffer


def check_extras(pacing: Pacing, tasks: Tasks) -> None:
    """Raise ConfigError, which names the extra, for a sensor or a channel whose library is not installed."""
    for sensor in pacing.sensors:
        subject = f"The sensor {sensor.name}"
        if sensor.type == "files":
            require_module("watchfiles", "autonomy", subject)
        elif sensor.type == "stream" and find_stream_format(sensor.source) == "websocket":
            require_module("websockets", "autonomy", subject)
    require_libraries(tasks.notify.channels)


def check_pacing_tools(policy: ResolvedPolicy, pacing: Pacing, agent: AgentFile, tools: Iterable[Tool]) -> None:
    """Check the tools that refresh fields and that sensors poll against the agent's tools.

    Raises ConfigError for a tool that does not exist, that does more than read or that needs an approval for each call,
    and for arguments that the tool rejects.
    """
    tools_by_name = {tool.spec.name: tool for tool in tools}
    for path, name, arguments_path, arguments in _list_unattended_tools(pacing):
        if name not in tools_by_name:
            hint = suggest_nearest(name, sorted(tools_by_name), "the tools")
            raise agent.source_map.error_at(
                path, f"`{format_key_path(path)}` is `{name}`, but there is no such tool; {hint}"
            )
        if objection := _explain_unfit(policy, tools_by_name[name].spec):
            raise agent.source_map.error_at(path, f"`{format_key_path(path)}` is `{name}`, {objection}.")
        if objection := _explain_refusal(tools_by_name[name], arguments):
            raise agent.source_map.error_at(
                arguments_path, f"`{format_key_path(arguments_path)}` does not fit `{name}`: {objection}"
            )


def _list_unattended_tools(pacing: Pacing) -> Iterator[tuple[KeyPath, str, KeyPath, Mapping[str, Any]]]:
    """List the tools that run without a call of the model, with their arguments, and the key paths of both."""
    for name, field in pacing.fields.items():
        if field.refresh_tool is not UNSET:
            path = ("hot_state", "fields", name)
            yield (*path, "refresh_tool"), field.refresh_tool, (*path, "refresh_arguments"), field.refresh_arguments
    for index, sensor in enumerate(pacing.sensors):
        if sensor.source.tool is not UNSET:
            path = ("sensors", index, "source")
            yield (*path, "tool"), sensor.source.tool, (*path, "arguments"), sensor.source.arguments


def _explain_unfit(policy: ResolvedPolicy, spec: ToolSpec) -> str:
    """Describe why a tool cannot run unattended, without a call of the model; "" if it can."""
    if spec.effect != "read":
        return "which may change something; use a tool whose effect is `read`"
    if spec.name in policy.disabled:
        return "which is disabled; use another tool, or remove it from `policy.disabled`"
    rule = find_tool_policy(policy, spec)
    if needs_approval(rule, policy.mode, None):
        reason = f"which needs an approval for each call ({rule.level} in mode {policy.mode})"
        return f"{reason}; use another tool, or set `approval: never` for it in the fleet's `policy.tools`"
    return ""


def _explain_refusal(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Describe why a tool rejects its arguments; "" if it accepts them."""
    try:
        encoded = json.dumps(arguments).encode()
    except (TypeError, ValueError):
        return "it contains a value that JSON cannot represent."
    validation = tool.validate(encoded)
    return validation.sentence if isinstance(validation, Invalid) else ""


MAX_TOOLS_PER_QUESTION: Final = 100
"""Maximum number of tools in one question; the rest wait for the next one."""
_MAX_DETAILED_TOOLS: Final = 8
"""Maximum number of tools for which a question shows full descriptions and schemas."""
_MAX_TEXT: Final = 1000
_MAX_SUMMARY: Final = 40
_DIGEST_LENGTH: Final = 12
"""Characters shown of a digest."""
_MAX_REMOVED: Final = 20
PIN_QUESTION_LIFETIME: Final = 7 * DAY
"""Lifetime of a question. It is asked again when the agent is next loaded after that."""

MERGED_QUESTION_REASON: Final = "All changes of one server are now one question."


class PinPlan(msgspec.Struct, frozen=True):
    """The changes to make to the pins and questions of an agent's servers."""

    first: tuple[ToolSpec, ...] = ()
    """Tools of servers seen for the first time; they are pinned without a question."""
    waiting: frozenset[str] = frozenset()
    """Tools that wait for a person's approval."""
    questions: tuple[Question, ...] = ()
    withdrawn: tuple[tuple[str, str], ...] = ()
    """Open questions whose cause is gone, with the reason."""


def plan_pins(
    agent: str,
    servers: Sequence[str],
    specs: Sequence[ToolSpec],
    pins: PinnedDigests,
    decisions: Sequence[DecisionRow],
    now: int,
) -> PinPlan:
    """Compare the tools of servers with the approved pins and with earlier questions.

    `servers` are the names in the agent's file. `decisions` are all questions about the agent's servers.
    """
    pin_check = check_pins(specs, pins)
    changes = {change.server: change for change in _changes(pin_check.changed, pin_check.new, specs, pins)}
    questions = {
        server: make_server_question(agent, change, PIN_QUESTION_LIFETIME) for server, change in changes.items()
    }
    still_open = [row for row in decisions if not row.verdict and row.expires_at > now]
    withdrawn = [
        (row.decision, _explain_withdrawal(row, servers, specs, questions))
        for row in still_open
        if not _is_current(row, questions)
    ]
    current_servers = {row.subject for row in still_open if _is_current(row, questions)}
    new_questions = [
        _renumber_question(each, decisions) for server, each in questions.items() if server not in current_servers
    ]
    return PinPlan(
        first=tuple(spec for spec in pin_check.usable if spec.server and spec.name not in pins),
        waiting=frozenset(spec.name for spec in (*pin_check.changed, *pin_check.new)),
        questions=tuple(each for each in new_questions if each is not None),
        withdrawn=tuple(withdrawn),
    )


def _is_current(row: DecisionRow, questions: Mapping[str, Question]) -> bool:
    question = questions.get(row.subject)
    return row.about == "changed_server" and question is not None and question.digest == row.digest


def _explain_withdrawal(
    row: DecisionRow, servers: Sequence[str], specs: Sequence[ToolSpec], questions: Mapping[str, Question]
) -> str:
    server = row.subject if row.about == "changed_server" else row.subject.partition(SERVER_SEPARATOR)[0]
    if server not in servers:
        return f"{server} was removed from .mcp.json."
    if row.about != "changed_server" and server in questions:
        return MERGED_QUESTION_REASON
    if server in questions:
        return f"The tools of {server} have changed again; there is a new question about them."
    if not any(spec.server == server for spec in specs):
        return f"{server} offers no tools or cannot be reached. You are asked again when it offers tools."
    return f"{server} offers the approved tools again."


def _renumber_question(question: Question, decisions: Sequence[DecisionRow]) -> Question | None:
    """Return a question with a new id if it was asked before; None if a person denied it."""
    earlier = [row for row in decisions if row.subject == question.subject and row.digest == question.digest]
    if any(row.verdict == "deny" for row in earlier):
        return None
    return msgspec.structs.replace(question, decision=f"{question.decision}/{len(earlier)}") if earlier else question


def _changes(
    changed_specs: Sequence[ToolSpec], new_specs: Sequence[ToolSpec], specs: Sequence[ToolSpec], pins: PinnedDigests
) -> Iterator[ServerChange]:
    for server in sorted({spec.server for spec in (*changed_specs, *new_specs)}):
        server_specs = sorted(
            (spec for spec in (*changed_specs, *new_specs) if spec.server == server), key=lambda spec: spec.name
        )
        offered_names = {spec.name for spec in specs if spec.server == server}
        removed_names = sorted(
            name for name in pins if name.partition(SERVER_SEPARATOR)[0] == server and name not in offered_names
        )
        listed_specs = server_specs[:MAX_TOOLS_PER_QUESTION]
        text = "\n".join(_lines(server, listed_specs, len(server_specs), removed_names, pins))
        yield ServerChange(text, server, tuple(Pin(spec.name, spec.digest) for spec in listed_specs))


def _lines(
    server: str, listed_specs: Sequence[ToolSpec], total: int, removed_names: Sequence[str], pins: PinnedDigests
) -> Iterator[str]:
    """Render the changes of a server. The text is part of the question's digest: a new wording asks again."""
    changed_count = sum(spec.name in pins for spec in listed_specs)
    yield (
        f"{to_one_line(server)}: of its tools {len(listed_specs) - changed_count} shown here are new, "
        f"{changed_count} changed, {len(removed_names)} gone. A yes lets exactly these be used, as they are now."
    )
    is_detailed = len(listed_specs) <= _MAX_DETAILED_TOOLS
    for spec in listed_specs:
        previous = f" (was {pins[spec.name][:_DIGEST_LENGTH]})" if spec.name in pins else ""
        summary = "" if is_detailed else f"  {shorten(to_one_line(spec.description), _MAX_SUMMARY)}"
        yield f"{'changed' if previous else 'new    '}  {spec.name}  {spec.digest[:_DIGEST_LENGTH]}{previous}{summary}"
        if is_detailed:
            yield f"    {shorten(to_one_line(spec.description), _MAX_TEXT)}"
            yield f"    {shorten(to_one_line(spec.schema.decode()), _MAX_TEXT)}"
    if total > len(listed_specs):
        unlisted = format_count(total - len(listed_specs), "more tool")
        yield f"{unlisted} stay out of use: you are asked about them after this."
    for name in removed_names[:_MAX_REMOVED]:
        yield f"gone     {to_one_line(name)}"
    if len(removed_names) > _MAX_REMOVED:
        yield f"and {len(removed_names) - _MAX_REMOVED} more are gone."


async def settle_pins(
    app: Runtime, policy: ResolvedPolicy, servers: Sequence[str], specs: Sequence[ToolSpec]
) -> frozenset[str]:
    """Pin first-seen tools, withdraw and ask questions, and return the tools that wait for a person."""
    store, agent = app.store, policy.name
    # Without tools there is nothing new to ask, so only open questions matter.
    name = "asked_about_servers" if specs else "waiting_about_servers"
    decisions = await store.ask(Query(name, DecisionRow, {"agent": agent}))
    if not specs and not decisions:
        return frozenset()
    pins = {row.tool: row.digest for row in await store.ask(Query("all_pins", PinRow)) if row.agent == agent}
    plan = plan_pins(agent, servers, specs, pins, decisions, app.clock.now())
    if plan.first:
        await store.commit(_pin_first(agent, plan.first))
    for decision, reason in plan.withdrawn:
        await store.commit(withdraw_question(decision, reason))
    for question in plan.questions:
        await store.commit(ask_question(msgspec.structs.replace(question, terms=policy.question_terms)))
    return plan.waiting


def _pin_first(agent: str, specs: Sequence[ToolSpec]) -> Write:
    """Pin tools seen for the first time in one commit; pins that another process made first are kept."""

    def pin(rows: Rows) -> Sequence[Draft]:
        new_specs = [spec for spec in specs if rows.get(PinRow, agent, spec.name) is None]
        events = [ToolPinned(agent=agent, tool=spec.name, digest=spec.digest, by="first use") for spec in new_specs]
        return [Draft(event) for event in events]

    digest = sha256("\n".join(f"{spec.name} {spec.digest}" for spec in specs).encode()).hexdigest()
    return Write(FLEET, f"pin/{agent}/{digest[:32]}/first", pin, [(PinRow, agent, spec.name) for spec in specs])


async def withdraw_questions(app: Runtime, agent: str, reason: str) -> None:
    """Withdraw the open questions about an agent's servers. The agent is not loaded."""
    for row in await app.store.ask(Query("waiting_about_servers", DecisionRow, {"agent": agent})):
        await app.store.commit(withdraw_question(row.decision, reason))


OWN_FOLDER: Final = "halter"
"""Name of the folders in which Halter keeps its settings and its state."""
OWN_DEFINITION: Final = "the agent's own definition"
SQLITE_FILE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")

ProtectedPathsFactory = Callable[[Settings, AgentFile | None, Path | None], ProtectedPaths]


def list_protected_paths(settings: Settings, agent: AgentFile | None, folder: Path | None) -> ProtectedPaths:
    """List the paths that the tools of an agent must not reach. An agent of a program has no folder."""
    entries: list[ProtectedEntry] = []
    agent_folder = None if folder is None else folder.absolute()
    if agent is not None and agent_folder is not None:
        entries += [
            *definition_of(agent_folder, agent.spec, OWN_DEFINITION),
            *list_other_definitions(agent, agent_folder),
        ]
    entries += [*list_halter_files(settings), *list_program_paths()]
    absolute_entries = (msgspec.structs.replace(entry, path=entry.path.absolute()) for entry in entries)
    return ProtectedPaths(tuple(dict.fromkeys(absolute_entries)), agent_folder)


def list_halter_files(settings: Settings) -> Iterator[ProtectedEntry]:
    """List Halter's own files: fleet file, store, checkpoints, keys, trust and tokens."""
    from halter.journal.open import find_store_file

    for fleet in dict.fromkeys((Path.cwd() / FLEET_FILE, *settings.fleets)):
        yield ProtectedEntry(fleet, "where the fleet's file is looked for")
    if settings.fleet is not None:
        yield ProtectedEntry(settings.fleet, "the fleet's file")
    store = find_store_file(settings.store)
    if store is not None:
        yield from (
            ProtectedEntry(store.with_name(store.name + suffix), "the store", is_secret=True)
            for suffix in SQLITE_FILE_SUFFIXES
        )
    yield ProtectedEntry(settings.checkpoints, "the folder of checkpoints", is_secret=True, is_folder=True)
    yield ProtectedEntry(settings.signing_key, "the signing key", is_secret=True)
    if settings.trust is not None:
        yield ProtectedEntry(settings.trust, "the list of what is trusted", is_secret=True)
    if settings.tokens is not None:
        yield ProtectedEntry(settings.tokens, "the list of tokens", is_secret=True)
        yield ProtectedEntry(find_logins_file(settings.tokens), "the list of logins", is_secret=True)
    if settings.hooks is not None:
        yield ProtectedEntry(settings.hooks, "the folder of hooks into other programs", is_secret=True, is_folder=True)
    paths = (settings.signing_key, settings.trust, settings.tokens, store, *settings.fleets)
    folders = [path.parent for path in paths if path]
    for folder in dict.fromkeys(folder for folder in folders if folder.name == OWN_FOLDER):
        yield ProtectedEntry(folder, "a folder of Halter's own", is_secret=True, is_folder=True)


def list_program_paths() -> Iterator[ProtectedEntry]:
    """List the paths from which this program loads code: write access there would allow anything.

    /proc is included: it shows this process and its environment.
    """
    description = "from which this program loads code"
    virtual = sys.prefix != sys.base_prefix
    code_folders = {Path(location) for name, location in sysconfig.get_paths().items() if name != "data" or virtual}
    code_folders |= {Path(__file__).parents[1], Path(site.getusersitepackages())}
    yield from (
        ProtectedEntry(Path(location), "from which programs are started", is_folder=True)
        for location in PROGRAM_FOLDERS
    )
    yield ProtectedEntry(Path("/proc"), "where the processes of this machine are", is_folder=True)
    yield from (ProtectedEntry(path, description, is_folder=True) for path in sorted(code_folders))
    yield from (
        ProtectedEntry(Path(location) / OWN_FOLDER, description) for location in dict.fromkeys(sys.path) if location
    )


def make_file_refusal(protected_paths: ProtectedPaths, roots: WritableFolders) -> FileRefusal:
    """Return a check that refuses secret files under any name, and files outside the root that led to them."""

    def refuse(path: Path, fd: int) -> bool:
        secret = protected_paths.take_snapshot(read_only=True).judge_file(identity_of(fd)) is not None
        return secret or roots.leads_out(path, fd)

    return refuse


def require_unwritten(paths: Iterable[Path], loaded_agents: Iterable[WritableFolders]) -> None:
    """Raise ConfigError if an agent's tools can write to a path: that agent may have written it."""
    for path in paths:
        for agent in (*loaded_agents, *map(find_writable_folders, list_agents_above(path))):
            for root in agent.roots:
                if is_path_within(path, root):
                    raise ConfigError(
                        f"{path} is inside {root}, where the tools of the agent in {agent.folder} can write. That "
                        "agent may have written it. Review it, and move it elsewhere."
                    )


def protect_tools(tools: Iterable[Tool], paths: ProtectedPaths) -> None:
    """Pass every tool with a root the paths that it must not reach. Raises ConfigError if its root reaches one."""
    for tool in tools:
        root = tool.rooted_tool if isinstance(tool, FunctionTool) else None
        if root is None:
            continue
        if objection := paths.reach(root.root):
            raise ConfigError(
                f"The root of the tool {tool.spec.name}, {root.root}, {objection}. No tool may reach that. "
                "Give the tool a separate folder."
            )
        root.protect(paths)


OWN_TOOLS: Final = "tools.py"


NO_SECRETS: Final[frozenset[str]] = frozenset()


class AssembledAgent(ResolvedAgent, frozen=True, kw_only=True):
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
        stack.enter_context(_register_writable(app.writable, roots))
        offer = await stack.enter_async_context(_start_servers(app, code, trusted_files, policy, secrets, report))
        own_tools = [
            function_tool.with_trust_check(_make_trust_check(app, code))
            for function_tool in load_own_tools(policy, folder, trusted_files)
        ]
        scripts = make_script_tools(resolved_agent.skills.values(), protected_paths, _make_trust_check(app, code))
        check_sub_agents(agent, folder)
        agent_tools = make_agent_tools(agent.spec.agents)
        tools = index_tools([*make_builtin_tools(policy, folder), *own_tools, *scripts, *agent_tools, *offer.tools])
        protect_tools(tools.values(), protected_paths)
        check_named_tools(policy, agent, (*(tool.spec for tool in tools.values()), *list_verb_specs()))
        if not offer.omissions:
            check_reflex_tools(resolved_agent, (*tools, *(verb.name for verb in list_verb_specs())))
            fleet_file = (app.policy and app.policy.local_file) or app.fleet
            for sentence in list_unknown_tool_rules(fleet_file, partial(_name_known_tools, folder, tools)):
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
            folder_digest=definition_digest(folder, _list_secret_files(app.settings)),
        )


@contextmanager
def _register_writable(registry: list[WritableFolders], agent: WritableFolders) -> Generator[None]:
    """Register the folders in which an agent's tools can write, while the agent is loaded."""
    registry.append(agent)
    try:
        yield
    finally:
        registry.remove(agent)


def open_trust(settings: Settings) -> TrustFile:
    if settings.trust is None:
        raise ConfigError("There is no home folder, and HALTER_TRUST is not set. Set HALTER_TRUST or HOME.")
    return TrustFile(settings.trust)


def find_agent_code(settings: Settings, folder: Path) -> AgentCode:
    """Return the code of a folder, without the files that Halter writes there."""
    return AgentCode(folder, _list_secret_files(settings))


def _list_secret_files(settings: Settings) -> list[Path]:
    return [entry.path for entry in list_halter_files(settings) if entry.is_secret]


def require_trusted(settings: Settings, folder: Path, code: AgentCode | None = None) -> TrustedFiles:
    """Return the trusted files of a folder: only what is read through them may run.

    Raises ConfigError if the folder has code that no person trusts in its current version. Without code, no file is
    trusted.
    """
    root = Path(os.path.realpath(folder))
    has_tools = (folder / OWN_TOOLS).exists() or (folder / MCP_FILE).exists()
    if not has_tools and not any(skill.scripts for skill in read_skills(folder).values()):
        return TrustedFiles(str(root), {})
    code, trust = code or find_agent_code(settings, folder), open_trust(settings)
    contents = code.contents()
    digests = (digest_contents(contents), code.former_digest(contents))
    if not any(trust.is_trusted(folder, digest) for digest in digests):
        change = trust.describe_change(folder, contents)
        raise ConfigError(
            f"{folder} contains code that would run as you, and no person has trusted its current version"
            f"{f' ({change})' if change else ''}. Review it, then run: halter trust {folder}"
        )
    return _list_trusted_files(folder, contents)


def _list_trusted_files(folder: Path, contents: Mapping[str, str]) -> TrustedFiles:
    root, data_folders = Path(os.path.realpath(folder)), tuple(map(str, list_data_places(folder)))
    return TrustedFiles(str(root), resolve_digests(root, contents), data_folders)


def read_trusted_servers(folder: Path, files: TrustedFiles, environ: Mapping[str, str]) -> tuple[ToolServer, ...]:
    """Read the servers of an agent from the bytes of `.mcp.json` that a person trusted."""
    if not files.has(MCP_FILE):
        return ()
    path = folder / MCP_FILE
    return parse_server_file(load_json(files.read(path), str(path)), folder, environ)


def require_loadable(servers: Iterable[ToolServer], folder: Path, app: Runtime) -> None:
    """Raise ConfigError if a server's command line could load code from a folder that an agent can write."""
    data_folders = [*list_data_places(folder), *(root for agent in app.writable for root in agent.roots)]
    for server in servers:
        is_started = server.transport == "stdio" and not server.omission
        argument = find_data_load(server, data_folders, app.environ) if is_started else ""
        if argument:
            raise ConfigError(
                f"{folder / MCP_FILE}: the server {server.name} could load code from `{argument}`, where an agent may "
                "have written data. Keep its code and its data in separate folders."
            )


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


def _name_known_tools(folder: Path, tools: Iterable[str]) -> frozenset[str]:
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


def list_playbook_flaws(
    playbook: Playbook, agent: str, tools: Mapping[str, Tool], verbs: Iterable[str]
) -> Iterator[str]:
    """List, with their lines, the steps that cannot work: for an unknown tool, or with arguments that do not fit."""
    names = {*tools, *verbs}
    for step in playbook.steps:
        if step.call not in names:
            known = join_names(sorted(names)) or "none"
            sentence = f"calls `{step.call}`, which {agent} does not have; its tools are {known}."
            yield f"{playbook.file} line {step.line} {sentence}"
        elif step.call in tools and (objection := _explain_step_refusal(tools[step.call], step)):
            yield f"{playbook.file} line {step.line}: `{step.call}` cannot take these arguments. {objection}"


def _explain_step_refusal(tool: Tool, step: Step) -> str:
    """Describe why a tool rejects the arguments of a step; "" if it may accept them: references have no value yet."""
    names = msgspec.json.decode(step.arguments, type=dict[str, Any])
    if not step.has_references:
        return _explain_refusal(tool, names)
    schema = msgspec.json.decode(tool.spec.schema or b"{}", type=dict[str, Any])
    known, required = schema.get("properties", {}), schema.get("required", ())
    missing = [name for name in required if name not in names]
    extra = [name for name in names if name not in known] if schema.get("additionalProperties") is False else []
    if extra:
        return f"{join_names(extra)} {'is not one' if len(extra) == 1 else 'are not'} of its arguments."
    return f"{join_names(missing)} {'is' if len(missing) == 1 else 'are'} missing." if missing else ""


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


def load_own_tools(policy: ResolvedPolicy, folder: Path, files: TrustedFiles) -> Sequence[FunctionTool]:
    """Load the tools of an agent's `tools.py` from the bytes that a person trusted."""
    path = folder / OWN_TOOLS
    if not files.has(OWN_TOOLS):
        return []
    tools = {tool.spec.name: tool for tool in _list_function_tools(_load_tool_module(path, files))}
    require_described(tools.values())
    names = policy.tools.own
    if names is UNSET:
        return list(tools.values())
    missing = [name for name in names if name not in tools]
    if missing:
        raise ConfigError(
            f"{path} has no tool {join_names(missing)}, which `tools.own` lists; it has {join_names(tools)}."
        )
    return [tools[name] for name in names]


def _list_function_tools(module: ModuleType) -> list[FunctionTool]:
    return [tool for tool in vars(module).values() if isinstance(tool, FunctionTool)]


def _load_tool_module(path: Path, files: TrustedFiles) -> ModuleType:
    """Import a file of tools. No bytecode is written next to it: that would be untrusted code."""
    guard_imports(files)
    name = f"halter_tools_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path, loader=TrustedLoader(name, str(path), files))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    previous, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"{_locate_error(path, error)} cannot be used: {error}") from error
    except Exception as error:
        raise ConfigError(f"{_locate_error(path, error)} cannot be used: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = previous
    return module


def require_described(tools: Iterable[FunctionTool]) -> None:
    """Raise ConfigError, with the lines, unless each tool tells a model what it does and what it takes."""
    gaps = [f"{_locate_function(tool)}: {gap}." for tool in tools for gap in tool.list_gaps()]
    if gaps:
        raise ConfigError(" ".join(gaps))


def _locate_function(tool: FunctionTool) -> str:
    """Return the file of a tool's function, with the line of its `def`, which may be below its decorators."""
    if tool.code is None:
        return OWN_TOOLS
    path, first_line = tool.code.co_filename, tool.code.co_firstlineno
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if first_line == min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]):
            return f"{path} line {node.lineno}"
    return f"{path} line {first_line}"


def require_sound_code(folder: Path, contents: Mapping[str, str]) -> None:
    """Load the code of a folder from these contents. Raises ConfigError, with a line, for what cannot be used."""
    files = _list_trusted_files(folder, contents)
    if files.has(MCP_FILE):
        load_json(files.read(folder / MCP_FILE), str(folder / MCP_FILE))
    if files.has(OWN_TOOLS):
        require_described(_list_function_tools(_load_tool_module(folder / OWN_TOOLS, files)))


def _locate_error(path: Path, error: Exception) -> str:
    """Return the path of a file of tools, with the line of an error in it if there is one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return f"{path} line {lines[-1]}" if lines and lines[-1] else str(path)


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


def _make_trust_check(app: Runtime, code: AgentCode) -> TrustCheck:
    """Return a check that runs before each start of a folder's code."""

    def starts() -> TrustedFiles:
        try:
            return require_trusted(app.settings, code.folder, code)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    return starts


@asynccontextmanager
async def _start_servers(
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
    check_trust = _make_trust_check(app, code)

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

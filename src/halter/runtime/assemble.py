"""Assembles an agent: its folder, the policy that follows from it, its tools, and what those must not reach.

An MCP server may offer other tools at every start, and thousands of them. What is new or changed in a server is one
question to a person, bounded in what it shows and pins, and withdrawn when its cause is gone.
"""

import importlib.util
import json
import site
import sys
import sysconfig
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

import halter
from halter.config.agent_files import AgentFile, find_neighbour_agents, read_agent, read_skills
from halter.config.decode import format_key_path
from halter.config.mcp_file import MCP_FILE, read_servers
from halter.config.merge import FLEET_FILE
from halter.config.resolve import ResolvedAgent, check_named_tools, definition_digest, resolve_agent
from halter.config.roots import (
    check_protected_roots,
    definition_of,
    find_writable_folders,
    list_agents_above,
    list_other_definitions,
)
from halter.config.trust import AgentCode, TrustFile, digest_contents, find_data_load, list_data_places
from halter.config.yaml_reader import KeyPath
from halter.core.agent_spec import Pacing, Skill, SubAgent
from halter.core.clock import DAY
from halter.core.errors import ConfigError
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
from halter.core.spec import ResolvedPolicy
from halter.core.text import format_count, join_names, shorten, suggest_nearest, to_one_line
from halter.core.tools import SERVER_SEPARATOR, Failed, Invalid, PinnedDigests, Tool, ToolServer, ToolSpec, check_pins
from halter.guard.approvals import Pin, Question, ServerChange, ask_question, make_server_question, withdraw_question
from halter.guard.judge import find_tool_policy, needs_approval
from halter.guard.prepare import SessionContext
from halter.redaction import personal_data
from halter.redaction.secrets import Secrets, read_environment_secrets
from halter.runtime.documents import Library
from halter.runtime.runtime import Runtime
from halter.settings import Settings, find_logins_file
from halter.tasks.agent_tool import AgentTool
from halter.tasks.task_tools import list_verb_specs
from halter.tools.function_tool import FunctionTool
from halter.tools.process import PROGRAM_FOLDERS

if TYPE_CHECKING:
    from halter.tools.mcp import McpOffer


def check_pacing_tools(policy: ResolvedPolicy, pacing: Pacing, agent: AgentFile, tools: Iterable[Tool]) -> None:
    """Checks the tools that refresh fields and that sensors poll, once the agent's tools are known.

    Raises ConfigError for a tool that does not exist, that does more than read, that needs a person's approval each
    time, and for parameters that it would reject.
    """
    known = {tool.spec.name: tool for tool in tools}
    for path, name, given, params in _list_unattended_tools(pacing):
        if name not in known:
            hint = suggest_nearest(name, sorted(known), "the tools")
            raise agent.source_map.error_at(
                path, f"`{format_key_path(path)}` is `{name}`, but there is no such tool; {hint}"
            )
        if why := _explain_unfit(policy, known[name].spec):
            raise agent.source_map.error_at(path, f"`{format_key_path(path)}` is `{name}`, {why}.")
        if why := _explain_refusal(known[name], params):
            raise agent.source_map.error_at(given, f"`{format_key_path(given)}` is nothing that `{name}` takes: {why}")


def _list_unattended_tools(pacing: Pacing) -> Iterator[tuple[KeyPath, str, KeyPath, Mapping[str, Any]]]:
    """Lists the tools that run without the model asking, with their parameters, and the key paths of both."""
    for name, field in pacing.fields.items():
        if field.refresh_tool is not UNSET:
            path = ("hot_state", "fields", name)
            yield (*path, "refresh_tool"), field.refresh_tool, (*path, "refresh_params"), field.refresh_params
    for index, sensor in enumerate(pacing.sensors):
        if sensor.source.tool is not UNSET:
            path = ("sensors", index, "source")
            yield (*path, "tool"), sensor.source.tool, (*path, "params"), sensor.source.params


def _explain_unfit(policy: ResolvedPolicy, spec: ToolSpec) -> str:
    """Says why a tool cannot run without the model asking; "" if it can."""
    if spec.effect != "read":
        return "which may change something; name a tool that only looks, with the effect `read`"
    if spec.name in policy.disabled:
        return "which is disabled; name another tool, or take it off `policy.disabled`"
    rule = find_tool_policy(policy, spec)
    if needs_approval(rule, policy.mode, None):
        asked = f"which needs a person's approval each time ({rule.level} in mode {policy.mode})"
        return f"{asked}; name another tool, or let the fleet write `approval: never` for it under `policy.tools`"
    return ""


def _explain_refusal(tool: Tool, params: Mapping[str, Any]) -> str:
    """Tell what a tool has against its parameters, if anything."""
    try:
        written = json.dumps(params).encode()
    except (TypeError, ValueError):
        return "it holds something that JSON cannot say."
    checked = tool.validate(written)
    return checked.sentence if isinstance(checked, Invalid) else ""


MAX_TOOLS_PER_QUESTION: Final = 100
"""Most tools in one question; the rest waits for the next one."""
_DETAILED: Final = 8
"""Up to so many tools, a question shows descriptions and schemas in full."""
_LONGEST: Final = 1000
_SHORT: Final = 40
_NAMED: Final = 12
"""Characters shown of a digest."""
_GONE: Final = 20
PIN_QUESTION_LIFETIME: Final = 7 * DAY
"""How long a question waits. It is asked again when the agent is loaded later."""

MERGED_QUESTION_REASON: Final = "The tools of a server are asked about together now."


class PinPlan(msgspec.Struct, frozen=True):
    """What to do about the servers of an agent."""

    first: tuple[ToolSpec, ...] = ()
    """Tools of servers seen for the first time, pinned as they are."""
    waiting: frozenset[str] = frozenset()
    """Tools that need a person's approval first."""
    questions: tuple[Question, ...] = ()
    withdrawn: tuple[tuple[str, str], ...] = ()
    """Open questions whose cause is gone, with the reason."""


def plan_pins(
    agent: str,
    servers: Sequence[str],
    specs: Sequence[ToolSpec],
    pins: PinnedDigests,
    asked: Sequence[DecisionRow],
    now: int,
) -> PinPlan:
    """Compares what servers offer with what was approved and what was asked before.

    `servers` are those in the agent's file, `asked` all questions about servers of this agent.
    """
    found = check_pins(specs, pins)
    changes = {change.server: change for change in _changes(found.changed, found.new, specs, pins)}
    questions = {
        server: make_server_question(agent, change, PIN_QUESTION_LIFETIME) for server, change in changes.items()
    }
    still_open = [row for row in asked if not row.verdict and row.expires_at > now]
    withdrawn = [
        (row.decision, _explain_withdrawal(row, servers, specs, questions))
        for row in still_open
        if not _is_current(row, questions)
    ]
    standing = {row.subject for row in still_open if _is_current(row, questions)}
    wanted = [_renumber_question(each, asked) for server, each in questions.items() if server not in standing]
    return PinPlan(
        first=tuple(spec for spec in found.usable if spec.server and spec.name not in pins),
        waiting=frozenset(spec.name for spec in (*found.changed, *found.new)),
        questions=tuple(each for each in wanted if each is not None),
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
        return f"{server} is not in .mcp.json any more."
    if row.about != "changed_server" and server in questions:
        return MERGED_QUESTION_REASON
    if server in questions:
        return f"{server} offers other tools by now: it is asked about anew."
    if not any(spec.server == server for spec in specs):
        return f"{server} offers no tools now, or cannot be reached: it is asked about when it does."
    return f"{server} offers again what was agreed to."


def _renumber_question(question: Question, asked: Sequence[DecisionRow]) -> Question | None:
    """Gives a repeated question a new id; returns None for one that a person denied."""
    before = [row for row in asked if row.subject == question.subject and row.digest == question.digest]
    if any(row.verdict == "deny" for row in before):
        return None
    return msgspec.structs.replace(question, decision=f"{question.decision}/{len(before)}") if before else question


def _changes(
    changed: Sequence[ToolSpec], new: Sequence[ToolSpec], specs: Sequence[ToolSpec], pins: PinnedDigests
) -> Iterator[ServerChange]:
    for server in sorted({spec.server for spec in (*changed, *new)}):
        mine = sorted((spec for spec in (*changed, *new) if spec.server == server), key=lambda spec: spec.name)
        offered = {spec.name for spec in specs if spec.server == server}
        gone = sorted(name for name in pins if name.partition(SERVER_SEPARATOR)[0] == server and name not in offered)
        shown = mine[:MAX_TOOLS_PER_QUESTION]
        text = "\n".join(_lines(server, shown, len(mine), gone, pins))
        yield ServerChange(text, server, tuple(Pin(spec.name, spec.digest) for spec in shown))


def _lines(
    server: str, shown: Sequence[ToolSpec], together: int, gone: Sequence[str], pins: PinnedDigests
) -> Iterator[str]:
    changed = sum(spec.name in pins for spec in shown)
    yield (
        f"{to_one_line(server)}: of its tools {len(shown) - changed} shown here are new, {changed} changed, "
        f"{len(gone)} gone. A yes lets exactly these be used, as they are now."
    )
    detailed = len(shown) <= _DETAILED
    for spec in shown:
        was = f" (was {pins[spec.name][:_NAMED]})" if spec.name in pins else ""
        about = "" if detailed else f"  {shorten(to_one_line(spec.description), _SHORT)}"
        yield f"{'changed' if was else 'new    '}  {spec.name}  {spec.digest[:_NAMED]}{was}{about}"
        if detailed:
            yield f"    {shorten(to_one_line(spec.description), _LONGEST)}"
            yield f"    {shorten(to_one_line(spec.schema.decode()), _LONGEST)}"
    if together > len(shown):
        yield (
            f"{format_count(together - len(shown), 'more tool')} stay out of use: you are asked about them after this."
        )
    for name in gone[:_GONE]:
        yield f"gone     {to_one_line(name)}"
    if len(gone) > _GONE:
        yield f"and {len(gone) - _GONE} more are gone."


async def settle_pins(app: Runtime, agent: str, servers: Sequence[str], specs: Sequence[ToolSpec]) -> frozenset[str]:
    """Pins, asks and withdraws as planned; returns the tools that wait for a person."""
    store = app.store
    # Without tools there is nothing to ask; only open questions matter.
    name = "asked_about_servers" if specs else "waiting_about_servers"
    asked = await store.ask(Query(name, DecisionRow, {"agent": agent}))
    if not specs and not asked:
        return frozenset()
    pins = {row.tool: row.digest for row in await store.ask(Query("all_pins", PinRow)) if row.agent == agent}
    plan = plan_pins(agent, servers, specs, pins, asked, app.clock.now())
    if plan.first:
        await store.commit(_pin_first(agent, plan.first))
    for decision, why in plan.withdrawn:
        await store.commit(withdraw_question(decision, why))
    for question in plan.questions:
        await store.commit(ask_question(question))
    return plan.waiting


def _pin_first(agent: str, specs: Sequence[ToolSpec]) -> Write:
    """Pins tools seen for the first time in one commit; what was pinned meanwhile is kept."""

    def pin(rows: Rows) -> Sequence[Draft]:
        wanted = [spec for spec in specs if rows.get(PinRow, agent, spec.name) is None]
        events = [ToolPinned(agent=agent, tool=spec.name, digest=spec.digest, by="first use") for spec in wanted]
        return [Draft(event) for event in events]

    named = sha256("\n".join(f"{spec.name} {spec.digest}" for spec in specs).encode()).hexdigest()
    return Write(FLEET, f"pin/{agent}/{named[:32]}/first", pin, [(PinRow, agent, spec.name) for spec in specs])


async def withdraw_questions(app: Runtime, agent: str, why: str) -> None:
    """Withdraws the open questions about the servers of an agent that is no longer loaded."""
    for row in await app.store.ask(Query("waiting_about_servers", DecisionRow, {"agent": agent})):
        await app.store.commit(withdraw_question(row.decision, why))


OWN_FOLDER: Final = "halter"
"""Name of the folders that Halter makes for its settings and its state."""
OWN_DEFINITION: Final = "the agent's own definition"
SQLITE_FILE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")

ProtectedPathsFactory = Callable[[Settings, AgentFile | None, Path | None], ProtectedPaths]


def list_protected_paths(settings: Settings, agent: AgentFile | None, folder: Path | None) -> ProtectedPaths:
    """Lists what the tools of an agent must not reach; an agent of a program has no folder."""
    things: list[ProtectedEntry] = []
    home = None if folder is None else folder.absolute()
    if agent is not None and home is not None:
        things += [*definition_of(home, agent.spec, OWN_DEFINITION), *list_other_definitions(agent, home)]
    things += [*list_halter_files(settings), *list_program_paths()]
    whole = (msgspec.structs.replace(thing, path=thing.path.absolute()) for thing in things)
    return ProtectedPaths(tuple(dict.fromkeys(whole)), home)


def list_halter_files(settings: Settings) -> Iterator[ProtectedEntry]:
    """Lists Halter's own files: fleet file, store, checkpoints, keys, trust and tokens."""
    from halter.journal.open import find_store_file

    for fleet in dict.fromkeys((Path.cwd() / FLEET_FILE, *settings.fleets)):
        yield ProtectedEntry(fleet, "where the fleet's file is looked for")
    if settings.fleet is not None:
        yield ProtectedEntry(settings.fleet, "the fleet's file")
    store = find_store_file(settings.store)
    if store is not None:
        yield from (
            ProtectedEntry(store.with_name(store.name + end), "the store", secret=True) for end in SQLITE_FILE_SUFFIXES
        )
    yield ProtectedEntry(settings.checkpoints, "the folder of checkpoints", secret=True, folder=True)
    yield ProtectedEntry(settings.signing_key, "the signing key", secret=True)
    if settings.trust is not None:
        yield ProtectedEntry(settings.trust, "the list of what is trusted", secret=True)
    if settings.tokens is not None:
        yield ProtectedEntry(settings.tokens, "the list of tokens", secret=True)
        yield ProtectedEntry(find_logins_file(settings.tokens), "the list of logins", secret=True)
    if settings.hooks is not None:
        yield ProtectedEntry(settings.hooks, "the folder of hooks into other programs", secret=True, folder=True)
    kept = (settings.signing_key, settings.trust, settings.tokens, store, *settings.fleets)
    places = [path.parent for path in kept if path]
    for place in dict.fromkeys(place for place in places if place.name == OWN_FOLDER):
        yield ProtectedEntry(place, "a folder of Halter's own", secret=True, folder=True)


def list_program_paths() -> Iterator[ProtectedEntry]:
    """Lists where this program loads code from: write access there would allow anything.

    /proc counts too: it shows this process and its environment.
    """
    told = "from which this program loads code"
    virtual = sys.prefix != sys.base_prefix
    installed = {Path(place) for name, place in sysconfig.get_paths().items() if name != "data" or virtual}
    installed |= {Path(halter.__file__).parent, Path(site.getusersitepackages())}
    yield from (
        ProtectedEntry(Path(place), "from which programs are started", folder=True) for place in PROGRAM_FOLDERS
    )
    yield ProtectedEntry(Path("/proc"), "where the processes of this machine are", folder=True)
    yield from (ProtectedEntry(path, told, folder=True) for path in sorted(installed))
    yield from (ProtectedEntry(Path(place) / OWN_FOLDER, told) for place in dict.fromkeys(sys.path) if place)


def make_file_refusal(protected: ProtectedPaths, roots: WritableFolders) -> FileRefusal:
    """Refuses secrets under any name, and files outside of the root through which they were opened."""

    def refuse(path: Path, fd: int) -> bool:
        secret = protected.sight(reads=True).judge_file(identity_of(fd)) is not None
        return secret or roots.leads_out(path, fd)

    return refuse


def require_unwritten(paths: Iterable[Path], loaded: Iterable[WritableFolders]) -> None:
    """Refuses to load what lies where an agent's tools can write: the agent may have written it."""
    for path in paths:
        for agent in (*loaded, *map(find_writable_folders, list_agents_above(path))):
            for root in agent.roots:
                if is_path_within(path, root):
                    raise ConfigError(
                        f"{path} lies in {root}, where the tools of the agent in {agent.folder} can write: it could "
                        "have been made by that agent. Look through it, and move it elsewhere."
                    )


def protect_tools(tools: Iterable[Tool], paths: ProtectedPaths) -> None:
    """Passes every tool with a root the paths that it must not reach. Raises ConfigError if its root reaches one."""
    for tool in tools:
        place = tool.place if isinstance(tool, FunctionTool) else None
        if place is None:
            continue
        if found := paths.reach(place.root):
            raise ConfigError(
                f"The root of the tool {tool.spec.name}, {place.root}, {found}. Tools must reach nothing of the kind: "
                "give it a folder of its own."
            )
        place.protect(paths)


OWN_TOOLS: Final = "tools.py"


NO_SECRETS: Final[frozenset[str]] = frozenset()


class AssembledAgent(ResolvedAgent, frozen=True, kw_only=True):
    """A resolved agent with its tools. Without a model it can only run playbooks.

    `left_out` says which tools of its servers cannot be used, and why. `folder` is the digest of its folder as it was
    read. `refuses` decides which files it may not read.
    """

    tools: Mapping[str, Tool]
    secrets: Secrets
    quarantined: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    library: Library | None = None
    folder: str = ""
    refuses: FileRefusal = allow_all

    def make_context(self, session: str, trigger: str = "") -> SessionContext:
        return SessionContext(
            session=session,
            agent=self.policy.name,
            phase=self.policy.phases[0],
            policy=self.policy,
            policy_digest=self.policy.digest(),
            trigger=trigger,
            quarantined=self.quarantined,
            secrets=self.find_granted_secrets(),
            rates=self.model_settings.rates,
        )

    def find_granted_secrets(self) -> frozenset[str]:
        """Returns the secrets that its policy grants and that are set."""
        return frozenset(self.policy.secrets) & self.secrets.names() if self.policy.secrets else NO_SECRETS


@asynccontextmanager
async def assemble_agent(
    app: Runtime,
    folder: Path,
    *,
    protects: ProtectedPathsFactory = list_protected_paths,
    report: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[AssembledAgent]:
    """Reads an agent's folder and starts its MCP servers. Its code runs only if a person trusted it.

    `tell` receives which server is still waited for.
    """
    agent = read_agent(folder)
    resolved = resolve_agent(app.fleet, agent, folder)
    policy = resolved.policy
    protected = protects(app.settings, agent, folder)
    check_protected_roots(agent, folder, protected)
    require_unwritten([folder, *([app.settings.fleet] if app.settings.fleet else [])], app.writable)
    code = find_agent_code(app.settings, folder)
    require_trusted(app.settings, folder, code)
    secrets = read_environment_secrets(app.environ)
    async with AsyncExitStack() as stack:
        roots = find_writable_folders(folder, agent.spec)
        stack.enter_context(_register_writable(app.writable, roots))
        offer = await stack.enter_async_context(_start_servers(app, code, policy, secrets, report))
        own = [each.trusted_by(_make_trust_check(app, code)) for each in load_own_tools(policy, folder)]
        scripts = make_script_tools(resolved.skills.values(), protected, _make_trust_check(app, code))
        check_sub_agents(agent, folder)
        asked = make_agent_tools(agent.spec.agents)
        tools = index_tools([*make_builtin_tools(policy, folder), *own, *scripts, *asked, *offer.tools])
        protect_tools(tools.values(), protected)
        check_named_tools(policy, agent, (*(tool.spec for tool in tools.values()), *list_verb_specs()))
        check_pacing_tools(policy, resolved.pacing, agent, tools.values())
        servers = [server.name for server in read_servers(folder / MCP_FILE, app.environ)]
        waiting = await settle_pins(app, policy.name, servers, [tool.spec for tool in offer.tools])
        # Compiling many names takes a moment: do it before the first request.
        personal_data.compile_names(resolved.tasks.anonymize or ())
        yield AssembledAgent(
            **resolved.parts(),
            tools=tools,
            secrets=secrets,
            quarantined=waiting,
            left_out=offer.left_out,
            library=Library(app.patient(), folder, make_file_refusal(protected, roots)),
            refuses=make_file_refusal(protected, roots),
            folder=definition_digest(folder, _list_secret_files(app.settings)),
        )


@contextmanager
def _register_writable(loaded: list[WritableFolders], agent: WritableFolders) -> Generator[None]:
    """Registers, while an agent is loaded, where its tools can write."""
    loaded.append(agent)
    try:
        yield
    finally:
        loaded.remove(agent)


def open_trust(settings: Settings) -> TrustFile:
    if settings.trust is None:
        raise ConfigError("You have no home folder, and HALTER_TRUST is not set: set it, or HOME.")
    return TrustFile(settings.trust)


def find_agent_code(settings: Settings, folder: Path) -> AgentCode:
    """Returns the code of a folder, without what Halter itself writes there."""
    return AgentCode(folder, _list_secret_files(settings))


def _list_secret_files(settings: Settings) -> list[Path]:
    return [thing.path for thing in list_halter_files(settings) if thing.secret]


def require_trusted(settings: Settings, folder: Path, code: AgentCode | None = None) -> None:
    """Refuses code that no person has trusted as it is now."""
    brings = (folder / OWN_TOOLS).exists() or (folder / MCP_FILE).exists()
    if not brings and not any(skill.scripts for skill in read_skills(folder).values()):
        return
    contents, trust = (code or find_agent_code(settings, folder)).contents(), open_trust(settings)
    if not trust.is_trusted(folder, digest_contents(contents)):
        since = trust.describe_change(folder, contents)
        raise ConfigError(
            f"{folder} holds code that would run as you, and no person has trusted it as it is now"
            f"{f' ({since})' if since else ''}. Look through it, then run: halter trust {folder}"
        )


def require_loadable(servers: Iterable[ToolServer], folder: Path, app: Runtime) -> None:
    """Refuses a command line that could load code from where an agent can write."""
    places = [*list_data_places(folder), *(root for agent in app.writable for root in agent.roots)]
    for server in servers:
        word = find_data_load(server, places, app.environ) if server.transport == "stdio" else ""
        if word:
            raise ConfigError(
                f"{folder / MCP_FILE}: the server {server.name} could load code from `{word}`, where data lies that "
                "an agent may have written. Give its code and its data folders of their own."
            )


def make_builtin_tools(policy: ResolvedPolicy, folder: Path) -> Iterator[Tool]:
    wanted = policy.tools
    if wanted.files is not UNSET:
        from halter.tools.files import make_file_tools

        yield from make_file_tools(folder / wanted.files.root)
    if wanted.http is not UNSET:
        from halter.tools.http import make_http_tools

        yield from make_http_tools(policy.allowed_hosts or ())
    if wanted.shell is not UNSET:
        from halter.tools.shell import make_shell_tool

        yield make_shell_tool(folder / wanted.shell.root, sandbox=wanted.shell.sandbox, network=wanted.shell.network)


def make_script_tools(skills: Iterable[Skill], protected: ProtectedPaths, starts: Callable[[], None]) -> Iterator[Tool]:
    """Make a tool of each script that a skill brings along."""
    for skill in skills:
        for name, script in skill.scripts.items():
            from halter.tools.shell import make_script_tool

            folder = Path(skill.folder)
            if found := protected.reach(folder, reads=True):
                raise ConfigError(f"The folder of the skill {skill.name}, {folder}, {found}. No script may read that.")
            yield make_script_tool(name, script, folder, protected, starts)


def load_own_tools(policy: ResolvedPolicy, folder: Path) -> Sequence[FunctionTool]:
    """Load the tools that an agent brings along in a file of its own."""
    file = folder / OWN_TOOLS
    if not file.exists():
        return []
    found = {each.spec.name: each for each in vars(_load_tool_module(file)).values() if isinstance(each, FunctionTool)}
    wanted = policy.tools.own
    if wanted is UNSET:
        return list(found.values())
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(
            f"{file} has no tool {join_names(missing)}, which `tools.own` names; it has {join_names(found)}."
        )
    return [found[name] for name in wanted]


def _load_tool_module(file: Path) -> ModuleType:
    """Runs a file of tools. Writes no bytecode beside it: that would be untrusted code."""
    spec = importlib.util.spec_from_file_location(f"halter_tools_of_{file.parent.name}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"{file} cannot be used: {error}") from error
    except Exception as error:
        raise ConfigError(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = written
    return module


def make_agent_tools(agents: Iterable[SubAgent]) -> list[AgentTool]:
    return [
        AgentTool(
            each.name,
            each.description,
            max_cost=None if each.max_cost_usd is UNSET else each.max_cost_usd,
            hands_off=each.hand_off,
        )
        for each in agents
    ]


def check_sub_agents(agent: AgentFile, folder: Path) -> None:
    """Raises ConfigError for an agent to ask that stands in no folder beside."""
    known = find_neighbour_agents(folder if agent.spec.agents else None)
    for index, each in enumerate(agent.spec.agents):
        if each.name not in known:
            path = ("agents", index, "name")
            hint = suggest_nearest(each.name, sorted(known), "the agents there")
            sentence = f"`{format_key_path(path)}` is `{each.name}`, but no folder beside this one has such an agent"
            raise agent.source_map.error_at(path, f"{sentence}; {hint}")


def index_tools(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    """Indexes tools by name. Raises ConfigError for a name used twice."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.spec.name in found:
            raise ConfigError(f"There are two tools called {tool.spec.name}: give one of them another name.")
        found[tool.spec.name] = tool
    return found


def _make_trust_check(app: Runtime, code: AgentCode) -> Callable[[], None]:
    """Returns a check that runs before each start of a folder's code."""

    def starts() -> None:
        try:
            require_trusted(app.settings, code.folder, code)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    return starts


@asynccontextmanager
async def _start_servers(
    app: Runtime, code: AgentCode, policy: ResolvedPolicy, secrets: Secrets, report: Callable[[str], None]
) -> AsyncGenerator["McpOffer"]:
    """Starts the MCP servers of an agent. Its code must be trusted at each start."""
    folder = code.folder
    servers = read_servers(folder / MCP_FILE, app.environ)
    require_loadable(servers, folder, app)
    trusted = _make_trust_check(app, code)

    def starts() -> None:
        trusted()
        try:
            require_loadable(servers, folder, app)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    async with start_servers(app, servers, policy, secrets, starts, report) as offer:
        yield offer


def _start_freely() -> None:
    """A program's servers are its own code, as its functions are."""


@asynccontextmanager
async def start_servers(
    app: Runtime,
    servers: Sequence[ToolServer],
    policy: ResolvedPolicy,
    secrets: Secrets,
    starts: Callable[[], None] = _start_freely,
    report: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator["McpOffer"]:
    """Starts MCP servers; `starts` is called before each start, and raises to refuse it."""
    from halter.tools.mcp import McpOffer, McpTerms, open_mcp_tools

    if not servers:
        yield McpOffer((), ())
        return

    def reveal(name: str) -> str:
        if name not in policy.secrets:
            raise KeyError(name)
        return secrets.value(name)

    terms = McpTerms(app.clock, app.environ, reveal=reveal, starts=starts, report=report)
    async with open_mcp_tools(servers, terms) as offer:
        yield offer

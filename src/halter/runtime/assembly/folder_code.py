"""The code of an agent's folder: its tools and its MCP servers. It runs only in the version that a person trusts."""

import ast
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from msgspec import UNSET

from halter.config.mcp_file import MCP_FILE, load_json, parse_server_file
from halter.config.roots import list_data_places
from halter.config.skill_files import read_skills
from halter.config.trust import AgentCode, TrustFile, digest_contents, find_data_load, resolve_digests
from halter.core.errors import ConfigError
from halter.core.text import join_names
from halter.core.tools import Failed, ToolServer
from halter.policy.evaluation import ResolvedPolicy
from halter.runtime.assembly.protected_paths import list_secret_files
from halter.runtime.runtime import Runtime
from halter.settings import Settings
from halter.tools.function_tool import FunctionTool
from halter.tools.trusted_code import TrustCheck, TrustedFiles, TrustedLoader, guard_imports

OWN_TOOLS: Final = "tools.py"


def open_trust(settings: Settings) -> TrustFile:
    if settings.trust is None:
        raise ConfigError("There is no home folder, and HALTER_TRUST is not set. Set HALTER_TRUST or HOME.")
    return TrustFile(settings.trust)


def find_agent_code(settings: Settings, folder: Path) -> AgentCode:
    """Return the code of a folder, without the files that Halter writes there."""
    return AgentCode(folder, list_secret_files(settings))


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


def make_trust_check(app: Runtime, code: AgentCode) -> TrustCheck:
    """Return a check that runs before each start of a folder's code."""

    def starts() -> TrustedFiles:
        try:
            return require_trusted(app.settings, code.folder, code)
        except ConfigError as error:
            raise Failed("NotTrusted", str(error)) from error

    return starts

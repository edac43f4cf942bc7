"""The checks of `halter doctor` of an agent's folder. No agent runs, and no model is called.

A model's provider is asked for its list of models, which costs nothing.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from halter.config.agent_files import AgentFile, read_agent
from halter.config.definition import AgentDefinition
from halter.config.mcp_file import MCP_FILE, read_servers
from halter.config.playbook_files import parse_playbook
from halter.config.resolve import resolve_agent
from halter.config.roots import check_protected_roots
from halter.config.sections import list_unwritten_fields
from halter.config.yaml_reader import load_file
from halter.core.errors import ConfigError
from halter.core.text import join_names
from halter.core.usage import ModelName, Unpriced
from halter.models.price_tables import make_prices
from halter.models.prices import ListedPrices
from halter.models.providers import make_model
from halter.redaction.redact import Redactor
from halter.redaction.secrets import SECRET_PREFIX, read_environment_secrets
from halter.runtime.assembly.folder_code import require_trusted
from halter.runtime.assembly.protected_paths import list_protected_paths
from halter.runtime.runtime import use_local_policy
from halter.settings import Settings
from halter.spec.models import REFLEX, SCRIPTED
from halter.spec.sensors import AnySensor, FilesSource, StreamSource, ToolSource, UrlSource

if TYPE_CHECKING:
    from halter.config.merge import FleetConfig
    from halter.models.wire import WireModel
from halter.operations.doctor.check import Check, combine_checks, fail_check, pass_check, warn_check

ADDRESS_TIMEOUT_SECONDS: Final = 3.0
TEXT_FILE_SUFFIXES: Final = frozenset({".yaml", ".yml", ".md", ".txt", ".json"})
MAX_FILES_SEARCHED: Final = 200
MAX_FILE_BYTES: Final = 1_000_000
MAX_LISTED_SECRETS: Final = 5
DEFAULT_PORTS: Final[Mapping[str, int]] = {"http": 80, "ws": 80, "https": 443, "wss": 443}


async def check_agent(
    folder: Path,
    settings: Settings,
    environ: Mapping[str, str],
    fleet: "FleetConfig | None" = None,
    listed: ListedPrices | None = None,
) -> AsyncGenerator[Check]:
    """Check an agent as a start would, under the policy of the `fleet`. An unreadable agent yields one problem.

    The `listed` prices are those of its store.
    """
    path = _resolve_folder(folder)
    try:
        agent_file = read_agent(path)
        agent = resolve_agent(fleet or use_local_policy(settings).fleet, agent_file, path)
    except ConfigError as error:
        yield fail_check(str(folder), str(error))
        return
    name = agent.policy.name
    yield _files(agent)
    for check in (
        _list_former_names(path, agent_file, agent),
        _list_unread(path, agent, environ),
        _roots(settings, path, name),
        _check_trust(settings, path, name),
        await _models(agent, environ, listed),
        _secrets(agent, environ),
        _check_written_secrets(path, environ, name),
        _provenance(agent, path, name),
    ):
        if check is not None:
            yield check
    if agent.pacing.sensors:
        sensor_checks = [await _sensor(sensor, path) for sensor in agent.pacing.sensors]
        yield combine_checks(f"{name} sensors", sensor_checks)


def _resolve_folder(folder: Path) -> Path:
    return folder.parent if folder.is_file() else folder


def _check_written_secrets(folder: Path, environ: Mapping[str, str], name: str) -> Check | None:
    """Find secrets in an agent's own files. Halter masks them in its output, but the files contain them."""
    redact = Redactor({}, environ).redact
    locations: list[str] = []
    for file in islice(
        sorted(path for path in folder.rglob("*") if path.suffix in TEXT_FILE_SUFFIXES and path.is_file()),
        MAX_FILES_SEARCHED,
    ):
        if file.stat().st_size <= MAX_FILE_BYTES:
            lines = file.read_text("utf-8", errors="replace").splitlines()
            locations += [f"{file}:{number}" for number, line in enumerate(lines, 1) if redact(line) != line]
    if not locations:
        return None
    remainder = f" and {len(locations) - MAX_LISTED_SECRETS} more" if len(locations) > MAX_LISTED_SECRETS else ""
    location_list = f"{', '.join(locations[:MAX_LISTED_SECRETS])}{remainder}"
    return warn_check(f"{name} secrets", f"{location_list} may contain a secret. Replace it with ${{secret:NAME}}.")


def _list_former_names(folder: Path, agent_file: AgentFile, agent: AgentDefinition) -> Check | None:
    """List the keys that the agent's files write under a former name, which is understood for ever."""
    former_names = list(agent_file.source_map.former_names)
    for playbook in agent.playbooks.values():
        document = load_file(folder / playbook.file, playbook.file)
        parse_playbook(document)
        former_names += document.source_map.former_names
    if not former_names:
        return None
    return pass_check(f"{agent.policy.name} keys", f"{' '.join(former_names)} Former names keep working.")


def _list_unread(path: Path, agent: AgentDefinition, environ: Mapping[str, str]) -> Check | None:
    """List what the agent's files say that is left out: imports of CLAUDE.md, and servers or parts of them."""
    name = f"{agent.policy.name} files"
    try:
        servers = read_servers(path, environ)
    except ConfigError as error:
        return fail_check(name, str(error))
    sentences = [*agent.notes, *(problem for server in servers for problem in server.problems)]
    return warn_check(name, " ".join(sentences)) if sentences else None


def _files(agent: AgentDefinition) -> Check:
    pacing, name = agent.pacing, agent.policy.name
    omissions = list_unwritten_fields(pacing)
    if omissions:
        return warn_check(name, " ".join(omissions))
    triggers = [trigger.name for trigger in agent.tasks.triggers()]
    runs = "Autonomous" if pacing.autonomy.enabled else "Not autonomous"
    sensors = "1 sensor" if len(pacing.sensors) == 1 else f"{len(pacing.sensors)} sensors"
    starts = f" Runs unattended, started by {join_names(triggers)}." if triggers else ""
    return pass_check(name, f"{runs}, with {sensors}.{starts}")


def _provenance(agent: AgentDefinition, folder: Path, name: str) -> Check | None:
    """Check how calls are judged by the provenance of their values; point to tools that need a declaration."""
    mode, is_unattended = agent.policy.provenance, agent.pacing.autonomy.enabled or bool(agent.tasks.triggers())
    if is_unattended and mode in (None, "observe"):
        sentence = "Runs unattended with provenance in observe mode: injected calls are recorded, not stopped."
        remedy = "Check `untrusted values` in its receipts, declare its tools, and set `policy.provenance: ask`."
        return warn_check(f"{name} provenance", f"{sentence} {remedy}")
    if not (folder / "tools.py").exists() and not (folder / MCP_FILE).exists():
        return None
    if mode == "off":
        sentence = "`policy.provenance` is off: untrusted content may decide where its calls go."
        return warn_check(f"{name} provenance", f"{sentence} Set observe, ask or strict.")
    setting = f"`policy.provenance` is {mode or 'observe'}"
    return pass_check(f"{name} provenance", f"{setting}. See inferred tool properties with: halter tools {folder}")


def _roots(settings: Settings, folder: Path, name: str) -> Check | None:
    try:
        agent = read_agent(folder)
        check_protected_roots(agent, folder, list_protected_paths(settings, agent, folder))
    except ConfigError as error:
        return fail_check(f"{name} roots", str(error))
    return None


def _check_trust(settings: Settings, folder: Path, name: str) -> Check | None:
    try:
        require_trusted(settings, folder)
    except ConfigError as error:
        return fail_check(f"{name} code", str(error))
    return None


async def _models(agent: AgentDefinition, environ: Mapping[str, str], listed: ListedPrices | None) -> Check | None:
    checks = [await _model(name, agent, environ, listed) for name in dict.fromkeys(agent.models())]
    return combine_checks(f"{agent.policy.name} models", checks) if checks else None


async def _model(name: str, agent: AgentDefinition, environ: Mapping[str, str], listed: ListedPrices | None) -> Check:
    if ModelName.parse(name).provider in {SCRIPTED, REFLEX}:
        return pass_check(name, f"{name} needs no key and is free.")
    secrets, used_variables = read_environment_secrets(environ), list[str]()

    def key(variable: str) -> str | None:
        value = secrets.value(variable) if variable in secrets.names() else environ.get(variable)
        used_variables.extend([variable] if value else [])
        return value

    try:
        model = make_model(name, agent.model_settings.providers, key)
    except ConfigError as error:
        return fail_check(name, str(error))
    price = make_prices(agent.policy, listed).find(model.name, model.base_url)
    if isinstance(price, Unpriced):
        return fail_check(name, price.sentence)
    if price.guess:
        return warn_check(name, f"{name} is {price.guess}. Run `halter prices update`.")
    key_note = f"its key is set ({', '.join(used_variables)})" if used_variables else "needs no key"
    cost_note = "has a price" if price.bound(1, 1, 0) else "is free"
    if model.terms.credentials is not None:
        return pass_check(name, f"{name} {cost_note}; its provider was not asked.")
    check = await _probe(name, model, used_variables)
    return check or pass_check(name, f"{name} {cost_note}; {key_note}; its provider answers.")


async def _probe(name: str, model: "WireModel", variables: Sequence[str]) -> Check | None:
    """Ask a model's provider for its list of models; return what is wrong with the address or the key."""
    try:
        status = await model.probe()
    except OSError as error:
        address = f" Its address is {model.base_url}." if model.base_url else ""
        return warn_check(name, f"{name} cannot be reached ({error}). Check the service and the network.{address}")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        keys = join_names(variables) if variables else "the key of its provider"
        return fail_check(name, f"The provider of {name} refuses the key (HTTP {status}). Check {keys}.")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return warn_check(name, f"The provider of {name} answers with HTTP {status}. Try again later.")
    return None


def _secrets(agent: AgentDefinition, environ: Mapping[str, str]) -> Check | None:
    """Check that the secrets of the agent are set, without showing a value."""
    required_secrets, available_secrets = agent.policy.secrets, read_environment_secrets(environ).names()
    missing = [name for name in required_secrets if name not in available_secrets]
    if not required_secrets:
        return None
    name = f"{agent.policy.name} secrets"
    if missing:
        variables = ", ".join(SECRET_PREFIX + each for each in missing)
        return fail_check(name, f"{variables} is not set, but the agent needs it. Set it, or remove it from `secrets`.")
    return pass_check(name, f"All secrets are set: {', '.join(required_secrets)}.")


async def _sensor(sensor: AnySensor, folder: Path) -> Check:
    """Probe a sensor without side effects: stat a file, connect to an address."""
    match sensor.source:
        case ToolSource(tool=tool):
            return pass_check(sensor.name, f"{sensor.name} calls {tool}, which was not called.")
        case UrlSource(url=url) | StreamSource(url=url):
            return await _address(sensor.name, url)
        case FilesSource(path=name):
            path = folder / name
    if not path.exists():
        return warn_check(
            sensor.name, f"{sensor.name} watches {path}, which does not exist. The sensor waits for the file."
        )
    if not os.access(path, os.R_OK):
        return fail_check(sensor.name, f"{sensor.name} watches {path}, which you cannot read. Change its permissions.")
    return pass_check(sensor.name, f"{sensor.name} can read {path}.")


async def _address(name: str, url: str) -> Check:
    url_parts = urlsplit(url)
    host, port = url_parts.hostname or "", url_parts.port or DEFAULT_PORTS.get(url_parts.scheme, 443)
    try:
        async with asyncio.timeout(ADDRESS_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return warn_check(name, f"{name} cannot reach {host}:{port} ({reason}). Check the service and the network.")
    return pass_check(name, f"{name} reaches {host}:{port}; no request was sent.")

"""The checks of `halter doctor`: agents, the machine, workers, the store. No agent runs, and no model is called.

A model's provider is asked for its list of models, which costs nothing.
"""

import asyncio
import errno
import os
import platform
import shutil
import socket
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from importlib.metadata import distribution
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET

from halter.config.mcp_file import MCP_FILE, read_servers
from halter.config.sections import list_unwritten_fields
from halter.core.clock import DAY, HOUR, MINUTE, SECOND, format_duration
from halter.core.errors import ConfigError, StoreError, render_install_command
from halter.core.ports import Query
from halter.core.rows import AgentRow, HoldRow, SessionRow, WorkerRow
from halter.core.text import format_count, join_names
from halter.core.tools import Failed
from halter.core.usage import ModelName, Unpriced
from halter.dispatch.heartbeat import StoreClock
from halter.operations.actor import Actor, Principal
from halter.operations.fleet import WorkerView, workers
from halter.present.events import format_moment
from halter.present.report import describe_last_heartbeat, describe_outdated_agents, name_worker
from halter.redaction.secrets import SECRET_PREFIX, read_environment_secrets
from halter.runtime.forecast import plan_triggers
from halter.runtime.runtime import Runtime, sync_store_clock
from halter.settings import Settings
from halter.spec.models import REFLEX, SCRIPTED
from halter.spec.sensors import SensorSpec

if TYPE_CHECKING:
    from halter.config.agent_files import AgentFile
    from halter.config.merge import FleetConfig
    from halter.config.resolve import ResolvedAgent
    from halter.models.price_tables import FetchedPrices
    from halter.models.providers import ListedPrices
    from halter.models.wire import WireModel

CheckStatus = Literal["ok", "warning", "problem"]


class Check(msgspec.Struct, frozen=True):
    """One check. The finding says what to do if something is wrong."""

    name: str
    verdict: CheckStatus
    finding: str


def pass_check(name: str, finding: str) -> Check:
    return Check(name, "ok", finding)


def warn_check(name: str, finding: str) -> Check:
    return Check(name, "warning", finding)


def fail_check(name: str, finding: str) -> Check:
    return Check(name, "problem", finding)


def combine_checks(name: str, checks: list[Check]) -> Check:
    """Merge the checks of one subject: all findings that are not ok, or all findings if every check is ok."""
    for verdict in ("problem", "warning"):
        if any(each.verdict == verdict for each in checks):
            sentence = " ".join(each.finding for each in checks if each.verdict != "ok")
            return Check(name, verdict, sentence)
    return pass_check(name, " ".join(each.finding for each in checks))


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
    listed: "ListedPrices | None" = None,
) -> AsyncGenerator[Check]:
    """Check an agent as a start would, under the policy of the `fleet`. An unreadable agent yields one problem.

    The `listed` prices are those of its store.
    """
    from halter.config.agent_files import read_agent
    from halter.config.resolve import resolve_agent
    from halter.runtime.runtime import use_local_policy

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
    from halter.redaction.redact import Redactor

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


def _list_former_names(folder: Path, agent_file: "AgentFile", agent: "ResolvedAgent") -> Check | None:
    """List the keys that the agent's files write under a former name, which is understood for ever."""
    from halter.config.playbook_files import parse_playbook
    from halter.config.yaml_reader import load_file

    former_names = list(agent_file.source_map.former_names)
    for playbook in agent.playbooks.values():
        document = load_file(folder / playbook.file, playbook.file)
        parse_playbook(document)
        former_names += document.source_map.former_names
    if not former_names:
        return None
    return pass_check(f"{agent.policy.name} keys", f"{' '.join(former_names)} Former names keep working.")


def _list_unread(path: Path, agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check | None:
    """List what the agent's files say that is left out: imports of CLAUDE.md, and servers or parts of them."""
    name = f"{agent.policy.name} files"
    try:
        servers = read_servers(path, environ)
    except ConfigError as error:
        return fail_check(name, str(error))
    sentences = [*agent.notes, *(problem for server in servers for problem in server.problems)]
    return warn_check(name, " ".join(sentences)) if sentences else None


def _files(agent: "ResolvedAgent") -> Check:
    pacing, name = agent.pacing, agent.policy.name
    omissions = list_unwritten_fields(pacing)
    if omissions:
        return warn_check(name, " ".join(omissions))
    triggers = [trigger.name for trigger in agent.tasks.triggers()]
    runs = "Autonomous" if pacing.autonomy.enabled else "Not autonomous"
    sensors = "1 sensor" if len(pacing.sensors) == 1 else f"{len(pacing.sensors)} sensors"
    starts = f" Runs unattended, started by {join_names(triggers)}." if triggers else ""
    return pass_check(name, f"{runs}, with {sensors}.{starts}")


def _provenance(agent: "ResolvedAgent", folder: Path, name: str) -> Check | None:
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
    from halter.config.agent_files import read_agent
    from halter.config.roots import check_protected_roots
    from halter.runtime.assembly.protected_paths import list_protected_paths

    try:
        agent = read_agent(folder)
        check_protected_roots(agent, folder, list_protected_paths(settings, agent, folder))
    except ConfigError as error:
        return fail_check(f"{name} roots", str(error))
    return None


def _check_trust(settings: Settings, folder: Path, name: str) -> Check | None:
    from halter.runtime.assembly.folder_code import require_trusted

    try:
        require_trusted(settings, folder)
    except ConfigError as error:
        return fail_check(f"{name} code", str(error))
    return None


async def _models(agent: "ResolvedAgent", environ: Mapping[str, str], listed: "ListedPrices | None") -> Check | None:
    checks = [await _model(name, agent, environ, listed) for name in dict.fromkeys(agent.models())]
    return combine_checks(f"{agent.policy.name} models", checks) if checks else None


async def _model(name: str, agent: "ResolvedAgent", environ: Mapping[str, str], listed: "ListedPrices | None") -> Check:
    from halter.models.price_tables import make_prices
    from halter.models.providers import make_model

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


def _secrets(agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check | None:
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


async def _sensor(sensor: SensorSpec, folder: Path) -> Check:
    """Probe a sensor without side effects: stat a file, connect to an address."""
    source = sensor.source
    if source.tool is not UNSET:
        return pass_check(sensor.name, f"{sensor.name} calls {source.tool}, which was not called.")
    if source.url is not UNSET:
        return await _address(sensor.name, source.url)
    path = folder / (source.path if isinstance(source.path, str) else ".")
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


HOST: Final = "127.0.0.1"
PORT: Final = 8765
MAX_PRICES_AGE_DAYS: Final = 180
"""An older table deserves an update."""
LOCAL_TIMEOUT_SECONDS: Final = 2.0
OTHERS_MODE_MASK: Final = 0o077


def check_program() -> Check:
    return pass_check("program", f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}.")


def check_fleet_file(settings: Settings) -> Check:
    from halter.config.merge import read_fleet
    from halter.core.errors import ConfigError

    if settings.fleet is None:
        return pass_check(
            "fleet", "There is no halter.yaml here. The store's policy applies, or the defaults if it has none."
        )
    try:
        read_fleet(settings.fleet)
    except ConfigError as error:
        return fail_check("fleet", str(error))
    return pass_check("fleet", f"{settings.fleet} can be read.")


def check_prices(now: int, fetched: "FetchedPrices | None" = None) -> Check:
    """Check the age of the newest price table. The bundled one does not state its own, but when it was installed."""
    if fetched is not None:
        return _check_fetched_prices(now, fetched)
    table = distribution("genai-prices")
    installed_at = Path(str(table.locate_file("genai_prices/data.py"))).stat().st_mtime
    days = max(0, now // SECOND - int(installed_at)) // 86_400
    sentence = f"The bundled price table of genai-prices {table.version} was installed {days} days ago"
    if days > MAX_PRICES_AGE_DAYS:
        return warn_check(
            "prices",
            f"{sentence}. Update it with pip install -U genai-prices, or fetch the newest prices with `halter prices "
            "update`. Configured prices take precedence.",
        )
    return pass_check("prices", f"{sentence}; configured prices take precedence.")


def _check_fetched_prices(now: int, fetched: "FetchedPrices") -> Check:
    sentence = f"The price table was fetched from {fetched.source} {max(0, now - fetched.at) // DAY} days ago"
    if fetched.waiting:
        count = format_count(len(fetched.waiting), "lower price")
        verb = "waits" if len(fetched.waiting) == 1 else "wait"
        return warn_check("prices", f"{sentence}. {count} in it {verb} for your yes: see `halter prices`.")
    if now - fetched.at > MAX_PRICES_AGE_DAYS * DAY:
        return warn_check("prices", f"{sentence}. Update it with `halter prices update`.")
    return pass_check("prices", f"{sentence}; configured prices take precedence.")


def check_postgresql() -> Check:
    if find_spec("psycopg") is None:
        command = render_install_command("postgres")
        return pass_check("postgresql", f"No driver is installed. For more than one machine: {command}.")
    return pass_check("postgresql", "The driver is installed.")


async def check_sandbox() -> Check:
    """Run a command in the sandbox, which verifies its isolation from inside."""
    from halter.tools.shell import Sandbox

    with tempfile.TemporaryDirectory(prefix="halter-doctor-") as root:
        try:
            await Sandbox(Path(root)).verify()
        except Failed as failed:
            return warn_check("sandbox", f"Agents with a shell tool cannot run commands here: {failed}")
    return pass_check("sandbox", "bubblewrap works: commands of agents are isolated.")


async def check_port(host: str = HOST, number: int = PORT) -> Check:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return warn_check(
                "port", f"Cannot listen on {host}:{number} ({error.strerror}). Choose another address with --listen."
            )
    else:
        return pass_check("port", f"{host}:{number} is free for the dashboard and webhooks; no display is needed.")
    if await _is_halter(host, number):
        return pass_check("port", f"Halter already serves {host}:{number}.")
    return warn_check(
        "port", f"{host}:{number} is used by another program. Start Halter with --listen {host}:{number + 1}."
    )


async def _is_halter(host: str, number: int) -> bool:
    try:
        async with asyncio.timeout(LOCAL_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, number)
            try:
                writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}:{number}\r\nConnection: close\r\n\r\n".encode())
                return b"halter" in (await reader.read(4096)).lower()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def check_tokens(settings: Settings) -> Check | None:
    path = settings.tokens
    if path is None or not path.exists():
        return None
    if path.stat().st_mode & OTHERS_MODE_MASK:
        return fail_check("tokens", f"Other users can read {path}. Run chmod 600 {path}.")
    return pass_check("tokens", f"Only you can read {path}.")


STORE_CONNECTIONS: Final = 3
"""One writes, one reads, one listens."""
MAX_ORPHANED_TICKETS: Final = 1000
"""More tickets without a worker cause a warning."""
WORKER_KIND: Final = "worker"


class UnclaimedSessions(msgspec.Struct, frozen=True):
    """Due sessions of an agent that no worker has claimed, and since when."""

    agent: str
    sessions: int
    since: int | None


async def check_workers(app: Runtime) -> AsyncGenerator[Check]:
    now = app.clock.now()
    views = await workers(Actor(app, Principal(app.settings.person)))
    unclaimed = await app.store.ask(Query("late", UnclaimedSessions, {"before": now - MINUTE}))
    switches = await app.store.ask(Query("all_agents", AgentRow))
    agents_off = {row.agent for row in switches if not row.switched_on}
    planned_triggers = [plan.trigger for plan in await plan_triggers(app.store, now)]
    agents_on = [row.agent for row in switches if row.switched_on]
    idle = [name for name in (*agents_on, *planned_triggers) if name.partition("/")[0] not in agents_off]
    yield check_presence(views, now, idle)
    for check in (check_versions(views), check_agent_files(views)):
        if check is not None:
            yield check
    yield check_due_sessions([each for each in unclaimed if each.agent not in agents_off], views, now)
    if app.settings.store.lower().startswith(("postgresql:", "postgres:")):
        async for check in _pressure(app, views, now):
            yield check


def check_presence(views: Sequence[WorkerView], now: int, idle: Sequence[str] = ()) -> Check:
    """Count the live workers by host; report those with a problem, and those lost within the hour.

    `idle` lists agents and triggers that need a process to run.
    """
    alive = [worker for worker in views if worker.alive]
    problems = [f"{name_worker(worker)}: {worker.problem}" for worker in alive if worker.problem]
    if problems:
        return fail_check("workers", " ".join(problems))
    hosts = ", ".join(f"{count} on {host}" for host, count in sorted(Counter(worker.host for worker in alive).items()))
    sentence = f"{_processes(len(alive))} here: {hosts}." if alive else "No process runs agents here."
    lost_workers = [
        f"{name_worker(worker)} ({describe_last_heartbeat(worker, now)})" for worker in views if not worker.alive
    ]
    if lost_workers:
        return warn_check(
            "workers",
            f"{sentence} Lost within the hour: {', '.join(lost_workers)}. Their sessions move to workers with the same "
            "agents. Check their machines, and restart them.",
        )
    if idle and not alive:
        names = ", ".join(idle[:MAX_IDLE_NAMES]) + (", …" if len(idle) > MAX_IDLE_NAMES else "")
        return warn_check(
            "workers",
            f"{sentence} Waiting for one: {names}. Start `halter up FOLDER`, `halter serve FOLDER` or a worker; "
            "no session starts until then.",
        )
    return pass_check("workers", sentence)


MAX_IDLE_NAMES: Final = 5


def _processes(count: int) -> str:
    return "1 process runs agents" if count == 1 else f"{count:,} processes run agents"


def check_versions(views: Sequence[WorkerView]) -> Check | None:
    hosts_by_version: dict[str, set[str]] = {}
    for worker in views:
        if worker.alive:
            hosts_by_version.setdefault(worker.version, set()).add(worker.host)
    if len(hosts_by_version) < 2:  # noqa: PLR2004  two versions differ
        return None
    versions = "; ".join(
        f"{version or 'unknown'} on {', '.join(sorted(hosts_by_version[version]))}"
        for version in sorted(hosts_by_version)
    )
    return warn_check(
        "versions",
        f"Workers run several versions of Halter ({versions}). This is expected during a rolling upgrade. Afterwards, "
        "install the newer version where it is missing, and restart that worker.",
    )


def check_agent_files(views: Sequence[WorkerView]) -> Check | None:
    sentences = [
        f"{name_worker(worker)}: {describe_outdated_agents(worker)}"
        for worker in views
        if worker.alive and describe_outdated_agents(worker)
    ]
    return warn_check("files", " ".join(sentences)) if sentences else None


def check_due_sessions(unclaimed: Sequence[UnclaimedSessions], views: Sequence[WorkerView], now: int) -> Check:
    """Check for sessions that have been due for more than a minute without a worker, and report why."""
    alive = [worker for worker in views if worker.alive]
    checks = [check for each in unclaimed if (check := _check_unclaimed(each, alive, now)) is not None]
    if not checks:
        return pass_check("due", "No due session waits for a worker.")
    sentence = " ".join(check.finding for check in checks)
    return (
        fail_check("due", sentence)
        if any(check.verdict == "problem" for check in checks)
        else warn_check("due", sentence)
    )


def _check_unclaimed(unclaimed: UnclaimedSessions, alive: Collection[WorkerView], now: int) -> Check | None:
    wait_text = "" if unclaimed.since is None else f" for {format_duration(now - unclaimed.since)}"
    verb = "has" if unclaimed.sessions == 1 else "have"
    summary = (
        f"{unclaimed.agent} has {format_count(unclaimed.sessions, 'session')} that {verb} been due{wait_text}, and"
    )
    workers_with_folder = [worker for worker in alive if unclaimed.agent in worker.agents]
    available_workers = [
        worker for worker in workers_with_folder if worker.health == "alive" and unclaimed.agent not in worker.waiting
    ]
    if not workers_with_folder:
        sentence = (
            f"{summary} no live process has its folder. Pass it to `halter up` or `halter worker`, or run "
            f"halter off {unclaimed.agent}."
        )
        # Before the first process starts, this is expected.
        return fail_check("due", sentence) if alive else warn_check("due", sentence)
    if not available_workers:
        sentence = (
            f"{summary} the workers with its folder wait for newer files or are draining "
            f"({', '.join(map(name_worker, workers_with_folder))}). Update its folder there, and restart them."
        )
        return fail_check("due", sentence)
    if all(worker.awake >= worker.concurrency for worker in available_workers):
        sentence = f"{summary} all workers with its folder are busy. Start another worker, or raise --concurrency."
        return warn_check("due", sentence)
    return None


async def _pressure(app: Runtime, views: Sequence[WorkerView], now: int) -> AsyncGenerator[Check]:
    from halter.dispatch.ticket_queue import CONNECTIONS, name_queue
    from halter.journal.connection import measure_pressure

    rows = await app.store.ask(Query("all_workers", WorkerRow))
    served_queues = {name_queue(*each) for row in rows if row.alive(now) for each in row.parse_info().agents.items()}
    pressure = await asyncio.to_thread(measure_pressure, app.settings.store)
    kinds = [worker.kind for worker in views if worker.alive]
    # A worker uses one more connection than it pools, to listen for new tickets.
    yield check_connections(pressure.max_connections, pressure.used, kinds, STORE_CONNECTIONS + CONNECTIONS + 1)
    waiting_batches = [each for each in pressure.queued if each.queue in served_queues]
    orphaned_count = sum(each.jobs for each in pressure.queued if each.queue not in served_queues)
    yield check_queue(
        sum(each.jobs for each in waiting_batches),
        max((each.age for each in waiting_batches), default=0),
        orphaned_count,
    )


def check_connections(limit: int, used: int, kinds: Sequence[str], per_worker: int) -> Check:
    needed_count = sum(per_worker if kind == WORKER_KIND else STORE_CONNECTIONS for kind in kinds)
    sentence = (
        f"PostgreSQL has {limit:,} connections for programs, of which {used:,} are in use; the processes that run "
        f"agents need up to {needed_count:,}, and each worker up to {per_worker}"
    )
    if needed_count > limit or limit - used < per_worker:
        return warn_check("connections", f"{sentence}. Raise max_connections before you start another worker.")
    return pass_check("connections", f"{sentence}.")


def check_queue(waiting: int, age: int, orphaned: int) -> Check:
    """Check for old tickets in the queue, and for tickets without a worker."""
    if age > MINUTE:
        return warn_check(
            "queue",
            f"{format_count(waiting, 'ticket')} wait in the queue, the oldest for {format_duration(age)}: the workers "
            "are busy, or cannot reach PostgreSQL. Check their logs; start another worker, or raise --concurrency.",
        )
    if orphaned > MAX_ORPHANED_TICKETS:
        return warn_check(
            "queue",
            f"{format_count(orphaned, 'ticket')} belong to versions that no worker runs. They are harmless: their "
            "sessions were offered again. You can remove them from procrastinate_jobs.",
        )
    return pass_check("queue", f"{format_count(waiting, 'ticket')} in the queue, none of them old.")


MAX_HOLD_AGE: Final = HOUR
WARN_DISK_BYTES: Final = 1 << 30
MIN_DISK_BYTES: Final = 100 << 20


class StoreCounts(msgspec.Struct, frozen=True):
    events: int
    streams: int
    sessions: int
    holds: int
    blobs: int


READINESS_TIMEOUT_SECONDS: Final = 2
"""Time in which a store must answer."""


class StoreMeta(msgspec.Struct, frozen=True):
    name: str
    value: str


async def check_store(app: Runtime) -> AsyncGenerator[Check]:
    from halter.journal.open import find_store_file

    yield await _check_counts(app)
    path = find_store_file(app.settings.store)
    if path is not None:
        yield _file(path)
        yield check_disk(path.parent)
    yield await _clock(app)
    yield _checkpoints(app)
    yield await _policy(app)
    yield await _check_holds(app)
    yield await _switches(app)
    async for check in check_workers(app):
        yield check


async def check_readiness(app: Runtime) -> Sequence[str]:
    """List why this process cannot do its work now; empty if it is ready. It names nothing of the store's contents."""
    from halter.journal.engine import list_migrations

    try:
        async with asyncio.timeout(READINESS_TIMEOUT_SECONDS):
            meta = {row.name: row.value for row in await app.store.ask(Query("meta", StoreMeta))}
            workers = await app.store.ask(Query("all_workers", WorkerRow)) if app.liveness.workers else ()
    except (StoreError, TimeoutError):
        return ["The store does not answer."]
    problems: list[str] = []
    if meta.get("schema") != str(list_migrations("sqlite")[-1][0]):
        problems.append("The store has the schema of another version of Halter.")
    if app.older_copy is not None:
        problems.append("The store lacks events that it had before.")
    now = app.clock.now()
    alive = {row.worker for row in workers if row.alive(now)}
    if any(worker not in alive for worker in app.liveness.workers):
        problems.append("The leases of this process have expired.")
    return problems


async def _check_counts(app: Runtime) -> Check:
    (counts,) = await app.store.ask(Query("counts", StoreCounts))
    meta = {row.name: row.value for row in await app.store.ask(Query("meta", StoreMeta))}
    totals = f"{counts.events:,} events in {counts.streams:,} streams, {format_count(counts.sessions, 'session')}"
    return pass_check("store", f"Schema {meta['schema']}, {totals}. Id {meta['store']}.")


def _file(path: Path) -> Check:
    """Check that the store file is writable and intact."""
    from halter.journal.sqlite import is_read_only, open_read_only

    if is_read_only(str(path)):
        return fail_check("file", f"{path} is read-only. Make it and its folder writable.")
    try:
        with closing(open_read_only(str(path))) as connection:
            (text,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        text = str(error)
    if text != "ok":
        return fail_check("file", f"{path} is damaged ({text}). Stop all agents, copy the file, and restore a backup.")
    return pass_check("file", f"{path} is writable and intact.")


def check_disk(folder: Path) -> Check:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return warn_check("disk", f"Cannot read the disk of {folder} ({error.strerror}).")
    amount = f"{free_bytes / (1 << 30):,.1f} GiB"
    if free_bytes < MIN_DISK_BYTES:
        return fail_check(
            "disk",
            f"Disk of {folder} almost full ({amount} left). Agents stop when the store cannot be written. "
            "Free some space.",
        )
    if free_bytes < WARN_DISK_BYTES:
        return warn_check("disk", f"Disk of {folder} is low ({amount} left). Free some space.")
    return pass_check("disk", f"{amount} free for {folder}.")


MAX_CLOCK_LAG: Final = MINUTE
"""The newest event of a store may be this much later than the present."""


class StoreExtent(msgspec.Struct, frozen=True):
    at: int


async def _clock(app: Runtime) -> Check:
    """Compare this machine's clock with the server's and with the store's newest event."""
    if isinstance(app.clock, StoreClock):
        await sync_store_clock(app.store, app.clock)
        if refusal := app.clock.refusal():
            return fail_check("clock", refusal)
    now, (extent,) = app.clock.now(), await app.store.ask(Query("extent", StoreExtent))
    if extent.at > now + MAX_CLOCK_LAG:
        return fail_check(
            "clock",
            f"This machine's clock shows {format_moment(now)}, but the newest event of this store is of "
            f"{format_moment(extent.at)}. Caps, schedules and timeouts are wrong until the clock is correct. Set it, "
            "for example with `timedatectl set-ntp true`, and restart.",
        )
    return pass_check("clock", "This machine and the store agree on the time.")


def _checkpoints(app: Runtime) -> Check:
    if app.older_copy is not None:
        return fail_check("checkpoints", app.older_copy.sentence())
    app.checkpointer.rehearse()
    if app.checkpointer.problem:
        return fail_check("checkpoints", app.checkpointer.problem)
    return pass_check("checkpoints", f"Signed heads go to {app.settings.checkpoints}.")


async def read_local_policy(app: Runtime) -> "FleetConfig | None":
    """Read the effective policy of this process; None if it cannot be read."""
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    try:
        return (await resolve_effective_policy(app.store, read_local_fleet(app.settings))).fleet
    except ConfigError:
        return None


async def _policy(app: Runtime) -> Check:
    """Compare the store's policy with the local file."""
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    try:
        effective = await resolve_effective_policy(app.store, read_local_fleet(app.settings))
    except ConfigError as error:
        return fail_check("policy", str(error))
    if effective.row is None:
        return pass_check("policy", "This store has no policy yet. The halter.yaml of its first session becomes it.")
    if sentence := effective.describe_difference():
        return warn_check("policy", sentence)
    return pass_check(
        "policy", f"This store's policy was adopted by {effective.row.by} on {format_moment(effective.row.at)}."
    )


async def _check_holds(app: Runtime) -> Check:
    holds = await app.store.ask(Query("holds", HoldRow))
    old_holds = [hold for hold in holds if hold.at < app.clock.now() - MAX_HOLD_AGE]
    if old_holds:
        oldest = format_duration(app.clock.now() - old_holds[0].at)
        count = "1 hold" if len(old_holds) == 1 else f"{len(old_holds):,} holds"
        finding = (
            f"{count} older than an hour (the oldest {oldest}, session {old_holds[0].session}). The session waits for "
            "a worker, or for a person: to decide about a call, or to settle one in doubt. Only the hold of a question "
            "ends with time, when the question expires."
        )
        return warn_check("holds", finding)
    return pass_check("holds", f"{len(holds)} open, none of them old.")


async def _switches(app: Runtime) -> Check:
    rows = await app.store.ask(Query("all_agents", AgentRow))
    sentences = [f"{row.agent} is {'on' if row.switched_on else 'off'}, by {row.by}" for row in rows]
    sessions = await app.store.ask(Query("sessions_under_way", SessionRow))
    paused_sessions = [row for row in sessions if row.kind == "autonomous" and row.state == "PAUSED"]
    if paused_sessions:
        hints = (
            f"{row.session} is paused. Run halter show {row.session}, then halter on {row.agent}."
            for row in paused_sessions
        )
        return fail_check("autonomy", " ".join(hints))
    return pass_check(
        "autonomy", f"{'; '.join(sentences)}." if sentences else "No agent has run unattended with this store."
    )

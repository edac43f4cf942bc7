"""The checks of `halter doctor`: agents, the machine, workers, the store. Nothing is run, and no model is asked."""

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
from importlib.metadata import distribution
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET

from halter.config.mcp_file import MCP_FILE
from halter.config.sections import list_unwritten_fields
from halter.core.agent_spec import REFLEX, SCRIPTED, SensorSpec
from halter.core.clock import HOUR, MINUTE, SECOND, format_duration
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import AgentRow, HoldRow, SessionRow, WorkerRow
from halter.core.text import format_count
from halter.core.tools import Failed
from halter.core.usage import ModelName, Unpriced
from halter.dispatch.heartbeat import StoreClock
from halter.operations.desk import Actor, Principal
from halter.operations.fleet import WorkerView, workers
from halter.present.events import format_moment
from halter.present.report import describe_last_heartbeat, describe_outdated_agents, name_worker
from halter.redaction.secrets import SECRET_PREFIX, read_environment_secrets
from halter.runtime.forecast import plan_triggers
from halter.runtime.runtime import Runtime, sync_store_clock
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.config.merge import FleetConfig
    from halter.config.resolve import ResolvedAgent

CheckStatus = Literal["ok", "warning", "problem"]


class Check(msgspec.Struct, frozen=True):
    """One check, and a sentence that says what to do where something is wrong."""

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
    """Merge checks of one thing: all findings that are not ok, or all of them."""
    for verdict in ("problem", "warning"):
        if any(each.verdict == verdict for each in checks):
            sentence = " ".join(each.finding for each in checks if each.verdict != "ok")
            return Check(name, verdict, sentence)
    return pass_check(name, " ".join(each.finding for each in checks))


ADDRESS_TIMEOUT_SECONDS: Final = 3.0
TEXT_FILE_SUFFIXES: Final = frozenset({".yaml", ".yml", ".md", ".txt", ".json"})
MOST_FILES: Final = 200
LARGEST_FILE: Final = 1_000_000
MAX_SECRETS_SHOWN: Final = 5
PORTS: Final[Mapping[str, int]] = {"http": 80, "ws": 80, "https": 443, "wss": 443}


async def check_agent(
    folder: Path, settings: Settings, environ: Mapping[str, str], fleet: "FleetConfig | None" = None
) -> AsyncGenerator[Check]:
    """Check an agent as a start would, under the policy of the `fleet`; an unreadable one is one finding."""
    from halter.config.agent_files import read_agent
    from halter.config.resolve import resolve_agent
    from halter.runtime.runtime import use_local_policy

    path = _resolve_folder(folder)
    try:
        agent = resolve_agent(fleet or use_local_policy(settings).fleet, read_agent(path), path)
    except ConfigError as error:
        yield fail_check(str(folder), str(error))
        return
    name = agent.policy.name
    yield _files(agent)
    for check in (
        _roots(settings, path, name),
        _check_trust(settings, path, name),
        await _models(agent, environ),
        _secrets(agent, environ),
        _check_written_secrets(path, environ, name),
        _provenance(agent, path, name),
    ):
        if check is not None:
            yield check
    if agent.pacing.sensors:
        tried = [await _sensor(sensor, path) for sensor in agent.pacing.sensors]
        yield combine_checks(f"{name} sensors", tried)


def _resolve_folder(folder: Path) -> Path:
    return folder.parent if folder.is_file() else folder


def _check_written_secrets(place: Path, environ: Mapping[str, str], name: str) -> Check | None:
    """Find secrets in an agent's own files. Halter masks them in its output, but they lie in the folder."""
    from halter.redaction.redact import Redactor

    redact = Redactor({}, environ).redact
    found: list[str] = []
    for file in islice(
        sorted(path for path in place.rglob("*") if path.suffix in TEXT_FILE_SUFFIXES and path.is_file()), MOST_FILES
    ):
        if file.stat().st_size <= LARGEST_FILE:
            lines = file.read_text("utf-8", errors="replace").splitlines()
            found += [f"{file}:{number}" for number, line in enumerate(lines, 1) if redact(line) != line]
    if not found:
        return None
    more = f" and {len(found) - MAX_SECRETS_SHOWN} more" if len(found) > MAX_SECRETS_SHOWN else ""
    where = f"{', '.join(found[:MAX_SECRETS_SHOWN])}{more}"
    return warn_check(
        f"{name} secrets", f"What looks like a secret stands in {where}: write ${{secret:NAME}} in its place."
    )


def _files(agent: "ResolvedAgent") -> Check:
    pacing, name = agent.pacing, agent.policy.name
    forgotten = list_unwritten_fields(pacing)
    if forgotten:
        return warn_check(name, " ".join(forgotten))
    runs = "runs by itself" if pacing.autonomy.enabled else "does not run by itself"
    sensors = "1 sensor" if len(pacing.sensors) == 1 else f"{len(pacing.sensors)} sensors"
    return pass_check(name, f"It {runs}, with {sensors}.")


def _provenance(agent: "ResolvedAgent", folder: Path, name: str) -> Check | None:
    """Say how calls are judged by where their values come from, and where to see what is worth declaring."""
    mode, alone = agent.policy.provenance, agent.pacing.autonomy.enabled or bool(agent.tasks.triggers())
    if alone and mode in (None, "observe"):
        sentence = "It runs by itself, and only observes which of its calls go by what others wrote"
        remedy = "Look at `not said` in its receipts, declare its tools, and set `policy.provenance: ask`."
        return warn_check(f"{name} provenance", f"{sentence}. {remedy}")
    if not (folder / "tools.py").exists() and not (folder / MCP_FILE).exists():
        return None
    if mode == "off":
        sentence = "`policy.provenance` is off: what others wrote may choose where its calls go."
        return warn_check(f"{name} provenance", f"{sentence} Set observe, ask or strict.")
    said = f"`policy.provenance` is {mode or 'observe'}"
    return pass_check(f"{name} provenance", f"{said}. What is guessed of its tools: halter tools {folder}")


def _roots(settings: Settings, folder: Path, name: str) -> Check | None:
    from halter.config.agent_files import read_agent
    from halter.config.roots import check_protected_roots
    from halter.runtime.assemble import list_protected_paths

    try:
        agent = read_agent(folder)
        check_protected_roots(agent, folder, list_protected_paths(settings, agent, folder))
    except ConfigError as error:
        return fail_check(f"{name} roots", str(error))
    return None


def _check_trust(settings: Settings, folder: Path, name: str) -> Check | None:
    from halter.runtime.assemble import require_trusted

    try:
        require_trusted(settings, folder)
    except ConfigError as error:
        return fail_check(f"{name} code", str(error))
    return None


async def _models(agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check | None:
    checks = [await _model(name, agent, environ) for name in dict.fromkeys(agent.models())]
    return combine_checks(f"{agent.policy.name} models", checks) if checks else None


async def _model(name: str, agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check:
    from halter.models.providers import Prices, make_model

    if ModelName.parse(name).provider in {SCRIPTED, REFLEX}:
        return pass_check(name, f"{name} needs no key, and is free.")
    secrets, used = read_environment_secrets(environ), list[str]()

    def key(variable: str) -> str | None:
        value = secrets.value(variable) if variable in secrets.names() else environ.get(variable)
        used.extend([variable] if value else [])
        return value

    try:
        model = make_model(name, agent.model_settings.providers, key)
    except ConfigError as error:
        return fail_check(name, str(error))
    price = Prices(agent.policy.prices).find(model.name, model.base_url)
    if isinstance(price, Unpriced):
        return fail_check(name, price.sentence)
    key_told = f"its key is set ({', '.join(used)})" if used else "needs no key"
    cost_told = "has a price" if price.bound(1, 1, 0) else "is free"
    if model.base_url:
        reached = await _address(name, model.base_url)
        if reached.verdict != "ok":
            return warn_check(name, f"{reached.finding} Its address is {model.base_url}.")
    return pass_check(name, f"{name} {cost_told}, and {key_told}.")


def _secrets(agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check | None:
    """Check that the secrets which the agent may use are set, without showing a value."""
    wanted, there = agent.policy.secrets, read_environment_secrets(environ).names()
    missing = [name for name in wanted if name not in there]
    if not wanted:
        return None
    name = f"{agent.policy.name} secrets"
    if missing:
        variables = ", ".join(SECRET_PREFIX + each for each in missing)
        return fail_check(name, f"{variables} is not set, and the agent needs it: set it, or remove it from `secrets`.")
    return pass_check(name, f"All are set: {', '.join(wanted)}.")


async def _sensor(sensor: SensorSpec, folder: Path) -> Check:
    """Probe a sensor without side effects: stat a file, connect to an address."""
    source = sensor.source
    if source.tool is not UNSET:
        return pass_check(sensor.name, f"{sensor.name} calls {source.tool}, which was not tried.")
    if source.url is not UNSET:
        return await _address(sensor.name, source.url)
    path = folder / (source.path if isinstance(source.path, str) else ".")
    if not path.exists():
        return warn_check(
            sensor.name, f"{sensor.name} watches {path}, which does not exist: it waits until the file is there."
        )
    if not os.access(path, os.R_OK):
        return fail_check(sensor.name, f"{sensor.name} watches {path}, which you may not read: change its permissions.")
    return pass_check(sensor.name, f"{sensor.name} can read {path}.")


async def _address(name: str, url: str) -> Check:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)
    try:
        async with asyncio.timeout(ADDRESS_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return warn_check(name, f"{name} cannot reach {host}:{port} ({why}): check the service and the network.")
    return pass_check(name, f"{name} reaches {host}:{port}; nothing was asked there.")


HOST: Final = "127.0.0.1"
PORT: Final = 8765
MAX_PRICES_AGE_DAYS: Final = 180
"""An older table deserves an update."""
MACHINE_ANSWERS: Final = 2.0
OTHERS_MODE_MASK: Final = 0o077


def check_program() -> Check:
    return pass_check("program", f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}.")


def check_fleet_file(settings: Settings) -> Check:
    from halter.config.merge import read_fleet
    from halter.core.errors import ConfigError

    if settings.fleet is None:
        return pass_check(
            "fleet", "There is no halter.yaml here: the store's policy counts, or the defaults if it has none."
        )
    try:
        read_fleet(settings.fleet)
    except ConfigError as error:
        return fail_check("fleet", str(error))
    return pass_check("fleet", f"{settings.fleet} can be read.")


def check_prices(now: int) -> Check:
    """Check how long the bundled price table has been installed: it does not state its own age."""
    table = distribution("genai-prices")
    since = Path(str(table.locate_file("genai_prices/data.py"))).stat().st_mtime
    days = max(0, now // SECOND - int(since)) // 86_400
    sentence = f"The bundled table of genai-prices {table.version} has been here for {days} days"
    if days > MAX_PRICES_AGE_DAYS:
        return warn_check(
            "prices", f"{sentence}: look for a newer one (pip install -U genai-prices). Your configuration wins."
        )
    return pass_check("prices", f"{sentence}; your configuration wins.")


def check_postgresql() -> Check:
    if find_spec("psycopg") is None:
        return pass_check("postgresql", "No driver here; install halter[postgres] for more than one machine.")
    return pass_check("postgresql", "The driver is here.")


async def check_sandbox() -> Check:
    """Run a command in the sandbox, which verifies its isolation from inside."""
    from halter.tools.shell import Sandbox

    with tempfile.TemporaryDirectory(prefix="halter-doctor-") as root:
        try:
            await Sandbox(Path(root)).verify()
        except Failed as failed:
            return warn_check("sandbox", f"Agents with a shell tool run nothing here, others do: {failed}")
    return pass_check("sandbox", "bubblewrap works: commands of agents are shut in.")


async def check_port(host: str = HOST, number: int = PORT) -> Check:
    try:
        with socket.socket() as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind((host, number))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return warn_check(
                "port", f"{host}:{number} cannot be listened on ({error.strerror}): name another with --listen."
            )
    else:
        return pass_check("port", f"{host}:{number} is free for the dashboard and webhooks; no display is needed here.")
    if await _is_halter(host, number):
        return pass_check("port", f"A Halter answers at {host}:{number}.")
    return warn_check(
        "port", f"{host}:{number} is taken by another program: start Halter with --listen {host}:{number + 1}."
    )


async def _is_halter(host: str, number: int) -> bool:
    try:
        async with asyncio.timeout(MACHINE_ANSWERS):
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
        return fail_check("tokens", f"Others than you may read {path}: run chmod 600 {path}.")
    return pass_check("tokens", f"Only you may read {path}.")


STORE_CONNECTIONS: Final = 3
"""One writes, one reads, one listens."""
MAX_ORPHANED_TICKETS: Final = 1000
"""More tickets without a worker are worth a warning."""
WORKER_KIND: Final = "worker"


class UnclaimedSessions(msgspec.Struct, frozen=True):
    """Due sessions of an agent that no worker has taken, and since when."""

    agent: str
    sessions: int
    since: int | None


async def check_workers(app: Runtime) -> AsyncGenerator[Check]:
    now = app.clock.now()
    found = await workers(Actor(app, Principal(app.settings.person)))
    late = await app.store.ask(Query("late", UnclaimedSessions, {"before": now - MINUTE}))
    switches = await app.store.ask(Query("all_agents", AgentRow))
    off = {row.agent for row in switches if not row.switched_on}
    planned = [plan.trigger for plan in await plan_triggers(app.store, now)]
    on = [row.agent for row in switches if row.switched_on]
    idle = [name for name in (*on, *planned) if name.partition("/")[0] not in off]
    yield check_presence(found, now, idle)
    for check in (check_versions(found), check_agent_files(found)):
        if check is not None:
            yield check
    yield check_due_sessions([each for each in late if each.agent not in off], found, now)
    if app.settings.store.lower().startswith(("postgresql:", "postgres:")):
        async for check in _pressure(app, found, now):
            yield check


def check_presence(found: Sequence[WorkerView], now: int, idle: Sequence[str] = ()) -> Check:
    """Count the live workers by host; report those with a problem, and those lost within the hour.

    `idle` are agents and triggers that run only where a process does.
    """
    alive = [worker for worker in found if worker.alive]
    ill = [f"{name_worker(worker)}: {worker.problem}" for worker in alive if worker.problem]
    if ill:
        return fail_check("workers", " ".join(ill))
    hosts = ", ".join(f"{count} on {host}" for host, count in sorted(Counter(worker.host for worker in alive).items()))
    sentence = f"{_processes(len(alive))} here: {hosts}." if alive else "No process runs agents here now."
    gone = [f"{name_worker(worker)} ({describe_last_heartbeat(worker, now)})" for worker in found if not worker.alive]
    if gone:
        return warn_check(
            "workers",
            f"{sentence} Lost within the hour: {', '.join(gone)}. Their sessions move to workers with the same agents. "
            "Check their machines, and restart them.",
        )
    if idle and not alive:
        names = ", ".join(idle[:MAX_IDLE_NAMES]) + (", …" if len(idle) > MAX_IDLE_NAMES else "")
        return warn_check(
            "workers",
            f"{sentence} These wait for one: {names}. Start `halter up FOLDER`, `halter serve FOLDER` or a worker; "
            "nothing starts by itself until then.",
        )
    return pass_check("workers", sentence)


MAX_IDLE_NAMES: Final = 5


def _processes(count: int) -> str:
    return "1 process runs agents" if count == 1 else f"{count:,} processes run agents"


def check_versions(found: Sequence[WorkerView]) -> Check | None:
    known: dict[str, set[str]] = {}
    for worker in found:
        if worker.alive:
            known.setdefault(worker.version, set()).add(worker.host)
    if len(known) < 2:  # noqa: PLR2004  two are side by side
        return None
    versions = "; ".join(f"{version or 'unknown'} on {', '.join(sorted(known[version]))}" for version in sorted(known))
    return warn_check(
        "versions",
        f"Workers run several versions of Halter ({versions}). That is fine while you bring one machine after the "
        "other to the newer one. If you are done, one was forgotten: install the newer one there, and start it again.",
    )


def check_agent_files(found: Sequence[WorkerView]) -> Check | None:
    waiting = [
        f"{name_worker(worker)}: {describe_outdated_agents(worker)}"
        for worker in found
        if worker.alive and describe_outdated_agents(worker)
    ]
    return warn_check("files", " ".join(waiting)) if waiting else None


def check_due_sessions(late: Sequence[UnclaimedSessions], found: Sequence[WorkerView], now: int) -> Check:
    """Report sessions that have been due for more than a minute without a worker, and why."""
    alive = [worker for worker in found if worker.alive]
    checks = [check for each in late if (check := _check_unclaimed(each, alive, now)) is not None]
    if not checks:
        return pass_check("due", "No due session waits for a worker.")
    sentence = " ".join(check.finding for check in checks)
    return (
        fail_check("due", sentence)
        if any(check.verdict == "problem" for check in checks)
        else warn_check("due", sentence)
    )


def _check_unclaimed(late: UnclaimedSessions, alive: Collection[WorkerView], now: int) -> Check | None:
    since = "" if late.since is None else f" for {format_duration(now - late.since)}"
    have = "has" if late.sessions == 1 else "have"
    what = f"{late.agent} has {format_count(late.sessions, 'session')} that {have} been due{since}, and"
    having = [worker for worker in alive if late.agent in worker.agents]
    taking = [worker for worker in having if worker.health == "alive" and late.agent not in worker.waiting]
    if not having:
        sentence = (
            f"{what} no live process has its folder: give it to `halter up` or `halter worker`, or run "
            f"halter off {late.agent}."
        )
        # Before a start nothing runs, and that is nothing wrong.
        return fail_check("due", sentence) if alive else warn_check("due", sentence)
    if not taking:
        sentence = (
            f"{what} the workers with its folder wait for newer files, or are about to end "
            f"({', '.join(map(name_worker, having))}): update its folder there, and restart them."
        )
        return fail_check("due", sentence)
    if all(worker.awake >= worker.concurrency for worker in taking):
        sentence = f"{what} all workers with its folder are busy: start another worker, or raise --concurrency."
        return warn_check("due", sentence)
    return None


async def _pressure(app: Runtime, found: Sequence[WorkerView], now: int) -> AsyncGenerator[Check]:
    from halter.dispatch.ticket_queue import CONNECTIONS, name_queue
    from halter.journal.connection import measure_pressure

    rows = await app.store.ask(Query("all_workers", WorkerRow))
    served = {name_queue(*each) for row in rows if row.alive(now) for each in row.told().agents.items()}
    pressed = await asyncio.to_thread(measure_pressure, app.settings.store)
    kinds = [worker.kind for worker in found if worker.alive]
    # One more connection than it pools hears of new tickets.
    yield check_connections(pressed.most, pressed.used, kinds, STORE_CONNECTIONS + CONNECTIONS + 1)
    waiting = [each for each in pressed.queued if each.queue in served]
    orphaned = sum(each.jobs for each in pressed.queued if each.queue not in served)
    yield check_queue(sum(each.jobs for each in waiting), max((each.age for each in waiting), default=0), orphaned)


def check_connections(limit: int, used: int, kinds: Sequence[str], each: int) -> Check:
    needed = sum(each if kind == WORKER_KIND else STORE_CONNECTIONS for kind in kinds)
    sentence = (
        f"PostgreSQL has {limit:,} connections for programs, of which {used:,} are in use; those who run agents here "
        f"need up to {needed:,}, and each worker up to {each}"
    )
    if needed > limit or limit - used < each:
        return warn_check("connections", f"{sentence}: raise max_connections before you start another.")
    return pass_check("connections", f"{sentence}.")


def check_queue(waiting: int, age: int, orphaned: int) -> Check:
    """Check whether tickets pile up, with or without a worker to take them."""
    if age > MINUTE:
        return warn_check(
            "queue",
            f"{format_count(waiting, 'ticket')} wait in the queue, the oldest for {format_duration(age)}: the workers "
            "are busy, or cannot reach PostgreSQL. Check their logs; start another, or raise --concurrency.",
        )
    if orphaned > MAX_ORPHANED_TICKETS:
        return warn_check(
            "queue",
            f"{format_count(orphaned, 'ticket')} are left over from versions that no worker runs. They do no harm: "
            "their sessions were offered again. Remove them from procrastinate_jobs at your leisure.",
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


async def _check_counts(app: Runtime) -> Check:
    (counts,) = await app.store.ask(Query("counts", StoreCounts))
    meta = {row.name: row.value for row in await app.store.ask(Query("meta", StoreMeta))}
    held = f"{counts.events:,} events in {counts.streams:,} streams, {format_count(counts.sessions, 'session')}"
    return pass_check("store", f"Schema {meta['schema']}, {held}. Id {meta['store']}.")


def _file(path: Path) -> Check:
    """Check that the file is writable, and that SQLite finds its pages in order."""
    from halter.journal.sqlite import is_read_only, open_read_only

    if is_read_only(str(path)):
        return fail_check("file", f"{path} is read-only: make it and its folder writable.")
    try:
        with closing(open_read_only(str(path))) as connection:
            (text,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        text = str(error)
    if text != "ok":
        return fail_check("file", f"{path} is damaged ({text}): stop all agents, copy it, and restore a backup.")
    return pass_check("file", f"{path} can be written, and its pages are in order.")


def check_disk(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return warn_check("disk", f"The disk of {folder} cannot be looked at ({error.strerror}).")
    sentence = f"{free / (1 << 30):,.1f} GiB are free for {folder}"
    if free < MIN_DISK_BYTES:
        return fail_check(
            "disk", f"Only {sentence}: make room, or nothing can be written down, and nothing will be done."
        )
    if free < WARN_DISK_BYTES:
        return warn_check("disk", f"Only {sentence}: make room before a long night.")
    return pass_check("disk", f"{sentence}.")


async def _clock(app: Runtime) -> Check:
    """Compare this machine's clock with the server's. A store that is a file uses this machine's."""
    if isinstance(app.clock, StoreClock):
        await sync_store_clock(app.store, app.clock)
        if refusal := app.clock.refusal():
            return fail_check("clock", refusal)
    return pass_check("clock", "This machine and the store agree on the time.")


def _checkpoints(app: Runtime) -> Check:
    if app.doubt is not None:
        return fail_check("checkpoints", app.doubt.sentence())
    app.checkpointer.rehearse()
    if app.checkpointer.problem:
        return fail_check("checkpoints", app.checkpointer.problem)
    return pass_check("checkpoints", f"Signed heads go to {app.settings.checkpoints}.")


async def read_local_policy(app: Runtime) -> "FleetConfig | None":
    """Read the policy in force here; None where it cannot be read."""
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    try:
        return (await resolve_effective_policy(app.store, read_local_fleet(app.settings))).fleet
    except ConfigError:
        return None


async def _policy(app: Runtime) -> Check:
    """Compare the store's policy with the local file."""
    from halter.runtime.runtime import read_local_fleet, resolve_effective_policy

    try:
        found = await resolve_effective_policy(app.store, read_local_fleet(app.settings))
    except ConfigError as error:
        return fail_check("policy", str(error))
    if found.row is None:
        return pass_check(
            "policy", "This store has no policy yet: the first halter.yaml that is used on it becomes its own."
        )
    if sentence := found.describe_difference():
        return warn_check("policy", sentence)
    return pass_check("policy", f"This store's policy was adopted by {found.row.by} on {format_moment(found.row.at)}.")


async def _check_holds(app: Runtime) -> Check:
    holds = await app.store.ask(Query("holds", HoldRow))
    old = [hold for hold in holds if hold.at < app.clock.now() - MAX_HOLD_AGE]
    if old:
        oldest = format_duration(app.clock.now() - old[0].at)
        count = "1 hold" if len(old) == 1 else f"{len(old):,} holds"
        finding = (
            f"{count} older than an hour (the oldest {oldest}, session {old[0].session}): such a session waits for a "
            "worker, or for a person to say what became of it. No timer frees a hold."
        )
        return warn_check("holds", finding)
    return pass_check("holds", f"{len(holds)} open, none of them old.")


async def _switches(app: Runtime) -> Check:
    rows = await app.store.ask(Query("all_agents", AgentRow))
    sentences = [f"{row.agent} is {'on' if row.switched_on else 'off'}, by {row.by}" for row in rows]
    sessions = await app.store.ask(Query("sessions_under_way", SessionRow))
    left = [row for row in sessions if row.kind == "autonomous" and row.state == "PAUSED"]
    if left:
        words = (f"{row.session} waits for you: halter show {row.session}, then halter on {row.agent}." for row in left)
        return fail_check("autonomy", " ".join(words))
    return pass_check("autonomy", f"{'; '.join(sentences)}." if sentences else "No agent has run by itself here.")

"""The demo's folder with its own store, trust file and agent; its dashboard; and the environment of the agent.

That environment is a service with periodic outages, its log, and an old file that can be deleted.
"""

import asyncio
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

from halter.config.trust import TrustFile, digest_folder
from halter.core.clock import DAY, MINUTE, SECOND, Clock
from halter.core.errors import ConfigError
from halter.demo.incidents import NightRecord
from halter.loop.concurrency import run_together
from halter.models.providers import is_installed
from halter.runtime.feed import Bus
from halter.runtime.runtime import Runtime
from halter.server.auth import Keyring, make_secret, make_token, suggest_token_name
from halter.server.listener import HOST, PORT, bind, format_address, require_server
from halter.server.login import make_login_url
from halter.server.server import ServerExtras, serve_web
from halter.settings import Settings
from halter.spec.models import KNOWN_PROVIDERS

AGENT: Final = "night-watch"
FILES: Final = ("agent.yaml", "rules.yaml", "tools.py", "AGENTS.md")
FOLDERS: Final = ("logs", "temp")
RULES_MODEL: Final = "reflex"
MANIFEST_FILE: Final = "shipped.json"
"""The file with the digests of the files that the demo wrote; a file with another digest was changed by a person."""
MODELS: Final = (
    ("anthropic", "anthropic:claude-haiku-5-5"),
    ("openai", "openai:gpt-6-luna"),
    ("google", "google:gemini-3.8-flash"),
)
"""A small model of each provider; the demo uses the first one whose key is set."""

IsInstalled = Callable[[str], bool]


class DemoFolder(msgspec.Struct, frozen=True):
    root: Path

    @property
    def agent(self) -> Path:
        return self.root / AGENT

    @property
    def store(self) -> Path:
        return self.root / "halter.db"

    def settings(self, person: str) -> Settings:
        """Make settings that keep all files in this folder."""
        return Settings(
            store=str(self.store),
            checkpoints=self.root / "checkpoints",
            signing_key=self.root / "signing.key",
            person=person,
            trust=self.root / "trust.json",
        )


def find_demo_folder(environ: Mapping[str, str], home: Path | None) -> DemoFolder:
    """Find the demo's folder, which is next to the default store even if another store is set."""
    state = Path(environ["XDG_STATE_HOME"]) if environ.get("XDG_STATE_HOME") else home and home / ".local" / "state"
    if state is None:
        raise ConfigError("The demo needs a home folder. Set HOME or XDG_STATE_HOME.")
    return DemoFolder(state.absolute() / "halter" / "demo")


def choose_demo_model(environ: Mapping[str, str], installed: IsInstalled = is_installed) -> str:
    """Choose the first model whose key is set, or else the rules."""
    if not installed("pydantic_ai"):
        return RULES_MODEL
    models = (model for provider, model in MODELS if any(environ.get(key) for key in KNOWN_PROVIDERS[provider].keys))
    return next(models, RULES_MODEL)


NIGHT_STORE: Final = "night.db"


@contextmanager
def record_night(demo_folder: DemoFolder, person: str, now: int) -> Generator[NightRecord | None]:
    """Yield the record of the night, and make its store the demo's store when it is complete.

    Yields None and changes nothing if the demo already has a store.
    """
    draft_store = demo_folder.root / NIGHT_STORE
    if demo_folder.store.exists():
        yield None
        return
    try:
        demo_folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _drop(draft_store)
        draft_store.touch(mode=0o600)
        yield NightRecord(draft_store, now, person)
        draft_store.rename(demo_folder.store)
    except OSError as error:
        raise ConfigError(explain_unwritable(demo_folder, error)) from error
    finally:
        _drop(draft_store)


def _drop(store: Path) -> None:
    for file in (store, *(store.with_name(f"{store.name}{end}") for end in ("-wal", "-shm"))):
        file.unlink(missing_ok=True)


def explain_unwritable(demo_folder: DemoFolder, error: OSError) -> str:
    return (
        f"The demo cannot write to its folder {demo_folder.root} ({error.strerror or error}). "
        "Set XDG_STATE_HOME to a folder that you can write to."
    )


class LayoutResult(msgspec.Struct, frozen=True):
    """Notes for the user about the agent's files, and the files that a person changed."""

    notes: Sequence[str]
    changed: Sequence[str] = ()


def lay_out_files(demo_folder: DemoFolder, model: str, by: str, now: int) -> LayoutResult:
    """Write the agent's files, except those that a person changed; trust the code if it is the shipped one."""
    try:
        demo_folder.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (demo_folder.root, demo_folder.agent, *(demo_folder.agent / name for name in FOLDERS)):
            folder.mkdir(mode=0o700, exist_ok=True)
        # Earlier versions kept this file in the agent's folder, where every file must be trusted.
        (demo_folder.agent / "service.port").unlink(missing_ok=True)
        changed_files = _write_unchanged_files(demo_folder, {name: read_shipped_file(name, model) for name in FILES})
    except OSError as error:
        raise ConfigError(explain_unwritable(demo_folder, error)) from error
    sentences = [f"Using your changed {', '.join(changed_files)}."] if changed_files else []
    return LayoutResult((*sentences, _trust_shipped_code(demo_folder, by, now)), changed_files)


def read_shipped_file(name: str, model: str = RULES_MODEL) -> bytes:
    """Read a shipped file; agent.yaml with the chosen model."""
    text = (files("halter.demo") / AGENT / name).read_bytes()
    if name != FILES[0] or model == RULES_MODEL:
        return text
    return text.replace(b"\nmodel: reflex\n", f"\nmodel: {model}\nfallback_models: [reflex]\n".encode())


def _write_unchanged_files(demo_folder: DemoFolder, contents: Mapping[str, bytes]) -> list[str]:
    """Write the files that no person has changed; return the others."""
    digests = _manifest(demo_folder.root / MANIFEST_FILE)
    new_digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    changed_files = [
        name
        for name in contents
        if _digest(demo_folder.agent / name) not in (None, digests.get(name), new_digests[name])
    ]
    for name, content in contents.items():
        if name not in changed_files:
            (demo_folder.agent / name).write_bytes(content)
            digests[name] = new_digests[name]
    (demo_folder.root / MANIFEST_FILE).write_bytes(msgspec.json.encode(digests))
    return changed_files


def _manifest(file: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


def _trust_shipped_code(demo_folder: DemoFolder, by: str, now: int) -> str:
    """Trust the shipped code in the demo's own trust file. Changed code needs a person's trust."""
    digest, trust = digest_folder(demo_folder.agent), TrustFile(demo_folder.root / "trust.json")
    if digest == digest_shipped_code():
        trust.trust(demo_folder.agent, digest, by, now)
        return f"Its tools.py is the shipped one ({digest[:12]}); only the demo trusts it."
    if not trust.is_trusted(demo_folder.agent, digest):
        raise ConfigError(
            f"The code in {demo_folder.agent} differs from the shipped code. Review it, then run: "
            f"HALTER_TRUST={demo_folder.root / 'trust.json'} halter trust {demo_folder.agent}"
        )
    return "Its code differs from the shipped code; you trusted it."


def digest_shipped_code() -> str:
    """Compute the digest of the shipped code in an empty folder."""
    with TemporaryDirectory(prefix="halter-demo-") as clean:
        for name in FILES:
            Path(clean, name).write_bytes(read_shipped_file(name))
        return digest_folder(Path(clean))


MAX_PORTS_TRIED: Final = 20
"""Number of ports to try in order, before any free one is used."""


class DemoDashboard(msgspec.Struct, frozen=True):
    """A dashboard that can be served: its login address, and a note about it."""

    url: str
    note: str
    serve: Callable[[], Coroutine[Any, Any, None]]


def open_demo_dashboard(app: Runtime, bus: Bus, report: Callable[[str], None], first: int = PORT) -> DemoDashboard:
    """Bind a port and make a token that is not stored. Raises ConfigError if the extra `server` is not installed."""
    require_server()

    listener = bind_free_port(first)
    port = listener.getsockname()[1]
    secret = make_secret()
    keys = Keyring(extra=[make_token(secret, suggest_token_name(app.settings.person), "admin", app.clock.now())])
    port_note = f"Port {first} is in use; the dashboard is on port {port}. " if port != first else ""
    return DemoDashboard(
        make_login_url(format_address(listener), secret),
        f"{port_note}Open the dashboard at this address, which is valid until the demo ends:",
        lambda: serve_web(app, listener, keys, bus, ServerExtras(report=report)),
    )


def bind_free_port(first_port: int) -> socket.socket:
    for port in range(first_port, first_port + MAX_PORTS_TRIED):
        try:
            return bind(HOST, port)
        except ConfigError:
            continue
    return bind(HOST, 0)


def has_display(environ: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Return True if a browser can open on this machine."""
    return platform == "darwin" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


DOWN_PERIOD: Final = (12 * SECOND, 27 * SECOND)
"""When the service is down in each round."""
SERVICE_ROUND: Final = 4 * MINUTE
LEFTOVER_AFTER: Final = 33 * SECOND
LEFTOVER: Final = "leftover.tmp"
LEFTOVER_INTERVAL: Final = 7 * MINUTE
"""Time between two files; by then the approval for the last one has expired."""
MAX_LEFTOVERS: Final = 9
"""Enough files for approvals over an hour, but not for a whole night."""
LEFTOVER_ABSENCE: Final = 10 * SECOND
"""Time between removing the file and writing it again, so that it counts as new."""
LEFTOVER_AGE: Final = 40 * DAY
LOG_INTERVAL: Final = 10 * SECOND
LOG_BYTES: Final = 64_000
"""A longer log is truncated."""


def is_down(elapsed: int) -> bool:
    down_from, down_until = DOWN_PERIOD
    return down_from <= elapsed % SERVICE_ROUND < down_until


class Scenery:
    """The environment of the agent, in its folder and on this machine."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._began = clock.now()

    async def run_with(self, agent: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the environment while the agent runs."""
        async with await self._serving():
            await run_together([agent, self._log, self._leave_file])

    async def _serving(self) -> asyncio.Server:
        """Start the service on any free local port, and write the port to a file."""
        try:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            (self._folder / "logs" / "service.port").write_text(str(server.sockets[0].getsockname()[1]), "utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot start the demo's service: {error}.") from error
        return server

    @property
    def _down(self) -> bool:
        return is_down(self._clock.now() - self._began)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            status = b"503 Service Unavailable" if self._down else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            await writer.drain()
        writer.close()

    async def _log(self) -> None:
        """Write a log line at intervals; to errors.log while the service is down. A full disk is ignored."""
        while True:
            name, status = ("errors.log", "503") if self._down else ("service.log", "200")
            with suppress(OSError):
                _append(self._folder / "logs" / name, f"{self._clock.now() // SECOND} GET / {status}\n")
            await self._clock.sleep(LOG_INTERVAL)

    async def _leave_file(self) -> None:
        """Write an old file, and write it again after the agent's approval expires."""
        file = self._folder / "temp" / LEFTOVER
        with suppress(OSError):
            if file.stat().st_ctime * SECOND < self._clock.now() - LEFTOVER_INTERVAL:
                file.unlink()
        await self._clock.sleep(LEFTOVER_AFTER)
        for _ in range(MAX_LEFTOVERS):
            _write_aged(file, self._clock.now() - LEFTOVER_AGE)
            await self._clock.sleep(LEFTOVER_INTERVAL - LEFTOVER_ABSENCE)
            _remove(file)
            await self._clock.sleep(LEFTOVER_ABSENCE)


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


def _write_aged(file: Path, moment: int) -> None:
    with suppress(OSError):
        if not file.exists():
            file.write_text("The demo wrote this file and made it look old. It can be deleted.\n", "utf-8")
            os.utime(file, (moment / SECOND, moment / SECOND))


def _append(file: Path, line: str) -> None:
    size = file.stat().st_size if file.exists() else 0
    with file.open("a" if size < LOG_BYTES else "w", encoding="utf-8") as log:
        log.write(line)

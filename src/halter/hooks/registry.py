"""The folder of hooks: the key, the socket, and the agents of the hooked programs."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from halter.core.errors import ConfigError
from halter.core.text import suggest_nearest
from halter.hooks.client import KEY_BYTES, KEY_FILE, SOCKET_FILE
from halter.server.auth import PrivateFile
from halter.settings import HOOKED_AGENTS_FILE, Settings

DEFAULT_WAIT_SECONDS: Final = 100
"""Maximum wait of a hook for a person. After it, the program defers the call, or its model has to repeat it."""
MAX_SOCKET_PATH_LENGTH: Final = 100
_OTHER_USERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Installation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A settings file, with its text before and after the hooks were added."""

    file: str
    before: str | None
    after: str


class HookedProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An agent with the policy of another program. `folder` has its agent.yaml; `prices` are dollars by tool."""

    agent: str
    program: str
    folder: str
    wait_seconds: int = DEFAULT_WAIT_SECONDS
    prices: Mapping[str, float] = {}
    version: str = ""
    installed: tuple[Installation, ...] = ()


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    agents: tuple[HookedProgram, ...] = ()


class HookFolder:
    """The folder with the key, the socket and the hooked agents. Only its owner may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PrivateFile(path / HOOKED_AGENTS_FILE)
        self._state: tuple[int, ...] | None = None
        self._cache: Mapping[str, HookedProgram] = {}

    @property
    def socket(self) -> Path:
        return self.path / SOCKET_FILE

    def agents(self) -> Mapping[str, HookedProgram]:
        """Read the agents of hooked programs, by name. Raises ConfigError if the file cannot be trusted or read."""
        state = self._file.read_state()
        if state != self._state:
            self._cache, self._state = self._read(), state
        return self._cache

    def find(self, agent: str) -> HookedProgram:
        entry = self.agents().get(agent)
        if entry is None:
            hint = suggest_nearest(agent, sorted(self.agents()), "the agents with hooks")
            raise ConfigError(f"No hooks are installed for the agent {agent!r}; {hint}")
        return entry

    def save(self, entry: HookedProgram) -> None:
        with self._file.lock():
            others = [each for each in self._read().values() if each.agent != entry.agent]
            self._file.write(_Content((*others, entry)))

    def remove(self, agent: str) -> None:
        with self._file.lock():
            self._file.write(_Content(tuple(each for each in self._read().values() if each.agent != agent)))

    def drop_installation(self, entry: HookedProgram, file: str) -> None:
        remaining = tuple(each for each in entry.installed if each.file != file)
        self.save(replace(entry, installed=remaining))

    def key(self, *, make: bool = False) -> bytes:
        """Read the key that hooks and server share. Raises ConfigError if other users may read it."""
        path = self.path / KEY_FILE
        try:
            if make:
                self._make_key(path)
            status = path.stat()
            if status.st_mode & _OTHER_USERS or status.st_uid != os.getuid():
                raise ConfigError(f"Other users may read {path}. Remove it, and run `halter hook install` again.")
            key = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist. Run `halter hook install` first.") from None
        except OSError as error:
            raise ConfigError(f"Cannot use {path}: {error.strerror or error}.") from error
        if len(key) != KEY_BYTES:
            raise ConfigError(f"{path} is damaged. Remove it, and run `halter hook install` again.")
        return key

    def _make_key(self, path: Path) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))

    def _read(self) -> Mapping[str, HookedProgram]:
        data = self._file.read()
        try:
            content = _Content() if data is None else msgspec.json.decode(data, type=_Content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._file.path} is damaged ({error}). Remove it, and run `halter hook install` again."
            ) from None
        return {each.agent: each for each in content.agents}


def find_hook_folder(settings: Settings) -> HookFolder:
    if settings.hooks is None:
        raise ConfigError("No home folder found. Set HALTER_HOOKS or HOME.")
    folder = HookFolder(settings.hooks.absolute())
    if len(os.fsencode(folder.socket)) > MAX_SOCKET_PATH_LENGTH:
        raise ConfigError(f"{folder.path} is too long for a socket path. Set HALTER_HOOKS to a shorter path.")
    return folder


def has_hooks(settings: Settings) -> bool:
    """Return True if hooks are installed for any agent. Raises ConfigError if the file cannot be read.

    The length of the socket's path is not checked, because without hooks there is no socket.
    """
    return settings.hooks is not None and bool(HookFolder(settings.hooks.absolute()).agents())

"""The paths and names of the environment, read once at startup."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import AGENT_PREFIX, normalize_person
from halter.core.tools import AGENT_VARIABLE

_STATE: Final = ("XDG_STATE_HOME", ".local/state")
_CONFIG: Final = ("XDG_CONFIG_HOME", ".config")
HOOKED_AGENTS_FILE: Final = "agents.json"
_PROGRAM_VARIABLES: Final[Mapping[str, str]] = {
    "CLAUDECODE": "claude-code",
    "GEMINI_CLI": "gemini-cli",
    "CURSOR_AGENT": "cursor",
    "CODEX_SANDBOX": "codex",
}
"""The variable that each of these programs sets in the processes that its tools start."""


class Settings(msgspec.Struct, frozen=True):
    """The paths that Halter uses, and the name of its user.

    `trust` is the file that lists the folders whose code may run; `fleet` is the fleet's file, or None for the
    defaults; `fleets` are the paths where it is searched; `tokens` is the file of the server's access tokens; `hooks`
    is the folder of the hooks into other programs.
    """

    store: str
    checkpoints: Path
    signing_key: Path
    person: str
    trust: Path | None = None
    fleet: Path | None = None
    tokens: Path | None = None
    fleets: tuple[Path, ...] = ()
    hooks: Path | None = None


def find_home(environ: Mapping[str, str]) -> Path | None:
    """Return the home folder of the environment, else of the process's user, or None if there is none."""
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        return None


def read_settings(environ: Mapping[str, str], home: Path | None, store: str | None = None) -> Settings:
    """Read settings from the arguments, else the environment, else the default paths in the home folder."""

    def find_path(variable: str, xdg: str, default_folder: str, name: str) -> Path | None:
        if environ.get(variable):
            return Path(environ[variable])
        if environ.get(xdg):
            return Path(environ[xdg]) / "halter" / name
        return None if home is None else home / default_folder / "halter" / name

    def require_path(variable: str, xdg: str, default_folder: str, name: str) -> Path:
        path = find_path(variable, xdg, default_folder, name)
        if path is None:
            raise ConfigError(f"No home folder found. Set {variable} or HOME.")
        return path

    hooks = find_path("HALTER_HOOKS", *_CONFIG, "hooks")
    user_fleet = find_path("", *_CONFIG, "halter.yaml")
    fleets = (Path("halter.yaml"), *([user_fleet] if user_fleet else []))
    fleet = next((path for path in fleets if path.is_file()), None)
    return Settings(
        store=store or environ.get("HALTER_STORE") or str(require_path("HALTER_STORE", *_STATE, "halter.db")),
        checkpoints=require_path("HALTER_CHECKPOINTS", *_STATE, "checkpoints"),
        signing_key=require_path("HALTER_SIGNING_KEY", *_CONFIG, "signing.key"),
        person=name_hooked_program(environ, hooks) or name_person(environ),
        trust=find_path("HALTER_TRUST", *_CONFIG, "trust.json"),
        fleet=Path(environ["HALTER_FLEET"]) if environ.get("HALTER_FLEET") else fleet,
        tokens=find_path("HALTER_TOKENS", *_CONFIG, "tokens.json"),
        fleets=fleets,
        hooks=hooks,
    )


def find_logins_file(tokens: Path) -> Path:
    return tokens.with_suffix(".logins.json")


def name_hooked_program(environ: Mapping[str, str], hooks: Path | None) -> str:
    """Name the hooked program that started this process by a tool call, so that it does not act as a person.

    Returns an empty string if no such program did.
    """
    if hooks is None or not (hooks / HOOKED_AGENTS_FILE).is_file():
        return ""
    return next((f"{AGENT_PREFIX}{name}" for variable, name in _PROGRAM_VARIABLES.items() if environ.get(variable)), "")


def find_keys_file(tokens: Path) -> Path:
    """Return the file of the proxy's virtual keys, next to the tokens file."""
    return tokens.with_suffix(".keys.json")


def name_person(environ: Mapping[str, str]) -> str:
    """Name the user. A process that an agent started has `HALTER_AGENT` set, and is not a person."""
    if environ.get(AGENT_VARIABLE):
        return f"{AGENT_PREFIX}{environ[AGENT_VARIABLE]}"
    names = (normalize_person(environ.get(variable, "")) for variable in ("HALTER_PERSON", "LOGNAME", "USER"))
    return next(filter(None, names), "") or name_user(os.getuid())


def name_user(number: int) -> str:
    """Name a user, by number if the user database has no entry, as in many containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"

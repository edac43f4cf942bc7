"""Paths and names from the environment, read once at startup."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import AGENT_PREFIX
from halter.core.tools import AGENT_VARIABLE

_STATE: Final = ("XDG_STATE_HOME", ".local/state")
_CONFIG: Final = ("XDG_CONFIG_HOME", ".config")
HOOKED_AGENTS_FILE: Final = "agents.json"
_PROGRAM_MARKS: Final[Mapping[str, str]] = {
    "CLAUDECODE": "claude-code",
    "GEMINI_CLI": "gemini-cli",
    "CURSOR_AGENT": "cursor",
    "CODEX_SANDBOX": "codex",
}
"""The variable that each of these programs sets for what its tools start."""


class Settings(msgspec.Struct, frozen=True):
    """The paths that Halter uses, and the name of its user.

    `trust` lists the folders whose code may run; `fleet` is the fleet's file, or None for the defaults; `fleets` is
    where it is searched; `tokens` has the access tokens of the server; `hooks` is the folder of hooks into other
    programs.
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
    """Returns the home folder of this environment, else of this process's user, or None where there is none."""
    try:
        return Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        return None


def read_settings(environ: Mapping[str, str], home: Path | None, store: str | None = None) -> Settings:
    """Use the arguments, else the environment, else the default paths under the home folder."""

    def place(variable: str, xdg: str, usual: str, name: str) -> Path | None:
        if environ.get(variable):
            return Path(environ[variable])
        if environ.get(xdg):
            return Path(environ[xdg]) / "halter" / name
        return None if home is None else home / usual / "halter" / name

    def needed(variable: str, xdg: str, usual: str, name: str) -> Path:
        found = place(variable, xdg, usual, name)
        if found is None:
            raise ConfigError(f"There is no home folder, and {variable} is not set: set it, or HOME.")
        return found

    hooks = place("HALTER_HOOKS", *_CONFIG, "hooks")
    usual = place("", *_CONFIG, "halter.yaml")
    fleets = (Path("halter.yaml"), *([usual] if usual else []))
    found = next((path for path in fleets if path.is_file()), None)
    return Settings(
        store=store or environ.get("HALTER_STORE") or str(needed("HALTER_STORE", *_STATE, "halter.db")),
        checkpoints=needed("HALTER_CHECKPOINTS", *_STATE, "checkpoints"),
        signing_key=needed("HALTER_SIGNING_KEY", *_CONFIG, "signing.key"),
        person=name_hooked_program(environ, hooks) or name_person(environ),
        trust=place("HALTER_TRUST", *_CONFIG, "trust.json"),
        fleet=Path(environ["HALTER_FLEET"]) if environ.get("HALTER_FLEET") else found,
        tokens=place("HALTER_TOKENS", *_CONFIG, "tokens.json"),
        fleets=fleets,
        hooks=hooks,
    )


def find_logins_file(tokens: Path) -> Path:
    return tokens.with_suffix(".logins.json")


def name_hooked_program(environ: Mapping[str, str], hooks: Path | None) -> str:
    """Name the program with hooks that started this process by a tool call: what it types is no person's word."""
    if hooks is None or not (hooks / HOOKED_AGENTS_FILE).is_file():
        return ""
    return next((f"{AGENT_PREFIX}{name}" for mark, name in _PROGRAM_MARKS.items() if environ.get(mark)), "")


def find_keys_file(tokens: Path) -> Path:
    """The file of the proxy's virtual keys, beside the tokens file."""
    return tokens.with_suffix(".keys.json")


def name_person(environ: Mapping[str, str]) -> str:
    """Name the user. A process that an agent started has a variable of its own, and is not a person."""
    if environ.get(AGENT_VARIABLE):
        return f"{AGENT_PREFIX}{environ[AGENT_VARIABLE]}"
    return environ.get("HALTER_PERSON") or environ.get("LOGNAME") or environ.get("USER") or name_user(os.getuid())


def name_user(number: int) -> str:
    """Name a user; without an entry in the user database, as in many containers, by number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"

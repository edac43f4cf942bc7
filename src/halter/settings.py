"""Where things are, as the environment says. It is read once, at the outermost door, and passed on."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.errors import ConfigError

_STATE: Final = ("XDG_STATE_HOME", ".local/state")
_CONFIG: Final = ("XDG_CONFIG_HOME", ".config")


class Settings(msgspec.Struct, frozen=True):
    """The places that Halter uses, and the name of whoever uses it."""

    store: str
    checkpoints: Path
    signing_key: Path
    person: str


def read_settings(environ: Mapping[str, str], home: Path | None, store: str | None = None) -> Settings:
    """Take what is given, else what the environment says, else the usual places under the home folder."""

    def place(variable: str, xdg: str, usual: str, name: str) -> Path:
        if environ.get(variable):
            return Path(environ[variable])
        if environ.get(xdg):
            return Path(environ[xdg]) / "halter" / name
        if home is None:
            raise ConfigError(f"You have no home folder, and {variable} is not set: set it, or HOME.")
        return home / usual / "halter" / name

    return Settings(
        store=store or environ.get("HALTER_STORE") or str(place("HALTER_STORE", *_STATE, "halter.db")),
        checkpoints=place("HALTER_CHECKPOINTS", *_STATE, "checkpoints"),
        signing_key=place("HALTER_SIGNING_KEY", *_CONFIG, "signing.key"),
        person=environ.get("HALTER_PERSON") or environ.get("LOGNAME") or environ.get("USER") or login(os.getuid()),
    )


def login(number: int) -> str:
    """Name a user; one without an entry in the system's list, as in many containers, by the number alone."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"

"""Where things are, as the environment says. It is read once, at the outermost door, and passed on."""

import getpass
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """The places that Halter uses, and the name of whoever uses it."""

    store: str
    checkpoints: Path
    signing_key: Path
    person: str


def read_settings(environ: Mapping[str, str], home: Path, store: str | None = None) -> Settings:
    """Take what is given, else what the environment says, else the usual places under the home folder."""
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "halter"
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "halter"
    return Settings(
        store=store or environ.get("HALTER_STORE") or str(state / "halter.db"),
        checkpoints=Path(environ.get("HALTER_CHECKPOINTS") or state / "checkpoints"),
        signing_key=Path(environ.get("HALTER_SIGNING_KEY") or config / "signing.key"),
        person=environ.get("HALTER_PERSON") or _login(environ),
    )


def _login(environ: Mapping[str, str]) -> str:
    return environ.get("LOGNAME") or environ.get("USER") or getpass.getuser()

"""Virtual keys: what a client shows instead of a provider's key.

Each is bound to an agent, whose account it spends from, and has caps and models of its own. Only its digest is kept, in
a file that only its owner may read; a revoked one stays there, so that its client is told to stop instead of to log in.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.errors import ConfigError
from halter.core.ids import may_decide
from halter.server.auth import NAME, PrivateFile

KEY_PREFIX: Final = "sk-halter-"
_KEY: Final = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEY_BYTES: Final = 32


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key may spend and ask. The day's cap is the agent's: its keys share one account.

    `max_cost_usd` is the cap of one client session, which without one is bound by the windows alone.
    """

    max_cost_usd: Decimal | None = None
    max_cost_usd_per_hour: Decimal | None = None
    max_cost_usd_per_day: Decimal | None = None
    tokens_per_hour: int | None = None
    models: tuple[str, ...] = ()
    mask_secrets: bool = False
    """Masks secrets in what its clients send, the operator's own and all that look like one."""


class VirtualKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    agent: str
    digest: str
    made_at: int
    made_by: str = ""
    limits: KeyLimits = KeyLimits()
    revoked_at: int | None = None

    def agent_keys(self, *, session_capped: bool) -> Mapping[str, Any]:
        """The limits as keys of an agent's file; `session_capped` says that the fleet caps every session."""
        limits: dict[str, Any] = {
            name: float(value)
            for name in ("max_cost_usd", "max_cost_usd_per_hour", "max_cost_usd_per_day")
            if (value := getattr(self.limits, name)) is not None
        }
        if "max_cost_usd" not in limits and not session_capped:
            limits["max_cost_usd"] = "none"
        models = {"allowed_models": list(self.limits.models)} if self.limits.models else {}
        return {"name": self.agent, "limits": limits, **models}


def make_key_secret(randomly: Callable[[int], bytes] = secrets.token_bytes) -> str:
    return KEY_PREFIX + base64.urlsafe_b64encode(randomly(_KEY_BYTES)).decode().rstrip("=")


def digest_key(secret: str) -> str:
    return hashlib.sha256(b"halter key\n" + secret.encode("utf-8", "replace")).hexdigest()


def describe_key(secret: str, name: str, agent: str, made_at: int, made_by: str, limits: KeyLimits) -> VirtualKey:
    """Makes a key's record. Raises ConfigError for a name that cannot be one."""
    for word, what in ((name, "a key"), (agent, "an agent")):
        if not NAME.fullmatch(word) or not may_decide(word):
            raise ConfigError(
                f"{word!r} cannot be the name of {what}: write small letters, digits, dots, dashes or underscores, "
                "up to 64 of them."
            )
    for amount in (limits.max_cost_usd, limits.max_cost_usd_per_hour, limits.max_cost_usd_per_day):
        if amount is not None and not (amount.is_finite() and amount > 0):
            raise ConfigError(f"{amount} is no cap: write dollars above zero, as in 2.00.")
    return VirtualKey(name, agent, digest_key(secret), made_at, made_by, limits)


class KeyFile:
    """The kept keys. Every method but `state` raises ConfigError on failure."""

    def __init__(self, path: Path) -> None:
        self._file = PrivateFile(path)

    def read_keys(self) -> tuple[VirtualKey, ...]:
        data = self._file.read()
        if data is None:
            return ()
        try:
            kept = msgspec.json.decode(data, type=_StoredKeys).keys
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._file.path} cannot be read ({error}): remove it, and make new keys.") from None
        if not all(_DIGEST.fullmatch(key.digest) for key in kept):
            raise ConfigError(f"{self._file.path} has a key that Halter did not make: remove it, and make new keys.")
        return kept

    def add(self, key: VirtualKey) -> None:
        with self._file.lock():
            keys = self.read_keys()
            if any(each.name == key.name and each.revoked_at is None for each in keys):
                raise ConfigError(
                    f"There is a key called {key.name} already: `halter keys revoke {key.name}` ends it, "
                    "and --name gives another name."
                )
            self._file.write({"keys": (*keys, key)})

    def revoke(self, name: str, at: int) -> bool:
        """Revokes a key at once; returns whether there was one."""
        with self._file.lock():
            keys = self.read_keys()
            named = [key for key in keys if key.name == name and key.revoked_at is None]
            revoked = [msgspec.structs.replace(key, revoked_at=at) if key in named else key for key in keys]
            self._file.write({"keys": revoked})
            return bool(named)

    def state(self) -> tuple[int, ...]:
        return self._file.state()


class _StoredKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[VirtualKey, ...]


class KeyRing:
    """The keys of a file, read again when it changes. While it cannot be read, no key counts; `problem` says why."""

    def __init__(self, file: KeyFile) -> None:
        self.problem = ""
        self._file = file
        self._state: tuple[int, ...] | None = None
        self._keys: Mapping[str, VirtualKey] = {}

    def find(self, secret: str) -> VirtualKey | None:
        """The record of a key that a client shows, also of a revoked one."""
        if (state := self._file.state()) != self._state:
            self._keys, self._state = self._read(), state
        return self._keys.get(digest_key(secret)) if _KEY.fullmatch(secret) else None

    def _read(self) -> Mapping[str, VirtualKey]:
        try:
            found, self.problem = {key.digest: key for key in self._file.read_keys()}, ""
        except ConfigError as error:
            found, self.problem = {}, str(error)
        return found


def find_shown_key(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The key that a client shows, as `Authorization: Bearer` or as `x-api-key`."""
    for name, value in headers:
        if name == b"x-api-key":
            return value.decode("latin-1").strip()
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].decode("latin-1").strip()
    return ""


def render_key(key: VirtualKey) -> Mapping[str, object]:
    """Returns a key for display, without its digest."""
    return {
        "name": key.name,
        "agent": key.agent,
        "made_at": key.made_at,
        "made_by": key.made_by,
        **msgspec.structs.asdict(key.limits),
        "revoked_at": key.revoked_at,
    }

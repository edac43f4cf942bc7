"""Virtual keys, which clients use instead of a provider's key.

A key is bound to an agent, spends from the agent's account, and has its own models and its own cap of a session. The
limits of hours and days are the agent's: all its keys have the same. Only a key's digest is stored, in a file that only
its owner may read. A revoked key stays in the file, so that its client stops instead of asking for a login.
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
from halter.core.ids import can_decide
from halter.server.auth import NAME, PrivateFile

KEY_PREFIX: Final = "sk-halter-"
_KEY: Final = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEY_BYTES: Final = 32
DEFAULT_MAX_BODY_MB: Final = 8
LARGEST_BODY_MB: Final = 64
_OPTIONS: Final[Mapping[str, str]] = {
    "max_cost_usd_per_hour": "--max-cost-usd-per-hour",
    "max_cost_usd_per_day": "--max-cost-usd-per-day",
    "tokens_per_hour": "--tokens-per-hour",
}
"""The limits that all keys of an agent share, with the option that sets each."""


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The caps, the rate and the models of a key. The hour's and the day's caps bind the account of its agent.

    All keys of an agent share that account. `max_cost_usd` is the cap of one client session; without it only the
    windows bind the session.
    """

    max_cost_usd: Decimal | None = None
    max_cost_usd_per_hour: Decimal | None = None
    max_cost_usd_per_day: Decimal | None = None
    tokens_per_hour: int | None = None
    models: tuple[str, ...] = ()
    mask_secrets: bool = False
    """Masks secrets in the requests of its clients: the operator's own, and strings that look like secrets."""
    max_body_mb: int | None = None
    """The largest request of its clients, in megabytes."""
    allowed_members: tuple[str, ...] = ()
    """Members and tools of requests that pass although it is not known what they cost."""


class VirtualKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    agent: str
    digest: str
    made_at: int
    made_by: str = ""
    limits: KeyLimits = KeyLimits()
    revoked_at: int | None = None

    def agent_keys(self, *, session_capped: bool) -> Mapping[str, Any]:
        """Return the limits as keys of an agent's file; `has_session_cap`: the fleet caps every session."""
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


def make_virtual_key(secret: str, name: str, agent: str, made_at: int, made_by: str, limits: KeyLimits) -> VirtualKey:
    """Make the record of a key. Raises ConfigError for an invalid name or cap."""
    for value, noun in ((name, "a key"), (agent, "an agent")):
        if not NAME.fullmatch(value) or not can_decide(value):
            raise ConfigError(
                f"Invalid name of {noun}: {value!r}. Use up to 64 lowercase letters, digits, dots, dashes or "
                "underscores."
            )
    for amount in (limits.max_cost_usd, limits.max_cost_usd_per_hour, limits.max_cost_usd_per_day):
        if amount is not None and not (amount.is_finite() and amount > 0):
            raise ConfigError(f"Invalid cap {amount}: use an amount in dollars above zero, such as 2.00.")
    if limits.max_body_mb is not None and not 1 <= limits.max_body_mb <= LARGEST_BODY_MB:
        raise ConfigError(f"Invalid size {limits.max_body_mb} of a request: use 1 to {LARGEST_BODY_MB} megabytes.")
    return VirtualKey(name, agent, digest_key(secret), made_at, made_by, limits)


def find_agent_limits(keys: Sequence[VirtualKey], agent: str) -> Mapping[str, Any]:
    """Find the limits that the keys of an agent share: the lowest of its valid keys, else those of its newest key."""
    agent_keys = [key for key in keys if key.agent == agent]
    valid_keys = [key for key in agent_keys if key.revoked_at is None] or agent_keys[-1:]
    limits: dict[str, Any] = {}
    for name in _OPTIONS:
        values = [value for key in valid_keys if (value := getattr(key.limits, name)) is not None]
        if values:
            limits[name] = min(values)
    return limits


def _with_limits(key: VirtualKey, limits: Mapping[str, Any]) -> VirtualKey:
    return msgspec.structs.replace(key, limits=msgspec.structs.replace(key.limits, **limits))


class KeyFile:
    """The file of keys. Every method except `read_state` raises ConfigError on failure."""

    def __init__(self, path: Path) -> None:
        self._file = PrivateFile(path)

    def read_keys(self) -> tuple[VirtualKey, ...]:
        data = self._file.read()
        if data is None:
            return ()
        try:
            keys = msgspec.json.decode(data, type=_StoredKeys).keys
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read {self._file.path} ({error}). Remove it, and create new keys.") from None
        if not all(_DIGEST.fullmatch(key.digest) for key in keys):
            raise ConfigError(f"{self._file.path} has a key that Halter did not make. Remove it, and create new keys.")
        return keys

    def add(self, key: VirtualKey, *, replaces_limits: bool = False) -> VirtualKey:
        """Add a key, and return it with its agent's limits, which a key without limits keeps.

        With `replaces_limits`, the limits of this key become the limits of all valid keys of its agent.
        """
        with self._file.lock():
            keys = self.read_keys()
            if any(each.name == key.name and each.revoked_at is None for each in keys):
                raise ConfigError(
                    f"The key {key.name} already exists. Revoke it with `halter keys revoke {key.name}`, or pass "
                    "another --name."
                )
            limits = dict(find_agent_limits(keys, key.agent))
            for name, option in _OPTIONS.items():
                value = getattr(key.limits, name)
                if value is None:
                    continue
                if not replaces_limits and limits.get(name, value) != value:
                    raise ConfigError(
                        f"The keys of {key.agent} have {option} {limits[name]}, and all keys of an agent share it. "
                        f"Leave the option out to keep {limits[name]}, or pass --replace to set {value} for all."
                    )
                limits[name] = value
            key = _with_limits(key, limits)
            if replaces_limits:
                keys = tuple(
                    _with_limits(each, limits) if each.agent == key.agent and each.revoked_at is None else each
                    for each in keys
                )
            self._file.write({"keys": (*keys, key)})
            return key

    def revoke(self, name: str, at: int) -> bool:
        """Revoke a key with immediate effect; return True if there was one."""
        with self._file.lock():
            keys = self.read_keys()
            matching = [key for key in keys if key.name == name and key.revoked_at is None]
            new_keys = [msgspec.structs.replace(key, revoked_at=at) if key in matching else key for key in keys]
            self._file.write({"keys": new_keys})
            return bool(matching)

    def read_state(self) -> tuple[int, ...]:
        return self._file.read_state()


class _StoredKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[VirtualKey, ...]


class KeyRing:
    """The keys of a file, read again after a change. If this fails, no key is valid; `problem` has the reason."""

    def __init__(self, file: KeyFile) -> None:
        self.problem = ""
        self._file = file
        self._state: tuple[int, ...] | None = None
        self._keys: Mapping[str, VirtualKey] = {}

    def find(self, secret: str) -> VirtualKey | None:
        """Find the record of a client's key, including a revoked one."""
        if (state := self._file.read_state()) != self._state:
            self._keys, self._state = self._read(), state
        return self._keys.get(digest_key(secret)) if _KEY.fullmatch(secret) else None

    def _read(self) -> Mapping[str, VirtualKey]:
        try:
            stored_keys = self._file.read_keys()
            # Earlier versions wrote keys of one agent with different limits.
            keys = {key.digest: _with_limits(key, find_agent_limits(stored_keys, key.agent)) for key in stored_keys}
            self.problem = ""
        except ConfigError as error:
            keys, self.problem = {}, str(error)
        return keys


def find_client_key(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Find the key in a client's headers: `Authorization: Bearer` or `x-api-key`; empty if there is none."""
    for name, value in headers:
        if name == b"x-api-key":
            return value.decode("latin-1").strip()
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].decode("latin-1").strip()
    return ""


def render_key(key: VirtualKey) -> Mapping[str, object]:
    """Render a key for display, without its digest."""
    return {
        "name": key.name,
        "agent": key.agent,
        "made_at": key.made_at,
        "made_by": key.made_by,
        **msgspec.structs.asdict(key.limits),
        "revoked_at": key.revoked_at,
    }

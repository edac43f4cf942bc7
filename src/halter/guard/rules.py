"""Rules that answer in a person's place: "always", for one tool and arguments of one kind, for a while."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from halter.core.rows import RuleRow
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.commands import plain
from halter.guard.places import normal


class Words(msgspec.Struct, frozen=True, tag="words", tag_field="by"):
    """The command under a key begins with these words, one by one, and nothing else is run with it."""

    key: str
    prefix: tuple[str, ...]


class Under(msgspec.Struct, frozen=True, tag="under", tag_field="by"):
    """The path under a key lies in a folder."""

    key: str
    folder: str


class At(msgspec.Struct, frozen=True, tag="at", tag_field="by"):
    """The URL under a key leads to a host, encrypted and through the usual port; or the key names the host itself."""

    key: str
    host: str


class Same(msgspec.Struct, frozen=True, tag="same", tag_field="by"):
    """All arguments are the same, byte for byte."""

    digest: str


Matcher = Words | Under | At | Same


class Always(msgspec.Struct, frozen=True, kw_only=True):
    """A person's standing yes. The scope's `owner` is a session, an agent, or nobody for the fleet.

    `keys` are all the arguments that a call may have: what nobody looked at is not agreed to.
    """

    id: str
    tool: str
    matcher: Matcher
    keys: tuple[str, ...]
    scope: RuleScope
    owner: str = ""
    by: str
    made_at: int
    expires_at: int


_MATCHER: Final[msgspec.json.Decoder[Matcher]] = msgspec.json.Decoder(Matcher)
_KEYS: Final = msgspec.json.Decoder(tuple[str, ...])


def always_of(row: RuleRow) -> Always:
    """Read a rule off its row."""
    return Always(
        id=row.rule,
        tool=row.tool,
        matcher=_MATCHER.decode(row.matcher),
        keys=_KEYS.decode(row.keys),
        scope=cast("RuleScope", row.scope),
        owner=row.owner,
        by=row.by,
        made_at=row.made_at,
        expires_at=row.expires_at,
    )


def written(matcher: Matcher) -> str:
    """Write a matcher for a rule's event."""
    return msgspec.json.encode(matcher).decode()


def matches(rule: Always, spec: ToolSpec, arguments: Valid, session: str, agent: str, now: int) -> bool:
    """Tell whether a rule answers a call."""
    owner = {"session": session, "agent": agent, "fleet": ""}[rule.scope]
    if rule.tool != spec.name or rule.owner != owner or not rule.made_at <= now < rule.expires_at:
        return False
    match rule.matcher:
        case Same(expected):
            return sha256(arguments.canonical).hexdigest() == expected
        case Words() | Under() | At():
            known = frozenset(arguments.values) <= {*rule.keys, rule.matcher.key}
            return known and _fits(rule.matcher, arguments.values.get(rule.matcher.key))


def _fits(matcher: Words | Under | At, value: Any) -> bool:
    match matcher:
        case Words(_, prefix):
            argv = _argv(value)
            return bool(prefix) and argv is not None and argv[: len(prefix)] == prefix
        case Under(_, folder):
            return isinstance(value, str) and "\0" not in value and _inside(normal(value), normal(folder))
        case At(_, host):
            return isinstance(value, str) and _host(value) == host.lower().rstrip(".")


def _argv(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in cast("Sequence[Any]", value)):
        return plain(tuple(cast("Sequence[str]", value)))
    return None


def _inside(path: str, folder: str) -> bool:
    """Tell whether a path is a folder or lies in it; both are normal, so `..` can only lead."""
    if folder == ".":
        return not path.startswith(("/", "~")) and path.split("/", maxsplit=1)[0] != ".."
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _host(value: str) -> str | None:
    if "//" not in value:
        return value.lower().rstrip(".")
    try:
        parts = urlsplit(value)
        usual = parts.scheme == "https" and parts.port in {None, 443} and "@" not in parts.netloc
    except ValueError:
        return None
    return (parts.hostname or "").rstrip(".") if usual and "\\" not in value else None


_FORMAT: Final = b"halter approval 1"


def digest(tool: str, canonical: bytes, session: str, policy_digest: str) -> str:
    """Name exactly what a person agrees to. The parts are told apart by their lengths, so none can pose as another."""
    named = sha256(_FORMAT)
    for part in (tool.encode(), canonical, session.encode(), policy_digest.encode()):
        named.update(len(part).to_bytes(8, "big") + part)
    return named.hexdigest()

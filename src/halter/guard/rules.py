"""Rules that answer in a person's place: "always", for one tool and arguments of one kind, for a while."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, cast

import msgspec

from halter.core.rows import RuleRow
from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RuleScope
from halter.guard.conditions import Condition, argv_of, fits, is_inside, leads_to


class Same(msgspec.Struct, frozen=True, tag="same", tag_field="by"):
    """All arguments are the same, byte for byte."""

    digest: str


class Each(msgspec.Struct, frozen=True, tag="each", tag_field="by"):
    """A call has exactly these arguments, and each is what its condition asks for."""

    conditions: tuple[Condition, ...]


class Words(msgspec.Struct, frozen=True, tag="words", tag_field="by"):
    """A rule of a version before 0.8: a command that began with these words. Now it has to be just these words."""

    key: str
    prefix: tuple[str, ...]


class Under(msgspec.Struct, frozen=True, tag="under", tag_field="by"):
    """A rule of a version before 0.8: the path under a key lies in a folder."""

    key: str
    folder: str


class At(msgspec.Struct, frozen=True, tag="at", tag_field="by"):
    """A rule of a version before 0.8: the URL under a key leads to a host."""

    key: str
    host: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown", tag_field="by"):
    """A rule that this version cannot read: it answers nothing."""


Earlier = Words | Under | At
Matcher = Same | Each | Earlier | Unknown


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
        matcher=_read(row.matcher),
        keys=_KEYS.decode(row.keys),
        scope=cast("RuleScope", row.scope),
        owner=row.owner,
        by=row.by,
        made_at=row.made_at,
        expires_at=row.expires_at,
    )


def _read(matcher: str) -> Matcher:
    try:
        return _MATCHER.decode(matcher)
    except msgspec.DecodeError:
        return Unknown()


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
        case Each(conditions):
            return _all_fit(conditions, arguments.canonical)
        case Words() | Under() | At():
            return _fits_earlier(rule.matcher, arguments.canonical)
        case Unknown():
            return False


def _all_fit(conditions: tuple[Condition, ...], canonical: bytes) -> bool:
    values = _values(canonical)
    wanted = {condition.key: condition for condition in conditions}
    if values is None or values.keys() != wanted.keys() or len(wanted) != len(conditions):
        return False
    return all(fits(condition, values[key]) for key, condition in wanted.items())


def _values(canonical: bytes) -> Mapping[str, Any] | None:
    try:
        return json.loads(canonical)
    except (ValueError, RecursionError):
        return None


def _fits_earlier(matcher: Earlier, canonical: bytes) -> bool:
    """Read an earlier rule narrowly. It says nothing of other arguments, so it answers no call that has any."""
    values = _values(canonical)
    if values is None or set(values) != {matcher.key}:
        return False
    value = values[matcher.key]
    match matcher:
        case Words(_, words):
            return bool(words) and argv_of(value) == words
        case Under(_, folder):
            return isinstance(value, str) and is_inside(value, folder)
        case At(_, host):
            return isinstance(value, str) and leads_to(value, host)


_FORMAT: Final = b"halter approval 1"


def digest(tool: str, canonical: bytes, session: str, policy_digest: str) -> str:
    """Name exactly what a person agrees to. The parts are told apart by their lengths, so none can pose as another."""
    named = sha256(_FORMAT)
    for part in (tool.encode(), canonical, session.encode(), policy_digest.encode()):
        named.update(len(part).to_bytes(8, "big") + part)
    return named.hexdigest()

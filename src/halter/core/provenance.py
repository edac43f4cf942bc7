"""Where values come from: what a tool reads and reaches, the role of each argument, and what the brake finds.

A call that decides where data goes or what is changed must be made of values that a trusted place has said. These are
the words for it; `guard/provenance.py` folds and judges.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from halter.core.text import expand_names, word_set
from halter.core.vocabulary import Origin

Reads = Literal["nothing", "trusted", "own", "known", "anyone"]
"""Who wrote what a tool returns: no one else, a curated place, the person, people of the house, or anyone."""

Reach = Literal["none", "own", "others", "final"]
"""What a tool changes: nothing, the person's own things, what others see, or what cannot be taken back."""

ArgumentRole = Literal["destination", "target", "amount", "content", "detail"]
"""What an argument decides: where it goes, what is changed, how much, what is said, or how it is done."""

FlawReason = Literal[
    "unsaid", "weak", "amount", "content", "unasked", "repeated", "egress", "disguised", "unclear", "link"
]
"""Why a person is asked.

`unsaid`: no trusted place said the value. `weak`: it was found, but the person did not name it. `amount`: a number that
was not said. `content`: words of others. `unasked`: the task asks for no such act. `repeated`: the same act again.
`egress`: a read that carries something out. `disguised`: invisible or look-alike characters, or an encoding. `unclear`:
too large to decide. `link`: a link in an answer.
"""


class ArgumentUse(msgspec.Struct, frozen=True, gc=False):
    """The role of an argument, and the kind of thing it names (address, account, url, file, event, user, channel…)."""

    role: ArgumentRole
    kind: str = ""


class Declaration(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the brake knows of a tool.

    `mints` and `lists` map a field of the result's records to a kind, `*` being any field. A look-up mints the value
    that stands in a record which the person named; a directory lists what belongs to the house. `alone` is the reach
    of a call that names no destination: an event without guests is the person's own. `asks` are words of a
    task that ask for this act; they are derived from the tool's name if there are none. `defaults` are those of the
    tool's schema: a call that leaves an argument out is judged with them. `guessed` names what was guessed rather than
    declared.
    """

    reads: Reads = "anyone"
    reach: Reach = "others"
    alone: Reach | None = None
    arguments: Mapping[str, ArgumentUse] = {}
    mints: Mapping[str, str] = {}
    lists: Mapping[str, str] = {}
    asks: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    guessed: tuple[str, ...] = ()


class Source(msgspec.Struct, frozen=True):
    """Where a text comes from; `name` is the tool, document, sensor or sub-agent."""

    origin: Origin
    name: str = ""
    trusted: bool = False


class Flaw(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One reason to ask: `source` is where the value stands, `quote` the line there."""

    argument: str
    value: str
    reason: FlawReason
    source: str = ""
    quote: str = ""


class BrakeVerdict(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """No flaws: the call goes through. `can_wait`: it may be staged and asked with others at the end of the turn."""

    flaws: tuple[Flaw, ...] = ()
    can_wait: bool = False


class _Properties(msgspec.Struct, frozen=True):
    properties: dict[str, dict[str, Any]] = {}


_DESTINATIONS: Final = expand_names(
    {
        "to recipient recipients participants invitees attendees": "recipient",
        "cc bcc email emails mail address addresses": "address",
        "url uri link href endpoint webhook host hostname domain server remote": "url",
        "account iban bic payee beneficiary wallet": "account",
        "phone number tel": "phone",
        "channel channels room chat conversation thread": "channel",
        "user users username member members owner assignee reviewer": "user",
    }
)
_TARGETS: Final = expand_names(
    {
        "path file filename filepath directory folder dir": "file",
        "id key ref uuid": "id",
        "event": "event",
        "branch repo repository project table database bucket service device": "name",
        "command cmd sql code script expression statement": "code",
        "password secret token role permission permissions scope": "secret",
    }
)
_AMOUNTS: Final = word_set("amount price total sum quantity value cost budget fee tip")
_CONTENTS: Final = word_set(
    "text body message content contents subject title description comment note notes summary caption reason data "
    "payload"
)
_DETAILS: Final = word_set(
    "date time start end day month year timezone format language unit sort order limit offset page"
)
_FINAL: Final = word_set(
    "pay transfer wire refund buy purchase reserve book order delete remove cancel drop erase purge password execute "
    "run deploy invite grant"
)
_PART: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def split_name(name: str) -> tuple[str, ...]:
    """The words of an identifier: `sendEmail_to` has `send`, `email`, `to`."""
    return tuple(part.casefold() for part in _PART.findall(name))


def guess_use(name: str, schema: Mapping[str, Any] | None = None) -> ArgumentUse:
    """The role of an argument from its name and schema; strict where neither says more."""
    shape: Mapping[str, Any] = schema or {}
    words = split_name(name)
    if "enum" in shape or "const" in shape or shape.get("type") in ("boolean", "null"):
        place = words[-1] if words and "enum" in shape else ""
        if place in _DESTINATIONS:
            return ArgumentUse("destination", _DESTINATIONS[place])
        return ArgumentUse("detail", "choice")
    for word in reversed(words):
        if word in _DESTINATIONS:
            return ArgumentUse("destination", _DESTINATIONS[word])
        if word in _TARGETS:
            return ArgumentUse("target", _TARGETS[word])
        if word in _AMOUNTS:
            return ArgumentUse("amount")
        if word in _CONTENTS:
            return ArgumentUse("content")
        if word in _DETAILS:
            return ArgumentUse("detail")
    if shape.get("format") in ("uri", "url", "email", "hostname"):
        return ArgumentUse("destination", "address" if shape["format"] == "email" else "url")
    if shape.get("type") in ("integer", "number"):
        return ArgumentUse("amount")
    return ArgumentUse("destination")


def guess_declaration(name: str, schema: bytes | Mapping[str, Any], *, read_only: bool) -> Declaration:
    """The strict default of a tool that declares nothing: roles from names and schema, written by anyone."""
    shape = _properties(schema)
    uses = {argument: guess_use(argument, part) for argument, part in shape.items()}
    guessed = ("reads", "reach", *(f"arguments.{argument}" for argument in uses))
    reach: Reach = "none" if read_only else "others" if _FINAL.isdisjoint(split_name(name)) else "final"
    defaults = {argument: part["default"] for argument, part in shape.items() if part.get("default") is not None}
    return Declaration(reads="anyone", reach=reach, arguments=uses, defaults=defaults, guessed=guessed)


def _properties(schema: bytes | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments of a JSON Schema; a schema that is none has none, and every argument is then guessed by name."""
    try:
        found: Any = msgspec.json.decode(schema) if isinstance(schema, bytes) else schema
        return msgspec.convert(found, _Properties).properties
    except (msgspec.DecodeError, msgspec.ValidationError):
        return {}

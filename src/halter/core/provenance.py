"""The vocabulary of provenance: what a tool reads and reaches, the role of each argument, and flaws of a call.

An argument that decides where data goes or what is changed must have a value from a trusted source. The provenance
check itself is in `guard/`.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from halter.core.text import expand_names, make_word_set
from halter.core.vocabulary import Origin

Reads = Literal["nothing", "trusted", "own", "known", "anyone"]
"""The authors of a tool's results: no one, a curated source, the user, known people, or anyone."""

Reach = Literal["none", "own", "others", "final"]
"""The effect of a tool: on nothing, on the user's own things, visible to others, or irreversible."""

ArgumentRole = Literal["destination", "target", "amount", "content", "detail"]
"""The role of an argument: where data goes, what is changed, how much, the content, or a detail."""

FlawReason = Literal[
    "unsaid", "weak", "amount", "content", "unasked", "repeated", "egress", "disguised", "unclear", "link"
]
"""The reasons why a person is asked.

`unsaid`: no trusted source contains the value. `weak`: a trusted source contains it, but the user did not name it.
`amount`: no trusted source contains the number. `content`: text of others. `unasked`: the task does not request such a
call. `repeated`: the same call again. `egress`: a read that carries data out. `disguised`: invisible or look-alike
characters, or an encoding. `unclear`: too large to decide. `link`: an untrusted link in an answer.
"""


class ArgumentUse(msgspec.Struct, frozen=True, gc=False):
    """The role of an argument, and the kind of thing it names (address, account, url, file, event, user, channel…)."""

    role: ArgumentRole
    kind: str = ""


class Declaration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The provenance declaration of a tool.

    `mints` and `lists` map a field of the result's records to a kind; `*` is any field. A look-up mints the values in a
    record that the user named; a directory lists values that belong to the organisation. `alone` is the reach of a call
    without a destination: an event without guests is the user's own. `asks` are words in a task that request this call,
    by default derived from the tool's name. `defaults` are those of the tool's schema: a call that omits an argument is
    judged with its default. `guessed` names the parts that were guessed rather than declared.
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
    """The source of a text; `name` is the tool, document, sensor or sub-agent."""

    origin: Origin
    name: str = ""
    trusted: bool = False


class Flaw(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One reason to ask: `source` contains the value, in the line `quote`."""

    argument: str
    value: str
    reason: FlawReason
    source: str = ""
    quote: str = ""


class BrakeVerdict(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The verdict of the provenance check. With no flaws the call passes.

    With `can_wait`, the call may be staged, and approved together with others.
    """

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
_AMOUNTS: Final = make_word_set("amount price total sum quantity value cost budget fee tip")
_CONTENTS: Final = make_word_set(
    "text body message content contents subject title description comment note notes summary caption reason data "
    "payload"
)
_DETAILS: Final = make_word_set(
    "date time start end day month year timezone format language unit sort order limit offset page"
)
_FINAL: Final = make_word_set(
    "pay transfer wire refund buy purchase reserve book order delete remove cancel drop erase purge password execute "
    "run deploy invite grant"
)
_PART: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def split_name(name: str) -> tuple[str, ...]:
    """Split an identifier into words: `sendEmail_to` into `send`, `email`, `to`."""
    return tuple(part.casefold() for part in _PART.findall(name))


def guess_use(name: str, schema: Mapping[str, Any] | None = None) -> ArgumentUse:
    """Guess the role of an argument from its name and schema; the strictest role if neither helps."""
    argument_schema: Mapping[str, Any] = schema or {}
    words = split_name(name)
    if "enum" in argument_schema or "const" in argument_schema or argument_schema.get("type") in ("boolean", "null"):
        last_word = words[-1] if words and "enum" in argument_schema else ""
        if last_word in _DESTINATIONS:
            return ArgumentUse("destination", _DESTINATIONS[last_word])
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
    if argument_schema.get("format") in ("uri", "url", "email", "hostname"):
        return ArgumentUse("destination", "address" if argument_schema["format"] == "email" else "url")
    if argument_schema.get("type") in ("integer", "number"):
        return ArgumentUse("amount")
    return ArgumentUse("destination")


def guess_declaration(name: str, schema: bytes | Mapping[str, Any], *, read_only: bool) -> Declaration:
    """Guess a strict declaration for a tool without one: roles from names and schema, results written by anyone."""
    properties = _properties(schema)
    uses = {argument: guess_use(argument, property_schema) for argument, property_schema in properties.items()}
    guessed_names = ("reads", "reach", *(f"arguments.{argument}" for argument in uses))
    reach: Reach = "none" if read_only else "others" if _FINAL.isdisjoint(split_name(name)) else "final"
    defaults = {
        argument: property_schema["default"]
        for argument, property_schema in properties.items()
        if property_schema.get("default") is not None
    }
    return Declaration(reads="anyone", reach=reach, arguments=uses, defaults=defaults, guessed=guessed_names)


def _properties(schema: bytes | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the properties of a JSON Schema; empty if it is invalid, so that each argument is guessed by name."""
    try:
        raw_schema: Any = msgspec.json.decode(schema) if isinstance(schema, bytes) else schema
        return msgspec.convert(raw_schema, _Properties).properties
    except (msgspec.DecodeError, msgspec.ValidationError):
        return {}

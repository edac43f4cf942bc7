"""Events as bytes and back: hostile characters never make it fail, and unreadable facts stay as they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.events import EVENTS_BY_KIND, AnyEvent, Unknown
from halter.core.text import clean

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
UPCASTERS: Final[Mapping[tuple[str, int], Upcaster]] = {}
"""For each old version of a kind, what turns its facts into those of the next version."""

_ESCAPE: Final = ord("\\")
_ENCODER: Final = msgspec.json.Encoder()
_DECODERS: Final = {kind: msgspec.json.Decoder(event) for kind, event in EVENTS_BY_KIND.items()}


def encode(event: AnyEvent) -> tuple[AnyEvent, bytes]:
    """Write the facts as JSON, and return the event as it will be read back.

    Hostile characters in a fact are replaced.
    """
    try:
        facts = _ENCODER.encode(event)
    except UnicodeEncodeError:
        facts = b"\\u0000"
    # Not `in` for several bytes: that raises an error inside, and drops it.
    if _ESCAPE not in facts or facts.find(b"\\u0000") < 0:
        return event, facts
    facts = _ENCODER.encode(_clean_value(msgspec.to_builtins(event)))
    return _DECODERS[event.KIND].decode(facts), facts


def _clean_value(value: object) -> object:
    match value:
        case str():
            return clean(value)
        case dict():
            facts = cast("dict[object, object]", value)
            return {_clean_value(key): _clean_value(item) for key, item in facts.items()}
        case list() | tuple():
            return [_clean_value(item) for item in cast("Sequence[object]", value)]
        case _:
            return value


def decode(kind: str, version: int, facts: bytes) -> AnyEvent | Unknown:
    """Read facts back into an event, or into `Unknown`."""
    known = EVENTS_BY_KIND.get(kind)
    if known is None or not 1 <= version <= known.VERSION:
        return Unknown(kind, version, facts)
    try:
        if version == known.VERSION:
            return _DECODERS[kind].decode(facts)
        raised = msgspec.json.decode(facts)
        for old in range(version, known.VERSION):
            raised = UPCASTERS[kind, old](raised)
        return msgspec.convert(raised, known)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Unknown(kind, version, facts)

"""The encoding of events. Hostile characters never make it fail; unreadable facts are kept unchanged."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.events import EVENTS_BY_KIND, AnyEvent, Unknown
from halter.core.text import clean

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
UPCASTERS: Final[Mapping[tuple[str, int], Upcaster]] = {}
"""For each old version of a kind, the function that upgrades its facts to the next version."""

_ESCAPE: Final = ord("\\")
_ENCODER: Final = msgspec.json.Encoder()
_DECODERS: Final = {kind: msgspec.json.Decoder(event) for kind, event in EVENTS_BY_KIND.items()}


def encode(event: AnyEvent) -> tuple[AnyEvent, bytes]:
    """Encode the facts as JSON, and return the event that decodes from them.

    Characters that no store can hold are replaced.
    """
    try:
        facts = _ENCODER.encode(event)
    except UnicodeEncodeError:
        facts = b"\\u0000"
    # `find`, not `in`: `in` for several bytes raises and drops an error internally.
    if _ESCAPE not in facts or facts.find(b"\\u0000") < 0:
        return event, facts
    facts = _ENCODER.encode(_clean_value(msgspec.to_builtins(event)))
    return _DECODERS[event.KIND].decode(facts), facts


def _clean_value(value: object) -> object:
    match value:
        case str():
            return clean(value)
        case dict():
            mapping = cast("dict[object, object]", value)
            return {_clean_value(key): _clean_value(item) for key, item in mapping.items()}
        case list() | tuple():
            return [_clean_value(item) for item in cast("Sequence[object]", value)]
        case _:
            return value


def decode(kind: str, version: int, facts: bytes) -> AnyEvent | Unknown:
    """Decode facts to an event, or to `Unknown` if this program cannot read them."""
    event_class = EVENTS_BY_KIND.get(kind)
    if event_class is None or not 1 <= version <= event_class.VERSION:
        return Unknown(kind, version, facts)
    try:
        if version == event_class.VERSION:
            return _DECODERS[kind].decode(facts)
        raw_facts = msgspec.json.decode(facts)
        for old_version in range(version, event_class.VERSION):
            raw_facts = UPCASTERS[kind, old_version](raw_facts)
        return msgspec.convert(raw_facts, event_class)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Unknown(kind, version, facts)

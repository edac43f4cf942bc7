"""How events and news are written for programs, whichever face gives them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from halter.app.bus import Gap, Item, News, Pulse
from halter.core.ports import Stored
from halter.core.text import clean, from_body


def as_object(stored: Stored) -> dict[str, Any]:
    """Write an event for programs."""
    return {
        "stream": stored.stream,
        "seq": stored.seq,
        "kind": stored.kind,
        "version": stored.version,
        "at": stored.at,
        "generation": stored.generation,
        "facts": msgspec.Raw(stored.facts),
        "body": None if stored.body is None else clean(from_body(stored.body)),
        "blob": stored.blob,
        "erased": stored.erased,
        "hash": stored.hash.hex(),
    }


def item_object(item: Item) -> Mapping[str, Any]:
    """Write a piece of news for programs."""
    match item:
        case News():
            return {"name": item.name, **as_object(item.stored)}
        case Pulse():
            return msgspec.structs.asdict(item)
        case Gap():
            return {"name": "gap", **msgspec.structs.asdict(item)}

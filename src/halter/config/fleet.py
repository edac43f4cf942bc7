"""`halter.yaml`: what holds for all agents on one store."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET

from halter.config.load import Document, Places, Wrong, load_file
from halter.config.shape import dotted, shaped
from halter.config.tasks import channel_mistakes
from halter.core.bounds import Limits
from halter.core.spec import FleetSpec, Policy

FLEET_FILE: Final = "halter.yaml"


class Fleet(msgspec.Struct, frozen=True):
    """What the fleet's file says, and where. Without a file, everything is at its default.

    `said` is what the file says word by word. Where a store's policy and a file hold together, the rules of the file
    are `beside` those of the store and never mixed with them: a rule for a tool in one must not hide a stricter one
    for its level in the other. `silent` limits agents that set no limit, where that is less than they could set.
    """

    spec: FleetSpec = FleetSpec()
    places: Places = Places(FLEET_FILE)
    said: Mapping[str, Any] = {}
    beside: tuple[Policy, ...] = ()
    silent: Limits = Limits()


def read_fleet(path: Path, shown: str | None = None) -> Fleet:
    """Read a fleet's file."""
    return fleet_of(load_file(path, shown))


def fleet_of(document: Document) -> Fleet:
    """Read what a document says about the fleet."""
    spec = shaped(document, FleetSpec)
    for model in spec.models:
        if model.endswith("*"):
            raise document.places.wrong(("models", model), f"`{model}` is not one model; name each with its price.")
    for path, sentence in (*_misrated(spec), *channel_mistakes(spec.notify)):
        raise document.places.wrong(path, sentence)
    return Fleet(spec, document.places, document.value)


def _misrated(spec: FleetSpec) -> Iterator[Wrong]:
    """Find rates that say nothing, or of which nobody could tell whose they are."""
    for model, rate in spec.rates.items():
        path = ("rates", model)
        if "*" in model and not model.endswith(":*"):
            yield path, f"`{dotted(path)}` is not one model; name one, or all of a provider, as in anthropic:*."
        if rate.requests_per_minute is UNSET and rate.tokens_per_minute is UNSET:
            yield path, f"`{dotted(path)}` limits nothing; write `requests_per_minute`, `tokens_per_minute` or both."

"""`halter.yaml`: what holds for all agents on one store."""

from pathlib import Path
from typing import Final

import msgspec

from halter.config.channels import misled
from halter.config.load import Document, Places, load_file
from halter.config.shape import shaped
from halter.core.spec import FleetSpec

FLEET_FILE: Final = "halter.yaml"


class Fleet(msgspec.Struct, frozen=True):
    """What the fleet's file says, and where. Without a file, everything is at its default."""

    spec: FleetSpec = FleetSpec()
    places: Places = Places(FLEET_FILE)


def read_fleet(path: Path, shown: str | None = None) -> Fleet:
    """Read a fleet's file."""
    return fleet_of(load_file(path, shown))


def fleet_of(document: Document) -> Fleet:
    """Read what a document says about the fleet."""
    spec = shaped(document, FleetSpec)
    for model in spec.models:
        if model.endswith("*"):
            raise document.places.wrong(("models", model), f"`{model}` is not one model; name each with its price.")
    for path, sentence in misled(spec.notify):
        raise document.places.wrong(path, sentence)
    return Fleet(spec, document.places)

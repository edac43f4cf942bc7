"""Drills: tests of Halter's promises that you run on your own machine and store."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from halter_drills.drill import Drill

DRILLS: Final = (
    "race",
    "billing",
    "kill",
    "stop",
    "powercut",
    "tamper",
    "zombie",
    "halt",
    "approval",
    "secrets",
    "flood",
    "authority",
    "restore",
    "chaos",
    "proxy",
    "hook",
    "inject",
)
"""Names of all drills, in the order in which `all` runs them. Each is the `DRILL` of the module with its name."""


def find(name: str) -> "Drill":
    """Load a drill. Its module is imported only now."""
    return import_module(f"halter_drills.{name}").DRILL

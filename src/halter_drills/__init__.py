"""Proofs of the promises, which a person runs on their own machine and store."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from halter_drills.drill import Drill

DRILLS: Final = (
    "race",
    "billing",
    "kill",
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
"""Every drill by name, in the order in which all of them run; each is the `DRILL` of the module of its name."""


def find(name: str) -> "Drill":
    """Load one drill: what it needs is imported only now."""
    return import_module(f"halter_drills.{name}").DRILL

"""Public names of earlier versions: they work for all of 1.x, and each warns of its first use at a place."""

import warnings
from typing import Any


def warn_renamed(old: str, new: str, frames: int = 2) -> None:
    """Warn the program, `frames` callers above, that it uses the former name of something."""
    warnings.warn(
        f"{old} is now called {new}; the old name works until 2.0.", DeprecationWarning, stacklevel=frames + 1
    )


class RenamedAttribute:
    """A method, property or attribute under the name that it had before."""

    def __init__(self, new: str) -> None:
        self._new = new
        self._old = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        warn_renamed(f"{owner.__name__}.{self._old}", self._new)
        return getattr(owner if instance is None else instance, self._new)

"""Secrets by reference: which names a call needs, which of them nobody gave, and where the values come from."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from halter.core.tools import secret_names

PREFIX: Final = "HALTER_SECRET_"
"""A variable of the environment with this prefix is the secret of the name that follows."""


class Secrets(Protocol):
    """Where the values of secrets come from. Only the guard asks, when it makes a permit."""

    def names(self) -> frozenset[str]:
        """Tell which secrets there are."""
        ...

    def value(self, name: str) -> str:
        """Return the value of one of them."""
        ...


class GivenSecrets:
    """Secrets that somebody handed over, by name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def names(self) -> frozenset[str]:
        """Tell which secrets there are."""
        return frozenset(self._values)

    def value(self, name: str) -> str:
        """Return the value of one of them."""
        return self._values[name]


def from_environment(environment: Mapping[str, str]) -> GivenSecrets:
    """Take the secrets out of an environment. An empty variable is no secret."""
    values = {name.removeprefix(PREFIX): value for name, value in environment.items() if name.startswith(PREFIX)}
    return GivenSecrets({name: value for name, value in values.items() if name and value})


def references(arguments: bytes) -> frozenset[str]:
    """Name all secrets that arguments, as JSON, refer to as `${secret:NAME}`."""
    return secret_names(arguments)


def missing(arguments: bytes, secrets: Secrets, granted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Name the secrets that arguments refer to and that are not there, or not granted to the agent, in order."""
    there = secrets.names() if granted is None else secrets.names() & frozenset(granted)
    return tuple(sorted(references(arguments) - there))


def sentence(names: Sequence[str]) -> str:
    """Tell the one who can act what is missing."""
    listed = ", ".join(names)
    variables = ", ".join(PREFIX + name for name in names)
    return f"No secret is known by the name {listed}: set {variables}, and list it under `secrets` of the agent."

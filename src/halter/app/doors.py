"""The doors of one process for one agent's sessions, with its prices and the secrets that must never be seen."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from halter.app.opened import App
from halter.core.messages import Model
from halter.core.spec import Resolved
from halter.guard.gatehouse import Gatehouse
from halter.guard.redact import Redactor
from halter.guard.secrets import Secrets
from halter.guard.stream import StreamRedactor
from halter.models.prices import Prices


class _Given(NamedTuple):
    """What a gatehouse was made of."""

    app: App
    policy: Resolved
    secrets: Secrets
    simulates: Model | None
    hidden: Mapping[str, str]
    environ: Mapping[str, str]

    def same(self, other: "_Given") -> bool:
        """Tell whether a gatehouse of the one serves the other: in every part, and with the same secrets to hide."""
        parts = zip(self[:4], other[:4], strict=True)
        return all(mine is theirs for mine, theirs in parts) and self[4:] == other[4:]


class Doors:
    """The doors of one agent's sessions, made once: so one look for halts serves all of them.

    They are made anew when anything has changed that they are made of, such as a secret that must never be seen.
    """

    def __init__(self) -> None:
        self._made: tuple[_Given, Gatehouse] | None = None

    def of(self, app: App, policy: Resolved, secrets: Secrets, simulates: Model | None = None) -> Gatehouse:
        """Return the doors."""
        given = _Given(app, policy, secrets, simulates, _values(secrets), dict(app.environ))
        if self._made is None or not self._made[0].same(given):
            self._made = (given, gatehouse_for(app, policy, secrets, simulates))
        return self._made[1]


def gatehouse_for(app: App, policy: Resolved, secrets: Secrets, simulates: Model | None = None) -> Gatehouse:
    """Make the doors. While the store is away, what could not be recorded does not run."""
    redactor = Redactor(_values(secrets), app.environ)
    gatehouse = Gatehouse(
        app.patient(),
        app.clock,
        redact=redactor.redact,
        secrets=secrets,
        prices=Prices(policy.prices),
        simulates=simulates,
        stream_mask=partial(StreamRedactor, redactor),
    )
    gatehouse.show_in(app.pulse)
    return gatehouse


def _values(secrets: Secrets) -> Mapping[str, str]:
    return {name: secrets.value(name) for name in secrets.names()}

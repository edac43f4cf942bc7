"""The doors of one process for one agent's sessions, with its prices and the secrets that must never be seen."""

from functools import partial

from halter.app.opened import App
from halter.core.messages import Model
from halter.core.spec import Resolved
from halter.guard.gatehouse import Gatehouse
from halter.guard.redact import Redactor
from halter.guard.secrets import Secrets
from halter.guard.stream import StreamRedactor
from halter.models.prices import Prices


def gatehouse_for(app: App, policy: Resolved, secrets: Secrets, simulates: Model | None = None) -> Gatehouse:
    """Make the doors. While the store is away, what could not be recorded does not run."""
    values = {name: secrets.value(name) for name in secrets.names()}
    redactor = Redactor(values, app.environ)
    return Gatehouse(
        app.patient(),
        app.clock,
        redact=redactor.redact,
        secrets=secrets,
        prices=Prices(policy.prices),
        simulates=simulates,
        stream_mask=partial(StreamRedactor, redactor),
    )

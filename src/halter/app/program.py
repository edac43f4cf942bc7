"""What programs say of their guards and agents, read as if it stood in the two files; and the store they work on."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from halter.app.opened import LEASE, App, open_app
from halter.config.agent import Agent, agent_of
from halter.config.fleet import Fleet, fleet_of, read_fleet
from halter.config.load import Document, Places
from halter.core.clock import SECOND, Clock
from halter.core.ids import WorkerId, new_worker
from halter.core.tools import Tool
from halter.dispatch.tending import tended
from halter.guard.secrets import GivenSecrets, Secrets, from_environment
from halter.journal.patient import PatientStore
from halter.settings import Settings, read_settings


class ProgramOptions(TypedDict, total=False):
    """What may be said of a guard or an agent, all of it optional.

    `policy` holds keys of an agent's file (`mode`, `limits`, `policy`, `phases`, `secrets`, …), `fleet` those of the
    fleet's file, or its path. `max_cost_usd` is the cap of one session. `secrets` are values by name. `lease` says for
    how many seconds a process that died keeps its sessions. `clock` and `environ` are the system's if not given.
    """

    policy: Mapping[str, Any]
    fleet: Mapping[str, Any] | str | Path
    max_cost_usd: float | Decimal | Literal["none"]
    secrets: Mapping[str, str]
    tools: Sequence[Tool]
    settings: Settings
    person: str
    lease: float
    clock: Clock
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Held:
    """A store that a program works on, as a worker whose leases are kept alive."""

    app: App
    store: PatientStore
    worker: WorkerId
    lease: int


@asynccontextmanager
async def opened(
    name: str, settings: Settings, options: ProgramOptions, environ: Mapping[str, str]
) -> AsyncGenerator[Held]:
    """Open the store, and begin to keep leases alive."""
    lease = round(options.get("lease", LEASE / SECOND) * SECOND)
    async with open_app(settings, options.get("clock"), environ, lease=lease) as app:
        worker, store = new_worker(name, app.ids), PatientStore(app.store, app.clock)
        async with tended(store, app.clock, worker, max(lease // 3, 1)):
            yield Held(app, store, worker, lease)


def secrets_of(options: ProgramOptions, environ: Mapping[str, str]) -> Secrets:
    """Find the secrets of a program: those that it gives, or else the environment's."""
    given = options.get("secrets")
    return from_environment(environ) if given is None else GivenSecrets(given)


def spoken(name: str, options: ProgramOptions) -> tuple[Agent, Fleet]:
    """Read what was said in Python as if it stood in the two files, so that the same is checked in the same words."""
    policy = options.get("policy", {})
    capped = {"max_cost_usd": options["max_cost_usd"]} if "max_cost_usd" in options else {}
    said = {"name": name, **policy, "limits": {**policy.get("limits", {}), **capped}}
    fleet = options.get("fleet", {})
    read = read_fleet(Path(fleet)) if isinstance(fleet, str | Path) else fleet_of(document(fleet, "the guard's fleet"))
    return agent_of(document(said, "the guard's policy")), read


def document(said: Mapping[str, Any], where: str) -> Document:
    """Take what a program says for a file, so that its mistakes are told in the same way."""
    return Document(dict(said), Places(where))


def settings_of(store: str, options: ProgramOptions, environ: Mapping[str, str]) -> Settings:
    """Keep checkpoints and their key where the command line keeps them, unless settings are given."""
    if "settings" in options:
        return options["settings"]
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    settings = read_settings(environ, home, store)
    return msgspec.structs.replace(settings, person=options["person"]) if "person" in options else settings

"""Whether an agent's files, keys, prices and sensors are there. Nothing of it is run, and no model is asked."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from msgspec import UNSET

from halter.app.health.check import Check, fine, look, problem, worst
from halter.config.pacing import unwritten
from halter.core.errors import ConfigError
from halter.core.mind import REFLEX, SCRIPTED
from halter.core.pacing import Sensor
from halter.core.usage import ModelName, Unpriced
from halter.guard.secrets import PREFIX, from_environment
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.config.fleet import Fleet
    from halter.config.resolve import ResolvedAgent

ANSWERS: Final = 3.0
"""For so many seconds somebody waits for an address to answer."""
WORDS: Final = frozenset({".yaml", ".yml", ".md", ".txt", ".json"})
"""The endings of files in which an agent's own words stand."""
MOST_FILES: Final = 200
LARGEST_FILE: Final = 1_000_000
SHOWN: Final = 5
PORTS: Final[Mapping[str, int]] = {"http": 80, "ws": 80, "https": 443, "wss": 443}


async def agent_checks(
    folder: Path, settings: Settings, environ: Mapping[str, str], fleet: "Fleet | None" = None
) -> AsyncGenerator[Check]:
    """Look at an agent as a start would, below what holds for the `fleet`; one that cannot be read is one finding."""
    from halter.app.policy import unbound
    from halter.config.agent import read_agent
    from halter.config.resolve import resolve_agent

    place = _place(folder)
    try:
        agent = resolve_agent(fleet or unbound(settings).fleet, read_agent(place), place)
    except ConfigError as error:
        yield problem(str(folder), str(error))
        return
    name = agent.policy.name
    yield _files(agent)
    for check in (
        _roots(settings, place, name),
        _trusted(settings, place, name),
        _models(agent, environ),
        _secrets(agent, environ),
        _written_secrets(place, environ, name),
    ):
        if check is not None:
            yield check
    if agent.pacing.sensors:
        tried = [await _sensor(sensor, place) for sensor in agent.pacing.sensors]
        yield worst(f"{name} sensors", tried)


def _place(folder: Path) -> Path:
    return folder.parent if folder.is_file() else folder


def _written_secrets(place: Path, environ: Mapping[str, str], name: str) -> Check | None:
    """Look for secrets in an agent's own words: they are masked where Halter writes, but they lie in the folder."""
    from halter.guard.redact import Redactor

    redact = Redactor({}, environ).redact
    found: list[str] = []
    for file in islice(
        sorted(path for path in place.rglob("*") if path.suffix in WORDS and path.is_file()), MOST_FILES
    ):
        if file.stat().st_size <= LARGEST_FILE:
            lines = file.read_text("utf-8", errors="replace").splitlines()
            found += [f"{file}:{number}" for number, line in enumerate(lines, 1) if redact(line) != line]
    if not found:
        return None
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    where = f"{', '.join(found[:SHOWN])}{more}"
    return look(f"{name} secrets", f"What looks like a secret stands in {where}: write ${{secret:NAME}} in its place.")


def _files(agent: "ResolvedAgent") -> Check:
    pacing, name = agent.pacing, agent.policy.name
    forgotten = unwritten(pacing)
    if forgotten:
        return look(name, " ".join(forgotten))
    runs = "runs by itself" if pacing.autonomy.enabled else "does not run by itself"
    sensors = "1 sensor" if len(pacing.sensors) == 1 else f"{len(pacing.sensors)} sensors"
    return fine(name, f"It {runs}, with {sensors}.")


def _roots(settings: Settings, folder: Path, name: str) -> Check | None:
    from halter.app.protected import protected_for
    from halter.config.agent import read_agent
    from halter.config.roots import against_protected

    try:
        agent = read_agent(folder)
        against_protected(agent, folder, protected_for(settings, agent, folder))
    except ConfigError as error:
        return problem(f"{name} roots", str(error))
    return None


def _trusted(settings: Settings, folder: Path, name: str) -> Check | None:
    from halter.app.agent import demand_trusted

    try:
        demand_trusted(settings, folder)
    except ConfigError as error:
        return problem(f"{name} code", str(error))
    return None


def _models(agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check | None:
    """Tell whether each model that the agent names can be had: its library, its key, its price."""
    found = [_model(name, agent, environ) for name in dict.fromkeys(agent.models())]
    return worst(f"{agent.policy.name} models", found) if found else None


def _model(name: str, agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check:
    from halter.models.prices import Prices
    from halter.models.providers import model_from

    if ModelName.parse(name).provider in {SCRIPTED, REFLEX}:
        return fine(name, f"{name} needs no key, and is free.")
    secrets, used = from_environment(environ), list[str]()

    def key(variable: str) -> str | None:
        value = secrets.value(variable) if variable in secrets.names() else environ.get(variable)
        used.extend([variable] if value else [])
        return value

    try:
        model = model_from(name, agent.mind.providers, key)
    except ConfigError as error:
        return problem(name, str(error))
    price = Prices(agent.policy.prices).find(model.name, model.base_url)
    if isinstance(price, Unpriced):
        return problem(name, price.sentence)
    key_told = f"its key is set ({', '.join(used)})" if used else "needs no key"
    cost_told = "has a price" if price.bound(1, 1, 0) else "is free"
    return fine(name, f"{name} {cost_told}, and {key_told}.")


def _secrets(agent: "ResolvedAgent", environ: Mapping[str, str]) -> Check | None:
    """Tell which secrets the agent may use that nobody has set; their values are nobody's business."""
    wanted, there = agent.policy.secrets, from_environment(environ).names()
    missing = [name for name in wanted if name not in there]
    if not wanted:
        return None
    name = f"{agent.policy.name} secrets"
    if missing:
        variables = ", ".join(PREFIX + each for each in missing)
        return problem(name, f"Nobody has set {variables}, which the agent names: set it, or take it off `secrets`.")
    return fine(name, f"All are set: {', '.join(wanted)}.")


async def _sensor(sensor: Sensor, folder: Path) -> Check:
    """Try a sensor as far as that does nothing: a file is looked at, and an address is called, but asked nothing."""
    source = sensor.source
    if source.tool is not UNSET:
        return fine(sensor.name, f"{sensor.name} calls {source.tool}, which was not tried.")
    if source.url is not UNSET:
        return await _address(sensor.name, source.url)
    path = folder / (source.path if isinstance(source.path, str) else ".")
    if not path.exists():
        return look(sensor.name, f"{sensor.name} watches {path}, which is not there: it waits until somebody makes it.")
    if not os.access(path, os.R_OK):
        return problem(sensor.name, f"{sensor.name} watches {path}, which you may not read: give yourself the right.")
    return fine(sensor.name, f"{sensor.name} can read {path}.")


async def _address(name: str, url: str) -> Check:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)
    try:
        async with asyncio.timeout(ANSWERS):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError) as error:
        why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return look(name, f"{name} cannot reach {host}:{port} ({why}): look whether it runs, and at the network.")
    return fine(name, f"{name} reaches {host}:{port}; nothing was asked there.")

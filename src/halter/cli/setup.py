"""`halter init`, `schema` and `doctor`: a new agent, the schemas of its files, and a check of everything it needs."""

import asyncio
import os
import re
import shlex
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from msgspec.structs import replace

from halter.cli.command import (
    JsonOption,
    StoreOption,
    add_connect_timeout,
    describe_never_used,
    fail,
    is_never_used,
    read_cli_settings,
    report_errors,
    require_store,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence, warn
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError, HalterError
from halter.core.ids import may_decide
from halter.core.text import join_names
from halter.core.usage import ModelName
from halter.journal.open import mask_url
from halter.operations.health import Check, CheckStatus, fail_check
from halter.runtime.runtime import open_runtime
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.config.merge import FleetConfig


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder.")],
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="provider:model (default: rules, offline).")
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Its name (default: that of the folder).")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a new agent: its file, its instructions and a tool. Existing files are not touched.

    It works at once, by rules and offline; with --model it uses that model. Its code is trusted as written.
    """
    from halter.config.roots import render_starter_files

    called, thinks = _name(name, folder), _model(model)
    settings = read_cli_settings(None)
    files = render_starter_files(called, thinks)
    trusted = report_errors(lambda: _write_and_trust(folder, files, settings))
    problem = _problem(folder, settings)
    following = _list_next_commands(folder, thinks, trusted=trusted)
    if as_json:
        made = {"folder": str(folder), "name": called, "files": list(files), "trusted": trusted, "problem": problem}
        answer_json({**made, "next": following})
        return
    print_sentence(
        f"{called} is in {folder}: {', '.join(files)}.{' Its code is trusted as it is now.' if trusted else ''}"
    )
    if problem:
        warn(problem)
    print_sentence("\n".join(("Next:", *(f"  {command}" for command in following))))


def _name(name: str, folder: Path) -> str:
    from halter.config.decode import SCALAR_FORMS, UnfitValue

    written = name or re.sub(r"[^A-Za-z0-9_-]+", "-", folder.absolute().resolve().name).strip("-_")[:64].strip("-_")
    try:
        return SCALAR_FORMS["name"].read(written)
    except UnfitValue:
        return fail(f"{written!r} cannot be its name: write --name with {SCALAR_FORMS['name'].expected}.", EXIT_USAGE)


def _model(model: str) -> str:
    from halter.config.decode import SCALAR_FORMS, UnfitValue

    try:
        read = SCALAR_FORMS["model"].read(model) if model else ""
        if read:
            SCALAR_FORMS["name"].read(ModelName.parse(read).provider)
    except UnfitValue:
        return fail(f"{model!r} cannot be its model: write {SCALAR_FORMS['model'].expected}.", EXIT_USAGE)
    return read


def _write_and_trust(folder: Path, files: Mapping[str, str], settings: Settings) -> bool:
    """Write the files; trust their code if a person runs this and the folder held no code before."""
    from halter.config.trust import AgentCode, digest_contents, holds_code
    from halter.runtime.assemble import open_trust

    trust = open_trust(settings) if may_decide(settings.person) else None
    try:
        others = folder.exists() and holds_code(folder)
        there = [name for name in files if (folder / name).exists()]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be looked into: {error.strerror or error}.") from error
    if there:
        fail(f"{folder} has {join_names(there)} already, and nothing is overwritten: name another folder.", EXIT_FAILED)
    _write(folder, files)
    if others or trust is None:
        return False
    contents = AgentCode(folder).contents()
    trust.trust(folder, digest_contents(contents), settings.person, SystemClock().now(), contents)
    return True


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all of the files, none of which may exist, or none of them."""
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                written.append(folder / name)
                file.write(text)
    except OSError as error:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror or error}.") from error


def _problem(folder: Path, settings: Settings) -> str:
    from halter.config.agent_files import read_agent
    from halter.config.merge import FleetConfig, read_fleet
    from halter.config.resolve import resolve_agent

    try:
        fleet = FleetConfig() if settings.fleet is None else read_fleet(settings.fleet)
        resolve_agent(fleet, read_agent(folder), folder)
    except ConfigError as error:
        return str(error)
    return ""


def _list_next_commands(folder: Path, model: str, *, trusted: bool) -> list[str]:
    from halter.config.roots import find_key_variable

    place, key = shlex.quote(str(folder)), find_key_variable(model)
    run = f'halter run {place} "hello"'
    if not trusted:
        return [f"halter trust {place}", run]
    return [f"export {key}=…", run] if key else [run, f"halter chat {place}"]


def schema(
    file: Annotated[
        Literal["agent", "fleet"],
        typer.Argument(metavar="FILE", help="agent for agent.yaml, fleet for halter.yaml."),
    ] = "agent",
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of agent.yaml or halter.yaml, for an editor that completes keys and marks mistakes.

    Give agent or fleet. Every key has its meaning and its default.
    """
    from halter.config.decode import agent_schema, fleet_schema

    _ = as_json  # A schema is JSON in any case.
    answer_json(agent_schema() if file == "agent" else fleet_schema())


MARKS: Final[dict[CheckStatus, str]] = {"ok": "ok", "warning": "look", "problem": "PROBLEM"}
STORE: Final = "store"


def doctor(
    agents: Annotated[
        list[Path] | None, typer.Argument(metavar="AGENT", help="Folders of agents to check, too.")
    ] = None,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check store, disk, workers, channels, sign-on, prices, sandbox, port and agents, and say what to do about each.

    For an agent's folder it checks files, models, keys, secrets and sensors, and runs nothing: no model is asked, no
    secret is shown. Exits 1 if there is a problem, 3 if the store cannot be used.
    """
    settings = report_errors(lambda: read_cli_settings(store))
    checks = report_errors(lambda: asyncio.run(_collect_checks(settings, agents or [], is_never_used(settings, store))))
    if as_json:
        answer_json(checks)
    else:
        rows = [[check.name, MARKS[check.verdict], check.finding] for check in checks]
        answer_table(f"Halter on {mask_url(settings.store)}", ["what", "is", "finding"], rows, long="what finding")
    unusable = next((check for check in checks if check.name == STORE and check.verdict == "problem"), None)
    if unusable is not None:
        warn(unusable.finding, "red")
        raise typer.Exit(EXIT_UNUSABLE)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(EXIT_FAILED)


async def _collect_checks(settings: Settings, agents: Sequence[Path], fresh: bool) -> list[Check]:
    return [check async for check in _run_checks(settings, agents, fresh)]


async def _run_checks(settings: Settings, agents: Sequence[Path], fresh: bool) -> AsyncGenerator[Check]:
    from halter.operations import health
    from halter.operations.health import check_agent

    yield health.check_program()
    checks, fleet = (
        ([Check(STORE, "ok", describe_never_used(settings.store))], None) if fresh else await _store(settings)
    )
    for check in checks:
        yield check
    yield health.check_fleet_file(settings)
    for folder in agents:
        async for check in check_agent(folder, settings, os.environ, fleet):
            yield check
    yield health.check_prices(SystemClock().now())
    yield await health.check_sandbox()
    yield await health.check_port()
    if (tokens := health.check_tokens(settings)) is not None:
        yield tokens
    yield health.check_postgresql()


async def _store(settings: Settings) -> "tuple[list[Check], FleetConfig | None]":
    """Check the store, if it can be opened, and read its policy; a missing one is not created."""
    from halter.channels.health import check_channels
    from halter.channels.serve import connect_directly
    from halter.operations.health import check_store, read_local_policy
    from halter.server.oidc import check_sign_on

    try:
        require_store(settings.store)
        places = replace(settings, store=add_connect_timeout(settings.store))
        async with open_runtime(places, environ=os.environ, acts=False, despite_doubt=True) as app:
            checks = [check async for check in check_store(app)]
            checks += [check async for check in check_channels(app)]
            checks += [check] if (check := await check_sign_on(app, connect_directly)) else []
            return checks, await read_local_policy(app)
    except HalterError as error:
        return [fail_check(STORE, str(error))], None

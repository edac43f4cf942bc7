"""`halter init`, `schema` and `doctor`: write a new agent, print schemas of its files, check everything it needs."""

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
from halter.core.ids import can_decide
from halter.core.text import join_names
from halter.core.usage import ModelName
from halter.journal.open import mask_url
from halter.operations.doctor.check import Check, CheckStatus, fail_check
from halter.runtime.runtime import PriceSource, open_runtime
from halter.settings import Settings

if TYPE_CHECKING:
    from halter.config.merge import FleetConfig


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Agent folder.")],
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="provider:model (default: rules, offline).")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of the agent (default: that of the folder).")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a new agent: its file, its instructions and a tool. Existing files are not changed.

    It runs immediately, by rules and offline; with --model it uses that model. Its code is trusted as written.
    """
    from halter.config.starter_files import render_starter_files

    agent_name, agent_model = _name(name, folder), _model(model)
    settings = read_cli_settings(None)
    files = render_starter_files(agent_name, agent_model)
    is_trusted = report_errors(lambda: _write_and_trust(folder, files, settings))
    problem = _problem(folder, settings)
    next_commands = _list_next_commands(folder, agent_model, trusted=is_trusted)
    if as_json:
        summary = {
            "folder": str(folder),
            "name": agent_name,
            "files": list(files),
            "trusted": is_trusted,
            "problem": problem,
        }
        answer_json({**summary, "next": next_commands})
        return
    print_sentence(
        f"Wrote {agent_name} to {folder}: {', '.join(files)}.{' Its current code is trusted.' if is_trusted else ''}"
    )
    if problem:
        warn(problem)
    print_sentence("\n".join(("Next:", *(f"  {command}" for command in next_commands))))


def _name(name: str, folder: Path) -> str:
    from halter.config.decode import SCALAR_FORMS, UnfitValue

    candidate = name or re.sub(r"[^A-Za-z0-9_-]+", "-", folder.absolute().resolve().name).strip("-_")[:64].strip("-_")
    try:
        return SCALAR_FORMS["name"].read(candidate)
    except UnfitValue:
        return fail(f"Invalid agent name {candidate!r}. Pass --name with {SCALAR_FORMS['name'].expected}.", EXIT_USAGE)


def _model(model: str) -> str:
    from halter.config.decode import SCALAR_FORMS, UnfitValue

    try:
        parsed_model = SCALAR_FORMS["model"].read(model) if model else ""
        if parsed_model:
            SCALAR_FORMS["name"].read(ModelName.parse(parsed_model).provider)
    except UnfitValue:
        return fail(f"Invalid model {model!r}. Use {SCALAR_FORMS['model'].expected}.", EXIT_USAGE)
    return parsed_model


def _write_and_trust(folder: Path, files: Mapping[str, str], settings: Settings) -> bool:
    """Write the files; trust their code if a person runs this and the folder held no code before."""
    from halter.config.trust import AgentCode, digest_contents, holds_code
    from halter.runtime.assembly.folder_code import open_trust

    trust = open_trust(settings) if can_decide(settings.person) else None
    try:
        had_code = folder.exists() and holds_code(folder)
        existing = [name for name in files if (folder / name).exists()]
    except OSError as error:
        raise ConfigError(f"Cannot read {folder}: {error.strerror or error}.") from error
    if existing:
        fail(
            f"{folder} already has {join_names(existing)}. Nothing was written; choose another folder.",
            EXIT_FAILED,
        )
    _write(folder, files)
    if had_code or trust is None:
        return False
    contents = AgentCode(folder).contents()
    trust.trust(folder, digest_contents(contents), settings.person, SystemClock().now(), contents)
    return True


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files, or none if one exists already."""
    written_paths: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                written_paths.append(folder / name)
                file.write(text)
    except OSError as error:
        for path in written_paths:
            with suppress(OSError):
                path.unlink()
        raise ConfigError(f"Cannot write {error.filename or folder}: {error.strerror or error}.") from error


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
    from halter.config.starter_files import find_key_variable

    quoted_folder, key_variable = shlex.quote(str(folder)), find_key_variable(model)
    run = f'halter run {quoted_folder} "hello"'
    if not trusted:
        return [f"halter trust {quoted_folder}", run]
    return [f"export {key_variable}=…", run] if key_variable else [run, f"halter chat {quoted_folder}"]


def schema(
    file: Annotated[
        Literal["agent", "fleet"],
        typer.Argument(metavar="FILE", help="agent for agent.yaml, fleet for halter.yaml."),
    ] = "agent",
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of agent.yaml or halter.yaml, for an editor that completes keys and marks errors.

    Pass agent or fleet. Every key has a description and its default.
    """
    from halter.config.decode import agent_schema, fleet_schema

    _ = as_json  # A schema is always JSON.
    answer_json(agent_schema() if file == "agent" else fleet_schema())


MARKS: Final[dict[CheckStatus, str]] = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}
STORE: Final = "store"


def doctor(
    agents: Annotated[list[Path] | None, typer.Argument(metavar="AGENT", help="Agent folders to check, too.")] = None,
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check store, disk, workers, channels, sign-on, prices, sandbox, port and agents, with a remedy for each problem.

    For an agent folder, check files, models, keys, secrets and sensors. No agent runs, no model is called, no secret is
    shown. Exits 1 if there is a problem, 3 if the store cannot be used.
    """
    settings = report_errors(lambda: read_cli_settings(store))
    checks = report_errors(lambda: asyncio.run(_collect_checks(settings, agents or [], is_never_used(settings, store))))
    if as_json:
        answer_json(checks)
    else:
        rows = [[check.name, MARKS[check.verdict], check.finding] for check in checks]
        answer_table(
            f"Halter on {mask_url(settings.store)}", ["check", "result", "finding"], rows, long="check finding"
        )
    store_problem = next((check for check in checks if check.name == STORE and check.verdict == "problem"), None)
    if store_problem is not None:
        warn(store_problem.finding, "red")
        raise typer.Exit(EXIT_UNUSABLE)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(EXIT_FAILED)


async def _collect_checks(settings: Settings, agents: Sequence[Path], is_unused: bool) -> list[Check]:
    return [check async for check in _run_checks(settings, agents, is_unused)]


async def _run_checks(settings: Settings, agents: Sequence[Path], is_unused: bool) -> AsyncGenerator[Check]:
    from halter.operations.doctor import machine
    from halter.operations.doctor.agent_folder import check_agent

    yield machine.check_program()
    prices = PriceSource()
    checks, fleet = (
        ([Check(STORE, "ok", describe_never_used(settings.store))], None)
        if is_unused
        else await _store(settings, prices)
    )
    for check in checks:
        yield check
    yield machine.check_fleet_file(settings)
    for folder in agents:
        async for check in check_agent(folder, settings, os.environ, fleet, prices.tables):
            yield check
    yield machine.check_prices(SystemClock().now(), prices.read())
    yield await machine.check_sandbox()
    yield await machine.check_port()
    if (tokens := machine.check_tokens(settings)) is not None:
        yield tokens
    yield machine.check_postgresql()


async def _store(settings: Settings, prices: PriceSource) -> "tuple[list[Check], FleetConfig | None]":
    """Check the store, if it can be opened, and read its policy and prices; a missing one is not created."""
    from halter.channels.serve import check_channels
    from halter.net.httpx_transport import connect_directly
    from halter.operations.doctor.store import check_store, read_local_policy
    from halter.server.oidc import check_sign_on

    try:
        require_store(settings.store)
        settings_with_timeout = replace(settings, store=add_connect_timeout(settings.store))
        async with open_runtime(settings_with_timeout, environ=os.environ, acts=False, allow_older_copy=True) as app:
            checks = [check async for check in check_store(app)]
            checks += [check async for check in check_channels(app)]
            checks += [check] if (check := await check_sign_on(app, connect_directly)) else []
            await prices.refresh(app.store)
            return checks, await read_local_policy(app)
    except HalterError as error:
        return [fail_check(STORE, str(error))], None

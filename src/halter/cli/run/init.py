"""`halter init`: write a new agent."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from halter.cli.command import (
    JsonOption,
    fail,
    read_cli_settings,
    report_errors,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence, warn
from halter.config.agent_files import read_agent
from halter.config.decode import SCALAR_FORMS, UnfitValue
from halter.config.merge import FleetConfig, read_fleet
from halter.config.resolve import resolve_agent
from halter.config.starter_files import find_key_variable, render_starter_files
from halter.config.trust import AgentCode, digest_contents, holds_code
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import can_decide
from halter.core.text import join_names
from halter.core.usage import ModelName
from halter.runtime.assembly.folder_code import open_trust
from halter.settings import Settings


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
    candidate = name or re.sub(r"[^A-Za-z0-9_-]+", "-", folder.absolute().resolve().name).strip("-_")[:64].strip("-_")
    try:
        return SCALAR_FORMS["name"].read(candidate)
    except UnfitValue:
        return fail(f"Invalid agent name {candidate!r}. Pass --name with {SCALAR_FORMS['name'].expected}.", EXIT_USAGE)


def _model(model: str) -> str:
    try:
        parsed_model = SCALAR_FORMS["model"].read(model) if model else ""
        if parsed_model:
            SCALAR_FORMS["name"].read(ModelName.parse(parsed_model).provider)
    except UnfitValue:
        return fail(f"Invalid model {model!r}. Use {SCALAR_FORMS['model'].expected}.", EXIT_USAGE)
    return parsed_model


def _write_and_trust(folder: Path, files: Mapping[str, str], settings: Settings) -> bool:
    """Write the files; trust their code if a person runs this and the folder held no code before."""
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
    try:
        fleet = FleetConfig() if settings.fleet is None else read_fleet(settings.fleet)
        resolve_agent(fleet, read_agent(folder), folder)
    except ConfigError as error:
        return str(error)
    return ""


def _list_next_commands(folder: Path, model: str, *, trusted: bool) -> list[str]:
    quoted_folder, key_variable = shlex.quote(str(folder)), find_key_variable(model)
    run = f'halter run {quoted_folder} "hello"'
    if not trusted:
        return [f"halter trust {quoted_folder}", run]
    return [f"export {key_variable}=…", run] if key_variable else [run, f"halter chat {quoted_folder}"]

"""`halter init`: a folder with an agent that works at once."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from halter.cli.answer import answer_json, say, warn
from halter.cli.command import NOT_FINE, WRONG_USE, JsonOption, fail, saying_errors, settings_for
from halter.core.clock import SystemClock
from halter.core.errors import ConfigError
from halter.core.ids import may_decide
from halter.core.text import listed
from halter.core.usage import ModelName
from halter.settings import Settings


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the agent is to live.")],
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="provider:model; without one it works by rules, offline.")
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Its name, if not that of the folder.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write a new agent: its file, its instructions and a tool. Nothing that is there already is touched.

    It works at once, by rules and offline; with --model it thinks with that model. What was written is trusted as
    it is.
    """
    from halter.config.starter import starter

    called, thinks = _name(name, folder), _model(model)
    settings = settings_for(None)
    files = starter(called, thinks)
    trusted = saying_errors(lambda: _made(folder, files, settings))
    problem = _problem(folder, settings)
    following = _following(folder, thinks, trusted=trusted)
    if as_json:
        made = {"folder": str(folder), "name": called, "files": list(files), "trusted": trusted, "problem": problem}
        answer_json({**made, "next": following})
        return
    say(f"{called} is in {folder}: {', '.join(files)}.{' Its code is trusted as it is now.' if trusted else ''}")
    if problem:
        warn(problem)
    say("\n".join(("Next:", *(f"  {command}" for command in following))))


def _name(name: str, folder: Path) -> str:
    """Take the name that was typed, or make one of the folder's."""
    from halter.config.words import WORDS, Unfit

    written = name or re.sub(r"[^A-Za-z0-9_-]+", "-", folder.absolute().resolve().name).strip("-_")[:64].strip("-_")
    try:
        return WORDS["name"].read(written)
    except Unfit:
        return fail(f"{written!r} cannot be its name: write --name with {WORDS['name'].expected}.", WRONG_USE)


def _model(model: str) -> str:
    from halter.config.words import WORDS, Unfit

    try:
        read = WORDS["model"].read(model) if model else ""
        if read:
            WORDS["name"].read(ModelName.parse(read).provider)
    except Unfit:
        return fail(f"{model!r} cannot be its model: write {WORDS['model'].expected}.", WRONG_USE)
    return read


def _made(folder: Path, files: Mapping[str, str], settings: Settings) -> bool:
    """Write the files, and tell whether what can run is trusted: only a person's own, and nothing that was there."""
    from halter.app.agent import trust_of
    from halter.config.trust import Code, digest_of, holds_code

    trust = trust_of(settings) if may_decide(settings.person) else None
    try:
        others = folder.exists() and holds_code(folder)
        there = [name for name in files if (folder / name).exists()]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be looked into: {error.strerror or error}.") from error
    if there:
        fail(f"{folder} has {listed(there)} already, and nothing is overwritten: name another folder.", NOT_FINE)
    _write(folder, files)
    if others or trust is None:
        return False
    contents = Code(folder).contents()
    trust.trust(folder, digest_of(contents), settings.person, SystemClock().now(), contents)
    return True


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all of the files, none of which may be there, or none of them."""
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
    """Tell what keeps the new agent from working here, such as a fleet that does not allow its model."""
    from halter.config.agent import read_agent
    from halter.config.fleet import Fleet, read_fleet
    from halter.config.resolve import resolve_agent

    try:
        fleet = Fleet() if settings.fleet is None else read_fleet(settings.fleet)
        resolve_agent(fleet, read_agent(folder), folder)
    except ConfigError as error:
        return str(error)
    return ""


def _following(folder: Path, model: str, *, trusted: bool) -> list[str]:
    """Say which two commands come next."""
    from halter.config.starter import key_for

    place, key = shlex.quote(str(folder)), key_for(model)
    run = f'halter run {place} "hello"'
    if not trusted:
        return [f"halter trust {place}", run]
    return [f"export {key}=…", run] if key else [run, f"halter chat {place}"]

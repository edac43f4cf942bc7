"""The skills of an agent: folders in `.agents/skills` or `.claude/skills` with a SKILL.md."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from halter.config.folder_files import UnusableFile, decode_file_text, read_folder_file, resolve_links
from halter.config.yaml_reader import load_bytes
from halter.core.errors import ConfigError
from halter.core.text import describe_value, shorten
from halter.spec.skills import SCRIPT_RUNNERS, Skill, SkillScript

SKILLS: Final = ".agents/skills"
SKILL_FOLDERS: Final = (SKILLS, ".claude/skills")
"""The folders of skills: Halter's own, and that of another program."""
SKILL_FILE: Final = "SKILL.md"
_TOOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_FENCE: Final = "---"


def read_skills(folder: Path) -> dict[str, Skill]:
    """Read the skills of an agent. One that is linked into both folders is one skill."""
    skills: dict[str, Skill] = {}
    seen: set[Path] = set()
    for skill_folder in list_skill_folders(folder):
        target = skill_folder.resolve()
        if target in seen:
            continue
        seen.add(target)
        skill = read_skill(folder, skill_folder)
        if skill.name in skills:
            raise ConfigError(
                f"{skill_folder / SKILL_FILE}: another skill is also called {skill.name}; rename one of them."
            )
        skills[skill.name] = skill
    return skills


def list_skill_folders(folder: Path) -> list[Path]:
    places = [folder / name for name in SKILL_FOLDERS if (folder / name).is_dir()]
    return [path for place in places for path in sorted(place.iterdir()) if path.is_dir()]


def read_skill(folder: Path, path: Path) -> Skill:
    file = path / SKILL_FILE
    try:
        data = read_folder_file(folder, str(file.relative_to(folder)))
        text = None if data is None else decode_file_text(data)
    except UnusableFile as error:
        raise ConfigError(f"{file} {error}.") from None
    if text is None:
        raise ConfigError(f"{path} has no {SKILL_FILE}. Write one that describes the skill, or remove the folder.")
    front_matter, body = _split_front_matter(text)
    values = _head(front_matter, str(file))
    name, description = values.get("name", path.name), values.get("description", "")
    if not isinstance(name, str) or not isinstance(description, str) or not name.strip():
        raise ConfigError(f"{file}: `name` and `description` must be text.")
    if not body.strip():
        raise ConfigError(f"{file} has no text below its front matter. Write the instructions.")
    scripts = dict(_read_scripts(path, name.strip(), values.get("scripts", {})))
    return Skill(name.strip(), shorten(description.strip(), 1000), body.strip(), scripts, str(path))


def _read_scripts(path: Path, skill: str, raw_scripts: Any) -> Iterator[tuple[str, SkillScript]]:
    """Yield the scripts that a skill declares, with the name of each one's tool."""
    file = path / SKILL_FILE
    if not isinstance(raw_scripts, dict):
        raise ConfigError(
            f"{file}: `scripts` is {describe_value(raw_scripts)}, but must be a mapping of names to scripts."
        )
    for key, value in cast("dict[Any, Any]", raw_scripts).items():
        where = f"{file}: `scripts.{shorten(str(key))}`"
        try:
            script = msgspec.convert(value, SkillScript)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} is invalid: {error}.") from None
        name = f"{skill}_{key}"
        if not _TOOL_NAME.fullmatch(name):
            raise ConfigError(f"{where} would become the tool {name!r}; use letters, digits, - and _ in both names.")
        _check_script_file(path, script.file, where)
        yield name, script


def _check_script_file(path: Path, name: str, where: str) -> None:
    """Require that a script is a file in the skill's folder and can be run."""
    script = path / name
    if not resolve_links(script).is_relative_to(path.resolve()):
        raise ConfigError(f"{where} names {name}, which is outside the skill's folder; move it there.")
    if not script.is_file():
        raise ConfigError(f"{where} names {name}, which does not exist in {path}.")
    if script.suffix not in SCRIPT_RUNNERS and not os.access(script, os.X_OK):
        raise ConfigError(f"{where}: {name} cannot be run. Make it executable (chmod +x), or use a .py or .sh file.")


def _split_front_matter(text: str) -> tuple[str, str]:
    lines = text.splitlines(keepends=True)
    if not lines or lines[0].strip() != _FENCE:
        return "", text
    for number, line in enumerate(lines[1:], 1):
        if line.strip() == _FENCE:
            return "".join(lines[1:number]), "".join(lines[number + 1 :])
    return "", text


def _head(text: str, file: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    value = load_bytes(text.encode(), file).value
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

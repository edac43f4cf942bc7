"""Skills: folders with a SKILL.md, read where they stand, in `.agents/skills` of an agent's folder."""

from pathlib import Path
from typing import Any, Final, cast

from halter.config.beside import Unreadable, read_beside, text_of
from halter.config.load import load_bytes
from halter.core.errors import ConfigError
from halter.core.tasks import Skill
from halter.core.text import shorten

SKILLS: Final = ".agents/skills"
SKILL_FILE: Final = "SKILL.md"
_FENCE: Final = "---"


def read_skills(folder: Path) -> dict[str, Skill]:
    """Read the skills of an agent, by name, or raise a ConfigError that says what to change."""
    home = folder / SKILLS
    if not home.is_dir():
        return {}
    found: dict[str, Skill] = {}
    for place in sorted(path for path in home.iterdir() if path.is_dir()):
        skill = read_skill(folder, place)
        if skill.name in found:
            raise ConfigError(f"{place / SKILL_FILE} is called {skill.name}, as another skill is: rename one of them.")
        found[skill.name] = skill
    return found


def read_skill(folder: Path, place: Path) -> Skill:
    """Read one skill."""
    file = place / SKILL_FILE
    try:
        data = read_beside(folder, str(file.relative_to(folder)))
        text = None if data is None else text_of(data)
    except Unreadable as why:
        raise ConfigError(f"{file} {why}.") from None
    if text is None:
        raise ConfigError(
            f"{place} has no {SKILL_FILE}: write one that says what the skill does, or remove the folder."
        )
    head, body = _parted(text)
    values = _head(head, str(file))
    name, description = values.get("name", place.name), values.get("description", "")
    if not isinstance(name, str) or not isinstance(description, str) or not name.strip():
        raise ConfigError(f"{file}: `name` and `description` must be words.")
    if not body.strip():
        raise ConfigError(f"{file} says nothing beside its head: write what is to be done.")
    return Skill(name.strip(), shorten(description.strip(), 1000), body.strip())


def _parted(text: str) -> tuple[str, str]:
    """Part what stands between two fences at the beginning from the rest."""
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

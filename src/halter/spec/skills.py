"""The contents of a SKILL.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from halter.core.provenance import Reach, Reads
from halter.core.tools import Effect, Level

SCRIPT_RUNNERS: Final[Mapping[str, str]] = {".py": "python3", ".sh": "sh"}
"""The interpreter of a script by suffix; other scripts must be executable."""


class SkillScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program in a skill's folder, named by its path there. It becomes a tool."""

    file: str
    description: str
    level: Level = "CONTROLLED"
    effect: Effect = "write"
    reads: Reads = "anyone"
    reach: Reach = "own"
    timeout: str | float = 60

    def argv(self, folder: Path) -> list[str]:
        runner = SCRIPT_RUNNERS.get(Path(self.file).suffix)
        return [*([runner] if runner else ()), str(folder / self.file)]


class Skill(msgspec.Struct, frozen=True):
    """The contents of a SKILL.md. `scripts` are keyed by tool name; `folder` contains them."""

    name: str
    description: str
    instructions: str
    scripts: Mapping[str, SkillScript] = {}
    folder: str = ""

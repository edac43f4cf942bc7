"""Instructions that other programs read, too: CLAUDE.md and what it imports."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from halter.config.folder_files import UnusableFile, decode_file_text, read_folder_file

INSTRUCTIONS: Final = "AGENTS.md"


GUIDANCE_FILES: Final = ("CLAUDE.md", ".claude/CLAUDE.md")
"""Instructions that other programs read, too. They follow AGENTS.md."""
MAX_IMPORT_DEPTH: Final = 5
MAX_IMPORTS: Final = 100
MAX_IMPORT_WORDS: Final = 2000
"""Different words after `@` that are looked up. Each costs several calls to the file system."""
_NO_PROSE: Final = re.compile(
    r"^[ \t>]*(?P<fence>`{3,}|~{3,}).*?(?:^[ \t>]*(?P=fence)[`~]*[ \t]*$|\Z)|(?P<ticks>`+)|<!--",
    re.DOTALL | re.MULTILINE,
)
"""Code and comments, in which nothing is an import: a whole block of code, or what opens the others."""
_IMPORT: Final = re.compile(r"(?:^|(?<=\s))@((?:[^\s\\]|\\ )+)", re.MULTILINE)
_ENDS_SENTENCE: Final = ".,;:!?)]}'\""


class Guidance(msgspec.Struct, frozen=True):
    """The text of the guidance files and of what they import, the files that it comes from, and what was left out."""

    text: str = ""
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_guidance(folder: Path, data_places: Iterable[Path] = ()) -> Guidance:
    """Read CLAUDE.md, and the files that it imports with `@path`. What cannot be read is left out, with a note.

    An imported file is below the folder, and not in one of the `data_places`, where the agent may have written it.
    """
    return _GuidanceReader(folder, data_places).read()


class _GuidanceReader:
    def __init__(self, folder: Path, data_places: Iterable[Path]) -> None:
        self._root = folder.resolve()
        self._data_places = tuple(data_places)
        self._seen = {self._root / INSTRUCTIONS, (self._root / INSTRUCTIONS).resolve()}
        self._words = set[tuple[Path, str]]()
        self._texts: list[str] = []
        self._files: list[str] = []
        self._notes: list[str] = []

    def read(self) -> Guidance:
        for name in GUIDANCE_FILES:
            path = self._root / name
            try:
                data = read_folder_file(self._root, name)
                text = None if data is None else decode_file_text(data)
            except UnusableFile as error:
                self._notes.append(f"{path} is left out: it {error}.")
                continue
            if text is not None and (target := path.resolve()) not in self._seen:
                self._seen.add(target)
                self._add(name, text.strip(), path, 0)
        return Guidance("\n\n".join(filter(None, self._texts)), tuple(self._files), tuple(self._notes))

    def _add(self, name: str, text: str, path: Path, depth: int) -> None:
        self._files.append(name)
        self._texts.append(f"Contents of {name}:\n\n{text}" if depth else text)
        for match in _IMPORT.finditer(_strip_code(text)):
            name = match[1].replace("\\ ", " ").partition("#")[0]
            if (path.parent, name) in self._words:
                continue
            if len(self._words) == MAX_IMPORT_WORDS:
                self._omit(name, path, f"at most {MAX_IMPORT_WORDS:,} different words after @ are looked up")
                return
            self._words.add((path.parent, name))
            self._import(name, path, depth + 1)

    def _import(self, name: str, importer: Path, depth: int) -> None:
        """Import a file. A word that names no file is not an import."""
        names = (name, name.rstrip(_ENDS_SENTENCE))
        paths = [importer.parent / os.path.expanduser(each) for each in names if each and "\0" not in each]  # noqa: PTH111
        try:
            path = next((path.resolve() for path in paths if path.is_file()), None)
        except (OSError, RuntimeError):
            path = None
        if path is None or path in self._seen or path == self._root:
            if path is None and name.startswith(("~/", "../")):
                self._omit(names[-1], importer, "it does not exist, and imports are below the agent's folder")
            return
        if objection := self._find_objection(path, depth):
            self._omit(names[-1], importer, objection)
            return
        inner_name = path.relative_to(self._root).as_posix()
        try:
            text = decode_file_text(read_folder_file(self._root, inner_name) or b"")
        except UnusableFile as error:
            self._omit(names[-1], importer, f"it {error}")
            return
        self._seen.add(path)
        self._add(inner_name, text.strip(), path, depth)

    def _find_objection(self, path: Path, depth: int) -> str:
        if not path.is_relative_to(self._root):
            return f"it is outside the agent's folder; copy it there, or put its text into {INSTRUCTIONS}"
        if any(path.is_relative_to(place) for place in self._data_places):
            return "it is in a folder of data, which the agent may have written; move it"
        if depth > MAX_IMPORT_DEPTH:
            return f"imports are at most {MAX_IMPORT_DEPTH} levels deep"
        return f"at most {MAX_IMPORTS} files are imported" if len(self._files) > MAX_IMPORTS else ""

    def _omit(self, name: str, importer: Path, why: str) -> None:
        self._notes.append(f"{importer}: @{name} is not imported: {why}.")


def _strip_code(text: str) -> str:
    """Leave out code and comments, in time that is proportional to the text, also if many of them have no end."""
    ends: dict[str, list[int]] = {}
    for run in re.finditer("`+", text):
        ends.setdefault(run[0], []).append(run.end())
    last_comment_end = text.rfind("-->")
    prose: list[str] = []
    at = 0
    while match := _NO_PROSE.search(text, at):
        prose.append(text[at : match.start()])
        at = match.end()
        if ticks := match["ticks"]:
            later_ends = ends.get(ticks, [])
            index = bisect_right(later_ends, at)
            at = later_ends[index] if index < len(later_ends) else at
        elif not match["fence"] and at <= last_comment_end:
            at = text.index("-->", at) + len("-->")
    return "".join((*prose, text[at:]))

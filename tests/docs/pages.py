"""The pages of the documentation, taken apart into the blocks that they show.

What a reader is not shown stands in a comment right before a block:

| comment | meaning |
|---|---|
| `not run: WHY` | the block cannot run here |
| `goes on` | its last command is left running, as in another terminal |
| `printed by: WORD` | it shows what the command with that word prints, and not the one that was left running last |
| `leaves with N` | the exit code of its last command |
| `file: NAME` | the block is that file; a first line that reads `# NAME` says the same |

A comment `with: NAME` over more than one line is a file that the page needs and does not show. `port: N` says that a
free port is to be taken in place of that one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
NAMED = re.compile(r"# ([\w./-]+\.(?:yaml|py|md|json|txt))\n")


@dataclass(frozen=True)
class Block:
    """Something that a page shows between two fences, and what stands in comments right before it."""

    page: str
    line: int
    language: str
    text: str
    notes: tuple[str, ...]

    def note(self, word: str) -> str | None:
        """Find what a comment says after a word."""
        return next((note[len(word) :].lstrip(": ") for note in self.notes if note.startswith(word)), None)

    @property
    def file(self) -> str:
        """The name of the file that it is, if it is one."""
        first = NAMED.match(self.text)
        return self.note("file") or (first[1] if first else "")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page of the documentation."""

    name: str

    @cached_property
    def text(self) -> str:
        """What stands on it."""
        return (ROOT / self.name).read_text("utf-8")

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """What it shows between fences, from its beginning to its end."""
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        for match in FENCE.finditer(self.text):
            line = self.text.count("\n", 0, match.start()) + 1
            yield Block(self.name, line, match[1], match[2], tuple(_before(self.text[: match.start()])))

    @property
    def hidden(self) -> Iterator[tuple[str, str]]:
        """The files that it needs and does not show."""
        for comment in COMMENT.findall(self.text):
            first, _, rest = comment.partition("\n")
            if rest and first.startswith("with:"):
                yield first.removeprefix("with:").strip(), f"{rest}\n"

    @property
    def ports(self) -> list[str]:
        """The ports on which something listens there."""
        return re.findall(r"<!-- port: (\d+) -->", self.text)

    def __str__(self) -> str:
        return self.name


def _before(text: str) -> Iterator[str]:
    """List the comments at the end of a text, the last one first."""
    while match := re.search(r"<!--((?:(?!-->).)*)-->\s*\Z", text, re.DOTALL):
        yield match[1].strip()
        text = text[: match.start()]


def all_pages() -> list[Page]:
    """List every page that people read, except for those that are made from the code."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(str(path.relative_to(ROOT))) for path in paths if path.parent.name != "reference"]

"""Whether what a program printed is what a page shows.

`…` stands for anything on a line, and alone on a line for any number of lines. Ids, times and digests differ from run
to run: an id on a page stands for whatever is printed in its place, there and from then on.
"""

import re
from collections.abc import Iterable, Iterator

ID = re.compile(r"\b01[0-9a-hjkmnp-tv-z]{24}\b")
VARIES = re.compile(
    r"(?P<id>\b01[0-9a-hjkmnp-tv-z]{24}\b)|(?P<any>…)"
    r"|(?P<when>\b(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d\b)|(?P<day>\b\d{4}-\d\d-\d\d\b)"
    r"|(?P<digest>\b[0-9a-f]{16,64}\b)|(?P<ago>\b\d+(?:ms|s|m\d*s?) (?=ago))"
)
LIKE = {
    "any": r".*?",
    "when": r"(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d",
    "day": r"\d{4}-\d\d-\d\d",
    "digest": r"[0-9a-f]{16,64}",
    "ago": r"\w+ ",
}


class Ids(dict[str, str]):
    """The ids of a page, and those that were really given."""

    def put_into(self, command: str) -> str:
        """Write a command with the ids that were given."""
        return ID.sub(lambda found: self.get(found[0], found[0]), command)

    def matches(self, text: str, line: str) -> bool:
        """Compare a line of the page with one that was printed; learn the ids that stand in it."""
        text, new = tidy(text), list[str]()
        texts, at = list[str](), 0
        for found in VARIES.finditer(text):
            texts += [re.escape(text[at : found.start()]), self._like(found, new)]
            at = found.end()
        match = re.fullmatch("".join((*texts, re.escape(text[at:]))), tidy(line))
        if match:
            self.update(zip(new, match.groups(), strict=True))
        return match is not None

    def _like(self, match: re.Match[str], new: list[str]) -> str:
        kind, text = str(match.lastgroup), match[0]
        if kind != "id":
            return LIKE[kind]
        if text in self:
            return re.escape(self[text])
        if text in new:
            return rf"\{new.index(text) + 1}"
        new.append(text)
        return r"(01[0-9a-hjkmnp-tv-z]{24})"


def tidy(line: str) -> str:
    """Leave out what only lays a table out."""
    return re.sub(r"[─━]+", "─", re.sub(r"\s+", " ", line)).strip()


def difference(texts: Iterable[str], printed: Iterator[str], ids: Ids, *, to_the_end: bool) -> str:
    """Say what a page shows that was not printed, or what was printed that it does not show; or nothing."""
    skipping, seen = False, list[str]()
    for line in texts:
        if tidy(line) in {"…", "..."}:
            skipping = True
            continue
        for got in printed:
            seen.append(got)
            if ids.matches(line, got):
                skipping = False
                break
            if not skipping:
                return _told(line, seen)
        else:
            return _told(line, seen)
    left = [] if skipping or not to_the_end else [line for line in printed if tidy(line)]
    return _told("(nothing more)", [*seen, *left]) if left else ""


def _told(text: str, texts: list[str]) -> str:
    return "\n".join((f"The page shows: {text}", "What was printed:", *texts))

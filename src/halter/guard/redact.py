"""The one place where secrets are taken out of text, before journal, audit, model, events, logs and errors see it.

Known live values go first, in all their spellings; then whatever looks like one of the usual keys. It works on the
whole text, so it comes before any truncation, and takes time in proportion to the text, however hostile. Marks that
it left are never touched again, so redacting twice changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Final, NamedTuple

from halter.core.text import to_body
from halter.guard.families import FAMILIES
from halter.guard.family import Candidate, Family
from halter.guard.linear import Regex, any_of
from halter.guard.live import LiveValues
from halter.guard.spellings import LONGEST_SPELLING

_OPENING: Final = b"[redacted:"
_HEAD: Final = 2
_SPACED: Final = 12
"""So long a character may be in a spelling that has spaces or goes over lines; others have none to be cut at."""
_MEMORY: Final = 1024
_SHORT: Final = 4096
_WORD: Final = frozenset(byte for byte in range(128) if chr(byte).isalnum() or byte == ord("_"))
_REFERENCE: Final = b"${"
_STAND_IN: Final = b"xxxxxx"
_BEHIND: Final = 40
_ROOM: Final = len("://") + len("pwd=word")
_SECRET_WORDS: Final = frozenset(
    {
        *("KEY", "KEYS", "APIKEY", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS"),
        *("PAT", "CREDENTIAL", "CREDENTIALS", "DSN", "COOKIE", "AUTH", "WEBHOOK", "SALT"),
    }
)
_NEVER_SECRET: Final = frozenset({"FILE", "PATH", "SOCK", "DIR", "ID", "NAME"})


class Span(NamedTuple):
    """A part of a text that is to be hidden, what it is, and where that begins by which it is known."""

    start: int
    end: int
    name: str
    lead: int
    roomy: bool = False


class Shape(NamedTuple):
    """A family, compiled."""

    family: Family
    lead: Regex | None
    whole: Regex | None
    behind: Regex | None


class Shapes(NamedTuple):
    """All families as one automaton, and which of them may begin with which two characters."""

    scan: Regex
    by_head: Mapping[bytes, Sequence[Shape]]


def secret_like(name: str) -> bool:
    """Tell whether a variable of this name holds a secret, as most programs name them."""
    words = name.upper().replace("-", "_").replace(".", "_").split("_")
    return words[-1] not in _NEVER_SECRET and not _SECRET_WORDS.isdisjoint(words)


class Redactor:
    """Takes secrets out of text.

    All of `secrets` are looked for; of `environment`, those with a secret-like name. Values of fewer than eight
    characters are left: hiding them would hide innocent words.
    """

    def __init__(self, secrets: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
        likely = {name: value for name, value in (environment or {}).items() if secret_like(name)}
        self._known = LiveValues({**likely, **secrets})
        longest = max((len(value) for value in (*likely.values(), *secrets.values())), default=0)
        self.spaced = min(_SPACED * longest, LONGEST_SPELLING)
        self._marks = frozenset(_mark(name) for name in (*(family.name for family in FAMILIES), *likely, *secrets))
        self._shapes = _shapes()
        self._innocent: set[str] = set()

    def redact(self, text: str) -> str:
        """Return the text with a mark such as `[redacted:github]` in the place of each secret. Never raises."""
        if text in self._innocent:
            return text
        data = to_body(text)
        spans = self.spans(data)
        if spans:
            return hide(data, spans).decode("utf-8", "surrogatepass")
        self._remember(text)
        return text

    def _remember(self, text: str) -> None:
        """Know a text again in which there is nothing to hide: it is looked at on its way in, and on every way out."""
        if len(text) > _SHORT:
            return
        if len(self._innocent) >= _MEMORY:
            self._innocent.clear()
        self._innocent.add(text)

    def spans(self, data: bytes) -> list[Span]:
        """Find what is to be hidden, in order, never overlapping, in text encoded by `to_body`."""
        found: list[Span] = []
        for start, end in self._between_marks(data):
            at = start
            for known in self._known.find(data, start, end):
                found.extend(_shaped(self._shapes, data, at, known.start))
                found.append(Span(known.start, known.end, known.name, known.start))
                at = known.end
            found.extend(_shaped(self._shapes, data, at, end))
        return found

    def _between_marks(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Give the parts of a text that are not marks. A mark with any other name in it is text like any other."""
        start = 0
        opened = data.find(_OPENING)
        while opened >= 0:
            closed = data.find(b"]", opened, opened + 200)
            if data[opened : closed + 1] in self._marks:
                yield start, opened
                start = closed + 1
            opened = data.find(_OPENING, opened + 1)
        yield start, len(data)


def hide(data: bytes, spans: Sequence[Span]) -> bytes:
    """Put marks in the place of spans; what is hidden piece by piece gets one mark."""
    kept: list[bytes] = []
    at = 0
    last = ""
    for span in spans:
        if span.start > at or span.name != last:
            kept += (data[at : span.start], _mark(span.name))
        at, last = span.end, span.name
    kept.append(data[at:])
    return b"".join(kept)


@lru_cache(_MEMORY)
def _mark(name: str) -> bytes:
    return _OPENING + _shown(name).encode() + b"]"


def _shown(name: str) -> str:
    """Keep of a name what a mark can carry."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in name)


@cache
def _shapes() -> Shapes:
    by_head: dict[bytes, list[Shape]] = {}
    for family in FAMILIES:
        shape = _shape(family)
        for head in {head[:_HEAD].lower() for head in family.heads}:
            by_head.setdefault(head, []).append(shape)
    scan = any_of(_folded(family, (r"\b" if family.edge else "") + family.lead + family.near) for family in FAMILIES)
    return Shapes(Regex(scan), by_head)


def _shape(family: Family) -> Shape:
    lead = Regex(_folded(family, family.lead)) if family.lead else None
    whole = Regex(_folded(family, family.whole)) if family.whole else None
    behind = Regex(family.behind.encode()) if family.behind else None
    return Shape(family, lead, whole, behind)


def _folded(family: Family, pattern: str) -> bytes:
    return f"(?i:{pattern})".encode() if family.fold else pattern.encode()


def _shaped(shapes: Shapes, data: bytes, start: int, end: int) -> list[Span]:
    """Find what looks like a key between two places, as if there were nothing outside."""
    found: list[Span] = []
    _look(shapes, data, (start, start, end), found)
    return found


def _look(shapes: Shapes, data: bytes, within: tuple[int, int, int], found: list[Span]) -> None:
    """Look from a place to an end; `free` is where the text begins that is not hidden yet.

    There a key may begin whatever was before, which the automaton for all families cannot know.
    """
    free, at, end = within
    scan, by_head = shapes
    place = at
    while True:
        likely = by_head.get(data[place : place + _HEAD].lower())
        span = _fitting(likely, data, (free, place, end)) if likely else None
        if span is not None:
            if span.roomy and span.start - place > _ROOM:
                _look(shapes, data, (free, place + len(b"://"), span.start), found)
            found.append(span)
            free = at = place = span.end
            continue
        match = scan.search(data, at, end)
        if match is None:
            return
        place = match[0]
        at = place + 1


def _fitting(likely: Sequence[Shape], data: bytes, within: tuple[int, int, int]) -> Span | None:
    """Find the family that a match belongs to, if what stands before it does not speak against it."""
    free, place, end = within
    for shape in likely:
        if _contradicted(shape, data, free, place):
            continue
        family, lead, whole, _ = shape
        start = place if lead is None else lead.match(data, place, end)
        if start < 0:
            continue
        if family.read is not None:
            stop = family.read(Candidate(data, free, place, start, end))
        else:
            stop = -1 if whole is None else whole.match(data, start, end)
        if stop < 0 or (family.check is not None and not family.check(data[start:stop])):
            continue
        if lead is None and _STAND_IN in data[start:stop].lower():
            continue
        while family.reach and start > free and data[start - 1] in family.reach:
            start -= 1
        return Span(start, stop, family.name, min(place, start), family.roomy)
    return None


def _contradicted(shape: Shape, data: bytes, free: int, place: int) -> bool:
    """Tell whether it is another family's, by what is cheap to see. Two characters are all that is known so far."""
    family, _, _, behind = shape
    if family.fold:
        return data.endswith(_REFERENCE, free, place)
    if behind is not None:
        before = data[max(free, place - _BEHIND) : place]
        return behind.match(before, 0, len(before)) < 0
    if family.edge and place > free and data[place - 1] in _WORD:
        return True
    return not data.startswith(family.heads, place)

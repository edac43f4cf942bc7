"""Redaction of secrets in all text before it reaches the journal, audit, model, events, logs and errors.

Known live values are redacted first, in all their spellings; then everything that matches a pattern of a common key.
Redaction needs the whole text, so it comes before any truncation, and takes linear time on hostile input. Its marks are
never changed, so redacting twice changes nothing.

Messages are masked text by text: within JSON, the quotes and line ends of a secret would be escaped. Characters that
JSON cannot represent are replaced first, so that the sent, stored and returned texts are the same. Strings in JSON are
changed without parsing: only quotes are examined, so that numbers, order and duplicate keys stay, any depth is
possible, and broken JSON is masked as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Final, NamedTuple

from halter.core.text import encode_body, make_word_set
from halter.redaction.key_patterns import SECRET_FAMILIES, SEVERAL_WORDS
from halter.redaction.named_secrets import find_table_cells
from halter.redaction.secret_values import (
    Candidate,
    Regex,
    SecretFamily,
    compile_regex,
    join_patterns,
)
from halter.redaction.secrets import MAX_SPELLING_LENGTH, LiveValues

Redact = Callable[[str], str]

_OPENING: Final = b"[redacted:"
_HEAD: Final = 2
_SPACED: Final = 12
"""The longest character in a spelling with spaces or line breaks. Chunks never split other spellings."""
MAX_CACHED_TEXTS: Final = 1024
MAX_CACHED_CHARACTERS: Final = 1 << 22
"""Maximum number of cached texts without a secret, and of their characters in total."""
MAX_CACHED_TEXT_LENGTH: Final = 1 << 16
_WORD: Final = frozenset(byte for byte in range(128) if chr(byte).isalnum() or byte == ord("_"))
_REFERENCE: Final = b"${"
_STAND_IN: Final = b"xxxxxx"
_BEHIND: Final = 40
_NESTED_LEAD_LENGTH: Final = len("://") + len("pwd=word")
_SECRET_WORDS: Final = make_word_set(
    "KEY KEYS APIKEY TOKEN TOKENS SECRET SECRETS PASSWORD PASSWD PASSPHRASE PASS PAT CREDENTIAL CREDENTIALS DSN COOKIE "
    "AUTH WEBHOOK SALT"
)
_NEVER_SECRET: Final = frozenset({"FILE", "PATH", "SOCK", "DIR", "ID", "NAME"})


class SecretSpan(NamedTuple):
    """A range to hide, its kind, and the start of its announcement."""

    start: int
    end: int
    name: str
    lead: int
    roomy: bool = False


class CompiledFamily(NamedTuple):
    family: SecretFamily
    lead: Regex | None
    whole: Regex | None
    behind: Regex | None


class CompiledFamilies(NamedTuple):
    """All families as one automaton, and each family by its first two characters."""

    scan: Regex
    by_head: Mapping[bytes, Sequence[CompiledFamily]]


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return True if a variable of this name usually contains a secret."""
    words = name.upper().replace("-", "_").replace(".", "_").split("_")
    return words[-1] not in _NEVER_SECRET and not _SECRET_WORDS.isdisjoint(words)


def select_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables of an environment that usually contain a secret."""
    return {name: environment[name] for name in environment if is_secret_name(name)}


class CleanTexts(set[str]):
    """A cache of texts without a secret, since each text is redacted at several exits. Cleared when it is full."""

    _characters = 0

    def remember(self, text: str) -> None:
        if len(text) > MAX_CACHED_TEXT_LENGTH or text in self:
            return
        self._characters += len(text)
        if len(self) >= MAX_CACHED_TEXTS or self._characters > MAX_CACHED_CHARACTERS:
            self.clear()
            self._characters = len(text)
        self.add(text)


class Redactor:
    """Redacts secrets in text.

    It searches for all values of `secrets`, and for those of `environment` with a secret-like name. Values of fewer
    than eight characters are ignored: hiding them would hide ordinary words.
    """

    def __init__(self, secrets: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
        likely_secrets = select_secrets(environment or {})
        self._live_values = LiveValues({**likely_secrets, **secrets})
        longest = max((len(value) for value in (*likely_secrets.values(), *secrets.values())), default=0)
        self.spaced = min(_SPACED * longest, MAX_SPELLING_LENGTH)
        self._marks = frozenset(
            _make_mark(name) for name in (*(family.name for family in SECRET_FAMILIES), *likely_secrets, *secrets)
        )
        self._shapes = _compile_families()
        self._clean = CleanTexts()

    def redact(self, text: str) -> str:
        """Replace each secret by a mark such as `[redacted:github]`. Never raises."""
        if text in self._clean:
            return text
        data = encode_body(text)
        spans = self.spans(data)
        if spans:
            return hide_spans(data, spans).decode("utf-8", "surrogatepass")
        self._clean.remember(text)
        return text

    def spans(self, data: bytes) -> list[SecretSpan]:
        """Find the ranges to hide, in order, without overlaps, in text encoded by `encode_body`."""
        secret_spans: list[SecretSpan] = []
        for start, end in self._between_marks(data):
            at = start
            for live_secret in self._live_values.find(data, start, end):
                secret_spans.extend(_find_family_spans(self._shapes, data, at, live_secret.start))
                secret_spans.append(SecretSpan(live_secret.start, live_secret.end, live_secret.name, live_secret.start))
                at = live_secret.end
            secret_spans.extend(_find_family_spans(self._shapes, data, at, end))
        cells = [SecretSpan(start, end, "password", start) for start, end in find_table_cells(data)]
        return _add_cells(data, secret_spans, cells) if cells else secret_spans

    def can_begin_spaced_secret(self, data: bytes, start: int) -> bool:
        """Return True if the text after `start` may begin a secret that continues after a space."""
        end = len(data)
        return compile_regex(SEVERAL_WORDS).search(data, start, end) is not None or self._live_values.begins(
            data, start, end
        )

    def _between_marks(self, data: bytes) -> Iterator[tuple[int, int]]:
        """List the ranges between marks. Only marks with known names count."""
        start = 0
        mark_start = data.find(_OPENING)
        while mark_start >= 0:
            mark_end = data.find(b"]", mark_start, mark_start + 200)
            if data[mark_start : mark_end + 1] in self._marks:
                yield start, mark_start
                start = mark_end + 1
            mark_start = data.find(_OPENING, mark_start + 1)
        yield start, len(data)


def _add_cells(data: bytes, spans: Sequence[SecretSpan], cells: Sequence[SecretSpan]) -> list[SecretSpan]:
    """Add the cells of tables that contain neither a range nor a mark."""
    taken_spans = iter(spans)
    taken = next(taken_spans, None)
    added: list[SecretSpan] = []
    for cell in cells:
        while taken is not None and taken.end <= cell.start:
            taken = next(taken_spans, None)
        if (taken is None or cell.end <= taken.start) and _OPENING not in data[cell.start : cell.end]:
            added.append(cell)
    return sorted([*spans, *added])


def hide_spans(data: bytes, spans: Sequence[SecretSpan]) -> bytes:
    """Replace ranges by marks. Adjacent ranges with one name get one mark."""
    chunks: list[bytes] = []
    at = 0
    last_name = ""
    for span in spans:
        if span.start > at or span.name != last_name:
            chunks += (data[at : span.start], _make_mark(span.name))
        at, last_name = span.end, span.name
    chunks.append(data[at:])
    return b"".join(chunks)


@lru_cache(MAX_CACHED_TEXTS)
def _make_mark(name: str) -> bytes:
    return (
        _OPENING
        + "".join(
            letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in name
        ).encode()
        + b"]"
    )


@cache
def _compile_families() -> CompiledFamilies:
    by_head: dict[bytes, list[CompiledFamily]] = {}
    for family in SECRET_FAMILIES:
        lead = Regex(_encode_pattern(family, family.lead)) if family.lead else None
        whole = Regex(_encode_pattern(family, family.whole)) if family.whole else None
        behind = Regex(family.behind.encode()) if family.behind else None
        compiled_family = CompiledFamily(family, lead, whole, behind)
        for head in {head[:_HEAD].lower() for head in family.heads}:
            by_head.setdefault(head, []).append(compiled_family)
    scan = join_patterns(
        _encode_pattern(family, (r"\b" if family.edge else "") + family.lead + family.near)
        for family in SECRET_FAMILIES
    )
    return CompiledFamilies(Regex(scan), by_head)


def _encode_pattern(family: SecretFamily, pattern: str) -> bytes:
    return f"(?i:{pattern})".encode() if family.fold else pattern.encode()


def _find_family_spans(shapes: CompiledFamilies, data: bytes, start: int, end: int) -> list[SecretSpan]:
    """Find keys in a range. Text outside the range is ignored."""
    spans: list[SecretSpan] = []
    _scan_families(shapes, data, (start, start, end), spans)
    return spans


def _scan_families(
    shapes: CompiledFamilies, data: bytes, bounds: tuple[int, int, int], spans: list[SecretSpan]
) -> None:
    """Scan the range `bounds`: the start of unhidden text, the position to scan from, and the end.

    A key may begin at the start of unhidden text regardless of what precedes it, which the joint automaton cannot know.
    """
    free, at, end = bounds
    scan, by_head = shapes
    position = at
    while True:
        families = by_head.get(data[position : position + _HEAD].lower())
        span = _match_family(families, data, (free, position, end)) if families else None
        if span is not None:
            if span.roomy and span.start - position > _NESTED_LEAD_LENGTH:
                _scan_families(shapes, data, (free, position + len(b"://"), span.start), spans)
            spans.append(span)
            free = at = position = span.end
            continue
        match = scan.search(data, at, end)
        if match is None:
            return
        position = match[0]
        at = position + 1


def _match_family(families: Sequence[CompiledFamily], data: bytes, bounds: tuple[int, int, int]) -> SecretSpan | None:
    """Find the family of a match, unless the text before it contradicts that."""
    free, position, end = bounds
    for compiled_family in families:
        if _is_contradicted(compiled_family, data, free, position):
            continue
        family, lead, whole, _ = compiled_family
        start = position if lead is None else lead.match(data, position, end)
        if start < 0:
            continue
        if family.read is not None:
            stop = family.read(Candidate(data, free, position, start, end))
        else:
            stop = -1 if whole is None else whole.match(data, start, end)
        if stop < 0 or (family.check is not None and not family.check(data[start:stop])):
            continue
        if lead is None and _STAND_IN in data[start:stop].lower():
            continue
        while family.reach and start > free and data[start - 1] in family.reach:
            start -= 1
        return SecretSpan(start, stop, family.name, min(position, start), family.roomy)
    return None


def _is_contradicted(compiled_family: CompiledFamily, data: bytes, free: int, position: int) -> bool:
    """Return True if a match does not belong to a family, of which only two characters were compared. A fast check."""
    family, _, _, behind = compiled_family
    if family.fold:
        return data.endswith(_REFERENCE, free, position)
    if behind is not None:
        before = data[max(free, position - _BEHIND) : position]
        return behind.match(before, 0, len(before)) < 0
    if family.edge and position > free and data[position - 1] in _WORD:
        return True
    return not data.startswith(family.heads, position)

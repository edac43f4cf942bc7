"""The one place where secrets are taken out of text, before journal, audit, model, events, logs and errors see it.

Known live values go first, in all their spellings; then everything that matches a pattern of a common key. It works on
the whole text, so it comes before any truncation, and takes linear time on hostile input. Its marks are never
changed again, so redacting twice changes nothing.

Messages are masked text by text: inside JSON the quotes and line ends of a secret would be escaped. What JSON cannot
carry is replaced first, so that what is sent, stored and returned is the same. Strings inside JSON are changed without
parsing it: only quotes are looked at, so that numbers, order and duplicate keys stay, no depth is too great, and broken
JSON can be masked as well.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec

from halter.core.messages import Message, Part, Prompt, ToolCall
from halter.core.ports import Lease
from halter.core.text import clean, to_body, word_set
from halter.core.tools import ToolSpec
from halter.redaction.key_patterns import SECRET_FAMILIES, SEVERAL_WORDS
from halter.redaction.secret_values import (
    LOOKBEHIND_LENGTH,
    SAMPLE_LENGTH,
    Candidate,
    Regex,
    SecretFamily,
    compile_regex,
    join_patterns,
)
from halter.redaction.secrets import LONGEST_CHARACTER, LONGEST_SPELLING, LiveValues

Redact = Callable[[str], str]

_OPENING: Final = b"[redacted:"
_HEAD: Final = 2
_SPACED: Final = 12
"""The longest character in a spelling with spaces or line breaks; other spellings are never cut."""
_P = TypeVar("_P", bound=Part)
MOST_TEXTS: Final = 1024
MOST_CHARACTERS: Final = 1 << 22
"""How many texts, and of how many characters together, are known to hold no secret."""
LONGEST_KNOWN: Final = 1 << 16
_WORD: Final = frozenset(byte for byte in range(128) if chr(byte).isalnum() or byte == ord("_"))
_REFERENCE: Final = b"${"
_STAND_IN: Final = b"xxxxxx"
_BEHIND: Final = 40
_ROOM: Final = len("://") + len("pwd=word")
_SECRET_WORDS: Final = word_set(
    "KEY KEYS APIKEY TOKEN TOKENS SECRET SECRETS PASSWORD PASSWD PASSPHRASE PASS PAT CREDENTIAL CREDENTIALS DSN COOKIE "
    "AUTH WEBHOOK SALT"
)
_NEVER_SECRET: Final = frozenset({"FILE", "PATH", "SOCK", "DIR", "ID", "NAME"})


class SecretSpan(NamedTuple):
    """A range to hide, its kind, and where its announcement begins."""

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
    """All families as one automaton, and the families by their first two characters."""

    scan: Regex
    by_head: Mapping[bytes, Sequence[CompiledFamily]]


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable of this name usually holds a secret."""
    words = name.upper().replace("-", "_").replace(".", "_").split("_")
    return words[-1] not in _NEVER_SECRET and not _SECRET_WORDS.isdisjoint(words)


def select_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that usually hold a secret."""
    return {name: environment[name] for name in environment if is_secret_name(name)}


class CleanTexts(set[str]):
    """Texts that hold no secret: each is looked through once, and leaves in many ways. Too many are forgotten."""

    _characters = 0

    def remember(self, text: str) -> None:
        if len(text) > LONGEST_KNOWN or text in self:
            return
        self._characters += len(text)
        if len(self) >= MOST_TEXTS or self._characters > MOST_CHARACTERS:
            self.clear()
            self._characters = len(text)
        self.add(text)


class Redactor:
    """Takes secrets out of text.

    All of `secrets` are searched for; of `environment`, those with a secret-like name. Values of fewer than eight
    characters are not: hiding them would hide ordinary words.
    """

    def __init__(self, secrets: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
        likely = select_secrets(environment or {})
        self._live_values = LiveValues({**likely, **secrets})
        longest = max((len(value) for value in (*likely.values(), *secrets.values())), default=0)
        self.spaced = min(_SPACED * longest, LONGEST_SPELLING)
        self._marks = frozenset(
            _make_mark(name) for name in (*(family.name for family in SECRET_FAMILIES), *likely, *secrets)
        )
        self._shapes = _compile_families()
        self._clean = CleanTexts()

    def redact(self, text: str) -> str:
        """Replace each secret by a mark such as `[redacted:github]`. Never raises."""
        if text in self._clean:
            return text
        data = to_body(text)
        spans = self.spans(data)
        if spans:
            return hide_spans(data, spans).decode("utf-8", "surrogatepass")
        self._clean.remember(text)
        return text

    def spans(self, data: bytes) -> list[SecretSpan]:
        """Find the ranges to hide, in order, without overlaps, in text encoded by `to_body`."""
        found: list[SecretSpan] = []
        for start, end in self._between_marks(data):
            at = start
            for known in self._live_values.find(data, start, end):
                found.extend(_find_family_spans(self._shapes, data, at, known.start))
                found.append(SecretSpan(known.start, known.end, known.name, known.start))
                at = known.end
            found.extend(_find_family_spans(self._shapes, data, at, end))
        return found

    def may_go_on(self, data: bytes, start: int) -> bool:
        """Whether text after `start` may begin a secret that goes on after a blank."""
        end = len(data)
        return compile_regex(SEVERAL_WORDS).search(data, start, end) is not None or self._live_values.begins(
            data, start, end
        )

    def _between_marks(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield the ranges between marks. Only marks with known names count."""
        start = 0
        opened = data.find(_OPENING)
        while opened >= 0:
            closed = data.find(b"]", opened, opened + 200)
            if data[opened : closed + 1] in self._marks:
                yield start, opened
                start = closed + 1
            opened = data.find(_OPENING, opened + 1)
        yield start, len(data)


def hide_spans(data: bytes, spans: Sequence[SecretSpan]) -> bytes:
    """Replace ranges by marks; adjacent ranges get one mark."""
    kept: list[bytes] = []
    at = 0
    last = ""
    for span in spans:
        if span.start > at or span.name != last:
            kept += (data[at : span.start], _make_mark(span.name))
        at, last = span.end, span.name
    kept.append(data[at:])
    return b"".join(kept)


@lru_cache(MOST_TEXTS)
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
        shape = CompiledFamily(family, lead, whole, behind)
        for head in {head[:_HEAD].lower() for head in family.heads}:
            by_head.setdefault(head, []).append(shape)
    scan = join_patterns(
        _encode_pattern(family, (r"\b" if family.edge else "") + family.lead + family.near)
        for family in SECRET_FAMILIES
    )
    return CompiledFamilies(Regex(scan), by_head)


def _encode_pattern(family: SecretFamily, pattern: str) -> bytes:
    return f"(?i:{pattern})".encode() if family.fold else pattern.encode()


def _find_family_spans(shapes: CompiledFamilies, data: bytes, start: int, end: int) -> list[SecretSpan]:
    """Find keys in a range, as if there were nothing outside."""
    found: list[SecretSpan] = []
    _scan_families(shapes, data, (start, start, end), found)
    return found


def _scan_families(
    shapes: CompiledFamilies, data: bytes, within: tuple[int, int, int], found: list[SecretSpan]
) -> None:
    """Scan a range; `free` is where unhidden text begins.

    A key may begin there regardless of what precedes it, which the joint automaton cannot know.
    """
    free, at, end = within
    scan, by_head = shapes
    place = at
    while True:
        likely = by_head.get(data[place : place + _HEAD].lower())
        span = _match_family(likely, data, (free, place, end)) if likely else None
        if span is not None:
            if span.roomy and span.start - place > _ROOM:
                _scan_families(shapes, data, (free, place + len(b"://"), span.start), found)
            found.append(span)
            free = at = place = span.end
            continue
        match = scan.search(data, at, end)
        if match is None:
            return
        place = match[0]
        at = place + 1


def _match_family(likely: Sequence[CompiledFamily], data: bytes, within: tuple[int, int, int]) -> SecretSpan | None:
    """Find the family of a match, unless the text before contradicts it."""
    free, place, end = within
    for shape in likely:
        if _is_contradicted(shape, data, free, place):
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
        return SecretSpan(start, stop, family.name, min(place, start), family.roomy)
    return None


def _is_contradicted(shape: CompiledFamily, data: bytes, free: int, place: int) -> bool:
    """A cheap check whether a match belongs to another family; only two characters are known so far."""
    family, _, _, behind = shape
    if family.fold:
        return data.endswith(_REFERENCE, free, place)
    if behind is not None:
        before = data[max(free, place - _BEHIND) : place]
        return behind.match(before, 0, len(before)) < 0
    if family.edge and place > free and data[place - 1] in _WORD:
        return True
    return not data.startswith(family.heads, place)


WORDS_HELD_BACK: Final = 4
"""`the password is value` and `Authorization: Basic value` are at most four words."""

SHORTEST_HOLD: Final = 3 * SAMPLE_LENGTH
"""An announcement, and as much of its value as is inspected."""
PLAIN_BEGINNING: Final = 64
ESCAPED_BEGINNING: Final = 5 * LONGEST_CHARACTER
"""The longest text, plain or with escapes, that may be the beginning of a known value and is too short to tell."""
_ESCAPES: Final = (b"%", b"\\", b"&", b"=")
TOLD_LENGTH: Final = 2 * LOOKBEHIND_LENGTH
"""An announcement that was released already, and what may determine its meaning."""
LONGEST_HOLD: Final = 1 << 18
_CONTINUING: Final = range(0x80, 0xC0)
_BLANK: Final = b" \t\n\r\f\v"


class StreamRedactor:
    """Redacts a text that comes in chunks as `Redactor` redacts it whole, also a secret that is split over chunks.

    Held back is what can still become part of a secret: the last words, and more after a word that announces a secret
    of several words. Work waits for enough text, so that a stream of single characters takes linear time.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._emitted_tail = b""
        self._buffer = b""
        self._fresh: list[str] = []
        self._waiting = 0

    def feed(self, chunk: str) -> str:
        self._fresh.append(chunk)
        self._waiting += len(chunk)
        if self._waiting * 4 <= len(self._buffer):
            return ""
        return self._released(ended=False)

    def finish(self) -> str:
        return self._released(ended=True)

    def _released(self, *, ended: bool) -> str:
        """Redact the held-back text with what precedes it, and release what is certain."""
        at = len(self._emitted_tail)
        data = self._emitted_tail + self._buffer + to_body("".join(self._fresh))
        self._fresh.clear()
        self._waiting = 0
        spans = [span for span in self._redactor.spans(data) if span.end > at]
        cut = len(data) if ended else max(at, self._find_certain_end(data))
        cut = max(at, min((span.lead for span in spans if span.lead < cut < span.end), default=cut))
        hidden = [span._replace(start=max(span.start, at) - at, end=span.end - at) for span in spans if span.end <= cut]
        # What was hidden says nothing about what follows it; the rest may announce it.
        begin = max([_align_to_character(data, max(cut - TOLD_LENGTH, 0)), *(span.end + at for span in hidden)])
        self._emitted_tail, self._buffer = data[begin:cut], data[cut:]
        return hide_spans(data[at:cut], hidden).decode("utf-8", "surrogatepass")

    def _find_certain_end(self, data: bytes) -> int:
        """Find the start of a word before which no later text changes anything."""
        certain = _skip_words_held_back(data, self._redactor.spaced)
        if self._redactor.may_go_on(data, certain):
            return certain
        escaped = any(sign in data[-ESCAPED_BEGINNING:] for sign in _ESCAPES)
        end = max(len(data) - (ESCAPED_BEGINNING if escaped else PLAIN_BEGINNING), 0)
        return max(certain, _find_word_start(data, end))


def _find_word_start(data: bytes, end: int) -> int:
    return max(data.rfind(blank, 0, end) for blank in (b" ", b"\n", b"\t", b"\r")) + 1


def _skip_words_held_back(data: bytes, spaced: int) -> int:
    """Find the word before which nothing changes, also after an announcement."""
    at = max(len(data) - max(SHORTEST_HOLD, spaced), 0)
    for _ in range(WORDS_HELD_BACK):
        end = at
        while end > 0 and data[end - 1] in _BLANK:
            end -= 1
        at = _find_word_start(data, end)
    return max(at, _align_to_character(data, len(data) - LONGEST_SPELLING)) if len(data) > LONGEST_HOLD else at


def _align_to_character(data: bytes, at: int) -> int:
    while at > 0 and data[at] in _CONTINUING:
        at -= 1
    return at


def mask_text(text: str, redact: Redact) -> str:
    return redact(text if text.isascii() and "\x00" not in text else clean(text))


class _LastRequest(msgspec.Struct, eq=False):
    """What all requests of a session begin with, as it was given and as it is masked."""

    said: tuple[Message, ...] = ()
    masked: tuple[Message, ...] | None = None
    """What was said, where any of it had to be masked."""
    system: str = ""
    masked_system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    masked_tools: tuple[ToolSpec, ...] = ()


class PromptMasker:
    """Masks requests of sessions and their answers: each begins as the one before it, and only what is new is masked.

    The last request of a session is cached while its lease object lives. Texts that hold no secret are known.
    """

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._last: WeakKeyDictionary[Lease, _LastRequest] = WeakKeyDictionary()
        self._clean = CleanTexts()

    def prompt(self, lease: Lease, prompt: Prompt) -> Prompt:
        known = self._last.get(lease)
        last, messages = known or _LastRequest(), prompt.messages
        count = len(last.said)
        if messages[:count] != last.said:
            count, last.masked = 0, None
        # The last message ends with what is true only now, so the next request says it otherwise.
        last.said = messages[:-1]
        new = messages[count:]
        masked = self._messages(new)
        if last.masked is not None or masked is not new:
            messages = (*(messages[:count] if last.masked is None else last.masked), *masked)
            last.masked = messages[:-1]
        if known is None and last.said:
            # Of a first message alone there is nothing to remember: a session that waits for its first answer has none.
            self._last[lease] = last
        if prompt.system is not last.system or prompt.tools is not last.tools:
            last.system, last.masked_system = prompt.system, _mask_text_cached(prompt.system, self._redact)
            last.tools, last.masked_tools = prompt.tools, _mask_tools(prompt.tools, self._redact)
        clean = messages is prompt.messages and last.masked_system is prompt.system
        if clean and last.masked_tools is prompt.tools and not prompt.facts:
            return prompt
        return Prompt(
            system=last.masked_system,
            messages=messages,
            tools=last.masked_tools,
            max_output_tokens=prompt.max_output_tokens,
            facts=change_texts(prompt.facts, partial(mask_text, redact=self._redact)) if prompt.facts else prompt.facts,
            provider_tools=prompt.provider_tools,
        )

    def _messages(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        masked: list[Message] | None = None
        for place, message in enumerate(messages):
            parts = self.parts(message.parts)
            if parts is not message.parts:
                masked = masked or list(messages)
                masked[place] = Message(message.role, parts)
        return messages if masked is None else tuple(masked)

    def parts(self, parts: tuple[_P, ...]) -> tuple[_P, ...]:
        """Mask every text of a message; the same tuple, if there is nothing to mask."""
        clean = self._clean
        for part in parts:
            if type(part) is not ToolCall:
                if part.text not in clean:
                    break
            elif part.tool not in clean or part.arguments not in clean:
                break
        else:
            return parts
        masked = _mask_parts(parts, self._redact)
        if masked is parts:
            for part in parts:
                for text in (part.tool, part.arguments) if isinstance(part, ToolCall) else (part.text,):
                    clean.remember(text)
        return masked


def mask_message(message: Message, redact: Redact) -> Message:
    parts = _mask_parts(message.parts, redact)
    return message if parts is message.parts else Message(message.role, parts)


def change_texts(value: Any, change: Redact) -> Any:
    """Change every text in a value of JSON, but no key."""
    match value:
        case str():
            return change(value)
        case list():
            return [change_texts(each, change) for each in cast("list[Any]", value)]
        case Mapping():
            return {key: change_texts(each, change) for key, each in cast("Mapping[str, Any]", value).items()}
        case _:
            return value


def _mask_parts(parts: tuple[_P, ...], redact: Redact) -> tuple[_P, ...]:
    """Mask every text of a message; the same tuple, if there is nothing to mask."""
    masked: list[_P] | None = None
    for place, part in enumerate(parts):
        if isinstance(part, ToolCall):
            tool, arguments = mask_text(part.tool, redact), mask_text(part.arguments, redact)
            if tool is part.tool and arguments is part.arguments:
                continue
            changed = msgspec.structs.replace(part, tool=tool, arguments=arguments)
        else:
            text = mask_text(part.text, redact)
            if text is part.text:
                continue
            changed = msgspec.structs.replace(part, text=text)
        masked = masked or list(parts)
        masked[place] = changed
    return parts if masked is None else tuple(masked)


@lru_cache(maxsize=64)
def _mask_text_cached(text: str, redact: Redact) -> str:
    return mask_text(text, redact)


@lru_cache(maxsize=64)
def _mask_tools(tools: tuple[ToolSpec, ...], redact: Redact) -> tuple[ToolSpec, ...]:
    masked = tuple(msgspec.structs.replace(tool, description=mask_text(tool.description, redact)) for tool in tools)
    return tools if masked == tools else masked


ChangeText = Callable[[str], str]

_LITERAL: Final = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)("|\\?\Z)', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_OPENINGS: Final = ("{", "[", '"')


def is_json(text: str) -> bool:
    """Whether a text is JSON with strings in it; text nested too deeply is not."""
    if not text.lstrip().startswith(_OPENINGS):
        return False
    try:
        msgspec.json.decode(to_body(text), type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def change_json_strings(text: str, change: ChangeText, outside: ChangeText, broken: ChangeText) -> str:
    """Change every string in some JSON, and what is outside; `broken` changes unreadable ones."""
    changed: list[str] = []
    at = 0
    for match in _LITERAL.finditer(text):
        changed += (outside(text[at : match.start()]), '"', _change_literal(match[1], change, broken), match[2])
        at = match.end()
    return "".join((*changed, outside(text[at:])))


def _change_literal(literal: str, change: ChangeText, broken: ChangeText) -> str:
    try:
        meant = str(json.loads(f'"{literal}"', strict=False))
    except ValueError:
        return broken(literal)
    changed = change(meant)
    return literal if changed == meant else escape_json_text(changed)


def escape_json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)[1:-1]

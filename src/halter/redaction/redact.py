"""Redaction of secrets in all text before it reaches the journal, audit, model, events, logs and errors.

Known live values are redacted first, in all their spellings; then everything that matches a pattern of a common key.
Redaction needs the whole text, so it comes before any truncation, and takes linear time on hostile input. Its marks are
never changed, so redacting twice changes nothing.

Messages are masked text by text: within JSON, the quotes and line ends of a secret would be escaped. Characters that
JSON cannot represent are replaced first, so that the sent, stored and returned texts are the same. Strings in JSON are
changed without parsing: only quotes are examined, so that numbers, order and duplicate keys stay, any depth is
possible, and broken JSON is masked as well.
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
from halter.core.text import clean, encode_body, make_word_set
from halter.core.tools import ToolSpec
from halter.redaction.key_patterns import SECRET_FAMILIES, SEVERAL_WORDS
from halter.redaction.named_secrets import find_start_of_table, find_table_cells
from halter.redaction.secret_values import (
    LOOKBEHIND_LENGTH,
    SAMPLE_LENGTH,
    Candidate,
    Regex,
    SecretFamily,
    compile_regex,
    join_patterns,
)
from halter.redaction.secrets import MAX_CHARACTER_LENGTH, MAX_SPELLING_LENGTH, LiveValues

Redact = Callable[[str], str]

_OPENING: Final = b"[redacted:"
_HEAD: Final = 2
_SPACED: Final = 12
"""The longest character in a spelling with spaces or line breaks. Chunks never split other spellings."""
_P = TypeVar("_P", bound=Part)
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


WORDS_HELD_BACK: Final = 4
"""Number of last words held back: `the password is value` and `Authorization: Basic value` are at most four words."""

MIN_HELD_BYTES: Final = 3 * SAMPLE_LENGTH
"""Bytes held back at least: an announcement, and the inspected part of its value."""
PLAIN_BEGINNING: Final = 64
ESCAPED_BEGINNING: Final = 5 * MAX_CHARACTER_LENGTH
"""The longest beginning of a known value, plain or with escapes, that is too short to be recognized."""
_ESCAPES: Final = (b"%", b"\\", b"&", b"=")
CONTEXT_LENGTH: Final = 2 * LOOKBEHIND_LENGTH
"""Bytes of released text kept as context: an announcement, and the text before it that may determine its meaning."""
MAX_HELD_BYTES: Final = 1 << 18
_CONTINUING: Final = range(0x80, 0xC0)
_BLANK: Final = b" \t\n\r\f\v"


class StreamRedactor:
    """Redacts a text that arrives in chunks as `Redactor` redacts the whole text, even if chunks split a secret.

    It holds back text that may become part of a secret: the last words, and more after a word that announces a secret
    of several words. It waits for enough new text, so that a stream of single characters takes linear time.
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
        return self._release(ended=False)

    def finish(self) -> str:
        return self._release(ended=True)

    def _release(self, *, ended: bool) -> str:
        """Redact the held-back text together with the text before it, and release the part that is certain."""
        at = len(self._emitted_tail)
        data = self._emitted_tail + self._buffer + encode_body("".join(self._fresh))
        self._fresh.clear()
        self._waiting = 0
        spans = [span for span in self._redactor.spans(data) if span.end > at]
        cut = len(data) if ended else max(at, self._find_certain_end(data))
        cut = max(at, min((span.lead for span in spans if span.lead < cut < span.end), default=cut))
        hidden_spans = [
            span._replace(start=max(span.start, at) - at, end=span.end - at) for span in spans if span.end <= cut
        ]
        # A hidden range does not affect the text after it; other text may announce a secret.
        tail_start = max(
            [_align_to_character(data, max(cut - CONTEXT_LENGTH, 0)), *(span.end + at for span in hidden_spans)]
        )
        self._emitted_tail, self._buffer = data[tail_start:cut], data[cut:]
        return hide_spans(data[at:cut], hidden_spans).decode("utf-8", "surrogatepass")

    def _find_certain_end(self, data: bytes) -> int:
        """Find the start of a word before which later text changes nothing. A table is known when it has ended."""
        end = self._find_certain_word(data)
        table = find_start_of_table(data, end)
        return table if len(data) - table <= MAX_HELD_BYTES else end

    def _find_certain_word(self, data: bytes) -> int:
        certain = _skip_words_held_back(data, self._redactor.spaced)
        if self._redactor.can_begin_spaced_secret(data, certain):
            return certain
        has_escape = any(sign in data[-ESCAPED_BEGINNING:] for sign in _ESCAPES)
        end = max(len(data) - (ESCAPED_BEGINNING if has_escape else PLAIN_BEGINNING), 0)
        return max(certain, _find_word_start(data, end))


def _find_word_start(data: bytes, end: int) -> int:
    return max(data.rfind(blank, 0, end) for blank in (b" ", b"\n", b"\t", b"\r")) + 1


def _skip_words_held_back(data: bytes, longest_spaced: int) -> int:
    """Find the start of the words to hold back, before which later text changes nothing."""
    at = max(len(data) - max(MIN_HELD_BYTES, longest_spaced), 0)
    for _ in range(WORDS_HELD_BACK):
        end = at
        while end > 0 and data[end - 1] in _BLANK:
            end -= 1
        at = _find_word_start(data, end)
    return max(at, _align_to_character(data, len(data) - MAX_SPELLING_LENGTH)) if len(data) > MAX_HELD_BYTES else at


def _align_to_character(data: bytes, at: int) -> int:
    while at > 0 and data[at] in _CONTINUING:
        at -= 1
    return at


def mask_text(text: str, redact: Redact) -> str:
    return redact(text if text.isascii() and "\x00" not in text else clean(text))


class _LastRequest(msgspec.Struct, eq=False):
    """The common beginning of a session's requests, original and masked."""

    messages: tuple[Message, ...] = ()
    masked_messages: tuple[Message, ...] | None = None
    """The masked messages, if any of them had to be masked."""
    system: str = ""
    masked_system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    masked_tools: tuple[ToolSpec, ...] = ()


class PromptMasker:
    """Masks requests of sessions and their answers. A request begins like the previous one, so only the rest is masked.

    The last request of a session is cached while its lease object exists. Texts without a secret are cached too.
    """

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._last: WeakKeyDictionary[Lease, _LastRequest] = WeakKeyDictionary()
        self._clean = CleanTexts()

    def prompt(self, lease: Lease, prompt: Prompt) -> Prompt:
        cached_request = self._last.get(lease)
        last_request, messages = cached_request or _LastRequest(), prompt.messages
        count = len(last_request.messages)
        if messages[:count] != last_request.messages:
            count, last_request.masked_messages = 0, None
        # The last message ends with volatile text, so the next request has another one in its place.
        last_request.messages = messages[:-1]
        new_messages = messages[count:]
        masked_messages = self._messages(new_messages)
        if last_request.masked_messages is not None or masked_messages is not new_messages:
            messages = (
                *(messages[:count] if last_request.masked_messages is None else last_request.masked_messages),
                *masked_messages,
            )
            last_request.masked_messages = messages[:-1]
        if cached_request is None and last_request.messages:
            # A session that waits for its first answer has one message, so there is nothing to cache.
            self._last[lease] = last_request
        if prompt.system is not last_request.system or prompt.tools is not last_request.tools:
            last_request.system, last_request.masked_system = (
                prompt.system,
                _mask_text_cached(prompt.system, self._redact),
            )
            last_request.tools, last_request.masked_tools = prompt.tools, _mask_tools(prompt.tools, self._redact)
        is_clean = messages is prompt.messages and last_request.masked_system is prompt.system
        if is_clean and last_request.masked_tools is prompt.tools and not prompt.facts:
            return prompt
        return msgspec.structs.replace(
            prompt,
            system=last_request.masked_system,
            messages=messages,
            tools=last_request.masked_tools,
            facts=change_texts(prompt.facts, partial(mask_text, redact=self._redact)) if prompt.facts else prompt.facts,
        )

    def _messages(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        masked_messages: list[Message] | None = None
        for index, message in enumerate(messages):
            parts = self.parts(message.parts)
            if parts is not message.parts:
                masked_messages = masked_messages or list(messages)
                masked_messages[index] = msgspec.structs.replace(message, parts=parts)
        return messages if masked_messages is None else tuple(masked_messages)

    def parts(self, parts: tuple[_P, ...]) -> tuple[_P, ...]:
        """Mask every text of a message; the same tuple, if there is nothing to mask."""
        clean_texts = self._clean
        for part in parts:
            if type(part) is not ToolCall:
                if part.text not in clean_texts:
                    break
            elif part.tool not in clean_texts or part.arguments not in clean_texts:
                break
        else:
            return parts
        masked_parts = _mask_parts(parts, self._redact)
        if masked_parts is parts:
            for part in parts:
                for text in (part.tool, part.arguments) if isinstance(part, ToolCall) else (part.text,):
                    clean_texts.remember(text)
        return masked_parts


def mask_message(message: Message, redact: Redact) -> Message:
    parts = _mask_parts(message.parts, redact)
    return message if parts is message.parts else msgspec.structs.replace(message, parts=parts)


def change_texts(value: Any, change: Redact) -> Any:
    """Change every text in a JSON value, except keys."""
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
    masked_parts: list[_P] | None = None
    for index, part in enumerate(parts):
        if isinstance(part, ToolCall):
            tool, arguments = mask_text(part.tool, redact), mask_text(part.arguments, redact)
            if tool is part.tool and arguments is part.arguments:
                continue
            changed_part = msgspec.structs.replace(part, tool=tool, arguments=arguments)
        else:
            text = mask_text(part.text, redact)
            if text is part.text:
                continue
            changed_part = msgspec.structs.replace(part, text=text)
        masked_parts = masked_parts or list(parts)
        masked_parts[index] = changed_part
    return parts if masked_parts is None else tuple(masked_parts)


@lru_cache(maxsize=64)
def _mask_text_cached(text: str, redact: Redact) -> str:
    return mask_text(text, redact)


@lru_cache(maxsize=64)
def _mask_tools(tools: tuple[ToolSpec, ...], redact: Redact) -> tuple[ToolSpec, ...]:
    masked_tools = tuple(
        msgspec.structs.replace(tool, description=mask_text(tool.description, redact)) for tool in tools
    )
    return tools if masked_tools == tools else masked_tools


ChangeText = Callable[[str], str]

_LITERAL: Final = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)("|\\?\Z)', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_OPENINGS: Final = ("{", "[", '"')


def is_json(text: str) -> bool:
    """Return True if a text is a JSON object, list or string. Too deeply nested text is not."""
    if not text.lstrip().startswith(_OPENINGS):
        return False
    try:
        msgspec.json.decode(encode_body(text), type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def change_json_strings(text: str, change: ChangeText, change_outside: ChangeText, change_broken: ChangeText) -> str:
    """Change every string in some JSON. `change_outside` gets the text between, `change_broken` unreadable strings."""
    changed_texts: list[str] = []
    at = 0
    for match in _LITERAL.finditer(text):
        changed_texts += (
            change_outside(text[at : match.start()]),
            '"',
            _change_literal(match[1], change, change_broken),
            match[2],
        )
        at = match.end()
    return "".join((*changed_texts, change_outside(text[at:])))


def _change_literal(literal: str, change: ChangeText, change_broken: ChangeText) -> str:
    try:
        decoded_text = str(json.loads(f'"{literal}"', strict=False))
    except ValueError:
        return change_broken(literal)
    changed_text = change(decoded_text)
    return literal if changed_text == decoded_text else escape_json_text(changed_text)


def escape_json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)[1:-1]

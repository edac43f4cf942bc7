"""The redaction of texts that arrive in portions."""

from typing import Final

from halter.core.text import encode_body
from halter.redaction.named_secrets import find_start_of_table
from halter.redaction.redact import Redactor, hide_spans
from halter.redaction.secret_values import LOOKBEHIND_LENGTH, SAMPLE_LENGTH
from halter.redaction.secrets import MAX_CHARACTER_LENGTH, MAX_SPELLING_LENGTH

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

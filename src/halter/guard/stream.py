"""Taking secrets out of text that comes in chunks: what may be the beginning of a secret waits for its end."""

from typing import Final

from halter.core.text import to_body
from halter.guard.redact import Redactor, hide
from halter.guard.spellings import LONGEST_SPELLING

WORDS: Final = 3
"""`password = value` and `Authorization: Basic value` are three words."""

SHORTEST_HOLD: Final = 256
LONGEST_HOLD: Final = 1 << 18
_CONTINUING: Final = range(0x80, 0xC0)
_BLANK: Final = b" \t\n\r\f\v"


class StreamRedactor:
    """Redacts a text that comes in chunks as `Redactor` redacts it whole; a secret split over chunks is still caught.

    The last words are held back until more comes. Work is put off until enough has come, so that even a stream of
    single characters takes time in proportion to its length.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""
        self._fresh: list[str] = []
        self._waiting = 0

    def feed(self, chunk: str) -> str:
        """Take a chunk and return what is certain by now, which may be nothing."""
        self._fresh.append(chunk)
        self._waiting += len(chunk)
        if self._waiting * 4 <= max(len(self._held), SHORTEST_HOLD):
            return ""
        return self._released(self._taken())

    def finish(self) -> str:
        """Return the rest: nothing more will come."""
        rest = self._redactor.redact(self._taken())
        self._held = ""
        return rest

    def _taken(self) -> str:
        text = self._held + "".join(self._fresh)
        self._fresh.clear()
        self._waiting = 0
        return text

    def _released(self, text: str) -> str:
        data = to_body(text)
        spans = self._redactor.spans(data)
        cut = _certain(data, self._redactor.spaced)
        cut = min((span.lead for span in spans if span.lead < cut < span.end), default=cut)
        self._held = data[cut:].decode("utf-8", "surrogatepass")
        return hide(data[:cut], [span for span in spans if span.end <= cut]).decode("utf-8", "surrogatepass")


def _certain(data: bytes, spaced: int) -> int:
    """Find the beginning of a word before which nothing can change any more, whatever comes."""
    at = max(len(data) - max(SHORTEST_HOLD, spaced), 0)
    for _ in range(WORDS):
        at = _word_before(data, at)
    return max(at, _aligned(data, len(data) - LONGEST_SPELLING)) if len(data) > LONGEST_HOLD else at


def _word_before(data: bytes, at: int) -> int:
    """Find where the word begins that a place is in, or the one before it."""
    end = at
    while end > 0 and data[end - 1] in _BLANK:
        end -= 1
    return max(data.rfind(blank, 0, end) for blank in (b" ", b"\n", b"\t", b"\r")) + 1


def _aligned(data: bytes, at: int) -> int:
    """Move back to where a character begins."""
    while at > 0 and data[at] in _CONTINUING:
        at -= 1
    return at

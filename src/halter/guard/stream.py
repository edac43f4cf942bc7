"""Taking secrets out of text that comes in chunks: what may be the beginning of a secret waits for its end."""

from typing import Final

from halter.core.text import to_body
from halter.guard.family import BEHIND
from halter.guard.literals import SAMPLE
from halter.guard.redact import Redactor, hide
from halter.guard.spellings import LONGEST_SPELLING

WORDS: Final = 4
"""`the password is value` and `Authorization: Basic value` are at most four words."""

SHORTEST_HOLD: Final = 3 * SAMPLE
"""What announces a value, and as much of the value as is looked at."""
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
        self._told = b""
        self._held = b""
        self._fresh: list[str] = []
        self._waiting = 0

    def feed(self, chunk: str) -> str:
        """Take a chunk and return what is certain by now, which may be nothing."""
        self._fresh.append(chunk)
        self._waiting += len(chunk)
        if self._waiting * 4 <= max(len(self._held), SHORTEST_HOLD):
            return ""
        return self._released(ended=False)

    def finish(self) -> str:
        """Return the rest: nothing more will come."""
        return self._released(ended=True)

    def _released(self, *, ended: bool) -> str:
        """Redact what was told last together with what waits, and let go what is certain of the latter."""
        at = len(self._told)
        data = self._told + self._held + to_body("".join(self._fresh))
        self._fresh.clear()
        self._waiting = 0
        spans = [span for span in self._redactor.spans(data) if span.end > at]
        cut = len(data) if ended else max(at, _certain(data, self._redactor.spaced))
        cut = max(at, min((span.lead for span in spans if span.lead < cut < span.end), default=cut))
        hidden = [span._replace(start=max(span.start, at) - at, end=span.end - at) for span in spans if span.end <= cut]
        # What was hidden says nothing about what follows it; the rest may announce it.
        begin = max([_aligned(data, max(cut - BEHIND, 0)), *(span.end + at for span in hidden)])
        self._told, self._held = data[begin:cut], data[cut:]
        return hide(data[at:cut], hidden).decode("utf-8", "surrogatepass")


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

"""The usage in the bytes of an answer, read as they arrive.

A request that was cut off is charged by its last report, so it matters which report is final: each wire says so.

Reports of one answer are cumulative on all wires, so the largest count of each kind is used; for cached input,
which costs less, the last one. The report of an answer without a stream is final, and so is one in the body of an
error. An unreadable report invalidates those before it, and the request settles at its hold.
"""

import re
from typing import Final

import msgspec

from halter.core.usage import Usage, is_same_model
from halter.models.wires.table import WIRES
from halter.models.wires.usage_report import UsageReading
from halter.spec.models import WireFormat

MAX_ANSWER_BYTES: Final = 32 * 1024 * 1024
"""Far more than the longest answer has, with each token in a separate event."""
_DATA: Final = b"data:"
_OPENS_JSON: Final = (b"{", b"[")
_NAMES_A_REPORT: Final = b"usage"
_NAMES_A_TIER: Final = b"service_tier"
_SPARE_DEPTH: Final = 200
"""Levels of nesting reserved for the parsers of an answer."""


def _is_too_deep(data: bytes) -> bool:
    """Return True if parsing would come near the recursion limit, where finalizers that run then would fail."""
    if data.count(b"[") + data.count(b"{") <= _SPARE_DEPTH:
        return False
    nested_data = b"[" * _SPARE_DEPTH + data.removeprefix(_DATA) + b"]" * _SPARE_DEPTH
    try:
        msgspec.json.decode(nested_data, type=msgspec.Raw)
    except RecursionError:
        return True
    except (msgspec.DecodeError, UnicodeError):
        return False  # The parser reports the error.
    return False


class UsageReader:
    """Reads the usage from the bytes of an answer as they arrive: a stream of events, or one JSON document.

    `asked` is the model that was asked for; without it, the model that answers is not compared. An event, or an answer
    without a stream, of more than `max_size` bytes is not parsed, which would hold the event loop; it leaves no usage.
    """

    def __init__(self, wire: WireFormat, asked: str = "", max_size: int = MAX_ANSWER_BYTES) -> None:
        self._asked = asked
        self._max_size = max_size
        self._skips_line = False
        self.final = False
        self.too_deep = False
        self._read = WIRES[wire].read_usage
        self._ending = WIRES[wire].end_member
        self._counts = UsageReading()
        self._finished = False
        self._spoiled = False
        self._streams: bool | None = None
        self._rest = bytearray()

    @property
    def model(self) -> str:
        """The model that answered, as the provider calls it."""
        return self._counts.model

    @property
    def answered_by(self) -> str:
        """The model that answered, if another one was asked for."""
        model = self._counts.model
        return model if self._asked and model and not is_same_model(self._asked, model) else ""

    @property
    def usage(self) -> Usage | None:
        """The largest reported counts. None without input tokens, or if the counts are inconsistent."""
        counts = self._counts
        if not counts.input_tokens or self._spoiled:
            return None
        try:
            return Usage(
                counts.input_tokens,
                counts.output_tokens or 0,
                counts.cache_read_tokens or 0,
                counts.cache_write_tokens,
                counts.cache_write_1h,
                counts.searches,
                counts.audio,
                counts.audio_cached,
                surcharge_percent=counts.surcharge,
                reported_cost=counts.cost_micros,
                answered_by=self.answered_by,
                unpriced=counts.unpriced,
            )
        except ValueError:
            return None

    @property
    def finished(self) -> bool:
        """True if the answer is marked as complete."""
        return self._finished

    def feed(self, piece: bytes) -> None:
        if self._streams is None and (beginning := piece.lstrip()):
            self._streams = not beginning.startswith(_OPENS_JSON)
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) if self._streams else -1
        if end < 0:
            self._extend(piece)
            return
        if self._skips_line:
            self._skips_line = False
            line_end = re.search(rb"[\r\n]", piece)
            self.feed(b"\n" if line_end is None else piece[line_end.start() :])
            return
        complete, self._rest = bytes(self._rest) + piece[:end], bytearray(piece[end + 1 :])
        self.too_deep = self.too_deep or any(map(_is_too_deep, complete.splitlines()))
        if self._can_report(complete):
            for line in complete.splitlines():
                self._read_line(line)

    def _extend(self, piece: bytes) -> None:
        if len(self._rest) + len(piece) > self._max_size:
            self._rest.clear()
            self._skips_line = self._finished = True
            self._mark_unusable(spoils=True)
        if not self._skips_line:
            self._rest += piece

    def _can_report(self, data: bytes) -> bool:
        """Return True if the data can contain a report, an end or a tier. What does not is not parsed."""
        return _NAMES_A_REPORT in data or self._ending in data or _NAMES_A_TIER in data

    def close(self) -> None:
        remaining, self._rest = bytes(self._rest), bytearray()
        self.too_deep = self.too_deep or _is_too_deep(remaining)
        if self._streams:
            self._read_line(remaining)
        elif remaining:
            self._finished = True
            self._read_body(remaining)

    def _read_line(self, line: bytes) -> None:
        if line.startswith(_DATA) and self._can_report(line):
            self._read_body(line[len(_DATA) :])

    def _read_body(self, body: bytes) -> None:
        try:
            reading = self._read(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            self._mark_unusable(_NAMES_A_REPORT in body)
            return
        self._finished = self._finished or reading.finished
        self._mark_unusable(
            min(
                reading.input_tokens,
                reading.output_tokens or 0,
                reading.cache_read_tokens or 0,
                reading.cache_write_tokens,
            )
            < 0
        )
        # Output never decreases: a final count below an earlier one is wrong.
        self._mark_unusable(
            self._finished
            and reading.output_tokens is not None
            and reading.output_tokens < (self._counts.output_tokens or 0)
        )
        self.final = not self._spoiled and (self.final or (self._finished and reading.output_tokens is not None))
        self._counts = UsageReading(
            max(self._counts.input_tokens, reading.input_tokens),
            max(self._counts.output_tokens or 0, reading.output_tokens or 0),
            self._counts.cache_read_tokens if reading.cache_read_tokens is None else reading.cache_read_tokens,
            max(self._counts.cache_write_tokens, reading.cache_write_tokens),
            cache_write_1h=max(self._counts.cache_write_1h, reading.cache_write_1h),
            searches=max(self._counts.searches, reading.searches),
            audio=max(self._counts.audio, reading.audio),
            audio_cached=max(self._counts.audio_cached, reading.audio_cached),
            model=reading.model or self._counts.model,
            cost_micros=max(self._counts.cost_micros, reading.cost_micros),
            surcharge=max(self._counts.surcharge, reading.surcharge),
            unpriced=self._counts.unpriced or reading.unpriced,
        )

    def _mark_unusable(self, spoils: bool) -> None:  # noqa: FBT001  the only parameter
        self._spoiled = self._spoiled or spoils
        self.final = self.final and not self._spoiled

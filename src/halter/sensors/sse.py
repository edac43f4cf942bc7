"""Server-sent events, to the letter: bytes in any pieces go in, events come out."""

import re
from typing import Any, Final

import msgspec

from halter.core.sensing import LARGEST_READING, SensorFailed
from halter.sensors.values import parsed, too_large

_BOM: Final = b"\xef\xbb\xbf"
_LINE_ENDS: Final = re.compile(rb"\r\n|\r|\n")
_DIGITS: Final = re.compile(r"0*([0-9]{1,12})")
"""More digits than these say a time that nobody waits for, and are as good as none."""


class Event(msgspec.Struct, frozen=True):
    """One event of a stream."""

    data: str
    name: str = "message"
    id: str = ""

    @property
    def value(self) -> Any:
        """What is read of it: a plain message of JSON is that JSON."""
        value, is_json = parsed(self.data)
        plain = is_json and self.name == "message"
        return value if plain else {"event": self.name, "data": value, "id": self.id}


class Parser:
    """Reads one stream from its beginning.

    `last_id` is where a later stream goes on, and `retry` how many milliseconds the server asks to wait before that.
    An event that is unfinished when the stream ends is never given, nor does its id count.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self.retry: int | None = None
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._id = last_id
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[Event]:
        """Read on. Raises SensorFailed for a line or an event that is too large to be a reading."""
        if self._after_cr and piece:
            piece, self._after_cr = piece.removeprefix(b"\n"), False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        *ended, begun = _LINE_ENDS.split(piece)
        events = [event for line in ended if (event := self._ended(line)) is not None]
        self._continue(begun)
        return events

    def _continue(self, piece: bytes) -> None:
        self._line += piece
        if self._size + len(self._line) > LARGEST_READING:
            raise SensorFailed(too_large("An event of the stream"))

    def _ended(self, rest: bytes) -> Event | None:
        self._continue(rest)
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first, line = False, line.removeprefix(_BOM)
        if not line:
            return self._dispatched()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        self._field(name, value.removeprefix(" "))
        return None

    def _field(self, name: str, value: str) -> None:
        """Take one field in. A comment is a field without a name, and like all unknown ones ignored."""
        if name == "data":
            self._data.append(value)
            self._size += len(value.encode()) + 1
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and (digits := _DIGITS.fullmatch(value)):
            self.retry = int(digits[1])

    def _dispatched(self) -> Event | None:
        """End an event. One without data is none, but its id counts."""
        self.last_id = self._id
        event = Event("\n".join(self._data), self._name or "message", self._id) if self._data else None
        self._data, self._name, self._size = [], "", 0
        return event

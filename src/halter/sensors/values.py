"""What a reading may be: a JSON value of a bounded size."""

from typing import Any

import msgspec

from halter.core.sensing import LARGEST_READING, Reading, SensorFailed


def parsed(text: str) -> tuple[Any, bool]:
    """Read a text as JSON, and say whether it is some; what is none stays text."""
    try:
        return msgspec.json.decode(text.encode()), True
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text, False


def as_value(text: str) -> Any:
    """Read a text as JSON if it is some."""
    return parsed(text)[0]


def reading(value: Any, at: int) -> Reading:
    """Make a reading of a value that may be anything. Raises SensorFailed for what cannot be one."""
    try:
        size = len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise SensorFailed(f"What was read is no JSON value: {type(error).__name__}.") from error
    if size > LARGEST_READING:
        raise SensorFailed(too_large("What was read"))
    return Reading(value, at, size)


def too_large(what: str) -> str:
    """Say that something is more than a reading may be, and what to do."""
    return f"{what} is larger than {LARGEST_READING:,} bytes: have the source send less at once."

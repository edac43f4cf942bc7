"""Durations as people write them: `30s`, `15m`, `1h30m`, `90d`."""

import re
from typing import Final

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import ConfigError

_UNITS: Final = {"d": DAY, "h": HOUR, "m": MINUTE, "s": SECOND, "ms": SECOND // 1000}
LONGEST: Final = 36_500 * DAY
"""A hundred years: with any moment added to it, it is still one that a store can keep."""
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[dhms])")


def parse_duration(text: str) -> int:
    """Read a duration into microseconds."""
    written = text.strip().lower()
    parts = _PART.findall(written)
    if not parts or _PART.sub("", written).strip():
        raise ConfigError(f"{text!r} is not a duration: write it like 30s, 15m, 1h30m or 90d.")
    length = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if length > LONGEST:
        raise ConfigError(f"{text[:40]!r} is too long for a duration: {LONGEST // DAY:,} days are the most.")
    return sum(round(float(number) * _UNITS[unit]) for number, unit in parts)


def shown_duration(micros: int) -> str:
    """Write a duration with its two largest units, as in `1h30m`."""
    if micros < SECOND:
        return f"{micros // 1000}ms"
    shown: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, micros = divmod(micros, _UNITS[unit])
        if count:
            shown.append(f"{count}{unit}")
    return "".join(shown[:2])

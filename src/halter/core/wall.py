"""The clock on the wall of a zone, which is put forward and back.

What comes twice counts the first time, and what is skipped is the first moment after the skip.
"""

from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def zone_of(name: str) -> ZoneInfo | None:
    """Find a zone by its name; None if there is none."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def shown_at(moment: int, zone: ZoneInfo) -> datetime:
    """Tell what the wall clock shows at a moment."""
    return (_EPOCH + timedelta(microseconds=moment)).astimezone(zone)


def moment_of(when: datetime) -> int:
    """Tell the moment of a datetime with a zone, in microseconds."""
    return (when.astimezone(UTC) - _EPOCH) // _MICROSECOND


def first_shown(day: date, clock: time, zone: ZoneInfo) -> int:
    """Tell when the wall clock first shows a time on a day, or first shows more if it never does."""
    local = datetime.combine(day, clock, zone)
    found = local.astimezone(UTC)
    if found.astimezone(zone).replace(tzinfo=None) != local.replace(tzinfo=None):
        found = _end_of_gap(local, zone)
    return moment_of(found)


def _end_of_gap(local: datetime, zone: ZoneInfo) -> datetime:
    """Find the moment at which the wall clock jumped over a time.

    Read with the offset from after the jump, the time lies before it; read with the one from before, after it.
    """
    before, after = local.replace(fold=1).astimezone(UTC), local.astimezone(UTC)
    new = after.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = (before + (after - before) / 2).replace(microsecond=0)
        before, after = (before, middle) if middle.astimezone(zone).utcoffset() == new else (middle, after)
    return after

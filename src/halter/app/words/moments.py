"""Moments as people read them, in their own time zone."""

from datetime import UTC, datetime

from halter.core.clock import SECOND


def written(at: int) -> str:
    """Write a moment with its day."""
    return _local(at).strftime("%Y-%m-%d %H:%M:%S")


def hour(at: int) -> str:
    """Write the time of a day."""
    return _local(at).strftime("%H:%M:%S")


def moment(at: int, now: int) -> str:
    """Write a moment as seen from another one: with its day, where that is not the same."""
    return hour(at) if _local(at).date() == _local(now).date() else written(at)


def _local(at: int) -> datetime:
    return datetime.fromtimestamp(at / SECOND, UTC).astimezone()

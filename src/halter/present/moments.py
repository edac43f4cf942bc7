"""Moments as people read them, in the time of their machine."""

from datetime import UTC, datetime

from halter.core.clock import SECOND


def format_moment(at: int) -> str:
    return _to_local(at).strftime("%Y-%m-%d %H:%M:%S")


def format_hour(at: int) -> str:
    return _to_local(at).strftime("%H:%M:%S")


def format_relative_moment(at: int, now: int) -> str:
    """Format a moment, with its day if that is not today."""
    return format_hour(at) if _to_local(at).date() == _to_local(now).date() else format_moment(at)


def _to_local(at: int) -> datetime:
    return datetime.fromtimestamp(at / SECOND, UTC).astimezone()

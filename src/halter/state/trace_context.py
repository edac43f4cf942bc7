"""The span of a caller: W3C trace contexts in and out."""

import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

import msgspec

from halter.core.events import SessionResumed, SessionStarted, WakePosted

_CALLER: ContextVar[str] = ContextVar("halter_traceparent", default="")
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_VERSION_ZERO: Final = re.compile(r"00-.{32}-.{16}-..")
_SAMPLED: Final = 1

CallerEvent = TypeVar("CallerEvent", SessionStarted, SessionResumed, WakePosted)


class SpanReference(msgspec.Struct, frozen=True):
    """A span of this or another program."""

    trace: int
    span: int
    is_sampled: bool = True


def parse_traceparent(text: str) -> SpanReference | None:
    """Parse a W3C `traceparent`; None if it is missing or invalid, which starts a new trace."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or (text.startswith("00-") and not _VERSION_ZERO.fullmatch(text)):
        return None
    return SpanReference(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & _SAMPLED))


def find_traceparent() -> str:
    """Return the caller's span as a `traceparent`; "" if it has none.

    A program that uses OpenTelemetry has loaded it, so Halter never does.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is not None:
        context = api.get_current_span().get_span_context()
        if context.is_valid:
            return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return _CALLER.get()


@contextmanager
def serve_caller(headers: Sequence[str]) -> Generator[None]:
    """Let sessions that start inside the block join the trace of these `traceparent` headers. More than one is none."""
    is_valid = len(headers) == 1 and parse_traceparent(headers[0]) is not None
    token = _CALLER.set(headers[0] if is_valid else "")
    try:
        yield
    finally:
        _CALLER.reset(token)


def add_traceparent(event: CallerEvent) -> CallerEvent:
    """Return an event with its caller's span, if there is one."""
    traceparent = find_traceparent()
    return msgspec.structs.replace(event, traceparent=traceparent) if traceparent else event


AttributeValue = str | int | float | bool | tuple[str, ...]

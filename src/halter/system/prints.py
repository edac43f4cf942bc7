"""Masked output of tool code.

Tool code runs in this process together with code whose output must not be masked. So a mask applies to the context of
one call, with its tasks and threads.
"""

import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from typing import Any, Final, Protocol, TextIO, cast


class PrintMask(Protocol):
    """A mask for secrets in text that arrives in chunks."""

    def feed(self, chunk: str) -> str:
        """Add a chunk and return the text that is certain to contain no partial secret; it may be empty."""
        ...

    def finish(self) -> str: ...


class MaskedPrints:
    """A context manager that masks the output of its block, and of the tasks and threads that it starts.

    The end of each text is held back until the call ends or flushes, since a secret may be printed in parts.
    """

    __slots__ = ("_is_closed", "_lock", "_make", "_masks", "_token")

    def __init__(self, make: Callable[[], PrintMask]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._masks: dict[int, tuple[TextIO, PrintMask]] = {}
        self._is_closed = False

    def __enter__(self) -> None:
        self._token: Token[MaskedPrints | None] = _CALL.set(self)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _CALL.reset(self._token)
        self._is_closed = True
        # Most calls print nothing. `write` checks again whether the call has ended.
        if self._masks:
            with self._lock:
                self._finish()

    def write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            if self._is_closed:
                # A task or a thread that outlived the call.
                stream.write(self.mask_text(text))
                return
            _, mask = self._masks.setdefault(id(stream), (stream, self._make()))
            stream.write(mask.feed(text))
            if self._is_closed:
                self._finish()

    def flush(self, stream: TextIO) -> None:
        with self._lock:
            _, mask = self._masks.pop(id(stream), (stream, None))
            if mask is not None:
                stream.write(mask.finish())
            stream.flush()

    def _finish(self) -> None:
        while self._masks:
            _, (stream, mask) = self._masks.popitem()
            # A closed terminal is not a failure of the call.
            with suppress(OSError, ValueError):
                stream.write(mask.finish())
                stream.flush()

    def mask_text(self, text: str) -> str:
        mask = self._make()
        return mask.feed(text) + mask.finish()


_CALL: Final = ContextVar[MaskedPrints | None]("halter_prints", default=None)


def print_masked_output(text: str) -> None:
    """Print the masked output of a process that the current call started; outside a call, print nothing."""
    call = _CALL.get()
    if text and call is not None:
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")


class _Stream:
    """A standard stream that masks the output of calls."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.users = 0

    def write(self, text: str) -> int:
        call = _CALL.get()
        if call is None:
            return self.stream.write(text)
        call.write(self.stream, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        call = _CALL.get()
        if call is None:
            self.stream.flush()
        else:
            call.flush(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _MaskingRecordFactory:
    """A log record factory that masks the records of calls."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record, call = self.make(*args, **kwargs), _CALL.get()
        return record if call is None else _mask_record(record, call)


def _mask_record(record: logging.LogRecord, call: MaskedPrints) -> logging.LogRecord:
    """Mask the text of a record for all handlers. `logging` itself reports a malformed record."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 The arguments are unknown objects, and `logging` reports the error.
        return record
    record.msg, record.args = call.mask_text(message), None
    if record.exc_info:
        record.exc_text = call.mask_text(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    if record.stack_info:
        record.stack_info = call.mask_text(record.stack_info)
    return record


_LOCK: Final = threading.Lock()


@contextmanager
def install_print_masks() -> Generator[None]:
    """Mask the standard streams and log records of calls while the block runs."""
    with _LOCK:
        streams = {name: _install_stream(name) for name in ("stdout", "stderr") if getattr(sys, name) is not None}
        records = _install_record_factory()
    try:
        yield
    finally:
        with _LOCK:
            for name, stream in streams.items():
                stream.users -= 1
                # A stream that was installed meanwhile by other code is left unchanged.
                if not stream.users and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            records.users -= 1
            if not records.users and logging.getLogRecordFactory() is records:
                logging.setLogRecordFactory(records.make)


def _install_stream(name: str) -> _Stream:
    current = cast("TextIO | _Stream", getattr(sys, name))
    stream = current if isinstance(current, _Stream) else _Stream(current)
    stream.users += 1
    setattr(sys, name, stream)
    return stream


def _install_record_factory() -> _MaskingRecordFactory:
    current = logging.getLogRecordFactory()
    records = current if isinstance(current, _MaskingRecordFactory) else _MaskingRecordFactory(current)
    records.users += 1
    logging.setLogRecordFactory(records)
    return records

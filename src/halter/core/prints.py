"""What the code of a tool prints, logs or warns of, with secrets taken out before it is shown.

The code runs in this process, and so does other code that prints on purpose what must not be masked. So a mask belongs
to a context: that of one call, and of the tasks and threads that carry it on. What else is printed passes as it is.
"""

import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, Protocol, TextIO, cast


class PrintMask(Protocol):
    """Takes secrets out of a text that comes in chunks."""

    def feed(self, chunk: str) -> str:
        """Take a chunk and return what is certain by now, which may be nothing."""
        ...

    def finish(self) -> str:
        """Return the rest."""
        ...


class _Call:
    """What one call prints.

    The end of each text waits for what comes next, since a secret may be printed in pieces, until the call ends or
    asks for it to be shown.
    """

    def __init__(self, make: Callable[[], PrintMask]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._masks: dict[int, tuple[TextIO, PrintMask]] = {}
        self._over = False

    def write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            if self._over:
                # A task or a thread that the call left behind.
                stream.write(self.masked(text))
                return
            _, mask = self._masks.setdefault(id(stream), (stream, self._make()))
            stream.write(mask.feed(text))

    def flush(self, stream: TextIO) -> None:
        """Show what waits."""
        with self._lock:
            _, mask = self._masks.pop(id(stream), (stream, None))
            if mask is not None:
                stream.write(mask.finish())
            stream.flush()

    def finish(self) -> None:
        with self._lock:
            self._over = True
            for stream, mask in self._masks.values():
                # A terminal that is gone is no failure of the call.
                with suppress(OSError, ValueError):
                    stream.write(mask.finish())
                    stream.flush()

    def masked(self, text: str) -> str:
        mask = self._make()
        return mask.feed(text) + mask.finish()


_CALL: Final = ContextVar[_Call | None]("halter_prints", default=None)


@contextmanager
def prints_masked(make: Callable[[], PrintMask]) -> Generator[None]:
    """Mask what the code in this block prints, and what it starts."""
    call = _Call(make)
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)
        call.finish()


def show_printed(text: str) -> None:
    """Show what a process printed that was made for the call of this context; without a call, show nothing."""
    call = _CALL.get()
    if text and call is not None:
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")


class _Stream:
    """A standard stream that masks what is written in the context of a call, and is the stream itself otherwise."""

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


class _Records:
    """Makes log records as before, and masks those of a call."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make
        self.users = 0

    def __call__(self, *args: Any, **more: Any) -> logging.LogRecord:
        record, call = self.make(*args, **more), _CALL.get()
        return record if call is None else _masked_record(record, call)


def _masked_record(record: logging.LogRecord, call: _Call) -> logging.LogRecord:
    """Mask the text of a record for all handlers. One that cannot be put together is told by logging itself."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 Its arguments are a stranger's, and logging says what is wrong with them.
        return record
    record.msg, record.args = call.masked(message), None
    if record.exc_info:
        record.exc_text = call.masked(logging.Formatter().formatException(record.exc_info))
        record.exc_info = None
    if record.stack_info:
        record.stack_info = call.masked(record.stack_info)
    return record


_LOCK: Final = threading.Lock()


@contextmanager
def prints_watched() -> Generator[None]:
    """Have masks work while the block runs, over whatever the standard streams are when it begins."""
    with _LOCK:
        streams = {name: _placed_stream(name) for name in ("stdout", "stderr") if getattr(sys, name) is not None}
        records = _placed_records()
    try:
        yield
    finally:
        with _LOCK:
            for name, stream in streams.items():
                stream.users -= 1
                # What another has put there meanwhile is left alone.
                if not stream.users and getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            records.users -= 1
            if not records.users and logging.getLogRecordFactory() is records:
                logging.setLogRecordFactory(records.make)


def _placed_stream(name: str) -> _Stream:
    now = cast("TextIO | _Stream", getattr(sys, name))
    stream = now if isinstance(now, _Stream) else _Stream(now)
    stream.users += 1
    setattr(sys, name, stream)
    return stream


def _placed_records() -> _Records:
    now = logging.getLogRecordFactory()
    records = now if isinstance(now, _Records) else _Records(now)
    records.users += 1
    logging.setLogRecordFactory(records)
    return records

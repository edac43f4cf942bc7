"""Reads the bodies of clients without holding the event loop, on which all other clients and halts wait.

A small body is read at once. A larger one is read by another process: in a thread, one search through a hostile body
would still keep the interpreter from everything else. A body that takes longer than its deadline ends that process.
Of each key one large body is read at a time, so no key can use all processes.
"""

import asyncio
import os
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec

from halter.external.dialect import DIALECTS, DialectName, ModelCall, Unreadable, mask_body, read_call
from halter.redaction.redact import Redact, Redactor

SMALL_BODY: Final = 32 * 1024
SMALL_MASKED_BODY: Final = 4 * 1024
"""Bytes of a body that is read in at most 15 ms, whatever it contains."""
MAX_PROCESSES: Final = 2
READ_TIMEOUT_SECONDS: Final = 30
_LENGTH_BYTES: Final = 8
_MAIN: Final = "from halter.proxy.body_reader import main; main()"
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class BodyTooLarge(Exception):
    """The decompressed body is too large."""


class ReadRequest(msgspec.Struct, frozen=True):
    """A body to read. `encoding` is its compression; with `masks`, secrets are masked."""

    dialect: DialectName
    data: bytes
    encoding: str
    max_size: int
    masks: bool


class BodyRead(msgspec.Struct, frozen=True):
    """The body to send, and what it asks for: no call if it is not a valid request of its dialect; then the reason."""

    body: bytes
    call: ModelCall | None = None
    problem: str = ""

    def require_call(self) -> ModelCall:
        """Return what the body asks for. Raises Unreadable."""
        if self.call is None:
            raise Unreadable(self.problem)
        return self.call


class _ReadFailure(msgspec.Struct, frozen=True, tag=True):
    sentence: str
    is_too_large: bool = False


class _ReadAnswer(msgspec.Struct, frozen=True, tag=True):
    """A read body. It is left out if it is the one that was sent."""

    body: bytes | None
    call: ModelCall | None
    problem: str


_DECODE_REQUEST: Final = msgspec.msgpack.Decoder(ReadRequest).decode
_DECODE_ANSWER: Final = msgspec.msgpack.Decoder(_ReadAnswer | _ReadFailure).decode


def read_request(request: ReadRequest, redact: Redact) -> BodyRead:
    """Decompress, mask and read a body. Raises BodyTooLarge, and Unreadable if nothing can be sent."""
    data = request.data if request.encoding == "identity" else _decompress(request)
    if not data:
        return BodyRead(data, None, "The request is empty.")
    if request.masks:
        data = mask_body(data, redact)
    dialect = next(each for each in DIALECTS if each.name == request.dialect)
    try:
        return BodyRead(data, read_call(dialect, data))
    except Unreadable as error:
        return BodyRead(data, None, str(error))


def _decompress(request: ReadRequest) -> bytes:
    if request.encoding not in {"gzip", "deflate"}:
        raise Unreadable(f"Unsupported content-encoding {request.encoding}. Send the body plain, or with gzip.")
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        data = unpack.decompress(request.data, request.max_size)
    except zlib.error as error:
        raise Unreadable(f"The body cannot be decompressed: {error}.") from None
    if unpack.unconsumed_tail:
        raise BodyTooLarge
    return data


class BodyReader:
    """Reads bodies: small ones here, others in processes, which start when they are needed."""

    def __init__(self, redact: Redact, environ: Mapping[str, str]) -> None:
        self._redact = redact
        self._environ = dict(environ)
        self._idle: list[_Worker] = []
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._key_locks: dict[str, _KeyLock] = {}

    async def read(self, key_digest: str, request: ReadRequest) -> BodyRead:
        """Read a body. Raises BodyTooLarge and Unreadable."""
        small_size = SMALL_MASKED_BODY if request.masks else SMALL_BODY
        if request.encoding == "identity" and len(request.data) <= small_size:
            return read_request(request, self._redact)
        async with self._wait_for_turn(key_digest), self._slots:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._environ)
            try:
                async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                    answer = await worker.read(request)
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                await worker.stop()
                reason = "takes too long" if isinstance(error, TimeoutError) else "ended its reader"
                raise Unreadable(f"The request {reason} and was not read. Send less in one request.") from None
            except BaseException:
                await worker.stop()
                raise
            self._idle.append(worker)
        if isinstance(answer, _ReadFailure):
            raise BodyTooLarge if answer.is_too_large else Unreadable(answer.sentence)
        body = request.data if answer.body is None else answer.body
        call = answer.call and msgspec.structs.replace(answer.call, body=body)
        return BodyRead(body, call, answer.problem)

    @asynccontextmanager
    async def _wait_for_turn(self, key_digest: str) -> AsyncGenerator[None]:
        key_lock = self._key_locks.setdefault(key_digest, _KeyLock())
        key_lock.user_count += 1
        try:
            async with key_lock.lock:
                yield
        finally:
            key_lock.user_count -= 1
            if not key_lock.user_count:
                del self._key_locks[key_digest]

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().stop()


class _KeyLock:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.user_count = 0


class _Worker:
    """A process that reads one body after the other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, environ: Mapping[str, str]) -> "_Worker":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _MAIN),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        worker = cls(process)
        await worker._send(_ENCODE(environ))
        return worker

    async def read(self, request: ReadRequest) -> _ReadAnswer | _ReadFailure:
        await self._send(_ENCODE(request))
        output = self._process.stdout
        if output is None:
            raise AssertionError("A reader's process has no output.")
        length = int.from_bytes(await output.readexactly(_LENGTH_BYTES))
        return _DECODE_ANSWER(await output.readexactly(length))

    async def _send(self, data: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None:
            raise AssertionError("A reader's process has no input.")
        pipe.write(len(data).to_bytes(_LENGTH_BYTES))
        pipe.write(data)
        await pipe.drain()

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def main() -> None:
    """Read bodies from stdin, and answer each on stdout, until stdin ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer

    def receive() -> bytes | None:
        head = source.read(_LENGTH_BYTES)
        return source.read(int.from_bytes(head)) if len(head) == _LENGTH_BYTES else None

    environ = receive()
    redactor = _LazyRedactor(environ or b"\x80")
    while (data := receive()) is not None:
        answer = _ENCODE(_answer(_DECODE_REQUEST(data), redactor.redact))
        target.write(len(answer).to_bytes(_LENGTH_BYTES) + answer)
        target.flush()


class _LazyRedactor:
    """Masks secrets of an environment; most keys mask nothing."""

    def __init__(self, environ: bytes) -> None:
        self._environ = environ
        self._redact: Callable[[str], str] | None = None

    def redact(self, text: str) -> str:
        if self._redact is None:
            self._redact = Redactor({}, msgspec.msgpack.decode(self._environ, type=dict[str, str])).redact
        return self._redact(text)


def _answer(request: ReadRequest, redact: Redact) -> _ReadAnswer | _ReadFailure:
    try:
        body_read = read_request(request, redact)
    except BodyTooLarge:
        return _ReadFailure("", is_too_large=True)
    except Unreadable as error:
        return _ReadFailure(str(error))
    body = None if body_read.body == request.data else body_read.body
    call = body_read.call and msgspec.structs.replace(body_read.call, body=b"")
    return _ReadAnswer(body, call, body_read.problem)

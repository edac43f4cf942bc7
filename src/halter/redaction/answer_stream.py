"""The text of an answer as it streams to a listener, with secrets masked."""

from collections.abc import Callable, Mapping
from typing import Protocol

from halter.core.messages import StreamChunk
from halter.redaction.anonymize import StreamRehydrator
from halter.redaction.redact import Redact

ChunkListener = Callable[[StreamChunk], None]


class StreamMask(Protocol):
    """Masks secrets in streamed text. It may hold a chunk back until the chunk is known to be safe."""

    def feed(self, chunk: str) -> str: ...

    def finish(self) -> str: ...


class WholeTextMask:
    """Masks a text as a whole, at its end, and passes nothing on before."""

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._pieces: list[str] = []

    def feed(self, chunk: str) -> str:
        self._pieces.append(chunk)
        return ""

    def finish(self) -> str:
        return self._redact("".join(self._pieces))


class RehydratingMask:
    """Replaces placeholders with their values, before secrets are masked."""

    def __init__(self, mask: StreamMask, values: Mapping[str, str]) -> None:
        self._mask = mask
        self._rehydrator = StreamRehydrator(values)

    def feed(self, chunk: str) -> str:
        return self._mask.feed(self._rehydrator.feed(chunk))

    def finish(self) -> str:
        return self._mask.feed(self._rehydrator.finish()) + self._mask.finish()


class AnswerStream:
    """Passes one attempt's text to a listener. A listener that raises is dropped; the request continues."""

    def __init__(self, request: str, listen: ChunkListener, mask: StreamMask, *, discards: bool) -> None:
        self._request = request
        self._on_chunk: ChunkListener | None = listen
        self._mask = mask
        self.texts: list[str] = []
        if discards:
            self._send_chunk(StreamChunk(request, discard=True))

    def on_text(self, text: str) -> None:
        self._emit(self._mask.feed(text))

    def finish(self, *, whole: bool) -> None:
        """End the stream. Drop the text held back from a failed answer, which will be discarded."""
        if whole:
            self._emit(self._mask.finish())
        self._send_chunk(StreamChunk(self._request, finished=True))
        self._on_chunk = None

    def _emit(self, text: str) -> None:
        if text:
            self.texts.append(text)
            self._send_chunk(StreamChunk(self._request, text))

    def _send_chunk(self, chunk: StreamChunk) -> None:
        if self._on_chunk is None:
            return
        try:
            self._on_chunk(chunk)
        except Exception:  # noqa: BLE001 The listener is foreign code: its errors must not end the request.
            self._on_chunk = None

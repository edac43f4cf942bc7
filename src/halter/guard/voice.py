"""An answer's words on their way to whoever listens: without secrets, and with exactly one end."""

from collections.abc import Callable, Mapping
from typing import Protocol

from halter.core.messages import StreamChunk
from halter.guard.flight import Redact
from halter.guard.rehydrate import StreamRehydrator

Listen = Callable[[StreamChunk], None]
"""Somebody who is shown an answer as it comes."""


class StreamMask(Protocol):
    """Takes secrets out of text that comes in pieces; it may hold a piece back until it is certain."""

    def feed(self, chunk: str) -> str:
        """Take a piece, and return what is certain by now."""
        ...

    def finish(self) -> str:
        """Return the rest."""
        ...


class HeldBack:
    """Masks a text as a whole, at its end: nothing of it is told before."""

    def __init__(self, redact: Redact) -> None:
        self._redact = redact
        self._pieces: list[str] = []

    def feed(self, chunk: str) -> str:
        """Keep a piece."""
        self._pieces.append(chunk)
        return ""

    def finish(self) -> str:
        """Return all of it."""
        return self._redact("".join(self._pieces))


class Rehydrated:
    """Puts what a model was not told back into its words, before secrets are taken out of them."""

    def __init__(self, mask: StreamMask, values: Mapping[str, str]) -> None:
        self._mask = mask
        self._rehydrator = StreamRehydrator(values)

    def feed(self, chunk: str) -> str:
        """Take a piece, and return what is certain by now."""
        return self._mask.feed(self._rehydrator.feed(chunk))

    def finish(self) -> str:
        """Return the rest."""
        return self._mask.feed(self._rehydrator.finish()) + self._mask.finish()


class Voice:
    """Passes one attempt's words on. A listener that fails is not told any more; the request does not suffer for it."""

    def __init__(self, request: str, listen: Listen, mask: StreamMask, *, discards: bool) -> None:
        self._request = request
        self._listen: Listen | None = listen
        self._mask = mask
        if discards:
            self._tell(StreamChunk(request, discard=True))

    def hear(self, text: str) -> None:
        """Take what the model says."""
        self._say(self._mask.feed(text))

    def finish(self, *, whole: bool) -> None:
        """End the stream. What was still held back of an answer that failed is not told: it will be taken back."""
        if whole:
            self._say(self._mask.finish())
        self._tell(StreamChunk(self._request, finished=True))
        self._listen = None

    def _say(self, text: str) -> None:
        if text:
            self._tell(StreamChunk(self._request, text))

    def _tell(self, chunk: StreamChunk) -> None:
        if self._listen is None:
            return
        try:
            self._listen(chunk)
        except Exception:  # noqa: BLE001 It is a stranger's code, and what it shows is no part of the work.
            self._listen = None

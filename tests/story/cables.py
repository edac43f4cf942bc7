"""A cable between a program and its PostgreSQL: real sockets, cut at a word that passes through it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

When = Literal["before", "after"]
PIECE = 65_536


class Cable:
    """Carries everything, in threads of its own, until it is cut. A store is then away, for so many tries.

    It is cut when a word is on its way to the server: `before` the server hears it, or `after` it has done all that it
    was asked with it, so that only its answer is lost.
    """

    def __init__(self, server: str) -> None:
        split_result = urlsplit(server)
        self._server = (split_result.hostname or "", split_result.port or 0)
        self._query = split_result.query
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._word = b""
        self._when: When = "before"
        self._down = False
        self._refused = 0
        self._heard: set[socket.socket] = set()
        self.on_cut: Callable[[], None] = lambda: None
        """Called where a word has cut the cable, before anybody notices."""

    @property
    def url(self) -> str:
        """Where the server is reached through the cable."""
        return f"postgresql://postgres@127.0.0.1:{self._listener.getsockname()[1]}/postgres?{self._query}"

    def arm(self, word: bytes, when: When, refused: int = 3) -> None:
        """Cut the cable at the next message with this word, and once more for each of so many tries after that."""
        with self._lock:
            self._word, self._when, self._refused = word, when, refused

    def cut(self, refused: int = 3) -> None:
        """Cut the cable now."""
        with self._lock:
            self._refused = refused
        self._sever()

    def unplug(self) -> None:
        """Cut the cable, and leave it so."""
        with self._lock:
            self._down = True
        self._sever()

    def plug(self) -> None:
        """Let the cable carry again."""
        with self._lock:
            self._down = False

    @contextmanager
    def laid(self) -> Iterator["Cable"]:
        """Carry until the block ends."""
        self._run(self._accept)
        try:
            yield self
        finally:
            # Whoever waits in accept() does not see that its socket is closed.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._sever()
            for thread in self._threads:
                thread.join(30)

    def _run(self, act: object, *given: object) -> None:
        thread = threading.Thread(target=act, args=given, daemon=True)  # pyright: ignore[reportArgumentType]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_refused():
                near.close()
                continue
            far = socket.create_connection(self._server)
            with self._lock:
                self._ends += [near, far]
            self._run(self._ask, near, far)
            self._run(self._answer, far, near)

    def _is_refused(self) -> bool:
        with self._lock:
            if self._refused and not self._word:
                self._refused -= 1
                return True
            return self._down

    def _sever(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        """Carry what is asked to the server."""
        tail = b""
        with suppress(OSError):
            while data := near.recv(PIECE):
                with self._lock:
                    found = bool(self._word) and self._word in tail + data
                    tail = data[-64:]
                    if found:
                        self._word = b""
                        if self._when == "after":
                            self._heard.add(far)
                if found and self._when == "before":
                    self.on_cut()
                    self._sever()
                    return
                far.sendall(data)
        self._close(near, far)

    def _answer(self, far: socket.socket, near: socket.socket) -> None:
        """Carry answers back; that one is lost which follows the word."""
        with suppress(OSError):
            while data := far.recv(PIECE):
                if far in self._heard:
                    self._heard.discard(far)
                    self.on_cut()
                    self._sever()
                    return
                near.sendall(data)
        self._close(near, far)

    def _close(self, *ends: socket.socket) -> None:
        """Close both ends of a connection that one side has ended."""
        with self._lock:
            self._ends = [end for end in self._ends if end not in ends]
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

"""The sessions that a process has open, by the keys of the programs that use them."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from halter.loop.concurrency import cancel_and_wait

K = TypeVar("K")
S = TypeVar("S")


class OpenSessions(Generic[K, S]):
    """Opens each session once, also for requests that come at the same time."""

    def __init__(self) -> None:
        self._openings: dict[K, asyncio.Future[S]] = {}

    async def get(self, key: K, open_session: Callable[[], Coroutine[Any, Any, S]]) -> S:
        """Return the session of a key; the first caller opens it, and the others wait until it is open.

        A caller that is cancelled does not stop the opening.
        """
        opening = self._openings.get(key)
        if opening is None:
            opening = self._openings[key] = asyncio.ensure_future(open_session())
            opening.add_done_callback(partial(self._forget_failed, key))
        return await asyncio.shield(opening)

    def _forget_failed(self, key: K, opening: asyncio.Future[S]) -> None:
        if not _is_open(opening) and self._openings.get(key) is opening:
            del self._openings[key]

    def find(self, key: K) -> S | None:
        opening = self._openings.get(key)
        return opening.result() if opening is not None and _is_open(opening) else None

    def items(self) -> list[tuple[K, S]]:
        return [(key, opening.result()) for key, opening in self._openings.items() if _is_open(opening)]

    def values(self) -> list[S]:
        return [session for _, session in self.items()]

    def keys(self) -> list[K]:
        """List the keys, also of sessions that are still opened."""
        return [*self._openings]

    def remove(self, key: K) -> None:
        """Forget a session; the next request of its program opens one again."""
        self._openings.pop(key, None)

    async def stop_opening(self) -> None:
        """Cancel what is still opened."""
        await cancel_and_wait(*(opening for opening in self._openings.values() if not opening.done()))


def _is_open(opening: asyncio.Future[Any]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None

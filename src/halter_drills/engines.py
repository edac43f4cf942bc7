"""Engines that differ from the real one in one thing, for drills that end or break a process inside a commit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from halter.core.ids import Digest, SessionId, StreamId, WorkerId
from halter.core.ports import Agents, Lease, Stored, Ticket
from halter.core.row import Row, RowKey
from halter.journal.apply import Changes
from halter.journal.engine import Engine

KEPT_BACK: Final = 8
"""How many commits a store that writes behind keeps to itself."""

Moment = Callable[[int], None]
"""Hears the number of a commit, right before it or right after it."""


class _Passing:
    """Passes on to a real engine whatever a subclass does not do in a way of its own."""

    def __init__(self, real: Engine) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Watched(_Passing):
    """Counts commits of every kind, and says when one is about to happen and when it has happened."""

    def __init__(self, real: Engine, before: Moment, after: Moment) -> None:
        super().__init__(real)
        self._before = before
        self._after = after
        self._count = 0

    def commit(self) -> None:
        self._during(self.real.commit)

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: Agents | None = None,
    ) -> Sequence[Lease]:
        return self._during(lambda: self.real.claim(worker, limit, program_format, only, agents))

    def put(self, digest: Digest, data: bytes) -> None:
        self._during(lambda: self.real.put(digest, data))

    def _during(self, act: Callable[[], Any]) -> Any:
        self._count += 1
        self._before(self._count)
        answer = act()
        self._after(self._count)
        return answer


class _WriteBehind(_Passing):
    """Answers first and writes later: what any cache in front of a database does that must not stand here."""

    def __init__(self, real: Engine) -> None:
        super().__init__(real)
        self._kept: list[Changes] = []
        self._rows: dict[RowKey, Row | None] = {}

    def load(self, keys: Sequence[RowKey]) -> Mapping[RowKey, Row | None]:
        loaded = self.real.load(keys)
        return {key: self._rows.get(key, row) for key, row in loaded.items()}

    def committed(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, ...]]:
        kept = [event for changes in self._kept for event in changes.events]
        here = {key: tuple(event for event in kept if event.key == key) for key in keys}
        return {**self.real.committed(keys), **{key: events for key, events in here.items() if events}}

    def save(self, changes: Changes) -> None:
        self._kept.append(changes)
        self._rows |= {row.key(): row for row in (*changes.inserts, *changes.updates)}
        self._rows |= dict.fromkeys(changes.deletes)

    def commit(self) -> None:
        self.real.rollback()
        if len(self._kept) >= KEPT_BACK:
            self._write()

    def claim(
        self,
        worker: WorkerId,
        limit: int,
        program_format: int,
        only: SessionId | Ticket | None = None,
        agents: Agents | None = None,
    ) -> Sequence[Lease]:
        self._write()
        return self.real.claim(worker, limit, program_format, only, agents)

    def read(self, stream: StreamId, after: int, limit: int) -> Sequence[Stored]:
        self._write()
        return self.real.read(stream, after, limit)

    def _write(self) -> None:
        for changes in self._kept:
            self.real.begin()
            self.real.load([])
            self.real.save(changes)
            self.real.commit()
        self._kept.clear()
        self._rows.clear()


def watched(real: Engine, before: Moment, after: Moment) -> Engine:
    """Tell of every commit, right before and right after it."""
    return cast("Engine", _Watched(real, before, after))


def writing_behind(real: Engine) -> Engine:
    """Acknowledge commits that are not written yet."""
    return cast("Engine", _WriteBehind(real))

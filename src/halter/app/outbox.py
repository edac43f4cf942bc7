"""The outbox: what was committed to be told is sent, each channel in its own time, and at least once.

Several processes may send from one store, without a word between them. Who finds that another was faster stays a little
behind from then on, and looks again before it sends. So a letter goes out twice only where two meet for the first time,
or where one dies between sending and writing it down. Both copies have the same name.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

import msgspec

from halter.app.opened import App
from halter.brain.together import heard, until
from halter.channels.sending import sender_for
from halter.core.clock import MINUTE, SECOND
from halter.core.ids import Digest, StreamId, is_inbox, session_of
from halter.core.ports import Change, Query
from halter.core.task_rows import NotificationRow
from halter.core.tasks import Tasks
from halter.core.telling import Letter, Sender, Undelivered, telling_of
from halter.guard.secrets import Secrets
from halter.work.notifying import failed, sent

LOOK: Final = 10 * MINUTE
"""How often it looks by itself: hints may be lost."""
BREATH: Final = SECOND // 10
"""How long it lets news gather: a busy fleet is not asked after every write."""
BEHIND: Final = 5 * SECOND
"""How long a process leaves a letter to another that was faster before."""
PAGE: Final = 100

Way = tuple[str, str]
"""An agent, and the name of one of its channels."""


class _Due(msgspec.Struct, frozen=True):
    """Something that is to be told now, with what was said where it is still there."""

    notification: str
    channel: str
    agent: str
    about: str
    stream: str
    queued_at: int
    attempts: int
    body: bytes | None = None
    blob: str | None = None

    @property
    def way(self) -> Way:
        """Over which channel it goes."""
        return self.agent, self.channel


class _Next(msgspec.Struct, frozen=True):
    next_at: int | None


def senders_of(agent: str, tasks: Tasks, secrets: Secrets) -> dict[Way, Sender]:
    """Make the senders of all channels of an agent."""
    return {(agent, channel.name): sender_for(channel, secrets.value) for channel in tasks.notify.channels}


class Outbox:
    """Sends what the agents of this process have to tell. What others have to tell is left to their processes."""

    def __init__(self, app: App, senders: Mapping[Way, Sender]) -> None:
        self._store = app.patient()
        self._clock = app.clock
        self._senders = senders
        self._agents = frozenset(agent for agent, _ in senders)
        self._busy: set[Way] = set()
        self._behind: set[Way] = set()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Send what is due, as it becomes due, until cancelled."""
        try:
            await self._run()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run(self) -> None:
        async with heard(self._store, _may_tell) as self._news, asyncio.TaskGroup() as lanes:
            while True:
                now = self._clock.now()
                for way, due in _by_way(await self._due(now)):
                    self._busy.add(way)
                    lanes.create_task(self._work_off(way, due), name=f"halter-outbox-{way[1]}")
                await until(self._news, await self._pause(now))
                await self._clock.sleep(BREATH)

    async def _due(self, now: int) -> Sequence[_Due]:
        """List what is to be told now by this process and is not being told already, the oldest first."""
        limit = PAGE
        while True:
            rows = await self._store.ask(Query("notifications_due", _Due, {"now": now, "limit": limit}))
            ours = [row for row in rows if row.agent in self._agents and row.way not in self._busy]
            if ours or len(rows) < limit:
                return ours
            # So many wait for others that ours may stand behind them.
            limit *= 2

    async def _pause(self, now: int) -> int:
        (found,) = await self._store.ask(Query("next_notification", _Next, {"now": now}))
        return LOOK if found.next_at is None else min(LOOK, found.next_at - now)

    async def _work_off(self, way: Way, due: Sequence[_Due]) -> None:
        """Tell one thing after the other over one channel; a slow one holds up no other."""
        try:
            for row in due:
                if await self._is_ours(row):
                    await self._tell(row)
        finally:
            self._busy.discard(way)
            self._news.set()

    async def _is_ours(self, row: _Due) -> bool:
        """Look once more, and let another process go first if there seems to be one."""
        if row.way in self._behind and await self._still_waits(row):
            await self._clock.sleep(BEHIND)
        return await self._still_waits(row)

    async def _still_waits(self, row: _Due) -> bool:
        params = {"notification": row.notification}
        found = await self._store.ask(Query("notification", NotificationRow, params))
        return any(now.sent_at is None and now.attempts == row.attempts for now in found)

    async def _tell(self, row: _Due) -> None:
        attempts = row.attempts + 1
        try:
            await self._sent(row)
        except Undelivered as why:
            write = failed(row.notification, attempts, str(why), may_retry=why.may_retry)
        except Exception as error:  # noqa: BLE001  whatever a sender does, nothing else may suffer from it
            # Its words are not told: nobody knows what they hold.
            sentence = f"The channel {row.channel} broke down: {type(error).__name__}."
            write = failed(row.notification, attempts, sentence, may_retry=True)
        else:
            write = sent(row.notification, attempts)
        committed = await self._store.commit(write)
        faster_than_us = committed.repeated or not committed.events
        (self._behind.add if faster_than_us else self._behind.discard)(row.way)

    async def _sent(self, row: _Due) -> None:
        sender = self._senders.get(row.way)
        if sender is None:
            sentence = f"{row.agent} has no channel {row.channel}: write it under `notify` again."
            raise Undelivered(sentence, may_retry=True)
        await sender.send(await self._letter(row))

    async def _letter(self, row: _Due) -> Letter:
        telling = telling_of(await self._said(row))
        return Letter(
            id=row.notification,
            subject=telling.subject or f"{row.agent}: {row.about or 'news'}",
            text=telling.text,
            agent=row.agent,
            session=session_of(StreamId(row.stream)) or telling.session,
            about=row.about,
            at=row.queued_at,
        )

    async def _said(self, row: _Due) -> bytes:
        body = row.body
        if row.blob is not None:
            try:
                body = await self._store.get(Digest(row.blob))
            except KeyError:
                body = None
        if body is None:
            raise Undelivered("What was to be told has been erased.", may_retry=False)
        return body


def _by_way(due: Iterable[_Due]) -> list[tuple[Way, list[_Due]]]:
    """Put together what goes over the same channel, each in its order."""
    ordered = sorted(due, key=lambda row: row.way)
    return [(way, list(rows)) for way, rows in groupby(ordered, key=lambda row: row.way)]


def _may_tell(change: Change) -> bool:
    return not is_inbox(change.stream)

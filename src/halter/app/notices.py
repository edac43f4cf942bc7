"""What the runtime itself tells people: of sessions that were halted, failed or wait, and of documents left to them.

It looks at what stands in the store and was not told of yet. So nothing is missed because a process died between the
end of a session and the word about it, and nothing is told twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from halter.core.clock import DAY, Clock
from halter.core.ids import OUTBOX
from halter.core.ports import Draft, Query, Rows, Store, Write
from halter.core.task_rows import NotificationRow
from halter.core.tasks import Tasks
from halter.core.telling import Telling
from halter.core.vocabulary import State
from halter.work.leaving import named
from halter.work.notifying import queued, row_of

SINCE: Final = 7 * DAY
"""What is older than that nobody wants to be told of any more."""

Kind = Literal["halted", "failed", "waiting", "quarantined"]


class Ended(msgspec.Struct, frozen=True):
    """A session that did not come to a good end."""

    session: str
    agent: str
    state: State
    terminal_reason: str
    ended_at: int


class Waiting(msgspec.Struct, frozen=True):
    """Something that a person has to decide, or a question that they were asked."""

    about: str
    session: str
    agent: str
    what: str
    name: str


class Left(msgspec.Struct, frozen=True):
    """A document that is left to a person."""

    trigger: str
    item: str
    agent: str
    name: str
    sentence: str
    quarantined_at: int


class Notice(msgspec.Struct, frozen=True):
    """One thing to be told."""

    kind: Kind
    about: str
    agent: str
    telling: Telling


class Notices:
    """Tells people of what the agents of this process need them for."""

    def __init__(
        self, store: Store, clock: Clock, agents: Callable[[], Mapping[str, Tasks]], redact: Callable[[str], str]
    ) -> None:
        self._store = store
        self._clock = clock
        self._agents = agents
        self._redact = redact

    async def look(self) -> None:
        """Have everything told that was not told of yet."""
        agents = self._agents()
        for notice in await self._untold():
            tasks = agents.get(notice.agent)
            if tasks is None or notice.kind not in tasks.notify.on:
                continue
            channels = [channel.name for channel in tasks.notify.channels]
            await self._store.commit(_telling(notice, channels, self._redact))

    async def _untold(self) -> Sequence[Notice]:
        since = {"since": self._clock.now() - SINCE}
        ended = await self._store.ask(Query("untold_ends", Ended, since))
        waiting = await self._store.ask(Query("untold_waits", Waiting, {"now": self._clock.now()}))
        left = await self._store.ask(Query("untold_items", Left, since))
        return [*map(_of_an_end, ended), *map(_of_a_wait, waiting), *map(_of_a_document, left)]


def _telling(notice: Notice, channels: Sequence[str], redact: Callable[[str], str]) -> Write:
    said = notice.telling
    telling = Telling(subject=redact(said.subject), text=redact(said.text), session=said.session)
    names = {channel: named("n", notice.about, channel) for channel in channels}

    def decide(rows: Rows) -> Sequence[Draft]:
        return list(_drafts(rows))

    def _drafts(rows: Rows) -> Iterator[Draft]:
        for channel, name in names.items():
            if rows.get(NotificationRow, name) is None:
                yield queued(name, channel, notice.agent, telling, notice.about)

    return Write(OUTBOX, f"notice/{notice.about}", decide, [row_of(name) for name in names.values()])


def _of_an_end(row: Ended) -> Notice:
    kind: Kind = "halted" if row.state == "HALTED" else "failed"
    text = (
        f"Session {row.session} of {row.agent} ended {row.state} ({row.terminal_reason}). "
        f"Its receipt: halter receipt {row.session}"
    )
    subject = f"{row.agent}: a session {'was halted' if kind == 'halted' else 'failed'}"
    telling = Telling(subject=subject, text=text, session=row.session)
    return Notice(kind, f"ended:{row.session}:{row.ended_at}", row.agent, telling)


def _of_a_wait(row: Waiting) -> Notice:
    where = f"Session {row.session} of {row.agent}" if row.session else row.agent
    text = f"{where} waits for you: {row.what} {row.name}. Look at it: halter inbox"
    return Notice(
        "waiting", row.about, row.agent, Telling(subject=f"{row.agent} needs you", text=text, session=row.session)
    )


def _of_a_document(row: Left) -> Notice:
    again = f"halter schedules retry {row.trigger} {row.item[:16]}"
    text = f"{row.trigger} leaves a document to you. {row.sentence} To let it be tried anew: {again}"
    telling = Telling(subject=f"{row.agent}: a document is left to you ({row.name})", text=text)
    return Notice("quarantined", f"quarantined:{row.trigger}:{row.item}:{row.quarantined_at}", row.agent, telling)

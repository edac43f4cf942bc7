"""Notices to people about failed or waiting sessions and quarantined documents, and the outbox that sends them.

Notices are made from the store, so none is lost when a process dies, and none is queued twice.

Several processes may send from one store. After another process has sent first over a channel, this one waits a moment
and checks again before each send. A notification is sent twice only when two processes first compete for a channel, or
when one dies between sending and recording. Both copies have the same id.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, Literal

import msgspec

from halter.autonomy.upkeep import Unhealthy
from halter.core.clock import DAY, MINUTE, SECOND, Clock, format_duration
from halter.core.ids import OUTBOX, Digest, StreamId, is_inbox, parse_session_id
from halter.core.notifications import (
    DeliveryFailed,
    NotificationContent,
    OutgoingNotification,
    Sender,
    parse_notification,
)
from halter.core.ports import Change, Draft, Query, Rows, Store, Write, load_body
from halter.core.rows import NotificationRow, OutageRow
from halter.core.text import shorten
from halter.core.vocabulary import State
from halter.guard.approvals import list_pending_decisions
from halter.loop.concurrency import wait_for_change, watch_changes
from halter.notify import make_sender
from halter.redaction.secrets import Secrets
from halter.runtime.needs import (
    UNUSABLE_REMEDY,
    Need,
    list_unhealthy,
    make_decision_need,
    make_document_need,
    make_paused_need,
    make_question_need,
    read_open_questions,
)
from halter.runtime.runtime import Runtime
from halter.spec.tasks import Tasks
from halter.tasks.task_tools import (
    make_notification_key,
    name_by_parts,
    queue_notification,
    record_send_failure,
    record_sent,
)

MAX_NOTICE_AGE: Final = 7 * DAY
"""Older events are not reported."""
MAX_SUBJECT: Final = 120

NoticeKind = Literal["halted", "failed", "waiting", "quarantined"]


class SessionFailure(msgspec.Struct, frozen=True):
    """A session that failed or was halted."""

    session: str
    agent: str
    state: State
    terminal_reason: str
    ended_at: int


class DecisionNotice(msgspec.Struct, frozen=True):
    """A decision or a question that waits for a person."""

    about: str
    session: str
    agent: str
    what: str
    name: str


class ArtifactNotice(msgspec.Struct, frozen=True):
    """A quarantined document."""

    trigger: str
    item: str
    agent: str
    name: str
    sentence: str
    quarantined_at: int


class OutageNotice(msgspec.Struct, frozen=True):
    """A queued notice of an outage (`outage:AGENT:TROUBLE:BEGAN`) or of its end (`outage_over:` and the same)."""

    agent: str
    about: str
    queued_at: int


class Notice(msgspec.Struct, frozen=True):
    """One thing to report, over channels that report one of its kinds."""

    kinds: tuple[NoticeKind, ...]
    about: str
    agent: str
    telling: NotificationContent


class Notices:
    """Queues notices of everything for which the agents of this process need a person."""

    def __init__(
        self, store: Store, clock: Clock, agents: Callable[[], Mapping[str, Tasks]], redact: Callable[[str], str]
    ) -> None:
        self._store = store
        self._clock = clock
        self._agents = agents
        self._redact = redact

    async def queue_due(self) -> None:
        agents = self._agents()
        for notice in await self._untold():
            tasks = agents.get(notice.agent)
            if tasks is None or not set(notice.kinds).intersection(tasks.notify.on):
                continue
            channels = [channel.name for channel in tasks.notify.channels]
            await self._store.commit(_queue_notice(notice, channels, self._redact))

    async def _untold(self) -> Sequence[Notice]:
        params = {"since": self._clock.now() - MAX_NOTICE_AGE}
        failures = await self._store.ask(Query("untold_ends", SessionFailure, params))
        waiting = await self._store.ask(Query("untold_waits", DecisionNotice, {"now": self._clock.now()}))
        documents = await self._store.ask(Query("untold_items", ArtifactNotice, params))
        failing = await self._store.ask(Query("open_outages", OutageRow))
        outage_notices = await self._store.ask(Query("outage_notices", OutageNotice, params))
        needs = await self._read_needs() if waiting else dict[str, Need]()
        unhealthy_agents = await list_unhealthy(self._store, self._clock.now()) if failures else ()
        unhealthy = {each.session: each for each in unhealthy_agents}
        return [
            *(_notice_of_failure(row, unhealthy.get(row.session)) for row in failures),
            *(_notice_of_need(row, needs.get(row.about) or needs.get(row.session)) for row in waiting),
            *map(_notice_of_document, documents),
            *list_outage_notices(failing, outage_notices, self._clock.now()),
        ]

    async def _read_needs(self) -> Mapping[str, Need]:
        """Return the needs of pending decisions by the key of their notice, and of open questions by session."""
        pending = await list_pending_decisions(self._store, self._clock.now())
        questions = await read_open_questions(self._store)
        decisions = {f"waiting:{decision.decision}": make_decision_need(decision) for decision in pending}
        return decisions | {
            name: make_question_need(name, question.agent, question) for name, question in questions.items()
        }


def _queue_notice(notice: Notice, channels: Sequence[str], redact: Callable[[str], str]) -> Write:
    content = notice.telling
    redacted_content = NotificationContent(
        subject=redact(content.subject), text=redact(content.text), session=content.session
    )
    names = {channel: name_by_parts("n", notice.about, channel) for channel in channels}

    def decide(rows: Rows) -> Sequence[Draft]:
        return [
            queue_notification(name, channel, notice.agent, redacted_content, notice.about)
            for channel, name in names.items()
            if rows.get(NotificationRow, name) is None
        ]

    return Write(OUTBOX, f"notice/{notice.about}", decide, [make_notification_key(name) for name in names.values()])


def _notice_of_failure(row: SessionFailure, unhealthy: Unhealthy | None) -> Notice:
    """Make the notice of a session that failed. If its agent is unhealthy, that comes first."""
    about = f"ended:{row.session}:{row.ended_at}"
    if unhealthy is not None:
        is_stopped = unhealthy.until is None
        subject = f"{row.agent} needs you: it is unhealthy" if is_stopped else f"{row.agent} is unhealthy"
        text = f"{unhealthy.line} Its receipt: halter show {row.session} --receipt"
        content = NotificationContent(subject=subject, text=text, session=row.session)
        return Notice(("failed", "waiting") if is_stopped else ("failed",), about, row.agent, content)
    kind: NoticeKind = "halted" if row.state == "HALTED" else "failed"
    text = (
        f"Session {row.session} of {row.agent} ended {row.state} ({row.terminal_reason}). "
        f"Its receipt: halter show {row.session} --receipt"
    )
    subject = f"{row.agent}: a session {'was halted' if kind == 'halted' else 'failed'}"
    content = NotificationContent(subject=subject, text=text, session=row.session)
    return Notice((kind,), about, row.agent, content)


def _notice_of_need(row: DecisionNotice, need: Need | None) -> Notice:
    """Make the notice of a decision or a question, with the texts that the inbox shows."""
    need = need or make_paused_need(row.session, row.agent)
    text = "\n".join(part for part in (need.sentence, need.why, need.shown, *need.commands, "halter inbox") if part)
    subject = f"{row.agent} needs you: {shorten(need.sentence.removeprefix(f'{row.agent} '), MAX_SUBJECT)}"
    content = NotificationContent(subject=subject, text=text, session=row.session)
    return Notice(("waiting",), row.about, row.agent, content)


def list_outage_notices(
    failing: Sequence[OutageRow], outage_notices: Sequence[OutageNotice], now: int
) -> Iterator[Notice]:
    """Yield one notice for each outage of an agent, for all of its sessions, and one for its end."""
    open_outages = {
        notice.about.removeprefix("outage:") for notice in outage_notices if notice.about.startswith("outage:")
    }
    open_outages -= {notice.about.removeprefix("outage_over:") for notice in outage_notices}
    current: dict[tuple[str, str], OutageRow] = {}
    for row in failing:
        current.setdefault((row.agent, row.trouble), row)
    open_by_key = {tuple(name.rsplit(":", 2)[:2]): name for name in sorted(open_outages)}
    for key, row in current.items():
        if key not in open_by_key:
            yield _notice_of_outage(row)
    for key, name in open_by_key.items():
        if key not in current:
            yield _notice_of_recovery(key[0], name, now)


def _notice_of_outage(row: OutageRow) -> Notice:
    about = f"outage:{row.agent}:{row.trouble}:{row.began_at}"
    if row.trouble == "needs_person":
        subject = f"{row.agent} needs you: its model cannot be used"
        text = f"{row.sentence} {UNUSABLE_REMEDY}"
        return Notice(
            ("waiting",), about, row.agent, NotificationContent(subject=subject, text=text, session=row.session)
        )
    subject = f"{row.agent}: no model answers"
    text = f"{row.sentence} Retrying automatically; waiting costs nothing. No action is needed."
    return Notice(("failed",), about, row.agent, NotificationContent(subject=subject, text=text, session=row.session))


def _notice_of_recovery(agent: str, name: str, now: int) -> Notice:
    duration = format_duration(max(SECOND, now - int(name.rpartition(":")[2])))
    kind: NoticeKind = "waiting" if ":needs_person:" in name else "failed"
    content = NotificationContent(
        subject=f"{agent}: the wait for its model has ended",
        text=f"No session of {agent} waits for its model, after {duration}.",
    )
    return Notice((kind,), f"outage_over:{name}", agent, content)


def _notice_of_document(row: ArtifactNotice) -> Notice:
    need = make_document_need(row.trigger, row.item, row.name, row.sentence)
    content = NotificationContent(subject=f"{row.agent}: a document was quarantined ({row.name})", text=need.line)
    return Notice(("quarantined",), f"quarantined:{row.trigger}:{row.item}:{row.quarantined_at}", row.agent, content)


OUTBOX_POLLING_INTERVAL: Final = 10 * MINUTE
"""Polling interval for due notifications: hints may be lost."""
OUTBOX_DEBOUNCE: Final = SECOND // 10
"""Minimum time between two queries on a busy store."""
OUTBOX_YIELD_DELAY: Final = 5 * SECOND
"""Delay before sending over a channel on which another process was faster."""
OUTBOX_PAGE: Final = 100

ChannelKey = tuple[str, str]
"""An agent and the name of one of its channels."""


class _Due(msgspec.Struct, frozen=True):
    """A due notification, with its body unless erased."""

    notification: str
    channel: str
    agent: str
    about: str
    stream: str
    queued_at: int
    attempts: int
    body: bytes | None = None
    blob: Digest | None = None

    @property
    def channel_key(self) -> ChannelKey:
        return self.agent, self.channel


class _Next(msgspec.Struct, frozen=True):
    next_at: int | None


def make_senders(agent: str, tasks: Tasks, secrets: Secrets) -> dict[ChannelKey, Sender]:
    return {(agent, channel.name): make_sender(channel, secrets.value) for channel in tasks.notify.channels}


class Outbox:
    """Sends the notifications of the agents of this process. Other processes send those of their agents."""

    def __init__(self, app: Runtime, senders: Mapping[ChannelKey, Sender]) -> None:
        self._store = app.patient()
        self._clock = app.clock
        self._senders = senders
        self._agents = frozenset(agent for agent, _ in senders)
        self._busy: set[ChannelKey] = set()
        self._behind: set[ChannelKey] = set()
        self._change_event = asyncio.Event()

    async def run(self) -> None:
        """Send due notifications until cancelled."""
        try:
            await self._send_due()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _send_due(self) -> None:
        async with watch_changes(self._store, _can_be_notification) as self._change_event, asyncio.TaskGroup() as lanes:
            while True:
                now = self._clock.now()
                due_rows = sorted(await self._due(now), key=lambda row: row.channel_key)
                for channel, rows in groupby(due_rows, key=lambda row: row.channel_key):
                    self._busy.add(channel)
                    lanes.create_task(self._work_off(channel, list(rows)), name=f"halter-outbox-{channel[1]}")
                await wait_for_change(self._change_event, await self._pause(now))
                await self._clock.sleep(OUTBOX_DEBOUNCE)

    async def _due(self, now: int) -> Sequence[_Due]:
        """Return the due notifications that this process is not yet sending, oldest first."""
        limit = OUTBOX_PAGE
        while True:
            rows = await self._store.ask(Query("notifications_due", _Due, {"now": now, "limit": limit}))
            own_rows = [row for row in rows if row.agent in self._agents and row.channel_key not in self._busy]
            if own_rows or len(rows) < limit:
                return own_rows
            # A full page of other agents' notifications: ours may come after it.
            limit *= 2

    async def _pause(self, now: int) -> int:
        (row,) = await self._store.ask(Query("next_notification", _Next, {"now": now}))
        return OUTBOX_POLLING_INTERVAL if row.next_at is None else min(OUTBOX_POLLING_INTERVAL, row.next_at - now)

    async def _work_off(self, channel: ChannelKey, due_rows: Sequence[_Due]) -> None:
        """Send notifications over one channel, one after the other. A slow channel delays no other one."""
        try:
            for row in due_rows:
                if await self._is_ours(row):
                    await self._send(row)
        finally:
            self._busy.discard(channel)
            self._change_event.set()

    async def _is_ours(self, row: _Due) -> bool:
        """Return true if a notification is still due, after a delay if another process was faster before."""
        if row.channel_key in self._behind and await self._is_still_due(row):
            await self._clock.sleep(OUTBOX_YIELD_DELAY)
        return await self._is_still_due(row)

    async def _is_still_due(self, row: _Due) -> bool:
        params = {"notification": row.notification}
        rows = await self._store.ask(Query("notification", NotificationRow, params))
        return any(current.sent_at is None and current.attempts == row.attempts for current in rows)

    async def _send(self, row: _Due) -> None:
        attempts = row.attempts + 1
        try:
            await self._record_sent(row)
        except DeliveryFailed as failure:
            write = record_send_failure(row.notification, attempts, str(failure), may_retry=failure.may_retry)
        except Exception as error:  # noqa: BLE001  a failing sender may stop nothing else
            # The error's message may hold anything: only its type is recorded.
            sentence = f"The channel {row.channel} failed: {type(error).__name__}."
            write = record_send_failure(row.notification, attempts, sentence, may_retry=True)
        else:
            write = record_sent(row.notification, attempts)
        result = await self._store.commit(write)
        faster_than_us = result.is_repeated or not result.events
        (self._behind.add if faster_than_us else self._behind.discard)(row.channel_key)

    async def _record_sent(self, row: _Due) -> None:
        """Send a notification over its channel. Raises DeliveryFailed if that is impossible."""
        sender = self._senders.get(row.channel_key)
        if sender is None:
            sentence = f"{row.agent} has no channel {row.channel}. Add it under `notify` again."
            raise DeliveryFailed(sentence, may_retry=True)
        await sender.send(await self._letter(row))

    async def _letter(self, row: _Due) -> OutgoingNotification:
        content = parse_notification(await self._read_body(row))
        return OutgoingNotification(
            id=row.notification,
            subject=content.subject or f"{row.agent}: {row.about or 'news'}",
            text=content.text,
            agent=row.agent,
            session=parse_session_id(StreamId(row.stream)) or content.session,
            about=row.about,
            at=row.queued_at,
        )

    async def _read_body(self, row: _Due) -> bytes:
        body = await load_body(self._store, row.body, row.blob)
        if body is None:
            raise DeliveryFailed("The text of the notification was erased.", may_retry=False)
        return body


def _can_be_notification(change: Change) -> bool:
    return not is_inbox(change.stream)

"""A running channel: sends decisions to the people who may answer, performs their replies, and shows the outcome.

One process serves a channel at a time: the worker that the channel's stream names, while it is alive. Everything that
must survive a restart is in that stream. A reply may be delivered again after a crash; its decision is then already
answered, and the sender is informed.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from halter.channels.messages import (
    QUESTION,
    RANDOM_BYTES,
    AnswerShown,
    ApproveShown,
    AskedQuestion,
    ChatMessage,
    ChatReply,
    DenyShown,
    Explain,
    Intent,
    ShowStatus,
    StopScope,
    compose,
    compose_question,
    describe_outcome,
    find_code,
    read_reply,
    session_of_question,
)
from halter.core.clock import MINUTE, SECOND
from halter.core.errors import HalterError, NotDone, StoreUnavailable
from halter.core.events import (
    ApproverPaired,
    ChannelEvent,
    ChannelTaken,
    DecisionShown,
    MessageClosed,
    RepliesRead,
    WakePosted,
)
from halter.core.ids import inbox_stream, make_worker_id
from halter.core.money import format_share, format_usd
from halter.core.ports import Query, read_stream
from halter.core.rows import DecisionRow
from halter.core.text import clean, describe_need_count, shorten
from halter.dispatch.heartbeat import renew_leases
from halter.dispatch.workers import WorkerRow
from halter.guard.approvals import PendingDecision
from halter.loop.concurrency import raise_if_cancelled, run_until_first, wait_for_change, watch_changes
from halter.net.client import parse_retry_after
from halter.operations import control, decisions, messages
from halter.operations.actor import Actor, Principal
from halter.operations.channels import read_who
from halter.operations.status import FleetStatus, read_status
from halter.policy.hours import Hours, find_wake_time
from halter.runtime.needs import read_open_questions
from halter.runtime.runtime import Runtime
from halter.state.channel import Approver, ChannelLog, ChannelState, ShownMessage, digest_token

ANNOUNCE_INTERVAL: Final = 30 * SECOND
"""Polling interval for open decisions: change hints may be lost, and decisions expire."""
DEBOUNCE: Final = SECOND
TAKE_INTERVAL: Final = 5 * SECOND
SEND_INTERVAL: Final = SECOND
"""Time between two messages: platforms allow about one per second in a chat."""
MAX_OPEN: Final = 20
"""Maximum number of open questions in a chat; others follow as these are answered."""
MAX_CODES_PER_MINUTE: Final = 10
"""Maximum number of codes read from one account per minute, so that no account keeps another from pairing.

A code has 60 random bits and is valid for ten minutes, so even many accounts cannot guess one.
"""
MAX_STATUS_LINES: Final = 20
BACKOFF: Final = 2 * SECOND
MAX_BACKOFF: Final = 2 * MINUTE

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Most that is read of one answer of a platform."""
DEFAULT_RATE_LIMIT_WAIT: Final = 10 * SECOND

ReportSentence = Callable[[str], None]


class TransportFailed(HalterError):
    """A platform failed; the sentence contains no secret. `retry_after` is in microseconds."""

    def __init__(self, sentence: str, *, may_retry: bool, retry_after: int = 0) -> None:
        super().__init__(sentence)
        self.may_retry = may_retry
        self.retry_after = retry_after


def make_rate_limit_failure(platform: str, headers: Mapping[str, str]) -> TransportFailed:
    seconds = parse_retry_after(headers)
    wait = DEFAULT_RATE_LIMIT_WAIT if seconds is None else seconds * SECOND
    return TransportFailed(f"{platform} rate limit reached.", may_retry=True, retry_after=wait)


class ChannelLost(HalterError):
    """Another process has taken over the channel."""


class Transport(Protocol):
    """A platform. Each method raises TransportFailed."""

    name: str

    def can_send(self, text: str) -> bool:
        """Return True if a text can be sent whole."""
        ...

    async def probe(self) -> str:
        """Check that the platform accepts the token; return the identity. Sends nothing to a person."""
        ...

    async def receive(self, after: str, chats: frozenset[str]) -> Sequence[ChatReply]:
        """Wait a while for replies after a mark; return them oldest first."""
        ...

    async def send(self, chat: str, message: ChatMessage) -> str:
        """Send a message, and return its id."""
        ...

    async def close_message(self, chat: str, message: str, text: str) -> None:
        """Replace a message's text, and remove its buttons."""
        ...

    async def respond(self, reply: ChatReply, text: str) -> None:
        """Send the result of a reply to its sender."""
        ...

    async def close(self) -> None:
        """Close all connections; the next call opens them again."""
        ...


class DecisionChannel:
    def __init__(
        self,
        app: Runtime,
        transport: Transport,
        report: ReportSentence,
        dashboard: str = "",
        quiet: Hours | None = None,
        randomly: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._app = app
        self._transport = transport
        self._report = report
        self._dashboard = dashboard
        self._quiet = quiet
        self._randomly = randomly
        self._store = app.patient()
        self._worker = make_worker_id(f"channel-{transport.name}", app.ids)
        self._log = ChannelLog(self._store, transport.name)
        self._change_event = asyncio.Event()
        self._last_reported = ""
        self._failures = 0
        self._undeliverable: set[tuple[str, str]] = set()
        self._codes: dict[str, list[int]] = {}

    async def run(self) -> None:
        """Serve the channel whenever no other process does, until cancelled."""
        async with renew_leases(self._store, self._app.clock, self._worker, liveness=self._app.liveness):
            while True:
                await self._acquire()
                self._report(f"Serving decisions over {self._transport.name}.")
                try:
                    await run_until_first([self._announce_forever(), self._receive_forever()])
                except ChannelLost:
                    self._report(f"Another process now serves {self._transport.name}; this one waits.")

    async def _acquire(self) -> None:
        """Wait until no live worker serves the channel, then take it over."""
        clock, event = self._app.clock, ChannelTaken(channel=self._transport.name, worker=self._worker)
        await self._store.beat(self._worker)
        while True:
            owner = (await self._log.refresh()).worker
            rows = await self._store.ask(Query("all_workers", WorkerRow))
            is_free = owner not in {row.worker for row in rows if row.alive(clock.now())}
            if is_free and await self._append(lambda state, b=owner: [event] if state.worker == b else []):
                return
            await clock.sleep(TAKE_INTERVAL)

    async def _append(self, decide: Callable[[ChannelState], Sequence[ChannelEvent]]) -> bool:
        return await self._log.append(f"channel/{self._transport.name}/{self._app.ids.make()}", decide)

    async def _append_held(self, event: ChannelEvent) -> None:
        """Append an event. Raises ChannelLost if another process has taken over the channel."""
        if not await self._append(lambda state: [event] if state.worker == self._worker else []):
            raise ChannelLost(self._transport.name)

    async def _refresh(self) -> ChannelState:
        state = await self._log.refresh()
        if state.worker != self._worker:
            raise ChannelLost(self._transport.name)
        return state

    async def _back_off(self, failed: TransportFailed) -> None:
        """Report a failure once, and wait: as long as the platform asks for, or with exponential backoff."""
        if str(failed) != self._last_reported:
            self._last_reported = str(failed)
            self._report(str(failed))
        wait = min(MAX_BACKOFF, BACKOFF * 2 ** min(self._failures, 10))
        self._failures += 1
        await self._app.clock.sleep(max(failed.retry_after, wait if not failed.retry_after else 0))

    def _on_recovery(self) -> None:
        if self._last_reported:
            self._report(f"{self._transport.name} is available again.")
        self._last_reported, self._failures = "", 0

    async def _announce_forever(self) -> None:
        async with watch_changes(self._store, change_event=self._change_event):
            while True:
                try:
                    await self._announce()
                except TransportFailed as failed:
                    await self._back_off(failed)
                    self._change_event.set()
                await self._app.clock.sleep(DEBOUNCE)
                await wait_for_change(self._change_event, ANNOUNCE_INTERVAL)

    async def _announce(self) -> None:
        """Close the messages of settled decisions, then send the open ones that were not sent yet."""
        state = await self._refresh()
        open_items = {**await self._read_open(), **await self._read_questions()}
        for message in [each for each in state.messages.values() if not each.closed]:
            item = open_items.get(message.decision)
            if item is None or item.digest != message.digest or message.place not in state.list_chats():
                await self._close(message)
        for chat, approvers in state.list_chats().items():
            await self._announce_in(chat, approvers, open_items)

    async def _announce_in(
        self, chat: str, approvers: Sequence[Approver], open_items: Mapping[str, PendingDecision | AskedQuestion]
    ) -> None:
        principals = [read_who(message) for message in approvers]
        for item in open_items.values():
            state = await self._refresh()
            open_ids = {
                message.decision for message in state.messages.values() if message.place == chat and not message.closed
            }
            if len(open_ids) >= MAX_OPEN:
                return
            role = "operator" if isinstance(item, AskedQuestion) else "approver"
            is_allowed = any(principal.can_see(item.agent) and principal.has_role(role) for principal in principals)
            if is_allowed and item.decision not in open_ids and (chat, item.decision) not in self._undeliverable:
                await self._show(chat, item)

    async def _show(self, chat: str, item: PendingDecision | AskedQuestion) -> None:
        now, random = self._app.clock.now(), self._randomly(RANDOM_BYTES)
        if isinstance(item, AskedQuestion):
            message = compose_question(item, self._transport.can_send, random)
        else:
            message = compose(item, now, self._transport.can_send, random, self._dashboard)
        if self._quiet is not None and find_wake_time(self._quiet, now) is None:
            message = replace(message, silent=True)
        try:
            message_id = await self._transport.send(chat, message)
        except TransportFailed as failed:
            if failed.may_retry:
                raise
            self._undeliverable.add((chat, item.decision))
            self._report(str(failed))
            return
        self._on_recovery()
        await self._append_held(
            DecisionShown(
                channel=self._transport.name,
                place=chat,
                message=message_id,
                decision=item.decision,
                digest=item.digest,
                button=digest_token(message.button),
                cut=message.cut,
            )
        )
        await self._app.clock.sleep(SEND_INTERVAL)

    async def _close(self, message: ShownMessage) -> None:
        text = await self._describe_outcome(message.decision)
        try:
            await self._transport.close_message(message.place, message.message, text)
        except TransportFailed as failed:
            if failed.may_retry:
                raise
            self._report(str(failed))
        await self._append_held(
            MessageClosed(channel=self._transport.name, place=message.place, message=message.message)
        )

    async def _describe_outcome(self, decision: str) -> str:
        if decision.endswith(QUESTION):
            session = session_of_question(decision)
            inbox = await read_stream(self._store, inbox_stream(session))
            answers = [
                stored_event.event
                for stored_event in inbox
                if isinstance(stored_event.event, WakePosted) and stored_event.event.cause == "message"
            ]
            return (
                f"Answered by {answers[-1].sender}, in session {session}." if answers else f"{decision} was withdrawn."
            )
        rows = await self._store.ask(Query("decision", DecisionRow, {"decision": decision}))
        return describe_outcome(next(iter(rows), None), decision, self._app.clock.now())

    async def _read_open(self) -> Mapping[str, PendingDecision]:
        """Read all open decisions, the longest waiting first."""
        actor = Actor(self._app, Principal(self._transport.name, "viewer"))
        return {decision.decision: decision for decision in await decisions.waiting(actor)}

    async def _read_questions(self) -> Mapping[str, AskedQuestion]:
        """Read the unanswered questions of sessions."""
        questions = [
            AskedQuestion(question.session, question.agent, question.call, question.question_text)
            for question in (await read_open_questions(self._store)).values()
            if question.question_text
        ]
        return {question.decision: question for question in questions}

    async def _receive_forever(self) -> None:
        while True:
            state = await self._refresh()
            chats = frozenset((*state.list_chats(), *(each.place for each in state.offers.values() if each.place)))
            try:
                replies = await self._transport.receive(state.mark, chats)
            except TransportFailed as failed:
                await self._back_off(failed)
                continue
            self._on_recovery()
            for reply in replies:
                await self._handle(reply)

    async def _handle(self, reply: ChatReply) -> None:
        """Perform one reply. Waits while the store is unavailable; a repeated reply changes nothing."""
        while True:
            try:
                await self._handle_once(reply)
            except StoreUnavailable:
                await self._app.clock.sleep(SECOND)
            except ChannelLost:
                raise
            except Exception as error:  # noqa: BLE001 A failing reply must not block the others.
                raise_if_cancelled()
                self._report(f"A reply over {self._transport.name} failed: {describe_error(error)}")
                await self._append_held(RepliesRead(channel=self._transport.name, mark=reply.mark))
                return
            else:
                return

    async def _handle_once(self, reply: ChatReply) -> None:
        state = await self._refresh()
        if await self._pair(reply, state):
            return
        approver = state.approvers.get(reply.account)
        if approver is None or approver.place != reply.chat:
            return
        try:
            intent = read_reply(reply, state, await self._read_open())
            sentence = await self._perform(intent, Actor(self._app, read_who(approver)), reply.mark)
        except NotDone as refused:
            sentence = str(refused)
        await self._respond(reply, sentence)
        await self._append_held(RepliesRead(channel=self._transport.name, mark=reply.mark))
        self._change_event.set()

    async def _perform(self, intent: Intent, actor: Actor, mark: str) -> str:
        match intent:
            case ApproveShown():
                return (await decisions.approve(actor, intent.message.decision, intent.terms)).sentence
            case DenyShown():
                return (await decisions.deny(actor, intent.message.decision, clean(intent.reason))).sentence
            case AnswerShown():
                question = intent.message.decision
                key, call = f"{question}/{self._transport.name}/{mark}", question.removesuffix(QUESTION)
                return (
                    await messages.answer_question(actor, session_of_question(question), call, intent.text, key)
                ).sentence
            case StopScope():
                return (await control.halt(actor, intent.scope, f"over {self._transport.name}")).sentence
            case ShowStatus():
                return describe_status(await read_status(actor))
            case Explain():
                return intent.sentence

    async def _respond(self, reply: ChatReply, sentence: str) -> None:
        try:
            await self._transport.respond(reply, sentence)
        except TransportFailed as failed:
            self._report(str(failed))

    async def _pair(self, reply: ChatReply, state: ChannelState) -> bool:
        """Pair the sender of a valid code; any other code gets no answer."""
        code = find_code(reply.press or reply.text)
        if not code or reply.forwarded or not self._is_attempt_allowed(reply.account):
            return False
        offer, now = state.offers.get(digest_token(code)), self._app.clock.now()
        if offer is None or offer.expires_at <= now or (offer.place and offer.place != reply.chat):
            return False
        event = ApproverPaired(
            channel=self._transport.name,
            account=reply.account,
            place=reply.chat,
            name=offer.name,
            role=offer.role,
            by=offer.by,
            agents=offer.agents,
        )
        if not await self._append(lambda newer: [event] if offer.code in newer.offers else []):
            return False
        await self._respond(reply, f"Paired as {offer.name} ({offer.role}). Open decisions are sent here.")
        self._change_event.set()
        return True

    def _is_attempt_allowed(self, account: str) -> bool:
        now = self._app.clock.now()
        self._codes = {sender: attempts for sender, attempts in self._codes.items() if attempts[-1] > now - MINUTE}
        attempts = [at for at in self._codes.get(account, ()) if at > now - MINUTE]
        if len(attempts) >= MAX_CODES_PER_MINUTE:
            return False
        self._codes[account] = [*attempts, now]
        return True


def describe_error(error: Exception) -> str:
    return shorten(clean(f"{type(error).__name__}: {error}"), 300)


def describe_status(fleet_status: FleetStatus) -> str:
    """Describe the fleet in a few lines for a small screen."""
    spent_text = format_share(fleet_status.spent_today_usd, fleet_status.cap_today_usd)
    lines = [agent.health_sentence for agent in fleet_status.unhealthy]
    lines += [f"{spent_text} spent today; {describe_need_count(len(fleet_status.needs_you))}."]
    lines += [
        f"{agent.agent}: {agent.health or shorten(agent.waits, 200)} {format_usd(agent.spent_today_usd)} today."
        for agent in fleet_status.agents[:MAX_STATUS_LINES]
    ]
    more_count = len(fleet_status.agents) - MAX_STATUS_LINES
    return "\n".join([*lines, *([f"… and {more_count} more agents."] if more_count > 0 else [])])

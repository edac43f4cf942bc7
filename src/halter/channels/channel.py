"""A channel at work: sends what waits to the people who may answer, performs their replies, and shows the outcome.

One process serves a channel at a time: the one whose name the channel's stream has, as long as that worker is alive.
Everything that must survive a restart is in that stream. A reply may be delivered again after a crash; what it answered
is answered by then, and says so.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from halter.autonomy.pace import Hours, find_wake_time
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
from halter.core import events as ev
from halter.core.clock import MINUTE, SECOND
from halter.core.errors import HalterError, NotDone, StoreUnavailable
from halter.core.ids import inbox_stream, make_worker_id
from halter.core.ports import Query, read_stream
from halter.core.rows import DecisionRow, WorkerRow
from halter.core.text import clean, shorten
from halter.dispatch.heartbeat import keep_leases
from halter.loop.session_runtime import raise_if_cancelled, run_until_first, wait_for_news, watch_changes
from halter.operations import control, decisions
from halter.operations.channels import read_who
from halter.operations.decisions import WaitingDecision
from halter.operations.desk import Actor, Principal
from halter.operations.status import FleetStatus, status
from halter.runtime.needs import read_open_questions
from halter.runtime.runtime import Runtime
from halter.state.channel import Approver, ChannelLog, ChannelState, ShownMessage, digest_token

ANNOUNCE_INTERVAL: Final = 30 * SECOND
"""Polling interval for what waits: hints may be lost, and decisions expire."""
DEBOUNCE: Final = SECOND
TAKE_INTERVAL: Final = 5 * SECOND
SEND_INTERVAL: Final = SECOND
"""Between two messages: platforms allow about one a second in a chat."""
MAX_OPEN: Final = 20
"""So many open questions are shown in a chat at once; the others follow as these are answered."""
MAX_CODES_PER_MINUTE: Final = 10
"""So many codes of one account are looked at, so that no account keeps another from pairing.

A code has 60 random bits and counts for ten minutes: any number of accounts find none by trying.
"""
MAX_STATUS_LINES: Final = 20
BACKOFF: Final = 2 * SECOND
MAX_BACKOFF: Final = 2 * MINUTE

Tell = Callable[[str], None]


class TransportFailed(HalterError):
    """A platform did not do what was asked: a sentence without any secret. `retry_after` is in microseconds."""

    def __init__(self, sentence: str, *, may_retry: bool, retry_after: int = 0) -> None:
        super().__init__(sentence)
        self.may_retry = may_retry
        self.retry_after = retry_after


class ChannelLost(HalterError):
    """Another process serves the channel now."""


class Transport(Protocol):
    """A platform. Each method raises TransportFailed."""

    name: str

    def can_send(self, text: str) -> bool:
        """Whether a text can be sent whole."""
        ...

    async def probe(self) -> str:
        """Ask the platform whether it takes the token, and say as whom; nothing is sent to a person."""
        ...

    async def receive(self, after: str, places: frozenset[str]) -> Sequence[ChatReply]:
        """Wait for replies that follow a mark, for a while; oldest first."""
        ...

    async def send(self, place: str, message: ChatMessage) -> str:
        """Send a message, and return its id."""
        ...

    async def close_message(self, place: str, message: str, text: str) -> None:
        """Replace a message's text, and remove its buttons."""
        ...

    async def respond(self, reply: ChatReply, text: str) -> None:
        """Tell the sender of a reply what came of it."""
        ...

    async def close(self) -> None:
        """Close all connections; the next call opens them anew."""
        ...


class DecisionChannel:
    def __init__(
        self,
        app: Runtime,
        transport: Transport,
        report: Tell,
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
        self._news = asyncio.Event()
        self._last_reported = ""
        self._failures = 0
        self._undeliverable: set[tuple[str, str]] = set()
        self._codes: dict[str, list[int]] = {}

    async def run(self) -> None:
        """Serve the channel whenever no other process does, until cancelled."""
        async with keep_leases(self._store, self._app.clock, self._worker, liveness=self._app.liveness):
            while True:
                await self._acquire()
                self._report(f"Decisions are sent and answered over {self._transport.name}.")
                try:
                    await run_until_first([self._announce_forever(), self._receive_forever()])
                except ChannelLost:
                    self._report(f"Another process serves {self._transport.name} now; this one waits.")

    async def _acquire(self) -> None:
        """Wait until no live worker serves the channel, and take it."""
        clock, taken = self._app.clock, ev.ChannelTaken(channel=self._transport.name, worker=self._worker)
        await self._store.beat(self._worker)
        while True:
            before = (await self._log.refresh()).worker
            rows = await self._store.ask(Query("all_workers", WorkerRow))
            free = before not in {row.worker for row in rows if row.alive(clock.now())}
            if free and await self._append(lambda state, b=before: [taken] if state.worker == b else []):
                return
            await clock.sleep(TAKE_INTERVAL)

    async def _append(self, decide: Callable[[ChannelState], Sequence[ev.ChannelEvent]]) -> bool:
        return await self._log.append(f"channel/{self._transport.name}/{self._app.ids.make()}", decide)

    async def _append_held(self, event: ev.ChannelEvent) -> None:
        """Append an event, unless another process serves the channel by now."""
        if not await self._append(lambda state: [event] if state.worker == self._worker else []):
            raise ChannelLost(self._transport.name)

    async def _refresh(self) -> ChannelState:
        state = await self._log.refresh()
        if state.worker != self._worker:
            raise ChannelLost(self._transport.name)
        return state

    async def _back_off(self, failed: TransportFailed) -> None:
        """Report a failure once, and wait: for as long as the platform says, or twice as long each time."""
        if str(failed) != self._last_reported:
            self._last_reported = str(failed)
            self._report(str(failed))
        wait = min(MAX_BACKOFF, BACKOFF * 2 ** min(self._failures, 10))
        self._failures += 1
        await self._app.clock.sleep(max(failed.retry_after, wait if not failed.retry_after else 0))

    def _on_recovery(self) -> None:
        if self._last_reported:
            self._report(f"{self._transport.name} answers again.")
        self._last_reported, self._failures = "", 0

    async def _announce_forever(self) -> None:
        async with watch_changes(self._store, news=self._news):
            while True:
                try:
                    await self._announce()
                except TransportFailed as failed:
                    await self._back_off(failed)
                    self._news.set()
                await self._app.clock.sleep(DEBOUNCE)
                await wait_for_news(self._news, ANNOUNCE_INTERVAL)

    async def _announce(self) -> None:
        """Close the messages of what is decided, then show what waits and was not shown yet."""
        state = await self._refresh()
        asked = {**await self._read_open(), **await self._read_questions()}
        for shown in [each for each in state.shown.values() if not each.closed]:
            one = asked.get(shown.decision)
            if one is None or one.digest != shown.digest or shown.place not in state.list_chats():
                await self._close(shown)
        for place, approvers in state.list_chats().items():
            await self._announce_in(place, approvers, asked)

    async def _announce_in(
        self, place: str, approvers: Sequence[Approver], asked: Mapping[str, WaitingDecision | AskedQuestion]
    ) -> None:
        people = [read_who(each) for each in approvers]
        for one in asked.values():
            state = await self._refresh()
            there = {each.decision for each in state.shown.values() if each.place == place and not each.closed}
            if len(there) >= MAX_OPEN:
                return
            role = "operator" if isinstance(one, AskedQuestion) else "approver"
            wanted = any(principal.can_see(one.agent) and principal.has_role(role) for principal in people)
            if wanted and one.decision not in there and (place, one.decision) not in self._undeliverable:
                await self._show(place, one)

    async def _show(self, place: str, one: WaitingDecision | AskedQuestion) -> None:
        now, random = self._app.clock.now(), self._randomly(RANDOM_BYTES)
        if isinstance(one, AskedQuestion):
            message = compose_question(one, self._transport.can_send, random)
        else:
            message = compose(one, now, self._transport.can_send, random, self._dashboard)
        if self._quiet is not None and find_wake_time(self._quiet, now) is None:
            message = replace(message, silent=True)
        try:
            sent = await self._transport.send(place, message)
        except TransportFailed as failed:
            if failed.may_retry:
                raise
            self._undeliverable.add((place, one.decision))
            self._report(str(failed))
            return
        self._on_recovery()
        await self._append_held(
            ev.DecisionShown(
                channel=self._transport.name,
                place=place,
                message=sent,
                decision=one.decision,
                digest=one.digest,
                button=digest_token(message.button),
                cut=message.cut,
            )
        )
        await self._app.clock.sleep(SEND_INTERVAL)

    async def _close(self, shown: ShownMessage) -> None:
        text = await self._describe_outcome(shown.decision)
        try:
            await self._transport.close_message(shown.place, shown.message, text)
        except TransportFailed as failed:
            if failed.may_retry:
                raise
            self._report(str(failed))
        await self._append_held(
            ev.MessageClosed(channel=self._transport.name, place=shown.place, message=shown.message)
        )

    async def _describe_outcome(self, decision: str) -> str:
        if decision.endswith(QUESTION):
            session = session_of_question(decision)
            inbox = await read_stream(self._store, inbox_stream(session))
            said = [
                stored.event
                for stored in inbox
                if isinstance(stored.event, ev.WakePosted) and stored.event.cause == "message"
            ]
            return (
                f"Answered by {said[-1].sender}, in session {session}." if said else f"{decision} is no longer asked."
            )
        rows = await self._store.ask(Query("decision", DecisionRow, {"decision": decision}))
        return describe_outcome(next(iter(rows), None), decision, self._app.clock.now())

    async def _read_open(self) -> Mapping[str, WaitingDecision]:
        """All open decisions, the longest waiting first."""
        actor = Actor(self._app, Principal(self._transport.name, "viewer"))
        return {decision.decision: decision for decision in await decisions.waiting(actor)}

    async def _read_questions(self) -> Mapping[str, AskedQuestion]:
        """What sessions ask in words of their own, and no person has answered."""
        found = [
            AskedQuestion(one.session, one.agent, one.call, one.question_text)
            for one in (await read_open_questions(self._store)).values()
            if one.question_text
        ]
        return {one.decision: one for one in found}

    async def _receive_forever(self) -> None:
        while True:
            state = await self._refresh()
            places = frozenset((*state.list_chats(), *(each.place for each in state.offers.values() if each.place)))
            try:
                replies = await self._transport.receive(state.mark, places)
            except TransportFailed as failed:
                await self._back_off(failed)
                continue
            self._on_recovery()
            for reply in replies:
                await self._handle(reply)

    async def _handle(self, reply: ChatReply) -> None:
        """Perform one reply. While the store is unavailable it waits; it changes nothing twice."""
        while True:
            try:
                await self._handle_once(reply)
            except StoreUnavailable:
                await self._app.clock.sleep(SECOND)
            except ChannelLost:
                raise
            except Exception as error:  # noqa: BLE001 A reply that breaks must not keep the others from being read.
                raise_if_cancelled()
                self._report(f"A reply over {self._transport.name} broke: {describe_error(error)}")
                await self._append_held(ev.RepliesRead(channel=self._transport.name, mark=reply.mark))
                return
            else:
                return

    async def _handle_once(self, reply: ChatReply) -> None:
        state = await self._refresh()
        if await self._pair(reply, state):
            return
        approver = state.approvers.get(reply.account)
        if approver is None or approver.place != reply.place:
            return
        try:
            intent = read_reply(reply, state, await self._read_open())
            sentence = await self._perform(intent, Actor(self._app, read_who(approver)), reply.mark)
        except NotDone as refused:
            sentence = str(refused)
        await self._respond(reply, sentence)
        await self._append_held(ev.RepliesRead(channel=self._transport.name, mark=reply.mark))
        self._news.set()

    async def _perform(self, intent: Intent, actor: Actor, mark: str) -> str:
        match intent:
            case ApproveShown():
                return (await decisions.approve(actor, intent.shown.decision, intent.terms)).sentence
            case DenyShown():
                return (await decisions.deny(actor, intent.shown.decision, clean(intent.reason))).sentence
            case AnswerShown():
                question = intent.shown.decision
                key, call = f"{question}/{self._transport.name}/{mark}", question.removesuffix(QUESTION)
                return (
                    await control.answer_question(actor, session_of_question(question), call, intent.text, key)
                ).sentence
            case StopScope():
                return (await control.halt(actor, intent.scope, f"said over {self._transport.name}")).sentence
            case ShowStatus():
                return describe_status(await status(actor))
            case Explain():
                return intent.sentence

    async def _respond(self, reply: ChatReply, sentence: str) -> None:
        try:
            await self._transport.respond(reply, sentence)
        except TransportFailed as failed:
            self._report(str(failed))

    async def _pair(self, reply: ChatReply, state: ChannelState) -> bool:
        """Make the sender of an open code an approver; any other code gets no answer."""
        code = find_code(reply.press or reply.text)
        if not code or reply.forwarded or not self._is_attempt_allowed(reply.account):
            return False
        offer, now = state.offers.get(digest_token(code)), self._app.clock.now()
        if offer is None or offer.expires_at <= now or (offer.place and offer.place != reply.place):
            return False
        paired = ev.ApproverPaired(
            channel=self._transport.name,
            account=reply.account,
            place=reply.place,
            name=offer.name,
            role=offer.role,
            by=offer.by,
            agents=offer.agents,
        )
        if not await self._append(lambda newer: [paired] if offer.code in newer.offers else []):
            return False
        await self._respond(reply, f"You answer here as {offer.name} ({offer.role}). What waits for you is sent here.")
        self._news.set()
        return True

    def _is_attempt_allowed(self, account: str) -> bool:
        now = self._app.clock.now()
        self._codes = {each: tries for each, tries in self._codes.items() if tries[-1] > now - MINUTE}
        tries = [at for at in self._codes.get(account, ()) if at > now - MINUTE]
        if len(tries) >= MAX_CODES_PER_MINUTE:
            return False
        self._codes[account] = [*tries, now]
        return True


def describe_error(error: Exception) -> str:
    return shorten(clean(f"{type(error).__name__}: {error}"), 300)


def describe_status(found: FleetStatus) -> str:
    """The fleet in a few lines for a small screen."""
    cap = "" if found.cap_today_usd is None else f" of ${found.cap_today_usd:.2f}"
    lines = [f"${found.spent_today_usd:.2f}{cap} spent today; {len(found.needs_you)} waiting for you."]
    lines += [
        f"{each.agent}: {shorten(each.waits, 200)} ${each.spent_today_usd:.2f} today."
        for each in found.agents[:MAX_STATUS_LINES]
    ]
    more = len(found.agents) - MAX_STATUS_LINES
    return "\n".join([*lines, *([f"… and {more} more agents."] if more > 0 else [])])

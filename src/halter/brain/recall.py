"""A session's turns, read again from its events: where its turn stands, and what was said in it."""

import re
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from halter.brain.context import Cut
from halter.brain.textcalls import read_calls
from halter.brain.transcript import Transcript, call_id, named, result_of
from halter.brain.turn import Failure, Turn
from halter.core.clock import MINUTE, SECOND
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    GuardrailTriggered,
    HotStateSeen,
    MessageAdded,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionParked,
    SessionResumed,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
    Yielded,
)
from halter.core.messages import Message, Reply, Text, ToolCall, ToolResult, user
from halter.core.ports import Stored
from halter.core.text import from_body
from halter.core.vocabulary import MessageReason, Outcome, TurnEnd
from halter.guard.chokepoint import told
from halter.guard.simulation import LABEL

Read = Callable[[Stored], Awaitable[bytes]]
"""Reads what an event says."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the journal keeps of a request: all of the prompt that does not stand there already."""

    volatile: str = ""
    nonce: str = ""


class Recalled:
    """A session as its loop knows it. Events are taken in one by one, in their order."""

    def __init__(self, session: str, min_sleep: int = SECOND) -> None:
        self.session = session
        self._min_sleep = min_sleep
        self.turn = Turn()
        self.transcript = Transcript()
        self.done: dict[str, ToolResult] = {}
        self._nonces: dict[str, str] = {}
        self.foreseen: dict[str, str] = {}
        self.hot = b""
        """What a turn saw last of the hot state."""
        self.given = ""
        """What people had kept of earlier sessions."""
        self.phase: PhaseEntered | None = None
        """Where the session is in its walk."""
        self.actions: list[int] = []
        """When calls began that change something, in the last minute."""

    def open(self, number: int, heard: int, message: Message, at: int, *, quiet: bool = False) -> None:
        """A turn begins."""
        self.transcript.opened(message)
        self.turn = self.turn.opened(number, heard, at, quiet=quiet)

    def end(self, why: TurnEnd, sentence: str, chosen: Yielded | None, at: int) -> None:
        """The turn is over."""
        self.turn = self.turn.ended(why, sentence, chosen, at, self._min_sleep)

    def acts(self, at: int) -> None:
        """Something is about to be changed."""
        self.actions = [*(each for each in self.actions if abs(at - each) < MINUTE), at]

    def add(self, reason: MessageReason, text: str, at: int) -> None:
        """The runtime says something."""
        self.transcript.add(internal(reason, text))
        self.turn = self.turn.told(reason, at)

    def thought(self, reply: Reply, nonce: str, at: int) -> None:
        """The model answers."""
        parts = (*read_calls(reply.text, nonce).parts, *reply.calls) if nonce else reply.parts
        calls = named([part for part in parts if isinstance(part, ToolCall)], self.turn.number, self.turn.steps)
        said = tuple(part for part in parts if isinstance(part, Text) and part.text.strip())
        if said or calls:
            self.transcript.add(Message("assistant", (*said, *calls)))
        self.done = {}
        self.turn = self.turn.thought(reply, calls, at)

    def acted(self, at: int) -> None:
        """All calls of the step have results."""
        calls = self.turn.calls
        results = tuple(self.done[call.id] for call in calls)
        self.transcript.add(Message("user", results))
        self.done = {}
        self.turn = self.turn.acted(calls, results, at)

    async def take_in(self, events: Iterable[Stored], read: Read) -> None:
        """Take in what happened in another process, or in an earlier life of this one."""
        for stored in events:
            await self._take_in(stored, read)
        self._reconsider()

    async def _take_in(self, stored: Stored, read: Read) -> None:
        at, event = stored.at, stored.event
        match event:
            case CallStarted():
                self.done.pop(self._short(event.call), None)
                if event.effect == "write":
                    self.acts(at)
            case CallSettled():
                answer = told(event, await read(stored))
                self._keep(event.call, answer.outcome, answer.text, answer.partial)
            case CallRefused():
                self._keep(event.call, event.outcome, event.sentence)
            case RequestStarted(purpose="turn") if self._is_turns(event.request):
                self._flush(at)
                self.turn = self.turn.uncapped()
                record = msgspec.json.decode(await read(stored) or b"{}", type=Record)
                self._nonces[event.request] = record.nonce
            case RequestSettled():
                await self._settled(event, stored, read)
            case RequestRefused(purpose="turn") if self._is_turns(event.request):
                self._flush(at)
                self.turn = self.turn.uncapped().refused(attempt_of(event.request), event.outcome, event.sentence, at)
            case TurnStarted():
                message = msgspec.json.decode(await read(stored) or b'{"role":"user","parts":[]}', type=Message)
                self.open(event.turn, event.inbox_seen, message, at, quiet=event.quiet)
            case HotStateSeen() | GuardrailTriggered() | TurnSkipped() | PhaseEntered() | ContextGiven():
                await self._paced(event, stored, read)
            case MessageAdded():
                self._flush(at)
                self.add(event.reason, from_body(await read(stored)), at)
            case ContextCut():
                self._flush(at)
                body = await read(stored)
                if body:
                    # Without one it was erased, and all that it left out with it.
                    self.transcript.cut_at(
                        Cut(event.through, event.pinned), msgspec.json.decode(body, type=Text | None)
                    )
                self.turn = self.turn.shrunk(at)
            case OverrunIncurred():
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            case TurnEnded():
                self._flush(at)
                self.end(event.why, event.sentence, event.yielded, at)
            case SessionParked():
                self.turn = self.turn.rested(at)
            case SessionWoken():
                self.turn = self.turn.woken(at, takeover=event.cause == "takeover")
            case SessionResumed():
                self.turn = self.turn.reopened(at)
            case _:
                pass

    async def _paced(
        self,
        event: HotStateSeen | GuardrailTriggered | TurnSkipped | PhaseEntered | ContextGiven,
        stored: Stored,
        read: Read,
    ) -> None:
        match event:
            case PhaseEntered():
                self.phase = event
            case ContextGiven():
                self.given = from_body(await read(stored))
            case HotStateSeen():
                self.hot = await read(stored)
            case GuardrailTriggered(until=int(), guardrail=name) if self.turn.over and name != "model_rate":
                self.turn = self.turn.held_back(stored.at)
            case TurnSkipped():
                self.turn = self.turn.skipped(event.skips, stored.at)
            case _:
                pass

    async def _settled(self, event: RequestSettled, stored: Stored, read: Read) -> None:
        if event.request not in self._nonces:
            await self._foresee(event, stored, read)
            return
        attempt = attempt_of(event.request)
        if event.outcome == "ok":
            body = await read(stored)
            reply = msgspec.json.decode(body, type=Reply) if body else Reply(())
            self.thought(reply, self._nonces[event.request], stored.at)
        elif event.outcome in ("cancelled", "unknown"):
            self.turn = self.turn.tried(attempt, stored.at)
        elif event.outcome == "external_halt":
            self.turn = self.turn.refused(attempt, event.outcome, event.error, stored.at)
        else:
            failure = Failure(event.error, event.may_retry, event.retry_after)
            self.turn = self.turn.failed(attempt, failure, stored.at)

    async def _foresee(self, event: RequestSettled, stored: Stored, read: Read) -> None:
        call, _, rest = event.request.rpartition("/simulation/")
        if call and rest and event.outcome == "ok" and (body := await read(stored)):
            reply = msgspec.json.decode(body, type=Reply)
            text = "" if reply.stop == "refused" else reply.text.strip()
            self.foreseen[call] = f"{LABEL} {text}" if text else ""

    def _keep(self, call: str, outcome: Outcome, text: str, partial: str = "") -> None:
        for each in self.turn.calls:
            if call_id(self.session, each) == call:
                foreseen = self.foreseen.get(call, "")
                self.done[each.id] = result_of(each, outcome, text, partial, foreseen)

    def _short(self, call: str) -> str:
        return call.removeprefix(f"{self.session}.")

    def _is_turns(self, request: str) -> bool:
        """Tell whether a loop asked. Who wrote to a session before there was one asked in other words, of its own."""
        return re.fullmatch(rf"{re.escape(self.session)}\.t\d+_\d+/\d+", request) is not None

    def _flush(self, at: int) -> None:
        """Whatever follows a step shows that all its calls had results."""
        if self.turn.calls and all(call.id in self.done for call in self.turn.calls):
            self.acted(at)

    def _reconsider(self) -> None:
        """What a cap refused may have been about to be tried again; what became of all else is known."""
        if self.turn.capped and not self.turn.over:
            self.turn = self.turn.uncapped()
        self.done = {call: result for call, result in self.done.items() if result.outcome != "cost_cap_reached"}


def attempt_of(request: str) -> int:
    """Tell the number of the attempt that a request's id names."""
    return int(request.rpartition("/")[2])


def internal(reason: MessageReason, text: str) -> Message:
    """Make a message of the runtime's own."""
    return user(text, "config", reason=reason)

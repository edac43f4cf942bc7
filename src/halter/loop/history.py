"""A session's turns, rebuilt from its events in order."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import msgspec

from halter.core.clock import SECOND
from halter.core.events import (
    CallRefused,
    CallSettled,
    CallStarted,
    ContextCut,
    ContextGiven,
    FilesGiven,
    GuardrailTriggered,
    HistoryGiven,
    HotStateSeen,
    MessageAdded,
    OverrunIncurred,
    PhaseEntered,
    RequestRefused,
    RequestSettled,
    RequestStarted,
    SessionParked,
    SessionResumed,
    SessionStarted,
    SessionWoken,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
)
from halter.core.events.sessions import YieldRequest
from halter.core.messages import (
    Message,
    Part,
    Reply,
    Text,
    ToolCall,
    ToolResult,
    make_user_message,
)
from halter.core.ports import Stored
from halter.core.text import decode_body, shorten
from halter.core.vocabulary import MessageReason, Outcome, TurnEnd
from halter.guard.call_answer import restore_call_answer, restore_files
from halter.guard.request import RequestRecord
from halter.guard.simulation import SIMULATION_LABEL
from halter.loop.history_cut import Cut
from halter.loop.text_calls import read_calls
from halter.loop.transcript import Transcript
from halter.loop.turn import FailedAttempt, Turn
from halter.provenance.check import ProvenanceCheck

MAX_SITUATION_LENGTH: Final = 2_000
"""Maximum length of a part of a situation, which a simulation receives, in characters."""

MAX_TOOL_NAME_LENGTH: Final = 200
"""Maximum length of a recorded tool name, since a model may write anything."""


def call_id(session: str, call: ToolCall) -> str:
    """Make the id of a call, unique in the store and stable across crashes."""
    return f"{session}.{call.id}"


_MODEL_CALL: Final = re.compile(r"(.*)\.c\d+_\d+_\d+(?:/.*)?", re.DOTALL)


def find_calling_session(call: str) -> str:
    """Find the session of a model's call, or of a call inside it, from the call's id in the store."""
    match = _MODEL_CALL.fullmatch(call)
    return "" if match is None else match[1]


def make_prediction_text(call: ToolCall, simulation: str) -> Text:
    """Make the part of a prediction, separate from the result because its text does not come from the tool."""
    text = simulation.removeprefix(SIMULATION_LABEL)
    label = f"{SIMULATION_LABEL} of {call.tool} ({call.id}), made before the call and no part of its result:"
    return Text(f"{label}{text}", "model", trusted=False, reason="simulation")


def _join_text(message: Message) -> str:
    """Join the texts of a message, without the parts that the runtime added."""
    texts = [part for part in message.parts if isinstance(part, Text) and not part.reason and part.origin != "tool"]
    return "\n".join(part.text for part in texts)


ReadBody = Callable[[Stored], Awaitable[bytes]]


_NO_TURN: Final = Turn()
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class SessionHistory:
    """The state of a session's loop, folded from the session's events in order."""

    __slots__ = (
        "_cut_short",
        "_erased",
        "_min_sleep",
        "_nonces",
        "_unanswered",
        "context_text",
        "decided",
        "done",
        "files",
        "hot",
        "phase",
        "predictions",
        "provenance_check",
        "session",
        "staged",
        "transcript",
        "turn",
    )

    def __init__(self, session: str, min_sleep: int = SECOND, provenance_check: ProvenanceCheck | None = None) -> None:
        self.session = session
        self.provenance_check = provenance_check
        """Receives all text that the model sees; None if the provenance check is off."""
        self._min_sleep = min_sleep
        self.turn = _NO_TURN
        self.transcript = Transcript()
        self.done: Mapping[str, ToolResult] = _NOTHING
        self.files: Mapping[str, tuple[Text, ...]] = _NOTHING
        """The files of the step's results, by call."""
        self._nonces: Mapping[str, str] = _NOTHING
        """The nonces of requests in flight."""
        self.predictions: Mapping[str, str] = _NOTHING
        """Predictions of the step's calls, which the model sees with the results."""
        self._cut_short = ""
        """The text of a cancelled answer, which becomes part of the history if the turn ends there."""
        self.hot = b""
        self.context_text = ""
        self.phase: PhaseEntered | None = None
        self._erased: tuple[str, ...] = ()
        """Calls of the step whose results are erased."""
        self._unanswered: Mapping[str, ToolCall] = _NOTHING
        """Calls in flight whose reply is erased: their arguments are unknown."""
        self.staged: tuple[ToolCall, ...] = ()
        """Calls of the turn that wait for a person, in their order."""
        self.decided: tuple[ToolResult, ...] = ()
        """Outcomes of staged calls that the model has not been told."""

    def open(self, number: int, inbox_seen: int, message: Message, at: int, *, quiet: bool = False) -> None:
        self.transcript.open_turn(message)
        self.staged = self.decided = ()
        self.turn = self.turn.make_next(number, inbox_seen, at, quiet=quiet)
        if self.provenance_check is not None:
            for part in message.parts:
                if isinstance(part, Text):
                    self.provenance_check.add_text(part)

    def end(self, reason: TurnEnd, sentence: str, yield_request: YieldRequest | None, at: int) -> None:
        if reason == "cancelled" and self._cut_short:
            self.transcript.add(Message("assistant", (Text(self._cut_short, "model", trusted=False),)))
        self.turn = self.turn.with_end(reason, sentence, yield_request, at, self._min_sleep)

    def add_wait(self, duration: int) -> None:
        self.turn = self.turn.without_wait(duration)

    def add(self, reason: MessageReason, text: str, at: int) -> None:
        self.transcript.add(make_user_message(text, "config", reason=reason))
        self.turn = self.turn.with_message(reason, at)
        if reason == "staged":
            self.staged = self.decided = ()

    def add_reply(self, reply: Reply, nonce: str, at: int) -> None:
        parts = (*read_calls(reply.text, nonce).parts, *reply.calls) if nonce else reply.parts
        turn = self.turn
        texts: tuple[Text, ...] = ()
        calls: tuple[ToolCall, ...] = ()
        for part in parts:
            if type(part) is ToolCall:
                # The runtime assigns the ids: those of a model may be missing or repeated.
                name = f"c{turn.number}_{turn.steps}_{len(calls)}"
                calls += (ToolCall(name, part.tool[:MAX_TOOL_NAME_LENGTH], part.arguments, part.group),)
            elif part.text.strip():
                texts += (part,)
        if texts or calls:
            # Reasoning belongs to calls of the protocol, and refers to none that are written as text.
            self.transcript.add(Message("assistant", texts + calls, None if nonce else reply.reasoning))
        self.done = _NOTHING
        self.turn = turn.with_reply(reply.stop, calls, at, spoke=bool(texts))

    def add_result(
        self, call: ToolCall, outcome: Outcome, text: str, partial: str = "", files: tuple[Text, ...] = ()
    ) -> None:
        """Add a call's result to the step, as the model will see it.

        A refusal has its code, and a failure the output before it.
        """
        if files:
            self.files = {**self.files, call.id: files}
        result_text = text if outcome == "ok" else f"[{outcome}] {text}"
        if partial:
            result_text = "\n\n".join(part for part in (result_text, partial) if part)
        result = ToolResult(call.id, call.tool, outcome, result_text)
        self.done = {**self.done, call.id: result} if self.done else {call.id: result}

    def settle_staged(
        self, call: ToolCall, outcome: Outcome, text: str, partial: str = "", files: tuple[Text, ...] = ()
    ) -> None:
        """Add the outcome of a staged call. In its own step it is the call's result."""
        self.staged = tuple(each for each in self.staged if each.id != call.id)
        self.decided += (ToolResult(call.id, call.tool, outcome, text),)
        if any(each.id == call.id for each in self.turn.calls):
            self.add_result(call, outcome, text, partial, files)

    def find_unmade_call(self) -> ToolResult | None:
        """Find a call before the next one on which that may depend, and which was not made.

        That is a staged call without success, or a call of the step that a person did not approve.
        """
        failed = (result for result in self.decided if result.outcome != "ok")
        unapproved = (
            result for result in self.done.values() if result.outcome in ("approval_denied", "approval_expired")
        )
        return next(chain(failed, unapproved), None)

    def finish_step(self, at: int) -> None:
        calls = self.turn.calls
        self.decided = tuple(result for result in self.decided if result.id not in self.done)
        results = (self.done[calls[0].id],) if len(calls) == 1 else tuple([self.done[call.id] for call in calls])
        parts = self._add_files(results) if self.files else results
        self.transcript.add(Message("user", (*parts, *self._predictions(calls)) if self.predictions else parts))
        if (check := self.provenance_check) is not None:
            for index, call in enumerate(calls):
                if call.id in self._erased:
                    check.observe_erased(call)
                else:
                    check.observe(call, results[index])
            self._erased = ()
        self.done = _NOTHING
        self.turn = self.turn.with_results(calls, results, at)

    def _add_files(self, results: Iterable[ToolResult]) -> tuple[Part, ...]:
        """Place the files of each result after it."""
        files, self.files = self.files, _NOTHING
        return tuple(part for result in results for part in (result, *files.get(result.id, ())))

    def _predictions(self, calls: Iterable[ToolCall]) -> list[Text]:
        predictions = dict(self.predictions)
        predicted_calls = [(call, predictions.pop(call_id(self.session, call), "")) for call in calls]
        self.predictions = predictions
        return [make_prediction_text(call, text) for call, text in predicted_calls if text]

    def situation(self) -> str:
        """Describe the last question to the agent, and the text of its current step."""
        *earlier, latest = self.transcript.messages
        question = next((text for each in reversed(earlier) if each.role == "user" and (text := _join_text(each))), "")
        labelled_texts = (("The agent was asked", question), ("With the call it says", _join_text(latest)))
        return "\n".join(f"{label}: {shorten(text, MAX_SITUATION_LENGTH)}" for label, text in labelled_texts if text)

    async def apply(self, events: Iterable[Stored], read_body: ReadBody) -> None:
        """Fold events of another process, or of an earlier run."""
        for stored in events:
            await self._apply_event(stored, read_body)
        # A request that a cap refused may be retried. All other outcomes are final.
        if self.turn.capped and not self.turn.is_over:
            self.turn = self.turn.without_cap()
        if self.done:
            self.done = {call: result for call, result in self.done.items() if result.outcome != "cost_cap_reached"}

    async def _apply_event(self, stored: Stored, read_body: ReadBody) -> None:
        at, event = stored.at, stored.event
        match event:
            case SessionStarted():
                pass
            case CallStarted() | CallSettled() | CallRefused() | FilesGiven():
                await self._apply_call_event(event, stored, read_body)
            case RequestStarted(purpose="turn") if self._is_turns(event.request):
                self.flush(at)
                self.turn, self._cut_short = self.turn.without_cap(), ""
                record = msgspec.json.decode(await read_body(stored) or b"{}", type=RequestRecord)
                self._nonces = {**self._nonces, event.request: record.nonce}
            case RequestSettled():
                await self._apply_request_event(event, stored, read_body)
            case RequestRefused(purpose="turn") if self._is_turns(event.request):
                self.flush(at)
                self.turn = self.turn.without_cap().with_refusal(
                    parse_attempt(event.request), event.outcome, event.sentence, at
                )
            case TurnStarted():
                body = await read_body(stored)
                message = msgspec.json.decode(body or b'{"role":"user","parts":[]}', type=Message)
                self.open(event.turn, event.inbox_seen, message, at, quiet=event.quiet)
                if self.provenance_check is not None and not body:
                    self.provenance_check.mark_erased()
            case HotStateSeen() | GuardrailTriggered() | TurnSkipped() | PhaseEntered() | ContextGiven():
                await self._apply_pace_event(event, stored, read_body)
            case HistoryGiven():
                self._begin_with(event, await read_body(stored))
            case MessageAdded():
                self.flush(at)
                self.add(event.reason, decode_body(await read_body(stored)), at)
            case ContextCut():
                self.flush(at)
                body = await read_body(stored)
                if body:
                    # An erased cut changes nothing, because the messages that it dropped are erased too.
                    self.transcript.cut_at(
                        Cut(event.through, event.pinned), msgspec.json.decode(body, type=Text | None)
                    )
                self.turn = self.turn.with_cut(at)
            case OverrunIncurred():
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            case TurnEnded():
                self.flush(at)
                self.end(event.why, event.sentence, event.yielded, at)
            case SessionParked():
                self.turn = self.turn.pause(at, event.trouble)
            case SessionWoken(recovered=True):
                self.turn = self.turn.with_recovery(at)
            case SessionWoken():
                self.turn = self.turn.resume(at, takeover=event.cause == "takeover")
            case SessionResumed():
                self.turn = self.turn.reopen(at)
            case _:
                pass

    def _begin_with(self, event: HistoryGiven, body: bytes) -> None:
        messages = msgspec.json.decode(body or b"[]", type=list[Message])
        for message in messages:
            self.transcript.add(message)
        if self.provenance_check is not None:
            self.provenance_check.recall(messages, foreign=not event.session, denied=event.denied)
            if not body:
                self.provenance_check.mark_erased()

    async def _apply_pace_event(
        self,
        event: HotStateSeen | GuardrailTriggered | TurnSkipped | PhaseEntered | ContextGiven,
        stored: Stored,
        read_body: ReadBody,
    ) -> None:
        match event:
            case PhaseEntered():
                self.phase = event
            case ContextGiven():
                self.context_text = decode_body(await read_body(stored))
                if self.provenance_check is not None:
                    self.provenance_check.trust(self.context_text, "kept memories")
            case HotStateSeen():
                self.hot = await read_body(stored)
            case GuardrailTriggered(until=int(), guardrail=name) if self.turn.is_over and name != "model_rate":
                self.turn = self.turn.with_guardrail(stored.at)
            case TurnSkipped():
                self.turn = self.turn.with_skip(event.skips, stored.at)
            case _:
                pass

    async def _apply_call_event(
        self, event: CallStarted | CallSettled | CallRefused | FilesGiven, stored: Stored, read_body: ReadBody
    ) -> None:
        match event:
            case FilesGiven():
                if any(call_id(self.session, call) == event.call for call in self.turn.calls):
                    call = event.call.removeprefix(f"{self.session}.")
                    self.files = {**self.files, call: restore_files(await read_body(stored))}
                return
            case CallStarted():
                call = event.call.removeprefix(f"{self.session}.")
                self.done = {each: result for each, result in self.done.items() if each != call}
            case CallSettled():
                body = await read_body(stored)
                answer = restore_call_answer(event, body)
                self._add_result(event.call, answer.outcome, answer.text, answer.partial)
                if is_erased(stored, body):
                    self._erased += (event.call.removeprefix(f"{self.session}."),)
                erased_call = self._unanswered.get(event.call)
                if erased_call is not None and self.provenance_check is not None:
                    self.provenance_check.observe_erased(erased_call)
                    self._unanswered = {
                        call: erased_call for call, erased_call in self._unanswered.items() if call != event.call
                    }
                return
            case CallRefused():
                self._add_result(event.call, event.outcome, event.sentence)
                if event.staged:
                    self.staged += tuple(each for each in self.turn.calls if call_id(self.session, each) == event.call)
        # Only calls of the model itself, not calls inside other calls.
        if self.provenance_check is not None and self._is_models(event.call):
            body = await read_body(stored)
            self.provenance_check.apply(event, None if is_erased(stored, body) else body)
            if isinstance(event, CallStarted) and not self._has_call(event.call):
                self._unanswered = {**self._unanswered, event.call: ToolCall(event.call, event.tool, "")}

    async def _apply_request_event(self, event: RequestSettled, stored: Stored, read_body: ReadBody) -> None:
        if event.request not in self._nonces:
            await self._foresee(event, stored, read_body)
            return
        nonce = self._nonces[event.request]
        self._nonces = {request: each for request, each in self._nonces.items() if request != event.request}
        attempt = parse_attempt(event.request)
        if event.outcome == "ok":
            body = await read_body(stored)
            reply = msgspec.json.decode(body, type=Reply) if body else Reply(())
            self.add_reply(reply, nonce, stored.at)
        elif event.outcome in ("cancelled", "unknown"):
            body = await read_body(stored)
            self._cut_short = msgspec.json.decode(body, type=Reply).text if body else ""
            self.turn = self.turn.with_attempt(attempt, stored.at)
        elif event.outcome == "external_halt":
            self.turn = self.turn.with_refusal(attempt, event.outcome, event.error, stored.at)
        else:
            is_charged = event.charge is not None and bool(event.charge.usd or event.charge.tokens)
            failure = FailedAttempt(event.error, event.may_retry, event.retry_after, event.needs_person, is_charged)
            self.turn = self.turn.with_failure(attempt, failure, stored.at)

    async def _foresee(self, event: RequestSettled, stored: Stored, read_body: ReadBody) -> None:
        call, _, simulation = event.request.rpartition("/simulation/")
        if call and simulation and event.outcome == "ok" and (body := await read_body(stored)):
            reply = msgspec.json.decode(body, type=Reply)
            text = "" if reply.stop == "refused" else reply.text.strip()
            self.predictions = {**self.predictions, call: f"{SIMULATION_LABEL} {text}" if text else ""}

    def _add_result(self, call: str, outcome: Outcome, text: str, partial: str = "") -> None:
        for tool_call in self.staged:
            if call_id(self.session, tool_call) == call:
                self.settle_staged(tool_call, outcome, text, partial)
                return
        for tool_call in self.turn.calls:
            if call_id(self.session, tool_call) == call:
                self.add_result(tool_call, outcome, text, partial)

    def _is_models(self, call: str) -> bool:
        """Return whether the model made a call, even if its reply is erased. Other callers use other ids."""
        return re.fullmatch(rf"{re.escape(self.session)}\.c\d+_\d+_\d+", call) is not None

    def _has_call(self, call: str) -> bool:
        return any(call_id(self.session, each) == call for each in (*self.turn.calls, *self.staged))

    def _is_turns(self, request: str) -> bool:
        """Return whether the turn loop made a request. Other callers use other ids."""
        return re.fullmatch(rf"{re.escape(self.session)}\.t\d+_\d+/\d+", request) is not None

    def flush(self, at: int) -> None:
        """Finish the step if all its calls have results."""
        if self.turn.calls and all(call.id in self.done for call in self.turn.calls):
            self.finish_step(at)


def is_erased(stored: Stored, body: bytes) -> bool:
    return not body and (stored.erased or stored.blob is not None)


def find_result(body: bytes, call: str) -> str | None:
    """Find the full result of a call in the history with which a session started."""
    messages = msgspec.json.decode(body or b"[]", type=list[Message])
    parts = (part for message in messages for part in message.parts)
    return next((part.text for part in parts if isinstance(part, ToolResult) and part.id == call), None)


def parse_attempt(request: str) -> int:
    return int(request.rpartition("/")[2])

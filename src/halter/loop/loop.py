"""The turn loop: request a model, make its calls, request again, until something ends the turn.

`decide` makes the decisions, as pure functions. The loop writes each event before it folds it, so another process that
reads the same events reaches the same state and continues from there.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from halter.core.clock import Clock, start_steady_time
from halter.core.events import (
    AnyEvent,
    GuardrailTriggered,
    HotStateSeen,
    MessageAdded,
    PhaseEntered,
    TurnEnded,
    TurnSkipped,
    TurnStarted,
)
from halter.core.events.sessions import YieldRequest
from halter.core.messages import Message, ToolCall
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.core.text import encode_body
from halter.core.tools import ToolSpec
from halter.core.vocabulary import GateStage, Guardrail, MessageReason, TurnEnd
from halter.guard.request import (
    MODEL_REQUEST_TIMEOUT,
    AnsweredRequest,
    FailedRequest,
    ModelRequest,
    RefusedRequest,
    RequestRecord,
)
from halter.loop.decide import Act, AddMessage, Finish, Refuse, Shrink, Step, Think, WaitOut, decide_next_step
from halter.loop.final_text import find_final_text
from halter.loop.history import SessionHistory, parse_attempt
from halter.loop.observer import NO_LIVE_CONTEXT, NO_OBSERVER, HotStateCapture, LiveContext, LoopObserver
from halter.loop.prompt import ContextWindow, LoopSettings, build_prompt, build_stable_prefix
from halter.loop.runtime_messages import describe_remaining_budget, describe_staged_outcomes
from halter.loop.session_runtime import SessionRuntime
from halter.loop.step_calls import StepCalls
from halter.loop.turn import FailedAttempt, Turn, needs_long_cache
from halter.provenance.check import ProvenanceCheck, describe_links
from halter.redaction.prompt_masker import mask_message
from halter.state.session import replay

STEPS_AT_A_TIME: Final = 16
"""Steps between two yields to the event loop, so that a session that never waits does not block other tasks."""


class TurnLoop:
    """Runs the turns of one session: decides each step, performs it, and folds its outcome into the history."""

    __slots__ = (
        "_calls",
        "_history",
        "_is_observed",
        "_live_context",
        "_make_provenance_check",
        "_observer",
        "_offered",
        "_on_chunk",
        "_read_time",
        "_rng",
        "_runtime",
        "_session",
        "_settings",
        "_start",
        "_window",
        "rules",
    )

    def __init__(
        self,
        runtime: SessionRuntime,
        clock: Clock,
        settings: LoopSettings,
        rng: random.Random,
        live_context: LiveContext = NO_LIVE_CONTEXT,
        observer: LoopObserver = NO_OBSERVER,
        provenance_check: Callable[[], ProvenanceCheck | None] = lambda: None,
    ) -> None:
        self.rules = settings.rules
        self._runtime = runtime
        # A turn measures durations, also while the clock is set.
        self._read_time = start_steady_time(clock)
        self._settings = settings
        self._rng = rng
        self._live_context = live_context
        self._observer = observer
        self._is_observed = observer.reads_outcomes
        streaming = settings.brain.streaming
        is_streaming = streaming if streaming is not None else self.rules.kind == "chat"
        self._on_chunk = observer.on_chunk if is_streaming else None
        self._offered = settings.offered_tools
        self._session = runtime.lease.session
        self._make_provenance_check = provenance_check
        self._history = SessionHistory(self._session, settings.rules.min_sleep, provenance_check())
        self._calls = StepCalls(self._history, runtime, self.rules, self._read_time, live_context, observer)
        self._start = settings.start
        self._window = ContextWindow(self._history, runtime, self._read_time, settings, self._start.size)
        # Not the loop itself, which would make a reference cycle.
        runtime.step_log = self._history

    async def run_turn(self) -> Turn | WaitOut:
        """Run steps until the turn ends, or until it must wait because no model answers.

        The next step's intent commits the outcome of a step, and the park or end of the session commits the end of the
        turn.
        """
        history, runtime = self._history, self._runtime
        step_count = 0
        while not (turn := history.turn).is_over:
            step_count += 1
            if step_count % STEPS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            now = self._read_time()
            step = self._decide(turn, now)
            match step:
                case Think():
                    request = await self._prepare_request(step, now)
                    if request is None:
                        continue
                    model, attempt = self._settings.models[step.model], turn.attempt_count
                    # Thousands of sessions may wait here: no frame is between the turn and the door.
                    outcome = await runtime.request_once(request, model, attempt, is_wrap_up=turn.wrapping)
                    answer = await runtime.finish_request(request, model, outcome, attempt, is_wrap_up=turn.wrapping)
                    await self._apply_answer(answer, step.model, request.nonce)
                case Act():
                    await self._act(step.calls, now)
                case Refuse() | AddMessage() | Shrink() | Finish():
                    await self._apply_step(step)
                case WaitOut():
                    return step
        return history.turn

    def _decide(self, turn: Turn, now: int) -> Step:
        """Decide on the next step. Calls without a result come first, whatever the budget is."""
        work_time = turn.time_worked(now)
        if turn.calls:
            return decide_next_step(turn, self.rules, now, work_time)
        jitter = self._rng.random() if turn.failures else 1.0
        near_budget = not turn.warned and self._runtime.is_near_own_cap()
        return decide_next_step(turn, self.rules, now, work_time, near_budget=near_budget, jitter=jitter)

    async def _prepare_request(self, step: Think, now: int) -> ModelRequest | None:
        """Make the next request, after its pause; None if the history cannot be cut to fit the model's window."""
        if step.after:
            await self._runtime.pause(step.after)
            now = self._read_time()
        volatile = self._describe_now()
        if not self._window.can_fit(volatile):
            if not await self._cut_to_fit(step.model):
                return None
            now = self._read_time()
        return self._make_request(step.model, volatile, now)

    def _describe_now(self) -> str:
        """Render the volatile text of the next request: the live context and the remaining budget."""
        usd, tokens = self._runtime.remaining_budget()
        remaining = describe_remaining_budget(usd, tokens)
        volatile = self._live_context.read_volatile()
        return f"{volatile}\n\n{remaining}" if volatile and remaining else volatile or remaining

    async def _cut_to_fit(self, model_index: int) -> bool:
        """Cut the history, and return whether the next request fits the window."""
        too_large = await self._window.cut_to_fit(self._settings.names[model_index])
        if too_large:
            self.turn = self.turn.with_failure(self.turn.attempt_count, FailedAttempt(too_large), self._read_time())
        return not too_large

    def _make_request(self, model_index: int, volatile: str, now: int) -> ModelRequest:
        """Make the next request of the turn to a model."""
        settings, turn, transcript = self._settings, self._history.turn, self._history.transcript
        nonce = f"{self._rng.getrandbits(40):08x}" if settings.brain.tool_calls == "text" else ""
        facts = self._live_context.read_facts()
        built_prompt = build_prompt(
            self._start, transcript, settings.brain, volatile, nonce, facts, last_words=turn.wrapping
        )
        prompt = built_prompt.prompt
        if not turn.wrapping and needs_long_cache(turn, now, self.rules.min_sleep):
            prompt = msgspec.structs.replace(prompt, long_cache=True)
        timeout = MODEL_REQUEST_TIMEOUT
        if self.rules.timeout:
            timeout = min(timeout, max(1, self.rules.timeout - turn.time_worked(now)))
        return ModelRequest(
            id=f"{self._session}.t{turn.number}_{turn.steps}",
            prompt=prompt,
            timeout=timeout,
            record=RequestRecord(built_prompt.ending, nonce),
            input_tokens=self._window.bound(settings.names[model_index], built_prompt.size),
            audio_tokens=transcript.audio,
            on_chunk=self._on_chunk,
            discards_previous=bool(turn.failures),
            nonce=nonce,
            can_defer=not self._is_observed and self._on_chunk is None,
        )

    async def _apply_answer(
        self, answer: AnsweredRequest | RefusedRequest | FailedRequest, model_index: int, nonce: str
    ) -> None:
        """Fold the final outcome of a request into the history."""
        history, now = self._history, self._read_time()
        if not isinstance(answer, AnsweredRequest):
            history.turn = _apply_failure(history.turn, answer, now)
            return
        had_trouble = history.turn.trouble
        if answer.reply.usage is not None:
            self._window.calibrate(self._settings.names[model_index], answer.reply.usage.input_tokens)
        history.add_reply(answer.reply, nonce, now)
        if answer.overrun:
            history.turn = msgspec.structs.replace(history.turn, overrun=True)
        if self._is_observed:
            self._observer.on_text(answer.reply.text, answer.cost_usd)
        if had_trouble:
            await self._runtime.record_recovery()
            history.turn = history.turn.with_recovery(self._read_time())

    async def _act(self, calls: Sequence[ToolCall], now: int) -> None:
        """Make the calls without a result. If the turn's time ends before all are made, the rest waits for `decide`."""
        history, runtime, timeout = self._history, self._runtime, self.rules.timeout
        remaining = timeout - history.turn.time_worked(now) if timeout else None
        if len(calls) > 1 or history.done or history.staged or history.decided:
            if not await self._calls.make_groups(calls, remaining):
                return
        else:
            # Most steps make one call, for which no frame is between the turn and the door.
            if self._is_observed:
                self._observer.on_calls(calls)
            call = self._calls.prepare(calls[0], timeout=remaining, can_defer=not self._is_observed)
            answer = await runtime.finish_call(call, await runtime.try_call(call))
            self._calls.add_result(calls[0], answer)
            if self.rules.max_actions_per_minute:
                await self._calls.record_limit((answer,), calls[0].group)
        if runtime.overrun:
            self.turn = msgspec.structs.replace(self.turn, overrun=True)
        history.finish_step(self._read_time())
        if history.decided and not history.turn.has_ending_call:
            await self._report_staged()

    async def _apply_step(self, step: Refuse | AddMessage | Shrink | Finish) -> None:
        match step:
            case Refuse(calls, outcome, sentence):
                await self._calls.refuse(calls, outcome, sentence)
            case AddMessage(reason, text):
                await self._add_runtime_message(reason, text)
            case Shrink():
                if not await self._window.shrink():
                    self.turn = self.turn.with_final_overflow()
            case Finish(turn_end, sentence):
                await self._finish(turn_end, sentence)

    async def _add_runtime_message(self, reason: MessageReason, text: str) -> None:
        """Add a message of the runtime for the model, once per step and reason.

        The key has the step's number, the only count that an erasure does not change.
        """
        event = MessageAdded(turn=self.turn.number, reason=reason)
        key = f"{self._session}/message/{self.turn.number}_{self.turn.steps}_{reason}"
        await self._runtime.write(key, event, encode_body(text))
        self._history.add(reason, text, self._read_time())

    async def _finish(self, reason: TurnEnd, sentence: str) -> None:
        """Make the staged calls, then end the turn. A halt takes precedence over a failure."""
        history, yield_request = self._history, self.turn.yielded
        if (history.staged or history.decided) and reason not in ("external_halt", "cancelled"):
            await self._calls.make_staged()
            if not await self._report_staged():
                return
        halt = None if reason in ("ended", "asked", "yielded") else await self._runtime.find_halt()
        if halt is not None:
            reason = "cancelled" if halt.cancels else "external_halt"
            sentence = sentence or f"{halt.scope} was halted."
        await self._end(reason, sentence, yield_request if reason == "yielded" else None)

    async def _report_staged(self) -> bool:
        """Tell the model the outcomes of staged calls; return whether all succeeded. If not, the turn continues."""
        results = self._history.decided
        await self._add_runtime_message("staged", describe_staged_outcomes(results))
        return all(result.outcome == "ok" for result in results)

    async def interrupt(self, sentence: str) -> bool:
        """End the turn after its task was cancelled; return whether it has ended.

        The state is rebuilt from the journal. A turn with an effect in doubt stays open, to be continued.
        """
        events = await self._runtime.events()
        if replay(events).in_flight:
            return False
        self._history = SessionHistory(self._session, self.rules.min_sleep, self._make_provenance_check())
        self._calls.history = self._history
        self._runtime.step_log = self._history
        await self._history.apply(events, self._runtime.read_body)
        if self.turn.is_over:
            return True
        if self.turn.calls:
            await self._calls.refuse(self.turn.calls, "cancelled", sentence)
        await self._end("cancelled", sentence, None)
        return True

    async def _end(self, reason: TurnEnd, sentence: str, yield_request: YieldRequest | None) -> None:
        event = TurnEnded(turn=self.turn.number, why=reason, sentence=sentence, yielded=yield_request)
        warning = self._mark_links()
        body = encode_body(warning) if warning else None
        await self._runtime.write_all(
            f"{self._session}/turn/{self.turn.number}/ended", [(event, body)], is_deferred=True
        )
        self._history.end(reason, sentence, yield_request, self._read_time())

    def _mark_links(self) -> str:
        """Warn about links and addresses of the answer that come from no trusted source; return the warning."""
        check = self._history.provenance_check
        warning = "" if check is None or check.clean else self.describe_unsaid_links(find_final_text(self.messages))
        if warning:
            self._observer.on_warning(warning)
        return warning

    def describe_unsaid_links(self, text: str) -> str:
        """Describe the links and addresses of a text that come from no trusted source; empty if there are none."""
        check = self._history.provenance_check
        return "" if check is None else describe_links(check.unsaid_links(text))

    async def recall(self, events: Sequence[Stored]) -> None:
        await self._history.apply(events, self._runtime.read_body)
        if self._history.context_text:
            self._begin_with(self._offered)

    def _begin_with(self, tools: tuple[ToolSpec, ...]) -> None:
        self._offered = tools
        self._start = build_stable_prefix(self._settings.brain, tools, self._history.context_text)
        self._window.fixed = self._start.size

    def offer(self, tools: tuple[ToolSpec, ...]) -> None:
        if tools is not self._offered and tools != self._offered:
            self._begin_with(tools)

    async def open(
        self, message: Message, inbox_seen: int, hot: HotStateCapture | None = None, *, quiet: bool = False
    ) -> None:
        """Start a turn with its first message; the inbox has been read up to `inbox_seen`.

        The event is deferred to the turn's first step. Hot state is recorded if it differs from the previous turn's.
        """
        message = mask_message(message, self._runtime.redact)
        number = self.turn.number + 1
        event = TurnStarted(turn=number, inbox_seen=inbox_seen, quiet=quiet)
        entries: list[tuple[AnyEvent, bytes | None]] = [(event, msgspec.json.encode(message))]
        if hot is not None and hot.body != self._history.hot:
            entries.append((HotStateSeen(turn=number, digest=hot.digest), hot.body))
            self._history.hot = hot.body
        await self._runtime.write_all(f"{self._session}/turn/{number}", entries, is_deferred=True)
        self._history.open(number, inbox_seen, message, self._read_time(), quiet=quiet)

    async def skip(self, stage: GateStage, sentence: str) -> None:
        event = TurnSkipped(stage=stage, skips=self.turn.skip_count + 1, sentence=self._runtime.redact(sentence))
        key = f"{self._session}/skip/{self.turn.number}_{event.skips}_{self._read_time()}"
        await self._runtime.write(key, event)
        self.turn = self.turn.with_skip(event.skips, self._read_time())

    async def record_guardrail(self, guardrail: Guardrail, sentence: str, until: int | None = None) -> None:
        """Record that a guardrail ends the session, or makes it sleep until a time."""
        now = self._read_time()
        event = GuardrailTriggered(guardrail=guardrail, turn=self.turn.number, sentence=sentence, until=until)
        await self._runtime.write(f"{self._session}/guardrail/{guardrail}/{self.turn.number}_{now}", event)
        if until is not None:
            self.turn = self.turn.with_guardrail(now)

    async def enter(self, phase: str, number: int) -> None:
        event = PhaseEntered(phase=phase, number=number, turn=self.turn.number)
        await self._runtime.write(f"{self._session}/phase/{number}", event)
        self._history.phase = event

    def pause_clock(self, trouble: str = "") -> None:
        self.turn = self.turn.pause(self._read_time(), trouble)

    def resume_clock(self) -> None:
        self.turn = self.turn.resume(self._read_time(), takeover=False)

    @property
    def turn(self) -> Turn:
        return self._history.turn

    @turn.setter
    def turn(self, turn: Turn) -> None:
        self._history.turn = turn

    @property
    def messages(self) -> Sequence[Message]:
        return self._history.transcript.messages

    @property
    def provenance_check(self) -> ProvenanceCheck | None:
        return self._history.provenance_check

    @property
    def spent(self) -> Charge:
        return Charge(usd=self._runtime.spent_usd, tokens=self._runtime.spent_tokens)

    @property
    def phase(self) -> PhaseEntered | None:
        return self._history.phase

    @property
    def hot(self) -> bytes:
        return self._history.hot


def _apply_failure(turn: Turn, answer: RefusedRequest | FailedRequest, now: int) -> Turn:
    attempt = parse_attempt(answer.request)
    match answer:
        case RefusedRequest(outcome=outcome, sentence=sentence):
            return turn.with_refusal(attempt, outcome, sentence, now)
        case FailedRequest(outcome="external_halt", error=error):
            return turn.with_refusal(attempt, "external_halt", error, now)
        case FailedRequest(error=error):
            is_charged = bool(answer.cost_usd or answer.tokens)
            failure = FailedAttempt(error, answer.may_retry, answer.retry_after, answer.needs_person, is_charged)
            return turn.with_failure(attempt, failure, now)

"""The turn loop: request a model, make its calls, request again, until something ends the turn.

`decide` makes the decisions, as pure functions. The loop writes each event before it folds it, so another process that
reads the same events reaches the same state and continues from there.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
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
from halter.core.messages import Message, StreamChunk, ToolCall
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.core.text import encode_body
from halter.core.tools import ToolSpec
from halter.core.vocabulary import GateStage, Guardrail, MessageReason, Outcome, TurnEnd
from halter.guard.call_answer import Answer
from halter.guard.judge import describe_too_many_actions
from halter.guard.prepare import Call
from halter.guard.provenance_check import ProvenanceCheck, describe_links
from halter.guard.request import (
    MODEL_REQUEST_TIMEOUT,
    AnsweredRequest,
    FailedRequest,
    ModelRequest,
    RefusedRequest,
    RequestRecord,
)
from halter.loop import decide
from halter.loop.decide import (
    Act,
    AddMessage,
    FailedAttempt,
    Finish,
    Refuse,
    Shrink,
    Think,
    Turn,
    WaitOut,
    decide_next_step,
)
from halter.loop.history import SessionHistory, call_id, parse_attempt
from halter.loop.prompt import ContextWindow, LoopSettings, ReadFacts, ReadVolatile, build_prompt, build_stable_prefix
from halter.loop.session_runtime import CapListener, SessionRuntime, find_final_text, ignore
from halter.redaction.prompt_masker import mask_message
from halter.state.session import replay


class LoopObserver(msgspec.Struct, frozen=True):
    """Optional callbacks of a turn.

    `on_chunk` receives an answer as it streams; `on_text` the model's text and its cost; `on_calls` the calls before
    they are made; `on_result` a call with its answer; `on_warning` a warning about an answer; `on_cap` a cap, before
    the session sleeps until its window ends.
    """

    on_chunk: Callable[[StreamChunk], None] | None = None
    on_text: Callable[[str, int], None] = ignore
    on_result: Callable[[ToolCall, Answer], None] = ignore
    on_warning: Callable[[str], None] = ignore
    on_cap: CapListener = ignore
    on_calls: Callable[[Sequence[ToolCall]], None] = ignore


class LiveContext(msgspec.Struct, frozen=True):
    """The current facts at a request: `read_volatile` returns them as text, `read_facts` for a rule-based model.

    `on_call` receives each call of the agent with its answer, which may change the facts.
    """

    read_volatile: ReadVolatile = str
    read_facts: ReadFacts = dict
    on_call: Callable[[ToolCall, Answer], None] | None = None


class HotStateCapture(msgspec.Struct, frozen=True):
    """The hot state at the start of a turn: its values as JSON, and their digest."""

    body: bytes
    digest: str


STEPS_AT_A_TIME: Final = 16
"""Steps between two yields to the event loop, so that a session that never waits does not block other tasks."""

NO_LIVE_CONTEXT: Final = LiveContext()
NO_OBSERVER: Final = LoopObserver()


class TurnLoop:
    """Runs the turns of one session: decides each step, performs it, and folds its outcome into the history."""

    __slots__ = (
        "_history",
        "_is_unobserved",
        "_live_context",
        "_make_provenance_check",
        "_model_settings",
        "_names",
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
        self._model_settings = settings.model
        self._rng = rng
        self._live_context = live_context
        self._observer = observer
        is_streaming = settings.model.streaming if settings.model.streaming is not None else self.rules.kind == "chat"
        self._on_chunk = observer.on_chunk if is_streaming else None
        # Defer outcomes only if no callback receives them: a callback must see durable outcomes.
        self._is_unobserved = observer.on_text is ignore and observer.on_result is ignore
        self._names = settings.names
        self._offered = settings.offered_tools
        self._session = runtime.lease.session
        self._make_provenance_check = provenance_check
        self._history = SessionHistory(self._session, settings.rules.min_sleep, provenance_check())
        self._start = settings.start
        self._window = ContextWindow(self._history, runtime, self._read_time, settings, self._start.size)
        # Not the loop itself, which would make a reference cycle.
        runtime.step_log = self._history

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

    async def recall(self, events: Sequence[Stored]) -> None:
        await self._history.apply(events, self._runtime.read_body)
        if self._history.context_text:
            self._begin_with(self._offered)

    def _begin_with(self, tools: tuple[ToolSpec, ...]) -> None:
        self._offered = tools
        self._start = build_stable_prefix(self._model_settings, tools, self._history.context_text)
        self._window.fixed = self._start.size

    @property
    def phase(self) -> PhaseEntered | None:
        return self._history.phase

    async def enter(self, phase: str, number: int) -> None:
        event = PhaseEntered(phase=phase, number=number, turn=self.turn.number)
        await self._runtime.write(f"{self._session}/phase/{number}", event)
        self._history.phase = event

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

    @property
    def hot(self) -> bytes:
        return self._history.hot

    def pause_clock(self, trouble: str = "") -> None:
        self.turn = self.turn.pause(self._read_time(), trouble)

    def resume_clock(self) -> None:
        self.turn = self.turn.resume(self._read_time(), takeover=False)

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

    async def run_turn(self) -> Turn | WaitOut:
        """Run steps until the turn ends, or until it must wait because no model answers.

        The next step's intent commits the outcome of a step, and the park or end of the session commits the end of the
        turn.
        """
        history, runtime, read_time, rules = self._history, self._runtime, self._read_time, self.rules
        usd = tokens = None
        step_count, now = 0, read_time()
        while not (turn := history.turn).is_over:
            step_count += 1
            if step_count % STEPS_AT_A_TIME == 0:
                await asyncio.sleep(0)
                now = read_time()
            work_time = turn.time_worked(now)
            if turn.calls:
                step = decide_next_step(turn, rules, now, work_time)
            else:
                usd, tokens = runtime.remaining_budget()
                jitter = self._rng.random() if turn.failures else 1.0
                near_budget = not turn.warned and runtime.is_near_own_cap(usd, tokens)
                step = decide_next_step(turn, rules, now, work_time, near_budget=near_budget, jitter=jitter)
            # Types are compared, because most steps are one of these two and a failed pattern match is slow.
            if type(step) is Think:
                if step.after:
                    await runtime.pause(step.after)
                    usd, tokens = runtime.remaining_budget()
                    work_time = turn.time_worked(read_time())
                volatile = self._describe_now(usd, tokens)
                fits_window = self._window.can_fit(volatile)
                if not fits_window:
                    fits_window, now = await self._cut_to_fit(step.model), read_time()
                    work_time = history.turn.time_worked(now)
                if fits_window:
                    request, model = (
                        self._make_request(step.model, volatile, now, work_time),
                        self._settings.models[step.model],
                    )
                    # Thousands of sessions may wait here: no frame is between the turn and the door.
                    outcome = await runtime.request_once(request, model, turn.attempt_count, is_wrap_up=turn.wrapping)
                    answer = runtime.charge(request, outcome)
                    if not isinstance(answer, AnsweredRequest):
                        answer = await runtime.request_until_admitted(
                            request, model, answer, turn.attempt_count, is_wrap_up=turn.wrapping
                        )
                    now = read_time()
                    self._apply_outcome(answer, step.model, request.nonce, now)
                    if turn.trouble and isinstance(answer, AnsweredRequest):
                        await runtime.record_recovery()
                        now = read_time()
                        history.turn = history.turn.with_recovery(now)
            elif type(step) is Act:
                now = await self._act(step.calls, now, work_time)
            elif type(step) is WaitOut:
                return step
            else:
                await self._apply_step(step)
                now = read_time()
        return history.turn

    async def _apply_step(self, step: Refuse | AddMessage | Shrink | Finish) -> None:
        match step:
            case Refuse(calls, outcome, sentence):
                await self._refuse(calls, outcome, sentence)
            case AddMessage(reason, text):
                await self._add_runtime_message(reason, text)
            case Shrink():
                if not await self._window.shrink():
                    self.turn = self.turn.with_final_overflow()
            case Finish(turn_end, sentence):
                await self._finish(turn_end, sentence)

    def _describe_now(self, usd: int | None, tokens: int | None) -> str:
        """Render the volatile text of the next request: the live context and the remaining budget."""
        remaining, volatile = decide.describe_remaining_budget(usd, tokens), self._live_context.read_volatile()
        return f"{volatile}\n\n{remaining}" if volatile and remaining else volatile or remaining

    async def _cut_to_fit(self, model_index: int) -> bool:
        """Cut the history, and return whether the next request fits the window."""
        if too_large := await self._window.cut_to_fit(self._names[model_index]):
            self.turn = self.turn.with_failure(self.turn.attempt_count, FailedAttempt(too_large), self._read_time())
        return not too_large

    def _make_request(self, model_index: int, volatile: str, now: int, work_time: int) -> ModelRequest:
        """Make the next request of the turn to a model."""
        turn, transcript = self._history.turn, self._history.transcript
        nonce = f"{self._rng.getrandbits(40):08x}" if self._model_settings.tool_calls == "text" else ""
        facts, last_words = self._live_context.read_facts(), turn.wrapping
        built_prompt = build_prompt(
            self._start, transcript, self._model_settings, volatile, nonce, facts, last_words=last_words
        )
        prompt = built_prompt.prompt
        if not last_words and decide.needs_long_cache(turn, now, self.rules.min_sleep):
            prompt = msgspec.structs.replace(prompt, long_cache=True)
        timeout, turn_timeout = MODEL_REQUEST_TIMEOUT, self.rules.timeout
        if turn_timeout and (remaining := turn_timeout - work_time) < timeout:
            timeout = max(1, remaining)
        return ModelRequest(
            id=f"{self._session}.t{turn.number}_{turn.steps}",
            prompt=prompt,
            timeout=timeout,
            record=RequestRecord(built_prompt.ending, nonce),
            input_tokens=self._window.bound(self._names[model_index], built_prompt.size),
            audio_tokens=transcript.audio,
            on_chunk=self._on_chunk,
            discards_previous=bool(turn.failures),
            nonce=nonce,
            can_defer=self._is_unobserved and self._on_chunk is None,
        )

    def _apply_outcome(
        self, answer: AnsweredRequest | RefusedRequest | FailedRequest, model_index: int, nonce: str, now: int
    ) -> None:
        """Fold the final outcome of a request into the history."""
        history = self._history
        if isinstance(answer, AnsweredRequest):
            reply = answer.reply
            if reply.usage is not None:
                self._window.calibrate(self._names[model_index], reply.usage.input_tokens)
            history.add_reply(reply, nonce, now)
            if answer.overrun:
                history.turn = msgspec.structs.replace(history.turn, overrun=True)
            if not self._is_unobserved:
                self._observer.on_text(reply.text, answer.cost_usd)
            return
        turn, attempt = history.turn, parse_attempt(answer.request)
        match answer:
            case RefusedRequest(outcome=outcome, sentence=sentence):
                history.turn = turn.with_refusal(attempt, outcome, sentence, now)
            case FailedRequest(outcome="external_halt", error=error):
                history.turn = turn.with_refusal(attempt, "external_halt", error, now)
            case FailedRequest(error=error):
                is_charged = bool(answer.cost_usd or answer.tokens)
                failure = FailedAttempt(error, answer.may_retry, answer.retry_after, answer.needs_person, is_charged)
                history.turn = turn.with_failure(attempt, failure, now)

    async def _act(self, calls: Sequence[ToolCall], now: int, work_time: int) -> int:
        """Make the calls without a result, and return the time afterwards.

        The calls of a group run concurrently; the groups run one after the other.
        """
        history, runtime, timeout = self._history, self._runtime, self.rules.timeout
        remaining, group_name = timeout - work_time if timeout else None, ""
        for group_index, members in enumerate(
            (calls,) if len(calls) == 1 and not history.done else self._list_groups(calls)
        ):
            if group_index and remaining is not None and (remaining := timeout - history.turn.time_worked(now)) <= 0:
                return now
            if not self._is_unobserved:
                self._observer.on_calls(members)
            if len(calls) > 1:
                group_name = self._name_group(members[0].group, calls)
            is_single = len(members) == 1
            guard_calls = self._make_calls(members, group_name, remaining, goes_on=is_single and self._is_unobserved)
            if self._must_keep_order(calls):
                answers = await self._act_in_order(members, guard_calls)
                if len(answers) < len(members):
                    return self._read_time()
            elif is_single:
                # As for a request, no frame is between the turn and the door.
                attempt = runtime.record_attempt(guard_calls[0], await runtime.try_call(guard_calls[0]))
                answer = runtime.accept_answer(attempt)
                answers = (answer,) if answer is not None else await runtime.collect_answers(guard_calls, (attempt,))
                self._add_results(members, answers)
            else:
                answers = await runtime.calls(guard_calls)
                self._add_results(members, answers)
            if self.rules.max_actions_per_minute:
                await self._record_limit(answers, members[0].group)
            now = self._read_time()
        if runtime.overrun:
            self.turn = msgspec.structs.replace(self.turn, overrun=True)
        history.finish_step(now)
        if history.decided and not history.turn.has_ending_call:
            await self._report_staged()
            now = self._read_time()
        return now

    def _must_keep_order(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether the calls of a step must be made one after the other, each to its end.

        They must if a staged call is before them, or if the provenance check may hold one of them back.
        """
        history = self._history
        if history.staged or history.decided:
            return True
        check = history.provenance_check
        return check is not None and len(calls) > 1 and any(check.keeps_order(call.tool) for call in calls)

    async def _act_in_order(self, calls: Sequence[ToolCall], guard_calls: Sequence[Call]) -> Sequence[Answer]:
        """Make calls one after the other, until the turn's time is up.

        Before the first call that may depend on a staged one, the staged calls are made.
        """
        history, runtime, timeout = self._history, self._runtime, self.rules.timeout
        answers: list[Answer] = []
        for index, call in enumerate(calls):
            following = guard_calls[index:]
            if timeout:
                remaining = timeout - history.turn.time_worked(self._read_time())
                if remaining <= 0:
                    break
                following = [msgspec.structs.replace(each, timeout=remaining) for each in following]
            if history.staged and await runtime.depends_on_staged(following[0]):
                await self._make_staged(following)
            answer = await self._make_in_order(following)
            self._add_results((call,), (answer,))
            answers.append(answer)
        return answers

    async def _make_in_order(self, calls: Sequence[Call]) -> Answer:
        """Make the first of some calls, or refuse it if a call before it was not made.

        A person's answer to a question about this very call counts, whatever came of those before it.
        """
        unmade_call = self._history.find_unmade_call()
        if unmade_call is None or await self._runtime.has_question(calls[0]):
            return await self._runtime.call_before(calls[0], calls[1:])
        (answer,) = await self._runtime.refuse(calls[:1], "cancelled", decide.describe_unmade_call(unmade_call))
        return answer

    def _list_groups(self, calls: Sequence[ToolCall]) -> list[Sequence[ToolCall]]:
        missing = [call for call in calls if call.id not in self._history.done]
        return [list(members) for _, members in groupby(missing, key=attrgetter("group"))]

    async def _record_limit(self, answers: Sequence[Answer], group: int) -> None:
        """Record that the guard refused calls of a group beyond the agent's actions per minute."""
        stream, limit = self._runtime.lease.stream, self.rules.max_actions_per_minute
        sentence = describe_too_many_actions(self._session, stream, limit)
        if any(answer.outcome == "rate_limited" and answer.text == sentence for answer in answers):
            event = GuardrailTriggered(guardrail="max_actions_per_minute", turn=self.turn.number, sentence=sentence)
            await self._runtime.write(f"{self._session}/brisk/{self.turn.number}_{self.turn.steps}_{group}", event)

    async def _refuse(self, calls: Sequence[ToolCall], outcome: Outcome, sentence: str) -> None:
        """Refuse the calls without a result. The results of the other calls stay."""
        missing = [call for call in calls if call.id not in self._history.done]
        if missing:
            answers = await self._runtime.refuse(self._make_calls(missing), outcome, sentence)
            self._add_results(missing, answers)
        self._history.finish_step(self._read_time())

    def _add_results(self, calls: Sequence[ToolCall], answers: Sequence[Answer]) -> None:
        history, on_call = self._history, self._live_context.on_call
        for index, call in enumerate(calls):
            answer = answers[index]
            history.add_result(call, answer.outcome, answer.text, answer.partial, answer.files)
            if answer.staged:
                history.staged += (call,)
            if answer.overrun:
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            if on_call is not None:
                on_call(call, answer)
            if not self._is_unobserved:
                self._observer.on_result(call, answer)
                if answer.outcome == "ok" and call.tool.startswith(decide.HAND_OFF):
                    self._observer.on_text(answer.text, 0)

    def _name_group(self, group: int, calls: Sequence[ToolCall]) -> str:
        """Return the name of a parallel group; empty for a group with a single call."""
        turn = self._history.turn
        has_siblings = sum(call.group == group for call in calls) > 1
        return f"{self._session}.t{turn.number}_{turn.steps}_{group}" if has_siblings else ""

    def _make_calls(
        self, tool_calls: Sequence[ToolCall], group: str = "", timeout: int | None = None, *, goes_on: bool = False
    ) -> Sequence[Call]:
        history = self._history
        return [
            Call(
                id=call_id(self._session, call),
                tool=call.tool,
                arguments=encode_body(call.arguments),
                parallel_group=group,
                timeout=timeout,
                can_defer=goes_on,
                describe_situation=history.situation,
                provenance_check=history.provenance_check,
                staging="allowed",
            )
            for call in tool_calls
        ]

    async def _add_runtime_message(self, reason: MessageReason, text: str) -> None:
        """Add a message of the runtime for the model, once per step and reason.

        The key has the step's number, the only count that an erasure does not change.
        """
        event = MessageAdded(turn=self.turn.number, reason=reason)
        key = f"{self._session}/message/{self.turn.number}_{self.turn.steps}_{reason}"
        await self._runtime.write(key, event, encode_body(text))
        self._history.add(reason, text, self._read_time())

    async def interrupt(self, sentence: str) -> bool:
        """End the turn after its task was cancelled; return whether it has ended.

        The state is rebuilt from the journal. A turn with an effect in doubt stays open, to be continued.
        """
        events = await self._runtime.events()
        if replay(events).in_flight:
            return False
        self._history = SessionHistory(self._session, self.rules.min_sleep, self._make_provenance_check())
        self._runtime.step_log = self._history
        await self._history.apply(events, self._runtime.read_body)
        if self.turn.is_over:
            return True
        if self.turn.calls:
            await self._refuse(self.turn.calls, "cancelled", sentence)
        await self._end("cancelled", sentence, None)
        return True

    async def _finish(self, reason: TurnEnd, sentence: str) -> None:
        """Make the staged calls, then end the turn. A halt takes precedence over a failure."""
        history = self._history
        yield_request = self.turn.yielded if reason == "yielded" else None
        if (history.staged or history.decided) and reason not in ("external_halt", "cancelled"):
            await self._make_staged()
            if not await self._report_staged():
                return
        halt = None if reason in ("ended", "asked", "yielded") else await self._runtime.find_halt()
        if halt is not None:
            reason, sentence = (
                ("cancelled" if halt.cancels else "external_halt"),
                sentence or f"{halt.scope} was halted.",
            )
        await self._end(reason, sentence, yield_request)

    async def _make_staged(self, following: Sequence[Call] = ()) -> None:
        """Make the staged calls in their order. One question asks a person about all of them, and what follows."""
        history = self._history
        calls = history.staged
        staged_calls = [msgspec.structs.replace(call, staging="due") for call in self._make_calls(calls)]
        for index, call in enumerate(calls):
            answer = await self._make_in_order([*staged_calls[index:], *following])
            history.settle_staged(call, answer.outcome, answer.text, answer.partial, answer.files)
            self.turn = msgspec.structs.replace(
                self.turn,
                halted=self.turn.halted or answer.outcome == "external_halt",
                overrun=self.turn.overrun or answer.overrun,
            )
            if self._live_context.on_call is not None:
                self._live_context.on_call(call, answer)
            if not self._is_unobserved:
                self._observer.on_result(call, answer)

    async def _report_staged(self) -> bool:
        """Tell the model the outcomes of staged calls; return whether all succeeded. If not, the turn continues."""
        results = self._history.decided
        await self._add_runtime_message("staged", decide.describe_staged_outcomes(results))
        return all(result.outcome == "ok" for result in results)

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

"""The loop of a turn: think, act, think again, until something ends it.

The decisions are in `decide`, and pure. Events are written first, then folded: another process that reads the same
events is in the same state, and continues from there.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

import msgspec

from halter.core import events as ev
from halter.core.clock import Clock
from halter.core.messages import Message, StreamChunk, ToolCall
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.core.text import to_body
from halter.core.tools import ToolSpec
from halter.core.vocabulary import REFUSAL_OUTCOMES, GateStage, Guardrail, MessageReason, Outcome, TurnEnd
from halter.guard.brake import SessionBrake, describe_links
from halter.guard.model_door import (
    MODEL_REQUEST_TIMEOUT,
    AnsweredRequest,
    FailedRequest,
    ModelRequest,
    RefusedRequest,
    RequestRecord,
)
from halter.guard.prepare import Call
from halter.guard.tool_door import Answer
from halter.loop import decide
from halter.loop.decide import (
    Act,
    FailedAttempt,
    Finish,
    Refuse,
    Say,
    Shrink,
    Think,
    Turn,
    WaitOut,
    count_allowed_calls,
    decide_next_step,
)
from halter.loop.history import SessionHistory, call_id, parse_attempt
from halter.loop.prompt import ContextWindow, LoopSettings, ReadFacts, ReadVolatile, build_prompt, build_stable_prefix
from halter.loop.session_runtime import CapListener, SessionRuntime, find_final_text, ignore
from halter.redaction.redact import mask_message
from halter.state.session import replay


class LoopObserver(msgspec.Struct, frozen=True):
    """Callbacks: an answer as it streams, the model's text, the results of its calls, a warning about an answer.

    `capped` hears of a cap that is slept for, `acts` of calls before they are made.
    """

    listen: Callable[[StreamChunk], None] | None = None
    on_text: Callable[[str, int], None] = ignore
    on_result: Callable[[ToolCall, Answer], None] = ignore
    on_warning: Callable[[str], None] = ignore
    on_cap: CapListener = ignore
    on_calls: Callable[[Sequence[ToolCall]], None] = ignore


class LiveContext(msgspec.Struct, frozen=True):
    """What a session knows right now: as text for a model, and as facts for a rule-based one.

    `called` receives each call of the agent's with its answer, which may be news of what is known.
    """

    volatile: ReadVolatile = str
    facts: ReadFacts = dict
    on_call: Callable[[ToolCall, Answer], None] | None = None


class HotStateCapture(msgspec.Struct, frozen=True):
    """The hot state as a turn sees it: its values as JSON, and their digest."""

    body: bytes
    digest: str


STEPS_AT_A_TIME: Final = 16
"""After so many steps other tasks get a turn: a session that never waits would keep the event loop to itself."""

NO_LIVE_CONTEXT: Final = LiveContext()
NO_OBSERVER: Final = LoopObserver()


class TurnLoop:
    __slots__ = (
        "_clock",
        "_history",
        "_is_unobserved",
        "_live_context",
        "_make_brake",
        "_model_settings",
        "_names",
        "_observer",
        "_offered",
        "_on_chunk",
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
        brake: Callable[[], SessionBrake | None] = lambda: None,
    ) -> None:
        self.rules = settings.rules
        self._runtime = runtime
        self._clock = clock
        self._settings = settings
        self._model_settings = settings.model
        self._rng = rng
        self._live_context = live_context
        self._observer = observer
        streams = settings.model.streaming if settings.model.streaming is not None else self.rules.kind == "chat"
        self._on_chunk = observer.listen if streams else None
        # No callback receives outcomes. Otherwise these must be durable first.
        self._is_unobserved = observer.on_text is ignore and observer.on_result is ignore
        self._names = settings.names
        self._offered = settings.offered
        self._session = runtime.lease.session
        self._make_brake = brake
        self._history = SessionHistory(self._session, settings.rules.min_sleep, brake())
        self._start = settings.start
        self._window = ContextWindow(self._history, runtime, clock, settings, self._start.size)
        # Of the history, not of the loop: what refers to itself waits for the garbage collector.
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
    def brake(self) -> SessionBrake | None:
        return self._history.brake

    @property
    def spent(self) -> Charge:
        return Charge(usd=self._runtime.spent_usd, tokens=self._runtime.spent_tokens)

    async def recall(self, events: Sequence[Stored]) -> None:
        await self._history.apply(events, self._runtime.read_body)
        if self._history.context_text:
            self._begin_with(self._offered)

    def _begin_with(self, offered: tuple[ToolSpec, ...]) -> None:
        self._offered = offered
        self._start = build_stable_prefix(self._model_settings, offered, self._history.context_text)
        self._window.fixed = self._start.size

    @property
    def phase(self) -> ev.PhaseEntered | None:
        return self._history.phase

    async def enter(self, phase: str, number: int) -> None:
        event = ev.PhaseEntered(phase=phase, number=number, turn=self.turn.number)
        await self._runtime.write(f"{self._session}/phase/{number}", event)
        self._history.phase = event

    def offer(self, tools: tuple[ToolSpec, ...]) -> None:
        if tools is not self._offered and tools != self._offered:
            self._begin_with(tools)

    async def open(
        self, message: Message, heard: int, hot: HotStateCapture | None = None, *, quiet: bool = False
    ) -> None:
        """Begin a turn with its first message; the inbox has been read as far as `heard`.

        This is written with the turn's first step. Hot state is recorded where it differs from the previous turn's.
        """
        message = mask_message(message, self._runtime.redact)
        number = self.turn.number + 1
        event = ev.TurnStarted(turn=number, inbox_seen=heard, quiet=quiet)
        happened: list[tuple[ev.AnyEvent, bytes | None]] = [(event, msgspec.json.encode(message))]
        if hot is not None and hot.body != self._history.hot:
            happened.append((ev.HotStateSeen(turn=number, digest=hot.digest), hot.body))
            self._history.hot = hot.body
        await self._runtime.write_all(f"{self._session}/turn/{number}", happened, goes_on=True)
        self._history.open(number, heard, message, self._clock.now(), quiet=quiet)

    @property
    def hot(self) -> bytes:
        return self._history.hot

    def pause_clock(self, trouble: str = "") -> None:
        self.turn = self.turn.pause(self._clock.now(), trouble)

    def resume_clock(self) -> None:
        self.turn = self.turn.resume(self._clock.now(), takeover=False)

    async def skip(self, stage: GateStage, sentence: str) -> None:
        event = ev.TurnSkipped(stage=stage, skips=self.turn.skips + 1, sentence=self._runtime.redact(sentence))
        key = f"{self._session}/skip/{self.turn.number}_{event.skips}_{self._clock.now()}"
        await self._runtime.write(key, event)
        self.turn = self.turn.skipped(event.skips, self._clock.now())

    async def record_guardrail(self, guardrail: Guardrail, sentence: str, until: int | None = None) -> None:
        """Record that a guardrail ends the session, or makes it sleep until then."""
        now = self._clock.now()
        event = ev.GuardrailTriggered(guardrail=guardrail, turn=self.turn.number, sentence=sentence, until=until)
        await self._runtime.write(f"{self._session}/guardrail/{guardrail}/{self.turn.number}_{now}", event)
        if until is not None:
            self.turn = self.turn.held_back(now)

    async def run_turn(self) -> Turn | WaitOut:
        """Take the turn's steps until it is over, or must wait because no model answers.

        The outcome of a step is committed with the next step's intent, and the turn's end with what follows: that the
        session rests, or ends.
        """
        recalled, runtime, clock, rules = self._history, self._runtime, self._clock, self.rules
        usd = tokens = None
        done, now = 0, clock.now()
        while not (turn := recalled.turn).over:
            done += 1
            if done % STEPS_AT_A_TIME == 0:
                await asyncio.sleep(0)
                now = clock.now()
            worked = turn.time_worked(now)
            if turn.calls:
                step = decide_next_step(turn, rules, now, worked)
            else:
                usd, tokens = runtime.remaining_budget()
                jitter = self._rng.random() if turn.failures else 1.0
                near = not turn.warned and self._is_near_reserve(usd, tokens)
                step = decide_next_step(turn, rules, now, worked, near_budget=near, jitter=jitter)
            # By its type: most are one of these two, and a pattern takes long to find that it does not match.
            if type(step) is Think:
                if step.after:
                    await runtime.pause(step.after)
                    usd, tokens = runtime.remaining_budget()
                    worked = turn.time_worked(clock.now())
                volatile = self._describe_now(usd, tokens)
                room = self._window.has_room(volatile)
                if not room:
                    room, now = await self._make_room(step.model), clock.now()
                    worked = recalled.turn.time_worked(now)
                if room:
                    request, model = self._make_request(step.model, volatile, worked), self._settings.models[step.model]
                    # Thousands of sessions may wait here: between the turn and the door there is no other frame.
                    came = await runtime.request_once(request, model, turn.attempts, last=turn.wrapping)
                    answer = runtime.charge(request, came)
                    if not isinstance(answer, AnsweredRequest):
                        answer = await runtime.request_until_admitted(
                            request, model, answer, turn.attempts, last=turn.wrapping
                        )
                    now = clock.now()
                    self._apply_outcome(answer, step.model, request.nonce, now)
                    if turn.trouble and isinstance(answer, AnsweredRequest):
                        await runtime.record_recovery()
                        now = clock.now()
                        recalled.turn = recalled.turn.with_recovery(now)
            elif type(step) is Act:
                now = await self._act(step.calls, now, worked)
            elif type(step) is WaitOut:
                return step
            else:
                await self._apply_step(step)
                now = clock.now()
        return recalled.turn

    async def _apply_step(self, step: Refuse | Say | Shrink | Finish) -> None:
        match step:
            case Refuse(calls, outcome, sentence):
                await self._refuse(calls, outcome, sentence)
            case Say(reason, text):
                await self._add_runtime_message(reason, text)
            case Shrink():
                if not await self._window.shrink():
                    self.turn = self.turn.hopeless()
            case Finish(why, sentence):
                await self._finish(why, sentence)

    def _is_near_reserve(self, usd: int | None, tokens: int | None) -> bool:
        """Whether what is left to spend is down to the reserve."""
        policy = self._runtime.context.policy
        if usd is not None and usd <= (policy.caps.session.max_cost_usd or 0) * policy.reserve_cost_fraction:
            return True
        return tokens is not None and tokens <= policy.reserve_tokens

    def _describe_now(self, usd: int | None, tokens: int | None) -> str:
        """What is true only for the next request."""
        remaining, volatile = decide.describe_remaining_budget(usd, tokens), self._live_context.volatile()
        return f"{volatile}\n\n{remaining}" if volatile and remaining else volatile or remaining

    async def _make_room(self, model: int) -> bool:
        """Cut what the next request tells; whether it has room then."""
        if too_large := await self._window.make_room(self._names[model]):
            self.turn = self.turn.with_failure(self.turn.attempts, FailedAttempt(too_large), self._clock.now())
        return not too_large

    def _make_request(self, model: int, volatile: str, worked: int) -> ModelRequest:
        """Make the next request of the turn to a model."""
        turn, transcript = self._history.turn, self._history.transcript
        nonce = f"{self._rng.getrandbits(40):08x}" if self._model_settings.tool_calls == "text" else ""
        facts, last = self._live_context.facts(), turn.wrapping
        built = build_prompt(self._start, transcript, self._model_settings, volatile, nonce, facts, last_words=last)
        timeout, allowed = MODEL_REQUEST_TIMEOUT, self.rules.timeout
        if allowed and (remaining := allowed - worked) < timeout:
            timeout = max(1, remaining)
        return ModelRequest(
            id=f"{self._session}.t{turn.number}_{turn.steps}",
            prompt=built.prompt,
            timeout=timeout,
            record=RequestRecord(built.ending, nonce),
            input_tokens=self._window.bound(self._names[model], built.size),
            audio_tokens=transcript.audio,
            listen=self._on_chunk,
            discards=bool(turn.failures),
            nonce=nonce,
            goes_on=self._is_unobserved and self._on_chunk is None,
        )

    def _apply_outcome(
        self, answer: AnsweredRequest | RefusedRequest | FailedRequest, model: int, nonce: str, now: int
    ) -> None:
        """Take in what came of a request, after all waits that it needs."""
        recalled = self._history
        if isinstance(answer, AnsweredRequest):
            reply = answer.reply
            if reply.usage is not None:
                self._window.calibrate(self._names[model], reply.usage.input_tokens)
            recalled.add_reply(reply, nonce, now)
            if answer.overrun:
                recalled.turn = msgspec.structs.replace(recalled.turn, overrun=True)
            if not self._is_unobserved:
                self._observer.on_text(reply.text, answer.cost_usd)
            return
        turn, attempt = recalled.turn, parse_attempt(answer.request)
        match answer:
            case RefusedRequest(outcome=outcome, sentence=sentence):
                recalled.turn = turn.with_refusal(attempt, outcome, sentence, now)
            case FailedRequest(outcome="external_halt", error=error):
                recalled.turn = turn.with_refusal(attempt, "external_halt", error, now)
            case FailedRequest(error=error):
                failure = FailedAttempt(error, answer.may_retry, answer.retry_after, answer.needs_person)
                recalled.turn = turn.with_failure(attempt, failure, now)

    async def _act(self, calls: Sequence[ToolCall], now: int, worked: int) -> int:
        """Make the calls without a result: each group concurrently, one group after the other. Return the time then."""
        recalled, runtime, timeout = self._history, self._runtime, self.rules.timeout
        remaining, name = timeout - worked if timeout else None, ""
        for place, group in enumerate((calls,) if len(calls) == 1 and not recalled.done else self._list_groups(calls)):
            if place and remaining is not None and (remaining := timeout - recalled.turn.time_worked(now)) <= 0:
                return now
            members = await self._limit_calls(group) if self.rules.max_actions_per_minute else group
            if not members:
                continue
            if not self._is_unobserved:
                self._observer.on_calls(members)
            if len(calls) > 1:
                name = self._name_group(members[0].group, calls)
            lone = len(members) == 1
            made = self._make_calls(members, name, remaining, goes_on=lone and self._is_unobserved)
            if lone:
                # As with a request, there is no other frame between the turn and the door.
                tried = runtime.record_attempt(made[0], await runtime.try_call(made[0]))
                answer = runtime.accept_answer(tried)
                answers = (answer,) if answer is not None else await runtime.answers(made, (tried,))
            else:
                answers = await runtime.calls(made)
            self._add_results(members, answers)
            now = self._clock.now()
        if runtime.overrun:
            self.turn = msgspec.structs.replace(self.turn, overrun=True)
        recalled.finish_step(now)
        return now

    def _list_groups(self, calls: Sequence[ToolCall]) -> list[Sequence[ToolCall]]:
        missing = [call for call in calls if call.id not in self._history.done]
        return [list(together) for _, together in groupby(missing, key=attrgetter("group"))]

    async def _limit_calls(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """Refuse calls beyond an autonomous agent's actions per minute."""
        now, limit = self._clock.now(), self.rules.max_actions_per_minute
        capacity = count_allowed_calls(self._history.actions, now, limit)
        acting = [call for call in calls if self._runtime.has_effect(call.tool)]
        for _ in acting[:capacity]:
            self._history.mark_acting(now)
        if len(acting) <= capacity:
            return calls
        sentence = decide.describe_too_many_actions(limit)
        event = ev.GuardrailTriggered(guardrail="max_actions_per_minute", turn=self.turn.number, sentence=sentence)
        key = f"{self._session}/brisk/{self.turn.number}_{self.turn.steps}_{calls[0].group}"
        await self._runtime.write(key, event)
        answers = await self._runtime.refuse(self._make_calls(acting[capacity:]), "rate_limited", sentence)
        self._add_results(acting[capacity:], answers)
        return [call for call in calls if call not in acting[capacity:]]

    async def _refuse(self, calls: Sequence[ToolCall], outcome: Outcome, sentence: str) -> None:
        """Answer calls that are not made. Those done before the deadline, or before a crash, stay done."""
        missing = [call for call in calls if call.id not in self._history.done]
        if missing:
            answers = await self._runtime.refuse(self._make_calls(missing), outcome, sentence)
            self._add_results(missing, answers)
        self._history.finish_step(self._clock.now())

    def _add_results(self, calls: Sequence[ToolCall], answers: Sequence[Answer]) -> None:
        recalled, called = self._history, self._live_context.on_call
        for place, call in enumerate(calls):
            answer = answers[place]
            recalled.add_result(call, answer.outcome, answer.text, answer.partial)
            if answer.staged:
                recalled.staged += (call,)
            if answer.overrun:
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            if called is not None:
                called(call, answer)
            if not self._is_unobserved:
                self._observer.on_result(call, answer)
                if answer.outcome == "ok" and call.tool.startswith(decide.HAND_OFF):
                    self._observer.on_text(answer.text, 0)

    def _name_group(self, group: int, calls: Sequence[ToolCall]) -> str:
        """Name the group of calls that had company when they were asked for."""
        turn = self._history.turn
        company = sum(call.group == group for call in calls) > 1
        return f"{self._session}.t{turn.number}_{turn.steps}_{group}" if company else ""

    def _make_calls(
        self, asked: Sequence[ToolCall], group: str = "", max_wait: int | None = None, *, goes_on: bool = False
    ) -> Sequence[Call]:
        recalled = self._history
        return [
            Call(
                id=call_id(self._session, call),
                tool=call.tool,
                arguments=to_body(call.arguments),
                parallel_group=group,
                at_most=max_wait,
                goes_on=goes_on,
                situation=recalled.situation,
                brake=recalled.brake,
                stage="may",
            )
            for call in asked
        ]

    async def _add_runtime_message(self, reason: MessageReason, text: str) -> None:
        """Tell the model something, once per step. After an erasure there is no other count."""
        event = ev.MessageAdded(turn=self.turn.number, reason=reason)
        key = f"{self._session}/message/{self.turn.number}_{self.turn.steps}_{reason}"
        await self._runtime.write(key, event, to_body(text))
        self._history.add(reason, text, self._clock.now())

    async def interrupt(self, sentence: str) -> bool:
        """End the turn where its task was cancelled; return whether it is over.

        What is true then is in the journal alone. A turn with an effect in doubt stays open, and is gone on with.
        """
        events = await self._runtime.events()
        if replay(events).in_flight:
            return False
        self._history = SessionHistory(self._session, self.rules.min_sleep, self._make_brake())
        self._runtime.step_log = self._history
        await self._history.apply(events, self._runtime.read_body)
        if self.turn.over:
            return True
        if self.turn.calls:
            await self._refuse(self.turn.calls, "cancelled", sentence)
        await self._end("cancelled", sentence, None)
        return True

    async def _finish(self, why: TurnEnd, sentence: str) -> None:
        """Record how the turn ended, after what waited for its end. A halt takes precedence over any other end."""
        chosen = self.turn.yielded if why == "yielded" else None
        if self._history.staged and why not in ("external_halt", "cancelled") and not await self._make_staged():
            return
        halt = None if why in ("ended", "asked", "yielded") else await self._runtime.find_halt()
        if halt is not None:
            why, sentence = ("cancelled" if halt.cancels else "external_halt"), sentence or f"{halt.scope} was halted."
        await self._end(why, sentence, chosen)

    async def _make_staged(self) -> bool:
        """Make the calls that waited for the end of the turn: a person is asked about all of them together.

        Returns whether all were made. If not, the model is told, and the turn goes on.
        """
        calls = self._history.staged
        waiting = [msgspec.structs.replace(call, stage="over") for call in self._make_calls(calls)]
        answers = await self._runtime.calls(waiting)
        lines = [decide.STAGED_CALLS]
        for call, answer in zip(calls, answers, strict=True):
            text = f" ({answer.text})" if answer.outcome in REFUSAL_OUTCOMES else ""
            lines.append(f"- {call.tool} (call {call.id}): {answer.outcome}{text}")
            if self._live_context.on_call is not None:
                self._live_context.on_call(call, answer)
            if not self._is_unobserved:
                self._observer.on_result(call, answer)
        await self._add_runtime_message("staged", "\n".join(lines))
        halted = any(answer.outcome == "external_halt" for answer in answers)
        overrun = self.turn.overrun or any(answer.overrun for answer in answers)
        self.turn = msgspec.structs.replace(self.turn, halted=self.turn.halted or halted, overrun=overrun)
        return all(answer.outcome == "ok" for answer in answers)

    async def _end(self, why: TurnEnd, sentence: str, chosen: ev.YieldRequest | None) -> None:
        event = ev.TurnEnded(turn=self.turn.number, why=why, sentence=sentence, yielded=chosen)
        marks = self._mark_links()
        body = to_body(marks) if marks else None
        await self._runtime.write_all(f"{self._session}/turn/{self.turn.number}/ended", [(event, body)], goes_on=True)
        self._history.end(why, sentence, chosen, self._clock.now())

    def _mark_links(self) -> str:
        """Name the links and addresses of an answer that no trusted place said."""
        brake = self._history.brake
        marks = "" if brake is None or brake.clean else self.describe_unsaid_links(find_final_text(self.messages))
        if marks:
            self._observer.on_warning(marks)
        return marks

    def describe_unsaid_links(self, text: str) -> str:
        """Warn of links and addresses in a text that no trusted place said; nothing where there are none."""
        brake = self._history.brake
        return "" if brake is None else describe_links(brake.unsaid_links(text))

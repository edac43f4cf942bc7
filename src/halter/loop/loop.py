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
from halter.loop.session_runtime import CapListener, SessionRuntime, find_last_words, ignore
from halter.redaction.redact import mask_message
from halter.state.session import replay


class LoopObserver(msgspec.Struct, frozen=True):
    """Callbacks: an answer as it streams, the model's text, the results of its calls, a warning about an answer.

    `capped` hears of a cap that is slept for, `acts` of calls before they are made.
    """

    listen: Callable[[StreamChunk], None] | None = None
    said: Callable[[str, int], None] = ignore
    did: Callable[[ToolCall, Answer], None] = ignore
    warned: Callable[[str], None] = ignore
    capped: CapListener = ignore
    acts: Callable[[Sequence[ToolCall]], None] = ignore


class LiveContext(msgspec.Struct, frozen=True):
    """What a session knows right now: as text for a model, and as facts for a rule-based one.

    `called` receives each call of the agent's with its answer, which may be news of what is known.
    """

    volatile: ReadVolatile = str
    facts: ReadFacts = dict
    called: Callable[[ToolCall, Answer], None] | None = None


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
        "_away",
        "_chance",
        "_clock",
        "_listen",
        "_make_brake",
        "_mind",
        "_names",
        "_offered",
        "_recalled",
        "_running",
        "_senses",
        "_session",
        "_start",
        "_thinking",
        "_watching",
        "_window",
        "rules",
    )

    def __init__(
        self,
        running: SessionRuntime,
        clock: Clock,
        thinking: LoopSettings,
        chance: random.Random,
        senses: LiveContext = NO_LIVE_CONTEXT,
        watching: LoopObserver = NO_OBSERVER,
        brake: Callable[[], SessionBrake | None] = lambda: None,
    ) -> None:
        self.rules = thinking.rules
        self._running = running
        self._clock = clock
        self._thinking = thinking
        self._mind = thinking.mind
        self._chance = chance
        self._senses = senses
        self._watching = watching
        streams = thinking.mind.streaming if thinking.mind.streaming is not None else self.rules.kind == "chat"
        self._listen = watching.listen if streams else None
        # No callback receives outcomes. Otherwise these must be durable first.
        self._away = watching.said is ignore and watching.did is ignore
        self._names = thinking.names
        self._offered = thinking.offered
        self._session = running.lease.session
        self._make_brake = brake
        self._recalled = SessionHistory(self._session, thinking.rules.min_sleep, brake())
        self._start = thinking.start
        self._window = ContextWindow(self._recalled, running, clock, thinking, self._start.size)
        # Of the history, not of the loop: what refers to itself waits for the garbage collector.
        running.notes = self._recalled

    @property
    def turn(self) -> Turn:
        return self._recalled.turn

    @turn.setter
    def turn(self, turn: Turn) -> None:
        self._recalled.turn = turn

    @property
    def messages(self) -> Sequence[Message]:
        return self._recalled.transcript.messages

    @property
    def brake(self) -> SessionBrake | None:
        return self._recalled.brake

    @property
    def spent(self) -> Charge:
        return Charge(usd=self._running.spent_usd, tokens=self._running.spent_tokens)

    async def recall(self, events: Sequence[Stored]) -> None:
        await self._recalled.take_in(events, self._running.said)
        if self._recalled.given:
            self._begin_with(self._offered)

    def _begin_with(self, offered: tuple[ToolSpec, ...]) -> None:
        self._offered = offered
        self._start = build_stable_prefix(self._mind, offered, self._recalled.given)
        self._window.fixed = self._start.size

    @property
    def phase(self) -> ev.PhaseEntered | None:
        return self._recalled.phase

    async def enter(self, phase: str, number: int) -> None:
        event = ev.PhaseEntered(phase=phase, number=number, turn=self.turn.number)
        await self._running.write(f"{self._session}/phase/{number}", event)
        self._recalled.phase = event

    def offer(self, tools: tuple[ToolSpec, ...]) -> None:
        if tools is not self._offered and tools != self._offered:
            self._begin_with(tools)

    async def open(
        self, message: Message, heard: int, hot: HotStateCapture | None = None, *, quiet: bool = False
    ) -> None:
        """Begin a turn with its first message; the inbox has been read as far as `heard`.

        This is written with the turn's first step. Hot state is recorded where it differs from the previous turn's.
        """
        message = mask_message(message, self._running.redacted)
        number = self.turn.number + 1
        event = ev.TurnStarted(turn=number, inbox_seen=heard, quiet=quiet)
        happened: list[tuple[ev.AnyEvent, bytes | None]] = [(event, msgspec.json.encode(message))]
        if hot is not None and hot.body != self._recalled.hot:
            happened.append((ev.HotStateSeen(turn=number, digest=hot.digest), hot.body))
            self._recalled.hot = hot.body
        await self._running.write_all(f"{self._session}/turn/{number}", happened, goes_on=True)
        self._recalled.open(number, heard, message, self._clock.now(), quiet=quiet)

    @property
    def hot(self) -> bytes:
        return self._recalled.hot

    def rest(self, trouble: str = "") -> None:
        self.turn = self.turn.rested(self._clock.now(), trouble)

    def wake(self) -> None:
        self.turn = self.turn.woken(self._clock.now(), takeover=False)

    async def skip(self, stage: GateStage, sentence: str) -> None:
        event = ev.TurnSkipped(stage=stage, skips=self.turn.skips + 1, sentence=self._running.redacted(sentence))
        key = f"{self._session}/skip/{self.turn.number}_{event.skips}_{self._clock.now()}"
        await self._running.write(key, event)
        self.turn = self.turn.skipped(event.skips, self._clock.now())

    async def hold_back(self, guardrail: Guardrail, sentence: str, until: int | None = None) -> None:
        """Record that a guardrail ends the session, or makes it sleep until then."""
        now = self._clock.now()
        event = ev.GuardrailTriggered(guardrail=guardrail, turn=self.turn.number, sentence=sentence, until=until)
        await self._running.write(f"{self._session}/guardrail/{guardrail}/{self.turn.number}_{now}", event)
        if until is not None:
            self.turn = self.turn.held_back(now)

    async def go_on(self) -> Turn | WaitOut:
        """Take the turn's steps until it is over, or must wait because no model answers.

        The outcome of a step is committed with the next step's intent, and the turn's end with what follows: that the
        session rests, or ends.
        """
        recalled, running, clock, rules = self._recalled, self._running, self._clock, self.rules
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
                usd, tokens = running.left()
                chance = self._chance.random() if turn.failures else 1.0
                near = not turn.warned and self._near_reserve(usd, tokens)
                step = decide_next_step(turn, rules, now, worked, near_budget=near, chance=chance)
            # By its type: most are one of these two, and a pattern takes long to find that it does not match.
            if type(step) is Think:
                if step.after:
                    await running.pause(step.after)
                    usd, tokens = running.left()
                    worked = turn.time_worked(clock.now())
                volatile = self._describe_now(usd, tokens)
                room = self._window.has_room(volatile)
                if not room:
                    room, now = await self._make_room(step.model), clock.now()
                    worked = recalled.turn.time_worked(now)
                if room:
                    request, model = self._make_request(step.model, volatile, worked), self._thinking.models[step.model]
                    # Thousands of sessions may wait here: between the turn and the door there is no other frame.
                    came = await running.ask(request, model, turn.attempts, last=turn.wrapping)
                    answer = running.take(request, came)
                    if not isinstance(answer, AnsweredRequest):
                        answer = await running.ask_again(request, model, answer, turn.attempts, last=turn.wrapping)
                    now = clock.now()
                    self._hear(answer, step.model, request.nonce, now)
                    if turn.trouble and isinstance(answer, AnsweredRequest):
                        await running.recovered()
                        now = clock.now()
                        recalled.turn = recalled.turn.recovered(now)
            elif type(step) is Act:
                now = await self._act(step.calls, now, worked)
            elif type(step) is WaitOut:
                return step
            else:
                await self._take(step)
                now = clock.now()
        return recalled.turn

    async def _take(self, step: Refuse | Say | Shrink | Finish) -> None:
        match step:
            case Refuse(calls, outcome, sentence):
                await self._refuse(calls, outcome, sentence)
            case Say(reason, text):
                await self._say(reason, text)
            case Shrink():
                if not await self._window.shrink():
                    self.turn = self.turn.hopeless()
            case Finish(why, sentence):
                await self._finish(why, sentence)

    def _near_reserve(self, usd: int | None, tokens: int | None) -> bool:
        """Whether what is left to spend is down to the reserve."""
        policy = self._running.standing.policy
        if usd is not None and usd <= (policy.caps.session.max_cost_usd or 0) * policy.reserve_cost_fraction:
            return True
        return tokens is not None and tokens <= policy.reserve_tokens

    def _describe_now(self, usd: int | None, tokens: int | None) -> str:
        """What is true only for the next request."""
        left, volatile = decide.describe_remaining_budget(usd, tokens), self._senses.volatile()
        return f"{volatile}\n\n{left}" if volatile and left else volatile or left

    async def _make_room(self, model: int) -> bool:
        """Cut what the next request tells; whether it has room then."""
        if too_large := await self._window.make_room(self._names[model]):
            self.turn = self.turn.failed(self.turn.attempts, FailedAttempt(too_large), self._clock.now())
        return not too_large

    def _make_request(self, model: int, volatile: str, worked: int) -> ModelRequest:
        """Make the next request of the turn to a model."""
        turn, transcript = self._recalled.turn, self._recalled.transcript
        nonce = f"{self._chance.getrandbits(40):08x}" if self._mind.tool_calls == "text" else ""
        facts, last = self._senses.facts(), turn.wrapping
        built = build_prompt(self._start, transcript, self._mind, volatile, nonce, facts, last_words=last)
        timeout, allowed = MODEL_REQUEST_TIMEOUT, self.rules.timeout
        if allowed and (left := allowed - worked) < timeout:
            timeout = max(1, left)
        return ModelRequest(
            id=f"{self._session}.t{turn.number}_{turn.steps}",
            prompt=built.prompt,
            timeout=timeout,
            record=RequestRecord(built.ending, nonce),
            input_tokens=self._window.bound(self._names[model], built.size),
            audio_tokens=transcript.audio,
            listen=self._listen,
            discards=bool(turn.failures),
            nonce=nonce,
            goes_on=self._away and self._listen is None,
        )

    def _hear(self, answer: AnsweredRequest | RefusedRequest | FailedRequest, model: int, nonce: str, now: int) -> None:
        """Take in what came of a request, after all waits that it needs."""
        recalled = self._recalled
        if isinstance(answer, AnsweredRequest):
            reply = answer.reply
            if reply.usage is not None:
                self._window.learn(self._names[model], reply.usage.input_tokens)
            recalled.thought(reply, nonce, now)
            if answer.overrun:
                recalled.turn = msgspec.structs.replace(recalled.turn, overrun=True)
            if not self._away:
                self._watching.said(reply.text, answer.cost_usd)
            return
        turn, attempt = recalled.turn, parse_attempt(answer.request)
        match answer:
            case RefusedRequest(outcome=outcome, sentence=sentence):
                recalled.turn = turn.refused(attempt, outcome, sentence, now)
            case FailedRequest(outcome="external_halt", error=error):
                recalled.turn = turn.refused(attempt, "external_halt", error, now)
            case FailedRequest(error=error):
                failure = FailedAttempt(error, answer.may_retry, answer.retry_after, answer.needs_person)
                recalled.turn = turn.failed(attempt, failure, now)

    async def _act(self, calls: Sequence[ToolCall], now: int, worked: int) -> int:
        """Make the calls without a result: each group concurrently, one group after the other. Return the time then."""
        recalled, running, timeout = self._recalled, self._running, self.rules.timeout
        left, name = timeout - worked if timeout else None, ""
        for place, group in enumerate((calls,) if len(calls) == 1 and not recalled.done else self._list_groups(calls)):
            if place and left is not None and (left := timeout - recalled.turn.time_worked(now)) <= 0:
                return now
            members = await self._allowed(group) if self.rules.max_actions_per_minute else group
            if not members:
                continue
            if not self._away:
                self._watching.acts(members)
            if len(calls) > 1:
                name = self._name_group(members[0].group, calls)
            lone = len(members) == 1
            made = self._make_calls(members, name, left, goes_on=lone and self._away)
            if lone:
                # As with a request, there is no other frame between the turn and the door.
                tried = running.attempted(made[0], await running.begin(made[0]))
                answer = running.take_answer(tried)
                answers = (answer,) if answer is not None else await running.answers(made, (tried,))
            else:
                answers = await running.calls(made)
            self._keep(members, answers)
            now = self._clock.now()
        if running.overrun:
            self.turn = msgspec.structs.replace(self.turn, overrun=True)
        recalled.acted(now)
        return now

    def _list_groups(self, calls: Sequence[ToolCall]) -> list[Sequence[ToolCall]]:
        missing = [call for call in calls if call.id not in self._recalled.done]
        return [list(together) for _, together in groupby(missing, key=attrgetter("group"))]

    async def _allowed(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """Refuse calls beyond an autonomous agent's actions per minute."""
        now, most = self._clock.now(), self.rules.max_actions_per_minute
        room = count_allowed_calls(self._recalled.actions, now, most)
        acting = [call for call in calls if self._running.acts(call.tool)]
        for _ in acting[:room]:
            self._recalled.acts(now)
        if len(acting) <= room:
            return calls
        sentence = decide.describe_too_many_actions(most)
        event = ev.GuardrailTriggered(guardrail="max_actions_per_minute", turn=self.turn.number, sentence=sentence)
        key = f"{self._session}/brisk/{self.turn.number}_{self.turn.steps}_{calls[0].group}"
        await self._running.write(key, event)
        answers = await self._running.refuse(self._make_calls(acting[room:]), "rate_limited", sentence)
        self._keep(acting[room:], answers)
        return [call for call in calls if call not in acting[room:]]

    async def _refuse(self, calls: Sequence[ToolCall], outcome: Outcome, sentence: str) -> None:
        """Answer calls that are not made. Those done before the deadline, or before a crash, stay done."""
        missing = [call for call in calls if call.id not in self._recalled.done]
        if missing:
            answers = await self._running.refuse(self._make_calls(missing), outcome, sentence)
            self._keep(missing, answers)
        self._recalled.acted(self._clock.now())

    def _keep(self, calls: Sequence[ToolCall], answers: Sequence[Answer]) -> None:
        recalled, called = self._recalled, self._senses.called
        for place, call in enumerate(calls):
            answer = answers[place]
            recalled.keep(call, answer.outcome, answer.text, answer.partial)
            if answer.staged:
                recalled.staged += (call,)
            if answer.overrun:
                self.turn = msgspec.structs.replace(self.turn, overrun=True)
            if called is not None:
                called(call, answer)
            if not self._away:
                self._watching.did(call, answer)
                if answer.outcome == "ok" and call.tool.startswith(decide.HAND_OFF):
                    self._watching.said(answer.text, 0)

    def _name_group(self, group: int, calls: Sequence[ToolCall]) -> str:
        """Name the group of calls that had company when they were asked for."""
        turn = self._recalled.turn
        company = sum(call.group == group for call in calls) > 1
        return f"{self._session}.t{turn.number}_{turn.steps}_{group}" if company else ""

    def _make_calls(
        self, asked: Sequence[ToolCall], group: str = "", at_most: int | None = None, *, goes_on: bool = False
    ) -> Sequence[Call]:
        recalled = self._recalled
        return [
            Call(
                id=call_id(self._session, call),
                tool=call.tool,
                arguments=to_body(call.arguments),
                parallel_group=group,
                at_most=at_most,
                goes_on=goes_on,
                situation=recalled.situation,
                brake=recalled.brake,
                stage="may",
            )
            for call in asked
        ]

    async def _say(self, reason: MessageReason, text: str) -> None:
        """Tell the model something, once per step. After an erasure there is no other count."""
        event = ev.MessageAdded(turn=self.turn.number, reason=reason)
        key = f"{self._session}/message/{self.turn.number}_{self.turn.steps}_{reason}"
        await self._running.write(key, event, to_body(text))
        self._recalled.add(reason, text, self._clock.now())

    async def interrupt(self, sentence: str) -> bool:
        """End the turn where its task was cancelled; return whether it is over.

        What is true then is in the journal alone. A turn with an effect in doubt stays open, and is gone on with.
        """
        events = await self._running.events()
        if replay(events).in_flight:
            return False
        self._recalled = SessionHistory(self._session, self.rules.min_sleep, self._make_brake())
        self._running.notes = self._recalled
        await self._recalled.take_in(events, self._running.said)
        if self.turn.over:
            return True
        if self.turn.calls:
            await self._refuse(self.turn.calls, "cancelled", sentence)
        await self._end("cancelled", sentence, None)
        return True

    async def _finish(self, why: TurnEnd, sentence: str) -> None:
        """Record how the turn ended, after what waited for its end. A halt takes precedence over any other end."""
        chosen = self.turn.yielded if why == "yielded" else None
        if self._recalled.staged and why not in ("external_halt", "cancelled") and not await self._make_staged():
            return
        halt = None if why in ("ended", "asked", "yielded") else await self._running.halted()
        if halt is not None:
            why, sentence = ("cancelled" if halt.cancels else "external_halt"), sentence or f"{halt.scope} was halted."
        await self._end(why, sentence, chosen)

    async def _make_staged(self) -> bool:
        """Make the calls that waited for the end of the turn: a person is asked about all of them together.

        Returns whether all were made. If not, the model is told, and the turn goes on.
        """
        calls = self._recalled.staged
        waiting = [msgspec.structs.replace(call, stage="over") for call in self._make_calls(calls)]
        answers = await self._running.calls(waiting)
        lines = [decide.STAGED_CALLS]
        for call, answer in zip(calls, answers, strict=True):
            said = f" ({answer.text})" if answer.outcome in REFUSAL_OUTCOMES else ""
            lines.append(f"- {call.tool} (call {call.id}): {answer.outcome}{said}")
            if self._senses.called is not None:
                self._senses.called(call, answer)
            if not self._away:
                self._watching.did(call, answer)
        await self._say("staged", "\n".join(lines))
        halted = any(answer.outcome == "external_halt" for answer in answers)
        overrun = self.turn.overrun or any(answer.overrun for answer in answers)
        self.turn = msgspec.structs.replace(self.turn, halted=self.turn.halted or halted, overrun=overrun)
        return all(answer.outcome == "ok" for answer in answers)

    async def _end(self, why: TurnEnd, sentence: str, chosen: ev.YieldRequest | None) -> None:
        event = ev.TurnEnded(turn=self.turn.number, why=why, sentence=sentence, yielded=chosen)
        marks = self._mark_links()
        body = to_body(marks) if marks else None
        await self._running.write_all(f"{self._session}/turn/{self.turn.number}/ended", [(event, body)], goes_on=True)
        self._recalled.end(why, sentence, chosen, self._clock.now())

    def _mark_links(self) -> str:
        """Name the links and addresses of an answer that no trusted place said."""
        brake = self._recalled.brake
        marks = "" if brake is None or brake.clean else self.describe_unsaid_links(find_last_words(self.messages))
        if marks:
            self._watching.warned(marks)
        return marks

    def describe_unsaid_links(self, text: str) -> str:
        """Warn of links and addresses in a text that no trusted place said; nothing where there are none."""
        brake = self._recalled.brake
        return "" if brake is None else describe_links(brake.unsaid_links(text))

"""The pace of an agent that runs by itself.

    before a turn   a halt ends it; outside of its hours it sleeps on
                    stale facts that ask for it are refreshed
                    the gate: has anything changed that is worth a turn?
    the turn        as every turn: think, act, think again, yield
    after it        the guardrails, whatever the model said

What it decides by is in the journal, so it survives a crash like everything else.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from halter.autonomy import gate as gates
from halter.autonomy.awareness import Awareness
from halter.autonomy.gate import Skip, gate_answer, gate_prompt, open_gate
from halter.autonomy.hotstate import FieldChange, Refused, Seen, changes
from halter.autonomy.hours import Hours, asleep_until
from halter.brain import words
from halter.brain.decide import After, End, Park
from halter.brain.loop import Hot, Loop
from halter.brain.session_runtime import SessionRuntime
from halter.brain.turn import TROUBLE
from halter.core.clock import SECOND, Clock
from halter.core.durations import shown_duration
from halter.core.expressions import Expression
from halter.core.messages import Model, Text
from halter.core.pacing import Gate, HotField, Pacing
from halter.core.sensing import HealthReport
from halter.core.text import to_body
from halter.guard.ask import Call
from halter.guard.chokepoint import Answer
from halter.guard.request import Answered, Request
from halter.work.conversation import News, Open

GATE_TIMEOUT: Final = 30 * SECOND


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent's file says of its pace, made ready: compiled, parsed, with the gate's model at hand."""

    pacing: Pacing
    hours: Hours | None = None
    gate_expression: Expression | None = None
    gate_model: Model | None = None

    @property
    def gate(self) -> Gate | None:
        """The gate, if there is one."""
        return None if self.pacing.autonomy.gate is UNSET else self.pacing.autonomy.gate


class Paced:
    """Decides when a session that runs by itself takes its turns."""

    def __init__(self, running: SessionRuntime, loop: Loop, clock: Clock, terms: Terms, aware: Awareness) -> None:
        self._running = running
        self._loop = loop
        self._clock = clock
        self._terms = terms
        self._limits = terms.pacing.autonomy
        self._aware = aware

    def show(self, notes: Sequence[Text]) -> None:
        """Let the turn see these alerts."""
        self._aware.show(notes)

    async def go_on(self, notes: Sequence[Text]) -> None:
        """Go on with a turn of an earlier owner: what it knew may be old by now, and is refreshed before it acts."""
        self._aware.show(notes)
        await self._refresh()

    async def before(self, news: News) -> Open | Park | End:
        """Decide whether this wake is worth a turn."""
        stopped = await self._stopped(news)
        if stopped is not None:
            return stopped
        await self._refresh()
        seen = self._aware.hot.seen()
        before = Seen.from_bytes(self._loop.hot) if self._loop.hot else None
        changed = changes(before, seen)
        if self._idles() and not (news.pending or changed):
            return await self._idle()
        skip = await self._gate(news, changed, before, seen)
        if skip is not None:
            await self._loop.skip(skip.stage, skip.sentence)
            return await self._kept(self._sleep_on())
        own = (Text(self._limits.prompt or words.OBSERVE, "config", reason="observe"),)
        # What the session before it left does not stand in for what the agent is there for.
        follows = self._running.state.follows and not self._loop.turn.number
        opening = (*news.said, *own) if follows else news.said or own
        hot = Hot(seen.to_bytes(), seen.digest) if self._terms.pacing.fields else None
        return Open((*self._trouble(), *opening), hot, quiet=not (news.pending or changed))

    async def after(self, then: After) -> After:
        """Hold an agent back that never sleeps."""
        turns, most = self._loop.turn.brisk, self._limits.max_consecutive_turns
        if isinstance(then, End):
            return then
        if turns < most:
            return await self._kept(then) if isinstance(then, Park) else then
        sleep = self._limits.max_sleep // 24
        sentence = f"It took {turns} turns without a sleep, and is put to sleep for {shown_duration(sleep)}."
        await self._loop.hold_back("max_consecutive_turns", sentence, self._clock.now() + sleep)
        return await self._kept(Park("SLEEPING", sleep))

    async def _stopped(self, news: News) -> Park | End | None:
        """A halt and a cap that was passed end the session. Outside of its hours only a person gives it a turn."""
        halt = await self._running.halted()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._running.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        now = self._clock.now()
        until = None if self._terms.hours is None else asleep_until(self._terms.hours, now)
        if until is None or news.personal:
            return None
        sentence = f"It is outside of its active hours, and sleeps for {shown_duration(until - now)}."
        await self._loop.hold_back("active_hours", sentence, until)
        return await self._kept(Park("SLEEPING", until - now))

    def _idles(self) -> bool:
        return 0 < self._limits.idle_timeout <= self._loop.turn.idle

    async def _idle(self) -> End:
        awake = shown_duration(self._loop.turn.idle)
        sentence = f"For {awake} it was awake without a call, a change or a message, so it is shut down."
        await self._loop.hold_back("idle_timeout", sentence)
        return End("COMPLETED", "idle_timeout")

    def _trouble(self) -> tuple[Text, ...]:
        """An agent that nobody watches is told what stopped its last turn. The words may be a provider's."""
        turn = self._loop.turn
        if turn.why not in TROUBLE:
            return ()
        return (Text(words.stopped(turn.sentence), "config", trusted=False, reason="trouble"),)

    async def _gate(self, news: News, changed: Sequence[FieldChange], before: Seen | None, seen: Seen) -> Skip | None:
        """Ask the gate; None is a turn. The first turn, one that was asked for, and one after trouble are worth it."""
        turn, gate = self._loop.turn, self._terms.gate
        goes_on = turn.yielded is not None and turn.yielded.mode == "continue"
        verdict = open_gate(
            gate,
            changed=changed,
            pending=news.pending or not turn.number or goes_on or turn.why in TROUBLE,
            skips=turn.skips,
            expression=self._terms.gate_expression,
            before={} if before is None else before.values,
            hot=seen.values,
        )
        if isinstance(verdict, gates.AskModel) and gate is not None and self._terms.gate_model is not None:
            verdict = await self._asked(gate, self._terms.gate_model, changed)
        return verdict if isinstance(verdict, Skip) else None

    async def _asked(self, gate: Gate, model: Model, changed: Sequence[FieldChange]) -> gates.Open | Skip:
        """Let a small model look at what changed; one that fails is open."""
        request = Request(
            id=f"{self._running.lease.session}.g{self._loop.turn.number}_{self._clock.now()}",
            prompt=gate_prompt(gate, changed),
            purpose="gate",
            timeout=GATE_TIMEOUT,
            optional=True,
        )
        answer = await self._running.request(request, model)
        return gate_answer(answer.reply) if isinstance(answer, Answered) else gates.Open()

    def _sleep_on(self) -> Park:
        """Sleep once more as the agent chose; if it did not, a little longer each time."""
        rules, turn = self._loop.rules, self._loop.turn
        if turn.yielded is not None and turn.yielded.mode == "sleep":
            sleep = min(max(turn.yielded.sleep, rules.min_sleep), rules.max_sleep)
            return Park("SLEEPING", sleep, turn.yielded.wake_early_if)
        longer = rules.min_sleep * 2 ** min(turn.pauses + turn.skips, 40)
        return Park("SLEEPING", min(rules.max_sleep, longer))

    async def _kept(self, park: Park) -> Park:
        """Keep what is known before the session is let go: whoever takes it up next begins with that."""
        if self._terms.pacing.fields and not self._terms.pacing.sensors:
            await self._running.keep(self._aware.hot.snapshot())
        return park

    async def _refresh(self) -> None:
        """Refresh what is stale and asks for it. What fails leaves what was known, which is told as stale."""
        now = self._clock.now()
        for name in self._aware.hot.due(now):
            field = self._terms.pacing.fields[name]
            problem = await self._refreshed(name, field, now)
            health = "failing" if problem else "ok"
            report = HealthReport(sensor=f"{name} ({field.refresh_tool})", health=health, since=now, sentence=problem)
            self._aware.hear(report)

    async def _refreshed(self, name: str, field: HotField, now: int) -> str:
        """Ask a field's tool for its value; return what is wrong with that, if something is."""
        tool = str(field.refresh_tool)
        arguments = msgspec.json.encode(dict(field.refresh_params))
        session, turn = self._running.lease.session, self._loop.turn.number
        answer = await self._running.look(Call(f"{session}.f{turn}_{now}_{name}", tool, arguments, "sensor"))
        if not isinstance(answer, Answer):
            return f"{tool} needs a person, or money that others hold."
        if answer.outcome != "ok":
            return answer.text
        put = self._aware.hot.put(name, value_of(answer.text), self._clock.now(), by=tool)
        return put.sentence if isinstance(put, Refused) else ""


def value_of(text: str) -> Any:
    """Read what a tool or a source said: JSON, if it is that, and otherwise its words."""
    try:
        return msgspec.json.decode(to_body(text))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text

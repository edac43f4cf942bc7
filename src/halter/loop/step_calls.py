"""The calls of a step: in which order they are made, and how their answers become results.

The calls of a group run concurrently, and the groups one after the other. A call that waits for a person is staged:
the calls after it that may depend on it wait until it is made, or the turn ends.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from halter.core.events import GuardrailTriggered
from halter.core.messages import ToolCall
from halter.core.text import encode_body
from halter.core.vocabulary import Outcome
from halter.guard.call_answer import Answer
from halter.guard.judge import describe_too_many_actions
from halter.guard.prepare import Call
from halter.loop.decide import TurnLimits
from halter.loop.history import SessionHistory, call_id
from halter.loop.observer import LiveContext, LoopObserver
from halter.loop.runtime_messages import describe_unmade_call
from halter.loop.session_runtime import SessionRuntime
from halter.loop.turn import HAND_OFF


class StepCalls:
    """Makes the calls of the steps of one session, and adds their results to its history."""

    __slots__ = ("_is_observed", "_observer", "_on_call", "_read_time", "_rules", "_runtime", "history")

    def __init__(
        self,
        history: SessionHistory,
        runtime: SessionRuntime,
        rules: TurnLimits,
        read_time: Callable[[], int],
        live_context: LiveContext,
        observer: LoopObserver,
    ) -> None:
        self.history = history
        self._runtime = runtime
        self._rules = rules
        self._read_time = read_time
        self._on_call = live_context.on_call
        self._observer = observer
        self._is_observed = observer.reads_outcomes

    def prepare(self, call: ToolCall, group: str = "", timeout: int | None = None, *, can_defer: bool = False) -> Call:
        """Prepare a call of the model for the guard."""
        history = self.history
        return Call(
            id=call_id(history.session, call),
            tool=call.tool,
            arguments=encode_body(call.arguments),
            parallel_group=group,
            timeout=timeout,
            can_defer=can_defer,
            describe_situation=history.situation,
            provenance_check=history.provenance_check,
            staging="allowed",
        )

    def add_result(self, call: ToolCall, answer: Answer) -> None:
        history = self.history
        history.add_result(call, answer.outcome, answer.text, answer.partial, answer.files)
        if answer.staged:
            history.staged += (call,)
        if answer.overrun:
            history.turn = msgspec.structs.replace(history.turn, overrun=True)
        if self._on_call is not None:
            self._on_call(call, answer)
        if self._is_observed:
            self._observer.on_result(call, answer)
            if answer.outcome == "ok" and call.tool.startswith(HAND_OFF):
                self._observer.on_text(answer.text, 0)

    async def make_groups(self, calls: Sequence[ToolCall], max_duration: int | None) -> bool:
        """Make the calls without a result, group by group; return whether the time was enough for all of them."""
        missing = [call for call in calls if call.id not in self.history.done]
        groups = [list(members) for _, members in groupby(missing, key=attrgetter("group"))]
        for index, members in enumerate(groups):
            if index and max_duration is not None:
                max_duration = self._find_remaining_time()
                if max_duration <= 0:
                    return False
            if self._is_observed:
                self._observer.on_calls(members)
            answers = await self._make_group(members, calls, max_duration)
            if len(answers) < len(members):
                return False
            if self._rules.max_actions_per_minute:
                await self.record_limit(answers, members[0].group)
        return True

    async def _make_group(
        self, members: Sequence[ToolCall], calls: Sequence[ToolCall], max_duration: int | None
    ) -> Sequence[Answer]:
        """Make the calls of a group. A group whose order must be kept ends early if the turn's time is up."""
        group_name = self._name_group(members[0].group, calls)
        can_defer = len(members) == 1 and not self._is_observed
        guard_calls = [self.prepare(call, group_name, max_duration, can_defer=can_defer) for call in members]
        if self._must_keep_order(calls):
            return await self._make_one_by_one(members, guard_calls)
        answers = await self._runtime.calls(guard_calls)
        for call, answer in zip(members, answers, strict=True):
            self.add_result(call, answer)
        return answers

    def _find_remaining_time(self) -> int:
        return self._rules.timeout - self.history.turn.time_worked(self._read_time())

    def _name_group(self, group: int, calls: Sequence[ToolCall]) -> str:
        """Return the name of a parallel group; empty for a group with a single call."""
        turn = self.history.turn
        has_siblings = sum(call.group == group for call in calls) > 1
        return f"{self.history.session}.t{turn.number}_{turn.steps}_{group}" if has_siblings else ""

    def _must_keep_order(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether the calls of a step must be made one after the other, each to its end.

        They must if a staged call is before them, or if the provenance check may hold one of them back.
        """
        history = self.history
        if history.staged or history.decided:
            return True
        check = history.provenance_check
        return check is not None and len(calls) > 1 and any(check.keeps_order(call.tool) for call in calls)

    async def _make_one_by_one(self, calls: Sequence[ToolCall], guard_calls: Sequence[Call]) -> Sequence[Answer]:
        """Make calls one after the other, until the turn's time is up.

        Before the first call that may depend on a staged one, the staged calls are made.
        """
        answers: list[Answer] = []
        for index, call in enumerate(calls):
            following = guard_calls[index:]
            if self._rules.timeout:
                remaining = self._find_remaining_time()
                if remaining <= 0:
                    break
                following = [msgspec.structs.replace(each, timeout=remaining) for each in following]
            if self.history.staged and await self._runtime.depends_on_staged(following[0]):
                await self.make_staged(following)
            answer = await self._make_first(following)
            self.add_result(call, answer)
            answers.append(answer)
        return answers

    async def _make_first(self, calls: Sequence[Call]) -> Answer:
        """Make the first of some calls, or refuse it if a call before it was not made.

        A person's answer to a question about this very call counts, whatever came of those before it.
        """
        unmade_call = self.history.find_unmade_call()
        if unmade_call is None or await self._runtime.has_question(calls[0]):
            return await self._runtime.call_before(calls[0], calls[1:])
        (answer,) = await self._runtime.refuse(calls[:1], "cancelled", describe_unmade_call(unmade_call))
        return answer

    async def make_staged(self, following: Sequence[Call] = ()) -> None:
        """Make the staged calls in their order. One question asks a person about all of them, and what follows."""
        history = self.history
        calls = history.staged
        staged_calls = [msgspec.structs.replace(self.prepare(call), staging="due") for call in calls]
        for index, call in enumerate(calls):
            answer = await self._make_first([*staged_calls[index:], *following])
            history.settle_staged(call, answer.outcome, answer.text, answer.partial, answer.files)
            history.turn = msgspec.structs.replace(
                history.turn,
                halted=history.turn.halted or answer.outcome == "external_halt",
                overrun=history.turn.overrun or answer.overrun,
            )
            if self._on_call is not None:
                self._on_call(call, answer)
            if self._is_observed:
                self._observer.on_result(call, answer)

    async def refuse(self, calls: Sequence[ToolCall], outcome: Outcome, sentence: str) -> None:
        """Refuse the calls without a result. The results of the other calls stay."""
        missing = [call for call in calls if call.id not in self.history.done]
        if missing:
            answers = await self._runtime.refuse([self.prepare(call) for call in missing], outcome, sentence)
            for call, answer in zip(missing, answers, strict=True):
                self.add_result(call, answer)
        self.history.finish_step(self._read_time())

    async def record_limit(self, answers: Sequence[Answer], group: int) -> None:
        """Record that the guard refused calls of a group beyond the agent's actions per minute."""
        turn, session, limit = self.history.turn, self.history.session, self._rules.max_actions_per_minute
        sentence = describe_too_many_actions(session, self._runtime.lease.stream, limit)
        if any(answer.outcome == "rate_limited" and answer.text == sentence for answer in answers):
            event = GuardrailTriggered(guardrail="max_actions_per_minute", turn=turn.number, sentence=sentence)
            await self._runtime.write(f"{session}/brisk/{turn.number}_{turn.steps}_{group}", event)

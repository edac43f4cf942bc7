"""Decides when an autonomous agent takes a turn. Order: halt, active hours, refresh stale facts, gate, turn, limits.

The decisions depend only on the journal, so they survive a crash.

Active hours are local: each day has one period from `start` to `end`. A change to or from daylight saving time moves
the ends of the period and never splits it: a repeated time counts the first time, and a skipped time is the first
moment after it.

The gate is the cheap check before a full turn. It can only decide against a turn; if it fails, the turn is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.autonomy.hot_state import FieldChange, HotStateSnapshot, LiveFacts
from halter.autonomy.upkeep import ProgressEvent, count_fruitless_turns
from halter.core.clock import SECOND, Clock, format_duration
from halter.core.codec import decode
from halter.core.ids import Digest, session_stream
from halter.core.messages import Model, Prompt, Reply, Text
from halter.core.ports import Query, Store
from halter.core.rows import SessionRow
from halter.core.text import clean, shorten
from halter.core.vocabulary import GateStage
from halter.expressions import EvaluationFailure, Expression, to_cel_value
from halter.guard.call_answer import Answer
from halter.guard.prepare import Call
from halter.guard.request import AnsweredRequest, ModelRequest
from halter.loop.decide import End, NextTurn, Park, SessionStep, find_backoff
from halter.loop.loop import TurnLoop
from halter.loop.observer import HotStateCapture
from halter.loop.prompt import MAX_DATA_LENGTH, Worth, make_question_prompt, read_form_answer
from halter.loop.runtime_messages import OBSERVE_TURN, describe_last_stop
from halter.loop.session_runtime import SessionRuntime
from halter.loop.text_calls import cut_text, encode_canonical, is_equal_json, to_json_line
from halter.loop.turn import TROUBLED_ENDS
from halter.policy.hours import Hours, find_wake_time
from halter.spec.autonomy import Gate, HotField, Pacing
from halter.tasks.conversation import Inbox, OpenTurn


class _StoredProgress(msgspec.Struct, frozen=True):
    kind: str
    version: int
    facts: bytes
    body: bytes | None = None
    blob: Digest | None = None


_MAX_PROGRESS_EVENTS: Final = 1000
"""Number of the newest turns and calls of a session that are searched for progress."""


async def read_progress(store: Store, session: str) -> Sequence[ProgressEvent]:
    """Read the newest turns, calls and caps of a session, in order."""
    params = {"stream": session_stream(session), "limit": _MAX_PROGRESS_EVENTS}
    rows = await store.ask(Query("progress_of", _StoredProgress, params))
    return [
        (decode(row.kind, row.version, row.facts), (row.body or b"") if row.blob is None else row.blob.encode())
        for row in reversed(rows)
    ]


_MAX_DROPPED: Final = 100
"""Maximum number of dropped items at the start of a list that a difference recognises."""


class FieldDifference(msgspec.Struct, frozen=True):
    """A path in a value, with the values before and after; UNSET for none."""

    path: str
    before: Any | UnsetType
    after: Any | UnsetType

    def to_display(self, limit: int) -> Mapping[str, Any]:
        """Return the difference as JSON for the prompt, with each value cut to `limit` characters."""
        sides = {"before": self.before, "after": self.after}
        short_sides = {side: _shorten(value, limit) for side, value in sides.items() if value is not UNSET}
        return {"at": cut_text(self.path, limit), **short_sides}


def _shorten(value: Any, limit: int) -> Any:
    value_json = to_json_line(value)
    return value if len(value_json) <= limit else cut_text(value_json, limit)


def diff_json(path: str, before: Any, after: Any) -> Iterator[FieldDifference]:
    """Yield the paths at which two values differ. Numbers are compared as numbers."""
    match before, after:
        case dict(), dict():
            yield from _diff_objects(path, cast("dict[str, Any]", before), cast("dict[str, Any]", after))
        case list(), list():
            yield from _diff_lists(path, cast("list[Any]", before), cast("list[Any]", after))
        case _ if UNSET in (before, after) or not is_equal_json(before, after):
            yield FieldDifference(path, before, after)
        case _:
            return


def _diff_objects(path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[FieldDifference]:
    for key in (*before, *(key for key in after if key not in before)):
        yield from diff_json(f"{path}.{key}", before.get(key, UNSET), after.get(key, UNSET))


def _diff_lists(path: str, before: list[Any], after: list[Any]) -> Iterator[FieldDifference]:
    """Yield appended items if old ones were only dropped from the start, and otherwise the differences by index."""
    old_items, new_items = [encode_canonical(item) for item in before], [encode_canonical(item) for item in after]
    dropped_count = _count_dropped(old_items, new_items)
    if dropped_count is not None:
        for index in range(len(old_items) - dropped_count, len(new_items)):
            yield FieldDifference(f"{path}[{index}]", UNSET, after[index])
        return
    for index in range(max(len(before), len(after))):
        yield from diff_json(f"{path}[{index}]", _item_or_unset(before, index), _item_or_unset(after, index))


def _count_dropped(old_items: Sequence[bytes], new_items: Sequence[bytes]) -> int | None:
    """Return the number of dropped oldest items if the only other change is new items at the end, else None."""
    for dropped_count in range(min(len(old_items), _MAX_DROPPED)):
        overlap_count = len(old_items) - dropped_count
        if overlap_count <= len(new_items) and old_items[dropped_count:] == new_items[:overlap_count]:
            return dropped_count if overlap_count < len(new_items) else None
    return None


def _item_or_unset(items: Sequence[Any], index: int) -> Any:
    return items[index] if index < len(items) else UNSET


MAX_DIFFERENCES: Final = 40
"""Maximum number of differences in a prompt, shared evenly among fields: no field can hide another."""
MAX_SIDE_LENGTH: Final = 500
"""Maximum number of characters of each side of a difference."""

_MAX_REASON_LENGTH: Final = 300

_GATE_INSTRUCTIONS: Final = (
    "An agent is asleep. You see the facts that changed since its last turn. Decide whether they justify waking it. If "
    "in doubt, wake it."
)


class GateOpen(msgspec.Struct, frozen=True):
    """Take the turn. The sentence is set if the gate failed."""

    sentence: str = ""


class GateSkip(msgspec.Struct, frozen=True):
    """Take no turn. `stage` is the part of the gate that decided it."""

    stage: GateStage
    sentence: str


class AskGateModel(msgspec.Struct, frozen=True):
    """Ask the gate's model."""


def open_gate(
    gate: Gate | None,
    *,
    changed: Sequence[FieldChange],
    pending: bool,
    skips: int,
    expression: Expression | None,
    before: Mapping[str, Any] | None,
    hot: Mapping[str, Any],
) -> GateOpen | GateSkip | AskGateModel:
    """Decide whether to take a turn. `before` are the values of the last full turn, or None."""
    if gate is None or pending or before is None or 0 < gate.max_skips <= skips:
        return GateOpen()
    if gate.on == "change" and not changed:
        return GateSkip("change", "Nothing has changed since the last turn.")
    if expression is not None:
        names = [change.name for change in changed]
        context = {"hot": to_cel_value(hot), "before": to_cel_value(before), "changed": names, "skips": skips}
        verdict = _decide_by_value(expression, expression.value(context))
        if verdict is not None:
            return verdict
    return AskGateModel() if gate.model else GateOpen()


def _decide_by_value(expression: Expression, value: Any) -> GateOpen | GateSkip | None:
    """Return the decision of an expression's value; None if the next part of the gate decides."""
    match value:
        case True:
            return None
        case False:
            return GateSkip("expression", f"`{expression.text}` is false.")
        case EvaluationFailure(sentence=sentence):
            return GateOpen(f"Gate open: {sentence}")
        case _:
            return GateOpen(f"Gate open: `{expression.text}` is neither true nor false.")


def build_gate_prompt(gate: Gate, changes: Sequence[FieldChange]) -> Prompt:
    """Build the prompt that asks the gate's model whether a turn is worth it; it shows only the differences."""
    field_limit = max(1, MAX_DIFFERENCES // max(1, len(changes)))
    differences_by_field = [list(diff_json(change.name, change.before, change.after)) for change in changes]
    prompt_differences = [difference for field in differences_by_field for difference in field[:field_limit]][
        :MAX_DIFFERENCES
    ]
    side_limit = min(MAX_SIDE_LENGTH, MAX_DATA_LENGTH // (4 * max(1, len(prompt_differences))))
    data = {
        "changed": [difference.to_display(side_limit) for difference in prompt_differences],
        "more": sum(map(len, differences_by_field)) - len(prompt_differences),
    }
    return make_question_prompt(f"{_GATE_INSTRUCTIONS}\n\n{gate.prompt}", data, Worth)


def parse_gate_answer(reply: Reply) -> GateOpen | GateSkip:
    """Parse the model's answer. Anything but a clear no opens the gate."""
    match read_form_answer(reply, Worth):
        case None:
            return GateOpen("Gate open: the model's answer does not have the required form.")
        case Worth(open=True):
            return GateOpen()
        case Worth(reason=reason):
            return GateSkip(
                "model", shorten(clean(reason), _MAX_REASON_LENGTH) or "The gate's model decided against a turn."
            )


GATE_TIMEOUT: Final = 30 * SECOND


class PaceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's pacing, compiled and parsed, with the gate's model."""

    pacing: Pacing
    hours: Hours | None = None
    gate_expression: Expression | None = None
    gate_model: Model | None = None

    @property
    def gate(self) -> Gate | None:
        return None if self.pacing.autonomy.gate is UNSET else self.pacing.autonomy.gate


class AutonomousPace:
    """The turn policy of an autonomous session."""

    def __init__(
        self, runtime: SessionRuntime, loop: TurnLoop, clock: Clock, terms: PaceTerms, hot_view: LiveFacts
    ) -> None:
        self._runtime = runtime
        self._loop = loop
        self._clock = clock
        self._terms = terms
        self._limits = terms.pacing.autonomy
        self._hot_view = hot_view

    def show(self, notes: Sequence[Text]) -> None:
        self._hot_view.show(notes)

    async def continue_turn(self, notes: Sequence[Text]) -> None:
        """Continue a turn of an earlier owner; refresh stale facts before it acts."""
        self._hot_view.show(notes)
        await self._refresh()

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        stop = await self._find_stop(inbox)
        if stop is not None:
            return stop
        await self._refresh()
        current = self._hot_view.hot.make_snapshot()
        previous = HotStateSnapshot.from_bytes(self._loop.hot) if self._loop.hot else None
        changes = self._hot_view.changes_since(previous, current)
        is_idle = 0 < self._limits.idle_timeout <= self._loop.turn.idle_time
        if is_idle and not (inbox.pending or changes):
            return await self._idle()
        skip = await self._gate(inbox, changes, previous, current)
        if skip is not None:
            await self._loop.skip(skip.stage, skip.sentence)
            return await self._save_before_park(self._sleep_on())
        own_prompt = (Text(self._limits.prompt or OBSERVE_TURN, "config", reason="observe"),)
        # A handover is added to the agent's own prompt, and does not replace it.
        is_handover = self._runtime.began.follows and not self._loop.turn.number
        opening = (*inbox.messages, *own_prompt) if is_handover else inbox.messages or own_prompt
        hot = HotStateCapture(current.to_bytes(), current.digest) if self._terms.pacing.fields else None
        self._hot_view.open_turn()
        return OpenTurn((*self._trouble(), *opening), hot, quiet=not (inbox.pending or changes))

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        if self._loop.turn.why in TROUBLED_ENDS and not isinstance(step, NextTurn):
            step = await self._decide_after_bad_turn(step)
        turns, limit = self._loop.turn.sleepless_turn_count, self._limits.max_consecutive_turns
        if isinstance(step, End):
            return step
        if turns < limit:
            return await self._save_before_park(step) if isinstance(step, Park) else step
        sleep = self._limits.max_sleep // 24
        sentence = f"The agent took {turns} turns without a sleep; it sleeps for {format_duration(sleep)}."
        await self._loop.record_guardrail("max_consecutive_turns", sentence, self._clock.now() + sleep)
        return await self._save_before_park(Park("SLEEPING", sleep))

    async def _decide_after_bad_turn(self, step: Park | End) -> Park | End:
        """Back off after bad turns in a row without progress only. One that did something new is like any other."""
        await self._runtime.flush_deferred()
        session = self._runtime.lease.session
        count = count_fruitless_turns(SessionRow(session), await read_progress(self._runtime.store, session))
        if not count:
            return Park("SLEEPING", self._loop.rules.min_sleep)
        backoff = find_backoff(count)
        if backoff is None:
            return step
        sleep = max(backoff, self._loop.rules.min_sleep)
        return Park("SLEEPING", sleep)

    async def _find_stop(self, inbox: Inbox) -> Park | End | None:
        """End the session on a halt or an overrun. Park it outside active hours, unless a person sent a message."""
        halt = await self._runtime.find_halt()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._runtime.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        now = self._clock.now()
        wake_at = None if self._terms.hours is None else find_wake_time(self._terms.hours, now)
        if wake_at is None or inbox.personal:
            return None
        sentence = f"Outside active hours; the agent sleeps for {format_duration(wake_at - now)}."
        await self._loop.record_guardrail("active_hours", sentence, wake_at)
        return await self._save_before_park(Park("SLEEPING", wake_at - now))

    async def _idle(self) -> End:
        awake = format_duration(self._loop.turn.idle_time)
        sentence = f"Ended after {awake} without a call, a change or a message."
        await self._loop.record_guardrail("idle_timeout", sentence)
        return End("COMPLETED", "idle_timeout")

    def _trouble(self) -> tuple[Text, ...]:
        """Describe what stopped the last turn, for an unattended agent. The text may come from a provider."""
        turn = self._loop.turn
        if turn.why not in TROUBLED_ENDS:
            return ()
        return (Text(describe_last_stop(turn.sentence), "config", trusted=False, reason="trouble"),)

    async def _gate(
        self, inbox: Inbox, changes: Sequence[FieldChange], previous: HotStateSnapshot | None, current: HotStateSnapshot
    ) -> GateSkip | None:
        """Check the gate; return None for a turn. The first turn, a requested one, and one after trouble pass."""
        turn, gate = self._loop.turn, self._terms.gate
        wants_to_continue = turn.yielded is not None and turn.yielded.mode == "continue"
        verdict = open_gate(
            gate,
            changed=changes,
            pending=inbox.pending or not turn.number or wants_to_continue or turn.why in TROUBLED_ENDS,
            skips=turn.skip_count,
            expression=self._terms.gate_expression,
            before={} if previous is None else previous.values,
            hot=current.values,
        )
        if isinstance(verdict, AskGateModel) and gate is not None and self._terms.gate_model is not None:
            verdict = await self._ask_gate(gate, self._terms.gate_model, changes)
        return verdict if isinstance(verdict, GateSkip) else None

    async def _ask_gate(self, gate: Gate, model: Model, changes: Sequence[FieldChange]) -> GateOpen | GateSkip:
        """Ask the gate's model once about the same differences since the last turn; on failure the gate is open.

        The id of the request has a digest of the question, so that at the next wake any process finds the answer in
        the journal.
        """
        prompt = build_gate_prompt(gate, changes)
        question = sha256(msgspec.json.encode((prompt.system, prompt.messages))).hexdigest()[:16]
        request = ModelRequest(
            id=f"{self._runtime.lease.session}.g{self._loop.turn.number}_{question}",
            prompt=prompt,
            purpose="gate",
            timeout=GATE_TIMEOUT,
            optional=True,
        )
        answer = await self._runtime.request(request, model)
        return parse_gate_answer(answer.reply) if isinstance(answer, AnsweredRequest) else GateOpen()

    def _sleep_on(self) -> Park:
        """Return a sleep of the length that the agent chose; without a choice, each sleep is longer."""
        rules, turn = self._loop.rules, self._loop.turn
        if turn.yielded is not None and turn.yielded.mode == "sleep":
            sleep = min(max(turn.yielded.sleep, rules.min_sleep), rules.max_sleep)
            return Park("SLEEPING", sleep, turn.yielded.wake_early_if)
        longer = rules.min_sleep * 2 ** min(turn.pause_count + turn.skip_count, 40)
        return Park("SLEEPING", min(rules.max_sleep, longer))

    async def _save_before_park(self, park: Park) -> Park:
        """Save the hot state before the session is released: the next owner starts with it."""
        if self._terms.pacing.fields and not self._terms.pacing.sensors:
            await self._runtime.save_snapshot(self._hot_view.hot.snapshot())
        return park

    async def _refresh(self) -> None:
        """Refresh stale fields, with one call for fields of the same source. On failure the stale values are kept."""
        now, problem_by_source = self._clock.now(), dict[tuple[str, bytes], str]()
        for name in self._hot_view.hot.due(now):
            field = self._terms.pacing.fields[name]
            source = (str(field.refresh_tool), encode_canonical(dict(field.refresh_arguments)))
            if source not in problem_by_source:
                problem_by_source[source] = await self._refresh_field(name, field, now)
            if problem_by_source[source]:
                self._hot_view.add_refresh_problem(name, source[0], problem_by_source[source])

    async def _refresh_field(self, name: str, field: HotField, now: int) -> str:
        """Call a field's tool for its value; return the problem if there is no value, else ""."""
        tool = str(field.refresh_tool)
        arguments = msgspec.json.encode(dict(field.refresh_arguments))
        session, turn = self._runtime.lease.session, self._loop.turn.number
        answer = await self._runtime.call_read_only(Call(f"{session}.f{turn}_{now}_{name}", tool, arguments, "sensor"))
        if not isinstance(answer, Answer):
            return f"{tool} waits for an approval, or for budget that other calls hold."
        if answer.outcome != "ok":
            return answer.text
        self._hot_view.apply_result(tool, field.refresh_arguments, answer.text)
        return ""

"""The pace of an agent that runs by itself.

before a turn a halt ends it; outside of its hours it sleeps on stale facts that ask for it are refreshed the gate: has
anything changed that is worth a turn? the turn as every turn: think, act, think again, yield after it the guardrails

What it decides by is in the journal, so it survives a crash like everything else.

Active hours are local: each day has one period from `start` to `end`. A change to or from daylight saving time moves
its ends and never splits it: a repeated time counts the first time, a skipped one is the first moment after it.

The gate is the cheap check before a full turn. It can only say that a turn is not worth it; on failure it is open.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import time, timedelta
from hashlib import sha256
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET, UnsetType

from halter.autonomy.hot_state import FieldChange, HotStateSnapshot, LiveFacts
from halter.core.agent_spec import ActiveHours, Gate, HotField, Pacing
from halter.core.clock import SECOND, Clock, format_duration
from halter.core.errors import ConfigError
from halter.core.messages import Model, Prompt, Reply, Text
from halter.core.schedules import find_first_moment, find_zone, to_local_time
from halter.core.text import EvaluationFailure, Expression, clean, shorten, to_cel_value
from halter.core.vocabulary import GateStage
from halter.guard.model_door import AnsweredRequest, ModelRequest
from halter.guard.prepare import Call
from halter.guard.tool_door import Answer
from halter.loop import decide
from halter.loop.decide import TROUBLED_ENDS, End, Park, SessionStep
from halter.loop.loop import HotStateCapture, TurnLoop
from halter.loop.prompt import LONGEST_DATA, Worth, make_question_prompt, read_form_answer
from halter.loop.session_runtime import SessionRuntime
from halter.loop.text_calls import cut_text, encode_canonical, is_equal_json, to_json_line
from halter.tasks.conversation import Inbox, OpenTurn

_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")


class Hours(msgspec.Struct, frozen=True):
    """A daily period in a time zone. An end before the start is on the next day."""

    start: time
    end: time
    zone: str


def parse_active_hours(spec: ActiveHours) -> Hours:
    start, end = _clock("start", spec.start), _clock("end", spec.end)
    if start == end:
        raise ConfigError(
            f"`active_hours` begins and ends at {spec.start}: let `end` differ from `start`, "
            "or leave `active_hours` out for an agent that may always be awake."
        )
    zone = spec.timezone or "UTC"
    if find_zone(zone) is None:
        raise ConfigError(f"`active_hours.timezone` is {zone!r}, which is no known zone: write it like Europe/Berlin.")
    return Hours(start, end, zone)


def _clock(key: str, text: str) -> time:
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise ConfigError(
            f'`active_hours.{key}` is {text!r}, which is no time of day: write it like "08:00", '
            'from "00:00" to "23:59", in quotes.'
        )
    return time(int(match[1]), int(match[2]))


def find_wake_time(hours: Hours, now: int) -> int | None:
    """Returns when the next period begins; None if the agent may be awake now."""
    upcoming: list[int] = []
    for begin, end in _stretches(hours, now):
        if begin <= now < end:
            return None
        if now < begin < end:
            upcoming.append(begin)
    return min(upcoming)


def _stretches(hours: Hours, now: int) -> Iterator[tuple[int, int]]:
    """Returns the periods around a moment. One that a day skips entirely has no length."""
    zone = ZoneInfo(hours.zone)
    today = to_local_time(now, zone).date()
    overnight = timedelta(days=1 if hours.end < hours.start else 0)
    for days in range(-2, 5):
        day = today + timedelta(days=days)
        yield find_first_moment(day, hours.start, zone), find_first_moment(day + overnight, hours.end, zone)


_FURTHEST: Final = 100
"""Most dropped items at the start of a list that a difference recognises."""


class FieldDifference(msgspec.Struct, frozen=True):
    """A place with its value before and after; UNSET for none."""

    path: str
    before: Any | UnsetType
    after: Any | UnsetType

    def to_display(self, limit: int) -> Mapping[str, Any]:
        """Shows it as JSON, cut to so many characters."""
        sides = {"before": self.before, "after": self.after}
        kept = {side: _shorten(value, limit) for side, value in sides.items() if value is not UNSET}
        return {"at": cut_text(self.path, limit), **kept}


def _shorten(value: Any, limit: int) -> Any:
    written = to_json_line(value)
    return value if len(written) <= limit else cut_text(written, limit)


def diff_json(path: str, before: Any, after: Any) -> Iterator[FieldDifference]:
    """Yields the places where two values differ. Numbers are compared as numbers."""
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
    """Reports appended items, or else differences by place."""
    old, new = [encode_canonical(item) for item in before], [encode_canonical(item) for item in after]
    dropped = _count_dropped(old, new)
    if dropped is not None:
        for place in range(len(old) - dropped, len(new)):
            yield FieldDifference(f"{path}[{place}]", UNSET, after[place])
        return
    for place in range(max(len(before), len(after))):
        yield from diff_json(f"{path}[{place}]", _item_or_unset(before, place), _item_or_unset(after, place))


def _count_dropped(old: Sequence[bytes], new: Sequence[bytes]) -> int | None:
    """Returns how many of the oldest items were dropped, if that and new ones at the end is all that happened."""
    for dropped in range(min(len(old), _FURTHEST)):
        rest = len(old) - dropped
        if rest <= len(new) and old[dropped:] == new[:rest]:
            return dropped if rest < len(new) else None
    return None


def _item_or_unset(items: Sequence[Any], place: int) -> Any:
    return items[place] if place < len(items) else UNSET


MOST_DIFFERENCES: Final = 40
"""Most differences shown to a model, shared evenly among fields: none can hide another."""
LONGEST_SIDE: Final = 500
"""Most characters shown of each side of a difference."""

_LONGEST_REASON: Final = 300

_QUESTION: Final = (
    "An agent sleeps. You are shown what has changed in what it knows since it was last awake. Decide whether that is "
    "worth waking it. In doubt, wake it."
)


class GateOpen(msgspec.Struct, frozen=True):
    """Take the turn. The sentence says that the gate failed, if it did."""

    sentence: str = ""


class GateSkip(msgspec.Struct, frozen=True):
    """Sleep on, with the part of the gate that said so."""

    stage: GateStage
    sentence: str


class AskGateModel(msgspec.Struct, frozen=True):
    """The gate's model decides."""


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
    """Decides whether to take a turn. `before` is what the last full turn saw, or None."""
    if gate is None or pending or before is None or 0 < gate.max_skips <= skips:
        return GateOpen()
    if gate.on == "change" and not changed:
        return GateSkip("change", "Nothing has changed since the last turn.")
    if expression is not None:
        names = [change.name for change in changed]
        context = {"hot": to_cel_value(hot), "before": to_cel_value(before), "changed": names, "skips": skips}
        found = _decide_by_value(expression, expression.value(context))
        if found is not None:
            return found
    return AskGateModel() if gate.model else GateOpen()


def _decide_by_value(expression: Expression, value: Any) -> GateOpen | GateSkip | None:
    """Returns what an expression's value decides; None if it lets the turn pass."""
    match value:
        case True:
            return None
        case False:
            return GateSkip("expression", f"`{expression.text}` is false.")
        case EvaluationFailure(sentence=sentence):
            return GateOpen(f"The gate is left open: {sentence}")
        case _:
            return GateOpen(f"The gate is left open: `{expression.text}` is neither true nor false.")


def build_gate_prompt(gate: Gate, changed: Sequence[FieldChange]) -> Prompt:
    """Asks the gate's model whether a turn is worth it; shows it only the differences."""
    each = max(1, MOST_DIFFERENCES // max(1, len(changed)))
    found = [list(diff_json(change.name, change.before, change.after)) for change in changed]
    shown = [difference for field in found for difference in field[:each]][:MOST_DIFFERENCES]
    side = min(LONGEST_SIDE, LONGEST_DATA // (4 * max(1, len(shown))))
    data = {"changed": [difference.to_display(side) for difference in shown], "more": sum(map(len, found)) - len(shown)}
    return make_question_prompt(f"{_QUESTION}\n\n{gate.prompt}", data, Worth)


def parse_gate_answer(reply: Reply) -> GateOpen | GateSkip:
    """Parses the model's answer. Anything but a clear no opens the gate."""
    match read_form_answer(reply, Worth):
        case None:
            return GateOpen("The gate is left open: its model gave no answer in the form that it was asked for.")
        case Worth(open=True):
            return GateOpen()
        case Worth(reason=reason):
            return GateSkip(
                "model", shorten(clean(reason), _LONGEST_REASON) or "The gate's model finds no turn worth it."
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
    """Decides when an autonomous session takes its turns."""

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
        """Continues a turn of an earlier owner; stale facts are refreshed before it acts."""
        self._hot_view.show(notes)
        await self._refresh()

    async def decide_before_turn(self, inbox: Inbox) -> OpenTurn | Park | End:
        stopped = await self._find_stop(inbox)
        if stopped is not None:
            return stopped
        await self._refresh()
        seen = self._hot_view.hot.take_snapshot()
        before = HotStateSnapshot.from_bytes(self._loop.hot) if self._loop.hot else None
        changed = self._hot_view.changes_since(before, seen)
        idles = 0 < self._limits.idle_timeout <= self._loop.turn.idle
        if idles and not (inbox.pending or changed):
            return await self._idle()
        skip = await self._gate(inbox, changed, before, seen)
        if skip is not None:
            await self._loop.skip(skip.stage, skip.sentence)
            return await self._save_before_park(self._sleep_on())
        own = (Text(self._limits.prompt or decide.OBSERVE_TURN, "config", reason="observe"),)
        # A handover does not replace the agent's own purpose.
        follows = self._runtime.began.follows and not self._loop.turn.number
        opening = (*inbox.messages, *own) if follows else inbox.messages or own
        hot = HotStateCapture(seen.to_bytes(), seen.digest) if self._terms.pacing.fields else None
        self._hot_view.open_turn()
        return OpenTurn((*self._trouble(), *opening), hot, quiet=not (inbox.pending or changed))

    async def decide_after_turn(self, step: SessionStep) -> SessionStep:
        turns, limit = self._loop.turn.brisk, self._limits.max_consecutive_turns
        if isinstance(step, End):
            return step
        if turns < limit:
            return await self._save_before_park(step) if isinstance(step, Park) else step
        sleep = self._limits.max_sleep // 24
        sentence = f"It took {turns} turns without a sleep, and is put to sleep for {format_duration(sleep)}."
        await self._loop.record_guardrail("max_consecutive_turns", sentence, self._clock.now() + sleep)
        return await self._save_before_park(Park("SLEEPING", sleep))

    async def _find_stop(self, inbox: Inbox) -> Park | End | None:
        """A halt or a passed cap ends the session. Outside of its hours only a person gives it a turn."""
        halt = await self._runtime.find_halt()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._runtime.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        now = self._clock.now()
        until = None if self._terms.hours is None else find_wake_time(self._terms.hours, now)
        if until is None or inbox.personal:
            return None
        sentence = f"It is outside of its active hours, and sleeps for {format_duration(until - now)}."
        await self._loop.record_guardrail("active_hours", sentence, until)
        return await self._save_before_park(Park("SLEEPING", until - now))

    async def _idle(self) -> End:
        awake = format_duration(self._loop.turn.idle)
        sentence = f"For {awake} it was awake without a call, a change or a message, so it is shut down."
        await self._loop.record_guardrail("idle_timeout", sentence)
        return End("COMPLETED", "idle_timeout")

    def _trouble(self) -> tuple[Text, ...]:
        """Tells an unattended agent what stopped its last turn. The text may be a provider's."""
        turn = self._loop.turn
        if turn.why not in TROUBLED_ENDS:
            return ()
        return (Text(decide.describe_last_stop(turn.sentence), "config", trusted=False, reason="trouble"),)

    async def _gate(
        self, inbox: Inbox, changed: Sequence[FieldChange], before: HotStateSnapshot | None, seen: HotStateSnapshot
    ) -> GateSkip | None:
        """Asks the gate; None is a turn. The first turn, a requested one, and one after trouble pass."""
        turn, gate = self._loop.turn, self._terms.gate
        goes_on = turn.yielded is not None and turn.yielded.mode == "continue"
        verdict = open_gate(
            gate,
            changed=changed,
            pending=inbox.pending or not turn.number or goes_on or turn.why in TROUBLED_ENDS,
            skips=turn.skips,
            expression=self._terms.gate_expression,
            before={} if before is None else before.values,
            hot=seen.values,
        )
        if isinstance(verdict, AskGateModel) and gate is not None and self._terms.gate_model is not None:
            verdict = await self._ask_gate(gate, self._terms.gate_model, changed)
        return verdict if isinstance(verdict, GateSkip) else None

    async def _ask_gate(self, gate: Gate, model: Model, changed: Sequence[FieldChange]) -> GateOpen | GateSkip:
        """Asks the gate's model once about the same difference since the last turn; on failure the gate is open.

        The request is named by its question, so that the journal has the answer at the next wake, in any process.
        """
        prompt = build_gate_prompt(gate, changed)
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
        """Sleeps again as long as the agent chose; if it did not choose, a little longer each time."""
        rules, turn = self._loop.rules, self._loop.turn
        if turn.yielded is not None and turn.yielded.mode == "sleep":
            sleep = min(max(turn.yielded.sleep, rules.min_sleep), rules.max_sleep)
            return Park("SLEEPING", sleep, turn.yielded.wake_early_if)
        longer = rules.min_sleep * 2 ** min(turn.pauses + turn.skips, 40)
        return Park("SLEEPING", min(rules.max_sleep, longer))

    async def _save_before_park(self, park: Park) -> Park:
        """Saves the hot state before the session is released: the next owner starts with it."""
        if self._terms.pacing.fields and not self._terms.pacing.sensors:
            await self._runtime.save_snapshot(self._hot_view.hot.snapshot())
        return park

    async def _refresh(self) -> None:
        """Refreshes stale fields, several from one call. On failure the old values stay, marked stale."""
        now, asked = self._clock.now(), dict[tuple[str, bytes], str]()
        for name in self._hot_view.hot.due(now):
            field = self._terms.pacing.fields[name]
            source = (str(field.refresh_tool), encode_canonical(dict(field.refresh_params)))
            if source not in asked:
                asked[source] = await self._refresh_field(name, field, now)
            if asked[source]:
                self._hot_view.add_refresh_problem(name, source[0], asked[source])

    async def _refresh_field(self, name: str, field: HotField, now: int) -> str:
        """Calls a field's tool for its value; returns why there is none."""
        tool = str(field.refresh_tool)
        arguments = msgspec.json.encode(dict(field.refresh_params))
        session, turn = self._runtime.lease.session, self._loop.turn.number
        answer = await self._runtime.call_read_only(Call(f"{session}.f{turn}_{now}_{name}", tool, arguments, "sensor"))
        if not isinstance(answer, Answer):
            return f"{tool} needs a person, or money that others hold."
        if answer.outcome != "ok":
            return answer.text
        self._hot_view.apply_result(tool, field.refresh_params, answer.text)
        return ""

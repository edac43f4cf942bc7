"""The pace of an agent that runs by itself.

    before a turn   a halt ends it; outside of its hours it sleeps on
                    stale facts that ask for it are refreshed
                    the gate: has anything changed that is worth a turn?
    the turn        as every turn: think, act, think again, yield
    after it        the guardrails, whatever the model said

What it decides by is in the journal, so it survives a crash like everything else.

The hours in which an agent may be awake, by the clock on the wall of its zone.

Each day has one stretch from `start` to `end`. A wall clock that is put forward or back moves the stretch's ends, and
never cuts it in two: what comes twice counts the first time, and what is skipped is the first moment after the skip.

The gate: the cheap check before a full turn. It can only say that a turn is not worth it; in doubt it is open.

What is different between two JSON values, as a short list of places: what a gate's model is shown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import time, timedelta
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

import msgspec
from msgspec import UNSET, UnsetType

from halter.autonomy.hot_state import Awareness, FieldChange, HotStateSnapshot, RejectedValue, list_changed_fields
from halter.core.agent_spec import ActiveHours, Gate, HotField, Pacing
from halter.core.clock import SECOND, Clock, format_duration
from halter.core.errors import ConfigError
from halter.core.messages import Model, Prompt, Reply, Text
from halter.core.schedules import find_first_moment, find_zone, to_local_time
from halter.core.text import EvaluationFailure, Expression, clean, shorten, to_body, to_cel_value
from halter.core.tools import HealthReport
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
    """From when to when, and in which zone. An end before the start is on the next day."""

    start: time
    end: time
    zone: str


def parse_active_hours(spec: ActiveHours) -> Hours:
    """Read what the file says, or raise a ConfigError."""
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
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise ConfigError(
            f'`active_hours.{key}` is {text!r}, which is no time of day: write it like "08:00", '
            'from "00:00" to "23:59", in quotes.'
        )
    return time(int(found[1]), int(found[2]))


def find_wake_time(hours: Hours, now: int) -> int | None:
    """Tell when the next stretch begins, or None if the agent may be awake now."""
    upcoming: list[int] = []
    for begin, end in _stretches(hours, now):
        if begin <= now < end:
            return None
        if now < begin < end:
            upcoming.append(begin)
    return min(upcoming)


def _stretches(hours: Hours, now: int) -> Iterator[tuple[int, int]]:
    """List the stretches around a moment. On a day that skips all of it, a stretch ends where it begins."""
    zone = ZoneInfo(hours.zone)
    today = to_local_time(now, zone).date()
    overnight = timedelta(days=1 if hours.end < hours.start else 0)
    for days in range(-2, 5):
        day = today + timedelta(days=days)
        yield find_first_moment(day, hours.start, zone), find_first_moment(day + overnight, hours.end, zone)


_FURTHEST: Final = 100
"""So many of the oldest items of a list may have made room for new ones, and it is still told as that."""


class FieldDifference(msgspec.Struct, frozen=True):
    """One place, and what stood and stands there; UNSET for nothing."""

    path: str
    before: Any | UnsetType
    after: Any | UnsetType

    def shown(self, most: int) -> Mapping[str, Any]:
        """Show it as JSON. What is longer than so many characters is cut, and then a text."""
        sides = {"before": self.before, "after": self.after}
        kept = {side: _shorten(value, most) for side, value in sides.items() if value is not UNSET}
        return {"at": cut_text(self.path, most), **kept}


def _shorten(value: Any, most: int) -> Any:
    written = to_json_line(value)
    return value if len(written) <= most else cut_text(written, most)


def diff_json(path: str, before: Any, after: Any) -> Iterator[FieldDifference]:
    """Find the places where two values differ. Numbers are compared as numbers, and nothing equal is named."""
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
    """Tell items that were added at the end, or else what differs place by place."""
    old, new = [encode_canonical(item) for item in before], [encode_canonical(item) for item in after]
    dropped = _count_dropped(old, new)
    if dropped is not None:
        for place in range(len(old) - dropped, len(new)):
            yield FieldDifference(f"{path}[{place}]", UNSET, after[place])
        return
    for place in range(max(len(before), len(after))):
        yield from diff_json(f"{path}[{place}]", _item_or_unset(before, place), _item_or_unset(after, place))


def _count_dropped(old: Sequence[bytes], new: Sequence[bytes]) -> int | None:
    """Tell how many of the oldest items are gone, if that and new ones at the end is all that happened."""
    for dropped in range(min(len(old), _FURTHEST)):
        rest = len(old) - dropped
        if rest <= len(new) and old[dropped:] == new[:rest]:
            return dropped if rest < len(new) else None
    return None


def _item_or_unset(items: Sequence[Any], place: int) -> Any:
    return items[place] if place < len(items) else UNSET


MOST_DIFFERENCES: Final = 40
"""So many differences a model is shown, of each field as many as of any other: no field can hide another."""
LONGEST_SIDE: Final = 500
"""So many characters it is shown of what was, and of what is."""

_LONGEST_REASON: Final = 300

_QUESTION: Final = (
    "An agent sleeps. You are shown what has changed in what it knows since it was last awake. Decide whether that is "
    "worth waking it. In doubt, wake it."
)


class GateOpen(msgspec.Struct, frozen=True):
    """Take the turn. The sentence is not empty where the gate failed and was left open."""

    sentence: str = ""


class GateSkip(msgspec.Struct, frozen=True):
    """Sleep on, and what of the gate said so."""

    stage: GateStage
    sentence: str


class AskGateModel(msgspec.Struct, frozen=True):
    """Nothing speaks against the turn so far: the gate's model has the last word."""


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
    """Decide whether a turn is taken. `before` is what the last full turn saw, or None if there was none yet."""
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
    """Tell what an expression's value decides; None if it lets the turn pass."""
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
    """Ask the gate's model whether a turn is worth it. It is shown what differs, and nothing else."""
    each = max(1, MOST_DIFFERENCES // max(1, len(changed)))
    found = [list(diff_json(change.name, change.before, change.after)) for change in changed]
    shown = [difference for field in found for difference in field[:each]][:MOST_DIFFERENCES]
    side = min(LONGEST_SIDE, LONGEST_DATA // (4 * max(1, len(shown))))
    data = {"changed": [difference.shown(side) for difference in shown], "more": sum(map(len, found)) - len(shown)}
    return make_question_prompt(f"{_QUESTION}\n\n{gate.prompt}", data, Worth)


def parse_gate_answer(reply: Reply) -> GateOpen | GateSkip:
    """Take a model's answer. Whatever is not a clear no opens the gate."""
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
    """What an agent's file says of its pace, made ready: compiled, parsed, with the gate's model at hand."""

    pacing: Pacing
    hours: Hours | None = None
    gate_expression: Expression | None = None
    gate_model: Model | None = None

    @property
    def gate(self) -> Gate | None:
        """The gate, if there is one."""
        return None if self.pacing.autonomy.gate is UNSET else self.pacing.autonomy.gate


class AutonomousPace:
    """Decides when a session that runs by itself takes its turns."""

    def __init__(
        self, running: SessionRuntime, loop: TurnLoop, clock: Clock, terms: PaceTerms, aware: Awareness
    ) -> None:
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

    async def before(self, news: Inbox) -> OpenTurn | Park | End:
        """Decide whether this wake is worth a turn."""
        stopped = await self._stopped(news)
        if stopped is not None:
            return stopped
        await self._refresh()
        seen = self._aware.hot.seen()
        before = HotStateSnapshot.from_bytes(self._loop.hot) if self._loop.hot else None
        changed = list_changed_fields(before, seen)
        if self._idles() and not (news.pending or changed):
            return await self._idle()
        skip = await self._gate(news, changed, before, seen)
        if skip is not None:
            await self._loop.skip(skip.stage, skip.sentence)
            return await self._kept(self._sleep_on())
        own = (Text(self._limits.prompt or decide.OBSERVE_TURN, "config", reason="observe"),)
        # What the session before it left does not stand in for what the agent is there for.
        follows = self._running.state.follows and not self._loop.turn.number
        opening = (*news.said, *own) if follows else news.said or own
        hot = HotStateCapture(seen.to_bytes(), seen.digest) if self._terms.pacing.fields else None
        return OpenTurn((*self._trouble(), *opening), hot, quiet=not (news.pending or changed))

    async def after(self, then: SessionStep) -> SessionStep:
        """Hold an agent back that never sleeps."""
        turns, most = self._loop.turn.brisk, self._limits.max_consecutive_turns
        if isinstance(then, End):
            return then
        if turns < most:
            return await self._kept(then) if isinstance(then, Park) else then
        sleep = self._limits.max_sleep // 24
        sentence = f"It took {turns} turns without a sleep, and is put to sleep for {format_duration(sleep)}."
        await self._loop.hold_back("max_consecutive_turns", sentence, self._clock.now() + sleep)
        return await self._kept(Park("SLEEPING", sleep))

    async def _stopped(self, news: Inbox) -> Park | End | None:
        """A halt and a cap that was passed end the session. Outside of its hours only a person gives it a turn."""
        halt = await self._running.halted()
        if halt is not None:
            return End("CANCELLED", "cancelled") if halt.cancels else End("HALTED", "external_halt")
        if self._running.overrun:
            return End("BUDGET_EXCEEDED", "overrun")
        now = self._clock.now()
        until = None if self._terms.hours is None else find_wake_time(self._terms.hours, now)
        if until is None or news.personal:
            return None
        sentence = f"It is outside of its active hours, and sleeps for {format_duration(until - now)}."
        await self._loop.hold_back("active_hours", sentence, until)
        return await self._kept(Park("SLEEPING", until - now))

    def _idles(self) -> bool:
        return 0 < self._limits.idle_timeout <= self._loop.turn.idle

    async def _idle(self) -> End:
        awake = format_duration(self._loop.turn.idle)
        sentence = f"For {awake} it was awake without a call, a change or a message, so it is shut down."
        await self._loop.hold_back("idle_timeout", sentence)
        return End("COMPLETED", "idle_timeout")

    def _trouble(self) -> tuple[Text, ...]:
        """An agent that nobody watches is told what stopped its last turn. The words may be a provider's."""
        turn = self._loop.turn
        if turn.why not in TROUBLED_ENDS:
            return ()
        return (Text(decide.describe_last_stop(turn.sentence), "config", trusted=False, reason="trouble"),)

    async def _gate(
        self, news: Inbox, changed: Sequence[FieldChange], before: HotStateSnapshot | None, seen: HotStateSnapshot
    ) -> GateSkip | None:
        """Ask the gate; None is a turn. The first turn, one that was asked for, and one after trouble are worth it."""
        turn, gate = self._loop.turn, self._terms.gate
        goes_on = turn.yielded is not None and turn.yielded.mode == "continue"
        verdict = open_gate(
            gate,
            changed=changed,
            pending=news.pending or not turn.number or goes_on or turn.why in TROUBLED_ENDS,
            skips=turn.skips,
            expression=self._terms.gate_expression,
            before={} if before is None else before.values,
            hot=seen.values,
        )
        if isinstance(verdict, AskGateModel) and gate is not None and self._terms.gate_model is not None:
            verdict = await self._asked(gate, self._terms.gate_model, changed)
        return verdict if isinstance(verdict, GateSkip) else None

    async def _asked(self, gate: Gate, model: Model, changed: Sequence[FieldChange]) -> GateOpen | GateSkip:
        """Let a small model look at what changed; one that fails is open."""
        request = ModelRequest(
            id=f"{self._running.lease.session}.g{self._loop.turn.number}_{self._clock.now()}",
            prompt=build_gate_prompt(gate, changed),
            purpose="gate",
            timeout=GATE_TIMEOUT,
            optional=True,
        )
        answer = await self._running.request(request, model)
        return parse_gate_answer(answer.reply) if isinstance(answer, AnsweredRequest) else GateOpen()

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
        put = self._aware.hot.put(name, parse_source_text(answer.text), self._clock.now(), by=tool)
        return put.sentence if isinstance(put, RejectedValue) else ""


def parse_source_text(text: str) -> Any:
    """Read what a tool or a source said: JSON, if it is that, and otherwise its words."""
    try:
        return msgspec.json.decode(to_body(text))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text

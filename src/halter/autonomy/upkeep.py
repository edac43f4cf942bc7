"""Upkeep of unattended agents: decisions without I/O, made at every check.

An ended session stays ended, unless a person resumes it later. There is one exception: after a session has used up its
own cap, the next one starts automatically if an hourly, daily or monthly cap still bounds the agent.

An agent that fails is restarted a limited number of times, before a person has to act.

Sessions in a row that end without progress back off, whatever started them: minutes, then an hour, then a person. The
end of a session does not decide that, but what it has done: an effect or a report that is new, or an end by the model's
own word. A session that found nothing to do and said so has made progress; one that a limit stopped has not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

import msgspec

from halter.core.clock import MINUTE, SECOND
from halter.core.events import AnyEvent, CallSettled, CallStarted, CostCapReached, DecisionAsked, TurnEnded, Unknown
from halter.core.rows import NO_OWNER, AgentRow, HaltRow, SessionRow, explain_newer_format
from halter.core.text import format_count
from halter.core.vocabulary import ShownState, State
from halter.guard.halts import compute_ramp_delay
from halter.loop.decide import find_backoff
from halter.loop.turn import TROUBLED_ENDS

REST_STATES: frozenset[State] = frozenset(("SLEEPING", "WAITING_FOR_INPUT", "PAUSED"))
"""States of a session that is parked between turns. The loop handles a park inside a turn."""


class BeginSession(msgspec.Struct, frozen=True):
    """Start the agent's session of this number; `follows` and `reason` are set if it continues an exhausted one."""

    number: int
    follows: str = ""
    reason: str = ""


class ReopenSession(msgspec.Struct, frozen=True):
    """Reopen a session that a halt ended, because that person lifted it."""

    session: str
    by: str


class AttendSession(msgspec.Struct, frozen=True):
    """Run a parked session that was halted, so that it ends."""

    session: str


class StopSession(msgspec.Struct, frozen=True):
    """Stop a session that started while its agent was switched off by that person."""

    session: str
    by: str


class ExhaustedSession(msgspec.Struct, frozen=True):
    """A session that its cap ended.

    `cap` names the cap and its amount, as in the configuration. `has_window_cap` is True if an hourly, daily or
    monthly cap applies to the agent now. `unhealthy` is set if it and those before it made no progress.
    """

    cap: str
    key: str
    turns: int
    has_window_cap: bool
    unhealthy: "Unhealthy | None" = None
    asks: bool = False
    tokens: bool = False


class LeaveAlone(msgspec.Struct, frozen=True):
    """Do nothing. If the agent does not run, the sentence is the reason; `check_at` is when that may change."""

    sentence: str = ""
    check_at: int | None = None


UpkeepStep = BeginSession | ReopenSession | AttendSession | StopSession | LeaveAlone


def decide_upkeep(
    agent: str,
    switch: AgentRow | None,
    newest: SessionRow | None,
    halts: Mapping[str, HaltRow],
    now: int,
    *,
    starting: bool = False,
    used_up: ExhaustedSession | None = None,
) -> UpkeepStep:
    """Decide by the agent's switch, its newest session and the active halts.

    `starting` is the first check of a process. `used_up` is set where a cap ended the newest session.
    """
    if newest is not None and (newer := explain_newer_format(newest)):
        return LeaveAlone(newer)
    if newest is not None and newest.ended_at is None:
        return _decide_for_open(newest, switch, halts)
    if switch is None or not switch.switched_on:
        return LeaveAlone(f"{agent} is switched off. Run `halter on {agent}`.")
    halt = next(_list_halts(agent, "", halts), None)
    if halt is not None:
        return LeaveAlone(f"{halt.scope} was halted by {halt.by}. Run `halter resume {halt.scope}`.")
    if newest is None:
        return BeginSession(1)
    if newest.state == "COMPLETED" and starting:
        return BeginSession(_parse_number(agent, newest) + 1)
    if switch.at >= _find_stop_time(newest, halts):
        return BeginSession(_parse_number(agent, newest) + 1)
    if used_up is not None and newest.state == "BUDGET_EXCEEDED":
        return _decide_after_cap(agent, newest, used_up, now)
    return _decide_for_ended(agent, newest, halts, now)


def _decide_after_cap(agent: str, newest: SessionRow, exhausted: ExhaustedSession, now: int) -> UpkeepStep:
    """Start the next session if other caps bound the agent, after its backoff; otherwise a person must start it.

    Without another cap, a session cap that renews automatically would not limit anything. A cap that does not last a
    single turn would end one session after the other.
    """
    advice = f"Run `halter on {agent}` to start the next session."
    if exhausted.asks:
        return LeaveAlone(f"{newest.session} has used up {exhausted.cap}, and no person approved more. {advice}")
    if exhausted.tokens:
        return LeaveAlone(
            f"{newest.session} has used up {exhausted.cap}. No cap on cost bounds tokens, so no next session starts. "
            f"{advice}"
        )
    if not exhausted.turns:
        return LeaveAlone(
            f"{newest.session} reached {exhausted.cap} before it finished a turn, so no next session starts. Raise "
            f"`{exhausted.key}`. {advice}"
        )
    if not exhausted.has_window_cap:
        return LeaveAlone(
            f"{newest.session} has used up {exhausted.cap}, and no hourly, daily or monthly cap bounds the next "
            f"sessions. Set `max_cost_usd_per_day`. {advice}"
        )
    if exhausted.unhealthy is not None and exhausted.unhealthy.holds_back(now):
        return LeaveAlone(exhausted.unhealthy.line, exhausted.unhealthy.until)
    return BeginSession(
        _parse_number(agent, newest) + 1, newest.session, f"{newest.session} has used up {exhausted.cap}."
    )


def _find_stop_time(newest: SessionRow, halts: Mapping[str, HaltRow]) -> int:
    """Return when a session was ordered to end: with its own halt, that is a moment before its end."""
    halt = halts.get(f"session:{newest.session}")
    ended_at = (newest.ended_at or 0) + 1
    return min(ended_at, halt.at) if halt is not None and halt.halted else ended_at


def _decide_for_open(newest: SessionRow, switch: AgentRow | None, halts: Mapping[str, HaltRow]) -> UpkeepStep:
    halt = next(_list_halts(newest.agent, newest.session, halts), None)
    if halt is None and switch is not None and not switch.switched_on:
        return StopSession(newest.session, switch.by)
    if halt is not None and newest.owner == NO_OWNER and newest.state in REST_STATES:
        return AttendSession(newest.session)
    return LeaveAlone()


def _decide_for_ended(agent: str, newest: SessionRow, halts: Mapping[str, HaltRow], now: int) -> UpkeepStep:
    """Reopen a session that a halt ended, after the halt is lifted; the ramp delays each session differently."""
    no_action = LeaveAlone(
        f"{newest.session} has ended ({newest.state}: {newest.terminal_reason}). Run `halter on {agent}` to start the "
        "next session."
    )
    if newest.state != "HALTED" or next(_list_halts(agent, newest.session, halts), None) is not None:
        return no_action
    rows = (halts[scope] for scope in list_scopes(agent, newest.session) if scope in halts)
    lifted_halt = max((row for row in rows if row.at >= (newest.ended_at or 0)), key=lambda row: row.at, default=None)
    if lifted_halt is None:
        return no_action
    due_at = lifted_halt.at + compute_ramp_delay(newest.session, lifted_halt.ramp)
    if now < due_at:
        return LeaveAlone(
            f"{lifted_halt.scope} was resumed by {lifted_halt.by}; {newest.session} resumes after its ramp delay.",
            due_at,
        )
    return ReopenSession(newest.session, lifted_halt.by)


def _list_halts(agent: str, session: str, halts: Mapping[str, HaltRow]) -> Iterator[HaltRow]:
    return (halts[scope] for scope in list_scopes(agent, session) if scope in halts and halts[scope].halted)


def list_scopes(agent: str, session: str) -> tuple[str, ...]:
    """List the scopes whose halts apply to an autonomous agent or its session."""
    return (*((f"session:{session}",) if session else ()), f"agent:{agent}", "fleet")


def _parse_number(agent: str, newest: SessionRow) -> int:
    """Parse the number in a session's name; a session with another form of name is the first."""
    number = newest.session.removeprefix(f"{agent}-")
    return int(number) if number.isdecimal() else 1


RESTART_WINDOW: Final = 10 * MINUTE
MAX_RESTARTS: Final = 5
"""Maximum number of restarts within the window."""


class RestartAfter(msgspec.Struct, frozen=True):
    """Restart the agent after this many microseconds."""

    after: int


class GiveUp(msgspec.Struct, frozen=True):
    """Do not restart; a person has to act."""


def decide_restart(failures: Sequence[int], now: int) -> RestartAfter | GiveUp:
    """Decide what follows a failure; `failures` are the times of all failures, including this one.

    A time in the future, from a clock that was set back, counts if it is within the window.
    """
    recent = sum(1 for at in failures if abs(now - at) < RESTART_WINDOW)
    return GiveUp() if recent >= MAX_RESTARTS else RestartAfter(SECOND << max(0, recent - 1))


_REPORTS: Final = frozenset(("emit_finding", "propose_memory", "propose_precedent", "notify"))
"""Tools that change nothing outside, and whose calls are what the session was to deliver."""
MAX_SESSIONS_COMPARED: Final = 12
"""Number of newest sessions that are read: those that may count, and earlier ones with which they are compared."""
_STUCK_COUNT: Final = 3
"""Number of equal calls that are named as the cause."""


ProgressEvent = tuple[AnyEvent | Unknown, bytes]
"""An event of a turn or a call, and what tells the arguments of a call apart."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What an ended session or turn has done, as far as it decides about progress.

    `deeds` are the prints of the calls that changed or reported something, each made only once. `own_ends` counts the
    turns that the model itself ended. `repeated` is the tool that was called most often with the same arguments. After
    an end that is not `final`, another session may follow where a cap of a window bounds the agent.
    """

    session: str = ""
    state: ShownState = "RUNNING"
    reason: str = ""
    started_at: int = 0
    ended_at: int = 0
    deeds: frozenset[str] = frozenset()
    own_ends: int = 0
    repeated: str = ""
    repeats: int = 0
    final: bool = True


def build_progress(row: SessionRow, events: Sequence[ProgressEvent]) -> Progress:
    """Build what a session or a turn has done from its turns, calls and caps, in any order."""
    calls = {
        event.call: (event, f"{event.tool} {sha256(body).hexdigest()}")
        for event, body in events
        if isinstance(event, CallStarted)
    }
    settled = {event.call for event, _ in events if isinstance(event, CallSettled) and event.outcome == "ok"}
    turns = [event for event, _ in events if isinstance(event, TurnEnded)]
    counts = Counter(call_print for _, call_print in calls.values())
    deeds = frozenset(
        call_print
        for name, (event, call_print) in calls.items()
        if name in settled and counts[call_print] == 1 and (event.effect == "write" or event.tool in _REPORTS)
    )
    repeated, repeats = next(iter(counts.most_common(1)), ("", 0))
    return Progress(
        session=row.session,
        state=row.state,
        reason=row.terminal_reason,
        started_at=row.started_at,
        ended_at=row.ended_at or 0,
        deeds=deeds,
        own_ends=sum(map(_is_own_end, turns)),
        repeated=repeated.partition(" ")[0],
        repeats=repeats,
        final=_is_final(row, turns, [event for event, _ in events]),
    )


def _is_own_end(event: TurnEnded) -> bool:
    """Return whether the model itself ended a turn: with an answer, a question, a sleep or a shutdown."""
    if event.why == "yielded":
        return event.yielded is not None and event.yielded.mode != "continue"
    return event.why in ("ended", "asked")


def _is_final(row: SessionRow, turns: Sequence[TurnEnded], events: Iterable[AnyEvent | Unknown]) -> bool:
    """Return whether no session follows this one, whatever caps its agent has: as `_decide_after_cap` decides."""
    if (row.state, row.terminal_reason) != ("BUDGET_EXCEEDED", "cost_cap_reached"):
        return True
    if all(turn.why == "cost_cap_reached" for turn in turns):
        return True
    return any(
        (isinstance(event, CostCapReached) and event.unit == "tokens")
        or (isinstance(event, DecisionAsked) and event.about == "cap_raise")
        for event in events
    )


def made_progress(newest: Progress, earlier: Sequence[Progress]) -> bool:
    """Return whether one answered, or did something that it did only once and that no earlier one did."""
    if newest.state == "COMPLETED" or newest.own_ends:
        return True
    return bool(newest.deeds.difference(*(each.deeds for each in earlier)))


def count_fruitless_turns(row: SessionRow, events: Sequence[ProgressEvent]) -> int:
    """Count the newest turns of an open session in a row that something stopped, and that made no progress.

    The events are in order, and the last turn has ended.
    """
    turns: list[list[ProgressEvent]] = [[]]
    ends: list[TurnEnded] = []
    for event, body in events:
        turns[-1].append((event, body))
        if isinstance(event, TurnEnded):
            ends.append(event)
            turns.append([])
    results = [build_progress(row, turn) for turn in reversed(turns[:-1])]
    for index, end in enumerate(reversed(ends)):
        if end.why not in TROUBLED_ENDS or made_progress(results[index], results[index + 1 :]):
            return index
    return len(ends)


class Unhealthy(msgspec.Struct, frozen=True, kw_only=True):
    """An agent whose newest attempts made no progress, or which has stopped. It may start again at `until`.

    Without an `until`, a person has to start it. `trigger` is empty for the autonomous sessions of the agent. An
    attempt is a session, or with `turns` a turn of an open one.
    """

    agent: str
    session: str
    trigger: str = ""
    attempts: int = 0
    cause: str = ""
    until: int | None = None
    turns: bool = False

    def holds_back(self, now: int) -> bool:
        """Return whether nothing may start yet."""
        return self.until is None or now < self.until

    @property
    def sentence(self) -> str:
        """What is wrong, and why."""
        if not self.attempts:
            return f"{self.agent} is unhealthy and has stopped: {self.cause}"
        noun = "turn" if self.turns else "session"
        attempts = f"the last {noun}" if self.attempts == 1 else f"the last {format_count(self.attempts, noun)}"
        return (
            f"{self.agent} is unhealthy: {attempts} of {self.trigger or self.agent} brought no new effect, "
            f"no finding and no answer. {self.cause}"
        )

    @property
    def remedy(self) -> str:
        """What happens next, and what ends it."""
        start = f"halter on {self.agent}"
        if self.until is None:
            return (
                f"Nothing starts there until a person runs `{start}`. Correct its instructions, tools or limits first."
            )
        moment = datetime.fromtimestamp(self.until // SECOND, UTC)
        return (
            f"Nothing starts there before {moment:%Y-%m-%d %H:%M:%S} UTC. Correct instructions, tools or limits; "
            f"`{start}` starts it now."
        )

    @property
    def line(self) -> str:
        return f"{self.sentence} {self.remedy}"


def count_fruitless(attempts: Sequence[Progress], since: int) -> int:
    """Count the newest attempts in a row without progress; the newest is the first. Parallel ones count as one.

    Attempts that started before `since`, when a person last switched the agent on, only tell what is new.
    """
    count, started_at = 0, None
    for index, attempt in enumerate(attempts):
        if attempt.started_at < since or made_progress(attempt, attempts[index + 1 :]):
            break
        if started_at is None or attempt.ended_at < started_at:
            count, started_at = count + 1, attempt.started_at
    return count


def judge_trigger(agent: str, trigger: str, attempts: Sequence[Progress], since: int) -> Unhealthy | None:
    """Judge the newest ended sessions of a trigger; None if it is well."""
    count = count_fruitless(attempts, since)
    return _make_unhealthy(agent, attempts, count, find_backoff(count), trigger) if count else None


def judge_ended_agent(
    agent: str, attempts: Sequence[Progress], since: int, *, has_window_cap: bool
) -> Unhealthy | None:
    """Judge the newest sessions of an autonomous agent, all of which have ended; None if it is well.

    Only a session that its own cap ended is followed by another one, and only within the cap of a window.
    """
    if not attempts or attempts[0].state == "COMPLETED" or attempts[0].ended_at <= since:
        return None
    count, renews = count_fruitless(attempts, since), not attempts[0].final and has_window_cap
    if renews and not count:
        return None
    return _make_unhealthy(agent, attempts, count, find_backoff(count) if renews else None)


def judge_open_agent(agent: str, row: SessionRow, events: Sequence[ProgressEvent]) -> Unhealthy | None:
    """Judge an open autonomous session by its ended turns; None if it is well."""
    ended_at = max((index for index, (event, _) in enumerate(events) if isinstance(event, TurnEnded)), default=-1)
    count = count_fruitless_turns(row, events[: ended_at + 1])
    if not count:
        return None
    newest = next(event for event, _ in reversed(events) if isinstance(event, TurnEnded))
    cause = f"{row.session}: {newest.sentence or newest.why.replace('_', ' ')}"
    return Unhealthy(agent=agent, session=row.session, attempts=count, cause=cause, until=row.wake_at, turns=True)


def _make_unhealthy(
    agent: str, attempts: Sequence[Progress], count: int, backoff: int | None, trigger: str = ""
) -> Unhealthy:
    newest = attempts[0]
    until = None if backoff is None else newest.ended_at + backoff
    cause = _describe_cause(newest)
    return Unhealthy(agent=agent, session=newest.session, trigger=trigger, attempts=count, cause=cause, until=until)


def _describe_cause(attempt: Progress) -> str:
    end = f"{attempt.session} ended {attempt.state} ({attempt.reason.replace('_', ' ')})"
    if attempt.repeats < _STUCK_COUNT:
        return f"{end}."
    return f"{end} after {attempt.repeats} calls of {attempt.repeated} with the same arguments."

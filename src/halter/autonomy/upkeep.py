"""Upkeep of unattended agents: decisions without I/O, made at every check.

An ended session stays ended, unless a person resumes it later. There is one exception: after a session has used up its
own cap, the next one starts automatically if an hourly, daily or monthly cap still bounds the agent.

An agent that fails is restarted a limited number of times, before a person has to act.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from halter.core.clock import MINUTE, SECOND
from halter.core.rows import NO_OWNER, AgentRow, HaltRow, SessionRow, explain_newer_format
from halter.core.vocabulary import State
from halter.guard.judge import compute_ramp_delay

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
    monthly cap applies to the agent now.
    """

    cap: str
    key: str
    turns: int
    has_window_cap: bool
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
        return _decide_after_cap(agent, newest, used_up)
    return _decide_for_ended(agent, newest, halts, now)


def _decide_after_cap(agent: str, newest: SessionRow, exhausted: ExhaustedSession) -> UpkeepStep:
    """Start the next session if other caps bound the agent; otherwise a person must start it.

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

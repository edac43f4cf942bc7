"""What has to be done for an agent that is to run by itself: a decision without I/O, looked at again and again.

A session that is over stays over, unless a person's word came later. There is one exception: when a session has used up
its own cap, the next one begins by itself, provided that a cap of an hour, a day or a month still bounds the agent.

How often an agent that breaks down is started again, before a person has to look.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from halter.core.clock import MINUTE, SECOND
from halter.core.rows import NO_OWNER, AgentRow, HaltRow, SessionRow, explain_newer_format
from halter.core.vocabulary import State
from halter.guard.judge import compute_ramp_delay

REST_STATES: frozenset[State] = frozenset(("SLEEPING", "WAITING_FOR_INPUT", "PAUSED"))
"""Rests between turns; a rest inside of a turn is handled by its loop."""


class BeginSession(msgspec.Struct, frozen=True):
    """Start the agent's session of this number; `follows` and `because` are set if it continues another."""

    number: int
    follows: str = ""
    because: str = ""


class ReopenSession(msgspec.Struct, frozen=True):
    """Reopen a session that a halt ended, because that person lifted it."""

    session: str
    by: str


class AttendSession(msgspec.Struct, frozen=True):
    """Run a resting session that was halted, so that it ends."""

    session: str


class StopSession(msgspec.Struct, frozen=True):
    """Stop a session that started while its agent was switched off by that person."""

    session: str
    by: str


class ExhaustedSession(msgspec.Struct, frozen=True):
    """A session that its cap ended.

    `cap` names the cap and its amount, as in the configuration. `turns` counts finished ones. `bounded` says that an
    hourly, daily or monthly cap applies to the agent now.
    """

    cap: str
    key: str
    turns: int
    bounded: bool
    asks: bool = False
    tokens: bool = False


class LeaveAlone(msgspec.Struct, frozen=True):
    """Do nothing. The sentence says why the agent does not run, if so; `until` when that may change."""

    sentence: str = ""
    until: int | None = None


UpkeepStep = BeginSession | ReopenSession | AttendSession | StopSession | LeaveAlone


def decide_upkeep(
    agent: str,
    switch: AgentRow | None,
    last: SessionRow | None,
    halts: Mapping[str, HaltRow],
    now: int,
    *,
    starting: bool = False,
    used_up: ExhaustedSession | None = None,
) -> UpkeepStep:
    """Decides by the agent's switch, its newest session and the halts.

    `starting` is the first check of a process. `used_up` is set where a cap ended the newest session.
    """
    if last is not None and (newer := explain_newer_format(last)):
        return LeaveAlone(newer)
    if last is not None and last.ended_at is None:
        return _decide_for_open(last, switch, halts)
    if switch is None or not switch.switched_on:
        return LeaveAlone(f"{agent} is switched off: halter on {agent}")
    halted = next(_list_halts(agent, "", halts), None)
    if halted is not None:
        return LeaveAlone(f"{halted.scope} was halted by {halted.by}: halter resume {halted.scope}")
    if last is None:
        return BeginSession(1)
    if last.state == "COMPLETED" and starting:
        return BeginSession(_parse_number(agent, last) + 1)
    if switch.at >= _find_stop_time(last, halts):
        return BeginSession(_parse_number(agent, last) + 1)
    if used_up is not None and last.state == "BUDGET_EXCEEDED":
        return _decide_after_cap(agent, last, used_up)
    return _decide_for_ended(agent, last, halts, now)


def _decide_after_cap(agent: str, last: SessionRow, used_up: ExhaustedSession) -> UpkeepStep:
    """Starts the next session where other caps bound the agent; else a person must agree.

    A session cap that renews itself without another cap would be no cap. One that does not last a single turn would end
    one session after the other.
    """
    again = f"`halter on {agent}` begins the next session."
    if used_up.asks:
        return LeaveAlone(f"{last.session} has used up {used_up.cap}, and no person agreed to more. {again}")
    if used_up.tokens:
        return LeaveAlone(f"{last.session} has used up {used_up.cap}, which no cap on money bounds. {again}")
    if not used_up.turns:
        return LeaveAlone(
            f"{last.session} came to {used_up.cap} before a single turn was done, so it is not begun anew: raise "
            f"`{used_up.key}`. Then {again}"
        )
    if not used_up.bounded:
        return LeaveAlone(
            f"{last.session} has used up {used_up.cap}, and no cap of an hour, a day or a month bounds what the next "
            f"sessions would spend: write `max_cost_usd_per_day`, or say so each time. {again}"
        )
    return BeginSession(_parse_number(agent, last) + 1, last.session, f"{last.session} has used up {used_up.cap}.")


def _find_stop_time(last: SessionRow, halts: Mapping[str, HaltRow]) -> int:
    """Returns when a session was told to end: by its own halt, it ended a moment later."""
    halted = halts.get(f"session:{last.session}")
    ended = (last.ended_at or 0) + 1
    return min(ended, halted.at) if halted is not None and halted.halted else ended


def _decide_for_open(last: SessionRow, switch: AgentRow | None, halts: Mapping[str, HaltRow]) -> UpkeepStep:
    halted = next(_list_halts(last.agent, last.session, halts), None)
    if halted is None and switch is not None and not switch.switched_on:
        return StopSession(last.session, switch.by)
    if halted is not None and last.owner == NO_OWNER and last.state in REST_STATES:
        return AttendSession(last.session)
    return LeaveAlone()


def _decide_for_ended(agent: str, last: SessionRow, halts: Mapping[str, HaltRow], now: int) -> UpkeepStep:
    """Go on where a halt was lifted after it had ended the session; each session in its own turn."""
    over = LeaveAlone(
        f"{last.session} is over ({last.state}, {last.terminal_reason}): halter on {agent} begins the next session."
    )
    if last.state != "HALTED" or next(_list_halts(agent, last.session, halts), None) is not None:
        return over
    rows = (halts[scope] for scope in list_scopes(agent, last.session) if scope in halts)
    lifted = max((row for row in rows if row.at >= (last.ended_at or 0)), key=lambda row: row.at, default=None)
    if lifted is None:
        return over
    due = lifted.at + compute_ramp_delay(last.session, lifted.ramp)
    if now < due:
        return LeaveAlone(f"{lifted.scope} was resumed by {lifted.by}; {last.session} goes on in its turn.", due)
    return ReopenSession(last.session, lifted.by)


def _list_halts(agent: str, session: str, halts: Mapping[str, HaltRow]) -> Iterator[HaltRow]:
    return (halts[scope] for scope in list_scopes(agent, session) if scope in halts and halts[scope].halted)


def list_scopes(agent: str, session: str) -> tuple[str, ...]:
    """What halts an autonomous agent or its session."""
    return (*((f"session:{session}",) if session else ()), f"agent:{agent}", "fleet")


def _parse_number(agent: str, last: SessionRow) -> int:
    """Read the number of a session off its name; one that was named otherwise is the first."""
    number = last.session.removeprefix(f"{agent}-")
    return int(number) if number.isdecimal() else 1


RESTART_WINDOW: Final = 10 * MINUTE
MAX_RESTARTS: Final = 5
"""Most restarts within the window."""


class RestartAfter(msgspec.Struct, frozen=True):
    """Start again after so many microseconds."""

    after: int


class GiveUp(msgspec.Struct, frozen=True):
    """Leave it to a person."""


def decide_restart(failures: Sequence[int], now: int) -> RestartAfter | GiveUp:
    """Decide what follows a breakdown; `failures` are the moments of all of them, this one included.

    A moment that a clock set back has put into the future counts if it is near.
    """
    recent = sum(1 for at in failures if abs(now - at) < RESTART_WINDOW)
    return GiveUp() if recent >= MAX_RESTARTS else RestartAfter(SECOND << max(0, recent - 1))

"""What has to be done for an agent that is to run by itself: a decision without I/O, looked at again and again.

A session that is over stays over, unless a person's word came later. There is one exception: when a session has used up
its own cap, the next one begins by itself, provided that a cap of an hour, a day or a month still bounds the agent.
"""

from collections.abc import Iterator, Mapping

import msgspec

from halter.core.newer import left_to_newer
from halter.core.rows import FREE, AgentRow, HaltRow, SessionRow
from halter.core.vocabulary import State
from halter.guard.judge import turn_in_ramp

RESTS: frozenset[State] = frozenset(("SLEEPING", "WAITING_FOR_INPUT", "PAUSED"))
"""The rests between turns. One inside of a turn looks for itself what it waits for."""


class Begin(msgspec.Struct, frozen=True):
    """Begin the agent's session of this number. If it begins by itself it `follows` another one, and `because` why."""

    number: int
    follows: str = ""
    because: str = ""


class Reopen(msgspec.Struct, frozen=True):
    """Let a session go on that a halt ended, because that person lifted it."""

    session: str
    by: str


class Attend(msgspec.Struct, frozen=True):
    """Attend a session that rests though it was halted, so that it ends."""

    session: str


class Stop(msgspec.Struct, frozen=True):
    """Stop a session that came to run while its agent was being switched off, as that person wished."""

    session: str
    by: str


class UsedUp(msgspec.Struct, frozen=True):
    """What is known of a session that its cap has ended.

    `cap` names the cap that it came to as a key of the configuration, with its amount. `turns` counts those that came
    to their own end. `bounded` says that some cap of an hour, a day or a month applies to the agent now.
    """

    cap: str
    key: str
    turns: int
    bounded: bool
    asks: bool = False
    tokens: bool = False


class Nothing(msgspec.Struct, frozen=True):
    """Let it be. The sentence says why the agent does not run, if it does not; `until` when that may change."""

    sentence: str = ""
    until: int | None = None


Upkeep = Begin | Reopen | Attend | Stop | Nothing


def upkeep(
    agent: str,
    switch: AgentRow | None,
    last: SessionRow | None,
    halts: Mapping[str, HaltRow],
    now: int,
    *,
    starting: bool = False,
    used_up: UsedUp | None = None,
) -> Upkeep:
    """Decide by the agent's switch, its newest session and the halts.

    `starting` is the first look of a process. `used_up` is given where the newest session was ended by its cap.
    """
    if last is not None and (newer := left_to_newer(last)):
        return Nothing(newer)
    if last is not None and last.ended_at is None:
        return _of_an_open(last, switch, halts)
    if switch is None or not switch.switched_on:
        return Nothing(f"{agent} is switched off: halter on {agent}")
    halted = next(_halted(agent, "", halts), None)
    if halted is not None:
        return Nothing(f"{halted.scope} was halted by {halted.by}: halter resume {halted.scope}")
    if last is None:
        return Begin(1)
    if last.state == "COMPLETED" and starting:
        return Begin(_number(agent, last) + 1)
    if switch.at >= _stopped_at(last, halts):
        return Begin(_number(agent, last) + 1)
    if used_up is not None and last.state == "BUDGET_EXCEEDED":
        return _after_its_cap(agent, last, used_up)
    return _of_one_that_is_over(agent, last, halts, now)


def _after_its_cap(agent: str, last: SessionRow, used_up: UsedUp) -> Upkeep:
    """Begin the next session where other caps bound the agent; else a person must say so, and is told what to change.

    A session cap that renews itself with no other cap beside it would be no cap at all. One that does not last for a
    single turn would end one session after the other.
    """
    again = f"`halter on {agent}` begins the next session."
    if used_up.asks:
        return Nothing(f"{last.session} has used up {used_up.cap}, and nobody agreed to more. {again}")
    if used_up.tokens:
        return Nothing(f"{last.session} has used up {used_up.cap}, which no cap on money bounds. {again}")
    if not used_up.turns:
        return Nothing(
            f"{last.session} came to {used_up.cap} before a single turn was done, so it is not begun anew: raise "
            f"`{used_up.key}`. Then {again}"
        )
    if not used_up.bounded:
        return Nothing(
            f"{last.session} has used up {used_up.cap}, and no cap of an hour, a day or a month bounds what the next "
            f"sessions would spend: write `max_cost_usd_per_day`, or say so each time. {again}"
        )
    return Begin(_number(agent, last) + 1, last.session, f"{last.session} has used up {used_up.cap}.")


def _stopped_at(last: SessionRow, halts: Mapping[str, HaltRow]) -> int:
    """Tell when it was decided that a session is over: by a halt of its own, it took a moment longer until it was."""
    halted = halts.get(f"session:{last.session}")
    ended = (last.ended_at or 0) + 1
    return min(ended, halted.at) if halted is not None and halted.halted else ended


def _of_an_open(last: SessionRow, switch: AgentRow | None, halts: Mapping[str, HaltRow]) -> Upkeep:
    halted = next(_halted(last.agent, last.session, halts), None)
    if halted is None and switch is not None and not switch.switched_on:
        return Stop(last.session, switch.by)
    if halted is not None and last.owner == FREE and last.state in RESTS:
        return Attend(last.session)
    return Nothing()


def _of_one_that_is_over(agent: str, last: SessionRow, halts: Mapping[str, HaltRow], now: int) -> Upkeep:
    """Go on where a halt was lifted after it had ended the session; each session in its own turn."""
    over = Nothing(
        f"{last.session} is over ({last.state}, {last.terminal_reason}): halter on {agent} begins the next session."
    )
    if last.state != "HALTED" or next(_halted(agent, last.session, halts), None) is not None:
        return over
    rows = (halts[scope] for scope in _scopes(agent, last.session) if scope in halts)
    lifted = max((row for row in rows if row.at >= (last.ended_at or 0)), key=lambda row: row.at, default=None)
    if lifted is None:
        return over
    due = lifted.at + turn_in_ramp(last.session, lifted.ramp)
    if now < due:
        return Nothing(f"{lifted.scope} was resumed by {lifted.by}; {last.session} goes on in its turn.", due)
    return Reopen(last.session, lifted.by)


def _halted(agent: str, session: str, halts: Mapping[str, HaltRow]) -> Iterator[HaltRow]:
    return (halts[scope] for scope in _scopes(agent, session) if scope in halts and halts[scope].halted)


def _scopes(agent: str, session: str) -> tuple[str, ...]:
    return (*((f"session:{session}",) if session else ()), f"agent:{agent}", "fleet")


def _number(agent: str, last: SessionRow) -> int:
    """Read the number of a session off its name; one that was named otherwise is the first."""
    number = last.session.removeprefix(f"{agent}-")
    return int(number) if number.isdecimal() else 1

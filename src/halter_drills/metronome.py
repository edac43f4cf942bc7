"""How busy the machine was while a drill measured: a process that only wants to wake up in time, and often cannot.

On a machine where nobody gets the processor in time, everything is late, also what was told to stop at once. What is
late by no more than that is no violation, and no proof either.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from halter.core.clock import SECOND
from halter_drills.children import Pipe

BEAT_SECONDS: Final = 0.01
NOTED: Final = SECOND // 100
"""A stall shorter than this is no stall."""
HOPS: Final = 4
"""Between a halt and its end several processes and threads have to be woken, one after the other; each may wait."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the metronome wanted to run and did not, in microseconds by the clock of this machine."""

    since: int
    until: int


@dataclass(frozen=True, slots=True)
class Late:
    """Something that was found too late: from when on it could have been done, by how much, and what was allowed."""

    sentence: str
    since: int = 0
    by: int = 0
    allowed: int = SECOND


def metronome(pipe: Pipe) -> None:
    """Wake up again and again until told to end, and then tell the stalls."""
    stalls: list[Stall] = []
    while not pipe.poll(0):
        before = time.monotonic_ns()
        time.sleep(BEAT_SECONDS)
        late = (time.monotonic_ns() - before) // 1000 - round(BEAT_SECONDS * SECOND)
        if late >= NOTED:
            now = time.time_ns() // 1000
            stalls.append(Stall(now - late, now))
    pipe.recv()
    pipe.send(stalls)


def stalled(stalls: Sequence[Stall], since: int, until: int) -> int:
    """Tell for how long the machine was too busy in a span of time."""
    return sum(max(0, min(each.until, until) - max(each.since, since)) for each in stalls)


def told_apart(found: Sequence[Late], stalls: Sequence[Stall]) -> tuple[list[str], list[str]]:
    """Part what was late into violations, and what a machine that was too busy cannot tell."""
    violations: list[str] = []
    unsure: list[str] = []
    for each in found:
        busy = stalled(stalls, each.since, each.since + each.allowed + each.by)
        (unsure if 0 < each.by <= busy * HOPS else violations).append(each.sentence)
    return violations, unsure

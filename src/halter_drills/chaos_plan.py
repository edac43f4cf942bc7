"""What befalls the workers of the chaos drill, and when: a plan that follows from its seed."""

import random
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

What = Literal["kill", "stop", "go on", "restart", "skew"]

WORKERS: Final = 3
ROUND: Final = 27.0
"""Seconds in which everything happens once."""
STOPPED: Final = 20.0
"""Seconds for which a worker stands still: longer than its lease, and than others may take to act on that."""
FIRST: Final = 3.0
BURST: Final = 0.5
SESSIONS: Final = 60
"""How many sessions there are to a round."""


class Blow(NamedTuple):
    """Something that happens at a moment, in seconds from the beginning, to one of the workers' places."""

    at: float
    what: What
    place: int = 0


def rounds(sessions: int) -> int:
    """Tell how many rounds so many sessions are worth."""
    return max(1, round(sessions / SESSIONS))


def planned(seed: int, count: int) -> Sequence[Blow]:
    """Plan so many rounds. In each, one worker stands still, another one is killed, and the server is stopped hard.

    Between rounds the third one is killed. There is always one whom nothing happens to, or who has just been started.
    """
    chance = random.Random(seed)
    return sorted(blow for number in range(count) for blow in _round(chance, number, last=number == count - 1))


def _round(chance: random.Random, number: int, *, last: bool) -> Iterator[Blow]:
    begin = FIRST + number * ROUND
    first, second, third = chance.sample(range(WORKERS), WORKERS)
    stop = begin + chance.uniform(0, 0.5)
    yield Blow(stop, "stop", first)
    yield Blow(begin + chance.uniform(0.6, 2), "kill", second)
    if number == 0:
        yield Blow(begin + 16, "skew")
    yield Blow(begin + chance.uniform(6, 9), "restart")
    yield Blow(stop + STOPPED, "go on", first)
    if not last:
        yield Blow(stop + STOPPED + chance.uniform(0.5, 2), "kill", third)


def beginnings(sessions: int, count: int) -> Sequence[float]:
    """Tell when each session begins: half of them right before the first blow of a round, the others one by one."""
    return sorted(_beginning(number, sessions, count) for number in range(sessions))


def _beginning(number: int, sessions: int, count: int) -> float:
    share = -(-sessions // count)
    begin, place = FIRST + number // share * ROUND, number % share / share
    return begin - 0.5 if place < BURST else begin + (place - BURST) / (1 - BURST) * STOPPED

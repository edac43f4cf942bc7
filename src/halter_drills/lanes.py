"""Deaths, and the lanes on which they are died: stores of their own, on which one process after the other is killed."""

import os
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Literal, Protocol, get_args

from halter.journal.engine import Engine
from halter_drills.children import Child, ChildFailed, Pipe
from halter_drills.engines import watched

How = Literal["before", "after", "inside"]
INSIDE_EVERY: Final = 3
LONGEST_DELAY: Final = 0.002
"""Seconds after the beginning of a commit within which a kill inside of it comes."""

NO_LEASE: Final = 0
"""The successor need not wait for a lease to run out, since the drill knows that the owner is dead."""


@dataclass(frozen=True, slots=True)
class Death:
    """At which commit of its life a process dies, and where in it."""

    commit: int
    how: How
    delay: float = 0.0

    def __str__(self) -> str:
        return f"Killed {self.how} commit {self.commit}"


def deaths(commits: int, seed: int) -> list[Death]:
    """List a death before and after every commit, and inside every third, in an order that the seed chooses."""
    chance = random.Random(seed)
    all_of_them = [
        Death(commit, how, chance.uniform(0, LONGEST_DELAY))
        for commit in range(1, commits + 1)
        for how in get_args(How)
        if how != "inside" or (commit + seed) % INSIDE_EVERY == 0
    ]
    chance.shuffle(all_of_them)
    return all_of_them


def dying(real: Engine, death: Death, pipe: Pipe) -> Engine:
    """Let a process die by its own hand at its commit; where it dies inside of one, it says so and is killed."""

    def before(number: int) -> None:
        if number == death.commit and death.how == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        elif number == death.commit and death.how == "inside":
            pipe.send(None)

    def after(number: int) -> None:
        if number == death.commit and death.how == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(real, before, after)


class Lane(Protocol):
    """One store, on which one process after the other is killed."""

    def kill(self, death: Death) -> list[str]:
        """Let one process live and die, and its heir finish; say what is wrong."""
        ...


def killed(lanes: Sequence[Lane], chosen: Sequence[Death], tell: "Tell") -> list[list[str]]:
    """Share the deaths among the lanes: whichever is free takes the next."""
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def one(death: Death) -> list[str]:
        lane = free.get()
        try:
            return lane.kill(death)
        finally:
            free.put(lane)

    wrong: list[list[str]] = []
    with ThreadPoolExecutor(len(lanes)) as threads:
        try:
            for death, found in zip(chosen, threads.map(one, chosen), strict=True):
                wrong.append(found)
                tell(len(wrong), str(death))
        finally:
            threads.shutdown(cancel_futures=True)
    return wrong


class Tell(Protocol):
    """Whoever hears of each death."""

    def __call__(self, done: int, note: str, /) -> None:
        """Hear that so many have died."""
        ...


def heard(child: Child) -> Any:
    """Hear a word of a child that has one to say."""
    try:
        return child.hear()
    except EOFError as silence:
        raise ChildFailed("A process of the drill ended without saying why.") from silence


def buried(child: Child) -> None:
    """See that a child was killed, and did not end in any other way."""
    if child.wait() != -signal.SIGKILL:
        raise ChildFailed("A process of the drill ended before it could be killed.")

"""Processes whose event loop is blocked: nothing in them can hear a halt, so they have to be ended from outside.

Each has one session, stuck in an async tool that computes or waits without an `await`, or in a thread that holds the
interpreter lock. A sentinel watches each of them. When it is gone, its session must be free for another process.
"""

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, Literal, get_args

from halter.brain.session_runtime import SessionRuntime
from halter.core.clock import SECOND, SystemClock
from halter.core.ids import SessionId, SortableIds, new_worker
from halter.core.pulse import Pulse
from halter.core.tools import Tool
from halter.dispatch.sentinel import sentinel
from halter.dispatch.tending import taken, tended
from halter.guard.ask import Call
from halter.guard.chokepoint import Answer
from halter.tools.tool import tool
from halter_drills.agents import begun, doors, policy_of, standing_of
from halter_drills.children import Pipe
from halter_drills.drill import Ground
from halter_drills.stuck import CATASTROPHE, ENDLESS, STUCK, Marks

Blocking = Literal["computes", "waits", "holds"]
"""An async tool that computes, one that waits, and a plain one in a thread that holds the interpreter lock."""
BLOCKINGS: Final[tuple[Blocking, ...]] = get_args(Blocking)
LEASE: Final = 2 * SECOND
PROMISED: Final = 3 * SECOND
"""So long after a halt a blocked process may run on."""


@dataclass(frozen=True, slots=True)
class Block:
    """One process that is blocked, with its session and the scopes that it is in."""

    session: str
    kind: Blocking
    agent: str
    trigger: str

    def scopes(self) -> tuple[str, str, str]:
        """Name the scopes that halt this process alone."""
        return f"session:{self.session}", f"agent:{self.agent}", f"trigger:{self.trigger}"


def blocks(count: int) -> list[Block]:
    """Plan rounds in which each kind is blocked once."""
    return [
        Block(f"blocked-{number}-{kind}", kind, f"blocked-{number}-{kind}", f"t-{number}-{kind}")
        for number in range(count)
        for kind in BLOCKINGS
    ]


def toolbox(marks: Marks) -> Mapping[str, Tool]:
    """Make tools that block what they run in."""

    async def computes(session: str) -> str:
        marks.make("began", session, os.getpid())
        return str(re.match(CATASTROPHE, ENDLESS))

    async def waits(session: str) -> str:
        marks.make("began", session, os.getpid())
        time.sleep(STUCK)  # noqa: ASYNC251 That is the mistake which is shown.
        return ""

    def holds(session: str) -> str:
        marks.make("began", session, os.getpid())
        return str(re.match(CATASTROPHE, ENDLESS))

    made = (tool(computes, effect="read"), tool(waits, effect="read"), tool(holds, effect="read", isolate=False))
    return {each.spec.name: each for each in made}


def blocked(_: Pipe, ground: Ground, marks: Marks, block: Block, kind: Literal["watched", "alone"]) -> None:
    """Run one session until this process is ended. What its sentinel says is for operators, not for this drill."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    asyncio.run(_run(ground, marks, block, watched=kind == "watched"))


async def _run(ground: Ground, marks: Marks, block: Block, *, watched: bool) -> None:
    clock, store = SystemClock(), ground.open(lease=LEASE)
    worker = new_worker("drill", SortableIds(clock.now))
    policy = policy_of(block.agent)
    async with (
        sentinel(ground.url, "") if watched else nullcontext(Pulse()) as pulse,
        tended(store, clock, worker, LEASE // 3, pulse=pulse),
    ):
        lease = await begun(store, worker, block.session, policy, block.trigger)
        gatehouse = doors(store, clock)
        gatehouse.show_in(pulse)
        standing = standing_of(block.session, policy, block.trigger)
        running = SessionRuntime(store, clock, gatehouse, lease, standing, toolbox(marks))
        arguments = b'{"session":"%s"}' % block.session.encode()
        await running.call(Call(f"{block.session}.1", block.kind, arguments))


def inherited(ground: Ground, ended: Sequence[Block]) -> list[str]:
    """Take up the sessions of ended processes, and see that they act no more; say what is wrong."""
    return asyncio.run(_inherited(ground, ended))


async def _inherited(ground: Ground, ended: Sequence[Block]) -> list[str]:
    clock, store = SystemClock(), ground.open(lease=LEASE)
    worker, wrong = new_worker("heir", SortableIds(clock.now)), list[str]()
    for block in ended:
        lease = await taken(store, clock, worker, SessionId(block.session), LEASE + 10 * SECOND)
        if lease is None:
            wrong.append(f"Session {block.session} of a process that was ended could not be taken up.")
            continue
        standing = standing_of(block.session, policy_of(block.agent), block.trigger)
        running = SessionRuntime(store, clock, doors(store, clock), lease, standing, {})
        answer = await running.attempt(Call(f"{block.session}.2", "waits", b"{}"))
        outcome = answer.outcome if isinstance(answer, Answer) else type(answer).__name__
        if outcome != "external_halt":
            wrong.append(f"Session {block.session} was halted, and another process was let make a call: {outcome}.")
    await store.close()
    return wrong

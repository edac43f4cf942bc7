"""A stopped worker that goes on after its lease ran out: it must change nothing and do nothing twice.

Each zombie is a real process. It works up to some moment of its session and is stopped with SIGSTOP. Another process
takes the session over and ends it. Then the zombie is continued and tries to go on.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from halter.core.clock import SECOND
from halter.journal.apply import Applier, apply
from halter.state.life import message
from halter_drills.checker import Found, check, found_at
from halter_drills.children import Children, Pipe, children
from halter_drills.drill import Drill, Ground, Result, Setting, own_store, result
from halter_drills.takeover import EFFECTS, LEASE, MOMENTS, STEPS, TOGETHER, Case, Heir, Testimony, Zombie, unfenced

CASES: Final = 2 * STEPS * len(MOMENTS)


def run(setting: Setting) -> Result:
    """Stop and continue zombies, some at a time, and check what they did to the store and to the world."""
    cases = [Case(number) for number in range(CASES if setting.seeds is None else setting.seeds)]
    violations: list[str] = []
    with own_store(setting) as ground, children(__name__) as started:
        for first in range(0, len(cases), TOGETHER):
            batch = cases[first : first + TOGETHER]
            setting.progress(first, len(cases), f"{len(batch)} workers are stopped and taken over")
            violations += _batch(ground, started, batch, unfenced if setting.teeth else apply)
        found = found_at(ground.url)
        violations += check(found) + _done_once(found) + _acted_once(ground)
        setting.progress(len(cases), len(cases), "checked")
    counts = {"moments": dict(Counter(case.moment for case in cases)), "events": len(found.events)}
    return result(DRILL.name, ground.kind, len(cases), violations, counts)


def _batch(ground: Ground, started: Children, cases: Sequence[Case], applier: Applier) -> list[str]:
    zombies = [started.start(_zombie, ground, case, applier) for case in cases]
    sessions: list[str] = [zombie.hear() for zombie in zombies]
    parked = [session for session, case in zip(sessions, cases, strict=True) if case.moment == "parked"]
    asyncio.run(_say_something(ground, parked))
    for zombie in zombies:
        zombie.tell("stand still")
        zombie.hear()
        zombie.stop()
    time.sleep(1.2 * LEASE / SECOND)
    heir = started.start(_heir, ground, len(sessions), cases[0])
    ended = heir.hear()
    for zombie in zombies:
        zombie.tell("go on")
        zombie.go_on()
    wrong = [] if sorted(ended) == sorted(sessions) else [f"Of {sessions}, only {ended} were taken over."]
    for case, zombie in zip(cases, zombies, strict=True):
        wrong += _unrefused(case, zombie.hear())
    started.end()
    return wrong


def _unrefused(case: Case, testimony: Testimony) -> list[str]:
    where = f"The worker of case {case.number}, stopped {case.moment} in step {case.step}, went on"
    return [f"{where}, and {tried} was let through." for tried, answer in testimony if answer != "refused"]


def _done_once(found: Found) -> list[str]:
    """Check that each step of each session was begun once, settled once, and that nothing follows the end."""
    wrong: list[str] = []
    times = Counter((event.kind, event.facts["call"]) for event in found.events if "call" in event.facts)
    last = {event.stream: event for event in found.events}
    for stream, event in last.items():
        if stream.endswith("/in"):
            continue
        if event.kind != "session_ended":
            wrong.append(f"The {event} is the last of its session, instead of its end.")
        for number in range(STEPS):
            call = f"{stream.removeprefix('session:')}/{number}"
            done = times["call_started", call], times["call_settled", call]
            if done != (1, 1):
                wrong.append(f"The call {call} was begun {done[0]} times and settled {done[1]} times.")
    return wrong


def _acted_once(ground: Ground) -> list[str]:
    """Check in the outside world that no effect happened twice."""
    times = Counter((ground.folder / EFFECTS).read_text().splitlines())
    return [f"The call {call} had its effect {count} times." for call, count in times.items() if count > 1]


async def _say_something(ground: Ground, sessions: Sequence[str]) -> None:
    """Wake sessions that rest, so that whoever claims next takes them up."""
    store = ground.open(lease=LEASE)
    for session in sessions:
        await store.commit(message(session, f"{session}/hello", b"Are you there?", "ada"))
    await store.close()


def _zombie(pipe: Pipe, ground: Ground, case: Case, applier: Applier) -> None:
    asyncio.run(Zombie(pipe, ground, case, applier).live())


def _heir(pipe: Pipe, ground: Ground, count: int, first: Case) -> None:
    pipe.send(asyncio.run(Heir(ground, f"heir-{first.number}", first.agent, apply).take_over(count)))


DRILL: Final = Drill("zombie", "A stopped worker that goes on after its lease ran out can write nothing.", run)

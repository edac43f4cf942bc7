"""What became of the sessions of the chaos drill: judged by plain SQL, by what each worker said, and by the world."""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from halter.app.opened import LEASE
from halter.core.clock import SECOND
from halter_drills import checker
from halter_drills.chaos_agent import expected_end, paid, sessions
from halter_drills.chaos_workers import Worker
from halter_drills.checker import Fact, check, found_at
from halter_drills.drill import Ground, connection
from halter_drills.examine import examined

PRICE: Final = 50_000
WITHIN: Final = 2 * SECOND
"""How long after the end of its lease an orphan may be without anybody."""
REFUSES: Final = 3
TOLD: Final = 3000
"""So much is repeated of what a worker complained of."""
REFUSAL: Final = "ahead of the database's"


class Orphan(NamedTuple):
    """A session whose owner was killed or stopped, and until when the owner's lease holds."""

    session: str
    generation: int
    alive_until: int


@dataclass(slots=True)
class Seen:
    """What the drill saw: what happened when, from when to when; whose sessions had nobody; and a wrong clock."""

    blows: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    orphans: list[Orphan] = field(default_factory=list[Orphan])
    skewed: Worker | None = None
    answered: int = 0
    revived: int = 0
    stalled: int = 0


def judged(
    ground: Ground, all_workers: Sequence[Worker], living: Sequence[Worker], seen: Seen, total: int
) -> tuple[list[str], dict[str, Any]]:
    """Say in sentences what is wrong, and count what there was."""
    ended = [*refused(seen.skewed), *drained(living)]
    found = found_at(ground.url)
    effects = paid(ground.folder)
    late, longest = lateness(found.events, seen)
    wrong = [
        *shared(all_workers),
        *check(found),
        *unended(found.events, total),
        *asyncio.run(_examined(ground)),
        *lost(ground, all_workers),
        *checker.paid(found.events, {call: [PRICE] * times for call, times in effects.items()}),
        *unpaid(found.events, effects),
        *late,
        *untidy(all_workers),
        *ended,
    ]
    kinds = [event.kind for event in found.events]
    counts = {
        "workers": len(all_workers),
        "revived": seen.revived,
        "events": len(found.events),
        "payments": len(effects),
        "caps_reached": kinds.count("cost_cap_reached"),
        "doubts_answered": seen.answered,
        "orphans": len(seen.orphans),
        "longest_after_the_lease_ms": longest // 1000,
        "machine_stalled_ms": seen.stalled // 1000,
    }
    return wrong, counts


async def _examined(ground: Ground) -> list[str]:
    store = ground.open()
    try:
        return await examined(store)
    finally:
        await store.close()


def unended(events: Sequence[Fact], total: int) -> Iterator[str]:
    """Check that each session came to the end that it had to come to, once."""
    ends: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.kind == "session_ended":
            ends[event.stream].append(event.facts["state"])
    for session, errand in sessions(total):
        if ends[f"session:{session}"] != [expected_end(errand)]:
            yield f"The session {session} ended {ends[f'session:{session}']} instead of {expected_end(errand)}."


def lost(ground: Ground, all_workers: Sequence[Worker]) -> Iterator[str]:
    """Check that whatever a worker was told is durable is there, just so."""
    with closing(connection(ground.url)) as database:
        rows = database.execute("SELECT stream, seq, hash FROM events").fetchall()
    kept = {(stream, seq): bytes(value).hex() for stream, seq, value in rows}
    for worker in all_workers:
        for line in worker.told():
            if kept.get((line.stream, line.seq)) != line.hash:
                yield f"Event {line.seq} of {line.stream} was acknowledged to {worker.name} and is lost."


def shared(all_workers: Sequence[Worker]) -> Iterator[str]:
    """Check that each generation of a session was one worker's alone."""
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for worker in all_workers:
        for line in worker.told():
            if line.stream.startswith("session:") and not line.stream.endswith("/in") and line.generation:
                owners[line.stream, line.generation].add(worker.name)
    for (stream, generation), names in owners.items():
        if len(names) > 1:
            yield f"Generation {generation} of {stream} was written by {' and '.join(sorted(names))}."


def unpaid(events: Sequence[Fact], effects: Mapping[str, int]) -> Iterator[str]:
    """Check that what is taken for paid was paid, and that nobody paid without having said so before."""
    begun = {event.facts["call"] for event in events if event.kind == "call_started" and event.facts["tool"] == "pay"}
    for event in events:
        if event.kind == "call_settled" and event.facts["outcome"] == "ok" and event.facts["call"] in begun:
            call = event.facts["call"]
            if call not in effects:
                yield f"The call {call} is taken for done and had no effect."
    for call in effects.keys() - begun:
        yield f"The call {call} had its effect, and there is no intent of it."


def lateness(events: Sequence[Fact], seen: Seen) -> tuple[list[str], int]:
    """Check how soon somebody went on with each orphan; tell the longest time after its lease that counts."""
    moments: dict[tuple[str, int], int] = {}
    ended: set[str] = set()
    for event in events:
        moments.setdefault((event.stream, event.generation), event.at)
        if event.kind == "session_ended":
            ended.add(event.stream)
    wrong: list[str] = []
    longest = 0
    for orphan in set(seen.orphans):
        stream = f"session:{orphan.session}"
        later = [at for (name, generation), at in moments.items() if name == stream and generation > orphan.generation]
        if not later:
            if stream not in ended:
                wrong.append(f"Nobody went on with {orphan.session} after its owner was gone.")
            continue
        after = min(later) - since(orphan.alive_until, min(later), seen)
        longest = max(longest, after)
        if after > WITHIN + seen.stalled:
            wrong.append(f"Somebody went on with {orphan.session} {after / SECOND:.1f} s after its lease had run out.")
    return wrong, longest


def since(alive_until: int, resumed: int, seen: Seen) -> int:
    """Tell from when on somebody could go on with an orphan.

    Not while the server was away. And a worker that was killed or stopped meanwhile may have been about to do so: then
    it counts from the end of that one's lease.
    """
    moment = alive_until
    for what, begin, end in seen.blows:
        if what == "restart" and begin < resumed and end > moment:
            moment = end
        if what in ("kill", "stop") and alive_until < begin < resumed:
            moment = max(moment, begin + LEASE)
    return min(moment, resumed)


def refused(skewed: Worker | None) -> Iterator[str]:
    """Check that a worker whose clock is wrong said so, and did nothing."""
    if skewed is None:
        return
    code, said = skewed.ended(), skewed.complaints()
    if code != REFUSES or REFUSAL not in said:
        yield f"A worker whose clock was two hours ahead ended with {code} and said: {said}"
    if any(line.generation for line in skewed.told()):
        yield "A worker whose clock was two hours ahead took a session."


def drained(living: Sequence[Worker]) -> Iterator[str]:
    """End those that are left as an operator would, and check that they end well."""
    for worker in living:
        worker.process.send_signal(signal.SIGTERM)
    for worker in living:
        code = worker.ended()
        if code != 0:
            yield f"{worker.name} was asked to end and left with {code}: {worker.complaints()}"


def untidy(all_workers: Sequence[Worker]) -> Iterator[str]:
    """Check that nobody was shown a traceback."""
    for worker in all_workers:
        if "Traceback" in worker.complaints():
            yield f"{worker.name} wrote a traceback: {worker.complaints()[-TOLD:]}"

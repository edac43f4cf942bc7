"""From one second after a halt, nothing in its scope acts: whatever sessions were stuck in, they have ended by then.

One process has sessions that are stuck: in a tool, in a model that never answers, in processes with children, in the
wait for a person or for money. Another process halts, over a connection of its own, and resumes. The drill reads what
became of it with plain SQL, from the marks that tools left outside, and from the list of processes.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, Final, Literal, get_args

from halter.core.clock import SECOND
from halter.drills.agents import PERSON
from halter.drills.checker import Fact, found_at
from halter.drills.children import Child, ChildStuck, Pipe, children, process_state
from halter.drills.drill import Drill, Ground, Result, Setting, own_store, result
from halter.drills.examine import in_memory
from halter.drills.stuck import KINDS, Case, Mark, Marks, Round, worker
from halter.guard.halts import halt, resume

Scope = Literal["session", "agent", "trigger", "fleet"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
HALTS: Final = 50
TOGETHER: Final = 10
GROUPS: Final = 4
PROMISED: Final = SECOND
PATIENCE: Final = 30.0
GONE: Final = ("", "Z", "X")
"""The states of a process that does nothing any more, whether or not somebody has taken note of that."""
REASON: Final = "the drill says so"

_REFUSED: Final = "external_halt"


@dataclass(frozen=True, slots=True)
class Halting:
    """One round: what is stuck, and what is halted then."""

    scope: Scope
    round: Round

    def scopes(self) -> list[str]:
        """List all that is halted, each once."""
        return list(dict.fromkeys(self.scope_of(case) for case in (*self.round.cases, *self.round.probes)))

    def scope_of(self, case: Case) -> str:
        """Name the scope by which a session is halted in this round."""
        match self.scope:
            case "session":
                return f"session:{case.session}"
            case "agent":
                return f"agent:{case.agent}"
            case "trigger":
                return f"trigger:{case.trigger}"
            case "fleet":
                return "fleet"


def rounds(wanted: int) -> list[Halting]:
    """Plan rounds in all scopes, one after the other, until there are as many halts as are wanted."""
    planned: list[Halting] = []
    kinds = cycle(KINDS)
    for number in count():
        scope = SCOPES[number % len(SCOPES)]
        cases = [Case(f"r{number}-{place}", next(kinds), *_names(number, place)) for place in range(TOGETHER)]
        probing = 1 if scope in ("session", "fleet") else GROUPS
        probes = [Case(f"r{number}-probe-{place}", "busy", *_names(number, place)) for place in range(probing)]
        planned.append(Halting(scope, Round(cases, probes)))
        if sum(len(each.scopes()) for each in planned) >= wanted:
            return planned
    raise AssertionError("There is always a next scope.")


def _names(number: int, place: int) -> tuple[str, str]:
    return f"agent-{number}-{place % GROUPS}", f"trigger-{number}-{place % GROUPS}"


def halter(pipe: Pipe, ground: Ground) -> None:
    """Halt and resume, as somebody else does in a process of their own."""
    asyncio.run(_halt(pipe, ground))


async def _halt(pipe: Pipe, ground: Ground) -> None:
    store = ground.open()
    while (word := await asyncio.to_thread(pipe.recv)) is not None:
        what, number, scopes = word
        said: dict[str, int] = {}
        for scope in scopes:
            key = f"{number}/{what}/{scope}"
            write = halt if what == "halt" else resume
            await store.commit(write(scope, PERSON, key, reason=REASON))
            said[scope] = time.time_ns() // 1000
        pipe.send(said)
    await store.close()


@dataclass(slots=True)
class Seen:
    """What was seen of all rounds while they ran."""

    halted: dict[str, int] = field(default_factory=dict[str, int])
    """When each session was halted, by the clock of this machine."""
    violations: list[str] = field(default_factory=list[str])


def run(setting: Setting) -> Result:
    """Halt as often as is wanted, in all scopes, and look at what became of every session."""
    planned = rounds(setting.seeds or HALTS)
    halts = sum(len(each.scopes()) for each in planned)
    seen = Seen()
    with own_store(in_memory(setting)) as ground, children(__name__) as started:
        marks = Marks(ground.folder / "marks")
        marks.file.touch()
        working = started.start(worker, ground, marks, "deaf" if setting.teeth else "listening")
        halting = started.start(halter, ground)
        done = 0
        for number, each in enumerate(planned):
            setting.progress(done, halts, f"{len(each.round.cases)} stuck sessions are halted by {each.scope}")
            _round(number, each, (working, halting), marks, seen)
            done += len(each.scopes())
        for child in (working, halting):
            child.tell(None)
            child.wait()
        found = found_at(ground.url).events
        took = sorted(_judged(planned, found, marks.read(), seen))
        setting.progress(halts, halts, "checked")
    counts = {"halts": halts, "sessions": sum(len(each.round.cases) for each in planned), **_figures(took)}
    return result(DRILL.name, ground.kind, halts, seen.violations, counts)


def _round(number: int, each: Halting, hands: tuple[Child, Child], marks: Marks, seen: Seen) -> None:
    working, halting = hands
    working.tell(each.round)
    began = _all_began(each, marks)
    halting.tell(("halt", number, each.scopes()))
    said: dict[str, int] = halting.hear()
    working.tell("halted")
    seen.halted |= {case.session: said[each.scope_of(case)] for case in each.round.cases}
    seen.violations += _left_running(began, seen.halted)
    refused: list[str] = working.hear()
    seen.violations += [f"While {each.scope} was halted, a call came to {out}." for out in refused if out != _REFUSED]
    halting.tell(("resume", number, each.scopes()))
    halting.hear()
    working.tell("resumed")
    acted: list[str] = working.hear()
    seen.violations += [f"After {each.scope} was resumed, a call came to {out}." for out in acted if out != "ok"]


def _all_began(each: Halting, marks: Marks) -> list[Mark]:
    """Wait until every session of a round is where it is stuck."""
    sessions = {case.session for case in each.round.cases}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        began = [mark for mark in marks.read() if mark.what == "began" and mark.session in sessions]
        if {mark.session for mark in began} == sessions:
            return began
        time.sleep(0.01)
    raise ChildStuck("The sessions of the drill did not come to where they should be stuck.")


def _left_running(began: Sequence[Mark], halted: Mapping[str, int]) -> list[str]:
    """Watch the processes that stuck sessions had started, until all are gone or their second is over."""
    left = {pid: halted[mark.session] + PROMISED for mark in began for pid in mark.pids}
    wrong: list[str] = []
    while left:
        now = time.time_ns() // 1000
        left = {pid: until for pid, until in left.items() if process_state(pid) not in GONE}
        over = [pid for pid, until in left.items() if now > until]
        wrong += [f"A process that a halted call had started ran on after {PROMISED / SECOND:g} s." for _ in over]
        left = {pid: until for pid, until in left.items() if pid not in over}
        time.sleep(0.005)
    return wrong


def _judged(planned: Sequence[Halting], found: Sequence[Fact], marks: Sequence[Mark], seen: Seen) -> list[int]:
    """Judge every session by what the store and the outside world say; return how long each took to end."""
    streams: dict[str, list[Fact]] = defaultdict(list)
    for event in found:
        streams[event.stream].append(event)
    seen.violations += [*unnamed(planned, streams["fleet"]), *acted_on(marks, seen.halted)]
    halted = iter([event.at for event in streams["fleet"] if event.kind == "halt_requested"])
    took: list[int] = []
    for each in planned:
        at = dict(zip(each.scopes(), halted, strict=False))
        for case in each.round.cases:
            events, since = streams[f"session:{case.session}"], at.get(each.scope_of(case), 0)
            where = f"Session {case.session} ({case.kind}), halted by {each.scope},"
            seen.violations += [f"{where} {what}" for what in (*unended(events), *late(events, since))]
            took += [event.at - since for event in events if event.kind == "session_ended"]
    return took


def unnamed(planned: Sequence[Halting], fleet: Sequence[Fact]) -> list[str]:
    """Check that every halt and every resume is in the journal, with its scope and the name of who did it."""
    scopes = [scope for each in planned for scope in each.scopes()]
    wrong: list[str] = []
    for kind in ("halt_requested", "halt_lifted"):
        events = [event for event in fleet if event.kind == kind]
        if [event.facts["scope"] for event in events] != scopes:
            wrong.append(f"Of {len(scopes)} halts, {len(events)} have a {kind} in the journal.")
        wrong += [f"The {event} does not say who did it." for event in events if event.facts["by"] != PERSON]
    return wrong


def unended(events: Sequence[Fact]) -> Iterator[str]:
    """Check that a session ended, and as one that was halted."""
    ends = [event.facts for event in events if event.kind == "session_ended"]
    if not ends:
        yield "was never ended."
    for facts in ends:
        if (facts["state"], facts["terminal_reason"]) != ("HALTED", _REFUSED):
            yield f"ended {facts['state']}, {facts['terminal_reason']}."


def late(events: Sequence[Fact], halted: int) -> Iterator[str]:
    """Check that from a second after the halt nothing begins, nothing is under way, and the session is over."""
    over = halted + PROMISED
    begun = {_flight(event): event for event in events if event.kind in ("call_started", "request_started")}
    settled = {_flight(event): event for event in events if event.kind in ("call_settled", "request_settled")}
    for flight, event in begun.items():
        if event.at >= over:
            yield f"began {flight} {_after(event.at - halted)}."
        if flight not in settled:
            yield f"has no outcome of {flight}."
        elif settled[flight].at >= over:
            yield f"had {flight} under way until {_after(settled[flight].at - halted)}."
    for event in events:
        if event.kind == "session_ended" and event.at >= over:
            yield f"ended {_after(event.at - halted)}."


def _flight(event: Fact) -> str:
    return event.facts.get("call") or event.facts["request"]


def _after(micros: int) -> str:
    return f"{micros / SECOND:.2f} s after the halt"


def acted_on(marks: Sequence[Mark], halted: Mapping[str, int]) -> list[str]:
    """Check by the marks of the outside world that nothing went on, and that what was stuck in this process stopped."""
    wrong: list[str] = []
    for mark in marks:
        since = mark.at - halted.get(mark.session, mark.at)
        if mark.what != "began" and since >= PROMISED:
            wrong.append(f"Outside, session {mark.session} {mark.what} {_after(since)}.")
    return wrong


def _figures(took: Sequence[int]) -> dict[str, Any]:
    """Tell in milliseconds how long it took from a halt to the end of a session."""
    if not took:
        return {}
    ranks = {"p50_ms": len(took) // 2, "p99_ms": len(took) * 99 // 100, "max_ms": len(took) - 1}
    return {name: round(took[rank] * 1000 / SECOND, 1) for name, rank in ranks.items()}


DRILL: Final = Drill(
    "halt", "Within a second of a halt, from any process, whatever is in flight is stopped and its session ended.", run
)

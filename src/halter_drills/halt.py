"""From one second after a halt, nothing in its scope acts: whatever sessions were stuck in, they have ended by then.

One process has sessions that are stuck: in a tool, async or plain, in a model that never answers, in processes with
children, in the wait for a person or for money. Another process halts, over a connection of its own, and resumes. Then
whole processes are blocked, and halted in the same way: each must be gone within three seconds. The drill reads what
became of it with plain SQL, from the marks that tools left outside, and from the list of processes. A metronome beside
it knows how busy the machine was: what is late by no more than that is told as not known.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from typing import Any, Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND
from halter.core.errors import StoreUnavailable
from halter.core.ports import Store, Write
from halter.guard.halts import halt, resume
from halter_drills.checker import LateFinding, RecordedEvent, Stall, found_at, metronome, told_apart
from halter_drills.children import Child, Children, ChildStuck, Pipe, children, process_state
from halter_drills.drill import Drill, DrillResult, Ground, Setting, in_memory, own_store, result
from halter_drills.stuck import (
    KINDS,
    PLAIN,
    Block,
    HaltRound,
    Mark,
    Marks,
    StuckSession,
    blocked,
    blocks,
    inherited,
    worker,
)
from halter_drills.stuck import PROMISED as GONE_BY
from halter_drills.workload import PERSON

Scope = Literal["session", "agent", "trigger", "fleet"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
HALTS: Final = 50
TOGETHER: Final = 10
GROUPS: Final = 4
PROMISED: Final = SECOND
PATIENCE: Final = 60.0
TOGETHER_BLOCKED: Final = 3
MOST_BLOCKED: Final = 4
PATIENCE_BLOCKED: Final = 3 * SECOND
UNLOCKED_BY: Final = 15.0
GONE: Final = ("", "Z", "X")
"""The states of a process that does nothing any more, whether or not somebody has taken note of that."""
REASON: Final = "the drill says so"

_REFUSED: Final = "external_halt"


class Halting(msgspec.Struct, frozen=True):
    """One round: what is stuck, and what is halted then."""

    scope: Scope
    round: HaltRound

    def scopes(self) -> list[str]:
        return list(dict.fromkeys(self.scope_of(case) for case in (*self.round.cases, *self.round.probes)))

    def scope_of(self, case: StuckSession) -> str:
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
        cases = [StuckSession(f"r{number}-{place}", next(kinds), *_names(number, place)) for place in range(TOGETHER)]
        probing = 1 if scope in ("session", "fleet") else GROUPS
        probes = [StuckSession(f"r{number}-probe-{place}", "busy", *_names(number, place)) for place in range(probing)]
        planned.append(Halting(scope, HaltRound(cases, probes)))
        if sum(len(each.scopes()) for each in planned) >= wanted:
            return planned
    raise AssertionError("There is always a next scope.")


def _names(number: int, place: int) -> tuple[str, str]:
    return f"agent-{number}-{place % GROUPS}", f"trigger-{number}-{place % GROUPS}"


def halter(pipe: Pipe, ground: Ground) -> None:
    asyncio.run(_halt(pipe, ground))


async def _halt(pipe: Pipe, ground: Ground) -> None:
    store = ground.open()
    while (word := await asyncio.to_thread(pipe.recv)) is not None:
        what, number, scopes = word
        said: dict[str, int] = {}
        for scope in scopes:
            key = f"{number}/{what}/{scope}"
            write = halt if what == "halt" else resume
            await _written(store, write(scope, PERSON, key, reason=REASON))
            said[scope] = time.time_ns() // 1000
        pipe.send(said)
    await store.close()


async def _written(store: Store, write: Write) -> None:
    """Write as soon as the store can be written to: a blocked process may keep it locked until it is ended."""
    while True:
        try:
            await store.commit(write)
        except StoreUnavailable:
            continue
        return


@dataclass(slots=True)
class HaltsSeen:
    """What was seen of all rounds while they ran. Times are microseconds by the clock of this machine."""

    total: int
    """How many halts there will be."""
    done: int = 0
    halted: dict[str, int] = field(default_factory=dict[str, int])
    """When each session was halted."""
    violations: list[str] = field(default_factory=list[str])
    late: list[LateFinding] = field(default_factory=list[LateFinding])
    took: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))
    """How long it took from a halt to the end of a session, or of a process, by class."""


def run(setting: Setting) -> DrillResult:
    planned = rounds(setting.seeds or HALTS)
    halts, stuck = sum(len(each.scopes()) for each in planned), sum(len(each.round.cases) for each in planned)
    ending = blocks(max(1, min(MOST_BLOCKED, halts // 12)))
    seen = HaltsSeen(halts + len(ending))
    with own_store(in_memory(setting)) as ground, children(__name__) as started:
        marks = Marks(ground.folder / "marks")
        marks.file.touch()
        ticking = started.start(metronome)
        halting = started.start(halter, ground)
        _halt_sessions(setting, planned, started.start(worker, ground, marks, _ears(setting)), halting, marks, seen)
        _halt_processes(setting, ending, started, halting, marks, ground, seen)
        halting.tell(None)
        halting.wait()
        _judge(planned, found_at(ground.url).events, marks.read(), seen)
        ticking.tell(None)
        stalls: list[Stall] = ticking.hear()
        setting.progress(seen.total, seen.total, "checked")
    late, unsure = told_apart(seen.late, stalls)
    counts = {"halts": seen.total, "sessions": stuck, "processes": len(ending), **_figures(seen.took)}
    busy = {"too_busy_to_tell": unsure} if unsure else {}
    return result(DRILL.name, ground.kind, seen.total, [*seen.violations, *late], {**counts, **busy})


def _ears(setting: Setting) -> Literal["deaf", "listening"]:
    return "deaf" if setting.teeth else "listening"


def _halt_sessions(
    setting: Setting, planned: Sequence[Halting], working: Child, halting: Child, marks: Marks, seen: HaltsSeen
) -> None:
    for number, each in enumerate(planned):
        setting.progress(seen.done, seen.total, f"{len(each.round.cases)} stuck sessions are halted by {each.scope}")
        _round(number, each, (working, halting), marks, seen)
        seen.done += len(each.scopes())
    working.tell(None)
    working.wait()


def _halt_processes(
    setting: Setting,
    ending: Sequence[Block],
    started: Children,
    halting: Child,
    marks: Marks,
    ground: Ground,
    seen: HaltsSeen,
) -> None:
    """Block some processes at a time, halt each, and see that it is gone in time and its session is free."""
    for number in range(0, len(ending), TOGETHER_BLOCKED):
        together = ending[number : number + TOGETHER_BLOCKED]
        setting.progress(seen.done, seen.total, f"{len(together)} blocked processes are halted")
        kind = "alone" if setting.teeth else "watched"
        running = {block.session: started.start(blocked, ground, marks, block, kind) for block in together}
        if not _all_block(together, running, marks, seen):
            continue
        scopes = {block.session: block.scopes()[place % 3] for place, block in enumerate(together)}
        halting.tell(("halt", f"blocked-{number}", list(scopes.values())))
        if not halting.pipe.poll(UNLOCKED_BY):
            seen.violations.append("Blocked processes kept the store locked, and nothing could be halted.")
            _kill(running.values())
        said: dict[str, int] = halting.hear()
        _see_gone({block: (running[block.session], said[scopes[block.session]]) for block in together}, seen)
        seen.violations += inherited(ground, together)
        seen.done += len(together)


def _all_block(together: Sequence[Block], running: Mapping[str, Child], marks: Marks, seen: HaltsSeen) -> bool:
    """Wait until all processes are blocked; one that keeps the store locked, and is not ended, keeps others from it."""
    try:
        _began([block.session for block in together], marks)
    except ChildStuck:
        seen.violations.append("A blocked process kept the store locked, and no other could begin.")
        _kill(running.values())
        return False
    return True


def _kill(running: Iterable[Child]) -> None:
    for process in running:
        process.kill()


def _see_gone(ending: Mapping[Block, tuple[Child, int]], seen: HaltsSeen) -> None:
    """Wait until all processes are over, each since it was halted; what runs on is ended here."""
    left = dict(ending)
    while left:
        for block, (process, halted) in list(left.items()):
            took = time.time_ns() // 1000 - halted
            if process_state(process.pid) in GONE:
                seen.took["process"].append(took)
                seen.late += _gone_late(block, halted, took)
                del left[block]
            elif took > GONE_BY + PATIENCE_BLOCKED:
                told = f"A process ({block.kind}) was blocked and halted, and ran on after {GONE_BY / SECOND:g} s."
                seen.violations.append(told)
                process.kill()
                del left[block]
        time.sleep(0.005)


def _gone_late(block: Block, halted: int, took: int) -> list[LateFinding]:
    if took <= GONE_BY:
        return []
    return [
        LateFinding(f"A blocked process ({block.kind}) was gone only {_after(took)}.", halted, took - GONE_BY, GONE_BY)
    ]


def _round(number: int, each: Halting, hands: tuple[Child, Child], marks: Marks, seen: HaltsSeen) -> None:
    working, halting = hands
    working.tell(each.round)
    began = _began([case.session for case in each.round.cases], marks)
    halting.tell(("halt", number, each.scopes()))
    said: dict[str, int] = halting.hear()
    working.tell("halted")
    seen.halted |= {case.session: said[each.scope_of(case)] for case in each.round.cases}
    seen.late += _left_running(began, seen.halted)
    refused: list[str] = working.hear()
    seen.violations += [f"While {each.scope} was halted, a call came to {out}." for out in refused if out != _REFUSED]
    halting.tell(("resume", number, each.scopes()))
    halting.hear()
    working.tell("resumed")
    acted: list[str] = working.hear()
    seen.violations += [f"After {each.scope} was resumed, a call came to {out}." for out in acted if out != "ok"]


def _began(sessions: Sequence[str], marks: Marks) -> list[Mark]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        began = [mark for mark in marks.read() if mark.what == "began" and mark.session in sessions]
        if {mark.session for mark in began} == set(sessions):
            return began
        time.sleep(0.01)
    raise ChildStuck("The sessions of the drill did not come to where they should be stuck.")


def _left_running(began: Sequence[Mark], halted: Mapping[str, int]) -> list[LateFinding]:
    """Watch the processes that stuck sessions had started, until all are gone or have run on for far too long."""
    left = {pid: halted[mark.session] for mark in began for pid in mark.pids}
    late: list[LateFinding] = []
    while left:
        now = time.time_ns() // 1000
        gone = [pid for pid in left if process_state(pid) in GONE]
        for pid in {*gone, *(pid for pid, since in left.items() if now > since + 2 * PROMISED)}:
            over = now - left[pid] - PROMISED
            if over > 0:
                told = f"A process that a halted call had started ran on after {PROMISED / SECOND:g} s."
                late.append(LateFinding(told, left[pid], over))
            del left[pid]
        time.sleep(0.005)
    return late


def _judge(planned: Sequence[Halting], found: Sequence[RecordedEvent], marks: Sequence[Mark], seen: HaltsSeen) -> None:
    streams: dict[str, list[RecordedEvent]] = defaultdict(list)
    for event in found:
        streams[event.stream].append(event)
    ours = {scope for each in planned for scope in each.scopes()}
    fleet = [event for event in streams["fleet"] if event.facts.get("scope") in ours]
    seen.violations += unnamed(planned, fleet)
    seen.late += acted_on(marks, seen.halted)
    halted = iter([event.at for event in fleet if event.kind == "halt_requested"])
    for each in planned:
        at = dict(zip(each.scopes(), halted, strict=False))
        for case in each.round.cases:
            events, since = streams[f"session:{case.session}"], at.get(each.scope_of(case), 0)
            where = f"Session {case.session} ({case.kind}), halted by {each.scope},"
            seen.violations += [f"{where} {what}" for what in unended(events)]
            seen.late += [replace(found, sentence=f"{where} {found.sentence}") for found in late(events, since)]
            kind = "plain" if case.kind in PLAIN else "other"
            seen.took[kind] += [event.at - since for event in events if event.kind == "session_ended"]


def unnamed(planned: Sequence[Halting], fleet: Sequence[RecordedEvent]) -> list[str]:
    """Check that every halt and every resume is in the journal, with its scope and the name of who did it."""
    scopes = [scope for each in planned for scope in each.scopes()]
    wrong: list[str] = []
    for kind in ("halt_requested", "halt_lifted"):
        events = [event for event in fleet if event.kind == kind]
        if [event.facts["scope"] for event in events] != scopes:
            wrong.append(f"Of {len(scopes)} halts, {len(events)} have a {kind} in the journal.")
        wrong += [f"The {event} does not say who did it." for event in events if event.facts["by"] != PERSON]
    return wrong


def unended(events: Sequence[RecordedEvent]) -> Iterator[str]:
    ends = [event.facts for event in events if event.kind == "session_ended"]
    if not ends:
        yield "was never ended."
    for facts in ends:
        if (facts["state"], facts["terminal_reason"]) != ("HALTED", _REFUSED):
            yield f"ended {facts['state']}, {facts['terminal_reason']}."


def late(events: Sequence[RecordedEvent], halted: int) -> Iterator[LateFinding]:
    """Check that from a second after the halt nothing begins, nothing is under way, and the session is over."""
    over = halted + PROMISED
    begun = {_flight(event): event for event in events if event.kind in ("call_started", "request_started")}
    settled = {_flight(event): event for event in events if event.kind in ("call_settled", "request_settled")}
    for flight, event in begun.items():
        if event.at >= over:
            yield LateFinding(f"began {flight} {_after(event.at - halted)}.", halted, event.at - over + 1)
        if flight not in settled:
            yield LateFinding(f"has no outcome of {flight}.")
        elif settled[flight].at >= over:
            until = settled[flight].at
            yield LateFinding(f"had {flight} under way until {_after(until - halted)}.", halted, until - over + 1)
    for event in events:
        if event.kind == "session_ended" and event.at >= over:
            yield LateFinding(f"ended {_after(event.at - halted)}.", halted, event.at - over + 1)


def _flight(event: RecordedEvent) -> str:
    return event.facts.get("call") or event.facts["request"]


def _after(micros: int) -> str:
    return f"{micros / SECOND:.2f} s after the halt"


def acted_on(marks: Sequence[Mark], halted: Mapping[str, int]) -> list[LateFinding]:
    """Check by the marks of the outside world that nothing went on, and that what was stuck in this process stopped."""
    found: list[LateFinding] = []
    for mark in marks:
        at = halted.get(mark.session, mark.at)
        since = mark.at - at
        if mark.what != "began" and since >= PROMISED:
            told = f"Outside, session {mark.session} {mark.what} {_after(since)}."
            found.append(LateFinding(told, at, since - PROMISED + 1))
    return found


def _figures(took: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Tell in milliseconds how long it took from a halt to the end of a session, or of a whole process, by class."""
    sessions = [each for kind, times in took.items() if kind != "process" for each in times]
    return {**_ranked(sessions), **{kind: _ranked(times) for kind, times in sorted(took.items()) if times}}


def _ranked(took: Sequence[int]) -> dict[str, float]:
    if not took:
        return {}
    ranks = {"p50_ms": len(took) // 2, "p99_ms": len(took) * 99 // 100, "max_ms": len(took) - 1}
    return {name: round(sorted(took)[rank] * 1000 / SECOND, 1) for name, rank in ranks.items()}


DRILL: Final = Drill(
    "halt",
    "Within a second of a halt, from any process, whatever is in flight is stopped and its session ended; "
    "a process that is blocked is gone within three.",
    run,
)

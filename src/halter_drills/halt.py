"""One second after a halt nothing in its scope acts, and its sessions have ended, wherever they were stuck.

One process has sessions that are stuck: in a tool, async or plain, in a model that never answers, in processes with
children, in the wait for a person or for money. Another process halts and resumes them over its own connection. Then
whole processes are blocked, and halted in the same way: each must be gone within three seconds. The drill judges by
plain SQL, by the marks that tools leave outside, and by the list of processes. A metronome measures how busy the
machine is: lateness within that measure is reported as not known.
"""

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.errors import StoreUnavailable
from halter.core.ids import SessionId, SortableIds, WorkerId, make_worker_id
from halter.core.messages import Prompt, Reply, TextListener, make_user_message
from halter.core.ports import Query, Store
from halter.core.processes import LivenessWriter
from halter.core.spec import ToolRule
from halter.core.tools import Permit, Tool
from halter.core.usage import ModelName
from halter.dispatch.heartbeat import acquire_lease, keep_leases
from halter.dispatch.sentinel import run_sentinel
from halter.guard.halts import BudgetBusy, RateLimited, halt, resume
from halter.guard.model_door import AnsweredRequest, ModelRequest
from halter.guard.prepare import Call
from halter.guard.tool_door import Answer
from halter.loop.session_runtime import SessionRuntime
from halter.testing.fakes import StoreProxy, T
from halter.tools.function_tool import tool
from halter.tools.shell import make_shell_tool
from halter_drills.checker import LateFinding, RecordedEvent, Stall, metronome, read_store, split_lateness
from halter_drills.children import Child, Children, ChildStuck, Pipe, children, process_state
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, use_memory_file
from halter_drills.workload import PERSON, begin_session, make_guard_runtime, policy_of, standing_of

# A worker whose sessions are all stuck, each in another way.

Plain = Literal["matches", "counts", "naps", "starts"]
"""Stuck in a plain tool: in a bad regular expression, in a loop in C, asleep, in a program that it started."""
Kind = Literal["tool", "model", "isolated", "command", "thread", "busy", "asks", "waits", Plain]
"""Stuck in a tool, a model, a process, a program with children, a thread; busy; waiting for a person, or for money."""
PLAIN: Final[tuple[Plain, ...]] = get_args(Plain)
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

STUCK: Final = 60
CATASTROPHE: Final = r"(a+)+$"
ENDLESS: Final = "a" * 60 + "b"
"""This expression backtracks for thousands of years, and holds the interpreter lock."""
DEAR: Final = 0.8
PAUSE: Final = 0.02
CANCEL_AFTER: Final = 2.0
"""Seconds after a halt after which the worker cancels sessions that have not noticed it."""

SLEEP: Final = shutil.which("sleep") or "sleep"
STUCK_COMMAND: Final = (
    '"$1" 60 & printf \'{"what":"began","session":"%s","at":0,"pids":[%d,%d]}\\n\' "$2" $$ $! >> "$3"; wait'
)


class Mark(msgspec.Struct, frozen=True):
    """An effect outside: when, of which session, in which processes."""

    what: Literal["began", "stopped", "ran"]
    session: str
    at: int
    pids: tuple[int, ...] = ()


class Marks(msgspec.Struct, frozen=True):
    file: Path

    def make(self, what: Literal["began", "stopped", "ran"], session: str, *pids: int) -> None:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(Mark(what, session, time.time_ns() // 1000, pids)) + b"\n")

    def read(self) -> list[Mark]:
        whole, _, _ = self.file.read_bytes().rpartition(b"\n")
        return [msgspec.json.decode(line, type=Mark) for line in whole.splitlines()]


class StuckSession(msgspec.Struct, frozen=True):
    """One stuck session, and its scopes."""

    session: str
    kind: Kind
    agent: str
    trigger: str


class HaltRound(msgspec.Struct, frozen=True):
    """Sessions that are stuck together, and probes that try to act during the halt and after it."""

    cases: Sequence[StuckSession]
    probes: Sequence[StuckSession]


class Deaf(StoreProxy):
    """The teeth: a store that hides halts while something is in flight."""

    async def ask(self, query: Query[T]) -> Sequence[T]:
        return [] if query.name == "halts_of" else await self._store.ask(query)


class StuckModel:
    """A model that never answers."""

    name = ModelName("scripted", "stuck")
    base_url: None = None

    def __init__(self, marks: Marks, session: str) -> None:
        self._marks = marks
        self._session = session

    def count(self, prompt: Prompt) -> int:
        return 100

    async def ask(self, prompt: Prompt, permit: Permit, on_text: TextListener | None = None) -> Reply:
        permit.use()
        await _hang(self._marks, self._session)
        return Reply(())


async def _hang(marks: Marks, session: str) -> str:
    marks.make("began", session)
    try:
        await asyncio.sleep(STUCK)
    finally:
        marks.make("stopped", session)
    return "it was not halted"


def hang_in_processes(session: str, file: str) -> str:
    child = subprocess.Popen([SLEEP, str(STUCK)])
    Marks(Path(file)).make("began", session, os.getpid(), child.pid)
    time.sleep(STUCK)
    return "it was not halted"


def toolbox(marks: Marks) -> Mapping[str, Tool]:
    def matches(session: str) -> str:
        marks.make("began", session, os.getpid())
        return str(re.match(CATASTROPHE, ENDLESS))

    def counts(session: str) -> str:
        marks.make("began", session, os.getpid())
        return str(sum(range(10**15)))

    def naps(session: str) -> str:
        marks.make("began", session, os.getpid())
        time.sleep(STUCK)
        return "it was not halted"

    def starts(session: str) -> str:
        child = subprocess.Popen([SLEEP, str(STUCK)])
        marks.make("began", session, os.getpid(), child.pid)
        return str(child.wait())

    def block(session: str) -> str:
        marks.make("began", session)
        time.sleep(STUCK)
        return "it was not halted"

    async def hang(session: str) -> str:
        return await _hang(marks, session)

    async def ping(session: str) -> str:
        marks.make("ran", session)
        await asyncio.sleep(PAUSE)
        return "done"

    async def computes(session: str) -> str:
        return matches(session)

    async def waits(session: str) -> str:
        return naps(session)

    made = [
        *map(tool, (matches, counts, naps, starts, hang, ping)),
        tool(block, isolate=False),
        tool(hang, name="hang_dearly", cost=DEAR),
        tool(hang_in_processes, isolate=True),
        tool(ping, name="buy", cost=DEAR),
        tool(ping, name="pay", level="RESTRICTED"),
        make_shell_tool(marks.file.parent, sandbox=False),
        tool(computes, effect="read"),
        tool(waits, effect="read"),
        tool(matches, name="holds", effect="read", isolate=False),
    ]
    return {each.spec.name: each for each in made}


class StuckWorker:
    """Runs sessions until another process halts them."""

    def __init__(self, workspace: Workspace, marks: Marks, *, deaf: bool) -> None:
        self._clock = SystemClock()
        self._journal = workspace.open()
        self._store: Store = Deaf(self._journal) if deaf else self._journal
        self._marks = marks
        self._tools = toolbox(marks)
        self._doors = make_guard_runtime(self._store, self._clock)
        self._name = WorkerId("drill")

    async def serve(self, pipe: Pipe) -> None:
        async with keep_leases(self._journal, self._clock, self._name):
            while (round_ := await asyncio.to_thread(pipe.recv)) is not None:
                await self._live(pipe, round_)
        await self._journal.close()

    async def _live(self, pipe: Pipe, round_: HaltRound) -> None:
        """Get stuck everywhere; while halted, try to act; once resumed, try again."""
        probes = [await self._make_runtime(case) for case in round_.probes]
        stuck = [asyncio.create_task(self._session(case)) for case in round_.cases]
        await asyncio.to_thread(pipe.recv)
        refused = [await self._ping(probe) for probe in probes]
        await asyncio.wait(stuck, timeout=CANCEL_AFTER)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        pipe.send(refused)
        await asyncio.to_thread(pipe.recv)
        pipe.send([await self._ping(probe) for probe in probes])

    async def _make_runtime(self, case: StuckSession) -> SessionRuntime:
        policy = policy_of(case.agent, rules={"run_command": ToolRule(level="CONTROLLED", approval="never", rate=None)})
        lease = await begin_session(self._store, self._name, case.session, policy, case.trigger)
        context = standing_of(case.session, policy, case.trigger)
        return SessionRuntime(self._store, self._clock, self._doors, lease, context, self._tools)

    async def _ping(self, probe: SessionRuntime) -> str:
        session = probe.lease.session
        return _outcome(await probe.attempt(_call(session, "ping", {"session": session})))

    async def _session(self, case: StuckSession) -> None:
        """Be stuck until halted, and end as the guard says."""
        runtime = await self._make_runtime(case)
        answer = await self._get_stuck(runtime, case)
        ended = await runtime.find_end(answer)
        if ended is not None:
            await runtime.end(*ended)

    async def _get_stuck(self, runtime: SessionRuntime, case: StuckSession) -> Answer:
        session, own = case.session, {"session": case.session}
        match case.kind:
            case "tool" | "thread" | "matches" | "counts" | "naps" | "starts":
                name = {"tool": "hang", "thread": "block"}.get(case.kind, case.kind)
                return await runtime.call(_call(session, name, own))
            case "model":
                return await self._get_stuck_thinking(runtime, session)
            case "isolated":
                arguments = {**own, "file": str(self._marks.file)}
                return await runtime.call(_call(session, "hang_in_processes", arguments))
            case "command":
                argv = ["sh", "-c", STUCK_COMMAND, "sh", SLEEP, session, str(self._marks.file)]
                return await runtime.call(_call(session, "run_command", {"argv": argv}))
            case "busy":
                return await self._busy(runtime, session)
            case "asks":
                marking = asyncio.create_task(self._mark_once_asked(session))
                answer = await runtime.call(_call(session, "pay", own))
                await marking
                return answer
            case "waits":
                calls = _call(session, "hang_dearly", own), _call(session, "buy", own, 2)
                return (await asyncio.gather(*map(runtime.call, calls)))[1]

    async def _get_stuck_thinking(self, runtime: SessionRuntime, session: str) -> Answer:
        request = ModelRequest(id=f"{session}.1", prompt=Prompt(messages=(make_user_message("Are you there?"),)))
        model = StuckModel(self._marks, session)
        came = await self._doors.request(runtime.lease, runtime.context, request, model)
        if isinstance(came, AnsweredRequest | BudgetBusy | RateLimited):
            return Answer(request.id, "ok", "")
        return Answer(request.id, came.outcome, "")

    async def _busy(self, runtime: SessionRuntime, session: str) -> Answer:
        self._marks.make("began", session)
        number = 0
        while True:
            number += 1
            answer = await runtime.call(_call(session, "ping", {"session": session}, number))
            if answer.outcome != "ok":
                return answer

    async def _mark_once_asked(self, session: str) -> None:
        while await self._doors.decision(f"{session}.1/approval") is None:
            await self._clock.sleep(SECOND // 100)
        self._marks.make("began", session)


def _outcome(answer: object) -> str:
    return answer.outcome if isinstance(answer, Answer) else type(answer).__name__


def _call(session: str, name: str, arguments: Mapping[str, object], number: int = 1) -> Call:
    return Call(f"{session}.{number}", name, msgspec.json.encode(arguments))


async def worker(pipe: Pipe, workspace: Workspace, marks: Marks, deaf: bool) -> None:  # noqa: FBT001  passed to a process
    await StuckWorker(workspace, marks, deaf=deaf).serve(pipe)


# Processes with a blocked event loop: they cannot notice a halt, so they have to be killed from outside.

Blocking = Literal["computes", "waits", "holds"]
"""An async tool that computes, one that sleeps, and a plain one in a thread that holds the interpreter lock."""
BLOCKINGS: Final[tuple[Blocking, ...]] = get_args(Blocking)
LEASE: Final = 2 * SECOND
GONE_BY: Final = 3 * SECOND
"""A blocked process may run on this long after a halt."""


class Block(msgspec.Struct, frozen=True):
    """One blocked process, with its session and scopes."""

    session: str
    kind: Blocking
    agent: str
    trigger: str

    def scopes(self) -> tuple[str, str, str]:
        """List the scopes that halt this process alone."""
        return f"session:{self.session}", f"agent:{self.agent}", f"trigger:{self.trigger}"


def blocks(count: int) -> list[Block]:
    return [
        Block(f"blocked-{number}-{kind}", kind, f"blocked-{number}-{kind}", f"t-{number}-{kind}")
        for number in range(count)
        for kind in BLOCKINGS
    ]


async def run_blocked(_: Pipe, workspace: Workspace, marks: Marks, block: Block, watched: bool) -> None:  # noqa: FBT001  passed to a process
    """Run one session until this process is killed; the messages of its sentinel are dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    clock, store = SystemClock(), workspace.open(lease=LEASE)
    worker = make_worker_id("drill", SortableIds(clock.now))
    policy = policy_of(block.agent)
    async with (
        run_sentinel(workspace.url, "") if watched else nullcontext(LivenessWriter()) as pulse,
        keep_leases(store, clock, worker, LEASE // 3, liveness=pulse),
    ):
        lease = await begin_session(store, worker, block.session, policy, block.trigger)
        guard = make_guard_runtime(store, clock)
        guard.show_in(pulse)
        context = standing_of(block.session, policy, block.trigger)
        runtime = SessionRuntime(store, clock, guard, lease, context, toolbox(marks))
        arguments = b'{"session":"%s"}' % block.session.encode()
        await runtime.call(Call(f"{block.session}.1", block.kind, arguments))


async def check_inherited(workspace: Workspace, ended: Sequence[Block]) -> list[str]:
    """Take over the sessions of killed processes, and check that they act no more."""
    clock = SystemClock()
    worker, wrong = make_worker_id("heir", SortableIds(clock.now)), list[str]()
    async with workspace.open_store(LEASE) as store:
        for block in ended:
            lease = await acquire_lease(store, clock, worker, SessionId(block.session), LEASE + 10 * SECOND)
            if lease is None:
                wrong.append(f"Session {block.session} of a killed process could not be taken over.")
                continue
            context = standing_of(block.session, policy_of(block.agent), block.trigger)
            runtime = SessionRuntime(store, clock, make_guard_runtime(store, clock), lease, context, {})
            outcome = _outcome(await runtime.attempt(Call(f"{block.session}.2", "waits", b"{}")))
            if outcome != "external_halt":
                wrong.append(f"Session {block.session} was halted, and another process could make a call: {outcome}.")
    return wrong


# The halts, and what must hold after them.

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
"""The states of a dead process, reaped or not."""
REASON: Final = "the drill says so"

_REFUSED: Final = "external_halt"


class Halting(msgspec.Struct, frozen=True):
    """One round: the stuck sessions, and the scope of the halts."""

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
    """Plan rounds in all scopes in turn, until there are as many halts as wanted."""
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


async def halter(pipe: Pipe, workspace: Workspace) -> None:
    async with workspace.open_store() as store:
        while (word := await asyncio.to_thread(pipe.recv)) is not None:
            what, number, scopes = word
            done: dict[str, int] = {}
            for scope in scopes:
                write = (halt if what == "halt" else resume)(scope, PERSON, f"{number}/{what}/{scope}", reason=REASON)
                while scope not in done:
                    # A blocked process may keep the store locked until it is killed.
                    with suppress(StoreUnavailable):
                        await store.commit(write)
                        done[scope] = time.time_ns() // 1000
            pipe.send(done)


@dataclass(slots=True)
class HaltsSeen:
    """What was seen of all rounds. Times are microseconds of this machine's clock."""

    total: int
    """How many halts there will be."""
    done: int = 0
    halted: dict[str, int] = field(default_factory=dict[str, int])
    """When each session was halted."""
    violations: list[str] = field(default_factory=list[str])
    late: list[LateFinding] = field(default_factory=list[LateFinding])
    took: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))
    """The time from a halt to the end of a session or process, by class."""


def run(setting: Setting) -> DrillResult:
    planned = rounds(setting.seeds or HALTS)
    halts, stuck = sum(len(each.scopes()) for each in planned), sum(len(each.round.cases) for each in planned)
    ending = blocks(max(1, min(MOST_BLOCKED, halts // 12)))
    seen = HaltsSeen(halts + len(ending))
    with own_store(use_memory_file(setting)) as workspace, children(__name__) as started:
        marks = Marks(workspace.folder / "marks")
        marks.file.touch()
        ticking = started.start(metronome)
        halting = started.start(halter, workspace)
        _halt_sessions(setting, planned, started.start(worker, workspace, marks, setting.teeth), halting, marks, seen)
        _halt_processes(setting, ending, started, halting, marks, workspace, seen)
        halting.send(None)
        halting.wait()
        _judge(planned, read_store(workspace.url).events, marks.read(), seen)
        ticking.send(None)
        stalls: list[Stall] = ticking.receive()
        setting.progress(seen.total, seen.total, "checked")
    late, unsure = split_lateness(seen.late, stalls)
    counts = {"halts": seen.total, "sessions": stuck, "processes": len(ending), **_figures(seen.took)}
    busy = {"too_busy_to_tell": unsure} if unsure else {}
    return result(DRILL.name, workspace.kind, seen.total, [*seen.violations, *late], {**counts, **busy})


def _halt_sessions(
    setting: Setting, planned: Sequence[Halting], working: Child, halting: Child, marks: Marks, seen: HaltsSeen
) -> None:
    for number, each in enumerate(planned):
        setting.progress(seen.done, seen.total, f"{len(each.round.cases)} stuck sessions are halted by {each.scope}")
        _round(number, each, (working, halting), marks, seen)
        seen.done += len(each.scopes())
    working.send(None)
    working.wait()


def _halt_processes(
    setting: Setting,
    ending: Sequence[Block],
    children: Children,
    halting: Child,
    marks: Marks,
    workspace: Workspace,
    seen: HaltsSeen,
) -> None:
    """Block some processes at a time, halt each, and check that it is gone in time and its session is free."""
    for number in range(0, len(ending), TOGETHER_BLOCKED):
        together = ending[number : number + TOGETHER_BLOCKED]
        setting.progress(seen.done, seen.total, f"{len(together)} blocked processes are halted")
        running = {
            block.session: children.start(run_blocked, workspace, marks, block, not setting.teeth) for block in together
        }
        try:
            _began([block.session for block in together], marks)
        except ChildStuck:  # One that keeps the store locked, and is not killed, keeps the others from it.
            seen.violations.append("A blocked process kept the store locked, and no other could start.")
            _kill(running.values())
            continue
        scopes = {block.session: block.scopes()[place % 3] for place, block in enumerate(together)}
        halting.send(("halt", f"blocked-{number}", list(scopes.values())))
        if not halting.pipe.poll(UNLOCKED_BY):
            seen.violations.append("Blocked processes kept the store locked, and nothing could be halted.")
            _kill(running.values())
        said: dict[str, int] = halting.receive()
        _see_gone({block: (running[block.session], said[scopes[block.session]]) for block in together}, seen)
        seen.violations += asyncio.run(check_inherited(workspace, together))
        seen.done += len(together)


def _kill(running: Iterable[Child]) -> None:
    for process in running:
        process.kill()


def _see_gone(ending: Mapping[Block, tuple[Child, int]], seen: HaltsSeen) -> None:
    """Wait until all processes are gone, and kill those that run on for too long."""
    left = dict(ending)
    while left:
        for block, (process, halted) in list(left.items()):
            took = time.time_ns() // 1000 - halted
            if process_state(process.pid) in GONE:
                seen.took["process"].append(took)
                if took > GONE_BY:
                    what = f"A blocked process ({block.kind}) was gone only {_format_delay(took)}."
                    seen.late.append(LateFinding(what, halted, took - GONE_BY, GONE_BY))
                del left[block]
            elif took > GONE_BY + PATIENCE_BLOCKED:
                what = f"A process ({block.kind}) was blocked and halted, and ran on after {GONE_BY / SECOND:g} s."
                seen.violations.append(what)
                process.kill()
                del left[block]
        time.sleep(0.005)


def _round(number: int, each: Halting, processes: tuple[Child, Child], marks: Marks, seen: HaltsSeen) -> None:
    working, halting = processes
    working.send(each.round)
    began = _began([case.session for case in each.round.cases], marks)
    halting.send(("halt", number, each.scopes()))
    said: dict[str, int] = halting.receive()
    working.send("halted")
    seen.halted |= {case.session: said[each.scope_of(case)] for case in each.round.cases}
    seen.late += _find_left_running(began, seen.halted)
    refused: list[str] = working.receive()
    seen.violations += [f"While {each.scope} was halted, a call came to {out}." for out in refused if out != _REFUSED]
    halting.send(("resume", number, each.scopes()))
    halting.receive()
    working.send("resumed")
    acted: list[str] = working.receive()
    seen.violations += [f"After {each.scope} was resumed, a call came to {out}." for out in acted if out != "ok"]


def _began(sessions: Sequence[str], marks: Marks) -> list[Mark]:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        began = [mark for mark in marks.read() if mark.what == "began" and mark.session in sessions]
        if {mark.session for mark in began} == set(sessions):
            return began
        time.sleep(0.01)
    raise ChildStuck("The sessions of the drill did not get stuck in time.")


def _find_left_running(began: Sequence[Mark], halted: Mapping[str, int]) -> list[LateFinding]:
    """Watch the processes that stuck sessions started, until all are gone or far too late."""
    left = {pid: halted[mark.session] for mark in began for pid in mark.pids}
    late: list[LateFinding] = []
    while left:
        now = time.time_ns() // 1000
        gone = [pid for pid in left if process_state(pid) in GONE]
        for pid in {*gone, *(pid for pid, since in left.items() if now > since + 2 * PROMISED)}:
            over = now - left[pid] - PROMISED
            if over > 0:
                what = f"A process that a halted call had started ran on after {PROMISED / SECOND:g} s."
                late.append(LateFinding(what, left[pid], over))
            del left[pid]
        time.sleep(0.005)
    return late


def _judge(planned: Sequence[Halting], found: Sequence[RecordedEvent], marks: Sequence[Mark], seen: HaltsSeen) -> None:
    streams: dict[str, list[RecordedEvent]] = defaultdict(list)
    for event in found:
        streams[event.stream].append(event)
    ours = {scope for each in planned for scope in each.scopes()}
    fleet = [event for event in streams["fleet"] if event.facts.get("scope") in ours]
    seen.violations += find_unnamed(planned, fleet)
    seen.late += find_acted_on(marks, seen.halted)
    halted = iter([event.at for event in fleet if event.kind == "halt_requested"])
    for each in planned:
        at = dict(zip(each.scopes(), halted, strict=False))
        for case in each.round.cases:
            events, since = streams[f"session:{case.session}"], at.get(each.scope_of(case), 0)
            where = f"Session {case.session} ({case.kind}), halted by {each.scope},"
            seen.violations += [f"{where} {what}" for what in find_unended(events)]
            seen.late += [replace(found, sentence=f"{where} {found.sentence}") for found in find_late(events, since)]
            kind = "plain" if case.kind in PLAIN else "other"
            seen.took[kind] += [event.at - since for event in events if event.kind == "session_ended"]


def find_unnamed(planned: Sequence[Halting], fleet: Sequence[RecordedEvent]) -> list[str]:
    """Check that every halt and resume is in the journal, with its scope and person."""
    scopes = [scope for each in planned for scope in each.scopes()]
    wrong: list[str] = []
    for kind in ("halt_requested", "halt_lifted"):
        events = [event for event in fleet if event.kind == kind]
        if [event.facts["scope"] for event in events] != scopes:
            wrong.append(f"Of {len(scopes)} halts, {len(events)} have a {kind} in the journal.")
        wrong += [f"The {event} does not name the person." for event in events if event.facts["by"] != PERSON]
    return wrong


def find_unended(events: Sequence[RecordedEvent]) -> Iterator[str]:
    ends = [event.facts for event in events if event.kind == "session_ended"]
    if not ends:
        yield "was never ended."
    for facts in ends:
        if (facts["state"], facts["terminal_reason"]) != ("HALTED", _REFUSED):
            yield f"ended {facts['state']}, {facts['terminal_reason']}."


def find_late(events: Sequence[RecordedEvent], halted: int) -> Iterator[LateFinding]:
    """Check that one second after the halt nothing starts, nothing is under way, and the session has ended."""
    over = halted + PROMISED
    begun = {_flight(event): event for event in events if event.kind in ("call_started", "request_started")}
    settled = {_flight(event): event for event in events if event.kind in ("call_settled", "request_settled")}
    for flight, event in begun.items():
        if event.at >= over:
            yield LateFinding(f"started {flight} {_format_delay(event.at - halted)}.", halted, event.at - over + 1)
        if flight not in settled:
            yield LateFinding(f"has no outcome of {flight}.")
        elif settled[flight].at >= over:
            until = settled[flight].at
            yield LateFinding(
                f"had {flight} under way until {_format_delay(until - halted)}.", halted, until - over + 1
            )
    for event in events:
        if event.kind == "session_ended" and event.at >= over:
            yield LateFinding(f"ended {_format_delay(event.at - halted)}.", halted, event.at - over + 1)


def _flight(event: RecordedEvent) -> str:
    return event.facts.get("call") or event.facts["request"]


def _format_delay(micros: int) -> str:
    return f"{micros / SECOND:.2f} s after the halt"


def find_acted_on(marks: Sequence[Mark], halted: Mapping[str, int]) -> list[LateFinding]:
    """Check by the marks outside that nothing continued, and that what was stuck stopped."""
    found: list[LateFinding] = []
    for mark in marks:
        at = halted.get(mark.session, mark.at)
        since = mark.at - at
        if mark.what != "began" and since >= PROMISED:
            what = f"Outside, session {mark.session} {mark.what} {_format_delay(since)}."
            found.append(LateFinding(what, at, since - PROMISED + 1))
    return found


def _figures(took: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Rank the times from a halt to the end of a session or process, in milliseconds, by class."""
    sessions = [each for kind, times in took.items() if kind != "process" for each in times]
    return {**_percentiles(sessions), **{kind: _percentiles(times) for kind, times in sorted(took.items()) if times}}


def _percentiles(took: Sequence[int]) -> dict[str, float]:
    if not took:
        return {}
    ranks = {"p50_ms": len(took) // 2, "p99_ms": len(took) * 99 // 100, "max_ms": len(took) - 1}
    return {name: round(sorted(took)[rank] * 1000 / SECOND, 1) for name, rank in ranks.items()}


DRILL: Final = Drill(
    "halt",
    "Within a second of a halt, from any process, everything in flight is stopped and its session ended; "
    "a blocked process is gone within three.",
    run,
)

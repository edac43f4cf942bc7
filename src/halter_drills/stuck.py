"""A worker whose sessions are all stuck, each in a way of its own: what a halt has to reach.

Whatever they do outside is marked in a file, by the tools themselves and by the programs that they start.
"""

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.ids import SessionId, SortableIds, WorkerId, make_worker_id
from halter.core.messages import Prompt, Reply, TextListener, make_user_message
from halter.core.ports import Query, Store
from halter.core.processes import LivenessWriter
from halter.core.spec import ToolRule
from halter.core.tools import Permit, Tool
from halter.core.usage import ModelName
from halter.dispatch.heartbeat import keep_leases, take_lease
from halter.dispatch.sentinel import run_sentinel
from halter.guard.halts import RateUsedUp, StillHeld
from halter.guard.model_door import AnsweredRequest, ModelRequest
from halter.guard.prepare import Call
from halter.guard.tool_door import Answer
from halter.loop.session_runtime import SessionRuntime
from halter.testing.fakes import Relay, T
from halter.tools.function_tool import tool
from halter.tools.shell import make_shell_tool
from halter_drills.children import Pipe
from halter_drills.drill import Ground
from halter_drills.workload import begun, doors, policy_of, standing_of

Plain = Literal["matches", "counts", "naps", "starts"]
"""Stuck in a plain tool: in a bad regular expression, in a loop in C, asleep, in a program that it started."""
Kind = Literal["tool", "model", "isolated", "command", "thread", "busy", "asks", "waits", Plain]
"""Stuck in a tool, a model, a process, a program with children, a thread; busy; waiting for a person, or for money."""
PLAIN: Final[tuple[Plain, ...]] = get_args(Plain)
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

STUCK: Final = 60
CATASTROPHE: Final = r"(a+)+$"
ENDLESS: Final = "a" * 60 + "b"
"""What this expression does not match, and would find out in some thousand years; it holds the interpreter lock."""
DEAR: Final = 0.8
PAUSE: Final = 0.02
PATIENCE: Final = 2.0
"""Seconds after a halt after which the worker gives up on sessions that have not heard it."""

SLEEP: Final = shutil.which("sleep") or "sleep"
STUCK_COMMAND: Final = (
    '"$1" 60 & printf \'{"what":"began","session":"%s","at":0,"pids":[%d,%d]}\\n\' "$2" $$ $! >> "$3"; wait'
)


class Mark(msgspec.Struct, frozen=True):
    """Something that happened outside: when, for which session, and in which processes."""

    what: Literal["began", "stopped", "ran"]
    session: str
    at: int
    pids: tuple[int, ...] = ()


class Marks(msgspec.Struct, frozen=True):
    """The file in which the outside world keeps its marks."""

    file: Path

    def make(self, what: Literal["began", "stopped", "ran"], session: str, *pids: int) -> None:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(Mark(what, session, time.time_ns() // 1000, pids)) + b"\n")

    def read(self) -> list[Mark]:
        whole, _, _ = self.file.read_bytes().rpartition(b"\n")
        return [msgspec.json.decode(line, type=Mark) for line in whole.splitlines()]


class StuckSession(msgspec.Struct, frozen=True):
    """One session that is stuck, and the scopes that it is in."""

    session: str
    kind: Kind
    agent: str
    trigger: str


class HaltRound(msgspec.Struct, frozen=True):
    """Sessions that are stuck together, and sessions that try to act while a halt stands and after it was lifted."""

    cases: Sequence[StuckSession]
    probes: Sequence[StuckSession]


class Deaf(Relay):
    """A store that tells of no halt to those who look for one while something is in flight."""

    async def ask(self, query: Query[T]) -> Sequence[T]:
        return [] if query.name == "all_halts" else await self._store.ask(query)


class StuckModel:
    """A provider that takes a request and never answers."""

    name = ModelName("scripted", "stuck")
    base_url: None = None

    def __init__(self, marks: Marks, session: str) -> None:
        self._marks = marks
        self._session = session

    def count(self, prompt: Prompt) -> int:
        return 100

    async def ask(self, prompt: Prompt, permit: Permit, hear: TextListener | None = None) -> Reply:
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
    """Be stuck in a process that has started another one."""
    child = subprocess.Popen([SLEEP, str(STUCK)])
    Marks(Path(file)).make("began", session, os.getpid(), child.pid)
    time.sleep(STUCK)
    return "it was not halted"


def plain_tools(marks: Marks) -> Sequence[Tool]:

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

    return tuple(map(tool, (matches, counts, naps, starts)))


def toolbox(marks: Marks) -> Mapping[str, Tool]:

    async def hang(session: str) -> str:
        return await _hang(marks, session)

    async def hang_dearly(session: str) -> str:
        return await _hang(marks, session)

    async def ping(session: str) -> str:
        marks.make("ran", session)
        await asyncio.sleep(PAUSE)
        return "done"

    async def buy(session: str) -> str:
        marks.make("ran", session)
        return "done"

    async def pay(session: str) -> str:
        marks.make("ran", session)
        return "done"

    def block(session: str) -> str:
        marks.make("began", session)
        time.sleep(STUCK)
        return "it was not halted"

    made = [
        *plain_tools(marks),
        tool(hang),
        tool(block, isolate=False),
        tool(hang_dearly, cost=DEAR),
        tool(hang_in_processes, isolate=True),
        tool(ping),
        tool(buy, cost=DEAR),
        tool(pay, level="RESTRICTED"),
        make_shell_tool(marks.file.parent, sandbox=False),
    ]
    return {each.spec.name: each for each in made}


class StuckWorker:
    """Runs sessions until they are halted, as another process says."""

    def __init__(self, ground: Ground, marks: Marks, *, deaf: bool) -> None:
        self._clock = SystemClock()
        self._journal = ground.open()
        self._store: Store = Deaf(self._journal) if deaf else self._journal
        self._marks = marks
        self._tools = toolbox(marks)
        self._doors = doors(self._store, self._clock)
        self._name = WorkerId("drill")

    async def serve(self, pipe: Pipe) -> None:
        async with keep_leases(self._journal, self._clock, self._name):
            while (round_ := await asyncio.to_thread(pipe.recv)) is not None:
                await self._live(pipe, round_)
        await self._journal.close()

    async def _live(self, pipe: Pipe, round_: HaltRound) -> None:
        """Get stuck everywhere; once the halts stand, try to act; once they are lifted, try again."""
        probes = [await self._running(case) for case in round_.probes]
        stuck = [asyncio.create_task(self._session(case)) for case in round_.cases]
        await asyncio.to_thread(pipe.recv)
        refused = [await self._pinged(probe) for probe in probes]
        await asyncio.wait(stuck, timeout=PATIENCE)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        pipe.send(refused)
        await asyncio.to_thread(pipe.recv)
        pipe.send([await self._pinged(probe) for probe in probes])

    async def _running(self, case: StuckSession) -> SessionRuntime:
        policy = policy_of(case.agent, rules={"run_command": ToolRule(level="CONTROLLED", approval="never", rate=None)})
        lease = await begun(self._store, self._name, case.session, policy, case.trigger)
        standing = standing_of(case.session, policy, case.trigger)
        return SessionRuntime(self._store, self._clock, self._doors, lease, standing, self._tools)

    async def _pinged(self, probe: SessionRuntime) -> str:
        session = probe.lease.session
        answer = await probe.attempt(_call(session, "ping", {"session": session}))
        return answer.outcome if isinstance(answer, Answer) else type(answer).__name__

    async def _session(self, case: StuckSession) -> None:
        """Be stuck until it is over, and end as the guard says."""
        running = await self._running(case)
        answer = await self._stuck(running, case)
        ended = await running.ended_by(answer)
        if ended is not None:
            await running.end(*ended)

    async def _stuck(self, running: SessionRuntime, case: StuckSession) -> Answer:
        session, own = case.session, {"session": case.session}
        match case.kind:
            case "tool":
                return await running.call(_call(session, "hang", own))
            case "thread":
                return await running.call(_call(session, "block", own))
            case "matches" | "counts" | "naps" | "starts":
                return await running.call(_call(session, case.kind, own))
            case "model":
                return await self._thinking(running, session)
            case "isolated":
                arguments = {**own, "file": str(self._marks.file)}
                return await running.call(_call(session, "hang_in_processes", arguments))
            case "command":
                argv = ["sh", "-c", STUCK_COMMAND, "sh", SLEEP, session, str(self._marks.file)]
                return await running.call(_call(session, "run_command", {"argv": argv}))
            case "busy":
                return await self._busy(running, session)
            case "asks":
                marking = asyncio.create_task(self._mark_once_asked(session))
                answer = await running.call(_call(session, "pay", own))
                await marking
                return answer
            case "waits":
                calls = _call(session, "hang_dearly", own), _call(session, "buy", own, 2)
                return (await asyncio.gather(*map(running.call, calls)))[1]

    async def _thinking(self, running: SessionRuntime, session: str) -> Answer:
        request = ModelRequest(id=f"{session}.1", prompt=Prompt(messages=(make_user_message("Are you there?"),)))
        model = StuckModel(self._marks, session)
        came = await self._doors.request(running.lease, running.standing, request, model)
        if isinstance(came, AnsweredRequest | StillHeld | RateUsedUp):
            return Answer(request.id, "ok", "")
        return Answer(request.id, came.outcome, "")

    async def _busy(self, running: SessionRuntime, session: str) -> Answer:
        self._marks.make("began", session)
        number = 0
        while True:
            number += 1
            answer = await running.call(_call(session, "ping", {"session": session}, number))
            if answer.outcome != "ok":
                return answer

    async def _mark_once_asked(self, session: str) -> None:
        while await self._doors.decision(f"{session}.1/approval") is None:
            await self._clock.sleep(SECOND // 100)
        self._marks.make("began", session)


def _call(session: str, name: str, arguments: Mapping[str, object], number: int = 1) -> Call:
    return Call(f"{session}.{number}", name, msgspec.json.encode(arguments))


def worker(pipe: Pipe, ground: Ground, marks: Marks, kind: Literal["deaf", "listening"]) -> None:
    asyncio.run(StuckWorker(ground, marks, deaf=kind == "deaf").serve(pipe))


# Processes whose event loop is blocked: nothing in them can hear a halt, so they have to be ended from outside.

Blocking = Literal["computes", "waits", "holds"]
"""An async tool that computes, one that waits, and a plain one in a thread that holds the interpreter lock."""
BLOCKINGS: Final[tuple[Blocking, ...]] = get_args(Blocking)
LEASE: Final = 2 * SECOND
PROMISED: Final = 3 * SECOND
"""So long after a halt a blocked process may run on."""


class Block(msgspec.Struct, frozen=True):
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


def blocking_tools(marks: Marks) -> Mapping[str, Tool]:

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
    worker = make_worker_id("drill", SortableIds(clock.now))
    policy = policy_of(block.agent)
    async with (
        run_sentinel(ground.url, "") if watched else nullcontext(LivenessWriter()) as pulse,
        keep_leases(store, clock, worker, LEASE // 3, pulse=pulse),
    ):
        lease = await begun(store, worker, block.session, policy, block.trigger)
        gatehouse = doors(store, clock)
        gatehouse.show_in(pulse)
        standing = standing_of(block.session, policy, block.trigger)
        running = SessionRuntime(store, clock, gatehouse, lease, standing, blocking_tools(marks))
        arguments = b'{"session":"%s"}' % block.session.encode()
        await running.call(Call(f"{block.session}.1", block.kind, arguments))


def inherited(ground: Ground, ended: Sequence[Block]) -> list[str]:
    """Take up the sessions of ended processes, and see that they act no more; say what is wrong."""
    return asyncio.run(_inherited(ground, ended))


async def _inherited(ground: Ground, ended: Sequence[Block]) -> list[str]:
    clock, store = SystemClock(), ground.open(lease=LEASE)
    worker, wrong = make_worker_id("heir", SortableIds(clock.now)), list[str]()
    for block in ended:
        lease = await take_lease(store, clock, worker, SessionId(block.session), LEASE + 10 * SECOND)
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

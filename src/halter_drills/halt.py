"""One second after a halt, nothing in its scope acts and its sessions have ended, wherever they were stuck.

One process has stuck sessions: in a tool, async or plain, in a model that never answers, in processes with children, or
waiting for a person or for money. Another process halts and resumes them over its own connection. Then whole processes
are blocked and halted in the same way: each must be gone within three seconds. Then a client of a proxy sends what is
hard to read while the answer of another client is halted. The drill judges by plain SQL, by the marks that tools leave
outside, and by the list of processes. A metronome measures the load of the machine; lateness that this load explains is
reported as unknown.
"""

import asyncio
import gzip
import os
import re
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from halter.core.clock import SECOND, SystemClock
from halter.core.errors import StoreUnavailable
from halter.core.ids import SessionId, SortableIds, WorkerId, make_worker_id
from halter.core.messages import Prompt, Reply, TextListener, make_user_message
from halter.core.ports import Query, Store
from halter.core.tools import Permit, Tool
from halter.core.usage import ModelName
from halter.dispatch.heartbeat import acquire_lease, renew_leases
from halter.dispatch.sentinel import run_sentinel
from halter.guard.call_answer import Answer
from halter.guard.halts import BudgetBusy, Departures, RateLimited, halt, resume
from halter.guard.prepare import Call
from halter.guard.request import AnsweredRequest, ModelRequest
from halter.loop.session_runtime import SessionRuntime
from halter.proxy.keys import LARGEST_BODY_MB, KeyFile, KeyLimits, make_key_secret, make_virtual_key
from halter.spec.policy import ToolRule
from halter.system.liveness import LivenessWriter
from halter.testing.fakes import StoreProxy, T
from halter.tools.function_tool import tool
from halter.tools.shell import make_shell_tool
from halter_drills.checker import LateFinding, RecordedEvent, Stall, metronome, read_store, split_lateness
from halter_drills.children import Child, Children, ChildStuck, Pipe, children, process_state
from halter_drills.drill import Drill, DrillResult, Setting, Workspace, own_store, result, use_memory_file
from halter_drills.provider import ListedProvider
from halter_drills.proxy import IMPORTED, find_missing, serve_drill_proxy
from halter_drills.workload import PERSON, begin_session, make_guard_runtime, make_session_context, policy_of

# A worker whose sessions are all stuck, each in a different way.

Plain = Literal["matches", "counts", "naps", "starts"]
"""Stuck in a plain tool: in a regular expression, in a loop in C, asleep, or in a program that the tool started."""
Kind = Literal["tool", "model", "isolated", "command", "thread", "busy", "asks", "waits", Plain]
"""Stuck in a tool, a model, a process, a program with children, a thread; busy; waiting for a person, or for money."""
PLAIN: Final[tuple[Plain, ...]] = get_args(Plain)
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

STUCK_SECONDS: Final = 60
CATASTROPHE: Final = r"(a+)+$"
ENDLESS: Final = "a" * 60 + "b"
"""The expression backtracks for thousands of years on this text, and holds the interpreter lock."""
HIGH_COST_USD: Final = 0.8
PAUSE: Final = 0.02
CANCEL_AFTER: Final = 2.0
"""Seconds from a halt until the worker cancels sessions that still run."""

SLEEP: Final = shutil.which("sleep") or "sleep"
STUCK_COMMAND: Final = (
    '"$1" 60 & printf \'{"what":"began","session":"%s","at":0,"pids":[%d,%d]}\\n\' "$2" $$ $! >> "$3"; wait'
)


class Mark(msgspec.Struct, frozen=True):
    """An effect in the outside world: its time, session and processes."""

    what: Literal["began", "stopped", "ran"]
    session: str
    at: int
    pids: tuple[int, ...] = ()


class Marks(msgspec.Struct, frozen=True):
    file: Path

    def make(self, event: Literal["began", "stopped", "ran"], session: str, *pids: int) -> None:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(Mark(event, session, time.time_ns() // 1000, pids)) + b"\n")

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
    """Sessions that are stuck at the same time, and probes that try to act during and after the halt."""

    cases: Sequence[StuckSession]
    probes: Sequence[StuckSession]


class Deaf(StoreProxy):
    """The teeth: a store that hides halts from effects in flight."""

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
        await asyncio.sleep(STUCK_SECONDS)
    finally:
        marks.make("stopped", session)
    return "it was not halted"


def hang_in_processes(session: str, file: str) -> str:
    child = subprocess.Popen([SLEEP, str(STUCK_SECONDS)])
    Marks(Path(file)).make("began", session, os.getpid(), child.pid)
    time.sleep(STUCK_SECONDS)
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
        time.sleep(STUCK_SECONDS)
        return "it was not halted"

    def starts(session: str) -> str:
        child = subprocess.Popen([SLEEP, str(STUCK_SECONDS)])
        marks.make("began", session, os.getpid(), child.pid)
        return str(child.wait())

    def block(session: str) -> str:
        marks.make("began", session)
        time.sleep(STUCK_SECONDS)
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

    tools = [
        *map(tool, (matches, counts, naps, starts, hang, ping)),
        tool(block, isolate=False),
        tool(hang, name="hang_dearly", cost=HIGH_COST_USD),
        tool(hang_in_processes, isolate=True),
        tool(ping, name="buy", cost=HIGH_COST_USD),
        tool(ping, name="pay", level="RESTRICTED"),
        make_shell_tool(marks.file.parent, sandbox=False),
        tool(computes, effect="read"),
        tool(waits, effect="read"),
        tool(matches, name="holds", effect="read", isolate=False),
    ]
    return {each.spec.name: each for each in tools}


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
        async with renew_leases(self._journal, self._clock, self._name):
            while (round_ := await asyncio.to_thread(pipe.recv)) is not None:
                await self._live(pipe, round_)
        await self._journal.close()

    async def _live(self, pipe: Pipe, round_: HaltRound) -> None:
        """Get stuck everywhere, try to act while halted, and again after the resume."""
        probes = [await self._make_runtime(case) for case in round_.probes]
        stuck = [asyncio.create_task(self._session(case)) for case in round_.cases]
        await asyncio.to_thread(pipe.recv)
        refused_outcomes = [await self._ping(probe) for probe in probes]
        await asyncio.wait(stuck, timeout=CANCEL_AFTER)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        pipe.send(refused_outcomes)
        await asyncio.to_thread(pipe.recv)
        pipe.send([await self._ping(probe) for probe in probes])

    async def _make_runtime(self, case: StuckSession) -> SessionRuntime:
        policy = policy_of(case.agent, rules={"run_command": ToolRule(level="CONTROLLED", approval="never", rate=None)})
        lease = await begin_session(self._store, self._name, case.session, policy, case.trigger)
        context = make_session_context(case.session, policy, case.trigger)
        return SessionRuntime(self._store, self._clock, self._doors, lease, context, self._tools)

    async def _ping(self, probe: SessionRuntime) -> str:
        session = probe.lease.session
        return _outcome(await probe.attempt(_call(session, "ping", {"session": session})))

    async def _session(self, case: StuckSession) -> None:
        """Stay stuck until halted, then end the session as the guard requires."""
        runtime = await self._make_runtime(case)
        answer = await self._get_stuck(runtime, case)
        end = await runtime.find_end(answer)
        if end is not None:
            await runtime.end(*end)

    async def _get_stuck(self, runtime: SessionRuntime, case: StuckSession) -> Answer:
        session, argument = case.session, {"session": case.session}
        match case.kind:
            case "tool" | "thread" | "matches" | "counts" | "naps" | "starts":
                name = {"tool": "hang", "thread": "block"}.get(case.kind, case.kind)
                return await runtime.call(_call(session, name, argument))
            case "model":
                return await self._get_stuck_thinking(runtime, session)
            case "isolated":
                arguments = {**argument, "file": str(self._marks.file)}
                return await runtime.call(_call(session, "hang_in_processes", arguments))
            case "command":
                argv = ["sh", "-c", STUCK_COMMAND, "sh", SLEEP, session, str(self._marks.file)]
                return await runtime.call(_call(session, "run_command", {"argv": argv}))
            case "busy":
                return await self._busy(runtime, session)
            case "asks":
                marking = asyncio.create_task(self._mark_when_pending(session))
                answer = await runtime.call(_call(session, "pay", argument))
                await marking
                return answer
            case "waits":
                calls = _call(session, "hang_dearly", argument), _call(session, "buy", argument, 2)
                return (await asyncio.gather(*map(runtime.call, calls)))[1]

    async def _get_stuck_thinking(self, runtime: SessionRuntime, session: str) -> Answer:
        request = ModelRequest(id=f"{session}.1", prompt=Prompt(messages=(make_user_message("Are you there?"),)))
        model = StuckModel(self._marks, session)
        reply = await self._doors.request(runtime.lease, runtime.context, request, model)
        if isinstance(reply, AnsweredRequest | BudgetBusy | RateLimited):
            return Answer(request.id, "ok", "")
        return Answer(request.id, reply.outcome, "")

    async def _busy(self, runtime: SessionRuntime, session: str) -> Answer:
        self._marks.make("began", session)
        number = 0
        while True:
            number += 1
            answer = await runtime.call(_call(session, "ping", {"session": session}, number))
            if answer.outcome != "ok":
                return answer

    async def _mark_when_pending(self, session: str) -> None:
        while await self._doors.decision(f"{session}.1/approval") is None:
            await self._clock.sleep(SECOND // 100)
        self._marks.make("began", session)


def _outcome(answer: object) -> str:
    return answer.outcome if isinstance(answer, Answer) else type(answer).__name__


def _call(session: str, name: str, arguments: Mapping[str, object], number: int = 1) -> Call:
    return Call(f"{session}.{number}", name, msgspec.json.encode(arguments))


async def worker(pipe: Pipe, workspace: Workspace, marks: Marks, deaf: bool) -> None:  # noqa: FBT001  passed to a process
    await StuckWorker(workspace, marks, deaf=deaf).serve(pipe)


# Processes with a blocked event loop: they cannot notice a halt, so their sentinel must kill them.

Blocking = Literal["computes", "waits", "holds"]
"""An async tool that computes, one that sleeps, and a plain one in a thread that holds the interpreter lock."""
BLOCKINGS: Final[tuple[Blocking, ...]] = get_args(Blocking)
LEASE: Final = 2 * SECOND
MAX_BLOCKED_DELAY: Final = 3 * SECOND
"""Longest time that a blocked process may run after a halt."""


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


async def run_blocked(_: Pipe, workspace: Workspace, marks: Marks, block: Block, with_sentinel: bool) -> None:  # noqa: FBT001  passed to a process
    """Run one session until this process is killed. Drop the messages of its sentinel."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    clock, store = SystemClock(), workspace.open(lease=LEASE)
    worker = make_worker_id("drill", SortableIds(clock.now))
    policy = policy_of(block.agent)
    async with (
        run_sentinel(workspace.url, "") if with_sentinel else nullcontext(LivenessWriter()) as liveness,
        renew_leases(store, clock, worker, LEASE // 3, liveness=liveness),
    ):
        lease = await begin_session(store, worker, block.session, policy, block.trigger)
        guard = make_guard_runtime(store, clock)
        guard.join_process(liveness, Departures())
        context = make_session_context(block.session, policy, block.trigger)
        runtime = SessionRuntime(store, clock, guard, lease, context, toolbox(marks))
        arguments = b'{"session":"%s"}' % block.session.encode()
        await runtime.call(Call(f"{block.session}.1", block.kind, arguments))


async def check_inherited(workspace: Workspace, blocks: Sequence[Block]) -> list[str]:
    """Take over the sessions of killed processes, and check that they cannot act."""
    clock = SystemClock()
    worker, wrong = make_worker_id("heir", SortableIds(clock.now)), list[str]()
    async with workspace.open_store(LEASE) as store:
        for block in blocks:
            lease = await acquire_lease(store, clock, worker, SessionId(block.session), LEASE + 10 * SECOND)
            if lease is None:
                wrong.append(f"Could not take over session {block.session} of a killed process.")
                continue
            context = make_session_context(block.session, policy_of(block.agent), block.trigger)
            runtime = SessionRuntime(store, clock, make_guard_runtime(store, clock), lease, context, {})
            outcome = _outcome(await runtime.attempt(Call(f"{block.session}.2", "waits", b"{}")))
            if outcome != "external_halt":
                wrong.append(f"Session {block.session} was halted, but another process made a call: {outcome}.")
    return wrong


# A proxy to which a client sends what is hard to read, while the answer of another client is halted.

MEGABYTE: Final = 1024 * 1024
HOSTILE_SIZE: Final = 63 * MEGABYTE
HOSTILE_HEAD: Final = 0.3
"""Seconds that a hostile client is ahead of the halt."""
HOSTILE_GRACE: Final = 3.0
Hostility = Literal["escapes", "nesting", "members", "headers", "gzip"]
"""Escaped letters, deep nesting, small members, a huge header, and a small body that expands to a huge one."""
HOSTILITIES: Final[tuple[Hostility, ...]] = get_args(Hostility)


def make_hostile_request(kind: Hostility, secret: str) -> bytes:
    """Make the bytes of a whole request."""
    start, end, headers = b'{"model":"gpt-5","messages":', b"}", b""
    match kind:
        case "escapes":
            body = start + b'"' + rb"\u0061" * (HOSTILE_SIZE // 6) + b'"' + end
        case "nesting":
            body = start + b"[" * (HOSTILE_SIZE // 2) + b"]" * (HOSTILE_SIZE // 2) + end
        case "members":
            body = start + b"[]," + b",".join(b'"%d":1' % number for number in range(1_000_000)) + end
        case "headers":
            body, headers = start + b"[]" + end, b"x-huge: %s\r\n" % (b"a" * HOSTILE_SIZE)
        case "gzip":
            bomb = start + b'"' + rb"\u0061" * (HOSTILE_SIZE // 6) + b'"' + end
            body, headers = gzip.compress(bomb, 1), b"content-encoding: gzip\r\n"
    line = b"POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\nauthorization: Bearer %s\r\n" % secret.encode()
    return b"%s%scontent-length: %d\r\n\r\n%s" % (line, headers, len(body), body)


def _send_hostile(url: str, request: bytes) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    # The proxy refuses some of them before it has read all.
    with suppress(OSError), socket.create_connection((host, int(port)), HOSTILE_GRACE) as connection:
        connection.sendall(request)
        connection.recv(1)


async def _halt_beside(
    kind: Hostility, workspace: Workspace, children: Children, halter_child: Child, *, teeth: bool
) -> int:
    """Halt an answer beside a hostile client of the same proxy. Return when it was halted and how long it lasted on."""
    import httpx2

    keys = KeyFile(workspace.folder / "keys.json")
    quiet, hostile = (_make_hostile_key(keys, f"{name}-{kind}") for name in ("quiet", "hostile"))
    request = make_hostile_request(kind, hostile)
    async with ListedProvider().serve() as provider, httpx2.AsyncClient(timeout=60) as http:
        provider.gate = asyncio.Event()
        child = children.start(serve_drill_proxy, workspace.url, str(workspace.folder), provider.port, teeth)
        url = await asyncio.to_thread(child.receive)
        ask = {"model": "gpt-5", "stream": True, "messages": [{"role": "user", "content": "How warm is it?"}]}
        headers = {"authorization": f"Bearer {quiet}"}
        answer_task = asyncio.ensure_future(http.post(f"{url}/v1/chat/completions", json=ask, headers=headers))
        await asyncio.wait_for(provider.reached_gate.wait(), STUCK_TIMEOUT)
        hostile_task = asyncio.ensure_future(asyncio.to_thread(_send_hostile, url, request))
        await asyncio.sleep(HOSTILE_HEAD)
        halter_child.send(("halt", kind, [f"agent:quiet-{kind}"]))
        (halted_at,) = (await asyncio.to_thread(halter_child.receive)).values()
        await asyncio.wait([answer_task], timeout=HOSTILE_GRACE)
        duration = time.time_ns() // 1000 - halted_at
        await asyncio.to_thread(child.kill)
        await asyncio.gather(answer_task, hostile_task, return_exceptions=True)
    return duration


def _make_hostile_key(keys: KeyFile, agent: str) -> str:
    secret = make_key_secret()
    limits = KeyLimits(max_cost_usd_per_day=Decimal(5), max_body_mb=LARGEST_BODY_MB)
    keys.add(make_virtual_key(secret, agent, agent, SystemClock().now(), PERSON, limits))
    return secret


# The halts, and the checks.

Scope = Literal["session", "agent", "trigger", "fleet"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
HALTS: Final = 50
SESSIONS_PER_ROUND: Final = 10
GROUPS: Final = 4
MAX_DELAY: Final = SECOND
STUCK_TIMEOUT: Final = 60.0
BLOCKED_BATCH: Final = 3
MAX_BLOCKED: Final = 4
BLOCKED_GRACE: Final = 3 * SECOND
UNLOCK_TIMEOUT: Final = 15.0
DEAD_STATES: Final = ("", "Z", "X")
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


def rounds(min_halts: int) -> list[Halting]:
    """Plan rounds in all scopes in turn, with at least `min_halts` halts."""
    plans: list[Halting] = []
    kinds = cycle(KINDS)
    for number in count():
        scope = SCOPES[number % len(SCOPES)]
        cases = [
            StuckSession(f"r{number}-{index}", next(kinds), *_names(number, index))
            for index in range(SESSIONS_PER_ROUND)
        ]
        probing = 1 if scope in ("session", "fleet") else GROUPS
        probes = [StuckSession(f"r{number}-probe-{index}", "busy", *_names(number, index)) for index in range(probing)]
        plans.append(Halting(scope, HaltRound(cases, probes)))
        if sum(len(plan.scopes()) for plan in plans) >= min_halts:
            return plans
    raise AssertionError("There is always a next scope.")


def _names(number: int, index: int) -> tuple[str, str]:
    return f"agent-{number}-{index % GROUPS}", f"trigger-{number}-{index % GROUPS}"


async def halter(pipe: Pipe, workspace: Workspace) -> None:
    async with workspace.open_store() as store:
        while (message := await asyncio.to_thread(pipe.recv)) is not None:
            action, number, scopes = message
            halted_at: dict[str, int] = {}
            for scope in scopes:
                write = (halt if action == "halt" else resume)(
                    scope, PERSON, f"{number}/{action}/{scope}", reason=REASON
                )
                while scope not in halted_at:
                    # A blocked process can lock the store until it is killed.
                    with suppress(StoreUnavailable):
                        await store.commit(write)
                        halted_at[scope] = time.time_ns() // 1000
            pipe.send(halted_at)


@dataclass(slots=True)
class HaltsSeen:
    """Observations of all rounds. Times are microseconds of this machine's clock."""

    total: int
    """Number of halts of the drill."""
    done: int = 0
    halted: dict[str, int] = field(default_factory=dict[str, int])
    """When each session was halted."""
    violations: list[str] = field(default_factory=list[str])
    late: list[LateFinding] = field(default_factory=list[LateFinding])
    took: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))
    """The time from a halt to the end of a session or process, by class."""


def run(setting: Setting) -> DrillResult:
    plans = rounds(setting.seeds or HALTS)
    halts, stuck = sum(len(each.scopes()) for each in plans), sum(len(each.round.cases) for each in plans)
    blocked_processes = blocks(max(1, min(MAX_BLOCKED, halts // 12)))
    has_proxy = not find_missing()
    observations = HaltsSeen(halts + len(blocked_processes) + len(HOSTILITIES) * has_proxy)
    with own_store(use_memory_file(setting)) as workspace, children(__name__, *IMPORTED) as processes:
        marks = Marks(workspace.folder / "marks")
        marks.file.touch()
        metronome_child = processes.start(metronome)
        halter_child = processes.start(halter, workspace)
        _halt_sessions(
            setting, plans, processes.start(worker, workspace, marks, setting.teeth), halter_child, marks, observations
        )
        _halt_processes(setting, blocked_processes, processes, halter_child, marks, workspace, observations)
        if has_proxy:
            _halt_proxies(setting, workspace, processes, halter_child, observations)
        halter_child.send(None)
        halter_child.wait()
        _judge(plans, read_store(workspace.url).events, marks.read(), observations)
        metronome_child.send(None)
        stalls: list[Stall] = metronome_child.receive()
        setting.progress(observations.total, observations.total, "checked")
    late, unsure = split_lateness(observations.late, stalls)
    counts = {
        "halts": observations.total,
        "sessions": stuck,
        "processes": len(blocked_processes),
        **_figures(observations.took),
    }
    busy = {"too_busy_to_tell": unsure} if unsure else {}
    return result(DRILL.name, workspace.kind, observations.total, [*observations.violations, *late], {**counts, **busy})


def _halt_sessions(
    setting: Setting,
    plans: Sequence[Halting],
    worker_child: Child,
    halter_child: Child,
    marks: Marks,
    observations: HaltsSeen,
) -> None:
    for number, plan in enumerate(plans):
        setting.progress(
            observations.done, observations.total, f"halting {len(plan.round.cases)} stuck sessions by {plan.scope}"
        )
        _round(number, plan, (worker_child, halter_child), marks, observations)
        observations.done += len(plan.scopes())
    worker_child.send(None)
    worker_child.wait()


def _halt_processes(
    setting: Setting,
    blocks: Sequence[Block],
    children: Children,
    halter_child: Child,
    marks: Marks,
    workspace: Workspace,
    observations: HaltsSeen,
) -> None:
    """Block processes in batches, halt each, and check that it is gone in time and its session is free."""
    for first in range(0, len(blocks), BLOCKED_BATCH):
        batch = blocks[first : first + BLOCKED_BATCH]
        setting.progress(observations.done, observations.total, f"halting {len(batch)} blocked processes")
        running = {
            block.session: children.start(run_blocked, workspace, marks, block, not setting.teeth) for block in batch
        }
        try:
            _began([block.session for block in batch], marks)
        except ChildStuck:  # A process that locks the store and is not killed blocks the others.
            observations.violations.append("A blocked process kept the store locked, so no other process could start.")
            _kill(running.values())
            continue
        scopes = {block.session: block.scopes()[index % 3] for index, block in enumerate(batch)}
        halter_child.send(("halt", f"blocked-{first}", list(scopes.values())))
        if not halter_child.pipe.poll(UNLOCK_TIMEOUT):
            observations.violations.append("Blocked processes kept the store locked, so nothing could be halted.")
            _kill(running.values())
        halted_at: dict[str, int] = halter_child.receive()
        _wait_for_exits(
            {block: (running[block.session], halted_at[scopes[block.session]]) for block in batch}, observations
        )
        observations.violations += asyncio.run(check_inherited(workspace, batch))
        observations.done += len(batch)


def _halt_proxies(
    setting: Setting, workspace: Workspace, children: Children, halter_child: Child, observations: HaltsSeen
) -> None:
    for kind in HOSTILITIES:
        setting.progress(observations.done, observations.total, f"halting an answer beside a client that sends {kind}")
        duration = asyncio.run(_halt_beside(kind, workspace, children, halter_child, teeth=setting.teeth))
        observations.took["proxy"].append(duration)
        if duration > MAX_DELAY:
            halted_at = time.time_ns() // 1000 - duration
            sentence = (
                f"Beside a client of the proxy that sends {kind}, an answer ended only {_format_delay(duration)}."
            )
            observations.late.append(LateFinding(sentence, halted_at, duration - MAX_DELAY))
        observations.done += 1


def _kill(running: Iterable[Child]) -> None:
    for process in running:
        process.kill()


def _wait_for_exits(processes: Mapping[Block, tuple[Child, int]], observations: HaltsSeen) -> None:
    """Wait until all processes are gone, and kill those that run for too long."""
    remaining = dict(processes)
    while remaining:
        for block, (process, halted) in list(remaining.items()):
            duration = time.time_ns() // 1000 - halted
            if process_state(process.pid) in DEAD_STATES:
                observations.took["process"].append(duration)
                if duration > MAX_BLOCKED_DELAY:
                    sentence = f"A blocked process ({block.kind}) was gone only {_format_delay(duration)}."
                    observations.late.append(
                        LateFinding(sentence, halted, duration - MAX_BLOCKED_DELAY, MAX_BLOCKED_DELAY)
                    )
                del remaining[block]
            elif duration > MAX_BLOCKED_DELAY + BLOCKED_GRACE:
                sentence = (
                    f"A blocked and halted process ({block.kind}) still ran after {MAX_BLOCKED_DELAY / SECOND:g} s."
                )
                observations.violations.append(sentence)
                process.kill()
                del remaining[block]
        time.sleep(0.005)


def _round(number: int, plan: Halting, processes: tuple[Child, Child], marks: Marks, observations: HaltsSeen) -> None:
    worker_child, halter_child = processes
    worker_child.send(plan.round)
    started_marks = _began([case.session for case in plan.round.cases], marks)
    halter_child.send(("halt", number, plan.scopes()))
    halted_at: dict[str, int] = halter_child.receive()
    worker_child.send("halted")
    observations.halted |= {case.session: halted_at[plan.scope_of(case)] for case in plan.round.cases}
    observations.late += _find_late_processes(started_marks, observations.halted)
    refused_outcomes: list[str] = worker_child.receive()
    observations.violations += [
        f"While {plan.scope} was halted, the outcome of a call was {outcome}."
        for outcome in refused_outcomes
        if outcome != _REFUSED
    ]
    halter_child.send(("resume", number, plan.scopes()))
    halter_child.receive()
    worker_child.send("resumed")
    outcomes: list[str] = worker_child.receive()
    observations.violations += [
        f"After {plan.scope} was resumed, the outcome of a call was {outcome}."
        for outcome in outcomes
        if outcome != "ok"
    ]


def _began(sessions: Sequence[str], marks: Marks) -> list[Mark]:
    deadline = time.monotonic() + STUCK_TIMEOUT
    while time.monotonic() < deadline:
        started_marks = [mark for mark in marks.read() if mark.what == "began" and mark.session in sessions]
        if {mark.session for mark in started_marks} == set(sessions):
            return started_marks
        time.sleep(0.01)
    raise ChildStuck("The sessions of the drill did not get stuck in time.")


def _find_late_processes(started_marks: Sequence[Mark], halted_at: Mapping[str, int]) -> list[LateFinding]:
    """Watch the processes of stuck sessions until all are gone, or far too late."""
    halted_at_by_pid = {pid: halted_at[mark.session] for mark in started_marks for pid in mark.pids}
    late: list[LateFinding] = []
    while halted_at_by_pid:
        now = time.time_ns() // 1000
        gone_pids = [pid for pid in halted_at_by_pid if process_state(pid) in DEAD_STATES]
        for pid in {
            *gone_pids,
            *(pid for pid, pid_halted_at in halted_at_by_pid.items() if now > pid_halted_at + 2 * MAX_DELAY),
        }:
            late_by = now - halted_at_by_pid[pid] - MAX_DELAY
            if late_by > 0:
                sentence = f"A process of a halted call still ran after {MAX_DELAY / SECOND:g} s."
                late.append(LateFinding(sentence, halted_at_by_pid[pid], late_by))
            del halted_at_by_pid[pid]
        time.sleep(0.005)
    return late


def _judge(
    plans: Sequence[Halting], all_events: Sequence[RecordedEvent], marks: Sequence[Mark], observations: HaltsSeen
) -> None:
    streams: dict[str, list[RecordedEvent]] = defaultdict(list)
    for event in all_events:
        streams[event.stream].append(event)
    ours = {scope for plan in plans for scope in plan.scopes()}
    fleet = [event for event in streams["fleet"] if event.facts.get("scope") in ours]
    observations.violations += find_unnamed(plans, fleet)
    observations.late += find_acted_on(marks, observations.halted)
    halt_times = iter([event.at for event in fleet if event.kind == "halt_requested"])
    for plan in plans:
        at = dict(zip(plan.scopes(), halt_times, strict=False))
        for case in plan.round.cases:
            events, since = streams[f"session:{case.session}"], at.get(plan.scope_of(case), 0)
            where = f"Session {case.session} ({case.kind}), halted by {plan.scope},"
            observations.violations += [f"{where} {text}" for text in find_unended(events)]
            observations.late += [
                replace(finding, sentence=f"{where} {finding.sentence}") for finding in find_late(events, since)
            ]
            kind = "plain" if case.kind in PLAIN else "other"
            observations.took[kind] += [event.at - since for event in events if event.kind == "session_ended"]


def find_unnamed(plans: Sequence[Halting], fleet_events: Sequence[RecordedEvent]) -> list[str]:
    """Check that every halt and resume is in the journal, with its scope and person."""
    scopes = [scope for plan in plans for scope in plan.scopes()]
    wrong: list[str] = []
    for kind in ("halt_requested", "halt_lifted"):
        events = [event for event in fleet_events if event.kind == kind]
        if [event.facts["scope"] for event in events] != scopes:
            wrong.append(f"Of {len(scopes)} halts, {len(events)} have a {kind} in the journal.")
        wrong += [f"The {event} does not record the person." for event in events if event.facts["by"] != PERSON]
    return wrong


def find_unended(events: Sequence[RecordedEvent]) -> Iterator[str]:
    ends = [event.facts for event in events if event.kind == "session_ended"]
    if not ends:
        yield "did not end."
    for facts in ends:
        if (facts["state"], facts["terminal_reason"]) != ("HALTED", _REFUSED):
            yield f"ended {facts['state']}, {facts['terminal_reason']}."


def find_late(events: Sequence[RecordedEvent], halted_at: int) -> Iterator[LateFinding]:
    """Check that one second after the halt nothing starts, nothing is in flight, and the session has ended."""
    deadline_at = halted_at + MAX_DELAY
    started = {_flight(event): event for event in events if event.kind in ("call_started", "request_started")}
    settled = {_flight(event): event for event in events if event.kind in ("call_settled", "request_settled")}
    for flight, event in started.items():
        if event.at >= deadline_at:
            yield LateFinding(
                f"started {flight} {_format_delay(event.at - halted_at)}.", halted_at, event.at - deadline_at + 1
            )
        if flight not in settled:
            yield LateFinding(f"has no settlement of {flight}.")
        elif settled[flight].at >= deadline_at:
            settled_at = settled[flight].at
            yield LateFinding(
                f"had {flight} in flight until {_format_delay(settled_at - halted_at)}.",
                halted_at,
                settled_at - deadline_at + 1,
            )
    for event in events:
        if event.kind == "session_ended" and event.at >= deadline_at:
            yield LateFinding(f"ended {_format_delay(event.at - halted_at)}.", halted_at, event.at - deadline_at + 1)


def _flight(event: RecordedEvent) -> str:
    return event.facts.get("call") or event.facts["request"]


def _format_delay(micros: int) -> str:
    return f"{micros / SECOND:.2f} s after the halt"


def find_acted_on(marks: Sequence[Mark], halted_at: Mapping[str, int]) -> list[LateFinding]:
    """Check by the marks outside that nothing continued, and that stuck effects stopped."""
    findings: list[LateFinding] = []
    for mark in marks:
        session_halted_at = halted_at.get(mark.session, mark.at)
        delay = mark.at - session_halted_at
        if mark.what != "began" and delay >= MAX_DELAY:
            sentence = f"In the outside world, session {mark.session} {mark.what} {_format_delay(delay)}."
            findings.append(LateFinding(sentence, session_halted_at, delay - MAX_DELAY + 1))
    return findings


_NO_SESSIONS: Final = ("process", "proxy")


def _figures(durations: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Rank the times from a halt to the end of a session or process, in milliseconds, by class."""
    sessions = [each for kind, times in durations.items() if kind not in _NO_SESSIONS for each in times]
    return {
        **_percentiles(sessions),
        **{kind: _percentiles(times) for kind, times in sorted(durations.items()) if times},
    }


def _percentiles(durations: Sequence[int]) -> dict[str, float]:
    if not durations:
        return {}
    ranks = {"p50_ms": len(durations) // 2, "p99_ms": len(durations) * 99 // 100, "max_ms": len(durations) - 1}
    return {name: round(sorted(durations)[rank] * 1000 / SECOND, 1) for name, rank in ranks.items()}


DRILL: Final = Drill(
    "halt",
    "Within a second of a halt from any process, all effects in flight stop and their sessions end; "
    "a blocked process is gone within three seconds.",
    run,
)

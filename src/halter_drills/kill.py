"""A process killed at any moment loses no acknowledged event, and its successor repeats nothing.

For each kill, a real process runs the workload and reports each acknowledgment before it continues. SIGKILL ends it
right before, right after or inside a commit. Then another process checks the store, takes the session over and
finishes it.
"""

import asyncio
import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Final

import msgspec

from halter.config.definition import AgentDefinition
from halter.core.clock import SECOND, SystemClock
from halter.core.ids import SessionId, SortableIds, StreamId, session_stream
from halter.guard.approvals import PendingDecision, answer_decision, list_pending_decisions
from halter.guard.ledger import Ledger
from halter.journal.checkpoints import Checkpointer
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore
from halter.runtime.agent_runtime import AgentRuntime, make_agent_runtime
from halter.runtime.runtime import Runtime, use_local_policy
from halter.runtime.session_start import begin_playbook, resume_playbook
from halter.settings import Settings
from halter.spec.playbook import Playbook, Step
from halter.state.receipt import make_receipt
from halter.state.session import Session, replay
from halter.tools.function_tool import CallKey, tool
from halter_drills.checker import RecordedEvent, check, fact, read_store
from halter_drills.children import Child, Pipe, children
from halter_drills.drill import (
    Drill,
    DrillResult,
    Setting,
    Workspace,
    connection,
    engine,
    examine,
    own_store,
    result,
    unseen,
    use_memory_file,
)
from halter_drills.faults import (
    EMPTY,
    NO_LEASE,
    TABLES,
    Death,
    Hand,
    deaths,
    dying,
    run_deaths,
    watch_engine,
    writing_behind,
)
from halter_drills.workload import (
    NO_SECRETS,
    PERSON,
    AckedEvent,
    ActStep,
    EffectFile,
    ToolEffect,
    Workload,
    plan,
    policy_of,
)

# Kills between the intent and the settlement of a call: no plain write runs twice, and every doubt needs a decision.

POLL_INTERVAL: Final = SECOND // 50
ANSWER_TIMEOUT: Final = 60 * SECOND
STEPS: Final = ("inspect", "put", "pay", "put", "pay", "inspect", "pay")
PLAYBOOK: Final = Playbook(
    tuple(Step(each, msgspec.json.encode({"order": number})) for number, each in enumerate(STEPS, 1)), "the drill"
)
HISTORY: Final = "SELECT stream, seq, kind, at, generation, facts FROM events WHERE stream = ? ORDER BY seq"


@dataclass(slots=True)
class PlayShop(EffectFile):
    """The outside world of the agent. With `careless`, plain writes are declared idempotent."""

    careless: bool = False

    def agent(self, app: Runtime) -> AgentRuntime:
        """Make an agent with a read, an idempotent write and a plain write."""

        async def inspect(order: int, key: CallKey) -> str:
            return self.record("inspect", order, str(key))

        async def put(order: int, key: CallKey) -> str:
            return self.record("put", order, str(key))

        async def pay(order: int, key: CallKey) -> str:
            return self.record("pay", order, str(key))

        tools = (tool(inspect, effect="read"), tool(put, idempotent=True), tool(pay, idempotent=self.careless))
        tools_by_name = {each.spec.name: each for each in tools}
        return make_agent_runtime(app, AgentDefinition(policy=policy_of()), tools_by_name, NO_SECRETS)


def app_on(real: Engine, folder: Path) -> Runtime:
    clock = SystemClock()
    settings = Settings("", folder, folder / "key", PERSON, folder / "trust", None)
    store = JournalStore(real)
    checkpointer = Checkpointer(folder, settings.signing_key, "drill", clock.now)
    ids, ledger = SortableIds(clock.now), Ledger(store, clock)
    return Runtime(settings, clock, ids, store, checkpointer, ledger, {}, policy=use_local_policy(settings))


async def playing_victim(pipe: Pipe, url: str, shop: PlayShop, death: Death) -> None:
    clock = SystemClock()
    beginning = app_on(engine(url, clock, NO_LEASE), shop.file.parent)
    session = await begin_playbook(shop.agent(beginning), PLAYBOOK, {})
    await beginning.store.close()
    pipe.send(session)
    mortal = app_on(dying(engine(url, clock, NO_LEASE), death, pipe), shop.file.parent)
    await resume_playbook(shop.agent(mortal), session, unseen)
    signal.pause()


async def playing_heir(pipe: Pipe, url: str, shop: PlayShop, session: str) -> None:
    app = app_on(engine(url, SystemClock(), NO_LEASE), shop.file.parent)
    try:
        pipe.send((await resume_playbook(shop.agent(app), SessionId(session), unseen)).state)
    finally:
        await app.store.close()


async def count_effects(folder: Path) -> int:
    clock, commits = SystemClock(), 0

    def commit(number: int) -> None:
        nonlocal commits
        commits = number

    shop = PlayShop(folder / "uncounted")
    memory = MemoryEngine(now=clock.now, new_id=SortableIds(clock.now).make)
    app = app_on(memory, folder)
    session = await begin_playbook(shop.agent(app), PLAYBOOK, {})
    watched = app_on(watch_engine(memory, commit, commit), folder)
    await resume_playbook(shop.agent(watched), session, unseen)
    return commits


def acting(commits: int, seed: int) -> list[Death]:
    """List a death before and after every commit, in seeded order.

    The first one is between the last plain write and its settlement, so that even the shortest drill has one.
    """
    chosen_deaths = [death for death in deaths(commits, seed) if death.how != "inside"]
    first_death = Death(commits - 1, "before")
    return sorted(chosen_deaths, key=lambda death: (death.commit, death.how) != (first_death.commit, first_death.how))


class EffectsLane(msgspec.Struct, frozen=True):
    """One store on which processes that play a playbook are killed in turn."""

    workspace: Workspace
    teeth: bool

    def kill(self, death: Death) -> list[str]:
        shop = PlayShop(self.workspace.folder / "effects", careless=self.teeth)
        shop.file.write_bytes(b"")
        with children(__name__) as processes:
            child = processes.start(playing_victim, self.workspace.url, shop, death)
            session: str = child.receive()
            child.receive_all()
            child.expect_killed()
            history = self._history(session)
            decided_calls, wrong = list[str](), list[str]()
            if ending(history) is None:
                successor = processes.start(playing_heir, self.workspace.url, shop, session)
                decided_calls, wrong = asyncio.run(self._attend(successor, session, shop))
                successor.receive()
        wrong += [*find_undecided(list_doubts(history), decided_calls), *find_violations(shop.effects())]
        end = ending(self._history(session))
        if end != "COMPLETED":
            wrong.append(f"After all decisions were answered, the playbook ended {end}.")
        return [f"{death}, playing: {violation}" for violation in wrong]

    def _history(self, session: str) -> list[RecordedEvent]:
        with closing(connection(self.workspace.url)) as database:
            rows = Hand(database, self.workspace.kind).rows(HISTORY, session_stream(session))
        return [fact(*row) for row in rows]

    async def _attend(self, successor: Child, session: str, shop: PlayShop) -> tuple[list[str], list[str]]:
        """Answer pending decisions until the successor is done; return their calls, and violations."""
        decided_calls: list[str] = []
        wrong: list[str] = []
        clock = SystemClock()
        deadline = clock.now() + ANSWER_TIMEOUT
        async with self.workspace.open_store(NO_LEASE) as store:
            while not successor.pipe.poll() and clock.now() < deadline:
                for decision in await list_pending_decisions(store):
                    if decision.session == session and decision.subject not in decided_calls:
                        decided_calls.append(decision.subject)
                        wrong += await _answer(store, decision, shop)
                await clock.sleep(POLL_INTERVAL)
        return decided_calls, wrong


def ending(history: Sequence[RecordedEvent]) -> str | None:
    return next((event.facts["state"] for event in history if event.kind == "session_ended"), None)


def list_doubts(history: Sequence[RecordedEvent]) -> list[tuple[str, str]]:
    """List the calls without a settlement, each with its tool."""
    settled_calls = {event.facts["call"] for event in history if event.kind == "call_settled"}
    tools_by_call = {event.facts["call"]: event.facts["tool"] for event in history if event.kind == "call_started"}
    return [(call, name) for call, name in tools_by_call.items() if call not in settled_calls]


async def _answer(store: JournalStore, decision: PendingDecision, shop: PlayShop) -> list[str]:
    """Answer as the outside world requires; check that the receipt shows the doubt before that."""
    wrong: list[str] = []
    if decision.about != "unknown_call":
        wrong.append(f"The decision about {decision.name} was of the kind {decision.about}.")
    if decision.subject not in make_receipt(await store.read(session_stream(decision.session))).in_doubt:
        wrong.append(f"The receipt does not list {decision.subject} as in doubt.")
    has_happened = any(effect.key == decision.subject for effect in shop.effects())
    committed = await store.commit(
        answer_decision(decision, "approve" if has_happened else "deny", PERSON, f"{decision.decision}/answer")
    )
    return wrong if committed.events else [*wrong, f"The answer about {decision.subject} was not accepted."]


def find_undecided(doubtful_calls: Sequence[tuple[str, str]], decided_calls: Sequence[str]) -> list[str]:
    """Check that each plain write in doubt, and nothing else, had a decision."""
    calls_to_ask = [call for call, name in doubtful_calls if name == "pay"]
    wrong = [
        f"The write {call} was in doubt, but had no decision." for call in calls_to_ask if call not in decided_calls
    ]
    return wrong + [
        f"The call {call} had a decision, but was not in doubt." for call in decided_calls if call not in calls_to_ask
    ]


def find_violations(effects: Sequence[ToolEffect]) -> list[str]:
    keys: dict[tuple[str, int], list[str]] = defaultdict(list)
    for effect in effects:
        keys[effect.tool, effect.order].append(effect.key)
    wrong: list[str] = []
    for order, name in enumerate(STEPS, 1):
        call_keys = keys[name, order]
        if not call_keys:
            wrong.append(f"Step {order} ({name}) did not run.")
        elif name == "pay" and len(call_keys) > 1:
            wrong.append(f"Step {order}, a plain write, ran {len(call_keys)} times.")
        elif len({*call_keys}) > 1:
            wrong.append(f"Step {order} ({name}) was repeated under another key: {', '.join(call_keys)}.")
    return wrong


SESSION: Final = "drill"
LANES: Final = 2

PRELOADED: Final = (__name__, "halter.cli", "halter.journal.postgres")
"""Modules that children import, including the program that started them."""


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """One acknowledged event, and a digest of the state after it."""

    stream: str
    seq: int
    hash: bytes
    state: bytes


def digest(state: Session) -> bytes:
    return sha256(msgspec.json.encode(state)).digest()


async def victim(pipe: Pipe, url: str, death: Death, teeth: bool) -> None:  # noqa: FBT001  passed to a process
    def on_ack(acked_events: Sequence[AckedEvent]) -> None:
        pipe.send([Ack(stored.stream, stored.seq, stored.hash, digest(state)) for stored, state in acked_events])

    real = engine(url, SystemClock(), NO_LEASE)
    store = JournalStore(dying(writing_behind(real) if teeth else real, death, pipe))
    await Workload(store, SystemClock(), "victim", SESSION, on_ack).run()
    signal.pause()


async def heir(pipe: Pipe, url: str, acks: Sequence[Ack]) -> None:
    """Check the store of a dead process, take its session over and finish it; send the violations."""
    clock, wrong = SystemClock(), find_lost(url, acks)
    store = JournalStore(engine(url, clock, NO_LEASE))
    try:
        wrong += [*await unlike(store, acks), *await examine(store), *check(read_store(url), finished=False)]
        state = await Workload(store, clock, "heir", SESSION).run()
        if state.state != "COMPLETED":
            wrong.append(f"The successor left the session {state.state}.")
        pipe.send([*wrong, *await examine(store), *check(read_store(url)), *find_repeated(url)])
    finally:
        await store.close()


def find_lost(url: str, acks: Sequence[Ack]) -> list[str]:
    """Check with plain SQL that the store has all acknowledged events, and at most one more commit."""
    with closing(connection(url)) as database:
        rows = database.execute("SELECT stream, seq, hash, key FROM events").fetchall()
    hashes = {(stream, seq): bytes(value) for stream, seq, value, _ in rows}
    wrong = [
        f"Event {ack.seq} of {ack.stream} was acknowledged and is lost."
        for ack in acks
        if hashes.get((ack.stream, ack.seq)) != ack.hash
    ]
    acknowledged = {(ack.stream, ack.seq) for ack in acks}
    unacknowledged = {key for stream, seq, _, key in rows if (stream, seq) not in acknowledged}
    if len(unacknowledged) > 1:
        wrong.append(f"{len(unacknowledged)} commits were not acknowledged; only one can have been in flight.")
    return wrong


async def unlike(store: JournalStore, acks: Sequence[Ack]) -> list[str]:
    """Check that the events fold into the states of the dead process."""
    last = {ack.stream: ack for ack in acks}
    wrong: list[str] = []
    for stream, ack in last.items():
        events = await store.read(StreamId(stream), limit=ack.seq)
        if digest(replay(events)) != ack.state:
            wrong.append(f"At event {ack.seq}, {stream} folds into another state than that of the dead process.")
    return wrong


def find_repeated(url: str) -> list[str]:
    """Check with plain SQL that every step of the plan happened exactly once."""
    with closing(connection(url)) as database:
        rows = database.execute("SELECT kind, stream, key, facts FROM events").fetchall()
    times = Counter(_step(*row) for row in rows)
    steps = plan(SESSION)
    ids = [each.id for step in steps for each in (step.together if isinstance(step, ActStep) else (step,))]
    return [f"The step {step} happened {times[step]} times." for step in ids if times[step] != 1]


def _step(kind: str, stream: str, key: str, facts: bytes) -> str:
    """Name the step of the plan that an event completes."""
    match kind:
        case "call_settled":
            return json.loads(facts)["call"]
        case "request_settled":
            return json.loads(facts)["request"]
        case "cost_cap_reached":
            return json.loads(facts)["refused"]
        case "session_ended":
            return f"{stream} ends"
        case _:
            return key


class JournalLane(msgspec.Struct, frozen=True):
    """One store on which processes that write the journal are killed in turn."""

    workspace: Workspace
    teeth: bool

    def kill(self, death: Death) -> list[str]:
        with (
            closing(connection(self.workspace.url)) as database,
            Hand(database, self.workspace.kind).hold_transaction(),
        ):
            for table in TABLES:
                database.execute(EMPTY.format(table=table))
        with children(*PRELOADED) as processes:
            child = processes.start(victim, self.workspace.url, death, self.teeth)
            acks = self._collect_acks(child, death)
            wrong: list[str] = processes.start(heir, self.workspace.url, acks).receive()
        return [f"{death}: {violation}" for violation in wrong]

    def _collect_acks(self, child: Child, death: Death) -> list[Ack]:
        """Collect the acknowledgments; kill a process that dies inside a commit."""
        acks: list[Ack] = []
        if death.how == "inside":
            while (message := child.receive()) is not None:
                acks += message
            time.sleep(death.delay)
            child.kill()
        acks += [ack for message in child.receive_all() for ack in message]
        child.expect_killed()
        return acks


def plan_deaths(commits: int, play_commits: int, seeds: int | None) -> tuple[Sequence[Death], Sequence[Death]]:
    """Plan kills of processes that write the journal, and of those that play: at every commit, or half of each."""
    if seeds is None:
        return deaths(commits, seed=1), acting(play_commits, seed=1)
    journal_deaths = (death for seed in count(1) for death in deaths(commits, seed))
    play_deaths = (death for seed in count(1) for death in acting(play_commits, seed))
    return list(islice(journal_deaths, seeds - seeds // 2)), list(islice(play_deaths, seeds // 2))


def run(setting: Setting) -> DrillResult:
    with ExitStack() as stack:
        workspaces = [stack.enter_context(own_store(use_memory_file(setting))) for _ in range(LANES)]
        for workspace in workspaces:
            engine(workspace.url, SystemClock(), NO_LEASE).close()
        commits, play_commits = asyncio.run(count_commits()), asyncio.run(count_effects(workspaces[0].folder))
        journal_deaths, play_deaths = plan_deaths(commits, play_commits, setting.seeds)
        total, journal_total = len(journal_deaths) + len(play_deaths), len(journal_deaths)
        lanes = [JournalLane(workspace, setting.teeth) for workspace in workspaces]
        wrong = run_deaths(lanes, journal_deaths, lambda done, note: setting.progress(done, total, note))
        acting_lanes = [EffectsLane(workspace, setting.teeth) for workspace in workspaces]
        wrong += run_deaths(
            acting_lanes, play_deaths, lambda done, note: setting.progress(journal_total + done, total, note)
        )
    counts = {
        "kills": total,
        "commits": commits,
        **Counter(f"killed_{death.how}_a_commit" for death in journal_deaths),
        "kills_while_playing": len(play_deaths),
        "commits_while_playing": play_commits,
        "kills_with_violations": sum(bool(each) for each in wrong),
    }
    return result("kill", workspaces[0].kind, total, [violation for each in wrong for violation in each], counts)


async def count_commits() -> int:
    clock = SystemClock()
    commits: list[Sequence[AckedEvent]] = []
    store = JournalStore(MemoryEngine(now=clock.now, new_id=SortableIds(clock.now).make), inline=True)
    await Workload(store, clock, "worker", SESSION, commits.append).run()
    return len(commits)


DRILL: Final = Drill("kill", "A killed process loses no acknowledged event, and its successor repeats nothing.", run)

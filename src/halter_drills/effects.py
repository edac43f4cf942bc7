"""A process is killed between a call's intent and its outcome: no plain write happens twice, and no doubt is lost.

A real process plays a playbook of reads, idempotent writes and plain writes through the guard, and is killed right
before or right after one of its commits: so also after an intent and before its effect, and after an effect and before
its outcome. What the tools did is counted outside, in a file, by the key that they were given. Another process goes
on; a person, in a third one, answers what it asks, and answers by what the outside world knows.
"""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from halter.app.agent import Assembled
from halter.app.opened import App
from halter.app.playing import begin, go_on
from halter.app.policy import unbound
from halter.core.clock import SECOND, SystemClock
from halter.core.ids import SessionId, SortableIds, session_stream
from halter.core.playbook import Playbook, Step
from halter.guard.approvals import Open, decide, needs_you
from halter.guard.chokepoint import Answer
from halter.guard.purse import Purse
from halter.journal.checkpoints import Checkpointer
from halter.journal.engine import Engine
from halter.journal.memory import MemoryEngine
from halter.journal.store import JournalStore
from halter.settings import Settings
from halter.state.receipt import receipt
from halter.tools.arguments import CallKey
from halter.tools.tool import tool
from halter_drills.agents import NO_SECRETS, PERSON, policy_of
from halter_drills.checker import Fact, fact
from halter_drills.children import Child, Children, Pipe, children
from halter_drills.drill import Ground, connection, engine
from halter_drills.engines import watched
from halter_drills.hand import Hand
from halter_drills.lanes import NO_LEASE, Death, buried, deaths, dying, heard

LOOK: Final = SECOND // 50
PATIENCE: Final = 60 * SECOND
STEPS: Final = ("look", "put", "pay", "put", "pay", "look", "pay")
PLAYBOOK: Final = Playbook(
    tuple(Step(each, msgspec.json.encode({"order": number})) for number, each in enumerate(STEPS, 1)), "the drill"
)
HISTORY: Final = "SELECT stream, seq, kind, at, generation, facts FROM events WHERE stream = ? ORDER BY seq"


class Effect(msgspec.Struct, frozen=True):
    """One thing that a tool did to the outside world, and the key that it was given for it."""

    tool: str
    order: int
    key: str


@dataclass(frozen=True, slots=True)
class Shop:
    """The outside world: a file that counts what was done. A careless one takes every write for a repeatable one."""

    file: Path
    careless: bool = False

    def effects(self) -> list[Effect]:
        """Read the count."""
        return [msgspec.json.decode(line, type=Effect) for line in self.file.read_bytes().splitlines()]

    def agent(self) -> Assembled:
        """Make the agent that plays: it has a read, an idempotent write and a plain one."""

        async def look(order: int, key: CallKey) -> str:
            return self._did("look", order, key)

        async def put(order: int, key: CallKey) -> str:
            return self._did("put", order, key)

        async def pay(order: int, key: CallKey) -> str:
            return self._did("pay", order, key)

        made = (tool(look, effect="read"), tool(put, idempotent=True), tool(pay, idempotent=self.careless))
        return Assembled(policy=policy_of(), tools={each.spec.name: each for each in made}, secrets=NO_SECRETS)

    def _did(self, what: str, order: int, key: str) -> str:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(Effect(what, order, str(key))) + b"\n")
        return "done"


def app_on(real: Engine, folder: Path) -> App:
    """Open an app around an engine; nothing of it is kept beside the store."""
    clock = SystemClock()
    settings = Settings("", folder, folder / "key", PERSON, folder / "trust", None)
    store = JournalStore(real)
    checkpointer = Checkpointer(folder, settings.signing_key, "drill", clock.now)
    ids, purse = SortableIds(clock.now), Purse(store, clock)
    return App(settings, clock, ids, store, checkpointer, purse, {}, policy=unbound(settings))


def victim(pipe: Pipe, url: str, shop: Shop, death: Death) -> None:
    """Play until death comes."""
    asyncio.run(_play_and_die(pipe, url, shop, death))
    signal.pause()


async def _play_and_die(pipe: Pipe, url: str, shop: Shop, death: Death) -> None:
    agent, clock = shop.agent(), SystemClock()
    beginning = app_on(engine(url, clock, NO_LEASE), shop.file.parent)
    session = await begin(beginning, agent, PLAYBOOK, {})
    await beginning.store.close()
    pipe.send(session)
    mortal = app_on(dying(engine(url, clock, NO_LEASE), death, pipe), shop.file.parent)
    await go_on(mortal, agent, session, unseen)


def heir(pipe: Pipe, url: str, shop: Shop, session: str) -> None:
    """Go on where the dead process was, and say how it came out."""
    pipe.send(asyncio.run(_inherit(url, shop, SessionId(session))))


async def _inherit(url: str, shop: Shop, session: SessionId) -> str:
    app = app_on(engine(url, SystemClock(), NO_LEASE), shop.file.parent)
    try:
        return (await go_on(app, shop.agent(), session, unseen)).state
    finally:
        await app.store.close()


def unseen(_: Step, __: Answer) -> None:
    """Show no step to anybody."""


async def counted(folder: Path) -> int:
    """Count the commits of a process that plays when nothing happens to it."""
    clock, commits = SystemClock(), 0

    def commit(number: int) -> None:
        nonlocal commits
        commits = number

    shop = Shop(folder / "uncounted")
    memory = MemoryEngine(now=clock.now, new_id=SortableIds(clock.now).new)
    app = app_on(memory, folder)
    session = await begin(app, shop.agent(), PLAYBOOK, {})
    await go_on(app_on(watched(memory, commit, commit), folder), shop.agent(), session, unseen)
    return commits


def acting(commits: int, seed: int) -> list[Death]:
    """List a death before and after every commit, in an order that the seed chooses.

    The first is one between the last plain write and its outcome, so that also the shortest drill sees one.
    """
    chosen = [death for death in deaths(commits, seed) if death.how != "inside"]
    last = Death(commits - 1, "before")
    return sorted(chosen, key=lambda death: (death.commit, death.how) != (last.commit, last.how))


@dataclass(frozen=True, slots=True)
class EffectsLane:
    """One store, on which one playing process after the other is killed."""

    ground: Ground
    teeth: bool

    def kill(self, death: Death) -> list[str]:
        """Let one process play and die, another one go on, and a person answer; say what is wrong."""
        shop = Shop(self.ground.folder / "effects", careless=self.teeth)
        shop.file.write_bytes(b"")
        with children(__name__) as started:
            child = started.start(victim, self.ground.url, shop, death)
            session: str = heard(child)
            child.hear_all()
            buried(child)
            history = self._history(session)
            asked, wrong = self._gone_on(started, session, shop) if ending(history) is None else ([], [])
        wrong += [*unasked(doubts(history), asked), *amiss(shop.effects())]
        end = ending(self._history(session))
        if end != "COMPLETED":
            wrong.append(f"After every question was answered, the playbook ended {end}.")
        return [f"{death}, playing: {what}" for what in wrong]

    def _gone_on(self, started: Children, session: str, shop: Shop) -> tuple[list[str], list[str]]:
        successor = started.start(heir, self.ground.url, shop, session)
        attended = asyncio.run(self._attend(successor, session, shop))
        heard(successor)
        return attended

    def _history(self, session: str) -> list[Fact]:
        """Read with plain SQL what a session did."""
        with closing(connection(self.ground.url)) as database:
            rows = Hand(database, self.ground.kind).rows(HISTORY, session_stream(session))
        return [fact(*row) for row in rows]

    async def _attend(self, successor: Child, session: str, shop: Shop) -> tuple[list[str], list[str]]:
        """Answer whatever waits for a person until the successor is done; return what was asked, and what is wrong."""
        asked: list[str] = []
        wrong: list[str] = []
        clock = SystemClock()
        store = self.ground.open(lease=NO_LEASE)
        deadline = clock.now() + PATIENCE
        try:
            while not successor.pipe.poll() and clock.now() < deadline:
                for one in await needs_you(store):
                    if one.session == session and one.subject not in asked:
                        asked.append(one.subject)
                        wrong += await _answered(store, one, shop)
                await clock.sleep(LOOK)
        finally:
            await store.close()
        return asked, wrong


def ending(history: Sequence[Fact]) -> str | None:
    """Tell how a session ended, if it has."""
    return next((event.facts["state"] for event in history if event.kind == "session_ended"), None)


def doubts(history: Sequence[Fact]) -> list[tuple[str, str]]:
    """List which calls were begun and have no outcome, each with its tool."""
    settled = {event.facts["call"] for event in history if event.kind == "call_settled"}
    begun = {event.facts["call"]: event.facts["tool"] for event in history if event.kind == "call_started"}
    return [(call, name) for call, name in begun.items() if call not in settled]


async def _answered(store: JournalStore, one: Open, shop: Shop) -> list[str]:
    """Say what the outside world knows; and see that the receipt tells of the doubt while it lasts."""
    wrong: list[str] = []
    if one.about != "unknown_call":
        wrong.append(f"A person was asked about {one.name} as {one.about}.")
    if one.subject not in receipt(await store.read(session_stream(one.session))).in_doubt:
        wrong.append(f"The receipt does not say that {one.subject} is in doubt.")
    happened = any(effect.key == one.subject for effect in shop.effects())
    committed = await store.commit(decide(one, "approve" if happened else "deny", PERSON, f"{one.decision}/answer"))
    return wrong if committed.events else [*wrong, f"The answer about {one.subject} was not taken."]


def unasked(doubtful: Sequence[tuple[str, str]], asked: Sequence[str]) -> list[str]:
    """Compare what a person was asked with what had to be asked: the plain writes in doubt, and nothing else."""
    due = [call for call, name in doubtful if name == "pay"]
    wrong = [f"The write {call} was in doubt, and nobody was asked about it." for call in due if call not in asked]
    return wrong + [f"A person was asked about {call}, which was in no doubt." for call in asked if call not in due]


def amiss(effects: Sequence[Effect]) -> list[str]:
    """Check by the outside count that plain writes happened once, and others under one key."""
    keys: dict[tuple[str, int], list[str]] = defaultdict(list)
    for effect in effects:
        keys[effect.tool, effect.order].append(effect.key)
    wrong: list[str] = []
    for order, name in enumerate(STEPS, 1):
        found = keys[name, order]
        if not found:
            wrong.append(f"Step {order} ({name}) was never done.")
        elif name == "pay" and len(found) > 1:
            wrong.append(f"Step {order}, a plain write, was done {len(found)} times.")
        elif len({*found}) > 1:
            wrong.append(f"Step {order} ({name}) was repeated under another key: {', '.join(found)}.")
    return wrong

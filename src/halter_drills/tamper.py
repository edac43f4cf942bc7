"""Somebody changes the store behind Halter's back: the examination finds it, names it, and accuses nobody else.

A store is filled with sessions and their signed checkpoints, and one of them is erased by rights. Then everything
that somebody with the database's password may do is done to it with plain SQL, one thing at a time, and undone.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from halter.core.clock import Clock, SystemClock
from halter.core.ids import Digest, session_stream
from halter.journal.checkpoints import Checkpointer, checkpoint_file
from halter.journal.engine import Engine, View
from halter.journal.keys import public_key_path, public_keys
from halter.journal.report import Report
from halter.journal.retention import erase
from halter.journal.sqlite import LEASE
from halter.journal.store import JournalStore
from halter.journal.verify import examine
from halter_drills.drill import Drill, Ground, Result, Setting, connection, engine, own_store, result
from halter_drills.examine import in_memory
from halter_drills.hand import Entry, Hand
from halter_drills.tampering import TAMPERINGS, Scene, Tampering, Trace
from halter_drills.workload import Workload

SEEDS: Final = 4
SESSIONS: Final = ("ada", "bob", "cyd")
ERASED: Final = "eve"
OFTEN: Final = 50
"""After so many events comes a checkpoint, so that each session has several."""


class Trusting:
    """A view that believes the facts which it first saw with a hash: so the chain no longer covers them."""

    def __init__(self, view: View, seen: dict[bytes, bytes]) -> None:
        self._view = view
        self._seen = seen

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Pass a question on."""
        return self._view.ask(name, params)

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Pass a question on; if it is for events, answer with the facts of the first time."""
        rows = self._view.rows(name, params)
        return [self._believed(row) for row in rows] if name == "events_of" else rows

    def get(self, digest: Digest) -> bytes | None:
        """Fetch a blob."""
        return self._view.get(digest)

    def flaws(self) -> Sequence[str]:
        """Pass on what the database finds damaged."""
        return self._view.flaws()

    def close(self) -> None:
        """Look no more."""
        self._view.close()

    def _believed(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        entry = Entry(*row[: len(Entry._fields)])
        facts = self._seen.setdefault(entry.hash, entry.facts)
        return (*entry._replace(facts=facts), *row[len(Entry._fields) :])


@dataclass(frozen=True, slots=True)
class Examiner:
    """Examines one store against its checkpoints; with teeth, in a way that trusts too much."""

    store: JournalStore
    folder: Path
    keys: frozenset[str]
    teeth: bool
    seen: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    async def report(self) -> Report:
        """Look at everything."""
        return await self.store.study(self._examined)

    def _examined(self, view: View) -> Report:
        return examine(Trusting(view, self.seen) if self.teeth else view, self.folder, self.keys)


def run(setting: Setting) -> Result:
    """Try every kind of tampering, on several events each."""
    with own_store(in_memory(setting)) as ground, closing(connection(ground.url)) as database:
        return asyncio.run(_run(setting, ground, Hand(database, ground.kind)))


async def _run(setting: Setting, ground: Ground, hand: Hand) -> Result:
    clock = SystemClock()
    folder, key = ground.folder / "checkpoints", ground.folder / "signing.key"
    folder.mkdir()
    real = engine(ground.url, clock, LEASE)
    checkpointer = Checkpointer(folder, key, store_id(real), clock.now, every_events=OFTEN)
    store = JournalStore(real, observers=(checkpointer,))
    try:
        erased = await fill(store, clock, hand)
        checkpointer.flush()
        streams = [session_stream(session) for session in SESSIONS]
        scene = Scene(hand, streams, checkpoint_file(folder, store_id(real)), erased)
        examiner = Examiner(store, folder, public_keys(public_key_path(key)), setting.teeth)
        return await _tried(setting, ground, scene, examiner)
    finally:
        await store.close()


def store_id(real: Engine) -> str:
    """Tell how the store calls itself."""
    return next(row["value"] for row in real.ask("meta", {}) if row["name"] == "store")


async def fill(store: JournalStore, clock: Clock, hand: Hand) -> list[Entry]:
    """Run the sessions, erase one of them by rights, and return what was erased."""
    for session in (*SESSIONS, ERASED):
        await Workload(store, clock, "worker", session).run()
    entries = hand.entries(session_stream(ERASED))
    await erase(store, [ERASED], by="the drill")
    hand.save()
    return [entry for entry in entries if entry.body is not None]


async def _tried(setting: Setting, ground: Ground, scene: Scene, examiner: Examiner) -> Result:
    untouched = await examiner.report()
    wrong = clean(untouched, scene)
    seeds = setting.seeds or SEEDS
    total = seeds * len(TAMPERINGS)
    for done, (seed, tampering) in enumerate(product(range(1, seeds + 1), TAMPERINGS), 1):
        wrong += await _case(seed, tampering, scene, examiner)
        setting.progress(done, total, name(tampering))
    counts = {
        "kinds_of_tampering": len(TAMPERINGS),
        "events": untouched.events,
        "erased_bodies": untouched.erased,
        "checkpoints": untouched.checkpoints,
        "uncovered_events": untouched.uncovered_events,
    }
    return result("tamper", ground.kind, total, wrong, counts)


def clean(report: Report, scene: Scene) -> list[str]:
    """Check that nothing is found where nothing was done, and that what was erased by rights is called so."""
    wrong = [f"Nobody had touched the store, and yet: {found.sentence}" for found in report.findings]
    missing = scene.hand.rows("SELECT COUNT(*) FROM events WHERE body IS NULL AND salt IS NULL AND digest <> ?", b"")
    if report.erased != missing[0][0]:
        wrong.append(f"{missing[0][0]} bodies were erased by rights, and {report.erased} are told as erased.")
    return wrong


async def _case(seed: int, tampering: Tampering, scene: Scene, examiner: Examiner) -> list[str]:
    checkpoints = scene.checkpoints.read_bytes()
    with scene.hand.at_once():
        trace = tampering(scene, random.Random(f"{seed}/{name(tampering)}"))
    found = await examiner.report()
    scene.hand.restore()
    scene.checkpoints.write_bytes(checkpoints)
    after = await examiner.report()
    wrong = judge(trace, found)
    wrong += [f"was undone, and yet: {left.sentence}" for left in after.findings]
    return [f"“{name(tampering)}” (seed {seed}) {what}" for what in wrong]


def name(tampering: Tampering) -> str:
    """Say what a kind of tampering does, in its own words."""
    return (tampering.__doc__ or "").removesuffix(".")


def judge(trace: Trace, report: Report) -> list[str]:
    """Compare what was found with what was done."""
    kinds = {found.kind for found in report.findings}
    if not kinds:
        return ["was not found."]
    wrong: list[str] = []
    if not kinds & trace.kinds:
        wrong.append(f"was taken for {', '.join(sorted(kinds))}, and is {', '.join(sorted(trace.kinds))}.")
    others = {found.stream for found in report.findings} - trace.streams
    if others:
        wrong.append(f"was laid to the charge of {', '.join(sorted(others))} too.")
    return wrong


DRILL: Final = Drill("tamper", "Whatever is changed behind Halter's back is found and called by its name.", run)

"""Somebody changes the store behind Halter's back: the examination finds it, names it, and accuses nobody else.

A store is filled with sessions and their signed checkpoints, and one of them is erased by rights. Then everything
that somebody with the database's password may do is done to it with plain SQL, one thing at a time, and undone.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec

from halter.core.clock import Clock, SystemClock
from halter.core.ids import Digest, session_stream
from halter.journal.apply import CHAIN_START, hash_event
from halter.journal.checkpoints import (
    NO_PREVIOUS_LINE,
    Checkpoint,
    Checkpointer,
    checkpoint_file,
    digest_line,
    load_signing_key,
    public_key_path,
    read_public_keys,
)
from halter.journal.engine import Engine, StoreView
from halter.journal.rebuild import FindingKind, IntegrityReport
from halter.journal.retention import erase_session_bodies
from halter.journal.sqlite import LEASE_DURATION
from halter.journal.store import JournalStore
from halter.journal.verify import examine
from halter_drills.drill import Drill, DrillResult, Ground, Setting, connection, engine, in_memory, own_store, result
from halter_drills.faults import EventEntry, Hand
from halter_drills.workload import Workload

# All the ways to tamper with a store that the drill knows: what is done, and what an examination must say of it.

FORGER: Final = "mallory"


class TamperScene(msgspec.Struct, frozen=True):
    """What there is to tamper with: a store, its checkpoints, and some copies from earlier."""

    hand: Hand
    streams: Sequence[str]
    """The streams of sessions whose bodies are still there."""
    checkpoints: Path
    erased: Sequence[EventEntry]
    """Events whose bodies have been erased since, as they were before."""


class ExpectedFinding(msgspec.Struct, frozen=True):
    """What must be named: one of these kinds; and what may be named: these streams, or tables, and no others."""

    kinds: frozenset[FindingKind]
    streams: frozenset[str]


Tampering = Callable[[TamperScene, random.Random], ExpectedFinding]


def trace(kind: FindingKind, *streams: str) -> ExpectedFinding:
    return ExpectedFinding(frozenset((kind,)), frozenset(streams))


def chosen(scene: TamperScene, chance: random.Random) -> tuple[str, list[EventEntry], EventEntry]:
    """Choose a stream, and an event that has others before and after it."""
    stream = chance.choice(scene.streams)
    entries = scene.hand.entries(stream)
    return stream, entries, chance.choice(entries[1:-1])


def edit_facts(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Change one byte of the facts; or only their looks."""
    stream, _, entry = chosen(scene, chance)
    place = chance.randrange(len(entry.facts))
    flipped = entry.facts[:place] + bytes([entry.facts[place] ^ 1]) + entry.facts[place + 1 :]
    scene.hand.change(entry, facts=chance.choice((flipped, entry.facts + b" ")))
    return trace("edited", stream)


def edit_body(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Put other words into somebody's mouth."""
    stream = chance.choice(scene.streams)
    entry = chance.choice([entry for entry in scene.hand.entries(stream) if entry.body is not None])
    scene.hand.change(entry, body=b"I never said that.")
    return trace("edited", stream)


def _edit(told: str, change: Callable[[EventEntry], Mapping[str, Any]]) -> Tampering:
    def edit(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
        stream, _, entry = chosen(scene, chance)
        scene.hand.change(entry, **change(entry))
        return trace("edited", stream)

    edit.__doc__ = told
    return edit


edit_time = _edit("Let something have happened a little later.", lambda entry: {"at": entry.at + 1})
edit_generation = _edit("Let another owner have done it.", lambda entry: {"generation": entry.generation + 1})
edit_kind = _edit("Make an event one of another kind.", lambda _: {"kind": "bodies_erased"})
edit_key = _edit("Let an event belong to another write.", lambda entry: {"key": f"{entry.key}/{FORGER}"})


def delete(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Remove an event."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.remove(entry)
    return trace("deleted", stream)


def delete_with_head(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Remove an event and the head of its stream."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.remove(entry)
    scene.hand.do("DELETE FROM streams WHERE stream = ?", stream)
    return trace("deleted", stream)


def delete_and_renumber(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Remove an event, and close the gap."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.remove(entry)
    scene.hand.renumber(stream, entry.seq, -1)
    scene.hand.set_head(stream)
    return trace("deleted", stream)


def reorder(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Let two events change places."""
    stream, entries, _ = chosen(scene, chance)
    first, second = chance.sample(entries[:-1], 2)
    for entry in (first, second):
        scene.hand.remove(entry)
    scene.hand.add(first._replace(seq=second.seq))
    scene.hand.add(second._replace(seq=first.seq))
    return trace("reordered", stream)


def duplicate(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Repeat an event at the end of its stream."""
    stream, entries, entry = chosen(scene, chance)
    scene.hand.add(entry._replace(seq=entries[-1].seq + 1))
    scene.hand.set_head(stream)
    return trace("duplicated", stream)


def duplicate_in_place(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Repeat an event right after itself, and make room for it."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.renumber(stream, entry.seq, 1)
    scene.hand.add(entry._replace(seq=entry.seq + 1))
    scene.hand.set_head(stream)
    return trace("duplicated", stream)


def swap_streams(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Let two sessions change their histories, with their heads."""
    one, other = chance.sample(list(scene.streams), 2)
    for old, new in ((one, FORGER), (other, one), (FORGER, other)):
        scene.hand.do("UPDATE events SET stream = ? WHERE stream = ?", new, old)
        scene.hand.do("UPDATE streams SET stream = ? WHERE stream = ?", new, old)
    return ExpectedFinding(frozenset(("moved", "rewritten")), frozenset((one, other)))


def move(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Take an event out of one stream and put it at the end of another."""
    one, other = chance.sample(list(scene.streams), 2)
    entry = chance.choice(scene.hand.entries(one)[1:-1])
    scene.hand.remove(entry)
    scene.hand.add(entry._replace(stream=other, seq=scene.hand.entries(other)[-1].seq + 1))
    scene.hand.set_head(other)
    return trace("moved", one, other)


def cut_tail(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Cut off the end of a stream, and make its head fit."""
    stream, entries, entry = chosen(scene, chance)
    for after in entries[entry.seq :]:
        scene.hand.remove(after)
    scene.hand.set_head(stream)
    return trace("cut", stream)


def drop_stream(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Remove a stream with everything that was made of it."""
    stream = chance.choice(scene.streams)
    session = stream.removeprefix("session:")
    scene.hand.do("DELETE FROM events WHERE stream = ?", stream)
    scene.hand.do("DELETE FROM streams WHERE stream = ?", stream)
    scene.hand.do("DELETE FROM sessions WHERE session = ?", session)
    scene.hand.do("DELETE FROM holds WHERE session = ?", session)
    scene.hand.do("DELETE FROM spends WHERE session = ?", session)
    scene.hand.do("DELETE FROM budgets WHERE scope = ?", stream)
    return trace("dropped", stream)


def rewrite(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Change an event, and work out the chain anew from there to the head."""
    stream, entries, entry = chosen(scene, chance)
    previous = entries[entry.seq - 2].hash if entry.seq > 1 else CHAIN_START
    changed = entry._replace(facts=entry.facts + b" ")
    for old in (changed, *entries[entry.seq :]):
        header = (old.stream, old.seq, old.kind, old.version, old.at, old.generation, old.key, old.blob)
        previous = hash_event(previous, header, old.facts, old.digest)
        scene.hand.change(old, facts=old.facts, hash=previous)
    scene.hand.set_head(stream)
    return trace("rewritten", stream)


def remove_body(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Let what was said disappear as if it had been erased."""
    stream = chance.choice(scene.streams)
    entry = chance.choice([entry for entry in scene.hand.entries(stream) if entry.body is not None])
    scene.hand.change(entry, body=None, salt=None)
    return trace("body_missing", stream)


def put_body_back(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Take what was erased from an old copy and put it back."""
    entry = chance.choice(scene.erased)
    scene.hand.change(entry, body=entry.body, salt=entry.salt)
    return trace("not_erased", entry.stream)


def alter_blob(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Change a document that events name."""
    blob, streams = _blob(scene, chance)
    scene.hand.do("UPDATE blobs SET data = ? WHERE digest = ?", b"another document", blob)
    return trace("blob_altered", *streams)


def remove_blob(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Remove a document that events name."""
    blob, streams = _blob(scene, chance)
    scene.hand.do("DELETE FROM blobs WHERE digest = ?", blob)
    return trace("blob_missing", *streams)


def _blob(scene: TamperScene, chance: random.Random) -> tuple[str, list[str]]:
    named = scene.hand.rows("SELECT blob, stream FROM events WHERE blob IS NOT NULL ORDER BY blob, stream")
    blob = chance.choice(sorted({row[0] for row in named}))
    return blob, [stream for name, stream in named if name == blob]


def edit_budget(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Make somebody look as if they had spent less."""
    rows = scene.hand.rows('SELECT scope, "window", unit FROM budgets WHERE spent > 0 ORDER BY scope, "window", unit')
    scene.hand.do(
        'UPDATE budgets SET spent = spent - 1 WHERE scope = ? AND "window" = ? AND unit = ?', *chance.choice(rows)
    )
    return trace("row", "budgets")


def edit_session(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Make a session look as if it had ended otherwise."""
    session = chance.choice(scene.streams).removeprefix("session:")
    scene.hand.do("UPDATE sessions SET terminal_reason = ? WHERE session = ?", "external_halt", session)
    return trace("row", "sessions")


def remove_spend(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Remove a cost from the log of costs."""
    rows = scene.hand.rows("SELECT hold FROM spends ORDER BY hold")
    scene.hand.do("DELETE FROM spends WHERE hold = ?", *chance.choice(rows))
    return trace("row", "spends")


def edit_checkpoint(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Let a checkpoint vouch for another hash."""
    lines = scene.checkpoints.read_bytes().splitlines(keepends=True)
    number = chance.randrange(len(lines))
    place = chance.choice([place for place, byte in enumerate(lines[number]) if chr(byte) in "0123456789abcdef"])
    changed = b"1" if lines[number][place : place + 1] != b"1" else b"2"
    lines[number] = lines[number][:place] + changed + lines[number][place + 1 :]
    scene.checkpoints.write_bytes(b"".join(lines))
    return trace("checkpoint_altered", "")


def cut_checkpoints(scene: TamperScene, chance: random.Random) -> ExpectedFinding:
    """Take a checkpoint out of the file."""
    lines = scene.checkpoints.read_bytes().splitlines(keepends=True)
    del lines[chance.randrange(len(lines) - 1)]
    scene.checkpoints.write_bytes(b"".join(lines))
    return trace("checkpoint_altered", "")


def remove_checkpoints(scene: TamperScene, _: random.Random) -> ExpectedFinding:
    """Remove the file with all checkpoints."""
    scene.checkpoints.unlink()
    return trace("checkpoint_missing", "")


def forge_checkpoints(scene: TamperScene, _: random.Random) -> ExpectedFinding:
    """Sign all checkpoints anew, with a key of one's own."""
    key = load_signing_key(scene.checkpoints.with_name(FORGER))
    previous, lines = NO_PREVIOUS_LINE, list[bytes]()
    for line in scene.checkpoints.read_bytes().splitlines():
        written = msgspec.json.decode(line, type=Checkpoint)
        unsigned = msgspec.structs.replace(written, previous=previous, key=key.public)
        lines.append(msgspec.structs.replace(unsigned, signature=key.sign(unsigned.signed_bytes())).line())
        previous = digest_line(lines[-1])
    scene.checkpoints.write_bytes(b"".join(line + b"\n" for line in lines))
    return trace("checkpoint_key", "")


TAMPERINGS: Final[tuple[Tampering, ...]] = (
    *(edit_facts, edit_body, edit_time, edit_generation, edit_kind, edit_key, delete, delete_with_head),
    *(delete_and_renumber, reorder, duplicate, duplicate_in_place, swap_streams, move, cut_tail, drop_stream),
    *(rewrite, remove_body, put_body_back, alter_blob, remove_blob, edit_budget, edit_session, remove_spend),
    *(edit_checkpoint, cut_checkpoints, forge_checkpoints, remove_checkpoints),
)


SEEDS: Final = 4
SESSIONS: Final = ("ada", "bob", "cyd")
ERASED: Final = "eve"
OFTEN: Final = 50
"""After so many events comes a checkpoint, so that each session has several."""


class TrustingView:
    """A view that believes the facts which it first saw with a hash: so the chain no longer covers them."""

    def __init__(self, view: StoreView, seen: dict[bytes, bytes]) -> None:
        self._view = view
        self._seen = seen

    def ask(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return self._view.ask(name, params)

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        """Pass a question on; if it is for events, answer with the facts of the first time."""
        rows = self._view.rows(name, params)
        return [self._believed(row) for row in rows] if name == "events_of" else rows

    def get(self, digest: Digest) -> bytes | None:
        return self._view.get(digest)

    def flaws(self) -> Sequence[str]:
        return self._view.flaws()

    def close(self) -> None:
        self._view.close()

    def _believed(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        entry = EventEntry(*row[: len(EventEntry._fields)])
        facts = self._seen.setdefault(entry.hash, entry.facts)
        return (*entry._replace(facts=facts), *row[len(EventEntry._fields) :])


@dataclass(frozen=True, slots=True)
class StoreExaminer:
    """Examines one store against its checkpoints; with teeth, in a way that trusts too much."""

    store: JournalStore
    folder: Path
    keys: frozenset[str]
    teeth: bool
    seen: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    async def report(self) -> IntegrityReport:
        return await self.store.study(self._examined)

    def _examined(self, view: StoreView) -> IntegrityReport:
        return examine(TrustingView(view, self.seen) if self.teeth else view, self.folder, self.keys)


def run(setting: Setting) -> DrillResult:
    with own_store(in_memory(setting)) as ground, closing(connection(ground.url)) as database:
        return asyncio.run(_run(setting, ground, Hand(database, ground.kind)))


async def _run(setting: Setting, ground: Ground, hand: Hand) -> DrillResult:
    clock = SystemClock()
    folder, key = ground.folder / "checkpoints", ground.folder / "signing.key"
    folder.mkdir()
    real = engine(ground.url, clock, LEASE_DURATION)
    checkpointer = Checkpointer(folder, key, store_id(real), clock.now, every_events=OFTEN)
    store = JournalStore(real, observers=(checkpointer,))
    try:
        erased = await fill(store, clock, hand)
        checkpointer.flush()
        streams = [session_stream(session) for session in SESSIONS]
        scene = TamperScene(hand, streams, checkpoint_file(folder, store_id(real)), erased)
        examiner = StoreExaminer(store, folder, read_public_keys(public_key_path(key)), setting.teeth)
        return await _tried(setting, ground, scene, examiner)
    finally:
        await store.close()


def store_id(real: Engine) -> str:
    return next(row["value"] for row in real.ask("meta", {}) if row["name"] == "store")


async def fill(store: JournalStore, clock: Clock, hand: Hand) -> list[EventEntry]:
    """Run the sessions, erase one of them by rights, and return what was erased."""
    for session in (*SESSIONS, ERASED):
        await Workload(store, clock, "worker", session).run()
    entries = hand.entries(session_stream(ERASED))
    await erase_session_bodies(store, [ERASED], by="the drill")
    hand.save()
    return [entry for entry in entries if entry.body is not None]


async def _tried(setting: Setting, ground: Ground, scene: TamperScene, examiner: StoreExaminer) -> DrillResult:
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


def clean(report: IntegrityReport, scene: TamperScene) -> list[str]:
    """Check that nothing is found where nothing was done, and that what was erased by rights is called so."""
    wrong = [f"Nobody had touched the store, and yet: {found.sentence}" for found in report.findings]
    missing = scene.hand.rows("SELECT COUNT(*) FROM events WHERE body IS NULL AND salt IS NULL AND digest <> ?", b"")
    if report.erased != missing[0][0]:
        wrong.append(f"{missing[0][0]} bodies were erased by rights, and {report.erased} are told as erased.")
    return wrong


async def _case(seed: int, tampering: Tampering, scene: TamperScene, examiner: StoreExaminer) -> list[str]:
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


def judge(trace: ExpectedFinding, report: IntegrityReport) -> list[str]:
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

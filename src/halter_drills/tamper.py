"""Verification finds any change made outside Halter, names its kind, and reports no other stream.

The drill fills a store with sessions and signed checkpoints, and erases one session legitimately. Then it makes each
change that an attacker with the database password can make, one at a time, and undoes it.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from halter.core.clock import Clock, SystemClock
from halter.core.ids import session_stream
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
from halter.journal.engine import StoreView
from halter.journal.rebuild import FindingKind, IntegrityReport
from halter.journal.retention import erase_session_bodies
from halter.journal.sqlite import LEASE_DURATION
from halter.journal.store import JournalStore
from halter.journal.verify import examine
from halter_drills.drill import (
    Drill,
    DrillResult,
    Setting,
    Workspace,
    connection,
    engine,
    own_store,
    result,
    use_memory_file,
)
from halter_drills.faults import Delegating, EventEntry, Hand
from halter_drills.workload import Workload

FORGER: Final = "mallory"


class TamperScene(msgspec.Struct, frozen=True):
    """The objects to tamper with: a store, its checkpoints, and copies of erased events."""

    hand: Hand
    streams: Sequence[str]
    """The streams of sessions whose bodies are not erased."""
    checkpoints: Path
    erased: Sequence[EventEntry]
    """Events from before the erasure of their bodies."""


class ExpectedFinding(msgspec.Struct, frozen=True):
    """One of these kinds must be found; only these streams or tables may be reported."""

    kinds: frozenset[FindingKind]
    streams: frozenset[str]


class Tampering(NamedTuple):
    """One change by an attacker to a store or its checkpoints."""

    words: str
    do: Callable[[TamperScene, random.Random], ExpectedFinding]


def trace(kind: FindingKind, *streams: str) -> ExpectedFinding:
    return ExpectedFinding(frozenset((kind,)), frozenset(streams))


def choose_event(scene: TamperScene, rng: random.Random) -> tuple[str, list[EventEntry], EventEntry]:
    """Choose a stream, and an event that has others before and after it."""
    stream = rng.choice(scene.streams)
    entries = scene.hand.entries(stream)
    return stream, entries, rng.choice(entries[1:-1])


def edit(words: str, change: Callable[[EventEntry, random.Random], Mapping[str, Any]]) -> Tampering:
    """Change columns of one event."""

    def do(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
        stream, _, entry = choose_event(scene, rng)
        scene.hand.change(entry, **change(entry, rng))
        return trace("edited", stream)

    return Tampering(words, do)


def edit_body(words: str, kind: FindingKind, **columns: bytes | None) -> Tampering:
    def do(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
        stream = rng.choice(scene.streams)
        entry = rng.choice([entry for entry in scene.hand.entries(stream) if entry.body is not None])
        scene.hand.change(entry, **columns)
        return trace(kind, stream)

    return Tampering(words, do)


def rearrange(
    words: str, kind: FindingKind, change: Callable[[Hand, list[EventEntry], EventEntry], object], *, head: bool = True
) -> Tampering:
    """Add, remove or renumber events of one stream, and make its head fit."""

    def do(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
        stream, entries, entry = choose_event(scene, rng)
        change(scene.hand, entries, entry)
        if head:
            scene.hand.set_head(stream)
        return trace(kind, stream)

    return Tampering(words, do)


def alter_blob(words: str, kind: FindingKind, statement: str, *values: bytes) -> Tampering:
    """Change a document that events refer to."""

    def do(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
        references = scene.hand.rows("SELECT blob, stream FROM events WHERE blob IS NOT NULL ORDER BY blob, stream")
        blob = rng.choice(sorted({row[0] for row in references}))
        scene.hand.do(statement, *values, blob)
        return trace(kind, *(stream for name, stream in references if name == blob))

    return Tampering(words, do)


def alter_row(words: str, table: str, keys: str, statement: str) -> Tampering:
    """Change one row of a projected table."""

    def do(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
        scene.hand.do(statement, *rng.choice(scene.hand.rows(keys)))
        return trace("row", table)

    return Tampering(words, do)


def alter_checkpoints(words: str, change: Callable[[list[bytes], random.Random], object]) -> Tampering:
    def do(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
        lines = scene.checkpoints.read_bytes().splitlines(keepends=True)
        change(lines, rng)
        scene.checkpoints.write_bytes(b"".join(lines))
        return trace("checkpoint_altered", "")

    return Tampering(words, do)


def flip_byte(entry: EventEntry, rng: random.Random) -> Mapping[str, Any]:
    index = rng.randrange(len(entry.facts))
    changed_facts = entry.facts[:index] + bytes([entry.facts[index] ^ 1]) + entry.facts[index + 1 :]
    return {"facts": rng.choice((changed_facts, entry.facts + b" "))}


def delete_with_head(editor: Hand, _: list[EventEntry], entry: EventEntry) -> None:
    editor.remove(entry)
    editor.do("DELETE FROM streams WHERE stream = ?", entry.stream)


def delete_and_renumber(editor: Hand, _: list[EventEntry], entry: EventEntry) -> None:
    editor.remove(entry)
    editor.renumber(entry.stream, entry.seq, -1)


def duplicate_in_place(editor: Hand, _: list[EventEntry], entry: EventEntry) -> None:
    editor.renumber(entry.stream, entry.seq, 1)
    editor.add(entry._replace(seq=entry.seq + 1))


def cut_tail(editor: Hand, entries: list[EventEntry], entry: EventEntry) -> None:
    for after in entries[entry.seq :]:
        editor.remove(after)


def rewrite(editor: Hand, entries: list[EventEntry], entry: EventEntry) -> None:
    """Change an event, and recompute the chain from there to the head."""
    previous = entries[entry.seq - 2].hash if entry.seq > 1 else CHAIN_START
    for old in (entry._replace(facts=entry.facts + b" "), *entries[entry.seq :]):
        header = (old.stream, old.seq, old.kind, old.version, old.at, old.generation, old.key, old.blob)
        previous = hash_event(previous, header, old.facts, old.digest)
        editor.change(old, facts=old.facts, hash=previous)


def exchange_events(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
    stream, entries, _ = choose_event(scene, rng)
    first, second = rng.sample(entries[:-1], 2)
    for entry in (first, second):
        scene.hand.remove(entry)
    scene.hand.add(first._replace(seq=second.seq))
    scene.hand.add(second._replace(seq=first.seq))
    return trace("reordered", stream)


def swap_streams(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
    first, second = rng.sample(list(scene.streams), 2)
    for old, new in ((first, FORGER), (second, first), (FORGER, second)):
        scene.hand.do("UPDATE events SET stream = ? WHERE stream = ?", new, old)
        scene.hand.do("UPDATE streams SET stream = ? WHERE stream = ?", new, old)
    return ExpectedFinding(frozenset(("moved", "rewritten")), frozenset((first, second)))


def move(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
    source, target = rng.sample(list(scene.streams), 2)
    entry = rng.choice(scene.hand.entries(source)[1:-1])
    scene.hand.remove(entry)
    scene.hand.add(entry._replace(stream=target, seq=scene.hand.entries(target)[-1].seq + 1))
    scene.hand.set_head(target)
    return trace("moved", source, target)


def drop_stream(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
    stream = rng.choice(scene.streams)
    for table, column in (("events", "stream"), ("streams", "stream"), ("budgets", "scope")):
        scene.hand.do(f"DELETE FROM {table} WHERE {column} = ?", stream)  # noqa: S608  names are constants
    for table in ("sessions", "holds", "spends"):
        delete = f"DELETE FROM {table} WHERE session = ?"  # noqa: S608  names are constants
        scene.hand.do(delete, stream.removeprefix("session:"))
    return trace("dropped", stream)


def restore_body(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
    entry = rng.choice(scene.erased)
    scene.hand.change(entry, body=entry.body, salt=entry.salt)
    return trace("not_erased", entry.stream)


def edit_session(scene: TamperScene, rng: random.Random) -> ExpectedFinding:
    session = rng.choice(scene.streams).removeprefix("session:")
    scene.hand.do("UPDATE sessions SET terminal_reason = ? WHERE session = ?", "external_halt", session)
    return trace("row", "sessions")


def edit_checkpoint(lines: list[bytes], rng: random.Random) -> None:
    number = rng.randrange(len(lines))
    index = rng.choice([index for index, byte in enumerate(lines[number]) if chr(byte) in "0123456789abcdef"])
    digit = b"1" if lines[number][index : index + 1] != b"1" else b"2"
    lines[number] = lines[number][:index] + digit + lines[number][index + 1 :]


def remove_checkpoints(scene: TamperScene, _: random.Random) -> ExpectedFinding:
    scene.checkpoints.unlink()
    return trace("checkpoint_missing", "")


def forge_checkpoints(scene: TamperScene, _: random.Random) -> ExpectedFinding:
    key = load_signing_key(scene.checkpoints.with_name(FORGER))
    previous, lines = NO_PREVIOUS_LINE, list[bytes]()
    for line in scene.checkpoints.read_bytes().splitlines():
        checkpoint = msgspec.json.decode(line, type=Checkpoint)
        unsigned = msgspec.structs.replace(checkpoint, previous=previous, key=key.public)
        lines.append(msgspec.structs.replace(unsigned, signature=key.sign(unsigned.signed_bytes())).line())
        previous = digest_line(lines[-1])
    scene.checkpoints.write_bytes(b"".join(line + b"\n" for line in lines))
    return trace("checkpoint_key", "")


TAMPERINGS: Final = (
    edit("Change one byte of the facts, or their formatting", flip_byte),
    edit("Make an event a little later", lambda entry, _: {"at": entry.at + 1}),
    edit("Change the owner of an event", lambda entry, _: {"generation": entry.generation + 1}),
    edit("Change the kind of an event", lambda _, __: {"kind": "bodies_erased"}),
    edit("Change the write that an event belongs to", lambda entry, _: {"key": f"{entry.key}/{FORGER}"}),
    edit_body("Change a body", "edited", body=b"I never said that."),
    edit_body("Remove a body, as if it had been erased", "body_missing", body=None, salt=None),
    Tampering("Restore an erased body from an old copy", restore_body),
    rearrange("Remove an event", "deleted", lambda hand, _, entry: hand.remove(entry), head=False),
    rearrange("Remove an event and the head of its stream", "deleted", delete_with_head, head=False),
    rearrange("Remove an event and close the gap", "deleted", delete_and_renumber),
    Tampering("Exchange two events", exchange_events),
    rearrange(
        "Repeat an event at the end of its stream",
        "duplicated",
        lambda hand, entries, entry: hand.add(entry._replace(seq=entries[-1].seq + 1)),
    ),
    rearrange("Repeat an event right after itself", "duplicated", duplicate_in_place),
    rearrange("Cut off the end of a stream", "cut", cut_tail),
    rearrange("Change an event and recompute the chain", "rewritten", rewrite),
    Tampering("Exchange the histories of two sessions", swap_streams),
    Tampering("Move an event to the end of another stream", move),
    Tampering("Remove a stream with all its rows", drop_stream),
    alter_blob("Change a document", "blob_altered", "UPDATE blobs SET data = ? WHERE digest = ?", b"another document"),
    alter_blob("Remove a document", "blob_missing", "DELETE FROM blobs WHERE digest = ?"),
    alter_row(
        "Lower the spending of an account",
        "budgets",
        'SELECT scope, "window", unit FROM budgets WHERE spent > 0 ORDER BY scope, "window", unit',
        'UPDATE budgets SET spent = spent - 1 WHERE scope = ? AND "window" = ? AND unit = ?',
    ),
    alter_row("Remove a cost", "spends", "SELECT hold FROM spends ORDER BY hold", "DELETE FROM spends WHERE hold = ?"),
    Tampering("Change how a session ended", edit_session),
    alter_checkpoints("Change a hash in a checkpoint", edit_checkpoint),
    alter_checkpoints("Remove a checkpoint", lambda lines, rng: lines.pop(rng.randrange(len(lines) - 1))),
    Tampering("Sign all checkpoints again with another key", forge_checkpoints),
    Tampering("Remove all checkpoints", remove_checkpoints),
)

SEEDS: Final = 4
SESSIONS: Final = ("ada", "bob", "cyd")
ERASED: Final = "eve"
OFTEN: Final = 50
"""Events between two checkpoints, so that each session has several."""


class TrustingView(Delegating):
    """The teeth: a view that returns the first facts it read with a hash, so the chain does not cover them."""

    def __init__(self, view: StoreView, facts_by_hash: dict[bytes, bytes]) -> None:
        super().__init__(view)
        self._facts_by_hash = facts_by_hash

    def rows(self, name: str, params: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        rows = self.real.rows(name, params)
        return [self._trust_row(row) for row in rows] if name == "events_of" else rows

    def _trust_row(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        entry = EventEntry(*row[: len(EventEntry._fields)])
        facts = self._facts_by_hash.setdefault(entry.hash, entry.facts)
        return (*entry._replace(facts=facts), *row[len(EventEntry._fields) :])


@dataclass(frozen=True, slots=True)
class StoreExaminer:
    """Verifies one store against its checkpoints; with teeth, through a `TrustingView`."""

    store: JournalStore
    folder: Path
    keys: frozenset[str]
    teeth: bool
    facts_by_hash: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    async def report(self) -> IntegrityReport:
        def examine_view(view: StoreView) -> IntegrityReport:
            view = cast("StoreView", TrustingView(view, self.facts_by_hash)) if self.teeth else view
            return examine(view, self.folder, self.keys)

        return await self.store.study(examine_view)


def run(setting: Setting) -> DrillResult:
    with own_store(use_memory_file(setting)) as workspace, closing(connection(workspace.url)) as database:
        return asyncio.run(_run(setting, workspace, Hand(database, workspace.kind)))


async def _run(setting: Setting, workspace: Workspace, editor: Hand) -> DrillResult:
    clock = SystemClock()
    folder, key = workspace.folder / "checkpoints", workspace.folder / "signing.key"
    folder.mkdir()
    real_engine = engine(workspace.url, clock, LEASE_DURATION)
    store_id = next(row["value"] for row in real_engine.ask("meta", {}) if row["name"] == "store")
    checkpointer = Checkpointer(folder, key, store_id, clock.now, events_per_checkpoint=OFTEN)
    store = JournalStore(real_engine, observers=(checkpointer,))
    try:
        erased_events = await fill(store, clock, editor)
        checkpointer.flush()
        streams = [session_stream(session) for session in SESSIONS]
        scene = TamperScene(editor, streams, checkpoint_file(folder, store_id), erased_events)
        examiner = StoreExaminer(store, folder, read_public_keys(public_key_path(key)), setting.teeth)
        return await _try_tampering(setting, workspace, scene, examiner)
    finally:
        await store.close()


async def fill(store: JournalStore, clock: Clock, editor: Hand) -> list[EventEntry]:
    """Run the sessions, erase one legitimately, and return the erased events."""
    for session in (*SESSIONS, ERASED):
        await Workload(store, clock, "worker", session).run()
    entries = editor.entries(session_stream(ERASED))
    await erase_session_bodies(store, [ERASED], by="the drill")
    editor.save()
    return [entry for entry in entries if entry.body is not None]


async def _try_tampering(
    setting: Setting, workspace: Workspace, scene: TamperScene, examiner: StoreExaminer
) -> DrillResult:
    untouched_report = await examiner.report()
    wrong = clean(untouched_report, scene)
    seeds = setting.seeds or SEEDS
    total = seeds * len(TAMPERINGS)
    for number, (seed, tampering) in enumerate(product(range(1, seeds + 1), TAMPERINGS), 1):
        wrong += await _case(seed, tampering, scene, examiner)
        setting.progress(number, total, tampering.words)
    counts = {
        "kinds_of_tampering": len(TAMPERINGS),
        "events": untouched_report.events,
        "erased_bodies": untouched_report.erased,
        "checkpoints": untouched_report.checkpoints,
        "uncovered_events": untouched_report.uncovered_events,
    }
    return result("tamper", workspace.kind, total, wrong, counts)


def clean(report: IntegrityReport, scene: TamperScene) -> list[str]:
    """Check that an untouched store is clean, and that legitimate erasures are counted as such."""
    wrong = [f"The store was not changed, but verification reports: {finding.sentence}" for finding in report.findings]
    missing = scene.hand.rows("SELECT COUNT(*) FROM events WHERE body IS NULL AND salt IS NULL AND digest <> ?", b"")
    if report.erased != missing[0][0]:
        wrong.append(f"{missing[0][0]} bodies were erased legitimately, but {report.erased} are reported as erased.")
    return wrong


async def _case(seed: int, tampering: Tampering, scene: TamperScene, examiner: StoreExaminer) -> list[str]:
    checkpoints = scene.checkpoints.read_bytes()
    with scene.hand.hold_transaction():
        expected_finding = tampering.do(scene, random.Random(f"{seed}/{tampering.words}"))
    report = await examiner.report()
    scene.hand.restore()
    scene.checkpoints.write_bytes(checkpoints)
    after = await examiner.report()
    wrong = judge(expected_finding, report)
    wrong += [f"was undone, but verification reports: {finding.sentence}" for finding in after.findings]
    return [f"“{tampering.words}” (seed {seed}) {violation}" for violation in wrong]


def judge(expected_finding: ExpectedFinding, report: IntegrityReport) -> list[str]:
    kinds = {finding.kind for finding in report.findings}
    if not kinds:
        return ["was not found."]
    wrong: list[str] = []
    if not kinds & expected_finding.kinds:
        wrong.append(
            f"was reported as {', '.join(sorted(kinds))} instead of {', '.join(sorted(expected_finding.kinds))}."
        )
    others = {finding.stream for finding in report.findings} - expected_finding.streams
    if others:
        wrong.append(f"was also reported for {', '.join(sorted(others))}.")
    return wrong


DRILL: Final = Drill("tamper", "Any change made outside Halter is found and named.", run)

"""All the ways to tamper with a store that the drill knows: what is done, and what an examination must say of it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from halter.journal.chain import START, link
from halter.journal.checkpoints import FIRST, Checkpoint, line_digest
from halter.journal.keys import signing_key
from halter.journal.report import Kind
from halter_drills.hand import Entry, Hand

FORGER: Final = "mallory"


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to tamper with: a store, its checkpoints, and some copies from earlier."""

    hand: Hand
    streams: Sequence[str]
    """The streams of sessions whose bodies are still there."""
    checkpoints: Path
    erased: Sequence[Entry]
    """Events whose bodies have been erased since, as they were before."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What must be named: one of these kinds; and what may be named: these streams, or tables, and no others."""

    kinds: frozenset[Kind]
    streams: frozenset[str]


Tampering = Callable[[Scene, random.Random], Trace]


def trace(kind: Kind, *streams: str) -> Trace:
    """Expect one kind of finding, in these streams."""
    return Trace(frozenset((kind,)), frozenset(streams))


def chosen(scene: Scene, chance: random.Random) -> tuple[str, list[Entry], Entry]:
    """Choose a stream, and an event that has others before and after it."""
    stream = chance.choice(scene.streams)
    entries = scene.hand.entries(stream)
    return stream, entries, chance.choice(entries[1:-1])


def edit_facts(scene: Scene, chance: random.Random) -> Trace:
    """Change one byte of the facts; or only their looks."""
    stream, _, entry = chosen(scene, chance)
    place = chance.randrange(len(entry.facts))
    flipped = entry.facts[:place] + bytes([entry.facts[place] ^ 1]) + entry.facts[place + 1 :]
    scene.hand.change(entry, facts=chance.choice((flipped, entry.facts + b" ")))
    return trace("edited", stream)


def edit_body(scene: Scene, chance: random.Random) -> Trace:
    """Put other words into somebody's mouth."""
    stream = chance.choice(scene.streams)
    entry = chance.choice([entry for entry in scene.hand.entries(stream) if entry.body is not None])
    scene.hand.change(entry, body=b"I never said that.")
    return trace("edited", stream)


def edit_time(scene: Scene, chance: random.Random) -> Trace:
    """Let something have happened a little later."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.change(entry, at=entry.at + 1)
    return trace("edited", stream)


def edit_generation(scene: Scene, chance: random.Random) -> Trace:
    """Let another owner have done it."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.change(entry, generation=entry.generation + 1)
    return trace("edited", stream)


def edit_kind(scene: Scene, chance: random.Random) -> Trace:
    """Make an event one of another kind."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.change(entry, kind="bodies_erased")
    return trace("edited", stream)


def edit_key(scene: Scene, chance: random.Random) -> Trace:
    """Let an event belong to another write."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.change(entry, key=f"{entry.key}/{FORGER}")
    return trace("edited", stream)


def delete(scene: Scene, chance: random.Random) -> Trace:
    """Remove an event."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.remove(entry)
    return trace("deleted", stream)


def delete_with_head(scene: Scene, chance: random.Random) -> Trace:
    """Remove an event and the head of its stream."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.remove(entry)
    scene.hand.do("DELETE FROM streams WHERE stream = ?", stream)
    return trace("deleted", stream)


def delete_and_renumber(scene: Scene, chance: random.Random) -> Trace:
    """Remove an event, and close the gap."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.remove(entry)
    scene.hand.renumber(stream, entry.seq, -1)
    scene.hand.set_head(stream)
    return trace("deleted", stream)


def reorder(scene: Scene, chance: random.Random) -> Trace:
    """Let two events change places."""
    stream, entries, _ = chosen(scene, chance)
    first, second = chance.sample(entries[:-1], 2)
    for entry in (first, second):
        scene.hand.remove(entry)
    scene.hand.add(first._replace(seq=second.seq))
    scene.hand.add(second._replace(seq=first.seq))
    return trace("reordered", stream)


def duplicate(scene: Scene, chance: random.Random) -> Trace:
    """Repeat an event at the end of its stream."""
    stream, entries, entry = chosen(scene, chance)
    scene.hand.add(entry._replace(seq=entries[-1].seq + 1))
    scene.hand.set_head(stream)
    return trace("duplicated", stream)


def duplicate_in_place(scene: Scene, chance: random.Random) -> Trace:
    """Repeat an event right after itself, and make room for it."""
    stream, _, entry = chosen(scene, chance)
    scene.hand.renumber(stream, entry.seq, 1)
    scene.hand.add(entry._replace(seq=entry.seq + 1))
    scene.hand.set_head(stream)
    return trace("duplicated", stream)


def swap_streams(scene: Scene, chance: random.Random) -> Trace:
    """Let two sessions change their histories, with their heads."""
    one, other = chance.sample(list(scene.streams), 2)
    for old, new in ((one, FORGER), (other, one), (FORGER, other)):
        scene.hand.do("UPDATE events SET stream = ? WHERE stream = ?", new, old)
        scene.hand.do("UPDATE streams SET stream = ? WHERE stream = ?", new, old)
    return Trace(frozenset(("moved", "rewritten")), frozenset((one, other)))


def move(scene: Scene, chance: random.Random) -> Trace:
    """Take an event out of one stream and put it at the end of another."""
    one, other = chance.sample(list(scene.streams), 2)
    entry = chance.choice(scene.hand.entries(one)[1:-1])
    scene.hand.remove(entry)
    scene.hand.add(entry._replace(stream=other, seq=scene.hand.entries(other)[-1].seq + 1))
    scene.hand.set_head(other)
    return trace("moved", one, other)


def cut_tail(scene: Scene, chance: random.Random) -> Trace:
    """Cut off the end of a stream, and make its head fit."""
    stream, entries, entry = chosen(scene, chance)
    for after in entries[entry.seq :]:
        scene.hand.remove(after)
    scene.hand.set_head(stream)
    return trace("cut", stream)


def drop_stream(scene: Scene, chance: random.Random) -> Trace:
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


def rewrite(scene: Scene, chance: random.Random) -> Trace:
    """Change an event, and work out the chain anew from there to the head."""
    stream, entries, entry = chosen(scene, chance)
    previous = entries[entry.seq - 2].hash if entry.seq > 1 else START
    changed = entry._replace(facts=entry.facts + b" ")
    for old in (changed, *entries[entry.seq :]):
        header = (old.stream, old.seq, old.kind, old.version, old.at, old.generation, old.key, old.blob)
        previous = link(previous, header, old.facts, old.digest)
        scene.hand.change(old, facts=old.facts, hash=previous)
    scene.hand.set_head(stream)
    return trace("rewritten", stream)


def remove_body(scene: Scene, chance: random.Random) -> Trace:
    """Let what was said disappear as if it had been erased."""
    stream = chance.choice(scene.streams)
    entry = chance.choice([entry for entry in scene.hand.entries(stream) if entry.body is not None])
    scene.hand.change(entry, body=None, salt=None)
    return trace("body_missing", stream)


def put_body_back(scene: Scene, chance: random.Random) -> Trace:
    """Take what was erased from an old copy and put it back."""
    entry = chance.choice(scene.erased)
    scene.hand.change(entry, body=entry.body, salt=entry.salt)
    return trace("not_erased", entry.stream)


def alter_blob(scene: Scene, chance: random.Random) -> Trace:
    """Change a document that events name."""
    blob, streams = _blob(scene, chance)
    scene.hand.do("UPDATE blobs SET data = ? WHERE digest = ?", b"another document", blob)
    return trace("blob_altered", *streams)


def remove_blob(scene: Scene, chance: random.Random) -> Trace:
    """Remove a document that events name."""
    blob, streams = _blob(scene, chance)
    scene.hand.do("DELETE FROM blobs WHERE digest = ?", blob)
    return trace("blob_missing", *streams)


def _blob(scene: Scene, chance: random.Random) -> tuple[str, list[str]]:
    named = scene.hand.rows("SELECT blob, stream FROM events WHERE blob IS NOT NULL ORDER BY blob, stream")
    blob = chance.choice(sorted({row[0] for row in named}))
    return blob, [stream for name, stream in named if name == blob]


def edit_budget(scene: Scene, chance: random.Random) -> Trace:
    """Make somebody look as if they had spent less."""
    rows = scene.hand.rows('SELECT scope, "window", unit FROM budgets WHERE spent > 0 ORDER BY scope, "window", unit')
    scene.hand.do(
        'UPDATE budgets SET spent = spent - 1 WHERE scope = ? AND "window" = ? AND unit = ?', *chance.choice(rows)
    )
    return trace("row", "budgets")


def edit_session(scene: Scene, chance: random.Random) -> Trace:
    """Make a session look as if it had ended otherwise."""
    session = chance.choice(scene.streams).removeprefix("session:")
    scene.hand.do("UPDATE sessions SET terminal_reason = ? WHERE session = ?", "external_halt", session)
    return trace("row", "sessions")


def remove_spend(scene: Scene, chance: random.Random) -> Trace:
    """Remove a cost from the log of costs."""
    rows = scene.hand.rows("SELECT hold FROM spends ORDER BY hold")
    scene.hand.do("DELETE FROM spends WHERE hold = ?", *chance.choice(rows))
    return trace("row", "spends")


def edit_checkpoint(scene: Scene, chance: random.Random) -> Trace:
    """Let a checkpoint vouch for another hash."""
    lines = scene.checkpoints.read_bytes().splitlines(keepends=True)
    number = chance.randrange(len(lines))
    place = chance.choice([place for place, byte in enumerate(lines[number]) if chr(byte) in "0123456789abcdef"])
    changed = b"1" if lines[number][place : place + 1] != b"1" else b"2"
    lines[number] = lines[number][:place] + changed + lines[number][place + 1 :]
    scene.checkpoints.write_bytes(b"".join(lines))
    return trace("checkpoint_altered", "")


def cut_checkpoints(scene: Scene, chance: random.Random) -> Trace:
    """Take a checkpoint out of the file."""
    lines = scene.checkpoints.read_bytes().splitlines(keepends=True)
    del lines[chance.randrange(len(lines) - 1)]
    scene.checkpoints.write_bytes(b"".join(lines))
    return trace("checkpoint_altered", "")


def remove_checkpoints(scene: Scene, _: random.Random) -> Trace:
    """Remove the file with all checkpoints."""
    scene.checkpoints.unlink()
    return trace("checkpoint_missing", "")


def forge_checkpoints(scene: Scene, _: random.Random) -> Trace:
    """Sign all checkpoints anew, with a key of one's own."""
    key = signing_key(scene.checkpoints.with_name(FORGER))
    previous, lines = FIRST, list[bytes]()
    for line in scene.checkpoints.read_bytes().splitlines():
        written = msgspec.json.decode(line, type=Checkpoint)
        unsigned = msgspec.structs.replace(written, previous=previous, key=key.public)
        lines.append(msgspec.structs.replace(unsigned, signature=key.sign(unsigned.signed_bytes())).line())
        previous = line_digest(lines[-1])
    scene.checkpoints.write_bytes(b"".join(line + b"\n" for line in lines))
    return trace("checkpoint_key", "")


TAMPERINGS: Final[tuple[Tampering, ...]] = (
    edit_facts,
    edit_body,
    edit_time,
    edit_generation,
    edit_kind,
    edit_key,
    delete,
    delete_with_head,
    delete_and_renumber,
    reorder,
    duplicate,
    duplicate_in_place,
    swap_streams,
    move,
    cut_tail,
    drop_stream,
    rewrite,
    remove_body,
    put_body_back,
    alter_blob,
    remove_blob,
    edit_budget,
    edit_session,
    remove_spend,
    edit_checkpoint,
    cut_checkpoints,
    forge_checkpoints,
    remove_checkpoints,
)

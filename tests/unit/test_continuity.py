"""A store that lacks what its checkpoints know is doubted, and no other one is."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halter.core.clock import SECOND
from halter.core.events import CallSettled, DecisionMade, HaltRequested, StoreAccepted
from halter.core.ids import FLEET
from halter.core.money import Charge
from halter.core.ports import Stored
from halter.journal.checkpoint_log import read_checkpoint_log
from halter.journal.checkpoints import Checkpointer, CheckpointIo, checkpoint_file, load_signing_key
from halter.journal.open import FITTING_CHECKPOINTS, AcceptancePending, Continuity, OlderCopy, format_store_location
from tests.unit.conftest import event as made

STORE = "store"
STREAMS = ("fleet", "session:a", "session:b")


class History:
    """A store as a list of events in the order of their commits, its checkpoints, and copies of it."""

    def __init__(self, root: Path) -> None:
        self.events: list[Stored] = []
        self.known: int = 0
        self.folder = root / "checkpoints"
        self.folder.mkdir()
        self.key = root / "key"
        self.place = str(root / "halter.db")
        self.now = SECOND

    def process(self, key: Path | None = None) -> Checkpointer:
        quick = CheckpointIo(sync=lambda _: None)
        return Checkpointer(
            self.folder, key or self.key, STORE, lambda: self.now, events_per_checkpoint=10**6, machine=quick
        )

    def commits(self, stream: str, result: Any = None, salt: int = 0) -> Stored:
        """Commit an event; with another salt it is another event."""
        self.now += SECOND
        seq = 1 + sum(event.stream == stream for event in self.events)
        stored = made(stream, seq, result.KIND if result else "call_settled")
        digest = bytes([seq % 256, salt]) + stream.encode().ljust(30)[:30]
        stored = msgspec.structs.replace(stored, at=self.now, hash=digest, event=result or stored.event)
        self.events.append(stored)
        return stored

    def copy(self, length: int) -> list[Stored]:
        return self.events[:length]

    def continuity(self) -> Continuity:
        return Continuity(self.folder, self.place)

    def look(self, store: list[Stored] | None = None) -> OlderCopy | AcceptancePending | None:
        return self.continuity().check(make_asking(self.events if store is None else store), STORE)


class Asking:
    """Answers the named queries that a comparison asks, from a list of events, and counts them."""

    def __init__(self, events: Sequence[Stored]) -> None:
        self.events = events
        self.asked = 0

    def __call__(self, name: str, params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        self.asked += 1
        mine = [event for event in self.events if event.stream == params.get("stream", event.stream)]
        heads = {event.stream: {"stream": event.stream, "head": event.seq, "at": event.at} for event in mine}
        match name:
            case "hash_of":
                return [{"hash": event.hash} for event in mine if event.seq == params["seq"]]
            case "head" | "heads":
                return list(heads.values())
            case "events_of_kind":
                return [{"at": event.at} for event in reversed(mine) if event.kind == params["kind"]][:1]
            case _:
                raise KeyError(name)


def make_asking(events: Sequence[Stored]) -> Asking:
    return Asking(events)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


FLUSH = "a checkpoint"
Steps = list[tuple[int, str]]
"""A process commits an event to a stream, or writes a checkpoint of what it committed, perhaps long ago."""
steps = st.lists(st.tuples(st.integers(0, 3), st.sampled_from((*STREAMS, FLUSH))), min_size=1, max_size=30).filter(
    lambda taken: any(what != FLUSH for _, what in taken)
)


def run_processes(history: History, taken: Steps) -> int:
    """Let processes commit and checkpoint; tell how many events a store must have that lacks none of those known."""
    processes: dict[int, Checkpointer] = {}
    last: dict[int, int] = {}
    text = 0
    for number, output in taken:
        first = number not in processes and output != FLUSH
        process = processes.setdefault(number, history.process()) if number in processes or first else None
        if process is None:
            continue
        if output == FLUSH:
            process.flush()
        else:
            process.on_commit([history.commits(output)])
            last[number] = len(history.events)
        if first or output == FLUSH:
            text = max(text, last[number])
    return text


@given(taken=steps)
@settings(max_examples=40, deadline=None)
def test_every_copy_older_than_a_checkpoint_is_doubted_and_no_later_one(taken: Steps) -> None:
    with tempfile.TemporaryDirectory() as root:
        history = History(Path(root))
        known = run_processes(history, taken)
        for length in range(len(history.events) + 1):
            outcome = history.look(history.copy(length))
            assert (outcome is not None) == (length < known)
            if isinstance(outcome, OlderCopy):
                assert outcome.kind == "older"
                assert 0 < outcome.events <= len(history.events) - length
                assert {gap.stream for gap in outcome.gaps} <= {event.stream for event in history.events[length:]}


@given(taken=steps, after=steps, data=st.data())
@settings(max_examples=25, deadline=None)
def test_an_accepted_copy_continues_and_verifies_and_a_still_older_one_is_doubted_again(
    taken: Steps, after: Steps, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as root:
        history = History(Path(root))
        known = run_processes(history, taken)
        length = data.draw(st.integers(0, known - 1))
        lost = history.events[length:]
        outcome = history.look(history.copy(length))
        assert isinstance(outcome, OlderCopy)
        del history.events[length:]
        person = history.process()
        accepted = history.commits(FLEET, StoreAccepted(by="ada", lacks="much"), salt=1)
        person.accept(outcome.matching_seq_by_stream)
        person.on_commit([accepted])
        assert history.look() is None
        for _, text in after:
            if text != FLUSH:
                person.on_commit([history.commits(text, salt=1)])
        person.flush()
        assert history.look() is None
        chronicle = read_checkpoint_log(history.folder, STORE)
        assert chronicle.findings == []
        whole = {(event.stream, event.seq): event.hash.hex() for event in history.events}
        for stream, claims in chronicle.claims.items():
            assert {(stream, seq): digest for seq, digest in claims.items()}.items() <= whole.items()
        assert isinstance(history.look(history.copy(length)), OlderCopy)
        assert isinstance(history.look([*history.copy(length), *lost]), OlderCopy)


def test_what_is_missing_is_said_in_words(history: History) -> None:
    process = history.process()
    history.now = 1_700_000_000 * SECOND
    process.on_commit([history.commits("session:a")])
    ends = len(history.events)
    process.on_commit([history.commits("session:a", CallSettled(call="c", outcome="ok", charge=Charge(usd=120_000)))])
    process.on_commit([history.commits("session:a", DecisionMade(decision="d", verdict="deny", by="ada", digest=""))])
    process.on_commit([history.commits("fleet", HaltRequested(scope="fleet", by="ada"))])
    result = history.look(history.copy(ends))
    assert isinstance(result, OlderCopy)
    assert result.sentence() == (
        f"The store {history.place} is older than its checkpoints: it ends at 2023-11-14 22:13:21 UTC, and 3 events "
        "until 2023-11-14 22:13:24 UTC are missing (1 of fleet, 2 of session:a). They include up to $0.12 of "
        "spending, 1 halt, 1 denial. Nothing runs on it until a person decides. Restore the newer store, or continue "
        "with this one without the missing events: halter store accept"
    )


def test_a_store_is_looked_at_in_a_few_reads_however_much_was_checkpointed(history: History) -> None:
    process = history.process()
    for number in range(3 * FITTING_CHECKPOINTS):
        process.on_commit([history.commits(f"session:{number % 7}"), history.commits("session:other")])
        process.flush()
    ask = make_asking(history.events)
    assert history.continuity().check(ask, STORE) is None
    assert ask.asked == FITTING_CHECKPOINTS


def test_lines_of_other_processes_that_know_nothing_later_hide_nothing(history: History) -> None:
    others = [history.process() for _ in range(60)]
    for number, process in enumerate(others):
        process.on_commit([history.commits(f"session:{number}")])
        process.on_commit([history.commits(f"session:{number}")])
    length = len(history.events)
    history.process().on_commit([history.commits("fleet")])
    for process in others:
        process.flush()
    assert isinstance(history.look(history.copy(length)), OlderCopy)
    assert history.look() is None


def test_a_checkpoint_of_an_earlier_version_is_compared_by_all_its_heads(history: History) -> None:
    process = history.process()
    process.on_commit([history.commits("session:a"), history.commits("fleet")])
    path, key = checkpoint_file(history.folder, STORE), load_signing_key(history.key)
    old = msgspec.json.decode(path.read_bytes())
    del old["last"]
    old["signature"] = ""
    old["signature"] = key.sign(b"halter.checkpoint.1\n" + msgspec.json.encode(old))
    path.write_bytes(msgspec.json.encode(old) + b"\n")
    assert read_checkpoint_log(history.folder, STORE).findings == []
    assert history.look() is None
    assert isinstance(history.look(history.copy(1)), OlderCopy)


def test_a_line_that_nobody_signed_raises_no_doubt_and_hides_none(history: History, tmp_path: Path) -> None:
    history.process().on_commit([history.commits("fleet"), history.commits("fleet")])
    trusted = {load_signing_key(history.key).public}
    forger = history.process(tmp_path / "forged")
    forger.accept({"fleet": 0})
    ahead = msgspec.structs.replace(history.events[-1], seq=9)
    forger.on_commit([ahead])
    forger.flush()
    continuity = Continuity(history.folder, history.place, trusted)
    assert continuity.check(make_asking(history.events), STORE) is None
    assert isinstance(continuity.check(make_asking(history.copy(1)), STORE), OlderCopy)


def test_what_was_accepted_on_another_machine_is_accepted_here(history: History) -> None:
    history.process().on_commit([history.commits("session:a"), history.commits("session:b")])
    del history.events[1:]
    assert isinstance(history.look(), OlderCopy)
    history.commits(FLEET, StoreAccepted(by="ada", lacks="much"))
    outcome = history.look()
    assert isinstance(outcome, AcceptancePending)
    assert outcome.accepted_seq_by_stream == {"session:b": 0}
    history.process().accept(outcome.accepted_seq_by_stream)
    assert history.look() is None


def test_an_acceptance_that_the_checkpoints_know_excuses_no_later_loss(history: History) -> None:
    process = history.process()
    process.on_commit([history.commits(FLEET, StoreAccepted(by="ada", lacks="much"))])
    process.on_commit([history.commits("session:a")])
    process.flush()
    assert isinstance(history.look(history.copy(1)), OlderCopy)


def test_a_store_that_is_gone_or_was_replaced_is_missed_where_it_was_used(history: History) -> None:
    continuity = history.continuity()
    assert continuity.find_missing_store() is None
    continuity.remember(STORE)
    assert continuity.find_missing_store() is None, "nothing of it was ever checkpointed"
    history.process().on_commit([history.commits("fleet")])
    missing_store = continuity.find_missing_store()
    assert missing_store is not None
    assert "is missing" in missing_store.sentence()
    replaced = continuity.check(make_asking([]), "another")
    assert isinstance(replaced, OlderCopy)
    assert "is not the one that was used here before" in replaced.sentence()
    assert Continuity(history.folder, "elsewhere").check(make_asking([]), "another") is None
    continuity.remember("another")
    assert continuity.check(make_asking([]), "another") is None


def list_spellings(folder: Path) -> Iterator[str]:
    yield str(folder / "a.db")
    yield f"sqlite://{folder / 'a.db'}"
    yield f"{folder}/./b/../a.db"


def test_a_place_has_one_name_and_no_password(tmp_path: Path) -> None:
    assert len({format_store_location(url) for url in list_spellings(tmp_path)}) == 1
    assert format_store_location("memory:") == ""
    text = format_store_location("postgresql://ada:secret@db.example:5432/fleet?connect_timeout=5")
    assert text == "postgresql://db.example:5432/fleet?schema=halter"
    assert text == format_store_location("postgresql://db.example/fleet")

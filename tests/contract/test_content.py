"""What every store promises of what is said: any text and any bytes are kept, and can be erased."""

import asyncio
import os
import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from halter.core.clock import DAY
from halter.core.errors import BlobMissing
from halter.core.events import BodiesErased, CallStarted, SessionStarted, Unknown, WakePosted
from halter.core.ids import FLEET, Digest, StreamId, inbox_stream, session_stream
from halter.core.ports import Committed, Draft, Query, Write
from halter.core.rows import SessionRow
from halter.core.text import decode_body, encode_body
from halter.journal.apply import SALT_BYTES
from halter.journal.salts import SALTS_DRAWN, draw_salts
from halter.journal.store import JournalStore
from halter.state import lifecycle

if TYPE_CHECKING:
    from conftest import Place

MEGABYTE = 1_000_000
ONE, TWO = session_stream("one"), session_stream("two")


def make_write(key: str, stream: StreamId = ONE, body: bytes | None = None, blob: Digest | None = None) -> Write:
    return Write(stream, key, lambda _: [Draft(CallStarted(call=key, tool="search"), body, blob)])


def make_erasure(stream: StreamId, through: int) -> Write:
    event = BodiesErased(stream=stream, through=through, by="a person")
    return Write(FLEET, f"erase {stream} {through}", lambda _: [Draft(event)])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        bytes(range(256)),
        encode_body("half a pair: \ud800, and a NUL: \x00"),
        b"[" * 10_000 + b"]" * 10_000,
        random.Random(7).randbytes(10 * MEGABYTE),
    ],
    ids=["empty", "NUL", "binary", "lone surrogate", "10,000 deep", "10 MB"],
)
async def test_any_body_is_kept_as_it_is(store: JournalStore, body: bytes) -> None:
    committed = await store.commit(make_write("key", body=body))
    assert committed.events[0].body == body
    assert (await store.read(ONE))[0].body == body


async def test_text_with_half_a_pair_comes_back_as_it_was(store: JournalStore) -> None:
    text = "before \udc00\x00 after"
    await store.commit(make_write("key", body=encode_body(text)))
    assert decode_body((await store.read(ONE))[0].body or b"") == text


async def test_hostile_characters_in_facts_are_replaced_and_never_stop_a_write(store: JournalStore) -> None:
    hostile = "night\x00watch\ud800"
    event = SessionStarted(session="one", agent=hostile, kind="task", started_by=hostile)
    committed = await store.commit(lifecycle.start_session(event))
    outcome = committed.events[0].event
    assert not isinstance(outcome, Unknown)
    assert (await store.read(ONE))[0].event == outcome
    (row,) = await store.ask(Query("session", SessionRow, {"session": "one"}))
    assert row.agent == "night␀watch�"


async def test_hostile_characters_in_a_key_still_make_repeats_harmless(store: JournalStore) -> None:
    first = await store.commit(make_write("key \x00 \ud800"))
    again = await store.commit(make_write("key \x00 \ud800"))
    assert (again.is_repeated, again.events) == (True, first.events)


async def test_hostile_characters_in_a_question_find_nothing(store: JournalStore) -> None:
    assert await store.read(StreamId("session:\x00\ud800")) == []
    assert await store.ask(Query("session", SessionRow, {"session": "\x00\ud800"})) == []


async def test_large_bodies_in_one_batch_are_all_kept(store: JournalStore) -> None:
    bodies = [os.urandom(MEGABYTE) for _ in range(8)]
    await asyncio.gather(*(store.commit(make_write(f"key {number}", body=body)) for number, body in enumerate(bodies)))
    assert {event.body for event in await store.read(ONE)} == set(bodies)


async def test_a_blob_is_found_by_its_digest(store: JournalStore) -> None:
    data = os.urandom(10 * MEGABYTE)
    digest = await store.put(data)
    assert await store.put(data) == digest
    assert await store.get(digest) == data
    assert await store.get(await store.put(b"")) == b""


async def test_a_blob_that_is_not_there_is_a_key_error(store: JournalStore) -> None:
    with pytest.raises(KeyError, match="no such digest"):
        await store.get(Digest("no such digest"))


async def test_many_events_of_one_write_keep_their_order_bodies_and_blobs(store: JournalStore) -> None:
    blob = await store.put(b"large")
    parts = [
        (b"first", None),
        (None, None),
        (b"", None),
        (None, blob),
        *((b"%d" % number, None) for number in range(36)),
    ]
    drafts = [Draft(CallStarted(call=f"call {at}", tool="search"), *part) for at, part in enumerate(parts)]
    committed = await store.commit(Write(ONE, "key", lambda _: drafts))
    assert [(event.body, event.blob) for event in committed.events] == parts
    assert await store.read(ONE) == list(committed.events)


async def test_a_write_that_is_repeated_does_not_answer_with_what_was_erased(store: JournalStore) -> None:
    await store.commit(make_write("key", body=b"secret"))
    await store.commit(make_erasure(ONE, 1))
    (event,) = (await store.commit(make_write("key", body=b"secret"))).events
    assert (event.body, event.salt) == (None, None)


async def test_erasing_takes_the_bodies_and_leaves_the_chain(store: JournalStore) -> None:
    for number in range(4):
        await store.commit(make_write(f"key {number}", body=b"secret"))
    before = await store.read(ONE)
    await store.commit(make_erasure(ONE, 3))
    after = await store.read(ONE)
    assert [event.body for event in after] == [None, None, None, b"secret"]
    assert [event.salt is None for event in after] == [True, True, True, False]
    assert [event.erased for event in after] == [True, True, True, False]
    assert [(event.hash, event.digest, event.facts) for event in after] == [
        (event.hash, event.digest, event.facts) for event in before
    ]
    (answer,) = (await store.commit(make_write("key 0", body=b"secret"))).events
    assert (answer.seq, answer.body) == (1, None)


async def test_erasing_drops_blobs_that_nothing_else_names(store: JournalStore) -> None:
    digest, shared, later = [await store.put(data) for data in (b"own", b"shared", b"later")]
    await store.commit(make_write("1", ONE, blob=digest))
    await store.commit(make_write("2", ONE, blob=shared))
    await store.commit(make_write("3", ONE, blob=later))
    await store.commit(make_write("4", TWO, blob=shared))
    await store.commit(make_erasure(ONE, 2))
    with pytest.raises(KeyError):
        await store.get(digest)
    assert (await store.get(shared), await store.get(later)) == (b"shared", b"later")


async def test_a_blob_goes_with_the_last_that_named_it(store: JournalStore) -> None:
    shared = await store.put(b"shared")
    await store.commit(make_write("1", ONE, blob=shared))
    await store.commit(make_write("2", TWO, blob=shared))
    await store.commit(make_erasure(ONE, 1))
    await store.commit(make_erasure(TWO, 1))
    with pytest.raises(KeyError):
        await store.get(shared)


async def test_a_definition_stays_when_somebody_who_read_it_is_erased(store: JournalStore) -> None:
    digest = await store.put(b"the definition")
    event = SessionStarted(session="two", agent="a", kind="task", started_by="me", definition=digest)
    await store.commit(lifecycle.start_session(event))
    await store.commit(make_write("1", ONE, blob=digest))
    await store.commit(make_erasure(ONE, 1))
    assert await store.get(digest) == b"the definition"


async def test_an_event_never_names_a_blob_that_is_not_there(store: JournalStore) -> None:
    """One that was put again just before it was erased, for example: then it must be put once more."""
    await store.commit(make_write("1", ONE, blob=await store.put(b"shared")))
    shared = await store.put(b"shared")
    await store.commit(make_erasure(ONE, 1))
    with pytest.raises(BlobMissing, match="Save the blob again, then repeat the write"):
        await store.commit(make_write("2", TWO, blob=shared))
    assert await store.read(TWO) == []
    assert await store.put(b"shared") == shared
    assert (await store.commit(make_write("2", TWO, blob=shared))).events[0].blob == shared


async def test_only_the_write_whose_blob_is_missing_fails(store: JournalStore) -> None:
    writes = [make_write("1"), make_write("2", blob=Digest("00" * 32)), make_write("3")]
    answers = await asyncio.gather(*map(store.commit, writes), return_exceptions=True)
    assert [type(answer) for answer in answers] == [Committed, BlobMissing, Committed]


async def test_blobs_that_nothing_names_go_after_a_day(clocked_place: "Place") -> None:
    store = clocked_place.open()
    named, definition, vain = [await store.put(data) for data in (b"named", b"definition", b"vain")]
    await store.commit(make_write("1", ONE, blob=named))
    event = SessionStarted(session="two", agent="a", kind="task", started_by="me", definition=definition)
    await store.commit(lifecycle.start_session(event))
    await clocked_place.clock.sleep(DAY)
    fresh = await store.put(b"put just now")
    await store.scrub()
    assert [await store.get(digest) for digest in (named, definition, fresh)] == [
        b"named",
        b"definition",
        b"put just now",
    ]
    with pytest.raises(KeyError):
        await store.get(vain)


async def test_a_blob_that_was_put_again_is_kept_for_another_day(clocked_place: "Place") -> None:
    store = clocked_place.open()
    digest = await store.put(b"again")
    await clocked_place.clock.sleep(DAY)
    assert await store.put(b"again") == digest
    await store.scrub()
    assert await store.get(digest) == b"again"


async def test_an_inbox_is_erased_apart_from_its_session(store: JournalStore) -> None:
    await store.commit(
        lifecycle.start_session(SessionStarted(session="one", agent="a", kind="chat", started_by="me"), b"task")
    )
    posted = WakePosted(cause="message", origin="person", sender="me")
    await store.commit(lifecycle.post_wake("one", "message", posted, b"private"))
    await store.commit(make_erasure(inbox_stream("one"), 1))
    assert (await store.read(inbox_stream("one")))[0].body is None
    assert (await store.read(ONE))[0].body == b"task"


def test_each_salt_is_drawn_once() -> None:
    drawn = list(islice(draw_salts(), 3 * SALTS_DRAWN + 1))
    assert len(set(drawn)) == len(drawn)
    assert {len(salt) for salt in drawn} == {SALT_BYTES}


def test_a_copy_of_the_process_draws_its_own_salts() -> None:
    salts = draw_salts()
    next(salts)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, next(salts))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, SALT_BYTES) != next(salts)
    os.close(reading)
    os.close(writing)

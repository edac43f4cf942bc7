"""What was said can be erased for good, while what happened stays provable."""

from pathlib import Path
from typing import TYPE_CHECKING

from halter.core.clock import DAY, HOUR
from halter.core.events import BodiesErased, SessionWoken, WakePosted
from halter.core.ids import FLEET, SessionId, StreamId, inbox_stream, session_stream
from halter.core.ports import Draft, Write
from halter.journal.rebuild import IntegrityReport
from halter.journal.retention import erase_older_than, erase_session_bodies

if TYPE_CHECKING:
    from conftest import Ground, Scribe

ONE, INBOX = session_stream("one"), inbox_stream("one")


def kinds(report: IntegrityReport) -> list[tuple[str, str, int]]:
    return [(finding.kind, finding.stream, finding.seq) for finding in report.findings]


async def bodies(ground: "Ground", stream: StreamId) -> list[bytes | None]:
    return [event.body for event in await ground.store.read(stream)]


async def test_an_erased_session_says_erased_and_not_tampered(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    await scribe.whole_session("two")
    before = [event.facts for event in await ground.store.read(ONE)]
    erasure = await erase_session_bodies(ground.store, ["one"], "ann", "asked for it")
    assert (erasure.erased, erasure.refused) == (("one",), ())
    assert set(await bodies(ground, ONE)) == set(await bodies(ground, INBOX)) == {None}
    assert [event.facts for event in await ground.store.read(ONE)] == before
    assert [event.salt for event in await ground.store.read(ONE)] == [None] * 8
    assert None not in await bodies(ground, inbox_stream("two"))
    report = await ground.verify()
    assert report.ok
    assert report.erased == 7 + 2


async def test_an_erasure_is_an_event_that_says_who_and_why(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    await erase_session_bodies(ground.store, ["one"], "ann", "asked for it")
    events = [stored.event for stored in await ground.store.read(FLEET)]
    assert events == [
        BodiesErased(stream=ONE, through=8, by="ann", reason="asked for it"),
        BodiesErased(stream=INBOX, through=2, by="ann", reason="asked for it"),
    ]


async def test_a_session_that_has_not_ended_is_never_erased(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.start("one")
    await scribe.whole_session("two")
    erasure = await erase_session_bodies(ground.store, ["one", "two", "none"], "ann")
    assert erasure.erased == ("two",)
    assert [refused.session for refused in erasure.refused] == ["one", "none"]
    assert "has not ended (RUNNING)" in erasure.refused[0].sentence
    assert "Unknown session none" in erasure.refused[1].sentence
    assert None not in await bodies(ground, ONE)


async def test_an_erasure_can_be_repeated(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    for _ in range(2):
        assert (await erase_session_bodies(ground.store, ["one"], "ann")).erased == ("one",)
    report = await ground.verify()
    assert report.ok
    assert report.erased == 9


async def test_a_body_that_comes_back_is_found_and_erased_again(history: "Scribe") -> None:
    ground = history.ground
    keep = "SELECT body, salt FROM events WHERE stream = :stream AND seq = 2"
    body, salt = ground.sql(keep, stream=ONE)[0]
    await erase_session_bodies(ground.store, ["one"], "ann")
    restore = "UPDATE events SET body = :body, salt = :salt WHERE stream = :stream AND seq = 2"
    ground.sql(restore, body=body, salt=salt, stream=ONE)
    assert kinds(await ground.verify()) == [("not_erased", ONE, 2)]
    await erase_session_bodies(ground.store, ["one"], "ann")
    assert (await ground.verify()).ok


async def test_a_body_that_goes_missing_after_an_erasure_is_not_covered_by_it(history: "Scribe") -> None:
    ground = history.ground
    await erase_session_bodies(ground.store, ["one"], "ann")
    posted = WakePosted(cause="message", origin="person", sender="ann")
    await ground.store.commit(Write(INBOX, "late", lambda _: [Draft(posted, b"too late")]))
    assert (await ground.verify()).ok
    ground.sql("UPDATE events SET body = NULL, salt = NULL WHERE stream = :stream", stream=INBOX)
    assert kinds(await ground.verify()) == [("body_missing", INBOX, 3)]


async def name_blob(ground: "Ground", stream: StreamId, data: bytes) -> None:
    digest = await ground.store.put(data)
    woken = SessionWoken(cause="message")
    posted = WakePosted(cause="message", origin="person", sender="ann")
    event = posted if stream.endswith("/in") else woken
    await ground.store.commit(Write(stream, f"blob of {stream}", lambda _: [Draft(event, blob=digest)]))


async def blobs(ground: "Ground") -> int:
    return await ground.store.study(lambda view: view.ask("counts", {})[0]["blobs"])


async def test_blobs_go_when_the_last_that_names_them_is_erased(ground: "Ground", scribe: "Scribe") -> None:
    for session in ("one", "two"):
        await scribe.start(session)
        await name_blob(ground, session_stream(session), b"what both have read")
        await name_blob(ground, inbox_stream(session), b"what both have read")
        await name_blob(ground, StreamId(f"session:{session}/in"), b"what both have read")
        await scribe.end(session)
    await erase_session_bodies(ground.store, ["one"], "ann")
    assert await blobs(ground) == 1
    assert (await ground.verify()).ok
    await erase_session_bodies(ground.store, ["two"], "ann")
    assert await blobs(ground) == 0
    report = await ground.verify()
    assert report.ok
    assert report.erased == 2 + 4


async def test_the_last_snapshot_of_an_erased_session_goes_too(history: "Scribe") -> None:
    ground = history.ground
    await history.start("four")
    snapshots = {SessionId("four"): b"private", SessionId("three"): b"in use"}
    await ground.store.beat(history.leases["four"].worker, snapshots)
    await history.end("four")
    text = "SELECT session FROM snapshots ORDER BY session"
    assert ground.sql(text) == [("four",), ("three",)]
    await erase_session_bodies(ground.store, ["four"], "ann")
    assert ground.sql(text) == [("three",)]


async def test_only_what_ended_long_enough_ago_is_erased_by_age(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    await scribe.start("two")
    assert (await erase_older_than(ground.store, HOUR, "retention")).erased == ()
    assert (await erase_older_than(ground.store, -DAY, "retention")).erased == ("one",)
    assert (await ground.verify()).ok


async def test_what_was_erased_by_age_is_not_erased_every_night(ground: "Ground", scribe: "Scribe") -> None:
    await scribe.whole_session("one")
    assert (await erase_older_than(ground.store, -DAY, "retention")).erased == ("one",)
    assert (await erase_older_than(ground.store, -DAY, "retention")).erased == ()
    assert len(await ground.store.read(FLEET)) == 2


CANARY = b"canary-4711"


def leftovers(ground: "Ground") -> list[str]:
    return [path.name for path in Path(ground.url).parent.rglob("*") if path.is_file() and CANARY in path.read_bytes()]


async def talk(scribe: "Scribe", session: str) -> None:
    """Leave the canary in bodies of all sizes, in the inbox, and in a blob."""
    ground = scribe.ground
    await scribe.start(session)
    for number, size in enumerate((1, 50, 500, 2_000, 20_000)):
        body = CANARY + b"x" * size + CANARY
        posted = WakePosted(cause="message", origin="person", sender="ann")
        for stream, event in (
            (session_stream(session), SessionWoken(cause="message")),
            (inbox_stream(session), posted),
        ):
            write = Write(stream, f"{stream}{number}", lambda _, event=event, body=body: [Draft(event, body)])
            await ground.store.commit(write)
    await name_blob(ground, session_stream(session), CANARY * 10_000)
    await scribe.end(session)


async def test_nothing_of_an_erased_body_is_left_in_the_files(sqlite_history: "Scribe") -> None:
    ground = sqlite_history.ground
    for number in range(5):
        await talk(sqlite_history, f"talk-{number}")
    assert leftovers(ground) != []
    erasure = await erase_session_bodies(ground.store, [f"talk-{number}" for number in range(5)], "ann")
    assert erasure.scrubbed
    assert leftovers(ground) == []
    assert (await ground.verify()).ok


async def test_what_a_reader_kept_from_being_scrubbed_goes_with_the_next_erasure(sqlite_history: "Scribe") -> None:
    ground = sqlite_history.ground
    await talk(sqlite_history, "talk")
    view = ground.engine.view()
    assert not (await erase_session_bodies(ground.store, ["talk"], "ann")).scrubbed
    view.close()
    assert leftovers(ground) != []
    assert (await erase_session_bodies(ground.store, [], "ann")).scrubbed
    assert leftovers(ground) == []

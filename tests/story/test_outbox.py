"""What agents have to tell is sent after the commit, at least once, and is waited for as long as it is worth it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from letters import Postbox
from msgspec.structs import replace

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import StoreUnusable
from halter.core.events import NotificationFailed, NotificationQueued, NotificationSent
from halter.core.ids import OUTBOX, StreamId, session_stream
from halter.core.notifications import DeliveryFailed, NotificationContent, OutgoingNotification, Sender
from halter.core.ports import Committed, Draft, Query, Write
from halter.core.rows import NotificationRow
from halter.notify import make_sender
from halter.redaction.secrets import GivenSecrets
from halter.runtime.notices import ChannelKey, Outbox, make_senders
from halter.runtime.runtime import Runtime
from halter.settings import read_settings
from halter.spec.channels import EmailChannel, InAppChannel, Notify
from halter.spec.tasks import Tasks
from halter.tasks.task_tools import make_notification_key, queue_notification
from halter.testing.fakes import StoreProxy
from halter.testing.world import World, crash_everywhere

OPS: ChannelKey = ("night-watch", "ops")
SESSION = session_stream("s1")


class Recipient:
    """Takes letters, and fails as it is told to: once for each word that is left."""

    def __init__(self, *troubles: Exception) -> None:
        self.got: list[OutgoingNotification] = []
        self.times: list[int] = []
        self.troubles = list(troubles)
        self.world: World | None = None

    async def send(self, letter: OutgoingNotification) -> None:
        self.times.append(self.world.now if self.world else 0)
        if self.troubles:
            raise self.troubles.pop(0)
        self.got.append(letter)


def later(count: int = 1) -> list[Exception]:
    return [DeliveryFailed("It is away.", may_retry=True) for _ in range(count)]


def app_in(world: World) -> Runtime:
    settings = read_settings({"USER": "ada"}, Path("/nowhere"), "memory:")
    return Runtime(settings, world.clock, world.ids, cast("Any", world.store), cast("Any", None), world.ledger, {})


def open_outbox(world: World, senders: dict[ChannelKey, Sender]) -> asyncio.Task[None]:
    return world.spawn(Outbox(app_in(world), senders).run())


async def queue(
    world: World, name: str = "n1", way: ChannelKey = OPS, text: str = "Look.", stream: StreamId = SESSION
) -> None:
    draft = queue_notification(name, way[1], way[0], NotificationContent(subject="News", text=text), "finding")
    store = world.store.patient(world.clock)
    await store.commit(Write(stream, f"queued/{name}", lambda _: [draft], [make_notification_key(name)]))


async def row(world: World, name: str = "n1") -> NotificationRow:
    (notification_row,) = await world.journal.ask(Query("notification", NotificationRow, {"notification": name}))
    return notification_row


async def outbox(world: World) -> list[Any]:
    return [stored.event for stored in await world.events(OUTBOX)]


@pytest.fixture
def world() -> Any:
    with World(orderly=True) as made:
        yield made


def test_what_is_queued_is_sent_at_once_and_written_down(world: World) -> None:
    recipient = Recipient()

    async def story() -> None:
        open_outbox(world, {OPS: recipient})
        number = world.now
        await queue(world)
        await world.advance(SECOND)
        assert recipient.got == [
            OutgoingNotification(
                id="n1", subject="News", text="Look.", agent="night-watch", session="s1", about="finding", at=number
            )
        ]
        assert await outbox(world) == [NotificationSent(notification="n1", attempts=1)]
        assert (await row(world)).sent_at is not None
        await world.advance(DAY)
        assert len(recipient.got) == 1

    world.run(story())


def test_what_was_queued_before_the_process_began_is_sent_too(world: World) -> None:
    recipient = Recipient()

    async def story() -> None:
        await queue(world)
        await world.advance(DAY)
        open_outbox(world, {OPS: recipient})
        await world.advance(SECOND)
        assert len(recipient.got) == 1

    world.run(story())


def test_nothing_is_sent_for_what_was_never_committed() -> None:
    """A process that dies while it queues something has told nobody; one that queued it tells it after all."""

    class Witness:
        """Looks into the journal whenever a letter comes."""

        def __init__(self, world: World) -> None:
            self._world = world

        async def send(self, letter: OutgoingNotification) -> None:
            queued_now = [stored.event for stored in await self._world.events(SESSION)]
            assert any(isinstance(event, NotificationQueued) for event in queued_now)
            assert not any(isinstance(event, NotificationSent) for event in await outbox(self._world))
            sent_in[id(self._world)] = [*sent_in.get(id(self._world), []), letter.id]

    sent_in: dict[int, Sequence[str]] = {}

    async def program(world: World) -> None:
        await queue(world)
        sending = asyncio.create_task(Outbox(app_in(world), {OPS: Witness(world)}).run())
        try:
            while (await row(world)).sent_at is None:
                await world.clock.sleep(SECOND)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    lives = 0
    for world in crash_everywhere(program):
        lives += 1
        letters = sent_in.pop(id(world))
        assert set(letters) == {"n1"}
        assert len(letters) <= 2
    assert lives > 3


def test_a_failing_channel_is_tried_again_less_and_less_often(world: World) -> None:
    recipient = Recipient(*later(6))
    recipient.world = world

    async def story() -> None:
        open_outbox(world, {OPS: recipient})
        await queue(world)
        await world.advance(2 * DAY)
        pauses = [after - before for before, after in zip(recipient.times, recipient.times[1:], strict=False)]
        for pause, expected_pause in zip(pauses, (MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, DAY), strict=True):
            assert expected_pause <= pause <= expected_pause + SECOND
        assert len(recipient.got) == 1
        assert (await outbox(world))[-1] == NotificationSent(notification="n1", attempts=7)
        assert (await row(world)).error == ""

    world.run(story())


def test_after_a_week_it_is_given_up_and_stays_there_to_be_seen(world: World) -> None:
    recipient = Recipient(*later(100))

    async def story() -> None:
        open_outbox(world, {OPS: recipient})
        await queue(world)
        await world.advance(8 * DAY)
        notification_row = await row(world)
        assert (
            notification_row.gave_up,
            notification_row.attempts,
            notification_row.error,
            notification_row.sent_at,
        ) == (1, 13, "It is away.", None)

    world.run(story())


def test_what_is_refused_for_good_is_not_tried_again(world: World) -> None:
    recipient = Recipient(DeliveryFailed("Nobody lives there.", may_retry=False))

    async def story() -> None:
        open_outbox(world, {OPS: recipient})
        await queue(world)
        await world.advance(DAY)
        assert await outbox(world) == [
            NotificationFailed(notification="n1", attempts=1, error="Nobody lives there.", next_at=None)
        ]
        assert recipient.got == []

    world.run(story())


def test_a_restart_does_not_begin_the_waiting_anew(world: World) -> None:
    recipient = Recipient(*later(3))
    recipient.world = world

    async def story() -> None:
        open_outbox(world, {OPS: recipient})
        await queue(world)
        await world.advance(7 * MINUTE)
        assert len(recipient.times) == 3
        await world.restart()
        open_outbox(world, {OPS: recipient})
        await world.advance(10 * MINUTE)
        assert len(recipient.times) == 3
        await world.advance(10 * MINUTE)
        assert [letter.id for letter in recipient.got] == ["n1"]

    world.run(story())


def test_a_channel_that_hangs_holds_up_no_other(world: World) -> None:
    class Stuck:
        async def send(self, letter: OutgoingNotification) -> None:
            await world.clock.sleep(DAY)

    recipient = Recipient()

    async def story() -> None:
        open_outbox(world, {("night-watch", "slow"): Stuck(), OPS: recipient})
        await queue(world, "n0", ("night-watch", "slow"))
        await world.advance(SECOND)
        for number in range(1, 4):
            await queue(world, f"n{number}")
            await world.advance(SECOND)
        assert [letter.id for letter in recipient.got] == ["n1", "n2", "n3"]

    world.run(story())


def test_a_sender_that_breaks_down_takes_nobody_along_and_its_words_are_not_kept(world: World) -> None:
    key = "mAdeUpKeyThatOpensNothing1234567890"
    recipient, broken = Recipient(), Recipient(RuntimeError(key))

    async def story() -> None:
        open_outbox(world, {("night-watch", "odd"): broken, OPS: recipient})
        await queue(world, "n0", ("night-watch", "odd"))
        await queue(world)
        await world.advance(SECOND)
        assert len(recipient.got) == 1
        assert (await row(world, "n0")).error == "The channel odd failed: RuntimeError."
        await world.advance(2 * MINUTE)
        assert len(broken.got) == 1

    world.run(story())


def test_what_agents_of_other_processes_have_to_tell_is_left_to_those(world: World) -> None:
    recipient = Recipient()

    async def story() -> None:
        open_outbox(world, {OPS: recipient})
        for number in range(150):
            await queue(world, f"theirs{number}", ("other", "ops"))
        await queue(world)
        await world.advance(MINUTE)
        assert [letter.id for letter in recipient.got] == ["n1"]
        assert (await row(world, "theirs0")).attempts == 0

    world.run(story())


def test_a_channel_that_was_taken_out_of_the_file_is_waited_for(world: World) -> None:
    async def story() -> None:
        open_outbox(world, {OPS: Recipient()})
        await queue(world, way=("night-watch", "gone"))
        await world.advance(SECOND)
        notification_row = await row(world)
        assert notification_row.error == "night-watch has no channel gone. Add it under `notify` again."
        assert notification_row.next_at is not None

    world.run(story())


def test_two_processes_that_send_from_one_store_tell_a_thing_once_where_they_can(world: World) -> None:
    class Slow(Recipient):
        async def send(self, letter: OutgoingNotification) -> None:
            await world.clock.sleep(SECOND)
            await super().send(letter)

    slow = Slow()

    async def story() -> None:
        open_outbox(world, {OPS: slow})
        for number in range(10):
            await queue(world, f"n{number}")
        await world.advance(SECOND // 2)
        open_outbox(world, {OPS: slow})
        await world.advance(MINUTE)
        names = [letter.id for letter in slow.got]
        assert set(names) == {f"n{number}" for number in range(10)}
        # Only what both had in hand when they met goes out twice.
        assert len(names) == 11
        events = await outbox(world)
        assert len([event for event in events if isinstance(event, NotificationSent)]) == 10

    world.run(story())


def test_who_stays_behind_takes_over_when_the_faster_one_is_gone(world: World) -> None:
    class Slow(Recipient):
        async def send(self, letter: OutgoingNotification) -> None:
            await world.clock.sleep(SECOND)
            await super().send(letter)

    first, second = Slow(), Slow()

    async def story() -> None:
        faster = open_outbox(world, {OPS: first})
        open_outbox(world, {OPS: second})
        await queue(world)
        await world.advance(MINUTE)
        assert len(first.got) == len(second.got) == 1
        await queue(world, "n2")
        await world.advance(MINUTE)
        assert (len(first.got), len(second.got)) == (2, 1)
        faster.cancel()
        for name in ("n3", "n4"):
            await queue(world, name)
            await world.advance(MINUTE)
        assert [letter.id for letter in second.got] == ["n1", "n3", "n4"]

    world.run(story())


def test_a_store_that_cannot_be_used_is_reported_as_what_it_is(world: World) -> None:
    class Ruined(StoreProxy):
        async def commit(self, write: Write) -> Committed:
            raise StoreUnusable("The disk is read-only.")

    async def story() -> None:
        await queue(world)
        app = replace(app_in(world), store=cast("Any", Ruined(world.store)))
        with pytest.raises(StoreUnusable):
            await Outbox(app, {OPS: Recipient()}).run()

    world.run(story())


def test_what_was_erased_before_it_could_be_sent_is_not_sent(world: World) -> None:
    recipient = Recipient()

    async def story() -> None:
        event = NotificationQueued(notification="n1", channel="ops", agent="night-watch")
        await world.store.commit(Write(OUTBOX, "queued/n1", lambda _: [Draft(event)], [make_notification_key("n1")]))
        open_outbox(world, {OPS: recipient})
        await world.advance(SECOND)
        notification_row = await row(world)
        assert (notification_row.error, notification_row.gave_up) == ("The text of the notification was erased.", 1)
        assert recipient.got == []

    world.run(story())


def test_an_in_app_notification_is_there_at_once(world: World) -> None:
    tasks = Tasks(notify=Notify(channels=(InAppChannel(name="ops"),)))

    async def story() -> None:
        open_outbox(world, make_senders("night-watch", tasks, GivenSecrets({})))
        await queue(world, stream=OUTBOX)
        await world.advance(SECOND)
        assert (await row(world)).sent_at is not None

    world.run(story())


class Outside:
    """A sender whose work takes real time, for which virtual time stands still."""

    def __init__(self, world: World, sender: Sender) -> None:
        self._world = world
        self._sender = sender

    async def send(self, letter: OutgoingNotification) -> None:
        with self._world.clock.outside():
            await self._sender.send(letter)


def mail(world: World, port: int) -> dict[ChannelKey, Sender]:
    channel = EmailChannel(
        name="ops",
        to=("ada@example.com",),
        sender="halter@example.com",
        host="127.0.0.1",
        port=port,
        security="none",
    )
    return {OPS: Outside(world, make_sender(channel, {}.__getitem__))}


def test_a_mail_server_that_is_down_at_first_gets_the_letter_when_it_is_back(world: World) -> None:
    postbox = Postbox()

    async def story() -> None:
        await postbox.open()
        postbox.close()
        open_outbox(world, mail(world, postbox.port))
        await queue(world)
        await world.advance(30 * SECOND)
        assert (await row(world)).error == "The mail server 127.0.0.1 cannot be reached: SMTPConnectError."
        await postbox.open(postbox.port)
        await world.advance(31 * SECOND)
        assert [letter["Subject"] for letter in postbox.got] == ["News"]
        assert await outbox(world) == [
            (await outbox(world))[0],
            NotificationSent(notification="n1", attempts=2),
        ]
        postbox.close()

    world.run(story())


def test_a_mail_server_that_asks_to_come_back_later_is_asked_later(world: World) -> None:
    postbox = Postbox()

    async def story() -> None:
        await postbox.open()
        postbox.answers = ["451 greylisted"]
        open_outbox(world, mail(world, postbox.port))
        await queue(world)
        await world.advance(30 * SECOND)
        assert postbox.got == []
        await world.advance(31 * SECOND)
        assert len(postbox.got) == 1
        postbox.close()

    world.run(story())


def test_a_mail_server_that_dies_after_it_took_a_letter_gets_it_again_under_the_same_name(world: World) -> None:
    postbox = Postbox()

    async def story() -> None:
        await postbox.open()
        postbox.answers = [""]
        open_outbox(world, mail(world, postbox.port))
        await queue(world)
        await world.advance(2 * MINUTE)
        first, second = postbox.got
        assert first["Message-ID"] == second["Message-ID"] == "<halter.n1@example.com>"
        assert (await row(world)).sent_at is not None
        postbox.close()

    world.run(story())

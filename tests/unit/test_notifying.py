"""How long a channel that fails is waited for, and what is written down about a letter."""

from halter.core.clock import DAY, HOUR, MINUTE
from halter.core.events import NotificationFailed, NotificationQueued, NotificationSent
from halter.core.ids import OUTBOX
from halter.core.notifications import NotificationContent, parse_notification
from halter.core.rows import NotificationRow
from halter.tasks.task_tools import compute_notification_backoff, queue_notification, record_send_failure, record_sent


class Locked:
    """Rows as they stand at a moment."""

    now = 1_000

    def __init__(self, row: NotificationRow | None) -> None:
        self._row = row

    def get(self, kind: type, *key: str) -> NotificationRow | None:
        assert (kind, *key) == (NotificationRow, "n1")
        return self._row


WAITING = NotificationRow("n1", queued_at=1)


def test_a_failing_channel_is_tried_less_and_less_often_and_given_up_after_a_week() -> None:
    pauses = [compute_notification_backoff(attempts) for attempts in range(1, 14)]
    assert pauses == [MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, *(7 * [DAY]), None]
    assert compute_notification_backoff(1_000_000) is None


def test_a_notification_is_an_event_with_its_text_in_the_body() -> None:
    telling = NotificationContent(subject="Grüße", text="a\0b")
    draft = queue_notification("n1", "ops", "night-watch", telling, "finding")
    assert draft.event == NotificationQueued(notification="n1", channel="ops", agent="night-watch", about="finding")
    assert draft.body is not None
    assert parse_notification(draft.body) == NotificationContent(subject="Grüße", text="a␀b")


def test_a_body_that_is_not_json_is_shown_unchanged() -> None:
    for body in (b"just words", b"[1]", b'"x"', b"\xff", b'{"text": 5}'):
        assert parse_notification(body).text == body.decode(errors="replace")


def test_that_it_was_sent_is_written_once_and_only_while_it_waits() -> None:
    write = record_sent("n1", 2)
    assert (write.stream, write.key) == (OUTBOX, "sent/n1")
    assert [draft.event for draft in write.decide(Locked(WAITING))] == [NotificationSent(notification="n1", attempts=2)]
    for row in (None, NotificationRow("n1", sent_at=5), NotificationRow("n1", gave_up=1)):
        assert write.decide(Locked(row)) == []


def test_a_failure_says_when_it_is_tried_again_or_that_it_is_not() -> None:
    (draft,) = record_send_failure("n1", 1, "no", may_retry=True).decide(Locked(WAITING))
    assert draft.event == NotificationFailed(notification="n1", attempts=1, error="no", next_at=1_000 + MINUTE)
    (draft,) = record_send_failure("n1", 1, "no", may_retry=False).decide(Locked(WAITING))
    assert draft.event == NotificationFailed(notification="n1", attempts=1, error="no")
    (draft,) = record_send_failure("n1", 13, "no", may_retry=True).decide(Locked(WAITING))
    assert draft.event == NotificationFailed(notification="n1", attempts=13, error="no")


def test_of_two_who_failed_at_once_one_counts() -> None:
    write = record_send_failure("n1", 1, "no", may_retry=True)
    assert write.decide(Locked(NotificationRow("n1", attempts=1))) == []
    assert write.decide(Locked(NotificationRow("n1", sent_at=5))) == []
    assert (
        record_send_failure("n1", 1, "a", may_retry=True).key != record_send_failure("n1", 2, "a", may_retry=True).key
    )

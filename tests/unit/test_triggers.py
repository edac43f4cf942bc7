"""What a trigger does now: decisions about times and documents, without a clock or a store."""

from typing import Any

import pytest

from halter.autonomy.triggers import (
    CapExhausted,
    DelayDocuments,
    QuarantineDocument,
    QueueRun,
    RunNow,
    SkipRuns,
    StartRun,
    TriggerConditions,
    WatchedDocument,
    decide_schedule,
    decide_watch,
)
from halter.core.clock import MINUTE, SECOND
from halter.core.rows import TriggerRow
from halter.core.schedules import Timing
from halter.spec.triggers import Schedule, Watch

EVERY = Schedule(name="tick", prompt="Look.", every=MINUTE)
TIMING = Timing(every=MINUTE, anchor=0)


def row(**more: Any) -> TriggerRow:
    return TriggerRow("a/tick", **more)


def around(now: int, **more: Any) -> TriggerConditions:
    return TriggerConditions(now=now, on_since=0, **more)


def test_a_run_is_not_too_soon_because_the_one_before_it_began_a_little_late() -> None:
    last = row(ticked_at=MINUTE, ran_at=MINUTE + 900_000)
    assert decide_schedule(EVERY, TIMING, last, around(2 * MINUTE + 1)) == [RunNow(2 * MINUTE)]


def test_a_run_that_was_made_up_for_keeps_the_next_one_at_a_distance() -> None:
    last = row(ticked_at=MINUTE, ran_at=MINUTE + 40 * SECOND)
    (outcome,) = decide_schedule(EVERY, TIMING, last, around(2 * MINUTE))
    assert isinstance(outcome, SkipRuns)
    assert outcome.why == "too_soon"


def test_a_queued_run_starts_when_nothing_works_and_not_during_a_halt() -> None:
    waiting = row(ticked_at=MINUTE, queued_at=MINUTE)
    assert decide_schedule(EVERY, TIMING, waiting, around(MINUTE + 1)) == [RunNow(MINUTE)]
    assert decide_schedule(EVERY, TIMING, waiting, around(MINUTE + 1, running=1)) == []
    assert decide_schedule(EVERY, TIMING, waiting, around(MINUTE + 1, halt_reason="fleet was halted")) == []


@pytest.mark.parametrize(
    ("more", "why"),
    [({"on_since": MINUTE}, "off"), ({"exhausted_cap": CapExhausted("$1.00 is spent.")}, "cost_cap_reached")],
)
def test_a_queued_run_says_why_it_does_not_start_after_all(more: Any, why: str) -> None:
    waiting = row(ticked_at=MINUTE, queued_at=MINUTE)
    schedule = decide_schedule(EVERY, TIMING, waiting, TriggerConditions(**{"now": MINUTE + 1, "on_since": 0, **more}))
    (skip,) = schedule
    assert isinstance(skip, SkipRuns)
    assert (skip.why, skip.due_at) == (why, MINUTE)


def test_only_one_run_waits_for_the_one_before_it() -> None:
    queues = Schedule(name="tick", prompt="Look.", every=MINUTE, overlap="queue")
    assert decide_schedule(queues, TIMING, row(), around(MINUTE, running=1)) == [QueueRun(MINUTE)]
    (outcome,) = decide_schedule(queues, TIMING, row(ticked_at=MINUTE, queued_at=MINUTE), around(2 * MINUTE, running=1))
    assert isinstance(outcome, SkipRuns)
    assert outcome.why == "overlap"


def item(name: str, **more: Any) -> WatchedDocument:
    fields = {"item": name, "ignored": 0, "attempts": 0, "session": "", "quarantined_at": None, **more}
    return WatchedDocument(name=name, **fields)


WATCH = Watch(name="papers", path="in", max_parallel=2)


@pytest.mark.parametrize(
    ("room", "more", "started_count", "why"),
    [
        (None, {}, 2, "overlap"),
        (1, {}, 1, "overlap"),
        (0, {"running": 1}, 0, "cost_cap_reached"),
        (None, {"halt_reason": "fleet was halted"}, 0, "halted"),
        (None, {"exhausted_cap": CapExhausted("$1.00 is spent.", MINUTE)}, 0, "cost_cap_reached"),
        (None, {"running": 2}, 0, "overlap"),
    ],
)
def test_what_is_not_begun_waits_for_a_reason(room: int | None, more: Any, started_count: int, why: str) -> None:
    watch = decide_watch(WATCH, [item(name) for name in "abcd"], around(0, **more), room)
    assert [act.item.name for act in watch.acts if isinstance(act, StartRun)] == list("abcd")[:started_count]
    (delay,) = [act for act in watch.acts if isinstance(act, DelayDocuments)]
    assert (delay.why, delay.waiting) == (why, 4 - started_count)


def test_a_document_rests_longer_after_each_failure() -> None:
    failed = item("a", attempts=2, session="s", state="ERROR", ended_at=100 * SECOND)
    assert decide_watch(WATCH, [failed], around(119 * SECOND)).acts == ()
    assert decide_watch(WATCH, [failed], around(119 * SECOND)).until == 120 * SECOND
    assert decide_watch(WATCH, [failed], around(120 * SECOND)).acts == (StartRun(failed, 3),)


def test_a_document_over_which_sessions_hang_is_not_tried_for_ever() -> None:
    stopped = item("a", attempts=3, session="s", state="HALTED", ended_at=SECOND, terminal_reason="external_halt")
    assert decide_watch(WATCH, [stopped], around(MINUTE)).acts == (StartRun(stopped, 3),)
    hung = item("a", attempts=3, session="s", state="HALTED", ended_at=SECOND, terminal_reason="idle_timeout")
    (outcome,) = decide_watch(WATCH, [hung], around(MINUTE)).acts
    assert isinstance(outcome, QuarantineDocument)

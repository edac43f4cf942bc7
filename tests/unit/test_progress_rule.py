"""What counts as progress: one pure rule over what an ended session did, whatever ended it."""

from typing import Any

import pytest

from halter.autonomy.upkeep import Progress, build_progress, count_fruitless, find_backoff, judge_trigger, made_progress
from halter.core.clock import HOUR, MINUTE
from halter.core.events import CallSettled, CallStarted, TurnEnded
from halter.core.events.sessions import YieldRequest
from halter.core.rows import SessionRow

ENDED = SessionRow("s", state="MAX_STEPS", terminal_reason="max_steps", started_at=10, ended_at=20)
CAPPED = SessionRow("s", state="BUDGET_EXCEEDED", terminal_reason="cost_cap_reached", started_at=10, ended_at=20)


def does(*calls: tuple[str, str], effect: Any = "write", outcome: Any = "ok") -> list[Any]:
    """The events of calls of tools with arguments."""
    events: list[Any] = []
    for number, (tool, arguments) in enumerate(calls):
        events.append((CallStarted(call=f"c{number}", tool=tool, effect=effect), arguments.encode()))
        events.append((CallSettled(call=f"c{number}", outcome=outcome), b""))
    return events


def ends(why: Any, mode: Any = None) -> list[Any]:
    return [(TurnEnded(turn=1, why=why, yielded=None if mode is None else YieldRequest(mode)), b"")]


@pytest.mark.parametrize(
    ("events", "progress"),
    [
        ([], False),
        (does(("book", "1")), True),
        (does(("book", "1"), ("book", "2")), True),
        (does(("book", "1"), ("book", "1")), False),
        (does(("book", "1"), ("book", "1"), ("book", "2")), True),
        (does(("look", "1"), ("look", "2"), effect="read"), False),
        (does(("book", "1"), outcome="error"), False),
        (does(("book", "1"), outcome="unknown"), False),
        (does(("emit_finding", "1"), effect="read"), True),
        (does(("emit_finding", "1"), ("emit_finding", "1"), effect="read"), False),
        (does(("notify", "1"), effect="read"), True),
        (ends("max_steps"), False),
        (ends("repetition"), False),
        (ends("cost_cap_reached"), False),
        (ends("yielded", "continue"), False),
        (ends("yielded", "sleep"), True),
        (ends("yielded", "shutdown"), True),
        (ends("asked"), True),
        (ends("ended") + ends("cost_cap_reached"), True),
    ],
)
@pytest.mark.parametrize("row", [ENDED, CAPPED])
def test_progress_is_what_was_done_and_not_how_it_ended(row: SessionRow, events: Any, *, progress: bool) -> None:
    assert made_progress(build_progress(row, events), []) == progress


def test_a_session_that_completed_made_progress_whatever_it_did() -> None:
    assert made_progress(Progress(state="COMPLETED"), [])


def test_what_an_earlier_session_did_is_not_new() -> None:
    before, after = (build_progress(ENDED, does(("book", "1"))) for _ in range(2))
    other = build_progress(ENDED, does(("book", "2")))
    assert not made_progress(after, [other, before])
    assert made_progress(after, [other])


def test_the_backoff_is_minutes_then_an_hour_then_a_person() -> None:
    assert [find_backoff(count) for count in range(1, 5)] == [5 * MINUTE, HOUR, None, None]


def attempts(*spans: tuple[int, int], progress: bool = False) -> list[Progress]:
    return [Progress(state="ERROR", started_at=start, ended_at=end, own_ends=int(progress)) for start, end in spans]


def test_attempts_in_a_row_count_since_a_person_switched_the_agent_on_and_parallel_ones_count_once() -> None:
    row = attempts((50, 60), (30, 40), (10, 20))
    assert [count_fruitless(row, since) for since in (0, 11, 31, 51)] == [3, 2, 1, 0]
    assert count_fruitless([*row[:2], *attempts((5, 6), progress=True), *row[2:]], 0) == 2
    assert count_fruitless(attempts((51, 60), (50, 70), (40, 55), (10, 20)), 0) == 2


def test_who_is_unhealthy_is_said_in_one_sentence_with_its_cause_and_what_mends_it() -> None:
    row = [build_progress(ENDED, does(*[("look", "1")] * 7, effect="read"))]
    unhealthy = judge_trigger("desk", "desk/tick", row, 0)
    assert unhealthy is not None
    assert unhealthy.line == (
        "desk is unhealthy: the last session of desk/tick brought no new effect, no finding and no answer. s ended "
        "MAX_STEPS (max steps) after 7 calls of look with the same arguments. Nothing starts there before 1970-01-01 "
        "00:05:00 UTC. Correct instructions, tools or limits; `halter on desk` starts it now."
    )
    assert judge_trigger("desk", "desk/tick", attempts((1, 2), progress=True), 0) is None

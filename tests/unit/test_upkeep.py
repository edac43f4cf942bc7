"""What is done for an agent that is to run by itself: every branch of the decision, as a table."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from halter.autonomy.upkeep import (
    REST_STATES,
    AttendSession,
    BeginSession,
    ExhaustedSession,
    LeaveAlone,
    ReopenSession,
    StopSession,
    UpkeepStep,
    decide_upkeep,
)
from halter.core.clock import MINUTE
from halter.core.rows import AgentRow, HaltRow, SessionRow
from halter.core.vocabulary import END_STATES, State
from halter.guard.halts import compute_ramp_delay

BEFORE, THEN, LATER, NOW = 100, 200, 300, 10_000_000_000
"""Before a session ended, when it ended, after that, and the moment of the decision."""

ON = AgentRow("watch", 1, BEFORE, "ada", "")
AGAIN = AgentRow("watch", 1, LATER, "ada", "")
OFF = AgentRow("watch", 0, LATER, "ada", "")

OFF_SENTENCE = LeaveAlone("watch is switched off. Run `halter on watch`.")


def session(state: State, name: str = "watch-3", **more: Any) -> SessionRow:
    text = THEN if state in END_STATES else None
    return SessionRow(name, agent="watch", kind="autonomous", state=state, started_at=1, ended_at=text, **more)


def halt(scope: str, *, halted: bool = True, at: int = LATER, ramp: int = 0) -> HaltRow:
    return HaltRow(scope, int(halted), at, "bob", "", ramp)


def decide(
    switch: AgentRow | None,
    last: SessionRow | None,
    halts: Sequence[HaltRow] = (),
    *,
    now: int = NOW,
    starting: bool = False,
) -> UpkeepStep:
    return decide_upkeep("watch", switch, last, {row.scope: row for row in halts}, now, starting=starting)


def make_end_advice(state: State, reason: str) -> LeaveAlone:
    return LeaveAlone(f"watch-3 has ended ({state}: {reason}). Run `halter on watch` to start the next session.")


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize(
    ("switch", "last", "answer"),
    [
        (None, None, OFF_SENTENCE),
        (OFF, None, OFF_SENTENCE),
        (OFF, session("COMPLETED"), OFF_SENTENCE),
        (OFF, session("HALTED"), OFF_SENTENCE),
        (ON, None, BeginSession(1)),
        (AGAIN, session("COMPLETED"), BeginSession(4)),
        (AGAIN, session("BUDGET_EXCEEDED"), BeginSession(4)),
        (AGAIN, session("HALTED"), BeginSession(4)),
        (AGAIN, session("CANCELLED"), BeginSession(4)),
        (AGAIN, session("ERROR", "watch-41"), BeginSession(42)),
        (AGAIN, session("ERROR", "named-by-hand"), BeginSession(2)),
        (ON, session("RUNNING"), LeaveAlone()),
        (ON, session("SLEEPING"), LeaveAlone()),
        (OFF, session("SLEEPING"), StopSession("watch-3", "ada")),
        (ON, session("ERROR", terminal_reason="model_error"), make_end_advice("ERROR", "model_error")),
        (ON, session("BUDGET_EXCEEDED", terminal_reason="overrun"), make_end_advice("BUDGET_EXCEEDED", "overrun")),
        (ON, session("HALTED", terminal_reason="external_halt"), make_end_advice("HALTED", "external_halt")),
    ],
)
def test_the_switch_and_the_newest_session_decide(
    switch: AgentRow | None, last: SessionRow | None, answer: UpkeepStep, *, starting: bool
) -> None:
    assert decide(switch, last, starting=starting) == answer


@pytest.mark.parametrize("state", ["HALTED", "CANCELLED"])
@pytest.mark.parametrize("at", [BEFORE, BEFORE + 1])
def test_switching_on_after_a_session_was_stopped_counts_before_it_has_ended(state: State, at: int) -> None:
    stopped = [halt("session:watch-3", at=BEFORE)]
    assert decide(AgentRow("watch", 1, at, "ada", ""), session(state), stopped) == BeginSession(4)
    assert decide(AgentRow("watch", 1, BEFORE - 1, "ada", ""), session(state), stopped) == make_end_advice(state, "")


def test_an_agent_that_shut_itself_down_starts_again_only_when_a_process_starts() -> None:
    last = session("COMPLETED", terminal_reason="completed")
    assert decide(ON, last, starting=True) == BeginSession(4)
    assert decide(ON, last) == make_end_advice("COMPLETED", "completed")


@pytest.mark.parametrize("state", sorted(END_STATES - {"COMPLETED"}))
def test_a_start_gives_no_other_ended_session_a_new_budget(state: State) -> None:
    assert isinstance(decide(ON, session(state), starting=True), LeaveAlone)


@pytest.mark.parametrize("scope", ["fleet", "agent:watch"])
@pytest.mark.parametrize("last", [None, session("COMPLETED"), session("HALTED"), session("ERROR")])
def test_while_everything_is_halted_nothing_begins(scope: str, last: SessionRow | None) -> None:
    sentence = f"{scope} was halted by bob. Run `halter resume {scope}`."
    assert decide(AGAIN, last, [halt(scope)], starting=True) == LeaveAlone(sentence)


def test_a_halt_of_another_agent_or_session_is_none_of_its_business() -> None:
    others = [halt("agent:other"), halt("session:other-1"), halt("session:watch-2")]
    assert decide(ON, None, others) == BeginSession(1)
    assert decide(ON, session("SLEEPING"), others) == LeaveAlone()


@pytest.mark.parametrize("scope", ["fleet", "agent:watch", "session:watch-3"])
@pytest.mark.parametrize("state", sorted(REST_STATES))
def test_a_session_that_rests_though_it_is_halted_is_attended_so_that_it_ends(scope: str, state: State) -> None:
    assert decide(ON, session(state), [halt(scope)]) == AttendSession("watch-3")
    assert decide(OFF, session(state), [halt(scope)]) == AttendSession("watch-3")
    assert decide(ON, session(state), [halt(scope, halted=False)]) == LeaveAlone()
    assert decide(ON, session(state, owner="somebody"), [halt(scope)]) == LeaveAlone()


@pytest.mark.parametrize("state", ["RUNNING", "WAITING_FOR_APPROVAL", "WAITING_FOR_BUDGET", "WAITING_FOR_TOOL"])
def test_one_that_is_halted_in_the_middle_of_a_turn_looks_for_itself(state: State) -> None:
    assert decide(ON, session(state), [halt("fleet")]) == LeaveAlone()


@pytest.mark.parametrize("scope", ["fleet", "agent:watch", "session:watch-3"])
def test_a_halt_that_is_lifted_reopens_the_session_that_it_ended(scope: str) -> None:
    lifted = halt(scope, halted=False)
    assert decide(ON, session("HALTED"), [lifted]) == ReopenSession("watch-3", "bob")
    assert isinstance(decide(ON, session("HALTED"), [halt(scope, halted=False, at=BEFORE)]), LeaveAlone)
    for state in END_STATES - {"HALTED"}:
        assert isinstance(decide(ON, session(state), [lifted]), LeaveAlone)


def test_of_several_halts_all_must_be_lifted_and_the_last_one_says_who_did_it() -> None:
    halt_row, fleet = halt("session:watch-3", halted=False), halt("fleet", halted=False, at=LATER + 1)
    assert isinstance(decide(ON, session("HALTED"), [halt_row, halt("fleet")]), LeaveAlone)
    assert isinstance(decide(ON, session("HALTED"), [fleet, halt("session:watch-3")]), LeaveAlone)
    later = HaltRow("fleet", 0, LATER + 1, "eve", "", 0)
    assert decide(ON, session("HALTED"), [halt_row, later]) == ReopenSession("watch-3", "eve")


def test_sessions_resume_after_their_ramp_delay() -> None:
    lifted = halt("fleet", halted=False, ramp=MINUTE)
    due = LATER + compute_ramp_delay("watch-3", MINUTE)
    waits = decide(ON, session("HALTED"), [lifted], now=due - 1)
    assert waits == LeaveAlone("fleet was resumed by bob; watch-3 resumes after its ramp delay.", due)
    assert decide(ON, session("HALTED"), [lifted], now=due) == ReopenSession("watch-3", "bob")


ENDED = session("BUDGET_EXCEEDED", terminal_reason="cost_cap_reached")
FITS = ExhaustedSession("its cap of $0.50", "max_cost_usd", turns=3, has_window_cap=True)


@pytest.mark.parametrize("starting", [True, False])
def test_after_its_cap_the_next_session_starts_automatically_with_its_reason(*, starting: bool) -> None:
    answer = decide_upkeep("watch", ON, ENDED, {}, NOW, starting=starting, used_up=FITS)
    assert answer == BeginSession(4, "watch-3", "watch-3 has used up its cap of $0.50.")


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        ({"turns": 0}, "before it finished a turn, so no next session starts. Raise `max_cost_usd`."),
        ({"has_window_cap": False}, "no hourly, daily or monthly cap bounds the next sessions."),
        ({"asks": True}, "and no person approved more."),
        ({"tokens": True}, "No cap on cost bounds tokens, so no next session starts."),
    ],
)
def test_where_no_other_cap_holds_or_none_lasts_a_person_is_waited_for(known: dict[str, Any], sentence: str) -> None:
    answer = decide_upkeep("watch", ON, ENDED, {}, NOW, used_up=msgspec.structs.replace(FITS, **known))
    assert isinstance(answer, LeaveAlone)
    assert sentence in answer.sentence
    assert "Run `halter on watch` to start the next session." in answer.sentence


@pytest.mark.parametrize("scope", ["fleet", "agent:watch"])
def test_after_its_cap_nothing_begins_that_is_halted_or_off(scope: str) -> None:
    assert isinstance(decide_upkeep("watch", ON, ENDED, {scope: halt(scope)}, NOW, used_up=FITS), LeaveAlone)
    assert decide_upkeep("watch", OFF, ENDED, {}, NOW, used_up=FITS) == OFF_SENTENCE
    assert decide_upkeep("watch", None, ENDED, {}, NOW, used_up=FITS) == OFF_SENTENCE


def test_a_person_who_switches_it_on_begins_the_next_session_in_any_case() -> None:
    poor = msgspec.structs.replace(FITS, turns=0, has_window_cap=False)
    assert decide_upkeep("watch", AGAIN, ENDED, {}, NOW, used_up=poor) == BeginSession(4)

"""A session is its events: what they fold into."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.codec import decode, encode
from halter.core.events import (
    AnyEvent,
    CallSettled,
    CallStarted,
    CapChanged,
    CostCapReached,
    OverrunIncurred,
    RequestSettled,
    RequestStarted,
    SessionEnded,
    SessionParked,
    SessionStarted,
    SessionWoken,
    Unknown,
)
from halter.core.ids import StreamId
from halter.core.money import Charge, Leg
from halter.core.ports import Stored
from halter.core.vocabulary import END_STATES, Outcome, State
from halter.state.session import InFlight, Session, UnknownEvent, fold, replay

START = SessionStarted(
    session="s1", agent="night-watch", kind="autonomous", started_by="mara", trigger="nightly", parent="p1"
)
LEGS = (
    Leg("session:s1", "", "usd", 100, 30),
    Leg("fleet", "", "usd", 900, 30),
    Leg("session:s1", "", "tokens", None, 7),
)


def stored(event: AnyEvent | Unknown, seq: int) -> Stored:
    kind, version = (event.kind, event.version) if isinstance(event, Unknown) else (event.KIND, event.VERSION)
    return Stored(
        stream=StreamId("session:s1"),
        seq=seq,
        kind=kind,
        version=version,
        at=1000 * seq,
        generation=1,
        key=f"key {seq}",
        blob=None,
        facts=b"{}",
        body=None,
        salt=None,
        digest=b"",
        hash=b"",
        event=event,
    )


def folded(*events: AnyEvent | Unknown) -> Session:
    return replay(stored(event, seq) for seq, event in enumerate(events, start=1))


def test_a_session_begins_running_as_whoever_began_it_said() -> None:
    assert folded(START) == Session(
        session="s1",
        agent="night-watch",
        kind="autonomous",
        trigger="nightly",
        parent="p1",
        state="RUNNING",
        started_at=1000,
        head=1,
    )


def test_it_parks_and_resumes() -> None:
    session = folded(START, SessionParked(state="SLEEPING", inbox_seen=3, wake_at=99, wake_on=("smoke",)))
    assert (session.state, session.inbox_seen, session.wake_at, session.ended) == ("SLEEPING", 3, 99, False)
    woken = fold(session, stored(SessionWoken(cause="message", inbox_seen=4), 3))
    assert (woken.state, woken.inbox_seen, woken.wake_at, woken.head) == ("RUNNING", 4, None, 3)


@pytest.mark.parametrize("state", sorted(END_STATES))
def test_every_end_is_an_end_with_its_reason(state: State) -> None:
    session = folded(START, SessionEnded(state=state, terminal_reason="because"))
    assert session.ended
    assert (session.state, session.terminal_reason, session.ended_at, session.wake_at) == (state, "because", 2000, None)


def test_what_was_begun_and_not_settled_is_in_flight_with_all_that_was_held_for_it() -> None:
    session = folded(
        START,
        CallStarted(call="c1", tool="look", legs=LEGS),
        RequestStarted(request="r1", model="m", purpose="gate"),
    )
    assert session.in_flight == {
        "c1": InFlight("c1", "look", "turn", LEGS, 2000, is_call=True, seq=2),
        "r1": InFlight("r1", "m", "gate", (), 3000, is_call=False, seq=3),
    }
    assert session.in_flight["c1"].max_charge() == Charge(usd=30, tokens=7)
    assert session.in_flight["r1"].max_charge() == Charge()


def test_what_is_held_under_several_rates_is_the_most_of_it() -> None:
    alike = Leg("model:m", "", "tokens", None, 900), Leg("model:m:*", "", "tokens", None, 400)
    assert InFlight("r1", "m", "turn", (*LEGS, *alike), 0, is_call=False).max_charge() == Charge(usd=30, tokens=900)


def test_what_is_settled_is_no_longer_in_flight_and_its_cost_adds_up() -> None:
    session = folded(
        START,
        CallStarted(call="c1", tool="look", legs=LEGS),
        RequestStarted(request="r1", model="m", purpose="turn"),
        CallStarted(call="free", tool="think"),
        RequestSettled(request="r1", outcome="ok", charge=Charge(usd=20, tokens=5)),
        CallSettled(call="c1", outcome="error", charge=Charge(usd=3)),
        CallSettled(call="free", outcome="ok"),
    )
    assert session.in_flight == {}
    assert session.spent == Charge(usd=23, tokens=5)


def test_a_reached_cap_and_an_overrun_are_remembered() -> None:
    cap = CostCapReached(refused="c1", name="look", scope="fleet", window="", unit="usd", cap=1, spent=1, amount=1)
    overrun_incurred = OverrunIncurred(hold="c1", scope="fleet", window="", unit="usd", amount=1)
    assert (folded(START, cap).cost_cap_reached, folded(START, cap).overrun) == (True, False)
    assert (folded(START, overrun_incurred).cost_cap_reached, folded(START, overrun_incurred).overrun) == (False, True)


def test_what_does_not_concern_a_session_only_moves_its_head() -> None:
    cap_changed = CapChanged(scope="fleet", window="", unit="usd", cap=5, by="mara")
    assert folded(START, cap_changed) == msgspec.structs.replace(folded(START), head=2)


def test_an_event_that_this_program_does_not_know_is_never_folded() -> None:
    with pytest.raises(UnknownEvent, match=r"Event 2 of session:s1 is a teleported of version 3.*newer Halter"):
        folded(START, Unknown("teleported", 3, b"{}"))


CHARGES = st.none() | st.builds(Charge, st.integers(0, 99), st.integers(0, 99))
OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(["ok", "error", "unknown"])
EVENTS: st.SearchStrategy[list[AnyEvent]] = st.lists(
    st.one_of(
        st.builds(CallStarted, call=st.sampled_from("abc"), tool=st.just("look"), legs=st.sampled_from([(), LEGS])),
        st.builds(CallSettled, call=st.sampled_from("abc"), outcome=OUTCOMES, charge=CHARGES),
        st.builds(RequestStarted, request=st.sampled_from("xyz"), model=st.just("m"), purpose=st.just("turn")),
        st.builds(RequestSettled, request=st.sampled_from("xyz"), outcome=OUTCOMES, charge=CHARGES),
        st.builds(SessionParked, state=st.just("SLEEPING"), inbox_seen=st.integers(0, 9), wake_at=st.integers(0, 9)),
        st.builds(SessionWoken, cause=st.just("timer"), inbox_seen=st.integers(0, 9)),
    ),
    max_size=20,
)


def journal(events: Sequence[AnyEvent]) -> list[Stored]:
    return [stored(event, seq) for seq, event in enumerate([START, *events], start=1)]


@given(EVENTS, st.integers(0, 20))
def test_a_session_replayed_in_two_parts_is_the_session_replayed_in_one(events: list[AnyEvent], cut: int) -> None:
    whole = journal(events)
    session = replay(whole[:cut])
    for event in whole[cut:]:
        session = fold(session, event)
    assert session == replay(whole)


@given(EVENTS)
def test_replayed_from_what_was_written_a_session_is_the_same(events: list[AnyEvent]) -> None:
    live = replay(journal(events))
    written = [(event.KIND, event.VERSION, encode(event)[1]) for event in (START, *events)]
    read = [stored(decode(*columns), seq) for seq, columns in enumerate(written, start=1)]
    assert replay(read) == live


@given(EVENTS)
def test_folding_changes_no_earlier_state(events: list[AnyEvent]) -> None:
    before = replay(journal(events))
    body = msgspec.json.encode(before)
    fold(before, stored(CallStarted(call="new", tool="look"), before.head + 1))
    assert msgspec.json.encode(before) == body


@given(EVENTS)
def test_the_money_of_a_session_is_the_sum_of_its_charges(events: list[AnyEvent]) -> None:
    charges = [event.charge for event in events if isinstance(event, (CallSettled, RequestSettled)) and event.charge]
    assert replay(journal(events)).spent.usd == sum(charge.usd for charge in charges)

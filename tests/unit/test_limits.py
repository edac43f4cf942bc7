"""Which caps apply to whom, and how an amount becomes the legs of a hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halter.core.clock import DAY, WindowLength
from halter.core.money import DOLLAR, Cap, Caps, Leg, Spender, carve, make_legs
from halter.testing.world import VIRTUAL_START

SPENDER = Spender("s1", "night-watch", "nightly")


def test_there_are_caps_unless_none_is_written_out() -> None:
    assert [
        (leg.scope, leg.window, leg.cap)
        for leg in make_legs(Caps(), Spender("s1", "night-watch"), VIRTUAL_START, usd=1)
    ] == [
        ("session:s1", "", 1 * DOLLAR),
        ("agent:night-watch", "day/2026-01-01", 5 * DOLLAR),
        ("fleet", "day/2026-01-01", 20 * DOLLAR),
    ]
    assert Caps().bind()


def test_an_amount_weighs_on_every_scope_also_on_those_without_a_cap() -> None:
    caps = Caps(
        session=Cap(None),
        trigger=(Cap(10), Cap(20, "day")),
        agent=(Cap(30, "hour"), Cap(40, "day")),
        fleet=(Cap(50, "day"), Cap(None, "month")),
    )
    assert make_legs(caps, SPENDER, VIRTUAL_START, usd=7) == (
        Leg("session:s1", "", "usd", None, 7),
        Leg("trigger:nightly", "", "usd", 10, 7),
        Leg("trigger:nightly", "day/2026-01-01", "usd", 20, 7),
        Leg("agent:night-watch", "hour/2026-01-01T00", "usd", 30, 7),
        Leg("agent:night-watch", "day/2026-01-01", "usd", 40, 7),
        Leg("fleet", "day/2026-01-01", "usd", 50, 7),
        Leg("fleet", "month/2026-01", "usd", None, 7),
    )


def test_of_two_caps_on_one_account_the_tighter_counts_and_the_amount_is_held_once() -> None:
    caps = Caps(fleet=(Cap(100, "day"), Cap(50, "day"), Cap(None, "day")))
    fleet = [leg for leg in make_legs(caps, Spender("s1", "watch"), 0, usd=40) if leg.scope == "fleet"]
    assert [(leg.cap, leg.amount) for leg in fleet] == [(50, 40)]


def test_a_session_that_no_trigger_spawned_weighs_on_no_trigger() -> None:
    caps = Caps(trigger=(Cap(10),))
    assert not [
        leg for leg in make_legs(caps, Spender("s1", "a"), VIRTUAL_START, usd=1) if leg.scope.startswith("trigger")
    ]


def test_the_sessions_of_one_trigger_share_its_cap() -> None:
    caps = Caps(trigger=(Cap(10, "day"),))
    shared = [
        {(leg.scope, leg.window) for leg in make_legs(caps, Spender(session, "a", "watch"), VIRTUAL_START, usd=1)}
        for session in ("s1", "s2")
    ]
    assert ("trigger:watch", "day/2026-01-01") in shared[0] & shared[1]


def test_windows_follow_the_zone_of_the_fleet() -> None:
    caps = Caps(session=Cap(None), agent=(), fleet=(Cap(5, "day"),), zone="Europe/Berlin")
    windows = [
        make_legs(caps, SPENDER, now, usd=1)[-1].window
        for now in (VIRTUAL_START, VIRTUAL_START + DAY - 1, VIRTUAL_START + DAY)
    ]
    assert windows == ["day/2026-01-01@Europe/Berlin"] + ["day/2026-01-02@Europe/Berlin"] * 2


def test_tokens_weigh_on_the_session_alone() -> None:
    caps = Caps(token_budget=5000)
    assert make_legs(caps, SPENDER, VIRTUAL_START, usd=0, tokens=12) == (Leg("session:s1", "", "tokens", 5000, 12),)
    legs = make_legs(caps, SPENDER, VIRTUAL_START, usd=3, tokens=12)
    assert [leg.unit for leg in legs] == ["usd", "usd", "usd", "tokens"]


def test_what_costs_nothing_holds_nothing() -> None:
    assert make_legs(Caps(), SPENDER, VIRTUAL_START, usd=0) == ()


def test_a_sub_sessions_cap_is_carved_out_of_its_parents_session_alone() -> None:
    assert carve("p1", 300, 1000) == (Leg("session:p1", "", "usd", 1000, 300),)


NONE = Cap(None)


@pytest.mark.parametrize(
    ("caps", "binds"),
    [
        (Caps(NONE, (), (), ()), False),
        (Caps(NONE, (NONE,), (NONE,), (NONE,), token_budget=5), False),
        (Caps(Cap(0), (), (), ()), True),
        (Caps(NONE, (Cap(1),), (), ()), True),
        (Caps(NONE, (), (NONE, Cap(1, "day")), ()), True),
        (Caps(NONE, (), (), (Cap(1, "month"),)), True),
    ],
)
def test_a_cap_binds_if_any_scope_has_one(caps: Caps, *, binds: bool) -> None:
    assert caps.bind() == binds


PERS: tuple[WindowLength, ...] = ("", "hour", "day", "month")
CAPS = st.lists(
    st.builds(Cap, st.none() | st.integers(0, 100), st.sampled_from(PERS)), max_size=4, unique_by=lambda cap: cap.per
).map(tuple)


@given(CAPS, CAPS, CAPS, st.integers(1, 1000))
def test_each_cap_gives_one_leg_with_the_whole_amount(
    trigger: tuple[Cap, ...], agent: tuple[Cap, ...], fleet: tuple[Cap, ...], usd: int
) -> None:
    legs = make_legs(Caps(Cap(1), trigger, agent, fleet), SPENDER, VIRTUAL_START, usd=usd)
    assert [leg.cap for leg in legs] == [cap.max_cost_usd for cap in (Cap(1), *trigger, *agent, *fleet)]
    assert {leg.amount for leg in legs} == {usd}

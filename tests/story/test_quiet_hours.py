"""Questions that are asked at night wait for the morning, in the inbox, in notifications and on the phone."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from halter.config.agent_files import parse_agent
from halter.config.merge import parse_fleet
from halter.config.policy import canonicalize_policy, merge_with_policy, parse_stored_fleet
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.errors import ConfigError
from halter.core.ports import Query
from halter.core.rows import DecisionRow
from halter.operations import decisions
from halter.operations.actor import Actor, Principal
from halter.operations.decisions import ApprovalTerms
from halter.operations.queries import read_needs
from halter.policy.evaluation import QuestionTerms, ResolvedPolicy
from halter.policy.order import list_orders
from halter.runtime.supervisor import NOTICE_POLLING_INTERVAL
from halter.spec.policy import QuietHours
from halter.testing.world import World
from tests.story.autonomous import CALM, Fleet
from tests.story.test_notices import TOOLS, WIPES, list_notifications

DESK = """
autonomy: {enabled: false}
model: scripted
script: replies.yaml
schedules: [{name: once, at: '2026-01-01T01:00:00Z', prompt: Look at the desk.}]
"""
NIGHT = "zone: Europe/Berlin\npolicy: {quiet_hours: {start: '22:00', end: '07:00'}}\n"
"""The world begins at midnight in UTC, which is one o'clock in Berlin: it is quiet for six hours."""


class Night:
    def __init__(self, world: World, home: Path, policy: str = NIGHT) -> None:
        self.world, self.fleet = world, Fleet(world, home, policy)
        self.fleet.start(self.fleet.agent("desk", DESK, TOOLS, replies_yaml=WIPES))

    @property
    def desk(self) -> Actor:
        return Actor(self.fleet.app, Principal("ada", "approver"))

    async def list_asked(self) -> list[str]:
        """What people see: the decisions and the needs of the inbox, and the notifications."""
        open_decisions = [f"decision about {each.name}" for each in await decisions.waiting(self.desk)]
        needs = [f"need about {each.kind}" for each in await read_needs(self.desk)]
        return [*open_decisions, *needs, *(subject for _, subject in await list_notifications(self.world))]

    async def row(self) -> DecisionRow:
        (row,) = await self.world.journal.ask(Query("all_decisions", DecisionRow))
        return row


ASKED = ["decision about wipe", "need about approval", "desk needs you: wants to wipe."]


async def test_a_question_of_the_night_is_put_to_people_in_the_morning(world: World, tmp_path: Path) -> None:
    night = Night(world, tmp_path)
    await world.advance(90 * MINUTE)
    assert (await night.row()).verdict == ""
    assert await night.list_asked() == []
    await world.advance(4 * HOUR + 29 * MINUTE)
    assert await night.list_asked() == []
    await world.advance(NOTICE_POLLING_INTERVAL + MINUTE)
    assert await night.list_asked() == ASKED
    await decisions.approve(night.desk, (await night.row()).decision, ApprovalTerms())
    await world.advance(MINUTE)
    assert [row.state for row in await night.fleet.sessions("desk")] == ["COMPLETED"]


@CALM
async def test_a_person_who_is_awake_can_answer_at_night_by_the_decision_s_name(world: World, tmp_path: Path) -> None:
    night = Night(world, tmp_path)
    await world.advance(90 * MINUTE)
    await decisions.approve(night.desk, (await night.row()).decision, ApprovalTerms())
    await world.advance(MINUTE)
    assert [row.state for row in await night.fleet.sessions("desk")] == ["COMPLETED"]


@CALM
@pytest.mark.parametrize(
    "policy",
    [
        "zone: Europe/Berlin\npolicy: {approval_expiry: 3h, quiet_hours: {start: '22:00', end: '07:00'}}\n",
        "zone: Europe/Berlin\npolicy: {quiet_hours: {start: '12:00', end: '13:00'}}\n",
        "policy: {quiet_hours: {start: '22:00', end: '01:00', timezone: UTC}}\n",
    ],
)
async def test_what_would_expire_or_is_asked_at_another_hour_is_put_at_once(
    world: World, tmp_path: Path, policy: str
) -> None:
    night = Night(world, tmp_path, policy)
    await world.advance(75 * MINUTE)
    assert await night.list_asked() == ASKED


def resolve(fleet: str = "", agent: str = "") -> ResolvedPolicy:
    agent_file = parse_agent(load_bytes(f"name: desk\n{agent}".encode(), "agent.yaml"))
    return resolve_policy(parse_fleet(load_bytes(f"mode: SEMI\n{fleet}".encode(), "halter.yaml")), agent_file)


def quiet(start: str, end: str, zone: str = "") -> str:
    timezone = f", timezone: {zone}" if zone else ""
    return f"policy: {{quiet_hours: {{start: '{start}', end: '{end}'{timezone}}}}}\n"


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("fleet", "agent", "asked", "shown"),
    [
        ("zone: Europe/Berlin\n" + quiet("22:00", "07:00"), "", "2026-01-15T20:59", None),
        ("zone: Europe/Berlin\n" + quiet("22:00", "07:00"), "", "2026-01-15T21:00", "2026-01-16T06:00"),
        ("zone: Europe/Berlin\n" + quiet("22:00", "07:00"), "", "2026-07-15T21:00", "2026-07-16T05:00"),
        ("zone: Europe/Berlin\n" + quiet("22:00", "07:00"), "", "2026-01-16T06:00", None),
        # The nights in which the clocks change: an hour less, and an hour more.
        ("zone: Europe/Berlin\n" + quiet("22:00", "07:00"), "", "2026-03-28T22:00", "2026-03-29T05:00"),
        ("zone: Europe/Berlin\n" + quiet("22:00", "07:00"), "", "2026-10-24T22:00", "2026-10-25T06:00"),
        # An end that the clocks skip is the first moment after the gap; of one that occurs twice, the first counts.
        ("zone: Europe/Berlin\n" + quiet("22:00", "02:30"), "", "2026-03-28T23:00", "2026-03-29T01:00"),
        ("zone: Europe/Berlin\n" + quiet("22:00", "02:30"), "", "2026-10-24T23:00", "2026-10-25T00:30"),
        # The hours of the fleet and of an agent both count, in their own zones.
        (quiet("22:00", "06:00"), quiet("05:00", "08:00"), "2026-01-15T23:00", "2026-01-16T08:00"),
        (quiet("22:00", "06:00"), quiet("23:00", "01:00"), "2026-01-15T23:30", "2026-01-16T06:00"),
        (quiet("22:00", "06:00"), quiet("22:00", "07:00", "America/New_York"), "2026-01-15T22:30", "2026-01-16T12:00"),
        ("", quiet("22:00", "06:00"), "2026-01-15T22:30", "2026-01-16T06:00"),
        # Where it is always quiet, nothing would ever be asked.
        (quiet("08:00", "20:00"), quiet("20:00", "08:00"), "2026-01-15T22:30", None),
    ],
)
def test_a_question_is_shown_when_no_quiet_hours_are_left(
    fleet: str, agent: str, asked: str, shown: str | None
) -> None:
    times = resolve(fleet, agent).question_terms.times_at(at(asked))
    assert times == {"expires_at": at(asked) + DAY, "shown_at": at(shown) if shown else 0}


def test_a_question_that_expires_first_or_that_a_person_has_just_asked_for_waits_for_nothing() -> None:
    policy, asked = resolve(quiet("22:00", "06:00")), at("2026-01-15T22:00")
    assert policy.question_terms.times_at(asked, 8 * HOUR)["shown_at"] == 0
    assert policy.question_terms.times_at(asked, 9 * HOUR)["shown_at"] == at("2026-01-16T06:00")
    assert QuestionTerms().times_at(asked)["shown_at"] == 0


def test_a_store_and_a_file_are_quiet_together_and_fewer_hours_are_looser() -> None:
    def compare(in_store: str, in_file: str) -> Mapping[str, tuple[str, str, str]]:
        stored = parse_stored_fleet(canonicalize_policy(parse_fleet(load_bytes(in_store.encode(), "x")).raw))
        differences = merge_with_policy(stored, parse_fleet(load_bytes(in_file.encode(), "halter.yaml"))).differences
        return {each.key: (each.how, each.stored, each.written) for each in differences}

    key, night = "policy.quiet_hours", "22:00 to 07:00"
    assert compare(quiet("22:00", "07:00"), "mode: SEMI") == {key: ("looser", night, "not set")}
    assert compare("mode: SEMI", quiet("22:00", "07:00")) == {key: ("stricter", "not set", night)}
    assert compare(quiet("22:00", "07:00"), quiet("23:00", "07:00")) == {key: ("looser", night, "23:00 to 07:00")}
    assert compare(quiet("22:00", "07:00"), quiet("21:30", "07:00")) == {key: ("stricter", night, "21:30 to 07:00")}
    assert compare(quiet("22:00", "07:00"), quiet("22:00", "07:00")) == {}


times_of_day = st.integers(0, 23).map(lambda hour: f"{hour:02}:00")
hours = st.tuples(times_of_day, times_of_day).filter(lambda pair: pair[0] != pair[1])


@given(hours, hours)
def test_hours_are_within_others_if_every_one_of_them_is(one: tuple[str, str], other: tuple[str, str]) -> None:
    def list_hours(start: str, end: str) -> set[int]:
        first, last = int(start[:2]), int(end[:2])
        return {hour % 24 for hour in range(first, last if first < last else last + 24)}

    order = list_orders(type(resolve().policies[0]))["quiet_hours"]
    value, bound = (QuietHours(start=start, end=end) for start, end in (one, other))
    assert order.is_within(value, bound) is (list_hours(*one) >= list_hours(*other))
    assert order.is_within(value, UNSET)
    assert not order.is_within(UNSET, bound)


def test_hours_without_an_hour_are_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"halter\.yaml line 2: `policy\.quiet_hours` starts and ends at 07:00, so no hour is quiet"
    ):
        resolve(quiet("07:00", "07:00"))

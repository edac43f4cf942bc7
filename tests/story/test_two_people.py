"""Calls that a policy names need two approvers: nobody approves twice under another name, and one yes runs nothing."""

from pathlib import Path

import msgspec
import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.errors import NotDone
from halter.core.events import ApprovalGiven, CallStarted, DecisionMade, RuleMade
from halter.core.ids import AGENT_PREFIX, FLEET
from halter.core.ports import Draft, Query, Write
from halter.core.rows import DecisionRow, RuleRow
from halter.guard.approval_check import are_two_people
from halter.guard.approvals import (
    AnyCondition,
    EachArgument,
    RuleWording,
    SameArguments,
    answer_decision,
    approve_always,
    approve_edited,
    encode_matcher,
)
from halter.operations import decisions, rules
from halter.operations.actor import Actor, Principal, Role
from halter.operations.decisions import AlwaysRule, ApprovalTerms, ShownDecision, to_json_object
from halter.present.decisions import render_prompt
from halter.state.receipt import make_receipt
from halter.testing.world import World
from tests.story.autonomous import Fleet

DESK = """
autonomy: {enabled: false}
model: scripted
script: replies.yaml
schedules: [{name: once, at: '2026-01-01T00:01:00Z', prompt: Look.}]
"""
TOOLS = '''
from halter import tool

@tool(level="CONTROLLED", effect="write")
def wipe(path: str) -> str:
    """Wipe a folder."""
    return "wiped " + path
'''
WIPES = """
- {when: Look, text: It is full., calls: [{tool: wipe, arguments: {path: old}}]}
- {repeat: true, text: Done.}
"""
POLICY = "policy: {tools: {wipe: {approvers: 2}}}\n"
SESSION = "desk.once-1"


class House:
    def __init__(self, world: World, home: Path, policy: str = POLICY) -> None:
        self.world = world
        self.fleet = Fleet(world, home, policy)
        self.fleet.start(self.fleet.agent("desk", DESK, TOOLS, replies_yaml=WIPES))

    def desk(self, name: str, role: Role = "approver") -> Actor:
        return Actor(self.fleet.app, Principal(name, role))

    async def row(self) -> DecisionRow:
        (row,) = await self.world.journal.ask(Query("all_decisions", DecisionRow))
        return row

    async def approve(self, name: str, **terms: object) -> str:
        answer = ApprovalTerms(**terms)  # type: ignore[arg-type]
        return (await decisions.approve(self.desk(name), (await self.row()).decision, answer)).sentence

    async def has_run(self) -> bool:
        await self.world.advance(MINUTE)
        return any(isinstance(each.event, CallStarted) for each in await self.fleet.events(SESSION))


async def start_house(world: World, home: Path, policy: str = POLICY) -> House:
    house = House(world, home, policy)
    await world.advance(2 * MINUTE)
    return house


async def test_the_call_runs_when_two_people_agreed_and_all_faces_name_both(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path)
    (waiting_decision,) = await decisions.waiting(house.desk("ada"))
    assert render_prompt(waiting_decision).what == "desk wants to wipe old. Two approvers are needed."
    assert await house.approve("ada") == f"ada approved wipe of desk, session {SESSION}. It needs another approver."
    assert not await house.has_run()
    (waiting_decision,) = await decisions.waiting(house.desk("bob"))
    assert (
        render_prompt(waiting_decision).what == "desk wants to wipe old. ada approved it; one more approver is needed."
    )
    assert (to_json_object(waiting_decision)["approvers"], to_json_object(waiting_decision)["first_by"]) == (2, "ada")
    sentence = await house.approve("bob", digest=waiting_decision.digest)
    assert sentence.startswith(f"Approved: wipe of desk, session {SESSION}. halter up ")
    assert await house.has_run()
    events = [*await house.fleet.events(SESSION), *await house.fleet.inbox(SESSION)]
    assert [each.event.people for each in events if isinstance(each.event, DecisionMade)] == ["ada and bob"]
    receipt = make_receipt(await house.fleet.events(SESSION), await house.fleet.inbox(SESSION))
    assert [each.by for each in receipt.decisions] == ["ada and bob"]
    with pytest.raises(NotDone, match=r"already answered \(approve, by ada and bob\)"):
        await house.approve("carol")


@pytest.mark.parametrize(
    "second",
    [
        *("ada", "ada.phone", "Ada", "ada.laptop", "ada@example.com"),
        *(
            " ada",
            "ada ",
            "ada\t",
            "\u00a0ada",
            "a\u200bda",
            "\u202eada",
            "ada\ufe0f",
            "\uff21da",
            "ad\u3164a",
            " ada.phone",
        ),
        *("ada @example.com", "ada\u2060@example.com", "ada .phone"),
    ],
)
async def test_no_one_agrees_twice_through_another_token_or_channel(world: World, tmp_path: Path, second: str) -> None:
    house = await start_house(world, tmp_path)
    await house.approve("ada")
    with pytest.raises(NotDone, match=r"ada has already approved .*; it needs another person"):
        await house.approve(second)
    shown_decisions = [ShownDecision((await house.row()).decision, (await house.row()).digest)]
    with pytest.raises(NotDone, match=r"ada has already approved .*; it needs another person"):
        await decisions.approve_together(house.desk(second), SESSION, shown=shown_decisions)
    (waiting_decision,) = await decisions.waiting(house.desk("ada"))
    assert (await world.journal.commit(answer_decision(waiting_decision, "approve", second, "forced"))).events == ()
    assert not await house.has_run()


@pytest.mark.parametrize(
    ("first", "second", "two"),
    [
        ("ada@example.com", "ada", False),
        ("ada@example.com", "ada.phone", False),
        ("ada.lovelace", "ada.lovelace@example.com", False),
        ("ada.lovelace.phone", "Ada.Lovelace@example.com", False),
        ("ada.lovelace@example.com", "ada.byron@example.com", True),
        ("ada@example.com", "bob", True),
        ("ada@example.com", "adam", True),
        ("jose\u0301", "jos\u00e9", False),
        ("ada lovelace", "ada  lovelace", False),
        ("label~00ff", "other~00ff ", False),
        ("label~00ff", "label~00fe", True),
        ("ada", "", False),
        ("ada", " \u200b", False),
        ("ada", " agent:clerk", False),
        ("ada", "\uff41gent:clerk", False),
    ],
)
def test_an_address_and_a_name_that_begins_it_are_one_person(first: str, second: str, *, two: bool) -> None:
    assert are_two_people(first, second) is are_two_people(second, first) is two


async def test_an_agent_is_neither_the_first_nor_the_second(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path)
    agent = f"{AGENT_PREFIX}desk"
    for first in ("", "ada"):
        if first:
            await house.approve(first)
        with pytest.raises(NotDone, match="Only a person can"):
            await house.approve(agent)
        (waiting_decision,) = await decisions.waiting(house.desk("ada"))
        assert (
            await world.journal.commit(answer_decision(waiting_decision, "approve", agent, f"forced/{first}"))
        ).events == ()
    assert not await house.has_run()


async def test_a_decision_that_one_person_forged_into_the_store_runs_nothing(world: World, tmp_path: Path) -> None:
    """As a program would write it that does not know of two people."""
    house = await start_house(world, tmp_path)
    row = await house.row()
    (waiting_decision,) = await decisions.waiting(house.desk("ada"))
    alone = answer_decision(msgspec.structs.replace(waiting_decision, approvers=1), "approve", "ada", "x")
    decision_made = DecisionMade(decision=row.decision, verdict="approve", by="ada", digest=row.digest)
    await world.journal.commit(
        Write(alone.stream, "forged", lambda _: [Draft(decision_made)], alone.reads, others=(FLEET,))
    )
    assert not await house.has_run()
    assert any(
        "needs two approvers" in getattr(each.event, "sentence", "") for each in await house.fleet.events(SESSION)
    )


async def test_one_no_is_enough(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path)
    await house.approve("ada")
    await decisions.deny(house.desk("bob"), (await house.row()).decision)
    assert not await house.has_run()
    assert (await house.row()).people == "bob"


async def test_two_people_agree_to_what_is_shown_and_to_nothing_else(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path)
    (waiting_decision,) = await decisions.waiting(house.desk("ada"))
    assert rules.list_rule_offers(waiting_decision) == ()
    for terms in ({"edit": b'{"path": "new"}'}, {"always": True}):
        with pytest.raises(NotDone, match=r"needs two approvers\. Approve it unchanged"):
            await house.approve("ada", **terms)
    with pytest.raises(NotDone, match=r"needs two approvers\. Approve it unchanged"):
        await decisions.approve_with(house.desk("ada"), waiting_decision.decision, always=AlwaysRule(scope="agent"))
    assert (await house.row()).first_by == ""


async def test_the_first_yes_expires_with_its_question(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path, POLICY.replace("{tools", "{approval_expiry: 1h, tools"))
    await house.approve("ada")
    await world.advance(2 * HOUR)
    with pytest.raises(NotDone, match=r"expired|withdrawn"):
        await house.approve("bob")
    assert not await house.has_run()


async def test_of_two_who_agree_at_once_one_is_first(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path)
    (waiting_decision,) = await decisions.waiting(house.desk("ada"))
    for by in ("ada", "bob"):
        await world.journal.commit(answer_decision(waiting_decision, "approve", by, f"at once/{by}"))
    approvals = [each.event for each in await world.events(FLEET) if isinstance(each.event, ApprovalGiven)]
    assert [each.by for each in approvals] == ["ada"]
    assert await house.has_run()


async def test_the_guard_itself_takes_no_edit_and_no_rule_for_it(world: World, tmp_path: Path) -> None:
    house = await start_house(world, tmp_path)
    (waiting_decision,) = await decisions.waiting(house.desk("ada"))
    wording = RuleWording(
        id="r1", matcher=SameArguments(waiting_decision.same), keys=("path",), scope="fleet", expires_in=HOUR
    )
    for write in (
        approve_edited(waiting_decision, b'{"path": "new"}', "ada", "edit"),
        approve_always(waiting_decision, wording, "ada", "always"),
    ):
        assert (await world.journal.commit(write)).events == ()
    assert not await house.has_run()


async def test_a_rule_of_one_person_does_not_answer_for_two(world: World, tmp_path: Path) -> None:
    event = RuleMade(
        rule="r1",
        tool="wipe",
        scope="fleet",
        owner="",
        matcher=encode_matcher(EachArgument((AnyCondition("path"),))),
        keys=("path",),
        by="ada",
        expires_at=world.now + 24 * HOUR,
    )
    await world.journal.commit(Write(FLEET, "rule", lambda _: [Draft(event)], [(RuleRow, "r1")]))
    house = await start_house(world, tmp_path)
    assert not await house.has_run()
    assert (await house.row()).verdict == ""

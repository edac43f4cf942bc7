"""Calls that wait together are approved with one answer, each exactly as it was shown, or none of them."""

import pytest

from halter.core.errors import NotDone
from halter.core.events import DecisionAsked
from halter.core.ids import session_stream
from halter.core.ports import Query
from halter.core.rows import DecisionRow
from halter.guard.approvals import PendingDecision
from halter.operations import decisions
from halter.operations.decisions import ShownDecision, group_calls
from halter.operations.rules import list_rule_offers
from tests.story.test_desk import LATER, Office, office

__all__ = ["office"]


async def ask(office: Office, *names: str) -> list[ShownDecision]:
    for name in names:
        event = DecisionAsked(
            decision=name,
            about="approval",
            subject=f"mine-1.{name}",
            name="look",
            digest=f"of {name}",
            expires_at=LATER,
        )
        await office.write(session_stream("mine-1"), event, (DecisionRow, name), owner="mine-1")
    return [ShownDecision(name, f"of {name}") for name in names]


async def verdicts(office: Office, *names: str) -> list[str]:
    rows = await office.app.store.ask(Query("all_decisions", DecisionRow))
    return [row.verdict for row in rows if row.decision in names]


async def test_one_answer_approves_each_call_that_was_shown(office: Office) -> None:
    shown_decisions = await ask(office, "one", "two", "three")
    group_result = await decisions.approve_together(office.desk(), "mine-1", shown=shown_decisions[:2])
    assert list(group_result.decisions) == ["one", "two"]
    assert sorted(await verdicts(office, "one", "two", "three")) == ["", "approve", "approve"]


@pytest.mark.parametrize("wrong", [ShownDecision("two", "of one"), ShownDecision("theirs-asks", "d")])
async def test_if_one_is_not_what_was_shown_none_is_approved(office: Office, wrong: ShownDecision) -> None:
    (first, _) = await ask(office, "one", "two")
    with pytest.raises(NotDone):
        await decisions.approve_together(office.desk(), "mine-1", shown=[first, wrong])
    assert await verdicts(office, "one", "two", "theirs-asks") == ["", "", ""]


async def test_the_calls_of_one_session_are_one_group(office: Office) -> None:
    await ask(office, "one", "two")
    waiting_decisions = await decisions.waiting(office.desk())
    groups = [{waiting_decision.decision for waiting_decision in group} for group in group_calls(waiting_decisions)]
    assert {"mine-asks", "one", "two"} in groups
    assert {"theirs-asks"} in groups


def test_a_question_of_the_brake_offers_a_rule_for_that_destination() -> None:
    waiting_decision = PendingDecision(
        decision="d",
        about="approval",
        subject="s.c1",
        name="send_letter",
        agent="clerk",
        session="s",
        digest="d",
        asked_at=0,
        expires_at=LATER,
        level="RESTRICTED",
        risk="",
        same="s",
        body=b'send_letter {"text": "hello", "to": "eve@evil.example"}',
        keys='["text", "to"]',
        facts=b'{"flaws": [{"argument": "to", "value": "", "reason": "unsaid"}, '
        b'{"argument": "text", "value": "", "reason": "content"}]}',
    )
    assert [offer.match for offer in list_rule_offers(waiting_decision)] == ["same", "any:text"]
    assert "to is exactly" in list_rule_offers(waiting_decision)[1].sentence

"""The desk against what is stale, too large, or not meant."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from halter.core.errors import NotDone
from halter.core.events import DecisionAsked
from halter.core.ids import session_stream
from halter.core.ports import Draft, Write
from halter.core.rows import DecisionRow
from halter.operations import artifacts, decisions, rules
from halter.operations.actor import Actor
from halter.operations.decisions import ApprovalTerms
from tests.story.test_desk import LATER, Office, office

__all__ = ["office"]

NAMED: dict[str, Callable[[Actor], Awaitable[Any]]] = {
    "approve": lambda desk: decisions.approve(desk, "mine-a", ApprovalTerms()),
    "deny": lambda desk: decisions.deny(desk, "mine-a"),
    "settle": lambda desk: artifacts.settle(desk, "mine-f", "kept", "findings"),
    "end a rule": lambda desk: rules.end(desk, "mine-r"),
}


@pytest.mark.parametrize("deed", NAMED)
async def test_a_word_about_what_is_gone_is_never_taken_for_one_about_what_begins_like_it(
    office: Office, deed: str
) -> None:
    before = await office.heads()
    with pytest.raises(NotDone) as no:
        await NAMED[deed](office.desk())
    assert no.value.why == "missing"
    assert await office.heads() == before


@pytest.mark.parametrize("shown", [b"", b'look {"path": "/tm', b"look " + b"[" * 100_000])
async def test_a_rule_for_a_call_whose_words_are_gone_is_refused_in_a_sentence(office: Office, shown: bytes) -> None:
    event = DecisionAsked(
        decision="asks", about="approval", subject="c", name="look", digest="d", expires_at=LATER, keys=("path",)
    )
    lease, rows = office.scribe.leases["mine-1"], [(DecisionRow, "asks")]
    await office.ground.store.commit(
        Write(session_stream("mine-1"), "asks", lambda _: [Draft(event, shown)], rows, lease)
    )
    with pytest.raises(NotDone) as no:
        await decisions.approve(office.desk(), "asks", ApprovalTerms(always=True, match="under:path=/tmp"))
    assert no.value.why == "refused"

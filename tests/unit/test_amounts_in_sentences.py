"""Caps and bounds in sentences: rounding makes none of them false."""

from halter.autonomy.triggers import check_cap_exhausted
from halter.config.agent_files import parse_agent
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_policy
from halter.config.yaml_reader import load_bytes
from halter.core.events import CostCapReached
from halter.guard.approvals import make_cap_question
from halter.runtime.forecast import format_bound


def test_a_bound_is_not_below_what_may_be_spent() -> None:
    assert format_bound(124_999) == "at most $0.13"
    assert format_bound(150_000_000) == "at most $150.00"
    assert format_bound(None) == "any amount"


def test_a_cap_that_a_person_set_is_named_exactly() -> None:
    exhausted = check_cap_exhausted(0, 125_000, "agent:desk", None)
    assert exhausted is not None
    assert exhausted.sentence == "The cap of agent:desk, $0.125, is spent or held."


def test_an_amount_that_does_not_fit_a_cap_does_not_look_as_if_it_fitted() -> None:
    reached = CostCapReached(
        refused="r", name="m", scope="fleet", window="", unit="usd", cap=1_000_000, spent=674_000, amount=334_000
    )
    policy = resolve_policy(FleetConfig(), parse_agent(load_bytes(b"name: desk", "agent.yaml")))
    question = make_cap_question("r", "m", reached, policy)
    assert "m may cost $0.334; $0.674 of $1.00 is spent in fleet." in question.display_text

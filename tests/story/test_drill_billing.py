"""The drill of the two books: the provider's ledger and the store's, and that each of its teeth bites by itself."""

from typing import Any

import pytest

from halter_drills.billing import LISTED, UNKNOWN, BillingCase, bill, compare, events, plan_cases, run_cases
from halter_drills.checker import RecordedEvent, StoreContents
from halter_drills.drill import Setting


def kept(recorded: int | None, *, settled: bool = True) -> StoreContents:
    facts: dict[str, Any] = {"request": "s.7/0"}
    outcome = [RecordedEvent("session:s", 1, "request_settled", 0, 0, facts)] if settled else []
    return StoreContents(outcome, {}, {}, {} if recorded is None else {"s.7/0": recorded}, {})


@pytest.mark.parametrize(
    ("changed", "ledger", "found", "sentence"),
    [
        ({}, {7: 100}, kept(100), ""),
        ({}, {7: 100}, kept(99), "$0.0001 was billed, and $0.000099 is recorded."),
        ({}, {7: 100}, kept(101), "only $0.0001 was billed, and $0.000101 is recorded."),
        ({}, {7: 100}, kept(100, settled=False), "it has no outcome."),
        ({"act": "cuts"}, {7: 100}, kept(101), ""),
        ({"act": "cuts"}, {7: 100}, kept(None), "$0.0001 was billed, and $0.00 is recorded."),
        ({"act": "refuses"}, {7: 0}, kept(None), ""),
        ({"act": "refuses"}, {7: 0}, kept(1), "only $0.00 was billed, and $0.000001 is recorded."),
        ({"act": "unreached"}, {}, kept(1), "only $0.00 was billed, and $0.000001 is recorded."),
        ({"act": "hangs"}, {}, kept(1), ""),
        ({"act": "hangs"}, {7: 100}, kept(99), "$0.0001 was billed, and $0.000099 is recorded."),
        ({"model": UNKNOWN[0]}, {}, kept(None, settled=False), ""),
        ({"model": UNKNOWN[0]}, {7: 5}, kept(5), "it was asked, though its price is unknown."),
    ],
)
def test_the_two_books_are_compared_case_by_case(
    changed: Any, ledger: Any, found: StoreContents, sentence: str
) -> None:
    case = BillingCase(**{"number": 7, "wire": "openai", "act": "answers", "model": "paid:openai", **changed})
    assert [each.removeprefix(f"{case}: ") for each in compare([case], ledger, found)] == [sentence] * bool(sentence)


def test_a_stream_is_cut_at_every_event_of_every_wire_and_each_is_billed_in_full() -> None:
    cases = plan_cases()
    for wire in ("openai", "anthropic", "google"):
        cut = {case.after for case in cases if (case.wire, case.act) == (wire, "cuts")}
        assert cut == set(range(len(events(wire, "each"))))
    assert {bill(case) for case in cases if case.act in ("cuts", "closes", "hangs", "resets", "shortens")} == {10_400}
    assert [case.number for case in cases] == list(range(len(cases)))


@pytest.mark.parametrize("tooth", ["price by address", "early report"])
def test_each_tooth_of_the_drill_bites_by_itself(tooth: str) -> None:
    chosen = [
        case
        for case in plan_cases()
        if (case.model in (*LISTED, *UNKNOWN) if tooth == "price by address" else case.reports == "each" and case.after)
    ]
    bitten = run_cases(Setting(teeth=True), chosen)
    assert bitten.violations >= len(chosen) // 2
    assert run_cases(Setting(), chosen).violations == 0

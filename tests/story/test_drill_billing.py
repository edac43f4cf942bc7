"""The drill of the two books: the provider's ledger and the store's, and that each of its teeth bites by itself."""

from typing import Any

import pytest

from halter_drills.billing import LISTED, UNKNOWN, BillingCase, bill, compare, events, plan_cases, run_cases
from halter_drills.checker import RecordedEvent, StoreContents
from halter_drills.drill import Setting


def make_contents(recorded: int | None, *, settled: bool = True) -> StoreContents:
    facts: dict[str, Any] = {"request": "s.7/0"}
    outcome = [RecordedEvent("session:s", 1, "request_settled", 0, 0, facts)] if settled else []
    return StoreContents(outcome, {}, {}, {} if recorded is None else {"s.7/0": recorded}, {})


@pytest.mark.parametrize(
    ("fields", "ledger", "contents", "sentence"),
    [
        ({}, {7: 100}, make_contents(100), ""),
        ({}, {7: 100}, make_contents(99), "billed $0.0001, recorded $0.000099."),
        ({}, {7: 100}, make_contents(101), "billed only $0.0001, recorded $0.000101."),
        ({}, {7: 100}, make_contents(100, settled=False), "no settlement."),
        ({"act": "cuts"}, {7: 100}, make_contents(101), ""),
        ({"act": "cuts"}, {7: 100}, make_contents(None), "billed $0.0001, recorded $0.00."),
        ({"act": "refuses"}, {7: 0}, make_contents(None), ""),
        ({"act": "refuses"}, {7: 0}, make_contents(1), "billed only $0.00, recorded $0.000001."),
        ({"act": "unreached"}, {}, make_contents(1), "billed only $0.00, recorded $0.000001."),
        ({"act": "hangs"}, {}, make_contents(1), ""),
        ({"act": "hangs"}, {7: 100}, make_contents(99), "billed $0.0001, recorded $0.000099."),
        ({"model": UNKNOWN[0]}, {}, make_contents(None, settled=False), ""),
        ({"model": UNKNOWN[0]}, {7: 5}, make_contents(5), "a request was sent although the price is unknown."),
    ],
)
def test_the_two_books_are_compared_case_by_case(
    fields: Any, ledger: Any, contents: StoreContents, sentence: str
) -> None:
    case = BillingCase(**{"number": 7, "wire": "openai", "act": "answers", "model": "paid:openai", **fields})
    assert [each.removeprefix(f"{case}: ") for each in compare([case], ledger, contents)] == [sentence] * bool(sentence)


def test_a_stream_is_cut_at_every_event_of_every_wire_and_each_is_billed_in_full() -> None:
    cases = plan_cases()
    for wire in ("openai", "responses", "anthropic", "google"):
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

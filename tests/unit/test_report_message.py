"""A report as a message: short, whole lines, what needs somebody first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from halter.core.clock import DAY
from halter.core.money import ZERO_USD, micros_to_usd
from halter.operations.report import MAX_REPORT_MESSAGE, REPORT_TRUNCATED, AgentReport, Report, render_report_message
from halter.runtime.needs import CapLine


def make_report(*needs: str, agents: int = 1) -> Report:
    reports = tuple(
        AgentReport(
            agent=f"agent{number}",
            began=2,
            ended={"COMPLETED, completed": 2},
            runs=2,
            spent_usd=micros_to_usd(1_500_000),
        )
        for number in range(agents)
    )
    caps = (CapLine("fleet", "day/2026-11-15", micros_to_usd(20_000_000), micros_to_usd(1_500_000), ZERO_USD),)
    return Report(
        since=0,
        until=DAY,
        agents=reports,
        spent_usd=micros_to_usd(1_500_000),
        spent_by_purpose_usd={"turn": micros_to_usd(1_500_000)},
        caps=caps,
        needs_you=needs,
    )


def test_a_quiet_night_is_reported_in_a_few_lines() -> None:
    report_message = render_report_message(make_report())
    assert report_message.subject == "Halter: nothing needs you; 2 sessions and $1.50 in 1d"
    assert report_message.text.splitlines() == [
        "Nothing needs you.",
        "agent0: 2 began (COMPLETED, completed 2), 2 runs, $1.50",
        "Spent: $1.50 (turn $1.50)",
        "Cap of fleet day/2026-11-15: $1.50 of $20.00",
    ]


def test_what_needs_somebody_comes_first_and_is_counted_in_the_subject() -> None:
    report_message = render_report_message(make_report("halter approve d1", "halter resume fleet"))
    assert report_message.subject.startswith("Halter: 2 things need you")
    assert report_message.text.splitlines()[:3] == ["Needs you:", "- halter approve d1", "- halter resume fleet"]


@settings(deadline=None)
@given(st.lists(st.text(max_size=3000), max_size=40), st.integers(0, 40))
def test_a_message_is_never_longer_than_it_may_be(needs: list[str], agents: int) -> None:
    assert len(render_report_message(make_report(*needs, agents=agents)).text) <= MAX_REPORT_MESSAGE


def test_one_long_line_does_not_crowd_out_the_others_and_the_message_counts_what_it_omits() -> None:
    report_message = render_report_message(make_report("x" * 5000, "halter approve d1", agents=100))
    assert "- halter approve d1" in report_message.text
    assert report_message.text.endswith(REPORT_TRUNCATED)

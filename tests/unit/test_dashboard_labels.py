"""What pages say: amounts, health, lateness, and how budgets and findings are put in order."""

import json
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from halter.core.clock import HOUR, MINUTE
from halter.core.errors import NotDone
from halter.core.rows import SessionRow
from halter.dashboard.budgets_audit import arrange_caps, is_of_model, parse_browser_time, sum_by_name
from halter.dashboard.home import build_story, indent_arguments, list_need_pages
from halter.dashboard.labels import (
    explain_health,
    format_tokens,
    format_value,
    format_wake,
    is_unwell,
    label_health,
    shorten_id,
    translate_scopes,
)
from halter.dashboard.session import find_number_series
from halter.dashboard.sessions import count_states, fits_filter
from halter.dashboard.widgets import split_arguments
from halter.operations.money import Spending
from halter.operations.queries import AgentLine, HotStateShown
from halter.operations.report import AnswersAlike, EndsAlike, NightSummary
from halter.runtime.budgets import Budget
from halter.runtime.needs import Need


def test_ids_and_tokens_are_short() -> None:
    assert shorten_id("01KTM5T4QN8Z2Y4N6W0V3B7C9D") == "01KT…3B7C9D"
    assert (format_tokens(9_999), format_tokens(20_154), format_tokens(31_000_000)) == ("9,999", "20.2k", "31.0M")


@pytest.mark.parametrize(
    ("line", "word", "why", "unwell"),
    [
        (AgentLine(agent="a", state="RUNNING"), "Running", "", False),
        (AgentLine(agent="a"), "Idle", "", False),
        (AgentLine(agent="a", on=False, switched_by="ann"), "Switched off", "by ann", False),
        (AgentLine(agent="a", halted="agent:a was halted by ann"), "Halted", "Agent a was halted by ann", True),
        (AgentLine(agent="a", on=True, trouble="a-1 ended", stopped=True), "Stopped", "a-1 ended", True),
        (AgentLine(agent="a", on=True, trouble="no answer"), "Waiting", "no answer", True),
        (AgentLine(agent="a", sensors={"disk": "failing"}), "Sensors failing", "disk: no reading", False),
    ],
)
def test_an_agent_has_a_word_for_its_health_and_a_reason(line: AgentLine, word: str, why: str, *, unwell: bool) -> None:
    assert (label_health(line).text, explain_health(line), is_unwell(line)) == (word, why, unwell)


def test_scopes_and_windows_are_shown_in_words() -> None:
    assert translate_scopes("session:a-1 was halted by ann.") == "Session a-1 was halted by ann."
    near = "96 % of the cap of trigger:a/reports (day/2026-11-17) are spent."
    assert translate_scopes(near) == "96 % of the cap of trigger a/reports (today) are spent."
    assert (
        translate_scopes("a/papers quarantined a document: http://x.") == "a/papers quarantined a document: http://x."
    )


def test_what_needs_a_person_leads_to_where_it_is_settled() -> None:
    def lead(**facts: Any) -> list[str]:
        return [path for _, path in list_need_pages(Need(agent="", sentence="", **facts))]

    assert lead(kind="halt", scope="session:a-1") == ["/session/a-1"]
    assert lead(kind="halt", scope="agent:a") == ["/agent/a"]
    assert lead(kind="budget", scope="trigger:a/b") == ["/budgets"]
    assert lead(kind="kept") == ["/findings"]


def test_the_story_of_a_night_tells_what_happened_alike_once() -> None:
    answer = partial(AnswersAlike, by="ann", agent="shop", name="pay")
    ends_alike = EndsAlike(
        agent="shop", state="ERROR", terminal_reason="repetition", count=1200, at=3, session="shop-7"
    )
    night = NightSummary(
        since=0, ends=[ends_alike], answers=[answer(denied=0, count=2, at=1), answer(denied=1, count=1, at=2)]
    )
    assert [line.text for line in build_story(night, (), ())] == [
        "shop ended 1,200 sessions: failed, it repeated the same calls",
        "ann denied pay of shop",
        "ann approved pay of shop, 2 times",
    ]


def test_a_wake_that_nothing_followed_is_late() -> None:
    assert format_wake(10 * HOUR, 10 * HOUR + MINUTE) == "now"
    assert format_wake(10 * HOUR, 11 * HOUR) == "late by 1 h"
    assert format_wake(10 * HOUR, 9 * HOUR) == "in 1 h"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (["a.tmp", "b.tmp"], "a.tmp, b.tmp"),
        ([], "none"),
        (True, "yes"),
        (65.6, "65.6"),
        (None, "nothing"),
        ({"files": [{"path": "a"}], "size": 3, "of": {}}, "files: 1 item, size: 3, of: none"),
        ([{"path": "a"}, {"path": "b"}], "2 items"),
    ],
)
def test_a_value_that_an_agent_knows_is_shown_in_words(value: Any, shown: str) -> None:
    assert format_value(value) == shown


def test_caps_stand_below_the_fleet_and_their_agent() -> None:
    rows = [
        Budget("session:b-1", "", "usd", Decimal(1)),
        Budget("trigger:b/nightly", "day/2026-11-17", "usd", Decimal(1)),
        Budget("session:b-1", "", "tokens"),
        Budget("agent:b", "day/2026-11-17", "usd", Decimal(5)),
        Budget("agent:a", "day/2026-11-17", "usd", Decimal(5)),
        Budget("fleet", "day/2026-11-17", "usd", Decimal(20)),
    ]
    placed = [(arrange_cap.row.scope, arrange_cap.depth) for arrange_cap in arrange_caps(rows, {"b-1": "b"})]
    assert placed == [("fleet", 0), ("agent:a", 1), ("agent:b", 1), ("trigger:b/nightly", 2), ("session:b-1", 2)]


def test_spending_is_summed_up_by_model_and_by_tool() -> None:
    lines = [
        Spending("a", "turn", "anthropic:big", 2, Decimal("0.50"), 100, 20, 0),
        Spending("b", "turn", "anthropic:big", 1, Decimal("0.25"), 50, 10, 0),
        Spending("a", "turn", "reflex:rules", 3, Decimal(0), 0, 0, 0),
        Spending("a", "turn", "search", 4, Decimal("0.10"), 0, 0, 0),
    ]
    assert [line.name for line in lines if not is_of_model(line)] == ["search"]
    big, rules = sum_by_name([line for line in lines if is_of_model(line)])
    assert (big.name, big.spends, big.tokens_in + big.tokens_out) == ("anthropic:big", 3, 180)
    assert (big.spent, big.fraction) == (Decimal("0.75"), 1.0)
    assert (rules.name, rules.fraction) == ("reflex:rules", 0.0)


def test_sessions_are_counted_by_how_they_stand() -> None:
    rows = [SessionRow("1", state="COMPLETED"), SessionRow("2", state="ERROR"), SessionRow("3", state="COMPLETED")]
    assert (count_states(rows), count_states(rows[:1])) == ("The newest 3: 2 completed, 1 failed", "")


def test_sessions_are_filtered_by_how_they_stand() -> None:
    rows = [
        SessionRow("1", state="RUNNING"),
        SessionRow("2", state="WAITING_FOR_APPROVAL"),
        SessionRow("3", state="COMPLETED", ended_at=1),
        SessionRow("4", state="ERROR", ended_at=1),
    ]

    def fit(text: str) -> list[str]:
        return [row.session for row in rows if fits_filter(row, text)]

    assert fit("Every state") == ["1", "2", "3", "4"]
    assert (fit("Under way"), fit("Waiting for a person")) == (["1", "2"], ["2"])
    assert (fit("Ended well"), fit("Ended badly")) == (["3"], ["4"])


def test_numbers_inside_of_a_fact_are_charted_by_their_own_names() -> None:
    hot_state_showns = [HotStateShown(at, {"machine": {"cpu": at, "name": "north"}, "ready": True}) for at in (1, 2)]
    assert find_number_series(hot_state_showns) == {"machine.cpu": [(1, 1.0), (2, 2.0)]}


def test_a_time_that_cannot_be_read_is_refused() -> None:
    assert parse_browser_time("", "end") is None
    assert parse_browser_time("2026-11-17T08:30", "end") is not None
    with pytest.raises(NotDone, match="Invalid end time"):
        parse_browser_time("soon", "end")


def test_the_arguments_of_a_call_are_distinguished_from_notes_about_them() -> None:
    text = '{"to":"bob","amount":5}\ndesk wants to call pay after reading untrusted content:\n- to: {unnamed}'
    values, output = split_arguments(text)
    assert values == {"to": "bob", "amount": 5}
    assert output.startswith("desk wants to call pay")
    # What a person edits is the arguments alone.
    assert json.loads(indent_arguments(text)) == values


@pytest.mark.parametrize("text", ["words", "", "[1]", '{"to":', '"to" bob', "{} and more"])
def test_what_does_not_begin_with_arguments_is_shown_as_it_is(text: str) -> None:
    assert split_arguments(text)[0] == {}
    assert indent_arguments(text) == text

"""What a person does in a browser: they watch, decide, stop and look things up."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.sync_api import expect

from halter.core.clock import DAY
from halter.core.errors import StoreUnavailable
from halter.core.events import CallStarted, RequestSettled, SessionParked
from halter.core.ids import WorkerId, session_stream
from halter.core.ports import Draft, Write
from halter.core.rows import AuditRow
from halter.dispatch.workers import WorkerInfo
from halter.guard.approvals import Question, ask_question
from halter.operations import control, money, queries
from halter.operations.decisions import waiting
from halter.server.login import make_login_url
from halter.state.lifecycle import park_session
from tests.browser.conftest import Visit, Visitor
from tests.browser.house import House

# One worker has the house, and the browser before it.
OF_ALL = ("/", "/fleet", "/sessions", "/audit", "/budgets", "/triggers", "/findings")
PAGES = (*OF_ALL, "/agent/desk", "/session/desk-1", "/receipt/desk-1")


TRY = "Backtest a policy…"
HARMLESS = {"Switch between light and dark", "Log out", "Older", "Search", "OK", TRY}


def dialog(page: Any) -> Any:
    return page.get_by_role("dialog")


def press(inside: Any, name: str) -> None:
    inside.get_by_role("button", name=name).click()


def agent_row(page: Any, text: str) -> Any:
    return page.get_by_role("table", name="Agents").get_by_role("row").filter(has_text=text)


def test_whoever_has_a_token_logs_in_and_out_and_nobody_else(house: House, chromium: Any) -> None:
    visitor = Visitor(house, chromium.new_context())
    visitor.page.goto(f"{house.url}/fleet")
    visitor.page.get_by_label("token").fill(house.secrets["viewer"])
    visitor.page.keyboard.press("Enter")
    expect(visitor.page.get_by_role("heading", name="Home")).to_be_visible()
    expect(visitor.page.get_by_text("viewer (viewer)").first).to_be_visible()
    press(visitor.page, "Log out")
    expect(visitor.page.get_by_label("token")).to_be_visible()
    visitor.page.goto(f"{house.url}/fleet")
    expect(visitor.page.get_by_label("token")).to_be_visible()
    visitor.close()


def test_the_address_with_the_token_opens_the_dashboard_also_where_the_login_page_stands(
    house: House, chromium: Any
) -> None:
    visitor = Visitor(house, chromium.new_context())
    visitor.page.goto(f"{house.url}/")
    expect(visitor.page.get_by_label("token")).to_be_visible()
    visitor.page.goto(make_login_url(house.url, house.secrets["viewer"]))
    expect(visitor.page.get_by_role("heading", name="Home")).to_be_visible()
    assert "token" not in visitor.page.url
    visitor.close()


def test_a_turn_arrives_while_somebody_watches(house: House, visit: Visit) -> None:
    page = visit("viewer").open("/session/desk-1")
    house.send("good evening")
    expect(page.get_by_text("A good evening to you.")).to_be_visible()
    expect(page.get_by_label("Events", exact=True).get_by_text(re.compile(r"turn \d+ ends"))).not_to_have_count(0)


def test_a_session_counts_its_whole_life_and_not_only_what_is_shown(house: House, visit: Visit) -> None:
    house.wait_until(lambda: house.is_idle("desk-1"))
    events = house.run(queries.read_all_events(house.app, session_stream("desk-1")))
    turns = sum(stored.kind == "turn_started" for stored in events)
    calls = sum(stored.kind == "call_started" for stored in events)
    used = [stored.event.usage for stored in events if isinstance(stored.event, RequestSettled) and stored.event.usage]
    page = visit("viewer").open("/session/desk-1")
    stats = page.get_by_role("region", name="Session")
    expect(stats).to_contain_text(re.compile(rf"{calls} calls?{turns} turns?, 0 refused"))
    expect(stats).to_contain_text(f"{sum(each.input_tokens + each.output_tokens for each in used):,}")


def test_words_that_a_person_says_on_the_page_wake_the_session(visit: Visit) -> None:
    page = visit("operator").open("/session/desk-1")
    press(page, "Message…")
    dialog(page).get_by_label("Message", exact=True).fill("How are you, desk?")
    press(dialog(page), "Send")
    expect(page.get_by_text("How are you, desk?")).to_be_visible()


def test_a_call_is_approved_on_the_page_and_runs_once(house: House, visit: Visit) -> None:
    page = visit("approver").open("/")
    house.send("pay bob")
    card = page.get_by_role("article", name="desk wants to pay to bob, amount 5")
    expect(card.get_by_label("Arguments", exact=True)).to_contain_text("bob")
    press(card, "Approve pay")
    expect(page.get_by_text("Approved: pay of desk")).to_be_visible()
    expect(card).to_have_count(0)
    house.wait_until(lambda: house.is_idle("desk-1"))
    assert house.list_payments().count("bob 5") == 1


def test_a_person_who_is_sent_to_one_decision_finds_it_alone_and_sees_when_it_is_answered(
    house: House, visit: Visit
) -> None:
    house.send("pay ruth")
    page = visit("approver").open("/")
    expect(page.get_by_role("article", name="desk wants to pay to ruth, amount 5")).to_be_visible()
    person = next(person for person in house.run(waiting(house.desk)) if "ruth" in person.display_text)
    page.goto(f"{house.url}/decision/{person.decision}")
    press(page.get_by_role("article", name="desk wants to pay to ruth, amount 5"), "Approve pay")
    expect(page.get_by_text(f"{person.decision} was already answered (approve, by approver).")).to_be_visible()
    expect(page.get_by_role("article")).to_have_count(0)
    house.wait_until(lambda: house.is_idle("desk-1"))


def test_a_call_is_approved_with_other_arguments_and_only_those(house: House, visit: Visit) -> None:
    page = visit("approver").open("/")
    house.send("pay dora")
    press(page, "Edit the arguments of pay")
    form = dialog(page)
    form.get_by_label("Arguments, as").fill("{not json")
    press(form, "Approve this")
    expect(form.get_by_role("alert")).to_contain_text("The arguments are not a JSON object")
    form.get_by_label("Arguments, as").fill('{"to": "carol", "amount": 7}')
    press(form, "Approve this")
    expect(page.get_by_text("Approved with your arguments")).to_be_visible()
    house.wait_until(lambda: house.is_idle("desk-1"))
    assert house.list_payments()[-1] == "carol 7"
    assert not any(line.startswith("dora") for line in house.list_payments())


def test_a_call_is_denied_with_a_reason_that_the_model_gets(house: House, visit: Visit) -> None:
    page = visit("approver").open("/")
    house.send("pay erin")
    press(page, "Deny pay")
    dialog(page).get_by_label("Reason").fill("We do not know her.")
    press(dialog(page), "Deny")
    expect(page.get_by_text("Denied: pay of desk")).to_be_visible()
    house.wait_until(lambda: house.is_idle("desk-1"))
    assert not any(line.startswith("erin") for line in house.list_payments())
    page.goto(f"{house.url}/session/desk-1")
    result = page.get_by_role("region", name="Transcript")
    expect(result.get_by_text("yield", exact=True)).not_to_have_count(0)
    result.get_by_role("checkbox", name="Only calls with problems").click()
    expect(result.get_by_text("Denied", exact=True)).to_be_visible()
    expect(result.get_by_text("yield", exact=True)).to_have_count(0)


def test_always_makes_a_rule_for_the_given_time(house: House, visit: Visit) -> None:
    page = visit("approver").open("/")
    house.send("pay fred")
    press(page, "Always allow pay")
    dialog(page).get_by_label("Duration").fill("soon")
    press(dialog(page), "Approve and create rule")
    expect(dialog(page).get_by_role("alert")).to_contain_text("not a duration")
    dialog(page).get_by_label("Duration").fill("1h")
    expect(dialog(page).get_by_text("with exactly the same arguments")).to_be_visible()
    dialog(page).get_by_label("Custom conditions").fill("any:amount")
    press(dialog(page), "Approve and create rule")
    expect(page.get_by_text("amount is anything")).to_be_visible()


def test_a_session_at_its_cap_resumes_when_the_cap_is_raised(house: House, visit: Visit) -> None:
    page = visit("approver").open("/")
    press(page, "Raise the cap…")
    dialog(page).get_by_label("New cap in dollars").fill("0.001")
    press(dialog(page), "Raise the cap")
    expect(dialog(page).get_by_role("alert")).to_contain_text("Give a higher one.")
    dialog(page).get_by_label("New cap in dollars").fill("2")
    press(dialog(page), "Raise the cap")
    expect(page.get_by_text("is now $2.00.")).to_be_visible()
    expect(page.get_by_role("button", name="Raise the cap…")).to_have_count(0)
    house.wait_until(lambda: house.is_idle("miser-1"))


def test_an_operator_changes_a_cap_and_a_slip_is_rejected(visit: Visit) -> None:
    page = visit("operator").open("/budgets")
    row = (
        page.get_by_role("table", name="Caps")
        .get_by_role("row")
        .filter(has=page.get_by_role("link", name="desk", exact=True))
    )
    press(row, "Raise the cap of agent:desk")
    dialog(page).get_by_label("New cap in dollars").fill("1")
    press(dialog(page), "Raise")
    expect(dialog(page).get_by_role("alert")).to_contain_text("would not raise it")
    dialog(page).get_by_label("New cap in dollars").fill("6.50")
    press(dialog(page), "Raise")
    expect(row.get_by_text("$6.50").first).to_be_visible()
    press(row, "Lower the cap of agent:desk")
    dialog(page).get_by_label("New cap in dollars").fill("6.25")
    press(dialog(page), "Lower")
    expect(row.get_by_text("$6.25").first).to_be_visible()


def test_budgets_are_grouped_and_summed_up_by_model_and_over_days(paid: House, visit: Visit) -> None:
    page = visit("viewer").open("/budgets")
    names = page.get_by_role("table", name="Caps").locator("tbody td:first-child").all_inner_texts()
    assert names[0] == "The whole fleet"
    assert names.index("desk") < names.index("desk-1")
    by_model = page.get_by_role("table", name="By model").get_by_role("row").filter(has_text="scripted:script")
    expect(by_model).to_contain_text("$")
    for text in ("14 days", "8 weeks"):
        page.get_by_label("Period").click()
        page.get_by_role("option", name=text).click()
        expect(page.get_by_text("Nothing spent in this period.")).to_be_hidden()
    page.get_by_label("In the last").click()
    page.get_by_role("option", name="30 days").click()
    expect(by_model).to_be_visible()


def test_a_trigger_is_paused_resumed_and_run_now(visit: Visit) -> None:
    page = visit("operator").open("/triggers")
    row = page.get_by_role("table", name="Triggers").get_by_role("row").filter(has_text="clerk/yearly")
    expect(row.get_by_text("Ready")).to_be_visible()
    press(row, "Pause clerk/yearly")
    dialog(page).get_by_label("Reason").fill("It is counted already.")
    press(dialog(page), "Pause")
    expect(row.get_by_text("by operator: It is counted already.")).to_be_visible()
    press(row, "Resume clerk/yearly")
    press(dialog(page), "Resume")
    expect(row.get_by_text("Ready")).to_be_visible()
    press(row, "Run now: clerk/yearly")
    expect(page.get_by_text("clerk/yearly runs in session")).to_be_visible()


def test_a_quarantined_document_is_retried(house: House, visit: Visit) -> None:
    page = visit("operator").open("/triggers")
    result = page.get_by_role("table", name="Quarantined documents").locator("tbody tr").first
    press(result, "Retry")
    expect(page.get_by_role("alert").filter(has_text="clerk/papers retries").first).to_be_visible()


def test_a_new_schedule_is_asked_for_and_confirmed_on_home(visit: Visit) -> None:
    page = visit("operator").open("/triggers")
    press(page, "New schedule…")
    form = dialog(page)
    form.get_by_label("Task").fill("sort the letters")
    form.get_by_label("When").fill("quite soon")
    press(form, "Create")
    expect(form.get_by_role("alert")).to_contain_text("cannot be read as times")
    form.get_by_label("When").fill("every day at 7:00")
    press(form, "Create")
    expect(page.get_by_text("confirm it on Home")).to_be_visible()
    page.goto(page.url.replace("/triggers", "/"))
    card = page.get_by_role("article").filter(has_text="Schedule")
    press(card, "Approve")
    expect(page.get_by_text("clerk").first).to_be_visible()
    page.goto(page.url + "triggers")
    row = page.get_by_role("row").filter(has_text="sort the letters")
    press(row, "End")
    press(dialog(page), "End")
    expect(row).to_have_count(0)


def test_safe_calls_are_shown_on_demand_and_a_time_is_picked(house: House, visit: Visit) -> None:
    house.send("read the note")
    house.wait_until(lambda: house.is_idle("desk-1"))
    page = visit("viewer").open("/audit")
    calls = page.get_by_role("table", name="Calls")
    expect(calls.get_by_text("read_page")).to_have_count(0)
    page.get_by_role("checkbox", name="Include SAFE calls").click()
    press(page, "Search")
    expect(calls.get_by_text("read_page").first).to_be_visible()
    page.get_by_label("When").click()
    page.get_by_role("option", name="From … to …").click()
    page.get_by_label("To", exact=True).fill("2020-01-01T08:30")
    page.get_by_label("From", exact=True).fill("2019-01-01T08:30")
    press(page, "Search")
    expect(page.get_by_text("No matching calls.")).to_be_visible()


def test_sessions_are_searched_filtered_and_paged(house: House, visit: Visit) -> None:
    for number in range(30):
        house.start_session(f"archive-{number:02}")
    page = visit("viewer").open("/sessions?agent=archive")
    rows = page.get_by_role("table", name="Sessions").locator("tbody tr")
    expect(rows).to_have_count(25)
    press(page, "Older")
    expect(rows).to_have_count(30)
    page.get_by_label("Search").fill("archive-07")
    expect(rows).to_have_count(1)
    page.get_by_label("State").click()
    page.get_by_role("option", name="Ended badly").click()
    expect(page.get_by_text("No matching session.")).to_be_visible()
    # The address leads back to what is shown.
    expect(page).to_have_url(re.compile(r"\?agent=archive&state=Ended\+badly$"))
    page.reload()
    expect(page.get_by_text("No matching session.")).to_be_visible()


def test_sessions_of_a_watch_are_named_by_their_documents(visit: Visit) -> None:
    page = visit("viewer").open("/sessions?agent=clerk")
    titles = page.get_by_role("table", name="Sessions").get_by_role("link", name=": A paper has come in.")
    expect(titles).not_to_have_count(0)
    names = titles.all_inner_texts()
    assert len(set(names)) == len(names)
    assert all(name.endswith(".txt: A paper has come in.") for name in names)


def test_a_session_is_cancelled_on_its_page(house: House, visit: Visit) -> None:
    house.start_session("archive-99")
    page = visit("operator").open("/session/archive-99")
    press(page, "Cancel session…")
    dialog(page).get_by_label("Reason").fill("We need them.")
    press(dialog(page), "Cancel the session")
    expect(page.get_by_text("Session archive-99 is cancelled.")).to_be_visible()
    expect(page.get_by_role("button", name="Message…")).to_have_count(0)


def test_findings_are_dismissed_together(house: House, visit: Visit) -> None:
    house.send("look around")
    house.wait_until(lambda: house.is_idle("desk-1"))
    page = visit("approver").open("/findings")
    expect(page.get_by_text("Door 2 is open")).to_be_visible()
    result = page.get_by_role("article").filter(has_text="Door 1 is open")
    press(result, "Accept")
    expect(result).to_have_count(0)
    page.get_by_label("Show").click()
    page.get_by_role("option", name="All", exact=True).click()
    expect(result.get_by_text("accepted by approver")).to_be_visible()
    press(page, "Dismiss all shown…")
    dialog(page).get_by_label("Reason").fill("They are closed by now.")
    press(dialog(page), "Dismiss all")
    expect(page.get_by_text(re.compile(r"\d+ findings? dismissed"))).to_be_visible()
    gone = page.get_by_role("article").filter(has_text="Door 2 is open")
    expect(gone.get_by_text("dismissed by approver")).to_be_visible()


def test_one_finding_is_dismissed_with_a_reason(house: House, visit: Visit) -> None:
    house.send("look again")
    page = visit("approver").open("/findings")
    result = page.get_by_role("article").filter(has_text="A window is open")
    press(result, "Dismiss")
    expect(dialog(page)).to_contain_text("Future sessions will not see it.")
    dialog(page).get_by_label("Reason").fill("It is summer.")
    press(dialog(page), "Dismiss")
    expect(result).to_have_count(0)
    house.wait_until(lambda: house.is_idle("desk-1"))


def test_what_an_agent_proposes_is_kept_on_home_or_among_the_findings(house: House, visit: Visit) -> None:
    house.send("note it down")
    page = visit("approver").open("/")
    press(page.get_by_role("article").filter(has_text="Gina is paid on Mondays."), "Accept")
    expect(page.get_by_text(re.compile("Saved. Future sessions of desk will see: memory"))).to_be_visible()
    house.wait_until(lambda: house.is_idle("desk-1"))
    house.send("note that down")
    page.goto(f"{house.url}/findings")
    proposed = page.get_by_role("article").filter(has_text="Bob is paid on Fridays.")
    press(proposed, "Accept")
    expect(proposed.get_by_text("accepted by approver")).to_be_visible()
    house.wait_until(lambda: house.is_idle("desk-1"))


def test_a_question_of_an_agent_is_answered_on_home(house: House, visit: Visit) -> None:
    house.send("who is ivy")
    page = visit("operator").open("/")
    card = page.get_by_role("article", name="desk asks: Who is Ivy?")
    press(card, "Answer desk")
    dialog(page).get_by_label("Your answer").fill("She is my aunt.")
    press(dialog(page), "Answer")
    expect(page.get_by_text("Message sent")).to_be_visible()
    expect(card).to_have_count(0)
    house.wait_until(lambda: house.is_idle("desk-1"))


def test_a_call_that_nobody_knows_the_outcome_of_is_settled_by_a_person(house: House, visit: Visit) -> None:
    question = Question(
        decision="archive-50/unknown", about="unknown_call", subject="archive-50.1", name="post_parcel",
        digest="x", expires_in=DAY, display_text='post_parcel {"to": "ivy"}', agent="archive",
    )  # fmt: skip
    house.run(house.app.store.commit(ask_question(question, house.claim("archive-50"))))
    page = visit("approver").open("/")
    card = page.get_by_role("article", name="the outcome is unknown")
    expect(card).to_contain_text("In doubt")
    press(card, "It was done")
    sentence = "Recorded: the call of post_parcel was made (archive-50.1). It is not repeated."
    expect(page.get_by_text(sentence)).to_be_visible()
    expect(card).to_have_count(0)


def test_the_audit_is_paged_to_what_is_older_and_ends(house: House, visit: Visit) -> None:
    lease = house.claim("archive-60")
    calls = [CallStarted(call=f"archive-60.{number}", tool="stamp", audit="arguments") for number in range(60)]
    rows = [(AuditRow, each.call) for each in calls]
    stamped = Write(session_stream("archive-60"), "stamped", lambda _: [Draft(each) for each in calls], rows, lease)
    house.run(house.app.store.commit(stamped))
    page = visit("viewer").open("/audit")
    page.get_by_label("Session").fill("archive-60")
    press(page, "Search")
    rows = page.get_by_role("table", name="Calls").locator("tbody tr")
    expect(page.get_by_text("50 shown, newest first.")).to_be_visible()
    # The address leads back to the search.
    expect(page).to_have_url(re.compile(r"/audit\?session=archive-60$"))
    page.reload()
    expect(page.get_by_text("50 shown, newest first.")).to_be_visible()
    press(page, "Older")
    expect(page.get_by_text("60 shown, newest first.")).to_be_visible()
    expect(rows).to_have_count(60)
    expect(page.get_by_role("button", name="Older")).to_have_count(0)


def test_a_document_and_a_cap_are_settled_on_their_cards_on_home(house: House, visit: Visit) -> None:
    page = visit("operator").open("/")
    press(page.get_by_role("article", name="clerk/papers quarantined a document").first, "Retry")
    expect(page.get_by_text("clerk/papers retries")).to_be_visible()
    (amount,) = (
        row.spent
        for row in house.run(money.list_budgets(house.desk))
        if row.scope == "agent:miser" and row.unit == "usd"
    )
    house.run(money.set_cap(house.desk, "lower", "agent:miser", str(amount)))
    press(page, "Raise the cap of agent:miser")
    dialog(page).get_by_label("New cap in dollars").fill("5")
    press(dialog(page), "Raise")
    expect(page.get_by_text("The cap of agent:miser was changed.")).to_be_visible()
    expect(page.get_by_role("button", name="Raise the cap of agent:miser")).to_have_count(0)


def test_an_id_is_copied_whole(visit: Visit) -> None:
    page = visit("viewer").open("/session/desk-1")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    press(page, "Copy desk-1")
    assert page.evaluate("navigator.clipboard.readText()") == "desk-1"


def test_a_phone_can_install_the_dashboard(visit: Visit) -> None:
    page = visit("viewer").open("/")
    manifest = page.request.get(page.url + page.locator("link[rel=manifest]").get_attribute("href").lstrip("/"))
    payload = manifest.json()
    assert (payload["name"], payload["display"], payload["start_url"]) == ("Halter", "standalone", "/")
    for icon in payload["icons"]:
        assert page.request.get(page.url + icon["src"].lstrip("/")).ok


def test_halt_all_says_what_it_stops_and_everything_stops_until_somebody_resumes(house: House, visit: Visit) -> None:
    page, watcher = visit("approver").open("/fleet"), visit("viewer").open("/")
    press(page, "HALT ALL")
    expect(dialog(page)).to_contain_text(re.compile(r"Stops \d+ active sessions?"))
    dialog(page).get_by_label("Reason").fill("It smells of smoke.")
    press(dialog(page), "Halt everything")
    pattern = re.compile("Everything is halted since .*, by approver: It smells of smoke.")
    for each in (page, watcher):
        expect(each.get_by_text(pattern)).to_be_visible()
    expect(agent_row(page, "desk").get_by_text("Halted", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Resume…")).to_have_count(0)
    house.wait_until(lambda: all(house.row(name).ended_at is not None for name in ("desk-1", "miser-1")))

    operator = visit("operator").open("/")
    press(operator, "Resume…")
    dialog(operator).get_by_label("over").fill("0s")
    press(dialog(operator), "Resume")
    expect(watcher.get_by_text("Everything is halted")).to_have_count(0)
    expect(agent_row(page, "desk-1").get_by_text(re.compile("Sleeping|Running"))).to_be_visible()


def test_an_agent_is_switched_off_and_on_again(house: House, visit: Visit) -> None:
    page = visit("operator").open("/fleet")
    switch = page.get_by_role("switch", name="miser runs unattended")
    switch.click()
    expect(dialog(page)).to_contain_text("Off: triggers and wakes are ignored until you switch it on.")
    press(dialog(page), "Switch off")
    expect(page.get_by_text("miser is off; ")).to_be_visible()
    expect(switch).not_to_be_checked()
    expect(agent_row(page, "miser").get_by_text("by operator")).to_be_visible()
    switch.click()
    press(dialog(page), "Switch on")
    expect(page.get_by_text("miser is on: it runs where")).to_be_visible()
    expect(agent_row(page, "miser").get_by_role("link", name="miser-2")).to_be_visible()


def test_a_policy_is_tried_on_the_past_of_an_agent_before_it_is_applied(house: House, visit: Visit) -> None:
    page = visit("viewer").open("/agent/desk")
    press(page, TRY)
    press(dialog(page), "Run backtest")
    expect(dialog(page).get_by_role("alert")).to_contain_text("enter a cap or a policy")
    dialog(page).get_by_label("Session cap").fill("0.01")
    press(dialog(page), "Run backtest")
    definition = page.get_by_role("region", name="Definition")
    expect(definition).to_contain_text("policy: the recorded policy, with a cap of $0.01 per session")
    expect(definition).to_contain_text("judged: ")


def test_the_page_of_an_agent_says_what_it_is_what_it_did_and_what_it_senses(house: House, visit: Visit) -> None:
    house.send("look at the thermometer")
    house.wait_until(lambda: house.is_idle("desk-1"))
    page = visit("viewer").open("/fleet")
    agent_row(page, "desk").get_by_role("link", name="desk", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("desk")
    definition = page.get_by_role("region", name="Definition")
    expect(definition).to_contain_text("scripted:script")
    expect(definition).to_contain_text("$5.00 per day")
    senses = page.get_by_role("region", name="Sensors and hot state")
    expect(senses.get_by_role("listitem").filter(has_text="thermometer").get_by_text("OK", exact=True)).to_be_visible()
    expect(senses.get_by_role("img", name="temperature in the newest turns")).to_be_visible()
    page.get_by_role("region", name="Sessions").get_by_role("link", name="desk-1").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("desk-1")


def test_an_agent_is_spoken_to_halted_and_switched_on_its_page(visit: Visit) -> None:
    page = visit("operator").open("/agent/miser")
    press(page, "Message…")
    dialog(page).get_by_label("Message", exact=True).fill("How is the purse?")
    press(dialog(page), "Send")
    expect(page.get_by_text("message sent; it wakes")).to_be_visible()
    press(page, "Halt miser")
    press(dialog(page), "Halt")
    now = page.get_by_role("region", name="Now")
    expect(now.get_by_text("Agent miser was halted by operator")).to_be_visible()
    press(now, "Resume…")
    press(dialog(page), "Resume")
    expect(now.get_by_text("Halted")).to_have_count(0)
    press(page, "Switch off…")
    press(dialog(page), "Switch off")
    expect(now.get_by_text("Switched off")).to_be_visible()
    press(page, "Switch on…")
    press(dialog(page), "Switch on")
    expect(now.get_by_text("Switched off")).to_have_count(0)


def test_a_session_is_started_on_the_page_of_an_agent(house: House, visit: Visit) -> None:
    page = visit("operator").open("/agent/clerk")
    press(page, "Start a session…")
    dialog(page).get_by_label("Task", exact=True).fill("Count the papers.")
    press(dialog(page), "Start")
    expect(page.get_by_text("clerk is working on it in session")).to_be_visible()


def test_one_agent_is_halted_and_let_go_again(visit: Visit) -> None:
    page = visit("operator").open("/fleet")
    row = agent_row(page, "miser")
    press(row, "Halt miser")
    press(dialog(page), "Halt")
    expect(row.get_by_text("Agent miser was halted by operator")).to_be_visible()
    press(row, "Resume miser")
    press(dialog(page), "Resume")
    expect(row.get_by_text("Halted")).to_have_count(0)
    expect(row.get_by_role("button", name="Resume miser")).to_have_count(0)


def test_what_is_halted_is_resumed_from_its_card_on_home(house: House, visit: Visit) -> None:
    house.run(control.halt(house.desk, "agent:miser", "to look at it"))
    page = visit("operator").open("/")
    card = page.get_by_role("article", name="Agent miser was halted by grace")
    expect(card.get_by_role("link", name="Agent miser")).to_have_attribute("href", "/agent/miser")
    card.get_by_role("button", name="Resume agent:miser", exact=True).click()
    press(dialog(page), "Resume")
    expect(card).to_have_count(0)
    assert not [row for row in house.run(control.halts_now(house.desk)) if row.scope == "agent:miser"]


def test_a_paused_agent_is_switched_on_from_its_card_on_home(house: House, visit: Visit) -> None:
    lease = house.claim("archive-9")
    parked = SessionParked(state="PAUSED", inbox_seen=0)
    house.run(house.app.store.commit(park_session(lease, "archive-9/paused", parked)))
    page = visit("operator").open("/")
    card = page.get_by_role("article", name="archive is paused in session archive-9")
    card.get_by_role("button", name="Switch on archive", exact=True).click()
    press(dialog(page), "Switch on")
    expect(page.get_by_text("archive is on: it runs where")).to_be_visible()
    agents = {line.agent: line.on for line in house.run(queries.fleet(house.desk))}
    assert agents["archive"] is True


def test_workers_come_change_and_go_while_somebody_watches(house: House, visit: Visit) -> None:
    page = visit("viewer").open("/fleet")
    rows = page.get_by_role("table", name="Workers").get_by_role("row")
    result = rows.filter(has_text=f"halter up {os.getpid()} on")
    expect(result.get_by_text("alive")).to_be_visible()
    expect(result).to_contain_text(re.compile(r"clerk \w{12}\s+desk \w{12}\s+miser \w{12}"))

    other, name = rows.filter(has_text="halter worker 4711 on north"), WorkerId("another")
    worker_info = WorkerInfo(kind="worker", host="north", pid=4711, agents={"desk": "2"}, concurrency=100, awake=7)
    house.run(house.app.store.beat(name, {}, worker_info.encode()))
    expect(other.get_by_text("alive")).to_be_visible()
    expect(other.get_by_text("7 of 100")).to_be_visible()
    house.run(house.app.store.beat(name, {}, replace(worker_info, closing=True).encode()))
    expect(other.get_by_text("draining")).to_be_visible()
    expect(other).to_contain_text("ends when its running turns have finished")
    house.run(house.app.store.leave(name))
    expect(other).to_have_count(0)
    expect(result).to_be_visible()


def test_the_audit_is_searched_and_taken_along(paid: House, visit: Visit) -> None:
    page = visit("viewer").open("/audit")
    page.get_by_label("Text", exact=True).fill("gina")
    page.get_by_label("Text", exact=True).press("Enter")
    calls = page.get_by_role("table", name="Calls")
    expect(calls.get_by_role("row")).to_have_count(2)
    expect(calls.get_by_text("pay", exact=True)).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Export as JSON lines").click()
    assert download.value.suggested_filename == "audit.jsonl"
    (line,) = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert (line["tool"], line["outcome"], line["decided_by"]) == ("pay", "ok", "approver")


def test_a_search_that_finds_nothing_says_so(visit: Visit) -> None:
    page = visit("viewer").open("/audit")
    page.get_by_label("Agent").fill("nobody")
    press(page, "Search")
    expect(page.get_by_text("No matching calls.")).to_be_visible()


def test_a_receipt_is_opened_and_the_session_taken_along(paid: House, visit: Visit) -> None:
    page = visit("viewer").open("/session/desk-1")
    page.get_by_role("link", name="Receipt").click()
    expect(page.get_by_role("heading", name="Calls and requests")).to_be_visible()
    expect(page.get_by_text("approved by approver").first).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Export").click()
    assert download.value.suggested_filename == "desk-1.jsonl"
    assert Path(download.value.path()).read_text().count("\n") > 10


def test_a_viewer_is_shown_no_button_that_they_may_not_press(visit: Visit) -> None:
    visitor = visit("viewer")
    for path in ("/", "/fleet", "/agent/desk", "/session/desk-1", "/budgets", "/triggers", "/findings"):
        page = visitor.open(path)
        buttons = page.get_by_role("button").all()
        names = {button.get_attribute("aria-label") or button.inner_text() for button in buttons}
        assert {name for name in names - HARMLESS if not name.startswith("Copy ")} <= {""}, path


def test_what_does_not_exist_is_reported_in_a_sentence(visit: Visit) -> None:
    visitor = visit("viewer")
    answer = visitor.page.goto(f"{visitor.house.url}/session/nobody-7")
    assert answer.status == 404
    expect(visitor.page.get_by_text("There is no session 'nobody-7'")).to_be_visible()
    # The browser itself notes that a page was not found.
    visitor.complaints.clear()


@pytest.mark.parametrize("path", ["/nowhere", "/fleet/of/ships", "/agent/nobody"])
def test_an_address_that_leads_nowhere_says_so_and_leads_on(visit: Visit, path: str) -> None:
    visitor = visit("viewer")
    answer = visitor.page.goto(f"{visitor.house.url}{path}")
    assert answer.status == 404
    expect(visitor.page.get_by_role("alert").get_by_text("Not found")).to_be_visible()
    assert visitor.page.title() == "Not found · Halter"
    visitor.page.get_by_role("alert").get_by_role("link", name="Fleet").click()
    expect(visitor.page.get_by_role("heading", level=1)).to_have_text("Fleet")
    visitor.complaints.clear()


def test_a_store_that_is_away_has_a_page_that_leads_back(house: House, visit: Visit) -> None:
    visitor = visit("viewer")
    house.store.trouble = StoreUnavailable("The store cannot be reached.")
    try:
        answer = visitor.page.goto(f"{house.url}/budgets")
        assert answer.status == 503
        expect(visitor.page.get_by_role("alert")).to_contain_text("Nothing is lost")
    finally:
        house.store.trouble = None
    visitor.page.get_by_role("link", name="Retry").click()
    expect(visitor.page.get_by_role("heading", level=1)).to_have_text("Budgets")
    visitor.complaints.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_follows_the_theme_of_the_system_and_a_switch_is_kept(visit: Visit, scheme: str) -> None:
    visitor = visit("viewer", scheme=scheme)
    page = visitor.open("/")
    text = {"light": "dark", "dark": "light"}[scheme]
    expect(page.locator("body")).to_have_class(re.compile(f"body--{scheme}"))
    press(page, "Switch between light and dark")
    expect(page.locator("body")).to_have_class(re.compile(f"body--{text}"))
    visitor.open("/fleet")
    expect(page.locator("body")).to_have_class(re.compile(f"body--{text}"))


def test_everything_is_reached_by_keyboard_and_seen_to_be(house: House, visit: Visit) -> None:
    page = visit("admin").open("/fleet")
    results = set(page.evaluate(CONTROLS))
    reached, unseen = set[str](), set[str]()
    for _ in range(len(results) + 20):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(FOCUSED)
        reached.add(name)
        unseen |= set() if outline else {name}
    assert results <= reached
    assert unseen - {"BODY"} == set()
    page.get_by_role("button", name="HALT ALL").focus()
    page.keyboard.press("Enter")
    expect(dialog(page).get_by_label("Reason")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog(page)).to_have_count(0)
    assert not [row for row in house.run(control.halts_now(house.desk)) if row.scope == "fleet"]


CONTROLS = """() => [...document.querySelectorAll('a[href], button, input, [role=switch], [role=checkbox]')]
    .filter(e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0).map(e => e.ariaLabel || e.innerText || e.id)"""

FOCUSED = """() => {
    const e = document.activeElement, style = getComputedStyle(e);
    return [e === document.body ? 'BODY' : e.ariaLabel || e.innerText || e.id,
            style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2];
}"""

"""Home: what needs a person, what happened overnight, what was spent against caps, and what was sent."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta

import msgspec
from nicegui.element import Element

from halter.core.clock import SECOND, format_duration, parse_duration
from halter.core.money import format_usd
from halter.dashboard.page import REASON, FeedChanges, FormField, FormValues, OpenPage, RefreshPage, open_dialog
from halter.dashboard.parts import (
    KeyedList,
    TextLabel,
    add_box,
    add_button,
    add_chip,
    add_facts,
    add_link,
    add_listing,
    add_preformatted,
    add_section,
    add_text,
    make_legible,
)
from halter.dashboard.records import add_budget_bar, list_current_budgets
from halter.operations import decisions, money, queries
from halter.operations.decisions import SAME, ApprovalTerms, Put, WaitingDecision, offers, put, waiting
from halter.operations.report import Report
from halter.present.events import format_moment, format_relative_moment
from halter.present.report import build_agents_table
from halter.runtime.budgets import Budget

DANGEROUS_LEVELS = ("HIGH", "CRITICAL")


def build_decision_card(room: OpenPage, one: WaitingDecision) -> Callable[[WaitingDecision], None]:
    """Shows a decision. Only its age changes later."""
    asked = put(one)
    danger = one.risk in DANGEROUS_LEVELS
    with add_box("article", f"h-card h-ask {'h-danger' if danger else ''}", asked.what):
        add_text(asked.what, "h-what")
        with add_box("div", "h-row"):
            add_chip(_kind(one))
            if one.risk:
                add_chip(f"risk {one.risk}", "bad" if danger else "look")
            age = add_text(_age(room, one), "h-dim")
        add_facts([("why", "; ".join(one.reasons)), ("agent", one.agent)])
        if one.session:
            add_link(f"session {one.session}", f"/session/{one.session}")
        if asked.shown:
            add_preformatted(indent_json(asked.shown))
        if room.may("approver"):
            _answers(room, one, asked)
    return lambda later: _update_age(room, age, later)


def _update_age(room: OpenPage, age: TextLabel, one: WaitingDecision) -> None:
    age.say(_age(room, one))


def _age(room: OpenPage, one: WaitingDecision) -> str:
    return f"waits {_seconds(room.now - one.asked_at)}, expires in {_seconds(one.expires_at - room.now)}"


def _seconds(micros: int) -> str:
    return format_duration(micros) if micros >= SECOND else "0s"


def _kind(one: WaitingDecision) -> str:
    return one.about.replace("_", " ")


def indent_json(text: str) -> str:
    """Indents JSON; returns other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _answers(room: OpenPage, one: WaitingDecision, asked: Put) -> None:
    with add_box("div", "h-row"):
        if one.about == "cap_raise":
            add_button("Raise the cap…", lambda: _ask_raise(room, one), "yes")
        else:
            add_button("Approve", lambda: _approve(room, one), "yes", f"Approve {one.name}: {asked.yes}")
        add_button("Deny…", lambda: _ask_denial(room, one, asked), "plain", f"Deny {one.name}")
        if one.about == "approval":
            add_button("Edit…", lambda: _ask_edit(room, one, asked), "plain", f"Edit the arguments of {one.name}")
            add_button("Always…", lambda: _ask_always(room, one), "plain", f"Always allow {one.name}")


async def _approve(room: OpenPage, one: WaitingDecision) -> None:
    await room.does(_send_approval(room, one, ApprovalTerms()))


async def _send_approval(room: OpenPage, one: WaitingDecision, answer: ApprovalTerms) -> str:
    return (await decisions.approve(room.desk, one.decision, answer)).sentence


def _ask_denial(room: OpenPage, one: WaitingDecision, asked: Put) -> None:
    async def do(given: FormValues) -> str:
        return (await decisions.deny(room.desk, one.decision, given["reason"])).sentence

    open_dialog(room, f"Deny {one.name}?", f"{asked.no}.", (REASON,), "Deny", do, "stop")


def _ask_edit(room: OpenPage, one: WaitingDecision, asked: Put) -> None:
    async def do(given: FormValues) -> str:
        edited = decisions.arguments(given["arguments"].encode("utf-8", "replace"), "")
        return await _send_approval(room, one, ApprovalTerms(edit=edited, reason=given["reason"]))

    says = "It is called once, with the arguments below in place of the model's."
    arguments = FormField("arguments", "Arguments, as a JSON object", indent_json(asked.shown), "text")
    open_dialog(room, f"Approve {one.name} with other arguments?", says, (arguments, REASON), "Approve this", do)


def _ask_always(room: OpenPage, one: WaitingDecision) -> None:
    offered = {make_legible(each.sentence): each.match for each in offers(one)} or {
        "with exactly the same arguments": SAME
    }

    async def do(given: FormValues) -> str:
        lasts, match = parse_duration(given["lasts"]), given["own"].strip() or offered[given["match"]]
        answer = ApprovalTerms(always=True, match=match, scope=given["scope"], lasts=lasts, reason=given["reason"])
        return await _send_approval(room, one, answer)

    fields = (
        FormField("match", "Which calls", next(iter(offered)), "choice", tuple(offered)),
        FormField("own", "Or in your own words, one to a line", "", "text"),
        FormField("scope", "Where", "session", "choice", ("session", "agent", "fleet")),
        FormField("lasts", "For how long", "7d"),
        REASON,
    )
    each = "\n".join(f"- {sentence}" for sentence in offered)
    says = (
        f"This call is approved, and from now on such calls need no approval. You may choose:\n{each}\n"
        "Or write which arguments may differ, and how: words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST, any:KEY."
    )
    open_dialog(room, f"Always allow {one.name}?", says, fields, "Approve, and always", do)


def _ask_raise(room: OpenPage, one: WaitingDecision) -> None:
    async def do(given: FormValues) -> str:
        cap = money.amount_of(given["cap"].strip())
        return await _send_approval(room, one, ApprovalTerms(cap=(cap,), reason=given["reason"]))

    cap = FormField("cap", "New cap in dollars, or none")
    open_dialog(room, f"Raise the cap of {one.subject}?", put(one).shown, (cap, REASON), "Raise the cap", do)


EVENING_HOUR = 18


async def build_home_page(room: OpenPage) -> RefreshPage:
    with add_section("Needs you"):
        cards = KeyedList[WaitingDecision](
            add_box("div", "h-cards"), lambda one: build_decision_card(room, one), "Nothing needs you."
        )
    night = add_section("Last night", card=True)
    with add_box("div", "h-two"):
        caps = add_section("Spent against caps", card=True)
        with add_section("Told", card=True):
            told = KeyedList[queries.AgentNews](
                add_box("ul", "h-list"), lambda one: _build_news_row(room, one), "Nothing was told."
            )
    bars = KeyedList[Budget](caps, add_budget_bar, "Nothing was spent yet.")
    seen: list[Report] = []

    async def refresh(grown: FeedChanges) -> None:
        cards.show({one.decision: one for one in await waiting(room.desk)})
        if grown.written or not seen:
            await _show_night(room, night, seen)
            rows = await list_current_budgets(room)
            bars.show({(row.scope, row.window): row for row in rows if row.unit == "usd"})
            news = await queries.read_news(room.desk, find_last_evening(room.now))
            told.show({(one.queued_at, one.agent, one.subject): one for one in news})

    await refresh(FeedChanges(everything=True))
    return refresh


def find_last_evening(now: int) -> int:
    """Returns the evening before, so that a morning shows the night."""
    local = datetime.fromtimestamp(now / SECOND, UTC).astimezone()
    evening = datetime.combine(local.date() - timedelta(days=1), time(EVENING_HOUR), local.tzinfo)
    return int(evening.timestamp() * SECOND)


async def _show_night(room: OpenPage, inside: Element, seen: list[Report]) -> None:
    since = find_last_evening(room.now)
    made = await queries.report(room.desk, since)
    same = bool(seen) and _strip_time(seen[-1]) == _strip_time(made)
    seen[:] = [made]
    if same:
        return
    inside.clear()
    with inside:
        add_facts(
            [
                ("since", format_moment(since)),
                ("spent", format_usd(made.spent_usd)),
                ("decided", str(made.decided_count)),
            ]
        )
        add_listing(build_agents_table(made))
        for one in made.ended_badly:
            add_text(f"Did not end well: {one}", "h-bad h-text")
        for halt in made.halts:
            state = "halted" if halt.halted else "let go again"
            add_text(
                f"{halt.scope} was {state} by {halt.by} at {format_moment(halt.at)}. {halt.reason}", "h-look h-text"
            )
        for each in made.undelivered:
            add_text(f"Could not be told over {each.channel}: {each.error}", "h-bad h-text")


def _strip_time(made: Report) -> Report:
    return msgspec.structs.replace(made, since=0, until=0)


def _build_news_row(room: OpenPage, one: queries.AgentNews) -> Callable[[queries.AgentNews], None]:
    with add_box("li", "h-row"):
        add_text(format_relative_moment(one.queued_at, room.now), "h-dim")
        add_text(one.agent, "h-what")
        add_text(one.subject)
    return lambda _: None

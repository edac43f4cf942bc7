"""What needs a person, as cards that can be answered in their place."""

import json
from collections.abc import Callable

from halter.app.desk import decisions, money
from halter.app.desk.always import SAME, offers
from halter.app.desk.decisions import Answer
from halter.app.desk.waiting import Put, Waiting, put
from halter.core.clock import SECOND
from halter.core.durations import parse_duration, shown_duration
from halter.server.dashboard.asking import REASON, Field, Given, ask
from halter.server.dashboard.legible import legible
from halter.server.dashboard.parts import Words, box, button, chip, facts, link, pre, words
from halter.server.dashboard.room import Room

DANGEROUS = ("HIGH", "CRITICAL")


def card(room: Room, one: Waiting) -> Callable[[Waiting], None]:
    """Show a decision. Only its age changes later; whatever else did would be another decision."""
    asked = put(one)
    danger = one.risk in DANGEROUS
    with box("article", f"h-card h-ask {'h-danger' if danger else ''}", asked.what):
        words(asked.what, "h-what")
        with box("div", "h-row"):
            chip(_kind(one))
            if one.risk:
                chip(f"risk {one.risk}", "bad" if danger else "look")
            age = words(_age(room, one), "h-dim")
        facts([("why", "; ".join(one.reasons)), ("agent", one.agent)])
        if one.session:
            link(f"session {one.session}", f"/session/{one.session}")
        if asked.shown:
            pre(indented(asked.shown))
        if room.may("approver"):
            _answers(room, one, asked)
    return lambda later: _aged(room, age, later)


def _aged(room: Room, age: Words, one: Waiting) -> None:
    age.say(_age(room, one))


def _age(room: Room, one: Waiting) -> str:
    return f"waits {_seconds(room.now - one.asked_at)}, expires in {_seconds(one.expires_at - room.now)}"


def _seconds(micros: int) -> str:
    return shown_duration(micros) if micros >= SECOND else "0s"


def _kind(one: Waiting) -> str:
    return one.about.replace("_", " ")


def indented(text: str) -> str:
    """Write JSON so that it can be read; anything else as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _answers(room: Room, one: Waiting, asked: Put) -> None:
    with box("div", "h-row"):
        if one.about == "cap_raise":
            button("Raise the cap…", lambda: _raise(room, one), "yes")
        else:
            button("Approve", lambda: _yes(room, one), "yes", f"Approve {one.name}: {asked.yes}")
        button("Deny…", lambda: _no(room, one, asked), "plain", f"Deny {one.name}")
        if one.about == "approval":
            button("Edit…", lambda: _edit(room, one, asked), "plain", f"Edit the arguments of {one.name}")
            button("Always…", lambda: _always(room, one), "plain", f"Always allow {one.name}")


async def _yes(room: Room, one: Waiting) -> None:
    await room.does(_said(room, one, Answer()))


async def _said(room: Room, one: Waiting, answer: Answer) -> str:
    return (await decisions.approve(room.desk, one.decision, answer)).sentence


def _no(room: Room, one: Waiting, asked: Put) -> None:
    async def do(given: Given) -> str:
        return (await decisions.deny(room.desk, one.decision, given["reason"])).sentence

    ask(room, f"Deny {one.name}?", f"{asked.no}.", (REASON,), "Deny", do, "stop")


def _edit(room: Room, one: Waiting, asked: Put) -> None:
    async def do(given: Given) -> str:
        edited = decisions.arguments(given["arguments"].encode("utf-8", "replace"), "")
        return await _said(room, one, Answer(edit=edited, reason=given["reason"]))

    says = "It is called once, with the arguments below in place of the model's."
    arguments = Field("arguments", "Arguments, as a JSON object", indented(asked.shown), "text")
    ask(room, f"Approve {one.name} with other arguments?", says, (arguments, REASON), "Approve this", do)


def _always(room: Room, one: Waiting) -> None:
    offered = {legible(each.sentence): each.match for each in offers(one)} or {"with exactly the same arguments": SAME}

    async def do(given: Given) -> str:
        lasts, match = parse_duration(given["lasts"]), given["own"].strip() or offered[given["match"]]
        answer = Answer(always=True, match=match, scope=given["scope"], lasts=lasts, reason=given["reason"])
        return await _said(room, one, answer)

    fields = (
        Field("match", "Which calls", next(iter(offered)), "choice", tuple(offered)),
        Field("own", "Or in your own words, one to a line", "", "text"),
        Field("scope", "Where", "session", "choice", ("session", "agent", "fleet")),
        Field("lasts", "For how long", "7d"),
        REASON,
    )
    each = "\n".join(f"- {sentence}" for sentence in offered)
    says = (
        f"This call is approved, and from now on such calls need nobody's yes. You may choose:\n{each}\n"
        "Or write which arguments may differ, and how: words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST, any:KEY."
    )
    ask(room, f"Always allow {one.name}?", says, fields, "Approve, and always", do)


def _raise(room: Room, one: Waiting) -> None:
    async def do(given: Given) -> str:
        cap = money.amount_of(given["cap"].strip())
        return await _said(room, one, Answer(cap=(cap,), reason=given["reason"]))

    cap = Field("cap", "New cap in dollars, or none")
    ask(room, f"Raise the cap of {one.subject}?", put(one).shown, (cap, REASON), "Raise the cap", do)

"""Findings, and what sessions propose to be kept for later ones."""

from collections.abc import Callable
from typing import Literal

from halter.app.desk import left
from halter.app.keeping import Left
from halter.app.words.moments import moment
from halter.core.left import Kept as Settled
from halter.server.dashboard.asking import REASON, Given, ask
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, box, button, chip, link, part, words
from halter.server.dashboard.room import Refresh, Room

Among = Literal["findings", "proposals"]
URGENT = ("high", "critical")
MOST = 100


async def findings(room: Room) -> Refresh:
    """Put the page together."""
    with part("Findings"):
        found = Kept[Left](box("div", "h-cards"), lambda one: _card(room, one, "findings"), "There are no findings.")
    with part("Proposals"):
        proposed = Kept[Left](
            box("div", "h-cards"), lambda one: _card(room, one, "proposals"), "Nothing is proposed to be kept."
        )

    async def refresh(grown: Grown) -> None:
        if grown.written:
            found.show({one.id: one for one in await left.findings(room.desk, limit=MOST)})
            proposed.show({one.id: one for one in (await left.proposals(room.desk))[:MOST]})

    await refresh(Grown(everything=True))
    return refresh


def _card(room: Room, one: Left, among: Among) -> Callable[[Left], None]:
    with box("article", "h-card", f"{one.about} {one.id}").style("display: flex; flex-direction: column; gap: 0.5rem"):
        with box("div", "h-row"):
            if one.severity:
                chip(one.severity, "bad" if one.severity in URGENT else "look")
            chip(one.about)
            status = chip(_status(one))
            words(moment(one.at, room.now), "h-dim")
        words(one.text).style("white-space: pre-wrap")
        words("; ".join(_more(one)), "h-dim h-text")
        link(f"session {one.session}", f"/session/{one.session}")
        buttons = box("div", "h-row")
        with buttons:
            if room.may("approver"):
                button("Keep", lambda: _settle(room, one, "kept", among), "yes", f"Keep {one.id}")
                button("Dismiss…", lambda: _dismiss(room, one, among), "plain", f"Dismiss {one.id}")
    buttons.set_visibility(not one.status)

    def show(one: Left) -> None:
        status.say(_status(one))
        buttons.set_visibility(not one.status)

    return show


def _status(one: Left) -> str:
    return f"{one.status} by {one.by}" if one.status else "to be kept or dismissed"


def _more(one: Left) -> list[str]:
    seen = f"seen {one.observed_count} times" if one.observed_count > 1 else ""
    return [each for each in (one.agent, one.support, one.review and f"review: {one.review}", seen) if each]


async def _settle(room: Room, one: Left, status: Settled, among: Among) -> None:
    await room.does(_settled(room, one, status, among, ""))


async def _settled(room: Room, one: Left, status: Settled, among: Among, reason: str) -> str:
    return (await left.settle(room.desk, one.id, status, among, reason)).sentence


def _dismiss(room: Room, one: Left, among: Among) -> None:
    async def do(given: Given) -> str:
        return await _settled(room, one, "dismissed", among, given["reason"])

    ask(room, f"Dismiss {one.id}?", "Later sessions are not told of it.", (REASON,), "Dismiss", do, "stop")

"""Home: what needs a person, what happened in the night, what was spent against caps, and what was told."""

from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta

import msgspec
from nicegui.element import Element

from halter.app.desk import looking
from halter.app.desk.money import Budget
from halter.app.desk.waiting import Waiting, waiting
from halter.app.report import Report
from halter.app.words.moments import moment, written
from halter.app.words.report import agents_of
from halter.core.clock import SECOND
from halter.core.money import shown_usd
from halter.server.dashboard.deciding import card
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, box, facts, listing, part, words
from halter.server.dashboard.room import Refresh, Room
from halter.server.dashboard.spent import bar, current

EVENING = 18


async def home(room: Room) -> Refresh:
    """Put the page together."""
    with part("Needs you"):
        cards = Kept[Waiting](box("div", "h-cards"), lambda one: card(room, one), "Nothing needs you.")
    night = part("Last night", card=True)
    with box("div", "h-two"):
        caps = part("Spent against caps", card=True)
        with part("Told", card=True):
            told = Kept[looking.News](box("ul", "h-list"), lambda one: _told(room, one), "Nothing was told.")
    bars = Kept[Budget](caps, bar, "Nothing was spent yet.")
    seen: list[Report] = []

    async def refresh(grown: Grown) -> None:
        cards.show({one.decision: one for one in await waiting(room.desk)})
        if grown.written or not seen:
            await _show_night(room, night, seen)
            rows = await current(room)
            bars.show({(row.scope, row.window): row for row in rows if row.unit == "usd"})
            news = await looking.told(room.desk, yesterday(room.now))
            told.show({(one.queued_at, one.agent, one.subject): one for one in news})

    await refresh(Grown(everything=True))
    return refresh


def yesterday(now: int) -> int:
    """Find the evening before: whoever comes in the morning wants to know of the night."""
    local = datetime.fromtimestamp(now / SECOND, UTC).astimezone()
    evening = datetime.combine(local.date() - timedelta(days=1), time(EVENING), local.tzinfo)
    return int(evening.timestamp() * SECOND)


async def _show_night(room: Room, inside: Element, seen: list[Report]) -> None:
    since = yesterday(room.now)
    made = await looking.report(room.desk, since)
    same = bool(seen) and _without_time(seen[-1]) == _without_time(made)
    seen[:] = [made]
    if same:
        return
    inside.clear()
    with inside:
        facts([("since", written(since)), ("spent", shown_usd(made.spent_usd)), ("decided", str(made.decided_count))])
        listing(agents_of(made))
        for one in made.ended_badly:
            words(f"Did not end well: {one}", "h-bad h-text")
        for halt in made.halts:
            state = "halted" if halt.halted else "let go again"
            words(f"{halt.scope} was {state} by {halt.by} at {written(halt.at)}. {halt.reason}", "h-look h-text")
        for each in made.undelivered:
            words(f"Could not be told over {each.channel}: {each.error}", "h-bad h-text")


def _without_time(made: Report) -> Report:
    return msgspec.structs.replace(made, since=0, until=0)


def _told(room: Room, one: looking.News) -> Callable[[looking.News], None]:
    with box("li", "h-row"):
        words(moment(one.queued_at, room.now), "h-dim")
        words(one.agent, "h-what")
        words(one.subject)
    return lambda _: None

"""What stands on every page: the way to the others, whether the fleet is halted, and the button that halts it."""

from collections.abc import Awaitable, Callable

from nicegui.element import Element

from halter.app.desk import looking, steering
from halter.app.words.moments import moment
from halter.core.durations import parse_duration
from halter.core.ids import FLEET
from halter.core.rows import HaltRow
from halter.core.text import counted
from halter.server.dashboard.asking import REASON, Field, Given, ask
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import Kept, Words, box, button, link, submit, words
from halter.server.dashboard.room import Refresh, Room
from halter.server.dashboard.theme import SWITCH

PAGES = (
    ("/", "Home"),
    ("/fleet", "Fleet"),
    ("/sessions", "Sessions"),
    ("/audit", "Audit"),
    ("/budgets", "Budgets"),
    ("/triggers", "Triggers"),
    ("/findings", "Findings"),
)

Build = Callable[[Room], Awaitable[Refresh]]
"""Puts a page together inside of the frame, and returns what keeps it up to date."""


async def framed(room: Room, title: str, here: str, build: Build) -> None:
    """Put a page into its frame."""
    _navigation(room, here)
    banner = box("div", role="status")
    halts = Kept(banner, lambda row: _halted(room, row))
    lost = _top(room, title)
    with box("div", "h-body", id="body"):
        refresh = await build(room)

    async def refreshed(grown: Grown) -> None:
        if grown.of(FLEET):
            await _show_halts(room, halts)
        await refresh(grown)

    await _show_halts(room, halts)
    room.follow(refreshed, lost.say)


def _navigation(room: Room, here: str) -> None:
    with room.client.layout:
        skip = link("To the content", "#body", "h-skip")
        with box("nav", "h-nav", "Pages") as nav:
            words("Halter", "h-brand")
            for path, name in PAGES:
                made = link(name, path, "")
                if path == here:
                    made.props["aria-current"] = "page"
            with box("form", "h-who", method="post", action="/logout"):
                words(f"{room.who.name} ({room.who.role})", "h-text", "span")
                submit("Log out", "plain")
    nav.move(target_index=0)
    skip.move(target_index=0)


def _top(room: Room, title: str) -> Words:
    with box("header", "h-top"):
        words(title, "", "h1")
        box("div", "h-space")
        lost = words("", "h-lost h-text")
        lost.props["role"] = "status"
        theme: Element = button("◐", lambda: None, label="Change between light and dark")
        theme.on("click", js_handler=SWITCH)
        if room.may("approver"):
            button("HALT ALL", lambda: _halt_all(room), "stop")
    return lost


async def _show_halts(room: Room, halts: Kept[HaltRow]) -> None:
    rows = await steering.halts_now(room.desk)
    halts.show({(row.scope, row.at): row for row in rows if row.scope in _everything(room)})


def _everything(room: Room) -> tuple[str, ...]:
    """Name the scopes that are everything for somebody."""
    return tuple(f"agent:{name}" for name in room.who.agents) or ("fleet",)


def _halted(room: Room, row: HaltRow) -> Callable[[HaltRow], None]:
    what = "Everything is" if row.scope == "fleet" else f"{row.scope.removeprefix('agent:')} is"
    because = f": {row.reason}" if row.reason else "."
    with box("div", "h-banner"):
        words(f"{what} halted since {moment(row.at, room.now)}, by {row.by}{because}")
        if room.may("operator"):
            button("Resume…", lambda: resume(room, row.scope))
    return lambda _: None


async def _halt_all(room: Room) -> None:
    under_way = await looking.sessions_under_way(room.desk)
    working = sum(row.state == "RUNNING" for row in under_way)

    async def do(given: Given) -> str:
        for scope in _everything(room):
            await steering.halt(room.desk, scope, given["reason"])
        return "Everything is halted: nothing starts, and what is in flight is stopped within a second."

    says = (
        f"This stops {counted(len(under_way), 'session')} under way, {working} of them at work at this moment. "
        "What is in flight is stopped within a second; nothing starts again until somebody resumes."
    )
    ask(room, "Halt everything?", says, (REASON,), "Halt everything", do, "stop")


def resume(room: Room, scope: str) -> None:
    """Ask how a halted scope shall come back."""

    async def do(given: Given) -> str:
        over = parse_duration(given["over"]) if given["over"].strip() else None
        return (await steering.resume(room.desk, scope, over, given["reason"])).sentence

    says = "Its sessions go on where they stand. A fleet takes a second for each of them, unless you name another time."
    over = Field("over", "Let sessions go one after the other, over", "")
    ask(room, f"Resume {scope}?", says, (over, REASON), "Resume", do)

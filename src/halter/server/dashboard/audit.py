"""The audit: who called which tool, with what outcome; searched, paged, and taken along."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlencode

import msgspec
from nicegui import ui
from nicegui.element import Element

from halter.app.desk.auditing import Wanted, newest
from halter.app.words.moments import written
from halter.core.durations import parse_duration
from halter.core.errors import HalterError
from halter.core.money import shown_usd
from halter.core.text import clean
from halter.server.dashboard.live import Grown
from halter.server.dashboard.parts import box, button, cell, link, part, submit, table, words
from halter.server.dashboard.room import Refresh, Room
from halter.state.audit import AuditEntry, entry

PAGE = 50
COLUMNS = ("when", "agent", "tool", "level, risk", "outcome", "agreed to by", "cost", "asked", "answered", "session")
FIELDS = (("since", "How far back, as in 24h"), ("agent", "Agent"), ("tool", "Tool"), ("outcome", "Outcome"),
          ("session", "Session"), ("text", "Text"))  # fmt: skip
USUAL = "7d"


def wanted_of(given: Mapping[str, str], now: int) -> Wanted:
    """Read what somebody is looking for."""
    since = now - parse_duration(given.get("since", "").strip() or USUAL)

    def said(name: str) -> str:
        return clean(given.get(name, "").strip())

    return Wanted(
        since=since,
        agent=said("agent"),
        tool=said("tool"),
        outcome=said("outcome"),
        session=said("session"),
        text=said("text"),
    )


async def audit(room: Room) -> Refresh:
    """Put the page together."""
    with part("Search", card=True), box("form", "h-form", "Search the audit", role="search") as form:
        inputs: dict[str, Any] = {name: _input(label, USUAL if name == "since" else "") for name, label in FIELDS}
        submit("Search", "yes")
        export = link("Export as JSON lines", "/download/audit")
        export.props["download"] = ""
    with part("Calls", card=True):
        shown_as = words("", "h-dim")
        rows = table("Calls", COLUMNS, ("cost",))
        older = button("Older", lambda: None)
    looking_for = _Search(room, rows)

    async def go(*, on: bool = False) -> None:
        given = {name: str(each.value or "") for name, each in inputs.items()}
        export.props["href"] = f"/download/audit?{urlencode(given)}"
        try:
            more = await looking_for.page(given, on=on)
        except HalterError as error:
            room.say(str(error), bad=True)
            return
        shown_as.say(f"{looking_for.count} shown, the newest first." if looking_for.count else "Nothing was found.")
        older.set_visibility(more)

    form.on("submit.prevent", go)
    older.on_click(lambda: go(on=True))
    await go()

    async def refresh(_: Grown) -> None:
        """What was searched for stays as it was found, until somebody searches again."""

    return refresh


def _input(label: str, value: str) -> Any:
    return ui.input(label, value=value).props("outlined dense")


class _Search:
    """What was found so far."""

    def __init__(self, room: Room, rows: Element) -> None:
        self._room = room
        self._rows = rows
        self._until: int | None = None
        self._last: set[str] = set()
        self.count = 0

    async def page(self, given: Mapping[str, str], *, on: bool) -> bool:
        """Show a page more, or the first one; tell whether there are more."""
        wanted = wanted_of(given, self._room.now)
        if not on:
            self._rows.clear()
            self._until, self._last, self.count = None, set(), 0
        found = await self._find(wanted)
        with self._rows:
            for each in found[:PAGE]:
                _row(each)
        self._go_on_after(found[:PAGE])
        return len(found) > PAGE

    async def _find(self, wanted: Wanted) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        async with aclosing(newest(self._room.desk, msgspec.structs.replace(wanted, until=self._until))) as entries:
            async for each in entries:
                if each.call not in self._last:
                    found.append(entry(each))
                if len(found) > PAGE:
                    break
        return found

    def _go_on_after(self, found: list[AuditEntry]) -> None:
        """Several calls may have begun at the same moment: they are known by their names."""
        self.count += len(found)
        if found:
            before = self._last if found[-1].created_at == self._until else set[str]()
            self._until = found[-1].created_at
            self._last = before | {each.call for each in found if each.created_at == self._until}


def _row(one: AuditEntry) -> None:
    with box("tr"):
        cell(written(one.created_at), "h-short")
        cell(one.agent)
        cell(one.tool, "h-what")
        cell(f"{one.capability_level} {one.risk_level}".strip())
        cell(one.outcome or "under way", "" if one.outcome == "ok" else "h-look")
        cell(one.decided_by)
        cell(shown_usd(one.cost_usd), "h-num")
        cell(one.input_summary)
        cell(one.output_summary)
        with box("td"):
            link(one.session, f"/session/{one.session}")

"""The list of sessions: searched, filtered, paged, and drawn as bars."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from urllib.parse import urlencode

from nicegui import ui

from halter.core.clock import SECOND
from halter.core.money import format_usd
from halter.core.rows import SessionRow
from halter.core.vocabulary import END_STATES
from halter.dashboard.labels import (
    KINDS,
    STATES,
    explain_end,
    format_age,
    format_span,
    format_tokens,
    label_session,
    label_state,
)
from halter.dashboard.page import FeedChanges, OpenPage, RefreshPage
from halter.dashboard.widgets import (
    KeyedList,
    RunBar,
    RunBars,
    add_box,
    add_button,
    add_cell,
    add_chip,
    add_id,
    add_link,
    add_section,
    add_table,
    add_text,
    make_legible,
    set_chip,
)
from halter.operations import queries

SESSION_COLUMNS = ("session", "state", "agent", "cost", "time", "began")
PAGE = 25
SEARCHED = 200
"""Number of newest sessions that are searched."""
FILTERS: Final = ("Every state", "Under way", "Waiting for a person", "Ended well", "Ended badly")


STATES_OF: Final = {
    "Waiting for a person": tuple(name for name, label in STATES.items() if label.mood == "look"),
    "Ended well": tuple(name for name in sorted(END_STATES) if label_state(name).mood == "good"),
    "Ended badly": tuple(name for name in sorted(END_STATES) if label_state(name).mood == "bad"),
}


async def read_sessions(page: OpenPage, agent: str, query: str, limit: int) -> list[SessionRow]:
    """Read the newest matching sessions of any age; each state is queried by its index."""
    if query == "Under way":
        rows = [row for row in await queries.sessions_under_way(page.actor) if agent in ("", row.agent)]
    elif query in STATES_OF:
        rows = [row for state in STATES_OF[query] for row in await queries.sessions(page.actor, agent, state, 0, limit)]
    else:
        rows = list(await queries.sessions(page.actor, agent, limit=limit))
    matching_rows = [row for row in rows if fits_filter(row, query)]
    return sorted(matching_rows, key=lambda row: (row.started_at, row.session), reverse=True)[:limit]


MAX_RUN_BARS: Final = 60


def make_run_bar(row: SessionRow, now: int) -> RunBar:
    label, took = label_session(row), max(0, (row.ended_at or now) - row.started_at)
    title = f"{row.session}: {label.text}, {format_span(took)}, {format_age(row.started_at, now)}"
    return RunBar(f"/session/{row.session}", title, label.mood, math.log1p(took / SECOND))


def count_states(rows: Sequence[SessionRow]) -> str:
    """Describe the number of sessions in each state, the most frequent first; "" for a single session."""
    counts = Counter(label_session(row).text.lower() for row in rows)
    sentence = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return f"The newest {len(rows)}: {sentence}" if len(rows) > 1 else ""


def fits_filter(row: SessionRow, query: str) -> bool:
    mood, has_ended = label_session(row).mood, row.ended_at is not None
    match query:
        case "Under way":
            return not has_ended
        case "Waiting for a person":
            return not has_ended and mood == "look"
        case "Ended well":
            return has_ended and mood == "good"
        case "Ended badly":
            return has_ended and mood == "bad"
        case _:
            return True


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session with the values that the list shows."""

    row: SessionRow
    title: str
    spent: Decimal
    tokens: int


EVERY_AGENT: Final = "Every agent"


class SessionFilter:
    """The filter of the list of sessions; the address of the page reproduces it."""

    def __init__(self, page: OpenPage) -> None:
        state, agent = page.query_value("state"), make_legible(page.query_value("agent")) or EVERY_AGENT
        with add_box("div", "h-filters", "Filter the sessions", role="search"):
            self._text: Any = ui.input("Search").props("outlined dense clearable")
            chosen_state = state if state in FILTERS else FILTERS[0]
            self._state: Any = ui.select(list(FILTERS), value=chosen_state, label="State").props("outlined dense")
            agents = list(dict.fromkeys((EVERY_AGENT, agent)))
            self._agent: Any = ui.select(agents, value=agent, label="Agent").props("outlined dense")

    @property
    def text(self) -> str:
        return str(self._text.value or "").strip().casefold()

    @property
    def state(self) -> str:
        return str(self._state.value)

    @property
    def agent(self) -> str:
        return "" if self._agent.value == EVERY_AGENT else str(self._agent.value)

    @property
    def is_active(self) -> bool:
        return bool(self.text or self.agent) or self.state != FILTERS[0]

    @property
    def path(self) -> str:
        fields = {"agent": self.agent, "state": self.state}
        query = {name: value for name, value in fields.items() if value not in ("", FILTERS[0])}
        return f"/sessions?{urlencode(query)}" if query else "/sessions"

    def offer(self, agents: list[str]) -> None:
        """Set the agents to choose from; the chosen one is always among them."""
        options = [EVERY_AGENT, *sorted({*agents, self.agent} - {""})]
        if self._agent.options != options:
            self._agent.set_options(options)

    def on_change(self, callback: Callable[[], Any]) -> None:
        for element in (self._text, self._state, self._agent):
            element.on_value_change(callback)


class SessionList:
    """The matching sessions, newest first, up to the number that the person asked to see."""

    def __init__(self, page: OpenPage, filters: SessionFilter) -> None:
        self._page, self._filters = page, filters
        self._count = PAGE
        self._titles: dict[str, str] = {}
        self._bars = RunBars("The newest of these sessions, by outcome")
        self._count_label = add_text("", "h-dim h-small")
        with add_section("Sessions", card=True, heading=False):
            body = add_table("Sessions", SESSION_COLUMNS, ("cost",))
            self._lines = KeyedList[ListedSession](body, lambda one: _row(page, one))
            self._none, self._searched = add_text("", "h-none"), add_text("", "h-dim h-small")
            self._older = add_button("Older", self._show_more)

    async def show(self) -> None:
        text, page = self._filters.text, self._page
        limit = SEARCHED if text else max(MAX_RUN_BARS, self._count + 1)
        sessions = await read_sessions(page, self._filters.agent, self._filters.state, limit)
        self._bars.show([make_run_bar(row, page.now) for row in reversed(sessions[:MAX_RUN_BARS])])
        self._count_label.show_text(count_states(sessions[:MAX_RUN_BARS]))
        if text:
            sessions = [
                row for row in sessions if text in f"{await self._title(row)} {row.session} {row.agent}".casefold()
            ]
        items = [await self._to_listed(row) for row in sessions[: self._count]]
        self._lines.show({one.row.session: one for one in items})
        self._older.set_visibility(len(sessions) > self._count)
        self._none.show_text("" if items else "No matching session." if self._filters.is_active else "No sessions yet.")
        self._searched.show_text(f"Searched the newest {SEARCHED} matching sessions." if text else "")

    async def show_first(self) -> None:
        self._count = PAGE
        await self.show()

    async def _show_more(self) -> None:
        self._count += PAGE
        await self.show()

    async def _title(self, row: SessionRow) -> str:
        if row.session not in self._titles:
            self._titles[row.session] = await queries.session_title(self._page.actor, row)
        return self._titles[row.session]

    async def _to_listed(self, row: SessionRow) -> ListedSession:
        actor = self._page.actor
        spent_usd, tokens = (
            await queries.session_spent(actor, row.session),
            await queries.session_tokens(actor, row.session),
        )
        return ListedSession(row, await self._title(row), spent_usd, tokens)


async def build_sessions_page(page: OpenPage) -> RefreshPage:
    filters = SessionFilter(page)
    session_list = SessionList(page, filters)

    async def refresh(_: FeedChanges) -> None:
        await session_list.show()
        filters.offer(
            [name for name in await queries.list_recorded_agents(page.app.store) if page.principal.can_see(name)]
        )

    async def search() -> None:
        ui.navigate.history.replace(filters.path)
        await session_list.show_first()

    filters.on_change(search)
    await refresh(FeedChanges())
    return refresh


def _row(page: OpenPage, item: ListedSession) -> Callable[[ListedSession], None]:
    row = item.row
    with add_box("tr"):
        with add_box("td"):
            add_link(item.title, f"/session/{row.session}").classes("h-what")
            with add_box("div", "h-row"):
                add_id(row.session)
        with add_box("td"):
            state = add_chip("")
            detail = add_text("", "h-dim h-small")
        with add_box("td"):
            add_link(row.agent, f"/agent/{row.agent}")
            add_text(row.trigger.partition("/")[2] or KINDS.get(row.kind, row.kind), "h-dim h-small")
        with add_box("td", "h-num"):
            cost, tokens = add_text("", ""), add_text("", "h-dim h-small")
        took = add_cell("", "h-short")
        with add_box("td", "h-short"):
            page.add_moment(row.started_at)

    def show(item: ListedSession) -> None:
        row = item.row
        set_chip(state, label_session(row))
        wakes = f"wakes {format_age(row.due_at, page.now)}" if row.due_at and row.due_at > page.now else ""
        detail.show_text(explain_end(row) if row.ended_at is not None else wakes)
        cost.show_text(format_usd(item.spent))
        tokens.show_text(f"{format_tokens(item.tokens)} tokens" if item.tokens else "")
        took.show_text(format_span(max(0, (row.ended_at or page.now) - row.started_at)))

    show(item)
    return show

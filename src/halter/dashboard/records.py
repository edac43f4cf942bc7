"""Pages of records: budgets with caps, and the audit with search and downloads."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from nicegui import ui
from nicegui.element import Element

from halter import __version__
from halter.core.clock import DAY, parse_duration, window_at
from halter.core.errors import HalterError, NotDone
from halter.core.ids import FLEET
from halter.core.money import ZERO_USD, format_unit_amount
from halter.core.public_json import encode_public_json
from halter.core.text import clean
from halter.dashboard.labels import format_money, format_window, label_outcome, shorten_id
from halter.dashboard.page import REASON, FeedChanges, FormField, FormValues, OpenPage, RefreshPage, open_dialog
from halter.dashboard.parts import (
    KeyedList,
    Plot,
    Point,
    TextLabel,
    add_box,
    add_button,
    add_cell,
    add_chip,
    add_link,
    add_meter,
    add_preformatted,
    add_section,
    add_submit,
    add_table,
    add_text,
    chart_spending,
    make_file_name,
    set_meter,
)
from halter.operations import money, queries
from halter.operations.desk import Desk
from halter.operations.money import Direction
from halter.operations.queries import AuditFilter, newest
from halter.operations.queries import audit as audit_of
from halter.present.events import format_moment
from halter.runtime.budgets import Budget
from halter.runtime.proof import encode_receipt
from halter.runtime.runtime import Runtime
from halter.server.middleware import WHO_KEY
from halter.state.audit import AuditEntry, make_audit_entry


async def list_current_budgets(room: OpenPage) -> Sequence[Budget]:
    """Lists the budgets of the fleet, agents, triggers, and open sessions."""
    rows = (await money.budgets(room.desk)).budgets
    under_way = {f"session:{row.session}" for row in await queries.sessions_under_way(room.desk)}
    return [row for row in rows if not row.scope.startswith("session:") or row.scope in under_way]


def format_amount(row: Budget, number: Decimal) -> str:
    """Formats an amount in the unit of its budget."""
    return format_unit_amount(number, row.unit)


def format_budget_cap(row: Budget) -> str:
    return "no cap" if row.cap is None else format_amount(row, row.cap)


def compute_spent_share(row: Budget) -> float:
    """Returns how much of a cap is spent or held, up to 1; a cap of 0 is fully spent."""
    used = row.spent + row.held
    if row.cap is None:
        return 0.0
    return float(used / row.cap) if row.cap else float(used > 0)


BUDGET_COLUMNS = ("scope", "window", "cap", "spent", "held", "left", "used", "change")
NUMBER_COLUMNS = ("cap", "spent", "held", "left")
SPENDING_PARTS = 288


async def build_budgets_page(room: OpenPage) -> RefreshPage:
    with add_section("Spent today against the cap", card=True):
        whose: Any = ui.select(["fleet"], label="Whose", value="fleet").props("outlined dense")
        whose.style("max-width: 20rem")
        plot = Plot("What was spent today, against the cap", "Nothing was spent today.")
    with add_section("Caps", card=True):
        lines = KeyedList[Budget](add_table("Caps", BUDGET_COLUMNS, NUMBER_COLUMNS), lambda row: _row(room, row))

    with add_section("Policy of the store", card=True):
        adopted, says = add_text(""), add_preformatted("")

    async def refresh(grown: FeedChanges) -> None:
        if not grown.written:
            return
        if grown.of(FLEET):
            await _show_policy(room, adopted, says)
        rows = await list_current_budgets(room)
        lines.show({(row.scope, row.window, row.unit): row for row in rows})
        scopes = ["fleet", *sorted({row.scope for row in rows if row.scope.startswith("agent:")})]
        if whose.options != scopes:
            whose.set_options(scopes)
        await _draw(room, plot, str(whose.value), rows)

    async def again() -> None:
        await refresh(FeedChanges(everything=True))

    whose.on_value_change(again)
    await again()
    return refresh


async def _show_policy(room: OpenPage, adopted: TextLabel, says: TextLabel) -> None:
    """Shows the store's policy, and who adopted it."""
    found = await money.show(room.desk)
    adopted.say(f"Adopted by {found.by} on {format_moment(found.at)}." if found.digest else money.NONE_YET)
    says.say("\n".join(f"{key}: {value}" for key, value in money.lines_of(found.policy)))


async def _draw(room: OpenPage, plot: Plot, scope: str, rows: Sequence[Budget]) -> None:
    """Charts what one scope spent today. A budget's day is UTC, as its window says."""
    now = room.now
    since = now - now % DAY
    today = window_at("day", now)
    row = next((row for row in rows if (row.scope, row.window, row.unit) == (scope, today, "usd")), None)
    size = max(1, -(-(now + 1 - since) // SPENDING_PARTS))
    points: list[Point] = [
        (since + each.part * size, float(each.spent_usd))
        for each in await queries.spending(room.desk, since, now + 1, SPENDING_PARTS)
        if scope in ("fleet", f"agent:{each.agent}")
    ]
    cap = None if row is None or row.cap is None else float(row.cap)
    plot.show(chart_spending(points, cap, now), empty=not points)


def _row(room: OpenPage, row: Budget) -> Callable[[Budget], None]:
    name = f"{row.scope} {row.window}".strip()
    with add_box("tr"):
        add_cell(row.scope, "h-what")
        add_cell(format_window(row.window))
        figures = [add_cell("", "h-num") for _ in NUMBER_COLUMNS]
        with add_box("td"):
            drawn = add_meter(f"used of {name}", compute_spent_share(row))
        with add_box("td"), add_box("div", "h-row"):
            if room.may("operator") and row.unit == "usd":
                add_button("Raise…", lambda: _change(room, row, "raise"), "plain", f"Raise the cap of {name}")
                add_button("Lower…", lambda: _change(room, row, "lower"), "plain", f"Lower the cap of {name}")

    def show(row: Budget) -> None:
        kept = f" ({format_amount(row, row.kept)} kept for the last words)" if row.kept else ""
        left = "" if row.left is None else f"{format_amount(row, max(ZERO_USD, row.left))}{kept}"
        for one, text in zip(
            figures,
            (format_budget_cap(row), format_amount(row, row.spent), format_amount(row, row.held), left),
            strict=True,
        ):
            one.say(text)
        set_meter(drawn, compute_spent_share(row))

    seen = [row]
    show(row)

    def later(row: Budget) -> None:
        if row != seen[0]:
            seen[0] = row
            show(row)

    return later


def _change(room: OpenPage, row: Budget, direction: Direction) -> None:
    async def do(given: FormValues) -> str:
        await money.set_cap(room.desk, direction, row.scope, given["cap"].strip(), row.window, given["reason"])
        return f"The cap of {row.scope} was changed."

    says = (
        f"{row.scope} ({row.window or 'its life'}) has {format_budget_cap(row)}. The change is recorded with your name."
    )
    cap = FormField("cap", "New cap in dollars, or none")
    open_dialog(
        room, f"{direction.capitalize()} the cap of {row.scope}?", says, (cap, REASON), direction.capitalize(), do
    )


PAGE = 50
AUDIT_COLUMNS = (
    "when",
    "agent",
    "tool",
    "level, risk",
    "outcome",
    "agreed to by",
    "cost",
    "asked",
    "answered",
    "session",
)
FIELDS = (("since", "How far back, as in 24h"), ("agent", "Agent"), ("tool", "Tool"), ("outcome", "Outcome"),
          ("session", "Session"), ("text", "Text"))  # fmt: skip
DEFAULT_SEARCH_AGE = "7d"


def parse_audit_filter(given: Mapping[str, str], now: int) -> AuditFilter:
    since = now - parse_duration(given.get("since", "").strip() or DEFAULT_SEARCH_AGE)

    def said(name: str) -> str:
        return clean(given.get(name, "").strip())

    return AuditFilter(
        since=since,
        agent=said("agent"),
        tool=said("tool"),
        outcome=said("outcome"),
        session=said("session"),
        text=said("text"),
    )


async def build_audit_page(room: OpenPage) -> RefreshPage:
    with add_section("Search", card=True), add_box("form", "h-form", "Search the audit", role="search") as form:
        inputs: dict[str, Any] = {
            name: _input(label, DEFAULT_SEARCH_AGE if name == "since" else "") for name, label in FIELDS
        }
        add_submit("Search", "yes")
        export = add_link("Export as JSON lines", "/download/audit")
        export.props["download"] = ""
    with add_section("Calls", card=True):
        shown_as = add_text("", "h-dim")
        rows = add_table("Calls", AUDIT_COLUMNS, ("cost",))
        older = add_button("Older", lambda: None)
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

    async def refresh(_: FeedChanges) -> None:
        """Search results stay as they are until the next search."""

    return refresh


def _input(label: str, value: str) -> Any:
    return ui.input(label, value=value).props("outlined dense")


class _Search:
    """The results so far."""

    def __init__(self, room: OpenPage, rows: Element) -> None:
        self._room = room
        self._rows = rows
        self._until: int | None = None
        self._last: set[str] = set()
        self.count = 0

    async def page(self, given: Mapping[str, str], *, on: bool) -> bool:
        """Shows the next page, or the first one; returns whether there are more."""
        wanted = parse_audit_filter(given, self._room.now)
        if not on:
            self._rows.clear()
            self._until, self._last, self.count = None, set(), 0
        found = await self._find(wanted)
        with self._rows:
            for each in found[:PAGE]:
                _audit_row(each)
        self._go_on_after(found[:PAGE])
        return len(found) > PAGE

    async def _find(self, wanted: AuditFilter) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        async with aclosing(newest(self._room.desk, msgspec.structs.replace(wanted, until=self._until))) as entries:
            async for each in entries:
                if each.call not in self._last:
                    found.append(make_audit_entry(each))
                if len(found) > PAGE:
                    break
        return found

    def _go_on_after(self, found: list[AuditEntry]) -> None:
        """Several calls may have started at the same time: their ids tell them apart."""
        self.count += len(found)
        if found:
            before = self._last if found[-1].created_at == self._until else set[str]()
            self._until = found[-1].created_at
            self._last = before | {each.call for each in found if each.created_at == self._until}


def _audit_row(one: AuditEntry) -> None:
    with add_box("tr"):
        add_cell(format_moment(one.created_at), "h-short")
        add_cell(one.agent)
        add_cell(one.tool, "h-what")
        add_cell(f"{one.capability_level} {one.risk_level}".strip())
        outcome = label_outcome(one.outcome or "")
        with add_box("td"):
            add_chip(outcome.word, outcome.mood)
        add_cell(one.decided_by)
        add_cell(format_money(one.cost_usd), "h-num")
        add_cell(one.input_summary)
        add_cell(one.output_summary)
        with add_box("td"):
            add_link(shorten_id(one.session), f"/session/{one.session}")


LINES = "application/x-ndjson"
STATUS = {"wrong": 422, "missing": 404, "refused": 409, "forbidden": 403}


def add_downloads(api: FastAPI, app: Runtime) -> None:
    async def audit(request: Request) -> Response:
        desk = Desk(app, request.scope[WHO_KEY])
        try:
            wanted = parse_audit_filter(dict(request.query_params), app.clock.now())
        except HalterError as error:
            return _refusal_response(error)
        return StreamingResponse(_audit(desk, wanted), media_type=LINES, headers=_as_file("audit.jsonl"))

    async def session(name: str, request: Request) -> Response:
        desk = Desk(app, request.scope[WHO_KEY])
        try:
            row = await desk.session(name)
        except HalterError as error:
            return _refusal_response(error)
        lines = await app.store.study(lambda view: _journal(view, [row.session], app.clock.now()))
        return Response(lines, media_type=LINES, headers=_as_file(f"{make_file_name(row.session)}.jsonl"))

    api.get("/download/audit", include_in_schema=False, response_model=None)(audit)
    api.get("/download/session/{name}", include_in_schema=False, response_model=None)(session)


def _as_file(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"', "X-Content-Type-Options": "nosniff"}


def _refusal_response(error: HalterError) -> Response:
    status = STATUS[error.why] if isinstance(error, NotDone) else 422
    return JSONResponse({"error": str(error)}, status)


async def _audit(desk: Desk, wanted: AuditFilter) -> AsyncIterator[bytes]:
    async with aclosing(audit_of(desk, wanted)) as entries:
        async for each in entries:
            yield encode_public_json(make_audit_entry(each)) + b"\n"


def _journal(view: Any, sessions: Sequence[str], now: int) -> bytes:
    from halter.journal.export import export_sessions

    lines = export_sessions(view, sessions, encode_receipt, version=__version__, now=now)
    return b"".join(encode_public_json(line) + b"\n" for line, _ in lines)

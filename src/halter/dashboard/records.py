"""Pages of records: budgets with caps, and the audit with search and downloads."""

import json
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from nicegui import ui
from nicegui.element import Element

from halter import __version__
from halter.core.agent_spec import KNOWN_PROVIDERS, REFLEX, SCRIPTED
from halter.core.clock import DAY, SECOND, parse_duration, window_at
from halter.core.errors import HalterError, NotDone
from halter.core.ids import FLEET
from halter.core.money import ZERO_USD, format_unit_amount
from halter.core.public_json import encode_public_json
from halter.core.text import clean
from halter.dashboard.labels import format_money, format_tokens, format_window, label_outcome, shorten_id
from halter.dashboard.page import FeedChanges, OpenPage, RefreshPage, ask_cap
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
    chart_columns,
    chart_spending,
    make_file_name,
    make_legible,
    set_meter,
    split_arguments,
)
from halter.operations import money, queries
from halter.operations.desk import Actor
from halter.operations.money import Direction, Spending
from halter.operations.queries import AuditFilter, newest
from halter.operations.queries import audit as audit_of
from halter.present.events import format_moment
from halter.runtime.budgets import Budget
from halter.runtime.proof import encode_receipt
from halter.runtime.runtime import Runtime
from halter.server.middleware import WHO_KEY
from halter.state.audit import AuditEntry, make_audit_entry


async def list_current_budgets(page: OpenPage, under_way: Container[str]) -> Sequence[Budget]:
    """Lists the budgets of the fleet, agents, triggers, and of the sessions that are under way."""
    rows = await money.list_budgets(page.actor)
    return [row for row in rows if not row.scope.startswith("session:") or row.scope[len("session:") :] in under_way]


def format_amount(row: Budget, number: Decimal) -> str:
    """Formats an amount in the unit of its budget."""
    return format_money(number) if row.unit == "usd" else format_unit_amount(number, row.unit)


def format_budget_cap(row: Budget) -> str:
    return "no cap" if row.cap is None else format_amount(row, row.cap)


def compute_spent_share(row: Budget) -> float:
    """Returns how much of a cap is spent or held, up to 1; a cap of 0 is fully spent."""
    used = row.spent + row.held
    if row.cap is None:
        return 0.0
    return float(used / row.cap) if row.cap else float(used > 0)


BUDGET_COLUMNS = ("scope", "window", "used", "spent", "cap", "held", "left", "")
NUMBER_COLUMNS = ("spent", "cap", "held", "left")
SPENDING_PARTS = 288
CHART_PERIODS = {"Today": (0, 0), "14 days": (DAY, 14), "8 weeks": (7 * DAY, 8)}
"""What a column covers, and how many there are; today is drawn as a line against its cap."""
SUM_PERIODS = {"24 hours": DAY, "7 days": 7 * DAY, "30 days": 30 * DAY}


class CapScope(NamedTuple):
    """A budget and where it stands below the fleet: the agent that it belongs to, and its depth."""

    agent: str
    depth: int
    row: Budget


def arrange_caps(rows: Sequence[Budget], agents: Mapping[str, str]) -> list[CapScope]:
    """Puts the fleet first, then each agent with its triggers and sessions below it.

    A budget without a cap counts nothing that a person watches, unless it is money.
    """
    places = [_resolve_cap_scope(row, agents) for row in rows if row.cap is not None or row.unit == "usd"]
    order = {"fleet": 0, "agent": 1, "trigger": 2, "session": 3}
    return sorted(
        places,
        key=lambda place: (
            place.agent,
            order.get(place.row.scope.partition(":")[0], 9),
            place.row.scope,
            place.row.window,
        ),
    )


def _resolve_cap_scope(row: Budget, agents: Mapping[str, str]) -> CapScope:
    kind, _, name = row.scope.partition(":")
    match kind:
        case "agent":
            return CapScope(name, 1, row)
        case "trigger":
            return CapScope(name.partition("/")[0], 2, row)
        case "session":
            return CapScope(agents.get(name, ""), 2, row)
        case _:
            return CapScope("", 0, row)


async def build_budgets_page(page: OpenPage) -> RefreshPage:
    with add_section("Spent", card=True):
        with add_box("div", "h-filters", "What is charted", role="group"):
            whose: Any = ui.select(["fleet"], label="Whose", value="fleet").props("outlined dense")
            over: Any = ui.select(list(CHART_PERIODS), label="Over", value="Today").props("outlined dense")
        plot = Plot("What was spent", "Nothing was spent in this time.")
    with add_box("div", "h-filters", "What is summed up", role="group"):
        add_text("Spent by model and by tool", "h-head-text", "h2")
        add_box("span", "h-space")
        period: Any = ui.select(list(SUM_PERIODS), label="In the last", value="24 hours").props("outlined dense")
    with add_box("div", "h-two"):
        sums = [_build_sums(title, column) for title, column in (("By model", "requests"), ("By tool", "calls"))]
    nothing = add_text("", "h-none")
    with add_section("Caps", card=True):
        lines = KeyedList[CapScope](add_table("Caps", BUDGET_COLUMNS, NUMBER_COLUMNS), lambda one: _row(page, one))
    with add_section("Policy of the store", card=True):
        adopted, says = add_text(""), add_preformatted("")

    async def refresh(changes: FeedChanges) -> None:
        if not changes.has_commits:
            return
        if changes.concerns(FLEET):
            await _show_policy(page, adopted, says)
        agents = {row.session: row.agent for row in await queries.sessions_under_way(page.actor)}
        rows = await list_current_budgets(page, agents)
        lines.show({(each.row.scope, each.row.window, each.row.unit): each for each in arrange_caps(rows, agents)})
        scopes = ["fleet", *sorted({row.scope for row in rows if row.scope.startswith("agent:")})]
        if whose.options != scopes:
            whose.set_options(scopes)
        await _plot_spending(page, plot, str(whose.value), str(over.value), rows)
        spent = await money.read_spending(page.actor, page.now - SUM_PERIODS[str(period.value)])
        for show, of in zip(sums, (True, False), strict=True):
            show([line for line in spent if is_of_model(line) == of])
        nothing.show_text("" if spent else "No model was asked and no tool cost anything in this time.")

    async def refresh_page() -> None:
        await refresh(FeedChanges(everything=True))

    for each in (whose, over, period):
        each.on_value_change(refresh_page)
    await refresh_page()
    return refresh


def is_of_model(line: Spending) -> bool:
    """Whether something was spent on a model, and not on a tool."""
    provider, _, model = line.name.partition(":")
    return line.input_tokens + line.output_tokens > 0 or (
        model != "" and provider in (*KNOWN_PROVIDERS, SCRIPTED, REFLEX)
    )


class NamedSum(NamedTuple):
    """What was spent on one model or tool."""

    name: str
    spends: int
    tokens_in: int
    tokens_out: int
    spent: Decimal
    fraction: float


def sum_by_name(lines: Sequence[Spending]) -> list[NamedSum]:
    """Sums up spending by name, the dearest first; the share is of all."""
    found: dict[str, tuple[int, int, int, Decimal]] = {}
    for line in lines:
        spends, read, written, spent = found.get(line.name, (0, 0, 0, ZERO_USD))
        tokens = (read + line.input_tokens, written + line.output_tokens)
        found[line.name] = (spends + line.spends, *tokens, spent + line.spent_usd)
    total = sum((spent for *_, spent in found.values()), ZERO_USD) or Decimal(1)
    made = [NamedSum(name, *each, float(each[3] / total)) for name, each in found.items()]
    return sorted(made, key=lambda one: (-one.spent, -one.spends, one.name))[:MAX_SUMS]


MAX_SUMS = 12


def _build_sums(title: str, column: str) -> Callable[[Sequence[Spending]], None]:
    with add_box("div") as section, add_section(title, card=True):
        columns = (title.removeprefix("By "), column, "in", "out", "spent", "each", "share")
        body = add_table(title, columns, columns[1:-1])

    def build(one: NamedSum) -> Callable[[NamedSum], None]:
        with add_box("tr"):
            add_cell(one.name, "h-what")
            figures = [add_cell("", "h-num") for _ in columns[1:-1]]
            with add_box("td"):
                meter = add_meter(f"Spent on {one.name}, of all", 0)

        def show(one: NamedSum) -> None:
            shown = (
                f"{one.spends:,}",
                format_tokens(one.tokens_in) if one.tokens_in else "",
                format_tokens(one.tokens_out) if one.tokens_out else "",
                format_money(one.spent),
                format_money(one.spent / one.spends) if one.spent else "",
            )
            for cell, text in zip(figures, shown, strict=True):
                cell.show_text(text)
            set_meter(meter, one.fraction, mark=False)

        show(one)
        return show

    rows = KeyedList[NamedSum](body, build)

    def show(lines: Sequence[Spending]) -> None:
        found = sum_by_name(lines)
        rows.show({one.name: one for one in found})
        section.set_visibility(bool(found))

    return show


async def _show_policy(page: OpenPage, adopted: TextLabel, says: TextLabel) -> None:
    """Shows the store's policy, and who adopted it."""
    found = await money.show(page.actor)
    adopted.show_text(f"Adopted by {found.by} on {format_moment(found.at)}." if found.digest else money.NONE_YET)
    says.show_text("\n".join(f"{key}: {value}" for key, value in money.lines_of(found.policy)))


async def _plot_spending(page: OpenPage, plot: Plot, scope: str, over: str, rows: Sequence[Budget]) -> None:
    """Charts what one scope spent. A budget's day is UTC, as its window says."""
    size, count = CHART_PERIODS[over]
    if count:
        until = page.now - page.now % DAY + DAY
        points = await _read_points(page, scope, until - size * count, size, count)
        plot.show(chart_columns(points, size), empty=not any(value for _, value in points))
        return
    now = page.now
    since = now - now % DAY
    today = window_at("day", now)
    row = next((row for row in rows if (row.scope, row.window, row.unit) == (scope, today, "usd")), None)
    size = max(1, -(-(now + 1 - since) // SPENDING_PARTS))
    points = [each for each in await _read_points(page, scope, since, size, SPENDING_PARTS) if each[1]]
    cap = None if row is None or row.cap is None else float(row.cap)
    plot.show(chart_spending(points, cap, now), empty=not points)


async def _read_points(page: OpenPage, scope: str, since: int, size: int, count: int) -> list[Point]:
    """Reads what a scope spent in each part of a time; a part without spending is 0."""
    spent = [0.0] * count
    for each in await queries.spending(page.actor, since, since + size * count, count):
        if scope in ("fleet", f"agent:{each.agent}"):
            spent[each.part] += float(each.spent_usd)
    return [(since + part * size, value) for part, value in enumerate(spent)]


def _row(page: OpenPage, place: CapScope) -> Callable[[CapScope], None]:
    row = place.row
    name = f"{row.scope} {row.window}".strip()
    with add_box("tr"):
        with add_box("td", f"h-level-{place.depth}"):
            _name_scope(row)
        add_cell(format_window(row.window))
        with add_box("td"):
            drawn = add_meter(f"used of {name}", compute_spent_share(row))
        figures = [add_cell("", "h-num") for _ in NUMBER_COLUMNS]
        with add_box("td"), add_box("div", "h-row"):
            if page.has_role("operator") and row.unit == "usd":
                add_button("Raise…", lambda: _change(page, row, "raise"), "plain", f"Raise the cap of {name}")
                add_button("Lower…", lambda: _change(page, row, "lower"), "plain", f"Lower the cap of {name}")

    def show(row: Budget) -> None:
        remaining = "" if row.remaining is None else format_amount(row, max(ZERO_USD, row.remaining))
        held = format_amount(row, row.held) if row.held else ""
        shown = (format_amount(row, row.spent), format_budget_cap(row), held, remaining)
        for one, text in zip(figures, shown, strict=True):
            one.show_text(text)
        figures[-1].props["title"] = (
            f"{format_amount(row, row.kept)} more are kept for the last words" if row.kept else ""
        )
        set_meter(drawn, compute_spent_share(row))

    seen = [row]
    show(row)

    def update(place: CapScope) -> None:
        if place.row != seen[0]:
            seen[0] = place.row
            show(place.row)

    return update


def _name_scope(row: Budget) -> None:
    kind, _, name = row.scope.partition(":")
    match kind:
        case "agent":
            add_link(name, f"/agent/{name}").classes("h-what")
        case "session":
            add_link(name, f"/session/{name}")
        case "trigger":
            add_link(f"trigger {name.partition('/')[2]}", "/triggers")
        case _:
            add_text("The whole fleet", "h-what")


def _change(page: OpenPage, row: Budget, direction: Direction) -> None:
    stands = f"{row.scope} ({row.window or 'its life'}) has {format_budget_cap(row)}. "
    ask_cap(page, row.scope, direction, row.window, stands)


PAGE = 50
MAX_SAFE_CALLS = 500
AUDIT_COLUMNS = ("when", "agent", "tool", "outcome", "cost", "asked", "answered", "session")
FIELDS = (("agent", "Agent"), ("tool", "Tool"), ("outcome", "Outcome"), ("session", "Session"), ("text", "Text"))
DEFAULT_SEARCH_AGE = "7d"
OWN_PERIOD = "From … to …"
DEFAULT_PERIOD = "Last 7 days"
PERIODS = {"Last hour": "1h", "Last 24 hours": "24h", "Last 7 days": "7d", "Last 30 days": "30d", OWN_PERIOD: ""}
SAFE_NOTE = f"SAFE calls are read from the newest {queries.MOST_SAFE_SESSIONS} sessions that fit."
LEFT_OUT_NOTE = "Calls of SAFE tools are left out; tick “SAFE calls, too” to see them."


def parse_audit_filter(given: Mapping[str, str], now: int) -> AuditFilter:
    """Reads a filter: `since` and `until` are moments as a browser writes them, `age` is how far back."""
    since = parse_browser_time(given.get("since", ""), "the beginning")
    if since is None:
        since = now - parse_duration(given.get("age", "").strip() or DEFAULT_SEARCH_AGE)

    def read_value(name: str) -> str:
        return clean(given.get(name, "").strip())

    return AuditFilter(
        since=since,
        until=parse_browser_time(given.get("until", ""), "the end"),
        agent=read_value("agent"),
        tool=read_value("tool"),
        outcome=read_value("outcome"),
        session=read_value("session"),
        text=read_value("text"),
    )


def parse_browser_time(text: str, what: str) -> int | None:
    """Reads a local date and time, as in 2026-11-17T08:30; None where there is none."""
    if not text.strip():
        return None
    try:
        return int(datetime.fromisoformat(text.strip()).astimezone().timestamp() * SECOND)
    except (ValueError, OverflowError, OSError) as error:
        raise NotDone(f"{text!r} is not a time for {what}: write it like 2026-11-17T08:30.", "wrong") from error


async def build_audit_page(page: OpenPage) -> RefreshPage:
    with add_section("Search", card=True), add_box("form", "h-form", "Search the audit", role="search") as form:
        inputs = _build_audit_inputs(page)
        add_submit("Search", "go")
        export = add_link("Export as JSON lines", "/download/audit")
        export.props["download"] = ""
    with add_section("Calls", card=True):
        shown_as = add_text("", "h-dim")
        rows = add_table("Calls", AUDIT_COLUMNS, ("cost",))
        older = add_button("Older", lambda: None)
    looking_for = _Search(page, rows)

    async def run_search(*, on: bool = False) -> None:
        given = _read_audit_inputs(inputs)
        export.props["href"] = f"/download/audit?{urlencode(given)}"
        try:
            more = await looking_for.page(given, on=on, safe=bool(inputs["safe"].value))
        except HalterError as error:
            page.show_message(str(error), bad=True)
            return
        count = f"{looking_for.count} shown, the newest first." if looking_for.count else "Nothing was found."
        shown_as.show_text(f"{count} {SAFE_NOTE if inputs['safe'].value else LEFT_OUT_NOTE}")
        older.set_visibility(more)

    async def search() -> None:
        ui.navigate.history.replace(make_audit_path(inputs))
        await run_search()

    form.on("submit.prevent", search)
    older.on_click(lambda: run_search(on=True))
    await run_search()

    async def refresh(_: FeedChanges) -> None:
        """Search results stay as they are until the next search."""

    return refresh


def _build_audit_inputs(page: OpenPage) -> Mapping[str, Any]:
    """Builds the fields of the search, filled with what the address says."""
    question = page.query_value("period")
    chosen = question if question in PERIODS else DEFAULT_PERIOD
    period: Any = ui.select(list(PERIODS), value=chosen, label="When").props("outlined dense")
    since, until = (
        ui.input(label, value=make_legible(page.query_value(name))).props(
            "outlined dense type=datetime-local stack-label"
        )
        for name, label in (("since", "From"), ("until", "To"))
    )
    for each in (since, until):
        each.bind_visibility_from(period, "value", value=OWN_PERIOD)
        each.set_visibility(chosen == OWN_PERIOD)
    named: dict[str, Any] = {
        name: ui.input(label, value=make_legible(page.query_value(name))).props("outlined dense")
        for name, label in FIELDS
    }
    safe: Any = ui.checkbox("SAFE calls, too", value=page.query_value("safe") == "yes")
    return {"period": period, "since": since, "until": until, **named, "safe": safe}


def make_audit_path(inputs: Mapping[str, Any]) -> str:
    """Makes the address that leads back to a search."""
    given = {name: str(each.value or "") for name, each in inputs.items() if name != "safe"}
    if given["period"] != OWN_PERIOD:
        given |= {"since": "", "until": ""}
    given["safe"] = "yes" if inputs["safe"].value else ""
    kept = {name: value for name, value in given.items() if value not in ("", DEFAULT_PERIOD)}
    return f"/audit?{urlencode(kept)}" if kept else "/audit"


def _read_audit_inputs(inputs: Mapping[str, Any]) -> Mapping[str, str]:
    given = {name: str(inputs[name].value or "") for name, _ in FIELDS}
    age = PERIODS.get(str(inputs["period"].value), "")
    if age:
        return {"age": age, **given}
    return {"since": str(inputs["since"].value or ""), "until": str(inputs["until"].value or ""), **given}


class _Search:
    """The results so far."""

    def __init__(self, page: OpenPage, rows: Element) -> None:
        self._page = page
        self._rows = rows
        self._before_seq: int | None = None
        self._last: set[str] = set()
        self.count = 0

    async def page(self, given: Mapping[str, str], *, on: bool, safe: bool) -> bool:
        """Shows the next page, or the first one; returns whether there are more."""
        filters = parse_audit_filter(given, self._page.now)
        if not on:
            self._rows.clear()
            self._before_seq, self._last, self.count = filters.until, set(), 0
        found = await self._find(msgspec.structs.replace(filters, until=self._before_seq), safe=safe)
        with self._rows:
            for each in found[:PAGE]:
                _audit_row(self._page, each)
        self._continue_after(found[:PAGE])
        return len(found) > PAGE

    async def _find(self, filters: AuditFilter, *, safe: bool) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        async with aclosing(newest(self._page.actor, filters)) as entries:
            async for each in entries:
                if each.call not in self._last:
                    found.append(make_audit_entry(each))
                if len(found) > PAGE:
                    break
        if safe:
            calls = await queries.read_safe_calls(self._page.actor, filters, MAX_SAFE_CALLS)
            found += [each for each in calls if each.call not in self._last]
            found.sort(key=lambda one: (one.created_at, one.call), reverse=True)
        return found

    def _continue_after(self, found: list[AuditEntry]) -> None:
        """Several calls may have started at the same time: their ids tell them apart."""
        self.count += len(found)
        if found:
            before = self._last if found[-1].created_at == self._before_seq else set[str]()
            self._before_seq = found[-1].created_at
            self._last = before | {each.call for each in found if each.created_at == self._before_seq}


def list_arguments(summary: str) -> str:
    """Writes a JSON object as names and values, one to a line, without the empty ones; other text as it is."""
    values, more = split_arguments(summary)
    given = {name: value for name, value in values.items() if value not in ("", None, [], {})}
    if not given:
        return "" if values else summary
    lines = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    return "\n".join([*lines, *([more] if more else [])])


def _audit_row(page: OpenPage, one: AuditEntry) -> None:
    outcome = label_outcome(one.outcome or "")
    with add_box("tr"):
        with add_box("td", "h-short"):
            page.add_moment(one.created_at)
        with add_box("td"):
            if one.agent:
                add_link(one.agent, f"/agent/{one.agent}")
        with add_box("td"):
            add_text(one.tool, "h-what")
            add_text(f"{one.capability_level} {one.risk_level}".strip().capitalize(), "h-dim h-small")
        with add_box("td"):
            add_chip(outcome.text, outcome.mood)
            if one.decided_by:
                add_text(f"by {one.decided_by}", "h-dim h-small")
        add_cell(format_money(one.cost_usd) if one.cost_usd else "", "h-num")
        add_cell(list_arguments(one.input_summary), "h-said-short")
        add_cell(list_arguments(one.output_summary), "h-said-short")
        with add_box("td"):
            if one.session:
                add_link(shorten_id(one.session), f"/session/{one.session}")


LINES = "application/x-ndjson"
STATUS = {"wrong": 422, "missing": 404, "refused": 409, "forbidden": 403}


def add_downloads(api: FastAPI, app: Runtime) -> None:
    async def audit(request: Request) -> Response:
        actor = Actor(app, request.scope[WHO_KEY])
        try:
            filters = parse_audit_filter(dict(request.query_params), app.clock.now())
        except HalterError as error:
            return _refusal_response(error)
        return StreamingResponse(_audit(actor, filters), media_type=LINES, headers=_to_download_headers("audit.jsonl"))

    async def session(name: str, request: Request) -> Response:
        actor = Actor(app, request.scope[WHO_KEY])
        try:
            row = await actor.session(name)
        except HalterError as error:
            return _refusal_response(error)
        lines = await app.store.study(lambda view: _journal(view, [row.session], app.clock.now()))
        return Response(lines, media_type=LINES, headers=_to_download_headers(f"{make_file_name(row.session)}.jsonl"))

    api.get("/download/audit", include_in_schema=False, response_model=None)(audit)
    api.get("/download/session/{name}", include_in_schema=False, response_model=None)(session)


def _to_download_headers(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"', "X-Content-Type-Options": "nosniff"}


def _refusal_response(error: HalterError) -> Response:
    status = STATUS[error.why] if isinstance(error, NotDone) else 422
    return JSONResponse({"error": str(error)}, status)


async def _audit(actor: Actor, filters: AuditFilter) -> AsyncIterator[bytes]:
    async with aclosing(audit_of(actor, filters)) as entries:
        async for each in entries:
            yield encode_public_json(make_audit_entry(each)) + b"\n"


def _journal(view: Any, sessions: Sequence[str], now: int) -> bytes:
    from halter.journal.export import export_sessions

    lines = export_sessions(view, sessions, encode_receipt, version=__version__, now=now)
    return b"".join(encode_public_json(line) + b"\n" for line, _ in lines)

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
from halter.core.clock import DAY, SECOND, parse_duration, window_at
from halter.core.errors import HalterError, NotDone
from halter.core.ids import FLEET
from halter.core.money import ZERO_USD, format_unit_amount, format_usd
from halter.core.public_json import encode_public_json
from halter.core.text import clean
from halter.dashboard.labels import format_tokens, format_window, label_outcome, shorten_id
from halter.dashboard.page import FeedChanges, OpenPage, RefreshPage, ask_cap
from halter.dashboard.widgets import (
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
from halter.journal.export import export_sessions
from halter.operations import money, queries
from halter.operations.actor import Actor
from halter.operations.money import Direction, Spending
from halter.operations.queries import AuditFilter, newest
from halter.present.moments import format_moment
from halter.runtime.budgets import Budget
from halter.runtime.proof import encode_receipt
from halter.runtime.runtime import Runtime
from halter.server.middleware import WHO_KEY
from halter.spec.models import KNOWN_PROVIDERS, REFLEX, SCRIPTED
from halter.state.audit import AuditEntry, describe_starter, make_audit_entry


async def list_current_budgets(page: OpenPage, under_way: Container[str]) -> Sequence[Budget]:
    """List the budgets of the fleet, agents and triggers, and of the active sessions."""
    rows = await money.list_budgets(page.actor)
    return [row for row in rows if not row.scope.startswith("session:") or row.scope[len("session:") :] in under_way]


def format_amount(row: Budget, number: Decimal) -> str:
    """Format an amount in the unit of its budget."""
    return format_usd(number) if row.unit == "usd" else format_unit_amount(number, row.unit)


def format_budget_cap(row: Budget) -> str:
    return "no cap" if row.cap is None else format_amount(row, row.cap)


def compute_spent_share(row: Budget) -> float:
    """Return the share of a cap that is spent or held. A cap of 0 is full as soon as anything is."""
    used = row.spent + row.held
    if row.cap is None:
        return 0.0
    return float(used / row.cap) if row.cap else float(used > 0)


BUDGET_COLUMNS = ("scope", "window", "used", "spent", "cap", "held", "left", "")
NUMBER_COLUMNS = ("spent", "cap", "held", "left")
SPENDING_PARTS = 288
CHART_PERIODS = {"Today": (0, 0), "14 days": (DAY, 14), "8 weeks": (7 * DAY, 8)}
"""The length and the number of columns; today is a line against its cap instead."""
SUM_PERIODS = {"24 hours": DAY, "7 days": 7 * DAY, "30 days": 30 * DAY}


class CapScope(NamedTuple):
    """A budget with its agent and its depth below the fleet."""

    agent: str
    depth: int
    row: Budget


def arrange_caps(rows: Sequence[Budget], agents: Mapping[str, str]) -> list[CapScope]:
    """Sort budgets: the fleet first, then each agent with its triggers and sessions below it.

    Budgets without a cap are left out, unless they are in dollars.
    """
    cap_scopes = [_resolve_cap_scope(row, agents) for row in rows if row.cap is not None or row.unit == "usd"]
    order = {"fleet": 0, "agent": 1, "trigger": 2, "session": 3}
    return sorted(
        cap_scopes,
        key=lambda cap_scope: (
            cap_scope.agent,
            order.get(cap_scope.row.scope.partition(":")[0], 9),
            cap_scope.row.scope,
            cap_scope.row.window,
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
        with add_box("div", "h-filters", "Chart", role="group"):
            scope_select: Any = ui.select(["fleet"], label="Scope", value="fleet").props("outlined dense")
            period_select: Any = ui.select(list(CHART_PERIODS), label="Period", value="Today").props("outlined dense")
        plot = Plot("Spending", "Nothing spent in this period.")
    with add_box("div", "h-filters", "Totals", role="group"):
        add_text("Spent by model and by tool", "h-head-text", "h2")
        add_box("span", "h-space")
        sum_select: Any = ui.select(list(SUM_PERIODS), label="In the last", value="24 hours").props("outlined dense")
    with add_box("div", "h-two"):
        sums = [_build_sums(title, column) for title, column in (("By model", "requests"), ("By tool", "calls"))]
    empty_label = add_text("", "h-none")
    with add_section("Caps", card=True):
        lines = KeyedList[CapScope](add_table("Caps", BUDGET_COLUMNS, NUMBER_COLUMNS), lambda one: _row(page, one))
    with add_section("Policy of the store", card=True):
        policy_origin, policy_text = add_text(""), add_preformatted("")

    async def refresh(changes: FeedChanges) -> None:
        if not changes.has_commits:
            return
        if changes.concerns(FLEET):
            await _show_policy(page, policy_origin, policy_text)
        agents = {row.session: row.agent for row in await queries.sessions_under_way(page.actor)}
        rows = await list_current_budgets(page, agents)
        lines.show(
            {(select.row.scope, select.row.window, select.row.unit): select for select in arrange_caps(rows, agents)}
        )
        scopes = ["fleet", *sorted({row.scope for row in rows if row.scope.startswith("agent:")})]
        if scope_select.options != scopes:
            scope_select.set_options(scopes)
        await _plot_spending(page, plot, str(scope_select.value), str(period_select.value), rows)
        spending = await money.read_spending(page.actor, page.now - SUM_PERIODS[str(sum_select.value)])
        for show, is_model in zip(sums, (True, False), strict=True):
            show([line for line in spending if is_of_model(line) == is_model])
        empty_label.show_text("" if spending else "No model requests and no paid tool calls in this period.")

    async def refresh_page() -> None:
        await refresh(FeedChanges(everything=True))

    for select in (scope_select, period_select, sum_select):
        select.on_value_change(refresh_page)
    await refresh_page()
    return refresh


def is_of_model(line: Spending) -> bool:
    """Return True if spending was on a model and not on a tool."""
    provider, _, model = line.name.partition(":")
    return line.input_tokens + line.output_tokens > 0 or (
        model != "" and provider in (*KNOWN_PROVIDERS, SCRIPTED, REFLEX)
    )


class NamedSum(NamedTuple):
    """The spending on one model or tool; `fraction` is its share of all."""

    name: str
    spends: int
    tokens_in: int
    tokens_out: int
    spent: Decimal
    fraction: float


def sum_by_name(lines: Sequence[Spending]) -> list[NamedSum]:
    """Sum spending by name, the highest first."""
    totals: dict[str, tuple[int, int, int, Decimal]] = {}
    for line in lines:
        spends, tokens_in, tokens_out, cost = totals.get(line.name, (0, 0, 0, ZERO_USD))
        tokens = (tokens_in + line.input_tokens, tokens_out + line.output_tokens)
        totals[line.name] = (spends + line.spends, *tokens, cost + line.spent_usd)
    total = sum((cost for *_, cost in totals.values()), ZERO_USD) or Decimal(1)
    sums = [NamedSum(name, *each, float(each[3] / total)) for name, each in totals.items()]
    return sorted(sums, key=lambda one: (-one.spent, -one.spends, one.name))[:MAX_SUMS]


MAX_SUMS = 12


def _build_sums(title: str, column: str) -> Callable[[Sequence[Spending]], None]:
    with add_box("div") as section, add_section(title, card=True):
        columns = (title.removeprefix("By "), column, "in", "out", "spent", "average", "share")
        body = add_table(title, columns, columns[1:-1])

    def build(named_sum: NamedSum) -> Callable[[NamedSum], None]:
        with add_box("tr"):
            add_cell(named_sum.name, "h-what")
            figures = [add_cell("", "h-num") for _ in columns[1:-1]]
            with add_box("td"):
                meter = add_meter(f"Spent on {named_sum.name}, of all", 0)

        def show(named_sum: NamedSum) -> None:
            texts = (
                f"{named_sum.spends:,}",
                format_tokens(named_sum.tokens_in) if named_sum.tokens_in else "",
                format_tokens(named_sum.tokens_out) if named_sum.tokens_out else "",
                format_usd(named_sum.spent),
                format_usd(named_sum.spent / named_sum.spends) if named_sum.spent else "",
            )
            for cell, text in zip(figures, texts, strict=True):
                cell.show_text(text)
            set_meter(meter, named_sum.fraction, highlights=False)

        show(named_sum)
        return show

    rows = KeyedList[NamedSum](body, build)

    def show(lines: Sequence[Spending]) -> None:
        sums = sum_by_name(lines)
        rows.show({named_sum.name: named_sum for named_sum in sums})
        section.set_visibility(bool(sums))

    return show


async def _show_policy(page: OpenPage, origin_label: TextLabel, text_label: TextLabel) -> None:
    """Show the store's policy, and who adopted it and when."""
    policy = await money.show(page.actor)
    origin_label.show_text(
        f"Adopted by {policy.by} on {format_moment(policy.at)}." if policy.digest else money.NO_POLICY_YET
    )
    text_label.show_text("\n".join(f"{key}: {value}" for key, value in money.lines_of(policy.policy)))


async def _plot_spending(page: OpenPage, plot: Plot, scope: str, period: str, rows: Sequence[Budget]) -> None:
    """Chart the spending of one scope. The day of a budget is UTC, as in its window."""
    size, count = CHART_PERIODS[period]
    if count:
        ends_at = page.now - page.now % DAY + DAY
        points = await _read_points(page, scope, ends_at - size * count, size, count)
        plot.show(chart_columns(points, size), empty=not any(value for _, value in points))
        return
    now = page.now
    starts_at = now - now % DAY
    today = window_at("day", now)
    row = next((row for row in rows if (row.scope, row.window, row.unit) == (scope, today, "usd")), None)
    size = max(1, -(-(now + 1 - starts_at) // SPENDING_PARTS))
    points = [each for each in await _read_points(page, scope, starts_at, size, SPENDING_PARTS) if each[1]]
    cap = None if row is None or row.cap is None else float(row.cap)
    plot.show(chart_spending(points, cap, now), empty=not points)


async def _read_points(page: OpenPage, scope: str, starts_at: int, size: int, count: int) -> list[Point]:
    """Read the spending of a scope in equal parts of a period; a part without spending is 0."""
    usd_by_part = [0.0] * count
    for entry in await queries.spending(page.actor, starts_at, starts_at + size * count, count):
        if scope in ("fleet", f"agent:{entry.agent}"):
            usd_by_part[entry.part] += float(entry.spent_usd)
    return [(starts_at + part * size, value) for part, value in enumerate(usd_by_part)]


def _row(page: OpenPage, cap_scope: CapScope) -> Callable[[CapScope], None]:
    row = cap_scope.row
    name = f"{row.scope} {row.window}".strip()
    with add_box("tr"):
        with add_box("td", f"h-level-{cap_scope.depth}"):
            _name_scope(row)
        add_cell(format_window(row.window))
        with add_box("td"):
            meter = add_meter(f"used of {name}", compute_spent_share(row))
        figures = [add_cell("", "h-num") for _ in NUMBER_COLUMNS]
        with add_box("td"), add_box("div", "h-row"):
            if page.has_role("operator") and row.unit == "usd":
                add_button("Raise…", lambda: _change(page, row, "raise"), "plain", f"Raise the cap of {name}")
                add_button("Lower…", lambda: _change(page, row, "lower"), "plain", f"Lower the cap of {name}")

    def show(row: Budget) -> None:
        remaining = "" if row.remaining is None else format_amount(row, max(ZERO_USD, row.remaining))
        held_text = format_amount(row, row.held) if row.held else ""
        texts = (format_amount(row, row.spent), format_budget_cap(row), held_text, remaining)
        for label, text in zip(figures, texts, strict=True):
            label.show_text(text)
        figures[-1].props["title"] = (
            f"{format_amount(row, row.kept)} more is reserved for the wrap-up" if row.kept else ""
        )
        set_meter(meter, compute_spent_share(row))

    current = [row]
    show(row)

    def update(cap_scope: CapScope) -> None:
        if cap_scope.row != current[0]:
            current[0] = cap_scope.row
            show(cap_scope.row)

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
    current_cap = f"Current cap of {row.scope} ({row.window or 'whole life'}): {format_budget_cap(row)}. "
    ask_cap(page, row.scope, direction, row.window, current_cap)


PAGE = 50
MAX_SAFE_CALLS = 500
AUDIT_COLUMNS = ("when", "agent", "tool", "outcome", "cost", "arguments", "result", "started by", "session")
FIELDS = (("agent", "Agent"), ("tool", "Tool"), ("outcome", "Outcome"), ("session", "Session"), ("text", "Text"))
DEFAULT_SEARCH_AGE = "7d"
OWN_PERIOD = "From … to …"
DEFAULT_PERIOD = "Last 7 days"
PERIODS = {"Last hour": "1h", "Last 24 hours": "24h", "Last 7 days": "7d", "Last 30 days": "30d", OWN_PERIOD: ""}
SAFE_NOTE = f"SAFE calls come from the newest {queries.MAX_SAFE_SESSIONS} matching sessions."
OMITTED_SAFE_NOTE = "Calls of SAFE tools are not listed; tick “Include SAFE calls” to list them."


def parse_audit_filter(fields: Mapping[str, str], now: int) -> AuditFilter:
    """Parse a filter: `since` and `until` are browser times; `age`, a duration, is used without `since`."""
    starts_at = parse_browser_time(fields.get("since", ""), "start")
    if starts_at is None:
        starts_at = now - parse_duration(fields.get("age", "").strip() or DEFAULT_SEARCH_AGE)

    def read_value(name: str) -> str:
        return clean(fields.get(name, "").strip())

    return AuditFilter(
        since=starts_at,
        until=parse_browser_time(fields.get("until", ""), "end"),
        agent=read_value("agent"),
        tool=read_value("tool"),
        outcome=read_value("outcome"),
        session=read_value("session"),
        text=read_value("text"),
    )


def parse_browser_time(text: str, name: str) -> int | None:
    """Parse a local date and time, as in 2026-11-17T08:30; None if the text is empty."""
    if not text.strip():
        return None
    try:
        return int(datetime.fromisoformat(text.strip()).astimezone().timestamp() * SECOND)
    except (ValueError, OverflowError, OSError) as error:
        raise NotDone(f"Invalid {name} time {text!r}. Use the form 2026-11-17T08:30.", "wrong") from error


async def build_audit_page(page: OpenPage) -> RefreshPage:
    with add_section("Search", card=True), add_box("form", "h-form", "Search the audit", role="search") as form:
        inputs = _build_audit_inputs(page)
        add_submit("Search", "go")
        export = add_link("Export as JSON lines", "/download/audit")
        export.props["download"] = ""
    with add_section("Calls", card=True):
        summary = add_text("", "h-dim")
        rows = add_table("Calls", AUDIT_COLUMNS, ("cost",))
        older = add_button("Older", lambda: None)
    results = _Search(page, rows)

    async def run_search(*, on: bool = False) -> None:
        fields = _read_audit_inputs(inputs)
        export.props["href"] = f"/download/audit?{urlencode(fields)}"
        try:
            has_more = await results.page(fields, on=on, safe=bool(inputs["safe"].value))
        except HalterError as error:
            page.show_message(str(error), bad=True)
            return
        count = f"{results.count} shown, newest first." if results.count else "No matching calls."
        summary.show_text(f"{count} {SAFE_NOTE if inputs['safe'].value else OMITTED_SAFE_NOTE}")
        older.set_visibility(has_more)

    async def search() -> None:
        ui.navigate.history.replace(make_audit_path(inputs))
        await run_search()

    form.on("submit.prevent", search)
    older.on_click(lambda: run_search(on=True))
    await run_search()

    async def refresh(_: FeedChanges) -> None:
        """Do nothing: results change only with the next search."""

    return refresh


def _build_audit_inputs(page: OpenPage) -> Mapping[str, Any]:
    """Build the fields of the search, filled from the address."""
    question = page.query_value("period")
    chosen_period = question if question in PERIODS else DEFAULT_PERIOD
    period: Any = ui.select(list(PERIODS), value=chosen_period, label="When").props("outlined dense")
    since_input, until_input = (
        ui.input(label, value=make_legible(page.query_value(name))).props(
            "outlined dense type=datetime-local stack-label"
        )
        for name, label in (("since", "From"), ("until", "To"))
    )
    for date_input in (since_input, until_input):
        date_input.bind_visibility_from(period, "value", value=OWN_PERIOD)
        date_input.set_visibility(chosen_period == OWN_PERIOD)
    text_inputs: dict[str, Any] = {
        name: ui.input(label, value=make_legible(page.query_value(name))).props("outlined dense")
        for name, label in FIELDS
    }
    safe: Any = ui.checkbox("Include SAFE calls", value=page.query_value("safe") == "yes")
    return {"period": period, "since": since_input, "until": until_input, **text_inputs, "safe": safe}


def make_audit_path(inputs: Mapping[str, Any]) -> str:
    """Make the address that reproduces a search."""
    fields = {name: str(each.value or "") for name, each in inputs.items() if name != "safe"}
    if fields["period"] != OWN_PERIOD:
        fields |= {"since": "", "until": ""}
    fields["safe"] = "yes" if inputs["safe"].value else ""
    query = {name: value for name, value in fields.items() if value not in ("", DEFAULT_PERIOD)}
    return f"/audit?{urlencode(query)}" if query else "/audit"


def _read_audit_inputs(inputs: Mapping[str, Any]) -> Mapping[str, str]:
    fields = {name: str(inputs[name].value or "") for name, _ in FIELDS}
    age = PERIODS.get(str(inputs["period"].value), "")
    if age:
        return {"age": age, **fields}
    return {"since": str(inputs["since"].value or ""), "until": str(inputs["until"].value or ""), **fields}


class _Search:
    """The results of the current search, page by page."""

    def __init__(self, page: OpenPage, rows: Element) -> None:
        self._page = page
        self._rows = rows
        self._before_seq: int | None = None
        self._last: set[str] = set()
        self.count = 0

    async def page(self, fields: Mapping[str, str], *, on: bool, safe: bool) -> bool:
        """Show the first page, or with `on` the next one; return whether there are more."""
        filters = parse_audit_filter(fields, self._page.now)
        if not on:
            self._rows.clear()
            self._before_seq, self._last, self.count = filters.until, set(), 0
        entries = await self._find(msgspec.structs.replace(filters, until=self._before_seq), safe=safe)
        with self._rows:
            for entry in entries[:PAGE]:
                _audit_row(self._page, entry)
        self._continue_after(entries[:PAGE])
        return len(entries) > PAGE

    async def _find(self, filters: AuditFilter, *, safe: bool) -> list[AuditEntry]:
        matching_entries: list[AuditEntry] = []
        async with aclosing(newest(self._page.actor, filters)) as entries:
            async for row in entries:
                if row.call not in self._last:
                    matching_entries.append(make_audit_entry(row))
                if len(matching_entries) > PAGE:
                    break
        if safe:
            calls = await queries.read_safe_calls(self._page.actor, filters, MAX_SAFE_CALLS)
            matching_entries += [row for row in calls if row.call not in self._last]
            matching_entries.sort(key=lambda one: (one.created_at, one.call), reverse=True)
        return matching_entries

    def _continue_after(self, entries: list[AuditEntry]) -> None:
        """Set where the next page starts. Calls may start at the same time, so the ids already shown are kept."""
        self.count += len(entries)
        if entries:
            previous_ids = self._last if entries[-1].created_at == self._before_seq else set[str]()
            self._before_seq = entries[-1].created_at
            self._last = previous_ids | {each.call for each in entries if each.created_at == self._before_seq}


def list_arguments(summary: str) -> str:
    """Format a JSON object as names and values, one per line, without empty ones; other text is unchanged."""
    values, rest = split_arguments(summary)
    filled_values = {name: value for name, value in values.items() if value not in ("", None, [], {})}
    if not filled_values:
        return "" if values else summary
    lines = [
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in filled_values.items()
    ]
    return "\n".join([*lines, *([rest] if rest else [])])


def _audit_row(page: OpenPage, entry: AuditEntry) -> None:
    outcome = label_outcome(entry.outcome or "")
    with add_box("tr"):
        with add_box("td", "h-short"):
            page.add_moment(entry.created_at)
        with add_box("td"):
            if entry.agent:
                add_link(entry.agent, f"/agent/{entry.agent}")
        with add_box("td"):
            add_text(entry.tool, "h-what")
            add_text(f"{entry.capability_level} {entry.risk_level}".strip().capitalize(), "h-dim h-small")
        with add_box("td"):
            add_chip(outcome.text, outcome.mood)
            if entry.decided_by:
                add_text(f"by {entry.decided_by}", "h-dim h-small")
        add_cell(format_usd(entry.cost_usd) if entry.cost_usd else "", "h-num")
        add_cell(list_arguments(entry.input_summary), "h-said-short")
        add_cell(entry.error or list_arguments(entry.output_summary), "h-said-short")
        add_cell(describe_starter(entry))
        with add_box("td"):
            if entry.session:
                add_link(shorten_id(entry.session), f"/session/{entry.session}")


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
    async with aclosing(queries.audit(actor, filters)) as entries:
        async for row in entries:
            yield encode_public_json(make_audit_entry(row)) + b"\n"


def _journal(view: Any, sessions: Sequence[str], now: int) -> bytes:
    lines = export_sessions(view, sessions, encode_receipt, version=__version__, now=now)
    return b"".join(encode_public_json(line) + b"\n" for line, _ in lines)

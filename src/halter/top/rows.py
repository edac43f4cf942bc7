"""The content of the live terminal's tables and panes, as plain text."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Final

from halter.core.clock import format_duration
from halter.core.money import Unit, format_share, format_unit_amount, format_usd
from halter.core.text import describe_need_count, escape_hidden, to_one_line
from halter.operations.status import describe_unhealthy
from halter.operations.top import FleetView, QueuedNeed, SessionLine
from halter.present.moments import format_hour
from halter.present.sheet import Listing, Sheet
from halter.runtime.needs import parse_arguments

Row = tuple[str, Sequence[str]]
"""A key that is stable across refreshes, and the cells."""

COLUMNS: Final = {
    "sessions": ("session", "state", "spent", "of cap", "began", "next"),
    "inbox": ("agent", "what"),
    "budgets": ("scope", "used", "spent", "held", "cap", "window"),
    "workers": ("process", "where", "health", "agents", "awake"),
}
TITLES: Final = {"sessions": "Sessions", "inbox": "Needs you", "budgets": "Budgets", "workers": "Workers"}
BAR: Final = 5


def head_line(view: FleetView, trouble: str = "") -> str:
    """Format the summary line: the time, a problem, needs, halts and spending."""
    status = view.status
    halted_scopes = [row.scope for row in view.halts if row.halted]
    parts = [
        format_hour(status.at),
        trouble,
        describe_unhealthy(status),
        describe_need_count(len(view.inbox), "thing"),
        f"HALTED: {', '.join(halted_scopes)}" if halted_scopes else "",
        f"today {format_share(status.spent_today_usd, status.cap_today_usd)}",
    ]
    return to_one_line(" · ".join(part for part in parts if part))


def list_rows(view: FleetView) -> dict[str, list[Row]]:
    """List the rows of every table."""
    now = view.status.at
    return {
        "sessions": [(line.session, _session(line, now)) for line in view.sessions],
        "inbox": [(key_of(need), (need.need.agent, need.need.sentence)) for need in view.inbox],
        "budgets": [
            (
                f"{row.scope} {row.window} {row.unit}",
                (
                    row.scope,
                    draw_bar(row.spent + row.held, row.cap),
                    _format_part(row.spent, row.unit),
                    _format_part(row.held, row.unit),
                    "none" if row.cap is None else format_unit_amount(row.cap, row.unit),
                    row.window or "whole life",
                ),
            )
            for row in view.budgets
        ],
        "workers": [
            (
                row.worker,
                (f"{row.kind} {row.pid}", row.host, row.health, " ".join(sorted(row.agents)), str(row.awake)),
            )
            for row in view.workers
        ],
    }


def _format_part(amount: Decimal, unit: Unit) -> str:
    """Format an amount without its unit, which the cap shows."""
    return format_unit_amount(amount, unit).removesuffix(f" {unit}")


def _session(line: SessionLine, now: int) -> tuple[str, ...]:
    next_due = (
        "" if line.due_at is None else "now" if line.due_at <= now else f"in {format_duration(line.due_at - now)}"
    )
    return (
        line.session,
        line.state.replace("_", " ").lower(),
        format_usd(line.spent_usd),
        # The cap of a session is in the store only after its first hold.
        draw_bar(line.spent_usd + line.held_usd, line.cap_usd) if line.spent_usd or line.held_usd else "",
        f"{format_duration(max(0, now - line.started_at))} ago",
        line.why.replace("_", " ") or next_due,
    )


def draw_bar(used: Decimal, cap: Decimal | None) -> str:
    """Draw the spent and held share of a cap; readable without colour."""
    if cap is None:
        return "no cap"
    percent = 100 if not cap else int(100 * used / cap)
    full = min(BAR, BAR * percent // 100)
    return f"{'#' * full}{'.' * (BAR - full)} {percent} %"


def key_of(queued_need: QueuedNeed) -> str:
    need = queued_need.need
    return need.decision or f"{need.kind} {need.session} {need.scope} {need.item} {need.sentence}"


def describe_need(queued_need: QueuedNeed) -> str:
    """Describe a whole need: sentence, reason, unchanged arguments, and the effects of yes and no."""
    need = queued_need.need
    parts = [need.sentence, need.why and f"Why: {need.why}", need.cause and f"Because: {need.cause}", need.shown]
    if queued_need.digest:
        parts += [f"y: {queued_need.yes}. n: {queued_need.no}."]
    else:
        parts += [f"Type: {command}" for command in need.commands]
    return escape_hidden("\n".join(part for part in parts if part))


def editable_arguments(need: QueuedNeed) -> dict[str, object]:
    """Parse the arguments of a waiting call; empty for other needs and for unreadable arguments."""
    return dict(parse_arguments("", need.need.shown)) if need.need.kind == "approval" else {}


def build_top_sheet(view: FleetView) -> Sheet:
    """Build the whole view as a sheet, for a pipe or a screen reader."""
    return [head_line(view), *_listings(view)]


def _listings(view: FleetView) -> Iterator[Listing]:
    for name, rows in list_rows(view).items():
        empty = {"inbox": "Nothing needs you.", "sessions": "There are no sessions yet."}.get(name, "")
        yield Listing(
            TITLES[name], [*COLUMNS[name]], [[*cells] for _, cells in rows], long=COLUMNS[name][-1], empty=empty
        )

"""What the live terminal's tables and panes say, as plain text."""

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Final

from halter.core.clock import format_duration
from halter.core.money import Unit, format_unit_amount, format_usd
from halter.core.text import escape_hidden, format_count, to_one_line
from halter.operations.top import FleetView, QueuedNeed, SessionLine
from halter.present.events import format_hour
from halter.present.sheet import Listing, Sheet
from halter.runtime.needs import parse_arguments

Row = tuple[str, Sequence[str]]
"""A key that stays the same from one look to the next, and the cells."""

COLUMNS: Final = {
    "sessions": ("session", "state", "spent", "of cap", "began", "next"),
    "inbox": ("agent", "what"),
    "budgets": ("scope", "used", "spent", "held", "cap", "window"),
    "workers": ("process", "where", "health", "agents", "awake"),
}
TITLES: Final = {"sessions": "Sessions", "inbox": "Needs you", "budgets": "Budgets", "workers": "Workers"}
BAR: Final = 5


def head_line(view: FleetView, trouble: str = "") -> str:
    """Say the most important things in a line: the time, money, questions, halts, and what is wrong."""
    status = view.status
    cap = f" of {format_usd(status.cap_today_usd)}" if status.cap_today_usd is not None else ""
    halted = [row.scope for row in view.halts if row.halted]
    parts = [
        format_hour(status.at),
        trouble,
        f"{format_count(len(view.inbox), 'thing')} for you" if view.inbox else "nothing needs you",
        f"HALTED: {', '.join(halted)}" if halted else "",
        f"today {format_usd(status.spent_today_usd)}{cap}",
    ]
    return to_one_line(" · ".join(part for part in parts if part))


def list_rows(view: FleetView) -> dict[str, list[Row]]:
    """The rows of every table."""
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
                    row.window or "its life",
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
    """An amount of a cap; the cap itself says the unit."""
    return format_unit_amount(amount, unit).removesuffix(f" {unit}")


def _session(line: SessionLine, now: int) -> tuple[str, ...]:
    due = "" if line.due_at is None else "now" if line.due_at <= now else f"in {format_duration(line.due_at - now)}"
    return (
        line.session,
        line.state.replace("_", " ").lower(),
        format_usd(line.spent_usd),
        # Before anything was held, the cap is not in the store.
        draw_bar(line.spent_usd + line.held_usd, line.cap_usd) if line.spent_usd or line.held_usd else "",
        f"{format_duration(max(0, now - line.started_at))} ago",
        line.why.replace("_", " ") or due,
    )


def draw_bar(used: Decimal, cap: Decimal | None) -> str:
    """Draw how much of a cap is spent or held, also for screens without colour."""
    if cap is None:
        return "no cap"
    percent = 100 if not cap else int(100 * used / cap)
    full = min(BAR, BAR * percent // 100)
    return f"{'#' * full}{'.' * (BAR - full)} {percent} %"


def key_of(one: QueuedNeed) -> str:
    need = one.need
    return need.decision or f"{need.kind} {need.session} {need.scope} {need.item} {need.sentence}"


def describe_need(one: QueuedNeed) -> str:
    """Show all of a question: the sentence, the reason, the arguments as they are, and what a yes and a no do."""
    need = one.need
    parts = [need.sentence, need.why and f"Why: {need.why}", need.shown]
    if one.digest:
        parts += [f"y: {one.yes}. n: {one.no}."]
    else:
        parts += [f"Type: {command}" for command in need.commands]
    return escape_hidden("\n".join(part for part in parts if part))


def editable_arguments(need: QueuedNeed) -> dict[str, object]:
    """The arguments of a call that waits; none where it is no call, or they cannot be read."""
    return dict(parse_arguments("", need.need.shown)) if need.need.kind == "approval" else {}


def build_top_sheet(view: FleetView) -> Sheet:
    """The whole view once, for a pipe or a screen reader."""
    return [head_line(view), *_listings(view)]


def _listings(view: FleetView) -> Iterator[Listing]:
    for name, rows in list_rows(view).items():
        empty = {"inbox": "Nothing needs you.", "sessions": "There are no sessions yet."}.get(name, "")
        yield Listing(
            TITLES[name], [*COLUMNS[name]], [[*cells] for _, cells in rows], long=COLUMNS[name][-1], empty=empty
        )

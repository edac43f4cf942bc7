"""Labels for the codes in the store: states, outcomes, kinds, ids, amounts and times."""

import re
from typing import Any, Final, NamedTuple, cast

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.operations.queries import AgentLine
from halter.present.moments import format_moment


class Label(NamedTuple):
    """A text with a mood and an icon. The mood is a colour; the text carries the same meaning."""

    text: str
    mood: str = "dim"
    icon: str = ""


STATES: Final = {
    "RUNNING": Label("Running", "calm", "play"),
    "NOT_RUNNING": Label("Not running", "dim", "pause"),
    "WAITING_FOR_TOOL": Label("Waiting for a tool", "calm", "tool"),
    "WAITING_FOR_INPUT": Label("Waiting for an answer", "look", "chat"),
    "WAITING_FOR_APPROVAL": Label("Waiting for approval", "look", "person"),
    "WAITING_FOR_BUDGET": Label("Waiting for a budget", "look", "budgets"),
    "SLEEPING": Label("Sleeping", "dim", "moon"),
    "PAUSED": Label("Paused", "look", "pause"),
    "COMPLETED": Label("Completed", "good", "check"),
    "CANCELLED": Label("Cancelled", "dim", "cross"),
    "TIMED_OUT": Label("Timed out", "bad", "clock"),
    "MAX_STEPS": Label("Out of steps", "bad", "alert"),
    "BUDGET_EXCEEDED": Label("Out of budget", "bad", "budgets"),
    "HALTED": Label("Halted", "bad", "halt"),
    "ERROR": Label("Failed", "bad", "alert"),
}

OUTCOMES: Final = {
    "ok": Label("Done", "good", "check"),
    "error": Label("Failed", "bad", "alert"),
    "timeout": Label("Timed out", "bad", "clock"),
    "cancelled": Label("Cancelled", "dim", "cross"),
    "external_halt": Label("Halted", "bad", "halt"),
    "tool_not_granted": Label("Not granted", "bad", "halt"),
    "invalid_arguments": Label("Invalid arguments", "look", "alert"),
    "unknown_tool": Label("Unknown tool", "look", "alert"),
    "disabled": Label("Switched off", "look", "halt"),
    "quarantined": Label("Quarantined", "look", "halt"),
    "rate_limited": Label("Rate limited", "look", "clock"),
    "approval_denied": Label("Denied", "bad", "cross"),
    "untrusted": Label("Untrusted", "bad", "cross"),
    "approval_expired": Label("Approval expired", "look", "clock"),
    "cost_cap_reached": Label("Cap reached", "bad", "budgets"),
    "unknown": Label("Outcome unknown", "look", "alert"),
}

REASONS: Final = {
    "cost_cap_reached": "cap reached",
    "overrun": "it cost more than its hold",
    "external_halt": "halted",
    "idle_timeout": "no activity for too long",
    "timed_out": "time limit reached",
    "max_steps": "step limit reached",
    "repetition": "it repeated the same calls",
    "model_error": "model request failed",
    "step_failed": "a step failed",
    "error": "an error",
}
"""Reasons of an end that the state does not give."""

DECISIONS: Final = {
    "approval": Label("Approval", "look", "tool"),
    "unknown_call": Label("In doubt", "bad", "alert"),
    "cap_raise": Label("Cap", "look", "budgets"),
    "changed_tool": Label("Changed tool", "look", "tool"),
    "changed_server": Label("Changed server", "look", "tool"),
    "proposal": Label("Proposal", "calm", "paper"),
    "schedule": Label("Schedule", "calm", "clock"),
}

KINDS: Final = {"autonomous": "autonomous", "task": "task", "chat": "chat"}
SEVERITIES: Final = ("critical", "high", "medium", "low", "info")
SEVERITY_MOODS: Final = {"critical": "bad", "high": "bad", "medium": "look", "low": "dim", "info": "dim"}
RISK_MOODS: Final = {"LOW": "good", "MEDIUM": "look", "HIGH": "bad", "CRITICAL": "bad"}


def label_state(state: str) -> Label:
    return STATES.get(state, Label(state.replace("_", " ").capitalize()))


def label_session(row: SessionRow) -> Label:
    return label_state(row.shown_state)


def label_health(line: AgentLine) -> Label:
    """Label the health of an agent; conditions that only a person can change come first."""
    if line.halted:
        return Label("Halted", "bad", "halt")
    if line.on is False:
        return Label("Switched off", "dim", "pause")
    if line.health == "unhealthy":
        return Label("Unhealthy", "bad", "alert")
    if line.stopped:
        return Label("Stopped", "bad", "alert")
    if line.trouble:
        return Label("Waiting", "look", "clock")
    if any(health != "ok" for health in line.sensors.values()):
        return Label("Sensors failing", "look", "alert")
    return label_state(line.state) if line.state else Label("Idle", "dim", "moon")


def is_unwell(line: AgentLine) -> bool:
    """Return True if an agent needs attention. An agent that a person switched off does not."""
    return label_health(line).mood == "bad" or bool(line.trouble)


def explain_health(line: AgentLine) -> str:
    """Explain the health label of an agent; "" where the label says it all."""
    if line.halted:
        return translate_scopes(line.halted)
    if line.on is False:
        return f"by {line.switched_by}" if line.switched_by else ""
    if line.trouble:
        return line.trouble
    failing = [name for name, health in line.sensors.items() if health != "ok"]
    if failing:
        return f"{', '.join(failing)}: no reading"
    return f"{line.under_way} active sessions" if line.under_way > 1 else ""


LATE: Final = 2 * MINUTE
"""A wake is late if its session has not woken this long after it."""


def format_wake(due_at: int, now: int) -> str:
    """Format when a session wakes, or how late it is. A late wake means that no process runs it, or all are busy."""
    if due_at > now:
        return format_age(due_at, now)
    return f"late by {format_span(now - due_at)}" if now - due_at > LATE else "now"


def label_sensor(health: str) -> Label:
    return Label("OK", "good") if health == "ok" else Label(health.replace("_", " ").capitalize(), "bad")


def label_outcome(outcome: str) -> Label:
    if not outcome:
        return Label("Running", "calm", "play")
    return OUTCOMES.get(outcome, Label(outcome.replace("_", " ").capitalize()))


def explain_end(row: SessionRow) -> str:
    """Explain why a session ended; "" where its state says it."""
    return explain_terminal(row.state, row.terminal_reason)


def explain_terminal(state: str, reason: str) -> str:
    state_text = label_state(state).text.casefold()
    reason_text = explain_reason(reason)
    return "" if reason_text == state_text else reason_text


def explain_reason(reason: str) -> str:
    """Describe the reason of an end; "" for one that explains nothing."""
    return REASONS.get(reason, "" if reason in ("", "completed", "cancelled") else reason)


NEEDS: Final = {
    "question": Label("Question", "look", "chat"),
    "paused": Label("Paused", "look", "pause"),
    "model": Label("No model", "bad", "alert"),
    "stopped": Label("Unhealthy", "bad", "alert"),
    "unhealthy": Label("Unhealthy", "bad", "alert"),
    "document": Label("Document", "look", "paper"),
    "halt": Label("Halted", "bad", "halt"),
    "host": Label("Host unavailable", "bad", "alert"),
    "undelivered": Label("Not delivered", "bad", "bell"),
    "budget": Label("Cap", "look", "budgets"),
    "unclaimed": Label("Not running", "look", "pause"),
    "kept": Label("To review", "calm", "findings"),
}
"""Labels of the needs that are not decisions."""


def label_decision(about: str) -> Label:
    return (DECISIONS | NEEDS).get(about, Label(about.replace("_", " ").capitalize(), "look", "bell"))


SHORT_ID: Final = 25
"""Names such as `analyst.reports-12` are shown whole; random ids of 26 letters are shortened."""


def shorten_id(text: str) -> str:
    """Show a long id by its beginning and its end."""
    return text if len(text) <= SHORT_ID else f"{text[:4]}…{text[-6:]}"


def format_tokens(count: int) -> str:
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:,.1f}{letter}"
    return f"{count:,}"


def format_age(at: int, now: int) -> str:
    """Format a moment relative to now; one a week or more away is a date."""
    distance = abs(now - at)
    if distance < 5 * SECOND:
        return "now"
    if distance >= 7 * DAY:
        return format_moment(at)[:10]
    unit, symbol = next(each for each in _UNITS if distance >= each[0])
    sentence = f"{distance // unit} {symbol}"
    return f"{sentence} ago" if at <= now else f"in {sentence}"


_UNITS: Final = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"))


def format_span(micros: int) -> str:
    """Show a duration in its two largest units."""
    if micros < SECOND:
        return f"{micros // 1000} ms"
    parts: list[str] = []
    for unit, symbol in _UNITS:
        count, micros = divmod(micros, unit)
        if count or parts:
            parts.append(f"{count} {symbol}" if count else "")
    return " ".join(part for part in parts[:2] if part)


def format_window(window: str) -> str:
    """Name the window of a cap."""
    kind, _, period = window.partition("/")
    zone = period.partition("@")[2]
    names = {"": "whole life", "minute": "per minute", "hour": "this hour", "day": "today", "month": "this month"}
    return f"{names.get(kind, window)}{f' ({zone})' if zone else ''}"


def name_scope(scope: str) -> str:
    kind, _, name = scope.partition(":")
    return "The whole fleet" if kind == "fleet" else shorten_id(name)


def translate_scopes(sentence: str) -> str:
    """Format the scopes and windows in a sentence for people: `session:a-1` becomes "session a-1"."""
    text = _SCOPE.sub(lambda match: f"{match[1] if match.start() else match[1].capitalize()} {match[2]}", sentence)
    return _WINDOW.sub(lambda match: f"({format_window(match[1])})", text)


_SCOPE: Final = re.compile(r"\b(agent|session|trigger|key):(?=\S)(\S+)")
_WINDOW: Final = re.compile(r"\(((?:minute|hour|day|month)(?:/[^)\s]*)?)\)")


def join_counts(*counts: tuple[int, str]) -> str:
    """Join the counts that are not zero, as in "2 calls, 1 finding"."""
    return ", ".join(format_count(count, noun) for count, noun in counts if count)


def format_value(value: Any) -> str:
    """Format a value of the hot state; nested values are only counted."""
    match value:
        case str():
            return value
        case dict():
            fields = cast("dict[str, Any]", value)
            return ", ".join(f"{name}: {_format_inner(each)}" for name, each in fields.items()) or "none"
        case list():
            items = cast("list[Any]", value)
            is_flat = not any(isinstance(each, dict | list) for each in items)
            return (", ".join(map(_format_inner, items)) or "none") if is_flat else format_count(len(items), "item")
        case _:
            return _format_inner(value)


def _format_inner(value: Any) -> str:
    match value:
        case str():
            return value
        case bool():
            return "yes" if value else "no"
        case None:
            return "nothing"
        case dict() | list():
            count = len(cast("list[Any]", value))
            return format_count(count, "item" if isinstance(value, list) else "field") if count else "none"
        case _:
            return str(value)


MODES: Final = {
    "ASSIST": "before most calls that change something",
    "SEMI": "before restricted and risky calls",
    "FULL": "only before privileged calls",
}
"""When an agent in each mode asks for approval."""

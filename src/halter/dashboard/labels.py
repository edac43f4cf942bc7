"""Words for what the store calls by a code: states, outcomes, kinds, ids, amounts and moments."""

import re
from decimal import Decimal
from typing import Any, Final, NamedTuple, cast

from halter.core.clock import DAY, HOUR, MINUTE, SECOND
from halter.core.money import format_usd
from halter.core.rows import SessionRow
from halter.core.text import format_count
from halter.operations.queries import AgentLine
from halter.present.events import format_moment


class Label(NamedTuple):
    """A word, its mood and its icon. The mood is a colour; the word says the same."""

    text: str
    mood: str = "dim"
    icon: str = ""


STATES: Final = {
    "RUNNING": Label("Running", "calm", "play"),
    "WAITING_FOR_TOOL": Label("Waiting for a tool", "calm", "tool"),
    "WAITING_FOR_INPUT": Label("Waiting for an answer", "look", "chat"),
    "WAITING_FOR_APPROVAL": Label("Waiting for approval", "look", "person"),
    "WAITING_FOR_BUDGET": Label("Waiting for money", "look", "budgets"),
    "SLEEPING": Label("Sleeping", "dim", "moon"),
    "PAUSED": Label("Paused", "look", "pause"),
    "COMPLETED": Label("Completed", "good", "check"),
    "CANCELLED": Label("Cancelled", "dim", "cross"),
    "TIMED_OUT": Label("Timed out", "bad", "clock"),
    "MAX_STEPS": Label("Out of steps", "bad", "alert"),
    "BUDGET_EXCEEDED": Label("Out of money", "bad", "budgets"),
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
    "invalid_arguments": Label("Wrong arguments", "look", "alert"),
    "unknown_tool": Label("No such tool", "look", "alert"),
    "disabled": Label("Switched off", "look", "halt"),
    "quarantined": Label("Quarantined", "look", "halt"),
    "rate_limited": Label("Too often", "look", "clock"),
    "approval_denied": Label("Denied", "bad", "cross"),
    "untrusted": Label("Not trusted", "bad", "cross"),
    "approval_expired": Label("Not approved in time", "look", "clock"),
    "cost_cap_reached": Label("Cap reached", "bad", "budgets"),
    "unknown": Label("Outcome unknown", "look", "alert"),
}

REASONS: Final = {
    "cost_cap_reached": "its cap was reached",
    "overrun": "it cost more than was held",
    "external_halt": "it was halted",
    "idle_timeout": "nothing happened for too long",
    "timed_out": "it took too long",
    "max_steps": "it took too many steps",
    "repetition": "it repeated itself",
    "model_error": "the model failed",
    "step_failed": "a step failed",
    "error": "an error",
}
"""Why a session ended, where its state does not say so."""

DECISIONS: Final = {
    "approval": Label("Approval", "look", "tool"),
    "unknown_call": Label("In doubt", "bad", "alert"),
    "cap_raise": Label("Cap", "look", "budgets"),
    "changed_tool": Label("Changed tool", "look", "tool"),
    "changed_server": Label("Changed server", "look", "tool"),
    "proposal": Label("To remember", "calm", "paper"),
    "schedule": Label("Schedule", "calm", "clock"),
}

KINDS: Final = {"autonomous": "runs by itself", "task": "task", "chat": "chat"}
SEVERITIES: Final = ("critical", "high", "medium", "low", "info")
SEVERITY_MOODS: Final = {"critical": "bad", "high": "bad", "medium": "look", "low": "dim", "info": "dim"}
RISK_MOODS: Final = {"LOW": "good", "MEDIUM": "look", "HIGH": "bad", "CRITICAL": "bad"}


def label_state(state: str) -> Label:
    return STATES.get(state, Label(state.replace("_", " ").capitalize()))


def label_health(line: AgentLine) -> Label:
    """Says in a word how an agent is; what only a person can change comes first."""
    if line.halted:
        return Label("Halted", "bad", "halt")
    if line.on is False:
        return Label("Switched off", "dim", "pause")
    if line.stopped:
        return Label("Stopped", "bad", "alert")
    if line.trouble:
        return Label("Held up", "look", "clock")
    if any(health != "ok" for health in line.sensors.values()):
        return Label("Sensors fail", "look", "alert")
    return label_state(line.state) if line.state else Label("Idle", "dim", "moon")


def is_unwell(line: AgentLine) -> bool:
    """Whether an agent does not do what it should: one that a person switched off is well."""
    return label_health(line).mood == "bad" or bool(line.trouble)


def explain_health(line: AgentLine) -> str:
    """Says why an agent is not at work, as far as its word of health does not."""
    if line.halted:
        return translate_scopes(line.halted)
    if line.on is False:
        return f"by {line.switched_by}" if line.switched_by else ""
    if line.trouble:
        return line.trouble
    failing = [name for name, health in line.sensors.items() if health != "ok"]
    if failing:
        return f"{', '.join(failing)}: no reading"
    return f"{line.under_way} sessions under way" if line.under_way > 1 else ""


LATE: Final = 2 * MINUTE
"""A wake is late when nothing happened so long after it."""


def format_wake(due_at: int, now: int) -> str:
    """Says when a session wakes, or how late it is: then no process runs it, or all are busy."""
    if due_at > now:
        return format_age(due_at, now)
    return f"late by {format_span(now - due_at)}" if now - due_at > LATE else "now"


def label_sensor(health: str) -> Label:
    return Label("Reads", "good") if health == "ok" else Label(health.replace("_", " ").capitalize(), "bad")


def label_outcome(outcome: str) -> Label:
    if not outcome:
        return Label("Under way", "calm", "play")
    return OUTCOMES.get(outcome, Label(outcome.replace("_", " ").capitalize()))


def explain_end(row: SessionRow) -> str:
    """Says why a session ended; "" where its state says it."""
    return explain_terminal(row.state, row.terminal_reason)


def explain_terminal(state: str, reason: str) -> str:
    known = label_state(state).text.casefold()
    why = explain_reason(reason)
    return "" if why.replace("it was ", "") == known else why


def explain_reason(reason: str) -> str:
    """Puts the reason of an end into words; "" for one that explains nothing."""
    return REASONS.get(reason, "" if reason in ("", "completed", "cancelled") else reason)


NEEDS: Final = {
    "question": Label("Question", "look", "chat"),
    "paused": Label("Paused", "look", "pause"),
    "model": Label("No model", "bad", "alert"),
    "stopped": Label("Stopped", "bad", "alert"),
    "document": Label("Document", "look", "paper"),
    "halt": Label("Halted", "bad", "halt"),
    "host": Label("Host away", "bad", "alert"),
    "undelivered": Label("Not delivered", "bad", "bell"),
    "budget": Label("Cap", "look", "budgets"),
    "kept": Label("To review", "calm", "findings"),
}
"""What needs a person and is no decision."""


def label_decision(about: str) -> Label:
    return (DECISIONS | NEEDS).get(about, Label(about.replace("_", " ").capitalize(), "look", "bell"))


SHORT_ID: Final = 25
"""Names such as `analyst.reports-12` are shown whole; ids of 26 letters and more say nothing to a person."""


def shorten_id(text: str) -> str:
    """Shows a long id by its beginning and its end."""
    return text if len(text) <= SHORT_ID else f"{text[:4]}…{text[-6:]}"


FINE: Final = Decimal("0.0001")


def format_money(amount: Decimal) -> str:
    """Shows an amount in cents, and a smaller one in as many digits as it needs to be more than nothing."""
    size = abs(amount)
    if size == 0 or size >= Decimal("0.1"):
        return _round_amount(amount, 2)
    return _round_amount(amount, 4) if size >= FINE else format_usd(amount)


def _round_amount(amount: Decimal, digits: int) -> str:
    whole = f"{abs(amount):,.{digits}f}"
    cents = whole[: whole.index(".") + 3]
    fine = whole[len(cents) :].rstrip("0")
    return f"{'-' if amount < 0 else ''}${cents}{fine}"


def format_share(spent: Decimal, cap: Decimal) -> str:
    """Shows what is spent of a cap, both in cents where the cap is at least a dollar."""
    if cap < 1 or spent == 0:
        return f"{format_money(spent)} of {format_money(cap)}"
    shown = _round_amount(spent, 2) if spent >= Decimal("0.005") else "less than $0.01"
    return f"{shown} of {format_money(cap)}"


def format_tokens(count: int) -> str:
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:,.1f}{letter}"
    return f"{count:,}"


def format_age(at: int, now: int) -> str:
    """Says how long ago a moment was, or when it comes; one that is far away is a date."""
    away = abs(now - at)
    if away < 5 * SECOND:
        return "now"
    if away >= 7 * DAY:
        return format_moment(at)[:10]
    unit, word = next(each for each in _UNITS if away >= each[0])
    sentence = f"{away // unit} {word}"
    return f"{sentence} ago" if at <= now else f"in {sentence}"


_UNITS: Final = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"))


def format_span(micros: int) -> str:
    """Shows a duration in its two largest units."""
    if micros < SECOND:
        return f"{micros // 1000} ms"
    parts: list[str] = []
    for unit, word in _UNITS:
        count, micros = divmod(micros, unit)
        if count or parts:
            parts.append(f"{count} {word}" if count else "")
    return " ".join(part for part in parts[:2] if part)


def format_window(window: str) -> str:
    """Names the window of a cap."""
    kind, _, rest = window.partition("/")
    zone = rest.partition("@")[2]
    words = {"": "whole life", "minute": "per minute", "hour": "this hour", "day": "today", "month": "this month"}
    return f"{words.get(kind, window)}{f' ({zone})' if zone else ''}"


def name_scope(scope: str) -> str:
    kind, _, name = scope.partition(":")
    return "The whole fleet" if kind == "fleet" else shorten_id(name)


def translate_scopes(sentence: str) -> str:
    """Writes scopes and windows in a sentence as people say them: `session:a-1` is "session a-1"."""
    told = _SCOPE.sub(lambda match: f"{match[1] if match.start() else match[1].capitalize()} {match[2]}", sentence)
    return _WINDOW.sub(lambda match: f"({format_window(match[1])})", told)


_SCOPE: Final = re.compile(r"\b(agent|session|trigger):(?=\S)(\S+)")
_WINDOW: Final = re.compile(r"\(((?:minute|hour|day|month)(?:/[^)\s]*)?)\)")


def join_counts(*counts: tuple[int, str]) -> str:
    """Joins what there is at all, as in "2 calls, 1 finding"."""
    return ", ".join(format_count(count, noun) for count, noun in counts if count)


def format_value(value: Any) -> str:
    """Shows a value of the hot state in words; what is deep inside of it is only counted."""
    match value:
        case str():
            return value
        case dict():
            fields = cast("dict[str, Any]", value)
            return ", ".join(f"{name}: {_format_inner(each)}" for name, each in fields.items()) or "none"
        case list():
            items = cast("list[Any]", value)
            plain = not any(isinstance(each, dict | list) for each in items)
            return (", ".join(map(_format_inner, items)) or "none") if plain else format_count(len(items), "item")
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
"""When an agent of a mode asks a person."""

"""Lists that the CLI shows, as facts and tables: sessions, budgets, decisions, rules, triggers, artifacts, audit."""

from collections.abc import Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Final

from halter.core.clock import format_duration
from halter.core.money import ZERO_USD, format_unit_amount, format_usd
from halter.core.rows import RuleRow, SessionRow
from halter.core.text import escape_hidden, format_count
from halter.present.events import describe_review, format_moment, format_relative_moment
from halter.present.sheet import Facts, Listing, Sheet

if TYPE_CHECKING:
    from halter.operations.artifacts import Artifact
    from halter.operations.decisions import OpenInbox, RuleOffers, WaitingDecision
    from halter.operations.money import Budgets, Spending
    from halter.runtime.budgets import Budget
    from halter.runtime.forecast import TriggerPlan
    from halter.runtime.needs import Need
    from halter.state.audit import AuditEntry

DIGEST_PREFIX_LENGTH: Final = 16
"""How much of a document's digest is shown; it is enough to name it."""


def build_sessions_sheet(rows: Sequence[SessionRow], now: int) -> Sheet:
    # Few columns of short words: on a screen of 80 columns an id has to stay in one piece, or it cannot be copied.
    columns = ["session", "agent", "state", "began", "ended or due"]
    cells = [
        [
            row.session,
            f"{row.agent} ({row.kind})",
            row.state.replace("_", " "),
            f"{format_duration(max(0, now - row.started_at))} ago",
            row.terminal_reason.replace("_", " ") or describe_next_due(row, now),
        ]
        for row in rows
    ]
    return [Listing("Sessions", columns, cells, empty="There are no sessions yet.")]


def describe_next_due(row: SessionRow, now: int) -> str:
    """Say when a session's next turn is due, and what wakes it earlier."""
    early = ", ".join(row.wake_on.split()) if row.ended_at is None else ""
    if row.due_at is None:
        return f"by {early}" if early else ""
    if row.due_at <= now:
        return "now"
    due = f"in {format_duration(row.due_at - now)} ({format_relative_moment(row.due_at, now)})"
    return f"{due}, or by {early}" if early else due


def build_budgets_sheet(found: "Budgets", _: int) -> Sheet:
    kept = any(row.kept for row in found.budgets)
    columns = ["scope", "window", "cap", "spent", "held", *(["kept"] if kept else []), "left", "set by"]
    # Tokens are counted although nothing bounds them, which is no news as long as there are none.
    rows = [_budget(row, kept=kept) for row in found.budgets if row.cap is not None or row.spent or row.held]
    spent = [
        [line.agent, line.purpose, line.name, str(line.spends), format_usd(line.spent_usd)] for line in found.last_day
    ]
    return [
        Listing(
            "Budgets",
            columns,
            rows,
            right="cap spent held kept left",
            long="scope window",
            empty="Nothing was spent or held yet.",
        ),
        Listing(
            "Spent in the last 24 hours",
            ["agent", "purpose", "on", "times", "cost"],
            spent,
            right="times cost",
            empty="Nothing was spent in the last 24 hours.",
        ),
        _list_models(found.last_day),
    ]


FORECAST_DAYS: Final = 30


def _list_models(spent: "Sequence[Spending]") -> Listing:
    """What each model cost in the last day, and what thirty such days would cost."""
    lines: dict[str, list[Spending]] = {}
    for line in spent:
        if line.input_tokens or line.output_tokens:
            lines.setdefault(line.name, []).append(line)
    rows = [
        [
            model,
            f"{sum(line.spends for line in each):,}",
            f"{sum(line.input_tokens for line in each):,}",
            f"{sum(line.output_tokens for line in each):,}",
            format_usd(cost := sum((line.spent_usd for line in each), ZERO_USD)),
            format_usd(cost * FORECAST_DAYS),
        ]
        for model, each in sorted(lines.items())
    ]
    columns = ["model", "requests", "in", "out", "day", "month"]
    return Listing("By model, with thirty such days", columns, rows, right="requests in out day month", long="model")


def _budget(row: "Budget", *, kept: bool) -> list[str]:
    cap = "none" if row.cap is None else format_unit_amount(row.cap, row.unit)
    remaining = "" if row.remaining is None else format_unit_amount(row.remaining, row.unit)
    spent, held = format_unit_amount(row.spent, row.unit), format_unit_amount(row.held, row.unit)
    reserve = ([format_unit_amount(row.kept, row.unit)] if row.kept else [""]) if kept else []
    return [row.scope, row.window or "its life", cap, spent, held, *reserve, remaining, row.cap_by or "config"]


def build_inbox_sheet(found: "OpenInbox", now: int) -> Sheet:
    return [*_inbox(found, now)]


def _inbox(found: "OpenInbox", now: int) -> Iterator[Facts | str]:
    open_count = len(found.decisions)
    if open_count:
        yield f"{format_count(open_count, 'decision')} for you:"
    elif not found.needs:
        yield "Nothing needs you."
    for number, decision in enumerate(found.decisions, 1):
        yield Facts("", [("number", str(number)), *_decision(decision, now, found.option)])
    if found.needs:
        yield "This needs you as well:" if open_count else "This needs you:"
    for need in found.needs:
        yield Facts("", build_need_facts(need, found.option))
    if found.news:
        yield "Notices of the last day:"
    for each in found.news:
        agent = "" if each.subject.startswith(each.agent) else f"{each.agent}: "
        yield f"{format_moment(each.queued_at)} {agent}{each.subject}"


def build_need_facts(need: "Need", option: str = "") -> list[tuple[str, str]]:
    """Show one thing that waits for a person, with the commands that answer it."""
    said = (("what", escape_hidden(need.sentence)), ("why", escape_hidden(need.why)))
    return [*said, *(("type", f"{each}{option}") for each in need.commands)]


def build_decision_sheet(decision: "WaitingDecision", now: int) -> Sheet:
    """Show a decision to the person who is asked about it right now."""
    return [Facts("", [fact for fact in _decision(decision, now) if fact[0] not in ("yes", "no")])]


def _decision(decision: "WaitingDecision", now: int, option: str = "") -> list[tuple[str, str]]:
    from halter.operations.decisions import render_prompt

    words, more = render_prompt(decision), f" --cap AMOUNT{option}" if decision.about == "cap_raise" else option
    risk = f"{decision.level}, risk {decision.risk}" if decision.risk else decision.level
    waited, remaining = format_duration(max(0, now - decision.asked_at)), format_duration(decision.expires_at - now)
    return [
        ("decision", decision.decision),
        ("what", words.what),
        ("why", words.why),
        ("risk", ": ".join(part for part in (risk, "; ".join(decision.reasons)) if part)),
        ("shown", words.shown),
        ("agent", f"{decision.agent}, session {decision.session}" if decision.session else decision.agent),
        ("waits", f"{waited}, for at most {remaining} more"),
        ("yes", f"{words.yes}: halter approve {decision.decision}{more}"),
        ("no", f"{words.no}: halter deny {decision.decision}{option}"),
    ]


def build_offers_sheet(found: "RuleOffers", _: int) -> Sheet:
    if not found.offers:
        return [f"No rule can answer {found.decision}: it is always asked about."]
    return [
        Facts("", [("always", each.sentence), ("choose", _choose(found.decision, each.match))]) for each in found.offers
    ]


def _choose(decision: str, match: str) -> str:
    lines = () if match == "same" else match.splitlines()
    return " ".join([f"halter approve {decision} --always", *(f"--match {quote(line)}" for line in lines)])


def build_rules_sheet(rows: Sequence[RuleRow], now: int) -> Sheet:
    return [_rule(row, now) for row in rows] or ["There are no rules."]


def _rule(row: RuleRow, now: int) -> Facts:
    from halter.guard.approvals import read_standing_rule
    from halter.operations.decisions import describe_matcher

    if row.ended_at is not None:
        until = f"ended by {row.ended_by}, {format_moment(row.ended_at)}"
    elif now >= row.expires_at:
        until = f"over since {format_moment(row.expires_at)}"
    else:
        until = f"{format_moment(row.expires_at)}, {format_duration(row.expires_at - now)} from now"
    return Facts(
        "",
        [
            ("rule", row.rule),
            ("always", f"{row.tool} {describe_matcher(read_standing_rule(row).matcher)}"),
            ("where", f"{row.scope} {row.owner}".strip()),
            ("by", f"{row.by}, {format_moment(row.made_at)}"),
            ("until", until),
        ],
    )


def build_triggers_sheet(found: "Sequence[TriggerPlan]", now: int) -> Sheet:
    columns = ["trigger", "when", "next", "last run", "waits", "made by"]
    empty = "Nothing is planned. Say it to an agent, or write it into its agent.yaml."
    left = [
        f"{plan.trigger}: {item.name} is quarantined. Try it again with: "
        f"halter schedules retry {plan.trigger} {item.item[:DIGEST_PREFIX_LENGTH]}"
        for plan in found
        for item in plan.quarantined
    ]
    rows = [_trigger(plan, now) for plan in found]
    note = [ONLY_WHILE_RUN] if rows else []
    return [Listing("Schedules", columns, rows, long="trigger when waits", empty=empty), *left, *note]


ONLY_WHILE_RUN: Final = "They run only while `halter up`, `halter serve` or a worker runs their agent: halter status."


def _trigger(plan: "TriggerPlan", now: int) -> list[str]:
    due = "" if plan.next_at is None else f"in {format_duration(max(0, plan.next_at - now))}"
    last = "" if plan.last_at is None else f"{format_relative_moment(plan.last_at, now)}, {plan.session}"
    quarantined = f"{len(plan.quarantined)} quarantined" if plan.quarantined else ""
    waits = (f"{plan.waiting} waiting" if plan.waiting else "", quarantined, plan.delayed)
    return [plan.trigger, plan.when, due, last, ", ".join(part for part in waits if part), plan.made_by]


def build_artifacts_sheet(found: "Sequence[Artifact]", empty: str) -> Sheet:
    return [Facts("", _artifact(artifact)) for artifact in found] or [empty]


def _review(artifact: "Artifact") -> str:
    return describe_review(artifact.review) if artifact.about == "finding" else ""


def _artifact(artifact: "Artifact") -> list[tuple[str, str]]:
    return [
        (artifact.about, artifact.id),
        ("says", artifact.text),
        ("from", f"{artifact.agent}, session {artifact.session}, {format_moment(artifact.at)}"),
        ("seen", f"{artifact.observed_count} times" if artifact.observed_count > 1 else ""),
        ("checked", ", ".join(part for part in (artifact.severity, artifact.support, _review(artifact)) if part)),
        ("status", f"{artifact.status} by {artifact.by}" if artifact.status else "open"),
    ]


def build_audit_sheet(entries: "Sequence[AuditEntry]") -> Sheet:
    columns = ["when", "agent", "tool", "level", "risk", "outcome", "decided by", "cost", "arguments", "result"]
    rows = [
        [
            format_moment(each.created_at),
            each.agent,
            each.tool,
            each.capability_level,
            each.risk_level,
            each.outcome or "under way",
            each.decided_by,
            format_usd(each.cost_usd),
            each.input_summary,
            each.output_summary,
        ]
        for each in entries
    ]
    empty = "No audited calls in that time."
    return [Listing("Audit", columns, rows, right="cost", long="arguments result", empty=empty)]


def describe_audit_entry(each: "AuditEntry") -> str:
    by = f", agreed to by {each.decided_by}" if each.decided_by else ""
    cost = f" {format_usd(each.cost_usd)}" if each.cost_usd else ""
    level = f"{each.capability_level} {each.risk_level}".strip()
    what = f"{each.agent} {each.tool} ({level}) {each.outcome}{cost}{by}".lstrip()
    return f"{format_moment(each.created_at)} {what}  {each.input_summary}".rstrip()

"""Sheets for the CLI: sessions, budgets, decisions, rules, triggers, artifacts, the audit and backtests."""

from collections.abc import Iterator, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Final

from halter.core.clock import format_duration
from halter.core.events.tasks import describe_verdict
from halter.core.money import ZERO_USD, format_unit_amount, format_usd
from halter.core.rows import RuleRow, SessionRow
from halter.core.text import describe_need_count, escape_hidden, format_count, to_one_line
from halter.guard.approvals import PendingDecision, decode_rule
from halter.present.decisions import describe_matcher, render_prompt
from halter.present.events import describe_review
from halter.present.moments import format_moment, format_relative_moment
from halter.present.sheet import Facts, Listing, Sheet
from halter.state.audit import AuditEntry, describe_starter

if TYPE_CHECKING:
    from halter.config.policy import PolicyDifference
    from halter.operations.artifacts import Artifact
    from halter.operations.backtest import BacktestResult
    from halter.operations.decisions import OpenInbox, RuleOffers
    from halter.operations.money import Budgets, PriceReport, Spending
    from halter.operations.queries import AgentNews
    from halter.runtime.backtest import BacktestLine
    from halter.runtime.budgets import Budget
    from halter.runtime.forecast import TriggerPlan
    from halter.runtime.needs import Need

DIGEST_PREFIX_LENGTH: Final = 16
"""Length of the shown part of a document's digest; it is enough to name the document."""

MAX_LISTED_LINES: Final = 40
MAX_NOTICE_LENGTH: Final = 300
DIFFERENCE_WORDS: Final = {"looser": "LOOSER", "stricter": "stricter", "fixed": "other", "free": "no limit"}


def build_sessions_sheet(rows: Sequence[SessionRow], now: int) -> Sheet:
    # Few, narrow columns: on a screen of 80 columns an id must not wrap, or it cannot be copied.
    columns = ["session", "agent", "state", "began", "ended or due"]
    cells = [
        [
            row.session,
            f"{row.agent} ({row.kind})",
            row.shown_state.replace("_", " "),
            f"{format_duration(max(0, now - row.started_at))} ago",
            row.terminal_reason.replace("_", " ") or describe_next_due(row, now),
        ]
        for row in rows
    ]
    return [Listing("Sessions", columns, cells, empty="There are no sessions yet.")]


def describe_next_due(row: SessionRow, now: int) -> str:
    """Describe when a session's next turn is due, and what wakes it earlier."""
    wake_sources = ", ".join(row.wake_on.split()) if row.ended_at is None else ""
    if row.due_at is None:
        return f"by {wake_sources}" if wake_sources else ""
    if row.due_at <= now:
        return "now"
    due = f"in {format_duration(row.due_at - now)} ({format_relative_moment(row.due_at, now)})"
    return f"{due}, or by {wake_sources}" if wake_sources else due


def build_budgets_sheet(budgets: "Budgets", _: int) -> Sheet:
    has_reserve = any(row.kept for row in budgets.budgets)
    columns = ["scope", "window", "cap", "spent", "held", *(["reserved"] if has_reserve else []), "left", "set by"]
    # Tokens are counted even without a cap; such a budget is shown only if there are any.
    rows = [_budget(row, kept=has_reserve) for row in budgets.budgets if row.cap is not None or row.spent or row.held]
    spending_rows = [
        [line.agent, line.purpose, line.name, str(line.spends), format_usd(line.spent_usd)] for line in budgets.last_day
    ]
    return [
        Listing(
            "Budgets",
            columns,
            rows,
            right="cap spent held reserved left",
            long="scope window",
            empty="Nothing was spent or held yet.",
        ),
        Listing(
            "Spent in the last 24 hours",
            ["agent", "purpose", "on", "times", "cost"],
            spending_rows,
            right="times cost",
            empty="Nothing was spent in the last 24 hours.",
        ),
        _list_models(budgets.last_day),
    ]


def build_prices_sheet(report: "PriceReport", now: int) -> Sheet:
    if not report.digest:
        return [f"The price table of {report.bundled} is in force. Fetch a newer one with: halter prices update"]
    age, digest = format_duration(max(0, now - report.at)), report.digest[:DIGEST_PREFIX_LENGTH]
    changes = [["new", name] for name in report.added] + [["raised", text] for text in report.raised]
    waiting = [["waits for your yes", text] for text in report.waiting]
    remainder = len(changes) - MAX_LISTED_LINES
    sheet: list[Facts | Listing | str] = [
        f"The price table {digest}, fetched {age} ago from {report.source}, counts beside that of {report.bundled}.",
        Listing(
            "Prices of the newest table",
            ["change", "model"],
            [*waiting, *changes[:MAX_LISTED_LINES]],
            long="model",
            empty="It changed no price.",
        ),
    ]
    if remainder > 0:
        sheet.append(f"{remainder} more; --json lists them all.")
    if waiting:
        sheet.append(f"To let the lower prices count, too: halter prices accept {digest}")
    return sheet


FORECAST_DAYS: Final = 30


def _list_models(spending: "Sequence[Spending]") -> Listing:
    """Build the table of each model's cost in the last day, and of thirty such days."""
    lines: dict[str, list[Spending]] = {}
    for line in spending:
        if line.input_tokens or line.output_tokens:
            lines.setdefault(line.name, []).append(line)
    rows = [
        [
            model,
            f"{sum(line.spends for line in model_lines):,}",
            f"{sum(line.input_tokens for line in model_lines):,}",
            f"{sum(line.output_tokens for line in model_lines):,}",
            format_usd(cost := sum((line.spent_usd for line in model_lines), ZERO_USD)),
            format_usd(cost * FORECAST_DAYS),
        ]
        for model, model_lines in sorted(lines.items())
    ]
    columns = ["model", "requests", "in", "out", "day", "month"]
    return Listing("By model, with thirty such days", columns, rows, right="requests in out day month", long="model")


def _budget(row: "Budget", *, kept: bool) -> list[str]:
    cap = "none" if row.cap is None else format_unit_amount(row.cap, row.unit)
    remaining = "" if row.remaining is None else format_unit_amount(row.remaining, row.unit)
    spent_text, held_text = format_unit_amount(row.spent, row.unit), format_unit_amount(row.held, row.unit)
    reserve = ([format_unit_amount(row.kept, row.unit)] if row.kept else [""]) if kept else []
    return [
        row.scope,
        row.window or "whole life",
        cap,
        spent_text,
        held_text,
        *reserve,
        remaining,
        row.cap_by or "config",
    ]


def build_inbox_sheet(inbox: "OpenInbox", now: int) -> Sheet:
    return [*_inbox(inbox, now)]


def _inbox(inbox: "OpenInbox", now: int) -> Iterator[Facts | str]:
    open_count = len(inbox.decisions)
    health_needs = [need for need in inbox.needs if need.is_about_health]
    other_needs = [need for need in inbox.needs if not need.is_about_health]
    if health_needs:
        yield "Unhealthy:"
    for need in health_needs:
        yield Facts("", build_need_facts(need, inbox.option))
    if open_count:
        yield f"{describe_need_count(open_count, 'decision')}:"
    elif not inbox.needs:
        yield "Nothing needs you."
    for number, decision in enumerate(inbox.decisions, 1):
        yield Facts("", [("number", str(number)), *_decision(decision, now, inbox.option)])
    if other_needs:
        yield "Also needs you:" if open_count else "Needs you:"
    for need in other_needs:
        yield Facts("", build_need_facts(need, inbox.option))
    if inbox.news:
        yield "Notices of the last day:"
    for notice in inbox.news:
        yield f"{format_moment(notice.queued_at)} {notice.title}"
        if text := notice.summarize_text(MAX_NOTICE_LENGTH):
            yield f"  {text}"
            if text != to_one_line(notice.text):
                yield f"  Read it all with: {_find_notice_command(notice)}{inbox.option}"


def _find_notice_command(notice: "AgentNews") -> str:
    return f"halter show {notice.session} --events" if notice.session else "halter inbox --json"


def build_need_facts(need: "Need", option: str = "") -> list[tuple[str, str]]:
    """Build the facts of a need, with the commands that settle it."""
    facts = (("what", escape_hidden(need.sentence)), ("why", escape_hidden(need.why)))
    return [*facts, *(("type", f"{command}{option}") for command in need.commands)]


def build_decision_sheet(decision: PendingDecision, now: int) -> Sheet:
    """Build the sheet of a decision for a person who is being asked about it."""
    return [Facts("", [fact for fact in _decision(decision, now) if fact[0] not in ("yes", "no")])]


def _decision(decision: PendingDecision, now: int, option: str = "") -> list[tuple[str, str]]:
    prompt, options = render_prompt(decision), f" --cap AMOUNT{option}" if decision.about == "cap_raise" else option
    risk = f"{decision.level}, risk {decision.risk}" if decision.risk else decision.level
    waited_text, remaining = (
        format_duration(max(0, now - decision.asked_at)),
        format_duration(decision.expires_at - now),
    )
    return [
        ("decision", decision.decision),
        ("what", prompt.what),
        ("why", prompt.why),
        ("because", escape_hidden(decision.cause)),
        ("risk", ": ".join(part for part in (risk, "; ".join(decision.reasons)) if part)),
        ("shown", prompt.details),
        ("agent", f"{decision.agent}, session {decision.session}" if decision.session else decision.agent),
        ("waits", f"{waited_text}, for at most {remaining} more"),
        ("yes", f"{prompt.yes}: halter approve {decision.decision}{options}"),
        ("no", f"{prompt.no}: halter deny {decision.decision}{option}"),
    ]


def build_offers_sheet(rule_offers: "RuleOffers", _: int) -> Sheet:
    if not rule_offers.offers:
        return [f"No rule can approve {rule_offers.decision}; it always needs an approval."]
    return [
        Facts("", [("always", offer.sentence), ("use", _choose(rule_offers.decision, offer.match))])
        for offer in rule_offers.offers
    ]


def _choose(decision: str, match: str) -> str:
    lines = () if match == "same" else match.splitlines()
    return " ".join([f"halter approve {decision} --always", *(f"--match {quote(line)}" for line in lines)])


def build_rules_sheet(rows: Sequence[RuleRow], now: int) -> Sheet:
    return [_rule(row, now) for row in rows] or ["There are no rules."]


def _rule(row: RuleRow, now: int) -> Facts:
    if row.ended_at is not None:
        end_text = f"ended by {row.ended_by}, {format_moment(row.ended_at)}"
    elif now >= row.expires_at:
        end_text = f"expired {format_moment(row.expires_at)}"
    else:
        end_text = f"{format_moment(row.expires_at)}, {format_duration(row.expires_at - now)} from now"
    return Facts(
        "",
        [
            ("rule", row.rule),
            ("always", f"{row.tool} {describe_matcher(decode_rule(row).matcher)}"),
            ("where", f"{row.scope} {row.owner}".strip()),
            ("by", f"{row.by}, {format_moment(row.made_at)}"),
            ("until", end_text),
        ],
    )


def build_triggers_sheet(plans: "Sequence[TriggerPlan]", now: int) -> Sheet:
    columns = ["trigger", "when", "next", "last run", "waits", "made by"]
    empty = "No triggers. Ask an agent for one, or add it to agent.yaml."
    quarantine_lines = [
        f"{plan.trigger}: {item.name} is quarantined. Retry it with: "
        f"halter triggers retry {plan.trigger} {item.item[:DIGEST_PREFIX_LENGTH]}"
        for plan in plans
        for item in plan.quarantined
    ]
    rows = [_trigger(plan, now) for plan in plans]
    note = [ONLY_WHILE_RUN] if rows else []
    return [Listing("Schedules", columns, rows, long="trigger when waits", empty=empty), *quarantine_lines, *note]


ONLY_WHILE_RUN: Final = (
    "Triggers fire only while `halter up`, `halter serve` or a worker runs their agent (see `halter status`)."
)


def _trigger(plan: "TriggerPlan", now: int) -> list[str]:
    next_run = "" if plan.next_at is None else f"in {format_duration(max(0, plan.next_at - now))}"
    last_run = "" if plan.last_at is None else f"{format_relative_moment(plan.last_at, now)}, {plan.session}"
    quarantined_text = f"{len(plan.quarantined)} quarantined" if plan.quarantined else ""
    waits = (f"{plan.waiting} waiting" if plan.waiting else "", quarantined_text, plan.delayed)
    return [plan.trigger, plan.when, next_run, last_run, ", ".join(part for part in waits if part), plan.made_by]


def build_artifacts_sheet(artifacts: "Sequence[Artifact]", empty: str) -> Sheet:
    return [Facts("", _artifact(artifact)) for artifact in artifacts] or [empty]


def _review(artifact: "Artifact") -> str:
    return describe_review(artifact.review) if artifact.about == "finding" else ""


def _artifact(artifact: "Artifact") -> list[tuple[str, str]]:
    return [
        (artifact.about, artifact.id),
        ("says", artifact.text),
        ("from", f"{artifact.agent}, session {artifact.session}, {format_moment(artifact.at)}"),
        ("seen", f"{artifact.observed_count} times" if artifact.observed_count > 1 else ""),
        ("checked", ", ".join(part for part in (artifact.severity, artifact.support, _review(artifact)) if part)),
        ("status", f"{describe_verdict(artifact.status)} by {artifact.by}" if artifact.status else "open"),
    ]


def build_audit_sheet(entries: Sequence[AuditEntry]) -> Sheet:
    columns = [
        *("when", "agent", "started by", "tool", "level", "risk", "outcome", "decided by", "cost"),
        *("arguments", "result"),
    ]
    rows = [
        [
            format_moment(entry.created_at),
            entry.agent,
            describe_starter(entry),
            entry.tool,
            entry.capability_level,
            entry.risk_level,
            entry.outcome or "running",
            entry.decided_by,
            format_usd(entry.cost_usd),
            entry.input_summary,
            entry.error or entry.output_summary,
        ]
        for entry in entries
    ]
    empty = "No audited calls in this period."
    return [Listing("Audit", columns, rows, right="cost", long="arguments result", empty=empty)]


def describe_audit_entry(entry: AuditEntry) -> str:
    by = f", approved by {entry.decided_by}" if entry.decided_by else ""
    cost = f" {format_usd(entry.cost_usd)}" if entry.cost_usd else ""
    level = f"{entry.capability_level} {entry.risk_level}".strip()
    starter = f", started by {describe_starter(entry)}" if entry.started_by else ""
    error = f": {' '.join(entry.error.split())}" if entry.error else ""
    summary = f"{entry.agent} {entry.tool} ({level}) {entry.outcome}{error}{cost}{by}{starter}".lstrip()
    return f"{format_moment(entry.created_at)} {summary}  {entry.input_summary}".rstrip()


def build_backtest_sheet(result: "BacktestResult") -> Sheet:
    summary = [
        ("policy", result.policy),
        ("judged", f"{format_count(result.decisions, 'decision')} in {format_count(result.sessions, 'session')}"),
        ("loosened", str(result.loosened) if result.loosened else "nothing"),
        *((change, f"{times:,}") for change, times in result.changed.items()),
        ("not spent", format_usd(result.not_spent_usd) if result.not_spent_usd else ""),
        ("stopped at a cap", format_count(result.sessions_stopped, "session") if result.sessions_stopped else ""),
        ("gone another way", format_count(result.sessions_diverged, "session") if result.sessions_diverged else ""),
        ("after that", f"{format_count(result.after, 'decision')}, counted apart" if result.after else ""),
        ("named by no rule", ", ".join(f"{tool} ({calls:,})" for tool, calls in result.unnamed.items())),
        *(("not judged", f"{times:,}: {why}") for why, times in result.unjudged.items()),
    ]
    rows = [_backtest_row(line) for line in result.lines[:MAX_LISTED_LINES]]
    sheet: list[Facts | Listing | str] = [Facts(f"Backtest of {result.agent}", summary)]
    if rows:
        columns = ["when", "session", "what", "then", "now", "why"]
        sheet.append(Listing("Changed decisions, looser ones first", columns, rows, long="what why"))
    if result.differing > MAX_LISTED_LINES:
        sheet.append(f"And {result.differing - MAX_LISTED_LINES:,} more: use --json to list them.")
    if not rows:
        sheet.append("No decision changes." if result.decisions else "Nothing could be evaluated.")
    return [*sheet, *result.notes]


def _backtest_row(line: "BacktestLine") -> list[str]:
    prefix = "LOOSER " if line.loosened else ""
    now = f"{line.now} (later)" if line.after else line.now
    savings_text = f" ({format_usd(line.not_spent_usd)} not spent from there on)" if line.not_spent_usd else ""
    reason = f"{line.sentence}{savings_text}"
    return [format_moment(line.at), line.session[:13], f"{prefix}{line.name}", line.then, now, reason]


def build_policy_diff_sheet(differences: "Sequence[PolicyDifference]", old_name: str, new_name: str) -> Sheet:
    order = list(DIFFERENCE_WORDS)
    lines = sorted(differences, key=lambda difference: order.index(difference.how))
    rows = [
        [difference.key, difference.stored, difference.written, DIFFERENCE_WORDS[difference.how]]
        for difference in lines
    ]
    empty = f"{old_name} and {new_name} are equivalent."
    title, columns = f"{new_name}, compared with {old_name}", ["key", "before", "after", "it is"]
    return [Listing(title, columns, rows, long="key", empty=empty)]

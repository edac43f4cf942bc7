"""A receipt as facts and tables."""

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from halter.core.clock import format_duration
from halter.core.money import ZERO_USD, format_unit_amount, format_usd
from halter.core.text import format_count
from halter.present.events import describe_review
from halter.present.moments import format_moment
from halter.present.sheet import Facts, Listing, Sheet
from halter.state.receipt import Receipt
from halter.state.receipt_lines import Decision, ReceiptLine

UNSEEN: Final[Mapping[str, str]] = {
    "hooked": "Halter saw only the tool calls that passed the program's hooks: not its requests to models and their "
    "cost, not the effects of an admitted command, and no run with its hooks switched off.",
    "gated": "Halter saw only the calls that passed the gateway: not the program's own tools, not its requests to "
    "models and their cost, and not servers that it reaches past the gateway.",
}
"""What Halter cannot see of an external session, by its kind."""


def build_receipt_sheet(receipt: Receipt) -> Sheet:
    return [
        Facts(f"Receipt of {receipt.session}", _summary(receipt)),
        *_course(receipt),
        *_brakes(receipt),
        *_products(receipt),
    ]


def _describe_provider_tools(receipt: Receipt) -> str:
    """Describe the tools that providers ran; only the number of uses is known."""
    searches, runs = (
        sum(model.web_searches for model in receipt.models),
        sum(model.code_executions for model in receipt.models),
    )
    counts = (("web_search", searches), ("code_execution", runs))
    uses_text = ", ".join(f"{name} {format_count(times, 'time')}" for name, times in counts if times)
    return f"{uses_text}: the guard saw neither their queries nor their results" if uses_text else ""


def _describe_assumed(receipt: Receipt) -> str:
    """Describe the requests that were charged at their hold, because they were sent and no usage was reported."""
    unreported = [line for line in receipt.requests if line.outcome != "ok" and line.cost_usd and line.usage is None]
    if not unreported:
        return ""
    total, count_text = (
        format_usd(sum((line.cost_usd for line in unreported), ZERO_USD)),
        format_count(len(unreported), "request"),
    )
    return f"{total} for {count_text} without an answer: the provider may have billed less but reported no usage"


def _summary(receipt: Receipt) -> list[tuple[str, str]]:
    purposes = format_purposes(receipt.spent_by_purpose_usd) if len(receipt.spent_by_purpose_usd) > 1 else ""
    proposals = (*receipt.memories_proposed, *receipt.precedents_proposed)
    senders = Counter(
        f"{one.cause} from {one.sender} ({one.origin}, {_trust(trusted=one.trusted)})" for one in receipt.heard
    )
    ended_text = format_moment(receipt.ended_at) if receipt.ended_at else "not yet"
    reason = receipt.terminal_reason or ""
    return [
        ("agent", f"{receipt.agent} ({receipt.kind})"),
        ("started by", f"{receipt.started_by} ({receipt.origin}, {_trust(trusted=receipt.trusted)})"),
        ("trigger", receipt.trigger),
        ("part of", receipt.parent),
        ("follows", f"{receipt.follows}: {receipt.because}" if receipt.follows else ""),
        ("state", receipt.state if reason in {"", receipt.state.lower()} else f"{receipt.state}: {reason}"),
        ("began, ended", f"{format_moment(receipt.started_at)}, {ended_text}"),
        ("cost", f"{format_usd(receipt.cost_usd)}{purposes} (reserved: {format_usd(receipt.held_usd)})"),
        ("charged as held", _describe_assumed(receipt)),
        (
            "checks passed",
            ", ".join(f"{check} {format_count(times, 'time')}" for check, times in receipt.passed.items()),
        ),
        (
            "anonymized",
            ", ".join(f"{kind} {format_count(times, 'time')}" for kind, times in receipt.anonymized.items()),
        ),
        ("untrusted values", "; ".join(_describe_unsaid(call) for call in receipt.calls if call.flaws)),
        ("rules used", ", ".join(receipt.rules)),
        ("given context", ", ".join((*receipt.memories_given, *receipt.precedents_given))),
        ("proposed", ", ".join(f"{one.proposal} ({one.kind})" if one.kind else one.proposal for one in proposals)),
        ("routed", "; ".join(f"{one.strategy or one.route}: {one.why}" for one in receipt.routes)),
        ("woken by", "; ".join(sender if count == 1 else f"{sender} × {count}" for sender, count in senders.items())),
        ("sub-sessions", ", ".join(one.session for one in receipt.children)),
        *(
            (
                "overrun",
                f"{format_unit_amount(overrun.amount, overrun.unit)} in {overrun.scope} {overrun.window}".strip(),
            )
            for overrun in receipt.overruns
        ),
        ("not seen", UNSEEN.get(receipt.kind, "")),
        ("run by the provider", _describe_provider_tools(receipt)),
        *(("in doubt", call) for call in receipt.in_doubt),
        *(("unknown", f"{call}: outcome unknown") for call in receipt.unknown_calls),
        ("not read", format_count(receipt.unknown, "event") + " of a newer Halter" if receipt.unknown else ""),
        ("erased", f"the bodies of {format_count(receipt.erased, 'event')}" if receipt.erased else ""),
        ("folder digest", receipt.folder),
        ("definition", receipt.definition),
        ("events", f"{receipt.events}, the last with hash {receipt.hash[:16]}…"),
    ]


def format_purposes(spent: Mapping[str, Decimal]) -> str:
    return ": " + ", ".join(f"{purpose} {format_usd(usd)}" for purpose, usd in spent.items()) if spent else ""


def _describe_unsaid(call: ReceiptLine) -> str:
    """Describe the arguments of a call with untrusted provenance, and who approved it."""
    where = ", ".join(dict.fromkeys(flaw.argument or flaw.reason for flaw in call.flaws))
    return f"{call.name} ({where}), {f'approved by {call.decided_by}' if call.decided_by else 'observed'}"


def _trust(*, trusted: bool) -> str:
    return "trusted" if trusted else "untrusted"


def _course(receipt: Receipt) -> list[Listing]:
    phases = [
        [
            phase.phase,
            format_moment(phase.entered_at),
            "" if phase.left_at is None else format_duration(phase.left_at - phase.entered_at),
        ]
        for phase in receipt.phases
    ]
    turns = [
        [str(turn.turn), format_moment(turn.started_at), str(turn.steps), turn.why or "not yet", turn.sentence]
        for turn in receipt.turns
    ]
    models = [
        [
            model.model,
            *(
                f"{number:,}"
                for number in (
                    model.requests,
                    model.failed,
                    model.input_tokens,
                    model.cache_read_tokens,
                    model.output_tokens,
                )
            ),
            format_usd(model.held_usd),
            format_usd(model.cost_usd),
        ]
        for model in receipt.models
    ]
    numbers = ["requests", "failed", "input", "cached", "output", "held", "cost"]
    return [
        Listing("Phases", ["phase", "entered", "took"], phases, right="took"),
        Listing("Turns", ["turn", "began", "steps", "ended", "why"], turns, right="turn steps", long="why"),
        Listing(
            "Calls and requests",
            ["what", "for", "level, risk", "outcome", "held", "cost", "more"],
            [_work(line) for line in sorted((*receipt.requests, *receipt.calls), key=lambda line: line.started_at)],
            right="held cost",
            long="what more",
            empty="No calls and no requests.",
        ),
        Listing("Models", ["model", *numbers], models, right=" ".join(numbers), long="model"),
    ]


def _work(line: ReceiptLine) -> list[str]:
    details = [
        (line.effect == "write", "writes"),
        (line.egress, "sends data to its destination argument"),
        (line.phase not in {"", "work"}, f"phase {line.phase}"),
        (line.parallel_group != "", f"together as {line.parallel_group}"),
        (line.decided_by != "", f"approved by {line.decided_by}"),
        (bool(line.observed), f"observed: {', '.join(line.observed)}"),
        (bool(line.anonymized), f"hidden: {', '.join(line.anonymized)}"),
        (line.error != "", line.error),
    ]
    risk, outcome = f"{line.level} {line.risk}".strip(), line.outcome or "in doubt"
    details_text = "; ".join(text for applies, text in details if applies)
    return [line.name, line.purpose, risk, outcome, format_usd(line.held_usd), format_usd(line.cost_usd), details_text]


def _brakes(receipt: Receipt) -> list[Listing]:
    refusals = [
        [
            format_moment(refusal.at),
            refusal.brake,
            refusal.name,
            refusal.code,
            refusal.sentence or f"{refusal.scope} {refusal.window}".strip(),
        ]
        for refusal in receipt.brakes
    ]
    guardrails = [
        [
            format_moment(guardrail.at),
            guardrail.guardrail + (f" × {guardrail.times}" if guardrail.times > 1 else ""),
            guardrail.sentence,
        ]
        for guardrail in receipt.guardrails
    ]
    decisions = [
        [f"{decision.about} of {decision.name}", decision.decision, _verdict(decision), decision.by, decision.reason]
        for decision in receipt.decisions
    ]
    columns = ["about", "decision", "answer", "by", "reason"]
    return [
        Listing("Refused by the guard", ["when", "check", "what", "outcome", "why"], refusals, long="what why"),
        Listing("Limits reached", ["when", "limit", "why"], guardrails, long="why"),
        Listing("Decisions", columns, decisions, long="about decision reason"),
    ]


def _verdict(decision: Decision) -> str:
    if not decision.verdict:
        return "none known" if decision.by else "none"
    return (
        decision.verdict
        if decision.used or decision.about != "approval" or decision.verdict == "deny"
        else f"{decision.verdict}, not used"
    )


def _products(receipt: Receipt) -> list[Listing]:
    documents = [
        [document.name, document.collection, format_moment(document.read_at), str(document.times), document.document]
        for document in receipt.documents
    ]
    findings = [
        [
            finding.finding,
            finding.severity,
            finding.support,
            finding.name,
            describe_review(finding.review),
            ", ".join(finding.judges),
        ]
        for finding in receipt.findings
    ]
    judges = [
        [f"{panel.chosen} of {panel.wanted}", str(panel.items), format_usd(panel.most_usd), panel.sentence]
        for panel in receipt.judges
    ]
    notices = [
        [notice.notification, notice.channel, notice.about, format_moment(notice.queued_at)]
        for notice in receipt.notifications
    ]
    document_columns, finding_columns = (
        ["document", "collection", "read", "times", "digest"],
        ["finding", "severity", "quote", "document"],
    )
    return [
        Listing("Documents read", document_columns, documents, right="times", long="document digest"),
        Listing("Findings", [*finding_columns, "review", "judges"], findings, long="finding document judges"),
        Listing("Judges", ["asked", "findings", "at most", "why"], judges, right="findings", long="why"),
        Listing("Notifications", ["notification", "channel", "about", "queued"], notices, long="notification about"),
    ]

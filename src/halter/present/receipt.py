"""A receipt as facts and tables."""

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from halter.core.clock import format_duration
from halter.core.money import ZERO_USD, format_unit_amount, format_usd
from halter.core.text import format_count
from halter.present.events import describe_review, format_moment
from halter.present.sheet import Facts, Listing, Sheet
from halter.state.receipt import Decision, Receipt, ReceiptLine

UNSEEN: Final[Mapping[str, str]] = {
    "hooked": "Halter saw the tool calls that passed the program's hooks, and no more: not its requests to models and "
    "what they cost, not what an admitted command did, not a run with its hooks switched off.",
    "gated": "Halter saw the calls that passed the gateway, and no more: not the program's own tools, not its requests "
    "to models and what they cost, not servers that it reaches past the gateway.",
}
"""What Halter cannot see of a session, by its kind."""


def build_receipt_sheet(receipt: Receipt) -> Sheet:
    return [
        Facts(f"Receipt of {receipt.session}", _summary(receipt)),
        *_course(receipt),
        *_brakes(receipt),
        *_products(receipt),
    ]


def _describe_provider_tools(receipt: Receipt) -> str:
    """What providers ran by themselves: only how often is known."""
    searches, runs = sum(one.web_searches for one in receipt.models), sum(one.code_executions for one in receipt.models)
    counted = (("web_search", searches), ("code_execution", runs))
    used = ", ".join(f"{name} {format_count(times, 'time')}" for name, times in counted if times)
    return f"{used}: what was asked and found there, the guard did not see" if used else ""


def _describe_assumed(receipt: Receipt) -> str:
    """Say what was charged at its maximum, because it was sent and no usage came back."""
    silent = [line for line in receipt.requests if line.outcome != "ok" and line.cost_usd and line.usage is None]
    if not silent:
        return ""
    total, many = format_usd(sum((line.cost_usd for line in silent), ZERO_USD)), format_count(len(silent), "request")
    return f"{total} for {many} without an answer: the provider may have billed less, and never reported it"


def _summary(receipt: Receipt) -> list[tuple[str, str]]:
    purposes = format_purposes(receipt.spent_by_purpose_usd) if len(receipt.spent_by_purpose_usd) > 1 else ""
    proposed = (*receipt.memories_proposed, *receipt.precedents_proposed)
    senders = Counter(
        f"{one.cause} from {one.sender} ({one.origin}, {_trust(trusted=one.trusted)})" for one in receipt.heard
    )
    ended = format_moment(receipt.ended_at) if receipt.ended_at else "not yet"
    reason = receipt.terminal_reason or ""
    return [
        ("agent", f"{receipt.agent} ({receipt.kind})"),
        ("started by", f"{receipt.started_by} ({receipt.origin}, {_trust(trusted=receipt.trusted)})"),
        ("trigger", receipt.trigger),
        ("part of", receipt.parent),
        ("follows", f"{receipt.follows}: {receipt.because}" if receipt.follows else ""),
        ("state", receipt.state if reason in {"", receipt.state.lower()} else f"{receipt.state}: {reason}"),
        ("began, ended", f"{format_moment(receipt.started_at)}, {ended}"),
        ("cost", f"{format_usd(receipt.cost_usd)}{purposes} (reserved: {format_usd(receipt.held_usd)})"),
        ("charged as held", _describe_assumed(receipt)),
        (
            "checks passed",
            ", ".join(f"{brake} {format_count(times, 'time')}" for brake, times in receipt.passed.items()),
        ),
        (
            "anonymized",
            ", ".join(f"{kind} {format_count(times, 'time')}" for kind, times in receipt.anonymized.items()),
        ),
        ("not said", "; ".join(_describe_unsaid(call) for call in receipt.calls if call.flaws)),
        ("rules used", ", ".join(receipt.rules)),
        ("was given", ", ".join((*receipt.memories_given, *receipt.precedents_given))),
        ("proposed", ", ".join(f"{one.proposal} ({one.kind})" if one.kind else one.proposal for one in proposed)),
        ("routed", "; ".join(f"{one.strategy or one.route}: {one.why}" for one in receipt.routes)),
        ("heard", "; ".join(who if count == 1 else f"{who} × {count}" for who, count in senders.items())),
        ("sub-sessions", ", ".join(one.session for one in receipt.children)),
        *(
            ("overrun", f"{format_unit_amount(over.amount, over.unit)} in {over.scope} {over.window}".strip())
            for over in receipt.overruns
        ),
        ("not seen", UNSEEN.get(receipt.kind, "")),
        ("run by the provider", _describe_provider_tools(receipt)),
        *(("in doubt", call) for call in receipt.in_doubt),
        *(("unknown", f"{call}: it is unknown whether it was done") for call in receipt.unknown_calls),
        ("not read", format_count(receipt.unknown, "event") + " of a newer Halter" if receipt.unknown else ""),
        ("erased", f"the words of {format_count(receipt.erased, 'event')}" if receipt.erased else ""),
        ("folder digest", receipt.folder),
        ("definition", receipt.definition),
        ("events", f"{receipt.events}, the last with hash {receipt.hash[:16]}…"),
    ]


def format_purposes(spent: Mapping[str, Decimal]) -> str:
    return ": " + ", ".join(f"{purpose} {format_usd(usd)}" for purpose, usd in spent.items()) if spent else ""


def _describe_unsaid(call: ReceiptLine) -> str:
    """Which arguments of a call no trusted place had said, and who agreed to it."""
    where = ", ".join(dict.fromkeys(flaw.argument or flaw.reason for flaw in call.flaws))
    return f"{call.name} ({where}), {f'agreed to by {call.decided_by}' if call.decided_by else 'observed'}"


def _trust(*, trusted: bool) -> str:
    return "trusted" if trusted else "not trusted"


def _course(receipt: Receipt) -> list[Listing]:
    phases = [
        [
            one.phase,
            format_moment(one.entered_at),
            "" if one.left_at is None else format_duration(one.left_at - one.entered_at),
        ]
        for one in receipt.phases
    ]
    turns = [
        [str(one.turn), format_moment(one.started_at), str(one.steps), one.why or "not yet", one.sentence]
        for one in receipt.turns
    ]
    models = [
        [
            one.model,
            *(f"{n:,}" for n in (one.requests, one.failed, one.input_tokens, one.cache_read_tokens, one.output_tokens)),
            format_usd(one.held_usd),
            format_usd(one.cost_usd),
        ]
        for one in receipt.models
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
            empty="It made no call and no request.",
        ),
        Listing("Models", ["model", *numbers], models, right=" ".join(numbers), long="model"),
    ]


def _work(line: ReceiptLine) -> list[str]:
    special = [
        (line.effect == "write", "writes"),
        (line.egress, "sends data where it says"),
        (line.phase not in {"", "work"}, f"phase {line.phase}"),
        (line.parallel_group != "", f"together as {line.parallel_group}"),
        (line.decided_by != "", f"agreed to by {line.decided_by}"),
        (bool(line.observed), f"only observed: {', '.join(line.observed)}"),
        (bool(line.anonymized), f"hidden: {', '.join(line.anonymized)}"),
        (line.error != "", line.error),
    ]
    risk, outcome = f"{line.level} {line.risk}".strip(), line.outcome or "in doubt"
    more = "; ".join(words for holds, words in special if holds)
    return [line.name, line.purpose, risk, outcome, format_usd(line.held_usd), format_usd(line.cost_usd), more]


def _brakes(receipt: Receipt) -> list[Listing]:
    brakes = [
        [format_moment(one.at), one.brake, one.name, one.code, one.sentence or f"{one.scope} {one.window}".strip()]
        for one in receipt.brakes
    ]
    guardrails = [
        [format_moment(one.at), one.guardrail + (f" × {one.times}" if one.times > 1 else ""), one.sentence]
        for one in receipt.guardrails
    ]
    decisions = [
        [f"{one.about} of {one.name}", one.decision, _verdict(one), one.by, one.reason] for one in receipt.decisions
    ]
    columns = ["about", "decision", "answer", "by", "reason"]
    return [
        Listing("Stopped by a brake", ["when", "brake", "what", "outcome", "why"], brakes, long="what why"),
        Listing("Held back by a guardrail", ["when", "guardrail", "why"], guardrails, long="why"),
        Listing("Decisions", columns, decisions, long="about decision reason"),
    ]


def _verdict(one: Decision) -> str:
    if not one.verdict:
        return "none known" if one.by else "none"
    return one.verdict if one.used or one.about != "approval" or one.verdict == "deny" else f"{one.verdict}, not used"


def _products(receipt: Receipt) -> list[Listing]:
    documents = [
        [one.name, one.collection, format_moment(one.read_at), str(one.times), one.document]
        for one in receipt.documents
    ]
    findings = [
        [one.finding, one.severity, one.support, one.name, describe_review(one.review), ", ".join(one.judges)]
        for one in receipt.findings
    ]
    judges = [
        [f"{one.chosen} of {one.wanted}", str(one.items), format_usd(one.most_usd), one.sentence]
        for one in receipt.judges
    ]
    notices = [
        [one.notification, one.channel, one.about, format_moment(one.queued_at)] for one in receipt.notifications
    ]
    read, found = ["document", "collection", "read", "times", "digest"], ["finding", "severity", "quote", "document"]
    return [
        Listing("Documents read", read, documents, right="times", long="document digest"),
        Listing("Findings", [*found, "review", "judges"], findings, long="finding document judges"),
        Listing("Judges", ["asked", "findings", "at most", "why"], judges, right="findings", long="why"),
        Listing("Notifications", ["notification", "channel", "about", "queued"], notices, long="notification about"),
    ]

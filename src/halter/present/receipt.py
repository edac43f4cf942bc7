"""A receipt as facts and tables."""

from collections.abc import Sequence

from halter.core.clock import format_duration
from halter.core.money import format_unit_amount, format_usd
from halter.core.text import format_count
from halter.present.events import format_moment
from halter.present.sheet import Facts, Listing, Sheet
from halter.state.receipt import Brake, Decision, FindingLine, PhaseLine, ProposalLine, Receipt, ReceiptLine, TurnLine


def build_receipt_sheet(made: Receipt) -> Sheet:
    return [
        Facts(f"Receipt of {made.session}", _summary(made)),
        _phases(made.phases),
        _turns(made.turns),
        _work(made),
        _models(made),
        _brakes(made.brakes),
        _guardrails(made),
        _decisions(made.decisions),
        _documents(made),
        _findings(made.findings),
        _judges(made),
        _notifications(made),
    ]


def _summary(made: Receipt) -> list[tuple[str, str]]:
    ended = format_moment(made.ended_at) if made.ended_at else "not yet"
    return [
        ("agent", f"{made.agent} ({made.kind})"),
        ("started by", f"{made.started_by} ({made.origin}, {_trust(trusted=made.trusted)})"),
        ("trigger", made.trigger),
        ("part of", made.parent),
        ("follows", f"{made.follows}: {made.because}" if made.follows else ""),
        ("state", f"{made.state} {made.terminal_reason}".strip()),
        ("began, ended", f"{format_moment(made.started_at)}, {ended}"),
        ("cost", f"{format_usd(made.cost_usd)} of {format_usd(made.held_usd)} held{_by_purpose(made)}"),
        ("passed", ", ".join(f"{brake} {format_count(times, 'time')}" for brake, times in made.passed.items())),
        ("anonymized", ", ".join(f"{kind} {format_count(times, 'time')}" for kind, times in made.anonymized.items())),
        ("rules used", ", ".join(made.rules)),
        ("was given", ", ".join((*made.memories_given, *made.precedents_given))),
        ("proposed", ", ".join(_describe_proposals((*made.memories_proposed, *made.precedents_proposed)))),
        ("routed", "; ".join(f"{one.strategy or one.route}: {one.why}" for one in made.routes)),
        ("heard", "; ".join(_describe_senders(made))),
        ("sub-sessions", ", ".join(one.session for one in made.children)),
        *(
            ("overrun", f"{format_unit_amount(over.amount, over.unit)} in {over.scope} {over.window}".strip())
            for over in made.overruns
        ),
        *(("in doubt", call) for call in made.in_doubt),
        *(("unknown", f"{call}: it is unknown whether it was done") for call in made.unknown_calls),
        ("not read", format_count(made.unknown, "event") + " of a newer Halter" if made.unknown else ""),
        ("erased", f"the words of {format_count(made.erased, 'event')}" if made.erased else ""),
        ("agent's folder", made.folder),
        ("definition", made.definition),
        ("events", f"{made.events}, the last with hash {made.hash[:16]}…"),
    ]


def _trust(*, trusted: bool) -> str:
    return "trusted" if trusted else "not trusted"


def _by_purpose(made: Receipt) -> str:
    if len(made.spent_by_purpose_usd) <= 1:
        return ""
    return ": " + ", ".join(f"{purpose} {format_usd(usd)}" for purpose, usd in made.spent_by_purpose_usd.items())


def _describe_proposals(lines: Sequence[ProposalLine]) -> list[str]:
    return [f"{line.proposal} ({line.kind})" if line.kind else line.proposal for line in lines]


def _describe_senders(made: Receipt) -> list[str]:
    times: dict[str, int] = {}
    for one in made.heard:
        who = f"{one.cause} from {one.sender} ({one.origin}, {_trust(trusted=one.trusted)})"
        times[who] = times.get(who, 0) + 1
    return [who if count == 1 else f"{who} × {count}" for who, count in times.items()]


def _phases(phases: Sequence[PhaseLine]) -> Listing:
    rows = [
        [
            one.phase,
            format_moment(one.entered_at),
            "" if one.left_at is None else format_duration(one.left_at - one.entered_at),
        ]
        for one in phases
    ]
    return Listing("Phases", ["phase", "entered", "took"], rows, right="took")


def _turns(turns: Sequence[TurnLine]) -> Listing:
    rows = [
        [str(one.turn), format_moment(one.started_at), str(one.steps), one.why or "not yet", one.sentence]
        for one in turns
    ]
    return Listing("Turns", ["turn", "began", "steps", "ended", "why"], rows, right="turn steps", long="why")


def _work(made: Receipt) -> Listing:
    lines = sorted((*made.requests, *made.calls), key=lambda line: line.started_at)
    rows = [
        [
            line.name,
            line.purpose,
            f"{line.level} {line.risk}".strip(),
            line.outcome or "in doubt",
            format_usd(line.held_usd),
            format_usd(line.cost_usd),
            "; ".join(_describe_exceptions(line)),
        ]
        for line in lines
    ]
    columns = ["what", "for", "level, risk", "outcome", "held", "cost", "more"]
    empty = "It made no call and no request."
    return Listing("Calls and requests", columns, rows, right="held cost", long="what more", empty=empty)


def _describe_exceptions(line: ReceiptLine) -> list[str]:
    """Say what is special about a call."""
    facts = [
        (line.effect == "write", "writes"),
        (line.egress, "sends data where it says"),
        (line.phase not in {"", "work"}, f"phase {line.phase}"),
        (line.parallel_group != "", f"together as {line.parallel_group}"),
        (line.decided_by != "", f"agreed to by {line.decided_by}"),
        (bool(line.observed), f"only observed: {', '.join(line.observed)}"),
        (bool(line.anonymized), f"hidden: {', '.join(line.anonymized)}"),
        (line.error != "", line.error),
    ]
    return [words for holds, words in facts if holds]


def _models(made: Receipt) -> Listing:
    rows = [
        [
            one.model,
            f"{one.requests:,}",
            f"{one.failed:,}",
            f"{one.input_tokens:,}",
            f"{one.cache_read_tokens:,}",
            f"{one.output_tokens:,}",
            format_usd(one.held_usd),
            format_usd(one.cost_usd),
        ]
        for one in made.models
    ]
    columns = ["model", "requests", "failed", "input", "cached", "output", "held", "cost"]
    return Listing("Models", columns, rows, right="requests failed input cached output held cost", long="model")


def _brakes(brakes: Sequence[Brake]) -> Listing:
    rows = [
        [format_moment(one.at), one.brake, one.name, one.code, one.sentence or f"{one.scope} {one.window}".strip()]
        for one in brakes
    ]
    return Listing("Stopped by a brake", ["when", "brake", "what", "outcome", "why"], rows, long="what why")


def _guardrails(made: Receipt) -> Listing:
    rows = [
        [format_moment(one.at), one.guardrail + (f" × {one.times}" if one.times > 1 else ""), one.sentence]
        for one in made.guardrails
    ]
    return Listing("Held back by a guardrail", ["when", "guardrail", "why"], rows, long="why")


def _decisions(decisions: Sequence[Decision]) -> Listing:
    rows = [[f"{one.about} of {one.name}", one.decision, _verdict(one), one.by, one.reason] for one in decisions]
    columns = ["about", "decision", "answer", "by", "reason"]
    return Listing("Decisions", columns, rows, long="about decision reason")


def _verdict(one: Decision) -> str:
    if not one.verdict:
        return "none known" if one.by else "none"
    return one.verdict if one.used or one.about != "approval" else f"{one.verdict}, not used"


def _documents(made: Receipt) -> Listing:
    rows = [
        [one.name, one.collection, format_moment(one.read_at), str(one.times), one.document] for one in made.documents
    ]
    columns = ["document", "collection", "read", "times", "digest"]
    return Listing("Documents read", columns, rows, right="times", long="document digest")


def _findings(findings: Sequence[FindingLine]) -> Listing:
    rows = [
        [one.finding, one.severity, one.support, one.name, one.review or "not looked at", ", ".join(one.judges)]
        for one in findings
    ]
    columns = ["finding", "severity", "quote", "document", "review", "judges"]
    return Listing("Findings", columns, rows, long="finding document judges")


def _judges(made: Receipt) -> Listing:
    rows = [
        [f"{one.chosen} of {one.wanted}", str(one.items), format_usd(one.most_usd), one.sentence] for one in made.judges
    ]
    return Listing("Judges", ["asked", "findings", "at most", "why"], rows, right="findings", long="why")


def _notifications(made: Receipt) -> Listing:
    rows = [[one.notification, one.channel, one.about, format_moment(one.queued_at)] for one in made.notifications]
    return Listing("To be told", ["notification", "channel", "about", "queued"], rows, long="notification about")

"""A receipt in words, for people."""

from collections.abc import Sequence

from halter.app.words.moments import written
from halter.app.words.sheet import Facts, Listing, Sheet
from halter.core.durations import shown_duration
from halter.core.money import shown_in, shown_usd
from halter.core.text import counted
from halter.state.receipt import Receipt
from halter.state.receipt_lines import Brake, Decision, Line, TurnLine
from halter.state.receipt_tasks import FindingLine, PhaseLine, ProposalLine


def sheet_of(made: Receipt) -> Sheet:
    """Put all that a receipt says into facts and tables; what there is none of is left out."""
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
    ended = written(made.ended_at) if made.ended_at else "not yet"
    return [
        ("agent", f"{made.agent} ({made.kind})"),
        ("started by", f"{made.started_by} ({made.origin}, {_trust(trusted=made.trusted)})"),
        ("trigger", made.trigger),
        ("part of", made.parent),
        ("follows", f"{made.follows}: {made.because}" if made.follows else ""),
        ("state", f"{made.state} {made.terminal_reason}".strip()),
        ("began, ended", f"{written(made.started_at)}, {ended}"),
        ("cost", f"{shown_usd(made.cost_usd)} of {shown_usd(made.held_usd)} held{_by_purpose(made)}"),
        ("passed", ", ".join(f"{brake} {counted(times, 'time')}" for brake, times in made.passed.items())),
        ("anonymized", ", ".join(f"{kind} {counted(times, 'time')}" for kind, times in made.anonymized.items())),
        ("rules used", ", ".join(made.rules)),
        ("was given", ", ".join((*made.memories_given, *made.precedents_given))),
        ("proposed", ", ".join(_proposed((*made.memories_proposed, *made.precedents_proposed)))),
        ("routed", "; ".join(f"{one.strategy or one.route}: {one.why}" for one in made.routes)),
        ("heard", "; ".join(_heard(made))),
        ("sub-sessions", ", ".join(one.session for one in made.children)),
        *(
            ("overrun", f"{shown_in(over.amount, over.unit)} in {over.scope} {over.window}".strip())
            for over in made.overruns
        ),
        *(("in doubt", call) for call in made.in_doubt),
        *(("unknown", f"{call}: nobody knows whether it was done") for call in made.unknown_calls),
        ("not read", counted(made.unknown, "event") + " of a newer Halter" if made.unknown else ""),
        ("erased", f"the words of {counted(made.erased, 'event')}" if made.erased else ""),
        ("agent's folder", made.folder),
        ("definition", made.definition),
        ("events", f"{made.events}, the last with hash {made.hash[:16]}…"),
    ]


def _trust(*, trusted: bool) -> str:
    return "trusted" if trusted else "not trusted"


def _by_purpose(made: Receipt) -> str:
    """Tell the purposes apart where there are several; one alone has spent it all."""
    if len(made.spent_by_purpose_usd) <= 1:
        return ""
    return ": " + ", ".join(f"{purpose} {shown_usd(usd)}" for purpose, usd in made.spent_by_purpose_usd.items())


def _proposed(lines: Sequence[ProposalLine]) -> list[str]:
    return [f"{line.proposal} ({line.kind})" if line.kind else line.proposal for line in lines]


def _heard(made: Receipt) -> list[str]:
    """Say from whom something came, and how often."""
    times: dict[str, int] = {}
    for one in made.heard:
        who = f"{one.cause} from {one.sender} ({one.origin}, {_trust(trusted=one.trusted)})"
        times[who] = times.get(who, 0) + 1
    return [who if count == 1 else f"{who} × {count}" for who, count in times.items()]


def _phases(phases: Sequence[PhaseLine]) -> Listing:
    rows = [
        [
            one.phase,
            written(one.entered_at),
            "" if one.left_at is None else shown_duration(one.left_at - one.entered_at),
        ]
        for one in phases
    ]
    return Listing("Phases", ["phase", "entered", "took"], rows, right="took")


def _turns(turns: Sequence[TurnLine]) -> Listing:
    rows = [
        [str(one.turn), written(one.started_at), str(one.steps), one.why or "not yet", one.sentence] for one in turns
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
            shown_usd(line.held_usd),
            shown_usd(line.cost_usd),
            "; ".join(_more(line)),
        ]
        for line in lines
    ]
    columns = ["what", "for", "level, risk", "outcome", "held", "cost", "more"]
    empty = "It made no call and no request."
    return Listing("Calls and requests", columns, rows, right="held cost", long="what more", empty=empty)


def _more(line: Line) -> list[str]:
    """Say what is not so with every call."""
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
            shown_usd(one.held_usd),
            shown_usd(one.cost_usd),
        ]
        for one in made.models
    ]
    columns = ["model", "requests", "failed", "input", "cached", "output", "held", "cost"]
    return Listing("Models", columns, rows, right="requests failed input cached output held cost", long="model")


def _brakes(brakes: Sequence[Brake]) -> Listing:
    rows = [
        [written(one.at), one.brake, one.name, one.code, one.sentence or f"{one.scope} {one.window}".strip()]
        for one in brakes
    ]
    return Listing("Stopped by a brake", ["when", "brake", "what", "outcome", "why"], rows, long="what why")


def _guardrails(made: Receipt) -> Listing:
    rows = [
        [written(one.at), one.guardrail + (f" × {one.times}" if one.times > 1 else ""), one.sentence]
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
    rows = [[one.name, one.collection, written(one.read_at), str(one.times), one.document] for one in made.documents]
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
        [f"{one.chosen} of {one.wanted}", str(one.items), shown_usd(one.most_usd), one.sentence] for one in made.judges
    ]
    return Listing("Judges", ["asked", "findings", "at most", "why"], rows, right="findings", long="why")


def _notifications(made: Receipt) -> Listing:
    rows = [[one.notification, one.channel, one.about, written(one.queued_at)] for one in made.notifications]
    return Listing("To be told", ["notification", "channel", "about", "queued"], rows, long="notification about")

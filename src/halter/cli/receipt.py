"""`halter receipt`: what a session did and spent, what stopped it, who decided, and why it ended."""

from collections.abc import Sequence

from halter.app import App
from halter.cli.answer import answer_block, answer_json, answer_table, counted
from halter.cli.command import JsonOption, StoreOption, with_app
from halter.cli.moments import written
from halter.cli.named import SessionArgument, all_events, session_meant
from halter.core.ids import inbox_stream, session_stream
from halter.core.money import shown
from halter.state.receipt import Brake, Decision, Line, Receipt, TurnLine
from halter.state.receipt import receipt as receipt_of


def receipt(session: SessionArgument, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the receipt of a session: what it did and spent, what stopped it, who decided, and why it ended."""

    async def job(app: App) -> Receipt:
        whole = (await session_meant(app, session)).session
        return receipt_of(await all_events(app, session_stream(whole)), await all_events(app, inbox_stream(whole)))

    made = with_app(store, job)
    if as_json:
        answer_json(made)
        return
    answer_block(f"Receipt of {made.session}", _summary(made))
    _show_turns(made.turns)
    _show_work(made)
    _show_brakes(made.brakes)
    _show_decisions(made.decisions)


def _summary(made: Receipt) -> list[tuple[str, str]]:
    ended = written(made.ended_at) if made.ended_at else "not yet"
    return [
        ("agent", f"{made.agent} ({made.kind})"),
        ("started by", f"{made.started_by} ({made.origin}, {_trust(trusted=made.trusted)})"),
        ("trigger", made.trigger),
        ("part of", made.parent),
        ("state", f"{made.state} {made.terminal_reason}".strip()),
        ("began, ended", f"{written(made.started_at)}, {ended}"),
        ("cost", f"{shown(made.cost_usd)} of {shown(made.held_usd)} held{_by_purpose(made)}"),
        ("passed", ", ".join(f"{brake} {counted(times, 'time')}" for brake, times in made.passed.items())),
        ("anonymized", ", ".join(f"{kind} {counted(times, 'time')}" for kind, times in made.anonymized.items())),
        ("rules used", ", ".join(made.rules)),
        ("heard", "; ".join(_heard(made))),
        *(("overrun", f"{shown(over.amount)} in {over.scope} {over.window}".strip()) for over in made.overruns),
        *(("in doubt", call) for call in made.in_doubt),
        *(("unknown", f"{call}: nobody knows whether it was done") for call in made.unknown_calls),
        ("not read", counted(made.unknown, "event") + " of a newer Halter" if made.unknown else ""),
        ("events", f"{made.events}, the last with hash {made.hash[:16]}…"),
    ]


def _trust(*, trusted: bool) -> str:
    return "trusted" if trusted else "not trusted"


def _by_purpose(made: Receipt) -> str:
    """Tell the purposes apart where there are several; one alone has spent it all."""
    if len(made.spent) <= 1:
        return ""
    return ": " + ", ".join(f"{purpose} {shown(usd)}" for purpose, usd in made.spent.items())


def _heard(made: Receipt) -> list[str]:
    """Say from whom something came, and how often."""
    times: dict[str, int] = {}
    for one in made.heard:
        who = f"{one.cause} from {one.sender} ({one.origin}, {_trust(trusted=one.trusted)})"
        times[who] = times.get(who, 0) + 1
    return [who if count == 1 else f"{who} × {count}" for who, count in times.items()]


def _show_turns(turns: Sequence[TurnLine]) -> None:
    if turns:
        rows = [
            [str(one.turn), written(one.started_at), str(one.steps), one.why or "not yet", one.sentence]
            for one in turns
        ]
        answer_table("Turns", ["turn", "began", "steps", "ended", "why"], rows, right="turn steps", long="why")


def _show_work(made: Receipt) -> None:
    lines = sorted((*made.requests, *made.calls), key=lambda line: line.started_at)
    answer_table(
        "Calls and requests",
        ["what", "for", "level, risk", "outcome", "held", "cost", "more"],
        [
            [
                line.name,
                line.purpose,
                f"{line.level} {line.risk}".strip(),
                line.outcome or "in doubt",
                shown(line.held_usd),
                shown(line.cost_usd),
                "; ".join(_more(line)),
            ]
            for line in lines
        ],
        right="held cost",
        long="what more",
        empty="It made no call and no request.",
    )


def _more(line: Line) -> list[str]:
    """Say what is not so with every call."""
    facts = [
        (line.effect == "write", "writes"),
        (line.egress, "sends data where it says"),
        (line.phase not in {"", "work"}, f"phase {line.phase}"),
        (line.parallel_group != "", f"together as {line.parallel_group}"),
        (line.decided_by != "", f"agreed to by {line.decided_by}"),
        (bool(line.observed), f"only observed: {', '.join(line.observed)}"),
        (line.error != "", line.error),
    ]
    return [words for holds, words in facts if holds]


def _show_brakes(brakes: Sequence[Brake]) -> None:
    if brakes:
        rows = [
            [written(one.at), one.brake, one.name, one.code, one.sentence or f"{one.scope} {one.window}".strip()]
            for one in brakes
        ]
        answer_table("Stopped by a brake", ["when", "brake", "what", "outcome", "why"], rows, long="what why")


def _show_decisions(decisions: Sequence[Decision]) -> None:
    if decisions:
        rows = [[f"{one.about} of {one.name}", one.decision, _verdict(one), one.by, one.reason] for one in decisions]
        columns = ["about", "decision", "answer", "by", "reason"]
        answer_table("Decisions", columns, rows, long="about decision reason")


def _verdict(one: Decision) -> str:
    if not one.verdict:
        return "none known" if one.by else "none"
    return one.verdict if one.used or one.about != "approval" else f"{one.verdict}, not used"

"""`halter inbox`, `approve`, `deny`: what waits for a person, and what they say to it.

`halter rules`: where a person said "always", and taking it back.

`halter halt`, `resume`, `cancel`: what a person says to agents that run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    ScopeArgument,
    SessionArgument,
    StoreOption,
    fail,
    make_desk,
    parse_typed_duration,
    report_errors,
    run_with_app,
)
from halter.cli.commands import PlainCommand, PlainGroup
from halter.cli.exit_codes import EXIT_FAILED, EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_block, answer_done, answer_json, say
from halter.core.clock import DAY, format_duration
from halter.core.ports import BLOB_THRESHOLD
from halter.core.rows import RuleRow
from halter.core.text import format_count
from halter.guard.approvals import read_standing_rule
from halter.operations import control, decisions, queries
from halter.operations import decisions as desk_rules
from halter.operations.decisions import (
    SAME,
    ApprovalTerms,
    DecisionResult,
    RuleOffer,
    WaitingDecision,
    as_object_with_rules,
    decision_meant,
    offers,
    put,
    told,
    waiting,
)
from halter.operations.money import amount_of
from halter.operations.queries import AgentNews
from halter.present.events import format_moment
from halter.runtime.runtime import Runtime

DEFAULT_RULE_LIFETIME: Final = "7d"

DecisionArgument = Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")]


def inbox(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what needs you: everything that waits for a yes or a no, and what each of them does.

    Below it stands what agents told in the app in the last day.
    """

    async def job(app: Runtime) -> tuple[Sequence[WaitingDecision], Sequence[AgentNews], int]:
        desk, now = make_desk(app), app.clock.now()
        return await waiting(desk), await queries.told(desk, now - DAY), now

    found, news, now = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json([as_object_with_rules(one) for one in found])
        return
    say(f"{format_count(len(found), 'decision')} for you:" if found else "Nothing needs you.")
    for one in found:
        answer_block("", _facts(one, now))
    if news:
        say("Told in the last day:")
        for each in news:
            agent = "" if each.subject.startswith(each.agent) else f"{each.agent}: "
            say(f"{format_moment(each.queued_at)} {agent}{each.subject}")


def approve(
    decision: DecisionArgument,
    *,
    edit: Annotated[
        str, typer.Option("--edit", metavar="FILE", help="Yes to these arguments instead, as JSON; - reads them here.")
    ] = "",
    always: Annotated[bool, typer.Option("--always", help="Yes, and make a rule that says yes from now on.")] = False,
    match: Annotated[
        list[str] | None,
        typer.Option(
            "--match",
            metavar="WHAT",
            help="Which calls: same, words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST or any:KEY; may be repeated.",
        ),
    ] = None,
    scope: Annotated[
        str, typer.Option("--scope", metavar="SCOPE", help="Where the rule holds: session, agent or fleet.")
    ] = "",
    lasts: Annotated[str, typer.Option("--for", metavar="TIME", help="How long the rule holds; else 7d.")] = "",
    cap: Annotated[str, typer.Option("--cap", metavar="AMOUNT", help="The new cap in dollars, or none.")] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say yes: to exactly what was asked, once; to other arguments; always; or to a higher cap.

    A yes counts for the very call that was shown, and only until it expires. `halter inbox` shows what waits,
    `halter rules offer` which rules it could make. A rule asks for every argument as it was shown, except where --match
    says otherwise.
    """
    if sum((edit != "", always, cap != "")) > 1:
        fail("--edit, --always and --cap are three different answers: give one of them.", EXIT_USAGE)
    if not always and (match or scope or lasts):
        fail("--match, --scope and --for are the words of a rule: add --always.", EXIT_USAGE)
    answer = ApprovalTerms(
        edit=_arguments_from(edit) if edit else None,
        always=always,
        match="\n".join(match) if match else "same",
        scope=scope or "session",
        lasts=parse_typed_duration(lasts or DEFAULT_RULE_LIFETIME),
        cap=(report_errors(lambda: amount_of(cap)),) if cap else None,
        reason=reason,
    )
    _tell(run_with_app(store, lambda app: decisions.approve(make_desk(app), decision, answer)), as_json=as_json)


def deny(
    decision: DecisionArgument,
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say no.

    The model is told that you said no, and may try another way. Your reason stands in the journal and in the receipt.
    """
    _tell(run_with_app(store, lambda app: decisions.deny(make_desk(app), decision, reason)), as_json=as_json)


def _tell(said: DecisionResult, *, as_json: bool) -> None:
    if as_json:
        answer_json({"subject": said.decision, "done": True, **({"rule": said.rule} if said.rule else {})})
    else:
        say(said.sentence)


def _facts(one: WaitingDecision, now: int) -> list[tuple[str, str]]:
    """Write a decision for people: what it is about, what a yes or a no does, and how to type them."""
    words, more = put(one), " --cap AMOUNT" if one.about == "cap_raise" else ""
    return [
        ("decision", one.decision),
        ("what", words.what),
        ("why", "; ".join(one.reasons)),
        ("shown", words.shown),
        ("agent", f"{one.agent}, session {one.session}" if one.session else one.agent),
        (
            "waits",
            f"{format_duration(max(0, now - one.asked_at))}, for at most {format_duration(one.expires_at - now)} more",
        ),
        ("yes", f"{words.yes}: halter approve {one.decision}{more}"),
        ("no", f"{words.no}: halter deny {one.decision}"),
    ]


def _arguments_from(file: str) -> bytes:
    """Read arguments from a file or from the standard input: a JSON object."""
    try:
        data = sys.stdin.buffer.read(BLOB_THRESHOLD + 1) if file == "-" else _content(Path(file))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        fail(f"{file!r} cannot be read: {why or error}.", EXIT_UNUSABLE)
    return report_errors(lambda: decisions.arguments(data, f" in {file!r}"))


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BLOB_THRESHOLD + 1)


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="rules", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    group.command("end", cls=PlainCommand)(end)
    group.command("offer", cls=PlainCommand)(offer)
    return group


def _default(context: typer.Context, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the rules by which somebody said "always", end one, or see which a decision offers."""
    if context.invoked_subcommand is None:
        _show(store, as_json=as_json)
    elif store is not None or as_json:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", EXIT_USAGE)


def _show(store: str | None, *, as_json: bool) -> None:
    async def job(app: Runtime) -> tuple[Sequence[RuleRow], int]:
        return await desk_rules.rules(make_desk(app)), app.clock.now()

    rows, now = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(rows)
        return
    if not rows:
        say("There are no rules: nobody said always.")
    for row in rows:
        answer_block("", _rule_facts(row, now))


def _rule_facts(row: RuleRow, now: int) -> list[tuple[str, str]]:
    return [
        ("rule", row.rule),
        ("always", f"{row.tool} {told(read_standing_rule(row).matcher)}"),
        ("where", _describe_scope(row)),
        ("by", f"{row.by}, {format_moment(row.made_at)}"),
        ("until", _describe_expiry(row, now)),
    ]


def _describe_scope(row: RuleRow) -> str:
    return f"{row.scope} {row.owner}".strip()


def _describe_expiry(row: RuleRow, now: int) -> str:
    if row.ended_at is not None:
        return f"ended by {row.ended_by}, {format_moment(row.ended_at)}"
    if now >= row.expires_at:
        return f"over since {format_moment(row.expires_at)}"
    return f"{format_moment(row.expires_at)}, {format_duration(row.expires_at - now)} from now"


def end(
    rule: Annotated[str, typer.Argument(help="A rule's id from halter rules; its beginning will do.")],
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an "always" back: from now on such calls are asked about again.

    The beginning of its id will do. Leaves with 1 if the rule was over already.
    """
    answer_done(run_with_app(store, lambda app: desk_rules.end(make_desk(app), rule, reason)), as_json=as_json)


def offer(
    decision: Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rules that a yes to a decision could make, each in full, and how to choose it.

    They are made of the call that is shown: the narrowest comes first. Other ones can be written with --match.
    """

    async def job(app: Runtime) -> tuple[str, Sequence[RuleOffer]]:
        asked = await decision_meant(make_desk(app), decision)
        return asked.decision, offers(asked)

    whole, found = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(found)
        return
    if not found:
        say(f"No rule can answer {whole}: it is always asked about.")
    for each in found:
        answer_block("", [("always", each.sentence), ("choose", _choice_command(whole, each.match))])


def _choice_command(decision: str, match: str) -> str:
    lines = () if match == SAME else match.splitlines()
    return " ".join([f"halter approve {decision} --always", *(f"--match {quote(line)}" for line in lines)])


def halt(
    scope: ScopeArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Stop everything in a scope: nothing starts, and what is in flight is cancelled within a second.

    It holds for every process on the store, and until somebody resumes the scope. `halter halt fleet` stops all
    agents.
    """
    done = run_with_app(store, lambda app: control.halt(make_desk(app), scope, reason), despite_doubt=True)
    answer_done(done, as_json=as_json)


def resume(
    scope: ScopeArgument,
    *,
    over: Annotated[
        str, typer.Option("--over", metavar="TIME", help="Let sessions go one after the other, as in 5m.")
    ] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a halted scope act again. A fleet comes back over a second for each session, at most a minute.

    Leaves with 1 if the scope was not halted.
    """
    wanted = parse_typed_duration(over) if over else None
    done = run_with_app(store, lambda app: control.resume(make_desk(app), scope, wanted, reason))
    answer_done(done, as_json=as_json)


def cancel(
    session: SessionArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """End a session for good: what it has in flight is stopped, and nothing of it starts again.

    Leaves with 1 if it is not over when this ends.
    """
    cancelled = run_with_app(store, lambda app: control.cancel(make_desk(app), session, reason), despite_doubt=True)
    if as_json:
        answer_json({"subject": cancelled.session, "done": True, "ended": cancelled.came == "ended"})
    else:
        say(f"Session {cancelled.session} is cancelled. {cancelled.sentence}")
    if cancelled.came != "ended":
        raise typer.Exit(EXIT_FAILED)

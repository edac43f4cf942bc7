"""`halter inbox`, `approve`, `deny`, `rules`, `halt`, `resume`, `cancel`: what a person says to agents that run."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    Typed,
    command,
    fail,
    group,
    make_desk,
    parse_typed_duration,
    report_errors,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, say
from halter.core.clock import SECOND
from halter.core.ports import BLOB_THRESHOLD
from halter.operations import control, decisions
from halter.operations.decisions import ApprovalTerms, DecisionResult, as_object
from halter.operations.money import amount_of
from halter.present.tables import build_inbox_sheet, build_offers_sheet, build_rules_sheet

DEFAULT_RULE_LIFETIME: Final = "7d"


def _answered(result: DecisionResult) -> Mapping[str, Any]:
    return {"subject": result.decision, "done": True, **({"rule": result.rule} if result.rule else {})}


inbox = command(
    decisions.read_inbox,
    """Show open decisions, what a yes and a no to each of them do, and everything else that needs you.

    Below them are the notices of the last day that agents sent to the app.
    """,
    build_inbox_sheet,
    look=True,
    fresh=True,
    ok=lambda found: not (found.check and (found.decisions or found.needs)),
    json=lambda found: [as_object(one) for one in found.decisions],
)

deny = command(
    decisions.deny,
    """Deny a decision.

    The model is told that you said no, and may try another way. Your reason is in the journal and in the receipt.
    """,
    json=_answered,
)


def approve(
    decision: Annotated[str, typer.Argument(help="A decision's id, or its beginning, from halter inbox.")],
    *,
    edit: Annotated[
        str, typer.Option("--edit", metavar="FILE", help="Approve these arguments instead, as JSON; - reads stdin.")
    ] = "",
    always: Annotated[bool, typer.Option("--always", help="Approve, and make a standing rule.")] = False,
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
    lasts: Annotated[str, typer.Option("--for", metavar="TIME", help="How long the rule holds (default: 7d).")] = "",
    cap: Annotated[str, typer.Option("--cap", metavar="AMOUNT", help="The new cap in dollars, or none.")] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Approve a decision: exactly as shown, once; with other arguments; always; or with a higher cap.

    An approval covers the very call that was shown, until it expires. `halter inbox` shows open decisions, `halter
    rules offer` the rules that one could make. A rule requires every argument as shown, except where --match differs.
    """
    if sum((edit != "", always, cap != "")) > 1:
        fail("--edit, --always and --cap are three different answers: give one of them.", EXIT_USAGE)
    if not always and (match or scope or lasts):
        fail("--match, --scope and --for describe a rule: add --always.", EXIT_USAGE)
    answer = ApprovalTerms(
        edit=_read_arguments(edit) if edit else None,
        always=always,
        match="\n".join(match) if match else "same",
        scope=scope or "session",
        lasts=parse_typed_duration(lasts or DEFAULT_RULE_LIFETIME),
        cap=(report_errors(lambda: amount_of(cap)),) if cap else None,
        reason=reason,
    )
    result = run_with_app(store, lambda app: decisions.approve(make_desk(app), decision, answer))
    if as_json:
        answer_json(_answered(result))
    else:
        say(result.sentence)


def _read_arguments(file: str) -> bytes:
    """Read a JSON object from a file or from stdin."""
    try:
        if file == "-":
            data = sys.stdin.buffer.read(BLOB_THRESHOLD + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(BLOB_THRESHOLD + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        fail(f"Cannot read {file!r}: {why or error}.", EXIT_UNUSABLE)
    return report_errors(lambda: decisions.arguments(data, f" in {file!r}"))


rules = group(
    "Show standing rules, end one, or list those that a decision offers.",
    {
        "end": command(
            decisions.end,
            """End a standing rule: from now on such calls are asked about again.

            Exits 1 if the rule was over already.
            """,
        ),
        "offer": command(
            decisions.offer_rules,
            """Show the rules that an approval could make, each in full, and how to choose it.

            They are made from the call that is shown; the narrowest is first. Write others with --match.
            """,
            build_offers_sheet,
            look=True,
            json=lambda found: found.offers,
        ),
    },
    command(decisions.rules, "Show standing rules.", build_rules_sheet, look=True, fresh=True),
)

halt = command(
    control.halt,
    """Stop everything in a scope: nothing starts, and what is in flight is cancelled within a second.

    It binds every process on the store until the scope is resumed. `halter halt fleet` stops all agents.
    """,
    look=True,
)

resume = command(
    control.resume,
    """Resume a halted scope. A fleet comes back over a second for each session, at most a minute.

    Exits 1 if the scope was not halted.
    """,
    typed={
        "over": Typed(
            ("over_seconds",),
            Annotated[str, typer.Option("--over", metavar="TIME", help="Resume sessions one by one, as in 5m.")],
            lambda over: {"over_seconds": parse_typed_duration(over) // SECOND if over else None},
            "",
        )
    },
)

cancel = command(
    control.cancel,
    """End a session for good: what it has in flight is stopped, and nothing of it starts again.

    Exits 1 if the session is not over yet.
    """,
    lambda done, _: [f"Session {done.session} is cancelled. {done.sentence}"],
    look=True,
    json=lambda done: {"subject": done.session, "done": True, "ended": done.came == "ended"},
    ok=lambda done: done.came == "ended",
)

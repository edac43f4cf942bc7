"""`halter inbox`, `approve`, `deny` and `rules`: decisions and standing rules."""

import re
import sys
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    command,
    fail,
    group,
    make_desk,
    parse_typed_duration,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence, warn
from halter.cli.terminal import Keyboard, StandardInput, ask_freshly
from halter.core.errors import NotDone
from halter.core.ports import BLOB_THRESHOLD
from halter.guard.approvals import PendingDecision
from halter.operations import decisions, rules
from halter.operations.actor import Actor
from halter.operations.decisions import ApprovalTerms, DecisionResult, GroupResult, to_json_object
from halter.operations.money import amount_of
from halter.operations.queries import read_needs
from halter.present.decisions import render_prompt
from halter.present.tables import build_decision_sheet, build_inbox_sheet, build_offers_sheet, build_rules_sheet

DEFAULT_RULE_LIFETIME: Final = "7d"
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,2}")
"""A number in the inbox, never an id prefix. Its decision is shown before it is answered."""


def _to_json(result: DecisionResult) -> Mapping[str, Any]:
    more = {"rule": result.rule, "continuation": result.continuation}
    return {"subject": result.decision, "done": True, **{name: value for name, value in more.items() if value}}


inbox = command(
    decisions.read_inbox,
    """Show open decisions, the effects of a yes and a no, and everything else that needs you.

    Below them are the notices that agents sent to the app in the last day. With --json, each of them has the kind
    notice, and its whole text.
    """,
    build_inbox_sheet,
    despite_doubt=True,
    allow_missing=True,
    is_ok=lambda result: not (result.check and (result.decisions or result.needs)),
    json=lambda result: [
        *(to_json_object(decision) for decision in result.decisions),
        *result.needs,
        *({**msgspec.structs.asdict(notice), "decision": ""} for notice in result.news),
    ],
)

deny = command(
    decisions.deny,
    """Deny a decision.

    The model sees the denial and may try another way. Your reason is recorded in the journal and in the receipt.
    """,
    json=_to_json,
)


def approve(
    decision: Annotated[
        str, typer.Argument(help="Decision id or prefix, or number in halter inbox (default: ask about each).")
    ] = "",
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
            help="Calls that match: same, words:KEY=WORDS, under:KEY=FOLDER, at:KEY=HOST or any:KEY. Repeatable.",
        ),
    ] = None,
    scope: Annotated[
        str, typer.Option("--scope", metavar="SCOPE", help="Scope of the rule: session, agent or fleet.")
    ] = "",
    lasts: Annotated[str, typer.Option("--for", metavar="TIME", help="Duration of the rule (default: 7d).")] = "",
    cap: Annotated[str, typer.Option("--cap", metavar="AMOUNT", help="New cap in dollars, or none.")] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Approve a decision: once as shown, with other arguments, with a standing rule, or with a higher cap.

    An approval covers exactly the call that was shown, until it expires. `halter inbox` shows open decisions, `halter
    rules offer` the rules that an approval can make. A rule requires every argument as shown, except where --match
    differs. Without an id, each decision is shown and you are asked about it; several calls of one session are shown
    together. A number is also shown and confirmed first, since the inbox may have changed.
    """
    if sum((edit != "", always, cap != "")) > 1:
        fail("--edit, --always and --cap cannot be combined. Pass one of them.", EXIT_USAGE)
    if not always and (match or scope or lasts):
        fail("--match, --scope and --for require --always.", EXIT_USAGE)
    if not decision and (edit or always or cap):
        fail("--edit, --always and --cap require a decision id.", EXIT_USAGE)
    terms = ApprovalTerms(
        edit=_read_arguments(edit) if edit else None,
        always=always,
        match="\n".join(match) if match else "same",
        scope=scope or "session",
        lasts=parse_typed_duration(lasts or DEFAULT_RULE_LIFETIME),
        cap=(report_errors(lambda: amount_of(cap)),) if cap else None,
        reason=reason,
    )
    if not decision or _NUMBER.fullmatch(decision):
        _ask_at_keyboard(store, terms, int(decision or 0), as_json=as_json)
        return
    result = run_with_app(store, lambda app: decisions.approve(make_desk(app), decision, terms))
    if as_json:
        answer_json(_to_json(result))
    else:
        print_sentence(result.sentence)


def _ask_at_keyboard(store: str | None, terms: ApprovalTerms, number: int, *, as_json: bool) -> None:
    keyboard = StandardInput()
    if not keyboard.is_tty:
        fail("Not a terminal, so you cannot be asked. Pass a decision id from halter inbox.", EXIT_USAGE)
    if as_json:
        fail("With --json you are not asked. Pass a decision id from halter inbox --json.", EXIT_USAGE)
    run_with_app(store, lambda app: ask_decisions(make_desk(app, store), keyboard, terms, number))


async def ask_decisions(actor: Actor, keyboard: Keyboard, terms: ApprovalTerms, number: int = 0) -> None:
    """Show open decisions, or the one with a number, and apply the answers. An answer covers what was shown."""
    open_decisions = await decisions.waiting(actor)
    if number > len(open_decisions):
        raise NotDone(f"There is no decision {number}. halter inbox has {len(open_decisions)}.", "missing")
    if not open_decisions:
        needs = await read_needs(actor)
        print_sentence("No decision is open. For what else needs you: halter inbox" if needs else "Nothing needs you.")
    for calls in decisions.group_calls(open_decisions[number - 1 : number] if number else open_decisions):
        outcome = await _ask_together(actor, keyboard, calls, terms) if len(calls) > 1 else "one by one"
        if outcome == "quit" or (outcome == "one by one" and not await _ask_each(actor, keyboard, calls, terms)):
            return


async def _ask_together(
    actor: Actor, keyboard: Keyboard, calls: Sequence[PendingDecision], terms: ApprovalTerms
) -> Literal["answered", "one by one", "quit"]:
    """Show all pending calls of a session, and ask once."""
    for decision in calls:
        show_sheet(build_decision_sheet(decision, actor.app.clock.now()))
    question = f"yes: Exactly these {len(calls)} calls run, once each. no: None of them runs. "
    reply = ask_freshly(keyboard, f"{question}[y]es, [n]o, [o]ne by one, [q]uit (default: one by one): ")
    match (reply or "").strip().lower():
        case "y" | "yes":
            shown_decisions = [decisions.ShownDecision(decision.decision, decision.digest) for decision in calls]
            await _print_result(
                decisions.approve_together(actor, calls[0].session, shown=shown_decisions, reason=terms.reason)
            )
        case "n" | "no":
            for decision in calls:
                await _print_result(decisions.deny(actor, decision.decision, terms.reason))
        case "q" | "quit":
            return "quit"
        case _:
            return "quit" if reply is None else "one by one"
    return "answered"


async def _ask_each(actor: Actor, keyboard: Keyboard, calls: Sequence[PendingDecision], terms: ApprovalTerms) -> bool:
    """Ask about each decision in turn; return False if the person quits."""
    for decision in calls:
        show_sheet(build_decision_sheet(decision, actor.app.clock.now()))
        if decision.about == "cap_raise" and terms.cap is None:
            print_sentence(
                f"This decision needs a new cap: halter approve {decision.decision} --cap AMOUNT{actor.option}"
            )
            continue
        prompt = render_prompt(decision)
        reply = ask_freshly(
            keyboard, f"yes: {prompt.yes}. no: {prompt.no}. [y]es, [n]o, [s]kip, [q]uit (default: skip): "
        )
        match (reply or "").strip().lower():
            case "y" | "yes":
                bound_terms = msgspec.structs.replace(terms, digest=decision.digest)
                await _print_result(decisions.approve(actor, decision.decision, bound_terms))
            case "n" | "no":
                await _print_result(decisions.deny(actor, decision.decision, terms.reason))
            case "q" | "quit":
                return False
            case _ if reply is None:
                return False
            case _:
                print_sentence(f"{decision.decision} stays open.")
    return True


async def _print_result(result: Awaitable[DecisionResult | GroupResult]) -> None:
    """Print the result of an answer. A decision that another person answered meanwhile does not stop the loop."""
    try:
        print_sentence((await result).sentence)
    except NotDone as error:
        warn(str(error))


def _read_arguments(file: str) -> bytes:
    """Read a JSON object from a file or from stdin."""
    try:
        if file == "-":
            data = sys.stdin.buffer.read(BLOB_THRESHOLD + 1)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(BLOB_THRESHOLD + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        fail(f"Cannot read {file!r}: {reason or error}.", EXIT_UNUSABLE)
    return report_errors(lambda: decisions.arguments(data, f" in {file!r}"))


rules = group(
    "List standing rules, end one, or list the rules that a decision offers.",
    {
        "end": command(
            rules.end,
            """End a standing rule. Matching calls need approval again.

            Exits 1 if the rule had already ended.
            """,
        ),
        "offer": command(
            decisions.offer_rules,
            """Show the rules that an approval can make, each in full, and how to choose it.

            They are derived from the shown call; the narrowest is first. Define others with --match.
            """,
            build_offers_sheet,
            despite_doubt=True,
            json=lambda result: result.offers,
        ),
    },
    command(rules.rules, "List standing rules.", build_rules_sheet, despite_doubt=True, allow_missing=True),
)

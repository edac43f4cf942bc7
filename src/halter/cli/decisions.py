"""`halter inbox`, `approve`, `deny`, `rules`, `tell`, `halt`, `resume`, `cancel`: what a person says to agents.

And `halter channels`: who may say it from a phone.
"""

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
    Typed,
    command,
    fail,
    group,
    is_never_used,
    make_desk,
    parse_typed_duration,
    read_cli_settings,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_UNUSABLE, EXIT_USAGE
from halter.cli.output import answer_json, answer_table, print_sentence, warn
from halter.cli.terminal import Keyboard, StandardInput, ask_freshly
from halter.core.clock import SECOND
from halter.core.errors import NotDone
from halter.core.ports import BLOB_THRESHOLD
from halter.operations import control, decisions
from halter.operations.channels import PairingCode, list_approvers, offer_pairing, remove_approver
from halter.operations.decisions import ApprovalTerms, DecisionResult, GroupResult, WaitingDecision, to_json_object
from halter.operations.desk import Actor
from halter.operations.money import amount_of
from halter.present.tables import build_decision_sheet, build_inbox_sheet, build_offers_sheet, build_rules_sheet
from halter.runtime.runtime import Runtime

DEFAULT_RULE_LIFETIME: Final = "7d"
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,2}")
"""A number in the inbox, never the beginning of an id: what it means is shown before it counts."""


def _to_json(result: DecisionResult) -> Mapping[str, Any]:
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
    json=lambda found: [*(to_json_object(one) for one in found.decisions), *found.needs],
)

deny = command(
    decisions.deny,
    """Deny a decision.

    The model is told that you said no, and may try another way. Your reason is in the journal and in the receipt.
    """,
    json=_to_json,
)


def approve(
    decision: Annotated[
        str, typer.Argument(help="Its id, the beginning, or its number in halter inbox (default: ask about each).")
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
    Without an id you are shown one after the other, and asked; several calls of one session are shown and asked about
    together. A number, too, is shown and asked about first, since the inbox may have changed.
    """
    if sum((edit != "", always, cap != "")) > 1:
        fail("--edit, --always and --cap are three different answers: give one of them.", EXIT_USAGE)
    if not always and (match or scope or lasts):
        fail("--match, --scope and --for describe a rule: add --always.", EXIT_USAGE)
    if not decision and (edit or always or cap):
        fail("--edit, --always and --cap answer one decision: name it.", EXIT_USAGE)
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
    if as_json or not keyboard.is_tty:
        fail("You are asked first, and this is no terminal: name a decision by its id, from halter inbox.", EXIT_USAGE)
    run_with_app(store, lambda app: ask_decisions(make_desk(app, store), keyboard, terms, number))


async def ask_decisions(actor: Actor, keyboard: Keyboard, terms: ApprovalTerms, number: int = 0) -> None:
    """Show open decisions, or the one with a number, and do what is answered. An answer holds for what was shown."""
    found = await decisions.waiting(actor)
    if number > len(found):
        raise NotDone(f"There is no decision {number} in halter inbox: it has {len(found)}.", "missing")
    if not found:
        print_sentence("Nothing needs you.")
    for calls in decisions.group_calls(found[number - 1 : number] if number else found):
        together = await _ask_together(actor, keyboard, calls, terms) if len(calls) > 1 else "one by one"
        if together == "quit" or (together == "one by one" and not await _ask_each(actor, keyboard, calls, terms)):
            return


async def _ask_together(
    actor: Actor, keyboard: Keyboard, calls: Sequence[WaitingDecision], terms: ApprovalTerms
) -> Literal["answered", "one by one", "quit"]:
    """Show all calls of a session that wait, and ask once."""
    for decision in calls:
        show_sheet(build_decision_sheet(decision, actor.app.clock.now()))
    question = f"yes: Exactly these {len(calls)} calls, once each. no: None of them runs. "
    typed = ask_freshly(keyboard, f"{question}[y]es, [n]o, [o]ne by one, [q]uit (default: one by one): ")
    match (typed or "").strip().lower():
        case "y" | "yes":
            shown = [decisions.ShownDecision(decision.decision, decision.digest) for decision in calls]
            await _print_result(decisions.approve_together(actor, calls[0].session, shown=shown, reason=terms.reason))
        case "n" | "no":
            for decision in calls:
                await _print_result(decisions.deny(actor, decision.decision, terms.reason))
        case "q" | "quit":
            return "quit"
        case _:
            return "quit" if typed is None else "one by one"
    return "answered"


async def _ask_each(actor: Actor, keyboard: Keyboard, calls: Sequence[WaitingDecision], answer: ApprovalTerms) -> bool:
    """Ask about one after the other; return whether to go on."""
    for decision in calls:
        show_sheet(build_decision_sheet(decision, actor.app.clock.now()))
        if decision.about == "cap_raise" and answer.cap is None:
            print_sentence(f"It takes a new cap: halter approve {decision.decision} --cap AMOUNT{actor.option}")
            continue
        words = decisions.render_prompt(decision)
        typed = ask_freshly(
            keyboard, f"yes: {words.yes}. no: {words.no}. [y]es, [n]o, [s]kip, [q]uit (default: skip): "
        )
        match (typed or "").strip().lower():
            case "y" | "yes":
                terms = msgspec.structs.replace(answer, digest=decision.digest)
                await _print_result(decisions.approve(actor, decision.decision, terms))
            case "n" | "no":
                await _print_result(decisions.deny(actor, decision.decision, answer.reason))
            case "q" | "quit":
                return False
            case _ if typed is None:
                return False
            case _:
                print_sentence(f"{decision.decision} stays open.")
    return True


async def _print_result(answered: Awaitable[DecisionResult | GroupResult]) -> None:
    """Say what became of one decision; one that another person answered meanwhile keeps no other from being asked."""
    try:
        print_sentence((await answered).sentence)
    except NotDone as no:
        warn(str(no))


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

tell = command(
    control.send_message,
    """Send a message to a session, or answer the question that it asks: it wakes, and sees it in its next turn.

    Exits 1 if the session is over.
    """,
)

fork = command(
    control.fork,
    """Begin a new session with what was said in another one, up to one of its events.

    halter show SESSION --events numbers them. The new session has a budget of its own: what was spent, approved or
    granted in the other one is not inherited. What others wrote there stays marked as theirs. Nothing runs yet.
    """,
)

halt = command(
    control.halt,
    """Stop everything in a scope: nothing starts, and what is in flight is cancelled within a second.

    It binds every process on the store until the scope is resumed. `halter halt fleet` stops all agents, `halter halt
    NAME` one agent, `halter halt ID` one session, which goes on in its place with `halter resume`. What is not known is
    refused. `halter off` ends an agent's session, too, so that the next one begins anew; `halter cancel` ends a session
    for good.
    """,
    look=True,
)

resume = command(
    control.resume,
    """Resume a halted scope. A fleet comes back over a second for each session, at most a minute.

    An agent that is off, has stopped or is paused goes on as well. Exits 1 if there was nothing to resume.
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


ChannelArgument = Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel: telegram, ntfy or slack.")]
PersonArgument = Annotated[str, typer.Argument(metavar="NAME", help="The person's name; it is in every event.")]


def list_channels(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List who may answer decisions over which channel.

    Each has a name that is in every event, a role, the agents that they see, and an account of the platform.
    """
    found = run_with_app(store, lambda app: list_approvers(make_desk(app, store)), fresh=True)
    if as_json:
        answer_json([msgspec.structs.asdict(each) for each in found])
    elif found:
        rows = [[each.channel, each.name, each.role, ", ".join(each.agents) or "all", each.account] for each in found]
        answer_table("Channels", ["channel", "name", "role", "agents", "account"], rows)
    else:
        print_sentence(
            "No one answers decisions over a channel: `halter channels pair telegram NAME` makes a code for that."
        )


def pair(
    channel: ChannelArgument,
    name: PersonArgument,
    *,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")
    ] = "approver",
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="Only this agent; may be repeated.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a code that pairs an account of a platform with a person. It is good for ten minutes, and once.

    The first account that sends the code to the bot answers for that person from then on. The fleet's file says how the
    platform is reached, and `halter serve`, `halter up` or a worker reads the code.
    """

    async def job(app: Runtime) -> tuple[PairingCode, str]:
        code = await offer_pairing(make_desk(app, store), channel, name, role, agent or ())
        return code, await _send_code(app, code)

    settings = report_errors(lambda: read_cli_settings(store))
    code, problem = run_with_app(store, job, new=is_never_used(settings, store))
    if as_json:
        answer_json(msgspec.structs.asdict(code))
        return
    print_sentence(code.code)
    if code.place:
        print_sentence(
            f"Subscribe to the topic {code.place} in the ntfy app, and keep its name to yourself: it is the key."
        )
        print_sentence(
            f"{problem} Publish the code to {code.place}-re." if problem else "Then press Pair below what comes there."
        )
        return
    print_sentence(
        f"Send this code to the bot within ten minutes, from the account that answers as {code.name} ({code.role})."
    )


async def _send_code(app: Runtime, code: PairingCode) -> str:
    """Send a code to the topic that was made for it; returns why that failed."""
    if not code.place:
        return ""
    from halter.channels.channel import TransportFailed
    from halter.channels.messages import ChatButton, ChatMessage
    from halter.channels.serve import make_transports, read_channels

    text = f"Answer decisions here as {code.name} ({code.role})?"
    for transport in make_transports(app, read_channels(app)):
        if transport.name == code.channel:
            try:
                await transport.send(code.place, ChatMessage(text, (ChatButton("Pair", code.code),)))
            except TransportFailed as failed:
                return str(failed)
            finally:
                await transport.close()
            return ""
    return f"No {code.channel} is named under `channels` in halter.yaml, so the code was not sent there."


def unpair(
    channel: ChannelArgument,
    name: PersonArgument,
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a person from a channel: from this moment, nothing that they send counts.

    Do this with a lost phone. Their unused codes are void as well.
    """
    done = run_with_app(store, lambda app: remove_approver(make_desk(app, store), channel, name, reason))
    if as_json:
        answer_json({"subject": done.subject, "done": True})
    else:
        print_sentence(done.sentence)


channels = group(
    "Show who answers decisions from a phone; pair or remove a person.",
    {"list": list_channels, "pair": pair, "unpair": unpair},
)

"""`halter inbox`, `approve`, `deny`, `rules`, `tell`, `fork`, `halt`, `resume` and `cancel`: control by a person.

Also `halter channels`: the people who can answer from a phone.
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
from halter.core.tools import File
from halter.guard.approvals import PendingDecision
from halter.operations import control, decisions, forks, messages, rules
from halter.operations.actor import Actor
from halter.operations.channels import PairingCode, list_approvers, offer_pairing, remove_approver
from halter.operations.decisions import ApprovalTerms, DecisionResult, GroupResult, to_json_object
from halter.operations.money import amount_of
from halter.operations.queries import read_needs
from halter.present.decisions import render_prompt
from halter.present.tables import build_decision_sheet, build_inbox_sheet, build_offers_sheet, build_rules_sheet
from halter.runtime.runtime import Runtime

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

tell = command(
    messages.send_message,
    """Send a message to a session, or answer its question. The session wakes and reads it in its next turn.

    Exits 1 if the session has ended.
    """,
    replacements={
        "file": Typed(
            ("files",),
            Annotated[
                list[Path] | None,
                typer.Option("--file", metavar="PATH", help="Picture, PDF, document, sound or text. Repeatable."),
            ],
            lambda paths: {"files": _open_files(paths or ())},
            None,
        )
    },
)


def _open_files(paths: Sequence[Path]) -> tuple[File, ...]:
    from halter.models.input_files import open_files

    return report_errors(lambda: open_files(paths))


fork = command(
    forks.fork,
    """Create a session from the messages of another one, up to one of its events.

    `halter show SESSION --events` numbers the events. The new session has its own budget. Spending, approvals and
    grants are not inherited; untrusted content stays marked. The new session does not run yet.
    """,
)

halt = command(
    control.halt,
    """Halt everything in a scope: nothing starts, and running effects are cancelled within a second.

    The halt binds every process on the store until the scope is resumed. `halter halt fleet` halts all agents, `halter
    halt NAME` one agent, `halter halt ID` one session; `halter resume` continues a halted session where it stopped. An
    unknown scope is rejected. `halter off` also ends the session of an agent, so that the next one starts anew; `halter
    cancel` ends a session.
    """,
    despite_doubt=True,
)

resume = command(
    control.resume,
    """Lift a halt. What it stopped continues in place.

    The sessions of a fleet resume over a second for each session, at most a minute. `halter on AGENT` starts an agent
    that is off or paused. Exits 1 if there was nothing to resume.
    """,
    replacements={
        "over": Typed(
            ("over_seconds",),
            Annotated[
                str,
                typer.Option("--over", metavar="TIME", help="Resume sessions one by one over this time, such as 5m."),
            ],
            lambda over: {"over_seconds": parse_typed_duration(over) // SECOND if over else None},
            "",
        )
    },
)

cancel = command(
    control.cancel,
    """End a session. Running calls are cancelled.

    Exits 1 if the session has not ended yet.
    """,
    lambda result, _: [f"Session {result.session} is cancelled. {result.sentence}"],
    despite_doubt=True,
    json=lambda result: {"subject": result.session, "done": True, "ended": result.came == "ended"},
    is_ok=lambda result: result.came == "ended",
)


ChannelArgument = Annotated[str, typer.Argument(metavar="CHANNEL", help="Channel: telegram, ntfy or slack.")]
PersonArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the person, recorded in every event.")]


def list_channels(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the people who can answer decisions over each channel.

    Each has a name, which is in every event, a role, the agents that they see, and an account of the platform.
    """
    approvers = run_with_app(store, lambda app: list_approvers(make_desk(app, store)), allow_missing=True)
    if as_json:
        answer_json([msgspec.structs.asdict(each) for each in approvers])
    elif approvers:
        rows = [
            [each.channel, each.name, each.role, ", ".join(each.agents) or "all", each.account] for each in approvers
        ]
        answer_table("Channels", ["channel", "name", "role", "agents", "account"], rows)
    else:
        print_sentence("No one is paired with a channel. Make a code with `halter channels pair telegram NAME`.")


def pair(
    channel: ChannelArgument,
    name: PersonArgument,
    *,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="viewer, approver, operator or admin.")
    ] = "approver",
    agent: Annotated[
        list[str] | None, typer.Option("--agent", metavar="AGENT", help="Only this agent. Repeatable.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a code that pairs an account of a platform with a person. It is valid once, for ten minutes.

    The first account that sends the code to the bot is paired with the person. halter.yaml configures the platform, and
    `halter serve`, `halter up` or a worker receives the code.
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
        print_sentence(f"Subscribe to the topic {code.place} in the ntfy app, and keep its name secret: it is the key.")
        print_sentence(
            f"{problem} Publish the code to {code.place}-re."
            if problem
            else "Then press Pair in the message that arrives there."
        )
        return
    print_sentence(
        f"Send this code to the bot within ten minutes, from the account that answers as {code.name} ({code.role})."
    )


async def _send_code(app: Runtime, code: PairingCode) -> str:
    """Send a code to its topic; return the problem if that failed, or an empty text."""
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
    return f"The code was not sent: halter.yaml has no {code.channel} under `channels`."


def unpair(
    channel: ChannelArgument,
    name: PersonArgument,
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a person from a channel. Their replies become invalid immediately.

    Use this after a phone was lost. Unused codes of the person become invalid, too.
    """
    result = run_with_app(store, lambda app: remove_approver(make_desk(app, store), channel, name, reason))
    if as_json:
        answer_json({"subject": result.subject, "done": True})
    else:
        print_sentence(result.sentence)


channels = group(
    "List who answers decisions by phone; pair or unpair a person.",
    {"list": list_channels, "pair": pair, "unpair": unpair},
)

"""`halter inbox`, `approve`, `deny`: what waits for a person, and what they say to it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from halter.app import App
from halter.app.desk import decisions, looking
from halter.app.desk.always import as_object_with_rules
from halter.app.desk.decisions import Answer, Said
from halter.app.desk.looking import News
from halter.app.desk.money import amount_of
from halter.app.desk.waiting import Waiting, put, waiting
from halter.app.words.moments import written
from halter.cli.answer import answer_block, answer_json, say
from halter.cli.command import (
    UNUSABLE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    desk_of,
    duration,
    fail,
    saying_errors,
    with_app,
)
from halter.core.clock import DAY
from halter.core.durations import shown_duration
from halter.core.ports import BLOB_FROM
from halter.core.text import counted

USUAL: Final = "7d"

DecisionArgument = Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")]


def inbox(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what needs you: everything that waits for a yes or a no, and what each of them does.

    Below it stands what agents told in the app in the last day.
    """

    async def job(app: App) -> tuple[Sequence[Waiting], Sequence[News], int]:
        desk, now = desk_of(app), app.clock.now()
        return await waiting(desk), await looking.told(desk, now - DAY), now

    found, news, now = with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json([as_object_with_rules(one) for one in found])
        return
    say(f"{counted(len(found), 'decision')} for you:" if found else "Nothing needs you.")
    for one in found:
        answer_block("", _facts(one, now))
    if news:
        say("Told in the last day:")
        for each in news:
            agent = "" if each.subject.startswith(each.agent) else f"{each.agent}: "
            say(f"{written(each.queued_at)} {agent}{each.subject}")


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
        fail("--edit, --always and --cap are three different answers: give one of them.", WRONG_USE)
    if not always and (match or scope or lasts):
        fail("--match, --scope and --for are the words of a rule: add --always.", WRONG_USE)
    answer = Answer(
        edit=_arguments_from(edit) if edit else None,
        always=always,
        match="\n".join(match) if match else "same",
        scope=scope or "session",
        lasts=duration(lasts or USUAL),
        cap=(saying_errors(lambda: amount_of(cap)),) if cap else None,
        reason=reason,
    )
    _tell(with_app(store, lambda app: decisions.approve(desk_of(app), decision, answer)), as_json=as_json)


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
    _tell(with_app(store, lambda app: decisions.deny(desk_of(app), decision, reason)), as_json=as_json)


def _tell(said: Said, *, as_json: bool) -> None:
    if as_json:
        answer_json({"subject": said.decision, "done": True, **({"rule": said.rule} if said.rule else {})})
    else:
        say(said.sentence)


def _facts(one: Waiting, now: int) -> list[tuple[str, str]]:
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
            f"{shown_duration(max(0, now - one.asked_at))}, for at most {shown_duration(one.expires_at - now)} more",
        ),
        ("yes", f"{words.yes}: halter approve {one.decision}{more}"),
        ("no", f"{words.no}: halter deny {one.decision}"),
    ]


def _arguments_from(file: str) -> bytes:
    """Read arguments from a file or from the standard input: a JSON object."""
    try:
        data = sys.stdin.buffer.read(BLOB_FROM + 1) if file == "-" else _content(Path(file))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        fail(f"{file!r} cannot be read: {why or error}.", UNUSABLE)
    return saying_errors(lambda: decisions.arguments(data, f" in {file!r}"))


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BLOB_FROM + 1)

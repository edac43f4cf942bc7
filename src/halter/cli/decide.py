"""`halter inbox`, `approve`, `deny`: what waits for a person, and what they say to it."""

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from halter.app import App
from halter.app.desk import decisions, looking
from halter.app.desk.always import as_object_with_rules
from halter.app.desk.decisions import Answer, Said
from halter.app.desk.looking import News
from halter.app.desk.money import amount_of
from halter.app.desk.waiting import Waiting, waiting
from halter.app.words.moments import written
from halter.cli.answer import answer_block, answer_json, say
from halter.cli.command import (
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
from halter.cli.edited import arguments_from
from halter.cli.waiting import as_facts
from halter.core.clock import DAY
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
        answer_block("", as_facts(one, now))
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
        edit=arguments_from(edit) if edit else None,
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

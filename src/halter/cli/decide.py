"""`halter inbox`, `approve`, `deny`: what waits for a person, and what they say to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import typer

from halter.app import App
from halter.app.words.moments import written
from halter.cli.always import rule_for, told
from halter.cli.answer import answer_block, answer_json, say
from halter.cli.budget import amount_of, refuse_beyond_carved, refuse_no_raise
from halter.cli.command import (
    NOT_FINE,
    WRONG_USE,
    JsonOption,
    ReasonOption,
    StoreOption,
    duration,
    fail,
    only_a_person,
    with_app,
)
from halter.cli.edited import arguments_from, refuse_secrets
from halter.cli.waiting import Waiting, as_facts, as_object, meant, waiting
from halter.core.clock import DAY
from halter.core.durations import shown_duration
from halter.core.money import Account, shown
from halter.core.ports import Query, Write
from halter.core.telling import telling_of
from halter.core.text import counted, one_line, shorten
from halter.guard import approvals

USUAL: Final = "7d"

DecisionArgument = Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a person typed after a yes. At most one of the three makes it more than a plain one."""

    edit: bytes | None = None
    always: bool = False
    match: str = "same"
    scope: str = "session"
    lasts: int = 0
    cap: tuple[int | None] | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer ready to be written, and the sentence for when it is."""

    write: Write
    sentence: str
    rule: str = ""


MOST_NEWS: Final = 20


class News(msgspec.Struct, frozen=True):
    """Something that an agent, or the runtime about it, told in the app."""

    agent: str
    queued_at: int
    body: bytes | None

    @property
    def subject(self) -> str:
        """What it is about, on one line."""
        telling = telling_of(self.body or b"{}")
        return one_line(telling.subject or shorten(telling.text, 120)) or "(erased)"


def inbox(*, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what needs you: everything that waits for a yes or a no, and what each of them does.

    Below it stands what agents told in the app in the last day.
    """

    async def job(app: App) -> tuple[Sequence[Waiting], Sequence[News], int]:
        now = app.clock.now()
        params = {"since": now - DAY, "limit": MOST_NEWS}
        return await waiting(app), await app.store.ask(Query("told_in_app", News, params)), now

    found, news, now = with_app(store, job)
    if as_json:
        answer_json([as_object(one) for one in found])
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
        str,
        typer.Option(
            "--match",
            metavar="WHAT",
            help="Which calls the rule is for: same, words:KEY=WORDS, under:KEY=FOLDER or at:KEY=HOST.",
        ),
    ] = "",
    scope: Annotated[
        str, typer.Option("--scope", metavar="SCOPE", help="Where the rule holds: session, agent or fleet.")
    ] = "",
    lasts: Annotated[str, typer.Option("--for", metavar="TIME", help="How long the rule holds; else 7d.")] = "",
    cap: Annotated[str, typer.Option("--cap", metavar="AMOUNT", help="The new cap in dollars, or none.")] = "",
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say yes: to exactly what was asked, once; to other arguments; always; or to a higher cap."""
    if sum((edit != "", always, cap != "")) > 1:
        fail("--edit, --always and --cap are three different answers: give one of them.", WRONG_USE)
    if not always and (match or scope or lasts):
        fail("--match, --scope and --for are the words of a rule: add --always.", WRONG_USE)
    answer = Answer(
        edit=arguments_from(edit) if edit else None,
        always=always,
        match=match or "same",
        scope=scope or "session",
        lasts=duration(lasts or USUAL),
        cap=(amount_of(cap),) if cap else None,
        reason=reason,
    )

    async def job(app: App) -> tuple[Waiting, Said]:
        only_a_person(app, "approve anything")
        asked = meant(await waiting(app), decision)
        said = await _yes(app, asked, answer)
        await _commit(app, asked, said.write)
        return asked, said

    _tell(*with_app(store, job), as_json=as_json)


def deny(
    decision: DecisionArgument,
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say no."""

    async def job(app: App) -> tuple[Waiting, Said]:
        only_a_person(app, "deny anything")
        asked = meant(await waiting(app), decision)
        said = Said(approvals.decide(asked, "deny", app.settings.person, app.ids.new(), reason), _no(asked))
        await _commit(app, asked, said.write)
        return asked, said

    _tell(*with_app(store, job), as_json=as_json)


async def _yes(app: App, asked: Waiting, answer: Answer) -> Said:
    """Put a yes into the words of the guard; one that does not fit the question is a sentence."""
    by, key = app.settings.person, app.ids.new()
    if answer.cap is not None or asked.about == "cap_raise":
        return await _with_more_money(app, asked, answer, key)
    if asked.about != "approval" and (answer.edit is not None or answer.always):
        fail(f"{asked.decision} is no call that waits for approval: say yes or no to it, and nothing else.", WRONG_USE)
    if answer.edit is not None:
        refuse_secrets(app, answer.edit)
        write = approvals.edit(asked, answer.edit, by, key, answer.reason)
        return Said(write, f"Approved with your arguments: {_call(asked)}.")
    if answer.always:
        rule = rule_for(asked, app.ids.new(), answer.match, answer.scope, answer.lasts)
        where = {"session": "in this session", "agent": f"of {asked.agent}", "fleet": "of every agent"}[rule.scope]
        sentence = (
            f"Approved: {_call(asked)}. From now on {asked.name} {where} needs nobody's yes {told(rule.matcher)}, for "
            f"{shown_duration(rule.expires_in)}. Take it back with: halter rules end {rule.id}"
        )
        return Said(approvals.always(asked, rule, by, key, answer.reason), sentence, rule.id)
    return Said(approvals.decide(asked, "approve", by, key, answer.reason), _plain_yes(asked))


async def _with_more_money(app: App, asked: Waiting, answer: Answer, key: str) -> Said:
    if asked.about != "cap_raise":
        fail(f"{asked.decision} is not about a cap: approve it without --cap.", WRONG_USE)
    if answer.cap is None or answer.edit is not None or answer.always:
        fail(f"{asked.subject} has come to its cap: say how high it may be, as in --cap 2.50.", WRONG_USE)
    (cap,) = answer.cap
    refuse_no_raise(asked, cap)
    await refuse_beyond_carved(app, asked.subject, cap)
    account = Account(asked.subject, "", "usd")
    write = approvals.raise_cap(asked, account, cap, app.settings.person, key, answer.reason)
    limit = "no cap" if cap is None else f"a cap of {shown(cap)}"
    return Said(write, f"{asked.subject} has {limit} now, and the session goes on.")


def _plain_yes(asked: Waiting) -> str:
    match asked.about:
        case "unknown_call":
            return f"Noted: {asked.name} was done ({asked.subject}). It is not done again."
        case "changed_tool":
            return f"{asked.name} of {asked.agent} may be used as it is now."
        case "schedule":
            return f"{asked.subject} is planned, as it was shown: look at halter schedules {asked.agent}."
        case "proposal":
            return f"Kept: {asked.name} {asked.subject}. Later sessions of {asked.agent} are told of it."
        case _:
            return f"Approved: {_call(asked)}."


def _no(asked: Waiting) -> str:
    match asked.about:
        case "unknown_call":
            return f"Noted: {asked.name} was not done ({asked.subject}). It is tried anew."
        case "changed_tool":
            return f"{asked.name} of {asked.agent} stays out of use."
        case "schedule":
            return f"Denied: {asked.subject} is not planned."
        case "proposal":
            return f"Dismissed: {asked.name} {asked.subject}."
        case "cap_raise":
            return f"Denied: {asked.subject} keeps its cap, and the session ends."
        case _:
            return f"Denied: {_call(asked)}."


def _call(asked: Waiting) -> str:
    return f"{asked.name} of {asked.agent}, session {asked.session}"


async def _commit(app: App, asked: Waiting, write: Write) -> None:
    if not (await app.store.commit(write)).events:
        fail(f"{asked.decision} was decided by somebody else, or has expired, in the meantime.", NOT_FINE)


def _tell(asked: Waiting, said: Said, *, as_json: bool) -> None:
    if as_json:
        answer_json({"subject": asked.decision, "done": True, **({"rule": said.rule} if said.rule else {})})
    else:
        say(said.sentence)

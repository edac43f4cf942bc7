"""`halter rules`: where a person said "always", and taking it back."""

from collections.abc import Sequence
from shlex import quote
from typing import Annotated

import typer

from halter.app import App
from halter.app.desk import rules as desk_rules
from halter.app.desk.always import SAME, Offered, offers, told
from halter.app.desk.waiting import decision_meant
from halter.app.words.moments import written
from halter.cli.answer import answer_block, answer_done, answer_json, say
from halter.cli.command import WRONG_USE, JsonOption, ReasonOption, StoreOption, desk_of, fail, with_app
from halter.cli.plain import PlainCommand, PlainGroup
from halter.core.durations import shown_duration
from halter.core.rows import RuleRow
from halter.guard.rules import always_of


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
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", WRONG_USE)


def _show(store: str | None, *, as_json: bool) -> None:
    async def job(app: App) -> tuple[Sequence[RuleRow], int]:
        return await desk_rules.rules(desk_of(app)), app.clock.now()

    rows, now = with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(rows)
        return
    if not rows:
        say("There are no rules: nobody said always.")
    for row in rows:
        answer_block("", _facts(row, now))


def _facts(row: RuleRow, now: int) -> list[tuple[str, str]]:
    return [
        ("rule", row.rule),
        ("always", f"{row.tool} {told(always_of(row).matcher)}"),
        ("where", _where(row)),
        ("by", f"{row.by}, {written(row.made_at)}"),
        ("until", _until(row, now)),
    ]


def _where(row: RuleRow) -> str:
    return f"{row.scope} {row.owner}".strip()


def _until(row: RuleRow, now: int) -> str:
    if row.ended_at is not None:
        return f"ended by {row.ended_by}, {written(row.ended_at)}"
    if now >= row.expires_at:
        return f"over since {written(row.expires_at)}"
    return f"{written(row.expires_at)}, {shown_duration(row.expires_at - now)} from now"


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
    answer_done(with_app(store, lambda app: desk_rules.end(desk_of(app), rule, reason)), as_json=as_json)


def offer(
    decision: Annotated[str, typer.Argument(help="A decision's id from halter inbox; its beginning will do.")],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rules that a yes to a decision could make, each in full, and how to choose it.

    They are made of the call that is shown: the narrowest comes first. Other ones can be written with --match.
    """

    async def job(app: App) -> tuple[str, Sequence[Offered]]:
        asked = await decision_meant(desk_of(app), decision)
        return asked.decision, offers(asked)

    whole, found = with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(found)
        return
    if not found:
        say(f"No rule can answer {whole}: it is always asked about.")
    for each in found:
        answer_block("", [("always", each.sentence), ("choose", _chosen(whole, each.match))])


def _chosen(decision: str, match: str) -> str:
    lines = () if match == SAME else match.splitlines()
    return " ".join([f"halter approve {decision} --always", *(f"--match {quote(line)}" for line in lines)])

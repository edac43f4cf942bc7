"""`halter rules`: where a person said "always", and taking it back."""

from collections.abc import Sequence
from typing import Annotated

import typer

from halter.app import App
from halter.app.words.moments import written
from halter.cli.always import told
from halter.cli.answer import answer_block, answer_json, say
from halter.cli.command import NOT_FINE, WRONG_USE, JsonOption, ReasonOption, StoreOption, fail, only_a_person, with_app
from halter.cli.plain import PlainCommand, PlainGroup
from halter.core.durations import shown_duration
from halter.core.ports import Query
from halter.core.rows import RuleRow
from halter.guard.approvals import end_rule
from halter.guard.rules import always_of


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(name="rules", cls=PlainGroup, invoke_without_command=True)
    group.callback()(_default)
    group.command("end", cls=PlainCommand)(end)
    return group


def _default(context: typer.Context, *, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show the rules by which somebody said "always", or end one."""
    if context.invoked_subcommand is None:
        _show(store, as_json=as_json)
    elif store is not None or as_json:
        fail(f"Write options after the word {context.invoked_subcommand}, not before it.", WRONG_USE)


def _show(store: str | None, *, as_json: bool) -> None:
    async def job(app: App) -> tuple[Sequence[RuleRow], int]:
        return await app.store.ask(Query("all_rules", RuleRow)), app.clock.now()

    rows, now = with_app(store, job)
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
    """Take an "always" back: from now on such calls are asked about again."""

    async def job(app: App) -> RuleRow:
        only_a_person(app, "end a rule")
        row = _meant(await app.store.ask(Query("all_rules", RuleRow)), rule)
        write = end_rule(row.rule, app.settings.person, app.ids.new(), reason)
        if not (await app.store.commit(write)).events:
            fail(f"The rule {row.rule} is over already.", NOT_FINE)
        return row

    row = with_app(store, job)
    if as_json:
        answer_json({"subject": row.rule, "done": True})
    else:
        say(f"The rule {row.rule} is over: {row.tool} is asked about again.")


def _meant(rows: Sequence[RuleRow], rule: str) -> RuleRow:
    found = [row for row in rows if row.rule.startswith(rule)]
    exact = [row for row in found if row.rule == rule]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        return fail(f"No rule begins with {rule!r}: look at `halter rules`.", WRONG_USE)
    return fail(f"{rule!r} could be any of {', '.join(row.rule for row in found)}.", WRONG_USE)

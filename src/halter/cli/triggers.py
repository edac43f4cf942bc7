"""`halter schedules`: what starts sessions, and a person's word about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from halter.cli.command import JsonOption, ReasonOption, StoreOption, demand_person, fail, make_desk, run_with_app
from halter.cli.commands import ListingGroup, PlainCommand
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_done, answer_json, answer_table, say
from halter.cli.talk import AGENT_FILE, open_agent_context
from halter.core.clock import format_duration
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.present.events import format_relative_moment
from halter.runtime.runtime import Runtime

if TYPE_CHECKING:
    from halter.operations.desk import Done

DIGEST_PREFIX_LENGTH: Final = 16
"""So much of a document's digest is shown, and names it."""

TriggerArgument = Annotated[str, typer.Argument(metavar="TRIGGER", help="A trigger, as in desk/nightly.")]


def build() -> typer.Typer:
    """Make the group of commands."""
    group = typer.Typer(
        name="schedules",
        cls=ListingGroup,
        help="Show what starts sessions, run it now, or end it.",
        no_args_is_help=False,
    )
    for name, command in (("list", show), ("run", run), ("cancel", cancel), ("retry", retry)):
        group.command(name, cls=PlainCommand)(command)
    return group


def show(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Only those of this agent.")] = "",
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List schedules, watches and webhooks: when they run next, what they last did, and what waits there.

    Those of a file appear when `halter up` has read it; those that you agreed to in a chat stand here alone.
    """
    from halter.operations import fleet
    from halter.operations.fleet import TriggerPlan

    async def job(app: Runtime) -> tuple[Sequence[TriggerPlan], int]:
        return await fleet.plans(make_desk(app), agent), app.clock.now()

    found, now = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(found)
        return

    def line(plan: TriggerPlan) -> list[str]:
        due = "" if plan.next_at is None else f"in {format_duration(max(0, plan.next_at - now))}"
        last = "" if plan.last_at is None else f"{format_relative_moment(plan.last_at, now)}, {plan.session}"
        return [
            plan.trigger,
            plan.when,
            due,
            last,
            _describe_waiting(plan.waiting, len(plan.quarantined), plan.delayed),
            plan.made_by,
        ]

    columns = ["trigger", "when", "next", "last run", "waits", "made by"]
    empty = "Nothing is planned. Say it to an agent, or write it into its agent.yaml."
    answer_table("Schedules", columns, [line(plan) for plan in found], long="trigger when waits", empty=empty)
    for plan in found:
        for item in plan.quarantined:
            say(
                f"{plan.trigger}: {item.name} is left to you. Let it be tried anew: "
                f"{_retry_command(plan.trigger, item.item)}"
            )


def _describe_waiting(waiting: int, quarantined: int, delayed: str) -> str:
    parts = [f"{waiting} waiting" if waiting else "", f"{quarantined} left to you" if quarantined else "", delayed]
    return ", ".join(part for part in parts if part)


def _retry_command(trigger: str, item: str) -> str:
    return f"halter schedules retry {trigger} {item[:DIGEST_PREFIX_LENGTH]}"


def run(
    trigger: TriggerArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The document of a watch, or the delivery of a webhook.")
    ] = None,
    *,
    agent: Annotated[
        Path, typer.Option("--agent", metavar="FOLDER", help="The agent's folder; the current one, or AGENT in it.")
    ] = Path(),
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trigger now, here, on the same path that its time or a document takes. Leaves with 1 if it fails.

    The agent's folder is looked for here: name it with --agent if it lies elsewhere.
    """
    name, _, own = trigger.partition("/")
    folder = next((each for each in (agent, agent / name) if (each / AGENT_FILE).is_file()), None)
    if not own:
        fail(f"{trigger!r} is no trigger: write AGENT/NAME, as halter schedules shows it.", EXIT_USAGE)
    if folder is None:
        fail(f"There is no {AGENT_FILE} in {agent}: name the folder of {name} with --agent FOLDER.", EXIT_USAGE)

    async def job(app: Runtime) -> tuple[SessionRow, bool]:
        from halter.runtime.triggers import attend_run_here, run_now

        demand_person(app, "run a trigger by hand")
        async with open_agent_context(app, folder) as speaking:
            if speaking.agent.policy.name != name:
                fail(f"{folder} is the folder of {speaking.agent.policy.name}, not of {name}.", EXIT_USAGE)
            session = await run_now(speaking, folder, own, file)
            if not as_json:
                say(f"Session {session}", at_once=True)
            here = await attend_run_here(speaking, folder, session)
            (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
            return row, here

    row, here = run_with_app(store, job, new=True, acts=True, following=True)
    if as_json:
        answer_json(row)
    elif not here:
        say("Another process has taken it up: look at halter sessions.")
    else:
        say(f"{row.state}{f', {row.terminal_reason}' if row.terminal_reason else ''}: halter receipt {row.session}")
    if row.ended_at is not None and row.state != "COMPLETED":
        raise typer.Exit(EXIT_FAILED)


def cancel(
    trigger: TriggerArgument, *, reason: ReasonOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Let a trigger start nothing any more. One that stands in an agent's file is removed there.

    What it has started goes on: `halter cancel SESSION` ends that.
    """

    async def job(app: Runtime) -> "Done":
        from halter.operations import fleet

        return await fleet.end(make_desk(app), trigger, reason)

    answer_done(run_with_app(store, job), as_json=as_json)


def retry(
    trigger: TriggerArgument,
    item: Annotated[
        str, typer.Argument(metavar="ITEM", help="A document, by its name or the beginning of its digest.")
    ],
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a document be tried anew that was left to you.

    A document is left to you when it cannot be read, or was tried too often. Its name, or the beginning of its
    digest, will do.
    """

    async def job(app: Runtime) -> "Done":
        from halter.operations import fleet

        return await fleet.retry(make_desk(app), trigger, item)

    answer_done(run_with_app(store, job), as_json=as_json)

"""`halter schedules`: the triggers that start sessions."""

from pathlib import Path
from typing import Annotated, Final

import typer

from halter.cli.command import JsonOption, StoreOption, Typed, command, fail, group, require_person, run_with_app
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence
from halter.cli.talk import AGENT_FILE, open_agent_context
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.operations import fleet
from halter.present.tables import build_triggers_sheet
from halter.runtime.runtime import Runtime

_TRIGGER: Final = typer.Argument(metavar="TRIGGER", help="A trigger, as in desk/nightly.")


def _split(trigger: str) -> dict[str, str]:
    agent, _, name = trigger.partition("/")
    return {"agent": agent, "name": name}


_TYPED: Final = {"trigger": Typed(("agent", "name"), Annotated[str, _TRIGGER], _split)}


def run(
    trigger: Annotated[str, _TRIGGER],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The document of a watch, or the delivery of a webhook.")
    ] = None,
    *,
    agent: Annotated[
        Path,
        typer.Option(
            "--agent", metavar="FOLDER", help="The agent's folder (default: the current one, or AGENT in it)."
        ),
    ] = Path(),
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trigger now, on the same path as its schedule or a document. Exits 1 if it fails.

    The agent's folder is looked for in the current one: name it with --agent if it is elsewhere.
    """
    name, _, own = trigger.partition("/")
    folder = next((each for each in (agent, agent / name) if (each / AGENT_FILE).is_file()), None)
    if not own:
        fail(f"{trigger!r} is no trigger: write AGENT/NAME, as halter schedules shows it.", EXIT_USAGE)
    if folder is None:
        fail(f"There is no {AGENT_FILE} in {agent}: name the folder of {name} with --agent FOLDER.", EXIT_USAGE)

    async def job(app: Runtime) -> tuple[SessionRow, bool]:
        from halter.runtime.triggers import attend_run_here, run_now

        require_person(app, "run a trigger by hand")
        async with open_agent_context(app, folder) as context:
            if context.agent.policy.name != name:
                fail(f"{folder} is the folder of {context.agent.policy.name}, not of {name}.", EXIT_USAGE)
            session = await run_now(context, folder, own, file)
            if not as_json:
                print_sentence(f"Session {session}", at_once=True)
            here = await attend_run_here(context, folder, session)
            (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
            return row, here

    row, here = run_with_app(store, job, new=True, acts=True, following=True)
    if as_json:
        answer_json(row)
    elif not here:
        print_sentence("Another process has taken it up: look at halter sessions.")
    else:
        print_sentence(
            f"{row.state}{f', {row.terminal_reason}' if row.terminal_reason else ''}: halter receipt {row.session}"
        )
    if row.ended_at is not None and row.state != "COMPLETED":
        raise typer.Exit(EXIT_FAILED)


schedules = group(
    "Show what starts sessions, run it now, or end it.",
    {
        "list": command(
            fleet.plans,
            """List schedules, watches and webhooks: their next and last run, and what waits.

            Those in a file appear when `halter up` has read it; those that you agreed to in a chat are only here.
            """,
            build_triggers_sheet,
            look=True,
            fresh=True,
        ),
        "run": run,
        "cancel": command(
            fleet.end_trigger,
            """End a trigger: it starts nothing more. Remove one that is in an agent's file there instead.

            Sessions that it started continue: `halter cancel SESSION` ends one.
            """,
            typed=_TYPED,
        ),
        "retry": command(
            fleet.retry_item,
            """Try a quarantined document again.

            A document is quarantined when it cannot be read, or failed too often. Give its name, or the beginning of
            its digest.
            """,
            typed=_TYPED,
        ),
    },
)

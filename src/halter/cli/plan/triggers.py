"""`halter triggers`: the triggers that start sessions."""

from pathlib import Path
from typing import Annotated, Final

import typer

from halter.cli.command import JsonOption, StoreOption, Typed, command, fail, group, require_person, run_with_app
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence
from halter.config.agent_files import AGENT_FILE
from halter.core.rows import SessionRow
from halter.operations import fleet
from halter.present.tables import build_triggers_sheet
from halter.runtime.runtime import Runtime

_TRIGGER_ARGUMENT: Final = typer.Argument(metavar="TRIGGER", help="Trigger, such as desk/nightly.")


def _split(trigger: str) -> dict[str, str]:
    agent, _, name = trigger.partition("/")
    return {"agent": agent, "name": name}


_TRIGGER_PARAMETERS: Final = {"trigger": Typed(("agent", "name"), Annotated[str, _TRIGGER_ARGUMENT], _split)}


def run(
    trigger: Annotated[str, _TRIGGER_ARGUMENT],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Document of a watch, or delivery of a webhook.")
    ] = None,
    *,
    agent: Annotated[
        Path,
        typer.Option("--agent", metavar="FOLDER", help="Agent folder (default: the current one, or AGENT in it)."),
    ] = Path(),
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trigger now, exactly as if it had fired. Exits 1 if the run fails.

    The agent folder is searched in the current folder. Pass --agent if it is elsewhere.
    """
    name, _, trigger_name = trigger.partition("/")
    folder = next((each for each in (agent, agent / name) if (each / AGENT_FILE).is_file()), None)
    if not trigger_name:
        fail(f"Invalid trigger {trigger!r}. Use AGENT/NAME, as halter triggers shows it.", EXIT_USAGE)
    if folder is None:
        fail(f"No {AGENT_FILE} found in {agent}. Pass the folder of {name} with --agent FOLDER.", EXIT_USAGE)

    async def job(app: Runtime) -> tuple[SessionRow, bool]:
        from halter.cli.plan.trigger_run import run_trigger

        require_person(app, "run a trigger manually")
        return await run_trigger(app, folder, name, trigger_name, file, quiet=as_json)

    row, ran_here = run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True)
    if as_json:
        answer_json(row)
    elif not ran_here:
        print_sentence("Another process runs this session. See `halter sessions`.")
    else:
        outcome = f"{row.state}{f', {row.terminal_reason}' if row.terminal_reason else ''}"
        print_sentence(f"{outcome}: halter show {row.session} --receipt")
    if row.ended_at is not None and row.state != "COMPLETED":
        raise typer.Exit(EXIT_FAILED)


triggers = group(
    "List triggers; run or end one.",
    {
        "list": command(
            fleet.plans,
            """List schedules, watches and webhooks with their next and last run, and what waits.

            Triggers of an agent.yaml appear when `halter up` has read it; triggers that you approved in a chat are only
            here.
            """,
            build_triggers_sheet,
            despite_doubt=True,
            allow_missing=True,
        ),
        "run": run,
        "cancel": command(
            fleet.end_trigger,
            """End a trigger. It starts no more sessions. Remove a trigger of an agent.yaml there instead.

            Sessions that it started continue; `halter cancel SESSION` ends one.
            """,
            replacements=_TRIGGER_PARAMETERS,
        ),
        "retry": command(
            fleet.retry_item,
            """Retry a quarantined document.

            A document is quarantined when it cannot be read, or failed too often. Pass its name or a prefix of its
            digest.
            """,
            replacements=_TRIGGER_PARAMETERS,
        ),
    },
)

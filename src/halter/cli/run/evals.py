"""`halter eval`: run an agent's cases."""

from pathlib import Path
from typing import Annotated, Any

import typer

from halter.cli.command import (
    JsonOption,
    SessionArgument,
    StoreOption,
    find_session_by_prefix,
    read_cli_settings,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.commands import EvalGroup, PlainCommand
from halter.cli.exit_codes import EXIT_FAILED
from halter.cli.output import answer_json, print_sentence
from halter.config.trust import CASES_FILE
from halter.core.events import DecisionAsked
from halter.core.ids import session_stream
from halter.core.ports import read_stream
from halter.runtime.runtime import Runtime
from halter.runtime.session_start import read_fork
from halter.testing.evals import add_case, build_eval_sheet, evaluate, make_case

EvalFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Agent folder.")]


def run_cases(
    folder: EvalFolder,
    *,
    cases: Annotated[
        Path | None, typer.Option("--cases", metavar="FILE", help="Cases file (default: evals.yaml in the folder).")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Run the cases with this model instead of the agent's.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Run an agent's eval cases, several at a time, under one cap, and compare with the last run.

    Each run has its own store, which is printed at the end. A case in which the agent waits for a person fails. Exits 1
    if a case fails.
    """
    settings = report_errors(lambda: read_cli_settings(None))
    run = report_errors(lambda: evaluate(folder, settings, cases=cases, model=model))
    if as_json:
        answer_json(run)
    else:
        show_sheet(build_eval_sheet(run))
    if run.passed < len(run.cases):
        raise typer.Exit(EXIT_FAILED)


def add_recorded_case(
    session: SessionArgument,
    folder: EvalFolder,
    *,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of the case (default: the session id).")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a case from a recorded session: its first message, the tools that it called, and its answer.

    If a person was asked to approve a call, the case expects that question instead of the answer. The case is added to
    evals.yaml in the agent's folder; edit its expectations there.
    """

    async def job(app: Runtime) -> dict[str, Any]:
        row = await find_session_by_prefix(app, session)
        fork = await read_fork(app.store, row)
        events = [stored.event for stored in await read_stream(app.store, session_stream(row.session))]
        questions = [event for event in events if isinstance(event, DecisionAsked) and event.about == "approval"]
        asked_tool = questions[0].name if questions else ""
        return make_case(name or row.session, fork.messages, finished=row.state == "COMPLETED", asked_tool=asked_tool)

    case, path = run_with_app(store, job), folder / CASES_FILE
    report_errors(lambda: add_case(path, case))
    if as_json:
        answer_json({"file": str(path), "case": case})
    else:
        print_sentence(f"Added case {case['name']!r} to {path}. Edit its expectations there.")


evals = typer.Typer(cls=EvalGroup, help="Run an agent's eval cases under one cap; compare with the last run.")
evals.command("run", cls=PlainCommand)(run_cases)
evals.command("add", cls=PlainCommand)(add_recorded_case)

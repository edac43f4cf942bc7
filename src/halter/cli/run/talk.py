"""`halter run` and `chat`: give an agent a task, or talk with it."""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from halter.cli.command import (
    AgentArgument,
    JsonOption,
    StoreOption,
    fail,
    format_store_option,
    resolve_agent_folder,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.runtime.runtime import Runtime

NoRouteOption = Annotated[bool, typer.Option("--no-route", help="Send every message to the model, without routing.")]
FileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--file",
        metavar="PATH",
        help="Picture, PDF, document, sound or text. PATH#pages=9 or PATH#seconds=90 limits it. Repeatable.",
    ),
]
ResumeOption = Annotated[str, typer.Option("--resume", metavar="SESSION", help="Resume a session.")]


def run(
    agent: AgentArgument,
    message: Annotated[str, typer.Argument(metavar="MESSAGE", help="The task; - reads stdin.")] = "",
    *,
    file: FileOption = None,
    resume: ResumeOption = "",
    no_route: NoRouteOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give an agent a task and wait for the result. The run survives a crash, and continues with --resume.

    The answer is printed to stdout, progress to stderr. A message that needs no model is answered without one: halter
    route shows how a message is routed. Exits 1 if the run failed.
    """
    text = sys.stdin.read() if message == "-" else message
    if not text.strip() and not resume:
        fail('No task. Pass one, as in halter run FOLDER "message".', EXIT_USAGE)
    if file and not text.strip():
        fail("--file needs a message. Say what the files are for.", EXIT_USAGE)
    from halter.cli.run.conversation import print_run_result, run_task

    async def job(app: Runtime) -> Any:
        folder = resolve_agent_folder(agent)
        return await run_task(app, folder, text, file or (), resume, resume_hint, routes=not no_route, quiet=as_json)

    resume_hint = f"Continue with: halter run {quote(str(agent))}{format_store_option(store)} --resume"
    restart_hint = f"{resume_hint} SESSION (see halter sessions)."
    result = run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=restart_hint)
    print_run_result(result, agent, as_json=as_json)
    if not result.ok:
        raise typer.Exit(EXIT_FAILED)


def chat(
    agent: AgentArgument,
    *,
    resume: ResumeOption = "",
    no_route: NoRouteOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Chat with an agent in the terminal. Calls and their cost are shown, and you are asked for decisions.

    A message that needs no model is answered without one. Ctrl-C stops the answer; at the prompt or a second time, it
    ends the chat. Ctrl-D or /quit leaves; --resume continues later.
    """
    folder = resolve_agent_folder(agent)

    async def job(app: Runtime) -> None:
        from halter.cli.run.chat_loop import chat_by_line

        await chat_by_line(app, folder, resume, resume_hint, routes=not no_route, as_json=as_json)

    resume_hint = f"Continue with: halter chat {quote(str(folder))}{format_store_option(store)} --resume"
    restart_hint = f"{resume_hint} SESSION (see halter sessions)."
    run_with_app(store, job, new=True, runs_agents=True, until_interrupted=True, runs=restart_hint)

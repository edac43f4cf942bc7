"""`halter play`: run a playbook."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Final

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    find_session_by_prefix,
    format_store_option,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence, warn
from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.playbook_files import read_playbook
from halter.config.resolve import resolve_policy
from halter.core.ids import SessionId, session_stream
from halter.core.money import format_compared_micros, format_usd
from halter.core.text import clean, shorten
from halter.core.vocabulary import State
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.ledger import read_budget
from halter.runtime.assembly.folder_agent import open_folder_agent
from halter.runtime.runtime import Runtime
from halter.runtime.session_start import begin_playbook, resume_playbook
from halter.runtime.telemetry.tracer import trace_process
from halter.spec.playbook import Playbook, Step
from halter.tasks.playbooks import PlaybookOutcome

MAX_STEP_TEXT: Final = 100

AgentOption = Annotated[
    Path | None,
    typer.Option("--agent", metavar="FOLDER", help="Agent folder (default: the playbook's own)."),
]


def play(
    playbook: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML list of calls.")],
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=VALUE", help="Value of an input that the playbook declares."),
    ] = None,
    agent: AgentOption = None,
    resume: Annotated[str, typer.Option("--resume", metavar="SESSION", help="Resume a session that stopped.")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a playbook through the guard, call by call. It waits for a person's decisions, and survives a crash.

    A playbook is a list of calls in YAML. No model is called, except by a step that needs one, such as run_skill. The
    cap of the session is printed first. Exits 1 if a step was refused or failed.
    """
    input_values = _parse_inputs(inputs or [])
    folder = agent or _find_agent_folder(playbook)

    async def job(app: Runtime) -> tuple[SessionId, PlaybookOutcome]:
        resumed_session = await _find_play_session(app, resume) if resume else SessionId("")
        steps = None if resumed_session else read_playbook(playbook)
        if not as_json:
            own_cap = resolve_policy(app.fleet, read_agent(folder)).caps.session.max_cost_usd
            print_sentence(await _describe_cap(app, own_cap, steps, resumed_session), at_once=True)
        async with trace_process(app, warn), open_folder_agent(app, folder, report=warn) as assembled_agent:
            for sentence in assembled_agent.unavailable_tools:
                warn(sentence)
            session = resumed_session if steps is None else await begin_playbook(assembled_agent, steps, input_values)
            if not as_json:
                print_sentence(f"Session {session}", at_once=True)
            try:
                return session, await resume_playbook(
                    assembled_agent, session, _ignore_step if as_json else show_step, _announce_wait
                )
            except asyncio.CancelledError:
                warn(f"{resume_hint} {session}")
                raise

    options = (f" --agent {quote(str(agent))}" if agent else "") + format_store_option(store)
    resume_hint = f"Continue with: halter play {quote(str(playbook))}{options} --resume"
    restart_hint = f"{resume_hint} SESSION (see halter sessions)."
    session, outcome = run_with_app(store, job, new=True, runs_agents=True, runs=restart_hint)
    if as_json:
        answer_json({"session": session, "state": outcome.state, "terminal_reason": outcome.terminal_reason})
    else:
        print_sentence(f"{outcome.state}: {outcome.terminal_reason}. {outcome.sentence}".strip())
        print_sentence(f"Receipt: halter show {session} --receipt")
    if outcome.state != "COMPLETED":
        raise typer.Exit(EXIT_FAILED)


async def _describe_cap(app: Runtime, configured_cap: int | None, playbook: Playbook | None, session: SessionId) -> str:
    """Describe the cap of the session. A resumed session has the rest of its cap."""
    if session:
        row = await read_budget(app.store, session_stream(session))
        cap, spent_micros = (row.cap if row.cap_by or row.cap is not None else configured_cap), row.spent
    else:
        caps = [each for each in (configured_cap, playbook and playbook.max_cost_usd) if each is not None]
        cap, spent_micros = min(caps, default=None), 0
    if cap is None:
        return "The session has no cap of its own; the caps of its agent and of the fleet apply."
    cap_text, spent = format_compared_micros(cap, spent_micros)
    spent_text = f", of which {spent} is spent" if spent_micros else ""
    return f"The session may spend at most {cap_text}{spent_text}."


async def _find_play_session(app: Runtime, prefix: str) -> SessionId:
    row = await find_session_by_prefix(app, prefix)
    if row.ended_at is not None:
        fail(f"Session {row.session} has already ended ({row.state}: {row.terminal_reason}).", EXIT_FAILED)
    return SessionId(row.session)


def _find_agent_folder(playbook: Path) -> Path:
    for folder in (playbook.parent, playbook.parent.parent):
        if (folder / AGENT_FILE).is_file():
            return folder
    return fail(f"No {AGENT_FILE} found for {playbook}. Pass --agent FOLDER.", EXIT_USAGE)


def _parse_inputs(inputs: Sequence[str]) -> dict[str, str]:
    value_by_name: dict[str, str] = {}
    for text in inputs:
        name, equals, value = text.partition("=")
        if not equals or not name:
            fail(f"Invalid input {text!r}. Use NAME=VALUE.", EXIT_USAGE)
        value_by_name[name] = value
    return value_by_name


def show_step(step: Step, answer: Answer) -> None:
    cost = f" {format_usd(answer.cost_usd)}" if answer.cost_usd else ""
    first_line = shorten(clean(answer.text).strip().partition("\n")[0], MAX_STEP_TEXT)
    print_sentence(
        f"  {answer.outcome:<8} {step.call}{f' as {step.name}' if step.name else ''}{cost}  {first_line}", at_once=True
    )


def _announce_wait(approval: ApprovalRequired, state: State) -> None:
    awaited, cap_option = ("a budget", " --cap AMOUNT") if state == "WAITING_FOR_BUDGET" else ("approval", "")
    warn(f"  waits    for {awaited}. Review it with halter inbox, then: halter approve {approval.decision}{cap_option}")


def _ignore_step(_: Step, __: Answer) -> None:
    """Print no step: with --json, the result is printed at the end."""

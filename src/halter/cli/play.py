"""`halter play`, `eval` and `trust`: run a playbook through the guard, run eval cases, trust an agent's code."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final

import typer

from halter.cli.command import (
    JsonOption,
    SessionArgument,
    StoreOption,
    fail,
    find_session_by_prefix,
    format_store_option,
    read_cli_settings,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.commands import EvalGroup, PlainCommand
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence, warn
from halter.core.errors import ConfigError
from halter.core.ids import SessionId, can_decide, session_stream
from halter.core.money import format_compared_micros, format_usd
from halter.core.text import clean, shorten
from halter.core.vocabulary import State
from halter.guard.call_answer import Answer, ApprovalRequired
from halter.guard.ledger import read_budget
from halter.runtime.runtime import Runtime
from halter.spec.playbook import Playbook, Step
from halter.tasks.playbooks import PlaybookOutcome

AGENT_FILE: Final = "agent.yaml"
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
        from halter.config.agent_files import read_agent
        from halter.config.playbook_files import read_playbook
        from halter.config.resolve import resolve_policy
        from halter.runtime.assembly.assembled_agent import assemble_agent
        from halter.runtime.session_start import begin_playbook, resume_playbook
        from halter.runtime.telemetry.tracer import trace_process

        resumed_session = await _find_play_session(app, resume) if resume else SessionId("")
        steps = None if resumed_session else read_playbook(playbook)
        if not as_json:
            own_cap = resolve_policy(app.fleet, read_agent(folder)).caps.session.max_cost_usd
            print_sentence(await _describe_cap(app, own_cap, steps, resumed_session), at_once=True)
        async with trace_process(app, warn), assemble_agent(app, folder, report=warn) as assembled_agent:
            for sentence in assembled_agent.unavailable_tools:
                warn(sentence)
            session = (
                resumed_session if steps is None else await begin_playbook(app, assembled_agent, steps, input_values)
            )
            if not as_json:
                print_sentence(f"Session {session}", at_once=True)
            try:
                return session, await resume_playbook(
                    app, assembled_agent, session, _ignore_step if as_json else show_step, _announce_wait
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


def trust(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Agent folder.")], *, as_json: JsonOption = False
) -> None:
    """Trust the current code of an agent folder. Changed code must be trusted again.

    The code is tools.py and the servers in .mcp.json: review both first. It runs with your rights. tools.py is loaded
    once; if that fails, or a tool has no docstring or types, the folder is not trusted.
    """
    settings = read_cli_settings(None)

    def job() -> tuple[str, str]:
        from halter.config.trust import digest_contents
        from halter.core.clock import SystemClock
        from halter.runtime.assembly.folder_code import find_agent_code, open_trust, require_sound_code

        if not can_decide(settings.person):
            raise ConfigError("Only a person can trust code; this command runs inside an agent.")
        contents, trust_store = find_agent_code(settings, folder).contents(), open_trust(settings)
        digest, changes = digest_contents(contents), trust_store.describe_change(folder, contents)
        require_sound_code(folder, contents)
        trust_store.trust(folder, digest, settings.person, SystemClock().now(), contents)
        return digest, changes

    digest, changes = report_errors(job)
    if as_json:
        answer_json({"folder": str(folder), "digest": digest, "by": settings.person, "since": changes})
        return
    print_sentence(f"Trusted the current code of {folder} ({digest[:16]}…).")
    if changes:
        print_sentence(f"Changes since it was last trusted: {changes}.")


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
    from halter.testing.evals import build_eval_sheet, evaluate

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
    from halter.config.trust import CASES_FILE
    from halter.testing.evals import add_case, make_case

    async def job(app: Runtime) -> dict[str, Any]:
        from halter.core.events import DecisionAsked
        from halter.core.ports import read_stream
        from halter.runtime.session_start import read_fork

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

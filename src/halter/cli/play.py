"""`halter play`, `eval` and `trust`: a playbook through the guard, cases for an agent, and the code that may run."""

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
    read_cli_settings,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.commands import EvalGroup, PlainCommand
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence, warn
from halter.core.agent_spec import Playbook, Step
from halter.core.errors import ConfigError
from halter.core.ids import SessionId, may_decide, session_stream
from halter.core.money import format_micros, format_usd
from halter.core.text import clean, shorten
from halter.core.vocabulary import State
from halter.guard.ledger import read_budget
from halter.guard.tool_door import Answer, ApprovalRequired
from halter.runtime.runtime import Runtime
from halter.tasks.playbooks import PlaybookOutcome

AGENT_FILE: Final = "agent.yaml"
MAX_STEP_TEXT: Final = 100

AgentOption = Annotated[
    Path | None,
    typer.Option("--agent", metavar="FOLDER", help="The agent whose tools it uses (default: the one beside it)."),
]


def play(
    playbook: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML list of calls.")],
    *,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=VALUE", help="An input that the playbook refers to.")
    ] = None,
    agent: AgentOption = None,
    resume: Annotated[str, typer.Option("--resume", metavar="SESSION", help="Continue a session that stopped.")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a playbook through the guard, call by call. It waits where a person has to decide, and survives a crash.

    A playbook is a list of calls in YAML. A model is asked only by a step that asks one, as run_skill does. What
    the session may spend is said first. Exits 1 if a step was refused or failed.
    """
    given = _parse_inputs(inputs or [])
    folder = agent or _find_agent_folder(playbook)

    async def job(app: Runtime) -> tuple[SessionId, PlaybookOutcome]:
        from halter.config.agent_files import read_agent, read_playbook
        from halter.config.resolve import resolve_policy
        from halter.runtime.assemble import assemble_agent
        from halter.runtime.sessions import begin_playbook, resume_playbook
        from halter.runtime.telemetry import trace_process

        begun = await _find_play_session(app, resume) if resume else SessionId("")
        steps = None if begun else read_playbook(playbook)
        if not as_json:
            own = resolve_policy(app.fleet, read_agent(folder)).caps.session.max_cost_usd
            print_sentence(await _describe_cap(app, own, steps, begun), at_once=True)
        async with trace_process(app, warn), assemble_agent(app, folder, report=warn) as ready:
            for sentence in ready.left_out:
                warn(sentence)
            session = begun if steps is None else await begin_playbook(app, ready, steps, given)
            if not as_json:
                print_sentence(f"Session {session}", at_once=True)
            try:
                return session, await resume_playbook(
                    app, ready, session, _ignore_step if as_json else show_step, _announce_wait
                )
            except asyncio.CancelledError:
                warn(f"Continue it with: halter play {playbook} --resume {session}")
                raise

    again = f"Continue with: halter play {quote(str(playbook))} --resume SESSION (halter sessions names it)."
    session, ended = run_with_app(store, job, new=True, acts=True, runs=again)
    if as_json:
        answer_json({"session": session, "state": ended.state, "terminal_reason": ended.terminal_reason})
    else:
        print_sentence(f"{ended.state}: {ended.terminal_reason}. {ended.sentence}".strip())
        print_sentence(f"Its receipt: halter receipt {session}")
    if ended.state != "COMPLETED":
        raise typer.Exit(EXIT_FAILED)


async def _describe_cap(app: Runtime, own: int | None, playbook: Playbook | None, session: SessionId) -> str:
    """Say what the whole session may spend; one that goes on has what is left of its cap."""
    if session:
        row = await read_budget(app.store, session_stream(session))
        cap, spent = (row.cap if row.cap_by or row.cap is not None else own), row.spent
    else:
        caps = [each for each in (own, playbook and playbook.max_cost_usd) if each is not None]
        cap, spent = min(caps, default=None), 0
    if cap is None:
        return "It has no cap of its own; those of its agent and of the fleet count."
    return f"It may spend at most {format_micros(cap)}{f', of which {format_micros(spent)} is spent' if spent else ''}."


async def _find_play_session(app: Runtime, beginning: str) -> SessionId:
    row = await find_session_by_prefix(app, beginning)
    if row.ended_at is not None:
        fail(f"Session {row.session} is over already: {row.state}, {row.terminal_reason}.", EXIT_FAILED)
    return SessionId(row.session)


def trust(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An agent's folder.")], *, as_json: JsonOption = False
) -> None:
    """Let the code of an agent's folder run, as it is now. After a change, it has to be trusted again.

    Code is its tools.py, and the servers in its .mcp.json: review both first. It runs with your rights.
    """
    settings = read_cli_settings(None)

    def job() -> tuple[str, str]:
        from halter.config.trust import digest_contents
        from halter.core.clock import SystemClock
        from halter.runtime.assemble import find_agent_code, open_trust

        if not may_decide(settings.person):
            raise ConfigError("Only a person can trust code, and this was started by an agent.")
        contents, trust = find_agent_code(settings, folder).contents(), open_trust(settings)
        digest, since = digest_contents(contents), trust.describe_change(folder, contents)
        trust.trust(folder, digest, settings.person, SystemClock().now(), contents)
        return digest, since

    digest, since = report_errors(job)
    if as_json:
        answer_json({"folder": str(folder), "digest": digest, "by": settings.person, "since": since})
        return
    print_sentence(f"{folder} is trusted as it is now ({digest[:16]}…).")
    if since:
        print_sentence(f"Since it was trusted last: {since}.")


def _find_agent_folder(playbook: Path) -> Path:
    for folder in (playbook.parent, playbook.parent.parent):
        if (folder / AGENT_FILE).is_file():
            return folder
    return fail(f"There is no {AGENT_FILE} beside {playbook} or above: name the agent with --agent FOLDER.", EXIT_USAGE)


def _parse_inputs(inputs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in inputs:
        name, equals, value = text.partition("=")
        if not equals or not name:
            fail(f"{text!r} is no input: write NAME=VALUE.", EXIT_USAGE)
        found[name] = value
    return found


def show_step(step: Step, answer: Answer) -> None:
    cost = f" {format_usd(answer.cost_usd)}" if answer.cost_usd else ""
    first = shorten(clean(answer.text).strip().partition("\n")[0], MAX_STEP_TEXT)
    print_sentence(
        f"  {answer.outcome:<8} {step.call}{f' as {step.name}' if step.name else ''}{cost}  {first}", at_once=True
    )


def _announce_wait(approval: ApprovalRequired, state: State) -> None:
    more = " --cap AMOUNT" if state == "WAITING_FOR_BUDGET" else ""
    warn(f"  waits    for you. Look at it with halter inbox, then: halter approve {approval.decision}{more}")


def _ignore_step(_: Step, __: Answer) -> None:
    """A program reads the answer at the end."""


EvalFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder.")]


def run_cases(
    folder: EvalFolder,
    *,
    cases: Annotated[
        Path | None, typer.Option("--cases", metavar="FILE", help="The cases (default: evals.yaml in the folder).")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Run the cases with this model instead of the agent's.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Run an agent's cases, some at a time, under one cap, and compare with the last run.

    Each run has a store of its own, which is named at the end. A case in which the agent waits for a person fails.
    Exits 1 if a case fails.
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
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Its name (default: the session's id).")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a case of a recorded session: its first words, the tools that it called, and its answer.

    It is added to evals.yaml in the agent's folder; edit there what is expected.
    """
    from halter.testing.evals import CASES_FILE, add_case, make_case

    async def job(app: Runtime) -> dict[str, Any]:
        from halter.runtime.sessions import read_fork

        row = await find_session_by_prefix(app, session)
        fork = await read_fork(app.store, row)
        return make_case(name or row.session, fork.messages, finished=row.state == "COMPLETED")

    case, path = run_with_app(store, job), folder / CASES_FILE
    report_errors(lambda: add_case(path, case))
    if as_json:
        answer_json({"file": str(path), "case": case})
    else:
        print_sentence(f"{path} has a case {case['name']!r} now: edit there what is expected of it.")


evals = typer.Typer(cls=EvalGroup, help="Run an agent's cases under one cap; compare with the last run.")
evals.command("run", cls=PlainCommand)(run_cases)
evals.command("add", cls=PlainCommand)(add_recorded_case)

"""`halter play` and `trust`: a playbook through the guard, and the code that may run for it."""

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
    read_cli_settings,
    report_errors,
    run_with_app,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, say, warn
from halter.core.agent_spec import Playbook, Step
from halter.core.errors import ConfigError
from halter.core.ids import SessionId, may_decide, session_stream
from halter.core.money import format_micros, format_usd
from halter.core.text import clean, shorten
from halter.core.vocabulary import State
from halter.guard.ledger import read_budget
from halter.guard.tool_door import Answer, NeedsPerson
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
            say(await _describe_cap(app, own, steps, begun), at_once=True)
        async with trace_process(app, warn), assemble_agent(app, folder, tell=warn) as ready:
            for sentence in ready.left_out:
                warn(sentence)
            session = begun if steps is None else await begin_playbook(app, ready, steps, given)
            if not as_json:
                say(f"Session {session}", at_once=True)
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
        say(f"{ended.state}: {ended.terminal_reason}. {ended.sentence}".strip())
        say(f"Its receipt: halter receipt {session}")
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
        digest, since = digest_contents(contents), trust.changed(folder, contents)
        trust.trust(folder, digest, settings.person, SystemClock().now(), contents)
        return digest, since

    digest, since = report_errors(job)
    if as_json:
        answer_json({"folder": str(folder), "digest": digest, "by": settings.person, "since": since})
        return
    say(f"{folder} is trusted as it is now ({digest[:16]}…).")
    if since:
        say(f"Since it was trusted last: {since}.")


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
    say(f"  {answer.outcome:<8} {step.call}{f' as {step.name}' if step.name else ''}{cost}  {first}", at_once=True)


def _announce_wait(asked: NeedsPerson, state: State) -> None:
    more = " --cap AMOUNT" if state == "WAITING_FOR_BUDGET" else ""
    warn(f"  waits    for you. Look at it with halter inbox, then: halter approve {asked.decision}{more}")


def _ignore_step(_: Step, __: Answer) -> None:
    """A program reads the answer at the end."""

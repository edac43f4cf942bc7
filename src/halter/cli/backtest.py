"""`halter policy backtest`, `suggest` and `diff`: try a policy on the past before it is applied."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from halter.cli.command import (
    JsonOption,
    StoreOption,
    fail,
    make_desk,
    parse_typed_duration,
    report_errors,
    run_with_app,
    show_sheet,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence
from halter.config.agent_files import AGENT_FILE, read_agent
from halter.config.merge import read_fleet
from halter.config.policy import merge_with_policy
from halter.core.clock import SystemClock
from halter.operations.agents import AgentFolders
from halter.operations.backtest import BacktestResult, backtest_policy, suggest_policy
from halter.operations.desk import Actor
from halter.present.backtest import build_backtest_sheet, build_policy_diff_sheet, count
from halter.runtime.runtime import DEFAULT_FLEET, Runtime

AgentOption = Annotated[str, typer.Option("--agent", "-a", metavar="AGENT", help="An agent's name, or its folder.")]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="AGE", help="Only sessions begun since, as in 30d (default: all).")
]
Failing = Literal["loosened", "changed"]
FAILS_ON: Final[Mapping[Failing, str]] = {"loosened": "loosened", "changed": "changed"}


def backtest(
    *,
    agent: AgentOption,
    since: SinceOption = "",
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="The agent.yaml or halter.yaml to test.")
    ] = None,
    cap: Annotated[
        str, typer.Option("--cap", metavar="USD", help="Test the recorded policy with this cap of a session.")
    ] = "",
    against: Annotated[
        str, typer.Option("--against", metavar="REVISION", help="Test an earlier policy of the agent, by its digest.")
    ] = "",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="WHAT", help="Exit 1 if anything was loosened, or changed.")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge an agent's recorded calls and requests again under another policy. Nothing acts.

    Given a folder and nothing else, the files in it are tested as they are now. What the policy would loosen comes
    first, then what it would refuse or ask about, and what it would not have spent.
    """
    if fail_on and fail_on not in FAILS_ON:
        fail(f"--fail-on takes {' or '.join(FAILS_ON)}, not {fail_on!r}.", EXIT_USAGE)
    text = "" if policy is None else report_errors(lambda: _read_text(policy), EXIT_USAGE)

    async def job(app: Runtime) -> BacktestResult:
        actor, name = _make_agent_desk(app, agent)
        begun = _parse_since(app, since)
        return await backtest_policy(actor, name, since=begun, policy=text, cap=cap, against=against)

    found = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(found)
    else:
        show_sheet(build_backtest_sheet(found))
    if (fail_on == "loosened" and found.loosened) or (fail_on == "changed" and found.differing):
        raise typer.Exit(EXIT_FAILED)


def suggest(
    *, agent: AgentOption, since: SinceOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Suggest the tightest policy that would have let pass everything that an agent's recorded sessions did.

    It prints keys for the agent.yaml, and tries them on the same sessions.
    """

    async def job(app: Runtime) -> Any:
        actor, name = _make_agent_desk(app, agent)
        return await suggest_policy(actor, name, since=_parse_since(app, since))

    found = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(found)
        return
    print_sentence(found.text.rstrip())
    tried = f"{count(found.sessions, 'session')} with {count(found.decisions, 'decision')}"
    print_sentence(f"Tried on {tried}: {found.refused} would have been refused.")


def diff(
    before: Annotated[Path, typer.Argument(metavar="FILE", help="A halter.yaml.")],
    after: Annotated[Path, typer.Argument(metavar="OTHER", help="Another one.")],
    *,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="WHAT", help="Exit 1 if anything was loosened, or changed.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show in which keys one halter.yaml is looser or stricter than another.

    Looser keys come first. No store is opened.
    """
    if fail_on and fail_on not in FAILS_ON:
        fail(f"--fail-on takes {' or '.join(FAILS_ON)}, not {fail_on!r}.", EXIT_USAGE)
    one, other = report_errors(lambda: (read_fleet(before), read_fleet(after)))
    stored = merge_with_policy(DEFAULT_FLEET, one).fleet
    found = merge_with_policy(stored, other).differences
    if as_json:
        answer_json(found)
    else:
        show_sheet(build_policy_diff_sheet(found, str(before), str(after)))
    if (fail_on == "loosened" and any(each.how == "looser" for each in found)) or (fail_on == "changed" and found):
        raise typer.Exit(EXIT_FAILED)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read: {error}.", EXIT_USAGE)


def _make_agent_desk(app: Runtime, agent: str) -> tuple[Actor, str]:
    """The desk of the person who typed, with the agent's folder at hand if they named it."""
    folder, actor = Path(agent), make_desk(app)
    if not (folder / AGENT_FILE).exists():
        return actor, agent
    name = read_agent(folder).spec.name
    return Actor(actor.app, actor.principal, actor.short_ids, AgentFolders({name: folder})), name


def _parse_since(app: Runtime, since: str) -> int:
    return (app.clock or SystemClock()).now() - parse_typed_duration(since) if since else 0

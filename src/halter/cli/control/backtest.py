"""`halter policy backtest`, `suggest` and `diff`: test a policy on recorded sessions before it is applied."""

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
from halter.core.text import format_count
from halter.operations.actor import Actor
from halter.operations.agent_folders import AgentFolders
from halter.operations.backtest import BacktestResult, backtest_policy, suggest_policy
from halter.present.tables import build_backtest_sheet, build_policy_diff_sheet
from halter.runtime.runtime import Runtime

AgentOption = Annotated[str, typer.Option("--agent", "-a", metavar="AGENT", help="Agent name or folder.")]
SinceOption = Annotated[
    str,
    typer.Option("--since", metavar="AGE", help="Only sessions started within this age, such as 30d (default: all)."),
]
FailCondition = Literal["loosened", "changed"]
FAILS_ON: Final[Mapping[FailCondition, str]] = {"loosened": "loosened", "changed": "changed"}


def backtest(
    *,
    agent: AgentOption,
    since: SinceOption = "",
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="The agent.yaml or halter.yaml to test.")
    ] = None,
    cap: Annotated[
        str, typer.Option("--cap", metavar="USD", help="Test the recorded policy with this cap per session.")
    ] = "",
    against: Annotated[
        str, typer.Option("--against", metavar="REVISION", help="Test an earlier policy of the agent, by its digest.")
    ] = "",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="WHAT", help="Exit 1 if anything was loosened or changed.")
    ] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge an agent's recorded calls and requests again under another policy. Nothing is executed.

    With only a folder, the current files in it are tested. Loosened decisions come first, then calls that the policy
    would refuse or ask about, and the amount that it would not have spent.
    """
    if fail_on and fail_on not in FAILS_ON:
        fail(f"Invalid --fail-on {fail_on!r}. Use {' or '.join(FAILS_ON)}.", EXIT_USAGE)
    text = "" if policy is None else report_errors(lambda: _read_text(policy), EXIT_USAGE)

    async def job(app: Runtime) -> BacktestResult:
        actor, name = _make_agent_desk(app, agent)
        since_at = _parse_since(app, since)
        return await backtest_policy(actor, name, since=since_at, policy=text, cap=cap, against=against)

    result = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(result)
    else:
        show_sheet(build_backtest_sheet(result))
    if (fail_on == "loosened" and result.loosened) or (fail_on == "changed" and result.differing):
        raise typer.Exit(EXIT_FAILED)


def suggest(
    *, agent: AgentOption, since: SinceOption = "", store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Suggest the tightest policy that would have allowed everything that an agent's recorded sessions did.

    Prints keys for the agent.yaml, and tests them on the same sessions.
    """

    async def job(app: Runtime) -> Any:
        actor, name = _make_agent_desk(app, agent)
        return await suggest_policy(actor, name, since=_parse_since(app, since))

    suggestion = run_with_app(store, job, despite_doubt=True)
    if as_json:
        answer_json(suggestion)
        return
    print_sentence(suggestion.text.rstrip())
    sample = f"{format_count(suggestion.sessions, 'session')} with {format_count(suggestion.decisions, 'decision')}"
    print_sentence(f"Tested on {sample}: {suggestion.refused} would have been refused.")


def diff(
    before: Annotated[Path, typer.Argument(metavar="FILE", help="A halter.yaml.")],
    after: Annotated[Path, typer.Argument(metavar="OTHER", help="The halter.yaml to compare it with.")],
    *,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="WHAT", help="Exit 1 if anything was loosened or changed.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show the keys in which one halter.yaml is looser or stricter than another.

    Looser keys come first. No store is opened.
    """
    if fail_on and fail_on not in FAILS_ON:
        fail(f"Invalid --fail-on {fail_on!r}. Use {' or '.join(FAILS_ON)}.", EXIT_USAGE)
    fleet_before, fleet_after = report_errors(lambda: (read_fleet(before), read_fleet(after)))
    differences = merge_with_policy(fleet_before, fleet_after).differences
    if as_json:
        answer_json(differences)
    else:
        show_sheet(build_policy_diff_sheet(differences, str(before), str(after)))
    if (fail_on == "loosened" and any(each.how == "looser" for each in differences)) or (
        fail_on == "changed" and differences
    ):
        raise typer.Exit(EXIT_FAILED)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(f"Cannot read {path}: {error}.", EXIT_USAGE)


def _make_agent_desk(app: Runtime, agent: str) -> tuple[Actor, str]:
    """Make the actor of the person who typed, with the agent's folder if they named one; return its name, too."""
    folder, actor = Path(agent), make_desk(app)
    if not (folder / AGENT_FILE).exists():
        return actor, agent
    name = read_agent(folder).spec.name
    return Actor(actor.app, actor.principal, actor.short_ids, AgentFolders({name: folder})), name


def _parse_since(app: Runtime, since: str) -> int:
    return (app.clock or SystemClock()).now() - parse_typed_duration(since) if since else 0

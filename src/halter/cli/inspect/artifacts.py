"""`halter findings` and `proposals`: what sessions report, and what a person makes of it."""

from pathlib import Path
from typing import Annotated

import typer

from halter.cli.command import (
    JsonOption,
    ReasonOption,
    StoreOption,
    YesOption,
    command,
    fail,
    group,
    make_desk,
    require_person,
    run_with_app,
    to_json,
)
from halter.cli.exit_codes import EXIT_FAILED, EXIT_USAGE
from halter.cli.output import answer_json, print_sentence
from halter.cli.terminal import confirm
from halter.operations import artifacts
from halter.operations.artifacts import promote_into
from halter.present.tables import build_artifacts_sheet
from halter.runtime.runtime import Runtime


def promote(
    proposal: Annotated[str, typer.Argument(metavar="ID", help="Id or prefix of the proposal.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Agent folder.")],
    *,
    yes: YesOption = False,
    reason: ReasonOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a proposal to the agent's AGENTS.md, which all of its sessions read. Shows the file and asks first.

    The proposal is recorded as promoted, with your name and reason. The rest of the file is kept.
    """
    if as_json and not yes:
        fail("--json cannot ask for confirmation. Review the proposal, then pass --yes.", EXIT_USAGE)

    async def job(app: Runtime) -> artifacts.ArtifactSettled:
        require_person(app, "promote a proposal")
        artifact = await artifacts.resolve_artifact(make_desk(app), proposal, "proposals")
        text = artifacts.render_context_file(folder, artifact)
        if not yes:
            print_sentence(f"{folder / artifacts.CONTEXT_FILE} would contain:\n\n{text}", at_once=True)
            if not confirm("Write this file?"):
                fail("Nothing was written.", EXIT_FAILED)
        return await promote_into(make_desk(app), artifact, folder, reason)

    result = run_with_app(store, job)
    if as_json:
        answer_json(to_json(result))
    else:
        print_sentence(result.sentence)


proposals = group(
    "List proposals of agents; accept, dismiss or promote one.",
    {
        "list": command(
            artifacts.proposals,
            """List proposed memories and precedents, the newest first, with their status.

            Sessions see a proposal only after a person accepts it.
            """,
            lambda found, _: build_artifacts_sheet(found, "No agent has made a proposal yet."),
            despite_doubt=True,
            allow_missing=True,
        ),
        "accept": command(
            artifacts.settle_proposal,
            """Accept a proposal. Future sessions of its agent see it.

            Sessions see the newest accepted proposals, as far as they fit; `promote` makes one permanent.
            """,
            fixed_values={"status": "kept"},
        ),
        "dismiss": command(
            artifacts.settle_proposal,
            """Dismiss a proposal. No session sees it.

            It stays in the list as dismissed, with your name and reason.
            """,
            fixed_values={"status": "dismissed"},
        ),
        "promote": promote,
    },
    former_names={"keep": "accept"},
)

findings = group(
    "List findings of sessions; accept or dismiss one.",
    {
        "list": command(
            artifacts.findings,
            """List findings, the newest first, with the result of their checks.

            A quote is checked against its document. If the agent has judges, a judge other than the author reviews the
            finding.
            """,
            lambda found, _: build_artifacts_sheet(found, "No findings yet."),
            despite_doubt=True,
            allow_missing=True,
        ),
        "accept": command(
            artifacts.settle_finding,
            """Accept a finding.

            It stays in the list as accepted, with your name and reason.
            """,
            fixed_values={"status": "kept"},
        ),
        "dismiss": command(
            artifacts.settle_finding,
            """Dismiss a finding.

            It stays in the list as dismissed, with your name and reason; nothing is deleted.
            """,
            fixed_values={"status": "dismissed"},
        ),
    },
    former_names={"keep": "accept"},
)

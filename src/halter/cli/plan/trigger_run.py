"""A trigger that `halter triggers run` starts in this process."""

from pathlib import Path

from halter.cli.command import fail
from halter.cli.exit_codes import EXIT_USAGE
from halter.cli.output import print_sentence
from halter.cli.run.conversation import open_agent_context
from halter.core.ports import Query
from halter.core.rows import SessionRow
from halter.runtime.runtime import Runtime
from halter.runtime.trigger_runner import attend_run_here, run_now


async def run_trigger(
    app: Runtime, folder: Path, agent: str, trigger: str, file: Path | None, *, quiet: bool
) -> tuple[SessionRow, bool]:
    """Run a trigger; return its session, and whether it ran in this process."""
    async with open_agent_context(app, folder) as context:
        if context.policy.name != agent:
            fail(f"{folder} is the folder of {context.policy.name}, not of {agent}.", EXIT_USAGE)
        session = await run_now(context, folder, trigger, file)
        if not quiet:
            print_sentence(f"Session {session}", at_once=True)
        ran_here = await attend_run_here(context, folder, session)
        (row,) = await app.store.ask(Query("session", SessionRow, {"session": session}))
        return row, ran_here

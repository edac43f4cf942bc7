"""`halter halt`, `resume` and `cancel`."""

from typing import Annotated

import typer

from halter.cli.command import (
    Typed,
    command,
    parse_typed_duration,
)
from halter.core.clock import SECOND
from halter.operations import control

halt = command(
    control.halt,
    """Halt everything in a scope: nothing starts, and running effects are cancelled within a second.

    The halt binds every process on the store until the scope is resumed. `halter halt fleet` halts all agents, `halter
    halt NAME` one agent, `halter halt ID` one session; `halter resume` continues a halted session where it stopped. An
    unknown scope is rejected. `halter off` also ends the session of an agent, so that the next one starts anew; `halter
    cancel` ends a session.
    """,
    despite_doubt=True,
)

resume = command(
    control.resume,
    """Lift a halt. What it stopped continues in place.

    The sessions of a fleet resume over a second for each session, at most a minute. `halter on AGENT` starts an agent
    that is off or paused. Exits 1 if there was nothing to resume.
    """,
    replacements={
        "over": Typed(
            ("over_seconds",),
            Annotated[
                str,
                typer.Option("--over", metavar="TIME", help="Resume sessions one by one over this time, such as 5m."),
            ],
            lambda over: {"over_seconds": parse_typed_duration(over) // SECOND if over else None},
            "",
        )
    },
)

cancel = command(
    control.cancel,
    """End a session. Running calls are cancelled.

    Exits 1 if the session has not ended yet.
    """,
    lambda result, _: [f"Session {result.session} is cancelled. {result.sentence}"],
    despite_doubt=True,
    json=lambda result: {"subject": result.session, "done": True, "ended": result.came == "ended"},
    is_ok=lambda result: result.came == "ended",
)

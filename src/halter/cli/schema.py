"""`halter schema`: what may stand in the files that people write, for editors and other programs."""

from typing import Annotated, Literal

import typer

from halter.cli.answer import answer_json
from halter.cli.command import JsonOption


def schema(
    file: Annotated[
        Literal["agent", "fleet"],
        typer.Argument(metavar="FILE", help="agent for agent.yaml, fleet for halter.yaml."),
    ] = "agent",
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of agent.yaml or halter.yaml, for an editor that completes keys and marks mistakes.

    Write agent or fleet. Every key that Halter knows is in it, with what it means and what holds if it is left out.
    """
    from halter.config.schema import agent_schema, fleet_schema

    _ = as_json  # A schema is JSON in any case.
    answer_json(agent_schema() if file == "agent" else fleet_schema())

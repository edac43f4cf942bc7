"""`halter schema`: the JSON Schemas of the files."""

from typing import Annotated, Literal

import typer

from halter.cli.command import (
    JsonOption,
)
from halter.cli.output import answer_json
from halter.config.decode import agent_schema, fleet_schema


def schema(
    file: Annotated[
        Literal["agent", "fleet"],
        typer.Argument(metavar="FILE", help="agent for agent.yaml, fleet for halter.yaml."),
    ] = "agent",
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON Schema of agent.yaml or halter.yaml, for an editor that completes keys and marks errors.

    Pass agent or fleet. Every key has a description and its default.
    """
    _ = as_json  # A schema is always JSON.
    answer_json(agent_schema() if file == "agent" else fleet_schema())

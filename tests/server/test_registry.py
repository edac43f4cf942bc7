"""Every operation is written once, and is then a route, a part of the description and the reference, and a command."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from halter.cli.commands import load_all_commands
from halter.operations.registry import OPERATIONS
from halter.server.api import description
from scripts.reference.http import page
from scripts.reference.sheet import NOTHING

DESCRIBED = description()
PAGE = page()
WITHOUT_A_COMMAND = {
    "whoami": "at a terminal it is the person whose store it is",
    "home": "`halter report`, `inbox` and `budget` show its parts",
    "fleet": "`halter sessions` and `doctor` show it",
    "workers": "`halter doctor` shows them",
    "session": "`halter sessions` and `show` tell it",
    "turns": "a part of `halter show --receipt`",
    "hot-state": "a person sees it on the dashboard",
    "halts": "a part of `halter report`",
    "spending": "drawn on the dashboard",
    "decisions": "part of `halter inbox`",
}


def named(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"{before}{name}"
        if hasattr(command, "commands"):
            yield from named(command, f"{before}{name} ")


def test_each_has_a_name_of_its_own_a_command_or_a_reason_and_both_exist() -> None:
    assert len({each.name for each in OPERATIONS}) == len(OPERATIONS)
    assert {each.name for each in OPERATIONS if not each.command} == set(WITHOUT_A_COMMAND)
    commands = load_all_commands()
    assert {each.command.partition(" --")[0] for each in OPERATIONS if each.command} <= {*named(commands)}
    flags = {tuple(each.command.split(" ")) for each in OPERATIONS if " --" in each.command}
    assert all(
        flag in [name for option in commands.commands[name].params for name in option.opts] for name, flag in flags
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
def test_each_is_a_route_whose_description_and_reference_come_from_its_signature(operation: Any) -> None:
    method = "post" if operation.writes else "get"
    path = f"/api{operation.path}".replace(":path", "")
    result = DESCRIBED["paths"][path][method]
    assert (result["operationId"], result["summary"], result["x-role"]) == (
        operation.name,
        operation.summary,
        operation.role,
    )
    body = result.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    results = {each["name"] for each in result.get("parameters", ())} | {*body.get("properties", {})}
    fields = {field.encode_name for field in msgspec.structs.fields(operation.parameters)}
    assert results == fields
    assert operation.path_parameters <= fields
    versioned = path.replace("/api/", "/api/v1/", 1)
    entry = PAGE.partition(f"## {method.upper()} {versioned}\n")[2].partition("\n## ")[0]
    assert operation.summary in entry
    assert all(f"`{name}`" in entry for name in fields)


def test_every_parameter_says_what_it_means() -> None:
    rows = [line for line in PAGE.partition("## GET /api/v1/stream")[0].splitlines() if line.startswith("| `")]
    assert rows
    assert [line for line in rows if line.endswith(f"| {NOTHING} |")] == []

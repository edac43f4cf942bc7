"""Shell completion: which parameters offer which names. The names are read when a word is completed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.shell_completion import CompletionItem

NAMES_BY_PARAMETER: Final[Mapping[str, str]] = {
    "session": "sessions",
    "stream": "sessions",
    "resume": "sessions",
    "decision": "decisions",
    "trigger": "triggers",
    "rule": "rules",
    "scope": "scopes",
    "approve.scope": "rule scopes",
    "on.agent": "agents",
    "off.agent": "agents",
    "triggers.agent": "agents",
    "schedules.agent": "agents",
    "finding": "findings",
    "proposal": "proposals",
}
"""By parameter name; by `command.parameter` or `group.parameter` where one name has several meanings."""


def add_completion(command: "Command", group: str = "") -> "Command":
    for param in command.params:
        qualified_name = f"{group or command.name}.{param.name}"
        names = NAMES_BY_PARAMETER.get(qualified_name) or NAMES_BY_PARAMETER.get(param.name or "")
        if names is not None:
            # Typer sets this where a parameter is declared; here it is set once for all parameters of that name.
            setattr(param, _HOOK, _completer(names))
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            add_completion(inner, command.name or "")
    return command


_HOOK: Final = "_custom_shell_complete"


def _completer(names: str) -> "Callable[[Context, Parameter, str], list[CompletionItem]]":
    def complete(ctx: "Context", _: "Parameter", incomplete: str) -> "list[CompletionItem]":
        from halter.cli.completion_names import complete_word

        return complete_word(names, ctx.params.get("store"), incomplete)

    return complete

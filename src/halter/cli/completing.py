"""What a word on the command line may be, for a shell that completes it.

A store is only read for that, and never made; whatever goes wrong, there is just nothing to offer.
"""

import sqlite3
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from typer.core import TyperGroup

from halter.core.errors import HalterError

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.shell_completion import CompletionItem

    from halter.journal.offered import Names

Offer = Callable[[str, str], list[tuple[str, str]]]
"""What may stand there: of a store, what begins so; each with a word about it."""


def completed(command: "Command", group: str = "") -> "Command":
    """Have the words of a command completed by what stands in the store, and those of the commands in it."""
    for param in command.params:
        offer = _OFFERS.get(f"{group or command.name}.{param.name}") or _OFFERS.get(param.name or "")
        if offer is not None:
            # A parameter takes this only where it is declared; here it stands once, for all that have the name.
            setattr(param, _HOOK, _completer(offer))
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            completed(inner, command.name or "")
    return command


_HOOK: Final = "_custom_shell_complete"


def _completer(offer: Offer) -> "Callable[[Context, Parameter, str], list[CompletionItem]]":
    def complete(ctx: "Context", _: "Parameter", incomplete: str) -> "list[CompletionItem]":
        from typer._click.shell_completion import CompletionItem

        typed: str | None = ctx.params.get("store")
        return [CompletionItem(name, help=told or None) for name, told in _offered(offer, typed, incomplete)]

    return complete


def _offered(offer: Offer, typed: str | None, beginning: str) -> list[tuple[str, str]]:
    from halter.cli.command import settings_for

    try:
        return offer(settings_for(typed or None).store, beginning)
    except (HalterError, sqlite3.Error, OSError):
        return []


def _names(names: "Names") -> Offer:
    def offer(store: str, beginning: str) -> list[tuple[str, str]]:
        from halter.journal.offered import offered

        return offered(store, names, beginning)

    return offer


def _scopes(store: str, beginning: str) -> list[tuple[str, str]]:
    """Offer the kinds of scopes first, and what there is of one when it is typed."""
    from halter.journal.offered import offered

    kinds: dict[str, Names] = {"agent:": "agents", "trigger:": "triggers", "session:": "sessions"}
    for kind, names in kinds.items():
        if beginning.startswith(kind):
            found = offered(store, names, beginning.removeprefix(kind))
            return [(f"{kind}{name}", told) for name, told in found]
    return [(scope, "") for scope in ("fleet", *kinds) if scope.startswith(beginning)]


def _ways(_: str, beginning: str) -> list[tuple[str, str]]:
    return [(scope, "") for scope in ("session", "agent", "fleet") if scope.startswith(beginning)]


_OFFERS: Final[Mapping[str, Offer]] = {
    "session": _names("sessions"),
    "stream": _names("sessions"),
    "resume": _names("sessions"),
    "decision": _names("decisions"),
    "trigger": _names("triggers"),
    "rule": _names("rules"),
    "scope": _scopes,
    "approve.scope": _ways,
    "on.agent": _names("agents"),
    "off.agent": _names("agents"),
    "schedules.agent": _names("agents"),
    "findings.id": _names("findings"),
    "proposals.id": _names("proposals"),
}
"""By the name of a parameter, or where that means different things, by its command's or group's and its own."""

"""Shell completion from what is in the store. It only reads a store; on any error it offers nothing."""

import sqlite3
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from typer.core import TyperGroup

from halter.core.errors import HalterError

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.shell_completion import CompletionItem

    from halter.journal.open import CompletionKind

CompletionSource = Callable[[str, str], list[tuple[str, str]]]
"""What may stand there: of a store, what begins so; each with a word about it."""


def add_completion(command: "Command", group: str = "") -> "Command":
    for param in command.params:
        offer = _OFFERS.get(f"{group or command.name}.{param.name}") or _OFFERS.get(param.name or "")
        if offer is not None:
            # A parameter takes this only where it is declared; here it stands once, for all that have the name.
            setattr(param, _HOOK, _completer(offer))
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            add_completion(inner, command.name or "")
    return command


_HOOK: Final = "_custom_shell_complete"


def _completer(offer: CompletionSource) -> "Callable[[Context, Parameter, str], list[CompletionItem]]":
    def complete(ctx: "Context", _: "Parameter", incomplete: str) -> "list[CompletionItem]":
        from typer._click.shell_completion import CompletionItem

        typed: str | None = ctx.params.get("store")
        return [
            CompletionItem(name, help=sentence or None) for name, sentence in _complete_word(offer, typed, incomplete)
        ]

    return complete


def _complete_word(offer: CompletionSource, typed: str | None, beginning: str) -> list[tuple[str, str]]:
    from halter.cli.command import read_cli_settings

    try:
        return offer(read_cli_settings(typed or None).store, beginning)
    except (HalterError, sqlite3.Error, OSError):
        return []


def _make_name_source(names: "CompletionKind") -> CompletionSource:
    def offer(store: str, beginning: str) -> list[tuple[str, str]]:
        from halter.journal.open import complete_names

        return complete_names(store, names, beginning)

    return offer


def _complete_scope(store: str, beginning: str) -> list[tuple[str, str]]:
    from halter.journal.open import complete_names

    kinds: dict[str, CompletionKind] = {"agent:": "agents", "trigger:": "triggers", "session:": "sessions"}
    for kind, names in kinds.items():
        if beginning.startswith(kind):
            found = complete_names(store, names, beginning.removeprefix(kind))
            return [(f"{kind}{name}", sentence) for name, sentence in found]
    return [(scope, "") for scope in ("fleet", *kinds) if scope.startswith(beginning)]


def _complete_way(_: str, beginning: str) -> list[tuple[str, str]]:
    return [(scope, "") for scope in ("session", "agent", "fleet") if scope.startswith(beginning)]


_OFFERS: Final[Mapping[str, CompletionSource]] = {
    "session": _make_name_source("sessions"),
    "stream": _make_name_source("sessions"),
    "resume": _make_name_source("sessions"),
    "decision": _make_name_source("decisions"),
    "trigger": _make_name_source("triggers"),
    "rule": _make_name_source("rules"),
    "scope": _complete_scope,
    "approve.scope": _complete_way,
    "on.agent": _make_name_source("agents"),
    "off.agent": _make_name_source("agents"),
    "schedules.agent": _make_name_source("agents"),
    "finding": _make_name_source("findings"),
    "proposal": _make_name_source("proposals"),
}
"""By the name of a parameter, or where that means different things, by its command's or group's and its own."""

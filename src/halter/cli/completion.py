"""Shell completion from the store. It only reads the store; on any error it offers nothing."""

import os
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
"""From a store and a prefix to the matching names, each with a short description."""


def add_completion(command: "Command", group: str = "") -> "Command":
    for param in command.params:
        offer = _OFFERS.get(f"{group or command.name}.{param.name}") or _OFFERS.get(param.name or "")
        if offer is not None:
            # Typer sets this where a parameter is declared; here it is set once for all parameters of that name.
            setattr(param, _HOOK, _completer(offer))
    if isinstance(command, TyperGroup):
        for inner in command.commands.values():
            add_completion(inner, command.name or "")
    return command


_HOOK: Final = "_custom_shell_complete"


def _completer(offer: CompletionSource) -> "Callable[[Context, Parameter, str], list[CompletionItem]]":
    def complete(ctx: "Context", _: "Parameter", incomplete: str) -> "list[CompletionItem]":
        from typer._click.shell_completion import CompletionItem

        store_option: str | None = ctx.params.get("store")
        return [
            CompletionItem(name, help=sentence or None)
            for name, sentence in _complete_word(offer, store_option, incomplete)
        ]

    return complete


def _complete_word(offer: CompletionSource, store_option: str | None, prefix: str) -> list[tuple[str, str]]:
    from halter.settings import find_home, read_settings

    try:
        return offer(read_settings(os.environ, find_home(os.environ), store_option or None).store, prefix)
    except (HalterError, sqlite3.Error, OSError):
        return []


def _make_name_source(names: "CompletionKind") -> CompletionSource:
    def offer(store: str, prefix: str) -> list[tuple[str, str]]:
        from halter.journal.open import complete_names

        return complete_names(store, names, prefix)

    return offer


def _complete_scope(store: str, prefix: str) -> list[tuple[str, str]]:
    from halter.journal.open import complete_names

    kinds: dict[str, CompletionKind] = {"agent:": "agents", "trigger:": "triggers", "session:": "sessions"}
    for kind, names in kinds.items():
        if prefix.startswith(kind):
            completions = complete_names(store, names, prefix.removeprefix(kind))
            return [(f"{kind}{name}", sentence) for name, sentence in completions]
    return [(scope, "") for scope in ("fleet", *kinds) if scope.startswith(prefix)]


def _complete_way(_: str, prefix: str) -> list[tuple[str, str]]:
    return [(scope, "") for scope in ("session", "agent", "fleet") if scope.startswith(prefix)]


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
    "triggers.agent": _make_name_source("agents"),
    "schedules.agent": _make_name_source("agents"),
    "finding": _make_name_source("findings"),
    "proposal": _make_name_source("proposals"),
}
"""By parameter name; by `command.parameter` or `group.parameter` where one name has several meanings."""

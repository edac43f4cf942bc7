"""The names that shell completion offers. It only reads the store; on any error it offers nothing."""

import os
import sqlite3
from typing import Final, get_args

from typer._click.shell_completion import CompletionItem

from halter.core.errors import HalterError
from halter.core.vocabulary import RuleScope
from halter.journal.open import CompletionKind, complete_names
from halter.settings import find_home, read_settings

Completions = list[tuple[str, str]]
"""Names, each with a short description."""

SCOPE_KINDS: Final[dict[str, CompletionKind]] = {"agent:": "agents", "trigger:": "triggers", "session:": "sessions"}


def complete_word(names: str, store_option: str | None, prefix: str) -> list[CompletionItem]:
    """List the names of a kind that begin with a prefix."""
    try:
        store = read_settings(os.environ, find_home(os.environ), store_option or None).store
        completions = _complete(names, store, prefix)
    except (HalterError, sqlite3.Error, OSError):
        return []
    return [CompletionItem(name, help=sentence or None) for name, sentence in completions]


def _complete(names: str, store: str, prefix: str) -> Completions:
    match names:
        case "sessions" | "decisions" | "triggers" | "rules" | "agents" | "findings" | "proposals":
            return complete_names(store, names, prefix)
        case "scopes":
            return _complete_scope(store, prefix)
        case _:
            return _filter(get_args(RuleScope), prefix)


def _complete_scope(store: str, prefix: str) -> Completions:
    for kind, names in SCOPE_KINDS.items():
        if prefix.startswith(kind):
            completions = complete_names(store, names, prefix.removeprefix(kind))
            return [(f"{kind}{name}", sentence) for name, sentence in completions]
    return _filter(("fleet", *SCOPE_KINDS), prefix)


def _filter(words: tuple[str, ...], prefix: str) -> Completions:
    return [(word, "") for word in words if word.startswith(prefix)]

"""What a judge of a program finds, and how it reads words: options, operands, values."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from halter.guard.commands import Command
from halter.guard.places import Finding, path_risk


class Runs(msgspec.Struct, frozen=True):
    """Something that a command runs besides: a line for a shell, or one command as words."""

    given: str | tuple[str, ...]


class Mentions(msgspec.Struct, frozen=True):
    """Words among which may be a command: those that name a dangerous program count as if they were run."""

    words: tuple[str, ...]


Found = Finding | Runs | Mentions

_DELETING: Final = frozenset(
    {
        *("delete", "del", "destroy", "drop", "purge", "wipe", "erase", "remove", "rm", "nuke", "prune", "undefine"),
        *("uninstall", "unregister", "unregistervm", "terminate", "truncate", "flush", "flushall", "flushdb", "fresh"),
        *("reset", "decommission", "forget"),
    }
)
_DELETING_OPTIONS: Final = re.compile(r"--?(?:delete|destroy|purge|remove|wipe|erase|drop)(?:-[\w-]+)?(?:=.*)?")
_PARTS: Final = re.compile(r"[:_-]")
_NAMING: Final = frozenset({"-k", "-m", "-t", "--name"})
"""Options whose value is a name, and no verb."""
_ABOUT: Final = frozenset({"install", "add", "get", "search", "show", "info", "help", "describe", "explain"})
"""Verbs whose object is only named, as in `help delete`."""
_VERBS: Final = 5
_LONGEST_VERB: Final = 40
Judge = Callable[[Command], Iterator[Found]]


def operands(words: Sequence[str]) -> list[str]:
    """List the words that are no options."""
    after = words.index("--") if "--" in words else len(words)
    return [word for word in words[:after] if not word.startswith("-")] + list(words[after + 1 :])


def has(words: Sequence[str], letters: str, *names: str) -> bool:
    """Tell whether a flag is there, also among joined ones as in `-rf`, and also cut short as in `--recurs`."""
    for word in words:
        if word == "--":
            return False
        name = word.split("=")[0]
        if name.startswith("--"):
            if any(each.startswith(name) for each in names):
                return True
        elif word[:1] == "-" and (set(letters) & set(word[1:]) or word in names):
            return True
    return False


def values_of(words: Sequence[str], *names: str) -> Iterator[str]:
    """List the values of options: in the next word, after an equals sign, or behind a single letter."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        following = words[at + 1] if at + 1 < len(words) else ""
        for option in names:
            if option.startswith("--"):
                if len(name) > len("--") and option.startswith(name):
                    yield value if equals else following
                    break
            elif word == option:
                yield following
                break
            elif len(option) == len("-x") and word.startswith(option) and not word.startswith("--"):
                yield word[len(option) :].removeprefix("=")
                break


def deletes(words: Sequence[str]) -> str:
    """Name the word that says to delete, as the verbs of most programs do: `destroy`, `db:drop`, `--purge`."""
    plain = [
        word for at, word in enumerate(words) if not word.startswith("-") and not _NAMING & set(words[at - 1 : at])
    ]
    for before, word in zip(("", *plain), plain[:_VERBS], strict=False):
        if len(word) > _LONGEST_VERB or set(word) & set("/= ") or before in _ABOUT:
            continue
        # What stands before a point is the name of a file, unless a verb stands behind it.
        if _DELETING & set(_PARTS.split(word.lower().rpartition(".")[2])):
            return word
    return next((word for word in words if _DELETING_OPTIONS.fullmatch(word)), "")


def is_path(word: str) -> bool:
    """Tell a word that names a file from a pattern or a sentence."""
    return " " not in word and ("/" in word or word.startswith((".", "~", "$HOME", "${HOME}")))


def verbs(high: str = "", critical: str = "", low: str = "", *, otherwise: bool = True) -> Judge:
    """Judge a program by those of its words that are known to be dangerous, or known to be harmless."""
    grave, worse, mild = high.split(), critical.split(), frozenset(low.split())

    def judge(command: Command) -> Iterator[Found]:
        words = command.argv[1:]
        for word in worse:
            if word in words:
                yield "CRITICAL", f"{command.program} {word} cannot be taken back"
        for word in grave:
            if word in words:
                yield "HIGH", f"{command.program} {word} changes or deletes a lot"
        verb = next(iter(operands(words)), "")
        if {"cp", "copy", "copyto", "mv", "move", "sync"} & set(words):
            yield from path_risk(operands(words)[-1], "write")
        if verb not in mild and deletes(words):
            yield "HIGH", f"{command.program} {deletes(words)} deletes something"
        if otherwise and verb not in mild:
            yield "MEDIUM", f"{command.program} changes something outside"

    return judge

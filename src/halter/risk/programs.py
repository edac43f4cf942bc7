"""Helpers to read the words of a command, and the judges of file programs, network programs and git."""

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec

from halter.core.text import make_word_set
from halter.core.vocabulary import RiskLevel
from halter.risk.commands import Command
from halter.risk.places import RiskFinding


class NestedCommand(msgspec.Struct, frozen=True):
    """Another command that a command runs: a line for a shell, or words."""

    line_or_words: str | tuple[str, ...]


class MentionedWords(msgspec.Struct, frozen=True):
    """Words that may contain a command: each that names a dangerous program counts as if it were run."""

    words: tuple[str, ...]


JudgeFinding = RiskFinding | NestedCommand | MentionedWords

_DELETING: Final = make_word_set(
    "delete del destroy drop purge wipe erase remove rm nuke prune undefine uninstall unregister unregistervm "
    "terminate truncate flush flushall flushdb fresh reset decommission forget"
)
_REACHING: Final = make_word_set(
    "publish unpublish deploy redeploy undeploy grant revoke createsuperuser changepassword"
)
_DELETING_OPTIONS: Final = re.compile(r"--?(?:delete|destroy|purge|remove|wipe|erase|drop)(?:-[\w-]+)?(?:=.*)?")
_VERB_SEPARATORS: Final = re.compile(r"[:_-]")
_NAME_OPTIONS: Final = frozenset({"-k", "-m", "-t", "--name"})
"""Options whose value is a name, not a verb."""
_NAMING_VERBS: Final = frozenset({"install", "add", "get", "search", "show", "info", "help", "describe", "explain"})
"""Verbs whose object is only named, as in `help delete`."""
_MAX_VERBS: Final = 5
_MAX_VERB_LENGTH: Final = 40
Judge = Callable[[Command], Iterator[JudgeFinding]]


def list_operands(words: Sequence[str]) -> list[str]:
    separator_at = words.index("--") if "--" in words else len(words)
    return [word for word in words[:separator_at] if not word.startswith("-")] + list(words[separator_at + 1 :])


def has_flag(words: Sequence[str], letters: str, *names: str) -> bool:
    """Return true if a flag is present, also joined as in `-rf` or abbreviated as in `--recurs`."""
    for word in words:
        if word == "--":
            return False
        name = word.split("=")[0]
        if name.startswith("--"):
            if any(flag_name.startswith(name) for flag_name in names):
                return True
        elif word[:1] == "-" and (set(letters) & set(word[1:]) or word in names):
            return True
    return False


def list_option_values(words: Sequence[str], *names: str) -> Iterator[str]:
    """Yield the values of options: the next word, the text after an equals sign, or after a single letter."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            return
        following = words[index + 1] if index + 1 < len(words) else ""
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


def find_deleting_word(words: Sequence[str]) -> str:
    """Find a verb that deletes: `destroy`, `db:drop`, `--purge`."""
    return _find_verb(words, _DELETING) or next((word for word in words if _DELETING_OPTIONS.fullmatch(word)), "")


def find_reaching_word(words: Sequence[str]) -> str:
    """Find a verb that publishes or changes rights: `publish`, `deploy:prod`, `grant`."""
    return _find_verb(words, _REACHING)


def _find_verb(words: Sequence[str], verbs: frozenset[str]) -> str:
    candidates = [
        word
        for index, word in enumerate(words)
        if not word.startswith("-") and not _NAME_OPTIONS & set(words[index - 1 : index])
    ]
    for previous, word in zip(("", *candidates), candidates[:_MAX_VERBS], strict=False):
        if len(word) > _MAX_VERB_LENGTH or set(word) & set("/= ") or previous in _NAMING_VERBS:
            continue
        # The part before a dot is a file name, unless a verb follows the dot.
        if verbs & set(_VERB_SEPARATORS.split(word.lower().rpartition(".")[2])):
            return word
    return ""


def name_script(path: str) -> str:
    """Return the name of a script without its folder and ending: `deploy` of `./bin/deploy.sh`."""
    return posixpath.basename(path).partition(".")[0]


def is_path(word: str) -> bool:
    return " " not in word and ("/" in word or word.startswith((".", "~", "$HOME", "${HOME}")))


def prepend_finding(level: RiskLevel, reason: str, judge: Judge) -> Judge:
    return lambda command: chain([(level, reason)], judge(command))


def resolve_paths(command: Command, paths: Sequence[str]) -> list[str]:
    """Resolve paths against the line's working directory."""
    if not command.folder:
        return list(paths)
    return [path if path.startswith(("/", "~", "$")) else posixpath.join(command.folder, path) for path in paths]

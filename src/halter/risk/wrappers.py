"""Finds what a wrapper runs: a program such as `sudo`, `env` or `docker exec`, which runs another one.

`wrappers.txt` lists their options. If an option is unknown, every word that names a dangerous program counts as if it
were run.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from halter.core.text import expand_names
from halter.risk.program_names import program_of, read_entries

OptionKind = Literal["", ":", "?", "!"]


class Wrapper(msgspec.Struct, frozen=True):
    """A program that runs other programs.

    It takes `skips` words before the command. `joins`: a shell reads its words as one line. `permutes`: its options may
    also follow its own words. `only_lines`: it runs only the lines in its options. With an option in `looks` it runs
    nothing.
    """

    options: Mapping[str, OptionKind]
    skips: int = 0
    joins: bool = False
    permutes: bool = False
    only_lines: bool = False
    looks: frozenset[str] = frozenset()


class WrappedCommand(msgspec.Struct, frozen=True):
    """The command that a wrapper runs, as words, and lines for a shell. It is `sure` if all options were known."""

    argv: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    joins: bool = False
    sure: bool = True


def _parse_wrappers() -> Mapping[str, Wrapper]:
    wrapper_by_name: dict[str, Wrapper] = {}
    for head, _, options in (entry.partition(" =") for entry in read_entries("wrappers") if " =" in entry):
        names, _, traits = head.partition(" [")
        wrapper = Wrapper(_parse_options(options), **_parse_traits(traits.rstrip("]")))
        wrapper_by_name.update(dict.fromkeys(names.split(", "), wrapper))
    return wrapper_by_name


def _parse_options(text: str) -> Mapping[str, OptionKind]:
    kinds: dict[str, OptionKind] = {}
    for word in text.split():
        kind: OptionKind = ":" if word[-1] == ":" else "?" if word[-1] == "?" else "!" if word[-1] == "!" else ""
        name = word.rstrip(":?!")
        names = [name] if name.startswith("--") else [f"-{letter}" for letter in name[1:]]
        kinds.update(dict.fromkeys(names, kind))
    return kinds


def _parse_traits(text: str) -> dict[str, Any]:
    """Parse `skips=1 joins looks=-p,-P`: numbers, sets and flags of a Wrapper."""
    traits = (word.partition("=") for word in text.split())
    return {
        name: int(value) if value.isdigit() else frozenset(value.split(",")) if equals else True
        for name, equals, value in traits
    }


_WRAPPERS: Final = _parse_wrappers()

_ALIASES: Final[Mapping[str, str]] = expand_names(
    dict(entry.split(" -> ") for entry in read_entries("wrappers") if " -> " in entry)
)
_GROUP_WORDS: Final = frozenset({"compose", "container", "kubectl"})
"""Words before the verb, as in `docker compose exec`."""

_SUBCOMMAND_PROGRAMS: Final = frozenset(name.split()[0] for name in _WRAPPERS if " " in name)
WRAPPER_NAMES: Final = frozenset(name for name in _WRAPPERS if " " not in name) | _SUBCOMMAND_PROGRAMS | _ALIASES.keys()


def unwrap_command(argv: Sequence[str]) -> WrappedCommand | None:
    """Find what a wrapper runs. Returns None for a command that runs only itself."""
    program = program_of(argv[0])
    program = _ALIASES.get(program, program)
    index = 1
    if program in _SUBCOMMAND_PROGRAMS:
        verb_match = _find_verb(program, argv)
        if verb_match is None:
            return None
        wrapper, index = verb_match
    elif program in _WRAPPERS:
        wrapper = _WRAPPERS[program]
    else:
        return None
    return _OptionWalk(wrapper, program, argv, index).result()


def _find_verb(program: str, argv: Sequence[str]) -> tuple[Wrapper, int] | None:
    takes_value = {
        name
        for key, wrapper in _WRAPPERS.items()
        if key.startswith(program)
        for name, kind in wrapper.options.items()
        if kind in {":", "!"}
    }
    index = 1
    while index < len(argv):
        word = argv[index]
        if word.startswith("-") and len(word) > 1:
            index += 2 if word in takes_value else 1
        elif word in _GROUP_WORDS:
            index += 1
        else:
            wrapper = _WRAPPERS.get(f"{program} {word}")
            return (wrapper, index + 1) if wrapper else None
    return None


class _OptionWalk:
    def __init__(self, wrapper: Wrapper, program: str, argv: Sequence[str], at: int) -> None:
        self._wrapper = wrapper
        self._program = program
        self._argv = argv
        self._at = at
        self._skips = wrapper.skips
        self._lines: list[str] = []
        self._entry: list[str] = []
        self._sure = True
        self._looks = False

    def result(self) -> WrappedCommand | None:
        while self._at < len(self._argv) and self._step(self._argv[self._at]):
            pass
        own_words, remaining = tuple(self._argv[: self._at]), tuple(self._argv[self._at :])
        if self._looks:
            return None
        if self._program == "env" and self._lines:
            return WrappedCommand((), (f"{self._lines[0]} {shlex.join(remaining)}",), own_words, sure=self._sure)
        inner = () if self._wrapper.only_lines else (*self._entry, *remaining)
        return WrappedCommand(inner, tuple(self._lines), own_words, joins=self._wrapper.joins, sure=self._sure)

    def _step(self, word: str) -> bool:
        """Consume one word. Returns true if more of the wrapper's own words may follow."""
        if word == "--":
            self._at += 1 if self._wrapper.only_lines else 1 + self._skips
            return self._wrapper.only_lines
        if word.startswith("-"):
            self._option(word)
            return True
        if self._program in {"env", "sudo", "doas"} and "=" in word[1:]:
            self._at += 1
            return True
        if self._wrapper.only_lines:
            self._at += 1
            return True
        if not self._skips:
            return False
        self._at += 1
        self._skips -= 1
        return self._skips > 0 or self._wrapper.permutes

    def _option(self, word: str) -> None:
        self._at += 1
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            matching = [option for option in self._wrapper.options if option.startswith(name)]
            option_name = name if name in self._wrapper.options else matching[0] if matching else ""
            self._consume(option_name, value if equals else None)
            return
        for index, letter in enumerate(word[1:], 2):
            kind = self._wrapper.options.get(f"-{letter}")
            if kind != "":
                self._consume(f"-{letter}", word[index:] or None)
                return
            self._consume(f"-{letter}", None)

    def _consume(self, name: str, value: str | None) -> None:
        kind = self._wrapper.options.get(name)
        self._sure = self._sure and kind is not None
        self._looks = self._looks or name in self._wrapper.looks
        if kind not in {":", "!"}:
            return
        if value is None:
            value = self._argv[self._at] if self._at < len(self._argv) else ""
            self._at += 1
        if kind == "!" or value.startswith(("|", "!")):
            self._lines.append(value.lstrip("|!"))
        elif name == "--entrypoint":
            self._entry = [value]
        elif self._program == "ssh" and name == "-o" and "command" in value.lower():
            self._lines.append(value.replace("=", " ", 1).partition(" ")[2])

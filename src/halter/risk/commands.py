"""Parses a command line into all commands that it runs, as words, without their wrappers."""

import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from halter.core.text import make_word_set
from halter.risk.command_input import CommandInput
from halter.risk.places import is_root
from halter.risk.program_names import SHELLS, program_of
from halter.risk.shell_syntax import MalformedShell, SimpleCommand, TooComplex, parse_shell_line
from halter.risk.wrappers import WrappedCommand, unwrap_command

MAX_COMMAND_DEPTH: Final = 12

UNKNOWN_WORDS: Final = "$*"
"""Stands for words that are known only at run time."""

_SHELL_CHARACTERS: Final = frozenset("`$\n\r;&|<>(){}!#\0")
EXEC_OPTIONS: Final = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_CD_PROGRAMS: Final = frozenset({"cd", "pushd", "chdir"})
_SHELL_OPENERS: Final = make_word_set("ssh su sudo doas runuser script pkexec sg chroot unshare nsenter parallel sem")
_VALUED_SHELL_OPTIONS: Final = frozenset({"--rcfile", "--init-file", "--init-command"})
_MAX_WORDS: Final = 1000
_MAX_JOINED_LENGTH: Final = 4096
_BUDGET_PER_CHARACTER: Final = 16
_BUDGET_PER_WORD: Final = 6
_MIN_BUDGET: Final = 20_000


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One program with its arguments and its context in the line.

    `wrappers` are the programs around it. A command that `wraps` is such a program itself, with only its own words.
    `feed`, `file_inputs` and `word_inputs` are the sources of its input, its files and its words. `folder` is the
    line's working directory. It is not `sure` if some options were unknown. `inner` is the program that a wrapper runs.
    """

    argv: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    wraps: bool = False
    sets: tuple[tuple[str, str], ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    text: str | None = None
    feed: CommandInput | None = None
    word_inputs: tuple[CommandInput, ...] = ()
    file_inputs: tuple[CommandInput, ...] = ()
    folder: str = ""
    sure: bool = True
    recursive: bool = False
    inner: str = ""

    @property
    def program(self) -> str:
        return program_of(self.argv[0]) if self.argv else ""

    @property
    def input(self) -> str | None:
        return self.text if self.text is not None else self.feed.text if self.feed else None

    @property
    def is_fed(self) -> bool:
        """True if its standard input comes from the line, and not from a terminal."""
        return self.feed is not None or self.text is not None or bool(self.reads)


class UnreadableCommand(msgspec.Struct, frozen=True):
    """A command line that cannot be parsed; it `is_obfuscated` if that looks intentional."""

    text: str
    is_obfuscated: bool = False


ParsedCommand = Command | UnreadableCommand


class ParseBudget:
    """The budget for parsing one line, which bounds lines nested in lines."""

    def __init__(self, length: int) -> None:
        self._remaining = _BUDGET_PER_CHARACTER * length + _MIN_BUDGET

    def spend(self, length: int) -> bool:
        self._remaining -= length + 10
        return self._remaining >= 0


def make_parse_budget(line_or_words: str | Sequence[str]) -> ParseBudget:
    return ParseBudget(
        len(line_or_words) if isinstance(line_or_words, str) else sum(len(word) + 1 for word in line_or_words)
    )


def parse_commands(
    line_or_words: str | Sequence[str], text: str | None = None, budget: ParseBudget | None = None, depth: int = 0
) -> tuple[ParsedCommand, ...]:
    """Parse a line for a shell, or one command as a list of words; `text` is its standard input."""
    parser = _CommandParser(budget or make_parse_budget(line_or_words))
    if isinstance(line_or_words, str):
        return tuple(parser.line(line_or_words, depth, source=Command(argv=(), text=text)))
    return tuple(parser.command(Command(argv=tuple(line_or_words), text=text), depth)) if line_or_words else ()


def parse_plain_command(line_or_words: str | Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of a line that is certainly a single command, else None.

    A line with any character that has a meaning to a shell, even a quoted one, is not plain: then a person is asked.
    """
    if isinstance(line_or_words, str) and not _SHELL_CHARACTERS.isdisjoint(line_or_words):
        return None
    commands = parse_commands(line_or_words)
    if len(commands) != 1 or not isinstance(commands[0], Command) or commands[0].wrappers or commands[0].sets:
        return None
    words = shlex.split(line_or_words) if isinstance(line_or_words, str) else line_or_words
    return commands[0].argv if commands[0].argv == tuple(words) else None


class _CommandParser:
    def __init__(self, budget: ParseBudget) -> None:
        self._budget = budget

    def line(
        self, line: str, depth: int, parameters: Mapping[str, str] | None = None, source: Command | None = None
    ) -> Iterator[ParsedCommand]:
        """Parse a line. Its commands read the input of `source`, unless the line redirects them."""
        if depth > MAX_COMMAND_DEPTH or not self._budget.spend(len(line)):
            yield UnreadableCommand(line, is_obfuscated=True)
            return
        try:
            commands = parse_shell_line(line, parameters)
        except (MalformedShell, TooComplex) as error:
            yield UnreadableCommand(line, is_obfuscated=isinstance(error, TooComplex))
            return
        folder = ""
        for simple_command in commands:
            words_as_written = tuple(simple_command.words)
            for words in dict.fromkeys((words_as_written, tuple(simple_command.resolved_words) or words_as_written)):
                yield from self.command(_make_command(simple_command, words, folder, source), depth)
            if not simple_command.is_inner:
                folder = _follow_cd(folder, simple_command.resolved_words)

    def command(self, command: Command, depth: int) -> Iterator[ParsedCommand]:
        if not command.argv:
            if command.writes or command.sets:
                yield command
            return
        if depth > MAX_COMMAND_DEPTH or not self._budget.spend(_BUDGET_PER_WORD * len(command.argv)):
            yield UnreadableCommand(shlex.join(command.argv[:10]), is_obfuscated=True)
            return
        program = command.program
        if program in SHELLS:
            yield from self._shell(command, depth)
        elif program == "eval":
            yield command
            yield from self._parse_nested(command, self.line(" ".join(command.argv[1:]), depth + 1))
        elif program == "find":
            yield command
            for argv in _list_find_commands(command.argv):
                yield from self._parse_nested(
                    command, self.command(msgspec.structs.replace(command, argv=argv), depth + 1)
                )
        elif (inner := unwrap_command(command.argv)) is not None:
            yield from self._wrapper(command, inner, depth)
        else:
            yield command

    def _shell(self, command: Command, depth: int) -> Iterator[ParsedCommand]:
        """Parse what a shell runs: the line after `-c`, or its input."""
        code, arguments = split_shell_code(command.argv)
        yield command
        if code is not None:
            parameters = {
                "@": " ".join(arguments[1:]),
                "*": " ".join(arguments[1:]),
                **{str(position): word for position, word in enumerate(arguments)},
            }
            yield from self._parse_nested(command, self.line(code, depth + 1, parameters, command))
            return
        inputs = (
            [feed.text for feed in command.file_inputs] if {*arguments[:1], *command.reads} & {"/dev/fd/63"} else []
        )
        sources = inputs or [command.input]
        for text in sources:
            if text is not None:
                yield from self._parse_nested(command, self.line(text, depth + 1))

    def _wrapper(self, command: Command, inner: WrappedCommand, depth: int) -> Iterator[ParsedCommand]:
        program = command.program
        if not inner.argv and not inner.lines:
            yield command
            if program in _SHELL_OPENERS and command.is_fed:
                yield from self._parse_nested(
                    command, self.command(msgspec.structs.replace(command, argv=("sh",)), depth + 1)
                )
            return
        inner_program = program_of(inner.argv[0]) if inner.argv else ""
        yield msgspec.structs.replace(command, argv=inner.own, wraps=True, inner=inner_program)
        if not inner.sure:
            yield msgspec.structs.replace(command, sure=False)
        lines = list(inner.lines)
        argv = inner.argv
        if program in {"xargs", "gxargs"}:
            argv, *others = _list_xargs_commands(inner, command)
            lines += [shlex.join(words) for words in others]
        elif program in {"parallel", "sem", "env_parallel"}:
            lines, argv = [*lines, *_list_parallel_lines(inner.argv, command)], ()
        elif inner.joins and argv:
            lines, argv = [*lines, " ".join(argv)], ()
        for line in lines:
            yield from self._parse_nested(command, self.line(line, depth + 1, source=command))
        if argv:
            inner_command = msgspec.structs.replace(command, argv=argv, sets=(), writes=())
            yield from self._parse_nested(command, self.command(inner_command, depth + 1))

    def _parse_nested(self, outer: Command, commands: Iterator[ParsedCommand]) -> Iterator[ParsedCommand]:
        for command in commands:
            if isinstance(command, UnreadableCommand):
                yield command
            else:
                yield msgspec.structs.replace(command, wrappers=(outer.program, *command.wrappers))


def split_shell_code(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split a shell's arguments: the line after `-c`, if any, and the other words."""
    index, is_code, reads_input = 1, False, False
    while index < len(argv) and argv[index][:1] in {"-", "+"} and len(argv[index]) > 1:
        word = argv[index]
        index += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name == "--command":
                return (value if equals else argv[index] if index < len(argv) else ""), []
            index += name in _VALUED_SHELL_OPTIONS and not equals
        else:
            is_code = is_code or "c" in word
            reads_input = reads_input or "s" in word
            index += word.count("o") + word.count("O")
    remaining = list(argv[index:])
    if is_code:
        return (remaining[0] if remaining else ""), remaining[1:]
    return None, [] if reads_input else remaining


def _make_command(simple: SimpleCommand, words: tuple[str, ...], folder: str, source: Command | None) -> Command:
    inherits = simple.feed is None and not simple.texts and not simple.reads and source is not None
    input_owner = source if inherits and source is not None else simple
    unknown_feed = source.feed if source and UNKNOWN_WORDS in words else None
    return Command(
        argv=words,
        sets=tuple(simple.sets),
        writes=tuple(simple.writes),
        reads=tuple(input_owner.reads),
        text=input_owner.text,
        feed=input_owner.feed,
        word_inputs=(*simple.word_inputs, unknown_feed) if unknown_feed else tuple(simple.word_inputs),
        file_inputs=tuple(simple.file_inputs),
        folder=folder or (source.folder if source else ""),
        recursive=simple.recursive,
    )


def _follow_cd(folder: str, words: Sequence[str]) -> str:
    if not words or words[0] not in _CD_PROGRAMS:
        return folder
    target = next((word for word in words[1:] if not word.startswith("-")), "~")
    return posixpath.join(folder, target)


def _list_find_commands(argv: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each command that `find` runs, with the searched folders in place of `{}`."""
    roots = list_find_roots(argv)
    index = 1
    while index < len(argv):
        index += 1
        if argv[index - 1] not in EXEC_OPTIONS:
            continue
        words: list[str] = []
        while (
            index < len(argv)
            and argv[index] not in {";", "\\;"}
            and not (argv[index] == "+" and words[-1:] == list(roots)[-1:])
        ):
            words += roots if argv[index] == "{}" else [argv[index].replace("{}", roots[0])]
            index += 1
        if words:
            yield tuple(words)


def list_find_roots(argv: Sequence[str]) -> tuple[str, ...]:
    roots: list[str] = []
    for word in argv[1:]:
        if word in {"-H", "-L", "-P"}:
            continue
        if word.startswith(("-", "(", "!")) or word == ",":
            break
        roots.append(word)
    return sample_words(roots) or (".",)


def sample_words(words: Sequence[str], limit: int = 16) -> tuple[str, ...]:
    """Keep some of many words, and always those that name system or home folders."""
    if len(words) <= limit:
        return tuple(words)
    return (*words[:limit], *islice(filter(is_root, words[limit:]), limit))


def _list_xargs_commands(inner: WrappedCommand, command: Command) -> Iterator[tuple[str, ...]]:
    """Yield the commands of `xargs` with its input as words and as one word, or a marker if it is unknown."""
    values = _list_input_words(command)
    placeholder = ""
    for index, word in enumerate(inner.own):
        if word.startswith("-I"):
            placeholder = word[2:] or (inner.own[index + 1] if index + 1 < len(inner.own) else "")
        elif word.startswith(("-i", "--replace")):
            placeholder = word.removeprefix("-i").removeprefix("--replace").removeprefix("=") or "{}"
    argv = inner.argv or ("echo",)
    if not placeholder:
        yield (*argv, *values)
        return
    sample = sample_words(values)
    joined_words = " ".join(sample)[:_MAX_JOINED_LENGTH]
    yield tuple(
        piece
        for word in argv
        for piece in (sample if word == placeholder else (word.replace(placeholder, joined_words),))
    )
    if placeholder in argv:
        yield tuple(joined_words if word == placeholder else word.replace(placeholder, joined_words) for word in argv)


def _list_input_words(command: Command) -> tuple[str, ...]:
    input_text = command.input
    if input_text is not None:
        return sample_words(input_text.replace("\0", " ").split(), _MAX_WORDS)
    roots = command.feed.roots if command.feed else ()
    return (UNKNOWN_WORDS, *roots)


def _list_parallel_lines(argv: Sequence[str], command: Command) -> Iterator[str]:
    separator_at = next((index for index, word in enumerate(argv) if word.startswith(":::")), len(argv))
    line, values = " ".join(argv[:separator_at]), [word for word in argv[separator_at:] if not word.startswith(":::")]
    values = sample_words(values, _MAX_WORDS) or _list_input_words(command)
    if not line:
        yield "\n".join(values if argv[separator_at:] else [command.input or UNKNOWN_WORDS])
    elif "{" in line:
        joined_words = " ".join(sample_words(values))[:_MAX_JOINED_LENGTH]
        for placeholder in ("{}", "{.}", "{/}", "{//}", "{/.}", "{1}", "{2}"):
            line = line.replace(placeholder, joined_words)
        yield line
    else:
        yield f"{line} {' '.join(values)}"

"""What a command line really runs: every command in it, as words, with the wrappers around it taken off."""

import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from halter.guard.outputs import Feed
from halter.guard.places import is_root
from halter.guard.program_names import SHELLS, program_of
from halter.guard.shellsyntax import Malformed, Simple, TooTangled, read_line
from halter.guard.wrappers import Wrapped, wrapped

DEEPEST: Final = 12

UNKNOWN: Final = "$*"
"""Stands for words that a command is given while it runs."""

_SIGNS: Final = frozenset("`$\n\r;&|<>(){}!#\0")
EXECUTES: Final = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_MOVES: Final = frozenset({"cd", "pushd", "chdir"})
_OPENS_SHELL: Final = frozenset(
    {"ssh", "su", "sudo", "doas", "runuser", "script", "pkexec", "sg", "chroot", "unshare", "nsenter"}
)
_VALUED_BY_SHELLS: Final = frozenset({"--rcfile", "--init-file", "--init-command"})
_MOST_WORDS: Final = 1000
_LONGEST: Final = 4096
_EFFORT: Final = 16
_WORD: Final = 6
_LEAST_EFFORT: Final = 20_000


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One program with its arguments, and all that the line around it says of it.

    `wrappers` are the programs that it was wrapped in; one that `wraps` is such a program itself, with its own words
    alone. `feed`, `given` and `built` say where its input, its files and its words come from. `code` is where the code
    comes from that a shell runs. `folder` is where the line went before. If its options were not all known, it is not
    `sure` what it runs.
    """

    argv: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    wraps: bool = False
    sets: tuple[tuple[str, str], ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    text: str | None = None
    feed: Feed | None = None
    built: tuple[Feed, ...] = ()
    given: tuple[Feed, ...] = ()
    folder: str = ""
    sure: bool = True
    recursive: bool = False

    @property
    def program(self) -> str:
        """The name of the program, without the folder it lies in."""
        return program_of(self.argv[0]) if self.argv else ""

    @property
    def input(self) -> str | None:
        """What it reads from its standard input, where the line itself says that."""
        return self.text if self.text is not None else self.feed.text if self.feed else None

    @property
    def is_fed(self) -> bool:
        """Tell whether its standard input comes from the line, and not from a person."""
        return self.feed is not None or self.text is not None or bool(self.reads)


class Unreadable(msgspec.Struct, frozen=True):
    """A command line that cannot be taken apart, so that nobody can say what it does; perhaps it is meant to be so."""

    text: str
    tangled: bool = False


Parsed = Command | Unreadable


class Effort:
    """How much may be read for one line. Lines in lines in lines are read again and again; this ends it."""

    def __init__(self, length: int) -> None:
        self._left = _EFFORT * length + _LEAST_EFFORT

    def spend(self, length: int) -> bool:
        """Take what reading so much costs, and tell whether it was left."""
        self._left -= length + 10
        return self._left >= 0


def effort_for(given: str | Sequence[str]) -> Effort:
    """Allow for so much reading that every honest line is read."""
    return Effort(len(given) if isinstance(given, str) else sum(len(word) + 1 for word in given))


def commands(
    given: str | Sequence[str], text: str | None = None, effort: Effort | None = None, depth: int = 0
) -> tuple[Parsed, ...]:
    """Take apart a line for a shell, or one command as a list of words; `text` is its standard input."""
    unwrap = _Unwrap(effort or effort_for(given))
    if isinstance(given, str):
        return tuple(unwrap.line(given, depth, source=Command(argv=(), text=text)))
    return tuple(unwrap.command(Command(argv=tuple(given), text=text), depth)) if given else ()


def plain(given: str | Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of a command that is surely one command and nothing else.

    A line with any sign in it that a shell could read as more, even a quoted one, is not plain: then a person is asked.
    """
    if isinstance(given, str) and not _SIGNS.isdisjoint(given):
        return None
    found = commands(given)
    if len(found) != 1 or not isinstance(found[0], Command) or found[0].wrappers or found[0].sets:
        return None
    words = shlex.split(given) if isinstance(given, str) else given
    return found[0].argv if found[0].argv == tuple(words) else None


class _Unwrap:
    """Takes one line apart, and the lines in it."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort

    def line(
        self, line: str, depth: int, known: Mapping[str, str] | None = None, source: Command | None = None
    ) -> Iterator[Parsed]:
        """Take a line apart. Its commands read what `source` reads, unless the line gives them something else."""
        if depth > DEEPEST or not self._effort.spend(len(line)):
            yield Unreadable(line, tangled=True)
            return
        try:
            found = read_line(line, known)
        except (Malformed, TooTangled) as error:
            yield Unreadable(line, tangled=isinstance(error, TooTangled))
            return
        folder = ""
        for simple in found:
            for words in dict.fromkeys((simple.words, simple.meant or simple.words)):
                yield from self.command(_command(simple, words, folder, source), depth)
            if not simple.inner:
                folder = _moved(folder, simple.meant)

    def command(self, command: Command, depth: int) -> Iterator[Parsed]:
        """Take the wrappers off one command."""
        if not command.argv:
            if command.writes or command.sets:
                yield command
            return
        if depth > DEEPEST or not self._effort.spend(_WORD * len(command.argv)):
            yield Unreadable(shlex.join(command.argv[:10]), tangled=True)
            return
        program = command.program
        if program in SHELLS:
            yield from self._shell(command, depth)
        elif program == "eval":
            yield command
            yield from self._within(command, self.line(" ".join(command.argv[1:]), depth + 1))
        elif program == "find":
            yield command
            for argv in _executed(command.argv):
                yield from self._within(command, self.command(msgspec.structs.replace(command, argv=argv), depth + 1))
        elif (inner := wrapped(command.argv)) is not None:
            yield from self._wrapper(command, inner, depth)
        else:
            yield command

    def _shell(self, command: Command, depth: int) -> Iterator[Parsed]:
        """Take apart what a shell runs: the line after `-c`, or what it reads."""
        code, rest = shell_code(command.argv)
        yield command
        if code is not None:
            known = {
                "@": " ".join(rest[1:]),
                "*": " ".join(rest[1:]),
                **{str(at): word for at, word in enumerate(rest)},
            }
            yield from self._within(command, self.line(code, depth + 1, known, command))
            return
        given = [feed.text for feed in command.given] if {*rest[:1], *command.reads} & {"/dev/fd/63"} else []
        sources = given or [command.input]
        for text in sources:
            if text is not None:
                yield from self._within(command, self.line(text, depth + 1))

    def _wrapper(self, command: Command, inner: Wrapped, depth: int) -> Iterator[Parsed]:
        program = command.program
        if not inner.argv and not inner.lines:
            yield command
            if program in _OPENS_SHELL and command.is_fed:
                yield from self._within(
                    command, self.command(msgspec.structs.replace(command, argv=("sh",)), depth + 1)
                )
            return
        yield msgspec.structs.replace(command, argv=inner.own, wraps=True)
        if not inner.sure:
            yield msgspec.structs.replace(command, sure=False)
        lines = list(inner.lines)
        argv = inner.argv
        if program in {"xargs", "gxargs"}:
            argv, *others = _supplied(inner, command)
            lines += [shlex.join(other) for other in others]
        elif program in {"parallel", "sem", "env_parallel"}:
            lines, argv = [*lines, *_paralleled(inner.argv, command)], ()
        elif inner.joins and argv:
            lines, argv = [*lines, " ".join(argv)], ()
        for line in lines:
            yield from self._within(command, self.line(line, depth + 1, source=command))
        if argv:
            bare = msgspec.structs.replace(command, argv=argv, sets=(), writes=())
            yield from self._within(command, self.command(bare, depth + 1))

    def _within(self, outer: Command, found: Iterator[Parsed]) -> Iterator[Parsed]:
        for each in found:
            if isinstance(each, Unreadable):
                yield each
            else:
                yield msgspec.structs.replace(each, wrappers=(outer.program, *each.wrappers))


def shell_code(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell a shell's options from the rest: the line that it is given, if it is, and its further words."""
    at, is_code, reads = 1, False, False
    while at < len(argv) and argv[at][:1] in {"-", "+"} and len(argv[at]) > 1:
        word = argv[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name == "--command":
                return (value if equals else argv[at] if at < len(argv) else ""), []
            at += name in _VALUED_BY_SHELLS and not equals
        else:
            is_code = is_code or "c" in word
            reads = reads or "s" in word
            at += word.count("o") + word.count("O")
    rest = list(argv[at:])
    if is_code:
        return (rest[0] if rest else ""), rest[1:]
    return None, [] if reads else rest


def _command(simple: Simple, words: Sequence[str], folder: str, source: Command | None) -> Command:
    inherits = simple.feed is None and simple.text is None and not simple.reads and source is not None
    reader = source if inherits and source is not None else simple
    return Command(
        argv=tuple(words),
        sets=simple.sets,
        writes=simple.writes,
        reads=reader.reads,
        text=reader.text,
        feed=reader.feed,
        built=simple.built,
        given=simple.given,
        folder=folder or (source.folder if source else ""),
        recursive=simple.recursive,
    )


def _moved(folder: str, words: Sequence[str]) -> str:
    """Tell where a line is after a command: `cd` leads elsewhere."""
    if not words or words[0] not in _MOVES:
        return folder
    target = next((word for word in words[1:] if not word.startswith("-")), "~")
    return posixpath.join(folder, target)


def _executed(argv: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Find every command that `find` runs, with the places where it looks in place of `{}`."""
    roots = found_roots(argv)
    at = 1
    while at < len(argv):
        at += 1
        if argv[at - 1] not in EXECUTES:
            continue
        words: list[str] = []
        while (
            at < len(argv) and argv[at] not in {";", "\\;"} and not (argv[at] == "+" and words[-1:] == list(roots)[-1:])
        ):
            words += roots if argv[at] == "{}" else [argv[at].replace("{}", roots[0])]
            at += 1
        if words:
            yield tuple(words)


def found_roots(argv: Sequence[str]) -> tuple[str, ...]:
    """Tell where `find` looks."""
    roots: list[str] = []
    for word in argv[1:]:
        if word in {"-H", "-L", "-P"}:
            continue
        if word.startswith(("-", "(", "!")) or word == ",":
            break
        roots.append(word)
    return few(roots) or (".",)


def few(words: Sequence[str], most: int = 16) -> tuple[str, ...]:
    """Keep some of many words, and among them those that name whole systems."""
    if len(words) <= most:
        return tuple(words)
    return (*words[:most], *islice(filter(is_root, words[most:]), most))


def _supplied(inner: Wrapped, command: Command) -> Iterator[tuple[str, ...]]:
    """Put in what `xargs` reads, as the line shows it, or a sign that it is not known: as words, and as one word."""
    values = _values(command)
    token = ""
    for at, word in enumerate(inner.own):
        if word.startswith("-I"):
            token = word[2:] or (inner.own[at + 1] if at + 1 < len(inner.own) else "")
        elif word.startswith(("-i", "--replace")):
            token = word.removeprefix("-i").removeprefix("--replace").removeprefix("=") or "{}"
    argv = inner.argv or ("echo",)
    if not token:
        yield (*argv, *values)
        return
    some = few(values)
    joined = " ".join(some)[:_LONGEST]
    yield tuple(part for word in argv for part in (some if word == token else (word.replace(token, joined),)))
    if token in argv:
        yield tuple(joined if word == token else word.replace(token, joined) for word in argv)


def _values(command: Command) -> tuple[str, ...]:
    text = command.input
    if text is not None:
        return few(text.split(), _MOST_WORDS)
    roots = command.feed.roots if command.feed else ()
    return (UNKNOWN, *roots)


def _paralleled(argv: Sequence[str], command: Command) -> Iterator[str]:
    """Find the lines that `parallel` gives to a shell."""
    cut = next((at for at, word in enumerate(argv) if word.startswith(":::")), len(argv))
    line, values = " ".join(argv[:cut]), [word for word in argv[cut:] if not word.startswith(":::")]
    values = few(values, _MOST_WORDS) or _values(command)
    if not line:
        yield "\n".join(values if argv[cut:] else [command.input or UNKNOWN])
    elif "{" in line:
        joined = " ".join(few(values))[:_LONGEST]
        for token in ("{}", "{.}", "{/}", "{//}", "{/.}", "{1}", "{2}"):
            line = line.replace(token, joined)
        yield line
    else:
        yield f"{line} {' '.join(values)}"

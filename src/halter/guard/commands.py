"""What a command line really runs: every command in it, as words, with the wrappers around it taken off."""

import shlex
from collections.abc import Iterator, Sequence
from posixpath import basename
from typing import Final

import msgspec

DEEPEST: Final = 8

SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash", "ksh", "fish", "ash", "busybox"})
INTERPRETERS: Final = SHELLS | {"python", "python3", "perl", "ruby", "node", "php", "lua"}
RAISING: Final = frozenset({"sudo", "doas", "su", "pkexec"})

_SEPARATORS: Final = frozenset({";", "&", "&&", "||", "|", "|&", "(", ")", ";;", "{", "}", "!", "\n", "$"})
_SIGNS: Final = frozenset("`$\n\r;&|<>(){}!#\0")
_REDIRECTS: Final = frozenset({">", ">>", ">|", "&>", "&>>", "<>"})
_LEADING: Final = frozenset(
    {"then", "do", "else", "elif", "if", "while", "until", "time", "exec", "builtin", "command"}
)
_WITH_VALUE: Final = {
    "sudo": "ugpCDhRrT", "doas": "uC", "env": "uCS", "xargs": "IEdLnPsa", "timeout": "ks", "nice": "n",
    "ionice": "cnp", "stdbuf": "ioe", "watch": "nd", "nohup": "", "setsid": "", "parallel": "jIN", "strace": "eop",
    "flock": "wE", "chroot": "", "unshare": "", "time": "fo", "command": "", "exec": "a", "builtin": "", "su": "",
}  # fmt: skip
_SKIPPED: Final = {"timeout": 1, "flock": 1, "chroot": 1}


class Command(msgspec.Struct, frozen=True):
    """One program with its arguments, what it was wrapped in, and where its output goes."""

    argv: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    piped_from: str = ""

    @property
    def program(self) -> str:
        """The name of the program, without the folder it lies in."""
        return basename(self.argv[0]) if self.argv else ""


class Unreadable(msgspec.Struct, frozen=True):
    """A command line that cannot be taken apart, so that nobody can say what it does."""

    text: str


Parsed = Command | Unreadable


def commands(given: str | Sequence[str]) -> tuple[Parsed, ...]:
    """Take apart a line for a shell, or one command as a list of words."""
    if isinstance(given, str):
        return tuple(_in_line(given, 0))
    return tuple(_unwrapped(Command(tuple(given)), 0)) if given else ()


def plain(given: str | Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of a command that is surely one command and nothing else.

    A line with any sign in it that a shell could read as more, even a quoted one, is not plain: then a person is asked.
    """
    if isinstance(given, str) and not _SIGNS.isdisjoint(given):
        return None
    found = commands(given)
    if len(found) != 1 or not isinstance(found[0], Command) or found[0].wrappers:
        return None
    words = shlex.split(given) if isinstance(given, str) else given
    return found[0].argv if found[0].argv == tuple(words) else None


def _in_line(line: str, depth: int) -> Iterator[Parsed]:
    lexer = shlex.shlex(line.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError:
        yield Unreadable(line)
        return
    if depth > DEEPEST:
        yield Unreadable(line)
        return
    if "`" in line:
        yield from _in_line(line.replace("`", " ; "), depth + 1)
    for part in _substituted(words):
        yield from _in_line(part, depth + 1)
    for command in _split(words):
        yield from _unwrapped(command, depth)


def _substituted(words: Sequence[str]) -> Iterator[str]:
    """Find commands whose output becomes part of a word."""
    for word in words:
        if "$(" in word:
            yield word[word.index("$(") + 2 :].rstrip(")")
        if "`" in word:
            yield word.replace("`", " ; ")


def _split(words: Sequence[str]) -> Iterator[Command]:
    """Cut a line at its operators, and take its redirections out."""
    argv: list[str] = []
    writes: list[str] = []
    source = ""
    rest = iter((*words, ";"))
    for word in rest:
        if word in _REDIRECTS or (word.endswith(">") and word[:-1].isdigit()):
            writes.append(next(rest, ""))
        elif word in _SEPARATORS or _separates(word):
            if argv or writes:
                command = Command(tuple(argv), writes=tuple(writes), piped_from=source)
                yield command
                source = command.program if word in {"|", "|&"} else ""
            argv, writes = [], []
        else:
            argv.append(word)


def _separates(word: str) -> bool:
    """Tell operators that the lexer joined, and those that begin a process whose output is read as a file."""
    signs = set(word)
    return bool(word) and (signs <= set(";&|()") or (signs <= set(";&|()<>") and "(" in signs))


def _unwrapped(command: Command, depth: int) -> Iterator[Parsed]:
    argv = command.argv
    while argv and (_assigns(argv[0]) or argv[0] in _LEADING - {"time", "exec", "command", "builtin"}):
        argv = argv[1:]
    bare = msgspec.structs.replace(command, argv=argv)
    if not argv:
        if command.writes:
            yield bare
        return
    if depth > DEEPEST:
        yield Unreadable(shlex.join(argv))
        return
    yield from _inner(bare, depth)


def _inner(command: Command, depth: int) -> Iterator[Parsed]:
    program, argv = command.program, command.argv
    if program in SHELLS and (line := _code(argv)) is not None:
        for each in _in_line(line, depth + 1):
            yield _within(each, command)
    elif program == "eval":
        yield from _in_line(" ".join(argv[1:]), depth + 1)
    elif program == "su" and (line := _code(argv)) is not None:
        for each in _in_line(line, depth + 1):
            yield _within(each, command)
    elif program in _WITH_VALUE and (inner := _after_options(program, argv)):
        for each in _unwrapped(Command(inner, piped_from=command.piped_from), depth + 1):
            yield _within(each, command)
    elif program == "find" and "-exec" in argv:
        yield command
        inner = argv[argv.index("-exec") + 1 :]
        yield from (_within(each, command) for each in _unwrapped(Command(inner), depth + 1))
    else:
        yield command


def _within(inner: Parsed, outer: Command) -> Parsed:
    if isinstance(inner, Unreadable):
        return inner
    return msgspec.structs.replace(
        inner, wrappers=(outer.program, *outer.wrappers, *inner.wrappers), writes=(*outer.writes, *inner.writes)
    )


def _code(argv: Sequence[str]) -> str | None:
    """Find the line that a shell is given with `-c`, also among joined flags as in `-lc`."""
    for index, word in enumerate(argv[1:], 1):
        if word.startswith("-") and not word.startswith("--") and "c" in word:
            return argv[index + 1] if index + 1 < len(argv) else ""
    return None


def _after_options(program: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Skip a wrapper's own options, and return the command that it runs."""
    valued = _WITH_VALUE[program]
    at = 1
    while at < len(argv) and (argv[at].startswith("-") or _assigns(argv[at])):
        word = argv[at]
        at += 2 if word.startswith("-") and len(word) == len("-x") and word[1] in valued else 1
        if word == "--":
            break
    return tuple(argv[at + _SKIPPED.get(program, 0) :])


def _assigns(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()

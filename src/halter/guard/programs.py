"""How risky a command line is, by the programs it runs and by their words."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from halter.guard.commands import Command, Effort, Unreadable, commands, effort_for
from halter.guard.judges.code import CODE, INTERPRETERS, code_risk, interpreter_risk, is_interpreter, shell_risk
from halter.guard.judges.files import FILES
from halter.guard.judges.found import Found, Judge, Mentions, Runs, deletes, has, is_path, operands, values_of
from halter.guard.judges.network import NETWORK
from halter.guard.judges.repository import REPOSITORY, setting_risk
from halter.guard.judges.services import SERVICES, WRAPPING, written_by_wrapper
from halter.guard.places import Finding, is_policy, path_risk
from halter.guard.program_names import DESTROYERS, RAISING, READERS, SHELLS, program_of
from halter.guard.sql import is_statement, sql_risk
from halter.guard.wrappers import NAMES

_PROGRAMS: Final[Mapping[str, Judge]] = {**FILES, **CODE, **REPOSITORY, **NETWORK, **SERVICES}
_DANGEROUS: Final = DESTROYERS | SHELLS | NAMES | INTERPRETERS | {"eval", "source", "mkfs"}
_MOST_MENTIONS: Final = 16
_MOST_WORDS: Final = 500
_TANGLED: Final = "a command line too tangled to be taken apart"

PAGERS: Final = frozenset({"less", "more", "most", "zless", "man"})
_PERSISTING: Final = frozenset({"nsenter", "chroot"})
_WRITING_OPTIONS: Final[Mapping[str, Sequence[str]]] = {"sort": ("-o", "--output"), "tree": ("-o",), "iconv": ("-o",)}
_RUNNING_OPTIONS: Final[Mapping[str, Sequence[str]]] = {
    "sort": ("--compress-program",),
    "rg": ("--pre", "--hostname-bin"),
    "ag": ("--pager",),
    "ack": ("--pager",),
    "man": ("-P", "--pager", "-H", "--html"),
    "bat": ("--pager",),
    "less": ("--lesskey-src",),
}
_OPTION_THAT_RUNS: Final = re.compile(
    r"--?(?:[\w-]*-)?(?:exec|command|cmd|pager|editor|shell|program|rsh|hook|preview)"
)
_RUN_BY_OTHERS: Final = re.compile(
    r"(?:\w+_)?(?:PAGER|EDITOR|BROWSER|COMMAND|ASKPASS|LESSOPEN|LESSCLOSE)|VISUAL|SHELL|GIT_SSH|GIT_EXTERNAL_DIFF|PS4|TAR_OPTIONS"
)
_FORMATS: Final = re.compile(r"mkfs.*|newfs.*|mke2fs|mkdosfs|mkntfs|mkexfatfs|mkudffs|mkreiserfs")
_ANYBODYS: Final = re.compile(r"(?:^|:)(?:\.{0,2}(?=:|$)|\./|/tmp|/var/tmp|/dev/shm)")
"""A folder in a search path to which anybody may write, or which is wherever one is."""
_TOLD_BY_VARIABLE: Final = re.compile(r"GIT_CONFIG_(KEY|VALUE)_\d+")

_LOADED_BY_OTHERS: Final = frozenset(
    {
        *("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES", "BASH_ENV", "ENV", "ZDOTDIR", "IFS"),
        *("PERL5OPT", "PERL5LIB", "RUBYOPT", "RUBYLIB", "PYTHONSTARTUP", "PYTHONHOME", "GIT_CONFIG_PARAMETERS"),
        *("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_EXEC_PATH", "GIT_TEMPLATE_DIR", "JAVA_TOOL_OPTIONS"),
    }
)


def line_risk(given: str | Sequence[str], text: str | None = None) -> Iterator[Finding]:
    """Judge a line for a shell, or a command as a list of words, whose standard input is `text`."""
    effort = effort_for(given)
    if not isinstance(given, str) and len(given) == 1 and " " in given[0]:
        yield from _judge(given[0], text, effort, 0)
    yield from _judge(given, text, effort, 0)


def code_line_risk(code: str) -> Iterator[Finding]:
    """Judge code of a language that is not known."""
    yield "HIGH", "code is run that was not looked at"
    yield from _resolved(code_risk(code), effort_for(code), 0)


def _judge(given: str | Sequence[str], text: str | None, effort: Effort, depth: int) -> Iterator[Finding]:
    written: set[str] = set()
    for command in commands(given, text, effort, depth):
        if isinstance(command, Unreadable):
            yield _unreadable(command)
        else:
            yield from _resolved(command_risk(command), effort, depth)
            yield from _run_after_written(command, written)


def _unreadable(line: Unreadable) -> Finding:
    """Judge what cannot be read: a slip of the pen is HIGH, what seems made not to be read is CRITICAL."""
    return ("CRITICAL", _TANGLED) if line.tangled else ("HIGH", "a command line that cannot be taken apart")


def _resolved(found: Iterator[Found], effort: Effort, depth: int) -> Iterator[Finding]:
    """Judge in turn what a command runs besides."""
    for each in found:
        match each:
            case Runs(given):
                yield from _judge(given, None, effort, depth + 1) if given else ()
            case Mentions(words):
                yield from _mentioned(words, effort, depth + 1)
            case _:
                yield each


def _mentioned(words: Sequence[str], effort: Effort, depth: int) -> Iterator[Finding]:
    """Judge words as if those that name a dangerous program began a command, and texts that do as if they were lines.

    Every place where a command can begin is looked at here, so nothing that is found looks for further ones.
    """
    starts = [at for at, word in enumerate(words) if at + 1 < len(words) and _is_dangerous(word)]
    lines = [word for word in words if " " in word.strip() and _is_dangerous(word.split(maxsplit=1)[0])]
    if max(len(starts), len(lines)) > _MOST_MENTIONS or (starts and len(words) > _MOST_WORDS):
        yield "CRITICAL", _TANGLED
        return
    for at in starts:
        for command in commands(words[at:], None, effort, depth):
            if isinstance(command, Unreadable):
                yield _unreadable(command)
            else:
                yield from _resolved(command_risk(command, looks_further=False), effort, depth)
    for line in lines:
        yield from _judge(line, None, effort, depth)


def _is_dangerous(word: str) -> bool:
    program = program_of(word)
    return program in _DANGEROUS or is_interpreter(program) or _FORMATS.fullmatch(program) is not None


def _run_after_written(command: Command, written: set[str]) -> Iterator[Finding]:
    """Judge a line that writes a file and then runs it."""
    runs = command.argv if command.program in SHELLS or command.program in {".", "source"} else command.argv[:1]
    for word in runs:
        if word.removeprefix("./") in written:
            yield "HIGH", f"{word} is run by the line that writes it"
    named = values_of(command.argv[1:], "-o", "-O", "--output") if command.program in NETWORK else ()
    copied = operands(command.argv[1:])[-1:] if command.program in {"cp", "mv", "install", "tee"} else ()
    written.update(path.removeprefix("./") for path in (*command.writes, *named, *copied) if path)


def command_risk(command: Command, *, looks_further: bool = True) -> Iterator[Found]:
    """Judge one command: its program, its wrappers, its variables, where its input comes from and its output goes."""
    for path in command.writes:
        yield from path_risk(path, "write")
    for path in command.reads:
        yield from path_risk(path, "read")
    for name, value in command.sets:
        yield from _variable_risk(name, value)
    if command.recursive:
        yield "CRITICAL", f"{command.program} starts itself again and again"
    program = command.program
    raised = RAISING.intersection({program, *command.wrappers})
    if raised:
        yield "HIGH", f"{program} runs with all rights"
    if not program:
        return
    judge = _wrapper_risk if command.wraps else _judge_for(program) if command.sure else None
    if judge:
        yield from judge(command)
        return
    yield "MEDIUM", f"{program} is not known"
    if looks_further:
        yield from _unknown_risk(command)


def _unknown_risk(command: Command) -> Iterator[Found]:
    """Judge a program that is not known by its words: what they would run, delete and write."""
    words = command.argv[1:]
    yield Mentions(tuple(word.lstrip("!:|") for word in words))
    yield from _options_that_run(command)
    if verb := deletes(words):
        yield "HIGH", f"{command.program} {verb} deletes something"
    for path in values_of(words, "-out", "-o", "--out", "--output", "--output-file"):
        yield from path_risk(path, "write")
    for word in words:
        if word.startswith("/dev/") or is_policy(word):
            yield from path_risk(word, "write")
        if set(word) & set("('\"`"):
            yield from code_risk(word)
        if is_statement(word):
            yield from sql_risk(word)
    for code in values_of(words, "-e", "-E", "--eval", "--execute", "--expr"):
        if set(code) & set("(;`!{"):
            yield "HIGH", f"{command.program} is given code"


def _judge_for(program: str) -> Judge | None:
    if "$" in program or "`" in program or (set("*?[{") & set(program) and program not in {"[", "[["}):
        return _later_risk
    if program in SHELLS:
        return shell_risk
    if program in _PROGRAMS:
        return _PROGRAMS[program]
    if is_interpreter(program):
        return interpreter_risk
    if _FORMATS.fullmatch(program):
        return _format_risk
    return _reader_risk if program in READERS else None


def _later_risk(command: Command) -> Iterator[Found]:
    """Judge a program whose name is put together while the line runs."""
    fetched = any(feed.fetched for feed in command.built)
    yield "CRITICAL" if fetched else "HIGH", f"{command.program} is only known while it runs"
    yield Mentions(command.argv)


def _format_risk(command: Command) -> Iterator[Found]:
    yield "CRITICAL", f"{command.program} changes whole disks"


def _options_that_run(command: Command) -> Iterator[Found]:
    """Find what a program that is not known is told to run by its options."""
    for at, word in enumerate(command.argv[1:], 1):
        name, equals, value = word.partition("=")
        if _OPTION_THAT_RUNS.fullmatch(name):
            yield Runs(value if equals else command.argv[at + 1] if at + 1 < len(command.argv) else "")


def _wrapper_risk(command: Command) -> Iterator[Found]:
    """Judge a wrapper by itself; what it runs is judged apart."""
    program = command.program
    if program in WRAPPING:
        yield from WRAPPING[program](command)
    elif program in NETWORK:
        yield from NETWORK[program](command)
    elif program in _PERSISTING:
        yield "HIGH", f"{program} leads into another system"
    for word in command.argv[1:]:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            yield from _variable_risk(name, value)
    yield from written_by_wrapper(command)


def _reader_risk(command: Command) -> Iterator[Found]:
    program, words = command.program, command.argv[1:]
    for path in operands(words):
        if is_path(path) and command.program not in {"echo", "printf", "cd", "pushd"}:
            yield from path_risk(path, "read")
    written = operands(words)[1:] if program == "xxd" and has(words, "r", "-revert") else []
    for path in (*written, *values_of(words, *_WRITING_OPTIONS.get(program, ()))):
        yield from path_risk(path, "write")
    typed = [word for word in words if word.startswith("+") and set(word) & set("!|")] if program in PAGERS else []
    typed = [re.split("[!|]", word, maxsplit=1)[1] for word in typed]
    for line in (*typed, *values_of(words, *_RUNNING_OPTIONS.get(program, ()))):
        yield "HIGH", f"{program} runs a program"
        yield Runs(line)


def _variable_risk(name: str, value: str) -> Iterator[Found]:
    """Judge a variable that makes other programs run something."""
    told = _TOLD_BY_VARIABLE.fullmatch(name)
    if told:
        yield from setting_risk(value, "") if told[1] == "KEY" else (Runs(value.removeprefix("!")),)
    elif name.startswith("HALTER_"):
        yield "HIGH", f"{name} says who decides, or where it is kept"
    elif name == "PATH" and _ANYBODYS.search(value):
        yield "HIGH", "programs are looked for where anybody can put some"
    elif name in _LOADED_BY_OTHERS:
        yield "HIGH", f"{name} makes other programs run something"
    elif _RUN_BY_OTHERS.fullmatch(name):
        yield Runs(value)
    elif name == "NODE_OPTIONS" and re.search(r"-r\b|--(?:require|import|loader|experimental-loader)", value):
        yield "HIGH", f"{name} makes other programs run something"

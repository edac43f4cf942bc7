"""The risk of command lines, by program."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from halter.core.text import make_word_set
from halter.risk.commands import Command, ParseBudget, UnreadableCommand, make_parse_budget, parse_commands
from halter.risk.file_programs import FILE_JUDGES
from halter.risk.interpreters import CODE_JUDGES, INTERPRETERS, code_risk, interpreter_risk, is_interpreter, shell_risk
from halter.risk.network_programs import NETWORK_JUDGES
from halter.risk.places import RiskFinding, is_policy, is_statement, path_risk, sql_risk
from halter.risk.program_names import DESTROYERS, PRIVILEGE_RAISERS, READERS, SHELLS, program_of
from halter.risk.programs import (
    Judge,
    JudgeFinding,
    MentionedWords,
    NestedCommand,
    find_deleting_word,
    find_reaching_word,
    has_flag,
    is_path,
    list_operands,
    list_option_values,
    name_script,
)
from halter.risk.repository_programs import REPOSITORY_JUDGES, setting_risk
from halter.risk.services import SERVICE_JUDGES, WRAPPER_JUDGES, wrapper_output_risk
from halter.risk.wrappers import WRAPPER_NAMES

_PROGRAMS: Final[Mapping[str, Judge]] = {
    **FILE_JUDGES,
    **CODE_JUDGES,
    **REPOSITORY_JUDGES,
    **NETWORK_JUDGES,
    **SERVICE_JUDGES,
}
_DANGEROUS: Final = (
    DESTROYERS | SHELLS | WRAPPER_NAMES | INTERPRETERS | SERVICE_JUDGES.keys() | {"eval", "source", "mkfs"}
)
_MAX_MENTIONS: Final = 16
_MAX_WORDS: Final = 500
_TOO_COMPLEX_REASON: Final = "a command line too complex to parse"

PAGERS: Final = frozenset({"less", "more", "most", "zless", "man"})
_NAMESPACE_PROGRAMS: Final = frozenset({"nsenter", "chroot"})
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
_PROGRAM_VARIABLE: Final = re.compile(
    r"(?:\w+_)?(?:PAGER|EDITOR|BROWSER|COMMAND|ASKPASS|LESSOPEN|LESSCLOSE)|VISUAL|SHELL|GIT_SSH|GIT_EXTERNAL_DIFF|PS4|TAR_OPTIONS"
)
_FORMATTING_PROGRAM: Final = re.compile(r"mkfs.*|newfs.*|mke2fs|mkdosfs|mkntfs|mkexfatfs|mkudffs|mkreiserfs")
_STORING_FLAGS: Final = re.compile(r"-[a-zA-Z]+[oO]")
_SHARED_PATH_FOLDER: Final = re.compile(r"(?:^|:)(?:\.{0,2}(?=:|$)|\./|/tmp|/var/tmp|/dev/shm)")
"""A folder in a search path that is relative or that anyone may write to."""
_GIT_CONFIG_VARIABLE: Final = re.compile(r"GIT_CONFIG_(KEY|VALUE)_\d+")

_LOADING_VARIABLES: Final = make_word_set(
    "LD_PRELOAD LD_AUDIT LD_LIBRARY_PATH DYLD_INSERT_LIBRARIES BASH_ENV ENV ZDOTDIR IFS PERL5OPT PERL5LIB RUBYOPT "
    "RUBYLIB PYTHONSTARTUP PYTHONHOME GIT_CONFIG_PARAMETERS GIT_CONFIG_GLOBAL GIT_CONFIG_SYSTEM GIT_EXEC_PATH "
    "GIT_TEMPLATE_DIR JAVA_TOOL_OPTIONS"
)
_SPLITTING_PROGRAMS: Final = frozenset({"read", "mapfile", "readarray"})
"""Programs that split their input by IFS, and run nothing."""
_HOOK_VARIABLES: Final = make_word_set(
    "CLAUDE_CODE_SIMPLE CLAUDE_CODE_PERSONAL_HOOKS_OFF CLAUDE_CONFIG_DIR CODEX_HOME GEMINI_CLI_HOME CLAUDECODE "
    "GEMINI_CLI CURSOR_AGENT"
)
"""Variables with which another agent runs without its hooks, or its child processes without its marker."""


def line_risk(line_or_words: str | Sequence[str], text: str | None = None) -> Iterator[RiskFinding]:
    """Judge a line for a shell, or a command as a list of words, with the standard input `text`."""
    budget = make_parse_budget(line_or_words)
    if not isinstance(line_or_words, str) and len(line_or_words) == 1 and " " in line_or_words[0]:
        yield from _judge_line(line_or_words[0], text, budget, 0)
    yield from _judge_line(line_or_words, text, budget, 0)


def code_line_risk(code: str) -> Iterator[RiskFinding]:
    yield "HIGH", "runs code that was not inspected"
    yield from _judge_nested(code_risk(code), make_parse_budget(code), 0)


def _judge_line(
    line_or_words: str | Sequence[str], text: str | None, budget: ParseBudget, depth: int
) -> Iterator[RiskFinding]:
    written_paths: set[str] = set()
    for command in parse_commands(line_or_words, text, budget, depth):
        if isinstance(command, UnreadableCommand):
            yield _unreadable_risk(command)
        else:
            yield from _judge_nested(command_risk(command), budget, depth)
            executed_words = (
                command.argv if command.program in SHELLS or command.program in {".", "source"} else command.argv[:1]
            )
            for word in executed_words:
                if word.removeprefix("./") in written_paths:
                    yield "HIGH", f"runs {word}, which the same line writes"
            output_paths = _list_fetched_files(command.argv[1:]) if command.program in NETWORK_JUDGES else ()
            copy_targets = (
                list_operands(command.argv[1:])[-1:] if command.program in {"cp", "mv", "install", "tee"} else ()
            )
            written_paths.update(
                path.removeprefix("./") for path in (*command.writes, *output_paths, *copy_targets) if path
            )


def _list_fetched_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the files in which a program may store what it fetches: as an option says, or named as at its source."""
    yield from list_option_values(words, "-o", "-O", "--output")
    for word, following in pairwise((*words, "")):
        if _STORING_FLAGS.fullmatch(word):
            yield following
        elif "://" in word:
            yield program_of(word.partition("?")[0])


def _unreadable_risk(line: UnreadableCommand) -> RiskFinding:
    """Judge an unparsable line: a typo is HIGH, apparent obfuscation is CRITICAL."""
    return ("CRITICAL", _TOO_COMPLEX_REASON) if line.is_obfuscated else ("HIGH", "a command line that cannot be parsed")


def _judge_nested(findings: Iterator[JudgeFinding], budget: ParseBudget, depth: int) -> Iterator[RiskFinding]:
    for finding in findings:
        match finding:
            case NestedCommand(nested):
                yield from _judge_line(nested, None, budget, depth + 1) if nested else ()
            case MentionedWords(words):
                yield from _mention_risk(words, budget, depth + 1)
            case _:
                yield finding


def _mention_risk(words: Sequence[str], budget: ParseBudget, depth: int) -> Iterator[RiskFinding]:
    """Judge words as if each dangerous program started a command, and texts that start with one as lines.

    All possible starts of a command are tried here, so the words of a command that ends this list are not searched
    again; those of a command that was written inside a word are.
    """
    starts = [start_at for start_at, word in enumerate(words) if start_at + 1 < len(words) and _is_dangerous(word)]
    lines = [word for word in words if " " in word.strip() and _is_dangerous(word.split(maxsplit=1)[0])]
    if max(len(starts), len(lines)) > _MAX_MENTIONS or (starts and len(words) > _MAX_WORDS):
        yield "CRITICAL", _TOO_COMPLEX_REASON
        return
    for start_at in starts:
        for command in parse_commands(words[start_at:], None, budget, depth):
            if isinstance(command, UnreadableCommand):
                yield _unreadable_risk(command)
            else:
                is_covered = tuple(words[-len(command.argv) :]) == tuple(command.argv)
                yield from _judge_nested(command_risk(command, looks_further=not is_covered), budget, depth)
    for line in lines:
        yield from _judge_line(line, None, budget, depth)


def _is_dangerous(word: str) -> bool:
    program = program_of(word)
    return program in _DANGEROUS or is_interpreter(program) or _FORMATTING_PROGRAM.fullmatch(program) is not None


def command_risk(command: Command, *, looks_further: bool = True) -> Iterator[JudgeFinding]:
    for path in command.writes:
        yield from path_risk(path, "write")
    for path in command.reads:
        yield from path_risk(path, "read")
    for name, value in command.sets:
        if name != "IFS" or command.program not in _SPLITTING_PROGRAMS:
            yield from _variable_risk(name, value)
    if command.recursive:
        yield "CRITICAL", f"{command.program} calls itself endlessly"
    program = command.program
    raises_privileges = PRIVILEGE_RAISERS.intersection({program, *command.wrappers})
    if raises_privileges:
        yield "HIGH", f"{program} runs with root privileges"
    if not program:
        return
    judge = _wrapper_risk if command.wraps else _judge_for(program) if command.sure else None
    if judge:
        yield from judge(command)
        return
    yield "MEDIUM", f"{program} is an unknown program"
    if looks_further:
        yield from _unknown_risk(command)


def _unknown_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge an unknown program by what its words could run, delete and write."""
    words = command.argv[1:]
    yield MentionedWords(tuple(word.lstrip("!:|") for word in words))
    yield from _options_that_run(command)
    if any(feed.fetched for feed in command.file_inputs):
        yield "CRITICAL", f"{command.program} may run downloaded code"
    if verb := find_deleting_word(words):
        yield "HIGH", f"{command.program} {verb} may delete data"
    if verb := find_reaching_word((name_script(command.program), *words)):
        yield "HIGH", f"{command.program} {verb} may publish or change rights"
    for path in list_option_values(words, "-out", "-o", "--out", "--output", "--output-file"):
        yield from path_risk(path, "write")
    for word in words:
        if word.startswith("/dev/") or is_policy(word):
            yield from path_risk(word, "write")
        if set(word) & set("('\"`"):
            yield from code_risk(word)
        if is_statement(word):
            yield from sql_risk(word)
    for code in list_option_values(words, "-e", "-E", "--eval", "--execute", "--expr"):
        if set(code.replace("${", "")) & set("(;`!{"):
            yield "HIGH", f"{command.program} runs code from its arguments"


def _judge_for(program: str) -> Judge | None:
    if "$" in program or "`" in program or (set("*?[{") & set(program) and program not in {"[", "[["}):
        return _dynamic_program_risk
    if program in SHELLS:
        return shell_risk
    if program in _PROGRAMS:
        return _PROGRAMS[program]
    if is_interpreter(program):
        return interpreter_risk
    if _FORMATTING_PROGRAM.fullmatch(program):
        return _format_risk
    return _reader_risk if program in READERS else None


def _dynamic_program_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge a program whose name is known only at run time."""
    is_fetched = any(feed.fetched for feed in command.word_inputs)
    yield "CRITICAL" if is_fetched else "HIGH", f"{command.program} is known only at run time"
    yield MentionedWords(command.argv)


def _format_risk(command: Command) -> Iterator[JudgeFinding]:
    yield "CRITICAL", f"{command.program} changes whole disks"


def _options_that_run(command: Command) -> Iterator[JudgeFinding]:
    """Find the commands in the options of an unknown program."""
    for index, word in enumerate(command.argv[1:], 1):
        name, equals, value = word.partition("=")
        if _OPTION_THAT_RUNS.fullmatch(name):
            yield NestedCommand(value if equals else command.argv[index + 1] if index + 1 < len(command.argv) else "")


def _wrapper_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge a wrapper; what it runs is judged separately."""
    program = command.program
    if program in WRAPPER_JUDGES:
        yield from WRAPPER_JUDGES[program](command)
    elif program in NETWORK_JUDGES:
        yield from NETWORK_JUDGES[program](command)
    elif program in _NAMESPACE_PROGRAMS:
        yield "HIGH", f"{program} enters another system"
    for word in command.argv[1:]:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            yield from _variable_risk(name, value)
    yield from wrapper_output_risk(command)


def _reader_risk(command: Command) -> Iterator[JudgeFinding]:
    program, words = command.program, command.argv[1:]
    for path in list_operands(words):
        if is_path(path) and command.program not in {"echo", "printf", "cd", "pushd"}:
            yield from path_risk(path, "read")
    output_paths = list_operands(words)[1:] if program == "xxd" and has_flag(words, "r", "-revert") else []
    for path in (*output_paths, *list_option_values(words, *_WRITING_OPTIONS.get(program, ()))):
        yield from path_risk(path, "write")
    typed_lines = (
        [word for word in words if word.startswith("+") and set(word) & set("!|")] if program in PAGERS else []
    )
    typed_lines = [re.split("[!|]", word, maxsplit=1)[1] for word in typed_lines]
    for line in (*typed_lines, *list_option_values(words, *_RUNNING_OPTIONS.get(program, ()))):
        yield "HIGH", f"{program} runs a program"
        yield NestedCommand(line)


def _variable_risk(name: str, value: str) -> Iterator[JudgeFinding]:
    """Judge a variable that makes other programs run something."""
    match = _GIT_CONFIG_VARIABLE.fullmatch(name)
    if match:
        yield from setting_risk(value, "") if match[1] == "KEY" else (NestedCommand(value.removeprefix("!")),)
    elif name.startswith("HALTER_"):
        yield "HIGH", f"{name} configures Halter itself"
    elif name in _HOOK_VARIABLES:
        yield "HIGH", f"{name} can disable hooks"
    elif name == "PATH" and _SHARED_PATH_FOLDER.search(value):
        yield "HIGH", "searches for programs in a folder that anyone can write to"
    elif name in _LOADING_VARIABLES:
        yield "HIGH", f"{name} makes other programs run code"
    elif _PROGRAM_VARIABLE.fullmatch(name):
        yield NestedCommand(value)
    elif name == "NODE_OPTIONS" and re.search(r"-r\b|--(?:require|import|loader|experimental-loader)", value):
        yield "HIGH", f"{name} makes other programs run code"

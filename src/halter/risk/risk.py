"""The risk of one call, from its parsed arguments: commands, paths, hosts, statements, methods, amounts, recipients.

Text that only mentions something has no risk: a search for `rm -rf /` deletes nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from halter.core.text import word_set
from halter.core.tools import Effect, ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.risk.commands import (
    WRAPPER_NAMES,
    Command,
    ParseBudget,
    UnreadableCommand,
    make_parse_budget,
    parse_commands,
)
from halter.risk.interpreters import CODE_JUDGES, INTERPRETERS, code_risk, interpreter_risk, is_interpreter, shell_risk
from halter.risk.places import (
    RiskFinding,
    graphql_risk,
    host_risk,
    is_policy,
    is_statement,
    looks_like_sql,
    path_risk,
    sql_risk,
    url_risk,
)
from halter.risk.programs import (
    FILE_JUDGES,
    NETWORK_JUDGES,
    REPOSITORY_JUDGES,
    Judge,
    JudgeFinding,
    MentionedWords,
    NestedCommand,
    find_deleting_word,
    has_flag,
    is_path,
    list_operands,
    list_option_values,
    setting_risk,
)
from halter.risk.services import SERVICE_JUDGES, WRAPPER_JUDGES, wrapper_output_risk
from halter.risk.shell_syntax import DESTROYERS, PRIVILEGE_RAISERS, READERS, SHELLS, program_of

_PROGRAMS: Final[Mapping[str, Judge]] = {
    **FILE_JUDGES,
    **CODE_JUDGES,
    **REPOSITORY_JUDGES,
    **NETWORK_JUDGES,
    **SERVICE_JUDGES,
}
_DANGEROUS: Final = DESTROYERS | SHELLS | WRAPPER_NAMES | INTERPRETERS | {"eval", "source", "mkfs"}
_MOST_MENTIONS: Final = 16
_MOST_WORDS: Final = 500
_TOO_COMPLEX_REASON: Final = "a command line too complex to parse"

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
_SHARED_PATH_FOLDER: Final = re.compile(r"(?:^|:)(?:\.{0,2}(?=:|$)|\./|/tmp|/var/tmp|/dev/shm)")
"""A folder in a search path that anyone may write, or that is relative."""
_GIT_CONFIG_VARIABLE: Final = re.compile(r"GIT_CONFIG_(KEY|VALUE)_\d+")

_LOADED_BY_OTHERS: Final = word_set(
    "LD_PRELOAD LD_AUDIT LD_LIBRARY_PATH DYLD_INSERT_LIBRARIES BASH_ENV ENV ZDOTDIR IFS PERL5OPT PERL5LIB RUBYOPT "
    "RUBYLIB PYTHONSTARTUP PYTHONHOME GIT_CONFIG_PARAMETERS GIT_CONFIG_GLOBAL GIT_CONFIG_SYSTEM GIT_EXEC_PATH "
    "GIT_TEMPLATE_DIR JAVA_TOOL_OPTIONS"
)
_HOOK_SWITCHES: Final = word_set(
    "CLAUDE_CODE_SIMPLE CLAUDE_CODE_PERSONAL_HOOKS_OFF CLAUDE_CONFIG_DIR CODEX_HOME GEMINI_CLI_HOME CLAUDECODE "
    "GEMINI_CLI CURSOR_AGENT"
)
"""Variables by which another agent runs without its hooks, or what it started without its mark."""


def line_risk(given: str | Sequence[str], text: str | None = None) -> Iterator[RiskFinding]:
    """Judge a line for a shell, or a command as a list of words, whose standard input is `text`."""
    effort = make_parse_budget(given)
    if not isinstance(given, str) and len(given) == 1 and " " in given[0]:
        yield from _judge_line(given[0], text, effort, 0)
    yield from _judge_line(given, text, effort, 0)


def code_line_risk(code: str) -> Iterator[RiskFinding]:
    yield "HIGH", "code is run that was not inspected"
    yield from _judge_nested(code_risk(code), make_parse_budget(code), 0)


def _judge_line(given: str | Sequence[str], text: str | None, effort: ParseBudget, depth: int) -> Iterator[RiskFinding]:
    written: set[str] = set()
    for command in parse_commands(given, text, effort, depth):
        if isinstance(command, UnreadableCommand):
            yield _unreadable_risk(command)
        else:
            yield from _judge_nested(command_risk(command), effort, depth)
            runs = command.argv if command.program in SHELLS or command.program in {".", "source"} else command.argv[:1]
            for word in runs:
                if word.removeprefix("./") in written:
                    yield "HIGH", f"{word} is run by the line that writes it"
            named = (
                list_option_values(command.argv[1:], "-o", "-O", "--output")
                if command.program in NETWORK_JUDGES
                else ()
            )
            copied = list_operands(command.argv[1:])[-1:] if command.program in {"cp", "mv", "install", "tee"} else ()
            written.update(path.removeprefix("./") for path in (*command.writes, *named, *copied) if path)


def _unreadable_risk(line: UnreadableCommand) -> RiskFinding:
    """Judge an unparsable line: a typo is HIGH, apparent obfuscation is CRITICAL."""
    return ("CRITICAL", _TOO_COMPLEX_REASON) if line.tangled else ("HIGH", "a command line that cannot be parsed")


def _judge_nested(found: Iterator[JudgeFinding], effort: ParseBudget, depth: int) -> Iterator[RiskFinding]:
    for each in found:
        match each:
            case NestedCommand(given):
                yield from _judge_line(given, None, effort, depth + 1) if given else ()
            case MentionedWords(words):
                yield from _mention_risk(words, effort, depth + 1)
            case _:
                yield each


def _mention_risk(words: Sequence[str], effort: ParseBudget, depth: int) -> Iterator[RiskFinding]:
    """Judge words as if each dangerous program began a command, and texts that name one as lines.

    Every possible start of a command is tried here, so a command that ends these words is not searched again. One that
    was written within a word is.
    """
    starts = [at for at, word in enumerate(words) if at + 1 < len(words) and _is_dangerous(word)]
    lines = [word for word in words if " " in word.strip() and _is_dangerous(word.split(maxsplit=1)[0])]
    if max(len(starts), len(lines)) > _MOST_MENTIONS or (starts and len(words) > _MOST_WORDS):
        yield "CRITICAL", _TOO_COMPLEX_REASON
        return
    for at in starts:
        for command in parse_commands(words[at:], None, effort, depth):
            if isinstance(command, UnreadableCommand):
                yield _unreadable_risk(command)
            else:
                here = tuple(words[-len(command.argv) :]) == tuple(command.argv)
                yield from _judge_nested(command_risk(command, looks_further=not here), effort, depth)
    for line in lines:
        yield from _judge_line(line, None, effort, depth)


def _is_dangerous(word: str) -> bool:
    program = program_of(word)
    return program in _DANGEROUS or is_interpreter(program) or _FORMATS.fullmatch(program) is not None


def command_risk(command: Command, *, looks_further: bool = True) -> Iterator[JudgeFinding]:
    for path in command.writes:
        yield from path_risk(path, "write")
    for path in command.reads:
        yield from path_risk(path, "read")
    for name, value in command.sets:
        yield from _variable_risk(name, value)
    if command.recursive:
        yield "CRITICAL", f"{command.program} calls itself without end"
    program = command.program
    raised = PRIVILEGE_RAISERS.intersection({program, *command.wrappers})
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


def _unknown_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge an unknown program by what its words would run, delete and write."""
    words = command.argv[1:]
    yield MentionedWords(tuple(word.lstrip("!:|") for word in words))
    yield from _options_that_run(command)
    if verb := find_deleting_word(words):
        yield "HIGH", f"{command.program} {verb} deletes something"
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
        if set(code) & set("(;`!{"):
            yield "HIGH", f"{command.program} is given code"


def _judge_for(program: str) -> Judge | None:
    if "$" in program or "`" in program or (set("*?[{") & set(program) and program not in {"[", "[["}):
        return _dynamic_program_risk
    if program in SHELLS:
        return shell_risk
    if program in _PROGRAMS:
        return _PROGRAMS[program]
    if is_interpreter(program):
        return interpreter_risk
    if _FORMATS.fullmatch(program):
        return _format_risk
    return _reader_risk if program in READERS else None


def _dynamic_program_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge a program whose name is built while the line runs."""
    fetched = any(feed.fetched for feed in command.built)
    yield "CRITICAL" if fetched else "HIGH", f"{command.program} is only known at run time"
    yield MentionedWords(command.argv)


def _format_risk(command: Command) -> Iterator[JudgeFinding]:
    yield "CRITICAL", f"{command.program} changes whole disks"


def _options_that_run(command: Command) -> Iterator[JudgeFinding]:
    """Find what an unknown program runs because of its options."""
    for at, word in enumerate(command.argv[1:], 1):
        name, equals, value = word.partition("=")
        if _OPTION_THAT_RUNS.fullmatch(name):
            yield NestedCommand(value if equals else command.argv[at + 1] if at + 1 < len(command.argv) else "")


def _wrapper_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge a wrapper; what it runs is judged separately."""
    program = command.program
    if program in WRAPPER_JUDGES:
        yield from WRAPPER_JUDGES[program](command)
    elif program in NETWORK_JUDGES:
        yield from NETWORK_JUDGES[program](command)
    elif program in _PERSISTING:
        yield "HIGH", f"{program} leads into another system"
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
    written = list_operands(words)[1:] if program == "xxd" and has_flag(words, "r", "-revert") else []
    for path in (*written, *list_option_values(words, *_WRITING_OPTIONS.get(program, ()))):
        yield from path_risk(path, "write")
    typed = [word for word in words if word.startswith("+") and set(word) & set("!|")] if program in PAGERS else []
    typed = [re.split("[!|]", word, maxsplit=1)[1] for word in typed]
    for line in (*typed, *list_option_values(words, *_RUNNING_OPTIONS.get(program, ()))):
        yield "HIGH", f"{program} runs a program"
        yield NestedCommand(line)


def _variable_risk(name: str, value: str) -> Iterator[JudgeFinding]:
    """Judge a variable that makes other programs run something."""
    told = _GIT_CONFIG_VARIABLE.fullmatch(name)
    if told:
        yield from setting_risk(value, "") if told[1] == "KEY" else (NestedCommand(value.removeprefix("!")),)
    elif name.startswith("HALTER_"):
        yield "HIGH", f"{name} says who decides, or where it is kept"
    elif name in _HOOK_SWITCHES:
        yield "HIGH", f"{name} decides whether hooks run"
    elif name == "PATH" and _SHARED_PATH_FOLDER.search(value):
        yield "HIGH", "programs are searched for in a folder that anybody can write"
    elif name in _LOADED_BY_OTHERS:
        yield "HIGH", f"{name} makes other programs run something"
    elif _RUN_BY_OTHERS.fullmatch(name):
        yield NestedCommand(value)
    elif name == "NODE_OPTIONS" and re.search(r"-r\b|--(?:require|import|loader|experimental-loader)", value):
        yield "HIGH", f"{name} makes other programs run something"


RISK_ORDER: Final[tuple[RiskLevel, ...]] = ("LOW", "MEDIUM", "HIGH", "CRITICAL")

COMMAND_ARGUMENTS: Final = word_set(
    "command commands cmd cmds argv commandline cmdline script scripts bash shell exec sh terminal"
)
COMMAND_LIST_ARGUMENTS: Final = frozenset({"commands", "cmds", "scripts"})
PROGRAM_ARGUMENTS: Final = frozenset({"program", "executable", "binary", "entrypoint"})
WORD_ARGUMENTS: Final = frozenset({"args", "arguments", "parameters", "params", "argv"})
INPUT_ARGUMENTS: Final = frozenset({"stdin", "input"})
CODE_ARGUMENTS: Final = frozenset({"code", "python", "javascript", "source_code", "python_code", "snippet"})
PATH_ARGUMENTS: Final = word_set("path file filename folder directory dir destination dest target source src")
HOST_ARGUMENTS: Final = frozenset({"host", "hostname", "server", "domain"})
QUERY_ARGUMENTS: Final = frozenset({"sql", "query", "statement"})
METHOD_ARGUMENTS: Final = frozenset({"method", "verb", "action", "operation", "op"})
AMOUNT_ARGUMENTS: Final = frozenset({"amount", "amount_usd", "total", "total_usd", "sum", "payment", "price_usd"})
RECIPIENT_ARGUMENTS: Final = frozenset({"to", "cc", "bcc", "recipients"})

REASONS_SHOWN: Final = 12
AMOUNT_STEPS: Final = (100, 1_000, 10_000)
RECIPIENT_STEPS: Final = (5, 20, 200)

_DELETING: Final = word_set(
    "delete destroy drop purge wipe erase truncate terminate uninstall revoke format remove deletemany dropdatabase "
    "deleteall delete_all shutdown unpublish reset_all"
)
_CHANGING: Final = frozenset({"put", "patch", "post", "update", "replace", "overwrite"})
_CODE_SIGNS: Final = re.compile(r"[(;=\n]")
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_JSON_DEEPEST: Final = 8

Arguments = Mapping[str, Any]


class Risk(msgspec.Struct, frozen=True):
    """How risky a call is, and why, as short phrases for the approver."""

    level: RiskLevel = "LOW"
    reasons: tuple[str, ...] = ()


class _Value(msgspec.Struct, frozen=True):
    """One argument with its nearest name and its sibling arguments."""

    name: str
    value: Any
    beside: Arguments
    depth: int = 0


def assess_risk(spec: ToolSpec, arguments: Valid) -> Risk:
    found = [
        finding for value in _iterate_arguments(arguments.values) for finding in _judge_argument(value, spec.effect)
    ]
    found.sort(key=lambda finding: -RISK_ORDER.index(finding[0]))
    if not found:
        return Risk()
    reasons = tuple(dict.fromkeys(reason for _, reason in found))
    more = (f"and {len(reasons) - REASONS_SHOWN} more",) if len(reasons) > REASONS_SHOWN else ()
    return Risk(found[0][0], (*reasons[:REASONS_SHOWN], *more))


def _iterate_arguments(arguments: Arguments) -> Iterator[_Value]:
    """Walk arguments, also JSON inside a string. Lists of strings stay together."""
    waiting = [_Value("", arguments, {})]
    while waiting:
        each = waiting.pop()
        match each.value:
            case Mapping():
                values = cast("Arguments", each.value)
                waiting += [_Value(str(key), value, values, each.depth) for key, value in reversed([*values.items()])]
            case list() | tuple() if not _are_texts(cast("Sequence[Any]", each.value)):
                items = cast("Sequence[Any]", each.value)
                waiting += [_Value(each.name, item, each.beside, each.depth) for item in reversed(items)]
            case _:
                if (inside := _decode_json_text(each)) is not None:
                    waiting.append(inside)
                yield each


def _are_texts(value: Sequence[Any]) -> bool:
    return all(isinstance(each, str) for each in value)


def _decode_json_text(each: _Value) -> _Value | None:
    text = each.value
    if not isinstance(text, str) or each.depth >= _JSON_DEEPEST or text.lstrip()[:1] not in {"{", "["}:
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Value(each.name, value, each.beside, each.depth + 1)


def _judge_argument(argument: _Value, effect: Effect) -> Iterator[RiskFinding]:
    value, name = argument.value, argument.name.lower()
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield from _amount_risk(name, float(value), effect)
        return
    texts: list[str] = [value] if isinstance(value, str) else list(value)
    kinds = _split_name(argument.name)
    if kinds & COMMAND_ARGUMENTS or name in PROGRAM_ARGUMENTS:
        yield from _command_argument_risk(argument, kinds)
    elif name in RECIPIENT_ARGUMENTS:
        yield from _recipient_risk(texts, effect)
    elif name in AMOUNT_ARGUMENTS:
        yield from _amount_risk(name, _sum_amounts(texts), effect)
    else:
        for text in texts:
            yield from _text_risk(argument, text, effect)


def _split_name(name: str) -> frozenset[str]:
    """Split a name: `shellCommand` and `shell_command` are `shell` and `command`."""
    return frozenset({name.lower(), *(word.lower() for word in _WORD.findall(name))})


def _text_risk(argument: _Value, text: str, effect: Effect) -> Iterator[RiskFinding]:
    name = argument.name.lower()
    if name in PATH_ARGUMENTS or name.endswith(("_path", "_file", "_dir", "_folder")):
        yield from path_risk(text, effect)
    elif name in HOST_ARGUMENTS:
        yield from host_risk(text.lower())
    elif "url" in name or name in {"uri", "endpoint", "webhook", "href"}:
        yield from url_risk(text.strip())
    elif _split_name(argument.name) & METHOD_ARGUMENTS:
        word = text.strip().lower()
        if word in _DELETING or word.startswith(("delete", "destroy", "purge", "drop_")):
            yield "HIGH", f"{text.strip()[:40]} deletes something outside"
        elif word in _CHANGING:
            yield "MEDIUM", f"{text.strip()[:40]} changes something outside"
    elif name in CODE_ARGUMENTS and _CODE_SIGNS.search(text):
        yield from code_line_risk(text)
    else:
        if _split_name(argument.name) & QUERY_ARGUMENTS:
            if looks_like_sql(text):
                yield from sql_risk(text)
        elif not any(key.lower() in PATH_ARGUMENTS for key in argument.beside) and is_statement(text):
            yield from sql_risk(text)
        yield from graphql_risk(text)


def _command_argument_risk(argument: _Value, kinds: frozenset[str]) -> Iterator[RiskFinding]:
    """Judge a command with the words and the input of its sibling arguments."""
    given = argument.value
    beside = {key.lower(): value for key, value in argument.beside.items() if key != argument.name}
    text = next((value for key, value in beside.items() if key in INPUT_ARGUMENTS and isinstance(value, str)), None)
    if not isinstance(given, str) and kinds & COMMAND_LIST_ARGUMENTS:
        for line in given:
            yield from line_risk(line, text)
        return
    yield from line_risk(given, text)
    for key in WORD_ARGUMENTS & beside.keys():
        words = beside[key]
        if (
            isinstance(given, str)
            and isinstance(words, list | tuple)
            and words
            and _are_texts(cast("Sequence[Any]", words))
        ):
            yield from line_risk([given, *cast("Sequence[str]", words)], text)
        elif isinstance(given, str) and isinstance(words, str):
            yield from line_risk(f"{given} {words}", text)


def _recipient_risk(texts: Sequence[str], effect: Effect) -> Iterator[RiskFinding]:
    people = {part.strip().lower() for text in texts for part in text.replace(";", ",").split(",") if part.strip()}
    if effect == "write":
        yield from _step_risk(len(people), RECIPIENT_STEPS, f"{len(people)} recipients")


def _amount_risk(name: str, amount: float, effect: Effect) -> Iterator[RiskFinding]:
    if effect == "write" and name in AMOUNT_ARGUMENTS:
        yield from _step_risk(abs(amount), AMOUNT_STEPS, f"an amount of {amount:,.2f}")


def _step_risk(value: float, steps: Sequence[int], reason: str) -> Iterator[RiskFinding]:
    """Raise the risk by one for each threshold that a number exceeds; a non-number exceeds all."""
    passed = sum(not value <= step for step in steps)
    if passed:
        yield RISK_ORDER[passed], reason


def _sum_amounts(texts: Sequence[str]) -> float:
    try:
        return sum(float(text.strip().lstrip("$€£").replace(",", "")) for text in texts)
    except ValueError:
        return float("nan")

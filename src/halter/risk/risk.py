"""Assesses the risk of one call from its parsed arguments: commands, paths, hosts, statements, amounts, recipients.

Text that only mentions something has no risk: a search for `rm -rf /` deletes nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, cast

import msgspec

from halter.core.text import expand_names, format_count, make_word_set
from halter.core.tools import Effect, ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.risk.commands import Command, ParseBudget, UnreadableCommand, make_parse_budget, parse_commands
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
from halter.risk.program_names import DESTROYERS, PRIVILEGE_RAISERS, READERS, SHELLS, program_of
from halter.risk.programs import (
    FILE_JUDGES,
    NETWORK_JUDGES,
    REPOSITORY_JUDGES,
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
    setting_risk,
)
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


RISK_ORDER: Final[tuple[RiskLevel, ...]] = ("LOW", "MEDIUM", "HIGH", "CRITICAL")

COMMAND_ARGUMENTS: Final = make_word_set(
    "command commands cmd cmds argv commandline cmdline script scripts bash shell exec sh terminal"
)
COMMAND_LIST_ARGUMENTS: Final = frozenset({"commands", "cmds", "scripts"})
PROGRAM_ARGUMENTS: Final = frozenset({"program", "executable", "binary", "entrypoint"})
WORD_ARGUMENTS: Final = frozenset({"args", "arguments", "parameters", "params", "argv"})
INPUT_ARGUMENTS: Final = frozenset({"stdin", "input"})
CODE_ARGUMENTS: Final = frozenset({"code", "python", "javascript", "source_code", "python_code", "snippet"})
PATH_ARGUMENTS: Final = make_word_set("path file filename folder directory dir destination dest target source src")
HOST_ARGUMENTS: Final = frozenset({"host", "hostname", "server", "domain"})
QUERY_ARGUMENTS: Final = frozenset({"sql", "query", "statement"})
METHOD_ARGUMENTS: Final = frozenset({"method", "verb", "action", "operation", "op"})
AMOUNT_ARGUMENTS: Final = frozenset({"amount", "amount_usd", "total", "total_usd", "sum", "payment", "price_usd"})
RECIPIENT_ARGUMENTS: Final = frozenset({"to", "cc", "bcc", "recipients"})

MAX_REASONS: Final = 12
AMOUNT_STEPS: Final = (100, 1_000, 10_000)
RECIPIENT_STEPS: Final = (5, 20, 200)

_DELETING: Final = make_word_set(
    "delete destroy drop purge wipe erase truncate terminate uninstall revoke format remove deletemany dropdatabase "
    "deleteall delete_all shutdown unpublish reset_all"
)
_CHANGING: Final = frozenset({"put", "patch", "post", "update", "replace", "overwrite"})
_CODE_SIGNS: Final = re.compile(r"[(;=\n]")
_WORD: Final = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_MAX_JSON_DEPTH: Final = 8

Arguments = Mapping[str, Any]


class Risk(msgspec.Struct, frozen=True):
    """The risk of a call, with its reasons as short phrases for the approver."""

    level: RiskLevel = "LOW"
    reasons: tuple[str, ...] = ()


class _Value(msgspec.Struct, frozen=True):
    """One argument with its nearest name and its sibling arguments."""

    name: str
    value: Any
    siblings: Arguments
    depth: int = 0


def assess_risk(spec: ToolSpec, arguments: Valid) -> Risk:
    findings = [
        finding for value in _iterate_arguments(arguments.values) for finding in _judge_argument(value, spec.effect)
    ]
    findings.sort(key=lambda finding: -RISK_ORDER.index(finding[0]))
    if not findings:
        return Risk()
    reasons = tuple(dict.fromkeys(reason for _, reason in findings))
    rest_note = (f"and {len(reasons) - MAX_REASONS} more",) if len(reasons) > MAX_REASONS else ()
    return Risk(findings[0][0], (*reasons[:MAX_REASONS], *rest_note))


def _iterate_arguments(arguments: Arguments) -> Iterator[_Value]:
    """Yield all arguments, including those in JSON strings. Lists of strings stay together."""
    pending = [_Value("", arguments, {})]
    while pending:
        argument = pending.pop()
        match argument.value:
            case Mapping():
                values = cast("Arguments", argument.value)
                pending += [
                    _Value(str(key), value, values, argument.depth) for key, value in reversed([*values.items()])
                ]
            case list() | tuple() if not _are_texts(cast("Sequence[Any]", argument.value)):
                items = cast("Sequence[Any]", argument.value)
                pending += [_Value(argument.name, item, argument.siblings, argument.depth) for item in reversed(items)]
            case _:
                if (json_argument := _decode_json_text(argument)) is not None:
                    pending.append(json_argument)
                yield argument


def _are_texts(value: Sequence[Any]) -> bool:
    return all(isinstance(each, str) for each in value)


def _decode_json_text(argument: _Value) -> _Value | None:
    text = argument.value
    if not isinstance(text, str) or argument.depth >= _MAX_JSON_DEPTH or text.lstrip()[:1] not in {"{", "["}:
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Value(argument.name, value, argument.siblings, argument.depth + 1)


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
    """Split a name into words: `shellCommand` and `shell_command` contain `shell` and `command`."""
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
            yield "HIGH", f"{text.strip()[:40]} deletes external data"
        elif word in _CHANGING:
            yield "MEDIUM", f"{text.strip()[:40]} changes external data"
    elif name in CODE_ARGUMENTS and _CODE_SIGNS.search(text):
        yield from code_line_risk(text)
    else:
        if _split_name(argument.name) & QUERY_ARGUMENTS:
            if looks_like_sql(text):
                yield from sql_risk(text)
        elif not any(key.lower() in PATH_ARGUMENTS for key in argument.siblings) and is_statement(text):
            yield from sql_risk(text)
        yield from graphql_risk(text)


def _command_argument_risk(argument: _Value, kinds: frozenset[str]) -> Iterator[RiskFinding]:
    """Judge a command with the words and the input of its sibling arguments."""
    command = argument.value
    siblings = {key.lower(): value for key, value in argument.siblings.items() if key != argument.name}
    text = next((value for key, value in siblings.items() if key in INPUT_ARGUMENTS and isinstance(value, str)), None)
    if not isinstance(command, str) and kinds & COMMAND_LIST_ARGUMENTS:
        for line in command:
            yield from line_risk(line, text)
        return
    yield from line_risk(command, text)
    for key in WORD_ARGUMENTS & siblings.keys():
        words = siblings[key]
        if (
            isinstance(command, str)
            and isinstance(words, list | tuple)
            and words
            and _are_texts(cast("Sequence[Any]", words))
        ):
            yield from line_risk([command, *cast("Sequence[str]", words)], text)
        elif isinstance(command, str) and isinstance(words, str):
            yield from line_risk(f"{command} {words}", text)


def _recipient_risk(texts: Sequence[str], effect: Effect) -> Iterator[RiskFinding]:
    recipients = {
        address.strip().lower() for text in texts for address in text.replace(";", ",").split(",") if address.strip()
    }
    if effect == "write":
        yield from _step_risk(len(recipients), RECIPIENT_STEPS, format_count(len(recipients), "recipient"))


def _amount_risk(name: str, amount: float, effect: Effect) -> Iterator[RiskFinding]:
    if effect == "write" and name in AMOUNT_ARGUMENTS:
        yield from _step_risk(abs(amount), AMOUNT_STEPS, f"an amount of {amount:,.2f}")


def _step_risk(value: float, steps: Sequence[int], reason: str) -> Iterator[RiskFinding]:
    """Raise the risk by one for each threshold that a number exceeds; a non-number exceeds all."""
    exceeded_count = sum(not value <= step for step in steps)
    if exceeded_count:
        yield RISK_ORDER[exceeded_count], reason


def _sum_amounts(texts: Sequence[str]) -> float:
    try:
        return sum(float(text.strip().lstrip("$€£").replace(",", "")) for text in texts)
    except ValueError:
        return float("nan")


_CHANGING_READERS: Final = make_word_set(
    "mktemp exiftool xmlstarlet pdftotext smartctl hostnamectl ldd reset fg bg disown dmidecode iostat tldr zless "
    "xmllint blkid shopt ncdu"
)
"""Readers of which an argument changes something, or which run a program on what they read."""
_READING_PROGRAMS: Final = READERS - _CHANGING_READERS
_READING_WRAPPERS: Final = make_word_set("time nice ionice env command timeout stdbuf xargs builtin noglob")
_SYSTEM_PROGRAM: Final = re.compile(r"(?:/usr)?/bin/[^/]+")
_OUTPUT_PLACE: Final = re.compile(r"/dev/(?:null|stdout|stderr|tty|fd/\d+)|&?\d+|-")
_CHANGING_OPTION: Final = re.compile(
    r"--?(?:out|output|in-place|inplace|write|fix|apply|set|save|delete|log|LOG|pre|install|plugin|config|kubeconfig"
    r"|toolexec|exec|pager|compress-program|upload-pack|open-files-in-pager|compile)(?:-[\w-]+)?(?:=.*)?"
)
_SHORTENED_OPTION: Final = re.compile(r"--(?:outp?u?|se|in-p?l?a?c?)(?:=.*)?")
"""The beginning of an option that writes: most programs accept it for the whole name."""
_CHANGING_FLAGS: Final[Mapping[str, str]] = expand_names(
    {"sort tree iconv shuf base64 base32 basenc": "o", "date": "s", "less more most": "oO", "history": "acdnrw"}
    | {"time": "o", "xxd": "r", "file": "C", "ss": "KD", "hash": "p", "man": "PH", "gawk awk": "opdDE"}
)
_CHANGING_WORDS: Final[Mapping[str, Sequence[re.Pattern[str]]]] = {
    "date": (re.compile(r"[\d.]{8,}"),),
    "git": (re.compile(r"-[a-zA-Z]*O.*"),),
    **dict.fromkeys(("less", "more", "most"), (re.compile(r"\+.*", re.DOTALL),)),
}
"""A time to set, a program that shows what was found, and commands that a pager begins with."""
_SETTING_PROGRAMS: Final = make_word_set("env read mapfile readarray getopts export declare typeset local readonly")
_HARMLESS_VARIABLE: Final = re.compile(
    r"LC_\w+|LANG|LANGUAGE|TZ|NO_COLOR|FORCE_COLOR|CLICOLOR\w*|COLUMNS|LINES|TERM|CI"
)
_ENVIRONMENT_NAME: Final = re.compile(r"([A-Z][A-Z0-9_]*)(?:\+?=.*)?", re.DOTALL)
_MAX_OPERANDS: Final[Mapping[str, int]] = {"hostname": 0, "uniq": 1, "xxd": 1}
"""The operands after which one more is written to, or set."""
_VERBS: Final[Mapping[str, frozenset[str]]] = expand_names(
    {
        "git": make_word_set(
            "status log diff show blame grep ls-files ls-tree ls-remote rev-parse rev-list describe shortlog cat-file "
            "name-rev merge-base for-each-ref show-ref count-objects whatchanged cherry range-diff var version help "
            "check-ignore verify-commit"
        ),
        "npm pnpm yarn": make_word_set("ls list view info outdated why root prefix help"),
        "pip pip3": make_word_set("list show freeze check help"),
        "docker podman": make_word_set("ps images logs inspect version info top stats port history"),
        "kubectl": make_word_set("get describe logs top explain version api-resources api-versions cluster-info"),
        "cargo": make_word_set("tree metadata version help"),
        "go": make_word_set("list version doc help"),
        "systemctl": make_word_set("status show cat list-units list-unit-files list-timers is-active is-enabled"),
    }
)
_LISTINGS: Final = frozenset(
    {
        *("git branch", "git branch -a", "git branch -r", "git branch -v", "git branch -vv", "git branch --list"),
        *("git branch --show-current", "git tag", "git tag -l", "git tag --list", "git remote", "git remote -v"),
        *("git remote show origin", "git stash list", "git worktree list", "git reflog", "git config --list"),
        *("git config -l", "git submodule status", "npm config list", "npm config ls", "pip config list"),
    }
)
_GETTER: Final = re.compile(r"(?:git config --get|npm config get|git remote get-url|git tag -l|git branch --list) \S+")
_FIND_ACTION: Final = re.compile(r"-(?:delete|exec|execdir|ok|okdir|fprint|fprint0|fprintf|fls)")
_SED_STEP: Final = (
    r"(?:(?:\d+|\$|/[^/]*/)(?:,(?:\+?\d+|\$|/[^/]*/))?)?!?(?:[pdq=]|s/(?:[^/\\]|\\.)*/(?:[^/\\]|\\.)*/[gpiI\d]*)"
)
_SED_SCRIPT: Final = re.compile(rf"{_SED_STEP}(?:\s*;\s*{_SED_STEP})*;?")
_SED_OPTIONS: Final = frozenset({"-n", "-E", "-r", "-e", "-nE", "-En", "-ne", "-s", "-u", "-z"})
_AWK_EFFECT: Final = re.compile(r"[>|@]|system|getline|close|fflush")
_AWK: Final = make_word_set("awk gawk mawk nawk")


def only_reads(line_or_words: str | Sequence[str]) -> bool:
    """Return whether every command of a line certainly changes nothing."""
    commands = parse_commands(line_or_words)
    return bool(commands) and all(isinstance(command, Command) and _command_reads(command) for command in commands)


def _command_reads(command: Command) -> bool:
    if not command.sure or any(_OUTPUT_PLACE.fullmatch(path) is None for path in command.writes):
        return False
    if any(_changes_programs(name) for name, _ in command.sets):
        return False
    if not command.argv:
        return True
    program, words = command.program, command.argv[1:]
    if "/" in command.argv[0] and _SYSTEM_PROGRAM.fullmatch(command.argv[0]) is None:
        return False
    if _has_changing_word(program, words):
        return False
    if command.wraps:
        return program in _READING_WRAPPERS
    if program in SHELLS:
        # The line that it was given is parsed as commands of its own; a script or an input is not.
        return any(re.fullmatch(r"-[a-z]*c", word) for word in words) and not command.is_fed
    return _program_reads(program, words)


def _has_changing_word(program: str, words: Sequence[str]) -> bool:
    """Return whether a word makes a program that reads write a file, run another program or set a variable."""
    patterns = (_CHANGING_OPTION, _SHORTENED_OPTION, *_CHANGING_WORDS.get(program, ()))
    if any(pattern.fullmatch(word) for pattern in patterns for word in words):
        return True
    sets_variables = program in _SETTING_PROGRAMS or (program == "printf" and "-v" in words)
    if sets_variables and any(map(_changes_programs, words)):
        return True
    return has_flag(words, _CHANGING_FLAGS.get(program, ""))


def _changes_programs(word: str) -> bool:
    """Return whether a word sets or names a variable that may decide which programs run, or how."""
    match = _ENVIRONMENT_NAME.fullmatch(word)
    return match is not None and _HARMLESS_VARIABLE.fullmatch(match[1]) is None


def _program_reads(program: str, words: Sequence[str]) -> bool:
    if program in _VERBS:
        line = " ".join((program, *words))
        return (bool(words) and words[0] in _VERBS[program]) or line in _LISTINGS or _GETTER.fullmatch(line) is not None
    if program == "find":
        return not any(_FIND_ACTION.fullmatch(word) for word in words)
    if program == "sed":
        scripts = [word for word in words if not word.startswith("-")][:1]
        options = [word for word in words if word.startswith("-")]
        is_plain = words.count("-e") <= 1 and set(options) <= _SED_OPTIONS
        return is_plain and bool(scripts) and _SED_SCRIPT.fullmatch(scripts[0]) is not None
    if program in _AWK:
        return not any(_AWK_EFFECT.search(word) or word.startswith(("-f", "-i", "-l", "--")) for word in words)
    if len(words) == 1 and words[0] in {"--version", "--help"}:
        return True
    operand_count = len(list_operands(words))
    return program in _READING_PROGRAMS and operand_count <= _MAX_OPERANDS.get(program, operand_count)

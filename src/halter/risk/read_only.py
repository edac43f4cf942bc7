"""Command lines that only read."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from halter.core.text import expand_names, make_word_set
from halter.risk.commands import Command, parse_commands
from halter.risk.program_names import READERS, SHELLS
from halter.risk.programs import has_flag, list_operands

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

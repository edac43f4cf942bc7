"""Programs that run code: interpreters, and those with a way to, as sed, awk, vim and gdb.

Code is not parsed. It is at least HIGH; its string literals are judged as if they were run, since a shell command is a
string in any language.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from halter.core.text import expand_names
from halter.risk.commands import Command, split_shell_code
from halter.risk.places import is_policy, is_root, path_risk
from halter.risk.programs import (
    Judge,
    JudgeFinding,
    MentionedWords,
    NestedCommand,
    find_deleting_word,
    has_flag,
    list_operands,
    list_option_values,
)
from halter.risk.shell_syntax import CommandInput, family_of

_LITERAL: Final = re.compile(r"'([^'\\\n]*(?:\\.[^'\\\n]*)*)'|\"([^\"\\\n]*(?:\\.[^\"\\\n]*)*)\"|`([^`]*)`")
_DELETING: Final = re.compile(
    r"\b(?:rmtree|rm_rf?|rm_r|rmSync|rmdirSync|rimraf|remove_tree|remove_entry|unlink\w*|remove)\b"
)
_DROPPING: Final = re.compile(r"\.(?:dropDatabase|drop)\(|\.(?:deleteMany|remove)\(\s*(?:\{\s*\}\s*)?\)")
_STARTED: Final = re.compile(r"(?:\b(?:spawn|exec|system|syscmd|esyscmd)[ \t(`{]+|!)[ \t]*([a-z/][^\n;'\")\]}]*)")
"""Programs started by words without quotes, as in Tcl, m4 and tools with an exclamation mark."""
_MOST_STARTED: Final = 20
_WRITING: Final = re.compile(
    r"(?i:write|unlink|remove|rename|replace|truncate|dump|copy|move|rmtree|chmod|symlink|link)"
    r"|['\"](?:[wax]b?t?\+?|r\+b?|>>?)['\"]|>"
)
_STANDARD_INPUT: Final = frozenset({"-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
_MOST_LITERALS: Final = 200


class Interpreter(msgspec.Struct, frozen=True):
    """The options that are followed by code, and those with another value."""

    code: str = ""
    valued: str = ""
    names: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    verbs: frozenset[str] = frozenset()
    loose: bool = False
    permutes: bool = False


def _is_loosely_code(option: str) -> bool:
    """Options that may be abbreviated and in any case, as `-enc` of PowerShell."""
    name = option.lower()
    names = ("-encodedcommand", "-command", "-commandwithargs")
    return len(name) > 1 and any(whole.startswith(name) for whole in names)


_INTERPRETERS: Final[Mapping[str, Interpreter]] = expand_names(
    {
        "python": Interpreter("c", "WXm", (), ("--check-hash-based-pycs",)),
        "perl": Interpreter("eE", "IMm"),
        "ruby": Interpreter("e", "ICEr"),
        "node nodejs": Interpreter(
            "ep", "rC", ("--eval", "--print"), ("--require", "--import", "--loader", "--input-type")
        ),
        "deno crystal": Interpreter(verbs=frozenset({"eval"})),
        "bun": Interpreter("ep", "r", ("--eval", "--print"), ("--preload",)),
        "php": Interpreter("rBRE", "dcfzSt", ("--run", "--process-code", "--process-begin")),
        "lua osascript": Interpreter("e", "l"),
        "luajit": Interpreter("e", "lj"),
        "Rscript dc": Interpreter("e", "", ("--expression",)),
        "R": Interpreter("e", "f", ("--expression",)),
        "julia": Interpreter("eE", "LpHJ", ("--eval", "--print")),
        "pwsh powershell": Interpreter("", "", ("-ec",), loose=True),
        "tclsh jshell m4": Interpreter(),
        "expect": Interpreter("c", "bf"),
        "guile": Interpreter("c", "lL"),
        "groovy": Interpreter("e", "cD"),
        "elixir": Interpreter("e", "r", ("--eval", "--rpc-eval")),
        "erl": Interpreter("", "", ("-eval",)),
        "ghc scala gnuplot ghci gforth": Interpreter("e"),
        "sbcl": Interpreter("", "", ("--eval",), ("--load",)),
        "emacs": Interpreter("", "", ("--eval", "-eval", "--execute"), ("-l", "--load", "-f")),
        "racket": Interpreter("e", "lptfr", ("--eval",)),
        "mongo mongosh": Interpreter("", "", ("--eval",), ("--host", "--port", "-u", "-p"), permutes=True),
        "irb": Interpreter("", "r"),
        "ipython": Interpreter("c"),
        "octave": Interpreter("", "", ("--eval",)),
        "ocaml raku": Interpreter("e", "I"),
        "swipl": Interpreter("gt", "slf"),
        "clojure qjs": Interpreter("e", "", ("--eval",)),
        "jrunscript": Interpreter("e", "lf"),
        "matlab": Interpreter("", "", ("-r", "-batch")),
    }
)
INTERPRETERS: Final = frozenset(_INTERPRETERS)


_IN_PLACE: Final = re.compile(r"-[a-zA-Z0]*i(?:[^e].*|e)?")


def is_interpreter(program: str) -> bool:
    return family_of(program) in _INTERPRETERS


def code_risk(code: str) -> Iterator[JudgeFinding]:
    texts = [match[1] or match[2] or match[3] or "" for match in islice(_LITERAL.finditer(code), _MOST_LITERALS)]
    if _DELETING.search(code) and any(is_root(text) for text in texts if text.startswith(("/", "~"))):
        yield "CRITICAL", "code that deletes a home or a system"
    if _WRITING.search(code) and any(is_policy(text) for text in texts):
        yield "CRITICAL", "code that changes what an agent may do"
    if _DROPPING.search(code):
        yield "CRITICAL", "code that empties or deletes a database"
    yield MentionedWords(tuple(text for text in texts if text))
    for match in islice(_STARTED.finditer(code), _MOST_STARTED):
        yield NestedCommand(match[1])


def interpreter_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge an interpreter by the source of its code: its words, its input, a file."""
    program, words = command.program, list(command.argv[1:])
    interpreter = _INTERPRETERS[family_of(program)]
    codes, rest, module = _walk_options(interpreter, words)
    if family_of(program) in {"perl", "ruby"} and any(_IN_PLACE.fullmatch(word) for word in words):
        for path in rest:
            yield from path_risk(path, "write")
    for code in codes:
        yield "HIGH", f"{program} runs code that was not inspected"
        yield from code_risk(code)
    if codes:
        return
    if module:
        match module:
            case "pip" | "pipx" | "uv":
                yield NestedCommand((module, *rest))
            case _ if module.partition(".")[0] == "halter":
                yield NestedCommand(("halter", *rest))
            case "timeit" | "code" | "pdb" | "cProfile" | "profile" | "trace" | "runpy" if rest:
                yield "HIGH", f"{module} runs code that was not inspected"
            case "http.server" | "smtpd":
                yield "HIGH", "files are served to the network"
            case _:
                yield "MEDIUM", f"the module {module} is run"
    elif not rest and {"--version", "-V", "-VV", "--help", "-h", "-v"} & set(words) and not command.is_fed:
        return
    elif rest and rest[0] not in _STANDARD_INPUT and rest[0] != "/dev/fd/63" and "$" not in rest[0]:
        yield "MEDIUM", f"{program} runs a file that was not inspected"
        if verb := find_deleting_word(rest[1:]):
            yield "HIGH", f"{rest[0]} {verb} deletes something"
    else:
        yield from source_risk(command, rest[:1])
        if command.input:
            yield from code_risk(command.input)


def _walk_options(interpreter: Interpreter, words: Sequence[str]) -> tuple[list[str], list[str], str]:
    """The code among the options, the words after them, and the module that is run."""
    codes: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and len(words[at]) > 1:
        word = words[at]
        name, equals, value = word.partition("=")
        following = words[at + 1] if at + 1 < len(words) else ""
        at += 1
        if name in interpreter.names or (interpreter.loose and _is_loosely_code(name)):
            codes.append(value if equals else following)
            at += not equals
        elif name in interpreter.takes:
            at += not equals
        elif not word.startswith("--"):
            for index, letter in enumerate(word[1:], 2):
                if letter in interpreter.code:
                    codes.append(word[index:] or following)
                    at += not word[index:]
                    break
                if letter in interpreter.valued:
                    at += not word[index:]
                    if letter == "m":
                        return codes, list(words[at:]), word[index:] or following
                    break
    rest = list(words[at:])
    if interpreter.permutes:
        codes += list_option_values(rest, *interpreter.names)
    if rest and rest[0] in interpreter.verbs:
        codes.append(" ".join(rest[1:]))
    return codes, rest, ""


def source_risk(command: Command, script: Sequence[str]) -> Iterator[JudgeFinding]:
    """Judge code that comes through a pipe, a here-document or a process substitution."""
    from_process = {*script, *command.reads} & {"/dev/fd/63"}
    feeds: tuple[CommandInput, ...] = command.given if from_process else (command.feed,) if command.feed else ()
    if any(feed.fetched for feed in (*feeds, *command.built)):
        yield "CRITICAL", f"{command.program} runs what was fetched"
    elif feeds or command.is_fed or script:
        names = ", ".join(name for feed in feeds for name in feed.programs if name)
        yield "HIGH", f"{command.program} runs what {names or 'the line'} writes"
    else:
        yield "MEDIUM", f"{command.program} is started"


def shell_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge a shell; what it runs is judged separately."""
    code, rest = split_shell_code(command.argv)
    if any(True for _ in list_option_values(command.argv[1:], "--rcfile", "--init-file")):
        yield "HIGH", f"{command.program} runs a file first"
    if code is not None:
        return
    if rest and rest[0] not in _STANDARD_INPUT and rest[0] != "/dev/fd/63" and "$" not in rest[0]:
        yield "MEDIUM", f"{command.program} runs a file that was not inspected"
    else:
        yield from source_risk(command, rest[:1])


def _source(command: Command) -> Iterator[JudgeFinding]:
    script = list(command.argv[1:2])
    if script and script[0].endswith("/bin/activate"):
        yield "MEDIUM", "a virtual environment is entered"
        return
    yield "HIGH", "lines of a file are run that were not inspected"
    if script and (script[0] in _STANDARD_INPUT or script[0] == "/dev/fd/63"):
        yield from source_risk(command, script)
        for feed in command.given:
            yield NestedCommand(feed.text or "")
        yield NestedCommand(command.input or "")


_SED_ADDRESS: Final = re.compile(
    r"[\s;]*(?:\d+(?:~\d+)?|\$|/(?:[^/\\\n]|\\.)*/[IM]*|\\(.)(?:(?!\1)[^\\\n]|\\.)*\1[IM]*|[,+~!\s\d]+)*"
)
_SED_PLAIN: Final = frozenset("=dDgGhHlnNpPqQxzFv{}L")


def sed_commands(script: str) -> Iterator[tuple[str, str]]:
    """The commands of a sed script that run a program or write a file, and `?` for what cannot be parsed."""
    at = 0
    while at < len(script):
        address = _SED_ADDRESS.match(script, at)
        at = address.end() if address else at
        if at >= len(script):
            return
        letter = script[at]
        at += 1
        end = script.find("\n", at)
        end = len(script) if end < 0 else end
        if letter in _SED_PLAIN:
            continue
        if letter in "#:btTaicrR":
            at = end
            if letter in "btT":
                at = min((found for found in (script.find(";", at), script.find("}", at)) if found >= 0), default=end)
        elif letter in "eWw":
            yield letter, script[at:end].strip()
            at = end
        elif letter in "sy":
            at, flags = _sed_substitution(script, at)
            if at < 0:
                yield "?", ""
                return
            if letter == "s" and "e" in flags.split("w")[0]:
                yield "e", ""
            if letter == "s" and "w" in flags:
                yield "w", flags.partition("w")[2].strip()
        else:
            yield "?", ""
            return


def _sed_substitution(script: str, at: int) -> tuple[int, str]:
    if at >= len(script):
        return -1, ""
    sign, seen = script[at], 1
    at += 1
    while at < len(script) and seen < len("abc"):
        if script[at] == "\\":
            at += 1
        elif script[at] == sign:
            seen += 1
        at += 1
    if seen < len("abc"):
        return -1, ""
    flags = re.compile(r"[gpiImMe\d]*(?:w[^\n]*)?").match(script, at)
    return (flags.end(), flags[0]) if flags else (at, "")


def _sed(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    scripts = list(list_option_values(words, "-e", "--expression"))
    files = list_operands(words)
    if not scripts and not has_flag(words, "f", "--file"):
        scripts, files = files[:1], files[1:]
    for script in scripts:
        for letter, what in sed_commands(script):
            if letter in "wW":
                yield from path_risk(what, "write")
                continue
            yield "HIGH", "sed runs what it is given" if letter == "e" else "a script of sed that cannot be read"
            yield NestedCommand(what)
    for script in list_option_values(words, "-f", "--file"):
        if command.is_fed or script in _STANDARD_INPUT or script == "/dev/fd/63":
            yield from source_risk(command, [script])
    if has_flag(words, "i", "--in-place"):
        for path in files:
            yield from path_risk(path, "write")


_AWK_PART: Final = re.compile(
    r"\"(?:[^\"\\\n]|\\.)*\"|(?:^|(?<=[(,{;!~&|=\n]))\s*/(?:[^/\\\n]|\\.)+/|\|\||\w+|[^\w\s]", re.MULTILINE
)


def _awk(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    programs = list(list_option_values(words, "-e", "--source"))
    if not programs and not has_flag(words, "f", "--file"):
        programs = _awk_operands(words)[:1]
    for program in programs:
        parts = [part.strip() for part in _AWK_PART.findall(program)]
        if {"system", "|", "getline", "@"} & set(parts):
            yield "HIGH", "awk runs programs"
            yield from code_risk(program)
        for at, part in enumerate(parts):
            if part == ">" and at + 1 < len(parts) and parts[at + 1].startswith('"'):
                yield from path_risk(parts[at + 1].strip('"'), "write")
    for script in list_option_values(words, "-f", "--file"):
        if command.is_fed and script in _STANDARD_INPUT:
            yield from source_risk(command, [script])
        yield "MEDIUM", "awk runs a file that was not inspected"


def _awk_operands(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    skip = False
    for word in words:
        if skip or (word.startswith("-") and len(word) > 1 and not found):
            skip = not skip and word in {"-F", "-v", "--assign", "--field-separator", "-i", "-l"}
        else:
            found.append(word)
    return found


_JOINED_COMMAND: Final = re.compile(r"-[a-zA-Z]+c")


def _editor(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    lines = [*list_option_values(words, "-c", "--cmd", "-S"), *(word[1:] for word in words if word.startswith("+"))]
    lines += [words[at + 1] for at, word in enumerate(words[:-1]) if _JOINED_COMMAND.fullmatch(word)]
    for line in lines:
        if not line.strip().isdigit() and line:
            yield "HIGH", f"{command.program} is given commands"
            yield NestedCommand(line.partition("!")[2])
            yield from code_risk(line)
    if command.is_fed:
        yield from source_risk(command, [])
        for line in (command.input or "").splitlines()[:100]:
            yield NestedCommand(line.partition("!")[2])
    yield "MEDIUM", "a file is edited"
    for path in list_operands(words):
        yield from path_risk(path, "write")


_SHELL_OF_DEBUGGER: Final = re.compile(r"\s*(?:shell|!|pipe|make|platform shell)\s*(.*)")


def _debugger(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    lines = list(
        list_option_values(
            words, "-ex", "--ex", "-iex", "--eval-command", "--init-eval-command", "-o", "--one-line", "-O"
        )
    )
    for line in lines:
        yield "HIGH", f"{command.program} is given commands"
        match = _SHELL_OF_DEBUGGER.match(line)
        yield NestedCommand(match[1] if match else "")
        yield from code_risk(line)
    for _ in list_option_values(words, "-x", "--command", "-s", "--source"):
        yield "HIGH", f"{command.program} is given commands"
    for at, word in enumerate(words):
        if word in {"--args", "-args", "--"}:
            yield NestedCommand(tuple(words[at + 1 :]))
            break
    yield "MEDIUM", "a program is debugged"


_MAKE_RUNS: Final = re.compile(r"\$[({]shell\s+([^)}]*)")


def _make(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for path in list_option_values(words, "-f", "--file", "--makefile"):
        yield "HIGH", f"make runs what {path} says"
        if path in _STANDARD_INPUT:
            yield from source_risk(command, [path])
    for line in list_option_values(words, "--eval"):
        yield "HIGH", "make is given rules"
        yield MentionedWords(tuple(_MAKE_RUNS.findall(line)) or (line,))
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (name in {"SHELL", ".SHELLFLAGS", "MAKEFLAGS", "MAKE"} or _MAKE_RUNS.search(value)):
            yield "HIGH", f"make is told to run a program by {name}"
            yield MentionedWords((value, *_MAKE_RUNS.findall(value)))
    yield "MEDIUM", "make runs what the folder says"


def _trap_or_alias(command: Command) -> Iterator[JudgeFinding]:
    """Judge `trap` and `alias`, which store a line for later."""
    for word in list_operands(command.argv[1:]):
        line = word.partition("=")[2] if command.program == "alias" else word
        if line:
            yield NestedCommand(line)
        if command.program == "trap":
            return


def _eval(command: Command) -> Iterator[JudgeFinding]:
    if any(feed.fetched for feed in command.built):
        yield "CRITICAL", "eval runs what was fetched"
    elif command.built or any("$" in word for word in command.argv[1:]):
        yield "HIGH", "eval runs code that is only known at run time"


CODE_JUDGES: Final[Mapping[str, Judge]] = expand_names(
    {
        ". source": _source,
        "sed gsed ssed": _sed,
        "awk gawk mawk nawk original-awk": _awk,
        "vim vi nvim ex view vimdiff rvim ed red nano micro": _editor,
        "gdb lldb cgdb": _debugger,
        "make gmake remake": _make,
        "trap alias": _trap_or_alias,
        "eval": _eval,
    }
)

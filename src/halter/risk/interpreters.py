"""Judges programs that run code: interpreters, and others that can, such as sed, awk, vim and gdb.

Code is not parsed. It is at least HIGH; its string literals are judged as if they were run, since a shell command is a
string in any language.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from halter.core.text import expand_names
from halter.risk.command_input import CommandInput
from halter.risk.commands import Command, split_shell_code
from halter.risk.places import is_policy, is_root, path_risk
from halter.risk.program_names import family_of
from halter.risk.programs import (
    Judge,
    JudgeFinding,
    MentionedWords,
    NestedCommand,
    find_deleting_word,
    find_reaching_word,
    has_flag,
    list_operands,
    list_option_values,
    name_script,
)

_LITERAL: Final = re.compile(r"'([^'\\\n]*(?:\\.[^'\\\n]*)*)'|\"([^\"\\\n]*(?:\\.[^\"\\\n]*)*)\"|`([^`]*)`")
_DELETING: Final = re.compile(
    r"\b(?:rmtree|rm_rf?|rm_r|rmSync|rmdirSync|rimraf|remove_tree|remove_entry|unlink\w*|remove)\b"
)
_DROPPING: Final = re.compile(r"\.(?:dropDatabase|drop)\(|\.(?:deleteMany|remove)\(\s*(?:\{\s*\}\s*)?\)")
_STARTED_PROGRAM: Final = re.compile(
    r"(?:\b(?:spawn|exec|system|syscmd|esyscmd)[ \t(`{]+|!)[ \t]*([a-z/][^\n;'\")\]}]*)"
)
"""Programs that are started by words without quotes, as in Tcl, m4 and tools with an exclamation mark."""
_MAX_STARTED: Final = 20
_WRITING: Final = re.compile(
    r"(?i:write|unlink|remove|rename|replace|truncate|dump|copy|move|rmtree|chmod|symlink|link)"
    r"|['\"](?:[wax]b?t?\+?|r\+b?|>>?)['\"]|>"
)
_STANDARD_INPUT: Final = frozenset({"-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
_MAX_LITERALS: Final = 200


class Interpreter(msgspec.Struct, frozen=True):
    """The options of an interpreter: those that are followed by code, and those with another value."""

    code: str = ""
    valued: str = ""
    names: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    verbs: frozenset[str] = frozenset()
    loose: bool = False
    permutes: bool = False


def _is_loosely_code(option: str) -> bool:
    """Return true for an option that takes code, abbreviated and in any case, as `-enc` of PowerShell."""
    name = option.lower()
    names = ("-encodedcommand", "-command", "-commandwithargs")
    return len(name) > 1 and any(full_name.startswith(name) for full_name in names)


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
    texts = [match[1] or match[2] or match[3] or "" for match in islice(_LITERAL.finditer(code), _MAX_LITERALS)]
    if _DELETING.search(code) and any(is_root(text) for text in texts if text.startswith(("/", "~"))):
        yield "CRITICAL", "code that deletes a home or system folder"
    if _WRITING.search(code) and any(is_policy(text) for text in texts):
        yield "CRITICAL", "code that changes what an agent may do"
    if _DROPPING.search(code):
        yield "CRITICAL", "code that empties or deletes a database"
    yield MentionedWords(tuple(text for text in texts if text))
    for match in islice(_STARTED_PROGRAM.finditer(code), _MAX_STARTED):
        yield NestedCommand(match[1])


def interpreter_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge an interpreter by the source of its code: its words, its input, a file."""
    program, words = command.program, list(command.argv[1:])
    interpreter = _INTERPRETERS[family_of(program)]
    codes, operands, module = _walk_options(interpreter, words)
    if family_of(program) in {"perl", "ruby"} and any(_IN_PLACE.fullmatch(word) for word in words):
        for path in operands:
            yield from path_risk(path, "write")
    for code in codes:
        yield "HIGH", f"{program} runs code that was not inspected"
        yield from code_risk(code)
    if codes:
        return
    if module:
        match module:
            case "pip" | "pipx" | "uv":
                yield NestedCommand((module, *operands))
            case _ if module.partition(".")[0] == "halter":
                yield NestedCommand(("halter", *operands))
            case "timeit" | "code" | "pdb" | "cProfile" | "profile" | "trace" | "runpy" if operands:
                yield "HIGH", f"{module} runs code that was not inspected"
            case "http.server" | "smtpd":
                yield "HIGH", "serves files to the network"
            case _:
                yield "MEDIUM", f"runs the module {module}"
                yield NestedCommand((module, *operands))
    elif not operands and {"--version", "-V", "-VV", "--help", "-h", "-v"} & set(words) and not command.is_fed:
        return
    elif operands and operands[0] not in _STANDARD_INPUT and operands[0] != "/dev/fd/63" and "$" not in operands[0]:
        yield "MEDIUM", f"{program} runs a file that was not inspected"
        if verb := find_deleting_word(operands[1:]):
            yield "HIGH", f"{operands[0]} {verb} may delete data"
        if verb := find_reaching_word((name_script(operands[0]), *operands[1:])):
            yield "HIGH", f"{operands[0]} {verb} may publish or change rights"
    else:
        yield from source_risk(command, operands[:1])
        if command.input:
            yield from code_risk(command.input)


def _walk_options(interpreter: Interpreter, words: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Return the code among the options, the words after the options, and the module that is run."""
    codes: list[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and len(words[position]) > 1:
        word = words[position]
        name, equals, value = word.partition("=")
        following = words[position + 1] if position + 1 < len(words) else ""
        position += 1
        if name in interpreter.names or (interpreter.loose and _is_loosely_code(name)):
            codes.append(value if equals else following)
            position += not equals
        elif name in interpreter.takes:
            position += not equals
        elif not word.startswith("--"):
            for index, letter in enumerate(word[1:], 2):
                if letter in interpreter.code:
                    codes.append(word[index:] or following)
                    position += not word[index:]
                    break
                if letter in interpreter.valued:
                    position += not word[index:]
                    if letter == "m":
                        return codes, list(words[position:]), word[index:] or following
                    break
    operands = list(words[position:])
    if interpreter.permutes:
        codes += list_option_values(operands, *interpreter.names)
    if operands and operands[0] in interpreter.verbs:
        codes.append(" ".join(operands[1:]))
    return codes, operands, ""


def source_risk(command: Command, script: Sequence[str]) -> Iterator[JudgeFinding]:
    """Judge code that comes through a pipe, a here-document or a process substitution."""
    from_process = {*script, *command.reads} & {"/dev/fd/63"}
    feeds: tuple[CommandInput, ...] = command.file_inputs if from_process else (command.feed,) if command.feed else ()
    if any(feed.fetched for feed in (*feeds, *command.word_inputs)):
        yield "CRITICAL", f"{command.program} runs downloaded code"
    elif feeds or command.is_fed or script:
        names = ", ".join(name for feed in feeds for name in feed.programs if name)
        yield "HIGH", f"{command.program} runs the output of {names or 'the line'}"
    else:
        yield "MEDIUM", f"{command.program} starts interactively"


def shell_risk(command: Command) -> Iterator[JudgeFinding]:
    """Judge a shell; what it runs is judged separately."""
    code, operands = split_shell_code(command.argv)
    if any(True for _ in list_option_values(command.argv[1:], "--rcfile", "--init-file")):
        yield "HIGH", f"{command.program} runs a file first"
    if code is not None:
        return
    if operands and operands[0] not in _STANDARD_INPUT and operands[0] != "/dev/fd/63" and "$" not in operands[0]:
        yield "MEDIUM", f"{command.program} runs a file that was not inspected"
        if not has_flag(command.argv[1:], "n") and find_reaching_word((name_script(operands[0]), *operands[1:])):
            yield "HIGH", f"{operands[0]} may publish or change rights"
    else:
        yield from source_risk(command, operands[:1])


def _source(command: Command) -> Iterator[JudgeFinding]:
    script = list(command.argv[1:2])
    if script and script[0].endswith("/bin/activate"):
        yield "MEDIUM", "activates a virtual environment"
        return
    yield "HIGH", "runs lines of a file that were not inspected"
    if script and (script[0] in _STANDARD_INPUT or script[0] == "/dev/fd/63"):
        yield from source_risk(command, script)
        for feed in command.file_inputs:
            yield NestedCommand(feed.text or "")
        yield NestedCommand(command.input or "")


_SED_ADDRESS: Final = re.compile(
    r"[\s;]*(?:\d+(?:~\d+)?|\$|/(?:[^/\\\n]|\\.)*/[IM]*|\\(.)(?:(?!\1)[^\\\n]|\\.)*\1[IM]*|[,+~!\s\d]+)*"
)
_SED_PLAIN: Final = frozenset("=dDgGhHlnNpPqQxzFv{}L")


def sed_commands(script: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a sed script that run a program or write a file, and `?` for what cannot be parsed."""
    index = 0
    while index < len(script):
        address = _SED_ADDRESS.match(script, index)
        index = address.end() if address else index
        if index >= len(script):
            return
        letter = script[index]
        index += 1
        end = script.find("\n", index)
        end = len(script) if end < 0 else end
        if letter in _SED_PLAIN:
            continue
        if letter in "#:btTaicrR":
            index = end
            if letter in "btT":
                index = min(
                    (position for position in (script.find(";", index), script.find("}", index)) if position >= 0),
                    default=end,
                )
        elif letter in "eWw":
            yield letter, script[index:end].strip()
            index = end
        elif letter in "sy":
            index, flags = _sed_substitution(script, index)
            if index < 0:
                yield "?", ""
                return
            if letter == "s" and "e" in flags.split("w")[0]:
                yield "e", ""
            if letter == "s" and "w" in flags:
                yield "w", flags.partition("w")[2].strip()
        else:
            yield "?", ""
            return


def _sed_substitution(script: str, index: int) -> tuple[int, str]:
    if index >= len(script):
        return -1, ""
    sign, sign_count = script[index], 1
    index += 1
    while index < len(script) and sign_count < len("abc"):
        if script[index] == "\\":
            index += 1
        elif script[index] == sign:
            sign_count += 1
        index += 1
    if sign_count < len("abc"):
        return -1, ""
    flags = re.compile(r"[gpiImMe\d]*(?:w[^\n]*)?").match(script, index)
    return (flags.end(), flags[0]) if flags else (index, "")


def _sed(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    scripts = list(list_option_values(words, "-e", "--expression"))
    files = list_operands(words)
    if not scripts and not has_flag(words, "f", "--file"):
        scripts, files = files[:1], files[1:]
    for script in scripts:
        for letter, argument in sed_commands(script):
            if letter in "wW":
                yield from path_risk(argument, "write")
                continue
            yield "HIGH", "sed runs a command" if letter == "e" else "a sed script that cannot be parsed"
            yield NestedCommand(argument)
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
        symbols = [symbol.strip() for symbol in _AWK_PART.findall(program)]
        if {"system", "|", "getline", "@"} & set(symbols):
            yield "HIGH", "awk runs programs"
            yield from code_risk(program)
        for index, symbol in enumerate(symbols):
            if symbol == ">" and index + 1 < len(symbols) and symbols[index + 1].startswith('"'):
                yield from path_risk(symbols[index + 1].strip('"'), "write")
    for script in list_option_values(words, "-f", "--file"):
        if command.is_fed and script in _STANDARD_INPUT:
            yield from source_risk(command, [script])
        yield "MEDIUM", "awk runs a file that was not inspected"


def _awk_operands(words: Sequence[str]) -> list[str]:
    operands: list[str] = []
    is_value = False
    for word in words:
        if is_value or (word.startswith("-") and len(word) > 1 and not operands):
            is_value = not is_value and word in {"-F", "-v", "--assign", "--field-separator", "-i", "-l"}
        else:
            operands.append(word)
    return operands


_JOINED_COMMAND: Final = re.compile(r"-[a-zA-Z]+c")


def _editor(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    lines = [*list_option_values(words, "-c", "--cmd", "-S"), *(word[1:] for word in words if word.startswith("+"))]
    lines += [words[index + 1] for index, word in enumerate(words[:-1]) if _JOINED_COMMAND.fullmatch(word)]
    for line in lines:
        if not line.strip().isdigit() and line:
            yield "HIGH", f"{command.program} runs commands from its arguments"
            yield NestedCommand(line.partition("!")[2])
            yield from code_risk(line)
    if command.is_fed:
        yield from source_risk(command, [])
        for line in (command.input or "").splitlines()[:100]:
            yield NestedCommand(line.partition("!")[2])
    yield "MEDIUM", "edits a file"
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
        yield "HIGH", f"{command.program} runs commands from its arguments"
        match = _SHELL_OF_DEBUGGER.match(line)
        yield NestedCommand(match[1] if match else "")
        yield from code_risk(line)
    for _ in list_option_values(words, "-x", "--command", "-s", "--source"):
        yield "HIGH", f"{command.program} runs commands from its arguments"
    for index, word in enumerate(words):
        if word in {"--args", "-args", "--"}:
            yield NestedCommand(tuple(words[index + 1 :]))
            break
    yield "MEDIUM", "debugs a program"


_MAKE_RUNS: Final = re.compile(r"\$[({]shell\s+([^)}]*)")


def _make(command: Command) -> Iterator[JudgeFinding]:
    words = command.argv[1:]
    for path in list_option_values(words, "-f", "--file", "--makefile"):
        yield "HIGH", f"make runs the rules of {path}"
        if path in _STANDARD_INPUT:
            yield from source_risk(command, [path])
    for line in list_option_values(words, "--eval"):
        yield "HIGH", "make runs rules from its arguments"
        yield MentionedWords(tuple(_MAKE_RUNS.findall(line)) or (line,))
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (name in {"SHELL", ".SHELLFLAGS", "MAKEFLAGS", "MAKE"} or _MAKE_RUNS.search(value)):
            yield "HIGH", f"{name} makes make run a program"
            yield MentionedWords((value, *_MAKE_RUNS.findall(value)))
    if verb := find_reaching_word(words):
        yield "HIGH", f"make {verb} may publish or change rights"
    yield "MEDIUM", "make runs the rules of the folder"


def _trap_or_alias(command: Command) -> Iterator[JudgeFinding]:
    """Judge `trap` and `alias`, which store a line for later."""
    for word in list_operands(command.argv[1:]):
        line = word.partition("=")[2] if command.program == "alias" else word
        if line:
            yield NestedCommand(line)
        if command.program == "trap":
            return


def _eval(command: Command) -> Iterator[JudgeFinding]:
    if any(feed.fetched for feed in command.word_inputs):
        yield "CRITICAL", "eval runs downloaded code"
    elif command.word_inputs or any("$" in word for word in command.argv[1:]):
        yield "HIGH", "eval runs code that is known only at run time"


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

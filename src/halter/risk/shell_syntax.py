"""Parses a shell line into its simple commands, with their words, redirections and inputs.

Quotes, escapes, braces, substitutions, here-documents, functions and compound commands are parsed as in a POSIX shell
with the usual extensions. Values that a shell knows only at run time (a variable, the output of a command) stay as
written; a second reading fills in everything that the line itself defines.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from halter.risk.command_input import (
    CommandInput,
    fetches,
    join_command_inputs,
    trace_output,
    unescape_sign,
)

MAX_LINE_DEPTH: Final = 16

_MAX_BRACE_WORDS: Final = 256
_MAX_BRACE_LENGTH: Final = 4096
_MAX_SOURCES: Final = 20
_MAX_COMMANDS: Final = 1000
_MAX_WORDS: Final = 10_000
_MAX_GROWTH: Final = 4
_SCANNED_PER_WORD: Final = 20
"""As many characters of an expression as count as one more word."""

_SPECIAL: Final = " \t\n\r{},*?[]~$=!#"
_SHIFT: Final = 0xF0000
_HIDE: Final = {ord(sign): chr(_SHIFT + ord(sign)) for sign in _SPECIAL}
_SHOW: Final = {_SHIFT + ord(sign): sign for sign in _SPECIAL}

_PLAIN: Final = re.compile(r"[^\s'\"\\$`;&|<>()]+|[^\S \t\r\n]+")
_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT: Final = re.compile(r"#[^\n]*")
_REDIRECT: Final = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>\||>&|&>>|&>|<(?!\()|>(?!\())")
_OPERATOR: Final = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|\n]")
_IN_ARITHMETIC: Final = re.compile(r"[^()`'\"$\\]+")
_TWO_WORDS: Final = re.compile(r"[A-Za-z_][\w./-]*\s+(?:--?[A-Za-z]|[~.]{0,2}/[A-Za-z]|[\w$])")
"""Two words in sequence, which no expression has."""
_SEQUENCE: Final = re.compile(rf"{_TWO_WORDS.pattern}|;")
_COMMANDS: Final = re.compile(rf"{_SEQUENCE.pattern}|^\s*[A-Za-z_~./][\w./-]*\s*$")
"""The same, or a single name, which as a command is rather a program."""
_COPROCESS_NAME: Final = re.compile(r"[ \t]+\w+(?=[ \t]+[({])")
_PARAMETER: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED: Final = re.compile(r"\$\{(\w+|[@*])(?:\[[@*]\])?(?::?([-=])([\s\S]*))?\}")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
_ANSI: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|[\s\S])")
_ANSI_TEXT: Final = re.compile(r"\$'([^'\\]*(?:\\[\s\S][^'\\]*)*)'")
_IN_DOUBLE: Final = re.compile(r"[^\"\\$`]+")
_IN_BRACES: Final = re.compile(r"[^}'\"\\$`]+")
_BACKTICKED: Final = re.compile(r"`([^`\\]*(?:\\[\s\S][^`\\]*)*)`")
_BACKTICK_ESCAPE: Final = re.compile(r"\\([`\\$\"])")
_GROUP: Final = re.compile(r"\{([^{},]*(?:,[^{},]*)+)\}")

_DEFAULT_VALUES: Final = {"IFS": " ", "SHELL": "sh", "BASH": "bash"}
_OPENING_KEYWORDS: Final = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "coproc"})
_OPENING_COMMANDS: Final = frozenset({"for", "case", "select"})
_CLOSING_KEYWORDS: Final = frozenset({"fi", "done", "esac", "}"})


class MalformedShell(Exception):
    """A line that a shell would reject."""


class TooComplex(Exception):
    """A line that is nested more deeply, or expands to more words, than the limits."""


class _Word(msgspec.Struct):
    """A word while it is read. Quoted characters are masked, so that nothing expands them."""

    raw: str = ""
    resolved: str = ""
    quoted: bool = False

    def add(self, raw: str, resolved: str | None = None) -> None:
        self.raw += raw
        self.resolved += raw if resolved is None else resolved


class SimpleCommand(msgspec.Struct):
    """One command of a line; its here-documents come only after it is read.

    `words` are as written, without quotes; `resolved_words` include the variables and outputs that the line defines.
    `feed` comes through a pipe, `text` from a here-document or here-string. `word_inputs` and `file_inputs` are
    substitutions: the first are part of a word, the second are read as files. A command that `is_inner` is inside a
    substitution. A `recursive` command is a function that calls itself. `feeds` is what it writes.
    """

    words: list[str] = msgspec.field(default_factory=list[str])
    resolved_words: list[str] = msgspec.field(default_factory=list[str])
    sets: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    writes: list[str] = msgspec.field(default_factory=list[str])
    reads: list[str] = msgspec.field(default_factory=list[str])
    texts: list[str] = msgspec.field(default_factory=list[str])
    word_inputs: list[CommandInput] = msgspec.field(default_factory=list[CommandInput])
    file_inputs: list[CommandInput] = msgspec.field(default_factory=list[CommandInput])
    before: "list[SimpleCommand] | None" = None
    opens: bool = False
    closes: bool = False
    is_inner: bool = False
    recursive: bool = False
    piped: bool = False
    feed: CommandInput | None = None
    feeds: CommandInput | None = None

    @property
    def text(self) -> str | None:
        return "\n".join(self.texts) if self.texts else None


class _Values(msgspec.Struct):
    """The parameters and aliases that a line defines, the processes it writes to, and the budget for parsing it.

    Those in `list_names` have several values, also in double quotes. Expansion is limited, since `a=$a$a` doubles.
    """

    value_by_name: dict[str, str]
    remaining_length: int
    list_names: set[str] = msgspec.field(default_factory=lambda: {"@"})
    alias_by_name: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    consumers: list[list[SimpleCommand]] = msgspec.field(default_factory=list[list[SimpleCommand]])
    commands: int = 0
    words: int = 0

    def count(self, *, commands: int = 0, words: int = 0) -> None:
        self.commands += commands
        self.words += words
        if self.commands > _MAX_COMMANDS or self.words > _MAX_WORDS:
            raise TooComplex

    def spend(self, value: str) -> bool:
        self.remaining_length -= len(value)
        return self.remaining_length >= 0


class _Document(msgspec.Struct):
    """A here-document that was announced and is not read yet."""

    draft: SimpleCommand
    end: str
    indented: bool
    expands: bool


def parse_shell_line(line: str, parameters: Mapping[str, str] | None = None) -> list[SimpleCommand]:
    """Parse a line; values of its positional words may be given, such as those after `sh -c LINE`."""
    values = _Values(
        {**_DEFAULT_VALUES, **(parameters or {})}, remaining_length=_MAX_GROWTH * len(line) + _MAX_BRACE_LENGTH
    )
    return _Reader(line.replace("\0", ""), values, 0).read()


class _Reader:
    def __init__(self, text: str, values: _Values, depth: int) -> None:
        self._text = text
        self._at: int = 0
        self._values = values
        self._depth = depth
        self._documents: list[_Document] = []
        self._substitutions: int = 0
        self._inner: list[SimpleCommand] = []
        self._defines = ""
        self._body_at: int = -1

    def read(self) -> list[SimpleCommand]:
        """Parse to the end: the insides of substitutions first, then the commands and the processes they write to."""
        commands = _finish_commands(self._group("", None))
        for drafts in reversed(self._values.consumers):
            commands += _finish_commands(drafts, inner=True)
        return [*self._inner, *commands]

    # Commands

    def _group(self, end: str, source: list[SimpleCommand] | None) -> list[SimpleCommand]:
        """Read commands up to the end of a group; all of them can read from `source`."""
        drafts: list[SimpleCommand] = []
        latest: list[SimpleCommand] = []
        upstream, inherited_source, is_continued = source, source, False
        case_depth, pattern_start = 0, -1
        while not self._ends(end):
            operator = _OPERATOR.match(self._text, self._at)
            if self._text[self._at] == ")":
                self._at += 1
                if pattern_start < 0 and end == ")":
                    return drafts
                if pattern_start < 0:
                    raise MalformedShell
                del drafts[pattern_start:]
                pattern_start = -1
            elif self._text[self._at] == "(" and pattern_start == len(drafts):
                self._at += 1
            elif operator and not _REDIRECT.match(self._text, self._at):
                self._at = operator.end()
                if operator[0] == "\n":
                    self._read_documents()
                if operator[0] != "\n" or not is_continued:
                    upstream = _find_sources(operator[0], drafts, latest) or inherited_source
                is_continued = operator[0] in {"|", "|&"} or (is_continued and operator[0] == "\n")
                if case_depth and operator[0].startswith((";;", ";&")):
                    pattern_start = len(drafts)
            else:
                latest, is_continued = self._command(upstream), False
                drafts += latest
                latest_draft = latest[-1]
                first_word = latest_draft.words[0] if latest_draft.words else ""
                if first_word == "case":
                    case_depth, pattern_start = case_depth + 1, len(drafts)
                if latest_draft.closes:
                    inherited_source, pattern_start = source, -1
                elif (latest_draft.opens or first_word in _OPENING_COMMANDS) and upstream:
                    inherited_source = upstream
                if first_word or self._peek() != "(":
                    upstream = inherited_source
        return drafts

    def _ends(self, end: str) -> bool:
        self._skip_blanks()
        if self._at < len(self._text):
            return False
        if end:
            raise MalformedShell
        return True

    def _command(self, upstream: list[SimpleCommand] | None) -> list[SimpleCommand]:
        self._values.count(commands=1)
        draft = SimpleCommand(before=upstream)
        nested_drafts: list[SimpleCommand] = []
        if self._peek() == "(" and not self._read_arithmetic(self._at, draft, _COMMANDS):
            is_body = self._at == self._body_at
            self._at += 1
            nested_drafts = self._read_nested(upstream)
            self._defines = "" if is_body else self._defines
        self._read_words(draft)
        for source_draft in upstream or ():
            source_draft.piped = True
        return [*nested_drafts, draft]

    def _read_nested(self, source: list[SimpleCommand] | None) -> list[SimpleCommand]:
        with self._deeper():
            return self._group(")", source)

    @contextmanager
    def _deeper(self) -> Generator[None]:
        self._depth += 1
        if self._depth > MAX_LINE_DEPTH:
            raise TooComplex
        try:
            yield
        finally:
            self._depth -= 1

    def _read_words(self, draft: SimpleCommand) -> None:
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                break
            redirect = _REDIRECT.match(self._text, self._at)
            if redirect:
                self._at = redirect.end()
                self._redirect(draft, redirect[1])
            elif self._text[self._at] in ";&|\n)":
                break
            elif self._text[self._at] == "(":
                if self._ends_before_parenthesis(draft):
                    break
            else:
                self._add_word(draft)
                self._drop_keyword(draft)
        if draft.words[:2] == ["set", "--"]:
            words = draft.resolved_words[2:]
            for name in ("@", "*"):
                self._values.value_by_name[name] = " ".join(words)
            for number, word in enumerate(words, 1):
                self._values.value_by_name[str(number)] = word
        if draft.words[:1] == ["for"] and "in" in draft.words[2:3]:
            self._values.list_names.add(draft.words[1])
            self._values.value_by_name[draft.words[1]] = " ".join(draft.resolved_words[3:])
        if draft.words[:1] == ["alias"]:
            self._values.alias_by_name |= dict(word.split("=", 1) for word in draft.resolved_words[1:] if "=" in word)

    def _ends_before_parenthesis(self, draft: SimpleCommand) -> bool:
        """Read a parenthesis after words, unless it begins the next command or a pattern of `case`."""
        if draft.words == ["for"] and self._read_arithmetic(self._at, draft, _TWO_WORDS):
            return True
        if not (draft.words or draft.sets or draft.writes) or draft.words[:1] == ["case"]:
            return True
        self._at += 1
        self._skip_blanks()
        if len(draft.words) != 1 or self._peek() != ")":
            raise MalformedShell
        self._at += 1
        self._defines = draft.words[0]
        self._skip_blanks()
        self._body_at = self._at
        draft.words, draft.resolved_words = [], []
        return False

    def _add_word(self, draft: SimpleCommand) -> None:
        word = self._read_word(draft)
        assignment = _ASSIGNMENT.match(word.raw)
        is_export = draft.words[:1] and draft.words[0] in {"export", "declare", "local", "readonly", "typeset"}
        if assignment and (not draft.words or is_export):
            value = word.resolved[assignment.end() :].translate(_SHOW)
            self._values.value_by_name[assignment[1]] = value
            draft.sets.append((assignment[1], value))
            if not draft.words:
                return
        alias = self._values.alias_by_name.get(word.resolved) if not draft.words else None
        if alias is not None:
            self._values.count(words=len(alias.split()))
            word.resolved = alias
        draft.words += [
            expanded_word.translate(_SHOW) for expanded_word in _expand_braces(word.raw) if expanded_word or word.quoted
        ]
        for expanded_word in _expand_braces(word.resolved):
            draft.resolved_words += [
                piece.translate(_SHOW) for piece in expanded_word.split() or ([""] if word.quoted else [])
            ]
        if len(draft.words) == 1 and draft.words[0] == self._defines:
            draft.recursive = True

    def _drop_keyword(self, draft: SimpleCommand) -> None:
        """Drop the keywords of compound commands, which leaves their commands."""
        match draft.words:
            case [word] if word in _OPENING_KEYWORDS:
                draft.opens = True
                name = _COPROCESS_NAME.match(self._text, self._at) if word == "coproc" else None
                self._at = name.end() if name else self._at
            case [word] if word in _CLOSING_KEYWORDS:
                draft.closes, self._defines = True, ""
            case ["function", name]:
                self._defines = name
            case ["time"] | ["time", "-p"] if self._next_sign() != "-":
                pass
            case ["[["]:
                while draft.words[-1] != "]]":
                    self._skip_blanks()
                    if self._at >= len(self._text):
                        raise MalformedShell
                    if self._text[self._at] in ";&|<>()\n":
                        self._at += 1
                    else:
                        draft.words.append(self._read_word(draft).raw.translate(_SHOW))
                draft.resolved_words = list(draft.words)
                return
            case _:
                return
        draft.words, draft.resolved_words = [], []

    # Redirections

    def _redirect(self, draft: SimpleCommand, sign: str) -> None:
        self._skip_blanks()
        word = self._read_word(draft)
        target = word.raw.translate(_SHOW)
        match sign:
            case "<<" | "<<-":
                self._documents.append(_Document(draft, target, sign == "<<-", not word.quoted))
            case "<<<":
                draft.texts.append(word.resolved.translate(_SHOW))
            case "<":
                draft.reads.append(target)
            case "<&" | ">&" if target.rstrip("-").isdigit() or target == "-":
                pass
            case _:
                draft.writes.append(target)
        if not target and not word.quoted:
            raise MalformedShell

    def _read_documents(self) -> None:
        for document in self._documents:
            lines: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                line = self._text[self._at : end if end >= 0 else len(self._text)]
                if self._substitutions and line.lstrip("\t").startswith(document.end + ")"):
                    self._at += line.index(")")
                    break
                self._at = end + 1 if end >= 0 else len(self._text)
                line = line.lstrip("\t") if document.indented else line
                if line.rstrip("\r") == document.end:
                    break
                lines.append(line)
            body = "\n".join(lines)
            document.draft.texts.append(body)
            if document.expands:
                self._inner += _Reader(body, self._values, self._depth + 1).read_document()
        self._documents = []

    def read_document(self) -> list[SimpleCommand]:
        """Return the commands that the expansion of a here-document runs."""
        self._double(_Word(), SimpleCommand(), document=True)
        return self._inner

    # Words

    def _read_word(self, draft: SimpleCommand) -> _Word:
        word = _Word()
        self._values.count(words=1)
        while self._at < len(self._text):
            plain_match = _PLAIN.match(self._text, self._at)
            sign = self._text[self._at]
            if plain_match:
                word.add(plain_match[0])
                self._at = plain_match.end()
            elif self._read_special(word, draft, quoted=False):
                continue
            elif sign in "<>" and self._text.startswith("(", self._at + 1):
                self._read_process(draft)
                word.add("/dev/fd/63")
            elif sign == "(" and word.raw.endswith(("=", "?", "*", "+", "@", "!")):
                self._read_list(word, draft)
            else:
                break
        return word

    def _read_special(self, word: _Word, draft: SimpleCommand, *, quoted: bool) -> bool:
        """Read a quoted text, an escape or an expansion, if one begins here."""
        sign = self._peek()
        if sign == "$":
            self._dollar(word, draft, quoted=quoted)
        elif sign == "`":
            self._backticks(word, draft, quoted=quoted)
        elif sign == "'" and not quoted:
            word.quoted = True
            word.add(self._read_until("'").translate(_HIDE))
        elif sign == '"':
            word.quoted = True
            self._at += 1
            self._double(word, draft)
        elif sign == "\\":
            next_sign = self._text[self._at + 1 : self._at + 2]
            if next_sign != "\n":
                word.quoted = True
                word.add((next_sign or "\\").translate(_HIDE))
            self._at += 2
        else:
            return False
        return True

    def _read_until(self, sign: str) -> str:
        end = self._text.find(sign, self._at + 1)
        if end < 0:
            raise MalformedShell
        quoted_text = self._text[self._at + 1 : end]
        self._at = end + 1
        return quoted_text

    def _double(self, word: _Word, draft: SimpleCommand, *, document: bool = False) -> None:
        while True:
            chunk = _IN_DOUBLE.match(self._text, self._at)
            if chunk:
                word.add(chunk[0].translate(_HIDE))
                self._at = chunk.end()
            if self._at >= len(self._text):
                if document:
                    return
                raise MalformedShell
            sign = self._text[self._at]
            next_sign = self._text[self._at + 1 : self._at + 2]
            if sign == "$":
                self._dollar(word, draft, quoted=True)
            elif sign == "`":
                self._backticks(word, draft, quoted=True)
            elif sign == "\\":
                backslash = "" if next_sign in {*'$`"\\', "\n"} else "\\"
                word.add((backslash + ("" if next_sign == "\n" else next_sign)).translate(_HIDE))
                self._at += 2
            else:
                self._at += 1
                if not document:
                    return

    def _dollar(self, word: _Word, draft: SimpleCommand, *, quoted: bool) -> None:
        next_sign = self._text[self._at + 1 : self._at + 2]
        parameter = _PARAMETER.match(self._text, self._at + 1)
        start = self._at
        if next_sign == "(" and self._read_arithmetic(start + 1, draft, _SEQUENCE):
            word.add(self._text[start : self._at].translate(_HIDE))
        elif next_sign == "(":
            self._at += 2
            feed = self._read_substitution(draft)
            draft.word_inputs.append(feed)
            self._append(word, self._text[start : self._at], feed.text, quoted=quoted)
        elif next_sign == "{":
            self._read_braced_parameter(word, draft, quoted=quoted)
        elif next_sign == "'" and not quoted:
            match = _ANSI_TEXT.match(self._text, self._at)
            if not match:
                raise MalformedShell
            word.quoted = True
            word.add(_ANSI.sub(lambda sign: unescape_sign(sign, ""), match[1]).translate(_HIDE))
            self._at = match.end()
        elif next_sign == '"' and not quoted:
            self._at += 1
        elif parameter:
            source = "$" + parameter[0]
            self._at = parameter.end()
            self._append(
                word,
                source,
                self._values.value_by_name.get(parameter[0]),
                quoted=quoted and parameter[0] not in self._values.list_names,
            )
        else:
            word.add("$".translate(_HIDE))
            self._at += 1

    def _append(self, word: _Word, source: str, value: str | None, *, quoted: bool) -> None:
        """Add an expansion: the source text, and the value if it is known."""
        if value is None or not self._values.spend(value):
            word.add(source.translate(_HIDE))
            return
        expanded_text = value.rstrip("\n")
        word.add(source.translate(_HIDE), expanded_text.translate(_HIDE) if quoted else expanded_text)

    def _read_process(self, draft: SimpleCommand) -> None:
        """Read a process that a command reads as a file, or writes to as one."""
        sign, preceding_text = self._text[self._at], self._text[: self._at]
        self._at += 2
        if sign == "<":
            draft.file_inputs.append(self._read_substitution(draft))
            return
        source = draft
        if not draft.words:
            is_fetched = not self._values.spend(preceding_text) or fetches([preceding_text])
            source = SimpleCommand(feeds=CommandInput(("a process",), is_fetched))
        self._values.consumers.append(self._read_substituted([source]))

    def _read_substitution(self, draft: SimpleCommand) -> CommandInput:
        """Read a substitution, which reads the same input as its command, and return its output."""
        drafts = self._read_substituted(draft.before)
        self._inner += _finish_commands(drafts, inner=True)
        return _trace_pipelines(drafts)

    def _read_substituted(self, source: list[SimpleCommand] | None) -> list[SimpleCommand]:
        """Read the commands of a substitution, which has its own here-documents."""
        documents, self._documents = self._documents, []
        self._substitutions += 1
        drafts = self._read_nested(source)
        self._substitutions -= 1
        self._documents = documents
        return drafts

    def _read_arithmetic(self, start: int, draft: SimpleCommand, commands: re.Pattern[str]) -> bool:
        """Read an expression in double parentheses, with its substitutions. Return false if it is something else.

        What has the form of `commands` is read as such, since a shell without such expressions runs it in a subshell.
        """
        if not self._text.startswith("((", start):
            return False
        resume = self._at, list(self._documents), self._substitutions
        inner_count, input_count = len(self._inner), len(draft.word_inputs)
        self._at = start + 2
        expression = None
        with suppress(MalformedShell), self._deeper():
            expression = self._read_expression(draft)
        self._values.count(words=1 + (self._at - start) // _SCANNED_PER_WORD)
        closes = self._text.startswith("))", self._at)
        if expression is not None and closes and not commands.search(expression):
            self._at += 2
            return True
        self._at, self._documents, self._substitutions = resume
        del self._inner[inner_count:], draft.word_inputs[input_count:]
        return False

    def _read_expression(self, draft: SimpleCommand) -> str:
        """Read up to the parenthesis that closes an expression; `$` stands for what is known only at run time."""
        expression, open_count = "", 0
        while self._at < len(self._text) and (open_count or self._peek() != ")"):
            chunk = _IN_ARITHMETIC.match(self._text, self._at)
            sign, special = self._peek(), _Word()
            if chunk:
                self._at = chunk.end()
                expression += chunk[0]
            elif self._read_special(special, draft, quoted=False):
                expression += "$" if sign in "$`" else special.raw
            else:
                open_count += 1 if sign == "(" else -1
                self._at += 1
                if open_count > MAX_LINE_DEPTH:
                    raise TooComplex
        return expression

    def _backticks(self, word: _Word, draft: SimpleCommand, *, quoted: bool) -> None:
        match = _BACKTICKED.match(self._text, self._at)
        if not match or self._depth >= MAX_LINE_DEPTH:
            raise TooComplex if match else MalformedShell
        self._at = match.end()
        reader = _Reader(_BACKTICK_ESCAPE.sub(r"\1", match[1]), self._values, self._depth + 1)
        drafts = reader._group("", draft.before)
        self._inner += [*reader._inner, *_finish_commands(drafts, inner=True)]
        draft.word_inputs.append(_trace_pipelines(drafts))
        self._append(word, match[0], draft.word_inputs[-1].text, quoted=quoted)

    def _read_braced_parameter(self, word: _Word, draft: SimpleCommand, *, quoted: bool) -> None:
        """Read a parameter in braces, with its default."""
        start = self._at
        self._at += 2
        with self._deeper():
            self._skip_default(draft, quoted=quoted)
        source = self._text[start : self._at]
        match = _BRACED.fullmatch(source)
        value = self._values.value_by_name.get(match[1]) if match else None
        if match and match[3] and value is None:
            value = match[3].strip("\"'")
            if match[2] == "=":
                self._values.value_by_name[match[1]] = value
        is_list = "@" in source or (match and match[1] in self._values.list_names)
        self._append(word, source, value, quoted=quoted and not is_list)

    def _skip_default(self, draft: SimpleCommand, *, quoted: bool) -> None:
        """Read up to the brace that closes a parameter."""
        default_word = _Word()
        while self._peek() != "}":
            chunk = _IN_BRACES.match(self._text, self._at)
            if chunk:
                self._at = chunk.end()
            elif not self._read_special(default_word, draft, quoted=quoted):
                if self._at >= len(self._text):
                    raise MalformedShell
                self._at += 1
        self._at += 1

    def _read_list(self, word: _Word, draft: SimpleCommand) -> None:
        """Read an array, or a pattern in parentheses."""
        self._at += 1
        elements: list[_Word] = []
        with self._deeper():
            while (sign := self._next_sign()) != ")":
                if not sign:
                    raise MalformedShell
                if sign in ";&|<>\n(":
                    self._at += 1
                else:
                    elements.append(self._read_word(draft))
        self._at += 1
        raw_list = "(" + " ".join(element.raw for element in elements) + ")"
        word.add(raw_list.translate(_HIDE), " ".join(element.resolved for element in elements))

    def _skip_blanks(self) -> None:
        while True:
            match = _BLANK.match(self._text, self._at) or (
                _COMMENT.match(self._text, self._at) if self._peek() == "#" else None
            )
            if not match:
                return
            self._at = match.end()

    def _next_sign(self) -> str:
        self._skip_blanks()
        return self._peek()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]


def _find_sources(
    operator: str, drafts: list[SimpleCommand], latest: list[SimpleCommand]
) -> list[SimpleCommand] | None:
    """Find the commands whose output the next one reads."""
    if operator not in {"|", "|&"} or not latest:
        return None
    sources = drafts[-_MAX_SOURCES:] if latest[-1].closes else latest[-_MAX_SOURCES:]
    for draft in sources:
        _trace_command(draft)
    return sources


def _expand_braces(text: str) -> list[str]:
    if "{" not in text or "," not in text:
        return [text]
    if len(text) > _MAX_BRACE_LENGTH:
        raise TooComplex
    expanded_words: list[str] = []
    pending = [text]
    while pending:
        candidate = pending.pop()
        match = _GROUP.search(candidate)
        if match:
            alternatives = match[1].split(",")
            pending += [
                candidate[: match.start()] + alternative + candidate[match.end() :]
                for alternative in reversed(alternatives)
            ]
        else:
            expanded_words.append(candidate)
        if len(expanded_words) + len(pending) > _MAX_BRACE_WORDS:
            raise TooComplex
    return expanded_words


def _trace_command(command: SimpleCommand) -> None:
    """Find what a command reads from others, and what it writes."""
    feed = join_command_inputs([upstream.feeds for upstream in command.before or () if upstream.feeds])
    if command.words and (command.feeds is None or command.texts or feed is not command.feed):
        command.feeds = trace_output(command.resolved_words or command.words, feed, command.text)
    command.feed = feed


def _finish_commands(commands: Sequence[SimpleCommand], *, inner: bool = False) -> list[SimpleCommand]:
    """Trace commands and leave out the empty ones; those that feed a command come before it."""
    for command in commands:
        command.is_inner = inner
        _trace_command(command)
    return [command for command in commands if command.words or command.writes or command.sets]


def _trace_pipelines(drafts: Sequence[SimpleCommand]) -> CommandInput:
    """Return the output of commands, which is that of the last command of each pipeline."""
    return (
        join_command_inputs([draft.feeds for draft in drafts if draft.feeds and not draft.piped][-_MAX_SOURCES:])
        or CommandInput()
    )

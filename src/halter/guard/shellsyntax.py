"""The grammar of a line for a shell: its simple commands, their words and redirections, and what feeds them.

Quotes, escapes, braces, substitutions, here-documents, functions and compound commands are read as a POSIX shell with
the usual extensions reads them. What a shell would only know while it runs (a variable, the output of a command) stays
as it is written; beside it stands a second reading, with everything put in that the line itself gives.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from halter.guard.outputs import Feed, feed_of, joined

DEEPEST: Final = 16
"""How deeply substitutions and groups may stand in each other."""

_WORDS_OF_BRACES: Final = 256
_LONGEST_WITH_BRACES: Final = 4096
_GROUP_SHOWN: Final = 20
_MOST_COMMANDS: Final = 1000
_MOST_WORDS: Final = 10_000
_GROWTH: Final = 4

_SPECIAL: Final = " \t\n\r{},*?[]~$=!#"
_SHIFT: Final = 0xF0000
_HIDE: Final = {ord(sign): chr(_SHIFT + ord(sign)) for sign in _SPECIAL}
_SHOW: Final = {_SHIFT + ord(sign): sign for sign in _SPECIAL}

_PLAIN: Final = re.compile(r"[^\s'\"\\$`;&|<>()]+|[^\S \t\r\n]+")
_BLANK: Final = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT: Final = re.compile(r"#[^\n]*")
_REDIRECT: Final = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>\||>&|&>>|&>|<(?!\()|>(?!\())")
_OPERATOR: Final = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|\n]")
_NUMBERS: Final = r"[^()`'\"$]*(?:\$(?!\()[^()`'\"$]*)*"
_ARITHMETIC: Final = re.compile(rf"\$?\(\({_NUMBERS}(?:\({_NUMBERS}\){_NUMBERS})*\)\)")
_PARAMETER: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED: Final = re.compile(r"\$\{(\w+|[@*])(?:\[[@*]\])?(?::?[-=]([\s\S]*))?\}")
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
_ANSI: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|[\s\S])")
_ANSI_SIGNS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_ANSI_TEXT: Final = re.compile(r"\$'([^'\\]*(?:\\[\s\S][^'\\]*)*)'")
_IN_DOUBLE: Final = re.compile(r"[^\"\\$`]+")
_IN_BRACES: Final = re.compile(r"[^}'\"\\$`]+")
_BACKTICKED: Final = re.compile(r"`([^`\\]*(?:\\[\s\S][^`\\]*)*)`")
_BACKTICK_ESCAPE: Final = re.compile(r"\\([`\\$\"])")
_GROUP: Final = re.compile(r"\{([^{},]*(?:,[^{},]*)+)\}")

_KNOWN: Final = {"IFS": " ", "SHELL": "sh", "BASH": "bash"}
_OPENING: Final = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "coproc"})
_CLOSING: Final = frozenset({"fi", "done", "esac", "}"})


class Malformed(Exception):
    """A line that a shell would refuse."""


class TooTangled(Exception):
    """A line that is nested more deeply, or gives more words, than a person writes."""


class Simple(msgspec.Struct, frozen=True, kw_only=True):
    """One command of a line.

    `words` are as they are written, without quotes; `meant` has variables and outputs in place that the line itself
    gives. `feed` comes in through a pipe, `text` through a here-document or here-string. `built` and `given` come from
    substitutions: the output of the first is part of a word, the second are read as files. `inner` stands inside of a
    substitution. `recursive` is a function that calls itself.
    """

    words: tuple[str, ...] = ()
    meant: tuple[str, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    text: str | None = None
    feed: Feed | None = None
    built: tuple[Feed, ...] = ()
    given: tuple[Feed, ...] = ()
    inner: bool = False
    recursive: bool = False


class _Word(msgspec.Struct):
    """A word while it is read. Signs that are quoted are hidden in it, so that nothing expands them."""

    raw: str = ""
    meant: str = ""
    quoted: bool = False

    def add(self, raw: str, meant: str | None = None) -> None:
        self.raw += raw
        self.meant += raw if meant is None else meant


class _Draft(msgspec.Struct):
    """A command while it is read; a here-document of it comes only after the line."""

    words: list[str] = msgspec.field(default_factory=list[str])
    meant: list[str] = msgspec.field(default_factory=list[str])
    sets: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    writes: list[str] = msgspec.field(default_factory=list[str])
    reads: list[str] = msgspec.field(default_factory=list[str])
    texts: list[str] = msgspec.field(default_factory=list[str])
    built: list[Feed] = msgspec.field(default_factory=list[Feed])
    given: list[Feed] = msgspec.field(default_factory=list[Feed])
    before: "list[_Draft] | None" = None
    opens: bool = False
    closes: bool = False
    recursive: bool = False
    piped: bool = False
    feeds: Feed | None = None


class _Values(msgspec.Struct):
    """The parameters that a line itself gives values, and how much of it was read.

    What they add to the line is limited: `a=$a$a` doubles.
    """

    known: dict[str, str]
    left: int
    commands: int = 0
    words: int = 0

    def get(self, name: str) -> str | None:
        return self.known.get(name)

    def put(self, name: str, value: str) -> None:
        self.known[name] = value

    def count(self, *, commands: int = 0, words: int = 0) -> None:
        self.commands += commands
        self.words += words
        if self.commands > _MOST_COMMANDS or self.words > _MOST_WORDS:
            raise TooTangled

    def spend(self, value: str) -> bool:
        self.left -= len(value)
        return self.left >= 0


class _Document(msgspec.Struct):
    """A here-document that is announced and not read yet."""

    draft: _Draft
    end: str
    indented: bool
    expands: bool


def read_line(line: str, known: Mapping[str, str] | None = None) -> list[Simple]:
    """Read a line. `known` are parameters whose values are known, as those after `sh -c LINE`."""
    values = _Values({**_KNOWN, **(known or {})}, left=_GROWTH * len(line) + _LONGEST_WITH_BRACES)
    return _Reader(line.replace("\0", ""), values, 0).read()


class _Reader:
    """One walk along a line."""

    def __init__(self, text: str, known: _Values, depth: int) -> None:
        self._text = text
        self._at: int = 0
        self._known = known
        self._depth = depth
        self._documents: list[_Document] = []
        self._inner: list[Simple] = []
        self._defines = ""

    def read(self) -> list[Simple]:
        """Read to the end: first what stands inside of substitutions, then the commands themselves."""
        drafts = self._group("", None)
        return [*self._inner, *_finished(drafts)]

    # Commands

    def _group(self, end: str, source: list[_Draft] | None) -> list[_Draft]:
        """Read commands up to the sign that closes a group; all of them can read what comes from `source`."""
        found: list[_Draft] = []
        last: list[_Draft] = []
        before, inherited = source, source
        cases, pattern = 0, -1
        while not self._ends(end):
            operator = _OPERATOR.match(self._text, self._at)
            if self._text[self._at] == ")":
                self._at += 1
                if pattern < 0 and end == ")":
                    return found
                if pattern < 0:
                    raise Malformed
                del found[pattern:]
                pattern = -1
            elif operator and not _REDIRECT.match(self._text, self._at):
                self._at = operator.end()
                before = self._read_operator(operator[0], found, last) or inherited
                if cases and operator[0].startswith((";;", ";&")):
                    pattern = len(found)
            else:
                last = self._command(before)
                found += last
                newest = last[-1]
                if newest.words[:1] == ["case"]:
                    cases, pattern = cases + 1, len(found)
                if newest.closes:
                    inherited, pattern = source, -1
                elif newest.opens and before:
                    inherited = before
                before = inherited
        return found

    def _ends(self, end: str) -> bool:
        self._skip_blanks()
        if self._at < len(self._text):
            return False
        if end:
            raise Malformed
        return True

    def _read_operator(self, operator: str, found: list[_Draft], last: list[_Draft]) -> list[_Draft] | None:
        """Tell whose output the next command reads, if an operator is a pipe."""
        if operator == "\n":
            self._read_documents()
        if operator not in {"|", "|&"} or not last:
            return None
        return found[-_GROUP_SHOWN:] if last[-1].closes else last[-_GROUP_SHOWN:]

    def _command(self, before: list[_Draft] | None) -> list[_Draft]:
        self._known.count(commands=1)
        draft = _Draft(before=before)
        nested: list[_Draft] = []
        if self._text[self._at] == "(":
            arithmetic = _ARITHMETIC.match(self._text, self._at)
            if arithmetic:
                self._at = arithmetic.end()
            else:
                self._at += 1
                nested = self._nested(before)
        self._read_words(draft)
        for each in before or ():
            each.piped = True
        return [*nested, draft]

    def _nested(self, source: list[_Draft] | None) -> list[_Draft]:
        """Read a group up to its closing parenthesis."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooTangled
        drafts = self._group(")", source)
        self._depth -= 1
        return drafts

    def _read_words(self, draft: _Draft) -> None:
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
                self._parenthesised(draft)
            else:
                self._take_word(draft)
                self._take_keyword(draft)
        if draft.words[:2] == ["set", "--"]:
            self._take_positions(draft.meant[2:])
        if draft.words[:1] == ["for"] and "in" in draft.words[2:3]:
            self._known.put(draft.words[1], " ".join(draft.meant[3:]))

    def _take_positions(self, words: Sequence[str]) -> None:
        """Note what `set --` makes the positional parameters, by which a later command can be given them."""
        for name in ("@", "*"):
            self._known.put(name, " ".join(words))
        for number, word in enumerate(words, 1):
            self._known.put(str(number), word)

    def _parenthesised(self, draft: _Draft) -> None:
        """Read what a parenthesis after words can be: a function that is defined, or the head of a loop."""
        arithmetic = _ARITHMETIC.match(self._text, self._at)
        if draft.words == ["for"] and arithmetic:
            self._at = arithmetic.end()
            return
        self._at += 1
        self._skip_blanks()
        if len(draft.words) != 1 or self._peek() != ")":
            raise Malformed
        self._at += 1
        self._defines = draft.words[0]
        draft.words, draft.meant = [], []

    def _take_word(self, draft: _Draft) -> None:
        word = self._word(draft)
        assigned = _ASSIGNED.match(word.raw)
        exports = draft.words[:1] and draft.words[0] in {"export", "declare", "local", "readonly", "typeset"}
        if assigned and (not draft.words or exports):
            value = word.meant[assigned.end() :].translate(_SHOW)
            self._known.put(assigned[1], value)
            draft.sets.append((assigned[1], value))
            if not draft.words:
                return
        draft.words += [each.translate(_SHOW) for each in _braces(word.raw) if each or word.quoted]
        for each in _braces(word.meant):
            draft.meant += [part.translate(_SHOW) for part in each.split() or ([""] if word.quoted else [])]
        if len(draft.words) == 1 and draft.words[0] == self._defines:
            draft.recursive = True

    def _take_keyword(self, draft: _Draft) -> None:
        """Leave out the words of compound commands, so that what they hold stands there by itself."""
        match draft.words:
            case [word] if word in _OPENING:
                draft.opens = True
            case [word] if word in _CLOSING:
                draft.closes, self._defines = True, ""
            case ["function", name]:
                self._defines = name
            case ["[["]:
                self._skip_condition(draft)
                return
            case _:
                return
        draft.words, draft.meant = [], []

    def _skip_condition(self, draft: _Draft) -> None:
        """Read up to `]]`; the operators in between compare, and redirect nothing."""
        while draft.words[-1] != "]]":
            self._skip_blanks()
            if self._at >= len(self._text):
                raise Malformed
            if self._text[self._at] in ";&|<>()\n":
                self._at += 1
            else:
                draft.words.append(self._word(draft).raw.translate(_SHOW))
        draft.meant = list(draft.words)

    # Redirections

    def _redirect(self, draft: _Draft, sign: str) -> None:
        self._skip_blanks()
        word = self._word(draft)
        target = word.raw.translate(_SHOW)
        match sign:
            case "<<" | "<<-":
                self._documents.append(_Document(draft, target, sign == "<<-", not word.quoted))
            case "<<<":
                draft.texts.append(word.meant.translate(_SHOW))
            case "<":
                draft.reads.append(target)
            case "<&" | ">&" if target.rstrip("-").isdigit() or target == "-":
                pass
            case _:
                draft.writes.append(target)
        if not target and not word.quoted:
            raise Malformed

    def _read_documents(self) -> None:
        """Read the here-documents that the line before announced."""
        for document in self._documents:
            lines: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                line = self._text[self._at : end if end >= 0 else len(self._text)]
                self._at = end + 1 if end >= 0 else len(self._text)
                line = line.lstrip("\t") if document.indented else line
                if line.rstrip("\r") == document.end:
                    break
                lines.append(line)
            body = "\n".join(lines)
            document.draft.texts.append(body)
            if document.expands:
                self._inner += _Reader(body, self._known, self._depth + 1).read_document()
        self._documents = []

    def read_document(self) -> list[Simple]:
        """Find what a here-document runs while it is put together."""
        self._double(_Word(), _Draft(), document=True)
        return self._inner

    # Words

    def _word(self, draft: _Draft) -> _Word:
        word = _Word()
        self._known.count(words=1)
        while self._at < len(self._text):
            plain = _PLAIN.match(self._text, self._at)
            sign = self._text[self._at]
            if plain:
                word.add(plain[0])
                self._at = plain.end()
            elif sign == "'":
                word.quoted = True
                word.add(self._until("'").translate(_HIDE))
            elif sign == '"':
                word.quoted = True
                self._at += 1
                self._double(word, draft)
            elif sign == "\\":
                self._escaped(word)
            elif sign == "$":
                self._dollar(word, draft, quoted=False)
            elif sign == "`":
                self._backticks(word, draft, quoted=False)
            elif sign in "<>" and self._text.startswith("(", self._at + 1):
                self._process(word, draft)
            elif sign == "(" and word.raw.endswith(("=", "?", "*", "+", "@", "!")):
                self._listed(word, draft)
            else:
                break
        return word

    def _until(self, sign: str) -> str:
        """Read what stands between two equal signs."""
        end = self._text.find(sign, self._at + 1)
        if end < 0:
            raise Malformed
        found = self._text[self._at + 1 : end]
        self._at = end + 1
        return found

    def _escaped(self, word: _Word) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if following != "\n":
            word.quoted = True
            word.add((following or "\\").translate(_HIDE))
        self._at += 2

    def _double(self, word: _Word, draft: _Draft, *, document: bool = False) -> None:
        """Read what stands in double quotes, or in a here-document, up to its end."""
        while True:
            chunk = _IN_DOUBLE.match(self._text, self._at)
            if chunk:
                word.add(chunk[0].translate(_HIDE))
                self._at = chunk.end()
            if self._at >= len(self._text):
                if document:
                    return
                raise Malformed
            sign = self._text[self._at]
            following = self._text[self._at + 1 : self._at + 2]
            if sign == "$":
                self._dollar(word, draft, quoted=True)
            elif sign == "`":
                self._backticks(word, draft, quoted=True)
            elif sign == "\\":
                kept = "" if following in {*'$`"\\', "\n"} else "\\"
                word.add((kept + ("" if following == "\n" else following)).translate(_HIDE))
                self._at += 2
            else:
                self._at += 1
                if not document:
                    return

    def _dollar(self, word: _Word, draft: _Draft, *, quoted: bool) -> None:
        """Read what begins with a dollar sign."""
        following = self._text[self._at + 1 : self._at + 2]
        arithmetic = _ARITHMETIC.match(self._text, self._at)
        parameter = _PARAMETER.match(self._text, self._at + 1)
        if arithmetic:
            word.add(arithmetic[0].translate(_HIDE))
            self._at = arithmetic.end()
        elif following == "(":
            start = self._at
            self._at += 2
            feed = self._substituted(None)
            draft.built.append(feed)
            self._put(word, self._text[start : self._at], feed.text, quoted=quoted)
        elif following == "{":
            self._braced(word, draft, quoted=quoted)
        elif following == "'" and not quoted:
            found = _ANSI_TEXT.match(self._text, self._at)
            if not found:
                raise Malformed
            word.quoted = True
            word.add(_ANSI.sub(_ansi, found[1]).translate(_HIDE))
            self._at = found.end()
        elif following == '"' and not quoted:
            self._at += 1
        elif parameter:
            source = "$" + parameter[0]
            self._at = parameter.end()
            self._put(word, source, self._known.get(parameter[0]), quoted=quoted and parameter[0] != "@")
        else:
            word.add("$".translate(_HIDE))
            self._at += 1

    def _put(self, word: _Word, source: str, value: str | None, *, quoted: bool) -> None:
        """Add what a shell will put another text in place of: as it is written, and that text if it is known."""
        if value is None or not self._known.spend(value):
            word.add(source.translate(_HIDE))
            return
        meant = value.rstrip("\n")
        word.add(source.translate(_HIDE), meant.translate(_HIDE) if quoted else meant)

    def _substituted(self, source: list[_Draft] | None) -> Feed:
        """Read the commands of a substitution, and tell what comes out of them."""
        drafts = self._nested(source)
        self._inner += _finished(drafts, inner=True)
        return _output(drafts)

    def _process(self, word: _Word, draft: _Draft) -> None:
        """Read a process that stands in place of a file."""
        reads = self._text[self._at] == "<"
        self._at += 2
        unknown = [_Draft(feeds=Feed(("a process",)))]
        feed = self._substituted(None if reads else unknown)
        draft.given.append(feed)
        word.add("/dev/fd/63")

    def _backticks(self, word: _Word, draft: _Draft, *, quoted: bool) -> None:
        found = _BACKTICKED.match(self._text, self._at)
        if not found or self._depth >= DEEPEST:
            raise TooTangled if found else Malformed
        self._at = found.end()
        reader = _Reader(_BACKTICK_ESCAPE.sub(r"\1", found[1]), self._known, self._depth + 1)
        drafts = reader._group("", None)
        self._inner += [*reader._inner, *_finished(drafts, inner=True)]
        draft.built.append(_output(drafts))
        self._put(word, found[0], draft.built[-1].text, quoted=quoted)

    def _braced(self, word: _Word, draft: _Draft, *, quoted: bool) -> None:
        """Read a parameter in braces, and the default that it names."""
        start = self._at
        self._at += 2
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooTangled
        within = _Word()
        while self._peek() != "}":
            chunk = _IN_BRACES.match(self._text, self._at)
            if chunk:
                self._at = chunk.end()
            elif self._peek() == "$":
                self._dollar(within, draft, quoted=quoted)
            elif self._peek() == "`":
                self._backticks(within, draft, quoted=quoted)
            elif self._peek() == '"' and not quoted:
                self._at += 1
                self._double(within, draft)
            elif self._peek() == "'" and not quoted:
                self._until("'")
            elif self._at >= len(self._text):
                raise Malformed
            else:
                self._at += 2 if self._peek() == "\\" else 1
        self._at += 1
        self._depth -= 1
        source = self._text[start : self._at]
        found = _BRACED.fullmatch(source)
        value = self._known.get(found[1]) if found else None
        if found and found[2] and value is None:
            value = found[2].strip("\"'")
        self._put(word, source, value, quoted=quoted and "@" not in source)

    def _listed(self, word: _Word, draft: _Draft) -> None:
        """Read the values of an array, or a pattern in parentheses."""
        self._at += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooTangled
        parts: list[_Word] = []
        while True:
            self._skip_blanks()
            sign = self._peek()
            if not sign:
                raise Malformed
            if sign == ")":
                break
            if sign in ";&|<>\n(":
                self._at += 1
            else:
                parts.append(self._word(draft))
        self._at += 1
        self._depth -= 1
        listed = "(" + " ".join(part.raw for part in parts) + ")"
        word.add(listed.translate(_HIDE), " ".join(part.meant for part in parts))

    def _skip_blanks(self) -> None:
        while True:
            found = _BLANK.match(self._text, self._at) or (
                _COMMENT.match(self._text, self._at) if self._peek() == "#" else None
            )
            if not found:
                return
            self._at = found.end()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]


def _ansi(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= sys.maxunicode else ""
    return chr(int(code, 8) & 0xFF) if code[0] in "01234567" else _ANSI_SIGNS.get(code, code)


def _braces(text: str) -> list[str]:
    """Write out what `{a,b}` stands for."""
    if "{" not in text or "," not in text:
        return [text]
    if len(text) > _LONGEST_WITH_BRACES:
        raise TooTangled
    done: list[str] = []
    todo = [text]
    while todo:
        each = todo.pop()
        found = _GROUP.search(each)
        if found:
            parts = found[1].split(",")
            todo += [each[: found.start()] + part + each[found.end() :] for part in reversed(parts)]
        else:
            done.append(each)
        if len(done) + len(todo) > _WORDS_OF_BRACES:
            raise TooTangled
    return done


def _finished(drafts: Sequence[_Draft], *, inner: bool = False) -> list[Simple]:
    """Turn drafts into commands, each with what it reads; those that feed it stand before it."""
    found: list[Simple] = []
    for draft in drafts:
        feed = joined([each.feeds for each in draft.before or () if each.feeds])
        text = "\n".join(draft.texts) if draft.texts else None
        draft.feeds = feed_of(draft.meant or draft.words, feed, text) if draft.words else None
        if draft.words or draft.writes or draft.sets:
            found.append(
                Simple(
                    words=tuple(draft.words),
                    meant=tuple(draft.meant),
                    sets=tuple(draft.sets),
                    writes=tuple(draft.writes),
                    reads=tuple(draft.reads),
                    text=text,
                    feed=feed,
                    built=tuple(draft.built),
                    given=tuple(draft.given),
                    inner=inner,
                    recursive=draft.recursive,
                )
            )
    return found


def _output(drafts: Sequence[_Draft]) -> Feed:
    """Tell what comes out of commands: what the last of each pipeline writes."""
    return joined([draft.feeds for draft in drafts if draft.feeds and not draft.piped][-_GROUP_SHOWN:]) or Feed()

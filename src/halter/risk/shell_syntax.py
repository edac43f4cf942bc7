"""The grammar of a shell line: its simple commands, their words and redirections, and what feeds them.

Quotes, escapes, braces, substitutions, here-documents, functions and compound commands are read as a POSIX shell with
the usual extensions reads them. What a shell knows only at run time (a variable, the output of a command) stays as
written, beside a second reading with everything filled in that the line itself defines. The output of some commands is
known from their words, and so is the input of their readers.
"""

import base64
import binascii
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from posixpath import basename
from typing import Final

import msgspec

from halter.core.text import word_set

SHELLS: Final = word_set("sh bash zsh dash ksh mksh pdksh fish ash yash tcsh csh rbash rzsh lksh osh nu elvish xonsh")

FETCHERS: Final = word_set(
    "curl wget fetch http https httpie xh aria2c axel lynx w3m links elinks ftp lftp sftp scp nc ncat netcat socat "
    "telnet tftp hget GET"
)

PRIVILEGE_RAISERS: Final = word_set("sudo doas su pkexec runuser sudoedit run0 gosu setpriv")

READERS: Final = word_set(
    "ls dir vdir cat tac bat batcat grep egrep fgrep zgrep rg ag ack head tail wc echo printf pwd whoami id groups "
    "users who w last date diff colordiff diff3 sdiff cmp sort uniq cut tr stat file du df ps pgrep pstree top htop "
    "which type whereis test [ [[ true false : jq basename dirname realpath readlink tree less more most zless zcat "
    "bzcat xzcat md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum cksum sum sleep wait uname arch nproc "
    "hostname hostnamectl cd pushd popd dirs seq shuf column nl od xxd hexdump strings uptime free vmstat iostat "
    "printenv yes expr comm join paste fold fmt pr rev expand unexpand tsort factor numfmt man info apropos whatis "
    "help command tldr cal ncal locale getconf getent lscpu lsblk lsusb lspci lsmod lsof netstat ss dig nslookup host "
    "ping ping6 traceroute tracepath mtr base64 base32 basenc cloc tokei scc diffstat exa eza lsd look iconv tput bc "
    "clear reset tty stty logname pathchk jobs fg bg disown hash shopt set unset export local declare typeset "
    "readonly read mapfile readarray let return exit break continue shift getopts umask ulimit times logout for case "
    "select in function esac xmllint xmlstarlet readelf objdump nm ldd size md5 shasum zipinfo ncdu pdftotext "
    "exiftool identify pylint flake8 mypy pyright basedpyright shellcheck hadolint yamllint sw_vers lsb_release "
    "dmidecode acpi sensors aspell hunspell env history uuidgen mktemp zdiff zcmp smartctl blkid lshw"
)
"""They write nothing and run nothing, unless an option says so."""

DESTROYERS: Final = word_set(
    "rm rmdir unlink shred srm wipe chmod chown chgrp chattr setfacl mv dd truncate mkswap wipefs fdisk sfdisk cfdisk "
    "gdisk sgdisk parted cryptsetup lvremove vgremove pvremove zpool zfs blkdiscard mdadm shutdown reboot poweroff "
    "halt init telinit kexec kill pkill killall find git docker podman kubectl terraform tofu aws psql mysql mariadb "
    "sqlite3 redis-cli mongo mongosh dropdb dropuser systemctl crontab rsync tee cp ln install sed awk gawk mawk perl "
    "curl wget userdel groupdel usermod passwd iptables nft ufw mount umount halter tar busybox toybox"
)
"""Names that make a line dangerous when an unknown program is given them to run."""

_PYTHON: Final = re.compile(r"(?:python|pypy|pythonw|ipython|micropython|jython|bpython)[\d.]*[a-z]*(?:-\w+)?")
_NUMBERED: Final = re.compile(r"(perl|ruby|node|nodejs|php|lua|luajit|tclsh|guile|deno|bun|julia|Rscript)[\d.-]*")


def program_of(word: str) -> str:
    return word if "$(" in word or "`" in word else basename(word.replace("\\", "/"))


def family_of(program: str) -> str:
    """The name of an interpreter without its version: `python` for `python3.11`."""
    if _PYTHON.fullmatch(program):
        return "python"
    match = _NUMBERED.fullmatch(program)
    return match[1] if match else program


_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|0[0-7]{0,3}|[1-7][0-7]{0,2}|[\s\S])")
_SIGNS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_DIRECTIVE: Final = re.compile(r"%%|%[-+ #0-9.]*[a-zA-Z]")


class CommandInput(msgspec.Struct, frozen=True):
    """What a command reads from others: their names, and whether any of them fetched it.

    `roots` are the places whose contents it lists; `text` is the content, where the line shows it.
    """

    programs: tuple[str, ...] = ()
    fetched: bool = False
    roots: tuple[str, ...] = ()
    text: str | None = None


def trace_output(words: Sequence[str], before: CommandInput | None, text: str | None) -> CommandInput:
    """The output of a command that reads `before` or `text`."""
    program = program_of(words[0]) if words else ""
    source = text if text is not None else before.text if before else None
    fetched = (before is not None and before.fetched) or fetches(words)
    return CommandInput(
        (program,),
        fetched,
        _find_roots(program, words[1:]) or (before.roots if before else ()),
        _find_known_output(words, source),
    )


def join_command_inputs(feeds: Sequence[CommandInput]) -> CommandInput | None:
    if len(feeds) <= 1:
        return feeds[0] if feeds else None
    texts = [feed.text for feed in feeds]
    return CommandInput(
        tuple(name for feed in feeds for name in feed.programs),
        any(feed.fetched for feed in feeds),
        tuple(root for feed in feeds for root in feed.roots),
        None if None in texts else "\n".join(text or "" for text in texts),
    )


def fetches(words: Sequence[str]) -> bool:
    """Whether a command names, anywhere, a program that fetches something."""
    return any(program_of(part) in FETCHERS for word in words for part in word.split())


def unescape_text(text: str) -> str:
    return _ESCAPE.sub(_unescape_sign, text)


def _unescape_sign(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] == "x" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0].isdigit() and code.isascii() and "8" not in code and "9" not in code:
        return chr(int(code, 8))
    return _SIGNS.get(code, code if code == "\\" else "\\" + code)


def _find_roots(program: str, words: Sequence[str]) -> tuple[str, ...]:
    if program not in {"find", "ls", "fd", "fdfind", "tree", "du"}:
        return ()
    return tuple(islice((word for word in words if not word.startswith("-")), 8)) or (".",)


def _find_known_output(words: Sequence[str], source: str | None) -> str | None:
    if not words:
        return None
    program, rest = program_of(words[0]), list(words[1:])
    match program:
        case "echo":
            while rest and rest[0].startswith("-") and set(rest[0][1:]) <= set("neE") and rest[0] != "-":
                rest.pop(0)
            return unescape_text(" ".join(rest))
        case "printf":
            return _format_printf([word for word in rest if word != "--"])
        case "cat" | "tac" | "tee" | "sponge" | "head" | "tail" | "sort" | "uniq" | "tr" | "cut" | "nl" | "pv":
            passes = program == "tee" or not any(word == "-" or not word.startswith("-") for word in rest)
            return source if passes or rest == ["-"] else None
        case "base64" | "basenc":
            return _decode_base64(source) if source and any(word[:2] in {"-d", "-D", "--"} for word in rest) else None
        case "yes":
            return " ".join(rest)
        case _:
            return None


def _format_printf(words: Sequence[str]) -> str:
    """Format as printf does; every directive takes the next word."""
    if not words:
        return ""
    values = iter(words[1:])
    pattern = unescape_text(words[0])
    written = _DIRECTIVE.sub(lambda match: "%" if match[0] == "%%" else unescape_text(next(values, "")), pattern)
    return " ".join([written, *(unescape_text(value) for value in values)])


def _decode_base64(text: str) -> str | None:
    try:
        return base64.b64decode("".join(text.split()), validate=False).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return None


DEEPEST_LINE: Final = 16

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


class MalformedShell(Exception):
    """A line that a shell would refuse."""


class TooComplex(Exception):
    """A line that is nested more deeply, or expands to more words, than a person writes."""


class SimpleCommand(msgspec.Struct, frozen=True, kw_only=True):
    """One command of a line.

    `words` are as written, without quotes; `meant` has variables and outputs filled in that the line defines. `feed`
    comes through a pipe, `text` through a here-document or here-string. `built` and `given` come from substitutions:
    the output of the first is part of a word, the second are read as files. `inner` stands inside a substitution.
    `recursive` is a function that calls itself.
    """

    words: tuple[str, ...] = ()
    meant: tuple[str, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    text: str | None = None
    feed: CommandInput | None = None
    built: tuple[CommandInput, ...] = ()
    given: tuple[CommandInput, ...] = ()
    inner: bool = False
    recursive: bool = False


class _Word(msgspec.Struct):
    """A word while it is read. Quoted characters are masked, so that nothing expands them."""

    raw: str = ""
    meant: str = ""
    quoted: bool = False

    def add(self, raw: str, meant: str | None = None) -> None:
        self.raw += raw
        self.meant += raw if meant is None else meant


class _CommandDraft(msgspec.Struct):
    """A command while it is read; its here-document comes only after the line."""

    words: list[str] = msgspec.field(default_factory=list[str])
    meant: list[str] = msgspec.field(default_factory=list[str])
    sets: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    writes: list[str] = msgspec.field(default_factory=list[str])
    reads: list[str] = msgspec.field(default_factory=list[str])
    texts: list[str] = msgspec.field(default_factory=list[str])
    built: list[CommandInput] = msgspec.field(default_factory=list[CommandInput])
    given: list[CommandInput] = msgspec.field(default_factory=list[CommandInput])
    before: "list[_CommandDraft] | None" = None
    opens: bool = False
    closes: bool = False
    recursive: bool = False
    piped: bool = False
    feeds: CommandInput | None = None


class _Values(msgspec.Struct):
    """The parameters that a line defines, and how much of it was read.

    Their expansion is limited: `a=$a$a` doubles.
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
            raise TooComplex

    def spend(self, value: str) -> bool:
        self.left -= len(value)
        return self.left >= 0


class _Document(msgspec.Struct):
    """A here-document that is announced and not read yet."""

    draft: _CommandDraft
    end: str
    indented: bool
    expands: bool


def parse_shell_line(line: str, known: Mapping[str, str] | None = None) -> list[SimpleCommand]:
    """Parse a line. `known` are parameters with known values, as those after `sh -c LINE`."""
    values = _Values({**_KNOWN, **(known or {})}, left=_GROWTH * len(line) + _LONGEST_WITH_BRACES)
    return _Reader(line.replace("\0", ""), values, 0).read()


class _Reader:
    def __init__(self, text: str, known: _Values, depth: int) -> None:
        self._text = text
        self._at: int = 0
        self._known = known
        self._depth = depth
        self._documents: list[_Document] = []
        self._inner: list[SimpleCommand] = []
        self._defines = ""

    def read(self) -> list[SimpleCommand]:
        """Parse to the end: the insides of substitutions first, then the commands."""
        drafts = self._group("", None)
        return [*self._inner, *_finish_commands(drafts)]

    # Commands

    def _group(self, end: str, source: list[_CommandDraft] | None) -> list[_CommandDraft]:
        """Read commands up to the end of a group; all of them can read what comes from `source`."""
        found: list[_CommandDraft] = []
        last: list[_CommandDraft] = []
        before, inherited = source, source
        cases, pattern = 0, -1
        while not self._ends(end):
            operator = _OPERATOR.match(self._text, self._at)
            if self._text[self._at] == ")":
                self._at += 1
                if pattern < 0 and end == ")":
                    return found
                if pattern < 0:
                    raise MalformedShell
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
            raise MalformedShell
        return True

    def _read_operator(
        self, operator: str, found: list[_CommandDraft], last: list[_CommandDraft]
    ) -> list[_CommandDraft] | None:
        if operator == "\n":
            self._read_documents()
        if operator not in {"|", "|&"} or not last:
            return None
        return found[-_GROUP_SHOWN:] if last[-1].closes else last[-_GROUP_SHOWN:]

    def _command(self, before: list[_CommandDraft] | None) -> list[_CommandDraft]:
        self._known.count(commands=1)
        draft = _CommandDraft(before=before)
        nested: list[_CommandDraft] = []
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

    def _nested(self, source: list[_CommandDraft] | None) -> list[_CommandDraft]:
        self._depth += 1
        if self._depth > DEEPEST_LINE:
            raise TooComplex
        drafts = self._group(")", source)
        self._depth -= 1
        return drafts

    def _read_words(self, draft: _CommandDraft) -> None:
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
            words = draft.meant[2:]
            for name in ("@", "*"):
                self._known.put(name, " ".join(words))
            for number, word in enumerate(words, 1):
                self._known.put(str(number), word)
        if draft.words[:1] == ["for"] and "in" in draft.words[2:3]:
            self._known.put(draft.words[1], " ".join(draft.meant[3:]))

    def _parenthesised(self, draft: _CommandDraft) -> None:
        """Read a parenthesis after words: a function definition, or the head of a loop."""
        arithmetic = _ARITHMETIC.match(self._text, self._at)
        if draft.words == ["for"] and arithmetic:
            self._at = arithmetic.end()
            return
        self._at += 1
        self._skip_blanks()
        if len(draft.words) != 1 or self._peek() != ")":
            raise MalformedShell
        self._at += 1
        self._defines = draft.words[0]
        draft.words, draft.meant = [], []

    def _take_word(self, draft: _CommandDraft) -> None:
        word = self._read_word(draft)
        assigned = _ASSIGNED.match(word.raw)
        exports = draft.words[:1] and draft.words[0] in {"export", "declare", "local", "readonly", "typeset"}
        if assigned and (not draft.words or exports):
            value = word.meant[assigned.end() :].translate(_SHOW)
            self._known.put(assigned[1], value)
            draft.sets.append((assigned[1], value))
            if not draft.words:
                return
        draft.words += [each.translate(_SHOW) for each in _expand_braces(word.raw) if each or word.quoted]
        for each in _expand_braces(word.meant):
            draft.meant += [part.translate(_SHOW) for part in each.split() or ([""] if word.quoted else [])]
        if len(draft.words) == 1 and draft.words[0] == self._defines:
            draft.recursive = True

    def _take_keyword(self, draft: _CommandDraft) -> None:
        """Drop the keywords of compound commands, so that their commands stand alone."""
        match draft.words:
            case [word] if word in _OPENING:
                draft.opens = True
            case [word] if word in _CLOSING:
                draft.closes, self._defines = True, ""
            case ["function", name]:
                self._defines = name
            case ["[["]:
                while draft.words[-1] != "]]":
                    self._skip_blanks()
                    if self._at >= len(self._text):
                        raise MalformedShell
                    if self._text[self._at] in ";&|<>()\n":
                        self._at += 1
                    else:
                        draft.words.append(self._read_word(draft).raw.translate(_SHOW))
                draft.meant = list(draft.words)
                return
            case _:
                return
        draft.words, draft.meant = [], []

    # Redirections

    def _redirect(self, draft: _CommandDraft, sign: str) -> None:
        self._skip_blanks()
        word = self._read_word(draft)
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
            raise MalformedShell

    def _read_documents(self) -> None:
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

    def read_document(self) -> list[SimpleCommand]:
        """Find what a here-document runs while it is expanded."""
        self._double(_Word(), _CommandDraft(), document=True)
        return self._inner

    # Words

    def _read_word(self, draft: _CommandDraft) -> _Word:
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
                word.add(self._read_until("'").translate(_HIDE))
            elif sign == '"':
                word.quoted = True
                self._at += 1
                self._double(word, draft)
            elif sign == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                if following != "\n":
                    word.quoted = True
                    word.add((following or "\\").translate(_HIDE))
                self._at += 2
            elif sign == "$":
                self._dollar(word, draft, quoted=False)
            elif sign == "`":
                self._backticks(word, draft, quoted=False)
            elif sign in "<>" and self._text.startswith("(", self._at + 1):
                reads = self._text[self._at] == "<"
                self._at += 2
                unknown = [_CommandDraft(feeds=CommandInput(("a process",)))]
                feed = self._substituted(None if reads else unknown)
                draft.given.append(feed)
                word.add("/dev/fd/63")
            elif sign == "(" and word.raw.endswith(("=", "?", "*", "+", "@", "!")):
                self._listed(word, draft)
            else:
                break
        return word

    def _read_until(self, sign: str) -> str:
        end = self._text.find(sign, self._at + 1)
        if end < 0:
            raise MalformedShell
        found = self._text[self._at + 1 : end]
        self._at = end + 1
        return found

    def _double(self, word: _Word, draft: _CommandDraft, *, document: bool = False) -> None:
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

    def _dollar(self, word: _Word, draft: _CommandDraft, *, quoted: bool) -> None:
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
            self._append(word, self._text[start : self._at], feed.text, quoted=quoted)
        elif following == "{":
            self._braced(word, draft, quoted=quoted)
        elif following == "'" and not quoted:
            match = _ANSI_TEXT.match(self._text, self._at)
            if not match:
                raise MalformedShell
            word.quoted = True
            word.add(_ANSI.sub(_unescape_ansi, match[1]).translate(_HIDE))
            self._at = match.end()
        elif following == '"' and not quoted:
            self._at += 1
        elif parameter:
            source = "$" + parameter[0]
            self._at = parameter.end()
            self._append(word, source, self._known.get(parameter[0]), quoted=quoted and parameter[0] != "@")
        else:
            word.add("$".translate(_HIDE))
            self._at += 1

    def _append(self, word: _Word, source: str, value: str | None, *, quoted: bool) -> None:
        """Add an expansion: as written, and its value if it is known."""
        if value is None or not self._known.spend(value):
            word.add(source.translate(_HIDE))
            return
        meant = value.rstrip("\n")
        word.add(source.translate(_HIDE), meant.translate(_HIDE) if quoted else meant)

    def _substituted(self, source: list[_CommandDraft] | None) -> CommandInput:
        """Read a substitution; returns its output."""
        drafts = self._nested(source)
        self._inner += _finish_commands(drafts, inner=True)
        return _trace_pipelines(drafts)

    def _backticks(self, word: _Word, draft: _CommandDraft, *, quoted: bool) -> None:
        match = _BACKTICKED.match(self._text, self._at)
        if not match or self._depth >= DEEPEST_LINE:
            raise TooComplex if match else MalformedShell
        self._at = match.end()
        reader = _Reader(_BACKTICK_ESCAPE.sub(r"\1", match[1]), self._known, self._depth + 1)
        drafts = reader._group("", None)
        self._inner += [*reader._inner, *_finish_commands(drafts, inner=True)]
        draft.built.append(_trace_pipelines(drafts))
        self._append(word, match[0], draft.built[-1].text, quoted=quoted)

    def _braced(self, word: _Word, draft: _CommandDraft, *, quoted: bool) -> None:
        """Read a parameter in braces, with its default."""
        start = self._at
        self._at += 2
        self._depth += 1
        if self._depth > DEEPEST_LINE:
            raise TooComplex
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
                self._read_until("'")
            elif self._at >= len(self._text):
                raise MalformedShell
            else:
                self._at += 2 if self._peek() == "\\" else 1
        self._at += 1
        self._depth -= 1
        source = self._text[start : self._at]
        match = _BRACED.fullmatch(source)
        value = self._known.get(match[1]) if match else None
        if match and match[2] and value is None:
            value = match[2].strip("\"'")
        self._append(word, source, value, quoted=quoted and "@" not in source)

    def _listed(self, word: _Word, draft: _CommandDraft) -> None:
        """Read an array, or a pattern in parentheses."""
        self._at += 1
        self._depth += 1
        if self._depth > DEEPEST_LINE:
            raise TooComplex
        parts: list[_Word] = []
        while True:
            self._skip_blanks()
            sign = self._peek()
            if not sign:
                raise MalformedShell
            if sign == ")":
                break
            if sign in ";&|<>\n(":
                self._at += 1
            else:
                parts.append(self._read_word(draft))
        self._at += 1
        self._depth -= 1
        listed = "(" + " ".join(part.raw for part in parts) + ")"
        word.add(listed.translate(_HIDE), " ".join(part.meant for part in parts))

    def _skip_blanks(self) -> None:
        while True:
            match = _BLANK.match(self._text, self._at) or (
                _COMMENT.match(self._text, self._at) if self._peek() == "#" else None
            )
            if not match:
                return
            self._at = match.end()

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]


def _unescape_ansi(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= sys.maxunicode else ""
    return chr(int(code, 8) & 0xFF) if code[0] in "01234567" else _ANSI_SIGNS.get(code, code)


def _expand_braces(text: str) -> list[str]:
    if "{" not in text or "," not in text:
        return [text]
    if len(text) > _LONGEST_WITH_BRACES:
        raise TooComplex
    done: list[str] = []
    todo = [text]
    while todo:
        each = todo.pop()
        match = _GROUP.search(each)
        if match:
            parts = match[1].split(",")
            todo += [each[: match.start()] + part + each[match.end() :] for part in reversed(parts)]
        else:
            done.append(each)
        if len(done) + len(todo) > _WORDS_OF_BRACES:
            raise TooComplex
    return done


def _finish_commands(drafts: Sequence[_CommandDraft], *, inner: bool = False) -> list[SimpleCommand]:
    """Turn drafts into commands with their inputs; those that feed a command stand before it."""
    found: list[SimpleCommand] = []
    for draft in drafts:
        feed = join_command_inputs([each.feeds for each in draft.before or () if each.feeds])
        text = "\n".join(draft.texts) if draft.texts else None
        draft.feeds = trace_output(draft.meant or draft.words, feed, text) if draft.words else None
        if draft.words or draft.writes or draft.sets:
            found.append(
                SimpleCommand(
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


def _trace_pipelines(drafts: Sequence[_CommandDraft]) -> CommandInput:
    """The output of commands: what the last of each pipeline writes."""
    return (
        join_command_inputs([draft.feeds for draft in drafts if draft.feeds and not draft.piped][-_GROUP_SHOWN:])
        or CommandInput()
    )

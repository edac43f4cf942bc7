r"""Secrets that are recognized only by the name before them, as in `DB_PASS=…`.

A pattern finds the name and the start of its value. `read_key` and `read_password` find the end of the value, or reject
code, references, placeholders and prose.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from halter.redaction import secret_values
from halter.redaction.secret_values import NO_MATCH, Candidate

_PASSWORDS: Final = (
    *("password", "passwd", "passphrase", "passcode", "passwort", "kennwort", "pass", "pwd", "pw", "psk"),
    *("mot de passe", "contraseña", "contrasena", "senha", "wachtwoord", "heslo", "salasana", "securestring"),
    *(
        "hasło",
        "lösenord",
        "şifre",
        "Şifre",
        "пароль",
        "Пароль",
        "密码",
        "密碼",
        "口令",
        "パスワード",
        "비밀번호",
        "암호",
    ),
    "identified by",
)
_KEYED: Final = (
    *("api", "access", "account", "private", "auth", "signing", "encryption", "license", "licence", "master", "shared"),
    *("sas", "app", "application", "subscription", "service", "client", "storage", "admin", "root", "deploy", "crypto"),
    *("consumer", "webhook", "session", "jwt", "hmac", "aes", "rsa", "ssh", "function", "functions", "host", "live"),
    *("integration", "ingest", "write", "server", "site", "secret", "unseal"),
)
_KEYS: Final = ("secret", "token", "credentials?", "authorization", "auth", "login", "honeycomb-team", "bw_session")
_ANY_KEYS: Final = ("_key", "-key", "_pat", "-pat")
"""Names of keys of any kind: only long random values are secrets there."""

_LAST: Final = (
    r"(?:s?[_. -]?(?:key|token|value|hash|base|prod|dev|test|staging|live|old|new|text|string|plain|raw|hex|b64|base64"
    r"|v?[0-9]{1,2})){0,2}"
)
_QUOTE: Final = r"\\{0,3}[\"'`]"
_TYPE: Final = r"[A-Za-z][A-Za-z0-9_.<>?\[\]]{0,40}"
_ASSIGNMENT: Final = (
    rf"(?:(?:{_QUOTE})?\]?[ \t]{{0,24}}(?:=>|: ?{_TYPE} =|[:?+|]?==?|::?|\xef\xbc\x9a)\*{{0,2}}\s{{0,3}}"
    r"|>\s{0,4}(?:<value>)?"
    r"|[\"']\s{1,3}value\s{0,2}=\s{0,2}"
    rf"|{_QUOTE}\s{{0,2}},\s{{0,24}}{_QUOTE}value{_QUOTE}\s{{0,2}}:\s{{0,2}}"
    rf"|{_QUOTE} ?, {{0,3}}"
    r"|(?:\xe6\x98\xaf|\xe3\x81\xaf)\s{0,3}"
    r"|[\"']?\s{1,24}value:\s{0,3}"
    r"|</(?:key|name)>\s{0,24}<(?:string|value)>"
    rf"|(?:{_QUOTE})?\*{{0,2}}[ \t]{{0,24}}\|[ \t]{{0,24}}"
    r"|\s{1,3}(?:(?:is|was|ist|lautet|est|es|=|[0-9])\s?:?\s{1,3})?)"
)
_SCHEMES: Final = "basic|bearer|token|apikey|api-key|api-token|ssws|geniekey|splunk|accesskey|oauth|bot|key|digest"
_OPEN: Final = (
    rf"(?:(?:[A-Za-z][A-Za-z0-9_.:]{{0,40}}\(\s{{0,2}})?[@bruf]{{0,2}}{_QUOTE})?(?:(?:{_SCHEMES})[ =]{{1,3}})?"
)

_WHOSE: Final = r"(?: (?:of|for|to|on|at|in|von|für|de)(?: [A-Za-z0-9_.@'-]{1,24}){1,5})?"
PASSWORD_LEAD: Final = f"(?:{'|'.join(_PASSWORDS)}){_LAST}{_WHOSE}{_ASSIGNMENT}{_OPEN}"
PASSWORD_HEADS: Final = tuple({name.encode()[:2] for name in _PASSWORDS})
KEY_LEAD: Final = (
    f"(?:(?:{'|'.join(_KEYED)})[_ -]?key|client-key-data|{'|'.join(_KEYS)}|[_-](?:key|pat)){_LAST}{_ASSIGNMENT}{_OPEN}"
)
ANNOUNCEMENTS: Final = (*_PASSWORDS, *_KEYS, "key", "[_-]pat")
KEY_HEADS: Final = tuple({name.encode()[:2] for name in (*_KEYS, *_KEYED, *_ANY_KEYS)})
_LATEST_DIGIT: Final = 41
NEAR_KEY: Final = f"(?:[A-Za-z0-9+/=_~.%:-]{{0,{_LATEST_DIGIT - 1}}}[0-9]|[A-Za-z]{{20}})"
"""Random values have a digit near their start, or are long, so this skips most code quickly."""
_NEAR_KEY: Final = re.compile(rb".{0,%d}[0-9]|[A-Za-z]{20}" % (_LATEST_DIGIT - 1))

_ANY_KEY: Final = tuple(name.encode() for name in _ANY_KEYS)
_SHORT_NAME: Final = re.compile(rb"(?i)(?:pass|pwd?|psk|auth|login)(?![a-z])")
_OPENED: Final = re.compile(rb"(?i)(\\{0,3}[\"'`])?(?:(?:" + _SCHEMES.encode() + rb")[ =]+)?\Z")
_QUOTES: Final = b"\"'`"
_SCHEME_WORDS: Final = tuple(_SCHEMES.encode().split(b"|"))
_SPOKEN: Final = re.compile(
    rb"(?i)[^=:>,(\xef\"'`]*(?:\s(?:=\s|[0-9]\s+|(?:is|was|ist|lautet|est|es)\s?:?\s+)?|(?:\xe6\x98|\xe3\x81)\xaf\s*)"
    rb"[\"'`]?\Z"
)
_LOOSE: Final = re.compile(rb",\s*[@bruf]{0,2}\\{0,3}[\"'`]\Z|\(\s*[@bruf]{0,2}\\{0,3}[\"'`]\Z")
_SCHEMED: Final = re.compile(rb"(?i)authorization\s+(?:basic|bearer)\s")
_TIGHT: Final = re.compile(rb"[\w.-]*=\Z")
_CURSORS: Final = (
    rb"page|next|continuation|sync|cursor|cancel|cancellation|resume|public|public_?key|primary|foreign|cache|sort"
    rb"|partition|idempotency|row|dedup|object|lookup|group|index|artifact|unique|routing|shard|translation|label|event"
    rb"|message|topic|max|min|num|total|stop|eos|bos|pad|unk|by"
)
_OTHER_NAME: Final = re.compile(
    rb"(?i:(?:^|[^a-z])(?:" + _CURSORS + rb")[_.-]?\Z)|[a-z](?:Page|Next|ublicKey|Sync|Row|Sort)\Z"
)
"""Prefixes of `token` and `key` in the names of counts, labels and cursors."""
_EXPANDED: Final = re.compile(rb"\$\{[\w.]*\Z")
_VARIABLE: Final = re.compile(rb"[ \t+>#-]*(?:(?:export|env|set|declare -x|ENV|ARG|SET)\s+|-e\s+)?[A-Z0-9_]*\Z")
_FLAG: Final = re.compile(rb"(?i)(?:^|[\s\"'])(?:--?|/)[a-z-]*\Z")
_CELL: Final = re.compile(rb"\|[ \t]*(?:\\{0,3}[\"'`])?\Z")
_ROW: Final = re.compile(rb"[ \t>]*\|")
_SETTING: Final = re.compile(rb"[ \t]*(?:- )?[a-z0-9_.-]*\Z")
_SETTING_LEAD: Final = re.compile(rb"[a-z0-9_-]+: {1,3}\Z")
_QUOTED_SETTING_LEAD: Final = re.compile(rb"[a-z0-9_-]+: {1,3}[\"']\Z")
_PHRASE: Final = rb"[^\s\"'<>,;&\\`|(){}\[\]#:=]+(?: [^\s\"'<>,;&\\`|(){}\[\]#:=]+){1,7}"
_COMMENT: Final = re.compile(rb"[ \t]{1,24}#[ \t]")
_ONE_TIME: Final = re.compile(rb"(?i)otpauth://[^\s\"'<>]*[?&]\Z")
_BASE32: Final = re.compile(rb"(?i)[A-Z2-7]{8,}=*")
_LOGIN: Final = re.compile(rb"(?i)(?:\bmachine\s+\S+|\bdefault)\s+login\s+\S+\s+\Z")
_PEM: Final = b"-----BEGIN"
_HASH: Final = re.compile(rb"\$[0-9a-z-]{1,16}\$|\{[A-Z0-9-]{3,16}\}")
_CLOSED: Final = re.compile(rb"\s|[+,).;:]{1,2}(?:\s|\Z)|\+[A-Za-z_]")
_MIXED_WORD: Final = re.compile(
    rb"(?!(?i:sha|md|base|utf|oauth|x509|ed|pbkdf|argon)[0-9])[A-Za-z]\S*[0-9](?:\S*[A-Za-z]|[0-9])"
)
_JOINTS: Final = (b"_", b".", b":", b"/")
_TRAILING: Final = b".:!?"
_SHORTEST, _WORD, _KEY, _SET, _LONG, _LONGER = 4, 8, 8, 16, 20, 30

_BARE: Final = rb"[^\s\"'<>,;&\\`|(){}]*"
_LINE: Final = rb"[^\s\"'`;]*"
_ELEMENT: Final = rb"[^<\n]*"
_QUOTED: Final = {quote: b"(?:[^\\\\\n" + quote + rb"]|\\[^\n])*" for quote in (b'"', b"'", b"`")}
_ESCAPED: Final = {quote: b"(?:[^\\\\\n" + quote + rb"]|\\{2,}[^\n])*" for quote in (b'"', b"'", b"`")}


class _Value(NamedTuple):
    text: bytes
    lead: bytes
    before: bytes
    after: bytes

    @property
    def variable(self) -> bool:
        return self.lead.isupper() and self.lead.rstrip(b" ").endswith((b"=", b":"))

    @property
    def ends(self) -> bool:
        return self.after in b" \t\r\n;&\"'<"

    @property
    def settles(self) -> bool:
        """True if the value is written as a setting: `name=value`, or alone on its line."""
        if b"=" in self.lead:
            return _TIGHT.match(self.lead) is not None
        return self.after in b"\r\n" or (self.lead.endswith(b":") and len(self.text) >= _WORD)

    @property
    def is_setting(self) -> bool:
        """True if the line is one `password: value` of a YAML file."""
        is_alone = self.after in b"\r\n" and _SETTING.match(self.before) is not None
        return is_alone and _SETTING_LEAD.match(self.lead) is not None


def read_key(candidate: Candidate) -> int:
    """Read the value of a key's name. It must look random."""
    lead = candidate.lead()
    quote = _find_quote(lead)
    pattern = _choose_value_pattern(quote, lead)
    text = candidate.peek(pattern)
    if len(text) < _KEY or not _NEAR_KEY.match(text):
        return NO_MATCH
    before = candidate.before()
    is_one_time = _BASE32.fullmatch(text) and _ONE_TIME.search(before)
    if not is_one_time and not _is_drawn(text, lead):
        return NO_MATCH
    end = candidate.start + len(text)
    value = _Value(text, lead, before, candidate.data[end : min(end + 1, candidate.end)])
    if _is_part_of_more(value, quote) or secret_values.is_harmless(text) or _OTHER_NAME.search(before):
        return NO_MATCH
    if not quote and (secret_values.is_code(text, value.after) or not _is_unquoted_key(value)):
        return NO_MATCH
    return candidate.find_end(pattern) if quote else _trim_end(candidate, pattern)


def _is_drawn(text: bytes, lead: bytes) -> bool:
    if len(text) < _LONG and lead.lower().startswith(_ANY_KEY):
        return False
    if secret_values.is_random(text):
        return True
    # The value of an environment variable is not code, so it cannot be confused with an identifier.
    return len(text) >= _SET and lead.isupper() and lead.endswith(b"=") and secret_values.is_mixed(text)


def _is_unquoted_key(value: _Value) -> bool:
    """Return True if an unquoted value is a key. In a sentence it must be longer than ordinary words."""
    if not _SPOKEN.match(value.lead) or _FLAG.search(value.before):
        return True
    return len(value.text) >= (_LONGER if _SHORT_NAME.match(value.lead) else _LONG)


def read_password(candidate: Candidate) -> int:
    """Read the value of a password's name. It may be a word."""
    lead = candidate.lead()
    quote = _find_quote(lead)
    is_variable = (
        not quote and lead.endswith(b"=") and lead.isupper() and _VARIABLE.match(candidate.before()) is not None
    )
    pattern = _LINE if is_variable else _choose_value_pattern(quote, lead)
    if not quote and (phrase_end := _find_phrase_end(candidate, lead)) != NO_MATCH:
        return phrase_end
    text = candidate.peek(pattern)
    if len(text) < _SHORTEST or secret_values.is_harmless(text):
        return NO_MATCH
    end = candidate.start + len(text)
    after = candidate.data[end : min(end + 1, candidate.end)]
    if after in (b" ", b"\t") and _COMMENT.match(candidate.data, end, candidate.end):
        after = b"\n"
    value = _Value(text, lead, candidate.before(), after)
    if _is_part_of_more(value, quote) or secret_values.is_number(text) or _HASH.match(text) or text.startswith(_PEM):
        return NO_MATCH
    if quote or lead.endswith(b">"):
        return candidate.find_end(pattern) if _is_quoted_password(value) else NO_MATCH
    return _trim_end(candidate, pattern) if _is_bare_password(value) else NO_MATCH


def _find_phrase_end(candidate: Candidate, lead: bytes) -> int:
    """Return the end of several words that are the value of a setting; NO_MATCH if they are none, or prose."""
    if not _SETTING_LEAD.match(lead) or _SHORT_NAME.match(lead) or not _SETTING.match(candidate.before()):
        return NO_MATCH
    text = candidate.peek(_PHRASE)
    end = candidate.start + len(text)
    is_alone = candidate.data[end : min(end + 1, candidate.end)] in b"\r\n" or _COMMENT.match(
        candidate.data, end, candidate.end
    )
    return end if is_alone and not secret_values.is_label(text.split(b" ")[0]) and secret_values.is_phrase(text) else -1


def _trim_end(candidate: Candidate, pattern: bytes) -> int:
    return candidate.start + len(candidate.data[candidate.start : candidate.find_end(pattern)].rstrip(_TRAILING))


def _is_part_of_more(value: _Value, quote: bytes) -> bool:
    """Return True if the name is part of another name, is expanded, or does not belong to the value."""
    _, lead, before, after = value
    if (not quote and b"," in lead) or (lead.endswith(b">") and after != b"<"):
        return True
    if _CELL.search(lead) and not _ROW.match(before):
        return True
    if _EXPANDED.search(before) or _SCHEMED.match(lead):
        return True
    if not before or not _SHORT_NAME.match(lead):
        return False
    is_inside = before[-1:].isalpha() and not (lead[:1].isupper() and before[-1:].islower())
    return is_inside and _FLAG.search(before) is None


def _find_quote(lead: bytes) -> bytes:
    """Find the quote that opens a value, before the scheme of an authorization if there is one."""
    if lead[-1] not in _QUOTES and not lead.rstrip(b" =").lower().endswith(_SCHEME_WORDS):
        return b""
    match = _OPENED.search(lead)
    return (match[1] if match else b"") or b""


def _choose_value_pattern(quote: bytes, lead: bytes) -> bytes:
    if quote:
        return (_QUOTED if len(quote) == 1 else _ESCAPED)[quote[-1:]]
    return _ELEMENT if lead.endswith(b">") else _BARE


def _is_quoted_password(value: _Value) -> bool:
    text, lead = value.text, value.lead
    if _CLOSED.match(text):
        return False
    if _SPOKEN.match(lead) and (lead.endswith(b"`") or _SHORT_NAME.match(lead)):
        return _is_unquoted_password(value)
    if secret_values.has_space(text):
        is_phrase = b"phrase" in lead.lower()
        is_setting = _QUOTED_SETTING_LEAD.match(lead) is not None and _SETTING.match(value.before) is not None
        return (is_phrase or (is_setting and secret_values.is_phrase(text))) or any(
            secret_values.is_random(word) for word in text[: secret_values.SAMPLE_LENGTH].split() if b"/" not in word
        )
    if secret_values.is_random(text):
        return True
    if _LOOSE.search(lead):
        return secret_values.has_digit(text) and (
            secret_values.has_punctuation(text) or secret_values.is_scattered(text)
        )
    if secret_values.has_digit(text) or secret_values.has_punctuation(text):
        return True
    if _SHORT_NAME.match(lead):
        return text.islower() and len(text) >= _WORD and not secret_values.names_secret(text)
    is_joined = secret_values.is_path(text) and any(sign in text for sign in _JOINTS)
    return not (is_joined or text.isupper() or secret_values.is_label(text) or secret_values.names_secret(text))


def _is_bare_password(value: _Value) -> bool:
    text = value.text
    if secret_values.is_code(text, value.after) or (
        b"." in text and secret_values.is_path(text) and secret_values.names_secret(text)
    ):
        return False
    if _SPOKEN.match(value.lead):
        return _is_unquoted_password(value)
    if secret_values.is_random(text):
        return True
    if secret_values.names_secret(text) or (
        b"." in text and secret_values.is_path(text) and not secret_values.is_scattered(text)
    ):
        return False
    if secret_values.has_digit(text) or secret_values.has_punctuation(text):
        is_literal = not secret_values.is_path(text) or (len(text) >= _WORD and secret_values.is_scattered(text))
        return value.variable or is_literal or (value.ends and value.settles)
    if any(sign in text for sign in _JOINTS) or not secret_values.is_worded(text):
        return False
    if value.is_setting and len(text) >= (_WORD if secret_values.is_label(text) else _SHORTEST):
        return not secret_values.is_label(text) or value.before.startswith((b" ", b"\t"))
    return value.ends and (
        value.variable or (value.settles and len(text) >= _WORD and not secret_values.is_label(text))
    )


def _is_unquoted_password(value: _Value) -> bool:
    """Return True if a value in a sentence, after a flag or in a netrc file is a password."""
    text = value.text
    if secret_values.is_random(text):
        return not _SHORT_NAME.match(value.lead) or len(text) >= _LONGER or _FLAG.search(value.before) is not None
    if _LOGIN.search(value.before):
        return True
    if _FLAG.search(value.before):
        return secret_values.has_digit(text) or secret_values.has_punctuation(text)
    if _SHORT_NAME.match(value.lead):
        return False
    return (
        len(text) >= _WORD
        and secret_values.has_digit(text)
        and (secret_values.has_punctuation(text) or bool(_MIXED_WORD.match(text)))
    )


CellCheck = Callable[[bytes], bool]
_DASHES: Final = rb"[ \t]{0,32}:?-{1,200}:?[ \t]{0,32}"
_TABLE: Final = re.compile(
    rb"(?m)^(?P<head>[^\n|]*\|[^\n]*)\n(?=[^\n]*\|)[ \t>]{0,16}\|?"
    + _DASHES
    + rb"(?:\|"
    + _DASHES
    + rb")*\|?[ \t]{0,32}(?:\r?\n|\Z)(?P<rows>(?:[^\n|]*\|[^\n]*(?:\n|\Z))*)"
)
_PASSWORD_COLUMN: Final = re.compile(
    rb"(?i)(?:.*[ _-])?(?:password|passwd|passphrase|passcode|passwort|kennwort|pwd)s?"
)
_KEY_COLUMN: Final = re.compile(
    rb"(?i)(?:.*[ _-])?(?:secret|token|credential|(?:api|access|secret|private|auth|signing|license)[ _-]?key)s?"
)
_CELL_TEXT: Final = re.compile(rb"[ \t>*_`\"']*(.*?)[ \t\r*_`\"']*\Z", re.DOTALL)
_UNESCAPED_BAR: Final = re.compile(rb"(?<!\\)\|")


def find_table_cells(data: bytes) -> Iterator[tuple[int, int]]:
    """Find the values of secrets in Markdown tables, below a heading such as "password" or "token"."""
    for table, checks in _find_tables(data):
        start = table.start("rows")
        while start < table.end("rows"):
            line_end = data.find(b"\n", start, table.end("rows"))
            end = table.end("rows") if line_end < 0 else line_end
            for check, (cell, cell_end) in zip(checks, _split_cells(data, start, end), strict=False):
                if check is not None and check(data[cell:cell_end]):
                    yield cell, cell_end
            start = end + 1


def _find_tables(data: bytes) -> Iterator[tuple[re.Match[bytes], Sequence[CellCheck | None]]]:
    """Find the tables that may have secrets, with the check of each column."""
    if data.find(b"|") < 0 or data.find(b"-") < 0:
        return
    for table in _TABLE.finditer(data):
        checks = [_choose_cell_check(data[start:end]) for start, end in _split_cells(data, *table.span("head"))]
        if any(checks):
            yield table, checks


def find_start_of_table(data: bytes, at: int) -> int:
    """Return the start of the table around a position, or of the rows with which a text ends; else the position."""
    for table, _ in _find_tables(data):
        if table.start() < at < table.end():
            return table.start()
    return min(at, _find_open_rows(data))


def _find_open_rows(data: bytes) -> int:
    """Return the start of the rows with which a text ends, since later lines may belong to them; else its length."""
    last_line = start = data.rfind(b"\n") + 1
    while start > 0:
        line = data.rfind(b"\n", 0, start - 1) + 1
        if data.find(b"|", line, start) < 0:
            break
        start = line
    return start if start < last_line or data.find(b"|", last_line) >= 0 else len(data)


def _split_cells(data: bytes, start: int, end: int) -> list[tuple[int, int]]:
    """Return where the texts of a row's cells begin and end, without marks of emphasis and code."""
    row = data[start:end]
    bars = [match.start() for match in _UNESCAPED_BAR.finditer(row)]
    edges = [*([] if row[: bars[0]].strip(b" \t>") == b"" else [-1]), *bars] if bars else [-1]
    if edges[-1] < len(row) and row[edges[-1] + 1 :].strip():
        edges.append(len(row))
    cells: list[tuple[int, int]] = []
    for left, right in pairwise(edges):
        text = _CELL_TEXT.match(row[left + 1 : right])
        first, last = text.span(1) if text else (0, 0)
        cells.append((start + left + 1 + first, start + left + 1 + last))
    return cells


def _choose_cell_check(heading: bytes) -> CellCheck | None:
    if _PASSWORD_COLUMN.fullmatch(heading):
        return _is_password_cell
    return _is_key_cell if _KEY_COLUMN.fullmatch(heading) else None


def _is_password_cell(text: bytes) -> bool:
    if len(text) < _SHORTEST or secret_values.is_harmless(text) or secret_values.is_number(text):
        return False
    if secret_values.has_space(text):
        return secret_values.is_phrase(text) or any(map(secret_values.is_random, text.split()))
    return secret_values.is_random(text) or not secret_values.names_secret(text)


def _is_key_cell(text: bytes) -> bool:
    if len(text) < _KEY or secret_values.is_harmless(text) or secret_values.has_space(text):
        return False
    return secret_values.is_random(text) or secret_values.is_mixed(text)

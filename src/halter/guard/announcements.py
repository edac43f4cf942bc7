"""Passwords and tokens that something other than their name announces: a flag, a header, a URL, a line of a file."""

import base64
import binascii
import re
from typing import Final

from halter.guard import literals
from halter.guard.family import NONE, Candidate

_SHORTEST, _KEY = 4, 8

COOKIE: Final = r"cookie\\{0,3}[\"']?\s{0,2}:\s{0,2}\\{0,3}[\"']?"
_COOKIE: Final = rb"[\w.%-]{1,64}=[^\s;,\"'\\]+(?:;\s?[\w.%-]{1,64}=[^\s;,\"'\\]*)*"
_SET_COOKIE: Final = rb"[\w.%-]{1,64}=[^\s;,\"'\\]+"
_SESSION: Final = re.compile(rb"(?i)sess|sid|auth|token|login|jwt|remember|csrf|xsrf|secret|key")


def read_cookie(found: Candidate) -> int:
    """Read what a browser sends or is told to keep. A cookie with the name of a setting holds no secret."""
    pattern = _SET_COOKIE if found.before()[-4:].lower() == b"set-" else _COOKIE
    pairs = [pair.partition(b"=") for pair in found.peek(pattern).split(b";")]
    secret = any(
        not literals.is_harmless(value) and (literals.is_random(value) or _SESSION.search(name))
        for name, _, value in pairs
        if len(value) >= _KEY
    )
    return found.all(pattern) if secret else NONE


USER: Final = (
    r"(?:(?:[\s\"']-[uUa]\s{0,2}|-user[ =]|-userpwd[ =]|-proxy-user[ =])[\"']?[^\s:,\"'@/$]{1,64}[:%,]"
    r"|sqlplus\s{1,2}[a-z0-9_$]{1,32}/|/token:)"
)
_REMOTE: Final = re.compile(rb"(?i)\b(?:curl|wget|lftp|https?|ab|siege|smbclient|rpcclient|sqlplus)\b")
_WORDS: Final = rb"[^\s\"']*"
_UP_TO_HOST: Final = rb"[^\s\"'@]*"


def read_user(found: Candidate) -> int:
    """Read the password after `curl -u NAME:`. Elsewhere `-u` may be followed by a user and a group."""
    pattern = _UP_TO_HOST if found.lead().startswith(b"sql") else _WORDS
    text = found.peek(pattern)
    if len(text) < _SHORTEST or text.isdigit() or literals.is_harmless(text):
        return NONE
    known = _REMOTE.search(found.before() + found.lead())
    return found.all(pattern) if known or literals.is_random(text) else NONE


FLAGGED: Final = r" -(?:p|P|a|w|N|k)\s{0,2}[\"']?"
_SPACED: Final = {
    b"p": re.compile(
        rb"\b(?:sshpass|(?:docker|podman|helm registry|oras|az|cf|oc|buildah|nerdctl) login|twine|mongo\w*|cqlsh"
        rb"|influx|arangosh|cypher-shell|snowsql|beeline|psexec|winexe|xfreerdp)\b[^|;&]*\Z"
    ),
    b"P": re.compile(rb"\b(?:zip|unzip|sqlcmd|bcp|mosquitto_\w+|ipmitool)\b[^|;&]*\Z"),
    b"a": re.compile(rb"\b(?:redis-cli|redis-benchmark|valkey-cli)\b[^|;&]*\Z"),
    b"k": re.compile(rb"\bopenssl\b[^|;&]*\Z"),
    b"N": re.compile(rb"\bssh-keygen\b[^|;&]*\Z"),
    b"w": re.compile(rb"\bldap\w+\b[^|;&]*\Z"),
}
_JOINED: Final = re.compile(rb"\b(?:mysql\w*|mariadb\w*|7za?|rar|sshpass)\b[^|;&]*\Z")
"""These ask for the password if it does not follow at once: what stands after a space is something else."""


def read_flagged(found: Candidate) -> int:
    """Read the password after a short flag of a program that takes one there."""
    text, lead = found.peek(_WORDS), found.lead()
    if len(text) < _SHORTEST or text[:1] == b"-" or literals.is_harmless(text):
        return NONE
    flag = lead[2:3]
    joined = flag == b"p" and lead[3:4] != b" " and _JOINED.search(found.before())
    spaced = flag in _SPACED and _SPACED[flag].search(found.before())
    return found.all(_WORDS) if joined or spaced else NONE


PGPASS: Final = r":(?:[0-9]{4,5}|\*):[^\s:]{1,63}:[^\s:]{1,63}:"
_HOST: Final = re.compile(rb"(?:^|[\s\"'`])(?:[\w-]*[g-zG-Z_.-][\w.-]*|\*)\Z")


def read_pgpass(found: Candidate) -> int:
    """Read the password of a line HOST:PORT:DATABASE:USER:PASSWORD. Addresses of the internet have colons, too."""
    text = found.peek(_WORDS)
    secret = literals.is_random(text) or (literals.has_digit(text) and len(text) >= _KEY)
    return found.all(_WORDS) if secret and _HOST.search(found.before()) else NONE


PAIR: Final = (
    r"(?:auth\s{0,2}[=:]\s{0,2}[(\[]|login\(|authenticate\(|basic_?auth\(|credentials\()"
    r"\s{0,3}[\"'][^\"'\n]{0,64}[\"']\s{0,2},\s{0,3}[\"']"
)
_QUOTED: Final = {quote: b"(?:[^\\\\\n" + quote + rb"]|\\[^\n])*" for quote in (b'"', b"'")}


def read_pair(found: Candidate) -> int:
    """Read the second of two quoted values, as in `auth=("ann", "…")`."""
    pattern = _QUOTED[found.lead()[-1:]]
    text = found.peek(pattern)
    if len(text) < _SHORTEST or literals.is_harmless(text):
        return NONE
    return found.all(pattern) if literals.is_random(text) or literals.has_digit(text) else NONE


DSN: Final = r"dsn[\"']?\s{0,2}[=:]\s{0,2}[\"']?[a-z0-9_.-]{1,32}:"


def read_dsn(found: Candidate) -> int:
    """Read the password of a data source that is no URL, as in `app:…@tcp(db:3306)/shop`."""
    text = found.peek(_UP_TO_HOST)
    secret = len(text) >= _SHORTEST and not literals.is_harmless(text)
    return found.all(_UP_TO_HOST) if secret and found.data.startswith(b"@", found.start + len(text)) else NONE


URL: Final = r"://[^\s/:@\"'<>]{0,64}:"
_URL: Final = rb"[^\s/@\"'<>]{3,}@"
_STANDS_FOR: Final = re.compile(rb"(?i)[a-z_-]*(?:pass|pwd|secret|token)[a-z_-]*\Z|.?\{")
_PORT: Final = re.compile(rb"[0-9]+(?:[?#,]|\Z)")


def read_url(found: Candidate) -> int:
    """Read the password of a URL, without the sign that ends it."""
    stop = found.all(_URL) - 1
    text = found.data[found.start : max(stop, found.start)]
    if not text or _PORT.match(text) or literals.is_harmless(text) or text.isupper() or _STANDS_FOR.match(text):
        return NONE
    return stop


_TOKEN_URL: Final = rb"[A-Za-z0-9_.~%-]{20,200}@"


def read_token_url(found: Candidate) -> int:
    """Read the user of a URL who is a token, without the sign that ends it."""
    text = found.peek(_TOKEN_URL)
    return found.start + len(text) - 1 if literals.is_random(text) else NONE


def is_basic(value: bytes) -> bool:
    """Tell whether a value is what `Basic` announces: a name and a password in base64."""
    try:
        return b":" in base64.b64decode(value + b"=" * (-len(value) % 4), validate=True) or literals.is_random(value)
    except (binascii.Error, ValueError):
        return literals.is_random(value)


_PREFIX: Final = re.compile(rb"(?:^|[^A-Za-z0-9_-])[a-z][a-z0-9]{1,14}(?:[_-][a-z0-9]{1,10}){0,2}\Z")
_DIGESTS: Final = re.compile(rb"(?:sha\d*|md5|blake\w*|integrity|digest|cs_test|cs_live|chunk|img|image|file)\Z")
_TOKEN: Final = rb"[_-][A-Za-z0-9]{32,}"


def read_token(found: Candidate) -> int:
    """Read what looks like a token of no known family: a word, a sign, and much that is drawn by lot."""
    text, before = found.peek(_TOKEN)[1:], found.before()
    mixed = not (text.islower() or text.isupper()) and literals.is_token(text)
    return found.all(_TOKEN) if mixed and _PREFIX.search(before) and not _DIGESTS.search(before) else NONE


CALLED: Final = r"(?:client|login|authenticate|configure|connect|api)\(\s{0,2}[\"']"
_LITERAL: Final = rb"[A-Za-z0-9_.=+-]{24,}"


def read_called(found: Candidate) -> int:
    """Read a key that is handed to what needs one, without any name."""
    return found.all(_LITERAL) if literals.is_token(found.peek(_LITERAL)) else NONE

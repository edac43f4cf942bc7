"""Families of secrets, checks that distinguish a literal secret from other values, and RE2 over bytes.

Checks examine only the first bytes of a value.

Every pattern is for RE2 over bytes and follows three rules, which ensure linear time and idempotence: it matches as
early as possible and then only grows, so that no search reads far beyond its match; it does not depend on the text
after the match; and it depends on the text before it only by `edge` and `behind`. The first two characters (`heads`)
are fixed, so that the family of a match is found without trying them all.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import msgspec

REGEX_MEMORY: Final = 64 << 20
"""Bytes that one automaton may use before it drops its cached states; most need a hundredth of that."""

_ASCII: Final = 128


class Regex:
    """A compiled pattern over bytes.

    It calls the C++ object behind the package's replacement for `re`, which creates a generator and a match object for
    every search: two thirds of the time for a hostile text that is full of matches.
    """

    __slots__ = ("_match", "_searching", "_starting")

    def __init__(self, pattern: bytes) -> None:
        re2: Any = import_module("re2._re2").RE2
        compiled_pattern = re2(pattern, _options(re2))
        if not compiled_pattern.ok():
            # The pattern is not quoted, since it may contain a secret.
            raise ValueError(f"Invalid pattern of {len(pattern)} bytes: {compiled_pattern.error().decode()}.")
        self._match = compiled_pattern.Match
        self._searching = re2.Anchor.UNANCHORED
        self._starting = re2.Anchor.ANCHOR_START

    def search(self, text: bytes, start: int, end: int) -> tuple[int, int] | None:
        span: tuple[int, int] = self._match(self._searching, text, start, end)[0]
        return None if span[0] < 0 else span

    def match(self, text: bytes, start: int, end: int) -> int:
        """Return the end of the match that begins at `start`, or -1."""
        span: tuple[int, int] = self._match(self._starting, text, start, end)[0]
        return span[1]


class RegexSet:
    """A set of patterns, which finds those that match at the beginning of a text."""

    __slots__ = ("_set",)

    def __init__(self, patterns: Iterable[bytes]) -> None:
        module: Any = import_module("re2._re2")
        self._set = module.Set(module.RE2.Anchor.ANCHOR_START, _options(module.RE2))
        for pattern in patterns:
            self._set.Add(pattern)
        self._set.Compile()

    def match(self, text: bytes) -> list[int]:
        return self._set.Match(text)


def _options(re2: Any) -> Any:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = REGEX_MEMORY
    options.never_capture = True
    options.log_errors = False
    return options


@cache
def compile_regex(pattern: bytes) -> Regex:
    return Regex(pattern)


def join_patterns(patterns: Iterable[bytes]) -> bytes:
    """Join patterns as alternatives. Of two that match at one position, the first counts."""
    return b"|".join(b"(?:" + pattern + b")" for pattern in patterns)


def escape_bytes(text: bytes) -> bytes:
    return b"".join(bytes([byte]) if byte < _ASCII and chr(byte).isalnum() else b"\\x%02x" % byte for byte in text)


SAMPLE_LENGTH: Final = 128
"""The number of bytes of a value that are inspected."""

_PIECES: Final = re.compile(rb"[A-Za-z0-9]+")
_RUNS: Final = re.compile(rb"[A-Za-z0-9]{6,}")
_PATTERNED: Final = re.compile(
    rb"[a-z]?(?:(?:On|In|To|Is|At|By|Of|Or|No|Id|Ip|As|An|If|Up|Do|Be|Db|Os|Ui|My|Go|Us|Vm|Tx|Rx|So|We|A)(?![a-z])"
    rb"|[A-Z]*+[a-z]{2,}+|[A-Z]{2,}+|[A-Z](?=[0-9])|[0-9]{1,4}+(?![0-9]))++"
)
"""Words, as in identifiers. Random values have single letters everywhere."""
_GROUPS: Final = re.compile(rb"[0-9]++")
_FEW_GROUPS: Final = 3
_PIN: Final = 6
_LONG_RUN: Final = 16
_CAPITAL: Final = re.compile(rb"[A-Z]")
_MIN_CAPITAL_SHARE: Final = 0.28
_MAX_CAPITAL_SHARE: Final = 0.72
"""Half of random letters are capitals. In names, far fewer are, or all."""
_DIGIT: Final = re.compile(rb"[0-9]")
_LETTER: Final = re.compile(rb"[A-Za-z\x80-\xff]")
_PUNCTUATION: Final = re.compile(rb"[!#%^*~@?+$=&]")
_WORDS: Final = re.compile(rb"[A-Za-z_.:>/\- \x80-\xff]+")
_PATH: Final = re.compile(rb"[A-Za-z_$@][\w$]*(?:(?:\.|::|->|\?\.|-|/)[\w$]+)*[!?]?")
_CODE: Final = re.compile(rb"[A-Za-z_$@][\w$.:>?-]*[\[(<{]")
_CAPITALISED: Final = re.compile(rb"(?:[A-Z]|\xc3[\x80-\x9e])[a-z\x80-\xff]*")
_SECRET_WORD: Final = re.compile(
    rb"(?i)pass|pwd|secret|token|key|cred|auth|login|user|admin|hash|salt|value|field|param|input|prompt|example|here"
)
_TYPE: Final = re.compile(rb"[\w.:]*(?:Key|Token|Password|Secret|Credential|Auth)s?\Z")
_TYPE_WORD: Final = re.compile(rb"Key|Token|Password|Secret|Credential")
_REFERENCE: Final = (
    rb"(?i)[$%@#]?\{|\$[a-z_]\w*\]?\z|\$[0-9@*]\z|\$[(]|%[(sdvq]|%\w+%\z|<|\[|@[a-z]+@|&[a-z]|![a-z]+\z"
    rb"|(?:arn|op|vault|ref|env|file|secret|ssm|https?|s3|gs|sops|keyring|aws-sm|azure-kv|projects)[:+/]+[a-z/$]"
    rb"|(?:/|\./|\.\./|~/|[a-z]:\\)[a-z_.~-]{2,}(?:[\\/]|\z)"
)
_PLACEHOLDER: Final = (
    rb"(?i)#[0-9a-f]{3,8}\z"
    rb"|.*(?:x{4,}|\*{3,}|\.\.\.|\xe2\x80\xa6|_{4,}|0{8,}|1234567890|0123456789|abcdefgh)|.*\{\{|.*<[a-z _-]+>"
    rb"|(?:your|my|some|the|any|an?|new|old|insert|replace|enter|put|fill|change|redacted|hidden)[-_ ][a-z_ -]*\z"
    rb"|(?:change|replace)(?:me|this|it).*"
    rb"|(?:(?:test|dummy|fake|mock|sample|example|placeholder|todo|tbd|foo|bar|baz|hello|world|demo)[-_]?)+"
    rb"(?:\w{0,12}(?:pass|pwd|password|token|key|secret|value))?[-_]?[0-9]{0,4}\z"
)
_STANDS_FOR: Final = b"(?:" + _REFERENCE + b")|(?:" + _PLACEHOLDER + b")"
_SPACE: Final = re.compile(rb"\s")

_HARMLESS: Final = frozenset(
    b"unicode binary bcrypt scrypt argon forbidden dialog manual encoded unchanged inherit inherited omitted custom "
    b"native vaulted sealed unused buffer nullable uuid json yaml blob bytea clob ascii regex date time always never "
    b"bearer basic token true false null none nil undefined void unknown required optional string str bytes bool "
    b"boolean int integer number float text char varchar object array list dict map set any data default empty unset "
    b"missing invalid expired redacted hidden masked changeme here there this that must should will cannot with from "
    b"and not yes no is are was the for of on in at by to or as if else when then only also see use used using set "
    b"await async new return self const let var func function type class struct enum static public private readonly "
    b"incorrect correct wrong failed failure success successful ok okay error denied refused accepted rejected granted "
    b"revoked rotated renewed refreshed refresh changed change updated update created deleted removed added reset "
    b"strong weak short long plain plaintext encrypted hashed stored sensitive secret secrets password passwords "
    b"passwd passphrase pass pwd user username admin name email login prompt file path env environment config vault "
    b"keyring keychain generated random unique temporary permanent disabled enabled forgotten protected confirm "
    b"confirmation current previous next again please enter enabled absent present provided given written "
    b"passwort contrasenia authorization authenticate authentication credentials something anything nothing whatever "
    b"define defined oauth oauth2 jwt saml ldap kerberos negotiate digest ntlm apikey".split()
)
"""Words that follow the name of a secret in code, schemas and prose and are not secret."""

_PROSE: Final = frozenset(
    b"a be has have do does may might can could would only least most more less than minimum maximum min max between "
    b"character characters chars letter letters digit digits symbols length field fields hint note notes your my its "
    b"their users account accounts description label entry line box form page link mail sent over per every each all "
    b"what which who whose how why never always same different older newer ask tbd n/a el la le les der die das ein "
    b"eine mit von".split()
)
"""Words of sentences about passwords, which a phrase of words as a password seldom has."""
_PHRASE_STOPS: Final = (_HARMLESS | _PROSE) - {b"correct"}
_MAX_PHRASE_WORDS: Final = 8

_STOPS: Final = b".:!?"


def is_phrase(value: bytes) -> bool:
    """Return True if a value is several words that are no sentence, as in a password of words."""
    words = value[:SAMPLE_LENGTH].lower().split()
    if not 1 < len(words) <= _MAX_PHRASE_WORDS or names_secret(value) or value.endswith((b".", b":", b"!", b"?")):
        return False
    return _PHRASE_STOPS.isdisjoint(words) and not is_harmless(value)


def is_harmless(value: bytes) -> bool:
    """Return True if a value is a common word, a reference or a placeholder."""
    sample = value[:SAMPLE_LENGTH]
    if sample.lower().rstrip(_STOPS) in _HARMLESS or not sample.strip(sample[:1]):
        return True
    return compile_regex(_STANDS_FOR).match(sample, 0, len(sample)) >= 0


def is_random(value: bytes) -> bool:
    """Return True if a part of a value looks random, as keys do."""
    return any(_is_drawn(run) for run in _RUNS.findall(value[:SAMPLE_LENGTH]))


def _is_drawn(run: bytes) -> bool:
    if _LETTER.search(run) is None:
        return False
    capitals = len(_CAPITAL.findall(run)) / len(run)
    if len(run) >= _LONG_RUN and _MIN_CAPITAL_SHARE < capitals < _MAX_CAPITAL_SHARE and not _TYPE_WORD.search(run):
        return True
    if _PATTERNED.fullmatch(run) is None:
        return _DIGIT.search(run) is not None
    return len(_GROUPS.findall(run)) >= _FEW_GROUPS


def is_mixed(value: bytes) -> bool:
    return not value.islower() and not value.isupper() and has_digit(value)


def is_scattered(value: bytes) -> bool:
    """Return True if a value has more than one group of digits."""
    return len(_GROUPS.findall(value[:SAMPLE_LENGTH])) > 1


def is_token(value: bytes) -> bool:
    """Return True if a value looks random and is not part of an image or a program in base64."""
    return b"AAAA" not in value[4:SAMPLE_LENGTH] and is_random(value)


def is_padded_token(value: bytes) -> bool:
    """Return True if a value is a token after a run of one letter."""
    return is_token(value.lstrip(value[:1]))


def is_number(value: bytes) -> bool:
    """Return True if a value is a number or a version, and not a PIN."""
    return _LETTER.search(value, 0, SAMPLE_LENGTH) is None and (b"." in value or len(value) < _PIN)


def has_digit(value: bytes) -> bool:
    return _DIGIT.search(value, 0, SAMPLE_LENGTH) is not None


def has_space(value: bytes) -> bool:
    return _SPACE.search(value, 0, SAMPLE_LENGTH) is not None


def has_punctuation(value: bytes) -> bool:
    """Return True if a value has characters that occur in passwords, but not in identifiers."""
    return _PUNCTUATION.search(value, 0, SAMPLE_LENGTH) is not None


def is_worded(value: bytes) -> bool:
    return _WORDS.fullmatch(value[:SAMPLE_LENGTH]) is not None


def is_path(value: bytes) -> bool:
    """Return True if a value could be a dotted name in a program."""
    sample = value[:SAMPLE_LENGTH]
    if _PATH.fullmatch(sample) is None:
        return False
    return all(len(run) == 1 or _PATTERNED.fullmatch(run) for run in _PIECES.findall(sample))


def is_code(value: bytes, after: bytes) -> bool:
    """Return True if a value is a call, an index or a constructor."""
    if after in {b"(", b"[", b"{"}:
        return True
    return _CODE.match(value[:SAMPLE_LENGTH]) is not None or _TYPE.match(value[:SAMPLE_LENGTH]) is not None


def is_label(value: bytes) -> bool:
    """Return True if a value is one capitalized word, as the labels of forms are."""
    return _CAPITALISED.fullmatch(value[:SAMPLE_LENGTH]) is not None


def names_secret(value: bytes) -> bool:
    """Return True if a value contains a word for secrets, as names of fields and variables do."""
    return _SECRET_WORD.search(value, 0, SAMPLE_LENGTH) is not None


NO_MATCH: Final = -1
NEAR_LENGTH: Final = 8
VALUE_START: Final = r"[^\s\"'<>,;&\\`|(){}\[]"

LOOKBEHIND_LENGTH: Final = 256
"""The number of bytes before an announcement that may determine its meaning."""


class Candidate(NamedTuple):
    """A possible secret: its announcement begins at `lead_start`, its value at `start`.

    Only the text from `free_start` to `end` counts.
    """

    data: bytes
    free_start: int
    lead_start: int
    start: int
    end: int

    def before(self) -> bytes:
        return self.data[max(self.free_start, self.lead_start - LOOKBEHIND_LENGTH) : self.lead_start].rpartition(b"\n")[
            2
        ]

    def lead(self) -> bytes:
        return self.data[self.lead_start : self.start]

    def peek(self, pattern: bytes) -> bytes:
        """Read the inspected part of a value. The bound keeps a text with many names before one long value linear."""
        stop = compile_regex(pattern).match(self.data, self.start, min(self.end, self.start + SAMPLE_LENGTH))
        return self.data[self.start : max(stop, self.start)]

    def find_end(self, pattern: bytes) -> int:
        return compile_regex(pattern).match(self.data, self.start, self.end)


CheckValue = Callable[[bytes], bool]
ReadSecret = Callable[[Candidate], int]
"""Returns the end of a secret, or -1. It inspects at most SAMPLE_LENGTH bytes."""


class SecretFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One form of secret.

    `lead` announces it and stays visible. `whole` is the secret, and `near` its beginning: as much of it as one
    automaton for all families can search for without growing large. With `edge`, no word may directly precede it.
    `behind` is a pattern for the text before it, and `reach` are the bytes before it that belong to it. `check` decides
    on a match; `read` finds the end of a secret that no pattern describes. A `roomy` lead can itself contain a secret.
    """

    name: str
    heads: tuple[bytes, ...]
    lead: str = ""
    near: str
    whole: str = ""
    edge: bool = False
    fold: bool = False
    roomy: bool = False
    behind: str = ""
    reach: frozenset[int] = frozenset()
    check: CheckValue | None = None
    read: ReadSecret | None = None


def make_prefixed_family(
    name: str,
    heads: str,
    rest: str,
    *,
    edge: bool = False,
    reach: frozenset[int] = frozenset(),
    check: CheckValue | None = None,
) -> SecretFamily:
    """Make a family of tokens that begin with one of several prefixes, as most do."""
    prefixes = tuple(heads.split(" "))
    alternatives = "|".join(re.escape(word) for word in prefixes)
    beginning = f"{rest[: rest.index(']') + 1]}{{{NEAR_LENGTH}}}" if rest.startswith("[") else ""
    return SecretFamily(
        name=name,
        heads=tuple(word.encode() for word in prefixes),
        near=f"(?:{alternatives}){beginning}",
        whole=f"(?:{alternatives}){rest}",
        edge=edge,
        reach=reach,
        check=check,
    )


def make_announced_family(
    name: str, heads: str, lead: str, near: str, whole: str, check: CheckValue | None = None
) -> SecretFamily:
    """Make a family of values of a known form after an announcement."""
    encoded_heads = tuple(head.encode() for head in heads.split(" "))
    return SecretFamily(name=name, heads=encoded_heads, lead=lead, near=near, whole=whole, fold=True, check=check)


def make_read_family(
    name: str,
    heads: tuple[bytes, ...],
    lead: str,
    read: ReadSecret,
    *,
    near: str = VALUE_START,
    roomy: bool = False,
    reach: frozenset[int] = frozenset(),
) -> SecretFamily:
    """Make a family of values of any form: `read` finds their end, and decides if they are secret."""
    return SecretFamily(
        name=name, heads=heads, lead=lead, near=near, fold=bool(lead), read=read, roomy=roomy, reach=reach
    )

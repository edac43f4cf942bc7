"""Telling a literal secret from what else may stand after its name: code, a reference, a placeholder, a word.

All of it looks at the first bytes of a value only, and takes time in proportion to them.
"""

import re
from typing import Final

from halter.guard.linear import compiled

SAMPLE: Final = 128
"""So much of a value is looked at."""

_PIECES: Final = re.compile(rb"[A-Za-z0-9]+")
_RUNS: Final = re.compile(rb"[A-Za-z0-9]{6,}")
_PATTERNED: Final = re.compile(
    rb"[a-z]?(?:(?:On|In|To|Is|At|By|Of|Or|No|Id|Ip|As|An|If|Up|Do|Be|Db|Os|Ui|My|Go|Us|Vm|Tx|Rx|So|We|A)(?![a-z])"
    rb"|[A-Z]*+[a-z]{2,}+|[A-Z]{2,}+|[A-Z](?=[0-9])|[0-9]{1,4}+(?![0-9]))++"
)
"""Words, as an identifier is put together of them. What is drawn by lot has single letters everywhere."""
_GROUPS: Final = re.compile(rb"[0-9]++")
_FEW_GROUPS: Final = 3
_PIN: Final = 6
_LONG_RUN: Final = 16
_CAPITAL: Final = re.compile(rb"[A-Z]")
_FEWEST_CAPITALS: Final = 0.28
_MOST_CAPITALS: Final = 0.72
"""Half of the letters that are drawn by lot are capitals; in names that people make up, far fewer or all are."""
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
"""What follows the name of a secret in code, schemas and prose without being one."""

_STOPS: Final = b".:!?"


def is_harmless(value: bytes) -> bool:
    """Tell whether a value is a common word, a reference or a placeholder."""
    sample = value[:SAMPLE]
    if sample.lower().rstrip(_STOPS) in _HARMLESS or not sample.strip(sample[:1]):
        return True
    return compiled(_STANDS_FOR).match(sample, 0, len(sample)) >= 0


def is_random(value: bytes) -> bool:
    """Tell whether a part of a value looks drawn by lot, as keys are."""
    return any(_is_drawn(run) for run in _RUNS.findall(value[:SAMPLE]))


def _is_drawn(run: bytes) -> bool:
    if _LETTER.search(run) is None:
        return False
    capitals = len(_CAPITAL.findall(run)) / len(run)
    if len(run) >= _LONG_RUN and _FEWEST_CAPITALS < capitals < _MOST_CAPITALS and not _TYPE_WORD.search(run):
        return True
    if _PATTERNED.fullmatch(run) is None:
        return _DIGIT.search(run) is not None
    return len(_GROUPS.findall(run)) >= _FEW_GROUPS


def is_mixed(value: bytes) -> bool:
    """Tell whether a value has letters of both cases and digits."""
    return not value.islower() and not value.isupper() and has_digit(value)


def is_scattered(value: bytes) -> bool:
    """Tell whether there are digits in more than one place."""
    return len(_GROUPS.findall(value[:SAMPLE])) > 1


def is_token(value: bytes) -> bool:
    """Tell whether a value looks drawn by lot, and is no part of a picture or a program in base64."""
    return b"AAAA" not in value[4:SAMPLE] and is_random(value)


def is_padded_token(value: bytes) -> bool:
    """Tell whether a token follows a row of the same letter."""
    return is_token(value.lstrip(value[:1]))


def is_number(value: bytes) -> bool:
    """Tell whether a value is a number or a version, and no PIN."""
    return _LETTER.search(value, 0, SAMPLE) is None and (b"." in value or len(value) < _PIN)


def has_digit(value: bytes) -> bool:
    """Tell whether there is a digit."""
    return _DIGIT.search(value, 0, SAMPLE) is not None


def has_space(value: bytes) -> bool:
    """Tell whether a value is several words."""
    return _SPACE.search(value, 0, SAMPLE) is not None


def has_punctuation(value: bytes) -> bool:
    """Tell whether a value has signs that passwords have and identifiers do not."""
    return _PUNCTUATION.search(value, 0, SAMPLE) is not None


def is_worded(value: bytes) -> bool:
    """Tell whether a value is made of letters and what joins them."""
    return _WORDS.fullmatch(value[:SAMPLE]) is not None


def is_path(value: bytes) -> bool:
    """Tell whether a value could be the name of something in a program."""
    sample = value[:SAMPLE]
    if _PATH.fullmatch(sample) is None:
        return False
    return all(len(run) == 1 or _PATTERNED.fullmatch(run) for run in _PIECES.findall(sample))


def is_code(value: bytes, after: bytes) -> bool:
    """Tell whether something is called, indexed or built there."""
    if after in {b"(", b"[", b"{"}:
        return True
    return _CODE.match(value[:SAMPLE]) is not None or _TYPE.match(value[:SAMPLE]) is not None


def is_label(value: bytes) -> bool:
    """Tell whether a value is one capitalised word, as the labels of forms are."""
    return _CAPITALISED.fullmatch(value[:SAMPLE]) is not None


def names_secret(value: bytes) -> bool:
    """Tell whether a value itself speaks of secrets, as the names of fields and variables do."""
    return _SECRET_WORD.search(value, 0, SAMPLE) is not None

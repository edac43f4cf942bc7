"""A megabyte of each kind of text for a redactor: usual ones, and ones designed to slow it down.

All keys are generated at run time and are not valid anywhere.
"""

import base64
import json
import random
import string
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path

from bench import corpus

SIZE = 1_000_000
SECRETS = {"DATABASE": "correct-horse-battery-staple", "WEBHOOK": "kLm9x7Yz-Tq2-again"}
_WORDS = ("request", "served", "from", "cache", "for", "user", "order", "shipped", "retry", "queue", "closed", "by")
_CHANCE = random.Random(1)

Make = Callable[[], str]


def _letters(size: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_CHANCE.choices(alphabet, k=size))


def _line(number: int) -> str:
    words = " ".join(_CHANCE.choices(_WORDS, k=_CHANCE.randrange(4, 14)))
    level = _CHANCE.choice(("INFO", "WARN", "DEBUG"))
    return (
        f"2026-11-15T03:{number // 60 % 60:02}:{number % 60:02}Z {level} worker-{number % 9} [{_letters(8)}] "
        f"GET /v1/items/{number}?page=2 status=200 took {number % 97}.5 ms {words}"
    )


_KEYS: tuple[Make, ...] = (
    lambda: "key " + "gh" + "p_" + _letters(36),
    lambda: "key " + "sk" + "-ant-api03-" + _letters(80),
    lambda: "password=" + _letters(12),
    lambda: f"postgres://ann:{_letters(10)}@db/x",
    lambda: "Authorization: Bearer " + _letters(40),
    lambda: SECRETS["DATABASE"],
)


def _log(interval: int) -> str:
    """Make log lines, one in `interval` with a secret."""
    return _whole(_line(n) if n % interval else f"{_line(n)} {_CHANCE.choice(_KEYS)()}" for n in count(1))


def _whole(lines: Iterable[str]) -> str:
    lines_kept: list[str] = []
    size = 0
    for line in lines:
        lines_kept.append(line)
        size += len(line) + 1
        if size >= SIZE:
            break
    return "\n".join(lines_kept)


def _full(text: str) -> str:
    return text * (SIZE // len(text.encode()))


def _sources() -> str:
    """Make a text of this repository's code and pages, with a secret in one of 200 lines."""
    root = Path(__file__).parent.parent
    files = [*sorted(root.glob("src/halter/**/*.py"))[::4], *sorted(root.glob("docs/*.md"))]
    lines = "\n".join(file.read_text() for file in files).splitlines()
    return _whole(line if n % 200 else f"{line} {_CHANCE.choice(_KEYS)()}" for n, line in enumerate(lines, 1))


USUAL: Mapping[str, Make] = {
    "code and pages, a secret in 200 lines": _sources,
    "lines that speak of secrets, a secret in 1,000": lambda: corpus.mixed(SIZE),
    "log lines, a secret in 1,000": lambda: _log(1000),
    "log lines, a secret in 10": lambda: _log(10),
    "log lines, a secret in each": lambda: _log(1),
    "JSON": lambda: json.dumps([{"id": n, "name": "x", "ok": True} for n in range(SIZE // 36)]),
}

HOSTILE: Mapping[str, Make] = {
    "one letter": lambda: _full("a"),
    "one line of base64": lambda: base64.b64encode(_CHANCE.randbytes(SIZE * 3 // 4)).decode(),
    "one line of hex": lambda: _CHANCE.randbytes(SIZE // 2).hex(),
    "emoji": lambda: _full("🌍"),
    "NUL": lambda: _full("\0"),
    "keys that are one letter short": lambda: _full("gh" + "p_" + "a" * 35 + " "),
    "beginnings of keys": lambda: _full("AK" + "IA"),
    "beginnings of private keys": lambda: _full("-" * 5 + "BEGIN PRIVATE KEY"),
    "a private key without end": lambda: "-" * 5 + "BEGIN PRIVATE KEY" + "-" * 5 + _full("A"),
    "parts of tokens between dots": lambda: _full("." + "a" * 6),
    "users of URLs without a password": lambda: _full("://" + "a" * 64 + ":"),
    "names of secrets without a value": lambda: _full("secret_token_key=$"),
    "values that are harmless": lambda: _full("token=none "),
    "passwords that are harmless": lambda: _full("password=none "),
    "users without a password": lambda: _full(" -u a:b"),
    "cookies without a secret": lambda: _full("Cookie: a=b;c=d\n"),
    "names within an endless value": lambda: _full("password=secret_token="),
    "beginnings of a known value": lambda: _full(SECRETS["DATABASE"][:-1]),
    "a known value in hex": lambda: _full(SECRETS["DATABASE"].encode().hex()),
    "marks": lambda: _full("[redacted:github]"),
    "beginnings of marks": lambda: _full("[redacted:"),
}

"""What a command is known to write, read off its own words: then whatever reads it is known to get just that."""

import base64
import binascii
import re
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from halter.guard.program_names import FETCHERS, program_of

_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|0[0-7]{0,3}|[1-7][0-7]{0,2}|[\s\S])")
_SIGNS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
_DIRECTIVE: Final = re.compile(r"%%|%[-+ #0-9.]*[a-zA-Z]")


class Feed(msgspec.Struct, frozen=True):
    """What a command reads from others: their names, and whether any of them got it from elsewhere.

    `roots` are the places whose contents it lists, `text` is what it says, where the line itself shows that.
    """

    programs: tuple[str, ...] = ()
    fetched: bool = False
    roots: tuple[str, ...] = ()
    text: str | None = None


def feed_of(words: Sequence[str], before: Feed | None, text: str | None) -> Feed:
    """Tell what comes out of a command that reads `before` or `text`."""
    program = program_of(words[0]) if words else ""
    source = text if text is not None else before.text if before else None
    fetched = (before is not None and before.fetched) or fetches(words)
    return Feed(
        (program,), fetched, _roots(program, words[1:]) or (before.roots if before else ()), _said(words, source)
    )


def joined(feeds: Sequence[Feed]) -> Feed | None:
    """Put together what several commands write one after the other."""
    if len(feeds) <= 1:
        return feeds[0] if feeds else None
    texts = [feed.text for feed in feeds]
    return Feed(
        tuple(name for feed in feeds for name in feed.programs),
        any(feed.fetched for feed in feeds),
        tuple(root for feed in feeds for root in feed.roots),
        None if None in texts else "\n".join(text or "" for text in texts),
    )


def fetches(words: Sequence[str]) -> bool:
    """Tell whether a command names, anywhere in it, a program that gets something from elsewhere."""
    return any(program_of(part) in FETCHERS for word in words for part in word.split())


def unescaped(text: str) -> str:
    """Put in the signs that escapes stand for."""
    return _ESCAPE.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] == "x" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0].isdigit() and code.isascii() and "8" not in code and "9" not in code:
        return chr(int(code, 8))
    return _SIGNS.get(code, code if code == "\\" else "\\" + code)


def _roots(program: str, words: Sequence[str]) -> tuple[str, ...]:
    if program not in {"find", "ls", "fd", "fdfind", "tree", "du"}:
        return ()
    return tuple(islice((word for word in words if not word.startswith("-")), 8)) or (".",)


def _said(words: Sequence[str], source: str | None) -> str | None:
    if not words:
        return None
    program, rest = program_of(words[0]), list(words[1:])
    match program:
        case "echo":
            while rest and rest[0].startswith("-") and set(rest[0][1:]) <= set("neE") and rest[0] != "-":
                rest.pop(0)
            return unescaped(" ".join(rest))
        case "printf":
            return _formatted([word for word in rest if word != "--"])
        case "cat" | "tac" | "tee" | "sponge" | "head" | "tail" | "sort" | "uniq" | "tr" | "cut" | "nl" | "pv":
            passes = program == "tee" or not any(word == "-" or not word.startswith("-") for word in rest)
            return source if passes or rest == ["-"] else None
        case "base64" | "basenc":
            return _decoded(source) if source and any(word[:2] in {"-d", "-D", "--"} for word in rest) else None
        case "yes":
            return " ".join(rest)
        case _:
            return None


def _formatted(words: Sequence[str]) -> str:
    """Write as printf does; every directive takes the next word, whatever it is."""
    if not words:
        return ""
    values = iter(words[1:])
    pattern = unescaped(words[0])
    written = _DIRECTIVE.sub(lambda found: "%" if found[0] == "%%" else unescaped(next(values, "")), pattern)
    return " ".join([written, *(unescaped(value) for value in values)])


def _decoded(text: str) -> str | None:
    try:
        return base64.b64decode("".join(text.split()), validate=False).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return None

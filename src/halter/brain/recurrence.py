"""A recurrence or a moment in plain English, read by an exact grammar: nothing recurring is made of a guess.

The phrase stands at the beginning or the end of the sentence, or after `remind me`. What is left is the imperative.
Phrases that name a recurrence without saying when (`every now and then`) are answered with a sentence.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from halter.brain.imperative import asks, commands, negates, owns_its_end, without_politeness, without_thanks
from halter.brain.occasion import moment_said
from halter.brain.recurring import repeated
from halter.brain.saidtime import spoken
from halter.core.schedules import Timing

FARTHEST: Final = 500
"""How many characters are looked at, from the beginning or from the end."""
MOST_WORDS: Final = 16
"""How many words a phrase has at most."""

_IMPERATIVE: Final = 4
"""How many words of a prompt are looked at for a negation: what follows may well say what not to do."""
_WORD: Final = re.compile(r"\S+")
_SINGLE: Final = re.compile(r"(?:^|\s)'[^']*$")
_QUOTES: Final = (("\u201c", "\u201d"), ("\u201e", "\u201c"), ("\u00ab", "\u00bb"), ("\u2039", "\u203a"), ("(", ")"))
_QUALIFIED: Final = re.compile(
    r"(?:between|from|until|till|except|starting|beginning|unless|but not|around|before|after|roughly|approximately"
    r"|for (?:the next )?\d+)\b"
)
_OFTEN: Final = re.compile(r"(?:hourly|daily|nightly|weekly|fortnightly|monthly|quarterly|yearly|annual)")
_VAGUE_DAY: Final = re.compile(
    r"(?:every|each) (?:\S+ ){0,2}(?:day|week|month|year|moon|holiday|season|christmas|easter|shift)"
)
_WHAT: Final = "Say what is to be done then, rather than that it is scheduled: every monday at 9, write the report."
_BOTH: Final = "That names more than one time: say them one by one."
_QUALIFIER: Final = (
    "That recurrence has a limit which cannot be read exactly: say only when it repeats, "
    "like every weekday at 9, or write a cron in agent.yaml."
)


class When(msgspec.Struct, frozen=True):
    """What was read: when it fires, the imperative that is left, and the words that said when."""

    timing: Timing
    rest: str
    words: str


class Unclear(msgspec.Struct, frozen=True, tag=True):
    """A recurrence or a moment was named that cannot be read exactly; the sentence says what to say instead."""

    sentence: str


class _Elsewhere(msgspec.Struct, frozen=True):
    """A time was read that belongs to something inside of the sentence: no shorter one is looked for in it."""


class _Word(msgspec.Struct, frozen=True):
    text: str
    start: int
    end: int


class _Cut(msgspec.Struct, frozen=True):
    """A phrase within a sentence and what is left without it; `tail` says that words stand before it: those."""

    phrase: str
    words: str
    rest: str
    tail: str = ""
    qualified: bool = False


def read_when(text: str, now: int, timezone: str) -> When | Unclear | None:
    """Read when something is to be done, and what; None if no such thing is said, or nobody is told to do it."""
    if asks(text):
        return None
    text = without_thanks(without_politeness(text.strip()))
    for cut in _cuts(text):
        found = _read(cut, now, timezone)
        if found is not None:
            return None if isinstance(found, _Elsewhere) else found
    return None


def _read(cut: _Cut, now: int, timezone: str) -> "When | Unclear | _Elsewhere | None":
    """Read one phrase, if what is left beside it is an imperative that it can belong to."""
    rest = without_thanks(without_politeness(cut.rest.strip(" \t\r\n,;:-\u2013\u2014")))
    words = [word.text for word in _words(rest[:FARTHEST])]
    if not commands(words) or negates(words[:_IMPERATIVE]):
        return None
    timing, recurring = _timing(cut.phrase, now, timezone, dated=words[0] == "remind")
    if timing is None:
        return None
    before = [word.text for word in _words(without_politeness(cut.tail))]
    if cut.tail and not owns_its_end(before, once=not recurring):
        return _Elsewhere()
    if isinstance(timing, str):
        return Unclear(timing)
    if cut.qualified:
        return Unclear(_QUALIFIER) if recurring else None
    if words[0] == "schedule":
        return Unclear(_WHAT)
    doubt = _doubt(before, now, timezone, recurring=recurring) if cut.tail else ""
    return Unclear(doubt) if doubt else When(timing, rest, cut.words)


def _timing(phrase: str, now: int, timezone: str, *, dated: bool) -> tuple[Timing | str | None, bool]:
    """Read a phrase into a timing or a sentence, and tell whether it names a recurrence."""
    for way in spoken(phrase):
        found = repeated(way, now, timezone)
        if found is not None:
            return found, True
    for way in spoken(phrase):
        found = moment_said(way, now, timezone, dated=dated)
        if found is not None:
            return found, False
    return None, False


def _doubt(words: Sequence[str], now: int, timezone: str, *, recurring: bool) -> str:
    """Say what is doubtful about a time, seen from the words before it."""
    before = " ".join(words)
    if words[-1] in {"and", "or"}:
        return _BOTH
    if not recurring and (any(map(_OFTEN.fullmatch, words)) or _VAGUE_DAY.search(" ".join(words[-4:]))):
        return "It is not clear whether that is meant once or again and again: say it like every day at 9."
    if recurring and any(_timing(cut.phrase, now, timezone, dated=False)[1] for cut in _tails(before, _words(before))):
        return _BOTH
    return ""


def _words(text: str) -> list[_Word]:
    """Cut text into words as the grammar knows them: small letters, plain apostrophes, no comma behind."""
    return [
        _Word(found[0].lower().replace("\u2019", "'").rstrip(",;!?\u2026").rstrip("."), found.start(), found.end())
        for found in _WORD.finditer(text)
    ]


def _cuts(text: str) -> Iterator[_Cut]:
    """List the phrases that could say when, the longest first, at each place where one may stand."""
    words = _words(text[:FARTHEST])
    yield from _heads(text, words, 0)
    if len(words) > 2 and words[1].text in {"me", "us"} and commands([words[0].text]):  # noqa: PLR2004
        yield from _heads(text, words, 2)
    if len(text) <= FARTHEST and "\n" not in text:
        yield from _tails(text, words)
        yield from _middles(text, words)


def _heads(text: str, words: Sequence[_Word], first: int) -> Iterator[_Cut]:
    for last in range(min(len(words) - 1, first + MOST_WORDS), first, -1):
        said, start, end = words[first:last], words[first].start, words[last - 1].end
        rest = f"{text[:start]}{text[end:].lstrip(' ,:')}"
        following = " ".join(word.text for word in words[last : last + 3])
        yield _Cut(_phrase(said), text[start:end].rstrip(",:;"), rest)
        if first == 0 and _QUALIFIED.match(following):
            yield from _behind_a_limit(text, words, last)


def _behind_a_limit(text: str, words: Sequence[_Word], last: int) -> Iterator[_Cut]:
    """Look for the imperative behind a limit: `every hour between 9 and 17 check the mail`."""
    for index in range(last + 1, min(len(words), last + 8)):
        if commands([word.text for word in words[index:]]):
            start, end = words[0].start, words[last - 1].end
            yield _Cut(_phrase(words[:last]), text[start:end], text[words[index].start :], qualified=True)
            return


def _tails(text: str, words: Sequence[_Word]) -> Iterator[_Cut]:
    for first in range(max(1, len(words) - MOST_WORDS), len(words)):
        start = words[first].start
        if _quoted(text, start):
            continue
        yield _Cut(_phrase(words[first:]), text[start:].rstrip(",.;:!?"), text[:start], text[:start])
        for last in range(first + 1, len(words)):
            if _QUALIFIED.match(" ".join(word.text for word in words[last : last + 4])):
                end = words[last - 1].end
                yield _Cut(_phrase(words[first:last]), text[start:end], text[:start], text[:start], qualified=True)


def _quoted(text: str, place: int) -> bool:
    """Tell whether a quotation is open at a place."""
    before = text[:place]
    if any(before.count(sign) % 2 for sign in ('"', "`", "''")) or _SINGLE.search(before):
        return True
    return any(before.count(left) > before.count(right) for left, right in _QUOTES)


def _middles(text: str, words: Sequence[_Word]) -> Iterator[_Cut]:
    """List phrases between an imperative and what goes on: `check it every hour and tell me`, `send it at 9 to Bob`."""
    said = [word.text for word in words]
    for last in range(2, len(words) - 1):
        goes_on = said[last] in {"and", "then"} and commands(said[last + 1 :])
        if not goes_on and not (said[last] in {"to", "via", "if"} and not said[last + 1][:1].isdecimal()):
            continue
        for first in range(max(1, last - MOST_WORDS), last):
            start, end = words[first].start, words[last - 1].end
            if _quoted(text, start):
                continue
            yield _Cut(
                _phrase(words[first:last]),
                text[start:end].rstrip(",;:"),
                text[:start] + text[end:].lstrip(", "),
                text[:start],
            )


def _phrase(words: Sequence[_Word]) -> str:
    return " ".join(word.text.rstrip(":") for word in words)

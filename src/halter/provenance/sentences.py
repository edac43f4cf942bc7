"""How a trusted sentence names something: as a target, as a source, or as forbidden."""

import re
from typing import Final

_SENTENCES: Final = re.compile(r".+?(?:[.!?;](?=\s|$)|\n|$)\s*|\s+", re.DOTALL)
_BARRING: Final = re.compile(
    r"(?:(?<!\w)(?:never|avoid|without|except|neither)|(?<!\w)(?:(?P<verb>\w+)\s+)?not|(?<!\w)cannot|(?<!\w)\w+n['\u2019]t)"
    r"(?!\w| (?:forget|hesitate|fail|miss|only)\b)",
    re.IGNORECASE,
)
"""Words that forbid what follows them in a sentence: that part names nothing."""

_ALLOWING: Final = re.compile(r"(?<!\w)(?:but|instead|rather)(?!\w)", re.IGNORECASE)
_ALLOWING_CLAUSE: Final = re.compile(rf"{_ALLOWING.pattern}|,(?=\s)", re.IGNORECASE)
_LOOKBACK_LENGTH: Final = 300
_TELLING: Final = re.compile(
    r"(?<!\w)(?:i|we|they|he|she|it|there)(?:['\u2019]\w+)?(?: (?:also|still|just|really))?(?: \w+)?\s*$", re.IGNORECASE
)
"""Words before a "not" that states something and forbids nothing."""

_FORBIDDING: Final = ("must", "may", "should", "shall", "shan", "never", "avoid", "without", "except", "neither")
_SUPPOSING: Final = re.compile(
    r"(?<!\w)(?:if|when|whenever|unless|because|since|although|though)(?!\w)[^,]*$", re.IGNORECASE
)

_SOURCE: Final = re.compile(
    r"""
    (?<!\w)(?:(?:from|by|(?:e-?mail|mail|message|letter|post|note|file|article|document|page|website|inbox|bill)s?
    \ of)\s+
    (?:(?!(?:to|for|with|and|at|on|in)\b)[a-z]+\s+){0,3}?)
    (?:'[^'\n]{1,80}'|"[^"\n]{1,80}"|[A-Z][\w.\u2019'-]*(?:\s+[A-Z][\w.\u2019'-]*){0,3}|[^\s,;]*[@\d][^\s,;]*)
    |(?<!\w)[A-Z][\w-]*(?:\s+[A-Z][\w-]*){0,3}(?=['\u2019]s\s
        |\s+(?:sent|wrote|posted|said|says|asked|shared|called|told|wants|wanted|mentioned)(?!\w))
    """,
    re.VERBOSE,
)
"""Phrases that name a source: the writer of a letter is not its recipient."""

_RETURNING: Final = re.compile(r"(?<!\w)(?:repl(?:y|ies)|respond|refund|reimburse|back|return)(?!\w)", re.IGNORECASE)
_QUESTION: Final = re.compile(
    r"(?<![^.!?;\n])\s*(?:who|what|why|how\ (?:much|many|often)|does|did|is|are|was|were|has)(?!\w)[^?\n]*\?",
    re.IGNORECASE,
)

_NUMBER: Final = re.compile(r"(?<![\w.,/-])\d(?:[\d,.'\u2019]*\d)?(?![\w%/-]|[.,]\d| ?%)")
_MONTH: Final = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sep|oct|nov|dec)[a-z]*"
_COUNTS: Final = re.compile(
    r"[\s-]*(?:(?:second|minute|min|hour|day|night|week|month|year|time|person|guest|page|item|piece|word|step)s?|people|"
    rf"percent|am|pm|o['\u2019]clock|{_MONTH})(?!\w)",
    re.IGNORECASE,
)
"""Words after a number that counts something, or is part of a date."""

_NUMBERS: Final = re.compile(
    rf"(?<!\w)(?:invoice|order|number|no|nr|id|ticket|room|case|page|item|step|version|{_MONTH})[.:]?\s*#?\s*$|#\s*$",
    re.IGNORECASE,
)
"""Words before a number that names something."""

_MAX_LABEL_LENGTH: Final = 24
_CODES: Final = "usd|eur|gbp|chf|jpy|dollars?|euros?|pounds?|francs?|yen|bucks?"
_CURRENCY_BEFORE: Final = re.compile(rf"(?:[$€£¥]|(?<!\w)(?:{_CODES}))\s*$", re.IGNORECASE)
_CURRENCY_AFTER: Final = re.compile(rf"\s*(?:[$€£¥]|(?:{_CODES})(?!\w))", re.IGNORECASE)


def strip_forbidden(text: str) -> str:
    """Remove the forbidden parts of a text: `never mail it to Eve` does not name Eve."""
    if _BARRING.search(text) is None:
        return text
    return "".join(map(_cut_forbidden, _SENTENCES.findall(text)))


def _cut_forbidden(sentence: str) -> str:
    remaining_parts: list[str] = []
    start = 0
    for match in _BARRING.finditer(sentence):
        preceding = sentence[max(start, match.start() - _LOOKBACK_LENGTH) : match.start()]
        is_statement = _TELLING.search(preceding) and not match[0].lower().startswith(_FORBIDDING)
        if match.start() < start or is_statement:
            continue
        end_pattern = _ALLOWING_CLAUSE if _SUPPOSING.search(preceding) else _ALLOWING
        next_allowed = end_pattern.search(sentence, match.end())
        remaining_parts += (sentence[start : match.end()], " … ")
        start = len(sentence) if next_allowed is None else next_allowed.start()
    return "".join((*remaining_parts, sentence[start:]))


def strip_sources(text: str) -> str:
    """Remove the names of sources, unless the text asks to send something back to them."""
    if _RETURNING.search(text):
        return text
    return _SOURCE.sub(" … ", _QUESTION.sub(" … ", text))


def find_amounts(sentence: str) -> list[str]:
    """Find the numbers that may be amounts: those with a currency, or else all that count or name nothing."""
    matches = [
        match
        for match in _NUMBER.finditer(sentence)
        if not _COUNTS.match(sentence, match.end())
        and not _NUMBERS.search(sentence, max(0, match.start() - _MAX_LABEL_LENGTH), match.start())
    ]
    currency_matches = [
        match
        for match in matches
        if _CURRENCY_BEFORE.search(sentence, max(0, match.start() - _MAX_LABEL_LENGTH), match.start())
        or _CURRENCY_AFTER.match(sentence, match.end())
    ]
    return [match[0] for match in currency_matches or matches]

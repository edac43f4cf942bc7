"""Prompts with names of people, and texts designed to slow down the search for names."""

import random
from collections.abc import Mapping

SIZE = 600_000
TEXT = 100_000
_CHANCE = random.Random(3)
_FIRST = (
    "Ada",
    "Bob",
    "Cleo",
    "Dana",
    "Erik",
    "Fatima",
    "Goran",
    "Hugo",
    "Ines",
    "Jonas",
    "Katja",
    "Lars",
    "Mona",
    "Nils",
)
_WORDS = (
    "the",
    "order",
    "was",
    "shipped",
    "to",
    "on",
    "behalf",
    "of",
    "by",
    "and",
    "with",
    "a",
    "report",
    "about",
    "4711",
)


def _surname() -> str:
    return "".join(_CHANCE.choice("bcdfghklmnprstvz") + _CHANCE.choice("aeiou") for _ in range(3)).title()


NAMES = tuple(sorted({f"{_CHANCE.choice(_FIRST)} {_surname()}" for _ in range(1100)})[:1000])


def letter(size: int = TEXT) -> str:
    """Make a text of `size` characters in which every hundredth word is a name."""
    words: list[str] = []
    while size > 0:
        words.append(_CHANCE.choice(NAMES) if _CHANCE.random() < 1 / 100 else _CHANCE.choice(_WORDS))
        size -= len(words[-1]) + 1
    return " ".join(words)


HOSTILE: Mapping[str, str] = {
    name: piece * (SIZE // len(piece))
    for name, piece in {
        "@": "@",
        "addresses of mail": "a@b.",
        "digits": "1 ",
        "dots": "12.",
        "numbers of accounts": "MT12 ",
        "numbers of phones": "+49 ",
        "numbers of cards": "4111 1111 1111 1112 ",
        "numbers of people": "123-45-678",
        "beginnings of placeholders": "[NAME_",
        "placeholders in placeholders": "[EMAIL_[EMAIL_3f9a2c]",
        "backslashes": "\\",
        "beginnings of names": NAMES[0][:-1] + " ",
    }.items()
}

"""Whether a quote stands in its source, however the two were set: in other lines, with other quotes and dashes."""

import re
from typing import Final

from halter.core.library import WORD

SHORTEST: Final = 8
"""What is shorter stands in nearly every text, and shows nothing."""

_SAME: Final = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u2039\u203a\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", None),
        "\u2026": "...",
        "\ufb00": "ff",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\ufb03": "ffi",
        "\ufb04": "ffl",
        "\ufb05": "st",
        "\ufb06": "st",
    }
)
_SOFT: Final = "\u00ad"
_HYPHENS: Final = ("-", _SOFT)
_GAP: Final = re.compile(r"(\s+)")
_WHOLE: Final = rf"(?<!\w)-?\d+(?:[.,]\d+)*|{WORD}"
_EDGE: Final = "\x1f"


def supported(quote: str, text: str) -> bool:
    """Tell whether a quote stands in a text. Capitals count, and words and numbers must be whole: 50 is not in 500.

    A hyphen at the end of a line may belong to the word or to the line: either reading will do.
    """
    return any(_stands(quote, text, kept) for kept in ("", "-"))


def _stands(quote: str, text: str, hyphen: str) -> bool:
    wanted = _plain(quote, hyphen)
    return len(wanted) >= SHORTEST and _edged(wanted) in _edged(_plain(text, hyphen))


def _edged(plain: str) -> str:
    """Mark where words and numbers begin and end, so that a part of one is not taken for it."""
    return re.sub(_WHOLE, lambda word: f"{_EDGE}{word[0]}{_EDGE}", plain.replace(_EDGE, " "))


def _plain(text: str, hyphen: str) -> str:
    """Write a text on one line, in plain characters; `hyphen` takes the place of one at a line's end."""
    words = _GAP.split(text.translate(_SAME).strip())
    parts: list[str] = []
    for word, gap, after in zip(words[::2], [*words[1::2], ""], [*words[2::2], ""], strict=True):
        if "\n" in gap and word[-1:] in _HYPHENS and word[-2:-1].isalpha() and after[:1].isalpha():
            parts.append(word[:-1] + (hyphen if word[-1] == "-" else ""))
        else:
            parts.append(word + " " * bool(gap))
    return "".join(parts).replace(_SOFT, "")

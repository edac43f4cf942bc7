"""Bytes as text, whoever wrote them: marks of byte order, wide letters, and the code pages of old."""

import codecs
import re
from typing import Final

from halter.core.text import clean

# The longer mark first: that of UTF-32 begins as that of UTF-16 does.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_LOOKED_AT: Final = 64 * 1024
_FEW: Final = 8
_ONE_IN: Final = 33


def decoded(data: bytes, declared: str = "") -> str | None:
    """Read bytes as text that any store can keep; None where they are none. `declared` is what they say they are."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _text(data[len(mark) :].decode(encoding, "replace"))
    for encoding in filter(None, (_wide(data), "utf-8", declared)):
        try:
            return _text(data.decode(encoding))
        except (UnicodeError, LookupError):
            continue
    return _text(_old(data))


def _text(text: str) -> str | None:
    """Refuse what is full of characters that no text has; the odd one is made visible."""
    beginning = text[:_LOOKED_AT]
    strange = sum(1 for _ in _CONTROL.finditer(beginning))
    return None if strange > max(_FEW, len(beginning) // _ONE_IN) else clean(text)


def _wide(data: bytes) -> str:
    """Tell UTF-16 without a mark by its zeros: where letters are plain, nearly every other byte is one."""
    beginning = data[:_LOOKED_AT]
    first, second = beginning[::2].count(0), beginning[1::2].count(0)
    if len(data) % 2 or max(first, second) * 4 < len(beginning) or min(first, second) * 20 > len(beginning):
        return ""
    return "utf-16-be" if first > second else "utf-16-le"


def _old(data: bytes) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")

"""The text of bytes in whatever encoding they have."""

import codecs
import re
from typing import Final

from halter.core.text import clean

# Longer marks first: the UTF-32 mark starts with the UTF-16 mark.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_INSPECTED_LENGTH: Final = 64 * 1024
_MIN_ALLOWED_CONTROLS: Final = 8
_CHARACTERS_PER_CONTROL: Final = 33


def decode_text(data: bytes, charset: str = "") -> str | None:
    """Decode bytes to text that every store can hold; None if they are not text. `charset` is a declared charset."""
    for byte_order_mark, encoding in _MARKS:
        if data.startswith(byte_order_mark):
            return _require_text(data[len(byte_order_mark) :].decode(encoding, "replace"))
    for encoding in filter(None, (_detect_utf16(data), "utf-8", charset)):
        try:
            return _require_text(data.decode(encoding))
        except (UnicodeError, LookupError):
            continue
    return _require_text(_decode_legacy(data))


def _require_text(text: str) -> str | None:
    """Make a few control characters visible; return None for a text with many of them."""
    beginning = text[:_INSPECTED_LENGTH]
    control_count = sum(1 for _ in _CONTROL.finditer(beginning))
    return (
        None if control_count > max(_MIN_ALLOWED_CONTROLS, len(beginning) // _CHARACTERS_PER_CONTROL) else clean(text)
    )


def _detect_utf16(data: bytes) -> str:
    """Detect UTF-16 without a byte order mark: in plain text nearly every second byte is zero."""
    beginning = data[:_INSPECTED_LENGTH]
    even_zeros, odd_zeros = beginning[::2].count(0), beginning[1::2].count(0)
    if (
        len(data) % 2
        or max(even_zeros, odd_zeros) * 4 < len(beginning)
        or min(even_zeros, odd_zeros) * 20 > len(beginning)
    ):
        return ""
    return "utf-16-be" if even_zeros > odd_zeros else "utf-16-le"


def _decode_legacy(data: bytes) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")

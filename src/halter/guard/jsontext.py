"""Changing the texts inside JSON without reading it as a whole.

Only the quotes are looked at: so numbers, order and keys that stand there twice stay as they were written, nothing is
too deep, and JSON that is cut off or wrong can be dealt with as well.
"""

import json
import re
from collections.abc import Callable
from typing import Final

import msgspec

from halter.core.text import to_body

Change = Callable[[str], str]

_LITERAL: Final = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)("|\\?\Z)', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_OPENINGS: Final = ("{", "[", '"')


def is_json(text: str) -> bool:
    """Tell whether a text is JSON with texts in it; what is nested too deeply to be read is none."""
    if not text.lstrip().startswith(_OPENINGS):
        return False
    try:
        msgspec.json.decode(to_body(text), type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def in_strings(text: str, change: Change, outside: Change, broken: Change) -> str:
    """Change every text of some JSON, and what stands outside of them; `broken` changes a text that cannot be read."""
    changed: list[str] = []
    at = 0
    for found in _LITERAL.finditer(text):
        changed += (outside(text[at : found.start()]), '"', _within(found[1], change, broken), found[2])
        at = found.end()
    return "".join((*changed, outside(text[at:])))


def _within(literal: str, change: Change, broken: Change) -> str:
    try:
        meant = str(json.loads(f'"{literal}"', strict=False))
    except ValueError:
        return broken(literal)
    changed = change(meant)
    return literal if changed == meant else escaped(changed)


def escaped(text: str) -> str:
    """Spell a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)[1:-1]

"""The strings of a text that is JSON, or looks like it."""

import json
import re
from typing import Final

import msgspec

from halter.core.text import encode_body
from halter.redaction.prompt_masker import ChangeText

_LITERAL: Final = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)("|\\?\Z)', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_OPENINGS: Final = ("{", "[", '"')


def is_json(text: str) -> bool:
    """Return True if a text is a JSON object, list or string. Too deeply nested text is not."""
    if not text.lstrip().startswith(_OPENINGS):
        return False
    try:
        msgspec.json.decode(encode_body(text), type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def change_json_strings(text: str, change: ChangeText, change_outside: ChangeText, change_broken: ChangeText) -> str:
    """Change every string in some JSON. `change_outside` gets the text between, `change_broken` unreadable strings."""
    changed_texts: list[str] = []
    at = 0
    for match in _LITERAL.finditer(text):
        changed_texts += (
            change_outside(text[at : match.start()]),
            '"',
            _change_literal(match[1], change, change_broken),
            match[2],
        )
        at = match.end()
    return "".join((*changed_texts, change_outside(text[at:])))


def _change_literal(literal: str, change: ChangeText, change_broken: ChangeText) -> str:
    try:
        decoded_text = str(json.loads(f'"{literal}"', strict=False))
    except ValueError:
        return change_broken(literal)
    changed_text = change(decoded_text)
    return literal if changed_text == decoded_text else escape_json_text(changed_text)


def escape_json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)[1:-1]

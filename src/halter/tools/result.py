"""What a tool gave, as text for a model: always text, and never more than was agreed."""

import base64
from typing import Any, Final

from halter.core.tools import Failed, Output

MAX_OUTPUT: Final = 10_000_000
"""How many characters or bytes of one result are kept unless a tool says otherwise."""

_WORD: Final = 4096
"""How far from a cut its edge is looked for: no key that a redactor must recognise is cut in two there."""


def to_output(result: Any, max_output: int) -> Output:
    """Turn what a function returned into an output."""
    if isinstance(result, Output):
        return Output(bounded(result.text, max_output), result.cost_micros, result.happened)
    return Output(to_text(result, max_output))


def to_text(result: Any, max_output: int) -> str:
    """Text stays as it is, bytes become text or base64, anything else JSON."""
    match result:
        case str():
            return bounded(result, max_output)
        case bytes() | bytearray():
            return bytes_to_text(bytes(result), max_output)
        case _:
            return bounded(_json(result), max_output)


def bytes_to_text(data: bytes, max_output: int) -> str:
    """Read bytes as text if they are text; otherwise say what they are, in base64."""
    if b"\0" not in data:
        try:
            return bounded(data.decode(), max_output)
        except UnicodeDecodeError:
            pass
    kept = data[: max_output * 3 // 4]
    left_out = f", the first {len(kept):,} of them" if len(kept) < len(data) else ""
    return f"[{len(data):,} bytes that are not text, in base64{left_out}]\n{base64.b64encode(kept).decode()}"


def bounded(text: str, max_output: int) -> str:
    """Keep the beginning and the end, and say in between how much is missing."""
    if len(text) <= max_output:
        return text
    half = max_output // 2
    return joined(text[:half], len(text) - 2 * half, text[len(text) - half :], "characters")


def joined(head: str, missing: int, tail: str, unit: str) -> str:
    """Put the two ends of a cut text together, both shortened to whole words."""
    first = max(head.rfind(space, max(0, len(head) - _WORD)) for space in " \n") + 1 or len(head)
    last = min((at for space in " \n" if (at := tail.find(space, 0, _WORD)) >= 0), default=0)
    missing += len(head) - first + last
    return f"{head[:first]}\n[{missing:,} {unit} are left out here]\n{tail[last:]}"


def _json(result: Any) -> str:
    from pydantic_core import to_json

    try:
        return to_json(result).decode()
    except (ValueError, TypeError) as error:
        raise Failed(type(error).__name__, f"the tool returned what cannot be written as JSON: {error}") from error

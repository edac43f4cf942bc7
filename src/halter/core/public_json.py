"""The public JSON of commands, the API, exports and receipts.

Amounts are dollars, as numbers. Public values hold them as Decimals, so that no digit is lost. The JSON of the journal
is in `core.codec`.
"""

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final, cast

import msgspec

_PUBLIC_ENCODER: Final = msgspec.json.Encoder(enc_hook=str, decimal_format="number")


def encode_public_json(value: object) -> bytes:
    """Encode a value. Raises UnicodeEncodeError for a lone surrogate."""
    return _PUBLIC_ENCODER.encode(value)


def encode_public_lines(values: Iterable[object]) -> bytes:
    """Encode each value on a separate line."""
    return _PUBLIC_ENCODER.encode_lines(values)


def to_public_builtins(value: object) -> Any:
    """Convert a value to builtins that encode to the same JSON."""
    return msgspec.to_builtins(value, enc_hook=str, builtin_types=(Decimal,))


def declare_decimal_numbers(schema: Any) -> Any:
    """Declare in a JSON Schema that a Decimal is a number."""
    match schema:
        case {"type": "string", "format": "decimal", **rest}:
            if "default" in rest:
                rest["default"] = float(rest["default"])
            return {**rest, "type": "number"}
        case dict():
            return {key: declare_decimal_numbers(item) for key, item in cast("dict[str, Any]", schema).items()}
        case list():
            return [declare_decimal_numbers(item) for item in cast("list[Any]", schema)]
        case _:
            return schema

"""JSON for programs outside: what commands, the API, exports and receipts print."""

from decimal import Decimal
from typing import Any, Final, cast

import msgspec

_PUBLIC_ENCODER: Final = msgspec.json.Encoder(enc_hook=str, decimal_format="number")


def encode_public_json(value: object) -> bytes:
    """Write a value. Raises UnicodeEncodeError where a text in it holds half a character."""
    return _PUBLIC_ENCODER.encode(value)


def to_public_builtins(value: object) -> Any:
    """Take a value apart into what `public_json` writes just as it would have written the value."""
    return msgspec.to_builtins(value, enc_hook=str, builtin_types=(Decimal,))


def declare_decimal_numbers(schema: Any) -> Any:
    """Let a JSON Schema say that a Decimal is written as a number, as `public_json` does."""
    match schema:
        case {"type": "string", "format": "decimal", **rest}:
            if "default" in rest:
                rest["default"] = float(rest["default"])
            return {**rest, "type": "number"}
        case dict():
            return {key: declare_decimal_numbers(each) for key, each in cast("dict[str, Any]", schema).items()}
        case list():
            return [declare_decimal_numbers(each) for each in cast("list[Any]", schema)]
        case _:
            return schema

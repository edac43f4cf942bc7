"""JSON Schemas of the files that people write, from the same types that the files are read by."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from halter.config.shape import other_names, written_as
from halter.config.words import WORDS
from halter.core.spec import AgentSpec, FleetSpec

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def fleet_schema() -> dict[str, Any]:
    """Describe `halter.yaml`."""
    return _titled("halter.yaml", FleetSpec)


def agent_schema() -> dict[str, Any]:
    """Describe `agent.yaml`."""
    return _titled("agent.yaml", AgentSpec)


def _titled(title: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$schema": DIALECT, "title": title, **_schema(inspect.type_info(kind))}


def _schema(kind: inspect.Type) -> dict[str, Any]:
    if word := written_as(kind):
        return {**WORDS[word].schema, "description": _described(kind) or f"Write {WORDS[word].expected}."}
    match kind:
        case inspect.Metadata():
            described = _described(kind)
            return {**_schema(kind.type), **({"description": described} if described else {})}
        case inspect.StructType():
            return _struct(kind)
        case inspect.DictType():
            least = {"minProperties": kind.min_length} if kind.min_length else {}
            return {"type": "object", "additionalProperties": _schema(kind.value_type), **_keys(kind.key_type), **least}
        case inspect.VarTupleType():
            return {"type": "array", "items": _schema(kind.item_type)}
        case inspect.UnionType():
            return {"anyOf": [_schema(member) for member in kind.types if not isinstance(member, inspect.NoneType)]}
        case inspect.LiteralType():
            return {"enum": list(kind.values)}
        case inspect.AnyType():
            return {}
        case _:
            return _leaf(kind)


def _described(kind: inspect.Type) -> str:
    """Read what the types say of a key, for editors to show."""
    extra: Any = getattr(kind, "extra_json_schema", None)
    return extra["description"] if extra and "description" in extra else ""


def _struct(kind: inspect.StructType) -> dict[str, Any]:
    properties = {field.encode_name: _schema(field.type) for field in kind.fields}
    also = {other: properties[own] for other, own in other_names(kind).items()}
    required = [field.encode_name for field in kind.fields if field.required]
    return {
        "type": "object",
        "description": (kind.cls.__doc__ or "").partition("\n")[0],
        "properties": properties | also,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _keys(kind: inspect.Type) -> Mapping[str, Any]:
    plain = isinstance(kind, inspect.StrType)
    return {} if plain else {"propertyNames": _schema(kind)}


def _leaf(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType() | inspect.FloatType():
            bounds = {"minimum": kind.ge, "maximum": kind.le}
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            return {"type": name, **{key: bound for key, bound in bounds.items() if bound is not None}}
        case inspect.DecimalType():
            return {"type": "number", "minimum": 0}
        case inspect.StrType():
            return {"type": "string", **({"minLength": kind.min_length} if kind.min_length else {})}
        case _:
            raise TypeError(f"{kind} cannot be written in YAML: give the key another type.")

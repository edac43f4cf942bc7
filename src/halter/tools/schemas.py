"""JSON Schemas that somebody else wrote: checked themselves first, and then never trusted with time or memory.

Nothing that a schema refers to is ever fetched. Checking arguments takes a bounded number of steps, whatever a schema
does, and only regular expressions that run in linear time. What would need more is left to the server, which checks
the arguments once more in any case.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final, NoReturn, cast

import msgspec

from halter.core.tools import Invalid, Valid
from halter.tools.arguments import canonical_json

MAX_SCHEMA: Final = 100_000
"""How many bytes a schema may have: every request to a model carries it."""

MAX_DEPTH: Final = 50
STEPS: Final = 100_000
"""How much one check may look at. An ordinary one looks at less than a hundred things."""

_FOLLOWED: Final = 20
"""What following a reference counts for: it takes so much longer than looking at a value."""

_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_TOLD: Final = 5
_SHOWN: Final = 120

# Comparing all elements with each other, and matching names with expressions that are not linear.
_LEFT_TO_SERVER: Final = frozenset({"uniqueItems"})
_LEFT_IF_NAMES_MATCH: Final = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties"})

_Rule = Callable[[Any, Any, Any, Any], Any]


class Unusable(msgspec.Struct, frozen=True):
    """A schema that cannot be used, and why, as the end of a sentence."""

    why: str


class TooCostly(Exception):
    """A check looked at more than it may. It never leaves this module."""


def compiled(schema: Any) -> "Checker | Unusable":
    """Make a checker of a schema, or say what is wrong with it."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        text = canonical_json(schema)
        flaw = _flaw(schema, text)
        if flaw:
            return Unusable(flaw)
        base: Any = cast("Any", validator_for)(schema, default=_newest())
        base.check_schema(schema)
    except SchemaError as error:
        return Unusable(f"its schema is not valid: {error.message[:_SHOWN]}")
    except (ValueError, TypeError, RecursionError) as error:
        return Unusable(f"its schema cannot be read: {str(error)[:_SHOWN]}")
    checker = Checker(schema, text, base)
    return Unusable("its schema leads back to itself without end") if checker.is_endless() else checker


class Checker:
    """Checks arguments against one schema. What is needed for that is made once."""

    def __init__(self, schema: Mapping[str, Any], text: bytes, base: Any) -> None:
        from jsonschema import validators
        from referencing import Registry

        self.text = text
        self._left = 0
        left = _LEFT_TO_SERVER | (_LEFT_IF_NAMES_MATCH if b'"patternProperties"' in text else frozenset[str]())
        rules = {**base.VALIDATORS, "pattern": _pattern, **dict.fromkeys(left, _unchecked)}
        counted = {name: self._counted(rule, _FOLLOWED if name in _REFERENCES else 1) for name, rule in rules.items()}
        kind: Any = cast("Any", validators).extend(base, counted)
        # A registry that is empty and has no way to fill itself: nothing is ever fetched.
        self._validator: Any = kind(schema, registry=cast("Any", Registry)())

    def is_endless(self) -> bool:
        """Tell whether not even the simplest arguments can be checked."""
        try:
            self._mistakes({})
        except (TooCostly, RecursionError):
            return True
        except _unfit():
            return False
        return False

    def validate(self, name: str, arguments: bytes) -> Valid | Invalid:
        """Check arguments as a model wrote them."""
        try:
            values = json.loads(arguments.strip() or b"{}", parse_constant=_refuse)
            if not isinstance(values, dict):
                return Invalid(f"The arguments of {name} must be an object.")
            canonical = canonical_json(values)
        except (ValueError, RecursionError) as error:
            return Invalid(f"The arguments of {name} cannot be read as JSON: {str(error)[:_SHOWN]}.")
        told = self._told(cast("dict[str, Any]", values))
        if told:
            return Invalid(f"The arguments of {name} do not fit. {told}")
        return Valid(cast("dict[str, Any]", values), canonical)

    def _told(self, values: dict[str, Any]) -> str:
        try:
            mistakes = self._mistakes(values)
        except (TooCostly, RecursionError):
            return "Its schema is too involved to check them against; simpler arguments may do."
        except _unfit() as error:
            return f"Its schema cannot be applied to them ({type(error).__name__})."
        left = len(mistakes) - _TOLD
        return "; ".join(mistakes[:_TOLD]) + (f"; and {left} more." if left > 0 else "." if mistakes else "")

    def _mistakes(self, values: dict[str, Any]) -> list[str]:
        self._left = STEPS
        return [_mistake(error) for error in self._validator.iter_errors(values)]

    def _counted(self, rule: _Rule, price: int) -> _Rule:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._left -= price + (len(cast("list[Any]", value)) if isinstance(value, list | dict) else 0)
            if self._left < 0:
                raise TooCostly
            return rule(validator, value, instance, schema)

        return counted


def _unfit() -> tuple[type[Exception], ...]:
    """List what applying a valid schema can still raise: references to nowhere, unknown types, numbers too large."""
    from jsonschema.exceptions import UndefinedTypeCheck, UnknownType
    from referencing.exceptions import Unresolvable

    return Unresolvable, UnknownType, UndefinedTypeCheck, LookupError, ValueError, TypeError, ArithmeticError


def _newest() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator


def _flaw(schema: Any, text: bytes) -> str:
    if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type") != "object":
        return 'its schema does not describe an object: its "type" must be "object"'
    if len(text) > MAX_SCHEMA:
        return f"its schema has {len(text):,} bytes, and {MAX_SCHEMA:,} are the most"
    for depth, key, value in _walked(cast("dict[str, Any]", schema)):
        if depth > MAX_DEPTH:
            return f"its schema is nested more than {MAX_DEPTH} deep"
        if key in _REFERENCES and isinstance(value, str) and not value.startswith("#"):
            return f"its schema refers to {value[:_SHOWN]!r}, and nothing outside of a schema is ever fetched"
    return ""


def _walked(schema: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Visit everything in a schema, with its depth and its key, without recursion."""
    waiting: list[tuple[int, str, Any]] = [(0, "", schema)]
    while waiting:
        depth, key, value = waiting.pop()
        yield depth, key, value
        match value:
            case dict():
                waiting += [(depth + 1, name, each) for name, each in cast("dict[str, Any]", value).items()]
            case list():
                waiting += [(depth + 1, "", each) for each in cast("list[Any]", value)]
            case _:
                pass


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
    """Match in linear time; an expression that cannot be matched so is left to the server."""
    from jsonschema import ValidationError

    re2: Any = import_module("re2")
    if not isinstance(instance, str):
        return
    options = re2.Options()
    options.log_errors = False
    try:
        fits = re2.compile(pattern, options).search(instance)
    except re2.error:
        return
    if not fits:
        yield ValidationError("does not match")


def _unchecked(_validator: Any, _value: Any, _instance: Any, _schema: Any) -> None:
    return None


def _mistake(error: Any) -> str:
    """Tell what is wrong and where, without what was sent: it may be large, and it may be private."""
    place = ".".join(str(step) for step in error.absolute_path)
    wanted = json.dumps(error.validator_value, ensure_ascii=False)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known: Mapping[str, Any] = error.schema.get("properties", {})
        extra = sorted(str(name)[:40] for name in cast("dict[str, Any]", error.instance) if name not in known)
        wanted = f"{wanted[:_SHOWN]}, but there is {', '.join(extra[:_TOLD])}"
    elif len(wanted) > _SHOWN:
        wanted = f"{wanted[:_SHOWN]}…"
    return f"{place}: {error.validator} is {wanted}" if place else f"{error.validator} is {wanted}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")

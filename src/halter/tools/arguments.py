"""What a function takes, compiled once from its signature: a JSON Schema for the model, a validator for its answers."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

from halter.core.errors import ConfigError
from halter.core.tools import Failed, Invalid, Permit, Valid, secret_names, with_secrets

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_TOLD: Final = 5
"""How many mistakes a model is told at once."""


class CallKey(str):
    """A parameter of this type is no argument: it gets the id of the call, the same whenever the call is repeated.

    A function hands it on as its idempotency key, so that the other side can tell a repetition from a new wish.
    """

    __slots__ = ()


DEPS: Final = object()
"""What marks a parameter that the program fills in."""

T = TypeVar("T")

Deps = Annotated[T, DEPS]
"""A parameter of the type `Deps[Bank]` is no argument: it gets what the program gave its agent as `deps`."""


class Arguments:
    """The arguments of one function."""

    def __init__(self, tool: str, function: Callable[..., Any]) -> None:
        from pydantic import ValidationError

        annotations = _annotations(tool, function)
        self._tool = tool
        self._mistaken = ValidationError
        self._keys = tuple(name for name, annotation in annotations.items() if annotation is CallKey)
        self.deps = tuple(name for name, annotation in annotations.items() if _is_given(annotation))
        others = (*self._keys, *self.deps)
        self._fields = {name: each for name, each in annotations.items() if name not in others}
        self._adapter = _compiled(tool, self._fields, inspect.signature(function))
        self.schema = json.dumps(self._adapter.json_schema()).encode()

    @property
    def names(self) -> frozenset[str]:
        """All parameters, whoever fills them in."""
        return frozenset((*self._fields, *self._keys, *self.deps))

    def validate(self, arguments: bytes) -> Valid | Invalid:
        """Check what a model wrote. Canonical are the arguments with their defaults, in one order of keys."""
        try:
            values = self._adapter.validate_json(arguments.strip() or b"{}")
            canonical = canonical_json(self._adapter.dump_python(values, mode="json"))
            # What a person agrees to must be what runs, and JSON has no word but null for what is not a number.
            if b"null" in canonical and self._adapter.validate_json(canonical) != values:
                return Invalid(f"The arguments of {self._tool} hold a number that is infinite or none at all.")
            return Valid(values, canonical)
        except self._mistaken as error:
            return Invalid(f"The arguments of {self._tool} do not fit. {_mistakes(error)}")
        except (ValueError, TypeError, RecursionError) as error:
            return Invalid(f"The arguments of {self._tool} cannot be written as JSON: {error}.")

    def filled(self, arguments: Valid, permit: Permit) -> Mapping[str, Any]:
        """Return what the function is called with: secrets in place of their names, and the call's id."""
        if secret_names(arguments.canonical):
            return self.read(self.revealed(arguments, permit), permit.id)
        return {**arguments.values, **dict.fromkeys(self._keys, CallKey(permit.id))}

    def revealed(self, arguments: Valid, permit: Permit) -> bytes:
        """Put secrets into the plain JSON, from where they reach arguments of every type."""
        try:
            return canonical_json(with_secrets(json.loads(arguments.canonical), permit.reveal))
        except KeyError as missing:
            raise Failed("UnknownSecret", f"{missing.args[0]} is no secret that this call may use.") from None

    def read(self, plain: bytes, key: str) -> Mapping[str, Any]:
        """Read plain JSON, which was valid before secrets came into it, for the function."""
        match self.validate(plain):
            case Valid(values):
                return {**values, **dict.fromkeys(self._keys, CallKey(key))}
            case Invalid(sentence):
                raise Failed("InvalidSecret", sentence)


def _is_given(annotation: Any) -> bool:
    return any(each is DEPS for each in getattr(annotation, "__metadata__", ()))


def canonical_json(value: Any) -> bytes:
    """Write JSON in the one form that equal values share."""
    return _CANONICAL(value).encode()


def _annotations(tool: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function, include_extras=True)
    annotations: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise ConfigError(
                f"The tool {tool} takes {parameter}, which no schema can describe: "
                "give each parameter a name and a type."
            )
        annotations[name] = hints.get(name, Any)
    return annotations


def _compiled(tool: str, fields: Mapping[str, Any], signature: inspect.Signature) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema
    from typing_extensions import TypedDict

    # Made while running, so that no type checker can follow; a model class would forbid some names to parameters.
    make: Any = TypedDict
    shape = make(tool, {name: _field(each, signature.parameters[name].default) for name, each in fields.items()})
    shape.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(shape)
        adapter.json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        raise ConfigError(f"A parameter of the tool {tool} has a type that cannot be described: {error}") from error
    return adapter


def _field(annotation: Any, default: Any) -> Any:
    from pydantic import Field

    return annotation if default is inspect.Parameter.empty else Annotated[annotation, Field(default=default)]


def _mistakes(error: "ValidationError") -> str:
    """Tell what is wrong and where, without what was sent: it may be large, and it may be private."""
    mistakes = error.errors(include_url=False, include_input=False, include_context=False)
    told = [f"{_place(mistake['loc'])}{mistake['msg']}" for mistake in mistakes[:_TOLD]]
    left = len(mistakes) - len(told)
    return "; ".join(told) + (f"; and {left} more." if left else ".")


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc)) + ": " if loc else ""

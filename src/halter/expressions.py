"""CEL expressions: compiled once, and evaluated without I/O."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

import msgspec

from halter.core.errors import ConfigError, require_module
from halter.core.text import clean, join_names

_TYPES: Final = frozenset(("bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"))
_LOOP_VARIABLE: Final = re.compile(r"\.(?:all|exists|exists_one|filter|map)\(\s*(\w+)\s*,")
_EVALUATION_ERRORS: Final = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


class _Program(Protocol):
    def execute(self, context: dict[str, Any]) -> Any: ...
    def variables(self) -> list[str]: ...


class EvaluationFailure(msgspec.Struct, frozen=True):
    """A failed evaluation: a value is missing, or values cannot be compared."""

    sentence: str


class Expression(msgspec.Struct, frozen=True):
    text: str
    program: _Program

    def value(self, context: Mapping[str, Any]) -> Any:
        """Evaluate the expression. The values must come from `to_cel_value`."""
        # Only the variables of the expression are passed, because each value is converted for each evaluation.
        values = {name: context[name] for name in self.program.variables() if name in context}
        try:
            return self.program.execute(values)
        except _EVALUATION_ERRORS as error:
            return EvaluationFailure(f"`{self.text}` cannot be evaluated: {clean(str(error)).partition('. Check')[0]}.")

    def holds(self, context: Mapping[str, Any]) -> bool:
        """Return whether the expression evaluates to exactly `true`."""
        return self.value(context) is True


def compile_expression(
    text: str, empty_values: Mapping[str, Any], location: str, noun: str = "condition", subject: str = "it"
) -> Expression:
    """Compile an expression over the names of `empty_values`, or raise a ConfigError that describes the error.

    `empty_values` has an empty value for each name; `location`, `noun` and `subject` are used in the message.
    """
    require_module("cel", "autonomy", f"{location}: the {noun} `{text}`")
    import cel

    try:
        program = cast("_Program", cel.compile(text))
    except ValueError as error:
        reason = str(error).partition("Syntax error: ")[2].partition("\n")[0] or "it cannot be read"
        raise ConfigError(f"{location}: the {noun} `{text}` is not a CEL expression: {reason}.") from None
    unknown = set(program.variables()) - {*empty_values, *_TYPES, *_LOOP_VARIABLE.findall(text)}
    if unknown:
        names = join_names(sorted(unknown))
        raise ConfigError(
            f"{location}: the {noun} `{text}` uses {names}, but {subject} has only {join_names(empty_values)}."
        )
    _trial_run(program, text, empty_values, location, noun)
    return Expression(text, program)


def _trial_run(program: _Program, text: str, empty_values: Mapping[str, Any], location: str, noun: str) -> None:
    """Reject errors that occur with any input, such as a function that does not exist."""
    try:
        program.execute(dict(empty_values))
    except RuntimeError as error:
        reason = str(error).partition(". Check")[0]
        raise ConfigError(f"{location}: the {noun} `{text}` cannot be evaluated: {reason}.") from None
    except (LookupError, TypeError, ValueError, ArithmeticError):
        # Expected with empty values: most expressions read fields that are missing.
        return


def to_cel_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {clean(str(key)): to_cel_value(item) for key, item in cast("Mapping[Any, Any]", value).items()}
        case list() | tuple():
            return [to_cel_value(item) for item in cast("Sequence[Any]", value)]
        case _:
            return clean(str(value))

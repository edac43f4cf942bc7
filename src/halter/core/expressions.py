"""Expressions that people write into files, in CEL: compiled once, and asked again and again without I/O."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

import msgspec

from halter.core.errors import ConfigError
from halter.core.text import clean, listed

_TYPES: Final = frozenset(("bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"))
_BOUND: Final = re.compile(r"\.(?:all|exists|exists_one|filter|map)\(\s*(\w+)\s*,")
_UNANSWERED: Final = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


class _Program(Protocol):
    def execute(self, context: dict[str, Any]) -> Any: ...
    def variables(self) -> list[str]: ...


class Unanswered(msgspec.Struct, frozen=True):
    """The expression asks for something that is not there, or compares what cannot be compared."""

    sentence: str


class Expression(msgspec.Struct, frozen=True):
    """A compiled expression."""

    text: str
    program: _Program

    def value(self, context: Mapping[str, Any]) -> Any:
        """Work it out; the values must be `plain`. What cannot be worked out is Unanswered."""
        # Each value is translated anew for each question, so that what is not asked for is left out.
        asked = {name: context[name] for name in self.program.variables() if name in context}
        try:
            return self.program.execute(asked)
        except _UNANSWERED as error:
            return Unanswered(f"`{self.text}` cannot be worked out: {clean(str(error)).partition('. Check')[0]}.")

    def holds(self, context: Mapping[str, Any]) -> bool:
        """Tell whether it is true, and not only something else than false."""
        return self.value(context) is True


def compiled(text: str, knows: Mapping[str, Any], place: str, noun: str = "condition", who: str = "it") -> Expression:
    """Compile an expression over some names, or raise a ConfigError that says what is wrong with it.

    `knows` holds an empty value for each name; `place`, `noun` and `who` are for the sentence.
    """
    import cel

    try:
        program = cast("_Program", cel.compile(text))
    except ValueError as error:
        told = str(error).partition("Syntax error: ")[2].partition("\n")[0] or "it cannot be read"
        raise ConfigError(f"{place}: the {noun} `{text}` is no CEL expression: {told}.") from None
    unknown = set(program.variables()) - {*knows, *_TYPES, *_BOUND.findall(text)}
    if unknown:
        names = listed(sorted(unknown))
        raise ConfigError(f"{place}: the {noun} `{text}` asks for {names}, but {who} knows only {listed(knows)}.")
    _try_out(program, text, knows, place, noun)
    return Expression(text, program)


def _try_out(program: _Program, text: str, knows: Mapping[str, Any], place: str, noun: str) -> None:
    """Find what is wrong with an expression whatever it is given, such as a function that does not exist."""
    try:
        program.execute(dict(knows))
    except RuntimeError as error:
        told = str(error).partition(". Check")[0]
        raise ConfigError(f"{place}: the {noun} `{text}` cannot be worked out: {told}.") from None
    except (LookupError, TypeError, ValueError, ArithmeticError):
        # Nothing is known yet, so that most conditions have nothing to look at.
        return


def plain(value: Any) -> Any:
    """Make a value one that an expression can look at, whatever it is."""
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {clean(str(key)): plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
        case list() | tuple():
            return [plain(each) for each in cast("Sequence[Any]", value)]
        case _:
            return clean(str(value))

"""Text: its form in the journal, its form in messages, and CEL expressions.

Any Python string can be stored. An expression is compiled once and evaluated without I/O.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from halter.core.errors import ConfigError, require_module

LAST_CHARACTER: Final = "\U0010ffff"
"""The last character in sort order: a prefix plus this character is an upper bound of all texts with the prefix."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def make_word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def expand_names(table: Mapping[str, T]) -> dict[str, T]:
    """Expand a table whose keys contain several names, separated by spaces, to a table of single names."""
    return {name: value for names, value in table.items() for name in names.split()}


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """Replace NUL and lone surrogates by visible characters, so that the text can be a fact.

    Facts are projected to text columns, and PostgreSQL cannot store NUL there; the JSON encoder cannot write a lone
    surrogate. Bodies keep such characters unchanged.
    """
    if (text.isascii() and "\x00" not in text) or _UNSTORABLE.search(text) is None:
        return text
    return _UNSTORABLE.sub(lambda match: "␀" if match[0] == "\x00" else "�", text)


def encode_body(text: str) -> bytes:
    """Encode any Python string, lone surrogates included, so that `decode_body` restores it exactly."""
    return text.encode("utf-8", "surrogatepass")


def count_bytes(text: str) -> int:
    """Return the length of a text as a body, in bytes."""
    return len(text) if text.isascii() else len(encode_body(text))


def decode_body(body: bytes) -> str:
    """Decode a body; invalid bytes are replaced instead of raising an error."""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body.decode("utf-8", "replace")


def describe_value(value: Any) -> str:
    """Describe a value for a message."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {shorten(value)!r}"
        case dict():
            return "a mapping"
        case _:
            return "a list"


def shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def to_one_line(name: str) -> str:
    """Format a name on one line, without control characters."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(name.split()))


_BLANK: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that are printable by their class but invisible."""


def escape_hidden(text: str) -> str:
    """Escape invisible, control and bidirectional characters as JSON does, for text on which a person decides."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _is_visible(each) else _escape(each) for each in text)


def _escape(character: str) -> str:
    """Escape a character with four digits per surrogate, so that a following digit is not part of the escape."""
    return json.dumps(character)[1:-1] if character > "\uffff" else f"\\u{ord(character):04x}"


def _is_visible(character: str) -> bool:
    return character == "\n" or (character.isprintable() and _BLANK.match(character) is None)


def join_names(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def suggest_nearest(name: str, candidates: Sequence[str], noun: str) -> str:
    """Return the end of a sentence about an unknown name: the nearest candidate, or all if none is surely meant."""
    from difflib import get_close_matches  # Loaded only where a mistake is reported.

    letters = sorted(name.casefold())
    anagrams = [candidate for candidate in candidates if sorted(candidate.casefold()) == letters]
    if sure := anagrams or get_close_matches(name, candidates, 1, 0.75):
        return f"did you mean `{sure[0]}`?"
    listing = f"{noun} are {join_names(candidates) or 'none'}."
    nearest = get_close_matches(name, candidates, 1, 0.6)
    return f"did you mean `{nearest[0]}`? {listing[0].upper()}{listing[1:]}" if nearest else listing


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 session, 2,000 sessions."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def describe_need_count(count: int, noun: str = "") -> str:
    """Describe how many things need a person. Every face says it in these words."""
    if not count:
        return "nothing needs you"
    return f"{format_count(count, noun) if noun else f'{count:,}'} {'needs' if count == 1 else 'need'} you"


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


def reject_unknown_options(options: Iterable[str], option_names: Iterable[str], noun: str) -> None:
    """Reject an unknown option, and suggest the nearest one."""
    names = sorted(option_names)
    for name in options:
        if name not in names:
            raise ConfigError(f"`{name}` is not an option of {noun}; {suggest_nearest(name, names, 'its options')}")


def write_out_options(options: type) -> Callable[[F], F]:
    """Have `help`, IDEs and notebooks show the keys of a TypedDict in place of a function's `**options`."""
    from inspect import Parameter, signature

    def show(function: F) -> F:
        plain = signature(function)
        written_out = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        written_out += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=annotation)
            for name, annotation in options.__annotations__.items()
        ]
        vars(function)["__signature__"] = plain.replace(parameters=written_out)
        return function

    return show

"""Any text is storable: how text enters and leaves the journal; words for messages; CEL expressions.

An expression is compiled once and evaluated without I/O.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from halter.core.errors import ConfigError

LAST_CHARACTER: Final = "\U0010ffff"
"""Sorts after every other character: prefix + this is an upper bound of all texts with the prefix."""

T = TypeVar("T")


def word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


def expand_names(table: Mapping[str, T]) -> dict[str, T]:
    """Make a table of single names from one whose keys hold several, separated by spaces."""
    return {name: value for names, value in table.items() for name in names.split()}


_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """Make text fit for a fact: visible stand-ins for NUL and for lone surrogates.

    Facts are projected into text columns, and PostgreSQL stores no NUL there; no JSON encoder of ours writes half a
    surrogate pair. Bodies keep such characters as they are.
    """
    if (text.isascii() and "\x00" not in text) or _UNSTORABLE.search(text) is None:
        return text
    return _UNSTORABLE.sub(lambda match: "␀" if match[0] == "\x00" else "�", text)


def to_body(text: str) -> bytes:
    """Encode any Python string, lone surrogates included, so that `from_body` restores it exactly."""
    return text.encode("utf-8", "surrogatepass")


def count_bytes(text: str) -> int:
    """How long a text is as a body."""
    return len(text) if text.isascii() else len(to_body(text))


def from_body(body: bytes) -> str:
    """Decode a body; invalid bytes become stand-ins rather than an error."""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body.decode("utf-8", "replace")


def describe_value(value: Any) -> str:
    """A short description of a value in a message."""
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
    """A name on one line, without control characters for a terminal."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(name.split()))


_BLANK: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Printable by their class, and yet nothing is seen of them."""


def escape_hidden(text: str) -> str:
    """Show what would be hidden, steer a terminal or turn the order of a line, as JSON does: a person decides on it."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if _is_seen(each) else _escape(each) for each in text)


def _escape(character: str) -> str:
    """Four digits for each half of a pair, so that no digit that follows can be taken for one of it."""
    return json.dumps(character)[1:-1] if character > "\uffff" else f"\\u{ord(character):04x}"


def _is_seen(character: str) -> bool:
    return character == "\n" or (character.isprintable() and _BLANK.match(character) is None)


def join_names(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def suggest_nearest(word: str, known: Sequence[str], what: str) -> str:
    """End a sentence about an unknown word with the nearest known ones."""
    from difflib import get_close_matches  # Loaded only where a mistake is reported.

    swapped = [one for one in known if sorted(one) == sorted(word)]
    close = swapped or get_close_matches(word, known, 1, 0.6)
    there = f"{what} are {join_names(known) or 'none'}."
    return f"did you mean `{close[0]}`? {there[0].upper()}{there[1:]}" if close else there


def format_count(number: int, noun: str) -> str:
    """A number with its noun: 1 session, 2,000 sessions."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_TYPES: Final = frozenset(("bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"))
_LOOP_VARIABLE: Final = re.compile(r"\.(?:all|exists|exists_one|filter|map)\(\s*(\w+)\s*,")
_EVALUATION_ERRORS: Final = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


class _Program(Protocol):
    def execute(self, context: dict[str, Any]) -> Any: ...
    def variables(self) -> list[str]: ...


class EvaluationFailure(msgspec.Struct, frozen=True):
    """The expression needs a missing value, or compares what cannot be compared."""

    sentence: str


class Expression(msgspec.Struct, frozen=True):
    text: str
    program: _Program

    def value(self, context: Mapping[str, Any]) -> Any:
        """Evaluate; the values must be `to_cel_value`'s."""
        # Each value is translated anew for each question, so that what is not asked for is left out.
        asked = {name: context[name] for name in self.program.variables() if name in context}
        try:
            return self.program.execute(asked)
        except _EVALUATION_ERRORS as error:
            return EvaluationFailure(
                f"`{self.text}` cannot be worked out: {clean(str(error)).partition('. Check')[0]}."
            )

    def holds(self, context: Mapping[str, Any]) -> bool:
        """Whether it is exactly true."""
        return self.value(context) is True


def compile_expression(
    text: str, knows: Mapping[str, Any], place: str, noun: str = "condition", who: str = "it"
) -> Expression:
    """Compile an expression over some names, or raise a ConfigError that says what is wrong with it.

    `knows` holds an empty value for each name; `place`, `noun` and `who` are for the sentence.
    """
    import cel

    try:
        program = cast("_Program", cel.compile(text))
    except ValueError as error:
        sentence = str(error).partition("Syntax error: ")[2].partition("\n")[0] or "it cannot be read"
        raise ConfigError(f"{place}: the {noun} `{text}` is no CEL expression: {sentence}.") from None
    unknown = set(program.variables()) - {*knows, *_TYPES, *_LOOP_VARIABLE.findall(text)}
    if unknown:
        names = join_names(sorted(unknown))
        raise ConfigError(f"{place}: the {noun} `{text}` asks for {names}, but {who} knows only {join_names(knows)}.")
    _trial_run(program, text, knows, place, noun)
    return Expression(text, program)


def _trial_run(program: _Program, text: str, knows: Mapping[str, Any], place: str, noun: str) -> None:
    """Find errors that no input avoids, such as a function that does not exist."""
    try:
        program.execute(dict(knows))
    except RuntimeError as error:
        sentence = str(error).partition(". Check")[0]
        raise ConfigError(f"{place}: the {noun} `{text}` cannot be worked out: {sentence}.") from None
    except (LookupError, TypeError, ValueError, ArithmeticError):
        # Nothing is known yet, so that most conditions have nothing to look at.
        return


def to_cel_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {clean(str(key)): to_cel_value(each) for key, each in cast("Mapping[Any, Any]", value).items()}
        case list() | tuple():
            return [to_cel_value(each) for each in cast("Sequence[Any]", value)]
        case _:
            return clean(str(value))


def reject_unknown_options(options: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse an unknown option, and name the nearest one."""
    names = sorted(known)
    for name in options:
        if name not in names:
            raise ConfigError(f"`{name}` is no option of {what}; {suggest_nearest(name, names, 'its options')}")

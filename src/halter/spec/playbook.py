"""A playbook: a list of calls whose arguments may refer to inputs and to the results of earlier steps.

`${steps.NAME.text}` is the output of a step, `${steps.NAME.json…}` a part of that output parsed as JSON, and
`${inputs.NAME}` an input. A reference that is a whole argument keeps its type; a reference inside a text is inserted
into the text. The result of a reference is never expanded again, so a tool's output cannot refer to anything.
`${secret:NAME}` is left unchanged, since the guard inserts secrets. Only the playbook itself may name a secret. A
result that would bring a secret's name into an argument is refused: otherwise a web page could make the playbook send
secrets to it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.core.text import describe_value, join_names, shorten

REFERENCE_PATTERN: Final = re.compile(r"\$\{([^{}]*)\}")
_SECRET_REFERENCE: Final = re.compile(r"\$\{\s*secret\s*:", re.IGNORECASE)
_INDEX: Final = re.compile(r"[0-9]{1,9}")


class Reference(msgspec.Struct, frozen=True):
    """A reference to an input, or to the text or JSON of an earlier step."""

    source: Literal["inputs", "text", "json"]
    name: str
    path: tuple[str, ...] = ()
    written: str = ""


class Step(msgspec.Struct, frozen=True):
    """One call. `arguments` is JSON as written, with its references."""

    call: str
    arguments: bytes
    name: str = ""
    line: int = 0

    @property
    def has_references(self) -> bool:
        """True if a part of the arguments is known only when the step runs."""
        return any(parse_reference(body) for body in REFERENCE_PATTERN.findall(self.arguments.decode()))


class Playbook(msgspec.Struct, frozen=True):
    """A list of calls to make in order; the cap applies to all of them together."""

    steps: tuple[Step, ...]
    file: str
    inputs: tuple[str, ...] = ()
    max_cost_usd: int | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.call for step in self.steps))


class Results(msgspec.Struct, frozen=True):
    """The values that references can name: the inputs, and the outputs of named steps."""

    inputs: Mapping[str, Any] = {}
    texts: Mapping[str, str] = {}

    def with_step(self, name: str, text: str) -> "Results":
        return Results(self.inputs, {**self.texts, name: text}) if name else self


class MissingReference(msgspec.Struct, frozen=True):
    """A reference without a value, described for the author of the playbook."""

    sentence: str


def parse_reference(body: str) -> Reference | None:
    match body.split("."):
        case ["inputs", name] if name:
            return Reference("inputs", name, (), body)
        case ["steps", name, "text"] if name:
            return Reference("text", name, (), body)
        case ["steps", name, "json", *path] if name and all(path):
            return Reference("json", name, tuple(path), body)
        case _:
            return None


class _UnresolvedReference(Exception):
    """Carries a sentence out of nested arguments; never leaves this module."""


def bind_arguments(step: Step, results: Results) -> bytes | MissingReference:
    """Insert inputs and earlier results into a step's arguments, as JSON for the guard."""
    try:
        return json.dumps(
            _fill_value(json.loads(step.arguments), lambda reference: _resolve_reference(reference, results)),
            separators=(",", ":"),
        ).encode()
    except _UnresolvedReference as error:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): {error}")
    except RecursionError:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): a result is nested too deeply.")


def _fill_value(value: Any, resolve: Callable[[Reference], Any]) -> Any:
    match value:
        case str():
            return _fill_text(value, resolve)
        case dict():
            return {key: _fill_value(item, resolve) for key, item in cast("dict[str, Any]", value).items()}
        case list():
            return [_fill_value(item, resolve) for item in cast("list[Any]", value)]
        case _:
            return value


def _fill_text(text: str, resolve: Callable[[Reference], Any]) -> Any:
    whole_match = REFERENCE_PATTERN.fullmatch(text)
    reference = parse_reference(whole_match[1]) if whole_match else None
    value = resolve(reference) if reference else REFERENCE_PATTERN.sub(lambda match: _fill_match(match, resolve), text)
    if _count_secrets(value) > _count_secrets(text):
        raise _UnresolvedReference(
            f"`{shorten(text)}` would insert the name of a secret; only the playbook itself may name secrets."
        )
    return value


def _count_secrets(value: Any) -> int:
    return len(_SECRET_REFERENCE.findall(value if isinstance(value, str) else json.dumps(value)))


def _fill_match(match: re.Match[str], resolve: Callable[[Reference], Any]) -> str:
    reference = parse_reference(match[1])
    if reference is None:
        return match[0]
    value = resolve(reference)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _resolve_reference(reference: Reference, results: Results) -> Any:
    if reference.source == "inputs":
        return _require_name(results.inputs, reference.name, reference.written, "the inputs")
    text = _require_name(results.texts, reference.name, reference.written, "the steps that gave a result")
    if reference.source == "text":
        return text
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise _UnresolvedReference(
            f"`${{{reference.written}}}` needs JSON, but the output of step `{reference.name}` is not JSON."
        ) from None
    for key in reference.path:
        value = _require_key(value, key, reference.written)
    return value


def _reject_constant(name: str) -> Any:
    """Reject NaN and Infinity, which Python parses and JSON does not have."""
    raise ValueError(name)


def _require_name(values: Mapping[str, Any], name: str, reference_text: str, noun: str) -> Any:
    value: Any | UnsetType = values.get(name, UNSET)
    if value is UNSET:
        raise _UnresolvedReference(
            f"`${{{reference_text}}}` does not exist; {noun} are {join_names(values) or 'none'}."
        )
    return value


def _require_key(value: Any, key: str, reference_text: str) -> Any:
    match value:
        case dict() if key in value:
            return cast("dict[str, Any]", value)[key]
        case dict():
            keys = list(cast("dict[str, Any]", value))[:10]
            raise _UnresolvedReference(
                f"`${{{reference_text}}}` does not exist: no key `{key}`, only {join_names(keys) or 'nothing'}."
            )
        case list() if _INDEX.fullmatch(key) and int(key) < len(cast("list[Any]", value)):
            return cast("list[Any]", value)[int(key)]
        case list():
            count = len(cast("list[Any]", value))
            raise _UnresolvedReference(
                f"`${{{reference_text}}}` does not exist: `{key}` is not an index of a list of {count} "
                "(counted from 0)."
            )
        case _:
            raise _UnresolvedReference(
                f"`${{{reference_text}}}` does not exist: no key can be read from {describe_value(value)}."
            )

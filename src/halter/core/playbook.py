"""Playbooks: a list of calls, whose arguments may refer to inputs and to the results of earlier steps.

`${steps.NAME.text}` is what a step gave, `${steps.NAME.json…}` a part of it read as JSON, `${inputs.NAME}` what the
playbook was started with. A reference that is a whole argument keeps its type; inside a text it is written into it.
What comes out of a reference is never searched for further references: a tool's output cannot refer to anything.
`${secret:NAME}` is left as it stands: secrets are put in behind the guard. Only the playbook itself may name one: a
result that would bring the name of a secret into an argument is refused, or a web page could have secrets sent to it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.core.text import listed, shorten, told

REFERENCE: Final = re.compile(r"\$\{([^{}]*)\}")
_OF_A_SECRET: Final = re.compile(r"\$\{\s*secret\s*:", re.IGNORECASE)
_INDEX: Final = re.compile(r"[0-9]{1,9}")


class Reference(msgspec.Struct, frozen=True):
    """A place where a value from elsewhere goes: an input, or an earlier step's text or JSON."""

    source: Literal["inputs", "text", "json"]
    name: str
    path: tuple[str, ...] = ()
    written: str = ""


class Step(msgspec.Struct, frozen=True):
    """One call. `arguments` is JSON as it was written, with its references in it."""

    call: str
    arguments: bytes
    name: str = ""
    line: int = 0


class Playbook(msgspec.Struct, frozen=True):
    """A list of calls to be made one after the other; a cap is on all of them together."""

    steps: tuple[Step, ...]
    file: str
    inputs: tuple[str, ...] = ()
    max_cost_usd: int | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        """List the tools that it calls, each once."""
        return tuple(dict.fromkeys(step.call for step in self.steps))


class Results(msgspec.Struct, frozen=True):
    """What is there to refer to: the inputs, and the texts that named steps gave."""

    inputs: Mapping[str, Any] = {}
    texts: Mapping[str, str] = {}

    def with_step(self, name: str, text: str) -> "Results":
        """Add what a step gave."""
        return Results(self.inputs, {**self.texts, name: text}) if name else self


class MissingReference(msgspec.Struct, frozen=True):
    """A reference that leads nowhere, as a sentence for whoever wrote the playbook."""

    sentence: str


def parse_reference(body: str) -> Reference | None:
    """Read what stands between the braces."""
    match body.split("."):
        case ["inputs", name] if name:
            return Reference("inputs", name, (), body)
        case ["steps", name, "text"] if name:
            return Reference("text", name, (), body)
        case ["steps", name, "json", *path] if name and all(path):
            return Reference("json", name, tuple(path), body)
        case _:
            return None


class _Nowhere(Exception):
    """Carries a sentence out of the depth of some arguments; it never leaves this module."""


def bound(step: Step, results: Results) -> bytes | MissingReference:
    """Put inputs and earlier results into a step's arguments, which come out as JSON for the guard."""
    try:
        return json.dumps(
            _filled(json.loads(step.arguments), lambda found: _value(found, results)), separators=(",", ":")
        ).encode()
    except _Nowhere as nowhere:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): {nowhere}")
    except RecursionError:
        return MissingReference(f"Step `{step.name or step.call}` (line {step.line}): a result is nested too deeply.")


def _filled(value: Any, look_up: Callable[[Reference], Any]) -> Any:
    match value:
        case str():
            return _filled_text(value, look_up)
        case dict():
            return {key: _filled(item, look_up) for key, item in cast("dict[str, Any]", value).items()}
        case list():
            return [_filled(item, look_up) for item in cast("list[Any]", value)]
        case _:
            return value


def _filled_text(text: str, look_up: Callable[[Reference], Any]) -> Any:
    whole = REFERENCE.fullmatch(text)
    found = parse_reference(whole[1]) if whole else None
    filled = look_up(found) if found else REFERENCE.sub(lambda match: _within(match, look_up), text)
    if _secrets_in(filled) > _secrets_in(text):
        raise _Nowhere(f"`{shorten(text)}` would bring in the name of a secret; only the playbook may name one.")
    return filled


def _secrets_in(value: Any) -> int:
    return len(_OF_A_SECRET.findall(value if isinstance(value, str) else json.dumps(value)))


def _within(match: re.Match[str], look_up: Callable[[Reference], Any]) -> str:
    found = parse_reference(match[1])
    if found is None:
        return match[0]
    value = look_up(found)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(found: Reference, results: Results) -> Any:
    if found.source == "inputs":
        return _member(results.inputs, found.name, found.written, "the inputs")
    text = _member(results.texts, found.name, found.written, "the steps that gave a result")
    if found.source == "text":
        return text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise _Nowhere(f"`${{{found.written}}}` needs JSON, but step `{found.name}` gave other text.") from None
    for key in found.path:
        value = _part(value, key, found.written)
    return value


def _no_number(written: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(written)


def _member(known: Mapping[str, Any], name: str, written: str, place: str) -> Any:
    value: Any | UnsetType = known.get(name, UNSET)
    if value is UNSET:
        raise _Nowhere(f"`${{{written}}}` is not there; {place} are {listed(known) or 'none'}.")
    return value


def _part(value: Any, key: str, written: str) -> Any:
    match value:
        case dict() if key in value:
            return cast("dict[str, Any]", value)[key]
        case dict():
            some = list(cast("dict[str, Any]", value))[:10]
            raise _Nowhere(f"`${{{written}}}` is not there: no `{key}`, only {listed(some) or 'nothing'}.")
        case list() if _INDEX.fullmatch(key) and int(key) < len(cast("list[Any]", value)):
            return cast("list[Any]", value)[int(key)]
        case list():
            count = len(cast("list[Any]", value))
            raise _Nowhere(f"`${{{written}}}` is not there: `{key}` is no place in a list of {count}, counted from 0.")
        case _:
            raise _Nowhere(f"`${{{written}}}` is not there: nothing is inside of {told(value)}.")

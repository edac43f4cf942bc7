"""Playbooks: a YAML list of calls, whose arguments may refer to inputs and to the results of earlier steps.

```yaml
- call: http__get
  with: {url: "https://example.com/${inputs.item}.json"}
  as: page
- call: files__write
  with: {path: price.txt, text: "${steps.page.json.offers.0.price}"}
```

`${steps.NAME.text}` is what a step gave, `${steps.NAME.json…}` a part of it read as JSON, `${inputs.NAME}` what the
playbook was started with. A reference that is a whole argument keeps its type; inside a text it is written into it.
What comes out of a reference is never searched for further references: a tool's output cannot refer to anything.
`${secret:NAME}` is left as it stands: secrets are put in behind the guard. Only the playbook itself may name one: a
result that would bring the name of a secret into an argument is refused, or a web page could have secrets sent to it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from halter.config.load import Document, KeyPath, Places, load_file
from halter.config.shape import listed, nearest, shorten, told

MAX_STEPS: Final = 1000

_REFERENCE: Final = re.compile(r"\$\{([^{}]*)\}")
_OF_A_SECRET: Final = re.compile(r"\$\{\s*secret\s*:", re.IGNORECASE)
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_KEYS: Final = ("call", "with", "as")
_FORMS: Final = "write ${inputs.NAME}, ${steps.NAME.text}, ${steps.NAME.json.PATH} or ${secret:NAME}"


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
    """A list of calls to be made one after the other."""

    steps: tuple[Step, ...]
    file: str
    inputs: tuple[str, ...] = ()

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


def read_playbook(path: Path, shown: str | None = None) -> Playbook:
    """Read a playbook's file."""
    return playbook_of(load_file(path, shown))


def playbook_of(document: Document) -> Playbook:
    """Read a playbook, or raise a ConfigError that says what to change."""
    places, value = document.places, document.value
    if not isinstance(value, list) or not value:
        raise places.wrong((), f"a playbook is a list of steps, each with a `call`, but this is {told(value)}.")
    written = cast("list[Any]", value)
    if len(written) > MAX_STEPS:
        raise places.wrong((MAX_STEPS,), f"a playbook has at most {MAX_STEPS} steps; split it.")
    steps: list[Step] = []
    inputs: dict[str, None] = {}
    for index, step in enumerate(written):
        steps.append(_step(step, places, (index,), [done.name for done in steps if done.name]))
        inputs |= dict.fromkeys(found.name for found in _found(step.get("with")) if found.source == "inputs")
    return Playbook(tuple(steps), places.file, tuple(inputs))


def _step(value: Any, places: Places, path: KeyPath, earlier: list[str]) -> Step:
    step = _checked(value, places, path)
    name, arguments = step.get("as", ""), step.get("with", {})
    if "as" in step and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise places.wrong((*path, "as"), f"`as` is {told(name)}, but must be a name of letters, digits, - and _.")
    if name in earlier:
        raise places.wrong((*path, "as"), f"an earlier step is called `{name}` already; choose another name.")
    if not isinstance(arguments, dict):
        raise places.wrong((*path, "with"), f"`with` is {told(arguments)}, but must be a mapping of arguments.")
    for at, text in _texts(cast("dict[str, Any]", arguments), (*path, "with")):
        for body in _REFERENCE.findall(text):
            _check_reference(body, places, at, earlier)
    line = places.lines.get(path, 0)
    return Step(step["call"], json.dumps(arguments, separators=(",", ":")).encode(), name, line)


def _checked(value: Any, places: Places, path: KeyPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise places.wrong(path, f"a step is a mapping with a `call`, but this is {told(value)}.")
    step = cast("dict[str, Any]", value)
    if "skill" in step:
        raise places.wrong((*path, "skill"), "steps with a `skill` are not supported by this version; write a `call`.")
    for key in step:
        if key not in _KEYS:
            raise places.wrong((*path, key), f"`{key}` is not a key of a step; {nearest(key, _KEYS, 'its keys')}")
    call = step.get("call")
    if not isinstance(call, str) or not call:
        raise places.wrong((*path, "call"), "a step needs a `call` that names a tool.")
    return step


def _check_reference(body: str, places: Places, path: KeyPath, earlier: list[str]) -> None:
    """Find what can be known to lead nowhere before anything runs."""
    if body.startswith("secret:"):
        return
    found = _parsed(body)
    if found is None:
        raise places.wrong(path, f"`${{{shorten(body)}}}` is not a reference; {_FORMS}.")
    if found.source != "inputs" and found.name not in earlier:
        hint = nearest(found.name, earlier, "the steps named before it")
        raise places.wrong(path, f"`${{{body}}}` refers to no earlier step; {hint}")


def _parsed(body: str) -> Reference | None:
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


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """List all texts in arguments with the way to each."""
    match value:
        case str():
            yield path, value
        case dict():
            for key, item in cast("dict[str, Any]", value).items():
                yield from _texts(item, (*path, key))
        case list():
            for index, item in enumerate(cast("list[Any]", value)):
                yield from _texts(item, (*path, index))
        case _:
            return


def _found(value: Any) -> Iterator[Reference]:
    for _, text in _texts(value, ()):
        yield from (found for body in _REFERENCE.findall(text) if (found := _parsed(body)) is not None)


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
    whole = _REFERENCE.fullmatch(text)
    found = _parsed(whole[1]) if whole else None
    filled = look_up(found) if found else _REFERENCE.sub(lambda match: _within(match, look_up), text)
    if _secrets_in(filled) > _secrets_in(text):
        raise _Nowhere(f"`{shorten(text)}` would bring in the name of a secret; only the playbook may name one.")
    return filled


def _secrets_in(value: Any) -> int:
    return len(_OF_A_SECRET.findall(value if isinstance(value, str) else json.dumps(value)))


def _within(match: re.Match[str], look_up: Callable[[Reference], Any]) -> str:
    found = _parsed(match[1])
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

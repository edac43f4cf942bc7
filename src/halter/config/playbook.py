"""Playbooks: a YAML list of calls, whose arguments may refer to inputs and to the results of earlier steps.

```yaml
- call: http__get
  with: {url: "https://example.com/${inputs.item}.json"}
  as: page
- call: files__write
  with: {path: price.txt, text: "${steps.page.json.offers.0.price}"}
```

Or a mapping with such a list under `steps`, and `max_cost_usd` for all of them together.

What a reference may be, and what comes of it, stands with `halter.core.playbook`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from halter.config.load import Document, KeyPath, Places, load_file
from halter.core.money import dollars
from halter.core.playbook import REFERENCE, Playbook, Reference, Step, parse_reference
from halter.core.text import nearest, shorten, told

MAX_STEPS: Final = 1000

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_KEYS: Final = ("call", "with", "as")
_BESIDE: Final = ("steps", "max_cost_usd")
MOST_DOLLARS: Final = 1_000_000
_FORMS: Final = "write ${inputs.NAME}, ${steps.NAME.text}, ${steps.NAME.json.PATH} or ${secret:NAME}"


def read_playbook(path: Path, shown: str | None = None) -> Playbook:
    """Read a playbook's file."""
    return playbook_of(load_file(path, shown))


def playbook_of(document: Document) -> Playbook:
    """Read a playbook, or raise a ConfigError that says what to change."""
    places = document.places
    above, value, cap = _steps(document)
    if not isinstance(value, list) or not value:
        raise places.wrong(above, f"a playbook is a list of steps, each with a `call`, but this is {told(value)}.")
    written = cast("list[Any]", value)
    if len(written) > MAX_STEPS:
        raise places.wrong((*above, MAX_STEPS), f"a playbook has at most {MAX_STEPS} steps; split it.")
    steps: list[Step] = []
    inputs: dict[str, None] = {}
    for index, step in enumerate(written):
        steps.append(_step(step, places, (*above, index), [done.name for done in steps if done.name]))
        inputs |= dict.fromkeys(found.name for found in _found(step.get("with")) if found.source == "inputs")
    return Playbook(tuple(steps), places.file, tuple(inputs), cap)


def _steps(document: Document) -> tuple[KeyPath, Any, int | None]:
    """Find the steps, and the cap that may stand beside them."""
    whole: Any = document.value
    if not isinstance(whole, dict) or "steps" not in whole:
        return (), cast("Any", whole), None
    value, places = cast("dict[str, Any]", whole), document.places
    for key in value:
        if key not in _BESIDE:
            raise places.wrong(
                (key,), f"`{shorten(key)}` is unknown; {nearest(key, _BESIDE, 'the keys of a playbook')}"
            )
    cap = value.get("max_cost_usd")
    if cap is None:
        return ("steps",), value["steps"], None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < MOST_DOLLARS:
        raise places.wrong(("max_cost_usd",), f"`max_cost_usd` is {told(cap)}, but must be an amount, as in 0.50.")
    return ("steps",), value["steps"], dollars(cap)


def _step(value: Any, places: Places, path: KeyPath, earlier: list[str]) -> Step:
    step = _checked(value, places, path)
    name, arguments = step.get("as", ""), step.get("with", {})
    if "as" in step and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise places.wrong((*path, "as"), f"`as` is {told(name)}, but must be a name of letters, digits, - and _.")
    if name in earlier:
        raise places.wrong((*path, "as"), f"an earlier step is called `{name}` already; choose another name.")
    if not isinstance(arguments, dict):
        raise places.wrong((*path, "with"), f"`with` is {told(arguments)}, but must be a mapping of arguments.")
    for at, text in texts(cast("dict[str, Any]", arguments), (*path, "with")):
        for body in REFERENCE.findall(text):
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
    found = parse_reference(body)
    if found is None:
        raise places.wrong(path, f"`${{{shorten(body)}}}` is not a reference; {_FORMS}.")
    if found.source != "inputs" and found.name not in earlier:
        hint = nearest(found.name, earlier, "the steps named before it")
        raise places.wrong(path, f"`${{{body}}}` refers to no earlier step; {hint}")


def texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """List all texts in arguments with the way to each."""
    match value:
        case str():
            yield path, value
        case dict():
            for key, item in cast("dict[str, Any]", value).items():
                yield from texts(item, (*path, key))
        case list():
            for index, item in enumerate(cast("list[Any]", value)):
                yield from texts(item, (*path, index))
        case _:
            return


def _found(value: Any) -> Iterator[Reference]:
    for _, text in texts(value, ()):
        yield from (found for body in REFERENCE.findall(text) if (found := parse_reference(body)) is not None)

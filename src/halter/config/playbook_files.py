"""Playbooks: a YAML list of calls, or a mapping with such a list under `steps` and a `max_cost_usd` for all of them.

```yaml
- call: http__get
  arguments: {url: "https://example.com/${inputs.item}.json"}
  as: page
- call: files__write
  arguments: {path: price.txt, text: "${steps.page.json.offers.0.price}"}
```

`halter.spec.playbook` defines the references.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from halter.config.yaml_reader import Document, KeyPath, SourceMap, load_file
from halter.core.money import usd_to_micros
from halter.core.text import describe_value, shorten, suggest_nearest
from halter.spec.playbook import REFERENCE_PATTERN, Playbook, Reference, Step, parse_reference

MAX_STEPS: Final = 1000
_STEP_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_STEP_KEYS: Final = ("call", "arguments", "as")
_FORMER_STEP_KEY: Final = "with"
"""The former name of `arguments`."""
_PLAYBOOK_KEYS: Final = ("steps", "max_cost_usd")
MAX_DOLLARS: Final = 1_000_000
_REFERENCE_FORMS: Final = "write ${inputs.NAME}, ${steps.NAME.text}, ${steps.NAME.json.PATH} or ${secret:NAME}"


def read_playbook(path: Path, display_name: str | None = None) -> Playbook:
    return parse_playbook(load_file(path, display_name))


def parse_playbook(document: Document) -> Playbook:
    source_map = document.source_map
    list_path, value, cap = _steps(document)
    if not isinstance(value, list) or not value:
        raise source_map.error_at(
            list_path, f"a playbook is a list of steps, each with a `call`, but this is {describe_value(value)}."
        )
    if len(cast("list[Any]", value)) > MAX_STEPS:
        raise source_map.error_at((*list_path, MAX_STEPS), f"a playbook has at most {MAX_STEPS} steps; split it.")
    items = [
        _rename_former_key(item, source_map, (*list_path, index)) for index, item in enumerate(cast("list[Any]", value))
    ]
    steps: list[Step] = []
    inputs: dict[str, None] = {}
    for index, step in enumerate(items):
        steps.append(_step(step, source_map, (*list_path, index), [earlier.name for earlier in steps if earlier.name]))
        inputs |= dict.fromkeys(
            reference.name for reference in _list_references(step.get("arguments")) if reference.source == "inputs"
        )
    return Playbook(tuple(steps), source_map.file, tuple(inputs), cap)


def _steps(document: Document) -> tuple[KeyPath, Any, int | None]:
    content: Any = document.value
    if not isinstance(content, dict) or "steps" not in content:
        return (), cast("Any", content), None
    mapping, source_map = cast("dict[str, Any]", content), document.source_map
    for key in mapping:
        if key not in _PLAYBOOK_KEYS:
            raise source_map.error_at(
                (key,),
                f"`{shorten(key)}` is not a key of a playbook; {suggest_nearest(key, _PLAYBOOK_KEYS, 'its keys')}",
            )
    cap = mapping.get("max_cost_usd")
    if cap is None:
        return ("steps",), mapping["steps"], None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < MAX_DOLLARS:
        raise source_map.error_at(
            ("max_cost_usd",), f"`max_cost_usd` is {describe_value(cap)}, but must be an amount, as in 0.50."
        )
    return ("steps",), mapping["steps"], usd_to_micros(cap)


def _step(value: Any, source_map: SourceMap, path: KeyPath, earlier: list[str]) -> Step:
    step = _check_step(value, source_map, path)
    name, arguments = step.get("as", ""), step.get("arguments", {})
    if "as" in step and not (isinstance(name, str) and _STEP_NAME.fullmatch(name)):
        raise source_map.error_at(
            (*path, "as"), f"`as` is {describe_value(name)}, but must be a name of letters, digits, - and _."
        )
    if name in earlier:
        raise source_map.error_at((*path, "as"), f"an earlier step is already called `{name}`; choose another name.")
    if not isinstance(arguments, dict):
        raise source_map.error_at(
            (*path, "arguments"), f"`arguments` is {describe_value(arguments)}, but must be a mapping of arguments."
        )
    for at, text in list_texts(cast("dict[str, Any]", arguments), (*path, "arguments")):
        for body in REFERENCE_PATTERN.findall(text):
            _check_reference(body, source_map, at, earlier)
    line = source_map.lines.get(path, 0)
    return Step(step["call"], json.dumps(arguments, separators=(",", ":")).encode(), name, line)


def _rename_former_key(item: Any, source_map: SourceMap, path: KeyPath) -> Any:
    if not isinstance(item, dict) or _FORMER_STEP_KEY not in item:
        return cast("Any", item)
    if "arguments" in item:
        sentence = f"`{_FORMER_STEP_KEY}` and `arguments` are two names of one key; keep one of them."
        raise source_map.error_at((*path, _FORMER_STEP_KEY), sentence)
    source_map.rename(path, _FORMER_STEP_KEY, "arguments")
    step = cast("dict[str, Any]", item)
    return {"arguments" if key == _FORMER_STEP_KEY else key: value for key, value in step.items()}


def _check_step(value: Any, source_map: SourceMap, path: KeyPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise source_map.error_at(path, f"a step is a mapping with a `call`, but this is {describe_value(value)}.")
    step = cast("dict[str, Any]", value)
    if "skill" in step:
        raise source_map.error_at(
            (*path, "skill"), "steps with a `skill` are not supported by this version; write a `call`."
        )
    for key in step:
        if key not in _STEP_KEYS:
            raise source_map.error_at(
                (*path, key), f"`{key}` is not a key of a step; {suggest_nearest(key, _STEP_KEYS, 'its keys')}"
            )
    call = step.get("call")
    if not isinstance(call, str) or not call:
        raise source_map.error_at((*path, "call"), "a step needs a `call` that names a tool.")
    return step


def _check_reference(body: str, source_map: SourceMap, path: KeyPath, earlier: list[str]) -> None:
    if body.startswith("secret:"):
        return
    reference = parse_reference(body)
    if reference is None:
        raise source_map.error_at(path, f"`${{{shorten(body)}}}` is not a reference; {_REFERENCE_FORMS}.")
    if reference.source != "inputs" and reference.name not in earlier:
        hint = suggest_nearest(reference.name, earlier, "the steps named before it")
        raise source_map.error_at(path, f"`${{{body}}}` does not refer to an earlier step; {hint}")


def list_texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    match value:
        case str():
            yield path, value
        case dict():
            for key, item in cast("dict[str, Any]", value).items():
                yield from list_texts(item, (*path, key))
        case list():
            for index, item in enumerate(cast("list[Any]", value)):
                yield from list_texts(item, (*path, index))
        case _:
            return


def _list_references(value: Any) -> Iterator[Reference]:
    for _, text in list_texts(value, ()):
        yield from (
            reference for body in REFERENCE_PATTERN.findall(text) if (reference := parse_reference(body)) is not None
        )
